"""``nvidia-ctk``: the commands and options of NVIDIA's container toolkit, done by those here.

What has another form here is translated, everything else is passed on.  Names, variables, defaults and outcomes are
those of the toolkit's documentation and ``--help`` (1.19); docs/VENDOR.md says what differs.
"""

import contextlib
import glob
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ocigpu import version_line
from ocigpu.core import rawjson
from ocigpu.core.errors import OcigpuError, OsErrorAs, SettingsError, UsageError, printable, quoted
from ocigpu.core.tokens import FALSE_WORDS, TRUE_WORDS
from ocigpu.engines.places import DAEMON_PATH, find_program
from ocigpu.system.log import stamp
from ocigpu.system.options import find_values, read_flags, read_table

PROGRAM = "nvidia-ctk"
COMMANDS = ("hook", "runtime", "info", "cdi", "system", "config")
ENGINES = ("containerd", "crio", "docker")
RUNTIME, HOOK = "nvidia-container-runtime", "nvidia-container-runtime-hook"
DROP_IN = "99-nvidia.toml"
_TABLE = read_table(Path(__file__).with_suffix(".toml"))
_SEE = f"see: ocigpu {PROGRAM} --help"


class Said(NamedTuple):
    """What stands before the command: the file of the toolkit's settings, and whether only errors are shown."""

    settings: str = ""
    quiet: bool = False


def ctk_command(words: list[str] | None = None) -> int:
    try:
        return _run(words or [])
    except OcigpuError as error:
        if isinstance(error, SettingsError) and error.code == "OCIGPU-KUBE-1":  # of the options' reader
            error.code = "OCIGPU-ARG-1"
        print(error.render(PROGRAM), file=sys.stderr)
        return 1


def _run(words: Sequence[str]) -> int:
    first = next((number for number, word in enumerate(words) if word in COMMANDS), len(words))
    if words[:1] == ["--version"] or words[:1] == ["-v"]:
        print(version_line(PROGRAM, PROGRAM))
        return 0
    told = _read("first", words[:first])
    said = Said(told.get("settings", ""), told.get("quiet", False))
    if first == len(words):
        raise UsageError("no command given", _SEE)
    command, rest = words[first], list(words[first + 1 :])
    if command == "hook":
        from ocigpu.hook import main as run_hook

        return run_hook([PROGRAM, "hook", *rest])
    if command == "info":
        print(version_line(PROGRAM, PROGRAM))
        return 0
    if command == "cdi":
        return _cdi(rest, said)
    below, rest = (rest[0], rest[1:]) if rest and not rest[0].startswith("-") else ("", rest)
    work = _WORKS.get(f"{command} {below}".rstrip())
    if work is None:
        what = f"No help topic for {quoted(below)}" if below else f"{command}: no command given"
        print(f"{PROGRAM}: {what}", file=sys.stderr)
        return 3
    return work(rest, said) or 0


def _read(program: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the values of options of one of the programs of the table; raises UsageError or SettingsError."""
    options = [option for option in _TABLE if {program, "every"} & {*option.programs}]
    return find_values(options, read_flags(words, options, PROGRAM), os.environ)


def _log(said: Said, message: str, level: str = "info") -> None:
    """Say something on standard error; for programs it has the form of the toolkit's lines."""
    if said.quiet and level != "error":
        return
    if not sys.stderr.isatty():
        message = f'time="{stamp()}" level={level} msg={rawjson.dump(printable(message))}'
    print(printable(message), file=sys.stderr)


def _ocigpu(*words: str) -> int:
    """Run a command of ours; a command line that it cannot understand is 1, as with the toolkit."""
    from ocigpu.cli.front.main import main

    return min(main(words), 1)


# cdi


def _cdi(words: list[str], said: Said) -> int:
    left = [word for word in words if word not in ("--debug", "-d", "--quiet")]
    quiet = ["--quiet"] if (said.quiet or "--quiet" in words) and left[:1] in (["generate"], ["list"]) else []
    root = []
    if said.settings and left[:1] == ["generate"] and not any(word.startswith("--driver-root") for word in left):
        root = [f"--driver-root={value}" for value in _imported(said.settings, "driver.root")]
    return _ocigpu("cdi", *left, *root, *quiet)


def _imported(path: str, ours: str) -> list[str]:
    """Return what a file of the toolkit's settings has for one of our keys; none where there is no such file."""
    from ocigpu.cli.settings.vendor import import_file

    try:
        imported = import_file(path).imported
    except SettingsError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    return [item.value for item in imported if item.ours == ours and item.value]


# runtime configure


def _configure(words: list[str], said: Said) -> None:
    from ocigpu.engines.carry_out import carry_out, check_plan, remaining_step
    from ocigpu.engines.configure import ConfigureOptions, plan_configuration
    from ocigpu.engines.files import Root, locked
    from ocigpu.engines.wanted import Wanted

    told = _read("configure", words)
    said = said._replace(quiet=said.quiet or told.get("quiet", False))
    engine = told.get("runtime", "docker")
    if engine not in ENGINES:
        raise UsageError(f"unrecognized runtime {quoted(engine)}", f"--runtime is one of {', '.join(ENGINES)}")
    mode = told.get("config_mode", "")
    if mode in ("oci-hook", "hook"):
        _write_oci_hook(told, said)
        return
    if mode not in ("", "config-file", "config"):
        raise UsageError(f"--config-mode: {quoted(mode)} is not one of config-file, oci-hook", _SEE)
    name = told.get("nvidia_runtime_name", "nvidia")
    if name in ("", "runc"):
        raise UsageError(f"--nvidia-runtime-name: {quoted(name)} cannot be the name of this runtime", "")
    config = os.path.abspath(told["config"]) if told.get("config") else ""
    drop_in = _drop_in(engine, config, told.get("drop_in_config"), said)
    wanted = Wanted(name, _program(engine, told, said), told.get("nvidia_set_as_default", False), False)
    if told.get("cdi_enabled") and engine != "crio":  # which has no switch for it
        wanted = wanted._replace(cdi=True)
    if engine == "crio" and config == drop_in:  # no main file was named
        config = ""
    # the toolkit asks nobody either: what it means for a sandbox is a warning
    options = ConfigureOptions(engine, wanted, config=config, drop_in=drop_in, leave_sandbox=True)
    dry = told.get("dry_run", False)
    with contextlib.nullcontext() if dry else locked(), Root("/") as root:
        try:
            plan = plan_configuration(root, options)
        except OcigpuError as error:
            if error.code != "OCIGPU-ENG-5" or not wanted.cdi:
                raise
            _log(said, f"{error.message}: it stays off", "warning")  # what the toolkit writes has no effect there
            plan = plan_configuration(root, options._replace(wanted=wanted._replace(cdi=False)))
        check_plan(root, plan)
        if not dry:
            carry_out(root, plan)
    if dry:
        for edit in plan.edits:
            _log(said, f"{edit.file.path}:")
            print(edit.after or "", end="")
        return
    for note in plan.notes:
        _log(said, note, "warning")
    for edit in plan.edits:
        _log(said, f"{'Wrote updated config to' if edit.changed else 'Nothing to do in'} {edit.file.path}")
    if plan.changed and (step := remaining_step(options, plan)):
        _log(said, f"It is recommended that {engine} daemon be restarted: {step}")


def _program(engine: str, told: dict[str, Any], said: Said) -> str:
    """Return the program of the runtime entry: as it was named, for Docker the plain name by default."""
    found = find_program("/", RUNTIME)
    path: str = told.get("nvidia_runtime_path") or RUNTIME
    if engine != "docker" and path == RUNTIME:
        path = found or f"/usr/bin/{RUNTIME}"
    if engine != "docker" and not os.path.isabs(path):
        raise UsageError(f"--nvidia-runtime-path: {quoted(path)} is not an absolute path", "")
    if not (os.access(path, os.X_OK) if os.path.isabs(path) else find_program("/", path)):
        _log(said, f"{path} does not exist: the package ocigpu-nvidia-names provides NVIDIA's names", "warning")
    return path


def _drop_in(engine: str, config: str, given: str | None, said: Said) -> str:
    """Return the file that gets the entry, the main file itself for none, "" for what ``ocigpu engine`` would take.

    The toolkit's own is taken where containerd merges the tables of drop-ins, and where it already exists.
    """
    from ocigpu.engines.checker import program_version
    from ocigpu.engines.configure import ConfigureOptions, main_config, merges_plugins
    from ocigpu.engines.wanted import Wanted

    if engine == "docker":
        if given:
            raise UsageError("--drop-in-config: runtime docker does not support drop-in configs", "")
        return ""
    if given and not os.path.isabs(given):
        raise UsageError(f"--drop-in-config: {quoted(given)} is not an absolute path", "")
    if engine == "crio":  # whose main file is only read; toolkits before 1.18 have written --config itself
        return config if os.path.dirname(config).endswith(".d") else given or f"/etc/crio/crio.conf.d/{DROP_IN}"
    main = main_config(ConfigureOptions(engine, Wanted("", "", False, False), config=config))
    if given == "":
        return main
    path = given or f"{os.path.dirname(main)}/conf.d/{DROP_IN}"
    if os.path.exists(path) or (
        merges_plugins(program_version("/", engine)) and (given or main == "/etc/containerd/config.toml")
    ):
        return path
    if given:
        _log(said, f"containerd before 2.1 would replace the whole table by {path}: {main} gets the entry", "warning")
    return ""


def _write_oci_hook(told: dict[str, Any], said: Said) -> None:
    """Write the file of an OCI hook (oci-hooks(5), version 1.0.0), or print it."""
    import json

    from ocigpu.cdi.write import write_file

    hook = told.get("nvidia_runtime_hook_path") or find_program("/", HOOK) or f"/usr/bin/{HOOK}"
    variables = [f"PATH={':'.join(dict.fromkeys((*DAEMON_PATH, os.path.dirname(hook))))}"]
    entry = {"path": hook, "args": [os.path.basename(hook), "prestart"], "env": variables}
    when = {"always": True, "commands": [".*"]}
    text = json.dumps({"version": "1.0.0", "hook": entry, "when": when, "stages": ["prestart"]}, indent=2) + "\n"
    path = told.get("oci_hook_path", "")
    if not path or told.get("dry_run"):
        print(text, end="")
        return
    with OsErrorAs(OcigpuError, "OCIGPU-ENG-4", f"write {path}"):
        write_file(path, text.encode())
    _log(said, f"Wrote OCI hook to {path}")


# config


def _default_path() -> str:
    """Return the file that the toolkit's programs read where none is named."""
    from ocigpu.cli.settings.vendor import DEFAULT_PATH

    root = os.environ.get("XDG_CONFIG_HOME", "")
    own = DEFAULT_PATH.replace("/etc", root, 1) if root else DEFAULT_PATH
    return os.environ.get("NVIDIA_CTK_CONFIG_FILE_PATH") or own


def _print_default(words: list[str], _said: Said) -> None:
    from ocigpu.cli.settings.vendor import render_vendor_default

    _put(_read("default", words).get("output", ""), render_vendor_default())


def _config(words: list[str], said: Said) -> None:
    """Change the toolkit's file; where it is the one that the toolkit would read, our settings too."""
    from ocigpu.cli.settings.config import with_key
    from ocigpu.cli.settings.vendor import render_vendor_default
    from ocigpu.engines.places import read_file

    told = _read("config", words)
    said = said._replace(quiet=said.quiet or told.get("quiet", False))
    path = os.path.abspath(told.get("config_file") or _default_path())
    text = read_file("/", path) or render_vendor_default()
    values = dict(_parse_sets(told.get("set", ()), told.get("set_list_separator") or ":"))
    for name, value in values.items():
        text = with_key(path, text, name, value)
    target = path if told.get("in_place") else told.get("output", "")
    if target and os.path.abspath(target) == os.path.abspath(_default_path()):
        _set_ours(path, values, said)
    _put(target, text)


def _parse_sets(sets: Sequence[str], separator: str) -> list[tuple[str, Any]]:
    """Return (key, value) of each, None for a value that is taken out; raises UsageError."""
    from ocigpu.cli.settings.vendor import VENDOR_KEYS

    whole: list[str] = []
    for part in sets:  # commas separate, and belong to values
        if whole and part.partition("=")[0] not in VENDOR_KEYS and "=" not in part:
            whole[-1] += f",{part}"
        else:
            whole.append(part)
    found: list[tuple[str, Any]] = []
    for item in whole:
        name, equals, raw = item.partition("=")
        key = VENDOR_KEYS.get(name)
        if key is None:
            raise UsageError(f"invalid --set option {quoted(item)}: undefined field: {quoted(name)}", "")
        value: Any = raw
        if key.kind == "bool":
            words = {"": not equals, "nil": None}
            words |= dict.fromkeys(TRUE_WORDS, True) | dict.fromkeys(FALSE_WORDS, False)
            value = words.get(raw, raw)
            if isinstance(value, str) or (equals and not raw) or (value is None and not name.startswith("features.")):
                raise UsageError(f"invalid --set option {quoted(item)}: neither true nor false", "")
        elif not equals:
            raise UsageError(f"invalid --set option {quoted(item)}: expected key=value", "")
        elif key.kind == "list":
            value = raw.split(separator if separator in raw else ",")
        found.append((name, value))
    return found


def _set_ours(path: str, values: dict[str, Any], said: Said) -> None:
    """Give our settings what was set; raises SettingsError for a value that cannot be obeyed, before it writes."""
    import tomllib

    import tomlkit

    from ocigpu.cli.front.common import settings_path
    from ocigpu.cli.settings.config import with_key, write_settings
    from ocigpu.cli.settings.vendor import VENDOR_KEYS, import_settings
    from ocigpu.core.settings import DEFAULT_PATH, parse_settings
    from ocigpu.core.toml import toml_value
    from ocigpu.engines.places import read_file

    document = tomlkit.document()
    for name, value in values.items():
        if value is not None:
            document.append(tomlkit.key(name.split(".")), tomlkit.item(value))
    result = import_settings(tomlkit.dumps(document).encode(), path)
    for left in result.left_out:
        if VENDOR_KEYS[left.vendor].ours:
            raise SettingsError("OCIGPU-SET-2", f"--set {left.vendor}={left.value}: {left.reason}", "")
        _log(said, f"{left.vendor} has no meaning for ocigpu: {left.reason}", "warning")
    changes = {item.ours: item.value for item in result.imported}
    changes |= {VENDOR_KEYS[name].ours: None for name, value in values.items() if value is None}
    changes.pop("", None)
    if not changes:
        return
    ours = settings_path("") or DEFAULT_PATH
    text = read_file("/", ours) or ""
    for name, value in changes.items():
        text = with_key(ours, text, name, list(value) if isinstance(value, tuple) else value)
    parse_settings(tomllib.loads(text))
    write_settings(ours, text, force=True)
    for name, value in changes.items():
        _log(said, f"{name} = {'default' if value is None else toml_value(value)} in {ours}")


def _put(path: str, text: str) -> None:
    """Write a text to a file, or to standard output; raises UsageError or SettingsError."""
    from ocigpu.cli.cdi.files import check_output
    from ocigpu.cli.settings.config import write_settings

    if path in ("", "-", "/dev/stdout"):
        print(text, end="")
    else:
        check_output(path)
        write_settings(path, text, force=True)


# system


def _make_links(words: list[str], said: Said) -> int:
    told = _read("links", words)
    every = told.get("create_all", False)
    if not every and not glob.glob("/dev/nvidia*"):
        _log(said, "No NVIDIA devices found in /")
        return 0
    more = []
    for name in ("load_kernel_modules", "create_device_nodes"):
        if told.get(name) and every:
            more.append(_option(name))
        elif told.get(name):
            _log(said, f"{_option(name)} is only applicable when create-all is set; ignoring", "warning")
    if told.get("dev_char_path"):
        more.append(f"--dev-char-path={told['dev_char_path']}")
    return _system("create-dev-char-symlinks", told, more, "/")


def _make_nodes(words: list[str], _said: Said) -> int:
    told = _read("nodes", words)
    if not (told.get("control_devices") or told.get("load_kernel_modules")):
        return 0
    more = [_option("load_kernel_modules")] if told.get("load_kernel_modules") else []
    return _system("create-device-nodes", told, ["--control-devices", *more], told.get("dev_root", ""))


def _system(command: str, told: dict[str, Any], more: list[str], dev_root: str) -> int:
    root = told.get("driver_root", "/")
    if root != "/":
        more += [f"--driver-root={root}", *([f"--dev-root={dev_root}"] if dev_root else [])]
    elif dev_root not in ("", "/"):
        more.append(f"--dev-root={dev_root}")
    return _ocigpu("system", command, *more, *(["--dry-run"] if told.get("dry_run") else []))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_WORKS: dict[str, Callable[[list[str], Said], int | None]] = {
    "runtime configure": _configure,
    "config": _config,
    "config default": _print_default,
    "config create-default": _print_default,
    "config generate-default": _print_default,
    "system create-dev-char-symlinks": _make_links,
    "system create-device-nodes": _make_nodes,
}
