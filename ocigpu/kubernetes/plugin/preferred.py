"""The answer to GetPreferredAllocation: which free devices a container should get.  Pure.

Whole GPUs are chosen by how well they are connected ("aligned"), replicas and MIG devices by how busy their GPUs are
(the policy "distributed" or "packed").  The kubelet treats the answer as advice, but fails the pod on an error.  So
every request that can be answered gets an answer, also one about unknown devices.
"""

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence

from ocigpu.core.errors import RequestError
from ocigpu.kubernetes.node.devices import PluginDevice

Scores = Mapping[tuple[str, str], int]
"""How well two GPUs are connected, by their UUIDs in both orders; what is missing counts 0."""

MAX_COMBINATIONS = 4000
"""Up to so many choices all are looked at: all of 8 GPUs, pairs of 64."""
MAX_STARTS = 64
MAX_IMPROVED = 8
MAX_EXCHANGES = 256


def prefer(
    devices: Sequence[PluginDevice],
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    scores: Scores,
    policy: str = "distributed",
) -> tuple[str, ...]:
    """Return ``size`` ids of the available ones, with those that must be included first.

    ``devices``: those of the resource; healthy ones come first.  Raises RequestError (OCIGPU-KUBE-2) only when too few
    ids are available, or more must be included than requested.
    """
    included = dict.fromkeys(must_include)
    required = tuple(included)
    offered = [id_ for id_ in dict.fromkeys(available) if id_ not in included]
    if len(required) > size or len(required) + len(offered) < size:
        raise RequestError(
            "OCIGPU-KUBE-2",
            f"preferred allocation of {size} devices: {len(required)} must be included, {len(offered)} others are free",
        )
    known = {device.id: device for device in devices}
    wanted = size - len(required)
    healthy = [id_ for id_ in offered if id_ not in known or not known[id_].error]
    candidates = sorted(healthy if len(healthy) >= wanted else offered, key=lambda id_: _order(known.get(id_), id_))
    if any(device.is_replica or device.instance for device in devices):
        return required + _by_policy(known, candidates, wanted, policy)
    return required + _aligned(candidates, required, wanted, scores)


def _order(device: PluginDevice | None, id_: str) -> tuple[tuple[int, ...], str, int, str]:
    """Sort by ordinal, then by the number of the replica; unknown devices come last."""
    if device is None:
        return (1 << 30,), id_, 0, id_
    replica = id_.removeprefix(device.uuid).strip(":")
    ordinal = tuple(int(part) for part in device.ordinal.split(":") if part.isdigit())
    return ordinal, device.uuid, int(replica) if replica.isdigit() else -1, id_


# replicas and MIG devices


def _by_policy(
    known: Mapping[str, PluginDevice], candidates: Sequence[str], wanted: int, policy: str
) -> tuple[str, ...]:
    """Take one after another from the GPU with the fewest (packed: the most) devices given away.

    Among equally busy GPUs, the one with the fewest picks in this call comes first.
    """
    gpus = {id_: known[id_].gpu if id_ in known else id_ for id_ in candidates}
    given = dict.fromkeys(gpus.values(), 0)
    for device in known.values():
        if device.gpu in given:
            given[device.gpu] += 1
    for id_ in candidates:
        given[gpus[id_]] -= id_ in known
    taken = dict.fromkeys(given, 0)
    queues: dict[str, deque[tuple[int, str]]] = {}
    for position, id_ in enumerate(candidates):
        queues.setdefault(gpus[id_], deque()).append((position, id_))
    chosen: list[str] = []
    sign = -1 if policy == "packed" else 1
    for _ in range(wanted):
        best = min(queues, key=lambda gpu: (sign * given[gpu], taken[gpu], queues[gpu][0]))
        chosen.append(queues[best].popleft()[1])
        if not queues[best]:
            del queues[best]
        given[best] += 1
        taken[best] += 1
    return tuple(chosen)


# whole GPUs


def _aligned(candidates: Sequence[str], required: Sequence[str], wanted: int, scores: Scores) -> tuple[str, ...]:
    """Return the candidates that are best connected with each other and the required ones.

    Among equally good choices, the one that cuts the fewest connections to the remaining free GPUs wins: the next
    container gets one of those.
    """
    if wanted in (0, len(candidates)):
        return tuple(candidates)[:wanted]
    names = [*candidates, *required]
    matrix = [[scores.get((one, other), 0) if one != other else 0 for other in names] for one in names]
    free = range(len(candidates))
    fixed = range(len(candidates), len(names))
    few = math.comb(len(candidates), wanted) <= MAX_COMBINATIONS
    choices = itertools.combinations(free, wanted) if few else iter(_grown(matrix, len(candidates), fixed, wanted))
    total = [sum(row[: len(candidates)]) for row in matrix]
    best = max(choices, key=lambda chosen: _worth(matrix, total, chosen, fixed))  # the first of equals
    return tuple(candidates[position] for position in best)


def _worth(
    matrix: Sequence[Sequence[int]], total: Sequence[int], chosen: Sequence[int], fixed: Sequence[int]
) -> tuple[int, int]:
    """Return (score within the choice, minus the score between it and what stays free)."""
    among = sum(matrix[one][other] for one, other in itertools.combinations(chosen, 2))
    with_fixed = sum(matrix[one][other] for one in chosen for other in fixed)
    torn = sum(total[one] for one in chosen) - 2 * among
    return among + with_fixed, -torn


def _grown(matrix: Sequence[Sequence[int]], count: int, fixed: Sequence[int], wanted: int) -> "list[tuple[int, ...]]":
    """Return good choices where there are too many to examine all: grown from each GPU, improved by exchanges.

    Takes time in the order of count^3 at most, a fraction of a second for 64 GPUs.
    """
    base = [sum(matrix[position][other] for other in fixed) for position in range(count)]
    grown = set()
    for start in range(min(count, MAX_STARTS)):
        gains = [gain + matrix[start][position] for position, gain in enumerate(base)]
        chosen = [start]
        left = [position for position in range(count) if position != start]
        while len(chosen) < wanted:
            best = max(left, key=gains.__getitem__)
            left.remove(best)
            chosen.append(best)
            row = matrix[best]
            gains = [gain + row[position] for position, gain in enumerate(gains)]
        grown.add(tuple(sorted(chosen)))
    total = [0] * count  # what a choice tears does not matter yet
    ranked = sorted(grown, key=lambda each: (-_worth(matrix, total, each, fixed)[0], each))
    return [_exchanged(matrix, base, each) for each in ranked[:MAX_IMPROVED]] + ranked


def _exchanged(matrix: Sequence[Sequence[int]], base: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """Exchange a chosen GPU for a free one as long as that gains."""
    inside = list(chosen)
    gains = [base[position] + sum(matrix[position][other] for other in inside) for position in range(len(base))]
    for _ in range(MAX_EXCHANGES):
        outside = [position for position in range(len(base)) if position not in inside]
        pairs = ((gains[new] - gains[old] - matrix[new][old], -new, -old) for old in inside for new in outside)
        gain, new, old = max(pairs)
        if gain <= 0:
            break
        new, old = -new, -old
        inside[inside.index(old)] = new
        gains = [gain - matrix[position][old] + matrix[position][new] for position, gain in enumerate(gains)]
    return tuple(sorted(inside))
