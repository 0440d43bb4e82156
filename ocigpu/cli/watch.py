"""``ocigpu watch``: the CDI specification follows the host."""

from typing import TYPE_CHECKING, Annotated

import typer

from ocigpu.cdi.refresh import DEFAULT_OUTPUT
from ocigpu.cli.cdi_options import GenerateRequest, takes_generate_options
from ocigpu.cli.cdi_output import check_output

if TYPE_CHECKING:
    from collections.abc import Callable

    from ocigpu.cdi.watch import Watch

WATCH_EPILOG = """\
\b
A failure is logged once and tried again, at most a minute apart; the file stays as it was.
With --repair, which needs root, the device rules of all running containers are
compared at the same interval with those of before (of cgroup v1 the list, of v2 the
numbers of the programs); where they were set anew, what was lost is given back and
logged. A container that does not answer is given up after half a minute.
It ends with exit status 0 at SIGTERM or Ctrl-C. Units of systemd: ocigpu-watch.service, and
ocigpu-repair.service, which has the rights that --repair needs.

\b
Examples:
  ocigpu watch
  ocigpu watch --output /etc/cdi/nvidia.yaml --interval 30
  ocigpu watch --repair
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
    repair: Annotated[
        bool, typer.Option("--repair", help="Also give running containers back what they lose; see ocigpu repair.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print each line of the log as a JSON object.")] = False,
) -> None:
    """Keep a CDI specification up to date: write it again when GPUs, MIG devices, the driver or nodes change."""
    from ocigpu.cdi.watch import Watch

    check_output(output)
    watch = Watch(request.options, request.settings, output, json)
    watch.run(interval, _keeper(watch) if repair else None)


def _keeper(watch: "Watch") -> "Callable[[], None]":
    from ocigpu.containers.find import default_places
    from ocigpu.containers.live import require_root
    from ocigpu.containers.repair import GrantKeeper

    require_root("watch --repair")
    return GrantKeeper(default_places(), watch.settings, watch.log).look
