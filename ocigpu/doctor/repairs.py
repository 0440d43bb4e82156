"""Commands that make a configuration file readable again; each was tried on the file's text before it is printed."""

import os
import re
import shlex
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from ocigpu.core.errors import OcigpuError, find_near
from ocigpu.doctor.files import put_away
from ocigpu.doctor.findings import KNOWN
from ocigpu.engines import checker, json_text
from ocigpu.engines.document import look_up
from ocigpu.engines.places import is_json, parse_config
from ocigpu.engines.status import CRI_NAMES
from ocigpu.system.programs import run_program

NEWLINE = "\n"
MAX_REPAIRS = 4
"""A file with more errors than this is for people."""
_STRING_OR_COMMA = re.compile(r'"(?:\\.|[^"\\])*(?:"|\Z)|,(?=\s*[}\]])')
_NO_TABLE = re.compile(r": runtimes\.([\w.-]+) is not a table")
MAX_MISTAKES = 32
SECONDS = 10.0
_CLOSERS = {"{": "}", "[": "]"}
_STRING_OR_BRACKET = re.compile(r'"(?:\\.|[^"\\])*(?:"|\Z)|[{}\[\]]')
_OF_TABLES = frozenset({"builder", "default-ulimits", "features", "log-opts", "proxies", "runtimes"})
_QUOTES = "\u201c\u201d\u201e"
_ENDS = '"}]'
_PLACE = re.compile(r"\(char (\d+)\)")
_VALUE = re.compile(r"\s*:\s*(\S)")
_BOTH = re.compile(r"([\w-]+): \(from flag: ")
_UNKNOWN = re.compile(r"directives don't match any configuration option: (.*)")
_LINE = re.compile(r"at line (\d+)")


def find_repair(path: str, text: str, check: Callable[[str], object]) -> str:
    """Return the command after which a file can be read, "" for none.

    In JSON it takes out comments and commas that do not belong there, and puts commas and brackets in that do; in TOML
    it comments lines out.  ``path``: on this machine, without links, which sed(1) would replace.  ``check`` raises
    ValueError, RecursionError or OcigpuError for a text that cannot be used.
    """
    json = is_json(path, text)
    scripts, mended = _without_commas(text) if json else _without_lines(text, check)
    if json and _find_error(mended, check):
        mended = _mend_json(text, check)
        scripts = _scripts_between(text, mended)
    return "" if _find_error(mended, check) else _sed(scripts, path)


def _rename(data: Mapping[str, Any], unknown: Sequence[str]) -> dict[str, str]:
    """Return better names for the keys that dockerd does not know, "" for none; of a table it names the keys inside."""
    wrong = [
        key
        for key, value in data.items()
        if key in unknown or (isinstance(value, dict) and any(map(value.get, unknown)))
    ]
    known = [name for name in KNOWN["engines"]["docker"]["keys"] if name not in data]
    return {key: next(iter(find_near(key, known, likeness=0.8)), "") for key in wrong}


def find_removal(path: str, text: str, rename: Mapping[str, str]) -> str:
    """Return the command that gives keys of daemon.json another name, or takes those out whose new name is "".

    It returns "" where that takes more than a few lines.
    """
    new = text
    for key, name in rename.items():
        new = new.replace(f'"{key}"', f'"{name}"', 1) if name else json_text.drop(new, [key])
    kept = {rename.get(key, key): value for key, value in parse_config("daemon.json", text).items()}
    kept.pop("", None)
    if parse_config("daemon.json", new) != kept:  # a value has the same word
        return ""
    return _sed(_scripts_between(text, new), path)


def _sed(scripts: Sequence[str], path: str) -> str:
    """Return the command of scripts, "" for none or too many; a line of a script ends where its option does."""
    if not 0 < len(scripts) <= MAX_REPAIRS:
        return ""
    if not any("\\" in script for script in scripts):
        return shlex.join(["sed", "-i", ";".join(scripts), path])
    return shlex.join(["sed", "-i", *(word for script in scripts for word in ("-e", script)), path])


def _find_error(text: str, check: Callable[[str], object]) -> str:
    """Return why a text cannot be used, "" if it can."""
    try:
        check(text)
    except (ValueError, RecursionError, OSError, OcigpuError) as error:
        return str(error) or type(error).__name__
    return ""


def find_config_repair(found: str, path: str, text: str, problem: str) -> str:
    """Return the command that corrects what a problem of an engine's file says, "" for none.

    ``found``: the file on this machine, as of :func:`find_repair`; ``path``: as the engine names it.  A command for
    daemon.json was run on a copy, which has the keys where dockerd has them and which this machine's dockerd accepts.
    """
    if os.path.isdir(found):  # docker run -v PATH:... makes one of a file that does not exist
        return put_away(found)
    if not is_json(path, text):
        return find_repair(found, text, partial(parse_config, path))
    new = text
    for _ in range(MAX_REPAIRS):
        command = _find_json_repair(found, path, new, problem)
        before, new = new, _try(command, new) if command else new
        if new == before or _find_misplaced(new):
            return ""
        problem = _why_refused(found, path, new)
        if not problem:
            return command if before == text else _sed(_scripts_between(text, new), found)
    return ""


def _try(command: str, text: str) -> str:
    """Return what a command of sed(1) makes of a file with a text; the text itself if it fails."""
    with suppress(OSError), tempfile.TemporaryDirectory(prefix="ocigpu-repair-") as directory:
        copy = f"{directory}/daemon.json"
        with open(copy, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        done = run_program([*shlex.split(command)[:-1], copy], SECONDS)
        with open(copy, encoding="utf-8", newline="") as file:
            return text if done.status else file.read()
    return text


def _why_refused(found: str, path: str, text: str) -> str:
    """Return why a text is no daemon.json: dockerd's words where the file is this machine's, "" if it is one."""
    if why := _find_error(text, partial(parse_config, path)):
        return why
    if os.path.realpath(path) != found:  # of another root, whose dockerd is not run
        return ""
    return _find_error(text, lambda text: checker.check("docker", path, {path: text}, checker.Meant(frozenset())))


def _walk(text: str) -> Iterator[tuple[re.Match[str], list[str]]]:
    """Yield each string and bracket of JSON, with the brackets that are to close what is open after it."""
    stack: list[str] = []
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in _CLOSERS:
            stack.append(_CLOSERS[match[0]])
        elif stack and match[0] == stack[-1]:
            stack.pop()
        yield match, stack


def _find_misplaced(text: str) -> tuple[int, str] | None:
    """Return where the first key of daemon.json's top level lies below another object, and the brackets before it.

    A key counts with a value of its kind only: log-opts may have "labels" too, and a runtime any name.
    """
    for match, stack in _walk(text):
        if len(stack) > 1 and match[0].startswith('"') and (value := _VALUE.match(text, match.end())):
            key = match[0][1:-1]
            known = key in KNOWN["engines"]["docker"]["keys"] and (key != "labels" or value[1] == "[")
            if known and (key in _OF_TABLES) == (value[1] == "{"):
                return match.start(), "".join(reversed(stack[1:]))
    return None


def _find_json_repair(found: str, path: str, text: str, problem: str) -> str:
    if name := _NO_TABLE.search(problem):
        return find_entry_repair(found, text, name[1])
    if names := _BOTH.findall(problem):
        return find_removal(found, text, dict.fromkeys(names, ""))
    if unknown := _UNKNOWN.search(problem):
        return find_removal(found, text, _rename(parse_config(path, text), unknown[1].split(", ")))
    return find_repair(found, text, partial(parse_config, path))


def find_entry_repair(path: str, text: str, name: str) -> str:
    """Return the command that makes a table of a runtime of daemon.json that is only a path, "" for none."""
    pattern = rf'"{re.escape(name)}"[ \t]*:[ \t]*("[^"\\\n]*")'
    text, number = re.subn(pattern, rf'"{name}": {{"path": \1}}', text)
    if number != 1 or not isinstance(look_up(parse_config("daemon.json", text), ("runtimes", name)), dict):
        return ""
    quoted = name.replace(".", "\\.")
    script = f's|"{quoted}"[[:blank:]]*:[[:blank:]]*\\("[^"]*"\\)|"{name}": {{"path": \\1}}|'
    return shlex.join(["sed", "-i", script, path])


def find_switch_repair(path: str, text: str) -> str:
    """Return the command after which a containerd file does not switch the CRI plugin off, "" for none."""
    key = "disabled_plugins"
    lines = [line for line in text.split("\n") if re.match(rf"{key}[ \t]*=[ \t]*\[[^]]*\][ \t]*$", line)]
    if len(lines) != 1:
        return ""
    left = [str(name) for name in tomllib.loads(lines[0])[key] if name not in CRI_NAMES]
    if any(re.search(r"[^\w.-]", name) for name in left):
        return ""
    kept = ", ".join(f'"{name}"' for name in left)
    return shlex.join(["sed", "-i", f"s/^{key}[[:blank:]]*=.*/{key} = [{kept}]/", path])


def _without_commas(text: str) -> tuple[list[str], str]:
    """Return scripts of sed(1) that take out trailing commas, the last first, and the text without them."""
    places = [match.start() for match in _STRING_OR_COMMA.finditer(text) if match[0] == ","]
    scripts = []
    for place in reversed(places[: MAX_REPAIRS + 1]):
        before = text[:place]
        scripts.append(f"{before.count(NEWLINE) + 1}s/,//{before.rpartition(NEWLINE)[2].count(',') + 1}")
        text = before + text[place + 1 :]
    return scripts, text


def _mend_json(text: str, check: Callable[[str], object]) -> str:
    """Return a text with its mistakes in JSON corrected, one after the other, as far as they are known."""
    for _ in range(0 if text.startswith("\ufeff") else MAX_MISTAKES):  # which the parser does not count
        found = _PLACE.search(_find_error(text, check))
        mended = _mend_json_at(text, int(found[1])) if found else ""
        if not mended or mended == text:
            break
        text = mended
    return text


def _mend_json_at(text: str, at: int) -> str:
    """Return a text without the mistake at a place, where the parser has stopped; "" if it is not a known one."""
    before, rest = text[:at].rstrip(), text[at:]
    if rest.startswith(("//", "#")):
        kept, rest = text[:at].rstrip(" \t"), rest[len(rest.partition(NEWLINE)[0]) :]
        return kept + (rest.removeprefix(NEWLINE) if kept.endswith(NEWLINE) else rest)
    if not rest.strip():
        if misplaced := _find_misplaced(text):
            head = text[: misplaced[0]].rstrip()
            return f"{head.removesuffix(',').rstrip()}{misplaced[1]},{text[len(head) :]}"
        stack: list[str] = []
        for _, stack in _walk(text):  # noqa: B007 - the last one counts
            pass
        return before.rstrip(",") + "".join(reversed(stack)) + NEWLINE
    if rest[0] in _QUOTES:
        return text.translate(dict.fromkeys(map(ord, _QUOTES), '"'))
    if rest[0] == "," or (rest[0] in "}]" and before.endswith(",")):
        return _without_commas(text)[1]
    if not text[at - 1].isspace() and not (rest[0] in '"{[' and before[-1:] in _ENDS):  # 01 is no number
        return ""
    is_next = rest[0] in '"{[-' or rest[0].isalnum()
    return f"{before},{text[len(before) :]}" if is_next and (before[-1:] in _ENDS or before[-1:].isalnum()) else ""


def _scripts_between(old: str, new: str) -> list[str]:
    """Return scripts of sed(1) that make one text the other, by changed and deleted lines; none if it has new ones."""
    before, after = (text.removesuffix(NEWLINE).split(NEWLINE) for text in (old, new))
    scripts = []
    for kind, first, last, start, end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        if end - start > last - first:
            return []
        for number, line in enumerate(after[start:end], first + 1):
            scripts.append(_change(number, line))
        if (gone := first + end - start + 1) <= last:
            scripts.append(f"{gone},{last}d" if gone < last else f"{last}d")
    return scripts


def _change(number: int, line: str) -> str:
    escaped = line.replace("\\", "\\\\")
    return f"{number}c\\{escaped}" if line else f"{number}s/.*//"


def _without_lines(text: str, check: Callable[[str], object]) -> tuple[list[str], str]:
    """Return scripts of sed(1) that comment out the lines that are no TOML, and the text with them commented out."""
    scripts: list[str] = []
    lines = text.split(NEWLINE)
    while len(scripts) < MAX_REPAIRS:
        try:
            check(NEWLINE.join(lines))
        except (ValueError, RecursionError, OcigpuError) as error:
            found = _LINE.search(str(error))
            number = int(found[1]) if found else 0
            if not 0 < number <= len(lines) or lines[number - 1].startswith("#"):
                break
            lines[number - 1] = f"# {lines[number - 1]}"
            scripts.append(f"{number}s/^/# /")
        else:
            break
    return scripts, NEWLINE.join(lines)
