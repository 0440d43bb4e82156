"""Hosts whose GPUs are not behind the kernel module nvidia: WSL and Tegra."""

from ocigpu.core.errors import HostError
from ocigpu.gpus.tegra import no_driver_on_tegra
from ocigpu.gpus.tree import Roots
from ocigpu.gpus.wsl import no_driver_on_wsl


def no_driver_to_load(roots: Roots) -> HostError | None:
    """Return the error OCIGPU-HOST-1 that names the alternative, None if the kernel module is what is missing."""
    return no_driver_on_wsl(roots) or no_driver_on_tegra(roots)
