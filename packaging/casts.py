"""Record demo, top and doctor on a terminal as the moving pictures of the README: ``make casts``, as root.

Each is an SVG file without scripts, whose lines appear and go by CSS animations; who prefers reduced motion, and a
program that knows no animations, sees the last screen.  pyte reads what a terminal would show.
"""

import fcntl
import html
import math
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pyte

from ocigpu.cli.engines.busybox import make_bundle
from ocigpu.sim.create import create_host

PROGRAMS = Path(sys.executable).parent
DIRECTORY = Path(__file__).parents[1] / "docs" / "casts"
COLUMNS, LINES = 100, 26
PAUSE = 4.0
"""Seconds for which the last screen stands."""
FRAME = 0.1
"""Seconds between two looks at the screen."""
COLOURS = {
    "default": "#d8dee9", "black": "#7b8494", "red": "#f0717d", "green": "#8fd18b", "brown": "#ebc06d",
    "blue": "#7fb2e5", "magenta": "#c89be0", "cyan": "#7cc7c9", "white": "#ffffff",
}  # fmt: skip
PAPER, DIM = "#1d222b", "0.6"
FONT = "14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
WIDE, HIGH = 8.4, 18
"""Pixels of a character."""

Row = tuple[tuple[str, str], ...]
"""A line's pieces: text, and the attributes of its SVG element."""
Say = Callable[[bytes], None]


class Frame(NamedTuple):
    at: float
    rows: tuple[Row, ...]


class Screen(pyte.Screen):
    """pyte's screen, which knows no dim text: it takes italics for it, which none of our commands prints."""

    def select_graphic_rendition(self, *attributes: int, **private: bool) -> None:
        super().select_graphic_rendition(*(3 if attribute == 2 else attribute for attribute in attributes), **private)

    def rows(self) -> tuple[Row, ...]:
        return tuple(
            tuple(
                ("".join(cell.data for cell in cells), attributes)
                for attributes, cells in groupby((self.buffer[line][column] for column in range(COLUMNS)), _attributes)
            )
            for line in range(LINES)
        )


def _attributes(cell: "pyte.screens.Char") -> str:
    fill = PAPER if cell.reverse else COLOURS.get(cell.fg, COLOURS["default"])
    parts = [f'fill="{fill}"', 'class="b"' if cell.bold else "", f'opacity="{DIM}"' if cell.italics else ""]
    return " ".join(filter(None, [*parts, "R" if cell.reverse else ""]))


def record(words: Sequence[str], meanwhile: Callable[[float, Say], bool] = lambda _now, _say: True) -> list[Frame]:
    """Run a command on a terminal; returns each screen that differs from the one before, with its second.

    ``meanwhile(seconds, press)`` is called for each look at the screen; it may press keys, and ends the recording when
    it returns False.  Raises CalledProcessError when the command fails.
    """
    screen = Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    stream.feed(f"\x1b[32m$\x1b[0m ocigpu {' '.join(words)}\r\n".encode())
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(
        [PROGRAMS / "ocigpu", *words], stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True
    )
    os.close(child)
    frames, begin = [Frame(0.0, screen.rows())], time.monotonic()
    try:
        while True:
            ended = process.poll() is not None
            while select.select([parent], [], [], 0)[0]:
                try:
                    stream.feed(os.read(parent, 65536))
                except OSError:  # EIO: nobody has the terminal any more
                    break
            now = time.monotonic() - begin
            if (rows := screen.rows()) != frames[-1].rows:
                frames.append(Frame(now, rows))
            if ended or not meanwhile(now, lambda keys: _write(parent, keys)):
                break
            time.sleep(FRAME)  # a cast is in real time: this is its resolution
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
        os.close(parent)
    return frames


def _write(descriptor: int, keys: bytes) -> None:
    os.write(descriptor, keys)


def draw(frames: Sequence[Frame], title: str) -> str:
    """Return recorded screens as an SVG document."""
    length = frames[-1].at + PAUSE
    ends = [frame.at for frame in frames[1:]] + [length]
    spans: dict[tuple[float, float], str] = {}
    pieces = []
    for line in range(LINES):
        shown = zip((frame.rows[line] for frame in frames), (frame.at for frame in frames), ends, strict=True)
        for row, group in groupby(shown, lambda each: each[0]):
            times = [(begin, end) for _, begin, end in group]
            begin, end = times[0][0], times[-1][1]
            if not "".join(text for text, _ in row).strip() and not any("R" in attributes for _, attributes in row):
                continue
            if (begin, end) == (0.0, length):
                name = ""
            else:
                name = spans.setdefault((begin, end), f"s{len(spans)}") + ("" if end == length else " gone")
            pieces.append(f'<g class="{name}">{_draw_row(row, line)}</g>')
    animations = []
    for (begin, end), name in spans.items():
        on, off = 100 * begin / length, 100 * end / length
        steps = "0%{visibility:hidden}" if begin else ""
        steps += f"{on:.2f}%{{visibility:visible}}" + ("" if end == length else f"{off:.2f}%{{visibility:hidden}}")
        animations.append(f".{name}{{animation-name:{name}}}@keyframes {name}{{{steps}}}")
    width, height = math.ceil(COLUMNS * WIDE) + 32, LINES * HIGH + 32
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{html.escape(title)}</title>",
            f"<style>text{{font:{FONT};white-space:pre}}.b{{font-weight:bold}}.gone{{visibility:hidden}}",
            f"@media (prefers-reduced-motion:no-preference){{g[class]{{animation:{length:.1f}s step-end infinite}}",
            *animations,
            "}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
            *pieces,
            "</svg>\n",
        ]
    )


def _draw_row(row: Row, line: int) -> str:
    parts, column, y = [], 0, 16 + line * HIGH
    for text, attributes in row:
        x = 16 + column * WIDE
        if attributes.endswith("R"):
            box = f'width="{len(text) * WIDE:.1f}" height="{HIGH}" fill="{COLOURS["default"]}"'
            parts.append(f'<rect x="{x:.1f}" y="{y}" {box}/>')
        if text.strip():
            kept = text.rstrip()
            where = f'x="{x:.1f}" y="{y + 14}" textLength="{len(kept) * WIDE:.1f}"'
            parts.append(f"<text {where} {attributes.removesuffix('R').rstrip()}>{html.escape(kept)}</text>")
        column += len(text)
    return "".join(parts)


@contextmanager
def containers(directory: str, config: str, requests: dict[str, str]) -> Iterator[tuple[str, dict[str, int]]]:
    """Start containers with their NVIDIA_VISIBLE_DEVICES; yields runc's directory and, by name, their processes."""
    state = f"{directory}/state"
    environment = {**os.environ, "OCIGPU_CONFIG": config}
    runtime = [str(PROGRAMS / "ocigpu-runtime"), "--root", state]
    pids: dict[str, int] = {}
    try:
        for name, devices in requests.items():
            make_bundle(f"{directory}/{name}", "sleep 1000", {"NVIDIA_VISIBLE_DEVICES": devices})
            words = [
                "run",
                "--detach",
                "--pid-file",
                f"{directory}/{name}.pid",
                "--bundle",
                f"{directory}/{name}",
                name,
            ]
            subprocess.run(
                [*runtime, *words], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True
            )
            pids[name] = int(Path(directory, f"{name}.pid").read_text())
        yield state, pids
    finally:
        for name in requests:
            subprocess.run([*runtime, "delete", "--force", name], env=environment, check=False)


def record_demo(_directory: str) -> list[Frame]:
    return record(["demo"])


def record_doctor(directory: str) -> list[Frame]:
    create_host(f"{directory}/server", gpus=4, faults=("missing-uvm",))
    return record(["doctor", "--root", f"{directory}/server"])


def record_top(directory: str) -> list[Frame]:
    config = create_host(f"{directory}/host", gpus=4)
    load = Path(directory, "host", "load")
    with containers(directory, config, {"train": "0,1", "serve": "2"}) as (state, pids):

        def work(now: float, press: Say) -> bool:
            lines = []
            for gpu, name in enumerate(("train", "train", "serve")):
                wave = 88 + 10 * math.sin(now * 2 + gpu) if name == "train" else 40 + 38 * math.sin(now)
                use = round(wave)
                mib = use * 800  # the simulated driver's memory follows the use
                lines += [f"load {gpu} {use}", f"process {gpu} {pids[name]} {mib} {use}"]
            draft = load.with_name("load.new")
            draft.write_text("".join(f"{line}\n" for line in lines))
            draft.rename(load)
            for at, keys in ((14.0, b"u"), (16.0, b"/serve"), (18.0, b"\x1b"), (19.0, b"\x1b")):
                if at <= now < at + FRAME:
                    press(keys)
            return now < 19.0

        return record(["top", "--config", config, "--state-dir", state], work)


CASTS: dict[str, tuple[Callable[[str], list[Frame]], str]] = {
    "demo": (record_demo, "ocigpu demo: a container on a simulated host, each claim checked from inside"),
    "top": (record_top, "ocigpu top: GPUs of a simulated host, their containers and processes, live"),
    "doctor": (record_doctor, "ocigpu doctor: missing device nodes, and the command that creates them"),
}


def main(names: Sequence[str], output: Path = DIRECTORY) -> None:
    """Record these casts, or all, into a directory."""
    output.mkdir(exist_ok=True)
    for name in names or CASTS:
        recorder, title = CASTS[name]
        with TemporaryDirectory(prefix="ocigpu-cast-", dir="/tmp") as directory:
            os.chmod(directory, 0o755)
            frames = recorder(directory)
        Path(output, f"{name}.svg").write_text(draw(frames, title), encoding="utf-8")
        print(f"{output / name}.svg: {len(frames)} screens, {frames[-1].at:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
