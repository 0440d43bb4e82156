"""``ocigpu explain`` for containers and bundles: what was asked, what is there, what is missing and why."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from containers_lab import VIEWS, WAITING, Made, container, ocigpu, settings_with
from support import requirements
from support.fixtures import MakeBundle
from support.machine import LIBRARIES
from support.product import SimulatedHost

from ocigpu.cli.containers.explain import _print_head
from ocigpu.containers import asked, child
from ocigpu.containers.asked import tell_origin
from ocigpu.containers.believed import Container
from ocigpu.containers.child import ask_child
from ocigpu.containers.explain import Explanation, read_groups
from ocigpu.containers.report import Report
from ocigpu.core.facts import Gpu, HostFacts, ImageFacts
from ocigpu.gpus.request import Request
from ocigpu.system.paths import opened

pytestmark = [pytest.mark.root, pytest.mark.engine]


def explain(host: SimulatedHost, target: str | Path, *words: str) -> str:
    return ocigpu("explain", str(target), "--config", str(host.settings), *words)


def explained(host: SimulatedHost, target: str | Path, *words: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(explain(host, target, "--json", *words))["explanation"]
    return data


def now(data: dict[str, Any]) -> dict[str, str]:
    return {step["what"].split()[1]: step["now"] for step in data["steps"]}


def in_container(made: Made, *words: str) -> None:
    """Do something in the container's mount namespace, with the host's programs."""
    command = ["nsenter", "--target", str(made.found().pid), "--mount", *words]
    subprocess.run(command, check=True)


@pytest.mark.parametrize(("low_level", "cgroup"), VIEWS)
@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_everything_that_a_container_got_is_there(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    mode: str,
    low_level: str,
    cgroup: str,
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "1"})
    settings = settings_with(simulated_host, low_level, bundle.with_name("settings.toml"), mode)
    with container(bundle, runtime_environment, low_level, cgroup, simulated_host, settings) as made:
        data = explained(simulated_host, made.name, "--root", str(made.state))
        assert (data["mode"], data["planned_mode"], data["error"]) == (mode, mode, "")
        assert data["request"]["source"] == "NVIDIA_VISIBLE_DEVICES=1"
        assert data["gpus"] == [simulated_host.gpus[1]]
        assert [step for step in data["steps"] if step["now"] not in ("there", "merged", "")] == []
        states = now(data)
        assert states["/dev/nvidia1"] == states["/usr/bin/nvidia-smi"] == "there"
        assert sum(state == "" for state in states.values()) == (0 if mode == "hook" else 9)  # what is hidden in procfs
        assert data["missing"] == []
        assert [gpu["state"] for gpu in data["report"]["gpus"]] == ["ok"]
        text = explain(simulated_host, made.name, "--root", str(made.state))
        assert "\nmissing\n  nothing\n" in text
        for line in ("given by      " + mode, "request       NVIDIA_VISIBLE_DEVICES=1", "SIMULATED host"):
            assert line in text


def test_what_is_gone_from_a_container_is_named(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0,1"})
    with container(bundle, runtime_environment, "runc", "v1", simulated_host) as made:
        root = f"/proc/{made.found().pid}/root"
        in_container(made, "umount", "/usr/bin/nvidia-smi")
        for name in ("/dev/nvidia0", "/dev/nvidia1"):
            os.unlink(f"{root}{name}")
        os.mknod(f"{root}/dev/nvidia0", 0o666 | 0o020000, os.makedev(1, 3))
        os.unlink(f"{root}{LIBRARIES}/libcuda.so.1")
        os.symlink("elsewhere", f"{root}{LIBRARIES}/libcuda.so.1")
        data = explained(simulated_host, made.name, "--root", str(made.state))
        states = {path: state for path, state in now(data).items() if state not in ("there", "")}
        assert states == {
            "/usr/bin/nvidia-smi": "another",  # the empty file that it was mounted on
            "/dev/nvidia0": "another",
            "/dev/nvidia1": "missing",
            f"{LIBRARIES}/libcuda.so.1": "another",
        }
        assert len(data["missing"]) == 4
        assert [gpu["state"] for gpu in data["report"]["gpus"]] == ["no node", "no node"]


def test_a_request_that_cannot_be_granted_is_explained_with_its_values(
    make_bundle: MakeBundle, simulated_host: SimulatedHost
) -> None:
    cases = {
        "OCIGPU-DEV-1": ({"NVIDIA_VISIBLE_DEVICES": "9"}, '"9"'),
        "OCIGPU-REQ-3": (
            {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_REQUIRE_CUDA": "cuda>=99.1"},
            "needs cuda>=99.1; have cuda 12.4",
        ),
        "OCIGPU-REQ-2": ({"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": "magic"}, '"magic"'),
    }
    for code, (variables, value) in cases.items():
        bundle = make_bundle(WAITING, variables, layout="busybox")
        data = explained(simulated_host, bundle)
        assert data["error"].startswith(f"{code}: ")
        assert value in data["error"]
        assert (data["container"], data["report"], data["steps"]) == (None, None, [])
        text = explain(simulated_host, bundle)
        assert f"nothing: {code}: " in text
        assert "hint: " in text


def test_capabilities_that_were_not_asked_for_are_told(make_bundle: MakeBundle, simulated_host: SimulatedHost) -> None:
    bundle = make_bundle(
        WAITING, {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": "utility"}, layout="busybox"
    )
    data = explained(simulated_host, bundle)
    capabilities = {one["name"]: one for one in data["capabilities"]}
    assert {name for name, one in capabilities.items() if one["asked"]} == {"utility"}
    assert capabilities["compute"]["found"] > 0
    assert "libnvidia-nscq" in capabilities["utility"]["absent"]
    assert not any("libcuda" in step["what"] for step in data["steps"])
    assert all(step["now"] == "" for step in data["steps"])
    assert "what it would get, and why" in explain(simulated_host, bundle)


def test_a_container_that_asks_for_nothing_has_nothing_to_explain(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(WAITING, layout="busybox")
    with container(bundle, runtime_environment, "runc", "v1") as made:
        text = explain(simulated_host, made.name, "--root", str(made.state))
        assert "request    none: it requests no GPU" in text
        assert "missing" not in text
        assert explain(simulated_host, bundle, "--root", str(made.state)) == text


def test_why_mode_spec_leaves_a_container_to_the_hook(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    def share(config: dict[str, Any]) -> None:
        config["mounts"].append({"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]})

    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0"}, edit=share)
    settings = settings_with(simulated_host, "runc", bundle.with_name("settings.toml"), "spec")
    data = json.loads(ocigpu("explain", str(bundle), "--json", "--config", str(settings)))["explanation"]
    assert data["planned_mode"] == "hook"
    assert data["spec"].startswith("needs the hook: ")
    assert "is in or below what is mounted on /usr" in data["spec"]


def test_compatibility_libraries_are_told(make_bundle: MakeBundle, simulated_host: SimulatedHost) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0"})
    assert "the image brings no CUDA compatibility libraries" in explain(simulated_host, bundle)
    directory = bundle / "rootfs/usr/local/cuda/compat"
    directory.mkdir(parents=True)
    for version, expected in (
        ("470.1.1", "not used: its libcuda is not newer"),
        ("560.28.03", "used: its libcuda suits"),
    ):
        (directory / f"libcuda.so.{version}").write_bytes(b"")
        assert expected in explained(simulated_host, bundle)["compat"]
    assert "needs the hook: the image has CUDA compatibility libraries" in explained(simulated_host, bundle)["spec"]


@pytest.mark.parametrize(
    ("words", "status", "code"),
    [
        pytest.param(("dev-99",), 2, "OCIGPU-ARG-1", id="a mistyped code"),
        pytest.param(("OCIGPU-XX-1",), 2, "OCIGPU-ARG-1", id="a code of no area"),
        pytest.param(("nobody",), 1, "OCIGPU-CTR-1", id="no container"),
        pytest.param(("/nowhere/at/all",), 1, "OCIGPU-SPEC-1", id="no bundle"),
    ],
)
def test_what_cannot_be_explained_is_said(
    simulated_host: SimulatedHost, words: tuple[str, ...], status: int, code: str
) -> None:
    text = ocigpu("explain", *words, "--config", str(simulated_host.settings), "--root", "/nowhere", status=status)
    assert code in text
    assert len(text.splitlines()) == 2


def test_codes_are_explained_without_a_host() -> None:
    assert "  What to do: Give the whole id.\n" in ocigpu("explain", "ctr-2")


def test_hostile_text_is_shown_escaped(make_bundle: MakeBundle, simulated_host: SimulatedHost) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0\x1b[2J\n"}, layout="busybox")
    text = explain(simulated_host, bundle)
    assert "\x1b" not in text
    assert "OCIGPU-REQ-1" in text


@contextmanager
def never_answering(path: Path) -> Iterator[None]:
    """A file system in user space (fuse(4)) whose process never reads a request, mounted on a directory."""
    requirements.require("" if os.path.exists("/dev/fuse") else "no /dev/fuse")
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={fd},rootmode=40000,user_id=0,group_id=0"
        subprocess.run(["mount", "-i", "-t", "fuse", "-o", options, "test", path], check=True, pass_fds=[fd])
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", path], check=True)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("engine", "mode", "hint"),
    [
        ("docker", "hook", "ocigpu engine configure docker --gpus-hook"),
        ("docker", "vendor", "ocigpu engine configure docker --gpus-hook"),
        ("docker", "", "GPUs come with the runtime ocigpu"),
        ("podman", "hook", "GPUs come with the runtime ocigpu"),
    ],
)
def test_what_a_container_has_not_is_not_called_granted(
    engine: str, mode: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hook of docker run --gpus failed: verify says that it was granted no GPU."""
    made = Container("0" * 64, "web", engine, "runc", "running", 1, "/b", "/r", "/s")
    report = Report(made, mode, *((),) * 8, unanswered="NVIDIA_VISIBLE_DEVICES=all")
    request = Request(selection="all", source="NVIDIA_VISIBLE_DEVICES=all")
    facts = HostFacts(gpus=(Gpu(index=0, uuid="GPU-0", minor=0, bus_id="00000000:01:00.0", model="L40S"),))
    shown = Explanation("/b", made, mode, "hook", request, "", ("GPU-0",), ImageFacts(), "", "", (), (), report, (),
                        "", "", ())  # fmt: skip
    for one, granted in ((shown, False), (shown._replace(report=None, mode="hook"), True)):
        _print_head(one, facts)
        text = " ".join(capsys.readouterr().out.split())
        assert ("granted GPU 0" in text, "would get GPU 0" in text) == (granted, not granted)
        assert ("granted no GPU" in text, hint in text) == (not granted, not granted)


def test_a_name_that_a_process_chose_puts_it_into_no_group() -> None:
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    with opened(os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)) as proc_fd:
        groups = read_groups(proc_fd)
        assert os.getgid() in groups
        try:
            name.write_bytes(b"x\rGroups:\t4711")
            assert read_groups(proc_fd) == groups
        finally:
            name.write_bytes(before)


@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_a_root_directory_that_never_answers_is_said(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(child, "ask_child", partial(ask_child, seconds=0.2))
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0"}, layout="busybox")
    settings = settings_with(simulated_host, "runc", bundle.with_name("settings.toml"), mode)
    with never_answering(bundle / "rootfs"):
        said = ocigpu("explain", str(bundle), "--config", str(settings))
        assert f"OCIGPU-SPEC-3: open rootfs {bundle}/rootfs: it took too long" in said
        error = ocigpu("diff", str(bundle), "--config", str(settings), status=1)
        assert "OCIGPU-SPEC-3" in error
        assert "it took too long" in error


@pytest.mark.parametrize("name", ["dev-99", "INT-77"])
def test_a_container_may_be_named_like_a_code(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], name: str
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0"}, layout="busybox")
    with container(bundle, runtime_environment, host=simulated_host, name=name) as made:
        assert explained(simulated_host, name, "--root", str(made.state))["container"]["id"] == name


ORIGINS = {
    "nothing": ("", ""),
    "a variable": ("NVIDIA_VISIBLE_DEVICES=0", "config.json does not show whether an image or a command line"),
    "mounts": ("volume mounts below /var/run/nvidia-container-devices", "mounts of /dev/null in its configuration"),
    "an annotation": ("annotation cdi.k8s.io/x=nvidia.com/gpu=0", "an annotation: its image, its pod or"),
    "an old image": ("CUDA_VERSION=9.0 without NVIDIA_VISIBLE_DEVICES", "its image: an old one of CUDA"),
}


@pytest.mark.parametrize(("source", "expected"), ORIGINS.values(), ids=ORIGINS.keys())
def test_who_asked_is_told_as_far_as_it_can_be(source: str, expected: str) -> None:
    assert tell_origin(Request(source=source), {}, None).startswith(expected)


@pytest.mark.parametrize(
    ("requests", "told"),
    [
        ([{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}], "docker run --gpus"),
        ([{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=0", "x.com/y=z"]}],
         "docker run --device nvidia.com/gpu=0 --device x.com/y=z"),
        ([{"Driver": "cdi", "DeviceIDs": ["a.b/c=0"]}, {"Driver": "nvidia", "Capabilities": [["gpu"]]}],
         "docker run --gpus --device a.b/c=0"),
        ([7, {"Driver": "cdi", "DeviceIDs": None}], ""),
        (None, ""),
    ],
)  # fmt: skip
def test_dockers_option_for_devices_is_told(requests: object, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker 29 has a container with --device as one with --gpus: a request for devices, of the driver "cdi"."""
    monkeypatch.setattr(asked, "read_engine_file", lambda _path: {"DeviceRequests": requests})
    made = Container("0" * 64, "web", "docker", "runc", "running", 1, "/b", "/r", "/s")
    assert asked.tell_docker_options({"mounts": []}, made) == told
