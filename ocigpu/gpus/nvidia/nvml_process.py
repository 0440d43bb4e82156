"""NVML in a process of its own: closed code that may hang or crash does so there, and only there.

The process is started without a fork, which is safe beside gRPC's threads, and ends with the one that started it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ocigpu.core.errors import UNUSABLE, printable
from ocigpu.core.facts import HostFacts
from ocigpu.gpus.nvidia.nvml_child import DriverPlace
from ocigpu.system.programs import REAP_SECONDS, run_program

VERBS = "ocigpu.gpus.nvidia.nvml_verbs"
COMPUTE_MODE_SECONDS = 20.0
DEFAULT, EXCLUSIVE_PROCESS = 0, 3  # nvmlComputeMode_t
T = TypeVar("T")
_CODE = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " importlib.import_module(sys.argv[2]).main(*sys.argv[3:])"
)


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


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that calls ``main(*arguments)`` of a module, found where this process finds modules."""
    return [sys.executable, "-I", "-c", _CODE, json.dumps(list(filter(None, sys.path))), module, *arguments]


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
    facts: HostFacts, uuids: Sequence[str], mode: int, seconds: float = COMPUTE_MODE_SECONDS
) -> dict[str, str]:
    """Set the mode of GPUs and return why not by UUID, {} when all have it; needs root (CAP_SYS_ADMIN).

    EXCLUSIVE_PROCESS while a control daemon of MPS shares them, else DEFAULT.  Waits no longer than ``seconds`` and
    never raises for what NVML does.
    """

    def parse(found: Any) -> dict[str, str]:
        return {str(uuid): printable(str(problem), 200) for uuid, problem in found.items()}

    try:
        return ask("set-compute-mode", facts, seconds, str(mode), *uuids, parse=parse)
    except NvmlError as error:
        return dict.fromkeys(uuids, str(error))


class NvmlStream:
    """A process that prints a JSON document a line, one at a time; nothing here waits for it."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.unfinished = b""
        """The beginning of a line."""
        self.stuck: subprocess.Popen[bytes] | None = None
        """One that was killed and did not end: it may hold the driver's locks."""

    def fileno(self) -> int:
        """Return what becomes readable with a line, or with the end of the process; -1 while there is none."""
        return self.child.stdout.fileno() if self.child and self.child.stdout else -1

    def start(self, words: Sequence[str], takes_orders: bool = False) -> None:
        """Start the process with this command, see :func:`command`; raises OSError.

        ``takes_orders``: it reads standard input, :meth:`send`.
        """
        self.child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE if takes_orders else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            process_group=0,
            bufsize=0,
        )
        self.unfinished = b""
        os.set_blocking(self.fileno(), False)

    def send(self, document: Any) -> None:
        """Write a document to its standard input; one that has ended is found out by :meth:`read`."""
        assert self.child
        assert self.child.stdin
        try:
            self.child.stdin.write(json.dumps(document).encode() + b"\n")
        except BrokenPipeError:
            return

    def read(self) -> tuple[list[bytes], bool]:
        """Return the lines that have come, and whether there will be no more."""
        try:
            data = os.read(self.fileno(), 1 << 20)
        except BlockingIOError:
            return [], False
        *lines, self.unfinished = (self.unfinished + data).split(b"\n")
        return lines, not data

    def is_stuck(self) -> bool:
        """Return whether a process that was killed has not ended yet."""
        if self.stuck is not None and self.stuck.poll() is not None:
            self.stuck = None
        return self.stuck is not None

    def close(self) -> int | None:
        """Kill the process and return its status, None for one that does not end, or for none."""
        child, self.child, self.unfinished = self.child, None, b""
        if child is None:
            return None
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream:
                stream.close()
        try:
            return child.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            self.stuck = child
            return None
