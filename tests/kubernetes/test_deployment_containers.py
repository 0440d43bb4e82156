"""The chart's containers, run by runc through ocigpu-runtime with exactly the rights, users and mounts of the chart.

In place of the image they have this machine's files, in an overlay that is thrown away.
"""

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment_lab import Object, containers, objects, of_kind
from support.api_server import FakeApiServer, make_account
from support.bundle import base_config
from support.process import run, stop, wait_for
from support.product import PROGRAMS, REPOSITORY, RUNTIME, SimulatedHost
from support.programs import held_port
from support.runtimes import container_id, set_cgroup

pytestmark = [pytest.mark.root, pytest.mark.engine]
FIELDS = {"spec.nodeName": "node-1", "metadata.name": "labels-x7", "metadata.namespace": "gpu"}
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
FEATURE = "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/gpu/nodefeatures/nvidia-features-for-node-1"


@pytest.fixture
def image(work_directory: Path) -> Iterator[Path]:
    """A root file system with the programs and their Python."""
    for name in ("upper", "work", "image"):
        (work_directory / name).mkdir()
    layers = f"lowerdir=/,upperdir={work_directory}/upper,workdir={work_directory}/work"
    run(["mount", "-t", "overlay", "overlay", "-o", layers, work_directory / "image"])
    for path in REPOSITORY.parents:  # a clone may lie in a directory that is closed to others
        (work_directory / "image" / path.relative_to("/")).chmod(0o755)
    yield work_directory / "image"
    run(["umount", work_directory / "image"])


def as_oci(found: list[Object], name: str, image: Path, more: dict[str, str], account: Path | None) -> dict[str, Any]:
    """Return config.json of one of the chart's containers, as a kubelet would have it; the network is the host's."""
    ((pod, container),) = [pair for pair in containers(found) if pair[1]["name"] == name]
    environment = {
        each["name"]: each.get("value") or FIELDS[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }
    config = base_config([str(PROGRAMS / "ocigpu"), *container["args"]], {**environment, **more})
    security = container["securityContext"]
    user = security["runAsUser"]
    config["process"]["user"] = {"uid": user, "gid": security.get("runAsGroup", user)}
    granted = [f"CAP_{each}" for each in security["capabilities"].get("add", [])]
    config["process"]["capabilities"] = dict.fromkeys(("bounding", "effective", "permitted"), granted)
    config["root"] = {"path": str(image), "readonly": security["readOnlyRootFilesystem"]}
    config["linux"]["namespaces"] = [each for each in config["linux"]["namespaces"] if each["type"] != "network"]
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    for mount in container.get("volumeMounts", []):
        volume = volumes[mount["name"]]
        source = volume["hostPath"]["path"] if "hostPath" in volume else str(image.parent / "config")
        options = ["rbind", "ro" if mount.get("readOnly") else "rw", "rslave"]
        config["mounts"].append(
            {"destination": mount["mountPath"], "type": "bind", "source": source, "options": options}
        )
    if account is not None:
        options = ["rbind", "ro"]
        config["mounts"].append({"destination": ACCOUNT, "type": "bind", "source": str(account), "options": options})
    return config


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(
    image: Path, simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path
) -> Iterator[Start]:
    """Call with the name of a container: starts it as the chart has it; its output is in work_directory/log."""
    for name in ("kubelet/device-plugins", "kubelet/pod-resources", "cdi"):
        (work_directory / name).mkdir(parents=True)
    host = {
        "driverRoot": str(simulated_host.directory),
        "kubelet": str(work_directory / "kubelet"),
        "cdi": str(work_directory / "cdi"),
        "hook": "/host/bin/ocigpu-hook",
    }
    children = []

    def begin(
        name: str, values: dict[str, Any], env: dict[str, str] | None = None, account: Path | None = None
    ) -> "subprocess.Popen[str]":
        found = objects({**values, "host": host})
        (work_directory / "config").mkdir()
        for key, text in of_kind(found, "ConfigMap")["ocigpu-config"]["data"].items():
            (work_directory / "config" / key).write_text(text)
        bundle = work_directory / "bundle"
        bundle.mkdir()
        config = as_oci(found, name, image, env or {}, account)
        (bundle / "config.json").write_text(json.dumps(config))
        identity = container_id()
        set_cgroup(bundle, identity)
        command = [RUNTIME, "--root", work_directory / "state", "run", "--bundle", bundle, identity]
        with open(work_directory / "log", "w") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=simulated_host.environment(runtime_environment),
                text=True,
            )
        children.append(child)
        return child

    yield begin
    for child in children:
        if child.poll() is None:
            stop(child.pid)
        child.wait()


def ended_by_sigterm(child: "subprocess.Popen[str]") -> int:
    child.send_signal(signal.SIGTERM)
    return child.wait(60)


def test_the_device_plugin_offers_gpus_without_any_capability(start: Start, work_directory: Path) -> None:
    child = start("device-plugin", {"devicePlugin": {"deviceListStrategy": "cdi-cri"}})
    socket = work_directory / "kubelet/device-plugins/nvidia-gpu.sock"
    wait_for("its socket", socket.exists, on_failure=(work_directory / "log").read_text)
    wait_for("its line", lambda: "nvidia.com/gpu: 8 devices" in (work_directory / "log").read_text())
    spec = json.loads((work_directory / "cdi/k8s.device-plugin.nvidia.com-gpu.json").read_text())
    edits = [spec["containerEdits"], *(device["containerEdits"] for device in spec["devices"])]
    sources = [mount["hostPath"] for edit in edits for mount in edit.get("mounts", [])]
    assert sources
    assert [path for path in sources if not os.path.exists(path)] == [], "the host's paths, not the container's"
    assert {hook["path"] for edit in edits for hook in edit.get("hooks", [])} == {"/host/bin/ocigpu-hook"}
    assert ended_by_sigterm(child) == 0
    assert not socket.exists()


@pytest.mark.rest
def test_the_device_plugin_offers_gpus_without_the_hosts_files(start: Start, work_directory: Path) -> None:
    """By variables: the runtime brings NVML and the nodes, so nothing of the host's root is mounted."""
    child = start("device-plugin", {})
    assert "/driver-root" not in (work_directory / "bundle/config.json").read_text()
    socket = work_directory / "kubelet/device-plugins/nvidia-gpu.sock"
    wait_for("its socket", socket.exists, on_failure=(work_directory / "log").read_text)
    wait_for("its line", lambda: "nvidia.com/gpu: 8 devices" in (work_directory / "log").read_text())
    assert ended_by_sigterm(child) == 0


@pytest.mark.rest
def test_node_labels_are_written_by_an_ordinary_user(start: Start, work_directory: Path) -> None:
    account = work_directory / "account"
    account.mkdir(mode=0o755)
    make_account(account)
    server = FakeApiServer(account)
    server.objects["/api/v1/namespaces/gpu/pods/labels-x7"] = {"metadata": {}}
    try:
        env = {"KUBERNETES_SERVICE_HOST": server.place.host, "KUBERNETES_SERVICE_PORT": str(server.place.port)}
        child = start("node-labels", {}, env, account)
        wait_for("labels", lambda: FEATURE in server.objects, on_failure=(work_directory / "log").read_text)
        labels = server.objects[FEATURE]["spec"]["labels"]
        assert labels["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB"
        assert labels["nvidia.com/gpu.count"] == "8"
        assert ended_by_sigterm(child) == 0
        assert FEATURE in server.objects, "labels stay"
    finally:
        server.close()


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


@pytest.mark.parametrize("pods", [False, True], ids=["an ordinary user", "root"])
def test_the_exporter_has_metrics_of_all_gpus(start: Start, work_directory: Path, port: int, pods: bool) -> None:
    child = start("exporter", {"exporter": {"pods": pods, "port": port}})
    text = ""

    def scraped() -> bool:
        nonlocal text
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                text = answer.read().decode()
        except OSError:
            return False
        return "DCGM_FI_DEV_GPU_TEMP" in text

    wait_for("metrics", scraped, on_failure=(work_directory / "log").read_text)
    assert sum(line.startswith("DCGM_FI_DEV_GPU_TEMP{") for line in text.splitlines()) == 8
    assert ended_by_sigterm(child) == 0
