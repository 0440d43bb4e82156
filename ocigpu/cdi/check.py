"""The rules of the CDI specification: takes any data, returns its canonical form and all its problems.

Errors are contents that the reference library or the published JSON schema refuses, or that cannot be carried out
safely.  Warnings are violations of the specification's text alone, and contents that some engines refuse.  Field names
match in any case, and scalars become text where text is expected, because the reference library reads them so.
"""

from ocigpu.cdi.values import (
    MAX_PROBLEMS,
    EnoughError,
    Found,
    Problem,
    integer,
    list_of,
    read_list,
    read_object,
    read_path,
    read_source,
    read_text,
    read_truth,
    require,
    require_absolute,
)
from ocigpu.cdi.versions import EARLIEST, is_older, minimum_version, parse_version
from ocigpu.core.cdi_names import HOOK_STAGES, check_annotation_name, check_device, check_kind
from ocigpu.core.errors import quoted
from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ocigpu.cdi.values import Fields, Where

__all__ = ["Checked", "Problem", "check_spec"]

MAX_DEVICES = 65536
MAX_CLASS = 63
MAX_VENDOR = 253
MAX_ANNOTATIONS_BYTES = 262144
MAX_CLOSID_BYTES = 4096

BIND_TYPES = ("", "none", "bind", "rbind")
"""Of mounts that are no file system of their own: the option makes a bind mount (runc, libcontainer/specconv)."""
NODE_TYPES = ("", "b", "c", "u", "p")


class Checked(NamedTuple):
    """``spec``: the data in canonical form (usable only without errors); ``problems``: errors first, 100 at most."""

    spec: "dict[str, Any]"
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "error")


def check_spec(data: "Any") -> Checked:
    """Return the canonical form of a specification and its problems; never raises, for any ``data``.

    Canonical: field names as in the specification, text where text is expected, no nulls.  A canonical specification is
    its own canonical form.
    """
    found = Found()
    try:
        spec = _read_spec(found, data)
    except EnoughError:
        spec = {}
    return Checked(spec, tuple(found.errors + found.warnings)[:MAX_PROBLEMS])


# The whole


def _read_spec(found: Found, data: "Any") -> "dict[str, Any]":
    if data is None:
        found.error((), "type", "no data")
        return {}
    spec = read_object(found, data, SPEC, ())
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


def _check_version(found: Found, spec: "dict[str, Any]") -> None:
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


def _check_kind(found: Found, spec: "dict[str, Any]") -> None:
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


def _read_devices(found: Found, value: "Any", where: "Where") -> "list[Any]":
    if isinstance(value, list) and len(value) > MAX_DEVICES:
        found.error(where, "limit", f"{len(value)} devices, more than {MAX_DEVICES}")
        return []
    devices = read_list(found, value, _read_device, where)
    first: dict[str, int] = {}
    for index, device in enumerate(devices):
        name = device.get("name", "")
        if first.setdefault(name, index) != index and name:
            again = f"invalid spec, multiple device {quoted(name)}: also devices[{first[name]}]"
            found.error(((where, index), "name"), "duplicate-device", again)
    return devices


def _read_device(found: Found, value: "Any", where: "Where") -> "dict[str, Any]":
    before = len(found.errors)
    device = read_object(found, value, DEVICE, where)
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


def _read_edits(found: Found, value: "Any", where: "Where") -> "dict[str, Any]":
    return read_object(found, value, EDITS, where)


def _read_environment(found: Found, value: "Any", where: "Where") -> "Any":
    text = read_text(found, value, where)
    if text is not None and text.find("=") < 1:
        found.error(where, "env", f"invalid environment variable {quoted(text)}: it is not NAME=value")
    return text


def _read_node(found: Found, value: "Any", where: "Where") -> "dict[str, Any]":
    node = read_object(found, value, NODE, where)
    require(found, value, node, "path", where, "invalid (empty) device path")
    if node.get("type") == "u" and not node.get("major"):
        found.warning((where, "type"), "node-type", 'type "u" without a major number never matches the host\'s node')
    return node


def _read_node_type(found: Found, value: "Any", where: "Where") -> "Any":
    text = read_text(found, value, where)
    if text is not None and text not in NODE_TYPES:
        found.error(where, "node-type", f"invalid type {quoted(text)}: it is one of b, c, u and p")
    return text


def _read_permissions(found: Found, value: "Any", where: "Where") -> "Any":
    text = read_text(found, value, where)
    if not text:
        return text
    if text == "none":
        found.warning(where, "permissions", 'the word "none" is refused by engines with the CDI library 1.1.0 or older')
    elif text.strip("rwm"):
        found.error(where, "permissions", f"invalid permissions {quoted(text)}: they are letters of rwm")
    elif len(set(text)) != len(text):
        found.warning(where, "permissions", f"permissions {quoted(text)} repeat a letter")
    return text


def _read_mode(found: Found, value: "Any", where: "Where") -> "Any":
    mode = _read_uint32(found, value, where)
    if mode is not None and mode & ~0o777:
        found.warning(where, "file-mode", f"{mode} is {mode:#o}: more than permission bits (0666 is written 438)")
    return mode


def _read_net_devices(found: Found, value: "Any", where: "Where") -> "list[Any]":
    devices = read_list(found, value, _read_net_device, where)
    for field in NET_DEVICE:
        seen = set()
        for index, device in enumerate(devices):
            name = device.get(field)
            if name and name in seen:
                found.error(((where, index), field), "duplicate-net-device", f"duplicate {field} {quoted(name)}")
            seen.add(name)
    return devices


def _read_net_device(found: Found, value: "Any", where: "Where") -> "dict[str, Any]":
    device = read_object(found, value, NET_DEVICE, where)
    for field in NET_DEVICE:
        require(found, value, device, field, where, f"invalid linux net device, empty {field}")
    return device


def _read_mount(found: Found, value: "Any", where: "Where") -> "dict[str, Any]":
    mount = read_object(found, value, MOUNT, where)
    require(found, value, mount, "hostPath", where, "invalid mount, empty host path")
    require(found, value, mount, "containerPath", where, "invalid mount, empty container path")
    kind = mount.get("type", "")
    if kind in BIND_TYPES and mount.get("hostPath"):
        require_absolute(found, mount["hostPath"], (where, "hostPath"))
        if not {"bind", "rbind"}.intersection(mount.get("options", ())):  # seen with runc 1.1.5
            message = (
                'a mount without the option "bind" or "rbind": no runtime starts a container with it (no such device)'
            )
            found.warning((where, "options"), "mount-bind", message)
    return mount


def _read_hook(found: Found, value: "Any", where: "Where") -> "dict[str, Any]":
    hook = read_object(found, value, HOOK, where)
    require(found, value, hook, "hookName", where, "invalid hook, empty name")
    require(found, value, hook, "path", where, "invalid hook with empty path")
    if hook.get("timeout") == 0:
        found.warning((where, "timeout"), "timeout", "a timeout is a number of seconds greater than 0")
    if not hook.get("env") and hook.get("hookName") == "createContainer":
        # seen with runc 1.1.5; what LD_PRELOAD names there is loaded by root of the host (CVE-2025-23266)
        found.warning(where, "hook-environment", "a hook without env: runc starts it with the variables of the image")
    return hook


def _read_hook_name(found: Found, value: "Any", where: "Where") -> "Any":
    text = read_text(found, value, where)
    if text and text not in HOOK_STAGES:
        found.error(where, "hook-name", f"invalid hook name {quoted(text)}: it is one of {', '.join(HOOK_STAGES)}")
    return text


def _read_rdt(found: Found, value: "Any", where: "Where") -> "dict[str, Any]":
    for removed in ("enableCMT", "enableMBM"):
        if isinstance(value, dict) and removed in value:
            found.error((where, removed), "unknown-field", "unknown field since CDI 1.1.0: use enableMonitoring")
            value = {name: item for name, item in value.items() if name != removed}
    return read_object(found, value, RDT, where)


def _read_clos_id(found: Found, value: "Any", where: "Where") -> "Any":
    text = read_text(found, value, where)
    if text and text != "/":
        if text in (".", "..") or "/" in text or "\n" in text:
            found.error(where, "intel-rdt", f"invalid ClosID {quoted(text)}: it is one name of a directory")
        elif len(text.encode(errors="replace")) >= MAX_CLOSID_BYTES:
            found.error(where, "intel-rdt", f"invalid ClosID, {MAX_CLOSID_BYTES} bytes or longer")
    return text


def _read_gid(found: Found, value: "Any", where: "Where") -> "Any":
    gid = _read_uint32(found, value, where)
    if gid == 0:
        found.warning(where, "gid", "group 0 is ignored")
    return gid


def _read_annotations(found: Found, value: "Any", where: "Where") -> "dict[str, Any]":
    if not isinstance(value, dict):
        return read_object(found, value, {}, where)
    result: dict[str, Any] = {}
    total = 0
    for key, item in value.items():
        name = read_text(found, key, (where, "key"))
        text = None if item is None else read_text(found, item, (where, key))
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


# Fields

_read_uint32 = integer(0, (1 << 32) - 1)
_read_int64 = integer(-(1 << 63), (1 << 63) - 1)

NODE: "Fields" = {
    "path": read_path,
    "hostPath": read_path,
    "type": _read_node_type,
    "major": _read_int64,
    "minor": _read_int64,
    "fileMode": _read_mode,
    "permissions": _read_permissions,
    "uid": _read_uint32,
    "gid": _read_uint32,
}
NET_DEVICE: "Fields" = {"hostInterfaceName": read_text, "name": read_text}
HOOK: "Fields" = {
    "hookName": _read_hook_name,
    "path": read_path,
    "args": list_of(read_text),
    "env": list_of(_read_environment),
    "timeout": _read_uint32,
}
MOUNT: "Fields" = {
    "hostPath": read_source,
    "containerPath": read_path,
    "options": list_of(read_text),
    "type": read_text,
}
RDT: "Fields" = {
    "closID": _read_clos_id,
    "l3CacheSchema": read_text,
    "memBwSchema": read_text,
    "schemata": list_of(read_text),
    "enableMonitoring": read_truth,
}
EDITS: "Fields" = {
    "env": list_of(_read_environment),
    "deviceNodes": list_of(_read_node),
    "netDevices": _read_net_devices,
    "hooks": list_of(_read_hook),
    "mounts": list_of(_read_mount),
    "intelRdt": _read_rdt,
    "additionalGids": list_of(_read_gid),
}
DEVICE: "Fields" = {"name": read_text, "annotations": _read_annotations, "containerEdits": _read_edits}
SPEC: "Fields" = {
    "cdiVersion": read_text,
    "kind": read_text,
    "annotations": _read_annotations,
    "devices": _read_devices,
    "containerEdits": _read_edits,
}
"""Fields of the specification's objects, in the order in which the reference library writes them (CDI SPEC.md)."""
