"""Groups of device nodes: which the plan has, and how they become groups of a container's process."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from support.asking import request_from_variables
from support.jsondiff import render_exactly

from ocigpu.bundle.document import read_config
from ocigpu.bundle.edit import ConfigEdit, edit_config, fitting_groups, put, rule_entries, take_back
from ocigpu.bundle.inject import inject
from ocigpu.containers.difference import find_original
from ocigpu.core.actions import JoinGroup, join_groups, plan_to_json
from ocigpu.core.config_json import DECLARED
from ocigpu.core.facts import DeviceNode, HostFacts, facts_from_json
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.plan import make_plan
from ocigpu.gpus.vendors import parse_request
from ocigpu.system import groups
from ocigpu.system.groups import KEEP_GROUPS, fit_groups, missing_groups

Config = dict[str, Any]

HOST = Path(__file__).parent / "bundles/hosts/l4-2-drm-groups.json"
USER = {"uid": 1000, "gid": 1000}
NAMESPACE = {"namespaces": [{"type": "mount"}, {"type": "user"}]}


def host() -> HostFacts:
    """Two GPUs with nodes of group 44 (/dev/nvidia*, cards) and 105 (render nodes), mode 0660, as udev makes them."""
    return facts_from_json(json.loads(HOST.read_text()))


def planned(capabilities: str, settings: Settings = Settings()) -> tuple[int, ...]:  # noqa: B008 - immutable
    variables = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": capabilities}
    return make_plan(host(), request_from_variables(variables, settings), settings).groups()


def add_groups(config: Config, gids: tuple[int, ...]) -> tuple[str, ...]:
    """Put groups of the host into a configuration, as every mode does."""
    fitting, notes = fitting_groups(config, gids)
    put(config, ConfigEdit(groups=fitting, noted=("groups",)))
    return notes


def mapping(inside: Any, outside: Any, size: Any) -> Config:
    return {"containerID": inside, "hostID": outside, "size": size}


@pytest.mark.parametrize(
    ("gid", "mode", "joined"),
    [(44, 0o660, True), (44, 0o664, True), (44, 0o662, True), (44, 0o666, False), (0, 0o660, False)],
)
def test_a_group_is_joined_where_others_may_not_read_and_write(gid: int, mode: int, joined: bool) -> None:
    node = DeviceNode("/dev/nvidia0", "/dev/nvidia0", 195, 0, mode, 0, gid)
    reason = f"not all users may open /dev/nvidia0 ({mode:04o})"
    assert join_groups([node]) == ((JoinGroup(gid, reason),) if joined else ())


def test_the_plan_has_each_group_once_with_its_reason() -> None:
    assert planned("compute,utility") == (44,)
    assert planned("all") == (44, 105)
    variables = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": "all"}
    plan = make_plan(host(), request_from_variables(variables, Settings()), Settings())
    found = [action for action in plan_to_json(plan)["actions"] if action["action"] == "group"]
    assert found == [
        {"action": "group", "gid": 44, "reason": "not all users may open /dev/nvidiactl (0660) and 3 more"},
        {"action": "group", "gid": 105, "reason": "not all users may open /dev/dri/renderD128 (0660)"},
    ]


def test_the_vendors_feature_leaves_them_out() -> None:
    assert planned("all", Settings(features_no_additional_gids_for_device_nodes=True)) == ()


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({}, [44, 105]),
        ({"additionalGids": None}, [44, 105]),
        ({"additionalGids": [7]}, [7, 44, 105]),
        ({"additionalGids": [105, 7]}, [105, 7, 44]),
    ],
)
def test_groups_are_added_once_and_taken_back(user: Config, expected: list[int]) -> None:
    config: Config = {"process": {"user": {**USER, **user}}}
    before = copy.deepcopy(config)
    assert add_groups(config, (44, 105)) == ()
    assert config["process"]["user"] == {**USER, "additionalGids": expected}
    once = render_exactly(config)
    take_back(config)
    assert (config["process"]["user"]["additionalGids"] or None) == (user.get("additionalGids") or None)
    assert config["annotations"] == {}
    add_groups(config, (44, 105))
    assert render_exactly(config) == once
    take_back(config)
    add_groups(config, (7,))
    assert 44 not in config["process"]["user"]["additionalGids"]
    assert before["process"]["user"] == {**USER, **user}


@pytest.mark.parametrize("text", [7, None, "", "x 44x", "0 1000 99999999999999999999", "-1"])
def test_an_annotation_that_is_not_ours_removes_no_other_group(text: Any) -> None:
    config: Config = {"process": {"user": {"additionalGids": [44, 105, "44", None]}}, "annotations": {DECLARED: text}}
    take_back(config)
    assert config["process"]["user"]["additionalGids"] == [44, 105, "44", None]


@pytest.mark.parametrize(
    ("mappings", "expected"),
    [
        pytest.param([mapping(0, 0, 65536)], [44, 105], id="identity"),
        pytest.param([mapping(0, 100000, 65536)], [], id="neither"),
        pytest.param([mapping(0, 100000, 1000), mapping(1000, 44, 1)], [1000], id="one"),
        pytest.param([mapping(5, 40, 100)], [9, 70], id="moved"),
        pytest.param([], [], id="none"),
        pytest.param(None, [], id="a namespace that is joined"),
        pytest.param([mapping(0, "0", 9), {}, 7, mapping(True, 0, 99)], [], id="not mappings"),
    ],
)
def test_in_a_user_namespace_groups_have_the_ids_by_which_they_are_mapped(mappings: Any, expected: list[int]) -> None:
    linux = {**NAMESPACE, **({} if mappings is None else {"gidMappings": mappings})}
    config: Config = {"process": {"user": dict(USER)}, "linux": linux}
    notes = add_groups(config, (44, 105))
    assert config["process"]["user"].get("additionalGids", []) == expected
    assert len(notes) == (len(expected) < 2)
    cdi: Config = {"process": {"user": dict(USER)}, "linux": linux}
    assert inject(cdi, [{"additionalGids": [44, 105]}]) == notes
    assert cdi["process"]["user"].get("additionalGids", []) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"gid_map": "0 1000 1\n1 100000 65536\n", "setgroups": "allow"}, [44]),
        ({"gid_map": "0 1000 1\n", "setgroups": "allow"}, []),
        ({"gid_map": "0 1000 1\n1 100000 65536\n", "setgroups": "deny"}, []),
    ],
)
def test_in_our_own_user_namespace_only_groups_that_exist_there(
    files: dict[str, str], expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65534 is how all others are seen."""
    for name, text in {**files, "overflowgid": "65534\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(groups, "in_initial_user_namespace", lambda: False)
    monkeypatch.setattr(groups, "OVERFLOW_GID", str(tmp_path / "overflowgid"))
    monkeypatch.setattr(groups, "OWN_PROC", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert fit_groups({}, (44, 65534))[0] == expected


def test_none_is_added_where_the_runtime_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Config = {"process": {"user": dict(USER)}, "annotations": {KEEP_GROUPS: "1"}}
    (note,) = add_groups(config, (44,))
    assert KEEP_GROUPS in note
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    config = {"process": {"user": dict(USER)}}
    (note,) = add_groups(config, (44,))
    assert "ordinary user" in note
    assert config == {"process": {"user": USER}}
    for without in ({}, {"process": None}, {"process": {}}):
        config = copy.deepcopy(without)
        assert (add_groups(config, (44,)), config) == ((), without)


def test_the_original_of_an_edited_configuration_is_found_again() -> None:
    original = read_config(str(HOST.parents[1] / "groups-of-device-nodes")).config
    config = copy.deepcopy(original)
    plan = make_plan(host(), parse_request(config, Settings()), Settings())
    edit_config(config, rule_entries(plan), "/usr/local/bin/ocigpu-hook", [], True, plan.groups())
    assert config["process"]["user"]["additionalGids"] == [44, 105]
    assert find_original(config, Settings()).config == original


def test_who_comes_too_late_says_which_group_is_missing() -> None:
    config: Config = {"process": {"user": {**USER, "additionalGids": [105]}}}
    (note,) = missing_groups(config, (44, 105))
    assert note == "user 1000 of the container is not in group 44 and may not open its nodes (--group-add 44)"
    assert missing_groups({"process": {"user": {"uid": 0}}}, (44,)) == ()
    assert missing_groups({"process": {"user": {"uid": 5, "gid": 44}}}, (44,)) == ()
    assert missing_groups({**config, "linux": {**NAMESPACE, "gidMappings": []}}, (44,)) == ()
