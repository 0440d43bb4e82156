"""What the shim does to a bundle whose container asks for CDI devices: all edits, or an error and the same file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ocigpu.core.errors import OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.entry.arguments import parse_arguments
from ocigpu.runtime import edit_bundle
from ocigpu.system import store as cache
from ocigpu.system.log import Log

SPEC = {
    "cdiVersion": "1.1.0",
    "kind": "example.com/thing",
    "devices": [
        {
            "name": "a",
            "containerEdits": {
                "env": ["THING=a", "NVIDIA_VISIBLE_DEVICES=void"],
                "deviceNodes": [{"path": "/dev/null"}],
                "netDevices": [{"hostInterfaceName": "eth9", "name": "eth0"}],
                "mounts": [{"hostPath": "/proc", "containerPath": "/opt/proc", "options": ["rbind"]}],
                "hooks": [{"hookName": "createContainer", "path": "/bin/true", "env": ["A=1"]}],
                "intelRdt": {"closID": "a"},
                "additionalGids": [44],
            },
        }
    ],
}
NAMESPACES = [{"type": "mount"}]
ANNOTATIONS = {"cdi.k8s.io/plugin_a": "example.com/thing=a"}


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "SYSTEM_DIRECTORY", str(tmp_path / "cache"))
    for name in ("cdi", "bundle"):
        (tmp_path / name).mkdir(0o755)
    (tmp_path / "cdi/a.json").write_text(json.dumps(SPEC))
    (tmp_path / "cdi/a.json").chmod(0o644)
    return tmp_path / "bundle"


def config(**more: Any) -> dict[str, Any]:
    return {"annotations": ANNOTATIONS, "linux": {"namespaces": NAMESPACES}, **more}


def edit(bundle: Path, document: Any) -> Any:
    """Edit the bundle's configuration as the shim does; returns what is in the file then."""
    path = bundle / "config.json"
    path.write_text(json.dumps(document))
    path.chmod(0o640)
    settings = Settings(mode="cdi", cdi_spec_dirs=(str(bundle.parent / "cdi"),), cdi_engine_filters_annotations=True)
    before = path.stat(), path.read_bytes()
    try:
        edit_bundle(parse_arguments(["create", "-b", str(bundle), "c1"]), settings, "/nonexistent/stub", Log())
    except OcigpuError:
        after = path.stat(), path.read_bytes()
        assert (after[0].st_ino, after[0].st_mtime_ns, after[1]) == (before[0].st_ino, before[0].st_mtime_ns, before[1])
        raise
    finally:
        assert os.listdir(bundle) == ["config.json"]
        assert path.stat().st_mode & 0o777 == 0o640
    return json.loads(path.read_bytes())


EMPTY = {
    "nothing": config(),
    "null everywhere": config(
        process={"env": None, "user": {"additionalGids": None}, "capabilities": None},
        linux={"namespaces": NAMESPACES, "devices": None, "resources": None, "netDevices": None, "intelRdt": None},
        mounts=None,
        hooks={"createContainer": None, "prestart": None, "createRuntime": None},
    ),
    "null objects": config(process=None, hooks=None, root=None),
    "null users and rules": config(
        process={"user": None}, linux={"namespaces": NAMESPACES, "resources": {"devices": None}}
    ),
}


@pytest.mark.parametrize("name", EMPTY)
def test_what_is_missing_or_null_is_made(bundle: Path, name: str) -> None:
    result = edit(bundle, EMPTY[name])
    assert result["process"]["env"] == ["THING=a", "NVIDIA_VISIBLE_DEVICES=void"]
    assert result["process"]["user"]["additionalGids"] == [44]
    linux = result["linux"]
    assert [(node["path"], node["major"], node["minor"]) for node in linux["devices"]] == [("/dev/null", 1, 3)]
    assert (linux["netDevices"], linux["intelRdt"]) == ({"eth9": {"name": "eth0"}}, {"closID": "a"})
    assert result["mounts"] == [{"destination": "/opt/proc", "source": "/proc", "options": ["rbind"]}]
    assert result["hooks"]["createContainer"] == [{"path": "/bin/true", "env": ["A=1"]}]
    assert edit(bundle, result) == result


ODD = {
    "process": config(process=[]),
    "process.env": config(process={"env": "A=b"}),
    "process.user": config(process={"user": [0]}),
    "process.user.additionalGids": config(process={"user": {"additionalGids": {}}}),
    "linux.devices": config(linux={"namespaces": NAMESPACES, "devices": {}}),
    "linux.devices[1]": config(linux={"namespaces": NAMESPACES, "devices": [{"path": "/a"}, None]}),
    "linux.devices[0].path": config(linux={"namespaces": NAMESPACES, "devices": [{}]}),
    "linux.netDevices": config(linux={"namespaces": NAMESPACES, "netDevices": []}),
    "mounts": config(mounts={"destination": "/"}),
    "mounts[0]": config(mounts=["/"]),
    "mounts[0].destination": config(mounts=[{"destination": 1}]),
    "hooks": config(hooks=[]),
    "hooks.createContainer": config(hooks={"createContainer": {"path": "/x"}}),
}
if os.geteuid() == 0:  # others declare no rules
    ODD["linux.resources"] = config(linux={"namespaces": NAMESPACES, "resources": []})
    ODD["linux.resources.devices"] = config(linux={"namespaces": NAMESPACES, "resources": {"devices": 0}})


@pytest.mark.parametrize("name", ODD)
def test_what_has_another_type_is_named_and_the_file_stays(bundle: Path, name: str) -> None:
    with pytest.raises(OcigpuError) as caught:
        edit(bundle, ODD[name])
    assert caught.value.code == "OCIGPU-CDI-6"
    assert caught.value.message.startswith(f"config.json: {name} is not a")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "linux", [None, {}, [], {"namespaces": None}, {"namespaces": {}}, {"namespaces": [None, {"type": "user"}]}]
)
def test_a_container_without_a_mount_namespace_is_refused(bundle: Path, linux: Any) -> None:
    with pytest.raises(OcigpuError) as caught:
        edit(bundle, config(linux=linux))
    assert caught.value.code == "OCIGPU-SPEC-3"


@pytest.mark.parametrize("annotations", [None, [], "cdi.k8s.io/a", {"cdi.k8s.io/a": 5}, {"cdi.k8s.io/a": None}, {}])
def test_who_asks_for_nothing_keeps_the_file_whatever_is_in_it(bundle: Path, annotations: Any) -> None:
    document = {"annotations": annotations, "process": 7, "linux": "x", "mounts": None, "hooks": [1]}
    assert edit(bundle, document) == document
