"""The commands described to typer: it says what is wrong with a command line.

A command line that is right is read by :mod:`ocigpu.cli.front.arguments`, which spares a start the import of typer;
tests hold that both read the same.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

from ocigpu.cli.front import manual
from ocigpu.cli.front.arguments import COMMAND, HELP, Parameter, call, parameters_of
from ocigpu.core.signatures import REQUIRED


def make_app(commands: Mapping[str, Callable[..., Any] | None], lenient: Sequence[str] = ()) -> Any:
    """Return typer's tree of the commands by their names, "cdi diff"; None for one that is not going to be called.

    ``lenient``: commands that read some options themselves, written in more ways than typer knows.
    """
    app = typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": list(HELP)},
    )
    groups = {"": app}
    for name, function in commands.items():
        parent, _, last = name.rpartition(" ")
        page = manual.read_page(name)
        settings = {"ignore_unknown_options": True} if name in lenient else {}
        if page.arguments and page.arguments[-1].metavar == COMMAND:
            settings["allow_interspersed_args"] = False
        known = parameters_of(function, page) if function else []
        add = _find_group(groups, parent).command(last, context_settings=settings)
        add(_describe(function or (lambda: None), known))
    return get_command(app)


def _find_group(groups: dict[str, typer.Typer], name: str) -> typer.Typer:
    """Return the command that has commands; made, and its parents, when it is not there."""
    if name not in groups:
        groups[name] = typer.Typer(rich_markup_mode=None)
        parent, _, last = name.rpartition(" ")
        _find_group(groups, parent).add_typer(groups[name], name=last)
    return groups[name]


def _describe(function: Callable[..., Any], parameters: list[Parameter]) -> Callable[..., Any]:
    """Return a function that calls a command, with the signature from which typer reads its parameters."""

    def command(**values: Any) -> Any:
        return call(function, values)

    shown = [
        inspect.Parameter(
            parameter.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if parameter.default is REQUIRED else parameter.default,
            annotation=Annotated[list[str] if parameter.kind is list else parameter.kind, _info(parameter)],
        )
        for parameter in parameters
    ]
    # typer reads both.
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined] # a function takes any attribute
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return command


def _info(parameter: Parameter) -> Any:
    low, high = parameter.limits
    if not parameter.flags:
        return typer.Argument(metavar=parameter.metavar, min=low, max=high)
    return typer.Option(
        *parameter.flags, metavar=parameter.metavar, envvar=parameter.variable or None, hidden=parameter.hidden,
        min=low, max=high,
    )  # fmt: skip


def run(app: Any, words: Sequence[str]) -> Any:
    """Run a command line and return what its command does, or raise typer's error."""
    try:
        return app.main(args=list(words), prog_name=manual.ROOT, standalone_mode=False)
    except typer.Abort as error:
        raise KeyboardInterrupt from error
