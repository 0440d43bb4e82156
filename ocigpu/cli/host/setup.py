"""``ocigpu setup``: from an installed package to a container with GPUs in one command, and back.

It has no policy of its own: what it does is ``doctor --fix``, ``engine configure``, a restart and ``engine test``.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ocigpu.cli.engines.configure import (
    UNCONFIRMED,
    EngineWork,
    carry_out_work,
    known_engine,
    plan_works,
    print_notes,
    print_works,
    step_of,
    work_data,
)
from ocigpu.cli.front import show
from ocigpu.cli.front.common import load_facts, load_settings, settings_path
from ocigpu.core.codes import CODES
from ocigpu.core.errors import HostError, OcigpuError, UsageError, printable
from ocigpu.core.vendors import VENDORS
from ocigpu.engines.places import BOOTED

if TYPE_CHECKING:
    from ocigpu.cli.engines.try_engine import Result
    from ocigpu.core.facts import HostFacts
    from ocigpu.doctor.findings import Finding
    from ocigpu.doctor.host import Host

NO_GPU = (
    "Install the driver: ocigpu doctor says what is missing. No GPU? Simulate one:"
    " ocigpu sim create /opt/gpus --gpus 1 && install -D -m 644 /opt/gpus/config.toml /etc/ocigpu/config.toml"
)
FAILED = 4
"""Exit status when a container has not what the plan says, or none could be started."""
READY_SECONDS = 60
"""How long a restarted engine may take until it answers."""


class Restart(NamedTuple):
    """What makes an engine use its new files: ``stopped`` names the running containers that it stops."""

    engine: str
    command: str
    stopped: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The command, with what it costs."""
        if not self.stopped:
            return self.command
        return f"{self.command}   (stops {show.count(len(self.stopped), 'running container')})"

    @property
    def data(self) -> dict[str, Any]:
        """The command as JSON data, not yet carried out."""
        return {"command": self.command, "stops": list(self.stopped), "status": None}


def setup_command(
    engine: str = "", yes: bool = False, dry_run: bool = False, undo: bool = False, json: bool = False, config: str = ""
) -> int:
    named = known_engine(engine)
    if json and not (yes or dry_run):
        raise UsageError("--json asks nothing: it needs --yes or --dry-run")
    return _undo(named, yes, dry_run, json) if undo else _set_up(named, yes, dry_run, json, config)


def _set_up(named: str, yes: bool, dry_run: bool, json: bool, config: str) -> int:
    from ocigpu.cli.engines.configure import plan_targets
    from ocigpu.cli.engines.try_engine import data_of, print_results
    from ocigpu.doctor.report import exit_status, render
    from ocigpu.engines.configure import plan_configuration

    try:
        facts = load_facts(load_settings(config))
    except HostError as error:
        if error.hint != CODES["OCIGPU-HOST-1"].fix:  # the usual one: nothing more is known
            raise
        raise HostError(error.code, error.message, NO_GPU) from error
    host, findings = _examine(config)
    if not json:
        lines = list(render(host, findings))
        show.report(lines[:3] if facts.gpus else lines)
    if not facts.gpus:
        raise HostError("OCIGPU-HOST-1", "this host shows no GPU that a container could use", NO_GPU)
    fixes = [item for item in findings if item.safe and not item.safe[0].startswith("ocigpu engine ")]
    if not json:
        _print_fixes(fixes)
    targets, notes = plan_targets(named)
    works = plan_works(targets, plan_configuration, show_diff=not json)
    if named and works[0].error:
        raise works[0].error
    restarts = plan_restarts(works, findings)
    if not json:
        _print_plan(works, named, notes, restarts)
    stays = dry_run or not _agree(works, restarts, fixes, yes)
    commands = [one.data for one in restarts]
    results: list[Result] = []
    left: list[str] = []
    if not stays:
        commands = [_fix(item, json) for item in fixes]
        works, restarted = _carry_out(works, restarts)
        commands += restarted
        results, left = _try(named, works, config)
        host, findings = _examine(config)
    passed = bool(results) and all(result.passed for result in results)
    status = result_status(works, stays, dry_run, passed)
    if json:
        shown = data_of(results, facts, [*notes, *left])
        more = {"commands": commands, "left": [item.name for item in findings if item.is_bad]}
        show.data({**shown, "passed": passed, "dry_run": stays, "engines": [work_data(work) for work in works], **more})
        return status
    if stays:
        _print_nothing(dry_run)
        return status
    print_works(works, undone=False)
    print()
    if results:
        print_results(results, facts, [])
    show.notes(left)
    _print_line(results, facts)
    if exit_status(findings):
        print("\nRemaining findings:")
        show.report([*render(host, findings)][3:])
    return status


def _undo(named: str, yes: bool, dry_run: bool, json: bool) -> int:
    from ocigpu.cli.engines.configure import find_targets
    from ocigpu.engines.remove import plan_removal
    from ocigpu.engines.wanted import Wanted

    targets, notes = find_targets(named, Wanted("", "", False, False), "/", "", "")
    works = plan_works(targets, plan_removal, show_diff=not json)
    if named and works[0].error:
        raise works[0].error
    restarts = plan_restarts(works, [])
    if not json:
        _print_plan(works, named, notes, restarts)
    stays = dry_run or not _agree(works, restarts, (), yes)
    commands = [one.data for one in restarts]
    if not stays:
        works, commands = _carry_out(works, restarts)
    if json:
        show.data({"dry_run": stays, "engines": [work_data(work) for work in works], "commands": commands})
    elif stays:
        _print_nothing(dry_run)
    else:
        print_works(works, undone=False)
        show.notes(f"{path} stays: engines read it for CDI devices; if nothing uses it: rm {path}" for path in _specs())
    status = result_status(works, stays, dry_run, passed=True)
    return 1 if not stays and any(one["status"] for one in commands) else status


def _specs() -> list[str]:
    """Return the files of this machine's CDI specifications of GPUs; early versions do not name their maker."""
    from ocigpu.doctor.host import Host

    return [file.path for file in Host().specs.gpus]


def result_status(works: Sequence[EngineWork], stays: bool, dry_run: bool, passed: bool) -> int:
    if any(work.error for work in works):
        return 1
    if stays:
        return 0 if dry_run else UNCONFIRMED
    return 0 if passed else FAILED


def _examine(config: str) -> "tuple[Host, list[Finding]]":
    from ocigpu.doctor.host import Host
    from ocigpu.doctor.report import run_checks

    host = Host("", settings_path(config))
    with show.Progress("checking this machine"):
        return host, run_checks(host)


# what is to be done


def _agree(works: Sequence[EngineWork], restarts: Sequence[Restart], fixes: "Sequence[Finding]", yes: bool) -> bool:
    """Ask once; where nothing is to be done there is nothing to ask."""
    needed = fixes or restarts or any(work.changed for work in works)
    return yes or not needed or show.confirm("Do this?")


def plan_restarts(works: Sequence[EngineWork], findings: "Sequence[Finding]") -> list[Restart]:
    """Return the restarts of engines that run and whose files change, and of those that have not read their files."""
    from ocigpu.doctor.engines import engine_of
    from ocigpu.engines.places import KUBERNETES
    from ocigpu.engines.status import find_engines

    running = [one for one in find_engines() if one.running]
    bad = [item for item in findings if item.name in ("docker-not-restarted", "engine-not-restarted") and item.is_bad]
    unread = {engine_of(item): item.fixes for item in bad}
    found = []
    for work in works:
        step = step_of(work) if work.changed else ""
        fixes = unread.get(work.options.engine, ())
        if not step and not work.error and len(fixes) == 1:
            step = fixes[0]
        engine = next((one for one in running if one.name == work.name), None) or next(
            (one for one in running if one.engine == work.name and one.flavour not in KUBERNETES), None
        )
        if not (step and engine):
            continue
        if " (or " in step:  # k3s or its agent
            service = step.split()[2]
            step = f"systemctl restart {service if is_active(service) else f'{service}-agent'}"
        stops = "restart" in step and engine.engine == "docker"
        found.append(Restart(work.name, step, stopped_by_restart() if stops else ()))
    return found


def is_active(service: str) -> bool:
    try:
        return subprocess.run(["systemctl", "--quiet", "is-active", service], check=False).returncode == 0
    except OSError:  # another service manager
        return False


def stopped_by_restart() -> tuple[str, ...]:
    """Return the containers that a restart of dockerd stops: those that run, unless it keeps them (live-restore)."""
    from ocigpu.system.programs import run_program

    try:
        keeps = run_program(["docker", "info", "--format", "{{.LiveRestoreEnabled}}"], READY_SECONDS)
        listed = run_program(["docker", "ps", "--quiet"], READY_SECONDS)
    except OSError:  # no client: nobody starts containers by it
        return ()
    return () if keeps.output.strip() == "true" else tuple(listed.output.split())


# doing it


def _carry_out(
    works: Sequence[EngineWork], restarts: Sequence[Restart]
) -> tuple[list[EngineWork], list[dict[str, Any]]]:
    """Write the files, and restart the engines whose files were written; returns the works and the commands."""
    from ocigpu.engines.files import locked

    with locked():
        done = [carry_out_work(work) for work in works]
    failed = {work.name for work in done if work.error}
    return done, [restart_engine(one) for one in restarts if one.engine not in failed]


def _fix(item: "Finding", json: bool) -> dict[str, Any]:
    from ocigpu.cli.host.doctor import run_fix

    output = sys.stderr if json else None
    status = next((status for line in item.safe if (status := run_fix(line, output=output))), 0)
    return {"command": "; ".join(item.safe), "stops": [], "status": status}


def restart_engine(restart: Restart) -> dict[str, Any]:
    """Carry out a restart and wait until the engine answers; the answer has its exit status."""
    words = shlex.split(restart.command)
    if words[0] == "systemctl" and not os.path.isdir(BOOTED):
        why = f"this machine was not booted with systemd: restart {restart.engine} yourself, then: ocigpu engine test"
        print(printable(f"{restart.engine}: {why}"), file=sys.stderr)
        return {**restart.data, "status": 1}
    sys.stdout.flush()
    with show.Progress(restart.command):
        try:
            status = subprocess.run(words, check=False, stdout=sys.stderr).returncode
        except OSError as error:
            print(printable(f"{restart.engine}: {restart.command}: {error.strerror}"), file=sys.stderr)
            status = 1
        if not status and restart.engine == "docker":
            await_restart(["docker", "version", "--format", "{{.Server.Version}}"])
    return {**restart.data, "status": status}


def await_restart(command: Sequence[str]) -> None:
    """Wait until a command succeeds, or as long as an engine may take; not for a command that is not here."""
    end = time.monotonic() + READY_SECONDS
    try:
        while subprocess.run(command, check=False, capture_output=True).returncode and time.monotonic() < end:
            time.sleep(0.2)
    except OSError:
        return


def _try(named: str, works: Sequence[EngineWork], config: str) -> "tuple[list[Result], list[str]]":
    """Start containers; returns how that went, and what was not tried and why."""
    from ocigpu.cli.engines.try_engine import try_engines

    notes: list[str] = []
    if all(work.error for work in works):
        return [], notes
    settings = load_settings(config)
    try:
        return try_engines(named, settings, load_facts(settings), notes), notes
    except OcigpuError as error:
        return [], [*notes, f"no container was started: {error.line}" + (f" ({error.hint})" if error.hint else "")]


# what is said


def _print_fixes(fixes: "Sequence[Finding]") -> None:
    if fixes:
        print("\nfixes:")
    for item in fixes:
        print(f"  {item.name}: {printable(item.text)}")
        for line in item.safe:
            print(f"      {printable(line, 1000)}")
    print()


def _print_plan(works: Sequence[EngineWork], named: str, notes: Sequence[str], restarts: Sequence[Restart]) -> None:
    print_works(works, undone=True)
    print_notes(works, named, notes)
    if restarts:
        print("then:")
    for one in restarts:
        print(f"  {printable(one.line, 1000)}")


def _print_nothing(dry_run: bool) -> None:
    print("nothing changed" + ("" if dry_run else ": not confirmed (use --yes)"))


def _print_line(results: "Sequence[Result]", facts: "HostFacts") -> None:
    """Print the line that people type, and what nvidia-smi printed in a container that was asked for in that way."""
    good = [result for result in results if result.passed and result.way.startswith(("docker ", "podman "))]
    if good:
        best = next((result for result in good if "--gpus" in result.way), good[0])
        print(f"\nIt works. Try it:\n\n    {typed(best.way, facts.vendors)}\n")
        for line in best.printed.splitlines():
            show.foreign(f"    {line}")


def typed(way: str, vendors: Sequence[str]) -> str:
    """Return the line that people type for a way: with an image of a registry, and removed at its end."""
    names = [VENDORS[vendor][1] for vendor in vendors]
    asked = "--gpus" in way or "--device" in way
    variables = "" if asked else "".join(f" -e {name}=all" for name in names)
    command = "nvidia-smi" if "nvidia" in vendors else "ls /dev/dri"
    return way.replace(" run", " run --rm", 1) + f"{variables} debian {command}"
