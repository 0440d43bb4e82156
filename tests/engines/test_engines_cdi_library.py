"""The CDI library as Podman has it beside our injection: one specification, one configuration, the same edits."""

import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.podman import Podman, make_podman
from support.products import one_in

from ocigpu.bundle.inject import inject
from ocigpu.cdi.registry import read_registry
from ocigpu.core.errors import CdiError
from ocigpu.core.settings import Settings
from ocigpu.system import store as cache

pytestmark = [pytest.mark.root, pytest.mark.engine]

STAGES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
REQUEST = ["example.com/thing=1", "other.org/part=x", "example.com/thing=0"]
PODMANS_VARIABLES = ("PATH", "TERM", "HOME", "HOSTNAME")
VARIABLES = ("COMMON", "gpu", "nic")
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


def drop_repeated_rules(config: dict[str, Any]) -> None:
    resources = config["linux"].get("resources", {})
    if rules := resources.get("devices"):
        resources["devices"] = [rule for index, rule in enumerate(rules) if rule not in rules[:index]]


def as_we_do(config: dict[str, Any]) -> dict[str, Any]:
    """Return Podman's configuration with what we do otherwise on purpose, as ocigpu.bundle.inject says.

    Its library of CDI 0.5.0 does not fill in modes; newer ones do.
    """
    process, linux = config["process"], config["linux"]
    process["env"] = list({entry.partition("=")[0]: entry for entry in process["env"]}.values())
    drop_repeated_rules(config)
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
    drop_repeated_rules(ours)  # Podman 5.8 itself writes one twice
    inject(ours, resolved.edits)
    assert comparable(ours) == comparable(as_we_do(theirs))


def document(edits: str, name: str = "a", more: str = "") -> str:
    return (
        f"cdiVersion: 0.5.0\nkind: x.com/gpu\ndevices:\n- name: {name}\n  containerEdits: {edits}\n"
        f"- name: other\n  containerEdits: {{env: [OTHER=1]}}\n{more}"
    )


def node(fields: str) -> str:
    return document(f"{{deviceNodes: [{{path: /dev/null, {fields}}}]}}")


def hook(fields: str) -> str:
    return document(f"{{hooks: [{{hookName: prestart, path: /x, {fields}}}]}}")


GOOD = document("{env: [A=1]}")
JSON = json.dumps(
    {"cdiVersion": "0.5.0", "kind": "x.com/gpu", "devices": [{"name": "a", "containerEdits": {"env": ["A=1"]}}]}
)
TAKEN: dict[str, tuple[dict[str, str], str]] = {
    "JSON in a file of YAML": ({"a.yaml": JSON}, "a"),
    "YAML in a file of JSON": ({"a.json": GOOD}, "a"),
    "a hidden file": ({".a.json": GOOD}, "a"),
    "a name that is a number": ({"a.yaml": document("{env: [A=1]}", "0")}, "0"),
    "a name that is an octal number": ({"a.yaml": document("{env: [A=1]}", "010")}, "8"),
    "a name that is a fraction": ({"a.yaml": document("{env: [A=1]}", "1.50")}, "1.5"),
    "a name that is true": ({"a.yaml": document("{env: [A=1]}", "true")}, "true"),
    "a name with a colon": ({"a.yaml": document("{env: [A=1]}", "'0:0'")}, "0:0"),
    "fields in another case": (
        {"a.yaml": GOOD.replace("kind", "KinD").replace("containerEdits", "CONTAINEREDITS")},
        "a",
    ),
    "arguments that YAML makes something of": (
        {"a.yaml": hook("args: [1.50, yes, y, 0x10, 1e3, 2001-12-14, 1:20]")},
        "a",
    ),
    "a timeout of 0 and a relative path": ({"a.yaml": hook("path: x, timeout: 0").replace("path: /x, ", "")}, "a"),
    "permissions that repeat": ({"a.yaml": node("permissions: rrwm")}, "a"),
    "an octal mode": ({"a.yaml": node("fileMode: 0640")}, "a"),
    "an octal mode with o": ({"a.yaml": node("fileMode: 0o640")}, "a"),
    "a number with a fraction of zero": ({"a.yaml": node("type: c, major: 1.0, minor: 3")}, "a"),
    "a relative mount": ({"a.yaml": document("{mounts: [{hostPath: a, containerPath: b}]}")}, "a"),
    "an alias": ({"a.yaml": document("&x {env: [A=1]}", more="- {name: b, containerEdits: *x}\n")}, "b"),
    "a merge": ({"a.yaml": document("&x {env: [A=1]}", more="- {name: b, containerEdits: {<<: *x}}\n")}, "b"),
    "empty common edits": ({"a.yaml": document("{env: [A=1]}", more="containerEdits:\n")}, "a"),
    "a broken file beside a good one": ({"a.yaml": GOOD, "b.json": "{"}, "a"),
    "another device of files in conflict": ({"a.yaml": GOOD, "b.yaml": GOOD.replace("other", "b")}, "b"),
}
REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "the extension yml": ({"a.yml": GOOD}, "a"),
    "an extension in capital letters": ({"a.YAML": GOOD, "b.JSON": JSON}, "a"),
    "a file of a subdirectory": ({"sub/a.json": GOOD}, "a"),
    "two files in conflict": ({"a.yaml": GOOD, "b.yaml": GOOD}, "a"),
    "an unknown field": ({"a.yaml": GOOD + "garbage: 1\n"}, "a"),
    "a duplicate key": ({"a.yaml": GOOD + "kind: x.com/gpu\n"}, "a"),
    "an unknown version": ({"a.yaml": GOOD.replace("0.5.0", "0.5.1")}, "a"),
    "annotations before 0.6.0": ({"a.yaml": GOOD + "annotations: {a: b}\n"}, "a"),
    "a vendor that begins with _": ({"a.yaml": GOOD.replace("x.com", "_x.com")}, "a"),
    "a duplicate device": ({"a.yaml": GOOD + "- {name: a, containerEdits: {env: [A=1]}}\n"}, "a"),
    "no devices": ({"a.yaml": "cdiVersion: 0.5.0\nkind: x.com/gpu\ncontainerEdits: {env: [A=1]}\n"}, "a"),
    "an empty file": ({"a.yaml": ""}, "a"),
    "empty edits": ({"a.yaml": document("{}")}, "a"),
    "null edits": ({"a.yaml": document("")}, "a"),
    "a variable without =": ({"a.yaml": document("{env: [A]}")}, "a"),
    "a variable without a name": ({"a.yaml": document("{env: [=x]}")}, "a"),
    "a variable that is a number": ({"a.yaml": document("{env: [5]}")}, "a"),
    "an unknown stage": ({"a.yaml": hook("args: []").replace("prestart", "createcontainer")}, "a"),
    "unknown permissions": ({"a.yaml": node("permissions: x")}, "a"),
    "an unknown type": ({"a.yaml": node("type: x")}, "a"),
    "another type than the host's": ({"a.yaml": node("type: b")}, "a"),
    "type u without a major": ({"a.yaml": node("type: u")}, "a"),
    "a major that is text": ({"a.yaml": node("type: c, major: '1', minor: 3")}, "a"),
    "a mode that is text": ({"a.yaml": node("fileMode: '0666'")}, "a"),
    "a negative uid": ({"a.yaml": node("uid: -1")}, "a"),
    "a mount without target": ({"a.yaml": document("{mounts: [{hostPath: /a, containerPath: ''}]}")}, "a"),
}


@pytest.mark.parametrize("name", one_in(6, [*TAKEN, *REFUSED]))
def test_podman_takes_and_refuses_the_files_that_we_take_and_refuse(
    podman: Podman,
    work_directory: Path,
    rootfs: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(cache, "SYSTEM_DIRECTORY", str(work_directory / "cache"))
    files, device = TAKEN.get(name) or REFUSED[name]
    specs = work_directory / "cdi"
    for file, text in files.items():
        (specs / file).parent.mkdir(parents=True, exist_ok=True)
        (specs / file).write_text(text)
        (specs / file).chmod(0o644)
    here = podman._replace(cdi=specs)
    request = [f"x.com/gpu={device}"]
    registry = read_registry(Settings(cdi_spec_dirs=(str(specs),)))
    ours: dict[str, Any] = {}
    if name in REFUSED:
        with pytest.raises(AssertionError, match=r"setting up CDI devices: (unresolvable|failed to inject)"):
            here.write_config(request, rootfs("glibc"))
        with pytest.raises(CdiError):
            inject(ours, registry.resolve(request).edits)
        return
    theirs = here.write_config(request, rootfs("glibc"))
    inject(ours, registry.resolve(request).edits)
    assert set(ours.get("process", {}).get("env", ())) <= set(theirs["process"]["env"])
    for mount in ours.get("mounts", ()):
        assert mount in theirs["mounts"]
    for made in ours.get("linux", {}).get("devices", ()):
        (same,) = (entry for entry in theirs["linux"]["devices"] if entry["path"] == made["path"])
        assert made == {"fileMode": MODES["/dev/null"], **same}
    for rule in ours.get("linux", {}).get("resources", {}).get("devices", ()):
        assert rule in theirs["linux"]["resources"]["devices"]
    assert _hooks(ours) == _hooks(theirs)


def _hooks(config: dict[str, Any]) -> list[tuple[Any, ...]]:
    entries = config.get("hooks", {}).get("prestart", [])
    return [(entry["path"], entry.get("args"), entry.get("timeout")) for entry in entries]


def write_definitions(place: Path, layout: dict[str, dict[str, str]]) -> Settings:
    """Write files below low and high: by path the devices, by kind; each device says where it is from."""
    for directory in ("low", "high"):
        (place / directory).mkdir(parents=True)
    for path, kinds in layout.items():
        for kind, names in kinds.items():
            devices = [{"name": name, "containerEdits": {"env": [f"{kind}_{name}={path}"]}} for name in names]
            common = {"env": [f"COMMON_{path.replace('/', '_')}=1"]}
            spec = {"cdiVersion": "0.5.0", "kind": f"x.com/{kind}", "devices": devices, "containerEdits": common}
            (place / path).write_text(json.dumps(spec))
            (place / path).chmod(0o644)
    return Settings(cdi_spec_dirs=(str(place / "low"), str(place / "high")))


def random_layout(seed: int) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return definitions in which no name is in conflict in the low directory, and a request for some of them."""
    chance = random.Random(seed)
    layout: dict[str, dict[str, str]] = {"low/a.json": {"gpu": "abc"}, "low/b.yaml": {"nic": "abc"}}
    for name in ("a.json", "b.yaml", "c.json"):
        names = "".join(chance.sample("abcd", chance.randint(1, 3)))
        layout[f"high/{name}"] = {chance.choice(["gpu", "nic"]): names}
    defined = sorted({f"x.com/{kind}={name}" for item in layout.values() for kind in item for name in item[kind]})
    return layout, chance.sample(defined, 3)


@pytest.mark.parametrize("seed", one_in(4, range(16)))
def test_podman_finds_the_definitions_that_we_find(
    podman: Podman, work_directory: Path, rootfs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Which directory and file wins, what is in conflict, and the order of edits."""
    monkeypatch.setattr(cache, "SYSTEM_DIRECTORY", str(work_directory / "cache"))
    layout, request = random_layout(seed)
    registry = read_registry(write_definitions(work_directory, layout))
    here = podman._replace(cdi=work_directory / "high", etc_cdi=work_directory / "low")
    conflicts = {name for name, _ in registry.conflicts()}
    if conflicts.intersection(request):
        with pytest.raises(AssertionError, match="unresolvable CDI devices"):
            here.write_config(request, rootfs("glibc"))
        with pytest.raises(CdiError, match="conflicting device"):
            registry.resolve(request)
        return
    env = here.write_config(request, rootfs("glibc"))["process"]["env"]
    theirs = [entry for entry in env if entry.partition("_")[0] in VARIABLES]
    ours: dict[str, Any] = {}
    inject(ours, registry.resolve(request).edits)
    assert ours["process"]["env"] == theirs


def test_a_conflict_in_the_low_directory_hides_a_device_from_podman_and_not_from_us(
    podman: Podman, work_directory: Path, rootfs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SYSTEM_DIRECTORY", str(work_directory / "cache"))
    layout = {"low/a.json": {"gpu": "a"}, "low/b.json": {"gpu": "a"}, "high/a.json": {"gpu": "a"}}
    registry = read_registry(write_definitions(work_directory, layout))
    here = podman._replace(cdi=work_directory / "high", etc_cdi=work_directory / "low")
    with pytest.raises(AssertionError, match=r"unresolvable CDI devices x\.com/gpu=a"):
        here.write_config(["x.com/gpu=a"], rootfs("glibc"))
    assert [Path(spec.path).parent.name for spec in registry.resolve(["x.com/gpu=a"]).specs] == ["high"]
