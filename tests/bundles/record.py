"""Record the hosts of tests/bundles/hosts from simulated ones: ``.venv/bin/python tests/bundles/record.py [NAME...]``.

Needs root (real device nodes) and a C compiler.  See hosts/README.md.
"""

import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.jsondiff import render_for_review

from ocigpu.core.facts import HostFacts, facts_from_json, facts_to_json
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.sim.create import create_host
from ocigpu.system.settings_file import read_settings

FEATURE_MAJOR = 420
"""In the range of dynamic majors that no driver of Linux has."""
HOSTS = Path(__file__).parent / "hosts"


def without_libraries_but_the_needed(facts: HostFacts) -> HostFacts:
    """Keep a recording small where files do not matter: the libraries and programs that no request can do without."""
    keep = ("libcuda.so.1", "libnvidia-ml.so.1")
    return facts._replace(
        libraries=tuple(item for item in facts.libraries if item.soname in keep and item.bits == 64),
        binaries=tuple(item for item in facts.binaries if item.container_path.endswith("/nvidia-smi")),
        configs=(),
    )


def with_similar_uuids(facts: HostFacts) -> HostFacts:
    """Let the UUIDs of GPUs 0 and 1 begin with the same eight digits."""
    first, second, *others = without_libraries_but_the_needed(facts).gpus
    second = second._replace(uuid=first.uuid[:12] + second.uuid[12:])
    return without_libraries_but_the_needed(facts)._replace(gpus=(first, second, *others))


class Host(NamedTuple):
    """A host to record: what is simulated, and faults of its NVML.

    ``more_nodes``: device nodes of drivers that a simulated host does not have.  ``real_root``: recorded as if it was
    no simulation and its files were in /.  ``reduce`` leaves out what no case is about.
    """

    model: str
    gpus: int
    mig: tuple[str, ...] = ()
    faults: str = ""
    dri: bool = False
    more_nodes: tuple[str, ...] = ()
    real_root: bool = False
    reduce: Callable[[HostFacts], HostFacts] | None = None


RECORDED = {
    "a100-8": Host("a100", 8),
    "h100-8-mig": Host("h100", 8, ("0:1g.10gb,1g.10gb,2g.20gb", "1:3g.40gb,3g.40gb", "7:")),
    "h100-4-imex": Host(
        "h100", 4, more_nodes=("nvidia-fs0", "nvidia-fs1", "gdrdrv"), reduce=without_libraries_but_the_needed
    ),
    "l4-2-drm": Host("l4", 2, dri=True),
    "t4-1": Host("t4", 1, real_root=True),
    "h200-64": Host("h200", 64, reduce=without_libraries_but_the_needed),
    "broken-gpu": Host("a100", 4, faults="lost 2\n", reduce=without_libraries_but_the_needed),
    "similar-uuids": Host("a10", 2, reduce=with_similar_uuids),
    "no-nvml": Host("a100", 2, faults="init 999\n", reduce=without_libraries_but_the_needed),
}


def record(host: Host) -> HostFacts:
    """Return the facts of a simulated host as if it was in /sim (or /)."""
    with tempfile.TemporaryDirectory(prefix="ocigpu-record-") as directory:
        root = f"{directory}/host"
        settings = create_host(root, host.gpus, host.model, host.mig, dri=host.dri, nodes=True)
        if host.faults:
            (Path(root) / "faults").write_text(host.faults)
        for minor, name in enumerate(host.more_nodes):
            os.mknod(f"{root}/dev/{name}", 0o600 | stat.S_IFCHR, os.makedev(FEATURE_MAJOR, minor))
        facts = read_host_facts(read_settings(settings))
        text = json.dumps(facts_to_json(facts._replace(simulated=not host.real_root)))
    text = text.replace(f'"{root}"', '"/"').replace(root, "") if host.real_root else text.replace(root, "/sim")
    facts = facts_from_json(json.loads(text))
    return host.reduce(facts) if host.reduce else facts


def main(names: list[str]) -> None:
    """Write the recordings named, or all."""
    for name in names or RECORDED:
        (HOSTS / f"{name}.json").write_text(render_for_review(facts_to_json(record(RECORDED[name]))) + "\n")
        print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
