"""Running containers that are looked into and changed, and what they see of it themselves."""

import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from containers_lab import Made
from support import reapply
from support.machine import LIBRARIES
from support.process import Completed, explain, run
from support.product import PROGRAMS, SimulatedHost, gpu_names, listed_uuids
from support.runtimes import Answers, answers, parts, probe, script

from ocigpu.cli.front.main import find_command
from ocigpu.cli.front.manual import read_page
from ocigpu.containers.live import Live, open_live
from ocigpu.containers.verify import NodeRow, Verified
from ocigpu.containers.verify import verify as verify_live
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.system.settings_file import read_settings

HOST_LIBRARY = f"{LIBRARIES}/libcuda.so.550.163.01"


def view(made: Made) -> tuple[str, ...]:
    """Return the words before a runtime's command: which cgroups it sees."""
    return made.command[:-3]


def ocigpu(made: Made, *words: str, status: int | None = 0) -> Completed:
    """Run a command of ours on a container's state directory; a wrong exit status shows what it said."""
    environment = {name: text for name, text in made.environment.items() if name != "LD_PRELOAD"}
    known = read_page(find_command(words)[0]).options
    command = [
        *view(made),
        PROGRAMS / "ocigpu",
        *words,
        *(["--state-dir", made.state] if "--state-dir" in known else []),
    ]
    result = run(command, env=environment, check=False)
    assert status is None or result.returncode == status, explain(result)
    assert "Traceback" not in result.stderr, explain(result)
    return result


def verify(made: Made, status: int = 0) -> dict[str, Any]:
    """Return what ``ocigpu verify --json`` says: rows of nodes and libraries by path."""
    data: dict[str, Any] = json.loads(ocigpu(made, "verify", made.name, "--json", status=status).stdout)
    data["nodes"] = {row["path"]: row for row in data["nodes"]}
    data["libraries"] = {row["path"]: row for row in data["libraries"]}
    return data


@functools.cache
def read_facts(settings: Settings) -> HostFacts:
    return read_host_facts(settings)


@contextmanager
def opened(made: Made) -> Iterator[Live]:
    """A container on cgroup v1, open in this process: many commands would take the tests long."""
    settings = read_settings(made.environment["OCIGPU_CONFIG"])
    with open_live(made.found(), settings, read_facts(settings)) as live:
        yield live


def verified(made: Made) -> Verified:
    with opened(made) as live:
        return verify_live(live)


def node_row(made: Made, path: str) -> NodeRow:
    """Return what verify says of one node."""
    return next(row for row in verified(made).nodes if row.path == path)


def execute(made: Made, *words: str) -> str:
    """Return what a command in the container prints, whatever its status."""
    return run([*made.command, "exec", made.name, *words], env=made.environment, check=False).stdout


def shell(made: Made, text: str) -> None:
    run([*made.command, "exec", made.name, "sh", "-c", text], env=made.environment)


class Seen(NamedTuple):
    """What a container sees: UUIDs that the driver's tool lists, names of nodes, of GPUs in procfs, and answers."""

    gpus: list[str]
    nodes: list[str]
    proc: list[str]
    answers: Answers

    def opens(self, name: str) -> tuple[str, str]:
        """Return what opening a device by its node says, and by a node that the container makes."""
        return self.answers["open", f"/dev/{name}"], self.answers["open", _made_node(name)]


def _made_node(name: str) -> str:
    return f"/tmp/made-{name.rpartition('/')[2]}"


def see(made: Made, host: SimulatedHost, *names: str) -> Seen:
    """Return what a container sees, with answers for these devices; by one process, because each takes its time."""
    lists = ["list", "/dev", "/proc/driver/nvidia/gpus"]
    commands = [["stat", *(f"/dev/{name}" for name in names)], ["open", *(f"/dev/{name}" for name in names)]]
    for name in names:
        commands += [["mknod", _made_node(name), *host.number(name)], ["open", _made_node(name)]]
    text = execute(made, *script(["nvidia-smi", "-L"], probe(lists, *commands), ["sh", "-c", "rm -f /tmp/made-*"]))
    listing, probed, _ = parts(text)
    seen = answers(probed)
    proc = sorted(seen["list", "/proc/driver/nvidia/gpus"].split())
    return Seen(listed_uuids(listing), gpu_names(seen["list", "/dev"]), proc, seen)


def opens(made: Made, host: SimulatedHost, name: str) -> tuple[str, str]:
    """Return what opening a device says: see :meth:`Seen.opens`."""
    return see(made, host, name).opens(name)


def mounts(made: Made) -> list[str]:
    """Return the container's mounts without their ids."""
    lines = Path(f"/proc/{made.found().pid}/mountinfo").read_text().splitlines()
    return sorted(" ".join(line.split(" ")[2:]) for line in lines)


def records(made: Made, host: SimulatedHost) -> list[str]:
    """Return the names of what is recorded of a container."""
    return [path.name for path in (host.directory / "run/ocigpu").glob(f"attached-*-{made.name}")]


def apply_again(made: Made, cgroup: str) -> None:
    """Set a container's device rules anew from what its config.json says, as runtimes and systemd do."""
    config = made.bundle / "config.json"
    own = json.loads(config.read_text())["linux"]["cgroupsPath"].lstrip("/")
    command = [*view(made), sys.executable, reapply.__file__, cgroup, own, config]
    run(command, env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)})


class Holder:
    """A process in a container's cgroup that has the host's node open, until the block ends."""

    def __init__(self, cgroup_directory: Path, node: Path) -> None:
        # simulated nodes cannot be opened for more than their path, which is a descriptor as good as any
        code = f"import os, time; fd = os.open({str(node)!r}, os.O_PATH); print(fd, flush=True); time.sleep(600)"
        text = (
            f"echo 0 > {shlex.quote(str(cgroup_directory))}/cgroup.procs; exec {sys.executable} -c {shlex.quote(code)}"
        )
        self.process = subprocess.Popen(["sh", "-c", text], stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        assert self.process.stdout is not None
        assert self.process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
