"""A simulated host for the programs of this machine: NVML, CUDA and nvidia-smi, or AMD's programs, found by variables.

It needs neither root nor device nodes nor mounts, so it works in a job's container, rootless, and below any directory
from which programs may be executed.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ocigpu.core.errors import OcigpuError, OsErrorAs
from ocigpu.sim.create import create_host
from ocigpu.sim.libraries import library_triplet
from ocigpu.sim.models import sim_error
from ocigpu.system.files import lock

_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
_PREFIX = "ocigpu-sim-"


@contextmanager
def temporary_host(
    gpus: int, model: str, mig: Sequence[str], driver_version: str, progress: Callable[[str], None]
) -> Iterator[str]:
    """Make such a host in a new directory, yield its path, and remove it; arguments as of create_host.

    This user's abandoned hosts are removed first, because a killed program leaves its own.
    """
    place = find_place()
    _sweep(place)
    with OsErrorAs(OcigpuError, "OCIGPU-SIM-1", f"make a directory in {place}", ""):
        base, held = _make_held(place)
    try:
        os.chmod(base, 0o755)  # a command may change its user
        directory = f"{base}/host"
        create_host(directory, gpus, model, mig, driver_version, few=True, progress=progress)
        yield directory
    finally:
        shutil.rmtree(base, ignore_errors=True)
        os.close(held)


def _make_held(place: str) -> tuple[str, int]:
    """Make a directory, and lock it for this process and the command that it starts, which may outlive it."""
    while True:
        base = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
        held = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # no locks there: then no sweep happens, either
            lock(held, shared=True)
        if os.path.exists(base):  # else it was swept before it was locked
            os.set_inheritable(held, True)
            return base, held
        os.close(held)


def _sweep(place: str) -> None:
    for name in os.listdir(place):
        if not name.startswith(_PREFIX):
            continue
        with contextlib.suppress(OSError):  # another user's, gone by now, or no locks there
            fd = os.open(f"{place}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.geteuid() and lock(fd, 0):
                    shutil.rmtree(f"{place}/{name}", ignore_errors=True)
            finally:
                os.close(fd)


def find_place(places: Sequence[str] = ()) -> str:
    """Return the first writable directory whose files can be executed and loaded: TMPDIR, /tmp, ...

    Raises OcigpuError (OCIGPU-SIM-1) with the reason why each is unusable.
    """
    refused = []
    for place in places or [*filter(None, [os.environ.get("TMPDIR")]), *_PLACES]:
        if not os.path.isdir(place):
            refused.append(f"{place}: no directory")
        elif os.statvfs(place).f_flag & os.ST_NOEXEC:
            refused.append(f"{place}: mounted noexec")
        elif os.statvfs(place).f_flag & os.ST_RDONLY or not os.access(place, os.W_OK | os.X_OK):
            refused.append(f"{place}: not writable")
        else:
            return os.path.realpath(place)
    raise sim_error(f"no place for libraries: {', '.join(refused)}", "TMPDIR=DIR ocigpu sim exec -- COMMAND")


def search_paths(directory: str) -> dict[str, str]:
    """Return where the host's programs and libraries are, by the variables that programs are found with."""
    library = Path(directory, "usr/lib", library_triplet())
    there = {"LD_LIBRARY_PATH": str(library)} if library.is_dir() else {}  # of NVIDIA's driver only
    return {"PATH": f"{directory}/usr/bin", **there}


def environment_of(directory: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which the host's programs and libraries come before all others."""
    # An empty part of these would mean the working directory.
    joined = {name: ":".join(filter(None, [at, inherited.get(name)])) for name, at in search_paths(directory).items()}
    return {**inherited, **joined, "OCIGPU_CONFIG": f"{directory}/config.toml"}
