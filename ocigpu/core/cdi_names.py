"""Names of the CDI specification: qualified device names, kinds, annotation keys, and stages of hooks.

If the reference library differs from the text of the specification, the library decides (no limits of length, a colon
in device names).
"""

from ocigpu.core.errors import CdiError, quoted
from ocigpu.core.record import NamedTuple

MAX_ANNOTATION_NAME = 63
MAX_ANNOTATION_PREFIX = 253
HOOK_STAGES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_DIGITS = frozenset("0123456789")
_ALPHANUMERIC = _LETTERS | _DIGITS
_MIDDLE = _ALPHANUMERIC | frozenset("_-.")
_DEVICE_MIDDLE = _MIDDLE | {":"}


class DeviceName(NamedTuple):
    """A fully qualified device: ``kind`` "nvidia.com/gpu" and ``device`` "0"; as text "nvidia.com/gpu=0"."""

    kind: str
    device: str


def check_kind(kind: str) -> str:
    """Return what is wrong with a kind ("vendor/class"), "" if nothing is."""
    vendor, slash, device_class = kind.partition("/")
    if not slash:
        return "a kind is written vendor/class"
    return check_part("vendor", vendor) or check_part("class", device_class)


def check_part(what: str, name: str) -> str:
    """Return what is wrong with the name of a "vendor" or "class", "" if nothing is."""
    if not name:
        return f"the {what} is empty"
    if name[0] not in _LETTERS:
        return f"{what} {quoted(name)} does not start with a letter"
    if name[-1] not in _ALPHANUMERIC:
        return f"{what} {quoted(name)} does not end with a letter or digit"
    return _check_characters(what, name, _MIDDLE)


def check_device(device: str) -> str:
    """Return what is wrong with a device name ("0", "GPU-...", "0:1"), "" if nothing is."""
    if not device:
        return "the device name is empty"
    if device[0] not in _ALPHANUMERIC or device[-1] not in _ALPHANUMERIC:
        return f"device name {quoted(device)} does not start and end with a letter or digit"
    return _check_characters("device name", device, _DEVICE_MIDDLE)


def _check_characters(what: str, name: str, permitted: "frozenset[str]") -> str:
    for character in name:
        if character not in permitted:
            return f"{what} {quoted(name)} contains the character {quoted(character)}"
    return ""


def is_qualified(text: str) -> bool:
    """Tell whether ``text`` is a fully qualified device name with valid parts."""
    kind, equals, device = text.partition("=")
    return bool(equals) and not check_kind(kind) and not check_device(device)


def parse_device_name(text: str) -> DeviceName:
    """Return the parts of a fully qualified device name; raises CdiError OCIGPU-CDI-1."""
    kind, equals, device = text.partition("=")
    problem = check_kind(kind) or check_device(device) if equals else "it is not of the form vendor/class=device"
    if problem:
        raise CdiError("OCIGPU-CDI-1", f"CDI device {quoted(text)}: {problem}")
    return DeviceName(kind, device)


def check_annotation_name(key: str) -> str:
    """Return what is wrong with the key of an annotation inside a specification, "" if nothing is.

    The rules are Kubernetes's for qualified names: an optional DNS subdomain and "/" before the name.
    """
    prefix, slash, name = key.rpartition("/")
    labels = prefix.lower().split(".") if slash else ()
    if len(prefix) > MAX_ANNOTATION_PREFIX or not all(_is_dns_label(label) for label in labels):
        return f"annotation {quoted(key)}: the part before / is not a DNS name"
    return _check_annotation_part(key, name)


def _check_annotation_part(key: str, name: str) -> str:
    if not name:
        return f"annotation {quoted(key)} has an empty name"
    if len(name) > MAX_ANNOTATION_NAME:
        return f"annotation {quoted(key)} has a name longer than {MAX_ANNOTATION_NAME} characters"
    if name[0] not in _ALPHANUMERIC or name[-1] not in _ALPHANUMERIC:
        return f"annotation {quoted(key)} has a name that does not start and end with a letter or digit"
    return _check_characters("annotation", name, _MIDDLE)


def _is_dns_label(label: str) -> bool:
    edges = label[:1] + label[-1:]
    return edges.isalnum() and all(character in _ALPHANUMERIC or character == "-" for character in label)
