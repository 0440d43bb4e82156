"""Specifications as text, and files that are replaced as a whole or not at all."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.cdi.write import dump_json, dump_yaml, target_of, write_spec
from ocigpu.core.errors import CdiError

SPEC: dict[str, Any] = {
    "kind": "vendor.com/gpu",
    "cdiVersion": "0.6.0",
    "devices": [{"name": "0", "containerEdits": {"env": ["A="]}}],
}


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("all", "all"),
        ("0", '"0"'),
        ("0:1", '"0:1"'),
        ("GPU-4d4f434b", "GPU-4d4f434b"),
        ("0.6.0", "0.6.0"),
        ("0.7", '"0.7"'),
        ("1e5", '"1e5"'),
        (".5", '".5"'),
        ("--link", "--link"),
        ("-", '"-"'),
        ("- a", '"- a"'),
        ("+", '"+"'),
        ("../card1::/dev/dri/by-path/pci-0000:01:00.0-card", "../card1::/dev/dri/by-path/pci-0000:01:00.0-card"),
        ("NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_VISIBLE_DEVICES=void"),
        ("a: b", '"a: b"'),
        ("a #b", '"a #b"'),
        ("none", '"none"'),
        ("No", '"No"'),
        (".inf", '".inf"'),
        ("", '""'),
        ('say "hi"\n', r'"say \"hi\"\n"'),
        ("\x7f", r'"\u007f"'),
    ],
)
def test_text_is_quoted_where_a_reader_could_take_it_for_something_else(text: str, written: str) -> None:
    assert dump_yaml({"k": text}) == f"---\nk: {written}\n"
    assert yaml.safe_load(dump_yaml({"k": text})) == {"k": text}


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text(
    "0123456789:.-+_eExXabnoy =#", max_size=8
)
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_any_data_is_read_back_as_it_was(data: dict[str, Any]) -> None:
    assert yaml.safe_load(dump_yaml(data)) == (data or None)
    assert json.loads(dump_json(data)) == data


def test_fields_are_in_the_order_of_the_cdi_library() -> None:
    node = {"gid": 1, "permissions": "rw", "hostPath": "/h", "path": "/p", "type": "c"}
    edits = {
        "mounts": [{"options": [], "containerPath": "/c", "hostPath": "/h"}],
        "deviceNodes": [node],
        "env": [],
    }
    hook = {"env": ["A="], "args": ["x"], "path": "/x", "hookName": "prestart"}
    spec = {"containerEdits": {**edits, "hooks": [hook]}, "annotations": {"b": "1", "a": "2"}, **SPEC, "other": 1}
    written = json.loads(dump_json(spec))
    assert list(written) == ["cdiVersion", "kind", "annotations", "devices", "containerEdits", "other"]
    assert list(written["annotations"]) == ["a", "b"]
    assert list(written["containerEdits"]) == ["env", "deviceNodes", "hooks", "mounts"]
    assert list(written["containerEdits"]["deviceNodes"][0]) == ["path", "hostPath", "type", "permissions", "gid"]
    assert list(written["containerEdits"]["hooks"][0]) == ["hookName", "path", "args", "env"]
    assert list(written["containerEdits"]["mounts"][0]) == ["hostPath", "containerPath", "options"]
    assert written == spec


def test_json_is_one_line() -> None:
    assert dump_json(SPEC) == (
        '{"cdiVersion":"0.6.0","kind":"vendor.com/gpu","devices":[{"name":"0","containerEdits":{"env":["A="]}}]}'
    )


@pytest.mark.parametrize(
    ("path", "wanted", "expected"),
    [
        ("a.yaml", "", ("a.yaml", "yaml")),
        ("a.json", "", ("a.json", "json")),
        ("a.json", "yaml", ("a.json", "json")),
        ("a.yaml", "json", ("a.yaml", "yaml")),
        ("b.yml", "", ("b.yml", "yaml")),
        ("e.JSON", "", ("e.JSON", "json")),
        ("c", "", ("c.yaml", "yaml")),
        ("c", "json", ("c.json", "json")),
        ("nvidia.com-gpu", "", ("nvidia.com-gpu.yaml", "yaml")),
        ("dir.json/c", "", ("dir.json/c.yaml", "yaml")),
    ],
)
def test_the_extension_decides_the_format(path: str, wanted: str, expected: tuple[str, str]) -> None:
    assert target_of(path, wanted) == expected


def test_a_file_gets_mode_0644_and_its_directories_0755_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_spec(SPEC, str(tmp_path / "a/b/nvidia.yaml"), "yaml")
    finally:
        os.umask(before)
    assert yaml.safe_load((tmp_path / "a/b/nvidia.yaml").read_text()) == SPEC
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b", "a/b/nvidia.yaml")]
    assert modes == [0o755, 0o755, 0o644]
    assert os.listdir(tmp_path / "a/b") == ["nvidia.yaml"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "nvidia.json").symlink_to("elsewhere")
    write_spec(SPEC, str(tmp_path / "nvidia.json"), "json")
    assert (tmp_path / "elsewhere").read_text() == "kept"
    assert json.loads((tmp_path / "nvidia.json").read_text()) == SPEC


@pytest.mark.parametrize("obstacle", ["directory at the place", "file instead of a directory"])
def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, obstacle: str) -> None:
    if obstacle == "directory at the place":
        (tmp_path / "nvidia.json").mkdir()
        path = tmp_path / "nvidia.json"
    else:
        (tmp_path / "file").write_text("kept")
        path = tmp_path / "file/nvidia.json"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CdiError) as caught:
        write_spec(SPEC, str(path), "json")
    assert caught.value.code == "OCIGPU-CDI-8"
    assert caught.value.message.startswith(f"write {path}: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_no_text_of_unicode_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    with pytest.raises(CdiError) as caught:
        write_spec({**SPEC, "kind": "\ud800"}, str(tmp_path / "a/nvidia.json"), "json")
    assert caught.value.code == "OCIGPU-CDI-8"
    assert list(tmp_path.iterdir()) == []
