"""What is left when a container is gone, and what it keeps while it runs."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from security_lab import LIBRARY_DIR, MODES, VERSION, WAYS, Attacks
from support import machine
from support.process import explain, run
from support.product import RUNTIME, failed_with
from support.runtimes import container_id, start_in_background, view_of

pytestmark = [pytest.mark.root, pytest.mark.engine]


@pytest.fixture
def shared_place(attacks: Attacks) -> Iterator[Path]:
    """A directory whose mount is shared with the host; bundles are made in it."""
    place = attacks.directory / "shared"
    place.mkdir(mode=0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "ocigpu-test", place], check=True)
    subprocess.run(["mount", "--make-rshared", place], check=True)
    attacks.directory = place
    yield place
    while machine.mounts_below(str(place)):
        subprocess.run(["umount", "-l", machine.mounts_below(str(place))[-1].split()[4]], check=True)


@pytest.mark.parametrize("propagation", ["rshared", "shared", "rslave"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "chmod"])
def test_a_root_that_is_shared_with_the_host_leaves_no_mount_there(
    attacks: Attacks, shared_place: Path, way: str, propagation: str
) -> None:
    """12: what the runtime itself leaves there without a GPU is not ours; nothing else is left."""

    def edit(config: dict[str, Any]) -> None:
        config["linux"]["rootfsPropagation"] = propagation

    def mounts() -> list[str]:
        return [line.split(" ", 2)[2] for line in machine.mounts_below(str(shared_place))]

    bundle, marker = attacks.bundle(lambda *_: None, way, edit=edit)
    before = mounts()
    result = attacks.run_any(bundle, marker, way).result
    assert "started" in result.stdout, explain(result)
    assert mounts() == before


@pytest.mark.parametrize("destination", ["/run", LIBRARY_DIR, "/etc"])
@pytest.mark.parametrize("way", ["hook", "spec", "cdi", "create-symlinks", "update-application-profile"])
def test_a_volume_that_is_shared_with_the_host_leaves_no_mount_there(
    attacks: Attacks, shared_place: Path, way: str, destination: str
) -> None:
    """12: bidirectional propagation; in mode cdi, where the runtime would pass its mounts on, nothing is started."""
    attacks.directory = shared_place.parent  # runc makes the mount private that a root directory is on
    volume = shared_place / "volume"

    def edit(config: dict[str, Any]) -> None:
        config["linux"]["rootfsPropagation"] = "rshared"
        options = ["rbind", "rshared"]
        config["mounts"].append({"destination": destination, "source": str(volume), "type": "bind", "options": options})

    volume.mkdir()
    inner = attacks.image / destination[1:]
    if inner.exists():
        shutil.copytree(inner, volume, symlinks=True, dirs_exist_ok=True)
    for name in ("libcuda.so.1", "libcuda.so"):
        (volume / name).write_text("of the image")
    (volume / f"libcuda.so.{VERSION}").write_text("of the image")
    bundle, marker = attacks.bundle(lambda *_: None, way, edit=edit)
    before = [line.split(" ", 2)[2] for line in machine.mounts_below(str(shared_place))]
    result = attacks.run_any(bundle, marker, way).result
    if way == "cdi":
        assert failed_with("OCIGPU-CDI-6", result), explain(result)
        assert "a volume that is shared with the host" in result.stderr
    else:
        assert "started" in result.stdout, explain(result)
    assert [line.split(" ", 2)[2] for line in machine.mounts_below(str(shared_place))] == before


class Running:
    """A container that waits, of runc."""

    def __init__(self, attacks: Attacks, mode: str, cgroup: str) -> None:
        self.attacks, self.cgroup = attacks, cgroup
        arguments = ["/probe", "pause"]
        self.bundle, self.marker = attacks.bundle(lambda *_: None, mode, arguments=arguments)
        self.env = attacks.environment(mode)
        self.name = container_id()
        self.command = [*view_of(cgroup), RUNTIME, "--root", attacks.directory / "state"]
        started = start_in_background(self.command, ["run", "--detach"], self.bundle, self.name, self.env)
        assert started.returncode == 0, explain(started)

    def delete(self) -> None:
        run([*self.command, "delete", "--force", self.name], env=self.env, check=False)

    def opened(self) -> dict[str, str]:
        """Return how opening the granted GPU and another goes: ENXIO is what a simulated GPU answers."""
        other = self.attacks.host.number("nvidia1")
        words = ["/probe", "mknod", "/other", *other, "--", "open", "/dev/nvidia0", "/dev/nvidiactl", "/other"]
        said = run([*self.command, "exec", self.name, *words], env=self.env).stdout
        return {line.split()[1]: line.split()[2] for line in said.splitlines() if line.startswith("open")}

    def reload(self) -> None:
        """Apply the rules of config.json once more, as systemd does on a daemon-reload: cgroup version 1."""
        directory = Path("/sys/fs/cgroup/devices", self.name)
        if not directory.exists():
            directory = Path("/sys/fs/cgroup/devices" + json.loads(self.config)["linux"]["cgroupsPath"])
        write(directory / "devices.deny", "a")
        for kind, number in (("c", "*:*"), ("b", "*:*")):
            write(directory / "devices.allow", f"{kind} {number} m")
        for rule in json.loads(self.config)["linux"]["resources"]["devices"]:
            if "major" in rule:
                minor = rule.get("minor", -1)
                text = f"{rule['type']} {rule['major']}:{minor if minor >= 0 else '*'} {rule['access']}"
                write(directory / ("devices.allow" if rule["allow"] else "devices.deny"), text)

    @property
    def config(self) -> str:
        return (self.bundle / "config.json").read_text()


def write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def nothing_more(running: Running) -> None:
    assert running.opened() == {"/dev/nvidia0": "ENXIO", "/dev/nvidiactl": "ENXIO", "/other": "EPERM"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cgroup", ["v1", "v2"])
def test_a_running_container_keeps_its_gpu_and_no_other(attacks: Attacks, mode: str, cgroup: str) -> None:
    """17: after an update of its limits, and after the rules are applied anew from its configuration."""
    running = Running(attacks, mode, cgroup)
    try:
        nothing_more(running)
        for limit in (100, 200):
            resources = {"pids": {"limit": limit}} if cgroup == "v1" else {}  # other controllers are of version 1 here
            file = attacks.directory / "resources.json"
            file.write_text(json.dumps(resources))
            run([*running.command, "update", "--resources", file, running.name], env=running.env)
            nothing_more(running)
        if cgroup == "v1":
            running.reload()
            nothing_more(running)
    finally:
        running.delete()
    running.marker.check()
