import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ocigpu.core.errors import OcigpuError
from ocigpu.sim.create import create_host
from ocigpu.sim.made import MARKER_NAME, describe_host, find_mounts, remove_host

REMOVE = "import sys; from ocigpu.sim.made import remove_host; remove_host(sys.argv[1])"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    create_host(str(tmp_path / "host"), 1, "t4", compat32=False, ldcache=False)
    return tmp_path / "host"


def refused(directory: Path) -> OcigpuError:
    with pytest.raises(OcigpuError) as caught:
        remove_host(str(directory))
    assert caught.value.code == "OCIGPU-SIM-1"
    return caught.value


def test_host_is_removed_with_what_was_added_to_it(host: Path, tmp_path: Path) -> None:
    (host / "faults").write_text("lost 0\n")
    (host / "dev/more").mkdir()
    remove_host(str(host))
    assert os.listdir(tmp_path) == []
    assert "not a simulated host" in refused(host).message


def test_links_out_of_the_host_are_not_followed(host: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    (host / "out").symlink_to(tmp_path / "precious")
    (host / "dev/out").symlink_to(tmp_path / "precious")
    remove_host(str(host))
    assert (tmp_path / "precious/file").exists()


@pytest.mark.parametrize("marker", [None, "", "{}", "[]", '{"format": 1, "model": 5, "gpus": []}', "\xff"])
def test_directory_that_is_not_ours_is_left_alone(tmp_path: Path, marker: str | None) -> None:
    (tmp_path / "file").touch()
    if marker is not None:
        (tmp_path / MARKER_NAME).write_bytes(marker.encode("latin-1"))
    assert "not a simulated host" in refused(tmp_path).message
    assert (tmp_path / "file").exists()


def test_host_of_another_format_is_left_alone(host: Path) -> None:
    marker = json.loads((host / MARKER_NAME).read_text())
    (host / MARKER_NAME).write_text(json.dumps({**marker, "format": 99}))
    assert 'simulated host of format "99", not 1' in refused(host).message


def test_marker_that_is_a_link_or_no_file_is_not_read(host: Path, tmp_path: Path) -> None:
    (host / MARKER_NAME).rename(tmp_path / "marker")
    (host / MARKER_NAME).symlink_to(tmp_path / "marker")
    assert "Too many levels of symbolic links" in refused(host).message
    (host / MARKER_NAME).unlink()
    os.mkfifo(host / MARKER_NAME)
    assert "was not written by ocigpu" in refused(host).message


def test_link_to_a_host_is_refused(host: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(host)
    assert "a symbolic link" in refused(tmp_path / "link").message
    assert (host / "config.toml").exists()


@pytest.mark.root
def test_host_with_a_mount_below_is_refused(host: Path) -> None:
    shell = 'mount --make-rprivate / && mount -t tmpfs none "$1/tmp" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", shell, "sh", host, sys.executable, REMOVE], capture_output=True, text=True
    )
    assert f"remove {host}: {host}/tmp is mounted" in done.stderr
    assert (host / "config.toml").exists()
    assert (host / "dev/nvidia0").exists()


def test_mount_points_are_read_with_their_escapes(tmp_path: Path) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 0:5 / /a\\040b/c rw - tmpfs none rw\n"
        "3 1 0:5 / /a\\040bc rw - tmpfs none rw\n"
        "4 1 0:5 / /a\\040b rw - tmpfs none rw\n"
    )
    assert find_mounts("/a b", str(mountinfo)) == ["/a b/c", "/a b"]


def test_only_a_newline_ends_a_line_of_the_mount_table(tmp_path: Path) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_bytes(b"2 1 0:5 / /a\r/b rw - tmpfs none rw\n3 1 0:5 / /a\x0c/c rw - tmpfs none rw\n")
    assert find_mounts("/a\r", str(mountinfo)) == ["/a\r/b"]


def test_interrupted_removal_can_be_repeated(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", fail)
        assert "Permission denied" in refused(host).message
    remove_host(str(host))
    assert not host.exists()


def test_description_is_json_and_names_everything(sim_host: Path) -> None:
    host = describe_host(str(sim_host))
    assert json.loads(json.dumps(host)) == host
    assert (host["simulated"], host["model"], host["product"]) == (True, "h100", "NVIDIA H100 80GB HBM3")
    assert host["config"] == str(sim_host / "config.toml")
    assert [gpu["minor"] for gpu in host["gpus"]] == [0, 1, 2, 3]
    assert [mig["profile"] for mig in host["gpus"][0]["mig_devices"]] == ["1g.10gb", "1g.10gb", "3g.40gb"]
    assert host["gpus"][1]["mig_enabled"]
    assert host["faults"] == []


def test_description_names_faults(host: Path) -> None:
    (host / "faults").write_text("lost 0\n\n")
    description = describe_host(str(host))
    assert description["faults"] == ["lost 0"]
    assert "faults are switched on: lost 0" in description["notes"]


def test_other_directories_have_no_description(tmp_path: Path) -> None:
    with pytest.raises(OcigpuError, match="not a simulated host"):
        describe_host(str(tmp_path))
