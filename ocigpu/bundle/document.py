"""config.json of a bundle, as a file: read, and replaced atomically.

Unknown fields and the order are preserved: only our own fields are modelled.  Reading is strict where two readers could
disagree (duplicate keys, NaN), because the low-level runtime reads the same file after us.
"""

import os
import stat

from ocigpu.core import rawjson
from ocigpu.core.config_json import MAX_CONFIG_BYTES, Document, get_list, get_object, parse_json
from ocigpu.core.errors import SpecError, quoted
from ocigpu.system.files import file_state, open_regular, read_bounded, remove_drafts, replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ANY: "dict[str, Any]" = {}
_MAPPING = dict.fromkeys(("containerID", "hostID", "size"), _ANY)
_HOOK = dict.fromkeys(("path", "args", "env", "timeout"), _ANY)
KEYS: "dict[str, Any]" = {
    **dict.fromkeys(("ociVersion", "hostname", "domainname", "annotations", "solaris", "windows", "vm", "zos"), _ANY),
    "process": {
        **dict.fromkeys(("terminal", "consoleSize", "args", "commandLine", "env", "cwd", "rlimits", "scheduler"), _ANY),
        **dict.fromkeys(("noNewPrivileges", "apparmorProfile", "oomScoreAdj", "selinuxLabel", "ioPriority"), _ANY),
        "user": dict.fromkeys(("uid", "gid", "umask", "additionalGids", "username"), _ANY),
        "capabilities": dict.fromkeys(("bounding", "effective", "inheritable", "permitted", "ambient"), _ANY),
    },
    "root": dict.fromkeys(("path", "readonly"), _ANY),
    "mounts": {
        **dict.fromkeys(("destination", "type", "source", "options"), _ANY),
        **dict.fromkeys(("uidMappings", "gidMappings"), _MAPPING),
    },
    "hooks": dict.fromkeys(
        ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"), _HOOK
    ),
    "linux": {
        **dict.fromkeys(
            ("sysctl", "cgroupsPath", "seccomp", "rootfsPropagation", "maskedPaths", "readonlyPaths"), _ANY
        ),
        **dict.fromkeys(("netDevices", "mountLabel", "intelRdt", "personality", "timeOffsets"), _ANY),
        **dict.fromkeys(("uidMappings", "gidMappings"), _MAPPING),
        "namespaces": dict.fromkeys(("type", "path"), _ANY),
        "devices": dict.fromkeys(("path", "type", "major", "minor", "fileMode", "uid", "gid"), _ANY),
        "resources": {
            **dict.fromkeys(("memory", "cpu", "pids", "blockIO", "hugepageLimits", "network", "rdma", "unified"), _ANY),
            "devices": dict.fromkeys(("allow", "type", "major", "minor", "access"), _ANY),
        },
    },
}
"""The keys of runtime-spec (config.md, config-linux.md) in all objects that we read, without lists of objects."""


def parse_config(text: bytes, path: str) -> "dict[str, Any]":
    """Return the object of a config.json, read as every low-level runtime reads it.

    Raises SpecError OCIGPU-SPEC-2 as :func:`parse_json` does, and for a known key in another spelling: runtimes written
    in Go take ``"Process"`` for ``"process"``, crun and we do not; for crun, written in C, a key ends at a NUL.
    """
    config = parse_json(text, path)
    _check_spelling(config, KEYS, path, "")
    return config


def _check_spelling(value: "Any", known: "dict[str, Any]", path: str, place: str) -> None:
    for item in value if isinstance(value, list) else (value,):
        if not isinstance(item, dict):
            continue
        for name, inner in item.items():
            if name not in known:
                meant = fold_key(name.partition("\0")[0])
                for key in known:
                    if key.lower() == meant:
                        raise SpecError(
                            "OCIGPU-SPEC-2",
                            f"{path}: {place}{quoted(name)} is not {key}, but some runtimes take it for that",
                        )
            elif known[name]:
                _check_spelling(inner, known[name], path, f"{place}{name}.")


def fold_key(name: str) -> str:
    """Return a text that a key shares with all its other spellings, as Go's encoding/json compares them.

    That is simple case folding (unicode.SimpleFold).  Only two characters outside ASCII fold into ASCII: U+017F into
    "s", and U+212A into "k", which lower() covers.
    """
    return name.replace("\u017f", "s").lower()


def read_config(bundle: str, name: str = "config.json") -> Document:
    """Return the config.json of a bundle directory ("" is the current directory).

    Raises SpecError OCIGPU-SPEC-1 (missing, unreadable, not a regular file, over 32 MiB) or OCIGPU-SPEC-2 (not JSON, or
    read differently by others).
    """
    path = os.path.join(bundle, name)
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            text = read_bounded(file, MAX_CONFIG_BYTES)
    except OSError as error:
        raise SpecError("OCIGPU-SPEC-1", f"read {path}: {error.strerror}") from error
    config = parse_config(text, path)
    return Document(path, config, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)


def check_can_have_gpus(config: "dict[str, Any]", path: str) -> None:
    """Raise SpecError OCIGPU-SPEC-3 unless the container gets a mount namespace.

    Without one its mounts would be the host's.
    """
    namespaces = get_list(get_object(config, "linux"), "namespaces")
    if not any(isinstance(item, dict) and item.get("type") == "mount" for item in namespaces):
        raise SpecError(
            "OCIGPU-SPEC-3", f"{path}: linux.namespaces has no mount namespace: GPUs would appear on the host"
        )


def write_config(document: Document) -> tuple[int, ...]:
    """Replace the file on disk by the document's object: a new file, same mode and owner, renamed over the old.

    Returns :func:`ocigpu.system.files.file_state` of the new file, () if it has been replaced already.
    Raises SpecError OCIGPU-SPEC-4; then the old file is as it was and no new one is left.
    """
    try:
        text = rawjson.dump(document.config).encode() + b"\n"
    except (ValueError, RecursionError) as error:
        raise SpecError("OCIGPU-SPEC-4", f"write {document.path}: {error}") from error
    directory, name = os.path.split(document.path)
    try:
        fd = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_drafts(fd)
            made = replace_file(name, text, document.mode, fd, owner=(document.uid, document.gid))
        finally:
            os.close(fd)
    except OSError as error:
        raise SpecError("OCIGPU-SPEC-4", f"replace {document.path}: {error.strerror}") from error
    found = file_state(document.path)
    return found if found[:4] == (made.st_dev, made.st_ino, made.st_size, made.st_mtime_ns) else ()
