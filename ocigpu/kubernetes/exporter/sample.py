"""What a sample of all GPUs holds; its parser trusts nothing, because closed code shares the process it comes from."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ocigpu.core.errors import printable

MAX_TEXT = 200
Values = Mapping[str, float]


class Instance(NamedTuple):
    """A GPU instance.

    ``uuids``: of its MIG devices; ``xid``: the last one, 0 for none yet, None for unknown; ``start``: number of its
    first memory slice, -1 where NVML does not tell.
    """

    number: int
    uuids: tuple[str, ...]
    profile: str
    values: Values
    xid: int | None = None
    xids: "Mapping[int, int]" = {}
    start: int = -1


class GpuSample(NamedTuple):
    """A GPU.

    ``error``: why it could not be read; ``processes``: (pid, MiB, percent of GPU time); ``minor``: number of its device
    node, -1 for unknown.
    """

    number: int
    uuid: str = ""
    bus_id: str = ""
    name: str = ""
    error: str = ""
    labels: "Mapping[str, str]" = {}
    values: Values = {}
    xid: int | None = None
    xids: "Mapping[int, int]" = {}
    clocks: "Mapping[str, int]" = {}
    instances: tuple[Instance, ...] = ()
    processes: tuple[tuple[int, int, int], ...] = ()
    minor: int = -1


class Sample(NamedTuple):
    """All GPUs at one time.  ``seconds``: how long it took; ``error``: why there is none.

    ``listed``: bus ids of the GPUs that the kernel's driver has, as it writes them.
    """

    gpus: tuple[GpuSample, ...] = ()
    labels: "Mapping[str, str]" = {}
    seconds: float = 0.0
    error: str = ""
    listed: tuple[str, ...] = ()


def parse_sample(data: Any) -> Sample:
    """Return the sample in a document; raises ValueError, TypeError, KeyError or AttributeError for anything else."""
    if "error" in data:
        return Sample(error=_text(data["error"]))
    return Sample(
        tuple(map(_gpu, data["gpus"])),
        _texts(data["labels"]),
        float(data["seconds"]),
        listed=tuple(map(_text, data["listed"])),
    )


def _gpu(item: Any) -> GpuSample:
    gpu = GpuSample(
        int(item["index"]),
        _text(item.get("uuid", "")),
        _text(item.get("bus_id", "")),
        _text(item.get("name", "")),
        _text(item.get("error", "")),
    )
    if gpu.error:
        return gpu
    return gpu._replace(
        labels=_texts(item["labels"]),
        values=_values(item["values"]),
        xid=_number(item["xid"]),
        xids=_counts(item["xids"]),
        clocks={_text(name): int(count) for name, count in item.get("clocks", {}).items()},
        instances=tuple(map(_instance, item["migs"])),
        processes=tuple((int(pid), int(memory), int(share)) for pid, memory, share in item.get("processes", ())),
        minor=int(item["minor"]),
    )


def _instance(item: Any) -> Instance:
    return Instance(
        int(item["gi"]),
        tuple(map(_text, item["uuids"])),
        _text(item["profile"]),
        _values(item["values"]),
        _number(item["xid"]),
        _counts(item["xids"]),
        int(item["start"]),
    )


def _text(value: Any) -> str:
    return printable(str(value), MAX_TEXT)


def _texts(items: Any) -> dict[str, str]:
    return {str(name): _text(text) for name, text in items.items()}


def _number(value: Any) -> int | None:
    return None if value is None else int(value)


def _counts(items: Any) -> dict[int, int]:
    return {int(number): int(count) for number, count in items.items()}


def _values(items: Any) -> dict[str, float]:
    return {
        str(name): value for name, value in items.items() if isinstance(value, (int, float)) and math.isfinite(value)
    }
