"""Which partitions of the NVLink fabric a GPU is in, as attributes with the names of NVIDIA's driver.

A claim for four GPUs that form a partition requests four with the same ``partition4`` (matchAttribute).  The manager
assigns the number.  Source: attributes of gpu.nvidia.com 0.5 with FabricManagerPartitioning.
"""

from collections.abc import Iterable, Mapping

from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.fabric.partitions import Partition
from ocigpu.gpus.nvidia.firmware import read_driver_firmware
from ocigpu.gpus.tree import find_roots, normal_bus_id
from ocigpu.gpus.vfio.identity import ModuleReading, read_module_ids

SIZES = (1, 2, 4, 8)
PartitionReading = tuple[dict[str, dict[str, int]], tuple[str, ...]]
"""Attributes by address, and what cannot be said."""
MODULE_ID, PARTITION = "gpuModuleID", "partition"


def partition_attributes(partitions: Iterable[Partition], modules: Mapping[str, int]) -> PartitionReading:
    """Return the attributes of each GPU by its address, and what is unknown; ``modules``: by address.  Pure.

    A GPU in several partitions of one size lacks the attribute, because a claim could not choose one of them by it.
    """
    found: dict[str, dict[str, int]] = {}
    problems = []
    listed = tuple(partitions)
    for address, module in modules.items():
        attributes = {MODULE_ID: module}
        for size in SIZES:
            own = [one.partition_id for one in listed if len(one.physical_ids) == size and module in one.physical_ids]
            if len(own) == 1:
                attributes[f"{PARTITION}{size}"] = own[0]
            elif own:
                numbers = ", ".join(map(str, sorted(own)))
                problems.append(f"GPU {address} is in several partitions of {size} GPUs: {numbers}")
        found[normal_bus_id(address)] = attributes
    return found, tuple(problems)


def read_partitions(manager: str, facts: HostFacts, settings: Settings) -> PartitionReading:
    """Return the attributes as the fabric manager at an address lists its partitions.

    The module numbers come from NVML for GPUs of its driver, and from registers for those of VFIO.  Raises HostError
    (FabricError, OCIGPU-VFIO-7, OCIGPU-FW-1).
    """
    from ocigpu.kubernetes.fabric.client import open_fabric  # needs more modules than other nodes have

    listed = open_fabric(manager, simulation=settings.simulation_root).list_partitions()
    said = read_driver_firmware(facts) if facts.gpus else {}
    driver = [ModuleReading("driver", bdf, one.slot, one.serial) for bdf, one in said.items() if one.slot > 0]
    return partition_attributes(listed, read_module_ids(find_roots(settings), driver=driver))
