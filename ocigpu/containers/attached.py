"""Records of what running containers were given, or lost, after their start: a file for each container.

The files are in root's cache directory (/run/ocigpu), until the container has ended or the next boot.  The runtime does
not know them.  When it changes the device rules later (an update of the resources), it takes such devices away or
brings them back; ``ocigpu repair`` corrects that.
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

    ``files``: vendors whose driver files and control nodes it was also given.  ``numbers``: devices that it may open
    now, and could not at its start.  ``view``: id of the mount that now shows it /proc/driver/nvidia, 0 for the
    original one.  ``unsure``: devices that a command is giving or taking.  If it was killed, their nodes may exist, and
    a view that shows them may lie over the mount ``under`` (0: none).
    """

    attached: tuple[str, ...] = ()
    detached: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    view: int = 0
    unsure: tuple[str, ...] = ()
    under: int = 0
    numbers: tuple[tuple[int, int], ...] = ()


def read_record(container: Container, settings: Settings) -> AttachRecord:
    """Return the record of a container; an empty one if it is missing, or if another user may have written it."""
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
    """Write a container's record, or remove it if it is empty; records of ended containers are removed, too.

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
