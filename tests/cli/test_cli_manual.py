"""The words of the commands, help/NAME.md."""

from pathlib import Path
from typing import Any

import pytest

from ocigpu.cdi.hook_words import HOOK_NAMES
from ocigpu.cli.front import manual
from ocigpu.cli.front.arguments import Parameter, parameters_of, parse
from ocigpu.cli.front.main import COMMANDS, PROGRAM, load_command
from ocigpu.cli.front.manual import Word, read_page, read_short, render_help
from ocigpu.core.signatures import REQUIRED
from ocigpu.gpus.offer import FEATURE_FLAGS, MODES, NAME_STRATEGIES

ALL = {" ".join(name.split()[:depth]) for name in COMMANDS for depth in range(4)}
HIDDEN = {
    "fabric serve": {"--tls", "--state"},  # of the side that calls
    "engine configure": {"--runtime"},
    "system create-dev-char-symlinks": {"--create-all"},
    "node-labels": {
        "--kube-api-qps", "--kube-api-burst", "--kubeconfig", "--node-name", "--namespace", "--pod-name",
    },
}  # fmt: skip
"""Options that the pages do not list; for those of node-labels see its notes."""


def parameters(name: str) -> list[Parameter]:
    return parameters_of(load_command(name), read_page(name))


def test_every_command_has_a_page_and_every_page_a_command() -> None:
    pages = {path.stem for path in Path(manual.DIRECTORY).iterdir()}
    assert pages == {name.replace(" ", "-") or PROGRAM for name in ALL}
    assert [name for name in ALL if not read_page(name or PROGRAM).help] == []


def test_the_list_of_commands_groups_each_once() -> None:
    listed = [name for names in read_page(PROGRAM).groups.values() for name in names]
    assert sorted(listed) == sorted({name.split()[0] for name in COMMANDS})


@pytest.mark.parametrize("name", COMMANDS)
def test_page_and_function_of_a_command_agree(name: str) -> None:
    page, found = read_page(name), parameters(name)
    assert {parameter.flags[0] for parameter in found if parameter.hidden} == HIDDEN.get(name, set())
    assert [parameter.flags for parameter in found if parameter.flags and not parameter.hidden] != [()]
    shown = {parameter.flags[0]: parameter for parameter in found if parameter.flags and not parameter.hidden}
    assert shown.keys() == page.options.keys()
    for flag, word in page.options.items():
        assert (shown[flag].kind is bool) == (word.metavar is None), flag
        assert (shown[flag].default is REQUIRED) == ("[required]" in word.help), flag
        if shown[flag].default and shown[flag].default is not REQUIRED:
            text = f"{shown[flag].default:g}" if isinstance(shown[flag].default, float) else str(shown[flag].default)
            assert f"[default: {text}]" in word.help, flag
    for word, parameter in zip(page.arguments, [one for one in found if not one.flags], strict=True):
        assert (parameter.default is REQUIRED) == (not str(word.metavar).startswith("["))
        assert (parameter.kind is list) == str(word.metavar).endswith("...")


def test_options_of_commands_above_are_used() -> None:
    used = {(flag, word) for name in COMMANDS for flag, word in read_page(name).options.items()}
    unused = {(name, flag) for name in ALL for flag, word in read_page(name or PROGRAM).below.items()
              if not any((flag, word) == pair for pair in used)}  # fmt: skip
    assert unused == set()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_fits_its_width_but_for_long_words(width: int) -> None:
    for name in ALL:
        for line in render_help(name, COMMANDS, width).splitlines():
            assert len(line) <= width or len(line.split()) <= 2, (name, line)


def test_a_page_becomes_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manual, "DIRECTORY", str(tmp_path))
    (tmp_path / "ocigpu.md").write_text("# ocigpu\n\n## Options of its commands\n\n- `--json`: JSON.\n")
    (tmp_path / "a.md").write_text("# ocigpu a\n")
    (tmp_path / "a-b.md").write_text(
        "# ocigpu a b: Do it.\n\nDo it\nwell.\n\n## Arguments\n\n- `X|Y`: What.  [default: all]\n\n## Options\n\n"
        "- `--long`, `-l` `N`: How\n  long.\n- `--dotted.name`: Yes.\n\nShared: `--json`\n\n"
        "## Notes\n\nOne:\n\n    of  things\n        seen\nTwo.\n\nThree.\n\n## Examples\n\n    a b\n      c\n"
    )
    page = read_page("a b")
    assert (page.short, page.help) == (read_short("a b"), "Do it\nwell.") == ("Do it.", "Do it\nwell.")
    assert page.arguments == (Word((), "X|Y", "What.  [default: all]"),)
    assert page.options == {
        "--long": Word(("--long", "-l"), "N", "How long."),
        "--dotted.name": Word(("--dotted.name",), None, "Yes."),
        "--json": Word(("--json",), None, "JSON."),
    }
    assert render_help("a b", ["a b"], 40).splitlines() == [
        "Usage: ocigpu a b [OPTIONS] X|Y",
        "",
        "  Do it well.",
        "",
        "Arguments:",
        "  X|Y  What.  [default: all]",
        "",
        "Options:",
        "  -l, --long N   How long.",
        "  --dotted.name  Yes.",
        "  --json         JSON.",
        "  -h, --help     Show this message and",
        "                 exit.",
        "",
        "  One:",
        "",
        "    of  things seen",
        "  Two.",
        "",
        "  Three.",
        "",
        "Examples:",
        "    a b",
        "      c",
    ]


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


MANY_WORDS = {
    "--address": "of the fabric manager",
    "--all": "not only the usual ones",
    "--dev-root": "parent of dev/",
    "--devices": "index, GPU:MIG, UUID, all or none",
    "--driver-root": "where the driver's files are",
    "--dry-run": "say what would be done, and do nothing",
    "--engine-config": "configuration file of the engine",
    "--env": "a variable of a container",
    "--follow": "stay, and show what comes",
    "--force": "do it although something is in the way",
    "--format": "form of the output",
    "--from": "what is converted",
    "--gpus": "how many a simulated host has",
    "--interval": "how often to look, in seconds",
    "--json": "output for programs: one document, or a document for each line of a log",
    "--kubeconfig": "which cluster",
    "--log-format": "form of the log",
    "--markdown": "print one page of Markdown",
    "--model": "of a simulated host's GPUs",
    "--namespace": "of a program's objects in the cluster",
    "--node-name": "the node",
    "--once": "end after the first time",
    "--output": "file to write",
    "--quiet": "errors only, no notes",
    "--remove": "take back what the command does",
    "--remove-on-exit": "the same, when told to end",
    "--resource": "extended resource that is a GPU",
    "--root": "root directory of another host: a mounted disk, an image, a simulated host",
    "--runtime-path": "path of ocigpu-runtime",
    "--since": "only what is newer than that: a time, or the report of a file",
    "--store": "the store of the service for tenants",
    "--strict": "fail instead of leaving something out",
    "--to": "where it goes, or what it becomes",
    "--yes": "do it without asking",
}
"""The one meaning of options that commands say in words of their own."""


def test_an_option_has_one_meaning_in_all_commands() -> None:
    said: dict[str, set[tuple[str | None, str]]] = {}
    for name in COMMANDS:
        for word in read_page(name).options.values():
            for flag in word.flags:
                said.setdefault(flag, set()).add((word.metavar, word.help))
    several = {flag for flag, words in said.items() if len(words) > 1}
    assert several - {flag for flag in several if not flag.startswith("--")} == set(MANY_WORDS)


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("ps", ["--root", "/a", "--root=/b"], {"state_dir": ["/a", "/b"]}),
        ("list", ["--root", "/d"], {"driver_root": "/d"}),
        ("plan", ["--gpus", "0"], {"devices": "0"}),
        ("doctor", ["--root", "/d", "--bundle", "f"], {"root": "/d", "archive": "f"}),
        ("demo", ["--gpus", "3", "--runtime", "r"], {"gpus": 3, "devices": "", "runtime_path": "r"}),
        ("engine configure", ["--config", "f", "--runtime", "docker"], {"engine_config": "f", "runtime": "docker"}),
        ("engine configure", ["--runtime-path", "r"], {"runtime_path": "r", "runtime": ""}),
        ("diff", ["x", "--mode", "spec"], {"runtime_mode": "spec"}),
        ("node-labels", ["--to", "file"], {"publish": "file"}),
    ],
)
def test_former_names_of_options_are_read(name: str, words: list[str], expected: dict[str, Any]) -> None:
    read = parse(words, parameters(name))
    assert {key: read[key] for key in expected} == expected
