"""What the live view of ``ocigpu top`` draws: bars, a minute of history, containers and their processes."""

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ocigpu.cli.containers.containers import shown_name
from ocigpu.cli.front import show
from ocigpu.containers.usage import UsedGpu, User
from ocigpu.core.errors import printable

SORTS = {"gpu": "g", "container": "c", "use": "u", "memory": "m"}
"""Orders of the GPUs and of each one's containers, with their keys."""
MINUTE = 60.0
"""Seconds of history."""
SPARK = 12
"""Columns of the history: five seconds each."""
BAR = 10
HELP = """\
q, Esc, Ctrl-C      quit
g, c, u, m          sort by GPU, container, use, memory
p                   hide or show processes
/                   filter: only rows with this text; Enter keeps it, Esc clears it
arrows, page keys   move the rows; Home, End
?                   this list

USE is the share of time in which the GPU had work; the rows below a GPU are the
containers that have it or use it, then their processes: percent of the GPU's
time, and memory.  "-" is what the driver does not report."""
LEGEND = "q quit  ? help  / filter  p processes  sort: g GPU  c container  u use  m memory"
DIM, GREEN, YELLOW, RED, BOLD, REVERSED = "2", "32", "33", "31", "1", "7"

Line = list[tuple[str, str]]
"""Pieces of a line of the screen with their styles (ECMA-48's SGR, "" for none)."""


class View(NamedTuple):
    """What is shown: whether the host is simulated, its GPUs, how many containers have one, and notes."""

    simulated: bool
    host_gpus: int
    gpus: list[UsedGpu]
    containers: int
    notes: list[str]


class History:
    """The last minute of each GPU's use, as it was read."""

    def __init__(self) -> None:
        self._readings: dict[str, deque[tuple[float, int]]] = {}

    def add(self, gpus: Sequence[UsedGpu], now: float) -> None:
        """Take a reading at this time; what is older than a minute goes, and so do GPUs that are gone."""
        self._readings = {gpu.usage.uuid: self._readings.get(gpu.usage.uuid) or deque() for gpu in gpus}
        for gpu in gpus:
            readings = self._readings[gpu.usage.uuid]
            if gpu.usage.use is not None:
                readings.append((now, gpu.usage.use))
            while readings and readings[0][0] <= now - MINUTE:
                readings.popleft()

    def means(self, uuid: str, now: float) -> list[int | None]:
        """Return the mean use in each twelfth of the minute before ``now``, the oldest first; None: not read."""
        cells: list[list[int]] = [[] for _ in range(SPARK)]
        for at, use in self._readings.get(uuid, ()):
            if at > now - MINUTE:
                cells[min(int((at - now + MINUTE) / MINUTE * SPARK), SPARK - 1)].append(use)
        return [sum(cell) // len(cell) if cell else None for cell in cells]


class Choice:
    """What the user chose by keys: order, filter, what is hidden, and the row at the top."""

    def __init__(self, sort: str) -> None:
        self.sort = sort
        self.filter = ""
        self.typing = False
        self.processes = True
        self.help = False
        self.first = 0

    def press(self, key: str) -> bool:
        """Obey a key, a character or the name of a special one; returns False when it ends the view."""
        moves = {"up": -1, "down": 1, "page up": -10, "page down": 10, "home": -self.first, "end": 1 << 20}
        if self.typing:
            self._type(key)
        elif key in moves:
            self.first = max(self.first + moves[key], 0)
        elif key in SORTS.values():
            self.sort = next(name for name, letter in SORTS.items() if letter == key)
        elif key == "p":
            self.processes = not self.processes
        elif key == "?" or self.help:  # any other key closes the list
            self.help = key == "?" and not self.help
        elif key == "/":
            self.typing = True
        elif key == "escape" and self.filter:
            self.filter = ""
        else:
            return key not in ("q", "escape")
        return True

    def _type(self, key: str) -> None:
        if key in ("enter", "escape"):
            self.typing = False
            self.filter = self.filter if key == "enter" else ""
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1 and key.isprintable():
            self.filter += key


def arranged(gpus: Sequence[UsedGpu], sort: str) -> list[UsedGpu]:
    """Return the GPUs, and the containers of each, in an order of :data:`SORTS`; most use and memory come first."""

    def amount(one: UsedGpu | User) -> int:
        numbers = one.usage if isinstance(one, UsedGpu) else one
        number = numbers.use if sort == "use" else numbers.used_mib
        return 1 if number is None else -number

    if sort == "container":
        return sorted(gpus, key=lambda gpu: (not gpu.users, [user.name for user in gpu.users]))
    if sort == "gpu":
        return list(gpus)
    return sorted((gpu._replace(users=tuple(sorted(gpu.users, key=amount))) for gpu in gpus), key=amount)


def filtered(gpus: Sequence[UsedGpu], text: str) -> list[UsedGpu]:
    """Return the GPUs whose own words contain the text, in any case, and of the others the users that do."""
    text = text.lower()

    def user_has(user: User) -> bool:
        words = [user.name, user.id, user.engine]
        words += [f"{process.pid} {process.command}" for process in user.processes]
        return any(text in word.lower() for word in words)

    found = []
    for gpu in gpus:
        if text in f"{gpu.label} {gpu.model}".lower():
            found.append(gpu)
        elif users := tuple(filter(user_has, gpu.users)):
            found.append(gpu._replace(users=users))
    return found


def draw(view: View, choice: Choice, history: History, now: float, interval: float, size: tuple[int, int]) -> list[str]:
    """Return the lines of a screen of ``size`` columns and lines, styled; ``choice.first`` is kept within the rows."""
    width, height = size
    gpus = arranged(filtered(view.gpus, choice.filter), choice.sort)
    head, rows = _rows(gpus, choice, history, now, width)
    if choice.help:
        head, rows = [("keys", REVERSED)], [[(line, "")] for line in HELP.splitlines()]
    room = max(height - 4, 1)
    choice.first = min(choice.first, max(len(rows) - room, 0))
    end = choice.first + room
    count = f"{show.count(view.host_gpus, 'GPU')}, {show.count(view.containers, 'container')}"
    title = f"{time.strftime('%H:%M:%S')}  {count}  every {interval:g} s, by {choice.sort}"
    below = [f"rows {choice.first + 1} to {min(end, len(rows))} of {len(rows)}"] if len(rows) > room else []
    below += [f"note: {printable(note)}" for note in view.notes]
    last: Line = [(LEGEND, DIM)]
    if choice.typing or choice.filter:
        last = [("filter: ", BOLD), (choice.filter, ""), ("_" if choice.typing else "   / change, Esc clear", DIM)]
    lines: list[Line] = [
        [("SIMULATED", YELLOW), ("  ", ""), (title, "")] if view.simulated else [(title, "")],
        head,
        *rows[choice.first : end],
        [("   ".join(below), "")],
        last,
    ]
    return [_styled(line, width) for line in lines[:height]]


def _rows(gpus: Sequence[UsedGpu], choice: Choice, history: History, now: float, width: int) -> tuple[Line, list[Line]]:
    """Return the line of headers and a line for each GPU, container and process."""
    unicode = show.draws_unicode()
    full, empty, sparks = ("█", "░", "▁▂▃▄▅▆▇█") if unicode else ("#", ".", "_.-=+*#@")
    degree = " °C" if unicode else " C"

    def bar(percent: int | None, style: str) -> Line:
        filled = 0 if percent is None else min(max(round(percent * BAR / 100), 0), BAR)
        return [(full * filled, style), (empty * (BAR - filled), DIM)]

    def spark(uuid: str) -> str:
        return "".join(" " if mean is None else sparks[min(mean, 99) * len(sparks) // 100]
                       for mean in history.means(uuid, now))  # fmt: skip

    table: list[list[Line]] = [
        [[(word, "")] for word in ("GPU", "USE", "", "LAST MINUTE", "MEMORY", "", "POWER", "TEMP", "MODEL")]
    ]
    for gpu in gpus:
        usage = gpu.usage
        part = 100 * usage.used_mib // usage.total_mib if usage.used_mib is not None and usage.total_mib else None
        memory = f"{gib(usage.used_mib)}/{gib(usage.total_mib)} GiB" if usage.used_mib is not None else "-"
        table.append(
            [
                [(gpu.label, BOLD)],
                bar(usage.use, GREEN),
                [(with_unit(usage.use, "%").rjust(4), "")],
                [(spark(usage.uuid), GREEN)],
                bar(part, RED if (part or 0) >= 95 else YELLOW if (part or 0) >= 80 else GREEN),
                [(memory.rjust(15), "")],
                [(with_unit(usage.watts, " W").rjust(6), DIM)],
                [(with_unit(usage.celsius, degree).rjust(6), DIM)],
                [(printable(gpu.model or "-"), DIM)],
            ]
        )
    widths = [max(_width(cell) for cell in column) for column in zip(*table, strict=True)]
    kept = list(range(len(widths)))
    for dispensable in (8, 7, 6, 3, 4, 1, 5):  # model, temperature, power, history, bars, memory
        if sum(widths[each] + 2 for each in kept) - 2 > width:
            kept.remove(dispensable)
    lines = [_joined([(row[each], widths[each]) for each in kept]) for row in table]
    names = [len(name) for gpu in gpus for user in gpu.users for name in _names(user, choice.processes)]
    room = min(max(names, default=0), max(width - 42, 12))
    rows: list[Line] = []
    for gpu, line in zip(gpus, lines[1:], strict=True):
        rows.append(line)
        for user in gpu.users:
            rows += _user_rows(user, choice.processes, room)
    return [(_text(lines[0]).ljust(width), REVERSED)], rows


def _names(user: User, processes: bool) -> list[str]:
    """Return what stands at the beginning of the rows of a user and its processes."""
    name = shown_name(user) if user.state in ("ok", "") else f"{shown_name(user)} ({user.state})"
    shown = user.processes if processes else ()
    return [f"    {printable(name)}", *(f"      {one.pid} {printable(one.command)}" for one in shown)]


def _user_rows(user: User, processes: bool, room: int) -> list[Line]:
    name, *own = (text[:room] for text in _names(user, processes))
    engine = max(len(user.engine), len("containerd"))
    memory = f"{gib(user.used_mib)} GiB" if user.used_mib is not None else "-"
    cells: list[tuple[Line, int]] = [
        ([(name, "" if user.state in ("ok", "") else RED)], room),
        ([(user.engine, DIM)], engine),
        ([(with_unit(user.use, "%").rjust(4), "")], 4),
        ([(memory.rjust(10), "")], 10),
    ]
    if not processes and user.processes:
        cells.append(([(_processes(len(user.processes)), DIM)], 0))
    rows = [_joined(cells)]
    for text, process in zip(own, user.processes, strict=False):
        numbers = f"{process.use}%".rjust(4), f"{gib(process.used_mib)} GiB".rjust(10)
        rows.append([("  ".join((text.ljust(room), " " * engine, *numbers)), DIM)])
    return rows


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def gib(mib: int | None) -> str:
    """Return MiB as GiB, "?" for None."""
    return "?" if mib is None else f"{mib / 1024:.1f}"


def with_unit(number: int | None, unit: str) -> str:
    """Return a number with its unit, "-" for None."""
    return "-" if number is None else f"{number}{unit}"


def _joined(cells: Sequence[tuple[Line, int]]) -> Line:
    """Return cells next to each other, each padded to its width."""
    line: Line = []
    for cell, width in cells:
        line += [*cell, (" " * (width - _width(cell) + 2), "")]
    return line


def _text(line: Line) -> str:
    return "".join(text for text, _ in line)


def _width(line: Line) -> int:
    return sum(len(text) for text, _ in line)


def _styled(line: Line, width: int) -> str:
    """Return a line cut to the width, with the styles that the terminal and its user want."""
    done, at = "", 0
    last = len(_text(line).rstrip()) if line and line[-1][1] != REVERSED else width
    for text, style in line:
        piece = text[: max(min(width, last) - at, 0)]
        at += len(text)
        done += show.styled(piece, style) if piece.strip() or style == REVERSED else piece
    return done
