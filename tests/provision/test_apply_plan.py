"""A whole plan, applied to containers of every kind that the kernel tells apart."""

import itertools
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from provision_lab import (
    MAPPED,
    Lab,
    count_entries,
    fail_at,
    host_mounts,
    make_plan,
    make_rootfs,
    new_kernel,
    old_kernel,
    snapshot,
)
from support import machine

from ocigpu.core.actions import (
    AllowDevice,
    Bind,
    FinishLdconfig,
    Link,
    Mode,
    Plan,
    RefreshLdCache,
    StartLdconfig,
    TextFile,
)
from ocigpu.core.errors import ApplyError
from ocigpu.provision import apply, fence, ldconfig, worker
from ocigpu.system import libc

pytestmark = pytest.mark.root


def look() -> dict[str, Any]:
    """Tell what a container has got."""

    def status(path: str) -> list[Any]:
        found = os.lstat(path)
        return [stat.filemode(found.st_mode), found.st_uid, found.st_gid, os.major(found.st_rdev), found.st_rdev & 0xFF]

    def flags(path: str) -> list[str]:
        found = os.statvfs(path).f_flag
        names = {"ro": os.ST_RDONLY, "nosuid": os.ST_NOSUID, "nodev": os.ST_NODEV, "noexec": os.ST_NOEXEC}
        return [name for name, bit in names.items() if found & bit]

    proc = os.path.exists("/proc/driver/nvidia/params")
    return {
        "ctl": status("/dev/nvidiactl"),
        "gpu": status("/dev/nvidia0"),
        "cap": status("/dev/nvidia-caps/nvidia-cap1"),
        "library": Path("/usr/lib64/libcuda.so.1.2").read_text(),
        "by link": Path("/lib64/libcuda.so.1").read_text(),
        "stale link": os.readlink("/usr/lib64/libstale.so"),
        "stale file": Path("/usr/lib64/libold.so.1").read_text(),
        "in new directories": Path("/opt/new/dir/libcuda.so").read_text(),
        "library flags": flags("/usr/lib64/libcuda.so.1.2"),
        "stale file flags": flags("/usr/lib64/libold.so.1"),
        "node flags": flags("/dev/nvidia0"),
        "sockets flags": flags("/run/nvidia"),
        "profile": Path("/etc/nvidia/profiles/10-container.conf").read_text(),
        "profile flags": flags("/etc/nvidia/profiles"),
        "profile status": status("/etc/nvidia/profiles")[:3],
        "params": Path("/proc/driver/nvidia/params").read_text() if proc else "",
        "information": Path("/proc/driver/nvidia/gpus/0000:01:00.0/information").read_text() if proc else "",
        "proc flags": flags("/proc/driver/nvidia") if proc else [],
        "proc names": sorted(os.listdir("/proc/driver/nvidia")) if proc else [],
    }


def check_common(found: dict[str, Any]) -> None:
    assert found["library"] == found["by link"] == found["stale file"] == found["in new directories"] == "driver"
    assert found["stale link"] == "libcuda.so.1.2"
    assert found["library flags"] == found["stale file flags"] == ["ro", "nosuid", "nodev"]
    assert found["sockets flags"] == ["nosuid", "nodev", "noexec"]
    assert found["profile"] == "{}"
    assert found["profile flags"] == ["ro", "nosuid", "nodev", "noexec"]
    assert found["profile status"][0] == "dr-xr-xr-x"


@pytest.mark.parametrize(
    ("kernel", "stage"), [(new_kernel, "created"), (new_kernel, "pivoted"), (old_kernel, "created")]
)
def test_a_container_of_root_gets_everything(kernel: Callable[[], None], stage: str, host: Path, rootfs: Path) -> None:
    before = host_mounts()
    with Lab(rootfs, stage) as lab:
        assert lab.provision(make_plan(host), kernel) == ([], "", "")
        found = lab.inside(look)
        assert host_mounts() == before
    check_common(found)
    assert found["ctl"] == ["crw-rw-rw-", 0, 0, 195, 255]
    assert found["gpu"] == ["crw-rw-rw-", 0, 0, 195, 0]
    assert found["cap"] == ["cr--r-----", 0, 44, 195, 0]
    assert found["node flags"] == ["nosuid"]  # of the tmpfs on /dev: the node was made, not mounted
    assert found["params"] == "ModifyDeviceFiles: 0\n"
    assert found["information"] == "Model: x\n"
    assert found["proc flags"] == ["ro", "nosuid", "nodev", "noexec"]
    assert found["proc names"] == ["gpus", "params", "version"]
    assert host_mounts() == before


def test_an_old_kernel_cannot_reach_the_host_from_a_pivoted_container(host: Path, rootfs: Path) -> None:
    with Lab(rootfs, "pivoted") as lab:
        before, mounts = snapshot(rootfs), lab.mounts()
        notes, code, message = lab.provision(make_plan(host), old_kernel)
        assert (notes, code) == ([], "OCIGPU-MNT-1")
        assert message.startswith(f"bind {host}/proc/driver -> /proc/driver")
        assert "No such file" in message
        assert (snapshot(rootfs), lab.mounts()) == (before, mounts)


@pytest.mark.parametrize("kernel", [new_kernel, old_kernel])
@pytest.mark.parametrize("owner", [0, MAPPED])
def test_root_provisions_a_container_with_a_user_namespace(
    kernel: Callable[[], None], owner: int, host: Path, rootfs: Path
) -> None:
    """Nodes are mounted, because they could not be opened on its /dev, and files belong to its root user."""
    for path in [str(rootfs), *snapshot(rootfs)]:
        os.lchown(path, owner, owner)
    rootfs.parent.chmod(0o755)
    machine.let_others_in(rootfs.parent)
    before = host_mounts()
    with Lab(rootfs, user=True) as lab:
        assert lab.provision(make_plan(host, with_proc=False), kernel) == ([], "", "")
        found = lab.inside(look)
    check_common(found)
    assert found["gpu"] == ["crw-rw-rw-", 0, 0, 195, 0]
    assert found["node flags"] == ["ro", "nosuid", "noexec"]
    for name in ("opt", "opt/new/dir", "usr/lib64/libcuda.so.1.2", "usr/lib64/libcuda.so.1", "run/nvidia"):
        status = (rootfs / name).lstat()
        assert (name, status.st_uid, status.st_gid) == (name, MAPPED, MAPPED)
    assert host_mounts() == before


def shared_rootfs(rootfs: Path) -> Iterator[None]:
    libc.mount("tmpfs", str(rootfs), "tmpfs", 0, "mode=755")
    libc.mount(None, str(rootfs), None, libc.MS_SHARED)
    make_rootfs(rootfs)
    yield
    while f" {rootfs} " in host_mounts():  # also what the container's runtime mounted on it
        libc.umount2(str(rootfs), libc.MNT_DETACH)


@pytest.mark.parametrize("kernel", [new_kernel, old_kernel])
def test_nothing_leaks_through_a_rootfs_that_is_shared_with_the_host(
    kernel: Callable[[], None], host: Path, tmp_path: Path
) -> None:
    rootfs = tmp_path / "shared"
    rootfs.mkdir()
    mounted = shared_rootfs(rootfs)
    next(mounted)
    try:
        with Lab(rootfs, dev=False, shared=True) as lab:
            before = host_mounts()
            assert f" {rootfs} " in before  # what the container mounted before we came did reach the host
            assert any("shared:" in line and "/shared " in line for line in lab.mounts())
            assert lab.provision(make_plan(host), kernel) == ([], "", "")
            check_common(lab.inside(look))
            assert host_mounts() == before
    finally:
        next(mounted, None)


@pytest.mark.rest
def test_every_failure_leaves_the_container_as_it_was(
    host: Path, rootfs: Path, tmp_path: Path, share: Callable[..., list[tuple[str, int]]]
) -> None:
    """After every single entry of the journal: an error, a defect, the worker killed, the parent killed."""
    counter = tmp_path / "counter"
    counter.touch()
    plan = make_plan(host)
    pristine = tmp_path / "pristine"
    shutil.copytree(rootfs, pristine, symlinks=True)
    with Lab(rootfs) as lab:
        assert lab.provision(plan, count_entries(counter)) == ([], "", "")
    total = counter.stat().st_size
    assert total >= 24
    shutil.rmtree(rootfs)
    shutil.copytree(pristine, rootfs, symlinks=True)
    expected = {
        "raise": ("OCIGPU-MNT-1", "failed on purpose"),
        "defect": ("OCIGPU-INT-1", "RuntimeError: failed on purpose"),
        "kill worker": ("OCIGPU-INT-2", "the worker was killed"),
        "kill parent": ("killed", ""),
    }
    tree, host_before = snapshot(rootfs), host_mounts()
    with Lab(rootfs) as lab:
        mounts, dev = lab.mounts(), lab.inside(lambda: sorted(os.listdir("/dev")))
        failures = list(itertools.product(expected, range(1, total + 1)))
        # the third of three: test_apply_here.py has the others
        for how, number in share(failures, 8, 2, lambda place: place // total + place % total):
            code, words = expected[how]
            notes, found_code, message = lab.provision(plan, fail_at(number, how))
            where = f"{how} after entry {number}: {message}"
            assert notes == [], where
            assert found_code == code or (how == "raise" and found_code in ("OCIGPU-DEV-3", "OCIGPU-MNT-3")), where
            assert words in message, where
            assert "undone" not in message, where
            assert snapshot(rootfs) == tree, where
            assert lab.mounts() == mounts, where
            assert lab.inside(lambda: sorted(os.listdir("/dev"))) == dev, where
        assert host_mounts() == host_before
        assert lab.provision(plan) == ([], "", "")
        check_common(lab.inside(look))


@pytest.mark.parametrize("how", ["raise", "kill worker"])
def test_on_a_busy_machine_undoing_has_the_time_of_the_start(how: str, host: Path, rootfs: Path) -> None:
    """A step back that takes more than a second, as where many processes want the processor, is not given up."""
    tree, step_back = snapshot(rootfs), apply.undo

    def slowly(transaction: Any, entries: Any) -> list[str]:
        time.sleep(apply.UNDO_SECONDS * 1.2)
        return step_back(transaction, entries)

    def prepare() -> None:
        fail_at(6, how)()
        apply.undo = slowly

    with Lab(rootfs) as lab:
        mounts = lab.mounts()
        _, code, message = lab.provision(make_plan(host), prepare)
        assert code
        assert "undone" not in message
        assert lab.mounts() == mounts
        assert snapshot(rootfs) == tree


LDCONFIG = next(path for path in ("/sbin/ldconfig.real", "/sbin/ldconfig") if os.path.exists(path))


def plan_with_cache(host: Path) -> Plan:
    refresh = RefreshLdCache(LDCONFIG, ("/usr/lib64",), "loader")
    return Plan(
        (Bind("/bin/true", "/usr/lib64/libreal.so.1", ("ro",), "any ELF file"), refresh, make_plan(host).actions[3])
    )


@pytest.mark.parametrize("before", ["the image's cache", None, "link"])
def test_the_loader_cache_is_made_anew_and_put_back_on_failure(before: str | None, host: Path, rootfs: Path) -> None:
    cache = rootfs / "etc/ld.so.cache"
    if before is None:
        cache.unlink()
    if before == "link":
        cache.unlink()
        cache.symlink_to("/etc/elsewhere")
    tree = snapshot(rootfs)
    plan = plan_with_cache(host)
    with Lab(rootfs) as lab:
        assert lab.provision(plan, fail_at(5, "raise"))[1] == "OCIGPU-DEV-3"  # the node that comes after the cache
        assert snapshot(rootfs) == tree
        assert lab.provision(plan, fail_at(5, "kill worker"))[1] == "OCIGPU-INT-2"
        assert snapshot(rootfs) == tree
        assert lab.provision(plan) == ([], "", "")
        assert cache.read_bytes().startswith((b"ld.so-1.7.0", b"glibc-ld.so.cache"))
        assert not cache.is_symlink()


@pytest.mark.parametrize("how", ["raise", "kill worker"])
def test_a_restart_that_fails_leaves_the_time_of_a_merged_cache(how: str, host: Path, rootfs: Path) -> None:
    """Its cache has all entries already, and only its time changes."""
    cache = rootfs / "etc/ld.so.cache"
    cache.unlink()
    merged = RefreshLdCache("", ("/usr/lib64",), "loader", (("libreal.so.1", "/usr/lib64/libreal.so.1", 64),))
    plan = Plan((merged, make_plan(host).actions[3]))
    with Lab(rootfs) as lab:
        assert lab.provision(Plan((merged,))) == ([], "", "")
        content = cache.read_bytes()
        os.utime(cache, ns=(5, 5))
        code = {"raise": "OCIGPU-DEV-3", "kill worker": "OCIGPU-INT-2"}[how]
        assert lab.provision(plan, fail_at(2, how))[1] == code  # the node that comes after the cache
        assert (cache.read_bytes(), cache.stat().st_mtime_ns) == (content, 5)
        assert lab.provision(plan) == ([], "", "")
        assert (cache.read_bytes(), cache.stat().st_mtime_ns > 5) == (content, True)


def test_a_host_without_ldconfig_leaves_a_note(host: Path, rootfs: Path) -> None:
    def hide_ldconfig() -> None:
        ldconfig.CANDIDATES = ("/nonexistent/ldconfig",)

    plan = Plan((RefreshLdCache("", ("/usr/lib64",), "loader"),))
    cache = (rootfs / "etc/ld.so.cache").read_bytes()
    with Lab(rootfs) as lab:
        notes, code, _ = lab.provision(plan, hide_ldconfig)
        assert (code, len(notes)) == ("", 1)
        assert "no ldconfig" in notes[0]
        assert lab.provision(plan) == ([], "", "")
    assert (rootfs / "etc/ld.so.cache").read_bytes() != cache


@pytest.mark.parametrize("merged", [True, False])
def test_a_loader_cache_that_cannot_be_put_back_is_left_alone(host: Path, rootfs: Path, merged: bool) -> None:
    """Nobody waits for the ldconfig that was made ready, which has nothing to do."""
    cache = rootfs / "etc/ld.so.cache"
    with cache.open("r+b") as file:
        file.truncate(1 << 30)
    plan = plan_with_cache(host) if merged else Plan((RefreshLdCache("", ("/usr/lib64",), "loader"),))
    with Lab(rootfs) as lab:
        notes, code, _ = lab.provision(plan)
        assert (code, len(notes)) == ("", 1)
        assert "left alone" in notes[0]
        assert cache.stat().st_size == 1 << 30


def test_nothing_is_imported_in_the_container() -> None:
    """Not even the codec that shows control characters in a message: it is there before."""
    code = """
from ocigpu.core.errors import printable
from ocigpu.provision import apply
apply._stop_imports()
assert printable("\\x01") == "\\\\x01"
try:
    import xml
except ImportError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.stdout, done.stderr) == ("refused\n", "")


def test_a_parent_that_ignores_its_children_is_served_too(host: Path, rootfs: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    with Lab(rootfs) as lab:
        assert lab.provision(plan_with_cache(host), ignore) == ([], "", "")


def test_an_interrupted_parent_leaves_nothing(host: Path, rootfs: Path) -> None:
    """Ctrl-C while the worker works: the worker ignores it, sees the end of its pipe and undoes."""
    tree = snapshot(rootfs)

    def prepare() -> None:
        read = worker.Worker.read_report

        def interrupted(*_: Any) -> Any:
            worker.Worker.read_report = read
            raise KeyboardInterrupt

        worker.Worker.read_report = interrupted

    with Lab(rootfs) as lab:
        mounts = lab.mounts()
        with pytest.raises(AssertionError, match="KeyboardInterrupt"):
            lab.provision(make_plan(host), prepare)
        assert (snapshot(rootfs), lab.mounts()) == (tree, mounts)


def test_device_rules_that_fail_undo_everything(host: Path, rootfs: Path) -> None:
    tree = snapshot(rootfs)
    calls = rootfs.parent / "calls"

    def fails() -> None:
        def apply_device_rules(*_: object) -> tuple[str, Callable[[], None]]:
            raise ApplyError("OCIGPU-CG-1", "device cgroup: failed on purpose")

        apply.apply_device_rules = apply_device_rules

    def worker_dies_after() -> None:
        def apply_device_rules(*_: object) -> tuple[str, Callable[[], None]]:
            os.kill(WORKERS[0], signal.SIGKILL)
            return "", lambda: calls.write_text("rules undone") and None

        fork, WORKERS[:] = os.fork, []

        def remember() -> int:
            pid = fork()
            if pid:
                WORKERS.append(pid)
            return pid

        apply.os.fork = remember
        apply.apply_device_rules = apply_device_rules

    plan = make_plan(host)
    plan = plan._replace(actions=(*plan.actions, AllowDevice(195, 0, "rw", "GPU")))
    with Lab(rootfs) as lab:
        mounts = lab.mounts()
        assert lab.provision(plan, fails) == ([], "OCIGPU-CG-1", "device cgroup: failed on purpose")
        assert (snapshot(rootfs), lab.mounts()) == (tree, mounts)
        assert lab.provision(plan, worker_dies_after)[1] == "OCIGPU-INT-2"
        assert (snapshot(rootfs), lab.mounts()) == (tree, mounts)
        assert calls.read_text() == "rules undone"


WORKERS: list[int] = []
REPOSITORY = Path(__file__).parents[2]


def test_every_ldconfig_of_a_plan_has_ended_with_the_work(host: Path, rootfs: Path) -> None:
    """The worker's end kills one that still runs: without a cache, or with its draft beside the old one."""

    def slowly() -> None:
        install = fence.install_filter

        def install_later(code: bytes) -> None:
            time.sleep(0.3)
            install(code)

        fence.install_filter = install_later

    late = (
        Bind("/bin/true", "/opt/late/liblate.so.1", ("ro",), "any ELF file"),
        RefreshLdCache(LDCONFIG, ("/usr/lib64", "/opt/late"), "once more"),
    )
    plan = plan_with_cache(host)
    with Lab(rootfs) as lab:
        assert lab.provision(plan._replace(actions=(*plan.actions, *late)), slowly) == ([], "", "")
    assert sorted(os.listdir(rootfs / "etc")) == ["ld.so.cache"]
    assert b"/opt/late/liblate.so.1\0" in (rootfs / "etc/ld.so.cache").read_bytes()


@pytest.mark.parametrize(
    ("action", "before"),
    [
        (Link("/usr/lib/one", "/opt/one", ""), True),
        (Link("/usr/lib/libone.so.1", "libone.so.1.2", ""), True),
        (Mode("/usr/lib/one", 0o755, ""), True),
        (TextFile("/etc/ld.so.conf.d/one.conf", 0o644, "", ""), True),
        (Bind("/opt/one", "/usr/lib/one", (), "", "directory"), True),
        (Bind("/opt/one.so", "/usr/lib/one.so", (), ""), True),
        (Bind("/usr/bin/one", "/usr/bin/one", (), ""), False),
        (Link("/dev/dri/by-path/one", "../card0", ""), False),
    ],
    ids=lambda value: value.describe() if hasattr(value, "describe") else str(value),
)
def test_what_ldconfig_looks_at_is_there_before_it_runs(action: Any, before: bool) -> None:
    """A link may lead to a directory of libraries, and a mode may close one to it."""
    refresh = RefreshLdCache("", ("/usr/lib/one",), "")
    order = [action, refresh] if before else [refresh, action]
    plan = Plan((AllowDevice(195, 0, "rw", ""), action, refresh))
    assert plan.steps() == [StartLdconfig(refresh), *order, FinishLdconfig(refresh)]


def test_an_ldconfig_has_ended_before_what_comes_after_it() -> None:
    first, second = (RefreshLdCache("", (name,), "") for name in ("/one", "/two"))
    beside, library = Bind("/a", "/usr/bin/a", (), ""), Bind("/b", "/usr/lib/b.so", (), "")
    last = Bind("/c", "/usr/bin/c", (), "")
    assert Plan((beside, library, first, beside, library, second, last)).steps() == [
        *(StartLdconfig(first), library, first, beside, FinishLdconfig(first)),
        *(StartLdconfig(second), library, second, beside, FinishLdconfig(second)),
        last,
    ]
    merged = first._replace(entries=(("b.so", "/usr/lib/b.so", 64),))
    # after everything that changes directories of libraries: the next start finds the cache newer than these
    assert Plan((beside, library, merged, last)).steps() == [beside, library, merged, last]
    assert Plan((last,)).steps() == [last]
