"""Where the labels of a node are put: a file of node feature discovery, its NodeFeature resource, or the node itself.

A NodeFeature belongs to the DaemonSet of our pod, not to the pod: it outlives a restart and is removed with the
DaemonSet.  Rights of the service account: pods get and nodefeatures patch, create (with removal: delete) in its own
namespace; for the node itself nodes patch, which Kubernetes cannot narrow to one node.
"""

import os
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

from ocigpu.cdi.write import write_file
from ocigpu.core.errors import HostError, SettingsError
from ocigpu.kubernetes.api_server import ApiServer, apply, apply_to_node, find_api_server, read_namespace, request
from ocigpu.kubernetes.config import PluginOptions
from ocigpu.kubernetes.labels import render_features

TARGETS = ("node-feature", "node", "file")
FEATURE_API = "nfd.k8s-sigs.io/v1alpha1"
FEATURE_NODE = "nfd.node.kubernetes.io/node-name"


_STAGING = ".ocigpu"
"""Directory beside the file: node feature discovery reads every file of features.d, also one half written."""


class LabelPlace(NamedTuple):
    """Where labels go: ``target`` is one of :data:`TARGETS`, ``path`` that of the file; the rest is for the others."""

    target: str
    path: str = ""
    server: ApiServer | None = None
    node: str = ""
    namespace: str = ""
    owner: "dict[str, Any]" = {}

    def __str__(self) -> str:
        if self.target == "file":
            return self.path
        feature = f"NodeFeature {self.namespace}/{feature_name(self.node)}"
        return feature if self.target == "node-feature" else f"node {self.node}"


def feature_name(node: str) -> str:
    """Return the name of the NodeFeature of a node, that of NVIDIA's program."""
    return f"nvidia-features-for-{node}"


def find_place(
    options: PluginOptions, target: str, environment: Mapping[str, str], server: ApiServer | None = None
) -> LabelPlace:
    """Return where labels go; ``target`` "": a NodeFeature in a pod with useNodeFeatureAPI set, else a file.

    Asks the API server who owns our pod.  Raises SettingsError (OCIGPU-KUBE-1) when something needed is not in the
    environment, HostError (OCIGPU-KUBE-5).
    """
    server = server or find_api_server(environment)
    node = environment.get("NODE_NAME", "")
    if not target:
        target = "node-feature" if options.use_node_feature_api and server and node else "file"
    if target == "file":
        if not options.output_file:
            raise SettingsError("OCIGPU-KUBE-1", "labels: no output file", "Set --output-file.")
        return LabelPlace("file", options.output_file)
    if server is None:
        raise SettingsError(
            "OCIGPU-KUBE-1",
            f"labels: {target} needs the API server, and this is not a pod with a service account",
            "Write a file instead: --publish file",
        )
    if not node:
        raise SettingsError("OCIGPU-KUBE-1", "labels: NODE_NAME is not set", "Set it from the field spec.nodeName.")
    if target == "node":
        return LabelPlace("node", server=server, node=node)
    namespace = environment.get("POD_NAMESPACE") or environment.get("NAMESPACE") or read_namespace(server)
    owner = _find_owner(server, namespace, environment.get("POD_NAME", ""))
    return LabelPlace("node-feature", server=server, node=node, namespace=namespace, owner=owner)


def publish(place: LabelPlace, labels: Mapping[str, str]) -> None:
    """Put the labels where they belong, in place of those that were put there before; raises HostError."""
    if place.target == "file":
        write_features(place.path, render_features(labels))
        return
    assert place.server is not None
    if place.target == "node":
        answer = apply_to_node(place.server, place.node, {"labels": dict(labels)})
        missing = f"no node {place.node}"
    else:
        answer = apply(place.server, _feature_path(place), _feature(place, labels))
        missing = f"no resource type NodeFeature ({FEATURE_API}): is node feature discovery 0.14 or later installed?"
    if answer.status == 404:
        raise HostError("OCIGPU-KUBE-5", f"labels of {place}: the API server has {missing}")


def withdraw(place: LabelPlace) -> None:
    """Remove the labels; those that are not there are no error.  Raises HostError."""
    if place.target == "file":
        remove_features(place.path)
    elif place.target == "node":
        publish(place, {})
    elif place.server is not None:
        request(place.server, "DELETE", _feature_path(place))


def _feature_path(place: LabelPlace) -> str:
    return f"/apis/{FEATURE_API}/namespaces/{place.namespace}/nodefeatures/{feature_name(place.node)}"


def _feature(place: LabelPlace, labels: Mapping[str, str]) -> "dict[str, Any]":
    name, node = feature_name(place.node), {FEATURE_NODE: place.node}
    owners = {"ownerReferences": [place.owner]} if place.owner else {}
    metadata = {"name": name, "namespace": place.namespace, "labels": node, **owners}
    features: dict[str, Any] = {"flags": {}, "attributes": {}, "instances": {}}
    spec = {"features": features, "labels": dict(labels)}
    return {"apiVersion": FEATURE_API, "kind": "NodeFeature", "metadata": metadata, "spec": spec}


def _find_owner(server: ApiServer, namespace: str, pod: str) -> "dict[str, Any]":
    """Return the reference to the controller of a pod, {} without one."""
    if not pod:
        return {}
    answer = request(server, "GET", f"/api/v1/namespaces/{namespace}/pods/{pod}")
    references = answer.body.get("metadata", {}).get("ownerReferences") or []
    fields = ("apiVersion", "kind", "name", "uid")
    controllers = ({name: each[name] for name in fields} for each in references if each.get("controller"))
    return next(controllers, {})


def write_features(path: str, text: str) -> None:
    """Write a file of features.d, mode 0644, or leave what was there; missing directories are made.

    Raises HostError (OCIGPU-HOST-3) when it cannot be written.
    """
    directory, name = os.path.split(path)
    staging = os.path.join(directory, _STAGING)
    try:
        write_file(os.path.join(staging, name), text.encode())
        os.replace(os.path.join(staging, name), path)
        os.rmdir(staging)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise HostError("OCIGPU-HOST-3", f"write {path}: {error.strerror}", "") from error


def remove_features(path: str) -> None:
    """Remove the file of features.d; one that is not there is no error."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise HostError("OCIGPU-HOST-3", f"remove {path}: {error.strerror}", "") from error
