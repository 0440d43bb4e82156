"""Every source of devices: its folder, and what its specifications and cached facts depend on."""

from ocigpu.core.errors import quoted
from ocigpu.core.settings import Settings
from ocigpu.gpus.fingerprint import _SENTENCES, ANNOTATION, explain_changes, parse_fingerprint
from ocigpu.gpus.tree import settings_digest

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ocigpu.gpus.fingerprint import Fingerprint
    from ocigpu.gpus.vendor import Vendor

VENDORS = {
    "nvidia": "nvidia",
    "amd": "amd",
    "vfio": "vfio",
    "csv": "tegra",
    "wsl": "wsl",
}
"""The folder of each source of devices."""


def load_vendor(name: str) -> "Vendor":
    """Return a source of devices by its name; raises KeyError for one that there is not."""
    vendor: Vendor = __import__(f"ocigpu.gpus.{VENDORS[name]}", None, None, ("VENDOR",)).VENDOR
    return vendor


def all_vendors() -> "list[Vendor]":
    """Return every source of devices."""
    return [load_vendor(name) for name in VENDORS]


def find_mode(mode: str, kind_vendor: str, settings: Settings) -> "tuple[str, Vendor]":
    """Return the mode of a specification, with its source: "auto" is what suits this host's platform.

    ``kind_vendor``: vendor part of the kind that was asked for; that of another vendor's devices decides.
    """
    vendors = all_vendors()
    for vendor in vendors:
        if kind_vendor.lower() in vendor.kinds:
            return vendor.modes[0], vendor
    if mode == "auto":
        mode = next((vendor.modes[0] for vendor in reversed(vendors) if vendor.is_here(settings)), "nvml")
    return mode, next(vendor for vendor in vendors if mode in vendor.modes)


def read_fingerprint(source: str, settings: Settings) -> "Fingerprint":
    """Return (key, value) pairs that change when what this source of devices tells may have changed.

    The first pair is ("source", source), the last one stands for the settings.  Values are "" where there is nothing
    (an absent driver is no error) and never hold white space.  A source that there is not has these two pairs only.
    Raises HostError (OCIGPU-HOST-3) when a file of the driver is there and cannot be read.
    """
    pairs = load_vendor(source).read_fingerprint(settings) if source in VENDORS else ()
    return (("source", source), *pairs, ("settings", settings_digest(settings)))


def stale_reasons(annotations: "Mapping[str, Any]", settings: Settings) -> tuple[str, ...]:
    """Return why a specification with these annotations no longer fits the host; () when it does.

    One without our annotation is not ours: ().  One that was made with other settings is only said to be that: what
    else differs was read from somewhere else.  Raises HostError as :func:`read_fingerprint` does.
    """
    text = annotations.get(ANNOTATION)
    if text is None:
        return ()
    old = parse_fingerprint(text) if isinstance(text, str) else ()
    if not old:
        return (f"its annotation {ANNOTATION} cannot be understood: {quoted(str(text))}",)
    source = old[0][1]
    if source not in VENDORS:
        return (f"its devices are of a source that this version does not know: {quoted(source)}",)
    changes = explain_changes(old, read_fingerprint(source, settings))
    return (_SENTENCES["settings"],) if _SENTENCES["settings"] in changes else changes
