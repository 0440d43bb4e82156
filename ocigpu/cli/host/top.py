"""``ocigpu top``: which container uses which GPU how much, once or live."""

import os
import signal
import sys
import termios
import time
import tty
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, Self

from ocigpu.cli.containers.containers import places_of, shown_name
from ocigpu.cli.front import show
from ocigpu.cli.front.arguments import Range
from ocigpu.cli.front.common import load_facts, load_settings
from ocigpu.containers.find import Places, find_containers
from ocigpu.containers.report import make_reports
from ocigpu.containers.usage import UsageReader, UsedGpu, User, join_usage
from ocigpu.core.errors import HostError, UsageError, printable, quoted
from ocigpu.core.facts import HostFacts, to_data
from ocigpu.core.settings import Settings
from ocigpu.system.service import ENDING, Signals

HEADERS = (
    "gpu",
    "model",
    "use",
    "memory",
    "power",
    "temp",
    "container",
    "engine",
    "ctr use",
    "ctr memory",
    "processes",
)
DISPENSABLE = ("model", "power", "temp", "engine", "processes", "ctr memory", "memory")
"""Columns that a narrow terminal goes without, in this order."""
SORTS = {"gpu": "g", "container": "c", "use": "u", "memory": "m"}
"""Orders of the rows, with their keys."""
ARROWS = {b"\x1b[A": -1, b"\x1b[B": 1, b"\x1b[5~": -10, b"\x1b[6~": 10}
"""Keys that move the rows: up, down, a page up, a page down (xterm's control sequences)."""
LEGEND = "q quit   sort by: g GPU, c container, u use, m memory   arrows scroll"


class View(NamedTuple):
    """What is shown: of this host its GPUs, how many containers have one, and what else is to be said."""

    facts: HostFacts
    gpus: list[UsedGpu]
    containers: int
    notes: list[str]


def top_command(
    once: bool = False,
    interval: Annotated[float, Range(0.2, 3600.0)] = 1.0,
    sort: str = "gpu",
    state_dir: list[str] | None = None,
    config: str = "",
    json: bool = False,
) -> None:
    if sort not in SORTS:
        raise UsageError(f"--sort {quoted(sort)}: one of {', '.join(SORTS)}")
    settings = load_settings(config)
    places = places_of(state_dir)
    reader = UsageReader(load_facts(settings), settings, interval)
    if not (once or json) and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        _Live(reader, settings, places, sort).run(interval)
        return
    with show.Progress("querying NVML"):
        reader.ask_once()
        view = look(reader, settings, places)
    if json:
        show.data(to_json(view))
        return
    if view.facts.simulated:
        print(f"host: {show.host_line(view.facts)}")
    show.table(HEADERS, sorted_rows(view.gpus, sort))
    show.notes(view.notes, apart=True)


def look(reader: UsageReader, settings: Settings, places: Places) -> View:
    """Return what is to be shown now: containers and kernel files are looked at, NVML's last answer is taken."""
    containers, notes = find_containers(places)
    if os.geteuid():
        notes.append("not root: containers of other users are not seen")
    reports = make_reports([one for one in containers if one.pid], reader.facts, settings)
    gpus = join_usage(reader.facts, reader.read(), reports)
    notes = [*([reader.problem] if reader.problem else []), *notes]
    return View(reader.facts, gpus, sum(bool(report.gpus) for report in reports), notes)


def to_json(view: View) -> dict[str, Any]:
    """Return what is shown as JSON data: a GPU or MIG device with the containers that have or use it."""
    gpus = []
    for label, model, usage, users in view.gpus:
        data = {"gpu": label, "model": model, **to_data(usage), "containers": to_data(users)}
        data["processes"] = sum(len(user.processes) for user in users)
        gpus.append(data)
    return {"simulated": view.facts.simulated, "gpus": gpus, "notes": view.notes}


def sorted_rows(gpus: list[UsedGpu], sort: str) -> list[list[str]]:
    """Return a row for each GPU and user of it; a GPU's own cells are empty where the row above has them."""
    pairs = [(gpu, user) for gpu in gpus for user in gpu.users or (None,)]

    def amount(gpu: UsedGpu, user: User | None) -> int:
        name = "use" if sort == "use" else "used_mib"
        numbers = (getattr(user, name, None), getattr(gpu.usage, name))
        return next((number for number in numbers if number is not None), -1)

    if sort == "container":
        pairs.sort(key=lambda pair: (pair[1] is None, pair[1].name if pair[1] else ""))
    elif sort != "gpu":
        pairs.sort(key=lambda pair: -amount(*pair))
    rows = [_row(*pair) for pair in pairs]
    own = HEADERS.index("container")
    same = [False, *(one[0] is two[0] for one, two in pairwise(pairs))]
    return [["", *[""] * (own - 1), *row[own:]] if again else row for row, again in zip(rows, same, strict=True)]


def _row(gpu: UsedGpu, user: User | None) -> list[str]:
    usage = gpu.usage
    memory = "-" if usage.used_mib is None else f"{_gib(usage.used_mib)}/{_gib(usage.total_mib)} GiB"
    head = [gpu.label, gpu.model or "-", _with(usage.use, "%"), memory, _with(usage.watts, " W")]
    head.append(_with(usage.celsius, " °C"))
    if user is None:
        return [*head, "-", "", "", "", ""]
    processes = ", ".join(f"{process.command} {process.pid}" for process in user.processes)
    name = shown_name(user) if user.state in ("ok", "") else f"{shown_name(user)} ({user.state})"
    own_memory = "-" if user.used_mib is None else f"{_gib(user.used_mib)} GiB"
    return [*head, name, user.engine, _with(user.use, "%"), own_memory, processes]


def _gib(mib: int | None) -> str:
    return "?" if mib is None else f"{mib / 1024:.1f}"


def _with(number: int | None, unit: str) -> str:
    return "-" if number is None else f"{number}{unit}"


# live


def fit(rows: list[list[str]], width: int) -> list[str]:
    """Return aligned lines of at most ``width`` columns, the headers first; columns that have no room are left out."""
    table = [[header.upper() for header in HEADERS], *([printable(cell) for cell in row] for row in rows)]
    widths = dict(zip(HEADERS, (max(map(len, column)) for column in zip(*table, strict=True)), strict=True))
    needed = dict(widths, processes=min(widths["processes"], 20))  # it is cut, as it may be long
    for name in DISPENSABLE:
        if sum(needed.values()) + 2 * (len(needed) - 1) > width:
            del needed[name]
    kept = [(position, widths[name]) for position, name in enumerate(HEADERS) if name in needed]
    return ["  ".join(row[position].ljust(room) for position, room in kept)[:width].rstrip() for row in table]


class _Screen:
    """The terminal as a live view wants it: the other screen, no cursor, no line ends, keys as they come.

    It is put back as it was whatever happens.
    """

    def __init__(self) -> None:
        self.keys = sys.stdin.isatty()

    def __enter__(self) -> Self:
        if self.keys:
            self._before = termios.tcgetattr(0)
            tty.setcbreak(0)
        self._write("\x1b[?1049h\x1b[?25l\x1b[?7l")
        return self

    def __exit__(self, *_exception: object) -> None:
        with suppress(OSError, termios.error):  # the terminal is gone
            self._write("\x1b[?7h\x1b[?25h\x1b[?1049l")
            if self.keys:
                termios.tcsetattr(0, termios.TCSADRAIN, self._before)

    def draw(self, lines: list[str]) -> None:
        """Write a screen over the last one, in one go: nothing is cleared that is not drawn, so nothing flickers."""
        self._write("\x1b[?2026h\x1b[H" + "\x1b[K\n".join(lines) + "\x1b[K\x1b[J\x1b[?2026l")

    def size(self) -> tuple[int, int]:
        """Return columns and lines; 80 and 24 for a terminal that does not say."""
        columns, lines = os.get_terminal_size(1)
        return columns or 80, lines or 24

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class _Live:
    def __init__(self, reader: UsageReader, settings: Settings, places: Places, sort: str) -> None:
        self.reader, self.settings, self.places, self.sort = reader, settings, places, sort
        self.first = 0
        """The row at the top."""
        self.suspended = False
        self.known: frozenset[str] = frozenset()

    def run(self, interval: float) -> None:
        """Show the view until q is pressed or a signal comes."""
        due, view = 0.0, None
        with Signals((*ENDING, signal.SIGHUP), hangup=False) as signals, _Screen() as screen:
            before = [(each, signal.signal(each, self._suspend)) for each in (signal.SIGTSTP,)]
            before.append((signal.SIGWINCH, signal.signal(signal.SIGWINCH, lambda *_: None)))
            try:
                while not signals.stopping:
                    if self.reader.fileno() < 0:
                        self.reader.start(os.getpid())
                    if view is None or time.monotonic() >= due:
                        self._follow()
                        view = look(self.reader, self.settings, self.places)
                        # NVML's next answer comes first, if it is asked
                        due = time.monotonic() + interval * (1 if self.reader.fileno() < 0 else 2)
                    try:
                        screen.draw(self._lines(view, interval, *screen.size()))
                    except OSError:  # nobody sees it any more
                        return
                    others = [fd for fd in (0 if screen.keys else -1, self.reader.fileno()) if fd >= 0]
                    readable = signals.wait(due - time.monotonic(), *others)
                    if self.suspended:
                        self.suspended = False
                        screen.__exit__()
                        os.kill(os.getpid(), signal.SIGSTOP)
                        screen.__enter__()
                    if 0 in readable and not self._press(os.read(0, 64), screen):
                        return
                    if self.reader.fileno() in readable:
                        self.reader.take()
                        due = 0.0
            finally:
                self.reader.close()
                for number, handler in before:
                    signal.signal(number, handler)

    def _suspend(self, *_signal: object) -> None:
        self.suspended = True

    def _follow(self) -> None:
        """Read the facts again when NVML has other GPUs or MIG devices than it had."""
        self.reader.take()
        answering = self.reader.answering
        if answering and self.known and answering != self.known:
            with suppress(HostError):  # the driver is being unloaded: NVML's silence will say so
                self.reader.facts = load_facts(self.settings)
        self.known = answering or self.known

    def _press(self, keys: bytes, screen: _Screen) -> bool:
        """Do what keys say; returns False when that is to end."""
        if keys in ARROWS:
            self.first = max(self.first + ARROWS[keys], 0)
        elif not keys:  # the other end of the terminal has gone
            screen.keys = False
        else:
            chosen = [name for name, key in SORTS.items() if key.encode() in keys]
            self.sort = chosen[-1] if chosen else self.sort
        return keys != b"\x1b" and b"q" not in keys

    def _lines(self, view: View, interval: float, width: int, height: int) -> list[str]:
        head, *rows = fit(sorted_rows(view.gpus, self.sort), width)
        room = max(height - 4, 1)
        self.first = min(self.first, max(len(rows) - room, 0))
        end = self.first + room
        count = f"{show.count(len(view.facts.gpus), 'GPU')}, {show.count(view.containers, 'container')}"
        title = f"{time.strftime('%H:%M:%S')}  {count}  every {interval:g} s, by {self.sort}"
        title = f"SIMULATED  {title}" if view.facts.simulated else title
        below = f"rows {self.first + 1} to {min(end, len(rows))} of {len(rows)}" if len(rows) > room else ""
        below = "   ".join([*filter(None, [below]), *(f"note: {printable(note)}" for note in view.notes)])
        shown = [line[:width].rstrip() for line in (title, head, *rows[self.first : end], below, LEGEND)]
        shown[1] = show.styled(shown[1], "7")
        return shown[:height]
