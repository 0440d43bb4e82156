"""A volume where the driver's files go, or where links of the image lead: nothing is made or changed in it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from security_lab import LIBRARY_DIR, Attacks, Marker
from ways_of_images import assert_nothing_gets_out, cases

pytestmark = [pytest.mark.root, pytest.mark.engine]

CASES = cases("this kernel", 25)
MAPPING = [{"containerID": 0, "hostID": 100_000, "size": 65536}]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_nothing_is_made_in_a_volume(attacks: Attacks, name: str, way: str) -> None:
    assert_nothing_gets_out(attacks, name, way, "this kernel")


@pytest.mark.parametrize(("name", "way"), cases("crun", 25))
def test_nothing_is_made_in_a_volume_by_crun(attacks: Attacks, name: str, way: str) -> None:
    assert_nothing_gets_out(attacks, name, way, "this kernel", "crun")


def remap(config: dict[str, Any]) -> None:
    """Give the container a user namespace, as dockerd's userns-remap does."""
    config["linux"]["namespaces"].append({"type": "user"})
    config["linux"].update(uidMappings=MAPPING, gidMappings=MAPPING)


def give_away(rootfs: Path) -> None:
    for path in (rootfs, *rootfs.rglob("*")):
        os.chown(path, 100_000, 100_000, follow_symlinks=False)


@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
@pytest.mark.parametrize("place", ["etc", LIBRARY_DIR[1:], "usr/bin", "run"])
def test_nothing_is_made_in_a_volume_of_a_container_with_a_user_namespace(
    attacks: Attacks, mode: str, place: str
) -> None:
    """Its root user has no rights there; that of the hook's process is the host's."""

    def build(rootfs: Path, marker: Marker) -> None:
        (rootfs / "vol").mkdir()
        directory = rootfs / place
        if directory.exists():
            directory.rename(directory.with_name("moved"))
        directory.symlink_to("/vol")
        give_away(rootfs)
        for path in (marker.path, *marker.path.parents):
            if path.is_relative_to(attacks.directory.parent):
                path.chmod(path.stat().st_mode | 0o055)

    assert attacks.start(build, mode, edit=remap, volume="/vol").result.returncode in (0, 1)


LEGITIMATE: dict[str, dict[str, Any]] = {
    "a tmpfs of the runtime on /run": {"destination": "/run", "type": "tmpfs", "source": "tmpfs"},
    "a tmpfs of the runtime on /etc/nvidia": {"destination": "/etc/nvidia", "type": "tmpfs", "source": "tmpfs"},
    "a volume with other files": {"destination": "/data", "type": "bind", "source": "MARKER", "options": ["rbind"]},
    "files that engines mount": {
        "destination": "/etc/hosts", "type": "bind", "source": "MARKER/file", "options": ["rbind", "rprivate"]
    },
    "a file in the place of a library": {
        "destination": f"{LIBRARY_DIR}/libcuda.so.1", "type": "bind", "source": "MARKER/libcuda.so.1",
        "options": ["rbind"],
    },
}  # fmt: skip


@pytest.mark.parametrize("low_level", ["runc", "crun"])
@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
@pytest.mark.parametrize("what", LEGITIMATE)
def test_what_is_no_volume_works(attacks: Attacks, what: str, mode: str, low_level: str) -> None:
    entry = LEGITIMATE[what]

    def build(rootfs: Path, marker: Marker) -> None:
        bundle = rootfs.parent / "config.json"
        config = json.loads(bundle.read_text())
        config["mounts"].append({**entry, "source": entry["source"].replace("MARKER", str(marker.path))})
        bundle.write_text(json.dumps(config))
        marker.is_volume = True

    outcome = attacks.start(build, mode, low_level=low_level)
    assert outcome.started, outcome.said
    if what.startswith("a tmpfs"):
        assert "was left out" not in outcome.said, outcome.said
