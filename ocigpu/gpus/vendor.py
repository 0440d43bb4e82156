"""What a vendor's folder is to the rest: a record of functions, each loaded when it is called."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NamedTuple

    from ocigpu.core.actions import Plan
    from ocigpu.core.facts import HostFacts, ImageFacts
    from ocigpu.core.settings import Settings
    from ocigpu.gpus.nvidia.selection import Selection
    from ocigpu.gpus.offer import DeviceOffer, GenerateOptions
    from ocigpu.gpus.request import Request

    Fingerprint = tuple[tuple[str, str], ...]
else:
    from ocigpu.core.record import NamedTuple


def late(name: str) -> "Callable[..., Any]":
    """Return a function that loads the one of this name, MODULE:FUNCTION below ocigpu.gpus, and calls it."""

    def call(*arguments: "Any", **named: "Any") -> "Any":
        module, _, function = name.partition(":")
        return getattr(__import__(f"ocigpu.gpus.{module}", None, None, (function,)), function)(*arguments, **named)

    return call


def _missing(*_: "Any") -> "Any":
    raise NotImplementedError


def _never(_: "Settings") -> bool:
    return False


class Simulated(NamedTuple):
    """What a driver shows of simulated GPUs, by path below the host; nodes are (path, major, minor, mode).

    ``groups``: of nodes that are not of root's group.
    """

    files: "dict[str, str]"
    links: "dict[str, str]"
    nodes: "tuple[tuple[str, int, int, int], ...]"
    gpus: "tuple[dict[str, Any], ...]"
    groups: "dict[str, int]"


class Trouble(NamedTuple):
    """What keeps containers from a vendor's GPUs: "error" or "warning", in words; what was seen where, and the fix."""

    severity: str
    text: str
    place: str
    seen: str
    wanted: str
    fix: str


class Vendor(NamedTuple):
    """A source of devices; the functions after ``is_here`` only where containers can ask for them by a variable.

    ``name``: in fingerprints and drafts.  ``kinds``: vendors of CDI kinds that are its own.  ``modes``: of ``ocigpu cdi
    generate``.  ``offer``: what specifications get.  ``is_here``: whether the host is of this platform and no other.
    ``has_driver``: whether the vendor's driver is loaded.  ``read_facts``: perhaps of an earlier start; ``read_now``:
    as the host is.  ``request_devices``: what a container asks for, but for the devices.  ``simulate``: for sim;
    ``check``: for the doctor.
    """

    name: str
    modes: tuple[str, ...]
    read_fingerprint: "Callable[[Settings], Fingerprint]"
    offer: "Callable[[GenerateOptions, Settings], DeviceOffer]"
    kinds: tuple[str, ...] = ()
    is_here: "Callable[[Settings], bool]" = _never
    has_driver: "Callable[[Settings], bool]" = _never
    parse_request: "Callable[[dict[str, Any], Settings, str], Request]" = _missing
    request_devices: "Callable[[dict[str, Any], Sequence[str], Settings], Request]" = _missing
    select_devices: "Callable[[Request, HostFacts], Selection]" = _missing
    read_facts: "Callable[[Settings], HostFacts]" = _missing
    read_now: "Callable[[Settings], HostFacts]" = _missing
    make_plan: "Callable[[HostFacts, Request, Settings, ImageFacts | None, str], Plan]" = _missing
    simulate: "Callable[[int, int, int, int], Simulated]" = _missing
    check: "Callable[[Settings], tuple[Trouble, ...]]" = _missing
