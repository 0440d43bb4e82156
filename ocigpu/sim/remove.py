"""Remove a simulated host, and nothing else."""

import os
import shutil
from pathlib import Path

from ocigpu.sim.marker import MARKER_NAME, read_marker
from ocigpu.sim.models import sim_error
from ocigpu.system.proc import read_mounts


def remove_host(directory: str) -> None:
    """Remove a directory that ocigpu made a simulated host.

    Links are removed, never followed. Refused (OcigpuError, OCIGPU-SIM-1) without our marker, and while anything is
    mounted at or below the directory. The marker goes last, so that an interrupted removal can be repeated.
    """
    given = Path(os.path.abspath(directory))
    read_marker(given)
    root = given.parent.resolve() / given.name
    mounts = find_mounts(str(root))
    if mounts:
        more = f" and {len(mounts) - 1} more" if len(mounts) > 1 else ""
        raise sim_error(f"remove {root}: {mounts[0]} is mounted{more}", f"umount {mounts[0]}")
    try:
        with os.scandir(root) as entries:
            listed = list(entries)
        for entry in listed:
            if entry.name == MARKER_NAME:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        os.unlink(root / MARKER_NAME)
        os.rmdir(root)
    except OSError as error:
        raise sim_error(f"remove {error.filename or root}: {error.strerror}") from error


def find_mounts(root: str, mountinfo: str = "/proc/self/mountinfo") -> list[str]:
    """Return the mount points at or below ``root`` (proc_pid_mountinfo(5): fields have octal escapes)."""
    points = [mount.point for mount in read_mounts(mountinfo).values()]
    return [point for point in points if point == root or point.startswith(root + "/")]
