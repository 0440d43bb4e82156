"""``ocigpu verify``: what a running container can reach of the host's GPUs, tried from inside."""

from typing import TYPE_CHECKING, Annotated

import typer

from ocigpu.cli.common import (
    ConfigOption,
    JsonOption,
    count,
    host_line,
    load_facts,
    load_settings,
    print_fields,
    print_json,
    print_table,
)
from ocigpu.cli.ps import RootsOption

if TYPE_CHECKING:
    from ocigpu.containers.verify import Verified


_STATUS = {"as granted": 0, "less": 3, "more": 4}

ContainerArgument = Annotated[
    str, typer.Argument(metavar="CONTAINER", help="Its id, the beginning of that, or its name; see ocigpu ps.")
]


def verify_command(
    container: ContainerArgument,
    root: RootsOption = None,
    config: ConfigOption = "",
    json: JsonOption = False,
) -> None:
    from ocigpu.containers.find import default_places, find_container
    from ocigpu.containers.live import open_live, require_root
    from ocigpu.containers.verify import to_json, verify

    require_root("verify")
    settings = load_settings(config)
    found = find_container(default_places(tuple(root or ())), container)
    facts = load_facts(settings)
    with open_live(found, settings, facts) as live:
        verified = verify(live)
    if json:
        print_json({"container": found.id, "name": found.name, **to_json(verified)})
    else:
        print_fields(
            [
                ("container", f"{found.name} ({found.id})" if found.name != found.id else found.id),
                ("host", host_line(facts)),
                ("granted", ", ".join(verified.grant.devices) or "no GPU"),
                ("by", verified.grant.by),
                *([("asked, not given", verified.unanswered)] if verified.unanswered else []),
            ]
        )
        print()
        _print_rows(verified)
    raise typer.Exit(_STATUS[verified.verdict])


def _print_rows(verified: "Verified") -> None:
    rows = [row for row in verified.nodes if not row.is_dull or row.what.startswith(("GPU", "control"))]
    headers = ("device", "node", "number", "granted", "inside", "opened", "made and opened", "verdict")
    print_table(
        headers,
        [
            (row.what, row.path, row.number, row.granted, row.inside or "-", row.opened or "-", row.made, row.verdict)
            for row in rows
        ],
    )
    hidden = len(verified.nodes) - len(rows)
    if hidden:
        print(f"and {count(hidden, 'device')} (MIG capabilities, IMEX channels and the like): not granted, not reached")
    print()
    granted = [row for row in verified.libraries if row.granted]
    right = sum(row.verdict == "as granted" for row in granted)
    if granted:
        total = f"{right} of {count(len(granted), 'granted library')}".replace("librarys", "libraries")
        print(f"{total} are the host's files, of driver {verified.version}")
    wrong = [row for row in verified.nodes if row.why]
    problems = [f"{row.what} ({row.number}): {row.why}" for row in wrong]
    problems += [f"{row.name}: {row.why}" for row in verified.libraries if row.why]
    for text in problems:
        print(f"not as granted: {text}")
    print(f"verdict: {verified.verdict}")
