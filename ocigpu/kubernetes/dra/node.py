"""A node's devices for claims, read by a separate single-threaded process; see :mod:`ocigpu.kubernetes.node.reader`.

No driver is required: the node may have GPUs for virtual machines, or be empty.  So claims of an earlier boot can be
given back on any node.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.core.vendors import FIRST
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.hardware import NOT_OFFERED, read_hardware
from ocigpu.gpus.nvidia.mig import read_layouts
from ocigpu.gpus.nvidia.mig_layout import GpuLayout
from ocigpu.gpus.nvidia.topology import read_place
from ocigpu.gpus.on_node import Hardware
from ocigpu.gpus.parts import GpuPart
from ocigpu.gpus.pci import read_addressable
from ocigpu.gpus.tree import find_roots, normal_bus_id
from ocigpu.gpus.vendors import find_vendors, load_vendor
from ocigpu.gpus.vfio.facts import VfioFacts, read_vfio_facts
from ocigpu.kubernetes.dra.devices import DraNode
from ocigpu.kubernetes.dra.fabric import PartitionReading, read_partitions
from ocigpu.kubernetes.node.reader import ChildReader, answer_requests
from ocigpu.kubernetes.node.vfio import read_model_names

T = TypeVar("T")


class DraReading(NamedTuple):
    """``node``: None when the host could not be read, for the reason in ``silent``."""

    node: DraNode | None
    silent: str = ""


def read_dra_node(
    settings: Settings,
    vendor: str = FIRST,
    layouts_too: bool = False,
    fabric: str = "",
    known: "dict[str, dict[str, int]] | None" = None,
) -> DraReading:
    """Return the node's devices of a vendor; queries NVML in separate processes, from a single-threaded process.

    ``settings``: those of :func:`~ocigpu.kubernetes.node.reading.host_settings`; ``layouts_too``: also read how whole
    GPUs could be partitioned; ``fabric``: address of the manager of its partitions, ``known``: what was read of them
    before, which counts for the same GPUs.  If NVML does not report GPUs that are present, they are not withdrawn: the
    reading then counts as failed.
    """
    roots = find_roots(settings)
    problems: list[str] = []

    def trying(read: Callable[[], T], instead: T) -> T:
        try:
            return read()
        except HostError as error:
            problems.append(error.message)
            return instead

    source = load_vendor(vendor)
    if read_parts := source.read_parts:
        none: tuple[GpuPart, ...] = ()
        parts = trying(lambda: read_parts(settings), none) if vendor in find_vendors(settings) else none
        places = {bus: read_place(roots.sys, bus) for bus in {normal_bus_id(part.address) for part in parts}}
        return DraReading(DraNode(vendor=vendor, parts=parts, places=places, problems=tuple(problems)))
    facts = trying(lambda: read_host_facts(settings), HostFacts())
    if facts.listed:
        problems.append(NOT_OFFERED)
        facts = HostFacts()
    if problem := source.find_silence(facts):
        return DraReading(None, problem)
    vfio = trying(lambda: read_vfio_facts(roots), VfioFacts())
    hardware = read_hardware(facts) if facts.gpus else Hardware()
    cut = any(gpu.mig_enabled for gpu in facts.gpus)
    layouts: tuple[GpuLayout, ...] = ()
    if cut or (layouts_too and facts.gpus):
        layouts = trying(lambda: read_layouts(facts), layouts)
    addresses = {gpu.bus_id for gpu in facts.gpus}
    addresses |= {normal_bus_id(item.function.address) for item in vfio.candidates}
    places = {address: read_place(roots.sys, address) for address in sorted(addresses)}
    models = read_model_names() if vfio.groups else {}
    machines = {normal_bus_id(item.function.address) for item in vfio.candidates if not item.is_switch}
    partitions = known or {}
    if fabric and set(partitions) != machines:
        nothing: PartitionReading = ({}, ())
        partitions, unclear = trying(lambda: read_partitions(fabric, facts, settings), nothing)
        problems.extend(unclear)
    vms = [item.function.address for item in vfio.candidates if not item.is_switch]
    addressable = {address: read_addressable(roots.sys, address) for address in vms}
    node = DraNode(facts, hardware, layouts, vfio, FIRST, (), places, models, partitions, tuple(problems), addressable)
    return DraReading(node)


def main() -> None:
    """Answer requests, the arguments of read_dra_node, on standard input until it is closed."""

    def read(request: Any) -> DraReading:
        return read_dra_node(*request)

    answer_requests(read, lambda text: DraReading(None, text))


def dra_reader() -> ChildReader[DraReading]:
    """Return what reads the node for the DRA driver."""
    return ChildReader("ocigpu.kubernetes.dra.node", lambda text: DraReading(None, text))
