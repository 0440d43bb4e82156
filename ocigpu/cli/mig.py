"""``ocigpu mig``: GPUs are cut into MIG devices as a file says."""

import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ocigpu.cli import show
from ocigpu.cli.arguments import takes
from ocigpu.cli.cleaning import undisturbed
from ocigpu.cli.common import load_facts, load_settings
from ocigpu.cli.containers import places_of
from ocigpu.containers.find import find_containers
from ocigpu.containers.report import make_reports
from ocigpu.containers.usage import UsageReader, join_usage
from ocigpu.containers.users import find_of_users
from ocigpu.core.errors import HostError, SettingsError, UsageError
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.mig import change_layouts, read_layouts
from ocigpu.gpus.nvidia.mig_layout import GpuChange, GpuLayout, WantedMig, plan_change
from ocigpu.kubernetes.mig_config import Layouts, make_layouts, parse_layout_file, to_document, wanted_of
from ocigpu.system.files import read_bounded
from ocigpu.system.store import open_lock

MAX_BYTES = 1 << 20


class Asked(NamedTuple):
    """What the options shared by the commands say."""

    file: str
    name: str
    mode_only: bool
    config: str
    json: bool


def asked(
    config_file: str = "",
    selected_config: str = "",
    mode_change_only: bool = False,
    config: str = "",
    json: bool = False,
) -> Asked:
    return Asked(config_file, selected_config, mode_change_only, config, json)


class _Host(NamedTuple):
    facts: HostFacts
    settings: Settings
    gpus: tuple[GpuLayout, ...]

    def planner(self, options: Asked, held: dict[str, str]) -> Callable[[Sequence[GpuLayout]], list[GpuChange]]:
        """Return what plans the changes to the layout that the options name."""
        entries = _layouts(options, self.gpus).select(options.name)

        def plan(gpus: Sequence[GpuLayout]) -> list[GpuChange]:
            changes = [plan_change(gpu, wanted, held) for gpu, wanted in wanted_of(entries, gpus)]
            return [_mode_only(change, held) for change in changes] if options.mode_only else changes

        return plan


def _mode_only(change: GpuChange, held: dict[str, str]) -> GpuChange:
    if change.mode is None or change.mode == change.gpu.mode:
        return GpuChange(change.gpu, change.mode, change.gpu.instances)
    return plan_change(change.gpu, WantedMig(bool(change.mode), {}), held)


def _layouts(options: Asked, gpus: Sequence[GpuLayout]) -> Layouts:
    if not options.file:
        return make_layouts(gpus)
    try:
        with sys.stdin.buffer if options.file == "-" else Path(options.file).open("rb") as file:
            text = read_bounded(file, MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise SettingsError("OCIGPU-MIG-1", f"read {options.file}: {error.strerror}") from error
    return parse_layout_file(text, "standard input" if options.file == "-" else options.file)


def _look(options: Asked) -> _Host:
    settings = load_settings(options.config)
    facts = load_facts(settings)
    with show.Progress("asking NVML"):
        return _Host(facts, settings, read_layouts(facts))


def _holders(host: _Host, state_dir: list[str] | None) -> tuple[dict[str, str], list[str]]:
    """Return who has or uses a GPU or MIG device, by UUID, and notes."""
    containers, notes = find_containers(places_of(state_dir))
    reader = UsageReader(host.facts, host.settings, 1.0)
    reader.ask_once()
    reports = make_reports([one for one in containers if one.pid], host.facts, host.settings)
    held = {}
    for used in join_usage(host.facts, reader.read(), reports):
        pids = [process.pid for user in used.users for process in user.processes if not user.id]
        names = [user.name for user in used.users if user.id] + [f"process {pid}" for pid in pids]
        if names:
            held[used.usage.uuid] = ", ".join(names)
    users, more = find_of_users(host.facts, host.settings) if not os.geteuid() else ([], [])
    for one in users:
        held |= {uuid: f"{one.name} of user {one.user}" for _, uuid, _ in one.gpus}
    if reader.problem:
        raise HostError("OCIGPU-MIG-3", f"processes on the GPUs: {reader.problem}", "--force goes on without knowing.")
    return held, [*notes, *more]


@takes(asked)
def plan_command(options: Asked, force: bool = False, state_dir: list[str] | None = None) -> int:
    host = _look(options)
    held, notes = ({}, []) if force else _holders(host, state_dir)
    changes = host.planner(options, held)(host.gpus)
    _show(changes, options.json, "nothing was changed")
    show.notes(notes)
    return int(any(change.problem for change in changes))


@takes(asked)
def apply_command(options: Asked, force: bool = False, state_dir: list[str] | None = None) -> None:
    with undisturbed(), _alone():  # what was destroyed is made again, or put back, before a signal ends us
        _apply(options, force, state_dir)


@contextmanager
def _alone() -> Iterator[None]:
    lock = open_lock("mig.lock")
    try:
        if lock >= 0:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise HostError("OCIGPU-MIG-3", "another process changes MIG devices", "Wait for its end.") from error
    finally:
        if lock >= 0:
            os.close(lock)


def _apply(options: Asked, force: bool, state_dir: list[str] | None) -> None:
    host = _look(options)
    held, notes = ({}, []) if force else _holders(host, state_dir)
    plan = host.planner(options, held)
    changes = plan(host.gpus)
    if any(change.changes or change.problem for change in changes):
        with show.Progress("changing MIG devices"):
            change_layouts(host.facts, host.gpus, plan, options.mode_only)
    _show(changes, options.json, "done")
    show.notes(notes)


@takes(asked)
def assert_command(options: Asked, valid_config: bool = False) -> int:
    if valid_config:
        if not options.file:
            raise UsageError("--valid-config needs --config-file")
        _layouts(options, ()).select(options.name)
        return 0
    host = _look(options)
    changes = host.planner(options, {})(host.gpus)
    _show(changes, options.json, "nothing was changed")
    return int(any(change.changes or change.problem for change in changes))


def export_command(config: str = "", json: bool = False) -> None:
    host = _look(Asked("", "", False, config, json))
    document = to_document([gpu for gpu in host.gpus if gpu.mode is not None])
    if json:
        show.data(document)
    else:
        print(yaml.safe_dump(document, sort_keys=False), end="")


def _show(changes: list[GpuChange], json: bool, done: str) -> None:
    if json:
        show.data({"gpus": [_to_json(change) for change in changes]})
        return
    for change in changes:
        gpu = change.gpu
        print(f"GPU {gpu.number}  {gpu.model} ({gpu.uuid})")
        if change.problem:
            print(show.styled(f"  ! {change.problem}", "31"))
            continue
        lines = [] if change.mode is None else [f"~ MIG mode {'on' if change.mode else 'off'}"]
        lines += [f"  {gpu.name_of(one)} at {one.start} stays" for one in change.keep]
        lines += [f"- {gpu.name_of(one)} at {one.start}" for one in change.destroy]
        lines += [f"+ {gpu.name_of(one)} at {one.start}" for one in change.create]
        show.diff(lines or ["  nothing to do"])
    parts = {
        "kept": sum(len(change.keep) for change in changes),
        "destroyed": sum(len(change.destroy) for change in changes),
        "made": sum(len(change.create) for change in changes),
        "impossible": sum(bool(change.problem) for change in changes),
    }
    print("; ".join([", ".join(f"{word}: {count}" for word, count in parts.items() if count) or "0 GPUs", done]))


def _to_json(change: GpuChange) -> dict[str, Any]:
    gpu = change.gpu
    parts = {"keep": change.keep, "destroy": change.destroy, "create": change.create}
    return {
        "index": gpu.number,
        "uuid": gpu.uuid,
        "mig-mode": bool(gpu.mode),
        "change-mode": change.mode is not None,
        "problem": change.problem,
        **{
            word: [{"profile": gpu.name_of(one), "start": one.start, "uuids": list(one.uuids)} for one in each]
            for word, each in parts.items()
        },
    }
