"""``ocigpu fabric``: which GPUs are connected by NVLink, by way of Fabric Manager."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

from ocigpu.cli.front import show
from ocigpu.cli.front.arguments import Range, takes
from ocigpu.cli.front.cleaning import undisturbed
from ocigpu.cli.front.common import load_settings
from ocigpu.cli.front.optional import needing
from ocigpu.core.errors import UsageError, quoted
from ocigpu.gpus.nvidia.fabric.libnvfm import DEFAULT_ADDRESS, open_fabric
from ocigpu.gpus.nvidia.fabric.partitions import (
    UNLINKED,
    FabricError,
    FabricStep,
    Partition,
    RestorableFabric,
    audit_partitions,
    check_isolates,
    choose_partition,
    choose_singles,
    find_partition,
    must_find,
    plan_steps,
    show_gpus,
    show_ids,
    show_sizes,
    sizes,
)
from ocigpu.gpus.nvidia.fabric.state import FabricState, FabricStore, KeptFabric, KeptSet, state_directory
from ocigpu.system.service import ServiceLog, Signals, notify_service_manager

COLUMNS = ("PARTITION ID", "STATUS", "GPUs", "NVLINKS", "GPU PHYSICAL IDs")
UNREACHED = ("OCIGPU-FAB-2", "OCIGPU-FAB-7")
"""What a manager that is starting answers: it is asked again."""


class Reach(NamedTuple):
    """Where the manager is, and this host's state, as the options that the commands share say."""

    fabric: RestorableFabric
    store: FabricStore

    @property
    def kept(self) -> KeptFabric:
        return KeptFabric(self.fabric, self.store)


def reach(address: str = DEFAULT_ADDRESS, library: str = "", tls: str = "", state: str = "", config: str = "") -> Reach:
    simulation = load_settings(config).simulation_root
    store = FabricStore(state or state_directory(simulation))
    if not address.startswith("grpc:"):
        return Reach(open_fabric(address, library, simulation), store)
    with needing(f"address {address}: it needs grpcio and protobuf", "OCIGPU-FAB-1"):
        from ocigpu.kubernetes.fabric.client import open_fabric as open_service
    return Reach(open_service(address, library, simulation, tls), store)


@takes(reach)
def list_command(at: Reach) -> "show.Answer":
    partitions = at.fabric.list_partitions()
    yield {"partitions": [_to_json(one) for one in partitions]}
    _print_table(partitions)


class WantedPartitions(NamedTuple):
    """Partitions to make active, and whether their GPUs are apart where a container gets all of them."""

    partitions: tuple[Partition, ...]
    unlinked: bool


@takes(reach)
def plan_command(
    at: Reach,
    ids: list[str] | None = None,
    gpus: Annotated[int, Range(0, 64)] = 0,
    free: str = "",
    unlinked: bool = False,
) -> "show.Answer":
    listed = at.fabric.list_partitions()
    state = at.store.read() or FabricState()
    wanted = _choose(listed, state, ids or [], gpus, free, unlinked)
    steps = plan_steps(listed, wanted.partitions, state.leased)
    yield from _show_steps(wanted, steps, "nothing was changed")


@takes(reach)
def activate_command(
    at: Reach,
    ids: list[str] | None = None,
    gpus: Annotated[int, Range(0, 64)] = 0,
    free: str = "",
    unlinked: bool = False,
    replace: bool = False,
    lease: str = "",
) -> "show.Answer":
    kept = at.kept
    listed = kept.list_partitions()
    check_isolates(listed)
    state = kept.read_state()
    wanted = _choose(listed, state, ids or [], gpus, free, unlinked)
    steps = plan_steps(listed, wanted.partitions, state.leased if replace else _held(listed))
    with undisturbed(), _report_done_on_error() as done:
        for step in steps:
            if step.verb == "deactivate":
                kept.deactivate(step.physical_ids, force=False)
                done.append(step)
        for one in wanted.partitions:
            kept.activate(one.physical_ids, lease)
            done.append(
                FabricStep("activate", one.physical_ids, f"{one.links} NVLinks, according to the manager's list")
            )
    yield from _show_steps(wanted, done, "done", kept.notes)


@contextmanager
def _report_done_on_error() -> Iterator[list[FabricStep]]:
    """Yield a list for completed steps; an error lists them, because they stay done."""
    done: list[FabricStep] = []
    try:
        yield done
    except FabricError as error:
        before = ", ".join(f"{step.verb} {show_gpus(step.physical_ids)}" for step in done)
        if not before:
            raise
        raise FabricError(error.code, f"{error.message}; done before: {before}", error.hint, error.status) from error


def _held(listed: Iterable[Partition]) -> set[int]:
    """Return the GPUs that have a partition: without --replace none is deactivated."""
    return {gpu for one in listed if one.is_active for gpu in one.physical_ids}


@takes(reach)
def deactivate_command(at: Reach, ids: list[str], force: bool = False) -> "show.Answer":
    kept = at.kept
    listed = kept.list_partitions()
    wanted = [must_find(listed, each) for each in _parse_sets(ids)]
    state = kept.read_state()
    for one in wanted if not force else ():  # nothing is half done
        state.check_unleased(one.physical_ids)
    with undisturbed(), _report_done_on_error() as done:
        for one in wanted:
            kept.deactivate(one.physical_ids, force)
            done.append(FabricStep("deactivate", one.physical_ids, "according to the manager's list"))
    yield from _show_steps(WantedPartitions((), False), done, "done", kept.notes)


@takes(reach)
def audit_command(at: Reach, expect: list[str] | None = None) -> "show.Answer":
    kept = at.kept
    listed = kept.list_partitions()
    check_isolates(listed)
    state = kept.read_state()
    expected = _parse_sets(expect) if expect else [one.physical_ids for one in state.sets if not one.broken]
    found = audit_partitions(listed, expected)
    broken = [] if expect else list(state.broken)
    deviations = [{"problem": one.problem, "physical-ids": one.physical_ids, "text": one.text} for one in found]
    data = {"deviations": deviations, "broken": [_kept_json(one) for one in broken], "notes": kept.notes}
    yield data, int(bool(found or broken))
    rows = [(one.problem, show_ids(one.physical_ids), one.text) for one in found]
    rows += [("broken", show_ids(one.physical_ids), f"{one.lease or 'by hand'}: {one.broken}") for one in broken]
    if rows:
        show.table(("problem", "gpu physical ids", "what"), rows)
    else:
        print(f"as expected: {show.count(len(expected), 'active partition')}")


@takes(reach)
def restore_command(
    at: Reach,
    follow: bool = False,
    interval: Annotated[float, Range(0.1, 30.0)] = 5.0,
    nothing: bool = False,
    json: bool = False,
) -> int:
    if follow:
        _follow(at, interval, json)
        return 0
    return show.answer(_restore(at.kept, nothing), json)


def _restore(kept: KeptFabric, nothing: bool) -> "show.Answer":
    given = kept.restore(nothing)
    state = kept.read_state()
    sets = [_kept_json(one) for one in state.sets]
    data = {"waited": given is not None, "given-back": given or (), "sets": sets, "notes": kept.notes}
    yield data, int(bool(state.broken))
    if given is None:
        print("the manager does not wait for partitions: nothing was sent")
    else:
        print(f"told the manager the active partitions: {'; '.join(map(show_ids, given)) or 'nothing'}")
    show.notes([f"{show_gpus(one.physical_ids)}, {one.lease or 'by hand'}: {one.broken}" for one in state.broken])


def _follow(at: Reach, interval: float, json: bool) -> None:
    """Look at the manager until a signal comes: its minute after a restart is ours as well."""
    log = ServiceLog(json)
    kept = at.kept
    with Signals() as signals:
        while True:
            _restore_once(kept, log)
            signals.wait(interval)
            if signals.stopping:
                return


def _restore_once(kept: KeptFabric, log: ServiceLog) -> None:
    try:
        given = kept.restore()
    except FabricError as error:
        log.once("manager", "warning" if error.code in UNREACHED else "error", error.line)
        return
    log.once("manager", "info", "")
    if given is not None:
        log("info", f"told the manager the active partitions: {'; '.join(map(show_ids, given)) or 'nothing'}")
    for note in kept.notes:
        log("error", note)
    kept.notes.clear()


@takes(reach)
def serve_command(
    at: Reach, listen: str, allow: list[str] | None = None, serve_tls: str = "", json: bool = False
) -> None:
    with needing("listen: it needs grpcio and protobuf", "OCIGPU-FAB-1"):
        from ocigpu.kubernetes.fabric.messages import parse_service
        from ocigpu.kubernetes.fabric.server import FabricServer
    wanted = parse_service(listen, listening=True)
    if not allow:
        raise UsageError("no caller is allowed", "--allow cid:2 (the host), --allow uid:0, or a name in a certificate")
    if (wanted.kind == "tcp") != bool(serve_tls):
        hint = "For other sockets than TCP the kernel identifies the caller."
        raise UsageError("--serve-tls is for tcp, and tcp needs it", hint)
    log = ServiceLog(json)
    try:
        at.fabric.list_partitions()
    except FabricError as error:
        if error.code == "OCIGPU-FAB-1":  # the library cannot be loaded: no call would succeed
            raise
        log("warning", f"the manager is not ready yet: {error.line}")
    with Signals(hangup=False) as signals:
        server = FabricServer(at.fabric, wanted, allow, log, serve_tls)
        log("info", f"listening on {server.address}, for {', '.join(allow)}")
        notify_service_manager("READY=1")
        while not signals.stopping:
            signals.wait(math.inf)
        server.stop()


def _choose(
    listed: tuple[Partition, ...], state: FabricState, ids: Sequence[str], gpus: int, free: str, unlinked: bool
) -> WantedPartitions:
    """Return the partitions of the sets that are named, or of a number of free GPUs; raises FabricError."""
    if bool(ids) == bool(gpus):
        raise UsageError("name sets of GPUs (1,3), or their number (--gpus 2)")
    if ids:
        named = _named(listed, _parse_sets(ids), unlinked)
        for one in named.partitions:
            state.check_whole(one.physical_ids)
        return named
    left = set(_parse_set(free)) if free else _free(listed, state)
    chosen = choose_partition(listed, left, gpus)
    if chosen:
        return WantedPartitions((chosen,), False)
    there = f"{show.count(gpus, 'GPU')} of {show_ids(left) or 'none'}"
    if gpus in sizes(listed):
        raise FabricError("OCIGPU-FAB-4", f"choose {there}: no partition of that size is wholly free")
    if gpus > len(left):
        raise FabricError("OCIGPU-FAB-4", f"choose {there}: so many are not free")
    singles = choose_singles(listed, left, gpus) if unlinked else ()
    if singles:
        return WantedPartitions(singles, True)
    raise _no_such_size(f"choose {there}: the board's sizes are {show_sizes(listed)}", unlinked)


def _named(listed: tuple[Partition, ...], sets: Sequence[tuple[int, ...]], unlinked: bool) -> WantedPartitions:
    found: list[Partition] = []
    apart = False
    for each in sets:
        one = find_partition(listed, each)
        singles = [find_partition(listed, [gpu]) for gpu in each] if unlinked and one is None else []
        if one is None and all(singles) and singles:
            found += [single for single in singles if single]
            apart = True
        else:
            found.append(one or must_find(listed, each))
    every = [gpu for one in found for gpu in one.physical_ids]
    twice = {gpu for gpu in every if every.count(gpu) > 1}
    if twice:
        raise UsageError(f"{show_gpus(twice)}: in two sets")
    return WantedPartitions(tuple(found), apart)


def _no_such_size(message: str, unlinked: bool) -> FabricError:
    hint = None if unlinked else f"--unlinked takes single partitions: {UNLINKED}"
    return FabricError("OCIGPU-FAB-4", message, hint)


def _free(listed: Iterable[Partition], state: FabricState) -> set[int]:
    """Return the GPUs of nobody: without a lease, in no broken set, and alone where a partition of theirs is active."""
    broken = {gpu for one in state.broken for gpu in one.physical_ids}
    linked = {gpu for one in listed if one.is_active and len(one.physical_ids) > 1 for gpu in one.physical_ids}
    return {gpu for one in listed for gpu in one.physical_ids} - linked - state.leased - broken


def _parse_sets(texts: Iterable[str]) -> list[tuple[int, ...]]:
    return [_parse_set(text) for text in texts]


def _parse_set(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]?(,[1-9][0-9]?)*", text):
        raise UsageError(f"GPUs {quoted(text)}: not physical ids such as 1,3")
    found = tuple(sorted(map(int, text.split(","))))
    if len(set(found)) < len(found):
        raise UsageError(f"GPUs {quoted(text)}: one is named twice")
    return found


def _show_steps(
    wanted: WantedPartitions, steps: Sequence[FabricStep], done: str, notes: Collection[str] = ()
) -> "show.Answer":
    yield {
        "partitions": [_to_json(one) for one in wanted.partitions],
        "linked": not wanted.unlinked,
        "steps": [{"verb": step.verb, "physical-ids": step.physical_ids, "reason": step.reason} for step in steps],
        "notes": [*notes],
    }
    for step in steps:
        print(f"{step.verb:<11} {show_gpus(step.physical_ids)}: {step.reason}")
    print(done)
    costs = [f"{show_ids(gpu for one in wanted.partitions for gpu in one.physical_ids)}: {UNLINKED}"]
    show.notes([*notes, *(costs if wanted.unlinked else ())])


def _print_table(partitions: tuple[Partition, ...]) -> None:
    rows = [COLUMNS, tuple("-" * len(name) for name in COLUMNS)]
    for one in partitions:
        status = "Active" if one.is_active else "Inactive"
        count = len(one.physical_ids)
        rows.append((str(one.partition_id), status, str(count), str(one.links), show_ids(one.physical_ids)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _to_json(one: Partition) -> dict[str, Any]:
    return {
        "partition-id": one.partition_id,
        "active": one.is_active,
        "physical-ids": list(one.physical_ids),
        "nvlinks": one.links,
        "nvlinks-by-gpu": [{"available": now, "most": most} for now, most in one.nvlinks],
    }


def _kept_json(one: KeptSet) -> dict[str, Any]:
    return {
        "physical-ids": list(one.physical_ids),
        "lease": one.lease,
        "generation": one.generation,
        "settled": one.settled,
        "broken": one.broken,
    }
