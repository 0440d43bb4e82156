"""Mode ``spec`` where it meets its limits: the hook takes over, or the container does not start and nothing changed."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.bundle import give_to
from support.fixtures import MakeBundle
from support.machine import TRIPLET
from support.process import Completed, explain
from support.product import CONTROL_NODES, LIBRARIES, RUNTIME, SimulatedHost, failed_with, gpu_names, listed_uuids
from support.runtimes import answers, container_id, parts, probe, run_container, script
from support.survey import OWN_RUN

pytestmark = [pytest.mark.root, pytest.mark.engine]

RUNTIMES = pytest.mark.parametrize("low_level", ["runc", "crun"])
LIBRARY_DIR = f"usr/lib/{TRIPLET}"
GPU_2 = {"NVIDIA_VISIBLE_DEVICES": "2"}

Edit = Callable[[dict[str, Any]], None]
Prepare = Callable[[Path], None]


class Started(NamedTuple):
    """One start: how it went, what the shim logged, and config.json as the low-level runtime read it."""

    result: Completed
    log: str
    text: str

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.text)
        return config

    @property
    def hooked(self) -> bool:
        return "ocigpu-hook" in self.text


class Starts:
    """Starts bundles on a simulated host of eight GPUs, in mode spec unless told otherwise."""

    def __init__(self, host: SimulatedHost, environment: dict[str, str], directory: Path, make: MakeBundle) -> None:
        self.host, self.base, self.directory, self.make = host, environment, directory, make

    def environment(self, low_level: str, mode: str = "spec", settings: str = "") -> dict[str, str]:
        path = self.directory / f"{mode}-{low_level}.toml"
        return self.host.in_mode(self.base, path, mode, settings, runtime=low_level)

    def start(
        self, bundle: Path, low_level: str = "runc", *, mode: str = "spec", settings: str = "", before: str = ""
    ) -> Started:
        """``before``: commands of a shell that come first, in a mount namespace of their own."""
        name = container_id()
        log = self.directory / f"{name}.log"
        log.touch()
        prefix = (*OWN_RUN, "sh", "-c", f'{before}exec "$@"', "sh")
        env = self.environment(low_level, mode, settings)
        result = run_container([RUNTIME, "--log", log], bundle, name, env=env, cgroup="v2", prefix=prefix)
        return Started(result, log.read_text(), (bundle / "config.json").read_text())


@pytest.fixture
def starts(
    simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path, make_bundle: MakeBundle
) -> Starts:
    return Starts(simulated_host, runtime_environment, work_directory, make_bundle)


def look_at(host: SimulatedHost) -> list[str]:
    """Return the argv that finds out what GPU 2 and the others are in a container."""
    hidden = [f"/proc/driver/nvidia/gpus/0000:{number:02x}:00.0/information" for number in (1, 2, 4, 5, 6, 7, 8)]
    return script(
        ["nvidia-smi", "-L"],
        probe(
            ["list", "/dev"],
            *(["mknod", f"/made{minor}", *host.number(f"nvidia{minor}")] for minor in (1, 2, 7)),
            ["open", "/dev/nvidia2", "/dev/nvidiactl", "/made1", "/made2", "/made7"],
            ["read", "/proc/driver/nvidia/gpus/0000:03:00.0/information", *hidden],
            ["create", "/proc/driver/nvidia/params", "/proc/driver/nvidia/gpus/0000:03:00.0/power"],
        ),
        ["/dlopen", *LIBRARIES],
    )


def assert_has_gpu_2(started: Started, host: SimulatedHost, isolated: bool = True) -> None:
    assert started.result.returncode == 0, explain(started.result)
    listing, probed, opened = parts(started.result.stdout)
    assert listed_uuids(listing) == [host.gpus[2]]
    assert opened.splitlines() == [f"dlopen {name} ok" for name in LIBRARIES]
    seen = answers(probed)
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia2", *CONTROL_NODES])
    for name in ("/dev/nvidia2", "/dev/nvidiactl", "/made2"):
        assert seen["open", name] == "ENXIO", name
    if isolated:
        assert seen["open", "/made1"] == seen["open", "/made7"] == "EPERM"
    for (command, path), answer in seen.items():
        if command == "read" and "/0000:03:" in path:
            assert host.gpus[2] in answer
        elif command == "read":
            assert answer in ("ENOENT", "EACCES", "ENOTDIR"), path
        elif command == "create":
            assert answer in ("EROFS", "EACCES", "EPERM"), path


def look(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return everything in a directory with its type, mode, owner, number, time of change, and content or target."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content: object = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        times = () if path.is_dir() else (status.st_ino, status.st_mtime_ns)
        found[str(path.relative_to(directory))] = (status.st_mode, status.st_uid, status.st_gid, *times, content)
    return found


def below(tree: dict[str, tuple[object, ...]], start: str) -> dict[str, tuple[object, ...]]:
    """Return the entries below a path as they are told apart by content, not by file."""
    return {
        path: (*entry[:3], entry[-1])
        for path, entry in tree.items()
        if path.startswith(f"{start}/") and path not in (f"{start}/dev", f"{start}/proc", f"{start}/sys")
    }


# --- the hook takes over


def with_compat(host: SimulatedHost) -> Prepare:
    def prepare(rootfs: Path) -> None:
        directory = rootfs / "usr/local/cuda/compat"
        directory.mkdir(parents=True)
        shutil.copy(
            next((host.directory / LIBRARY_DIR).glob("libcuda.so.[0-9]*.*")), directory / "libcuda.so.999.10.01"
        )
        (directory / "libcuda.so.1").symlink_to("libcuda.so.999.10.01")

    return prepare


def soname_is_a_file(rootfs: Path) -> None:
    (rootfs / LIBRARY_DIR / "libcuda.so.1").write_text("of the image")


def odd_cache(rootfs: Path) -> None:
    (rootfs / "etc/ld.so.cache").write_text("hello")


def linked_cache(rootfs: Path) -> None:
    (rootfs / "etc/ld.so.cache").symlink_to("/usr/lib/ld.so.cache")


def device_as_cache(rootfs: Path) -> None:
    os.mknod(rootfs / "etc/ld.so.cache", stat.S_IFCHR | 0o666, os.makedev(1, 3))


def nothing_special(rootfs: Path) -> None:
    assert rootfs.is_dir()


def privileged(config: dict[str, Any]) -> None:
    config["linux"]["resources"]["devices"] = [{"allow": True, "access": "rwm"}]


def driver_allowed(config: dict[str, Any]) -> None:
    rule = {"allow": True, "type": "c", "major": 195, "access": "rwm"}
    config["linux"]["resources"]["devices"].append(rule)


def no_rules(config: dict[str, Any]) -> None:
    config["linux"]["resources"] = {}


def covered(directory: Path, destination: str) -> Edit:
    def edit(config: dict[str, Any]) -> None:
        source = directory / "volume"
        source.mkdir(exist_ok=True)
        shutil.copy("/etc/passwd", source)
        mount = {"destination": destination, "type": "bind", "source": str(source), "options": ["rbind", "rprivate"]}
        config["mounts"].append(mount)

    return edit


def plain(config: dict[str, Any]) -> None:
    assert config["linux"]


FALLBACKS: dict[str, tuple[str, Prepare, Edit]] = {
    "a file has the name of a library": ("something other than a link", soname_is_a_file, plain),
    "a cache that is none": ("cannot be extended", odd_cache, plain),
    "a cache that is a link": ("not a regular file", linked_cache, plain),
    "a cache that is a device": ("not a regular file", device_as_cache, plain),
    "privileged": ("nodes of GPUs that are not granted", nothing_special, privileged),
    "the driver's devices are allowed": ("nodes of GPUs that are not granted", nothing_special, driver_allowed),
    "no device rules": ("no device rules", nothing_special, no_rules),
}


@RUNTIMES
@pytest.mark.parametrize("case", FALLBACKS)
def test_what_mode_spec_cannot_say_the_hook_does(starts: Starts, low_level: str, case: str) -> None:
    why, prepare, edit = FALLBACKS[case]
    bundle = starts.make(look_at(starts.host), GPU_2, edit=edit)
    prepare(bundle / "rootfs")
    started = starts.start(bundle, low_level)
    assert why in started.log
    assert started.hooked
    assert_has_gpu_2(started, starts.host, isolated=edit in (plain,) or (edit is no_rules and low_level == "runc"))
    assert "ocigpu/declared" not in started.text


def own_ids(config: dict[str, Any]) -> None:
    config["linux"]["namespaces"].append({"type": "user"})
    for name in ("uidMappings", "gidMappings"):
        config["linux"][name] = [{"containerID": 0, "hostID": 100000, "size": 65536}]


@RUNTIMES
@pytest.mark.parametrize("closed", ["all of it", "a directory", "nothing"])
def test_an_image_that_root_of_a_user_namespace_may_not_write_is_the_hooks(
    starts: Starts, low_level: str, closed: str
) -> None:
    """The runtime makes mount points as that root; the hook may make them as root of the machine."""
    bundle = starts.make(script(["nvidia-smi", "-L"], ["/dlopen", *LIBRARIES]), GPU_2, edit=own_ids)
    if closed != "all of it":
        give_to(bundle / "rootfs", 100000, 100000)
    if closed == "a directory":
        os.chown(bundle / "rootfs" / LIBRARY_DIR, 0, 0)
    started = starts.start(bundle, low_level)
    assert ("root of its user namespace may not make /usr/" in started.log) == (closed != "nothing")
    assert started.hooked == (closed != "nothing")
    assert started.result.returncode == 0, explain(started.result)
    listing, opened = parts(started.result.stdout)
    assert listed_uuids(listing) == [starts.host.gpus[2]]
    assert opened.splitlines() == [f"dlopen {name} ok" for name in LIBRARIES]


@RUNTIMES
def test_compatibility_libraries_come_by_the_hook(starts: Starts, low_level: str) -> None:
    bundle = starts.make(look_at(starts.host), GPU_2)
    with_compat(starts.host)(bundle / "rootfs")
    started = starts.start(bundle, low_level)
    assert "compatibility libraries" in started.log
    assert started.hooked
    assert_has_gpu_2(started, starts.host)


@pytest.mark.parametrize("shared", [True, False], ids=["of all users", "of root"])
def test_a_directory_that_every_user_can_exchange_is_the_hooks(starts: Starts, shared: bool) -> None:
    """The runtime would mount /tmp/nvidia-mps by name, writable, whatever it is by then."""
    place = starts.host.directory / "tmp"
    mode = "1777" if shared else "755"
    before = f"mount -t tmpfs -o mode={mode} none {place} && mkdir {place}/nvidia-mps && "
    started = starts.start(starts.make(probe(["stat", "/tmp/nvidia-mps"]), GPU_2), before=before)
    assert started.result.returncode == 0, explain(started.result)
    assert answers(started.result.stdout)["stat", "/tmp/nvidia-mps"].startswith("d ")
    assert started.hooked == shared
    assert (f"every user can replace {place}/nvidia-mps with a link" in started.log) == shared


@RUNTIMES
@pytest.mark.parametrize("destination", ["/etc", "/usr/local/bin/../../share/../../etc", "//etc/"])
def test_a_volume_over_a_place_of_ours_is_the_hooks(
    starts: Starts, work_directory: Path, low_level: str, destination: str
) -> None:
    bundle = starts.make(look_at(starts.host), GPU_2, edit=covered(work_directory, destination))
    started = starts.start(bundle, low_level)
    assert "/etc/ld.so.cache is in or below what is mounted on /etc" in started.log
    assert started.hooked
    assert_has_gpu_2(started, starts.host)


READ_ONLY = "mount --bind {path} {path} && mount -o remount,bind,ro {path} && "


def test_a_root_directory_that_is_read_only_is_as_in_hook_mode(starts: Starts) -> None:
    """The runtime itself can make no place for a mount there."""
    for mode in ("hook", "spec"):
        bundle = starts.make(look_at(starts.host), GPU_2)
        before = look(bundle / "rootfs")
        started = starts.start(bundle, mode=mode, before=READ_ONLY.format(path=bundle / "rootfs"))
        assert started.hooked
        assert started.result.returncode != 0
        assert look(bundle / "rootfs") == before
        if mode == "spec":
            assert "Read-only file system" in started.log


# --- without a hook


@RUNTIMES
@pytest.mark.parametrize("read_only", [True, False])
def test_only_the_granted_gpu_can_be_used(starts: Starts, low_level: str, read_only: bool) -> None:
    """A root that the runtime makes read-only is writable before it does."""

    def edit(config: dict[str, Any]) -> None:
        config["root"]["readonly"] = read_only
        mount = {"destination": "/made", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]}
        config["mounts"].append(mount)

    words = [word.replace("/made", "/made/") for word in look_at(starts.host)]
    bundle = starts.make(words, GPU_2, edit=edit)
    started = starts.start(bundle, low_level)
    assert not started.hooked, started.log
    started.result.stdout = started.result.stdout.replace("/made/", "/made")
    assert_has_gpu_2(started, starts.host)


@RUNTIMES
def test_a_second_start_of_a_bundle_is_like_the_first(starts: Starts, low_level: str) -> None:
    bundle = starts.make(look_at(starts.host), GPU_2)
    first = starts.start(bundle, low_level)
    for name in ("made1", "made2", "made7"):
        (bundle / "rootfs" / name).unlink()
    rootfs = below(look(bundle), "rootfs")
    second = starts.start(bundle, low_level)
    assert first.text.replace("\t", "") == second.text.replace("\t", "")
    for name in ("made1", "made2", "made7"):
        (bundle / "rootfs" / name).unlink()
    assert below(look(bundle), "rootfs") == rootfs
    assert_has_gpu_2(first, starts.host)
    assert_has_gpu_2(second, starts.host)


@pytest.mark.parametrize("first", ["hook", "spec"])
@pytest.mark.parametrize("second", ["hook", "spec"])
def test_a_narrower_request_for_an_edited_bundle_gives_less(starts: Starts, first: str, second: str) -> None:
    bundle = starts.make(look_at(starts.host), {"NVIDIA_VISIBLE_DEVICES": "all"})
    assert starts.start(bundle, mode=first).result.returncode == 0
    for name in ("made1", "made2", "made7"):
        (bundle / "rootfs" / name).unlink()
    path = bundle / "config.json"
    path.write_text(path.read_text().replace("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=2"))
    started = starts.start(bundle, mode=second)
    assert started.hooked == (second == "hook"), started.log
    assert_has_gpu_2(started, starts.host)
    rules = started.config["linux"]["resources"]["devices"]
    allowed = [rule["minor"] for rule in rules if rule.get("major") == 195 and rule["allow"]]
    assert sorted(allowed) == [2, 254, 255] or sorted(allowed) == [2, 255]


@pytest.mark.parametrize("value", ["void", ""])
def test_an_edited_bundle_that_asks_for_nothing_any_more_gets_nothing(starts: Starts, value: str) -> None:
    bundle = starts.make(script(["ls", "/dev"]), GPU_2)
    path = bundle / "config.json"
    before = json.loads(path.read_text())
    assert "nvidia2" in starts.start(bundle).result.stdout
    path.write_text(path.read_text().replace("NVIDIA_VISIBLE_DEVICES=2", f"NVIDIA_VISIBLE_DEVICES={value}"))
    started = starts.start(bundle)
    assert started.result.returncode == 0, explain(started.result)
    assert "nvidia" not in started.result.stdout
    after = started.config
    assert after["mounts"] == before["mounts"]
    assert after["linux"]["devices"] == []
    assert after["linux"]["resources"] == before["linux"]["resources"]
    for name in ("maskedPaths", "readonlyPaths"):
        assert after["linux"][name] == before["linux"][name]


@RUNTIMES
def test_hooks_of_the_vendor_go_and_those_of_others_stay(starts: Starts, low_level: str) -> None:
    def edit(config: dict[str, Any]) -> None:
        vendor = {
            "path": "/usr/bin/nvidia-container-runtime-hook",
            "args": ["nvidia-container-runtime-hook", "prestart"],
        }
        other = {
            "path": "/bin/cat",
            "args": ["cat"],
        }  # reads the state: crun 1.8.1 fails where a hook ends before it is written
        config["hooks"] = {"prestart": [vendor, other], "createRuntime": [dict(vendor), dict(other)]}

    bundle = starts.make(look_at(starts.host), GPU_2, edit=edit)
    started = starts.start(bundle, low_level)
    assert_has_gpu_2(started, starts.host)
    assert "nvidia-container-runtime-hook" not in started.text
    hooks = started.config["hooks"]
    paths = [[entry["path"] for entry in hooks[stage]] for stage in ("prestart", "createRuntime")]
    assert [[path for path in stage if path != "/bin/sh"] for stage in paths] == [["/bin/cat"], ["/bin/cat"]]


@RUNTIMES
def test_no_cgroups_means_nodes_without_rules(starts: Starts, low_level: str) -> None:
    bundle = starts.make(script(["ls", "/dev"]), GPU_2)
    rules = json.loads((bundle / "config.json").read_text())["linux"]["resources"]["devices"]
    started = starts.start(bundle, low_level, settings="no-cgroups = true")
    assert started.result.returncode == 0, explain(started.result)
    assert gpu_names(started.result.stdout) == sorted(["nvidia2", *CONTROL_NODES])
    assert not started.hooked
    assert started.config["linux"]["resources"]["devices"] == rules


# --- what cannot be granted or written


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "9"}, "OCIGPU-DEV-1"),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-00000000-0000-0000-0000-000000000000"}, "OCIGPU-DEV-1"),
        ({**GPU_2, "NVIDIA_REQUIRE_CUDA": "cuda>=99.0"}, "OCIGPU-REQ-3"),
        ({**GPU_2, "NVIDIA_DRIVER_CAPABILITIES": "compute,nonsense"}, "OCIGPU-REQ-"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_granted_changes_nothing(starts: Starts, variables: dict[str, str], code: str) -> None:
    bundle = starts.make(["sh", "-c", "echo started"], variables)
    before = look(bundle)
    started = starts.start(bundle)
    assert failed_with(code, started.result), explain(started.result)
    assert "started" not in started.result.stdout
    assert look(bundle) == before


FULL = """mount -t tmpfs -o size=64k tmpfs {path}
cp {aside}/config.json {path}/
cat /dev/zero > {path}/fill 2>/dev/null
"""


@pytest.mark.parametrize("kind", ["read-only", "full"])
def test_a_config_that_cannot_be_written_leaves_everything_as_it_was(
    starts: Starts, work_directory: Path, kind: str
) -> None:
    """The root directory lies elsewhere, as those of engines do."""
    bundle = starts.make(["sh", "-c", "echo started"], GPU_2)
    rootfs = work_directory / "elsewhere"
    (bundle / "rootfs").rename(rootfs)
    config = json.loads((bundle / "config.json").read_text())
    config["root"]["path"] = str(rootfs)
    (bundle / "config.json").write_text(json.dumps(config))
    (rootfs / LIBRARY_DIR / "libcuda.so.1").symlink_to("libcuda.so.525")
    aside = work_directory / "aside"
    shutil.copytree(bundle, aside)
    before = look(bundle), below(look(work_directory), "elsewhere")
    text = READ_ONLY if kind == "read-only" else FULL
    started = starts.start(bundle, before=text.format(path=bundle, aside=aside))
    assert failed_with("OCIGPU-SPEC-4", started.result), explain(started.result)
    assert "started" not in started.result.stdout
    assert (look(bundle), below(look(work_directory), "elsewhere")) == before


# --- annotations of users


@RUNTIMES
def test_an_annotation_of_the_user_unhides_nothing(starts: Starts, low_level: str) -> None:
    """Docker and CRI-O put annotations of users into config.json."""
    forged = {
        "maskedPaths": ["/proc/kcore", "/sys/firmware"],
        "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"],
        "rules": [[None, None]],
        "mounts": [["/sys", "sysfs"]],
    }

    def edit(config: dict[str, Any]) -> None:
        config["annotations"] = {"ocigpu/declared": json.dumps(forged)}

    bundle = starts.make(look_at(starts.host), GPU_2, edit=edit)
    before = json.loads((bundle / "config.json").read_text())
    started = starts.start(bundle, low_level)
    assert_has_gpu_2(started, starts.host)
    for name in ("maskedPaths", "readonlyPaths"):
        assert set(before["linux"][name]) <= set(started.config["linux"][name])
    assert started.config["mounts"][: len(before["mounts"])] == before["mounts"]
    assert started.config["linux"]["resources"]["devices"][0] == {"allow": False, "access": "rwm"}
