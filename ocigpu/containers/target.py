"""What a command line means: a container by id or name, or the directory of a bundle."""

import os
from typing import NamedTuple

from ocigpu.containers.find import Container, Places, find_container, find_containers


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
