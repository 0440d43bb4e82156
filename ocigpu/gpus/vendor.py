"""What a vendor's folder is to the rest: a record of functions, each loaded when it is called."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NamedTuple

    from ocigpu.core.settings import Settings
    from ocigpu.gpus.fingerprint import Fingerprint
    from ocigpu.gpus.offer import DeviceOffer, GenerateOptions
else:
    from ocigpu.core.record import NamedTuple


def late(name: str) -> "Callable[..., Any]":
    """Return a function that loads the one of this name, MODULE:FUNCTION below ocigpu.gpus, and calls it."""

    def call(*arguments: "Any", **named: "Any") -> "Any":
        module, _, function = name.partition(":")
        return getattr(__import__(f"ocigpu.gpus.{module}", None, None, (function,)), function)(*arguments, **named)

    return call


class Vendor(NamedTuple):
    """A source of devices.

    ``name``: in fingerprints and drafts.  ``kinds``: vendors of CDI kinds that are its own.  ``modes``: of ``ocigpu cdi
    generate``.  ``offer``: what specifications get.  ``is_here``: whether the host is of this platform and no other.
    """

    name: str
    modes: tuple[str, ...]
    read_fingerprint: "Callable[[Settings], Fingerprint]"
    offer: "Callable[[GenerateOptions, Settings], DeviceOffer]"
    kinds: tuple[str, ...] = ()
    is_here: "Callable[[Settings], bool]" = lambda _: False
