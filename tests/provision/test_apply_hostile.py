"""Images that want to be provisioned with somebody else's files: refused or harmless, and the host untouched."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from provision_lab import Lab, host_mounts, make_plan, new_kernel, old_kernel, snapshot
from support.bundle import replace
from support.products import one_in

from ocigpu.core.actions import Bind, Link, Node, Plan, Tmpfs
from ocigpu.core.facts import DeviceNode
from ocigpu.system import libc

pytestmark = pytest.mark.root

LIBRARY = "/usr/lib64/libcuda.so.1.2"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A directory of the host that must stay as it is, times included."""
    path = tmp_path / "marker"
    path.mkdir()
    (path / "file").write_text("host")
    (path / "libcuda.so.1.2").write_text("host's own")
    return path


def state_of(directory: Path) -> list[tuple[Any, ...]]:
    found = []
    for path in [directory, *sorted(directory.iterdir())]:
        status = path.lstat()
        found.append((path.name, status.st_mode, status.st_mtime_ns, status.st_ctime_ns, status.st_size))
    return found


@pytest.mark.product(single=True)
@pytest.mark.parametrize("kernel", [new_kernel, old_kernel])
@pytest.mark.parametrize("form", ["absolute", "relative"])
@pytest.mark.parametrize("name", ["usr/lib64", "usr/bin", "dev", "run", "etc/nvidia", "opt", "usr"])
def test_directories_that_are_links_to_the_host_leave_it_alone(
    name: str, form: str, kernel: Callable[[], None], host: Path, rootfs: Path, marker: Path
) -> None:
    depth = len(Path(name).parts) - 1
    replace(rootfs / name, str(marker) if form == "absolute" else "../" * (depth + 1) + "marker")
    before, mounts = state_of(marker), host_mounts()
    tree = snapshot(rootfs)
    with Lab(rootfs, dev=name != "dev") as lab:
        notes, code, message = lab.provision(make_plan(host), kernel)
        assert notes == []
        assert code in ("OCIGPU-MNT-1", "OCIGPU-MNT-3", "OCIGPU-DEV-3"), message
        assert "a link that leads nowhere" in message
    assert state_of(marker) == before
    assert snapshot(rootfs) == tree
    assert host_mounts() == mounts


@pytest.mark.parametrize("kernel", [new_kernel, old_kernel])
def test_a_link_to_the_host_at_the_target_is_replaced_and_put_back(
    kernel: Callable[[], None], host: Path, rootfs: Path, marker: Path
) -> None:
    replace(rootfs / LIBRARY[1:], str(marker / "libcuda.so.1.2"))
    os.lchown(rootfs / LIBRARY[1:], 7, 8)
    replace(rootfs / "usr/lib64/libcuda.so.1", str(marker / "file"))
    before, tree = state_of(marker), snapshot(rootfs)
    plan = make_plan(host)
    broken = Plan((*plan.actions, Bind("/no/such/file", "/usr/bin/x", ("ro",), "fails")))
    with Lab(rootfs) as lab:
        assert lab.provision(broken, kernel)[1] == "OCIGPU-MNT-1"
        assert snapshot(rootfs) == tree
        assert lab.provision(plan, kernel) == ([], "", "")
        assert lab.inside(lambda: Path(LIBRARY).read_text()) == "driver"
        assert lab.inside(lambda: os.readlink("/usr/lib64/libcuda.so.1")) == "libcuda.so.1.2"
    assert state_of(marker) == before


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 1))


def link(path: Path) -> None:
    path.symlink_to("/etc")


def full(path: Path) -> None:
    path.write_text("something")


BIND = Bind("/etc/hostname", "/usr/lib64/target", ("ro",), "library")
NODE = Node(DeviceNode("/dev/target", "/dev/null", 1, 3, 0o666, 0, 0), "GPU")
LINK = Link("/usr/lib64/target", "other", "loader")
TMPFS = Tmpfs("/etc/target", 0o555, (), (), "profiles")
UNFIT = {
    "FIFO for a file": (BIND, fifo, "OCIGPU-MNT-2", "a FIFO"),
    "directory for a file": (BIND, Path.mkdir, "OCIGPU-MNT-2", "a directory"),
    "device for a file": (BIND, device, "OCIGPU-MNT-2", "a device 1:1"),
    "FIFO for a directory": (BIND._replace(host_path="/etc", kind="directory"), fifo, "OCIGPU-MNT-2", "a FIFO"),
    "file for a directory": (BIND._replace(host_path="/etc", kind="directory"), full, "OCIGPU-MNT-2", "a file"),
    "FIFO for a node": (NODE, fifo, "OCIGPU-MNT-2", "a FIFO"),
    "other node": (NODE, device, "OCIGPU-MNT-2", "a device 1:1"),
    "link for a node": (NODE, link, "OCIGPU-MNT-2", "a symbolic link"),
    "file with content for a node": (NODE, full, "OCIGPU-MNT-2", "a file"),
    "FIFO for a link": (LINK, fifo, "OCIGPU-MNT-3", "a FIFO"),
    "directory for a link": (LINK, Path.mkdir, "OCIGPU-MNT-3", "a directory"),
    "file for a link to nothing": (LINK, full, "OCIGPU-MNT-3", "No such file"),
    "file for a tmpfs": (TMPFS, full, "OCIGPU-MNT-2", "a file"),
    "link for a tmpfs": (TMPFS, link, "OCIGPU-MNT-2", "a symbolic link"),
}


@pytest.mark.parametrize("case", one_in(3, UNFIT))
def test_a_target_of_the_wrong_kind_is_refused(case: str, rootfs: Path) -> None:
    action, make, code, words = UNFIT[case]
    path = action.node.container_path if isinstance(action, Node) else action.container_path
    make(rootfs / path[1:])
    tree = snapshot(rootfs)
    with Lab(rootfs, dev=False) as lab:
        mounts = lab.mounts()
        _, found, message = lab.provision(Plan((action,)))
        assert (found, message) == (code, message)
        assert words in message
        assert path in message
        assert lab.mounts() == mounts
    assert snapshot(rootfs) == tree


SOURCES = {
    "a directory for a file": ("/etc", "file", "expected a file, found d"),
    "a link": ("/proc/self", "file", "expected a file, found l"),
    "a device for a file": ("/dev/null", "file", "expected a file, found c"),
    "a file for a socket": ("/etc/hostname", "socket", "expected a socket, found -"),
    "nothing": ("/no/such", "file", "No such file or directory"),
}


@pytest.mark.parametrize("case", list(SOURCES))
def test_a_source_of_the_wrong_kind_is_refused(case: str, rootfs: Path) -> None:
    host_path, kind, words = SOURCES[case]
    tree = snapshot(rootfs)
    with Lab(rootfs) as lab:
        _, code, message = lab.provision(Plan((Bind(host_path, "/usr/lib64/x", ("ro",), "library", kind),)))
    assert code == "OCIGPU-MNT-1"
    assert words in message
    assert snapshot(rootfs) == tree


def test_an_optional_source_that_has_vanished_is_a_note(rootfs: Path) -> None:
    tree = snapshot(rootfs)
    with Lab(rootfs) as lab:
        gone = Bind("/no/such", "/usr/lib64/x", ("ro",), "library", "file", True)
        assert lab.provision(Plan((gone,))) == (["/no/such has vanished from the host and was left out"], "", "")
    assert snapshot(rootfs) == tree


def test_a_host_node_of_another_number_is_refused(rootfs: Path) -> None:
    (rootfs / "dev/gpu").touch()  # an empty file asks for a mount
    node = Node(DeviceNode("/dev/gpu", "/dev/null", 195, 0, 0o666, 0, 0), "GPU")
    with Lab(rootfs, dev=False) as lab:
        _, code, message = lab.provision(Plan((node,)))
        assert code == "OCIGPU-DEV-3"
        assert "expected a node 195:0, found crw-rw-rw- 1:3" in message
        assert lab.provision(Plan((node,), simulated=True))[1] == "OCIGPU-DEV-3"


def test_a_file_stands_in_for_a_node_on_a_simulated_host_only(rootfs: Path, tmp_path: Path) -> None:
    (tmp_path / "stand-in").write_text("simulated")
    (rootfs / "dev/gpu").touch()
    node = Node(DeviceNode("/dev/gpu", str(tmp_path / "stand-in"), 195, 0, 0o666, 0, 0), "GPU")
    with Lab(rootfs, dev=False) as lab:
        assert lab.provision(Plan((node,)))[1] == "OCIGPU-DEV-3"
        assert lab.provision(Plan((node,), simulated=True)) == ([], "", "")
        assert lab.inside(lambda: Path("/dev/gpu").read_text()) == "simulated"


def test_a_node_is_mounted_where_the_file_system_knows_no_devices(host: Path, rootfs: Path) -> None:
    node = Node(DeviceNode("/dev/nvidia0", f"{host}/dev/nvidia0", 195, 0, 0o666, 0, 0), "GPU")

    with Lab(rootfs, dev=False) as lab:
        lab.inside(lambda: libc.mount("none", "/dev", "tmpfs", libc.MS_NODEV, "mode=755"))
        assert lab.provision(Plan((node,))) == ([], "", "")
        assert any("/dev/nvidia0 ro,nosuid,noexec" in line for line in lab.mounts())
        without = Node(DeviceNode("/dev/nvidia1", "", 195, 1, 0o666, 0, 0), "GPU")
        _, code, message = lab.provision(Plan((without,)))
        assert code == "OCIGPU-DEV-3"
        assert "the host has no node to mount" in message
        assert lab.inside(lambda: os.listdir("/dev")) == ["nvidia0"]


def test_a_right_node_is_kept_as_it_is(rootfs: Path) -> None:
    os.mknod(rootfs / "dev/gpu", 0o600 | 0o020000, os.makedev(195, 0))
    os.chown(rootfs / "dev/gpu", 5, 6)
    tree = snapshot(rootfs)
    with Lab(rootfs, dev=False) as lab:
        node = Node(DeviceNode("/dev/gpu", "", 195, 0, 0o666, 0, 0), "GPU")
        assert lab.provision(Plan((node,))) == ([], "", "")
    assert snapshot(rootfs) == tree


def test_nothing_is_made_below_proc(rootfs: Path) -> None:
    with Lab(rootfs) as lab:
        for action in (
            Tmpfs("/proc/driver/nvidia", 0o555, (), (), "parameters"),
            Bind("/etc", "/proc/driver/nvidia", ("ro",), "parameters", "directory"),
        ):
            _, code, message = lab.provision(Plan((action,)))
            assert code == "OCIGPU-MNT-1"
            assert "/proc/driver/nvidia" in message


@pytest.mark.parametrize("optional", [False, True])
def test_a_read_only_root_that_lacks_the_target(optional: bool, rootfs: Path) -> None:
    with Lab(rootfs) as lab:
        lab.inside(lambda: libc.mount(None, "/", None, libc.MS_REMOUNT | libc.MS_BIND | libc.MS_RDONLY))
        bind = Bind("/etc/hostname", "/usr/lib64/x", ("ro",), "library", "file", optional)
        notes, code, message = lab.provision(Plan((bind,)))
        if optional:
            assert (code, notes) == ("", ["/usr/lib64/x was left out: the container's root is read-only"])
        else:
            assert (code, notes) == ("OCIGPU-MNT-1", [])
            assert message.endswith("Read-only file system")
        there = Bind("/etc/hostname", "/usr/lib64/libold.so.1", ("ro",), "library")
        assert lab.provision(Plan((there,))) == ([], "", "")


@pytest.mark.rest
def test_an_image_that_exchanges_its_directories_all_the_time(host: Path, rootfs: Path, marker: Path) -> None:
    """A second container that shares the volume swaps the library directory and a link to the host."""
    (rootfs / "usr/swap").symlink_to(marker)
    before, mounts = state_of(marker), host_mounts()

    def exchange() -> None:
        one, other = (os.fsencode(rootfs / name) for name in ("usr/lib64", "usr/swap"))
        renameat2 = ctypes.CDLL(None).renameat2
        while True:
            renameat2(libc.AT_FDCWD, one, libc.AT_FDCWD, other, 2)

    plan = Plan(
        tuple(
            action
            for number in range(20)
            for action in (
                Bind(f"{host}/lib/libcuda.so.1.2", f"/usr/lib64/lib{number}.so.1.2", ("ro",), "library"),
                Link(f"/usr/lib64/lib{number}.so.1", f"lib{number}.so.1.2", "loader"),
            )
        )
    )
    outcomes = []
    with Lab(rootfs) as lab:
        neighbour = os.fork()  # a process: a thread would share the lock of the interpreter
        if neighbour == 0:
            exchange()
        try:
            for _ in range(60):
                outcomes.append(lab.provision(plan)[1])
                sources = [line.split(" ")[1] for line in lab.mounts()]
                assert not any("marker" in source for source in sources)
        finally:
            os.kill(neighbour, 9)
            os.waitpid(neighbour, 0)
    assert set(outcomes) <= {"", "OCIGPU-MNT-1", "OCIGPU-MNT-2", "OCIGPU-MNT-3"}
    assert state_of(marker) == before
    assert host_mounts() == mounts
