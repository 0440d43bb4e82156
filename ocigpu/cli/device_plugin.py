"""``ocigpu device-plugin``."""

import os
from typing import Annotated

import typer

from ocigpu.cli.common import ConfigOption, load_settings
from ocigpu.core.errors import HostError, UsageError

DEVICE_PLUGIN_EPILOG = """\
\b
Options of NVIDIA's device plugin, with their meaning there; each has its variable, e.g. MIG_STRATEGY:
  --mig-strategy none|single|mixed         how MIG devices are offered
  --device-list-strategy LIST              envvar, volume-mounts, cdi-annotations, cdi-cri
  --device-id-strategy uuid|index          what devices are called in a container
  --pass-device-specs                      tell the kubelet about device nodes too
  --config-file FILE                       configuration in the vendor's schema; read again when it changes
  --kubelet-socket SOCKET                  where to register; the plugin's sockets are beside it
  --driver-root DIR, --nvidia-driver-root  where the host has the driver's files
  --dev-root DIR, --nvidia-dev-root        where the host has the driver's device nodes
  --driver-root-ctr-path DIR, --container-driver-root
                                           where the plugin's own container has the driver root
  --device-discovery-strategy auto|nvml|vfio
                                           where devices are looked for; tegra is refused
  --shared-devices-allocation-policy distributed|packed
                                           how shared and MIG devices are spread
  --fail-on-init-error                     end when there is no driver; default here: wait for one
  --mps-root DIR                           directory of the host for MPS
  --imex-channel-ids LIST, --imex-required IMEX channels of every container
  --gdrcopy-enabled, --gds-enabled, --mofed-enabled
                                           give these devices too
  --cdi-annotation-prefix TEXT             beginning of annotations that name CDI devices
  --nvidia-cdi-hook-path PROGRAM, --nvidia-ctk-path
                                           program of the hooks in CDI specifications
  --cdi-feature-flags LIST, --cdi-disable-hooks LIST
                                           as with ocigpu cdi generate
\b
Options of our own:
  --vfio-resource NAME                     resource of GPUs for virtual machines (gpu), or model (P_GPU_ALIAS)
  --disabled-health-checks LIST            XIDs that mean nothing, xids or all (DP_DISABLE_HEALTHCHECKS)
  --enabled-health-checks LIST             XIDs that count all the same, or all (DP_ENABLE_HEALTHCHECKS)
\b
A flag comes before its variable, that before the configuration file's key, that before the default.

\b
Exit status:
  0  ended by SIGTERM, SIGINT or SIGQUIT; SIGHUP reads everything anew
  1  the command failed; the message has a code for "ocigpu explain"
  2  the command line could not be understood

\b
Examples:
  ocigpu device-plugin --device-list-strategy cdi-cri
  ocigpu device-plugin --config-file /config/dp.yaml --log-format json
  MIG_STRATEGY=mixed ocigpu device-plugin
"""
INSTALL = (
    "Install it into a virtual environment: pip install 'ocigpu[kubernetes]'; the deb and rpm packages are without it,"
    " packaging/kubernetes/Containerfile makes an image that has it"
)


def device_plugin_command(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="PLUGIN-OPTION", help="Options of the plugin; see below.")
    ] = None,
    config: ConfigOption = "",
    log_format: Annotated[str, typer.Option("--log-format", metavar="text|json", help="Form of the log.")] = "text",
) -> None:
    """Offer this node's GPUs to Kubernetes: a device plugin of the kubelet."""
    if log_format not in ("text", "json"):
        raise UsageError(f'--log-format: "{log_format}" is not one of text, json', "see: ocigpu device-plugin --help")
    try:
        import grpc  # noqa: F401

        from ocigpu.kubernetes.loading import parse_flags
        from ocigpu.kubernetes.plugin import DevicePlugin
    except ImportError as error:
        cause = f"the device plugin needs grpcio and protobuf: {error}"
        raise HostError("OCIGPU-KUBE-3", cause, INSTALL) from error
    told = parse_flags(words or [], os.environ)
    DevicePlugin(told, os.environ, load_settings(config), log_format == "json").run()
