"""The journal of leases: what was answered is there after any end, and what cannot be read is never Free."""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from binascii import crc32
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.leases import journal as module
from ocigpu.kubernetes.leases.journal import HISTORY, NAME, LeaseJournal, parse_lines, replay
from ocigpu.kubernetes.leases.lease import Lease, LeaseEvent, LeaseEventKind, LeaseHolder, Phase
from ocigpu.kubernetes.leases.objects import quarantine_name

GPUS = [f"0000:{number:02x}:00.0" for number in range(1, 9)]


def put(journal: LeaseJournal, *leases: Lease, cause: str = "test") -> None:
    with journal.change() as change:
        for lease in leases:
            change.put(lease, cause)


def read(directory: Path) -> dict[str, Lease]:
    journal = LeaseJournal(str(directory))
    try:
        return dict(journal.refresh())
    finally:
        journal.close()


def test_everything_is_kept(tmp_path: Path) -> None:
    journal = LeaseJournal(str(tmp_path))
    lease = Lease(
        GPUS[0], Phase.LEASED, 3, 9, "boot", 17.5, 18.0, "set/3", (GPUS[0], GPUS[1]), LeaseHolder("tenant-a", "p", "c"),
        ("partition-on",), 2.5, 1, 2, 3.5, 1, "Xid", "OperatorRequest: new board", "Free", "why", "more",
    )  # fmt: skip
    put(journal, lease, Lease(GPUS[1]))
    assert read(tmp_path) == {GPUS[0]: lease, GPUS[1]: Lease(GPUS[1])}
    put(journal, lease)
    assert journal.number == 1, "what is as before is not written"


def test_maintenance_that_was_written_before_it_had_a_reason(tmp_path: Path) -> None:
    journal = LeaseJournal(str(tmp_path))
    put(journal, replace(Lease(GPUS[0], Phase.LEASED), maintenance=True))
    assert read(tmp_path)[GPUS[0]].maintenance == "OperatorRequest"


def test_no_quarantine_has_the_name_of_one_in_a_former_journal(tmp_path: Path) -> None:
    def quarantine(place: str, wall: float) -> str:
        journal = LeaseJournal(str(tmp_path / place), wall=lambda: wall)
        return quarantine_name(journal.tell({GPUS[0]: LeaseEvent(LeaseEventKind.QUARANTINE, 0, text="test")})[GPUS[0]])

    assert quarantine("former", 1.7e9) != quarantine("new", 1.8e9) != ""


def test_a_block_that_raises_changes_nothing(tmp_path: Path) -> None:
    journal = LeaseJournal(str(tmp_path))

    def raising() -> None:
        with journal.change() as change:
            change.put(Lease(GPUS[0], Phase.FREE), "test")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        raising()
    assert read(tmp_path) == {}


def some_lines(directory: Path) -> bytes:
    """Reserve, lend and free two GPUs, one after another."""
    journal = LeaseJournal(str(directory))
    for generation in (1, 2):
        for gpu, phase in itertools.product(GPUS[:2], (Phase.RESERVED, Phase.LEASED, Phase.FREE)):
            put(journal, Lease(gpu, phase, generation))
    journal.close()
    return (directory / NAME).read_bytes()


def test_torn_at_every_byte(tmp_path: Path) -> None:
    """What is left are whole lines, as they were; the next change goes on from there."""
    data = some_lines(tmp_path)
    ends = [position + 1 for position, byte in enumerate(data) if byte == ord("\n")]
    for size in range(0, len(data), 7):
        lines = parse_lines(data[:size])
        assert (len(lines.records), lines.lost) == (sum(end <= size for end in ends), ())
    (tmp_path / NAME).write_bytes(data[: ends[-1] - 20])
    journal = LeaseJournal(str(tmp_path))
    put(journal, Lease(GPUS[7], Phase.QUARANTINED))
    assert read(tmp_path) == {**replay(parse_lines(data[: ends[-2]])), GPUS[7]: Lease(GPUS[7], Phase.QUARANTINED)}


def test_damaged_at_every_line(tmp_path: Path) -> None:
    """Of what a damaged line told, and nobody later, nothing is believed: not even that a GPU is free."""
    data = some_lines(tmp_path)
    lines = data.splitlines(keepends=True)
    whole = replay(parse_lines(data))
    for number, line in enumerate(lines):
        for wrong in (b"\0" * len(line[:-1]) + b"\n", line[:30] + b"x" + line[31:], b"\n"):
            found = replay(parse_lines(b"".join((*lines[:number], wrong, *lines[number + 1 :]))))
            for gpu, lease in found.items():
                if lease != whole[gpu]:
                    assert (lease.phase, lease.reason) == (Phase.UNKNOWN, "JournalDamaged")
                    assert lease.generation >= whole[gpu].generation
            last = len(lines) - 1
            assert all(lease.phase is not Phase.FREE for lease in found.values()) or number < last


def test_a_hole_swallows_lines(tmp_path: Path) -> None:
    """A block of zeros where four lines were: their generations are not used again."""
    lines = some_lines(tmp_path).splitlines(keepends=True)
    hole = b"\0" * len(b"".join(lines[8:12])) + b"\n"
    found = replay(parse_lines(b"".join(lines[:8]) + hole))
    assert {lease.phase for lease in found.values()} == {Phase.UNKNOWN}
    assert all(lease.generation >= 2 for lease in found.values())
    later = replay(parse_lines(b"".join(lines[:4]) + hole + b"".join(lines[11:])))
    assert later[GPUS[1]].phase is Phase.FREE, "a later line tells all of it"
    assert later[GPUS[0]].phase is Phase.UNKNOWN


def test_a_quarantine_survives_damage(tmp_path: Path) -> None:
    put(LeaseJournal(str(tmp_path)), Lease(GPUS[0], Phase.QUARANTINED, 3, reason="Xid"))
    with (tmp_path / NAME).open("ab") as file:
        file.write(b"nonsense\n")
    assert read(tmp_path)[GPUS[0]].reason == "Xid"


def test_a_newer_program_has_written_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = LeaseJournal(str(tmp_path))
    with monkeypatch.context() as newer:
        newer.setattr(module, "FORMAT", 2)
        put(journal, Lease(GPUS[0]))
    with pytest.raises(HostError, match="newer program, format 2"):
        LeaseJournal(str(tmp_path)).refresh()


@pytest.mark.parametrize("more", [{"colour": "red"}, {"phase": "Borrowed"}, {"holder": [1, 2, 3, 4, 5, 6]}])
def test_a_newer_program_has_written_what_we_do_not_know(tmp_path: Path, more: dict[str, Any]) -> None:
    put(LeaseJournal(str(tmp_path)), Lease(GPUS[0]))
    data = json.loads((tmp_path / NAME).read_bytes().partition(b" ")[2])
    body = json.dumps({**data, "number": 2, "leases": [{"gpu": GPUS[0], **more}]}).encode()
    with (tmp_path / NAME).open("ab") as file:
        file.write(b"%08x %s\n" % (crc32(body), body))
    with pytest.raises(HostError, match="newer program"):
        LeaseJournal(str(tmp_path)).refresh()


class Killed(BaseException):
    """The process is gone."""


CALLS = ("write", "fsync", "link", "rename", "open", "unlink")


@pytest.mark.parametrize("how", ["killed before", "killed after", "fails"])
def test_ended_at_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A change that was made is there, one that was not is there whole or not at all; both with compactions."""
    monkeypatch.setattr(module, "COMPACT_AT", 2000)
    codes: set[str] = set()
    for at in itertools.count():
        directory = tmp_path / str(at)
        journal = LeaseJournal(str(directory))
        left = iter(range(at + 1))
        made: dict[str, Lease] = {}
        tried: dict[str, Lease] = {}
        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, ending(getattr(os, name), left, how))
            try:
                for generation, gpu in itertools.product(range(1, 4), GPUS[:3]):
                    tried = {gpu: Lease(gpu, Phase.RESERVED, generation, reason="x" * 100)}
                    put(journal, *tried.values())
                    made |= tried
                    tried = {}
            except Killed:
                pass
            except HostError as error:
                codes.add(error.code)
        found = read(directory)
        assert found in (made, made | tried), at
        put(LeaseJournal(str(directory)), Lease(GPUS[7], Phase.FREE))  # whoever comes next can go on
        assert read(directory) == {**found, GPUS[7]: Lease(GPUS[7], Phase.FREE)}
        if how == "fails" and tried:  # and so can the one that it has failed for
            put(journal, *tried.values())
            assert read(directory) == {**made, **tried, GPUS[7]: Lease(GPUS[7], Phase.FREE)}
        if not tried:
            break
    assert at > 25
    assert codes == ({"OCIGPU-LEASE-1"} if how == "fails" else set())


def ending(call: Callable[..., Any], left: Any, how: str) -> Callable[..., Any]:
    """Return a call of the system at which, when ``left`` is used up, the process is killed or the call fails."""

    def function(*arguments: Any, **options: Any) -> Any:
        last = next(left, None) is None
        if last and how == "fails":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if last and how == "killed before":
            raise Killed
        result = call(*arguments, **options)
        if last:
            raise Killed
        return result

    return function


def test_history_is_kept_over_compactions_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPACT_AT", 3000)
    day = 24 * 3600.0
    clock = iter(itertools.count(1e9, day / 10))
    journal = LeaseJournal(str(tmp_path), wall=lambda: next(clock))
    for number in range(1, 101):
        put(journal, Lease(GPUS[number % 8], Phase.RESERVED, number), cause=f"change {number}")
        for file in tmp_path.glob(f"{HISTORY}*"):
            os.utime(file, (1e9, 1e9))
    assert [record.number for record in journal.history()] == list(range(1, 101))
    assert [record.cause for record in journal.history()][:2] == ["change 1", "change 2"]
    later = LeaseJournal(str(tmp_path), wall=lambda: 1e9 + 60 * day)
    for number in range(101, 140):
        put(later, Lease(GPUS[number % 8], Phase.RESERVED, number))
    assert later.history()[0].number > 1


def test_two_programs_write_one_journal(tmp_path: Path) -> None:
    """Each reads what the other has written before it changes anything: no number is counted twice."""
    put(LeaseJournal(str(tmp_path)), Lease(GPUS[0]))

    def count() -> None:
        journal = LeaseJournal(str(tmp_path))
        for _ in range(40):
            with journal.change() as change:
                lease = change.leases[GPUS[0]]
                change.put(replace(lease, generation=lease.generation + 1), "count")

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(tmp_path)[GPUS[0]].generation == 120


WRITER = """
import sys
from ocigpu.kubernetes.leases import journal as module
from ocigpu.kubernetes.leases.lease import Lease, Phase
module.COMPACT_AT = 4000
journal = module.LeaseJournal(sys.argv[1])
for generation in range(1, 1_000_000):
    with journal.change() as change:
        for gpu in ("a", "b"):
            change.put(Lease(gpu, Phase.RESERVED, generation), "count")
    print(generation, flush=True)
"""


@pytest.mark.parametrize("lines", [1, 7, 23, 60])
def test_a_writer_that_is_really_killed(tmp_path: Path, lines: int) -> None:
    """What it has told of is there, for both GPUs of a set alike."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        for _ in range(lines):
            child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read().split()
        child.wait()
    told = int(rest[-1]) if rest else lines
    found = read(tmp_path)
    assert found["a"].generation == found["b"].generation
    assert told <= found["a"].generation <= told + 1


def test_a_lock_that_somebody_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_LIMIT", 0.05)
    journal, other = LeaseJournal(str(tmp_path)), LeaseJournal(str(tmp_path))
    with journal.change(), pytest.raises(HostError, match=r"held for .* by another"):
        other.refresh()


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="Not a directory"):
        LeaseJournal(str(tmp_path / "file/below"))


def test_a_directory_that_somebody_else_could_have_written_is_not_believed(tmp_path: Path) -> None:
    directory = tmp_path / "leases"
    put(LeaseJournal(str(directory)), Lease(GPUS[0], Phase.FREE))
    directory.chmod(0o755)  # readable: made private again
    assert read(directory)[GPUS[0]].phase is Phase.FREE
    assert directory.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to("leases")
    with pytest.raises(HostError, match="Not a directory"):
        LeaseJournal(str(tmp_path / "link"))
    directory.chmod(0o777)
    with pytest.raises(HostError, match="mode 0777: others may write"):
        LeaseJournal(str(directory))
    directory.chmod(0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(HostError, match="others may replace files"):
        LeaseJournal(str(directory))
    tmp_path.chmod(0o700)
    os.chown(directory, 65534, 65534)
    with pytest.raises(HostError, match="owner 65534"):
        LeaseJournal(str(directory))
