"""``ocigpu verify`` tells what a container reaches, whatever the container does about it."""

import ctypes
import os
from typing import Any

import pytest
from containers_lab import GPU_3, WAITING, Made, cgroup_directory, container, settings_with, with_users
from live_lab import HOST_LIBRARY, mounts, node_row, ocigpu, shell, verified, verify
from support.bundle import give_to
from support.fixtures import MakeBundle
from support.process import run, wait_for
from support.product import PROGRAMS, SimulatedHost

from ocigpu.containers.inside import Answer, is_reached
from ocigpu.containers.verify import AS_GRANTED, LESS, MORE, judge_node
from ocigpu.core.errors import OcigpuError, SpecError
from ocigpu.core.facts import DeviceNode
from ocigpu.system import libc

pytestmark = [pytest.mark.root, pytest.mark.engine]

GRANTED = ("/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


@pytest.mark.parametrize(
    ("mode", "low_level", "cgroup"),
    [
        ("hook", "runc", "v1"),
        ("spec", "runc", "v2"),
        ("cdi", "crun", "v2"),
        ("spec", "crun", "v1"),
    ],
)
def test_everything_is_as_granted_right_after_the_start(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    specifications: str,
    mode: str,
    low_level: str,
    cgroup: str,
) -> None:
    bundle = make_bundle(WAITING, GPU_3)
    settings = settings_with(simulated_host, low_level, bundle.with_name("mode.toml"), mode, specifications)
    with container(bundle, runtime_environment, low_level, cgroup, simulated_host, settings) as made:
        before = mounts(made)
        data = verify(made)
        assert data["verdict"] == "as granted"
        assert data["devices"] == [simulated_host.gpus[3]]
        granted = {path for path, row in data["nodes"].items() if row["granted"] == "node"}
        if mode == "cdi":  # specifications bring all control nodes and the GPU's DRM nodes
            assert granted == {*GRANTED, "/dev/nvidia-modeset", "/dev/dri/card3", "/dev/dri/renderD131"}
        else:
            assert granted == set(GRANTED)
        for path, row in data["nodes"].items():
            answers = ("ENXIO", "ENXIO") if path in granted else ("ENOENT", "EPERM")
            assert (row["opened"], row["made"]) == answers, row
        assert data["libraries"][HOST_LIBRARY]["inside"] == "the host's file"
        assert data["libraries"][HOST_LIBRARY]["granted"] is True
        assert mounts(made) == before


def test_what_is_reached_without_being_granted_is_more(gpu_3: Made) -> None:
    (cgroup_directory(gpu_3, "v1") / "devices.allow").write_text("c 195:4 rw")
    row = node_row(gpu_3, "/dev/nvidia4")
    assert (row.verdict, row.opened, row.made) == (MORE, "ENOENT", "ENXIO")
    text = ocigpu(gpu_3, "verify", gpu_3.name, status=4).stdout
    assert "not as granted: GPU 4 (195:4): not granted, and reached by making a node of its number" in text
    assert text.endswith("verdict: more\n")


def test_what_is_granted_and_denied_is_less(gpu_3: Made) -> None:
    (cgroup_directory(gpu_3, "v1") / "devices.deny").write_text("c 195:3 rw")
    row = verify(gpu_3, status=3)["nodes"]["/dev/nvidia3"]
    assert (row["verdict"], row["opened"], row["why"]) == (LESS, "EPERM", "granted, but its device cgroup denies it")


@pytest.mark.rest
@pytest.mark.parametrize(
    ("command", "found", "why"),
    [
        pytest.param("rm /dev/nvidia3", "", "there is no /dev/nvidia3", id="nothing"),
        pytest.param("rm /dev/nvidia3; mkfifo /dev/nvidia3", "fifo", "another file (fifo)", id="a fifo"),
        pytest.param("rm /dev/nvidia3; mkdir /dev/nvidia3", "directory", "(directory)", id="a directory"),
        pytest.param("ln -sf /dev/zero /dev/nvidia3", "c 1:5", "another file (c 1:5)", id="a link to another device"),
        pytest.param("ln -sf nvidia3 /dev/nvidia3", "", "there is no", id="a link to itself"),
        pytest.param("ln -sf /proc/1/root/../dev/nope /dev/nvidia3", "", "there is no", id="a link out"),
        pytest.param("mv /dev/nvidia3 /dev/nvidia9; ln -s /dev/nvidia9 /dev/nvidia3", "c 195:3", "", id="a link to it"),
    ],
)
def test_a_container_that_puts_something_in_the_place_of_its_node(
    gpu_3: Made, command: str, found: str, why: str
) -> None:
    shell(gpu_3, command)
    before = mounts(gpu_3)
    row = node_row(gpu_3, "/dev/nvidia3")
    assert (row.inside, row.made) == (found, "ENXIO")
    assert why in row.why
    assert row.verdict == (LESS if why else AS_GRANTED)
    assert mounts(gpu_3) == before


def test_a_directory_of_very_many_names_is_not_read(gpu_3: Made) -> None:
    shell(gpu_3, "cd /dev && seq 1 20000 | xargs touch")
    assert verified(gpu_3).verdict == AS_GRANTED


def test_a_library_that_was_covered_is_another_file(gpu_3: Made) -> None:
    run(["nsenter", "--target", str(gpu_3.found().pid), "--mount", "umount", HOST_LIBRARY])
    row = next(row for row in verified(gpu_3).libraries if row.path == HOST_LIBRARY)
    assert (row.verdict, row.inside) == (LESS, "another file")


def test_a_variable_alone_grants_nothing(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    """Images of CUDA ask for all GPUs; where no hook has answered, none of them was granted."""
    with container(make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "all"}), runtime_environment) as plain:
        made = plain._replace(environment=simulated_host.environment(plain.environment))
        found = verified(made)
        assert (found.grant.devices, found.grant.by, found.verdict) == ((), "nothing", LESS)
        assert (found.unanswered, found.refused) == ("NVIDIA_VISIBLE_DEVICES=all", "")
        assert {row.verdict for row in found.nodes} == {AS_GRANTED}
        assert {row.made for row in found.nodes} == {"EPERM"}


def test_rules_that_allow_everything_grant_everything(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    def privileged(config: dict[str, Any]) -> None:
        config["linux"]["resources"]["devices"] = [{"allow": True, "access": "rwm"}]

    with container(make_bundle(WAITING, GPU_3, edit=privileged), runtime_environment, host=simulated_host) as made:
        found = verified(made)
        assert ({row.granted for row in found.nodes}, found.verdict) == ({"node", "rules"}, AS_GRANTED)
        assert {row.made for row in found.nodes} == {"ENXIO"}


def test_in_a_user_namespace_nobody_can_make_nodes(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    bundle = make_bundle(WAITING, GPU_3, edit=with_users)
    give_to(bundle / "rootfs", 100000, 100000)
    with container(bundle, runtime_environment, host=simulated_host) as made:
        found = verified(made)
        assert {row.path for row in found.nodes if row.opened == "ENXIO"} == set(GRANTED)
        assert ({row.made for row in found.nodes}, found.verdict) == ({"mknod EPERM"}, AS_GRANTED)


def test_nobody_in_a_user_namespace_can_trace_the_process_that_enters_it(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With CAP_SYS_PTRACE and the host's process numbers it could, while that still has the host's ids and files."""

    setns = libc.setns
    get_dumpable = 3  # include/uapi/linux/prctl.h
    library = ctypes.CDLL(None)

    def look_first(fd: int, kind: int) -> None:
        if kind == libc.CLONE_NEWUSER and library.prctl(get_dumpable, 0, 0, 0, 0) == 1:
            raise OSError(0, "it can be traced")
        setns(fd, kind)

    bundle = make_bundle(WAITING, GPU_3, edit=with_users)
    give_to(bundle / "rootfs", 100000, 100000)
    with container(bundle, runtime_environment, host=simulated_host) as made:
        monkeypatch.setattr(libc, "setns", look_first)
        assert verified(made).verdict == AS_GRANTED


def test_a_paused_container_and_one_that_has_ended_are_told(gpu_3: Made) -> None:
    gpu_3.do("pause", gpu_3.name)
    try:
        with pytest.raises(OcigpuError, match="it is paused"):
            verified(gpu_3)
    finally:
        gpu_3.do("resume", gpu_3.name)
    os.kill(gpu_3.found().pid, 9)
    wait_for("the container to end", lambda: gpu_3.found().pid == 0)
    assert "OCIGPU-CTR-3" in ocigpu(gpu_3, "verify", gpu_3.name, status=1).stderr


def test_a_configuration_that_others_may_have_changed_grants_nothing(gpu_3: Made) -> None:
    path = gpu_3.bundle / "config.json"
    path.chmod(0o666)
    with pytest.raises(SpecError, match="users other than root may write it"):
        verified(gpu_3)
    path.chmod(0o644)
    os.chown(path, 4321, 4321)
    with pytest.raises(SpecError, match="users other than root may write it"):
        verified(gpu_3)


def test_the_table_names_every_gpu_and_says_that_the_host_is_simulated(gpu_3: Made) -> None:
    text = ocigpu(gpu_3, "verify", gpu_3.name).stdout
    assert "SIMULATED host" in text
    assert all(f"GPU {number} " in text for number in range(8))
    assert "11 of 11 granted libraries are the host's files, of driver 550.163.01" in text


def test_entering_needs_root_with_its_rights(gpu_3: Made) -> None:
    command = [*gpu_3.command[:-3], "setpriv", "--bounding-set=-sys_admin", PROGRAMS / "ocigpu", "verify", gpu_3.name]
    result = run([*command, "--root", gpu_3.state], env=gpu_3.environment, check=False)
    assert result.returncode == 1
    assert "OCIGPU-CTR-6" in result.stderr
    assert "CAP_SYS_ADMIN" in result.stderr


NODE = DeviceNode("/dev/nvidia3", "/dev/nvidia3", 195, 3)


@pytest.mark.parametrize(
    ("has_node", "allowed", "answer", "verdict"),
    [
        pytest.param(True, True, Answer("c 195:3", "ok", "ok"), AS_GRANTED, id="granted and opened"),
        pytest.param(True, True, Answer("c 195:3", "EIO", "EIO"), AS_GRANTED, id="the driver has an error"),
        pytest.param(True, True, Answer("c 195:3", "EACCES", "ok"), LESS, id="its mode forbids it"),
        pytest.param(True, True, Answer("", "ENOENT", "ok"), LESS, id="no node"),
        pytest.param(False, True, Answer("", "ENOENT", "ok"), AS_GRANTED, id="rules only"),
        pytest.param(False, False, Answer("", "ENOENT", "mknod EPERM"), AS_GRANTED, id="nothing"),
        pytest.param(False, False, Answer("c 195:3", "EPERM", "EPERM"), AS_GRANTED, id="a node of no use"),
        pytest.param(False, False, Answer("c 195:3", "EBUSY", "EPERM"), MORE, id="the driver answers"),
        pytest.param(False, False, Answer("fifo", "", "ENXIO"), MORE, id="a node can be made"),
    ],
)
def test_verdicts(has_node: bool, allowed: bool, answer: Answer, verdict: str) -> None:
    assert judge_node("GPU 3", NODE, has_node, allowed, answer).verdict == verdict


def test_only_a_device_answers() -> None:
    assert [is_reached(answer) for answer in ("ok", "ENXIO", "EIO", "EPERM", "ENOENT", "", "mknod EPERM")] == [
        True, True, True, False, False, False, False,
    ]  # fmt: skip
