"""What a specification or cached facts depend on, read in about a millisecond: a :data:`Fingerprint`.

Small files of procfs and sysfs and directory listings only: no NVML, no library search, nothing is opened that would
wake a GPU.  The boot id is not part of it: what was true before a reboot is true after it when nothing else changed.
"""

from binascii import crc32

from ocigpu.errors import quoted
from ocigpu.host.devices import IMEX_DRIVER, MAX_NODES, NodeReader
from ocigpu.host.gpus import Capabilities
from ocigpu.host.pci import read_drm_numbers
from ocigpu.host.procfs import (
    Permissions,
    ProcGpu,
    parse_devices,
    parse_permissions,
    read_kernel_version,
    read_proc_gpus,
)
from ocigpu.host.tree import Roots, Tree, find_roots, read_node, read_text, settings_digest
from ocigpu.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    Fingerprint = tuple[tuple[str, str], ...]

ANNOTATION = "ocigpu/fingerprint"
"""Annotation of a specification that holds the text of the fingerprint it was made from."""

_DIRECTORIES = ("nvidia-caps", IMEX_DRIVER)
"""Directories of nodes in /dev; what is in them counts, not that they are there."""
_TEXT_LIMIT = 4096
_PLURALS = {"gpus": "the set of GPUs has", "mig": "MIG devices have", "imex": "IMEX channels have"}
_SENTENCES = {
    "uuids": "GPUs have been replaced: their UUIDs are others",
    "nodes": "device numbers or nodes have changed",
    "groups": "IOMMU groups have changed",
    "settings": "settings have changed (driver root, device root, loader cache or simulated host)",
}


def read_fingerprint(source: str, settings: Settings) -> "Fingerprint":
    """Return (key, value) pairs that change when what this source of devices tells may have changed.

    The first pair is ("source", source), the last one stands for the settings.  Values are "" where there is nothing
    (an absent driver is no error) and never hold white space.  A source without a reader has these two pairs only.
    Raises HostError (OCIGPU-HOST-3) when a file of the driver is there and cannot be read.
    """
    reader = READERS.get(source)
    pairs = reader(settings) if reader else ()
    return (("source", source), *pairs, ("settings", settings_digest(settings)))


def digest(lines: "Iterable[str]") -> str:
    """Return how many lines there are and a checksum of them, "8-1a2b3c4d"; "" when there is none."""
    items = list(lines)
    return f"{len(items)}-{crc32(chr(10).join(items).encode('utf-8', 'surrogateescape')):08x}" if items else ""


def read_nvidia(settings: Settings) -> "Fingerprint":
    """Return the pairs of the NVIDIA driver: its version, GPUs, MIG devices, device numbers and nodes.

    ``uuids`` is "" while the driver does not tell every UUID: it shows question marks for a GPU that nothing uses.
    """
    roots = find_roots(settings)
    proc_driver = f"{roots.proc}/driver/nvidia"
    gpus = read_proc_gpus(proc_driver)
    tree = Tree(roots.dev)
    known = all(gpu.uuid for gpu in gpus)
    return (
        ("driver", read_kernel_version(roots.proc, roots.sys)),
        ("gpus", digest(f"{gpu.bus_id} {gpu.minor} {gpu.excluded}" for gpu in gpus)),
        ("uuids", digest(gpu.uuid for gpu in gpus) if known else ""),
        ("mig", digest(_mig_devices(roots, tree, gpus))),
        ("nodes", digest(_numbers_and_nodes(roots, tree, gpus))),
        ("imex", digest(tree.names(f"/dev/{IMEX_DRIVER}"))),
    )


def _mig_devices(roots: Roots, tree: Tree, gpus: tuple[ProcGpu, ...]) -> list[str]:
    """Return a line for each compute instance, and for each GPU instance that has none.

    The driver makes their capability directories with the instances.  Their minors follow from their ids.
    """
    capabilities = Capabilities(roots.proc, f"{roots.proc}/driver/nvidia", NodeReader(tree, (), Permissions()))
    found = []
    for gpu in gpus:
        for gpu_instance in capabilities.gpu_instances(gpu.minor):
            instances = capabilities.compute_instances(gpu.minor, gpu_instance) or [-1]
            found += [f"{gpu.minor} {gpu_instance} {instance}" for instance in instances]
    return found


def _numbers_and_nodes(roots: Roots, tree: Tree, gpus: tuple[ProcGpu, ...]) -> list[str]:
    """Return lines for majors, the permissions that the driver gives, each GPU's DRM numbers, and nodes.

    Nothing without a driver and nodes of one: what else the host has in /dev/infiniband does not matter then.
    """
    majors = parse_devices(read_text(f"{roots.proc}/devices") or "")
    names = [name for name in tree.names("/dev") if name.startswith("nvidia") or name == "gdrdrv"]
    names = [name for name in names if name not in _DIRECTORIES]
    if not (majors or names or gpus):
        return []
    permissions = parse_permissions(read_text(f"{roots.proc}/driver/nvidia/params") or "")
    lines = [f"{name} {major}" for name, major in majors]
    lines.append(f"permissions {permissions.mode:o} {permissions.uid} {permissions.gid}")
    paths = [f"/dev/{name}" for name in names]
    for directory in (f"/dev/{_DIRECTORIES[0]}", "/dev/infiniband"):
        paths += [f"{directory}/{name}" for name in tree.names(directory)]
    for gpu in gpus:
        for name, major, minor in read_drm_numbers(roots.sys, gpu.bus_id):
            lines.append(f"{gpu.bus_id} {name} {major}:{minor}")
            paths.append(f"/dev/dri/{name}")
    return lines + [f"{path} {read_node(tree.host(path))}" for path in paths[:MAX_NODES]]


def _read_amd(settings: Settings) -> "Fingerprint":
    from ocigpu.host.amd import read_amd_fingerprint  # here: a host has GPUs of one vendor, as a rule

    return read_amd_fingerprint(settings)


def _read_vfio(settings: Settings) -> "Fingerprint":
    from ocigpu.host.vfio import read_vfio_fingerprint

    return read_vfio_fingerprint(settings)


def _read_csv(settings: Settings) -> "Fingerprint":
    from ocigpu.host.tegra import read_csv_fingerprint

    return read_csv_fingerprint(settings)


def _read_wsl(settings: Settings) -> "Fingerprint":
    from ocigpu.host.wsl import read_wsl_fingerprint

    return read_wsl_fingerprint(settings)


READERS: "dict[str, Callable[[Settings], Fingerprint]]" = {
    "nvidia": read_nvidia,
    "amd": _read_amd,
    "vfio": _read_vfio,
    "csv": _read_csv,
    "wsl": _read_wsl,
}
"""For each source of devices what reads its pairs."""


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

    A key that only one of them has came with another version of this program and says nothing about the host.
    """
    values = dict(new)
    changed = {key: value for key, value in old if key in values and values[key] != value}
    if "" in (changed.get("uuids"), values.get("uuids")) or "gpus" in changed:
        changed.pop("uuids", None)  # unknown is no change, and another set of GPUs has other UUIDs
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
    if source not in READERS:
        return (f"its devices are of a source that this version does not know: {quoted(source)}",)
    changes = explain_changes(old, read_fingerprint(source, settings))
    return (_SENTENCES["settings"],) if _SENTENCES["settings"] in changes else changes
