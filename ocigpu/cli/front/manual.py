"""The words of the commands: a Markdown file for each, ``help/NAME.md``, with its help, arguments and options.

``--help`` shows them, TAB completes from them, and man pages and the site's pages are made of them.  The code has
types and defaults; tests hold both equal.  An option that several commands have is in the page of a command above them,
under "Options of its commands"; a page names those that it takes in a line "Shared: ...", or "Shared with PAGE: ...".

This is on the way of every command: it imports nothing that is not loaded already, and no command.
"""

import os

from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = "ocigpu"
DIRECTORY = os.path.join(os.path.dirname(__file__), "help")
WIDTH = 80
"""Columns where nobody says how many there are."""
MAX_WIDTH = 120
GAP = 30
"""Columns of the names of options, if they need so many; a longer one has a line of its own."""


class Word(NamedTuple):
    """An argument (without ``flags``) or option, and what stands for its value in the help: None for a switch."""

    flags: tuple[str, ...]
    metavar: str | None
    help: str

    @property
    def term(self) -> str:
        """How it is written, short names first: "-o, --output FILE"."""
        names = sorted(self.flags, key=lambda name: name.startswith("--"))
        return " ".join(filter(None, (", ".join(names), self.metavar)))


class Manual(NamedTuple):
    """A file's words.

    ``short``: for lists.  ``options``: those of the command by their first name.  ``below``: those that it and the
    commands above say for the ones below.  ``groups``: titles for the commands below, with their names.
    ``sections``: the others, as Markdown.
    """

    short: str
    help: str
    sections: dict[str, str]
    arguments: tuple[Word, ...]
    options: dict[str, Word]
    below: dict[str, Word]
    groups: dict[str, list[str]]

    @property
    def usage(self) -> str:
        """What follows the name of a command that has none below it."""
        return " ".join(["[OPTIONS]", *(str(word.metavar) for word in self.arguments)])


def read_page(command: str) -> Manual:
    """Return the words of a command, "cdi diff" say."""
    text = _read(command)
    if "{faults}" in text:
        from ocigpu.sim.fault_names import FAULT_NAMES

        faults = (f"    {name:<20} {fault.text}" for name, fault in FAULT_NAMES.items())
        text = text.replace("{faults}", "\n".join(faults))
    head, *sections = f"\n{text}".split("\n## ")
    about = head.strip().partition("\n")[2]
    found = {name: body.strip("\n") for name, _, body in (section.partition("\n") for section in sections)}
    arguments = tuple(_entries(found.pop("Arguments", "")))
    below = dict(read_page(command.rpartition(" ")[0] or ROOT).below) if command != ROOT else {}
    own = found.pop("Options", "")
    options = {word.flags[0]: word for word in _entries(own)}
    for page, names in _shared(own):
        words = read_page(page).options if page else below
        options |= {name: words[name] for name in names if name not in options}
    below |= {word.flags[0]: word for word in _entries(found.pop("Options of its commands", ""))}
    groups = {str(word.metavar): _names(word.help) for word in _entries(found.pop("Commands", ""))}
    return Manual(_short(head), about.strip(), found, arguments, options, below, groups)


def read_short(command: str) -> str:
    """Return what lists say of a command, without the price of its whole page."""
    return _short(f"\n{_read(command)}".partition("\n## ")[0])


def _read(command: str) -> str:
    with open(os.path.join(DIRECTORY, f"{command.replace(' ', '-')}.md"), "rb") as file:
        return file.read().decode()


def _short(head: str) -> str:
    title, _, about = head.strip().partition("\n")
    return title.partition(": ")[2] or _first_sentence(about)


def _entries(body: str) -> "Iterator[Word]":
    """Yield what the list items of a section describe: "- `--long`, `-l` `VALUE`: help"."""
    for item in f"\n{body}".split("\n- ")[1:]:
        lines = item.split("\n")
        more = next((number for number, line in enumerate(lines) if number and not line.startswith("  ")), len(lines))
        names, _, text = " ".join(line.strip() for line in lines[:more]).partition("`: ")
        words = names.replace("`", "").replace(", ", " ").split(" ")
        flags = tuple(word for word in words if word.startswith("-"))
        yield Word(flags, " ".join(words[len(flags) :]) or None, text)


def _shared(body: str) -> "Iterator[tuple[str, list[str]]]":
    """Yield (page, names) of the paragraphs that name options which are described elsewhere: "" for above."""
    for paragraph in body.split("\n\n"):
        head, _, names = paragraph.partition(": ")
        if head.startswith("Shared"):
            yield head.removeprefix("Shared").removeprefix(" with "), _names(names)


def _names(text: str) -> list[str]:
    return text.replace("`", "").replace(",", " ").split()


def _first_sentence(text: str) -> str:
    line = " ".join(text.strip().partition("\n\n")[0].split("\n"))
    sentence, dot, _ = line.partition(". ")
    return sentence + dot.strip()


# --help


def columns(descriptor: int = 1) -> int:
    """Return the columns of a terminal: what COLUMNS says, else the kernel, else 80."""
    try:
        return int(os.environ.get("COLUMNS", "")) or WIDTH
    except ValueError:
        try:
            return os.get_terminal_size(descriptor).columns or WIDTH
        except OSError:
            return WIDTH


def read_first_screen() -> str:
    """Return what is shown to who types no command: at most 24 lines of 80 columns."""
    with open(os.path.join(DIRECTORY, "..", "first-screen.txt"), encoding="utf-8") as file:
        return file.read().rstrip()


def words_below(command: str, commands: "Iterable[str]") -> list[str]:
    """Return what can follow the words of a group, of all ``commands``; "": at the beginning."""
    group = command.split()
    below = (words[len(group)] for words in map(str.split, commands) if words[: len(group)] == group != words)
    return list(dict.fromkeys(below))


def render_help(command: str, commands: "Iterable[str]", width: int = 0) -> str:
    """Return what --help shows of a command or group; ``commands``: the names of all."""
    page = read_page(command or ROOT)
    width = min(width or columns(), MAX_WIDTH)
    below = words_below(command, commands)
    usage = "[OPTIONS] COMMAND [ARGUMENT]..." if below else page.usage
    lines = [*fold(f"Usage: {ROOT} {command}".rstrip() + f" {usage}", width, 4), ""]
    lines += [*_blocks(page.help, width), ""]
    if page.arguments:
        lines += _table("Arguments", [(word.term, word.help) for word in page.arguments], width)
    options = [(word.term, word.help) for word in page.options.values()]
    for title, names in _grouped(page.groups, below):
        lines += _table(title, [(name, read_short(f"{command} {name}".strip())) for name in names], width)
    lines += _table("Options", [*options, ("-h, --help", "Show this message and exit.")], width)
    for title, body in page.sections.items():
        lines += ([] if title == "Notes" else [f"{title}:"]) + [*_blocks(body, width), ""]
    return "\n".join(lines[:-1])


def _grouped(groups: dict[str, list[str]], names: list[str]) -> "Iterator[tuple[str, list[str]]]":
    """Yield the titles and what is under each; what no title names comes last."""
    for title, listed in groups.items():
        yield title, [name for name in listed if name in names]
    if left := [name for name in names if not any(name in listed for listed in groups.values())]:
        yield "Commands", left


def _table(title: str, rows: list[tuple[str, str]], width: int) -> list[str]:
    room = min(max(len(name) for name, _ in rows) + 2, GAP, width // 2)
    lines = [f"{title}:"]
    for name, text in rows:
        first, *more = fold(text, max(width - 2 - room, 20), 0) or [""]
        begin = [f"  {name:<{room}}{first}"] if len(name) + 2 <= room else [f"  {name}", " " * (room + 2) + first]
        lines += [line.rstrip() for line in (*begin, *(" " * (room + 2) + line for line in more))]
    return [*lines, ""]


def _blocks(text: str, width: int) -> list[str]:
    """Return Markdown's lines, indented and in the width; what is indented by four in it keeps its lines."""
    blocks: list[str] = []
    for line in text.split("\n"):
        before = blocks[-1] if blocks else ""
        goes_on = before and line and _indent(line) == _hanging(before) and line[:2] != "- "
        if goes_on and (_indent(line) != _indent(before) or _indent(line) not in (4, 6)):
            blocks[-1] = f"{before} {line.strip()}"
        else:
            blocks.append(line)
    shown = [line if _indent(line) else f"  {line}".rstrip() for line in blocks]
    return [part for line in shown for part in fold(line, width, min(_hanging(line), width // 2)) or [""]]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _hanging(line: str) -> int:
    """Return where the text of "    name  text", "    1. text" or "- text" begins, else the line's indentation."""
    indent = _indent(line)
    words = line[indent:]
    if (words[:2] == "- " and words[2] != " ") or words[1:3] == ". ":
        return indent + words.index(" ") + 1
    gap = words.find("  ") if indent > 2 else -1
    return indent + (len(words) - len(words[gap:].lstrip()) if gap > 0 else 0)


def fold(text: str, width: int, indent: int) -> list[str]:
    """Return lines of at most ``width`` columns, broken at blanks; all but the first begin with ``indent`` blanks."""
    if len(text) <= width:
        return [text] if text else []
    lines = []
    while len(text) > width:
        at = text.rfind(" ", 0, width + 1)
        if not text[:at].strip() or at <= indent:  # one long word
            at = text.find(" ", max(indent, width))
        if at < 0:
            break
        lines.append(text[:at].rstrip())
        text = " " * indent + text[at:].lstrip()
    return [*lines, text] if text.strip() else lines
