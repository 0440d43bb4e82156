"""Containers over HTTP: created, listed, shown and deleted."""

import re
import time
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from ocigpu.core.errors import quoted
from ocigpu.kubernetes.cluster.quantity import parse_quantity
from ocigpu.tenants.service import models
from ocigpu.tenants.service.cursors import make_cursor, read_cursor
from ocigpu.tenants.service.image import check_registry, parse_image
from ocigpu.tenants.service.lifecycle import ContainerStanding, write_time, write_time_of
from ocigpu.tenants.service.parameters import DIGITS, Cursor, Header, Limit, TenancyName
from ocigpu.tenants.service.pods import DOCKER_CONFIG, find_export, make_docker_config, size_of
from ocigpu.tenants.service.problems import Refusal
from ocigpu.tenants.service.reconciler import wait_at_most
from ocigpu.tenants.service.request import ApiRequest, TenantRules
from ocigpu.tenants.service.store import KeyTakenError, StoredContainer, StoreFullError
from ocigpu.tenants.service.tenancies import check_quota, check_tenancy, read_quotas

MAX_TEXTS = 1 << 20
"""Bytes of a pod's texts: etcd takes objects of 1.5 MiB, and a larger one would be tried again for ever."""
MAX_WAIT = 300
"""Seconds."""
IdempotencyKey = Annotated[
    str,
    Header("Idempotency-Key"),
    Field(
        max_length=255,
        json_schema_extra={"minLength": 1},  # an empty header counts as missing
        description="with the same body it returns the same container for a day, however often it is sent"
        " (draft-ietf-httpapi-idempotency-key-header)",
    ),
]


async def create_container(
    request: ApiRequest, wanted: models.ContainerRequest, idempotency_key: IdempotencyKey = ""
) -> models.ContainerView:
    """Accept a container, or repeat the answer to the same Idempotency-Key."""
    tenancy = request.principal.choose_tenancy(wanted.tenancy)
    request.known["tenancy"] = tenancy
    key = read_idempotency_key(idempotency_key)
    if not key:
        return await _create(request, wanted, tenancy, "")
    # a credential's keys are its tenancy's: another tenancy's cannot be guessed or met
    flight = (tenancy, key)
    in_flight, store = request.service.in_flight, request.service.store
    if flight in in_flight:
        raise Refusal("idempotency_in_flight", retry_after=1)
    in_flight.add(flight)
    try:
        if found := store.replay(tenancy, key, request.body):
            container = store.find_any(found.container)
            if not found.same_body or not container:
                raise Refusal("idempotency_key_reused")
            return _accept(request, container, {"Idempotency-Replayed": "true"})
        return await _create(request, wanted, tenancy, key)
    finally:
        in_flight.discard(flight)


async def _create(
    request: ApiRequest, wanted: models.ContainerRequest, tenancy: str, key: str
) -> models.ContainerView:  # fmt: skip
    store, reconciler = request.service.store, request.service.reconciler
    made_of = check_request(wanted, tenancy, request.service.rules)
    quota = await check_tenancy(request, tenancy, made_of["image"])
    check_share(made_of, quota)
    quotas = await read_quotas(request, tenancy)
    async with request.take_turn():
        # no await from here on: container and key are stored together, or neither is, whatever other replicas do
        try:
            with store.database.change():
                check_quota(request, quotas, tenancy, made_of["gpus"])
                ended = store.make_room(tenancy, len(request.body))
                made = store.add(tenancy, made_of, secret_values(wanted, made_of), key, request.body)
        except StoreFullError as error:
            raise Refusal(str(error), retry_after=30) from error
        except KeyTakenError as error:
            raise Refusal("idempotency_in_flight", retry_after=1) from error
        for one in (*ended, made.id):
            reconciler.look_at(one)
        return _accept(request, made, {})


def _accept(request: ApiRequest, container: StoredContainer, headers: Mapping[str, str]) -> models.ContainerView:
    request.headers.update({"Location": f"/v1/containers/{container.id}", **headers})
    return view(container)


async def list_containers(
    request: ApiRequest,
    limit: Limit = 50,
    cursor: Cursor = "",
    tenancy: TenancyName = "",
    lifecycle: Annotated[models.Lifecycle | None, Field(description="only those")] = None,
) -> models.ContainerList:
    """Return a page of containers."""
    store, tenancy, wanted = request.service.store, request.principal.narrow(tenancy), lifecycle or ""
    filters = {"of": "containers", "tenancy": tenancy, "lifecycle": wanted}
    before = read_cursor(store.database.secret, cursor, filters)
    limit = store.fit(tenancy, wanted, before, limit)
    found = store.list_containers(tenancy, wanted, before, limit + 1)
    more = make_cursor(store.database.secret, found[limit - 1].id, filters) if len(found) > limit else None
    return models.ContainerList(items=[view(one) for one in found[:limit]], next_cursor=more)


def find_container(request: ApiRequest) -> StoredContainer:
    """Return the container of the path; raises Refusal (not_found), also for another tenancy's."""
    found = request.service.store.find(request.id) if len(request.id) < 64 else None
    if not found or request.principal.tenancy not in (None, found.tenancy):
        raise Refusal("not_found", f"container {quoted(request.id, 80)}")
    request.known["tenancy"] = found.tenancy
    return found


async def show_container(
    request: ApiRequest,
    wait: Annotated[
        models.Lifecycle | None, Field(description="answer once it has come so far, or further")
    ] = None,
    timeout: Annotated[
        int, Field(ge=1, le=MAX_WAIT, description="seconds after which the answer comes anyway"), DIGITS
    ] = 60,
) -> models.ContainerView | Response:  # fmt: skip
    """Return a container, at once or when it has come so far."""
    found = find_container(request)
    if wait:
        with request.take_stream():
            found = await _wait(request, wait, timeout) or found
        request.require_valid()  # it may have been ended meanwhile
    tag = request.headers["ETag"] = f'"{found.version}"'
    if tag == request.http.headers.get("if-none-match"):
        return Response(status_code=304, headers=request.headers)
    async with request.take_turn():
        return view(found)


async def _wait(request: ApiRequest, wanted: models.Lifecycle, seconds: float) -> StoredContainer | None:
    store, signal = request.service.store, request.service.reconciler.signal
    rank, end = models.LIFECYCLES.index(wanted), time.monotonic() + seconds
    # a client that waits for success also needs to learn of failure
    with signal.subscribe() as heard:
        while True:
            heard.clear()
            found = store.find(request.id)
            over = not found or found.standing.lifecycle in models.FINAL
            if over or (found and models.LIFECYCLES.index(found.standing.lifecycle) >= rank):
                return found
            left = end - time.monotonic()
            if left <= 0 or signal.closed or not await wait_at_most(heard, left):
                return store.find(request.id)


async def delete_container(request: ApiRequest) -> models.ContainerView:
    """Have a container ended and forgotten."""
    store, found = request.service.store, find_container(request)
    if not found.deleting:
        store.note_deleting(found.id)
        request.service.reconciler.look_at(found.id)
    return view(store.find(found.id) or found)


def check_request(wanted: models.ContainerRequest, tenancy: str, rules: TenantRules) -> dict[str, Any]:
    """Return the part of a request to run and store, without the values of secrets; raises Refusal."""
    image = parse_image(wanted.image)
    check_registry(image, rules.registries)
    wanted.check_gpus()
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
    """Return the secrets, dropped once they are in the cluster: variables, credentials for the image's registry."""
    found = dict(wanted.secrets)
    if who := wanted.pull_credentials:
        found[DOCKER_CONFIG] = make_docker_config(parse_image(request["image"]).registry, who.username, who.password)
    return found


def check_share(request: Mapping[str, Any], quota: Mapping[str, Any]) -> None:
    """Raise Refusal (quota_exceeded) for a request above the tenancy's limit for all of its containers."""
    for name, asked in (("cpu", request["cpus"]), ("memory", request["memory"])):
        most = parse_quantity(quota[name])
        if asked and most is not None and (parse_quantity(asked) or 0) > most:
            raise Refusal("quota_exceeded", f"{name} {asked}: the tenancy has {quota[name]} for all of its containers")


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
        created=write_time(container.created),
        started=write_time_of(standing.started),
        finished=write_time_of(standing.finished),
        phases=models.Phases(**{name: round(seconds, 3) for name, seconds in standing.phases.items()}),
        version=container.version,
    )


def read_idempotency_key(text: str) -> str:
    """Return the key: a string of RFC 8941, or its bare characters as most clients send it; raises Refusal."""
    if not text:
        return ""
    bare = re.fullmatch(r'"((?:[ !#-\[\]-~]|\\["\\])*)"', text)
    key = bare[1].replace('\\"', '"').replace("\\\\", "\\") if bare else text
    if not key or not re.fullmatch(r"[ -~]{1,255}", key) or (not bare and '"' in key):
        raise Refusal("parameter_invalid", 'Idempotency-Key: 1 to 255 printable characters, as a "string"')
    return key
