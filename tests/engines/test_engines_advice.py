"""A container that is not started, and what is printed then: whoever follows it to the letter has the container."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import requirements
from support.bundle import give_to
from support.fixtures import MakeBundle
from support.process import Completed, run
from support.product import PROGRAMS, RUNTIME, PublicCopy, make_simulated_host
from support.runtimes import answers, container_id, probe, run_container

from ocigpu.doctor.host import Host
from ocigpu.doctor.report import run_checks

pytestmark = [pytest.mark.root, pytest.mark.engine]

MODES = pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
OPEN = ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"]
COMMAND = re.compile(r"ocigpu (?:system|cdi|sim|config) [^;\\\"\n]*")


class Lab(NamedTuple):
    """A simulated host, and settings of one mode for it."""

    host: Path
    settings: Path
    variables: dict[str, str]
    make_bundle: MakeBundle

    def start(
        self,
        edit: Callable[[dict[str, Any]], None] | None = None,
        devices: str = "all",
        layout: str = "busybox",
        prefix: tuple[str, ...] = (),
    ) -> Completed:
        """Run a container with all GPUs that opens its nodes."""
        bundle = self.make_bundle(probe(["open", *OPEN]), {"NVIDIA_VISIBLE_DEVICES": devices}, layout, edit)
        if edit:
            give_to(bundle / "rootfs", 100000, 100000)
        return run_container([RUNTIME], bundle, container_id(), env=self.variables, prefix=prefix)

    def follow(self, printed: str) -> list[str]:
        """Carry out the commands of a text as a shell would."""
        found = [match.strip() for match in COMMAND.findall(printed)]
        for line in found:
            run(["sh", "-e", "-c", line], env={**self.variables, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"})
        return found

    def doctor(self, name: str) -> list[str]:
        """Return the commands that the doctor prints for what a check finds; none where it finds nothing."""
        found = run_checks(Host(config=str(self.settings)), (name,))
        return [fix for item in found if item.is_bad for fix in item.fixes]


@pytest.fixture(scope="module")
def kept(session_directory: Path) -> tuple[Path, Path]:
    requirements.require(requirements.root(), requirements.programs("gcc"))
    place, copy = session_directory / "advice", session_directory / "advice copy"
    make_simulated_host(place, 2)
    run(["cp", "-a", place, copy])
    return place, copy


@pytest.fixture
def make_lab(
    kept: tuple[Path, Path],
    work_directory: Path,
    runtime_environment: dict[str, str],
    make_bundle: MakeBundle,
    public_copy: PublicCopy,
) -> Callable[[str], Lab]:
    def make(mode: str) -> Lab:
        place, copy = kept
        shutil.rmtree(place, ignore_errors=True)
        run(["cp", "-a", copy, place])
        settings = work_directory / "config.toml"
        specs = f'cdi.spec-dirs = ["{work_directory}"]'
        hook = public_copy.runtime.with_name("ocigpu-hook")  # the root of a container with users of its own runs it
        settings.write_text(f'mode = "{mode}"\nhook.path = "{hook}"\n{specs}\nsimulation.root = "{place}"\n')
        settings.chmod(0o644)
        variables = {name: text for name, text in runtime_environment.items() if name != "LD_PRELOAD"}
        lab = Lab(place, settings, {**variables, "OCIGPU_CONFIG": str(settings)}, make_bundle)
        if mode == "cdi":
            lab.follow(f"ocigpu cdi generate --output {work_directory}/nvidia.yaml --quiet")
        return lab

    return make


def opened(done: Completed) -> set[str]:
    """Return what became of each node: ENXIO is the answer of a device that may be opened and has no driver."""
    assert done.returncode == 0, done.stderr
    seen = answers(done.stdout)
    return {seen["open", path] for path in OPEN}


def with_users_of_its_own(config: dict[str, Any]) -> None:
    config["linux"]["namespaces"].append({"type": "user"})
    for name in ("uidMappings", "gidMappings"):
        config["linux"][name] = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    config["mounts"] = [item for item in config["mounts"] if item["destination"] != "/sys"]


@MODES
def test_no_container_with_cuda_starts_without_its_node(make_lab: Callable[[str], Lab], mode: str) -> None:
    """nvidia-smi works without /dev/nvidia-uvm, and CUDA fails with error 999."""
    lab = make_lab(mode)
    for name in ("nvidia-uvm", "nvidia-uvm-tools"):
        (lab.host / "dev" / name).unlink()
    done = lab.start()
    if mode == "cdi":  # a simulated host's node is mounted from its own path
        assert "OCIGPU-CDI-6" in done.stderr
        (steps,) = lab.follow(done.stderr)
        assert steps.startswith("ocigpu system create-device-nodes && ocigpu cdi refresh --output ")
        done = lab.start()
    assert opened(done) == {"ENXIO"}


@MODES
def test_the_node_of_cuda_that_the_doctor_has_made_comes_to_the_container(
    make_lab: Callable[[str], Lab], mode: str
) -> None:
    lab = make_lab(mode)
    for name in ("nvidia-uvm", "nvidia-uvm-tools"):
        (lab.host / "dev" / name).unlink()
    fixes = lab.doctor("uvm-missing")
    assert fixes == [f"ocigpu system create-device-nodes --config {lab.settings}"]
    assert lab.follow("\n".join(fixes)) == fixes
    assert lab.doctor("uvm-missing") == []
    assert (lab.host / "dev/nvidia-uvm").is_char_device()
    assert opened(lab.start()) == {"ENXIO"}


@MODES
def test_a_node_that_has_to_be_mounted_is_made_as_the_hint_says(make_lab: Callable[[str], Lab], mode: str) -> None:
    lab = make_lab(mode)
    (lab.host / "dev/nvidia-uvm").unlink()
    done = lab.start(with_users_of_its_own)
    assert "OCIGPU-CDI-6" in done.stderr if mode == "cdi" else "OCIGPU-DEV-3" in done.stderr
    assert "/dev/nvidia-uvm" in done.stderr
    assert lab.follow(done.stderr)
    assert opened(lab.start(with_users_of_its_own)) == {"ENXIO"}


@pytest.mark.rest
def test_a_specification_that_was_written_without_the_node_is_written_again(make_lab: Callable[[str], Lab]) -> None:
    """A whole entry needs no node of the host; where it has to be mounted, the error is ours and not the runtime's."""
    lab = make_lab("cdi")
    (lab.host / "dev/nvidia-uvm").unlink()
    lab.follow(f"ocigpu cdi refresh --output {lab.settings.parent}/nvidia.yaml --quiet")
    done = lab.start(with_users_of_its_own)
    assert "OCIGPU-CDI-6" in done.stderr
    lab.follow(done.stderr)
    lab.follow(lab.doctor("cdi-stale")[0])
    assert opened(lab.start(with_users_of_its_own)) == {"ENXIO"}


@pytest.mark.rest
def test_a_simulated_host_that_was_removed_is_said_to_be_gone(make_lab: Callable[[str], Lab]) -> None:
    lab = make_lab("hook")
    shutil.rmtree(lab.host)
    said = lab.start().stderr
    assert f"OCIGPU-HOST-1: no simulated host: simulation.root {lab.host} does not exist\n" in said
    made, other = lab.doctor("simulated-host")
    assert made in said
    assert other == f"# or, for real GPUs: ocigpu config unset simulation.root --config {lab.settings}"
    lab.follow(said)
    assert opened(lab.start()) == {"ENXIO"}


def test_a_name_of_cdi_is_understood_in_the_mode_that_the_hint_names(make_lab: Callable[[str], Lab]) -> None:
    lab = make_lab("hook")
    said = lab.start(devices="nvidia.com/gpu=all").stderr
    (line,) = re.findall(r'mode = "\w+"', said)
    lab.settings.write_text(lab.settings.read_text().replace('mode = "hook"', line))
    said = lab.start(devices="nvidia.com/gpu=all").stderr
    assert "OCIGPU-CDI-4" in said
    assert "ocigpu cdi generate --output " in said
    lab.follow(f"ocigpu cdi generate --output {lab.settings.parent}/nvidia.yaml --quiet")
    assert opened(lab.start(devices="nvidia.com/gpu=all")) == {"ENXIO"}


def test_the_doctor_writes_a_specification_where_it_is_read(make_lab: Callable[[str], Lab]) -> None:
    lab = make_lab("cdi")
    (lab.settings.parent / "nvidia.yaml").unlink()
    assert "OCIGPU-CDI-4" in lab.start().stderr
    assert lab.follow("\n".join(lab.doctor("cdi-missing")))
    assert opened(lab.start()) == {"ENXIO"}


def test_a_file_that_cannot_be_used_is_named_with_what_to_run(make_lab: Callable[[str], Lab]) -> None:
    lab = make_lab("cdi")
    path = lab.settings.parent / "nvidia.yaml"
    path.write_text("cdiVersion: 0.5.0\n")
    said = lab.start().stderr
    assert said.splitlines()[1] == f"hint: Check it: ocigpu cdi validate {path}"


def test_settings_that_no_runtime_fits_are_told_from_a_host_without_one(make_lab: Callable[[str], Lab]) -> None:
    lab = make_lab("hook")
    with lab.settings.open("a") as file:
        file.write('runtime.runtimes = ["runcc"]\n')
    assert "OCIGPU-RT-1" in lab.start().stderr
    (fix,) = lab.doctor("runtime-missing")
    command, _, used = fix.partition("  # then ")
    assert command == f"ocigpu config unset runtime.runtimes --config {lab.settings}"
    assert os.path.basename(used.removesuffix(" is used")) in ("runc", "crun")
    assert lab.follow(command) == [command]
    assert opened(lab.start()) == {"ENXIO"}


def test_an_ldconfig_that_is_not_there_is_forgotten_as_the_hint_says(make_lab: Callable[[str], Lab]) -> None:
    lab = make_lab("hook")
    lab.settings.write_text(f'ldconfig = "/nowhere/ldconfig"\n{lab.settings.read_text()}')
    said = lab.start(layout="glibc").stderr
    assert "OCIGPU-LD-1" in said
    assert lab.follow(said.partition(". Else ")[0]) == ["ocigpu config unset ldconfig"]
    assert opened(lab.start(layout="glibc")) == {"ENXIO"}


def test_an_ldconfig_that_cannot_be_used_is_done_without_as_the_hint_says(make_lab: Callable[[str], Lab]) -> None:
    lab = make_lab("hook")
    ldconfig = os.path.realpath(requirements.find_program("ldconfig"))
    without = ("unshare", "--mount", "sh", "-c", f'mount --bind /dev/null {ldconfig} && exec "$@"', "sh")
    said = lab.start(layout="glibc", prefix=without).stderr
    assert "OCIGPU-LD-1" in said
    (line,) = re.findall(r'loader-cache = \\"\w+\\"', said)
    text = line.replace("\\", "")
    lab.settings.write_text(f"{text}\n{lab.settings.read_text()}")
    assert opened(lab.start(layout="glibc", prefix=without)) == {"ENXIO"}
