"""The objects of a ComputeDomain: what its manifest means, and what the controller makes for it.  Pure.

Kind, fields, names of labels, device classes and claim parameters are those of NVIDIA's driver
(api/nvidia.com/resource/v1beta1, templates/ and cmd/compute-domain-controller of kubernetes-sigs/dra-driver-nvidia-gpu
0.5), so manifests for it apply unchanged.
"""

from typing import Any, NamedTuple

from ocigpu.kubernetes.cluster.owners import DOMAIN_DRIVER
from ocigpu.kubernetes.domains.imex import DIRECTORY, MAX_NODES
from ocigpu.kubernetes.dra.configs import API_VERSION, CHANNEL_CONFIG, DAEMON_CONFIG

Document = dict[str, Any]
DOMAIN_LABEL = "resource.nvidia.com/computeDomain"
"""A domain's uid: on its objects, its daemons' pods, its claims, and on the nodes that are to run a daemon of it."""
CLIQUE_LABEL = "resource.nvidia.com/computeDomain.cliqueID"
TARGET_LABEL = "resource.nvidia.com/computeDomainTarget"
FINALIZER = DOMAIN_LABEL
CHANNEL_CLASS = "compute-domain-default-channel.nvidia.com"
DAEMON_CLASS = "compute-domain-daemon.nvidia.com"
CLAIMS = "resource.k8s.io/v1"
CONTAINER = "compute-domain-daemon"
READY, NOT_READY = "Ready", "NotReady"


class DaemonOptions(NamedTuple):
    """How daemons run.  ``namespace``: theirs, the controller's own; ``secrets``: names, to pull the image."""

    namespace: str
    image: str
    account: str = ""
    secrets: tuple[str, ...] = ()
    most: int = MAX_NODES


def uid_of(document: Document) -> str:
    return str(document["metadata"]["uid"])


def domain_of(document: Document) -> str:
    """Return the uid of the domain that an object says it belongs to, "" for none."""
    return str((document["metadata"].get("labels") or {}).get(DOMAIN_LABEL) or "")


def daemon_name(uid: str) -> str:
    """Return the name of a domain's DaemonSet, claim template and network policy in the daemons' namespace."""
    return f"computedomain-daemon-{uid}"


def clique_name(uid: str, clique: str) -> str:
    return f"{uid}.{clique}"


def template_name(domain: Document) -> str:
    """Return the name that the domain's manifest wants for the template of its pods' claims, "" for none."""
    channel = (domain.get("spec") or {}).get("channel") or {}
    return str((channel.get("resourceClaimTemplate") or {}).get("name") or "")


def workload_template(domain: Document) -> Document:
    """Return the template of claims for channels, for the pods of the domain; it ends with the domain."""
    uid, metadata = uid_of(domain), domain["metadata"]
    mode = domain["spec"]["channel"].get("allocationMode") or "Single"
    parameters = {"apiVersion": API_VERSION, "kind": CHANNEL_CONFIG, "domainID": uid, "allocationMode": mode}
    template = _template(template_name(domain), metadata["namespace"], uid, "Workload")
    owner = {"apiVersion": API_VERSION, "kind": "ComputeDomain", "name": metadata["name"], "uid": uid}
    template["metadata"]["ownerReferences"] = [owner]
    # claims have the labels of the template: the controller finds them by it
    template["spec"] = {"metadata": {"labels": {DOMAIN_LABEL: uid}}, **_claim("channel", CHANNEL_CLASS, parameters)}
    return template


def daemon_template(domain: Document, options: DaemonOptions) -> Document:
    """Return the template of the daemons' claims."""
    uid = uid_of(domain)
    template = _template(daemon_name(uid), options.namespace, uid, "Daemon")
    parameters = {"apiVersion": API_VERSION, "kind": DAEMON_CONFIG, "domainID": uid}
    template["spec"] = _claim("daemon", DAEMON_CLASS, parameters)
    return template


def _template(name: str, namespace: str, uid: str, target: str) -> Document:
    labels = {DOMAIN_LABEL: uid, TARGET_LABEL: target}
    head = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": CLAIMS, "kind": "ResourceClaimTemplate", "metadata": head}


def _claim(request: str, device_class: str, parameters: Document) -> Document:
    config = {"requests": [request], "opaque": {"driver": DOMAIN_DRIVER, "parameters": parameters}}
    requests = [{"name": request, "exactly": {"deviceClassName": device_class}}]
    return {"spec": {"devices": {"requests": requests, "config": [config]}}}


def daemon_set(domain: Document, options: DaemonOptions) -> Document:
    """Return the DaemonSet that runs an IMEX daemon on each node with the domain's label.

    Its pods have no rights but to read cliques, and of the host only what their claim brings.
    """
    uid = uid_of(domain)
    labels = {DOMAIN_LABEL: uid}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": daemon_name(uid), "namespace": options.namespace, "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _pod(uid, options)},
        },
    }


def _pod(uid: str, options: DaemonOptions) -> Document:
    fields = {"NODE_NAME": "spec.nodeName", "POD_IP": "status.podIP", "POD_NAMESPACE": "metadata.namespace"}
    env: list[Document] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    check = {"exec": {"command": ["ocigpu", "compute-domain", "check"]}, "timeoutSeconds": 10}
    container = {
        "name": CONTAINER,
        "image": options.image,
        "args": ["compute-domain", "daemon", f"--max-nodes={options.most}"],
        # the container runtime gives it what its claim says, not what variables ask for
        "env": [*env, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}],
        "resources": {"claims": [{"name": CONTAINER}]},
        "startupProbe": {**check, "periodSeconds": 1, "failureThreshold": 1200},
        "readinessProbe": {**check, "periodSeconds": 5, "failureThreshold": 1},
        "livenessProbe": {**check, "periodSeconds": 60, "failureThreshold": 20},
        "securityContext": {
            # root, which may open the device of the capability fabric-imex-mgmt, and write the pod's /etc/hosts
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": "imexd", "mountPath": DIRECTORY}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    small = {"medium": "Memory", "sizeLimit": "16Mi"}
    return {
        **({"serviceAccountName": options.account} if options.account else {}),
        "automountServiceAccountToken": True,
        **({"imagePullSecrets": [{"name": name} for name in options.secrets]} if options.secrets else {}),
        "nodeSelector": {DOMAIN_LABEL: uid},
        # it runs wherever a pod of the domain does
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 30,
        "resourceClaims": [{"name": CONTAINER, "resourceClaimTemplateName": daemon_name(uid)}],
        "containers": [container],
        "volumes": [{"name": "imexd", "emptyDir": small}, {"name": "tmp", "emptyDir": small}],
    }


def network_policy(domain: Document, options: DaemonOptions) -> Document:
    """Return the policy by which only daemons of the domain reach its daemons: IMEX connections have no password."""
    uid = uid_of(domain)
    own = {"podSelector": {"matchLabels": {DOMAIN_LABEL: uid}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": daemon_name(uid), "namespace": options.namespace, "labels": {DOMAIN_LABEL: uid}},
        "spec": {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]},
    }


def clique_object(uid: str, clique: str, namespace: str) -> Document:
    """Return the object that tells a clique's daemons of each other, without members."""
    labels = {DOMAIN_LABEL: uid, CLIQUE_LABEL: clique}
    head = {"name": clique_name(uid, clique), "namespace": namespace, "labels": labels}
    return {"apiVersion": API_VERSION, "kind": "ComputeDomainClique", "metadata": head, "daemons": []}
