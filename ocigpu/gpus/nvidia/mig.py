"""GPUs cut into MIG devices by NVML: read, changed, and put back when a change fails half-way."""

import json
import os
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ocigpu.core.errors import HostError, printable
from ocigpu.core.facts import HostFacts
from ocigpu.gpus.nvidia.mig_layout import GpuChange, GpuLayout, parse_layouts, plan_back
from ocigpu.gpus.nvidia.nvml_process import NvmlError, ask, nvml_place
from ocigpu.gpus.nvidia.selection import gpu_ranges
from ocigpu.gpus.usage import parse_usage
from ocigpu.system.locks import holding
from ocigpu.system.programs import run_program
from ocigpu.system.store import open_lock

SECONDS = 120.0
"""For reading, and for a change of all GPUs: setting the mode resets a GPU, which takes some seconds."""
RESET_SECONDS = 180.0
T = TypeVar("T")
Planner = Callable[[Sequence[GpuLayout]], list[GpuChange]]
PRE_MODE, PRE_CONFIG = "pre-apply-mode", "pre-apply-config"
"""The announcements before MIG modes change, and before devices change, named like the hooks of mig-parted."""


def read_layouts(facts: HostFacts) -> tuple[GpuLayout, ...]:
    """Return how the GPUs are cut; needs root.  Raises HostError (OCIGPU-MIG-3)."""
    return _ask("read MIG devices", "mig-layout", facts, parse=parse_layouts)


def _ask(what: str, verb: str, facts: HostFacts, *arguments: str, parse: Callable[[Any], T]) -> T:
    try:
        return ask(verb, facts, SECONDS, *arguments, parse=parse)
    except NvmlError as error:
        raise HostError("OCIGPU-MIG-3", f"{what}: {error}") from error


def read_users(facts: HostFacts) -> dict[str, str]:
    """Return which processes use a GPU or MIG device, by UUID; raises HostError (OCIGPU-MIG-3)."""
    found = _ask("processes on the GPUs", "usage", facts, "0", parse=parse_usage)
    pids = {uuid: [str(pid) for pid, *_ in usage.processes or ()] for uuid, usage in found.items()}
    return {uuid: f"process {', '.join(each)}" for uuid, each in pids.items() if each}


def alone(simulation: str = "") -> AbstractContextManager[None]:
    """Prevent other processes from changing MIG devices meanwhile.

    Raises HostError (OCIGPU-MIG-3) if one does, or if there is no directory for a lock.

    ``simulation``: root of a simulated host.
    """
    busy = HostError("OCIGPU-MIG-3", "another process changes MIG devices", "Wait for its end.")
    lock = open_lock("mig.lock", simulation)
    if lock < 0 and not simulation:
        hint = "It needs root; a container needs the host's /run/ocigpu."
        raise HostError("OCIGPU-MIG-3", "lock MIG devices: /run/ocigpu is missing or not root's alone", hint)
    return holding(lock, busy)


def change_layouts(
    facts: HostFacts,
    before: Sequence[GpuLayout],
    plan: Planner,
    mode_only: bool = False,
    reset: bool = True,
    announce: Callable[[str], bool] = lambda _: False,
) -> list[GpuChange]:
    """Apply a plan to the GPUs and return its changes; needs root.

    Modes come first, with a reset of the GPUs whose mode waits for one, unless not ``reset``; then the plan is made
    again, because NVML reports placements in MIG mode only.  ``announce``: called with PRE_MODE and PRE_CONFIG before a
    change; if it returns that it did something, the plan is made again.

    Raises HostError (OCIGPU-MIG-2 for an impossible layout, OCIGPU-MIG-3 for a refusal by NVML, OCIGPU-MIG-4 for a
    reset that is not done): then everything is as it was before, or the message says what is not.
    """
    now = before
    first = changes = _possible(plan(now))
    try:
        if _modes(changes):
            if announce(PRE_MODE):
                changes = _possible(plan(now))
            modes = _modes(changes)
            carry_out(facts, [step for change in modes for step in (*_destroying(change), _mode_step(change))])
            now = _activate(facts, {change.gpu.uuid for change in modes}, reset, mode_only)
            changes = _possible(plan(now))
        if not mode_only and any(change.destroy or change.create for change in changes):
            if announce(PRE_CONFIG):
                changes = _possible(plan(now))
            parts = [part for change in changes for part in _destroying(change)]
            carry_out(facts, parts + [part for change in changes for part in _creating(change)])
    except HostError as error:
        kept = error.code == "OCIGPU-MIG-4" and not reset
        left = "" if kept else _put_back(facts, before)
        raise HostError(error.code, f"{error.message}{left}", error.hint) from error
    return first


def _modes(changes: Sequence[GpuChange]) -> list[GpuChange]:
    return [change for change in changes if change.mode is not None]


def _activate(facts: HostFacts, changed: Container[str], reset: bool, pending: bool = False) -> tuple[GpuLayout, ...]:
    """Return the GPUs after those of ``changed`` were reset whose mode waits for it (Ampere).

    Others may wait for one, too, and be in use.  ``pending``: without a reset the mode may wait.
    """

    def look() -> tuple[tuple[GpuLayout, ...], list[GpuLayout]]:
        found = read_layouts(facts)
        return found, [gpu for gpu in found if gpu.mode != gpu.pending and gpu.uuid in changed]

    now, waiting = look()
    if waiting and reset:
        reset_gpus(facts, waiting)
        now, waiting = look()
    if waiting and (reset or not pending):
        names = ", ".join(f"GPU {gpu.number}" for gpu in waiting)
        hint = f"Stop what uses them, run: nvidia-smi --gpu-reset -i {_ids(waiting)}, and then this command again."
        raise HostError("OCIGPU-MIG-4", f"{names}: MIG mode changes when the GPU is reset", hint)
    return now


def _ids(gpus: Sequence[GpuLayout]) -> str:
    return ",".join(gpu.bus_id for gpu in gpus)


def reset_gpus(facts: HostFacts, gpus: Sequence[GpuLayout]) -> None:
    """Reset GPUs by the driver's nvidia-smi, which refuses while something uses them; needs root.

    NVML has no function for it.  Raises HostError (OCIGPU-MIG-4).
    """
    path = next((file.host_path for file in facts.binaries if file.host_path.endswith("/nvidia-smi")), "")
    root = nvml_place(facts).chroot
    away = ["chroot", root] if root else []
    what = f"reset {', '.join(f'GPU {gpu.number}' for gpu in gpus)}"
    hint = "Stop what uses them (ocigpu top), or reboot."
    if not path:
        raise HostError("OCIGPU-MIG-4", f"{what}: the driver has no nvidia-smi", hint)
    words = [*away, path.removeprefix(root), "--gpu-reset", "-i", _ids(gpus)]
    try:
        done = run_program(words, RESET_SECONDS, env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"})
    except (OSError, TimeoutError) as error:
        raise HostError("OCIGPU-MIG-4", f"{what}: {path}: {error}", hint) from error
    if done.status:
        cause = printable((done.output.strip() or done.complaint.strip() or f"exit status {done.status}"), 300)
        raise HostError("OCIGPU-MIG-4", f"{what}: nvidia-smi: {cause}", hint)


def _possible(changes: list[GpuChange]) -> list[GpuChange]:
    problems: dict[str, list[int]] = {}
    for change in changes:
        if change.problem:
            problems.setdefault(change.problem, []).append(change.gpu.number)
    if problems:
        texts = [f"{gpu_ranges(numbers)}: {problem}" for problem, numbers in problems.items()]  # of equal GPUs one
        raise HostError("OCIGPU-MIG-2", "; ".join(texts))
    return changes


def _put_back(facts: HostFacts, before: Sequence[GpuLayout]) -> str:
    """Make the GPUs what they were before; returns what a message says of it."""
    try:
        was = {gpu.uuid: gpu for gpu in before}
        changes = [plan_back(gpu, was[gpu.uuid]) for gpu in read_layouts(facts) if gpu.uuid in was]
        carry_out(facts, [step for change in changes for step in _destroying(change)])
        if modes := _modes(changes):
            carry_out(facts, [_mode_step(change) for change in modes])
            waited = {gpu.uuid for gpu in before if gpu.mode != gpu.pending}
            _activate(facts, {change.gpu.uuid for change in modes} - waited, reset=True)
        carry_out(facts, [step for change in changes for step in _creating(change)])
    except HostError as error:
        return f" (could not be put back: {error.message})"
    return " (all is as it was before)"


Step = tuple[GpuLayout, dict[str, Any], str]
"""A step on one GPU, and its name in messages."""


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
                "numbers": list(one.numbers),
            },
            f"make {change.gpu.name_of(one)} at {one.start}",
        )
        for one in change.create
    ]


def carry_out(facts: HostFacts, steps: Sequence[Step]) -> None:
    if not steps:
        return
    text = json.dumps([(gpu.uuid, step) for gpu, step, _ in steps])
    done, error = _ask("change MIG devices", "change-mig", facts, text, parse=_parse_done)
    if error:
        gpu, _, what = steps[min(done, len(steps) - 1)]
        raise HostError("OCIGPU-MIG-3", f"GPU {gpu.number}: {what}: {error}")


def _parse_done(answer: Any) -> tuple[int, str]:
    return int(answer["done"]), str(answer["error"])
