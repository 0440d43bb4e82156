"""``ocigpu fabric``: which GPUs are connected by NVLink, by way of Fabric Manager."""

from typing import Any, NamedTuple

from ocigpu.cli import show
from ocigpu.cli.arguments import takes
from ocigpu.cli.common import load_settings
from ocigpu.gpus.nvidia.fabric.libnvfm import DEFAULT_ADDRESS, open_fabric
from ocigpu.gpus.nvidia.fabric.partitions import Partition, RestorableFabric, show_ids

COLUMNS = ("PARTITION ID", "STATUS", "GPUs", "NVLINKS", "GPU PHYSICAL IDs")


class Reach(NamedTuple):
    """Where the manager is, as the options that the commands share say."""

    fabric: RestorableFabric
    json: bool


def reach(address: str = DEFAULT_ADDRESS, library: str = "", config: str = "", json: bool = False) -> Reach:
    return Reach(open_fabric(address, library, load_settings(config).simulation_root), json)


@takes(reach)
def list_command(at: Reach) -> None:
    partitions = at.fabric.list_partitions()
    if at.json:
        show.data({"partitions": [_to_json(one) for one in partitions]})
        return
    _print_table(partitions)


def _print_table(partitions: tuple[Partition, ...]) -> None:
    rows = [COLUMNS, tuple("-" * len(name) for name in COLUMNS)]
    for one in partitions:
        status = "Active" if one.is_active else "Inactive"
        count = len(one.physical_ids)
        rows.append((str(one.partition_id), status, str(count), str(one.links), show_ids(one.physical_ids)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _to_json(one: Partition) -> dict[str, Any]:
    return {
        "partition-id": one.partition_id,
        "active": one.is_active,
        "physical-ids": list(one.physical_ids),
        "nvlinks": one.links,
        "nvlinks-by-gpu": [{"available": now, "most": most} for now, most in one.nvlinks],
    }
