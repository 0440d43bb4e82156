"""Differences of two specifications, in words."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from ocigpu.cdi.compare import compare_specs

SPEC: dict[str, Any] = {
    "cdiVersion": "0.6.0",
    "kind": "vendor.com/class",
    "annotations": {"ocigpu/fingerprint": "source=nvidia driver=1", "a": "b"},
    "devices": [
        {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/v0", "permissions": "rw", "fileMode": 438}]}},
        {"name": "1", "containerEdits": {"deviceNodes": [{"path": "/dev/v1"}]}},
    ],
    "containerEdits": {
        "env": ["A=1", "B=2"],
        "mounts": [{"hostPath": "/h", "containerPath": "/c", "options": ["ro", "bind"]}],
        "hooks": [
            {"hookName": "createContainer", "path": "/h", "args": ["hook", "update-ldcache", "--folder", "/l"]},
        ],
        "additionalGids": [44],
    },
}  # fmt: skip

Change = Callable[[dict[str, Any]], Any]
COMMON, DEVICE_0 = "every container: ", 'device "0": '


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(dict, [], id="nothing"),
        pytest.param(lambda s: s["annotations"].update({"ocigpu/fingerprint": "other"}), [], id="fingerprint only"),
        pytest.param(lambda s: s["containerEdits"].update(netDevices=[]), [], id="an empty list is none"),
        pytest.param(
            lambda s: s.update(cdiVersion="1.1.0"), ["~ specification: cdiVersion 0.6.0 is now 1.1.0"], id="version"
        ),
        pytest.param(
            lambda s: s["annotations"].update(a="c"),
            ["~ specification: annotation a: value b is now c"],
            id="annotation",
        ),
        pytest.param(lambda s: s["devices"].pop(), ['- device "1": the device'], id="device gone"),
        pytest.param(
            lambda s: s["devices"].append({"name": "2", "containerEdits": {"env": ["X=1"]}}),
            ['+ device "2": the device'],
            id="device new",
        ),
        pytest.param(
            lambda s: s["containerEdits"].update(env=["A=1", "B=3", "C=4"]),
            [f"~ {COMMON}variable B: value 2 is now 3", f"+ {COMMON}variable C (value 4)"],
            id="variables",
        ),
        pytest.param(
            lambda s: s["containerEdits"].update(env=["B=2", "A=1"]),
            [f"~ {COMMON}the order of the entries of kind variable"],
            id="order",
        ),
        pytest.param(
            lambda s: s["devices"][0]["containerEdits"]["deviceNodes"][0].update(fileMode=432),
            [
                f"~ {DEVICE_0}node /dev/v0: fileMode 0666 is now 0660",
            ],
            id="mode of a node",
        ),
        pytest.param(
            lambda s: s["containerEdits"]["mounts"][0].update(hostPath="/h2"),
            [f"~ {COMMON}mount /c: hostPath /h is now /h2"],
            id="source of a mount",
        ),
        pytest.param(
            lambda s: s["containerEdits"]["mounts"].append({"hostPath": "/h", "containerPath": "/c"}),
            [f"+ {COMMON}mount /c (hostPath /h)"],
            id="the same place twice",
        ),
        pytest.param(
            lambda s: s["containerEdits"]["hooks"][0]["args"].append("-v"),
            [
                f"~ {COMMON}hook createContainer update-ldcache: args with -v",
            ],
            id="arguments of a hook",
        ),
        pytest.param(
            lambda s: s["containerEdits"]["hooks"][0]["args"].remove("/l"),
            [f"~ {COMMON}hook createContainer update-ldcache: args without /l"],
            id="one argument less",
        ),
        pytest.param(
            lambda s: s["containerEdits"]["mounts"][0].update(options=["bind", "ro"], type="none"),
            [f"~ {COMMON}mount /c: options in another order; type none is new"],
            id="order of options",
        ),
        pytest.param(
            lambda s: s["devices"][0]["containerEdits"]["deviceNodes"][0].pop("permissions"),
            [f"~ {DEVICE_0}node /dev/v0: permissions rw is gone"],
            id="a field less",
        ),
        pytest.param(
            lambda s: s["containerEdits"]["hooks"][0].update(args=["hook", "--config", "/c", "chmod", "+"]),
            [
                f"- {COMMON}hook createContainer update-ldcache (path /h, args hook update-ldcache --folder /l)",
                f"+ {COMMON}hook createContainer /h (path /h, args hook --config /c chmod +)",
            ],
            id="one entry for all hooks",
        ),
        pytest.param(
            lambda s: s["containerEdits"].update(additionalGids=[105], intelRdt={"closID": "x"}),
            [f"- {COMMON}group 44", f"+ {COMMON}group 105", f"+ {COMMON}intelRdt (closID x)"],
            id="groups and RDT",
        ),
    ],
)
def test_differences_are_named(change: Change, expected: list[str]) -> None:
    new = copy.deepcopy(SPEC)
    change(new)
    assert [difference.describe() for difference in compare_specs(SPEC, new)] == expected


def test_what_is_added_one_way_is_taken_away_the_other_way() -> None:
    new = copy.deepcopy(SPEC)
    new["containerEdits"]["env"].append("C=4")
    new["devices"].pop()
    mirror = {"+": "-", "-": "+"}
    forth = {(difference.where, mirror[difference.change], difference.what) for difference in compare_specs(SPEC, new)}
    assert forth == set(compare_specs(new, SPEC))
