"""Another container that shares a volume exchanges names with links out of the root while we provision.

Before each single call that takes a path, so that every race is met; and all the time, as it would be: 1,000
provisionings of the hook and 1,000 of mode spec, 250 of configure, of a CDI hook inside the container and of each
without the newer calls of the kernel, a thirtieth of them in ``make test`` (of mode spec a tenth); then real
containers.  ``make security`` does ten times as many of the first two, and as many of all.
"""

import ctypes
import mmap
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from security_lab import CONFIGURE, GIVERS, VERSION, Attacks, Marker
from support.bundle import LIBRARIES
from support.machine import LOADER
from ways_of_images import FULL

sys.path.insert(0, str(Path(__file__).parents[1] / "provision"))

from provision_lab import READ_ONLY, Lab, host_mounts, make_host, make_rootfs, new_kernel, old_kernel, run_child

from ocigpu.bundle.rootfs import NeedsHookError, RootDirectory, find_obstacle, resolve_in_root
from ocigpu.core.actions import Bind, Link, Mode, Plan, TextFile, Tmpfs
from ocigpu.core.errors import OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.entry.container_cli.main import run_command
from ocigpu.entry.container_cli.options import parse_options
from ocigpu.provision import apply
from ocigpu.provision.compat import read_compat
from ocigpu.provision.image import read_image_facts
from ocigpu.system import libc
from ocigpu.system.paths import use_walk

pytestmark = [pytest.mark.root, pytest.mark.engine, pytest.mark.xdist_group("functions")]

RUNS = 10_000 if FULL else 1_000
STARTS = 100 if FULL else 12
MAX_CALLS = 10_000
RENAME_EXCHANGE = 2
Pairs = list[tuple[Path, Path]]


class Neighbour:
    """Numbers that a process who exchanges names, the test, and all that the test forks have in common."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")

    calls = property(lambda self: self._numbers[0], lambda self, number: self._set(0, number))
    first = property(lambda self: self._numbers[1], lambda self, number: self._set(1, number))
    last = property(lambda self: self._numbers[2], lambda self, number: self._set(2, number))
    asked = property(lambda self: self._numbers[3], lambda self, number: self._set(3, number))
    rounds = property(lambda self: self._numbers[4], lambda self, number: self._set(4, number))

    def _set(self, index: int, number: int) -> None:
        self._numbers[index] = number

    def exchange(self) -> None:
        """Have all names exchanged once, and wait for it."""
        self.asked += 1
        while self.rounds < self.asked:
            time.sleep(0.0001)

    def wait_for_rounds(self, number: int) -> None:
        """Wait until so many more exchanges have begun and ended."""
        end = self.rounds + number + 1
        while self.rounds < end:
            time.sleep(0.0001)

    def step(self, call: Callable[..., Any], numbers: Collection[int] = ()) -> Callable[..., Any]:
        """Return the function with an exchange before its ``first``-th and ``last``-th call, counted over all.

        ``numbers``: what counts is calls whose first argument is one of them.

        What openat2 must be asked again, because of renames by others of this machine, is one call: otherwise the
        exchange for one call would be undone before that call has met it, on a machine that is busy enough.
        """
        again = False

        def stepped(*arguments: Any, **options: Any) -> Any:
            nonlocal again
            counts = not numbers or arguments[0] in numbers
            if counts and not again:
                self.calls += 1
                if self.calls in (self.first, self.last):
                    self.exchange()
            again = again and not counts
            try:
                return call(*arguments, **options)
            except BlockingIOError:
                again = counts
                raise

        return stepped


@contextmanager
def neighbour(pairs: Pairs, *, asked: bool = False) -> Iterator[Neighbour]:
    """Exchange the names of each pair for ever, or when ``asked`` to, in a process: renameat2(2)."""
    names = [(os.fsencode(one), os.fsencode(other)) for one, other in pairs]
    renameat2 = ctypes.CDLL(None).renameat2
    made = Neighbour()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is interrupted here must not clean up there
        while True:
            while asked and made.rounds == made.asked:
                time.sleep(0.0001)
            if not asked and made.rounds % 20 == 0:  # who never pauses takes the processor from those it is to meet
                time.sleep(random.random() / 1000)
            for one, other in names:
                renameat2(libc.AT_FDCWD, one, libc.AT_FDCWD, other, RENAME_EXCHANGE)
            made.rounds += 1
    try:
        yield made
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def marker(tmp_path: Path) -> Marker:
    made = Marker(tmp_path / "host-marker")
    (made.path / "libcuda.so.1.2").write_text("of the host\n")
    made.settle()
    return made


@pytest.fixture
def volume(tmp_path: Path, marker: Marker) -> Path:
    """An image whose library directory, /etc and /usr/bin, and files in them, have links to the host beside them."""
    path = make_rootfs(tmp_path / "rootfs")
    (path / "etc/ld.so.cache").unlink()
    for name in ("usr/local/cuda/compat", "opt"):
        (path / name).mkdir(parents=True)
    (path / "usr/local/cuda/compat/libcuda.so.999.1").write_text("of the image\n")
    (path / "usr/lib64" / LOADER).touch()
    for name in PAIRS:
        add_link(path, name, marker)
    # half of the links lead to something inside, too: then all goes well there
    (path / str(marker.path / "cuda/compat").lstrip("/")).mkdir(parents=True)
    return path


PAIRS = ("usr/lib64", "usr/bin", "etc", "opt", "usr/local/cuda/compat", "usr/lib64/libold.so.1", "usr/lib64/libx.so.1")


def add_link(volume: Path, name: str, marker: Marker) -> None:
    """Put a link to the host beside something of the image, which is made if it is not there."""
    (volume / name).parent.mkdir(parents=True, exist_ok=True)
    if not (volume / name).exists():
        (volume / name).write_text("of the image\n")
    target = marker.path if (volume / name).is_dir() else marker.path / "libcuda.so.1.2"
    text = str(target) if name.count("/") % 2 else "../" * 20 + str(target).lstrip("/")
    (volume / f"{name}.other").symlink_to(text)


def pairs_of(volume: Path, names: tuple[str, ...] = PAIRS) -> Pairs:
    return [(volume / name, volume / f"{name}.other") for name in names]


def plan_of(host: Path, here: bool) -> Plan:
    """Return a plan with every action that makes something at a path of the container."""
    actions: list[Any] = [
        Bind(f"{host}/lib/libcuda.so.1.2", "/usr/lib64/libcuda.so.1.2", READ_ONLY, "library"),
        Bind(f"{host}/bin/nvidia-smi", "/usr/bin/nvidia-smi", READ_ONLY, "binary"),
        Bind(f"{host}/run/nvidia", "/opt/run/nvidia", ("nosuid", "nodev"), "sockets", "directory"),
        Link("/usr/lib64/libcuda.so.1", "libcuda.so.1.2", "loader"),
        Link("/usr/lib64/libold.so.1", "libx.so.1", "an own file of the image covered by what a link leads to"),
        Tmpfs("/etc/nvidia/profiles", 0o555, (("10-container.conf", 0o444, "{}"),), (), "profiles"),
    ]
    if here:
        actions += [
            TextFile("/etc/ld.so.conf.d/00-compat.conf", 0o644, "/usr/local/cuda/compat\n", "compatibility"),
            Mode("/usr/lib64", 0o777, "mode of the CDI specification"),
        ]
    return Plan(tuple(actions))


@pytest.mark.parametrize("kernel", [new_kernel, old_kernel])
@pytest.mark.parametrize("here", [False, True], ids=["hook", "CDI hook"])
def test_names_that_are_exchanged_lead_no_provisioning_out_of_the_root(
    kernel: Callable[[], None], here: bool, volume: Path, marker: Marker, tmp_path: Path, times: Callable[..., int]
) -> None:
    host = make_host(tmp_path / "host")
    plan, mounts = plan_of(host, here), host_mounts()
    outcomes: Counter[str] = Counter()
    with neighbour(pairs_of(volume)) as made:
        for _ in range(times(RUNS if FULL or (kernel is new_kernel and not here) else RUNS // 4, 30) // 20 + 1):
            made.wait_for_rounds(20)
            with Lab(volume, dev=False) as lab:
                codes = provision_often(lab, plan, kernel, here, 20)
                outcomes.update(codes)
                sources = [line.split(" ")[1] for line in lab.mounts()]
                assert [source for source in sources if source.startswith(marker.absolute)] == []
    print(dict(outcomes))
    assert set(outcomes) <= {"", *(f"OCIGPU-MNT-{number}" for number in range(1, 5)), "OCIGPU-LD-1"}
    assert outcomes[""] > 0, "nothing was ever provisioned"
    marker.check()
    assert host_mounts() == mounts


OS_CALLS = ("open", "stat", "lstat", "readlink", "listdir", "scandir", "mkdir", "mknod", "symlink", "unlink", "rmdir")
OS_CALLS += ("rename", "replace", "link", "chmod", "chown", "utime", "chdir")
LIBC_CALLS = ("openat2", "open_tree", "move_mount", "mount", "umount2", "mount_setattr")


def be_stepped(made: Neighbour) -> None:
    """Count the calls of this process, and of those it forks, that take a path."""
    for name in OS_CALLS:
        setattr(os, name, made.step(getattr(os, name)))
    machine = libc.MACHINES.index(os.uname().machine)
    setattr(libc, "call", made.step(libc.call, [libc.NUMBERS[name][machine] for name in LIBC_CALLS]))  # noqa: B010 - a name like those above


def exchange_before_each_call(
    volume: Path, rootfs: Path, back: bool, calls: Sequence[int], act: Callable[[Callable[[], None]], str]
) -> Counter[str]:
    """Have something done to copies of the volume, each time with an exchange before another one of the calls.

    ``back``: the names are exchanged again before the next call.  ``calls``: by number, more than there are.  ``act``
    is given what makes its process countable.
    """
    outcomes: Counter[str] = Counter()
    with neighbour(pairs_of(rootfs), asked=True) as made:
        for first in calls:
            made.calls, made.first, made.last = 0, first, first + 1 if back else 0
            shutil.copytree(volume, rootfs, symlinks=True)
            outcomes[act(lambda: be_stepped(made))] += 1
            shutil.rmtree(rootfs)
            if first > made.calls:
                break
    print(dict(outcomes))
    return outcomes


BACK = pytest.mark.parametrize("back", [False, True], ids=["for good", "for one call"])


@pytest.mark.rest
@BACK
@pytest.mark.parametrize("kernel", [new_kernel, old_kernel])
@pytest.mark.parametrize("here", [False, True], ids=["hook", "CDI hook"])
def test_names_that_are_exchanged_before_any_call_lead_no_provisioning_out_of_the_root(
    kernel: Callable[[], None],
    here: bool,
    back: bool,
    volume: Path,
    marker: Marker,
    tmp_path: Path,
    share: Callable[..., list[int]],
) -> None:
    plan, mounts, rootfs = plan_of(make_host(tmp_path / "host"), here), host_mounts(), tmp_path / "copy"

    def act(prepare: Callable[[], None]) -> str:
        with Lab(rootfs, dev=False) as lab:
            (code,) = provision_often(lab, plan, kernel, here, 1, prepare)
            sources = [line.split(" ")[1] for line in lab.mounts()]
            assert [source for source in sources if source.startswith(marker.absolute)] == []
        return code

    calls = share(range(1, MAX_CALLS), 6, (kernel is old_kernel) + 2 * here + back)
    outcomes = exchange_before_each_call(volume, rootfs, back, calls, act)
    assert set(outcomes) <= {"", "OCIGPU-MNT-1", "OCIGPU-MNT-2", "OCIGPU-MNT-3", "OCIGPU-LD-1"}
    assert outcomes[""] > 1, "nothing was ever provisioned"  # the last time, nothing was exchanged
    assert len(outcomes) > 1 or len(calls) < MAX_CALLS // 2, "nothing was ever in the way"  # few calls are met by it
    marker.check()
    assert host_mounts() == mounts


@BACK
@pytest.mark.parametrize("walk", [False, True], ids=["openat2", "walk"])
def test_names_that_are_exchanged_before_any_call_lead_mode_spec_nowhere_else(
    walk: bool, back: bool, volume: Path, marker: Marker, tmp_path: Path, share: Callable[..., list[int]]
) -> None:
    rootfs = tmp_path / "copy"

    def act(prepare: Callable[[], None]) -> str:
        def once() -> str:
            use_walk(walk)
            root_fd = os.open(rootfs, os.O_PATH | os.O_DIRECTORY)
            prepare()
            return declare_once(root_fd, undo=False)

        outcome: str = run_child(once)
        return outcome

    calls = share(range(1, MAX_CALLS), 4, 2 * walk + back)
    outcomes = exchange_before_each_call(volume, rootfs, back, calls, act)
    assert outcomes["made"] > 1
    assert len(outcomes) > 1, "nothing was ever in the way"
    marker.check()


def provision_often(
    lab: Lab, plan: Plan, kernel: Callable[[], None], here: bool, times: int, prepare: Callable[[], None] = lambda: None
) -> list[str]:
    """Provision a container several times, from a process that is where its hooks are; returns codes of errors."""

    def often() -> list[str]:
        if here:
            lab.enter()
        kernel()
        prepare()
        codes = []
        for _ in range(times):
            try:
                if here:
                    apply.provision_here(plan, str(lab.rootfs), Settings())
                else:
                    apply.provision(plan, lab.pid, str(lab.rootfs), {}, Settings())
                codes.append("")
            except OcigpuError as error:
                codes.append(error.code)
        return codes

    codes: list[str] = run_child(often)
    return codes


@pytest.mark.rest
def test_names_that_are_exchanged_lead_no_configure_out_of_the_root(
    volume: Path, marker: Marker, attacks: Attacks, times: Callable[..., int]
) -> None:
    """All of ocigpu-container-cli but its start: options, the host's facts, the image, the plan, provisioning."""
    mounts, settings = host_mounts(), attacks.host.environment(attacks.base)["OCIGPU_CONFIG"]

    def often(lab: Lab, times: int = 10) -> list[str]:
        os.environ["OCIGPU_CONFIG"] = settings
        codes = []
        for _ in range(times):
            words = [*CONFIGURE, "--no-cgroups", f"--pid={lab.pid}", str(lab.rootfs)]
            try:
                run_command(parse_options(words))
                codes.append("")
            except OcigpuError as error:
                codes.append(error.code)
        return codes

    outcomes: Counter[str] = Counter()
    names = ("usr/lib64/libcuda.so.1", f"usr/lib64/libcuda.so.{VERSION}", "usr/bin/nvidia-smi")
    (volume / names[1]).mkdir()  # which is in the way, where it is found
    for name in names:
        add_link(volume, name, marker)
    with neighbour(pairs_of(volume, (*PAIRS, *names)), asked=True) as made:
        for _ in range(2):
            with Lab(volume) as lab:
                outcomes.update(run_child(lambda lab=lab: often(lab, 1)))
            made.exchange()
    assert dict(outcomes) == {"": 1, "OCIGPU-MNT-2": 1}, "with that, the race is about something"
    with neighbour(pairs_of(volume, (*PAIRS, *names))) as made:
        for _ in range(times(RUNS if FULL else RUNS // 4, 30) // 10 + 1):
            made.wait_for_rounds(10)
            with Lab(volume) as lab:
                codes: list[str] = run_child(lambda lab=lab: often(lab))
                outcomes.update(codes)
                sources = [line.split(" ")[1] for line in lab.mounts()]
                assert [source for source in sources if source.startswith(marker.absolute)] == []
    print(dict(outcomes))
    assert set(outcomes) <= {"", "OCIGPU-MNT-1", "OCIGPU-MNT-2", "OCIGPU-MNT-3", "OCIGPU-LD-1"}
    marker.check()
    assert host_mounts() == mounts


LINKS = [("/usr/lib64/libcuda.so.1", "libcuda.so.1.2"), ("/opt/new/libcuda.so", "libcuda.so.1")]
IN_CACHE = [("libcuda.so.1", "/usr/lib64/libcuda.so.1", 64)]


def declare_once(root_fd: int, undo: bool) -> str:
    """Do in a root directory all that mode spec does there; returns "made" or the name of what refused it."""
    read_image_facts(root_fd, "550.163.01")
    read_compat(root_fd, "/usr/local/cuda/compat")
    resolve_in_root(root_fd, "/usr/lib64")
    find_obstacle(root_fd, LINKS, IN_CACHE)
    directory = RootDirectory(root_fd)
    try:
        directory.make_links(LINKS)
        directory.extend_ld_cache(IN_CACHE)
    except (OSError, NeedsHookError) as error:
        return type(error).__name__
    else:
        return "made"
    finally:
        if undo:
            directory.undo()
        directory.close()


def test_names_that_are_exchanged_lead_mode_spec_nowhere_else(
    volume: Path, marker: Marker, times: Callable[..., int]
) -> None:
    def often() -> dict[str, int]:
        outcomes: Counter[str] = Counter()
        root_fd = os.open(volume, os.O_PATH | os.O_DIRECTORY)
        for turn in range(times(RUNS)):
            use_walk(turn % 2 == 0)
            outcomes[declare_once(root_fd, undo=turn % 3 > 0)] += 1
        return dict(outcomes)

    with neighbour(pairs_of(volume)) as made:
        outcomes = run_child(often)
        assert made.rounds
    print(outcomes)
    assert outcomes["made"] > 0
    marker.check()


def test_a_name_that_is_a_link_leads_mode_spec_to_where_it_leads_in_the_root(volume: Path, marker: Marker) -> None:
    """The names as they are, and all of them exchanged: with that, the race is about something."""
    root_fd = os.open(volume, os.O_PATH | os.O_DIRECTORY)
    with neighbour(pairs_of(volume), asked=True) as made:
        for top in (volume / "usr", volume / marker.absolute.lstrip("/")):
            assert [path for path in top.rglob("*") if path.name == "libcuda.so.1"] == []
            assert run_child(lambda: declare_once(root_fd, undo=False)) == "made"
            assert [path for path in top.rglob("*") if path.name == "libcuda.so.1"] != []
            made.exchange()
    os.close(root_fd)
    marker.check()


@pytest.mark.parametrize("mode", GIVERS)
def test_names_that_are_exchanged_lead_no_container_out_of_its_root(
    attacks: Attacks, mode: str, share: Callable[..., list[int]]
) -> None:
    """The library directory, /etc and the compatibility libraries are on the volume."""
    places = {"lib": LIBRARIES, "etc": "etc", "compat": "usr/local/cuda/compat"}

    def build(rootfs: Path, marker: Marker) -> None:
        volume = rootfs / "volume"
        volume.mkdir()
        for name, place in places.items():
            path = rootfs / place
            path.mkdir(parents=True, exist_ok=True)
            path.rename(volume / name)
            path.symlink_to(f"/volume/{name}")
            (volume / f"{name}.other").symlink_to(marker.absolute if name == "lib" else marker.relative())

    bundle, marker = attacks.bundle(build, mode)
    volume = bundle / "rootfs/volume"
    configuration = (bundle / "config.json").read_bytes()
    started, starts = 0, share(range(STARTS), 3, 0)
    with neighbour([(volume / name, volume / f"{name}.other") for name in places]):
        for _ in starts:
            (bundle / "config.json").write_bytes(configuration)
            started += attacks.run(bundle, marker, mode, racing=True).started
    print(f"{started} of {len(starts)} started")
