"""``ocigpu attach`` and ``detach``: a running container has one more GPU, or one less, and nothing else changes."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from containers_lab import GPU_3, WAITING, Made, cgroup_directory, container, settings_with, with_users
from live_lab import (
    Holder,
    execute,
    mounts,
    ocigpu,
    opened,
    opens,
    records,
    see,
    shell,
    verified,
    verify,
)
from support.bundle import give_to
from support.fixtures import MakeBundle
from support.process import run, wait_for
from support.product import CONTROL_NODES, PROGRAMS, SimulatedHost

from ocigpu.containers import attach as attaching
from ocigpu.containers.attach import attach, detach
from ocigpu.containers.attached import prune_records
from ocigpu.containers.inside import remove_inside
from ocigpu.containers.repair import repair
from ocigpu.containers.verify import AS_GRANTED
from ocigpu.core.actions import Node
from ocigpu.core.errors import ApplyError, OcigpuError, RequestError
from ocigpu.core.facts import DeviceNode
from ocigpu.system import bpf
from ocigpu.system.settings_file import read_settings

pytestmark = [pytest.mark.root, pytest.mark.engine]

REFUSED, REACHED = ("ENOENT", "EPERM"), ("ENXIO", "ENXIO")


def test_a_name_says_nothing_to_the_terminal(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    """Names of engines are annotations, which images and pods may have written."""

    def named(config: dict[str, Any]) -> None:
        config["annotations"] = {"nerdctl/name": "a\x1b]0;b\x07\nother: GPU 7 attached"}

    with container(make_bundle(WAITING, GPU_3, edit=named), runtime_environment, host=simulated_host) as made:
        for command in ("attach", "attach", "detach"):
            said = ocigpu(made, command, made.name, "--gpu", "5")
            assert said.stdout.count("\n") == 1
            assert "\x1b" not in said.stdout + said.stderr


@pytest.mark.parametrize(
    ("mode", "low_level", "cgroup"),
    [("hook", "runc", "v1"), ("spec", "runc", "v2"), ("cdi", "crun", "v2")],
)
def test_a_gpu_comes_and_goes(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    specifications: str,
    mode: str,
    low_level: str,
    cgroup: str,
) -> None:
    host = simulated_host
    bundle = make_bundle(WAITING, GPU_3)
    settings = settings_with(host, low_level, bundle.with_name("mode.toml"), mode, specifications)
    with container(bundle, runtime_environment, low_level, cgroup, host, settings) as made:
        mounted = mounts(made)
        first = see(made, host, "nvidia3", "nvidia5", "dri/card3")
        assert first.opens("nvidia5") == REFUSED

        assert "GPU 5" in ocigpu(made, "attach", made.name, "--gpu", "5").stdout
        seen = see(made, host, "nvidia3", "nvidia4", "nvidia5")
        assert seen.gpus == [host.gpus[3], host.gpus[5]]
        assert seen.nodes == sorted([*first.nodes, "nvidia5"])
        assert seen.proc == ["0000:04:00.0", "0000:06:00.0"]
        assert seen.answers["stat", "/dev/nvidia5"] == host.describe_node("nvidia5")
        assert (seen.opens("nvidia3"), seen.opens("nvidia4"), seen.opens("nvidia5")) == (REACHED, REFUSED, REACHED)

        ocigpu(made, "detach", made.name, "--gpu", host.gpus[3])
        seen = see(made, host, "nvidia3", "nvidia5")
        assert (seen.gpus, seen.proc) == ([host.gpus[5]], ["0000:06:00.0"])
        assert (seen.opens("nvidia3"), seen.opens("nvidia5")) == (REFUSED, REACHED)
        data = verify(made)
        assert data["devices"] == [host.gpus[5]]
        assert data["nodes"]["/dev/dri/card3"]["made"] == "EPERM"

        ocigpu(made, "attach", made.name, "--gpu", "0000:04:00.0")
        ocigpu(made, "detach", made.name, "--gpu", "5")
        last = see(made, host, "nvidia3", "nvidia5", "dri/card3")
        assert last == first
        assert (mounts(made), records(made, host)) == (mounted, [])


def test_what_is_there_already_is_said_and_changes_nothing(gpu_3: Made, simulated_host: SimulatedHost) -> None:
    before = mounts(gpu_3)
    with opened(gpu_3) as live:
        changed = attach(live, ["3"])
    assert (changed.changed, changed.already) == ((), (simulated_host.gpus[3],))
    with opened(gpu_3) as live:
        changed = detach(live, ["5"])
    assert (changed.changed, changed.already) == ((), (simulated_host.gpus[5],))
    assert (mounts(gpu_3), records(gpu_3, simulated_host)) == (before, [])
    assert "nothing was changed" in ocigpu(gpu_3, "attach", gpu_3.name, "--gpu", "3").stdout


@pytest.mark.rest
def test_again_and_again_leaves_no_more_than_once(gpu_3: Made) -> None:
    counts = []
    for _ in range(3):
        with opened(gpu_3) as live:
            attach(live, ["5", "6"])
        with opened(gpu_3) as live:
            detach(live, ["3", "6"])
        counts.append(len(mounts(gpu_3)))
        with opened(gpu_3) as live:
            attach(live, ["3"])
        with opened(gpu_3) as live:
            detach(live, ["5"])
    assert len(set(counts)) == 1


def test_a_container_without_gpus_gets_all_that_a_hook_would_have_given(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    with container(make_bundle(WAITING), runtime_environment, host=simulated_host) as made:
        with opened(made) as live:
            attach(live, ["2"])
        seen = see(made, simulated_host)
        assert (seen.gpus, seen.nodes) == ([simulated_host.gpus[2]], sorted(["nvidia2", *CONTROL_NODES]))
        assert execute(made, "/dlopen", "libcuda.so.1") == "dlopen libcuda.so.1 ok\n"
        assert verified(made).verdict == AS_GRANTED
        with opened(made) as live:
            detach(live, ["2"])
        seen = see(made, simulated_host, "nvidia2")
        assert (seen.gpus, seen.opens("nvidia2")) == ([], REFUSED)
        found = verified(made)
        assert (found.verdict, found.grant.devices) == (AS_GRANTED, ())


def test_a_read_only_root_without_driver_files_gets_no_gpu(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    def read_only(config: dict[str, Any]) -> None:
        config["root"]["readonly"] = True

    with container(make_bundle(WAITING, edit=read_only), runtime_environment, host=simulated_host) as made:
        before = mounts(made)
        with opened(made) as live, pytest.raises(ApplyError, match="Read-only file system"):
            attach(live, ["2"])
        assert (mounts(made), records(made, simulated_host)) == (before, [])
        assert {row.inside for row in verified(made).nodes} == {""}
        assert "195:2" not in (cgroup_directory(made, "v1") / "devices.list").read_text()


def test_a_read_only_root_with_driver_files_gets_one_more(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    def read_only(config: dict[str, Any]) -> None:
        config["root"]["readonly"] = True

    bundle = make_bundle(WAITING, GPU_3, edit=read_only)
    with container(bundle, runtime_environment, host=simulated_host) as made:
        with opened(made) as live:
            attach(live, ["2"])
        assert see(made, simulated_host).gpus == [simulated_host.gpus[2], simulated_host.gpus[3]]


def mig_states(made: Made) -> tuple[list[str], list[str], dict[str, str]]:
    """Return what ``ps`` says: devices that are lost, those beyond what was granted, and states of MIG devices."""
    (found,) = json.loads(ocigpu(made, "ps", "--json", "--root", str(made.state)).stdout)["containers"]
    return found["lost"], found["beyond"], {gpu["mig"]: gpu["state"] for gpu in found["gpus"]}


@pytest.mark.rest
@pytest.mark.parametrize(("low_level", "cgroup"), [("runc", "v1"), ("crun", "v2")])
def test_mig_devices_come_and_go_with_their_capabilities(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], mig_host: SimulatedHost, low_level: str, cgroup: str
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0:0"})
    (first, *own), (second, *minors) = mig_host.mig_devices
    with container(bundle, runtime_environment, low_level, cgroup, mig_host) as made:
        ocigpu(made, "attach", made.name, "--gpu", "0:1")
        listing = execute(made, "nvidia-smi", "-L")
        assert first in listing
        assert second in listing
        assert opens(made, mig_host, f"nvidia-caps/nvidia-cap{minors[0]}") == REACHED
        ocigpu(made, "detach", made.name, "--gpu", first)
        listing = execute(made, "nvidia-smi", "-L")
        assert first not in listing
        assert second in listing
        assert opens(made, mig_host, f"nvidia-caps/nvidia-cap{own[0]}") == REFUSED
        assert opens(made, mig_host, "nvidia0") == REACHED  # the parent of the other one
        verify(made)
        assert mig_states(made) == ([], [], {"0:0": "detached", "0:1": "ok"})
        ocigpu(made, "detach", made.name, "--gpu", second)
        assert opens(made, mig_host, "nvidia0") == REFUSED  # with the last one
        assert mig_states(made) == ([], [], {"0:0": "detached"})
        told = json.loads(ocigpu(made, "explain", made.name, "--json").stdout)
        assert told["explanation"]["missing"] == []


def test_a_gpu_that_is_open_stays_unless_it_is_forced(gpu_3: Made, simulated_host: SimulatedHost) -> None:
    node = simulated_host.directory / "dev/nvidia3"
    with Holder(cgroup_directory(gpu_3, "v1"), node) as holder:
        result = ocigpu(gpu_3, "detach", gpu_3.name, "--gpu", "3", status=1)
        assert "OCIGPU-CTR-7" in result.stderr
        assert f"process {holder.process.pid} (python" in result.stderr
        assert "has /dev/nvidia3 open" in result.stderr
        assert opens(gpu_3, simulated_host, "nvidia3") == REACHED
        result = ocigpu(gpu_3, "detach", gpu_3.name, "--gpu", "3", "--force", "--json")
        data = json.loads(result.stdout)
        assert data["detached"] == [simulated_host.gpus[3]]
        assert data["held"][0]["pid"] == holder.process.pid
        assert "stays usable until it is closed" in data["notes"][-1]
    assert opens(gpu_3, simulated_host, "nvidia3") == REFUSED


def test_a_device_that_a_cgroup_above_denies_is_not_attached(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    bundle = make_bundle(WAITING, GPU_3)
    config = json.loads((bundle / "config.json").read_text())
    above = config["linux"]["cgroupsPath"]
    config["linux"]["cgroupsPath"] = f"{above}/inner"
    (bundle / "config.json").write_text(json.dumps(config))
    controllers = [path for path in Path("/sys/fs/cgroup").iterdir() if path.is_dir() and not path.is_symlink()]
    try:
        with container(bundle, runtime_environment, host=simulated_host) as made:
            (Path("/sys/fs/cgroup/devices") / above.lstrip("/") / "devices.deny").write_text("c 195:5 rw")
            before = mounts(made)
            with (
                opened(made) as live,
                pytest.raises(OcigpuError, match=r"devices\.allow|still denies c 195:5") as caught,
            ):
                attach(live, ["5"])
            assert caught.value.code in ("OCIGPU-CTR-5", "OCIGPU-CG-1")
            assert (mounts(made), records(made, simulated_host)) == (before, [])
            assert opens(made, simulated_host, "nvidia5") == REFUSED
    finally:
        for controller in controllers:
            directory = controller / above.lstrip("/")
            if directory.exists():
                directory.rmdir()


def test_one_device_cannot_be_taken_out_of_a_rule_for_many_on_cgroup_v1(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    def wide(config: dict[str, Any]) -> None:
        rule = {"allow": True, "type": "c", "major": 195, "access": "rwm"}
        config["linux"]["resources"]["devices"].append(rule)

    with container(make_bundle(WAITING, GPU_3, edit=wide), runtime_environment, host=simulated_host) as made:
        with opened(made) as live, pytest.raises(OcigpuError, match="still allows c 195:3"):
            detach(live, ["3"])
        assert opens(made, simulated_host, "nvidia3") == REACHED
        assert records(made, simulated_host) == []


@pytest.mark.rest
def test_in_a_user_namespace_nodes_are_mounted_and_unmounted(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    bundle = make_bundle(WAITING, GPU_3, edit=with_users)
    give_to(bundle / "rootfs", 100000, 100000)
    with container(bundle, runtime_environment, host=simulated_host) as made:
        before = mounts(made)
        with opened(made) as live:
            attach(live, ["5"])
        rows = {row.path: row for row in verified(made).nodes}
        assert (rows["/dev/nvidia5"].opened, rows["/dev/nvidia5"].made) == ("ENXIO", "mknod EPERM")
        with opened(made) as live:
            assert detach(live, ["5"]).notes == ()
        assert mounts(made) == before
        rows = {row.path: row for row in verified(made).nodes}
        assert (rows["/dev/nvidia5"].inside, rows["/dev/nvidia3"].opened) == ("", "ENXIO")


@pytest.mark.rest
def test_of_a_container_that_may_open_everything_one_gpu_can_be_taken(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    def privileged(config: dict[str, Any]) -> None:
        config["linux"]["resources"]["devices"] = [{"allow": True, "access": "rwm"}]

    with container(make_bundle(WAITING, GPU_3, edit=privileged), runtime_environment, host=simulated_host) as made:
        with opened(made) as live:
            detach(live, ["3"])
        assert opens(made, simulated_host, "nvidia3") == REFUSED
        assert verified(made).verdict == AS_GRANTED
        with opened(made) as live:
            attach(live, ["3"])
        assert opens(made, simulated_host, "nvidia3") == REACHED


def test_a_node_in_a_directory_of_the_host_stays(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost, work_directory: Path
) -> None:
    """As with a container that has the host's /dev: it loses the device, and the host must not lose the node."""
    nodes = work_directory / "dev"
    nodes.mkdir()
    os.mknod(nodes / "nvidia3", stat.S_IFCHR | 0o666, os.makedev(195, 3))

    def with_volume(config: dict[str, Any]) -> None:
        volume = {"destination": "/shared", "type": "bind", "source": str(nodes), "options": ["rbind"]}
        config["mounts"].append(volume)

    with container(make_bundle(WAITING, GPU_3, edit=with_volume), runtime_environment, host=simulated_host) as made:
        with opened(made) as live:
            notes = remove_inside(live.inside, [Node(DeviceNode("/shared/nvidia3", "", 195, 3), "")])
        assert notes == ["/shared/nvidia3 stays, in a directory that may be shared; it cannot be opened"]
        assert stat.S_ISCHR((nodes / "nvidia3").stat().st_mode)


def test_a_process_that_has_gone_into_a_cgroup_below_keeps_its_policy_above(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    """Systemd in a container moves itself to one; the device program of cgroup v2 stays where the runtime put it."""
    with container(make_bundle(WAITING, GPU_3), runtime_environment, "crun", "v2", simulated_host) as made:
        below = cgroup_directory(made, "v2") / "init.scope"
        below.mkdir()
        try:
            (below / "cgroup.procs").write_text(str(made.found().pid))
            ocigpu(made, "attach", made.name, "--gpu", "5")
            rows = verify(made)["nodes"]
            assert (rows["/dev/nvidia5"]["opened"], rows["/dev/nvidia4"]["made"]) == ("ENXIO", "EPERM")
        finally:
            made.do("delete", "--force", made.name)
            if below.exists():
                below.rmdir()
                below.parent.rmdir()


@pytest.mark.parametrize("name", ["8", "GPU-00000000", "all", "", "9:9"])
def test_a_device_that_the_host_has_not_is_refused(gpu_3: Made, name: str) -> None:
    with opened(gpu_3) as live, pytest.raises(RequestError) as caught:
        attach(live, [name])
    assert caught.value.code == "OCIGPU-DEV-1"


@pytest.mark.rest
@pytest.mark.parametrize(
    "command",
    ["ln -s /etc /dev/nvidia5", "mkfifo /dev/nvidia5", "mkdir /dev/nvidia5", "echo x > /dev/nvidia5"],
)
def test_something_in_the_place_of_the_node_stops_it_and_nothing_is_left(
    gpu_3: Made, simulated_host: SimulatedHost, command: str
) -> None:
    shell(gpu_3, command)
    before = mounts(gpu_3)
    with opened(gpu_3) as live, pytest.raises(OcigpuError):
        attach(live, ["5"])
    assert (mounts(gpu_3), records(gpu_3, simulated_host)) == (before, [])
    assert opens(gpu_3, simulated_host, "nvidia5")[1] == "EPERM"
    assert verified(gpu_3).verdict == AS_GRANTED


def test_two_at_once_both_count(gpu_3: Made, simulated_host: SimulatedHost) -> None:
    command = [PROGRAMS / "ocigpu", "attach", gpu_3.name, "--root", gpu_3.state, "--gpu"]
    both = [subprocess.Popen([*command, number], env=gpu_3.environment, stdout=subprocess.DEVNULL) for number in "56"]
    assert [process.wait(60) for process in both] == [0, 0]
    assert see(gpu_3, simulated_host).gpus == [simulated_host.gpus[index] for index in (3, 5, 6)]
    assert verified(gpu_3).verdict == AS_GRANTED


def read_stamp(made: Made) -> tuple[int, ...]:
    """Return the numbers of the device programs of a container on cgroup v2."""
    fd = os.open(cgroup_directory(made, "v2"), os.O_RDONLY | os.O_DIRECTORY)
    try:
        return bpf.query_device_programs(fd).ids
    finally:
        os.close(fd)


KILLED = """
import os, signal, sys
from ocigpu.cli.front import main as cli
from ocigpu.containers import attach
from ocigpu.provision.journal import Journal
name, *words = sys.argv[1:]
original = Journal.record
def killed(*arguments, **named):
    if name == "write_record" and arguments[2].unsure:  # the record of what is begun
        return write(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
write = attach.write_record
def parent_killed(journal, *arguments, **named):
    original(journal, *arguments, **named)
    if len(journal.entries) == int(name):
        os.kill(os.getppid(), signal.SIGKILL)
if name.isdigit():
    Journal.record = parent_killed
else:
    setattr(attach, name, killed)
cli.main(words)
"""


@pytest.mark.rest
@pytest.mark.parametrize("step", ["provision", "1", "2", "3", "write_record"])
def test_a_command_that_is_killed_gives_nothing(gpu_3: Made, simulated_host: SimulatedHost, step: str) -> None:
    rules = cgroup_directory(gpu_3, "v1") / "devices.list"
    before = (rules.read_text(), mounts(gpu_3))
    words = ["attach", gpu_3.name, "--gpu", "5", "--root", str(gpu_3.state)]
    result = subprocess.run([sys.executable, "-c", KILLED, step, *words], env=gpu_3.environment, timeout=60)
    assert result.returncode == -signal.SIGKILL
    wait_for("the rules to be put back", lambda: "195:5" not in rules.read_text())
    if step != "write_record":  # then all is in place already, and only the rules are taken back
        wait_for("the mounts to go", lambda: mounts(gpu_3) == before[1])
        assert opens(gpu_3, simulated_host, "nvidia5") == REFUSED
    assert rules.read_text() == before[0]
    assert opens(gpu_3, simulated_host, "nvidia5")[1] == "EPERM"
    assert verified(gpu_3).verdict == AS_GRANTED
    with opened(gpu_3) as live:
        repaired = repair(live)
    assert repaired.notes == (f"what a killed command has left of {simulated_host.gpus[5]} was removed",)
    assert (mounts(gpu_3), records(gpu_3, simulated_host)) == (before[1], [])
    assert opens(gpu_3, simulated_host, "nvidia5") == REFUSED
    with opened(gpu_3) as live:
        assert repair(live) == repaired._replace(notes=())


@pytest.mark.rest
@pytest.mark.parametrize("step", ["remove_inside", "show"])
def test_what_a_killed_detach_leaves_goes_with_the_next_command(
    gpu_3: Made, simulated_host: SimulatedHost, step: str
) -> None:
    words = ["detach", gpu_3.name, "--gpu", "3", "--root", str(gpu_3.state)]
    result = subprocess.run([sys.executable, "-c", KILLED, step, *words], env=gpu_3.environment, timeout=60)
    assert result.returncode == -signal.SIGKILL
    assert opens(gpu_3, simulated_host, "nvidia3")[1] == "EPERM"
    with opened(gpu_3) as live:
        assert attach(live, ["5"]).devices == (simulated_host.gpus[5],)
    seen = see(gpu_3, simulated_host, "nvidia3")
    assert (seen.gpus, seen.proc) == ([simulated_host.gpus[5]], ["0000:06:00.0"])
    assert seen.opens("nvidia3") == REFUSED


def test_a_command_that_is_killed_puts_the_programs_of_cgroup_v2_back(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    with container(make_bundle(WAITING, GPU_3), runtime_environment, "crun", "v2", simulated_host) as made:
        before = read_stamp(made)
        words = [sys.executable, "-c", KILLED, "provision", "attach", made.name, "--gpu", "5", "--root", made.state]
        result = run([*made.command[:-3], *words], env=made.environment, check=False)
        assert result.returncode == -signal.SIGKILL
        wait_for("the program to be put back", lambda: read_stamp(made) == before)
        assert opens(made, simulated_host, "nvidia5") == REFUSED
        verify(made)


@pytest.mark.rest
def test_a_failure_in_the_middle_puts_the_rules_back(
    gpu_3: Made, simulated_host: SimulatedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = cgroup_directory(gpu_3, "v1") / "devices.list"
    before = rules.read_text()

    def fails(*_: object, **__: object) -> tuple[str, ...]:
        assert "195:5" in rules.read_text()
        raise ApplyError("OCIGPU-MNT-1", "failed on purpose")

    monkeypatch.setattr(attaching, "provision", fails)
    with opened(gpu_3) as live, pytest.raises(ApplyError, match="failed on purpose"):
        attach(live, ["5"])
    assert (rules.read_text(), records(gpu_3, simulated_host)) == (before, [])


def test_a_record_goes_with_its_container(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    with container(make_bundle(WAITING, GPU_3), runtime_environment, host=simulated_host) as made:
        with opened(made) as live:
            attach(live, ["5"])
        settings = read_settings(made.environment["OCIGPU_CONFIG"])
        prune_records(settings)
        assert len(records(made, simulated_host)) == 1
    prune_records(settings)
    assert not list((simulated_host.directory / "run/ocigpu").glob("attached-*"))
