"""What asks for GPUs in a container: who set the request, as far as that can be told, and what its image could use.

A config.json has the variables of image and command line together; Docker keeps both apart in its own files.  Driver
files that an image has users of and does not ask for, NVIDIA's default mode gives unasked.
"""

import os
from collections.abc import Collection
from typing import Any

from ocigpu.containers.believed import Container, read_engine_file
from ocigpu.containers.child import look_below
from ocigpu.containers.find import docker_directory
from ocigpu.core.config_json import get_list, get_object
from ocigpu.core.errors import OcigpuError
from ocigpu.core.tokens import MOUNT_SOURCE
from ocigpu.gpus.nvidia.request import DEVICES_VARIABLE
from ocigpu.gpus.request import Request
from ocigpu.system.paths import open_in_root

UNKNOWN = {
    "containerd": "the image, or whoever started it (a pod, the device plugin): config.json does not tell which",
    "podman": "the image, or podman run --env: config.json does not tell which",
    "": "config.json does not tell whether an image or a command line set the variable",
}


def tell_origin(request: Request, config: dict[str, Any], container: Container | None) -> str:
    """Return who asked, in words; "" for a container that asks for nothing."""
    if not request.source:
        return ""
    if request.source == MOUNT_SOURCE:
        return "mounts of /dev/null in its configuration, as Kubernetes' device plugin makes them"
    if request.source.startswith("annotation "):
        return "an annotation: its image, its pod or its engine: config.json does not tell which"
    if request.source.startswith("CUDA_VERSION="):
        return f"its image: an old one of CUDA, which means all GPUs where {DEVICES_VARIABLE} is not set"
    variable = request.source.partition("=")[0]
    engine = container.engine if container is not None else ""
    if container is not None and engine == "docker":
        return _tell_docker(variable, config, container)
    return UNKNOWN.get(engine, UNKNOWN[""])


def _tell_docker(variable: str, config: dict[str, Any], container: Container) -> str:
    directory = docker_directory(container.id, get_list(config, "mounts"))
    about = read_engine_file(f"{directory}/config.v2.json")
    given = _value(get_list(get_object(about, "Config"), "Env"), variable)
    if given is None:
        requests = get_list(read_engine_file(f"{directory}/hostconfig.json"), "DeviceRequests")
        return "docker run --gpus" if requests else "Docker itself: the variable is neither the image's nor given to it"
    image, driver = about.get("Image"), about.get("Driver")
    if not isinstance(image, str) or not image.startswith("sha256:") or not image[7:].isalnum():
        return UNKNOWN[""]
    data_root = directory.rpartition("/containers/")[0]
    place = f"{data_root}/image/{driver}/imagedb/content/sha256/{image[7:]}"
    content = read_engine_file(place)
    if not content:
        return "its image, or docker run --env: the image's own configuration cannot be read"
    own = _value(get_list(get_object(content, "config"), "Env"), variable)
    if own == given:
        return "its image"
    return "docker run --env" if own is None else f"docker run --env, over {variable}={own} of its image"


def _value(env: list[Any], variable: str) -> str | None:
    values = [entry.partition("=")[2] for entry in env if isinstance(entry, str) and entry.startswith(f"{variable}=")]
    return values[-1] if values else None


# what its image could use

CAPABILITIES_VARIABLE = "NVIDIA_DRIVER_CAPABILITIES"
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
    said = [text for text in env if isinstance(text, str) and text.startswith(f"{CAPABILITIES_VARIABLE}=")]
    why = "does not ask for them" if said else "is not set"
    return (
        f"the image has {files}: {CAPABILITIES_VARIABLE} {why}, so the container has none (NVIDIA's default mode gives"
        f" all unasked); {CAPABILITIES_VARIABLE}=all gives them"
    )
