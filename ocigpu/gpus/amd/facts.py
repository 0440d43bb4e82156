"""AMD GPUs as sysfs shows them: the PCI functions of amdgpu, their DRM nodes, KFD's topology, partitions.

Sources: Documentation/gpu/amdgpu of the kernel, drivers/gpu/drm/amd/amdkfd/kfd_topology.c (files below
/sys/class/kfd/kfd/topology/nodes) and drivers/gpu/drm/amd/amdxcp (a platform device "amdgpu_xcp..." for each possible
further partition of a GPU).  A partition slot that is not in use has DRM nodes all the same, but no node in KFD's
topology.
"""

from ocigpu.core.errors import HostError, printable
from ocigpu.core.facts import DeviceNode, Gpu, HostFacts
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.gpus.fingerprint import digest
from ocigpu.gpus.nodes import NodeReader
from ocigpu.gpus.pci import Function, bound_addresses, read_drm_directory, read_functions, read_number
from ocigpu.gpus.tree import Roots, find_roots, list_names, node_tree, normal_bus_id, read_or_skip

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.gpus.vendors import Fingerprint

AMD_VENDOR = 0x1002
DRIVER = "amdgpu"
GPU_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)
"""VGA, 3D and other display controllers; processing accelerators (Instinct)."""
TOPOLOGY = "class/kfd/kfd/topology/nodes"
"""Below sysfs."""
MAX_TOPOLOGY = 1024
MAX_PLATFORM = 1024
MAX_PRODUCT = 256


class KfdNode(NamedTuple):
    """A GPU, or a partition of one, in KFD's topology.

    ``location``: bus << 8 | device << 3 | function on the PCI bus, where KFD writes the number of the partition in
    place of the function.  ``unique_id``: 0 when the GPU has none.
    """

    render_minor: int
    unique_id: int
    domain: int
    location: int


class AmdGpu(NamedTuple):
    """One GPU, or one partition of a partitioned GPU.

    ``address``: of the GPU on the PCI bus.  ``partition``: counted from 0, -1 for a GPU that is not partitioned.
    ``unique_id``: 0 for none.  ``compute``: KFD lists it, so ROCm can use it.  ``product``: the
    name that the board stores, "" for none (Documentation/gpu/amdgpu/driver-misc.rst, product_name).
    """

    address: str
    partition: int
    unique_id: int
    compute: bool
    nodes: tuple[DeviceNode, ...]
    product: str = ""


class AmdFacts(NamedTuple):
    """AMD's GPUs that amdgpu drives, in the order of their indices; /dev/kfd; GPUs that have another driver or none.

    The order is that of PCI addresses, partitions of a GPU by render node, which is also how AMD's own container
    toolkit counts; a GPU that KFD does not know comes after all others (the toolkit leaves it out).
    """

    gpus: tuple[AmdGpu, ...] = ()
    kfd: DeviceNode | None = None
    unbound: tuple[Function, ...] = ()
    notes: tuple[str, ...] = ()


def read_amd_facts(roots: Roots, all_functions: bool = True) -> AmdFacts:
    """Return AMD's GPUs from sysfs and /dev; needs no privilege.

    ``all_functions``: also search GPUs without amdgpu, which reads every function of the PCI bus.  Raises HostError
    (OCIGPU-HOST-3) when a device node cannot be examined.

    A file of sysfs that cannot be read now is a note, and takes no GPU away: while KFD's topology is not whole, a GPU
    that is not found in it counts as one that ROCm can use, with the unique id of its own directory.
    """
    reader = NodeReader(node_tree(roots))
    addresses = bound_addresses(roots.sys, DRIVER)
    notes: list[str] = []
    topology = read_topology(roots.sys, notes)
    unsure = bool(notes)
    partitions = _read_partitions(roots.sys, topology, notes)
    gpus: list[AmdGpu] = []
    for address in addresses:
        directory = f"{roots.sys}/bus/pci/devices/{address}"
        entries = read_drm_directory(f"{directory}/drm", notes)
        product = printable((read_or_skip(f"{directory}/product_name", MAX_PRODUCT) or "").strip())
        known = topology.get(render_minor(entries))
        presumed = _read_unique_id(directory, notes) if unsure and known is None else None
        others = partitions.get(_slot_of(address), [])
        members = [(known, entries), *others]
        for position, (kfd, drm) in enumerate(members):
            partition = position if others else -1
            unique_id, nodes = kfd.unique_id if kfd else presumed or 0, reader.read_drm(drm)
            usable = kfd is not None or presumed is not None
            gpus.append(AmdGpu(address, partition, unique_id, usable, nodes, product))
    gpus.sort(key=lambda gpu: not gpu.compute)
    functions: tuple[Function, ...] = ()
    if all_functions:
        try:
            functions = read_functions(roots.sys, AMD_VENDOR)
        except HostError as error:
            notes.append(error.message)
    unbound = tuple(
        function for function in functions if function.base_class in GPU_CLASSES and function.address not in addresses
    )
    kfd_node = _read_kfd(roots.sys, reader, notes)
    return AmdFacts(tuple(gpus), kfd_node, unbound, (*reader.notes, *dict.fromkeys(notes)))


def has_driver(settings: Settings) -> bool:
    """Return whether amdgpu is loaded."""
    return bool(bound_addresses(find_roots(settings).sys, DRIVER))


def read_facts(settings: Settings) -> HostFacts:
    """Return the facts of the host for plans; raises HostError without amdgpu."""
    roots = find_roots(settings)
    facts = read_driven(roots)
    version = (read_or_skip(f"{roots.sys}/module/{DRIVER}/version") or "").strip()  # of AMD's own package only
    return describe_host(facts)._replace(
        driver_root=roots.driver or "/", simulated=roots.stand_in, driver_version=version
    )


def read_driven(roots: Roots) -> AmdFacts:
    """Return the GPUs that amdgpu drives; raises HostError for none."""
    facts = read_amd_facts(roots, all_functions=False)
    if not facts.gpus:
        raise HostError("OCIGPU-HOST-1", "amdgpu drives no PCI device", "Load the driver: modprobe amdgpu")
    return facts


def describe_host(facts: AmdFacts) -> HostFacts:
    """Return the facts in the form that plans are made of.

    A GPU's ``uuid`` is that of :func:`gpu_name`; ``node`` its render node, ``minor`` that
    node's.  ``proc_name`` is empty: nothing of procfs shows it.
    """
    gpus = []
    for index, gpu in enumerate(facts.gpus):
        render = next((node for node in gpu.nodes if node.container_path.startswith("/dev/dri/renderD")), None)
        others = tuple(node for node in gpu.nodes if node is not render)
        name = gpu_name(gpu, facts.gpus)
        error = "" if gpu.nodes else "it has no nodes below /dev/dri"
        minor = render.minor if render else -1
        gpus.append(
            Gpu(index, minor, name, normal_bus_id(gpu.address), gpu.product, node=render, drm_nodes=others, error=error)
        )
    control = (facts.kfd,) if facts.kfd else ()
    return HostFacts(vendor="amd", source="sysfs", gpus=tuple(gpus), control_nodes=control, notes=facts.notes)


def nodes_of(gpu: Gpu) -> tuple[DeviceNode, ...]:
    """Return the nodes of a GPU: card and render node."""
    return (*gpu.drm_nodes, gpu.node) if gpu.node else gpu.drm_nodes


def read_topology(sys: str, notes: "list[str] | None" = None) -> dict[int, KfdNode]:
    """Return the GPUs and partitions of KFD's topology by the minor of their render node; CPUs are not in it."""
    found: dict[int, KfdNode] = {}
    for values in read_properties(sys, notes).values():
        if node := find_node(values):
            found.setdefault(node.render_minor, node)
    return found


def read_properties(sys: str, notes: "list[str] | None" = None) -> dict[str, dict[str, int]]:
    """Return the properties of the nodes in KFD's topology, CPUs too, by the names of their directories.

    KFD refuses to show a GPU to a process whose device cgroup does not have it: such a node has none, and a note.
    """
    names = list_names(f"{sys}/{TOPOLOGY}")[:MAX_TOPOLOGY]
    paths = {name: f"{sys}/{TOPOLOGY}/{name}/properties" for name in names}
    return {name: parse_numbers(read_or_skip(path, notes=notes) or "") for name, path in paths.items()}


def find_node(values: dict[str, int]) -> KfdNode | None:
    """Return the node of a topology file's numbers; None for a CPU or without a render node."""
    minor = values.get("drm_render_minor", 0)
    if not values.get("simd_count") or not minor:
        return None
    return KfdNode(minor, values.get("unique_id", 0), values.get("domain", 0), values.get("location_id", 0))


def parse_numbers(text: str) -> dict[str, int]:
    """Return the numbers in a topology file, lines of "name number"."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if len(number) <= 20 and number.isascii() and number.isdigit():
            values.setdefault(name, int(number))
    return values


def render_minor(entries: tuple[tuple[str, int, int], ...]) -> int:
    """Return the minor of the render node among (name, major, minor) entries, -1 without one."""
    return next((minor for name, _, minor in entries if name.startswith("renderD")), -1)


_Member = tuple[KfdNode, tuple[tuple[str, int, int], ...]]


def _read_unique_id(directory: str, notes: list[str]) -> int:
    """Return the unique id in a GPU's directory (driver-misc.rst: 16 hexadecimal digits), 0 for none."""
    text = (read_or_skip(f"{directory}/unique_id", 64, notes) or "").strip()
    try:
        return int(text, 16) if 0 < len(text) <= 16 and text.isalnum() else 0
    except ValueError:
        return 0


def _read_partitions(sys: str, topology: dict[int, KfdNode], notes: list[str]) -> dict[tuple[int, int], list[_Member]]:
    """Return the partitions in use that have a platform device, by the PCI slot of their GPU, in order of minors."""
    found: dict[tuple[int, int], list[_Member]] = {}
    names = [name for name in list_names(f"{sys}/devices/platform") if name.startswith("amdgpu_xcp")]
    for name in names[:MAX_PLATFORM]:
        entries = read_drm_directory(f"{sys}/devices/platform/{name}/drm", notes)
        node = topology.get(render_minor(entries))
        if node is not None:
            found.setdefault((node.domain, node.location >> 3), []).append((node, entries))
    for members in found.values():
        members.sort(key=lambda member: member[0].render_minor)
    return found


def _slot_of(address: str) -> tuple[int, int]:
    """Return (domain, bus << 5 | device) of a PCI address: KFD's location without the function."""
    bus_id = normal_bus_id(address)
    if not bus_id:
        return -1, -1
    return int(bus_id[:8], 16), int(bus_id[9:11], 16) << 5 | int(bus_id[12:14], 16)


def _read_kfd(sys: str, reader: NodeReader, notes: list[str]) -> DeviceNode | None:
    try:
        number = read_number(f"{sys}/class/kfd/kfd/dev")
    except HostError as error:
        notes.append(error.message)
        number = None
    return reader.read("/dev/kfd", *number) if number else reader.read_existing("/dev/kfd")


def read_amd_fingerprint(settings: Settings) -> "Fingerprint":
    """Return pairs that change when GPUs, their partitions, or their nodes change."""
    roots = find_roots(settings)
    facts = read_amd_facts(roots, all_functions=False)
    nodes = [node for gpu in facts.gpus for node in gpu.nodes] + ([facts.kfd] if facts.kfd else [])
    return (
        ("gpus", digest(f"{gpu.address} {gpu.partition} {gpu.compute}" for gpu in facts.gpus)),
        ("uuids", digest(f"{gpu.unique_id:x}" for gpu in facts.gpus)),
        ("nodes", digest(f"{node.container_path} {node[1:]}" for node in nodes)),
    )


def gpu_name(gpu: AmdGpu, gpus: tuple[AmdGpu, ...]) -> str:
    """Return a name that no other GPU has: the unique id, or without one the PCI address, and a partition's number."""
    own = f":{gpu.partition}" if gpu.partition >= 0 else ""
    return unique_name(gpu, gpus) or f"{gpu.address}{own}"


def unique_name(gpu: AmdGpu, gpus: tuple[AmdGpu, ...]) -> str:
    """Return the GPU's unique id as a name, "" without one; no two GPUs get the same."""
    if not gpu.unique_id:
        return ""
    name = f"0x{gpu.unique_id:x}"
    sharing = [other for other in gpus if other.unique_id == gpu.unique_id]
    if len(sharing) == 1:
        return name
    # partitions of one GPU; boards whose unique ids are equal are told apart by nothing but their address
    return f"{name}:{gpu.partition}" if len({other.address for other in sharing}) == 1 else ""
