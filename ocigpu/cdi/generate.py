"""A whole CDI specification: what a source of devices found, with "all", in order, checked, dated by fingerprint."""

import posixpath

from ocigpu.cdi.check import check_spec
from ocigpu.cdi.edits import hook_options, make_draft
from ocigpu.cdi.versions import is_older, minimum_version, requirements
from ocigpu.core import rawjson
from ocigpu.core.errors import CdiError, OcigpuError, printable
from ocigpu.core.gate import CAPABILITIES_ANNOTATION, permitted_capabilities
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import CAPABILITIES
from ocigpu.core.vendors import FIRST
from ocigpu.gpus.fingerprint import ANNOTATION, fingerprint_text, read_fingerprint
from ocigpu.gpus.vendors import find_mode, find_vendors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from ocigpu.cdi.edits import Draft, Edits
    from ocigpu.core.settings import Settings
    from ocigpu.gpus.offer import GenerateOptions

ALL = "all"
COHERENT_FLAG = "enable-coherent-annotations"
EMPTY_DEVICE = "invalid device, empty device edits"
"""The CDI library's text for a device without content; programs look for it to learn that there is nothing to give."""
_LISTS = ("env", "deviceNodes", "netDevices", "hooks", "mounts")
_SORT_KEYS = {"deviceNodes": "path", "mounts": "containerPath"}
_MAX_REASONS = 4
_HINTS = {
    "gds": "GPUDirect Storage needs its kernel module: modprobe nvidia-fs",
    "gdrcopy": "GDRCopy needs its kernel module: modprobe gdrdrv",
    "mofed": "RDMA devices need their driver, which makes /dev/infiniband/uverbs0: modprobe ib_uverbs",
    "nvswitch": "Only hosts with NVSwitches have /dev/nvidia-nvswitch0, made by the loaded driver.",
    "imex": "The driver makes channel 0 when it is loaded with NVreg_CreateImexChannel0=1.",
}
"""What to do when a mode finds nothing."""


class Generated(NamedTuple):
    """``spec``: valid, in canonical form; ``notes``: warnings; ``skipped``: devices left out, with the reason."""

    spec: "dict[str, Any]"
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


class Part(NamedTuple):
    """One of several specifications; ``suffix`` is added to the name of the file, before its extension."""

    suffix: str
    generated: Generated


def generate(options: "GenerateOptions", settings: "Settings") -> Generated:
    """Return the specification of this host's devices that the options request; raises as :func:`generate_all`."""
    return generate_all(options, settings)[0].generated


def generate_all(options: "GenerateOptions", settings: "Settings") -> tuple[Part, ...]:
    """Return the requested specification, then the further ones with its devices sorted into kinds.

    Reads the host only.  Raises CdiError OCIGPU-CDI-7 when the host has no devices or the options cannot be met, and
    the errors of the source: HostError without a driver, RequestError for a missing device.
    """
    mode, vendor = find_mode(options.mode, options.vendor, settings)
    if options.vendor.lower() in vendor.kinds:
        options = options._replace(vendor="")
    # read first: what changes while the devices are read makes the specification old, not wrong for ever
    fingerprint = fingerprint_text(read_fingerprint(vendor.name, settings))
    made = make_draft(vendor.offer(options._replace(mode=mode), settings), options, hook_options(options, settings))
    parts = [Part("", assemble(made, options, fingerprint))]
    if COHERENT_FLAG in options.feature_flags and mode == "nvml":
        parts += coherent_parts(made, options, fingerprint)
    permitted = permitted_capabilities(settings)
    for part in parts if vendor.name == "nvidia" and permitted != set(CAPABILITIES) else ():
        if "annotations" in part.generated.spec:  # containers may have no others: see ocigpu.cdi.conditions
            part.generated.spec["annotations"][CAPABILITIES_ANNOTATION] = ",".join(sorted(permitted))
    return tuple(parts)


def generate_host(options: "GenerateOptions", settings: "Settings") -> tuple[Part, ...]:
    """Return what :func:`generate_all` does and, unless the options choose, specifications of other vendors' GPUs.

    Raises as that; why another vendor's devices cannot be described is a note.
    """
    first, *parts = generate_all(options, settings)
    if options.mode == "auto" and not options.vendor:
        here = find_mode("auto", "", settings)[1].name
        for name in find_vendors(settings):
            if name in (here, FIRST):
                continue
            try:
                parts.append(Part(f".{name}", generate_all(options._replace(vendor=name), settings)[0].generated))
            except OcigpuError as error:
                notes = (*first.generated.notes, f"{name}: {error.message}")
                first = first._replace(generated=first.generated._replace(notes=notes))
    return (first, *parts)


def generate_within(
    limit: str,
    options: "GenerateOptions",
    settings: "Settings",
    generate: "Callable[[GenerateOptions, Settings], tuple[Part, ...]]" = generate_all,
) -> tuple[Part, ...]:
    """Generate with a version that engines read, at most ``limit`` ("": unknown).

    Devices that need more are not given up for that: only a version that the options name is a limit.
    """
    if options.max_version or not limit:
        return generate(options, settings)
    try:
        return generate(options._replace(max_version=limit), settings)
    except CdiError:
        return generate(options, settings)


def coherent_parts(draft: "Draft", options: "GenerateOptions", fingerprint: str) -> list[Part]:
    """Return a specification of the GPUs with coherent memory and one of those without, if there are such GPUs.

    The class of their devices is "gpu.coherent" or "gpu.noncoherent".  Raises CdiError OCIGPU-CDI-7.  Pure.
    """
    parts = []
    for word, coherent in (("coherent", True), ("noncoherent", False)):
        devices = tuple(device for device in draft.devices if device.coherent is coherent)
        if devices:
            kind = options._replace(device_class=f"{options.device_class or draft.device_class}.{word}")
            only = draft._replace(devices=devices, notes=(), skipped=())
            parts.append(Part(f".{word}", assemble(only, kind, fingerprint)))
    return parts


def assemble(draft: "Draft", options: "GenerateOptions", fingerprint: str) -> Generated:
    """Return the specification of a draft; raises CdiError OCIGPU-CDI-7.  Pure."""
    kind = f"{options.vendor or draft.vendor}/{options.device_class or draft.device_class}"
    devices = {device.name: device.edits for device in draft.devices}
    wants_all = options.all_device and draft.all_device and "none" not in options.device_ids
    for name, edits in devices.items():
        if not any(edits.values()):
            raise _nothing(kind, f'failed add device "{name}": {EMPTY_DEVICE}', draft, options.mode)
    if not devices:
        cause = f'"{ALL}": {EMPTY_DEVICE}' if wants_all else "invalid spec, no devices"
        raise _nothing(kind, cause, draft, options.mode)
    common = merge_edits([draft.common])
    if wants_all and ALL not in devices:
        devices[ALL] = _join_links(merge_edits(devices.values()))
    finished: dict[int, Edits] = {}  # the names of one device share their edits: the work is done once
    known = _keys(common)
    for edits in devices.values():
        if id(edits) not in finished:
            finished[id(edits)] = sort_edits(_without(merge_edits([edits]), known))
    spec: dict[str, Any] = {
        "cdiVersion": "",
        "kind": kind,
        "annotations": {ANNOTATION: fingerprint},
        "devices": [{"name": name, "containerEdits": finished[id(devices[name])]} for name in sorted(devices)],
        "containerEdits": sort_edits(common),
    }
    notes = (*draft.notes, *_lower_version(spec, options.max_version or draft.max_version))
    errors = check_spec(spec).errors
    if errors:
        raise CdiError("OCIGPU-CDI-7", f"generate {kind}: {errors[0].text}")
    return Generated(spec, notes, draft.skipped)


def _nothing(kind: str, message: str, draft: "Draft", mode: str) -> CdiError:
    reasons = [printable(text, 300) for text in draft.skipped]
    more = [f"and {len(reasons) - _MAX_REASONS} more"] if len(reasons) > _MAX_REASONS else []
    why = f" ({'; '.join([*reasons[:_MAX_REASONS], *more])})" if reasons else ""
    return CdiError("OCIGPU-CDI-7", f"generate {kind}: {message}{why}", _HINTS.get(mode))


def _key(item: "Any") -> str:
    return item if isinstance(item, str) else rawjson.dump(sorted(item.items()))


def _keys(edits: "Edits") -> dict[str, set[str]]:
    return {name: {_key(item) for item in edits[name]} for name in _LISTS if edits.get(name)}


def merge_edits(many: "Iterable[Edits]") -> "Edits":
    """Return the edits one after the other, each entry once, without empty fields; the last intelRdt counts."""
    lists: dict[str, dict[str, Any]] = {name: {} for name in _LISTS}
    gids: set[int] = set()
    merged: Edits = {}
    seen: set[int] = set()
    for edits in many:
        if id(edits) in seen:
            continue
        seen.add(id(edits))
        for name, entries in lists.items():
            for item in edits.get(name, ()):
                entries.setdefault(_key(item), item)
        gids.update(edits.get("additionalGids", ()))
        if "intelRdt" in edits:
            merged["intelRdt"] = edits["intelRdt"]
    merged.update({name: list(entries.values()) for name, entries in lists.items() if entries})
    if gids:
        merged["additionalGids"] = sorted(gids)
    return merged


def _without(edits: "Edits", known: dict[str, set[str]]) -> "Edits":
    """Return the edits without what every container gets anyway; all of them if nothing else would be left."""
    left = dict(edits)
    for name, keys in known.items():
        if name in left:
            left[name] = [item for item in left[name] if _key(item) not in keys]
            if not left[name]:
                del left[name]
    return left or edits


def _join_links(edits: "Edits") -> "Edits":
    """Return the edits with all entries of the vendor's create-symlinks hook in one: each entry is a process."""
    joined: dict[str, dict[str, Any]] = {}
    for entry in edits.get("hooks", ()):
        arguments = entry.get("args", [])
        place = arguments.index("create-symlinks") + 1 if "create-symlinks" in arguments and "+" not in arguments else 0
        key = _key({**entry, "args": arguments[:place]} if place else entry)
        if key in joined:
            joined[key]["args"].extend(arguments[place:])
        else:
            joined[key] = {**entry, "args": list(arguments)} if place else entry
    return {**edits, "hooks": list(joined.values())} if joined else edits


def sort_edits(edits: "Edits") -> "Edits":
    """Return the edits with nodes and mounts by depth of their place in the container, then by that path."""
    result = dict(edits)
    for name, field in _SORT_KEYS.items():
        if name in result:
            paths = [(posixpath.normpath(item[field]), item) for item in result[name]]
            result[name] = [item for _, item in sorted(paths, key=lambda pair: (pair[0].count("/"), pair[0]))]
    return result


def _lower_version(spec: "dict[str, Any]", newest: str) -> list[str]:
    """Give the specification the oldest sufficient version; drop optional parts to stay below ``newest``.

    Returns a note on the dropped parts; raises CdiError OCIGPU-CDI-7 when the devices themselves need more.
    """
    spec["cdiVersion"] = minimum_version(spec)
    if not newest or not is_older(newest, spec["cdiVersion"]):
        return []
    left_out = []
    if is_older(newest, "0.7.0"):
        parts = [spec["containerEdits"], *(device["containerEdits"] for device in spec["devices"])]
        if [part.pop("additionalGids") for part in parts if "additionalGids" in part]:
            left_out.append("additionalGids (users that are not root may be unable to open nodes of a group)")
    if is_older(newest, "0.6.0"):
        del spec["annotations"]
        left_out.append("annotations (later changes of the host cannot be detected)")
    spec["cdiVersion"] = minimum_version(spec)
    for need in requirements(spec):
        if is_older(newest, need.version):
            raise CdiError(
                "OCIGPU-CDI-7",
                f"generate {spec['kind']}: {need.where} needs CDI {need.version} for {need.why}",
                f"Leave --max-version out, or raise it to {spec['cdiVersion']}.",
            )
    return [f"left out for CDI {newest}: {', '.join(left_out)}"]
