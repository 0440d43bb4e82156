"""``ocigpu sim``: make, show and remove simulated GPU hosts."""

import shlex
from typing import Annotated, Any

import typer

from ocigpu.cli.common import JsonOption, Progress, count, print_fields, print_json, print_notes, print_table
from ocigpu.core.errors import printable
from ocigpu.sim.fault_names import FAULT_NAMES

SIM_EPILOG = """\
\b
Examples:
  ocigpu sim create /tmp/gpus --gpus 8 --model h100
  ocigpu sim create /tmp/mig --gpus 2 --model a100 --mig 0:1g.5gb,2g.10gb --mig 1:7g.40gb
  ocigpu list --config /tmp/gpus/config.toml
  ocigpu sim remove /tmp/gpus
"""

CREATE_EPILOG = (
    """\
A fault is made to be looked at: ocigpu doctor --root DIR. It comes with a system around the driver: engines, users,
cgroups and logs, as files.

\b
Faults:
"""
    + "".join(f"  {name:<20} {fault.text}\n" for name, fault in FAULT_NAMES.items())
    + """
\b
Examples:
  ocigpu sim create /tmp/gpus --gpus 2 --model l4
  ocigpu sim create /tmp/broken --gpus 2 --fault missing-uvm --fault stale-cdi
"""
)

DirectoryArgument = Annotated[str, typer.Argument(metavar="DIR", help="The simulated host's directory.")]

sim_app = typer.Typer(
    help="Simulated GPU hosts: a driver root with real libraries and device nodes, and no GPU behind them.",
    epilog=SIM_EPILOG,
    rich_markup_mode=None,
)


@sim_app.command("create", epilog=CREATE_EPILOG)
def create_command(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where to make it; must not exist or be empty.")],
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", min=1, max=64, help="Number of GPUs.")] = 8,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="GPU model; a wrong name lists them all.")
    ] = "h100",
    mig: Annotated[
        list[str] | None,
        typer.Option(
            "--mig", metavar="GPU:PROFILE,...", help="MIG devices of a GPU, e.g. 0:1g.10gb,2g.20gb; repeatable."
        ),
    ] = None,
    driver_version: Annotated[
        str, typer.Option("--driver-version", metavar="VERSION", help="Driver version, e.g. 550.163.01.")
    ] = "",
    fault: Annotated[
        list[str] | None,
        typer.Option(
            "--fault", metavar="NAME", help="Make a system around the driver, with this fault; repeatable. See below."
        ),
    ] = None,
) -> None:
    """Make a simulated host. Needs root for its device nodes, and a C compiler for its libraries."""
    from ocigpu.sim.create import create_host
    from ocigpu.sim.show import describe_host

    with Progress() as progress:
        path = create_host(directory, gpus, model, mig or [], driver_version, faults=fault or (), progress=progress)
    made = describe_host(directory)
    print(
        f"made a SIMULATED host in {printable(made['directory'])}: {count(len(made['gpus']), 'GPU')}, {made['product']}"
    )
    print_notes(made["notes"])
    if fault:
        print(f"look at:   ocigpu doctor --root {shlex.quote(directory)}")
    print(f"use it:    ocigpu plan --config {shlex.quote(path)} --gpus all")
    print(f"remove it: ocigpu sim remove {shlex.quote(directory)}")


@sim_app.command("show", epilog="\b\nExamples:\n  ocigpu sim show /tmp/gpus\n")
def show_command(directory: DirectoryArgument, json: JsonOption = False) -> None:
    """Show what a simulated host holds."""
    from ocigpu.sim.show import describe_host

    host = describe_host(directory)
    if json:
        print_json(host)
        return
    print_fields(
        [
            ("host", f"SIMULATED host {host['directory']}: no real GPU"),
            ("settings", host["config"]),
            ("driver", f"{host['driver_version']}, CUDA {host['cuda_version']}"),
            ("nodes", host["nodes"]),
            ("majors", ", ".join(f"{name} {major}" for name, major in host["majors"].items() if major)),
            ("sockets", ", ".join(host["sockets"]) or "none"),
            ("binaries", ", ".join(host["binaries"])),
        ]
    )
    print()
    print_table(("gpu", "uuid", "bus id", "model"), _gpu_rows(host["gpus"]), fold=False)
    if host["notes"]:
        print()
        print_notes(host["notes"])


def _gpu_rows(gpus: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for gpu in gpus:
        rows.append((str(gpu["index"]), gpu["uuid"], gpu["bus_id"], gpu["name"]))
        rows += [
            (f"{gpu['index']}:{mig['index']}", mig["uuid"], "", f"MIG {mig['profile']}") for mig in gpu["mig_devices"]
        ]
    return rows


@sim_app.command("remove", epilog="\b\nExamples:\n  ocigpu sim remove /tmp/gpus\n")
def remove_command(directory: DirectoryArgument) -> None:
    """Remove a simulated host, and nothing else."""
    from ocigpu.sim.remove import remove_host

    remove_host(directory)
    print(f"removed {printable(directory)}")
