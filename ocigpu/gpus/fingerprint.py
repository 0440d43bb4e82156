"""What a specification or cached facts depend on, read in about a millisecond: a :data:`Fingerprint`.

Small files of procfs and sysfs and directory listings only: no NVML, no library search, nothing is opened that would
wake a GPU.  The boot id is not part of it: what was true before a reboot is true after it when nothing else changed.
"""

from binascii import crc32

from ocigpu.core.errors import quoted
from ocigpu.core.vendors import VENDORS
from ocigpu.gpus.tree import settings_digest
from ocigpu.gpus.vendors import load_vendor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from ocigpu.core.settings import Settings
    from ocigpu.gpus.vendors import Fingerprint

ANNOTATION = "ocigpu/fingerprint"
"""Annotation of a specification that holds the text of the fingerprint it was made from."""

_TEXT_LIMIT = 4096
_PLURALS = {"gpus": "the set of GPUs has", "mig": "MIG devices have", "imex": "IMEX channels have"}
_SENTENCES = {
    "uuids": "GPUs have been replaced: their UUIDs differ",
    "nodes": "device numbers or nodes have changed",
    "groups": "IOMMU groups have changed",
    "settings": "settings have changed (driver root, device root, loader cache or simulated host)",
}


def digest(lines: "Iterable[str]") -> str:
    """Return how many lines there are and a checksum of them, "8-1a2b3c4d"; "" when there is none."""
    items = list(lines)
    return f"{len(items)}-{crc32(chr(10).join(items).encode('utf-8', 'surrogateescape')):08x}" if items else ""


def fingerprint_text(fingerprint: "Fingerprint") -> str:
    """Return the pairs as text, "source=nvidia driver=550.163.01 gpus=8-1a2b3c4d ... settings=5e6f7a8b"."""
    return " ".join(f"{key}={value}" for key, value in fingerprint)


def parse_fingerprint(text: str) -> "Fingerprint":
    """Return the pairs of a fingerprint's text; () when it is not one."""
    pairs: dict[str, str] = {}
    for word in text.split(" ") if len(text) <= _TEXT_LIMIT else ():
        key, equals, value = word.partition("=")
        if not (equals and key.isascii() and key.isprintable() and value.isprintable()) or key in pairs:
            return ()
        pairs[key] = value
    return tuple(pairs.items()) if next(iter(pairs), "") == "source" else ()


def explain_changes(old: "Fingerprint", new: "Fingerprint") -> tuple[str, ...]:
    """Return a sentence for each key that both have with different values; () when nothing has changed.

    A key in only one of them comes from another version of this program and says nothing about the host.
    """
    values = dict(new)
    changed = {key: value for key, value in old if key in values and values[key] != value}
    if "" in (changed.get("uuids"), values.get("uuids")) or "gpus" in changed:
        changed.pop("uuids", None)  # unknown is not a change, and a different set of GPUs has different UUIDs
    return tuple(_explain(key, value, values[key]) for key, value in changed.items())


def _explain(key: str, old: str, new: str) -> str:
    if key == "driver":
        if not old:
            return f"the driver was not loaded and is {new}"
        return f"the driver was {old} and is {new or 'not loaded'}"
    if key in _PLURALS:
        return f"{_PLURALS[key]} changed: {_count(old)} then, {_count(new)} now"
    return _SENTENCES.get(key, f"{key} has changed")


def _count(value: str) -> str:
    return value.partition("-")[0] or "none"


def read_fingerprint(source: str, settings: "Settings") -> "Fingerprint":
    """Return (key, value) pairs that change when the facts of this source of devices may have changed.

    The first pair is ("source", source), the last one stands for the settings.  Values are "" if nothing exists (an
    absent driver is not an error) and never contain white space.  An unknown source has only these two pairs.  Raises
    HostError (OCIGPU-HOST-3) if a file of the driver exists but cannot be read.
    """
    pairs = load_vendor(source).read_fingerprint(settings) if source in VENDORS else ()
    return (("source", source), *pairs, ("settings", settings_digest(settings)))


def stale_reasons(annotations: "Mapping[str, Any]", settings: "Settings") -> tuple[str, ...]:
    """Return why a specification with these annotations no longer fits the host; () when it does.

    A specification without our annotation is not ours: ().  For one made with other settings, only that is reported,
    because its other differences have another source.  Raises HostError as :func:`read_fingerprint` does.
    """
    text = annotations.get(ANNOTATION)
    if text is None:
        return ()
    old = parse_fingerprint(text) if isinstance(text, str) else ()
    if not old:
        return (f"its annotation {ANNOTATION} cannot be understood: {quoted(str(text))}",)
    source = old[0][1]
    if source not in VENDORS:
        return (f"its devices come from an unknown source: {quoted(source)}",)
    changes = explain_changes(old, read_fingerprint(source, settings))
    return (_SENTENCES["settings"],) if _SENTENCES["settings"] in changes else changes
