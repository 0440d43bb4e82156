"""``ocigpu mps-control-daemon``: GPUs that pods share by CUDA's Multi-Process Service."""

import os
from typing import Annotated

import typer

from ocigpu.cli.common import ConfigOption, load_settings

MPS_EPILOG = """\
\b
It reads the device plugin's configuration file and serves what its sharing.mps names:
GPUs in compute mode EXCLUSIVE_PROCESS, a control daemon for each resource, equal limits
of memory and threads for its clients, and a tmpfs that they have as /dev/shm. Only when
the limits are set the file .ready is made, and only then the device plugin offers the
resource. At SIGTERM all of that is taken back. Needs root with CAP_SYS_ADMIN.
A daemon that ends is started again, at most a minute apart. A changed file and SIGHUP
are followed; clients of a daemon whose limits change are ended.

\b
Options and variables of the device plugin that count here:
  --config-file FILE         CONFIG_FILE
  --mps-root DIR             MPS_ROOT; /mps where that is a directory, as in a pod
  --mig-strategy NAME        MIG_STRATEGY
  --driver-root DIR          NVIDIA_DRIVER_ROOT
  --dev-root DIR             NVIDIA_DEV_ROOT
  --driver-root-ctr-path DIR DRIVER_ROOT_CTR_PATH
  --fail-on-init-error       end without a driver, instead of waiting for it
  --device-discovery-strategy NAME

\b
Exit status: 0 told to end; 1 the configuration is wrong, or there is no driver and it was
told to end then; 2 wrong command line.

\b
Examples:
  ocigpu mps-control-daemon --config-file /etc/ocigpu/plugin.yaml --mps-root /run/nvidia/mps
  MPS_ROOT=/run/nvidia/mps ocigpu mps-control-daemon --config-file plugin.yaml --shm-size 8g
"""
OPTION_NAMES = (
    "mps_root",
    "mig_strategy",
    "driver_root",
    "dev_root",
    "container_driver_root",
    "fail_on_init_error",
    "device_discovery_strategy",
)


def mps_command(
    context: typer.Context,
    shm_size: Annotated[
        str, typer.Option("--shm-size", metavar="SIZE", help="Of each resource's /dev/shm: 8g, or 50% of the memory.")
    ] = "50%",
    config: ConfigOption = "",
    json: Annotated[bool, typer.Option("--json", help="Print each line of the log as a JSON object.")] = False,
) -> None:
    """Run the control daemons of MPS for the resources that the device plugin shares by it."""
    from ocigpu.kubernetes.config import OPTIONS
    from ocigpu.kubernetes.loading import parse_flags
    from ocigpu.kubernetes.mps_control import check_size
    from ocigpu.kubernetes.mps_supervisor import Supervisor
    from ocigpu.system.service_log import ServiceLog

    check_size(shm_size)
    options = [option for option in OPTIONS if option.name in OPTION_NAMES]
    told = parse_flags(context.args, os.environ, options, "mps-control-daemon")
    Supervisor(load_settings(config), told, os.environ, shm_size, ServiceLog(json)).run()
