"""Makes the cluster match the store, and records in the store what happens in the cluster.

Each step is repeated until it succeeds.  A service that was killed between two steps continues from the state of store
and cluster: the names of objects are derived from the container's id.

Of several replicas with one database, all follow the cluster and the store, and one keeps containers: the one whose
session holds the lock (Database.hold).  The store takes changes of that session alone; before each change of the
cluster it must have proved itself within the last second.  A thread of its own waits for that session, so that requests
to this replica are answered meanwhile.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.cluster.names import TENANCY_LABEL, namespace_name
from ocigpu.kubernetes.cluster.quantity import parse_quantity
from ocigpu.system.service import Backoff, ServiceLog
from ocigpu.tenants.service.cluster import ClusterClient, ClusterError, WatchCache
from ocigpu.tenants.service.database import KeepingLostError, cause_of
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
"""Containers reconciled at one time, of one tenancy and of all: a slow tenancy delays only itself."""
MAX_LOG = 4 << 20
"""Bytes kept of a container's output: its last lines."""
ABOUT_PODS = {"involvedObject.kind": "Pod"}
MAX_TOLD = 64
"""Events kept of a pod, the newest: the kubelet counts equal ones in one Event."""
PROVED = 1.0
"""Seconds for which the session that keeps containers is known to hold its lock."""
ACTIVE = ("", "Pending", "Provisioning", "Ready")
"""Phases of tenancies that take containers; those before Ready start them later."""
Words = ParamSpec("Words")
Result = TypeVar("Result")


class ReconcilerPace(NamedTuple):
    """Seconds: between looks at a container whose pod does not come or go, first and longest pause after a failure,
    between chores and between looks at whose the names of tenancies are; between looks at what other replicas did.
    """

    look: float = 10.0
    first: float = 0.5
    longest: float = 30.0
    chores: float = 60.0
    tenancies: float = 60.0
    replicas: float = 0.2


class ChangeSignal:
    """Wakes its subscribers when something has changed, or when the service ends."""

    def __init__(self) -> None:
        self.closed, self.count = False, 0
        self._listeners: set[asyncio.Event] = set()

    def notify(self) -> None:
        """Wake all subscribers; from the event loop only."""
        self.count += 1
        for event in self._listeners:
            event.set()

    @property
    def listeners(self) -> int:
        """Return the number of subscribers."""
        return len(self._listeners)

    def close(self) -> None:
        """Let streams end."""
        self.closed = True
        self.notify()

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[asyncio.Event]:
        """Yield an event that each notification sets."""
        event = asyncio.Event()
        self._listeners.add(event)
        try:
            yield event
        finally:
            self._listeners.discard(event)


async def wait_at_most(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; returns whether it came in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):  # wait_for of Python 3.11 forgets an end that comes with the event
            await event.wait()
    return event.is_set()


class Reconciler:
    """Reconciles containers while :meth:`run` runs.

    ``keep_seconds``: after which a container that has ended is deleted.  ``pod_seconds``: after which its objects
    in the cluster are deleted, because they count against quotas; the store keeps exit status and output.
    """

    def __init__(
        self,
        store: CaasStore,
        cluster: ClusterClient,
        options: PodOptions,
        log: ServiceLog,
        keep_seconds: float = 86400.0,
        pace: ReconcilerPace = ReconcilerPace(),  # noqa: B008 - immutable
        pod_seconds: float = 600.0,
    ) -> None:
        self.store, self.cluster, self.options, self.log = store, cluster, options, log
        self._shared, self._proved = store, 0.0
        self.is_keeping = False
        """Whether this replica keeps containers; ``store`` is then that of its session."""
        self.beside: list[Callable[[int], Coroutine[Any, Any, None]]] = []
        """What runs while this replica keeps containers, from the event on at which it began."""
        self.keep_seconds, self.pod_seconds, self.pace = keep_seconds, pod_seconds, pace
        self.signal = ChangeSignal()
        self.is_gone: Callable[[str], bool] = lambda _node: False
        """Whether a node is known to have left the cluster."""
        self._pods = WatchCache(cluster, "Pod", Backoff(pace.first, pace.longest), log, ours=True)
        self._events = WatchCache(
            cluster, "Event", Backoff(pace.first, pace.longest), log, fields=ABOUT_PODS, take=take_event
        )  # fmt: skip
        self.pod_events: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
        self._due: dict[str, float] = {}
        self._busy: set[str] = set()
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(PARALLEL))
        self._pauses: dict[str, Backoff] = {}
        self._all_slots = asyncio.Semaphore(PARALLEL_OF_ALL)
        self._wake = asyncio.Event()
        self._seen: int | None = None
        self._deleting: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "keep")
        self.unknown = ""
        """The pods whose containers the store does not know, as far as this replica keeps containers; "" for none."""

    @property
    def problem(self) -> str:
        """Why pods cannot be watched, "" if they are."""
        return self._pods.problem

    def look_at(self, container: str, after: float = 0.0) -> None:
        """Have a container reconciled, at the latest after some seconds, if this replica keeps containers."""
        if not self.is_keeping:  # the other one sees it in the store
            return
        at = asyncio.get_running_loop().time() + after
        self._due[container] = min(at, self._due.get(container, at))
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        loop = asyncio.get_running_loop()
        self._shared.listener = lambda: loop.call_soon_threadsafe(self.signal.notify)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pods.run(self._take_pod_change))
                group.create_task(self._events.run(self._take_event))
                group.create_task(self._keep())
                if self._shared.database.shared:
                    group.create_task(self._repeat(self._follow_replicas, self.pace.replicas))
        finally:
            self._thread.shutdown(cancel_futures=True)  # the store is closed next

    async def _keep(self) -> None:
        """Keep containers whenever this replica gets the lock."""
        while True:
            try:
                since = self._shared.events.last()
                held = await asyncio.to_thread(self._shared.hold)  # it may wait for a server
                if held:
                    await self._keep_in(held, since)
            except* (HostError, DBAPIError, KeepingLostError) as errors:
                self.log.once("keeping", "warning", f"containers are not kept here: {cause_of(errors.exceptions[0])}")
            await asyncio.sleep(self.pace.replicas)

    async def _keep_in(self, held: CaasStore, since: int) -> None:
        """Keep containers until the session of ``held`` ends, which raises an ExceptionGroup."""
        self.store, self.is_keeping, self._seen = held, True, since
        self.log.forget("keeping")
        try:
            for one in await self._do(held.list_live):
                self.look_at(one)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._work())
                group.create_task(self._repeat(self._chores, self.pace.chores))
                group.create_task(self._repeat(self._look_at_tenancies, self.pace.tenancies))
                for each in self.beside:
                    group.create_task(each(since))
                while held.database.shared:
                    await asyncio.sleep(self.pace.replicas)
                    await self._do(held.database.read, sa.select(1))
        finally:
            self.store, self.is_keeping, self.unknown = self._shared, False, ""
            self._due.clear()

    async def _do(self, work: Callable[Words, Result], *words: Words.args, **named: Words.kwargs) -> Result:
        """Do something with the store of the keeping session, which proves that session; in the thread for it."""

        def work_in_thread() -> Result:
            begun = time.monotonic()
            found = work(*words, **named)
            self._proved = begun
            return found

        return await asyncio.get_running_loop().run_in_executor(self._thread, work_in_thread)

    async def _note(self, container: str, standing: ContainerStanding) -> None:
        await self._do(self.store.note_standing, container, standing)

    async def _check_keeping(self) -> None:
        """Raise KeepingLostError or DBAPIError, before a change of the cluster, if another replica may keep containers.

        This process may have been stopped since the last time.
        """
        if self._shared.database.shared and time.monotonic() - self._proved > PROVED:
            await self._do(self.store.database.read, sa.select(1))

    async def _create(self, document: Mapping[str, Any]) -> None:
        await self._check_keeping()
        await self.cluster.create(document)

    async def _delete(self, document: Mapping[str, Any]) -> bool:
        await self._check_keeping()
        return await self.cluster.delete(document)

    async def _follow_replicas(self) -> None:
        """Look at what other replicas have stored: events for streams; for the keeper, containers to make or delete."""
        found = self._shared.events.after(self._seen) if self._seen is not None else []
        self._seen = found[-1].id if found else self._shared.events.last() if self._seen is None else self._seen
        if found:
            self.signal.notify()
        deleting = set(self._shared.list_deleting()) if self.is_keeping else set()
        for one in (*(event.container for event in found if event.kind == "created"), *deleting - self._deleting):
            self.look_at(one)
        self._deleting = deleting

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                waiting = {one: at for one, at in self._due.items() if one not in self._busy}
                for one in [one for one, at in waiting.items() if at <= loop.time()]:
                    del self._due[one], waiting[one]
                    self._busy.add(one)
                    group.create_task(self._reconcile_in_turn(one))
                await wait_at_most(self._wake, min((at - loop.time() for at in waiting.values()), default=3600.0))

    async def _reconcile_in_turn(self, container: str) -> None:
        try:
            if tenancy := await self._do(self.store.find_tenancy, container):
                async with self._slots[tenancy], self._all_slots:
                    await self._reconcile(container)
            else:
                self._pauses.pop(container, None)
                await self._remove_left(container)
        except (DBAPIError, KeepingLostError) as error:
            self.log.once("store", "warning", f"{container}: {cause_of(error)}", container=container)
            self.look_at(container, self._pause(container))
        finally:
            self._busy.discard(container)
            if container in self._due:
                self._wake.set()

    async def _reconcile(self, container: str) -> None:
        found = await self._do(self.store.find, container)  # read again: it may have changed while this waited
        if not found:
            return
        try:
            again = await self._settle(found)
        except ClusterError as error:
            again = self._pause(container)
            self.log.once("cluster", "warning", f"{container}: {error.message}", container=container)
            if not found.made and not found.deleting:
                await self._note(container, ContainerStanding("accepted", "cluster_unavailable", error.shown))
        except (DBAPIError, KeepingLostError):
            raise
        except Exception as error:  # noqa: BLE001 - an error with one container must not stop the others
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
        """Do the next step for a container; returns the seconds until the next look, None: when something changes."""
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
            if self.problem:  # unknown while pods are not watched
                return None
            pod = await self.cluster.get("Pod", object_name(container.id), namespace_name(container.tenancy))
            if pod is None:
                node = container.standing.node
                why = "node_lost" if node and self.is_gone(node) else "pod_lost"
                lost = ContainerStanding("failed", why, finished=self.store.clock(), node=node)
                await self._note(container.id, lost)
                return None
        return await self._observe(container, pod)

    async def _observe(self, container: StoredContainer, pod: Mapping[str, Any]) -> float | None:
        events = self.pod_events.get(_place_of(container), {})  # they only add detail
        standing = read_standing(pod, container.created, list(events.values()))
        if standing.lifecycle in FINAL:
            standing = judge_output(standing, await self.keep_log(container))
        await self._note(container.id, standing)
        return None

    async def keep_log(self, container: StoredContainer) -> bytes:
        """Store a container's output; returns it."""
        kept = bytearray()  # not a list of lines: a tenant may print any number of them
        count = 0
        try:
            async for line in self.cluster.read_log(namespace_name(container.tenancy), object_name(container.id)):
                kept += line.encode("utf-8", "replace") + b"\n"
                if len(kept) > 2 * MAX_LOG:
                    _trim(kept)
                count += 1
                if not count % 256:  # lines that have already arrived do not yield to the event loop
                    await asyncio.sleep(0)
        except ClusterError as error:
            if error.status == 0:
                raise
            return b""  # it never ran, so it has no log
        _trim(kept)
        await self._do(self.store.keep_log, container.id, bytes(kept))
        return bytes(kept)

    async def _make(self, container: StoredContainer) -> float | None:
        tenancy = await self._read_tenancy(container)
        if tenancy is None:
            return self._pause(container.id)
        plan = plan_of(container)
        documents = [*plan_secrets(plan, container.secrets or {}), *plan_volumes(plan, self.options)]
        try:
            for document in (*documents, plan_pod(plan, self.options, read_spec(dict(tenancy)))):
                await self._create(document)
        except ClusterError as error:
            if error.status == 403 and "exceeded quota" in error.message:
                await self._note(container.id, ContainerStanding("accepted", "quota_exceeded", error.message))
                return self._pause(container.id)
            if error.passing:
                raise
            for document in documents:
                await self._delete(document)
            denied = ContainerStanding("failed", "admission_denied", error.message, finished=self.store.clock())
            await self._note(container.id, denied)
            return None
        await self._do(self.store.note_made, container.id)
        await self._note(container.id, ContainerStanding("scheduling"))
        return 0.0 if _place_of(container) in self._pods.objects else self.pace.look

    async def _read_tenancy(self, container: StoredContainer) -> Mapping[str, Any] | None:
        """Return the tenancy if it is ready; else records why it is not and returns None."""
        try:
            tenancy = await self.cluster.read_tenancy(container.tenancy)
        except Refusal as problem:
            await self._note(container.id, ContainerStanding("accepted", "tenancy_not_ready", problem.detail))
            return None
        phase = phase_of(tenancy)
        if phase != "Ready":
            await self._note(
                container.id, ContainerStanding("accepted", "tenancy_not_ready", f"it is {phase or 'new'}")
            )
            return None
        return tenancy

    async def _remove(self, container: StoredContainer) -> float | None:
        if not await self._clear(container):
            await self._note(container.id, container.standing._replace(lifecycle="stopping", reason="deleted"))
            return self.pace.look
        await self._do(self.store.note_gone, container.id)
        return None

    async def _clear(self, container: StoredContainer) -> bool:
        """Delete the objects of a container; returns whether all are gone.

        What a running pod uses is deleted after the pod.  A pod that has ended uses nothing, and is deleted last: while
        it exists, the next pass still looks for the other objects.
        """
        plan = plan_of(container)
        others = [*plan_volumes(plan, self.options)[::-1], *plan_secrets(plan, {})]
        ended = container.standing.lifecycle in FINAL
        for document in others if ended else ():
            await self._delete(document)
        if await self._delete(plan_pod(plan, self.options)) and await self.cluster.get(
            "Pod", object_name(container.id), namespace_name(plan.tenancy)
        ):
            return False
        for document in () if ended else others:
            await self._delete(document)
        self._pods.objects.pop(_place_of(container), None)
        return True

    async def _remove_left(self, container: str) -> None:
        """Delete the pod of a container that is gone: it was made by a replica that had just lost its lock."""
        found = await self._do(self.store.find_any, container)
        if found and found.gone and _place_of(found) in self._pods.objects:
            with contextlib.suppress(ClusterError):  # the next change of the pod brings it here again
                await self._clear(found)

    # changes in the cluster

    def _take_pod_change(self, pod: Mapping[str, Any] | None) -> None:
        if not self.is_keeping:  # who begins to keep looks at all
            return
        if pod is not None:
            self.look_at(str(pod["metadata"].get("labels", {}).get(ID_LABEL)))
            return
        try:
            for one in self._shared.list_live():
                self.look_at(one)
        except (DBAPIError, KeepingLostError):
            asyncio.get_running_loop().call_later(self.pace.look, self._take_pod_change, None)

    def _take_event(self, event: Mapping[str, Any] | None) -> None:
        """Record an Event about a pod; the cluster drops Events after an hour, and so does this."""
        if event is None:
            self.pod_events = {}
        for one in self._events.objects.values() if event is None else (event,):
            namespace, name, pod = one["metadata"]["namespace"], one["metadata"]["name"], one["involvedObject"]["name"]
            events = self.pod_events.setdefault((namespace, pod), {})
            events.pop(name, None)
            if (namespace, name) in self._events.objects:
                events[name] = one
                if len(events) > MAX_TOLD:
                    del events[next(iter(events))]
                self.look_at(pod.replace("-", "_", 1))
            if not events:
                del self.pod_events[namespace, pod]

    async def _repeat(self, chore: Callable[[], Awaitable[None]], seconds: float) -> None:
        while True:
            try:
                await chore()
                self.log.forget("chores")
            except (DBAPIError, KeepingLostError) as error:
                self.log.once("chores", "error", f"store: {cause_of(error)}")
            except Exception as error:  # noqa: BLE001 - a full disk or a defect must not stop the work on containers
                self.log.failed("chores", error)
            await asyncio.sleep(seconds)

    async def _chores(self) -> None:
        for one in await self._do(self.store.list_over, self.store.clock() - self.keep_seconds):
            await self._do(self.store.note_deleting, one)
            self.look_at(one)
        pods = {name for _, name in self._pods.objects}
        for one in await self._do(self.store.list_over, self.store.clock() - self.pod_seconds):
            if object_name(one) in pods:
                self.look_at(one)
        await self._report_unknown()
        while await self._do(self.store.forget):
            pass

    async def _report_unknown(self) -> None:
        """Warn once of each pod whose container the store does not know: an older store was restored.

        Nothing is deleted: another service with a store of its own may use the same cluster.
        """
        pods = [one for one in self._pods.objects.values() if ID_LABEL in one["metadata"].get("labels", {})]
        known = set(await self._do(self.store.list_ids))  # read after the pods: a container is stored before its pod
        unknown = [one for one in pods if one["metadata"]["labels"][ID_LABEL] not in known]
        self.log.new("unknown", "warning", [tell_unknown(one, self.options.resource) for one in unknown])
        gpus = sum(gpus_of(one, self.options.resource) for one in unknown)
        self.unknown = f"pods unknown to the store: {len(unknown)}, with {gpus} GPUs; see the log" if unknown else ""

    async def _look_at_tenancies(self) -> None:
        for name in await self._do(self.store.list_tenancies):
            with contextlib.suppress(ClusterError, Refusal):  # the next pass tries again
                self.note_tenancy(name, await self.cluster.read_tenancy(name))

    def note_tenancy(self, name: str, found: Mapping[str, Any] | None) -> None:
        """Record which tenancy has a name: containers of an earlier tenancy of this name do not belong to it."""
        metadata = found["metadata"] if found is not None else {}
        created = read_time(metadata.get("creationTimestamp"))
        for one in self._shared.note_tenancy(name, metadata.get("uid", ""), *([] if created is None else [created])):
            self.look_at(one)


def take_event(found: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the fields that are used of an Event about one of our pods, None for other Events: there are very many."""
    pod = str((found.get("involvedObject") or {}).get("name") or "")
    if not pod.startswith("ctr-"):
        return None
    metadata = {name: found["metadata"].get(name, "") for name in ("namespace", "name")}
    told = {name: found.get(name) for name in ("reason", "eventTime", "lastTimestamp", "firstTimestamp")}
    text = str(found.get("message") or "")[:1000]
    return {"metadata": metadata, "involvedObject": {"name": pod}, "message": text, **told}


def gpus_of(pod: Mapping[str, Any], resource: str) -> int:
    """Return the number of GPUs that a pod requests."""
    limits = [(one.get("resources") or {}).get("limits") or {} for one in pod["spec"]["containers"]]
    return sum(int(parse_quantity(one.get(resource, "0")) or 0) for one in limits)


def tell_unknown(pod: Mapping[str, Any], resource: str) -> str:
    """Return a line about a pod of a container that the store does not know, with the command that ends it."""
    metadata = pod["metadata"]
    namespace, container = metadata["namespace"], metadata["labels"][ID_LABEL]
    tenancy = metadata["labels"].get(TENANCY_LABEL, "")
    return (
        f"container {container} of tenancy {tenancy}, pod {namespace}/{metadata['name']}, GPUs: "
        f"{gpus_of(pod, resource)}: the store does not know it, perhaps because an older store was restored; hint: "
        f"kubectl delete pod,secret,pvc,pv -n {namespace} -l {ID_LABEL}={container}"
    )


def _trim(kept: bytearray) -> None:
    """Keep the last whole lines, at most MAX_LOG bytes."""
    if len(kept) > MAX_LOG:
        del kept[: kept.find(b"\n", len(kept) - MAX_LOG - 1) + 1]


def _place_of(container: StoredContainer) -> tuple[str, str]:
    return namespace_name(container.tenancy), object_name(container.id)


def plan_of(container: StoredContainer) -> ContainerPlan:
    """Return the plan that the objects of a container are made from."""
    return ContainerPlan(container.id, container.tenancy, container.request)


def phase_of(tenancy: Mapping[str, Any] | None) -> str:
    """Return the phase of a tenancy: Terminating once its deletion was requested, "" before one is set."""
    if tenancy is None:
        return "deleted"
    deleting = tenancy["metadata"].get("deletionTimestamp")
    return "Terminating" if deleting else str((tenancy.get("status") or {}).get("phase") or "")
