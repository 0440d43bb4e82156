"""The file that says that a directory is a simulated host of ours, and what it holds."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from ocigpu.core.errors import quoted
from ocigpu.sim.models import sim_error

MARKER_NAME = ".ocigpu-sim.json"
MARKER_FORMAT = 1
_LIMIT = 1 << 20


def write_marker(root: Path, data: dict[str, Any]) -> None:
    """Write the marker with ``format`` first."""
    path = root / MARKER_NAME
    path.write_text(json.dumps({"format": MARKER_FORMAT, **data}, indent=2) + "\n")
    path.chmod(0o644)


def read_marker(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the marker says; raises OcigpuError when the directory is not a simulated host of ours."""
    path = Path(directory) / MARKER_NAME
    if Path(directory).is_symlink():
        raise sim_error(f"{directory}: a symbolic link, not a simulated host", "name the directory itself")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise sim_error(f"{directory}: not a simulated host: {MARKER_NAME}: {error.strerror}") from error
    except OSError as error:
        raise sim_error(f"read {path}: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        text = file.read(_LIMIT) if regular else b""
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict) or not isinstance(data.get("gpus"), list) or not isinstance(data.get("model"), str):
        raise sim_error(f"{directory}: not a simulated host: {MARKER_NAME} was not written by ocigpu")
    if data.get("format") != MARKER_FORMAT:
        raise sim_error(f"{directory}: simulated host of format {quoted(str(data.get('format')))}, not {MARKER_FORMAT}")
    return data
