"""One control daemon of CUDA's Multi-Process Service, for one resource: a real child process.

Source: NVIDIA's MPS documentation (nvidia-cuda-mps-control: option -f, commands on standard input, variables, log).
"""

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ocigpu.core.errors import HostError, OcigpuError, OsErrorAs, UsageError, printable, quoted
from ocigpu.core.facts import HostFacts
from ocigpu.gpus.nvidia.nvml_process import DEFAULT, EXCLUSIVE_PROCESS, set_compute_mode
from ocigpu.kubernetes.mps.shares import LOG_VARIABLE, PIPE_VARIABLE, Directories
from ocigpu.system import libc
from ocigpu.system.programs import run_program
from ocigpu.system.removal import empty_directory, remove_directory

PROGRAM = "nvidia-cuda-mps-control"
MAX_LINES = 50
"""Lines of the daemon's log that are passed on at once; clients can make it write many."""
_QUESTION = "get_default_active_thread_percentage"
_SHM = "/dev/shm"
_LABEL = "security.selinux"
_SIZE = re.compile(r"[1-9][0-9]{0,15}[kKmMgG]?|[1-9][0-9]?%|100%")


class Times(NamedTuple):
    """Seconds: for one command, until the daemon's first answer, between tries, and from quit to the kill."""

    command: float = 10.0
    start: float = 30.0
    poll: float = 0.1
    quit: float = 10.0


class Job(NamedTuple):
    """What a daemon is to be.  ``gpus``: UUIDs it shares; ``commands``: its limits; ``shm_size``: of tmpfs(5)."""

    resource: str
    program: str
    directories: Directories
    gpus: tuple[str, ...]
    commands: tuple[str, ...]
    shm_size: str
    facts: HostFacts


def check_size(text: str) -> str:
    """Return a size as tmpfs(5) takes it: bytes, with k, m or g, or percent of the memory; raises UsageError."""
    if not _SIZE.fullmatch(text):
        raise UsageError(f"--shm-size {quoted(text)} is not a size such as 8g or 50%")
    return text


def find_program(facts: HostFacts, name: str = PROGRAM) -> str:
    """Return the path of a driver program: from PATH, where the runtime puts it, else from the driver's files."""
    ours = "" if facts.simulated else shutil.which(name)
    known = (file.host_path for file in facts.binaries if os.path.basename(file.host_path) == name)
    return ours or next(known, "")


class ControlDaemon:
    """A daemon that runs between :meth:`start` and :meth:`stop`; of a process with one thread."""

    def __init__(self, job: Job, log: Callable[..., None], times: Times | None = None) -> None:
        self.job = job
        self._log = log
        self._times = times or Times()
        self.child: subprocess.Popen[bytes] | None = None
        self._logged = 0
        self._exclusive: tuple[str, ...] = ()

    def start(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Start the daemon, set its limits, and create the file that marks it as ready.

        Raises HostError (OCIGPU-KUBE-6); then nothing runs.  Needs root: CAP_SYS_ADMIN, for mode and mounts.
        """
        again = os.path.ismount(self.job.directories.shm)
        try:
            self._start(interrupted)
        except OcigpuError:
            self.stop(keep=again)
            raise

    def extend(self, job: Job) -> tuple[str, ...]:
        """Add GPUs that the running daemon does not have yet, with their limits; returns their UUIDs.

        Raises HostError (OCIGPU-KUBE-6); the daemon then continues unchanged.
        """
        added = tuple(uuid for uuid in job.gpus if uuid not in self.job.gpus)
        if added:
            self._make_exclusive(added)
            for command in job.commands:
                if command not in self.job.commands:
                    self._send_command(command)
            commands = dict.fromkeys((*self.job.commands[:-1], *job.commands))
            self.job = self.job._replace(gpus=(*self.job.gpus, *added), commands=tuple(commands))
        return added

    def is_running(self) -> bool:
        """Return whether the daemon has not ended; passes on what it has logged."""
        self._pass_on_log()
        return self.child is not None and not _has_ended(self.child.pid)

    def stop(self, keep: bool = False) -> None:
        """End the daemon with its servers, by force if necessary, and undo everything made for it.

        ``keep``: the directories stay, because pods have them mounted and find the next daemon there.
        """
        try:
            _remove(self.job.directories.ready)
        except OcigpuError as error:
            self._warn(error.message)
        if self.child is not None:
            self._end(self.child)
            self.child = None
            self._pass_on_log()
        problems = set_compute_mode(self.job.facts, self._exclusive, DEFAULT) if self._exclusive else {}
        for uuid, problem in problems.items():
            self._warn(f"compute mode of {uuid} is not default: {problem}")
        self._exclusive = ()
        if keep:
            return
        if os.path.ismount(self.job.directories.shm):
            try:
                libc.umount2(self.job.directories.shm, libc.MNT_DETACH)
            except OSError as error:
                self._warn(f"unmount {self.job.directories.shm}: {error.strerror}")
        for directory in (self.job.directories.pipe, self.job.directories.log):
            with contextlib.suppress(OSError):
                remove_directory(directory)

    def take_back(self) -> None:
        """Clean up after a killed predecessor, including its daemon and the mode of the GPUs."""
        self._quit_left_over()
        self._exclusive = self.job.gpus
        self.stop()

    def _start(self, interrupted: Callable[[], bool]) -> None:
        directories = self.job.directories
        _remove(directories.ready)
        if not self.job.program:
            raise _error(f"the host has no {PROGRAM}")
        self._quit_left_over()
        self._make_directories()
        self._make_exclusive(self.job.gpus)
        try:
            self.child = subprocess.Popen(
                [self.job.program, "-f"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment(),
                cwd="/",
                start_new_session=True,
                preexec_fn=lambda: _prepare_child(directories.shm),  # noqa: PLW1509 - there is one thread
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise _error(f"{self.job.program}: {getattr(error, 'strerror', '') or error}") from error
        self._wait_for_answer(interrupted)
        for command in self.job.commands:
            self._send_command(command)
        wanted = self.job.commands[-1].rpartition(" ")[2]
        said = self._send_command(_QUESTION).strip()
        if said.split(".")[0] != wanted:
            raise _error(f"{_QUESTION}: {said or 'nothing'} instead of {wanted}")
        os.close(os.open(directories.ready, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))

    def _quit_left_over(self) -> None:
        """End the daemon of a killed predecessor: two daemons cannot share a directory."""
        if not os.path.isdir(self.job.directories.pipe):
            return
        try:
            self._send_command("quit")
        except OcigpuError:  # no answer: no daemon is left
            return
        self._warn("ended a control daemon that was left over")

    def _make_directories(self) -> None:
        directories = self.job.directories
        self._logged = 0
        try:
            for path, mode in ((directories.pipe, 0o755), (directories.log, 0o755), (directories.shm, 0o1777)):
                os.makedirs(path, exist_ok=True)
                os.chmod(path, mode)
            empty_directory(directories.pipe)
            empty_directory(directories.log)
            flags = libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC
            flags |= libc.MS_REMOUNT if os.path.ismount(directories.shm) else 0
            libc.mount("tmpfs", directories.shm, "tmpfs", flags, f"size={self.job.shm_size},mode=1777")
            for path in (directories.pipe, directories.shm):
                relabel(path)
        except OSError as error:
            raise _error(f"{error.filename or directories.shm}: {error.strerror}") from error

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "LANG")}
        # limits name GPUs by NVML's index, which is the order on the bus; all GPUs are visible to the daemon
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return {**kept, **order, PIPE_VARIABLE: self.job.directories.pipe, LOG_VARIABLE: self.job.directories.log}

    def _wait_for_answer(self, interrupted: Callable[[], bool]) -> None:
        until = time.monotonic() + self._times.start
        while True:
            if not self.is_running():
                raise _error(f"{PROGRAM} ended at once")
            try:
                self._send_command(_QUESTION)
            except OcigpuError:
                if time.monotonic() > until or interrupted():
                    raise
                time.sleep(self._times.poll)
            else:
                return

    def _send_command(self, command: str) -> str:
        """Send the daemon a command and return its answer."""
        try:
            done = run_program(
                [self.job.program], self._times.command, env=self._environment(), cwd="/", words=f"{command}\n"
            )
        except TimeoutError as error:
            raise _error(f"{command}: {error}") from error
        except OSError as error:
            raise _error(f"{self.job.program}: {error.strerror}") from error
        said = (done.output + done.complaint).strip()
        if done.status:
            raise _error(f"{command}: {printable(said, 200) or f'status {done.status}'}")
        return said

    def _end(self, child: "subprocess.Popen[bytes]") -> None:
        if not _has_ended(child.pid):
            try:
                self._send_command("quit")
            except OcigpuError as error:
                self._warn(error.message)
            until = time.monotonic() + self._times.quit
            while not _has_ended(child.pid) and time.monotonic() < until:
                time.sleep(self._times.poll)
            if not _has_ended(child.pid):
                self._warn("the control daemon does not quit: killed")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and its servers; its number is ours until it is waited for
        try:
            child.wait(self._times.quit)
        except subprocess.TimeoutExpired:  # stuck in the driver: left to init
            child.returncode = -signal.SIGKILL

    def _make_exclusive(self, gpus: Sequence[str]) -> None:
        problems = set_compute_mode(self.job.facts, gpus, EXCLUSIVE_PROCESS)
        self._exclusive += tuple(uuid for uuid in gpus if uuid not in problems)
        for uuid, problem in problems.items():
            raise _error(f"compute mode of {uuid}: {problem}")

    def _pass_on_log(self) -> None:
        for line in self._new_lines():
            self._log("info", f"{self.job.resource}: {line}", resource=self.job.resource)

    def _new_lines(self) -> Iterator[str]:
        try:
            with open(f"{self.job.directories.log}/control.log", "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(self._logged if size >= self._logged else 0)
                data = file.read(1 << 16)
                self._logged = file.tell() if len(data) < 1 << 16 else size
        except OSError:  # not made yet, or removed
            return
        lines = data.decode(errors="replace").splitlines()
        yield from (printable(line, 500) for line in lines[:MAX_LINES])
        if len(lines) > MAX_LINES:
            yield f"({len(lines) - MAX_LINES} lines left out)"

    def _warn(self, text: str) -> None:
        self._log("warning", f"{self.job.resource}: {text}", resource=self.job.resource)


def _prepare_child(shm: str) -> None:
    """Of the daemon alone: the directory of its clients is its /dev/shm, and it ends when we are killed."""
    libc.unshare(libc.CLONE_NEWNS)
    libc.mount(None, "/", None, libc.MS_SLAVE | libc.MS_REC)
    libc.mount(shm, _SHM, None, libc.MS_BIND)
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGTERM)


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended; it stays to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def relabel(path: str) -> None:
    """Let containers use a directory where SELinux guards files: the type container_file_t, of container-selinux.

    Raises OSError; a file without a label is left alone.
    """
    try:
        label = os.getxattr(path, _LABEL).rstrip(b"\0").split(b":")
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return
        raise
    if len(label) >= 4:
        os.setxattr(path, _LABEL, b":".join((*label[:2], b"container_file_t", b"s0")))


def _remove(path: str) -> None:
    gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    with OsErrorAs(HostError, "OCIGPU-KUBE-6", f"MPS: remove {path}"), gone:
        os.unlink(path)


def _error(text: str) -> HostError:
    return HostError("OCIGPU-KUBE-6", f"MPS: {text}", None)
