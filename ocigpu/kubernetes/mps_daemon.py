"""CUDA's Multi-Process Service, run for the resources that are shared by it: a control daemon each, as a child process.

A resource is offered only once its daemon answers and has the limits of its clients: before that a pod would run
without any.  A daemon is waited for in a thread of its own, so that it keeps nobody else waiting.
Source: NVIDIA's MPS documentation (nvidia-cuda-mps-control: option -f, commands on standard input, variables).
"""

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ocigpu.errors import HostError, OcigpuError, printable
from ocigpu.facts import HostFacts
from ocigpu.kubernetes.config import Configuration
from ocigpu.kubernetes.devices import Resource
from ocigpu.kubernetes.mps import LOG_VARIABLE, PIPE_VARIABLE, Directories, control_commands, mps_directories
from ocigpu.kubernetes.node import Node
from ocigpu.kubernetes.reader import reap

Log = Callable[..., None]

CONTROL = "nvidia-cuda-mps-control"
COMMAND_SECONDS = 20.0
START_SECONDS = 30.0
POLL = 0.2
FIRST_RETRY, LONGEST_RETRY = 2.0, 60.0
_WITH_SHARED_MEMORY = 'mount --bind "$1" /dev/shm && exec "$2" -f'
"""Clients have the directory as their /dev/shm, so the daemon must too; in a mount namespace of its own."""


class Job(NamedTuple):
    """What a daemon is to be; another one is another daemon.  ``gpus``: UUIDs; ``commands``: its limits."""

    resource: str
    program: str
    smi: str
    directories: Directories
    gpus: tuple[str, ...]
    commands: tuple[str, ...]
    problem: str = ""


class MpsDaemons:
    """The daemons of all resources that need one."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._daemons: dict[str, _Daemon] = {}

    def want(self, resources: Sequence[Resource], node: Node, configuration: Configuration) -> None:
        """Run daemons for these resources and no others; one whose limits change is started anew."""
        jobs = {each.name: make_job(each, node, configuration) for each in resources if each.sharing == "mps"}
        for name in [name for name, daemon in self._daemons.items() if jobs.get(name) != daemon.job]:
            self._daemons.pop(name).end()
        for name, job in jobs.items():
            if name not in self._daemons:
                self._daemons[name] = _Daemon(job, self._log)
                self._daemons[name].start()

    def is_ready(self, resource: str) -> bool:
        """Return whether pods may have devices of this resource: it needs no daemon, or its daemon is ready."""
        daemon = self._daemons.get(resource)
        return daemon is None or daemon.ready.is_set()

    def close(self) -> None:
        """End all daemons."""
        for daemon in self._daemons.values():
            daemon.end()
        self._daemons.clear()


def make_job(resource: Resource, node: Node, configuration: Configuration) -> Job:
    """Return what the daemon of a resource is to be; ``problem`` says why there can be none."""
    shared = [device for device in resource.devices if device.is_replica]
    gpus = tuple(dict.fromkeys(device.uuid for device in shared))
    memory = {uuid: found.memory_mib for uuid, found in node.hardware.gpus.items()}
    unknown = [uuid for uuid in gpus if not memory.get(uuid)]
    problem = f"the memory of GPU {unknown[0]} is unknown" if unknown else ""
    program = _find_program(CONTROL, node.facts)
    if not program:
        problem = f"there is no {CONTROL} on this host"
    return Job(
        resource.name,
        program,
        _find_program("nvidia-smi", node.facts),
        mps_directories(configuration.options.mps_root, resource.name),
        gpus,
        control_commands(resource, memory),
        problem,
    )


def _find_program(name: str, facts: HostFacts) -> str:
    """Return the path of a driver's program as the host has it, else as this process would find it; "" for none."""
    found = next((file.host_path for file in facts.binaries if os.path.basename(file.host_path) == name), "")
    return found or shutil.which(name) or ""


class _Daemon(threading.Thread):
    """Keeps one control daemon running, with its limits set."""

    def __init__(self, job: Job, log: Log) -> None:
        super().__init__(name=f"mps {job.resource}", daemon=True)
        self.job = job
        self.ready = threading.Event()
        self._log = log
        self._ending = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        delay = 0.0
        told = ""
        while not self._ending.wait(delay):
            try:
                self._serve()
                text = "the control daemon ended"
            except OcigpuError as error:
                text = error.message
            was_ready = self.ready.is_set()
            self._stop()
            delay = FIRST_RETRY if was_ready else min(max(2 * delay, FIRST_RETRY), LONGEST_RETRY)
            if text != told and not self._ending.is_set():
                self._log("error", f"{self.job.resource}: MPS: {text}; it is tried again", resource=self.job.resource)
            told = text

    def end(self) -> None:
        """End the daemon and wait for that."""
        self._ending.set()
        if self.is_alive():
            self.join(COMMAND_SECONDS)

    def _serve(self) -> None:
        """Start the daemon, set its limits, say that it is ready, and return when it ends."""
        job = self.job
        if job.problem:
            raise HostError("OCIGPU-KUBE-3", job.problem)
        self._make_directories()
        for uuid in job.gpus:
            self._set_compute_mode(uuid, "EXCLUSIVE_PROCESS")
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _WITH_SHARED_MEMORY, "sh"]
        self._child = self._popen([*words, job.directories.shm, job.program])
        self._wait_for_answer()
        for command in job.commands:
            self._tell(command)
        percentage = job.commands[-1].rpartition(" ")[2]
        said = self._tell("get_default_active_thread_percentage").strip()
        if not said.startswith(percentage):
            raise HostError("OCIGPU-KUBE-3", f"its limit is {said or 'unknown'}, not {percentage}")
        with open(job.directories.ready, "wb"):
            pass
        self.ready.set()
        self._log("info", f"{job.resource}: MPS is ready: {'; '.join(job.commands)}", resource=job.resource)
        while self._child.poll() is None and not self._ending.wait(POLL):
            pass

    def _make_directories(self) -> None:
        directories = self.job.directories
        try:
            for path, mode in ((directories.pipe, 0o755), (directories.log, 0o755), (directories.shm, 0o1777)):
                os.makedirs(path, exist_ok=True)
                os.chmod(path, mode)
            if os.path.lexists(directories.ready):
                os.unlink(directories.ready)
        except OSError as error:
            raise HostError("OCIGPU-KUBE-3", f"{error.filename}: {error.strerror}") from error

    def _environment(self) -> dict[str, str]:
        directories = self.job.directories
        variables = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "LANG")}
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # of NVML's indices, by which limits name devices
        return {**variables, **order, PIPE_VARIABLE: directories.pipe, LOG_VARIABLE: directories.log}

    def _popen(self, command: list[str]) -> "subprocess.Popen[bytes]":
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment(),
                process_group=0,
            )
        except OSError as error:
            raise HostError("OCIGPU-KUBE-3", f"{command[0]}: {error.strerror}") from error

    def _tell(self, command: str) -> str:
        """Give the daemon a command and return what it says."""
        try:
            done = subprocess.run(
                [self.job.program],
                input=f"{command}\n",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMMAND_SECONDS,
                env=self._environment(),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise HostError("OCIGPU-KUBE-3", f"{command}: no answer within {COMMAND_SECONDS:g} s") from error
        except OSError as error:
            raise HostError("OCIGPU-KUBE-3", f"{self.job.program}: {error.strerror}") from error
        if done.returncode:
            said = printable((done.stderr or done.stdout).strip(), 200)
            raise HostError("OCIGPU-KUBE-3", f"{command}: {said or f'status {done.returncode}'}")
        return done.stdout

    def _wait_for_answer(self) -> None:
        waited = 0.0
        while True:
            if self._child is not None and self._child.poll() is not None:
                raise HostError("OCIGPU-KUBE-3", f"{CONTROL} ended with status {self._child.returncode}")
            try:
                self._tell("get_default_active_thread_percentage")
            except OcigpuError:
                if waited > START_SECONDS:
                    raise
            else:
                return
            if self._ending.wait(POLL):
                raise HostError("OCIGPU-KUBE-3", "ending")
            waited += POLL

    def _set_compute_mode(self, uuid: str, mode: str) -> None:
        if not self.job.smi:
            return
        command = [self.job.smi, "-i", uuid, "-c", mode]
        try:
            done = subprocess.run(command, capture_output=True, timeout=COMMAND_SECONDS, check=False)
            status = f"status {done.returncode}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            status = type(error).__name__
        if status:
            self._log("warning", f"{self.job.resource}: compute mode {mode} of {uuid} was not set: {status}")

    def _stop(self) -> None:
        """End the daemon and its clients, and take back what was made for them."""
        self.ready.clear()
        if os.path.lexists(self.job.directories.ready):
            os.unlink(self.job.directories.ready)
        child, self._child = self._child, None
        if child is None:
            return
        if child.poll() is None:
            try:
                self._tell("quit")
                child.wait(COMMAND_SECONDS / 4)
            except (OcigpuError, subprocess.TimeoutExpired):
                child.kill()
        reap(child)
        for uuid in self.job.gpus:
            self._set_compute_mode(uuid, "DEFAULT")
