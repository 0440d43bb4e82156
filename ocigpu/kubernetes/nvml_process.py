"""NVML in a process of its own: closed code that may hang or crash does so there, and only there.

The process is started without a fork, which is safe beside gRPC's threads, and ends with the one that started it.
"""

import ctypes
import json
import os
import subprocess
import sys
from typing import Any

from ocigpu.errors import printable
from ocigpu.facts import HostFacts
from ocigpu.host.nvml_child import _drop_privileges, _end_with, _identity

REAP = 0.5
"""Seconds given to a killed process to end: one that is stuck in the driver does not, and is left to init."""
_CODE = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " importlib.import_module(sys.argv[2]).main(*sys.argv[3:])"
)


class NvmlError(Exception):
    """Why NVML gave no answer: one line."""


def nvml_library(facts: HostFacts) -> str:
    """Return the host path of NVML for this machine's programs, "" for none."""
    return next((lib.host_path for lib in facts.libraries if lib.soname == "libnvidia-ml.so.1" and lib.bits == 64), "")


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that calls ``main(*arguments)`` of a module, found where this process finds modules."""
    return [sys.executable, "-I", "-c", _CODE, json.dumps(list(filter(None, sys.path))), module, *arguments]


def ask(module: str, facts: HostFacts, seconds: float, *arguments: str) -> Any:
    """Return the JSON document that ``main(library, parent, *arguments)`` of a module prints.

    Waits no longer than ``seconds``.  Raises NvmlError for whatever goes wrong.
    """
    library = nvml_library(facts)
    if not library:
        raise NvmlError("the host has no NVML library")
    words = command(module, library, str(os.getpid()), *arguments)
    try:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/"
        )
    except OSError as error:
        raise NvmlError(f"{sys.executable}: {error.strerror}") from error
    with child:
        try:
            output, complaint = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            child.kill()
            reap(child)
            raise NvmlError(f"NVML did not answer within {seconds:g} s") from error
    if child.returncode:
        lines = complaint.decode(errors="replace").strip().splitlines()
        raise NvmlError(printable(lines[-1] if lines else f"NVML ended its process ({child.returncode})", 300))
    try:
        return json.loads(output)
    except ValueError as error:
        raise NvmlError("NVML gave no usable answer") from error


def reap(child: "subprocess.Popen[bytes]") -> None:
    """Wait for a child that was killed, but not for one that is stuck in the kernel: that is left to init."""
    try:
        child.wait(REAP)
    except subprocess.TimeoutExpired:
        child.returncode = -9


def load(library: str, parent: str, simulation_root: str) -> None:
    """Load and initialise the library at this path, in the process that :func:`command` started.

    Gives up root first, as :mod:`ocigpu.host.nvml_child` does, and ends with the process ``parent``.  Raises OSError or
    NVMLError when it cannot be used.
    """
    import pynvml

    _drop_privileges(*_identity("", simulation_root))
    _end_with(int(parent))
    pynvml.nvmlLib = ctypes.CDLL(library)
    pynvml.nvmlInit()
