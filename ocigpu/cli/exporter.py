"""``ocigpu exporter``."""

import os

from ocigpu.cli.common import ConfigOption, load_settings
from ocigpu.cli.device_plugin import INSTALL
from ocigpu.core.errors import HostError


def exporter_command(
    words: list[str] | None = None,
    config: ConfigOption = "",
    driver_root: str = "",
    print_collectors: bool = False,
) -> None:
    from ocigpu.kubernetes.exporter.collectors import DEFAULTS, write_collectors
    from ocigpu.kubernetes.exporter.options import parse_options

    if print_collectors:
        print(write_collectors(DEFAULTS), end="")
        return
    options = parse_options(words or [], os.environ)
    if options.kubernetes:
        try:
            import ocigpu.kubernetes.exporter.pods  # noqa: F401 - whether it can be
        except ImportError as error:
            cause = f"--kubernetes needs grpcio and protobuf: {error}"
            raise HostError("OCIGPU-KUBE-3", cause, INSTALL) from error
    from ocigpu.kubernetes.exporter.service import ExporterService
    from ocigpu.system.service import ServiceLog

    ExporterService(options, load_settings(config, driver_root), ServiceLog(options.log_format == "json")).run()
