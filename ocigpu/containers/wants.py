"""Driver files that an image has users of and does not ask for: NVIDIA's default mode gives them unasked."""

import os
from collections.abc import Collection

from ocigpu.containers.planned import look_below
from ocigpu.core.errors import OcigpuError
from ocigpu.system.paths import open_in_root

VARIABLE = "NVIDIA_DRIVER_CAPABILITIES"
DIRECTORIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
USERS = {
    "graphics": ("libEGL.so.1", "libGLX.so.0", "libOpenGL.so.0", "libvulkan.so.1"),
    "video": (
        *(f"libavcodec.so.{number}" for number in range(57, 64)),
        "libgstnvcodec.so",
        "gstreamer-1.0/libgstnvcodec.so",
    ),
}
"""Libraries that open the driver's for a capability: GLVND and the Vulkan loader; FFmpeg (4.0 to 8) and GStreamer."""


def find_users(root: str, capabilities: Collection[str]) -> dict[str, str]:
    """Return a library of the image for each capability that it uses and that is not among those given.

    ``root``: the container's root directory.  Empty for one that cannot be looked at.
    """

    def look(root_fd: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for capability, names in USERS.items():
            if capability in capabilities or (capability == "graphics" and "display" in capabilities):
                continue
            for path in (f"{directory}/{name}" for directory in DIRECTORIES for name in names):
                try:
                    os.close(open_in_root(root_fd, path, os.O_PATH))
                except OSError:
                    continue
                found[capability] = path
                break
        return found

    try:
        found: dict[str, str] = look_below(root, look)
    except (OSError, OcigpuError):
        return {}
    return found


def describe_users(users: dict[str, str], env: Collection[object]) -> str:
    """Return a sentence on what an image could want of the driver; "" where it wants nothing more.

    ``env``: the container's variables, as NAME=VALUE.
    """
    if not users:
        return ""
    files = " and ".join(f"{path}, which uses driver files for {capability}" for capability, path in users.items())
    said = [text for text in env if isinstance(text, str) and text.startswith(f"{VARIABLE}=")]
    why = "does not ask for them" if said else "is not set"
    return (
        f"the image has {files}: {VARIABLE} {why}, so the container has none (NVIDIA's default mode gives all"
        f" unasked); {VARIABLE}=all gives them"
    )
