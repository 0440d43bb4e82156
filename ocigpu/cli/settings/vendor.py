"""The settings file of NVIDIA's container toolkit (config.toml), and what of it is a setting here.

Keys, types and meanings are those of the toolkit's documentation and of what ``nvidia-ctk config default`` prints; that
program ignores keys that it does not know, and refuses values of another type.
"""

import os
import shutil
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Comment, Table, Whitespace

from ocigpu.core.errors import OsErrorAs, SettingsError, find_near, printable, quoted
from ocigpu.core.settings import CAPABILITIES, KEYS, Key, find_problems
from ocigpu.core.toml import render_settings, toml_value
from ocigpu.engines.places import why_no_program
from ocigpu.system.settings_file import MAX_BYTES, parse_toml

DEFAULT_PATH = "/etc/nvidia-container-runtime/config.toml"
MAX_COMMENT = 8
"""Lines of a comment above a key that go with it."""


class NoValueError(Exception):
    """Says why a value has no meaning here."""


class VendorKey(NamedTuple):
    """One key: its type there ("bool", "string" or "list"), our key, or the reason why there is none.

    ``default``, ``sample``: its value in a file of defaults, as a setting or as a comment; None: it is not there.
    ``convert``: name of what returns our value for one of theirs (:data:`CONVERTERS`); ``remark``: what differs here.
    ``values``: ours by theirs, where only some are values; ``refused``: why others are none, "" for any.
    """

    name: str
    kind: str
    default: Any = None
    sample: Any = None
    ours: str = ""
    reason: str = ""
    convert: str = ""
    remark: str = ""
    values: dict[str, str] = {}
    refused: dict[str, str] = {}


def _path(value: str) -> str:
    if value and not value.startswith("/"):
        raise NoValueError("not an absolute path")
    return value


def _log(value: str) -> str:
    return "" if value == "/dev/null" else _path(value)


def _ldconfig(value: str) -> str:
    if value and not value.startswith("@"):
        raise NoValueError("a program of the container: nothing of an image is executed; the host's ldconfig is used")
    return _path(value.removeprefix("@"))


def _capabilities(value: str) -> str:
    names = [name for name in (part.strip() for part in value.split(",")) if name]
    if "all" in names:
        return "all"
    unknown = [name for name in names if name not in CAPABILITIES]
    if unknown:
        raise NoValueError(
            f"{quoted(', '.join(unknown))} is not a driver capability; all are permitted until you set it"
        )
    return ",".join(names)


def _names(value: list[str]) -> list[str]:
    if not all(value):
        raise NoValueError("has an empty entry")
    return value


def _paths(value: list[str]) -> list[str]:
    return [_path(item) for item in _names(value)]


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "path": _path,
    "log": _log,
    "ldconfig": _ldconfig,
    "capabilities": _capabilities,
    "lower": str.lower,
    "names": _names,
    "paths": _paths,
}
_COMPAT = "nvidia-container-runtime.modes.legacy.cuda-compat-mode"
_MODE = "nvidia-container-runtime.mode"
_NO_COMPAT_HOOK = "features.disable-cuda-compat-lib-hook"
HOST_PATHS = {
    "driver.root": "containers that request GPUs would not start",
    "driver.dev-root": "containers that request GPUs would not start",
    "hook.path": "containers that need the hook would not start",
}
"""Settings that name something of the host, and what follows if it is not there."""
EVERYTHING_NOTE = (
    "NVIDIA's default mode provides every driver file, whatever NVIDIA_DRIVER_CAPABILITIES says; here a container gets"
    " what it says, and compute,utility where it is not set: images that draw or encode video need"
    " NVIDIA_DRIVER_CAPABILITIES=all"
)
VENDOR_KEYS = {
    name: VendorKey(name, **entry)
    for name, entry in tomllib.loads(Path(__file__).with_name("vendor.toml").read_text("utf-8")).items()
}


class Imported(NamedTuple):
    """A key that became one of ours; ``comment``: lines that stood above it."""

    vendor: str
    ours: str
    value: Any
    remark: str
    comment: tuple[str, ...]


class LeftOut(NamedTuple):
    """A key that did not, with its value and the reason."""

    vendor: str
    value: Any
    reason: str


class Import(NamedTuple):
    """What became of a file; ``notes``: what containers will notice, a sentence each."""

    imported: tuple[Imported, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...] = ()


def import_file(path: str) -> Import:
    """Return what of the toolkit's file is a setting here; raises as :func:`import_settings` does."""
    with OsErrorAs(SettingsError, "OCIGPU-SET-1", f"read {path}", ""), open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    return import_settings(data, path)


def import_settings(data: bytes, path: str) -> Import:
    """Return what of a file of NVIDIA's toolkit is a setting here, and what is not, every key that it sets.

    ``path``: for messages.  Raises SettingsError: OCIGPU-SET-1 for what is not TOML or larger than a settings file may
    be, OCIGPU-SET-2 for values of a wrong type, all of them in one message.
    """
    if len(data) > MAX_BYTES:
        raise SettingsError("OCIGPU-SET-1", f"{path}: larger than {MAX_BYTES >> 10} KiB", "")
    try:
        document = parse_toml(data)
        comments = read_comments(tomlkit.parse(data.decode()))
    except (ValueError, RecursionError, TOMLKitError) as error:  # TOMLDecodeError and UnicodeDecodeError are the first
        raise SettingsError("OCIGPU-SET-1", f"{path}: {error}", "") from error
    imported: list[Imported] = []
    left_out: list[LeftOut] = []
    wrong: list[str] = []
    pairs = _flatten(document)
    if dict(pairs).get(_NO_COMPAT_HOOK) is True:
        pairs = [(name, "disabled" if (name, value) == (_COMPAT, "hook") else value) for name, value in pairs]
    for name, value in pairs:
        key = VENDOR_KEYS.get(name)
        if key is None:
            left_out.append(LeftOut(name, _sayable(value), _unknown(name)))
        elif problem := _check_kind(key.kind, value):
            wrong.append(f"{name}: {problem}")
        else:
            _import_key(key, value, comments.get(name, ()), imported, left_out)
    if wrong:
        raise SettingsError(
            "OCIGPU-SET-2",
            f"{path}: {'; '.join(wrong)}",
            "NVIDIA's toolkit refuses this file too; nothing was written.",
        )
    by_default = dict(pairs).get(_MODE, "auto") in ("auto", "jit-cdi")
    return Import(tuple(imported), tuple(left_out), (EVERYTHING_NOTE,) if by_default else ())


def leave_out_ldconfig(result: Import) -> Import:
    """Return an import without an ldconfig that this host cannot run: without the key the host's own is found."""
    kept, left_out = [], list(result.left_out)
    for item in result.imported:
        if item.ours == "ldconfig" and item.value and (why := _why_no_ldconfig(item.value)):
            reason = f"on this host {printable(item.value)} {why}: its own ldconfig is found without this key"
            left_out.append(LeftOut(item.vendor, item.value, reason))
        else:
            kept.append(item)
    return result._replace(imported=tuple(kept), left_out=tuple(left_out))


def _why_no_ldconfig(path: str) -> str:
    """Return what keeps a file from being run for containers: Ubuntu's /sbin/ldconfig is a script, for one."""
    if why := why_no_program("/", path):
        return why
    with open(path, "rb") as file:
        return "is a script" if file.read(2) == b"#!" else ""


def find_absent(result: Import) -> tuple[str, ...]:
    """Return what of the imported settings will not hold on this host: files and programs that are not there."""
    found = []
    for item in result.imported:
        if item.ours in HOST_PATHS and item.value and not os.path.exists(item.value):
            found.append(f"{item.ours}: this host has no {printable(item.value)}; {HOST_PATHS[item.ours]}")
        if item.ours == "runtime.runtimes" and not any(map(shutil.which, item.value)):
            names = printable(", ".join(item.value))
            found.append(f"{item.ours}: this host has none of {names}; no container would start with this runtime")
    return tuple(found)


def _import_key(
    key: VendorKey, value: Any, comment: Sequence[str], imported: list[Imported], left_out: list[LeftOut]
) -> None:
    reason = key.reason
    if key.ours:
        try:
            ours = CONVERTERS[key.convert](value)
            if key.values and ours not in key.values:
                raise NoValueError(key.refused.get(ours) or key.refused[""])
            ours = key.values.get(ours, ours) if key.values else ours
            _check_ours(key.ours, ours)
        except NoValueError as error:
            reason = str(error)
        else:
            imported.append(Imported(key.name, key.ours, ours, key.remark if ours != value else "", tuple(comment)))
            return
    left_out.append(LeftOut(key.name, value, reason))


def _check_ours(name: str, value: Any) -> None:
    """Raise NoValueError for a value that our own settings refuse."""
    table, _, inner = name.rpartition(".")
    problems = find_problems({table: {inner: value}} if table else {inner: value})
    if problems:
        raise NoValueError(problems[0].removeprefix(f"{name}: "))


def _flatten(document: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return (dotted name, value) of every key; a table where a key should be is a value, and so is an unknown one."""
    pairs: list[tuple[str, Any]] = []
    for name, value in document.items():
        path = prefix + (f'"{name}"' if "." in name else name)
        if isinstance(value, dict) and path not in VENDOR_KEYS:
            pairs += _flatten(value, f"{path}.") if value else []
        else:
            pairs.append((path, value))
    return pairs


def _check_kind(kind: str, value: Any) -> str:
    if kind == "bool":
        good = isinstance(value, bool)
    elif kind == "string":
        good = isinstance(value, str)
    else:
        good = isinstance(value, list) and all(isinstance(item, str) for item in value)
    wanted = {"bool": "true or false", "string": "a text", "list": "a list of texts"}[kind]
    return "" if good else f"expected {wanted}, found {quoted(repr(_sayable(value)))}"


def _sayable(value: Any) -> Any:
    """Return a value, or words for one that cannot be written out."""
    try:
        repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, which TOML may write in hexadecimal; depth
        return f"a {type(value).__name__}"
    return value


def _unknown(name: str) -> str:
    if name in {key.name for key in KEYS}:
        return "a key of ocigpu's own settings, not of NVIDIA's: is this the right file?"
    near = find_near(name, VENDOR_KEYS, likeness=0.8)
    return "no key of NVIDIA's toolkit, which ignores it" + (f": {near[0]} was meant?" if near else "")


def read_comments(document: Any, prefix: str = "") -> dict[str, tuple[str, ...]]:
    """Return the comments of a tomlkit document that belong to keys: above them, and behind them on the line.

    A key that is commented out (``#root = "/x"``) is no comment on the next one.
    """
    comments: dict[str, tuple[str, ...]] = {}
    above: list[str] = []
    for key, item in (document.value if isinstance(document, Table) else document).body:
        if isinstance(item, Comment):
            above.append(_clean(item.as_string()))
            continue
        if isinstance(item, Whitespace) or key is None:
            above = []
            continue
        name = prefix + key.key
        if isinstance(item, Table):
            comments |= read_comments(item, f"{name}.")
        else:
            lines = [line for line in above if not _is_setting(line)][-MAX_COMMENT:]
            behind = _clean(item.trivia.comment)
            comments[name] = (*lines, *((behind,) if behind else ()))
        above = []
    return comments


def _clean(comment: str) -> str:
    """Return a comment that is shown on terminals: TOML permits some control characters in it."""
    return printable(comment.strip().expandtabs(4))


def _is_setting(comment: str) -> bool:
    text = comment.lstrip("# ")
    name, equals, _ = text.partition("=")
    return text.startswith("[") or bool(equals and " " not in name.strip())


def render_vendor_default() -> str:
    """Return the file that "nvidia-ctk config default" prints: its keys in order, samples as comments."""
    lines: list[str] = []
    table: list[str] = []
    for key in sorted(VENDOR_KEYS.values(), key=lambda key: _place_of(key.name)):
        value = key.sample if key.default is None else key.default
        if value is None:
            continue
        parents, name = _place_of(key.name)
        for depth in range(1, len(parents) + 1):
            if parents[:depth] != table[:depth]:
                lines += ["", f"[{'.'.join(parents[:depth])}]"]
        table = parents
        lines.append(f"{'#' if key.default is None else ''}{name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def _place_of(name: str) -> tuple[list[str], str]:
    *tables, key = name.split(".")
    return tables, key


def render_import(result: Import, path: str) -> str:
    """Return our settings file: what was imported, with its comments, and a list of what was left out."""
    lines = [f"# Settings of ocigpu, imported from {quoted(path)[1:-1]} of NVIDIA's container toolkit."]
    for note in result.notes:
        lines += ["#", *(f"# {line}" for line in textwrap.wrap(f"Note: {note}.", 110))]
    lines.append("")
    by_name = {item.ours: item for item in result.imported}

    def lines_of(key: Key, name: str) -> list[str]:
        if (item := by_name.get(key.name)) is None:
            return []
        origin = [f"# {item.vendor}" + (f": {item.remark}" if item.remark else "")] if item.vendor != item.ours else []
        return [*item.comment, *origin, f"{name} = {toml_value(item.value)}"]

    lines += render_settings(lines_of)
    if result.left_out:
        lines += ["", "# Left out:"]
        lines += [f"#   {quoted(item.vendor)[1:-1]}: {item.reason}" for item in result.left_out]
    return "\n".join(lines) + "\n"
