"""Versions of the CDI specification: which exist, which one a specification needs, which engines accept it."""

import os

from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

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


def read_engines() -> "tuple[Engine, ...]":
    """Return the specification versions that releases of engines accept: engines.toml."""
    import tomllib

    with open(os.path.join(os.path.dirname(__file__), "engines.toml"), "rb") as file:
        table = tomllib.load(file)
    return tuple(Engine(name, *row) for name, rows in table.items() for row in rows)


def engines_that_refuse(version: str) -> "tuple[Engine, ...]":
    """Return the releases of engines that accept only specifications older than ``version``."""
    return tuple(engine for engine in read_engines() if is_older(engine.newest, version))


def newest_version(engine: str, release: str) -> "str | None":
    """Return the newest version of a specification that a release of an engine reads.

    "" for one from before CDI, None when this program does not know.  ``release``: e.g. "4.3.1", "27.3.1".
    """
    version = _numbers(release)
    entries = [entry for entry in read_engines() if entry.name.lower().replace("-", "") == engine]
    if not version or not entries:
        return None
    for entry in entries:
        first, _, rest = entry.releases.partition(" ")
        low = _numbers(first)
        if rest.startswith("to "):
            high = _numbers(rest[3:])
            if low <= version[: len(low)] and version[: len(high)] <= high:
                return entry.newest
        elif rest.startswith("and later"):
            series = _numbers(rest.removeprefix("and later").strip())
            if low <= version[: len(low)] and version[: len(series)] == series:
                return entry.newest
        elif version[: len(low)] == low:
            return entry.newest
    return "" if version < _numbers(entries[0].releases.partition(" ")[0]) else None


def _numbers(text: str) -> tuple[int, ...]:
    parts = "".join(character if character in _DIGITS else " " for character in text.partition("-")[0]).split()
    return tuple(map(int, parts)) if text[:1] in _DIGITS else ()


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
