"""NVML in a process of its own, which ends with this one: :mod:`ocigpu.system.module_process`."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ocigpu.core.errors import UNUSABLE, printable
from ocigpu.core.facts import HostFacts
from ocigpu.gpus.nvidia.nvml_child import DriverPlace
from ocigpu.system.module_process import command
from ocigpu.system.programs import run_program

VERBS = "ocigpu.gpus.nvidia.nvml_verbs"
MODE_SECONDS = 20.0
DEFAULT, EXCLUSIVE_PROCESS = 0, 3  # nvmlComputeMode_t
T = TypeVar("T")


class NvmlError(Exception):
    """Why NVML gave no answer: one line."""


def nvml_place(facts: HostFacts) -> DriverPlace:
    """Return where NVML is; a driver root is entered when it has the device nodes too, as for the facts."""
    path = next((lib.host_path for lib in facts.libraries if lib.soname == "libnvidia-ml.so.1" and lib.bits == 64), "")
    if facts.simulated:
        return DriverPlace(path, "", facts.driver_root)
    root = facts.driver_root.rstrip("/")
    if root and any(node.host_path.startswith(f"{root}/dev/") for node in facts.control_nodes):
        return DriverPlace(path.removeprefix(root), root)
    return DriverPlace(path)


def ask(verb: str, facts: HostFacts, seconds: float, *arguments: str, parse: Callable[[Any], T]) -> T:
    """Return what ``parse`` makes of the JSON document with which :mod:`~ocigpu.gpus.nvidia.nvml_verbs` answers.

    Waits no longer than ``seconds``.  Raises NvmlError for whatever goes wrong, an answer too that is not understood.
    """
    place = nvml_place(facts)
    if not place.library:
        raise NvmlError("the host has no NVML library")
    words = command(VERBS, verb, str(os.getpid()), *place, *arguments)
    try:
        done = run_program(words, seconds, env={}, cwd="/")
    except TimeoutError as error:
        raise NvmlError(f"NVML did not answer within {seconds:g} s") from error
    except OSError as error:
        raise NvmlError(f"{sys.executable}: {error.strerror}") from error
    if done.status:
        lines = done.complaint.strip().splitlines()
        raise NvmlError(printable(lines[-1] if lines else f"NVML ended its process ({done.status})", 300))
    try:
        return parse(json.loads(done.output))
    except UNUSABLE as error:
        raise NvmlError("NVML gave no usable answer") from error


def set_compute_mode(
    facts: HostFacts, uuids: Sequence[str], mode: int, seconds: float = MODE_SECONDS
) -> dict[str, str]:
    """Set the mode of GPUs and return why not by UUID, {} when all have it; needs root (CAP_SYS_ADMIN).

    EXCLUSIVE_PROCESS while a control daemon of MPS shares them, else DEFAULT.  Waits no longer than ``seconds`` and
    never raises for what NVML does.
    """
    return _set_mode("set-compute-mode", facts, uuids, mode, seconds)


def set_persistence_mode(
    facts: HostFacts, uuids: Sequence[str], on: bool, seconds: float = MODE_SECONDS
) -> dict[str, str]:
    """Switch the persistence mode of GPUs; the rest is as of :func:`set_compute_mode`.

    While it is on, nvidia-persistenced keeps the GPU open.
    """
    return _set_mode("set-persistence-mode", facts, uuids, int(on), seconds)


def _set_mode(verb: str, facts: HostFacts, uuids: Sequence[str], mode: int, seconds: float) -> dict[str, str]:
    def parse(found: Any) -> dict[str, str]:
        return {str(uuid): printable(str(problem), 200) for uuid, problem in found.items()}

    try:
        return ask(verb, facts, seconds, str(mode), *uuids, parse=parse)
    except NvmlError as error:
        return dict.fromkeys(uuids, str(error))
