"""NVIDIA's answers to the programs of a cluster's nodes: see the Vendor record of :mod:`ocigpu.gpus.vendors`."""

import os

from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.hardware import NOT_OFFERED, read_hardware
from ocigpu.gpus.nvidia.libraries import find_libraries, find_nvml, library_versions, native_machine
from ocigpu.gpus.nvidia.nvml_child import DriverPlace
from ocigpu.gpus.nvidia.nvml_process import VERBS, nvml_place
from ocigpu.gpus.nvidia.procfs import read_kernel_version
from ocigpu.gpus.nvidia.topology import numa_nodes, pair_scores, read_places
from ocigpu.gpus.on_node import NodeGpus
from ocigpu.gpus.tegra import is_tegra
from ocigpu.gpus.tegra.facts import find_listed_nvml
from ocigpu.gpus.tree import Tree, find_roots

SAMPLER = "ocigpu.exporter.sampler_child"
"""By its name: the exporter is on a floor above."""


def read_node(settings: Settings) -> NodeGpus:
    """Return the GPUs of the driver; queries NVML in separate processes, from a process with one thread.

    Raises HostError without a driver, and for the GPU of a Jetson.
    """
    facts = read_host_facts(settings)
    if facts.listed:
        raise HostError("OCIGPU-HOST-1", NOT_OFFERED)
    places = read_places(find_roots(settings).sys, facts.gpus)
    hardware = read_hardware(facts)
    return NodeGpus(facts, hardware, numa_nodes(places), pair_scores(places, hardware))


def watch_faults(facts: HostFacts) -> tuple[str, ...]:
    """Return the module that prints XIDs, with its arguments, () without NVML; it ends with this process."""
    place = nvml_place(facts)
    return (VERBS, "watch-events", str(os.getpid()), *place) if place.library else ()


def sample(settings: Settings) -> tuple[str, ...]:
    """Return the module that reads NVML's samples, and its arguments; () without NVML.  It ends with this process."""
    library = find_library(settings)
    if not library:
        return ()
    place = DriverPlace(library, "", settings.simulation_root)
    return (SAMPLER, str(os.getpid()), *place, f"{find_roots(settings).proc}/driver/nvidia/gpus")


def find_library(settings: Settings) -> str:
    """Return the path of the host's NVML library, "" for none.  Only reads files."""
    roots = find_roots(settings)
    tree, machine = Tree(roots.driver), native_machine()
    kernel = read_kernel_version(roots.proc, roots.sys)
    paths, _ = find_libraries(tree, settings.driver_ldcache, kernel, machine)
    versions = library_versions(paths)
    found = find_nvml(paths, kernel or (versions[0] if versions else ""), tree, machine)
    if not found and is_tegra(settings):
        found = find_listed_nvml(tree)
    return tree.host(found) if found else ""
