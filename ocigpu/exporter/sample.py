"""What a sample of all GPUs holds; its parser trusts nothing, because closed code shares the process it comes from."""

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, PlainValidator, StringConstraints, TypeAdapter

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
Name = Annotated[str, StringConstraints(pattern=r"\A[a-z_][a-z0-9_]{0,99}\z")]
"""Of a metric or label that the vendor's folder names."""


class Instance(NamedTuple):
    """A GPU instance.

    ``uuids``: of its MIG devices; ``xid``: the last one, 0 for none yet, None for unknown; ``start``: number of its
    first memory slice, -1 if NVML does not report it; ``xids``: the number in the window, ``xid_totals``: since the
    start; ``processes``: as of a GPU, without their time, which NVML does not tell.
    """

    number: int
    uuids: tuple[Text, ...]
    profile: Text
    values: Numbers
    xid: int | None = None
    xids: "Mapping[int, int]" = {}
    start: int = -1
    xid_totals: "Mapping[int, int]" = {}
    processes: tuple[tuple[int, int, int], ...] = ()


class GpuSample(NamedTuple):
    """A GPU.

    ``error``: why it could not be read; ``processes``: (pid, MiB, percent of GPU time); ``minor``: number of its device
    node, -1 for unknown.  ``names``: if a vendor's labels are not dcgm-exporter's, the labels of its series in order;
    ``ids``: further names of such a GPU in device plugins and drivers of claims.
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
    names: "Mapping[Name, Text]" = {}
    ids: tuple[Text, ...] = ()


class OwnMetric(NamedTuple):
    """A metric of a vendor's own, which is not in the table of dcgm-exporter's."""

    name: Name
    kind: Literal["gauge", "counter"]
    help: Text


class Sample(NamedTuple):
    """All GPUs at one time.  ``seconds``: how long it took; ``error``: why it failed.

    ``listed``: bus ids of the kernel driver's GPUs, in its spelling.  ``metrics``: those that the vendor's folder
    describes.
    """

    gpus: tuple[GpuSample, ...] = ()
    labels: "Mapping[str, Text]" = {}
    seconds: float = 0.0
    error: str = ""
    listed: tuple[Text, ...] = ()
    metrics: tuple[OwnMetric, ...] = ()


_SAMPLE = TypeAdapter(Sample)


def parse_sample(data: Any) -> Sample:
    """Return the sample in a document; raises ValueError, TypeError, KeyError or AttributeError for anything else."""
    if "error" in data:
        return Sample(error=_text(data["error"]))
    known = {name: data[name] for name in ("gpus", "labels", "seconds", "listed")}
    return _SAMPLE.validate_python({**known, "metrics": data.get("metrics", ())})


def join_samples(samples: Iterable[Sample]) -> Sample:
    """Return the last samples of several vendors' GPUs as one, without the fields of single vendors."""
    each = tuple(samples)
    return Sample(
        tuple(gpu for sample in each for gpu in sample.gpus),
        {name: text for sample in each for name, text in sample.labels.items()},
        metrics=tuple(dict.fromkeys(metric for sample in each for metric in sample.metrics)),
    )
