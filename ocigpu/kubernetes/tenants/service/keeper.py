"""Keeps the cluster as the store says, and the store informed of the cluster.

Everything is done again until it has worked: who was killed between any two steps goes on from what the store and the
cluster say, for objects have names that come of the container's id.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ocigpu.kubernetes.tenants.service.cluster import ClusterClient, ClusterError
from ocigpu.kubernetes.tenants.service.lifecycle import ContainerStanding, read_standing
from ocigpu.kubernetes.tenants.service.models import FINAL
from ocigpu.kubernetes.tenants.service.pods import (
    ID_LABEL,
    ContainerPlan,
    NfsVolume,
    PodOptions,
    namespace_of,
    object_name,
    plan_pod,
    plan_secret,
    plan_volumes,
)
from ocigpu.kubernetes.tenants.service.problems import Refusal
from ocigpu.kubernetes.tenants.service.store import CaasStore, StoredContainer
from ocigpu.system.service import Backoff, ServiceLog

PARALLEL = 16
MAX_LOG = 4 << 20
"""Bytes that are kept of what a container printed, its last lines."""
ACTIVE = ("", "Pending", "Provisioning", "Ready")
"""Phases of tenancies that take containers; those before Ready start them later."""


class KeeperPace(NamedTuple):
    """Seconds: between looks at a container that starts, first and longest pause after a failure, of a day's chores."""

    look: float = 10.0
    first: float = 0.5
    longest: float = 30.0
    chores: float = 60.0


class Bell:
    """Tells those who wait that something has changed, or that the service ends."""

    def __init__(self) -> None:
        self.closed = False
        self._waiting: set[asyncio.Event] = set()

    def ring(self) -> None:
        """Wake everybody who listens; from the event loop only."""
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
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


class Keeper:
    """Works while :meth:`run` does.  ``keep_seconds``: after which a container that has ended is deleted."""

    def __init__(
        self,
        store: CaasStore,
        cluster: ClusterClient,
        options: PodOptions,
        log: ServiceLog,
        keep_seconds: float = 86400.0,
        pace: KeeperPace = KeeperPace(),  # noqa: B008 - immutable
    ) -> None:
        self.store, self.cluster, self.options, self.log = store, cluster, options, log
        self.keep_seconds, self.pace = keep_seconds, pace
        self.bell = Bell()
        self.problem = "the cluster was not asked yet"
        self._pods: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._due: dict[str, float] = {}
        self._pauses: dict[str, Backoff] = {}
        self._wake = asyncio.Event()
        store.listener = self.bell.ring

    def look_at(self, container: str, after: float = 0.0) -> None:
        """Have a container looked at, now or in some seconds at the latest."""
        at = asyncio.get_running_loop().time() + after
        self._due[container] = min(at, self._due.get(container, at))
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work())
            group.create_task(self._follow_pods())
            group.create_task(self._chores())

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            due = itertools.islice((one for one, at in self._due.items() if at <= loop.time()), PARALLEL)
            if found := list(due):
                for one in found:
                    del self._due[one]
                await asyncio.gather(*map(self._look, found))
            else:
                await wait_at_most(self._wake, min((at - loop.time() for at in self._due.values()), default=3600.0))

    async def _look(self, container: str) -> None:
        found = self.store.find(container)
        if not found:
            self._pauses.pop(container, None)
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
            return None
        if not container.made:
            return await self._make(container)
        pod = self._pods.get(_place_of(container))
        if pod is None:
            if self.problem:  # nobody can say
                return None
            pod = await self.cluster.get("Pod", object_name(container.id), namespace_of(container.tenancy))
            if pod is None:
                self.store.note_standing(
                    container.id,
                    ContainerStanding("failed", "pod_lost", finished=self.store.clock(), node=container.standing.node),
                )
                return None
        return await self._observe(container, pod)

    async def _observe(self, container: StoredContainer, pod: Mapping[str, Any]) -> float | None:
        try:
            events = await self.cluster.read_events(namespace_of(container.tenancy), object_name(container.id))
        except ClusterError:
            events = []  # they only tell more
        standing = read_standing(pod, container.created, events)
        if standing.lifecycle in FINAL:
            await self._keep_log(container)
        self.store.note_standing(container.id, standing)
        return self.pace.look if standing.lifecycle not in (*FINAL, "running") else None

    async def _keep_log(self, container: StoredContainer) -> None:
        lines: deque[str] = deque()  # what a tenant prints has as many lines as it likes
        size = 0
        try:
            async for line in self.cluster.read_log(namespace_of(container.tenancy), object_name(container.id)):
                lines.append(line)
                size += len(line) + 1
                while size > MAX_LOG:
                    size -= len(lines.popleft()) + 1
        except ClusterError as error:
            if error.status == 0:
                raise
            return  # it never ran: there is none
        self.store.keep_log(container.id, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))

    async def _make(self, container: StoredContainer) -> float | None:
        tenancy = await self._read_tenancy(container)
        if tenancy is None:
            return self._pause(container.id)
        plan = plan_of(container)
        documents = [*([plan_secret(plan, container.secrets)] if container.secrets else []), *plan_volumes(plan)]
        try:
            for document in (*documents, plan_pod(plan, self.options)):
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
        return 0.0 if _place_of(container) in self._pods else self.pace.look

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
        plan = plan_of(container)
        pod = plan_pod(plan, self.options)
        if await self.cluster.delete(pod) and await self.cluster.get(
            "Pod", object_name(container.id), namespace_of(plan.tenancy)
        ):
            self.store.note_standing(container.id, container.standing._replace(lifecycle="stopping", reason="deleted"))
            return self.pace.look
        for document in (*plan_volumes(plan)[::-1], *([plan_secret(plan, {})] if plan.secret_names else [])):
            await self.cluster.delete(document)
        self._pods.pop(_place_of(container), None)
        self.store.note_gone(container.id)
        return None

    # what the cluster tells

    async def _follow_pods(self) -> None:
        pause = Backoff(self.pace.first, self.pace.longest)
        while True:
            try:
                items, version = await self.cluster.list_objects("Pod", ours=True)
                self._pods = {_place(pod): pod for pod in items}
                self.problem = ""
                self.log.forget("watch")
                pause.reset()
                for one in self.store.list_live():
                    self.look_at(one.id)
                async for change, pod in self.cluster.watch("Pod", version, ours=True):
                    self._take(change, pod)
            except ClusterError as error:
                self.problem = error.message
                self.log.once("watch", "warning", f"pods cannot be followed: {error.message}")
                if error.status != 410:  # 410: the list is read again at once
                    await asyncio.sleep(pause.failed(0.0))

    def _take(self, change: str, pod: Mapping[str, Any]) -> None:
        if change == "DELETED":
            self._pods.pop(_place(pod), None)
        else:
            self._pods[_place(pod)] = pod
        self.look_at(str(pod["metadata"].get("labels", {}).get(ID_LABEL)))

    async def _chores(self) -> None:
        while True:
            for one in self.store.list_over(self.store.clock() - self.keep_seconds):
                self.store.note_deleting(one.id)
                self.look_at(one.id)
            self.store.forget()
            await asyncio.sleep(self.pace.chores)


def _place(pod: Mapping[str, Any]) -> tuple[str, str]:
    """Return what a pod is known by: its labels are whoever's may write pods in any tenancy's namespace."""
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def _place_of(container: StoredContainer) -> tuple[str, str]:
    return namespace_of(container.tenancy), object_name(container.id)


def plan_of(container: StoredContainer) -> ContainerPlan:
    """Return what the objects of a container are made of."""
    request = container.request
    return ContainerPlan(
        container.id,
        container.tenancy,
        request["image"],
        request["gpus"],
        request["command"],
        request["args"],
        request["env"],
        request["secrets"],
        [NfsVolume(one["server"], one["path"], one["target"], one["read_only"]) for one in request["mounts"]],
        request["timeout_seconds"],
        request["restart"],
    )


def phase_of(tenancy: Mapping[str, Any] | None) -> str:
    """Return the phase of a tenancy: Terminating once its deletion was asked for, "" while nobody has set one."""
    if tenancy is None:
        return "deleted"
    metadata = tenancy.get("metadata") or {}
    deleting = metadata.get("deletionTimestamp") if isinstance(metadata, Mapping) else metadata.deletionTimestamp
    return "Terminating" if deleting else str((tenancy.get("status") or {}).get("phase") or "")
