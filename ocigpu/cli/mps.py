"""``ocigpu mps-control-daemon``: GPUs that pods share by CUDA's Multi-Process Service."""

import os

import typer

from ocigpu.cli.common import ConfigOption, load_settings


def mps_command(
    context: typer.Context,
    shm_size: str = "50%",
    config: ConfigOption = "",
    json: bool = False,
) -> None:
    from ocigpu.kubernetes.loading import parse_flags
    from ocigpu.kubernetes.mps_control import check_size
    from ocigpu.kubernetes.mps_supervisor import Supervisor
    from ocigpu.system.service import ServiceLog

    check_size(shm_size)
    told = parse_flags(context.args, os.environ, "mps-control-daemon")
    Supervisor(load_settings(config), told, os.environ, shm_size, ServiceLog(json)).run()
