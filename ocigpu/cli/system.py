"""``ocigpu system``: the host's own device nodes of the driver, and what systemd needs to find them."""

import os
from typing import Annotated

import typer

from ocigpu.cli.common import ConfigOption, JsonOption, load_settings, print_json, print_notes, print_table
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

SYSTEM_EPILOG = """\
\b
Examples:
  ocigpu system create-device-nodes --load-kernel-modules
  ocigpu system create-device-nodes --dry-run
  ocigpu system create-dev-char-symlinks
"""
NODES_EPILOG = """\
\b
Node by node: one that is as it should be is kept, wrong permissions are corrected, and a node with another number (of
a driver that was loaded before) is replaced.  Numbers come from /proc/devices and /proc/driver/nvidia, permissions
from the driver's parameters (NVreg_DeviceFileMode and its relatives).  A second call changes nothing.
Needs root.  For a simulated host everything happens below its directory.

\b
Exit status:
  0  every node there should be is there (with --dry-run: is known); notes name kernel modules that are not loaded
  1  no driver is loaded, or something could not be done; what was done before stays
  2  the command line could not be understood

\b
Examples:
  ocigpu system create-device-nodes --load-kernel-modules
  ocigpu system create-device-nodes --dry-run --json
  ocigpu system create-device-nodes --dev-root /run/nvidia/driver
"""
LINKS_EPILOG = """\
\b
systemd before version 240 finds a device by its link in /dev/char, and nobody makes these for NVIDIA's nodes: without
them containers lose their GPUs when systemd writes device rules anew (systemctl daemon-reload).
Links that are missing are made, wrong ones replaced, stale ones removed.  Needs root.

\b
Exit status:
  0  every link is there
  1  no driver is loaded, or a link could not be made
  2  the command line could not be understood

\b
Examples:
  ocigpu system create-dev-char-symlinks
  ocigpu system create-dev-char-symlinks --create-device-nodes --load-kernel-modules
  ocigpu system create-dev-char-symlinks --dry-run
"""

system_app = typer.Typer(
    help="Make the host's device nodes and their links.", epilog=SYSTEM_EPILOG, rich_markup_mode=None
)

RootOption = Annotated[
    str,
    typer.Option("--root", "--driver-root", metavar="DIR", help="Driver root instead of the settings' driver.root."),
]
DevRootOption = Annotated[
    str, typer.Option("--dev-root", metavar="DIR", help="Parent of dev/ instead of the settings' driver.dev-root.")
]
LoadOption = Annotated[
    bool,
    typer.Option("--load-kernel-modules", help="Load nvidia, nvidia-uvm and nvidia-modeset first, where missing."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done and change nothing.")]


@system_app.command("create-device-nodes", epilog=NODES_EPILOG)
def nodes_command(
    control_devices: Annotated[
        bool, typer.Option("--control-devices", help="Only nvidiactl, nvidia-uvm, nvidia-uvm-tools, nvidia-modeset.")
    ] = False,
    load_kernel_modules: LoadOption = False,
    root: RootOption = "",
    dev_root: DevRootOption = "",
    config: ConfigOption = "",
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Make the device nodes of all GPUs, of the driver's parts and of MIG, and their links in /dev/char."""
    roots = _roots(config, root, dev_root)
    _run(roots, json, dry_run, load_kernel_modules, True, "", control_devices)


@system_app.command("create-dev-char-symlinks", epilog=LINKS_EPILOG)
def links_command(
    create_device_nodes: Annotated[
        bool, typer.Option("--create-device-nodes", help="Make the nodes first, as create-device-nodes does.")
    ] = False,
    create_all: Annotated[bool, typer.Option("--create-all", hidden=True)] = False,  # noqa: ARG001 - always so here
    dev_char_path: Annotated[
        str, typer.Option("--dev-char-path", metavar="DIR", help="Where the links are.  [default: /dev/char]")
    ] = "",
    load_kernel_modules: LoadOption = False,
    root: RootOption = "",
    dev_root: DevRootOption = "",
    config: ConfigOption = "",
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Make the links /dev/char/MAJOR:MINOR of all NVIDIA device nodes."""
    roots = _roots(config, root, dev_root)
    _run(roots, json, dry_run, load_kernel_modules, create_device_nodes, dev_char_path)


def _roots(config: str, root: str, dev_root: str) -> Roots:
    settings = load_settings(config, root)
    if dev_root:
        settings = settings._replace(driver_dev_root=os.path.abspath(dev_root), simulation_root="")
    return find_roots(settings)


def _run(
    roots: Roots,
    json: bool,
    dry_run: bool,
    load: bool,
    make_nodes: bool,
    directory: str,
    control_only: bool = False,
) -> None:
    from ocigpu.gpus.nvidia.kmods import load_modules, missing_modules

    modules, notes = (missing_modules(roots), []) if load and dry_run else load_modules(roots) if load else ([], [])
    if roots.simulated:
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
                apply_changes(changes, roots.simulated)
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
        print_json(
            {
                "simulated": roots.simulated,
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
        print_table(
            ("change", "path", "number", "detail"),
            [(change.what, change.path, change.number, _detail(change)) for change in done],
            fold=False,
        )
    made = sum(change.what != "leave" for change in done)
    print(f"{'to do' if dry_run else 'done'}: {made}; as they should be: {len(changes) - len(done)}")
    print_notes(notes)


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
    data: dict[str, object] = {"change": change.what, "path": change.path, "number": change.number}
    if change.cause:
        data["was"] = change.cause
    if change.node:
        data.update(mode=f"{change.node.mode:04o}", uid=change.node.uid, gid=change.node.gid)
    if change.target:
        data["target"] = change.target
    return data
