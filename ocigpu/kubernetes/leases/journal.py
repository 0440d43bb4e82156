"""The journal of a node's leases, written before a change takes effect: the truth across restarts.

A line is one change of one or several leases, with their full state and a checksum.  It is on the disk (fsync) before
it is announced.  A writer holds the lock and has read all earlier lines, so programs may share a journal.  A last line
without its end was never acted upon and is dropped.  Any other unreadable line puts the leases without a later line in
doubt: Unknown, never Free.  Lines leave the journal for files beside it, the history.
"""

import contextlib
import errno
import json
import os
import re
import time
from binascii import crc32
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError, quoted
from ocigpu.kubernetes.leases.lease import Lease, LeaseEvent, LeaseHolder, Phase, step
from ocigpu.system.files import lock_file, read_regular, remove_drafts, replace_file
from ocigpu.system.locks import holding
from ocigpu.system.proc import read_boot_id
from ocigpu.system.state import open_state_directory

DIRECTORY = "/var/lib/ocigpu/leases"
NAME, LOCK, HISTORY = "journal", "lock", "history-"
FORMAT = 1
MAX_BYTES = 64 << 20
MAX_LINE = 64 << 10
COMPACT_AT = 1 << 20
KEEP = 40 * 24 * 3600.0
"""Seconds for which history is kept: the requirement is 30 days (tenancy.md 4.6, SEC08)."""
LOCK_LIMIT = 10.0
_SHORTEST = 64
"""Bytes: no line is shorter."""
_DEFAULTS = {field.name: field.default for field in fields(Lease)}
_HISTORY = re.compile(r"history-([0-9]{12})")


class Recorded(NamedTuple):
    """One line: ``number`` counts lines for ever, ``time`` is of the wall clock and decides nothing."""

    number: int
    time: float
    cause: str
    leases: tuple[Lease, ...]


class Lines(NamedTuple):
    """The lines read: ``good`` is where the last complete line ends, ``lost`` where lines in between are unreadable."""

    records: tuple[Recorded, ...]
    good: int
    lost: tuple[int, ...]


def journal_directory(simulation: str = "") -> str:
    """Return where the leases of this host, or of a simulated one, are."""
    return f"{simulation}{DIRECTORY}"


def since_boot() -> float:
    """Return seconds since the boot, which no change of the clock disturbs (clock_gettime(2))."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseJournal:
    """The journal in a directory, made when it is missing.

    ``wall``: the clock that lines are dated by; ``clock``: the one that time-outs go by; ``boot``: the boot id, "" for
    that of this machine (proc(5), random/boot_id).  Raises HostError (OCIGPU-LEASE-1) if the directory or the file
    cannot be used, if a user other than root and ours could have written it, or if a newer program wrote it.
    """

    def __init__(
        self,
        directory: str,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = since_boot,
        boot: str = "",
    ) -> None:
        self.directory = directory
        self.clock = clock
        self.boot = boot or read_boot_id()
        self._wall = wall
        self._leases: dict[str, Lease] = {}
        self._number = 0
        self._size = -1
        self._inode = 0
        self._broken = True
        try:
            self._fd, why = open_state_directory(directory)
        except OSError as error:
            raise self._cannot("open", error) from error
        if why:  # its writer decides which GPUs are free
            os.close(self._fd)
            words = f"the lease journal {quoted(directory)} is not trusted: {why}"
            hint = (
                "Find out who has written it; then move it away and delete this node's GPULeases: "
                "all GPUs are checked, and a new one begins."
            )
            raise HostError("OCIGPU-LEASE-1", words, hint)

    def close(self) -> None:
        """Give the directory back."""
        os.close(self._fd)

    @property
    def number(self) -> int:
        """How many lines there ever were: no lease has had more generations."""
        return self._number

    @property
    def leases(self) -> Mapping[str, Lease]:
        """The leases by GPU as they were when the journal was last read or written."""
        return self._leases

    def refresh(self) -> Mapping[str, Lease]:
        """Read what others have written; returns the leases."""
        with self.change() as _:
            return self._leases

    def tell(self, events: Mapping[str, LeaseEvent], cause: str = "") -> Mapping[str, Lease]:
        """Write down what events do to leases, all in one line; returns the leases.  Raises HostError."""
        with self.change() as change:
            now = self.clock()
            for gpu, event in events.items():
                # turns that no former journal had: generation and turn name a quarantine
                before = change.leases.get(gpu) or Lease(gpu, generation=self._number, turn=int(self._wall()))
                change.put(step(before, event, now)[0], cause or event.kind)
            return change.leases

    @contextlib.contextmanager
    def change(self) -> Iterator["LeaseChange"]:
        """Hold the lock: when the block ends, the whole change is on the disk, or nothing of it.

        A block that raises changes nothing.  Raises HostError (OCIGPU-LEASE-1).
        """
        with self._locked():
            self._read()
            change = LeaseChange(self._leases)
            yield change
            if change.changed:
                self._append(change)

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        try:
            fd = lock_file(LOCK, self._fd)
        except OSError as error:
            raise self._cannot("lock", error) from error
        busy = HostError("OCIGPU-LEASE-1", f"lock {self.directory}/{LOCK}: held for {LOCK_LIMIT:g} s by another")
        return holding(fd, busy, LOCK_LIMIT, pause=0.01)

    def _read(self) -> None:
        """Read the file if it is not as we left it."""
        try:
            status = os.stat(NAME, dir_fd=self._fd, follow_symlinks=False)
            if not self._broken and (status.st_ino, status.st_size) == (self._inode, self._size):
                return
            data = read_regular(NAME, MAX_BYTES, self._fd, os.O_NOFOLLOW)
        except FileNotFoundError:
            self._leases, self._number, self._size, self._inode, self._broken = {}, 0, 0, 0, True
            return
        except OSError as error:
            raise self._cannot("read", error) from error
        found = parse_lines(data)
        self._leases = replay(found)
        self._number = found.records[-1].number if found.records else 0
        self._number = max(self._number, *found.lost, 0)
        self._inode, self._size = status.st_ino, len(data)
        self._broken = found.good != len(data) or bool(found.lost)

    def _append(self, change: "LeaseChange") -> None:
        record = Recorded(self._number + 1, self._wall(), change.cause, tuple(change.changed.values()))
        line = write_line(record)
        after = {**self._leases, **change.changed}
        try:
            if self._broken or self._size + len(line) > COMPACT_AT:
                self._compact(record, after)
            else:
                self._broken = True  # until it is known to be whole
                fd = os.open(NAME, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
                try:
                    if os.write(fd, line) != len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(fd)
                finally:
                    os.close(fd)
                self._size += len(line)
                self._broken = False
        except OSError as error:
            raise self._cannot("write", error) from error
        self._leases, self._number = after, record.number

    def _compact(self, record: Recorded, after: Mapping[str, Lease]) -> None:
        """Rewrite the journal with this line; the former one is kept as history."""
        self._broken = True
        others = tuple(lease for gpu, lease in after.items() if gpu not in {each.gpu for each in record.leases})
        first = (
            [write_line(record._replace(number=record.number - 1, cause="compacted", leases=others))] if others else []
        )
        content = b"".join((*first, write_line(record)))
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            name = f"{HISTORY}{record.number:012}"
            os.link(NAME, name, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)
        remove_drafts(self._fd)
        status = replace_file(NAME, content, 0o600, self._fd, durable=True)
        self._inode, self._size, self._broken = status.st_ino, len(content), False
        for name in os.listdir(self._fd):
            if _HISTORY.fullmatch(name) and os.stat(name, dir_fd=self._fd).st_mtime < self._wall() - KEEP:
                os.unlink(name, dir_fd=self._fd)

    def history(self) -> tuple[Recorded, ...]:
        """Return all lines that are left, the oldest first, each once; raises HostError (OCIGPU-LEASE-1)."""
        found: dict[int, Recorded] = {}
        with self._locked():
            try:
                names = sorted(name for name in os.listdir(self._fd) if name == NAME or _HISTORY.fullmatch(name))
                for name in names:
                    for record in parse_lines(read_regular(name, MAX_BYTES, self._fd, os.O_NOFOLLOW)).records:
                        if record.cause != "compacted":
                            found[record.number] = record
            except OSError as error:
                raise self._cannot("read", error) from error
        return tuple(found[number] for number in sorted(found))

    def _cannot(self, what: str, error: OSError) -> HostError:
        return HostError("OCIGPU-LEASE-1", f"{what} the lease journal {quoted(self.directory)}: {error.strerror}")


class LeaseChange:
    """What one writer changes while it holds the lock."""

    def __init__(self, leases: Mapping[str, Lease]) -> None:
        self._before = leases
        self.changed: dict[str, Lease] = {}
        self.cause = ""

    @property
    def leases(self) -> Mapping[str, Lease]:
        """The leases, with this change applied."""
        return {**self._before, **self.changed}

    def put(self, lease: Lease, cause: str) -> None:
        """Change a lease; an unchanged one costs nothing."""
        if self.leases.get(lease.gpu) != lease:
            self.changed[lease.gpu] = lease
            self.cause = self.cause or cause


def write_line(record: Recorded) -> bytes:
    """Return a record as a line: its checksum, then JSON."""
    leases = [_plain(lease) for lease in record.leases]
    data = {"format": FORMAT, "number": record.number, "ts": record.time, "cause": record.cause, "leases": leases}
    body = json.dumps(data, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32(body), body)


def parse_lines(data: bytes) -> Lines:
    """Return the records of a journal's bytes; raises HostError (OCIGPU-LEASE-1) for one of a newer program.

    ``lost`` contains the numbers of the missing lines: those between two others, and at the end as many as the
    unreadable bytes can have contained.
    """
    *whole, _torn = data.split(b"\n")
    records: list[Recorded] = []
    lost: list[int] = []
    unread = 0
    for line in whole:
        record = _parse_line(line)
        if record is None:
            unread += 1 + len(line) // _SHORTEST
            continue
        if records:
            lost.extend(range(records[-1].number + 1, record.number))
        unread = 0
        records.append(record)
    last = records[-1].number if records else 0
    lost.extend(range(last + 1, last + 1 + unread))
    return Lines(tuple(records), len(data) - len(_torn), tuple(lost))


def _parse_line(line: bytes) -> Recorded | None:
    check, _, body = line.partition(b" ")
    if check != b"%08x" % crc32(body):
        return None
    data = json.loads(body)
    with contextlib.suppress(TypeError, ValueError):  # a field or a phase that we do not know
        if data["format"] <= FORMAT:
            return Recorded(data["number"], data["ts"], data["cause"], tuple(map(_lease, data["leases"])))
    hint = (
        "Install that program again, or move the journal away and delete this node's GPULeases: all GPUs are then "
        "reset and checked."
    )
    raise HostError("OCIGPU-LEASE-1", f"lease journal: written by a newer program, format {data['format']}", hint)


def _plain(lease: Lease) -> dict[str, Any]:
    return {name: value for name, value in asdict(lease).items() if value != _DEFAULTS.get(name)}


def _lease(data: dict[str, Any]) -> Lease:
    lists = {name: tuple(data.get(name, ())) for name in ("members", "proofs")}
    holder = LeaseHolder(*data["holder"]) if data.get("holder") else None
    if data.get("maintenance") is True:  # written before the reason was recorded
        data["maintenance"] = "OperatorRequest"
    return Lease(**{**data, **lists, "phase": Phase(data.get("phase", Phase.UNKNOWN)), "holder": holder})


def replay(lines: Lines) -> dict[str, Lease]:
    """Return the leases at the end of a journal.

    One whose last line comes before a lost one is in doubt: it may have been reserved since, so it is Unknown with a
    generation that was not used yet.  A quarantine stays.
    """
    leases: dict[str, Lease] = {}
    told: dict[str, int] = {}
    for record in lines.records:
        for lease in record.leases:
            leases[lease.gpu] = lease
            told[lease.gpu] = record.number
    for gpu, lease in leases.items():
        lost = sum(number > told[gpu] for number in lines.lost)
        if lost and lease.phase is not Phase.QUARANTINED:
            leases[gpu] = doubt(lease, lost)
    return leases


def doubt(lease: Lease, lost: int) -> Lease:
    """Return a lease with lost changes: in doubt."""
    detail = f"{lost} lines of the journal cannot be read"
    return replace(
        lease,
        phase=Phase.UNKNOWN,
        generation=lease.generation + lost,
        turn=lease.turn + 2 * lost,
        proofs=(),
        quiet=-1.0,
        was="",
        reason="JournalDamaged",
        detail=detail,
    )
