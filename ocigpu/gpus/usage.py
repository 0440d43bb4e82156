"""What GPUs do at the moment: memory, time and processes, as their drivers count them."""

from typing import Any, NamedTuple

NUMBERS = ("use", "used_mib", "total_mib", "watts", "celsius")


class Usage(NamedTuple):
    """A GPU or MIG device: ``use`` in percent of the time; None is unknown.

    ``processes``: (pid, MiB of memory, percent of the GPU's time), or None if the driver is not queried for them.
    """

    uuid: str
    use: int | None = None
    used_mib: int | None = None
    total_mib: int | None = None
    watts: int | None = None
    celsius: int | None = None
    processes: tuple[tuple[int, int, int], ...] | None = None


def parse_usage(document: Any) -> dict[str, Usage]:
    """Return by UUID what the verb "usage" of :mod:`ocigpu.gpus.nvidia.nvml_verbs` printed.

    Raises ValueError, TypeError or KeyError for another document.
    """
    found = {}
    for item in document:
        processes = tuple((int(pid), int(mib), int(share)) for pid, mib, share in item["processes"])
        use, used, total, watts, celsius = (None if item[name] is None else int(item[name]) for name in NUMBERS)
        found[str(item["uuid"])] = Usage(str(item["uuid"]), use, used, total, watts, celsius, processes)
    return found
