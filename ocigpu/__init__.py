"""ocigpu gives containers access to their GPUs, and can explain every step it takes."""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

__version__ = "0.1.0"
RUNTIME_SPEC = "1.3.0"
"""The version of the OCI runtime specification that the shim knows."""
VENDOR_VERSION = "1.20.0"
"""The release of NVIDIA's toolkit whose commands, options and settings ocigpu understands.  Under NVIDIA's names the
programs say it, since other tools compare it with what they need."""
PRODUCTS = {
    "nvidia-container-runtime": "NVIDIA Container Runtime",
    "nvidia-container-runtime-hook": "NVIDIA Container Runtime Hook",
    "nvidia-container-toolkit": "NVIDIA Container Runtime Hook",
    "nvidia-cdi-hook": "NVIDIA CDI Hook CLI",
    "nvidia-ctk": "NVIDIA Container Toolkit CLI",
}


ORDINARY = -1
"""What shim, hook and ocigpu-container-cli return in a snapshot that leaves it all to the ordinary interpreter.

Nothing was done yet."""


def version_line(program: str, own_name: str) -> str:
    """Return what a program of this path says first of its version.

    Under NVIDIA's names the first line is what other tools look for (``nvidia-container-toolkit --version | head -1``),
    and ours is the second.
    """
    product = PRODUCTS.get(program.rpartition("/")[2])
    return f"{product} version {VENDOR_VERSION}\nocigpu: {__version__}" if product else f"{own_name} {__version__}"


def is_snapshot() -> bool:
    """Tell whether this is an interpreter that was kept started (packaging/snapshot): it can load no library."""
    return "_syscall" in sys.builtin_module_names


def leave(status: int) -> "NoReturn":
    """End this process, as sys.exit does, without taking the interpreter apart.

    That costs 3 ms and half a MiB, and ends threads that nobody waits for by pthread_exit(3), which aborts the process
    where one is in C++: a service that had asked by gRPC.  In the usual way where what was printed cannot be written.
    """
    if threading := sys.modules.get("threading"):
        threading._shutdown()  # noqa: SLF001 - waits for the other threads, as the interpreter's end does
    if atexit := sys.modules.get("atexit"):
        atexit._run_exitfuncs()  # noqa: SLF001 - as above
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):
        sys.exit(status)
    os._exit(status)
