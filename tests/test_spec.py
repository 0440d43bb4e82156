"""config.json: read strictly, edited as a raw document, replaced atomically."""

import json
import os
import resource
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.bundle.document import check_can_have_gpus, read_config, write_config
from ocigpu.bundle.edit import edit_config, rule_entries
from ocigpu.core.actions import AllowDevice, Node, Plan
from ocigpu.core.config_json import (
    HOOK_ENVIRONMENT,
    MAX_CONFIG_BYTES,
    get_list,
    get_object,
    get_rules,
    parse_json,
    rootfs_path,
)
from ocigpu.core.errors import SpecError
from ocigpu.core.facts import DeviceNode
from ocigpu.system import files

HOOK = "/usr/local/bin/ocigpu-hook"
PLAN = Plan(
    (Node(DeviceNode("/dev/nvidia0", "", 195, 0), ""), AllowDevice(195, 0, "rw", ""), AllowDevice(195, 255, "rw", ""))
)
RULES = [{"allow": True, "type": "c", "major": 195, "minor": minor, "access": "rw"} for minor in (0, 255)]


def refusal(text: bytes) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse_json(text, "config.json")
    assert len(caught.value.render("ocigpu-runtime").splitlines()) <= 2
    return caught.value


# --- parsing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(b"", "line 1 column 1: Expecting value", id="empty"),
        pytest.param(b'{"a":\n  [1,', "line 2 column 6: Expecting value", id="truncated"),
        pytest.param(b"{'a': 1}", "line 1 column 2: Expecting property name enclosed in double quotes", id="not JSON"),
        pytest.param(b'{"a": 1 "b"}', "line 1 column 9: Expecting ',' delimiter", id="comma"),
        pytest.param(b'{"a": 1} x', "line 1 column 10: Extra data", id="something behind"),
        pytest.param(
            b'\xef\xbb\xbf{"a": 1}', "line 1 column 1: Unexpected UTF-8 BOM (decode using utf-8-sig)", id="BOM"
        ),
        pytest.param(b'{"a": "\xe9"}', "not UTF-8 at byte 7", id="Latin-1"),
        pytest.param('{"a": 1}'.encode("utf-16"), "not UTF-8 at byte 0", id="UTF-16"),
        pytest.param(b'{"a": {"b": 1, "b": 1}}', 'duplicate key "b"', id="duplicate key"),
        pytest.param(
            b'{"\\u001b": 1, "\\u001b": 1}', r'duplicate key "\x1b"', id="duplicate key of control characters"
        ),
        pytest.param(b'{"a": 1, "\\u0061": 1}', 'duplicate key "a"', id="duplicate key by escape"),
        pytest.param(b'{"a": NaN}', "NaN is not JSON", id="NaN"),
        pytest.param(b'{"a": Infinity}', "Infinity is not JSON", id="infinity"),
        pytest.param(b'{"a": -Infinity}', "-Infinity is not JSON", id="minus infinity"),
        pytest.param(b"[]", "not a JSON object", id="list"),
        pytest.param(b"1", "not a JSON object", id="number"),
    ],
)
def test_other_text_is_refused(text: bytes, message: str) -> None:
    error = refusal(text)
    assert (error.code, error.message) == ("OCIGPU-SPEC-2", f"config.json: {message}")


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"a":['])
def test_huge_nesting_is_refused(opening: bytes) -> None:
    assert refusal(opening * 200_000).message == "config.json: nested too deeply"


def test_huge_numbers_are_refused() -> None:
    assert len(refusal(b'{"a": ' + b"1" * 100_000 + b"}").message) < 300


def test_a_duplicate_among_very_many_keys_is_found_in_reasonable_time() -> None:
    text = "{" + ",".join(f'"{i}":0' for i in range(100_000)) + ',"99999":0}'
    assert refusal(text.encode()).message == 'config.json: duplicate key "99999"'


def test_same_key_in_different_objects_is_no_duplicate() -> None:
    assert parse_json(b'{"a": {"a": [{"a": 1}, {"a": 2}]}}', "x") == {"a": {"a": [{"a": 1}, {"a": 2}]}}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_what_json_can_say_is_read(document: dict[str, Any]) -> None:
    assert parse_json(json.dumps(document).encode(), "x") == document


# --- reading


def read_error(path: Path) -> SpecError:
    with pytest.raises(SpecError) as caught:
        read_config(str(path))
    return caught.value


def test_missing_bundle_and_file_are_named(tmp_path: Path) -> None:
    for bundle in (tmp_path, tmp_path / "nothing"):
        error = read_error(bundle)
        assert (error.code, error.message) == (
            "OCIGPU-SPEC-1",
            f"read {bundle}/config.json: No such file or directory",
        )


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for number, make in enumerate((os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path))):
        bundle = tmp_path / str(number)
        bundle.mkdir()
        make(bundle / "config.json")
        error = read_error(bundle)
        assert (error.code, error.message) == ("OCIGPU-SPEC-1", f"read {bundle}/config.json: not a regular file")
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    error = read_error(tmp_path)
    assert (error.code, error.message) == ("OCIGPU-SPEC-1", f"read {tmp_path}/config.json: larger than 32 MiB")


def test_another_name_can_be_read_absolute_or_in_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"a": 1}')
    assert read_config(str(tmp_path), "other.json").config == {"a": 1}
    assert read_config("/nonexistent", str(tmp_path / "other.json")).config == {"a": 1}


def test_the_current_directory_is_the_bundle_when_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert read_config("").path == "config.json"


# --- finding things


@pytest.mark.parametrize("parent", [None, 1, "x", [], {}, {"name": None}, {"name": 1}, {"name": "x"}])
def test_a_part_of_another_type_counts_as_absent(parent: Any) -> None:
    assert get_object(parent, "name") == {}
    assert get_list(parent, "name") == []


@pytest.mark.parametrize(
    ("root", "bundle", "expected"),
    [
        pytest.param("rootfs", "/b", "/b/rootfs", id="relative"),
        pytest.param("/r", "/b", "/r", id="absolute"),
        pytest.param("../r/./x", "/a/b", "/a/r/x", id="above"),
        pytest.param(".", "/b", "/b", id="the bundle itself"),
        pytest.param("r", "", os.path.join(os.getcwd(), "r"), id="current directory"),
    ],
)
def test_root_path_is_relative_to_the_bundle(root: str, bundle: str, expected: str) -> None:
    assert rootfs_path({"root": {"path": root}}, bundle) == expected


@pytest.mark.parametrize(
    "root", [None, {}, {"path": ""}, {"path": None}, {"path": 1}, {"path": "a\0b"}, {"path": "a\ud800"}, "rootfs"]
)
def test_a_missing_root_path_is_refused(root: Any) -> None:
    with pytest.raises(SpecError) as caught:
        rootfs_path({"root": root}, "/b")
    assert (caught.value.code, caught.value.message) == ("OCIGPU-SPEC-3", "/b/config.json: root.path is missing")


@pytest.mark.parametrize(
    "linux",
    [None, [], {}, {"namespaces": None}, {"namespaces": {}}, {"namespaces": ["mount", None, {"type": "pid"}]}],
)
def test_a_container_without_a_mount_namespace_cannot_have_gpus(linux: Any) -> None:
    with pytest.raises(SpecError) as caught:
        check_can_have_gpus({"linux": linux}, "/b/config.json")
    assert caught.value.code == "OCIGPU-SPEC-3"
    check_can_have_gpus({"linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}]}}, "/b/config.json")


# --- editing


def edited(config: Any, options: tuple[str, ...] = (), declare: bool = True) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(config))
    edit_config(copy, rule_entries(PLAN), HOOK, list(options), declare)
    return copy


def test_hook_has_its_options_before_the_command_and_a_complete_environment() -> None:
    config = edited({}, ("--config", "/etc/x.toml"))
    assert config["hooks"]["prestart"] == [
        {"path": HOOK, "args": ["ocigpu-hook", "--config", "/etc/x.toml", "prestart"], "env": HOOK_ENVIRONMENT}
    ]
    assert config["hooks"]["prestart"][0]["env"] is not HOOK_ENVIRONMENT
    assert all("=" in entry for entry in HOOK_ENVIRONMENT)


def test_rules_come_last_so_that_none_before_takes_them_back() -> None:
    deny = {"allow": False, "access": "rwm"}
    assert edited({"linux": {"resources": {"devices": [RULES[1], deny]}}})["linux"]["resources"]["devices"] == [
        deny,
        *RULES,
    ]


def test_rules_are_not_declared_where_no_runtime_can_enforce_them() -> None:
    assert edited({}, declare=False).keys() == {"hooks"}
    devices = [{"allow": False, "access": "rwm"}]
    config = edited({"linux": {"resources": {"devices": devices}}}, declare=False)
    assert config["linux"] == {"resources": {"devices": devices}}


@pytest.mark.parametrize(
    ("path", "is_ours"),
    [
        ("/usr/bin/nvidia-container-runtime-hook", True),
        ("/usr/bin/nvidia-container-toolkit", True),
        ("/opt/ocigpu-hook", True),
        ("ocigpu-hook", True),
        ("/usr/bin/nvidia-container-runtime-hook.real", False),
        ("/ocigpu-hook/other", False),
        ("/usr/bin/nvidia-ctk", False),
        (None, False),
        (7, False),
    ],
)
def test_only_hooks_that_give_gpus_are_replaced(path: Any, is_ours: bool) -> None:
    prestart = edited({"hooks": {"prestart": [{"path": path}]}})["hooks"]["prestart"]
    assert [entry["path"] for entry in prestart] == ([HOOK] if is_ours else [path, HOOK])


def test_hooks_of_other_stages_and_entries_of_other_types_stay() -> None:
    other = [{"path": "/usr/bin/nvidia-container-toolkit"}]
    config = edited({"hooks": {"createContainer": other, "prestart": [None, 1, "x", []]}})
    assert config["hooks"]["createContainer"] == other
    assert config["hooks"]["prestart"][:-1] == [None, 1, "x", []]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"hooks": []}, "hooks is not an object"),
        ({"hooks": {"prestart": {}}}, "hooks.prestart is not a list"),
        ({"linux": "x"}, "linux is not an object"),
        ({"linux": {"resources": 1}}, "linux.resources is not an object"),
        ({"linux": {"resources": {"devices": False}}}, "linux.resources.devices is not a list"),
    ],
)
def test_parts_of_another_type_are_not_replaced(config: dict[str, Any], name: str) -> None:
    with pytest.raises(SpecError) as caught:
        edited(config)
    assert (caught.value.code, caught.value.message) == ("OCIGPU-SPEC-3", f"config.json: {name}")


@pytest.mark.parametrize("rules", [RULES, RULES[:1]], ids=["same", "fewer"])
def test_rules_of_others_that_look_like_ours_stay_however_often_it_is_edited(rules: list[dict[str, Any]]) -> None:
    """docker run --device /dev/nvidia7:/dev/nvidia7:rw writes its rule as we do, beside our hook's request."""
    foreign = {"allow": True, "type": "c", "major": 195, "minor": 7, "access": "rw"}
    config = {"linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}, dict(foreign)]}}}
    for some in (RULES, rules, rules):
        edit_config(config, some, HOOK, [])
    assert foreign in get_rules(config)
    assert len(get_rules(config)) == 2 + len(rules)


parts = st.fixed_dictionaries(
    {},
    optional={
        "hooks": st.fixed_dictionaries({}, optional={"prestart": st.none() | st.lists(json_values, max_size=3)}),
        "linux": st.none()
        | st.fixed_dictionaries(
            {"x": json_values},
            optional={
                "resources": st.fixed_dictionaries(
                    {}, optional={"devices": st.lists(json_values | st.sampled_from(RULES), max_size=4)}
                )
            },
        ),
        "unknown": json_values,
    },
)


@given(parts)
def test_editing_twice_equals_editing_once_whatever_was_there(config: dict[str, Any]) -> None:
    once = edited(config)
    assert json.dumps(edited(once)) == json.dumps(once)
    assert list(once)[: len(config)] == list(config)
    assert json.dumps(once.get("unknown")) == json.dumps(config.get("unknown"))


@pytest.mark.parametrize("again", [pytest.param("/opt/gpu", id="same name"), pytest.param(HOOK, id="usual name")])
def test_a_hook_whose_program_has_another_name_is_not_added_twice(again: str) -> None:
    """hook.path of the settings names any program."""
    config: dict[str, Any] = {}
    edit_config(config, rule_entries(PLAN), "/opt/gpu", [])
    edit_config(config, rule_entries(PLAN), again, [])
    assert [entry["path"] for entry in config["hooks"]["prestart"]] == [again]


def test_an_edit_for_another_request_takes_the_former_rules_away() -> None:
    """A bundle is started again with fewer GPUs: a container that may make nodes must not reach the others."""
    mine = {"allow": True, "type": "c", "major": 195, "minor": 7, "access": "rwm"}
    config: dict[str, Any] = {"linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}, mine]}}}
    edit_config(config, rule_entries(PLAN), HOOK, [])
    other = Plan((AllowDevice(195, 255, "rw", ""), AllowDevice(195, 3, "rw", "")))
    edit_config(config, rule_entries(other), HOOK, [])
    deny, kept, *rules = config["linux"]["resources"]["devices"]
    assert (deny, kept) == ({"allow": False, "access": "rwm"}, mine)
    assert [(rule["major"], rule["minor"]) for rule in rules] == [(195, 255), (195, 3)]


# --- writing


def test_the_file_is_replaced_with_its_mode_and_nothing_is_left_beside(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"b": 1, "a": "\\ud800\\u0000é"}')
    path.chmod(0o640)
    before = path.stat()
    document = read_config(str(tmp_path))
    document.config["c"] = [1.5, 2**64, None]
    write_config(document)
    after = path.stat()
    assert path.read_text() == '{"b":1,"a":"\\ud800\\u0000\\u00e9","c":[1.5,18446744073709551616,null]}\n'
    assert (stat.S_IMODE(after.st_mode), after.st_uid, after.st_gid) == (0o640, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.root
def test_the_owner_of_the_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.chown(tmp_path / "config.json", 1234, 5678)
    write_config(read_config(str(tmp_path)))
    status = (tmp_path / "config.json").stat()
    assert (status.st_uid, status.st_gid) == (1234, 5678)


def test_a_hard_link_to_the_old_file_keeps_the_old_content(tmp_path: Path) -> None:
    """What others have open or linked never changes under them."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text("{}")
    os.link(bundle / "config.json", tmp_path / "link")
    document = read_config(str(bundle))
    document.config["x"] = 1
    write_config(document)
    assert (tmp_path / "link").read_text() == "{}"


def test_a_name_laid_in_wait_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "victim").write_text("untouched")
    (tmp_path / ".ocigpu-1-0").symlink_to("victim")
    monkeypatch.setattr(files, "draft_name", lambda: ".ocigpu-1-0")
    with pytest.raises(SpecError) as caught:
        write_config(read_config(str(tmp_path)))
    assert caught.value.code == "OCIGPU-SPEC-4"
    assert caught.value.message.endswith(": File exists")
    assert (tmp_path / "victim").read_text() == "untouched"
    assert (tmp_path / "config.json").read_text() == "{}"


def test_what_is_not_json_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1e999}')
    with pytest.raises(SpecError) as caught:
        write_config(read_config(str(tmp_path)))
    assert caught.value.code == "OCIGPU-SPEC-4"
    assert (tmp_path / "config.json").read_text() == '{"a": 1e999}'
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_failed_replacement_leaves_the_old_file_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    document = read_config(str(tmp_path))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()  # rename(2) onto a directory fails
    with pytest.raises(SpecError) as caught:
        write_config(document)
    assert (caught.value.code, caught.value.message) == (
        "OCIGPU-SPEC-4",
        f"replace {tmp_path}/config.json: Is a directory",
    )
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_full_disk_leaves_the_old_file_alone(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for the full disk: with SIGXFSZ ignored, write(2) fails with EFBIG."""
    (tmp_path / "config.json").write_text(json.dumps({"a": "x" * 100_000}))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
            write_config(read_config(str(tmp_path)))
        except SpecError as error:
            status = 0 if error.message == f"replace {tmp_path}/config.json: File too large" else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": "x" * 100_000}
    assert os.listdir(tmp_path) == ["config.json"]


def test_the_recursion_limit_of_the_interpreter_bounds_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    document = read_config(str(tmp_path))
    nested: dict[str, Any] = document.config
    for _ in range(sys.getrecursionlimit() * 100):
        nested["a"] = {}
        nested = nested["a"]
    with pytest.raises(SpecError) as caught:
        write_config(document)
    assert caught.value.code == "OCIGPU-SPEC-4"
    assert os.listdir(tmp_path) == ["config.json"]


def test_our_hook_under_create_runtime_is_not_run_twice() -> None:
    other = {"path": "/usr/bin/other", "args": ["other"]}
    ours = {"path": "/usr/local/bin/ocigpu-hook", "args": ["ocigpu-hook", "createRuntime"]}
    config = edited({"hooks": {"createRuntime": [ours, other]}})
    assert config["hooks"]["createRuntime"] == [other]
    assert len(config["hooks"]["prestart"]) == 1
