"""Podman's own list of containers, read from its files: Podman, if asked, makes storage or converts its database."""

import json
import os
import sqlite3
from collections.abc import Iterator
from typing import Any, NamedTuple

from ocigpu.core.errors import OcigpuError
from ocigpu.engines.places import expand, open_below, parse_config, read_file
from ocigpu.system.files import read_bounded

STORAGE = ("/usr/share/containers/storage.conf", "/etc/containers/storage.conf")
GRAPH_ROOT = "/var/lib/containers/storage"
USER_STORAGE = (".config/containers/storage.conf",)
USER_GRAPH_ROOT = ".local/share/containers/storage"
"""Below a user's home (containers-storage.conf(5))."""
MAX_DATABASE = 64 << 20
"""Bytes of a database: one container's configuration is about 30 KiB."""


class PodmanContainer(NamedTuple):
    """A container that Podman has made: ``runtime`` is the name or path of its OCI runtime, ``devices`` CDI names."""

    identity: str
    name: str
    runtime: str
    devices: tuple[str, ...]


def read_containers(root: str, home: str = "") -> list[PodmanContainer]:
    """Return root's containers, or those of the user with this home; storage that cannot be read has none.

    Podman keeps each container's configuration as JSON, in db.sql (SQLite, Podman 4.8 and later) or in bolt_state.db
    (libpod/sqlite_state.go, boltdb_state.go), below the graph root unless static_dir says another place.
    """
    files = [os.path.join(home, file) for file in USER_STORAGE] if home else STORAGE
    place = os.path.join(home, USER_GRAPH_ROOT) if home else GRAPH_ROOT
    for file in files:
        try:
            storage = parse_config(file, read_file(root, file) or "").get("storage")
        except OcigpuError:
            continue
        named = storage.get("graphroot") if isinstance(storage, dict) else ""
        place = named if isinstance(named, str) and named else place
    texts = (*_sqlite(_content(root, f"{place}/db.sql")), *_bolt(root, place))
    return [one for data in texts if (one := _container(data))]


def _content(root: str, path: str) -> bytes:
    try:
        with open(open_below(root, path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return read_bounded(file, MAX_DATABASE)
    except OSError:
        return b""


def _sqlite(content: bytes) -> Iterator[Any]:
    if not content:
        return
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(content)
        for (text,) in connection.execute("SELECT JSON FROM ContainerConfig"):
            yield json.loads(text)
    except (sqlite3.Error, ValueError, TypeError, RecursionError):  # of another schema, or being written
        return
    finally:
        connection.close()


def _bolt(root: str, place: str) -> Iterator[Any]:
    """Yield the configurations in bolt_state.db of containers that still exist.

    Values are contiguous there, so the text is searched; free pages contain those of former containers.
    """
    text = _content(root, f"{place}/libpod/bolt_state.db").decode("latin-1")
    left = set(_identities(root, place)) if text else set()
    decoder, start = json.JSONDecoder(), 0
    while left and (start := text.find('{"spec":{', start)) >= 0:
        try:
            data, start = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):  # a part of a value, on a free page
            start += 1
            continue
        if data.get("id") in left:
            left.discard(data["id"])
            yield data


def _identities(root: str, place: str) -> Iterator[str]:
    """Yield the ids of the containers that exist, from the list of the storage's driver."""
    for path in expand(root, f"{place}/*-containers/containers.json"):
        try:
            listed = json.loads(read_file(root, path) or "")
        except (OcigpuError, ValueError, RecursionError):
            continue
        for one in listed if isinstance(listed, list) else ():
            if isinstance(one, dict) and isinstance(one.get("id"), str):
                yield one["id"]


def _container(data: Any) -> PodmanContainer | None:
    if not isinstance(data, dict) or not all(isinstance(data.get(key), str) for key in ("id", "name")):
        return None
    devices = data.get("cdiDevices")
    names = tuple(one for one in devices if isinstance(one, str)) if isinstance(devices, list) else ()
    return PodmanContainer(data["id"], data["name"], str(data.get("runtime") or ""), names)
