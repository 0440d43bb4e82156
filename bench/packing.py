"""How full a fleet gets with requests of 1, 2, 4 and 8 GPUs in any order, by how the scheduler scores nodes: a model.

kube-scheduler knows the number of a node's free GPUs, not which ones are free.  By default it prefers the node with the
most free processors and memory (NodeResourcesFit, LeastAllocated), which here are in proportion to GPUs: "spread".
packaging/kubernetes/scheduler.yaml prefers the node with the fewest free GPUs that suffice: "pack".  On the node, the
device plugin takes the partition that leaves most larger ones whole, or refuses.  Sources: "Resource Bin Packing",
"Scheduler Performance Tuning", "Scheduler Configuration" in Kubernetes' documentation.
"""

import functools
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from statistics import fmean, median, quantiles

from ocigpu.gpus.nvidia.fabric.partitions import Partition, choose_offer, choose_partition

SIZES = (1, 2, 4, 8)
"""Of requests, equally many of each."""
SETS = (
    (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4), (5, 6, 7, 8), (1, 3), (2, 4), (5, 7), (6, 8),
    *((one,) for one in range(1, 9)),
)  # fmt: skip
"""Partitions of a board with eight H100, by physical id."""
BOARD = tuple(Partition(number, False, ids, ()) for number, ids in enumerate(SETS))
WHOLE = frozenset(range(1, 9))
LOAD, LIVES = 0.85, 20.0
"""GPUs that are requested on average, as a share of all; how long the model runs, in mean lives of a container."""


@functools.cache
def choose(free: frozenset[int], count: int) -> frozenset[int]:
    """Return the partition that the device plugin takes, empty for none."""
    found = choose_partition(BOARD, free, count)
    return frozenset(found.physical_ids if found else ())


@functools.cache
def count_offered(free: frozenset[int]) -> int:
    """Return the number of free GPUs that the device plugin tells the kubelet of."""
    return len(choose_offer(BOARD, free))


class Fleet:
    """Nodes with eight GPUs.  ``refused``: pods whose node had enough free GPUs, but no partition of them.

    ``pack``: how nodes are scored; ``fit``: the plugin withholds free GPUs without which no partition is missing.
    """

    def __init__(self, nodes: int, pack: bool, fit: bool, chance: random.Random) -> None:
        self.free = [WHOLE] * nodes
        self._count: Callable[[frozenset[int]], int] = count_offered if fit else len
        self._nodes_by_count = Counter({len(WHOLE): nodes})
        self.refused = 0
        self._pack, self._chance, self._first = pack, chance, 0
        share = 100 if pack else max(5, 50 - nodes // 125)
        self._enough = max(100, nodes * share // 100)

    def set_free(self, node: int, gpus: frozenset[int]) -> None:
        self._nodes_by_count[self._count(self.free[node])] -= 1
        self._nodes_by_count[self._count(gpus)] += 1
        self.free[node] = gpus

    @property
    def free_gpus(self) -> int:
        return sum(map(len, self.free))

    def place(self, size: int) -> tuple[int, frozenset[int]] | None:
        """Return node and GPUs, None if no node has so many free, or the chosen one no partition."""
        node = self._schedule(size)
        if node is None:
            return None
        gpus = choose(self.free[node], size)
        if not gpus:
            self.refused += 1
            return None
        self.set_free(node, self.free[node] - gpus)
        return node, gpus

    def _schedule(self, size: int) -> int | None:
        """Return the node with the best score of the first that are found, one of equals by chance."""
        if not any(self._nodes_by_count[count] for count in range(size, 9)):
            return None
        found: list[int] = []
        count = len(self.free)
        for node in itertools.chain(range(self._first, count), range(self._first)):
            if self._count(self.free[node]) >= size:
                found.append(node)
                if len(found) == self._enough:
                    self._first = (node + 1) % count
                    break
        best = (min if self._pack else max)(self._count(self.free[node]) for node in found)
        return self._chance.choice([node for node in found if self._count(self.free[node]) == best])


def fill(nodes: int, pack: bool, fit: bool, seed: int) -> dict[str, float]:
    """Request as many GPUs as there are, one container after another that does not end; return what came of it."""
    chance = random.Random(seed)
    fleet, left = Fleet(nodes, pack, fit, chance), 8 * nodes
    asked, placed = dict.fromkeys(SIZES, 0), dict.fromkeys(SIZES, 0)
    while left:
        size = chance.choice([each for each in SIZES if each <= left])
        left -= size
        asked[size] += 1
        placed[size] += fleet.place(size) is not None
    return {
        "full": 1 - fleet.free_gpus / (8 * nodes),
        "eights": placed[8] / max(asked[8], 1),
        "free": fleet.free_gpus,
    }


def churn(nodes: int, pack: bool, fit: bool, seed: int) -> dict[str, float]:
    """Let containers come and go for LIVES; return waits in lives, after a begin of two lives.

    What finds no place waits, and is tried again, the oldest first, when a container ends.
    """
    chance = random.Random(seed)
    fleet, now, numbers = Fleet(nodes, pack, fit, chance), 0.0, itertools.count()
    gap = fmean(SIZES) / (8 * nodes * LOAD)
    ends: list[tuple[float, int, int, frozenset[int]]] = []
    waiting: list[tuple[float, int]] = []
    waits: dict[int, list[float]] = {size: [] for size in SIZES}
    failed = dict.fromkeys(SIZES, 0)
    busy = stuck = 0.0
    arrival = gap
    while now < LIVES:
        then = min(arrival, ends[0][0] if ends else arrival)
        if now > 2:
            free = fleet.free_gpus
            busy += (then - now) * (8 * nodes - free)
            stuck += (then - now) * (free >= 8 and any(size == 8 for _, size in waiting))
        now = then
        if now == arrival:
            waiting.append((now, chance.choice(SIZES)))
            arrival = now + chance.expovariate(1 / gap)
            tried = waiting[-1:]
        else:
            _, _, node, gpus = heapq.heappop(ends)
            fleet.set_free(node, fleet.free[node] | gpus)
            tried = list(waiting)
        for begun, size in tried:
            before = fleet.refused
            place = fleet.place(size)
            if fleet.refused > before:
                waiting.remove((begun, size))
                failed[size] += 1
            if place:
                waiting.remove((begun, size))
                heapq.heappush(ends, (now + chance.expovariate(1.0), next(numbers), *place))
                if begun > 2:
                    waits[size].append(now - begun)
    return {
        "full": busy / (LIVES - 2) / (8 * nodes),
        "stuck": stuck / (LIVES - 2),
        "median8": median(waits[8]),
        "late8": quantiles(waits[8], n=20)[18],
        "late1": quantiles(waits[1], n=20)[18],
        "waiting": sum(size == 8 for _, size in waiting),
        **{f"failed{size}": failed[size] / (failed[size] + len(waits[size])) for size in SIZES},
    }
