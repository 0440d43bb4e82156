"""What a simulated host's driver has that files.toml cannot say: firmware, sockets, the loader's cache."""

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from ocigpu.core.errors import printable
from ocigpu.sim.files import write_file
from ocigpu.sim.models import Model, sim_error
from ocigpu.system.programs import run_program

_LDCONFIG = ("/sbin/ldconfig.real", "/sbin/ldconfig", "/usr/sbin/ldconfig")
"""Ubuntu's /sbin/ldconfig is a script around ldconfig.real."""


def write_firmware(root: Path, driver_version: str) -> None:
    """Write GSP firmware: some KiB that name themselves."""
    directory = root / "lib/firmware/nvidia" / driver_version
    for name in ("gsp_ga10x.bin", "gsp_tu10x.bin"):
        write_file(directory / name, f"{name} of a simulated host\n".encode().ljust(8192, b"\0"), 0o444)


def make_sockets(root: Path, model: Model) -> list[str]:
    """Make the daemons' sockets: bound once, so that the file is there and nobody answers; return their paths."""
    names = ["run/nvidia-persistenced/socket"]
    if model.fabric:
        names.append("run/nvidia-fabricmanager/socket")
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # A socket's path is limited to 107 bytes (unix(7)), so the long part goes through a descriptor.
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
        path.chmod(0o666)
    return names


def write_ldcache(root: Path) -> None:
    """Write etc/ld.so.cache with this machine's ldconfig; the paths in it are without the prefix.

    ``ldconfig -r`` uses chroot(2) when it may and adds the prefix by itself otherwise: no privileges are needed.
    Raises OcigpuError when there is no ldconfig (musl systems) or it fails.
    """
    program = next((path for path in _LDCONFIG if os.access(path, os.X_OK)), None)
    if program is None:
        raise sim_error(
            "no ldconfig on this machine", "the loader's cache needs a glibc system; or leave the cache out"
        )
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    try:
        done = run_program([program, "-r", str(root), "-X", "-i"], 300, env=environment)
    except OSError as error:
        raise sim_error(f"{program} -r {root}: {error}") from error
    cache = root / "etc/ld.so.cache"
    if done.status or not cache.is_file():
        lines: Sequence[str] = done.complaint.splitlines() or ["no cache was written"]
        raise sim_error(f"{program} -r {root}: {printable(lines[-1], 300)}")
    cache.chmod(0o644)
    shutil.rmtree(root / "var/cache", ignore_errors=True)  # ldconfig's own notes
