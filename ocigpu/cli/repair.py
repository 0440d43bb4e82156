"""``ocigpu repair``: gives running containers back what they have lost."""

import sys
from typing import Any

import typer

from ocigpu.cli.common import ConfigOption, JsonOption, load_facts, load_settings, print_json, print_notes
from ocigpu.cli.ps import RootsOption
from ocigpu.core.errors import OcigpuError, UsageError, printable


def repair_command(
    container: str = "",
    all_: bool = False,
    dry_run: bool = False,
    root: RootsOption = None,
    config: ConfigOption = "",
    json: JsonOption = False,
) -> None:
    from ocigpu.containers.find import default_places, find_container, find_containers
    from ocigpu.containers.live import open_live, require_root
    from ocigpu.containers.repair import Repaired, repair

    if bool(container) == all_:
        raise UsageError("name one container, or give --all")
    require_root("repair")
    settings = load_settings(config)
    places = default_places(tuple(root or ()))
    found, unread = ([find_container(places, container)], []) if container else find_containers(places)
    facts = load_facts(settings)
    rows: list[dict[str, Any]] = []
    failed = False
    for one in found:
        if all_ and one.status not in ("created", "running"):
            continue
        try:
            with open_live(one, settings, facts) as live:
                repaired = repair(live, dry_run)
        except OcigpuError as error:
            if not all_:
                raise
            failed = True
            repaired = Repaired()
            print(f"{printable(one.name)}: {error.code}: {printable(error.message)}", file=sys.stderr)
        rows.append({"container": one.id, "name": one.name, **repaired._asdict()})
    if json:
        print_json(rows)
    else:
        for row in rows:
            _print(row)
        if not rows:
            print("no container runs")
        print_notes(unread)
    left = any(row["lost"] and not row["done"] for row in rows)
    raise typer.Exit(1 if failed else 3 if left else 0)


def _print(row: dict[str, Any]) -> None:
    name = printable(row["name"])
    for text in row["lost"]:
        print(f"{name}: {'given back' if row['done'] else 'lost'}: {printable(text)}")
    if row["right"]:
        print(f"{name}: {'before: ' if row['lost'] else 'nothing is lost: '}{', '.join(row['right'])}")
    print_notes(row["notes"])
