"""What is left when a container is gone."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from security_lab import GIVERS, LIBRARY_DIR, WAYS, Attacks
from support import machine
from support.process import explain
from support.product import failed_with

pytestmark = [pytest.mark.root, pytest.mark.engine]


@pytest.fixture
def shared_place(attacks: Attacks) -> Iterator[Path]:
    """A directory whose mount is shared with the host; bundles are made in it."""
    place = attacks.directory / "shared"
    place.mkdir(mode=0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "ocigpu-test", place], check=True)
    subprocess.run(["mount", "--make-rshared", place], check=True)
    attacks.directory = place
    yield place
    while machine.mounts_below(str(place)):
        subprocess.run(["umount", "-l", machine.mounts_below(str(place))[-1].split()[4]], check=True)


@pytest.mark.parametrize("propagation", ["rshared", "shared", "rslave"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "chmod"])
def test_a_root_that_is_shared_with_the_host_leaves_no_mount_there(
    attacks: Attacks, shared_place: Path, way: str, propagation: str
) -> None:
    """12: what the runtime itself leaves there without a GPU is not ours; nothing else is left."""

    def edit(config: dict[str, Any]) -> None:
        config["linux"]["rootfsPropagation"] = propagation

    def mounts() -> list[str]:
        return [line.split(" ", 2)[2] for line in machine.mounts_below(str(shared_place))]

    bundle, marker = attacks.bundle(lambda *_: None, way, edit=edit)
    before = mounts()
    result = attacks.run_any(bundle, marker, way).result
    assert "started" in result.stdout, explain(result)
    assert mounts() == before


@pytest.mark.parametrize("destination", ["/run", LIBRARY_DIR, "/etc"])
@pytest.mark.parametrize("way", [*GIVERS, "create-symlinks", "update-application-profile"])
def test_a_volume_that_is_shared_with_the_host_leaves_no_mount_there(
    attacks: Attacks, shared_place: Path, way: str, destination: str
) -> None:
    """12: bidirectional propagation; in mode cdi, where the runtime would pass its mounts on, nothing is started."""
    attacks.directory = shared_place.parent  # runc makes the mount private that a root directory is on
    volume = shared_place / "volume"

    def edit(config: dict[str, Any]) -> None:
        config["linux"]["rootfsPropagation"] = "rshared"
        options = ["rbind", "rshared"]
        config["mounts"].append({"destination": destination, "source": str(volume), "type": "bind", "options": options})

    volume.mkdir()
    inner = attacks.image / destination[1:]
    if inner.exists():
        shutil.copytree(inner, volume, symlinks=True, dirs_exist_ok=True)
    libraries = attacks.host.directory / LIBRARY_DIR[1:]
    names = [str(path.relative_to(libraries)) for path in libraries.rglob("*") if not path.is_dir()]
    made = ["gbm/nvidia-drm_gbm.so", "libcuda.so", "libnvidia-opticalflow.so", "libGLX_indirect.so.0"]
    flat = [name.rpartition("/")[2] for name in names]
    for name in (*names, *flat, *made):  # nothing is made in a volume: all is there to be mounted on
        (volume / name).parent.mkdir(parents=True, exist_ok=True)
        (volume / name).write_text("of the image")
    bundle, marker = attacks.bundle(lambda *_: None, way, edit=edit)
    before = [line.split(" ", 2)[2] for line in machine.mounts_below(str(shared_place))]
    result = attacks.run_any(bundle, marker, way).result
    if way == "cdi":
        assert failed_with("OCIGPU-CDI-6", result), explain(result)
        assert "a volume that is shared with the host" in result.stderr
    elif (way, destination) == ("create-symlinks", "/run"):
        assert "OCIGPU-MNT-4" in result.stderr, explain(result)
    else:
        assert "started" in result.stdout, explain(result)
    assert [line.split(" ", 2)[2] for line in machine.mounts_below(str(shared_place))] == before
