"""Faults of a simulated host: what goes wrong with real ones, made to be looked at with ``ocigpu doctor --root``.

faults.toml says what each is made of; here are the steps that are more than files written and removed.
"""

import json
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ocigpu.core.errors import CdiError, OcigpuError, quoted
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.nodes import apply_changes, find_link_changes, plan_nodes, read_driver
from ocigpu.gpus.tree import find_roots
from ocigpu.sim.fault_names import FAULT_NAMES
from ocigpu.sim.files import fill_in, write_file, write_files
from ocigpu.sim.made import read_marker, remove_host
from ocigpu.sim.models import sim_error

OLD_DRIVER = "535.54.03"
DEVICES = "sys/bus/pci/devices"
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
            raise sim_error(f"there is no fault {quoted(name)}", f"faults: {', '.join(FAULT_NAMES)}")


def make_faults(directory: str, names: Sequence[str]) -> None:
    """Make these faults on a simulated host that has a system around it.  Raises OSError, and OcigpuError as above."""
    check_names(names)
    root = Path(directory)
    values = {**VALUES, "version": str(read_marker(root)["driver_version"])}
    for name in names:
        _make(root, FAULT_NAMES[name].steps, values)


def _make(root: Path, steps: dict[str, Any], values: dict[str, str]) -> None:
    for function in steps.get("call", ()):
        _STEPS[function](root)
    _remove(root, *(fill_in(path, values) for path in steps.get("remove", ())))
    for path, text in steps.get("write", {}).items():
        write_file(root / fill_in(path, values), fill_in(text, values), 0o755 if "bin/" in path else 0o644)
    for key, path in (("nvml", "faults"), ("log", "var/log/kern.log")):
        if key in steps:
            with open(root / path, "a", encoding="utf-8") as file:
                file.write(f"{steps[key]}\n")
    if "docker" in steps:
        _write_docker(root, {name: value for name, value in {**DOCKER, **steps["docker"]}.items() if value != ""})
    if "packages" in steps:
        _write_packages(root, steps["packages"])


def _remove(root: Path, *paths: str) -> None:
    for path in paths:
        target = root / path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def _drop_lines(path: Path, word: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    write_file(path, "".join(line for line in lines if word not in line), 0o444)


# The system


def _write_system(root: Path) -> None:
    """Write the files of a healthy system below ``root``, where a simulated host is complete and in its place."""
    write_files(root, "system", VALUES)
    _write_docker(root, DOCKER)
    (root / "usr/bin/nvidia-container-runtime-hook").symlink_to("ocigpu-hook")
    (root / "run/systemd/system").mkdir(parents=True)
    _write_packages(root, ENGINES)
    (root / "usr/local/bin").mkdir(parents=True)
    _write_links(root)
    try:
        _write_spec_file(root)
    except CdiError:  # nothing to describe: all GPUs are in MIG mode and not cut
        return


def _write_docker(root: Path, settings: dict[str, Any]) -> None:
    """Write Docker's settings."""
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


# The driver


def _unload(root: Path) -> None:
    """Take the kernel module away: what it shows, its nodes, and NVML's answer."""
    modules = [f"sys/module/{name}" for name in ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")]
    nodes = [f"dev/{node.name}" for node in (root / "dev").glob("nvidia*")]
    _remove(root, "proc/driver", *modules, *nodes, "sys/bus/pci/drivers/nvidia", "dev/char", "run/cdi")
    for device in (root / DEVICES).iterdir():
        (device / "driver").unlink(missing_ok=True)
    _drop_lines(root / "proc/devices", "nvidia")


def _remove_gpus(root: Path) -> None:
    for device in (root / DEVICES).iterdir():
        shutil.rmtree(device)


def _bind(device: Path, driver: str) -> None:
    (device / "driver").unlink(missing_ok=True)
    (device / "driver").symlink_to(f"../../drivers/{driver}")


def _bind_nouveau(root: Path) -> None:
    for device in (root / DEVICES).iterdir():
        _bind(device, "nouveau")


def _bind_last_to_vfio(root: Path) -> None:
    _bind(max((root / DEVICES).iterdir()), "vfio-pci")


def _remove_libraries(root: Path, *patterns: str) -> None:
    for pattern in patterns or ("libcuda.*", "libnvidia-ml.*"):
        for path in (root / "usr/lib").glob(f"*/{pattern}"):
            path.unlink()


def _bend_libcuda(root: Path) -> None:
    for path in (root / "usr/lib").glob("*/libcuda.so.1"):
        path.unlink()
        path.symlink_to("libcuda.so.0.0")


def _add_libraries(root: Path) -> None:
    """Leave libraries of another driver beside the others, as an installer of NVIDIA's and packages do."""
    version = str(read_marker(root)["driver_version"])
    for name in ("libcuda", "libnvidia-ml"):
        for path in (root / "usr/lib").glob(f"*/{name}.so.{version}"):
            shutil.copy(path, path.with_name(f"{name}.so.570.86.10"))


def _age_module(root: Path) -> None:
    version = str(read_marker(root)["driver_version"])
    for name in ("proc/driver/nvidia/version", "sys/module/nvidia/version"):
        path = root / name
        write_file(path, path.read_text().replace(version, OLD_DRIVER), 0o444)


def _need_nvswitches(root: Path) -> None:
    if not read_marker(root)["majors"].get("nvidia-nvswitch"):
        raise sim_error("this model has no NVSwitches of the driver", "models with them: h100, h200")


# Nodes


def _renumber_node(root: Path) -> None:
    node = root / "dev/nvidia0"
    if not stat.S_ISCHR(node.stat().st_mode):
        raise sim_error("regular files stand for this host's nodes: they have no numbers", "make the host as root")
    node.unlink()
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(195, 7))
    node.chmod(0o666)


def _unload_uvm(root: Path) -> None:
    _drop_lines(root / "proc/devices", "-uvm")
    number = read_marker(root)["majors"]["nvidia-uvm"]
    _remove(root, f"dev/char/{number}:0", f"dev/char/{number}:1")


def _remove_mig_node(root: Path) -> None:
    devices = [device for gpu in read_marker(root)["gpus"] for device in gpu["mig_devices"]]
    if not devices:
        raise sim_error("this host has no MIG device", "add for instance: --model a100 --mig 0:1g.5gb")
    _remove(root, f"dev/nvidia-caps/nvidia-cap{devices[0]['gi_minor']}")


def _need_mig(root: Path) -> None:
    if not any(gpu["mig_enabled"] for gpu in read_marker(root)["gpus"]):
        raise sim_error("no GPU of this host is in MIG mode", "add for instance: --model a100 --mig 0:")


def _remove_compute_instances(root: Path) -> None:
    for instance in (root / "proc/driver/nvidia/capabilities").glob("gpu*/mig/gi*/ci*"):
        shutil.rmtree(instance)
    _write_spec_file(root)


# CDI


def _change_spec(root: Path, change: Callable[[dict[str, Any]], object], path: str = SPEC) -> None:
    from ocigpu.cdi.document import read_document
    from ocigpu.cdi.write import write_spec

    spec, _ = read_document(str(root / SPEC))
    change(spec)
    write_spec(spec, str(root / path), "yaml")


def _age_specification(root: Path, path: str = SPEC, *without: str) -> None:
    version = str(read_marker(root)["driver_version"])

    def change(spec: dict[str, Any]) -> None:
        spec.update(json.loads(json.dumps(spec).replace(version, OLD_DRIVER)))
        for key in without:
            spec.pop(key, None)

    _change_spec(root, change, path)


def _add_vendor_specification(root: Path) -> None:
    """Leave a specification of the vendor's tool in /etc/cdi: of the previous driver, under the same names."""
    _age_specification(root, "etc/cdi/nvidia.yaml", "annotations")


def _exchange_gpu(root: Path) -> None:
    """Make the specification one of the vendor's, with the UUID of a GPU that is not there any more."""

    def change(spec: dict[str, Any]) -> None:
        spec.pop("annotations", None)
        first = next(device for device in spec["devices"] if device["name"].startswith("GPU-"))
        first["name"] = "GPU-00000000-1111-2222-3333-444444444444"

    _change_spec(root, change)


def _empty_specification(root: Path) -> None:
    edits = {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}
    _change_spec(root, lambda spec: [device.update(containerEdits=edits) for device in spec["devices"]])


def _name_missing_hook(root: Path) -> None:
    hook = {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "env": ["A=b"], "args": ["x"]}
    _change_spec(root, lambda spec: spec["containerEdits"].update(hooks=[hook]))


_STEPS: dict[str, Callable[[Path], object]] = {
    "add_libraries": _add_libraries,
    "add_vendor_specification": _add_vendor_specification,
    "age_module": _age_module,
    "age_specification": _age_specification,
    "bend_libcuda": _bend_libcuda,
    "bind_last_to_vfio": _bind_last_to_vfio,
    "bind_nouveau": _bind_nouveau,
    "close_control_node": lambda root: (root / "dev/nvidiactl").chmod(0o600),
    "copy_specification": lambda root: shutil.copy(root / SPEC, root / "var/run/cdi/nvidia-copy.yaml"),
    "empty_specification": _empty_specification,
    "exchange_gpu": _exchange_gpu,
    "name_missing_hook": _name_missing_hook,
    "need_mig": _need_mig,
    "need_nvswitches": _need_nvswitches,
    "remove_compute_instances": _remove_compute_instances,
    "remove_gpus": _remove_gpus,
    "remove_libcuda": lambda root: _remove_libraries(root, "libcuda.so.*.*"),
    "remove_libraries": _remove_libraries,
    "remove_mig_node": _remove_mig_node,
    "renumber_node": _renumber_node,
    "unload": _unload,
    "unload_uvm": _unload_uvm,
}
