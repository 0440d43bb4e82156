"""Who asked for a container's GPUs: its image, the command that started it, or its engine; as far as that can be told.

A config.json has the variables of image and command line together.  Docker keeps both apart in its own files.
"""

from typing import Any

from ocigpu.containers.believed import Container, read_engine_file
from ocigpu.containers.find import docker_directory
from ocigpu.core.config_json import get_list, get_object
from ocigpu.core.tokens import MOUNT_SOURCE
from ocigpu.gpus.nvidia.request import DEVICES_VARIABLE, Request

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
