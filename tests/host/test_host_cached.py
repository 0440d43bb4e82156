"""Facts that are kept between starts: nothing that they were read from can change without being read again."""

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from handmade_host import TRIPLET
from support.products import one_in

import ocigpu
from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts, facts_to_json
from ocigpu.core.settings import Settings
from ocigpu.gpus import cached
from ocigpu.gpus.cached import read_facts, read_stamp, refresh_facts
from ocigpu.gpus.nvidia import discover, nvml
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.nvml import NvmlChild
from ocigpu.sim.create import create_host
from ocigpu.system import store as cache
from ocigpu.system.files import lock
from ocigpu.system.store import seal, unseal

LIBRARIES = f"usr/lib/{TRIPLET}"
CUDA = f"{LIBRARIES}/libcuda.so.550.163.01"
PARAMS = "proc/driver/nvidia/params"


class Kept:
    """A simulated host, and how often its facts were read anew."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings = Settings(simulation_root=str(root))
        self.discoveries = 0

    def read(self) -> HostFacts:
        """Return the facts; they are always those that would be read anew."""
        facts = read_facts(self.settings)
        assert facts == read_host_facts(self.settings)
        return facts

    def is_used(self) -> bool:
        """Tell whether the facts come without being read anew."""
        before = self.discoveries
        self.read()
        return self.discoveries == before

    @property
    def files(self) -> list[Path]:
        return sorted((self.root / "run/ocigpu").glob("*"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    create_host(str(directory / "host"), gpus=2, mig=("0:1g.5gb",), model="a100", driver_version="550.163.01")
    return directory / "host"


@pytest.fixture
def kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """A host whose facts are kept although it is new."""
    monkeypatch.setattr(cached, "SETTLED", -1.0)
    found = Kept(tmp_path / "host")
    # cp copies nodes and sockets too
    subprocess.run(["cp", "-a", model, found.root], check=True)
    real = discover.read_host_facts_and_places

    def count(*arguments: Any) -> tuple[HostFacts, dict[str, bool], NvmlChild | None]:
        found.discoveries += 1
        return real(*arguments)

    monkeypatch.setattr(discover, "read_host_facts_and_places", count)
    assert not found.is_used()
    assert found.is_used()
    return found


def test_facts_are_kept_for_this_user_alone_and_read_back_equal(kept: Kept) -> None:
    assert [path.name[:6] for path in kept.files] == ["facts-"]
    assert stat.S_IMODE(kept.files[0].stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.files[0].parent.stat().st_mode) == 0o700
    facts = kept.read()
    assert len(facts.gpus) == 2
    assert facts.gpus[0].mig_devices
    assert kept.discoveries == 1


def test_a_device_of_another_kind_changes_nothing_and_is_noted(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept.files[0].read_bytes()
    (kept.root / "dev/ttyUSB0").touch()
    assert kept.is_used()
    assert kept.files[0].read_bytes() != before
    monkeypatch.setattr(cached, "facts_key", None)  # what was noted is enough again
    assert read_facts(kept.settings).source == "nvml"


def test_a_start_with_facts_that_hold_asks_no_nvml(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a process of NVML was started")

    monkeypatch.setattr(os, "fork", refuse)
    assert read_facts(kept.settings).source == "nvml"


def replace(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.rename(path)


def change_in_place(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def change_unseen_by_its_date(path: Path) -> None:
    before = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def repoint(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def make_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        directory = os.open(path.parent, os.O_PATH)
        server.bind(f"/proc/self/fd/{directory}/{path.name}")  # paths of sockets are short
        os.close(directory)


def write_new(path: Path, content: str = "{}") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def remove_mig(root: Path) -> None:
    for path in (root / "proc/driver/nvidia/capabilities/gpu0/mig").glob("gi*"):
        shutil.rmtree(path)


def move_driver_library(root: Path) -> None:
    (root / CUDA).rename(root / LIBRARIES / "moved.so")
    (root / CUDA).symlink_to("moved.so")


CHANGES: dict[str, Callable[[Path], object]] = {
    "a library is replaced": lambda root: replace(root / CUDA),
    "a library changes in place": lambda root: change_in_place(root / CUDA),
    "a library changes, its date does not": lambda root: change_unseen_by_its_date(root / CUDA),
    "a library is gone": lambda root: next((root / LIBRARIES).glob("libnvidia-opencl.so.5*")).unlink(),
    "a library is now a link": move_driver_library,
    "a link points elsewhere": lambda root: repoint(root / LIBRARIES / "libcuda.so.1", "libnvidia-ml.so.1"),
    "a directory on the way is a link": lambda root: (
        (root / "usr/lib").rename(root / "usr/other"),
        (root / "usr/lib").symlink_to("other"),
    ),
    "the loader's cache is replaced": lambda root: replace(root / "etc/ld.so.cache"),
    "the loader's cache is gone": lambda root: (root / "etc/ld.so.cache").unlink(),
    "a socket is made again": lambda root: make_socket(root / "run/nvidia-persistenced/socket"),
    "a socket is gone": lambda root: (root / "run/nvidia-persistenced/socket").unlink(),
    "a pipe directory appears": lambda root: (root / "tmp/nvidia-mps").mkdir(parents=True),
    "a program appears in another directory": lambda root: write_new(root / "usr/sbin/nvidia-imex"),
    "a configuration file appears": lambda root: write_new(root / "usr/share/nvidia/nvoptix.bin"),
    "a preferred configuration file appears": lambda root: write_new(root / "etc/glvnd/egl_vendor.d/10_nvidia.json"),
    "firmware appears": lambda root: write_new(
        next((root / "lib/firmware/nvidia").glob("550*")).joinpath("gsp_new.bin")
    ),
    "firmware is named by the kernel": lambda root: write_new(
        root / "sys/module/firmware_class/parameters/path", "/opt/firmware\n"
    ),
    "a MIG device is gone": remove_mig,
    "the driver gives other permissions": lambda root: (root / PARAMS).write_text(
        (root / PARAMS).read_text().replace("DeviceFileMode: 438", "DeviceFileMode: 432")
    ),
    "a node is gone": lambda root: (root / "dev/nvidia1").unlink(),
    "a driver's number changes": lambda root: (root / "proc/devices").write_text("Character devices:\n195 nvidia\n"),
    "a GPU is gone": lambda root: shutil.rmtree(root / "proc/driver/nvidia/gpus/0000:02:00.0"),
    "a GPU fails": lambda root: write_new(root / "faults", "lost 1\n"),
}


@pytest.mark.parametrize("change", one_in(4, CHANGES.values()), ids=list(CHANGES))
def test_what_changes_on_the_host_is_seen(kept: Kept, change: Callable[[Path], object]) -> None:
    change(kept.root)
    assert not kept.is_used()


@pytest.mark.root
def test_another_owner_of_a_node_is_seen(kept: Kept) -> None:
    os.chown(kept.root / "dev/nvidia0", 4321, 4321)
    assert not kept.is_used()
    assert kept.is_used()
    node = kept.read().gpus[0].node
    assert node
    assert node.uid == 4321


def test_another_driver_version_is_never_given_old_libraries(kept: Kept) -> None:
    version = kept.root / "proc/driver/nvidia/version"
    text = version.read_text()
    version.write_text(text.replace("550.163.01", "560.35.03"))
    with pytest.raises(HostError, match="560"):
        read_facts(kept.settings)
    version.write_text(text)
    assert kept.is_used()


def test_texts_of_procfs_are_read_each_time(kept: Kept) -> None:
    registry = kept.root / "proc/driver/nvidia/registry"
    registry.write_text('Binary: "other"\n')
    assert kept.is_used()
    assert {file.name: file.content for file in kept.read().proc_files}["registry"] == 'Binary: "other"\n'


def test_what_is_nobodys_business_changes_nothing(kept: Kept) -> None:
    write_new(kept.root / LIBRARIES / "libother.so.1")
    write_new(kept.root / "dev/tty7", "")
    assert kept.is_used()


def test_a_start_looks_at_directories_instead_of_what_they_hold(kept: Kept) -> None:
    proof = json.loads(unseal(kept.files[0].read_bytes()).split(b"\n")[1])
    paths = {path.removeprefix(str(kept.root)): searched for path, searched in proof[4][0]}
    assert paths[f"/{LIBRARIES}"]
    assert f"/{LIBRARIES}/libcuda.so.1" not in paths  # a link
    assert "/usr/sbin" not in paths  # not there
    assert "/dev/nvidia0" not in paths  # among the readings for the key
    assert f"/{CUDA}" in paths  # can be written in place


def test_a_directory_that_has_changed_is_no_longer_relied_on(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "SETTLED", 0.0)
    write_new(kept.root / LIBRARIES / "libother.so.1")
    assert kept.is_used()
    noted = kept.files[0].read_bytes()
    write_new(kept.root / LIBRARIES / "libother.so.2")
    assert kept.is_used()
    assert kept.files[0].read_bytes() == noted
    repoint(kept.root / LIBRARIES / "libcuda.so.1", "libnvidia-ml.so.1")
    assert not kept.is_used()


def test_old_facts_are_used_when_nvml_says_the_same_again(kept: Kept) -> None:
    stamp = read_stamp(kept.settings)
    grow_old(kept.files[0])
    old = kept.files[0].read_bytes()
    assert kept.is_used()
    assert kept.files[0].read_bytes() != old  # they are new again
    assert read_stamp(kept.settings) == stamp  # and so are answers that follow from them
    grow_old(kept.files[0])
    assert read_stamp(kept.settings) == stamp


def test_facts_that_are_new_again_keep_what_was_noted(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "SETTLED", 0.0)
    write_new(kept.root / LIBRARIES / "libother.so.1")
    grow_old(kept.files[0])
    assert kept.is_used()
    noted = kept.files[0].read_bytes()
    write_new(kept.root / LIBRARIES / "libother.so.2")
    assert kept.is_used()
    assert kept.files[0].read_bytes() == noted


@pytest.mark.parametrize("number", [0, 1], ids=["another library", "another answer"])
def test_old_facts_are_read_anew_when_nvml_says_something_else(kept: Kept, number: int) -> None:
    grow_old(kept.files[0])
    edit_lines(kept.files[0], lambda proof, _: proof[2].__setitem__(number, ["/none", 1][number]))
    assert not kept.is_used()
    assert kept.is_used()


def test_a_gpu_that_is_lost_is_seen_when_facts_are_old(kept: Kept, model: Path) -> None:
    grow_old(kept.files[0])
    (model / "faults").write_text("lost 1\n")  # where the library of NVML was made: no place of this host changes
    try:
        assert not read_stamp(kept.settings)
        assert kept.read().gpus[1].error
    finally:
        (model / "faults").unlink()


@pytest.mark.parametrize("fault", ["", "hang", "lost 1"], ids=["another answer", "no answer", "a lost GPU"])
def test_nvml_is_asked_once_by_a_process(kept: Kept, model: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grow_old(kept.files[0])
    if not fault:
        edit_lines(kept.files[0], lambda proof, _: proof[2].__setitem__(1, 1))
    asked, fork = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: asked.append(1) or fork())
    if fault == "hang":
        monkeypatch.setattr(nvml.start_nvml, "__defaults__", (1.0,))
    (model / "faults").write_text(f"{fault}\n")  # where the library of NVML was made: no place of this host changes
    try:
        assert not read_stamp(kept.settings)
        facts = [read_facts(kept.settings) for _ in range(2)]
        assert bool(read_stamp(kept.settings)) == (not fault)
    finally:
        (model / "faults").unlink()
    assert len(asked) == 1
    assert facts[0] == facts[1]
    assert facts[0].source == ("procfs" if fault == "hang" else "nvml")
    assert bool(facts[0].gpus[1].error) == (fault == "lost 1")


@pytest.mark.parametrize("change", [None, CHANGES["a library is replaced"], CHANGES["a MIG device is gone"]])
def test_an_answer_from_before_a_change_is_not_kept(
    kept: Kept, change: Callable[[Path], object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "SETTLED", 0.0)
    grow_old(kept.files[0])
    edit_lines(kept.files[0], lambda proof, _: proof[2].__setitem__(1, 1))
    asked, fork = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: asked.append(1) or fork())
    assert not read_stamp(kept.settings)
    if change:
        change(kept.root)
    read_facts(kept.settings)
    if change == CHANGES["a MIG device is gone"]:
        assert len(asked) == 2
    else:
        assert len(asked) == 1
        assert bool(read_stamp(kept.settings)) == (not change)


@pytest.mark.root
def test_an_imex_channel_that_becomes_usable_is_seen(kept: Kept) -> None:
    devices = kept.root / "proc/devices"
    devices.write_text(devices.read_text().replace("195 nvidia\n", "195 nvidia\n236 nvidia-caps-imex-channels\n"))
    channel = kept.root / "dev/nvidia-caps-imex-channels/channel0"
    channel.parent.mkdir(exist_ok=True)
    os.mknod(channel, 0o666 | stat.S_IFCHR, os.makedev(99, 0))
    assert kept.read().imex_nodes == ()
    channel.unlink()
    os.mknod(channel, 0o666 | stat.S_IFCHR, os.makedev(236, 0))
    assert [node.minor for node in kept.read().imex_nodes] == [0]


@pytest.mark.parametrize("change", [CHANGES["a link points elsewhere"], CHANGES["a library changes in place"]])
def test_old_facts_need_the_host_as_it_was_too(kept: Kept, change: Callable[[Path], object]) -> None:
    grow_old(kept.files[0])
    change(kept.root)
    assert not kept.is_used()


def test_settings_have_facts_of_their_own(kept: Kept) -> None:
    shutil.copy(kept.root / "etc/ld.so.cache", kept.root / "etc/other.cache")
    kept.settings = kept.settings._replace(driver_ldcache="/etc/other.cache")
    assert not kept.is_used()
    assert kept.is_used()
    assert len(kept.files) == 2


def edit_key(path: Path, number: int) -> None:
    words = unseal(path.read_bytes()).split(b" ")
    words[number] = b"x" + words[number]
    path.write_bytes(seal(b" ".join(words)))


def cut(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


def write_lines(path: Path, *lines: bytes) -> None:
    key = unseal(path.read_bytes()).partition(b"\n")[0]
    path.write_bytes(seal(b"\n".join((key, *lines))))


def make_link(path: Path) -> None:
    target = path.rename(path.with_name("target"))
    path.symlink_to(target)


def grow_old(path: Path) -> None:
    key, proof, states, facts = unseal(path.read_bytes()).split(b"\n")
    made, *rest = json.loads(proof)
    path.write_bytes(seal(b"\n".join((key, json.dumps([made - cached.MAX_AGE, *rest]).encode(), states, facts))))


def edit_lines(path: Path, edit: Callable[[Any, Any], object]) -> None:
    key, proof, states, facts = unseal(path.read_bytes()).split(b"\n")
    one, two = json.loads(proof), json.loads(facts)
    edit(one, two)
    path.write_bytes(seal(b"\n".join((key, json.dumps(one).encode(), states, json.dumps(two).encode()))))


def spoil_states(path: Path) -> None:
    """Let the quick look fail, and what the long one compares be no JSON."""
    edit_lines(path, lambda proof, _: proof[4].__setitem__(1, 0))
    key, proof, _, facts = unseal(path.read_bytes()).split(b"\n")
    path.write_bytes(seal(b"\n".join((key, proof, b"{", facts))))


SPOILED: dict[str, Callable[[Path], object]] = {
    "version of the program": lambda path: edit_key(path, 0),
    "boot": lambda path: edit_key(path, 1),
    "empty": cut(0),
    "truncated in its key": cut(20),
    "truncated in its facts": cut(6000),
    "a flipped bit": flip,
    "no JSON": lambda path: write_lines(path, b"{", b"{", b"{"),
    "other JSON": lambda path: write_lines(path, b"[0,[]]", b"[]", b"{}"),
    "JSON of another form": lambda path: write_lines(path, b"[1]", b"[]", b"[]"),
    "of the form of an earlier version": lambda path: write_lines(path, b"[0,[],{}]", b"{}"),
    "no places where there should be some": lambda path: edit_lines(path, lambda proof, _: proof[4].clear()),
    "strange paths": lambda path: edit_lines(path, lambda proof, _: proof[4][0].append(["a\0b", False])),
    "states that are none": spoil_states,
    "places of another form": lambda path: edit_lines(path, lambda proof, _: proof[4][0].append([1, 2, 3])),
    "a note of a number without end": lambda path: edit_lines(
        path, lambda proof, _: proof[3].update({f"{10**30} /proc/version": 1})
    ),
    "procfs at what is no path": lambda path: edit_lines(path, lambda _, facts: facts.update(proc_driver="/a\0b")),
    "deep": lambda path: write_lines(path, b"[" * 100000, b"{}"),
    "not UTF-8": lambda path: write_lines(path, b"\xff", b"\xff"),
    "readable by others": lambda path: path.chmod(0o644),
    "a link": make_link,
}


@pytest.mark.parametrize("spoil", one_in(4, SPOILED.values()), ids=list(SPOILED))
def test_a_file_that_cannot_be_used_is_written_again(kept: Kept, spoil: Callable[[Path], object]) -> None:
    spoil(kept.files[0])
    assert not kept.is_used()
    assert kept.is_used()


@pytest.mark.root
def test_what_others_own_is_not_used(kept: Kept) -> None:
    os.chown(kept.files[0], 4321, 4321)
    assert not kept.is_used()
    os.chown(kept.root / "run/ocigpu", 4321, 4321)
    content = kept.files[0].read_bytes()
    kept.files[0].write_bytes(b"")
    kept.read()
    assert kept.files[0].read_bytes() == b""
    kept.files[0].write_bytes(content)
    os.chown(kept.root / "run/ocigpu", 0, 0)
    os.chown(kept.root, 4321, 4321)
    assert cache.open_cache(True, str(kept.root)) == -1
    assert refresh_facts(kept.settings)[1:] == ("", cached.NO_CACHE, -1.0)


def test_facts_of_a_host_that_has_just_changed_are_not_kept(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "SETTLED", 1e6)
    replace(kept.root / CUDA)
    assert not kept.is_used()
    assert not kept.is_used()
    assert refresh_facts(kept.settings).problem == "the host has just changed"


@pytest.mark.parametrize(("fault", "why"), [("lost 1", "a GPU cannot be used"), ("init 999", "NVML gave no answer")])
def test_facts_that_are_not_whole_are_not_kept(kept: Kept, model: Path, fault: str, why: str) -> None:
    (model / "faults").write_text(fault + "\n")  # where the library of NVML was made
    write_new(kept.root / "faults")
    try:
        assert not kept.is_used()
        assert not kept.is_used()
        assert refresh_facts(kept.settings).problem == why
    finally:
        (model / "faults").unlink()


def test_a_change_while_the_host_is_read_is_not_missed(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    real = discover.read_host_facts_and_places

    def change_meanwhile(*arguments: Any) -> tuple[HostFacts, dict[str, bool], NvmlChild | None]:
        found = real(*arguments)
        (kept.root / "dev/nvidia-nvswitch9").touch()
        return found

    monkeypatch.setattr(discover, "read_host_facts_and_places", change_meanwhile)
    assert refresh_facts(kept.settings).problem == "the host has just changed"


def test_a_change_while_nvml_takes_its_time_is_not_missed(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is another one than was read, and when NVML has answered its change is long ago."""
    monkeypatch.setattr(cached, "SETTLED", 0.0)
    real, clock = discover.read_host_facts_and_places, time.time
    late = 0.0

    def answer_slowly(*arguments: Any) -> tuple[HostFacts, dict[str, bool], NvmlChild | None]:
        nonlocal late
        found = real(*arguments)
        replace(kept.root / CUDA)
        late = 10.0
        return found

    monkeypatch.setattr(discover, "read_host_facts_and_places", answer_slowly)
    monkeypatch.setattr(cached.time, "time", lambda: clock() + late)
    assert refresh_facts(kept.settings).problem == "the host has just changed"


def test_refresh_says_what_it_replaces(kept: Kept) -> None:
    before = kept.files[0].read_bytes()
    done = refresh_facts(kept.settings)
    assert (done.path, done.problem) == (str(kept.files[0]), "")
    assert done.age > 0
    assert kept.files[0].read_bytes() != before
    kept.files[0].unlink()
    assert refresh_facts(kept.settings).age == -1


def test_a_read_only_cache_is_no_error(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.files[0].unlink()
    monkeypatch.setattr(cached, "write_kept", lambda *_: False)
    assert not kept.is_used()
    assert refresh_facts(kept.settings).problem == "the file cannot be written"


READER = """
import json, sys
sys.path.append(sys.argv[1])
from ocigpu.core.facts import facts_to_json
from ocigpu.core.settings import Settings
from ocigpu.gpus import cached
from ocigpu.gpus.nvidia import discover
cached.SETTLED, cached.PATIENCE = -1.0, 60.0
real = discover.read_host_facts_and_places
counted = []
discover.read_host_facts_and_places = lambda *arguments: counted.append(1) or real(*arguments)
facts = cached.read_facts(Settings(simulation_root=sys.argv[2]))
print(json.dumps([len(counted), facts_to_json(facts)]))
"""


@pytest.mark.rest
def test_of_many_first_starts_one_reads_the_host(kept: Kept) -> None:
    kept.files[0].unlink()
    library = Path(ocigpu.__file__).parent.parent
    command = [sys.executable, "-I", "-S", "-c", READER, str(library), str(kept.root)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in started]
    assert sum(count for count, _ in answers) == 1
    facts = json.loads(json.dumps(facts_to_json(kept.read())))
    assert all(answer == facts for _, answer in answers)


def test_nobody_waits_for_ever_for_another_start(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "PATIENCE", 0.01)
    kept.files[0].unlink()
    directory = cache.open_cache(True, str(kept.root))
    assert lock(directory, 0)
    assert not kept.is_used()
    os.close(directory)
