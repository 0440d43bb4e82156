"""The service over HTTP: credential, body and parameters are checked here, once, before a handler sees a request."""

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from pydantic import BaseModel
from sqlalchemy.exc import DBAPIError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ocigpu.system.service import ServiceLog
from ocigpu.tenants.service import models
from ocigpu.tenants.service.auth import Principal, TokenReader, read_credential
from ocigpu.tenants.service.cluster import ClusterError
from ocigpu.tenants.service.database import cause_of
from ocigpu.tenants.service.endpoints import ENDPOINTS, Endpoint, make_document
from ocigpu.tenants.service.fleet import Fleet
from ocigpu.tenants.service.intake import Rates, read_body, read_model, throw_away_body
from ocigpu.tenants.service.lifecycle import write_time
from ocigpu.tenants.service.parameters import read_parameters
from ocigpu.tenants.service.problems import MEDIA_TYPE, Refusal
from ocigpu.tenants.service.reconciler import Reconciler
from ocigpu.tenants.service.request import RETRY, Answer, ApiRequest, ServiceState, TenantRules, limit_concurrency
from ocigpu.tenants.service.store import CaasStore

MAX_REQUESTS = 128
"""Of one tenancy, or one admin, at one time until they are answered.  Body and answer of each can have 1 MiB, for as
long as their tenant takes to send or to read them."""
NOT_READ = ("too_many_requests", "body_too_slow", "body_too_large")
"""Refusals whose bodies are left: so many of them would be read at one time, or they were waited for before."""
MAX_BODIES = 8
"""Of these requests that have a body, whose bodies are read and kept; the others wait with theirs unread."""
BODY_COST = 64 << 10
"""Bytes of a body that count as one request more."""
KNOWN = "ocigpu.known"
"""In the scope of a request whose credential holds."""
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_SECURITY = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class PathPattern:
    """The service at a path: a request holds its resources until its answer is sent, or sending fails."""

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
        reconciler: Reconciler,
        rules: TenantRules,
        tokens: Sequence[TokenReader],
        log: ServiceLog,
        audit: Callable[[dict[str, Any]], None],
        fleet: Fleet,
    ) -> None:
        self._types: Mapping[type[BaseModel], type[BaseModel]] = {
            models.ContainerRequest: models.ContainerRequest.of_service(rules.gpus)
        }
        document = JSONResponse(make_document(self._types)).body  # made once: requests for it need no credential
        self._service = ServiceState(store, reconciler, rules, fleet, bytes(document))
        self._tokens, self._log, self._audit = tokens, log, audit
        self._requests: Counter[str] = Counter()
        self._rates = Rates(rules.rate)
        self._rooms: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def make_app(
        self, *more: Route, run: Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]]
    ) -> Starlette:
        """Return the application; ``run``: what works beside it."""
        by_path: dict[str, dict[str, Endpoint]] = {}
        for endpoint in ENDPOINTS:
            by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
        routes = [Route(path, self._serve_path(found), methods=_METHODS) for path, found in by_path.items()]
        return Starlette(routes=[*routes, *more], lifespan=run, exception_handlers={HTTPException: _no_route})

    def _serve_path(self, by_method: Mapping[str, Endpoint]) -> PathPattern:
        async def serve(request: Request) -> Response:
            request_id = str(uuid.uuid4())
            endpoint = by_method.get(request.method)
            if endpoint is None:
                refusal = _refuse(Refusal("method_not_allowed"), request_id)
                refusal.headers["Allow"] = ", ".join(by_method)
                return refusal
            return await self._serve(endpoint, request, request_id)

        return PathPattern(serve)

    async def _serve(self, endpoint: Endpoint, request: Request, request_id: str) -> Response:
        known: dict[str, Any] = {}
        try:
            answer = await self.answer(endpoint, request, known)
            result = str(answer.status_code)
        except ClusterError as error:
            self._log.once("requests", "warning", f"{endpoint.name}: {error.message}", request_id=request_id)
            problem = Refusal("cluster_unavailable", error.shown, retry_after=RETRY)
            answer, result = _refuse(problem, request_id), problem.code
        except Refusal as problem:
            answer, result = _refuse(problem, request_id), problem.code
            if endpoint.signature.takes and problem.code not in NOT_READ:
                await throw_away_body(request)
        except asyncio.CancelledError:  # the service ends, and has waited for as long as it does
            answer, result = _refuse(Refusal("stopping", retry_after=1), request_id), "stopping"
        except DBAPIError as error:
            self._log.once("store", "error", f"store: {cause_of(error)}")
            answer, result = _refuse(Refusal("store_unavailable", retry_after=RETRY), request_id), "store_unavailable"
        except Exception as error:  # noqa: BLE001 - the caller gets an answer without internal details
            self._log("error", f"{endpoint.name}: {type(error).__name__}: {error}", request_id=request_id)
            answer, result = _refuse(Refusal("internal"), request_id), "internal"
        for name, value in {**_SECURITY, "X-Request-Id": request_id}.items():
            answer.headers.setdefault(name, value)
        if endpoint.method != "GET":
            who: Principal | None = known.get("principal")
            self._audit(
                {
                    "time": write_time(time.time()),
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
        return answer

    async def answer(self, endpoint: Endpoint, http: Request, known: dict[str, Any]) -> Response:
        principal = await self._admit(endpoint, http, known)
        values = read_parameters(endpoint.signature.parameters, http)
        body = b""
        if takes := endpoint.signature.takes:
            body = await self._read_body(http, principal)
            async with self._service.turns.take(principal.payer):
                values[endpoint.signature.body] = read_model(self._types.get(takes, takes), body)
        request = ApiRequest(http, principal, self._service, body, {}, known)
        if endpoint.waits or endpoint.scope is None:  # what needs no credential is made once
            return _send(await endpoint.handler(request, **values), endpoint, request)
        async with request.take_turn():
            return _send(await endpoint.handler(request, **values), endpoint, request)

    async def _admit(self, endpoint: Endpoint, http: Request, known: dict[str, Any]) -> Principal:
        """Return whose request it is, once it is counted and its credential permits it; raises Refusal."""
        if endpoint.scope is None:
            return Principal("", None, ())
        service = self._service
        principal = await read_credential(http.headers.get("authorization", ""), service.store, self._tokens)
        known["principal"] = principal
        http.scope[KNOWN] = True
        self._rates.charge(principal.actor)
        place = limit_concurrency(self._requests, principal, MAX_REQUESTS, "too_many_requests")
        http.state.places.enter_context(place)
        if endpoint.scope:
            principal.require(endpoint.scope)
        return principal

    async def _read_body(self, http: Request, principal: Principal) -> bytes:
        room = self._rooms.get(principal.payer) or asyncio.Semaphore(MAX_BODIES)
        self._rooms[principal.payer] = room
        await room.acquire()
        http.state.places.callback(room.release)
        body = await read_body(http)
        self._rates.charge(principal.actor, len(body) / BODY_COST)
        return body


def _send(answer: Answer, endpoint: Endpoint, request: ApiRequest) -> Response:
    if isinstance(answer, Response):
        return answer
    return Response(answer.model_dump_json(), endpoint.status, request.headers, "application/json")


async def _no_route(_request: Request, _error: Exception) -> Response:
    return _refuse(Refusal("not_found"), str(uuid.uuid4()))


def _refuse(problem: Refusal, request_id: str) -> Response:
    headers = {**_SECURITY, "X-Request-Id": request_id, **problem.headers()}
    return JSONResponse(problem.document(request_id), problem.kind.status, headers, MEDIA_TYPE)
