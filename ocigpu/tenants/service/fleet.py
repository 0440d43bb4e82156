"""Nodes, their GPUs and the GPUs' leases as the cluster shows them now, for callers who may see them.

The node's journal is the truth of a lease (docs/tenants/LEASES.md); the object GPULease follows it, and this shows the
object.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from ocigpu.system.service import Backoff, ServiceLog
from ocigpu.tenants.service.cluster import ClusterClient, WatchCache
from ocigpu.tenants.service.models import GpuView, NodeOverview
from ocigpu.tenants.service.reconciler import ChangeSignal, ReconcilerPace

KINDS = ("Node", "GPULease")


class Fleet:
    """Follows the cluster while :meth:`run` does.  ``problems``: why kinds cannot be followed, "" where they are."""

    def __init__(
        self, cluster: ClusterClient, signal: ChangeSignal, resource: str, log: ServiceLog, pace: ReconcilerPace
    ) -> None:
        self._signal, self._resource = signal, resource
        self._followed = {kind: WatchCache(cluster, kind, Backoff(pace.first, pace.longest), log) for kind in KINDS}

    @property
    def problems(self) -> list[str]:
        return [each.problem for each in self._followed.values()]

    def is_gone(self, node: str) -> bool:
        """Whether the cluster has no node of this name; False while that is unknown."""
        nodes = self._followed["Node"]
        return not nodes.problem and ("", node) not in nodes.objects

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            for each in self._followed.values():
                group.create_task(each.run(lambda _: self._signal.notify()))

    def view(self) -> list[NodeOverview]:
        """Return the nodes that have GPUs, or leases of GPUs, by name."""
        nodes, leases = (each.objects.values() for each in self._followed.values())
        return view_nodes(nodes, leases, self._resource)


def view_nodes(
    nodes: Iterable[Mapping[str, Any]], objects: Iterable[Mapping[str, Any]], resource: str
) -> list[NodeOverview]:
    """Return nodes with the GPUs of their leases; pure."""
    found: dict[str, NodeOverview] = {}
    for node in nodes:
        status, spec = node.get("status") or {}, node.get("spec") or {}
        count = str((status.get("capacity") or {}).get(resource, "0"))
        ready = any(
            one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions") or ()
        )
        name = str(node["metadata"]["name"])
        found[name] = NodeOverview(
            name=name, ready=ready, schedulable=not spec.get("unschedulable"), gpus=[],
            capacity=int(count) if count.isdecimal() else 0,
        )  # fmt: skip
    leases = [(each.get("spec") or {}, each.get("status") or {}, str(each["metadata"]["name"])) for each in objects]
    modules = {(spec.get("nodeName"), spec.get("pciAddress")): status.get("physicalId") for spec, status, _ in leases}
    for spec, status, lease_name in leases:
        name = str(spec.get("nodeName") or "unknown")
        node_view = found.setdefault(name, NodeOverview(name=name, ready=False, schedulable=False, gpus=[], capacity=0))
        together = [modules.get((spec.get("nodeName"), address)) for address in status.get("set") or ()]
        node_view.gpus.append(_view_gpu(lease_name, spec, status, together))
    for one in found.values():
        one.gpus.sort(key=lambda gpu: (gpu.module or 0, gpu.lease))
    return [found[name] for name in sorted(found) if found[name].gpus or found[name].capacity]


def _view_gpu(name: str, spec: Mapping[str, Any], status: Mapping[str, Any], together: Iterable[Any]) -> GpuView:
    holder = status.get("holder") or {}
    module, generation = status.get("physicalId"), status.get("generation")
    return GpuView(
        lease=name,
        gpu=str(spec.get("pciAddress") or name),
        module=module if isinstance(module, int) else None,
        phase=str(status.get("phase") or "Unknown"),
        tenancy=str(holder.get("tenancy") or "") or None,
        container=str(holder.get("podName") or "").replace("ctr-", "ctr_", 1) or None,
        partition=sorted(one for one in together if isinstance(one, int)),
        generation=generation if isinstance(generation, int) else None,
        reason=str(status.get("reason") or ""),
    )
