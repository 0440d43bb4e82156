"""What labels need besides driver and GPUs, read from the host, and the file in which labels are written."""

import os
import shutil

from ocigpu.cdi.write import write_file
from ocigpu.core.errors import HostError
from ocigpu.gpus.pci import NVIDIA_VENDOR, read_functions
from ocigpu.gpus.tree import read_bytes
from ocigpu.gpus.vfio.facts import GPU_CLASSES
from ocigpu.kubernetes.labels import Surroundings
from ocigpu.kubernetes.vgpu import SPACE, parse_vgpu

_STAGING = ".ocigpu"
"""Directory beside the file: node feature discovery reads every file of features.d, also one half written."""


def read_surroundings(sys: str, machine_type_file: str, timestamp: int | None) -> Surroundings:
    """Return the machine's name and what the PCI bus says of its GPUs; needs no privilege."""
    functions = [each for each in read_functions(sys, NVIDIA_VENDOR) if each.base_class in GPU_CLASSES]
    spaces = (read_bytes(f"{sys}/bus/pci/devices/{each.address}/config", SPACE) or b"" for each in functions)
    vgpus = (vgpu for vgpu in map(parse_vgpu, spaces) if vgpu is not None)
    machine = (read_bytes(machine_type_file, 4096) or b"").decode(errors="replace").strip()
    return Surroundings(machine, frozenset(each.base_class for each in functions), next(vgpus, None), timestamp)


def write_features(path: str, text: str) -> None:
    """Write a file of features.d, mode 0644, or leave what was there; missing directories are made.

    Raises HostError (OCIGPU-HOST-3) when it cannot be written.
    """
    directory, name = os.path.split(path)
    staging = os.path.join(directory, _STAGING)
    try:
        write_file(os.path.join(staging, name), text.encode())
        os.replace(os.path.join(staging, name), path)
        os.rmdir(staging)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise HostError("OCIGPU-HOST-3", f"write {path}: {error.strerror}", "") from error


def remove_features(path: str) -> None:
    """Remove the file of features.d; one that is not there is no error."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise HostError("OCIGPU-HOST-3", f"remove {path}: {error.strerror}", "") from error
