"""Commands that make a configuration file readable again; each was tried on the file's text before it is printed."""

import re
import shlex
import tomllib
from collections.abc import Callable
from functools import partial

from ocigpu.core.errors import OcigpuError
from ocigpu.engines.document import look_up
from ocigpu.engines.places import is_json, parse_config
from ocigpu.engines.status import CRI_NAMES

NEWLINE = "\n"
MAX_REPAIRS = 4
"""A file with more errors than this is for people."""
_STRING_OR_COMMA = re.compile(r'"(?:\\.|[^"\\])*(?:"|\Z)|,(?=\s*[}\]])')
_NO_TABLE = re.compile(r": runtimes\.([\w.-]+) is not a table")
_LINE = re.compile(r"at line (\d+)")


def find_repair(path: str, text: str, check: Callable[[str], object]) -> str:
    """Return the command after which a file can be read, "" for none.

    In JSON it takes out commas before a closing bracket; in TOML it comments lines out.  ``path``: on this machine,
    without links, which sed(1) would replace.  ``check`` raises ValueError, RecursionError or OcigpuError for a text
    that cannot be used.
    """
    scripts, text = _without_commas(text) if is_json(path, text) else _without_lines(text, check)
    try:
        check(text)
    except (ValueError, RecursionError, OcigpuError):
        return ""
    return shlex.join(["sed", "-i", ";".join(scripts), path]) if 0 < len(scripts) <= MAX_REPAIRS else ""


def find_config_repair(found: str, path: str, text: str, problem: str) -> str:
    """Return the command that corrects what a problem of an engine's file says, "" for none.

    ``found``: the file on this machine, as of :func:`find_repair`; ``path``: as the engine names it.
    """
    if is_json(path, text) and (name := _NO_TABLE.search(problem)):
        return find_entry_repair(found, text, name[1])
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
