"""``configure`` in real containers: called by a prestart hook, by hand, and as enroot and LXC call it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import machine
from support.bundle import LIBRARIES as MULTIARCH
from support.bundle import base_config, write_bundle
from support.process import Completed, explain, is_alive, run, wait_for
from support.product import PROGRAMS, RUNTIME, SimulatedHost, listed_uuids
from support.runtimes import container_id, run_container, set_cgroup, start_in_background, view_of
from support.survey import OWN_RUN, Seen, differences, finished, survey

from ocigpu.core.settings import CAPABILITIES

pytestmark = [pytest.mark.root, pytest.mark.engine]

VENDOR_HOOK = Path(__file__).parents[1] / "support/vendor_hook.sh"
VERSION = "550.163.01"
ALL_FLAGS = [f"--{name}" for name in CAPABILITIES]
LOOK = ["sh", "-c", "nvidia-smi -L; ldconfig -p | grep -c libcuda.so; /probe open /dev/nvidia0 /dev/nvidia1"]
ENROOT = """\
mount --make-rslave / && mount --bind "$1" "$1" && mount -o remount,bind,nosuid,nodev "$1" &&
mount --rbind /proc "$1/proc" && mount --make-rslave "$1/proc" && mount -t tmpfs -o nosuid,noexec,mode=755 none "$1/dev"
"""
LXC = """\
mount --make-rprivate / && mount --bind "$1" "$1" && mount -t proc proc "$1/proc" && mount -t tmpfs none "$1/dev"
"""
"""What both do before they call their hook, but for enroot's /dev, which is the host's; Apptainer does it likewise."""
CONTAINED = """\
mount --make-rslave / && cd "$1" && mount -t tmpfs -o nosuid none "${1%/*}" && mkdir "$1" "${1%/*}/dev" &&
mount -c --bind . "$1" && cd / && mount --rbind /proc "$1/proc" && mount --make-rslave "$1/proc" &&
mount --bind "${1%/*}/dev" "$1/dev"
"""
"""Apptainer with --contain: root and /dev are directories of one tmpfs, its session's."""


class Place:
    """A host, an image, and nvidia-container-cli: a link to ours, as --vendor-names would make it."""

    def __init__(self, directory: Path, host: SimulatedHost, image: Path, environment: dict[str, str]) -> None:
        self.directory, self.host, self.image = directory, host, image
        self.base, self.env = environment, host.environment(environment)
        self.program = directory / "nvidia-container-cli"
        self.program.symlink_to(PROGRAMS / "ocigpu-container-cli")

    def bundle(
        self, arguments: list[str], words: list[str] | None = None, variables: dict[str, str] | None = None
    ) -> Path:
        """Return a bundle; ``words``: its prestart hook is NVIDIA's, which calls the program with them."""
        config: dict[str, Any] = base_config(arguments, variables)
        if words is not None:
            hook = ["nvidia-container-runtime-hook", str(self.program), *words]
            env = [f"PATH={self.env['PATH']}", f"OCIGPU_CONFIG={self.env['OCIGPU_CONFIG']}"]
            config["hooks"] = {"prestart": [{"path": str(VENDOR_HOOK), "args": hook, "env": env}]}
        name = container_id()
        bundle = write_bundle(self.directory / name, config, self.image)
        set_cgroup(bundle, name)
        return bundle

    def run(self, *words: str | Path, before: tuple[str, ...] = (), cwd: Path | None = None) -> Completed:
        return run([*before, self.program, *words], env=self.env, check=False, cwd=cwd)


@pytest.fixture
def place(
    work_directory: Path,
    simulated_host: SimulatedHost,
    rootfs: Callable[[str], Path],
    runtime_environment: dict[str, str],
) -> Place:
    return Place(work_directory, simulated_host, rootfs("glibc"), runtime_environment)


@pytest.mark.parametrize("runtime", ["runc", "crun"])
@pytest.mark.parametrize("devices", ["0,3", "all", ""])
def test_a_container_configured_by_the_vendors_hook_equals_one_by_ours(
    place: Place, devices: str, runtime: str
) -> None:
    """Nodes, rules, mounts, links, loader's cache and procfs."""
    words = ["--load-kmods", "configure", "--ldconfig=@/sbin/ldconfig", *ALL_FLAGS]
    words += [f"--device={devices}"] if devices else []
    variables = {"NVIDIA_VISIBLE_DEVICES": devices or "none", "NVIDIA_DRIVER_CAPABILITIES": "all"}

    def seen(command: Path | str, bundle: Path) -> Seen:
        env = place.host.environment(place.base, runtime)
        result = run_container([command], bundle, container_id(), env=env, cgroup="v2", prefix=OWN_RUN)
        return {key: value for key, value in finished(result).items() if key != "mount /"}

    ours = seen(RUNTIME, place.bundle(survey(place.host), variables=variables))
    configured = seen(runtime, place.bundle(survey(place.host), words))
    assert differences(ours, configured) == {}
    gpus = place.host.gpus
    assert listed_uuids(ours["listing"]) == list({"0,3": (gpus[0], gpus[3]), "all": gpus, "": ()}[devices])


@pytest.mark.parametrize("cgroup", ["v1", "v2"])
def test_a_created_container_is_configured_by_hand(place: Place, cgroup: str) -> None:
    """Success prints nothing; the file of --debug says what was done."""
    bundle, log = place.bundle(LOOK), place.directory / "log"
    words = ["-d", str(log), "configure", "-cu", "-d0", "--require=cuda>=11.0", "--no-persistenced"]
    result = configure_created(place, bundle, words, cgroup)
    assert (result.stderr, result.returncode) == ("", 0)
    lines = result.stdout.splitlines()
    assert listed_uuids(result.stdout) == [place.host.gpus[0]]
    assert lines[-3:] == ["2", "open /dev/nvidia0 ENXIO", "open /dev/nvidia1 ENOENT"]
    said = log.read_text()
    assert f"GPUs: {place.host.gpus[0]}\n" in said
    assert "node /dev/nvidia0 c 195:0" in said
    assert "nvidia-persistenced/socket" not in said


def configure_created(place: Place, bundle: Path, words: list[str], cgroup: str = "v1") -> Completed:
    """Create, configure, start: returns what the program said, and on standard output what the container did."""
    name = bundle.name
    rootfs = bundle / json.loads((bundle / "config.json").read_text())["root"]["path"]
    view = list(view_of(cgroup))
    command = [*view, "runc", "--root", str(place.directory / "state")]
    try:
        created = start_in_background(command, ["create"], bundle, name, place.env)
        assert created.returncode == 0, explain(created)
        pid = json.loads(run([*command, "state", name]).stdout)["pid"]
        result = place.run(*words, f"--pid={pid}", rootfs, before=tuple(view), cwd=Path("/"))
        if result.returncode == 0:
            assert result.stdout == ""
            run([*command, "start", name])
            wait_for("the container to end", lambda: not is_alive(pid))
            result.stdout = bundle.with_name(f"{name}.out").read_text()
        return result
    finally:
        run([*command, "delete", "--force", name], check=False)


def test_rules_that_nobody_knows_are_not_guessed(place: Place) -> None:
    """On cgroup v2 a program is exchanged for one of the whole configuration: without it all is left as it was."""
    bundle = place.bundle(LOOK)
    elsewhere = place.directory / "elsewhere"
    (bundle / "rootfs").rename(elsewhere)
    config = json.loads((bundle / "config.json").read_text())
    config["root"]["path"] = str(elsewhere)
    (bundle / "config.json").write_text(json.dumps(config))
    before = machine.tree(elsewhere)
    result = configure_created(place, bundle, ["configure", "-d0", "-cu"], "v2")
    assert result.returncode == 1
    assert "OCIGPU-CG-1: mount error: failed to add device rules: " in result.stderr
    assert "the container's config.json was not found\nhint: Use --no-cgroups only if" in result.stderr
    assert machine.tree(elsewhere) == before
    result = configure_created(place, bundle, ["configure", "-d0", "-cu", "--no-cgroups"], "v2")
    assert result.stdout.splitlines()[-2:] == ["open /dev/nvidia0 EPERM", "open /dev/nvidia1 ENOENT"], explain(result)


def test_without_nodes_the_rules_are_there(place: Place) -> None:
    look = ["sh", "-c", "ls /dev; mknod /tmp/n c 195 0; /probe open /tmp/n"]
    result = configure_created(place, place.bundle(look), ["configure", "-d0", "-u", "--no-devbind"])
    assert "nvidia" not in result.stdout
    assert result.stdout.endswith("open /tmp/n ENXIO\n"), explain(result)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device=8"], "OCIGPU-DEV-1: device error: no such device "),
        (["--device=0", "-u", "--require=cuda>=99.0"], "OCIGPU-REQ-3: requirement error: --require: needs cuda>=99.0"),
        (["--device=0", "-u"], "OCIGPU-MNT-2: mount error: "),
        (["--device=0", "-u", "--ldconfig=@/nonexistent"], "OCIGPU-LD-1: ldcache error: "),
    ],
    ids=["no such device", "requirement", "a directory in the way", "no ldconfig"],
)
def test_a_failure_stops_the_container_and_leaves_the_image_as_it_was(
    place: Place, words: list[str], message: str
) -> None:
    bundle = place.bundle(LOOK, ["configure", *words])
    if "MNT-2" in message:
        (bundle / "rootfs/usr/bin/nvidia-smi").mkdir()
    before = machine.tree(bundle / "rootfs")
    result = run_container(["runc"], bundle, container_id(), env=place.env)
    assert result.returncode != 0
    assert f"ocigpu-container-cli: {message}" in result.stderr, explain(result)
    assert machine.tree(bundle / "rootfs") == before
    assert machine.mounts_below(str(bundle)) == []


def test_a_process_that_is_no_container_is_refused(place: Place) -> None:
    """Neither one of the host's mount namespace nor one that is gone; without --pid not the host's namespace either."""
    directory = place.directory / "root"
    directory.mkdir()
    for words in ([f"--pid={os.getpid()}"], ["--pid=999999999"], [], ["--pid=0"]):
        result = place.run("configure", "-d0", "-u", *words, directory)
        assert result.returncode == 1
        assert "OCIGPU-NS-1: container error: " in result.stderr
        assert result.stderr.count("\n") == 2
    result = place.run("configure", "-d0", "-u", "--no-cgroups", directory, before=("unshare", "--mount"))
    assert "it is a directory of the host, not a mount of a container\nhint: Give --pid" in result.stderr
    assert list(directory.iterdir()) == []


# --- without --pid: the caller has made the namespaces

CAPABILITIES_OF_APPTAINER = """KILL SETUID SETGID SYS_CHROOT CHOWN FOWNER MKNOD SYS_ADMIN DAC_READ_SEARCH SYS_PTRACE
DAC_OVERRIDE SETPCAP""".lower().split()


class Caller(NamedTuple):
    """Who calls the program: in which namespaces, after which mounts, and its words before the usual ones."""

    namespaces: list[str]
    mounts: str
    words: list[str]
    before: tuple[str, ...] = ()


CONFIGURE = ["configure", "--no-cgroups", "--ldconfig=@/sbin/ldconfig", "--device=1"]
SOME = ",".join(["-all", *(f"+{name}" for name in CAPABILITIES_OF_APPTAINER)])
CALLERS = {
    "enroot": Caller(["--user", "--map-current-user", "--keep-caps"], ENROOT, ["--user", *CONFIGURE]),
    "enroot, debugging": Caller(["--user", "--map-root-user"], ENROOT, ["--user", "--debug=/dev/stderr", *CONFIGURE]),
    "LXC": Caller(
        ["--user", "--map-root-user", "--pid", "--fork", "--net", "--uts", "--ipc"], LXC, ["--user", *CONFIGURE]
    ),
    "Apptainer": Caller(["--user", "--map-root-user"], ENROOT, ["--user", *CONFIGURE]),
    "Apptainer --contain": Caller(["--user", "--map-root-user"], CONTAINED, ["--user", *CONFIGURE]),
    "Apptainer, set-user-ID": Caller(
        [], LXC, CONFIGURE, ("setpriv", f"--inh-caps={SOME}", f"--bounding-set={SOME}", f"--ambient-caps={SOME}")
    ),
}


def call(place: Place, root: Path, caller: Caller, then: str) -> Completed:
    """Make the namespaces, call the program there, and do something else whatever came of it."""
    flags = ["--compute", "--utility", "--require=cuda>=11.0", root]
    script = f'{caller.mounts} {{ root=$1; shift; "$@"; status=$?; {then}; exit $status; }}'
    words = ["unshare", *caller.namespaces, "--mount", "sh", "-c", script, "sh", root, *caller.before, place.program]
    return run([*words, *caller.words, *flags], env=place.env, check=False)


@pytest.mark.parametrize("name", CALLERS)
def test_callers_that_make_the_namespaces_get_their_gpus(place: Place, name: str) -> None:
    """The words are those of enroot's 98-nvidia.sh, of LXC's hook nvidia, and of Apptainer with --nvccli."""
    root = place.bundle([]) / "rootfs"
    inside = "nvidia-smi -L; ldconfig -p | grep -c libcuda.so; /probe list /dev -- open /dev/nvidia1 /dev/nvidiactl"
    result = call(place, root, CALLERS[name], f'chroot "$root" sh -c "{inside}; ls /proc/driver/nvidia/gpus"')
    assert result.returncode == 0, explain(result)
    assert listed_uuids(result.stdout) == [place.host.gpus[1]]
    assert result.stdout.splitlines()[-5:] == [
        "2",
        "list /dev nvidia-uvm nvidia-uvm-tools nvidia1 nvidiactl",
        "open /dev/nvidia1 ENXIO",
        "open /dev/nvidiactl ENXIO",
        "0000:02:00.0",
    ]
    assert ("node /dev/nvidia1" in result.stderr) == ("debugging" in name)
    assert machine.mounts_below(str(root)) == []


@pytest.mark.parametrize("name", ["enroot", "Apptainer --contain", "Apptainer, set-user-ID"])
def test_a_failure_undoes_everything_in_the_callers_namespace(place: Place, name: str) -> None:
    root = place.bundle([]) / "rootfs"
    (root / MULTIARCH / f"libnvidia-nvvm.so.{VERSION}").mkdir()  # of the last things that are mounted
    before = machine.tree(root)
    result = call(place, root, CALLERS[name], 'cut -d" " -f5 /proc/self/mountinfo | grep "^$root/"; ls "$root/dev"')
    assert result.returncode == 1
    assert "OCIGPU-MNT-2: mount error: " in result.stderr, explain(result)
    own = {f"{root}/proc", f"{root}/dev"}
    assert {line for line in result.stdout.splitlines() if not line.startswith(f"{root}/proc/")} == own
    assert "/proc/driver" not in result.stdout
    assert machine.tree(root) == before


def test_a_root_without_a_cgroup_of_its_own_is_told_to_leave_cgroups_alone(place: Place) -> None:
    bundle = place.bundle([])
    root, before = bundle / "rootfs", machine.tree(bundle / "rootfs")
    script = f'{LXC} exec "$2" configure -d0 -u "$1"'
    result = run(["unshare", "--mount", "sh", "-c", script, "sh", root, place.program], env=place.env, check=False)
    if result.returncode:  # the machine's processes are in the cgroup at the top
        assert "OCIGPU-CG-1: mount error: failed to add device rules: " in result.stderr
        assert machine.tree(root) == before


# --- --load-kmods


def test_modules_that_cannot_be_loaded_are_told_in_the_debug_file_alone(place: Place, tmp_path: Path) -> None:
    """This machine has no NVIDIA device; where it has one, nothing may be loaded by a test."""
    if "nvidia" in Path("/proc/devices").read_text():
        pytest.skip("a machine with an NVIDIA GPU")
    log = tmp_path / "log"
    place.env = {**place.env, "NVC_DEBUG_FILE": str(log), "OCIGPU_CONFIG": ""}
    result = place.run("--load-kmods", "configure", "-d0", "/nonexistent")
    assert result.returncode == 1
    assert result.stderr.startswith("ocigpu-container-cli: OCIGPU-HOST-1: initialization error: no NVIDIA driver")
    assert log.read_text().splitlines()[:2] == [
        "--load-kmods: OCIGPU-HOST-1: /sys/bus/pci/devices: no NVIDIA GPU: there is nothing to load kernel modules for",
        "--load-kmods: OCIGPU-HOST-1: /proc/devices: no device number of the NVIDIA driver: it is not loaded",
    ]


def test_a_simulated_host_gets_its_nodes_and_the_kernel_is_left_alone(place: Place) -> None:
    """The host is the session's: its node is back afterwards, and the machine's /dev is as it was."""
    node, before = place.host.directory / "dev/nvidia7", sorted(path.name for path in Path("/dev").iterdir())
    node.unlink()
    result = place.run("--load-kmods", "--debug=/dev/stderr", "list", "--device=7")
    assert result.returncode == 0, explain(result)
    assert f"--load-kmods: make {node}\n" in result.stderr
    assert node.is_char_device()
    assert sorted(path.name for path in Path("/dev").iterdir()) == before
