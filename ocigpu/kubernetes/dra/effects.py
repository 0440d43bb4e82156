"""What is done on a node for a claim beside its CDI specification, and undone when it is given back.

* ``timeslice``: the length of time slices of a GPU, by ``nvidia-smi compute-policy``.
* ``mps``: a control daemon of CUDA's Multi-Process Service for the claim's GPUs.  It ends with the driver and is
  started again with the next one; clients that run meanwhile have to start again, too.
* ``vfio``: nothing is done; giving back waits until no process has the GPU any more.

Sources: NVIDIA's documentation of nvidia-smi (compute-policy) and MPS.
"""

import json
import os
import selectors
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ocigpu.core.errors import HostError, OcigpuError, RequestError, as_own_error, printable, quoted
from ocigpu.core.facts import HostFacts, facts_from_json, facts_to_json
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.nvml_process import DEFAULT, command, set_compute_mode
from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vfio.holders import read_holders
from ocigpu.kubernetes.dra.claims import Allotted, mps_group, mps_place
from ocigpu.kubernetes.dra.configs import INTERVALS, DeviceConfig
from ocigpu.kubernetes.dra.prepare import ClaimEffect, NodeView
from ocigpu.kubernetes.dra.state import ClaimRecord, ClaimStep
from ocigpu.kubernetes.mps import mps_directories
from ocigpu.kubernetes.mps_control import ControlDaemon, Job, find_program
from ocigpu.system.libc import MNT_DETACH, umount2
from ocigpu.system.programs import run_program

SECONDS = 20.0
MPS_SECONDS = 40.0
"""The kubelet gives a call 45 s; a daemon has 30 s to answer."""
MPS_SHM = "1g"


def plan_steps(allotted: Sequence[Allotted], _view: NodeView) -> tuple[ClaimStep, ...]:
    """Return the steps for a claim's devices; raises RequestError (OCIGPU-DRA-2) for what cannot be."""
    steps = []
    for each in allotted:
        if each.admin:
            continue
        if each.device.kind == "vfio":
            steps.append(ClaimStep("vfio", {"address": each.device.id}))
        elif each.config.strategy == "TimeSlicing" and each.device.kind == "gpu":
            steps.append(ClaimStep("timeslice", {"gpu": each.device.id, "interval": each.config.interval}))
    groups: dict[str, DeviceConfig] = {}
    for each in allotted:
        if each.config.strategy == "MPS" and not each.admin:
            if each.device.kind == "mig":
                raise RequestError("OCIGPU-DRA-2", f"request {quoted(each.request)}: MPS cannot share MIG devices")
            groups.setdefault(mps_group(each), each.config)
    steps += [ClaimStep("mps", {"group": group}) for group in groups]
    return tuple(steps)


def mps_commands(allotted: Sequence[Allotted], facts: HostFacts) -> tuple[str, ...]:
    """Return what the control daemon of these devices is told; GPUs are named by NVML's index.

    Limits are by UUID, by a device's number in the claim, or for all others.
    """
    indices = {gpu.uuid: gpu.index for gpu in facts.gpus}
    config = allotted[0].config
    found = []
    for number, each in enumerate(allotted):
        limit = config.pinned.get(each.device.id) or config.pinned.get(str(number)) or config.pinned.get("default")
        if limit:
            found.append(f"set_default_device_pinned_mem_limit {indices[each.device.id]} {limit}M")
    return (*found, f"set_default_active_thread_percentage {config.percentage or 100}")


class MpsChild(NamedTuple):
    """The process that runs a control daemon, and ends with us."""

    process: "subprocess.Popen[bytes]"
    directory: str


class Effects:
    """The table of effects.  ``mps_root``: parent of the directories of MPS; ``settings``: of the host."""

    def __init__(self, settings: Settings, mps_root: str, log: Callable[..., None]) -> None:
        self._settings, self.mps_root, self._log = settings, mps_root, log
        self._children: dict[tuple[str, str], MpsChild] = {}
        self._lock = threading.Lock()
        self.table = {
            "timeslice": ClaimEffect(self._slice, self._slice_back),
            "mps": ClaimEffect(self._start_mps, self._stop_mps),
            "vfio": ClaimEffect(self._look_at_holders, self._wait_for_holders),
        }

    def close(self) -> None:
        """End all control daemons."""
        for child in list(self._children.values()):
            _end(child.process)
        self._children.clear()

    # time slices

    def _slice(self, _record: ClaimRecord, step: dict[str, str], view: NodeView) -> None:
        problems = set_compute_mode(view.node.facts, [step["gpu"]], DEFAULT)
        for problem in problems.values():
            raise HostError("OCIGPU-DRA-3", f"GPU {step['gpu']}: compute mode: {problem}")
        set_timeslice(view.node.facts, step["gpu"], INTERVALS[step["interval"]])

    def _slice_back(self, _record: ClaimRecord, step: dict[str, str], view: NodeView | None) -> None:
        if view is not None and any(gpu.uuid == step["gpu"] for gpu in view.node.facts.gpus):
            set_timeslice(view.node.facts, step["gpu"], INTERVALS["Default"])

    # MPS

    def _start_mps(self, record: ClaimRecord, step: dict[str, str], view: NodeView) -> None:
        key = (record.claim.uid, step["group"])
        with self._lock:
            running = self._children.get(key)
            if running and running.process.poll() is None:
                return
        own = [each for each in record.devices if each.config.strategy == "MPS" and mps_group(each) == step["group"]]
        facts = view.node.facts
        program = find_program(facts)
        if not program:
            raise HostError("OCIGPU-DRA-3", "MPS: the host has no nvidia-cuda-mps-control")
        place = mps_place(record.claim.uid, step["group"], record.devices)
        job: dict[str, object] = {
            "resource": place,
            "program": program,
            "root": self.mps_root,
            "gpus": [each.device.id for each in own],
            "commands": mps_commands(own, facts),
            "facts": facts_to_json(facts),
        }
        child = _start_child(job)
        with self._lock:
            self._children[key] = MpsChild(child, mps_directories(self.mps_root, place).pipe)

    def _stop_mps(self, record: ClaimRecord, step: dict[str, str], _view: NodeView | None) -> None:
        with self._lock:
            child = self._children.pop((record.claim.uid, step["group"]), None)
        if child:
            _end(child.process)
        remove_mps(self.mps_root, mps_place(record.claim.uid, step["group"], record.devices))

    # virtual machines

    def _look_at_holders(self, record: ClaimRecord, step: dict[str, str], view: NodeView) -> None:
        self._wait_for_holders(record, step, view)

    def _wait_for_holders(self, _record: ClaimRecord, step: dict[str, str], _view: NodeView | None) -> None:
        try:
            holders = read_holders(step["address"], find_roots(self._settings))
        except HostError as error:
            if "no such function" in error.message:  # it is gone from the bus, and everybody's
                return
            raise
        if holders:
            who = ", ".join(f"{each.pid} ({printable(each.command, 15)})" for each in holders[:4])
            raise HostError("OCIGPU-DRA-3", f"GPU {step['address']} is still open in process {who}", "")


def set_timeslice(facts: HostFacts, gpu: str, number: int) -> None:
    """Set the length of a GPU's time slices, of :data:`INTERVALS`; needs root.  Raises HostError (OCIGPU-DRA-3)."""
    program = find_program(facts, "nvidia-smi")
    if not program:
        raise HostError("OCIGPU-DRA-3", "time slices: the host has no nvidia-smi")
    words = [program, "compute-policy", "-i", gpu, "--set-timeslice", str(number)]
    try:
        done = run_program(words, SECONDS, env={}, cwd="/")
    except TimeoutError as error:
        raise HostError("OCIGPU-DRA-3", f"time slices of GPU {gpu}: nvidia-smi: {error}") from error
    except OSError as error:
        raise HostError("OCIGPU-DRA-3", f"{program}: {error.strerror}") from error
    if done.status:
        said = (done.output + done.complaint).strip().splitlines()
        cause = printable(said[0] if said else f"status {done.status}", 200)
        raise HostError("OCIGPU-DRA-3", f"time slices of GPU {gpu}: nvidia-smi: {cause}")


# the child that runs a control daemon


def _start_child(job: "dict[str, object]") -> "subprocess.Popen[bytes]":
    """Start a control daemon in a process of its own: it is made ready between fork and exec, beside no thread."""
    try:
        child = subprocess.Popen(
            command("ocigpu.kubernetes.dra.effects"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
    except OSError as error:
        raise HostError("OCIGPU-DRA-3", f"MPS: no process can be started: {error.strerror}") from error
    assert child.stdin
    assert child.stdout
    try:
        child.stdin.write(json.dumps(job).encode() + b"\n")
        child.stdin.flush()
        answer = _read_line(child, MPS_SECONDS)
    except BrokenPipeError:
        answer = ""
    if answer != "ready":
        _end(child)
        raise HostError("OCIGPU-DRA-3", printable(answer, 400) or "MPS: the control daemon gave no answer")
    return child


def _read_line(child: "subprocess.Popen[bytes]", seconds: float) -> str:
    assert child.stdout
    data = b""
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while b"\n" not in data and selector.select(max(0.0, end - time.monotonic())):
            part = os.read(child.stdout.fileno(), 4096)
            if not part:
                break
            data += part
    return data.partition(b"\n")[0].decode(errors="replace")


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the child, which ends its daemon when its standard input is closed."""
    for stream in (child.stdin, child.stdout):
        if stream:
            stream.close()
    try:
        child.wait(MPS_SECONDS / 2)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def remove_mps(root: str, place: str) -> None:
    """Remove what a daemon that was killed has left; raises HostError (OCIGPU-DRA-3)."""
    directories = mps_directories(root, place)
    base = os.path.dirname(directories.pipe)
    try:
        if os.path.ismount(directories.shm):
            umount2(directories.shm, MNT_DETACH)
        if os.path.isdir(base):
            shutil.rmtree(base)
    except OSError as error:
        raise HostError("OCIGPU-DRA-3", f"remove {base}: {error.strerror}") from error


def main() -> None:
    """Run the control daemon that standard input describes, until that is closed; says "ready" or why not."""
    job = json.loads(sys.stdin.readline())
    directories = mps_directories(job["root"], job["resource"])
    daemon = ControlDaemon(
        Job(
            job["resource"],
            job["program"],
            directories,
            tuple(job["gpus"]),
            tuple(job["commands"]),
            MPS_SHM,
            facts_from_json(job["facts"]),
        ),
        lambda _level, text, **_: print(text, file=sys.stderr, flush=True),
    )
    try:
        daemon.start()
    except OcigpuError as error:
        print(error.message, flush=True)
        return
    except Exception as error:  # noqa: BLE001 - a defect: the claim's error says so
        print(as_own_error(error).message, flush=True)
        return
    print("ready", flush=True)
    sys.stdin.read()
    daemon.stop()
