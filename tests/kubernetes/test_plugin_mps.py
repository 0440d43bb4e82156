"""MPS from a pod's request to its variables: the kubelet gives replicas only while their control daemon is ready."""

import json
import subprocess
from pathlib import Path

import pytest
from kubernetes_lab import shared
from mps_lab import make_mps_host
from plugin_lab import GPU, kubelet, plugin
from support.process import stop
from support.product import PROGRAMS

pytestmark = [pytest.mark.root, pytest.mark.rest]


def test_replicas_are_healthy_while_their_daemon_is_ready(session_directory: Path, work_directory: Path) -> None:
    host = make_mps_host(session_directory / "plugin-mps-host")
    root, directory, config = work_directory / "mps", work_directory / "dp", work_directory / "config.yaml"
    config.write_text(json.dumps(shared({"name": "gpu", "replicas": 4}, strategy="mps")))
    words = [f"--config-file={config}", f"--mps-root={root}"]
    with kubelet(directory) as kubelets, plugin(host.settings, directory, *words) as running:
        running.wait_for_log("MPS: no control daemon is ready")
        kubelets.expect(gpu=(8, 0))
        command = [PROGRAMS / "ocigpu", "mps-control-daemon", "--config", host.settings, "--shm-size=16m", *words]
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            kubelets.expect(gpu=(8, 8))
            given = kubelets.admit("pod", "main", {GPU: 1})
        finally:
            stop(daemon.pid)
            daemon.wait()
        kubelets.expect(gpu=(8, 0))
    assert given["envs"]["CUDA_MPS_PIPE_DIRECTORY"] == "/mps/nvidia.com/gpu/pipe"
    assert {(mount["host_path"], mount["container_path"]) for mount in given["mounts"]} == {
        (f"{root}/nvidia.com/gpu/pipe", "/mps/nvidia.com/gpu/pipe"),
        (f"{root}/nvidia.com/gpu/shm", "/dev/shm"),
    }
