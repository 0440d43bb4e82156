"""``ocigpu explain claim/NAMESPACE/NAME``: what the API server has of a claim, compared with all that is published."""

from typing import Any, NamedTuple

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.dra.claims import allocated_devices
from ocigpu.kubernetes.dra.cluster import ApiCluster
from ocigpu.kubernetes.dra.fit import NodeFit, best_node, fit_nodes, held_devices, published_devices


class ClaimFit(NamedTuple):
    """``allocated``: its devices, () while it has none; ``notes``: of pools that do not count.

    ``nodes``: how it fits, see :func:`~ocigpu.kubernetes.dra.fit.fit_nodes`; () once it is allocated.
    """

    allocated: tuple[str, ...]
    notes: tuple[str, ...]
    nodes: tuple[NodeFit, ...]

    @property
    def is_well(self) -> bool:
        """Whether it is allocated, or could be."""
        return bool(self.allocated) or not best_node(self.nodes).problems

    def as_json(self) -> "dict[str, Any]":
        """Return what scripts read; ``requests``: those of the node where most of them fit."""
        return {
            "allocated": list(self.allocated),
            "notes": list(self.notes),
            "requests": _requests(best_node(self.nodes)) if self.nodes else [],
            "nodes": [{"node": each.node, "requests": _requests(each)} for each in self.nodes],
        }


def _requests(node: NodeFit) -> "list[dict[str, Any]]":
    return [
        {
            "request": fit.request,
            "fits": not fit.problem,
            "problem": fit.problem,
            "devices": [f"{each.driver}/{each.pool}/{each.name}" for each in fit.chosen],
            "free": [f"{each.driver}/{each.pool}/{each.name}" for each in fit.free],
            "refusals": [refusal._asdict() for refusal in fit.refusals],
        }
        for fit in node.fits
    ]


def read_fit(cluster: ApiCluster, namespace: str, name: str) -> ClaimFit:
    """Return how a claim fits; raises HostError OCIGPU-KUBE-5, OCIGPU-DRA-1 for no such claim, OCIGPU-DRA-6."""
    claim = cluster.get_claim(namespace, name)
    if claim is None:
        raise HostError(
            "OCIGPU-DRA-1", f"claim {namespace}/{name}: no such claim", "See: kubectl get resourceclaims -A"
        )
    allocated = tuple(f"{each['driver']}/{each['pool']}/{each['device']}" for each in allocated_devices(claim))
    devices, notes = published_devices(cluster.list_objects("ResourceSlice", "resourceslices", spec=True))
    if allocated:
        return ClaimFit(allocated, notes, ())
    classes = {each["metadata"]["name"]: each for each in cluster.list_objects("DeviceClass", "deviceclasses")}
    held = held_devices(cluster.list_objects("ResourceClaim", "resourceclaims", namespaced=True))
    return ClaimFit((), notes, fit_nodes(claim.get("spec") or {}, classes, devices, held))
