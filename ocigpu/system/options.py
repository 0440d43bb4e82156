"""Options of programs that take those of NVIDIA's: one form of tables, one way to read words and values."""

import errno
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ocigpu.core.errors import SettingsError, UsageError, printable, quoted
from ocigpu.core.tokens import FALSE_WORDS, MAX_IMEX_CHANNEL, TRUE_WORDS, is_number
from ocigpu.system.files import read_regular

INFINITE = "infinite"
ANYTHING = ("*",)
MAX_MILLISECONDS = 24 * 3600 * 1000
MAX_SECONDS = 1e9
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)")


class Option(NamedTuple):
    """One option: ``name`` is its field in the record of all.

    ``kind``: "bool", "text", "path", "list", "numbers", "duration" (text such as "1m30s" or "infinite", a value in
    seconds), "interval" (also below a second) or "milliseconds" (a value in seconds).
    ``flags`` and ``variables``: its names; an earlier one wins.  ``key``: its path in a file, "" for none.
    ``programs``: those that have it as a flag.  ``refused``: why it is not obeyed, unless its value is ``harmless``.
    """

    name: str
    kind: str
    flags: tuple[str, ...]
    variables: tuple[str, ...]
    meaning: str = ""
    choices: Sequence[str] = ()
    key: str = ""
    programs: tuple[str, ...] = ()
    refused: str = ""
    harmless: tuple[str, ...] = ()


def read_table(path: Path) -> tuple[Option, ...]:
    """Return the options of a table."""
    found = []
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["options"]:
        row.setdefault("flags", row["name"].replace("_", "-"))
        row.setdefault("harmless", FALSE_WORDS if row["kind"] == "bool" else ())
        lists = {name: tuple(row.get(name, "").split()) for name in ("flags", "variables", "programs")}
        found.append(Option(**{**row, **lists, "harmless": tuple(row["harmless"])}))
    return tuple(found)


def option_error(where: str, message: str, hint: str | None = None) -> SettingsError:
    """Return the error of a configuration: ``where`` is a file, variable or flag."""
    return SettingsError("OCIGPU-KUBE-1", f"{printable(where, 300)}: {message}", hint)


def read_text(path: str, limit: int, error: Callable[[str, str], SettingsError]) -> str:
    """Return the text of a regular file up to a size; raises the exception ``error`` makes of path and cause."""
    try:
        return read_regular(path, limit).decode()
    except UnicodeDecodeError as wrong:
        raise error(path, "it is not UTF-8 text") from wrong
    except OSError as wrong:
        causes = {errno.EINVAL: "it is not a file", errno.EFBIG: f"more than {limit} characters"}
        raise error(path, causes.get(wrong.errno or 0, str(wrong.strerror))) from wrong


def read_flags(words: Sequence[str], options: Sequence[Option], command: str) -> dict[str, str]:
    """Return the values of words such as "--name=value", "--name value", and "--name" for a bool, by option name.

    A repeated list option adds to the list; for others the last one counts.  Raises UsageError for unknown words,
    SettingsError for a refused option.
    """
    known = {flag: option for option in options for flag in option.flags}
    see = f"see: ocigpu {command} --help"
    found: dict[str, str] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.removeprefix("-").removeprefix("-").partition("=")
        option = known.get(flag)
        if option is None or not word.startswith("-"):
            raise UsageError(f"no such option: {quoted(word)}", see)
        if not equals and option.kind == "bool":
            value = "true"
        elif not equals and not left:
            raise UsageError(f"--{flag} needs a value", see)
        elif not equals:
            value = left.pop(0)
        _check_refused(option, value, f"--{flag}")
        again = option.name in found and option.kind in ("list", "numbers")
        found[option.name] = f"{found[option.name]},{value}" if again else value
    return found


def find_values(
    options: Sequence[Option],
    flags: Mapping[str, str],
    environment: Mapping[str, str],
    document: Mapping[str, Any] | None = None,
    where: str = "",
) -> dict[str, Any]:
    """Return the values of the options that are set, by name: the flag, else the variable, else the file's key.

    ``document``: the content of the file ``where``.  An empty variable is not set.  Raises SettingsError that names the
    flag, variable or key.
    """
    found = {}
    for option in options:
        variables = [name for name in option.variables if environment.get(name)]
        for name in variables:
            _check_refused(option, environment[name], name)
        raw: Any = document if option.key else None
        for part in option.key.split("."):
            raw = raw.get(part) if raw is not None else None
        place = f"{where}: {option.key}"
        if option.name in flags:
            raw, place = flags[option.name], f"--{option.flags[0]}"
        elif variables:
            raw, place = environment[variables[0]], variables[0]
        if raw is not None and not option.refused:
            found[option.name] = read_value(option, raw, place)
    return found


def _check_refused(option: Option, value: str, where: str) -> None:
    if option.refused and value and value not in option.harmless and option.harmless != ANYTHING:
        raise SettingsError("OCIGPU-KUBE-1", f"{where} {quoted(value)} is not supported: {option.refused}")


def read_value(option: Option, raw: Any, where: str) -> Any:
    """Return the option's value of a text or of data from a file; raises SettingsError."""
    if option.kind == "bool":
        if raw is True or raw in TRUE_WORDS:
            return True
        if raw is False or raw in FALSE_WORDS:
            return False
        raise option_error(where, f"{shown(raw)} is neither true nor false")
    if option.kind == "milliseconds":
        if not (is_number(raw) and 0 < int(raw[:12]) <= MAX_MILLISECONDS):
            raise option_error(where, f"{quoted(raw)} is not a number of milliseconds, 1 to {MAX_MILLISECONDS}")
        return int(raw) / 1000
    if option.kind in ("duration", "interval"):
        if option.kind == "duration" and raw == INFINITE:
            return math.inf
        return parse_duration(raw, where, 1.0 if option.kind == "duration" else 1e-3)
    if option.kind in ("list", "numbers"):
        return _list(option, raw, where)
    if option.kind == "path" and raw and not str(raw).startswith("/"):
        raise option_error(where, f"{shown(raw)} is not an absolute path")
    return _chosen(option, raw, where)


def _list(option: Option, raw: Any, where: str) -> tuple[Any, ...]:
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, list) or any(isinstance(part, (list, dict)) for part in parts):
        raise option_error(where, f"{shown(raw)} is neither text nor a list of it")
    stripped = [part.strip() if isinstance(part, str) else part for part in parts]
    unique = dict.fromkeys(part for part in stripped if part != "")
    if option.kind == "numbers":
        return tuple(_channel(part, where) for part in unique)
    values = tuple(_chosen(option, part, where) for part in unique)
    if not values and option.choices:
        raise option_error(where, "is empty")
    return values


def _chosen(option: Option, raw: Any, where: str) -> str:
    if not isinstance(raw, str):
        raise option_error(where, f"{shown(raw)} is not text")
    if option.choices and raw not in option.choices:
        raise option_error(where, f"{quoted(raw)} is not one of {', '.join(option.choices)}")
    return raw


def _channel(raw: Any, where: str) -> int:
    if not is_number(str(raw)) or len(str(raw)) > 7 or int(raw) > MAX_IMEX_CHANNEL:
        raise option_error(where, f"{shown(raw)} is not a channel number from 0 to {MAX_IMEX_CHANNEL}")
    return int(raw)


def parse_duration(raw: Any, where: str, least: float = 1.0) -> float:
    """Return the seconds of a duration such as "60s" or "1m30s".

    A bare number is refused: NVIDIA's program takes it for nanoseconds, which is never the intention.
    """
    parts = _DURATION.findall(raw) if isinstance(raw, str) else []
    if not parts or "".join(number + unit for number, unit in parts) != raw:
        bare = isinstance(raw, (str, int)) and is_number(str(raw))
        hint = f'Write a unit: "{raw}s" for seconds.' if bare else 'Durations are written "60s", "1m30s".'
        raise option_error(where, f"{shown(raw)} is not a duration", hint)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not least <= seconds <= MAX_SECONDS:
        limit = "a second" if least == 1 else "a millisecond"
        raise option_error(where, f"{quoted(raw)} is not a duration of {limit} or more")
    return seconds


def shown(value: Any) -> str:
    """Return a value for a message; a list or mapping by its kind."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "a mapping"
    return quoted(str(value), 60)
