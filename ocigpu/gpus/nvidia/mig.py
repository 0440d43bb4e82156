"""GPUs cut into MIG devices by NVML: read, changed, and put back when a change fails half-way."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts
from ocigpu.gpus.nvidia.mig_layout import GpuChange, GpuLayout, parse_layouts, plan_back
from ocigpu.gpus.nvidia.nvml_process import NvmlError, ask

SECONDS = 120.0
"""For reading, and for a change of all GPUs: setting the mode resets a GPU, which takes some seconds."""
Planner = Callable[[Sequence[GpuLayout]], list[GpuChange]]


def read_layouts(facts: HostFacts) -> tuple[GpuLayout, ...]:
    """Return how the GPUs are cut; needs root.  Raises HostError (OCIGPU-MIG-3)."""
    try:
        return parse_layouts(ask("mig-layout", facts, SECONDS))
    except NvmlError as error:
        raise HostError("OCIGPU-MIG-3", f"read MIG devices: {error}") from error
    except ValueError as error:
        raise HostError("OCIGPU-MIG-3", "read MIG devices: NVML gave no usable answer") from error


def change_layouts(facts: HostFacts, before: Sequence[GpuLayout], plan: Planner, mode_only: bool = False) -> None:
    """Make the GPUs what a plan says; needs root.

    Modes come first, then the plan is made again, because NVML tells placements in MIG mode only.  Raises HostError
    (OCIGPU-MIG-2 for what cannot be, OCIGPU-MIG-3 for what NVML refuses): then all is as it was before, or the message
    says what is not.
    """
    now = before
    try:
        changes = _possible(plan(now))
        modes = [change for change in changes if change.mode is not None]
        if modes:
            _carry_out(facts, [step for change in modes for step in (*_destroying(change), _mode_step(change))])
            now = read_layouts(facts)
            waiting = [gpu for gpu in now if gpu.mode != gpu.pending]
            if waiting:
                names = ", ".join(f"GPU {gpu.number}" for gpu in waiting)
                ids = ",".join(gpu.bus_id for gpu in waiting)
                hint = f"Stop what uses them, run: nvidia-smi --gpu-reset -i {ids}, and then this command again."
                raise HostError("OCIGPU-MIG-4", f"{names}: MIG mode changes when the GPU is reset", hint)
            changes = _possible(plan(now))
        if not mode_only:
            parts = [part for change in changes for part in _destroying(change)]
            _carry_out(facts, parts + [part for change in changes for part in _creating(change)])
    except HostError as error:
        if error.code in ("OCIGPU-MIG-2", "OCIGPU-MIG-4") and now is before:
            raise
        left = "" if error.code == "OCIGPU-MIG-4" else _put_back(facts, before)
        raise HostError(error.code, f"{error.message}{left}", error.hint) from error


def _possible(changes: list[GpuChange]) -> list[GpuChange]:
    problems = [f"GPU {change.gpu.number}: {change.problem}" for change in changes if change.problem]
    if problems:
        raise HostError("OCIGPU-MIG-2", "; ".join(problems))
    return changes


def _put_back(facts: HostFacts, before: Sequence[GpuLayout]) -> str:
    """Make the GPUs what they were before; returns what a message says of it."""
    try:
        was = {gpu.uuid: gpu for gpu in before}
        changes = [plan_back(gpu, was[gpu.uuid]) for gpu in read_layouts(facts) if gpu.uuid in was]
        _carry_out(facts, [step for change in changes for step in _destroying(change)])
        _carry_out(facts, [_mode_step(change) for change in changes if change.mode is not None])
        _carry_out(facts, [step for change in changes for step in _creating(change)])
    except HostError as error:
        return f" (could not be put back: {error.message})"
    return " (all is as it was before)"


Step = tuple[GpuLayout, dict[str, Any], str]
"""What is to be done to which GPU, and how a message calls it."""


def _mode_step(change: GpuChange) -> Step:
    return change.gpu, {"mode": change.mode}, f"switch MIG mode {'on' if change.mode else 'off'}"


def _destroying(change: GpuChange) -> list[Step]:
    return [
        (change.gpu, {"destroy": one.gi}, f"destroy {change.gpu.name_of(one)} at {one.start}") for one in change.destroy
    ]


def _creating(change: GpuChange) -> list[Step]:
    return [
        (
            change.gpu,
            {
                "create": one.profile,
                "start": one.start,
                "size": change.gpu.profile(one.profile).size,
                "cis": list(one.cis),
            },
            f"make {change.gpu.name_of(one)} at {one.start}",
        )
        for one in change.create
    ]


def _carry_out(facts: HostFacts, steps: Sequence[Step]) -> None:
    if not steps:
        return
    try:
        answer = ask("change-mig", facts, SECONDS, json.dumps([(gpu.uuid, step) for gpu, step, _ in steps]))
        done, error = int(answer["done"]), str(answer["error"])
    except NvmlError as problem:
        raise HostError("OCIGPU-MIG-3", f"change MIG devices: {problem}") from problem
    except (ValueError, TypeError, KeyError) as problem:
        raise HostError("OCIGPU-MIG-3", "change MIG devices: NVML gave no usable answer") from problem
    if error:
        gpu, _, what = steps[min(done, len(steps) - 1)]
        raise HostError("OCIGPU-MIG-3", f"GPU {gpu.number}: {what}: {error}")
