"""The device plugin's command line and configuration file, read; what they mean is :mod:`~ocigpu.kubernetes.config`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ocigpu.kubernetes.config import OPTIONS, Configuration, PluginOptions, configure
from ocigpu.kubernetes.options import Option, add_word, option_error, read_text, split_words
from ocigpu.kubernetes.schema import MAX_BYTES, parse_config_file

CONFIG_VARIABLES = {"node-labels": ("GFD_CONFIG_FILE", "CONFIG_FILE")}
"""What names the file to a program; to others CONFIG_FILE."""


class Told(NamedTuple):
    """``flags``: text by option name; ``file``: path of the configuration file, "" for none."""

    flags: "dict[str, str]"
    file: str


def parse_flags(words: Sequence[str], environment: Mapping[str, str], program: str = "device-plugin") -> Told:
    """Return what the command line of one of our programs says; raises UsageError for words that it does not know."""
    variables = CONFIG_VARIABLES.get(program, ("CONFIG_FILE",))
    config = Option("config_file", "text", ("config-file",), variables, "")
    flags: dict[str, str] = {}
    file = next((environment[name] for name in variables if environment.get(name)), "")
    options = (config, *(option for option in OPTIONS if program in option.programs))
    for option, _, value in split_words(words, options, program):
        if option is config:
            file = value
        else:
            add_word(flags, option, value)
    return Told(flags, file)


def read_configuration(told: Told, environment: Mapping[str, str]) -> Configuration:
    """Return the configuration in force; raises SettingsError (OCIGPU-KUBE-1).

    Unlike NVIDIA's plugin, one that was not told whether to end without a driver waits for it: a program that ends is
    started again and again.
    """
    text = read_text(told.file, MAX_BYTES, option_error) if told.file else ""
    file, warnings = parse_config_file(text, told.file)
    found = configure(told.flags, environment, file, told.file, PluginOptions(fail_on_init_error=False))
    return found._replace(warnings=(*warnings, *found.warnings))
