"""``ocigpu setup``: from an installed package to a container with GPUs in one command, and back.

It has no policy of its own: what it does is ``doctor --fix``, ``engine configure``, a restart and ``engine test``.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ocigpu.cli.engines.configure import EngineWork, carry_out_work, known_engine, plan_works, step_of, work_data
from ocigpu.cli.front import show
from ocigpu.cli.front.common import load_facts, load_settings, settings_path
from ocigpu.core.errors import HostError, OcigpuError, UsageError, printable

if TYPE_CHECKING:
    from ocigpu.cli.engines.try_engine import Result
    from ocigpu.doctor.findings import Finding

UNCONFIRMED, FAILED = 3, 4
"""Exit statuses: nobody said yes; a container has not what the plan says, or none could be started."""
BOOTED = "/run/systemd/system"
"""It is there when the machine was booted with systemd (sd_booted(3))."""
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


def setup_command(
    engine: str = "", yes: bool = False, dry_run: bool = False, undo: bool = False, json: bool = False, config: str = ""
) -> int:
    named = known_engine(engine)
    if json and not (yes or dry_run):
        raise UsageError("--json asks nothing: it needs --yes or --dry-run")
    return _undo(named, yes, dry_run, json) if undo else _set_up(named, yes, dry_run, json, config)


def _set_up(named: str, yes: bool, dry_run: bool, json: bool, config: str) -> int:
    from ocigpu.cli.engines.configure import plan_targets
    from ocigpu.doctor.host import Host
    from ocigpu.doctor.report import exit_status, render, run_checks
    from ocigpu.engines.configure import plan_configuration

    def examine() -> "tuple[Host, list[Finding]]":
        host = Host("", settings_path(config))
        with show.Progress("checking this machine"):
            return host, run_checks(host)

    settings = load_settings(config)
    host, findings = examine()
    if not json:
        show.report([*render(host, findings)][:3])
    if not load_facts(settings).gpus:
        if not json:
            show.report([*render(host, findings)][3:])
        raise HostError("OCIGPU-HOST-1", "this host shows no GPU that a container could be given")
    fixes = [item for item in findings if item.safe and not item.safe[0].startswith("ocigpu engine ")]
    if fixes and not json:
        print("\nfixes:")
        for item in fixes:
            print(f"  {item.name}: {printable(item.text)}")
            print("".join(f"      {printable(line, 1000)}\n" for line in item.safe), end="")
    targets, notes = plan_targets(named)
    if not json:
        print()
    works = plan_works(targets, plan_configuration, show_diff=not json)
    if named and works[0].error:
        raise works[0].error
    restarts = _plan_restarts(works)
    stays = dry_run or not _agree(works, restarts, len(fixes), yes, json)
    done: list[dict[str, Any]] = []
    results: list[Result] = []
    if not stays:
        done += [_fix(item, json) for item in fixes]
        works = _carry_out(works)
        done += [_restart(one) for one in restarts if not _failed(works, one.engine)]
        results = _try(named, works, config, notes)
        host, findings = examine()
    passed = bool(results) and all(result.passed for result in results)
    status = 0 if dry_run or passed else UNCONFIRMED if stays else FAILED
    if json:
        data = {
            "ready": passed,
            "dry_run": stays,
            "engines": [work_data(work) for work in works],
            "commands": done or [{"command": one.command, "status": None} for one in restarts],
            "results": [{**result._asdict(), "passed": result.passed} for result in results],
            "left": [item.name for item in findings if item.is_bad],
            "notes": notes,
        }
        show.data(data)
        return status
    _print_works(works, stays)
    show.notes([*notes, *(f"{work.name}: {note}" for work in works for note in work.plan.notes)])
    if stays:
        print("nothing was changed" + ("" if dry_run else ", as nobody said yes (--yes)"))
        return status
    _print_results(results)
    if exit_status(findings):
        print("\nocigpu doctor has more to say:")
        show.report([*render(host, findings)][3:])
    return status


def _undo(named: str, yes: bool, dry_run: bool, json: bool) -> int:
    from ocigpu.cli.engines.configure import find_targets
    from ocigpu.engines.remove import plan_removal
    from ocigpu.engines.wanted import Wanted

    targets, _ = find_targets(named, Wanted("", "", False, False), "/", "", "")
    works = plan_works(targets, plan_removal, show_diff=not json)
    if named and works[0].error:
        raise works[0].error
    restarts = _plan_restarts(works)
    stays = dry_run or not _agree(works, restarts, 0, yes, json)
    done = []
    if not stays:
        works = _carry_out(works)
        done = [_restart(one) for one in restarts if not _failed(works, one.engine)]
    failed = any(work.error for work in works) or any(one["status"] for one in done)
    if json:
        show.data({"dry_run": stays, "engines": [work_data(work) for work in works], "commands": done})
    else:
        _print_works(works, stays)
        if stays:
            print("nothing was changed" + ("" if dry_run else ", as nobody said yes (--yes)"))
    return 1 if failed else UNCONFIRMED if stays and not dry_run else 0


# what is to be done


def _plan_restarts(works: Sequence[EngineWork]) -> list[Restart]:
    """Return the restarts of engines that run and whose files change; an engine that is not running needs none."""
    from ocigpu.engines.status import find_engines

    running = [one for one in find_engines() if one.running]
    found = []
    for work in works:
        step = step_of(work)
        engine = next((one for one in running if work.name in (one.name, one.engine, one.flavour)), None)
        if not (step and engine and work.changed):
            continue
        if " (or " in step:  # k3s or its agent
            service = step.split()[2]
            step = f"systemctl restart {service if _is_active(service) else f'{service}-agent'}"
        stops = "restart" in step and engine.engine == "docker"
        found.append(Restart(work.name, step, _stopped_by_restart() if stops else ()))
    return found


def _is_active(service: str) -> bool:
    return subprocess.run(["systemctl", "--quiet", "is-active", service], check=False).returncode == 0


def _stopped_by_restart() -> tuple[str, ...]:
    """Return the containers that a restart of dockerd stops: those that run, unless it keeps them (live-restore)."""
    from ocigpu.system.programs import run_program

    try:
        keeps = run_program(["docker", "info", "--format", "{{.LiveRestoreEnabled}}"], READY_SECONDS)
        listed = run_program(["docker", "ps", "--quiet"], READY_SECONDS)
    except OSError:  # no client: nobody starts containers by it
        return ()
    return () if keeps.output.strip() == "true" else tuple(listed.output.split())


def _agree(works: Sequence[EngineWork], restarts: Sequence[Restart], fixes: int, yes: bool, json: bool) -> bool:
    """Show the commands that follow, and ask once; nothing to do needs no answer."""
    if not json and restarts:
        print("then:")
        for one in restarts:
            print(f"  {printable(one.line, 1000)}")
    if yes or not (fixes or restarts or any(work.changed for work in works)):
        return True
    return show.confirm("Do this?")


# doing it


def _carry_out(works: Sequence[EngineWork]) -> list[EngineWork]:
    from ocigpu.engines.files import locked

    with locked():
        return [carry_out_work(work) for work in works]


def _failed(works: Sequence[EngineWork], name: str) -> bool:
    return any(work.error for work in works if work.name == name)


def _fix(item: "Finding", json: bool) -> dict[str, Any]:
    from ocigpu.cli.host.doctor import run_fix

    output = sys.stderr if json else None
    status = next((status for line in item.safe if (status := run_fix(line, output=output))), 0)
    return {"command": "; ".join(item.safe), "status": status}


def _restart(restart: Restart) -> dict[str, Any]:
    """Carry out a restart and wait until the engine answers; the answer has its exit status."""
    words = shlex.split(restart.command)
    if words[0] == "systemctl" and not os.path.isdir(BOOTED):
        why = f"this machine was not booted with systemd: restart {restart.engine} yourself, then: ocigpu engine test"
        print(printable(f"{restart.engine}: {why}"), file=sys.stderr)
        return {"command": restart.command, "status": 1}
    sys.stdout.flush()
    with show.Progress(restart.command):
        status = subprocess.run(words, check=False, stdout=sys.stderr).returncode
        if not status and restart.engine == "docker":
            _await(["docker", "version", "--format", "{{.Server.Version}}"])
    return {"command": restart.command, "status": status}


def _await(command: Sequence[str]) -> None:
    """Wait until a command succeeds, or as long as an engine may take."""
    end = time.monotonic() + READY_SECONDS
    while subprocess.run(command, check=False, capture_output=True).returncode and time.monotonic() < end:
        time.sleep(0.2)


def _try(named: str, works: Sequence[EngineWork], config: str, notes: list[str]) -> "list[Result]":
    """Start containers; what keeps them from being started is a note."""
    from ocigpu.cli.engines.try_engine import try_engines

    if all(work.error for work in works):
        return []
    settings = load_settings(config)
    try:
        return try_engines(named, settings, load_facts(settings), notes)
    except OcigpuError as error:
        notes.append(f"no container was started: {error.line}" + (f" ({error.hint})" if error.hint else ""))
        return []


# what is said


def _print_works(works: Sequence[EngineWork], undone: bool) -> None:
    done = "would be " if undone else ""
    for work in works:
        if work.error:
            print(f"{work.name}: left as it is\n{work.error.render('ocigpu')}", file=sys.stderr)
        for edit in work.plan.edits if not work.error else ():
            if edit.changed:
                how = "removed" if edit.after is None else "written" if edit.file.text is None else "changed"
                print(printable(f"{edit.file.path}: {done}{how}"))
        if not work.error and not work.changed:
            print(f"{work.name}: nothing to do")


def _print_results(results: "Sequence[Result]") -> None:
    print()
    show.table(
        ("engine", "asked by", "result"),
        [(result.engine, result.way, "ok" if result.passed else "FAILED") for result in results],
    )
    for result in results:
        failed = [check for check in result.checks if not check.passed]
        for check in failed:
            print(printable(f"{result.engine}: {result.way}: {check.message}"))
        for hint in dict.fromkeys(check.hint for check in failed):
            print(printable(f"hint: {hint}"))
    good = [result for result in results if result.passed and LINES.get(result.way.split()[0])]
    if good:
        best = next((result for result in good if "--gpus" in result.way), good[0])
        print(f"\nIt works. To type:\n\n    {LINES[best.way.split()[0]](best.way)}\n")
        for line in best.printed.splitlines():
            show.foreign(f"    {line}")


def _typed(way: str) -> str:
    """Return the line that people type for a way: with an image of a registry, and removed at its end."""
    variable = "" if "--gpus" in way or "--device" in way else " -e NVIDIA_VISIBLE_DEVICES=all"
    return way.replace(" run", " run --rm", 1) + f"{variable} debian nvidia-smi"


LINES: Mapping[str, Callable[[str], str]] = {"docker": _typed, "podman": _typed}
"""By the program: ctr is for tests, pods are what people start with containerd."""
