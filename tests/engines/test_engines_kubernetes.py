"""From the kubelet's choice of devices to a container that runc starts: it sees exactly those, as under Docker.

What the kubelet and containerd do with a response is done by hand here: variables, mounts and device nodes go into
config.json (kubernetes pkg/kubelet/cm/devicemanager, containerd internal/cri).
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.allocation import Response, allocate
from support.fixtures import MakeBundle
from support.process import explain
from support.product import CONTROL_NODES, RUNTIME, SimulatedHost, gpu_names, listed_uuids
from support.runtimes import answers, container_id, parts, probe, run_container, script

from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.kubernetes.node.config import configure, parse_config_file
from ocigpu.kubernetes.node.devices import Resource, make_inventory
from ocigpu.system.settings_file import read_settings

pytestmark = [pytest.mark.root, pytest.mark.engine]

SHARED = "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}]}}"
Ids = Callable[[Resource], list[str]]


def whole(*indices: int) -> Ids:
    return lambda resource: [resource.devices[index].id for index in indices]


def allocated(host: SimulatedHost, ids: Ids, file: str, **environment: str) -> Response:
    settings = read_settings(str(host.settings))
    facts = read_host_facts(settings)
    configuration = configure({}, environment, parse_config_file(file, "dp.yaml")[0], "dp.yaml")
    resource = make_inventory(facts, configuration).resources[0]
    return allocate(resource, ids(resource), facts, configuration, settings)


def put_into(config: dict[str, Any], response: Response) -> None:
    config["process"]["env"] += [f"{name}={value}" for name, value in response.envs.items()]
    for mount in response.mounts:
        options = ["rbind", "rprivate", "ro" if mount.read_only else "rw"]
        entry = {"destination": mount.container_path, "type": "bind", "source": mount.host_path, "options": options}
        config["mounts"].append(entry)
    linux = config["linux"]
    for spec in response.devices:
        status = os.stat(spec.host_path)
        assert stat.S_ISCHR(status.st_mode)
        number = {"type": "c", "major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}
        node = {"path": spec.container_path, **number, "fileMode": stat.S_IMODE(status.st_mode), "uid": 0, "gid": 0}
        linux.setdefault("devices", []).append(node)
        rules = linux.setdefault("resources", {}).setdefault("devices", [])
        rules.append({"allow": True, **number, "access": spec.permissions})


def look(host: SimulatedHost, make_bundle: MakeBundle, env: dict[str, str], response: Response) -> list[str]:
    nodes = [f"/dev/nvidia{index}" for index in range(4)]
    commands = script(
        ["nvidia-smi", "-L"],
        probe(
            ["list", "/dev", "/proc/driver/nvidia/gpus"],
            *(["mknod", node, *host.number(node.removeprefix("/dev/"))] for node in nodes),
            ["open", *nodes, "/dev/nvidiactl", "/dev/nvidia-uvm"],
        ),
    )
    bundle = make_bundle(commands, edit=lambda config: put_into(config, response))
    result = run_container([RUNTIME], bundle, container_id(), env=env)
    assert result.returncode == 0, explain(result)
    return parts(result.stdout)


CASES: dict[str, tuple[Ids, str, dict[str, str]]] = {
    "envvar": (whole(2, 0), "", {}),
    "envvar by index": (whole(2, 0), "", {"DEVICE_ID_STRATEGY": "index"}),
    "volume-mounts": (whole(0, 2), "", {"DEVICE_LIST_STRATEGY": "volume-mounts"}),
    "device specs": (whole(0, 2), "", {"PASS_DEVICE_SPECS": "true"}),
    "volume-mounts and device specs": (
        whole(0, 2), "", {"DEVICE_LIST_STRATEGY": "volume-mounts", "PASS_DEVICE_SPECS": "true"},
    ),
    "replicas of two GPUs": (whole(0, 9, 1), SHARED, {}),
}  # fmt: skip


@pytest.mark.parametrize(("ids", "file", "environment"), CASES.values(), ids=CASES.keys())
def test_a_container_of_a_pod_is_as_one_of_docker(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    tmp_path: Path,
    ids: Ids,
    file: str,
    environment: dict[str, str],
) -> None:
    env = simulated_host.environment(runtime_environment)
    settings = tmp_path / "config.toml"
    mounts = "accept-nvidia-visible-devices-as-volume-mounts = true\n"
    settings.write_text(mounts + Path(env["OCIGPU_CONFIG"]).read_text())
    env["OCIGPU_CONFIG"] = str(settings)
    response = allocated(simulated_host, ids, file, **environment)
    listing, probed = look(simulated_host, make_bundle, env, response)
    assert listed_uuids(listing) == [simulated_host.gpus[0], simulated_host.gpus[2]], listing
    seen = answers(probed)
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia0", "nvidia2", *CONTROL_NODES])
    assert [seen["open", f"/dev/nvidia{index}"] for index in range(4)] == ["ENXIO", "EPERM", "ENXIO", "EPERM"]
    docker = Response({"NVIDIA_VISIBLE_DEVICES": "0,2"})
    assert [listing, probed] == look(simulated_host, make_bundle, env, docker)


def test_a_pod_with_a_mig_device_sees_that_alone(
    make_bundle: MakeBundle, mig_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    env = mig_host.environment(runtime_environment)
    response = allocated(mig_host, whole(0), "flags: {migStrategy: mixed}", PASS_DEVICE_SPECS="1")
    uuid, *minors = mig_host.mig_devices[0]
    bundle = make_bundle(
        script(["nvidia-smi", "-L"], probe(["list", "/dev/nvidia-caps"], ["open", "/dev/nvidia0"])),
        edit=lambda config: put_into(config, response),
    )
    result = run_container([RUNTIME], bundle, container_id(), env=env)
    assert result.returncode == 0, explain(result)
    listing, probed = parts(result.stdout)
    assert uuid in listing
    assert mig_host.mig_devices[1][0] not in listing
    seen = answers(probed)
    assert seen["list", "/dev/nvidia-caps"].split() == sorted(f"nvidia-cap{minor}" for minor in minors)
    assert seen["open", "/dev/nvidia0"] == "ENXIO"
