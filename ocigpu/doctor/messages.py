"""Messages of other programs that people meet when a container does not get its GPUs, and what to do about each.

For ``ocigpu explain "MESSAGE"`` and for docs/TROUBLESHOOTING.md; the messages are in messages.toml.
"""

import textwrap
import tomllib
from pathlib import Path
from typing import NamedTuple


class Message(NamedTuple):
    """What programs say, in literal parts, and what it means.

    ``findings``: names of the doctor's checks that look for the cause.  ``steps``: what to do, a sentence or a command
    each.
    """

    title: str
    texts: tuple[str, ...]
    meaning: str
    findings: tuple[str, ...]
    steps: tuple[str, ...]


def _read() -> tuple[Message, ...]:
    table = tomllib.loads(Path(__file__).with_name("messages.toml").read_text(encoding="utf-8"))
    lists = ("texts", "findings", "steps")
    return tuple(Message(**entry | {name: tuple(entry[name]) for name in lists}) for entry in table["message"])


MESSAGES = _read()
PROGRAMS = {"ocigpu", "systemctl", "modprobe", "dmesg", "nvidia-smi", "setsebool", "podman", "kubectl"}
"""A step that begins with one of these is a command."""


def find_messages(text: str) -> list[Message]:
    """Return the entries of which ``text`` (part of a log, say) has a literal, or that have ``text`` in one.

    Letter case and runs of white space do not count; what is shorter than eight characters is found in nothing.
    """
    wanted = _plain(text)
    if len(wanted) < 8:
        return []
    return [
        entry
        for entry in MESSAGES
        if any(_plain(literal) in wanted or wanted in _plain(literal) for literal in entry.texts)
    ]


def _plain(text: str) -> str:
    return " ".join(text.replace('\\"', '"').lower().split())


def render_markdown() -> str:
    """Return docs/TROUBLESHOOTING.md."""
    lines = [
        "# Troubleshooting, by what the program says",
        "",
        "Search this page for the message, or let the program do it, with any part of a log:",
        "",
        '    ocigpu explain "Failed to initialize NVML: Unknown Error"',
        "",
        "`ocigpu doctor` looks for all of these causes at once, and prints the command that mends what it finds",
        "([its checks](DOCTOR.md)). Messages that begin with `OCIGPU-` are in [ERRORS.md](ERRORS.md). This page is",
        "generated: `ocigpu explain --messages --markdown > docs/TROUBLESHOOTING.md`.",
    ]
    for entry in MESSAGES:
        lines += ["", f"## {entry.title[:1].upper()}{entry.title[1:]}", ""]
        lines += [f"    {literal}" for literal in entry.texts]
        lines += ["", *textwrap.wrap(entry.meaning, 120), ""]
        lines += [f"- `{step}`" if step.partition(" ")[0] in PROGRAMS else f"- {step}" for step in entry.steps]
        if entry.findings:
            lines += ["", f"Findings of `ocigpu doctor`: {', '.join(f'`{name}`' for name in entry.findings)}."]
    return "\n".join(lines) + "\n"
