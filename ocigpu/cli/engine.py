"""``ocigpu engine``: make container engines know ocigpu, see what they know, and undo it."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ocigpu.cli import show
from ocigpu.core.errors import OcigpuError, UsageError, printable
from ocigpu.core.facts import to_data

if TYPE_CHECKING:
    from ocigpu.engines.configure import ConfigureOptions, EnginePlan
    from ocigpu.engines.files import Root


def configure_command(
    engine: str = "",
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
) -> None:
    from ocigpu.engines.configure import ConfigureOptions, plan_configuration
    from ocigpu.engines.wanted import Wanted

    engine = _known(engine or runtime)
    if engine == "docker" and name == "runc":
        raise UsageError("--name runc: Docker keeps this name for its own")
    if engine == "docker" and drop_in:
        raise UsageError("--drop-in: docker has no drop-in files")
    if engine != "docker" and (gpus_hook or no_gpus_hook or hook_dir):
        raise UsageError(f"--gpus-hook is for docker, not {engine}")
    if no_gpus_hook and (gpus_hook or hook_dir):
        raise UsageError("--no-gpus-hook excludes --gpus-hook and --hook-dir")
    if not name or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in name):
        raise UsageError("--name takes letters, digits and -_.")
    root, config, drop_in, hook_dir = _absolute(root, engine_config, drop_in, hook_dir)
    path, notes = _runtime_program(root, runtime_path)
    hook = False if no_gpus_hook else True if gpus_hook or hook_dir else None
    options = ConfigureOptions(engine, Wanted(name, path, default, cdi), hook, hook_dir, config, drop_in, root)
    _run(options, plan_configuration, dry_run, json, notes)


def remove_command(
    engine: str,
    engine_config: str = "",
    drop_in: str = "",
    root: str = "/",
    dry_run: bool = False,
    json: bool = False,
) -> None:
    from ocigpu.engines.configure import ConfigureOptions
    from ocigpu.engines.remove import plan_removal
    from ocigpu.engines.wanted import Wanted

    engine = _known(engine)
    root, config, drop_in = _absolute(root, engine_config, drop_in)
    options = ConfigureOptions(engine, Wanted("", "", False, False), config=config, drop_in=drop_in, root=root)
    _run(options, plan_removal, dry_run, json)


def status_command(engine: str = "", root: str = "/", json: bool = False) -> None:
    from ocigpu.engines.status import read_engine_status

    wanted = _known(engine) if engine else ""
    (root,) = _absolute(root)
    statuses = [status for status in read_engine_status(root) if wanted in ("", status.engine)]
    if json:
        more = ({"configured": status.configured, "is_default": status.is_default} for status in statuses)
        show.data({"engines": [to_data(status) | extra for status, extra in zip(statuses, more, strict=True)]})
        return
    rows = []
    for status in statuses:
        ours = ", ".join(f"{entry.name} = {entry.path}" for entry in status.runtimes if entry.ours)
        title = f"{status.engine} ({status.flavour})" if status.flavour else status.engine
        installed = "running" if status.running else "yes" if status.installed else "no"
        default, files = status.default_runtime or "engine's own", ", ".join(status.files) or "none"
        rows.append((title, installed, ours or "not configured", default, status.cdi, files))
    show.table(("engine", "installed", "ocigpu", "default runtime", "cdi", "files"), rows)
    for status in statuses:
        show.notes(f"{status.engine}: {problem}" for problem in status.problems)
        if status.engine == "docker" and not status.flavour and status.installed:
            owner = "ocigpu's" if status.gpus_hook_ours else "not ocigpu's"
            hook = f"{status.gpus_hook} ({owner})" if status.gpus_hook else "no hook on the PATH"
            print(f"docker run --gpus: {hook}")


def _known(engine: str) -> str:
    from ocigpu.engines.places import ENGINES

    if engine not in ENGINES:
        but = f', not "{engine}"' if engine else ""
        raise UsageError(f"ENGINE is one of {', '.join(ENGINES)}{but}")
    return engine


def _absolute(root: str, *paths: str) -> tuple[str, ...]:
    """Return the root, and paths as they are below it; raises UsageError for a root that is no directory."""
    root = os.path.abspath(root)
    if not os.path.isdir(root):
        raise UsageError(f"--root {root}: not a directory")
    return root, *(path and _below(root, path) for path in paths)


def _below(root: str, path: str) -> str:
    return os.path.abspath(path) if root == "/" else os.path.normpath("/" + path.lstrip("/"))


def _runtime_program(root: str, given: str) -> tuple[str, list[str]]:
    """Return the path of the shim for the engine's configuration, and what to say about it.

    Raises OcigpuError OCIGPU-ENG-5 when it is not there; in another root it may still come.
    """
    from ocigpu.engines.places import find_program, is_program
    from ocigpu.engines.status import RUNTIME

    if given:
        path = _below(root, given)
    elif root == "/":
        beside = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), RUNTIME)
        path = beside if is_program("/", beside) else shutil.which(RUNTIME) or find_program("/", RUNTIME) or beside
    else:
        path = find_program(root, RUNTIME) or f"/usr/bin/{RUNTIME}"
    if is_program(root, path):
        return path, _notes_of_owner(path) if root == "/" and not os.geteuid() else []
    if root == "/":
        raise OcigpuError("OCIGPU-ENG-5", f"{path} is not there or not executable", "name it: --runtime-path FILE")
    return path, [f"{path} is not there yet below {root}"]


def _notes_of_owner(path: str) -> list[str]:
    """Return a note when another user than root can replace a program that an engine will start as root."""
    real = os.path.realpath(path)
    for place in (real, os.path.dirname(real)):
        status = os.stat(place)
        if status.st_uid or status.st_mode & 0o022:
            return [f"{place} can be changed by others than root: they become root by a container's start"]
    return []


def _run(
    options: "ConfigureOptions",
    make_plan: "Callable[[Root, ConfigureOptions], EnginePlan]",
    dry_run: bool,
    json: bool,
    notes: Sequence[str] = (),
) -> None:
    """Plan, show, check and, unless it is a dry run, carry out, with no other run in between."""
    import contextlib

    from ocigpu.engines.carry_out import carry_out, check_plan, diff, remaining_step
    from ocigpu.engines.files import Root, locked

    with contextlib.nullcontext() if dry_run else locked(), Root(options.root) as root:
        plan = make_plan(root, options)
        diffs = {edit.file.path: diff(edit) for edit in plan.edits if edit.changed}
        if not json:
            for text in diffs.values():
                show.diff(text.split("\n")[:-1])
        checked = check_plan(root, plan) if diffs else ""
        if plan.changed and not dry_run:
            carry_out(root, plan)
    step = remaining_step(options, plan) if diffs or plan.links else ""
    notes = [*notes, *plan.notes]
    if json:
        links = [{"path": path, "target": target} for path, target in plan.links]
        files = [{"path": path, "diff": text} for path, text in diffs.items()]
        result = {"engine": options.engine, "changed": plan.changed, "dry_run": dry_run, "files": files, "links": links}
        show.data({**result, "checked_by": checked, "notes": notes, "remaining_step": step})
        return
    done = "would be " if dry_run else ""
    for edit in plan.edits:
        if edit.changed:
            how = "removed" if edit.after is None else "written" if edit.file.text is None else "changed"
            print(printable(f"{edit.file.path}: {done}{how}"))
        elif edit.forgets:
            print(printable(f"{edit.file.path}: is as it was; its record {done}removed"))
    for path, target in plan.links:
        print(printable(f"{path}: link to {target} {done}made" if target else f"{path}: {done}removed"))
    if not plan.changed:
        print(f"{options.engine}: nothing to do")
    elif checked:
        print(f"checked by: {checked}")
    show.notes(notes)
    if step:
        print(f"remains to be done: {step}")
