"""``ocigpu sim``: make, show and remove simulated GPU hosts."""

from typing import Annotated

import typer

from ocigpu.commands.common import Progress, count

SIM_EPILOG = """\
\b
Examples:
  ocigpu sim create /tmp/gpus --gpus 8 --model h100
  ocigpu sim create /tmp/mig --gpus 2 --model a100 --mig 0:1g.5gb,2g.10gb --mig 1:7g.40gb
  ocigpu list --config /tmp/gpus/config.toml
  ocigpu sim remove /tmp/gpus
"""

sim_app = typer.Typer(
    help="Simulated GPU hosts: a driver root with real libraries and device nodes, and no GPU behind them.",
    epilog=SIM_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
)


@sim_app.command("create")
def create_command(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where to make it; must not exist or be empty.")],
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", min=0, max=64, help="Number of GPUs.")] = 8,
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
) -> None:
    """Make a simulated host. Needs root for its device nodes, and a C compiler for its libraries."""
    from ocigpu.sim.create import create_host

    with Progress() as progress:
        create_host(directory, gpus, model, mig or [], driver_version, progress=progress)
    path = f"{directory.rstrip('/')}/config.toml"
    print(f"made a simulated host with {count(gpus, 'GPU')} in {directory}")
    print(f"use it:    ocigpu plan --config {path} --gpus all")
    print(f"remove it: ocigpu sim remove {directory}")
