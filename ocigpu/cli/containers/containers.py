"""Commands about containers that exist: ``ocigpu ps``, ``verify``, ``attach``, ``detach``, ``repair``, ``diff``."""

import functools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ocigpu.cli.front import show
from ocigpu.cli.front.common import load_facts, load_settings
from ocigpu.cli.front.of_users import ask_owners, print_of_user, refuse_rootless
from ocigpu.core.errors import HostError, OcigpuError, UsageError, printable, quoted
from ocigpu.core.facts import HostFacts, to_data
from ocigpu.core.settings import MODES, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from ocigpu.containers.attach import Changed
    from ocigpu.containers.believed import Container
    from ocigpu.containers.find import Places
    from ocigpu.containers.live import Live
    from ocigpu.containers.report import Report
    from ocigpu.containers.usage import User
    from ocigpu.containers.users import OfUser
    from ocigpu.containers.verify import Verified

HOW_TO_ASK = "GPUs come with the runtime ocigpu (a pod's runtimeClassName, docker run --runtime, podman --runtime)"

REFUSED = "requested, refused by settings"

STATUS = {"as granted": 0, "less": 3, "more": 4}
"""Exit status of ``ocigpu verify``."""
DIFFERENT = 3
"""Exit status of ``ocigpu diff --exit-code`` when there is a difference: 1 means that the command failed."""


def ps_command(all_: bool = False, state_dir: list[str] | None = None, config: str = "") -> "show.Answer":
    from ocigpu.containers.find import find_containers
    from ocigpu.containers.report import make_reports

    facts, notes = facts_or_note(config)
    containers, unreadable = find_containers(places_of(state_dir))
    if os.geteuid():
        notes.append("not root: containers of other users are not seen")
    chosen = [container for container in containers if all_ or container.pid]
    reports = make_reports(chosen, facts, load_settings(config))
    reports = [report for report in reports if all_ or report.gpus or report.unanswered or report.refused]
    others = []
    if not os.geteuid() and not state_dir:
        from ocigpu.containers.users import find_of_users

        found, more = find_of_users(facts, load_settings(config))
        notes += more
        others = [one for one in found if all_ or (one.pid and (one.gpus or one.unanswered or one.refused))]
    names = ("gpu", "uuid", "state")
    yield lambda: {
        "simulated": facts.simulated,
        "containers": [report_to_json(report) for report in reports],
        "of_users": [
            one._asdict() | {"gpus": [dict(zip(names, gpu, strict=True)) for gpu in one.gpus]} for one in others
        ],
        "notes": [*notes, *unreadable],
    }
    if facts.simulated:
        print(f"host: {show.host_line(facts)}")
    if reports:
        show.table(
            ("container", "engine", "status", "pid", "mode", "gpu", "uuid", "model", "state"),
            [row for report in reports for row in _rows(report)],
            fold=False,
        )
    else:
        what = "container" if all_ else "running container with a GPU"
        print(f"no {what} ({show.count(len(containers), 'container')} found)")
    if others:
        print("\nof other users, by their own files")
        rows = [
            (one.user, one.name, one.engine, one.status, one.mode or "-", index, uuid, state or "-")
            for one in others
            for index, uuid, state in one.gpus or (("-", "", _vain(one)),)
        ]
        show.table(("user", "container", "engine", "status", "mode", "gpu", "uuid", "state"), rows, fold=False)
    processes = [
        (shown_name(report.container), str(process.pid), process.command, ", ".join(process.devices))
        for report in reports
        for process in report.processes
    ]
    if processes:
        print()
        show.table(("container", "pid", "command", "holds open"), processes)
    notes += [f"{shown_name(report.container)}: {note}" for report in reports for note in report_notes(report)]
    show.notes([*notes, *unreadable], apart=True)


def places_of(directories: "Sequence[str] | None") -> "Places":
    """Return where to look for containers, for a command's --state-dir options."""
    from ocigpu.containers.find import default_places

    return default_places(tuple(directories or ()))


def facts_or_note(config: str) -> tuple[HostFacts, list[str]]:
    """Return the facts of the host; without a driver empty ones, and a note that says so."""
    try:
        return load_facts(load_settings(config)), []
    except HostError as error:
        return HostFacts(), [f"{error.message}: which devices are GPUs is not known"]


def shown_name(one: "Container | User") -> str:
    """Return a container's name, with the beginning of an engine's long id; what uses a GPU outside has none."""
    return one.name if one.id in (one.name, "") else f"{one.id[:12]} {one.name}"


def how_to_ask(report: "Report") -> str:
    """Return what gives a container the GPUs that it requested in vain."""
    if report.container.engine == "docker" and report.mode in ("hook", "vendor"):  # docker run --gpus
        return "its hook gave it none: ocigpu engine configure docker --gpus-hook"
    return HOW_TO_ASK


def report_notes(report: "Report") -> list[str]:
    """Return what to say of a container beside its GPUs."""
    notes = list(report.notes)
    if report.lost:
        notes.insert(0, f"lost: the device cgroup refuses {', '.join(report.lost)} (ocigpu repair)")
    if report.unanswered:
        notes.append(f"requested, not granted: {report.unanswered}; {how_to_ask(report)}")
    if report.refused:
        notes.append(f"{REFUSED}: {report.refused}")
    if report.attached:
        notes.append(f"attached after its start: {', '.join(report.attached)}")
    if report.beyond:
        notes.append(f"its device cgroup allows more than it was granted: {', '.join(report.beyond)}")
    return notes


def report_to_json(report: "Report") -> dict[str, object]:
    """Return a report as JSON data: the fields of the container, then those of the report."""
    data: dict[str, object] = to_data(report)
    return {**to_data(data.pop("container")), **data}


def _vain(one: "Report | OfUser") -> str:
    """Return what to say of a container that has no GPU."""
    return "requested, not granted" if one.unanswered else REFUSED if one.refused else ""


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
    first, *more = gpus or [("-", "", "", _vain(report))]
    return [(*head, *first), *(("", "", "", "", "", *gpu) for gpu in more)]


@contextmanager
def _open(what: str, container: str, state_dir: list[str] | None, config: str) -> "Iterator[tuple[Live, HostFacts]]":
    """Open a running container for a command that needs root."""
    from ocigpu.containers.live import open_live, require_root

    if os.geteuid() and not state_dir:
        refuse_rootless(what, container)
    require_root(what)
    settings = load_settings(config)
    found = _find_of_root(what, container, state_dir)
    facts = load_facts(settings)
    with open_live(found, settings, facts) as live:
        yield live, facts


def _find_of_root(what: str, container: str, state_dir: list[str] | None) -> "Container":
    """Return a container of root; raises OcigpuError, in words for a rootless one."""
    from ocigpu.containers.find import find_container

    try:
        return find_container(places_of(state_dir), container)
    except OcigpuError as error:
        if error.code == "OCIGPU-CTR-1" and not state_dir:
            refuse_rootless(what, container, error)
        raise


def verify_command(container: str, state_dir: list[str] | None = None, config: str = "") -> "show.Answer":
    from ocigpu.containers.verify import to_json, verify

    with _open("verify", container, state_dir, config) as (live, facts):
        verified = verify(live)
    found = live.found
    yield {"container": found.id, "name": found.name, **to_json(verified)}, STATUS[verified.verdict]
    show.fields(
        [
            ("container", f"{found.name} ({found.id})" if found.name != found.id else found.id),
            ("host", show.host_line(facts)),
            ("granted", ", ".join(verified.grant.devices) or "no GPU"),
            ("by", verified.grant.by),
            *([("requested, not granted", verified.unanswered)] if verified.unanswered else []),
            *([(REFUSED, verified.refused)] if verified.refused else []),
        ]
    )
    print()
    _print_rows(verified)


def _print_rows(verified: "Verified") -> None:
    rows = [row for row in verified.nodes if not row.is_dull or row.what.startswith(("GPU", "control"))]
    headers = ("device", "node", "number", "granted", "inside", "opened", "made and opened", "verdict")
    fields = ("what", "path", "number", "granted", "inside", "opened", "made", "verdict")
    show.table(headers, [[getattr(row, name) or "-" for name in fields] for row in rows])
    hidden = len(verified.nodes) - len(rows)
    if hidden:
        what = f"{show.count(hidden, 'device')} (MIG capabilities, IMEX channels and the like)"
        print(f"and {what}: not granted, not reached")
    print()
    granted = [row for row in verified.libraries if row.granted]
    right = sum(row.verdict == "as granted" for row in granted)
    if granted:
        total = f"{right} of {show.count(len(granted), 'granted library')}".replace("librarys", "libraries")
        print(f"{total} are the host's files, of driver {verified.version}")
    wrong = [row for row in verified.nodes if row.why]
    problems = [f"{row.what} ({row.number}): {row.why}" for row in wrong]
    problems += [f"{row.name}: {row.why}" for row in verified.libraries if row.why]
    if verified.unanswered:
        problems.insert(0, f"requested, not granted: {verified.unanswered}; {HOW_TO_ASK}")
    for text in problems:
        print(f"not as granted: {printable(text)}")
    print(f"verdict: {printable(verified.verdict)}")


def attach_command(
    container: str, gpu: list[str], state_dir: list[str] | None = None, config: str = ""
) -> "show.Answer":
    from ocigpu.containers.attach import attach

    with _open("attach and detach", container, state_dir, config) as (live, facts):
        changed = attach(live, gpu)
    yield from _show_changed(live, facts, changed, "attached", "already there")


def detach_command(
    container: str, gpu: list[str], force: bool = False, state_dir: list[str] | None = None, config: str = ""
) -> "show.Answer":
    from ocigpu.containers.attach import detach

    with _open("attach and detach", container, state_dir, config) as (live, facts):
        changed = detach(live, gpu, force)
    yield from _show_changed(live, facts, changed, "detached", "not there")


def _show_changed(live: "Live", facts: HostFacts, changed: "Changed", done: str, before: str) -> "show.Answer":
    from ocigpu.containers.attach import describe_holders

    notes = list(changed.notes)
    if changed.held:
        notes.append(f"{describe_holders(changed.held)}: that stays usable until it is closed")
    data = to_data(changed)
    yield {"container": live.found.id, done: data.pop("changed"), **data, "notes": notes}
    names, name = device_names(facts), printable(live.found.name)
    for uuid in changed.changed:
        print(f"{name}: {names[uuid]} {done}")
    for uuid in changed.already:
        print(f"{name}: {names[uuid]} is {before}: nothing was changed")
    show.notes(notes)


def device_names(facts: HostFacts) -> dict[str, str]:
    """Return what to call GPUs and MIG devices, by UUID: "GPU 3 (GPU-...)"."""
    names = {gpu.uuid: f"GPU {gpu.index} ({gpu.uuid})" for gpu in facts.gpus}
    migs = ((gpu, mig) for gpu in facts.gpus for mig in gpu.mig_devices)
    return names | {mig.uuid: f"MIG {gpu.index}:{mig.index} ({mig.uuid})" for gpu, mig in migs}


def repair_command(
    container: str = "",
    all_: bool = False,
    dry_run: bool = False,
    state_dir: list[str] | None = None,
    config: str = "",
) -> "show.Answer":
    from ocigpu.containers.find import find_containers
    from ocigpu.containers.live import open_live, require_root
    from ocigpu.containers.repair import Repaired, repair

    if bool(container) == all_:
        raise UsageError("name one container, or give --all")
    if container and os.geteuid() and not state_dir:
        refuse_rootless("repair", container)
    require_root("repair")
    settings = load_settings(config)
    places = places_of(state_dir)
    found, unread = ([_find_of_root("repair", container, state_dir)], []) if container else find_containers(places)
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
    left = any(row["lost"] and not row["done"] for row in rows)
    yield {"containers": rows, "notes": unread}, 1 if failed else 3 if left else 0
    for row in rows:
        name = printable(row["name"])
        for text in row["lost"]:
            print(f"{name}: {'restored' if row['done'] else 'lost'}: {printable(text)}")
        if row["right"]:
            print(f"{name}: {'before: ' if row['lost'] else 'nothing is lost: '}{printable(', '.join(row['right']))}")
        show.notes(row["notes"])
    if not rows:
        print("no container runs")
    show.notes(unread)


def diff_command(
    target: str,
    runtime_mode: str = "",
    exit_code: bool = False,
    state_dir: list[str] | None = None,
    config: str = "",
) -> "show.Answer":
    settings = load_settings(config)
    if runtime_mode and runtime_mode not in MODES:
        raise UsageError(f"--runtime-mode {quoted(runtime_mode)}: modes are {', '.join(sorted(set(MODES.values())))}")
    settings = settings._replace(mode=runtime_mode) if runtime_mode else settings

    read = functools.cache(lambda: load_facts(settings))

    def look(places: "Places") -> "tuple[str, dict[str, Any]]":
        return _compare(target, places, settings, bool(runtime_mode), read)

    try:
        text, data = look(places_of(state_dir))
        user = ""
    except OcigpuError as error:
        if error.code != "OCIGPU-CTR-1" or os.geteuid() or state_dir:
            raise
        with suppress(OcigpuError):  # while it is root who reads them
            read()
        user, text, data = ask_owners(look, error)
    yield lambda: data | ({"user": user} if user else {}), DIFFERENT if exit_code and data["changes"] else 0
    if user:
        print_of_user(user, text)
    else:
        show.diff(text.split("\n") if text else [])
    for note in data["notes"]:
        print(f"note: {printable(note)}", file=sys.stderr)


def _compare(
    target: str, places: "Places", settings: "Settings", has_mode: bool, read: "Callable[[], HostFacts]"
) -> tuple[str, dict[str, Any]]:
    """Return what the shim changed of a container's or bundle's config.json, or would, as a diff and as JSON data."""
    import difflib

    from ocigpu.containers.difference import find_original, list_changes
    from ocigpu.containers.find import find_target, open_root
    from ocigpu.containers.planned import edit_copy, plan_bundle
    from ocigpu.core.actions import RefreshLdCache

    bundle, document, container = find_target(target, places)
    original = find_original(document.config, settings, bundle)
    edited, how, notes = document.config, original.mode, list(original.notes)
    would_be = has_mode or not original.mode
    if would_be:
        with open_root(container) as place:
            planned = plan_bundle(original.config, bundle, settings, read, place)
        edited, how = edit_copy(original.config, bundle, settings, planned), planned.mode
        notes += planned.request.notes
        if planned.plan is not None and planned.mode == "hook":  # what the hook makes is not in config.json
            notes += [action.reason for action in planned.plan.actions if isinstance(action, RefreshLdCache)]
        notes += [f"mode hook, not spec: {planned.why_hook}"] if planned.why_hook else []
        notes += [] if planned.mode else ["the container requests nothing: its config.json stays as it is"]
    unused = {"add": "old", "remove": "new", "replace": ""}
    changes = [
        {name: value for name, value in change._asdict().items() if name != unused[change.op]}
        for change in list_changes(original.config, edited)
    ]
    name = f"{document.path} ({'would be ' if would_be else ''}edited, mode {how})"
    before, after = (json.dumps(config, indent=2).splitlines() for config in (original.config, edited))
    lines = difflib.unified_diff(before, after, f"{document.path} (original)", name, lineterm="")
    data = {"file": document.path, "mode": how, "edited": not would_be, "changes": changes, "notes": notes}
    return "\n".join(lines), data
