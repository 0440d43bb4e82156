"""Values set in texts of configuration files and taken out again: nothing else of the text changes."""

import json
import tomllib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ocigpu.core.errors import OcigpuError
from ocigpu.engines.document import Applied, ValueChange, apply_changes, look_up, revert_changes
from ocigpu.engines.places import parse_config

V2 = ("plugins", "io.containerd.grpc.v1.cri")
V3 = ("plugins", "io.containerd.cri.v1.runtime")
ENTRY = {"runtime_type": "io.containerd.runc.v2", "options": {"SystemdCgroup": True, "BinaryName": "/usr/bin/o"}}


def containerd(plugin: tuple[str, ...]) -> list[ValueChange]:
    return [
        ValueChange((*plugin, "containerd", "default_runtime_name"), "ocigpu"),
        ValueChange((*plugin, "enable_cdi"), True),
        ValueChange((*plugin, "containerd", "runtimes", "ocigpu"), ENTRY),
    ]


IMPORT = ValueChange(("imports",), "/etc/containerd/conf.d/99-ocigpu.toml", append=True)
DOCKER = [
    ValueChange(("runtimes", "ocigpu"), {"path": "/usr/bin/ocigpu-runtime"}),
    ValueChange(("default-runtime",), "ocigpu"),
    ValueChange(("features", "cdi"), True),
]
PODMAN = [ValueChange(("engine", "runtime"), "ocigpu"), ValueChange(("engine", "runtimes", "ocigpu"), ["/usr/bin/o"])]
CRIO = [
    ValueChange(("crio", "runtime", "default_runtime"), "ocigpu"),
    ValueChange(("crio", "runtime", "runtimes", "ocigpu"), {"runtime_path": "/usr/bin/o", "runtime_type": "oci"}),
]

CONTAINERD_1_V1 = """\
# Kubernetes nodes, 2019
oom_score = -999
disabled_plugins = ["restart"]

[debug]
  level = "info"

[plugins.cri]
  max_container_log_line_size = 262144  # 256 KiB
  sandbox_image = "registry.example/pause:3.1"
[plugins.cri.containerd]
  [plugins.cri.containerd.untrusted_workload_runtime]
    runtime_type = ""
  # the default
  [plugins.cri.containerd.default_runtime]
[plugins.cri.cni]
  bin_dir = "/opt/cni/bin"
"""
CONTAINERD_1_V2 = """\
version = 2
root = "/var/lib/containerd"   # on the large disk
imports = [
  "/etc/containerd/runtime_*.toml", # site
  "./debug.toml"
]

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    sandbox_image = "registry.k8s.io/pause:3.6"
    [plugins."io.containerd.grpc.v1.cri".containerd]
      default_runtime_name = "runc"   # do not touch
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes]
        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
          runtime_type = "io.containerd.runc.v2"
          [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
            SystemdCgroup = true
    [plugins."io.containerd.grpc.v1.cri".registry]
      config_path = '/etc/containerd/certs.d'
  [plugins."io.containerd.gc.v1.scheduler"]
    startup_delay = "100ms"

[timeouts]
  "io.containerd.timeout.shim.load" = "5s"
# the end
"""
CONTAINERD_2_V3 = """\
version = 3
root = '/var/lib/containerd'
imports = ['/etc/containerd/conf.d/*.toml']

[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'

  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = 'registry.k8s.io/pause:3.10'

[plugins.'io.containerd.cri.v1.runtime']
  enable_selinux = false
  enable_cdi = false
  cdi_spec_dirs = ['/etc/cdi', '/var/run/cdi']

  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = 'runc'
    ignore_blockio_not_enabled_errors = false

    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes]
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
        runtime_type = 'io.containerd.runc.v2'
        base_runtime_spec = ''

        [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
          BinaryName = ''
          SystemdCgroup = true
"""
GKE = """\
version = 2
required_plugins = ["io.containerd.grpc.v1.cri"]
# Kubernetes doesn't use containerd restart manager.
disabled_plugins = ["io.containerd.internal.v1.restart"]
oom_score = -999

[debug]
  level = "info"

[plugins."io.containerd.grpc.v1.cri"]
  stream_server_address = "127.0.0.1"
  max_container_log_line_size = 262144
  sandbox_image = "gke.gcr.io/pause:3.8"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/home/kubernetes/bin"
  conf_dir = "/etc/cni/net.d"
  conf_template = "/home/containerd/cni.template"
[plugins."io.containerd.grpc.v1.cri".containerd]
  default_runtime_name = "runc"
  discard_unpacked_layers = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[metrics]
  address = "127.0.0.1:1338"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = true
"""
DOTTED = """\
version = 2
plugins."io.containerd.grpc.v1.cri".enable_selinux = true
plugins."io.containerd.grpc.v1.cri".containerd.snapshotter = "zfs"
plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.runtime_type = "io.containerd.runc.v2"
"""
DOTTED_IN_TABLE = """\
version = 2
[plugins]
"io.containerd.grpc.v1.cri".containerd.runtimes.runc.options.SystemdCgroup = true # systemd
"io.containerd.grpc.v1.cri".cni.bin_dir = "/opt/cni/bin"
[proxy_plugins.stargz]
type = "snapshot"
"""
INLINE = """\
version = 2
[plugins."io.containerd.grpc.v1.cri"]
containerd = { snapshotter = "overlayfs", runtimes = { runc = { runtime_type = "io.containerd.runc.v2" } } } # one line
"""
STRINGS = '''\
version = 2
title = """
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "text"
"""
other = \'\'\'
# not a comment = ]\'\'\'
"a = b" = "c # d"

[plugins."io.containerd.grpc.v1.cri".containerd] # "quoted" = [
'default_runtime_name' = "runc" # = "x"
'''
CRIO_PACKAGED = """\
[crio.image]
signature_policy = "/etc/crio/policy.json"

[crio.runtime]
default_runtime = "crun"

[crio.runtime.runtimes.crun]
runtime_path = "/usr/libexec/crio/crun"
runtime_root = "/run/crun"
monitor_path = "/usr/libexec/crio/conmon"
allowed_annotations = [
    "io.containers.trace-syscall",
]
"""
CONTAINERS_CONF = """\
# The containers configuration file specifies all of the available configuration
[containers]
#annotations = []
default_ulimits = [
 "nofile=1280:2560",
]

[engine]
# Default OCI runtime
#runtime = "crun"
cgroup_manager = "systemd"

[engine.runtimes]
kata = ["/usr/bin/kata-runtime",
    "/usr/local/bin/kata-runtime"]
[machine]
cpus=2
"""
DAEMON_JSON = """\
{
  "data-root": "/srv/docker",
  "log-driver": "json-file",
  "log-opts": { "max-size": "10m", "max-file": "3" },
  "default-runtime": "nvidia",
  "runtimes": {
    "nvidia": {
      "args": [],
      "path": "nvidia-container-runtime"
    }
  },
  "features": {
    "buildkit": true
  },
  "insecure-registries": ["r.example:5000",
                          "\\u00e9.example"]
}
"""
REAL = [
    pytest.param("config.toml", CONTAINERD_1_V1, containerd(("plugins", "cri")), id="containerd 1, version 1"),
    pytest.param("config.toml", CONTAINERD_1_V2, [*containerd(V2), IMPORT], id="containerd 1, version 2"),
    pytest.param("config.toml", CONTAINERD_2_V3, [*containerd(V3), IMPORT], id="containerd 2, version 3"),
    pytest.param("config.toml", GKE, [*containerd(V2), IMPORT], id="GKE"),
    pytest.param("config.toml", DOTTED, [*containerd(V2), IMPORT], id="dotted keys"),
    pytest.param("config.toml", DOTTED_IN_TABLE, [*containerd(V2), IMPORT], id="dotted keys in a table"),
    pytest.param("config.toml", INLINE, [*containerd(V2), IMPORT], id="inline tables"),
    pytest.param("config.toml", STRINGS, containerd(V2), id="texts that look like settings"),
    pytest.param("config.toml", 'disabled_plugins = ["cri"]\n', [*containerd(V2), IMPORT], id="containerd.io package"),
    pytest.param("config.toml", "version = 2\n", [*containerd(V2), IMPORT], id="version only"),
    pytest.param("crio.conf", CRIO_PACKAGED, CRIO, id="CRI-O"),
    pytest.param("containers.conf", CONTAINERS_CONF, PODMAN, id="Podman"),
    pytest.param("daemon.json", DAEMON_JSON, DOCKER, id="Docker"),
    pytest.param("daemon.json", '{"debug":true}', DOCKER, id="Docker on one line"),
    pytest.param("daemon.json", "{}\n", DOCKER, id="Docker, empty object"),
    pytest.param("daemon.json", '{\n\t"runtimes": {},\n\t"debug": false\n}\n', DOCKER, id="Docker with tabs"),
    pytest.param("daemon.json", '\ufeff{\n  "debug": true\n}\n', DOCKER, id="Docker with a byte order mark"),
]


def stays(old: str, new: str, replaced: int) -> bool:
    """Whether the lines of a text are in another one, in order, but for some."""
    lines = iter(new.splitlines())
    missing = 0
    for line in old.splitlines():
        before = lines
        rest = list(before)
        if line in rest:
            lines = iter(rest[rest.index(line) + 1 :])
        else:
            missing += 1
            lines = iter(rest)
    return missing <= replaced


@pytest.mark.parametrize(("path", "text", "changes"), REAL)
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_changes_of_a_real_file_are_taken_back_byte_for_byte(
    path: str, text: str, changes: list[ValueChange], newline: str
) -> None:
    text = text.replace("\n", newline)
    new, applied = apply_changes(path, text, changes)
    data = parse_config(path, new)
    for change in changes:
        value = look_up(data, change.keys)
        assert change.value in value if change.append else value == change.value
    assert newline == "\n" or "\n" not in new.replace("\r\n", "")
    assert revert_changes(path, new, applied) == (text, [])


@pytest.mark.parametrize(("path", "text", "changes"), REAL)
def test_every_other_line_of_a_real_file_stays(path: str, text: str, changes: list[ValueChange]) -> None:
    new, _ = apply_changes(path, text, changes)
    one_line = len(text.splitlines()) == 1
    assert stays(text, new, 0 if path.endswith(".conf") and "crio" not in path else len(changes) + one_line)
    for line in text.splitlines():
        comment = line.partition("#")[2]
        assert comment in new


@pytest.mark.parametrize(("path", "text", "changes"), REAL)
def test_changes_that_are_made_already_change_nothing(path: str, text: str, changes: list[ValueChange]) -> None:
    new, _ = apply_changes(path, text, changes)
    assert apply_changes(path, new, changes) == (new, [])


@pytest.mark.parametrize(("path", "text", "changes"), REAL)
def test_settings_that_others_add_afterwards_stay(path: str, text: str, changes: list[ValueChange]) -> None:
    new, applied = apply_changes(path, text, changes)
    foreign = [ValueChange(("added", "later"), "x"), ValueChange(("debug-level",), 3)]
    edited, theirs = apply_changes(path, new, foreign)
    back, left = revert_changes(path, edited, applied)
    assert left == []
    assert parse_config(path, back) == {**parse_config(path, text), "added": {"later": "x"}, "debug-level": 3}
    assert revert_changes(path, back, theirs)[0].split() == text.split()


def test_a_long_array_is_one_statement() -> None:
    """Its end is looked for only where it can be: reading every beginning of it took minutes."""
    elements = "".join(f'  "element {number}", # of [many\n' for number in range(20_000))
    text = f"version = 2\n[a]\nx = [\n{elements}] # [end]\ny = 1\n"
    changed, applied = apply_changes("/c.toml", text, [ValueChange(("a", "z"), True)])
    assert changed == text + "z = true\n"
    assert revert_changes("/c.toml", changed, applied) == (text, [])


def test_a_value_that_somebody_has_changed_since_is_left() -> None:
    new, applied = apply_changes("daemon.json", DAEMON_JSON, DOCKER)
    edited = new.replace('"default-runtime": "ocigpu"', '"default-runtime": "runc"').replace(
        "/usr/bin/ocigpu-runtime", "/usr/bin/other"
    )
    back, left = revert_changes("daemon.json", edited, applied)
    assert [change.keys for change in left] == [("default-runtime",), ("runtimes", "ocigpu")]
    wanted = json.loads(DAEMON_JSON)
    wanted["default-runtime"] = "runc"
    wanted["runtimes"]["ocigpu"] = {"path": "/usr/bin/other"}
    assert json.loads(back) == wanted


def test_a_table_of_ours_goes_with_what_others_have_put_into_it() -> None:
    new, applied = apply_changes("config.toml", GKE, containerd(V2))
    edited = new.replace('BinaryName = "/usr/bin/o"', 'BinaryName = "/usr/bin/o"\nNoPivotRoot = true')
    assert revert_changes("config.toml", edited, applied) == (GKE, [])


def test_an_entry_of_the_same_name_comes_back() -> None:
    changes = [ValueChange((*V2, "containerd", "runtimes", "runc"), ENTRY)]
    new, applied = apply_changes("config.toml", GKE, changes)
    assert look_up(tomllib.loads(new), changes[0].keys) == ENTRY
    assert tomllib.loads(revert_changes("config.toml", new, applied)[0]) == tomllib.loads(GKE)


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        pytest.param("daemon.json", '{\n  "a": 1\n  "b": 2\n}\n', "line 3 column 3", id="JSON, comma missing"),
        pytest.param("daemon.json", '{"a": 1', "line 1 column 8", id="JSON, cut off"),
        pytest.param("daemon.json", '{"a": 1}\n{}', "line 2 column 1", id="JSON, two values"),
        pytest.param("daemon.json", '// x\n{"a": 1}', "line 1 column 1", id="JSON, comment"),
        pytest.param("daemon.json", '{"a": 1, "a": 2}', 'duplicate key "a"', id="JSON, key twice"),
        pytest.param("daemon.json", '{"a": NaN}', "NaN", id="JSON, not a number"),
        pytest.param("daemon.json", "[]", "line 1 column 1: not a JSON object", id="JSON, array"),
        pytest.param("daemon.json", "null", "not a JSON object", id="JSON, null"),
        pytest.param("daemon.json", '{"a":' * 100_000, "", id="JSON, deep"),
        pytest.param("daemon.json", '{"runtimes": []}', "runtimes is not a table", id="JSON, runtimes a list"),
        pytest.param("daemon.json", '{"runtimes": "x"}', "runtimes is not a table", id="JSON, runtimes a string"),
        pytest.param("daemon.json", '{"runtimes": null}', "runtimes is not a table", id="JSON, runtimes null"),
        pytest.param("daemon.json", '{"runtimes": {"ocigpu": 1}}', "runtimes.ocigpu is not a table", id="JSON, entry"),
        pytest.param("daemon.json", '{"default-runtime": 1}', "default-runtime is not a string", id="JSON, default"),
        pytest.param("daemon.json", '{"features": true}', "features is not a table", id="JSON, features"),
        pytest.param("daemon.json", '{"features": {"cdi": "yes"}}', "features.cdi is not true or", id="JSON, cdi"),
        pytest.param("config.toml", "a = \n", "at line 1, column 5", id="TOML, no value"),
        pytest.param("config.toml", "a = 1\na = 2\n", "line 2", id="TOML, key twice"),
        pytest.param("config.toml", "[a]\n[a]\n", "line 2", id="TOML, table twice"),
        pytest.param("config.toml", 'a = """\n', "", id="TOML, text without an end"),
        pytest.param("config.toml", "{{ template }}\n", "line 1", id="TOML, template"),
        pytest.param("config.toml", "a = " + "[" * 100_000, "", id="TOML, deep"),
        pytest.param("config.toml", "plugins = 1\n", "plugins is not a table", id="TOML, number for a table"),
        pytest.param("config.toml", "[[plugins]]\n", "plugins is not a table", id="TOML, array of tables"),
        pytest.param("config.toml", "imports = 'x'\n", "imports is not an array", id="TOML, text for an array"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_changed_is_an_error_that_says_where(path: str, text: str, words: str) -> None:
    changes = DOCKER if path == "daemon.json" else [*containerd(V2), IMPORT]
    with pytest.raises(OcigpuError) as caught:
        apply_changes(path, text, changes)
    assert caught.value.code in ("OCIGPU-ENG-1", "OCIGPU-ENG-2")
    assert caught.value.message.startswith(path)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


NAMES = st.sampled_from(["a", "b", "c", '"d e"', '"f.g"', "'h'"])
KEYS = st.lists(NAMES, min_size=1, max_size=3).map(".".join)
VALUES = st.sampled_from(
    [
        "1",
        '"x"',
        "true",
        "[]",
        '["y", # z\n  "w"]',
        "'''\n[a]\nb = 1'''",
        "{ }",
        "{ b = 1, c = { a = 2 } }",
        "1979-05-27",
    ]
)
COMMENT = st.sampled_from(["", " # note", "\t# [a] = 1"])
LINE = st.one_of(
    st.builds("{}[{}]{}".format, st.sampled_from(["", "  "]), KEYS, COMMENT),
    st.builds("{}{} = {}{}".format, st.sampled_from(["", "  "]), KEYS, VALUES, COMMENT),
    st.builds("[[{}]]".format, KEYS),
    st.sampled_from(["", "# comment", "   "]),
)
PLAIN = st.sampled_from([1, True, "new", ["n"], {"a": "t", "sub": {"b": 1}}])
CHANGES = st.lists(
    st.builds(
        ValueChange,
        st.lists(st.sampled_from(["a", "b", "c", "d e", "f.g", "h"]), min_size=1, max_size=4).map(tuple),
        PLAIN,
        st.just(False),
    ),
    min_size=1,
    max_size=3,
)


def apply_possible(path: str, text: str, changes: Sequence[ValueChange]) -> tuple[str, list[Applied]]:
    applied: list[Applied] = []
    refused: list[OcigpuError] = []
    for change in changes:
        try:
            text, more = apply_changes(path, text, [change])
        except OcigpuError as error:
            refused.append(error)
        else:
            applied += more
    for error in refused:
        assert error.code == "OCIGPU-ENG-2", error
        assert "without changing" not in error.message
    return text, applied


@given(st.lists(LINE, max_size=8).map("\n".join), CHANGES)
def test_toml_changes_are_taken_back(text: str, changes: list[ValueChange]) -> None:
    text += "\n"
    try:
        tomllib.loads(text)
    except ValueError:
        assume(False)
    new, applied = apply_possible("x.toml", text, changes)
    back, left = revert_changes("x.toml", new, applied)
    assert left == []
    assert tomllib.loads(back) == tomllib.loads(text)
    if "{" not in text and all(entry.before is None for entry in applied):  # spaces in an inline table may differ
        assert back == text


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from("abcd"), JSON, max_size=4),
    st.sampled_from([None, 0, 1, 2, 4, "\t"]),
    st.booleans(),
    CHANGES,
)
def test_json_changes_are_taken_back(
    data: dict[str, Any], indent: Any, escaped: bool, changes: list[ValueChange]
) -> None:
    text = json.dumps(data, indent=indent, ensure_ascii=escaped)
    new, applied = apply_possible("x.json", text, changes)
    back, left = revert_changes("x.json", new, applied)
    assert left == []
    assert back == text
