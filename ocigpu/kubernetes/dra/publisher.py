"""Keeps the node's slices at the API server equal to its offer; writes only changes.

A pool is replaced as a whole: all slices of the next generation first, counters before the devices that need them, then
the old ones go.  If the server drops a field, the publisher notices, reports it, and no longer relies on the field.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.kubernetes.dra.cluster import ApiCluster
from ocigpu.kubernetes.dra.devices import DraDevice
from ocigpu.kubernetes.dra.slices import (
    ApiFeatures,
    Pool,
    Slice,
    as_objects,
    check_device,
    dropped_fields,
    features_without,
    from_version,
    make_slices,
    plan_slices,
)


class Published(NamedTuple):
    """The result: slices made and removed, and those that there are; ``features``: the fields that the server keeps."""

    made: int
    removed: int
    features: ApiFeatures
    slices: int = 0


def _is_about_notes(error: HostError) -> bool:
    """Whether the server refuses the effect None: words of k8s.io/apimachinery's validation (field.NotSupported)."""
    return all(word in error.message for word in ("422", "taints[", "].effect", 'Unsupported value: "None"'))


class Publisher:
    """Publishes one pool; of one thread.  ``log`` is a :class:`~ocigpu.system.service.ServiceLog`."""

    def __init__(self, cluster: ApiCluster, driver: str, node: str, log: Callable[..., None]) -> None:
        self._cluster, self._log = cluster, log
        self._pool = Pool(driver, node)
        self.features = ApiFeatures()

    def publish(self, devices: Sequence[DraDevice]) -> Published:
        """Publish these devices as the pool; those that the API would refuse are left out and reported.

        Raises HostError OCIGPU-KUBE-5 when the server cannot be reached, OCIGPU-DRA-7 when it refuses; then the former
        pool stays.
        """
        good = []
        for device in devices:
            problems = check_device(device)
            for problem in problems:
                self._log("error", f"not published: {problem}")
            if not problems:
                good.append(device)
        if not self._pool.owner:
            self._pool = self._pool._replace(owner=self._cluster.node_owner(self._pool.node))
        while True:
            try:
                dropped = self._replace(make_slices(good, self._pool, self.features))
            except HostError as error:
                if not (self.features.notes and _is_about_notes(error)):
                    raise
                self.features = self.features._replace(notes=False)
                self._log("info", "the API server has no taints without an effect (Kubernetes 1.35): going on without")
                continue
            if isinstance(dropped, Published):
                return dropped
            before, self.features = self.features, features_without(self.features, dropped)
            fields = ", ".join(dropped[:4])
            self._log("error", f"the API server leaves out {fields}: a feature of it is off; going on without it")
            if self.features == before:
                raise HostError("OCIGPU-DRA-7", f"the API server leaves out of a ResourceSlice: {fields}")

    def _replace(self, wanted: Sequence[Slice]) -> "Published | tuple[str, ...]":
        """Return the result, or the fields that the server drops; in that case nothing has changed."""
        version = self._cluster.version
        change = plan_slices(wanted, self._cluster.list_slices(self._pool.driver, self._pool.node))
        made: list[str] = []
        dropped: tuple[str, ...] = ()
        try:
            for document in as_objects(change.create, self._pool, version):
                present = self._cluster.create_slice(document)
                made.append(present.name)
                dropped = dropped_fields(from_version(document["spec"], version), present.spec)
                if dropped:
                    break
        except OcigpuError:
            self._take_back(made)
            raise
        if dropped:
            self._take_back(made)
            return dropped
        for name in change.delete:
            self._cluster.delete_slice(name)
        return Published(len(made), len(change.delete), self.features, len(wanted))

    def _take_back(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self._cluster.delete_slice(name)
            except OcigpuError as error:  # the next publication removes it, as one of another generation
                self._log("warning", error.message)
