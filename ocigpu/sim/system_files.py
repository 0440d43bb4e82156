"""A whole system around a simulated driver, as a healthy host has it: the part "system" of files.toml, and more.

None of its programs can be run: they are there to be looked at.
"""

import json
from pathlib import Path
from typing import Any

from ocigpu.core.errors import CdiError
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.nodes import apply_changes, find_link_changes, plan_nodes, read_driver
from ocigpu.sim.files import write_file, write_files

VALUES = {"kernel": "6.8.0-45-generic", "container": "4242"}
"""What paths and texts are filled in with; the container is the process id of one that uses the driver."""
SPEC = "var/run/cdi/nvidia.yaml"
ENGINES = {"docker-ce": "5:28.5.1-1~debian.12~bookworm", "podman": "5.4.2+ds1-1"}
DOCKER = {
    "default-runtime": "ocigpu",
    "features": {"cdi": True},
    "runtimes": {"ocigpu": {"path": "/usr/bin/ocigpu-runtime"}},
}


def write_system(root: Path) -> None:
    """Write the files of a healthy system below ``root``, where a simulated host is complete and in its place."""
    write_files(root, "system", VALUES)
    write_docker(root, DOCKER)
    (root / "usr/bin/nvidia-container-runtime-hook").symlink_to("ocigpu-hook")
    (root / "run/systemd/system").mkdir(parents=True)
    write_packages(root, ENGINES)
    (root / "usr/local/bin").mkdir(parents=True)
    write_links(root)
    try:
        write_spec_file(root)
    except CdiError:  # nothing to describe: all GPUs are in MIG mode and not cut
        return


def write_docker(root: Path, settings: dict[str, Any]) -> None:
    """Write Docker's settings."""
    write_file(root / "etc/docker/daemon.json", json.dumps(settings, indent=4) + "\n")


def write_packages(root: Path, versions: dict[str, str]) -> None:
    """Write dpkg's list of installed packages."""
    entries = (
        f"Package: {name}\nStatus: install ok installed\nVersion: {version}\n" for name, version in versions.items()
    )
    write_file(root / "var/lib/dpkg/status", "\n".join(entries))


def write_links(root: Path) -> None:
    """Make the links in /dev/char of the driver's nodes."""
    from ocigpu.gpus.tree import find_roots

    roots = find_roots(Settings(simulation_root=str(root)))
    driver = read_driver(roots)
    apply_changes(find_link_changes(plan_nodes(driver)[0], driver, roots))


def write_spec_file(root: Path, path: str = SPEC, max_version: str = "") -> None:
    """Write the CDI specification of the host's GPUs, as ``ocigpu cdi generate`` does."""
    from ocigpu.cdi.generate import generate
    from ocigpu.cdi.write import write_spec
    from ocigpu.gpus.offer import GenerateOptions

    options = GenerateOptions(mode="nvml", hook_path="/usr/bin/ocigpu-hook", max_version=max_version)
    generated = generate(options, Settings(simulation_root=str(root)))
    write_spec(generated.spec, str(root / path), "yaml")
