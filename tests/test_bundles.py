"""Bundles of real engines: what a container asks for, the plan it gets, and what exactly changes in config.json.

A case is a directory of tests/bundles, added without code (tests/bundles/README.md).  After a wanted change,
``OCIGPU_UPDATE_BUNDLES=1 pytest tests/test_bundles.py`` rewrites what is expected, and the review reads the difference.
"""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.jsondiff import difference, patched, render_exactly, render_for_review

from ocigpu.bundle.document import check_can_have_gpus, read_config
from ocigpu.bundle.edit import edit_config, rule_entries
from ocigpu.core.actions import Plan, plan_to_json
from ocigpu.core.errors import OcigpuError
from ocigpu.core.facts import HostFacts, ImageFacts, facts_from_json, facts_to_json
from ocigpu.core.settings import Settings, parse_settings
from ocigpu.entry.arguments import Arguments
from ocigpu.gpus.vendors import make_plan, parse_request
from ocigpu.runtime import edit_bundle
from ocigpu.system.log import Log

BUNDLES = Path(__file__).parent / "bundles"
CASES = sorted(path.parent for path in BUNDLES.glob("*/case.json"))
HOSTS = sorted((BUNDLES / "hosts").glob("*.json"))
HOOK = "/usr/local/bin/ocigpu-hook"
UPDATE = os.environ.get("OCIGPU_UPDATE_BUNDLES") == "1"
KEYS = {"description", "host", "settings", "image", "rootless", "error"}

cases = pytest.mark.parametrize("directory", CASES, ids=[path.name for path in CASES])


def read_case(directory: Path) -> dict[str, Any]:
    case: dict[str, Any] = json.loads((directory / "case.json").read_text())
    assert case.keys() <= KEYS, f"unknown: {case.keys() - KEYS}"
    assert case["description"]
    return case


def read_host(name: str) -> HostFacts:
    return facts_from_json(json.loads((BUNDLES / "hosts" / f"{name}.json").read_text()))


def process(config: dict[str, Any], case: dict[str, Any], path: str) -> tuple[Plan, dict[str, Any]]:
    """Return the plan and the edited configuration; the steps of the shim, on recorded facts."""
    settings = parse_settings(case.get("settings", {}))
    host = read_host(case["host"])
    request = parse_request(config, settings, here=host.vendors.__contains__)
    edited = copy.deepcopy(config)
    if request.selection != "nothing":
        check_can_have_gpus(config, path)
    plan = make_plan(host, request, settings, ImageFacts(**case.get("image", {})))
    if request.selection != "nothing":
        edit_config(edited, rule_entries(plan), HOOK, [], not case.get("rootless", False), plan.groups())
    return plan, edited


def expect(path: Path, text: str) -> None:
    """Compare with the file, or with UPDATE write it."""
    if UPDATE:
        path.write_text(text)
    assert path.is_file(), f"{path} is missing: OCIGPU_UPDATE_BUNDLES=1 writes it"
    assert text == path.read_text(), f"{path} differs; if that is wanted: OCIGPU_UPDATE_BUNDLES=1"


@cases
def test_bundle_gets_the_expected_plan_and_edits(directory: Path) -> None:
    case = read_case(directory)
    config = read_config(str(directory)).config
    before = render_exactly(config)
    if "error" in case:
        with pytest.raises(OcigpuError) as caught:
            process(config, case, "config.json")
        case["error"] = {"code": caught.value.code, "message": caught.value.message}
        expect(directory / "case.json", render_for_review(case) + "\n")
        assert render_exactly(config) == before
        assert len(caught.value.render("ocigpu-runtime").splitlines()) <= 2
        assert {path.name for path in directory.iterdir()} == {"case.json", "config.json"}
        return
    plan, edited = process(config, case, "config.json")
    changes = difference(config, edited)
    expect(directory / "plan.json", render_for_review(plan_to_json(plan)) + "\n")
    expect(directory / "diff.json", render_for_review(changes, 1) + "\n")
    # everything that is not listed is equal, order of keys included
    assert render_exactly(patched(config, json.loads((directory / "diff.json").read_text()))) == render_exactly(edited)
    assert render_exactly(config) == before


@cases
def test_editing_twice_equals_editing_once(directory: Path) -> None:
    case = read_case(directory)
    if "error" in case:
        return
    _, once = process(read_config(str(directory)).config, case, "config.json")
    _, twice = process(once, case, "config.json")
    assert render_exactly(twice) == render_exactly(once)


@cases
def test_same_bundle_gives_the_same_plan(directory: Path) -> None:
    case = read_case(directory)
    if "error" in case:
        return
    config = read_config(str(directory)).config
    plans = [render_exactly(plan_to_json(process(config, case, "config.json")[0])) for _ in range(2)]
    assert plans[0] == plans[1]


def asks_for_nothing(directory: Path) -> bool:
    plan = directory / "plan.json"
    return plan.is_file() and json.loads(plan.read_text())["actions"] == []


NOTHING = [directory for directory in CASES if asks_for_nothing(directory)]


@pytest.mark.parametrize("directory", NOTHING, ids=[path.name for path in NOTHING])
def test_bundle_without_a_request_stays_as_it_is(directory: Path, tmp_path: Path) -> None:
    """Not one byte, not the file's identity or times, nothing beside it; and no hook or driver is looked for."""
    shutil.copy(directory / "config.json", tmp_path)
    before = (tmp_path / "config.json").stat()
    settings = parse_settings(read_case(directory).get("settings", {}))
    settings = settings._replace(driver_root="/nonexistent", hook_path="/nonexistent/ocigpu-hook")
    edit_bundle(Arguments("create", str(tmp_path)), settings, "/nonexistent/ocigpu-runtime", Log())
    after = (tmp_path / "config.json").stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    assert (tmp_path / "config.json").read_bytes() == (directory / "config.json").read_bytes()
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.parametrize("path", HOSTS, ids=[path.stem for path in HOSTS])
def test_recorded_host_survives_reading_and_writing(path: Path) -> None:
    text = path.read_text()
    assert render_for_review(facts_to_json(facts_from_json(json.loads(text)))) + "\n" == text
    assert "/tmp/" not in text


def test_every_recorded_host_is_used() -> None:
    assert {path.stem for path in HOSTS} == {read_case(directory)["host"] for directory in CASES}


def test_there_are_cases_for_everything() -> None:
    assert len(CASES) >= 40
    assert len(NOTHING) >= 5


DOCUMENT = {"a": 1, "b": [1, 2, 3], "c": {"d/e": None, "~": True}}


@pytest.mark.parametrize(
    ("after", "operations"),
    [
        pytest.param(DOCUMENT, [], id="equal"),
        pytest.param({**DOCUMENT, "a": True}, [{"op": "replace", "path": "/a", "value": True}], id="true is not 1"),
        pytest.param({**DOCUMENT, "a": 1.0}, [{"op": "replace", "path": "/a", "value": 1.0}], id="1.0 is not 1"),
        pytest.param({**DOCUMENT, "z": None}, [{"op": "add", "path": "/z", "value": None}], id="null is not absent"),
        pytest.param({"a": 1, "b": [1, 2, 3]}, [{"op": "remove", "path": "/c"}], id="removed key"),
        pytest.param(
            {**DOCUMENT, "b": [1, 9, 3]},
            [{"op": "remove", "path": "/b/1"}, {"op": "add", "path": "/b/1", "value": 9}],
            id="replaced element",
        ),
        pytest.param({**DOCUMENT, "b": [0, 1, 2, 3]}, [{"op": "add", "path": "/b/0", "value": 0}], id="inserted"),
        pytest.param(
            {**DOCUMENT, "b": []}, [{"op": "remove", "path": f"/b/{i}"} for i in (2, 1, 0)], id="emptied list"
        ),
        pytest.param(
            {**DOCUMENT, "c": {"d/e": 0, "~": False}},
            [
                {"op": "replace", "path": "/c/d~1e", "value": 0},
                {"op": "replace", "path": "/c/~0", "value": False},
            ],
            id="escaped names",
        ),
        pytest.param([], [{"op": "replace", "path": "", "value": []}], id="whole document"),
    ],
)
def test_difference_is_exact_and_can_be_carried_out(after: Any, operations: list[dict[str, Any]]) -> None:
    assert difference(DOCUMENT, after) == operations
    assert render_exactly(difference(DOCUMENT, after)) == render_exactly(operations)
    assert render_exactly(patched(DOCUMENT, operations)) == render_exactly(after)


def test_difference_does_not_hide_a_changed_order() -> None:
    after = {"b": DOCUMENT["b"], "a": 1, "c": DOCUMENT["c"]}
    assert render_exactly(patched(DOCUMENT, difference(DOCUMENT, after))) != render_exactly(after)


def test_settings_of_a_case_are_those_of_a_file() -> None:
    assert parse_settings({}) == Settings()
