"""The gate between the kubelet and the GPUs: a device is offered and given only if its lease allows it.

Used by the threads of the device plugin, or of the DRA driver.  Before the kubelet gets a promise, the journal contains
it and its partition is active.  A promise that cannot be kept is refused, and the reason becomes the pod's event.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.gpus.nvidia.fabric.partitions import (
    UNLINKED,
    Fabric,
    FabricError,
    Partition,
    choose_offer,
    choose_partition,
    choose_singles,
    conflicts_of,
    must_find,
    show_cost,
    show_sizes,
    sizes,
)
from ocigpu.gpus.nvidia.fabric.state import KeptFabric
from ocigpu.gpus.vfio.facts import GroupMembers
from ocigpu.kubernetes.leases.journal import LeaseJournal
from ocigpu.kubernetes.leases.lease import (
    Lease,
    LeaseEvent,
    LeaseEventKind,
    Phase,
    check_reservable,
    describe,
    is_repeated,
    set_name,
    step,
    why_withheld,
)
from ocigpu.kubernetes.node.devices import PluginDevice, Resource


class LeaseGate:
    """The leases of a node as the device plugin sees them.

    ``fabric``: None where GPUs have no partitions; ``modules``: returns physical ids by PCI address; ``holders``:
    returns the processes that have a GPU open, asked once more before each answer; ``unlinked``: give numbers of GPUs
    that no partition has, without NVLink between them.
    """

    def __init__(
        self,
        journal: LeaseJournal,
        fabric: Fabric | None = None,
        modules: Callable[[], Mapping[str, int]] = dict,
        holders: Callable[[str], Sequence[int]] = lambda _gpu: (),
        unlinked: bool = False,
    ) -> None:
        self.journal = journal
        self._fabric = fabric
        self._modules = modules
        self._holders = holders
        self._unlinked = unlinked
        self._seen: Mapping[str, Lease] = {}
        self._unheld: dict[str, int] = {}
        """Generations under which the kubelet asked for GPUs that a pod had: by that it has none any more."""
        self._known = dict(self._unheld)

    def has_changed(self) -> bool:
        """Return whether leases changed since the last call, or the kubelet requested a device that is not free."""
        with contextlib.suppress(OcigpuError):
            self.journal.refresh()
        before, self._seen = self._seen, self.journal.leases
        known, self._known = self._known, dict(self._unheld)
        return before is not self._seen or known != self._known

    def with_leases(self, resource: Resource) -> Resource:
        """Return the resource with why its devices are withheld.

        While the journal cannot be read its last state counts: a device that a pod has must not become unhealthy.
        """
        try:
            leases = self.journal.refresh()
        except OcigpuError:
            leases = self.journal.leases
        devices = [
            device._replace(error=device.error or self._why_device_withheld(device, leases))
            for device in resource.devices
        ]
        withheld = self._find_unfit(devices, leases)
        return resource._replace(
            devices=tuple(each._replace(error=each.error or withheld.get(each.id, "")) for each in devices)
        )

    def _find_unfit(self, devices: Sequence[PluginDevice], leases: Mapping[str, Lease]) -> dict[str, str]:
        """Return why free devices are withheld, by id: the scheduler counts GPUs, and knows no partitions.

        Pods for which the node has enough free GPUs, but no free partition, would fail one after another.
        """
        if self._fabric is None or any(len(gpus_of([device])) > 1 for device in devices):
            return {}
        try:
            partitions, modules = self._fabric.list_partitions(), self._modules()
        except OcigpuError:  # Allocate tells it
            return {}
        there = {gpu: each.id for each in devices for gpu in gpus_of([each]) if gpu in modules and not each.error}
        free = {modules[gpu]: device for gpu, device in there.items() if leases[gpu].phase is Phase.FREE}
        offered = choose_offer(partitions, free)
        size = next((size for size in sizes(partitions) if size > len(offered)), 0)
        why = f"withheld until there is a partition of {size} among the node's free GPUs, or fewer are free"
        return {device: why for number, device in free.items() if number not in offered}

    def _why_device_withheld(self, device: PluginDevice, leases: Mapping[str, Lease]) -> str:
        """Return why a device is withheld, "" for a free one and for one in use by a pod.

        The kubelet believes that no pod has the device it requests: it would give it to pod after pod, and all would
        fail.
        """
        if device.group.switches:
            return _with_switch(device.group)
        own = gpus_of([device])
        held = (each for each in map(leases.get, own) if each and each.boot == self.journal.boot)
        pods = [each for each in held if each.phase in (Phase.RESERVED, Phase.LEASED)]
        if pods:
            return "".join(describe(each) for each in pods[:1] if self._unheld.get(each.gpu) == each.generation)
        reasons = {gpu: why_withheld(leases.get(gpu), self.journal.boot) for gpu in (*own, *device.group.gpus)}
        return next((why if len(reasons) == 1 else f"GPU {gpu}: {why}" for gpu, why in reasons.items() if why), "")

    def prefer(
        self, devices: Sequence[PluginDevice], available: Sequence[str], must: Sequence[str], size: int
    ) -> tuple[str, ...]:
        """Return the device ids of the partition that spoils least, () if none fits or the manager does not answer.

        In that case any set is as good as another: Allocate refuses a set that is not a partition, and states that
        reason.
        """
        if self._fabric is None:
            return ()
        try:
            partitions, modules = self._fabric.list_partitions(), self._modules()
        except OcigpuError:
            return ()
        owners = {modules[gpu]: device for device in devices for gpu in gpus_of([device]) if gpu in modules}
        free = {number for number, device in owners.items() if device.id in {*available, *must}}
        needed = {number for number, device in owners.items() if device.id in must}

        def is_whole(one: Partition) -> bool:
            """Whether the set has this size, the required devices, and complete IOMMU groups."""
            ids = set(one.physical_ids)
            own = {owners[number].id: owners[number] for number in ids if number in owners}
            bound = {gpu for device in own.values() for gpu in (*gpus_of([device]), *device.group.gpus)}
            inside = bound <= {gpu for gpu, number in modules.items() if number in ids}
            return ids <= owners.keys() and len(own) == size and inside and needed <= ids

        counts = {len(one.physical_ids) for one in partitions if is_whole(one)}
        usable = [one for one in partitions if len(one.physical_ids) not in counts or is_whole(one)]
        found = [choose_partition(usable, free, count) for count in sorted(counts)]
        chosen = next((one.physical_ids for one in found if one), ())
        if not chosen and self._unlinked and size not in sizes(partitions):
            singles = choose_singles(partitions, free - needed, size - len(needed))
            chosen = (*needed, *(one.physical_ids[0] for one in singles))
            chosen = chosen if len(chosen) == size else ()
        return tuple(dict.fromkeys(owners[number].id for number in chosen))

    def reserve(self, devices: Collection[PluginDevice]) -> str:
        """Make the GPUs of a container ready: recorded as Reserved, with their partition active.

        A repeated request, before the GPUs were used, has the same effect.  Returns the drawback, usually "".  Raises
        HostError (OCIGPU-LEASE-2) for a GPU whose lease is not Free or whose IOMMU group is not requested completely,
        FabricError for a partition that does not exist, HostError (OCIGPU-LEASE-1) when it cannot be recorded.  Then
        the container gets nothing, and the GPUs already reserved are reclaimed like any returned GPU.
        """
        return self.reserve_set(gpus_of(devices), [device.group for device in devices])

    def reserve_set(self, addresses: Collection[str], groups: Iterable[GroupMembers], name: str = "") -> str:
        """Make GPUs ready, as :meth:`reserve`.

        ``groups``: their IOMMU groups; ``name``: of the set, for :meth:`give_back`, never used before.
        """
        gpus = tuple(sorted(addresses))
        _check_groups(gpus, groups)
        leases = self.journal.refresh()
        try:
            self._check_free(gpus, leases, name)
        except HostError:
            self._unheld |= {gpu: leases[gpu].generation for gpu in gpus if gpu in leases and not name}
            raise
        sets, cost = self._find_sets(gpus)
        self._check_holders(gpus)
        generations = self._write_down(gpus, name)
        try:
            self._activate(gpus, sets)
        except OcigpuError as error:
            failed = LeaseEventKind.PARTITION_FAILED if isinstance(error, FabricError) else LeaseEventKind.TICK
            self._record_event(gpus, generations, LeaseEvent(failed, text=error.message))
            raise
        leases = self._record_event(gpus, generations, LeaseEvent(LeaseEventKind.PARTITION_ON, text=cost))
        for gpu, generation in generations.items():
            if leases[gpu].phase is not Phase.RESERVED or leases[gpu].generation != generation:
                check_reservable([leases[gpu]])
        return cost

    def give_back(self, name: str) -> None:
        """Record that no pod will use a set any more; an unknown set has no owner.

        Raises HostError (OCIGPU-LEASE-1).
        """
        own = {gpu: each for gpu, each in self.journal.refresh().items() if each.lease_set == name}
        over = {gpu: LeaseEvent(LeaseEventKind.POD_OVER, each.generation, text=name) for gpu, each in own.items()}
        if over:
            self.journal.tell(over, f"{name} returned")

    def _find_sets(self, gpus: tuple[str, ...]) -> tuple[list[tuple[int, ...]], str]:
        """Return the physical ids of the partitions, none without a fabric, and what that costs.

        Asked before anything is promised.
        """
        if self._fabric is None:
            return [], ""
        modules = self._modules()
        unknown = [gpu for gpu in gpus if gpu not in modules]
        if unknown:
            raise HostError("OCIGPU-LEASE-2", f"GPU {unknown[0]} cannot be assigned: its module id is unknown")
        partitions, ids = self._fabric.list_partitions(), [modules[gpu] for gpu in gpus]
        if len(ids) in sizes(partitions):
            return [must_find(partitions, ids).physical_ids], ""
        if not self._unlinked:
            there = show_sizes(partitions)
            text = f"{len(ids)} GPUs are not a partition of this board (sizes: {there}); --unlinked-sets assigns them:"
            raise FabricError("OCIGPU-FAB-4", f"{text} {UNLINKED}")
        free = {modules.get(gpu, 0) for gpu, each in self.journal.leases.items() if each.phase is Phase.FREE}
        cost = f"{UNLINKED}; free sets {show_cost(partitions, free | set(ids), ids) or 'as before'}"
        return [must_find(partitions, [id_]).physical_ids for id_ in ids], cost

    def _check_holders(self, gpus: tuple[str, ...]) -> None:
        for gpu in gpus:
            if pids := tuple(self._holders(gpu)):
                self.journal.tell({gpu: LeaseEvent(LeaseEventKind.HOLDERS, pids=pids)})
                raise HostError("OCIGPU-LEASE-2", f"GPU {gpu} cannot be assigned: process {pids[0]} has it open")

    def _check_free(self, gpus: tuple[str, ...], leases: Mapping[str, Lease], name: str) -> list[Lease]:
        """Return the leases, all Free, or all Reserved for this very request."""
        for gpu in gpus:
            if why := why_withheld(leases.get(gpu), self.journal.boot):
                raise HostError("OCIGPU-LEASE-2", f"GPU {gpu} cannot be assigned: {why}")
        known = [leases[gpu] for gpu in gpus]
        if not is_repeated(known, name):
            check_reservable(known)
        return known

    def _write_down(self, gpus: tuple[str, ...], name: str) -> dict[str, int]:
        """Return the generations that the GPUs are reserved under."""
        with self.journal.change() as change:
            known = self._check_free(gpus, change.leases, name)
            event = LeaseEvent(LeaseEventKind.RESERVE, text=name or set_name(known), members=gpus)
            now = self.journal.clock()
            for lease in known:
                change.put(step(lease, event, now)[0], event.kind)
            return {gpu: change.leases[gpu].generation for gpu in gpus}

    def _activate(self, gpus: tuple[str, ...], sets: Iterable[tuple[int, ...]]) -> None:
        """Activate partitions, after switching off overlapping ones that no longer have an owner."""
        if self._fabric is None:
            return
        owners = {number: gpu for gpu, number in self._modules().items()}
        leases = self.journal.leases
        for ids in sets:
            partitions = self._fabric.list_partitions()
            for one in conflicts_of(partitions, must_find(partitions, ids)):
                for number in one.physical_ids:
                    gpu = owners.get(number, "")
                    lease = leases.get(gpu)
                    if gpu not in gpus and (lease is None or lease.phase not in _LEFT):
                        what = f"its partition overlaps the active one of GPU {gpu or number}"
                        raise HostError("OCIGPU-LEASE-2", f"GPU {gpus[0]} cannot be assigned: {what}")
                self._fabric.deactivate(one.physical_ids)
            if isinstance(self._fabric, KeptFabric):
                lease = leases[gpus[0]]
                self._fabric.activate(ids, lease.lease_set, lease.generation)
            else:
                self._fabric.activate(ids)

    def _record_event(
        self, gpus: Collection[str], generations: Mapping[str, int], event: LeaseEvent
    ) -> Mapping[str, Lease]:
        return self.journal.tell({gpu: event._replace(generation=generations[gpu]) for gpu in gpus})


def gpus_of(devices: Iterable[PluginDevice]) -> tuple[str, ...]:
    """Return the PCI addresses of devices, each once."""
    return tuple(dict.fromkeys(gpu for device in devices for gpu in device.gpus or (device.gpu,)))


def _with_switch(group: GroupMembers) -> str:
    return f"its IOMMU group has the NVSwitch {group.switches[0]}, which no tenant may have"


def _check_groups(gpus: Collection[str], groups: Iterable[GroupMembers]) -> None:
    """Raise HostError (OCIGPU-LEASE-2) unless all GPUs of these IOMMU groups go to the same machine, and no switch."""
    for group in groups:
        left = [gpu for gpu in group.gpus if gpu not in gpus]
        if group.switches or left:
            why = f"it needs GPU {', '.join(left)} of the same IOMMU group" if left else ""
            first = next((gpu for gpu in group.gpus if gpu in gpus), gpus and min(gpus))
            raise HostError("OCIGPU-LEASE-2", f"GPU {first} cannot be assigned: {why or _with_switch(group)}")


_LEFT = (Phase.FREE, Phase.CHECKING, Phase.MAINTENANCE)
"""Phases of GPUs that no VM can have: a partition that is active with them only was left over."""
