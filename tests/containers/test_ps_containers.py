"""``ocigpu ps``: the GPUs of containers of runc and crun, as their nodes and their cgroup have them now."""

import json
import os
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from containers_lab import VIEWS, WAITING, Made, cgroup_directory, container, ocigpu, settings_with
from support import reapply
from support.fixtures import MakeBundle
from support.process import run
from support.product import SimulatedHost
from support.runtimes import set_cgroup, view_of

from ocigpu.containers.child import ask_child, ask_each
from ocigpu.containers.report import find_holders, make_reports, read_mode
from ocigpu.containers.rules import read_allowed, read_granted
from ocigpu.core.errors import OcigpuError, SpecError
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.system.proc import read_stat
from ocigpu.system.settings_file import read_settings

pytestmark = [pytest.mark.root, pytest.mark.engine]


def ps(host: SimulatedHost, made: Made, *words: str) -> str:
    return ocigpu("ps", "--config", str(host.settings), "--root", str(made.state), *words)


def listed(host: SimulatedHost, made: Made, *words: str) -> dict[str, Any]:
    (found,) = json.loads(ps(host, made, "--json", *words))["containers"]
    return dict(found)


def states(found: dict[str, Any]) -> dict[str, str]:
    return {gpu["mig"] or str(gpu["index"]): gpu["state"] for gpu in found["gpus"]}


@pytest.mark.parametrize(
    ("mode", "low_level", "cgroup"),
    [("hook", "runc", "v1"), ("hook", "crun", "v2"), ("spec", "runc", "v2"), ("spec", "crun", "v2")],
)
def test_the_gpus_of_a_container_and_what_it_loses(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    mode: str,
    low_level: str,
    cgroup: str,
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0,2"}, layout="busybox")
    settings = settings_with(simulated_host, low_level, bundle.with_name("settings.toml"), mode)
    with container(bundle, runtime_environment, low_level, cgroup, simulated_host, settings) as made:
        found = listed(simulated_host, made)
        assert (found["id"], found["engine"], found["runtime"], found["status"], found["mode"]) == (
            made.name, "", low_level, "running", mode,
        )  # fmt: skip
        assert [(gpu["uuid"], gpu["state"]) for gpu in found["gpus"]] == [
            (simulated_host.gpus[0], "ok"),
            (simulated_host.gpus[2], "ok"),
        ]
        paths = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia0", "/dev/nvidia2"}
        assert {device["path"] for device in found["devices"]} == paths
        assert all(device["granted"] and device["inside"] and device["allowed"] for device in found["devices"])
        assert (found["lost"], found["beyond"], found["notes"], found["processes"]) == ([], [], [], [])

        narrow = json.loads((bundle / "config.json").read_text())
        rules = narrow["linux"]["resources"]["devices"]
        rules[:] = [rule for rule in rules if (rule.get("major"), rule.get("minor")) != (195, 0)]
        other = bundle / "narrow.json"
        other.write_text(json.dumps(narrow))
        words = [sys.executable, reapply.__file__, cgroup, narrow["linux"]["cgroupsPath"].strip("/"), other]
        run([*view_of(cgroup), *words], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        found = listed(simulated_host, made)
        assert states(found) == {"0": "lost", "2": "ok"}
        assert found["lost"] == ["/dev/nvidia0"]
        text = ps(simulated_host, made)
        assert f"note: {made.name}: lost: the device cgroup refuses /dev/nvidia0 (ocigpu repair)" in text
        assert "SIMULATED host" in text

        node = Path(f"/proc/{made.found().pid}/root/dev/nvidia2")
        if mode == "spec":
            node.unlink()
            assert states(listed(simulated_host, made)) == {"0": "lost", "2": "no node"}


def test_nothing_is_in_the_containers_cgroup_afterwards(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0"}, layout="busybox")
    with container(bundle, runtime_environment, "runc", "v1", simulated_host) as made:
        directory = cgroup_directory(made, "v1")
        before = (directory / "devices.list").read_text()
        states(listed(simulated_host, made))
        assert (directory / "cgroup.procs").read_text().split() == [str(made.found().pid)]
        assert (directory / "devices.list").read_text() == before


def test_mig_devices_are_listed_instead_of_their_gpu(
    make_bundle: MakeBundle, mig_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0:1,1"}, layout="busybox")
    with container(bundle, runtime_environment, "runc", "v1", mig_host) as made:
        found = listed(mig_host, made)
        assert [(gpu["mig"], gpu["uuid"], gpu["state"]) for gpu in found["gpus"]] == [
            ("0:1", mig_host.mig_devices[1][0], "ok"),
            ("", mig_host.gpus[1], "ok"),
        ]
        minor = mig_host.mig_devices[1][2]
        major = next(device["major"] for device in found["devices"] if device["minor"] == minor)
        (cgroup_directory(made, "v1") / "devices.deny").write_text(f"c {major}:{minor} rw")
        assert states(listed(mig_host, made)) == {"0:1": "lost", "1": "ok"}


def test_stopped_containers_and_those_without_gpus_come_with_all(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(["true"], {"NVIDIA_VISIBLE_DEVICES": "1"}, layout="busybox")
    settings = settings_with(simulated_host, "runc", bundle.with_name("settings.toml"), "spec")
    with container(bundle, runtime_environment, "runc", "v1", simulated_host, settings) as made:
        while made.found().pid:
            pass
        assert "no running container with a GPU (1 container found)" in ps(simulated_host, made)
        found = listed(simulated_host, made, "--all")
        assert (found["status"], found["pid"], states(found)) == ("stopped", 0, {"1": ""})
        plain = make_bundle(WAITING, layout="busybox")
        other = plain.with_name(f"{plain.name}.state")
        with container(plain, runtime_environment, "runc", "v1") as second:
            assert json.loads(ps(simulated_host, second, "--json"))["containers"] == []
            both = json.loads(ps(simulated_host, made, "--all", "--json", "--root", str(other)))["containers"]
            assert {one["id"]: states(one) for one in both} == {made.name: {"1": ""}, second.name: {}}


def test_a_container_with_every_device_has_the_gpus_whose_nodes_it_has(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    """As docker run --privileged and --device make them: nobody has asked for GPUs."""
    status = os.stat(simulated_host.directory / "dev" / "nvidia3")

    def edit(config: dict[str, Any]) -> None:
        config["linux"]["resources"]["devices"] = [{"allow": True, "access": "rwm"}]
        config["linux"]["devices"] = [
            {"path": "/dev/nvidia3", "type": "c", "major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}
        ]

    bundle = make_bundle(WAITING, layout="busybox", edit=edit)
    with container(bundle, runtime_environment, "runc", "v1") as made:
        found = listed(simulated_host, made)
        assert (found["mode"], states(found), found["lost"], found["beyond"]) == ("", {"3": "ok"}, [], [])


def test_a_node_that_was_never_allowed_is_not_lost(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    source = simulated_host.directory / "dev" / "nvidia3"

    def edit(config: dict[str, Any]) -> None:
        options = ["bind"]
        config["mounts"].append(
            {"destination": "/dev/nvidia3", "type": "bind", "source": str(source), "options": options}
        )

    bundle = make_bundle(WAITING, layout="busybox", edit=edit)
    with container(bundle, runtime_environment, "runc", "v1") as made:
        found = listed(simulated_host, made)
        assert (states(found), found["lost"]) == ({"3": "denied"}, [])
        major, minor = simulated_host.number("nvidia3")
        (cgroup_directory(made, "v1") / "devices.allow").write_text(f"c {major}:{minor} rw")
        found = listed(simulated_host, made)
        assert (states(found), found["beyond"]) == ({"3": "ok"}, ["/dev/nvidia3"])


def test_a_container_of_the_vendors_hook_is_shown_and_what_it_loses(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path
) -> None:
    """That hook makes nodes and changes the cgroup without a word in config.json: so what is refused later is lost."""
    hook = work_directory / "nvidia-container-runtime-hook"
    hook.write_text("#!/bin/sh\ncat >/dev/null\n")
    hook.chmod(0o755)

    def edit(config: dict[str, Any]) -> None:
        source = str(simulated_host.directory / "dev" / "nvidia3")
        config["mounts"].append({"destination": "/dev/nvidia3", "type": "bind", "source": source, "options": ["bind"]})
        config["hooks"] = {"prestart": [{"path": str(hook), "args": [hook.name, "prestart"]}]}

    bundle = make_bundle(WAITING, layout="busybox", edit=edit)
    with container(bundle, runtime_environment, "runc", "v1") as made:
        major, minor = simulated_host.number("nvidia3")
        directory = cgroup_directory(made, "v1")
        (directory / "devices.allow").write_text(f"c {major}:{minor} rw")
        found = listed(simulated_host, made)
        assert (found["mode"], states(found), found["beyond"]) == ("vendor", {"3": "ok"}, [])
        (directory / "devices.deny").write_text(f"c {major}:{minor} rw")
        found = listed(simulated_host, made)
        assert (states(found), found["lost"]) == ({"3": "lost"}, ["/dev/nvidia3"])


@pytest.mark.rest
def test_what_was_attached_and_detached_is_neither_lost_nor_too_much(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "3"}, layout="busybox")
    settings = settings_with(simulated_host, "runc", bundle.with_name("settings.toml"), "spec")
    with container(bundle, runtime_environment, "runc", "v1", simulated_host, settings) as made:
        words = ("--root", str(made.state), "--config", str(simulated_host.settings))
        ocigpu("attach", made.name, "--gpu", "1", *words)
        found = listed(simulated_host, made)
        assert (states(found), found["lost"], found["beyond"]) == ({"1": "ok", "3": "ok"}, [], [])
        assert (found["attached"], found["detached"]) == ([simulated_host.gpus[1]], [])
        assert f"attached after its start: {simulated_host.gpus[1]}" in ps(simulated_host, made)
        ocigpu("detach", made.name, "--gpu", "3", *words)
        found = listed(simulated_host, made)
        assert (states(found), found["lost"], found["beyond"]) == ({"1": "ok", "3": "detached"}, [], [])
        explained = json.loads(ocigpu("explain", made.name, "--json", *words))["explanation"]
        assert {step["what"].split()[1] for step in explained["steps"] if step["now"] not in ("there", "")} == {
            "/dev/nvidia3"
        }
        assert explained["missing"] == []
        major, minor = simulated_host.number("nvidia1")
        (cgroup_directory(made, "v1") / "devices.deny").write_text(f"c {major}:{minor} rw")
        (cgroup_directory(made, "v1") / "devices.allow").write_text(f"c {major}:3 rw")
        found = listed(simulated_host, made)
        assert (states(found)["1"], found["lost"], found["beyond"]) == ("lost", ["/dev/nvidia1"], ["/dev/nvidia3"])
        ocigpu("detach", made.name, "--gpu", "1", *words)
        assert listed(simulated_host, made, "--all")["attached"] == []


def test_a_paused_container_is_asked_on_v1_and_left_alone_on_v2(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    for low_level, cgroup, expected in (("runc", "v1", "ok"), ("crun", "v2", "")):
        bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0"}, layout="busybox")
        with container(bundle, runtime_environment, low_level, cgroup, simulated_host) as made:
            made.do("pause", made.name)
            found = listed(simulated_host, made)
            assert (found["status"], states(found)) == ("paused", {"0": expected})
            assert ("is paused" in str(found["notes"])) == (expected == "")
            made.do("resume", made.name)


def test_what_a_cgroup_allows_is_told_for_any_number(
    make_bundle: MakeBundle, runtime_environment: dict[str, str]
) -> None:
    rules = [{"allow": False, "access": "rwm"}, {"allow": True, "type": "c", "major": 195, "minor": 7, "access": "r"}]

    def edit(config: dict[str, Any]) -> None:
        config["linux"]["resources"]["devices"] = rules

    bundle = make_bundle(WAITING, layout="busybox", edit=edit)
    numbers = [(1, 3), (195, 7), (195, 8), (4095, 1048575)]
    for low_level, cgroup in VIEWS:
        set_cgroup(bundle, f"{bundle.parent.parent.name}-{low_level}-{cgroup}")
        with container(bundle, runtime_environment, low_level, cgroup) as made:
            (allowed,) = read_allowed([made.found()], numbers)
            assert (allowed.numbers, allowed.unknown) == ({(1, 3)}, "")
    config = json.loads((bundle / "config.json").read_text())
    assert read_granted(config, numbers) == (frozenset({(1, 3)}), False, True)


def test_where_no_nodes_can_be_made_nothing_is_known_of_any_container(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with container(make_bundle(WAITING, layout="busybox"), runtime_environment) as made:
        monkeypatch.setattr(os, "mknod", refuse)
        allowed = read_allowed([made.found()] * 3, [(1, 3)])
    assert {one.unknown for one in allowed} == {"its device cgroup cannot be queried: Operation not permitted"}


def test_processes_that_hold_a_device_are_found_by_what_their_descriptors_are(
    make_bundle: MakeBundle, runtime_environment: dict[str, str]
) -> None:
    """A simulated node cannot be opened: the node with the number of /dev/random stands for it, under another name."""
    shell = "mknod /tmp/gpu c 1 8; exec 7</tmp/gpu; rm /tmp/gpu; sleep 1000 & exec 7<&-; exec sleep 1001 </dev/zero"
    bundle = make_bundle(["sh", "-c", f"exec </dev/zero; {shell}"], layout="busybox")
    with container(bundle, runtime_environment, "runc", "v1") as made:
        commands = {}
        while len(commands) < 2:
            ((held, notes),) = find_holders([made.found()], {(1, 8): "GPU 0", (1, 5): "GPU 1"}).values()
            assert notes == ()
            commands = {
                tuple(sorted(process.devices)): Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[1:2]
                for process in held
                if process.command == "sleep"
            }
        assert commands == {("GPU 0",): [b"1000"], ("GPU 1",): [b"1001"]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ""),
        ({"hooks": {"prestart": [{"path": "/x/ocigpu-hook", "args": ["ocigpu-hook", "prestart"]}]}}, "hook"),
        ({"hooks": {"createRuntime": [{"path": "/x/other", "args": ["ocigpu-hook", "prestart"]}]}}, "hook"),
        ({"hooks": {"prestart": [{"path": "/no/nvidia-container-runtime-hook", "args": ["x", "prestart"]}]}}, "vendor"),
        ({"hooks": {"createContainer": [{"path": "/no/nvidia-cdi-hook"}]}}, "cdi"),
        ({"hooks": {"createContainer": [{"path": "/x/ocigpu-hook", "args": ["ocigpu-hook", "chmod"]}]}}, "cdi"),
        ({"annotations": {"cdi.k8s.io/x": "nvidia.com/gpu=0"}}, "cdi"),
        ({"annotations": {"ocigpu/declared": "{}"}}, "spec"),
        ({"hooks": {"prestart": [1, {"path": 1, "args": [1]}, {"args": {}}]}, "annotations": []}, ""),
        ({"hooks": []}, ""),
        ({"hooks": {"prestart": [{"path": "/a\0b", "args": ["\0"]}, {"path": "../ocigpu-hook"}]}}, ""),
    ],
)
def test_the_mode_is_told_by_the_config(config: dict[str, Any], expected: str) -> None:
    assert read_mode(config) == expected


def test_a_look_that_never_ends_is_given_up(tmp_path: Path) -> None:
    """A file system in user space need not answer: a FIFO that nobody writes stands for it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(TimeoutError):
        ask_child(fifo.read_text, 0.2)
    with pytest.raises(OSError, match="killed"):
        ask_child(lambda: os.kill(os.getpid(), 9))
    with pytest.raises(FileNotFoundError) as caught:
        ask_child(lambda: os.stat("/nowhere/at/all").st_mode)
    assert caught.value.filename == "/nowhere/at/all"

    def refuse() -> None:
        raise SpecError("OCIGPU-SPEC-3", "no root", "look")

    with pytest.raises(OcigpuError) as refused:
        ask_child(refuse)
    assert (refused.value.code, refused.value.message, refused.value.hint) == ("OCIGPU-SPEC-3", "no root", "look")
    assert ask_child(lambda: stat.S_ISDIR(os.stat("/").st_mode)) is True


def test_one_child_looks_for_many_and_what_ends_it_is_asked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[int] = []
    fork = os.fork

    def count() -> int:
        forked.append(1)
        return fork()

    monkeypatch.setattr(os, "fork", count)

    def fail() -> None:
        raise FileNotFoundError(2, "gone", "/x")

    numbers = [partial(int, str(number)) for number in range(20)]
    asks = ask_each([*numbers, fail])
    assert [ask() for ask in asks[:20]] == [*range(20)]
    with pytest.raises(FileNotFoundError):
        asks[20]()
    assert len(forked) == 1
    asks = ask_each([*numbers, lambda: os.kill(os.getpid(), 9)])
    assert [ask() for ask in asks[:20]] == [*range(20)]
    with pytest.raises(OSError, match="killed"):
        asks[20]()
    assert ask_each([]) == []


@pytest.mark.rest
def test_many_that_hang_take_no_longer_than_one() -> None:
    """And those that answer are heard, before and after them, also if their answers fill the pipe."""
    begin = time.monotonic()
    looks = [partial(str, "x" * 300_000), *(partial(time.sleep, 600) for _ in range(70)), partial(int, "7")]
    asks = ask_each(looks, 10.0)
    assert time.monotonic() - begin < 60  # 710 s one after another
    assert (asks[0](), asks[-1]()) == ("x" * 300_000, 7)
    for ask in asks[1:-1]:
        with pytest.raises(TimeoutError, match="it took too long"):
            ask()


def test_containers_are_asked_by_a_handful_of_children(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that shares the cgroup of this process is asked where it is, not in the cgroup of the one before it."""
    environment = simulated_host.environment(runtime_environment, "runc")
    settings = read_settings(environment["OCIGPU_CONFIG"])
    facts = read_host_facts(settings)
    with ExitStack() as stack:
        made = []
        for gpu in ("0", "1", "0,1"):
            bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": gpu}, layout="busybox")
            made.append(stack.enter_context(container(bundle, environment, "runc", "v1", simulated_host)))
        found = [one.found() for one in made]
        sleeping = stack.enter_context(subprocess.Popen(["sleep", "1000"]))
        stack.callback(sleeping.kill)
        start = read_stat(f"/proc/{sleeping.pid}/stat").start
        found.insert(1, found[0]._replace(pid=sleeping.pid, start_time=start, state_file="/nowhere/state.json"))
        forked: list[int] = []
        fork = os.fork

        def count() -> int:
            forked.append(1)
            return fork()

        monkeypatch.setattr(os, "fork", count)
        reports = make_reports([found[0], *found[2:]], facts, settings)
        gpus = [{gpu.index: gpu.state for gpu in report.gpus} for report in reports]
        assert gpus == [{0: "ok"}, {1: "ok"}, {0: "ok", 1: "ok"}]
        assert len(forked) <= 4
        allowed = read_allowed(found, [(195, 0), (195, 1)])
        assert [len(one.numbers) for one in allowed] == [1, 2, 1, 2]


def test_a_hook_under_the_vendors_name_is_told_by_its_program(tmp_path: Path) -> None:
    path = tmp_path / "nvidia-container-runtime-hook"
    config = {"hooks": {"prestart": [{"path": str(path), "args": ["nvidia-container-runtime-hook", "prestart"]}]}}
    path.write_text("#!/bin/sh\nexec ocigpu-hook\n")
    assert read_mode(config) == "hook"
    path.write_bytes(b"\x7fELF ocigpu")  # compiled, and copied: packaging/stub.h
    assert read_mode(config) == "hook"
    path.write_bytes(b"\x7fELF")
    assert read_mode(config) == "vendor"
    path.unlink()
    os.mkfifo(path)  # opening it would wait for ever
    assert read_mode(config) == "vendor"
    path.unlink()
    path.symlink_to("/usr/bin/ocigpu-hook")
    assert read_mode(config) == "hook"
