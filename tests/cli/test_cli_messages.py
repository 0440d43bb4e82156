"""Messages of other programs that ``ocigpu explain`` knows, and the page that is made of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ocigpu.cli.main import COMMANDS, find_command
from ocigpu.doctor.messages import MESSAGES, Message, find_messages, render_markdown
from ocigpu.doctor.table import CHECKS

Run = Callable[..., tuple[int, str, str]]
PAGE = Path(__file__).parents[2] / "docs/TROUBLESHOOTING.md"
LITERALS = [(entry, text) for entry in MESSAGES for text in entry.texts]
STEPS = [step for entry in MESSAGES for step in entry.steps if step.startswith("ocigpu ")]


@pytest.mark.parametrize(("entry", "text"), LITERALS, ids=[text for _, text in LITERALS])
def test_a_message_is_found_in_a_line_of_a_log(entry: Message, text: str) -> None:
    assert entry in find_messages(text)
    assert entry in find_messages(f'time="2026-11-21T10:00:00Z" level=error msg="  {text.upper()}: exit status 1"')


def test_part_of_a_message_is_enough_and_a_word_is_not() -> None:
    assert [entry.title for entry in find_messages("select device driver")] == ["Docker: no device driver"]
    assert find_messages("driver") == find_messages("") == []


@pytest.mark.parametrize("entry", MESSAGES, ids=[entry.title for entry in MESSAGES])
def test_findings_of_a_message_are_the_doctors(entry: Message) -> None:
    assert set(entry.findings) <= {check.name for check in CHECKS}
    assert entry.steps


@pytest.mark.parametrize("step", sorted(set(STEPS)))
def test_steps_name_commands_that_there_are(step: str) -> None:
    assert find_command(step.removeprefix("ocigpu ").partition(",")[0].split())[0] in COMMANDS, step


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == render_markdown(), "write it: ocigpu explain --messages --markdown"


def test_a_log_is_explained_with_the_codes_in_it(run: Run) -> None:
    log = "OCI runtime create failed: error running hook #0: ocigpu-hook: OCIGPU-DEV-1: no such device 9, OCIGPU-NO-9"
    status, output, _ = run("explain", log)
    assert status == 0
    assert output.index("OCIGPU-DEV-1") < output.index("OCI runtime create failed")
    status, output, _ = run("explain", log, "--json")
    assert [entry.get("code", entry.get("title")) for entry in json.loads(output)] == [
        "OCIGPU-DEV-1",
        "OCI runtime create failed",
    ]


def test_a_finding_is_explained(run: Run) -> None:
    status, output, _ = run("explain", "uvm-missing")
    assert status == 0
    assert "CUDA needs nvidia-uvm" in output
    status, output, _ = run("explain", "uvm-missing", "--json")
    assert json.loads(output)["finding"] == "uvm-missing"


def test_an_unknown_message_is_an_error_with_a_hint(run: Run) -> None:
    status, output, error = run("explain", "all is very well")
    assert (status, output) == (2, "")
    assert "nothing is known of the message" in error
    assert "ocigpu explain --messages" in error


def test_all_messages_are_listed(run: Run) -> None:
    status, output, _ = run("explain", "--messages")
    assert status == 0
    assert output.count("\n") == len(LITERALS) + 1
    status, output, _ = run("explain", "--messages", "--json")
    assert len(json.loads(output)) == len(MESSAGES)
