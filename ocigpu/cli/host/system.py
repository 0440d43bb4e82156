"""``ocigpu list``, ``facts`` and ``refresh``: what this host has.  ``ocigpu system``: the driver's device nodes.

Systemd finds nodes by links in /dev/char, which the driver does not make; ``ocigpu system`` makes those, too.
"""

import os

from ocigpu.cli.front import show
from ocigpu.cli.front.arguments import takes
from ocigpu.cli.front.common import load_facts, load_settings
from ocigpu.core.errors import HostError
from ocigpu.core.facts import Gpu, HostFacts, facts_to_json, to_data
from ocigpu.gpus.cached import refresh_facts
from ocigpu.gpus.nvidia.nodes import (
    NodeChange,
    apply_changes,
    char_directory,
    find_changes,
    find_link_changes,
    plan_nodes,
    read_driver,
)
from ocigpu.gpus.tree import Roots, find_roots

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

Making = tuple[Roots, bool, bool]
"""What both commands are told: of which driver, whether to load modules, only to show it."""


def read_making(
    load_kernel_modules: bool = False,
    driver_root: str = "",
    dev_root: str = "",
    config: str = "",
    dry_run: bool = False,
) -> Making:
    """Return what the options say; raises SettingsError."""
    settings = load_settings(config, driver_root)
    if dev_root:
        settings = settings._replace(driver_dev_root=os.path.abspath(dev_root), simulation_root="")
    return find_roots(settings), load_kernel_modules, dry_run


@takes(read_making)
def nodes_command(making: Making, control_devices: bool = False) -> "show.Answer":
    yield from _run(making, True, "", control_devices)


@takes(read_making)
def links_command(
    making: Making,
    create_device_nodes: bool = False,
    create_all: bool = False,  # noqa: ARG001 - always so here
    dev_char_path: str = "",
) -> "show.Answer":
    yield from _run(making, create_device_nodes, dev_char_path)


def _run(making: Making, make_nodes: bool, directory: str, control_only: bool = False) -> "show.Answer":
    from ocigpu.gpus.nvidia.kmods import load_modules, missing_modules

    roots, load, dry_run = making
    modules, notes = (missing_modules(roots), []) if load and dry_run else load_modules(roots) if load else ([], [])
    if roots.stand_in:
        notes = ["simulated host: nothing outside its directory is touched", *notes]
    changes: list[NodeChange] = []
    try:
        driver = read_driver(roots)
    except HostError:
        if not (dry_run and modules):
            raise
        notes = [*notes, "no driver is loaded: its nodes are known when the modules are"]
    else:
        nodes, more = plan_nodes(driver, control_only=control_only)
        notes = [*notes, *more]
        if make_nodes:
            changes += find_changes(nodes, roots)
            if not dry_run:
                apply_changes(changes)
        links = find_link_changes(nodes, driver, roots, directory or char_directory(roots))
        if not dry_run:
            apply_changes(links)
        changes += links
    data = [_change_data(change) for change in changes]
    yield {"simulated": roots.stand_in, "dry_run": dry_run, "modules": modules, "changes": data, "notes": notes}
    done = [change for change in changes if change.what != "keep"]
    for name in modules:
        print(f"{'would load' if dry_run else 'loaded'} kernel module {name}")
    if done:
        show.table(
            ("change", "path", "number", "detail"),
            [(change.what, change.path, change.number, _detail(change)) for change in done],
            fold=False,
        )
    made = sum(change.what != "leave" for change in done)
    print(f"{'to do' if dry_run else 'done'}: {made}; as they should be: {len(changes) - len(done)}")
    show.notes(notes)


def _detail(change: NodeChange) -> str:
    was = f"  (was: {change.cause})" if change.cause else ""
    if change.what == "remove":
        return f"stale: {change.cause}"
    if change.what == "leave":
        return f"{change.cause}: the driver's parameters forbid to change it"
    if change.node:
        return f"mode {change.node.mode:04o} uid {change.node.uid} gid {change.node.gid}{was}"
    return f"-> {change.target}{was}"


def _change_data(change: NodeChange) -> dict[str, object]:
    node = change.node
    return {
        "change": change.what,
        "path": change.path,
        "number": change.number,
        **({"was": change.cause} if change.cause else {}),
        **({"mode": f"{node.mode:04o}", "uid": node.uid, "gid": node.gid} if node else {}),
        **({"target": change.target} if change.target else {}),
    }


def list_command(config: str = "", driver_root: str = "", facts: str = "") -> "show.Answer":
    host = load_facts(load_settings(config, driver_root), facts)
    names = ("simulated", "driver_root", "driver_version", "cuda_version", "source", "gpus", "notes")
    yield {name: to_data(getattr(host, name)) for name in names}
    show.fields([("host", show.host_line(host, facts)), ("driver", show.driver_line(host))])
    if host.gpus:
        print()
        show.table(("gpu", "minor", "uuid", "bus id", "model", "arch", "mig", "state"), gpu_rows(host.gpus), fold=False)
    show.notes(host.notes, apart=True)


def gpu_rows(gpus: tuple[Gpu, ...]) -> list[tuple[str, ...]]:
    """Return the rows of the table of GPUs; the MIG devices of a GPU follow it, named "GPU:MIG"."""
    rows: list[tuple[str, ...]] = []
    for gpu in gpus:
        mig = "on" if gpu.mig_enabled else "off" if gpu.mig_capable else "-"
        model = (gpu.uuid, gpu.bus_id, gpu.model, gpu.architecture or "-")
        rows.append((str(gpu.index), "-" if gpu.minor < 0 else str(gpu.minor), *model, mig, gpu.error or "ok"))
        for part in gpu.mig_devices:
            instances = f"gi {part.gpu_instance} ci {part.compute_instance}"
            names = (f"{gpu.index}:{part.index}", "", part.uuid, "", f"MIG {part.profile}", "", instances)
            rows.append((*names, gpu.error or "ok"))
    return rows


def facts_command(config: str = "", driver_root: str = "", facts: str = "") -> "show.Answer":
    host = load_facts(load_settings(config, driver_root), facts)
    yield facts_to_json(host)
    show.fields([("host", show.host_line(host, facts)), ("driver", show.driver_line(host)), *_fact_fields(host)])
    for title, rows in _fact_tables(host):
        if rows:
            print()
            show.table(title, rows)
    show.notes(host.notes, apart=True)


def _fact_fields(host: HostFacts) -> list[tuple[str, str]]:
    channels = show.count(len(host.imex_nodes), "channel")
    return [
        ("majors", ", ".join(f"{name} {major}" for name, major in host.majors) or "none"),
        ("MIG", show.count(len(host.cap_nodes), "capability node")),
        ("IMEX", f"major {host.imex_major}, {channels}" if host.imex_major else "none"),
        ("features", ", ".join(feature.name for feature in host.features) or "none"),
        ("proc", f"{host.proc_driver or 'none'} ({', '.join(file.name for file in host.proc_files)})"),
    ]


def _fact_tables(host: HostFacts) -> "Iterator[tuple[tuple[str, ...], list[tuple[str, ...]]]]":
    gpu_nodes = [node for gpu in host.gpus for node in (*((gpu.node,) if gpu.node else ()), *gpu.drm_nodes)]
    nodes = (*host.control_nodes, *gpu_nodes)
    yield (
        ("node", "number", "mode", "host path"),
        [
            (node.container_path, f"{node.major}:{node.minor}", f"{node.mode:04o}", node.host_path or "-")
            for node in nodes
        ],
    )
    yield (
        ("library", "bits", "needed for", "host path"),
        [
            (library.soname or library.name, str(library.bits), ",".join(library.capabilities), library.host_path)
            for library in host.libraries
        ],
    )
    files = (*host.binaries, *host.firmware, *host.sockets, *host.configs)
    yield (
        ("file", "kind", "needed for", "host path"),
        [(file.container_path, file.kind, ",".join(file.capabilities) or "any", file.host_path) for file in files],
    )


def refresh_command(config: str = "") -> "show.Answer":
    done = refresh_facts(load_settings(config))
    age = round(done.age, 1) if done.age >= 0 else None
    yield {
        "kept": not done.problem,
        "path": done.path,
        "problem": done.problem,
        "age_before": age,
        "driver_version": done.facts.driver_version,
        "gpus": len(done.facts.gpus),
        "notes": done.facts.notes,
    }
    show.fields(
        [
            ("host", show.host_line(done.facts)),
            ("driver", show.driver_line(done.facts)),
            ("kept", f"no, every start reads the host again: {done.problem}" if done.problem else done.path),
            ("before", "none that still held" if age is None else f"{age} s old"),
        ]
    )
    show.notes(done.facts.notes)
