"""Host facts of an earlier start, and answers derived from them, while none of their sources has changed.

Kept in the cache directory (:mod:`ocigpu.system.store`), one file for each set of settings.  They are valid while all
of this is unchanged: version of this program, boot, fingerprint (driver, GPUs, MIG devices, nodes), and identity, size
and times of every file that was read; missing files must still be missing.  After :data:`MAX_AGE` seconds NVML must
return the same answer again: only NVML reports a GPU that has fallen off the bus.  Small texts of procfs are read every
time.

Most starts check this with half of the work.  The fingerprint is not computed: its inputs are read and compared.  The
times of directories show that links and missing names are unchanged (:func:`_shorten`).  Most starts also need neither
the facts nor the code that makes a plan (:func:`find_answer`): they only check that nothing has changed.
"""

import os
import stat
import time
from binascii import crc32

from ocigpu import __version__
from ocigpu.core import rawjson
from ocigpu.core.errors import UNUSABLE, HostError
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.gpus.tree import find_roots, is_as_noted, note_readings, read_text, settings_digest, stop_noting
from ocigpu.system.files import lock
from ocigpu.system.signals import touched
from ocigpu.system.store import open_cache, read_kept, write_kept

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from ocigpu.core.facts import HostFacts
    from ocigpu.gpus.nvidia.nvml import NvmlChild

    Notes = dict[str, int]
    Places = list[tuple[str, bool]]

MAX_AGE = 300.0
"""Seconds for which NVML's answer is taken to hold when procfs shows no change."""
SETTLED = 2.0
"""Seconds after which another change of a file shows in its times, whatever the clock's resolution."""
TOLD = 30.0
"""Seconds for which an answer of NVML to this process is valid, even a missing one: no start lasts longer."""
JUST_NOW = 1.0
"""Seconds for which facts that a start has found valid need no second look by the process that it forks."""
PATIENCE = 5.0
"""Seconds to wait for another start that is reading the same facts."""
PREFIX = "facts-"
SPARE = 16
"""Files for other settings that may stay."""
MODE, CTIME = 2, 5
"""Where a state has the mode, and the time of the last change."""
SPARE_ANSWERS = 64
"""Files of other questions of a kind that may stay."""
MAX_QUESTION = 8192
"""Characters of a question whose answer is kept: usual ones have some 1,500, but images decide."""
KEPT = ("nvidia",)
"""The vendors of whose devices facts are kept; of others they are read in a moment."""
NO_CACHE = "no cache directory is writable for this user alone"


class RefreshedFacts(NamedTuple):
    """The facts as they are now, the file that keeps them or why none does, and the age of what was there before.

    ``age``: seconds; -1 where no facts were kept that still held.
    """

    facts: "HostFacts"
    path: str
    problem: str
    age: float


def read_facts(settings: Settings, age: float = MAX_AGE) -> "HostFacts":
    """Return the facts of the host that the settings describe, from the cache if they are still valid, else read again.

    ``age``: seconds after which NVML is queried again.  Raises HostError as
    :func:`ocigpu.gpus.nvidia.discover.read_host_facts` does.
    """
    directory = open_cache(True, settings.simulation_root)
    if directory < 0:
        from ocigpu.gpus.nvidia.discover import read_host_facts

        return read_host_facts(settings)
    try:
        facts = _load(_find_current(directory, settings, age))
        told = _find_told(settings)
        if facts is None and told is None:
            _take_turn(directory)
            facts = _load(_find(directory, settings, age))  # of one that had its turn before
        return facts or _store(directory, settings, told)[0]
    finally:
        os.close(directory)  # and with it the lock


def refresh_facts(settings: Settings) -> RefreshedFacts:
    """Read the facts again and store them for the next start.

    Raises HostError as :func:`ocigpu.gpus.nvidia.discover.read_host_facts` does.
    """
    directory = open_cache(True, settings.simulation_root)
    if directory < 0:
        from ocigpu.gpus.nvidia.discover import read_host_facts

        return RefreshedFacts(read_host_facts(settings), "", NO_CACHE, -1.0)
    try:
        kept = _find(directory, settings)
        age = _now() - kept.made if kept else -1.0
        facts, problem = _store(directory, settings)
        path = f"{os.readlink(f'/proc/self/fd/{directory}')}/{_name(settings)}"
        return RefreshedFacts(facts, "" if problem else path, problem, age)
    finally:
        os.close(directory)


def read_stamp(settings: Settings, directory: int = -1) -> str:
    """Return an identifier of the stored facts, "" if none are valid.

    ``directory``: of the cache, if it is open already.
    """
    global _proved  # noqa: PLW0603 - a start has one
    if directory < 0:
        directory = open_cache(False, settings.simulation_root)
        if directory < 0:
            return ""
        try:
            return read_stamp(settings, directory)
        finally:
            os.close(directory)
    kept = _find_current(directory, settings)
    _proved = (settings, _now(), kept) if kept else None
    return f"{kept.begun!r} {crc32(kept.facts.encode()):08x}" if kept else ""


def read_proved(settings: Settings) -> "HostFacts | None":
    """Return the stored facts that :func:`read_stamp` has just found valid in this start, None for none.

    For the process that the shim forks: the same start does not check all that again.
    """
    if _proved is None or _proved[0] != settings or _now() - _proved[1] >= JUST_NOW:
        return None
    return _load(_proved[2])


def find_answer(
    kind: str,
    about: "tuple[Any, ...]",
    settings: Settings,
    make: "Callable[[], dict[str, Any]]",
    known_stamp: str = "",
) -> "dict[str, Any]":
    """Return the result of ``make``, or its stored result for an equal question and the same host facts.

    ``kind``: prefix of the files' names; ``about``: the request, and anything besides settings and facts that the
    answer depends on, compared by its repr.  The answer is JSON data; tuples in it come back as lists.  ``make`` reads
    the facts itself.  ``known_stamp``: identifier of the host's state if it was just read; the facts need not be stored
    then.
    """
    if not known_stamp and about[0].vendors != KEPT:
        return make()
    question = repr((__version__, about, settings))
    cache_fd = open_cache(True, settings.simulation_root) if len(question) <= MAX_QUESTION else -1
    if cache_fd < 0:
        return make()
    try:
        name = f"{kind}-{crc32(_encode(question)):08x}"
        stamp = known_stamp or read_stamp(settings, cache_fd)
        answer = _read_answer(cache_fd, name, question, stamp) if stamp else None
        if answer is None:
            answer = make()
            if stamp and (known_stamp or read_stamp(settings, cache_fd) == stamp):  # then it was made of these facts
                parts = [_encode(part) for part in (question, stamp, rawjson.dump(answer))]
                write_kept(cache_fd, name, parts, f"{kind}-", SPARE_ANSWERS)
        return answer
    finally:
        os.close(cache_fd)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _read_answer(cache_fd: int, name: str, question: str, stamp: str) -> "dict[str, Any] | None":
    parts = read_kept(cache_fd, name, 3)
    if parts[:2] != [_encode(question), _encode(stamp)]:
        return None
    try:
        answer = rawjson.parse(parts[2].decode())
    except (ValueError, RecursionError):  # written by other code of this version
        return None
    return answer if isinstance(answer, dict) else None


def facts_key(settings: Settings) -> str:
    """Return a line that identifies program, boot and state of the driver; it ends with the digest of the settings."""
    from ocigpu.gpus.fingerprint import fingerprint_text, read_fingerprint
    from ocigpu.gpus.nvidia.files import read_firmware_parameter  # rarely needed: see the notes

    firmware = read_firmware_parameter(find_roots(settings).sys)
    return f"{_begin_of_key()} firmware={firmware} {fingerprint_text(read_fingerprint('nvidia', settings))}"


def _begin_of_key() -> str:
    return f"{__version__} {(read_text('/proc/sys/kernel/random/boot_id') or '').strip()}"


def _name(settings: Settings) -> str:
    return PREFIX + settings_digest(settings)


class _Kept(NamedTuple):
    """The content of the file: its key, when it was made, how to check that it is valid, and the facts as JSON.

    ``made``: seconds since the boot; ``begun``: when reading began, by the clock that files have their times of.
    ``nvml``: the queried library, and a checksum of its answer.  ``notes``: the readings from which the key was made.
    ``brief``: paths that usually suffice, as (path, whether a directory's content matters), and the checksum of their
    states; ``states``: the same for all paths, as JSON.
    """

    key: str
    made: float
    begun: float
    nvml: tuple[str, int]
    notes: "Notes"
    brief: "tuple[Places, int]"
    states: str
    facts: str


class _Told(NamedTuple):
    """NVML's answer to this process, if it is not stored: for example that the library hangs and did not answer.

    ``key`` and ``begun``: as of :class:`_Kept`, from before it was asked; ``made``: seconds since the boot, after.
    """

    settings: Settings
    key: str
    begun: float
    made: float
    asked: "NvmlChild"


_told: _Told | None = None
_proved: tuple[Settings, float, _Kept] | None = None


def _find_told(settings: Settings) -> _Told | None:
    return _told if _told and _told.settings == settings and _now() - _told.made < TOLD else None


def _read(directory: int, settings: Settings) -> _Kept | None:
    lines = read_kept(directory, _name(settings), 4)
    if not lines:
        return None
    try:
        made, begun, nvml, notes, brief = rawjson.parse(lines[1].decode())
        return _Kept(lines[0].decode(), made, begun, nvml, notes, brief, lines[2].decode(), lines[3].decode())
    except UNUSABLE:  # written by other code of this version
        return None


def _write(directory: int, settings: Settings, kept: _Kept) -> bool:
    lines = (kept.key, rawjson.dump(kept[1:6]), kept.states, kept.facts)
    return write_kept(directory, _name(settings), [line.encode() for line in lines], PREFIX, SPARE)


def _load(kept: _Kept | None) -> "HostFacts | None":
    """Return facts that were kept; None for none, and for what cannot be read."""
    if kept is None:
        return None
    from ocigpu.core.facts import facts_from_json
    from ocigpu.gpus.nvidia.procfs import read_proc_files

    try:
        facts = facts_from_json(rawjson.parse(kept.facts))
        files = read_proc_files(facts.proc_driver) if facts.proc_driver else ()
    except UNUSABLE:  # as above
        return None
    return facts._replace(proc_files=files)


def _find_current(directory: int, settings: Settings, age: float = MAX_AGE) -> _Kept | None:
    """Return the stored facts if valid; if they are older than ``age``, only if NVML returns the same answer again."""
    kept = _find(directory, settings)
    if kept is None or _now() - kept.made < age:
        return kept
    if _find_told(settings):
        return None
    turn = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        _take_turn(turn)
        return _find(directory, settings, age) or _ask_again(directory, settings, kept)
    finally:
        os.close(turn)


def _ask_again(directory: int, settings: Settings, kept: _Kept) -> _Kept | None:
    """Return the stored facts with a new time if NVML returns the same answer as then, else None."""
    global _told  # noqa: PLW0603 - a start comes here several times, from many modules
    from ocigpu.gpus.nvidia.nvml import start_nvml

    begun = time.time()
    try:
        library, checksum = kept.nvml
        asked = start_nvml(library, find_roots(settings))
    except UNUSABLE:  # as above
        return None
    if asked.collect().problem or asked.checksum != checksum:
        _told = _Told(settings, kept.key, begun, _now(), asked)
        return None
    kept = kept._replace(made=_now())
    _write(directory, settings, kept)
    return kept


def _find(directory: int, settings: Settings, age: float = float("inf")) -> _Kept | None:
    """Return the stored facts if younger than ``age`` and if none of their sources has changed."""
    kept = _read(directory, settings)
    try:
        return _prove(directory, settings, kept) if kept and _now() - kept.made < age else None
    except UNUSABLE:  # as above
        return None


def _prove(directory: int, settings: Settings, kept: _Kept) -> _Kept | None:
    """Return the stored facts, None if one of their sources has changed.

    If only irrelevant things have changed (another kind of device was added to /dev, an unrelated file to a directory),
    the new states are stored.
    """
    if _now() < kept.made or not kept.key.startswith(f"{_begin_of_key()} "):
        return None
    brief, notes = kept.brief, kept.notes
    if _checksum(_states(brief[0])) != brief[1]:
        places, checksum = rawjson.parse(kept.states)
        states = _states(places)
        if _checksum(states) != checksum:
            return None
        brief = _shorten(places, states, kept.begun)
    try:
        as_noted = is_as_noted(notes)
    except HostError:  # reading everything again reports it
        return None
    if not as_noted:
        key, notes = _noted_key(settings)
        if key != kept.key:
            return None
    if not as_noted or brief is not kept.brief:
        kept = kept._replace(notes=notes, brief=brief)
        _write(directory, settings, kept)
    return kept


def _noted_key(settings: Settings) -> "tuple[str, Notes]":
    """Return the key, and notes of everything that was read for it."""
    notes = note_readings()
    try:
        return facts_key(settings), notes
    finally:
        stop_noting()


def _store(directory: int, settings: Settings, told: _Told | None = None) -> "tuple[HostFacts, str]":
    """Read the facts and store them; returns them and why they were not stored, "" if they were.

    ``told``: NVML's answer, which is used if the host is unchanged.
    """
    global _told  # noqa: PLW0603 - as above
    from ocigpu.core.facts import facts_to_json
    from ocigpu.gpus.nvidia.discover import read_host_facts_and_places

    (key, notes), begun = _noted_key(settings), time.time()
    if told and told.key == key:
        begun = told.begun
    else:
        told = None
    facts, looked, asked = read_host_facts_and_places(settings, told and told.asked)
    if asked is None or facts.source != "nvml" or any(gpu.error for gpu in facts.gpus):
        _told = _Told(settings, key, begun, told.made if told else _now(), asked) if asked else None
        return facts, "a GPU cannot be used" if facts.source == "nvml" else "NVML gave no answer"
    _told = None
    places = [item for item in looked.items() if f"node {item[0]}" not in notes or os.path.islink(item[0])]
    states = _states(places)
    # the change time, which no process can set: what changed after it was read, however slow NVML was, is not
    # what was read, and a change shortly before may have been followed by one that does not show
    changed = max((was[CTIME] for was in states if len(was) > CTIME), default=0) / 1e9
    if not is_as_noted(notes) or begun - changed <= SETTLED:
        return facts, "the host has just changed"
    brief = _shorten(places, states, begun)
    kept = rawjson.dump((places, _checksum(states))), rawjson.dump(facts_to_json(facts))
    nvml = asked.library, asked.checksum
    if not _write(directory, settings, _Kept(key, _now(), begun, nvml, notes, brief, *kept)):
        return facts, "the file cannot be written"
    return facts, ""


def _shorten(places: "Places", states: list[list[int]], begun: float) -> "tuple[Places, int]":
    """Return the paths that suffice while no directory changes, and the checksum of their states.

    The times of a directory cover its links and missing names: creating, removing or replacing a name changes them
    (inode(7)).  A file can be written in place or mounted on, and a directory mounted on, so these are checked
    themselves.  The same holds for everything in a directory that has changed since ``begun`` or shortly before,
    because a further change might not be visible in its times.
    """
    brief: dict[str, tuple[bool, list[int]]] = {}
    directories: dict[str, list[int]] = {}
    for (path, searched), state in zip(places, states, strict=True):
        if not state or stat.S_ISLNK(state[MODE]):
            directory = os.path.dirname(path)
            if directory not in directories:
                whole = _state(directory, True)
                quiet = bool(whole) and stat.S_ISDIR(whole[MODE]) and begun - whole[CTIME] / 1e9 > SETTLED
                directories[directory] = whole if quiet else []
            if directories[directory]:
                brief[directory] = True, directories[directory]
                continue
        brief.setdefault(path, (searched, state))
    return [(path, searched) for path, (searched, _) in brief.items()], _checksum(
        [state for _, state in brief.values()]
    )


def _states(places: "Iterable[tuple[str, bool]]") -> list[list[int]]:
    return [_state(path, searched) for path, searched in places]


def _checksum(states: list[list[int]]) -> int:
    return crc32(repr(states).encode())


def _state(path: str, searched: bool) -> list[int]:
    """Return the state of a file, which differs between files and after a change; [] if it does not exist.

    For a directory it is only the identity, unless its content matters.
    """
    touched[0] = path
    try:
        status = os.lstat(path)
    except OSError:
        return []
    identity = [status.st_dev, status.st_ino, status.st_mode]
    if not searched and stat.S_ISDIR(status.st_mode):
        return identity
    return [*identity, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _now() -> float:
    """Return seconds since the boot, which no change of the clock disturbs (clock_gettime(2))."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _take_turn(directory: int) -> None:
    """Lock the cache until the descriptor is closed, or wait for another start, which queries NVML for all."""
    try:
        if not lock(directory, 0, False, 0.002):
            lock(directory, PATIENCE, True, 0.002)
    except OSError:  # a file system without locks: then several may read the same
        return
