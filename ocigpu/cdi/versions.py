"""Versions of the CDI specification: which exist, which one a specification needs, which engines accept it."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NamedTuple
else:
    from ocigpu.core.record import NamedTuple

VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
"""Every version that the reference library knows, oldest first (its table of versions; CDI SPEC.md "Version")."""
EARLIEST = "0.3.0"
"""The first that is accepted: a specification that needs nothing newer has it as its minimum."""
NEWEST = VERSIONS[-1]

_RANK = {version: rank for rank, version in enumerate(VERSIONS)}
_DIGITS = frozenset("0123456789")


class Requirement(NamedTuple):
    """One place of a specification that a version is needed for; ``why`` completes "the version is needed for"."""

    version: str
    where: str
    why: str


class Engine(NamedTuple):
    """Releases of an engine, and the newest version of a CDI specification that they accept."""

    name: str
    releases: str
    newest: str


# The table of versions in the CDI library that each release vendors (vendor/.../container-device-interface, files
# pkg/cdi/version.go, pkg/cdi/spec.go and specs-go), read at the release tags of github.com/containerd/containerd,
# moby/moby, moby/buildkit, containers/podman, cri-o/cri-o and containerd/nerdctl.
ENGINES = (
    Engine("containerd", "1.7.0 to 1.7.11", "0.5.0"),
    Engine("containerd", "1.7.12 to 1.7.15", "0.6.0"),
    Engine("containerd", "1.7.16 to 1.7.26", "0.7.0"),
    Engine("containerd", "1.7.27 and later 1.7", "0.8.0"),
    Engine("containerd", "2.0.0 to 2.0.4", "0.8.0"),
    Engine("containerd", "2.0.5 to 2.2.0", "1.0.0"),
    Engine("containerd", "2.2.1 and later", "1.1.0"),
    Engine("CRI-O", "1.24", "0.3.0"),
    Engine("CRI-O", "1.25 to 1.27", "0.5.0"),
    Engine("CRI-O", "1.28 to 1.29", "0.6.0"),
    Engine("CRI-O", "1.30", "0.7.0"),
    Engine("CRI-O", "1.31 to 1.32", "0.8.0"),
    Engine("CRI-O", "1.33 to 1.34", "1.0.0"),
    Engine("CRI-O", "1.35 and later", "1.1.0"),
    Engine("Podman", "4.1 to 4.2", "0.4.0"),
    Engine("Podman", "4.3 to 4.6", "0.5.0"),
    Engine("Podman", "4.7 to 5.0", "0.6.0"),
    Engine("Podman", "5.1", "0.7.0"),
    Engine("Podman", "5.2 to 5.4", "0.8.0"),
    Engine("Podman", "5.5 to 5.8", "1.0.0"),
    Engine("Docker", "25.0.0 to 25.0.16", "0.6.0"),
    Engine("Docker", "25.0.17 and later 25.0", "0.8.0"),
    Engine("Docker", "26.0", "0.6.0"),
    Engine("Docker", "26.1 to 27.3", "0.7.0"),
    Engine("Docker", "27.4 to 28.0", "0.8.0"),
    Engine("Docker", "28.1 to 29.1", "1.0.0"),
    Engine("Docker", "29.2 and later", "1.1.0"),
    Engine("BuildKit", "0.19 to 0.20", "0.8.0"),
    Engine("BuildKit", "0.21 to 0.26", "1.0.0"),
    Engine("BuildKit", "0.27 and later", "1.1.0"),
    Engine("nerdctl", "2.1.0 to 2.2.0", "1.0.0"),
    Engine("nerdctl", "2.2.1 and later", "1.1.0"),
)


def parse_version(text: str) -> str:
    """Return the version that ``text`` names ("0.6.0", also for "v0.6.0"), "" if it names none that is known."""
    version = text.removeprefix("v")
    return version if version in _RANK else ""


def is_older(version: str, other: str) -> bool:
    """Tell whether ``version`` is older than ``other``; both are of :data:`VERSIONS`."""
    return _RANK[version] < _RANK[other]


def minimum_version(spec: "dict[str, Any]") -> str:
    """Return the oldest version that a specification of canonical form may declare."""
    rank = _RANK[EARLIEST]
    for need in _requirements(spec):
        if _RANK[need.version] > rank:
            rank = _RANK[need.version]
            if need.version == NEWEST:
                break
    return VERSIONS[rank]


def requirements(spec: "dict[str, Any]") -> "tuple[Requirement, ...]":
    """Return every place of a specification of canonical form that needs more than version 0.3.0, in its order."""
    return tuple(_requirements(spec))


def engines_that_refuse(version: str) -> "tuple[Engine, ...]":
    """Return the releases of engines that accept only specifications older than ``version``."""
    return tuple(engine for engine in ENGINES if is_older(engine.newest, version))


def _requirements(spec: "dict[str, Any]") -> "Iterator[Requirement]":
    if "." in spec.get("kind", "").partition("/")[2]:
        yield Requirement("0.6.0", "kind", 'a class with "."')
    if spec.get("annotations"):
        yield Requirement("0.6.0", "annotations", "annotations")
    if spec.get("containerEdits"):
        yield from _edits_requirements(spec["containerEdits"], "containerEdits")
    for index, device in enumerate(spec.get("devices", ())):
        if device.get("name", "")[:1] in _DIGITS:
            yield Requirement("0.5.0", f"devices[{index}].name", "a device name that begins with a digit")
        if device.get("annotations"):
            yield Requirement("0.6.0", f"devices[{index}].annotations", "annotations")
        if device.get("containerEdits"):
            yield from _edits_requirements(device["containerEdits"], f"devices[{index}].containerEdits")


def _edits_requirements(edits: "dict[str, Any]", where: str) -> "Iterator[Requirement]":
    for index, mount in enumerate(edits.get("mounts", ())):
        if mount.get("type"):
            yield Requirement("0.4.0", f"{where}.mounts[{index}].type", "the type of a mount")
    for index, node in enumerate(edits.get("deviceNodes", ())):
        if node.get("hostPath"):
            yield Requirement("0.5.0", f"{where}.deviceNodes[{index}].hostPath", "the host path of a device node")
    if edits.get("additionalGids"):
        yield Requirement("0.7.0", f"{where}.additionalGids", "additional groups")
    if edits.get("netDevices"):
        yield Requirement("1.1.0", f"{where}.netDevices", "network devices")
    rdt = edits.get("intelRdt")
    if rdt is None:
        return
    yield Requirement("0.7.0", f"{where}.intelRdt", "intelRdt")
    if "schemata" in rdt:  # present is enough, also when empty
        yield Requirement("1.1.0", f"{where}.intelRdt.schemata", "intelRdt.schemata")
    if rdt.get("enableMonitoring"):
        yield Requirement("1.1.0", f"{where}.intelRdt.enableMonitoring", "intelRdt.enableMonitoring")
