"""A real Apptainer, whose --nvccli calls nvidia-container-cli: docs/ENGINES.md, "Apptainer"."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support import machine
from support.bundle import copy_tree, give_to
from support.process import Completed, explain, run
from support.product import CONTROL_NODES, LIBRARIES, SimulatedHost, gpu_names, listed_uuids
from support.runtimes import answers, parts, probe, script

pytestmark = [pytest.mark.root, pytest.mark.engine, pytest.mark.program("apptainer")]

USER = 65534  # Apptainer wants to know the account
LOOK = script(
    ["nvidia-smi", "-L"],
    probe(["list", "/dev"], ["open", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]),
    ["/dlopen", *LIBRARIES],
)


class Apptainer:
    """Apptainer of an ordinary user, without its set-user-ID starter; ``root``: an image, as a directory."""

    def __init__(self, directory: Path, host: SimulatedHost, rootfs: Path, programs: Path) -> None:
        self.host, self.root = host, directory / "rootfs"
        copy_tree(str(rootfs), str(self.root))
        give_to(directory, USER, USER)
        self.env = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(directory), "LC_ALL": "C.UTF-8"}

    def run(self, *options: str, **variables: str) -> Completed:
        user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
        command = [*user, "apptainer", "exec", "--userns", "--no-home", "--nvccli", *options, self.root, *LOOK]
        return run(command, env={**self.env, **variables}, check=False)


@pytest.fixture
def apptainer(
    work_directory: Path, simulated_host: SimulatedHost, rootfs: Callable[[str], Path], vendor_cli: Path
) -> Apptainer:
    return Apptainer(work_directory, simulated_host, rootfs("glibc"), vendor_cli)


@pytest.mark.parametrize("options", [(), ("--writable",)], ids=["read-only image", "writable image"])
def test_a_contained_container_gets_the_gpus_it_names(apptainer: Apptainer, options: tuple[str, ...]) -> None:
    result = apptainer.run("--contain", *options, NVIDIA_VISIBLE_DEVICES="1")
    assert result.returncode == 0, explain(result)
    listing, probed, opened = parts(result.stdout)
    assert listed_uuids(listing) == [apptainer.host.gpus[1]], explain(result)
    seen = answers(probed)
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia1", *CONTROL_NODES])
    assert [seen["open", f"/dev/{name}"] for name in ("nvidia0", "nvidia1", "nvidiactl")] == [
        "ENOENT",
        "ENXIO",
        "ENXIO",
    ]
    assert opened.splitlines() == [f"dlopen {name} ok" for name in LIBRARIES]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "9"}, "OCIGPU-DEV-1: device error: no such device "),
        ({"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_REQUIRE_CUDA": "cuda>=99.0"}, "OCIGPU-REQ-3: requirement error: "),
        ({"NVIDIA_VISIBLE_DEVICES": "0"}, "OCIGPU-MNT-2: mount error: "),
    ],
    ids=["no such device", "requirement", "a directory in the way"],
)
def test_a_failure_is_told_and_the_image_is_as_it_was(
    apptainer: Apptainer, variables: dict[str, str], message: str
) -> None:
    if "MNT-2" in message:
        (apptainer.root / "usr/bin/nvidia-smi").mkdir()
    before = machine.tree(apptainer.root)
    result = apptainer.run("--contain", **variables)
    assert result.returncode != 0
    assert result.stdout == ""
    assert f"ocigpu-container-cli: {message}" in result.stderr, explain(result)
    assert machine.tree(apptainer.root) == before
