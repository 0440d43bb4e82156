"""Hostile images, every way to give them GPUs, and what of the host must stay as it is.

A way is a mode of the shim, or one hook of a CDI specification by itself, in a bundle that names it, or "configure":
ocigpu-container-cli, called by a prestart hook as NVIDIA's own calls nvidia-container-cli.  Surroundings are
the kernel that all programs find: this one, one from before Linux 5.2, one whose newer calls a filter refuses; or this
one in a user namespace.
"""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from support import machine, requirements
from support.bundle import LIBRARIES as MULTIARCH
from support.bundle import base_config, write_bundle
from support.process import Completed, explain, run
from support.product import PROGRAMS, RUNTIME, SimulatedHost
from support.runtimes import container_id, run_container, set_cgroup

from ocigpu.core.settings import CAPABILITIES

VERSION = "570.133.20"
LIBRARY_DIR = f"/{MULTIARCH}"
MODES = ("hook", "spec", "cdi")
CDI_HOOKS: dict[str, list[str]] = {
    "create-symlinks": [
        *("--link", f"libcuda.so.{VERSION}::{LIBRARY_DIR}/libcuda.so.1"),
        *("--link", f"libcuda.so.1::{LIBRARY_DIR}/libcuda.so"),
        *("--link", f"../libnvidia-allocator.so.1::{LIBRARY_DIR}/gbm/nvidia-drm_gbm.so"),
        *("--link", f"../nvidia/{VERSION}/gsp_ga10x.bin::/lib/firmware/ocigpu/gsp.bin"),
        *("--link", "nvidia-smi::/usr/bin/nvidia-link"),
        *("--link", "socket::/run/nvidia-persistenced/link"),
    ],
    "enable-cuda-compat": [f"--host-driver-version={VERSION}"],
    "update-ldcache": ["--folder", LIBRARY_DIR, "--folder", "/opt/lib"],
    "disable-device-node-modification": ["--driver-proc", "{host}/proc/driver/nvidia", "--simulated"],
    "update-application-profile": [],
    "chmod": [
        *("--mode", "777", "--path", LIBRARY_DIR, "--path", "/etc/nvidia", "--path", "/usr/bin"),
        *("--path", "/run", "--path", "/lib/firmware", "--path", f"{LIBRARY_DIR}/libcuda.so.{VERSION}"),
    ],
}
"""Every hook of ocigpu-hook, as specifications call it."""
GIVERS = (*MODES, "configure")
"""Ways that give all a container gets."""
MERGE = "merge"
"""The way of mode hook with the setting loader-cache = "merge"."""
SHIM = (*MODES, MERGE)
WAYS = (*GIVERS, MERGE, *CDI_HOOKS)
SURROUNDINGS = ("this kernel", "before 5.2", "refused", "user namespace")
EVERYTHING = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": "all"}
CONFIGURE = ["--load-kmods", "configure", "--device=0", *(f"--{name}" for name in CAPABILITIES)]
OPTIONS = {"NVIDIA_IMEX_CHANNELS": "--imex-channel", "NVIDIA_REQUIRE_CUDA": "--require"}
"""What NVIDIA's hook makes of variables."""
VENDOR_HOOK = Path(__file__).parents[1] / "support/vendor_hook.sh"
LOOK = ["/busybox", "sh", "-c", "echo started; /busybox cat /proc/self/mountinfo"]
DRIVERLESS = ("proc", "tmpfs", "devpts", "sysfs", "cgroup", "cgroup2", "mqueue")
STANDARD_NODES = ("/null", "/zero", "/full", "/random", "/urandom", "/tty")
"""Types of mounts that a runtime makes by itself, and nodes that it mounts: over hidden files, in user namespaces."""

Build = Callable[[Path, "Marker"], None]
Edit = Callable[[dict[str, Any]], None]


def add_busybox(rootfs: Path) -> None:
    """Put the static shell at the top of an image, and take away the links to it."""
    for path in list((rootfs / "usr/bin").iterdir()):
        if path.is_symlink() and os.readlink(path) == "busybox":
            path.unlink()
    (rootfs / "usr/bin/busybox").rename(rootfs / "busybox")
    (rootfs / "opt/lib").mkdir(parents=True)


def no_change(config: dict[str, Any]) -> None:
    assert config


class Marker:
    """A directory of the host that must stay as it is: nothing made, changed, or even read in it.

    Its entries look as if they were read long ago; relatime would tell of any new reading.
    """

    def __init__(self, path: Path, is_volume: bool = False) -> None:
        """``is_volume``: the container has it as a volume, which is there to be read."""
        self.path, self.is_volume = path, is_volume
        (path / "cuda/compat").mkdir(parents=True)
        for name in ("nvidia", "ld.so.conf.d", "gbm", "sub", "bin", "lib", "firmware"):
            (path / name).mkdir()
        for name in ("libcuda.so.1", "ld.so.cache", "ld.so.conf", "file", "ld.so.conf.d/x.conf", "nvidia-smi"):
            (path / name).write_text("of the host\n")
        (path / "secret").write_text("HOST-SECRET\n")
        (path / "secret").chmod(0o600)

    @property
    def absolute(self) -> str:
        return str(self.path)

    def relative(self, depth: int = 20) -> str:
        """Return a link text that would lead here from any directory."""
        return "../" * depth + str(self.path).lstrip("/")

    def settle(self, of_runtime: tuple[str, ...] = ()) -> None:
        """Call it when the attack is laid out; ``of_runtime``: links that the low-level runtime itself makes here."""
        self._of_runtime = of_runtime
        self._entries = [self.path, *sorted(self.path.rglob("*"))]
        for entry in self._entries:
            os.utime(entry, ns=(0, entry.lstat().st_mtime_ns), follow_symlinks=False)
        self._before = [_look(entry, self.is_volume) for entry in self._entries]

    def check(self, empty_of_runtime: bool = False) -> None:
        """Assert that nothing has changed; ``empty_of_runtime``: new files and directories that are empty are not ours.

        runc before 1.1.14 can be made to leave such on the host where it makes places to mount on (CVE-2024-45310).
        """
        after = [_look(entry, self.is_volume) for entry in self._entries]
        new = {path for path in self.path.rglob("*") if path not in self._entries}
        if empty_of_runtime:
            assert [path for path in new if path.is_symlink() or (path.is_file() and path.stat().st_size)] == []
        tolerated = {path.parent for path in new} if empty_of_runtime else set()
        if self._of_runtime:
            tolerated = {self.path}
            new -= {self.path / name for name in self._of_runtime}
        changed = [
            f"{entry}: {one} -> {other}"
            for entry, one, other in zip(self._entries, self._before, after, strict=True)
            if one != other and entry not in tolerated
        ]
        assert changed == []
        assert not new or empty_of_runtime, sorted(new)
        self.settle(self._of_runtime)  # that was a reading of our own


def _look(path: Path, may_be_read: bool) -> tuple[int, ...]:
    found = path.lstat()
    times = (0 if may_be_read else found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    return (found.st_ino, found.st_mode, found.st_uid, found.st_gid, found.st_nlink, found.st_size, *times)


class Outcome(NamedTuple):
    """How a hostile image's container went: the host is known to be untouched."""

    result: Completed
    bundle: Path
    log: str

    @property
    def started(self) -> bool:
        return "started\n" in self.result.stdout

    @property
    def said(self) -> str:
        """What was told of it, by the shim, by runtimes, and by hooks in their log."""
        return f"{explain(self.result)}\n{self.log}"


class Attacks:
    """Starts containers of hostile images on one host and looks after the host."""

    def __init__(
        self, host: SimulatedHost, image: Path, probes: Path, directory: Path, environment: dict[str, str]
    ) -> None:
        self.host, self.image, self.probes, self.directory = host, image, probes, directory
        self.base = environment
        self._numbers = itertools.count(1)

    def environment(self, mode: str, low_level: str = "runc", more: str = "") -> dict[str, str]:
        """Return the environment of the shim for a mode; mode cdi has a specification that was generated."""
        specs = self.host.directory.with_name(f"{self.host.directory.name}-specs")
        if mode == "cdi" and not specs.exists():
            specs.mkdir()
            command = [PROGRAMS / "ocigpu", "cdi", "generate", "--quiet", "--config", self.host.settings]
            run([*command, "--output", specs / "nvidia.json"])
        path = self.directory / f"{mode}-{low_level}.toml"
        more += '\nloader-cache = "merge"' if mode == MERGE else ""
        name = "hook" if mode == MERGE else mode
        return self.host.in_mode(self.base, path, name, f'cdi.spec-dirs = ["{specs}"]', more, runtime=low_level)

    def bundle(
        self,
        build: Build,
        way: str,
        *,
        arguments: list[str] = LOOK,
        variables: dict[str, str] | None = None,
        edit: Edit = no_change,
        of_runtime: tuple[str, ...] = (),
        in_user_namespace: bool = False,
        volume: str = "",
    ) -> tuple[Path, Marker]:
        """Return a bundle of a hostile image for a way, and the marker that it aims at.

        ``volume``: where the container has the marker, for reading and writing.
        """
        number = next(self._numbers)
        marked = self.directory / f"host-marker{number}"
        config = base_config(arguments, {**EVERYTHING, **(variables or {})} if way in SHIM else variables)
        if way == "configure":
            self._add_configure(config, variables or {})
        elif way not in SHIM:
            self._add_hook(config, way)
        if in_user_namespace:
            del config["linux"]["resources"]
            config["linux"].pop("devices", None)
        if volume:
            entry = {
                "destination": volume,
                "type": "bind",
                "source": str(marked),
                "options": ["rbind", "rprivate", "rw"],
            }
            config["mounts"].append(entry)
        edit(config)
        bundle = write_bundle(self.directory / f"bundle{number}", config, self.image)
        if not in_user_namespace:
            set_cgroup(bundle, container_id())
        marker = Marker(marked, bool(volume))
        build(bundle / "rootfs", marker)
        marker.settle(of_runtime)
        return bundle, marker

    def _add_configure(self, config: dict[str, Any], variables: dict[str, str]) -> None:
        """Put a prestart hook into a configuration that calls ocigpu-container-cli; it logs where hooks do."""
        words = [f"--debug={self.host.hook_log}", *CONFIGURE]
        words += [f"{OPTIONS[name]}={value}" for name, value in variables.items() if name in OPTIONS]
        args = ["nvidia-container-runtime-hook", str(PROGRAMS / "ocigpu-container-cli"), *words]
        env = [f"PATH={self.base['PATH']}", f"OCIGPU_CONFIG={self.host.environment(self.base)['OCIGPU_CONFIG']}"]
        config["hooks"] = {"prestart": [{"path": str(VENDOR_HOOK), "args": args, "env": env}]}

    def _add_hook(self, config: dict[str, Any], name: str) -> None:
        """Put one hook of a specification into a configuration, and the nodes of GPU 0."""
        words = [word.replace("{host}", str(self.host.directory)) for word in CDI_HOOKS[name]]
        hook = {"path": str(PROGRAMS / "ocigpu-hook"), "args": ["ocigpu-hook", name, *words], "env": ["LC_ALL=C"]}
        config["hooks"] = {"createContainer": [hook]}
        config["linux"]["devices"] = []
        for node in ("nvidia0", "nvidiactl"):
            major, minor = map(int, self.host.number(node))
            config["linux"]["devices"].append(
                {"path": f"/dev/{node}", "type": "c", "major": major, "minor": minor, "fileMode": 0o666}
            )

    def prefix(self, surroundings: str) -> tuple[str, ...]:
        """Return the words to put before a command for surroundings."""
        if surroundings == "user namespace":
            requirements.require(requirements.user_namespaces())
            return ("unshare", "--user", "--map-root-user", "--mount")
        if surroundings == "this kernel":
            return ()
        program = self.probes / "without_calls"
        if not program.exists():
            run(
                ["gcc", "-O1", "-Wall", "-Werror", "-o", program, Path(__file__).parents[1] / "support/without_calls.c"]
            )
        return (str(program), surroundings.replace(" ", "-"))

    def start(
        self,
        build: Build,
        way: str,
        surroundings: str = "this kernel",
        low_level: str = "runc",
        *,
        settings: str = "",
        **more: Any,
    ) -> Outcome:
        """Start a container of the image that ``build`` makes hostile; whatever comes of it, the host is as before.

        ``more``: of :meth:`bundle`.
        """
        inside = surroundings == "user namespace"
        bundle, marker = self.bundle(build, way, in_user_namespace=inside, **more)
        return self.run(bundle, marker, way, surroundings, low_level, settings)

    def run(
        self,
        bundle: Path,
        marker: Marker,
        way: str,
        surroundings: str = "this kernel",
        low_level: str = "runc",
        settings: str = "",
        racing: bool = False,
    ) -> Outcome:
        """Start a container of :meth:`bundle`; ``racing``: names change while it starts."""
        env = self.environment(way if way in SHIM else "hook", low_level, settings)
        host = machine.tree(self.host.directory / "usr"), machine.tree(self.host.directory / "lib")
        log = self.host.hook_log
        size = log.stat().st_size
        program = requirements.find_program(low_level)
        assert program is not None
        if way not in SHIM:
            env = {name: value for name, value in env.items() if name != "OCIGPU_CONFIG"}
        runtime = [RUNTIME] if way in SHIM else [program]
        cgroup = "v2" if low_level == "crun" else ""
        prefix = self.prefix(surroundings)
        result = run_container(runtime, bundle, container_id(), env=env, prefix=prefix, cgroup=cgroup)
        outcome = Outcome(result, bundle, log.read_text()[size:])
        marker.check(empty_of_runtime=racing and way in ("spec", "cdi"))
        assert machine.mounts_below(str(bundle)) == []
        assert (machine.tree(self.host.directory / "usr"), machine.tree(self.host.directory / "lib")) == host
        for word in ("Traceback", "OCIGPU-INT-1", "HOST-SECRET"):
            assert word not in outcome.said
        if outcome.started:
            foreign = self.foreign_mounts(outcome)
            assert [line for line in foreign if not marker.is_volume or str(marker.path) not in line] == []
        else:
            assert result.returncode != 0, outcome.said
        return outcome

    def run_any(self, bundle: Path, marker: Marker, way: str) -> Outcome:
        """As :meth:`run`, for a container that says something else than that it has started."""
        env = self.environment(way if way in SHIM else "hook")
        result = run_container([RUNTIME if way in SHIM else "runc"], bundle, container_id(), env=env)
        marker.check()
        return Outcome(result, bundle, "")

    def foreign_mounts(self, outcome: Outcome) -> list[str]:
        """Return the mounts of a started container that show something of the host that is not the driver's."""
        ours = [str(path) for path in (outcome.bundle / "rootfs", self.host.directory)]
        foreign = []
        for line in outcome.result.stdout.partition("started\n")[2].splitlines():
            fields, _, rest = line.partition(" - ")
            if not rest:
                continue
            root = fields.split(" ")[3]
            kind = rest.split(" ")[0]
            shown = any(root == path or root.startswith(f"{path}/") for path in ours)
            node = kind == "devtmpfs" and root in STANDARD_NODES
            if not shown and not node and kind not in DRIVERLESS:
                foreign.append(line)
        return foreign


def fill(path: Path, content: bytes = b"of the image") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def hooks_of(bundle: Path) -> list[dict[str, Any]]:
    """Return every hook of a bundle's configuration."""
    config = json.loads((bundle / "config.json").read_text())
    return [entry for stage in config.get("hooks", {}).values() for entry in stage]
