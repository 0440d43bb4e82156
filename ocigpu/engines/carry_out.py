"""A plan checked by the engine and carried out: all of it, or nothing."""

import difflib
import os
from collections.abc import Iterator

from ocigpu.core.errors import OcigpuError
from ocigpu.engines import places
from ocigpu.engines.checker import check
from ocigpu.engines.configure import ConfigureOptions, Edit, EnginePlan
from ocigpu.engines.files import EngineFile, Root
from ocigpu.engines.record import backup_path, dump_record, record_path
from ocigpu.engines.units import start_command


def diff(edit: Edit) -> str:
    """Return the unified diff of a file, "" when it does not change."""
    path = edit.file.path
    old = _lines(edit.file.text)
    new = _lines(edit.after)
    before = "/dev/null" if edit.file.text is None else path
    after = "/dev/null" if edit.after is None else path
    return "".join(difflib.unified_diff(old, new, before, after))


def _lines(text: str | None) -> list[str]:
    if not text:
        return []
    lines = [line + "\n" for line in text.split("\n")]
    if text.endswith("\n"):
        return lines[:-1]
    lines[-1] += "\\ No newline at end of file\n"
    return lines


def check_plan(root: Root, plan: EnginePlan) -> str:
    """Let the engine of this machine check what a plan writes; returns its command, "" where nothing could check.

    Raises OcigpuError OCIGPU-ENG-3.  For another root no engine of this machine is the right one.
    """
    if root.path != "/":
        return ""
    main = root.read(plan.main).path
    texts = {plan.main if edit.file.path == main else edit.file.path: edit.after for edit in plan.edits}
    return check(plan.engine, plan.main, texts, plan.meant)


def carry_out(root: Root, plan: EnginePlan) -> None:
    """Write and remove files as planned; if a step fails, earlier steps are undone.

    The record is written before the file: a process that is killed between the two leaves a record of missing changes.
    Raises OcigpuError OCIGPU-ENG-4, also when a file has changed since the plan was made.
    """
    for edit in plan.edits:
        if root.read(edit.file.path).text != edit.file.text:
            raise OcigpuError(
                "OCIGPU-ENG-4", f"{edit.file.path}: another program changed it in the meantime", "try again"
            )
    done: list[tuple[EngineFile, str | None]] = []
    links: list[str] = []
    try:
        for edit in plan.edits:
            for file, text in _writes(root, edit):
                done.append((file, file.text))
                _put(root, file, text)
        for path, target in plan.links:
            if target:
                root.link(path, target)
                links.append(path)
            else:
                root.remove(path)
    except OcigpuError:
        for path in links:
            root.remove(path)
        for file, text in reversed(done):
            if root.read(file.path).text != text:
                _put(root, file, text)
        for edit in plan.edits:
            root.remove_directories(list(edit.directories))
        raise
    for edit in plan.edits:
        if edit.after is None:
            root.remove_directories(list(edit.directories))


def _writes(root: Root, edit: Edit) -> Iterator[tuple[EngineFile, str | None]]:
    """Yield the files that make up one edit with their texts, in order; None: it is removed."""
    file = edit.file
    backup, record = root.read(backup_path(file.path)), root.read(record_path(file.path))
    if edit.record is None:
        writes = [(file, edit.after), (backup, None), (record, None)]
    else:
        writes = [
            (_like(backup, file), edit.backup),
            (_like(record, file), dump_record(edit.record)),
            (file, edit.after),
        ]
    yield from ((target, text) for target, text in writes if target.text != text)


def _like(target: EngineFile, file: EngineFile) -> EngineFile:
    """Return a file with mode, owner and labels of another: what may not be read there may not be read here."""
    return target._replace(mode=file.mode, owner=file.owner, attributes=file.attributes)


def _put(root: Root, file: EngineFile, text: str | None) -> None:
    if text is None:
        root.remove(file.path)
    else:
        root.write(file, text)


def remaining_step(options: ConfigureOptions, plan: EnginePlan) -> str:
    """Return the step that makes the engine use the changed files, "" if the operator has nothing left to do.

    dockerd reads runtimes and a default runtime at a reload, but feature switches only at its start (docs.docker.com,
    "dockerd": configuration reload behavior).  It looks for the hook of --gpus only at its start, too (moby,
    daemon/nvidia_linux.go: init).  A reload never removes a default, and Docker 20.10 crashes when the runtime of that
    name is gone, so a removal needs a restart.
    """
    if options.engine == "podman":
        return ""
    homes = ((name, os.path.dirname(path)) for name, path in places.KUBERNETES.items())
    service = next((name for name, path in homes if plan.main.startswith(path)), options.engine)
    if options.root != "/":
        return f"restart {service} where the system in {options.root} runs, if it does"
    if options.engine == "docker":
        if plan.main == places.home_config("/", "docker/daemon.json"):
            return start_command("--user docker")
        if plan.main.startswith("/var/snap/"):
            return "snap restart docker"
        reload = options.wanted.name and not options.wanted.cdi and not plan.links
        restart = start_command("docker")
        return "systemctl reload docker" if reload and " && " not in restart else restart
    return (
        f"systemctl restart {service} (or {service}-agent)" if service in places.KUBERNETES else start_command(service)
    )
