"""Versions: which one a specification needs and why, and which engines accept it."""

from typing import Any

import pytest

from ocigpu.cdi.versions import (
    VERSIONS,
    engines_that_refuse,
    is_older,
    minimum_version,
    parse_version,
    read_engines,
    requirements,
)

NODE = {"path": "/dev/a"}
BASE = {"deviceNodes": [NODE]}


def spec(edits: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    device = {"name": "a", "containerEdits": {**BASE, **(edits or {})}}
    return {"cdiVersion": "1.1.0", "kind": "v.com/c", "devices": [device], **fields}


def test_an_empty_specification_needs_the_first_accepted_version() -> None:
    assert minimum_version({}) == "0.3.0"
    assert requirements({}) == ()


EDITS: list[tuple[str, dict[str, Any], str]] = [
    ("nothing", {}, "0.3.0"),
    ("env", {"env": ["A=b"]}, "0.3.0"),
    ("a type of a mount", {"mounts": [{"hostPath": "/a", "containerPath": "/a", "type": "bind"}]}, "0.4.0"),
    ("an empty type of a mount", {"mounts": [{"hostPath": "/a", "containerPath": "/a", "type": ""}]}, "0.3.0"),
    ("a host path of a node", {"deviceNodes": [{"path": "/dev/a", "hostPath": "/dev/b"}]}, "0.5.0"),
    ("an empty host path of a node", {"deviceNodes": [{"path": "/dev/a", "hostPath": ""}]}, "0.3.0"),
    ("intelRdt", {"intelRdt": {"closID": "x"}}, "0.7.0"),
    ("an empty intelRdt", {"intelRdt": {}}, "0.7.0"),
    ("additionalGids", {"additionalGids": [5]}, "0.7.0"),
    ("empty additionalGids", {"additionalGids": []}, "0.3.0"),
    ("netDevices", {"netDevices": [{"hostInterfaceName": "a", "name": "b"}]}, "1.1.0"),
    ("empty netDevices", {"netDevices": []}, "0.3.0"),
    ("schemata", {"intelRdt": {"schemata": ["x"]}}, "1.1.0"),
    ("empty schemata", {"intelRdt": {"schemata": []}}, "1.1.0"),
    ("monitoring", {"intelRdt": {"enableMonitoring": True}}, "1.1.0"),
    ("no monitoring", {"intelRdt": {"enableMonitoring": False}}, "0.7.0"),
]


@pytest.mark.parametrize(("edits", "version"), [row[1:] for row in EDITS], ids=[row[0] for row in EDITS])
def test_edits_need_a_version_at_both_levels(edits: dict[str, Any], version: str) -> None:
    for data in (spec(edits), spec(containerEdits=edits)):
        assert minimum_version(data) == version
        needed = requirements(data)
        assert max((need.version for need in needed), key=VERSIONS.index, default="0.3.0") == version
        assert all(is_older("0.3.0", need.version) and need.where and need.why for need in needed)


@pytest.mark.parametrize(
    ("data", "version", "where"),
    [
        (spec(kind="v.com/a.b"), "0.6.0", "kind"),
        (spec(annotations={"a": "b"}), "0.6.0", "annotations"),
        (spec(devices=[{"name": "a", "annotations": {"a": "b"}, "containerEdits": BASE}]), "0.6.0",
         "devices[0].annotations"),
        (spec(devices=[{"name": "a", "containerEdits": BASE}, {"name": "0", "containerEdits": BASE}]), "0.5.0",
         "devices[1].name"),
        (spec({"mounts": [{}, {"type": "x"}]}), "0.4.0", "devices[0].containerEdits.mounts[1].type"),
        (spec(containerEdits={"netDevices": [{}]}), "1.1.0", "containerEdits.netDevices"),
    ],
)  # fmt: skip
def test_a_requirement_names_its_place(data: dict[str, Any], version: str, where: str) -> None:
    assert minimum_version(data) == version
    assert [(need.version, need.where) for need in requirements(data)] == [(version, where)]


def test_the_newest_of_several_requirements_counts() -> None:
    data = spec({"additionalGids": [1], "mounts": [{"type": "x"}]}, annotations={"a": "b"})
    assert minimum_version(data) == "0.7.0"
    assert [need.version for need in requirements(data)] == ["0.6.0", "0.4.0", "0.7.0"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_known_version_may_have_one_leading_v(version: str) -> None:
    assert parse_version(version) == version
    assert parse_version("v" + version) == version
    assert parse_version("vv" + version) == ""


@pytest.mark.parametrize("text", ["", "v", "0.7", "0.7.1", "1.0", "1.2.0", "latest", "0.6.0 ", "V0.6.0", "0.6.0-rc1"])
def test_any_other_version_is_unknown(text: str) -> None:
    assert parse_version(text) == ""


def test_every_engine_accepts_a_known_version_and_is_listed_from_old_to_new() -> None:
    for name in dict.fromkeys(engine.name for engine in read_engines()):
        rows = [engine for engine in read_engines() if engine.name == name]
        assert all(parse_version(row.newest) == row.newest for row in rows)
        assert len({row.releases for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("version", "refuses", "accepts"),
    [
        ("0.5.0", ("Podman", "4.1 to 4.2"), ("Podman", "4.3 to 4.6")),
        ("0.6.0", ("Podman", "4.3 to 4.6"), ("Podman", "4.7 to 5.0")),
        ("0.7.0", ("containerd", "1.7.12 to 1.7.15"), ("containerd", "1.7.16 to 1.7.26")),
        ("1.1.0", ("Docker", "28.1 to 29.1"), ("Docker", "29.2 and later")),
    ],
)
def test_engines_that_refuse_a_version_are_those_whose_newest_is_older(
    version: str, refuses: tuple[str, str], accepts: tuple[str, str]
) -> None:
    found = {(engine.name, engine.releases) for engine in engines_that_refuse(version)}
    assert refuses in found
    assert accepts not in found


def test_no_engine_refuses_the_first_accepted_version() -> None:
    assert engines_that_refuse("0.3.0") == ()
