"""NVLink partitions as values, and every decision about them: pure, so that all of it can be tested without hardware.

A partition is a set of GPUs by physical id (NVML's module id, from 1), never by the manager's number for it: numbers
differ from board to board, and daemons of different age list different pairs for one board.
Facts: NVIDIA Fabric Manager User Guide, chapters "Shared NVSwitch" and "Fabric Manager SDK".
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from ocigpu.core.errors import HostError


class FabricError(HostError):
    """The fabric cannot be read or changed; ``status`` is libnvfm's return code, 0 where another part failed."""

    def __init__(self, code: str, message: str, hint: str | None = None, status: int = 0) -> None:
        super().__init__(code, message, hint)
        self.status = status


@dataclass(frozen=True)
class Partition:
    """A set of GPUs that the board can connect.  ``nvlinks``: for each GPU those in use, and the most."""

    partition_id: int
    is_active: bool
    physical_ids: tuple[int, ...]
    nvlinks: tuple[tuple[int, int], ...]

    @property
    def links(self) -> int:
        """The NVLinks of all its GPUs."""
        return sum(now for now, _ in self.nvlinks)

    def overlaps(self, physical_ids: Iterable[int]) -> bool:
        """Tell whether it has one of these GPUs."""
        return not set(self.physical_ids).isdisjoint(physical_ids)


class Fabric(Protocol):
    """A manager's partitions, wherever it runs.  Every method raises FabricError."""

    def list_partitions(self) -> tuple[Partition, ...]:
        """Return the partitions of the board, and which ones are active."""

    def activate(self, physical_ids: Collection[int]) -> Partition:
        """Activate the partition of exactly these GPUs and return it; done already is done.

        Conflicting partitions that are active are named, never deactivated.
        """

    def deactivate(self, physical_ids: Collection[int]) -> None:
        """Deactivate the partition of exactly these GPUs; done already is done."""


class RestorableFabric(Fabric, Protocol):
    """A manager whose active partitions can be given back to it after its restart."""

    def restore(self, active: Collection[Collection[int]], known: Collection[Partition]) -> tuple[Partition, ...]:
        """Say which sets were active when it was restarted (FABRIC_MODE_RESTART=1); returns what it lists then.

        ``known``: what it listed before, because it lists nothing while it waits, and takes its own numbers only.
        """


def show_ids(physical_ids: Iterable[int]) -> str:
    """Return "1,3"."""
    return ",".join(map(str, sorted(physical_ids)))


def find_partition(partitions: Iterable[Partition], physical_ids: Collection[int]) -> Partition | None:
    """Return the partition of exactly these GPUs, None where the board has none."""
    wanted = tuple(sorted(physical_ids))
    return next((one for one in partitions if one.physical_ids == wanted), None)


def must_find(partitions: Sequence[Partition], physical_ids: Collection[int]) -> Partition:
    """Return the partition of exactly these GPUs; raises FabricError (OCIGPU-FAB-4) that says which sets there are."""
    found = find_partition(partitions, physical_ids)
    if found is None:
        same = [show_ids(one.physical_ids) for one in partitions if len(one.physical_ids) == len(set(physical_ids))]
        there = f"of that size it has {'; '.join(same)}" if same else f"its sizes are {show_sizes(partitions)}"
        raise FabricError("OCIGPU-FAB-4", f"GPUs {show_ids(physical_ids)}: no partition of this board: {there}")
    return found


def sizes(partitions: Iterable[Partition]) -> list[int]:
    """Return the sizes that partitions have, smallest first."""
    return sorted({len(one.physical_ids) for one in partitions})


def show_sizes(partitions: Iterable[Partition]) -> str:
    """Return "1, 2, 4, 8": with spaces, because "1,2" are GPUs."""
    return ", ".join(map(str, sizes(partitions)))


def conflicts_of(partitions: Iterable[Partition], wanted: Partition) -> tuple[Partition, ...]:
    """Return the active partitions, other than this one, that have one of its GPUs."""
    return tuple(
        one
        for one in partitions
        if one.is_active and one.physical_ids != wanted.physical_ids and one.overlaps(wanted.physical_ids)
    )


def choose_partition(partitions: Iterable[Partition], free: Collection[int], count: int) -> Partition | None:
    """Return the partition of ``count`` free GPUs that blocks the fewest others, None if there is none.

    It leaves the most larger partitions completely free, counting the largest first; of equals, it has the lowest ids.
    Active partitions do not matter: a free GPU's partition can be deactivated.
    """
    whole = [one for one in partitions if set(one.physical_ids) <= set(free)]
    fitting = [one for one in whole if len(one.physical_ids) == count]
    return min(fitting, key=lambda one: (_damage(whole, one.physical_ids), one.physical_ids), default=None)


def choose_offer(partitions: Sequence[Partition], free: Collection[int]) -> frozenset[int]:
    """Return as many of the free GPUs that each size of which there are enough has a partition among them.

    Who sees only their number, as the scheduler of a cluster, then requests no partition that is not free.
    """
    whole = [one for one in partitions if set(one.physical_ids) <= set(free)]
    there = sizes(whole)
    most = next((size - 1 for size in sizes(partitions) if size <= len(free) and size not in there), len(free))
    largest = max((size for size in there if size <= most), default=0)
    kept = choose_partition(whole, free, largest)
    first = kept.physical_ids if kept else ()
    return frozenset((*first, *sorted(set(free) - set(first))[: most - len(first)]))


def choose_singles(partitions: Iterable[Partition], free: Collection[int], count: int) -> tuple[Partition, ...]:
    """Return the single partitions of ``count`` free GPUs that together spoil least, () where there are too few.

    They have no NVLink to each other: copies between them go over PCIe.
    """
    whole = [one for one in partitions if set(one.physical_ids) <= set(free)]
    singles = sorted((one for one in whole if len(one.physical_ids) == 1), key=lambda one: one.physical_ids)

    def spoils(chosen: tuple[Partition, ...]) -> tuple[tuple[int, ...], list[int]]:
        ids = [one.physical_ids[0] for one in chosen]
        return _damage(whole, ids), ids

    return min(combinations(singles, count), key=spoils, default=()) if count else ()


def show_cost(partitions: Iterable[Partition], free: Collection[int], taken: Collection[int]) -> str:
    """Return how many larger sets of free GPUs are left when these go: "of 8: 1 to 0, of 4: 2 to 1", "" for as many."""
    sets = [one for one in partitions if len(one.physical_ids) > 1 and set(one.physical_ids) <= set(free)]
    before = Counter(len(one.physical_ids) for one in sets)
    after = Counter(len(one.physical_ids) for one in sets if not one.overlaps(taken))
    changed = [size for size in sorted(before, reverse=True) if after[size] != before[size]]
    return ", ".join(f"of {size}: {before[size]} to {after[size]}" for size in changed)


def _damage(whole: Collection[Partition], taken: Collection[int]) -> tuple[int, ...]:
    """Return how many wholly free partitions of each size, largest first, are not so any more when these GPUs go."""
    spoilt = Counter(len(one.physical_ids) for one in whole if one.overlaps(taken))
    return tuple(spoilt[size] for size in sorted({len(one.physical_ids) for one in whole}, reverse=True))


UNLINKED = "no NVLink between these GPUs, copies go over PCIe"
"""What a container with a number of GPUs costs that no partition has."""


@dataclass(frozen=True)
class FabricStep:
    """One step for a set: ``verb`` is reset, deactivate, activate or verify; ``reason`` says why."""

    verb: str
    physical_ids: tuple[int, ...]
    reason: str


def plan_steps(
    partitions: Sequence[Partition], wanted: Sequence[Partition], held: Collection[int] = ()
) -> tuple[FabricStep, ...]:
    """Return the steps that activate these partitions, in a safe order.

    The GPUs are reset while nothing holds them; conflicting partitions are deactivated; then comes the activation, and
    a list that proves it.  All of this precedes the start of a machine, because its driver reads the fabric once.
    ``held``: GPUs in use.  Raises FabricError (OCIGPU-FAB-5) for a conflict with one of those.
    """
    steps: list[FabricStep] = []
    conflicts = {one.physical_ids: one for each in wanted for one in conflicts_of(partitions, each)}
    taken = [one for one in conflicts.values() if one.overlaps(held)]
    if taken:
        raise FabricError("OCIGPU-FAB-5", f"in use: {name_partitions(taken)}")
    missing = [one for one in wanted if not one.is_active]
    touched = {gpu for one in (*missing, *conflicts.values()) for gpu in one.physical_ids}
    if touched:
        steps.append(FabricStep("reset", tuple(sorted(touched)), "no state of a previous user stays in them"))
    steps += [FabricStep("deactivate", ids, "it contains a GPU of the requested set") for ids in conflicts]
    steps += [FabricStep("activate", one.physical_ids, f"{one.links} NVLinks") for one in missing]
    steps += [FabricStep("verify", one.physical_ids, "according to the manager's list") for one in wanted]
    return tuple(steps)


def name_partitions(partitions: Iterable[Partition]) -> str:
    """Return e.g. "partition 3 (GPUs 1,3), partition 8 (GPU 2)"."""
    named = [f"partition {one.partition_id} ({show_gpus(one.physical_ids)})" for one in partitions]
    return ", ".join(named) or "none"


def show_gpus(physical_ids: Collection[int]) -> str:
    """Return "GPU 2" or "GPUs 1,3"."""
    return f"GPU{'s' * (len(physical_ids) > 1)} {show_ids(physical_ids)}"


@dataclass(frozen=True)
class FabricDeviation:
    """A set whose state is not as expected: ``problem`` is missing, unexpected, overlapping, unknown or degraded."""

    problem: str
    physical_ids: tuple[int, ...]
    text: str


def audit_partitions(
    partitions: Sequence[Partition], expected: Iterable[Collection[int]]
) -> tuple[FabricDeviation, ...]:
    """Compare what is active with the sets that should be, and the GPUs' NVLinks with the most that they can have.

    Returns () when all is as it should be.
    """
    wanted = {tuple(sorted(ids)) for ids in expected}
    known = {one.physical_ids: one for one in partitions}
    found = []
    for ids in sorted(wanted):
        if ids not in known:
            found.append(FabricDeviation("unknown", ids, "the board has no such partition"))
        elif not known[ids].is_active:
            found.append(
                FabricDeviation("missing", ids, "should be active: its GPUs have no NVLink, or CUDA error 802")
            )
    active = [one for one in partitions if one.is_active]
    found += [
        FabricDeviation("unexpected", one.physical_ids, "active without an owner")
        for one in active
        if one.physical_ids not in wanted
    ]
    for one, other in combinations(active, 2):
        if one.overlaps(other.physical_ids):
            both = tuple(sorted({*one.physical_ids, *other.physical_ids}))
            found.append(FabricDeviation("overlapping", both, "two active partitions share a GPU: no isolation"))
    pairs = (pair for one in partitions for pair in zip(one.physical_ids, one.nvlinks, strict=False))
    weak = {gpu: f"{now} of {most} NVLinks" for gpu, (now, most) in pairs if now < most}
    found += [FabricDeviation("degraded", (gpu,), text) for gpu, text in sorted(weak.items())]
    return tuple(found)


def check_list(partitions: Sequence[Partition]) -> None:
    """Raise FabricError (OCIGPU-FAB-8) for a list that a manager cannot have meant: it was read by another layout."""
    ids = [one.partition_id for one in partitions]
    for one in partitions:
        if not one.physical_ids or len(set(one.physical_ids)) < len(one.physical_ids) or min(one.physical_ids) < 1:
            raise FabricError(
                "OCIGPU-FAB-8", f"partition {one.partition_id}: GPUs {show_ids(one.physical_ids) or 'none'}"
            )
    if len(set(ids)) < len(ids) or len({one.physical_ids for one in partitions}) < len(ids):
        raise FabricError("OCIGPU-FAB-8", "a partition is listed twice")


def check_isolates(partitions: Sequence[Partition]) -> None:
    """Raise FabricError (OCIGPU-FAB-3) for a manager without single partitions: it cannot keep tenants apart."""
    everywhere = {gpu for one in partitions for gpu in one.physical_ids}
    alone = {one.physical_ids[0] for one in partitions if len(one.physical_ids) == 1}
    if not partitions or everywhere - alone:
        there = f"no partition of their own for {show_gpus(everywhere - alone)}" if partitions else "no partitions"
        raise FabricError("OCIGPU-FAB-3", f"the manager lists {there}")


# Known boards: for simulations and tests.  A real board's partitions come from its manager's list.

_LINKS = 18
BOARDS: dict[str, tuple[int, tuple[tuple[int, ...], ...]]] = {
    "hopper": (0, ((1, 3), (2, 4), (5, 7), (6, 8))),  # H100, H200, H800, H20
    "blackwell": (1, ((1, 2), (3, 4), (5, 6), (7, 8))),  # B200, B300
}
"""First partition id, and the pairs, of boards with eight GPUs (user guide, "Supported partitions")."""


def board_partitions(board: str, active: Collection[Collection[int]] = ()) -> tuple[Partition, ...]:
    """Return the fifteen partitions of a known board, these sets active."""
    first, pairs = BOARDS[board]
    everyone = tuple(range(1, 9))
    sets = (everyone, everyone[:4], everyone[4:], *pairs, *((gpu,) for gpu in everyone))
    wanted = {tuple(sorted(ids)) for ids in active}
    return tuple(
        Partition(first + at, ids in wanted, ids, ((_LINKS, _LINKS) if len(ids) > 1 else (0, 0),) * len(ids))
        for at, ids in enumerate(sets)
    )
