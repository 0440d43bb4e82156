"""``ocigpu node-labels``: the labels of this node, once or again and again.

Labels stay while the driver gives no answer and while the program is started anew: pods that are waiting for such a
node need them.  (NVIDIA's program removes them whenever it ends.)
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.gpus.pci import NVIDIA_VENDOR, read_functions
from ocigpu.gpus.tree import find_roots, read_bytes
from ocigpu.gpus.vfio.facts import GPU_CLASSES
from ocigpu.kubernetes.config import Configuration, Told, read_configuration
from ocigpu.kubernetes.labels import TIMESTAMP, Surroundings, make_labels, make_machine_labels, render_features
from ocigpu.kubernetes.node import KubernetesNode, host_settings, read_node
from ocigpu.kubernetes.publish import LabelPlace, find_place, publish, withdraw
from ocigpu.kubernetes.vfio import read_model_names
from ocigpu.kubernetes.vgpu import SPACE, parse_vgpu
from ocigpu.system.service import Backoff, ServiceLog, Signals

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
    """Return the labels of this node as it is; asks NVML.  ``now``: Unix seconds, for the label with the time."""
    options = configuration.options
    ours = host_settings(settings, options)
    node = read_node(ours, configuration)
    machine = options.machine_type_file
    if settings.simulation_root:
        machine = settings.simulation_root + machine
    around = read_surroundings(find_roots(ours).sys, machine, int(now))
    if node.machines:
        names = read_model_names()
        models = [names.get(each.device, f"{each.device:04x}") for each in node.machines]
        labels, notes = make_machine_labels(models, configuration, around)
    else:
        labels, notes = make_labels(node.facts, configuration, node.hardware, around)
    return Labels(labels, notes, _silence(node, around))


def read_surroundings(sys: str, machine_type_file: str, timestamp: int | None) -> Surroundings:
    """Return the machine's name and what the PCI bus says of its GPUs; needs no privilege."""
    functions = [each for each in read_functions(sys, NVIDIA_VENDOR) if each.base_class in GPU_CLASSES]
    spaces = (read_bytes(f"{sys}/bus/pci/devices/{each.address}/config", SPACE) or b"" for each in functions)
    vgpus = (vgpu for vgpu in map(parse_vgpu, spaces) if vgpu is not None)
    machine = (read_bytes(machine_type_file, 4096) or b"").decode(errors="replace").strip()
    return Surroundings(machine, frozenset(each.base_class for each in functions), next(vgpus, None), timestamp)


def _silence(node: KubernetesNode, around: Surroundings) -> str:
    if not node.source and around.pci_classes:
        return node.inventory.reason or "the driver gives no answer"
    if node.source == "nvml" and node.facts.gpus and (node.facts.source == "procfs" or node.hardware.problem):
        return node.hardware.problem or "NVML gives no answer"
    return ""


class Labeller:
    """Labels this node; ``target``: see :func:`ocigpu.kubernetes.publish.find_place`."""

    def __init__(
        self,
        settings: Settings,
        told: Told,
        log: ServiceLog,
        target: str = "",
    ) -> None:
        self._settings = settings
        self._told = told
        self._log = log
        self._target = target
        self._place: LabelPlace | None = None
        self._published: dict[str, str] | None = None
        self._written: tuple[LabelPlace, float] | None = None
        self._configuration = read_configuration(told)
        for warning in self._configuration.warnings:
            log("warning", warning)

    def run(self, remove_on_exit: bool) -> None:
        """Label at intervals until SIGTERM, SIGINT or SIGQUIT, and at once at SIGHUP; once with oneshot.

        Raises an error of oneshot, and of the configuration it is begun with; others are logged and tried again, unless
        it was told to end when the first labelling does not work (failOnInitError).
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
                    self._say("error", f"{error.code}: {error.message}")
                    retry.failed(0.0)
                interval = self._configuration.options.sleep_interval
                signals.wait(min(retry.delay or interval, interval))
        if remove_on_exit:
            place = self._find_place()
            withdraw(place)
            self._log("info", f"labels removed: {place}")

    def once(self, *, anyway: bool = False) -> None:
        """Read the node and publish labels that have changed; raises HostError when either does not work.

        Those that have not changed keep their time, and are published once in HEARTBEAT seconds, or ``anyway``: the API
        server makes neither an event nor a version of an object that is applied as it is.
        """
        configuration = self._configure()
        found = read_labels(self._settings, configuration, time.time())
        for note in found.notes:
            self._say("warning", note)
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
        """Return whether labels need not be written again: a file is looked at, the API server believed for a while."""
        if place.target == "file":
            return read_bytes(place.path, MAX_FILE) == render_features(labels).encode()
        return self._written is not None and self._written[0] == place and now - self._written[1] < HEARTBEAT

    def _configure(self) -> Configuration:
        try:
            self._configuration = read_configuration(self._told)
        except OcigpuError as error:
            self._say("error", f"{error.message}; the previous configuration stays in force")
        return self._configuration

    def _find_place(self) -> LabelPlace:
        if self._place is None or self._place.target == "file":
            self._place = find_place(self._configuration.options, self._target, self._told.environment)
        return self._place

    def _say(self, level: str, text: str) -> None:
        """Log a line unless it was logged since the labels last changed, or since labelling last failed."""
        self._log.once(text, level, text)
