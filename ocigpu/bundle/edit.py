"""config.json as a raw document: read, find things in it, edit it, replace it atomically.

Unknown fields survive and order stays: nothing is modelled that is not ours.  Reading is strict where two readers
could disagree (duplicate keys, NaN), because the low-level runtime reads the same file after us.
"""

import os
import stat

from ocigpu.core import rawjson
from ocigpu.core.config_json import (
    HOOK_ENVIRONMENT,
    MAX_CONFIG_BYTES,
    OUR_HOOK,
    VENDOR_HOOKS,
    Document,
    find,
    get_list,
    get_object,
    get_rules,
    parse_json,
)
from ocigpu.core.errors import SpecError, quoted
from ocigpu.system.files import open_regular, read_bounded, remove_drafts, replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ocigpu.core.actions import Plan
else:
    pass

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
"""The keys of runtime-spec (config.md, config-linux.md) in all objects that we look into, lists of objects left out."""


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

    That is by simple case folding (unicode.SimpleFold): of what is not ASCII only U+017F is a letter of ASCII there,
    "s", and U+212A, "k", which lower() knows.
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


def edit_config(
    config: "dict[str, Any]",
    rules: "Sequence[dict[str, Any]]",
    hook_path: str,
    hook_options: list[str],
    declare_rules: bool = True,
) -> None:
    """Change ``config`` in place so that the container gets its GPUs: one prestart hook, and its device rules.

    ``rules``: of :func:`rule_entries`.  ``hook_options``: options of ocigpu-hook before its command.
    ``declare_rules``: also put the rules into linux.resources.devices, so that the runtime owns the device policy (not
    for rootless containers, which have none).  A container without any device rule gets none: for crun it has no device
    policy, and a first rule would bring one that takes other devices away; where the runtime has a policy all the same,
    the hook widens it.
    Doing it twice equals doing it once; for another plan than before, the rules of the former one go.
    """
    hooks = find(config, "hooks", dict, "hooks")
    prestart = find(hooks, "prestart", list, "hooks.prestart")
    edited_before = remove_gpu_hooks(config)
    prestart.append({"path": hook_path, "args": [OUR_HOOK, *hook_options, "prestart"], "env": list(HOOK_ENVIRONMENT)})
    hooks["prestart"] = prestart
    config["hooks"] = hooks
    resources = find(find(config, "linux", dict, "linux"), "resources", dict, "linux.resources")
    if declare_rules and find(resources, "devices", list, "linux.resources.devices"):
        if not edited_before:
            _set_apart(config, [rule["major"] for rule in rules])
        add_rules(config, rules, [rule["major"] for rule in rules] if edited_before else [])


def rule_entries(plan: "Plan") -> "list[dict[str, Any]]":
    """Return the entries of linux.resources.devices for the plan's device rules."""
    return [
        {"allow": True, "type": "c", "major": rule.major, "minor": rule.minor, "access": rule.access}
        for rule in plan.device_rules()
    ]


def add_rules(config: "dict[str, Any]", rules: "Sequence[dict[str, Any]]", old_majors: "Sequence[int]" = ()) -> None:
    """Put device rules at the end of linux.resources.devices, each of them once.

    ``old_majors``: rules of our making for these drivers' devices are left of a former edit, and go.
    """
    linux = find(config, "linux", dict, "linux")
    resources = find(linux, "resources", dict, "linux.resources")
    devices = find(resources, "devices", list, "linux.resources.devices")
    kept = [entry for entry in devices if entry not in rules and not _is_old_rule(entry, old_majors)]
    resources["devices"] = [*kept, *rules]
    linux["resources"] = resources
    config["linux"] = linux


def remove_gpu_hooks(config: "dict[str, Any]") -> bool:
    """Take the hooks that give GPUs, ours and the vendor's, out of ``config``; returns whether ours was among them.

    They are prestart hooks, or createRuntime hooks: the same stage by its newer name.  CDI hooks belong to others.
    """
    hooks = get_object(config, "hooks")
    edited_before = False
    for stage in ("prestart", "createRuntime"):
        entries = get_list(hooks, stage)
        edited_before = edited_before or any(_is_our_hook(entry) for entry in entries)
        entries[:] = [entry for entry in entries if not _is_gpu_hook(entry)]
    return edited_before


def has_gpu_hook(config: "dict[str, Any]") -> bool:
    """Tell whether a hook gives the container its GPUs, ours or the vendor's: see :func:`remove_gpu_hooks`."""
    hooks = get_object(config, "hooks")
    return any(_is_gpu_hook(entry) for stage in ("prestart", "createRuntime") for entry in get_list(hooks, stage))


def _is_gpu_hook(entry: "Any") -> bool:
    return _is_our_hook(entry) or _program(entry) in VENDOR_HOOKS


def _is_our_hook(entry: "Any") -> bool:
    """Tell whether a hook is ours, by its argv[0] too: hook.path of the settings may give the program any name."""
    program = _program(entry)
    return program == OUR_HOOK or (program != "" and get_list(entry, "args")[:1] == [OUR_HOOK])


def _program(entry: "Any") -> str:
    path = entry.get("path") if isinstance(entry, dict) else None
    return os.path.basename(path) if isinstance(path, str) else ""


def _set_apart(config: "dict[str, Any]", majors: "Sequence[int]") -> None:
    """Give others' rules that look like ours another order of fields: the next edit must not take them for ours."""
    devices = get_rules(config)
    for index, entry in enumerate(devices):
        if _is_old_rule(entry, majors):
            devices[index] = {name: entry[name] for name in ("type", "major", "minor", "access", "allow")}


def _is_old_rule(entry: "Any", majors: "Sequence[int]") -> bool:
    """Tell whether a rule is one that we write, for a device of these drivers: left by an edit for another request."""
    if not isinstance(entry, dict) or list(entry) != ["allow", "type", "major", "minor", "access"]:
        return False
    return (entry["allow"], entry["type"], entry["access"]) == (True, "c", "rw") and entry["major"] in majors


def write_config(document: Document) -> None:
    """Replace the file on disk by the document's object: a new file, same mode and owner, renamed over the old.

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
            replace_file(name, text, document.mode, fd, owner=(document.uid, document.gid))
        finally:
            os.close(fd)
    except OSError as error:
        raise SpecError("OCIGPU-SPEC-4", f"replace {document.path}: {error.strerror}") from error
