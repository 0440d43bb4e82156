"""Failures that people have reported, staged on real engines; what the doctor prints then is typed, and it works.

Each failure is one of somebody's machine. The administrator (support/staged.py) types every command of the report to
the letter, and asks again where another cause comes to light. The tests demand that the container fails before.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import requirements
from support.process import run
from support.product import SimulatedHost, listed_uuids, make_simulated_host
from support.staged import CRI, Staged, staged_machine

from ocigpu.engines.checker import program_version

pytestmark = [pytest.mark.root, pytest.mark.engine, pytest.mark.xdist_group("podman")]

REST = pytest.mark.rest
ROUNDS = 3
"""So often is the doctor asked: a daemon that cannot start hides what its containers would lack."""


class Failure(NamedTuple):
    """A failure of one ``engine`` on the ``way`` to GPUs; ``finding``: the name of what reports it."""

    engine: str
    way: str
    finding: str
    stage: Callable[[Staged], object]


@pytest.fixture(scope="module")
def kept(session_directory: Path) -> Iterator[tuple[SimulatedHost, Path]]:
    """A host with two GPUs, and a copy of it as it was made."""
    place, copy = session_directory / "staged-host", session_directory / "staged-copy"
    host = make_simulated_host(place, 2)
    run(["cp", "-a", place, copy])
    yield host, copy
    shutil.rmtree(place)
    shutil.rmtree(copy)


@pytest.fixture
def machine(
    session_directory: Path, kept: tuple[SimulatedHost, Path], image: Path, rootfs: Callable[[str], Path]
) -> Iterator[Staged]:
    requirements.require(requirements.overlay())
    host, copy = kept
    shutil.rmtree(host.directory)
    run(["cp", "-a", copy, host.directory])
    with staged_machine(session_directory / "staged", host, image, rootfs("glibc")) as made:
        yield made


# Docker


def with_a_trailing_comma(machine: Staged) -> None:
    text = machine.read("/etc/docker/daemon.json").rstrip()
    assert text.endswith("}")
    machine.put("/etc/docker/daemon.json", f'{text[:-1].rstrip()},\n  "log-level": "info",\n}}\n')
    machine.run("systemctl", "restart", "docker", check=False)


def with_comments(machine: Staged) -> None:
    """As in a file of Visual Studio Code's."""
    text = machine.read("/etc/docker/daemon.json").replace("{", '{\n  // the runtimes, and a "default"', 1)
    machine.put("/etc/docker/daemon.json", text)
    machine.run("systemctl", "restart", "docker", check=False)


def with_a_dead_link_for_its_file(machine: Staged) -> None:
    """A tool that keeps /etc elsewhere was removed; the hook of --gpus was ours, and is gone with it."""
    machine.sh("rm /etc/docker/daemon.json /usr/local/bin/nvidia-container-runtime-hook")
    machine.sh("ln -s /srv/gone/daemon.json /etc/docker/daemon.json")
    machine.run("systemctl", "restart", "docker")


def with_a_hook_without_its_mode(machine: Staged) -> None:
    machine.sh("chmod -x /usr/local/bin/ocigpu-hook")


def with_systemd_that_gives_up(machine: Staged) -> None:
    """systemd starts it thrice, and then refuses, whoever asks."""
    with_a_trailing_comma(machine)
    for _ in range(3):
        done = machine.run("systemctl", "restart", "docker", check=False)
    assert "repeated too quickly" in done.stderr
    machine.sh("mkdir -p /run/systemd/system")


def with_the_programs_elsewhere(machine: Staged) -> None:
    """As after a package was replaced by an installation below /usr/local."""
    entry = {"ocigpu": {"path": "/opt/ocigpu-1/bin/ocigpu-runtime"}}
    machine.edit_json("/etc/docker/daemon.json", runtimes=entry, **{"default-runtime": "ocigpu"})
    machine.run("systemctl", "restart", "docker", check=False)


def with_a_file_that_was_not_read(machine: Staged) -> None:
    configured = machine.read("/etc/docker/daemon.json")
    machine.put("/etc/docker/daemon.json", "{}")
    machine.run("systemctl", "restart", "docker")
    machine.put("/etc/docker/daemon.json", configured)


def with_an_entry_of_a_wrong_type(machine: Staged) -> None:
    machine.edit_json("/etc/docker/daemon.json", runtimes={"ocigpu": "/usr/local/bin/ocigpu-runtime"})
    machine.run("systemctl", "restart", "docker", check=False)


def with_a_hook_that_leads_nowhere(machine: Staged) -> None:
    machine.sh("ln -sfn /opt/ocigpu-1/bin/ocigpu-hook /usr/local/bin/nvidia-container-runtime-hook")
    machine.run("systemctl", "restart", "docker")


def with_a_remote_context(machine: Staged) -> None:
    machine.run("docker", "context", "create", "builder", "--docker", "host=tcp://127.0.0.1:1")
    machine.run("docker", "context", "use", "builder")


def with_programs_mounted_noexec(machine: Staged) -> None:
    """Images of hardened systems mount what is not the system's with noexec."""
    machine.sh("mount -t tmpfs none /opt; mv /usr/local/bin/ocigpu-runtime /usr/local/bin/ocigpu-hook /opt")
    machine.sh("mount -o remount,noexec /opt; ln -s /opt/ocigpu-runtime /opt/ocigpu-hook /usr/local/bin")


def with_the_vendors_hook_left_over(machine: Staged) -> None:
    """Only the library's packages were removed: NVIDIA's hook starts nvidia-container-cli, which is gone."""
    machine.sh("rm /usr/local/bin/nvidia-container-runtime-hook; mkdir /run/upper /run/work")
    machine.sh("mount -t overlay none -o lowerdir=/usr/bin,upperdir=/run/upper,workdir=/run/work /usr/bin")
    hook = '#!/bin/sh\necho "exec: \\"nvidia-container-cli\\": executable file not found in \\$PATH" >&2\nexit 1\n'
    machine.put("/usr/bin/nvidia-container-runtime-hook", hook, 0o755)
    machine.run("systemctl", "restart", "docker")


# The driver's nodes, and ocigpu's settings


def with_directories_instead_of_nodes(machine: Staged) -> None:
    """docker run -v /dev/nvidia0:/dev/nvidia0 before the driver was loaded: dockerd makes a directory."""
    for name in ("nvidia0", "nvidia-uvm"):
        (machine.host / "dev" / name).unlink()
        (machine.host / "dev" / name).mkdir()


def with_a_setting_of_a_wrong_type(machine: Staged) -> None:
    machine.add_setting('accept-nvidia-visible-devices-envvar-when-unprivileged = "yes"\n')


def with_settings_that_are_no_toml(machine: Staged) -> None:
    machine.add_setting("ldconfig = @/sbin/ldconfig\n")


def with_a_hook_of_an_older_installation(machine: Staged) -> None:
    machine.add_setting('hook.path = "/opt/ocigpu-1/bin/ocigpu-hook"\n')


def with_a_runtime_that_was_removed(machine: Staged) -> None:
    machine.add_setting('runtime.runtimes = ["docker-runc"]\n')


# Podman and CDI


def with_the_hook_file_of_a_removed_package(machine: Staged) -> None:
    """NVIDIA's toolkit before 1.14 brought it; the library's package, with nvidia-container-cli, was removed."""
    failing = '#!/bin/sh\necho "exec: nvidia-container-cli: not found" >&2\nexit 1\n'
    machine.put("/usr/local/bin/nvidia-container-toolkit", failing, 0o755)
    hook = {
        "version": "1.0.0",
        "hook": {"path": "/usr/local/bin/nvidia-container-toolkit", "args": ["nvidia-container-toolkit", "prestart"]},
        "when": {"always": True, "commands": [".*"]},
        "stages": ["prestart"],
    }
    machine.put("/etc/containers/oci/hooks.d/oci-nvidia-hook.json", json.dumps(hook))


def with_a_drop_in_that_is_no_toml(machine: Staged) -> None:
    machine.put("/etc/containers/containers.conf.d/50-local.conf", "[containers]\nenv_host = false\nruntime = ocigpu\n")


def with_a_default_that_was_moved(machine: Staged) -> None:
    text = '[engine]\nruntime = "ocigpu"\n[engine.runtimes]\nocigpu = ["/opt/ocigpu-1/bin/ocigpu-runtime"]\n'
    machine.put("/etc/containers/containers.conf.d/99-ocigpu.conf", text)


def with_a_specification_that_is_a_dead_link(machine: Staged) -> None:
    machine.sh("mkdir -p /run/cdi; ln -sfn /var/lib/gone/nvidia.yaml /etc/cdi/nvidia.yaml")


def with_a_specification_that_no_engine_looks_at(machine: Staged) -> None:
    machine.sh("mv /etc/cdi/nvidia.yaml /etc/cdi/nvidia.yml")


def with_a_hook_of_cdi_without_its_mode(machine: Staged) -> None:
    machine.sh(
        "cp -L /usr/local/bin/ocigpu-hook /usr/local/bin/nvidia-cdi-hook; chmod 644 /usr/local/bin/nvidia-cdi-hook"
    )
    text = machine.read("/etc/cdi/nvidia.yaml")
    machine.put("/etc/cdi/nvidia.yaml", text.replace("/usr/local/bin/ocigpu-hook", "/usr/local/bin/nvidia-cdi-hook"))


# containerd


def with_a_file_not_read(machine: Staged) -> None:
    configured = machine.read("/etc/containerd/config.toml")
    machine.run("ocigpu", "engine", "remove", "containerd")
    machine.run("systemctl", "restart", "containerd")
    machine.sh("sleep 2")
    machine.put("/etc/containerd/config.toml", configured)


def with_the_program_misplaced(machine: Staged) -> None:
    text = machine.read("/etc/containerd/config.toml")
    assert "BinaryName" in text
    lines = [line for line in text.splitlines() if "runtimes.ocigpu.options" not in line]
    machine.put("/etc/containerd/config.toml", "\n".join(lines) + "\n")
    machine.run("systemctl", "restart", "containerd")


def with_the_import_lost(machine: Staged) -> None:
    """Somebody has written the file anew (containerd config default): the drop-in is there, and nobody reads it."""
    machine.put("/etc/containerd/conf.d/gpus.toml", machine.read("/etc/containerd/config.toml"))
    machine.run("ocigpu", "engine", "remove", "containerd")
    machine.run("systemctl", "restart", "containerd")


def with_a_drop_in_that_hides_it(machine: Staged) -> None:
    """nvidia-ctk runtime configure has copied the table before ocigpu was in it."""
    text = machine.read("/etc/containerd/config.toml")
    machine.run("ocigpu", "engine", "remove", "containerd")
    copied = machine.read("/etc/containerd/config.toml")
    entry = '[{}.containerd.runtimes.{}]\nruntime_type = "io.containerd.runc.v2"\n'
    entries = "".join(entry.format(CRI, name) for name in ("runc", "nvidia"))
    machine.put("/etc/containerd/conf.d/99-nvidia.toml", copied + entries)
    machine.put("/etc/containerd/config.toml", 'imports = ["/etc/containerd/conf.d/*.toml"]\n' + text)
    machine.run("systemctl", "restart", "containerd")


def with_a_drop_in_broken(machine: Staged) -> None:
    text = machine.read("/etc/containerd/config.toml")
    machine.put("/etc/containerd/config.toml", 'imports = ["/etc/containerd/conf.d/*.toml"]\n' + text)
    machine.put("/etc/containerd/conf.d/proxy.toml", "version = 2\nproxy = http://proxy:3128\n")
    machine.run("systemctl", "restart", "containerd", check=False)


def with_pods_switched_off(machine: Staged) -> None:
    text = machine.read("/etc/containerd/config.toml")
    machine.put("/etc/containerd/config.toml", 'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n' + text)
    machine.run("systemctl", "restart", "containerd")


def failures() -> Iterator[tuple[str, Failure]]:
    """Yield the failures by name: engine, way to GPUs, the finding that reports it, and what makes it."""
    yield "docker-trailing-comma", Failure("docker", "runtime", "engine-config-broken", with_a_trailing_comma)
    yield "docker-comments", Failure("docker", "runtime", "engine-config-broken", with_comments)
    yield "docker-dead-link", Failure("docker", "gpus", "engine-config-broken", with_a_dead_link_for_its_file)
    yield "docker-hook-mode", Failure("docker", "gpus", "programs-broken", with_a_hook_without_its_mode)
    yield "docker-start-limit", Failure("docker", "runtime", "engine-config-broken", with_systemd_that_gives_up)
    yield "docker-moved", Failure("docker", "", "engine-runtime-missing", with_the_programs_elsewhere)
    yield "docker-not-read", Failure("docker", "runtime", "docker-not-restarted", with_a_file_that_was_not_read)
    yield "docker-entry-type", Failure("docker", "runtime", "engine-config-broken", with_an_entry_of_a_wrong_type)
    yield "docker-dead-hook", Failure("docker", "gpus", "docker-gpus-hook", with_a_hook_that_leads_nowhere)
    yield "docker-context", Failure("docker", "gpus", "docker-context", with_a_remote_context)
    yield "docker-noexec", Failure("docker", "runtime", "engine-runtime-missing", with_programs_mounted_noexec)
    yield "docker-vendors-hook", Failure("docker", "gpus", "docker-gpus-hook", with_the_vendors_hook_left_over)
    yield "nodes-directories", Failure("podman", "cdi", "device-nodes-wrong", with_directories_instead_of_nodes)
    yield "settings-type", Failure("podman", "runtime", "settings-unusable", with_a_setting_of_a_wrong_type)
    yield "settings-no-toml", Failure("podman", "runtime", "settings-unusable", with_settings_that_are_no_toml)
    yield "settings-hook", Failure("podman", "runtime", "programs-broken", with_a_hook_of_an_older_installation)
    yield "settings-runtime", Failure("podman", "runtime", "runtime-missing", with_a_runtime_that_was_removed)
    yield "podman-hook-file", Failure("podman", "cdi", "hook-file", with_the_hook_file_of_a_removed_package)
    yield "podman-no-toml", Failure("podman", "cdi", "engine-config-broken", with_a_drop_in_that_is_no_toml)
    yield "podman-moved", Failure("podman", "", "engine-runtime-missing", with_a_default_that_was_moved)
    yield "cdi-dead-link", Failure("podman", "cdi", "cdi-unreadable", with_a_specification_that_is_a_dead_link)
    yield "cdi-yml", Failure("podman", "cdi", "cdi-missing", with_a_specification_that_no_engine_looks_at)
    yield "cdi-hook-mode", Failure("podman", "cdi", "cdi-hook-missing", with_a_hook_of_cdi_without_its_mode)
    yield "containerd-not-read", Failure("containerd", "runtime", "engine-not-restarted", with_a_file_not_read)
    yield "containerd-table", Failure("containerd", "runtime", "engine-not-configured", with_the_program_misplaced)
    yield "containerd-import", Failure("containerd", "runtime", "engine-not-configured", with_the_import_lost)
    yield "containerd-hidden", Failure("containerd", "runtime", "containerd-hidden", with_a_drop_in_that_hides_it)
    yield "containerd-drop-in", Failure("containerd", "runtime", "engine-config-broken", with_a_drop_in_broken)
    yield "containerd-cri-off", Failure("containerd", "runtime", "containerd-cri-off", with_pods_switched_off)


FAILURES = dict(failures())
QUICK = ("settings-type", "cdi-dead-link", "podman-no-toml")
"""Podman has no daemon to wait for."""
PAIRS = (
    ("docker-moved", "docker-trailing-comma"),
    ("docker-dead-hook", "docker-context"),
    ("docker-dead-link", "docker-hook-mode"),
    ("nodes-directories", "settings-type"),
    ("podman-hook-file", "cdi-dead-link"),
    ("containerd-not-read", "settings-runtime"),
)


def check_followed(machine: Staged, *names: str) -> None:
    """Stage failures, type what the doctor prints, and demand the GPUs in each way that the failures concern."""
    staged = [FAILURES[name] for name in names]
    engine = staged[0].engine
    machine.begin(engine)
    for failure in staged:
        failure.stage(machine)
    ways = {failure.way: machine.gpus for failure in staged if failure.engine == engine}

    def listed() -> dict[str, list[str]]:
        return {way: listed_uuids(machine.listed(way).stdout) for way in ways}

    if "containerd-hidden" in names and (program_version("/", "containerd") or ()) >= (2, 1):
        assert listed() == ways, "it merges the tables of its files"
        return
    assert not any(listed().values())
    reports: list[str] = []
    while len(reports) < ROUNDS and listed() != ways:
        reports.append(machine.doctor())
        machine.follow(reports[-1])
    said = "\n".join(reports)
    last = "\n".join(machine.listed(way).stderr for way in ways)
    assert listed() == ways, f"{last}\n{said}"
    found = [f" {failure.finding}: " in said for failure in staged]
    # what one failure hides is sometimes fixed along with it: a command that configures an engine mends its entry, too
    assert found[0] if len(staged) == 1 else any(found), said


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=REST) for name in FAILURES])
def test_what_is_printed_on_a_failure_gives_the_container_its_gpus(name: str, machine: Staged) -> None:
    check_followed(machine, name)


@REST
def test_setup_restarts_a_containerd_that_has_not_read_its_file(machine: Staged) -> None:
    machine.begin("containerd")
    with_a_file_not_read(machine)
    assert "then:\n  systemctl restart containerd\n" in machine.run("ocigpu", "setup", "containerd", "--dry-run").stdout


@REST
def test_a_machine_with_docker_alone_hears_of_no_other_engine(machine: Staged) -> None:
    """The containerd of Docker's packages has a file, too, and runs before dockerd, which then uses it."""
    machine.put("/etc/containerd/config.toml", f'version = 2\n[{CRI}.cni]\nbin_dir = "/usr/lib/cni"\n')
    machine.run("systemctl", "start", "containerd")
    machine.begin("docker")
    report = machine.doctor()
    assert "\nengines  Docker: --runtime yes, " in report
    for name in ("containerd", "podman", "Podman", "CRI-O"):
        assert name not in report
    machine.sh("mkdir -p /run/root/kubelet; mount --bind /run/root /var/lib")  # somebody starts pods here
    assert "engine-not-configured: containerd is installed" in machine.doctor()


@REST
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_what_is_printed_on_two_failures_gives_the_container_its_gpus(names: tuple[str, str], machine: Staged) -> None:
    check_followed(machine, *names)
