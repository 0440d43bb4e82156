"""What was given to running containers, and taken from them, after they were started: a file for each container.

In the cache directory (/run/ocigpu), of root, until the container has ended or the next boot.  The
runtime knows nothing of it: what it does to the device rules later (an update of the resources) takes such devices
away or brings them back, and ``ocigpu repair`` does the rest.
"""

import json
import os
from contextlib import suppress

from ocigpu.containers.believed import Container
from ocigpu.core.errors import OcigpuError
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.core.vendors import FIRST
from ocigpu.system.files import remove_if_possible
from ocigpu.system.proc import is_running
from ocigpu.system.store import open_cache, read_cached, write_cached

PREFIX = "attached-"


class AttachRecord(NamedTuple):
    """UUIDs of GPUs and MIG devices: ``attached`` later, and ``detached`` of those it was started with.

    ``files``: vendors of whose driver it was given files and control nodes, too.  ``numbers``: devices that it may open
    since, and could not when it was started.  ``view``: id of the mount that shows it /proc/driver/nvidia since, 0 for
    the one it was started with.
    ``unsure``: those that a command is giving or taking; if it was killed, nodes of them may be there, and over the
    mount ``under`` a view that shows them (0: there is none).
    """

    attached: tuple[str, ...] = ()
    detached: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    view: int = 0
    unsure: tuple[str, ...] = ()
    under: int = 0
    numbers: tuple[tuple[int, int], ...] = ()


def read_record(container: Container, settings: Settings) -> AttachRecord:
    """Return what was recorded of a container; nothing if there is none, or somebody else may have written it."""
    directory = open_cache(False, settings.simulation_root)
    if directory < 0:
        return AttachRecord()
    try:
        text = read_cached(directory, _name(container))
        data = json.loads(text) if text else AttachRecord()._asdict()
        attached, detached, unsure = (tuple(data[name]) for name in ("attached", "detached", "unsure"))
        files = tuple(data["files"]) if isinstance(data["files"], list) else (FIRST,) * data["files"]  # until 2026-11
        numbers = tuple((int(major), int(minor)) for major, minor in data["numbers"])
        return AttachRecord(attached, detached, files, data["view"], unsure, data["under"], numbers)
    except (ValueError, KeyError, TypeError):  # not written by this version
        return AttachRecord()
    finally:
        os.close(directory)


def write_record(container: Container, settings: Settings, record: AttachRecord) -> None:
    """Record this of a container, or remove what is recorded if it says nothing; records of ended containers go too.

    Raises OcigpuError OCIGPU-CTR-5 when it cannot be written.
    """
    directory = open_cache(record != AttachRecord(), settings.simulation_root)
    if directory < 0:
        if record == AttachRecord():
            return
        raise OcigpuError("OCIGPU-CTR-5", f"record of container {container.name}: no directory that can be trusted")
    try:
        name = _name(container)
        if record == AttachRecord():
            with suppress(FileNotFoundError):  # another command was faster
                os.unlink(name, dir_fd=directory)
        elif not write_cached(directory, name, json.dumps(record._asdict()).encode()):
            raise OcigpuError("OCIGPU-CTR-5", f"record of container {container.name}: it could not be written")
        _prune(directory)
    finally:
        os.close(directory)


def prune_records(settings: Settings) -> None:
    """Remove the records of containers that have ended."""
    directory = open_cache(False, settings.simulation_root)
    if directory >= 0:
        _prune(directory)
        os.close(directory)


def _name(container: Container) -> str:
    """Return the name of a container's file: its process by number and start, and as much of its id as fits."""
    return f"{PREFIX}{container.pid}-{container.start_time}-{container.id[:200]}"


def _prune(directory: int) -> None:
    for name in os.listdir(directory):
        pid, _, rest = name.removeprefix(PREFIX).partition("-")
        start = rest.partition("-")[0]
        known = pid.isdecimal() and start.isdecimal()
        if name.startswith(PREFIX) and not (known and is_running(int(start), f"/proc/{pid}/stat")):
            remove_if_possible(directory, name)
