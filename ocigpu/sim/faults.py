"""Faults of a simulated host, as on real ones; inspect them with ``ocigpu doctor --root``.

faults.toml lists the steps of each.
"""

import glob
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ocigpu.core.errors import CdiError, OcigpuError, quoted, suggest
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.nodes import apply_changes, find_link_changes, plan_nodes, read_driver
from ocigpu.gpus.tree import find_roots
from ocigpu.sim.fault_names import FAULT_NAMES
from ocigpu.sim.files import fill_in, write_file, write_files
from ocigpu.sim.made import read_marker, remove_host
from ocigpu.sim.models import sim_error

VALUES = {"kernel": "6.8.0-45-generic", "container": "4242"}
"""What paths and texts are filled in with; the container is the process id of one that uses the driver."""
SPEC = "var/run/cdi/nvidia.yaml"
ENGINES = {"docker-ce": "5:28.5.1-1~debian.12~bookworm", "podman": "5.4.2+ds1-1"}
DOCKER = {
    "default-runtime": "ocigpu",
    "features": {"cdi": True},
    "runtimes": {"ocigpu": {"path": "/usr/bin/ocigpu-runtime"}},
}


def apply_faults(directory: str, names: Sequence[str]) -> None:
    """Put a system around the simulated host in ``directory``, and make these faults, in this order.

    Raises OcigpuError (OCIGPU-SIM-1) for a fault that this host cannot have; the host is removed then.
    """
    try:
        _write_system(Path(directory))
        make_faults(directory, names)
    except OSError as error:
        remove_host(directory)
        raise sim_error(f"make a fault: {error.filename}: {error.strerror}") from error
    except OcigpuError:
        remove_host(directory)
        raise


def check_names(names: Sequence[str]) -> None:
    """Raise OcigpuError (OCIGPU-SIM-1) for a name that no fault has."""
    for name in names:
        if name not in FAULT_NAMES:
            hint = suggest(name, FAULT_NAMES, 3) or f"faults: {', '.join(FAULT_NAMES)}"
            raise sim_error(f"no fault named {quoted(name)}", hint)


def make_faults(directory: str, names: Sequence[str]) -> None:
    """Make these faults on a simulated host that has a system around it.  Raises OSError, and OcigpuError as above."""
    check_names(names)
    root = Path(directory)
    made = read_marker(root)
    migs = [mig for gpu in made["gpus"] for mig in gpu["mig_devices"]]
    values = {
        **VALUES,
        "version": made["driver_version"],
        "uvm": made["majors"].get("nvidia-uvm"),
        "last": made["gpus"][-1]["bus_id"],
        "mig": migs[0]["gi_minor"] if migs else "none",
    }
    for name in names:
        _make(root, FAULT_NAMES[name].steps, values)


def _make(root: Path, steps: dict[str, Any], values: Mapping[str, object]) -> None:
    """Carry out the steps of a table of faults.toml, which explains them."""

    def find(pattern: str) -> list[Path]:
        return [root / path for path in glob.glob(fill_in(pattern, values), root_dir=root)]

    for pattern, (message, hint) in steps.get("need", {}).items():
        if not find(pattern):
            raise sim_error(message, hint)
    for name in steps.get("of", ()):
        _make(root, FAULT_NAMES[name].steps, values)
    for path in (path for pattern in steps.get("remove", ()) for path in find(pattern)):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name, text in steps.get("write", {}).items():
        write_file(root / fill_in(name, values), fill_in(text, values), 0o755 if "bin/" in name else 0o644)
    for pattern, name in steps.get("copy", {}).items():
        for path in find(pattern):
            write_file(path.with_name(name) if "/" not in name else root / name, path.read_bytes())
    for pattern, links in steps.get("link", {}).items():
        for link, target in ((path / name, target) for path in find(pattern) for name, target in links.items()):
            link.unlink(missing_ok=True)
            link.symlink_to(target)
    for name, pairs in steps.get("replace", {}).items():
        text, mode = (root / name).read_text(), stat.S_IMODE((root / name).stat().st_mode)
        for before, after in pairs:
            text = re.sub(fill_in(before, values), after, text, flags=re.MULTILINE)
        (root / name).unlink()  # it may be read-only
        write_file(root / name, text, mode)
    for name, mode in steps.get("mode", {}).items():
        (root / name).chmod(mode)
    for key, name in (("nvml", "faults"), ("log", "var/log/kern.log")):
        if key in steps:
            with open(root / name, "a", encoding="utf-8") as file:
                file.write(f"{steps[key]}\n")
    if "docker" in steps:
        _write_docker(root, {name: value for name, value in {**DOCKER, **steps["docker"]}.items() if value != ""})
    if "packages" in steps:
        _write_packages(root, steps["packages"])
    for function in steps.get("call", ()):
        _STEPS[function](root)


def _write_system(root: Path) -> None:
    """Write the files of a healthy system below ``root``, where a simulated host is complete and in its place."""
    write_files(root, "system", VALUES)
    _write_docker(root, DOCKER)
    (root / "usr/bin/nvidia-container-runtime-hook").symlink_to("ocigpu-hook")
    (root / "run/systemd/system").mkdir(parents=True)
    _write_packages(root, ENGINES)
    (root / "usr/local/bin").mkdir(parents=True)
    _write_links(root)
    with suppress(CdiError):  # nothing to describe: all GPUs are in MIG mode and not cut
        _write_spec_file(root)


def _write_docker(root: Path, settings: dict[str, Any]) -> None:
    write_file(root / "etc/docker/daemon.json", json.dumps(settings, indent=4) + "\n")


def _write_packages(root: Path, versions: dict[str, str]) -> None:
    """Write dpkg's list of installed packages."""
    entries = (
        f"Package: {name}\nStatus: install ok installed\nVersion: {version}\n" for name, version in versions.items()
    )
    write_file(root / "var/lib/dpkg/status", "\n".join(entries))


def _write_links(root: Path) -> None:
    """Make the links in /dev/char of the driver's nodes."""
    roots = find_roots(Settings(simulation_root=str(root)))
    driver = read_driver(roots)
    apply_changes(find_link_changes(plan_nodes(driver)[0], driver, roots))


def _write_spec_file(root: Path) -> None:
    """Write the CDI specification of the host's GPUs, as ``ocigpu cdi generate`` does."""
    from ocigpu.cdi.generate import generate
    from ocigpu.cdi.write import write_spec
    from ocigpu.gpus.offer import GenerateOptions

    options = GenerateOptions(mode="nvml", hook_path="/usr/bin/ocigpu-hook")
    generated = generate(options, Settings(simulation_root=str(root)))
    write_spec(generated.spec, str(root / SPEC), "yaml")


def _renumber_node(root: Path) -> None:
    node = root / "dev/nvidia0"
    if not stat.S_ISCHR(node.stat().st_mode):
        raise sim_error("regular files stand for this host's nodes: they have no numbers", "make the host as root")
    node.unlink()
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(195, 7))
    node.chmod(0o666)


def _need_mig(root: Path) -> None:
    if not any(gpu["mig_enabled"] for gpu in read_marker(root)["gpus"]):
        raise sim_error("no GPU of this host is in MIG mode", "add for instance: --model a100 --mig 0:")


_STEPS: dict[str, Callable[[Path], object]] = {
    "need_mig": _need_mig,
    "renumber_node": _renumber_node,
    "write_specification": _write_spec_file,
}
