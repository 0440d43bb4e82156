"""``ocigpu watch``: the CDI specification follows the host."""

from typing import TYPE_CHECKING, Annotated

from ocigpu.cdi.write import DEFAULT_OUTPUT
from ocigpu.cli.cdi.files import check_output
from ocigpu.cli.cdi.generate import GenerateRequest, newest_for_engines, read_generate_request
from ocigpu.cli.front.arguments import Range, takes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ocigpu.cdi.watch import Watch


@takes(read_generate_request)
def watch_command(
    request: GenerateRequest,
    output: str = DEFAULT_OUTPUT,
    interval: Annotated[float, Range(0.1, 86400.0)] = 5.0,
    repair: bool = False,
    json: bool = False,
) -> None:
    from ocigpu.cdi.watch import Watch

    check_output(output)
    watch = Watch(request.options, request.settings, output, json, newest_for_engines(output, request.settings))
    watch.run(interval, _keeper(watch) if repair else None)


def _keeper(watch: "Watch") -> "Callable[[], None]":
    from ocigpu.containers.find import default_places
    from ocigpu.containers.live import require_root
    from ocigpu.containers.repair import GrantKeeper

    require_root("watch --repair")
    return GrantKeeper(default_places(), watch.settings, watch.log).look
