"""Faults of a simulated host: what goes wrong with real ones, made to be looked at with ``ocigpu doctor --root``."""

import json
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ocigpu.core.errors import OcigpuError, quoted
from ocigpu.sim.fault_names import FAULT_NAMES
from ocigpu.sim.kernel_files import write_file
from ocigpu.sim.marker import read_marker
from ocigpu.sim.models import sim_error
from ocigpu.sim.remove import remove_host
from ocigpu.sim.system_files import (
    CGROUP,
    CONTAINER,
    DOCKER,
    KERNEL,
    SPEC,
    write_packages,
    write_spec_file,
    write_system,
)

OLD_DRIVER = "535.54.03"


def apply_faults(directory: str, names: Sequence[str]) -> None:
    """Put a system around the simulated host in ``directory``, and make these faults, in this order.

    Raises OcigpuError (OCIGPU-SIM-1) for a fault that this host cannot have; the host is removed then.
    """
    try:
        write_system(Path(directory))
        make_faults(directory, names)
    except OSError as error:
        remove_host(directory)
        raise sim_error(f"make a fault: {error.filename}: {error.strerror}") from error
    except OcigpuError:
        remove_host(directory)
        raise


def make_faults(directory: str, names: Sequence[str]) -> None:
    """Make these faults on a simulated host that has a system around it.  Raises OSError, and OcigpuError as above."""
    check_names(names)
    for name in names:
        _MAKERS[name](Path(directory))


def check_names(names: Sequence[str]) -> None:
    """Raise OcigpuError (OCIGPU-SIM-1) for a name that no fault has."""
    for name in names:
        if name not in FAULT_NAMES:
            raise sim_error(f"there is no fault {quoted(name)}", f"faults: {', '.join(FAULT_NAMES)}")


# Helpers


def _remove(root: Path, *paths: str) -> None:
    for path in paths:
        target = root / path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def _nvml(root: Path, line: str) -> None:
    with open(root / "faults", "a", encoding="ascii") as file:
        file.write(f"{line}\n")


def _docker(root: Path, **changes: Any) -> None:
    """Write Docker's settings with these changes; a value of None removes the key."""
    data = {**DOCKER, **{name.replace("_", "-"): value for name, value in changes.items()}}
    data = {name: value for name, value in data.items() if value is not None}
    write_file(root / "etc/docker/daemon.json", json.dumps(data, indent=4) + "\n")


def _change_spec(root: Path, change: Callable[[dict[str, Any]], None], path: str = SPEC) -> None:
    from ocigpu.cdi.document import read_document
    from ocigpu.cdi.write import write_spec

    spec, _ = read_document(str(root / SPEC))
    change(spec)
    write_spec(spec, str(root / path), "yaml")


def _unload(root: Path) -> None:
    """Take the kernel module away: what it shows, its nodes, and NVML's answer."""
    _remove(
        root,
        "proc/driver",
        *(f"sys/module/{name}" for name in ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")),
    )
    for device in (root / "sys/bus/pci/devices").iterdir():
        (device / "driver").unlink(missing_ok=True)
    _remove(root, "sys/bus/pci/drivers/nvidia")
    devices = root / "proc/devices"
    write_file(
        devices, "".join(f"{line}\n" for line in devices.read_text().splitlines() if "nvidia" not in line), 0o444
    )
    for node in (root / "dev").glob("nvidia*"):
        _remove(root, str(node.relative_to(root)))
    _remove(root, "dev/char", "run/cdi")


def _bind(root: Path, driver: str) -> None:
    for device in (root / "sys/bus/pci/devices").iterdir():
        link = device / "driver"
        link.unlink(missing_ok=True)
        link.symlink_to(f"../../drivers/{driver}")


# The driver


def _no_driver(root: Path) -> None:
    _unload(root)
    _no_libraries(root)
    _remove(root, f"lib/modules/{KERNEL}/modules.dep")


def _no_gpu(root: Path) -> None:
    _no_driver(root)
    for device in (root / "sys/bus/pci/devices").iterdir():
        shutil.rmtree(device)


def _not_built(root: Path) -> None:
    _unload(root)
    write_file(root / f"lib/modules/{KERNEL}/modules.dep", "kernel/drivers/net/dummy.ko:\n")
    write_file(root / "usr/src/nvidia-550.163.01/dkms.conf", "")


def _nouveau(root: Path) -> None:
    _unload(root)
    write_file(root / "sys/module/nouveau/initstate", "live\n")
    _bind(root, "nouveau")


def _no_libraries(root: Path) -> None:
    for directory in (root / "usr/lib").iterdir():
        for pattern in ("libcuda.*", "libnvidia-ml.*"):
            for path in directory.glob(pattern) if directory.is_dir() else ():
                path.unlink()


def _old_module(root: Path) -> None:
    version = str(read_marker(root)["driver_version"])
    for name in ("proc/driver/nvidia/version", "sys/module/nvidia/version"):
        path = root / name
        write_file(path, path.read_text().replace(version, OLD_DRIVER), 0o444)


def _other_driver(root: Path) -> None:
    device = sorted((root / "sys/bus/pci/devices").iterdir())[-1]
    (device / "driver").unlink()
    (device / "driver").symlink_to("../../drivers/vfio-pci")


def _no_fabric_manager(root: Path) -> None:
    if not read_marker(root)["majors"].get("nvidia-nvswitch"):
        raise sim_error("this model has no NVSwitches of the driver", "models with them: h100, h200")
    _remove(root, "run/nvidia-fabricmanager")


# Nodes


def _wrong_nodes(root: Path) -> None:
    node = root / "dev/nvidia0"
    if not stat.S_ISCHR(node.stat().st_mode):
        raise sim_error("regular files stand for this host's nodes: they have no numbers", "make the host as root")
    node.unlink()
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(195, 7))
    node.chmod(0o666)


def _no_uvm_module(root: Path) -> None:
    devices = root / "proc/devices"
    write_file(devices, "".join(f"{line}\n" for line in devices.read_text().splitlines() if "-uvm" not in line), 0o444)
    _remove(root, "dev/nvidia-uvm", "dev/nvidia-uvm-tools", "sys/module/nvidia_uvm")
    number = read_marker(root)["majors"]["nvidia-uvm"]
    _remove(root, f"dev/char/{number}:0", f"dev/char/{number}:1")


def _first_mig_node(root: Path) -> str:
    for gpu in read_marker(root)["gpus"]:
        for device in gpu["mig_devices"]:
            return f"dev/nvidia-caps/nvidia-cap{device['gi_minor']}"
    raise sim_error("this host has no MIG device", "add for instance: --model a100 --mig 0:1g.5gb")


def _needs_mig(root: Path) -> None:
    if not any(gpu["mig_enabled"] for gpu in read_marker(root)["gpus"]):
        raise sim_error("no GPU of this host is in MIG mode", "add for instance: --model a100 --mig 0:")


def _mig_instances(root: Path) -> None:
    """Take the compute instances away, and leave GPU instances."""
    _needs_mig(root)
    capabilities = root / "proc/driver/nvidia/capabilities"
    for instance in capabilities.glob("gpu*/mig/gi*/ci*"):
        shutil.rmtree(instance)
    write_spec_file(root)


# CDI


def _no_cdi(root: Path) -> None:
    _remove(root, SPEC)
    write_file(root / "etc/ocigpu/config.toml", 'mode = "cdi"\n')


def _stale(root: Path) -> None:
    version = str(read_marker(root)["driver_version"])

    def change(spec: dict[str, Any]) -> None:
        text = json.dumps(spec).replace(version, OLD_DRIVER)
        spec.update(json.loads(text))

    _change_spec(root, change)


def _vendor_spec(root: Path) -> None:
    """Leave a specification of the vendor's tool in /etc/cdi: of the driver before, under the same names."""
    version = str(read_marker(root)["driver_version"])

    def change(spec: dict[str, Any]) -> None:
        text = json.dumps(spec).replace(version, OLD_DRIVER)
        spec.update(json.loads(text))
        spec.pop("annotations", None)

    _change_spec(root, change, "etc/cdi/nvidia.yaml")


def _partial(root: Path) -> None:
    def change(spec: dict[str, Any]) -> None:
        for device in spec["devices"]:
            device["containerEdits"] = {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}

    _change_spec(root, change)


def _too_new(root: Path) -> None:
    write_packages(root, {"docker-ce": "5:28.5.1-1~debian.12~bookworm", "podman": "4.3.1+ds1-8"})


def _twice(root: Path) -> None:
    shutil.copy(root / SPEC, root / "var/run/cdi/nvidia-copy.yaml")


def _broken_spec(root: Path) -> None:
    write_file(root / "etc/cdi/nvidia.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n")


def _no_cdi_hook(root: Path) -> None:
    def change(spec: dict[str, Any]) -> None:
        hook = {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "env": ["A=b"], "args": ["x"]}
        spec["containerEdits"]["hooks"] = [hook]

    _change_spec(root, change)


# Engines


def _unconfigured(root: Path) -> None:
    _remove(root, "etc/docker", "usr/bin/nvidia-container-runtime-hook", "usr/bin/podman", SPEC)
    write_packages(root, {"docker-ce": "5:27.3.1-1~debian.12~bookworm"})


def _missing_runtime(root: Path) -> None:
    _docker(root, runtimes={"ocigpu": {"path": "/opt/before/ocigpu-runtime"}})


def _no_gpus_hook(root: Path) -> None:
    _remove(root, "usr/bin/nvidia-container-runtime-hook")
    _docker(root, default_runtime=None)


def _cdi_off(root: Path) -> None:
    _docker(root, features={"cdi": False})


def _bad_json(root: Path) -> None:
    write_file(root / "etc/docker/daemon.json", '{\n    "runtimes": {,}\n}\n')


def _containerd(root: Path) -> None:
    section = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}]\n'
    options = section.format(name="ocigpu.options").replace("]\n", ']\nBinaryName = "/usr/bin/ocigpu-runtime"\n')
    write_file(root / "usr/bin/containerd", "a program of a simulated host\n", 0o755)
    write_file(root / "etc/containerd/config.toml", "version = 2\n" + section.format(name="ocigpu") + options)
    write_file(root / "var/lib/rancher/k3s/agent/etc/containerd/config.toml", "version = 2\n")


def _snap(root: Path) -> None:
    write_file(root / "snap/bin/docker", "a program of a simulated host\n", 0o755)


def _systemd_cgroups(root: Path) -> None:
    _docker(root, default_runtime=None, exec_opts=["native.cgroupdriver=systemd"])


def _vendor(root: Path) -> None:
    for name in ("nvidia-container-runtime", "nvidia-ctk"):
        write_file(root / "usr/bin" / name, "a program of a simulated host\n", 0o755)


def _vendor_services(root: Path) -> None:
    _vendor(root)
    for name in ("nvidia", "ocigpu"):
        write_file(root / f"usr/lib/systemd/system/{name}-cdi-refresh.service", "[Service]\n")


def _vendor_no_cgroups(root: Path) -> None:
    _vendor(root)
    runtimes = {name: {"path": f"/usr/bin/{name}"} for name in ("nvidia-container-runtime", "ocigpu-runtime")}
    _docker(root, default_runtime="ocigpu-runtime", runtimes=runtimes)
    write_file(root / "etc/nvidia-container-runtime/config.toml", "[nvidia-container-cli]\nno-cgroups = true\n")


# The system


def _no_cgroups(root: Path) -> None:
    write_file(root / "etc/ocigpu/config.toml", "no-cgroups = true\n")


def _bad_settings(root: Path) -> None:
    write_file(root / "etc/ocigpu/config.toml", 'mode = "hook"\nno-cgroup = true\n')


def _selinux(root: Path) -> None:
    write_file(root / "sys/fs/selinux/enforce", "1")
    write_file(root / "sys/fs/selinux/booleans/container_use_devices", "0 0")
    _remove(root, "sys/module/apparmor")


def _log(root: Path, line: str) -> None:
    with open(root / "var/log/kern.log", "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def _apparmor(root: Path) -> None:
    _log(
        root,
        'kernel: audit: type=1400 apparmor="DENIED" operation="open" profile="docker-default" '
        'name="/proc/driver/nvidia/params" pid=4242 comm="train" requested_mask="r" denied_mask="r"',
    )


def _old_kernel(root: Path) -> None:
    write_file(root / "proc/sys/kernel/osrelease", "5.4.0-200-generic\n")


def _deleted(root: Path) -> None:
    version = read_marker(root)["driver_version"]
    line = f"36 35 8:1 /usr/lib/libcuda.so.{version}//deleted /usr/lib/libcuda.so.{version} ro - ext4 /dev/sda1 rw\n"
    write_file(root / f"proc/{CONTAINER}/mountinfo", line)


_MAKERS: dict[str, Callable[[Path], None]] = {
    "none": lambda _root: None,
    "no-gpu": _no_gpu,
    "no-driver": _no_driver,
    "driver-not-built": _not_built,
    "driver-not-loaded": _unload,
    "nouveau": _nouveau,
    "no-libraries": _no_libraries,
    "old-module": _old_module,
    "other-driver": _other_driver,
    "nvml-broken": lambda root: _nvml(root, "init 999"),
    "nvml-hangs": lambda root: _nvml(root, "hang"),
    "gpu-lost": lambda root: _nvml(root, "lost 0"),
    "xid-79": lambda root: _log(root, "kernel: NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."),
    "no-persistence": lambda root: _nvml(root, "no-persistence"),
    "no-fabric-manager": _no_fabric_manager,
    "missing-nodes": lambda root: _remove(root, "dev/nvidia0"),
    "missing-control": lambda root: _remove(root, "dev/nvidiactl"),
    "missing-uvm": lambda root: _remove(root, "dev/nvidia-uvm", "dev/nvidia-uvm-tools"),
    "no-uvm-module": _no_uvm_module,
    "wrong-nodes": _wrong_nodes,
    "node-modes": lambda root: (root / "dev/nvidiactl").chmod(0o600),
    "no-dev-char": lambda root: _remove(root, "dev/char"),
    "mig-pending": lambda root: _nvml(root, "mig-pending 0"),
    "mig-empty": _needs_mig,
    "mig-no-compute": _mig_instances,
    "mig-nodes": lambda root: _remove(root, _first_mig_node(root)),
    "no-cdi": _no_cdi,
    "stale-cdi": _stale,
    "vendor-cdi": _vendor_spec,
    "partial-cdi": _partial,
    "too-new-cdi": _too_new,
    "two-cdi": _twice,
    "broken-cdi": _broken_spec,
    "cdi-hook": _no_cdi_hook,
    "docker-unconfigured": _unconfigured,
    "docker-runtime": _missing_runtime,
    "docker-gpus": _no_gpus_hook,
    "docker-cdi-off": _cdi_off,
    "docker-json": _bad_json,
    "docker-snap": _snap,
    "two-containerd": _containerd,
    "systemd-cgroups": _systemd_cgroups,
    "vendor-services": _vendor_services,
    "vendor-no-cgroups": _vendor_no_cgroups,
    "no-cgroups": _no_cgroups,
    "bad-settings": _bad_settings,
    "no-python": lambda root: _remove(root, "usr/bin/python3"),
    "no-runc": lambda root: _remove(root, "usr/sbin/runc"),
    "no-subids": lambda root: _remove(root, "etc/subuid", "etc/subgid"),
    "no-delegation": lambda root: write_file(root / CGROUP, "pids\n"),
    "selinux": _selinux,
    "apparmor": _apparmor,
    "no-ldconfig": lambda root: _remove(root, "sbin/ldconfig"),
    "old-kernel": _old_kernel,
    "deleted-files": _deleted,
}
