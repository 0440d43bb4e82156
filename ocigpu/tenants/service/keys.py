"""API keys over HTTP, for admins, and whose credential a request has."""

import contextlib

from starlette.responses import Response

from ocigpu.core.errors import quoted
from ocigpu.tenants.service import models
from ocigpu.tenants.service.api_keys import ApiKey
from ocigpu.tenants.service.cluster import ClusterError
from ocigpu.tenants.service.cursors import make_cursor, read_cursor
from ocigpu.tenants.service.lifecycle import write_time, write_time_of
from ocigpu.tenants.service.parameters import Cursor, Limit
from ocigpu.tenants.service.problems import Refusal
from ocigpu.tenants.service.request import ApiRequest

_FILTERS = {"of": "keys"}


async def create_key(request: ApiRequest, wanted: models.KeyRequest) -> models.NewKey:
    """Make a key and show it, this once."""
    store = request.service.store
    expires = store.clock() + wanted.expires_seconds if wanted.expires_seconds else None
    key, kept = store.keys.add(wanted.tenancy, wanted.scopes, wanted.label, expires)
    request.known.update(tenancy=wanted.tenancy, resource=f"/v1/keys/{kept.id}")
    note = ""
    if wanted.tenancy:
        with contextlib.suppress(ClusterError, Refusal):  # then nobody knows
            if await request.service.reconciler.cluster.read_tenancy(wanted.tenancy) is None:
                note = f"no tenancy is named {quoted(wanted.tenancy)} yet"
    return models.NewKey(**view_key(kept).model_dump(), key=key, note=note)


async def list_keys(request: ApiRequest, limit: Limit = 50, cursor: Cursor = "") -> models.KeyList:
    """Return the keys, without what would let anybody use them."""
    store = request.service.store
    found = store.keys.page(read_cursor(store.database.secret, cursor, _FILTERS), limit + 1)
    more = make_cursor(store.database.secret, found[limit - 1].id, _FILTERS) if len(found) > limit else None
    return models.KeyList(items=[view_key(key) for key in found[:limit]], next_cursor=more)


async def revoke_key(request: ApiRequest) -> Response:
    """End a key."""
    if not request.service.store.keys.revoke(request.id):
        raise Refusal("not_found", f"key {quoted(request.id, 80)}")
    return Response(status_code=204)


async def show_identity(request: ApiRequest) -> models.Identity:
    """Return whose the credential is."""
    who = request.principal
    return models.Identity(
        actor=who.actor, tenancy=who.tenancy, scopes=list(who.scopes), expires=write_time_of(who.expires)
    )


def view_key(key: ApiKey) -> models.KeyView:
    """Return a key as an admin sees it."""
    return models.KeyView(
        id=key.id, tenancy=key.tenancy, scopes=list(key.scopes), label=key.label, created=write_time(key.created),
        expires=write_time_of(key.expires), revoked=key.revoked,
    )  # fmt: skip
