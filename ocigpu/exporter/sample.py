"""What a sample of all GPUs holds; its parser trusts nothing, because closed code shares the process it comes from."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, PlainValidator, TypeAdapter

from ocigpu.core.errors import printable

MAX_TEXT = 200
Values = Mapping[str, float]


def _text(value: Any) -> str:
    return printable(str(value), MAX_TEXT)


def _finite(items: Any) -> dict[str, float]:
    numbers = {str(name): value for name, value in items.items() if isinstance(value, (int, float))}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


Text = Annotated[str, BeforeValidator(_text)]
Numbers = Annotated[Values, PlainValidator(_finite)]


class Instance(NamedTuple):
    """A GPU instance.

    ``uuids``: of its MIG devices; ``xid``: the last one, 0 for none yet, None for unknown; ``start``: number of its
    first memory slice, -1 where NVML does not tell; ``xids``: how many in the window, ``xid_totals``: since the start.
    """

    number: int
    uuids: tuple[Text, ...]
    profile: Text
    values: Numbers
    xid: int | None = None
    xids: "Mapping[int, int]" = {}
    start: int = -1
    xid_totals: "Mapping[int, int]" = {}


class GpuSample(NamedTuple):
    """A GPU.

    ``error``: why it could not be read; ``processes``: (pid, MiB, percent of GPU time); ``minor``: number of its device
    node, -1 for unknown.
    """

    number: int
    uuid: Text = ""
    bus_id: Text = ""
    name: Text = ""
    error: Text = ""
    labels: "Mapping[str, Text]" = {}
    values: Numbers = {}
    xid: int | None = None
    xids: "Mapping[int, int]" = {}
    clocks: "Mapping[Text, int]" = {}
    instances: tuple[Instance, ...] = ()
    processes: tuple[tuple[int, int, int], ...] = ()
    minor: int = -1
    xid_totals: "Mapping[int, int]" = {}


class Sample(NamedTuple):
    """All GPUs at one time.  ``seconds``: how long it took; ``error``: why there is none.

    ``listed``: bus ids of the GPUs that the kernel's driver has, as it writes them.
    """

    gpus: tuple[GpuSample, ...] = ()
    labels: "Mapping[str, Text]" = {}
    seconds: float = 0.0
    error: str = ""
    listed: tuple[Text, ...] = ()


_SAMPLE = TypeAdapter(Sample)


def parse_sample(data: Any) -> Sample:
    """Return the sample in a document; raises ValueError, TypeError, KeyError or AttributeError for anything else."""
    if "error" in data:
        return Sample(error=_text(data["error"]))
    return _SAMPLE.validate_python({name: data[name] for name in ("gpus", "labels", "seconds", "listed")})
