"""The driver's kernel modules: which are loaded, and modprobe for the others."""

import os
import subprocess

from ocigpu.core.errors import HostError
from ocigpu.gpus.nvidia.procfs import is_loaded
from ocigpu.gpus.pci import read_gpus
from ocigpu.gpus.platforms import no_driver_to_load
from ocigpu.gpus.tree import Roots, read_text
from ocigpu.system.programs import run_program

MODULES = ("nvidia", "nvidia-uvm", "nvidia-modeset")
"""In the order in which they are loaded."""
TIMEOUT = 300
"""Seconds for one module: the driver initializes every GPU, and eight take a while."""


def missing_modules(roots: Roots) -> list[str]:
    """Return which of :data:`MODULES` are to be loaded.

    For a simulated host there is nothing to load.  Raises HostError OCIGPU-HOST-1 when the PCI bus has no GPU.
    """
    if roots.stand_in:
        return []
    missing = [name for name in MODULES if not is_loaded(roots.sys, name)]
    if missing and not read_gpus(roots.sys):
        if elsewhere := no_driver_to_load(roots):
            raise elsewhere
        raise HostError(
            "OCIGPU-HOST-1", f"{roots.sys}/bus/pci/devices: no NVIDIA GPU: there is nothing to load kernel modules for"
        )
    return missing


def load_modules(roots: Roots, program: str = "") -> tuple[list[str], list[str]]:
    """Load missing modules; return the names of the loaded ones, and notes, a sentence each.

    With a driver root of its own the modprobe in there is run, in a chroot, since the modules are there too.
    ``program``: modprobe's path ("": of /proc/sys/kernel/modprobe, as the kernel itself runs it).
    Needs root.  Raises HostError: OCIGPU-HOST-1 as above, OCIGPU-HOST-4 when nvidia or nvidia-uvm cannot be loaded;
    without nvidia-modeset a host can do without displays.
    """
    program = program or (read_text("/proc/sys/kernel/modprobe") or "").strip() or "/sbin/modprobe"
    loaded, notes = [], []
    for name in missing_modules(roots):
        problem = _modprobe(program, name, roots.driver)
        if is_loaded(roots.sys, name):
            loaded.append(name)
        elif name == "nvidia-modeset":
            notes.append(f"{name} could not be loaded ({problem}): only displays need it")
        else:
            raise HostError("OCIGPU-HOST-4", f"modprobe {name}: {problem}", f"See dmesg, and run: modprobe -v {name}")
    return loaded, notes


def _modprobe(program: str, name: str, root: str) -> str:
    """Run modprobe; return its error output.  Only sysfs shows whether the module is loaded afterwards."""

    def enter() -> None:
        os.chroot(root)
        os.chdir("/")

    try:
        done = run_program([program, name], TIMEOUT, env={"PATH": "/sbin"}, prepare=enter if root else None)
    except TimeoutError:
        return f"{program} took more than {TIMEOUT} s"
    except (OSError, subprocess.SubprocessError) as error:  # the second: chroot failed
        return f"{root}{program}: {error}"
    lines = done.complaint.strip().splitlines()
    return lines[-1] if lines else f"{program} ended with status {done.status}"
