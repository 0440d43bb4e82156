"""A specification on disk is written when its content would be another, and only then."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.products import one_in

from ocigpu.cdi.refresh import RefreshedSpec, refresh
from ocigpu.core.errors import OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.gpus.fingerprint import ANNOTATION
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.sim.create import create_host
from ocigpu.system import store as cache
from ocigpu.system.settings_file import read_settings

Refresh = Callable[[], RefreshedSpec]


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "SYSTEM_DIRECTORY", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    create_host(str(tmp_path / "host"), gpus=2)
    return tmp_path / "host"


@pytest.fixture
def settings(host: Path) -> Settings:
    return read_settings(str(host / "config.toml"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cdi/nvidia.yaml"


@pytest.fixture
def run(settings: Settings, target: Path) -> Refresh:
    return lambda: refresh(GenerateOptions(), settings, str(target))


def identity(path: Path) -> tuple[int, int, bytes]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, path.read_bytes()


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.chmod(0o644)
    path.write_text(text.replace(old, new))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_a_missing_file_is_written_and_then_left_alone(run: Refresh, target: Path) -> None:
    first = run()
    assert (first.path, first.changed, first.reasons) == (str(target), True, ("there was no file",))
    assert [device["name"] for device in load(target)["devices"]][:2] == ["0", "1"]
    assert target.stat().st_mode & 0o7777 == 0o644
    before = identity(target)
    second = run()
    assert (second.changed, second.reasons) == (False, ())
    assert identity(target) == before


def test_a_file_of_the_same_content_in_another_form_is_left_alone(run: Refresh, target: Path) -> None:
    run()
    target.write_text(json.dumps(load(target), indent=1))
    before = identity(target)
    assert not run().changed
    assert identity(target) == before


def test_a_change_of_the_host_is_the_reason(run: Refresh, target: Path, host: Path) -> None:
    run()
    old = load(target)["annotations"][ANNOTATION]
    (host / "dev/nvidia-uvm-tools").chmod(0o600)
    done = run()
    assert (done.changed, done.reasons) == (True, ("device numbers or nodes have changed",))
    assert load(target)["annotations"][ANNOTATION] != old
    assert not run().changed


def test_content_that_somebody_changed_is_put_right(run: Refresh, target: Path) -> None:
    run()
    good = target.read_text()
    edit(target, "/dev/nvidia1", "/dev/nvidia0")
    done = run()
    assert (done.changed, done.reasons) == (True, ("its content has changed",))
    assert target.read_text() == good


@pytest.mark.parametrize("content", ["a: [", "[]\n", "annotations: 5\n", "{}\n", ""])
def test_a_file_that_is_no_specification_is_replaced(run: Refresh, target: Path, content: str) -> None:
    target.parent.mkdir()
    target.write_text(content)
    done = run()
    assert done.changed
    assert len(done.reasons) == 1
    assert load(target)["kind"] == "nvidia.com/gpu"


def test_a_file_name_without_extension_gets_one(settings: Settings, tmp_path: Path) -> None:
    done = refresh(GenerateOptions(), settings, str(tmp_path / "gpus"))
    assert done.path == str(tmp_path / "gpus.yaml")
    assert Path(done.path).is_file()


def unload_driver(host: Path) -> None:
    (host / "proc/driver/nvidia").rename(host / "proc/driver/gone")
    (host / "sys/module/nvidia/version").unlink()
    for library in host.glob("usr/lib*/**/lib*.so*"):
        library.unlink()


def test_without_a_driver_the_file_stays_and_is_called_stale(run: Refresh, target: Path, host: Path) -> None:
    run()
    before = identity(target)
    unload_driver(host)
    with pytest.raises(OcigpuError) as caught:
        run()
    assert caught.value.code == "OCIGPU-HOST-1"
    assert f"{target} is unchanged, and is stale: the driver was 5" in caught.value.message
    assert "is not loaded" in caught.value.message
    assert identity(target) == before
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_without_a_driver_and_a_file_nothing_is_written(run: Refresh, target: Path, host: Path) -> None:
    unload_driver(host)
    with pytest.raises(OcigpuError) as caught:
        run()
    assert caught.value.code == "OCIGPU-HOST-1"
    assert str(target) not in caught.value.message
    assert not target.parent.exists()


def test_a_directory_that_cannot_be_opened_is_named(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OcigpuError) as caught:
        refresh(GenerateOptions(), settings, str(tmp_path / "file/nvidia.yaml"))
    assert caught.value.code == "OCIGPU-CDI-8"
    assert caught.value.message == f"write {tmp_path}/file/nvidia.yaml: Not a directory"


SCRIPT = """\
import sys
import ocigpu.system.store
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.cdi.refresh import refresh
from ocigpu.system.settings_file import read_settings
ocigpu.system.store.SYSTEM_DIRECTORY = sys.argv[3]
print("begin", flush=True)
refresh(GenerateOptions(), read_settings(sys.argv[1]), sys.argv[2])
"""


def test_a_refresh_waits_for_another_one(settings: Settings, target: Path, cache_directory: Path, run: Refresh) -> None:
    run()
    target.unlink()
    lock = os.open(cache_directory / "refresh.lock", os.O_RDWR)
    inode = os.fstat(lock).st_ino
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = [sys.executable, "-c", SCRIPT, settings.path, str(target), str(cache_directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "begin\n"
        while not any(f":{inode} " in line and "->" in line for line in Path("/proc/locks").read_text().splitlines()):
            assert other.poll() is None
        assert not target.exists()
        os.close(lock)
        assert other.wait() == 0
    assert target.exists()


def test_who_may_read_the_directory_cannot_hold_up_a_refresh(run: Refresh, target: Path) -> None:
    run()
    held = [os.open(path, os.O_RDONLY) for path in (target, target.parent)]
    try:
        for fd in held:
            fcntl.flock(fd, fcntl.LOCK_EX)
        target.write_text("{}")
        assert run().changed
    finally:
        for fd in held:
            os.close(fd)


def test_without_a_place_for_the_lock_the_file_is_written_all_the_same(
    run: Refresh, target: Path, cache_directory: Path
) -> None:
    cache_directory.write_text("")
    run()
    assert target.exists()


@pytest.mark.parametrize(
    ("file", "newest", "asked", "written"),
    one_in(
        3,
        [
            ("", "", "", "0.6.0"),
            ("", "0.5.0", "", "0.5.0"),
            ("", "1.0.0", "", "0.6.0"),
            ("", "0.5.0", "1.0.0", "0.6.0"),
            ("0.5.0", "", "", "0.5.0"),
            ("0.5.0", "1.0.0", "", "0.5.0"),
            ("0.5.0", "", "0.6.0", "0.6.0"),
            ("0.6.0", "0.5.0", "", "0.5.0"),
            ("0.3.0", "1.0.0", "", "0.5.0"),
        ],
    ),
)
def test_the_version_is_what_engines_read_and_a_lowered_file_stays_low(
    settings: Settings, target: Path, file: str, newest: str, asked: str, written: str
) -> None:
    if file:
        refresh(GenerateOptions(max_version=max(file, "0.5.0")), settings, str(target))
        if file < "0.5.0":
            edit(target, "cdiVersion: 0.5.0", f"cdiVersion: {file}")
    refresh(GenerateOptions(max_version=asked), settings, str(target), newest)
    assert yaml.safe_load(target.read_text())["cdiVersion"] == written
    assert not refresh(GenerateOptions(max_version=asked), settings, str(target), newest).changed
