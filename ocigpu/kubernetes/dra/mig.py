"""MIG devices made for a claim at the places in its allocation, and destroyed when the claim is given back.

Only instances in a claim's record are ever destroyed.  Any other instance keeps its place, and a claim for that place
is refused.  The MIG mode of a GPU that was whole is switched on with its first device and off with its last.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts
from ocigpu.gpus.nvidia.mig import alone, change_layouts, read_layouts, read_users
from ocigpu.gpus.nvidia.mig_layout import GpuChange, GpuInstance, GpuLayout, plan_back
from ocigpu.kubernetes.dra.devices import DraDevice
from ocigpu.kubernetes.dra.prepare import ClaimEffect, find_facts
from ocigpu.kubernetes.dra.specs import NodeView
from ocigpu.kubernetes.dra.state import ClaimRecord, ClaimStep

MIG = "mig"
"""The effect's name."""
Edit = Callable[[GpuLayout], GpuLayout]


def plan_mig(devices: Iterable[DraDevice], view: NodeView, others: Iterable[ClaimRecord]) -> list[ClaimStep]:
    """Return the steps that make MIG devices, one for each GPU; asks NVML what is at their places now.

    Raises HostError (OCIGPU-DRA-4) for a place occupied by an instance of no claim, OCIGPU-MIG-3 without an answer.
    """
    wanted: dict[str, list[DraDevice]] = {}
    for device in devices:
        if device.profile:
            wanted.setdefault(device.id, []).append(device)
    gpus = {gpu.uuid: gpu for gpu in read_layouts(view.node.facts)} if wanted else {}
    before = [step.arguments for record in others for step in record.steps if step.effect == MIG]
    steps = []
    for uuid, each in wanted.items():
        if uuid not in gpus:
            raise HostError("OCIGPU-DRA-3", f"{each[0].name}: NVML shows no GPU {uuid}")
        _check_free(gpus[uuid], each)
        switched = not gpus[uuid].mode or any(step["gpu"] == uuid and step["switched"] for step in before)
        places = " ".join(f"{device.profile[0]}:{device.profile[1]}" for device in each if device.profile)
        steps.append(ClaimStep(MIG, {"gpu": uuid, "places": places, "switched": "yes" if switched else ""}))
    return steps


def _check_free(gpu: GpuLayout, devices: Sequence[DraDevice]) -> None:
    for one in gpu.instances:
        taken = range(one.start, one.start + gpu.profile(one.profile).size)
        for device in devices:
            if not set(device.memory).isdisjoint(taken):
                text = f"{device.name}: {gpu.name_of(one)} at {one.start} is in its place and belongs to no claim"
                raise HostError("OCIGPU-DRA-4", text, "See: ocigpu mig export")


class MigEffect:
    """Makes and destroys the devices; ``simulation``: root of a simulated host.

    ``read_again`` returns when the node has been read since; it raises HostError (OCIGPU-DRA-3).
    """

    def __init__(self, simulation: str, read_again: Callable[[], None]) -> None:
        self._simulation, self._read_again = simulation, read_again
        self.effect = ClaimEffect(self._make, self._destroy, self._is_lost)

    def _make(self, record: ClaimRecord, step: dict[str, str], view: NodeView) -> None:
        own = [each.device for each in record.devices if each.device.id == step["gpu"] and not each.admin]

        def added(gpu: GpuLayout) -> GpuLayout:
            if not record.done:
                try:
                    _check_free(gpu, own)  # it is locked now, but it may have changed since it was planned
                except HostError:
                    step["places"] = ""  # undoing does not destroy instances of others
                    raise
            there = {(one.profile, one.start) for one in gpu.instances}
            new = [place for place in _places(step) if place not in there]
            made = [GpuInstance(id_, start, (gpu.profile(id_).slices,)) for id_, start in new]
            return gpu._replace(mode=1, pending=1, instances=(*gpu.instances, *made))

        self._change(view.node.facts, step, added)
        self._read_again()

    def _destroy(self, _record: ClaimRecord, step: dict[str, str], view: NodeView | None) -> None:
        facts = find_facts(view, step["gpu"])
        if facts is None or not step["places"]:
            return  # without its driver a GPU has none

        def without(gpu: GpuLayout) -> GpuLayout:
            places = _places(step)
            left = tuple(one for one in gpu.instances if (one.profile, one.start) not in places)
            mode = 0 if step["switched"] and not left else gpu.mode
            return gpu._replace(mode=mode, pending=mode, instances=left)

        self._change(facts, step, without)
        if step["switched"]:
            with suppress(HostError):  # the next user of the whole GPU needs its facts; this claim needs nothing more
                self._read_again()

    def _is_lost(self, _record: ClaimRecord, step: dict[str, str], view: NodeView | None) -> bool:
        layouts = [gpu for gpu in view.node.layouts if gpu.uuid == step["gpu"]] if view else []
        return any(
            place not in {(one.profile, one.start) for one in gpu.instances}
            for gpu in layouts
            for place in _places(step)
        )

    def _change(self, facts: HostFacts, step: dict[str, str], edit: Edit) -> None:
        with alone(self._simulation):
            own = [gpu for gpu in read_layouts(facts) if gpu.uuid == step["gpu"]]
            wanted = {gpu.uuid: edit(gpu) for gpu in own}
            first = [plan_back(gpu, wanted[gpu.uuid]) for gpu in own]
            held = read_users(facts) if any(change.destroy or change.mode is not None for change in first) else {}

            def plan(gpus: Sequence[GpuLayout]) -> list[GpuChange]:
                return [plan_back(gpu, wanted[gpu.uuid], held) for gpu in gpus if gpu.uuid in wanted]

            change_layouts(facts, own, plan)


def _places(step: dict[str, str]) -> list[tuple[int, int]]:
    """Return ids of profiles and first memory slices."""
    pairs = (word.partition(":") for word in step["places"].split())
    return [(int(profile), int(start)) for profile, _, start in pairs]
