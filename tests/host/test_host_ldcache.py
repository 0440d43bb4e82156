import struct
import subprocess
from pathlib import Path

import pytest
from handmade_host import cache_bytes
from hypothesis import given
from hypothesis import strategies as st
from support.process import processor_seconds

from ocigpu.gpus.libraries.ldcache import parse_ldcache
from ocigpu.gpus.nvidia.libraries import ARCHITECTURES, native_machine

FLAGS = (0x0300, 0x0000)
ENTRIES = [
    ("libcuda.so.1", "/usr/lib/libcuda.so.1", 0x0303),
    ("libc.so.6", "/usr/lib/libc.so.6", 0x0303),
    ("libcuda.so.1", "/usr/lib32/libcuda.so.1", 0x0003),
    ("libcuda.so.1", "/usr/libx32/libcuda.so.1", 0x0803),
    ("libcuda.so.1", "/usr/odd/libcuda.so.1", 0x0300),
]


@pytest.mark.parametrize("old", [False, True], ids=["new table only", "old table first"])
def test_entries_are_chosen_by_name_and_architecture(old: bool) -> None:
    found, note = parse_ldcache(cache_bytes(ENTRIES, old), (b"libcuda",), FLAGS)
    assert found == [("libcuda.so.1", "/usr/lib/libcuda.so.1"), ("libcuda.so.1", "/usr/lib32/libcuda.so.1")]
    assert note == ""


def test_the_cache_of_this_machine_reads_as_ldconfig_prints_it() -> None:
    printed = subprocess.run(["/sbin/ldconfig", "-p"], check=True, capture_output=True, text=True).stdout
    expected = {tuple(line.strip().split(" => ")) for line in printed.splitlines() if " => " in line}
    architecture = ARCHITECTURES[native_machine()]
    data = Path("/etc/ld.so.cache").read_bytes()
    found, note = parse_ldcache(data, (b"",), (architecture.flags, architecture.flags32))
    assert note == ""
    assert {(name, path) for name, path in found} == {(name.split(" ")[0], path) for name, path in expected}


@pytest.mark.parametrize(
    ("data", "note"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(b"nonsense" * 100, "not a glibc loader cache", id="nonsense"),
        pytest.param(cache_bytes(ENTRIES)[:40], "not a glibc loader cache", id="cut in the header"),
        pytest.param(cache_bytes(ENTRIES)[:100], "claims 5 entries in 100 bytes", id="cut in the entries"),
        pytest.param(b"ld.so-1.7.0\0\xff\xff\xff\xff" + bytes(64), "not a glibc loader cache", id="huge old table"),
        pytest.param(
            b"glibc-ld.so.cache1.1\xff\xff\xff\xff" + bytes(64), "claims 4294967295 entries in 88 bytes", id="huge"
        ),
    ],
)
def test_a_malformed_cache_gives_nothing_and_a_reason(data: bytes, note: str) -> None:
    assert parse_ldcache(data, (b"lib",), FLAGS) == ([], note)


def test_entries_with_strings_outside_the_file_are_passed_over() -> None:
    data = bytearray(cache_bytes(ENTRIES[:2]))
    data[48 + 8 : 48 + 12] = b"\xff\xff\xff\xff"
    assert parse_ldcache(bytes(data), (b"lib",), FLAGS) == ([("libc.so.6", "/usr/lib/libc.so.6")], "")


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=20), st.booleans())
def test_damaged_caches_never_raise(damage: list[tuple[int, int]], old: bool) -> None:
    data = bytearray(cache_bytes(ENTRIES, old))
    for position, value in damage:
        data[position % len(data)] = value
    found, _ = parse_ldcache(bytes(data), (b"lib",), FLAGS)
    assert len(found) <= len(data) // 24


@given(st.binary(max_size=300))
def test_anything_after_the_magic_never_raises(tail: bytes) -> None:
    parse_ldcache(b"glibc-ld.so.cache1.1" + tail, (b"",), FLAGS)
    parse_ldcache(b"ld.so-1.7.0\0" + tail, (b"",), FLAGS)


def test_a_cache_that_names_one_path_many_times_takes_no_memory() -> None:
    """600,000 entries of 24 bytes that share a path of 4,000 would be 2.5 GB."""
    data = cache_bytes([("libcuda.so.1", "/" + "a" * 4000, 0x0303)])
    entry, count = data[48:72], 600_000
    header = bytearray(data[:48])
    header[20:24] = count.to_bytes(4, "little")
    moved = struct.unpack("<iIIIQ", entry)
    by = 24 * (count - 1)
    table = struct.pack("<iIIIQ", moved[0], moved[1] + by, moved[2] + by, 0, 0) * count
    with processor_seconds(30):
        found, note = parse_ldcache(bytes(header) + table + data[72:], (b"libcuda",), (0x0300,))
    assert (found, note) == ([], "more than 4096 libraries of the driver")
