"""Containers without a runtime, provisioned for real: a process and its mount namespace over a root file system."""

import json
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import ocigpu.core.codes  # noqa: F401 - for errors in user namespaces, which may not read a clone that is closed to others
from ocigpu.core.actions import Bind, Link, Mode, Node, Plan, RefreshLdCache, TextFile, Tmpfs
from ocigpu.core.errors import OcigpuError
from ocigpu.core.facts import DeviceNode
from ocigpu.core.settings import Settings
from ocigpu.provision import apply, journal
from ocigpu.system import libc, paths

MAPPED = 100000
LDCONFIG = next(path for path in ("/sbin/ldconfig.real", "/sbin/ldconfig") if os.path.exists(path))
READ_ONLY = ("ro", "nosuid", "nodev")


def new_kernel() -> None:
    """Everything as this kernel can do it."""


def old_kernel() -> None:
    """Without openat2 and without the mount calls of Linux 5.2."""
    paths.use_walk(True)
    apply.FORCE_MOUNT2 = True


def run_child(function: Callable[[], Any], keep: int = -1) -> Any:
    """Return what ``function`` returns in a forked process, as JSON; None if the process was killed."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_fd)
            try:
                answer = {"value": function()}
            except BaseException as error:  # noqa: BLE001 - told by the parent
                answer = {"failure": f"{type(error).__name__}: {error}"}
            os.write(write_fd, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    if keep >= 0:
        os.close(keep)
    with open(read_fd, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    if not data:
        return None
    answer = json.loads(data)
    assert "failure" not in answer, answer["failure"]
    return answer["value"]


class Lab:
    """One container.

    ``stage``: "created", as runc's and crun's at prestart, or "pivoted".  ``user``: with a user namespace.  ``dev``: a
    tmpfs on /dev.  ``shared``: mounts stay in the host's peer groups.
    """

    def __init__(
        self, rootfs: Path, stage: str = "created", user: bool = False, dev: bool = True, shared: bool = False
    ) -> None:
        self.rootfs = rootfs
        ready, ready_fd = os.pipe()
        go_fd, self._go = os.pipe()
        end_fd, self._end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for fd in (ready, self._go, self._end):
                    os.close(fd)
                self._become_container(stage, user, dev, shared, ready_fd, go_fd)
                os.write(ready_fd, b"ready")
                os.close(ready_fd)
                os.read(end_fd, 1)
            except OSError as error:
                os.write(ready_fd, str(error).encode())
            finally:
                os._exit(0)
        for fd in (ready_fd, go_fd, end_fd):
            os.close(fd)
        if user:
            assert os.read(ready, 100) == b"unshared"
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{self.pid}/{name}").write_text(f"0 {MAPPED} 65536")
            os.write(self._go, b"go")
        with open(ready, "rb") as file:
            said = file.read()
        assert said == b"ready", said

    def _become_container(  # what a runtime does
        self, stage: str, user: bool, dev: bool, shared: bool, ready_fd: int, go_fd: int
    ) -> None:
        root = str(self.rootfs)
        if user:
            libc.unshare(libc.CLONE_NEWUSER)
            os.write(ready_fd, b"unshared")
            os.read(go_fd, 2)
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        libc.unshare(libc.CLONE_NEWNS)
        if not shared:
            libc.mount(None, "/", None, libc.MS_SLAVE | libc.MS_REC)
        libc.mount(root, root, None, libc.MS_BIND | libc.MS_REC)
        if dev:
            libc.mount("tmpfs", root + "/dev", "tmpfs", libc.MS_NOSUID, "mode=755")
        if not user:
            libc.mount("proc", root + "/proc", "proc", 0)
        if stage == "pivoted":
            os.chdir(root)
            libc.pivot_root(".", ".")
            libc.umount2(".", libc.MNT_DETACH)
            os.chdir("/")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._end)
        os.close(self._go)
        os.waitpid(self.pid, 0)

    def inside(self, function: Callable[[], Any]) -> Any:
        """Return what ``function`` returns in the container, with its root directory as root (JSON)."""
        mnt_fd = os.open(f"/proc/{self.pid}/ns/mnt", os.O_RDONLY)
        root_fd = os.open(f"/proc/{self.pid}/root", os.O_RDONLY)
        pivoted = os.stat(root_fd)[1:3] != os.stat("/")[1:3]

        def joined() -> Any:
            libc.setns(mnt_fd, libc.CLONE_NEWNS)
            os.chroot("/" if pivoted else self.rootfs)
            os.chdir("/")
            return function()

        try:
            return run_child(joined)
        finally:
            os.close(mnt_fd)
            os.close(root_fd)

    def mounts(self) -> list[str]:
        """Return the container's mounts without their ids, but for those that are the machine's."""
        from support import machine  # not where this module is a hook's

        lines = Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines()
        foreign = machine.copies_of_foreign_mounts()
        return sorted(text for line in lines if (text := " ".join(line.split(" ")[2:])) not in foreign)

    def enter(self) -> None:
        """Bring the calling process where a hook of the createContainer stage is: into all namespaces of the container.

        As root of its user namespace, but not below its root directory.
        """
        mnt_fd = os.open(f"/proc/{self.pid}/ns/mnt", os.O_RDONLY)
        user_fd = os.open(f"/proc/{self.pid}/ns/user", os.O_RDONLY)
        if os.fstat(user_fd).st_ino != os.stat("/proc/self/ns/user").st_ino:
            libc.setns(user_fd, libc.CLONE_NEWUSER)
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        libc.setns(mnt_fd, libc.CLONE_NEWNS)
        os.close(mnt_fd)
        os.close(user_fd)

    def provision(
        self, plan: Plan, prepare: Callable[[], None] = lambda: None, rootfs: str = "", here: bool = False
    ) -> tuple[list[str], str, str]:
        """Provision in a process of its own; return (notes, error code, message), or "killed" as the code.

        ``here``: from inside the container's namespaces.  Returns when every process of it has ended, worker included.
        """
        alive, alive_fd = os.pipe()  # the write end is inherited by all of them

        def work() -> Any:
            if here:
                self.enter()
            prepare()
            root = rootfs or str(self.rootfs)
            try:
                if here:
                    notes = apply.provision_here(plan, root, Settings())
                else:
                    notes = apply.provision(plan, self.pid, root, {}, Settings())
            except OcigpuError as error:
                return [[], error.code, error.message]
            return [list(notes), "", ""]

        answer = run_child(work, keep=alive_fd)
        with open(alive, "rb") as file:
            file.read()
        return tuple(answer) if answer is not None else ([], "killed", "")


def fail_at(number: int, how: str) -> Callable[[], None]:
    """Return what makes the worker fail right after entry ``number`` of its journal, before its effect."""
    original = journal.Journal.record

    def record(self: journal.Journal, do: str, path: str, **details: Any) -> None:
        original(self, do, path, **details)
        if len(self.entries) == number:
            if how == "raise":
                raise OSError(5, "failed on purpose")
            if how == "defect":
                raise RuntimeError("failed on purpose")
            os.kill(os.getppid() if how == "kill parent" else os.getpid(), signal.SIGKILL)

    def prepare() -> None:
        journal.Journal.record = record

    return prepare


def count_entries(counter: Path) -> Callable[[], None]:
    """Return what writes the number of journal entries to a file."""
    original = journal.Journal.record

    def record(self: journal.Journal, do: str, path: str, **details: Any) -> None:
        original(self, do, path, **details)
        fd = os.open("/proc/self/root" + str(counter), os.O_WRONLY | os.O_APPEND)
        os.write(fd, b".")
        os.close(fd)

    def prepare() -> None:
        journal.Journal.record = record

    return prepare


def make_rootfs(path: Path) -> Path:
    for name in ("dev", "proc", "etc", "usr/bin", "usr/lib64", "run", "tmp"):
        (path / name).mkdir(parents=True)
    (path / "var").mkdir()
    (path / "var/run").symlink_to("/run")
    (path / "lib64").symlink_to("usr/lib64")
    (path / "usr/lib64/libold.so.1").write_text("the image's own")
    (path / "usr/lib64/libstale.so").symlink_to("libstale.so.0")
    (path / "etc/ld.so.cache").write_text("the image's cache")
    return path


def make_host(path: Path) -> Path:
    """Make a driver: libraries, a binary, a socket directory, a /proc/driver and nodes."""
    for name in ("lib", "bin", "dev", "proc/driver/nvidia/gpus/0000:01:00.0", "run/nvidia"):
        (path / name).mkdir(parents=True)
    (path / "lib/libcuda.so.1.2").write_text("driver")
    (path / "bin/nvidia-smi").write_text("#!/bin/sh\necho smi\n")
    (path / "bin/nvidia-smi").chmod(0o755)
    (path / "proc/driver/nvidia/gpus/0000:01:00.0/information").write_text("Model: x\n")
    os.mknod(path / "dev/nvidia0", 0o666 | stat.S_IFCHR, os.makedev(195, 0))
    os.mknod(path / "dev/nvidiactl", 0o666 | stat.S_IFCHR, os.makedev(195, 255))
    (path / "dev/nvidia0").chmod(0o666)
    (path / "dev/nvidiactl").chmod(0o666)
    return path


def make_plan(host: Path, nodes: tuple[str, ...] = ("nvidiactl", "nvidia0"), with_proc: bool = True) -> Plan:
    """Return a plan with an action of every kind but ldconfig."""
    minors = {"nvidiactl": 255, "nvidia0": 0}
    actions: list[Any] = []
    if with_proc:
        actions = [
            Bind(f"{host}/proc/driver", "/proc/driver", (*READ_ONLY, "noexec"), "cover", "directory"),
            Tmpfs(
                "/proc/driver/nvidia",
                0o555,
                (("params", 0o444, "ModifyDeviceFiles: 0\n"), ("version", 0o444, "NVRM\n")),
                ("gpus", "gpus/0000:01:00.0"),
                "parameters",
            ),
            Bind(
                f"{host}/proc/driver/nvidia/gpus/0000:01:00.0",
                "/proc/driver/nvidia/gpus/0000:01:00.0",
                (*READ_ONLY, "noexec"),
                "GPU",
                "directory",
            ),
        ]
    actions += [
        Node(DeviceNode(f"/dev/{name}", f"{host}/dev/{name}", 195, minors[name], 0o666, 0, 0), "GPU") for name in nodes
    ]
    actions += [
        Node(DeviceNode("/dev/nvidia-caps/nvidia-cap1", f"{host}/dev/nvidia0", 195, 0, 0o440, 0, 44), "MIG"),
        Bind(f"{host}/lib/libcuda.so.1.2", "/usr/lib64/libcuda.so.1.2", READ_ONLY, "library"),
        Bind(f"{host}/bin/nvidia-smi", "/usr/bin/nvidia-smi", READ_ONLY, "binary"),
        Bind(f"{host}/lib/libcuda.so.1.2", "/opt/new/dir/libcuda.so", READ_ONLY, "library in new directories"),
        Link("/usr/lib64/libcuda.so.1", "libcuda.so.1.2", "loader"),
        Link("/usr/lib64/libstale.so", "libcuda.so.1.2", "stale link of the image"),
        Link("/usr/lib64/libold.so.1", "libcuda.so.1.2", "stale file of the image"),
        Bind(f"{host}/run/nvidia", "/var/run/nvidia", ("nosuid", "nodev", "noexec"), "sockets", "directory"),
        Tmpfs("/etc/nvidia/profiles", 0o555, (("10-container.conf", 0o444, "{}"),), (), "profiles"),
    ]
    return Plan(tuple(actions))


def make_plan_here(host: Path, with_proc: bool = True) -> Plan:
    """Return the laboratory's plan with what a hook of this stage adds, and without its nodes."""
    kept = [action for action in make_plan(host, with_proc=with_proc).actions if not isinstance(action, Node)]
    return Plan(
        (
            *kept,
            Bind("/bin/true", "/usr/lib64/libreal.so.1", READ_ONLY, "any ELF file"),
            TextFile("/etc/ld.so.conf.d/00-compat.conf", 0o644, "/usr/local/cuda/compat\n", "compatibility"),
            TextFile("/etc/ld.so.conf", 0o644, "include /etc/ld.so.conf.d/*.conf\n", "loader", only_if_missing=True),
            Mode("/opt", 0o711, "folder"),
            RefreshLdCache(LDCONFIG, ("/usr/lib64",), "loader"),
            RefreshLdCache(LDCONFIG, ("/usr/lib64", "/opt/new/dir"), "loader, once more"),
        )
    )


Tree = dict[str, tuple[Any, ...]]


def snapshot(root: Path) -> Tree:
    """Return everything below a directory but times and sizes of directories."""
    found: Tree = {}
    for parent, directories, files in os.walk(root):
        for name in directories + files:
            path = Path(parent, name)
            status = path.lstat()
            content: Any = None
            if stat.S_ISREG(status.st_mode):
                content = path.read_bytes()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            found[str(path)] = (oct(status.st_mode), status.st_uid, status.st_gid, status.st_rdev, content)
    return found


def host_mounts() -> str:
    """Return what tests have mounted on the host, and its mounts that must stay; engines of other tests aside."""
    from support import machine  # not where this module is a hook's

    engines = (f"/tmp/{machine.NAME}/", "/run/containerd", "/run/docker", "/var/lib/docker", "/var/lib/containerd")
    return "".join(f"{line}\n" for line in machine.own_mounts() if not line.split(" ")[4].startswith(engines))
