"""What an edit by ocigpu-runtime changes in a config.json: the original found again, and the changes as data.

Mode spec notes its additions in an annotation; a hook and its rules have a form that only this project writes; what CDI
devices bring is known from the specifications.  What an edit replaced (another hook for GPUs, a device of the same
path) is gone from the file and cannot be found again.
"""

import copy
import json
import shutil
import sys
from collections import Counter
from typing import Any, NamedTuple

from ocigpu.bundle.edit import is_own_rule, take_back
from ocigpu.bundle.inject import inject
from ocigpu.bundle.policy import find_hook, owns_device_policy
from ocigpu.cdi.registry import read_registry
from ocigpu.containers.report import read_mode
from ocigpu.core.config_json import CDI_DEVICES, OUR_HOOK, get_list, get_object, get_rules
from ocigpu.core.errors import OcigpuError, SpecError
from ocigpu.core.settings import Settings
from ocigpu.entry.own_hooks import split_hooks
from ocigpu.gpus.vendors import parse_request

REPLACED_NOTE = (
    "the original is reconstructed by removing what was added; what the edit replaced (another hook for GPUs,"
    " a device or mount of the same path, the value of a variable) is no longer in the file"
)


class Original(NamedTuple):
    """A config.json without the edit: ``mode`` is that of the edit, "" without one; ``devices``: of mode cdi."""

    config: dict[str, Any]
    mode: str
    notes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


class Change(NamedTuple):
    """One difference: ``op`` is "add", "remove" or "replace" at a JSON pointer (RFC 6901), ``old`` and ``new`` values.

    Entries of a list are matched by their content.  The number in the pointer is the place of a removed entry in the
    first document, and of an added one in the second.
    """

    op: str
    path: str
    old: Any = None
    new: Any = None


def find_original(config: dict[str, Any], settings: Settings, bundle: str = "") -> Original:
    """Return a config.json as it was before ocigpu-runtime edited it; the argument is unchanged.

    ``bundle``: as for :func:`ocigpu.gpus.nvidia.request.parse_request`.  Raises SpecError OCIGPU-SPEC-2 for one that is
    nested too deeply to be copied.
    """
    mode = read_mode(config)
    try:
        found = copy.deepcopy(config)
    except RecursionError as error:
        raise SpecError("OCIGPU-SPEC-2", "config.json: nested too deeply") from error
    if mode == "cdi":
        carried_out = CDI_DEVICES in get_object(found, "annotations")
        if carried_out:
            take_back(found)
        return _without_devices(found, settings, bundle, carried_out)
    if not mode and _asks_for_devices(config, settings, bundle):  # the vendor's specifications leave no other trace
        original = _without_devices(copy.deepcopy(found), settings, bundle)
        return original if original.mode and original.notes == (REPLACED_NOTE,) else Original(found, "")
    take_back(found)
    if mode != "spec" and not _take_back_hook(found):
        return Original(found, "")
    _drop_empty(found)
    return Original(found, mode, (REPLACED_NOTE,))


def _asks_for_devices(config: dict[str, Any], settings: Settings, bundle: str) -> bool:
    try:
        return parse_request(config, settings, bundle).selection == "cdi"
    except OcigpuError:  # a request that cannot be granted
        return False


def _take_back_hook(config: dict[str, Any]) -> bool:
    """Remove the shim's hook, and the rules of its form at the end of the list; returns whether a hook was found.

    Our hook that an engine added (``docker run --gpus``) has another argv[0], and stays.
    """
    entries = get_list(get_object(config, "hooks"), "prestart")
    others = [entry for entry in entries if get_list(entry, "args")[:1] != [OUR_HOOK]]
    if len(others) == len(entries):
        return False
    entries[:] = others
    rules = get_rules(config)
    while rules and is_own_rule(rules[-1]):
        rules.pop()
    return True


def _drop_empty(config: dict[str, Any]) -> None:
    """Remove the lists and objects that an edit makes, if they are now empty."""
    linux = get_object(config, "linux")
    for parent, names in (
        (get_object(config, "hooks"), ("prestart",)),
        (get_object(linux, "resources"), ("devices",)),
        (linux, ("devices", "maskedPaths", "readonlyPaths", "resources")),
        (get_object(get_object(config, "process"), "user"), ("additionalGids",)),
        (config, ("hooks", "annotations", "mounts")),
    ):
        for name in names:
            if parent.get(name) in ([], {}):
                del parent[name]


def _without_devices(config: dict[str, Any], settings: Settings, bundle: str, carried_out: bool = False) -> Original:
    """Return a config.json (which may be changed) without what its CDI devices bring by the specifications now.

    ``carried_out``: our own hooks are not in it.
    """
    try:
        devices = find_devices(config, settings, bundle)
        resolved = read_registry(settings).resolve(devices)
        root = owns_device_policy()
        user = dict(get_object(get_object(config, "process"), "user"))
        user.pop("additionalGids", None)
        namespaces = get_list(get_object(config, "linux"), "namespaces")
        alone: dict[str, Any] = {"process": {"user": user}, "linux": {"namespaces": namespaces}}
        declare_rules = root and not settings.no_cgroups
        program = find_hook(settings, shutil.which("ocigpu-runtime") or sys.argv[0])
        edits = split_hooks(resolved.edits, program)[0] if carried_out else resolved.edits
        inject(alone, edits, declare_rules=declare_rules, files=resolved.files, rootless=not root)
    except OcigpuError as error:
        note = f"what its CDI devices added is unknown: {error.line}"
        return Original(config, "", (note,))
    if not devices:
        note = "no present specification defines its CDI devices: they cannot be removed"
        return Original(config, "", (note,))
    return _subtract(config, alone)._replace(devices=devices)


def find_devices(config: dict[str, Any], settings: Settings, bundle: str = "") -> tuple[str, ...]:
    """Return the CDI devices of a config.json: those that it requests, else those whose nodes it contains.

    Specifications of NVIDIA's devices overwrite the variable of the request.  Raises OcigpuError.
    """
    request = parse_request(config, settings, bundle)
    if request.selection == "cdi":
        return request.cdi_devices
    linux = get_object(config, "linux")
    present = {entry.get("path") for entry in get_list(linux, "devices") if isinstance(entry, dict)}
    present |= {entry.get("destination") for entry in get_list(config, "mounts") if isinstance(entry, dict)}
    registry = read_registry(settings)
    found: list[tuple[str, set[str]]] = []
    for name, _ in registry.devices():
        nodes = {node["path"] for node in registry.resolve([name]).edits[-1].get("deviceNodes", ())}
        if nodes and nodes <= present:
            found.append((name, nodes))
    names: list[str] = []
    covered: set[str] = set()
    for name, nodes in sorted(found, key=lambda one: -len(one[1])):  # several names may stand for the same nodes
        if not nodes <= covered:
            names.append(name)
            covered |= nodes
    return tuple(sorted(names))


_CDI_LISTS = (
    ("process", "env"),
    ("linux", "devices"),
    ("linux", "resources", "devices"),
    ("mounts",),
    ("process", "user", "additionalGids"),
    ("hooks", "prestart"),
    ("hooks", "createRuntime"),
    ("hooks", "createContainer"),
    ("hooks", "startContainer"),
    ("hooks", "poststart"),
    ("hooks", "poststop"),
)


def _subtract(found: dict[str, Any], added: dict[str, Any]) -> Original:
    """Take the entries of the lists in ``added`` out of ``found``, the last of equal ones, as far as it has them."""
    wanted = taken = 0
    for path in _CDI_LISTS:
        parent, into = added, found
        for name in path[:-1]:
            parent, into = get_object(parent, name), get_object(into, name)
        entries = get_list(into, path[-1])
        keys = [json.dumps(entry, sort_keys=True) for entry in entries]
        for entry in get_list(parent, path[-1]):
            wanted += 1
            key = json.dumps(entry, sort_keys=True)
            if key in keys:
                place = len(keys) - 1 - keys[::-1].index(key)
                del entries[place], keys[place]
                taken += 1
    if not taken:
        return Original(found, "")
    _drop_empty(found)
    notes = [REPLACED_NOTE]
    if taken < wanted:
        notes.append(
            f"{wanted - taken} of {wanted} edits of the CDI specifications are not in the file: the specifications"
            " have changed since the start, or something else injected the devices"
        )
    return Original(found, "cdi", tuple(notes))


# changes


def list_changes(old: Any, new: Any, path: str = "") -> list[Change]:
    """Return what has to change in one JSON value to become another; time grows with their sizes."""
    if type(old) is not type(new):
        return [Change("replace", path, old, new)]
    if isinstance(old, dict):
        found = []
        for name in [*old, *(name for name in new if name not in old)]:
            pointer = f"{path}/{name.replace('~', '~0').replace('/', '~1')}"
            if name not in new:
                found.append(Change("remove", pointer, old=old[name]))
            elif name not in old:
                found.append(Change("add", pointer, new=new[name]))
            else:
                found += list_changes(old[name], new[name], pointer)
        return found
    if isinstance(old, list):
        return _list_changes(old, new, path)
    return [] if old == new else [Change("replace", path, old, new)]


def _list_changes(old: list[Any], new: list[Any], path: str) -> list[Change]:
    before, after = ([json.dumps(entry, sort_keys=True) for entry in entries] for entries in (old, new))
    removed, added = _missing(before, after), _missing(after, before)
    if not removed and not added:
        return [] if before == after else [Change("replace", path, old, new)]
    return [
        *(Change("remove", f"{path}/{place}", old=old[place]) for place in removed),
        *(Change("add", f"{path}/{place}", new=new[place]) for place in added),
    ]


def _missing(entries: list[str], others: list[str]) -> list[int]:
    """Return the places of entries that the other list has not, or not so often."""
    left = Counter(others)
    places = []
    for place, entry in enumerate(entries):
        left[entry] -= 1
        if left[entry] < 0:
            places.append(place)
    return places
