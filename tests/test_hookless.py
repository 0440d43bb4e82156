"""Mode ``spec`` as a whole: directories for graphics, and bundles that are left as they were."""

import errno
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.asking import request_from_variables
from support.bundle import base_config
from support.machine import LOADER

from ocigpu.bundle import hookless
from ocigpu.bundle.declared import Declared
from ocigpu.bundle.document import read_config
from ocigpu.bundle.edit import take_back
from ocigpu.bundle.hookless import declare_in_bundle, make_views
from ocigpu.bundle.rootfs import NeedsHookError
from ocigpu.core.errors import OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.sim.create import create_host
from ocigpu.system import libc, paths

PROFILE = ("/etc/nvidia/profiles", [("10-container.conf", 0o444, "{}\n")], [])
LINKS = ("/dev/dri/by-path", [], [("pci-0000:01:00.0-card", "../card0")])


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("simulated") / "host"
    create_host(str(directory), gpus=2, model="a100", driver_version="550.163.01")
    return directory


@pytest.fixture
def settings(host: Path) -> Settings:
    return Settings(simulation_root=str(host), mode="spec")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    directory = tmp_path / "bundle"
    for name in ("etc", "usr/lib64", "usr/lib/xorg"):
        (directory / "rootfs" / name).mkdir(parents=True)
    (directory / "rootfs/usr/lib64" / LOADER).touch()
    (directory / "rootfs/usr/lib64/libcuda.so").symlink_to("libcuda.so.525")
    (directory / "config.json").write_text(json.dumps(base_config(["true"])))
    return directory


def look(directory: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        found[str(path.relative_to(directory))] = (status.st_mode, status.st_uid, content)
    return found


def declare(bundle: Path, settings: Settings, devices: str = "0", capabilities: str = "all") -> None:
    variables = {"NVIDIA_VISIBLE_DEVICES": devices, "NVIDIA_DRIVER_CAPABILITIES": capabilities}
    request = request_from_variables(variables, settings)
    document = read_config(str(bundle))
    take_back(document.config)
    declare_in_bundle(document, request, settings, str(bundle), owns_policy=True)


# --- directories for graphics


class Views:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.settings = Settings(simulation_root=str(directory))

    def make(self, *views: Any) -> list[Path]:
        declared = Declared([], [], [], [], [], [], "", [], [], views, [], "", (), ())
        return [Path(path) for path in make_views(declared, self.settings)]

    @property
    def names(self) -> list[str]:
        return sorted(os.listdir(self.directory / "run/ocigpu"))


@pytest.fixture
def views(tmp_path: Path) -> Views:
    return Views(tmp_path)


def test_a_view_has_its_files_and_links_and_nothing_can_be_added(views: Views) -> None:
    old = os.umask(0o077)
    try:
        profile, links = views.make(PROFILE, LINKS)
    finally:
        os.umask(old)
    assert (profile / "10-container.conf").read_text() == "{}\n"
    assert stat.S_IMODE((profile / "10-container.conf").stat().st_mode) == 0o444
    assert os.readlink(links / "pci-0000:01:00.0-card") == "../card0"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (profile, links)} == {0o555}
    assert stat.S_IMODE(profile.parent.stat().st_mode) == 0o700
    assert profile.parent == views.directory / "run/ocigpu"


def test_equal_views_are_one_and_others_are_others(views: Views) -> None:
    first = views.make(PROFILE)
    assert views.make(PROFILE) == first
    assert views.make(("/elsewhere", *PROFILE[1:])) == first
    other = views.make((PROFILE[0], [("10-container.conf", 0o444, "{ }\n")], []))
    mode = views.make((PROFILE[0], [("10-container.conf", 0o400, "{}\n")], []))
    assert len({*first, *other, *mode}) == len(views.names) == 3


def test_no_views_make_no_directory(views: Views) -> None:
    assert views.make() == []
    assert os.listdir(views.directory) == []


def test_what_a_killed_process_has_left_goes_and_what_another_writes_stays(views: Views) -> None:
    (path,) = views.make(PROFILE)
    written = path.with_name(f".ocigpu-{os.getpid()}-0")
    path.rename(written)
    left = path.with_name(f".ocigpu-{1 << 30}-0")
    left.mkdir()
    (left / "10-container.conf").touch()
    assert views.make(PROFILE) == [path]
    assert (path / "10-container.conf").read_text() == "{}\n"
    assert views.names == sorted([path.name, written.name])


@pytest.mark.parametrize("step", ["symlink", "fchmod", "rename"])
def test_a_view_that_cannot_be_made_leaves_nothing(views: Views, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    views.make(PROFILE)
    before = views.names

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(OSError, match="No space left"):
            views.make(LINKS)
    assert views.names == before


def test_many_at_once_make_one_view(views: Views) -> None:
    many = (PROFILE[0], [(f"file{number}", 0o444, "x" * 1000) for number in range(50)], [])
    begin = threading.Barrier(8)
    found: list[list[Path]] = []

    def make() -> None:
        begin.wait()
        found.append(views.make(many))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    made = {path.name for paths in found for path in paths}
    assert views.names == [*made]


def test_the_number_of_views_is_bounded(views: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hookless, "MAX_VIEWS", 3)
    numbered = [(PROFILE[0], [(str(number), 0o444, "")], []) for number in range(4)]
    for view in numbered[:3]:
        views.make(view)
    with pytest.raises(NeedsHookError, match="3 directories"):
        views.make(numbered[3])
    assert len(views.make(numbered[0])) == 1, "those that are there can be used"


# --- bundles


@pytest.mark.parametrize("devices", ["0", "all", "none"])
def test_a_bundle_gets_everything_or_nothing(bundle: Path, settings: Settings, devices: str) -> None:
    declare(bundle, settings, devices)
    assert os.readlink(bundle / "rootfs/usr/lib64/libcuda.so") == "libcuda.so.1"
    assert "ocigpu/declared" in (bundle / "config.json").read_text()


def no_root(bundle: Path) -> None:
    (bundle / "rootfs").rename(bundle / "other")


def root_is_a_file(bundle: Path) -> None:
    no_root(bundle)
    (bundle / "rootfs").write_text("x")


def root_of_the_host(bundle: Path) -> None:
    no_root(bundle)
    (bundle / "rootfs").symlink_to("/")


def odd_cache(bundle: Path) -> None:
    (bundle / "rootfs/etc/ld.so.cache").write_text("x")


def last_link_in_the_way(bundle: Path) -> None:
    (bundle / "rootfs/usr/lib64/libvdpau_nvidia.so").write_text("a file")
    (bundle / "rootfs/usr/lib64/libGLX_nvidia.so.0").write_text("a file")


@pytest.mark.parametrize("change", [no_root, root_is_a_file, root_of_the_host, odd_cache, last_link_in_the_way])
def test_what_needs_the_hook_changes_nothing(
    bundle: Path, settings: Settings, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(bundle)
    before = look(bundle) if change is not root_of_the_host else look(bundle / "other")
    with pytest.raises(NeedsHookError):
        declare(bundle, settings)
    assert before == (look(bundle) if change is not root_of_the_host else look(bundle / "other"))
    asked: list[str] = []
    real = libc.openat2

    def openat2(root_fd: int, path: str, *more: int) -> int:
        asked.append(path)
        return real(root_fd, path, *more)

    monkeypatch.setattr(libc, "openat2", openat2)
    root_fd = os.open(bundle, os.O_PATH)
    try:
        os.close(paths.open_in_root(root_fd, "/", os.O_PATH))
    finally:
        os.close(root_fd)
    assert asked, "later paths are resolved by the kernel again"


@pytest.mark.parametrize("devices", ["7", "GPU-nonsense", "0:0"])
def test_what_cannot_be_granted_changes_nothing(bundle: Path, settings: Settings, devices: str) -> None:
    before = look(bundle)
    with pytest.raises(OcigpuError):
        declare(bundle, settings, devices)
    assert look(bundle) == before


@pytest.mark.parametrize("key", ["mounts", "annotations", "hooks"])
def test_a_config_of_wrong_types_changes_nothing(bundle: Path, settings: Settings, key: str) -> None:
    config = base_config(["true"])
    config[key] = 7
    (bundle / "config.json").write_text(json.dumps(config))
    before = look(bundle)
    with pytest.raises(OcigpuError, match=key) as caught:
        declare(bundle, settings)
    assert caught.value.code == "OCIGPU-SPEC-3"
    assert look(bundle) == before


@pytest.mark.parametrize("name", ["config.json", "ld.so.cache"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(errno.EIO, "Input/output error")])
def test_whatever_happens_everything_is_undone(
    bundle: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException
) -> None:
    before = look(bundle)
    descriptors = len(os.listdir("/proc/self/fd"))
    real = os.rename

    def fail(*arguments: Any, **named: Any) -> None:
        if arguments[1] == name:
            raise error
        real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises((type(error), OcigpuError, NeedsHookError)):
            declare(bundle, settings)
    left = {path: entry for path, entry in look(bundle).items() if ".ocigpu-" not in path}
    assert left == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def killed_at(number: int, work: Callable[[], None]) -> bool:
    """Do the work in a child that ends without a word before its n-th change; tells whether it got that far."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    count = 0

    def step(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os._exit(9)
            return real(*arguments, **named)

        return call

    for name in ("symlink", "rename", "mkdir", "fchmod", "unlink"):
        setattr(os, name, step(getattr(os, name)))
    try:
        work()
    finally:
        os._exit(0)


@pytest.mark.rest
def test_a_start_after_one_that_was_killed_is_like_any_other(
    bundle: Path, settings: Settings, tmp_path: Path, share: Callable[..., list[int]]
) -> None:
    """What is left is what the runtime's own empty files are: a part of the container's layer, in nobody's way."""
    fresh = tmp_path / "fresh"
    shutil.copytree(bundle, fresh, symlinks=True)
    declare(fresh, settings)
    expected = look(fresh / "rootfs")
    for number in share(range(1, 200), 3, 0):
        again = tmp_path / str(number)
        shutil.copytree(bundle, again, symlinks=True)
        killed = killed_at(number, lambda directory=again: declare(directory, settings))
        json.loads((again / "config.json").read_text())
        declare(again, settings)
        left = {path: entry for path, entry in look(again / "rootfs").items() if "/.ocigpu-" not in path}
        assert left == expected
        if not killed:
            break
    assert number > 30
    assert not killed
