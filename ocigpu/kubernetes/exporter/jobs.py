"""Jobs of a scheduler by GPU, from the directory that its prolog writes: dcgm-exporter's HPC job mapping."""

import os
import re

from ocigpu.kubernetes.exporter.owners import WHOLE
from ocigpu.system.files import open_regular

MAX_FILE, MAX_JOBS = 1 << 16, 64
_NAME = re.compile(r"([0-9]{1,4})(?:\.([0-9]{1,4}))?")


def read_jobs(directory: str) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the jobs by GPU index and GPU instance (WHOLE for a GPU) from files "0" or "0.7" with a job a line."""
    found: dict[tuple[int, int], tuple[str, ...]] = {}
    try:
        names = os.listdir(directory) if directory else []
    except OSError:  # not made yet: the scheduler makes it with the first job
        return {}
    for name in names:
        parts = _NAME.fullmatch(name)
        if not parts:
            continue
        try:
            with open_regular(os.path.join(directory, name)) as file:
                words = file.read(MAX_FILE).decode(errors="replace").split()
        except OSError:  # the job has ended just now
            continue
        jobs = tuple(dict.fromkeys(words))[:MAX_JOBS]
        found[int(parts[1]), int(parts[2]) if parts[2] else WHOLE] = jobs
    return found
