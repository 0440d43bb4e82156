"""What is read from images, hostile ones included."""

import json
import os
import stat
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from hypothesis import given
from hypothesis import strategies as st
from support.machine import LOADER, MACHINE, MUSL_LOADER, TRIPLET

from ocigpu.core.facts import ImageFacts
from ocigpu.gpus.libraries import elf
from ocigpu.provision import compat, image, inside, loader

DEBIAN32 = "/usr/lib/i386-linux-gnu" if MACHINE == "x86_64" else "/usr/lib32"


def read(root: Path, driver: str = "550.163.01") -> ImageFacts:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        return image.read_image_facts(fd, driver)
    finally:
        os.close(fd)


def touch(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


@pytest.mark.parametrize(
    ("names", "library_dir", "library_dir32"),
    [
        ([], "/usr/lib64", "/usr/lib32"),
        (["etc/debian_version"], f"/usr/lib/{TRIPLET}", DEBIAN32),
        (["usr/lib64/x", "usr/lib/x"], "/usr/lib64", "/usr/lib"),
        (["usr/lib64/x", "usr/lib/x", "usr/lib32/x"], "/usr/lib64", "/usr/lib32"),
    ],
    ids=["empty", "debian", "fedora", "arch"],
)
def test_where_libraries_go(names: list[str], library_dir: str, library_dir32: str, tmp_path: Path) -> None:
    found = read(touch(tmp_path, *names))
    assert (found.library_dir, found.library_dir32) == (library_dir, library_dir32)


def test_a_lib64_that_is_lib_is_no_place_for_32_bits(tmp_path: Path) -> None:
    touch(tmp_path, "usr/lib/x")
    (tmp_path / "usr/lib64").symlink_to("lib")
    assert read(tmp_path).library_dir32 == "/usr/lib32"


@pytest.mark.parametrize(
    ("names", "libc"),
    [
        ([], ""),
        (["lib/x"], ""),
        (["lib64/ld-linux-x86-64.so.2"], "glibc"),
        (["lib/ld-linux-aarch64.so.1"], "glibc"),
        ([f"usr/lib/{TRIPLET}/ld-linux-x86-64.so.2"], "glibc"),
        (["lib/ld-musl-x86_64.so.1"], "musl"),
        (["lib/ld-musl-x86_64.so.1", "usr/lib64/ld-linux-x86-64.so.2"], "glibc"),
    ],
)
def test_the_loader_tells_the_c_library(names: list[str], libc: str, tmp_path: Path) -> None:
    assert read(touch(tmp_path, *names)).libc == libc


@pytest.mark.parametrize("libc", ["glibc", "musl"])
def test_the_loader_is_found_whatever_a_directory_lists_first(
    libc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large directory a part is listed, and which is the file system's choice: here it is none of the names."""
    touch(tmp_path, f"usr/lib64/{LOADER}" if libc == "glibc" else f"lib/{MUSL_LOADER}")
    monkeypatch.setattr(inside, "MAX_ENTRIES", 0)
    assert read(tmp_path).libc == libc
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        assert loader.read_loader_facts(fd).musl_file == (f"/etc/ld-musl-{MACHINE}.path" if libc == "musl" else "")
    finally:
        os.close(fd)


def test_the_loaders_directory_may_be_a_link(tmp_path: Path) -> None:
    touch(tmp_path, "usr/lib/ld-musl-x86_64.so.1")
    (tmp_path / "lib").symlink_to("/usr/lib")
    assert read(tmp_path).libc == "musl"


@pytest.mark.parametrize(
    ("names", "driver", "major"),
    [
        (["libcuda.so.575.51.03"], "550.163.01", 575),
        (["libcuda.so.575.51.03", "libcuda.so.580.1.1", "libcuda.so.1"], "550.163.01", 580),
        (["libcuda.so.550.163.01"], "550.163.01", 0),
        (["libcuda.so.535.1.1"], "550.163.01", 0),
        (["libcuda.so.1000.1"], "580.1", 1000),
        (["libcuda.so.99999999999999999999.1"], "550.1", 0),
        (["libcuda.so.x.1", "libcuda.so.", "libother.so.900.1"], "550.1", 0),
    ],
)
def test_compatibility_libraries_newer_than_the_driver(
    names: list[str], driver: str, major: int, tmp_path: Path
) -> None:
    found = read(touch(tmp_path, *(f"usr/local/cuda/compat/{name}" for name in names)), driver)
    assert (found.compat_dir, found.compat_major) == (image.COMPAT_DIR if major else "", major)


def test_a_cuda_directory_that_is_a_link_as_in_nvidias_images(tmp_path: Path) -> None:
    touch(tmp_path, "usr/local/cuda-12.9/compat/libcuda.so.575.51.03")
    (tmp_path / "usr/local/cuda").symlink_to("/etc/alternatives/cuda")
    (tmp_path / "etc/alternatives").mkdir(parents=True)
    (tmp_path / "etc/alternatives/cuda").symlink_to("/usr/local/cuda-12.9")
    assert read(tmp_path).compat_major == 575


@pytest.mark.parametrize("target", ["/../../../../", "../../../../../..", "/", "/proc/self/cwd"])
def test_a_compatibility_directory_that_leads_out(target: str, tmp_path: Path) -> None:
    (tmp_path / "usr/local/cuda").mkdir(parents=True)
    (tmp_path / "usr/local/cuda/compat").symlink_to(target)
    assert read(tmp_path).compat_dir == ""


def directory(path: Path) -> None:
    path.mkdir()


def link(path: Path) -> None:
    path.symlink_to("/etc/shadow")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))


@pytest.mark.parametrize("make", [directory, link, fifo, pytest.param(device, marks=pytest.mark.root)])
def test_only_a_file_is_a_library(make: Callable[[Path], None], tmp_path: Path) -> None:
    """None of them is opened for reading: a FIFO would block, a device might act."""
    (tmp_path / "usr/local/cuda/compat").mkdir(parents=True)
    make(tmp_path / "usr/local/cuda/compat/libcuda.so.999.1")
    assert read(tmp_path).compat_dir == ""


def test_marks_that_are_no_files_do_not_stop_anything(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc/debian_version")
    os.mkfifo(tmp_path / "lib64")
    (tmp_path / "lib").symlink_to("lib")
    assert read(tmp_path).library_dir == f"/usr/lib/{TRIPLET}"


def test_a_listing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "MAX_ENTRIES", 100)
    touch(tmp_path, *(f"lib64/{number}" for number in range(inside.MAX_ENTRIES + 50)))
    fd = os.open(tmp_path, os.O_PATH)
    try:
        assert len(inside.list_inside(fd, "/lib64")) == inside.MAX_ENTRIES
    finally:
        os.close(fd)


# the note of a CUDA compatibility library


NOTED = {"format": 1, "CUDA version": "12.9", "driver": [535, 550, 560, 565, 570, 575], "device": [1, 2]}
"""Keys as libcuda 575.57.08 and 590.44.01 spell them."""


def note_bytes(content: bytes, alignment: int = 4, name: bytes = b"NVIDIA Corporation\0") -> bytes:
    padded = name.ljust((len(name) + alignment - 1) // alignment * alignment, b"\0")
    return struct.pack("<III", len(name), len(content), 1) + padded + content


def compile_library(path: Path, note: bytes = b"", alignment: int = 4) -> Path:
    """Compile a library with the section of the note, with the tools of this machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = ""
    if note:
        words = ",".join(map(str, note))
        source = f'.section {compat.NOTE},"a",@note\n.balign {alignment}\n.byte {words}\n'
    command = ["gcc", "-shared", "-nostdlib", "-x", "assembler", "-", "-o", path]
    subprocess.run(command, input=source.encode(), check=True)
    return path


def read_note(path: Path) -> compat.CompatNote | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        return compat.parse_note(elf.read_section(fd, compat.NOTE, compat.MAX_NOTE) or b"")
    finally:
        os.close(fd)


@pytest.mark.parametrize("alignment", [4, 8])
def test_the_note_of_a_library_is_read_as_pyelftools_reads_it(alignment: int, tmp_path: Path) -> None:
    content = json.dumps(NOTED).encode()
    path = compile_library(tmp_path / "libcuda.so.575.57.08", note_bytes(content, alignment), alignment)
    with path.open("rb") as file:
        section = ELFFile(file).get_section_by_name(compat.NOTE)
        data = section.data()
        if alignment == 4:
            (note,) = section.iter_notes()
            assert (note["n_name"], note["n_descdata"]) == ("NVIDIA Corporation", content)
    fd = os.open(path, os.O_RDONLY)
    assert elf.read_section(fd, compat.NOTE, 1 << 16) == data
    assert elf.read_section(fd, compat.NOTE, len(data) - 1) is None
    assert elf.read_section(fd, ".none", 1 << 16) is None
    os.close(fd)
    assert read_note(path) == compat.CompatNote((12, 9), (535, 550, 560, 565, 570, 575))


def test_every_section_of_a_library_of_this_machine_is_read_as_pyelftools_reads_it() -> None:
    path = Path(
        subprocess.run(["gcc", "-print-file-name=libc.so.6"], check=True, capture_output=True).stdout.decode().strip()
    )
    fd = os.open(path, os.O_RDONLY)
    with path.open("rb") as file:
        for section in ELFFile(file).iter_sections():
            if section["sh_type"] in ("SHT_NOTE", "SHT_STRTAB", "SHT_DYNAMIC"):
                assert elf.read_section(fd, section.name, 1 << 24) == section.data(), section.name
    os.close(fd)


WITH_NOTE = compat.CompatLibrary("/compat", (575, 57, 8), compat.CompatNote((12, 9), (535, 550, 560, 565, 570, 575)))


@pytest.mark.parametrize(
    ("library", "driver", "cuda", "used"),
    [
        (WITH_NOTE, "", "12.8", True),
        (WITH_NOTE, "", "12.9", False),
        (WITH_NOTE, "", "12.10", False),
        (WITH_NOTE, "", "x", False),
        (WITH_NOTE, "", "", False),
        (WITH_NOTE, "590.44.01", "", False),
        (WITH_NOTE, "570.211.01", "", True),
        (WITH_NOTE, "575.10.10", "", True),
        (WITH_NOTE, "575.57.08", "", False),
        (WITH_NOTE, "575.99.99", "", False),
        (WITH_NOTE, "555.1", "", False),
        (WITH_NOTE, "570.211.01", "12.9", True),
        (WITH_NOTE, "unknown", "12.8", True),
        (compat.CompatLibrary("/c", (333, 1)), "222.2", "", True),
        (compat.CompatLibrary("/c", (333, 2)), "333.1", "", False),
        (compat.CompatLibrary("/c", (222, 1)), "99.1", "", True),
        (compat.CompatLibrary("/c", (333, 1)), "222.2", "12.8", False),
        (compat.CompatLibrary("/c", (333, 1)), "", "", False),
    ],
)
def test_whether_a_compatibility_library_is_used(
    library: compat.CompatLibrary, driver: str, cuda: str, used: bool
) -> None:
    assert compat.suits_driver(library, driver, cuda) is used


@pytest.mark.parametrize(("driver", "used"), [("570.211.01", True), ("590.1", False), ("555.1", False)])
def test_the_note_counts_in_hook_mode_too(driver: str, used: bool, tmp_path: Path) -> None:
    compile_library(
        tmp_path / "usr/local/cuda-12.9/compat/libcuda.so.575.57.08", note_bytes(json.dumps(NOTED).encode())
    )
    (tmp_path / "usr/local/cuda").symlink_to("cuda-12.9")
    found = read(tmp_path, driver)
    assert (found.compat_dir, found.compat_major) == (("/usr/local/cuda-12.9/compat", 575) if used else ("", 0))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{" * 11,
        note_bytes(b"{"),
        note_bytes(b"[1]"),
        note_bytes(b"{" * 60_000),
        note_bytes(b'{"driver": ' + b"[" * 60_000),
        note_bytes(b'{"driver": ' + b"9" * 60_000 + b"}"),
        note_bytes(b'{"driver": [1]}', name=b"GNU\0"),
        struct.pack("<III", 0xFFFFFFFF, 0xFFFFFFFF, 1) + b"NVIDIA Corporation\0" + b"{}",
        note_bytes(b'{"\xff": 1}'),
    ],
    ids=range(10),
)
def test_a_note_that_is_not_understood_is_none(data: bytes) -> None:
    assert compat.parse_note(data) is None


@pytest.mark.parametrize(
    ("content", "cuda", "drivers"),
    [
        ({}, (), ()),
        ({"CUDA version": 12, "driver": 5}, (), ()),
        ({"CUDA version": "12.9.x", "driver": ["535", 550, None, -1, [], "x"]}, (), (535, 550)),
    ],
)
def test_what_a_note_leaves_out_matches_nothing(
    content: object, cuda: tuple[int, ...], drivers: tuple[int, ...]
) -> None:
    assert compat.parse_note(note_bytes(json.dumps(content).encode())) == compat.CompatNote(cuda, drivers)


@pytest.mark.parametrize(
    "content",
    [
        {"CUDA version": "12.9", "driver": [535, 1000]},
        {"CUDA Version": "12.9", "Driver": [535, 1000]},
        {"cuda version": "12.9", "DRIVER": [535, 1000]},
        {"cuda ver\u017fion": "12.9", "driver": [535, 1000]},
        {"CUDA Version": "11.0", "Driver": [1], "CUDA version": "12.9", "driver": ["535", 1000]},
    ],
    ids=["real", "titled", "others", "long s", "the last one counts"],
)
def test_keys_of_a_note_count_whatever_their_case(content: object) -> None:
    """As Go's decoder, which the vendor's reader uses, matches them."""
    note = compat.CompatNote((12, 9), (535, 1000))
    assert compat.parse_note(note_bytes(json.dumps(content).encode())) == note
    library = compat.CompatLibrary("/compat", (1000, 1), note)
    assert compat.suits_driver(library, "1000.0.5")
    assert compat.suits_driver(library, "535.1")
    assert not compat.suits_driver(library, "53.1")
    assert not compat.suits_driver(library, "100.1")


@given(st.binary(max_size=200), st.integers(0, 200), st.sampled_from([1, 2]))
def test_no_file_breaks_the_reader_of_sections(data: bytes, at: int, bits: int) -> None:
    fd = os.memfd_create("elf")
    try:
        header = bytearray(b"\x7fELF" + bytes([bits, 1, 1]) + bytes(200))
        header[at : at + len(data)] = data
        os.write(fd, header)
        assert elf.read_section(fd, compat.NOTE, 1 << 16) is None
    finally:
        os.close(fd)


@pytest.mark.parametrize("field", [40, 58, 60, 62], ids=["offset", "entry size", "count", "names"])
@pytest.mark.parametrize("value", [0, 0xFF, 0xFFFF])
def test_a_broken_section_table_has_no_sections(field: int, value: int, tmp_path: Path) -> None:
    path = compile_library(tmp_path / "lib.so", note_bytes(b"{}"))
    data = bytearray(path.read_bytes())
    assert data[4] == 2
    data[field : field + 2] = struct.pack("<H", value)
    path.write_bytes(data)
    assert read_note(path) is None


# where the loader looks


def facts_of(root: Path) -> loader.LoaderFacts:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        return loader.read_loader_facts(fd)
    finally:
        os.close(fd)


def conf_of(root: Path) -> tuple[str, ...]:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        return loader.read_conf(fd)
    finally:
        os.close(fd)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "found"),
    [
        pytest.param({}, set(), id="none"),
        pytest.param({"etc/ld.so.conf": "/a\n  /b/ # comment\n# /c\n\nhwcap 1 x\n"}, {"/a", "/b"}, id="lines"),
        pytest.param(
            {"etc/ld.so.conf": "include /etc/ld.so.conf.d/*.conf", "etc/ld.so.conf.d/x.conf": "/x\n"},
            {"/x"},
            id="Debian",
        ),
        pytest.param(
            {"etc/ld.so.conf": "include ld.so.conf.d/*.conf", "etc/ld.so.conf.d/x.conf": "/x\n"}, {"/x"}, id="Fedora"
        ),
        pytest.param(
            {
                "etc/ld.so.conf": "include ld.so.conf.d/*.conf",
                "etc/ld.so.conf.d/.hidden.conf": "/h",
                "etc/ld.so.conf.d/x.conf.old": "/o",
                "etc/ld.so.conf.d/a.conf": "include more/b.conf",
                "etc/ld.so.conf.d/more/b.conf": "/b",
            },
            {"/b"},
            id="nested",
        ),
        pytest.param({"etc/ld.so.conf": "include ld.so.conf\n/a"}, {"/a"}, id="includes itself"),
        pytest.param(
            {
                "etc/ld.so.conf": "include ld.so.conf.d/*.conf",
                "etc/ld.so.conf.d/00-ocigpu.conf": "/ours",
                "etc/ld.so.conf.d/00-compat-ocigpu.conf": "/compat",
            },
            set(),
            id="our own",
        ),
        pytest.param(
            {"etc/ld.so.conf": "include 0.conf", **{f"etc/{n}.conf": f"include {n + 1}.conf\n/{n}" for n in range(20)}},
            {f"/{n}" for n in range(loader.MAX_DEPTH)},
            id="too deep",
        ),
    ],
)
def test_the_loaders_configuration_is_read(files: dict[str, str], found: set[str], tmp_path: Path) -> None:
    assert set(conf_of(write(tmp_path, files))) == found


def test_a_configuration_without_end_is_read_to_the_limits(tmp_path: Path) -> None:
    lines = "".join(f"/{number}\n" for number in range(20_000))
    many = {f"etc/ld.so.conf.d/{number}.conf": lines for number in range(300)}
    write(tmp_path, {"etc/ld.so.conf": "include ld.so.conf.d/*\n" * 5000, **many})
    assert len(conf_of(tmp_path)) == loader.MAX_DIRECTORIES


@pytest.mark.parametrize("target", ["/../../../../etc", "/", "../../../../../../etc", "/proc/self/root/etc"])
def test_a_configuration_that_leads_out_is_the_images_own(target: str, tmp_path: Path) -> None:
    outside = tmp_path / "etc"
    write(tmp_path, {"etc/ld.so.conf": "/outside", "rootfs/x": ""})
    (tmp_path / "rootfs/etc").symlink_to(target)
    assert outside.exists()
    assert conf_of(tmp_path / "rootfs") == ()


@pytest.mark.parametrize("make", [directory, fifo])
def test_a_configuration_that_is_no_file_is_not_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    make(tmp_path / "etc/ld.so.conf")
    assert conf_of(tmp_path) == ()


def test_the_system_directories_are_the_images(tmp_path: Path) -> None:
    touch(tmp_path, "usr/lib64/ld-linux-x86-64.so.2")
    plain = facts_of(tmp_path)
    touch(tmp_path, "etc/debian_version")
    debian = facts_of(tmp_path)
    assert plain.libc == debian.libc == "glibc"
    assert "/usr/lib64" in plain.searched
    assert f"/usr/lib/{TRIPLET}" not in plain.searched
    assert f"/usr/lib/{TRIPLET}" in debian.searched
    assert "/usr/lib64" not in debian.searched
    assert (plain.has_conf, plain.has_own_conf, plain.has_compat_conf, plain.musl_file) == (False, False, False, "")


def test_files_of_an_earlier_hook_are_seen(tmp_path: Path) -> None:
    files = {"etc/ld.so.conf": "", "etc/ld.so.conf.d/00-ocigpu.conf": "/x\n"}
    found = facts_of(write(tmp_path, {**files, "etc/ld.so.conf.d/00-compat-ocigpu.conf": "-C /x\n/compat\n/more\n"}))
    assert (found.has_conf, found.has_own_conf, found.has_compat_conf) == (True, True, True)
    assert found.compat_directories == ("/compat",)


@pytest.mark.parametrize(
    ("files", "name", "text"),
    [
        pytest.param({"lib/ld-musl-x86_64.so.1": ""}, "x86_64", loader.MUSL_DIRECTORIES + "\n", id="no path file"),
        pytest.param(
            {"lib/ld-musl-aarch64.so.1": "", "etc/ld-musl-aarch64.path": "/lib\n"},
            "aarch64",
            "/lib\n",
            id="a path file",
        ),
        pytest.param({"lib/ld-musl-armhf.so.1": "", "etc/ld-musl-armhf.path": ""}, "armhf", "", id="an empty one"),
        pytest.param(
            {"lib/ld-musl-x86_64.so.1": "", "lib64/ld-linux-x86-64.so.2": "", "etc/alpine-release": ""},
            "x86_64",
            loader.MUSL_DIRECTORIES + "\n",
            id="Alpine with glibc",
        ),
        pytest.param({"lib/ld-musl-x86_64.so.1": "", "lib64/ld-linux-x86-64.so.2": ""}, "", None, id="glibc with musl"),
        pytest.param({"lib/ld-musl-..x.so.1": ""}, "", None, id="an odd name"),
        pytest.param(
            {"lib/ld-musl-x86_64.so.1": "", "etc/ld-musl-x86_64.path": "x" * (loader.MAX_CONF + 1)},
            "x86_64",
            None,
            id="too large",
        ),
    ],
)
def test_musls_path_file_is_read(files: dict[str, str], name: str, text: str | None, tmp_path: Path) -> None:
    found = facts_of(write(tmp_path, files))
    assert found.musl_file == (f"/etc/ld-musl-{name}.path" if name else "")
    assert found.musl_text == text


# device nodes


@pytest.mark.root
def test_nodes_of_the_drivers_are_found_by_name_and_told_by_number(tmp_path: Path) -> None:
    (tmp_path / "dev/nvidia-caps").mkdir(parents=True)
    for name, number in (
        ("nvidia0", (195, 7)),
        ("nvidia12", (195, 12)),
        ("nvidiactl", (195, 255)),
        ("nvidia-uvm", (510, 0)),
        ("nvidia-caps/nvidia-cap30", (509, 30)),
        ("nvidia-caps/config", (509, 1)),
    ):
        os.mknod(tmp_path / "dev" / name, 0o600 | stat.S_IFCHR, os.makedev(*number))
    os.mknod(tmp_path / "dev/nvidia1", 0o600 | stat.S_IFBLK, os.makedev(195, 1))
    (tmp_path / "dev/nvidia2").symlink_to("nvidia0")
    (tmp_path / "dev/nvidia3").touch()
    fd = os.open(tmp_path, os.O_PATH)
    try:
        assert image.read_nvidia_nodes(fd) == (
            image.ContainerNode("/dev/nvidia0", 195, 7),
            image.ContainerNode("/dev/nvidia12", 195, 12),
            image.ContainerNode("/dev/nvidia-caps/nvidia-cap30", 509, 30),
        )
    finally:
        os.close(fd)


@pytest.mark.parametrize("path", ["proc/version", "proc/self/status", "sys/kernel/uevent_seqnum"])
def test_files_of_the_kernel_are_not_read(path: str, tmp_path: Path) -> None:
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        assert Path("/", path).read_text()
        assert inside.read_inside(fd, path, 100) is None
    finally:
        os.close(fd)
