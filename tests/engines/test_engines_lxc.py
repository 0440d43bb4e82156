"""A real LXC, whose hook for ``lxc.hook.mount`` calls nvidia-container-cli: docs/ENGINES.md, "LXC and Incus"."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support import machine, requirements
from support.bundle import copy_tree, give_to
from support.process import Completed, explain, run
from support.product import CONTROL_NODES, LIBRARIES, SimulatedHost, gpu_names, listed_uuids
from support.runtimes import answers, container_id, parts, probe, script, view_of

pytestmark = [pytest.mark.root, pytest.mark.engine]

IDS = "root:100000:65536\n"
FIRST_ID = 100000
CONFIGURATION = """\
lxc.rootfs.path = dir:{root}
lxc.cgroup.dir = {name}
lxc.idmap = u 0 100000 65536
lxc.idmap = g 0 100000 65536
lxc.net.0.type = empty
lxc.mount.auto = proc:mixed sys:ro
lxc.hook.mount = /usr/share/lxc/hooks/nvidia
"""
# /etc/subuid says which ids root may map: the machine's own file need not
MAPPED = 'mount --bind "$0" /etc/subuid && mount --bind "$0" /etc/subgid && exec "$@"'
LOOK = script(
    ["nvidia-smi", "-L"],
    probe(["list", "/dev", "/proc/driver/nvidia/gpus"], ["open", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]),
    ["/dlopen", *LIBRARIES],
)


class Lxc:
    """A container of LXC: its ``root``; ``programs`` has nvidia-container-cli, which its hook finds on the PATH."""

    def __init__(self, directory: Path, host: SimulatedHost, rootfs: Path, programs: Path) -> None:
        self.directory, self.host = directory, host
        self.root = directory / "rootfs"
        copy_tree(str(rootfs), str(self.root))
        self.log = directory / "hook/nvidia.log"
        self.log.parent.mkdir()
        give_to(self.log.parent, FIRST_ID, FIRST_ID)
        self.env = {"PATH": f"{programs}:{os.environ['PATH']}"}

    def run(self, *lines: str) -> Completed:
        """``lxc-execute`` in a container of these further lines of configuration; LXC's log is standard error.

        At level DEBUG the hook has a log of its own as well, where LXC keeps the first ten pieces of its output alone.
        """
        give_to(self.root, FIRST_ID, FIRST_ID)
        name = container_id()
        file, ids, log = (self.directory / each for each in ("config", "ids", "log"))
        ids.write_text(IDS)
        log.unlink(missing_ok=True)
        file.write_text(CONFIGURATION.format(root=self.root, name=name) + "".join(f"{line}\n" for line in lines))
        words = ["lxc-execute", "-P", self.directory, "-n", name, "-f", file, "-o", log, "-l", "DEBUG", "--", *LOOK]
        try:
            result = run(
                [*view_of("v2"), "unshare", "--mount", "sh", "-c", MAPPED, ids, *words], env=self.env, check=False
            )
        finally:
            machine.remove_cgroups(name)
        result.stderr += log.read_text()
        return result


@pytest.fixture
def lxc(work_directory: Path, simulated_host: SimulatedHost, rootfs: Callable[[str], Path], vendor_cli: Path) -> Lxc:
    requirements.require(requirements.programs("lxc-execute", "newuidmap"))
    return Lxc(work_directory, simulated_host, rootfs("glibc"), vendor_cli)


def test_a_container_gets_its_gpus(lxc: Lxc) -> None:
    """Those that it names, and nothing of them stays in the image."""
    result = lxc.run(
        "lxc.environment = NVIDIA_VISIBLE_DEVICES=1", "lxc.environment = NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    )
    assert result.returncode == 0, explain(result)
    listing, probed, opened = parts(result.stdout)
    assert listed_uuids(listing) == [lxc.host.gpus[1]]
    seen = answers(probed)
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia1", *CONTROL_NODES])
    assert seen["list", "/proc/driver/nvidia/gpus"] == "0000:02:00.0"
    assert [seen["open", f"/dev/{name}"] for name in ("nvidia0", "nvidia1", "nvidiactl")] == [
        "ENOENT",
        "ENXIO",
        "ENXIO",
    ]
    assert opened.splitlines() == [f"dlopen {name} ok" for name in LIBRARIES]
    assert machine.mounts_below(str(lxc.root)) == []


def test_a_container_that_asks_for_nothing_is_left_alone(lxc: Lxc) -> None:
    result = lxc.run()
    assert result.returncode == 0, explain(result)
    assert gpu_names(answers(result.stdout)["list", "/dev"]) == []
    assert "nvidia-container-cli" not in result.stderr


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("NVIDIA_VISIBLE_DEVICES=9", "OCIGPU-DEV-1: device error: no such device "),
        (
            "NVIDIA_VISIBLE_DEVICES=0\nlxc.environment = NVIDIA_REQUIRE_CUDA=cuda>=99.0",
            "OCIGPU-REQ-3: requirement error: ",
        ),
        ("NVIDIA_VISIBLE_DEVICES=0", "OCIGPU-MNT-2: mount error: "),
    ],
    ids=["no such device", "requirement", "a directory in the way"],
)
def test_a_failure_is_in_the_log_and_the_image_is_as_it_was(lxc: Lxc, variable: str, message: str) -> None:
    if "MNT-2" in message:
        (lxc.root / "usr/bin/nvidia-smi").mkdir()
    give_to(lxc.root, FIRST_ID, FIRST_ID)
    before = machine.tree(lxc.root)
    result = lxc.run(f"lxc.environment = {variable}")
    assert result.returncode != 0
    assert result.stdout == ""
    assert "Failed to run mount hooks" in result.stderr, explain(result)
    assert f"ocigpu-container-cli: {message}" in lxc.log.read_text()
    assert machine.tree(lxc.root) == before


def test_a_link_of_the_image_leads_nowhere_outside(lxc: Lxc) -> None:
    """What is made for the container is made below its root, whatever links an image has."""
    outside = lxc.directory / "outside"
    outside.mkdir()
    outside.chmod(0o777)
    (lxc.root / "usr/bin/nvidia-smi").symlink_to(f"../../../{outside.name}/made")
    (lxc.root / "etc/ld.so.conf.d").symlink_to(outside)
    lxc.run("lxc.environment = NVIDIA_VISIBLE_DEVICES=0")
    assert list(outside.iterdir()) == []
