"""What stands between the kubelet and the GPUs: no device is offered or given whose lease does not allow it.

Used by the device plugin's threads.  What is promised to the kubelet is in the journal, and its partition is active,
before the answer; what cannot be kept is refused with the reason, which becomes the pod's event.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.gpus.nvidia.fabric.partitions import Fabric, FabricError, choose_partition, conflicts_of, must_find
from ocigpu.gpus.nvidia.fabric.state import KeptFabric
from ocigpu.kubernetes.devices import PluginDevice, Resource
from ocigpu.kubernetes.tenants.journal import LeaseJournal
from ocigpu.kubernetes.tenants.lease import (
    Happened,
    Lease,
    LeaseEvent,
    Phase,
    check_reservable,
    is_repeated,
    set_name,
    step,
    why_withheld,
)


class LeaseGate:
    """The leases of a node as the device plugin sees them.

    ``fabric``: None where GPUs have no partitions; ``modules``: returns physical ids by PCI address; ``holders``:
    returns the processes that have a GPU open, asked once more before each answer.
    """

    def __init__(
        self,
        journal: LeaseJournal,
        fabric: Fabric | None = None,
        modules: Callable[[], Mapping[str, int]] = dict,
        holders: Callable[[str], Sequence[int]] = lambda _gpu: (),
    ) -> None:
        self.journal = journal
        self._fabric = fabric
        self._modules = modules
        self._holders = holders
        self._seen: Mapping[str, Lease] = {}

    def has_changed(self) -> bool:
        """Return whether leases are others than at the last call."""
        with contextlib.suppress(OcigpuError):
            self.journal.refresh()
        before, self._seen = self._seen, self.journal.leases
        return before is not self._seen

    def judged(self, resource: Resource) -> Resource:
        """Return the resource with why its devices are withheld.

        While the journal cannot be read its last state counts: a device that a pod has must not become unhealthy.
        """
        try:
            leases = self.journal.refresh()
        except OcigpuError:
            leases = self.journal.leases
        devices = (
            device._replace(error=device.error or why_withheld(leases.get(device.gpu), self.journal.boot))
            for device in resource.devices
        )
        return resource._replace(devices=tuple(devices))

    def prefer(
        self, devices: Sequence[PluginDevice], available: Sequence[str], must: Sequence[str], size: int
    ) -> tuple[str, ...]:
        """Return the device ids of the partition that spoils least, () where none fits or the manager is silent.

        Then any set is as good as another: Allocate refuses one that is no partition, for that reason.
        """
        if self._fabric is None:
            return ()
        try:
            partitions, modules = self._fabric.list_partitions(), self._modules()
        except OcigpuError:
            return ()
        ids = {modules[device.gpu]: device.id for device in devices if device.gpu in modules}
        known = {id_: number for number, id_ in ids.items()}
        free = {known[id_] for id_ in (*available, *must) if id_ in known}
        needed = {known[id_] for id_ in must if id_ in known}
        usable = [one for one in partitions if len(one.physical_ids) != size or needed <= set(one.physical_ids)]
        chosen = choose_partition(usable, free, size)
        return tuple(ids[number] for number in chosen.physical_ids) if chosen else ()

    def reserve(self, devices: Collection[PluginDevice]) -> None:
        """Make the GPUs of a container ready: written down as Reserved, their partition active.

        The same request again, before anybody used it, does the same again.  Raises HostError (OCIGPU-LEASE-2) for a
        GPU whose lease is not Free, FabricError for a partition that is not, HostError (OCIGPU-LEASE-1) when it cannot
        be written down; then the container has nothing, and what was begun goes the way of every GPU that comes back.
        """
        gpus = tuple(sorted({device.gpu for device in devices}))
        self._check_free(gpus, self.journal.refresh())
        ids = self._find_partition(gpus)
        self._check_holders(gpus)
        generations = self._write_down(gpus)
        try:
            self._activate(gpus, ids)
        except OcigpuError as error:
            failed = Happened.PARTITION_FAILED if isinstance(error, FabricError) else Happened.TICK
            self._tell(gpus, generations, LeaseEvent(failed, text=error.message))
            raise
        leases = self._tell(gpus, generations, LeaseEvent(Happened.PARTITION_ON))
        for gpu, generation in generations.items():
            if leases[gpu].phase is not Phase.RESERVED or leases[gpu].generation != generation:
                check_reservable([leases[gpu]])

    def _find_partition(self, gpus: tuple[str, ...]) -> tuple[int, ...]:
        """Return the physical ids of the partition, () without a fabric; asked before anything is promised."""
        if self._fabric is None:
            return ()
        modules = self._modules()
        unknown = [gpu for gpu in gpus if gpu not in modules]
        if unknown:
            raise HostError("OCIGPU-LEASE-2", f"GPU {unknown[0]} cannot be given: its module id is not known")
        return must_find(self._fabric.list_partitions(), [modules[gpu] for gpu in gpus]).physical_ids

    def _check_holders(self, gpus: tuple[str, ...]) -> None:
        for gpu in gpus:
            if pids := tuple(self._holders(gpu)):
                self.journal.tell({gpu: LeaseEvent(Happened.HOLDERS, pids=pids)})
                raise HostError("OCIGPU-LEASE-2", f"GPU {gpu} cannot be given: process {pids[0]} has it open")

    def _check_free(self, gpus: tuple[str, ...], leases: Mapping[str, Lease]) -> list[Lease]:
        """Return the leases, all Free, or all Reserved for this very request."""
        for gpu in gpus:
            if why := why_withheld(leases.get(gpu), self.journal.boot):
                raise HostError("OCIGPU-LEASE-2", f"GPU {gpu} cannot be given: {why}")
        known = [leases[gpu] for gpu in gpus]
        if not is_repeated(known):
            check_reservable(known)
        return known

    def _write_down(self, gpus: tuple[str, ...]) -> dict[str, int]:
        """Return the generations that the GPUs are reserved under."""
        with self.journal.change() as change:
            known = self._check_free(gpus, change.leases)
            event = LeaseEvent(Happened.RESERVE, text=set_name(known), members=gpus)
            now = self.journal.clock()
            for lease in known:
                change.put(step(lease, event, now)[0], event.kind)
            return {gpu: change.leases[gpu].generation for gpu in gpus}

    def _activate(self, gpus: tuple[str, ...], ids: tuple[int, ...]) -> None:
        """Activate the partition; what overlaps it and belongs to nobody any more goes first."""
        if self._fabric is None:
            return
        partitions = self._fabric.list_partitions()
        owners = {number: gpu for gpu, number in self._modules().items()}
        leases = self.journal.leases
        for one in conflicts_of(partitions, must_find(partitions, ids)):
            for number in one.physical_ids:
                gpu = owners.get(number, "")
                lease = leases.get(gpu)
                if gpu not in gpus and (lease is None or lease.phase not in _LEFT):
                    text = (
                        f"GPU {gpus[0]} cannot be given: its partition overlaps the active one of GPU {gpu or number}"
                    )
                    raise HostError("OCIGPU-LEASE-2", text)
            self._fabric.deactivate(one.physical_ids)
        if isinstance(self._fabric, KeptFabric):
            lease = leases[gpus[0]]
            self._fabric.activate(ids, lease.lease_set, lease.generation)
        else:
            self._fabric.activate(ids)

    def _tell(self, gpus: Collection[str], generations: Mapping[str, int], event: LeaseEvent) -> Mapping[str, Lease]:
        return self.journal.tell({gpu: event._replace(generation=generations[gpu]) for gpu in gpus})


_LEFT = (Phase.FREE, Phase.CHECKING, Phase.MAINTENANCE)
"""Phases of GPUs that no VM can have: a partition that is active with them only was left over."""
