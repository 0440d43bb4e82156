"""containerEdits put into a configuration: every rule of the CDI library, and nothing by halves."""

import copy
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.bundle.inject import inject
from ocigpu.core.cdi_names import HOOK_STAGES
from ocigpu.core.config_json import HOOK_ENVIRONMENT
from ocigpu.core.errors import CdiError

Config = dict[str, Any]
Lstat = Callable[[str], os.stat_result]


def host(**nodes: tuple[str, int, int, int]) -> Lstat:
    """Return an lstat of a host with these nodes below /dev (type, major, minor, mode), and every path of /host."""
    formats = {"b": stat.S_IFBLK, "c": stat.S_IFCHR, "p": stat.S_IFIFO, "-": stat.S_IFREG, "l": stat.S_IFLNK}

    def lstat(path: str) -> os.stat_result:
        name = path.removeprefix("/dev/")
        if name not in nodes and not path.startswith("/host/"):
            raise FileNotFoundError(2, "No such file or directory", path)
        kind, major, minor, mode = nodes.get(name, ("-", 0, 0, 0o644))
        # 16 numbers: the tenth to the sixteenth are times and sizes, st_rdev is only set by name
        full = {"st_rdev": os.makedev(major, minor)}
        return os.stat_result((formats[kind] | mode, 1, 1, 1, 7, 44, 0, 0, 0, 0), full)

    return lstat


HOST = host(nvidia0=("c", 195, 0, 0o666), sda=("b", 8, 0, 0o660), pipe=("p", 0, 0, 0o600), file=("-", 0, 0, 0o644))
NULL = {"path": "/dev/nvidia0"}
DENY = {"allow": False, "access": "rwm"}


def rule(kind: str, major: int, minor: int, access: str = "rwm") -> dict[str, Any]:
    return {"allow": True, "type": kind, "major": major, "minor": minor, "access": access}


def injected(config: Config, *edits: dict[str, Any], **options: Any) -> Config:
    """Return the edited configuration; it is the same after a second time and after a way through a file."""
    result = copy.deepcopy(config)
    given = copy.deepcopy(edits)
    inject(result, edits, lstat=options.pop("lstat", HOST), **options)
    assert edits == given, "edits are shared with other containers"
    again = json.loads(json.dumps(result))
    inject(again, edits, lstat=HOST, **options)
    assert json.dumps(again) == json.dumps(result)
    return result


def refused(config: Config, *edits: dict[str, Any], **options: Any) -> str:
    before = json.dumps(config)
    with pytest.raises(CdiError) as caught:
        inject(config, edits, lstat=HOST, **options)
    assert caught.value.code == "OCIGPU-CDI-6"
    assert json.dumps(config) == before, "nothing may be half done"
    assert "\n" not in caught.value.message
    return caught.value.message


# --- environment


@pytest.mark.parametrize(
    ("before", "added", "after"),
    [
        pytest.param(None, ["A=1"], ["A=1"], id="no environment"),
        pytest.param(["A=0", "B=2"], ["A=1"], ["A=1", "B=2"], id="replaced in place"),
        pytest.param(["A=0"], ["B=1", "B=2"], ["A=0", "B=2"], id="last of two of a name"),
        pytest.param(["A=0", "B=1", "A=2"], ["A=3"], ["A=3", "B=1", "A=3"], id="every one of a name"),
        pytest.param(["AB=0", "A"], ["A=1"], ["AB=0", "A=1"], id="whole names, with a value or without"),
        pytest.param([7, None], ["A=x=y"], [7, None, "A=x=y"], id="what is no text stays"),
        pytest.param([], ["A="], ["A="], id="empty value"),
    ],
)
def test_variables_are_replaced_in_place_or_appended(before: Any, added: list[str], after: list[Any]) -> None:
    config = {} if before is None else {"process": {"env": before, "cwd": "/"}}
    assert injected(config, {"env": added})["process"]["env"] == after


# --- device nodes


@pytest.mark.parametrize(
    ("node", "entry"),
    [
        pytest.param(
            {}, {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 0o666}, id="from the host"
        ),
        pytest.param(
            {"path": "/dev/x", "hostPath": "/dev/nvidia0"},
            {"path": "/dev/x", "type": "c", "major": 195, "minor": 0, "fileMode": 0o666},
            id="of another path",
        ),
        pytest.param(
            {"type": "c", "minor": 9},
            {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 0o666},
            id="a minor without a major is not given",
        ),
        pytest.param(
            {"path": "/dev/sda"},
            {"path": "/dev/sda", "type": "b", "major": 8, "minor": 0, "fileMode": 0o660},
            id="disk",
        ),
        pytest.param({"path": "/dev/pipe"}, {"path": "/dev/pipe", "type": "p", "fileMode": 0o600}, id="fifo"),
        pytest.param(
            {"fileMode": 0o600, "uid": 0, "gid": 5},
            {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 0o600, "uid": 0, "gid": 5},
            id="mode and owner given, zero is not absent",
        ),
        pytest.param(
            {"path": "/dev/none", "type": "c", "major": 510, "minor": 3},
            {"path": "/dev/none", "type": "c", "major": 510, "minor": 3},
            id="complete, not on the host",
        ),
        pytest.param(
            {"path": "/dev/none", "type": "p"}, {"path": "/dev/none", "type": "p"}, id="fifo that is not on the host"
        ),
        pytest.param(
            {"path": "/dev/file", "type": "u", "major": 4},
            {"path": "/dev/file", "type": "u", "major": 4, "minor": 0},
            id="complete, no node on the host",
        ),
        pytest.param(
            {"path": "/dev/sda", "type": "c", "major": 8, "minor": 0},
            {"path": "/dev/sda", "type": "c", "major": 8, "minor": 0, "fileMode": 0o660},
            id="complete: only the mode is the host's",
        ),
    ],
)
def test_a_node_is_filled_in_from_the_host(node: dict[str, Any], entry: dict[str, Any]) -> None:
    config = injected({}, {"deviceNodes": [{**NULL, **node}]})
    assert config["linux"]["devices"] == [entry]
    kinds = [item["type"] for item in config["linux"].get("resources", {}).get("devices", [])]
    assert kinds == ([entry["type"]] if entry["type"] in "bc" else [])


@pytest.mark.parametrize(
    ("user", "owner"),
    [
        pytest.param({"uid": 1000, "gid": 100}, {"uid": 1000, "gid": 100}, id="both"),
        pytest.param({"uid": 0, "gid": 100}, {"gid": 100}, id="root is not written"),
        pytest.param({"uid": True, "gid": "7"}, {}, id="of another type"),
        pytest.param(None, {}, id="absent"),
    ],
)
def test_a_node_belongs_to_the_user_of_the_process(user: Any, owner: dict[str, int]) -> None:
    (entry,) = injected({"process": {"user": user}}, {"deviceNodes": [NULL]})["linux"]["devices"]
    assert {name: entry[name] for name in ("uid", "gid") if name in entry} == owner


def test_the_owner_in_the_specification_wins() -> None:
    node = {**NULL, "uid": 0, "gid": 3}
    (entry,) = injected({"process": {"user": {"uid": 9, "gid": 9}}}, {"deviceNodes": [node]})["linux"]["devices"]
    assert (entry["uid"], entry["gid"]) == (0, 3)


def test_a_node_of_the_same_path_is_replaced_and_stands_last() -> None:
    first, other = {"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": 3}, {"path": "/dev/x", "type": "p"}
    devices = injected({"linux": {"devices": [first, other]}}, {"deviceNodes": [NULL]})["linux"]["devices"]
    assert [item["path"] for item in devices] == ["/dev/x", "/dev/nvidia0"]
    assert devices[1]["major"] == 195


@pytest.mark.parametrize(
    ("permissions", "access"),
    [
        pytest.param({}, "rwm", id="absent"),
        pytest.param({"permissions": ""}, "rwm", id="empty"),
        pytest.param({"permissions": "rw"}, "rw", id="given"),
        pytest.param({"permissions": "none"}, None, id="none: runc refuses a rule without access"),
    ],
)
def test_a_node_brings_a_rule(permissions: dict[str, str], access: str | None) -> None:
    config = injected({"linux": {"resources": {"devices": [DENY]}}}, {"deviceNodes": [{**NULL, **permissions}]})
    rules = [rule("c", 195, 0, access)] if access else []
    assert config["linux"]["resources"]["devices"] == [DENY, *rules]
    assert len(config["linux"]["devices"]) == 1


def test_rules_are_written_once_and_come_last() -> None:
    """A rule that already exists could be taken back by the one behind it."""
    before = [rule("c", 195, 0), {"allow": False, "type": "c", "major": 195, "access": "rwm"}, "strange", {"allow": []}]
    config = {"linux": {"resources": {"devices": before, "cpu": {}}}}
    edits = {"deviceNodes": [NULL, {"path": "/dev/y", "hostPath": "/dev/nvidia0"}, {"path": "/dev/sda"}]}
    resources = injected(config, edits)["linux"]["resources"]
    assert resources == {"devices": [*before[1:], rule("c", 195, 0), rule("b", 8, 0)], "cpu": {}}


def test_without_a_policy_of_our_own_no_rules_are_declared() -> None:
    config = injected({"linux": {}}, {"deviceNodes": [NULL]}, declare_rules=False)
    assert list(config["linux"]) == ["devices"]


def test_a_container_without_rules_gets_its_first_one() -> None:
    """runc denies what no rule allows even then."""
    assert injected({}, {"deviceNodes": [NULL]})["linux"]["resources"] == {"devices": [rule("c", 195, 0)]}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        pytest.param(
            {"path": "/dev/gone"},
            'failed to stat CDI host device "/dev/gone": No such file or directory',
            id="missing",
        ),
        pytest.param(
            {"path": "/dev/x", "hostPath": "/dev/gone", "type": "c"},
            'failed to stat CDI host device "/dev/gone": No such file or directory',
            id="missing under its host path, major not given",
        ),
        pytest.param({"path": "/dev/file"}, 'CDI host device "/dev/file": not a device node', id="file"),
        pytest.param(
            {"path": "/dev/nvidia0", "type": "b"},
            'CDI device ("/dev/nvidia0", "/dev/nvidia0"), host type mismatch (b, c)',
            id="other type",
        ),
        pytest.param(
            {"path": "/dev/nvidia0", "type": "u"}, "host type mismatch (u, c)", id="u without a major always fails"
        ),
        pytest.param({"path": "/dev/a\nb"}, 'device "/dev/a\\nb"', id="hostile name"),
    ],
)
def test_a_node_that_the_host_does_not_have_is_refused(node: dict[str, Any], message: str) -> None:
    config: Config = {"process": {"env": ["A=0"]}, "linux": {"devices": []}, "x": 1}
    said = refused(config, {"env": ["A=1"]}, {"deviceNodes": [NULL, node]}, files=["/a.yaml", "/b.yaml"])
    assert said.startswith("/b.yaml: ")
    assert message in said


def test_links_are_not_followed_on_a_real_host(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    with pytest.raises(CdiError, match="not a device node"):
        inject({}, [{"deviceNodes": [{"path": str(tmp_path / "null")}]}])
    config: Config = {}
    inject(config, [{"deviceNodes": [{"path": "/dev/null"}]}])
    assert config["linux"]["resources"]["devices"] == [rule("c", 1, 3)]


@pytest.mark.parametrize("kind", [{"type": "c"}, {}], ids=["with its type", "without its type"])
def test_numbers_that_are_not_the_hosts_are_reported(kind: dict[str, str]) -> None:
    node = {**NULL, **kind, "major": 510, "minor": 4}
    config: Config = {}
    (note,) = inject(config, [{"deviceNodes": [node]}], lstat=HOST, files=["/s.json"])
    assert note == '/s.json: CDI device "/dev/nvidia0" is c 510:4 in the specification and 195:0 on this host'
    assert config["linux"]["devices"][0]["major"] == 510


# --- user namespaces

USER = {"linux": {"namespaces": [{"type": "mount"}, {"type": "user"}]}}


@pytest.mark.parametrize(
    ("config", "options"),
    [pytest.param(USER, {}, id="of the container"), pytest.param({}, {"rootless": True}, id="around the runtime")],
)
def test_where_nodes_are_bound_one_of_another_path_becomes_a_mount(config: Config, options: dict[str, bool]) -> None:
    other = {"path": "/dev/y", "hostPath": "/dev/nvidia0"}
    linux = {**config.get("linux", {}), "devices": [{"path": "/dev/y", "type": "c", "major": 1, "minor": 3}]}
    result = injected({**config, "linux": linux}, {"deviceNodes": [NULL, other]}, **options)
    assert [item["path"] for item in result["linux"]["devices"]] == ["/dev/nvidia0"]
    bind = {"destination": "/dev/y", "type": "bind", "source": "/dev/nvidia0"}
    assert result["mounts"] == [{**bind, "options": ["bind", "rprivate", "nosuid", "noexec"]}]
    assert result["linux"]["resources"]["devices"] == [rule("c", 195, 0)]


@pytest.mark.parametrize("last", ["node", "bound"])
def test_where_nodes_are_bound_the_last_of_a_path_counts(last: str) -> None:
    node, bound = {"path": "/dev/sda"}, {"path": "/dev/sda", "hostPath": "/dev/nvidia0"}
    nodes = [bound, node] if last == "node" else [node, bound]
    result = injected(USER, {"deviceNodes": nodes})
    assert [item["major"] for item in result["linux"]["devices"]] == ([8] if last == "node" else [])
    assert [item["source"] for item in result.get("mounts", [])] == ([] if last == "node" else ["/dev/nvidia0"])


@pytest.mark.parametrize(
    ("mount", "options"),
    [
        pytest.param({"options": ["ro", "bind"]}, ["ro", "bind", "idmap"], id="bind"),
        pytest.param({"type": "bind"}, ["idmap"], id="type bind"),
        pytest.param({"options": ["rbind"]}, ["rbind", "ridmap"], id="rbind"),
        pytest.param({"options": ["bind", "ridmap"]}, ["bind", "ridmap"], id="there already"),
        pytest.param({"options": ["rbind", "idmap"]}, ["rbind", "idmap"], id="the other is there"),
        pytest.param({"type": "tmpfs", "options": ["ro"]}, ["ro"], id="no bind mount"),
    ],
)
def test_bind_mounts_into_a_user_namespace_are_id_mapped(mount: dict[str, Any], options: list[str]) -> None:
    edits = {"mounts": [{"hostPath": "/host/a", "containerPath": "/a", **mount}]}
    (entry,) = injected(USER, edits)["mounts"]
    assert entry["options"] == options
    (plain,) = injected(USER, edits, rootless=True)["mounts"]
    assert plain.get("options", []) == mount.get("options", []), "a user cannot make them"
    (outside,) = injected({}, edits)["mounts"]
    assert outside.get("options", []) == mount.get("options", [])


# --- mounts


def mount(path: str, source: str = "/host/x", **more: Any) -> dict[str, Any]:
    return {"hostPath": source, "containerPath": path, **more}


def test_mounts_are_replaced_by_destination_and_sorted_by_depth() -> None:
    """Those that were there move too, and equal depth keeps its order."""
    before = [
        {"destination": path, "source": "old"} for path in ("/a/b/c", "/proc", "/x/../dev", "/a/b", "//sys/", "/")
    ]
    edits = {"mounts": [mount("/lib/x"), mount("/a/b"), mount("/new", type="tmpfs", options=["size=1"])]}
    mounts = injected({"mounts": before}, edits)["mounts"]
    paths = ["/proc", "/x/../dev", "//sys/", "/", "/new", "/lib/x", "/a/b", "/a/b/c"]
    assert [item["destination"] for item in mounts] == paths
    assert mounts[4] == {"destination": "/new", "type": "tmpfs", "source": "/host/x", "options": ["size=1"]}
    assert mounts[6] == {"destination": "/a/b", "source": "/host/x"}


def test_every_mount_of_the_destination_goes_and_the_last_of_the_edits_counts() -> None:
    before = [{"destination": "/a", "source": "1"}, {"destination": "/a", "source": "2"}]
    result = injected({"mounts": before}, {"mounts": [mount("/a", "/host/3"), mount("/a", "/host/4")]})
    assert result["mounts"] == [{"destination": "/a", "source": "/host/4"}]


def test_without_mounts_in_the_edits_nothing_is_sorted() -> None:
    before = [{"destination": "/a/b/c"}, {"destination": "/"}, "strange"]
    assert injected({"mounts": before}, {"env": ["A=1"]})["mounts"] == before


@pytest.mark.parametrize(
    "how", [{"type": "bind"}, {"options": ["bind"]}, {"options": ["ro", "rbind"]}], ids=["type", "bind", "rbind"]
)
def test_a_bind_mount_of_something_that_is_not_there_is_refused(how: dict[str, Any]) -> None:
    said = refused({"mounts": []}, {"mounts": [mount("/a", "/gone", **how)]}, files=["/etc/cdi/x.yaml"])
    assert said == '/etc/cdi/x.yaml: mount /a: host path "/gone": No such file or directory'


def test_a_link_that_anybody_can_have_made_is_refused(tmp_path: Path) -> None:
    """Specifications name /tmp/nvidia-mps, writable, while MPS runs; who has made a link since chooses what it is."""
    shared, link = tmp_path / "tmp", tmp_path / "tmp/nvidia-mps"
    shared.mkdir()
    shared.chmod(0o1777)
    link.symlink_to("/etc")
    edits = [{"mounts": [{"hostPath": str(link), "containerPath": "/tmp/nvidia-mps", "options": ["rbind"]}]}]
    with pytest.raises(CdiError, match="a link, in a directory where every user can make one"):
        inject({}, edits)
    shared.chmod(0o755)
    inject({}, edits)


def test_whose_a_link_can_be_says_its_directory_and_no_link_to_that(tmp_path: Path) -> None:
    """The mode of every link is 0777, such as that of /lib where it leads to /usr/lib: others write there for that."""
    libraries = tmp_path / "usr/lib"
    libraries.mkdir(parents=True)
    (libraries / "libx.so.1").symlink_to("libx.so.1.0")
    (tmp_path / "lib").symlink_to("usr/lib")
    edits = [{"mounts": [mount("/a", f"{tmp_path}/lib/libx.so.1", options=["rbind"])]}]
    inject({}, edits)
    libraries.chmod(0o1777)
    with pytest.raises(CdiError, match="a link, in a directory where every user can make one"):
        inject({}, edits)


def test_other_sources_are_left_to_the_runtime() -> None:
    edits = {"mounts": [mount("/a", "tmpfs", type="tmpfs"), mount("/b", "beside/the/bundle", options=["bind"])]}
    assert [item["source"] for item in injected({}, edits)["mounts"]] == ["tmpfs", "beside/the/bundle"]


# --- the rest

HOOK = {"hookName": "createContainer", "path": "/bin/x", "args": ["x", "1"], "env": ["A=1"], "timeout": 0}


def test_hooks_are_appended_in_order_and_equal_ones_once() -> None:
    others = [{**HOOK, "args": ["x", "2"]}, {"hookName": "poststop", "path": "/bin/y"}]
    old = {"path": "/bin/old"}
    config = injected({"hooks": {"createContainer": [old], "prestart": None}}, {"hooks": [HOOK]}, {"hooks": others})
    first = {"path": "/bin/x", "args": ["x", "1"], "env": ["A=1"], "timeout": 0}
    assert config["hooks"] == {
        "createContainer": [old, first, {**first, "args": ["x", "2"]}],
        "prestart": None,
        "poststop": [{"path": "/bin/y", "env": HOOK_ENVIRONMENT}],
    }
    shuffled = {"hooks": {"createContainer": [dict(reversed(first.items()))]}}
    assert injected(shuffled, {"hooks": [HOOK]})["hooks"]["createContainer"] == [first]


@pytest.mark.parametrize("stage", HOOK_STAGES)
def test_hooks_of_every_stage_come_after_those_that_are_there(stage: str) -> None:
    result = injected({"hooks": {stage: [{"path": "/old"}]}}, {"hooks": [{"hookName": stage, "path": "/new"}]})
    assert result["hooks"] == {stage: [{"path": "/old"}, {"path": "/new", "env": HOOK_ENVIRONMENT}]}


def test_an_unknown_hook_name_is_refused() -> None:
    assert refused({}, {"hooks": [{"hookName": "x", "path": "/y"}]}) == 'unknown hook name "x"'


def test_the_last_intel_rdt_replaces_what_was_there() -> None:
    config = {"linux": {"intelRdt": {"closID": "old", "memBwSchema": "x"}}}
    assert injected(config, {"intelRdt": {"closID": "a"}}, {"intelRdt": {"l3CacheSchema": "b"}}, {})["linux"] == {
        "intelRdt": {"l3CacheSchema": "b"}
    }
    assert injected(config, {"intelRdt": {}})["linux"] == {"intelRdt": {}}


def test_net_devices_are_added_and_later_ones_win() -> None:
    config = {"linux": {"netDevices": {"eth0": {"name": "a"}, "eth1": {"name": "b"}}}}
    edits = [{"netDevices": [{"hostInterfaceName": name, "name": new}]} for name, new in (("eth1", "c"), ("eth1", "d"))]
    assert injected(config, *edits)["linux"]["netDevices"] == {"eth0": {"name": "a"}, "eth1": {"name": "d"}}


def test_groups_are_added_once_and_never_group_0() -> None:
    config = {"process": {"user": {"uid": 0, "gid": 0, "additionalGids": [10, 44]}}}
    user = injected(config, {"additionalGids": [44, 0, 105]}, {"additionalGids": [105, 7]})["process"]["user"]
    assert user["additionalGids"] == [10, 44, 105, 7]
    assert injected({}, {"additionalGids": [5]})["process"] == {"user": {"additionalGids": [5]}}
    assert injected({}, {"additionalGids": [0]}) == {}


def test_lists_of_several_edits_are_joined_in_order() -> None:
    edits = [{"env": [f"A{number}=1"], "mounts": [mount(f"/m{number}")]} for number in range(3)]
    config = injected({}, *edits)
    assert config["process"]["env"] == ["A0=1", "A1=1", "A2=1"]
    assert [item["destination"] for item in config["mounts"]] == ["/m0", "/m1", "/m2"]


def test_unknown_fields_and_order_survive() -> None:
    config = {"z": {"deep": [1.5]}, "mounts": [], "process": {"b": 1, "env": [], "a": {}}, "linux": {"q": None}}
    result = injected(config, {"env": ["A=1"], "deviceNodes": [NULL], "mounts": [mount("/a")], "hooks": [HOOK]})
    assert list(result) == ["z", "mounts", "process", "linux", "hooks"]
    assert list(result["process"]) == ["b", "env", "a"]
    assert list(result["linux"]) == ["q", "devices", "resources"]
    assert result["z"] == {"deep": [1.5]}


def test_no_edits_change_nothing() -> None:
    config = {"linux": {}, "process": None, "hooks": 3}
    assert injected(config, {}, {"env": [], "mounts": []}) == config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        pytest.param({"process": []}, "process is not an object", id="process"),
        pytest.param({"process": {"env": {}}}, "process.env is not a list", id="env"),
        pytest.param({"process": {"user": 1}}, "process.user is not an object", id="user"),
        pytest.param({"process": {"user": {"additionalGids": 1}}}, "additionalGids is not a list", id="groups"),
        pytest.param({"linux": "x"}, "linux is not an object", id="linux"),
        pytest.param({"linux": {"namespaces": {}}}, "linux.namespaces is not a list", id="namespaces"),
        pytest.param({"linux": {"devices": {}}}, "linux.devices is not a list", id="devices"),
        pytest.param({"linux": {"devices": [1]}}, "linux.devices[0] is not an object", id="a device"),
        pytest.param({"linux": {"devices": [{"path": 1}]}}, "linux.devices[0].path is not a text", id="its path"),
        pytest.param({"linux": {"resources": []}}, "linux.resources is not an object", id="resources"),
        pytest.param({"linux": {"resources": {"devices": 1}}}, "linux.resources.devices is not a list", id="rules"),
        pytest.param({"linux": {"netDevices": []}}, "linux.netDevices is not an object", id="net devices"),
        pytest.param({"mounts": {}}, "mounts is not a list", id="mounts"),
        pytest.param({"mounts": [{}]}, "mounts[0].destination is not a text", id="destination"),
        pytest.param({"hooks": []}, "hooks is not an object", id="hooks"),
        pytest.param({"hooks": {"createContainer": {}}}, "hooks.createContainer is not a list", id="stage"),
    ],
)
def test_parts_of_another_type_are_refused_and_nothing_is_changed(config: Config, named: str) -> None:
    edits = {
        "env": ["A=1"],
        "deviceNodes": [NULL],
        "netDevices": [{"hostInterfaceName": "a", "name": "b"}],
        "mounts": [mount("/a")],
        "hooks": [HOOK],
        "additionalGids": [5],
    }
    assert refused(config, edits).endswith(named)


paths = st.sampled_from(["/dev/nvidia0", "/dev/sda", "/a", "/a/b", "/dev/pipe"])
edit_blocks = st.fixed_dictionaries(
    {},
    optional={
        "env": st.lists(st.sampled_from(["A=1", "A=2", "B=", "C=x"]), max_size=3),
        "deviceNodes": st.lists(
            st.builds(
                lambda path, source: {"path": path, "hostPath": source},
                paths,
                st.sampled_from(["/dev/nvidia0", "/dev/sda", "/dev/pipe"]),
            ),
            max_size=3,
        ),
        "mounts": st.lists(st.builds(lambda path: mount(path, options=["bind"]), paths), max_size=3),
        "hooks": st.lists(st.sampled_from([HOOK, {"hookName": "prestart", "path": "/p"}]), max_size=2),
        "additionalGids": st.lists(st.integers(0, 5), max_size=3),
        "intelRdt": st.just({"closID": "x"}),
    },
)


@given(st.lists(edit_blocks, max_size=4), st.booleans(), st.lists(paths, max_size=4))
def test_any_edits_twice_are_the_same_as_once(edits: list[dict[str, Any]], user: bool, present: list[str]) -> None:
    mounts = [{"destination": path, "source": "old"} for path in present]
    injected({**(copy.deepcopy(USER) if user else {}), "mounts": mounts, "process": {"env": ["B=0", "A"]}}, *edits)


def nothing_or(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


STRANGE = st.sampled_from([None, 0, "x", [], {}, {"path": 1}, {"destination": None}])
ENTRIES = {
    "devices": st.sampled_from(
        [{"path": path, "type": "c", "major": 1, "minor": 3} for path in ("/dev/nvidia0", "/a")]
    ),
    "rules": st.sampled_from([DENY, rule("c", 195, 0), rule("b", 8, 0, "r"), {"allow": True, "access": "rwm"}]),
    "mounts": st.sampled_from([{"destination": path, "source": "s"} for path in ("/a", "/a/b", "/proc", "/dev/sda")]),
    "hooks": st.sampled_from([{"path": "/bin/x", "args": ["x", "1"], "env": ["A=1"], "timeout": 0}, {"path": "/p"}]),
    "groups": st.sampled_from([0, 1, 5, True]),
    "env": st.sampled_from(["A=0", "B", "C=", "PATH=/bin"]),
}


def some(kind: str, strange: bool) -> st.SearchStrategy[Any]:
    """Return lists of entries of a kind, or null; with ``strange`` also what an engine would never write."""
    entries = ENTRIES[kind]
    return nothing_or(
        st.lists(entries | STRANGE if strange else entries, max_size=4) | (STRANGE if strange else st.none())
    )


def configurations(strange: bool) -> st.SearchStrategy[Config]:
    def part(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        whole = nothing_or(st.fixed_dictionaries({}, optional={**fields, "unknown": st.just([1])}))
        return whole | STRANGE if strange else whole

    user = part(uid=st.integers(0, 2), gid=st.integers(0, 2), additionalGids=some("groups", strange))
    resources = part(devices=some("rules", strange))
    namespaces = nothing_or(st.lists(st.sampled_from([{"type": "user"}, {"type": "mount"}]), max_size=2))
    return st.fixed_dictionaries(
        {},
        optional={
            "process": part(env=some("env", strange), user=user),
            "linux": part(
                devices=some("devices", strange),
                resources=resources,
                namespaces=namespaces,
                netDevices=part(eth0=st.just({"name": "old"})),
                intelRdt=part(closID=st.just("old")),
            ),
            "mounts": some("mounts", strange),
            "hooks": part(prestart=some("hooks", strange), createContainer=some("hooks", strange)),
            "root": st.just({"path": "rootfs"}),
        },
    )


all_edits = st.lists(
    st.builds(
        lambda block, more: {**block, **more},
        edit_blocks,
        st.fixed_dictionaries(
            {},
            optional={
                "netDevices": st.just([{"hostInterfaceName": "eth0", "name": "new"}]),
                "deviceNodes": st.lists(
                    st.fixed_dictionaries(
                        {"path": paths, "hostPath": st.sampled_from(["/dev/nvidia0", "/dev/sda", "/dev/pipe"])},
                        optional={
                            "permissions": st.sampled_from(["", "r", "rw", "none"]),
                            "fileMode": st.integers(0, 0o777),
                            "uid": st.integers(0, 2),
                        },
                    )
                    | st.sampled_from([{"path": "/gone", "type": "c", "major": 9}, {"path": "/gone", "type": "p"}]),
                    max_size=3,
                ),
            },
        ),
    ),
    max_size=4,
)


@given(configurations(strange=False), all_edits, st.booleans(), st.booleans())
def test_any_configuration_is_the_same_after_a_second_time(
    config: Config, edits: list[dict[str, Any]], declare_rules: bool, rootless: bool
) -> None:
    problem = None
    try:
        result = injected(config, *edits, declare_rules=declare_rules, rootless=rootless)
    except CdiError as error:
        problem = error
    if problem:  # where nodes are bound
        assert problem.message == 'failed to stat CDI host device "/gone": No such file or directory'
        return
    assert result.get("root") == config.get("root")
    for name in ("process", "linux", "hooks"):
        before, after = config.get(name) or {}, result.get(name) or {}
        assert [key for key in after if key in before] == list(before)
        assert after.get("unknown") == before.get("unknown")


@given(configurations(strange=True), all_edits)
def test_any_configuration_is_changed_as_a_whole_or_not_at_all(config: Config, edits: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(config)
    problem = None
    try:
        inject(config, edits, lstat=HOST)
    except CdiError as error:
        problem = error
    if problem:
        assert config == before
        assert (problem.code, "\n" in problem.message) == ("OCIGPU-CDI-6", False)
    else:
        again = copy.deepcopy(config)
        inject(again, edits, lstat=HOST)
        assert again == config


@pytest.mark.rest
def test_ten_thousand_nodes_and_mounts_are_quick_work() -> None:
    """Not a matter of time but of growth: with a loop in a loop this would not end."""
    numbers = range(20_000)
    nodes = [{"path": f"/dev/n{number}", "hostPath": "/dev/nvidia0", "minor": number} for number in numbers]
    mounts = [mount(f"/m/{number}") for number in numbers]
    config = injected({}, {"deviceNodes": nodes, "mounts": mounts, "env": [f"V{number}=1" for number in numbers]})
    assert len(config["linux"]["devices"]) == len(config["mounts"]) == 20_000
    assert len(config["linux"]["resources"]["devices"]) == 1


@pytest.mark.parametrize(
    ("volume", "options", "propagation", "refused"),
    [
        ("/run", ["rbind", "rshared"], "rshared", True),
        ("//run/x/..", ["bind", "shared"], "shared", True),
        ("/", ["bind", "shared"], "shared", True),
        ("/run/other", ["rbind", "rshared"], "rshared", False),
        ("/run", ["rbind", "rslave"], "rshared", False),
        ("/run", ["rbind", "rshared"], "rslave", False),
        ("/run", None, "rshared", False),
    ],
)
def test_a_mount_below_a_volume_that_is_shared_with_the_host_is_refused(
    volume: str, options: Any, propagation: str, refused: bool
) -> None:
    config: Config = {
        "mounts": [{"destination": volume, "type": "bind", "source": "/host/volume", "options": options}],
        "linux": {"rootfsPropagation": propagation},
    }
    before = copy.deepcopy(config)
    edits = {"mounts": [{"hostPath": "/host/socket", "containerPath": "/run/driver/socket", "options": ["bind"]}]}
    if refused:
        with pytest.raises(CdiError, match="shared with the host") as caught:
            inject(config, [edits], lstat=HOST)
        assert caught.value.code == "OCIGPU-CDI-6"
        assert config == before
    else:
        inject(config, [edits], lstat=HOST)
        assert len(config["mounts"]) == 2
