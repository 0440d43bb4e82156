"""The table of what is served: routes and the OpenAPI document are made of it, so they say the same."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ocigpu import __version__
from ocigpu.tenants.service import models, problems

MAX_LIMIT = 200
MAX_WAIT = 300


class QueryParameter(NamedTuple):
    """``schema``: of JSON Schema; its type is string, integer or boolean.  ``place``: query or header."""

    name: str
    schema: dict[str, Any]
    text: str
    place: str = "query"


class Endpoint(NamedTuple):
    """A method of a path.

    ``name``: that of the function that serves it; ``scope``: "" for any credential, None for none at all; ``media``:
    of an answer that is no model; ``problems``: codes beyond those that every request can get; ``waits``: for the
    cluster or for a change, and so takes its turn only where it does not.
    """

    method: str
    path: str
    name: str
    scope: str | None
    summary: str
    takes: type[BaseModel] | None = None
    gives: type[BaseModel] | None = None
    status: int = 200
    parameters: tuple[QueryParameter, ...] = ()
    media: tuple[str, ...] = ("application/json",)
    problems: tuple[str, ...] = ()
    waits: bool = False


def _text(name: str, text: str, pattern: str = "", **schema: Any) -> QueryParameter:
    return QueryParameter(name, {"type": "string", **({"pattern": pattern} if pattern else {}), **schema}, text)


def _number(name: str, text: str, low: int, high: int, default: int | None = None) -> QueryParameter:
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return QueryParameter(name, schema | ({} if default is None else {"default": default}), text)


LIMIT = _number("limit", "items of a page", 1, MAX_LIMIT, 50)
CURSOR = _text("cursor", "next_cursor of the page before", maxLength=400)
TENANCY = _text("tenancy", "of which; only for admin keys, default: all", models.TENANCY)
LAST_EVENT = QueryParameter(
    "Last-Event-ID", {"type": "string", "maxLength": 100}, "the stream goes on after this one", "header"
)
IDEMPOTENCY = QueryParameter(
    "Idempotency-Key",
    {"type": "string", "minLength": 1, "maxLength": 255},
    "with the same body it gives the same container for a day, however often it is sent"
    " (draft-ietf-httpapi-idempotency-key-header)",
    "header",
)
AFTER = _number("after", "id of the last event that is known", 0, 2**62)
EVENTS = ("text/event-stream",)
COMMON = ("parameter_invalid", "internal", "method_not_allowed")
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
        "POST", "/v1/containers", "create_container", "containers:write",
        "Run a container; it is accepted at once and starts when its tenancy, quota and GPUs allow",
        takes=models.ContainerRequest, gives=models.ContainerView, status=202, parameters=(IDEMPOTENCY,),
        problems=(
            "tenancy_mismatch", "tenancy_missing", "tenancy_unknown", "tenancy_not_active", "image_invalid",
            "registry_not_allowed", "gpus_no_partition", "mount_not_allowed", "timeout_too_long", "quota_exceeded",
            "too_many_containers", "store_full", "idempotency_in_flight", "idempotency_key_reused",
            "cluster_unavailable", "crd_version",
        ), waits=True,
    ),
    Endpoint(
        "GET", "/v1/containers", "list_containers", "containers:read", "List containers, newest first",
        gives=models.ContainerList, parameters=(
            LIMIT, CURSOR, TENANCY, _text("lifecycle", "only those", enum=list(models.LIFECYCLES)),
        ), problems=("cursor_invalid", "tenancy_mismatch"),
    ),
    Endpoint(
        "GET", "/v1/containers/{id}", "show_container", "containers:read", "Show a container, or wait for it",
        gives=models.ContainerView, parameters=(
            _text("wait", "answer once it has come so far, or further", enum=list(models.LIFECYCLES)),
            _number("timeout", "seconds after which the answer comes anyway", 1, MAX_WAIT, 60),
        ), problems=("not_found", "too_many_streams"), waits=True,
    ),
    Endpoint(
        "DELETE", "/v1/containers/{id}", "delete_container", "containers:write",
        "Stop and delete a container; it is gone once this answers not_found",
        gives=models.ContainerView, status=202, problems=("not_found",),
    ),
    Endpoint(
        "GET", "/v1/containers/{id}/events", "follow_container", "containers:read",
        "Follow a container until it has ended; 204 if no more events will come",
        media=EVENTS, parameters=(LAST_EVENT, AFTER), problems=("not_found", "too_many_streams"),
    ),
    Endpoint(
        "GET", "/v1/containers/{id}/logs", "read_logs", "logs:read",
        "Read a container's output; in an event stream each line has an id to resume from",
        media=("text/plain", *EVENTS), parameters=(
            QueryParameter("follow", {"type": "boolean", "default": False}, "until it has ended"),
            _number("tail", "only so many lines from the end", 0, 100_000),
            QueryParameter("since", {"type": "string", "format": "date-time"}, "only lines from then on"),
            QueryParameter("timestamps", {"type": "boolean", "default": False}, "each line after its time"),
            LAST_EVENT,
        ), problems=("not_found", "cluster_unavailable", "too_many_streams"),
    ),
    Endpoint(
        "GET", "/v1/events", "follow_events", "containers:read",
        "List the events of all containers, oldest first; with Accept: text/event-stream, follow them",
        gives=models.EventList, media=("application/json", *EVENTS),
        parameters=(LIMIT, CURSOR, TENANCY, LAST_EVENT, AFTER),
        problems=("cursor_invalid", "tenancy_mismatch", "too_many_streams"),
    ),
    Endpoint(
        "GET", "/v1/overview", "show_overview", "containers:read",
        "Show containers and, with the scope fleet:read, nodes, GPUs and leases; as an event stream, at each change",
        gives=models.OverviewView, media=("application/json", *EVENTS), problems=("too_many_streams",),
    ),
    Endpoint(
        "GET", "/v1/quotas", "show_quotas", "containers:read", "Show a tenancy's quota and usage",
        gives=models.QuotaList, parameters=(TENANCY,),
        problems=("tenancy_mismatch", "tenancy_missing", "tenancy_unknown", "cluster_unavailable", "crd_version"),
        waits=True,
    ),
    Endpoint("GET", "/v1/me", "show_identity", "", "Show whose credential this is", gives=models.Identity),
    Endpoint(
        "POST", "/v1/keys", "create_key", "admin", "Create an API key", takes=models.KeyRequest, gives=models.NewKey,
        status=201,
    ),
    Endpoint(
        "GET", "/v1/keys", "list_keys", "admin", "List API keys", gives=models.KeyList, parameters=(LIMIT, CURSOR),
        problems=("cursor_invalid",),
    ),
    Endpoint(
        "DELETE", "/v1/keys/{id}", "revoke_key", "admin", "Revoke an API key immediately", status=204,
        problems=("not_found",),
    ),
    Endpoint("GET", "/v1/openapi.json", "show_openapi", None, "Show this document"),
    Endpoint("GET", "/healthz", "show_health", None, "Tell whether the service is running"),
    Endpoint(
        "GET", "/readyz", "show_readiness", None, "Tell whether the service follows its cluster",
        problems=("cluster_unavailable",),
    ),
)  # fmt: skip


def problems_of(endpoint: Endpoint) -> list[str]:
    """Return the codes of the refusals that a method can answer with."""
    more = (WITH_CREDENTIAL if endpoint.scope is not None else ()) + (WITH_BODY if endpoint.takes else ())
    return sorted({*COMMON, *more, *endpoint.problems})


def make_document(gpus: Sequence[int]) -> dict[str, Any]:
    """Return the OpenAPI document (3.1.1) of the table.  ``gpus``: numbers that a container can have."""
    used: list[type[BaseModel]] = [models.ProblemView]
    for endpoint in ENDPOINTS:
        used += [model for model in (endpoint.takes, endpoint.gives) if model and model not in used]
    modes = [(model, "validation" if model.__name__.endswith("Request") else "serialization") for model in used]
    references, schemas = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        method = paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = {
            "operationId": endpoint.name,
            "summary": endpoint.summary,
            "parameters": [*_path_parameters(endpoint.path), *map(_parameter, endpoint.parameters)],
            "responses": _responses(endpoint),
        }
        if endpoint.scope is None:
            method["security"] = []
        elif endpoint.scope:
            method["description"] = f"Scope: {endpoint.scope}."
        if endpoint.takes:
            schema = {"$ref": f"#/components/schemas/{endpoint.takes.__name__}"}
            method["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    assert references
    schemas["$defs"]["ContainerRequest"]["properties"]["gpus"]["enum"] = list(gpus)
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


def _parameter(one: QueryParameter) -> dict[str, Any]:
    return {"name": one.name, "in": one.place, "required": False, "description": one.text, "schema": one.schema}


def _responses(endpoint: Endpoint) -> dict[str, Any]:
    content = {}
    for media in endpoint.media:
        schema: dict[str, Any] = {"type": "object"} if media == "application/json" else {"type": "string"}
        if endpoint.gives and media == "application/json":
            schema = {"$ref": f"#/components/schemas/{endpoint.gives.__name__}"}
        content[media] = {"schema": schema}
    good: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.status != 204:
        good["content"] = content
    if endpoint.name == "create_container":
        good["headers"] = {"Location": {"description": "the container", "schema": {"type": "string"}}}
    found = {str(endpoint.status): good}
    if endpoint.name == "follow_container":
        found["204"] = {"description": "nothing more to come"}
    if endpoint.name == "show_container":
        found["304"] = {"description": "it is as the ETag in If-None-Match says"}
    by_status: dict[int, list[str]] = {}
    for code in problems_of(endpoint):
        by_status.setdefault(problems.PROBLEMS[code].status, []).append(code)
    for status, codes in sorted(by_status.items()):
        schema = {"allOf": [{"$ref": "#/components/schemas/ProblemView"}, {"properties": {"code": {"enum": codes}}}]}
        found[str(status)] = {"description": ", ".join(codes), "content": {problems.MEDIA_TYPE: {"schema": schema}}}
    return found
