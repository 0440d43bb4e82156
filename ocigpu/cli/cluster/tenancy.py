"""``ocigpu tenancy``: tenancies of a cluster, and the controller that makes them what they are to be."""

import contextlib
import os
from typing import TYPE_CHECKING, Any

from ocigpu.cli.front import show
from ocigpu.cli.front.common import check_one_of
from ocigpu.cli.front.optional import needing
from ocigpu.core.errors import HostError, UsageError

if TYPE_CHECKING:
    from ocigpu.kubernetes.cluster.documents import Documents

NEEDED = "tenancies need lightkube"
NETWORKS = ("auto", "cilium", "networkpolicy")


def controller_command(
    resource: str = "nvidia.com/gpu",
    network: str = "auto",
    deny: list[str] | None = None,
    dns: list[str] | None = None,
    namespace: str = "",
    json: bool = False,
) -> None:
    import ipaddress

    check_one_of("--network", network, NETWORKS)
    for option, each in [*(("--deny", one) for one in deny or ()), *(("--dns", one) for one in dns or ())]:
        try:
            ipaddress.ip_network(each)
        except ValueError as error:
            raise UsageError(f"{option} {each!r} is not a network such as 169.254.169.254/32: {error}") from error
    with needing(NEEDED, "OCIGPU-TEN-1"):
        from ocigpu.tenants.controller import ControllerService
    from ocigpu.system.service import ServiceLog
    from ocigpu.tenants.tenancy import TenancyOptions

    options = TenancyOptions(resource, tuple(deny or ()), tuple(dns or ()))
    namespace = namespace or os.environ.get("POD_NAMESPACE", "")
    ControllerService(options, ServiceLog(json), network, namespace).run()


def list_command() -> "show.Answer":
    with _open() as documents:
        found = [_summary(each) for each in documents.list("Tenancy")[0]]
    yield {"tenancies": found}
    rows = [list(map(str, each.values())) for each in found]
    show.table(["tenancy", "phase", "gpus", "used", "namespace", "why"], rows)


def show_command(name: str) -> "show.Answer":
    with _open() as documents:
        found = _find(documents, name)
    yield {"name": name, "spec": found.get("spec", {}), "status": found.get("status", {})}
    show.fields([(key, str(value)) for key, value in _summary(found).items() if key != "why"])
    conditions = (found.get("status") or {}).get("conditions") or []
    rows = [[each["type"], each["status"], each["reason"], each["message"]] for each in conditions]
    show.table(["condition", "status", "reason", "message"], rows)


def create_command(
    name: str,
    gpus: int = 8,
    containers: int = 32,
    internet: bool = False,
    restricted: bool = False,
    only_registry: list[str] | None = None,
) -> "show.Answer":
    from ocigpu.kubernetes.cluster.names import GROUP, VERSION

    spec: dict[str, Any] = {"quota": {"gpus": gpus, "pods": containers}, "internet": internet}
    spec["registries"] = only_registry or []
    spec["podSecurity"] = "restricted" if restricted else "baseline"
    head = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Tenancy", "metadata": {"name": name}}
    with _open() as documents:
        made = documents.create({**head, "spec": spec})
    yield from _say(made, f"made; its state: ocigpu tenancy show {name}")


def suspend_command(name: str, resume: bool = False) -> "show.Answer":
    with _open() as documents:
        found = _find(documents, name)
        written = documents.update({**found, "spec": {**(found.get("spec") or {}), "suspended": not resume}})
    yield from _say(written, "goes on" if resume else "suspended: its pods are deleted and it gets no others")


def delete_command(name: str) -> "show.Answer":
    with _open() as documents:
        found = _find(documents, name)
        documents.delete(found)
    yield from _say(found, "deleted: it disappears when its pods have ended and its GPUs are returned")


def _open() -> "contextlib.closing[Documents]":
    with needing(NEEDED, "OCIGPU-TEN-1"):
        from ocigpu.kubernetes.cluster.documents import Documents
    return contextlib.closing(Documents())


def _find(documents: "Documents", name: str) -> "dict[str, Any]":
    found = documents.get("Tenancy", name)
    if found is None:
        raise HostError("OCIGPU-TEN-1", f'no tenancy named "{name}"', "See: ocigpu tenancy list")
    return found


def _summary(tenancy: "dict[str, Any]") -> "dict[str, Any]":
    status = tenancy.get("status") or {}
    ready: dict[str, Any] = next((each for each in status.get("conditions") or [] if each["type"] == "Ready"), {})
    return {
        "tenancy": tenancy["metadata"]["name"],
        "phase": status.get("phase", "Pending"),
        "gpus": tenancy.get("spec", {}).get("quota", {}).get("gpus", 0),
        "used": status.get("gpusUsed", "0"),
        "namespace": (status.get("namespace") or {}).get("name", ""),
        "why": "" if ready.get("status") == "True" else ready.get("reason", ""),
    }


def _say(tenancy: "dict[str, Any]", words: str) -> "show.Answer":
    yield _summary(tenancy)
    show.notes([f"tenancy {tenancy['metadata']['name']}: {words}"])
