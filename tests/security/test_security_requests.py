"""What an image says in its variables, and a loader's cache of a driver root that is none: bounded, and one line."""

import shutil
import struct
from pathlib import Path

import pytest
from security_lab import GIVERS, Attacks
from support import machine
from support.bundle import LIBRARIES as MULTIARCH
from support.process import run
from support.product import PROGRAMS, SimulatedHost, make_simulated_host

pytestmark = [pytest.mark.root, pytest.mark.engine]

MIB = "1" * (100 << 10)
"""The kernel passes no variable of more than 128 KiB, so no image's can be longer and still start."""
CHANNELS = {
    "negative": "-1",
    "too large": "1048576",
    "hexadecimal": "0x10",
    "100 KiB": MIB,
    "1 MiB": "1," * (1 << 19),
    "other digits": "\uff11",
    "control characters": "1\x1b[31m",
    "no node on the host": "1048575",
}


def assert_one_line(text: str) -> None:
    """A message of ours: printable, not long, and one line besides its hint."""
    if "argument list too long" in text:
        return  # the kernel passes no option of more than 128 KiB, and so the runtime starts no hook with one
    lines = [line for line in text.splitlines() if "OCIGPU-" in line]
    assert lines, text
    assert "OCIGPU-INT-1" not in text  # which is a defect of ours
    for line in lines:
        assert line.isprintable()
        assert len(line) < 2000


@pytest.mark.parametrize("way", GIVERS)
@pytest.mark.parametrize("case", CHANNELS)
def test_channels_that_cannot_be_given_stop_the_container_before_anything_is_made(
    attacks: Attacks, way: str, case: str
) -> None:
    """14."""
    bundle, marker = attacks.bundle(lambda *_: None, way, variables={"NVIDIA_IMEX_CHANNELS": CHANNELS[case]})
    before, config = machine.tree(bundle / "rootfs"), (bundle / "config.json").read_bytes()
    outcome = attacks.run(bundle, marker, way)
    assert not outcome.started
    assert_one_line(outcome.result.stderr)
    assert machine.tree(bundle / "rootfs") == before
    assert (bundle / "config.json").read_bytes() == config


@pytest.mark.parametrize("way", GIVERS)
def test_a_channel_without_a_node_on_the_host_makes_none_there(attacks: Attacks, way: str) -> None:
    """14."""
    bundle, marker = attacks.bundle(lambda *_: None, way, variables={"NVIDIA_IMEX_CHANNELS": "1048575"})
    before = set(machine.tree(attacks.host.directory / "dev"))
    outcome = attacks.run(bundle, marker, way)
    assert not outcome.started
    new = set(machine.tree(attacks.host.directory / "dev")) - before
    assert [path for path in new if not path.startswith("char")] == []  # links that --load-kmods makes
    assert "1048575" in outcome.result.stderr


@pytest.mark.parametrize("way", ["hook", "spec", "configure"])
def test_empty_channels_between_commas_count_for_nothing(attacks: Attacks, way: str) -> None:
    look = ["/probe", "list", "/dev/nvidia-caps-imex-channels"]
    bundle, marker = attacks.bundle(lambda *_: None, way, arguments=look, variables={"NVIDIA_IMEX_CHANNELS": "0,,"})
    outcome = attacks.run_any(bundle, marker, way)
    if outcome.result.returncode == 0:
        assert outcome.result.stdout == "list /dev/nvidia-caps-imex-channels channel0\n"
    else:
        assert_one_line(outcome.result.stderr)


REQUIREMENTS = {
    "1 MiB": "cuda>=1 " * (1 << 17),
    "1 MiB of one word": "a" * (1 << 20),
    "10,000 alternatives": " ".join(["cuda>=99.0,driver<1"] * 10_000),
    "10,000 conditions": ",".join(["cuda>=99.0"] * 10_000),
    "control characters": "cuda>=99.0\x1b[31m\nOCIGPU-FAKE: second line",
    "a long number": "cuda>=" + "9" * 5000,
    "no operator": "cuda!!12",
}


@pytest.mark.parametrize("way", GIVERS)
@pytest.mark.parametrize("case", REQUIREMENTS)
def test_requirements_are_read_within_bounds_and_told_in_one_line(attacks: Attacks, way: str, case: str) -> None:
    """15."""
    variables = {"NVIDIA_REQUIRE_CUDA": REQUIREMENTS[case]}
    bundle, marker = attacks.bundle(lambda *_: None, way, variables=variables)
    outcome = attacks.run(bundle, marker, way)
    assert not outcome.started
    if outcome.result.stderr.count("\n") > 4:
        raise AssertionError(outcome.result.stderr[:2000])
    assert_one_line(outcome.result.stderr)


@pytest.fixture(scope="module")
def own_host(session_directory: Path) -> SimulatedHost:
    return make_simulated_host(session_directory / "host-odd-cache", 1)


NEW_MAGIC = b"glibc-ld.so.cache1.1"
CACHES = {
    "empty": b"",
    "too short": NEW_MAGIC[:10],
    "a huge count": NEW_MAGIC + struct.pack("<II", 0xFFFFFFFF, 0xFFFFFFFF) + bytes(200),
    "offsets beyond the end": NEW_MAGIC
    + struct.pack("<II5I", 2, 8, *[0] * 5)
    + struct.pack("<iIIIQ", 0x303, 0xFFFFFFF0, 0xFFFFFFF1, 0, 0) * 2
    + b"libcuda\0",
    "no NUL at the end": NEW_MAGIC
    + struct.pack("<II5I", 1, 8, *[0] * 5)
    + struct.pack("<iIIIQ", 0x303, 72, 76, 0, 0)
    + b"libcuda.so.1/usr/lib/libcuda",
    "half of the host's": b"",
    "noise": bytes(range(256)) * 40,
}


@pytest.mark.parametrize("case", CACHES)
def test_a_malformed_loader_cache_of_the_driver_root_is_no_trouble(
    attacks: Attacks, own_host: SimulatedHost, case: str
) -> None:
    """16: libraries are found without it, or it is told in one line; nothing is read past its end."""
    cache = own_host.directory / "etc/ld.so.cache"
    good = cache.read_bytes()
    shutil.rmtree(own_host.directory / "run/ocigpu", ignore_errors=True)  # facts that are kept
    try:
        cache.write_bytes(good[: len(good) // 2] if case.startswith("half") else CACHES[case])
        result = run(
            [PROGRAMS / "ocigpu", "plan", "--gpus", "all", "--config", own_host.settings, "--json"], check=False
        )
    finally:
        cache.write_bytes(good)
    assert "Traceback" not in result.stderr
    assert "OCIGPU-INT-1" not in result.stderr
    if result.returncode == 0:
        assert f"{MULTIARCH}/libcuda.so." in result.stdout
    else:
        assert_one_line(result.stderr)
