"""``ocigpu demo``: the options of :mod:`ocigpu.cli.demo_run`."""

from typing import Annotated

import typer

DEMO_EPILOG = """\
\b
Examples:
  ocigpu demo
  ocigpu demo --gpus 4 --model a100 --devices 1,3
  ocigpu demo --keep
"""


def demo_command(
    gpus: Annotated[
        int, typer.Option("--gpus", metavar="N", min=1, max=64, help="GPUs of the simulated host, if one is made.")
    ] = 8,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="GPU model of the simulated host, if one is made.")
    ] = "h100",
    devices: Annotated[
        str,
        typer.Option("--devices", metavar="LIST", help="NVIDIA_VISIBLE_DEVICES of the container.  [default: 0,2]"),
    ] = "",
    runtime: Annotated[
        str, typer.Option("--runtime", metavar="PATH", help="The shim.  [default: ocigpu-runtime beside this program]")
    ] = "",
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the bundle and the simulated host, and say where.")
    ] = False,
) -> None:
    """Run a real container with GPUs and check what it sees, on this machine's GPUs or on a simulated host.

    Without an NVIDIA driver the host is simulated: real device nodes, mounts, libraries and device rules, and no GPU.
    Needs root, and runc or crun. Leaves nothing behind.
    """
    from ocigpu.cli.demo_run import DemoOptions, run_demo

    run_demo(DemoOptions(gpus=gpus, model=model, devices=devices, runtime=runtime, keep=keep))
