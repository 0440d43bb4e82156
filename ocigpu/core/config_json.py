"""config.json as a raw document: names, strict reading of its text, and finding things in it.  Pure."""

import os

from ocigpu.core import rawjson
from ocigpu.core.errors import SpecError, printable
from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_CONFIG_BYTES = 32 << 20
VENDOR_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")
OUR_HOOK = "ocigpu-hook"
DECLARED = "ocigpu/declared"
"""Annotation that records which parts of a config.json an edit has added (:mod:`ocigpu.bundle.edit`)."""
CDI_DEVICES = "ocigpu/cdi"
"""Annotation with the CDI devices whose hooks the shim has carried out: no remaining hook shows them."""
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The usual directories of programs, which are also systemd's default PATH of a service (systemd.exec(5))."""
OWN_RUNTIMES = ("/var/lib/rancher/k3s/data/current/bin/runc", "/var/lib/rancher/rke2/bin/runc")
"""Of k3s and RKE2, which put these directories into the PATH of their containerd (k3s-io/k3s, cmd/k3s/main.go)."""
HOOK_ENVIRONMENT = [f"PATH={SEARCH_PATH}", "LC_ALL=C.UTF-8"]
"""Explicit and complete: a hook with ``env`` gets nothing else (runtime-spec, POSIX platform hooks)."""


def is_stub(head: bytes, name: bytes) -> bool:
    """Tell whether a program that begins with these 4096 bytes is our stub of this name, a script or compiled."""
    return head.startswith((b"#!", b"\x7fELF")) and name in head  # the compiled one's mark: packaging/stub.h


class Document(NamedTuple):
    """A config.json: its path, the parsed object, and mode, uid and gid of the file."""

    path: str
    config: "dict[str, Any]"
    mode: int
    uid: int
    gid: int


def parse_json(text: bytes, what: str, code: str = "OCIGPU-SPEC-2") -> "dict[str, Any]":
    """Return the JSON object of ``text``; ``what`` names it in messages.

    Raises SpecError with ``code`` for anything but one object in UTF-8 without duplicate keys, NaN or infinities:
    readers differ on those (Go merges duplicate objects, Python keeps the last).
    """
    try:
        value = rawjson.parse(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SpecError(code, f"{what}: not UTF-8 at byte {error.start}") from error
    except RecursionError as error:  # the interpreter's wording depends on its version
        raise SpecError(code, f"{what}: nested too deeply") from error
    except ValueError as error:
        message = printable(str(error), 200)
        if line := getattr(error, "lineno", 0):  # json.JSONDecodeError, which is not imported for this
            message = f"line {line} column {error.colno}: {error.msg}"  # type: ignore[attr-defined] # see above
        raise SpecError(code, f"{what}: {message}") from error
    if not isinstance(value, dict):
        raise SpecError(code, f"{what}: not a JSON object")
    return value


def get_object(parent: "Any", name: str) -> "dict[str, Any]":
    """Return the object ``parent[name]``, or an empty one when it is absent or of another type."""
    value = parent.get(name) if isinstance(parent, dict) else None
    return value if isinstance(value, dict) else {}


def get_list(parent: "Any", name: str) -> "list[Any]":
    """Return the list ``parent[name]``, or an empty one when it is absent or of another type."""
    value = parent.get(name) if isinstance(parent, dict) else None
    return value if isinstance(value, list) else []


def has_user_namespace(config: "dict[str, Any]") -> bool:
    """Tell whether the container gets, or joins, a user namespace."""
    namespaces = get_list(get_object(config, "linux"), "namespaces")
    return any(isinstance(item, dict) and item.get("type") == "user" for item in namespaces)


def map_inside(mappings: "list[Any]", number: int) -> int:
    """Return the id inside by which linux.uidMappings or gidMappings map an id of the host, -1 for none.

    A malformed entry maps none.
    """
    for entry in mappings:
        names = ("containerID", "hostID", "size") if isinstance(entry, dict) else ()
        numbers: "list[Any]" = [entry.get(name) for name in names]
        if numbers and all(type(one) is int for one in numbers):
            first, host_first, size = numbers
            if 0 <= number - host_first < size:
                return int(first + number - host_first)
    return -1


def get_rules(config: "dict[str, Any]") -> "list[Any]":
    """Return linux.resources.devices, or an empty list."""
    return get_list(get_object(get_object(config, "linux"), "resources"), "devices")


def read_env(config: "dict[str, Any]") -> list[str]:
    """Return the texts of process.env, NAME=VALUE each as a rule: of a name that occurs twice the last one counts."""
    return [text for text in get_list(get_object(config, "process"), "env") if isinstance(text, str)]


def rootfs_path(config: "dict[str, Any]", bundle: str) -> str:
    """Return the absolute path of the container's root: ``root.path``, relative to the bundle (runtime-spec, root).

    Raises SpecError OCIGPU-SPEC-3 when there is none.
    """
    path = get_object(config, "root").get("path")
    if not isinstance(path, str) or not is_path(path):
        raise SpecError("OCIGPU-SPEC-3", f"{os.path.join(bundle, 'config.json')}: root.path is missing")
    return os.path.normpath(os.path.join(os.path.abspath(bundle or "."), path))


def mount_points(config: "dict[str, Any]") -> list[str]:
    """Return the destinations of a configuration's mounts, clean; entries that have none are left out."""
    mounts = (mount.get("destination") for mount in get_list(config, "mounts") if isinstance(mount, dict))
    return [clean_path(path) for path in mounts if isinstance(path, str)]


def clean_path(path: str) -> str:
    """Return an absolute path without ``..`` and double slashes; normpath alone keeps two slashes at the beginning."""
    return os.path.normpath("/" + path.lstrip("/"))


def is_path(text: str) -> bool:
    """Tell whether a text of a JSON document can be a path: neither empty, nor with NUL or half a surrogate pair.

    Python turns such halves into bytes or an error, and Go, the runtime's language, into another character.
    """
    if not text or "\0" in text:
        return False
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def find(parent: "dict[str, Any]", name: str, kind: type, path: str) -> "Any":
    """Return ``parent[name]``, or an empty one when it is missing or null; another type is OCIGPU-SPEC-3."""
    value = parent.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise SpecError("OCIGPU-SPEC-3", f"config.json: {path} is not {'an object' if kind is dict else 'a list'}")
    return value
