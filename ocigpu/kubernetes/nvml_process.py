"""NVML in a process of its own: closed code that may hang or crash does so there, and only there.

The process is started without a fork, which is safe beside gRPC's threads, and ends with the one that started it.
"""

import ctypes
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

from ocigpu.core.errors import printable
from ocigpu.core.facts import HostFacts
from ocigpu.gpus.nvidia.nvml_child import enter_root, find_identity
from ocigpu.system.child import drop_rights, end_with

REAP = 0.5
"""Seconds given to a killed process to end: one that is stuck in the driver does not, and is left to init."""
_CODE = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " importlib.import_module(sys.argv[2]).main(*sys.argv[3:])"
)


class NvmlError(Exception):
    """Why NVML gave no answer: one line."""


class DriverPlace(NamedTuple):
    """``library``: path of NVML, "" for none, below the driver root ``chroot`` when that is to be entered for it.

    ``simulation``: root of a simulated host, "" for a real one.
    """

    library: str
    chroot: str = ""
    simulation: str = ""


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


def ask(module: str, facts: HostFacts, seconds: float, *arguments: str) -> Any:
    """Return the JSON document that ``main(parent, library, chroot, simulation, *arguments)`` of a module prints.

    Waits no longer than ``seconds``.  Raises NvmlError for whatever goes wrong.
    """
    place = nvml_place(facts)
    if not place.library:
        raise NvmlError("the host has no NVML library")
    words = command(module, str(os.getpid()), *place, *arguments)
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


def load(parent: str, place: DriverPlace, *, as_root: bool = False) -> None:
    """Load and initialise NVML, in the process that :func:`command` started.

    Gives up root first unless it is needed, as :mod:`ocigpu.gpus.nvidia.nvml_child` does; ends with the process
    ``parent``. Raises OSError or NVMLError when the library cannot be used.
    """
    import pynvml

    library, chroot, simulation = place
    identity = find_identity(chroot, simulation)
    if chroot and not enter_root(chroot):
        library = chroot + library
    if not as_root:
        drop_rights(*identity)
    end_with(int(parent))
    pynvml.nvmlLib = ctypes.CDLL(library)
    pynvml.nvmlInit()
