"""A driver's status, in a file beside its claims, for ``ocigpu doctor --claims``."""

import json
from typing import NamedTuple

from ocigpu.system.files import replace_path

FILE = "status.json"


class DriverStatus(NamedTuple):
    """``registered``: whether the kubelet accepted it, None before its answer; ``refusal``: why not.

    ``missing``: API features that it publishes without, names of :class:`~ocigpu.kubernetes.dra.slices.ApiFeatures`.
    """

    driver: str = ""
    node: str = ""
    registered: bool | None = None
    refusal: str = ""
    missing: tuple[str, ...] = ()


def write_status(directory: str, status: DriverStatus) -> None:
    """Write the file into the driver's directory; raises OSError."""
    replace_path(f"{directory}/{FILE}", json.dumps(status._asdict()).encode() + b"\n", 0o644)


def parse_status(text: str) -> DriverStatus:
    """Return the status in a file, ignoring unknown fields; raises ValueError, TypeError or KeyError."""
    data = json.loads(text)
    more = {name: data[name] for name in ("registered", "refusal") if name in data}
    return DriverStatus(
        str(data["driver"]), str(data["node"]), **more, missing=tuple(map(str, data.get("missing", ())))
    )
