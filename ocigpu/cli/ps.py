"""``ocigpu ps``: the containers of this host that have GPUs, and the processes in them that use GPUs."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ocigpu.cli.common import (
    ConfigOption,
    JsonOption,
    count,
    host_line,
    load_facts,
    load_settings,
    print_json,
    print_notes,
    print_table,
)
from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts, to_data

if TYPE_CHECKING:
    from ocigpu.containers.believed import Container
    from ocigpu.containers.find import Places
    from ocigpu.containers.report import Report


HOW_TO_ASK = "GPUs come with the runtime ocigpu (a pod's runtimeClassName, docker run --runtime, podman --runtime)"

RootsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--root",
        metavar="DIR",
        help="State directory of runc or crun to look in instead of the usual ones; can be repeated.",
    ),
]


def ps_command(
    all_: bool = False,
    root: RootsOption = None,
    config: ConfigOption = "",
    json: JsonOption = False,
) -> None:
    from ocigpu.containers.find import find_containers
    from ocigpu.containers.report import make_reports

    facts, notes = facts_or_note(config)
    containers, unreadable = find_containers(places_of(root))
    if os.geteuid():
        notes.append("not root: containers of other users are not seen")
    chosen = [container for container in containers if all_ or container.pid]
    reports = make_reports(chosen, facts, load_settings(config))
    reports = [report for report in reports if all_ or report.gpus or report.unanswered]
    if json:
        data = [report_to_json(report) for report in reports]
        print_json({"simulated": facts.simulated, "containers": data, "notes": [*notes, *unreadable]})
        return
    if facts.simulated:
        print(f"host: {host_line(facts)}")
    if reports:
        print_table(
            ("container", "engine", "status", "pid", "mode", "gpu", "uuid", "model", "state"),
            [row for report in reports for row in _rows(report)],
            fold=False,
        )
    else:
        print(f"no {'container' if all_ else 'running container with a GPU'}, of {count(len(containers), 'container')}")
    processes = [
        (shown_name(report.container), str(process.pid), process.command, ", ".join(process.devices))
        for report in reports
        for process in report.processes
    ]
    if processes:
        print()
        print_table(("container", "pid", "command", "holds open"), processes)
    notes += [f"{shown_name(report.container)}: {note}" for report in reports for note in report_notes(report)]
    if notes or unreadable:
        print()
        print_notes([*notes, *unreadable])


def places_of(roots: "Sequence[str] | None") -> "Places":
    """Return where to look for containers, for a command's --root options."""
    from ocigpu.containers.find import default_places

    return default_places(tuple(roots or ()))


def facts_or_note(config: str) -> tuple[HostFacts, list[str]]:
    """Return the facts of the host; without a driver empty ones, and a note that says so."""
    try:
        return load_facts(load_settings(config)), []
    except HostError as error:
        return HostFacts(), [f"{error.message}: which devices are GPUs is not known"]


def shown_name(container: "Container") -> str:
    """Return a container's name, with the beginning of an engine's long id."""
    short = container.id[:12]
    return container.name if container.name == container.id else f"{short} {container.name}"


def report_notes(report: "Report") -> list[str]:
    """Return what to say of a container beside its GPUs."""
    notes = list(report.notes)
    if report.lost:
        notes.insert(0, f"lost: the device cgroup refuses {', '.join(report.lost)} (ocigpu repair)")
    if report.unanswered:
        notes.append(f"asked, not given: {report.unanswered}; {HOW_TO_ASK}")
    if report.attached:
        notes.append(f"attached after its start: {', '.join(report.attached)}")
    if report.beyond:
        notes.append(f"its device cgroup allows more than it was granted: {', '.join(report.beyond)}")
    return notes


def report_to_json(report: "Report") -> dict[str, object]:
    """Return a report as JSON data: the fields of the container, then those of the report."""
    data: dict[str, object] = to_data(report)
    return {**to_data(data.pop("container")), **data}


def _rows(report: "Report") -> list[tuple[str, ...]]:
    container = report.container
    head = (
        shown_name(container),
        container.engine or container.runtime,
        container.status,
        str(container.pid or "-"),
        report.mode or "-",
    )
    gpus = [(gpu.mig or str(gpu.index), gpu.uuid, gpu.model, gpu.state or "-") for gpu in report.gpus]
    first, *more = gpus or [("-", "", "", "asked, not given" if report.unanswered else "")]
    return [(*head, *first), *(("", "", "", "", "", *gpu) for gpu in more)]
