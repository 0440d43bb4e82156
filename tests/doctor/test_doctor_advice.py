"""Failures on a real engine, the printed advice followed literally, and a container that starts then."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import requirements
from support.engines import SYSTEM_PATH, start_docker
from support.fixtures import IMAGE, MakeBundle
from support.process import run
from support.product import PROGRAMS, RUNTIME, SimulatedHost, listed_uuids
from support.runtimes import run_container, view_of

from ocigpu.doctor.findings import Finding
from ocigpu.doctor.host import Host
from ocigpu.doctor.report import run_checks

pytestmark = [pytest.mark.root, pytest.mark.engine]
GPUS = ("run", "--rm", "--network=none", "--gpus", '"device=1"', IMAGE, "nvidia-smi", "-L")


@pytest.fixture
def programs(tmp_path: Path, simulated_host: SimulatedHost) -> Path:
    """A directory with ocigpu's programs, which know the simulated host; it is on the PATH of users and daemons."""
    requirements.require(requirements.programs("dockerd", "docker", "containerd", "runc"))
    directory = tmp_path / "bin"
    script = Path(__file__).parents[2] / "packaging" / "install.sh"
    run(["sh", script, "--bin", directory, "--venv", PROGRAMS.parent, "--config", simulated_host.settings])
    return directory


@pytest.fixture
def place(session_directory: Path) -> Iterator[Path]:
    """Where a dockerd of this test lives; its paths are short, for its sockets."""
    directory = session_directory / "advised-docker"
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def ocigpu(programs: Path, *words: object, text: str | None = None, socket: Path | None = None) -> str:
    more = {"DOCKER_HOST": f"unix://{socket}"} if socket else {}
    command = [programs / "ocigpu", *map(str, words)]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, env={**os.environ, **more}, timeout=300
    ).stdout


def fixes_on(file: Path, report: list[dict[str, Any]], *names: str) -> list[str]:
    """Return the commands of findings that speak of a file."""
    return [fix for item in report if item["name"] in names and str(file) in str(item) for fix in item["fixes"] if fix]


def follow(programs: Path, fixes: list[str]) -> None:
    """Run printed commands as a user would; restarting the daemon is the test's."""
    for fix in fixes:
        if not fix.startswith(("#", "systemctl ")):
            environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
            done = subprocess.run(["sh", "-c", fix], capture_output=True, text=True, check=False, env=environment)
            assert done.returncode == 0, f"{fix}\n{done.stdout}{done.stderr}"


@pytest.mark.rest
def test_the_advice_on_gpus_all_makes_it_work(
    place: Path, programs: Path, image: Path, simulated_host: SimulatedHost
) -> None:
    """The most frequent message of all: explained, its fix run, dockerd restarted, and the container sees its GPU."""
    environment = {"PATH": f"{programs}:{SYSTEM_PATH}"}
    with start_docker(place, image, {}, environment, view=view_of("v2")) as docker:
        failed = docker(*GPUS, check=False)
        assert 'could not select device driver "" with capabilities: [[gpu]]' in failed.stderr
        (entry,) = json.loads(ocigpu(programs, "explain", "-", "--json", text=failed.stderr, socket=docker.socket))[
            "messages"
        ]
        file = place / "daemon.json"
        fixes = fixes_on(file, entry["here"], "engine-not-configured")
        assert fixes == [f"ocigpu engine configure docker --engine-config {file}", "systemctl restart docker"]
        follow(programs, fixes)
        configured = file.read_bytes()
    shutil.rmtree(place)
    with start_docker(
        place, image, {}, environment, view=view_of("v2"), prepare=lambda file: file.write_bytes(configured)
    ) as docker:
        assert listed_uuids(docker(*GPUS).stdout) == [simulated_host.gpus[1]]
    assert (programs / "nvidia-container-runtime-hook").is_symlink()


@pytest.mark.rest
def test_a_default_runtime_of_the_command_line_is_not_contradicted(place: Path, programs: Path, image: Path) -> None:
    """dockerd does not start with both: the file stays as it is, and the doctor says so of one that has both."""

    def without_runtimes(file: Path) -> None:
        file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if value}))

    options = ("--default-runtime", "runc")
    with start_docker(
        place, image, {}, {"PATH": SYSTEM_PATH}, view=view_of("v2"), prepare=without_runtimes, options=options
    ) as docker:
        file = place / "daemon.json"
        before = file.read_bytes()
        words = [programs / "ocigpu", "engine", "configure", "docker", "--config", file, "--default"]
        refused = run(words, check=False)
        assert (refused.returncode, file.read_bytes()) == (1, before)
        assert "dockerd is started with --default-runtime" in refused.stderr
        file.write_text(json.dumps({**json.loads(before), "default-runtime": "runc"}))
        report = json.loads(ocigpu(programs, "doctor", "--json", socket=docker.socket))["findings"]
        (found,) = (item for item in report if item["name"] == "docker-options")
        assert (found["severity"], "--default-runtime" in found["text"]) == ("error", True)


@pytest.mark.rest
def test_an_older_libcuda_of_the_image_is_found_and_the_advice_helps(
    place: Path, programs: Path, image: Path, simulated_host: SimulatedHost, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "libcuda.so.1").symlink_to("libcuda.so.470.57.02")
    (old / "libcuda.so.470.57.02").touch()
    words = ("run", "--detach", "--network=none", "--runtime=ocigpu", "--env=NVIDIA_VISIBLE_DEVICES=0")
    words = (*words, f"--volume={old}:/opt/old", "--env=LD_LIBRARY_PATH=/usr/none:/opt/old")

    def found(name: str) -> list[Finding]:
        states = tuple(map(str, place.glob("exec/runtime-*/*")))
        items = run_checks(Host("", str(simulated_host.settings), states=states), ["image-libcuda"])
        return [item for item in items if item.severity == "error" and name in item.text]  # not one that ends just now

    with start_docker(
        place, image, {"ocigpu": str(programs / "ocigpu-runtime")}, {"PATH": SYSTEM_PATH}, view=view_of("v2")
    ) as docker:
        docker(*words, "--name=old", IMAGE, "sleep", "600")
        (item,) = found("old")
        assert "/opt/old/libcuda.so.470.57.02" in item.text
        docker("rm", "--force", "old")
        assert item.fixes[1] == "docker run -e LD_LIBRARY_PATH= ..."
        docker(*words, "-e", "LD_LIBRARY_PATH=", "--name=new", IMAGE, "sleep", "600")
        assert not found("new")


@pytest.mark.rest
def test_a_container_that_dockerd_could_not_start_is_explained(place: Path, programs: Path, image: Path) -> None:
    runtimes = {"ocigpu": str(programs / "ocigpu-runtime")}
    with start_docker(place, image, runtimes, {"PATH": SYSTEM_PATH}, view=view_of("v2")) as docker:
        words = ("run", "--detach", "--name=refused", "--network=none", "--runtime=ocigpu")
        assert docker(*words, "--env=NVIDIA_VISIBLE_DEVICES=9", IMAGE, "sleep", "600", check=False).returncode
        report = json.loads(ocigpu(programs, "explain", "refused", "--json", socket=docker.socket))
        assert report["failed_start"]["name"] == "refused"
        assert [entry["code"] for entry in report["codes"]] == ["OCIGPU-DEV-1"]


@pytest.mark.rest
def test_a_full_disk_is_named_and_room_on_it_is_enough(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], tmp_path: Path
) -> None:
    """The bundle's own disk, which the shim writes config.json to; the hint names the command that shows it."""
    made = make_bundle(["nvidia-smi", "-L"], {"NVIDIA_VISIBLE_DEVICES": "1"}, layout="debian")
    bundle = tmp_path / "small"
    bundle.mkdir()
    run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", bundle])
    try:
        config = json.loads((made / "config.json").read_text())
        config["root"]["path"] = str(made / config["root"]["path"])
        (bundle / "config.json").write_text(json.dumps(config))
        subprocess.run(["dd", "if=/dev/zero", f"of={bundle / 'fill'}", "bs=4k"], capture_output=True, check=False)
        environment = {**runtime_environment, "OCIGPU_CONFIG": str(simulated_host.settings)}
        state = tmp_path / "state"
        failed = run_container([RUNTIME], bundle, "full-disk", env=environment, state=state)
        assert "OCIGPU-SPEC-4" in failed.stderr
        assert "No space left on device" in failed.stderr
        assert "(df -h BUNDLE)" in failed.stderr
        (bundle / "fill").unlink()
        done = run_container([RUNTIME], bundle, "full-disk", env=environment, state=state)
        assert listed_uuids(done.stdout) == [simulated_host.gpus[1]], done.stderr
    finally:
        run(["umount", "-l", bundle])
