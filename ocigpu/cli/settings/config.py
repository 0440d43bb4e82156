"""``ocigpu config``: check, show, list and change the settings; a file with the defaults; those of NVIDIA's toolkit."""

import os
import re
import stat
import sys
import tomllib
from typing import Any

from ocigpu.cli.front import show
from ocigpu.cli.front.arguments import WORDS_OF_BOOLS
from ocigpu.cli.front.common import load_settings, settings_path
from ocigpu.core.errors import OcigpuError, OsErrorAs, SettingsError, UsageError, printable, quoted
from ocigpu.core.settings import DEFAULT_PATH, KEYS, Key, Settings, find_problems, parse_settings, suggest_key
from ocigpu.core.toml import render_settings, toml_value
from ocigpu.entry.pass_through import forget
from ocigpu.system.settings_file import MAX_BYTES, read_document


def check_command(file: str = "") -> None:
    forget()
    path = settings_path(file)
    if not path and not os.path.lexists(DEFAULT_PATH):
        print(f"{DEFAULT_PATH}: not there; the defaults are in force")
        return
    path = path or DEFAULT_PATH
    document = read_document(path) or {}
    problems = find_problems(document)
    for problem in problems[:-1]:
        print(f"{path}: {printable(problem)}", file=sys.stderr)
    if problems:
        raise SettingsError("OCIGPU-SET-2", f"{path}: {problems[-1]}", "all keys: ocigpu config keys")
    changed = sum(1 for row in setting_rows(parse_settings(document, path)) if row[2] != "default")
    print(f"{path}: ok ({changed} of {len(KEYS)} keys differ from the defaults)")


def show_command(config: str = "") -> "show.Answer":
    settings = load_settings(config)
    yield {"file": settings.path, "settings": {key.name: getattr(settings, key.field) for key in KEYS}}
    show.fields([("file", settings.path or f"none ({DEFAULT_PATH} does not exist)")])
    print()
    show.table(("key", "value", "from"), setting_rows(settings))


def setting_rows(settings: Settings) -> list[tuple[str, str, str]]:
    """Return (key, value as TOML, "default" or "file") for every key."""
    values = [(key, getattr(settings, key.field)) for key in KEYS]
    return [(key.name, toml_value(value), "default" if value == key.default else "file") for key, value in values]


def keys_command() -> "show.Answer":
    shown = (key._asdict() | {"key": key.name, "type": key.kind, "default": key.default} for key in KEYS)
    names = ("key", "type", "choices", "default", "meaning")
    yield {"keys": [{name: key[name] for name in names} for key in shown]}
    rows = []
    for key in KEYS:
        meaning = key.meaning + (f" ({', '.join(key.choices)})" if key.choices else "")
        rows.append((key.name, key.kind, toml_value(key.default), meaning))
    show.table(("key", "type", "default", "meaning"), rows)


def get_command(key: str, config: str = "") -> "show.Answer":
    found = _known(key)
    settings = load_settings(config)
    value = getattr(settings, found.field)
    yield {"key": key, "value": value, "default": value == found.default, "file": settings.path}
    for item in value if isinstance(value, tuple) else (value,):
        print(str(item).lower() if isinstance(item, bool) else item)


def set_command(key: str, values: list[str], config: str = "") -> "show.Answer":
    yield from _change(key, _value(_known(key), values), config)


def unset_command(key: str, config: str = "") -> "show.Answer":
    _known(key)
    yield from _change(key, None, config)


def _known(name: str) -> Key:
    for key in KEYS:
        if key.name == name:
            return key
    raise UsageError(f"unknown key {quoted(name)}", suggest_key(name))


def _value(key: Key, values: list[str]) -> Any:
    """Return the value that words of a command line name; raises UsageError."""
    if key.kind in ("list", "paths"):
        return values
    if len(values) != 1:
        raise UsageError(f"{key.name} has one value, not {len(values)}", f"ocigpu config set {key.name} VALUE")
    if key.kind != "bool":
        return values[0]
    word = WORDS_OF_BOOLS.get(values[0].lower())
    if word is None:
        raise UsageError(f"{key.name}: {quoted(values[0])} is neither true nor false", "")
    return word


def _change(key: str, value: Any, config: str) -> "show.Answer":
    """Give a key of the settings file a value, None: its default; raises SettingsError before anything is written."""
    from ocigpu.engines.places import read_file

    path = settings_path(config) or DEFAULT_PATH
    before = read_file("/", path) or ""
    text = with_key(path, before, key, value)
    parse_settings(tomllib.loads(text), path)
    changed = text != before and write_settings(path, text, force=True)
    yield {"key": key, "value": value, "file": path, "changed": changed}
    now = "its default" if value is None else toml_value(tuple(value) if isinstance(value, list) else value)
    print(printable(f"{path}: {key} is {now}{'' if changed else ' already'}"))


def with_key(path: str, text: str, name: str, value: Any) -> str:
    """Return the text of a settings file with a key set, in the place of its comment if there is one; None: without."""
    from ocigpu.engines import toml_text
    from ocigpu.engines.document import ValueChange, apply_changes, look_up
    from ocigpu.engines.places import parse_config

    keys = tuple(name.split("."))
    if look_up(parse_config(path, text), keys) is None:
        section: tuple[str, ...] = ()
        lines = text.splitlines(keepends=True)
        for number, line in enumerate(lines):
            section = toml_text.header_keys(line) or section
            if section == keys[:-1] and re.match(rf"#\s*{re.escape(keys[-1])}\s*=", line) and value is not None:
                lines[number] = line.lstrip("# \t")
                break
        text = "".join(lines)
    elif value is None:
        return toml_text.drop(text, keys)
    return text if value is None else apply_changes(path, text, [ValueChange(keys, value)])[0]


def default_command(output: str = "", force: bool = False) -> None:
    text = render_default()
    if output in ("", "-"):
        print(text, end="")
        return
    print(f"{output}: {'written' if write_settings(output, text, force) else 'unchanged'}")


def render_default() -> str:
    """Return a settings file that has every key as a comment, with its default: read as it is, it changes nothing."""

    def lines_of(key: Key, name: str) -> list[str]:
        choices = [f"# one of: {', '.join(key.choices)}"] if key.choices else []
        return ["", f"# {key.meaning}", *choices, f"#{name} = {toml_value(key.default)}"]

    head = "# Settings of ocigpu.  What is commented out is the default.  To check changes: ocigpu config check"
    return "\n".join([head, *render_settings(lines_of)]) + "\n"


def import_command(file: str = "", output: str = "", dry_run: bool = False, force: bool = False) -> "show.Answer":
    from ocigpu.cli.settings.vendor import DEFAULT_PATH as VENDOR_PATH
    from ocigpu.cli.settings.vendor import find_absent, import_file, leave_out_ldconfig, render_import

    file = file or VENDOR_PATH
    output = output or settings_path("") or DEFAULT_PATH
    result = leave_out_ldconfig(import_file(file))
    text = render_import(result, file)
    if problems := find_problems(tomllib.loads(text)):  # it would be a defect of ours
        raise OcigpuError("OCIGPU-INT-1", f"imported settings: {problems[0]}")
    written = not dry_run and output != "-" and write_settings(output, text, force)
    absent = find_absent(result)
    yield {
        "output": output,
        "written": written,
        "imported": [
            {"from": item.vendor, "key": item.ours, "value": item.value, "remark": item.remark}
            for item in result.imported
        ],
        "left_out": [
            {"from": item.vendor, "value": str(item.value), "reason": item.reason} for item in result.left_out
        ],
        "notes": result.notes,
        "absent": absent,
        "text": text,
    }
    if output == "-":
        print(text, end="")
        for item in result.left_out:
            print(f"left out: {printable(item.vendor)}: {item.reason}", file=sys.stderr)
        for text in (*result.notes, *absent):
            print(f"note: {text}", file=sys.stderr)
        return
    rows = [(item.vendor, item.ours, toml_value(item.value), item.remark) for item in result.imported]
    rows += [(item.vendor, "left out", toml_value(item.value), item.reason) for item in result.left_out]
    if rows:
        show.table(("NVIDIA's key", "our key", "value", "remark"), rows)
        print()
    if dry_run:
        print(f"would be written to {output}:")
        print()
        print(text, end="")
    else:
        done = "written" if written else "unchanged"
        print(f"{output}: {done}, {len(result.imported)} keys imported, {len(result.left_out)} left out")
    show.notes((*result.notes, *absent))


def write_settings(path: str, text: str, force: bool) -> bool:
    """Write a settings file, and return whether it was another before; raises SettingsError OCIGPU-SET-4."""
    changed = write_text(path, text, force)
    if changed:
        forget()
    return changed


def write_text(path: str, text: str, force: bool) -> bool:
    """Write a file in one step, and return whether it was another before; raises SettingsError OCIGPU-SET-4.

    A link is followed; an existing file keeps its mode, and what is no regular file is refused.
    """
    from ocigpu.cdi.write import write_file
    from ocigpu.system.files import replace_path

    path = os.path.realpath(path)
    with OsErrorAs(SettingsError, "OCIGPU-SET-4", f"write {path}"):
        if not os.path.lexists(path):
            write_file(path, text.encode())
            return True
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise SettingsError("OCIGPU-SET-4", f"write {path}: not a regular file", "")
        try:
            with open(path, encoding="utf-8") as file:
                same = file.read(MAX_BYTES + 1) == text
        except (OSError, ValueError):
            same = False
        if same:
            return False
        if not force:
            raise SettingsError("OCIGPU-SET-4", f"write {path}: it already exists", "To replace it: --force")
        replace_path(path, text.encode(), stat.S_IMODE(mode))
    return True
