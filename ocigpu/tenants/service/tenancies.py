"""Requests about tenancies: whether one may run containers, its quota, and the creation of a new one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ocigpu.core.errors import quoted
from ocigpu.kubernetes.cluster.names import GROUP, VERSION, namespace_name
from ocigpu.kubernetes.cluster.quantity import parse_quantity
from ocigpu.tenants.service import models
from ocigpu.tenants.service.cluster import ClusterError
from ocigpu.tenants.service.image import check_registry, parse_image
from ocigpu.tenants.service.parameters import TenancyName
from ocigpu.tenants.service.problems import Refusal
from ocigpu.tenants.service.reconciler import ACTIVE, phase_of
from ocigpu.tenants.service.request import ADMIN, ApiRequest
from ocigpu.tenants.tenancy import read_spec


async def show_quotas(request: ApiRequest, tenancy: TenancyName = "") -> models.QuotaList:
    """Return what a tenancy may use and uses."""
    name = request.principal.choose_tenancy(tenancy)
    await _find_tenancy(request, name)
    return models.QuotaList(tenancy=name, items=await read_quotas(request, name))


async def check_tenancy(request: ApiRequest, name: str, image: str) -> Mapping[str, Any]:
    """Return the quota of a tenancy that may run this image; it is made if the operator permits that.

    Raises Refusal (tenancy_unknown, tenancy_not_active, registry_not_allowed, credential_invalid) and ClusterError.
    """
    found = await _find_tenancy(request, name, may_create=True)
    if phase_of(found) not in ACTIVE:
        raise Refusal("tenancy_not_active", f"tenancy {name} is {phase_of(found)}")
    if registries := (found.get("spec") or {}).get("registries"):
        check_registry(parse_image(image), registries)
    quota: Mapping[str, Any] = read_spec(dict(found))["quota"]
    return quota


async def _find_tenancy(request: ApiRequest, name: str, may_create: bool = False) -> Mapping[str, Any]:
    reconciler, who = request.service.reconciler, request.principal
    found = await reconciler.cluster.read_tenancy(name)
    creator = (ADMIN if who.may("admin") else "") if who.actor.startswith("key:") else who.issuer
    if found is None and may_create and creator and creator in request.service.rules.creators:
        try:
            await reconciler.cluster.create(new_tenancy(name, who.actor))
        except ClusterError as error:
            if error.passing:
                raise
            raise Refusal("tenancy_unknown", f"tenancy {name} cannot be made: {error.message}") from error
        request.known["made_tenancy"] = True
        found = await reconciler.cluster.read_tenancy(name)
    reconciler.note_tenancy(name, found)
    request.require_valid()  # it may have been of another tenancy, which had this name
    if found is None:
        raise Refusal("tenancy_unknown", f"no tenancy named {quoted(name)}")
    return found


def new_tenancy(name: str, actor: str) -> dict[str, Any]:
    """Return a tenancy with the defaults of its kind: only an operator gives one more."""
    metadata = {"name": name, "annotations": {"ocigpu.io/created-by": actor}}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Tenancy", "metadata": metadata, "spec": {}}


async def read_quotas(request: ApiRequest, tenancy: str) -> list[models.QuotaView]:
    """Return the quotas of a tenancy's namespace, as the cluster counts them; raises ClusterError."""
    found = []
    cluster = request.service.reconciler.cluster
    for quota in (await cluster.list_objects("ResourceQuota", namespace_name(tenancy)))[0]:
        status = quota.get("status") or {}
        used = status.get("used") or {}
        for name, hard in sorted((status.get("hard") or {}).items()):
            found.append(models.QuotaView(resource=name, hard=str(hard), used=str(used.get(name, "0"))))
    return found


def check_quota(request: ApiRequest, quotas: Sequence[models.QuotaView], tenancy: str, gpus: int) -> None:
    """Refuse what the cluster would refuse, in better words; the cluster's quota is what binds."""
    name = f"requests.{request.service.reconciler.options.resource}"
    for quota in quotas:
        if quota.resource == name:
            used = _count(quota.used) + request.service.store.waiting_gpus(tenancy)
            if used + gpus > _count(quota.hard):
                text = f"{gpus} GPUs more than the {used:g} in use or waiting are over the quota of {quota.hard}"
                raise Refusal("quota_exceeded", text, retry_after=30)


def _count(quantity: str) -> float:
    """Return a number of devices; an invalid one counts as no limit."""
    number = parse_quantity(quantity)
    return math.inf if number is None else float(number)
