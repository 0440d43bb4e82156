"""What a command line means: a container by id or name, or the directory of a bundle."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ocigpu.containers.find import Container, Places, find_container, find_containers, open_process
from ocigpu.errors import OcigpuError


class Target(NamedTuple):
    """A bundle's directory, and the container that was made of it, if there is one."""

    bundle: str
    container: Container | None


def find_target(text: str, places: Places) -> Target:
    """Return what ``text`` names: a directory with a config.json, or a path, is a bundle; else a container.

    Raises OcigpuError OCIGPU-CTR-1 or -2.
    """
    if "/" in text or text in (".", "..") or os.path.isfile(os.path.join(text, "config.json")):
        bundle = os.path.abspath(text)
        made = [one for one in find_containers(places)[0] if os.path.realpath(one.bundle) == os.path.realpath(bundle)]
        return Target(bundle, made[0] if len(made) == 1 else None)
    container = find_container(places, text)
    return Target(container.bundle, container)


@contextmanager
def open_root(container: Container | None) -> Iterator[str]:
    """Give a path of the root directory as the container's first process sees it, "" when there is no such process.

    Engines mount a root directory where nobody else sees it.  The path never means another process's.
    """
    try:
        proc_fd = open_process(container) if container is not None and container.pid else -1
    except OcigpuError:  # it has just ended
        proc_fd = -1
    if proc_fd < 0:
        yield ""
        return
    try:
        yield f"/proc/self/fd/{proc_fd}/root"
    finally:
        os.close(proc_fd)
