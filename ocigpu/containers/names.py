"""Which engine made a container, and the name that it has there: by its bundle, and by files of the engine.

Names are to show and to choose by; nothing else follows from them.
"""

import os
from itertools import pairwise
from typing import Any

from ocigpu.containers.trusted import read_trusted
from ocigpu.core.config_json import get_list, get_object, parse_json
from ocigpu.core.errors import SpecError
from ocigpu.system.proc import read_stat

MAX_ENGINE_FILE = 32 << 20
"""Bytes read of a file of an engine: Podman lists all its containers in one."""


def find_name(engine: str, identity: str, pid: int, bundle: str, config: dict[str, Any]) -> str:
    """Return the engine's name for a container, "" when it has none; ``pid``: its first process, or 0."""
    if engine == "docker":
        return _docker_name(identity, get_list(config, "mounts"))
    if engine == "podman":
        return _conmon_name(identity, pid) or _podman_name(identity, bundle)
    return _annotated_name(read_annotations(config))


def read_annotations(config: dict[str, Any]) -> dict[str, str]:
    """Return the annotations of a config.json that are text."""
    pairs = get_object(config, "annotations").items()
    return {name: value for name, value in pairs if isinstance(value, str)}


def find_engine(bundle: str, annotations: dict[str, str]) -> str:
    """Return the engine that made a bundle, by where it lies and by annotations that engines put there."""
    parts = bundle.split("/")
    for number, part in enumerate(parts):
        if part.startswith("io.containerd.runtime.") and len(parts) > number + 1:
            return "docker" if parts[number + 1] in ("moby", "plugins.moby") else "containerd"
    manager = annotations.get("io.container.manager", "")
    if manager == "libpod" or "io.podman.annotations.autoremove" in annotations:
        return "podman"
    if manager == "cri-o" or "io.kubernetes.cri-o.ContainerID" in annotations:
        return "cri-o"
    return "podman" if bundle.endswith("/userdata") and "overlay-containers" in parts else ""


def _annotated_name(annotations: dict[str, str]) -> str:
    parts = [annotations.get(f"io.kubernetes.cri.{name}", "") for name in _CRI_NAMES]
    if not any(parts):
        parts = [annotations.get(f"io.kubernetes.{name}", "") for name in _KUBELET_NAMES]
    return "/".join(part for part in parts if part) or annotations.get("nerdctl/name", "")


_CRI_NAMES = ("sandbox-namespace", "sandbox-name", "container-name")
"""Annotations of containerd's CRI (pkg/cri/annotations)."""
_KUBELET_NAMES = ("pod.namespace", "pod.name", "container.name")
"""Labels of the kubelet that CRI-O makes annotations of."""


def is_of_pod(config: dict[str, Any]) -> bool:
    """Tell whether a container is of a pod of Kubernetes, by annotations of containerd's CRI and of CRI-O."""
    return any(
        f"io.kubernetes.{name}" in read_annotations(config) for name in ("cri.sandbox-id", "pod.uid", "pod.name")
    )


def docker_directory(identity: str, mounts: list[Any]) -> str:
    """Return the directory of Docker's own files on a container, "" if it cannot be told.

    Its /etc/hostname (or that of the container whose network it shares) is mounted from DATA-ROOT/containers/ID.
    """
    for mount in mounts:
        source = mount.get("source") if isinstance(mount, dict) else None
        directory, found, rest = source.rpartition("/containers/") if isinstance(source, str) else ("", "", "")
        file = rest.partition("/")[2]
        if found and file in ("hostname", "hosts", "resolv.conf") and mount.get("destination") == f"/etc/{file}":
            return f"{directory}/containers/{identity}"
    return ""


def _docker_name(identity: str, mounts: list[Any]) -> str:
    name = read_engine_file(f"{docker_directory(identity, mounts)}/config.v2.json").get("Name")
    return name.lstrip("/") if isinstance(name, str) else ""


def _conmon_name(identity: str, pid: int) -> str:
    """Return the name that conmon, the parent of a container's first process, was given (conmon(8), --name, --cid)."""
    try:
        words = read_text(f"/proc/{read_stat(f'/proc/{pid}/stat').parent}/cmdline").split("\0") if pid else []
    except OSError:  # it is not there any more
        words = []
    options = dict(pairwise(words))
    if os.path.basename(words[0] if words else "") != "conmon" or options.get("-c") != identity:
        return ""
    return options.get("-n", "")


def _podman_name(identity: str, bundle: str) -> str:
    """Return the name in the list of containers of Podman's storage, which the bundle lies in: NAME/userdata."""
    listed = read_engine_file(f"{os.path.dirname(os.path.dirname(bundle))}/containers.json", "containers")
    for entry in get_list(listed, "containers"):
        names = get_list(entry, "names")
        if isinstance(entry, dict) and entry.get("id") == identity and names and isinstance(names[0], str):
            return names[0]
    return ""


def read_engine_file(path: str, name: str = "") -> dict[str, Any]:
    """Return the JSON object of an engine's file (or the list in it, under ``name``); empty when it cannot be read."""
    try:
        text = read_trusted(path, MAX_ENGINE_FILE).text
        return parse_json(b'{"%s":%s}' % (name.encode(), text) if name else text, path)
    except SpecError:  # only a name to show is lost
        return {}


def read_text(path: str) -> str:
    """Return what a small file of procfs or cgroupfs says, "" when it is not there any more."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read(4 << 20)
    except OSError:
        return ""
