"""The rules of a specification: tables of good and bad ones, and any data at all."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.cdi.check import MAX_DEVICES, SPEC, check_spec
from ocigpu.cdi.document import parse_document
from ocigpu.cdi.values import MAX_PROBLEMS

VENDOR = Path(__file__).parents[1] / "recorded/vendor-cdi-8gpu.yaml"
NODE = {"path": "/dev/a"}


def spec(edits: Any = None, **fields: Any) -> dict[str, Any]:
    """Return a specification with one device, of the newest version."""
    edits = {"deviceNodes": [NODE], **(edits or {})}
    devices = [{"name": "dev", "containerEdits": edits}]
    return {"cdiVersion": "1.1.0", "kind": "vendor.com/class", "devices": devices, **fields}


def device(**fields: Any) -> dict[str, Any]:
    return spec(devices=[{"name": "dev", "containerEdits": {"deviceNodes": [NODE]}, **fields}])


def errors(data: Any) -> list[tuple[str, str]]:
    return [(problem.where, problem.message) for problem in check_spec(data).errors]


def warnings(data: Any) -> list[tuple[str, str]]:
    return [(problem.where, problem.message) for problem in check_spec(data).problems if problem.severity == "warning"]


def full_spec() -> dict[str, Any]:
    """Return a specification with every field of version 1.1.0."""
    edits = {
        "env": ["A=b", "C="],
        "deviceNodes": [
            {"path": "/dev/a", "hostPath": "/dev/b", "type": "c", "major": 195, "minor": 255, "fileMode": 438,
             "permissions": "rw", "uid": 0, "gid": 4294967295},
            {"path": "/dev/p", "type": "p"},
        ],
        "netDevices": [{"hostInterfaceName": "eth0", "name": "net0"}, {"hostInterfaceName": "eth1", "name": "net1"}],
        "hooks": [{"hookName": "createContainer", "path": "/usr/bin/x", "args": ["x", ""], "env": ["A=b"],
                   "timeout": 3}],
        "mounts": [{"hostPath": "/a", "containerPath": "/b", "options": ["ro", "rbind"], "type": "bind"}],
        "intelRdt": {"closID": "x", "l3CacheSchema": "L3:0=f", "memBwSchema": "MB:0=20", "schemata": ["a"],
                     "enableMonitoring": True},
        "additionalGids": [5, 4294967295],
    }  # fmt: skip
    return spec(edits, annotations={"vendor.com/a": "b"}, containerEdits=edits)


def test_a_specification_with_every_field_has_no_problem_and_stays_as_it_is() -> None:
    checked = check_spec(full_spec())
    assert checked.problems == ()
    assert checked.spec == full_spec()


def test_the_vendors_specification_has_no_problem_and_stays_as_it_is() -> None:
    data = yaml.safe_load(VENDOR.read_text())
    checked = check_spec(data)
    assert checked.problems == ()
    assert checked.spec == data


def mount(**fields: Any) -> dict[str, Any]:
    return spec({"mounts": [{"hostPath": "/a", "containerPath": "/b", "options": ["bind"], **fields}]})


def node(**fields: Any) -> dict[str, Any]:
    return spec({"deviceNodes": [{"path": "/dev/a", **fields}]})


def hook(**fields: Any) -> dict[str, Any]:
    return spec({"hooks": [{"hookName": "prestart", "path": "/a", **fields}]})


def rdt(**fields: Any) -> dict[str, Any]:
    return spec({"intelRdt": fields})


def net(*pairs: tuple[str, str]) -> dict[str, Any]:
    return spec({"netDevices": [{"hostInterfaceName": host, "name": name} for host, name in pairs]})


GOOD = {
    "a version with v": spec(cdiVersion="v1.1.0"),
    "an env of a device only": device(containerEdits={"env": ["A="]}),
    "a hook of a device only": device(containerEdits={"hooks": [{"hookName": "poststop", "path": "/x"}]}),
    "a mount of a device only": device(
        containerEdits={"mounts": [{"hostPath": "/a", "containerPath": "/b", "options": ["ro", "bind"]}]}
    ),
    "a file system of its own": mount(hostPath="tmpfs", type="tmpfs", options=["nosuid"]),
    "a file system without options": mount(hostPath="none", type="tmpfs", options=None),
    "an empty intelRdt of a device only": device(containerEdits={"intelRdt": {}}),
    "a group of a device only": device(containerEdits={"additionalGids": [1]}),
    "a net device of a device only": device(containerEdits={"netDevices": [{"hostInterfaceName": "a", "name": "b"}]}),
    "empty common edits": spec(containerEdits={}),
    "null common edits": spec(containerEdits=None),
    "the root class of RDT": rdt(closID="/"),
    "a long class of RDT": rdt(closID="x" * 4095),
    "a hyphen in a device": device(name="GPU-4d4f434b-0000-0000-0000-000000000000"),
    "a colon in a device": device(name="0:0"),
    "env with = in its value": spec({"env": ["A=b=c"]}),
    "a number with a fraction of zero": node(major=195.0, type="c"),
    "the largest numbers": node(major=2**63 - 1, minor=-(2**63), uid=2**32 - 1),
    "names of two dots in a path": mount(hostPath="/a/..b/...", containerPath="/a.."),
    "a path that is not ASCII": mount(hostPath="/é", containerPath="/\u00a0"),
}
for _letters in ("r", "w", "m", "rw", "mrw", "rwm", ""):
    GOOD[f"permissions {_letters!r}"] = node(permissions=_letters)
for _type in ("", "b", "c", "p"):
    GOOD[f"type {_type!r}"] = node(type=_type, major=1)
for _hook in ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"):
    GOOD[f"hook {_hook}"] = hook(hookName=_hook, env=["A=b"])


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD)
def test_a_good_specification_has_no_problem(data: dict[str, Any]) -> None:
    checked = check_spec(data)
    assert checked.problems == ()
    assert check_spec(checked.spec) == checked


EDITS = "devices[0].containerEdits"
BAD: dict[str, tuple[Any, str, str]] = {
    "nothing": (None, "", "no data"),
    "a list": ([], "", "must be an object, not a list"),
    "text": ("x", "", "must be an object, not text"),
    "no version": (spec(cdiVersion=None), "cdiVersion", 'invalid version ""'),
    "an old version": (spec(cdiVersion="0.1.0"), "cdiVersion", "the spec version must be at least v0.3.0"),
    "a version with a patch": (spec(cdiVersion="0.7.1"), "cdiVersion", 'invalid version "0.7.1"'),
    "a version that YAML makes a number": (spec(cdiVersion=0.7), "cdiVersion", 'invalid version "0.7": it has three'),
    "a version with vv": (spec(cdiVersion="vv0.7.0"), "cdiVersion", "invalid version"),
    "no kind": (spec(kind=None), "kind", 'invalid kind ""'),
    "a kind without class": (spec(kind="vcom"), "kind", "vendor/class"),
    "a class with /": (spec(kind="v.com/a/b"), "kind", 'character "/"'),
    "a vendor that begins with a digit": (spec(kind="0.com/a"), "kind", "does not start with a letter"),
    "no devices": (spec(devices=None), "devices", "invalid spec, no devices"),
    "an empty list of devices": (spec(devices=[]), "devices", "invalid spec, no devices"),
    "devices as an object": (spec(devices={}), "devices", "must be a list, not an object"),
    "a null device": (spec(devices=[None]), "devices[0]", "must be an object, not null"),
    "too many devices": (spec(devices=[{}] * (MAX_DEVICES + 1)), "devices", "more than 65536"),
    "no device name": (device(name=None), "devices[0].name", "the device name is empty"),
    "a device name that is a path": (device(name="../x"), "devices[0].name", "does not start and end"),
    "a device name with a slash": (device(name="a/b"), "devices[0].name", 'character "/"'),
    "no edits": (device(containerEdits=None), EDITS, "invalid device, empty device edits"),
    "empty edits": (device(containerEdits={}), EDITS, "invalid device, empty device edits"),
    "edits of empty lists": (device(containerEdits={"env": []}), EDITS, "invalid device, empty device edits"),
    "edits as a list": (device(containerEdits=[]), EDITS, "must be an object, not a list"),
    "env as text": (spec({"env": "A=b"}), f"{EDITS}.env", "must be a list, not text"),
    "an empty device path": (node(path=""), f"{EDITS}.deviceNodes[0].path", "invalid (empty) device path"),
    "no device path": (node(path=None), f"{EDITS}.deviceNodes[0].path", "invalid (empty) device path"),
    "a device type": (node(type="x"), f"{EDITS}.deviceNodes[0].type", 'invalid type "x"'),
    "permissions": (node(permissions="rx"), f"{EDITS}.deviceNodes[0].permissions", 'invalid permissions "rx"'),
    "a major as text": (node(major="195"), f"{EDITS}.deviceNodes[0].major", "must be a whole number, not text"),
    "a major that is true": (node(major=True), f"{EDITS}.deviceNodes[0].major", "not true or false"),
    "a major with a fraction": (node(major=1.5), f"{EDITS}.deviceNodes[0].major", "must be a whole number"),
    "a major out of range": (node(major=2**63), f"{EDITS}.deviceNodes[0].major", "must be a number from"),
    "a negative uid": (node(uid=-1), f"{EDITS}.deviceNodes[0].uid", "must be a number from 0 to 4294967295"),
    "a mode as text": (node(fileMode="0666"), f"{EDITS}.deviceNodes[0].fileMode", "must be a whole number, not text"),
    "a group out of range": (spec({"additionalGids": [2**32]}), f"{EDITS}.additionalGids[0]", "from 0 to 4294967295"),
    "a mount without host path": (mount(hostPath=""), f"{EDITS}.mounts[0].hostPath", "invalid mount, empty host path"),
    "a mount without target": (mount(containerPath=None), f"{EDITS}.mounts[0].containerPath",
                               "invalid mount, empty container path"),
    "a hook's name": (hook(hookName="createcontainer"), f"{EDITS}.hooks[0].hookName", "invalid hook name"),
    "a hook without name": (hook(hookName=""), f"{EDITS}.hooks[0].hookName", "empty name"),
    "a hook without path": (hook(path=""), f"{EDITS}.hooks[0].path", "with empty path"),
    "a hook's env": (hook(env=["A"]), f"{EDITS}.hooks[0].env[0]", "invalid environment variable"),
    "a hook's timeout": (hook(timeout=-1), f"{EDITS}.hooks[0].timeout", "must be a number from"),
    "monitoring as text": (rdt(enableMonitoring="true"), f"{EDITS}.intelRdt.enableMonitoring", "must be true or false"),
    "a field of RDT that was removed": (rdt(enableCMT=True), f"{EDITS}.intelRdt.enableCMT", "since CDI 1.1.0"),
    "a net device without name": (net(("a", "")), f"{EDITS}.netDevices[0].name", "empty name"),
    "a net device without host name": (net(("", "a")), f"{EDITS}.netDevices[0].hostInterfaceName",
                                       "empty hostInterfaceName"),
    "a net device twice": (net(("a", "b"), ("a", "c")), f"{EDITS}.netDevices[1].hostInterfaceName", "duplicate hostI"),
    "a net device's name twice": (net(("a", "c"), ("b", "c")), f"{EDITS}.netDevices[1].name", 'duplicate name "c"'),
    "an unknown field": (spec(garbage=1), "", 'unknown field "garbage"'),
    "a misspelt field": (mount(containerpaths="/x"), f"{EDITS}.mounts[0]",
                         "did you mean containerPath?"),
    "a version that is a list": (spec(cdiVersion=[]), "cdiVersion", "must be text, not a list"),
    "a kind that is a list": (spec(kind=[]), "kind", "must be text, not a list"),
    "an annotation with an escape sequence": (spec(annotations={"\x1b[2J": []}), r"annotations.\x1b[2J", "not a list"),
    "annotations as a list": (spec(annotations=["a"]), "annotations", "must be an object, not a list"),
    "an annotation that is a list": (spec(annotations={"a": []}), "annotations.a", "must be text, not a list"),
    "NUL in an argument": (hook(args=["a\0b"]), f"{EDITS}.hooks[0].args[0]", "contains a NUL character"),
    "half a character": (hook(args=["\ud800"]), f"{EDITS}.hooks[0].args[0]", "is not valid Unicode"),
    "an argument that is null": (hook(args=[None]), f"{EDITS}.hooks[0].args[0]", "must be text, not null"),
    "a number too large for text": (hook(args=[2**64]), f"{EDITS}.hooks[0].args[0]", "must be text, not a number"),
}  # fmt: skip
for _value in ("", "A", "=x", "="):
    BAD[f"env {_value!r}"] = spec({"env": [_value]}), f"{EDITS}.env[0]", "invalid environment variable"
for _value in (".", "..", "a/b", "//", "a\nb", "x" * 4096):
    BAD[f"RDT class {_value[:4]!r}"] = rdt(closID=_value), f"{EDITS}.intelRdt.closID", "invalid ClosID"
for _value in ("/a/../b", "..", "../a", "/a/.."):
    BAD[f"traversal {_value}"] = mount(containerPath=_value), f"{EDITS}.mounts[0].containerPath", '".." component'
for _value in ("/a\nb", "/a\x7f", "/\x1b[0m"):
    BAD[f"control {_value!r}"] = hook(path=_value), f"{EDITS}.hooks[0].path", "control character"
for _value in ("_a", "a-", "a b", "é"):
    BAD[f"device {_value}"] = device(name=_value), "devices[0].name", "device name"


@pytest.mark.parametrize(("data", "where", "message"), BAD.values(), ids=BAD)
def test_a_bad_specification_is_refused_at_the_place(data: Any, where: str, message: str) -> None:
    found = errors(data)
    assert len(found) == 1, found
    assert found[0][0] == where
    assert message in found[0][1]
    assert check_spec(data).errors[0].text.isprintable()
    assert len(check_spec(data).errors[0].text) < 500


@pytest.mark.parametrize("where", ["path", "hostPath"], ids=["path of a device node", "host path of a device node"])
def test_every_path_of_a_device_node_is_checked(where: str) -> None:
    assert '".." component' in errors(node(**{where: "/dev/../x"}))[0][1]


WARNED: dict[str, tuple[Any, str, str]] = {
    "permissions that repeat": (node(permissions="rrwm"), f"{EDITS}.deviceNodes[0].permissions", "repeat a letter"),
    "the word none": (node(permissions="none"), f"{EDITS}.deviceNodes[0].permissions", "refused by engines"),
    "type u": (node(type="u"), f"{EDITS}.deviceNodes[0].type", "never matches"),
    "a decimal mode": (node(fileMode=666), f"{EDITS}.deviceNodes[0].fileMode", "666 is 0o1232"),
    "a relative device path": (node(path="dev/a"), f"{EDITS}.deviceNodes[0].path", "not absolute"),
    "a relative host path": (mount(hostPath="a"), f"{EDITS}.mounts[0].hostPath", "not absolute"),
    "a mount without bind": (mount(options=["ro"]), f"{EDITS}.mounts[0].options", "no such device"),
    "a mount without options": (mount(options=None), f"{EDITS}.mounts[0].options", "no such device"),
    "a bind mount by its type only": (mount(options=["ro"], type="bind"), f"{EDITS}.mounts[0].options", "no such"),
    "a relative target": (mount(containerPath="a"), f"{EDITS}.mounts[0].containerPath", "not absolute"),
    "a relative hook": (hook(path="ocigpu-hook"), f"{EDITS}.hooks[0].path", "not absolute"),
    "a hook with the image's environment": (hook(hookName="createContainer"), f"{EDITS}.hooks[0]", "without env"),
    "a timeout of 0": (hook(timeout=0), f"{EDITS}.hooks[0].timeout", "greater than 0"),
    "group 0": (spec({"additionalGids": [0]}), f"{EDITS}.additionalGids[0]", "ignored"),
    "a long class": (spec(kind="v.com/" + "c" * 64), "kind", "longer than 63"),
    "a long vendor": (spec(kind="v" * 254 + "/cc"), "kind", "longer than 253"),
    "a vendor of one letter": (spec(kind="v/cc"), "kind", "one letter"),
    "a bad annotation": (spec(annotations={"bad key!!": "x"}), "annotations", "bad key!!"),
    "large annotations": (spec(annotations={"a": "x" * 262144}), "annotations", "more than 262144"),
    "a field in another case": (spec({"additionalGIDs": [5]}), f"{EDITS}.additionalGids", 'written "additionalGIDs"'),
}


@pytest.mark.parametrize(("data", "where", "message"), WARNED.values(), ids=WARNED)
def test_what_only_the_text_of_the_specification_asks_for_is_a_warning(data: Any, where: str, message: str) -> None:
    assert errors(data) == []
    found = warnings(data)
    assert len(found) == 1, found
    assert found[0][0] == where
    assert message in found[0][1]


COERCED = [
    (0, "0"), (True, "true"), (False, "false"), (1.5, "1.5"), (8, "8"), (-5, "-5"), (1e3, "1000"), (1e5, "100000"),
    (1e6, "1e+06"), (1.25e6, "1.25e+06"), (0.1, "0.1"), (1e-4, "0.0001"), (1e-5, "1e-05"),
    (123456789.0, "1.2345679e+08"),
    (2**64 - 1, "18446744073709551615"), (0.0, "0"), (16777216.0, "1.6777216e+07"), (3.14159274, "3.1415927"),
    (3.4028234663852886e38, "3.4028235e+38"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), COERCED)
def test_a_scalar_becomes_the_text_that_the_reference_library_makes_of_it(value: Any, text: str) -> None:
    checked = check_spec(hook(args=[value]))
    assert checked.problems == ()
    assert checked.spec["devices"][0]["containerEdits"]["hooks"][0]["args"] == [text]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_what_is_no_number_of_single_precision_does_not_become_text(value: float) -> None:
    assert errors(hook(args=[value])) == [(f"{EDITS}.hooks[0].args[0]", "must be text, not a number")]


def test_field_names_match_whatever_their_case_and_become_canonical() -> None:
    data = {"CDIVERSION": "0.7.0", "Kind": "v.com/cc", "Devices": [
        {"NAME": 0, "containeredits": {"additionalGIDs": [5],
                                       "DeviceNodes": [{"PATH": "/dev/a", "uid": None}]}}]}  # fmt: skip
    checked = check_spec(data)
    assert checked.errors == ()
    assert checked.spec == {"cdiVersion": "0.7.0", "kind": "v.com/cc", "devices": [
        {"name": "0", "containerEdits": {"additionalGids": [5], "deviceNodes": [{"path": "/dev/a"}]}}]}  # fmt: skip
    assert len(checked.problems) == 8


@pytest.mark.parametrize("names", [("kind", "KIND"), ("Kind", "KIND")])
def test_a_field_given_in_two_cases_is_refused(names: tuple[str, str]) -> None:
    data = spec()
    kind = data.pop("kind")
    data.update(dict.fromkeys(names, kind))
    assert errors(data) == [("kind", 'given twice, also as "KIND"')]


def test_a_duplicate_device_names_both_places() -> None:
    one = {"name": "a", "containerEdits": {"env": ["A=b"]}}
    found = errors(spec(devices=[one, {**one, "name": "b"}, one]))
    assert found == [("devices[2].name", 'invalid spec, multiple device "a": also devices[0]')]


@pytest.mark.parametrize(("version", "accepted"), [("0.6.0", False), ("0.7.0", True), ("0.8.0", True), ("1.0.0", True)])
def test_a_version_older_than_what_is_used_is_refused(version: str, accepted: bool) -> None:
    found = errors(spec({"additionalGids": [5]}, cdiVersion=version))
    message = f"the spec version must be at least v0.7.0 (for what it uses), and is {version}"
    assert found == ([] if accepted else [("cdiVersion", message)])


def test_every_problem_of_a_specification_is_found_at_once() -> None:
    data = spec({"env": ["A"], "mounts": [{"hostPath": "/a"}], "hooks": [{"path": "x"}]}, kind="x", cdiVersion="2")
    assert len(errors(data)) == 5


def test_no_more_than_100_problems_are_found_and_errors_come_first() -> None:
    checked = check_spec(spec({"env": ["A"] * 1000}))
    assert len(checked.problems) == MAX_PROBLEMS
    nodes = [{"path": "relative"}] * 1000
    checked = check_spec(spec({"deviceNodes": nodes, "env": ["A"]}))
    assert len(checked.problems) == MAX_PROBLEMS
    assert [problem.severity for problem in checked.problems[:2]] == ["error", "warning"]


def test_ten_thousand_devices_are_checked() -> None:
    edits = {"deviceNodes": [NODE]}
    devices = [{"name": f"d{index}", "containerEdits": edits} for index in range(10_000)]
    assert check_spec(spec(devices=devices)).problems == ()
    assert [where for where, _ in errors(spec(devices=[*devices, devices[0]]))] == ["devices[10000].name"]


def test_the_data_that_is_checked_is_not_changed() -> None:
    data = {**full_spec(), "KIND": "v.com/c", "x": None}
    before = copy.deepcopy(data)
    check_spec(data)
    assert data == before


# Any data

NAMES = st.sampled_from([*SPEC,
    "name", "env", "deviceNodes", "netDevices", "hooks", "mounts", "intelRdt", "additionalGids", "path", "hostPath",
    "type", "major", "fileMode", "permissions", "uid", "hookName", "args", "timeout", "containerPath", "options",
    "closID", "schemata", "hostInterfaceName", "NAME", "Path", "x"])  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["1.1.0", "v.com/c", "/dev/a", "A=b", "c", "rw", "dev", "createContainer"]),
)  # fmt: skip
JSON_DATA = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=5), inner, max_size=5),
    max_leaves=30,
)


@given(st.text(min_size=1))
def test_a_place_is_printable_whatever_the_names_are(name: str) -> None:
    for data in ({name: 1}, spec(annotations={name: []}), spec({name: {name: 1}})):
        assert all(problem.text.isprintable() for problem in check_spec(data).problems)


@given(JSON_DATA)
def test_any_data_is_answered_with_problems_and_a_fixed_canonical_form(data: Any) -> None:
    checked = check_spec(data)
    assert len(checked.problems) <= MAX_PROBLEMS
    if not checked.errors:
        again = check_spec(checked.spec)
        assert again.spec == checked.spec
        assert again.errors == ()


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
PATHS = TEXTS.map(lambda text: "/" + text.replace("/", "_").replace(".", "_"))
NODES = st.fixed_dictionaries(
    {"path": PATHS},
    optional={
        "hostPath": PATHS,
        "type": st.sampled_from(["b", "c", "p", ""]),
        "major": st.integers(0, 4095),
        "minor": st.integers(0, 1 << 20),
        "fileMode": st.integers(0, 0o777),
        "permissions": st.sampled_from(["r", "rw", "rwm"]),
        "uid": st.integers(0, (1 << 32) - 1),
    },
)
MOUNTS = st.fixed_dictionaries(
    {"hostPath": PATHS, "containerPath": PATHS}, optional={"options": st.lists(TEXTS), "type": TEXTS}
)
ALL_EDITS = st.fixed_dictionaries(
    {"deviceNodes": st.lists(NODES, min_size=1, max_size=3)},
    optional={
        "env": st.lists(TEXTS.map(lambda text: "A=" + text), max_size=3),
        "mounts": st.lists(MOUNTS, max_size=3),
        "additionalGids": st.lists(st.integers(1, (1 << 32) - 1), max_size=3),
        "intelRdt": st.fixed_dictionaries(
            {}, optional={"schemata": st.lists(TEXTS), "enableMonitoring": st.booleans()}
        ),
    },
)
DEVICES = st.lists(st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9_.:-]{0,5}[A-Za-z0-9])?", fullmatch=True), min_size=1,
                   max_size=3, unique=True)  # fmt: skip


@given(DEVICES, ALL_EDITS, ALL_EDITS)
def test_a_valid_specification_reads_back_the_same_from_json(names: list[str], edits: Any, common: Any) -> None:
    devices = [{"name": name, "containerEdits": edits} for name in names]
    data = spec(devices=devices, containerEdits=common)
    checked = check_spec(data)
    assert {problem.rule for problem in checked.problems} <= {"mount-bind"}
    assert checked.spec == data
    assert parse_document(json.dumps(data).encode(), "x") == data
