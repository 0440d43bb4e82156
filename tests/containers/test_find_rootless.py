"""A user without privileges: the own containers are seen with their GPUs, and root does not trust their states."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from containers_lab import WAITING
from support import requirements
from support.bundle import give_to
from support.fixtures import MakeBundle
from support.process import explain, run
from support.product import PublicCopy, SimulatedHost
from support.runtimes import container_id, start_in_background

from ocigpu.containers.find import Places, find_containers
from ocigpu.containers.report import make_reports
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.system.settings_file import read_settings

pytestmark = [pytest.mark.root, pytest.mark.engine]

USER = 4321


def make_rootless(config: dict[str, Any]) -> None:
    """Change a config as ``runc spec --rootless`` writes it: one id mapped, no cgroup, the host's network and sysfs."""
    linux = config["linux"]
    linux["namespaces"] = [item for item in linux["namespaces"] if item["type"] != "network"] + [{"type": "user"}]
    for name in ("uidMappings", "gidMappings"):
        linux[name] = [{"containerID": 0, "hostID": USER, "size": 1}]
    del linux["resources"]
    config["mounts"] = [item for item in config["mounts"] if item["destination"] != "/sys"]


def seen_by_user(places: Places, host: SimulatedHost) -> list[Any]:
    """Return status, mode, GPUs and notes of each container as the user sees them, in a process of theirs."""
    settings = read_settings(str(host.settings))
    facts = read_host_facts(settings)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            reports = make_reports(find_containers(places)[0], facts, settings)
            seen = [
                [one.container.status, one.mode, [[gpu.index, gpu.state] for gpu in one.gpus], one.notes]
                for one in reports
            ]
            os.write(writer, json.dumps(seen).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader) as file:
        found: list[Any] = json.load(file)
    return found


def test_a_rootless_container_is_its_users(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    public_copy: PublicCopy,
    runtime_environment: dict[str, str],
) -> None:
    requirements.require(requirements.user_namespaces())
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0,2"}, layout="busybox", edit=make_rootless)
    path = bundle / "config.json"
    config = json.loads(path.read_text())
    del config["linux"]["cgroupsPath"]
    path.write_text(json.dumps(config))
    state: Path = bundle.with_name("state")
    (bundle.parent / "run").mkdir(mode=0o700)
    state.mkdir(mode=0o700)
    give_to(bundle.parent, USER, USER)
    environment = simulated_host.environment(runtime_environment)
    environment |= {"HOME": str(bundle.parent), "XDG_RUNTIME_DIR": str(bundle.parent / "run")}
    user = ("setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups")
    command = (*user, str(public_copy.runtime), "--root", str(state))
    name, places = container_id(), Places((str(state),))
    try:
        started = start_in_background(command, ["run", "--detach"], bundle, name, environment)
        assert started.returncode == 0, explain(started)
        ((status, mode, gpus, notes),) = seen_by_user(places, simulated_host)
        assert (status, mode, gpus) == ("running", "hook", [[0, ""], [2, ""]])
        assert len(notes) == 1
        assert notes[0].startswith("its device cgroup cannot be asked: ")
        assert find_containers(places) == (
            [], [f"{state}: states of user {USER} are not trusted: look at them as that user"],
        )  # fmt: skip
    finally:
        run([*command, "delete", "--force", name], env=environment, check=False)
