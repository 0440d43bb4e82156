"""Users who are not root open device nodes of a group, as udev makes them: 0660 root:video and root:render."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import requirements
from support.bundle import give_to
from support.fixtures import MakeBundle
from support.process import Completed, explain, run
from support.product import PROGRAMS, PublicCopy, SimulatedHost, make_simulated_host
from support.runtimes import answers, container_id, probe, run_container

pytestmark = [pytest.mark.root, pytest.mark.engine]

VIDEO, RENDER = 44, 105
GRAPHICS = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility,graphics"}
RUNTIMES = pytest.mark.parametrize("low_level", ["runc", "crun"])
MODES = pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])


class Groups:
    """Runs containers of user 1000 on a host whose nodes are of groups."""

    def __init__(
        self, host: SimulatedHost, environment: dict[str, str], make: MakeBundle, directory: Path, copy: PublicCopy
    ) -> None:
        self.host, self.base, self.make, self.directory, self.copy = host, environment, make, directory, copy
        names = os.listdir(host.directory / "dev/dri")
        card, render = (sorted(name for name in names if name.startswith(kind))[0] for kind in ("card", "renderD"))
        self.nodes = ["/dev/nvidiactl", "/dev/nvidia0", f"/dev/dri/{card}", f"/dev/dri/{render}"]

    def environment(self, mode: str, low_level: str, features: str = "") -> dict[str, str]:
        settings, specs = self.directory / "config.toml", f'cdi.spec-dirs = ["{self.directory}/specs"]'
        environment = self.host.in_mode(self.base, settings, mode, specs, features, runtime=low_level)
        if mode == "cdi":
            (self.directory / "specs").mkdir()
            command = [PROGRAMS / "ocigpu", "cdi", "generate", "--quiet", "--config", self.host.settings]
            command += ["--nvidia-cdi-hook-path", self.copy.runtime.with_name("ocigpu-hook")]  # users start it, too
            run([*command, "--output", self.directory / "specs/nvidia.json"])
        return environment

    def start(
        self, env: dict[str, str], edit: Callable[[dict[str, Any]], None] | None = None, runtime: Path | str = ""
    ) -> Completed:
        def as_user(config: dict[str, Any]) -> None:
            config["process"]["user"] = {"uid": 1000, "gid": 1000}
            if edit:
                edit(config)

        bundle = self.make(probe(["open", *self.nodes]), GRAPHICS, edit=as_user)
        mappings = json.loads((bundle / "config.json").read_text())["linux"].get("uidMappings")
        if mappings:
            give_to(bundle / "rootfs", mappings[0]["hostID"], mappings[0]["hostID"])
        return run_container([runtime or self.copy.runtime], bundle, container_id(), env=env, cgroup="v2")

    def opened(self, *arguments: Any, **more: Any) -> list[str]:
        """Return what opening each node says: ENXIO where it is allowed, since no driver is behind it."""
        done = self.start(*arguments, **more)
        assert done.returncode == 0, explain(done)
        seen = answers(done.stdout)
        return [seen["open", path] for path in self.nodes]


@pytest.fixture(scope="module")
def host_of_groups(session_directory: Path) -> SimulatedHost:
    requirements.require(requirements.root(), requirements.programs("gcc"))
    host = make_simulated_host(session_directory / "host-groups", 1, model="l4")
    for path in [*(host.directory / "dev").glob("nvidia*"), *(host.directory / "dev/dri").glob("*[0-9]")]:
        if path.is_char_device():
            os.chown(path, 0, RENDER if path.name.startswith("renderD") else VIDEO)
            path.chmod(0o660)
    return host


@pytest.fixture
def groups(
    host_of_groups: SimulatedHost,
    runtime_environment: dict[str, str],
    make_bundle: MakeBundle,
    work_directory: Path,
    public_copy: PublicCopy,
) -> Groups:
    return Groups(host_of_groups, runtime_environment, make_bundle, work_directory, public_copy)


@pytest.mark.rest
@RUNTIMES
@MODES
def test_a_user_who_is_not_root_opens_nodes_of_a_group(groups: Groups, mode: str, low_level: str) -> None:
    assert groups.opened(groups.environment(mode, low_level)) == ["ENXIO"] * 4


@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_the_vendors_feature_leaves_users_out_of_groups(groups: Groups, mode: str) -> None:
    """In mode cdi nodes belong to the container's user, as with every engine that injects them."""
    features = "features.no-additional-gids-for-device-nodes = true"
    assert groups.opened(groups.environment(mode, "runc", features)) == ["EACCES"] * 4


def in_user_namespace(*gids: tuple[int, int, int]) -> Callable[[dict[str, Any]], None]:
    """Return an edit that gives a container a user namespace: (inside, outside, size) of its groups."""

    def edit(config: dict[str, Any]) -> None:
        config["linux"]["namespaces"].append({"type": "user"})
        config["linux"]["uidMappings"] = [{"containerID": 0, "hostID": 100_000, "size": 2000}]
        names = ("containerID", "hostID", "size")
        config["linux"]["gidMappings"] = [dict(zip(names, numbers, strict=True)) for numbers in gids]

    return edit


@RUNTIMES
@MODES
def test_a_group_that_is_mapped_is_joined_by_its_id_in_the_user_namespace(
    groups: Groups, mode: str, low_level: str
) -> None:
    edit = in_user_namespace((0, 100_000, 2000), (2000, VIDEO, 1), (3000, RENDER, 1))
    assert groups.opened(groups.environment(mode, low_level), edit) == ["ENXIO"] * 4


@RUNTIMES
@MODES
def test_a_group_that_is_not_mapped_keeps_no_container_from_starting(groups: Groups, mode: str, low_level: str) -> None:
    edit = in_user_namespace((0, 100_000, 2000), (2000, VIDEO, 1))
    assert groups.opened(groups.environment(mode, low_level), edit) == ["ENXIO"] * 3 + ["EACCES"]


def test_a_hook_without_the_shim_says_which_group_is_missing(groups: Groups) -> None:
    env = groups.environment("hook", "runc")
    log = groups.host.hook_log
    log.write_text("")

    def hooked(config: dict[str, Any]) -> None:
        arguments = ["ocigpu-hook", "--config", env["OCIGPU_CONFIG"], "prestart"]
        config["hooks"] = {"prestart": [{"path": str(PROGRAMS / "ocigpu-hook"), "args": arguments}]}

    program = requirements.find_program("runc")
    assert program
    assert groups.opened(env, hooked, runtime=Path(program)) == ["EACCES"] * 4
    assert "user 1000 of the container is not in group 44, 105 and may not open its nodes" in log.read_text()
