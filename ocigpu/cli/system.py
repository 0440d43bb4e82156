"""``ocigpu system``: the host's own device nodes of the driver, and what systemd needs to find them."""

import os

from ocigpu.cli import show
from ocigpu.cli.arguments import takes
from ocigpu.cli.common import load_settings
from ocigpu.core.errors import HostError
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

Making = tuple[Roots, bool, bool, bool]
"""What both commands are told: of which driver, whether to load modules, only to show it, to print JSON."""


def read_making(
    load_kernel_modules: bool = False,
    driver_root: str = "",
    dev_root: str = "",
    config: str = "",
    dry_run: bool = False,
    json: bool = False,
) -> Making:
    """Return what the options say; raises SettingsError."""
    settings = load_settings(config, driver_root)
    if dev_root:
        settings = settings._replace(driver_dev_root=os.path.abspath(dev_root), simulation_root="")
    return find_roots(settings), load_kernel_modules, dry_run, json


@takes(read_making)
def nodes_command(making: Making, control_devices: bool = False) -> None:
    _run(making, True, "", control_devices)


@takes(read_making)
def links_command(
    making: Making,
    create_device_nodes: bool = False,
    create_all: bool = False,  # noqa: ARG001 - always so here
    dev_char_path: str = "",
) -> None:
    _run(making, create_device_nodes, dev_char_path)


def _run(making: Making, make_nodes: bool, directory: str, control_only: bool = False) -> None:
    from ocigpu.gpus.nvidia.kmods import load_modules, missing_modules

    roots, load, dry_run, json = making
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
    _show(roots, changes, modules, notes, json, dry_run)


def _show(
    roots: Roots, changes: list[NodeChange], modules: list[str], notes: list[str], json: bool, dry_run: bool
) -> None:
    done = [change for change in changes if change.what != "keep"]
    if json:
        show.data(
            {
                "simulated": roots.stand_in,
                "dry_run": dry_run,
                "modules": modules,
                "changes": [_change_data(change) for change in changes],
                "notes": notes,
            }
        )
        return
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
