"""Limits on requests: the size of a body, the rate of a credential, and turns at the shared thread.

One thread answers all clients.  The work of a request is bounded before it is done.  Work that still takes milliseconds
is done for one request at a time, and between two of them everything else that is ready goes first.
"""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from weakref import WeakValueDictionary

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from ocigpu.core import rawjson
from ocigpu.core.errors import printable, quoted
from ocigpu.tenants.service.problems import Refusal

MAX_BODY = 1 << 20
MAX_DRAIN = 8 << 20
"""Read and thrown away of a body that is too large: most clients read the answer only after they have sent all."""
BODY_SECONDS = 30.0
"""For a body to come."""
MAX_VALUES, MAX_DEPTH, MAX_NUMBER = 4096, 8, 32
"""Names and values of a body, how deep they are in each other, and letters of a number: a container with as many
arguments, variables, secrets and mounts as it may have needs 3,500, four deep."""
MAX_TOKENS = 4 * MAX_VALUES
"""The same with commas, colons and space between any two."""
MAX_KNOWN = 4096
"""Credentials whose rate is remembered, before those are forgotten that have been quiet."""
_TOKEN = re.compile(rb'(")(?:[^"\\]++|\\.)*+"?|([\[{])|([\]}])|[,:]|[ \t\r\n]++|([^]\[{}",: \t\r\n]++)', re.DOTALL)
"""Of a JSON text (RFC 8259), right or wrong: 1 string, 2 and 3 begin and end, 4 a number or a word."""


def check_shape(body: bytes) -> None:
    """Refuse a body with more values than any request needs, before it is parsed.

    Raises Refusal (request_invalid); the reader checks whether it is JSON.
    """
    values = depth = 0
    for count, token in enumerate(_TOKEN.finditer(body)):
        kind = token.lastindex
        values += kind in (1, 2, 4)
        depth += (kind == 2) - (kind == 3)
        if values > MAX_VALUES or count >= MAX_TOKENS:
            raise Refusal("request_invalid", f"the body has more than {MAX_VALUES} names and values")
        if depth > MAX_DEPTH:
            raise Refusal("request_invalid", f"the body is more than {MAX_DEPTH} objects and lists deep")
        if kind == 4 and token.end() - token.start() > MAX_NUMBER:
            raise Refusal("request_invalid", f"a number or word of the body has more than {MAX_NUMBER} letters")


async def read_body(request: Request) -> bytes:
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


async def throw_away_body(request: Request) -> None:
    """Read the rest of an unused body: a client that is cut off while it sends does not read the reason."""
    size = 0
    # RuntimeError: it was read to its end
    with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY:
                    break


def read_model(model: type[BaseModel], body: bytes) -> BaseModel:
    """Return the model in a body; raises Refusal (request_invalid) that names each wrong place, but no value."""
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


class Turns:
    """Lets one task at a time do what takes long; of each tenancy, or admin, only one stands in the common queue."""

    def __init__(self) -> None:
        self._all = asyncio.Lock()
        self.waiting_by_owner: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def take(self, who: str) -> AsyncIterator[None]:
        """Have a turn; nothing should be waited for in it."""
        own = self.waiting_by_owner.get(who) or asyncio.Lock()
        self.waiting_by_owner[who] = own
        async with own, self._all:
            await asyncio.sleep(0)  # everything ready goes first, and newcomers queue behind
            yield


class Rates:
    """Limits the requests of each credential: ``rate`` a second, plus the unused ones of the last BURST seconds.

    A request may cost more than that; then the next ones wait longer.
    """

    BURST = 4.0

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self._clock = rate, clock
        self.paid_at: dict[str, float] = {}

    def charge(self, who: str, cost: float = 1.0) -> None:
        """Count a request, or more of one; raises Refusal (too_many_requests)."""
        now = self._clock()
        paid = max(self.paid_at.get(who, now), now)
        if paid - now >= self.BURST:
            text = f"more than {self.rate:g} requests a second with one credential"
            raise Refusal("too_many_requests", text, retry_after=math.ceil(paid - now - self.BURST) + 1)
        if len(self.paid_at) >= MAX_KNOWN:
            self.paid_at = {one: at for one, at in self.paid_at.items() if at > now}
        self.paid_at[who] = paid + cost / self.rate
