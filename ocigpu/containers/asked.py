"""The origin of a container's GPU request, as far as it is known, and the GPU libraries its image could use.

A config.json merges the variables of image and command line; Docker's own files keep them apart.  NVIDIA's default mode
also provides driver files that an image can use but does not request.
"""

import hashlib
import os
from collections.abc import Collection
from typing import Any

from ocigpu.containers.believed import MAX_ENGINE_FILE, Container, read_engine_file
from ocigpu.containers.child import look_below
from ocigpu.containers.find import docker_directory
from ocigpu.core.config_json import get_list, get_object, parse_json
from ocigpu.core.errors import OcigpuError, SpecError
from ocigpu.core.tokens import MOUNT_SOURCE
from ocigpu.gpus.nvidia.request import CAPABILITIES_VARIABLE, DEVICES_VARIABLE
from ocigpu.gpus.request import Request
from ocigpu.system.files import read_regular
from ocigpu.system.paths import open_in_root

UNKNOWN = {
    "containerd": "the image, or whoever started it (a pod, the device plugin): config.json does not show which",
    "podman": "the image, or podman run --env: config.json does not show which",
    "": "config.json does not show whether an image or a command line set the variable",
}


def tell_origin(request: Request, config: dict[str, Any], container: Container | None) -> str:
    """Return the origin of the request, as text; "" for a container that requests nothing."""
    if not request.source:
        return ""
    if request.source == MOUNT_SOURCE:
        return "mounts of /dev/null in its configuration, as Kubernetes' device plugin makes them"
    if request.source.startswith("annotation "):
        return "an annotation: its image, its pod or its engine: config.json does not show which"
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
        options = tell_docker_options(config, container)
        return options or "Docker itself: the variable is neither the image's nor given to it"
    content = _image_of(directory.rpartition("/containers/")[0], about)
    if not content:
        return "its image, or docker run --env: the image's own configuration cannot be read"
    own = _value(get_list(get_object(content, "config"), "Env"), variable)
    if own == given:
        return "its image"
    return "docker run --env" if own is None else f"docker run --env, over {variable}={own} of its image"


def tell_docker_options(config: dict[str, Any], container: Container) -> str:
    """Return the options of docker run that name devices of a container, "" for none.

    Docker 25 and later keep CDI devices of --device as a request for the driver "cdi" (moby, opts.GpuOpts and
    daemon/cdi.go); --gpus names capabilities and no driver.
    """
    directory = docker_directory(container.id, get_list(config, "mounts"))
    requests = get_list(read_engine_file(f"{directory}/hostconfig.json"), "DeviceRequests")
    told = [one for one in requests if isinstance(one, dict)]
    names = [name for one in told if one.get("Driver") == "cdi" for name in get_list(one, "DeviceIDs")]
    options = [f"--device {name}" for name in names if isinstance(name, str)]
    if any(one.get("Driver") != "cdi" for one in told):
        options.insert(0, "--gpus")
    return f"docker run {' '.join(options)}" if options else ""


def _image_of(data_root: str, about: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a Docker container's image (OCI image-spec, config.md), empty if it is not found.

    It is in Docker's own image store; with containerd's store, the default since Docker 29, the image's digest names an
    index or manifest among containerd's blobs, whose file names are digests.
    """
    digest = _digest(about.get("Image"))
    own = read_engine_file(f"{data_root}/image/{about.get('Driver')}/imagedb/content/sha256/{digest}") if digest else {}
    if own:
        return own
    digest = _digest(get_object(about, "ImageManifest").get("digest")) or digest
    for _ in range(3):  # an index, a manifest, the configuration
        blob = _read_blob(data_root, digest)
        if "manifests" in blob:
            entries = [entry for entry in get_list(blob, "manifests") if isinstance(entry, dict)]
            mine = [one for one in entries if get_object(one, "platform").get("architecture") == _architecture()]
            digest = _digest((mine or entries or [{}])[0].get("digest"))
        elif "layers" in blob:
            digest = _digest(get_object(blob, "config").get("digest"))
        else:
            return blob
    return {}


def _digest(text: object) -> str:
    """Return the hexadecimal part of a digest, "" for anything else."""
    value = text.removeprefix("sha256:") if isinstance(text, str) else ""
    return value if len(value) == 64 and value.isalnum() and value.isascii() else ""


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)


def _read_blob(data_root: str, digest: str) -> dict[str, Any]:
    """Return the JSON object with this digest in the content store of dockerd's containerd or the system's.

    Images write there: only what has the digest is believed.
    """
    for store in (f"{data_root}/containerd/daemon", "/var/lib/containerd") if digest else ():
        try:
            text = read_regular(f"{store}/io.containerd.content.v1.content/blobs/sha256/{digest}", MAX_ENGINE_FILE)
        except OSError:
            continue
        if hashlib.sha256(text).hexdigest() == digest:
            try:
                return parse_json(text, digest)
            except SpecError:
                return {}
    return {}


def _value(env: list[Any], variable: str) -> str | None:
    values = [entry.partition("=")[2] for entry in env if isinstance(entry, str) and entry.startswith(f"{variable}=")]
    return values[-1] if values else None


# what its image could use

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
    """Return a library of the image for each capability that it uses and that was not given.

    ``root``: the container's root directory.  Empty if it cannot be inspected.
    """
    try:
        found: dict[str, str] = look_below(root, lambda root_fd: look_for_users(root_fd, capabilities))
    except (OSError, OcigpuError):
        return {}
    return found


def look_for_users(root_fd: int, capabilities: Collection[str]) -> dict[str, str]:
    """Return what :func:`find_users` does; the files may be of a file system that never answers."""
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


def describe_users(users: dict[str, str], env: Collection[object]) -> str:
    """Return a sentence on driver files that an image could use but does not get; "" if it needs nothing more.

    ``env``: the container's variables, as NAME=VALUE.
    """
    if not users:
        return ""
    files = " and ".join(f"{path}, which uses driver files for {capability}" for capability, path in users.items())
    said = [text for text in env if isinstance(text, str) and text.startswith(f"{CAPABILITIES_VARIABLE}=")]
    why = "does not request them" if said else "is not set"
    return (
        f"the image has {files}: {CAPABILITIES_VARIABLE} {why}, so the container has none (NVIDIA's default mode"
        f" provides all without a request); {CAPABILITIES_VARIABLE}=all provides them"
    )
