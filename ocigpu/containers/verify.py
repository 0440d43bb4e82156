"""``ocigpu verify``: what of the host's driver a container can reach, tried from inside, against what it was given."""

import os
from typing import Any, NamedTuple

from ocigpu.containers.inside import Answer, ProbedFile, is_reached, look_inside
from ocigpu.containers.live import Grant, Live, host_nodes, read_now
from ocigpu.containers.report import read_refused, read_unanswered
from ocigpu.core.facts import DeviceNode, Library
from ocigpu.gpus.nvidia.plan import library_path

AS_GRANTED, LESS, MORE = "as granted", "less", "more"
_HOST_FILE, _OTHER_FILE, _NOTHING = "the host's file", "another file", "nothing"


class NodeRow(NamedTuple):
    """One device of the host: ``granted``: "node", "rules" (it may be opened, without a node of its own) or "no".

    ``inside``, ``opened``, ``made``: as :class:`ocigpu.containers.inside.Answer` has them.  ``verdict``: one of
    :data:`AS_GRANTED`, :data:`LESS`, :data:`MORE`; ``why``: the deviation from the grant, as text.
    """

    what: str
    path: str
    number: str
    granted: str
    inside: str
    opened: str
    made: str
    verdict: str
    why: str

    @property
    def is_dull(self) -> bool:
        """Whether the node is neither granted nor present, as most of the hundreds of MIG and IMEX nodes."""
        return (self.granted, self.inside, self.verdict) == ("no", "", AS_GRANTED)


class LibraryRow(NamedTuple):
    """One driver library: whether it was ``granted``, and what the container has at its ``path``."""

    name: str
    path: str
    granted: bool
    inside: str
    verdict: str
    why: str


class Verified(NamedTuple):
    """The test results.  ``version``: of the driver.  ``unanswered``: what requested GPUs in vain, as text.

    ``refused``: the same if settings are the reason.
    """

    grant: Grant
    nodes: list[NodeRow]
    libraries: list[LibraryRow]
    version: str
    unanswered: str = ""
    refused: str = ""

    @property
    def verdict(self) -> str:
        """The worst of all: more is worse than less; a request in vain is less, unless the settings refuse it."""
        found = {row.verdict for row in self.nodes} | {row.verdict for row in self.libraries}
        found |= {LESS} if self.unanswered else set()
        return MORE if MORE in found else LESS if LESS in found else AS_GRANTED


def verify(live: Live) -> Verified:
    """Try every device and library of the host's driver in a container; changes nothing.

    Opens each device that the container may open, for reading, and closes it at once: a GPU that sleeps wakes.
    Raises OcigpuError.
    """
    now = read_now(live)
    grant = now.grant
    known = host_nodes(live.facts)
    by_number = {(node.major, node.minor): path for path, node in grant.nodes.items()}
    asked = [
        (what, number, node._replace(container_path=by_number.get(number, node.container_path)))
        for number, (what, node) in known.items()
    ]
    libraries = [
        (library, grant.libraries.get(library.host_path) or library_path(library, live.image))
        for library in live.facts.libraries
    ]
    sonames = [f"{path.rpartition('/')[0]}/{library.soname}" for library, path in libraries]
    seen = look_inside(live.inside, [node for _, _, node in asked], [path for _, path in libraries] + sonames)
    nodes = [
        judge_node(what, node, node.container_path in grant.nodes, number in grant.numbers, answer)
        for (what, number, node), answer in zip(asked, seen.nodes, strict=True)
    ]
    files = seen.files[: len(libraries)]
    by_soname = seen.files[len(libraries) :]
    rows = [
        _library_row(library, path, library.host_path in grant.libraries, file, linked)
        for (library, path), file, linked in zip(libraries, files, by_soname, strict=True)
    ]
    unanswered = refused = ""
    if not grant.devices and not now.started.devices:  # else they were taken away again
        unanswered = read_unanswered(live.config, live.found.bundle, live.settings, []).source
        refused = "" if unanswered else read_refused(live.config, live.found.bundle, live.settings)
    return Verified(grant, nodes, rows, live.facts.driver_version, unanswered, refused)


def judge_node(what: str, node: DeviceNode, has_node: bool, allowed: bool, answer: Answer) -> NodeRow:
    """Return the row of one device; ``allowed``: it was granted, ``has_node``: with a node of its own.  Pure."""
    reached = is_reached(answer.opened) or is_reached(answer.made)
    verdict, why = AS_GRANTED, ""
    if not allowed and reached:
        way = "opening its node" if is_reached(answer.opened) else "making a node of its number"
        verdict, why = MORE, f"not granted, and reached by {way}"
    elif allowed and has_node and not is_reached(answer.opened):
        verdict, why = LESS, f"granted, but {_missing(node, answer)}"
    granted = "no" if not allowed else "node" if has_node else "rules"
    number = f"{node.major}:{node.minor}"
    return NodeRow(what, node.container_path, number, granted, *answer, verdict, why)


def _missing(node: DeviceNode, answer: Answer) -> str:
    if not answer.found:
        return f"there is no {node.container_path}"
    if not answer.opened:
        return f"{node.container_path} is another file ({answer.found})"
    if answer.opened == "EPERM":
        return "its device cgroup denies it"
    return f"opening it is refused ({answer.opened})"


def _library_row(library: Library, path: str, granted: bool, file: ProbedFile, linked: ProbedFile) -> LibraryRow:
    try:
        status = os.stat(library.host_path)
        host = (status.st_dev, status.st_ino)
    except FileNotFoundError:  # gone since the facts were read
        host = (0, 0)

    def kind(found: ProbedFile) -> str:
        if not found.kind:
            return _NOTHING
        return _HOST_FILE if (found.device, found.inode) == host else _OTHER_FILE

    inside = kind(file)
    verdict, why = AS_GRANTED, ""
    if granted and inside != _HOST_FILE:
        verdict, why = LESS, f"granted, but there is {inside} at {path}"
    elif granted and library.soname and kind(linked) != _HOST_FILE:
        verdict, why = LESS, f"the name that programs open, {library.soname}, leads to {kind(linked)}"
    elif not granted and inside == _HOST_FILE:
        verdict, why = MORE, "not granted, but present"
    return LibraryRow(library.name, path, granted, inside, verdict, why)


def to_json(verified: Verified) -> dict[str, Any]:
    """Return the test results as JSON data."""
    return {
        "verdict": verified.verdict,
        "granted_by": verified.grant.by,
        "devices": list(verified.grant.devices),
        "driver_version": verified.version,
        "unanswered": verified.unanswered,
        "refused": verified.refused,
        "nodes": [row._asdict() for row in verified.nodes],
        "libraries": [row._asdict() for row in verified.libraries],
    }
