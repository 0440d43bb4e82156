"""The programs under test, and the simulated hosts they give GPUs from."""

import encodings
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import _prctl
import prctl
from support import requirements
from support.process import Completed, run
from support.runtimes import Answers, answers, parts

from ocigpu.system import libc

PROGRAMS = Path(sys.prefix, "bin")
RUNTIME = PROGRAMS / "ocigpu-runtime"
REPOSITORY = Path(__file__).parents[2]

CONTROL_NODES = ("nvidia-uvm", "nvidia-uvm-tools", "nvidiactl")
"""Control nodes of a container with the default capabilities, compute and utility."""

LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1")
"""Libraries of the default capabilities by the names that programs ask the loader for."""


class PublicCopy(NamedTuple):
    """The product where every user can run it: a clone may lie in a directory that is closed to others."""

    library: Path
    runtime: Path
    python: str


STUBS = ("compiled", "sh")
"""What is in front of shim and hook: packages have the first, an installation without a C compiler has the second."""


STUBBED = ("ocigpu-runtime", "ocigpu-hook", "ocigpu-container-cli")
"""Programs that a stub starts."""


def write_stub(path: Path, kind: str = "compiled", name: str = "", **values: str | Path) -> Path:
    """Write a stub of ocigpu-runtime or ocigpu-hook (``name``; by default that of the file) as installation does it.

    ``values``: of packaging/stub.sh; by default those of this machine's interpreter and of the repository.
    """
    usual = {
        "interpreter": os.path.realpath(sys.executable), "encodings": encodings.__file__, "library": REPOSITORY,
        "site": os.path.dirname(str(prctl.__file__)),
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in {**usual, **values}.items()]
    command = [REPOSITORY / "packaging/stub.sh", kind, name or path.name, path, *words]
    run(command, env={"PATH": "/usr/local/bin:/usr/bin:/bin"})
    return path


def make_public_copy(directory: Path, stubs: str = "compiled") -> PublicCopy:
    """Copy the package and what it needs outside the standard library, and make stubs of shim and hook."""
    library, programs = directory / "lib", directory / "bin"
    shutil.copytree(REPOSITORY / "ocigpu", library / "ocigpu", ignore=shutil.ignore_patterns("__pycache__"))
    modules = [Path(str(module.__file__)) for module in (prctl, _prctl)]
    run([sys.executable, "-I", "-S", REPOSITORY / "packaging/byte_code.py", library])
    programs.mkdir()
    for module in modules:
        shutil.copy(module, library)
    for name in STUBBED:
        write_stub(programs / name, stubs, library=library, site=library)
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.parent == programs else 0o644)
    return PublicCopy(library, programs / "ocigpu-runtime", os.path.realpath(sys.executable))


def python_of_nobody(place: Path) -> list[str | Path]:
    """Return the words that start the product's Python as an ordinary user, in the repository.

    A clone may lie in a directory that is closed to others: a mount of it at the empty directory ``place``, seen by
    nobody else, is open.
    """
    script = 'mount --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"'
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    python = Path(sys.executable).relative_to(REPOSITORY)
    return ["unshare", "--mount", "sh", "-c", script, "sh", REPOSITORY, place, *user, python]


def open_clone() -> None:
    """Let every user into the repository, in a mount namespace of the calling process's own.

    A clone may lie in a directory that is closed to others: that is covered, and has the repository alone.
    """
    closed = [path for path in reversed(REPOSITORY.parents) if not path.stat().st_mode & stat.S_IXOTH]
    if closed:
        libc.unshare(libc.CLONE_NEWNS)
        libc.mount(None, "/", None, libc.MS_REC | libc.MS_PRIVATE)
        fd = os.open(REPOSITORY, os.O_PATH | os.O_DIRECTORY)
        libc.mount("tests", str(closed[0]), "tmpfs", 0, "mode=755")
        REPOSITORY.mkdir(parents=True)
        libc.mount(f"/proc/self/fd/{fd}", str(REPOSITORY), None, libc.MS_BIND)
        os.close(fd)


class SimulatedHost(NamedTuple):
    """One simulated host: its ``directory``, and the GPUs and MIG devices on it by UUID, in order."""

    directory: Path
    gpus: tuple[str, ...]
    mig_devices: tuple[tuple[str, int, int], ...]
    """UUID, and the minors of the GPU instance and the compute instance."""

    @property
    def settings(self) -> Path:
        return self.directory / "config.toml"

    def environment(self, base: dict[str, str], runtime: str = "runc") -> dict[str, str]:
        """Return ``base`` with the settings that make the shim use this host and a low-level runtime."""
        program = requirements.find_program(runtime)
        requirements.require("" if program else f"not installed: {runtime}")
        settings = self.directory / f"config-{runtime}.toml"
        if not settings.exists():
            text = self.settings.read_text()
            assert "[runtime]" not in text
            log = self.hook_log  # crun does not pass on what a hook says
            log.touch()
            log.chmod(0o666)
            settings.write_text(f'{text}\n[runtime]\nruntimes = ["{program}"]\n[hook]\nlog = "{log}"\n')
            settings.chmod(0o644)
        variables = {name: value for name, value in base.items() if runtime == "crun" or name != "LD_PRELOAD"}
        return {**variables, "OCIGPU_CONFIG": str(settings)}

    def in_mode(self, base: dict[str, str], file: Path, mode: str, *more: str, runtime: str = "runc") -> dict[str, str]:
        """Return the same with settings of a mode, which are written to ``file``; ``more``: further lines of them."""
        environment = self.environment(base, runtime)
        lines = [f'mode = "{mode}"', *more, Path(environment["OCIGPU_CONFIG"]).read_text()]
        file.write_text("\n".join(lines))
        file.chmod(0o644)
        return {**environment, "OCIGPU_CONFIG": str(file)}

    @property
    def hook_log(self) -> Path:
        return self.directory / "hook.log"

    def describe_node(self, name: str) -> str:
        """Return the node of the host below its dev as the probe describes one: type, number, mode, owner."""
        status = os.lstat(self.directory / "dev" / name)
        assert stat.S_ISCHR(status.st_mode)
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        return f"c {number} {stat.S_IMODE(status.st_mode):04o} {status.st_uid}:{status.st_gid}"

    def number(self, name: str) -> tuple[str, str]:
        """Return major and minor of a node as words for the probe."""
        status = os.lstat(self.directory / "dev" / name)
        return str(os.major(status.st_rdev)), str(os.minor(status.st_rdev))


def make_simulated_host(
    directory: Path, count: int, mig: tuple[str, ...] = (), model: str = "a100", ldcache: bool = True
) -> SimulatedHost:
    """Make a host with GPUs of a model, and with a loader's cache or without."""
    from ocigpu.sim.create import create_host
    from ocigpu.sim.models import find_model, make_gpus

    version = "550.163.01" if model == "a100" else ""
    create_host(str(directory), gpus=count, model=model, driver_version=version, mig=mig, ldcache=ldcache)
    gpus = make_gpus(find_model(model), count, mig)
    return SimulatedHost(
        directory,
        tuple(gpu.uuid for gpu in gpus),
        tuple((device.uuid, device.gi_minor, device.ci_minor) for gpu in gpus for device in gpu.mig_devices),
    )


def install_vendor_names(directory: Path, settings: Path) -> Path:
    """Install the commands, with the hook under its vendor name, fixed settings; returns ``directory``."""
    script = REPOSITORY / "packaging" / "install.sh"
    run(["sh", script, "--bin", directory, "--venv", sys.prefix, "--config", settings, "--vendor-names"])
    return directory


def listed_uuids(output: str) -> list[str]:
    """Return the UUIDs of the GPU lines of ``nvidia-smi -L``, in order."""
    return [line.partition("UUID: ")[2].rstrip().rstrip(")") for line in output.splitlines() if line.startswith("GPU ")]


def gpu_names(listing: str) -> list[str]:
    """Return the names of our device nodes in a probe's listing of /dev, sorted."""
    return sorted(name for name in listing.split() if name.startswith("nvidia"))


GRANTED = ("nvidia0", "nvidia2", *CONTROL_NODES)
"""The nodes of a container with GPUs 0 and 2."""


def check_gpus_0_and_2(host: SimulatedHost, listing: str, probed: str, granted: Sequence[str] = GRANTED) -> Answers:
    """Check nvidia-smi -L and a probe in a container that has these nodes and no other; return the probe's answers."""
    assert listed_uuids(listing) == [host.gpus[0], host.gpus[2]], listing
    seen = answers(probed)
    assert gpu_names(seen["list", "/dev"]) == sorted(granted)
    assert sorted(seen["list", "/proc/driver/nvidia/gpus"].split()) == ["0000:01:00.0", "0000:03:00.0"]
    for name in granted:
        assert seen["stat", f"/dev/{name}"] == host.describe_node(name), name
        assert seen["open", f"/dev/{name}"] == "ENXIO", name
    assert seen["open", "/dev/nvidia1"] == "EPERM"
    return seen


def look_at_gpus_0_and_2(host: SimulatedHost, output: str) -> Answers:
    """Check what nvidia-smi -L, probe and dlopen say in a container with GPUs 0 and 2; return the probe's answers."""
    listing, probed, opened = parts(output)
    assert listed_uuids(listing) == [host.gpus[0], host.gpus[2]], output
    seen = answers(probed)
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia0", "nvidia2", *CONTROL_NODES])
    for name in ("nvidia0", "nvidia2", "nvidiactl"):
        assert seen["open", f"/dev/{name}"] == "ENXIO", name
    assert opened.splitlines() == [f"dlopen {name} ok" for name in LIBRARIES]
    return seen


def failed_with(code: str, result: Completed) -> bool:
    """Whether a command failed and its messages carry the code."""
    return result.returncode != 0 and code in result.stderr
