"""The Kubernetes objects of a container: pure, and the same container gives the same objects.

Their names come of its id, so whoever makes them again after a crash meets those that are there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ID_LABEL, TENANCY_LABEL, MANAGED_LABEL = "ocigpu.io/container", "ocigpu.io/tenancy", "app.kubernetes.io/managed-by"
MANAGER = "ocigpu-caas"
MAIN = "main"
"""The name of the container in its pod."""
GRACE = 30


class PodOptions(NamedTuple):
    """What the operator decides for every container."""

    runtime_class: str = "kata-qemu-nvidia-gpu"
    resource: str = "nvidia.com/gpu"
    cpus_per_gpu: int = 0
    memory_per_gpu: str = ""


class NfsVolume(NamedTuple):
    """An export and where it goes."""

    server: str
    path: str
    target: str
    read_only: bool


class ContainerPlan(NamedTuple):
    """A container that was accepted.  ``secrets``: values by variable, () once they are in the cluster."""

    id: str
    tenancy: str
    image: str
    gpus: int
    command: Sequence[str]
    args: Sequence[str]
    env: Mapping[str, str]
    secret_names: Sequence[str]
    mounts: Sequence[NfsVolume]
    timeout_seconds: int
    restart: str


def object_name(container: str) -> str:
    """Return the name of a container's objects: "ctr_01ab" is "ctr-01ab"."""
    return container.replace("_", "-")


def namespace_of(tenancy: str) -> str:
    """Return the namespace of a tenancy."""
    return f"tenant-{tenancy}"


def plan_secret(plan: ContainerPlan, values: Mapping[str, str]) -> dict[str, Any]:
    """Return the object that holds a container's secret variables."""
    return {**_head("v1", "Secret", plan), "immutable": True, "type": "Opaque", "stringData": dict(values)}


def plan_volumes(plan: ContainerPlan) -> list[dict[str, Any]]:
    """Return volumes and claims of the mounts, pinned to each other.

    A volume written into the pod could not have mount options; the node mounts it, so its set-id programs and device
    files would be the node's affair.
    """
    found: list[dict[str, Any]] = []
    for number, mount in enumerate(plan.mounts):
        mode = "ReadOnlyMany" if mount.read_only else "ReadWriteMany"
        volume, claim = (
            _head("v1", kind, plan, f"-{number}") for kind in ("PersistentVolume", "PersistentVolumeClaim")
        )
        name = volume["metadata"]["name"]
        del volume["metadata"]["namespace"]
        common = {"accessModes": [mode], "storageClassName": "", "volumeMode": "Filesystem"}
        volume["spec"] = {
            **common,
            "capacity": {"storage": "1Gi"},  # must be given, means nothing to NFS
            "persistentVolumeReclaimPolicy": "Retain",
            "mountOptions": ["nosuid", "nodev", *(["ro"] if mount.read_only else [])],
            "claimRef": {
                "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace_of(plan.tenancy),
                "name": name,
            },
            "nfs": {"server": mount.server, "path": mount.path, "readOnly": mount.read_only},
        }  # fmt: skip
        claim["spec"] = {**common, "volumeName": name, "resources": {"requests": {"storage": "1Gi"}}}
        found += [volume, claim]
    return found


def plan_pod(plan: ContainerPlan, options: PodOptions) -> dict[str, Any]:
    """Return the pod of a container: one VM (Kata), with all of its GPUs in one container."""
    limits = {options.resource: str(plan.gpus)}
    if options.cpus_per_gpu:
        limits["cpu"] = str(options.cpus_per_gpu * plan.gpus)
    if options.memory_per_gpu:
        digits = options.memory_per_gpu.rstrip("KMGTi")
        limits["memory"] = f"{int(digits) * plan.gpus}{options.memory_per_gpu[len(digits) :]}"
    name = object_name(plan.id)
    env: list[dict[str, Any]] = [{"name": key, "value": _literal(value)} for key, value in sorted(plan.env.items())]
    env += [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} for key in sorted(plan.secret_names)
    ]
    container: dict[str, Any] = {
        "name": MAIN,
        "image": plan.image,
        "resources": {"limits": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    optional = {
        "command": [_literal(word) for word in plan.command],
        "args": [_literal(word) for word in plan.args],
        "env": env,
        "volumeMounts": [
            {"name": f"mount-{number}", "mountPath": mount.target, "readOnly": mount.read_only}
            for number, mount in enumerate(plan.mounts)
        ],
    }
    container |= {key: value for key, value in optional.items() if value}
    spec: dict[str, Any] = {
        "runtimeClassName": options.runtime_class,
        "restartPolicy": "OnFailure" if plan.restart == "on-failure" else "Never",
        "activeDeadlineSeconds": plan.timeout_seconds,
        "terminationGracePeriodSeconds": GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
    }
    if plan.mounts:
        spec["volumes"] = [
            {"name": f"mount-{number}", "persistentVolumeClaim": {"claimName": f"{name}-{number}"}}
            for number in range(len(plan.mounts))
        ]
    return {**_head("v1", "Pod", plan), "spec": spec}


def _literal(text: str) -> str:
    """Keep what is given: Kubernetes would put variables in the place of $(NAME), and $ for $$."""
    return text.replace("$", "$$")


def _head(version: str, kind: str, plan: ContainerPlan, suffix: str = "") -> dict[str, Any]:
    labels = {ID_LABEL: plan.id, TENANCY_LABEL: plan.tenancy, MANAGED_LABEL: MANAGER}
    name = object_name(plan.id) + suffix
    metadata = {"name": name, "namespace": namespace_of(plan.tenancy), "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
