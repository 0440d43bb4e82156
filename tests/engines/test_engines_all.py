"""Every engine of a machine configured by one command, tested by another: real dockerd, containerd and Podman.

They are on a machine of their own: no process of others is seen there, and what is written to /etc, /run, /usr/local
and Podman's directories is gone with it.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import machine as host_machine
from support import requirements
from support.engines import SYSTEM_PATH, Containerd, Docker, private_machine, start_containerd, start_docker
from support.fixtures import IMAGE
from support.podman import CONFIGURATION, write_wrappers
from support.process import Completed, run, wait_for
from support.product import PROGRAMS, SimulatedHost

from ocigpu.engines.checker import program_version

pytestmark = [pytest.mark.root, pytest.mark.engine, pytest.mark.xdist_group("podman")]

NAME = "ocigpu-engine-test"
DROP_IN = "/etc/containers/containers.conf.d/99-ocigpu.conf"
LINE = "    podman --runtime=ocigpu run --rm -e NVIDIA_VISIBLE_DEVICES=all debian nvidia-smi"


class Machine(NamedTuple):
    """A machine with engines: ``enter``: words before a command that is run there."""

    enter: tuple[str, ...]
    docker: Docker
    containerd: Containerd
    originals: dict[Path, bytes]
    configured: str
    environment: dict[str, str]

    def ocigpu(self, *words: str, check: bool = True, **variables: str) -> Completed:
        command = [*self.enter, PROGRAMS / "ocigpu", *words]
        return run(command, check=check, env={**self.environment, **variables}, timeout=200)

    def test(self, *words: str, status: int = 0, **variables: str) -> dict[str, Any]:
        """Run ``ocigpu engine test --json``; returns what it printed."""
        done = self.ocigpu("engine", "test", *words, "--json", check=False, **variables)
        assert done.returncode == status, done.stdout + done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        assert list(result) == ["schema-version", "passed", "simulated", "results", "notes"]
        return result

    def remains(self) -> str:
        """What the test of an engine could have left in the engines, beside the image of the suite."""
        podman = run([*self.enter, "podman", "images", "--all", "--quiet"], env=self.environment).stdout
        podman += run([*self.enter, "podman", "ps", "--all", "--quiet"], env=self.environment).stdout
        docker = self.docker("images", "--format={{.Repository}}").stdout.replace(IMAGE.partition(":")[0], "")
        docker += self.docker("ps", "--all", "--quiet").stdout
        namespaces = self.containerd("namespaces", "ls", "--quiet").stdout
        directories = [path.name for path in Path(self.environment["TMPDIR"]).glob(f"{NAME}-*")]
        cgroups = host_machine.cgroups_named(NAME)
        own = NAME if NAME in namespaces else ""
        return f"{docker}{podman}{own}{''.join(cgroups)}".strip() or "".join(directories)


@pytest.fixture(scope="module")
def enter(session_directory: Path, simulated_host: SimulatedHost, probes: Path) -> Iterator[tuple[str, ...]]:
    """Words that run a command on a machine of our own, with a simulated host's settings in /etc."""
    requirements.require(requirements.overlay())
    preload = "" if requirements.may_raise_limits() else str(probes / "memlock.so")
    of_machine = host_machine.cgroups_named("libpod_parent")
    with private_machine(session_directory / "private") as enter:
        run([*enter, "cp", simulated_host.settings, "/etc/ocigpu/config.toml"])
        file = session_directory / "private-containers.conf"
        text = CONFIGURATION.format(**write_wrappers(session_directory, preload))
        # crun refuses a machine with both versions of cgroups
        file.write_text(text.replace("[engine]\n", '[engine]\nruntime = "runc"\n'))
        run([*enter, "cp", file, "/etc/containers/containers.conf"])
        run([*enter, PROGRAMS / "ocigpu", "cdi", "generate", "--max-version=0.5.0", "--output=/etc/cdi/nvidia.yaml"])
        yield enter
    host_machine.remove_cgroups("libpod_parent", but=of_machine)


@pytest.fixture(scope="module")
def machine(session_directory: Path, image: Path, enter: tuple[str, ...]) -> Iterator[Machine]:
    """A machine whose engines were configured by one command."""
    requirements.require(requirements.programs("dockerd", "docker", "containerd", "ctr", "podman", "runc", "crun"))
    path = f"/usr/local/bin:{SYSTEM_PATH}"
    directories = session_directory / "all-containerd", session_directory / "all-docker"
    environment = {
        "PATH": path,
        "HOME": "/root",
        "DOCKER_HOST": f"unix://{directories[1]}/docker.sock",
        "CONTAINERD_SNAPSHOTTER": "overlayfs",
        "TMPDIR": str(session_directory / "all-temporary"),  # in /tmp are those of who tests beside us
    }
    os.mkdir(environment["TMPDIR"])
    originals: dict[Path, bytes] = {}
    said: list[str] = []

    def note(file: Path) -> None:
        originals[file] = file.read_bytes()

    def configure(file: Path) -> None:
        note(file)
        run([*enter, "ln", "-sf", file, "/etc/docker/daemon.json"])  # before dockerd runs this is what is configured
        done = run([*enter, PROGRAMS / "ocigpu", "engine", "configure"], check=False, env=environment)
        assert done.returncode == 3, done.stdout + done.stderr
        assert file.read_bytes() == originals[file]
        done = run([*enter, PROGRAMS / "ocigpu", "engine", "configure", "--yes"], env=environment)
        said.append(done.stdout)
        version = program_version("/", "docker")
        if version and version >= (25, 0):
            run([*enter, PROGRAMS / "ocigpu", "engine", "configure", "docker", "--cdi"], env=environment)

    given: dict[str, Any] = {"runtimes": {}, "env": {"PATH": path}, "view": enter}
    with (
        start_containerd(directories[0], image, sandbox_image=IMAGE, prepare=note, **given) as containerd,
        start_docker(directories[1], image, prepare=configure, **given) as docker,
    ):
        yield Machine(enter, docker, containerd, originals, said[0], environment)


def test_one_command_configures_every_engine(machine: Machine) -> None:
    lines = machine.configured.partition("next steps:\n")[2].splitlines()
    assert lines[0].split() == ["docker", "systemctl", "restart", "docker"]
    assert lines[1].startswith(f"  containerd ({machine.containerd.directory}/config.toml)  systemctl restart")
    assert len(lines) == 2  # Podman reads its file at every start
    assert "/etc/containers/containers.conf.d/99-ocigpu.conf: written" in machine.configured
    assert "checked by: containerd config dump" in machine.configured
    statuses = json.loads(machine.ocigpu("engine", "status", "--json").stdout)["engines"]
    assert {status["engine"] for status in statuses if status["configured"]} == {"docker", "containerd", "podman"}


def test_every_way_of_every_engine_gives_gpus(machine: Machine) -> None:
    result = machine.test()
    assert result["passed"], result
    assert result["simulated"] is True
    ways = [row["way"] for row in result["results"]]
    version = program_version("/", "docker")
    device = "--device=nvidia.com/gpu=all"
    assert ways == [
        "docker run --runtime=ocigpu",
        "docker run --gpus all",
        *([f"docker run {device}"] if version and version >= (25, 0) else []),
        f"ctr run --runc-binary={PROGRAMS}/ocigpu-runtime",
        "podman --runtime=ocigpu run",
        f"podman run {device}",
    ]
    assert all(check["passed"] and not check["hint"] for row in result["results"] for check in row["checks"])
    found = [check["message"] for check in result["results"][0]["checks"]]
    assert found[1:] == [
        "11 device nodes can be opened",
        "libcuda.so.1 can be loaded",
        "libnvidia-ml.so.1 can be loaded",
        "nvidia-smi lists 8 GPUs",
    ]
    assert machine.remains() == ""


def test_a_table_says_it_to_people(machine: Machine) -> None:
    done = machine.ocigpu("engine", "test", "podman")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("host: SIMULATED host")
    assert lines[1].split() == ["ENGINE", "ASKED", "BY", "RESULT", "FOUND"]
    assert "podman --runtime=ocigpu run" in lines[2]
    assert " ok " in lines[2]


@pytest.mark.rest
def test_an_engine_that_does_not_answer_is_said_with_a_hint(machine: Machine) -> None:
    result = machine.test(status=3, DOCKER_HOST=f"unix://{machine.containerd.directory}/none.sock")
    rows = {row["way"]: row for row in result["results"]}
    assert not rows["docker run --runtime=ocigpu"]["passed"]
    (check,) = rows["docker run --runtime=ocigpu"]["checks"]
    assert "Cannot connect to the Docker daemon" in check["message"]
    assert check["hint"]
    assert rows["podman --runtime=ocigpu run"]["passed"]
    assert machine.remains() == ""


def test_what_a_container_lacks_is_said_line_by_line(machine: Machine, session_directory: Path) -> None:
    """Another program under the shim's name: containers start, and have nothing."""
    shim = session_directory / "not-ours" / "ocigpu-runtime"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {session_directory}/runc "$@"\n')
    shim.chmod(0o755)
    drop_in = "/etc/containers/containers.conf.d/zz.conf"
    write = f"printf '[engine.runtimes]\nocigpu = [\"{shim}\"]\n' >{drop_in}"
    run([*machine.enter, "sh", "-c", write])
    try:
        done = machine.ocigpu("engine", "test", "podman", check=False)
    finally:
        run([*machine.enter, "rm", drop_in])
    assert done.returncode == 3, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("podman: ", "hint: "))]
    said = [re.sub(r"sh: line \d+: ", "sh: ", line) for line in said]  # BusyBox 1.37 counts lines
    assert [line.partition(" run: ")[2] for line in said] == [
        "11 of 11 device nodes cannot be opened: sh: can't open /dev/nvidia-uvm: no such file",
        said[1].partition(" run: ")[2],
        said[2].partition(" run: ")[2],
        "nvidia-smi lists 0 of 8: sh: nvidia-smi: not found failed",
        "",
    ]
    assert "libcuda.so.1' from LD_PRELOAD cannot be preloaded" in said[1]
    assert "libnvidia-ml.so.1' from LD_PRELOAD cannot be preloaded" in said[2]
    assert said[4] == "hint: ocigpu doctor"
    assert machine.remains() == ""


@pytest.mark.rest
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("engine", ["docker", "containerd", "podman"])
def test_nothing_is_left_behind_when_it_is_interrupted(machine: Machine, engine: str, number: int) -> None:
    """The moment is that at which something of it is there; wherever it has got to then, it must go."""

    def docker() -> str:
        return machine.docker("images", "--quiet", f"localhost/{NAME}").stdout

    def containerd() -> str:
        return "".join(
            name for name in machine.containerd("namespaces", "ls", "--quiet").stdout.split() if name == NAME
        )

    def podman() -> str:
        return run([*machine.enter, "podman", "images", "--quiet"], env=machine.environment).stdout

    there: Callable[[], str] = {"docker": docker, "containerd": containerd, "podman": podman}[engine]
    command = [*machine.enter, PROGRAMS / "ocigpu", "engine", "test", engine]
    given: dict[str, Any] = {"env": machine.environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, start_new_session=True, text=True, **given) as started:
        wait_for("the image", lambda: bool(there()) or started.poll() is not None)
        os.killpg(started.pid, number)
        output = started.communicate(timeout=100)[0]
    if number == signal.SIGKILL:
        assert machine.remains()
        machine.test(engine)  # the next run
    assert machine.remains() == "", output


def test_an_engine_that_is_not_configured_is_refused(machine: Machine) -> None:
    done = machine.ocigpu("engine", "test", "k3s", check=False)
    assert done.returncode == 1
    assert "OCIGPU-ENG-5: k3s is not configured" in done.stderr
    assert "hint: ocigpu engine configure k3s" in done.stderr


def test_one_command_takes_it_all_back(machine: Machine) -> None:
    """The last test of this file: what was there before is there again, byte for byte."""
    machine.ocigpu("engine", "remove", "--yes")
    done = machine.ocigpu("engine", "test", check=False)
    assert (done.returncode, "OCIGPU-ENG-5: no engine here is configured" in done.stderr) == (1, True)
    done = machine.ocigpu("engine", "test", "docker", check=False)
    assert (done.returncode, done.stderr.splitlines()[1:]) == (1, ["hint: ocigpu engine configure docker"])
    assert "docker run --gpus is not tested: it has no hook" in done.stderr
    assert {file: file.read_bytes() for file in machine.originals} == machine.originals
    done = machine.ocigpu("engine", "test", "podman", "--json")
    (row,) = json.loads(done.stdout)["results"]
    assert (done.returncode, row["way"]) == (0, "podman run --device=nvidia.com/gpu=all")  # needs no runtime


# setup: what the commands above do, in one


@pytest.fixture
def unconfigured(machine: Machine) -> Iterator[Machine]:
    """The machine, whose Podman knows nothing of ocigpu."""
    machine.ocigpu("engine", "remove", "podman")
    yield machine
    machine.ocigpu("engine", "configure", "podman")


@pytest.mark.rest
def test_podman_by_one_command_and_back(unconfigured: Machine) -> None:
    shown = unconfigured.ocigpu("setup", "podman", "--dry-run").stdout
    assert f"+++ {DROP_IN}" in shown
    assert f"{DROP_IN}: would be written" in shown
    assert shown.endswith("nothing changed\n")
    nobody = unconfigured.ocigpu("setup", "podman", check=False)
    assert (nobody.returncode, nobody.stdout.splitlines()[-1]) == (3, "nothing changed: not confirmed (use --yes)")
    assert not json.loads(unconfigured.ocigpu("engine", "status", "podman", "--json").stdout)["engines"][0][
        "configured"
    ]

    done = unconfigured.ocigpu("setup", "podman", "--yes").stdout
    assert f"{DROP_IN}: written" in done
    assert "podman  podman --runtime=ocigpu run" in done
    assert "FAILED" not in done
    assert f"It works. Try it:\n\n{LINE}\n" in done
    assert "SIMULATED host, no real GPU" in done.partition("It works.")[2]

    again = json.loads(unconfigured.ocigpu("setup", "podman", "--yes", "--json").stdout)
    assert (again["passed"], again["engines"][0]["changed"], again["commands"]) == (True, False, [])
    assert {row["way"] for row in again["results"]} == {
        "podman --runtime=ocigpu run", "podman run --device=nvidia.com/gpu=all",
    }  # fmt: skip

    undone = unconfigured.ocigpu("setup", "podman", "--undo", "--yes").stdout
    assert f"{DROP_IN}: removed" in undone
    assert "nvidia.yaml stays" in undone
    assert unconfigured.remains() == ""


@pytest.mark.rest
def test_an_engine_that_runs_is_restarted_and_one_that_cannot_be_is_named(machine: Machine) -> None:
    """There is no systemd on this machine: make test-grounds has the restart itself."""
    machine.ocigpu("engine", "remove", "docker")
    try:
        shown = machine.ocigpu("setup", "docker", "--dry-run").stdout
        assert "then:\n  systemctl restart docker\n" in shown
        assert ": link to " in shown
        done = machine.ocigpu("setup", "docker", "--yes", check=False)
        assert "then:\n  systemctl restart docker\n" in done.stdout
        assert "this machine was not booted with systemd: restart docker yourself" in done.stderr
    finally:
        machine.ocigpu("engine", "configure", "docker")


def test_the_host_must_have_gpus(machine: Machine, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[driver]\nroot = {json.dumps(str(tmp_path))}\n")
    done = machine.ocigpu("setup", "podman", "--yes", "--config", str(file), check=False)
    assert done.returncode == 1
    assert "OCIGPU-HOST-1" in done.stderr


@pytest.mark.parametrize("words", [("--json",), ("dokcer",)])
def test_a_command_line_that_says_too_little(machine: Machine, words: tuple[str, ...]) -> None:
    assert machine.ocigpu("setup", *words, check=False).returncode == 2
