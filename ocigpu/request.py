"""What a container asks for, read from its OCI configuration: pure, no host access."""

from ocigpu.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NamedTuple
else:
    from ocigpu.record import NamedTuple


class Request(NamedTuple):
    """What one container asks for.

    ``selection``: "nothing" (unset, empty, void: not a GPU container), "none" (driver files and control nodes, no
    GPU), "all", or "list"; ``devices``: for "list" the tokens in order, stripped, without duplicates.
    ``source``: where the selection comes from, for reasons and messages ("NVIDIA_VISIBLE_DEVICES=0,2",
    "volume mounts below /var/run/nvidia-container-devices").
    ``capabilities``: driver capabilities, sorted.  ``requirements``: (variable, expression) pairs, sorted.
    ``mig_config``/``mig_monitor``: "" or "all".  ``imex_channels``: sorted channel ids.
    ``features``: opt-in parts, of "gds", "mofed", "gdrcopy", "nvswitch", in that order.
    ``notes``: warnings, a sentence each ("request of an unprivileged container ignored ...").
    """

    selection: str = "nothing"
    devices: tuple[str, ...] = ()
    source: str = ""
    capabilities: tuple[str, ...] = ()
    requirements: tuple[tuple[str, str], ...] = ()
    mig_config: str = ""
    mig_monitor: str = ""
    imex_channels: tuple[int, ...] = ()
    features: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def parse_request(config: "dict[str, Any]", settings: Settings) -> Request:
    """Return what the container of this config.json (a raw document) asks for."""
    raise AssertionError
