"""``ocigpu top``: which container uses which GPU how much, once or live."""

import os
import re
import select
import signal
import sys
import termios
import time
import tty
from contextlib import suppress
from typing import Annotated, Any, Self

from ocigpu.cli.containers.containers import places_of, shown_name
from ocigpu.cli.front import show
from ocigpu.cli.front.arguments import Range
from ocigpu.cli.front.common import load_facts, load_settings
from ocigpu.cli.host.top_screen import SORTS, Choice, History, View, arranged, draw, gib, with_unit
from ocigpu.containers.find import Places, find_containers
from ocigpu.containers.report import make_reports
from ocigpu.containers.usage import UsageReader, UsedGpu, User, join_usage
from ocigpu.core.errors import HostError, UsageError, quoted
from ocigpu.core.facts import to_data
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
KEYS = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down",
    b"\x1b[H": "home", b"\x1b[F": "end", b"\x1bOH": "home", b"\x1bOF": "end", b"\x1b[1~": "home", b"\x1b[4~": "end",
    b"\x1b": "escape", b"\r": "enter", b"\n": "enter", b"\x7f": "backspace", b"\b": "backspace",
}  # fmt: skip
"""What a terminal sends for the keys that are not characters (xterm's control sequences)."""
_KEY = re.compile(rb"\x1b[\[O][0-9;?]*[ -/]*[@-~]|\x1b[\[O]?[0-9;?]*\Z|\x1b[^\[O]|[\xc0-\xff][\x80-\xbf]*|.", re.DOTALL)
_BEGUN = re.compile(rb"\x1b[\[O]?[0-9;?]*|[\xc0-\xff][\x80-\xbf]{0,2}")
"""What may be the beginning of a key."""
ESCAPE = 0.05
"""Seconds in which the rest of a key comes."""


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
    if view.simulated:
        print(f"host: {show.host_line(reader.facts)}")
    secondary = ("model", "power", "temp", "engine", "processes")
    show.table(HEADERS, rows_of(arranged(view.gpus, sort)), dim=secondary, dispensable=DISPENSABLE)
    show.notes(view.notes, apart=True)


def look(reader: UsageReader, settings: Settings, places: Places) -> View:
    """Return what is to be shown now: containers and kernel files are looked at, NVML's last answer is taken."""
    containers, notes = find_containers(places)
    if os.geteuid():
        notes.append("not root: containers of other users are not seen")
    reports = make_reports([one for one in containers if one.pid], reader.facts, settings)
    gpus = join_usage(reader.facts, reader.read(), reports)
    notes = [*([reader.problem] if reader.problem else []), *notes]
    gpus_here = sum(len(part.gpus) for part in reader.facts.each)
    return View(reader.facts.simulated, gpus_here, gpus, sum(bool(report.gpus) for report in reports), notes)


def to_json(view: View) -> dict[str, Any]:
    """Return what is shown as JSON data: a GPU or MIG device with the containers that have or use it."""
    gpus = []
    for label, model, usage, users in view.gpus:
        data = {"gpu": label, "model": model, **to_data(usage), "containers": to_data(users)}
        data["processes"] = sum(len(user.processes) for user in users)
        gpus.append(data)
    return {"simulated": view.simulated, "gpus": gpus, "notes": view.notes}


def rows_of(gpus: list[UsedGpu]) -> list[list[str]]:
    """Return a row for each GPU and user of it; a GPU's own cells are empty where the row above has them."""
    own = HEADERS.index("container")
    rows = []
    for gpu in gpus:
        usage = gpu.usage
        memory = "-" if usage.used_mib is None else f"{gib(usage.used_mib)}/{gib(usage.total_mib)} GiB"
        degree = " °C" if show.draws_unicode() else " C"
        head = [gpu.label, gpu.model or "-", with_unit(usage.use, "%"), memory]
        head += [with_unit(usage.watts, " W"), with_unit(usage.celsius, degree)]
        for user in gpu.users or (None,):
            rows.append([*head, *(_cells(user) if user else ["-", "", "", "", ""])])
            head = [""] * own
    return rows


def _cells(user: User) -> list[str]:
    processes = ", ".join(f"{process.command} {process.pid}" for process in user.processes)
    name = shown_name(user) if user.state in ("ok", "") else f"{shown_name(user)} ({user.state})"
    memory = "-" if user.used_mib is None else f"{gib(user.used_mib)} GiB"
    return [name, user.engine, with_unit(user.use, "%"), memory, processes]


# live


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
        self.reader, self.settings, self.places = reader, settings, places
        self.choice, self.history = Choice(sort), History()
        self.begun = b""
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
                        self.history.add(view.gpus, time.monotonic())
                        # NVML's next answer comes first, if it is asked
                        due = time.monotonic() + interval * (1 if self.reader.fileno() < 0 else 2)
                    try:
                        screen.draw(draw(view, self.choice, self.history, time.monotonic(), interval, screen.size()))
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
        """Do what keys say; returns False when that is to end.

        A burst of keys may be cut anywhere: the beginning of one waits for its end, and stands for itself if that does
        not come at once.
        """
        if not keys:  # the other end of the terminal has gone
            screen.keys = False
        keys = self.begun + keys
        self.begun = b""
        found = _KEY.findall(keys)
        if found and _BEGUN.fullmatch(found[-1]) and select.select([0], [], [], ESCAPE)[0]:
            self.begun = found.pop()
        return all(self.choice.press(KEYS.get(key) or key.decode(errors="replace")) for key in found)
