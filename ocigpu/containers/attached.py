"""What was given to running containers, and taken from them, after they were started: a file for each container.

In the cache directory (/run/ocigpu), below "attached": of root, until the container has ended or the next boot.  The
runtime knows nothing of it: what it does to the device rules later (an update of the resources) takes such devices
away or brings them back, and ``ocigpu repair`` does the rest.
"""

import json
import os
from contextlib import suppress
from typing import NamedTuple

from ocigpu.containers.believed import Container
from ocigpu.core.errors import OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.system.proc import is_running
from ocigpu.system.store import open_cache, read_cached, write_cached

DIRECTORY = "attached"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class AttachRecord(NamedTuple):
    """UUIDs of GPUs and MIG devices: ``attached`` later, and ``detached`` of those it was started with.

    ``files``: it was given driver files and control nodes, too.  ``numbers``: devices that it may open since, and could
    not when it was started.  ``view``: id of the mount that shows it
    /proc/driver/nvidia since, 0 for the one it was started with.
    ``unsure``: those that a command is giving or taking; if it was killed, nodes of them may be there, and over the
    mount ``under`` a view that shows them (0: there is none).
    """

    attached: tuple[str, ...] = ()
    detached: tuple[str, ...] = ()
    files: bool = False
    view: int = 0
    unsure: tuple[str, ...] = ()
    under: int = 0
    numbers: tuple[tuple[int, int], ...] = ()


def read_record(container: Container, settings: Settings) -> AttachRecord:
    """Return what was recorded of a container; nothing if there is none, or somebody else may have written it."""
    directory = _open(settings, create=False)
    if directory < 0:
        return AttachRecord()
    try:
        text = read_cached(directory, _name(container))
        data = json.loads(text) if text else AttachRecord()._asdict()
        attached, detached, unsure = (tuple(data[name]) for name in ("attached", "detached", "unsure"))
        numbers = tuple((int(major), int(minor)) for major, minor in data.get("numbers", ()))
        return AttachRecord(attached, detached, data["files"], data["view"], unsure, data["under"], numbers)
    except (ValueError, KeyError, TypeError):  # not written by this version
        return AttachRecord()
    finally:
        os.close(directory)


def write_record(container: Container, settings: Settings, record: AttachRecord) -> None:
    """Record this of a container, or remove what is recorded if it says nothing; records of ended containers go too.

    Raises OcigpuError OCIGPU-CTR-5 when it cannot be written.
    """
    directory = _open(settings, create=record != AttachRecord())
    if directory < 0:
        if record == AttachRecord():
            return
        raise OcigpuError("OCIGPU-CTR-5", f"record of container {container.name}: no directory that can be trusted")
    try:
        name = _name(container)
        if record == AttachRecord():
            _remove(directory, name)
        elif not write_cached(directory, name, json.dumps(record._asdict()).encode()):
            raise OcigpuError("OCIGPU-CTR-5", f"record of container {container.name}: it could not be written")
        _prune(directory)
    finally:
        os.close(directory)
    _remove_directory(settings)


def prune_records(settings: Settings) -> None:
    """Remove the records of containers that have ended."""
    directory = _open(settings, create=False)
    if directory >= 0:
        _prune(directory)
        os.close(directory)
        _remove_directory(settings)


def _name(container: Container) -> str:
    """Return the name of a container's file: its process by number and start, and as much of its id as fits."""
    return f"{container.pid}-{container.start_time}-{container.id[:200]}"


def _open(settings: Settings, create: bool) -> int:
    cache = open_cache(create, settings.simulation_root)
    if cache < 0:
        return -1
    try:
        if create:
            with suppress(FileExistsError):
                os.mkdir(DIRECTORY, 0o700, dir_fd=cache)
        fd = os.open(DIRECTORY, _FLAGS, dir_fd=cache)
    except OSError:
        return -1
    finally:
        os.close(cache)
    return fd


def _prune(directory: int) -> None:
    for name in os.listdir(directory):
        pid, _, rest = name.partition("-")
        start = rest.partition("-")[0]
        if not (pid.isdecimal() and start.isdecimal() and is_running(int(start), f"/proc/{pid}/stat")):
            _remove(directory, name)


def _remove(directory: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:  # another command was faster
        return


def _remove_directory(settings: Settings) -> None:
    """Remove the directory of the records if it is empty."""
    cache = open_cache(False, settings.simulation_root)
    if cache < 0:
        return
    try:
        os.rmdir(DIRECTORY, dir_fd=cache)
    except OSError:  # it is not empty, or gone
        return
    finally:
        os.close(cache)
