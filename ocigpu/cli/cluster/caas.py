"""Containers as a service: the service itself, and what a tenant does with one."""

import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

from ocigpu.cli.cluster.caas_client import CaasClient, connect, path_of
from ocigpu.cli.front import show
from ocigpu.cli.front.arguments import Range, takes
from ocigpu.cli.front.common import check_one_of
from ocigpu.cli.front.optional import needing
from ocigpu.core.errors import HostError, UsageError, printable


def serve_command(
    listen: str = "127.0.0.1:8443",
    health: str = "",
    store: str = "/var/lib/ocigpu/caas",
    kubeconfig: str = "",
    tls_certificate: str = "",
    tls_key: str = "",
    insecure: bool = False,
    registry: list[str] | None = None,
    nfs: list[str] | None = None,
    runtime_class: str = "kata-qemu-nvidia-gpu",
    resource: str = "nvidia.com/gpu",
    unlinked_sets: bool = False,
    create_tenancies: list[str] | None = None,
    cpus_per_gpu: Annotated[int, Range(0, 1024)] = 0,
    memory_per_gpu: str = "",
    image_pull_policy: str = "Always",
    timeout: Annotated[int, Range(1)] = 86400,
    max_timeout: Annotated[int, Range(1)] = 604800,
    keep_ended: Annotated[float, Range(0)] = 86400.0,
    keep_pods: Annotated[float, Range(0)] = 600.0,
    max_containers: Annotated[int, Range(1)] = 1000,
    max_stored: Annotated[int, Range(1)] = 256,
    rate: Annotated[float, Range(1)] = 50.0,
    oidc_issuer: str = "",
    oidc_audience: str = "",
    oidc_claim: str = "tenancy",
    oidc_algorithm: list[str] | None = None,
    audit: str = "",
    json: bool = False,
) -> None:
    import re

    if bool(tls_certificate) != bool(tls_key):
        raise UsageError("--tls-certificate and --tls-key are given together, or neither")
    check_one_of("--image-pull-policy", image_pull_policy, ("Always", "IfNotPresent"))
    if memory_per_gpu and not re.fullmatch(r"[1-9][0-9]*([KMGT]i?)?", memory_per_gpu):
        raise UsageError(f"--memory-per-gpu {memory_per_gpu!r} is not a quantity such as 64Gi")
    with needing("the service needs packages that are not installed", "OCIGPU-CAAS-1", "tenants"):
        from ocigpu.tenants.service.auth import OidcOptions
        from ocigpu.tenants.service.image import REGISTRIES
        from ocigpu.tenants.service.models import LINKED, UNLINKED
        from ocigpu.tenants.service.pods import PodOptions
        from ocigpu.tenants.service.request import TenantRules
        from ocigpu.tenants.service.server import CaasServer, ServiceOptions
        from ocigpu.tenants.service.store import StoreLimits
    _need_database(store)
    from ocigpu.system.service import ServiceLog

    algorithms = tuple(oidc_algorithm or ("RS256", "ES256", "EdDSA"))
    options = ServiceOptions(
        listen,
        store,
        kubeconfig,
        (tls_certificate, tls_key) if tls_key else (),
        insecure,
        audit,
        keep_ended,
        TenantRules(
            tuple(registry or REGISTRIES),
            tuple(nfs or ()),
            timeout,
            max_timeout,
            rate,
            UNLINKED if unlinked_sets else LINKED,
            tuple(create_tenancies or ()),
        ),
        PodOptions(runtime_class, resource, cpus_per_gpu, memory_per_gpu, pull_policy=image_pull_policy),
        OidcOptions(oidc_issuer, oidc_audience, oidc_claim, algorithms) if oidc_issuer else None,
        StoreLimits(max_containers, max_stored << 20),
        pod_seconds=keep_pods,
        health=health,
    )
    CaasServer(options, ServiceLog(json)).run()


def admin_key_command(store: str = "/var/lib/ocigpu/caas", label: str = "") -> "show.Answer":
    with needing("the store needs packages that are not installed", "OCIGPU-CAAS-1", "tenants"):
        from ocigpu.tenants.service.store import CaasStore
    _need_database(store)
    kept_in = CaasStore(store, create=False)
    try:
        key, kept = kept_in.keys.add(None, ["admin"], label, None)
    finally:
        kept_in.close()
    yield {"id": kept.id, "key": key}
    print(key)


def copy_store_command(to: str = "", store: str = "/var/lib/ocigpu/caas", reopen: bool = False) -> "show.Answer":
    if bool(to) == reopen:
        raise UsageError("one of --to URL and --reopen is needed")
    if "://" in store:
        raise UsageError("--store names a directory here: only a SQLite file is copied")
    with needing("the store needs packages that are not installed", "OCIGPU-CAAS-1", "tenants"):
        import ocigpu.tenants.service.store  # noqa: F401 - whether it can be
    _need_database("://")
    from ocigpu.tenants.service.store_copy import copy_store, reopen_store

    if reopen:
        was = reopen_store(store)
        yield {"reopened": was}
        print("Services can use the file again." if was else "The file was not copied; nothing has changed.")
        return
    counts = copy_store(store, to)
    yield {"rows": counts, "compared": sum(counts.values())}
    show.table(("table", "rows"), [[name, str(count)] for name, count in counts.items()])
    print(f"{sum(counts.values())} rows were copied, read back and compared.")


def _need_database(store: str) -> None:
    """Raise HostError for a URL of PostgreSQL whose library is missing."""
    if "://" in store:
        with needing("a store in PostgreSQL needs packages that are not installed", "OCIGPU-CAAS-1", "postgresql"):
            import ocigpu.tenants.service.postgresql  # noqa: F401 - whether it can be


@takes(connect)
def run_command(
    client: CaasClient,
    words: list[str],
    gpus: Annotated[int, Range(1)] = 1,
    cpus: Annotated[int, Range(0, 1024)] = 0,
    memory: str = "",
    tenancy: str = "",
    env: list[str] | None = None,
    secret: list[str] | None = None,
    pull_credentials: str = "",
    mount: list[str] | None = None,
    entrypoint: str = "",
    ends_after: Annotated[int, Range(0)] = 0,
    restart_policy: str = "never",
    idempotency_key: str = "",
    follow: bool = False,
    json: bool = False,
) -> int:
    import uuid

    body: dict[str, Any] = {"image": words[0], "gpus": gpus, "restart": restart_policy}
    more = {
        "args": words[1:],
        "command": [entrypoint] if entrypoint else [],
        "tenancy": tenancy,
        "cpus": cpus,
        "memory": memory,
        "env": _variables("--env", env or []),
        "secrets": _variables("--secret", secret or []),
        "pull_credentials": _pull_credentials(pull_credentials) if pull_credentials else None,
        "mounts": [_mount(text) for text in mount or []],
        "timeout_seconds": ends_after,
    }
    body |= {name: value for name, value in more.items() if value}
    # ours, so that a request whose answer was lost is not made twice
    headers = {"Idempotency-Key": f'"{idempotency_key or uuid.uuid4()}"'}
    made = _twice(client, body, headers)
    if not follow:
        show.data(made) if json else show.foreign(str(made["id"]))
        return 0
    if json:
        raise UsageError("--follow and --json contradict each other", "follow by hand: ocigpu caas logs --follow")
    return _follow(client, str(made["id"]))


def _twice(client: CaasClient, body: Any, headers: dict[str, str]) -> Any:
    try:
        return client.ask("POST", "/v1/containers", body, headers)
    except HostError:
        return client.ask("POST", "/v1/containers", body, headers)


def _follow(client: CaasClient, container: str) -> int:
    """Print what becomes of a container on standard error, what it prints on standard output; return its status."""
    last, state = "", ""
    for number, found in _say_events(client, container):
        last, state = number, found["lifecycle"]
        if state == "running":
            break
        if found["kind"] == "deleted":
            return 1
    if state in ("running", "finished", "failed"):
        for line in client.follow(path_of(container, "/logs", follow=True)):
            if line.kind == "end":
                break
            show.foreign(line.data, flush=True)
    if state == "running" and any(found["kind"] == "deleted" for _, found in _say_events(client, container, last)):
        return 1
    ended = client.ask("GET", path_of(container))
    print(printable(f"{container}: {_phases(ended)}"), file=sys.stderr)
    code = ended["exit_code"]
    return int(ended["lifecycle"] != "finished") if code is None else min(max(int(code), 0), 255)


def _say_events(client: CaasClient, container: str, last: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Print what becomes of a container after the event ``last``; yield the number and the data of each event."""
    import json

    for event in client.follow(path_of(container, "/events"), last):
        found = json.loads(event.data)
        text = ": ".join(filter(None, (found["lifecycle"], found["reason"], found["detail"])))
        print(printable(f"{container}: {text}"), file=sys.stderr)
        yield event.id, found


def _variables(option: str, texts: list[str]) -> dict[str, str]:
    """Return NAME=VALUE, and NAME with its value of the environment; raises UsageError."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise UsageError(f"{option} {name}: no value, and the environment has none", f"{option} NAME=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def _pull_credentials(path: str) -> dict[str, str]:
    """Return what a file says: USER:PASSWORD, on one line."""
    from ocigpu.cli.cluster.caas_client import read_line

    user, colon, password = read_line(path, "--pull-credentials").partition(":")
    if not (user and colon and password):
        raise UsageError(f'--pull-credentials "{printable(path, 200)}": no line USER:PASSWORD')
    return {"username": user, "password": password}


def _mount(text: str) -> dict[str, Any]:
    server, _, rest = text.partition(":")
    path, _, target = rest.partition(":")
    target, _, option = target.partition(":")
    if not (server and path and target) or option not in ("", "ro"):
        raise UsageError(f"--mount {text!r} is not SERVER:/PATH:/TARGET[:ro]")
    return {"server": server, "path": path, "target": target, "read_only": option == "ro"}


def _phases(container: Any) -> str:
    phases = ((name, seconds) for name, seconds in container["phases"].items() if seconds is not None)
    return ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in phases) or "no phase is known"


def _pages(client: CaasClient, path: str, limit: int = sys.maxsize, **filters: str) -> tuple[list[Any], bool]:
    """Return the items of a list, at most so many, and whether there are more."""
    from urllib.parse import urlencode

    items: list[Any] = []
    cursor = ""
    while len(items) < limit:
        query = {**filters, "cursor": cursor, "limit": str(min(200, limit - len(items)))}
        page = client.ask("GET", f"{path}?{urlencode({name: value for name, value in query.items() if value})}")
        items += page["items"]
        cursor = page["next_cursor"]
        if not cursor:
            break
    return items, bool(cursor)


@takes(connect)
def list_command(
    client: CaasClient,
    lifecycle: str = "",
    tenancy: str = "",
    limit: Annotated[int, Range(1)] = 100,
) -> "show.Answer":
    items, more = _pages(client, "/v1/containers", limit, lifecycle=lifecycle, tenancy=tenancy)
    yield {"containers": items, "more": more}
    headers = ("id", "tenancy", "gpus", "lifecycle", "reason", "node", "created", "image")
    show.table(headers, [[str(one[name] if one[name] is not None else "") for name in headers] for one in items])


@takes(connect)
def show_command(
    client: CaasClient,
    container: str,
    wait: str = "",
    wait_seconds: Annotated[int, Range(0, 300)] = 0,
) -> "show.Answer":
    found = client.ask("GET", path_of(container, wait=wait, timeout=wait_seconds if wait else 0))
    yield found
    plain = {name: value for name, value in found.items() if value not in (None, "", [], {}) and name != "phases"}
    rows = [(name, value if isinstance(value, str) else str(value)) for name, value in plain.items()]
    show.fields([*rows, ("phases", _phases(found))])


@takes(connect)
def logs_command(
    client: CaasClient,
    container: str,
    follow: bool = False,
    tail: Annotated[int, Range(-1)] = -1,
    since: str = "",
    timestamps: bool = False,
    json: bool = False,
) -> None:
    if json and (follow or timestamps):
        raise UsageError("--json prints all lines with their times at once: it excludes --follow and --timestamps")
    count = None if tail < 0 else str(tail)
    lines = []
    for line in client.follow(
        path_of(container, "/logs", follow=follow, tail=count, since=since, timestamps=timestamps)
    ):
        if line.kind == "end":
            break
        if json:
            lines.append({"time": line.id.rpartition("/")[0], "text": line.data})
        else:
            show.foreign(line.data, flush=follow)
    if json:
        show.data({"container": container, "lines": lines})


@takes(connect)
def delete_command(client: CaasClient, containers: list[str]) -> "show.Answer":
    yield {"containers": [client.ask("DELETE", path_of(one)) for one in containers]}


@takes(connect)
def keys_create_command(
    client: CaasClient,
    tenancy: str = "",
    scope: list[str] | None = None,
    expires: Annotated[int, Range(0)] = 0,
    label: str = "",
) -> "show.Answer":
    wanted = {"tenancy": tenancy, "scopes": scope, "expires_seconds": expires, "label": label}
    made = client.ask("POST", "/v1/keys", {name: value for name, value in wanted.items() if value})
    yield made
    show.foreign(str(made["key"]))
    if made.get("note"):
        print(printable(f"note: {made['note']}"), file=sys.stderr)


@takes(connect)
def keys_list_command(client: CaasClient) -> "show.Answer":
    items, _ = _pages(client, "/v1/keys")
    yield {"keys": items}
    headers = ("id", "tenancy", "scopes", "expires", "revoked", "label")
    rows = [{**one, "scopes": " ".join(one["scopes"]), "revoked": str(one["revoked"])} for one in items]
    show.table(headers, [[row[name] or "" for name in headers] for row in rows])


@takes(connect)
def keys_revoke_command(client: CaasClient, key: str) -> "show.Answer":
    from urllib.parse import quote

    is_own = client.ask("GET", "/v1/me")["actor"] == f"key:{key}"
    others = [one for one in _pages(client, "/v1/keys")[0] if one["id"] != key and not one["revoked"]] if is_own else []
    client.ask("DELETE", f"/v1/keys/{quote(key, safe='')}")
    yield {"id": key, "revoked": True}
    if is_own and not any("admin" in one["scopes"] for one in others):
        text = "that was the last admin key; to create one, where the service runs: ocigpu caas admin-key"
        print(f"note: {text}", file=sys.stderr)
