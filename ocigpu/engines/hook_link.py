"""The link by which Docker's --gpus finds our hook: nvidia-container-runtime-hook in a directory of dockerd's PATH."""

import os

from ocigpu.core.errors import OcigpuError
from ocigpu.engines import places
from ocigpu.engines.files import Root
from ocigpu.engines.status import HOOK, is_our_hook

OUR_HOOK = "ocigpu-hook"


def plan_hook_link(root: Root, runtime_path: str, directory: str) -> tuple[str, str] | None:
    """Return path and target of the link to make, None where dockerd finds our hook already.

    ``directory``: where; "" for that of the shim when it is on a service's PATH, else /usr/local/bin.
    Raises OcigpuError OCIGPU-ENG-5 without our hook, OCIGPU-ENG-2 for a hook of somebody else.
    """
    home = os.path.dirname(runtime_path)
    hook = f"{home}/{OUR_HOOK}"
    if not places.is_program(root.path, hook):
        raise OcigpuError("OCIGPU-ENG-5", f"--gpus-hook: {hook} is not there or not executable")
    found = places.find_program(root.path, HOOK)
    if found and not is_our_hook(root.path, found):
        raise _foreign(found)
    if found and not directory:
        return None
    directory = directory or (home if home in places.DAEMON_PATH else places.DAEMON_PATH[1])
    path = f"{directory}/{HOOK}"
    target = OUR_HOOK if directory == home else hook
    present = root.read_link(path)
    if present == target:
        return None
    if present is not None:
        raise _foreign(path)
    return path, target


def _foreign(path: str) -> OcigpuError:
    return OcigpuError(
        "OCIGPU-ENG-2",
        f"--gpus-hook: {path} is not ocigpu's",
        "remove the other toolkit first",
    )
