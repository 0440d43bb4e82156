"""Keeps the cluster as the store says, and the store informed of the cluster.

Everything is done again until it has worked: who was killed between any two steps goes on from what the store and the
cluster say, for objects have names that come of the container's id.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ocigpu.kubernetes.cluster.names import namespace_name
from ocigpu.system.service import Backoff, ServiceLog
from ocigpu.tenants.service.cluster import ClusterClient, ClusterError, Follower
from ocigpu.tenants.service.lifecycle import ContainerStanding, judge_output, read_standing, read_time
from ocigpu.tenants.service.models import FINAL
from ocigpu.tenants.service.pods import (
    ID_LABEL,
    ContainerPlan,
    PodOptions,
    object_name,
    plan_pod,
    plan_secrets,
    plan_volumes,
)
from ocigpu.tenants.service.problems import Refusal
from ocigpu.tenants.service.store import CaasStore, StoredContainer
from ocigpu.tenants.tenancy import read_spec

PARALLEL, PARALLEL_OF_ALL = 4, 64
"""Containers that are looked at at one time, of one tenancy and of all: whose objects are slow waits for itself."""
MAX_LOG = 4 << 20
"""Bytes that are kept of what a container printed, its last lines."""
ABOUT_PODS = {"involvedObject.kind": "Pod"}
MAX_TOLD = 64
"""Events of a pod that are kept, the newest: the kubelet counts those that are the same."""
ACTIVE = ("", "Pending", "Provisioning", "Ready")
"""Phases of tenancies that take containers; those before Ready start them later."""


class KeeperPace(NamedTuple):
    """Seconds: between looks at a container whose pod does not come or go, first and longest pause after a failure,
    between chores and between looks at whose the names of tenancies are.
    """

    look: float = 10.0
    first: float = 0.5
    longest: float = 30.0
    chores: float = 60.0
    tenancies: float = 60.0


class Bell:
    """Tells those who wait that something has changed, or that the service ends."""

    def __init__(self) -> None:
        self.closed, self.rings = False, 0
        self._waiting: set[asyncio.Event] = set()

    def ring(self) -> None:
        """Wake everybody who listens; from the event loop only."""
        self.rings += 1
        for event in self._waiting:
            event.set()

    def close(self) -> None:
        """Let streams end."""
        self.closed = True
        self.ring()

    @contextlib.contextmanager
    def hear(self) -> Iterator[asyncio.Event]:
        """Have an event that is set by each ring."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            yield event
        finally:
            self._waiting.discard(event)


async def wait_at_most(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; returns whether it came in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):  # wait_for of Python 3.11 forgets an end that comes with the event
            await event.wait()
    return event.is_set()


class Keeper:
    """Works while :meth:`run` does.

    ``keep_seconds``: after which a container that has ended is deleted; ``pod_seconds``: after which what it has in the
    cluster is, where it counts against quotas: how it ended and what it printed is in the store.
    """

    def __init__(
        self,
        store: CaasStore,
        cluster: ClusterClient,
        options: PodOptions,
        log: ServiceLog,
        keep_seconds: float = 86400.0,
        pace: KeeperPace = KeeperPace(),  # noqa: B008 - immutable
        pod_seconds: float = 600.0,
    ) -> None:
        self.store, self.cluster, self.options, self.log = store, cluster, options, log
        self.keep_seconds, self.pod_seconds, self.pace = keep_seconds, pod_seconds, pace
        self.bell = Bell()
        self.is_gone: Callable[[str], bool] = lambda _node: False
        """Tells whether a node is known to be no longer there."""
        self._pods = Follower(cluster, "Pod", Backoff(pace.first, pace.longest), log, ours=True)
        self._events = Follower(
            cluster, "Event", Backoff(pace.first, pace.longest), log, fields=ABOUT_PODS, take=take_event
        )  # fmt: skip
        self._told: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
        self._due: dict[str, float] = {}
        self._busy: set[str] = set()
        self._places: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(PARALLEL))
        self._pauses: dict[str, Backoff] = {}
        self._all_places = asyncio.Semaphore(PARALLEL_OF_ALL)
        self._wake = asyncio.Event()
        store.listener = self.bell.ring

    @property
    def problem(self) -> str:
        """Why pods cannot be followed, "" where they are."""
        return self._pods.problem

    def look_at(self, container: str, after: float = 0.0) -> None:
        """Have a container looked at, now or in some seconds at the latest."""
        at = asyncio.get_running_loop().time() + after
        self._due[container] = min(at, self._due.get(container, at))
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work())
            group.create_task(self._pods.run(self._has_changed))
            group.create_task(self._events.run(self._was_told))
            group.create_task(self._again_and_again(self._chores, self.pace.chores))
            group.create_task(self._again_and_again(self._look_at_tenancies, self.pace.tenancies))

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                waiting = {one: at for one, at in self._due.items() if one not in self._busy}
                for one in [one for one, at in waiting.items() if at <= loop.time()]:
                    del self._due[one], waiting[one]
                    self._busy.add(one)
                    group.create_task(self._look(one))
                await wait_at_most(self._wake, min((at - loop.time() for at in waiting.values()), default=3600.0))

    async def _look(self, container: str) -> None:
        try:
            if tenancy := self.store.find_tenancy(container):
                async with self._places[tenancy], self._all_places:
                    await self._look_at(container)
            else:
                self._pauses.pop(container, None)
        finally:
            self._busy.discard(container)
            if container in self._due:
                self._wake.set()

    async def _look_at(self, container: str) -> None:
        found = self.store.find(container)  # it has waited meanwhile
        if not found:
            return
        try:
            again = await self._settle(found)
        except ClusterError as error:
            again = self._pause(container)
            self.log.once("cluster", "warning", f"{container}: {error.message}", container=container)
            if not found.made and not found.deleting:
                self.store.note_standing(container, ContainerStanding("accepted", "cluster_unavailable", error.message))
        except Exception as error:  # noqa: BLE001 - a defect with one container is not the end of the others
            again = self._pause(container)
            self.log("error", f"{container}: {type(error).__name__}: {error}", container=container)
        else:
            if again is None:
                self._pauses.pop(container, None)
        if again is not None:
            self.look_at(container, again)

    def _pause(self, container: str) -> float:
        pause = self._pauses.setdefault(container, Backoff(self.pace.first, self.pace.longest))
        return pause.failed(0.0)

    async def _settle(self, container: StoredContainer) -> float | None:
        """Bring a container on; returns the seconds after which to look again, None: when something changes."""
        if container.deleting:
            return await self._remove(container)
        if container.standing.lifecycle in FINAL:
            over = self.store.clock() - (container.standing.finished or container.created) > self.pod_seconds
            if over and _place_of(container) in self._pods.objects:
                await self._clear(container)
            return None
        if not container.made:
            return await self._make(container)
        pod = self._pods.objects.get(_place_of(container))
        if pod is None:
            if self.problem:  # nobody can say
                return None
            pod = await self.cluster.get("Pod", object_name(container.id), namespace_name(container.tenancy))
            if pod is None:
                node = container.standing.node
                why = "node_lost" if node and self.is_gone(node) else "pod_lost"
                lost = ContainerStanding("failed", why, finished=self.store.clock(), node=node)
                self.store.note_standing(container.id, lost)
                return None
        return await self._observe(container, pod)

    async def _observe(self, container: StoredContainer, pod: Mapping[str, Any]) -> float | None:
        events = self._told.get(_place_of(container), {})  # they only tell more
        standing = read_standing(pod, container.created, list(events.values()))
        if standing.lifecycle in FINAL:
            standing = judge_output(standing, await self._keep_log(container))
        self.store.note_standing(container.id, standing)
        return None

    async def _keep_log(self, container: StoredContainer) -> bytes:
        """Keep what a container printed; returns it."""
        kept = bytearray()  # and no list: what a tenant prints has as many lines as it likes
        count = 0
        try:
            async for line in self.cluster.read_log(namespace_name(container.tenancy), object_name(container.id)):
                kept += line.encode("utf-8", "replace") + b"\n"
                if len(kept) > 2 * MAX_LOG:
                    _trim(kept)
                count += 1
                if not count % 256:  # as many as there are may come without anything being waited for
                    await asyncio.sleep(0)
        except ClusterError as error:
            if error.status == 0:
                raise
            return b""  # it never ran: there is none
        _trim(kept)
        self.store.keep_log(container.id, bytes(kept))
        return bytes(kept)

    async def _make(self, container: StoredContainer) -> float | None:
        tenancy = await self._read_tenancy(container)
        if tenancy is None:
            return self._pause(container.id)
        plan = plan_of(container)
        documents = [*plan_secrets(plan, container.secrets or {}), *plan_volumes(plan, self.options)]
        try:
            for document in (*documents, plan_pod(plan, self.options, read_spec(dict(tenancy)))):
                await self.cluster.create(document)
        except ClusterError as error:
            if error.status == 403 and "exceeded quota" in error.message:
                self.store.note_standing(container.id, ContainerStanding("accepted", "quota_exceeded", error.message))
                return self._pause(container.id)
            if error.passing:
                raise
            for document in documents:
                await self.cluster.delete(document)
            denied = ContainerStanding("failed", "admission_denied", error.message, finished=self.store.clock())
            self.store.note_standing(container.id, denied)
            return None
        self.store.note_made(container.id)
        self.store.note_standing(container.id, ContainerStanding("scheduling"))
        return 0.0 if _place_of(container) in self._pods.objects else self.pace.look

    async def _read_tenancy(self, container: StoredContainer) -> Mapping[str, Any] | None:
        """Return the tenancy once it is ready; notes why not."""
        try:
            tenancy = await self.cluster.read_tenancy(container.tenancy)
        except Refusal as problem:
            self.store.note_standing(container.id, ContainerStanding("accepted", "tenancy_not_ready", problem.detail))
            return None
        phase = phase_of(tenancy)
        if phase != "Ready":
            self.store.note_standing(
                container.id, ContainerStanding("accepted", "tenancy_not_ready", f"it is {phase or 'new'}")
            )
            return None
        return tenancy

    async def _remove(self, container: StoredContainer) -> float | None:
        if not await self._clear(container):
            self.store.note_standing(container.id, container.standing._replace(lifecycle="stopping", reason="deleted"))
            return self.pace.look
        self.store.note_gone(container.id)
        return None

    async def _clear(self, container: StoredContainer) -> bool:
        """Delete the objects of a container; returns whether all are gone.

        What its pod uses goes after it.  A pod that has ended uses nothing, and goes last: while it is there, whoever
        comes next looks for the rest.
        """
        plan = plan_of(container)
        others = [*plan_volumes(plan, self.options)[::-1], *plan_secrets(plan, {})]
        ended = container.standing.lifecycle in FINAL
        for document in others if ended else ():
            await self.cluster.delete(document)
        if await self.cluster.delete(plan_pod(plan, self.options)) and await self.cluster.get(
            "Pod", object_name(container.id), namespace_name(plan.tenancy)
        ):
            return False
        for document in () if ended else others:
            await self.cluster.delete(document)
        self._pods.objects.pop(_place_of(container), None)
        return True

    # what the cluster tells

    def _has_changed(self, pod: Mapping[str, Any] | None) -> None:
        changed = self.store.list_live() if pod is None else [str(pod["metadata"].get("labels", {}).get(ID_LABEL))]
        for one in changed:
            self.look_at(one)

    def _was_told(self, event: Mapping[str, Any] | None) -> None:
        """Take in what the cluster tells of pods; it forgets that after an hour, and so do we."""
        if event is None:
            self._told = {}
        for one in self._events.objects.values() if event is None else (event,):
            namespace, name, pod = one["metadata"]["namespace"], one["metadata"]["name"], one["involvedObject"]["name"]
            events = self._told.setdefault((namespace, pod), {})
            events.pop(name, None)
            if (namespace, name) in self._events.objects:
                events[name] = one
                if len(events) > MAX_TOLD:
                    del events[next(iter(events))]
                self.look_at(pod.replace("-", "_", 1))
            if not events:
                del self._told[namespace, pod]

    async def _again_and_again(self, chore: Callable[[], Awaitable[None]], seconds: float) -> None:
        while True:
            try:
                await chore()
                self.log.forget("chores")
            except Exception as error:  # noqa: BLE001 - a full disk, or a defect: containers are looked after all the same
                self.log.failed("chores", error)
            await asyncio.sleep(seconds)

    async def _chores(self) -> None:
        for one in self.store.list_over(self.store.clock() - self.keep_seconds):
            self.store.note_deleting(one)
            self.look_at(one)
        pods = {name for _, name in self._pods.objects}
        for one in self.store.list_over(self.store.clock() - self.pod_seconds):
            if object_name(one) in pods:
                self.look_at(one)
        while self.store.forget():
            await asyncio.sleep(0)

    async def _look_at_tenancies(self) -> None:
        for name in self.store.list_tenancies():
            with contextlib.suppress(ClusterError, Refusal):  # nobody can say now
                self.note_tenancy(name, await self.cluster.read_tenancy(name))

    def note_tenancy(self, name: str, found: Mapping[str, Any] | None) -> None:
        """Take in which tenancy has a name: what another had that was called so is not its."""
        metadata = found["metadata"] if found is not None else {}
        created = read_time(metadata.get("creationTimestamp"))
        for one in self.store.note_tenancy(name, metadata.get("uid", ""), *([] if created is None else [created])):
            self.look_at(one)


def take_event(found: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what is read of an event about a pod of ours, None for others: a cluster has very many."""
    pod = str((found.get("involvedObject") or {}).get("name") or "")
    if not pod.startswith("ctr-"):
        return None
    metadata = {name: found["metadata"].get(name, "") for name in ("namespace", "name")}
    told = {name: found.get(name) for name in ("reason", "eventTime", "lastTimestamp", "firstTimestamp")}
    text = str(found.get("message") or "")[:1000]
    return {"metadata": metadata, "involvedObject": {"name": pod}, "message": text, **told}


def _trim(kept: bytearray) -> None:
    """Leave the last whole lines of MAX_LOG bytes."""
    if len(kept) > MAX_LOG:
        del kept[: kept.find(b"\n", len(kept) - MAX_LOG - 1) + 1]


def _place_of(container: StoredContainer) -> tuple[str, str]:
    return namespace_name(container.tenancy), object_name(container.id)


def plan_of(container: StoredContainer) -> ContainerPlan:
    """Return what the objects of a container are made of."""
    return ContainerPlan(container.id, container.tenancy, container.request)


def phase_of(tenancy: Mapping[str, Any] | None) -> str:
    """Return the phase of a tenancy: Terminating once its deletion was asked for, "" while nobody has set one."""
    if tenancy is None:
        return "deleted"
    deleting = tenancy["metadata"].get("deletionTimestamp")
    return "Terminating" if deleting else str((tenancy.get("status") or {}).get("phase") or "")
