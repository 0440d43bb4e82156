"""The service over HTTP: credential, body and parameters are checked here, once, before a method sees a request."""

import asyncio
import contextlib
import hashlib
import io
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ocigpu.core import rawjson
from ocigpu.core.errors import printable, quoted
from ocigpu.kubernetes.cluster.names import GROUP, VERSION, namespace_name
from ocigpu.kubernetes.cluster.quantity import parse_quantity
from ocigpu.system.service import ServiceLog
from ocigpu.tenants.service import models
from ocigpu.tenants.service.auth import Principal, TokenReader, read_credential
from ocigpu.tenants.service.cluster import ClusterError
from ocigpu.tenants.service.cursors import make_cursor, read_cursor
from ocigpu.tenants.service.endpoints import ENDPOINTS, Endpoint, QueryParameter, make_document
from ocigpu.tenants.service.fleet import Fleet
from ocigpu.tenants.service.image import REGISTRIES, check_registry, parse_image
from ocigpu.tenants.service.intake import Rates, Turns, check_shape
from ocigpu.tenants.service.keeper import ACTIVE, Keeper, phase_of, wait_at_most
from ocigpu.tenants.service.lifecycle import ContainerStanding, read_time
from ocigpu.tenants.service.pods import DOCKER_CONFIG, find_export, make_docker_config, object_name, size_of
from ocigpu.tenants.service.problems import MEDIA_TYPE, Refusal
from ocigpu.tenants.service.store import ApiKey, CaasStore, StoredContainer, StoredEvent, StoreFullError
from ocigpu.tenants.tenancy import read_spec

MAX_BODY = 1 << 20
MAX_TEXTS = 1 << 20
"""Of a pod: etcd takes objects of 1.5 MiB, and what it does not take would be tried again for ever."""
MAX_DRAIN = 8 << 20
"""Read and thrown away of a body that is too large: most clients read the answer only after they have sent all."""
BODY_SECONDS = 30.0
"""For a body to come."""
MAX_STREAMS, MAX_REQUESTS = 64, 128
"""At one time for one tenancy, or one admin: those that stay open, and all until they are answered.  Body and answer of
each can have 1 MiB, for as long as their tenant takes to send or to read them."""
NOT_READ = ("too_many_requests", "body_too_slow", "body_too_large")
"""Refusals whose bodies are left: so many of them would be read at one time, or they were waited for before."""
MAX_BODIES = 8
"""Of these requests that have a body, whose bodies are read and kept; the others wait with theirs unread."""
BODY_COST = 64 << 10
"""Bytes of a body that count as one request more."""
LINES = 64
"""Of a log that are sent before others have their turn."""
KNOWN = "ocigpu.known"
"""In the scope of a request whose credential holds."""
KEEP_ALIVE = 15.0
SETTLE = 0.3
MAX_SHOWN = 200
"""Containers of an overview, the newest."""
STREAM = "text/event-stream"
ADMIN = "admin"
"""Of TenantRules.creators: admin keys."""
_KEYS = {"of": "keys"}
_REVOKED = "the API key is unknown, revoked or over"
RETRY = 5
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
_SECURITY = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class TenantRules(NamedTuple):
    """What the operator lets tenants ask for.

    ``exports``: of NFS, "SERVER:/PATH" with {tenancy} where its name stands; ``timeout``, ``max_timeout``: seconds;
    ``rate``: requests a second with one credential; ``gpus``: numbers that a container can have; ``creators``: whose
    containers make a tenancy that does not exist, ADMIN or issuers of tokens.
    """

    registries: tuple[str, ...] = REGISTRIES
    exports: tuple[str, ...] = ()
    timeout: int = 86400
    max_timeout: int = 7 * 86400
    rate: float = 50.0
    gpus: tuple[int, ...] = models.LINKED
    creators: tuple[str, ...] = ()


class Ask(NamedTuple):
    """A request that may be answered.  ``values``: of its parameters; ``id``: of its path."""

    request: Request
    principal: Principal
    values: Mapping[str, Any]
    body: bytes
    model: Any
    id: str
    request_id: str


Method = Callable[[Ask], Awaitable[Response]]


def _who(principal: Principal) -> str:
    """Return who waits for his own requests: a tenancy, with all of its credentials, or an admin."""
    return principal.tenancy or principal.actor


@contextlib.contextmanager
def _place(taken: Counter[str], principal: Principal, most: int, code: str) -> Iterator[None]:
    who = _who(principal)
    if taken[who] >= most:
        raise Refusal(code, retry_after=RETRY)
    taken[who] += 1
    try:
        yield
    finally:
        taken[who] -= 1
        if not taken[who]:
            del taken[who]


class _Path:
    """What is served at a path: what a request takes it has until its answer is sent, or cannot be."""

    def __init__(self, serve: Callable[[Request], Awaitable[Response]]) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        with contextlib.ExitStack() as request.state.places:
            answer = await self._serve(request)
            await answer(scope, receive, send)


class Api:
    """Answers requests.  ``audit``: gets a line about each that changes something."""

    def __init__(
        self,
        store: CaasStore,
        keeper: Keeper,
        rules: TenantRules,
        tokens: Sequence[TokenReader],
        log: ServiceLog,
        audit: Callable[[dict[str, Any]], None],
        fleet: Fleet,
    ) -> None:
        self.fleet = fleet
        self.store, self.keeper, self.rules, self.log, self.audit = store, keeper, rules, log, audit
        self._tokens = tokens
        self._document = JSONResponse(
            make_document(rules.gpus)
        ).body  # made once: whoever asks for it needs no credential
        self._in_flight: set[tuple[str, str]] = set()
        self._streams: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._turns, self._rates = Turns(), Rates(rules.rate)
        self._rooms: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._shown: dict[tuple[str, bool], tuple[int, float, str]] = {}
        by_path: dict[str, dict[str, Endpoint]] = {}
        for endpoint in ENDPOINTS:
            by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
        self.routes = [Route(path, self._serve_path(found), methods=_METHODS) for path, found in by_path.items()]

    def make_app(
        self, *more: Route, run: Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]]
    ) -> Starlette:
        """Return the application; ``run``: what works beside it."""
        return Starlette(routes=[*self.routes, *more], lifespan=run, exception_handlers={HTTPException: self._no_route})

    async def _no_route(self, _request: Request, _error: Exception) -> Response:
        return _refusal(Refusal("not_found"), str(uuid.uuid4()))

    def _serve_path(self, by_method: Mapping[str, Endpoint]) -> "_Path":
        async def serve(request: Request) -> Response:
            request_id = str(uuid.uuid4())
            endpoint = by_method.get(request.method)
            if endpoint is None:
                refusal = _refusal(Refusal("method_not_allowed"), request_id)
                refusal.headers["Allow"] = ", ".join(by_method)
                return refusal
            return await self._serve(endpoint, request, request_id)

        return _Path(serve)

    async def _serve(self, endpoint: Endpoint, request: Request, request_id: str) -> Response:
        known: dict[str, Any] = {}
        try:
            ask = await self._read(endpoint, request, request_id, known)
            method: Method = getattr(self, endpoint.name)
            if endpoint.waits or endpoint.scope is None:  # what needs no credential is made once
                answer = await method(ask)
            else:
                async with self._turn(ask):
                    answer = await method(ask)
            result = str(answer.status_code)
        except ClusterError as error:
            problem = Refusal("cluster_unavailable", error.message, retry_after=RETRY)
            answer, result = _refusal(problem, request_id), problem.code
        except Refusal as problem:
            answer, result = _refusal(problem, request_id), problem.code
            if endpoint.takes and problem.code not in NOT_READ:
                await _throw_away(request)
        except Exception as error:  # noqa: BLE001 - whoever asks gets an answer, and nothing of the inside
            self.log("error", f"{endpoint.name}: {type(error).__name__}: {error}", request_id=request_id)
            answer, result = _refusal(Refusal("internal"), request_id), "internal"
        for name, value in {**_SECURITY, "X-Request-Id": request_id}.items():
            answer.headers.setdefault(name, value)
        if endpoint.method != "GET":
            self._note(endpoint, request, request_id, known, answer, result)
        return answer

    def _note(
        self,
        endpoint: Endpoint,
        request: Request,
        request_id: str,
        known: Mapping[str, Any],
        answer: Response,
        result: str,
    ) -> None:
        who: Principal | None = known.get("principal")
        self.audit(
            {
                "time": _stamp(time.time()),
                "tenancy": known.get("tenancy") or (who.tenancy if who else None),
                "actor": who.actor if who else None,
                "source": request.client.host if request.client else None,
                "action": endpoint.name,
                **({"made_tenancy": True} if known.get("made_tenancy") else {}),
                "resource": known.get("resource") or answer.headers.get("Location") or request.url.path,
                "result": result,
                "request_id": request_id,
            }
        )

    async def _read(self, endpoint: Endpoint, request: Request, request_id: str, known: dict[str, Any]) -> Ask:
        principal = Principal("", None, ())
        if endpoint.scope is not None:
            principal = await read_credential(request.headers.get("authorization", ""), self.store, self._tokens)
            known["principal"] = principal
            request.scope[KNOWN] = True
            self._rates.charge(principal.actor)
            request.state.places.enter_context(_place(self._requests, principal, MAX_REQUESTS, "too_many_requests"))
            if endpoint.scope:
                principal.require(endpoint.scope)
        values = read_parameters(endpoint, request)
        body, model = b"", None
        if endpoint.takes:
            room = self._rooms.get(_who(principal)) or asyncio.Semaphore(MAX_BODIES)
            self._rooms[_who(principal)] = room
            await room.acquire()
            request.state.places.callback(room.release)
            body = await _read_body(request)
            self._rates.charge(principal.actor, len(body) / BODY_COST)
            async with self._turns.take(_who(principal)):
                model = read_model(endpoint.takes, body)
        request.state.known = known
        return Ask(request, principal, values, body, model, request.path_params.get("id", ""), request_id)

    def _turn(self, ask: Ask) -> contextlib.AbstractAsyncContextManager[None]:
        return self._turns.take(_who(ask.principal))

    # containers

    async def create_container(self, ask: Ask) -> Response:
        """Accept a container, or answer again what was answered to the same Idempotency-Key."""
        wanted: models.ContainerRequest = ask.model
        tenancy = ask.principal.choose_tenancy(wanted.tenancy)
        ask.request.state.known["tenancy"] = tenancy
        key = _idempotency_key(ask.values.get("Idempotency-Key"))
        if not key:
            return await self._create(ask, tenancy, "")
        # a credential's keys are its tenancy's: another tenancy's cannot be guessed or met
        flight = (tenancy, key)
        if flight in self._in_flight:
            raise Refusal("idempotency_in_flight", retry_after=1)
        self._in_flight.add(flight)
        try:
            if found := self.store.replay(tenancy, key, ask.body):
                container = self.store.find_any(found.container)
                if not found.same_body or not container:
                    raise Refusal("idempotency_key_reused")
                return _accepted(container, {"Idempotency-Replayed": "true"})
            return await self._create(ask, tenancy, key)
        finally:
            self._in_flight.discard(flight)

    async def _create(self, ask: Ask, tenancy: str, key: str) -> Response:
        request = judge(ask.model, tenancy, self.rules)
        found = await self._check_tenancy(ask, tenancy, active=True, may_create=True)
        if registries := (found.get("spec") or {}).get("registries"):
            check_registry(parse_image(request["image"]), registries)
        check_share(request, read_spec(dict(found))["quota"])
        quotas = await self._read_quotas(tenancy)
        async with self._turn(ask):
            # nothing is waited for from here on: container and key are remembered together, or neither is
            self._check_quota(quotas, tenancy, request["gpus"])
            try:
                for ended in self.store.make_room(tenancy, len(ask.body)):
                    self.keeper.look_at(ended)
            except StoreFullError as error:
                raise Refusal(str(error), retry_after=30) from error
            made = self.store.add(tenancy, request, secret_values(ask.model, request), key, ask.body)
            self.keeper.look_at(made.id)
            return _accepted(made, {})

    async def _check_tenancy(
        self, ask: Ask, tenancy: str, active: bool = False, may_create: bool = False
    ) -> Mapping[str, Any]:
        found = await self.keeper.cluster.read_tenancy(tenancy)
        who = ask.principal
        creator = (ADMIN if who.may("admin") else "") if who.actor.startswith("key:") else who.issuer
        if found is None and may_create and creator and creator in self.rules.creators:
            try:
                await self.keeper.cluster.create(new_tenancy(tenancy, who.actor))
            except ClusterError as error:
                if error.passing:
                    raise
                raise Refusal("tenancy_unknown", f"tenancy {tenancy} cannot be made: {error.message}") from error
            ask.request.state.known["made_tenancy"] = True
            found = await self.keeper.cluster.read_tenancy(tenancy)
        self.keeper.note_tenancy(tenancy, found)
        if not self._is_valid(ask.principal):  # it was of another tenancy, which had this name
            raise Refusal("credential_invalid", _REVOKED)
        if found is None:
            raise Refusal("tenancy_unknown", f"tenancy {quoted(tenancy)}: the cluster has none of this name")
        if active and phase_of(found) not in ACTIVE:
            raise Refusal("tenancy_not_active", f"tenancy {tenancy} is {phase_of(found)}")
        return found

    def _check_quota(self, quotas: Sequence[models.QuotaView], tenancy: str, gpus: int) -> None:
        """Refuse what the cluster would refuse, in better words; the cluster's quota is what binds."""
        name = f"requests.{self.keeper.options.resource}"
        for quota in quotas:
            if quota.resource == name:
                used = _quantity(quota.used) + self.store.waiting_gpus(tenancy)
                if used + gpus > _quantity(quota.hard):
                    text = f"{gpus} GPUs more than the {used:g} in use or waiting are over the quota of {quota.hard}"
                    raise Refusal("quota_exceeded", text, retry_after=30)

    async def _read_quotas(self, tenancy: str) -> list[models.QuotaView]:
        found = []
        for quota in (await self.keeper.cluster.list_objects("ResourceQuota", namespace_name(tenancy)))[0]:
            status = quota.get("status") or {}
            used = status.get("used") or {}
            for name, hard in sorted((status.get("hard") or {}).items()):
                found.append(models.QuotaView(resource=name, hard=str(hard), used=str(used.get(name, "0"))))
        return found

    async def list_containers(self, ask: Ask) -> Response:
        """Return a page of containers."""
        tenancy = self._visible(ask)
        lifecycle, limit = ask.values.get("lifecycle", ""), ask.values["limit"]
        filters = {"of": "containers", "tenancy": tenancy, "lifecycle": lifecycle}
        before = read_cursor(self.store.secret, ask.values.get("cursor", ""), filters)
        limit = self.store.fit(tenancy, lifecycle, before, limit)
        found = self.store.list_containers(tenancy, lifecycle, before, limit + 1)
        cursor = make_cursor(self.store.secret, found[limit - 1].id, filters) if len(found) > limit else None
        return _json(models.ContainerList(items=[view(one) for one in found[:limit]], next_cursor=cursor))

    def _visible(self, ask: Ask) -> str:
        """Return the tenancy whose things are asked for; "" for those of all, which only an admin may."""
        named: str = ask.values.get("tenancy", "")
        return named if ask.principal.tenancy is None else ask.principal.choose_tenancy(named or None)

    def _find(self, ask: Ask) -> StoredContainer:
        """Return the container of the path; another tenancy's is as if it were not there."""
        found = self.store.find(ask.id) if len(ask.id) < 64 else None
        if not found or ask.principal.tenancy not in (None, found.tenancy):
            raise Refusal("not_found", f"container {quoted(ask.id, 80)}")
        ask.request.state.known["tenancy"] = found.tenancy
        return found

    async def show_container(self, ask: Ask) -> Response:
        """Return a container, at once or when it has come so far."""
        found = self._find(ask)
        if wanted := ask.values.get("wait"):
            with self._stream(ask.principal):
                found = await self._wait(ask, wanted, ask.values["timeout"]) or found
            if not self._is_valid(ask.principal):  # it was ended meanwhile
                raise Refusal("credential_invalid", _REVOKED)
        tag = f'"{found.version}"'
        if tag == ask.request.headers.get("if-none-match"):
            return Response(status_code=304, headers={"ETag": tag})
        async with self._turn(ask):
            return _json(view(found), headers={"ETag": tag})

    async def _wait(self, ask: Ask, wanted: str, seconds: float) -> StoredContainer | None:
        rank, end = models.LIFECYCLES.index(wanted), time.monotonic() + seconds
        # whoever waits for success also wants to hear of failure
        with self.keeper.bell.hear() as heard:
            while True:
                heard.clear()
                found = self.store.find(ask.id)
                over = not found or found.standing.lifecycle in models.FINAL
                if over or (found and models.LIFECYCLES.index(found.standing.lifecycle) >= rank):
                    return found
                left = end - time.monotonic()
                if left <= 0 or self.keeper.bell.closed or not await wait_at_most(heard, left):
                    return self.store.find(ask.id)

    async def delete_container(self, ask: Ask) -> Response:
        """Have a container ended and forgotten."""
        found = self._find(ask)
        if not found.deleting:
            self.store.note_deleting(found.id)
            self.keeper.look_at(found.id)
        return _json(view(self.store.find(found.id) or found), 202)

    # streams

    def _stream(self, principal: Principal) -> contextlib.AbstractContextManager[None]:
        return _place(self._streams, principal, MAX_STREAMS, "too_many_streams")

    def _open_stream(self, ask: Ask, parts: AsyncIterator[str], media: str) -> Response:
        ask.request.state.places.enter_context(self._stream(ask.principal))
        headers = {"X-Accel-Buffering": "no"}  # a proxy of this kind would keep it until it is full
        return StreamingResponse(parts, media_type=f"{media}; charset=utf-8", headers=headers)

    def _is_valid(self, principal: Principal) -> bool:
        """Tell whether a credential still holds, for those who stay."""
        if principal.expires is not None and principal.expires <= self.store.clock():
            return False
        kind, _, number = principal.actor.partition(":")
        return kind != "key" or any(not key.revoked for key in self.store.list_keys(number))

    async def follow_container(self, ask: Ask) -> Response:
        """Stream the events of a container until it is over."""
        found = self._find(ask)
        after = _last_event(ask)
        if (
            found.standing.lifecycle in models.FINAL
            and not found.deleting
            and not self.store.events(after, "", found.id, 1)
        ):
            return Response(status_code=204)
        return self._open_stream(ask, self._events(ask, after, found.tenancy, found.id), STREAM)

    async def follow_events(self, ask: Ask) -> Response:
        """Return a page of events, or stream them."""
        tenancy = self._visible(ask)
        if STREAM in ask.request.headers.get("accept", ""):
            return self._open_stream(ask, self._events(ask, _last_event(ask), tenancy), STREAM)
        filters = {"of": "events", "tenancy": tenancy}
        limit = ask.values["limit"]
        cursor = read_cursor(self.store.secret, ask.values.get("cursor", ""), filters)
        found = self.store.events(int(cursor or ask.values.get("after") or 0), tenancy, "", limit + 1)
        last = make_cursor(self.store.secret, str(found[limit - 1].id), filters) if len(found) > limit else None
        return _json(models.EventList(items=[view_event(one) for one in found[:limit]], next_cursor=last))

    async def _events(self, ask: Ask, after: int, tenancy: str, container: str = "") -> AsyncIterator[str]:
        yield "retry: 2000\n\n"
        with self.keeper.bell.hear() as heard:
            while not self.keeper.bell.closed and self._is_valid(ask.principal):
                heard.clear()
                found = self.store.events(after, tenancy, container)
                for event in found:
                    after = event.id
                    yield f"id: {event.id}\nevent: {event.kind}\ndata: {view_event(event).model_dump_json()}\n\n"
                    if container and (event.kind == "deleted" or event.lifecycle in models.FINAL):
                        return
                if not found and not await wait_at_most(heard, KEEP_ALIVE):
                    yield ": nothing new\n\n"

    async def show_overview(self, ask: Ask) -> Response:
        """Return all at once, now or at each change."""
        if STREAM not in ask.request.headers.get("accept", ""):
            return _json(self._overview(ask))
        return self._open_stream(ask, self._overviews(ask), STREAM)

    def _overview(self, ask: Ask) -> models.OverviewView:
        who = ask.principal
        sees = who.may("fleet:read")
        mine = who.tenancy or ""
        found = self.store.list_containers(mine, limit=self.store.fit(mine, limit=MAX_SHOWN))
        problems = [self.keeper.problem, *(self.fleet.problems if sees else ())]
        return models.OverviewView(
            nodes=self.fleet.view() if sees else None,
            containers=[view(one) for one in found],
            problem="; ".join(dict.fromkeys(filter(None, problems))),
        )

    async def _show_once(self, ask: Ask) -> str:
        """Return the overview for a stream; those who see the same share what was made since the last change."""
        sees = (ask.principal.tenancy or "", ask.principal.may("fleet:read"))
        async with self._turn(ask):
            changes, now = self.keeper.bell.rings, time.monotonic()
            self._shown = {one: kept for one, kept in self._shown.items() if now - kept[1] < KEEP_ALIVE}
            kept = self._shown.get(sees)
            if kept is None or kept[0] != changes or now - kept[1] >= SETTLE:
                kept = self._shown[sees] = (changes, now, self._overview(ask).model_dump_json())
            return kept[2]

    async def _overviews(self, ask: Ask) -> AsyncIterator[str]:
        before = b""
        with self.keeper.bell.hear() as heard:
            while not self.keeper.bell.closed and self._is_valid(ask.principal):
                heard.clear()
                text = await self._show_once(ask)
                now = hashlib.sha256(text.encode()).digest()
                yield f"event: overview\ndata: {text}\n\n" if now != before else ": nothing new\n\n"
                before, text = now, ""  # it is large, and whoever reads it may take long
                if await wait_at_most(heard, KEEP_ALIVE):
                    await asyncio.sleep(SETTLE)  # changes come in groups

    async def read_logs(self, ask: Ask) -> Response:
        """Return or stream what a container prints."""
        found = self._find(ask)
        media = STREAM if STREAM in ask.request.headers.get("accept", "") else "text/plain"
        since = read_time(ask.values.get("since"))
        lines = self._lines(ask, found, since, ask.values.get("Last-Event-ID", ""))
        stamped = ask.values["timestamps"]

        async def parts() -> AsyncIterator[str]:
            count = 0
            async for number, at, text in lines:
                if ask.values["follow"] and not self._is_valid(ask.principal):
                    break
                shown = f"{at} {text}" if stamped else text
                yield f"id: {number}\ndata: {shown}\n\n" if media == STREAM else f"{shown}\n"
                count += 1
                if not count % LINES:  # as many as there are may come without anything being waited for
                    await asyncio.sleep(0)
            if media == STREAM:
                yield "event: end\ndata:\n\n"

        return self._open_stream(ask, parts(), media)

    async def _lines(
        self, ask: Ask, container: StoredContainer, since: float | None, last: str
    ) -> AsyncIterator[tuple[str, str, str]]:
        """Yield (id, time, text) of the lines after one; an id is the time, and which line of that time it is."""
        from_time, _, count = last.partition("/")
        known = (from_time, int(count) if count.isdecimal() else 0)
        before, number = "", 0
        async for line in self._raw_lines(ask, container, since, from_time):
            at, _, text = line.partition(" ")
            if not _STAMP.fullmatch(at):  # what followed a carriage return: the library takes it for a line
                at, text = before, line
            number = number + 1 if at == before else 0
            before = at
            if last and (_sortable(at), number) <= (_sortable(known[0]), known[1]):
                continue
            if since is not None and (stamp := read_time(at)) is not None and stamp < since:
                continue
            yield f"{at}/{number}", at, text

    async def _raw_lines(
        self, ask: Ask, container: StoredContainer, since: float | None, from_time: str
    ) -> AsyncIterator[str]:
        follow, tail = ask.values["follow"], ask.values.get("tail")
        kept = self.store.read_log(container.id)
        if kept is None and follow:
            started = await self._wait_until_started(container.id)
            kept = self.store.read_log(container.id) if started else b""
        if kept is None:
            begin = max((at for at in (since, read_time(from_time)) if at is not None), default=None)
            ago = None if begin is None else max(0.0, self.store.clock() - begin) + 1
            stream = self.keeper.cluster.read_log(
                namespace_name(container.tenancy), object_name(container.id), follow, tail, ago
            )
            try:
                async for line in stream:
                    yield line
            except ClusterError as error:
                if error.status in (0, 400, 404):  # the pod has none yet, or any more; or the connection broke
                    return
                raise
            return
        if tail is not None:
            kept = b"\n".join(kept.rsplit(b"\n", tail + 1)[-tail - 1 :])
        for raw in io.BytesIO(kept):
            yield raw.decode("utf-8", "replace").removesuffix("\n")

    async def _wait_until_started(self, container: str) -> bool:
        with self.keeper.bell.hear() as heard:
            while not self.keeper.bell.closed:
                heard.clear()
                found = self.store.find(container)
                if not found or found.standing.lifecycle in ("stopping", *models.FINAL):
                    return False if not found else self.store.read_log(container) is not None
                if found.standing.lifecycle == "running":
                    return True
                await wait_at_most(heard, KEEP_ALIVE)
        return False

    # the rest

    async def show_quotas(self, ask: Ask) -> Response:
        """Return what a tenancy may use and uses."""
        tenancy = ask.principal.choose_tenancy(ask.values.get("tenancy"))
        await self._check_tenancy(ask, tenancy)
        return _json(models.QuotaList(tenancy=tenancy, items=await self._read_quotas(tenancy)))

    async def show_identity(self, ask: Ask) -> Response:
        """Return whose the credential is."""
        who = ask.principal
        return _json(
            models.Identity(
                actor=who.actor, tenancy=who.tenancy, scopes=list(who.scopes), expires=_stamp_of(who.expires)
            )
        )

    async def create_key(self, ask: Ask) -> Response:
        """Make a key and show it, this once."""
        wanted: models.KeyRequest = ask.model
        expires = self.store.clock() + wanted.expires_seconds if wanted.expires_seconds else None
        key, kept = self.store.add_key(wanted.tenancy, wanted.scopes, wanted.label, expires)
        ask.request.state.known.update(tenancy=wanted.tenancy, resource=f"/v1/keys/{kept.id}")
        return _json(models.NewKey(**view_key(kept).model_dump(), key=key), 201)

    async def list_keys(self, ask: Ask) -> Response:
        """Return the keys, without what would let anybody use them."""
        after, limit = read_cursor(self.store.secret, ask.values.get("cursor", ""), _KEYS), ask.values["limit"]
        found = self.store.list_keys("", after, limit + 1)
        cursor = make_cursor(self.store.secret, found[limit - 1].id, _KEYS) if len(found) > limit else None
        return _json(models.KeyList(items=[view_key(key) for key in found[:limit]], next_cursor=cursor))

    async def revoke_key(self, ask: Ask) -> Response:
        """End a key."""
        if not self.store.revoke_key(ask.id):
            raise Refusal("not_found", f"key {quoted(ask.id, 80)}")
        return Response(status_code=204)

    async def show_openapi(self, _ask: Ask) -> Response:
        """Return the document of the interface."""
        return Response(self._document, media_type="application/json")

    async def show_health(self, _ask: Ask) -> Response:
        """Tell that the service runs."""
        return JSONResponse({"status": "ok"})

    async def show_readiness(self, _ask: Ask) -> Response:
        """Tell whether it follows its cluster."""
        if self.keeper.problem:
            raise Refusal("cluster_unavailable", retry_after=RETRY)
        return JSONResponse({"status": "ok"})


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def judge(wanted: models.ContainerRequest, tenancy: str, rules: TenantRules) -> dict[str, Any]:
    """Return what is to be run and remembered of a request, without the values of secrets; raises Refusal."""
    image = parse_image(wanted.image)
    check_registry(image, rules.registries)
    if wanted.gpus not in rules.gpus:
        raise Refusal("gpus_no_partition", f"gpus {wanted.gpus}: not one of {', '.join(map(str, rules.gpus))}")
    seconds = wanted.timeout_seconds or min(rules.timeout, rules.max_timeout)
    if seconds > rules.max_timeout:
        raise Refusal("timeout_too_long", f"timeout_seconds {seconds}: at most {rules.max_timeout}")
    for mount in wanted.mounts:
        if find_export(mount.server, mount.path, tenancy, rules.exports) is None:
            place = quoted(f"{mount.server}:{mount.path}")
            allowed = ", ".join(export.replace("{tenancy}", tenancy) for export in rules.exports) or "none"
            raise Refusal("mount_not_allowed", f"mount {place}: the tenancy's exports: {allowed}")
    if (size := size_of([*wanted.command, *wanted.args, *wanted.env.values()])) > MAX_TEXTS:
        text = f"command, args and env: {size} bytes in the cluster, which writes each $ twice; at most {MAX_TEXTS}"
        raise Refusal("request_invalid", text)
    return {
        **wanted.model_dump(exclude={"tenancy", "secrets", "pull_credentials", "image", "timeout_seconds"}),
        "image": str(image),
        "secrets": sorted(wanted.secrets),
        "has_pull_credentials": wanted.pull_credentials is not None,
        "timeout_seconds": seconds,
    }


def secret_values(wanted: models.ContainerRequest, request: Mapping[str, Any]) -> dict[str, str]:
    """Return what is forgotten once it is in the cluster: variables, and who pulls the image."""
    found = dict(wanted.secrets)
    if who := wanted.pull_credentials:
        found[DOCKER_CONFIG] = make_docker_config(parse_image(request["image"]).registry, who.username, who.password)
    return found


def check_share(request: Mapping[str, Any], quota: Mapping[str, Any]) -> None:
    """Raise Refusal (quota_exceeded) for what is more than the tenancy may have for all of its containers."""
    for name, asked in (("cpu", request["cpus"]), ("memory", request["memory"])):
        most = parse_quantity(quota[name])
        if asked and most is not None and (parse_quantity(asked) or 0) > most:
            raise Refusal("quota_exceeded", f"{name} {asked}: the tenancy has {quota[name]} for all of its containers")


def new_tenancy(name: str, actor: str) -> dict[str, Any]:
    """Return a tenancy with the defaults of its kind: only an operator gives one more."""
    metadata = {"name": name, "annotations": {"ocigpu.io/created-by": actor}}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Tenancy", "metadata": metadata, "spec": {}}


def view(container: StoredContainer) -> models.ContainerView:
    """Return a container as its owner sees it."""
    standing: ContainerStanding = container.standing
    if container.deleting and standing.lifecycle not in models.FINAL:
        standing = standing._replace(lifecycle="stopping", reason="deleted")
    return models.ContainerView(
        id=container.id,
        tenancy=container.tenancy,
        **(request := container.request),
        nvlink_partition=request["gpus"] in models.LINKED,
        image_digest=standing.image_digest or None,
        lifecycle=standing.lifecycle,
        reason=standing.reason,
        detail=standing.detail,
        exit_code=standing.exit_code,
        node=standing.node or None,
        created=_stamp(container.created),
        started=_stamp_of(standing.started),
        finished=_stamp_of(standing.finished),
        phases=models.Phases(**{name: round(seconds, 3) for name, seconds in standing.phases.items()}),
        version=container.version,
    )


def view_event(event: StoredEvent) -> models.EventView:
    """Return an event as its reader sees it."""
    return models.EventView(**{**event._asdict(), "at": _stamp(event.at)})


def view_key(key: ApiKey) -> models.KeyView:
    """Return a key as an admin sees it."""
    return models.KeyView(
        id=key.id, tenancy=key.tenancy, scopes=list(key.scopes), label=key.label, created=_stamp(key.created),
        expires=_stamp_of(key.expires), revoked=key.revoked,
    )  # fmt: skip


def read_parameters(endpoint: Endpoint, request: Request) -> dict[str, Any]:
    """Return the values of a request's parameters, with their defaults; raises Refusal (parameter_invalid)."""
    known = {one.name for one in endpoint.parameters if one.place == "query"}
    for name in request.query_params:
        if name not in known:
            raise Refusal("parameter_invalid", f"{quoted(name)}: known are {', '.join(sorted(known)) or 'none'}")
        if len(request.query_params.getlist(name)) > 1:
            raise Refusal("parameter_invalid", f"{name}: given twice")
    values = {}
    for one in endpoint.parameters:
        text = request.query_params.get(one.name) if one.place == "query" else request.headers.get(one.name)
        if text is not None:
            values[one.name] = _convert(one, text)
        elif "default" in one.schema:
            values[one.name] = one.schema["default"]
    return values


def _convert(one: QueryParameter, text: str) -> Any:
    schema = one.schema
    why = f"known are {', '.join(schema['enum'])}" if "enum" in schema else one.text
    wrong = Refusal("parameter_invalid", f"{one.name} {quoted(text, 80)}: {why}")
    if schema["type"] == "boolean":
        known = {"1": True, "true": True, "0": False, "false": False}
        if text not in known:
            raise wrong
        return known[text]
    if schema["type"] == "integer":
        if not re.fullmatch(r"[0-9]{1,18}", text) or not schema["minimum"] <= int(text) <= schema["maximum"]:
            raise wrong
        return int(text)
    if len(text) > schema.get("maxLength", 1000) or text not in schema.get("enum", [text]):
        raise wrong
    if "pattern" in schema and not re.fullmatch(schema["pattern"].strip("^$"), text):
        raise wrong
    if schema.get("format") == "date-time" and read_time(text) is None:
        raise Refusal("parameter_invalid", f"{one.name} {quoted(text, 80)}: not a time as in RFC 3339")
    return text


async def _throw_away(request: Request) -> None:
    """Read what is left of a body that nobody wants: who is cut off while he sends does not read why."""
    size = 0
    # RuntimeError: it was read to its end
    with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY:
                    break


async def _read_body(request: Request) -> bytes:
    """Return the body, of at most MAX_BODY bytes however they come; raises Refusal."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal("media_type", f"Content-Type {quoted(kind, 80)}")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MAX_DRAIN:
        raise Refusal("body_too_large")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= MAX_BODY:
                    parts.append(part)
                elif size > MAX_DRAIN:
                    break
    except TimeoutError as error:
        raise Refusal("body_too_slow") from error
    if size > MAX_BODY:
        raise Refusal("body_too_large")
    return b"".join(parts)


def read_model(model: type[BaseModel], body: bytes) -> BaseModel:
    """Return what a body says; raises Refusal (request_invalid) that names each wrong place, and no value."""
    check_shape(body)
    try:
        value = rawjson.parse(body.decode("utf-8-sig"))  # a mark at the begin may be ignored: RFC 8259 section 8.1
    except (ValueError, RecursionError) as error:
        raise Refusal("request_invalid", f"the body is not JSON: {printable(str(error), 200)}") from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        places = [
            {"pointer": _pointer(one["loc"]), "detail": printable(one["msg"], 300)}
            for one in error.errors(include_url=False, include_input=False, include_context=False)[:20]
        ]
        first = places[0]
        raise Refusal("request_invalid", f"{first['pointer']}: {first['detail']}", places) from error


def _pointer(place: Sequence[int | str]) -> str:
    """Return a JSON pointer in the form of a fragment: RFC 6901 section 6."""
    parts = [str(one)[:300].replace("~", "~0").replace("/", "~1") for one in place if one != "[key]"]
    return printable("#" + "".join(f"/{part}" for part in parts), 300)


def _idempotency_key(text: str | None) -> str:
    """Return the key: a string of RFC 8941, or its bare characters as most clients send it; raises Refusal."""
    if not text:
        return ""
    bare = re.fullmatch(r'"((?:[ !#-\[\]-~]|\\["\\])*)"', text)
    key = bare[1].replace('\\"', '"').replace("\\\\", "\\") if bare else text
    if not key or not re.fullmatch(r"[ -~]{1,255}", key) or (not bare and '"' in key):
        raise Refusal("parameter_invalid", 'Idempotency-Key: 1 to 255 printable characters, as a "string"')
    return key


def _last_event(ask: Ask) -> int:
    """Return the event to go on after: the header that browsers send, else the parameter."""
    text = ask.values.get("Last-Event-ID", "")
    if text and not re.fullmatch(r"[0-9]{1,18}", text):
        raise Refusal("parameter_invalid", f"Last-Event-ID {quoted(text, 80)}: not the id of an event")
    return int(text) if text else int(ask.values.get("after") or 0)


def _accepted(container: StoredContainer, headers: Mapping[str, str]) -> Response:
    return _json(view(container), 202, {"Location": f"/v1/containers/{container.id}", **headers})


def _json(model: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(model.model_dump_json(), status, dict(headers or {}), "application/json")


def _refusal(problem: Refusal, request_id: str) -> Response:
    headers = {**_SECURITY, "X-Request-Id": request_id, **problem.headers()}
    return JSONResponse(problem.document(request_id), problem.kind.status, headers, MEDIA_TYPE)


def _quantity(text: str) -> float:
    """Return a number of devices; what is none counts as no limit."""
    number = parse_quantity(text)
    return math.inf if number is None else float(number)


def _sortable(stamp: str) -> str:
    """Return a time of the kubelet (RFC3339Nano leaves zeros at the end out) with all nine digits, in UTC or not."""
    found = _STAMP.fullmatch(stamp)
    return f"{found[1]}.{(found[2] or ''):0<9}{'+00:00' if found[3] == 'Z' else found[3]}" if found else stamp


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _stamp_of(at: float | None) -> str | None:
    return None if at is None else _stamp(at)
