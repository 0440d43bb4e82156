"""Containers that do what they can to disturb who looks into them and changes them."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from containers_lab import GPU_3, WAITING, Made, cgroup_directory, container
from live_lab import opened, opens, verified
from support import requirements, silent_fuse
from support.fixtures import MakeBundle
from support.lines import Lines
from support.process import run, wait_for
from support.product import SimulatedHost

from ocigpu.containers import live as living
from ocigpu.containers.attach import attach, detach
from ocigpu.containers.repair import GrantKeeper, repair
from ocigpu.containers.verify import AS_GRANTED
from ocigpu.core.errors import OcigpuError
from ocigpu.engines.places import running_daemons
from ocigpu.system.settings_file import read_settings

pytestmark = [pytest.mark.root, pytest.mark.engine]


@contextmanager
def silent(made: Made, directory: str) -> Iterator[None]:
    """A file system that never answers over a directory of the container."""
    requirements.require("" if os.path.exists("/dev/fuse") else "no /dev/fuse")
    command = [sys.executable, silent_fuse.__file__, str(made.found().pid), directory]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "mounted\n"
            yield
        finally:
            process.kill()


@contextmanager
def hurried() -> Iterator[None]:
    """Nobody waits long for what never comes, but long enough for what does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(living, "SECONDS", 2.0)
        patch.setattr("ocigpu.containers.child.ask_child.__defaults__", (2.0,))
        patch.setattr("ocigpu.containers.child.ask_each.__defaults__", (2.0,))
        yield


def test_a_file_system_that_never_answers_below_the_image_ends_in_an_error(gpu_3: Made) -> None:
    with silent(gpu_3, "/etc"), hurried(), pytest.raises(OcigpuError, match="inspect its files: it took too long"):
        verified(gpu_3)


@pytest.mark.rest
def test_a_file_system_that_never_answers_below_dev_takes_rules_and_workers_with_it(
    gpu_3: Made,
) -> None:
    rules = cgroup_directory(gpu_3, "v1") / "devices.list"
    before, children = rules.read_text(), _children()
    with silent(gpu_3, "/dev"), hurried():
        with opened(gpu_3) as live, pytest.raises(OcigpuError, match="no answer of the container's file systems"):
            attach(live, ["5"])
        assert rules.read_text() == before
        assert _children() <= children
        with opened(gpu_3) as live:
            assert "it took too long" in detach(live, ["3"]).notes[0]
        assert "195:3" not in rules.read_text()
    run(["nsenter", "--target", str(gpu_3.found().pid), "--mount", "umount", "/dev"])
    with opened(gpu_3) as live:
        attach(live, ["3"])
    assert verified(gpu_3).verdict == AS_GRANTED


def _children() -> set[str]:
    """Return this process's children but the one that has mounted the file system."""
    pids = Path("/proc/self/task").glob("*/children")
    found = {pid for path in pids for pid in path.read_text().split()}
    return {pid for pid in found if "silent_fuse" not in Path("/proc", pid, "cmdline").read_text()}


@pytest.mark.rest
def test_the_keeper_goes_on_to_the_next_container(
    gpu_3: Made, make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    log = Lines()
    settings = read_settings(gpu_3.environment["OCIGPU_CONFIG"])
    with container(make_bundle(WAITING, GPU_3), runtime_environment, host=simulated_host) as other:
        places = gpu_3.places._replace(roots=(*gpu_3.places.roots, *other.places.roots))
        keeper = GrantKeeper(places, settings, log)
        keeper.look()
        devices = [cgroup_directory(made, "v1") for made in (gpu_3, other)]

        def is_repaired() -> bool:
            keeper.look()
            return "195:3" in (devices[1] / "devices.list").read_text()

        for directory in devices:
            (directory / "devices.deny").write_text("c 195:3 rw")
        with silent(gpu_3, "/etc"), hurried():
            # a machine that stops for a while may take the other's time away, which the next look makes good
            wait_for("the other's rule", is_repaired)
        assert "195:3" not in (devices[0] / "devices.list").read_text()
    assert {line.split(":")[0] for line in log.lines} == {"error", "info"}


@pytest.mark.rest
def test_many_that_never_answer_keep_the_keeper_no_longer_than_one(
    gpu_3: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten of them, which look at the files of one that hangs: the time for looking does not grow with their number."""
    log = Lines()
    keeper = GrantKeeper(gpu_3.places, read_settings(gpu_3.environment["OCIGPU_CONFIG"]), log)
    found = gpu_3.found()
    directory, name = os.path.split(found.state_file)
    files = [f"{directory}/{'./' * number}{name}" for number in range(10)]
    many = [found._replace(id=f"c{number}", state_file=file) for number, file in enumerate(files)]
    monkeypatch.setattr("ocigpu.containers.repair.find_containers", lambda _: (many, []))
    monkeypatch.setattr("ocigpu.containers.repair.read_stamp", lambda _: "changed")
    monkeypatch.setattr("ocigpu.containers.repair.inspect_image", lambda *_: time.sleep(600))
    monkeypatch.setattr("ocigpu.containers.child.ask_each.__defaults__", (2.0,))
    begin = time.monotonic()
    keeper.look()
    assert time.monotonic() - begin < 15  # 20 s and more if they were asked one after another
    assert [line for line in log.lines if "it took too long" in line] == log.lines
    assert len(log.lines) == 10


def test_a_command_that_does_not_end_keeps_others_waiting_only_for_a_while(gpu_3: Made) -> None:
    fd = os.open(os.path.dirname(gpu_3.found().state_file), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    begin = time.monotonic()
    with hurried(), pytest.raises(OcigpuError, match="another command of ocigpu"):
        verified(gpu_3)
    assert time.monotonic() - begin > 1
    os.close(fd)
    assert verified(gpu_3).verdict == AS_GRANTED


RESTLESS = """
while :; do
  for path in /dev/nvidia5 /dev/nvidia3 /dev/nvidiactl; do
    mv $path /tmp/aside 2>/dev/null; ln -s /tmp/target $path 2>/dev/null; rm -f $path; mkdir $path 2>/dev/null
    rmdir $path 2>/dev/null; mv /tmp/aside $path 2>/dev/null; rm -f $path; touch $path; rm -f $path
  done
  mv /dev /tmp/dev 2>/dev/null; mv /etc /etc.aside; ln -s /tmp /etc; rm -f /etc; mv /etc.aside /etc
done
"""


@pytest.mark.rest
def test_names_that_are_exchanged_all_the_time_lead_nowhere_else(gpu_3: Made, simulated_host: SimulatedHost) -> None:
    rules = cgroup_directory(gpu_3, "v1") / "devices.list"
    nodes = simulated_host.directory / "dev"
    targets = set(Path("/tmp").glob("target"))
    before = (sorted(os.listdir("/dev")), sorted(os.listdir(nodes)))
    command = [*gpu_3.command, "exec", gpu_3.name, "sh", "-c", RESTLESS]
    with subprocess.Popen(command, env=gpu_3.environment, stderr=subprocess.DEVNULL) as restless:
        for _ in range(8):
            for change in (attach, detach):
                allowed = "195:5" in rules.read_text()
                try:
                    with opened(gpu_3) as live:
                        change(live, ["5"])
                    allowed = change is attach
                except OcigpuError:  # undone, as what it was
                    pass
                assert ("195:5" in rules.read_text()) == allowed
            assert {row.made for row in verified(gpu_3).nodes if row.granted == "no"} == {"EPERM"}
        gpu_3.do("kill", gpu_3.name, "KILL")
        restless.kill()
    assert (sorted(os.listdir("/dev")), sorted(os.listdir(nodes))) == before
    assert set(Path("/tmp").glob("target")) == targets


def test_a_first_process_that_has_gone_into_a_volume_gets_nothing_there(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost, work_directory: Path
) -> None:
    """chroot(2) needs a capability that engines give (CAP_SYS_CHROOT); the volume is the host's, and would keep it."""
    volume = work_directory / "volume"
    volume.mkdir()

    def with_volume(config: dict[str, Any]) -> None:
        config["mounts"].append({"destination": "/v", "type": "bind", "source": str(volume), "options": ["rbind"]})

    enter = ["sh", "-c", "mkdir -p /v/proc/driver/nvidia; cp /probe /v/probe; exec chroot /v /probe pause"]
    with container(make_bundle(enter, GPU_3, edit=with_volume), runtime_environment, host=simulated_host) as made:
        root = Path(f"/proc/{made.found().pid}/root")
        there = volume / "probe"
        wait_for("the first process is in the volume", lambda: there.exists() and there.samefile(root / "probe"))
        with opened(made) as live:
            attach(live, ["5"])
        assert sorted(os.listdir(volume)) == ["probe", "proc"]
        assert opens(made, simulated_host, "nvidia5") == ("ENXIO", "ENXIO")
        (cgroup_directory(made, "v1") / "devices.deny").write_text("c 195:3 rw")
        run([*made.command, "exec", made.name, "rm", "/dev/nvidia3"], env=made.environment)
        with opened(made) as live:
            assert repair(live).done
        assert sorted(os.listdir(volume)) == ["probe", "proc"]
        assert verified(made).verdict == AS_GRANTED


def test_a_process_of_a_container_with_the_host_s_process_ids_is_no_engine(
    make_bundle: MakeBundle, runtime_environment: dict[str, str]
) -> None:
    """Root in there has the engine's name and names a file of the host: ``engine configure`` would edit it."""

    def without_namespace(config: dict[str, Any]) -> None:
        namespaces = config["linux"]["namespaces"]
        namespaces[:] = [one for one in namespaces if one["type"] != "pid"]

    name = ["sh", "-c", "cp /probe /tmp/dockerd; exec /tmp/dockerd pause --config-file /etc/mallory.json"]
    with container(make_bundle(name, edit=without_namespace), runtime_environment) as made:
        command = Path(f"/proc/{made.found().pid}/cmdline")
        wait_for("the name", lambda: command.read_bytes().startswith(b"/tmp/dockerd"))
        assert "/etc/mallory.json" not in [daemon.config for daemon in running_daemons("/")]
