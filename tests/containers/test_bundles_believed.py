"""Which config.json is believed of a running container: the one that it was started with, and nothing of an image's.

Images and pods write annotations, and a layer of an image has a path that is known beforehand.
"""

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from containers_lab import VIEWS, WAITING, Made, container
from live_lab import execute, ocigpu, verify
from support import machine
from support.bundle import base_config
from support.fixtures import MakeBundle
from support.podman import make_podman
from support.process import run, stop, wait_for
from support.product import PROGRAMS, SimulatedHost
from support.runtimes import answers, container_id, probe

from ocigpu.bundle.document import read_config
from ocigpu.containers.believed import read_config_of, read_trusted, why_of_containers
from ocigpu.containers.find import find_containers
from ocigpu.core.errors import SpecError

OTHER = 4321
OUTSIDE = [["mknod", "/tmp/outside", "60", "7"], ["open", "/tmp/outside"]]
"""Opens a device number that is for local use (Documentation/admin-guide/devices.txt): ENXIO where that is allowed."""
ALL = {"NVIDIA_VISIBLE_DEVICES": "all"}


def greedy(config: dict[str, Any], host: SimulatedHost) -> dict[str, Any]:
    """Return a configuration that grants everything there is."""
    wanted: dict[str, Any] = json.loads(json.dumps(config))
    wanted["process"]["env"] += [f"{name}={value}" for name, value in ALL.items()]
    wanted["process"]["capabilities"]["bounding"].append("CAP_SYS_ADMIN")
    wanted["linux"]["resources"]["devices"] = [{"allow": True, "access": "rwm"}]
    numbers = [host.number(f"nvidia{index}") for index in range(8)]
    wanted["linux"]["devices"] = [
        {"path": f"/dev/nvidia{index}", "type": "c", "major": int(major), "minor": int(minor)}
        for index, (major, minor) in enumerate(numbers)
    ]
    wanted["hooks"] = {"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["x", "prestart"]}]}
    return wanted


def reaches_nothing(made: Made, host: SimulatedHost, status: int = 0) -> None:
    """Nothing of the host is granted, given or reached, whatever is asked of a container.

    ``status``: of "verify", 3 where the configuration asks for GPUs in vain.
    """
    assert verify(made, status)["devices"] == []
    assert "it was granted nothing" in ocigpu(made, "repair", made.name).stdout
    ocigpu(made, "attach", made.name, "--gpu", "5")
    ocigpu(made, "detach", made.name, "--gpu", "5")
    assert {row["made"] for row in verify(made, status)["nodes"].values() if row["granted"] == "no"} == {"EPERM"}
    assert answers(execute(made, *probe(*OUTSIDE)))["open", "/tmp/outside"] == "EPERM"


def named(evil: str) -> dict[str, dict[str, str]]:
    return {
        "bundle": {"bundle": evil},
        "with more": {"bundle": evil, "a=b": "c", "zz": "", "bundle=/x": "y"},
        "of lines": {f"x\nbundle={evil}": "", "bundle": f"{evil}\nbundle={evil}"},
        "whole": {f"bundle={evil}": "", "": f"bundle={evil}"},
    }


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize("annotated", list(named("")))
def test_an_annotation_names_no_bundle(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost, annotated: str
) -> None:
    bundle = make_bundle(WAITING)
    evil = bundle / "rootfs/opt/evil"

    config = json.loads((bundle / "config.json").read_text())
    config["annotations"] = named(str(evil))[annotated]
    (bundle / "config.json").write_text(json.dumps(config))
    evil.mkdir(parents=True)
    (evil / "config.json").write_text(json.dumps(greedy(config, simulated_host)))
    with container(bundle, runtime_environment, cgroup="v1", host=simulated_host) as made:
        assert made.found().bundle == str(bundle)
        data = verify(made)
        assert (data["devices"], data["granted_by"]) == ([], "nothing")
        assert "it was granted nothing" in ocigpu(made, "repair", made.name).stdout


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize(("low_level", "cgroup"), VIEWS)
def test_whatever_a_configuration_says_only_devices_of_the_driver_that_were_given_are_allowed(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    low_level: str,
    cgroup: str,
) -> None:
    """As if somebody had found a way to name a bundle, or to write to it."""
    bundle = make_bundle(WAITING)
    with container(bundle, runtime_environment, low_level, cgroup, simulated_host) as made:
        files = [bundle / "config.json", made.state / made.name / "config.json"]
        for file in files[: 2 if low_level == "crun" else 1]:
            greedy_config = greedy(json.loads(file.read_text()), simulated_host)
            if low_level == "crun":  # its copy is what there is of the rules
                greedy_config["linux"]["resources"] = json.loads(file.read_text())["linux"]["resources"]
            file.write_text(json.dumps(greedy_config))
        reaches_nothing(made, simulated_host, status=3)


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize("change", ["annotations", "root"])
def test_a_configuration_that_the_container_was_not_started_with_is_not_believed(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost, change: str
) -> None:
    bundle = make_bundle(WAITING)
    with container(bundle, runtime_environment, host=simulated_host) as made:
        file = bundle / "config.json"
        config = json.loads(file.read_text())
        config[change] = {"path": "/elsewhere"} if change == "root" else {"new": "1"}
        file.write_text(json.dumps(config))
        for words in (["verify", made.name], ["repair", made.name], ["attach", made.name, "--gpu", "1"]):
            text = ocigpu(made, *words, status=1).stderr
            assert "OCIGPU-SPEC-1" in text
            assert "the container was started with" in text
        assert "the container was started with" in ocigpu(made, "ps", "--all").stdout


def test_where_layers_of_images_and_volumes_lie_no_file_is_believed(tmp_path: Path) -> None:
    for names in ("overlay overlay-layers overlay-containers", "docker/overlay2 docker/image docker/containers", "lv"):
        for name in names.split():
            (tmp_path / name).mkdir(parents=True)
    lies = {
        "overlay/abc/diff/opt": True,
        "overlay-containers/abc/userdata": False,
        "docker/overlay2/abc/merged": True,
        "docker/containers/abc": False,
        "overlay2/abc": False,
        "io.containerd.snapshotter.v1.overlayfs/snapshots/3/fs": True,
        "io.containerd.content.v1.content/blobs": True,
        "io.containerd.runtime.v2.task/k8s.io/abc": False,
        "volumes/web/_data/x": True,
        "volumes/web/x": False,
        "kubelet/pods/abc/volumes/kubernetes.io~empty-dir/x": True,
        "kubelet/pods/abc/volume-subpaths/x": True,
        "kubelet/pods/abc": False,
    }
    for place, expected in lies.items():
        assert bool(why_of_containers(f"{tmp_path}/{place}/config.json")) == expected, place


def _make(directory: Path, content: str = "{}") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "config.json"
    file.write_text(content)
    file.chmod(0o644)
    return file


def _link_of_root(file: Path) -> Path:
    file.parent.with_name("linked").symlink_to(file.parent)
    return file.parent.with_name("linked") / file.name


def _link_of_another(file: Path) -> Path:
    link = _link_of_root(file)
    os.lchown(link.parent, OTHER, OTHER)
    return link


def _last_link(file: Path) -> Path:
    file.rename(file.with_name("real"))
    file.symlink_to("real")
    return file


def _instead(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    def change(file: Path) -> Path:
        file.unlink()
        make(file)
        return file

    return change


def _with_mode(mode: int, above: bool = False) -> Callable[[Path], Path]:
    def change(file: Path) -> Path:
        (file.parent if above else file).chmod(mode)
        return file

    return change


def _of_another(above: int) -> Callable[[Path], Path]:
    def change(file: Path) -> Path:
        os.chown([file, *file.parents][above], OTHER, OTHER)
        return file

    return change


BELIEVED = {
    "a file of root": lambda file: file,
    "by a link of root": _link_of_root,
    "in a sticky directory": _with_mode(0o1777, above=True),
}
NOT_BELIEVED = {
    "by a link of another user": _link_of_another,
    "a link": _last_link,
    "a FIFO": _instead(os.mkfifo),
    "a device": _instead(lambda file: os.mknod(file, 0o600 | stat.S_IFCHR, os.makedev(1, 5))),
    "a directory": _instead(os.mkdir),
    "a socket": _instead(lambda file: os.mknod(file, 0o600 | stat.S_IFSOCK)),
    "writable by a group": _with_mode(0o664),
    "writable by others": _with_mode(0o646),
    "in a directory of a group": _with_mode(0o775, above=True),
    "in a directory of everybody": _with_mode(0o777, above=True),
    "of another user": _of_another(0),
    "in another user's directory": _of_another(1),
    "below another user's directory": _of_another(2),
    "in a loop of links": _instead(lambda file: file.symlink_to(file.name)),
    "in an endless path": lambda file: file.parent / ("x/../" * 1500) / file.name,
    "a path with NUL": lambda file: Path(f"{file}\0"),
}


@pytest.mark.root
@pytest.mark.parametrize("case", [*BELIEVED, *NOT_BELIEVED])
def test_a_file_is_read_only_where_nobody_else_writes_and_nothing_else_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    path = {**BELIEVED, **NOT_BELIEVED}[case](_make(tmp_path / "a/b"))
    opened: list[int] = []
    real = os.open

    def noted(name: Any, flags: int, *arguments: Any, **more: Any) -> int:
        opened.append(flags)
        return real(name, flags, *arguments, **more)

    monkeypatch.setattr(os, "open", noted)
    if case in BELIEVED:
        assert read_trusted(str(path), 100).text == b"{}"
    else:
        with pytest.raises(SpecError) as caught:
            read_trusted(str(path), 100)
        assert caught.value.code == "OCIGPU-SPEC-1"
    assert all(flags & os.O_PATH for flags in opened)


def test_too_much_and_what_lies_below_a_root_directory_is_not_read(tmp_path: Path) -> None:
    file = _make(tmp_path / "a/b")
    for limit, below in ((1, ""), (100, f"{tmp_path}/a"), (100, f"{tmp_path}/a/b/")):
        with pytest.raises(SpecError):
            read_trusted(str(file), limit, below)
    assert read_trusted(str(file), 2, f"{tmp_path}/a/bc").text == b"{}"


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
def test_a_bundle_that_others_could_exchange_is_noted_and_not_read(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "3"})
    with container(bundle, runtime_environment, host=simulated_host) as made:
        os.chown(bundle, OTHER, OTHER)
        found, _ = find_containers(made.places)
        assert [one.name for one in found] == [made.name]
        with pytest.raises(SpecError, match=f"directory {bundle}: owner {OTHER}"):
            read_config_of(found[0])
        for words in (["verify"], ["explain"], ["diff"]):
            assert f"directory {bundle}: owner {OTHER}" in ocigpu(made, *words, made.name, status=1).stderr
        assert "what it got, and why" in ocigpu(made, "explain", str(bundle)).stdout  # named by who asks
        os.chown(bundle, 0, 0)
        assert read_config_of(found[0]) == read_config(str(bundle))


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize("low_level", ["runc", "crun"])
def test_an_annotation_of_podmans_names_no_bundle(
    session_directory: Path,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    rootfs: Callable[[str], Path],
    work_directory: Path,
    low_level: str,
) -> None:
    """Podman passes annotations on, before 4.5.1 those of an image's manifest, too."""
    podman = make_podman(session_directory / f"believed-{low_level}", runtime_environment.get("LD_PRELOAD", ""))
    name = container_id()
    root = shutil.copytree(rootfs("glibc"), work_directory / "rootfs", symlinks=True)
    evil = root / "opt/evil"
    evil.mkdir(parents=True)
    (evil / "config.json").write_text(json.dumps(greedy(base_config(WAITING, {}), simulated_host)))
    output = work_directory / "output"
    started = podman.start_rootfs(low_level, "/dev/null", root, name, WAITING, output, f"--annotation=bundle={evil}")

    def ocigpu(*arguments: str) -> str:
        command = ["nsenter", "--target", str(started.pid), "--mount", PROGRAMS / "ocigpu", *arguments]
        return run([*command, "--config", simulated_host.settings], check=False).stdout

    def is_running() -> bool:
        assert started.poll() is None, output.read_text()
        state = Path(f"/proc/{started.pid}/root/run/{low_level}")
        return state.is_dir() and '"running"' in ocigpu("ps", "--all", "--json")

    try:
        wait_for("the container", is_running, on_failure=output.read_text)
        (one,) = json.loads(ocigpu("ps", "--all", "--json"))["containers"]
        assert (one["name"], one["engine"], one["gpus"]) == (name, "podman", [])
        assert one["bundle"].endswith("/userdata")
        data = json.loads(ocigpu("verify", name, "--json"))
        assert (data["devices"], data["granted_by"]) == ([], "nothing")
        assert "it was granted nothing" in ocigpu("repair", name)
    finally:
        for pid in machine.processes_of(name):
            stop(pid, 2)
        started.wait(30)
        machine.remove_cgroups(name)
