"""Containers are found in the states of runc and crun, and nothing is believed that others could have written."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from containers_lab import VIEWS, WAITING, container, names_of, runc_state, write_state
from support import machine, requirements
from support.fixtures import MakeBundle
from support.process import wait_for
from support.runtimes import container_id

from ocigpu.containers.believed import open_process
from ocigpu.containers.find import MAX_CONTAINERS, Places, default_places, find_container, find_containers
from ocigpu.core.errors import OcigpuError
from ocigpu.entry.state import MAX_STATE_BYTES

OTHER = 4321


def start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def crun_state(pid: object = 0, start: object = 0, bundle: str = "/nowhere", **more: Any) -> str:
    return json.dumps({"pid": pid, "process-start-time": start, "bundle": bundle, "rootfs": "rootfs", **more})


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize(("low_level", "cgroup"), VIEWS)
def test_a_container_is_found_in_every_status_of_its_life(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], low_level: str, cgroup: str
) -> None:
    bundle = make_bundle(WAITING, layout="busybox")
    with container(bundle, runtime_environment, low_level, cgroup, subcommand=("create",)) as made:
        found = made.found()
        assert (found.id, found.name, found.engine, found.runtime) == (made.name, made.name, "", low_level)
        assert (found.bundle, found.rootfs) == (str(bundle), str(bundle / "rootfs"))
        assert found.status == "created"
        os.close(open_process(found))
        made.do("start", made.name)
        assert made.found()._replace(status="created") == found
        assert made.found().status == "running"
        made.do("pause", made.name)
        assert made.found().status == "paused"
        made.do("resume", made.name)
        os.kill(found.pid, signal.SIGKILL)
        wait_for("the container to end", lambda: made.found().status == "stopped")
        assert made.found().pid == 0
        with pytest.raises(OcigpuError, match="has ended") as caught:
            open_process(found)
        assert caught.value.code == "OCIGPU-CTR-3"
        made.do("delete", made.name)
        assert find_containers(made.places) == ([], [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("abcdef", "abcdef", id="an id"),
        pytest.param("abx", "abx", id="an id that is the beginning of another"),
        pytest.param("abc", "abcdef", id="the beginning of one id"),
        pytest.param("ab", "OCIGPU-CTR-2", id="the beginning of two ids"),
        pytest.param("twice", "OCIGPU-CTR-2", id="an id in two places"),
        pytest.param("", "OCIGPU-CTR-1", id="nothing"),
        pytest.param("z", "OCIGPU-CTR-1", id="no id"),
        pytest.param("../abcdef", "OCIGPU-CTR-1", id="a path"),
        pytest.param("\x1b[2J", "OCIGPU-CTR-1", id="control characters"),
    ],
)
def test_a_container_is_named_by_id_or_an_unambiguous_beginning(tmp_path: Path, text: str, expected: str) -> None:
    for place, name in (("one", "abcdef"), ("one", "abx"), ("one", "abxy"), ("one", "twice"), ("two", "twice")):
        write_state(tmp_path / place, name, runc_state())
    places = Places((f"{tmp_path}/*",))
    if expected.startswith("OCIGPU"):
        with pytest.raises(OcigpuError) as caught:
            find_container(places, text)
        assert caught.value.code == expected
        assert len(caught.value.render("x").splitlines()) == 2
        assert "\x1b" not in caught.value.message
    else:
        assert find_container(places, text).id == expected


@pytest.mark.parametrize("make_state", [runc_state, crun_state], ids=["runc", "crun"])
def test_a_process_counts_only_with_the_start_time_of_the_state(tmp_path: Path, make_state: Callable[..., str]) -> None:
    file = "state.json" if make_state is runc_state else "status"
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        started = start_time(sleeper.pid)
        write_state(tmp_path, "same", make_state(sleeper.pid, started), file)
        write_state(tmp_path, "reused", make_state(sleeper.pid, started - 1), file)
        found = {one.id: one for one in find_containers(Places((str(tmp_path),)))[0]}
        assert (found["same"].status, found["same"].pid) == ("running", sleeper.pid)
        assert (found["reused"].status, found["reused"].pid) == ("stopped", 0)
        with pytest.raises(OcigpuError, match="has ended"):
            open_process(found["same"]._replace(start_time=started - 1))
    finally:
        sleeper.kill()
        sleeper.wait()
    assert [one.status for one in find_containers(Places((str(tmp_path),)))[0]] == ["stopped", "stopped"]


BAD_STATES = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"id": "\xff"}',
    "a list": b"[]",
    "two of a key": b'{"init_process_pid": 1, "init_process_pid": 2}',
    "deep": b"[" * 100_000,
    "too large": b'{"id": "' + b"x" * MAX_STATE_BYTES + b'"}',
    "pid as text": runc_state("1"),
    "pid as fraction": runc_state(1.5),
    "pid as truth": runc_state(True),
    "negative pid": runc_state(-1),
    "endless pid": runc_state(10**30),
    "start as text": runc_state(1, "1"),
    "no bundle": runc_state(bundle=""),
    "relative bundle": runc_state(bundle="a/b"),
    "bundle with NUL": runc_state(bundle="/a\0b"),
    "half a surrogate pair": runc_state(bundle="/a\ud800"),
    "config as list": runc_state(config=[]),
    "labels as object": runc_state(config={"rootfs": "/r", "labels": {}}),
    "labels of numbers": runc_state(config={"rootfs": "/r", "labels": [1]}),
    "no rootfs": runc_state(config={"labels": ["bundle=/b"]}),
}


@pytest.mark.parametrize("content", BAD_STATES.values(), ids=BAD_STATES.keys())
def test_a_state_that_makes_no_sense_is_a_note_and_hides_no_other(tmp_path: Path, content: bytes | str) -> None:
    write_state(tmp_path, "good", runc_state())
    write_state(tmp_path, "bad", content)
    found, notes = find_containers(Places((str(tmp_path),)))
    assert [one.id for one in found] == ["good"]
    assert len(notes) == 1
    assert f"{tmp_path}/bad/state.json" in notes[0]
    with pytest.raises(OcigpuError, match="1 not readable"):
        find_container(Places((str(tmp_path),)), "bad")


def _fifo(state: Path) -> None:
    state.unlink()
    os.mkfifo(state)


def _link(state: Path) -> None:
    target = state.with_name("target")
    state.rename(target)
    state.symlink_to(target)


def _device(state: Path) -> None:
    state.unlink()
    os.mknod(state, 0o600 | 0o020000, os.makedev(1, 5))


def _directory(state: Path) -> None:
    state.unlink()
    state.mkdir()


@pytest.mark.root
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_fifo, id="a FIFO"),
        pytest.param(_link, id="a link"),
        pytest.param(_device, id="a device"),
        pytest.param(_directory, id="a directory"),
        pytest.param(lambda state: state.chmod(0o666), id="writable by others"),
        pytest.param(lambda state: state.chmod(0o660), id="writable by a group"),
        pytest.param(lambda state: state.parent.chmod(0o777), id="in a directory that others write"),
        pytest.param(lambda state: os.chown(state, OTHER, 0), id="of another user"),
        pytest.param(lambda state: os.chown(state.parent, OTHER, 0), id="in another user's directory"),
    ],
)
def test_a_state_that_others_could_have_written_is_noted_and_not_read(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    change(write_state(tmp_path, "foreign", runc_state()))
    found, notes = find_containers(Places((str(tmp_path),)))
    assert found == []
    assert len(notes) == 1
    assert str(tmp_path) in notes[0]


@pytest.mark.root
def test_states_of_another_user_are_one_note(tmp_path: Path) -> None:
    for number in range(5):
        os.chown(write_state(tmp_path, f"c{number}", runc_state()), OTHER, OTHER)
    assert find_containers(Places((str(tmp_path),)))[1] == [
        f"{tmp_path}: states of user {OTHER} are not trusted: inspect them as that user"
    ]


@pytest.mark.root
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda above: os.chown(above, OTHER, OTHER), id="of another user"),
        pytest.param(lambda above: above.chmod(0o777), id="writable by others"),
    ],
)
@pytest.mark.parametrize("above", ["home", "home/a", "home/a/states"])
def test_states_of_root_below_a_directory_of_others_are_one_note(
    tmp_path: Path, above: str, change: Callable[[Path], object]
) -> None:
    state = tmp_path / "home/a/states"
    for number in range(3):
        write_state(state, f"c{number}", runc_state())
    assert len(find_containers(Places((str(state),)))[0]) == 3
    change(tmp_path / above)
    found, notes = find_containers(Places((str(state),)))
    assert (found, len(notes)) == ([], 1)
    assert notes[0].startswith(f"{state}: its states are not trusted: directory {tmp_path / above}: ")


def test_what_is_no_container_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    write_state(tmp_path / "elsewhere", "x", runc_state())
    assert find_containers(Places((str(tmp_path), str(tmp_path / "nowhere"), f"{tmp_path}/none/*"))) == ([], [])


def test_a_place_with_too_many_entries_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_CONTAINERS >= 1000
    monkeypatch.setattr("ocigpu.containers.find.MAX_CONTAINERS", 3)
    for number in range(5):
        write_state(tmp_path, f"c{number}", runc_state())
    found, notes = find_containers(Places((str(tmp_path),)))
    assert [one.id for one in found] == ["c0", "c1", "c2"]
    assert len(notes) == 1


ANNOTATED = {
    "by hand": ({}, "", "x"),
    "nerdctl": ({"nerdctl/name": "web"}, "", "web"),
    "CRI": (
        {
            "io.kubernetes.cri.sandbox-namespace": "default",
            "io.kubernetes.cri.sandbox-name": "pod",
            "io.kubernetes.cri.container-name": "main",
        },
        "",
        "default/pod/main",
    ),
    "CRI-O": (
        {
            "io.container.manager": "cri-o",
            "io.kubernetes.pod.namespace": "default",
            "io.kubernetes.pod.name": "pod",
            "io.kubernetes.container.name": "main",
        },
        "cri-o",
        "default/pod/main",
    ),
    "CRI-O, and what the author of the pod has written": (
        {
            "io.container.manager": "cri-o",
            "io.kubernetes.pod.namespace": "default",
            "io.kubernetes.pod.name": "pod",
            "io.kubernetes.container.name": "main",
            "io.kubernetes.cri.sandbox-namespace": "kube-system",
            "io.kubernetes.cri.sandbox-name": "other",
            "io.podman.annotations.autoremove": "x",
            "nerdctl/name": "web",
        },
        "cri-o",
        "default/pod/main",
    ),
    "Podman that keeps no name": ({"io.container.manager": "libpod"}, "podman", "x"),
}


@pytest.mark.parametrize(("annotations", "engine", "name"), ANNOTATED.values(), ids=ANNOTATED.keys())
def test_engine_and_name_are_told_by_what_the_runtime_keeps(
    tmp_path: Path, annotations: dict[str, Any], engine: str, name: str
) -> None:
    write_state(tmp_path / "runc", "x", runc_state(annotations=annotations))
    write_state(tmp_path / "crun", "x", crun_state(), "status")
    config = {"annotations": annotations, "root": {"path": "rootfs"}}
    (tmp_path / "crun/x/config.json").write_text(json.dumps(config))
    for runtime in ("runc", "crun"):
        (found,) = find_containers(Places((str(tmp_path / runtime),)))[0]
        assert (found.engine, found.name) == (engine, name)


def test_an_id_is_its_containers_whatever_others_are_called(tmp_path: Path) -> None:
    write_state(tmp_path, "abc", runc_state())
    write_state(tmp_path, "other", runc_state(annotations={"nerdctl/name": "abc"}))
    places = Places((str(tmp_path),))
    assert sorted(one.name for one in find_containers(places)[0]) == ["abc", "abc"]
    assert find_container(places, "abc").id == "abc"


def test_annotations_of_other_types_tell_no_name(tmp_path: Path) -> None:
    write_state(tmp_path, "x", crun_state(), "status")
    config = {"annotations": {"nerdctl/name": ["web"], "io.container.manager": 1}, "root": {"path": "rootfs"}}
    (tmp_path / "x/config.json").write_text(json.dumps(config))
    (found,) = find_containers(Places((str(tmp_path),)))[0]
    assert (found.engine, found.name) == ("", "x")


@pytest.mark.parametrize(
    ("bundle", "engine"),
    [
        ("/run/containerd/io.containerd.runtime.v2.task/moby/x", "docker"),
        ("/run/docker/containerd/daemon/io.containerd.runtime.v2.task/moby/x", "docker"),
        ("/run/containerd/io.containerd.runtime.v2.task/k8s.io/x", "containerd"),
        ("/run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/x", "containerd"),
        ("/var/lib/containers/storage/overlay-containers/x/userdata", "podman"),
        ("/home/a/bundle", ""),
    ],
)
def test_a_bundle_that_is_gone_tells_the_engine_by_its_place(tmp_path: Path, bundle: str, engine: str) -> None:
    write_state(tmp_path, "x", runc_state(bundle=bundle))
    assert [one.engine for one in find_containers(Places((str(tmp_path),)))[0]] == [engine]


def test_the_list_of_podmans_storage_names_its_containers(tmp_path: Path) -> None:
    storage = tmp_path / "overlay-containers"
    (storage / "x" / "userdata").mkdir(parents=True)
    listed = [{"id": "y", "names": ["other"]}, {"id": "x", "names": ["web"]}, 1, {"id": "x"}]
    (storage / "containers.json").write_text(json.dumps(listed))
    write_state(tmp_path / "states", "x", crun_state(bundle=str(storage / "x" / "userdata")), "status")
    assert names_of(Places((str(tmp_path / "states"),))) == ["web"]


def test_given_directories_come_instead_of_the_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/77")
    assert default_places(("/a", "/b/../c")) == Places(("/a", "/c"))
    roots = default_places().roots
    assert {"/run/runc", "/run/crun", "/run/docker/runtime-*/*", "/run/containerd/runc/*"} <= set(roots)
    tops = ["/run/user/0"] if os.geteuid() == 0 else ["/run/user/77"]
    assert {f"{top}/{name}" for top in tops for name in ("runc", "crun")} <= set(roots)


@pytest.mark.root
@pytest.mark.engine
def test_an_ordinary_user_finds_the_own_containers_only(tmp_path: Path) -> None:
    requirements.require(requirements.programs("setpriv"))
    machine.let_others_in(tmp_path)
    write_state(tmp_path / "roots", container_id(), runc_state())
    mine = write_state(tmp_path / "mine", "mine", runc_state())
    for path in (mine, mine.parent):
        os.chown(path, OTHER, OTHER)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setresgid(OTHER, OTHER, OTHER)
        os.setresuid(OTHER, OTHER, OTHER)
        found, notes = find_containers(Places((f"{tmp_path}/*",)))
        os.write(write, json.dumps([[one.id for one in found], notes]).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read) as file:
        ids, notes = json.load(file)
    assert ids == ["mine"]
    assert len(notes) == 1
    assert "Permission denied" in notes[0]
