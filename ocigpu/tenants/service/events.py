"""Events and the overview over HTTP, as pages or as streams."""

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator

from starlette.responses import Response

from ocigpu.core.errors import quoted
from ocigpu.tenants.service import models
from ocigpu.tenants.service.containers import find_container, view
from ocigpu.tenants.service.cursors import make_cursor, read_cursor
from ocigpu.tenants.service.event_log import StoredEvent
from ocigpu.tenants.service.lifecycle import write_time_of
from ocigpu.tenants.service.parameters import After, Cursor, LastEvent, Limit, TenancyName
from ocigpu.tenants.service.problems import PROBLEMS, Refusal
from ocigpu.tenants.service.reconciler import wait_at_most
from ocigpu.tenants.service.request import KEEP_ALIVE, ApiRequest

SETTLE = 0.3
"""Seconds in which changes are collected into one overview."""
MAX_SHOWN = 200
"""Containers of an overview, the newest."""


async def follow_container(request: ApiRequest, last_event_id: LastEvent = "", after: After = 0) -> Response:
    """Stream the events of a container until it is over."""
    found, last = find_container(request), _read_last(last_event_id, after)
    is_over = found.standing.lifecycle in models.FINAL and not found.deleting
    if is_over and not request.service.store.events.after(last, "", found.id, 1):
        return Response(status_code=204)
    return request.open_stream(_events(request, last, found.tenancy, found.id))


async def follow_events(
    request: ApiRequest,
    limit: Limit = 50,
    cursor: Cursor = "",
    tenancy: TenancyName = "",
    last_event_id: LastEvent = "",
    after: After = 0,
) -> models.EventList | Response:
    """Return a page of events, or stream them."""
    store, tenancy = request.service.store, request.principal.narrow(tenancy)
    if request.wants_stream:
        return request.open_stream(_events(request, _read_last(last_event_id, after), tenancy))
    filters = {"of": "events", "tenancy": tenancy}
    last = int(read_cursor(store.database.secret, cursor, filters) or after)
    found = store.events.after(last, tenancy, "", limit + 1)
    more = make_cursor(store.database.secret, str(found[limit - 1].id), filters) if len(found) > limit else None
    return models.EventList(items=[view_event(one) for one in found[:limit]], next_cursor=more)


def _read_last(header: str, after: int) -> int:
    """Return the event after which to continue: from the header that browsers send, else the parameter."""
    if header and not re.fullmatch(r"[0-9]{1,18}", header):
        raise Refusal("parameter_invalid", f"Last-Event-ID {quoted(header, 80)}: not the id of an event")
    return int(header) if header else after


async def _events(request: ApiRequest, last: int, tenancy: str, container: str = "") -> AsyncIterator[str]:
    signal = request.service.reconciler.signal
    yield "retry: 2000\n\n"
    with signal.subscribe() as heard:
        while not signal.closed and request.is_valid:
            heard.clear()
            found = request.service.store.events.after(last, tenancy, container)
            for event in found:
                last = event.id
                yield f"id: {event.id}\nevent: {event.kind}\ndata: {view_event(event).model_dump_json()}\n\n"
                if container and (event.kind == "deleted" or event.lifecycle in models.FINAL):
                    return
            if not found and not await wait_at_most(heard, KEEP_ALIVE):
                yield ": nothing new\n\n"


def view_event(event: StoredEvent) -> models.EventView:
    """Return an event as its reader sees it."""
    times = {name: write_time_of(getattr(event, name)) for name in ("at", "started", "finished")}
    return models.EventView(**{**event._asdict(), **times})


async def show_overview(request: ApiRequest) -> models.OverviewView | Response:
    """Return all at once, now or at each change."""
    return request.open_stream(_overviews(request)) if request.wants_stream else make_overview(request)


def make_overview(request: ApiRequest) -> models.OverviewView:
    """Return what the caller may see of nodes, GPUs and containers."""
    who, service = request.principal, request.service
    sees, mine = who.may("fleet:read"), who.tenancy or ""
    found = service.store.list_containers(mine, limit=service.store.fit(mine, limit=MAX_SHOWN))
    problems = [service.reconciler.problem, *service.fleet.problems, service.reconciler.unknown]
    if not sees:  # they name the API server's address
        problems = [PROBLEMS["cluster_unavailable"].title if service.reconciler.problem else ""]
    return models.OverviewView(
        nodes=service.fleet.view() if sees else None,
        containers=[view(one) for one in found],
        problem="; ".join(dict.fromkeys(filter(None, problems))),
    )


async def _share_overview(request: ApiRequest) -> str:
    """Return the overview for a stream; streams with equal rights share the one made since the last change."""
    service, sees = request.service, (request.principal.tenancy or "", request.principal.may("fleet:read"))
    async with request.take_turn():
        changes, now = service.reconciler.signal.count, time.monotonic()
        for one in [one for one, kept in service.overviews.items() if now - kept[1] >= KEEP_ALIVE]:
            del service.overviews[one]
        kept = service.overviews.get(sees)
        if kept is None or kept[0] != changes or now - kept[1] >= SETTLE:
            kept = service.overviews[sees] = (changes, now, make_overview(request).model_dump_json())
        return kept[2]


async def _overviews(request: ApiRequest) -> AsyncIterator[str]:
    signal, before = request.service.reconciler.signal, b""
    with signal.subscribe() as heard:
        while not signal.closed and request.is_valid:
            heard.clear()
            text = await _share_overview(request)
            now = hashlib.sha256(text.encode()).digest()
            yield f"event: overview\ndata: {text}\n\n" if now != before else ": nothing new\n\n"
            before, text = now, ""  # it is large, and its reader may take long
            if await wait_at_most(heard, KEEP_ALIVE):
                await asyncio.sleep(SETTLE)  # changes come in groups
