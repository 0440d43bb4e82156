"""The table of endpoints: the handler for each method of a path, and the OpenAPI document made from both."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ocigpu import __version__
from ocigpu.tenants.service import about, containers, events, keys, logs, models, problems, tenancies
from ocigpu.tenants.service.parameters import HandlerSignature, RequestParameter, signature_of
from ocigpu.tenants.service.request import STREAM, Answer


class Endpoint(NamedTuple):
    """A method of a path.

    ``handler``: answers, from an ApiRequest and the parameters in its signature; ``scope``: "" for any credential, None
    if none is required; ``status``: of an answer that is a model; ``media``: of all answers; ``problems``: codes beyond
    those that every request can get; ``waits``: the handler waits for the cluster or for a change, and so takes a turn
    only for its other parts.
    """

    method: str
    path: str
    handler: Callable[..., Awaitable[Answer]]
    scope: str | None
    summary: str
    status: int = 200
    media: tuple[str, ...] = ("application/json",)
    problems: tuple[str, ...] = ()
    waits: bool = False

    @property
    def name(self) -> str:
        """The handler's name: what the document and the audit call it."""
        return self.handler.__name__

    @property
    def signature(self) -> HandlerSignature:
        """What the handler takes and gives."""
        return signature_of(self.handler)


COMMON = ("parameter_invalid", "internal", "method_not_allowed", "stopping", "store_unavailable")
WITH_CREDENTIAL = (
    "credential_missing",
    "credential_invalid",
    "scope_missing",
    "provider_unavailable",
    "too_many_requests",
)
WITH_BODY = ("request_invalid", "body_too_large", "body_too_slow", "media_type")
ENDPOINTS = (
    Endpoint(
        "POST", "/v1/containers", containers.create_container, "containers:write",
        "Run a container; it is accepted at once and starts when its tenancy, quota and GPUs allow", status=202,
        problems=(
            "tenancy_mismatch", "tenancy_missing", "tenancy_unknown", "tenancy_not_active", "image_invalid",
            "registry_not_allowed", "gpus_no_partition", "mount_not_allowed", "timeout_too_long", "quota_exceeded",
            "too_many_containers", "store_full", "idempotency_in_flight", "idempotency_key_reused",
            "cluster_unavailable", "crd_version",
        ), waits=True,
    ),
    Endpoint(
        "GET", "/v1/containers", containers.list_containers, "containers:read", "List containers, newest first",
        problems=("cursor_invalid", "tenancy_mismatch"),
    ),
    Endpoint(
        "GET", "/v1/containers/{id}", containers.show_container, "containers:read", "Show a container, or wait for it",
        problems=("not_found", "too_many_streams"), waits=True,
    ),
    Endpoint(
        "DELETE", "/v1/containers/{id}", containers.delete_container, "containers:write",
        "Stop and delete a container; it is gone once this answers not_found", status=202, problems=("not_found",),
    ),
    Endpoint(
        "GET", "/v1/containers/{id}/events", events.follow_container, "containers:read",
        "Follow a container until it has ended; 204 if no more events will come", media=(STREAM,),
        problems=("not_found", "too_many_streams"),
    ),
    Endpoint(
        "GET", "/v1/containers/{id}/logs", logs.read_logs, "logs:read",
        "Read a container's output; in an event stream each line has an id to resume from",
        media=("text/plain", STREAM), problems=("not_found", "cluster_unavailable", "too_many_streams"),
    ),
    Endpoint(
        "GET", "/v1/events", events.follow_events, "containers:read",
        "List the events of all containers, oldest first; with Accept: text/event-stream, follow them",
        media=("application/json", STREAM), problems=("cursor_invalid", "tenancy_mismatch", "too_many_streams"),
    ),
    Endpoint(
        "GET", "/v1/overview", events.show_overview, "containers:read",
        "Show containers and, with the scope fleet:read, nodes, GPUs and leases; as an event stream, at each change",
        media=("application/json", STREAM), problems=("too_many_streams",),
    ),
    Endpoint(
        "GET", "/v1/quotas", tenancies.show_quotas, "containers:read", "Show a tenancy's quota and usage",
        problems=("tenancy_mismatch", "tenancy_missing", "tenancy_unknown", "cluster_unavailable", "crd_version"),
        waits=True,
    ),
    Endpoint("GET", "/v1/me", keys.show_identity, "", "Show whose credential this is"),
    Endpoint("POST", "/v1/keys", keys.create_key, "admin", "Create an API key", status=201, waits=True),
    Endpoint("GET", "/v1/keys", keys.list_keys, "admin", "List API keys", problems=("cursor_invalid",)),
    Endpoint(
        "DELETE", "/v1/keys/{id}", keys.revoke_key, "admin", "Revoke an API key immediately", status=204,
        problems=("not_found",),
    ),
    Endpoint("GET", "/v1/openapi.json", about.show_openapi, None, "Show this document"),
    Endpoint("GET", "/healthz", about.show_health, None, "Tell whether the service is running"),
    Endpoint(
        "GET", "/readyz", about.show_readiness, None, "Tell whether the service follows its cluster",
        problems=("cluster_unavailable",),
    ),
)  # fmt: skip


def problems_of(endpoint: Endpoint) -> list[str]:
    """Return the codes of the refusals that a method can answer with."""
    more = (WITH_CREDENTIAL if endpoint.scope is not None else ()) + (WITH_BODY if endpoint.signature.takes else ())
    return sorted({*COMMON, *more, *endpoint.problems})


def make_document(types: Mapping[type[BaseModel], type[BaseModel]]) -> dict[str, Any]:
    """Return the OpenAPI document (3.1.1) of the table.  ``types``: of this service, by those that handlers take."""
    used: list[type[BaseModel]] = [models.ProblemView]
    for endpoint in ENDPOINTS:
        takes, gives = endpoint.signature.takes, endpoint.signature.gives
        used += [types.get(model, model) for model in (takes, gives) if model]
    modes = [(model, "validation" if model.__name__.endswith("Request") else "serialization") for model in used]
    unique = list(dict.fromkeys(modes))
    _, schemas = models_json_schema(unique, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type] # strings for one of two literals
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        method = paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = {
            "operationId": endpoint.name,
            "summary": endpoint.summary,
            "parameters": [*_path_parameters(endpoint.path), *map(_parameter, endpoint.signature.parameters)],
            "responses": _responses(endpoint),
        }
        if endpoint.scope is None:
            method["security"] = []
        elif endpoint.scope:
            method["description"] = f"Scope: {endpoint.scope}."
        if endpoint.signature.takes:
            schema = {"$ref": f"#/components/schemas/{endpoint.signature.takes.__name__}"}
            method["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {
        "openapi": "3.1.1",
        "info": {"title": "ocigpu: GPU containers as a service", "version": __version__, "license": {
            "name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {
                "type": "http", "scheme": "bearer",
                "description": "An API key, or a token of the operator's identity provider.",
            }},
            "schemas": schemas["$defs"],
        },
    }  # fmt: skip


def _path_parameters(path: str) -> list[dict[str, Any]]:
    if "{id}" not in path:
        return []
    return [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]


def _parameter(one: RequestParameter) -> dict[str, Any]:
    return {"name": one.name, "in": one.place, "required": False, "description": one.text, "schema": one.schema}


def _responses(endpoint: Endpoint) -> dict[str, Any]:
    content = {}
    for media in endpoint.media:
        schema: dict[str, Any] = {"type": "object"} if media == "application/json" else {"type": "string"}
        if endpoint.signature.gives and media == "application/json":
            schema = {"$ref": f"#/components/schemas/{endpoint.signature.gives.__name__}"}
        content[media] = {"schema": schema}
    good: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.status != 204:
        good["content"] = content
    if endpoint.handler is containers.create_container:
        good["headers"] = {"Location": {"description": "the container", "schema": {"type": "string"}}}
    found = {str(endpoint.status): good}
    if endpoint.handler is events.follow_container:
        found["204"] = {"description": "nothing more to come"}
    if endpoint.handler is containers.show_container:
        found["304"] = {"description": "it is as the ETag in If-None-Match says"}
    by_status: dict[int, list[str]] = {}
    for code in problems_of(endpoint):
        by_status.setdefault(problems.PROBLEMS[code].status, []).append(code)
    for status, codes in sorted(by_status.items()):
        schema = {"allOf": [{"$ref": "#/components/schemas/ProblemView"}, {"properties": {"code": {"enum": codes}}}]}
        found[str(status)] = {"description": ", ".join(codes), "content": {problems.MEDIA_TYPE: {"schema": schema}}}
    return found
