"""What a driver says of itself, in a file beside its claims, for ``ocigpu doctor --claims``."""

import json
from typing import NamedTuple

from ocigpu.system.files import replace_path

FILE = "status.json"


class DriverStatus(NamedTuple):
    """``registered``: whether the kubelet took it, None while it has not said; ``refusal``: why it did not.

    ``missing``: features of the API without which it publishes, names of
    :class:`~ocigpu.kubernetes.dra.slices.ApiFeatures`.
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
    """Return what a file says, unknown fields left out; raises ValueError, TypeError or KeyError for another file."""
    data = json.loads(text)
    more = {name: data[name] for name in ("registered", "refusal") if name in data}
    return DriverStatus(
        str(data["driver"]), str(data["node"]), **more, missing=tuple(map(str, data.get("missing", ())))
    )
