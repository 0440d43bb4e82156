"""The device plugin's command line and configuration file, read; what they mean is :mod:`~ocigpu.kubernetes.config`."""

import os
import stat
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ocigpu.cdi.hook_words import HOOK_NAMES
from ocigpu.core.errors import UsageError, quoted
from ocigpu.gpus.offer import FEATURE_FLAGS
from ocigpu.kubernetes.config import OPTIONS, Configuration, PluginOption, configure
from ocigpu.kubernetes.schema import MAX_BYTES, ConfigFile, config_error, parse_config_file

CONFIG_FLAG, CONFIG_VARIABLE = "config-file", "CONFIG_FILE"
LABELS_ONLY = ("use_node_feature_api", "oneshot", "no_timestamp", "sleep_interval", "output_file", "machine_type_file")
"""Options of node labels: keys of the file, but no flags of the plugin."""
PLUGIN_OPTIONS = tuple(option for option in OPTIONS if option.name not in LABELS_ONLY)


class Told(NamedTuple):
    """``flags``: text by option name; ``file``: path of the configuration file, "" for none."""

    flags: "dict[str, str]"
    file: str


def parse_flags(
    words: Sequence[str],
    environment: Mapping[str, str],
    options: Sequence[PluginOption] = PLUGIN_OPTIONS,
    command: str = "device-plugin",
    file_variables: Sequence[str] = (CONFIG_VARIABLE,),
) -> Told:
    """Return what a command line says, as "--name=value" or "--name value"; a bare "--name" of a bool is true.

    A flag of a list that is given again adds to it; of others the last one counts.

    Raises UsageError for words that it does not know.
    """
    known = {flag: option for option in options for flag in option.flags}
    flags: dict[str, str] = {}
    file = next((environment[name] for name in file_variables if environment.get(name)), "")
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.removeprefix("-").removeprefix("-").partition("=")
        option = known.get(name)
        if not word.startswith("-") or (option is None and name != CONFIG_FLAG):
            raise UsageError(f"no such option: {quoted(word)}", f"see: ocigpu {command} --help")
        if not equals:
            if option is not None and option.kind == "bool":
                value = "true"
            elif left:
                value = left.pop(0)
            else:
                raise UsageError(f"--{name} needs a value", f"see: ocigpu {command} --help")
        if option is None:
            file = value
        elif option.kind in ("list", "numbers") and option.name in flags:
            flags[option.name] += f",{value}"
        else:
            flags[option.name] = value
    return Told(flags, file)


def read_configuration(told: Told, environment: Mapping[str, str]) -> Configuration:
    """Return the configuration in force; raises SettingsError (OCIGPU-KUBE-1).

    Unlike NVIDIA's plugin, one that was not told whether to end without a driver waits for it: a program that ends is
    started again and again.
    """
    file, warnings = (parse_config_file(_read(told.file), told.file)) if told.file else (ConfigFile(), ())
    flags = dict(told.flags)
    variables = next(option.variables for option in OPTIONS if option.name == "fail_on_init_error")
    if file.flags.fail_on_init_error is None and not any(environment.get(name) for name in variables):
        flags.setdefault("fail_on_init_error", "false")
    found = configured(flags, environment, file, told.file)
    return found._replace(warnings=(*warnings, *found.warnings))


def configured(
    flags: Mapping[str, str], environment: Mapping[str, str], file: ConfigFile | None = None, where: str = ""
) -> Configuration:
    """Return the configuration as :func:`~ocigpu.kubernetes.config.configure` does, with no words for CDI unknown."""
    found = configure(flags, environment, file, where)
    for option, values, known in (
        ("--cdi-disable-hooks", found.options.cdi_disable_hooks, (*HOOK_NAMES, "all")),
        ("--cdi-feature-flags", found.options.cdi_feature_flags, FEATURE_FLAGS),
    ):
        for value in values:
            if value not in known:
                raise config_error(option, f"{quoted(value)} is not one of {', '.join(known)}")
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise config_error(path, "it is not a file")
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise config_error(path, str(error.strerror)) from error
    except UnicodeDecodeError as error:
        raise config_error(path, "it is not UTF-8 text") from error
