"""What is true of the host: pure records, read by :mod:`ocigpu.host`, used by :mod:`ocigpu.gpus.nvidia.plan`.

Everything here is data: JSON in and out (:func:`facts_to_json`, :func:`facts_from_json`), so that a recorded host
replaces a live one.  A thing that is absent is a value (``None``, empty), never an exception.

Paths: ``host_path`` is where the host has it, driver root included, with every symbolic link resolved;
``container_path`` is where a container expects it.
"""

from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class DeviceNode(NamedTuple):
    """One character device of the driver.

    ``host_path`` is empty when the host has the major but no node (it can then only be made, not bind-mounted).
    ``mode`` holds permission bits only, e.g. 0o666.
    """

    container_path: str
    host_path: str
    major: int
    minor: int
    mode: int = 0o666
    uid: int = 0
    gid: int = 0


class Permissions(NamedTuple):
    """Permissions that a driver gives its nodes; ``mode`` holds permission bits."""

    mode: int = 0o666
    uid: int = 0
    gid: int = 0


class MigDevice(NamedTuple):
    """One MIG device: a compute instance of a GPU instance. ``gi_minor``/``ci_minor``: minors of nvidia-caps."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    uuid: str
    profile: str
    gpu_instance: int
    compute_instance: int
    gi_minor: int
    ci_minor: int


def mig_capability_paths(gpu_minor: int, mig: MigDevice) -> tuple[str, str]:
    """Return the capability files of a MIG device below /proc/driver/nvidia/capabilities: GPU, then compute instance.

    E.g. ("gpu0/mig/gi1/access", "gpu0/mig/gi1/ci0/access").
    """
    instance = f"gpu{gpu_minor}/gi{mig.gpu_instance}"
    return capability_path(f"{instance}/access"), capability_path(f"{instance}/ci{mig.compute_instance}/access")


def capability_path(name: str) -> str:
    """Return the file below /proc/driver/nvidia/capabilities of a capability as mig-minors names it.

    E.g. "gpu0/mig/gi1/access" of "gpu0/gi1/access", "mig/config" of "config".
    """
    gpu, slash, rest = name.partition("/")
    return f"{gpu}/mig/{rest}" if slash else f"mig/{name}"


NOT_LISTED = "not listed by NVML (lost, in reset, or not accessible)"
MISSING_NODE = "device nodes are missing: "
"""NVML lists a GPU by its node: a GPU without one may still be healthy."""


class Gpu(NamedTuple):
    """One GPU.

    ``index`` is NVML's, ``minor`` the N of /dev/nvidiaN (they may differ), ``bus_id`` is "00000000:3b:00.0" (8 hex
    digits of domain, lower case), ``architecture`` the compute capability "9.0" ("" when only procfs is known),
    ``proc_name`` the directory below /proc/driver/nvidia/gpus ("0000:3b:00.0" or ""), ``drm_nodes`` its card and render
    nodes below /dev/dri, ``coherent`` whether it uses the host's page tables (NVML's addressing mode ATS).  ``error``
    is empty, or says why this GPU cannot be used ("fallen off the bus").
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    minor: int
    uuid: str
    bus_id: str
    model: str = ""
    brand: str = ""
    architecture: str = ""
    proc_name: str = ""
    node: DeviceNode | None = None
    drm_nodes: tuple[DeviceNode, ...] = ()
    mig_capable: bool = False
    mig_enabled: bool = False
    mig_devices: tuple[MigDevice, ...] = ()
    coherent: bool = False
    error: str = ""

    @property
    def title(self) -> str:
        """The GPU's name in messages: a GPU that NVML does not list has no index, but a PCI address."""
        unlisted = self.error == NOT_LISTED or self.error.startswith(MISSING_NODE)
        return f"GPU {self.bus_id if unlisted and self.bus_id else self.index}"


class Library(NamedTuple):
    """One driver library: ``name`` its file name ("libcuda.so.550.163.01"), ``soname`` ("libcuda.so.1").

    ``capabilities``: the driver capabilities that need it; ``bits``: 64 or 32.
    """

    host_path: str
    name: str
    soname: str
    capabilities: tuple[str, ...]
    bits: int = 64


class HostFile(NamedTuple):
    """A binary, firmware image, socket, directory or configuration file of the driver.

    ``capabilities`` as for :class:`Library`; empty: needed for every GPU.  ``kind``: "file", "directory" or "socket".
    """

    host_path: str
    container_path: str
    capabilities: tuple[str, ...] = ()
    kind: str = "file"


class ProcFile(NamedTuple):
    """A small text file of /proc/driver/nvidia: ``name`` relative to it ("params"), permission bits, content."""

    name: str
    mode: int
    content: str


LISTED = "listed"
"""Name of the part with the files that the lists of a Tegra system name for every container."""


class FeatureNodes(NamedTuple):
    """The nodes of an opt-in variable: ``name`` is "gds", "mofed", "gdrcopy" or "nvswitch"; or LISTED.

    ``links``: (target text, path in the container) pairs.
    """

    name: str
    nodes: tuple[DeviceNode, ...]
    files: tuple[HostFile, ...] = ()
    links: tuple[tuple[str, str], ...] = ()


class HostFacts(NamedTuple):
    """Everything known of the host's driver.

    ``driver_version``: "550.163.01"; ``cuda_version``: "12.4" or "" when unknown.
    ``majors``: (name, major) pairs of the NVIDIA drivers in /proc/devices, e.g. ("nvidia-uvm", 510).
    ``control_nodes``: /dev/nvidiactl, nvidia-uvm, nvidia-uvm-tools, nvidia-modeset (those whose major is known).
    ``cap_nodes``: (capability path, node) of /dev/nvidia-caps, e.g. ("gpu0/gi1/access", node), ("config", node).
    ``imex_nodes``: existing or makeable channel nodes; ``imex_major`` is None without the driver part.
    ``named_libraries``: (container path of one of the configs, absolute path of a library of the driver in it) pairs.
    ``proc_driver``: host path of /proc/driver/nvidia ("" when absent); ``proc_files``: params, version, registry.
    ``proc_capabilities``: whether <proc_driver>/capabilities exists.
    ``notes``: one sentence each about what could not be read ("NVML: ...; GPUs come from procfs").
    ``source``: "nvml" or "procfs": where the list of GPUs comes from.
    ``vendor``: whose driver this is, by its name in :mod:`ocigpu.gpus.vendors`.  ``parts``: of a host with drivers of
    several vendors each one's facts; GPUs, control nodes and notes are then those of all, the rest is the first one's.
    """

    driver_root: str = "/"
    simulated: bool = False
    driver_version: str = ""
    cuda_version: str = ""
    source: str = ""
    gpus: tuple[Gpu, ...] = ()
    majors: tuple[tuple[str, int], ...] = ()
    control_nodes: tuple[DeviceNode, ...] = ()
    cap_nodes: tuple[tuple[str, DeviceNode], ...] = ()
    imex_major: int | None = None
    imex_nodes: tuple[DeviceNode, ...] = ()
    libraries: tuple[Library, ...] = ()
    binaries: tuple[HostFile, ...] = ()
    firmware: tuple[HostFile, ...] = ()
    sockets: tuple[HostFile, ...] = ()
    configs: tuple[HostFile, ...] = ()
    named_libraries: tuple[tuple[str, str], ...] = ()
    features: tuple[FeatureNodes, ...] = ()
    proc_driver: str = ""
    proc_files: tuple[ProcFile, ...] = ()
    proc_capabilities: bool = False
    notes: tuple[str, ...] = ()
    vendor: str = "nvidia"
    parts: "tuple[HostFacts, ...]" = ()

    @property
    def listed(self) -> FeatureNodes | None:
        """The files that the lists of a Tegra system name, None where the driver's files are searched."""
        return next((feature for feature in self.features if feature.name == LISTED), None)

    @property
    def each(self) -> "tuple[HostFacts, ...]":
        """The facts of each vendor's driver."""
        return self.parts or (self,)

    @property
    def vendors(self) -> tuple[str, ...]:
        """The vendors whose drivers are here."""
        return tuple(one.vendor for one in self.each)

    def of(self, *vendors: str) -> "HostFacts":
        """Return the facts of these vendors' drivers, empty ones for a driver that is not here."""
        known = {one.vendor: one for one in self.each}
        return join_facts([known.get(vendor) or HostFacts(vendor=vendor) for vendor in vendors])


def join_facts(parts: "Sequence[HostFacts]") -> HostFacts:
    """Return the facts of several vendors' drivers as those of one host."""
    if len(parts) == 1:
        return parts[0]
    return parts[0]._replace(
        gpus=tuple(gpu for one in parts for gpu in one.gpus),
        control_nodes=tuple(node for one in parts for node in one.control_nodes),
        notes=tuple(note for one in parts for note in one.notes),
        parts=tuple(parts),
    )


class ImageFacts(NamedTuple):
    """Decides where files go in a container: read from its root by :mod:`ocigpu.provision.image`.

    ``library_dir``/``library_dir32``: where driver libraries go; ``libc``: "glibc", "musl" or "" (no loader found);
    ``compat_dir``: directory of CUDA forward-compatibility libraries newer than the driver, or "".
    ``stale_cache``: why the image's loader cache may lack libraries of the image, or cannot be added to; "": it is
    current.
    """

    library_dir: str = "/usr/lib64"
    library_dir32: str = "/usr/lib32"
    libc: str = "glibc"
    compat_dir: str = ""
    compat_major: int = 0
    stale_cache: str = ""


def to_data(value: "Any") -> "Any":
    """Return records as plain JSON data: records become objects, tuples become lists."""
    if hasattr(value, "_fields"):
        return {name: to_data(getattr(value, name)) for name in value._fields}
    if isinstance(value, (tuple, list)):
        return [to_data(item) for item in value]
    return value


def _node(data: "Any") -> DeviceNode:
    return DeviceNode(**data)


def _files(data: "Any") -> tuple[HostFile, ...]:
    return tuple(HostFile(**{**item, "capabilities": tuple(item["capabilities"])}) for item in data)


def facts_to_json(facts: HostFacts) -> "dict[str, Any]":
    """Return the facts as JSON data."""
    data: dict[str, Any] = to_data(facts)
    return data


def facts_from_json(data: "dict[str, Any]") -> HostFacts:
    """Return the facts that :func:`facts_to_json` wrote; raises KeyError or TypeError for other data."""
    plain = dict(data)
    plain.pop("schema-version", None)  # of ocigpu facts --json
    plain["gpus"] = tuple(
        Gpu(
            **{
                **gpu,
                "node": _node(gpu["node"]) if gpu["node"] else None,
                "drm_nodes": tuple(map(_node, gpu["drm_nodes"])),
                "mig_devices": tuple(MigDevice(**mig) for mig in gpu["mig_devices"]),
            }
        )
        for gpu in data["gpus"]
    )
    plain["majors"] = tuple((name, major) for name, major in data["majors"])
    plain["cap_nodes"] = tuple((path, _node(node)) for path, node in data["cap_nodes"])
    for name in ("control_nodes", "imex_nodes"):
        plain[name] = tuple(map(_node, data[name]))
    plain["libraries"] = tuple(
        Library(**{**item, "capabilities": tuple(item["capabilities"])}) for item in data["libraries"]
    )
    for name in ("binaries", "firmware", "sockets", "configs"):
        plain[name] = _files(data[name])
    plain["named_libraries"] = tuple((path, library) for path, library in data.get("named_libraries", ()))
    plain["features"] = tuple(
        FeatureNodes(
            item["name"],
            tuple(map(_node, item["nodes"])),
            _files(item["files"]),
            tuple((target, path) for target, path in item["links"]),
        )
        for item in data["features"]
    )
    plain["proc_files"] = tuple(ProcFile(**item) for item in data["proc_files"])
    plain["notes"] = tuple(data["notes"])
    plain["parts"] = tuple(map(facts_from_json, data.get("parts", ())))
    return HostFacts(**plain)
