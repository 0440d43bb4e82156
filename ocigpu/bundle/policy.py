"""Who owns the device policy of a container, and where our hook is."""

import os

from ocigpu.core.errors import OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.system.namespaces import in_initial_user_namespace


def owns_device_policy() -> bool:
    """Tell whether this process may set device cgroup rules: root of the initial user namespace.

    Elsewhere (rootless, nested) a runtime cannot enforce rules, and crun refuses a configuration that has them.
    """
    return os.geteuid() == 0 and in_initial_user_namespace()


def find_hook(settings: Settings, stub: str) -> str:
    """Return the absolute path of ocigpu-hook: from the settings, else beside the stub of the shim."""
    return settings.hook_path or os.path.join(os.path.dirname(os.path.realpath(stub)), "ocigpu-hook")


def hook_path(settings: Settings, stub: str) -> str:
    """Return the absolute path of ocigpu-hook, found as below; raises OcigpuError OCIGPU-RT-3 if it does not exist."""
    path = find_hook(settings, stub)
    if not os.access(path, os.X_OK):
        raise OcigpuError("OCIGPU-RT-3", f"hook {path}: missing or not executable")
    return path
