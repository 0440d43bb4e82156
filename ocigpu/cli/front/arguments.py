"""The command line of one command, from its function and its page (:mod:`ocigpu.cli.front.manual`), without typer.

A parameter of the function is an argument or option: types and defaults are the function's, names the page's.  What is
not in the page is hidden.  Only a command line that can be understood is read here; of any other
:mod:`ocigpu.cli.front.described` says what is wrong with it, or this module where typer is not installed.
"""

import os

from ocigpu.core.errors import UsageError, quoted
from ocigpu.core.record import NamedTuple
from ocigpu.core.signatures import REQUIRED, SignatureParameter, parameters_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from ocigpu.cli.front.manual import Manual

HELP = ("--help", "-h")
FORMER = {
    "--archive": "--bundle",
    "--devices": "--gpus",
    "--driver-root": "--root",
    "--engine-config": "--config",
    "--mode-only": "--mode-change-only",
    "--publish": "--to",
    "--runtime-mode": "--mode",
    "--runtime-path": "--runtime",
    "--state-dir": "--root",
}
"""What options were called when such a name had several meanings: still read, shown nowhere."""
COMMAND = "COMMAND..."
"""The metavar of an argument that is a command line of its own: from its first word on, options are not ocigpu's."""
CO_GENERATOR = 0x20
"""As in ``inspect``, which is not imported: such a command has --json (:func:`ocigpu.cli.front.show.answer`)."""
WORDS_OF_BOOLS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}


class Range(NamedTuple):
    """Annotates a number: ``Annotated[int, Range(1, 64)]``; None: no limit."""

    low: float | None = None
    high: float | None = None


class Parameter(NamedTuple):
    """An argument (without ``flags``) or option of a command.  ``kind``: str, bool, int, float, or list of str."""

    name: str
    flags: tuple[str, ...]
    kind: type
    default: "Any"
    limits: Range = Range()
    metavar: str | None = None
    variable: str = ""
    hidden: bool = False


class HelpWanted(Exception):  # noqa: N818 - nothing is wrong
    """The command line asks for help."""


def takes(*makers: "Callable[..., Any]") -> "Callable[[Callable[..., Any]], Callable[..., Any]]":
    """Give a command the options of functions or records, whose results it gets as its first parameters."""

    def mark(command: "Callable[..., Any]") -> "Callable[..., Any]":
        command.takes = makers  # type: ignore[attr-defined] # a function takes any attribute, its type knows none
        return command

    return mark


def parameters_of(function: "Callable[..., Any]", page: "Manual") -> list[Parameter]:
    """Return the parameters of a command; those of what it takes come last."""
    makers = getattr(function, "takes", ())
    declared = _declared(function)[len(makers) :]
    for maker in makers:
        declared += _declared(maker)
    options = {word.flags[0].lstrip("-").replace(".", "-").replace("-", "_"): word for word in page.options.values()}
    found = []
    for position, (name, annotation, default, notes) in enumerate(declared):
        limits = next((note for note in notes if isinstance(note, Range)), Range())
        kind = annotation if annotation in (str, bool, int, float) else list
        if position < len(page.arguments):
            found.append(Parameter(name, (), kind, default, limits, page.arguments[position].metavar))
        elif word := options.get(name.rstrip("_")):
            variable = word.help.rpartition("[env var: ")[2].partition("]")[0] if "[env var: " in word.help else ""
            # a list is split otherwise by its command
            variable = variable if kind is not list and variable.isidentifier() else ""
            found.append(Parameter(name, word.flags, kind, default, limits, word.metavar, variable))
        else:
            flags = (f"--{name.replace('_', '-')}",)
            found.append(Parameter(name, flags, kind, default, limits, hidden=True))
    taken = {flag for one in found for flag in one.flags}
    former = [tuple(FORMER[flag] for flag in one.flags[:1] if FORMER.get(flag, flag) not in taken) for one in found]
    return [one._replace(flags=one.flags + old) for one, old in zip(found, former, strict=True)]


def options_of(page: "Manual") -> list[Parameter]:
    """Return what a page alone tells of a command's options: enough to see whether help is asked for."""
    command = [Parameter(COMMAND, (), list, (), metavar=COMMAND) for word in page.arguments if word.metavar == COMMAND]
    return command + [
        Parameter(word.flags[0], word.flags, str if word.metavar else bool, None, metavar=word.metavar)
        for word in page.options.values()
    ]


def _declared(function: "Callable[..., Any]") -> list[SignatureParameter]:
    found = parameters_in(function)
    if not hasattr(function, "_fields") and function.__code__.co_flags & CO_GENERATOR:
        found.append(SignatureParameter("json", bool, False))
    return found


def call(function: "Callable[..., Any]", values: "dict[str, Any]") -> "Any":
    """Call a command with the values of its parameters; returns its exit status, None for 0."""
    makers = getattr(function, "takes", ())
    made = [maker(**{one.name: values.pop(one.name) for one in parameters_in(maker)}) for maker in makers]
    if not function.__code__.co_flags & CO_GENERATOR:
        return function(*made, **values)
    from ocigpu.cli.front.show import answer

    json = values.pop("json")
    return answer(function(*made, **values), json)


def parse(words: "Sequence[str]", parameters: list[Parameter], lenient: bool = False) -> "dict[str, Any]":
    """Return the value of each parameter.

    ``lenient``: unknown options are arguments.  It understands what typer understands, in the same way, and less:
    raises UsageError for a command line that has something wrong or unusual about it.  Raises HelpWanted.
    """
    flags = {flag: parameter for parameter in parameters for flag in parameter.flags}
    is_command = any(parameter.metavar == COMMAND for parameter in parameters)
    given: dict[str, list[Any]] = {}
    positional: list[str] = []
    rest = list(words)
    help_wanted = False
    while rest:
        word = rest.pop(0)
        if word == "--":
            positional += rest
            break
        if word in HELP:
            help_wanted = True
        elif word[:1] != "-" or word == "-":
            positional.append(word)
            if is_command:
                positional += rest
                break
        elif word[:2] != "--" and len(word) > 2:  # short ones in one word
            option = flags.get(word[:2])
            if (option is None and word[:2] not in HELP) or word[2] == "-":
                raise UsageError(f"no such option: {quoted(word)}")
            takes_value = option is not None and option.kind is not bool
            rest = [word[:2], word[2:] if takes_value else f"-{word[2:]}", *rest]
        else:
            name, equals, text = word.partition("=")
            option = flags.get(name)
            if option is None and lenient:
                positional.append(word)
                continue
            if option is None or (option.kind is bool and equals):
                raise UsageError(f"no such option: {quoted(name)}" if option is None else f"{name} takes no value")
            if not (option.kind is bool or equals or rest):
                raise UsageError(f"{name} needs a value")
            value = True if option.kind is bool else text if equals else rest.pop(0)
            given.setdefault(option.name, []).append(value)
    if help_wanted:
        raise HelpWanted
    values: dict[str, Any] = {}
    for parameter in parameters:
        if not parameter.flags:
            texts = positional if parameter.kind is list else positional[:1]
            positional = positional[len(texts) :]
        else:
            texts = given.get(parameter.name) or _from_environment(parameter)
        if not texts and parameter.default is REQUIRED:
            raise UsageError(f"missing: {parameter.flags[0] if parameter.flags else parameter.metavar}")
        values[parameter.name] = _convert(texts, parameter) if texts else parameter.default
    if positional:
        raise UsageError(f"unexpected argument: {quoted(positional[0])}")
    return values


def _from_environment(parameter: Parameter) -> "list[Any]":
    text = os.environ.get(parameter.variable, "") if parameter.variable else ""
    return [text] if text else []


def _convert(texts: "list[Any]", parameter: Parameter) -> "Any":
    """Return a parameter's value; raises UsageError for a text that says none."""
    if parameter.kind is list:
        return texts
    text = texts[-1]
    if parameter.kind is str or text is True:
        return text
    low, high = parameter.limits
    try:
        if parameter.kind is bool:
            return WORDS_OF_BOOLS[text.strip().lower()]
        number = parameter.kind(text)
        if (low is None or number >= low) and (high is None or number <= high):
            return number
    except (ValueError, KeyError):
        pass
    kinds = {bool: "yes or no", int: "a whole number", float: "a number"}
    limits = "".join(f"{word}{limit:g}" for word, limit in ((" from ", low), (" to ", high)) if limit is not None)
    where = parameter.flags[0] if parameter.flags else parameter.metavar
    raise UsageError(f"{where}: {quoted(text)} is not {kinds[parameter.kind]}{limits}")
