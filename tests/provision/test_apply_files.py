"""Text files and permission bits: what is written, what is put back, and that no link of an image leads out."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from provision_lab import Lab, fail_at, host_mounts, make_rootfs, old_kernel, snapshot
from support.products import one_in

from ocigpu.core.actions import Bind, Mode, Plan, TextFile
from ocigpu.provision.operations.files import MAX_TEXT
from ocigpu.system import libc

pytestmark = pytest.mark.root

PATH = "/etc/ld.so.conf.d/00-driver.conf"
CONTENT = "/usr/lib64\n/usr/lib64/vdpau\n"
TEXT = TextFile(PATH, 0o644, CONTENT, "loader")
FAILS = Bind("/no/such/file", "/usr/bin/x", ("ro",), "fails")
WAYS = pytest.mark.parametrize("here", [False, True], ids=["from outside", "inside"])


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A directory of the host that must stay as it is, times included."""
    path = tmp_path / "marker"
    (path / "ld.so.conf.d").mkdir(parents=True)
    (path / "00-driver.conf").write_text("host's own")
    (path / "ld.so.conf.d/00-driver.conf").write_text("host's own")
    return path


def state_of(directory: Path) -> list[tuple[Any, ...]]:
    found = []
    for path in [directory, *sorted(directory.rglob("*"))]:
        status = path.lstat()
        found.append((path.name, status.st_mode, status.st_mtime_ns, status.st_ctime_ns, status.st_size))
    return found


def nothing(path: Path) -> None:
    path.parent.rmdir()


def empty_directory(path: Path) -> None:
    """The directory is there, the file is not."""


def other(path: Path) -> None:
    path.write_text("the image's")
    path.chmod(0o604)
    os.chown(path, 7, 8)
    os.utime(path, ns=(5, 1_000_000_007))


def equal(path: Path) -> None:
    path.write_text(CONTENT)
    path.chmod(0o600)


def link(path: Path) -> None:
    (path.parent / "kept").write_text("behind the link")
    path.symlink_to("kept")
    os.lchown(path, 7, 8)


def equal_link(path: Path) -> None:
    (path.parent / "kept").write_text(CONTENT)
    path.symlink_to("/etc/ld.so.conf.d/kept")


def dangling(path: Path) -> None:
    path.symlink_to("/nowhere")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def large(path: Path) -> None:
    path.write_bytes(b"x" * MAX_TEXT)


STATES: dict[str, tuple[Callable[[Path], None], bool, bool]] = {
    "nothing": (nothing, True, True),
    "an empty directory": (empty_directory, True, True),
    "another file": (other, True, False),
    "the same file": (equal, False, False),
    "a link": (link, True, False),
    "a link to the same content": (equal_link, True, False),
    "a link to nothing": (dangling, True, True),
    "a link to itself": (loop, True, True),
    "a file of the largest size": (large, True, False),
}
"""What the image has, whether it is replaced, and whether it is when only a missing file is to be written."""


def prepare_state(rootfs: Path, make: Callable[[Path], None]) -> None:
    path = rootfs / PATH[1:]
    path.parent.mkdir()
    make(path)


@pytest.mark.product(single=True)
@WAYS
@pytest.mark.parametrize("only_if_missing", [False, True], ids=["always", "if missing"])
@pytest.mark.parametrize("state", one_in(3, STATES))
def test_a_text_file_is_written_and_undone(state: str, only_if_missing: bool, here: bool, rootfs: Path) -> None:
    make, replaced, replaced_if_missing = STATES[state]
    written = replaced_if_missing if only_if_missing else replaced
    prepare_state(rootfs, make)
    tree = snapshot(rootfs)
    path = rootfs / PATH[1:]
    before = path.lstat() if os.path.lexists(path) else None
    text = TEXT._replace(only_if_missing=only_if_missing)
    with Lab(rootfs) as lab:
        assert lab.provision(Plan((text, FAILS)), here=here)[1] == "OCIGPU-MNT-1"
        assert snapshot(rootfs) == tree
        if before is not None and not written:
            assert path.lstat().st_ino == before.st_ino
        if state == "another file":
            assert path.stat().st_mtime_ns == 1_000_000_007
        assert lab.provision(Plan((text,)), here=here) == ([], "", "")
        if not written:
            assert snapshot(rootfs) == tree
        else:
            status = path.lstat()
            assert path.read_text() == CONTENT
            assert not path.is_symlink()
            assert (status.st_mode, status.st_uid, status.st_gid) == (0o100644, 0, 0)
            assert {p for p in os.listdir(path.parent) if p.startswith(".")} == set()
        again = snapshot(rootfs)
        inode = path.lstat().st_ino
        assert lab.provision(Plan((text,)), here=here) == ([], "", "")
        assert (snapshot(rootfs), path.lstat().st_ino) == (again, inode)


@pytest.mark.rest
@pytest.mark.product(single=True)
@WAYS
@pytest.mark.parametrize("how", ["raise", "defect", "kill worker", "kill parent"])
@pytest.mark.parametrize("state", one_in(3, STATES))
def test_a_text_file_is_undone_after_every_entry(state: str, how: str, here: bool, rootfs: Path) -> None:
    prepare_state(rootfs, STATES[state][0])
    (rootfs / "etc/mode").mkdir(mode=0o700)
    tree = snapshot(rootfs)
    plan = Plan(
        (
            TEXT,
            TextFile("/opt/a/b/file", 0o444, "x", "new"),
            Mode("/etc/mode", 0o755, "folder"),
            TEXT._replace(content="again"),
            TextFile("/usr/lib64/libold.so.1", 0o600, "", "empty"),
        )
    )
    with Lab(rootfs) as lab:
        mounts = lab.mounts()
        for number in range(1, 20):
            _, code, message = lab.provision(plan, fail_at(number, how), here=here)
            if not code:
                break
            assert "undone" not in message, message
            assert snapshot(rootfs) == tree, (number, message)
            assert lab.mounts() == mounts
        assert number >= 7
        assert (rootfs / PATH[1:]).read_text() == "again"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 1))


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)
        server.bind(path.name)
        os.chdir(here)


def too_large(path: Path) -> None:
    path.write_bytes(b"x" * (MAX_TEXT + 1))


UNFIT = {
    "a directory": (Path.mkdir, "a directory"),
    "a FIFO": (fifo, "a FIFO"),
    "a device": (device, "a device 1:1"),
    "a socket": (bound_socket, "a socket"),
    "a large file": (too_large, "no file of at most 256 KiB"),
}


@WAYS
@pytest.mark.parametrize("case", one_in(3, UNFIT))
def test_anything_but_a_small_file_or_a_link_is_refused(case: str, here: bool, rootfs: Path) -> None:
    make, words = UNFIT[case]
    prepare_state(rootfs, make)
    tree = snapshot(rootfs)
    with Lab(rootfs) as lab:
        _, code, message = lab.provision(Plan((TEXT,)), here=here)
    assert (code, words in message, PATH in message) == ("OCIGPU-MNT-2", True, True), message
    assert snapshot(rootfs) == tree


def test_a_content_without_bounds_is_refused(rootfs: Path) -> None:
    tree = snapshot(rootfs)
    with Lab(rootfs) as lab:
        _, code, message = lab.provision(Plan((TEXT._replace(content="ü" * MAX_TEXT),)))
    assert (code, "larger than 256 KiB" in message) == ("OCIGPU-MNT-2", True)
    assert snapshot(rootfs) == tree


HOSTILE: dict[str, list[tuple[str, str]]] = {
    "etc is a link to the host": [("etc", "{marker}")],
    "etc leads up and out": [("etc", "../marker")],
    "etc is the root": [("etc", "/")],
    "etc is above the root": [("etc", "../../../..")],
    "the directory is absolute": [("etc/ld.so.conf.d", "{marker}")],
    "the directory leads up and out": [("etc/ld.so.conf.d", "../../marker")],
    "the directory leads far up": [("etc/ld.so.conf.d", "../../../../../../../../../{marker}")],
    "the file is absolute": [("etc/ld.so.conf.d/00-driver.conf", "{marker}/00-driver.conf")],
    "the file leads up and out": [("etc/ld.so.conf.d/00-driver.conf", "../../../marker/00-driver.conf")],
    "two links": [("etc/ld.so.conf.d", "/var/x"), ("var/x", "{marker}")],
    "by way of the process": [("etc/ld.so.conf.d", "/proc/self/root/{marker}")],
    "by way of another process": [("etc", "/proc/1/root/{marker}")],
    "by way of its working directory": [("etc", "/proc/self/cwd")],
}


@pytest.mark.product(single=True)
@WAYS
@pytest.mark.parametrize("kernel", [lambda: None, old_kernel], ids=["new kernel", "old kernel"])
@pytest.mark.parametrize("kind", ["text", "mode", "if missing"])
@pytest.mark.parametrize("case", one_in(3, HOSTILE))
def test_links_of_an_image_lead_nowhere_else(
    case: str, kind: str, kernel: Callable[[], None], here: bool, rootfs: Path, marker: Path
) -> None:
    for name, target in HOSTILE[case]:
        path = rootfs / name
        if path.is_dir():
            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target.format(marker=marker))
    action = Mode(PATH, 0o777, "mode") if kind == "mode" else TEXT._replace(only_if_missing=kind == "if missing")
    before, mounts, tree = state_of(marker), host_mounts(), snapshot(rootfs)
    host = {path: path.lstat() for path in (Path("/etc"), Path("/etc/ld.so.conf.d"), Path("/"))}
    with Lab(rootfs) as lab:
        _, code, message = lab.provision(Plan((action,)), kernel, here=here)
        assert code in ("", "OCIGPU-MNT-1", "OCIGPU-MNT-2", "OCIGPU-MNT-4"), message
        if code:
            assert snapshot(rootfs) == tree
        elif kind != "mode":
            assert lab.inside(lambda: Path(PATH).read_text()) == CONTENT
    assert state_of(marker) == before
    assert not Path(PATH).exists()
    for path, status in host.items():  # others may make something else there meanwhile
        found = path.lstat()
        assert (found.st_mode, found.st_uid, found.st_gid) == (status.st_mode, status.st_uid, status.st_gid)
        assert not [name for name in os.listdir(path) if name.startswith((".ocigpu", "00-driver"))]
    assert host_mounts() == mounts


def test_the_file_can_be_put_through_a_link_inside_the_root(rootfs: Path) -> None:
    (rootfs / "var/conf").mkdir()
    (rootfs / "etc/ld.so.conf.d").symlink_to("/var/conf")
    with Lab(rootfs) as lab:
        assert lab.provision(Plan((TEXT,)), here=True) == ([], "", "")
    assert (rootfs / "var/conf/00-driver.conf").read_text() == CONTENT


@WAYS
def test_permission_bits_are_set_and_put_back(here: bool, rootfs: Path) -> None:
    (rootfs / "srv").mkdir(mode=0o711)
    (rootfs / "srv/file").write_text("x")
    (rootfs / "srv/file").chmod(0o640)
    (rootfs / "link").symlink_to("/srv/file")
    (rootfs / "out").symlink_to("../../../../../etc/hostname")
    plan = Plan(
        tuple(
            Mode(path, mode, "mode")
            for path, mode in (
                ("/srv", 0o755),
                ("/link", 0o604),
                ("/missing", 0o1),
                ("/srv/file/x", 0o1),
                ("/out", 0o1),
            )
        )
    )
    tree = snapshot(rootfs)
    with Lab(rootfs) as lab:
        for how in ("raise", "kill worker", "kill parent"):
            for number in (1, 2, 3):
                failing = plan._replace(actions=(*plan.actions, TEXT))
                assert lab.provision(failing, fail_at(number, how), here=here)[1] != ""
                assert snapshot(rootfs) == tree
        assert lab.provision(plan, here=here) == ([], "", "")
        assert ((rootfs / "srv").stat().st_mode, (rootfs / "srv/file").stat().st_mode) == (0o40755, 0o100604)
        assert lab.provision(plan, here=here) == ([], "", "")


@WAYS
def test_what_the_host_lends_keeps_its_mode(here: bool, rootfs: Path, marker: Path) -> None:
    """A volume, a device node, a mounted file: their permission bits are the host's."""
    marker.chmod(0o700)
    (rootfs / "volume").mkdir()
    (rootfs / "link").symlink_to("volume/00-driver.conf")

    with Lab(rootfs) as lab:
        lab.inside(lambda: os.mkdir("/dev/dri", 0o700))
        lab.inside(lambda: os.mknod("/dev/gpu", 0o600 | 0o020000, os.makedev(195, 0)))

        def mount_volume() -> None:
            lab.enter()
            libc.mount(str(marker), str(rootfs / "volume"), None, libc.MS_BIND)

        pid = os.fork()
        if pid == 0:
            mount_volume()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        before = state_of(marker)
        paths = ("/volume", "/link", "/dev/gpu", "/dev/dri")
        notes, code, message = lab.provision(Plan(tuple(Mode(path, 0o755, "mode") for path in paths)), here=here)
        assert (code, message) == ("", "")
        assert notes == [
            "/volume keeps its mode 0700: it is mounted from elsewhere",
            "/link keeps its mode 0644: it is mounted from elsewhere",
            "/dev/gpu keeps its mode 0600: it is neither a file nor a directory",
        ]
        assert lab.inside(lambda: os.stat("/dev/dri").st_mode) == 0o40755
    assert state_of(marker) == before


def read_only(lab: Lab) -> None:
    lab.inside(lambda: libc.mount(None, "/", None, libc.MS_REMOUNT | libc.MS_BIND | libc.MS_RDONLY))


def test_a_read_only_root_is_told(rootfs: Path) -> None:
    (rootfs / "etc/ld.so.conf.d").mkdir()
    (rootfs / "etc/same").write_text("same")
    with Lab(rootfs) as lab:
        read_only(lab)
        for action in (TEXT, TextFile("/opt/x", 0o644, "", "new"), Mode("/etc", 0o700, "mode")):
            _, code, message = lab.provision(Plan((action,)))
            assert (code, message.endswith("Read-only file system")) == ("OCIGPU-MNT-1", True), message
        same = TextFile("/etc/same", 0o644, "same", "is there")
        assert lab.provision(Plan((same,))) == ([], "", "")


def test_a_read_only_root_is_written_to_from_inside_and_is_read_only_afterwards(rootfs: Path) -> None:
    """As crun has it when hooks of the container's namespaces run; runc makes it read-only after them."""
    plan = Plan((TEXT, Mode("/etc", 0o711, "mode")))
    tree = snapshot(rootfs)
    with Lab(rootfs) as lab:
        read_only(lab)
        mounts = lab.mounts()
        for how in ("raise", "kill worker", "kill parent"):
            for number in range(1, 5):
                assert lab.provision(plan, fail_at(number, how), here=True)[1] != ""
                assert (snapshot(rootfs), lab.mounts()) == (tree, mounts)
        assert lab.provision(plan, here=True) == ([], "", "")
        assert lab.mounts() == mounts
        assert (rootfs / PATH[1:]).read_text() == CONTENT


@pytest.mark.parametrize("what", ["file system", "mount"])
def test_what_the_host_has_read_only_stays_so(what: str, rootfs: Path) -> None:
    libc.mount("tmpfs", str(rootfs), "tmpfs", 0, "mode=755")
    try:
        make_rootfs(rootfs)
        bind = libc.MS_BIND if what == "mount" else 0
        libc.mount(None, str(rootfs), None, libc.MS_REMOUNT | libc.MS_RDONLY | bind)
        with Lab(rootfs, dev=False) as lab:
            mounts = lab.mounts()
            _, code, message = lab.provision(Plan((TEXT,)), here=True)
            assert (code, message.endswith("Read-only file system")) == ("OCIGPU-MNT-1", True), message
            assert lab.mounts() == mounts
    finally:
        libc.umount2(str(rootfs), libc.MNT_DETACH)


def test_a_file_that_is_mounted_is_not_replaced(rootfs: Path, marker: Path) -> None:
    prepare_state(rootfs, other)
    with Lab(rootfs) as lab:
        bind = Bind(f"{marker}/00-driver.conf", PATH, ("ro",), "a volume")
        before = state_of(marker)
        _, code, message = lab.provision(Plan((bind, TEXT)), here=True)
        assert (code, "is in a volume" in message) == ("OCIGPU-MNT-4", True), message
    assert state_of(marker) == before
    assert (rootfs / PATH[1:]).read_text() == "the image's"
