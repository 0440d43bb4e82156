"""The words of the commands, help/NAME.md."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ocigpu.cdi.hook_words import HOOK_NAMES
from ocigpu.cli import manual
from ocigpu.cli.main import PROGRAM, app
from ocigpu.cli.manual import Word, read_page
from ocigpu.gpus.offer import FEATURE_FLAGS, MODES, NAME_STRATEGIES


def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name or PROGRAM, command
    for word, part in getattr(command, "commands", {}).items():
        yield from walk(f"{name} {word}".strip(), part)


COMMANDS = dict(walk("", get_command(app)))


def test_every_command_has_a_page_and_every_page_a_command() -> None:
    pages = {path.stem for path in Path(manual.DIRECTORY).iterdir()}
    assert pages == {name.replace(" ", "-") for name in COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_page_describes_is_there(name: str) -> None:
    page = read_page(name)
    parameters = COMMANDS[name].params
    below = [command for path, command in COMMANDS.items() if path.startswith(f"{name} ") or name == PROGRAM]
    flags = {part.opts[0] for command in (COMMANDS[name], *below) for part in command.params}
    above = read_page(name.rpartition(" ")[0] or PROGRAM).options if name != PROGRAM else {}
    assert {word.flags[0] for word in page.options.values() if word not in above.values()} <= flags
    texts = [parameter.help for parameter in parameters if parameter.param_type_name == "argument"]
    assert [entry.help for entry in page.arguments if entry.help not in texts] == []
    assert page.help
    assert Path(manual.DIRECTORY, f"{name.replace(' ', '-')}.md").read_text().startswith(f"# {PROGRAM}")


def test_a_page_becomes_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manual, "DIRECTORY", str(tmp_path))
    (tmp_path / "ocigpu.md").write_text("# ocigpu\n\n## Options of its commands\n\n- `--json`: JSON.\n")
    (tmp_path / "a.md").write_text("# ocigpu a\n")
    (tmp_path / "a-b.md").write_text(
        "# ocigpu a b: Do it.\n\nDo it\nwell.\n\n## Arguments\n\n- `X|Y`: What.  [default: all]\n\n## Options\n\n"
        "- `--long`, `-l` `N`: How\n  long.\n- `--dotted.name`: Yes.\n\n## Notes\n\nOne:\n\n    of things\nTwo.\n\n"
        "Three.\n\n## Examples\n\n    a b\n      c\n"
    )
    read_page.cache_clear()
    page = read_page("a b")
    read_page.cache_clear()
    assert (page.short, page.help) == ("Do it.", "Do it\nwell.")
    assert page.arguments == (Word((), "X|Y", "What.  [default: all]"),)
    assert page.options == {
        "--json": Word(("--json",), None, "JSON."),
        "--long": Word(("--long", "-l"), "N", "How long."),
        "--dotted-name": Word(("--dotted.name",), None, "Yes."),
    }
    assert page.epilog == "\b\nOne:\n  of things\nTwo.\n\n\b\nThree.\n\n\b\nExamples:\n  a b\n    c"


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--mode", MODES),
        ("--device-name-strategy", NAME_STRATEGIES),
        ("--disable-hook", HOOK_NAMES),
        ("--feature-flag", sorted(set(FEATURE_FLAGS) - {"disable-nvsandbox-utils"})),
    ],
)
def test_the_page_of_generate_names_all_values(flag: str, words: tuple[str, ...]) -> None:
    text = read_page("cdi generate").options[flag].help
    assert [word for word in words if word not in text] == []
