"""The host's record of its partitions: who has which set, and what a manager gets after its restart.

The file is on the host, not in the service machine, and survives both.  Sets are kept by physical ids.  The manager's
last list is kept for its numbers: one that waits after a restart takes numbers and lists nothing.  A change is recorded
before it starts, and again when the manager's list has proven it: a process that is killed in between leaves a set that
the next query settles.  Facts: NVIDIA Fabric Manager User Guide, "Resiliency", and fmSetActivatedFabricPartitions in
nv_fm_agent.h.

What hardware has yet to confirm: that WAITING is what a manager answers that waits, and what a restart of its machine
does to machines with one GPU.
"""

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from ocigpu.gpus.nvidia.fabric.partitions import (
    Fabric,
    FabricError,
    Partition,
    RestorableFabric,
    must_find,
    show_gpus,
    show_ids,
)
from ocigpu.system.files import lock_file, read_regular, remove_drafts, replace_file
from ocigpu.system.locks import holding
from ocigpu.system.proc import read_boot_id
from ocigpu.system.state import open_state_directory

DIRECTORY = "/var/lib/ocigpu/fabric"
NAME, LOCK = "state.json", "lock"
FORMAT = 1
MAX_BYTES = 1 << 20
LOCK_LIMIT = 90.0
"""Seconds to wait for another program's change: it may train links."""
WAITING, NOT_TOLD = "OCIGPU-FAB-7", "OCIGPU-FAB-3"
"""Codes of a manager that waits for the list of active sets, and of one that starts without waiting for it."""

NOT_ROUTED = (
    "its partition was found inactive: the manager or its service machine was restarted without the list of active sets"
)


@dataclass(frozen=True)
class KeptSet:
    """A set that is active for a lease or an operator.

    ``lease``: whose, "" for one that an operator made; ``settled``: the manager's list has proven it; ``broken``: why
    the machine that uses it has lost its NVLinks, "" when it has not.
    """

    physical_ids: tuple[int, ...]
    lease: str = ""
    generation: int = 0
    settled: bool = False
    broken: str = ""


@dataclass(frozen=True)
class FabricState:
    """All of it.  ``epoch`` counts the restarts that lost partitions; ``known``: the manager's last list."""

    boot_id: str = ""
    epoch: int = 0
    known: tuple[Partition, ...] = ()
    sets: tuple[KeptSet, ...] = ()

    def find(self, physical_ids: Collection[int]) -> KeptSet | None:
        """Return the record of exactly these GPUs."""
        wanted = tuple(sorted(physical_ids))
        return next((one for one in self.sets if one.physical_ids == wanted), None)

    def with_set(self, changed: KeptSet) -> "FabricState":
        """Return the state with a set, which replaces the record of the same GPUs."""
        return replace(self.without(changed.physical_ids), sets=(*self.without(changed.physical_ids).sets, changed))

    def without(self, physical_ids: Collection[int]) -> "FabricState":
        """Return the state without that set."""
        wanted = tuple(sorted(physical_ids))
        return replace(self, sets=tuple(one for one in self.sets if one.physical_ids != wanted))

    def check_unleased(self, physical_ids: Collection[int]) -> None:
        """Raise FabricError (OCIGPU-FAB-5) if exactly these GPUs are leased."""
        kept = self.find(physical_ids)
        if kept and kept.lease:
            hint = "End its users and reset it first. --force deactivates it while they run."
            raise FabricError("OCIGPU-FAB-5", f"deactivate {show_gpus(physical_ids)}: held by {kept.lease}", hint)

    def check_whole(self, physical_ids: Collection[int]) -> None:
        """Raise FabricError (OCIGPU-FAB-5) when one of these GPUs is of a broken set.

        The manager lists such a set as inactive, so it names no conflict, and the set's machine may run on.
        """
        for one in self.broken:
            if not set(one.physical_ids).isdisjoint(physical_ids):
                text = f"activate {show_gpus(physical_ids)}: {show_gpus(one.physical_ids)}{_of(one)}: {one.broken}"
                hint = f"Deactivate {show_ids(one.physical_ids)} first, when nothing runs on it."
                raise FabricError("OCIGPU-FAB-5", text, hint)

    @property
    def leased(self) -> frozenset[int]:
        """The GPUs of leased sets."""
        return frozenset(gpu for one in self.sets if one.lease for gpu in one.physical_ids)

    @property
    def broken(self) -> tuple[KeptSet, ...]:
        """The sets whose users have lost their NVLinks."""
        return tuple(one for one in self.sets if one.broken)


def sets_to_restore(state: FabricState, boot_id: str) -> tuple[tuple[int, ...], ...]:
    """Return the sets for a manager that waits after its restart.

    Not a set that was just being changed: no machine runs on it yet, or any more.  Nothing after a restart of the host.
    """
    return tuple(one.physical_ids for one in state.sets if one.settled and not one.broken and state.boot_id == boot_id)


def settle(state: FabricState, listed: tuple[Partition, ...], boot_id: str) -> tuple[FabricState, tuple[str, ...]]:
    """Return the state after reading the manager's list, and notes for an operator.

    An inactive partition of a lease is not activated again below its machine, whose driver looked at the fabric when it
    was loaded: the lease is broken, and stays so until the set is deactivated.
    """
    notes = []
    if state.boot_id not in ("", boot_id):
        notes = [f"{show_gpus(one.physical_ids)}: forgotten, the host was restarted" for one in state.sets]
        state = FabricState(epoch=state.epoch)
    active = {one.physical_ids for one in listed if one.is_active}
    sets = []
    for one in state.sets:
        if one.physical_ids in active or one.broken:
            sets.append(replace(one, settled=True))
        elif one.settled:
            sets.append(replace(one, broken=NOT_ROUTED))
            notes.append(f"{show_gpus(one.physical_ids)}{_of(one)}: broken: {NOT_ROUTED}")
    lost = len({one.physical_ids for one in sets if one.broken} - {one.physical_ids for one in state.broken}) > 0
    return FabricState(boot_id, state.epoch + lost, listed, tuple(sets)), tuple(notes)


def _of(kept: KeptSet) -> str:
    return f" of {kept.lease}" if kept.lease else ""


def state_directory(simulation: str = "") -> str:
    """Return where the state of this host, or of a simulated one, is."""
    return f"{simulation}{DIRECTORY}"


class FabricStore:
    """The file in a directory, made when it is missing.

    Its methods raise FabricError (OCIGPU-FAB-9), also if users other than root and this one could have written it,
    because it decides whose partitions are active.
    """

    def __init__(self, directory: str = DIRECTORY) -> None:
        self.directory = directory

    def read(self) -> FabricState | None:
        """Return the stored state; None if none was ever stored."""
        if not os.path.lexists(self.directory):
            return None
        try:
            with self._open() as fd:
                return self._read(fd)
        except OSError as error:
            raise self._error("open", f"{error.strerror}") from error

    @contextmanager
    def change(self) -> Iterator["KeptFile"]:
        """Hold the lock of all programs that change partitions."""
        try:
            with self._open() as fd:
                busy = self._error("lock", f"held for {LOCK_LIMIT:g} s by another program")
                with holding(lock_file(LOCK, fd), busy, LOCK_LIMIT):
                    remove_drafts(fd)
                    yield KeptFile(self, fd, self._read(fd))
        except OSError as error:
            raise self._error("open", f"{error.strerror}") from error

    @contextmanager
    def _open(self) -> Iterator[int]:
        fd, why = open_state_directory(self.directory)
        try:
            if why:
                raise self._error("believe", why)
            yield fd
        finally:
            os.close(fd)

    def _read(self, fd: int) -> FabricState | None:
        try:
            return _parse(read_regular(NAME, MAX_BYTES, fd, os.O_NOFOLLOW))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._error("read", f"{error.strerror}") from error
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise self._error("read", f"not a state of format {FORMAT}") from error

    def write(self, fd: int, state: FabricState) -> None:
        """Put the state into the directory, on the disk; of :class:`KeptFile`."""
        text = json.dumps({"format": FORMAT, **asdict(state)}, indent=1) + "\n"
        try:
            replace_file(NAME, text.encode(), 0o600, fd, durable=True)
        except OSError as error:
            raise self._error("write", f"{error.strerror}") from error

    def _error(self, operation: str, cause: str) -> FabricError:
        return FabricError("OCIGPU-FAB-9", f"{operation} {self.directory}/{NAME}: {cause}")


class KeptFile:
    """The state while its lock is held; ``state`` is None when nothing was ever kept."""

    def __init__(self, store: FabricStore, fd: int, state: FabricState | None) -> None:
        self._store = store
        self._fd = fd
        self.state = state

    def keep(self, state: FabricState) -> None:
        """Write the state, unless it is as it was."""
        if state != self.state:
            self._store.write(self._fd, state)
            self.state = state


def _parse(data: bytes) -> FabricState:
    """Return a state; raises what looking into a document raises for one that :class:`FabricStore` did not write."""
    document = json.loads(data)
    if document.pop("format") != FORMAT:
        raise ValueError
    known = [
        Partition(**{**one, "physical_ids": tuple(one["physical_ids"]), "nvlinks": tuple(map(tuple, one["nvlinks"]))})
        for one in document["known"]
    ]
    sets = [KeptSet(**{**one, "physical_ids": tuple(one["physical_ids"])}) for one in document["sets"]]
    return FabricState(**{**document, "known": tuple(known), "sets": tuple(sets)})


class KeptFabric(Fabric):
    """A manager whose active sets are recorded on the host.

    Programs may share it: one changes partitions at a time.  Every method sends the active sets to a manager that waits
    after a restart, and marks the leases whose partitions were lost; ``notes`` reports that.
    """

    def __init__(self, fabric: RestorableFabric, store: FabricStore, boot_id: str = "") -> None:
        self._fabric = fabric
        self._store = store
        self._boot_id = boot_id or read_boot_id()
        self.notes: list[str] = []
        self._given: tuple[tuple[int, ...], ...] | None = None

    def list_partitions(self) -> tuple[Partition, ...]:
        """Read the manager's list and settle the state; raises FabricError."""
        with self._store.change() as kept:
            return self._list_and_settle(kept)

    def read_state(self) -> FabricState:
        """Return the stored state; raises FabricError."""
        return self._store.read() or FabricState()

    def activate(self, physical_ids: Collection[int], lease: str = "", generation: int = 0) -> Partition:
        """Activate a set for a lease; has no effect if it is active already.

        Raises FabricError: OCIGPU-FAB-5 too when the set is another's, or a broken one has one of its GPUs.
        """
        with self._store.change() as kept:
            wanted = must_find(self._list_and_settle(kept), physical_ids)
            state = kept.state or FabricState()
            before = state.find(physical_ids)
            state.check_whole(physical_ids)
            if before and before.lease not in ("", lease):
                text = f"activate {show_gpus(physical_ids)}: it is active for {before.lease}"
                raise FabricError("OCIGPU-FAB-5", text)
            mine = KeptSet(wanted.physical_ids, lease, generation, settled=wanted.is_active)
            kept.keep(state.with_set(mine))
            done = self._fabric.activate(physical_ids)
            known = tuple(done if one.physical_ids == done.physical_ids else one for one in state.known)
            kept.keep(replace(state.with_set(replace(mine, settled=True)), known=known))
            return done

    def deactivate(self, physical_ids: Collection[int], force: bool = True) -> None:
        """Deactivate a set whose GPUs are no longer used, and remove its record; raises FabricError.

        ``force``: also a leased set.
        """
        with self._store.change() as kept:
            must_find(self._list_and_settle(kept), physical_ids)
            state = kept.state or FabricState()
            if not force:  # a lease may have been recorded since the caller checked
                state.check_unleased(physical_ids)
            before = state.find(physical_ids)
            if before:
                kept.keep(state.with_set(replace(before, settled=False, broken="")))
            self._fabric.deactivate(physical_ids)
            kept.keep(state.without(physical_ids))

    def restore(self, nothing: bool = False) -> tuple[tuple[int, ...], ...] | None:
        """Send the active sets to a manager that waits; returns those sets, None if it does not wait.

        ``nothing``: nothing was active, where no state says so.  Raises FabricError.
        """
        with self._store.change() as kept:
            self._given = None
            if nothing and kept.state is None:
                kept.keep(FabricState(boot_id=self._boot_id))
            self._list_and_settle(kept)
            return self._given

    def _list_and_settle(self, kept: KeptFile) -> tuple[Partition, ...]:
        try:
            listed = self._fabric.list_partitions()
        except FabricError as error:
            if error.code != WAITING:
                raise
            listed = self._give_back(kept.state, error)
        state, notes = settle(kept.state or FabricState(), listed, self._boot_id)
        self.notes += notes
        kept.keep(state)
        return listed

    def _give_back(self, state: FabricState | None, waiting: FabricError) -> tuple[Partition, ...]:
        if state is None:  # an empty list would cut off whatever is active
            hint = "If nothing was active: ocigpu fabric restore --nothing"
            raise FabricError(WAITING, f"{waiting.message}, and this host has no state of them", hint) from waiting
        active = sets_to_restore(state, self._boot_id)
        try:
            listed = self._fabric.restore(active, state.known)
        except FabricError as error:
            if error.code != NOT_TOLD:
                raise
            raise FabricError(
                WAITING, f"{waiting.message}, and takes no list of active ones", status=error.status
            ) from error
        self._given = active
        return listed
