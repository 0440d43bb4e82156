"""For the same machine, hook mode gives a container what the vendor's legacy mode was recorded to give.

Every difference that is intended stands in the tables below with its reason; anything else fails.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.machine import LIBRARIES, read_recorded
from support.product import PROGRAMS
from support.runtimes import container_id

from ocigpu.cli.engines.busybox import make_bundle
from ocigpu.sim.create import create_host
from ocigpu.sim.made import remove_host

pytestmark = [pytest.mark.root, pytest.mark.engine]

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDED: dict[str, Any] = json.loads(read_recorded(REPOSITORY / "tests/recorded/vendor-legacy.json"))

REQUESTS = {
    "debian-8gpu-all": ("all", "compute,utility"),
    "host-8gpu-all": ("all", "compute,utility"),
    "host-8gpu-all-utility": ("all", "utility"),
    "host-8gpu-all-allcaps": ("all", "all"),
    "host-8gpu-idx0,2": ("0,2", "compute,utility"),
    "host-8gpu-badidx": ("99", "compute,utility"),
    "host-8gpu-void": ("void", "compute,utility"),
}

# Intended differences


def is_moved_graphics_file(path: str) -> bool:
    """The vendor's shim mounts some graphics libraries where the host has them, a directory this image's loader does
    not search without its cache; ours go where all other driver libraries go."""
    return path.startswith((f"{LIBRARIES}/libnvidia-egl-", f"{LIBRARIES}/gbm/"))


class Seen(NamedTuple):
    """What a container saw."""

    status: int
    errors: str
    environment: list[str]
    nodes: dict[str, str]
    opens: dict[str, str]
    mounts: dict[str, str]
    proc: list[str]
    params: str
    ldcache: list[str]
    links: list[str]
    rules: list[str]


SCRIPT = r"""
for node in $(find /dev -name 'nvidia*' -type c | sort); do
  stat -c "node %n %t %T %A" "$node"
  echo "open $node: $( (exec 3<> "$node") 2>&1 | sed 's/.*: //')"
done
find /proc/driver/nvidia -mindepth 1 2>/dev/null | sort | sed 's/^/proc /'
grep ModifyDeviceFiles /proc/driver/nvidia/params | sed 's/^/params /'
sed 's/^/mount /' /proc/self/mountinfo
env | sed 's/^/env /'
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("recorded") / "host"
    create_host(str(directory), gpus=8, model="a100", driver_version="550.163.01", dri=False)
    yield directory
    remove_host(str(directory))


def see(settings: Path, bundle: Path, case: str, variables: dict[str, str]) -> Seen:
    make_bundle(str(bundle), SCRIPT, variables, ("/bin/ls",))  # of a program with glibc: the image has a loader
    rootfs = bundle / "rootfs"
    if case.startswith("debian"):
        (rootfs / "etc/debian_version").write_text("12.1\n")
    else:
        (rootfs / "usr/lib64").mkdir(parents=True)
    before = {path for path in rootfs.rglob("*") if path.is_symlink()}
    name = f"{container_id()}-{case.replace(',', '-')}"
    shim = [str(PROGRAMS / "ocigpu-runtime"), "--root", str(bundle / "state")]
    env = {**os.environ, "OCIGPU_CONFIG": str(settings)}
    done = subprocess.run(
        [*shim, "run", "--bundle", str(bundle), name], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    nodes, opens, mounts = {}, {}, {}
    proc: list[str] = []
    environment: list[str] = []
    params = ""
    for line in done.stdout.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "node":
            path, major, minor, mode = rest.split()
            nodes[path.removeprefix("/dev/")] = f"{int(major, 16)}:{int(minor, 16)} {mode}"
        elif kind == "open":
            path, _, answer = rest.partition(": ")
            opens[path] = answer
        elif kind == "proc":
            proc.append(rest)
        elif kind == "params":
            params = rest
        elif kind == "env":
            environment.append(rest)
        elif kind == "mount":
            words = rest.split()
            mounts[words[4]] = words[5]
    config = json.loads((bundle / "config.json").read_text())
    rules = [
        f"{rule['type']} {rule['major']}:{rule['minor']} {rule['access']}"
        for rule in config["linux"]["resources"]["devices"]
        if rule.get("major") is not None
    ]
    cache = rootfs / "etc/ld.so.cache"
    listing = ""
    if cache.exists():
        command = ["/sbin/ldconfig", "-p", "-C", str(cache)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    entries = [line.split() for line in listing.splitlines() if "=>" in line]
    links = sorted(
        f"/{path.relative_to(rootfs)} -> {os.readlink(path)}"
        for path in rootfs.rglob("*")
        if path.is_symlink() and path not in before
    )
    return Seen(
        done.returncode,
        done.stderr,
        sorted(environment),
        nodes,
        opens,
        mounts,
        proc,
        params,
        sorted(f"{words[0]} => {words[-1]}" for words in entries),
        links,
        sorted(rules),
    )


@pytest.mark.parametrize("case", REQUESTS)
def test_hook_mode_gives_what_was_recorded(host: Path, tmp_path: Path, case: str) -> None:
    recorded = RECORDED[case]
    visible, capabilities = REQUESTS[case]
    variables = {"NVIDIA_VISIBLE_DEVICES": visible, "NVIDIA_DRIVER_CAPABILITIES": capabilities}
    seen = see(host / "config.toml", tmp_path / "bundle", case, variables)
    if not recorded["starts"]:
        assert seen.status != 0
        assert "OCIGPU-DEV-1" in seen.errors
        assert '"99"' in seen.errors
        return
    assert seen.status == 0, seen.errors
    assert seen.nodes == recorded["nodes"]
    assert seen.opens == recorded["opens"]
    assert seen.rules == recorded["device_rules"]
    assert_same_files(seen, recorded)
    assert_same_proc(seen, recorded)
    assert_same_loader_view(seen, recorded)


def assert_same_files(seen: Seen, recorded: dict[str, Any]) -> None:
    """Libraries, programs, firmware and sockets are at the same places with the same options."""
    expected = {}
    for path, options in recorded["mounts"].items():
        if path.startswith(("/dev/", "/proc/")):
            continue  # nodes: ours are made, the vendor's are mounts; procfs: compared by content
        if is_moved_graphics_file(path):
            continue
        expected[path] = set(options.split(","))
    ours = {
        path: {option for option in options.split(",") if option not in ("relatime", "noatime")}
        for path, options in seen.mounts.items()
        if path not in ("/", "/dev", "/sys", "/proc") and not path.startswith(("/dev/", "/proc/", "/sys/"))
    }
    # The application profile is read-only with us: nothing writes to it after it is made.
    profile = "/etc/nvidia/nvidia-application-profiles-rc.d"
    if profile in expected:
        expected[profile] = expected[profile] - {"rw"} | {"ro"}
    missing = {path: options for path, options in expected.items() if ours.get(path) != options}
    assert missing == {}
    extra = {path for path in ours if path not in expected and not is_intended_addition(path)}
    assert extra == set()


def is_intended_addition(path: str) -> bool:
    """What ours has and the recorded container lacks, each with its reason."""
    name = path.rpartition("/")[2]
    reasons = {
        "recorded at the host's own path instead (see is_moved_graphics_file)": name.startswith("libnvidia-egl-"),
        "the driver has them, the recorded CLI 1.17.0 is older than they are": name.startswith(
            ("libnvidia-nvvm70.so", "libnvidia-sandboxutils.so", "libnvidia-vulkan-producer.so")
        ),
        "in a directory that the loader's cache does not list, so the vendor's CLI missed it": name.startswith(
            "libvdpau_nvidia.so"
        ),
        "it names OpenCL's library, and came with graphics alone until toolkit 1.20": name == "nvidia.icd",
        "32-bit libraries (compat32 is part of all): the recorded machine had none": path.startswith(
            ("/usr/lib32/", "/usr/lib/lib")
        ),
    }
    return any(reasons.values())


def assert_same_proc(seen: Seen, recorded: dict[str, Any]) -> None:
    """/proc/driver/nvidia shows the same entries; without a request it is the host's own, not ours to change."""
    if not recorded["nodes"]:
        assert seen.proc == []  # recorded over a stand-in that the recording itself had mounted
        return
    # capabilities appear with MIG devices only, with us as with the vendor
    assert seen.proc == recorded["proc_driver_nvidia"]
    assert [" ".join(seen.params.split())] == recorded["params"]


def assert_same_loader_view(seen: Seen, recorded: dict[str, Any]) -> None:
    """Every SONAME that was found there is found here, at the same path, and no link is missing."""
    expected = {line for line in recorded["ldcache"] if not is_moved_graphics_file(line.split(" => ")[1])}
    assert expected - set(seen.ldcache) == set()
    links = {line for line in recorded["links"] if not is_moved_graphics_file(line)}
    assert links - set(seen.links) == set()
