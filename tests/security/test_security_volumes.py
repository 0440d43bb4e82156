"""A volume where the driver's files go, or where links of the image lead: nothing is made or changed in it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from security_lab import LIBRARY_DIR, Attacks, Marker
from ways_of_images import assert_nothing_gets_out, cases

from ocigpu.bundle.edit import ConfigEdit
from ocigpu.bundle.inject import leave_volumes
from ocigpu.core.errors import CdiError

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


THROUGH = {
    "a directory of the image that the volume hides": ("/vol/x", {"vol/x": "/empty"}),
    "and back out of the volume": ("/vol/x/../../empty", {}),
    "procfs": ("/proc/self/root/vol", {"proc/self": "/empty"}),
    "a tmpfs with what the image has there": ("/run/x", {"run/x": "/vol"}),
}
"""Target of a link in the place of the libraries' directory, and more links."""


@pytest.mark.parametrize("low_level", ["runc", "crun"])
@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
@pytest.mark.parametrize("through", THROUGH)
def test_links_lead_through_a_volume(attacks: Attacks, through: str, mode: str, low_level: str) -> None:
    """The shim sees what the image has there, the runtime what the volume has: modes spec and cdi filled the volume."""
    target, more = THROUGH[through]

    def build(rootfs: Path, marker: Marker) -> None:
        assert marker
        for name in ("vol", "run", "proc", "empty"):
            (rootfs / name).mkdir(exist_ok=True)
        directory = rootfs / LIBRARY_DIR[1:]
        directory.rename(rootfs / "moved")
        directory.symlink_to(target)
        for name, leads_to in more.items():
            (rootfs / name).symlink_to(leads_to)

    def edit(config: dict[str, Any]) -> None:
        tmpfs = {"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "tmpcopyup"]}
        config["mounts"].append(tmpfs)

    outcome = attacks.start(build, mode, edit=edit, volume="/vol", low_level=low_level)
    assert not outcome.started, outcome.said


@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
def test_a_link_in_one_volume_leads_another_into_ours(attacks: Attacks, mode: str) -> None:
    """Who owns the outer volume chooses where the inner one is mounted."""

    def build(rootfs: Path, marker: Marker) -> None:
        (rootfs / "outer").mkdir()
        outer = marker.path.parent / "outer"
        outer.mkdir()
        (outer / "inner").symlink_to(LIBRARY_DIR)

    def edit(config: dict[str, Any]) -> None:
        inner = config["mounts"][-1]
        outer = {**inner, "destination": "/outer", "source": str(Path(inner["source"]).parent / "outer")}
        config["mounts"].insert(-1, outer)

    outcome = attacks.start(build, mode, edit=edit, volume="/outer/inner")
    assert not outcome.started, outcome.said
    assert "OCIGPU-MNT-4" in outcome.said, outcome.said


@pytest.mark.parametrize("owner", [0, 1000])
@pytest.mark.parametrize("mode", [0o755, 0o775, 0o1777])
def test_what_a_volume_has_counts_where_nobody_can_exchange_it(tmp_path: Path, owner: int, mode: int) -> None:
    """Its owner could put a link there, into another volume, before the runtime makes what is missing by then."""
    (tmp_path / "rootfs/usr/lib").mkdir(parents=True)
    (tmp_path / "volume/sub").mkdir(parents=True)
    (tmp_path / "volume/sub/libcuda.so.1").touch()
    os.chown(tmp_path / "volume", owner, owner)
    (tmp_path / "volume").chmod(mode)
    volume = {"destination": "/usr/lib", "type": "bind", "source": str(tmp_path / "volume")}
    edit = ConfigEdit(mounts=[{"destination": "/usr/lib/sub/libcuda.so.1", "type": "bind", "source": "/x"}])
    config = {"root": {"path": "rootfs"}, "mounts": [volume]}
    if owner == 0 and mode != 0o775:
        assert leave_volumes(config, edit, str(tmp_path)) == (edit, [])
    else:
        with pytest.raises(CdiError, match="the runtime would make"):
            leave_volumes(config, edit, str(tmp_path))


def test_a_link_into_a_volume_that_is_shared_with_the_host(tmp_path: Path) -> None:
    """All is there to be mounted on; but the host would have these mounts too, for good."""
    (tmp_path / "rootfs/usr").mkdir(parents=True)
    (tmp_path / "rootfs/usr/lib").symlink_to("/vol")
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume/libcuda.so.1").touch()
    volume = {"destination": "/vol", "type": "bind", "source": str(tmp_path / "volume"), "options": ["rbind"]}
    edit = ConfigEdit(mounts=[{"destination": "/usr/lib/libcuda.so.1", "type": "bind", "source": "/x"}])
    config = {"root": {"path": "rootfs"}, "mounts": [volume], "linux": {"rootfsPropagation": "rshared"}}
    assert leave_volumes(config, edit, str(tmp_path)) == (edit, [])
    volume["options"] = ["rbind", "rshared"]
    with pytest.raises(CdiError, match="shared with the host"):
        leave_volumes(config, edit, str(tmp_path))


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
