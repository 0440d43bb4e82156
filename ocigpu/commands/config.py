"""``ocigpu config``: check, show and list the settings."""

import os
import tomllib
from typing import Annotated, Any

import typer

from ocigpu.commands.common import ConfigOption, JsonOption, load_settings, print_json, print_table, settings_path
from ocigpu.errors import OcigpuError, SettingsError, printable
from ocigpu.passing import forget
from ocigpu.settings import DEFAULT_PATH, KEYS, Settings, read_settings

CONFIG_EPILOG = """\
\b
Examples:
  ocigpu config check /etc/ocigpu/config.toml
  ocigpu config show
  ocigpu config keys
"""

config_app = typer.Typer(help="Check and show settings.", epilog=CONFIG_EPILOG, rich_markup_mode=None)


@config_app.command("check")
def check_command(
    file: Annotated[
        str, typer.Argument(metavar="[FILE]", help="Settings file.  [default: $OCIGPU_CONFIG, else the system's]")
    ] = "",
) -> None:
    """Check a settings file and name every problem in it; the shim reads its settings anew."""
    forget()
    path = settings_path(file)
    if not path and not os.path.lexists(DEFAULT_PATH):
        print(f"{DEFAULT_PATH}: not there; the defaults are in force")
        return
    path = path or DEFAULT_PATH
    try:
        settings = read_settings(path)
    except SettingsError as error:
        if error.code != "OCIGPU-SET-2":
            raise
        problems = _find_problems(path)
        for problem in problems[:-1]:
            typer.echo(f"{path}: {printable(problem)}", err=True)
        if not problems:
            raise OcigpuError("OCIGPU-INT-1", f"{path}: the two readers of settings differ: {error.message}") from error
        raise SettingsError("OCIGPU-SET-2", f"{path}: {problems[-1]}", "all keys: ocigpu config keys") from error
    problems = _find_problems(path)
    if problems:
        raise OcigpuError("OCIGPU-INT-1", f"{path}: the two readers of settings differ: {problems[0]}")
    changed = sum(1 for row in setting_rows(settings) if row[2] != "default")
    print(f"{path}: ok ({changed} of {len(KEYS)} keys differ from the defaults)")


def _find_problems(path: str) -> list[str]:
    from ocigpu.models import find_problems

    try:
        with open(path, "rb") as file:
            return find_problems(tomllib.load(file))
    except (OSError, ValueError) as error:
        raise SettingsError("OCIGPU-SET-1", f"settings {path}: {error}") from error


@config_app.command("show")
def show_command(config: ConfigOption = "", json: JsonOption = False) -> None:
    """Show the settings in force: each value, and whether it is the default."""
    settings = load_settings(config)
    if json:
        values = {key.name: getattr(settings, key.field) for key in KEYS}
        print_json({"file": settings.path, "settings": values})
        return
    print(f"file  {settings.path or f'none ({DEFAULT_PATH} is not there)'}")
    print()
    print_table(("key", "value", "from"), setting_rows(settings))


def setting_rows(settings: Settings) -> list[tuple[str, str, str]]:
    """Return (key, value as TOML, "default" or "file") for every key."""
    defaults = Settings()
    rows = []
    for key in KEYS:
        value = getattr(settings, key.field)
        origin = "default" if value == getattr(defaults, key.field) else "file"
        rows.append((key.name, toml_value(value), origin))
    return rows


@config_app.command("keys")
def keys_command(json: JsonOption = False) -> None:
    """List all keys: type, default and meaning."""
    defaults = Settings()
    if json:
        print_json(
            [
                {
                    "key": key.name,
                    "type": key.kind,
                    "choices": list(key.choices),
                    "default": getattr(defaults, key.field),
                    "meaning": key.meaning,
                }
                for key in KEYS
            ]
        )
        return
    rows = []
    for key in KEYS:
        meaning = key.meaning + (f" ({', '.join(key.choices)})" if key.choices else "")
        rows.append((key.name, key.kind, toml_value(getattr(defaults, key.field)), meaning))
    print_table(("key", "type", "default", "meaning"), rows)


def toml_value(value: Any) -> str:
    """Return a setting's value as it is written in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    text = "".join({"\\": "\\\\", '"': '\\"'}.get(c, c) if c.isprintable() else f"\\U{ord(c):08x}" for c in str(value))
    return f'"{text}"'
