"""``ocigpu``, the operator's command line: what would be done for a container, and why.

Exit status: 0 done, 1 the command failed, 2 the command line could not be understood, 130 interrupted.

A command line is understood, and help shown, without importing more than the one command.
"""

import gc
import io
import os
import sys

from ocigpu import __version__, leave
from ocigpu.cli.front import manual
from ocigpu.cli.front.arguments import HELP, HelpWanted, call, options_of, parameters_of, parse
from ocigpu.cli.front.manual import ROOT as PROGRAM
from ocigpu.core.errors import OcigpuError, UsageError, as_own_error, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from ocigpu.cli.front.arguments import Parameter

with open(os.path.join(os.path.dirname(__file__), "commands.txt"), encoding="utf-8") as _file:
    COMMANDS = dict(line.split(": ") for line in _file.read().splitlines() if line[0] != "#")
"""Every command, with the module below ocigpu.cli and the function that it is: "cdi.generate.diff_command"."""
LENIENT = ("device-plugin", "dra-driver", "exporter", "node-labels", "mps-control-daemon", "nvidia-ctk")
"""Commands that read the vendor's options themselves: they are written in more ways than typer knows."""


def load_command(name: str) -> "Callable[..., Any]":
    """Return the function of a command; imports its module."""
    module, _, function = COMMANDS[name].rpartition(".")
    # __import__: importlib is more than the smallest commands
    loaded: Callable[..., Any] = getattr(__import__(f"ocigpu.cli.{module}", fromlist=[function]), function)
    return loaded


def find_command(words: "Sequence[str]") -> "tuple[str, Sequence[str]]":
    """Return the name of the command or group that the first words are, "" for none, and the words after it."""
    name = ""
    for number, word in enumerate(words):
        longer = f"{name} {word}".lstrip()
        if longer not in COMMANDS and not any(command.startswith(f"{longer} ") for command in COMMANDS):
            return name, words[number:]
        name = longer
    return name, ()


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Run the command line (default: of this process) and return its exit status; errors go to standard error."""
    debug = os.environ.get("OCIGPU_DEBUG") == "1"
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "_OCIGPU_COMPLETE" in os.environ:
        from ocigpu.cli.front.complete import print_candidates

        return print_candidates(words, COMMANDS, find_command)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: else what is opened next gets its number
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - as long as we run
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that this terminal cannot show ends no command
    try:
        status = _run(words)
        sys.stdout.flush()
    except OcigpuError as error:
        if debug:
            raise
        return _report(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader (head, a closed pager) has seen enough
        return 1
    except Exception as error:  # the last line of defence: a user sees a sentence, not a traceback
        usage = _usage_error(error, find_command(words)[0])
        if usage is not None:
            return _report(usage)
        if debug:
            raise
        return _report(as_own_error(error))
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # Python would try once more at exit, say so in its own words, and end with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status if isinstance(status, int) else 0


def _run(words: list[str]) -> "Any":
    if not words:
        print(manual.read_first_screen())
        return 2
    if words[0] == "--version" or words == ["version"]:
        print(f"{PROGRAM} {__version__}")
        return 0
    name, rest = find_command(words)
    if name not in COMMANDS and not rest:
        print(manual.render_help(name, COMMANDS))
        return 2
    wrong = UsageError(f"no such command: {quoted(rest[0])}" if rest else "")
    try:
        if name not in COMMANDS and rest and rest[0] in HELP:
            raise HelpWanted
        if name in COMMANDS:
            page, lenient = manual.read_page(name), name in LENIENT
            if any(word in HELP for word in rest):
                _try_to_parse(rest, options_of(page), lenient)  # the page says enough
            function = load_command(name)
            values = _try_to_parse(rest, parameters_of(function, page), lenient)
            if not isinstance(values, UsageError):
                gc.freeze()  # what is loaded stays
                gc.enable()  # the program's entry has it off while modules are imported
                return call(function, values)
            wrong = values
    except HelpWanted:
        print(manual.render_help(name, COMMANDS))
        return 0
    try:
        from ocigpu.cli.front.described import make_app, run
    except ModuleNotFoundError as error:  # pip --no-deps: typer would say it better
        raise UsageError(wrong.message, f"see: {PROGRAM} {name} --help".replace("  ", " ")) from error

    gc.enable()
    return run(make_app({other: load_command(other) if other == name else None for other in COMMANDS}, LENIENT), words)


def _try_to_parse(
    words: "Sequence[str]", parameters: "list[Parameter]", lenient: bool
) -> "dict[str, Any] | UsageError":
    """Return a command's values, or what is wrong with its command line; raises HelpWanted."""
    try:
        return parse(words, parameters, lenient)
    except UsageError as error:
        return error


def _usage_error(error: Exception, command: str) -> UsageError | None:
    """Return the command line parser's error as one of ours, or None if it is something else.

    typer's own parser and click's (which older versions of typer use) have no public base class in common.
    """
    format_message = getattr(error, "format_message", None)
    if format_message is None or getattr(error, "exit_code", None) != 2:
        return None
    message = " ".join(str(format_message()).split()).rstrip(".")
    return UsageError(message[:1].lower() + message[1:], f"see: {PROGRAM} {command} --help".replace("  ", " "))


def _report(error: OcigpuError) -> int:
    from ocigpu.cli.front import show

    text = error.render(PROGRAM)
    if show.has_colours(sys.stderr.isatty()):
        text = text.replace(error.code, f"\x1b[31m{error.code}\x1b[0m", 1).replace(
            "\nhint:", "\n\x1b[1mhint:\x1b[0m", 1
        )
    print(text, file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    leave(main())
