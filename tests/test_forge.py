"""What GitHub reads of the repository: it runs what the pages say, and asks for what helps."""

import re

import pytest
import yaml
from support.product import REPOSITORY

from ocigpu.cli.front.manual import read_page

FORGE = REPOSITORY / ".github"
FORMS = [path for path in sorted((FORGE / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_few_rights_and_ends(path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"], name
        # whoever proposes a change gets no credentials
        checkouts = [step for step in job["steps"] if "actions/checkout" in step.get("uses", "")]
        proposed = "push" not in job.get("if", "")
        assert [step.get("with", {}).get("persist-credentials") for step in checkouts] == [False if proposed else None]


def test_the_workflows_run_what_developers_run() -> None:
    """Every program of the repository that they name is there."""
    text = "".join(path.read_text() for path in WORKFLOWS)
    runs = set(re.findall(r"(?<![\w/])(?:\./)?((?:\.ci|packaging)/[\w./-]+)", text))
    assert runs == {".ci/run", "packaging/site.sh"}
    assert all((REPOSITORY / name).stat().st_mode & 0o111 for name in runs)
    assert "\n      - run: make site\n" in text


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_names_commands_that_there_are(path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(set(ids)) == len(ids) > 0
    for command, words in re.findall(r"`ocigpu (\w+)([^`]*)`", path.read_text()):
        assert set(re.findall(r"--[a-z-]+", words)) <= set(read_page(command).options)


def test_pages_of_the_forge_lead_to_files() -> None:
    for path in FORGE.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), target
