"""The Kubernetes objects of a container: pure, so the same container always yields the same objects.

Their names derive from its id, so a retry after a crash finds the existing ones.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ocigpu.kubernetes.cluster.names import TENANCY_LABEL, namespace_name
from ocigpu.kubernetes.cluster.quantity import parse_quantity

ID_LABEL, MANAGED_LABEL = "ocigpu.io/container", "app.kubernetes.io/managed-by"
MANAGER = "ocigpu-caas"
MAIN = "main"
"""The name of the container in its pod."""
PULL = "-pull"
"""After the name of a container, that of the object with who pulls its image."""
DOCKER_CONFIG = ".dockerconfigjson"
"""The same among the values of secrets: no variable is called so."""
GRACE = 30
_UNITS = (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10), ("", 1))


class PodOptions(NamedTuple):
    """The operator's options for all containers.

    ``exports``: of NFS, "SERVER:/PATH" with {tenancy} where its name stands; ``pull_policy``: a node has images that
    other tenants pulled with their credentials; unless the policy is Always, tenants without credentials can run them.
    """

    runtime_class: str = "kata-qemu-nvidia-gpu"
    resource: str = "nvidia.com/gpu"
    cpus_per_gpu: int = 0
    memory_per_gpu: str = ""
    exports: tuple[str, ...] = ()
    pull_policy: str = "Always"


class ContainerPlan(NamedTuple):
    """An accepted container; ``request``: the request, with secrets by name."""

    id: str
    tenancy: str
    request: Mapping[str, Any]


def object_name(container: str) -> str:
    """Return the name of a container's objects: "ctr_01ab" is "ctr-01ab"."""
    return container.replace("_", "-")


def plan_secrets(plan: ContainerPlan, values: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the objects for a container's secret variables and for the credentials that pull its image."""
    found = []
    variables = {name: value for name, value in values.items() if name != DOCKER_CONFIG}
    if plan.request["secrets"]:
        found.append({**_head("v1", "Secret", plan), "type": "Opaque", "stringData": variables})
    if plan.request.get("has_pull_credentials"):
        config = {DOCKER_CONFIG: values.get(DOCKER_CONFIG, "")}
        found.append(
            {**_head("v1", "Secret", plan, PULL), "type": "kubernetes.io/dockerconfigjson", "stringData": config}
        )
    return [{**one, "immutable": True} for one in found]


def make_docker_config(registry: str, username: str, password: str) -> str:
    """Return the credentials of a registry as the kubelet reads them ("Pull an Image from a Private Registry").

    Docker Hub's are known by its former address.
    """
    host = "https://index.docker.io/v1/" if registry == "docker.io" else registry
    auth = base64.b64encode(f"{username}:{password}".encode()).decode()
    return json.dumps({"auths": {host: {"username": username, "password": password, "auth": auth}}})


def find_export(server: str, path: str, tenancy: str, exports: Sequence[str]) -> tuple[str, str] | None:
    """Return the directory that the node mounts, and its part for the container; None: not a tenancy's.

    The node mounts only the directory that the operator named.  The tenant controls everything below it, and may make a
    link to a directory of another tenancy on the same server, which mounting would follow.  The kubelet follows no link
    out of a volume.
    """
    place = f"{server}:{path.rstrip('/')}/"
    for export in exports:
        root = export.replace("{tenancy}", tenancy).rstrip("/")
        if place.startswith(f"{root}/"):
            return root.partition(":")[2] or "/", place[len(root) :].strip("/")
    return None


def plan_volumes(plan: ContainerPlan, options: PodOptions) -> list[dict[str, Any]]:
    """Return volumes and claims of the mounts, pinned to each other.

    A volume written into the pod could not have mount options; the node mounts it, so its set-id programs and device
    files would be the node's affair.
    """
    found: list[dict[str, Any]] = []
    for number, mount in enumerate(plan.request["mounts"]):
        mode = "ReadOnlyMany" if mount["read_only"] else "ReadWriteMany"
        volume, claim = (
            _head("v1", kind, plan, f"-{number}") for kind in ("PersistentVolume", "PersistentVolumeClaim")
        )
        name = volume["metadata"]["name"]
        del volume["metadata"]["namespace"]
        path, _ = find_export(mount["server"], mount["path"], plan.tenancy, options.exports) or (mount["path"], "")
        common = {"accessModes": [mode], "storageClassName": "", "volumeMode": "Filesystem"}
        volume["spec"] = {
            **common,
            "capacity": {"storage": "1Gi"},  # must be given, means nothing to NFS
            "persistentVolumeReclaimPolicy": "Retain",
            "mountOptions": ["nosuid", "nodev", *(["ro"] if mount["read_only"] else [])],
            "claimRef": {
                "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace_name(plan.tenancy),
                "name": name,
            },
            "nfs": {"server": mount["server"], "path": path, "readOnly": mount["read_only"]},
        }  # fmt: skip
        claim["spec"] = {**common, "volumeName": name, "resources": {"requests": {"storage": "1Gi"}}}
        found += [volume, claim]
    return found


def plan_limits(request: Mapping[str, Any], options: PodOptions, spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the limits of a container, by which its VM is sized.

    Processors and memory come from the request, else from the operator's values for each GPU, else from the tenancy.
    The tenancy's ``spec`` gives the values for one GPU, and the total stays within its quota.
    """
    gpus = request["gpus"]
    limits = {options.resource: str(gpus)}
    for name, asked, each in (
        ("cpu", request.get("cpus"), str(options.cpus_per_gpu or "")),
        ("memory", request.get("memory"), options.memory_per_gpu),
    ):
        if asked:
            limits[name] = str(asked)
        elif each:
            digits = each.rstrip("KMGTi")
            limits[name] = f"{int(digits) * gpus}{each[len(digits) :]}"
        elif spec and gpus > 1:  # one GPU: the namespace's LimitRange applies
            limits[name] = _grow(spec["container"][name], gpus, spec["quota"][name])
    return limits


def _grow(each: Any, count: int, most: Any) -> str:
    """Return a multiple of a quantity, at most another one less an eighth: the machine's overhead counts, too."""
    one, limit = parse_quantity(each), parse_quantity(most)
    if one is None or limit is None:
        return str(each)
    total = min(one * count, max(limit * 7 / 8, one))
    for unit, size in _UNITS:
        if total % size == 0:
            return f"{int(total / size)}{unit}"
    return f"{int(total * 1000)}m"


def plan_pod(
    plan: ContainerPlan, options: PodOptions, tenancy: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the pod of a container: one VM (Kata), with all of its GPUs in one container.  ``tenancy``: its spec."""
    request = plan.request
    name = object_name(plan.id)
    env: list[dict[str, Any]] = [
        {"name": key, "value": _literal(value)} for key, value in sorted(request["env"].items())
    ]
    env += [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} for key in sorted(request["secrets"])
    ]
    container: dict[str, Any] = {
        "name": MAIN,
        "image": request["image"],
        "imagePullPolicy": options.pull_policy,
        "resources": {"limits": plan_limits(request, options, tenancy)},
        "securityContext": {"allowPrivilegeEscalation": False, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    optional = {
        "command": [_literal(word) for word in request["command"]],
        "args": [_literal(word) for word in request["args"]],
        "env": env,
        "volumeMounts": [
            _plan_mount(number, mount, plan.tenancy, options) for number, mount in enumerate(request["mounts"])
        ],
    }
    container |= {key: value for key, value in optional.items() if value}
    spec: dict[str, Any] = {
        "runtimeClassName": options.runtime_class,
        "restartPolicy": "OnFailure" if request["restart"] == "on-failure" else "Never",
        "activeDeadlineSeconds": request["timeout_seconds"],
        "terminationGracePeriodSeconds": GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
    }
    if request.get("has_pull_credentials"):
        spec["imagePullSecrets"] = [{"name": f"{name}{PULL}"}]
    if request["mounts"]:
        spec["volumes"] = [
            {"name": f"mount-{number}", "persistentVolumeClaim": {"claimName": f"{name}-{number}"}}
            for number in range(len(request["mounts"]))
        ]
    return {**_head("v1", "Pod", plan), "spec": spec}


def _plan_mount(number: int, mount: Mapping[str, Any], tenancy: str, options: PodOptions) -> dict[str, Any]:
    _, below = find_export(mount["server"], mount["path"], tenancy, options.exports) or ("", "")
    found = {"name": f"mount-{number}", "mountPath": mount["target"], "readOnly": mount["read_only"]}
    return found | ({"subPath": below} if below else {})


def size_of(texts: Iterable[str]) -> int:
    """Return the bytes that texts take in a pod."""
    return sum(len(json.dumps(_literal(text))) for text in texts)


def _literal(text: str) -> str:
    """Keep a text literal: Kubernetes would replace $(NAME) by a variable, and $$ by $."""
    return text.replace("$", "$$")


def _head(version: str, kind: str, plan: ContainerPlan, suffix: str = "") -> dict[str, Any]:
    labels = {ID_LABEL: plan.id, TENANCY_LABEL: plan.tenancy, MANAGED_LABEL: MANAGER}
    name = object_name(plan.id) + suffix
    metadata = {"name": name, "namespace": namespace_name(plan.tenancy), "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
