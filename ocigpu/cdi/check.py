"""The rules of the CDI specification: any data in, its canonical form and everything that is wrong with it out.

Errors are what the reference library or the published JSON schema refuses, and what cannot be carried out safely;
warnings are what only the specification's text asks for, and what some engines do not take.  Field names match
whatever their case and scalars become text where text is wanted, because the reference library reads them so.
"""

import struct

from ocigpu.cdi.names import check_annotation_name, check_device, check_kind
from ocigpu.cdi.versions import EARLIEST, is_older, minimum_version, parse_version
from ocigpu.errors import printable, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NamedTuple

    Where = tuple[Any, ...]
    Reader = Callable[["_Found", Any, Where], Any]
    Fields = dict[str, Reader]
else:
    from ocigpu.record import NamedTuple

MAX_PROBLEMS = 100
MAX_DEVICES = 65536
MAX_CLASS = 63
MAX_VENDOR = 253
MAX_ANNOTATIONS_BYTES = 262144
MAX_CLOSID_BYTES = 4096

HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
NODE_TYPES = ("", "b", "c", "u", "p")


class Problem(NamedTuple):
    """One thing that is wrong: ``where`` is like "devices[3].containerEdits.mounts[0].hostPath", "" for the whole."""

    where: str
    message: str
    rule: str
    severity: str

    @property
    def text(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class Checked(NamedTuple):
    """``spec``: the data in canonical form (usable only without errors); ``problems``: errors first, 100 at most."""

    spec: "dict[str, Any]"
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "error")


class _EnoughError(Exception):
    """As many errors as are shown were found."""


class _Found:
    """Problems found so far.  A place is a chain of pairs (outer place, name or index), rendered only when needed."""

    def __init__(self) -> None:
        self.errors: list[Problem] = []
        self.warnings: list[Problem] = []

    def error(self, where: "Where", rule: str, message: str) -> None:
        self.errors.append(Problem(_render(where), message, rule, "error"))
        if len(self.errors) >= MAX_PROBLEMS:
            raise _EnoughError

    def warning(self, where: "Where", rule: str, message: str) -> None:
        if len(self.warnings) < MAX_PROBLEMS:
            self.warnings.append(Problem(_render(where), message, rule, "warning"))


def check_spec(data: "Any") -> Checked:
    """Return the canonical form of a specification and its problems; never raises, whatever ``data`` is.

    Canonical: field names as the specification writes them, text where text is wanted, no nulls.  A canonical
    specification is its own canonical form.
    """
    found = _Found()
    try:
        spec = _read_spec(found, data)
    except _EnoughError:
        spec = {}
    return Checked(spec, tuple(found.errors + found.warnings)[:MAX_PROBLEMS])


def _render(where: "Where") -> str:
    parts = []
    while where:
        where, part = where
        parts.append(f"[{part}]" if isinstance(part, int) else f".{printable(str(part), 100)}")
    return "".join(reversed(parts)).removeprefix(".")


# The whole


def _read_spec(found: _Found, data: "Any") -> "dict[str, Any]":
    if data is None:
        found.error((), "type", "no data")
        return {}
    spec = _read_object(found, data, SPEC, ())
    if not isinstance(data, dict):
        return spec
    refused = {problem.where for problem in found.errors}
    if "kind" not in refused:
        _check_kind(found, spec)
    if "devices" not in refused and not spec.get("devices"):
        found.error(((), "devices"), "no-devices", "invalid spec, no devices")
    if "cdiVersion" not in refused:
        _check_version(found, spec)
    return spec


def _check_version(found: _Found, spec: "dict[str, Any]") -> None:
    where = ((), "cdiVersion")
    text = spec.get("cdiVersion", "")
    version = parse_version(text)
    if not version:
        hint = ": it has three numbers, as in 0.6.0" if text.count(".") < 2 else ""
        found.error(where, "version", f"invalid version {quoted(text)}{hint}")
        return
    needed = minimum_version(spec)
    if is_older(version, needed):
        why = "the first that is accepted" if needed == EARLIEST else "for what it uses"
        found.error(where, "version", f"the spec version must be at least v{needed} ({why}), and is {version}")


def _check_kind(found: _Found, spec: "dict[str, Any]") -> None:
    where = ((), "kind")
    kind = spec.get("kind", "")
    problem = check_kind(kind)
    if problem:
        found.error(where, "kind", f"invalid kind {quoted(kind)}: {problem}")
        return
    vendor, _, device_class = kind.partition("/")
    if len(vendor) > MAX_VENDOR or len(device_class) > MAX_CLASS:
        found.warning(where, "kind", f"vendor longer than {MAX_VENDOR} or class longer than {MAX_CLASS} characters")
    if len(vendor) == 1 or len(device_class) == 1:
        found.warning(where, "kind", "a vendor or class of one letter crashes engines with the CDI library 1.1.0")


def _read_devices(found: _Found, value: "Any", where: "Where") -> "list[Any]":
    if isinstance(value, list) and len(value) > MAX_DEVICES:
        found.error(where, "limit", f"{len(value)} devices, more than {MAX_DEVICES}")
        return []
    devices = _read_list(found, value, _read_device, where)
    first: dict[str, int] = {}
    for index, device in enumerate(devices):
        name = device.get("name", "")
        if first.setdefault(name, index) != index and name:
            again = f"invalid spec, multiple device {quoted(name)}: also devices[{first[name]}]"
            found.error(((where, index), "name"), "duplicate-device", again)
    return devices


def _read_device(found: _Found, value: "Any", where: "Where") -> "dict[str, Any]":
    before = len(found.errors)
    device = _read_object(found, value, DEVICE, where)
    if not isinstance(value, dict):
        return device
    if "name" in device or value.get("name") is None:
        problem = check_device(device.get("name", ""))
        if problem:
            found.error((where, "name"), "device-name", problem)
    edits = device.get("containerEdits", {})
    if len(found.errors) == before and not any(edits.values()) and "intelRdt" not in edits:
        found.error((where, "containerEdits"), "empty-edits", "invalid device, empty device edits")
    return device


# Container edits


def _read_edits(found: _Found, value: "Any", where: "Where") -> "dict[str, Any]":
    return _read_object(found, value, EDITS, where)


def _read_environment(found: _Found, value: "Any", where: "Where") -> "Any":
    text = _read_text(found, value, where)
    if text is not None and text.find("=") < 1:
        found.error(where, "env", f"invalid environment variable {quoted(text)}: it is not NAME=value")
    return text


def _read_node(found: _Found, value: "Any", where: "Where") -> "dict[str, Any]":
    node = _read_object(found, value, NODE, where)
    _require(found, value, node, "path", where, "invalid (empty) device path")
    if node.get("type") == "u" and not node.get("major"):
        found.warning((where, "type"), "node-type", 'type "u" without a major number never matches the host\'s node')
    return node


def _read_node_type(found: _Found, value: "Any", where: "Where") -> "Any":
    text = _read_text(found, value, where)
    if text is not None and text not in NODE_TYPES:
        found.error(where, "node-type", f"invalid type {quoted(text)}: it is one of b, c, u and p")
    return text


def _read_permissions(found: _Found, value: "Any", where: "Where") -> "Any":
    text = _read_text(found, value, where)
    if not text:
        return text
    if text == "none":
        found.warning(where, "permissions", 'the word "none" is refused by engines with the CDI library 1.1.0 or older')
    elif text.strip("rwm"):
        found.error(where, "permissions", f"invalid permissions {quoted(text)}: they are letters of rwm")
    elif len(set(text)) != len(text):
        found.warning(where, "permissions", f"permissions {quoted(text)} repeat a letter")
    return text


def _read_mode(found: _Found, value: "Any", where: "Where") -> "Any":
    mode = _read_uint32(found, value, where)
    if mode is not None and mode & ~0o777:
        found.warning(where, "file-mode", f"{mode} is {mode:#o}: more than permission bits (0666 is written 438)")
    return mode


def _read_net_devices(found: _Found, value: "Any", where: "Where") -> "list[Any]":
    devices = _read_list(found, value, _read_net_device, where)
    for field in NET_DEVICE:
        seen = set()
        for index, device in enumerate(devices):
            name = device.get(field)
            if name and name in seen:
                found.error(((where, index), field), "duplicate-net-device", f"duplicate {field} {quoted(name)}")
            seen.add(name)
    return devices


def _read_net_device(found: _Found, value: "Any", where: "Where") -> "dict[str, Any]":
    device = _read_object(found, value, NET_DEVICE, where)
    for field in NET_DEVICE:
        _require(found, value, device, field, where, f"invalid linux net device, empty {field}")
    return device


def _read_mount(found: _Found, value: "Any", where: "Where") -> "dict[str, Any]":
    mount = _read_object(found, value, MOUNT, where)
    _require(found, value, mount, "hostPath", where, "invalid mount, empty host path")
    _require(found, value, mount, "containerPath", where, "invalid mount, empty container path")
    return mount


def _read_hook(found: _Found, value: "Any", where: "Where") -> "dict[str, Any]":
    hook = _read_object(found, value, HOOK, where)
    _require(found, value, hook, "hookName", where, "invalid hook, empty name")
    _require(found, value, hook, "path", where, "invalid hook with empty path")
    if hook.get("timeout") == 0:
        found.warning((where, "timeout"), "timeout", "a timeout is a number of seconds greater than 0")
    return hook


def _read_hook_name(found: _Found, value: "Any", where: "Where") -> "Any":
    text = _read_text(found, value, where)
    if text and text not in HOOKS:
        found.error(where, "hook-name", f"invalid hook name {quoted(text)}: it is one of {', '.join(HOOKS)}")
    return text


def _read_rdt(found: _Found, value: "Any", where: "Where") -> "dict[str, Any]":
    for removed in ("enableCMT", "enableMBM"):
        if isinstance(value, dict) and removed in value:
            found.error((where, removed), "unknown-field", "unknown field since CDI 1.1.0: use enableMonitoring")
            value = {name: item for name, item in value.items() if name != removed}
    return _read_object(found, value, RDT, where)


def _read_clos_id(found: _Found, value: "Any", where: "Where") -> "Any":
    text = _read_text(found, value, where)
    if text and text != "/":
        if text in (".", "..") or "/" in text or "\n" in text:
            found.error(where, "intel-rdt", f"invalid ClosID {quoted(text)}: it is one name of a directory")
        elif len(text.encode(errors="replace")) >= MAX_CLOSID_BYTES:
            found.error(where, "intel-rdt", f"invalid ClosID, {MAX_CLOSID_BYTES} bytes or longer")
    return text


def _read_gid(found: _Found, value: "Any", where: "Where") -> "Any":
    gid = _read_uint32(found, value, where)
    if gid == 0:
        found.warning(where, "gid", "group 0 is ignored")
    return gid


def _read_annotations(found: _Found, value: "Any", where: "Where") -> "dict[str, Any]":
    if not isinstance(value, dict):
        return _read_object(found, value, {}, where)
    result: dict[str, Any] = {}
    total = 0
    for key, item in value.items():
        name = _read_text(found, key, (where, "key"))
        text = None if item is None else _read_text(found, item, (where, key))
        if name is None or text is None:
            continue
        problem = check_annotation_name(name)
        if problem:
            found.warning(where, "annotation", problem)
        total += len(name.encode(errors="replace")) + len(text.encode(errors="replace"))
        result[name] = text
    if total > MAX_ANNOTATIONS_BYTES:
        found.warning(where, "annotation", f"annotations of {total} bytes, more than {MAX_ANNOTATIONS_BYTES}")
    return result


# Values


def _read_object(found: _Found, value: "Any", fields: "Fields", where: "Where") -> "dict[str, Any]":
    if not isinstance(value, dict):
        found.error(where, "type", f"must be an object, not {_kind(value)}")
        return {}
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = key if key in fields else _find_field(found, value, result, key, fields, where)
        if not name or item is None:
            continue
        got = fields[name](found, item, (where, name))
        if got is not None:
            result[name] = got
    return result


def _find_field(
    found: _Found, value: "dict[Any, Any]", result: "dict[str, Any]", key: "Any", fields: "Fields", where: "Where"
) -> str:
    """Return the canonical name of a field written in another case; "" after reporting a field that cannot be used."""
    text = key if isinstance(key, str) else repr(key)[:200]
    for name in fields:
        if name.lower() == text.lower():
            if name in value or name in result:
                found.error((where, name), "duplicate-field", f"given twice, also as {quoted(text)}")
                return ""
            found.warning((where, name), "field-case", f"written {quoted(text)}: some readers know only {name}")
            return name
    from difflib import get_close_matches  # 2 ms, and only for what is refused

    near = get_close_matches(text[:40], fields, 1, 0.6)
    meant = f", did you mean {near[0]}?" if near else f": the fields here are {', '.join(fields)}"
    found.error(where, "unknown-field", f"unknown field {quoted(text)}{meant}")
    return ""


def _require(found: _Found, value: "Any", result: "dict[str, Any]", field: str, where: "Where", message: str) -> None:
    """Report a required text that is missing or empty, unless it is there and was refused already."""
    if result.get(field) or not isinstance(value, dict):
        return
    if field in result or value.get(field) is None:
        found.error((where, field), "required", message)


def _read_list(found: _Found, value: "Any", read: "Reader", where: "Where") -> "list[Any]":
    if not isinstance(value, list):
        found.error(where, "type", f"must be a list, not {_kind(value)}")
        return []
    result = []
    for index, item in enumerate(value):
        got = read(found, item, (where, index))
        if got is not None:
            result.append(got)
    return result


def _list_of(read: "Reader") -> "Reader":
    return lambda found, value, where: _read_list(found, value, read, where)


def _read_text(found: _Found, value: "Any", where: "Where") -> str | None:
    """Return text; the reference library turns numbers and truth values into text where it wants text."""
    if isinstance(value, str):
        if not value.isprintable():
            if "\0" in value:
                found.error(where, "text", "has a NUL character")
            elif any("\ud800" <= character <= "\udfff" for character in value):
                found.error(where, "text", "is not valid Unicode")
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return str(value)
    if isinstance(value, float):
        text = _float_text(value)
        if text:
            return text
    found.error(where, "type", f"must be text, not {_kind(value)}")
    return None


def _float_text(value: float) -> str:
    """Return a number as Go's strconv.FormatFloat(value, 'g', -1, 32) writes it, "" if it is out of range."""
    try:
        single = struct.pack("<f", value)
    except OverflowError:
        return ""
    for digits in range(9):
        text = f"{value:.{digits}e}"
        if struct.pack("<f", float(text)) == single:
            break
    if "e" not in text:  # NaN, infinities
        return ""
    exponent = int(text.partition("e")[2])
    return f"{float(text):.{max(digits - exponent, 0)}f}" if -5 < exponent < 6 else text


def _read_path(found: _Found, value: "Any", where: "Where") -> str | None:
    text = _read_text(found, value, where)
    if not text:
        return text
    if ".." in text and ".." in text.split("/"):
        found.error(where, "path", f'path {quoted(text)} has a ".." component')
    if not text.isprintable() and any(c < " " or c == "\x7f" for c in text) and "\0" not in text:
        found.error(where, "path", f"path {quoted(text)} has a control character")
    if text[0] != "/":
        found.warning(where, "path", f"path {quoted(text)} is not absolute")
    return text


def _integer(low: int, high: int) -> "Reader":
    """Return a reader of whole numbers of a range; 195.0 is one too, as for the reference library."""

    def read(found: _Found, value: "Any", where: "Where") -> int | None:
        if isinstance(value, float) and abs(value) < 1e21 and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            found.error(where, "type", f"must be a whole number, not {_kind(value)}")
        elif not low <= value <= high:
            found.error(where, "range", f"must be a number from {low} to {high}")
        else:
            return value
        return None

    return read


def _read_truth(found: _Found, value: "Any", where: "Where") -> bool | None:
    if isinstance(value, bool):
        return value
    found.error(where, "type", f"must be true or false, not {_kind(value)}")
    return None


def _kind(value: "Any") -> str:
    if isinstance(value, bool):
        return "true or false"
    for kind, name in ((str, "text"), (int, "a number"), (float, "a number"), (list, "a list"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return "null"


_read_uint32 = _integer(0, (1 << 32) - 1)
_read_int64 = _integer(-(1 << 63), (1 << 63) - 1)

NODE: "Fields" = {
    "path": _read_path,
    "hostPath": _read_path,
    "type": _read_node_type,
    "major": _read_int64,
    "minor": _read_int64,
    "fileMode": _read_mode,
    "permissions": _read_permissions,
    "uid": _read_uint32,
    "gid": _read_uint32,
}
NET_DEVICE: "Fields" = {"hostInterfaceName": _read_text, "name": _read_text}
HOOK: "Fields" = {
    "hookName": _read_hook_name,
    "path": _read_path,
    "args": _list_of(_read_text),
    "env": _list_of(_read_environment),
    "timeout": _read_uint32,
}
MOUNT: "Fields" = {
    "hostPath": _read_path,
    "containerPath": _read_path,
    "options": _list_of(_read_text),
    "type": _read_text,
}
RDT: "Fields" = {
    "closID": _read_clos_id,
    "l3CacheSchema": _read_text,
    "memBwSchema": _read_text,
    "schemata": _list_of(_read_text),
    "enableMonitoring": _read_truth,
}
EDITS: "Fields" = {
    "env": _list_of(_read_environment),
    "deviceNodes": _list_of(_read_node),
    "netDevices": _read_net_devices,
    "hooks": _list_of(_read_hook),
    "mounts": _list_of(_read_mount),
    "intelRdt": _read_rdt,
    "additionalGids": _list_of(_read_gid),
}
DEVICE: "Fields" = {"name": _read_text, "annotations": _read_annotations, "containerEdits": _read_edits}
SPEC: "Fields" = {
    "cdiVersion": _read_text,
    "kind": _read_text,
    "annotations": _read_annotations,
    "devices": _read_devices,
    "containerEdits": _read_edits,
}
"""Fields of the specification's objects, in the order in which the reference library writes them (CDI SPEC.md)."""
