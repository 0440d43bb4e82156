"""A simulated host that was made: its marker, what it holds, and how it is removed."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

from ocigpu.core.errors import quoted
from ocigpu.sim.models import describe_mig, find_model, gi_minor, sim_error
from ocigpu.system.files import read_regular
from ocigpu.system.proc import read_mounts

MARKER_NAME = ".ocigpu-sim.json"
MARKER_FORMAT = 1
_LIMIT = 1 << 20
_STAND_IN_NOTE = (
    "device nodes are stand-in files: mknod was not permitted, so access by containers cannot be tested with them"
)


def write_marker(root: Path, data: dict[str, Any]) -> None:
    """Write the marker with ``format`` first."""
    path = root / MARKER_NAME
    path.write_text(json.dumps({"format": MARKER_FORMAT, **data}, indent=2) + "\n")
    path.chmod(0o644)


def read_marker(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of the marker; raises OcigpuError when the directory is not a simulated host of ours."""
    path = Path(directory) / MARKER_NAME
    if Path(directory).is_symlink():
        raise sim_error(f"{directory}: a symbolic link, not a simulated host", "name the directory itself")
    try:
        text = read_regular(str(path), _LIMIT, flags=os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise sim_error(f"{directory}: not a simulated host: {MARKER_NAME}: {error.strerror}") from error
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EFBIG):
            raise sim_error(f"read {path}: {error.strerror}") from error
        text = b""
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict) or not isinstance(data.get("gpus"), list) or not isinstance(data.get("model"), str):
        raise sim_error(f"{directory}: not a simulated host: {MARKER_NAME} was not written by ocigpu")
    if data.get("format") != MARKER_FORMAT:
        raise sim_error(f"{directory}: simulated host of format {quoted(str(data.get('format')))}, not {MARKER_FORMAT}")
    return data


def describe_host(directory: str) -> dict[str, Any]:
    """Return the contents of the host's marker, with the present MIG devices.

    Added are ``directory``, ``config`` and ``faults`` (lines of DIR/faults); ``notes`` contains one sentence for each
    difference from a real host.  Raises OcigpuError (OCIGPU-SIM-1) when the directory is not a simulated host.
    """
    path = os.path.abspath(directory)
    data = read_marker(path)
    _follow_mig(path, data)
    faults = read_faults(path)
    notes = [*data.get("notes", [])]
    if data.get("nodes") == "stand-in":
        notes.append(_STAND_IN_NOTE)
    if faults:
        notes.append(f"faults are switched on: {', '.join(faults)}")
    return {
        "directory": path,
        "config": os.path.join(path, "config.toml"),
        **data,
        "faults": faults,
        "notes": notes,
    }


def _follow_mig(directory: str, data: dict[str, Any]) -> None:
    """Put what programs have made of the GPUs by NVML since into ``data``; simhost.h explains the file."""
    try:
        with open(os.path.join(directory, "proc/driver/ocigpu-mig"), encoding="ascii") as file:
            lines = [line.split() for line in file]
    except FileNotFoundError:
        return
    model = find_model(data["model"])
    profiles = model.mig_profiles
    for gpu in (gpu for gpu in data["gpus"] if "minor" in gpu):  # NVIDIA's
        found = [line for line in lines if line[1:2] == [str(gpu["index"])]]
        gpu["mig_enabled"] = ["mode", str(gpu["index"]), "1"] in found
        gpu["mig_devices"] = []
        for instance, profile, _, ci, slices, _, compute, uuid in (line[2:] for line in found if line[0] == "mig"):
            if int(ci) < 0:
                continue
            whole, minor = profiles[int(profile)], gi_minor(gpu["index"], int(instance))
            part = "" if int(compute) == model.whole_instance(whole) else f"{slices}c."
            name = part + whole.name
            mig = describe_mig(len(gpu["mig_devices"]), uuid, name, int(instance), int(ci), minor)
            gpu["mig_devices"].append(mig)


def read_faults(directory: str) -> list[str]:
    """Return the lines of DIR/faults, which nvml.c explains ("lost GPU"); none without the file."""
    try:
        with open(os.path.join(directory, "faults"), encoding="utf-8", errors="replace") as file:
            return [line.strip() for line in file.read(4096).splitlines() if line.strip()]
    except FileNotFoundError:
        return []


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
