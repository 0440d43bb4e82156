"""The use of GPUs by containers: processes as drivers count them, by the container that they run in."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ocigpu.containers.report import Report, find_members
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.nvml_process import VERBS, NvmlError, ask, nvml_place
from ocigpu.gpus.usage import Usage, parse_usage
from ocigpu.gpus.vendors import load_vendor
from ocigpu.system.module_process import ModuleProcess
from ocigpu.system.proc import read_command

DEADLINE = 20.0
"""Seconds that NVML may take to begin: each idle GPU takes one or two to wake up."""
PAUSE = 5.0
"""Seconds before NVML is asked again after it has failed."""
HOST = "(host)"
"""Stands for a container where processes outside all of them use a GPU."""


class GpuProcess(NamedTuple):
    """A process that a driver counts: its number here, its name as it chose it, its memory and GPU time."""

    pid: int
    command: str
    used_mib: int
    use: int


class User(NamedTuple):
    """A container that has a GPU, or uses one: sums of its processes, None where the driver does not count them.

    ``state``: of the GPU in it, as in a report; "" if the container was not given the GPU.
    """

    name: str
    id: str
    engine: str
    state: str
    use: int | None = None
    used_mib: int | None = None
    processes: tuple[GpuProcess, ...] = ()


class UsedGpu(NamedTuple):
    """A GPU, or a MIG device of one (``label`` "0:1"), and its users."""

    label: str
    model: str
    usage: Usage
    users: tuple[User, ...]


class UsageReader:
    """Repeated readings of a host's GPU use; one lasting process queries NVML."""

    def __init__(self, facts: HostFacts, settings: Settings, interval: float) -> None:
        self.facts, self._settings, self._interval = facts, settings, interval
        self._stream = ModuleProcess(alone=True)
        self._nvml: dict[str, Usage] = {}
        self._heard = 0.0
        self.problem = ""
        """Why NVML says nothing."""

    def fileno(self) -> int:
        """Return what becomes readable with news, -1 for nothing."""
        return self._stream.fileno()

    def ask_once(self) -> None:
        """Wait for NVML's answer, or for the reason of its absence."""
        if nvml_place(self.facts).library:
            try:
                self._nvml = ask("usage", self.facts, DEADLINE, "0", parse=parse_usage)
            except NvmlError as error:
                self.problem = str(error)

    def start(self, parent: int) -> None:
        """Have NVML asked from now on by a process that ends with ``parent``, which is this one."""
        place = nvml_place(self.facts)
        waits = self.problem and time.monotonic() - self._heard < PAUSE
        if place.library and not waits and not self._stream.is_stuck():
            self._heard = time.monotonic()
            with suppress(OSError):  # no more processes: the next look tries again
                self._stream.start(VERBS, "usage", str(parent), *place, f"{self._interval:g}")

    def take(self) -> None:
        """Take NVML's answer; a process that ended or is silent is stopped, and its answers are dropped."""
        lines, ended = self._stream.read() if self.fileno() >= 0 else ([], False)
        if lines:
            with suppress(ValueError, TypeError, KeyError):
                self._nvml, self._heard, self.problem = parse_usage(json.loads(lines[-1])), time.monotonic(), ""
        silent = time.monotonic() - self._heard > DEADLINE + self._interval
        if ended or (silent and self.fileno() >= 0):
            self._stream.close()
            self._heard = time.monotonic()
            self._nvml, self.problem = {}, "NVML does not answer" if silent else "NVML ended its process"

    @property
    def answering(self) -> frozenset[str]:
        """The GPUs and MIG devices that NVML reports."""
        return frozenset(self._nvml)

    def read(self) -> dict[str, Usage]:
        """Return the present use, by UUID."""
        others = (load_vendor(part.vendor).read_usage(self._settings, part) for part in self.facts.each)
        return self._nvml | {usage.uuid: usage for each in others for usage in each}

    def close(self) -> None:
        """End the process."""
        self._stream.close()


def join_usage(facts: HostFacts, usages: dict[str, Usage], reports: Sequence[Report]) -> list[UsedGpu]:
    """Return the GPUs and MIG devices of the host with the containers that have them, or whose processes use them."""
    pids = {pid for usage in usages.values() for pid, _, _ in usage.processes or ()}
    running = {report.container.state_file: report for report in reports if report.container.pid}
    members = find_members([report.container for report in running.values()], pids)
    owners = {pid: state_file for state_file, found in members.items() for pid in found}
    commands = {pid: _command(pid) for pid in pids}
    found = []
    for vendor, gpu in ((part.vendor, gpu) for part in facts.each for gpu in part.gpus):
        number = f"{vendor} {gpu.index}" if facts.parts else str(gpu.index)
        parts = [(f"{number}:{mig.index}", mig.uuid, f"{gpu.model} MIG {mig.profile}") for mig in gpu.mig_devices]
        for label, uuid, model in parts or [(number, gpu.uuid, gpu.model)]:
            usage = usages.get(uuid) or Usage(uuid)
            states = {
                state_file: given.state for state_file, report in running.items()
                for given in report.gpus if given.uuid == uuid
            }  # fmt: skip
            processes: dict[str, list[GpuProcess]] = {}
            for pid, used_mib, use in usage.processes or ():
                processes.setdefault(owners.get(pid, ""), []).append(GpuProcess(pid, commands[pid], used_mib, use))
            users = [
                _user(running.get(key), states.get(key, ""), processes.get(key, []), usage.processes is not None)
                for key in dict.fromkeys([*states, *processes])
            ]
            found.append(UsedGpu(label, model, usage, tuple(sorted(users, key=lambda user: user.name))))
    return found


def _user(report: Report | None, state: str, processes: Sequence[GpuProcess], counted: bool) -> User:
    one = report.container if report else None
    use = min(sum(process.use for process in processes), 100)
    used_mib = sum(process.used_mib for process in processes)
    return User(
        one.name if one else HOST,
        one.id if one else "",
        one.engine or one.runtime if one else "",
        state,
        use if counted else None,
        used_mib if counted else None,
        tuple(processes),
    )


def _command(pid: int) -> str:
    try:
        return read_command(f"/proc/{pid}")
    except OSError:  # it has ended, or is of another pid namespace
        return "?"
