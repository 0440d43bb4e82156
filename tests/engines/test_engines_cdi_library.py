"""The CDI library as Podman has it beside our injection: one specification, one configuration, the same edits."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.podman import Podman, make_podman

from ocigpu import cache
from ocigpu.cdi.inject import inject
from ocigpu.cdi.registry import read_registry
from ocigpu.settings import Settings

pytestmark = [pytest.mark.root, pytest.mark.engine]

STAGES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
REQUEST = ["example.com/thing=1", "other.org/part=x", "example.com/thing=0"]
PODMANS_VARIABLES = ("PATH", "TERM", "HOME", "HOSTNAME")
MODES = {"/dev/thing": 0o640, "/dev/disk": 0o640, "/dev/pipe": 0o640, "/dev/minor": 0o640, "/dev/null": 0o666}
"""Of nodes whose specification has none."""


@pytest.fixture(scope="module")
def podman(session_directory: Path) -> Podman:
    podman = make_podman(session_directory / "podman-cdi", "")
    write_specs(podman, podman.directory)
    return podman


def write_specs(podman: Podman, directory: Path) -> None:
    """Write two specifications with every kind of edit that version 0.5.0 has, and make what they name."""
    for name, kind, number in (
        ("char", stat.S_IFCHR, os.makedev(240, 7)),
        ("char2", stat.S_IFCHR, os.makedev(240, 300)),
        ("block", stat.S_IFBLK, os.makedev(240, 0)),
        ("pipe", stat.S_IFIFO, 0),
    ):
        os.mknod(directory / name, kind, number)
        (directory / name).chmod(0o640)

    def node(path: str, host: str, **more: Any) -> dict[str, Any]:
        return {"path": path, "hostPath": f"{directory}/{host}", **more}

    def hooks(word: str) -> list[dict[str, Any]]:
        return [
            {"hookName": stage, "path": f"/bin/{word}", "args": [word, stage], "env": ["A=1"], "timeout": 3}
            for stage in STAGES
        ]

    def mount(path: str, **more: Any) -> dict[str, Any]:
        return {"hostPath": str(directory), "containerPath": path, "options": ["ro", "rbind", "rprivate"], **more}

    thing = {
        "cdiVersion": "0.5.0",
        "kind": "example.com/thing",
        "devices": [
            {
                "name": "0",
                "containerEdits": {
                    "env": ["DEVICE=0", "SAME=0"],
                    "deviceNodes": [
                        node("/dev/thing", "char", permissions="rw"),
                        node("/dev/disk", "block", permissions="r"),
                        node("/dev/pipe", "pipe"),
                        node("/dev/minor", "char2", minor=9),
                        node("/dev/gone", "gone", type="c", major=511, minor=4, fileMode=0o600, uid=0, gid=6),
                        node("/dev/gone-pipe", "gone", type="p"),
                        node("/dev/unbuffered", "gone", type="u", major=4),
                        {"path": "/dev/null"},
                    ],
                    "hooks": hooks("device"),
                    "mounts": [mount("/opt/a/b/c"), mount("/opt/a")],
                },
            },
            {
                "name": "1",
                "containerEdits": {
                    "env": ["DEVICE=1"],
                    "deviceNodes": [node("/dev/thing", "char2"), node("/dev/last", "char", fileMode=0o777, uid=3)],
                    "mounts": [mount("/opt/a/b"), mount("/opt/c"), mount("/opt/a", options=["bind"])],
                },
            },
        ],
        "containerEdits": {"env": ["COMMON=1", "SAME=common"], "hooks": hooks("common"), "mounts": [mount("/z")]},
    }
    part = {
        "cdiVersion": "0.5.0",
        "kind": "other.org/part",
        "devices": [
            {"name": "x", "containerEdits": {"env": ["PART=x=y", "EMPTY="], "mounts": [mount("/opt/c", type="none")]}}
        ],
        "containerEdits": {"mounts": [mount("/tmp", type="tmpfs", options=["size=1m"])]},
    }
    for name, spec in (("b.json", thing), ("a.yaml", part)):
        (podman.cdi / name).write_text(json.dumps(spec))
        (podman.cdi / name).chmod(0o644)


def comparable(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without what Podman writes in no fixed order: its own variables, mounts of equal depth."""
    process = config["process"]
    process["env"] = [entry for entry in process["env"] if entry.partition("=")[0] not in PODMANS_VARIABLES]
    depths = [mount["destination"].count("/") for mount in config["mounts"]]
    assert depths == sorted(depths)
    config["mounts"].sort(key=lambda mount: mount["destination"])
    return config


def as_we_do(config: dict[str, Any]) -> dict[str, Any]:
    """Return Podman's configuration with what we do otherwise on purpose, as ocigpu.cdi.inject says.

    Its library of CDI 0.5.0 does not fill in modes; newer ones do.
    """
    process, linux = config["process"], config["linux"]
    process["env"] = list({entry.partition("=")[0]: entry for entry in process["env"]}.values())
    rules = linux["resources"]["devices"]
    linux["resources"]["devices"] = [rule for index, rule in enumerate(rules) if rule not in rules[:index]]
    for node in linux["devices"]:
        if node["type"] == "p":
            del node["major"], node["minor"]
        if node["path"] in MODES:
            assert "fileMode" not in node
            node["fileMode"] = MODES[node["path"]]
    return config


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="plain"),
        pytest.param(("--user=1000:100", "--env=SAME=image"), id="user and variables"),
        pytest.param(("--volume=/etc:/opt/a", "--volume=/etc:/opt/b", "--volume=/etc:/z"), id="mounts"),
        pytest.param(("--device=/dev/full:/dev/thing", "--device=/dev/zero:/dev/other:r"), id="devices"),
    ],
)
def test_podman_makes_of_specifications_what_we_make_of_them(
    podman: Podman,
    work_directory: Path,
    rootfs: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
) -> None:
    monkeypatch.setattr(cache, "SYSTEM_DIRECTORY", str(work_directory / "cache"))
    ours = podman.write_config([], rootfs("glibc"), *options)
    theirs = podman.write_config(REQUEST, rootfs("glibc"), *options)
    resolved = read_registry(Settings(cdi_spec_dirs=(str(podman.cdi),))).resolve(REQUEST)
    inject(ours, resolved.edits)
    assert comparable(ours) == comparable(as_we_do(theirs))
