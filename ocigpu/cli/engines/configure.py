"""``ocigpu engine``: configure container engines for ocigpu, show their state, undo it, and leave a machine."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ocigpu.cli.front import show
from ocigpu.core.config_json import clean_path
from ocigpu.core.errors import OcigpuError, UsageError, printable, suggest
from ocigpu.core.facts import to_data

if TYPE_CHECKING:
    from ocigpu.engines.configure import ConfigureOptions, EnginePlan
    from ocigpu.engines.files import Root
    from ocigpu.engines.status import EngineStatus
    from ocigpu.engines.wanted import Wanted

VENDOR_NAME, VENDOR_RUNTIME = "nvidia", "nvidia-container-runtime"
UNCONFIRMED = 3
"""Exit status when changes were shown, and nobody could be asked or the answer was no."""
MAX_NEEDS = 5
"""Things named in one message, and containers of one user in remarks."""


def configure_command(
    engine: str = "",
    yes: bool = False,
    default: bool = False,
    cdi: bool = False,
    gpus_hook: bool = False,
    no_gpus_hook: bool = False,
    hook_dir: str = "",
    name: str = "ocigpu",
    runtime_path: str = "",
    engine_config: str = "",
    drop_in: str = "",
    root: str = "/",
    dry_run: bool = False,
    json: bool = False,
    runtime: str = "",
    kata: bool = False,
) -> int:
    from ocigpu.engines.configure import plan_configuration

    named = known_engine(engine or runtime)
    if named in ("", "docker") and name == "runc":
        raise UsageError("--name runc: Docker keeps this name for its own")
    if named == "docker" and drop_in:
        raise UsageError("--drop-in: docker has no drop-in files")
    if named not in ("", "docker") and (gpus_hook or no_gpus_hook or hook_dir):
        raise UsageError(f"--gpus-hook is for docker, not {named}")
    if kata and named != "containerd":
        raise UsageError("--kata is for containerd: ocigpu engine configure containerd --kata")
    if no_gpus_hook and (gpus_hook or hook_dir):
        raise UsageError("--no-gpus-hook excludes --gpus-hook and --hook-dir")
    if not name or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in name):
        raise UsageError("--name takes letters, digits and -_.")
    root, config, drop_in, hook_dir = _absolute(root, engine_config, drop_in, hook_dir)
    hook = True if gpus_hook or hook_dir else False if no_gpus_hook else None
    targets, notes = plan_targets(
        named,
        name=name,
        runtime_path=runtime_path,
        default=default,
        cdi=cdi,
        kata=kata,
        hook=hook,
        hook_dir=hook_dir,
        root=root,
        config=config,
        drop_in=drop_in,
        leave_sandbox=yes,
    )
    return _run(targets, plan_configuration, named, yes, dry_run, json, notes)


def plan_targets(
    named: str,
    *,
    name: str = "ocigpu",
    runtime_path: str = "",
    default: bool = False,
    cdi: bool = False,
    kata: bool = False,
    hook: bool | None = None,
    hook_dir: str = "",
    root: str = "/",
    config: str = "",
    drop_in: str = "",
    leave_sandbox: bool = False,
) -> "tuple[dict[str, ConfigureOptions], list[str]]":
    """Return what to configure, by engine, and notes; "" for ``named``: every engine that is here.

    ``hook``: whether docker run --gpus gets its hook, None where it can.  Raises OcigpuError OCIGPU-ENG-5.
    """
    from ocigpu.core.settings import Settings
    from ocigpu.engines.wanted import Wanted
    from ocigpu.gpus.tree import find_roots
    from ocigpu.gpus.wsl import WAYS, looks_like_wsl

    path, notes = _runtime_program(root, runtime_path)
    if name == VENDOR_NAME and not runtime_path:
        path = _vendor_named(root, path)
    if root == "/" and looks_like_wsl(find_roots(Settings())):
        hook = hook or False
        notes.append(f"this is WSL: neither --gpus nor mode hook can provide its GPUs; these work: {WAYS}")
    wanted = Wanted(name, path, default, cdi, kata, _starts_without_cgroups(root))
    targets, more = find_targets(named, wanted, root, config, drop_in)
    if not targets:
        hint = "; ".join(more) or "install one, or name it"
        raise OcigpuError("OCIGPU-ENG-5", "no container engine is installed here", hint)
    targets = {
        each: one._replace(gpus_hook=hook, hook_directory=hook_dir, leave_sandbox=leave_sandbox)
        for each, one in targets.items()
    }
    if name == VENDOR_NAME and VENDOR_RUNTIME not in path and any(one.engine == "docker" for one in targets.values()):
        more.append(
            f'Dev Containers (VS Code, DevPod) pass no --gpus unless the runtime "{name}" is a program called '
            f"{VENDOR_RUNTIME}: install the package ocigpu-nvidia-names (make install VENDOR_NAMES=1), run this again"
        )
    return targets, [*notes, *more]


def remove_command(
    engine: str = "",
    yes: bool = False,
    engine_config: str = "",
    drop_in: str = "",
    root: str = "/",
    dry_run: bool = False,
    json: bool = False,
) -> int:
    from ocigpu.engines.remove import plan_removal
    from ocigpu.engines.wanted import Wanted

    named = known_engine(engine)
    root, config, drop_in = _absolute(root, engine_config, drop_in)
    targets, _ = find_targets(named, Wanted("", "", False, False), root, config, drop_in)
    return _run(targets, plan_removal, named, yes, dry_run, json)


def status_command(engine: str = "", root: str = "/") -> "show.Answer":
    from ocigpu.engines.status import read_engine_status

    wanted = known_engine(engine)
    (root,) = _absolute(root)
    statuses = [status for status in read_engine_status(root) if wanted in ("", status.engine, status.flavour)]
    yield {
        "engines": [
            {**to_data(status), "configured": status.configured, "is_default": status.is_default} for status in statuses
        ]
    }
    rows = []
    for status in statuses:
        ours = ", ".join(f"{entry.name} = {entry.path}" for entry in status.runtimes if entry.ours)
        title = f"{status.engine} ({status.flavour})" if status.flavour else status.engine
        installed = "running" if status.running else "yes" if status.installed else "no"
        default, files = status.default_runtime or "engine's own", ", ".join(status.files) or "none"
        none = "at its next start" if status.waiting else "not configured"
        rows.append((title, installed, ours or none, default, status.cdi, files))
    show.table(("engine", "installed", "ocigpu", "default runtime", "cdi", "files"), rows)
    for status in statuses:
        show.notes(f"{status.engine}: {problem}" for problem in status.problems)
        if status.engine == "docker" and not status.flavour and status.installed:
            owner = "ocigpu's" if status.gpus_hook_ours else "not ocigpu's"
            hook = f"{status.gpus_hook} ({owner})" if status.gpus_hook else "no hook on the PATH"
            print(f"docker run --gpus: {hook}")


def known_engine(engine: str) -> str:
    """Return the name of an engine, or "" for none; raises UsageError for an unknown one."""
    from ocigpu.engines.places import NAMES

    if engine and engine not in NAMES:
        raise UsageError(f'ENGINE is one of {", ".join(NAMES)}, not "{engine}"', suggest(engine, NAMES) or None)
    return engine


def find_targets(
    named: str, wanted: "Wanted", root: str, config: str, drop_in: str
) -> "tuple[dict[str, ConfigureOptions], list[str]]":
    """Return what to configure, by engine: the one that was named, else all that are here; and what to say of others.

    A containerd that only Docker uses is left alone, unless there is something of ours in its files.  So is Docker of a
    snap: it has the root of its base, where our programs are not (canonical/docker-snap, snapcraft.yaml: strict).
    """
    from ocigpu.engines.configure import ConfigureOptions
    from ocigpu.engines.places import KUBERNETES
    from ocigpu.engines.status import find_engines

    if named:
        engine, config = ("containerd" if named in KUBERNETES else named), config or KUBERNETES.get(named, "")
        return {named: ConfigureOptions(engine, wanted, config=config, drop_in=drop_in, root=root)}, []
    if config or drop_in:
        raise UsageError("--engine-config and --drop-in need the name of an engine")
    found, notes = find_engines(root), []
    if os.geteuid() and root == "/":  # /etc is not a user's to change
        mine = {one.engine: one for one in found if one.flavour == "rootless" or one.engine == "podman"}
        notes += [f"{one.name} is left alone: that takes root" for one in found if one.engine not in mine]
        found = list(mine.values())
    if any(one.engine == "containerd" and not one.cri and not one.configured for one in found):
        notes.append("containerd is left alone, as it serves Docker only (disabled_plugins has cri): name it to insist")
        found = [one for one in found if one.engine != "containerd" or one.cri or one.configured]
    if any(one.flavour == "snap" and not one.configured for one in found):
        notes.append("docker (snap) is left alone: it is confined and cannot run ocigpu (ocigpu doctor says more)")
        found = [one for one in found if one.flavour != "snap" or one.configured]
    return {
        # CRI-O and Podman read directories of files
        one.name: ConfigureOptions(
            one.engine, wanted, config=one.target if one.engine in ("docker", "containerd") else "", root=root
        )
        for one in found
    }, notes


def _absolute(root: str, *paths: str) -> tuple[str, ...]:
    """Return the root, and paths as they are below it; raises UsageError for a root that is no directory."""
    root = os.path.abspath(root)
    if not os.path.isdir(root):
        raise UsageError(f"--root {root}: not a directory")
    return root, *(path and _below(root, path) for path in paths)


def _below(root: str, path: str) -> str:
    return os.path.abspath(path) if root == "/" else clean_path(path)


def _runtime_program(root: str, given: str) -> tuple[str, list[str]]:
    """Return the path of the shim for the engine's configuration, and what to say about it.

    Raises OcigpuError OCIGPU-ENG-5 when it is not there; in another root it may still come.
    """
    from ocigpu.cli.front.common import beside, own_program
    from ocigpu.engines.places import find_program, why_no_program
    from ocigpu.engines.status import RUNTIME

    if given:
        path = _below(root, given)
    elif root == "/":
        path = own_program(RUNTIME) or beside(RUNTIME)
    else:
        path = find_program(root, RUNTIME) or f"/usr/bin/{RUNTIME}"
    why = why_no_program(root, path)
    if not why:
        return path, _notes_of_owner(path) if root == "/" and not os.geteuid() else []
    if root == "/":
        hint = f"chmod +x {path}" if "executable" in why else "name it: --runtime-path FILE"
        raise OcigpuError("OCIGPU-ENG-5", f"{path} {why}", hint)
    return path, [f"{path} {why} below {root}" if "executable" in why else f"{path} does not exist yet below {root}"]


def _starts_without_cgroups(root: str) -> bool:
    """Whether the low-level runtime that the settings of this machine choose is crun, which can do that."""
    from ocigpu.cli.front.common import load_settings
    from ocigpu.engines.places import why_no_program

    if root != "/":
        return False
    try:
        names = load_settings("").runtime_runtimes
    except OcigpuError:  # which is not for this command to say
        return False
    chosen = next((name for name in names if not why_no_program("/", name)), "")
    return os.path.basename(chosen).startswith("crun")


def _vendor_named(root: str, path: str) -> str:
    """Return the link with the vendor's name beside the shim, the shim itself where there is none or it is not ours.

    Dev Containers look for that name in what "docker info" says of the runtime "nvidia" before they pass --gpus
    (devcontainers/cli: checkDockerSupportForGPU).
    """
    from ocigpu.engines.places import is_program
    from ocigpu.engines.status import is_ours

    link = f"{os.path.dirname(path)}/{VENDOR_RUNTIME}"
    return link if is_program(root, link) and is_ours(link, root) else path


def _notes_of_owner(path: str) -> list[str]:
    """Return a note when another user than root can replace a program that an engine will start as root."""
    from ocigpu.system.files import why_replaceable, why_untrusted

    real = os.path.realpath(path)
    status = os.stat(real)
    if why_untrusted(status.st_uid, status.st_mode):
        place = real
    elif why_replaceable(real):
        place = os.path.dirname(real)
    elif why_replaceable(path):  # it is a link
        place = path
    else:
        return []
    return [f"{place} can be changed by users other than root: a container's start would make them root"]


class EngineWork(NamedTuple):
    """What one engine gets, and what came of it: ``error`` says why it does not get it."""

    name: str
    options: "ConfigureOptions"
    plan: "EnginePlan"
    diffs: "Mapping[str, str]" = MappingProxyType({})
    checked: str = ""
    error: OcigpuError | None = None

    @property
    def changed(self) -> bool:
        return self.plan.changed and not self.error


def _run(
    targets: "Mapping[str, ConfigureOptions]",
    make_plan: "Callable[[Root, ConfigureOptions], EnginePlan]",
    named: str,
    yes: bool,
    dry_run: bool,
    json: bool,
    notes: Sequence[str] = (),
) -> int:
    """Plan, show, check, ask unless an engine was named, and carry out; returns the exit status.

    No other run comes in between; while it asks one may, and then a file that is not the one shown is an error.
    """
    import contextlib

    from ocigpu.engines.files import locked

    asks = not (named or yes or dry_run)
    with contextlib.ExitStack() as stack:
        if not (asks or dry_run):
            stack.enter_context(locked())
        works = plan_works(targets, make_plan, show_diff=not json)
        changed = any(work.changed for work in works)
        unconfirmed = asks and changed and (json or not show.confirm("Make these changes?"))
        undone = dry_run or unconfirmed
        if not undone:
            if asks and changed:
                stack.enter_context(locked())
            works = [carry_out_work(work) for work in works]
    if named and works[0].error:
        raise works[0].error
    if json:
        engines = [work_data(work) for work in works]
        changed = any(work.changed for work in works)
        show.data({"changed": changed, "dry_run": undone, "engines": engines, "notes": list(notes)})
    else:
        print_works(works, undone)
        print_notes(works, named, notes)
        _print_steps(works, named)
        if not works:
            print("no engine is installed here: nothing to do")
    if unconfirmed:
        print("nothing was changed: it was not confirmed (--yes confirms)", file=sys.stderr)
    return 1 if any(work.error for work in works) else UNCONFIRMED if unconfirmed else 0


def plan_works(
    targets: "Mapping[str, ConfigureOptions]",
    make_plan: "Callable[[Root, ConfigureOptions], EnginePlan]",
    show_diff: bool,
) -> list[EngineWork]:
    """Return what each engine would get, checked by the engine itself; prints the differences."""
    from ocigpu.engines.files import Root

    works = []
    for name, options in targets.items():
        with Root(options.root) as root:
            works.append(_plan_work(root, name, options, make_plan, show_diff))
    return works


def _plan_work(
    root: "Root",
    name: str,
    options: "ConfigureOptions",
    make_plan: "Callable[[Root, ConfigureOptions], EnginePlan]",
    show_diff: bool,
) -> EngineWork:
    from ocigpu.engines.carry_out import check_plan, diff
    from ocigpu.engines.configure import EnginePlan

    work = EngineWork(name, options, EnginePlan(options.engine, "", ()))
    try:
        work = work._replace(plan=make_plan(root, options))
        work = work._replace(diffs={edit.file.path: diff(edit) for edit in work.plan.edits if edit.changed})
        if show_diff:
            for text in work.diffs.values():
                show.diff(text.split("\n")[:-1])
        return work._replace(checked=check_plan(root, work.plan) if work.diffs else "")
    except OcigpuError as error:
        return work._replace(error=_with_repair(error, options.root))


def _with_repair(error: OcigpuError, root: str) -> OcigpuError:
    """Return an error of a file that cannot be used; its hint is the command that corrects the file, if one does."""
    from ocigpu.doctor.repairs import find_config_repair
    from ocigpu.engines.places import read_file

    path = error.message.removeprefix("read ").partition(": ")[0]
    if error.code not in ("OCIGPU-ENG-1", "OCIGPU-ENG-2", "OCIGPU-ENG-3") or not path.startswith("/") or root != "/":
        return error
    repair = ""
    with suppress(OcigpuError):
        text = "" if os.path.isdir(path) else read_file("/", path) or ""
        repair = find_config_repair(os.path.realpath(path), path, text, error.message)
    return OcigpuError(error.code, error.message, f"{repair}; then run this again") if repair else error


def carry_out_work(work: EngineWork) -> EngineWork:
    """Write an engine's files; returns the work, with the error if it could not be done."""
    from ocigpu.engines.carry_out import carry_out
    from ocigpu.engines.files import Root

    if work.changed:
        try:
            with Root(work.options.root) as root:
                carry_out(root, work.plan)
        except OcigpuError as error:
            return work._replace(error=error)
    return work


def step_of(work: EngineWork) -> str:
    """Return the command that makes the engine use its new files, "" for none."""
    from ocigpu.engines.carry_out import remaining_step

    return remaining_step(work.options, work.plan) if not work.error and (work.diffs or work.plan.links) else ""


def work_data(work: EngineWork) -> dict[str, object]:
    """Return the work as JSON data."""
    links = [{"path": path, "target": target} for path, target in work.plan.links]
    files = [{"path": path, "diff": text} for path, text in work.diffs.items()]
    error = {"code": work.error.code, "message": work.error.message, "hint": work.error.hint} if work.error else None
    return {
        "engine": work.name,
        "changed": work.changed,
        "files": files,
        "links": links,
        "checked_by": work.checked,
        "notes": list(work.plan.notes),
        "remaining_step": step_of(work),
        "error": error,
    }


def print_works(works: Sequence[EngineWork], undone: bool) -> None:
    """Say what was done to each engine's files, or would be."""
    done = "would be " if undone else ""
    for work in works:
        if work.error:
            print(f"{work.name}: left as it is", file=sys.stderr)
            print(work.error.render("ocigpu"), file=sys.stderr)
            continue
        for edit in work.plan.edits:
            if edit.changed:
                how = "removed" if edit.after is None else "written" if edit.file.text is None else "changed"
                print(printable(f"{edit.file.path}: {done}{how}"))
            elif edit.forgets:
                print(printable(f"{edit.file.path}: is as it was; its record {done}removed"))
        for path, target in work.plan.links:
            print(printable(f"{path}: link to {target} {done}made" if target else f"{path}: {done}removed"))
        if not work.changed:
            print(f"{work.name}: nothing to do")
        elif work.checked:
            print(f"checked by: {work.checked}")


def print_notes(works: Sequence[EngineWork], named: str, notes: Sequence[str]) -> None:
    """Print what there is to say about the host, and about each engine."""
    show.notes([*notes, *(note if named else f"{work.name}: {note}" for work in works for note in work.plan.notes)])


def _print_steps(works: Sequence[EngineWork], named: str) -> None:
    steps = {work.name: step for work in works if (step := step_of(work))}
    if named:
        for step in steps.values():
            print(f"next step: {step}")
    elif steps:
        print("next steps:")
        show.fields((f"  {name}", step) for name, step in steps.items())


def leave_command(program: str = "", root: str = "/") -> None:
    from ocigpu.cli.front.common import beside
    from ocigpu.engines.carry_out import carry_out, check_plan, remaining_step
    from ocigpu.engines.configure import ConfigureOptions
    from ocigpu.engines.files import Root, locked
    from ocigpu.engines.leave import (
        entries_of,
        find_cdi_users,
        find_entries,
        find_generated,
        find_gpus_users,
        find_users,
        find_waiting,
        note_waiting,
    )
    from ocigpu.engines.places import find_program
    from ocigpu.engines.podman import read_containers
    from ocigpu.engines.remove import plan_removal
    from ocigpu.engines.status import RUNTIME, read_engine_status
    from ocigpu.engines.wanted import Wanted

    shim = beside(RUNTIME) if root == "/" else find_program(root, RUNTIME)
    statuses = read_engine_status(root)
    gpus_users = find_gpus_users(root, shim, statuses, not program)
    _refuse(gpus_users, "remove them first (docker rm); or install another hook for --gpus, as NVIDIA's toolkit has")
    if program:
        hint = "take it out: ocigpu engine remove ENGINE; or install what has this name"
        _refuse(find_entries(root, shim, statuses, program), hint)
        return
    podman = read_containers(root)
    needs = find_users(root, shim, statuses, podman)
    _refuse(needs, "end and remove them first (docker rm, podman rm, ctr container rm)")
    remarks = find_cdi_users(root, shim, statuses, podman) + _ask_users(root, shim, statuses)
    waiting = find_waiting(root)
    for status in statuses:
        if not entries_of(root, shim, status):
            continue
        main = status.target if status.engine in ("docker", "containerd") else ""
        options = ConfigureOptions(status.engine, Wanted("", "", False, False), config=main, root=root)
        with locked(), Root(root) as files:
            plan = plan_removal(files, options)
            if plan.changed:
                check_plan(files, plan)
                carry_out(files, plan)
        step = remaining_step(options, plan) if plan.changed else ""
        if plan.changed:
            print(printable(f"{status.engine}: removed from {', '.join(edit.file.path for edit in plan.edits)}"))
        if step and status.is_default and status.running:
            note_waiting(root, status, step)
            waiting.append((status.engine, step))
        elif step:
            print(f"next step: {step}")
    _refuse(find_entries(root, shim, read_engine_status(root)), "take it out by hand, or install what has this name")
    for name in find_generated(root, shim, statuses):
        print(f"next step: systemctl restart {name}: pods whose runtime class names ocigpu fail until then")
    texts = dict.fromkeys(f"{engine} starts every container with it until: {step}" for engine, step in waiting)
    _refuse([*texts], "its file is as it was before ocigpu; do this step, then remove ocigpu again")
    show.notes(remarks)


def _ask_users(root: str, shim: str, statuses: "list[EngineStatus]") -> list[str]:
    """Return what other users' Podman containers lose: a user's files keep nothing on the machine, so it is only said.

    Those of users without a directory in /run/user are not looked at, and of users nothing without root's rights.
    """
    if root != "/" or os.geteuid():
        return []
    import pwd

    from ocigpu.containers.users import ask_users
    from ocigpu.engines.leave import find_podman_users
    from ocigpu.engines.status import read_engine_status

    def look(_places: object) -> list[str]:
        os.environ["HOME"] = home = pwd.getpwuid(os.geteuid()).pw_dir
        os.environ.pop("XDG_CONFIG_HOME", None)
        return find_podman_users(shim, [*statuses, *read_engine_status(root)], home)[:MAX_NEEDS]

    answers, notes = ask_users(look, 5.0)
    return notes + [
        f"user {user}: {text}, does not start without ocigpu (podman rm)"
        for user, texts in answers.items()
        if isinstance(texts, list)
        for text in map(str, texts[:MAX_NEEDS])
    ]


def _refuse(needs: Sequence[str], hint: str) -> None:
    if needs:
        more = f" (and {show.count(len(needs) - MAX_NEEDS, 'other')})" if needs[MAX_NEEDS:] else ""
        raise OcigpuError("OCIGPU-ENG-6", f"still needed: {'; '.join(needs[:MAX_NEEDS])}{more}", hint)
