"""How much of the service one credential gets: how large a body's JSON may be, how often, and in whose turn.

One thread answers everybody.  What a request can make it do is bounded before it does it; what still takes
milliseconds is done for one request at a time, and between two of them whatever else is ready goes first.
"""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Callable
from weakref import WeakValueDictionary

from ocigpu.tenants.service.problems import Refusal

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
    """Refuse a body that is larger in number than what any request takes, before anything is made of it.

    Raises Refusal (request_invalid); whether it is JSON is left to who reads it.
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


class Turns:
    """Lets one task at a time do what takes long; of each tenancy, or admin, only one stands in the common queue."""

    def __init__(self) -> None:
        self._all = asyncio.Lock()
        self._each: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def take(self, who: str) -> AsyncIterator[None]:
        """Have a turn; nothing should be waited for in it."""
        own = self._each.get(who) or asyncio.Lock()
        self._each[who] = own
        async with own, self._all:
            await asyncio.sleep(0)  # whatever is ready goes first, and who comes meanwhile stands behind
            yield


class Rates:
    """Counts what each credential asks for: ``rate`` a second, and what it has left of the last seconds (BURST).

    What one request costs may be more than that; then the next ones wait for longer.
    """

    BURST = 4.0

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self._clock = rate, clock
        self._paid_at: dict[str, float] = {}

    def charge(self, who: str, cost: float = 1.0) -> None:
        """Count a request, or more of one; raises Refusal (too_many_requests)."""
        now = self._clock()
        paid = max(self._paid_at.get(who, now), now)
        if paid - now >= self.BURST:
            text = f"more than {self.rate:g} requests a second with one credential"
            raise Refusal("too_many_requests", text, retry_after=math.ceil(paid - now - self.BURST) + 1)
        if len(self._paid_at) >= MAX_KNOWN:
            self._paid_at = {one: at for one, at in self._paid_at.items() if at > now}
        self._paid_at[who] = paid + cost / self.rate
