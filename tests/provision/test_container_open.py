"""Opening a container: which process it may be, where its root is, and what is refused."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from provision_lab import MAPPED, Lab, make_rootfs, run_child
from support import machine

from ocigpu.core.errors import ApplyError
from ocigpu.provision import container
from ocigpu.system import libc, proc

pytestmark = pytest.mark.root


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    return make_rootfs(tmp_path / "rootfs")


def attempt(pid: int, rootfs: str, root: bool = False) -> Any:
    """Return what opening (and joining, with ``root``) gives in a new process: fields, or the error."""

    def work() -> Any:
        try:
            opened = container.open_container(pid, rootfs)
            if root:
                container.join(opened)
                fd = container.open_root(opened)
                return sorted(os.listdir(os.open(".", os.O_RDONLY, dir_fd=fd)))
        except ApplyError as error:
            return [error.code, error.message]
        return {name: getattr(opened, name) for name in ("uid", "gid", "other_user_namespace", "join_user", "pivoted")}

    return run_child(work)


@pytest.mark.parametrize("stage", ["created", "pivoted"])
def test_the_root_is_found_before_and_after_the_pivot(stage: str, rootfs: Path) -> None:
    with Lab(rootfs, stage) as lab:
        assert attempt(lab.pid, str(rootfs)) == {
            "uid": 0,
            "gid": 0,
            "other_user_namespace": False,
            "join_user": False,
            "pivoted": stage == "pivoted",
        }
        assert attempt(lab.pid, str(rootfs), root=True) == sorted(os.listdir(rootfs))


def test_an_image_cannot_pass_another_directory_off_as_its_root(rootfs: Path) -> None:
    """After the pivot the path of the bundle is the image's to choose."""
    fake = rootfs / str(rootfs)[1:]
    fake.mkdir(parents=True)
    (fake / "fake").touch()
    with Lab(rootfs, "pivoted") as lab:
        assert attempt(lab.pid, str(rootfs), root=True) == sorted(os.listdir(rootfs))


def test_the_ids_of_a_user_namespace_are_read_from_its_maps(rootfs: Path) -> None:
    machine.let_others_in(rootfs.parent)
    with Lab(rootfs, user=True) as lab:
        found = attempt(lab.pid, str(rootfs))
        assert (found["uid"], found["gid"]) == (MAPPED, MAPPED)
        assert (found["other_user_namespace"], found["join_user"]) == (True, False)


def test_the_hosts_root_is_no_container(rootfs: Path) -> None:
    with Lab(rootfs) as lab:
        assert attempt(lab.pid, "/", root=True) == [
            "OCIGPU-NS-1",
            "container root /: it is the host's own root directory",
        ]


def test_a_root_that_is_missing_or_a_file(rootfs: Path) -> None:
    with Lab(rootfs) as lab:
        code, message = attempt(lab.pid, f"{rootfs}/missing", root=True)
        assert (code, message) == ("OCIGPU-NS-2", f"open container root {rootfs}/missing: No such file or directory")
        code, message = attempt(lab.pid, f"{rootfs}/etc/ld.so.cache", root=True)
        assert (code, message) == ("OCIGPU-NS-2", f"open container root {rootfs}/etc/ld.so.cache: Not a directory")


def test_a_process_without_a_mount_namespace_of_its_own_is_no_container(rootfs: Path) -> None:
    pid = os.getpid()
    assert attempt(pid, str(rootfs)) == [
        "OCIGPU-NS-1",
        f"container process {pid}: it has no mount namespace of its own",
    ]


@pytest.fixture
def zombie() -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield pid
    os.waitpid(pid, 0)


def test_a_process_that_has_ended_is_no_container(zombie: int, rootfs: Path) -> None:
    assert attempt(zombie, str(rootfs)) == ["OCIGPU-NS-1", f"container process {zombie}: it has ended"]


def test_a_process_that_is_gone_is_no_container(rootfs: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert attempt(pid, str(rootfs)) == ["OCIGPU-NS-1", f"container process {pid}: it is gone"]


def test_a_younger_process_has_only_got_the_containers_number(rootfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: str = "stat", dir_fd: int | None = None) -> proc.ProcessStat:
        found = proc.read_stat(path, dir_fd)
        return found if dir_fd is None else found._replace(start=found.start + 1_000_000)

    monkeypatch.setattr(container, "read_stat", read)
    with Lab(rootfs) as lab, pytest.raises(ApplyError) as caught:
        container.open_container(lab.pid, str(rootfs))
    assert caught.value.code == "OCIGPU-NS-1"
    assert "started after this hook" in caught.value.message


@pytest.mark.parametrize(("pid", "root"), [(0, "/x"), (-1, "/x"), (1, "relative")])
def test_a_state_that_makes_no_sense(pid: int, root: str) -> None:
    assert attempt(pid, root)[0] == "OCIGPU-NS-1"


def as_user(function: Any) -> Any:
    def work() -> Any:
        os.setgroups([])
        os.setresgid(4321, 4321, 4321)
        os.setresuid(4321, 4321, 4321)
        try:
            return function()
        except ApplyError as error:
            return [error.code, error.message]

    return run_child(work)


def test_an_ordinary_user_may_not_enter_anybody_elses_container(rootfs: Path) -> None:
    with Lab(rootfs) as lab:
        code, message = as_user(lambda: container.open_container(lab.pid, str(rootfs)).pid)
        assert code == "OCIGPU-NS-2"
        assert "Permission denied" in message


def test_without_sys_admin_and_user_namespace_there_is_no_way_in(rootfs: Path) -> None:
    def drop() -> Any:
        sets = libc.capget()
        mask = ~(1 << libc.CAP_SYS_ADMIN)
        libc.capset(libc.Capabilities(sets.effective & mask, sets.permitted & mask, 0))
        try:
            container.open_container(lab.pid, str(rootfs))
        except ApplyError as error:
            return [error.code, error.message]
        return None

    with Lab(rootfs) as lab:
        code, message = run_child(drop)
        assert code == "OCIGPU-NS-2"
        assert "CAP_SYS_ADMIN" in message or "Permission denied" in message


def test_no_descriptor_stays_open_after_a_refusal(rootfs: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ApplyError):
        container.open_container(os.getpid(), str(rootfs))
    assert os.listdir("/proc/self/fd") == before
