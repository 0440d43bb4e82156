"""What a start can do without: something in its place, read-only or of another kind, is a note and stops nothing."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from security_lab import LIBRARY_DIR, VERSION, Attacks, Build, Marker, fill
from support.bundle import replace

pytestmark = [pytest.mark.root, pytest.mark.engine]

MODES = ("hook", "spec", "cdi")


class Part(NamedTuple):
    """``place``: where it goes; ``optional``: whether a start does without; ``left``: what the note names."""

    place: str
    optional: bool
    left: str = ""


PARTS = {
    "application profile": Part("/etc/nvidia", True, "/etc/nvidia/nvidia-application-profiles-rc.d"),
    "configuration": Part("/etc/vulkan", True, "/etc/vulkan/icd.d/nvidia_icd.json"),
    "sockets": Part("/run/nvidia-persistenced", True, "/run/nvidia-persistenced/socket"),
    "firmware": Part("/usr/lib/firmware", True, f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"),
    "link into another directory": Part(f"{LIBRARY_DIR}/gbm", True, f"{LIBRARY_DIR}/gbm/nvidia-drm_gbm.so"),
    "loader's cache and configuration": Part("/etc", True, "the loader's cache"),
    "libraries": Part(LIBRARY_DIR, False),
    "programs": Part("/usr/bin", False),
    "DRM nodes": Part("/dev/dri", False),
}
"""Of a container with every capability; docs/SECURITY.md says the same in words."""


def read_only(place: str) -> dict[str, Any]:
    """Return a volume as Kubernetes mounts a ConfigMap; the marker is put in as its source."""
    return {"destination": place, "type": "bind", "source": "", "options": ["rbind", "rprivate", "ro"]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", PARTS)
def test_something_read_only_in_the_place_of_a_part(attacks: Attacks, part: str, mode: str) -> None:
    place, optional, left = PARTS[part]

    def edit(config: dict[str, Any]) -> None:
        config["mounts"][-1]["options"] = read_only(place)["options"]

    def build(rootfs: Path, marker: Marker) -> None:
        assert rootfs.is_dir()
        for path in list(marker.path.iterdir()):  # a ConfigMap has some file of its own
            if path.name == "nvidia" or (path.name == "gbm" and part.startswith("link")):
                path.rmdir()

    outcome = attacks.start(build, mode, edit=edit, volume=place)
    assert outcome.started is optional, outcome.said
    if optional:
        assert f" {left} " not in outcome.result.stdout, "its mount"
        # in mode cdi notes go to logs that this container's engine does not keep
        assert mode == "cdi" or f"{left} was left out" in outcome.said, outcome.said
    else:
        assert "OCIGPU-MNT-4" in outcome.said or "OCIGPU-DEV-3" in outcome.said, outcome.said


def file_there(place: str) -> Build:
    def build(rootfs: Path, marker: Marker) -> None:
        assert marker
        replace(rootfs / place[1:], "x")
        (rootfs / place[1:]).unlink()
        fill(rootfs / place[1:])

    return build


@pytest.mark.parametrize("mode", ["hook", "spec"])
@pytest.mark.parametrize("part", [part for part, (place, optional, _) in PARTS.items() if optional and place != "/etc"])
def test_something_of_another_kind_in_the_place_of_a_part(attacks: Attacks, part: str, mode: str) -> None:
    """In mode cdi it is the runtime that cannot make a mount there, whatever we do."""
    place, _, left = PARTS[part]
    outcome = attacks.start(file_there(place), mode)
    assert outcome.started, outcome.said
    assert f"{left} was left out" in outcome.said, outcome.said
