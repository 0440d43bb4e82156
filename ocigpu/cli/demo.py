"""``ocigpu demo``: the options of :mod:`ocigpu.cli.demo_run`."""

from typing import Annotated

import typer


def demo_command(
    gpus: Annotated[int, typer.Option(min=1, max=64)] = 8,
    model: str = "h100",
    devices: str = "",
    runtime: str = "",
    keep: bool = False,
) -> None:

    from ocigpu.cli.demo_run import DemoOptions, run_demo

    run_demo(DemoOptions(gpus=gpus, model=model, devices=devices, runtime=runtime, keep=keep))
