"""TAB: what can follow the words of a command line, and the scripts with which shells ask for it.

A shell starts ``_OCIGPU_COMPLETE=words ocigpu WORD...`` with the words up to the cursor, the last one perhaps empty or
incomplete.  A line "value<TAB>what it is" is printed for each that fits; nothing: the shell completes files.
"""

import os

from ocigpu.cli.front.arguments import COMMAND
from ocigpu.cli.front.manual import DIRECTORY, ROOT, Manual, Word, read_page, read_short, words_below
from ocigpu.core.errors import UsageError, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ocigpu.core.settings import Settings

    Candidate = tuple[str, str]

SHELLS = ("bash", "zsh", "fish")
SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:,/@+=")
"""What is offered has no other characters: a shell puts it into a command line as it is, and names are others'."""


def completion_command(shell: str) -> None:
    print(render_script(shell), end="")


def render_script(shell: str) -> str:
    """Return the script of a shell; raises UsageError for one that there is not."""
    if shell not in SHELLS:
        raise UsageError(f"SHELL is one of {', '.join(SHELLS)}, not {quoted(shell)}")
    with open(os.path.join(DIRECTORY, "..", f"complete-{shell}.txt"), encoding="utf-8") as file:
        return file.read()


def print_candidates(
    words: "Sequence[str]",
    commands: "Iterable[str]",
    find_command: "Callable[[Sequence[str]], tuple[str, Sequence[str]]]",
) -> int:
    """Print what can be in the place of the last word; returns the exit status, which is always 0."""
    words = [word for word in words if word != "="] + [""] * (words[-1:] in ([], ["="]))  # bash parts words at it
    last = words[-1]
    if words[0] == "help" and words[1:] and not last.startswith("-"):
        words = words[1:]
    try:
        name, before = find_command(words[:-1])
        for value, about in dict(_candidates(name, before, last, commands)).items():
            if value.startswith(last) and SAFE.issuperset(value):
                print(f"{value}\t{''.join(c for c in about if c.isprintable())}")
    except Exception:  # noqa: BLE001, S110 - nobody asked for an error here
        pass
    return 0


def _candidates(name: str, before: "Sequence[str]", last: str, commands: "Iterable[str]") -> "Iterator[Candidate]":
    page = read_page(name or ROOT)
    options = {flag: word for word in page.options.values() for flag in word.flags}
    flag, equals, text = last.partition("=")
    if any(word.metavar == COMMAND for word in page.arguments) and _count_arguments(options, before):
        return  # another program's words
    if equals and (option := options.get(flag)) and option.metavar:
        yield from ((f"{flag}={value}", about) for value, about in _values(option.metavar, before, text))
    elif last.startswith("-"):
        yield from ((flag, word.help) for flag, word in options.items() if flag.startswith("--"))
        yield "--help", "Show the help."
    elif before and (option := options.get(before[-1])) and option.metavar:
        yield from _values(option.metavar, before, last)
    elif argument := _argument(page, options, before):
        yield from _values(str(argument.metavar), before, last)
    elif not before:
        for word in filter(lambda word: word.startswith(last), words_below(name, commands)):
            yield word, read_short(f"{name} {word}".strip())


def _count_arguments(options: dict[str, Word], before: "Sequence[str]") -> int:
    """Return how many of the words are neither options nor their values."""
    known = [options.get(word) for word in before]
    values = [bool(number and (option := known[number - 1]) and option.metavar) for number in range(len(before))]
    return sum(not (word.startswith("-") or value) for word, value in zip(before, values, strict=True))


def _argument(page: Manual, options: dict[str, Word], before: "Sequence[str]") -> Word | None:
    """Return the argument that comes next, None for none; the last one may be repeated."""
    if not page.arguments:
        return None
    given, last = _count_arguments(options, before), page.arguments[-1]
    return page.arguments[given] if given < len(page.arguments) else last if str(last.metavar).endswith("...") else None


def _values(metavar: str, before: "Sequence[str]", last: str) -> "Iterator[Candidate]":
    """Yield values for what the page calls ``metavar``; "A|B" is one of both, and words in small letters are values."""
    for kind in metavar.strip("[].").split("|"):
        if kind in KINDS:
            yield from KINDS[kind](before, last)
        elif kind.islower():
            yield kind, ""


def _settings(before: "Sequence[str]") -> "Settings":
    from ocigpu.cli.front.common import load_settings

    pairs = zip(before, before[1:], strict=False)  # noqa: RUF007 - itertools would be loaded for this alone
    given = [value for name, value in pairs if name == "--config"]
    return load_settings(given[-1] if given else "")


def _gpus(before: "Sequence[str]", last: str) -> "Iterator[Candidate]":
    from ocigpu.gpus.vendors import read_host_facts

    settings = _settings(before)
    facts = read_host_facts(settings, kept=True)
    for gpu in facts.gpus:
        yield str(gpu.index), gpu.model
        yield from ((f"{gpu.index}:{mig.index}", f"MIG {mig.profile}") for mig in gpu.mig_devices)
    if last:  # they are long
        yield from ((gpu.uuid, gpu.model) for gpu in facts.gpus)


def _list_of_gpus(before: "Sequence[str]", last: str) -> "Iterator[Candidate]":
    first, comma, begun = last.rpartition(",")
    yield from ((first + comma + value, about) for value, about in _gpus(before, begun))
    if not comma:
        yield "all", "all GPUs"


def _containers(_before: "Sequence[str]", last: str) -> "Iterator[Candidate]":
    from ocigpu.containers.find import default_places, find_containers

    for one in find_containers(default_places(()))[0]:
        yield one.name, f"{one.engine or one.runtime}, {one.status}"
        if last and one.id != one.name:
            yield one.id, one.name


def _findings(_before: "Sequence[str]", _last: str) -> "Iterator[Candidate]":
    from ocigpu.doctor.findings import CHECKS

    yield from ((check.name, check.title) for check in CHECKS)


def _named_in(module: str, table: str, about: str = "", wanted: bool = False) -> "Callable[..., Iterator[Candidate]]":
    """Return what yields the names of a module's table, with an attribute of each; ``wanted``: once one is begun."""

    def names(_before: "Sequence[str]", last: str) -> "Iterator[Candidate]":
        found = getattr(__import__(module, fromlist=[table]), table)
        yield from ((name, getattr(found[name], about) if about else "") for name in found if last or not wanted)

    return names


KINDS = {
    "GPU": _gpus,
    "GPUS": _list_of_gpus,
    "CONTAINER": _containers,
    "CODE": _named_in("ocigpu.core.codes", "CODES", "cause", wanted=True),
    "FINDING": _findings,
    "MODEL": _named_in("ocigpu.sim.models", "MODELS", "name"),
    "FAULT": _named_in("ocigpu.sim.fault_names", "FAULT_NAMES", "text"),
    "ENGINE": _named_in("ocigpu.engines.places", "NAMES"),
    "SHELL": _named_in(__name__, "SHELLS"),
}
"""What can stand for a word of the pages."""
