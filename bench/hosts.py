"""What is measured on: simulated hosts, images, bundles, and the programs that run them; made when first asked for."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.commands import life_cycle, run
from bench.output import Output
from ocigpu.sim.create import create_host
from ocigpu.system import libc

REPOSITORY = Path(__file__).parent.parent
PROGRAMS = os.environ.get("PROGRAMS") or str(REPOSITORY / ".venv/bin")
SHIM, HOOK, OCIGPU, CONTAINER_CLI = (
    f"{PROGRAMS}/{name}" for name in ("ocigpu-runtime", "ocigpu-hook", "ocigpu", "ocigpu-container-cli")
)
PYTHON = str(REPOSITORY / ".venv/bin/python")
MODES = {
    "hook": 'mode = "hook"',
    "ldconfig": 'mode = "hook"\nloader-cache = "ldconfig"',
    "spec": 'mode = "spec"',
    "cdi": 'mode = "cdi"',
}
"""Settings by name: lines before those of a simulated host."""
DEVICE = """\
- name: "{0}"
  containerEdits:
    env: [DEVICE={0}]
    deviceNodes: [{{path: /dev/null, permissions: rw}}]
    mounts: [{{hostPath: /etc, containerPath: /opt/{0}, options: [ro, rbind]}}]
"""
ASKS = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
LIBRARIES = 100
"""Libraries of the image."""
_LIBRARY_DIRECTORY = "usr/lib/x86_64-linux-gnu"
_LARGE = 1 << 20


class AbsentError(Exception):
    """A row cannot be measured here, and why."""


class Size(NamedTuple):
    """How much of everything, from the least to the most.

    ``entries``: of the loader's cache.  ``warm``: turns that do not count; ``settle``: seconds after which what was
    made counts as unchanged: nothing is kept of what may change once more unseen.
    """

    gpus: tuple[int, int, int] = (1, 8, 64)
    entries: tuple[int, int, int] = (40, 600, 2000)
    devices: tuple[int, int, int] = (10, 100, 10_000)
    creates: tuple[int, int, int] = (20, 50, 200)
    running: tuple[int, int, int] = (100, 300, 1000)
    megabytes: int = 300
    warm: int = 2
    settle: float = 3.0


TINY = Size((2, 2, 2), (40, 60, 60), (2, 4, 4), (2, 2, 3), (2, 2, 3), 2, 0, 0.0)
"""For tests: every row runs, and nothing is measured."""


class Bundle(NamedTuple):
    """A bundle, and its configuration before any edit.

    Its root file system is an overlay over the image; or with ``plain`` a copy, in which earlier containers have left
    what one mounts on.
    """

    directory: Path
    image: Path
    config: dict[str, Any]
    plain: bool

    def make_fresh(self) -> None:
        """Give the bundle an unused root file system and its unedited config.json, as engines do.

        A plain one only gets the image's loader cache again, as current as it was.
        """
        (self.directory / "config.json").write_text(json.dumps(self.config))
        target = self.directory / "rootfs"
        if self.plain:
            if not target.exists():
                shutil.copytree(self.image, target, symlinks=True)
            shutil.copy(self.image / "etc/ld.so.cache", target / "etc/new")
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


class Bench:
    """A directory to work in, the programs, and what has been made there."""

    def __init__(self, work: Path, runc: str, size: Size, peer: Path | None = None) -> None:
        self.work, self.runc, self.size, self.peer = work, runc, size, peer
        self.out = Output()
        self.state = work / "state"
        self.at_end: list[Callable[[], object]] = []
        """What takes away what was made outside of ``work``, the last first."""
        self.crowd: list[Bundle] = []
        self.running: list[str] = []
        self.crun_needs: dict[str, str] | None = None
        self._bundles = 0

    @property
    def usual(self) -> Path:
        """The simulated host of most rows."""
        return self.host(self.size.gpus[1])

    def host(self, gpus: int, entries: int = 0) -> Path:
        """Return a simulated host; ``entries``: of its loader's cache, about so many."""
        host = self.work / f"host-{gpus}-{entries}"
        if not host.exists():
            self.out.progress(f"making a simulated host with {gpus} GPUs")
            create_host(str(host), gpus, "h100", dri=False, compat32=not entries)
            if entries:
                add_entries(host, entries)
        return host

    def settings(self, mode: str, host: Path, runtime: str = "", specs: Path | None = None) -> dict[str, str]:
        """Return the environment that makes our programs use a host in a mode: above that runtime, or our own choice.

        ``specs``: directory of the CDI specifications, by default that of the host's generated one.
        """
        lines = [MODES[mode]]
        if mode == "cdi":
            specs = specs or self.specification(host)
            lines.append(f'cdi.spec-dirs = ["{specs}"]')
        if runtime:
            lines.append(f'runtime.runtimes = ["{runtime}"]')
        file = host / f"bench-{mode}-{os.path.basename(runtime)}-{specs.name if specs else ''}.toml"
        if not file.exists():
            file.write_text("\n".join((*lines, (host / "config.toml").read_text())))
        return {**os.environ, "OCIGPU_CONFIG": str(file)}

    def specification(self, host: Path) -> Path:
        """Return a directory with the CDI specification of a host, as it is generated."""
        directory = host.with_name(f"{host.name}-generated")
        if not directory.exists():
            directory.mkdir()
            command = [OCIGPU, "cdi", "generate", "--quiet", "--config", str(host / "config.toml")]
            command += ["--nvidia-cdi-hook-path", HOOK, "--output", str(directory / "nvidia.yaml")]
            run(command, dict(os.environ))
        return directory

    def devices(self, count: int) -> Path:
        """Return a directory with a specification of that many CDI devices, each a node, a variable and a mount."""
        directory = self.work / f"devices-{count}"
        if not directory.exists():
            directory.mkdir()
            with (directory / "large.yaml").open("w") as file:
                file.write("cdiVersion: 0.6.0\nkind: nvidia.com/gpu\ncontainerEdits:\n  env: [COMMON=1]\ndevices:\n")
                file.writelines(DEVICE.format(number) for number in range(count))
        return directory

    def image(self, megabytes: int = 0) -> Path:
        """Return a root file system like Debian's, with files up to that size."""
        image = self.work / f"image-{megabytes}"
        if not image.exists():
            self.out.progress("making an image")
            make_image(image)
            (image / "usr/share").mkdir()
            for number in range(megabytes):
                (image / f"usr/share/{number}").write_bytes(os.urandom(1 << 20))
        return image

    def bundle(self, asks: dict[str, str], megabytes: int = 0, plain: bool = True) -> Bundle:
        """Return a new bundle whose process ends at once; ``asks``: its variables."""
        self._bundles += 1
        directory = self.work / f"bundle-{self._bundles}"
        directory.mkdir()
        subprocess.run([self.runc, "spec"], cwd=directory, check=True)
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        config["process"].update(terminal=False, args=["/bin/true"])
        config["process"].pop("rlimits", None)  # raising them needs a capability that machines for tests lack
        config["process"]["env"] += [f"{name}={value}" for name, value in asks.items()]
        config["root"]["readonly"] = False
        bundle = Bundle(directory, self.image(megabytes), config, plain)
        bundle.make_fresh()
        return bundle

    def crun(self) -> tuple[str, dict[str, str]]:
        """Return crun, and the variables that it needs on this machine.

        crun refuses machines that mount both versions of cgroups: version 2 is taken out of our own mounts, for good.
        On machines whose root may not raise limits it needs a library that says so and goes on.
        """
        crun = shutil.which("crun")
        if not crun:
            raise AbsentError("crun is not installed")
        if self.crun_needs is None:
            preload = self.work / "memlock.so"
            source = REPOSITORY / "tests/support/memlock.c"
            subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", preload, source], check=True)
            bundle = self.bundle({})
            for needs in ({}, {"LD_PRELOAD": str(preload)}):
                self.crun_needs = needs
                try:
                    life_cycle(crun, self.state, bundle.directory, {**os.environ, **needs})
                    break
                except RuntimeError as error:
                    problem = str(error)
            else:
                raise AbsentError(f"crun does not work here: {problem}")
        return crun, self.crun_needs


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


def add_entries(host: Path, entries: int) -> None:
    """Add libraries to a host until its loader's cache has that many entries."""
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
