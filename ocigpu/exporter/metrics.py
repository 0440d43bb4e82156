"""The metrics: names, types and help of dcgm-exporter, and NVML's function behind each, from the tables beside this."""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from ocigpu.core.errors import find_near

_HERE = Path(__file__).parent


class Metric(NamedTuple):
    """One metric.  ``kind``: gauge, counter or label (a label of every series); ``source``: NVML's function.

    ``default``: whether it is exported without a collectors file.  ``gpm``: GPM's number and the factor to our unit.
    """

    name: str
    kind: str
    help: str
    source: str
    default: bool = True
    gpm: tuple[int, float] | None = None


def _lines(name: str) -> list[str]:
    """Return the lines of a table without comments."""
    lines = (_HERE / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


_TABLES = tomllib.loads((_HERE / "metrics.toml").read_text(encoding="utf-8"))
METRICS = tuple(Metric(**row) for row in _TABLES["metrics"])
"""Every metric, in the order in which they are exported."""
BY_NAME = {metric.name: metric for metric in METRICS}
GPM_METRICS = {metric.name: metric.gpm for metric in METRICS if metric.gpm}
CLOCK_EVENTS: dict[str, int] = _TABLES["clock_events"]
"""Bits of the clock event reasons by name."""
NOT_FROM_NVML: list[tuple[str, str]] = _TABLES["not_from_nvml"]
"""Beginnings of DCGM's names, and why metrics of them that are not in the table are left out; the first one counts."""
DCGM_NAMES = tuple(_lines("dcgm-fields.txt"))
XID_MESSAGES = {int(number): text for number, text in (line.split(" ", 1) for line in _lines("xids.txt"))}
"""By number, from 0."""

OLD_NAMES: dict[str, str] = {
    **{
        f"dcgm_{metric.name.removeprefix('DCGM_FI_DEV_').removeprefix('DCGM_').lower()}": metric.name
        for metric in METRICS
    },
    **_TABLES["old_names"],
}
"""Metrics by what dcgm-exporter 1.x called them."""

XID, XID_COUNT, XID_TOTAL = "DCGM_FI_DEV_XID_ERRORS", "DCGM_EXP_XID_ERRORS_COUNT", "DCGM_EXP_XID_ERRORS_TOTAL"
CLOCK_COUNT = "DCGM_EXP_CLOCK_EVENTS_COUNT"
DRIVER_VERSION, NVML_VERSION = "DCGM_FI_DRIVER_VERSION", "DCGM_FI_NVML_VERSION"


def why_missing(name: str) -> str:
    """Return why a metric of DCGM is left out; "" for a name outside DCGM.

    Each release of dcgm-exporter adds its own metrics (DCGM_EXP), so a file that names one is not wrong.
    """
    if name not in DCGM_NAMES:
        near = find_near(name, [*BY_NAME, *DCGM_NAMES], likeness=0.95)
        return "this exporter does not support it" if re.fullmatch("DCGM_EXP_[A-Z0-9_]+", name) and not near else ""
    return next(why for prefix, why in NOT_FROM_NVML if name.startswith(prefix))
