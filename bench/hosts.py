"""What is measured on: simulated hosts, an image like a real one, bundles of containers from that image."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from ocigpu.core.actions import Bind, Link, Node
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.plan import make_plan
from ocigpu.gpus.nvidia.request import parse_request
from ocigpu.sim.create import create_host
from ocigpu.system import libc
from ocigpu.system.settings_file import read_settings

REPOSITORY = Path(__file__).parent.parent
SHIM = str(REPOSITORY / ".venv/bin/ocigpu-runtime")
HOOK = str(REPOSITORY / ".venv/bin/ocigpu-hook")
OCIGPU = str(REPOSITORY / ".venv/bin/ocigpu")
GPUS = (1, 8, 64)
"""Sizes of the simulated hosts."""
MODES = ("hook", "spec")
CDI_GPUS = 8
"""Of the host whose containers are measured in mode cdi too."""
ENTRIES = (40, 613, 2000)
"""Entries of the loader's caches that discovery is measured with."""
VARIABLES = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
LIBRARIES = 100
"""Libraries of the image."""
_LIBRARY_DIRECTORY = "usr/lib/x86_64-linux-gnu"
_LARGE = 1 << 20


class Bundle(NamedTuple):
    """A bundle, and its configuration before any edit.

    Its root file system is an overlay over the image; or with ``plain`` a copy, in which earlier containers have left
    what one mounts on.
    """

    directory: Path
    image: Path
    config: dict[str, Any]
    plain: bool = False

    def make_fresh(self, config: dict[str, Any] | None = None) -> None:
        """Give the bundle an unused root file system and its unedited config.json, or ``config``: as engines do.

        A plain one only gets the image's loader cache again.
        """
        (self.directory / "config.json").write_text(json.dumps(self.config if config is None else config))
        target = self.directory / "rootfs"
        if self.plain:
            if not target.exists():
                shutil.copytree(self.image, target, symlinks=True)
            shutil.copy2(self.image / "etc/ld.so.cache", target / "etc/new")
            (target / "etc/new").rename(target / "etc/ld.so.cache")
            return
        remove_mount(target)
        for name in ("upper", "work"):
            shutil.rmtree(self.directory / name, ignore_errors=True)
            (self.directory / name).mkdir()
        target.mkdir(exist_ok=True)
        options = f"lowerdir={self.image},upperdir={self.directory}/upper,workdir={self.directory}/work"
        libc.mount("overlay", str(target), "overlay", 0, options)


def remove_mount(target: Path) -> None:
    if target.is_mount():
        libc.umount2(str(target), libc.MNT_DETACH)


def own_mounts() -> None:
    """Give this process mounts of its own, with an empty /run: what is kept there is not the machine's."""
    libc.unshare(libc.CLONE_NEWNS)
    libc.mount(None, "/", None, libc.MS_REC | libc.MS_PRIVATE)
    libc.mount("tmpfs", "/run", "tmpfs", 0, "mode=755")


def make_image(directory: Path) -> None:
    """Make a root file system like Debian's: libraries of this machine, the cache its ldconfig makes, busybox."""
    for name in ("dev", "proc", "sys", "run", "tmp", "etc/ld.so.conf.d", "usr/bin", "usr/sbin", _LIBRARY_DIRECTORY):
        (directory / name).mkdir(parents=True)
    (directory / "usr/lib64").mkdir()
    for name in ("bin", "sbin", "lib", "lib64"):
        (directory / name).symlink_to(f"usr/{name}")
    shutil.copy(shutil.which("busybox") or "/bin/busybox", directory / "usr/bin/busybox")
    for name in ("true", "sh", "ls"):
        (directory / "usr/bin" / name).symlink_to("busybox")
    shutil.copy("/lib64/ld-linux-x86-64.so.2", directory / "usr/lib64")
    listing = subprocess.run([_ldconfig(), "-p"], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s(\S+) \(libc6,x86-64.* => (\S+)$", listing, re.MULTILINE)
    essential = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
    found.sort(key=lambda pair: pair[0] not in essential)
    copied = 0
    for name, path in found:
        target = directory / _LIBRARY_DIRECTORY / name
        if copied < LIBRARIES and not target.exists() and (os.stat(path).st_size < _LARGE or name in essential):
            shutil.copy(path, target)
            copied += 1
    (directory / "etc/debian_version").write_text("12.4\n")
    (directory / "etc/os-release").write_text('PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\n')
    (directory / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (directory / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    (directory / "etc/ld.so.conf.d/x86_64-linux-gnu.conf").write_text(
        "/usr/local/lib/x86_64-linux-gnu\n/lib/x86_64-linux-gnu\n/usr/lib/x86_64-linux-gnu\n"
    )
    shutil.copy(_ldconfig(), directory / "usr/sbin/ldconfig")
    subprocess.run([_ldconfig(), "-r", str(directory)], check=True, capture_output=True)


def _ldconfig() -> str:
    return next(path for path in ("/sbin/ldconfig.real", "/sbin/ldconfig") if os.path.exists(path))


def count_entries(root: Path) -> int:
    """Return how many libraries the loader's cache of a root file system names."""
    command = [_ldconfig(), "-p", "-C", str(root / "etc/ld.so.cache")]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


def make_bundle(directory: Path, image: Path, runc: str, asks: bool, plain: bool = False) -> Bundle:
    """Make a bundle whose process ends at once; ``asks``: for all GPUs of the host; ``plain``: see Bundle."""
    directory.mkdir()
    subprocess.run([runc, "spec"], cwd=directory, check=True)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    config["process"].update(terminal=False, args=["/bin/true"])
    config["process"].pop("rlimits", None)  # raising them needs a capability that machines for tests lack
    if asks:
        config["process"]["env"] += [f"{name}={value}" for name, value in VARIABLES.items()]
    config["root"]["readonly"] = False
    bundle = Bundle(directory, image, config, plain)
    bundle.make_fresh()
    return bundle


def make_host(work: Path, count: int) -> None:
    """Make a simulated host, and settings of each mode for it: MODE.toml in its directory."""
    host = work / f"host{count}"
    create_host(str(host), gpus=count, model="h100")
    text = (host / "config.toml").read_text()
    for mode in MODES:
        (host / f"{mode}.toml").write_text(f'mode = "{mode}"\n{text}')
        (host / f"{mode}-alone.toml").write_text(f'mode = "{mode}"\nruntime.runtimes = ["/bin/true"]\n{text}')
        crun = shutil.which("crun")
        if crun:
            (host / f"{mode}-crun.toml").write_text(f'mode = "{mode}"\nruntime.runtimes = ["{crun}"]\n{text}')


def make_host_with_entries(work: Path, entries: int) -> int:
    """Make a host of 8 GPUs whose loader's cache has about that many entries; returns how many it has."""
    host = work / f"entries{entries}"
    create_host(str(host), gpus=8, model="h100", compat32=entries > ENTRIES[0])
    have = count_entries(host)
    directory = next(path for path in (host / "usr/lib").glob("*-linux-gnu") if not path.name.startswith("i386"))
    model = directory / "libfiller0000.so.1"
    command = [
        "gcc",
        "-shared",
        "-nostdlib",
        "-x",
        "c",
        "/dev/null",
        "-Wl,-soname,libfiller0000.so.1",
        "-o",
        str(model),
    ]
    if entries > have:
        subprocess.run(command, check=True)
        code = model.read_bytes()
        for number in range(1, entries - have):
            name = f"libfiller{number:04}.so.1"
            (directory / name).write_bytes(code.replace(b"libfiller0000", name.encode()[:13]))
        subprocess.run([_ldconfig(), "-r", str(host), "-X", "-i"], check=True, capture_output=True)
        shutil.rmtree(host / "var/cache", ignore_errors=True)
    return count_entries(host)


def write_generated_specification(work: Path) -> Path:
    """Write the specification of the host with 8 GPUs, and settings of mode cdi with its directory alone.

    It gives all that the driver has; only what the hook would give for the capabilities of the other rows is left.
    Returns the settings.
    """
    host, directory = work / f"host{CDI_GPUS}", work / "generated"
    directory.mkdir()
    text = (host / "config.toml").read_text()
    settings = read_settings(str(host / "config.toml"))
    env = [f"{name}={value}" for name, value in VARIABLES.items()]
    plan = make_plan(read_host_facts(settings), parse_request({"process": {"env": env}}, settings), settings)
    kept = {action.host_path for action in plan.actions if isinstance(action, Bind)}
    nodes = {action.node.container_path for action in plan.actions if isinstance(action, Node)}
    links = {action.container_path for action in plan.actions if isinstance(action, Link)}
    command = [OCIGPU, "cdi", "generate", "--quiet", "--config", str(host / "config.toml"), "--json"]
    command += ["--nvidia-cdi-hook-path", HOOK]
    spec = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for edits in (spec["containerEdits"], *(device["containerEdits"] for device in spec["devices"])):
        edits["mounts"] = [mount for mount in edits.get("mounts", []) if mount["hostPath"] in kept]
        edits["deviceNodes"] = [node for node in edits.get("deviceNodes", []) if node["path"] in nodes]
        for hook in edits.get("hooks", []):
            hook["args"] = _without_links(hook["args"], links)
        for key in [key for key, value in edits.items() if not value]:
            del edits[key]
    (directory / "nvidia.json").write_text(json.dumps(spec, indent=1))
    file = directory / "settings.toml"
    file.write_text(f'mode = "cdi"\ncdi.spec-dirs = ["{directory}"]\n{text}')
    return file


def _without_links(words: list[str], kept: set[str]) -> list[str]:
    """Leave out the options "--link TARGET::PATH" and "--device-link" of links that are not in ``kept``."""
    result: list[str] = []
    for word in words:
        if "::" in word and result[-1] in ("--link", "--device-link") and word.rpartition("::")[2] not in kept:
            result.pop()
            continue
        result.append(word)
    return result
