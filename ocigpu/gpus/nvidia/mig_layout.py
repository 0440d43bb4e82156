"""How GPUs are partitioned into MIG devices, and the steps to another layout: pure data and functions.

We choose placements ourselves, so a layout that fits is found whatever the order of its parts, and instances that stay
are not touched.  Sources: NVIDIA's MIG user guide ("Supported MIG Profiles"), nvml.h (nvmlGpuInstancePlacement_t).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, TypeAdapter

from ocigpu.core.errors import printable

Text = Annotated[str, BeforeValidator(lambda value: printable(str(value), 96))]
"""What closed code says."""
_NAME = re.compile(r"(?:([0-9]{1,3})c\.)?([0-9]{1,3}g\.[0-9]{1,6}gb(?:[+-][a-z.]+)*)")
"""A profile of compute instances has its own size before that of its GPU instance: 1c.3g.40gb."""
_Places = Mapping[int, tuple[int, Sequence[int]]]
_SEVEN: _Places = {
    19: (1, range(7)),
    20: (1, range(7)),
    15: (2, range(0, 8, 2)),
    14: (2, range(0, 6, 2)),
    9: (4, (0, 4)),
    5: (4, (0,)),
    0: (8, (0,)),
}
_FOUR: _Places = {14: (1, range(4)), 21: (1, range(4)), 5: (2, (0, 2)), 6: (2, (0, 2)), 0: (4, (0,))}
_TWELVE: _Places = {
    **dict.fromkeys((14, 21, 47, 65, 67), (3, range(0, 12, 3))),
    **dict.fromkeys((5, 35, 64, 66), (6, (0, 6))),
    **dict.fromkeys((0, 32), (12, (0,))),
}
_OF_TWELVE = {47, 67}
"""Profiles (+gfx, -me) that only GPUs of twelve memory slices have: their compute slices are four as well."""


def known_places(profiles: "Sequence[Profile]") -> _Places:
    """Return size and starts in memory slices by id of the profile, {} for an unknown family of GPUs.

    NVML reports them in MIG mode only; outside of it these decide whether a layout fits.
    """
    if _OF_TWELVE.intersection(profile.id for profile in profiles):
        return _TWELVE
    return {7: _SEVEN, 4: _FOUR}.get(max((profile.slices for profile in profiles), default=0), {})


class Profile(NamedTuple):
    """A GPU instance that a GPU can have: ``size`` memory slices from one of ``starts`` on, ``slices`` of compute.

    ``number``: its nvmlGpuInstanceProfile, by which checkpoints name it.  ``contents``: MiB of memory, multiprocessors,
    copy engines, decoders, encoders, JPEG decoders and optical flow accelerators.
    """

    name: Text
    id: int
    slices: int
    most: int
    size: int = 0
    starts: tuple[int, ...] = ()
    number: int = -1
    contents: tuple[int, ...] = ()


class GpuInstance(NamedTuple):
    """A GPU instance; ``gi`` is -1 for one to be made.  ``cis``: compute slices of each compute instance in it.

    ``numbers``: the nvmlComputeInstanceProfile of each, () for those that their sizes say, and ``usual``: that they are
    these.  A GPU instance of one slice may have two profiles of that size, one of which leaves multiprocessors unused.
    """

    profile: int
    start: int
    cis: tuple[int, ...]
    gi: int = -1
    uuids: tuple[Text, ...] = ()
    numbers: tuple[int, ...] = ()
    usual: bool = True

    @property
    def kind(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """The instance's kind, without its placement."""
        return self.profile, tuple(sorted(self.cis)), () if self.usual else tuple(sorted(self.numbers))

    @property
    def exactly(self) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
        """The instance's kind and placement."""
        return self.profile, tuple(sorted(self.cis)), tuple(sorted(self.numbers)), self.start


class GpuLayout(NamedTuple):
    """A GPU as it is cut; ``number``: its index.

    ``mode``: MIG mode, None for a GPU that has none; ``pending``: the one after a reset.
    """

    number: int
    uuid: Text
    bus_id: Text
    model: Text
    device_id: int
    subsystem_id: int
    mode: int | None
    pending: int | None
    profiles: tuple[Profile, ...] = ()
    instances: tuple[GpuInstance, ...] = ()

    @property
    def slices(self) -> int:
        """Compute slices of the whole GPU."""
        return max((profile.slices for profile in self.profiles), default=0)

    def profile(self, id_: int) -> Profile:
        """Return a profile by its id."""
        return next(profile for profile in self.profiles if profile.id == id_)

    def name_of(self, instance: GpuInstance) -> str:
        """Return the profiles of an instance as NVIDIA writes them."""
        profile = self.profile(instance.profile)
        whole = instance.cis == (profile.slices,) and instance.usual
        return profile.name if whole else "+".join(f"{size}c.{profile.name}" for size in instance.cis) or profile.name


class WantedMig(NamedTuple):
    """What a GPU is to be: MIG mode, and how many devices of each profile."""

    enabled: bool
    devices: Mapping[str, int]


class GpuChange(NamedTuple):
    """The changes for one GPU; ``problem``: why they are impossible, one clause."""

    gpu: GpuLayout
    mode: int | None
    """The MIG mode to set, None where it stays."""
    keep: tuple[GpuInstance, ...] = ()
    destroy: tuple[GpuInstance, ...] = ()
    create: tuple[GpuInstance, ...] = ()
    problem: str = ""

    @property
    def changes(self) -> bool:
        """Whether anything is to be done."""
        return bool(self.mode is not None or self.destroy or self.create)


_LAYOUTS = TypeAdapter(tuple[GpuLayout, ...])


def parse_layouts(document: Any) -> tuple[GpuLayout, ...]:
    """Return what the verb "mig-layout" printed; raises ValueError for another document."""
    found = _LAYOUTS.validate_python(document)
    return tuple(gpu._replace(profiles=tuple(_placed(gpu, profile) for profile in gpu.profiles)) for gpu in found)


def _placed(gpu: GpuLayout, profile: Profile) -> Profile:
    size, starts = known_places(gpu.profiles).get(profile.id, (0, ()))
    return profile if profile.starts else profile._replace(size=size, starts=tuple(starts))


def plan_change(gpu: GpuLayout, wanted: WantedMig, held: Mapping[str, str]) -> GpuChange:
    """Return the changes that give a GPU the requested layout; as many instances as possible are kept.

    ``held``: who uses a MIG device, or the whole GPU, by UUID: instances in use are never destroyed.
    """
    if gpu.mode is None:
        return GpuChange(gpu, None, problem="it has no MIG mode" if wanted.enabled else "")
    target = int(wanted.enabled)
    mode = None if gpu.mode == gpu.pending == target else target  # the present one set again takes a pending one back
    if gpu.mode != target and (holders := _holders(gpu, gpu.instances, held)):
        return GpuChange(gpu, mode, problem=f"MIG mode cannot change while {holders}")
    needs, problem = _needs(gpu, wanted.devices if wanted.enabled else {})
    if problem:
        return GpuChange(gpu, mode, problem=problem)
    must = [one for one in gpu.instances if any(uuid in held for uuid in one.uuids)]
    found = _fit(gpu, needs, gpu.instances if gpu.mode == target else [], must)
    if found is None:
        return GpuChange(gpu, mode, problem=_why_no_fit(gpu, needs, must, held))
    keep, create = found
    return GpuChange(gpu, mode, keep, tuple(one for one in gpu.instances if one not in keep), create)


def plan_back(now: GpuLayout, before: GpuLayout, held: Mapping[str, str] | None = None) -> GpuChange:
    """Return what puts a GPU back to how it was, each instance at its place; ``held`` as in :func:`plan_change`."""
    there = {one.exactly: one for one in now.instances}
    was = {one.exactly: one for one in before.instances}
    gone = tuple(one for key, one in there.items() if key not in was)
    mode = None if (now.mode, now.pending) == (before.mode, before.pending) else before.pending
    if holders := _holders(
        now, now.instances if now.mode != before.mode else gone, held or {}, now.mode != before.mode
    ):
        return GpuChange(now, mode, problem=f"it cannot be changed while {holders}")
    return GpuChange(
        now,
        mode,
        tuple(one for key, one in there.items() if key in was),
        gone,
        tuple(one._replace(gi=-1, uuids=()) for key, one in was.items() if key not in there),
    )


def _holders(gpu: GpuLayout, instances: Sequence[GpuInstance], held: Mapping[str, str], whole: bool = True) -> str:
    names = [f"{held[uuid]} uses {uuid}" for one in instances for uuid in one.uuids if uuid in held]
    return "; ".join([*names, *([f"{held[gpu.uuid]} uses it"] if whole and gpu.uuid in held else [])])


def _needs(gpu: GpuLayout, devices: Mapping[str, int]) -> tuple[list[GpuInstance], str]:
    """Return the GPU instances that so many devices make, the largest first, or why there are none such.

    Compute instances that are less than their GPU instance share one, as many as it has slices for.
    """
    by_name = {profile.name: profile for profile in gpu.profiles}
    sizes: dict[int, list[int]] = {}
    for name, count in devices.items():
        match = _NAME.fullmatch(name)
        profile = by_name.get(match[2]) if match else None
        if profile is None or (match and match[1] and not 0 < int(match[1]) <= profile.slices):
            return [], f"no profile {name!r}: the GPU supports {', '.join(by_name)}"
        if count > gpu.slices * gpu.slices:  # compute instances of the smallest size in all GPU instances are fewer
            return [], f"{count} of {name} are more than it can hold"
        sizes.setdefault(profile.id, []).extend([int(match[1] or profile.slices) if match else 0] * count)
    needs = []
    for id_, each in sizes.items():
        room: list[list[int]] = []
        for size in sorted(each, reverse=True):
            fitting = [cis for cis in room if sum(cis) + size <= gpu.profile(id_).slices]
            if fitting:
                fitting[0].append(size)
            else:
                room.append([size])
        needs += [GpuInstance(id_, -1, tuple(cis)) for cis in room]
    return sorted(needs, key=lambda one: (-gpu.profile(one.profile).size, one.kind)), ""


def _fit(
    gpu: GpuLayout, needs: Sequence[GpuInstance], there: Sequence[GpuInstance], must: Sequence[GpuInstance]
) -> tuple[tuple[GpuInstance, ...], tuple[GpuInstance, ...]] | None:
    """Return which instances stay and which are made, with as many as possible that stay; None when it does not fit."""
    wanted = Counter(one.kind for one in needs)
    useful = [one for one in there if one.kind in wanted]
    for count in range(len(useful), len(must) - 1, -1):
        for keep in combinations(useful, count):
            kept = Counter(one.kind for one in keep)
            if kept - wanted or any(one not in keep for one in must):
                continue
            rest = list(needs)
            for one in keep:
                rest.remove(next(each for each in rest if each.kind == one.kind))
            made = next(_place(gpu, rest, keep), None)
            if made is not None:
                return keep, made
    return None


def _place(
    gpu: GpuLayout, needs: Sequence[GpuInstance], there: Sequence[GpuInstance], below: int = 99
) -> Iterator[tuple[GpuInstance, ...]]:
    """Yield the ways to place instances beside those that are there, high places first, as the driver does.

    ``below``: where the first starts at most; of equal ones each is placed below the one before.
    """
    if not needs:
        yield ()
        return
    profile = gpu.profile(needs[0].profile)
    taken = {slice_ for one in there for slice_ in _slices(gpu, one)}
    used = sum(gpu.profile(one.profile).slices for one in there)
    if used + profile.slices > gpu.slices or sum(one.profile == profile.id for one in there) >= profile.most:
        return
    for start in sorted(profile.starts, reverse=True):
        placed = needs[0]._replace(start=start)
        if start < below and not taken.intersection(_slices(gpu, placed)):
            equal = len(needs) > 1 and needs[1].kind == needs[0].kind
            for others in _place(gpu, needs[1:], (*there, placed), start if equal else 99):
                yield (placed, *others)


def _slices(gpu: GpuLayout, instance: GpuInstance) -> range:
    return range(instance.start, instance.start + gpu.profile(instance.profile).size)


def _why_no_fit(
    gpu: GpuLayout, needs: Sequence[GpuInstance], must: Sequence[GpuInstance], held: Mapping[str, str]
) -> str:
    if must and next(_place(gpu, needs, ()), None) is not None:
        return f"it would fit, but not beside the instances in use: {_holders(gpu, must, held)}"
    fitting: list[GpuInstance] = []
    for need in needs:
        if next(_place(gpu, [*fitting, need], ()), None) is not None:
            fitting.append(need)
    would = ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name_of(one) for one in fitting).items())
    return f"it does not fit; {would or 'nothing of it'} would"


def balanced(gpu: GpuLayout) -> dict[str, int]:
    """Return the layout "all-balanced" of this model: plain profiles of one, two and three slices."""
    plain: dict[int, str] = {}
    for profile in sorted(gpu.profiles, key=lambda each: -each.most):
        if "+" not in profile.name and "-" not in profile.name:
            plain.setdefault(profile.slices, profile.name)
    return {plain[slices]: count for slices, count in {1: 2, 2: 1, 3: 1}.items() if slices in plain}
