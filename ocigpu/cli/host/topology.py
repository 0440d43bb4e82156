"""``ocigpu topology``: how the GPUs of this host are connected, where they are, and who has them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ocigpu.cli.containers.containers import places_of
from ocigpu.cli.front import show
from ocigpu.cli.front.common import load_facts, load_settings
from ocigpu.containers.find import find_containers
from ocigpu.containers.report import make_reports
from ocigpu.core.errors import printable
from ocigpu.core.facts import Gpu
from ocigpu.gpus.nvidia.hardware import read_hardware
from ocigpu.gpus.nvidia.topology import (
    BOARD,
    HOST_BRIDGE,
    OTHER_CPU,
    SAME_CPU,
    SWITCH,
    SWITCHES,
    Connection,
    GpuPlace,
    read_connections,
    read_places,
)
from ocigpu.gpus.on_node import Hardware
from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vendors import GpuLink, load_vendor

WORDS = {
    BOARD: ("PIX", ""),
    SWITCH: ("PIX", "behind the same PCIe switch"),
    SWITCHES: ("PXB", "through several PCIe switches"),
    HOST_BRIDGE: ("PHB", "through a PCIe host bridge of a CPU"),
    SAME_CPU: ("NODE", "through several host bridges of a NUMA node"),
    OTHER_CPU: ("SYS", "between NUMA nodes"),
}
"""What levels are called, as `nvidia-smi topo -m` calls them, and what that means."""


class _Entry(NamedTuple):
    label: str
    gpu: Gpu
    place: GpuPlace
    owners: list[str]


def topology_command(state_dir: list[str] | None = None, config: str = "") -> "show.Answer":
    settings = load_settings(config)
    with show.Progress("querying NVML"):
        facts = load_facts(settings)
        hardware = read_hardware(facts) if any(part.libraries for part in facts.each) else Hardware()
    containers, notes = find_containers(places_of(state_dir))
    reports = make_reports([one for one in containers if one.pid], facts, settings)
    notes += [*([hardware.problem] if hardware.problem else []), *facts.notes]
    if os.geteuid():
        notes.append("not root: containers of other users are not seen")
    owners: dict[str, list[str]] = {}
    for report in reports:
        for given in report.gpus:
            name = f"{report.container.name} ({given.mig})" if given.mig else report.container.name
            parent = next(gpu for gpu in facts.gpus if given.uuid in (gpu.uuid, *(mig.uuid for mig in gpu.mig_devices)))
            owners.setdefault(parent.uuid, []).append(name)
    places = read_places(find_roots(settings).sys, facts.gpus)
    of_each = [(part.vendor if facts.parts else "GPU", gpu) for part in facts.each for gpu in part.gpus]
    links: dict[frozenset[str], GpuLink] = {}
    for part in facts.each:
        own = {frozenset((link.one, link.two)): link for link in load_vendor(part.vendor).read_links(settings, part)}
        if len(part.gpus) > 1 and not own and not any(gpu.uuid in hardware.gpus for gpu in part.gpus):
            notes.append(f"{part.vendor}: links between its GPUs are not known, only their PCI paths")
        links |= own
    entries = [
        _Entry(f"{word}{gpu.index}", gpu, places.get(gpu.uuid, GpuPlace()), owners.get(gpu.uuid, []))
        for word, gpu in of_each
    ]
    connections = read_connections(places, hardware)
    for (one, two), found in connections.items():
        if found.links:
            links[frozenset((one, two))] = GpuLink(one, two, "NV", found.links)
    yield {"simulated": facts.simulated, **_to_json(entries, connections, links, hardware), "notes": notes}
    show.fields([("host", show.host_line(facts)), ("driver", show.driver_line(facts))])
    for line in _tree(entries, connections, hardware):
        print(line)
    if len(entries) > 1:
        print()
        _matrix(entries, connections, links)
    show.notes(notes, apart=True)


def _to_json(
    entries: Sequence[_Entry],
    connections: Mapping[tuple[str, str], Connection],
    links: Mapping[frozenset[str], GpuLink],
    hardware: Hardware,
) -> dict[str, object]:
    gpus = []
    for label, gpu, place, owners in entries:
        details = hardware.gpus.get(gpu.uuid)
        gpus.append(
            {
                "label": label, "index": gpu.index, "uuid": gpu.uuid, "bus_id": gpu.bus_id, "model": gpu.model,
                "numa_node": place.numa if place.numa >= 0 else None, "cpus": place.cpus, "pci_path": list(place.path),
                "switch_nvlinks": details.switch_links if details else 0,
                "fabric_clique": details.clique if details else "",
                "fabric_problem": details.fabric_problem if details else "", "containers": owners,
            }
        )  # fmt: skip
    pairs = [
        {
            "gpus": [one.label, two.label], "pcie": WORDS[found.level][0], "nvlinks": found.links,
            "links": {link.kind: link.links} if (link := links.get(frozenset((one.gpu.uuid, two.gpu.uuid)))) else {},
        }
        for number, one in enumerate(entries) for two in entries[number + 1 :]
        if (found := connections.get((one.gpu.uuid, two.gpu.uuid)))
    ]  # fmt: skip
    return {"gpus": gpus, "pairs": pairs}


def _tree(
    entries: Sequence[_Entry], connections: Mapping[tuple[str, str], Connection], hardware: Hardware
) -> Iterator[str]:
    """Yield the lines of a tree: NUMA nodes, the PCIe switches of each, and the GPUs behind them."""
    fork, end, bar = ("├─ ", "└─ ", "│  ") if show.draws_unicode() else ("|- ", "`- ", "|  ")
    for node in sorted({entry.place.numa for entry in entries}):
        here = [entry for entry in entries if entry.place.numa == node]
        cpus = here[0].place.cpus
        title = f"NUMA node {node}" if node >= 0 else "no NUMA node"
        yield f"\n{title}{f', CPUs {cpus}' if cpus else ''}"
        groups = _behind_switches(here, connections)
        for number, group in enumerate(groups):
            last = number == len(groups) - 1
            if len(group) > 1:
                steps = zip(*(entry.place.path for entry in group), strict=False)
                common = ["", *(names[0] for names in steps if len(set(names)) == 1)]
                yield f"{end if last else fork}PCIe switch {common[-1]}".rstrip()
            for place, entry in enumerate(group):
                sign = end if place == len(group) - 1 else fork
                before = ("   " if last else bar) + sign if len(group) > 1 else (end if last else fork)
                yield before + _describe(entry, hardware)


def _behind_switches(
    entries: Sequence[_Entry], connections: Mapping[tuple[str, str], Connection]
) -> list[list[_Entry]]:
    groups: list[list[_Entry]] = []
    for entry in entries:
        for group in groups:
            found = connections.get((group[0].gpu.uuid, entry.gpu.uuid))
            if found and found.level >= SWITCH:
                group.append(entry)
                break
        else:
            groups.append([entry])
    return groups


def _describe(entry: _Entry, hardware: Hardware) -> str:
    details = hardware.gpus.get(entry.gpu.uuid)
    links = [f"{show.count(details.switch_links, 'NVLink')} to switches"] if details and details.switch_links else []
    links += [f"fabric {details.clique}"] if details and details.clique else []
    links += [details.fabric_problem] if details and details.fabric_problem else []
    parts = [entry.label, entry.gpu.bus_id, entry.gpu.model, *links, f"[{', '.join(entry.owners) or 'free'}]"]
    return "  ".join(printable(part) for part in parts if part)


def _matrix(
    entries: Sequence[_Entry],
    connections: Mapping[tuple[str, str], Connection],
    links: Mapping[frozenset[str], GpuLink],
) -> None:
    """Print how each two GPUs are connected, and what the words mean that occur."""
    rows, seen, kinds = [], dict[int, None](), dict[str, None]()
    for one in entries:
        row = [one.label]
        for two in entries:
            found = connections.get((one.gpu.uuid, two.gpu.uuid))
            link = links.get(frozenset((one.gpu.uuid, two.gpu.uuid)))
            if found is None:
                row.append("X" if one is two else "?")
            elif link:
                row.append(f"{link.kind}{link.links}")
                kinds[link.kind] = None
            else:
                row.append(WORDS[found.level][0])
                seen[found.level] = None
        numa = str(one.place.numa) if one.place.numa >= 0 else "-"
        rows.append([*row, numa, one.place.cpus or "-", ", ".join(one.owners) or "-"])
    show.table(("", *(entry.label for entry in entries), "numa", "cpus", "containers"), rows, fold=False)
    print()
    for kind in kinds:
        print(f"{f'{kind}#':<4}  number of {'NVLinks' if kind == 'NV' else f'links of {kind}'}")
    for word, text in dict(WORDS[level] for level in sorted(seen, reverse=True)).items():
        print(f"{word:<4}  {text or WORDS[SWITCH][1]}")
