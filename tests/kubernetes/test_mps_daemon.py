"""``ocigpu mps-control-daemon``: real processes and mounts, a double of the driver's control daemon."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes_lab import configured, shared
from mps_lab import make_mps_host
from support.process import is_alive, stop, wait_for
from support.product import PROGRAMS, SimulatedHost
from support.products import one_in

from ocigpu.core.errors import HostError, UsageError
from ocigpu.core.facts import HostFacts
from ocigpu.gpus.nvidia.nvml_process import DEFAULT, EXCLUSIVE_PROCESS, set_compute_mode
from ocigpu.kubernetes.mps.daemon import ControlDaemon, Job, Times, check_size, find_program, relabel
from ocigpu.kubernetes.mps.shares import waiting_resources, waits_for_mps
from ocigpu.kubernetes.mps.supervisor import MpsKeeper, MpsPlan, plan_daemons
from ocigpu.kubernetes.node.devices import Inventory, Resource
from ocigpu.kubernetes.node.reading import read_node
from ocigpu.system.settings_file import read_settings

pytestmark = pytest.mark.root
QUICK = Times(command=10, start=10, poll=0.02, quit=1)
CONFIGURATION = shared({"name": "gpu", "replicas": 4}, strategy="mps")


@pytest.fixture(scope="module")
def mps_host(session_directory: Path) -> SimulatedHost:
    return make_mps_host(session_directory / "mps-host")


@pytest.fixture
def beside(mps_host: SimulatedHost) -> Iterator[Path]:
    """The directory of the double, where its faults and its record are."""
    directory = mps_host.directory / "usr/bin"
    yield directory
    for name in ("mps-told", "mps-faults"):
        (directory / name).unlink(missing_ok=True)


@pytest.fixture
def job(mps_host: SimulatedHost, work_directory: Path) -> Job:
    configuration = configured({**CONFIGURATION, "flags": {"mpsRoot": str(work_directory)}})
    node = read_node(read_settings(str(mps_host.settings)), configuration)
    (found,) = plan_daemons(node, configuration, "64m").jobs.values()
    return found


def mode_of(host: SimulatedHost, gpu: int) -> str:
    path = host.directory / f"compute-mode.{gpu}"
    return path.read_text() if path.exists() else "0"


def told(beside: Path) -> list[str]:
    return (beside / "mps-told").read_text().splitlines() if (beside / "mps-told").exists() else []


def quiet(*_words: str, **_fields: Any) -> None:
    return


LIMITS = [
    "set_default_device_pinned_mem_limit 0 10240M",
    "set_default_device_pinned_mem_limit 1 10240M",
    "set_default_active_thread_percentage 25",
]


def test_a_daemon_has_its_limits_before_it_is_ready(mps_host: SimulatedHost, job: Job, beside: Path) -> None:
    lines: list[str] = []
    daemon = ControlDaemon(job, lambda _level, text, **_: lines.append(text), QUICK)
    daemon.start()
    try:
        (start, *commands) = told(beside)
        assert commands == LIMITS
        assert start.endswith(" True"), "its /dev/shm is that of its clients"
        assert Path(job.directories.ready).exists()
        assert [mode_of(mps_host, gpu) for gpu in (0, 1)] == ["3", "3"]
        assert os.path.ismount(job.directories.shm)
        assert os.statvfs(job.directories.shm).f_blocks * os.statvfs(job.directories.shm).f_frsize == 64 << 20
        assert os.stat(job.directories.shm).st_mode & 0o7777 == 0o1777
        assert daemon.is_running()
        assert lines == ["nvidia.com/gpu: [control] Starting control daemon"]
    finally:
        daemon.stop()
    assert told(beside)[-1] == "quit"
    assert not is_alive(int(start.split()[1]))
    assert [mode_of(mps_host, gpu) for gpu in (0, 1)] == ["0", "0"]
    base = Path(job.directories.pipe).parent
    assert [path.name for path in base.iterdir()] == ["shm"]
    assert not os.path.ismount(job.directories.shm)
    daemon.stop()


@pytest.mark.parametrize(
    ("fault", "message"),
    one_in(
        3,
        [
            ("dies", "MPS: nvidia-cuda-mps-control ended at once"),
            ("silent", "MPS: get_default_active_thread_percentage: Cannot find MPS control daemon process"),
            ("refuses-limits", f"MPS: {LIMITS[0]}: Invalid argument"),
        ],
    ),
)
def test_a_daemon_that_cannot_start_leaves_nothing(
    mps_host: SimulatedHost, job: Job, beside: Path, fault: str, message: str
) -> None:
    (beside / "mps-faults").write_text(fault)
    times = QUICK._replace(start=0.5) if fault == "silent" else QUICK  # the others say it as soon as they can
    with pytest.raises(HostError) as caught:
        ControlDaemon(job, quiet, times).start()
    assert (caught.value.code, caught.value.message) == ("OCIGPU-KUBE-6", message)
    assert mode_of(mps_host, 0) == "0"
    assert [path.name for path in Path(job.directories.pipe).parent.iterdir()] == ["shm"]
    assert not os.path.ismount(job.directories.shm)
    assert all(not is_alive(int(line.split()[1])) for line in told(beside) if line.startswith("start"))


@pytest.mark.rest
def test_a_gpu_that_returns_is_added_without_a_restart(mps_host: SimulatedHost, job: Job, beside: Path) -> None:
    one = job._replace(gpus=job.gpus[:1], commands=(job.commands[0], job.commands[-1]))
    daemon = ControlDaemon(one, quiet, QUICK)
    daemon.start()
    try:
        assert mode_of(mps_host, 1) == "0"
        assert daemon.extend(job) == job.gpus[1:]
        assert daemon.extend(job) == ()
        assert told(beside)[1:] == [LIMITS[0], LIMITS[2], LIMITS[1]]
        assert mode_of(mps_host, 1) == "3"
    finally:
        daemon.stop()
    assert mode_of(mps_host, 1) == "0"


def test_a_daemon_that_does_not_quit_is_killed(job: Job, beside: Path) -> None:
    (beside / "mps-faults").write_text("deaf")
    lines: list[str] = []
    daemon = ControlDaemon(job, lambda _level, text, **_: lines.append(text), QUICK._replace(quit=0.2))
    daemon.start()
    daemon.stop()
    assert "nvidia.com/gpu: the control daemon does not quit: killed" in lines
    assert not is_alive(int(told(beside)[0].split()[1]))


def test_a_daemon_that_was_left_over_is_ended(job: Job, beside: Path) -> None:
    before = ControlDaemon(job, quiet, QUICK)
    before.start()
    lines: list[str] = []
    after = ControlDaemon(job, lambda _level, text, **_: lines.append(text), QUICK)
    after.start()
    try:
        assert lines[0] == "nvidia.com/gpu: ended a control daemon that was left over"
        assert not before.is_running()
        mounts = Path("/proc/self/mounts").read_text().split("\n")
        assert sum(f" {job.directories.shm} " in line for line in mounts) == 1, "used again, not mounted over"
    finally:
        assert before.child is not None
        before.child.wait()
        after.stop()


def test_without_the_program_nothing_is_touched(mps_host: SimulatedHost, job: Job) -> None:
    (mps_host.directory / "compute-mode.0").write_text("2")
    try:
        with pytest.raises(HostError, match="the host has no nvidia-cuda-mps-control"):
            ControlDaemon(job._replace(program=""), quiet, QUICK).start()
        assert mode_of(mps_host, 0) == "2"
    finally:
        (mps_host.directory / "compute-mode.0").unlink()


def test_compute_modes_are_set_by_the_driver_with_a_deadline(mps_host: SimulatedHost, job: Job) -> None:
    first, second = job.gpus
    assert set_compute_mode(job.facts, [second], EXCLUSIVE_PROCESS) == {}
    assert (mode_of(mps_host, 0), mode_of(mps_host, 1)) == ("0", "3")
    assert set_compute_mode(job.facts, [second], DEFAULT) == {}
    assert set_compute_mode(job.facts, ["GPU-none"], DEFAULT) == {"GPU-none": "Not Found"}
    assert set_compute_mode(HostFacts(), [first], DEFAULT) == {first: "the host has no NVML library"}
    faults = mps_host.directory / "faults"
    try:
        faults.write_text("hang\n")
        assert set_compute_mode(job.facts, [first], DEFAULT, 0.5) == {first: "NVML did not answer within 0.5 s"}
        faults.write_text("init 15\n")
        assert "GPU is lost" in set_compute_mode(job.facts, [first], DEFAULT)[first]
    finally:
        faults.unlink()


def test_a_simulated_host_uses_its_own_program(job: Job, mps_host: SimulatedHost) -> None:
    assert find_program(job.facts) == job.program == f"{mps_host.directory}/usr/bin/nvidia-cuda-mps-control"
    assert find_program(HostFacts()) == (shutil.which("nvidia-cuda-mps-control") or "")


def test_which_daemons_a_node_needs(mps_host: SimulatedHost) -> None:
    settings = read_settings(str(mps_host.settings))
    plain = configured()
    node = read_node(settings, plain)
    assert plan_daemons(node, plain, "1g") == MpsPlan()
    many = configured(shared({"name": "gpu", "replicas": 49}, strategy="mps"))
    plan = plan_daemons(read_node(settings, many), many, "1g")
    assert plan.jobs == {}
    assert plan.problems == ("nvidia.com/gpu: MPS: 49 replicas of GPU 0, which can have 48 clients",)
    two = configured(
        shared({"name": "gpu", "replicas": 2, "devices": [1], "rename": "half"}, strategy="mps"),
    )
    (job,) = plan_daemons(read_node(settings, two), two, "1g").jobs.values()
    assert (job.resource, job.gpus) == ("nvidia.com/half", (mps_host.gpus[1],))
    assert job.commands[0] == "set_default_device_pinned_mem_limit 1 20480M"
    assert job.directories.ready == "/run/nvidia/mps/nvidia.com/half/.ready"
    lost = node.inventory.resources[0].devices[0]._replace(error="lost", id=f"{mps_host.gpus[0]}::0", replicas=2)
    well = lost._replace(error="", uuid=mps_host.gpus[1], id=f"{mps_host.gpus[1]}::0", ordinal="1")
    resource = Resource("nvidia.com/gpu", (lost, well), sharing="mps")
    partly = plan_daemons(node._replace(inventory=Inventory((resource,))), many, "1g")
    assert (partly.jobs["nvidia.com/gpu"].gpus, partly.incomplete) == (mps_host.gpus[1:], True)
    gone = plan_daemons(node._replace(inventory=Inventory((resource._replace(devices=(lost,)),))), many, "1g")
    assert gone == MpsPlan(problems=("nvidia.com/gpu: lost",), incomplete=True)
    silent = plan_daemons(node._replace(source=""), many, "1g")
    assert (silent.jobs, silent.silent) == ({}, True)
    # NVML answered again when it was asked for memory, but the GPUs are those that the kernel's driver lists
    listed = node.facts._replace(source="procfs", notes=("NVML: no answer; GPUs come from procfs",))
    assert plan_daemons(node._replace(facts=listed), many, "1g") == MpsPlan(problems=listed.notes, silent=True)


def test_directories_are_labelled_for_containers_where_files_have_labels(work_directory: Path) -> None:
    relabel(str(work_directory))
    assert "security.selinux" not in os.listxattr(work_directory)
    os.setxattr(work_directory, "security.selinux", b"system_u:object_r:var_run_t:s0:c1,c2\0")
    relabel(str(work_directory))
    assert os.getxattr(work_directory, "security.selinux") == b"system_u:object_r:container_file_t:s0"


@pytest.mark.parametrize("text", ["1", "64m", "8G", "50%", "100%"])
def test_sizes(text: str) -> None:
    assert check_size(text) == text


@pytest.mark.parametrize("text", ["", "0", "8 g", "101%", "8g,mode=0", "-1", "0%"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError):
        check_size(text)


def test_a_daemon_is_tried_ever_more_rarely() -> None:
    keeper = MpsKeeper(None, 0.0)
    delays = []
    for _ in range(8):
        keeper.failed(100.0)
        delays.append(keeper.retry.due - 100)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]
    keeper.since = 100.0
    keeper.failed(161.0)
    assert keeper.retry.due == 162.0


# --- the command


@pytest.fixture
def run_command(
    mps_host: SimulatedHost, work_directory: Path, beside: Path
) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    children: list[subprocess.Popen[str]] = []

    def start(configuration: dict[str, Any]) -> "subprocess.Popen[str]":
        (work_directory / "config.yaml").write_text(json.dumps(configuration))
        command = [PROGRAMS / "ocigpu", "mps-control-daemon", "--config", mps_host.settings, "--json"]
        command += [f"--config-file={work_directory}/config.yaml", "--mps-root", work_directory, "--shm-size=16m"]
        with open(work_directory / "log", "a") as log:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)
        children.append(child)
        return child

    yield start
    for child in children:
        if child.poll() is None:
            stop(child.pid)
            child.wait()


def messages(directory: Path) -> list[str]:
    return [json.loads(line)["msg"] for line in (directory / "log").read_text().splitlines()]


def test_the_command_keeps_daemons_running_and_takes_them_back(
    mps_host: SimulatedHost, work_directory: Path, beside: Path, run_command: Callable[..., "subprocess.Popen[str]"]
) -> None:
    ready = work_directory / "nvidia.com/gpu/.ready"
    child = run_command(CONFIGURATION)
    wait_for("readiness", (work_directory / ".ready").exists, on_failure=(work_directory / "log").read_text)
    assert ready.exists()
    assert told(beside)[1:] == LIMITS
    # killed: not ready any more, and started again with its limits
    first = int(told(beside)[0].split()[1])
    shared_memory = work_directory / "nvidia.com/gpu/shm"
    places = [os.stat(shared_memory).st_dev, os.stat(work_directory / "nvidia.com/gpu/pipe").st_ino]
    os.kill(first, signal.SIGKILL)
    wait_for("another daemon", lambda: len(told(beside)) == 8 and ready.exists())
    assert told(beside)[5:] == LIMITS
    now = [os.stat(shared_memory).st_dev, os.stat(work_directory / "nvidia.com/gpu/pipe").st_ino]
    assert now == places, "pods that are there find the new daemon"
    assert "nvidia.com/gpu: the control daemon ended; it is started again" in messages(work_directory)
    # other limits: another daemon; the file is followed
    configuration = shared({"name": "gpu", "replicas": 2}, strategy="mps")
    (work_directory / "config.yaml").write_text(json.dumps(configuration))
    wait_for("other limits", lambda: told(beside)[-1] == "set_default_active_thread_percentage 50")
    # a file that is wrong changes nothing
    (work_directory / "config.yaml").write_text("sharing: 1\n")
    wait_for("a message", lambda: any("stays in force" in line for line in messages(work_directory)))
    assert ready.exists()
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0
    assert told(beside)[-1] == "quit"
    assert not ready.exists()
    assert not (work_directory / ".ready").exists()
    assert (mode_of(mps_host, 0), mode_of(mps_host, 1)) == ("0", "0")
    assert not os.path.ismount(work_directory / "nvidia.com/gpu/shm")


@pytest.mark.rest
def test_a_lost_gpu_does_not_keep_the_others_waiting(
    mps_host: SimulatedHost, work_directory: Path, beside: Path, run_command: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """It is lost together with the daemon."""
    faults = mps_host.directory / "faults"
    child = run_command(CONFIGURATION)
    ready = work_directory / "nvidia.com/gpu/.ready"
    wait_for("readiness", ready.exists, on_failure=(work_directory / "log").read_text)
    try:
        faults.write_text("lost 1\n")
        os.kill(int(told(beside)[0].split()[1]), signal.SIGKILL)
        wait_for(
            "a daemon without it",
            lambda: told(beside)[-2:] == [LIMITS[0], LIMITS[2]] and ready.exists(),
            on_failure=(work_directory / "log").read_text,
        )
    finally:
        faults.unlink()
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0


@pytest.mark.rest
def test_what_a_killed_command_left_is_removed_although_the_resource_is_not_shared_any_more(
    mps_host: SimulatedHost,
    job: Job,
    work_directory: Path,
    beside: Path,
    run_command: Callable[..., "subprocess.Popen[str]"],
) -> None:
    child = run_command(CONFIGURATION)
    ready, shared_memory = Path(job.directories.ready), job.directories.shm
    wait_for("readiness", ready.exists, on_failure=(work_directory / "log").read_text)
    other = work_directory / "nvidia.com/other"
    other.mkdir()
    child.kill()
    child.wait()
    assert ready.exists()
    assert os.path.ismount(shared_memory)
    sharing = {"name": "gpu", "replicas": 4, "rename": "gpu.mine", "devices": [0]}
    run_command(shared(sharing, strategy="mps"))
    wait_for("readiness", (work_directory / "nvidia.com/gpu.mine/.ready").exists)
    assert not os.path.ismount(shared_memory)
    assert [path.name for path in ready.parent.iterdir()] == ["shm"]
    assert [mode_of(mps_host, gpu) for gpu in (0, 1)] == ["3", "0"]
    assert other.is_dir(), "nothing of ours"
    assert "nvidia.com/gpu: no longer shared: removed" in messages(work_directory)


@pytest.mark.rest
def test_the_command_waits_when_nothing_is_shared_by_mps(
    work_directory: Path, beside: Path, run_command: Callable[..., "subprocess.Popen[str]"]
) -> None:
    child = run_command({})
    wait_for("a message", lambda: "nothing on this node" in (work_directory / "log").read_text())
    assert told(beside) == []
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0


@pytest.mark.rest
def test_the_command_waits_for_a_driver_or_ends_when_told_so(
    mps_host: SimulatedHost, work_directory: Path, run_command: Callable[..., "subprocess.Popen[str]"]
) -> None:
    faults = mps_host.directory / "faults"
    faults.write_text("init 999\n")
    try:
        waits = run_command(CONFIGURATION)
        wait_for("a message", lambda: "NVML" in (work_directory / "log").read_text())
        waits.send_signal(signal.SIGTERM)
        assert waits.wait(60) == 0
        ends = run_command({**CONFIGURATION, "flags": {"failOnInitError": True}})
        assert ends.wait(60) == 1
        assert "OCIGPU-KUBE-6: MPS: " in (work_directory / "log").read_text()
    finally:
        faults.unlink()


def test_the_command_ends_at_once_with_a_wrong_configuration(
    work_directory: Path, run_command: Callable[..., "subprocess.Popen[str]"]
) -> None:
    child = run_command({"sharing": {"mps": {"resources": []}}})
    assert child.wait(60) == 1
    assert "sharing.mps: no resources specified" in (work_directory / "log").read_text()


@pytest.mark.rest
def test_devices_wait_for_their_daemon(work_directory: Path) -> None:
    directory = work_directory / "nvidia.com/gpu"
    directory.mkdir(parents=True)
    configuration = configured({**CONFIGURATION, "flags": {"mpsRoot": str(work_directory)}})
    shared_, plain = Resource("nvidia.com/gpu", (), sharing="mps"), Resource("nvidia.com/mig-1g.5gb", ())
    assert waiting_resources([shared_, plain], configuration) == {"nvidia.com/gpu"}
    assert waits_for_mps(shared_, configuration) == f"MPS: no control daemon is ready: there is no {directory}/.ready"
    (directory / ".ready").touch()
    assert waiting_resources([shared_, plain], configuration) == set()
