"""What facts and specifications of the NVIDIA driver depend on."""

from ocigpu.core.settings import Settings
from ocigpu.gpus.fingerprint import digest
from ocigpu.gpus.nvidia.devices import IMEX_DRIVER, MAX_NODES
from ocigpu.gpus.nvidia.procfs import (
    ProcGpu,
    numbered,
    parse_devices,
    parse_permissions,
    read_kernel_version,
    read_proc_gpus,
)
from ocigpu.gpus.pci import read_drm_numbers
from ocigpu.gpus.tree import Roots, Tree, find_roots, read_node, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.gpus.vendors import Fingerprint

_DIRECTORIES = ("nvidia-caps", IMEX_DRIVER)
"""Directories of nodes in /dev; their content matters, not their existence."""


def read_nvidia(settings: Settings) -> "Fingerprint":
    """Return the pairs of the NVIDIA driver: its version, GPUs, MIG devices, device numbers and nodes.

    ``uuids`` is "" while the driver does not tell every UUID: it shows question marks for a GPU that nothing uses.
    """
    roots = find_roots(settings)
    proc_driver = f"{roots.proc}/driver/nvidia"
    gpus = read_proc_gpus(proc_driver)
    tree = Tree(roots.dev)
    known = all(gpu.uuid for gpu in gpus)
    return (
        ("driver", read_kernel_version(roots.proc, roots.sys)),
        ("gpus", digest(f"{gpu.bus_id} {gpu.minor} {gpu.excluded}" for gpu in gpus)),
        ("uuids", digest(gpu.uuid for gpu in gpus) if known else ""),
        ("mig", digest(_mig_devices(roots, gpus))),
        ("nodes", digest(_numbers_and_nodes(roots, tree, gpus))),
        ("imex", digest(tree.names(f"/dev/{IMEX_DRIVER}"))),
    )


def has_driver(settings: Settings) -> bool:
    """Return whether the NVIDIA driver is loaded."""
    roots = find_roots(settings)
    return bool(read_kernel_version(roots.proc, roots.sys))


def _mig_devices(roots: Roots, gpus: tuple[ProcGpu, ...]) -> list[str]:
    """Return a line for each compute instance, and for each GPU instance that has none.

    The driver makes their capability directories with the instances.  Their minors follow from their ids.
    """
    found = []
    for gpu in gpus:
        directory = f"{roots.proc}/driver/nvidia/capabilities/gpu{gpu.minor}/mig"
        for gpu_instance in numbered(directory, "gi"):
            instances = numbered(f"{directory}/gi{gpu_instance}", "ci") or [-1]
            found += [f"{gpu.minor} {gpu_instance} {instance}" for instance in instances]
    return found


def _numbers_and_nodes(roots: Roots, tree: Tree, gpus: tuple[ProcGpu, ...]) -> list[str]:
    """Return lines for majors, the permissions that the driver gives, each GPU's DRM numbers, and nodes.

    Returns nothing without a driver and its nodes: other nodes in /dev/infiniband do not matter then.
    """
    majors = parse_devices(read_text(f"{roots.proc}/devices") or "")
    names = [name for name in tree.names("/dev") if name.startswith("nvidia") or name == "gdrdrv"]
    names = [name for name in names if name not in _DIRECTORIES]
    if not (majors or names or gpus):
        return []
    permissions = parse_permissions(read_text(f"{roots.proc}/driver/nvidia/params") or "")
    lines = [f"{name} {major}" for name, major in majors]
    lines.append(f"permissions {permissions.mode:o} {permissions.uid} {permissions.gid}")
    paths = [f"/dev/{name}" for name in names]
    for directory in (f"/dev/{_DIRECTORIES[0]}", "/dev/infiniband"):
        paths += [f"{directory}/{name}" for name in tree.names(directory)]
    for gpu in gpus:
        for name, major, minor in read_drm_numbers(roots.sys, gpu.bus_id):
            lines.append(f"{gpu.bus_id} {name} {major}:{minor}")
            paths.append(f"/dev/dri/{name}")
    return lines + [f"{path} {read_node(tree.host(path))}" for path in paths[:MAX_NODES]]
