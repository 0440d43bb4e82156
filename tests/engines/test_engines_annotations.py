"""Annotations of images, pods and device plugins: real engines pass them on, and the shim tells whose they can be."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import requirements
from support.bundle import base_config, write_bundle
from support.engines import Containerd, start_containerd
from support.fixtures import IMAGE
from support.podman import Podman, make_podman
from support.process import explain, run
from support.product import PROGRAMS, RUNTIME, SimulatedHost, gpu_names, listed_uuids
from support.runtimes import answers, container_id, probe, run_container, set_cgroup

from ocigpu.engines.checker import program_version

pytestmark = [pytest.mark.root, pytest.mark.engine]

WRAPPER = '#!/bin/sh\nOCIGPU_CONFIG={settings} exec {runtime} "$@"\n'
KEY = "cdi.k8s.io/plugin_0"
NO_VARIABLES = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
CRI_ANNOTATION = "io.kubernetes.cri.container-type"
LOOK = probe(["list", "/dev", "/stolen"])
HOST_NETWORK = 2


@pytest.fixture(scope="module")
def specs(session_directory: Path, simulated_host: SimulatedHost) -> Path:
    """Specifications of the host's GPUs, and one of another vendor that mounts a directory of the host."""
    directory = session_directory / "annotation-specs"
    directory.mkdir()
    secret = session_directory / "annotation-secret"
    secret.mkdir()
    (secret / "of-the-host").touch()
    run([PROGRAMS / "ocigpu", "cdi", "generate", "--quiet", "--config", simulated_host.settings, "--output",
         directory / "nvidia.json"])  # fmt: skip
    mount = {"hostPath": str(secret), "containerPath": "/stolen", "options": ["rbind", "rw"]}
    disk = {"name": "0", "containerEdits": {"mounts": [mount]}}
    (directory / "disk.json").write_text(
        json.dumps({"cdiVersion": "0.5.0", "kind": "example.com/disk", "devices": [disk]})
    )
    return directory


WriteSettings = Callable[[str], Path]


@pytest.fixture
def write_settings(work_directory: Path, simulated_host: SimulatedHost, specs: Path) -> WriteSettings:
    """Call with lines of settings: returns the file."""

    def write(lines: str) -> Path:
        path = work_directory / "annotations.toml"
        runc = requirements.find_program("runc")
        path.write_text(
            f'{lines}cdi.spec-dirs = ["{specs}"]\nruntime.runtimes = ["{runc}"]\n{simulated_host.settings.read_text()}'
        )
        path.chmod(0o644)
        return path

    return write


# --- Podman: before 4.5.1 it puts annotations of an image's manifest into config.json


@pytest.fixture(scope="module")
def podman(session_directory: Path, rootfs: Callable[[str], Path]) -> Iterator[Podman]:
    """A Podman with images whose manifests name devices, and say besides that they are of Kubernetes."""
    directory = session_directory / "podman-n"
    directory.mkdir()
    engine = make_podman(directory / "podman", "")
    for name, device in (("gpus", "nvidia.com/gpu=all"), ("disk", "example.com/disk=0")):
        engine.build_image(name, rootfs("busybox"), {KEY: device, CRI_ANNOTATION: "container"})
    yield engine
    shutil.rmtree(directory)


@pytest.mark.rest
@pytest.mark.parametrize("mode", ["auto", "cdi"])
def test_annotations_of_an_image_skip_no_setting_under_podman(
    podman: Podman, write_settings: WriteSettings, mode: str
) -> None:
    shim = podman.directory / "shim"

    def run_with(lines: str, image: str) -> Any:
        settings = write_settings(f'mode = "{mode}"\n{lines}')
        shim.write_text(WRAPPER.format(settings=settings, runtime=RUNTIME))
        shim.chmod(0o755)
        return podman.run_image(str(shim), image, LOOK)

    given = run_with("", "gpus")
    if given.returncode == 0 and "nvidia0" not in given.stdout:
        pytest.skip("this Podman passes no annotation of an image on: 4.5.1 and newer")
    assert "nvidia7" in gpu_names(answers(given.stdout)["list", "/dev"]), "by default as a variable would: all of them"
    refused = run_with(NO_VARIABLES, "gpus")
    assert refused.returncode == 0, explain(refused)
    assert gpu_names(answers(refused.stdout)["list", "/dev"]) == []
    disk = run_with("", "disk")
    assert disk.returncode != 0
    assert "OCIGPU-REQ-1" in disk.stderr, explain(disk)
    assert "of-the-host" not in disk.stdout + run_with(NO_VARIABLES, "disk").stdout
    trusted = run_with("cdi.engine-filters-annotations = true\n", "disk")
    assert answers(trusted.stdout)["list", "/stolen"] == "of-the-host", explain(trusted)


# --- containerd's directory, with the shim and runc alone


@pytest.mark.parametrize("mode", ["auto", "cdi"])
@pytest.mark.parametrize("device", ["nvidia.com/gpu=2", "runtime.nvidia.com/gpu=2"])
@pytest.mark.parametrize(("namespace", "given"), [("k8s.io", True), ("moby", False)])
def test_a_bundle_in_the_directory_of_containerds_cri_vouches_for_its_annotations(
    work_directory: Path,
    write_settings: WriteSettings,
    rootfs: Callable[[str], Path],
    runtime_environment: dict[str, str],
    mode: str,
    device: str,
    namespace: str,
    given: bool,
) -> None:
    """The hook that runc starts comes to the same answer as the shim."""
    name = container_id()
    tasks = work_directory / "containerd/io.containerd.runtime.v2.task" / namespace
    tasks.mkdir(parents=True)
    config = base_config(LOOK)
    config["annotations"] = {KEY: device, CRI_ANNOTATION: "container"}
    bundle = write_bundle(tasks / name, config, rootfs("glibc"))
    set_cgroup(bundle, name)
    before = (bundle / "config.json").read_bytes()
    settings = write_settings(f'mode = "{mode}"\n{NO_VARIABLES}')
    done = run_container([RUNTIME], bundle, name, env={**runtime_environment, "OCIGPU_CONFIG": str(settings)})
    assert done.returncode == 0, explain(done)
    gpus = [node for node in gpu_names(answers(done.stdout)["list", "/dev"]) if node.removeprefix("nvidia").isdigit()]
    assert gpus == (["nvidia2"] if given else [])
    assert ((bundle / "config.json").read_bytes() == before) is not given


# --- containerd's CRI itself


@pytest.fixture(scope="module")
def containerd(session_directory: Path, image: Path, simulated_host: SimulatedHost) -> Iterator[Containerd]:
    """A containerd that passes on what device plugins write, as NVIDIA's installer configures it; no variables."""
    requirements.require(requirements.programs("containerd", "ctr", "runc"))
    pytest.importorskip("grpc", reason="not installed: grpcio")
    directory = session_directory / "annotated-containerd"
    settings = session_directory / "annotated-containerd.toml"
    settings.write_text(NO_VARIABLES + simulated_host.settings.read_text())
    settings.chmod(0o644)

    def prepare(file: Path) -> None:
        version = program_version("/", "containerd")
        if version and version >= (2, 0):  # it looks for the devices itself otherwise, and knows no runtime.nvidia.com
            table = '[plugins."io.containerd.grpc.v1.cri"]\n'
            file.write_text(file.read_text().replace(table, f"{table}  enable_cdi = false\n"))
        run([PROGRAMS / "ocigpu", "engine", "configure", "containerd", "--runtime-path", RUNTIME, "--config", file,
             "--default"])  # fmt: skip
        drop_in = file.with_name("conf.d") / "99-ocigpu.toml"  # from containerd 2.1 on
        written = drop_in if drop_in.exists() else file
        head = ".containerd.runtimes.ocigpu]\n"
        assert head in written.read_text()
        written.write_text(written.read_text().replace(head, f'{head}container_annotations = ["cdi.k8s.io/*"]\n'))

    env = {"OCIGPU_CONFIG": str(settings)}
    with start_containerd(directory, image, {}, env, sandbox_image=IMAGE, prepare=prepare) as engine:
        yield engine


@pytest.mark.rest
@pytest.mark.parametrize("written_by", ["kubelet", "author of the pod"])
def test_containerds_cri_passes_on_what_the_kubelet_writes_and_nothing_of_pods(
    containerd: Containerd, simulated_host: SimulatedHost, session_directory: Path, written_by: str
) -> None:
    annotation = {1: KEY, 2: "runtime.nvidia.com/gpu=1"}
    by_kubelet = written_by == "kubelet"
    config: dict[Any, Any] = {
        1: {1: "pod", 2: container_id(), 3: "default"},
        3: str(containerd.directory / "logs"),
        7: [] if by_kubelet else [annotation],
        8: {1: f"/{session_directory.name}-annotated", 2: {1: {1: HOST_NETWORK}}},
    }
    (answer,) = containerd.cri(("RuntimeService/RunPodSandbox", {1: config, 2: "ocigpu"}))
    assert "error" not in answer, answer
    sandbox = answer["1"]
    environment = [{1: "NVIDIA_VISIBLE_DEVICES", 2: "all"}]
    container = {1: {1: "container"}, 2: {1: IMAGE}, 6: environment, 10: [annotation] if by_kubelet else []}
    try:
        (created,) = containerd.cri(("RuntimeService/CreateContainer", {1: sandbox, 2: container, 3: config}))
        assert "error" not in created, created
        started, listed = containerd.cri(
            ("RuntimeService/StartContainer", {1: created["1"]}),
            ("RuntimeService/ExecSync", {1: created["1"], 2: ["nvidia-smi", "-L"], 3: 30}),
        )
        if by_kubelet:
            assert "error" not in {**started, **listed}, (started, listed)
            assert listed_uuids(listed["1"]) == [simulated_host.gpus[1]]
        else:
            assert "error" not in started, started
            assert "GPU-" not in str(listed)
    finally:
        stop = {1: sandbox}
        ended = containerd.cri(("RuntimeService/StopPodSandbox", stop), ("RuntimeService/RemovePodSandbox", stop))
        assert all("error" not in answer for answer in ended), ended
