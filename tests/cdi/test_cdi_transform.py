"""Another root in a specification's paths; the rules are those of the vendor's ``cdi transform root``."""

import copy
from typing import Any

import pytest

from ocigpu.cdi.transform import move_path, transform_root

SPEC: dict[str, Any] = {
    "cdiVersion": "0.3.0",
    "kind": "vendor.com/class",
    "devices": [
        {
            "name": "a",
            "containerEdits": {"deviceNodes": [{"path": "/root/dev/v0", "permissions": "rw"}, {"path": "/dev/v1"}]},
        }
    ],
    "containerEdits": {
        "env": ["A=/root/x"],
        "mounts": [{"hostPath": "/root/lib", "containerPath": "/root/lib", "options": ["ro"]}],
        "hooks": [
            {
                "hookName": "createContainer",
                "path": "/root/bin/hook",
                "args": [
                    "hook", "create-symlinks", "--link", "/root/a::/root/b", "--folder=/root/l",
                    "--driver-proc", "/root/proc", "--config=/root/c",
                ],
            },
            {"hookName": "startContainer", "path": "/root/bin/in", "args": ["in", "/root/d"]},
            {
                "hookName": "createRuntime",
                "path": "/root/bin/out",
                "args": ["out", "/root/d", "root/e", "--link", "/root/a::/root/b", "--link=/root/c::/root/d"],
            },
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "from_root", "to_root", "expected"),
    [
        pytest.param("/driver/lib/x", "/driver", "/", "/lib/x", id="below"),
        pytest.param("/driver", "/driver", "/", "/", id="the root itself"),
        pytest.param("/driver-backup/x", "/driver", "/", "/driver-backup/x", id="only a prefix of a name"),
        pytest.param("/driver/x", "/driver/", "/new/", "/new/x", id="slashes at the end"),
        pytest.param("/x", "/", "/new", "/new/x", id="everything is below /"),
        pytest.param("/", "/", "/new", "/new", id="/ itself"),
        pytest.param("driver/x", "/driver", "/new", "driver/x", id="relative"),
        pytest.param("/driver/../x", "/driver", "/new", "/driver/../x", id="out by dots"),
        pytest.param("/a/../driver/x", "/driver", "/new", "/new/x", id="in by dots"),
        pytest.param("/a//b", "/a//b", "/a//b", "/a//b", id="the same root"),
        pytest.param("", "/driver", "/new", "", id="empty"),
    ],
)
def test_a_path_moves_only_at_whole_components(path: str, from_root: str, to_root: str, expected: str) -> None:
    assert move_path(path, transform_clean(from_root), transform_clean(to_root)) == expected


def transform_clean(root: str) -> str:
    return "/" + root.strip("/")


def test_the_hosts_paths_move_and_the_containers_stay() -> None:
    before = copy.deepcopy(SPEC)
    result = transform_root(SPEC, "/root", "/new", "host")
    assert before == SPEC
    nodes = result["devices"][0]["containerEdits"]["deviceNodes"]
    assert nodes == [{"path": "/root/dev/v0", "hostPath": "/new/dev/v0", "permissions": "rw"}, {"path": "/dev/v1"}]
    edits = result["containerEdits"]
    assert edits["mounts"] == [{"hostPath": "/new/lib", "containerPath": "/root/lib", "options": ["ro"]}]
    assert [hook["path"] for hook in edits["hooks"]] == ["/new/bin/hook", "/root/bin/in", "/new/bin/out"]
    assert edits["hooks"][0]["args"][3:] == [
        "/root/a::/root/b", "--folder=/root/l", "--driver-proc", "/new/proc", "--config=/new/c",
    ]  # fmt: skip
    assert edits["hooks"][1]["args"] == ["in", "/root/d"]
    links = ["--link", "/new/a::/new/b", "--link=/new/c::/new/d"]
    assert edits["hooks"][2]["args"] == ["out", "/new/d", "root/e", *links]
    assert edits["env"] == ["A=/root/x"]


def test_the_containers_paths_move_and_the_hosts_stay() -> None:
    result = transform_root(SPEC, "/root", "/", "container")
    nodes = result["devices"][0]["containerEdits"]["deviceNodes"]
    assert nodes == [{"path": "/dev/v0", "hostPath": "/root/dev/v0", "permissions": "rw"}, {"path": "/dev/v1"}]
    edits = result["containerEdits"]
    assert edits["mounts"] == [{"hostPath": "/root/lib", "containerPath": "/lib", "options": ["ro"]}]
    assert [hook["path"] for hook in edits["hooks"]] == ["/root/bin/hook", "/bin/in", "/root/bin/out"]
    assert edits["hooks"][0]["args"][3:] == [
        "/a::/b", "--folder=/l", "--driver-proc", "/root/proc", "--config=/root/c",
    ]  # fmt: skip
    assert edits["hooks"][1]["args"] == ["in", "/d"]
    assert edits["hooks"][2]["args"] == SPEC["containerEdits"]["hooks"][2]["args"]


@pytest.mark.parametrize(
    ("declared", "to_root", "expected"),
    [
        pytest.param("0.3.0", "/new", "0.5.0", id="raised: hostPath of a node"),
        pytest.param("0.3.0", "/root", "0.3.0", id="nothing changes"),
        pytest.param("1.0.0", "/new", "1.0.0", id="kept: newer than needed"),
    ],
)
def test_the_version_is_raised_to_what_the_result_needs(declared: str, to_root: str, expected: str) -> None:
    assert transform_root({**SPEC, "cdiVersion": declared}, "/root", to_root)["cdiVersion"] == expected


@pytest.mark.parametrize("side", ["host", "container"])
def test_an_empty_root_is_the_root_directory_and_moving_back_gives_the_same_paths(side: str) -> None:
    spec = {**SPEC, "cdiVersion": "0.5.0", "devices": [{"name": "a", "containerEdits": {"env": ["X=1"]}}]}
    away = transform_root(spec, "", "/elsewhere", side)
    assert away != spec
    assert transform_root(away, "/elsewhere", "", side) == spec


@pytest.mark.parametrize(
    ("side", "to_root", "expected"),
    [
        pytest.param("host", "/new", {"a": "b"}, id="other host root"),
        pytest.param("host", "/root", {"a": "b", "ocigpu/fingerprint": "source=nvidia"}, id="same root"),
        pytest.param("container", "/new", {"a": "b", "ocigpu/fingerprint": "source=nvidia"}, id="container"),
    ],
)
def test_a_fingerprint_of_another_root_is_left_out(side: str, to_root: str, expected: dict[str, str]) -> None:
    spec = {**SPEC, "annotations": {"a": "b", "ocigpu/fingerprint": "source=nvidia"}}
    assert transform_root(spec, "/root", to_root, side)["annotations"] == expected
    del spec["annotations"]["a"]
    assert ("annotations" in transform_root(spec, "/root", to_root, side)) is (len(expected) == 2)
