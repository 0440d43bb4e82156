"""``ocigpu repair`` and ``ocigpu watch --repair`` give back what was granted, and nothing else."""

import json
import os
import shlex
import signal
import stat
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from containers_lab import GPU_3, WAITING, Made, cgroup_directory, container, settings_with
from live_lab import (
    HOST_LIBRARY,
    apply_again,
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
from support.fixtures import MakeBundle
from support.lines import Lines
from support.process import run, wait_for
from support.product import PROGRAMS, REPOSITORY, RUNTIME, SimulatedHost, python_of_nobody
from support.runtimes import probe

from ocigpu.cli.host.doctor import carry_out_fixes
from ocigpu.containers.attach import attach, detach
from ocigpu.containers.believed import Container, read_config_of
from ocigpu.containers.live import open_live, read_now
from ocigpu.containers.repair import GrantKeeper, repair
from ocigpu.containers.verify import AS_GRANTED
from ocigpu.core.config_json import Document
from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.core.facts import HostFacts
from ocigpu.doctor import running
from ocigpu.doctor.findings import CHECKS, Finding
from ocigpu.doctor.host import Host
from ocigpu.doctor.report import run_checks
from ocigpu.system import libc
from ocigpu.system.settings_file import read_settings

pytestmark = [pytest.mark.root, pytest.mark.engine]

REFUSED, REACHED = ("ENOENT", "EPERM"), ("ENXIO", "ENXIO")


def hook_by_hand(config: dict[str, Any], settings: str) -> None:
    """Put the hook into a configuration that says nothing of its devices, as Docker's --gpus does."""
    arguments = ["ocigpu-hook", "--config", settings, "prestart"]
    config["hooks"] = {"prestart": [{"path": str(RUNTIME.with_name("ocigpu-hook")), "args": arguments}]}


@pytest.mark.rest
@pytest.mark.parametrize(("low_level", "cgroup"), [("runc", "v1"), ("runc", "v2"), ("crun", "v2")])
def test_rules_that_only_the_hook_knew_are_given_back(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    low_level: str,
    cgroup: str,
) -> None:
    environment = simulated_host.environment(runtime_environment, low_level)
    bundle = make_bundle(WAITING, GPU_3, edit=lambda config: hook_by_hand(config, environment["OCIGPU_CONFIG"]))
    with container(bundle, environment, low_level, cgroup) as made:
        verify(made)
        apply_again(made, cgroup)
        verify(made, status=3)
        result = ocigpu(made, "repair", made.name, "--dry-run", status=3)
        assert f"{made.name}: lost: device rule c 195:3 rw" in result.stdout
        verify(made, status=3)
        result = ocigpu(made, "repair", made.name)
        assert f"{made.name}: restored: device rule c 195:3 rw" in result.stdout
        verify(made)
        assert "nothing is lost: 4 of 4 devices allowed" in ocigpu(made, "repair", made.name).stdout
        assert opens(made, simulated_host, "nvidia4") == REFUSED


@pytest.mark.rest
def test_what_was_attached_comes_back_and_what_was_detached_goes_again(
    gpu_3: Made, simulated_host: SimulatedHost
) -> None:
    with opened(gpu_3) as live:
        attach(live, ["5"])
    with opened(gpu_3) as live:
        detach(live, ["3"])
    apply_again(gpu_3, "v1")
    seen = see(gpu_3, simulated_host, "nvidia3", "nvidia5")
    assert (seen.opens("nvidia3")[1], seen.opens("nvidia5")[1]) == ("ENXIO", "EPERM")
    with opened(gpu_3) as live:
        repaired = repair(live)
    assert repaired.lost == ("device rule c 195:5 rw", "denial of the detached c 195:3")
    seen = see(gpu_3, simulated_host, "nvidia3", "nvidia5")
    assert (seen.opens("nvidia3"), seen.opens("nvidia5")) == (REFUSED, REACHED)
    assert verified(gpu_3).verdict == AS_GRANTED


def test_a_node_and_a_view_that_were_removed_come_back(gpu_3: Made, simulated_host: SimulatedHost) -> None:
    with opened(gpu_3) as live:
        attach(live, ["5"])
    first = see(gpu_3, simulated_host, "nvidia3", "nvidia5")
    mounted = len(mounts(gpu_3))
    shell(gpu_3, "rm /dev/nvidia3 /dev/nvidia5")
    leave = ["nsenter", "--target", str(gpu_3.found().pid), "--mount", "umount", "-l", "/proc/driver/nvidia"]
    subprocess.run(leave, check=True)
    with opened(gpu_3) as live:
        repaired = repair(live)
    assert set(repaired.lost) == {"node /dev/nvidia3", "node /dev/nvidia5", "/proc/driver/nvidia/gpus/0000:06:00.0"}
    assert repaired.done
    assert see(gpu_3, simulated_host, "nvidia3", "nvidia5") == first
    assert len(mounts(gpu_3)) == mounted


def test_what_somebody_has_put_in_the_place_of_a_node_stays(gpu_3: Made) -> None:
    shell(gpu_3, "rm /dev/nvidia3; mkfifo /dev/nvidia3")
    with opened(gpu_3) as live, pytest.raises(OcigpuError, match="/dev/nvidia3"):
        repair(live)
    shell(gpu_3, "test -p /dev/nvidia3")


def test_what_was_never_granted_is_not_given(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    with container(make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "all"}), runtime_environment) as plain:
        made = plain._replace(environment=simulated_host.environment(plain.environment))
        before = mounts(made)
        assert "it was granted nothing" in ocigpu(made, "repair", made.name).stdout
        assert (mounts(made), records(made, simulated_host)) == (before, [])
        assert {row.made for row in verified(made).nodes} == {"EPERM"}


def test_all_containers_are_repaired_whatever_one_of_them_says(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    first, second = make_bundle(WAITING, GPU_3), make_bundle(WAITING, GPU_3)
    with (
        container(first, runtime_environment, host=simulated_host) as broken,
        container(second, runtime_environment, host=simulated_host) as lost,
    ):
        (second.with_name(f"{second.name}.state") / lost.name).rename(broken.state / lost.name)
        try:
            shared = lost._replace(state=broken.state)
            (first / "config.json").chmod(0o666)
            (cgroup_directory(shared, "v1") / "devices.deny").write_text("c 195:3 rw")
            result = ocigpu(shared, "repair", "--all", "--json", status=1)
            assert f"{broken.name}: OCIGPU-SPEC-1" in result.stderr
            rows = {row["name"]: row for row in json.loads(result.stdout)["containers"]}
            assert rows[lost.name]["lost"] == ["device rule c 195:3 rw"]
            assert rows[lost.name]["done"] is True
        finally:
            (broken.state / lost.name).rename(second.with_name(f"{second.name}.state") / lost.name)


@pytest.mark.parametrize("words", [["verify", "any"], ["repair", "--all"], ["attach", "any", "--gpu", "1"]])
def test_without_root_nothing_is_called_well(words: list[str], work_directory: Path, tmp_path: Path) -> None:
    command = [*python_of_nobody(work_directory), "-m", "ocigpu.cli.front.main", *words, "--root", tmp_path]
    result = run(command, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert "OCIGPU-CTR-6" in result.stderr


def test_one_container_or_all_of_them(gpu_3: Made) -> None:
    for words in (["repair"], ["repair", gpu_3.name, "--all"]):
        assert "OCIGPU-ARG-1" in ocigpu(gpu_3, *words, status=2).stderr


def test_the_keeper_repairs_what_changed_and_is_silent_else(gpu_3: Made, simulated_host: SimulatedHost) -> None:
    log = Lines()
    said = log.lines
    settings = read_settings(gpu_3.environment["OCIGPU_CONFIG"])
    keeper = GrantKeeper(gpu_3.places, settings, log)
    keeper.look()
    keeper.look()
    assert said == []
    with opened(gpu_3) as live:
        attach(live, ["5"])
    keeper.look()
    assert said == []
    apply_again(gpu_3, "v1")
    keeper.look()
    keeper.look()
    assert said == [f"info: repaired {gpu_3.name}: it had lost device rule c 195:5 rw"]
    assert opens(gpu_3, simulated_host, "nvidia5") == REACHED


@pytest.mark.rest
def test_the_keeper_opens_a_container_without_devices_only_when_it_was_attached_one(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened_ones: list[str] = []
    monkeypatch.setattr(
        "ocigpu.containers.repair.open_live", lambda found, *_: opened_ones.append(found.name) or open_live(found, *_)
    )
    with container(make_bundle(WAITING, layout="debian"), runtime_environment, host=simulated_host) as made:
        keeper = GrantKeeper(made.places, read_settings(made.environment["OCIGPU_CONFIG"]), Lines())
        keeper.look()
        keeper.look()
        assert opened_ones == []
        with opened(made) as live:
            attach(live, ["5"])
        keeper.look()
        assert opened_ones == [made.name]
        apply_again(made, "v1")
        keeper.look()
        assert opens(made, simulated_host, "nvidia5") == REACHED


def test_the_keeper_looks_again_when_the_host_has_other_devices(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    work_directory: Path,
) -> None:
    settings = settings_with(simulated_host, "runc", work_directory / "config.toml", "spec")
    with container(make_bundle(WAITING, GPU_3), runtime_environment, host=simulated_host, settings=settings) as made:
        log = Lines()
        keeper = GrantKeeper(made.places, read_settings(str(settings)), log)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ocigpu.containers.repair.read_host_facts", lambda *_, **__: HostFacts())
            keeper.look()
        (cgroup_directory(made, "v1") / "devices.deny").write_text("c 195:3 rw")
        keeper.look()
        assert log.lines == [f"info: repaired {made.name}: it had lost device rule c 195:3 rw"]


def test_the_keeper_says_once_that_the_host_has_no_driver(gpu_3: Made) -> None:
    log, asked = Lines(), []
    keeper = GrantKeeper(gpu_3.places, read_settings(gpu_3.environment["OCIGPU_CONFIG"]), log)

    def read(*_: object, **__: object) -> HostFacts:
        asked.append(1)
        raise HostError("OCIGPU-HOST-1", "no NVIDIA driver", "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ocigpu.containers.repair.read_host_facts", read)
        keeper.look()
        keeper.look()
    assert len(asked) == 2, "once a round, however many containers there are"
    assert log.lines == ["error: repair: no NVIDIA driver"]
    (cgroup_directory(gpu_3, "v1") / "devices.deny").write_text("c 195:3 rw")
    keeper.look()
    assert log.lines[1:] == [f"info: repaired {gpu_3.name}: it had lost device rule c 195:3 rw"]


@pytest.mark.rest
def test_what_one_container_or_image_does_hides_no_loss_from_the_doctor(
    gpu_3: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cgroup_directory(gpu_3, "v1") / "devices.deny").write_text("c 195:3 rw")
    settings = read_settings(gpu_3.environment["OCIGPU_CONFIG"])
    whole, broken = gpu_3.found(), gpu_3.found()._replace(name="broken")

    def read(found: Container) -> Document:
        if found.name == "broken":
            raise PermissionError(13, "Permission denied")
        return read_config_of(found)

    monkeypatch.setattr(running, "read_config_of", read)
    first, second = running.ask_for_lacks([broken, whole], settings, "550.1")
    assert ("Permission denied" in first.problem, second.lost) == (True, ["device rule c 195:3 rw"])
    monkeypatch.setattr(running, "SECONDS", 5.0)
    monkeypatch.setattr(running, "look_for_users", lambda *_: time.sleep(600))
    (stuck,) = running.ask_for_lacks([whole], settings, "550.1")
    assert (stuck.lost, stuck.unseen) == (["device rule c 195:3 rw"], "it took too long")
    monkeypatch.setattr(running, "open_root", lambda _: nullcontext("/nowhere"))
    (gone,) = running.ask_for_lacks([whole], settings, "550.1")
    assert (gone.libcuda, "/nowhere" in gone.unseen) == ("", True)


def test_doctor_fix_gives_back_what_a_container_has_lost(
    gpu_3: Made, simulated_host: SimulatedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finding's own commands, as they are printed: container-lost-gpu.lost of tests/doctor/test_doctor_fix.py."""
    (cgroup_directory(gpu_3, "v1") / "devices.deny").write_text("c 195:3 rw")
    monkeypatch.setenv("OCIGPU_CONFIG", gpu_3.environment["OCIGPU_CONFIG"])
    monkeypatch.setattr("ocigpu.containers.find.default_places", lambda *_: gpu_3.places)

    def examine(name: str) -> list[Finding]:
        host = Host("", gpu_3.environment["OCIGPU_CONFIG"], states=gpu_3.places.roots)
        return [item for item in run_checks(host, (name,)) if gpu_3.name in item.text]

    before = examine("container-lost-gpu")
    assert [item.severity for item in before] == ["error"]
    assert carry_out_fixes(before, examine, yes=True) == 1
    assert examine("container-lost-gpu") == []
    assert opens(gpu_3, simulated_host, "nvidia3") == REACHED


def test_among_many_the_doctor_has_children_look_while_it_goes_on(gpu_3: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share is 100 containers; here it is none; the answer waits longer for the doctor than a child may look."""
    (cgroup_directory(gpu_3, "v1") / "devices.deny").write_text("c 195:3 rw")
    monkeypatch.setattr("ocigpu.doctor.host.SHARE", 0)
    order: list[str] = []
    children: list[Any] = []
    began, asked = running.begin_lacks, running.ask_for_lacks

    def begin(*arguments: Any) -> Any:
        order.append("begun")
        return began(*arguments)

    def ask(containers: Any, settings: Any, version: str, begun: Any) -> Any:
        order.append(f"asked {len(begun)}")
        children.extend(begun)
        for child in begun:
            child._deadline = 0.0  # as after longer than a child may take: it has answered all the same
        return asked(containers, settings, version, begun)

    monkeypatch.setattr("ocigpu.doctor.host.begin_lacks", begin)
    monkeypatch.setattr("ocigpu.doctor.host.ask_for_lacks", ask)
    host = Host("", gpu_3.environment["OCIGPU_CONFIG"], states=gpu_3.places.roots)
    found = run_checks(host, ("container-lost-gpu", "image-libcuda"))
    assert [item.severity for item in found if item.name == "container-lost-gpu" and gpu_3.name in item.text] == [
        "error"
    ]
    assert order == ["begun", "asked 1"]
    assert [item.name for item in found] == sorted(
        (item.name for item in found), key=[one.name for one in CHECKS].index
    )
    assert [child.pid for child in children] == [0]


@pytest.mark.rest
def test_the_keeper_tells_an_error_once_and_forgets_what_has_ended(
    gpu_3: Made, simulated_host: SimulatedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ocigpu.containers.repair.RETRY", 0.0)
    log = Lines()
    settings = read_settings(gpu_3.environment["OCIGPU_CONFIG"])
    with opened(gpu_3) as live:
        attach(live, ["5"])
    keeper = GrantKeeper(gpu_3.places, settings, log)
    keeper.look()
    (gpu_3.bundle / "config.json").chmod(0o666)
    apply_again(gpu_3, "v1")
    keeper.look()
    keeper.look()
    (said,) = log.lines
    assert said.startswith("error: ")
    os.kill(gpu_3.found().pid, signal.SIGKILL)
    wait_for("the container to end", lambda: gpu_3.found().pid == 0)
    keeper.look()
    assert (log.lines, records(gpu_3, simulated_host)) == ([said], [])


PRIVATE_RUN = 'mount -t tmpfs none /run && mkdir /run/runc && mount --bind "$0" /run/runc && exec "$@"'


@pytest.mark.rest
def test_the_rights_of_the_unit_are_enough(gpu_3: Made, simulated_host: SimulatedHost) -> None:
    unit = (REPOSITORY / "packaging/systemd/ocigpu-repair.service").read_text()
    (line,) = (line for line in unit.splitlines() if line.startswith("CapabilityBoundingSet="))
    rights = line.partition("=")[2].lower().replace("cap_", "+").replace(" ", ",")
    with opened(gpu_3) as live:
        attach(live, ["5"])
    shell(gpu_3, "rm /dev/nvidia3 /dev/nvidia5")
    run(["nsenter", "--target", str(gpu_3.found().pid), "--mount", "umount", "-l", "/proc/driver/nvidia"])
    (cgroup_directory(gpu_3, "v1") / "devices.deny").write_text("c 195:5 rw")
    command = ["setpriv", "--no-new-privs", f"--bounding-set=-all,{rights}", PROGRAMS / "ocigpu", "repair", gpu_3.name]
    run([*command, "--root", gpu_3.state], env=gpu_3.environment)
    assert see(gpu_3, simulated_host).gpus == [simulated_host.gpus[index] for index in (3, 5)]
    assert verified(gpu_3).verdict == AS_GRANTED


REPAIRED = "repaired {}: it had lost device rule c 195:3 rw"


@pytest.mark.rest
def test_watch_repairs_by_itself(gpu_3: Made, simulated_host: SimulatedHost, work_directory: Path) -> None:
    output = work_directory / "watch.log"
    command = ["unshare", "--mount", "sh", "-c", PRIVATE_RUN, str(gpu_3.state), str(PROGRAMS / "ocigpu"), "watch"]
    command += ["--repair", "--interval", "0.2", "--output", str(work_directory / "nvidia.yaml")]
    (cgroup_directory(gpu_3, "v1") / "devices.deny").write_text("c 195:3 rw")
    with output.open("wb") as file:
        watch = subprocess.Popen(command, stdout=file, stderr=file, env=gpu_3.environment)
    try:
        for done in (1, 2, 3):
            # said once it was checked: a rule that goes before that is a repair that failed
            wait_for(
                "the rule to be back",
                lambda done=done: output.read_text().count(REPAIRED.format(gpu_3.name)) == done,
                on_failure=output.read_text,
            )
            assert opens(gpu_3, simulated_host, "nvidia3") == REACHED
            if done < 3:
                (cgroup_directory(gpu_3, "v1") / "devices.deny").write_text("c 195:3 rw")
    finally:
        watch.terminate()
        assert watch.wait(60) == 0, output.read_text()
    text = output.read_text()
    assert text.count(REPAIRED.format(gpu_3.name)) == 3
    assert "Traceback" not in text


GPU_1 = {"NVIDIA_VISIBLE_DEVICES": "1"}
REFUSING = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
BY_SWARM = 'swarm-resource = "DOCKER_RESOURCE_GPU"\n'


def hook_of_another(config: dict[str, Any], settings: str, capability: str = "") -> None:
    """Put a hook of another's name into a configuration; it is ours, which does not show, with settings of its own."""
    program = shlex.quote(str(RUNTIME.with_name("ocigpu-hook")))
    command = f"exec {program} --config {shlex.quote(settings)} prestart"
    path = Path(settings).with_name("nvidia-container-runtime-hook")
    path.write_text(f"#!/bin/sh\n#{' ' * 4096}\n{command}\n")
    path.chmod(0o755)
    config["hooks"] = {"prestart": [{"path": str(path), "args": ["nvidia-container-runtime-hook", "prestart"]}]}
    if capability:
        config["process"]["capabilities"]["bounding"].append(capability)


def without_rules(made: Made, *numbers: str) -> None:
    for number in numbers:
        (cgroup_directory(made, "v1") / "devices.deny").write_text(f"c {number} rw")


@pytest.mark.rest
@pytest.mark.parametrize("mounted", [False, True], ids=["no GPU", "one of all"])
def test_what_the_hook_of_another_has_refused_is_not_given(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost, mounted: bool
) -> None:
    """By settings that we do not know: of the vendor's hook, accept-... = false, or swarm-resource."""
    environment = simulated_host.environment(runtime_environment)
    work = make_bundle(WAITING).parent / "another"
    work.mkdir()
    more = BY_SWARM if mounted else REFUSING
    settings = settings_with(simulated_host, "runc", work / "config.toml", "hook", more)
    variables = {"NVIDIA_VISIBLE_DEVICES": "all", "DOCKER_RESOURCE_GPU": "1"}
    bundle = make_bundle(WAITING, variables, edit=lambda config: hook_of_another(config, str(settings)))
    with container(bundle, environment) as made:
        execute(made, *probe(["mknod", "/dev/nvidia2", *simulated_host.number("nvidia2")]))
        with opened(made) as live:
            devices = read_now(live).devices
            repaired = repair(live)
        assert devices == ((simulated_host.gpus[1],) if mounted else ())
        assert repaired.lost == ()
        if mounted:
            without_rules(made, "195:1")
            with opened(made) as live:
                assert repair(live).lost == ("device rule c 195:1 rw",)
        assert {number: opens(made, simulated_host, f"nvidia{number}")[1] for number in (1, 2, 3)} == {
            1: "ENXIO" if mounted else "EPERM", 2: "EPERM", 3: "EPERM",
        }  # fmt: skip


def test_a_container_that_may_mount_shows_nothing_by_its_mounts(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    environment = simulated_host.environment(runtime_environment)
    settings = make_bundle(WAITING).parent / "mounter.toml"
    settings_with(simulated_host, "runc", settings, "hook")
    bundle = make_bundle(WAITING, GPU_1, edit=lambda config: hook_of_another(config, str(settings), "CAP_SYS_ADMIN"))
    with container(bundle, environment) as made:
        without_rules(made, "195:1")
        with opened(made) as live:
            assert (read_now(live).devices, repair(live).lost) == ((), ())


@pytest.mark.parametrize(
    ("volumes", "lost"),
    [
        pytest.param({"dev/nvidia1": "/volume/node", "proc/driver/nvidia/gpus": "/volume/gpus"}, "", id="elsewhere"),
        pytest.param({HOST_LIBRARY.lstrip("/"): "/volume/library"}, "", id="a library"),
        pytest.param({"dev/nvidia1": "/dev/nvidia1"}, "CAP_MKNOD", id="the node"),
        pytest.param({"": "/dev"}, "CAP_MKNOD", id="a directory of nodes"),
    ],
)
def test_volumes_show_nothing_of_what_a_hook_has_given(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    volumes: dict[str, str],
    lost: str,
) -> None:
    """A pod may name files of the driver and nodes of the host as volumes, which its device cgroup does not open."""
    environment = simulated_host.environment(runtime_environment)
    settings = make_bundle(WAITING).parent / "volumes.toml"
    settings_with(simulated_host, "runc", settings, "hook", REFUSING)
    nodes = settings.with_name("dev")
    nodes.mkdir()
    for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx"):
        os.mknod(nodes / name, 0o666 | stat.S_IFCHR, os.stat(f"/dev/{name}").st_rdev)
    major, minor = map(int, simulated_host.number("nvidia1"))
    os.mknod(nodes / "nvidia1", 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    for name in ("pts", "shm", "mqueue"):
        (nodes / name).mkdir()

    def with_volumes(config: dict[str, Any]) -> None:
        hook_of_another(config, str(settings))
        for name, destination in volumes.items():
            source = simulated_host.directory / name if name else nodes
            config["mounts"].append(
                {"destination": destination, "type": "bind", "source": str(source), "options": ["rbind"]}
            )
            if destination == "/dev":  # in the place of the runtime's own
                config["mounts"] = [
                    config["mounts"].pop(),
                    *(m for m in config["mounts"] if m["destination"] != "/dev"),
                ]
        for names in config["process"]["capabilities"].values():
            names[:] = [name for name in names if name != lost]

    with container(make_bundle(WAITING, GPU_1, edit=with_volumes), environment) as made:
        with opened(made) as live:
            assert (read_now(live).devices, repair(live).lost) == ((), ())
        assert "195:" not in (cgroup_directory(made, "v1") / "devices.list").read_text()


VOLUME_NODE = "dev/nvidia1"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("what", "whole", "after"),
    [
        pytest.param(VOLUME_NODE, True, "", id="a directory where a node is mounted"),
        pytest.param(HOST_LIBRARY.lstrip("/"), True, "", id="a directory where a library is mounted"),
        pytest.param(VOLUME_NODE, False, "unmounted", id="a node that was mounted for another"),
        pytest.param(HOST_LIBRARY.lstrip("/"), False, "unmounted", id="a library that was mounted for another"),
        pytest.param(VOLUME_NODE, False, "another volume", id="a path that is another volume's by now"),
        pytest.param("", False, "unmounted", id="a node of a file system that is gone"),
    ],
)
def test_volumes_whose_paths_mean_something_else_show_nothing(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    what: str,
    whole: bool,
    after: str,
) -> None:
    """A kubelet mounts parts of volumes for the pods that name them; another pod may name these places, and stay."""
    environment = simulated_host.environment(runtime_environment)
    work = make_bundle(WAITING).parent / "places"
    work.mkdir()
    settings = settings_with(simulated_host, "runc", work / "config.toml", "hook", REFUSING)
    place, other = work / "volume/one", work / "volume/two"
    other.parent.mkdir()
    other.touch()
    node = place
    if what:
        place.touch()
        libc.mount(str(simulated_host.directory / what), str(place), None, libc.MS_BIND)
    else:
        place.mkdir()
        libc.mount("none", str(place), "tmpfs", 0)
        node = place / "node"
        os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(*map(int, simulated_host.number("nvidia1"))))
    sources = {node.parent if whole else node: "/dev/nvidia1" if not what else "/volume"}
    if after == "another volume":
        sources[other] = "/other"

    def with_volumes(config: dict[str, Any]) -> None:
        hook_of_another(config, str(settings))
        config["mounts"] += [
            {"destination": path, "type": "bind", "source": str(source), "options": ["rbind"]}
            for source, path in sources.items()
        ]
        for names in config["process"]["capabilities"].values():
            names[:] = [name for name in names if name != "CAP_MKNOD"]

    mounted = True
    try:
        with container(make_bundle(WAITING, GPU_1, edit=with_volumes), environment) as made:
            if after:
                libc.umount2(str(place), libc.MNT_DETACH)
                mounted = False
            if after == "another volume":
                libc.mount(str(other), str(place), None, libc.MS_BIND)
                mounted = True
            with opened(made) as live:
                assert (read_now(live).devices, repair(live).lost) == ((), ())
            assert "195:" not in (cgroup_directory(made, "v1") / "devices.list").read_text()
    finally:
        if mounted:
            libc.umount2(str(place), libc.MNT_DETACH)
