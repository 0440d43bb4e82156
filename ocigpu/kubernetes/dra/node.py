"""What a node has for claims, read by a process of its own with one thread; see :mod:`ocigpu.kubernetes.reader`.

Nothing is needed: without a driver there may be GPUs for virtual machines, and without those there is an empty node,
so that claims of an earlier boot can be given back on any.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.core.vendors import FIRST
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.mig import read_layouts
from ocigpu.gpus.nvidia.mig_layout import GpuLayout
from ocigpu.gpus.tree import find_roots, normal_bus_id
from ocigpu.gpus.vendors import find_vendors, load_vendor
from ocigpu.gpus.vfio.facts import VfioFacts, read_vfio_facts
from ocigpu.kubernetes.dra.devices import DraNode
from ocigpu.kubernetes.hardware import Hardware, read_hardware
from ocigpu.kubernetes.reader import ChildReader, answer_requests
from ocigpu.kubernetes.topology import read_place
from ocigpu.kubernetes.vfio import read_model_names

T = TypeVar("T")


class DraReading(NamedTuple):
    """``node``: None when the host could not be read, for the reason in ``silent``."""

    node: DraNode | None
    silent: str = ""


def read_dra_node(settings: Settings, vendor: str = FIRST) -> DraReading:
    """Return what the node has of a vendor; asks NVML, in processes of their own, from a process with one thread.

    ``settings``: those of :func:`ocigpu.kubernetes.node.host_settings`.  GPUs of which NVML tells nothing now, although
    they are there, are no reason to take them away: then nothing was read.
    """
    roots = find_roots(settings)
    problems: list[str] = []

    def trying(read: Callable[[], T], instead: T) -> T:
        try:
            return read()
        except HostError as error:
            problems.append(error.message)
            return instead

    if vendor != FIRST:
        others = tuple(
            trying(lambda name=name: load_vendor(name).read_now(settings), HostFacts(vendor=name))  # type: ignore[misc]
            for name in find_vendors(settings)
            if name == vendor
        )
        addresses = {gpu.bus_id for facts in others for gpu in facts.gpus}
        places = {address: read_place(roots.sys, address) for address in addresses}
        return DraReading(DraNode(others=others, places=places, problems=tuple(problems)))
    facts = trying(lambda: read_host_facts(settings), HostFacts())
    if facts.source == "procfs" and facts.gpus:
        problem = next((note for note in facts.notes if note.startswith("NVML")), "NVML gave no answer")
        return DraReading(None, problem)
    vfio = trying(lambda: read_vfio_facts(roots), VfioFacts())
    hardware = read_hardware(facts) if facts.gpus else Hardware()
    cut = any(gpu.mig_enabled for gpu in facts.gpus)
    layouts: tuple[GpuLayout, ...] = ()
    if cut:
        layouts = trying(lambda: read_layouts(facts), layouts)
    addresses = {gpu.bus_id for gpu in facts.gpus}
    addresses |= {normal_bus_id(item.function.address) for item in vfio.candidates}
    places = {address: read_place(roots.sys, address) for address in sorted(addresses)}
    models = read_model_names() if vfio.groups else {}
    return DraReading(DraNode(facts, hardware, layouts, vfio, (), places, models, {}, tuple(problems)))


def main(descriptor: str) -> None:
    """Answer requests, (settings, vendor), on a connected socket until the other side closes it."""

    def read(request: Any) -> DraReading:
        settings, vendor = request
        return read_dra_node(settings, vendor)

    answer_requests(descriptor, read, lambda text: DraReading(None, text))


def dra_reader() -> ChildReader[DraReading]:
    """Return what reads the node for the DRA driver."""
    return ChildReader("ocigpu.kubernetes.dra.node", lambda text: DraReading(None, text))
