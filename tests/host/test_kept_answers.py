"""What is declared for a request is kept for equal requests, by this user alone, while the host stays as it is."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.asking import request_from_variables
from support.machine import LOADER, MUSL_LOADER
from support.products import one_in
from test_host_cached import CHANGES

from ocigpu.bundle import hookless
from ocigpu.bundle.declared import Declared
from ocigpu.bundle.from_plan import declare
from ocigpu.bundle.hookless import find_declared
from ocigpu.core import rawjson
from ocigpu.core.errors import OcigpuError
from ocigpu.core.facts import ImageFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus import cached
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.plan import make_plan
from ocigpu.gpus.request import Request
from ocigpu.provision.image import read_layout
from ocigpu.sim.create import create_host
from ocigpu.system.store import seal, unseal


class Starts:
    """What starts of one image on one host declare, and how often that was made anew."""

    def __init__(self, host: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.image, self.made = host, image, 0
        self.settings = Settings(simulation_root=str(host), mode="spec")
        real = hookless.make_declared

        def count(root_fd: int, request: Request, settings: Settings) -> Declared:
            self.made += 1
            return real(root_fd, request, settings)

        monkeypatch.setattr(hookless, "make_declared", count)

    def request(self, devices: str = "all", **variables: str) -> Request:
        asked = {"NVIDIA_VISIBLE_DEVICES": devices, "NVIDIA_DRIVER_CAPABILITIES": "all", **variables}
        return request_from_variables(asked, self.settings)

    def start(self, request: Request | None = None, settings: Settings | None = None) -> str:
        """Return what is declared as JSON, or the code of the error."""
        root_fd = os.open(self.image, os.O_PATH)
        try:
            return text_of(find_declared(root_fd, request or self.request(), settings or self.settings))
        except OcigpuError as error:
            return error.code
        finally:
            os.close(root_fd)

    def is_used(self, request: Request | None = None, settings: Settings | None = None) -> bool:
        before = self.made
        self.start(request, settings)
        return self.made == before

    def anew(self) -> str:
        """Return what is declared when nothing is kept."""
        root_fd = os.open(self.image, os.O_PATH)
        try:
            facts = read_host_facts(self.settings)
            image = ImageFacts(*read_layout(root_fd))
            return text_of(declare(make_plan(facts, self.request(), self.settings, image, "spec"), facts))
        except OcigpuError as error:
            return error.code
        finally:
            os.close(root_fd)

    @property
    def files(self) -> list[Path]:
        return sorted((self.host / "run/ocigpu").glob("declared-*"))


def text_of(declared: Declared) -> str:
    return rawjson.dump(declared._asdict())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    create_host(str(directory / "host"), gpus=2, mig=("0:1g.5gb",), model="a100", driver_version="550.163.01")
    return directory / "host"


@pytest.fixture
def starts(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    """A host that is taken for settled although it is new, and an image."""
    monkeypatch.setattr(cached, "SETTLED", -1.0)
    subprocess.run(["cp", "-a", model, tmp_path / "host"], check=True)
    (tmp_path / "image/etc").mkdir(parents=True)
    (tmp_path / "image/usr/lib64").mkdir(parents=True)
    (tmp_path / "image/usr/lib64" / LOADER).touch()
    found = Starts(tmp_path / "host", tmp_path / "image", monkeypatch)
    found.start()
    found.start()  # the facts are kept since the first one
    assert found.is_used()
    return found


def test_a_start_looks_once_whether_its_facts_hold(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that the shim forks takes what the shim has found valid, and nothing else."""
    monkeypatch.setattr(cached, "_proved", None)
    assert cached.read_proved(starts.settings) is None
    assert cached.read_stamp(starts.settings)
    assert cached.read_proved(starts.settings) == read_host_facts(starts.settings)
    assert cached.read_proved(starts.settings._replace(mode="hook")) is None
    with monkeypatch.context() as later:
        later.setattr(cached, "JUST_NOW", -1.0)
        assert cached.read_proved(starts.settings) is None
    (starts.host / "dev/nvidia1").unlink()
    assert not cached.read_stamp(starts.settings)
    assert cached.read_proved(starts.settings) is None


def test_what_is_kept_is_what_would_be_made(starts: Starts) -> None:
    assert starts.is_used()
    assert starts.start() == starts.anew()
    (file,) = starts.files
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("change", one_in(4, CHANGES.values()), ids=list(CHANGES))
def test_a_change_of_the_host_is_seen_by_the_next_start(starts: Starts, change: Callable[[Path], object]) -> None:
    change(starts.host)
    before = starts.made
    assert starts.start() == starts.anew()
    assert starts.made == before + 1


def to_debian(image: Path) -> None:
    (image / "etc/debian_version").write_text("12.4\n")


def to_musl(image: Path) -> None:
    (image / "usr/lib64" / LOADER).rename(image / "usr/lib64" / MUSL_LOADER)


def with_lib32(image: Path) -> None:
    (image / "usr/lib").mkdir()


def with_compat(image: Path) -> None:
    (image / "usr/local/cuda/compat").mkdir(parents=True)


@pytest.mark.parametrize("change", [to_debian, to_musl, with_lib32, with_compat])
def test_another_image_gets_what_is_made_for_it(starts: Starts, change: Callable[[Path], None]) -> None:
    change(starts.image)
    before = starts.made
    assert starts.start() == starts.anew()
    assert starts.made == before + 1


@pytest.mark.parametrize(
    "settings",
    [
        {"cuda_compat_mode": "disabled"},
        {"no_cgroups": True},
        {"supported_driver_capabilities": ("compute",)},
        {"path": "/etc/ocigpu/other.toml"},
    ],
    ids=str,
)
def test_other_settings_are_another_question(starts: Starts, settings: dict[str, object]) -> None:
    assert not starts.is_used(settings=starts.settings._replace(**settings))
    assert starts.is_used()


@pytest.mark.parametrize(
    "variables",
    [
        {"devices": "0"},
        {"devices": "0:0"},
        {"NVIDIA_DRIVER_CAPABILITIES": "utility"},
        {"NVIDIA_REQUIRE_CUDA": "cuda>=11.0"},
    ],
    ids=str,
)
def test_another_request_is_another_question(starts: Starts, variables: dict[str, str]) -> None:
    assert not starts.is_used(starts.request(**variables))
    assert starts.is_used(starts.request(**variables))
    assert starts.is_used()


# --- files that are not ours


def forged(content: bytes) -> bytes:
    """Return a file of ours with another answer, as whole as the real one."""
    question, stamp, answer = unseal(content).split(b"\n")
    return seal(b"\n".join((question, stamp, answer.replace(b'"granted":[', b'"granted":["forged",'))))


def test_a_file_that_is_whole_and_ours_is_used(starts: Starts) -> None:
    """So that the next tests mean something."""
    (file,) = starts.files
    file.write_bytes(forged(file.read_bytes()))
    assert '"forged"' in starts.start()


def truncated(file: Path) -> None:
    file.write_bytes(forged(file.read_bytes())[:-1])


def cut_in_the_middle(file: Path) -> None:
    content = forged(file.read_bytes())
    file.write_bytes(content[: len(content) // 2])


def with_more(file: Path) -> None:
    file.write_bytes(forged(file.read_bytes()) + b"x")


def not_sealed(file: Path) -> None:
    file.write_bytes(unseal(forged(file.read_bytes())))


def empty(file: Path) -> None:
    file.write_bytes(b"")


def group_writable(file: Path) -> None:
    file.write_bytes(forged(file.read_bytes()))
    file.chmod(0o620)


def readable_by_others(file: Path) -> None:
    file.write_bytes(forged(file.read_bytes()))
    file.chmod(0o604)


def a_link(file: Path) -> None:
    other = file.parent.parent / "elsewhere"
    other.write_bytes(forged(file.read_bytes()))
    other.chmod(0o600)
    file.unlink()
    file.symlink_to(other)


def a_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def of_another_request(file: Path) -> None:
    question, *rest = unseal(forged(file.read_bytes())).split(b"\n")
    file.write_bytes(seal(b"\n".join((question.replace(b"'all'", b"'0'", 1), *rest))))


def of_another_state(file: Path) -> None:
    question, stamp, answer = unseal(forged(file.read_bytes())).split(b"\n")
    file.write_bytes(seal(b"\n".join((question, stamp + b"0", answer))))


def of_another_kind(file: Path) -> None:
    question, stamp, _ = unseal(file.read_bytes()).split(b"\n")
    file.write_bytes(seal(b"\n".join((question, stamp, b'{"rules":[],"granted":["forged"]}'))))


def a_list(file: Path) -> None:
    question, stamp, _ = unseal(file.read_bytes()).split(b"\n")
    file.write_bytes(seal(b"\n".join((question, stamp, b'["forged"]'))))


def not_json(file: Path) -> None:
    question, stamp, _ = unseal(file.read_bytes()).split(b"\n")
    file.write_bytes(seal(b"\n".join((question, stamp, b'{"granted":["forged"]'))))


BROKEN = [
    truncated, cut_in_the_middle, with_more, not_sealed, empty, group_writable, readable_by_others, a_link, a_fifo,
    of_another_request, of_another_state, of_another_kind, a_list, not_json,
]  # fmt: skip


@pytest.mark.parametrize("breaking", one_in(4, BROKEN))
def test_a_file_that_is_not_as_we_write_it_is_not_used(starts: Starts, breaking: Callable[[Path], None]) -> None:
    (file,) = starts.files
    breaking(file)
    found = starts.start()
    assert "forged" not in found
    assert found == starts.anew()


@pytest.mark.root
def test_a_file_of_another_user_is_not_used(starts: Starts) -> None:
    (file,) = starts.files
    file.write_bytes(forged(file.read_bytes()))
    os.chown(file, 4321, 0)
    assert "forged" not in starts.start()


def test_a_directory_that_others_can_write_is_not_used(starts: Starts) -> None:
    (file,) = starts.files
    file.write_bytes(forged(file.read_bytes()))
    file.parent.chmod(0o770)
    assert "forged" not in starts.start()


def test_without_a_place_to_keep_anything_it_is_made_each_time(starts: Starts) -> None:
    shutil.rmtree(starts.host / "run/ocigpu")
    (starts.host / "run/ocigpu").write_text("in the way")
    before = starts.made
    assert starts.start() == starts.start() == starts.anew()
    assert starts.made == before + 2


def test_the_number_of_files_is_bounded(starts: Starts) -> None:
    for number in range(cached.SPARE_ANSWERS + 10):
        starts.start(starts.request(**{f"NVIDIA_REQUIRE_{number}": "cuda>=11.0"}))
        assert len(starts.files) <= cached.SPARE_ANSWERS + 1
    assert len(starts.files) > 1


def test_a_request_of_any_size_is_no_file(starts: Starts) -> None:
    before = starts.files
    request = starts.request(**{f"NVIDIA_REQUIRE_{number}": "cuda>=11.0" for number in range(400)})
    assert not starts.is_used(request)
    assert not starts.is_used(request)
    assert starts.files == before
