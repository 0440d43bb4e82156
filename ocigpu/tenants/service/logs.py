"""What containers print, over HTTP: from the cluster while they run, from the store once they have ended."""

import asyncio
import io
import re
from collections.abc import AsyncIterator
from typing import Annotated, NamedTuple

from pydantic import Field
from starlette.responses import Response

from ocigpu.kubernetes.cluster.names import namespace_name
from ocigpu.tenants.service import models
from ocigpu.tenants.service.cluster import ClusterError
from ocigpu.tenants.service.containers import find_container
from ocigpu.tenants.service.lifecycle import read_time
from ocigpu.tenants.service.parameters import DIGITS, LastEvent, Switch, Time
from ocigpu.tenants.service.pods import object_name
from ocigpu.tenants.service.reconciler import wait_at_most
from ocigpu.tenants.service.request import KEEP_ALIVE, STREAM, ApiRequest
from ocigpu.tenants.service.store import StoredContainer

LINES = 64
"""Of a log that are sent before others have their turn."""
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


class LogWindow(NamedTuple):
    """The requested lines of a log.

    ``follow``: also future lines; ``tail``: only this many from the end; ``since``: only from this time on, in seconds
    since 1970; ``last``: only those after the line with this id, "" for all.
    """

    follow: bool
    tail: int | None
    since: float | None
    last: str


async def read_logs(
    request: ApiRequest,
    follow: Annotated[Switch, Field(description="until it has ended")] = False,
    tail: Annotated[int | None, Field(ge=0, le=100_000, description="only so many lines from the end"), DIGITS] = None,
    since: Annotated[Time, Field(description="only lines from then on")] = "",
    timestamps: Annotated[Switch, Field(description="each line after its time")] = False,
    last_event_id: LastEvent = "",
) -> Response:
    """Return or stream what a container prints."""
    found, in_events = find_container(request), request.wants_stream
    lines = read_lines(request, found, LogWindow(follow, tail, read_time(since), last_event_id))

    async def parts() -> AsyncIterator[str]:
        count = 0
        async for number, at, text in lines:
            if follow and not request.is_valid:
                break
            shown = f"{at} {text}" if timestamps else text
            yield f"id: {number}\ndata: {shown}\n\n" if in_events else f"{shown}\n"
            count += 1
            if not count % LINES:  # all buffered lines may come without an await
                await asyncio.sleep(0)
        if in_events:
            yield "event: end\ndata:\n\n"

    return request.open_stream(parts(), STREAM if in_events else "text/plain")


async def read_lines(
    request: ApiRequest, container: StoredContainer, window: LogWindow
) -> AsyncIterator[tuple[str, str, str]]:
    """Yield (id, time, text) of lines; an id is the time, and which line of that time it is."""
    from_time, _, count = window.last.partition("/")
    known = (from_time, int(count) if count.isdecimal() else 0)
    before, number = "", 0
    async for line in _read_raw(request, container, window, from_time):
        at, _, text = line.partition(" ")
        if not _STAMP.fullmatch(at):  # what followed a carriage return: the library takes it for a line
            at, text = before, line
        number = number + 1 if at == before else 0
        before = at
        if window.last and (_sortable(at), number) <= (_sortable(known[0]), known[1]):
            continue
        if window.since is not None and (stamp := read_time(at)) is not None and stamp < window.since:
            continue
        yield f"{at}/{number}", at, text


async def _read_raw(
    request: ApiRequest, container: StoredContainer, window: LogWindow, from_time: str
) -> AsyncIterator[str]:
    store = request.service.store
    kept = store.read_log(container.id)
    if kept is None and window.follow:
        started = await _wait_until_started(request, container.id)
        kept = store.read_log(container.id) if started else b""
    if kept is None:
        begin = max((at for at in (window.since, read_time(from_time)) if at is not None), default=None)
        ago = None if begin is None else max(0.0, store.clock() - begin) + 1
        stream = request.service.reconciler.cluster.read_log(
            namespace_name(container.tenancy), object_name(container.id), window.follow, window.tail, ago
        )
        try:
            async for line in stream:
                yield line
        except ClusterError as error:
            if error.status in (0, 400, 404):  # the pod has none yet, or any more; or the connection broke
                return
            raise
        return
    if window.tail is not None:
        kept = b"\n".join(kept.rsplit(b"\n", window.tail + 1)[-window.tail - 1 :])
    for raw in io.BytesIO(kept):
        yield raw.decode("utf-8", "replace").removesuffix("\n")


async def _wait_until_started(request: ApiRequest, container: str) -> bool:
    """Return whether there is output, or may be soon; False if the container ended without any."""
    store, signal = request.service.store, request.service.reconciler.signal
    with signal.subscribe() as heard:
        while not signal.closed:
            heard.clear()
            found = store.find(container)
            if not found or found.standing.lifecycle in ("stopping", *models.FINAL):
                return False if not found else store.read_log(container) is not None
            if found.standing.lifecycle == "running":
                return True
            await wait_at_most(heard, KEEP_ALIVE)
    return False


def _sortable(stamp: str) -> str:
    """Return a time of the kubelet (RFC3339Nano leaves zeros at the end out) with all nine digits, in UTC or not."""
    found = _STAMP.fullmatch(stamp)
    return f"{found[1]}.{(found[2] or ''):0<9}{'+00:00' if found[3] == 'Z' else found[3]}" if found else stamp
