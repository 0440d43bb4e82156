import subprocess
from pathlib import Path

import pytest
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from handmade_host import TRIPLET, elf_bytes
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.gpus.libraries.elf import Elf, read_elf

SYSTEM_LIBRARIES = sorted(Path(f"/usr/lib/{TRIPLET}").glob("*.so*"))[:300]


def oracle(path: Path) -> Elf | None:
    """What pyelftools says of a file."""
    with path.open("rb") as file:
        try:
            elf = ELFFile(file)
        except ELFError:
            return None
        if elf["e_type"] != "ET_DYN":
            return None
        soname = ""
        for segment in elf.iter_segments("PT_DYNAMIC"):
            soname = next((tag.soname for tag in segment.iter_tags("DT_SONAME")), "")
        machine = {"EM_X86_64": 62, "EM_386": 3, "EM_AARCH64": 183, "EM_ARM": 40}[elf["e_machine"]]
        return Elf(elf.elfclass, machine, soname)


def test_every_library_of_this_machine_reads_as_pyelftools_reads_it() -> None:
    assert SYSTEM_LIBRARIES
    for path in SYSTEM_LIBRARIES:
        assert read_elf(str(path)) == oracle(path), path


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("soname", ["libcuda.so.1", ""])
def test_hand_made_objects_read_as_pyelftools_reads_them(tmp_path: Path, bits: int, soname: str) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(elf_bytes(soname, bits))
    found = read_elf(str(path))
    assert found is not None
    assert found == oracle(path)
    assert (found.bits, found.soname) == (bits, soname)


def test_a_compiled_library_without_soname_has_none(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", path, "-x", "c", "/dev/null"], check=True)
    assert read_elf(str(path)) == oracle(path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x7fELF", id="magic only"),
        pytest.param(b"#!/bin/sh\n" + bytes(100), id="script"),
        pytest.param(elf_bytes("a.so")[:100], id="cut in the program headers"),
        pytest.param(elf_bytes("a.so", kind=2), id="executable"),
        pytest.param(elf_bytes("a.so").replace(b"a.so\0", b"a.so!"), id="SONAME without end"),
        pytest.param(elf_bytes("../a.so"), id="SONAME with a directory"),
        pytest.param(elf_bytes("é.so"), id="SONAME that is not ASCII"),
        pytest.param(elf_bytes("x" * 300), id="SONAME of 300 bytes"),
    ],
)
def test_malformed_objects_are_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(content)
    assert read_elf(str(path)) is None


def test_what_cannot_be_opened_is_none(tmp_path: Path) -> None:
    assert read_elf(str(tmp_path / "none")) is None
    assert read_elf(str(tmp_path)) is None


@given(st.sampled_from([64, 32]), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=12))
def test_damaged_objects_never_raise(
    tmp_path_factory: pytest.TempPathFactory, bits: int, damage: list[tuple[int, int]]
) -> None:
    content = bytearray(elf_bytes("libcuda.so.1", bits))
    for position, value in damage:
        content[position % len(content)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.so"
    path.write_bytes(content)
    found = read_elf(str(path))
    assert found is None or len(found.soname) <= 255


@given(st.binary(max_size=400))
def test_anything_after_the_magic_never_raises(tmp_path_factory: pytest.TempPathFactory, tail: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random.so"
    for start in (b"\x7fELF\x02\x01", b"\x7fELF\x01\x01"):
        path.write_bytes(start + tail)
        read_elf(str(path))
