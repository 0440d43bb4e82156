"""ldconfig in its sandbox, on roots that images could have; and a probe in its place that tells what it can do."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import time

import pytest
from support import machine
from support.machine import LOADER

from ocigpu.core.errors import ApplyError
from ocigpu.core.settings import Settings
from ocigpu.provision import ldconfig
from ocigpu.provision.ldconfig import find_ldconfig, open_ldconfig, start_ldconfig
from ocigpu.system import libc

HOST_LDCONFIG = find_ldconfig(Settings())


def run_ldconfig(fd, root_fd, directories, uid, gid):
    """Have the cache written; return "" or a warning of one line."""
    started = start_ldconfig(fd, root_fd, directories, uid, gid)
    started.go()
    try:
        return started.finish()
    finally:
        os.waitpid(started.pid, 0)


LIBDIR = "/usr/lib64"
HERE = os.path.dirname(__file__)


def in_child(function):
    """Run a function in a forked child with a mount namespace of its own; return what it returned (JSON)."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            libc.unshare(libc.CLONE_NEWNS)
            libc.mount(None, "/", None, libc.MS_REC | libc.MS_PRIVATE)
            answer = json.dumps({"value": function()})
        except BaseException as error:  # noqa: BLE001 - handed to the parent
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        os.write(write_fd, answer.encode())
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as file:
        answer = json.loads(file.read())
    os.waitpid(pid, 0)
    assert "error" not in answer, answer["error"]
    return answer["value"]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Two tiny shared libraries whose file names say nothing of their SONAMEs."""
    directory = tmp_path_factory.mktemp("libraries")
    for name in ("one", "two"):
        source = directory / f"{name}.c"
        source.write_text(f"int {name}(void) {{ return 1; }}\n")
        command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,lib{name}.so.1", "-o", f"{directory}/lib{name}.so.1.5"]
        subprocess.run([*command, source], check=True)
    return directory


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    path = tmp_path_factory.mktemp("probe") / "probe"
    subprocess.run(["gcc", "-static", "-O1", "-Wall", "-Werror", "-o", path, f"{HERE}/sandbox_probe.c"], check=True)
    return str(path)


@pytest.fixture
def root(tmp_path, libraries):
    path = tmp_path / "root"
    for name in ("etc", "proc", "sys", "dev", "sbin", "var/cache/ldconfig", LIBDIR[1:]):
        (path / name).mkdir(parents=True)
    shutil.copy("/usr/bin/busybox", path / "sbin/busybox")
    for name in ("one", "two"):
        shutil.copy(libraries / f"lib{name}.so.1.5", path / LIBDIR[1:])
    return path


def refresh(root, program=HOST_LDCONFIG, directories=(LIBDIR,), uid=0, gid=0):
    """Run a program as ldconfig for a root; return its warning, or the error's text."""

    def body():
        fd = open_ldconfig(program)
        root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
        before = machine.own_mounts()
        try:
            warning = run_ldconfig(fd, root_fd, tuple(directories), uid, gid)
        except ApplyError as error:
            warning = f"{error.code}: {error.message}"
        assert machine.own_mounts() == before
        return warning

    return in_child(body)


def cached(root):
    """Return what the host's ldconfig reads in a root's cache: {SONAME: path}."""
    command = [HOST_LDCONFIG, "-p", "-C", f"{root}/etc/ld.so.cache"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[0]: line.split()[-1] for line in output.splitlines() if "=>" in line}


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


# -- the program -------------------------------------------------------------------------------------------------


def test_the_setting_names_the_program():
    assert find_ldconfig(Settings(ldconfig="/opt/ldconfig")) == "/opt/ldconfig"


def test_a_script_in_the_place_of_ldconfig_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "script").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "program").write_bytes(b"\x7fELF")
    candidates = [str(tmp_path / name) for name in ("missing", "script", "script/x", "program")]
    monkeypatch.setattr(ldconfig, "CANDIDATES", candidates)
    assert find_ldconfig(Settings()) == candidates[-1]
    monkeypatch.setattr(ldconfig, "CANDIDATES", candidates[:2])
    assert find_ldconfig(Settings()) == ""


def elf(*headers):
    table = b"".join(struct.pack("<I", kind).ljust(56, b"\0") for kind in headers)
    sizes = struct.pack("<HH", 56, len(headers))
    return b"\x7fELF\x02\x01".ljust(32, b"\0") + struct.pack("<Q", 64) + bytes(14) + sizes + bytes(6) + table


REFUSED = [
    ("script", b"#!/bin/sh\n", "a script, not a program"),
    ("text", b"hello", "not a 64-bit ELF program"),
    ("short", b"\x7fELF\x02\x01", "not a 64-bit ELF program"),
    ("dynamic", elf(1, 3), "dynamically linked: it would be started by the image's loader"),
    ("headers elsewhere", elf(1)[:56] + b"\xff\xff" + elf(1)[58:], "its program headers are out of the first 64 KiB"),
]


@pytest.mark.parametrize(("content", "cause"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_is_no_static_program_is_refused(tmp_path, content, cause):
    path = tmp_path / "ldconfig"
    path.write_bytes(content)
    with pytest.raises(ApplyError) as caught:
        open_ldconfig(str(path))
    assert caught.value.code == "OCIGPU-LD-1"
    assert caught.value.message == f"{path}: {cause}"


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo", "huge"])
def test_what_is_no_file_of_a_programs_size_is_refused(tmp_path, kind):
    path = tmp_path / "ldconfig"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "huge":
        with open(path, "wb") as file:
            file.truncate(17 << 20)
    with pytest.raises(ApplyError) as caught:
        open_ldconfig(str(path))
    cause = f"openat {path}: No such file or directory" if kind == "missing" else "not a regular file of at most 16 MiB"
    assert caught.value.message == f"copy {path}: {cause}"


def test_the_copy_is_equal_sealed_and_executable_by_all():
    fd = open_ldconfig(HOST_LDCONFIG)
    with open(HOST_LDCONFIG, "rb") as file:
        assert os.pread(fd, 1 << 24, 0) == file.read()
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.truncate(fd, 0)
    assert os.fstat(fd).st_mode & 0o7777 == 0o111
    assert not os.get_inheritable(fd)
    os.close(fd)


# -- roots -------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_the_cache_lists_the_libraries_by_soname(root):
    assert refresh(root) == ""
    assert cached(root) == {"libone.so.1": f"{LIBDIR}/libone.so.1", "libtwo.so.1": f"{LIBDIR}/libtwo.so.1"}
    assert not os.path.lexists(f"{root}{LIBDIR}/libone.so.1")  # links are the plan's business
    assert os.listdir(root / "var/cache/ldconfig") == []


@pytest.mark.root
def test_the_images_own_configuration_is_kept(root, libraries):
    (root / "opt").mkdir()
    (root / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    (root / "etc/ld.so.conf.d").mkdir()
    (root / "etc/ld.so.conf.d/own.conf").write_text("/opt\n")
    shutil.move(root / LIBDIR[1:] / "libtwo.so.1.5", root / "opt")
    assert refresh(root) == ""
    assert cached(root) == {"libone.so.1": f"{LIBDIR}/libone.so.1", "libtwo.so.1": "/opt/libtwo.so.1"}


@pytest.mark.root
def test_the_containers_root_user_may_be_any_user(root):
    for path in (root, root / "etc"):
        os.chown(path, 100000, 100000)
    assert refresh(root, uid=100000, gid=100000) == ""
    status = os.stat(root / "etc/ld.so.cache")
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (100000, 100000, 0o644)


@pytest.mark.root
@pytest.mark.parametrize("known_calls", ["open_tree", "mount(2) only"])
def test_a_root_that_is_a_mount_point_works_on_every_kernel(root, known_calls, monkeypatch):
    def body():
        libc.mount(str(root), str(root), None, libc.MS_BIND | libc.MS_REC)
        if known_calls != "open_tree":
            libc.open_tree = missing
        fd = open_ldconfig(HOST_LDCONFIG)
        return run_ldconfig(fd, os.open(root, os.O_PATH | os.O_DIRECTORY), (LIBDIR,), 0, 0)

    def missing(*_):
        raise OSError(38, "Function not implemented")

    assert in_child(body) == ""
    assert set(cached(root)) == {"libone.so.1", "libtwo.so.1"}


@pytest.mark.root
@pytest.mark.parametrize("known_calls", ["open_tree", "mount(2) only"])
def test_a_root_that_is_the_namespaces_root_already_works(root, known_calls):
    def body():
        fd = open_ldconfig(HOST_LDCONFIG)
        libc.mount(str(root), str(root), None, libc.MS_BIND | libc.MS_REC)
        os.chdir(root)
        libc.pivot_root(".", ".")
        libc.umount2(".", libc.MNT_DETACH)
        os.chdir("/")
        if known_calls != "open_tree":
            libc.open_tree = missing
        return run_ldconfig(fd, os.open("/", os.O_PATH | os.O_DIRECTORY), (LIBDIR,), 0, 0)

    def missing(*_):
        raise OSError(38, "Function not implemented")

    assert in_child(body) == ""
    assert set(cached(root)) == {"libone.so.1", "libtwo.so.1"}


@pytest.mark.root
def test_it_works_in_a_user_namespace_without_rights_over_the_host(root):
    for path in (root, root / "etc"):
        os.chown(path, 65534, 65534)

    def body():
        fd = open_ldconfig(HOST_LDCONFIG)
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        libc.prctl(libc.PR_SET_DUMPABLE, 1)
        libc.unshare(libc.CLONE_NEWUSER | libc.CLONE_NEWNS)
        for name, text in (("setgroups", "deny"), ("uid_map", "0 65534 1"), ("gid_map", "0 65534 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        libc.mount(None, "/", None, libc.MS_REC | libc.MS_PRIVATE)
        return run_ldconfig(fd, os.open(root, os.O_PATH | os.O_DIRECTORY), (LIBDIR,), 0, 0)

    machine.let_others_in(root.parent)
    assert in_child(body) == ""
    assert set(cached(root)) == {"libone.so.1", "libtwo.so.1"}


# -- hostile images ----------------------------------------------------------------------------------------------


@pytest.fixture
def marker(tmp_path):
    path = tmp_path / "marker"
    path.write_text("host")
    yield path
    assert path.read_text() == "host"
    assert sorted(os.listdir(tmp_path)) == ["marker", "root"]


@pytest.mark.root
@pytest.mark.parametrize("name", ["ld.so.cache", "ld.so.cache~"])
def test_a_cache_that_is_a_link_to_a_file_of_the_host_leaves_that_file_alone(root, marker, name):
    os.symlink(marker, root / "etc" / name)
    before = os.stat(marker)
    refresh(root)
    after = os.stat(marker)
    assert (after.st_mtime_ns, after.st_ino, after.st_mode) == (before.st_mtime_ns, before.st_ino, before.st_mode)


@pytest.mark.root
def test_an_etc_that_leads_out_of_the_root_leads_nowhere(root, marker):
    outside = marker.parent
    (root / "etc").rmdir()
    os.symlink("../../../.." + str(outside), root / "etc")
    warning = refresh(root)
    assert warning.startswith("ldconfig: exit 1: ")
    assert not os.path.lexists(outside / "ld.so.cache")


@pytest.mark.root
def test_the_images_own_ldconfig_and_loader_are_never_executed(root, marker):
    for name in ("sbin/ldconfig", "sbin/ldconfig.real", f"usr/lib64/{LOADER}"):
        (root / name).write_text("#!/sbin/busybox sh\necho ran > /etc/ran\n")
        (root / name).chmod(0o755)
    refresh(root)
    assert not (root / "etc/ran").exists()
    assert set(cached(root)) >= {"libone.so.1", "libtwo.so.1"}


@pytest.mark.root
def test_configuration_that_includes_files_of_proc_tells_nothing(root, marker):
    (root / "etc/ld.so.conf").write_text("include /proc/self/maps\ninclude /proc/1/root/etc/*\n/proc/self/root/lib\n")
    assert refresh(root) == ""
    assert set(cached(root)) == {"libone.so.1", "libtwo.so.1"}


@pytest.mark.root
def test_a_sparse_configuration_of_1_gib_ends_within_the_limits(root, marker):
    with open(root / "etc/ld.so.conf", "wb") as file:
        file.truncate(1 << 30)
    warning = refresh(root)
    assert warning == "" or warning.startswith("ldconfig: ")
    assert not os.path.exists(root / "etc/ld.so.cache") or os.stat(root / "etc/ld.so.cache").st_size <= 4 << 20


@pytest.mark.root
@pytest.mark.parametrize("name", ["ld.so.conf", "ld.so.cache"])
def test_a_directory_in_the_place_of_a_file_is_a_warning_at_most(root, marker, name):
    (root / "etc" / name).mkdir()
    warning = refresh(root)
    assert "\n" not in warning
    assert warning == "" or warning.startswith("ldconfig: exit 1: ")


@pytest.mark.root
def test_malformed_libraries_do_not_keep_the_others_out(root, marker):
    good = (root / LIBDIR[1:] / "libone.so.1.5").read_bytes()
    for position in range(0, 200, 4):
        broken = good[:position] + b"\xff\xff\xff\xff" + good[position + 4 :]
        (root / LIBDIR[1:] / f"libbad{position}.so").write_bytes(broken)
    (root / LIBDIR[1:] / "libempty.so").write_bytes(b"")
    (root / LIBDIR[1:] / "libshort.so").write_bytes(good[:70])
    warning = refresh(root)
    if warning == "":
        assert {"libone.so.1", "libtwo.so.1"} <= set(cached(root))
    else:
        assert warning.startswith("ldconfig: ")


@pytest.mark.root
def test_a_pipe_as_configuration_does_not_hang(root, marker, monkeypatch):
    os.mkfifo(root / "etc/ld.so.conf")
    monkeypatch.setattr(ldconfig, "DEADLINE", 0.5)
    assert refresh(root) == "ldconfig was stopped after 0 s; the container's loader uses the links alone"


@pytest.mark.root
def test_the_hosts_ldconfig_is_the_same_afterwards(root):
    before = digest(HOST_LDCONFIG), os.stat(HOST_LDCONFIG).st_mtime_ns
    refresh(root)
    assert (digest(HOST_LDCONFIG), os.stat(HOST_LDCONFIG).st_mtime_ns) == before


# -- the fence, seen from inside ---------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("uid", [0, 100000])
def test_the_sandbox_seen_from_inside(root, marker, probe, uid):
    for path in (root, root / "etc"):
        os.chown(path, uid, uid)
    (root / "foreign").write_text("")
    (root / "foreign").chmod(0o644)
    os.chown(root / "foreign", 4711, 4711)
    os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (root / "null").chmod(0o666)
    (root / "proc/secret").write_text("")
    (root / "dev/null").write_text("")
    assert refresh(root, probe, (str(marker),), uid, uid) == ""
    seen = dict(line.split("=", 1) for line in (root / "etc/ld.so.cache").read_text().splitlines())
    assert seen == {
        **{f"argv{at}": text for at, text in enumerate(
            ["ldconfig", "-X", "-f", "/etc/ld.so.conf", "-C", "/etc/ld.so.cache", str(marker)])},
        "environment": "", "pid": "1", "uid": str(uid), "euid": str(uid), "gid": str(uid), "other_fds": "0",
        "proc": "0", "sys": "0", "dev": "1", "dev_fd": "1", "own_name": "ok", "parent_is_root": "1",
        "read_marker": "ENOENT", "write_dev": "EROFS", "write_foreign": "EACCES", "device": "EACCES",
        "socket": "EPERM", "mount": "EPERM", "fork": "EPERM", "chroot": "EPERM", "setuid": "EPERM", "ptrace": "EPERM",
        "read_stdin": "ok", "fsize": str(4 << 20),
    }  # fmt: skip


@pytest.mark.root
def test_a_device_node_of_the_image_is_not_opened_on_older_kernels_either(root, marker, probe, monkeypatch):
    def missing(*_, **__):
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(libc, "mount_setattr", missing)
    os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (root / "null").chmod(0o666)
    assert refresh(root, probe, (str(marker),)) == ""
    assert "device=EACCES" in (root / "etc/ld.so.cache").read_text().splitlines()


@pytest.mark.root
@pytest.mark.parametrize("where", ["created", "pivoted"])
@pytest.mark.parametrize("kernel", ["mount_setattr", "mount(2)", "mount(2) only"])
def test_no_volume_can_be_written_to(root, tmp_path, probe, kernel, where):
    """Volumes that everybody may write to, one in the other, also where an image's /proc says that there are none."""
    for path in (tmp_path / "volume/below", tmp_path / "other", root / "vol", root / "proc/self"):
        path.mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text("")
    for path in (tmp_path / "volume", tmp_path / "other"):
        path.chmod(0o777)

    def missing(*_, **__):
        raise OSError(errno.ENOSYS, "not implemented")

    def body():
        own_proc = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
        libc.mount(str(root), str(root), None, libc.MS_BIND)
        libc.mount(str(tmp_path / "volume"), str(root / "vol"), None, libc.MS_BIND)
        libc.mount(str(tmp_path / "other"), str(root / "vol/below"), None, libc.MS_BIND)
        fd, path = open_ldconfig(probe), str(root)
        if where == "pivoted":
            os.chdir(root)
            libc.pivot_root(".", ".")
            libc.umount2(".", libc.MNT_DETACH)
            path = "/"
        os.fchdir(own_proc)
        if kernel != "mount_setattr":
            libc.mount_setattr = missing
        if kernel == "mount(2) only":
            libc.open_tree = missing
        return run_ldconfig(fd, os.open(path, os.O_PATH | os.O_DIRECTORY), ("/x",), 0, 0)

    assert in_child(body) == ""
    seen = dict(line.split("=", 1) for line in (root / "etc/ld.so.cache").read_text().splitlines())
    assert (seen["write_volume"], seen["write_volume_below"], seen["write_root"]) == ("EROFS", "EROFS", "ok")
    assert [*(tmp_path / "volume").iterdir(), *(tmp_path / "other").iterdir()] == [tmp_path / "volume/below"]


@pytest.mark.root
def test_a_mount_that_cannot_be_closed_lets_nothing_run(root, tmp_path, monkeypatch):
    """Before Linux 5.12 mounts are closed by name; what stays open is found."""
    (root / "vol").mkdir()

    def missing(*_, **__):
        raise OSError(errno.ENOSYS, "not implemented")

    real = libc.mount

    def mount(source, target, fstype, flags, *rest, **more):
        if target != "/vol" or not flags & libc.MS_REMOUNT:
            real(source, target, fstype, flags, *rest, **more)

    def body():
        libc.mount(str(root), str(root), None, libc.MS_BIND)
        libc.mount(str(tmp_path), str(root / "vol"), None, libc.MS_BIND)
        libc.mount_setattr, libc.mount = missing, mount
        fd = open_ldconfig(HOST_LDCONFIG)
        with pytest.raises(ApplyError) as raised:
            run_ldconfig(fd, os.open(root, os.O_PATH | os.O_DIRECTORY), (LIBDIR,), 0, 0)
        return f"{raised.value.code}: {raised.value.message}"

    assert in_child(body) == "OCIGPU-LD-1: ldconfig sandbox: close mounts: mount /vol: it could not be closed"
    assert not (root / "etc/ld.so.cache").exists()


def children(pid):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def read_status(pid):
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline, "nothing came of it"
        os.sched_yield()
    return value


def start_sleeper(root, probe):
    """Return a process that waits for the sandbox, and the one that sleeps there: killed, the first ends with 42."""
    pid = os.fork()
    if pid == 0:
        try:
            libc.unshare(libc.CLONE_NEWNS)
            fd = open_ldconfig(probe)
            warning = run_ldconfig(fd, os.open(root, os.O_PATH | os.O_DIRECTORY), ("/sleep",), 0, 0)
            os._exit(42 if warning == "ldconfig: signal 9" else 1)
        finally:
            os._exit(2)
    guard = wait_for(lambda: children(pid))[0]
    inner = wait_for(lambda: children(guard))[0]
    wait_for(lambda: os.readlink(f"/proc/{inner}/exe").startswith("/memfd:ldconfig"))
    return pid, inner


@pytest.mark.root
def test_the_sandbox_seen_from_the_host(root, probe):
    pid, inner = start_sleeper(root, probe)
    status = read_status(inner)
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"], status["Groups"].strip()) == ("1", "2", "")
    assert status["NSpid"].split()[-1] == "1"
    for name in ("mnt", "pid", "net", "ipc", "uts"):
        assert os.readlink(f"/proc/{inner}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
    with pytest.raises(OSError, match="Text file busy"):
        os.open(f"/proc/{inner}/exe", os.O_WRONLY)
    os.kill(inner, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42


@pytest.mark.root
def test_nobody_without_rights_over_the_host_can_trace_the_sandbox(root, probe):
    """A container with the host's process numbers is root without CAP_SYS_PTRACE; the sandbox has no capability."""
    pid, inner = start_sleeper(root, probe)
    try:
        command = ["setpriv", "--bounding-set=-sys_ptrace", "readlink", f"/proc/{inner}/root"]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (1, "")
    finally:
        os.kill(inner, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.root
def test_a_killed_caller_takes_the_sandbox_with_it(root, probe):
    pid, inner = start_sleeper(root, probe)
    pidfd = os.pidfd_open(inner)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(60_000), "the process in the sandbox is still there"
    os.close(pidfd)


@pytest.mark.root
def test_a_program_that_does_not_end_is_stopped(root, probe, monkeypatch):
    monkeypatch.setattr(ldconfig, "DEADLINE", 0.3)
    started = "ldconfig was stopped after 0 s; the container's loader uses the links alone"
    assert refresh(root, probe, ("/sleep",)) == started


@pytest.mark.root
def test_the_lock_on_the_program_is_there_until_it_has_ended(root, probe):
    def body():
        fd = open_ldconfig(probe)
        fcntl.flock(fd, fcntl.LOCK_SH)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        started = start_ldconfig(fd, os.open(root, os.O_PATH | os.O_DIRECTORY), ("/sleep",), 0, 0)
        os.close(fd)
        started.go()
        inner = wait_for(lambda: children(started.pid))[0]
        wait_for(lambda: os.readlink(f"/proc/{inner}/exe").startswith("/memfd:ldconfig"))
        with pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        started.stop()
        os.waitpid(started.pid, 0)
        fcntl.flock(again, fcntl.LOCK_EX)
        return not os.path.exists(f"/proc/{inner}/exe")

    assert in_child(body)


@pytest.mark.root
def test_one_that_waits_ends_though_it_outlives_the_process_around_it(root, probe):
    """It had not asked yet to end with its parent."""

    def body():
        ldconfig.fence.die_with_parent = lambda: None
        ldconfig.LAST_SECONDS = 1_000_000
        started = start_ldconfig(open_ldconfig(probe), os.open(root, os.O_PATH | os.O_DIRECTORY), ("/sleep",), 0, 0)
        wait_for(lambda: children(started.pid))
        started.stop()
        os.waitpid(started.pid, 0)
        return True

    assert in_child(body)


@pytest.mark.root
def test_what_it_says_is_bounded_and_escaped(root, probe):
    warning = refresh(root, probe, ("/talk",))
    assert warning.startswith("ldconfig: exit 5: line ")
    assert "\033" not in warning
    assert len(warning) < 300


@pytest.mark.root
def test_a_sandbox_that_cannot_be_built_is_an_error_and_nothing_is_run(root, monkeypatch):
    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(libc, "pivot_root", refuse)
    assert refresh(root) == "OCIGPU-LD-1: ldconfig sandbox: change root: Operation not permitted"
    assert not (root / "etc/ld.so.cache").exists()


@pytest.mark.root
def test_an_etc_that_the_containers_root_user_may_not_write_is_a_warning(root):
    warning = refresh(root, uid=100000, gid=100000)
    assert warning.startswith("ldconfig: exit 1: ")
    assert "Permission denied" in warning
