"""Containers of real engines, found without asking them: names, GPUs, and who asked for these."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from containers_lab import WAITING, ocigpu
from support import machine, requirements
from support.engines import SYSTEM_PATH, Containerd, Docker, start_containerd, start_docker
from support.fixtures import IMAGE
from support.podman import Podman, make_podman
from support.process import run, stop, wait_for
from support.product import PROGRAMS, RUNTIME, SimulatedHost, install_vendor_names
from support.runtimes import container_id, view_of

pytestmark = [pytest.mark.root, pytest.mark.engine, pytest.mark.rest]

HOST_NETWORK = 2


def ps(host: SimulatedHost, *roots: str, words: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    options = [word for root in roots for word in ("--root", root)]
    text = ocigpu("ps", "--json", "--config", str(host.settings), *options, *words)
    return {one["name"]: one for one in json.loads(text)["containers"]}


def indices(found: dict[str, Any]) -> list[tuple[int, str]]:
    return [(gpu["index"], gpu["state"]) for gpu in found["gpus"]]


def explained(host: SimulatedHost, target: str, root: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(
        ocigpu("explain", target, "--json", "--config", str(host.settings), "--root", root)
    )["explanation"]
    return data


@pytest.fixture(scope="module", params=["v1", "v2"])
def docker(
    request: pytest.FixtureRequest, session_directory: Path, image: Path, simulated_host: SimulatedHost
) -> Iterator[Docker]:
    """A dockerd on a machine with cgroup v1 or v2, with our hook under the vendor's name on its PATH."""
    requirements.require(requirements.programs("dockerd", "docker", "containerd", "runc"))
    names = install_vendor_names(session_directory / f"found-bin-{request.param}", simulated_host.settings)
    env = {"PATH": f"{names}:{SYSTEM_PATH}", "OCIGPU_CONFIG": str(simulated_host.settings)}
    directory = session_directory / f"found-docker-{request.param}"
    with start_docker(directory, image, {"ocigpu": str(RUNTIME)}, env, view=view_of(request.param)) as engine:
        yield engine


def test_containers_of_docker_have_their_names_gpus_and_reasons(docker: Docker, simulated_host: SimulatedHost) -> None:
    ways = {
        "by-env": ("--runtime=ocigpu", "--env=NVIDIA_VISIBLE_DEVICES=0,2"),
        "by-gpus": ("--gpus", '"device=1"'),
        "by-device": (f"--device={simulated_host.directory}/dev/nvidia3:/dev/nvidia3",),
        "without": (),
    }
    root = f"{docker.socket.parent}/exec/runtime-*/*"
    ids = {}
    try:
        for name, way in ways.items():
            words = ("run", "--detach", "--network=none", f"--name={name}", *way, IMAGE)
            ids[name] = docker(*words).stdout.strip()
        found = ps(simulated_host, root)
        assert {name: (one["engine"], one["mode"], indices(one)) for name, one in found.items()} == {
            "by-env": ("docker", "hook", [(0, "ok"), (2, "ok")]),
            "by-gpus": ("docker", "hook", [(1, "ok")]),
            "by-device": ("docker", "", [(3, "ok")]),
        }
        assert {name: one["id"] for name, one in found.items()} == {name: ids[name] for name in found}
        assert set(ps(simulated_host, root, words=("--all",))) == set(ways)
        assert all(one["lost"] == one["beyond"] == one["notes"] == [] for one in found.values())
        assert ids["by-env"][:12] in ocigpu("ps", "--config", str(simulated_host.settings), "--root", root)

        asked = {name: explained(simulated_host, name, root)["asked_by"] for name in ("by-env", "by-gpus", "without")}
        assert asked == {"by-env": "docker run --env", "by-gpus": "docker run --gpus", "without": ""}
        data = explained(simulated_host, ids["by-env"][:10], root)
        assert [step for step in data["steps"] if step["now"] not in ("there", "")] == []
        assert (data["missing"], data["error"]) == ([], "")
        assert ocigpu("diff", "without", "--config", str(simulated_host.settings), "--root", root) == ""
        changes = json.loads(
            ocigpu("diff", "by-env", "--json", "--config", str(simulated_host.settings), "--root", root)
        )
        assert changes["mode"] == "hook"
        paths = [change["path"] for change in changes["changes"]]
        assert sum(path.startswith("/linux/resources/devices/") for path in paths) == len(paths) - 1 == 5
        assert any(path.startswith("/hooks") for path in paths)
    finally:
        docker("rm", "--force", *ids.values())


def test_an_image_that_asks_is_told_from_the_command_line(
    docker: Docker, simulated_host: SimulatedHost, work_directory: Path
) -> None:
    root = f"{docker.socket.parent}/exec/runtime-*/*"
    ids = []
    try:
        container = docker("create", "--runtime=runc", IMAGE).stdout.strip()
        ids.append(container)
        docker("commit", "--change", "ENV NVIDIA_VISIBLE_DEVICES=1", container, "localhost/asks:1")
        for name, more, expected in (
            ("by-image", (), "its image"),
            (
                "over-image",
                ("--env=NVIDIA_VISIBLE_DEVICES=0",),
                "docker run --env, over NVIDIA_VISIBLE_DEVICES=1 of its image",
            ),
        ):
            words = ("run", "--detach", "--network=none", "--runtime=ocigpu", f"--name={name}", *more)
            ids.append(docker(*words, "localhost/asks:1").stdout.strip())
            assert explained(simulated_host, name, root)["asked_by"] == expected
            for manifest_named in (False, True):
                with as_containerd_keeps_it(docker.socket.parent / "data", ids[-1], manifest_named) as blobs:
                    assert explained(simulated_host, name, root)["asked_by"] == expected
                    for blob in blobs:
                        blob.write_bytes(blob.read_bytes() + b" ")  # no longer what its name says
                    assert "cannot be read" in explained(simulated_host, name, root)["asked_by"]
    finally:
        docker("rm", "--force", *ids)


@contextmanager
def as_containerd_keeps_it(data_root: Path, container: str, manifest_named: bool) -> Iterator[list[Path]]:
    """Keep a container's image as Docker 29 does, in containerd's content store: index, manifest, configuration.

    This machine's Docker has no such store: its own files are rewritten, and put back.
    """
    file = data_root / "containers" / container / "config.v2.json"
    before = file.read_bytes()
    about = json.loads(before)
    store = data_root / "containerd/daemon/io.containerd.content.v1.content/blobs/sha256"
    store.mkdir(parents=True)
    own = data_root / "image" / about["Driver"] / "imagedb/content/sha256" / about["Image"].removeprefix("sha256:")
    blobs = []

    def put(text: bytes) -> str:
        blobs.append(store / hashlib.sha256(text).hexdigest())
        blobs[-1].write_bytes(text)
        return f"sha256:{blobs[-1].name}"

    manifest = put(json.dumps({"config": {"digest": put(own.read_bytes())}, "layers": []}).encode())
    other = {"digest": f"sha256:{'0' * 64}", "platform": {"architecture": "unknown"}}
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    mine = {"digest": manifest, "platform": {"architecture": architecture}}
    about["Image"] = put(json.dumps({"manifests": [other, mine]}).encode())
    if manifest_named:
        about["ImageManifest"] = {"digest": manifest}
    moved = own.rename(own.with_name("moved"))
    file.write_text(json.dumps(about))
    try:
        yield blobs
    finally:
        file.write_bytes(before)
        moved.rename(own)
        shutil.rmtree(data_root / "containerd")


@pytest.fixture(scope="module")
def containerd(session_directory: Path, image: Path, simulated_host: SimulatedHost) -> Iterator[Containerd]:
    requirements.require(requirements.programs("containerd", "ctr", "runc"))
    env = {"OCIGPU_CONFIG": str(simulated_host.settings)}
    directory = session_directory / "found-containerd"
    with start_containerd(directory, image, {"ocigpu": str(RUNTIME)}, env, sandbox_image=IMAGE) as engine:
        yield engine


def test_a_container_of_containerd_is_found_by_its_id(containerd: Containerd, simulated_host: SimulatedHost) -> None:
    name = container_id()
    words = ("run", "--detach", "--snapshotter", containerd.snapshotter, "--env", "NVIDIA_VISIBLE_DEVICES=5")
    words += ("--runtime", "io.containerd.runc.v2", "--runc-binary", str(RUNTIME), "--null-io")
    try:
        containerd(*words, "--fifo-dir", str(containerd.directory / "fifo"), IMAGE, name)
        found = ps(simulated_host)[name]  # where every containerd keeps the states of its containers
        assert (found["engine"], found["mode"], indices(found)) == ("containerd", "hook", [(5, "ok")])
        assert f"/runc/{containerd.namespace}/{name}/" in found["state_file"]
    finally:
        containerd("task", "kill", "--signal", "SIGKILL", name, check=False)
        containerd("task", "delete", name, check=False)
        containerd("container", "delete", name, check=False)


def test_a_container_of_a_pod_is_found_by_pod_and_name(
    containerd: Containerd, simulated_host: SimulatedHost, session_directory: Path
) -> None:
    pytest.importorskip("grpc", reason="not installed: grpcio")
    pod = container_id()
    config = {
        1: {1: pod, 2: container_id(), 3: "default"},
        3: str(containerd.directory / "logs"),
        8: {1: f"/{session_directory.name}-pods", 2: {1: {1: HOST_NETWORK}}},
    }
    (answer,) = containerd.cri(("RuntimeService/RunPodSandbox", {1: config, 2: "ocigpu"}))
    sandbox = answer["1"]
    try:
        container = {1: {1: "main"}, 2: {1: IMAGE}, 6: [{1: "NVIDIA_VISIBLE_DEVICES", 2: "6"}]}
        (made,) = containerd.cri(("RuntimeService/CreateContainer", {1: sandbox, 2: container, 3: config}))
        (started,) = containerd.cri(("RuntimeService/StartContainer", {1: made["1"]}))
        assert "error" not in started, started
        found = ps(simulated_host, words=("--all",))
        assert {f"default/{pod}", f"default/{pod}/main"} <= set(found)
        assert indices(found[f"default/{pod}/main"]) == [(6, "ok")]
        assert found[f"default/{pod}"]["gpus"] == []
    finally:
        containerd.cri(
            ("RuntimeService/StopPodSandbox", {1: sandbox}), ("RuntimeService/RemovePodSandbox", {1: sandbox})
        )


@pytest.fixture(scope="module")
def podman(session_directory: Path, runtime_environment: dict[str, str], simulated_host: SimulatedHost) -> Podman:
    podman = make_podman(session_directory / "found-podman", runtime_environment.get("LD_PRELOAD", ""))
    command = [PROGRAMS / "ocigpu", "cdi", "generate", "--config", simulated_host.settings, "--max-version", "0.5.0"]
    run([*command, "--output", podman.cdi / "nvidia.yaml"])
    return podman


@pytest.mark.parametrize("low_level", ["runc", "crun"])
def test_a_container_of_podman_is_found_with_its_name(
    podman: Podman,
    simulated_host: SimulatedHost,
    rootfs: Callable[[str], Path],
    work_directory: Path,
    low_level: str,
) -> None:
    """Podman has its /run to itself here: what it has there is looked at from there, through /proc."""
    name = container_id()
    root = shutil.copytree(rootfs("glibc"), work_directory / "rootfs", symlinks=True)
    output = work_directory / "output"
    started = podman.start_rootfs(low_level, "nvidia.com/gpu=4", root, name, WAITING, output)
    states = f"/proc/{started.pid}/root/run/{low_level}"
    try:
        found: dict[str, dict[str, Any]] = {}

        def is_there() -> bool:
            assert started.poll() is None, output.read_text()
            found.update(ps(simulated_host, states))
            return name in found

        wait_for("the container", is_there, on_failure=output.read_text)
        one = found[name]
        assert (one["engine"], one["runtime"], one["mode"]) == ("podman", low_level, "cdi")
        assert indices(one) == [(4, "ok")]
    finally:
        for pid in machine.processes_of(name):
            stop(pid, 2)
        started.wait(60)
        machine.remove_cgroups(name)
