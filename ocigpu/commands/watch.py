"""``ocigpu watch``: the CDI specification follows the host."""

from typing import Annotated

import typer

from ocigpu.cdi.refresh import DEFAULT_OUTPUT
from ocigpu.commands.cdi_options import GenerateRequest, takes_generate_options
from ocigpu.commands.cdi_output import check_output

WATCH_EPILOG = """\
\b
A failure is logged once and tried again, at most a minute apart; the file stays as it was.
It ends with exit status 0 at SIGTERM or Ctrl-C. systemd: packaging/systemd/ocigpu-watch.service.

\b
Examples:
  ocigpu watch
  ocigpu watch --output /etc/cdi/nvidia.yaml --interval 30
"""


@takes_generate_options
def watch_command(
    request: GenerateRequest,
    output: Annotated[
        str,
        typer.Option("--output", metavar="FILE", envvar="NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", help="File to keep."),
    ] = DEFAULT_OUTPUT,
    interval: Annotated[
        float,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=0.1,
            max=86400.0,
            help="How often to look for changes that the kernel does not announce, as those of MIG devices.",
        ),
    ] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Print each line of the log as a JSON object.")] = False,
) -> None:
    """Keep a CDI specification up to date: write it again when GPUs, MIG devices, the driver or nodes change."""
    from ocigpu.watch import Watch

    check_output(output)
    Watch(request.options, request.settings, output, json).run(interval)
