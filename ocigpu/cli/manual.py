"""The words of the commands: a Markdown file for each, ``help/NAME.md``, with its help, arguments and options.

``--help`` shows them, and the man pages and docs/COMMANDS.md are made of them.  The code has types and defaults.
Options that several commands have are in the page of the command above them.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable
from copy import copy
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer
from typer.models import ArgumentInfo, OptionInfo

from ocigpu.sim.fault_names import FAULT_NAMES

ROOT = "ocigpu"
FAULTS = "\n".join(f"    {name:<20} {fault.text}" for name, fault in FAULT_NAMES.items())
DIRECTORY = os.path.join(os.path.dirname(__file__), "help")


class Word(NamedTuple):
    """An argument (without ``flags``) or option, and what stands for its value in the help."""

    flags: tuple[str, ...]
    metavar: str | None
    help: str


class Manual(NamedTuple):
    """A file's words.

    ``short``: for lists, None for the beginning of the help.  ``options``: by the first name, with those that the
    commands above say for all of theirs.  ``sections``: the others, as Markdown.
    """

    short: str | None
    help: str
    sections: dict[str, str]
    arguments: tuple[Word, ...]
    options: dict[str, Word]

    @property
    def epilog(self) -> str:
        """What --help shows below the options."""
        return "\n\n".join(_for_terminals(title, body) for title, body in self.sections.items())


@functools.cache
def read_page(command: str) -> Manual:
    """Return the words of a command, "cdi diff" say."""
    with open(os.path.join(DIRECTORY, f"{command.replace(' ', '-')}.md"), encoding="utf-8") as file:
        text = file.read().replace("{faults}", FAULTS)
    head, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    title, _, about = head.partition("\n")
    found = {name: body.strip("\n") for name, _, body in (section.partition("\n") for section in sections)}
    arguments = tuple(_entries(found.pop("Arguments", "")))
    options = dict(read_page(command.rpartition(" ")[0] or ROOT).options) if command != ROOT else {}
    for word in _entries(found.pop("Options of its commands", "") + "\n" + found.pop("Options", "")):
        options[word.flags[0].replace(".", "-")] = word
    return Manual(title.partition(": ")[2] or None, about.strip(), found, arguments, options)


def _entries(body: str) -> Iterable[Word]:
    for item in re.findall(r"^- (.+(?:\n  .+)*)", body, re.MULTILINE):
        names, _, text = item.replace("\n ", "").partition("`: ")
        words = names.replace("`", "").replace(", ", " ").split(" ")
        flags = tuple(word for word in words if word.startswith("-"))
        yield Word(flags, " ".join(words[len(flags) :]) or None, text)


def _for_terminals(title: str, body: str) -> str:
    """Return a section as --help shows it, line by line: a backspace keeps the lines of a paragraph."""
    text = re.sub(r"\n\n(?=    )", "\n", body if title == "Notes" else f"{title}:\n{body}")
    text = re.sub(r"^    ", "  ", text, flags=re.MULTILINE)
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in text.split("\n\n"))


def make_app(commands: dict[str, Callable[..., Any]], settings: dict[str, dict[str, Any]]) -> typer.Typer:
    """Return typer's tree of the commands, by their names ("cdi diff"), with their pages' words.

    ``settings``: context settings of some.
    """
    page = read_page(ROOT)
    root = typer.Typer(
        name=ROOT,
        help=page.help,
        epilog=page.epilog,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    groups = {"": root}
    for name, function in commands.items():
        page = read_page(name)
        parent, _, last = name.rpartition(" ")
        add = _find_group(groups, parent).command(
            last, help=page.help, short_help=page.short, epilog=page.epilog, context_settings=settings.get(name)
        )
        add(with_words(function, page))
    return root


def _find_group(groups: dict[str, typer.Typer], name: str) -> typer.Typer:
    """Return the command that has commands; made, and its parents, when it is not there."""
    if name not in groups:
        page = read_page(name)
        groups[name] = typer.Typer(help=page.help, epilog=page.epilog, rich_markup_mode=None)
        parent, _, last = name.rpartition(" ")
        _find_group(groups, parent).add_typer(groups[name], name=last, short_help=page.short)
    return groups[name]


def with_words(function: Callable[..., Any], page: Manual) -> Callable[..., Any]:
    """Give the parameters of a function that have no help the page's: arguments in their order, options by name."""
    arguments = iter(page.arguments)
    signature = inspect.signature(function, eval_str=True)
    parameters = []
    for parameter in signature.parameters.values():
        kind, info = get_args(parameter.annotation)[:2] if _is_annotated(parameter) else (parameter.annotation, None)
        if kind is not typer.Context and not (info and (info.help or info.hidden)):
            entry = None if isinstance(info, OptionInfo) else next(arguments, None)
            entry = entry or page.options[f"--{parameter.name.rstrip('_').replace('_', '-')}"]
            parameter = parameter.replace(annotation=Annotated[kind, _describe(entry, kind, info)])  # noqa: PLW2901
        parameters.append(parameter)
    # typer reads both.
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def _is_annotated(parameter: inspect.Parameter) -> bool:
    return get_origin(parameter.annotation) is Annotated


def _describe(entry: Word, kind: Any, info: ArgumentInfo | OptionInfo | None) -> ArgumentInfo | OptionInfo:
    """Return what typer is to know of a parameter; ``info``: what the code says of it, a range."""
    made: ArgumentInfo | OptionInfo = copy(info) or (typer.Option() if entry.flags else typer.Argument())
    made.param_decls, made.metavar, made.help = entry.flags, entry.metavar, entry.help
    variable = re.fullmatch(r"(.*\S) \[env var: (\w+)\]", entry.help)
    if variable and kind in (str, bool):  # a list of typer's would be split at white space
        made.help, made.envvar = variable.groups()
    return made
