"""AMD's answers to the device plugin and the exporter: see the Vendor record of :mod:`ocigpu.gpus.vendors`.

How well two GPUs are connected is weighed as AMD's own plugin weighs it (github.com/ROCm/k8s-device-plugin,
internal/pkg/allocator/device.go: calculatePairWeight), with the sign turned: links, same board, same NUMA node.
Partitions of a GPU are as well connected as by a link, so that they are given together, as with that plugin.
"""

import itertools
import re

from ocigpu.core.errors import HostError
from ocigpu.core.facts import Gpu, HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.amd.facts import AmdFacts, describe_host, has_driver, read_driven
from ocigpu.gpus.amd.ras import find_problem, read_errors
from ocigpu.gpus.amd.usage import read_links
from ocigpu.gpus.on_node import NodeGpus
from ocigpu.gpus.tree import find_roots, read_or_skip, read_text, sysfs_address

XGMI, SAME_BOARD, SAME_NODE = 30, 10, 10
_STYLE = re.compile("[a-z]{3}_nps[0-9]{1,2}")
SAMPLER = "ocigpu.gpus.amd.sampler"


def read_node(settings: Settings) -> NodeGpus:
    """Return the GPUs and partitions that KFD knows; needs no privilege.

    Those left out are among the notes, and so are files of sysfs that cannot be read.  Raises HostError without amdgpu.
    """
    roots = find_roots(settings)
    driven = read_driven(roots)
    facts = with_health(driven, roots.sys)._replace(driver_root=roots.driver or "/", simulated=roots.stand_in)
    numa = {gpu.uuid: read_numa(roots.sys, gpu) for gpu in facts.gpus}
    links = {(link.one, link.two) for link in read_links(settings, facts)}
    scores = {}
    for one, two in itertools.combinations(facts.gpus, 2):
        linked = (one.uuid, two.uuid) in links or (two.uuid, one.uuid) in links
        same_board, same_node = one.bus_id == two.bus_id, numa[one.uuid] == numa[two.uuid]
        score = XGMI * (linked or same_board) + SAME_BOARD * same_board + SAME_NODE * same_node
        scores[one.uuid, two.uuid] = scores[two.uuid, one.uuid] = score
    styles = {gpu.uuid: style for gpu in facts.gpus if (style := read_style(roots.sys, gpu))}
    numa = {uuid: node for uuid, node in numa.items() if node >= 0}
    return NodeGpus(facts, numa=numa, scores=scores, styles=styles)


def read_style(sys: str, gpu: Gpu) -> str:
    """Return how a GPU is partitioned, as AMD's plugin calls resources ("cpx_nps4"); "" if it does not say."""
    directory = f"{sys}/bus/pci/devices/{sysfs_address(gpu.bus_id)}"
    texts = [(read_or_skip(f"{directory}/current_{what}_partition", 64) or "") for what in ("compute", "memory")]
    style = "_".join(text.strip().lower() for text in texts)
    return style if _STYLE.fullmatch(style) else ""


def sample(settings: Settings) -> tuple[str, ...]:
    """Return the module that samples the GPUs, with its arguments, () without amdgpu; it ends with its input."""
    roots = find_roots(settings)
    if not has_driver(settings):
        return ()
    return (SAMPLER, roots.driver, roots.dev, roots.proc, roots.sys, "yes" * roots.stand_in)


def with_health(driven: AmdFacts, sys: str) -> HostFacts:
    """Return the facts as :func:`with_errors`, with the errors that RAS has counted; needs no privilege."""
    facts = with_errors(driven)
    boards = {gpu.bus_id for gpu in facts.gpus}
    errors = {each: find_problem(read_errors(f"{sys}/bus/pci/devices/{sysfs_address(each)}")) for each in boards}
    return facts._replace(gpus=tuple(gpu._replace(error=gpu.error or errors[gpu.bus_id]) for gpu in facts.gpus))


def with_errors(driven: AmdFacts) -> HostFacts:
    """Return the facts with the GPUs that pods can ask for; ``error``: why one of them cannot be used now.  Pure."""
    facts = describe_host(driven)
    notes = list(facts.notes)
    gpus = []
    for as_read, gpu in zip(driven.gpus, facts.gpus, strict=True):
        if gpu.error:
            gpus.append(gpu)
        elif not as_read.compute:
            notes.append(f"GPU {gpu.index} ({as_read.address}) left out: it is not in KFD's topology")
        else:
            gpus.append(gpu if driven.kfd else gpu._replace(error="the host has no /dev/kfd"))
    return facts._replace(gpus=tuple(gpus), notes=tuple(notes))


def read_numa(sys: str, gpu: Gpu) -> int:
    """Return the NUMA node of a GPU, -1 for none."""
    try:
        text = (read_text(f"{sys}/bus/pci/devices/{sysfs_address(gpu.bus_id)}/numa_node", 64) or "").strip()
    except HostError:
        return -1
    return int(text) if text.isascii() and text.isdigit() else -1
