"""Variables of the image and files in the working directory, with runtimes that pass the first on and those that don't.

crun gives a hook its own environment where the entry has none, and starts createContainer hooks in the root directory
of the container: what NVIDIAScape (CVE-2025-23266) was made of.
"""

from pathlib import Path

import pytest
from security_lab import WAYS, Attacks, Marker
from support.process import run

pytestmark = [pytest.mark.root, pytest.mark.engine]

SPY = Path(__file__).parents[1] / "support/spy.c"
MODULES = (
    "os",
    "sys",
    "json",
    "gc",
    "site",
    "sitecustomize",
    "encodings",
    "ocigpu",
    "prctl",
    "_prctl",
    "stat",
    "errno",
)
PROGRAMS = ("sh", "grep", "mount", "nsenter", "cat", "ldconfig", "python3", "python3.11", "nvidia-smi")
HERE = "/proc/self/cwd"
VARIABLES = {
    "LD_PRELOAD": f"{HERE}/x.so",
    "LD_AUDIT": f"{HERE}/x.so",
    "LD_LIBRARY_PATH": HERE,
    "GCONV_PATH": HERE,
    "PYTHONPATH": HERE,
    "PYTHONHOME": HERE,
    "PYTHONSTARTUP": f"{HERE}/os.py",
    "BASH_ENV": f"{HERE}/bin/sh",
    "ENV": f"{HERE}/bin/sh",
    "PATH": f"{HERE}:{HERE}/bin:.:",
    "IFS": "/",
    "OCIGPU_CONFIG": f"{HERE}/config.toml",
}


@pytest.mark.parametrize("low_level", ["runc", "crun"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_an_image_runs_on_the_host(attacks: Attacks, way: str, low_level: str) -> None:
    """6 and 7: the mark is on the host; inside the container its directory does not exist."""
    mark = attacks.directory / "mark"

    def build(rootfs: Path, marker: Marker) -> None:
        for place in (rootfs, rootfs.parent):  # the working directories of hooks
            run(["gcc", "-shared", "-fPIC", f'-DMARK="{mark}"', "-o", place / "x.so", SPY])
            for name in ("libc.so.6", "libm.so.6", "libz.so.1", "libexpat.so.1"):
                (place / name).write_bytes((place / "x.so").read_bytes())
            for name in MODULES:
                (place / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write('module {name}\\n')\n")
            (place / "bin").mkdir(exist_ok=True)
            for name in PROGRAMS:
                for directory in (place, place / "bin"):
                    (directory / name).unlink(missing_ok=True)
                    (directory / name).write_text(f"#!/bin/sh\necho program {name} >> {mark}\n")
                    (directory / name).chmod(0o755)

    outcome = attacks.start(build, way, low_level=low_level, variables=VARIABLES)
    assert outcome.started, outcome.said
    assert not mark.exists(), mark.read_text()


def test_the_mark_is_made_where_somebody_falls_for_it(attacks: Attacks) -> None:
    """That the spy works at all: a program with the image's variables, in the image's directory."""
    mark = attacks.directory / "mark"
    run(["gcc", "-shared", "-fPIC", f'-DMARK="{mark}"', "-o", attacks.directory / "x.so", SPY])
    run(["/bin/true"], env={"LD_PRELOAD": f"{HERE}/x.so"}, cwd=attacks.directory)
    assert mark.exists()
