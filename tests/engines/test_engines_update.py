"""GPUs stay: after a runtime's update, and after the device policy was applied again from what config.json says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import reapply
from support.fixtures import MakeBundle
from support.process import run, wait_for
from support.product import PROGRAMS, RUNTIME, SimulatedHost
from support.runtimes import answers, container_id, parts, script, view_of

pytestmark = [pytest.mark.root, pytest.mark.engine]

GRANTED, DENIED = "/dev/nvidia3", "/dev/nvidia4"


@pytest.fixture(scope="module")
def settings(simulated_host: SimulatedHost, session_directory: Path) -> dict[str, Path]:
    """Settings for each mode of the shim."""
    directory = session_directory / "update-cdi"
    directory.mkdir()
    generate = [PROGRAMS / "ocigpu", "cdi", "generate", "--config", simulated_host.settings]
    run([*generate, "--output", directory / "nvidia.yaml"])
    found = {}
    for mode in ("hook", "spec", "cdi"):
        path = session_directory / f"update-{mode}.toml"
        specs = f'cdi.spec-dirs = ["{directory}"]\n'
        path.write_text(f'mode = "{mode}"\n{specs}{simulated_host.settings.read_text()}')
        path.chmod(0o644)
        found[mode] = path
    return found


@pytest.mark.parametrize("cgroup", ["v1", "v2"])
@pytest.mark.parametrize("low_level", ["runc", "crun"])
@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
def test_a_container_keeps_its_gpus_and_gets_no_others(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    settings: dict[str, Path],
    runtime_environment: dict[str, str],
    mode: str,
    low_level: str,
    cgroup: str,
) -> None:
    """What runc update does, and what systemd does after daemon-reload (it has the list that the runtime gave it)."""
    look = ["/probe", "open", GRANTED, DENIED, "/dev/nvidiactl", "/dev/null"]
    waiting = ["sh", "-c", "touch /tmp/ready; while [ ! -e /tmp/go ]; do sleep 0.05; done; rm /tmp/ready /tmp/go"]
    node = ["/probe", "mknod", DENIED, *simulated_host.number("nvidia4")]
    bundle = make_bundle(script(node, look, waiting, look, waiting, look), {"NVIDIA_VISIBLE_DEVICES": "3"})
    name = container_id()
    environment = simulated_host.environment(runtime_environment, low_level)
    path = bundle.with_name("settings.toml")
    runtimes = Path(environment["OCIGPU_CONFIG"]).read_text().partition("[runtime]")[2].partition("[hook]")[0]
    path.write_text(f"{settings[mode].read_text()}\n[runtime]{runtimes}")
    environment["OCIGPU_CONFIG"] = str(path)
    path.chmod(0o644)
    view = view_of(cgroup)
    command = [*view, RUNTIME, "--root", bundle.with_name("state")]
    resources = bundle.with_name("resources.json")
    # a machine with both hierarchies has its controllers in the first
    resources.write_text('{"pids": {"limit": 1000}}' if cgroup == "v1" else "{}")
    output = bundle.with_name("output")
    ready, go = bundle / "rootfs/tmp/ready", bundle / "rootfs/tmp/go"
    config = (bundle / "config.json").read_text()
    own = config.partition('"cgroupsPath": "/')[2].partition('"')[0]
    with output.open("wb") as file:
        words = [os.fspath(word) for word in (*command, "run", "--bundle", bundle, name)]
        container = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
    try:
        for step in (
            [*command, "update", "--resources", resources, name],
            [*view, sys.executable, reapply.__file__, cgroup, own, bundle / "config.json"],
        ):
            wait_for("the container to have looked", ready.exists, on_failure=output.read_text)
            run(step, env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)})
            go.touch()
            wait_for("the container to go on", lambda: not go.exists() or container.poll() is not None)
        assert container.wait(60) == 0, output.read_text()
    finally:
        run([*command, "delete", "--force", name], env=environment, check=False)
        container.wait(60)
    _, first, _, second, _, third = parts(output.read_text())
    expected = {GRANTED: "ENXIO", DENIED: "EPERM", "/dev/nvidiactl": "ENXIO", "/dev/null": "ok"}
    for text in (first, second, third):
        assert {path: answer for (_, path), answer in answers(text).items()} == expected
