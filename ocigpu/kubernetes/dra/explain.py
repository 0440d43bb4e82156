"""``ocigpu explain claim/NAMESPACE/NAME``: what the API server has of a claim, compared with all that is published."""

from typing import Any, NamedTuple

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.dra.claims import allocated_devices
from ocigpu.kubernetes.dra.cluster import ApiCluster
from ocigpu.kubernetes.dra.fit import RequestFit, fit_claim, held_devices, published_devices


class ClaimFit(NamedTuple):
    """``allocated``: its devices, () while it has none; ``notes``: of pools that do not count; ``fits``: by request."""

    allocated: tuple[str, ...]
    notes: tuple[str, ...]
    fits: tuple[RequestFit, ...]

    @property
    def is_well(self) -> bool:
        """Whether it is allocated, or could be."""
        return bool(self.allocated) or not any(fit.problem for fit in self.fits)

    def as_json(self) -> "dict[str, Any]":
        """Return what scripts read."""
        requests = [
            {
                "request": fit.request,
                "fits": not fit.problem,
                "problem": fit.problem,
                "devices": [f"{each.driver}/{each.pool}/{each.name}" for each in fit.chosen],
                "refusals": [refusal._asdict() for refusal in fit.refusals],
            }
            for fit in self.fits
        ]
        return {"allocated": list(self.allocated), "notes": list(self.notes), "requests": requests}


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
    return ClaimFit((), notes, fit_claim(claim.get("spec") or {}, classes, devices, held))
