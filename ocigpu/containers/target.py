"""What a command line means: a container by id or name, or the directory of a bundle.

Names of pods' containers have slashes (NAMESPACE/POD/CONTAINER), as paths have.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ocigpu.bundle.document import read_config
from ocigpu.containers.find import Container, Places, find_container, find_containers, open_process, read_config_of
from ocigpu.core.config_json import Document
from ocigpu.core.errors import OcigpuError


class Target(NamedTuple):
    """A bundle's directory, its config.json, and the container that was made of it, if there is one."""

    bundle: str
    document: Document
    container: Container | None


def find_target(text: str, places: Places) -> Target:
    """Return what ``text`` names: a directory with a config.json is a bundle, else the container of this name or id,
    else a path is a bundle.

    Raises OcigpuError OCIGPU-CTR-1 or -2, SpecError for a configuration that cannot be read, or for a container's that
    is not believed.
    """
    is_file = os.path.isfile(os.path.join(text, "config.json"))
    containers = find_containers(places)[0]
    named = not is_file and not text.startswith(("/", "./", "../")) and any(one.name == text for one in containers)
    if is_file or (not named and ("/" in text or text in (".", ".."))):
        bundle = os.path.abspath(text)
        document = read_config(bundle)
        made = [one for one in containers if os.path.realpath(one.bundle) == os.path.realpath(bundle)]
        return Target(bundle, document, made[0] if len(made) == 1 else None)
    container = find_container(places, text)
    return Target(container.bundle, read_config_of(container), container)


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
