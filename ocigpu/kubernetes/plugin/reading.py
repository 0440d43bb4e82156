"""The node as the device plugin has it, read by a process of its own: :mod:`~ocigpu.kubernetes.node.reader`."""

from typing import Any, NamedTuple

from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.vendors import load_vendor
from ocigpu.gpus.wsl import is_wsl
from ocigpu.kubernetes.node.config import Configuration
from ocigpu.kubernetes.node.devices import Inventory
from ocigpu.kubernetes.node.reader import ChildReader, answer_requests
from ocigpu.kubernetes.node.reading import KubernetesNode, OtherGpus, read_node, read_others
from ocigpu.kubernetes.plugin.specifications import write_specifications


class Reading(NamedTuple):
    """``node``: None when the host could not be read, for the reason in ``silent``.

    ``silent``: why NVML gave no answer about GPUs that may well be there: then the node has other vendors' GPUs only.
    ``problems``: of CDI specifications.
    """

    node: KubernetesNode | None
    silent: str = ""
    problems: tuple[str, ...] = ()


def read_again(before: KubernetesNode | None, settings: Settings, configuration: Configuration) -> Reading:
    """Return the node's NVIDIA GPUs; unchanged ones are not examined closely.

    A forked child queries NVML.
    """
    if configuration.options.device_discovery_strategy != "vfio" and not is_wsl(settings):
        try:
            facts = read_host_facts(settings)
        except HostError:
            return Reading(read_node(settings, configuration))  # states why, or finds GPUs for virtual machines
        if problem := load_vendor(facts.vendor).find_silence(facts):
            return Reading(None, problem)
        if before and before.source == "nvml" and facts == before.facts and not before.hardware.problem:
            return Reading(before)
    return Reading(read_node(settings, configuration))


def add_others(reading: Reading, others: tuple[OtherGpus, ...]) -> Reading:
    """Return the reading with the GPUs of other vendors, which do not depend on NVML."""
    if not others:
        return reading
    node = reading.node or KubernetesNode("", HostFacts(), Inventory(reason=reading.silent))
    return reading._replace(node=node._replace(others=others))


def main() -> None:
    """Answer requests, (settings, configuration), on standard input until it is closed."""
    last: tuple[Settings, Configuration] | None = None
    node: KubernetesNode | None = None
    others: tuple[OtherGpus, ...] = ()
    problems: tuple[str, ...] = ()

    def read(request: Any) -> Reading:
        nonlocal last, node, others, problems
        if request != last:
            node = None
        last = request
        settings, configuration = request
        own = read_again(node, settings, configuration)
        before, others = others, read_others(settings, configuration)
        reading = add_others(own, others)
        if reading.node is not None and (own.node is not node or others != before or problems):
            problems = write_specifications(reading.node, configuration, settings)
            node = own.node
        return reading._replace(problems=problems)

    answer_requests(read, lambda text: Reading(None, text))


def hardware_reader() -> ChildReader[Reading]:
    """Return what reads the node for the device plugin; a request is (settings, configuration)."""
    return ChildReader("ocigpu.kubernetes.plugin.reading", lambda text: Reading(None, text))
