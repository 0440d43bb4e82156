"""NVIDIA's default mode beside ours, for the same machine: what containers lose that do not ask for it.

docs/VENDOR.md says it first: the driver capabilities count here.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.asking import request_from_variables

from ocigpu.core.actions import Bind, Node, Plan
from ocigpu.core.facts import facts_from_json
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.plan import make_plan

TESTS = Path(__file__).parent
RECORDED: dict[str, dict[str, list[str]]] = json.loads((TESTS / "recorded/vendor-default.json").read_text())
FACTS = facts_from_json(json.loads((TESTS / "bundles/hosts/a100-8.json").read_text()))
REQUESTS = {"host-8gpu-all": "all", "host-8gpu-idx0,2": "0,2", "host-8gpu-void": "void"}
OF_NVIDIA_SETTINGS = {"libnvidia-gtk3", "libnvidia-wayland-client"}
"""Of the window of that program, which containers have not: the default mode takes all of the driver's version."""
CASES = pytest.mark.parametrize("case", REQUESTS)


def plan_for(case: str, **variables: str) -> Plan:
    settings = Settings()
    return make_plan(
        FACTS, request_from_variables({"NVIDIA_VISIBLE_DEVICES": REQUESTS[case], **variables}, settings), settings
    )


def nodes(plan: Plan) -> set[str]:
    return {action.node.container_path.rpartition("/")[2] for action in plan.actions if isinstance(action, Node)}


def libraries(paths: Any) -> set[str]:
    """Return names up to their version: the recorded machine had other ones of what is not of the driver's version."""
    names = (path.rpartition("/")[2] for path in paths if ".so" in path and "32/" not in path)
    return {name.partition(".so")[0] for name in names}


def mounted(plan: Plan) -> set[str]:
    return libraries(action.container_path for action in plan.actions if isinstance(action, Bind))


@CASES
def test_without_the_variable_a_container_has_what_compute_and_utility_need(case: str) -> None:
    plan, theirs = plan_for(case), RECORDED[case]
    if case == "host-8gpu-void":
        assert (theirs["nodes"], theirs["mounts"], plan.actions) == ([], [], ())
        return
    assert set(theirs["nodes"]) - nodes(plan) == {"nvidia-modeset"}
    assert nodes(plan) <= set(theirs["nodes"])
    lost = libraries(theirs["mounts"]) - mounted(plan)
    assert (len(lost), len(libraries(theirs["mounts"]))) == (23, 34), "docs/VENDOR.md has these numbers"
    assert {"libnvidia-encode", "libnvcuvid", "libGLX_nvidia", "libEGL_nvidia"} <= lost
    asked = plan_for(case, NVIDIA_DRIVER_CAPABILITIES="compute,utility")
    assert asked.actions == plan.actions


@CASES
def test_all_capabilities_are_what_the_default_mode_gives(case: str) -> None:
    plan, theirs = plan_for(case, NVIDIA_DRIVER_CAPABILITIES="all"), RECORDED[case]
    assert set(theirs["nodes"]) == nodes(plan)
    missing = libraries(theirs["mounts"]) - mounted(plan)
    assert missing == (OF_NVIDIA_SETTINGS if theirs["mounts"] else set())
