"""Containers that stay, for the tests that look at them: made by hand with runc and crun, with GPUs or without."""

import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from support import requirements
from support.process import explain, run
from support.product import RUNTIME, SimulatedHost
from support.runtimes import container_id, start_in_background, view_of

from ocigpu.cli.front.main import main
from ocigpu.containers.believed import Container
from ocigpu.containers.find import Places, find_container, find_containers

WAITING = ["/probe", "pause"]
GPU_3 = {"NVIDIA_VISIBLE_DEVICES": "3"}
VIEWS = [("runc", "v1"), ("runc", "v2"), ("crun", "v2")]
"""Runtimes and hierarchies; crun refuses machines that mount both."""


class Made(NamedTuple):
    """A container of ``command`` (a runtime with its --root) in the state directory ``state``."""

    name: str
    command: tuple[str, ...]
    bundle: Path
    state: Path
    environment: dict[str, str]

    @property
    def places(self) -> Places:
        return Places((str(self.state),))

    def found(self) -> Container:
        return find_container(self.places, self.name)

    def do(self, *words: str) -> None:
        run([*self.command, *words], env=self.environment)


@contextmanager
def container(
    bundle: Path,
    environment: dict[str, str],
    low_level: str = "runc",
    cgroup: str = "v1",
    host: SimulatedHost | None = None,
    settings: Path | None = None,
    subcommand: Sequence[str] = ("run", "--detach"),
    name: str = "",
) -> Iterator[Made]:
    """A container of a bundle, made by the shim for a host with GPUs; deleted in the end."""
    program = requirements.find_program(low_level)
    requirements.require("" if program else f"not installed: {low_level}")
    environment = host.environment(environment, low_level) if host else dict(environment)
    if low_level != "crun":
        environment.pop("LD_PRELOAD", None)
    if settings is not None:
        environment["OCIGPU_CONFIG"] = str(settings)
    state = bundle.with_name(f"{bundle.name}.state")
    runtime = str(RUNTIME) if host else str(program)
    command = (*view_of(cgroup), runtime, "--root", str(state))
    made = Made(name or container_id(), command, bundle, state, environment)
    try:
        started = start_in_background(command, subcommand, bundle, made.name, environment)
        assert started.returncode == 0, explain(started)
        yield made
    finally:
        run([*command, "delete", "--force", made.name], env=environment, check=False)


def with_users(config: dict[str, Any]) -> None:
    """Give a configuration a user namespace; sysfs cannot be mounted there beside the host's network."""
    config["linux"]["namespaces"].append({"type": "user"})
    for name in ("uidMappings", "gidMappings"):
        config["linux"][name] = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    config["mounts"] = [mount for mount in config["mounts"] if mount["destination"] != "/sys"]


def settings_with(host: SimulatedHost, low_level: str, path: Path, mode: str, more: str = "") -> Path:
    """Write settings with another mode for a host; returns their path."""
    host.in_mode({}, path, mode, more, runtime=low_level)
    return path


def ocigpu(*words: str, status: int = 0) -> str:
    """Run the operator's command line here; returns its output, and expects an exit status."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        assert main(words) == status, errors.getvalue()
    return output.getvalue() if status == 0 else errors.getvalue()


def cgroup_directory(made: Made, version: str) -> Path:
    """Return where a container's device cgroup is, seen from here."""
    words = Path(f"/proc/{made.found().pid}/cgroup").read_text().split("\n")
    wanted = next(line for line in words if (":devices:" in line if version == "v1" else line.startswith("0::")))
    path = wanted.rpartition(":")[2]
    top = "devices" if version == "v1" else ("" if requirements.is_unified() else "unified")
    return Path("/sys/fs/cgroup", top, path.lstrip("/"))


def names_of(places: Places) -> list[str]:
    return [one.name for one in find_containers(places)[0]]


def runc_state(
    pid: object = 0, start: object = 0, bundle: str = "/nowhere", annotations: dict[str, Any] | None = None, **more: Any
) -> str:
    labels = [f"{name}={value}" for name, value in (annotations or {}).items()]
    config = {"rootfs": "/nowhere/rootfs", "labels": [*labels, f"bundle={bundle}"]}
    return json.dumps({"id": "x", "init_process_pid": pid, "init_process_start": start, "config": config, **more})


def write_state(directory: Path, name: str, content: Any, file: str = "state.json") -> Path:
    """Write the state of a container that nothing has made."""
    path = directory / name
    path.mkdir(mode=0o700, parents=True)
    (path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    os.chmod(path / file, 0o600)
    return path / file
