"""A request that may be answered, as handlers get it, and what the handlers of one service share."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ocigpu.tenants.service import models
from ocigpu.tenants.service.auth import Principal, still_holds
from ocigpu.tenants.service.fleet import Fleet
from ocigpu.tenants.service.image import REGISTRIES
from ocigpu.tenants.service.intake import Turns
from ocigpu.tenants.service.problems import Refusal
from ocigpu.tenants.service.reconciler import Reconciler
from ocigpu.tenants.service.store import CaasStore

MAX_STREAMS = 64
"""Open at one time for one tenancy, or one admin."""
STREAM = "text/event-stream"
ADMIN = "admin"
"""Of TenantRules.creators: admin keys."""
KEEP_ALIVE = 15.0
"""Seconds after which a stream on which nothing happens sends something."""
RETRY = 5
"""Seconds."""


class TenantRules(NamedTuple):
    """What the operator lets tenants request.

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


class ServiceState:
    """The tools of handlers, and the state that the requests of a service share.

    ``document``: of the interface, as JSON; ``in_flight``: tenancies and Idempotency-Keys that are being answered;
    ``streams``: the number of open ones of each tenancy or admin; ``overviews``: the latest, by rights.
    """

    def __init__(
        self, store: CaasStore, reconciler: Reconciler, rules: TenantRules, fleet: Fleet, document: bytes
    ) -> None:
        self.store, self.reconciler, self.rules, self.fleet, self.document = store, reconciler, rules, fleet, document
        self.turns = Turns()
        self.streams: Counter[str] = Counter()
        self.in_flight: set[tuple[str, str]] = set()
        self.overviews: dict[tuple[str, bool], tuple[int, float, str]] = {}


class ApiRequest(NamedTuple):
    """A request whose credential, parameters and body were checked.

    ``body``: as it was sent; ``headers``: of its answer, if that is a model; ``known``: its fields in the audit.
    """

    http: Request
    principal: Principal
    service: ServiceState
    body: bytes
    headers: dict[str, str]
    known: dict[str, Any]

    @property
    def id(self) -> str:
        """What the path names, "" if it names nothing."""
        return str(self.http.path_params.get("id", ""))

    @property
    def wants_stream(self) -> bool:
        """Whether the answer should be an event stream."""
        return STREAM in self.http.headers.get("accept", "")

    @property
    def is_valid(self) -> bool:
        """Whether the credential still holds, for requests that take long."""
        return still_holds(self.principal, self.service.store)

    def require_valid(self) -> None:
        """Raise Refusal (credential_invalid) unless the credential still holds."""
        if not self.is_valid:
            raise Refusal("credential_invalid", "the API key is unknown, revoked or over")

    def take_turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait for the turn of this tenancy or admin; nothing should be waited for in it."""
        return self.service.turns.take(self.principal.payer)

    def take_stream(self) -> contextlib.AbstractContextManager[None]:
        """Count one open stream more; raises Refusal (too_many_streams)."""
        return limit_concurrency(self.service.streams, self.principal, MAX_STREAMS, "too_many_streams")

    def open_stream(self, parts: AsyncIterator[str], media: str = STREAM) -> Response:
        """Return an answer that is sent part by part; raises Refusal (too_many_streams)."""
        self.http.state.places.enter_context(self.take_stream())
        headers = {"X-Accel-Buffering": "no"}  # a proxy of this kind would keep it until it is full
        return StreamingResponse(parts, media_type=f"{media}; charset=utf-8", headers=headers)


Answer = BaseModel | Response
"""What a handler returns: a model is sent as JSON, with the status of its endpoint."""


@contextlib.contextmanager
def limit_concurrency(taken: Counter[str], principal: Principal, most: int, code: str) -> Iterator[None]:
    """Count something of a tenancy or admin while the block runs; raises Refusal (``code``) if it has ``most``."""
    who = principal.payer
    if taken[who] >= most:
        raise Refusal(code, retry_after=RETRY)
    taken[who] += 1
    try:
        yield
    finally:
        taken[who] -= 1
        if not taken[who]:
            del taken[who]
