"""``ocigpu cdi generate`` with the driver's files, its nodes and single directories elsewhere.

A simulated host's directory stands for a driver container: it is named by options, and no setting says that anything is
simulated.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import requirements
from support.fixtures import Run
from support.machine import LIBRARIES, MACHINE

from ocigpu.cli.front.main import main

pytestmark = pytest.mark.root  # nodes, and a library that is loaded below another root

Generate = Callable[..., dict[str, Any]]
VERSION = "550.163.01"
CUDA = f"libcuda.so.{VERSION}"


@pytest.fixture(scope="module")
def original(session_directory: Path) -> Iterator[Path]:
    requirements.require(requirements.compiler())
    directory = session_directory / "cdi-roots"
    assert main(["sim", "create", str(directory), "--gpus", "2", "--model", "a100", "--driver-version", VERSION]) == 0
    yield directory
    assert main(["sim", "remove", str(directory)]) == 0


@pytest.fixture
def place(session_directory: Path) -> Iterator[Path]:
    """A directory that the unprivileged process which loads NVML may enter."""
    path = session_directory / "cdi-roots-elsewhere"
    path.mkdir(mode=0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def root(original: Path, place: Path) -> Path:
    """A driver container's root directory."""
    path = place / "driver"
    for name in ("etc", "lib", "run", "usr"):
        shutil.copytree(original / name, path / name, symlinks=True, ignore=shutil.ignore_patterns("socket"))
    add_nodes(original, path)
    return path


def add_nodes(original: Path, path: Path) -> None:
    (path / "dev").mkdir(parents=True)
    for node in (original / "dev").glob("nvidia*"):
        status = node.stat()
        if node.is_char_device():
            os.mknod(path / "dev" / node.name, status.st_mode, status.st_rdev)


@pytest.fixture
def generate(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generate:
    settings = tmp_path / "config.toml"
    settings.write_text("")
    settings.chmod(0o644)
    monkeypatch.setenv("OCIGPU_CONFIG", str(settings))

    def call(*arguments: str | Path) -> dict[str, Any]:
        status, out, err = run("cdi", "generate", "--device-name-strategy", "index", "--json", *map(str, arguments))
        assert status == 0, err
        spec: dict[str, Any] = json.loads(out)
        return spec

    return call


def mounts(spec: dict[str, Any]) -> dict[str, str]:
    return {mount["containerPath"]: mount["hostPath"] for mount in spec["containerEdits"]["mounts"]}


def nodes(spec: dict[str, Any]) -> dict[str, str]:
    edits = [spec["containerEdits"], *(device["containerEdits"] for device in spec["devices"])]
    return {node["path"]: node.get("hostPath", "") for part in edits for node in part["deviceNodes"]}


def folders(spec: dict[str, Any]) -> list[str]:
    (hook,) = spec["containerEdits"]["hooks"]
    return [hook["args"][at + 1] for at, word in enumerate(hook["args"]) if word == "--folder"]


@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_driver_containers_root_is_no_part_of_what_containers_see(
    generate: Generate, root: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "variable":
        monkeypatch.setenv("NVIDIA_CTK_DRIVER_ROOT", str(root))
    spec = generate(*(["--driver-root", root] if by == "option" else []))
    assert [device["name"] for device in spec["devices"]] == ["0", "1", "all"]
    found = mounts(spec)
    assert found[f"{LIBRARIES}/{CUDA}"] == f"{root}{LIBRARIES}/{CUDA}"
    assert found["/usr/bin/nvidia-smi"] == f"{root}/usr/bin/nvidia-smi"
    assert all(host_path.startswith(f"{root}/") and str(root) not in path for path, host_path in found.items())
    assert nodes(spec) == {path: f"{root}{path}" for path in nodes(spec)}
    assert {"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"} <= set(nodes(spec))
    assert spec["containerEdits"]["env"][0] == f"NVIDIA_CTK_LIBCUDA_DIR={LIBRARIES}"
    assert folders(spec) == [LIBRARIES, *(["/usr/lib/i386-linux-gnu"] if MACHINE == "x86_64" else [])]


@pytest.mark.parametrize("by", ["option", "variable"])
def test_nodes_can_be_below_another_root_than_files(
    generate: Generate, original: Path, root: Path, place: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    other = place / "other"
    add_nodes(original, other)
    if by == "variable":
        monkeypatch.setenv("NVIDIA_CTK_DEV_ROOT", str(other))
    spec = generate("--driver-root", root, *(["--dev-root", other] if by == "option" else []))
    assert nodes(spec) == {path: f"{other}{path}" for path in nodes(spec)}
    assert mounts(spec)[f"{LIBRARIES}/{CUDA}"] == f"{root}{LIBRARIES}/{CUDA}"


def test_absolute_links_in_a_driver_root_are_meant_inside_it(generate: Generate, root: Path) -> None:
    """Also where the same path of the host is something else."""
    (root / "opt").mkdir()
    (root / f".{LIBRARIES}/{CUDA}").rename(root / "opt" / CUDA)
    (root / f".{LIBRARIES}/{CUDA}").symlink_to(f"/opt/{CUDA}")
    (root / "usr/bin/nvidia-smi").rename(root / "opt/smi")
    (root / "usr/bin/nvidia-smi").symlink_to("/opt/smi")
    (root / "etc/ld.so.cache").unlink()
    found = mounts(generate("--driver-root", root))
    assert found["/usr/bin/nvidia-smi"] == f"{root}/opt/smi"
    assert [host_path for path, host_path in found.items() if path.endswith(CUDA) and "i386" not in path] == [
        f"{root}/opt/{CUDA}"
    ]


def test_libraries_are_looked_for_in_the_directories_that_are_named_and_nowhere_else(
    generate: Generate, root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directories are the host's own, whatever the driver root is; colons and commas are between them."""
    place /= "libraries"
    place.mkdir()
    for file in (CUDA, f"libnvidia-ml.so.{VERSION}"):
        shutil.copy(root / f".{LIBRARIES}/{file}", place)
    arguments = ["--driver-root", root, "--disable-hook", "enable-cuda-compat"]
    spec = generate(*arguments, "--library-search-path", f"/nonexistent:{place}")
    found = {path: host_path for path, host_path in mounts(spec).items() if "/lib" in path and ".so." in path}
    found = {path: host_path for path, host_path in found.items() if "/xorg/" not in path}
    assert found == {str(place / name): str(place / name) for name in (CUDA, f"libnvidia-ml.so.{VERSION}")}
    assert folders(spec) == [str(place)]
    assert spec["containerEdits"]["env"][0] == f"NVIDIA_CTK_LIBCUDA_DIR={place}"
    monkeypatch.setenv("NVIDIA_CTK_CDI_GENERATE_LIBRARY_SEARCH_PATHS", f"/nonexistent,{place}")
    assert generate(*arguments) == spec


def test_configuration_is_looked_for_in_the_directories_that_are_named(
    generate: Generate, root: Path, tmp_path: Path
) -> None:
    names = ("glvnd/egl_vendor.d/10_nvidia.json", "OpenCL/vendors/nvidia.icd")
    for name in names:
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    found = mounts(generate("--driver-root", root, "--config-search-path", tmp_path / "conf"))
    places = dict(zip(names, ("/usr/share", "/etc"), strict=True))
    assert {path: place for path, place in found.items() if path.endswith((".json", ".icd"))} == {
        f"{places[name]}/{name}": str(tmp_path / "conf" / name) for name in names
    }


def test_vendor_neutral_libraries_are_added_when_asked_for(generate: Generate, root: Path) -> None:
    directory = root / f".{LIBRARIES}"
    shutil.copy(directory / CUDA, directory / "libGL.so.1.7.0")
    (directory / "libGL.so.1").symlink_to("libGL.so.1.7.0")
    (directory / "libGL.so").symlink_to("libGL.so.1")
    place = f"{LIBRARIES}/libGL.so.1.7.0"
    assert place not in mounts(generate("--driver-root", root))
    found = mounts(generate("--driver-root", root, "--feature-flag", "enable-explicit-driver-libraries"))
    assert found[place] == f"{root}{place}"


@pytest.mark.parametrize("missing", ["nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"])
def test_control_nodes_are_those_that_the_host_has(generate: Generate, root: Path, missing: str) -> None:
    (root / "dev" / missing).unlink()
    assert f"/dev/{missing}" not in nodes(generate("--driver-root", root))


def test_a_node_behind_a_link_is_named_by_its_own_path(generate: Generate, root: Path) -> None:
    """Engines do not follow links at the path of a node (lstat)."""
    (root / "dev/gpus").mkdir()
    (root / "dev/nvidia1").rename(root / "dev/gpus/1")
    (root / "dev/nvidia1").symlink_to("/dev/gpus/1")
    assert nodes(generate("--driver-root", root))["/dev/nvidia1"] == f"{root}/dev/gpus/1"
