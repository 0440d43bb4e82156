"""A plan carried out from inside the container's namespaces, as hooks of the createContainer stage do."""

import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from provision_bundles import (
    USER,
    copy_hook,
    crun,
    inside_a_user_namespace,
    rootless,
    rootless_crun,
    run,
    runc,
    write_bundle,
)
from provision_lab import (
    LDCONFIG,
    MAPPED,
    Lab,
    count_entries,
    fail_at,
    host_mounts,
    make_plan_here,
    make_rootfs,
    new_kernel,
    old_kernel,
    run_child,
    snapshot,
)
from support import machine
from support.product import PublicCopy

from ocigpu.core.actions import AllowDevice, Bind, Link, Node, Plan, RefreshLdCache, TextFile, Tmpfs
from ocigpu.core.errors import ApplyError
from ocigpu.core.facts import DeviceNode
from ocigpu.core.settings import Settings
from ocigpu.provision import apply, fence, ldconfig  # noqa: F401 - loaded before a user namespace is entered
from ocigpu.system import libc

pytestmark = pytest.mark.root

fence.load_prctl()


def check(lab: Lab, with_proc: bool = True) -> None:
    def look() -> dict[str, Any]:
        return {
            "library": Path("/usr/lib64/libcuda.so.1.2").read_text(),
            "by link": Path("/lib64/libcuda.so.1").read_text(),
            "stale file": Path("/usr/lib64/libold.so.1").read_text(),
            "compat": Path("/etc/ld.so.conf.d/00-compat.conf").read_text(),
            "conf": Path("/etc/ld.so.conf").read_text(),
            "mode": os.stat("/opt").st_mode,
            "profile": Path("/etc/nvidia/profiles/10-container.conf").read_text(),
            "params": Path("/proc/driver/nvidia/params").read_text() if with_proc else "ModifyDeviceFiles: 0\n",
            "cache": Path("/etc/ld.so.cache").read_bytes()[:6].decode(),
            "owners": [os.stat(p).st_uid for p in ("/opt/new", "/etc/ld.so.conf", "/etc/nvidia/profiles")],
        }

    mapped = MAPPED if not with_proc else 0
    found = lab.inside(look)
    assert found["library"] == found["by link"] == found["stale file"] == "driver"
    assert found["compat"] == "/usr/local/cuda/compat\n"
    assert found["conf"] == "include /etc/ld.so.conf.d/*.conf\n"
    assert found["mode"] == 0o40711
    assert (found["profile"], found["params"]) == ("{}", "ModifyDeviceFiles: 0\n")
    assert found["cache"] in ("ld.so-", "glibc-")
    assert found["owners"] == [mapped] * 3


def open_up(rootfs: Path, owner: int) -> None:
    """Give a root file system to the root user of a user namespace."""
    for path in [str(rootfs), *snapshot(rootfs)]:
        os.lchown(path, owner, owner)
    machine.let_others_in(rootfs.parent)


@pytest.mark.parametrize("kernel", [new_kernel, old_kernel])
@pytest.mark.parametrize("user", [False, True], ids=["root", "user namespace"])
def test_a_container_gets_everything_and_twice_is_once(
    kernel: Callable[[], None], user: bool, host: Path, rootfs: Path
) -> None:
    if user:
        open_up(rootfs, MAPPED)
    before = host_mounts()
    plan = make_plan_here(host, with_proc=not user)
    with Lab(rootfs, user=user) as lab:
        assert lab.provision(plan, kernel, here=True) == ([], "", "")
        check(lab, with_proc=not user)
        mounts, tree = lab.mounts(), snapshot(rootfs)
        assert lab.provision(plan, kernel, here=True) == ([], "", "")
        assert lab.mounts() == mounts
        assert snapshot(rootfs) == tree
        assert host_mounts() == before


@pytest.mark.rest
def test_a_mount_that_differs_is_mounted_over(host: Path, rootfs: Path) -> None:
    tmpfs = Tmpfs("/etc/profiles", 0o555, (("a/b", 0o444, "one"), ("c", 0o400, "")), ("d",), "profiles")
    library = Bind(f"{host}/lib/libcuda.so.1.2", "/usr/lib64/lib.so", ("nosuid",), "library")
    others = [
        tmpfs._replace(mode=0o755),
        tmpfs._replace(files=(("a/b", 0o444, "two"), ("c", 0o400, ""))),
        tmpfs._replace(files=(("a/b", 0o440, "one"), ("c", 0o400, ""))),
        tmpfs._replace(files=(("a/b", 0o444, "one"),)),
        tmpfs._replace(files=(("a/b", 0o444, "one"), ("e", 0o400, ""))),
        tmpfs._replace(directories=()),
        tmpfs._replace(directories=("a", "c", "d"), files=(("a/b", 0o444, "one"),)),
        library._replace(options=("nosuid", "ro")),
        library._replace(host_path=f"{host}/bin/nvidia-smi"),
    ]
    for other in others:
        with Lab(rootfs) as lab:
            bare = len(lab.mounts())
            for action, count in ((tmpfs, 1), (tmpfs, 1), (library, 2), (library, 2), (other, 3), (other, 3)):
                assert lab.provision(Plan((action,)), here=True) == ([], "", "")
                assert len(lab.mounts()) == bare + count, other.describe()


@pytest.mark.parametrize("user", [False, True], ids=["root", "user namespace"])
def test_every_failure_leaves_the_container_as_it_was(
    user: bool, host: Path, rootfs: Path, tmp_path: Path, share: Callable[..., list[tuple[str, int]]]
) -> None:
    if user:
        open_up(rootfs, MAPPED)
    counter = tmp_path / "counter"
    counter.touch()
    counter.chmod(0o666)
    plan = make_plan_here(host, with_proc=not user)
    pristine = tmp_path / "pristine"
    subprocess.run(["cp", "-a", str(rootfs), str(pristine)], check=True)
    with Lab(rootfs, user=user) as lab:
        assert lab.provision(plan, count_entries(counter), here=True) == ([], "", "")
    total = counter.stat().st_size
    assert total >= 24
    shutil.rmtree(rootfs)
    subprocess.run(["cp", "-a", str(pristine), str(rootfs)], check=True)
    expected = {
        "raise": "failed on purpose",
        "defect": "RuntimeError: failed on purpose",
        "kill worker": "the worker was killed",
        "kill parent": "",
    }
    tree, host_before = snapshot(rootfs), host_mounts()
    with Lab(rootfs, user=user) as lab:
        mounts = lab.mounts()
        failures = list(itertools.product(expected, range(1, total + 1)))
        for how, number in share(failures, 8, user, lambda place: place // total + place % total):
            notes, code, message = lab.provision(plan, fail_at(number, how), here=True)
            where = f"{how} after entry {number}: {message}"
            assert (notes, bool(code)) == ([], True), where
            assert (expected[how] in message, "undone" in message) == (True, False), where
            assert snapshot(rootfs) == tree, where
            assert lab.mounts() == mounts, where
        assert host_mounts() == host_before
        assert lab.provision(plan, here=True) == ([], "", "")
        check(lab, with_proc=not user)


def test_a_failing_last_action_undoes_all_and_a_first_hook_is_kept(host: Path, rootfs: Path) -> None:
    """Each hook process undoes its own work only: the loader cache goes back to what the one before it made."""
    plan = make_plan_here(host)
    second = Plan(
        (
            TextFile("/etc/ld.so.conf.d/00-compat.conf", 0o644, "/other\n", "other"),
            RefreshLdCache(LDCONFIG, (), "loader"),
            RefreshLdCache(LDCONFIG, ("/usr/lib64", "/opt/new/dir"), "loader"),
            Bind("/no/such/file", "/usr/bin/x", ("ro",), "fails"),
        )
    )
    with Lab(rootfs) as lab:
        mounts, tree = lab.mounts(), snapshot(rootfs)
        failing = plan._replace(actions=(*plan.actions, second.actions[-1]))
        _, code, message = lab.provision(failing, here=True)
        assert (code, "undone" in message) == ("OCIGPU-MNT-1", False)
        assert (lab.mounts(), snapshot(rootfs)) == (mounts, tree)
        assert lab.provision(plan, here=True) == ([], "", "")
        mounts, tree = lab.mounts(), snapshot(rootfs)
        assert lab.provision(second, here=True)[1] == "OCIGPU-MNT-1"
        assert (lab.mounts(), snapshot(rootfs)) == (mounts, tree)


def refused(rootfs: str, prepare: Callable[[], None] = new_kernel, *actions: Any) -> list[str]:
    """Return code and message of what ``provision_here`` refuses, called in a process of its own."""

    def work() -> list[str]:
        prepare()
        try:
            apply.provision_here(Plan(actions), rootfs, Settings())
        except ApplyError as error:
            return [error.code, error.message]
        return ["", ""]

    answer: list[str] = run_child(work)
    return answer


def be_beside_the_first_process() -> None:
    """Have the machine's first process in our mount namespace: the tests' own is not where it is."""
    libc.unshare(libc.CLONE_NEWNS)
    libc.mount(f"/proc/{os.getpid()}", "/proc/1", None, libc.MS_BIND)


def test_the_hosts_own_namespace_is_refused(rootfs: Path) -> None:
    tree = snapshot(rootfs)
    code, message = refused(str(rootfs), be_beside_the_first_process, Link("/usr/lib64/x", "y", "link"))
    assert code == "OCIGPU-NS-1"
    assert "in the host's mount namespace" in message
    assert snapshot(rootfs) == tree


@pytest.mark.parametrize(
    ("root", "code", "words"),
    [
        ("/", "OCIGPU-NS-1", "the host's own root directory"),
        ("/proc/self/root", "OCIGPU-NS-1", "the host's own root directory"),
        ("/no/such/directory", "OCIGPU-NS-1", "No such file or directory"),
        ("/etc/passwd", "OCIGPU-NS-1", "Not a directory"),
        ("", "OCIGPU-NS-1", "No such file or directory"),
        (".", "OCIGPU-NS-1", "the host's own root directory"),
    ],
)
def test_a_root_that_is_no_containers_is_refused(root: str, code: str, words: str, rootfs: Path) -> None:
    with Lab(rootfs) as lab:
        found, message = refused(root, lab.enter, Link("/ocigpu-test", "y", "link"))
    assert (found, words in message) == (code, True), message
    assert not os.path.lexists("/ocigpu-test")


def test_a_directory_of_the_host_in_a_mount_namespace_is_no_containers_root(rootfs: Path, tmp_path: Path) -> None:
    """As services have one (PrivateTmp=); a path of many kinds of characters is found among the mounts all the same."""
    plain, mounted = tmp_path / "directory", tmp_path / "a b\\040\tc\n#"
    for path in (plain, mounted):
        path.mkdir()

    def prepare() -> None:
        lab.enter()
        libc.mount(str(mounted), str(mounted), None, libc.MS_BIND)

    with Lab(rootfs) as lab:
        code, message = refused(str(plain), prepare, Link("/x", "y", "link"))
        assert (code, "not a mount of a container" in message) == ("OCIGPU-NS-1", True)
        assert refused(str(mounted), prepare, Link("/x", "y", "link")) == ["", ""]
    assert (os.listdir(plain), os.listdir(mounted)) == ([], ["x"])


@pytest.mark.parametrize(
    "action",
    [
        Node(DeviceNode("/dev/nvidia0", "/dev/null", 195, 0, 0o666, 0, 0), "GPU"),
        AllowDevice(195, 0, "rw", "GPU"),
    ],
    ids=["node", "rule"],
)
def test_nodes_and_rules_are_the_runtimes(action: Any, rootfs: Path) -> None:
    with Lab(rootfs) as lab:
        code, message = refused(str(rootfs), lab.enter, action)
    assert (code, "not possible inside the container" in message) == ("OCIGPU-INT-1", True)


def test_without_procfs_nothing_is_done(rootfs: Path) -> None:
    with Lab(rootfs) as lab:

        def prepare() -> None:
            lab.enter()
            libc.mount("none", "/proc", "tmpfs", 0)

        code, message = refused(str(rootfs), prepare)
    assert code == "OCIGPU-NS-2"
    assert "/proc/self/mountinfo: No such file or directory" in message


@pytest.mark.parametrize("user", [False, True], ids=["root", "user namespace"])
def test_a_hidden_host_is_no_matter_in_a_user_namespace_only(user: bool, rootfs: Path) -> None:
    """Root of the machine sees every process whatever hidepid says, unless a security module forbids it."""
    if user:
        open_up(rootfs, MAPPED)
    with Lab(rootfs, user=user) as lab:

        def prepare() -> None:
            mnt_fd = os.open(f"/proc/{lab.pid}/ns/mnt", os.O_RDONLY)
            libc.setns(mnt_fd, libc.CLONE_NEWNS)
            libc.unshare(libc.CLONE_NEWNS)
            libc.mount("none", "/proc/1", "tmpfs", 0)  # what the reader of a hidden process finds: nothing
            if user:
                user_fd = os.open(f"/proc/{lab.pid}/ns/user", os.O_RDONLY)
                libc.setns(user_fd, libc.CLONE_NEWUSER)
                os.setresgid(0, 0, 0)
                os.setresuid(0, 0, 0)
                libc.unshare(libc.CLONE_NEWNS)

        code, message = refused(str(rootfs), prepare, Link("/usr/lib64/x", "y", "link"))
        if user:
            assert (code, message) == ("", "")
            assert os.readlink(rootfs / "usr/lib64/x") == "y"
        else:
            assert (code, "the host's mounts are unknown" in message) == ("OCIGPU-NS-1", True)


def test_nothing_leaks_through_a_rootfs_that_is_shared_with_the_host(host: Path, tmp_path: Path) -> None:
    rootfs = tmp_path / "shared"
    rootfs.mkdir()
    libc.mount("tmpfs", str(rootfs), "tmpfs", 0, "mode=755")
    try:
        libc.mount(None, str(rootfs), None, libc.MS_SHARED)
        make_rootfs(rootfs)
        with Lab(rootfs, dev=False, shared=True) as lab:
            before = host_mounts()
            assert lab.provision(make_plan_here(host), here=True) == ([], "", "")
            check(lab)
            assert host_mounts() == before
    finally:
        while f" {rootfs} " in host_mounts():
            libc.umount2(str(rootfs), libc.MNT_DETACH)


# --- real runtimes

HOOK_COMMAND: list[str] = []
SCRIPT = """
cat /proc/self/mountinfo
echo ---
cat /usr/lib64/libcuda.so.1 /usr/lib64/libold.so.1; echo
cat /etc/ld.so.conf.d/00-compat.conf /etc/ld.so.conf /etc/nvidia/profiles/10-container.conf; echo
cat /proc/driver/nvidia/params /proc/driver/nvidia/gpus/0000:01:00.0/information
stat -c '%a %u %g' /opt
head -c 11 /etc/ld.so.cache; echo
touch /usr/lib64/new 2>&1 | sed 's/.*: //'
"""


@pytest.fixture(scope="module", autouse=True)
def hook_command(public_copy: PublicCopy) -> None:
    HOOK_COMMAND[:] = copy_hook(public_copy, "provision_here_hook.py")


def make_bundle(place: Path, *hook_arguments: str, hooks: int = 1, **kind: Any) -> Path:
    words = [*HOOK_COMMAND, str(place), *hook_arguments]
    return write_bundle(place, SCRIPT, {"createContainer": [words] * hooks}, **kind)


def check_output(bundle: Path, done: subprocess.CompletedProcess[str]) -> list[str]:
    """Check what the container said and return its mounts."""
    assert done.returncode == 0, done.stderr
    mounts, _, said = done.stdout.partition("---\n")
    lines = said.splitlines()
    assert lines[:4] == [
        "driverdriver",
        "/usr/local/cuda/compat",
        "include /etc/ld.so.conf.d/*.conf",
        "{}",
    ]
    assert lines[4:7] == ["ModifyDeviceFiles: 0", "Model: x", "711 0 0"]
    assert lines[7] in ("ld.so-1.7.0", "glibc-ld.so")
    assert " /usr/lib64/libcuda.so.1.2 ro,nosuid,nodev" in mounts
    points = [line.split(" ")[4] for line in mounts.splitlines()]
    assert sorted(points) == sorted(set(points))
    answers = (bundle / "host.answer").read_text().splitlines()
    assert set(answers) == {"[]"}
    return points


RUNTIMES: dict[str, tuple[Callable[[Path], tuple[str, ...]], bool]] = {
    "runc": (runc, False),
    "crun": (crun, False),
    "runc without root": (rootless, True),
    "crun without root": (rootless_crun, True),
    "runc in a user namespace": (inside_a_user_namespace, True),
}


@pytest.mark.engine
@pytest.mark.parametrize("hooks", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("kernel", ["new", "old"])
@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_hooks_of_real_runtimes(
    runtime: str, kernel: str, hooks: int, place: Path, runtime_environment: dict[str, str]
) -> None:
    command, user = RUNTIMES[runtime]
    bundle = make_bundle(place, kernel, user=user, hooks=hooks)
    before = host_mounts()
    words = command(bundle)
    done = run(bundle, *words, env=runtime_environment if "crun" in words else None)
    check_output(bundle, done)
    assert len((bundle / "host.answer").read_text().splitlines()) == hooks
    for path in snapshot(place / "rootfs") if user else {}:
        assert os.lstat(path).st_uid == USER
    assert host_mounts() == before


@pytest.mark.engine
@pytest.mark.parametrize("runtime", ["runc", "crun"])
@pytest.mark.parametrize("case", ["readonly", "pid namespace of the host"])
def test_other_containers(runtime: str, case: str, place: Path, runtime_environment: dict[str, str]) -> None:
    readonly = case == "readonly"
    bundle = make_bundle(place, "new", readonly=readonly, without=() if readonly else ("pid",))
    before = host_mounts()
    done = run(bundle, *RUNTIMES[runtime][0](bundle), env=runtime_environment if runtime == "crun" else None)
    check_output(bundle, done)
    assert (done.stdout.splitlines()[-1] == "Read-only file system") is readonly
    assert host_mounts() == before


@pytest.mark.engine
@pytest.mark.parametrize("how", ["raise", "kill worker", "kill parent"])
@pytest.mark.parametrize("entry", [2, 9, 24])
@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_failed_hook_stops_the_container_and_leaves_the_image_as_it_was(
    runtime: str, entry: int, how: str, place: Path, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(place, "new", str(entry), how)
    tree, before = snapshot(place / "rootfs"), host_mounts()
    environment = runtime_environment if runtime == "crun" else None
    done = run(bundle, *RUNTIMES[runtime][0](bundle), env=environment)
    assert done.returncode != 0
    assert not (place / "host.answer").exists()
    wait_for_workers(place)
    assert host_mounts() == before
    if (runtime, how) != ("crun", "kill parent"):
        assert snapshot(place / "rootfs") == tree
        return
    # crun ends all processes of the container with the hook, the undoing worker too: a second try is to work
    config = json.loads((bundle / "config.json").read_text())
    del config["hooks"]["createContainer"][0]["args"][-2:]
    (bundle / "config.json").write_text(json.dumps(config))
    check_output(bundle, run(bundle, *crun(bundle), env=environment))


def wait_for_workers(place: Path) -> None:
    """Wait until nobody holds the lock that every process of a hook inherits."""
    lock = place / "host.lock"
    with lock.open("a") as file:
        signal.alarm(30)
        fcntl.flock(file, fcntl.LOCK_EX)
        signal.alarm(0)


@pytest.mark.engine
def test_a_hook_at_the_wrong_stage_changes_nothing(place: Path) -> None:
    """At prestart a hook runs in the host's namespaces: it must not mount anything there."""
    bundle = make_bundle(place, "new")
    config = json.loads((bundle / "config.json").read_text())
    config["hooks"] = {"prestart": config["hooks"]["createContainer"]}
    (bundle / "config.json").write_text(json.dumps(config))
    tree, before = snapshot(place / "rootfs"), host_mounts()
    done = run(bundle, *runc(bundle))
    assert done.returncode != 0
    assert "OCIGPU-NS-1" in done.stderr
    assert (snapshot(place / "rootfs"), host_mounts()) == (tree, before)
