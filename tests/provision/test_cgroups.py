"""Device cgroups for real: a child process plays the container, and opens nodes that have no driver.

Opening such a node says ENXIO where the cgroup allows it and EPERM where it does not.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import time

import pytest
from bpf_interpreter import run_device_program
from support import machine, requirements
from support.bpf_programs import detach_device_program, read_instructions, read_program_id
from support.process import processor_seconds
from support.runtimes import container_id

from ocigpu.core.actions import AllowDevice
from ocigpu.core.errors import ApplyError
from ocigpu.core.settings import Settings
from ocigpu.provision import cgroups
from ocigpu.provision.cgroups import (
    NO_CGROUPS_NOTE,
    ROOTLESS_NOTE,
    CgroupMount,
    apply_device_rules,
    parse_cgroup_mounts,
    parse_devices_list,
)
from ocigpu.provision.device_filter import FilterRule, Policy, access_mask, device_program, effective_rules
from ocigpu.system import bpf, libc
from ocigpu.system.proc import ProcCgroup, parse_cgroup

DENY_ALL = {"allow": False, "access": "rwm"}
CONFIG = {"linux": {"resources": {"devices": [DENY_ALL]}}}
GPU0 = AllowDevice(195, 0, "rw", "GPU 0")
CTL = AllowDevice(195, 255, "rw", "control")
V1 = "/sys/fs/cgroup/devices"
V2 = requirements.CGROUP2


# -- pure --------------------------------------------------------------------------------------------------------

PROC_CGROUP = [
    ("pure v2", "0::/system.slice/docker-1.scope\n", ProcCgroup(None, "/system.slice/docker-1.scope")),
    ("v1", "4:memory:/a\n5:devices:/docker/1\n", ProcCgroup("/docker/1", None)),
    ("co-mounted", "5:cpu,cpuacct:/x\n6:devices,freezer:/a:b\n0::/c\n", ProcCgroup("/a:b", "/c")),
    ("named hierarchy is not v2", "9:name=systemd:/x\n", ProcCgroup(None, None)),
    ("name that ends alike", "5:mydevices:/x\n", ProcCgroup(None, None)),
    ("rubbish", "\n:::\nx\n7\n", ProcCgroup(None, None)),
]


@pytest.mark.parametrize(("text", "expected"), [row[1:] for row in PROC_CGROUP], ids=[row[0] for row in PROC_CGROUP])
def test_the_cgroup_paths_of_a_process_are_read(text, expected):
    assert parse_cgroup(text) == expected


def test_cgroup_mounts_are_read_with_optional_fields_octal_escapes_and_roots():
    text = (
        "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
        r"36 31 0:33 /docker/ab /mnt/a\040b\134 rw shared:9 master:3 - cgroup c\040g rw,devices,freezer" "\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
        "short line\n42 31 x:y / /m rw - cgroup2 cgroup2 rw\n43 31 0:9 / /m rw - cgroup2\n"
    )  # fmt: skip
    assert parse_cgroup_mounts(text) == [
        CgroupMount(2, frozenset(), "/", "/sys/fs/cgroup/unified", (0, 38)),
        CgroupMount(1, frozenset({"rw", "devices", "freezer"}), "/docker/ab", "/mnt/a b\\", (0, 33)),
    ]


@pytest.mark.rest
def test_a_long_field_with_escapes_is_decoded_in_time_by_its_length() -> None:
    with processor_seconds(20):
        (mount,) = parse_cgroup_mounts("1 1 0:1 / " + "\\040" * 1_000_000 + " rw - cgroup2 x rw\n")
    assert mount.mountpoint == " " * 1_000_000


def test_a_devices_list_is_read_and_lines_that_make_no_sense_are_not():
    text = "a *:* rwm\nc 136:* rw\nb 8:16 m\nc x:1 r\nq 1:1 r\nc 1:3 rx\n"
    assert parse_devices_list(text) == [
        FilterRule(True, "a", None, None, "rwm"),
        FilterRule(True, "c", 136, None, "rw"),
        FilterRule(True, "b", 8, 16, "m"),
    ]


# -- a container -------------------------------------------------------------------------------------------------


class Container:
    """A child in its own cgroup that opens what it is told to, and says what came of it."""

    def __init__(self, procs_file: str | None) -> None:
        request_r, self._request = os.pipe()
        self._answer, answer_w = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._request)
                if procs_file:
                    with open(procs_file, "w") as file:
                        file.write("0")
                os.write(answer_w, b"\n")
                while path := os.read(request_r, 4096):
                    try:
                        os.close(os.open(path, os.O_RDWR))
                        answer = "ok"
                    except OSError as error:
                        answer = errno.errorcode[error.errno or 0]
                    os.write(answer_w, json.dumps(answer).encode() + b"\n")
            finally:
                os._exit(0)
        os.close(request_r)
        os.close(answer_w)
        assert os.read(self._answer, 1) == b"\n"
        self.proc_fd = os.open(f"/proc/{self.pid}", os.O_RDONLY | os.O_DIRECTORY)

    def opens(self, path: object) -> str:
        os.write(self._request, os.fsencode(str(path)))
        return json.loads(os.read(self._answer, 4096))

    def end(self) -> None:
        os.close(self._request)
        os.waitpid(self.pid, 0)
        os.close(self._answer)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.end()
        os.close(self.proc_fd)


@pytest.fixture
def nodes(tmp_path):
    for minor in (0, 1, 255):
        os.mknod(tmp_path / f"nvidia{minor}", stat.S_IFCHR | 0o666, os.makedev(195, minor))
    return tmp_path


def remove_cgroup(path):
    deadline = time.monotonic() + 60
    while True:
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            os.sched_yield()
        else:
            return


@pytest.fixture
def v1_cgroup():
    path = f"{V1}/{machine.NAME}"
    os.mkdir(path)
    with open(f"{path}/devices.deny", "w") as file:
        file.write("a")
    with open(f"{path}/devices.allow", "w") as file:
        file.write("c 1:3 rwm")
    yield path
    remove_cgroup(path)


@pytest.fixture
def v2_cgroup():
    path = f"{V2}/{machine.NAME}"
    os.makedirs(f"{path}/inner")
    yield path
    remove_cgroup(f"{path}/inner")
    remove_cgroup(path)


def devices_list(path):
    with open(f"{path}/devices.list") as file:
        return set(file.read().splitlines())


needs_v1 = pytest.mark.skipif(not os.path.exists(f"{V1}/devices.list"), reason="no device cgroup of version 1 here")


@pytest.mark.root
@needs_v1
def test_v1_gets_the_missing_rules_and_undo_takes_back_just_those(v1_cgroup, nodes):
    with open(f"{v1_cgroup}/devices.allow", "w") as file:
        file.write("c 195:255 rw")
    before = devices_list(v1_cgroup)
    container = Container(f"{v1_cgroup}/cgroup.procs")
    try:
        assert container.opens(nodes / "nvidia0") == "EPERM"
        note, undo = apply_device_rules(container.proc_fd, (GPU0, CTL), CONFIG, Settings())
        assert note == ""
        assert container.opens(nodes / "nvidia0") == "ENXIO"
        assert container.opens(nodes / "nvidia1") == "EPERM"
        assert devices_list(v1_cgroup) == before | {"c 195:0 rw"}
        undo()
        assert devices_list(v1_cgroup) == before
        assert container.opens(nodes / "nvidia0") == "EPERM"
        assert container.opens(nodes / "nvidia255") == "ENXIO"
    finally:
        container.close()


@pytest.mark.root
@needs_v1
def test_v1_that_allows_everything_is_left_as_it_is(v1_cgroup):
    with open(f"{v1_cgroup}/devices.allow", "w") as file:
        file.write("a")
    container = Container(f"{v1_cgroup}/cgroup.procs")
    try:
        _, undo = apply_device_rules(container.proc_fd, (GPU0,), CONFIG, Settings())
        assert devices_list(v1_cgroup) == {"a *:* rwm"}
        undo()
        assert devices_list(v1_cgroup) == {"a *:* rwm"}
    finally:
        container.close()


@pytest.mark.root
@needs_v1
def test_v1_below_a_parent_that_denies_fails_and_takes_back_what_it_added(v1_cgroup, nodes):
    inner = f"{v1_cgroup}/inner"
    with open(f"{v1_cgroup}/devices.allow", "w") as file:
        file.write("c 195:255 rw")
    os.mkdir(inner)
    with open(f"{inner}/devices.deny", "w") as file:
        file.write("c 195:255 rw")
    before = devices_list(inner)
    container = Container(f"{inner}/cgroup.procs")
    try:
        with pytest.raises(ApplyError) as caught:
            apply_device_rules(container.proc_fd, (CTL, GPU0), CONFIG, Settings())
        assert caught.value.code == "OCIGPU-CG-1"
        assert caught.value.message == f'write "c 195:0 rw" to {inner}/devices.allow: Operation not permitted'
        assert devices_list(inner) == before
    finally:
        container.close()
        remove_cgroup(inner)


@pytest.mark.root
def test_rules_that_config_json_declares_are_left_to_the_runtime():
    config = {"linux": {"resources": {"devices": [
        DENY_ALL, {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rw"}]}}}  # fmt: skip
    container = Container(None)
    try:
        assert apply_device_rules(container.proc_fd, (GPU0,), config, Settings())[0] == ""
        config["linux"]["resources"]["devices"].append({"allow": False, "type": "c", "major": 195, "access": "w"})
        with pytest.raises(ApplyError):  # denied again further down: the process is in the root cgroup here
            apply_device_rules(container.proc_fd, (GPU0,), config, Settings())
    finally:
        container.close()


@pytest.mark.root
@pytest.mark.parametrize("declared", [False, True])
def test_systemd_is_told_of_the_devices_whether_or_not_the_runtime_knows_them(declared, tmp_path, monkeypatch):
    """runc 1.1.5 leaves a device without a link in /dev/char out of what it tells systemd."""
    unit = f"{machine.NAME}.scope"
    folder = tmp_path / f"{unit}.d"
    folder.mkdir()
    file = folder / "50-DeviceAllow.conf"
    file.write_text("[Scope]\nDeviceAllow=\n")
    monkeypatch.setattr(cgroups.scope, "DIRECTORY", str(tmp_path))
    rules = [DENY_ALL] + [{"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rw"}] * declared
    config = {"linux": {"resources": {"devices": rules}}}
    path = f"{V2}/{unit}"
    os.makedirs(path)
    container = Container(f"{path}/cgroup.procs")

    def attempt():
        note, undo = apply_device_rules(container.proc_fd, (GPU0,), config, Settings())
        told = file.read_text()
        undo()
        return [note, told, file.read_text()]

    try:
        note, told, after = pure_v2(attempt)
        assert note == ""
        assert told == "[Scope]\nDeviceAllow=\n\n[Scope]\nDeviceAllow=/dev/char/195:0 rw\n"
        assert after == "[Scope]\nDeviceAllow=\n"
    finally:
        container.close()
        remove_cgroup(path)


@pytest.mark.root
def test_a_process_in_the_root_cgroup_is_refused():
    container = Container(None)
    try:
        with pytest.raises(ApplyError) as caught:
            apply_device_rules(container.proc_fd, (GPU0,), CONFIG, Settings())
        assert caught.value.message == (
            "find device cgroup /: the container is in the root cgroup, which is never changed"
        )
        assert "no-cgroups" in caught.value.hint
    finally:
        container.close()


@pytest.mark.root
def test_a_process_that_is_gone_is_refused():
    container = Container(None)
    container.end()
    with pytest.raises(ApplyError) as caught:
        apply_device_rules(container.proc_fd, (GPU0,), CONFIG, Settings())
    assert caught.value.message == "read cgroup of the container's process: No such process"
    os.close(container.proc_fd)


def test_the_no_cgroups_setting_leaves_everything_alone():
    assert apply_device_rules(-1, (GPU0,), CONFIG, Settings(no_cgroups=True))[0] == NO_CGROUPS_NOTE


def test_a_plan_without_device_rules_leaves_everything_alone():
    assert apply_device_rules(-1, (), CONFIG, Settings())[0] == ""


def in_child(function):
    """Run a function in a forked child and return what it returned (JSON); what it raised is raised here as text."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
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


@pytest.mark.root
@pytest.mark.parametrize("who", ["ordinary user", "root of a user namespace"])
def test_without_rights_over_the_host_the_cgroup_is_left_alone_with_a_note(who):
    def attempt():
        if who == "ordinary user":
            os.setresuid(65534, 65534, 65534)
        else:
            libc.unshare(libc.CLONE_NEWUSER)
            with open("/proc/self/uid_map", "w") as file:
                file.write("0 0 1")
        return apply_device_rules(-1, (GPU0,), CONFIG, Settings())[0]

    assert in_child(attempt) == ROOTLESS_NOTE


def pure_v2(function):
    """Run a function where the only cgroup file system is v2, at /sys/fs/cgroup, as on a host without v1."""

    def body():
        libc.unshare(libc.CLONE_NEWNS)
        libc.mount(None, "/", None, libc.MS_REC | libc.MS_PRIVATE)
        libc.umount2("/sys/fs/cgroup", libc.MNT_DETACH)
        libc.mount("none", "/sys/fs/cgroup", "cgroup2", 0)
        return function()

    return in_child(body)


def attach(path, rules, flags):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    program = bpf.load_device_program(device_program(rules))
    bpf.attach_device_program(fd, program, flags)
    number = read_program_id(program)
    os.close(program)
    os.close(fd)
    return number


def attached(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    ids = bpf.query_device_programs(fd).ids
    os.close(fd)
    return list(ids)


def open_all(container, nodes):
    names = ("/dev/null", "/dev/zero", nodes / "nvidia0", nodes / "nvidia1")
    return [container.opens(name) for name in names]


@pytest.mark.root
@pytest.mark.parametrize(
    ("flags", "count"),
    [(bpf.BPF_F_ALLOW_MULTI, 1), (bpf.BPF_F_ALLOW_MULTI, 3), (bpf.BPF_F_ALLOW_OVERRIDE, 1), (0, 1)],
    ids=["multi", "three programs", "override", "exclusive"],
)
def test_v2_programs_are_replaced_and_put_back(v2_cgroup, nodes, flags, count):
    name = f"/sys/fs/cgroup/{os.path.basename(v2_cgroup)}/inner"

    def body():
        rules = [FilterRule(True, "c", 1, 3, "rwm")]
        old = [attach(name, rules, flags) for _ in range(count)]
        container = Container(f"{name}/cgroup.procs")
        before = open_all(container, nodes)
        note, undo = apply_device_rules(container.proc_fd, (GPU0,), CONFIG, Settings())
        during, new = open_all(container, nodes), attached(name)
        undo()
        after, last = open_all(container, nodes), attached(name)
        container.close()
        return {"note": note, "before": before, "during": during, "after": after, "old": old, "new": new, "last": last}

    result = pure_v2(body)
    assert result["note"] == ""
    assert result["before"] == ["ok", "EPERM", "EPERM", "EPERM"]
    assert result["during"] == ["ok", "ok", "ENXIO", "EPERM"]  # /dev/zero is among the runtimes' defaults
    assert result["after"] == result["before"]
    assert len(result["new"]) == count
    assert not set(result["new"]) & set(result["old"])
    assert result["last"] == result["old"]


@pytest.mark.root
def test_v2_without_a_program_has_nothing_to_widen(v2_cgroup, nodes):
    name = f"/sys/fs/cgroup/{os.path.basename(v2_cgroup)}/inner"

    def body():
        container = Container(f"{name}/cgroup.procs")
        note, undo = apply_device_rules(container.proc_fd, (GPU0,), CONFIG, Settings())
        result = [note, attached(name), container.opens(nodes / "nvidia0")]
        undo()
        container.close()
        return result

    assert pure_v2(body) == ["", [], "ENXIO"]


@pytest.mark.root
def test_v2_ancestors_with_programs_of_their_own_are_named(v2_cgroup, nodes):
    outer = f"/sys/fs/cgroup/{os.path.basename(v2_cgroup)}"

    def body():
        attach(outer, [FilterRule(True, "c", 1, None, "rwm")], bpf.BPF_F_ALLOW_MULTI)
        attach(f"{outer}/inner", [], bpf.BPF_F_ALLOW_MULTI)
        container = Container(f"{outer}/inner/cgroup.procs")
        note, _ = apply_device_rules(container.proc_fd, (GPU0,), CONFIG, Settings())
        result = [note, *open_all(container, nodes)]
        container.close()
        return result

    note = f"{outer} has a device filter of its own; the container gets no device that it denies"
    assert pure_v2(body) == [note, "ok", "ok", "EPERM", "EPERM"]


@pytest.mark.root
def test_v2_fails_closed_when_a_program_cannot_be_read(v2_cgroup, nodes, monkeypatch):
    name = f"/sys/fs/cgroup/{os.path.basename(v2_cgroup)}/inner"
    real = bpf.open_program

    def body():
        old = [attach(name, [], bpf.BPF_F_ALLOW_MULTI) for _ in range(2)]
        container = Container(f"{name}/cgroup.procs")

        def open_first_only(number):
            if number != old[0]:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            return real(number)

        bpf.open_program = open_first_only
        descriptors = set(os.listdir("/proc/self/fd"))
        try:
            apply_device_rules(container.proc_fd, (GPU0,), CONFIG, Settings())
        except ApplyError as error:
            message = error.message
        finally:
            bpf.open_program = real
        same = attached(name) == old and set(os.listdir("/proc/self/fd")) == descriptors
        container.close()
        return [message.replace(str(old[1]), "N"), same]

    assert pure_v2(body) == [f"read device program N of {name}: Operation not permitted", True]


@pytest.mark.root
def test_v2_puts_back_the_first_program_when_the_second_cannot_be_replaced(v2_cgroup, nodes):
    name = f"/sys/fs/cgroup/{os.path.basename(v2_cgroup)}/inner"
    real = bpf.attach_device_program

    def body():
        old = [attach(name, [], bpf.BPF_F_ALLOW_MULTI) for _ in range(2)]
        container = Container(f"{name}/cgroup.procs")
        calls = []

        def refuse_second(*arguments):
            calls.append(arguments)
            if len(calls) == 2:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            real(*arguments)

        bpf.attach_device_program = refuse_second
        try:
            apply_device_rules(container.proc_fd, (GPU0,), CONFIG, Settings())
        except ApplyError as error:
            message = error.message
        result = [message, attached(name) == old, container.opens(nodes / "nvidia0")]
        container.close()
        return result

    message = f"replace device program of {name}: Invalid argument (needs Linux 5.5)"
    assert pure_v2(body) == [message, True, "EPERM"]


@pytest.mark.root
def test_undo_after_the_runtime_has_set_its_own_program_anew_leaves_that_one(v2_cgroup):
    name = f"/sys/fs/cgroup/{os.path.basename(v2_cgroup)}/inner"

    def body():
        attach(name, [], 0)
        container = Container(f"{name}/cgroup.procs")
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        detach_device_program(fd, bpf.open_program(attached(name)[0]))
        attach(name, [], bpf.BPF_F_ALLOW_MULTI)
        _, undo = apply_device_rules(container.proc_fd, (GPU0,), CONFIG, Settings())
        ours = bpf.open_program(attached(name)[0])
        renewed = attach(name, [], bpf.BPF_F_ALLOW_MULTI)
        detach_device_program(fd, ours)
        undo()
        result = attached(name) == [renewed]
        container.close()
        return result

    assert pure_v2(body) is True


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize(
    "devices",
    [
        [DENY_ALL],
        [],
        [
            DENY_ALL,
            {"allow": True, "type": "c", "major": 10, "minor": 229, "access": "rw"},
            {"allow": True, "type": "b", "major": 8, "minor": 1, "access": "rw"},
            {"allow": False, "type": "b", "major": 8, "minor": 1, "access": "w"},
            {"allow": False, "type": "c", "major": 1, "minor": 3, "access": "rw"},
        ],
        [{"allow": True, "access": "rwm"}],
    ],
    ids=["deny all", "no rules", "mixed", "privileged"],
)
def test_the_computed_policy_is_never_wider_than_what_runc_enforces(tmp_path, devices):
    name = container_id()
    config = {
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["/busybox", "sleep", "60"], "cwd": "/"},
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        ],
        "linux": {
            "cgroupsPath": f"/{name}",
            "namespaces": [{"type": "pid"}, {"type": "mount"}],
            "devices": [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 230}],
            "resources": {"devices": devices},
        },
    }
    (tmp_path / "rootfs").mkdir()
    shutil.copy("/usr/bin/busybox", tmp_path / "rootfs/busybox")
    (tmp_path / "config.json").write_text(json.dumps(config))
    runc = ["runc", "--root", str(tmp_path / "state")]

    def body():
        subprocess.run([*runc, "create", "--bundle", tmp_path, name], check=True, stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        try:
            return [read_instructions(bpf.open_program(number)).hex() for number in attached(f"/sys/fs/cgroup/{name}")]
        finally:
            subprocess.run([*runc, "delete", "--force", name], check=True)

    theirs = [bytes.fromhex(code) for code in pure_v2(body)]
    assert len(theirs) == 1
    policy = Policy(effective_rules(config))
    narrower = []
    for kind in "bc":
        for major in (0, 1, 5, 8, 10, 136, 195):
            for minor in (0, 1, 2, 3, 5, 7, 8, 9, 200, 229, 230):
                allowed = {
                    letter
                    for letter, bit in (("m", 1), ("r", 2), ("w", 4))
                    if run_device_program(theirs[0], {"b": 1, "c": 2}[kind], bit, major, minor)
                }
                ours = {letter for letter in "mrw" if policy.allowed(kind, major, minor) & access_mask(letter)}
                assert ours <= allowed, (kind, major, minor)
                if ours != allowed:
                    narrower.append((kind, major, minor))
    assert set(narrower) <= {("c", 10, 200)}  # tun: only some runtimes allow it by themselves


def test_the_module_has_no_state_between_calls():
    assert cgroups.apply_device_rules(-1, (GPU0,), CONFIG, Settings(no_cgroups=True))[1]() is None
