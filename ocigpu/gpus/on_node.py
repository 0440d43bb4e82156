"""What the programs of a cluster's nodes know of a vendor's GPUs: the device plugin, labels, daemons of MPS."""

from collections.abc import Iterable
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator

from ocigpu.core.errors import printable
from ocigpu.core.facts import HostFacts

Text = Annotated[str, BeforeValidator(lambda value: printable(str(value), 96))]
"""The output of closed code."""


class MigSize(NamedTuple):
    """What a MIG device consists of; engines are counts."""

    memory_mib: int = 0
    multiprocessors: int = 0
    gi_slices: int = 0
    ci_slices: int = 0
    copy: int = 0
    decoder: int = 0
    encoder: int = 0
    jpeg: int = 0
    ofa: int = 0


class GpuDetails(NamedTuple):
    """One GPU: ``clique`` is "<cluster uuid>.<clique id>" or ""; ``fabric_problem``: why it is not known, or "".

    ``links``: NVLinks to other GPUs by their bus ids; ``switch_links``: those to NVSwitches.  ``migs``: by UUID.
    ``persistent``: persistence mode is on, None for unknown.
    """

    uuid: Text
    bus_id: Text = ""
    memory_mib: int = 0
    clique: Text = ""
    switch_links: int = 0
    links: "dict[str, int]" = {}
    migs: "dict[str, MigSize]" = {}
    persistent: bool | None = None
    fabric_problem: Text = ""


class Hardware(NamedTuple):
    """``gpus`` by UUID; ``levels``: NVML's topology level by pairs of UUIDs; ``problem``: why nothing is known."""

    gpus: "dict[str, GpuDetails]" = {}
    levels: "dict[tuple[str, str], int]" = {}
    problem: str = ""


def common_clique(gpus: Iterable[GpuDetails]) -> tuple[str, str]:
    """Return the clique that all GPUs of a node are in, "" for none, and why it is unknown, "" when it is known."""
    found = list(gpus)
    if problem := next((gpu.fabric_problem for gpu in found if gpu.fabric_problem), ""):
        return "", problem
    cliques = sorted({gpu.clique for gpu in found})
    if len(cliques) > 1:
        return "", f"NVLink fabric: the GPUs are in different cliques: {', '.join(each or 'none' for each in cliques)}"
    return (cliques[0] if cliques else ""), ""


class NodeGpus(NamedTuple):
    """``hardware``: details from the driver beyond the facts.

    ``numa``: node by UUID, for the GPUs that have one; ``scores``: how well two GPUs are connected, by their UUIDs in
    both orders; ``styles``: how a GPU is partitioned, by UUID, as a resource may be named after it ("cpx_nps4").
    """

    facts: HostFacts
    hardware: Hardware = Hardware()
    numa: "dict[str, int]" = {}
    scores: "dict[tuple[str, str], int]" = {}
    styles: "dict[str, str]" = {}
