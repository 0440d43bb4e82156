"""Messages of other programs that people meet when a container does not get its GPUs, and what to do about each.

For ``ocigpu explain "MESSAGE"`` and for the pages of the documentation's site; the messages are in messages.toml.
"""

import re
import textwrap
import tomllib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ocigpu.core.codes import CODES


class Message(NamedTuple):
    """A message of a program, and its meaning.

    ``texts``: its forms, with "..." for any text.  ``numbers``: of CUDA errors.  ``findings``: names of the doctor's
    checks that look for the cause.  ``steps``: what to do, a sentence or a command each.  ``source``: where it was
    reported or is described.  ``general``: it only wraps a cause, and counts only if nothing else is found.
    ``engine``: the engine that prints it, or several with commas, "" for any.
    """

    title: str
    texts: tuple[str, ...]
    meaning: str
    findings: tuple[str, ...]
    steps: tuple[str, ...]
    source: str
    general: bool = False
    numbers: tuple[int, ...] = ()
    engine: str = ""

    def wordings(self) -> Iterator[str]:
        """Yield all texts to look for."""
        yield from self.texts
        for number in self.numbers:
            yield from (form.format(number) for form in NUMBERS[number < CLEAR :])


class MessageAt(NamedTuple):
    """A message found in a text, with the line where it begins, counted from 1: the first one, in a log the last.

    ``engines``: those that may have printed it, by the table or by the words around it; () for any.
    """

    line: int
    message: Message
    engines: tuple[str, ...] = ()


SPEAKERS = {
    ("docker",): r"error response from daemon|\bdockerd?[\[:(]|docker\.service|docker: error",
    (
        "podman",
    ): r"\bpodman\b|\bERRO\[\d+\]|^error: (oci|crun|runc|/usr/bin/\S*runtime|setting up cdi|stat )|\bconmon\b",
    ("containerd",): r"\bctr: |\bnerdctl\b|\bcontainerd\b",
    ("crio",): r"\bcrio\b|\bcri-o\b",
    ("containerd", "crio"): r"\bkubelet\b|FailedCreatePodSandBox|RunPodSandbox|\bpod/|in pod\b",
}
"""How a line tells which engine it is of: the first that matches."""


def find_speakers(message: Message, text: str) -> tuple[str, ...]:
    """Return the engines of a message: from its entry, else from the words around it."""
    if message.engine:
        return tuple(message.engine.split(","))
    found = (engines for engines, words in SPEAKERS.items() if re.search(words, text, re.IGNORECASE | re.MULTILINE))
    return next(found, ())


def _read() -> tuple[Message, ...]:
    table = tomllib.loads(Path(__file__).with_name("messages.toml").read_text(encoding="utf-8"))
    lists = ("texts", "findings", "steps", "numbers")
    return tuple(Message(**entry | {name: tuple(entry.get(name, ())) for name in lists}) for entry in table["message"])


NUMBERS = (
    "error {}",
    "CUDA error {}",
    "CUDA error: {}",
    "CUDA error code {}",
    "CUDA error ({}",
    "CUDA failure {}",
    "cuInit ... error {}",
    "cuInit err: {}",
    "cudaGetDeviceCount returned {}",
    "CUDA initialization failure with error: {}",
    "({} vs. 0)",
    "init failure: {}",
    "device context {}",
)
"""How programs name a CUDA error by its number; the first only numbers that are nobody else's, from CLEAR on."""
CLEAR = 200
MESSAGES = _read()
PROGRAMS = {"ocigpu", "systemctl", "modprobe", "journalctl", "nvidia-smi", "setsebool", "podman", "kubectl", "docker"}
"""A step that begins with one of these is a command."""
SHORTEST = 8
_GAP = 120
_COLOUR = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033|\^\[)\[[0-9;?]*[A-Za-z]")
_NOISE = re.compile(r"""\\+[nrt]|[\s\\'"`\u2018-\u201f\u2500-\u257f]""")
"""What differs between two prints of one message: white space, quotes and their escapes, lines of boxes."""


def _plain(text: str) -> str:
    return _NOISE.sub("", text.lower()).replace("nvidia-container-cli.real", "nvidia-container-cli")


class _Text:
    """A text prepared for the search: without noise, as a whole and line by line."""

    def __init__(self, text: str) -> None:
        self.lines = [_plain(line) for line in _COLOUR.sub("", text).split("\n")]
        self.starts: list[int] = []
        self.joined = ""
        position = 0
        for line in self.lines:
            self.starts.append(position)
            position += len(line)
        self.joined = "".join(self.lines)
        self.grams = _grams(self.joined) if len(self.joined) > LONG else None

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield in order where a text of the table begins and ends in the joined lines; one with a gap is on one line.

        If the searched text has only a few lines, the gap may contain a line break.
        """
        literals = _literals(text)
        pattern = _compile(literals)
        if len(literals) == 1:
            yield from (match.span() for match in pattern.finditer(self.joined))
            return
        spans = self._spans_in_lines(pattern, literals)
        if len(self.lines) <= MAX_PASTED:
            spans = iter(sorted({*spans, *(match.span() for match in pattern.finditer(self.joined))}))
        yield from spans

    def _spans_in_lines(self, pattern: re.Pattern[str], literals: Sequence[str]) -> Iterator[tuple[int, int]]:
        for number in self._lines_with(max(literals, key=len)):
            start = self.starts[number]
            yield from ((start + at.start(), start + at.end()) for at in pattern.finditer(self.lines[number]))

    def has(self, text: str) -> bool:
        """Whether all parts of a text of the table occur, at any place."""
        return all(map(self._has, _literals(text)))

    def find_free(self, text: str, claimed: bytearray, last: bool) -> int | None:
        """Return where a text of the table first or last begins that no earlier entry has claimed a letter of."""
        free = (start for start, end in self.spans(text) if claimed.find(1, start, end) < 0)
        return max(free, default=None) if last else next(free, None)

    def _has(self, literal: str) -> bool:
        """Whether the text has a literal; in a long one most are ruled out by letters that never follow each other."""
        if self.grams is not None and not self.grams.issuperset(_grams(literal) or ()):
            return False
        return literal in self.joined

    def _lines_with(self, literal: str) -> Iterator[int]:
        """Yield the numbers of the lines in which a text begins, each once."""
        at = self.joined.find(literal)
        while at >= 0:
            number = bisect_right(self.starts, at) - 1
            yield number
            at = self.joined.find(literal, self.starts[number] + len(self.lines[number]))


LONG = 1 << 20
"""From so many letters on it pays to know which four bytes a text has: a thousand messages are looked for in it."""
MAX_GRAMS = 1 << 20


def _grams(text: str) -> set[int] | None:
    """Return all sequences of four bytes in a text, as numbers; None for a text with too many to be useful."""
    data = text.encode("utf-8", "replace")
    grams: set[int] = set()
    for first in range(4):
        words = memoryview(data)[first : first + (len(data) - first) // 4 * 4].cast("I")
        for start in range(0, len(words), MAX_GRAMS):
            grams.update(words[start : start + MAX_GRAMS])
            if len(grams) > MAX_GRAMS:
                return None
    return grams


MAX_PASTED = 8
"""A text of so many lines is one message that was wrapped, not a log."""


@cache
def _literals(text: str) -> tuple[str, ...]:
    """Return the parts of a text between its gaps."""
    return tuple(_plain(part) for part in text.split("..."))


@cache
def _compile(literals: tuple[str, ...]) -> re.Pattern[str]:
    """Return what matches a text of these parts: a number at its end is a whole one."""
    end = r"(?![0-9])" if literals[-1][-1:].isdecimal() else ""
    return re.compile(f".{{0,{_GAP}}}?".join(map(re.escape, literals)) + end)


def find_messages(text: str, log: bool = False) -> list[MessageAt]:
    """Return the entries found in a text, once each, those of earlier lines first; of a ``log`` the newest first.

    Letter case, white space, quotes, colours and line wraps do not count.  If two match the same words, the earlier one
    in the table counts.  Part of a message is enough, of eight characters or more, unless it is a ``log``.
    """
    given = _Text(text)
    found: list[MessageAt] = []
    claimed = bytearray(len(given.joined))  # one byte for each letter: a log may repeat a message very often
    for entry in MESSAGES:
        wordings = [wording for wording in entry.wordings() if given.has(wording)]
        places = [given.find_free(wording, claimed, log) for wording in wordings]
        for start, end in (span for wording in wordings for span in given.spans(wording)):
            claimed[start:end] = b"\1" * (end - start)
        if free := [place for place in places if place is not None]:
            found.append(MessageAt(bisect_right(given.starts, max(free) if log else min(free)), entry))
    exact = [one for one in found if not one.message.general]
    found = exact or found[:1]
    if not found and not log and len(given.joined) >= SHORTEST:
        parts = (entry for entry in MESSAGES if any(given.joined in _plain(literal) for literal in entry.texts))
        found = [MessageAt(1, entry) for entry in parts]
    lines = text.split("\n") if found else []
    found = [
        one._replace(engines=find_speakers(one.message, lines[one.line - 1][:MAX_AROUND] if log else text[:MAX_AROUND]))
        for one in found
    ]
    return sorted(found, key=lambda one: one.line, reverse=log)


def find_codes(text: str, log: bool = False) -> list[str]:
    """Return the error codes of ocigpu in a text, once each, in their order; of a ``log`` the newest first."""
    codes = [code for code in re.findall(r"OCIGPU-[A-Z]+-[0-9]+", text) if code in CODES]
    return list(dict.fromkeys(reversed(codes) if log else codes))


MAX_AROUND = 4096
"""Letters that are looked at for the engine that said a message."""


def render_markdown() -> str:
    """Return one page with all messages."""
    lines = [
        "# Troubleshooting, by what the program says",
        "",
        "Search this page for the message, or let the program do it, with any part of a log, or a whole one:",
        "",
        '    ocigpu explain "Failed to initialize NVML: Unknown Error"',
        "    docker logs CONTAINER 2>&1 | ocigpu explain -",
        "",
        "It runs the checks of `ocigpu doctor` that the message names, and says which cause holds on this host.",
        "`ocigpu doctor` looks for all of these causes at once, and prints the commands that fix them. Messages that",
        "begin with `OCIGPU-` are error codes: `ocigpu explain --markdown`.",
    ]
    for entry in MESSAGES:
        lines += ["", f"## {entry.title[:1].upper()}{entry.title[1:]}", ""]
        lines += [f"    {literal}" for literal in entry.texts]
        lines += ["", *textwrap.wrap(entry.meaning, 120), ""]
        lines += [f"- `{step}`" if step.partition(" ")[0] in PROGRAMS else f"- {step}" for step in entry.steps]
        named = f"Findings of `ocigpu doctor`: {', '.join(f'`{name}`' for name in entry.findings)}. "
        lines += ["", f"{named if entry.findings else ''}[Source]({entry.source})"]
    return "\n".join(lines) + "\n"
