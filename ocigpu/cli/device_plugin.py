"""``ocigpu device-plugin``."""

import os

from ocigpu.cli.common import ConfigOption, load_settings
from ocigpu.core.errors import HostError, UsageError

INSTALL = (
    "Install it into a virtual environment: pip install 'ocigpu[kubernetes]'; the deb and rpm packages are without it,"
    " packaging/kubernetes/Containerfile makes an image that has it"
)


def device_plugin_command(
    words: list[str] | None = None,
    config: ConfigOption = "",
    log_format: str = "text",
) -> None:
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
