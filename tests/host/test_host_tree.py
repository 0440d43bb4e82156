import os
from pathlib import Path

import pytest

from ocigpu.core.errors import HostError
from ocigpu.core.settings import Settings
from ocigpu.gpus.tree import Tree, find_roots, read_text, small_number


@pytest.mark.parametrize(
    ("link", "target", "path", "expected"),
    [
        pytest.param("usr/lib64", "/opt/lib", "/usr/lib64/a.so", "/opt/lib/a.so", id="absolute link is the tree's"),
        pytest.param("usr/lib64", "../opt/lib", "/usr/lib64/a.so", "/opt/lib/a.so", id="relative link"),
        pytest.param("usr/lib64", "../../../../opt/lib", "/usr/lib64/a.so", "/opt/lib/a.so", id="dots stop at the top"),
        pytest.param("usr/lib64", "/nowhere", "/usr/lib64/a.so", "", id="dangling link"),
        pytest.param("usr/loop", "loop", "/usr/loop", "", id="link to itself"),
        pytest.param("usr/x", "/opt", "//usr/./x/../opt/lib", "/opt/lib", id="odd spelling"),
    ],
)
def test_paths_resolve_inside_the_tree(tmp_path: Path, link: str, target: str, path: str, expected: str) -> None:
    (tmp_path / "opt/lib").mkdir(parents=True)
    (tmp_path / "opt/lib/a.so").touch()
    (tmp_path / "usr").mkdir()
    (tmp_path / link).symlink_to(target)
    tree = Tree(str(tmp_path))
    assert tree.resolve(path) == expected
    assert tree.find(path) == (str(tmp_path) + expected if expected else "")


def test_the_real_root_resolves_as_the_kernel_does(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/file").touch()
    (tmp_path / "a").symlink_to("b")
    assert Tree("").resolve(f"{tmp_path}/a/file") == os.path.realpath(f"{tmp_path}/a/file")


def test_a_long_chain_of_links_counts_as_nothing(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"l{number}").symlink_to(f"l{number + 1}")
    (tmp_path / "l60").touch()
    tree = Tree(str(tmp_path))
    assert tree.resolve("/l0") == ""
    assert tree.resolve("/l30") == "/l60"


@pytest.mark.parametrize(
    ("settings", "nodes", "expected"),
    [
        pytest.param({}, False, ("", "", "/proc", "/sys", False), id="ordinary host"),
        pytest.param({"driver_root": "ROOT"}, False, ("ROOT", "", "/proc", "/sys", False), id="driver root, no nodes"),
        pytest.param({"driver_root": "ROOT"}, True, ("ROOT", "ROOT", "/proc", "/sys", False), id="driver root, nodes"),
        pytest.param(
            {"driver_root": "ROOT", "driver_dev_root": "/"}, True, ("ROOT", "", "/proc", "/sys", False), id="dev root"
        ),
        pytest.param(
            {"simulation_root": "ROOT/"}, False, ("ROOT", "ROOT", "ROOT/proc", "ROOT/sys", True), id="simulated"
        ),
    ],
)
def test_roots_follow_the_settings(
    tmp_path: Path, settings: dict[str, str], nodes: bool, expected: tuple[object, ...]
) -> None:
    if nodes:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidiactl").touch()

    def here(value: object) -> object:
        return value.replace("ROOT", str(tmp_path)) if isinstance(value, str) else value

    found = find_roots(Settings(**{key: here(value) for key, value in settings.items()}))
    assert tuple(found) == tuple(map(here, expected))


def test_text_is_cut_at_the_limit_and_absent_files_are_none(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 100_000)
    assert read_text(str(tmp_path / "big"), 65_000) == "x" * 65_000
    assert read_text(str(tmp_path / "none")) is None
    assert read_text(str(tmp_path / "big/none")) is None


def test_a_file_that_cannot_be_read_is_named_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        read_text(str(tmp_path))
    assert caught.value.code == "OCIGPU-HOST-3"
    assert caught.value.message == f"read {tmp_path}: Is a directory"


@pytest.mark.parametrize("text", ["", "-1", "1 ", "\u0661", "9" * 11, "0x1", "1_0"])
def test_only_short_plain_decimals_are_numbers(text: str) -> None:
    assert small_number(text) == -1


def test_procfs_files_are_read_whole() -> None:
    text = read_text("/proc/self/mountinfo", 1 << 20)
    assert text
    assert text.endswith("\n")
