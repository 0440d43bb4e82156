"""Which SONAME links the folders of a container lack, hostile images included."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ocigpu.provision import sonames
from ocigpu.provision.sonames import read_soname_links
from ocigpu.system.proc import parse_mounts

LIB = "/usr/lib64"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """Call with a SONAME: returns the content of a library that has it."""
    directory = tmp_path_factory.mktemp("libraries")
    made: dict[str, bytes] = {}

    def get(soname: str) -> bytes:
        if soname not in made:
            path = directory / f"{len(made)}.so"
            command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{soname}", "-x", "assembler", "-", "-o", path]
            subprocess.run(command, input=b"", check=True)
            made[soname] = path.read_bytes()
        return made[soname]

    return get


Library = Callable[[str], bytes]


def points(root: Path, *mounted: str) -> tuple[str, ...]:
    lines = (f"{40 + number} 30 8:1 / {root}{path} ro - ext4 /dev/sda1 rw\n" for number, path in enumerate(mounted))
    return tuple(mount.point for mount in parse_mounts("".join(lines)).values())


def missing(
    root: Path, *folders: str, given: tuple[tuple[str, str], ...] = (), mounted: tuple[str, ...] = ()
) -> tuple[dict[str, str], tuple[tuple[str, str], ...]]:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        found = read_soname_links(fd, folders or (LIB,), given, points(root, *mounted))
    finally:
        os.close(fd)
    return {path: target for target, path in found.links}, found.left


def put(root: Path, path: str, content: bytes | str) -> Path:
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        place.symlink_to(content)
    else:
        place.write_bytes(content)
    return place


def test_a_link_is_missing_where_neither_the_image_nor_the_hook_has_it(tmp_path: Path, libraries: Library) -> None:
    put(tmp_path, f"{LIB}/libcuda.so.550.1", libraries("libcuda.so.1"))
    put(tmp_path, f"{LIB}/libcuda.so", "libcuda.so.1")
    put(tmp_path, f"{LIB}/libGLX_nvidia.so.550.1", libraries("libGLX_nvidia.so.0"))
    put(tmp_path, f"{LIB}/libGLX_indirect.so.0", "libGLX_nvidia.so.550.1")  # leads there, and is not its SONAME
    put(tmp_path, f"{LIB}/libz.so.1.2.13", libraries("libz.so.1"))
    put(tmp_path, f"{LIB}/libz.so.1", "libz.so.1.2.13")
    put(tmp_path, f"{LIB}/libnvidia-glcore.so.550.1", libraries("libnvidia-glcore.so.550.1"))
    put(tmp_path, f"{LIB}/nvidia_drv.so", libraries("libdrv.so.1"))
    put(tmp_path, f"{LIB}/libtext.so.1.1", b"no library")
    mounted = (f"{LIB}/libcuda.so.550.1", f"{LIB}/libGLX_nvidia.so.550.1")
    wanted = {f"{LIB}/libcuda.so.1": "libcuda.so.550.1", f"{LIB}/libGLX_nvidia.so.0": "libGLX_nvidia.so.550.1"}
    assert missing(tmp_path, mounted=mounted) == (wanted, ())
    assert missing(tmp_path) == (wanted, ())  # of the image's own libraries too
    del wanted[f"{LIB}/libcuda.so.1"]
    given = (("libcuda.so.550.1", f"{LIB}/libcuda.so.1"), ("libcuda.so.1", f"{LIB}/libcuda.so"))
    assert missing(tmp_path, given=given, mounted=mounted) == (wanted, ())
    other = (("elsewhere/libcuda.so.1", f"{LIB}/libcuda.so.1"),)  # the specification's own link has precedence
    assert missing(tmp_path, given=other, mounted=mounted) == (wanted, ())


def test_a_library_whose_link_is_there_is_not_opened(
    tmp_path: Path, libraries: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, f"{LIB}/libcuda.so.550.1", libraries("libcuda.so.1"))
    put(tmp_path, f"{LIB}/libcuda.so.1", "libcuda.so.550.1")
    put(tmp_path, f"{LIB}/libz.so.1.2.13", libraries("libz.so.1"))
    put(tmp_path, f"{LIB}/libz.so.1", "libz.so.1.2.13")
    monkeypatch.setattr(sonames, "open_file_inside", lambda *_: pytest.fail("opened"))
    assert missing(tmp_path, mounted=(f"{LIB}/libcuda.so.550.1",)) == ({}, ())


def test_a_mounted_library_wins_over_the_images_and_then_the_newest(tmp_path: Path, libraries: Library) -> None:
    for version in ("9.1", "550.9", "550.10", "999.1"):
        put(tmp_path, f"{LIB}/libcuda.so.{version}", libraries("libcuda.so.1"))
    assert missing(tmp_path)[0] == {f"{LIB}/libcuda.so.1": "libcuda.so.999.1"}
    mounted = (f"{LIB}/libcuda.so.550.9", f"{LIB}/libcuda.so.550.10")
    wanted = {f"{LIB}/libcuda.so.1": "libcuda.so.550.10"}
    assert missing(tmp_path, mounted=mounted)[0] == wanted
    link = put(tmp_path, f"{LIB}/libcuda.so.1", "libcuda.so.999.1")  # the image's own: it would hide the driver's
    assert missing(tmp_path, mounted=mounted)[0] == wanted
    link.unlink()
    link.symlink_to("libcuda.so.550.9")
    assert missing(tmp_path, mounted=mounted)[0] == {}
    link.unlink()
    link.mkdir()
    assert missing(tmp_path, mounted=mounted)[0] == {}
    link.rmdir()
    os.mkfifo(link)
    assert missing(tmp_path, mounted=mounted)[0] == {}
    link.unlink()
    link.write_bytes(libraries("libcuda.so.1"))  # no link: ldconfig leaves it alone, and so do we
    assert missing(tmp_path, mounted=mounted)[0] == {}


def test_a_link_of_the_image_that_leads_somewhere_stays(tmp_path: Path, libraries: Library) -> None:
    put(tmp_path, f"{LIB}/libfoo-2.so", libraries("libfoo.so.1"))
    put(tmp_path, f"{LIB}/libfoo.so.1", "/etc/alternatives/libfoo")
    assert missing(tmp_path)[0] == {f"{LIB}/libfoo.so.1": "libfoo-2.so"}
    put(tmp_path, "/etc/alternatives/libfoo", b"")
    assert missing(tmp_path)[0] == {}


def test_a_folder_may_be_reached_by_a_link_and_be_named_twice(tmp_path: Path, libraries: Library) -> None:
    put(tmp_path, f"{LIB}/libcuda.so.550.1", libraries("libcuda.so.1"))
    put(tmp_path, "/lib64", "/usr/lib64")
    found, left = missing(tmp_path, "/lib64", "/lib64/", "/none", mounted=(f"{LIB}/libcuda.so.550.1",))
    assert (found, left) == ({"/lib64/libcuda.so.1": "libcuda.so.550.1"}, ())


def test_nothing_is_made_in_a_directory_that_is_a_mount(tmp_path: Path, libraries: Library) -> None:
    """It may be the host's own."""
    put(tmp_path, "/opt/host/lib/libcuda.so.550.1", libraries("libcuda.so.1"))
    for point in ("/opt/host/lib", "/opt/host"):
        assert missing(tmp_path, "/opt/host/lib", mounted=(point,)) == ({}, (("/opt/host/lib", "libcuda.so.1"),))
    assert missing(tmp_path, "/opt/host/lib", mounted=("/opt/host/library", "/opt/ho"))[1] == ()


def test_a_mount_is_known_by_any_name(tmp_path: Path, libraries: Library) -> None:
    """A blank, a tab, a new line and a backslash have escapes in mountinfo."""
    put(tmp_path, "/mnt/my\t\n\\040 data/libcuda.so.550.1", libraries("libcuda.so.1"))
    put(tmp_path, LIB, "/mnt/my\t\n\\040 data")
    assert missing(tmp_path, mounted=("/mnt/my\\011\\012\\134040\\040data",)) == ({}, ((LIB, "libcuda.so.1"),))


def test_very_many_files_with_long_names_take_no_time(tmp_path: Path, libraries: Library) -> None:
    """They are not all compared: 65,536 such names took 24 s and more than a GiB."""
    folder = put(tmp_path, f"{LIB}/libcuda.so.550.1", libraries("libcuda.so.1")).parent
    for number in range(3 * sonames.MAX_READ):
        (folder / f"lib{number:05}.so.{'x.' * 118}").touch()
    compared: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sonames, "version_key", lambda name: compared.append(name) or [(0, name)])
        found = missing(tmp_path, mounted=(f"{LIB}/libcuda.so.550.1",))
    assert found == ({f"{LIB}/libcuda.so.1": "libcuda.so.550.1"}, ())
    assert len(compared) <= sonames.MAX_READ


@pytest.mark.parametrize("target", ["/../../../../", "../../../../../..", "/"])
def test_a_folder_that_leads_out_is_looked_for_inside(target: str, tmp_path: Path, libraries: Library) -> None:
    root = tmp_path / "root"
    put(tmp_path, "libout.so.1.1", libraries("libout.so.1"))
    put(root, "libin.so.1.1", libraries("libin.so.1"))
    put(root, LIB, target)
    assert missing(root)[0] == {f"{LIB}/libin.so.1": "libin.so.1.1"}


@pytest.mark.parametrize("soname", ["passwd", "lib\nx.so.1", "libx", "..", "lib\x1b[2J.so.1"])
def test_names_that_are_no_librarys_are_not_made(soname: str, tmp_path: Path, libraries: Library) -> None:
    put(
        tmp_path, f"{LIB}/libevil.so.1.1", libraries("libevil.so.1").replace(b"libevil.so.1\0", soname.encode() + b"\0")
    )
    assert missing(tmp_path)[0] == {}


def test_only_files_are_opened_and_not_without_end(
    tmp_path: Path, libraries: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path, f"{LIB}/libreal.so.1.1", libraries("libreal.so.1")).parent
    os.mkfifo(folder / "libfifo.so.1.1")
    (folder / "libdirectory.so.1.1").mkdir()
    put(tmp_path, f"{LIB}/libout.so.1.1", "/etc/shadow")
    for number in range(20):
        put(tmp_path, f"{LIB}/libx{number}.so.1.1", libraries(f"libx{number}.so.1"))
    assert len(missing(tmp_path)[0]) == 21
    monkeypatch.setattr(sonames, "MAX_LINKS", 5)
    assert len(missing(tmp_path)[0]) == 5
    monkeypatch.setattr(sonames, "MAX_READ", 3)
    wanted = {f"{LIB}/libreal.so.1": "libreal.so.1.1"}
    found = missing(tmp_path, mounted=(f"{LIB}/libreal.so.1.1",))[0]
    assert len(found) == 3
    assert found.items() >= wanted.items()  # those that were mounted come first
