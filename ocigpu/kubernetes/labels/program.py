"""``ocigpu node-labels``: the labels of this node, once or at intervals.

Labels stay while the driver does not answer and while the program restarts, because pods that wait for such a node need
them. (NVIDIA's program removes them whenever it ends.)

They are written to a file of node feature discovery, its NodeFeature resource, or the node itself.  A NodeFeature
belongs to the DaemonSet of our pod, not to the pod: it outlives a restart and is removed with the DaemonSet.  Rights of
the service account: pods get and nodefeatures patch, create (with removal: delete) in its own namespace; for the node
itself nodes patch, which the chart's admission policy limits to the pod's own node.
"""

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ocigpu.cdi.write import write_file
from ocigpu.core.errors import HostError, OcigpuError, OsErrorAs, SettingsError
from ocigpu.core.settings import Settings
from ocigpu.gpus.pci import NVIDIA_VENDOR, read_functions
from ocigpu.gpus.tree import find_roots, read_bytes
from ocigpu.gpus.vendors import find_vendors, load_vendor
from ocigpu.gpus.vfio.facts import GPU_CLASSES
from ocigpu.kubernetes.cluster.api_server import (
    ApiServer,
    apply,
    apply_to_node,
    find_api_server,
    read_namespace,
    request,
)
from ocigpu.kubernetes.labels.labels import (
    SPACE,
    TIMESTAMP,
    Surroundings,
    make_labels,
    make_machine_labels,
    parse_vgpu,
    render_features,
)
from ocigpu.kubernetes.node.config import CommandInput, Configuration, PluginOptions, read_configuration
from ocigpu.kubernetes.node.reading import KubernetesNode, host_settings, read_node
from ocigpu.kubernetes.node.vfio import read_model_names
from ocigpu.system.service import Backoff, ServiceLog, Signals

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
    """Return the name of a node's NodeFeature; it is the name that NVIDIA's program uses."""
    return f"nvidia-features-for-{node}"


def find_place(
    options: PluginOptions, target: str, environment: Mapping[str, str], server: ApiServer | None = None
) -> LabelPlace:
    """Return where labels go; ``target`` "": a NodeFeature in a pod with useNodeFeatureAPI set, else a file.

    Queries the API server for the owner of our pod.  Raises SettingsError (OCIGPU-KUBE-1) when the environment lacks a
    required variable, HostError (OCIGPU-KUBE-5).
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
    """Remove the labels; missing ones are not an error.  Raises HostError."""
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
    """Write a file of features.d, mode 0644, or leave the former one; missing directories are made.

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
    """Remove the file of features.d; a missing one is not an error."""
    with OsErrorAs(HostError, "OCIGPU-HOST-3", f"remove {path}", ""), suppress(FileNotFoundError):
        os.unlink(path)


HEARTBEAT = 3600.0
"""Seconds until labels that have not changed are written again, in case that somebody has taken them away."""
FIRST_RETRY = 5.0
"""Seconds until a labelling that failed is tried again, doubling up to the interval."""
MAX_FILE = 1 << 20


class Labels(NamedTuple):
    """What this node is to be labelled with; ``silent``: why the driver gave no answer although there are GPUs."""

    labels: "dict[str, str]"
    notes: tuple[str, ...] = ()
    silent: str = ""


def read_labels(settings: Settings, configuration: Configuration, now: float) -> Labels:
    """Return the labels of this node; queries NVML.  ``now``: Unix seconds, for the label with the time.

    They are those of GPU feature discovery and those of every other vendor whose driver the host has.
    """
    options = configuration.options
    ours = host_settings(settings, options)
    node = read_node(ours, configuration)
    machine = settings.simulation_root + options.machine_type_file
    around = read_surroundings(find_roots(ours).sys, machine, int(now))
    if node.machines:
        names = read_model_names()
        models = [names.get(each.device, f"{each.device:04x}") for each in node.machines]
        labels, notes = make_machine_labels(models, configuration, around)
    else:
        labels, notes = make_labels(node.facts, configuration, node.hardware, around)
    for name in find_vendors(ours):
        labels |= load_vendor(name).read_labels(ours)
    return Labels(labels, notes, _silence(node, around))


def read_surroundings(sys: str, machine_type_file: str, timestamp: int | None) -> Surroundings:
    """Return the machine's name and the PCI bus's facts about its GPUs; needs no privilege."""
    functions = [each for each in read_functions(sys, NVIDIA_VENDOR) if each.base_class in GPU_CLASSES]
    spaces = (read_bytes(f"{sys}/bus/pci/devices/{each.address}/config", SPACE) or b"" for each in functions)
    vgpus = (vgpu for vgpu in map(parse_vgpu, spaces) if vgpu is not None)
    machine = (read_bytes(machine_type_file, 4096) or b"").decode(errors="replace").strip()
    return Surroundings(machine, frozenset(each.base_class for each in functions), next(vgpus, None), timestamp)


def _silence(node: KubernetesNode, around: Surroundings) -> str:
    if not node.source and around.pci_classes:
        return node.inventory.reason or "the driver does not answer"
    if node.source == "nvml" and node.facts.gpus:
        silent = load_vendor(node.facts.vendor).find_silence(node.facts)
        return node.hardware.problem or ("NVML does not answer" if silent else "")
    return ""


class Labeller:
    """Labels this node; ``target``: see :func:`ocigpu.kubernetes.labels.program.find_place`."""

    def __init__(self, settings: Settings, given: CommandInput, log: ServiceLog, target: str = "") -> None:
        self._settings = settings
        self._given = given
        self._log = log
        self._target = target
        self._place: LabelPlace | None = None
        self._published: dict[str, str] | None = None
        self._written: tuple[LabelPlace, float] | None = None
        self._configuration = read_configuration(given)
        for warning in self._configuration.warnings:
            log("warning", warning)

    def run(self, remove_on_exit: bool) -> None:
        """Label at intervals until SIGTERM, SIGINT or SIGQUIT, and at once at SIGHUP; once with oneshot.

        Raises errors of oneshot and of the first configuration.  Other errors are logged and the work is retried,
        unless failOnInitError is set and the first labelling fails.
        """
        if self._configuration.options.oneshot:
            self.once()
            return
        retry = Backoff(FIRST_RETRY)
        with Signals() as signals:
            while not signals.stopping:
                asked = signals.take_again()
                try:
                    self.once(anyway=asked)
                    if retry.delay:
                        self._log.forget_all()  # the next failure is news again
                        self._log("info", "labelling works again")
                    retry.reset()
                except HostError as error:
                    if self._configuration.options.fail_on_init_error and self._published is None:
                        raise
                    self.report("error", error.line)
                    retry.failed(0.0)
                interval = self._configuration.options.sleep_interval
                signals.wait(min(retry.delay or interval, interval))
        if remove_on_exit:
            place = self._find_place()
            withdraw(place)
            self._log("info", f"labels removed: {place}")

    def once(self, *, anyway: bool = False) -> None:
        """Read the node and publish labels that have changed; raises HostError when either fails.

        Unchanged labels keep their time, and are published once in HEARTBEAT seconds, or with ``anyway``.  The API
        server creates neither an event nor a version when an object is applied unchanged.
        """
        configuration = self._configure()
        found = read_labels(self._settings, configuration, time.time())
        for note in found.notes:
            self.report("warning", note)
        if found.silent:
            raise HostError("OCIGPU-KUBE-7", f"{found.silent}; the labels stay as they are")
        place = self._find_place()
        before = self._published or {}
        labels = {name: before.get(name, value) if name == TIMESTAMP else value for name, value in found.labels.items()}
        now = time.monotonic()
        if labels == before and not anyway and self._is_there(place, labels, now):
            return
        if labels != before:
            labels = found.labels
        publish(place, labels)
        self._written = place, now
        if labels != before:
            self._published = labels
            self._log.forget_all()
            self._log("info", f"{len(labels)} labels: {place}", labels=labels)

    def _is_there(self, place: LabelPlace, labels: Mapping[str, str], now: float) -> bool:
        """Return whether labels need not be written again: a file is checked, the API server is trusted for a while."""
        if place.target == "file":
            return read_bytes(place.path, MAX_FILE) == render_features(labels).encode()
        return self._written is not None and self._written[0] == place and now - self._written[1] < HEARTBEAT

    def _configure(self) -> Configuration:
        try:
            self._configuration = read_configuration(self._given)
        except OcigpuError as error:
            self.report("error", f"{error.message}; the previous configuration stays in force")
        return self._configuration

    def _find_place(self) -> LabelPlace:
        if self._place is None or self._place.target == "file":
            self._place = find_place(self._configuration.options, self._target, self._given.environment)
        return self._place

    def report(self, level: str, text: str) -> None:
        """Log a line unless it was logged since the labels last changed, or since labelling last failed."""
        self._log.once(text, level, text)
