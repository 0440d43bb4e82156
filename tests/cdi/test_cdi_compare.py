"""Differences of two specifications, in words."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from ocigpu.cdi.compare import compare_specs, edit_rows

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
                f"+ {COMMON}hook createContainer update-ldcache -v",
            ],
            id="arguments of a hook",
        ),
        pytest.param(
            lambda s: s["containerEdits"]["hooks"][0]["args"].remove("/l"),
            [
                f"- {COMMON}hook createContainer update-ldcache --folder /l",
                f"+ {COMMON}hook createContainer update-ldcache --folder",
            ],
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
            lambda s: s["containerEdits"]["hooks"][0].update(
                args=[
                    "hook",
                    "--config",
                    "/c",
                    "update-application-profile",
                    "+",
                    "chmod",
                    "--mode",
                    "644",
                    "--path=/a",
                ]
            ),
            [
                f"~ {COMMON}hook createContainer /h: args with --config /c",
                f"- {COMMON}hook createContainer update-ldcache --folder /l",
                f"+ {COMMON}hook createContainer update-application-profile",
                f"+ {COMMON}hook createContainer chmod --mode 644",
                f"+ {COMMON}hook createContainer chmod --path=/a",
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


def test_a_hook_has_a_row_for_each_option_of_each_sub_command() -> None:
    links = [word for number in range(300) for word in ("--link", f"lib{number}.so.1::/usr/lib/lib{number}.so")]
    args = ["ocigpu-hook", "--config", "/c", "create-symlinks", *links, "+", "update-application-profile"]
    rows = edit_rows({"hooks": [{"hookName": "createContainer", "path": "/h", "args": args, "timeout": 2}]})
    assert rows[0] == ("hook createContainer /h", "args ocigpu-hook --config /c, timeout 2")
    assert rows[1] == ("  create-symlinks --link", "lib0.so.1::/usr/lib/lib0.so")
    assert rows[300] == ("  create-symlinks --link", "lib299.so.1::/usr/lib/lib299.so")
    assert rows[301:] == [("  update-application-profile", "")]


def test_a_hook_of_another_vendor_is_one_row() -> None:
    hook = {"hookName": "prestart", "path": "/h", "args": ["h", "-v", "x"], "env": ["A=1"]}
    assert edit_rows({"hooks": [hook]}) == [("hook prestart /h", "args h -v x, env A=1")]
