"""``ocigpu mig``: GPUs are cut into MIG devices as a file says."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import yaml

from ocigpu.cdi.write import write_file
from ocigpu.cli.containers.containers import places_of
from ocigpu.cli.front import show
from ocigpu.cli.front.arguments import takes
from ocigpu.cli.front.cleaning import undisturbed
from ocigpu.cli.front.common import check_one_of, load_facts, load_settings, read_named
from ocigpu.containers.find import find_containers
from ocigpu.containers.report import make_reports
from ocigpu.containers.usage import UsageReader, join_usage
from ocigpu.containers.users import find_of_users
from ocigpu.core.errors import HostError, OcigpuError, OsErrorAs, SettingsError, UsageError
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.mig import Planner, alone, change_layouts, read_layouts
from ocigpu.gpus.nvidia.mig_layout import GpuChange, GpuLayout, WantedMig, plan_change
from ocigpu.kubernetes.dra.state import ClaimStore, find_stores
from ocigpu.kubernetes.mig.layouts import (
    NO_HOOKS,
    Hooks,
    Layouts,
    make_layouts,
    missing_gpus,
    parse_checkpoint,
    parse_hooks,
    parse_layout_file,
    to_checkpoint,
    to_document,
    wanted_of,
)
from ocigpu.system.files import remove_if_possible
from ocigpu.system.store import SYSTEM_DIRECTORY, open_cache, read_cached, write_cached

MAX_BYTES = 1 << 20
BEFORE = "mig-before.json"
"""In the directory of what is kept: how the GPUs were before a change that did not end."""
FORMATS = ("yaml", "json")
KUBELET = "/var/lib/kubelet"


class Asked(NamedTuple):
    """What the options shared by the commands say."""

    config_file: str = ""
    selected_config: str = ""
    mode_only: bool = False
    config: str = ""


class _Host(NamedTuple):
    facts: HostFacts
    settings: Settings
    gpus: tuple[GpuLayout, ...]

    def asked(self, options: Asked, held: Callable[[], dict[str, str]]) -> "tuple[Planner, list[str]]":
        """Return what plans the changes to the layout that the options name, and a note about GPUs that are not here.

        The file is read once: it may be standard input.
        """
        entries = _layouts(options, self.gpus).select(options.selected_config)

        def plan(gpus: Sequence[GpuLayout]) -> list[GpuChange]:
            users = held()
            changes = [plan_change(gpu, wanted, users) for gpu, wanted in wanted_of(entries, gpus)]
            return [_mode_only(change, users) for change in changes] if options.mode_only else changes

        return plan, list(filter(None, [missing_gpus(entries, self.gpus)]))


def _mode_only(change: GpuChange, held: dict[str, str]) -> GpuChange:
    if change.mode is None or change.mode == change.gpu.mode:
        return GpuChange(change.gpu, change.mode, change.gpu.instances)
    return plan_change(change.gpu, WantedMig(bool(change.mode), {}), held)


def _layouts(options: Asked, gpus: Sequence[GpuLayout]) -> Layouts:
    return parse_layout_file(*_read(options.config_file)) if options.config_file else make_layouts(gpus)


def _read(path: str) -> tuple[str, str]:
    """Return the text of a file, and what to call it; "-" is standard input."""
    with OsErrorAs(SettingsError, "OCIGPU-MIG-1", f"read {path}"):
        text = read_named(path, MAX_BYTES).decode(errors="replace")
    return text, "standard input" if path == "-" else path


def _read_host(options: Asked) -> _Host:
    settings = load_settings(options.config)
    facts = load_facts(settings)
    with show.Progress("querying NVML"):
        return _Host(facts, settings, read_layouts(facts))


class Sparing(NamedTuple):
    """What the options say of who is spared, shared by the commands that look for them."""

    force: bool = False
    state_dir: list[str] | None = None
    kubelet_directory: str = ""


class _Holders:
    """Who has or uses a GPU or MIG device, by UUID; ``known``: until :meth:`look` this stands for what is found.

    ``locks``: what keeps drivers of claims from preparing any from the look on, None not to.
    """

    def __init__(
        self, host: _Host, spared: Sparing, known: dict[str, str] | None = None, locks: ExitStack | None = None
    ) -> None:
        self._host, self._spared, self._locks = host, spared, locks
        self._known = {} if spared.force else known
        self.notes: list[str] = []

    def __call__(self) -> dict[str, str]:
        if self._known is None:
            kubelet = self._spared.kubelet_directory or f"{self._host.settings.simulation_root}{KUBELET}"
            stores = find_stores(f"{kubelet}/plugins")
            if self._locks is not None:
                for store in stores:
                    self._locks.enter_context(store.locked())
            held, self.notes = _find_holders(self._host, self._spared.state_dir)
            claims = _find_claims(stores, self._host.gpus)
            self._known = {uuid: ", ".join(filter(None, (held.get(uuid), claims.get(uuid)))) for uuid in held | claims}
        return self._known

    def look(self) -> None:
        """Look, or look again, when asked next; until then claims may come and go."""
        if self._locks is not None:
            self._locks.close()
        self._known = {} if self._spared.force else None


def _find_claims(stores: Iterable[ClaimStore], gpus: Sequence[GpuLayout]) -> dict[str, str]:
    """Return the claims that GPUs and MIG devices are prepared for, by UUID.

    Their containers may not be there yet: images are pulled after claims were prepared.
    """
    found: dict[str, list[str]] = {}
    for record in (record for store in stores for record in store.prepared()):
        for device in (each.device for each in record.devices):
            made = [
                uuid
                for gpu in gpus
                for one in gpu.instances
                if (gpu.uuid, (one.profile, one.start)) == (device.id, device.profile)
                for uuid in one.uuids
            ]
            for uuid in made if device.profile else [device.id]:
                found.setdefault(uuid, []).append(f"claim {record.claim}")
    return {uuid: ", ".join(dict.fromkeys(names)) for uuid, names in found.items()}


def _find_holders(host: _Host, state_dir: list[str] | None) -> tuple[dict[str, str], list[str]]:
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
        raise HostError("OCIGPU-MIG-3", f"processes on the GPUs: {reader.problem}", "--force continues anyway.")
    return held, [*notes, *more]


@takes(Asked, Sparing)
def plan_command(options: Asked, spared: Sparing) -> "show.Answer":
    host = _read_host(options)
    held = _Holders(host, spared)
    plan, missing = host.asked(options, held)
    changes = plan(host.gpus)
    failed = any(change.problem for change in changes)
    yield from _show(changes, "nothing was changed", held.notes, failed, missing)


@takes(Asked, Sparing)
def apply_command(
    options: Asked, spared: Sparing, hooks_file: str = "", skip_reset: bool = False, json: bool = False
) -> None:
    hooks = _hooks(options, hooks_file, skip_reset)
    with (
        undisturbed(),
        alone(load_settings(options.config).simulation_root),
        ExitStack() as locks,
    ):  # what was destroyed is made or put back before a signal ends us
        hooks.run("apply-start")
        done = False
        try:
            host = _read_host(options)
            # hooks end programs before something is changed: only then it is asked who is left
            held = _Holders(host, spared, {} if hooks.end_users else None, locks)
            planner, missing = host.asked(options, held)
            changes, notes = _change(host, options, planner, held, not skip_reset, hooks)
            show.answer(_show(changes, "done", notes, missing=missing), json)  # it is so, whatever the last hook does
            done = True
        finally:
            locks.close()
            with nullcontext() if done else suppress(HostError):  # the first error is what is to be mended
                hooks.run("apply-exit")


def _hooks(options: Asked, hooks_file: str, skip_reset: bool) -> Hooks:
    variables = {
        "MIG_PARTED_CONFIG_FILE": options.config_file,
        "MIG_PARTED_SELECTED_CONFIG": options.selected_config,
        "MIG_PARTED_HOOKS_FILE": hooks_file,
        "MIG_PARTED_SKIP_RESET": str(skip_reset).lower(),
        "MIG_PARTED_MODE_CHANGE_ONLY": str(options.mode_only).lower(),
    }
    return parse_hooks(*_read(hooks_file), variables) if hooks_file else NO_HOOKS


@contextmanager
def _noted(host: _Host, notes: list[str]) -> Iterator[None]:
    """Have a checkpoint at hand while the GPUs are cut: what is killed, or cannot put all back, leaves it behind."""
    root = host.settings.simulation_root
    before = to_checkpoint(host.gpus)
    directory = open_cache(True, root)
    left = read_cached(directory, BEFORE)
    try:
        if left:
            path = f"{root}{SYSTEM_DIRECTORY}/{BEFORE}"
            notes.append(f"an earlier change ended half-way; what was before it: ocigpu mig restore -f {path}")
        else:
            write_cached(directory, BEFORE, json.dumps(before).encode())
        yield
        remove_if_possible(directory, BEFORE)
    except OcigpuError:
        if not left and to_checkpoint(read_layouts(host.facts)) == before:
            remove_if_possible(directory, BEFORE)
        raise
    finally:
        if directory >= 0:
            os.close(directory)


def _change(
    host: _Host,
    options: Asked,
    planner: Planner,
    held: _Holders,
    reset: bool = True,
    hooks: Hooks = NO_HOOKS,
) -> tuple[list[GpuChange], list[str]]:
    """Change the GPUs; return what was changed, and notes."""

    def announce(moment: str) -> bool:
        if hooks.end_users:
            held.look()  # what is ended gives its claims back meanwhile
        hooks.run(moment)
        return hooks.end_users

    earlier: list[str] = []
    with _noted(host, earlier), show.Progress("changing MIG devices"):
        changes = change_layouts(host.facts, host.gpus, planner, options.mode_only, reset, announce)
    return changes, [*earlier, *held.notes]


@takes(Asked)
def assert_command(options: Asked, valid_config: bool = False) -> "show.Answer":
    if valid_config:
        if not options.config_file:
            raise UsageError("--valid-config needs --config-file")
        _layouts(options, ()).select(options.selected_config)
        return
    host = _read_host(options)
    plan, missing = host.asked(options, dict)
    changes = plan(host.gpus)
    if not options.mode_only:  # as the vendor's: a layout of other models is not what these GPUs are
        named = {change.gpu.uuid for change in changes}
        left = [gpu for gpu in host.gpus if gpu.mode is not None and gpu.uuid not in named]
        changes += [GpuChange(gpu, None, gpu.instances, problem="the layout does not mention it") for gpu in left]
    differs = any(change.changes or change.problem for change in changes)
    yield from _show(changes, "nothing was changed", failed=differs, missing=missing)


def export_command(config: str = "", output_format: str = "yaml", config_label: str = "current") -> "show.Answer":
    yield from _write(to_document(_read_host(Asked(config=config)).gpus, config_label), output_format)


def generate_command(config: str = "", output_format: str = "yaml", output_file: str = "") -> "show.Answer":
    yield from _write(make_layouts(_read_host(Asked(config=config)).gpus).to_document(), output_format, output_file)


def _write(document: dict[str, Any], form: str, path: str = "") -> "show.Answer":
    check_one_of("--output-format", form, FORMATS)
    text = json.dumps(document, indent=2) if form == "json" else yaml.safe_dump(document, sort_keys=False).rstrip()
    if path:
        _replace(path, text)
    else:
        yield document
        print(text)


def _replace(path: str, text: str) -> None:
    with OsErrorAs(HostError, "OCIGPU-MIG-3", f"write {path}"):
        write_file(path, f"{text}\n".encode())


def checkpoint_command(checkpoint_file: str, config: str = "") -> "show.Answer":
    gpus = _read_host(Asked(config=config)).gpus
    _replace(checkpoint_file, json.dumps(to_checkpoint(gpus)))
    yield {"checkpoint-file": checkpoint_file, "gpus": [gpu.uuid for gpu in gpus]}


@takes(Sparing)
def restore_command(spared: Sparing, checkpoint_file: str, config: str = "") -> "show.Answer":
    checkpoint = parse_checkpoint(*_read(checkpoint_file))
    options = Asked(config=config)
    with undisturbed(), alone(load_settings(config).simulation_root), ExitStack() as locks:
        host = _read_host(options)
        held = _Holders(host, spared, locks=locks)
        changes, notes = _change(host, options, checkpoint.planner(held), held)
    yield from _show(changes, "done", notes)


def _show(
    changes: list[GpuChange], done: str, notes: Sequence[str] = (), failed: bool = False, missing: Sequence[str] = ()
) -> "show.Answer":
    yield {"gpus": [_to_json(change) for change in changes], "notes": [*missing, *notes]}, int(failed)
    show.notes(missing)
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
    if changes:
        print(
            "; ".join(
                [", ".join(f"{word}: {count}" for word, count in parts.items() if count) or "nothing to do", done]
            )
        )
    else:
        print("the layout is about no GPU of this host; nothing was changed")
    show.notes(notes)


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
