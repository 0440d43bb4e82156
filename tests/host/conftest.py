"""Fixtures: a hand-made host, and an NVML with faults."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from handmade_host import HostTree

FAKE_NVML = Path(__file__).with_name("fake_nvml.c")


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    return HostTree(tmp_path / "host")


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile the fake NVML with macros, e.g. fake_nvml("HANG") or fake_nvml("LOST=1"); each is compiled once."""
    directory = tmp_path_factory.mktemp("nvml")
    built: dict[tuple[str, ...], Path] = {}

    def build(*macros: str) -> Path:
        if macros not in built:
            target = directory / f"nvml{len(built)}.so"
            definitions = [f"-D{macro}" for macro in macros]
            command = ["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libnvidia-ml.so.1", *definitions]
            subprocess.run([*command, "-o", target, FAKE_NVML], check=True)
            built[macros] = target
        return built[macros]

    return build
