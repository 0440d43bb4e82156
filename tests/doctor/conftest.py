"""A simulated host with a system around it, made anew for every test by copying: its libraries are compiled once."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import requirements

from ocigpu.cdi.document import read_document
from ocigpu.cli.front import show
from ocigpu.doctor.findings import Finding
from ocigpu.doctor.host import Host
from ocigpu.doctor.report import run_checks
from ocigpu.sim.create import create_host
from ocigpu.sim.faults import SPEC, make_faults

Broken = Callable[..., Path]


@pytest.fixture(scope="session")
def kept_host(session_directory: Path) -> Iterator[tuple[Path, Path]]:
    """Where the host is to be, and a copy of it there as it was made: two H100, the first with a MIG device."""
    requirements.require(requirements.compiler())
    place, copy = session_directory / "doctor host", session_directory / "doctor copy"  # the space is meant
    create_host(str(place), 2, "h100", ["0:1g.10gb"], compat32=False, faults=["none"])
    subprocess.run(["cp", "-a", place, copy], check=True)
    yield place, copy
    shutil.rmtree(place)
    shutil.rmtree(copy)


@pytest.fixture
def broken(kept_host: tuple[Path, Path]) -> Broken:
    """Call with names of faults: returns the directory of a host with these and no others."""

    def make(*faults: str) -> Path:
        place, copy = kept_host
        shutil.rmtree(place)
        subprocess.run(["cp", "-a", copy, place], check=True)
        make_faults(str(place), faults)
        return place

    return make


def examine(root: Path) -> list[Finding]:
    """Return what doctor finds on a host; NVML of a simulated host is waited for where it is to answer."""
    faults = root / "faults"
    hangs = faults.exists() and "hang" in faults.read_text()
    return run_checks(Host(str(root), nvml_seconds=2 if hangs else 120))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons and programs that are there are waited for on a busy machine, too."""
    monkeypatch.setattr(show.Progress.__init__, "__defaults__", ("", 600.0))
    monkeypatch.setattr("ocigpu.doctor.live.SECONDS", 120.0)
    monkeypatch.setattr("ocigpu.doctor.versions.SECONDS", 120.0)


def bad(findings: list[Finding]) -> set[str]:
    """Return the names of findings that are neither well nor the one that the host is simulated."""
    worse = ("error", "warning", "note")
    return {item.name for item in findings if item.severity in worse and item.name != "simulated-host"}


def rely_on_ldconfig(root: Path) -> None:
    """Make the specification one of NVIDIA's toolkit up to 1.17: the links are left to update-ldcache's ldconfig."""
    path = root / SPEC
    spec, _ = read_document(str(path))
    folder = next(m["containerPath"] for m in spec["containerEdits"]["mounts"] if "libcuda.so." in m["containerPath"])
    words = ["nvidia-cdi-hook", "update-ldcache", "--folder", folder.rpartition("/")[0]]
    spec["containerEdits"]["hooks"] = [
        {"hookName": "createContainer", "path": str(root / "usr/bin/ocigpu-hook"), "args": words, "env": ["A=b"]}
    ]
    path.write_text(json.dumps(spec))
