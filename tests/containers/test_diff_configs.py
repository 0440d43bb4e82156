"""``ocigpu diff``: the original of an edited config.json is found again, and changes are told exactly."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import test_bundles
from containers_lab import WAITING, container, ocigpu, settings_with
from support.fixtures import MakeBundle
from support.process import run
from support.product import PROGRAMS, SimulatedHost
from support.runtimes import run_container

from ocigpu.bundle.declared import edit_declared
from ocigpu.bundle.document import read_config
from ocigpu.bundle.edit import remove_gpu_hooks
from ocigpu.bundle.from_plan import declare
from ocigpu.bundle.inject import inject
from ocigpu.bundle.policy import owns_device_policy
from ocigpu.cli.containers.containers import DIFFERENT
from ocigpu.containers.difference import REPLACED_NOTE, Change, find_original, list_changes
from ocigpu.core.config_json import get_list, get_object, get_rules
from ocigpu.core.settings import Settings, parse_settings
from ocigpu.gpus.vendors import make_plan, parse_request

REPLACED = {
    "docker-device",  # a device of the same path
    "docker-gpus-all",  # a hook for GPUs
    "docker-gpus-device",
    "odd-several-gpu-hooks",
    "odd-already-edited",
    "odd-equal-rules",  # the same rules
    "odd-hooks-null",  # null, which is no list
    "odd-prestart-null",
    "odd-resources-null",
}
"""Bundles of which an edit replaces something."""
EDITED = [
    pytest.param(path, id=path.name)
    for path in test_bundles.CASES
    if "error" not in test_bundles.read_case(path) and not test_bundles.asks_for_nothing(path)
]


def edited_in_spec_mode(config: dict[str, Any], case: dict[str, Any], settings: Settings) -> dict[str, Any]:
    host = test_bundles.read_host(case["host"])
    request = parse_request(config, settings, here=host.vendors.__contains__)
    plan = make_plan(host, request, settings, mode="spec")
    edited = copy.deepcopy(config)
    remove_gpu_hooks(edited)
    declared = declare(plan, host)
    root = not case.get("rootless", False)
    edit_declared(edited, declared, "/root", ["/view"] * len(declared.views), root, not root)
    return edited


@pytest.mark.parametrize("mode", ["hook", "spec"])
@pytest.mark.parametrize("directory", EDITED)
def test_the_original_of_an_edited_config_is_found(directory: Path, mode: str) -> None:
    case = test_bundles.read_case(directory)
    settings = parse_settings(case.get("settings", {}))
    config = read_config(str(directory)).config
    if mode == "hook":
        edited = test_bundles.process(config, case, "config.json")[1]
    else:
        edited = edited_in_spec_mode(config, case, settings)
    before = copy.deepcopy(edited)
    original = find_original(edited, settings)
    assert edited == before
    assert (original.mode, original.notes) == (mode, (REPLACED_NOTE,))
    if directory.name not in REPLACED:
        empty = get_object(config, "linux").get("resources") in ({}, {"devices": []})
        assert empty or original.config == config
    else:  # nothing is there that was not before
        assert {change.op for change in list_changes(config, original.config)} <= {"remove"}
    again = find_original(original.config, settings)
    assert (again.mode, again.config) == ("", original.config)


@pytest.mark.parametrize("directory", [pytest.param(path, id=path.name) for path in test_bundles.NOTHING])
def test_a_config_that_was_never_edited_is_its_own_original(directory: Path) -> None:
    config = read_config(str(directory)).config
    original = find_original(config, Settings())
    assert (original.config, original.mode, original.notes) == (config, "", ())


def test_rules_of_others_at_the_end_stay() -> None:
    """Only rules of the shim's own form go: what engines write has other letters or another order."""
    rules = [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "c", "major": 10, "minor": 229, "access": "rwm"},
        {"type": "c", "major": 195, "minor": 0, "access": "rw", "allow": True},
    ]
    hook = {"path": "/x/ocigpu-hook", "args": ["ocigpu-hook", "prestart"]}
    ours = {"allow": True, "type": "c", "major": 195, "minor": 255, "access": "rw"}
    edited = {"hooks": {"prestart": [hook]}, "linux": {"resources": {"devices": [*rules, ours]}}}
    original = find_original(edited, Settings())
    assert get_rules(original.config) == rules
    assert "hooks" not in original.config


CHANGES = {
    "equal": ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}, []),
    "a value": ({"a": 1}, {"a": 2}, [Change("replace", "/a", 1, 2)]),
    "a type": ({"a": 1}, {"a": True}, [Change("replace", "/a", 1, True)]),
    "null": ({"a": None}, {"a": []}, [Change("replace", "/a", None, [])]),
    "keys": ({"a": 1}, {"b": 1}, [Change("remove", "/a", old=1), Change("add", "/b", new=1)]),
    "a key to escape": ({}, {"a/b~c": 1}, [Change("add", "/a~1b~0c", new=1)]),
    "entries": (
        {"a": ["x", "y", "x"]},
        {"a": ["z", "x"]},
        [Change("remove", "/a/1", old="y"), Change("remove", "/a/2", old="x"), Change("add", "/a/0", new="z")],
    ),
    "the order of entries": ({"a": [1, 2]}, {"a": [2, 1]}, [Change("replace", "/a", [1, 2], [2, 1])]),
    "the order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
}


@pytest.mark.parametrize(("old", "new", "expected"), CHANGES.values(), ids=CHANGES.keys())
def test_changes_are_told_by_pointer(old: Any, new: Any, expected: list[Change]) -> None:
    assert list_changes(old, new) == expected


def test_lists_of_many_entries_are_compared_in_time() -> None:
    old = [f"NAME{number}=x" for number in range(200_000)]
    changes = list_changes(old, [*old[1:], "new"])
    assert [(change.op, change.path) for change in changes] == [("remove", "/0"), ("add", "/199999")]


@pytest.fixture(scope="module")
def specification(session_directory: Path, simulated_host: SimulatedHost) -> str:
    """The settings' line for a directory with the specification of the host."""
    directory = session_directory / "diff-cdi"
    directory.mkdir()
    command = [PROGRAMS / "ocigpu", "cdi", "generate", "--config", simulated_host.settings]
    run([*command, "--output", directory / "nvidia.yaml"])
    return f'cdi.spec-dirs = ["{directory}"]\n'


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
def test_a_bundle_is_compared_before_and_after_its_start(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    specification: str,
    runtime_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """What would be changed is what is changed then, but for what every start chooses anew."""
    monkeypatch.setenv("PATH", f"{PROGRAMS}:/usr/bin:/bin")
    bundle = make_bundle(["true"], {"NVIDIA_VISIBLE_DEVICES": "0,2"})
    settings = settings_with(simulated_host, "runc", bundle.with_name("settings.toml"), mode, specification)
    environment = {**simulated_host.environment(runtime_environment), "OCIGPU_CONFIG": str(settings)}
    before = read_config(str(bundle)).config
    arguments = ("diff", str(bundle), "--config", str(settings))
    planned = json.loads(ocigpu(*arguments, "--json"))
    assert (planned["mode"], planned["edited"]) == (mode, False)
    ocigpu(*arguments, "--exit-code", status=DIFFERENT)
    assert read_config(str(bundle)).config == before
    completed = run_container(
        [PROGRAMS / "ocigpu-runtime"], bundle, bundle.name, env=environment, state=bundle.with_name("state")
    )
    assert completed.returncode == 0, completed.stderr
    done = json.loads(ocigpu(*arguments, "--json"))
    assert (done["mode"], done["edited"]) == (mode, True)
    changed = json.dumps(done["changes"])
    for expected, found in zip(json.dumps(planned["changes"]).split('"'), changed.split('"'), strict=False):
        if mode == "cdi":
            break
        if "NAMED-AT-START" in expected:
            assert found.startswith(expected.replace("NAMED-AT-START", ""))
        else:
            assert found == expected
    original = find_original(read_config(str(bundle)).config, Settings())
    if mode == "cdi":  # the variable that asked is overwritten by what the devices bring
        parts = {change["path"].split("/")[1] for change in done["changes"]}
        assert parts == {"process", "linux", "mounts", "hooks", "annotations"}
        added = [change for change in done["changes"] if change["path"].startswith("/linux/devices")]
        wanted = [change for change in planned["changes"] if change["path"].startswith("/linux/devices")]
        assert added == wanted
        assert len(done["notes"]) == 1
    else:
        assert original.config == before
    text = ocigpu(*arguments)
    assert text.startswith(f"--- {bundle}/config.json (original)\n+++ {bundle}/config.json (edited, mode {mode})\n")
    assert "\x1b" not in text


@pytest.mark.root
@pytest.mark.engine
def test_a_running_container_is_compared_with_another_mode(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "1"})
    with container(bundle, runtime_environment, "runc", "v1", simulated_host) as made:
        words = ("--root", str(made.state), "--config", str(simulated_host.settings), "--json")
        other = json.loads(ocigpu("diff", made.name, "--mode", "spec", *words))
        assert (other["mode"], other["edited"]) == ("spec", False)
        devices = next(change["new"] for change in other["changes"] if change["path"] == "/linux/devices")
        assert "/dev/nvidia1" in [device["path"] for device in devices]
        assert "ocigpu-hook" not in json.dumps(other["changes"])
        own = json.loads(ocigpu("diff", made.name, *words))
        assert (own["mode"], own["edited"]) == ("hook", True)
        hooks = next(change["new"] for change in own["changes"] if change["path"] == "/hooks")
        assert get_list(hooks, "prestart")[0]["args"][0] == "ocigpu-hook"


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        pytest.param(("--mode", "magic"), 2, "modes are cdi, hook, spec", id="no mode"),
        pytest.param((), 1, "OCIGPU-CTR-1", id="no container"),
        pytest.param(("--root", "/nowhere"), 1, "OCIGPU-CTR-1", id="no place"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path: Path, words: tuple[str, ...], status: int, expected: str) -> None:
    text = ocigpu("diff", "nobody-has-this-name", *(words or ("--root", str(tmp_path))), status=status)
    assert expected in text
    assert len(text.splitlines()) <= 2


def test_a_bundle_without_a_config_is_said(tmp_path: Path) -> None:
    assert "OCIGPU-SPEC-1" in ocigpu("diff", str(tmp_path), status=1)
    (tmp_path / "config.json").write_text("{}")
    assert ocigpu("diff", str(tmp_path)) == ""


@pytest.mark.parametrize("asked", ["by an annotation", "by a variable", "by nothing that is left"])
def test_devices_of_any_vendor_are_taken_back(tmp_path: Path, asked: str) -> None:
    """Specifications without a hook leave no other trace than what they bring."""
    edits = {
        "deviceNodes": [{"path": "/dev/thing0", "type": "c", "major": 240, "minor": 7}],
        "env": ["THING=0"],
        "mounts": [{"hostPath": "/etc", "containerPath": "/opt/etc", "options": ["rbind", "ro"]}],
        "additionalGids": [77],
    }
    spec = {"cdiVersion": "0.7.0", "kind": "x.org/thing", "devices": [{"name": "0", "containerEdits": edits}]}
    (tmp_path / "thing.json").write_text(json.dumps(spec))
    settings = parse_settings({"cdi": {"spec-dirs": [str(tmp_path)], "environment-vendors": ["x.org"]}})
    before: dict[str, Any] = json.loads((test_bundles.BUNDLES / "docker-all" / "config.json").read_text())
    before["process"]["env"] = ["NVIDIA_VISIBLE_DEVICES=x.org/thing=0"] if asked == "by a variable" else []
    before["annotations"] = {"cdi.k8s.io/x": "x.org/thing=0"} if asked == "by an annotation" else {}
    edited = copy.deepcopy(before)
    inject(edited, [edits], declare_rules=owns_device_policy(), rootless=not owns_device_policy())
    original = find_original(edited, settings)
    if asked == "by nothing that is left":
        assert (original.config, original.mode) == (edited, "")
        return
    assert (original.mode, original.devices) == ("cdi", ("x.org/thing=0",))
    original.config.setdefault("annotations", {})
    # mounts are sorted by an edit, and stay sorted
    assert {change.path for change in list_changes(before, original.config)} <= {"/mounts"}
    assert find_original(before, settings).mode == ""
    edited["mounts"] = [mount for mount in edited["mounts"] if mount["destination"] != "/opt/etc"]
    partly = find_original(edited, settings)
    if asked == "by a variable":
        assert (partly.config, partly.mode) == (edited, "")
    else:
        assert "1 of 5 edits" in partly.notes[1]


def test_a_config_that_is_nested_too_deeply_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 700 + "1" + "}" * 700)
    for command in ("diff", "explain"):
        assert "OCIGPU-SPEC-2" in ocigpu(command, str(tmp_path), "--root", str(tmp_path / "none"), status=1)
