"""What runs on this machine and may have lost its GPUs: asked by a child with a deadline, a container may be stuck."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ocigpu.bundle.edit import has_gpu_hook
from ocigpu.containers.asked import describe_users, find_users
from ocigpu.containers.believed import Container, read_config_of
from ocigpu.containers.child import ask_child
from ocigpu.containers.find import open_root
from ocigpu.containers.live import may_have_devices, open_live
from ocigpu.containers.repair import Repaired, repair
from ocigpu.containers.report import read_mode, read_unanswered
from ocigpu.core.config_json import get_list, get_object
from ocigpu.core.errors import OcigpuError, printable
from ocigpu.core.settings import Settings
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import parse_request, read_host_facts
from ocigpu.system.paths import open_in_root

SECONDS = 15.0
MAX_PROCESSES = 20_000
MAX_MAPS = 4 << 20
_DELETED = re.compile(r"\S*(libcuda|libnvidia|libnvcuvid|nvidia-smi)\S*")


class Lack(NamedTuple):
    """What a container has ``lost``, the named devices that it ``asked`` for in vain, or why it is unknown.

    ``wish``: what its image could want of the driver that it was not given.
    """

    name: str
    lost: list[str] = []
    asked: str = ""
    problem: str = ""
    wish: str = ""


def ask_for_lacks(containers: Sequence[Container], settings: Settings) -> list[Lack]:
    """Return what each container lacks; nothing is changed.  Raises OSError, OcigpuError."""
    lacks = [Lack(*answer) for answer in ask_child(lambda: _ask(containers, settings), SECONDS)]
    try:  # afterwards and by another child: the files of an image may take all the time there is
        wishes = ask_child(lambda: [_wish(container, settings) for container in containers], SECONDS)
    except OSError:
        return lacks
    return [lack._replace(wish=wish) for lack, wish in zip(lacks, wishes, strict=True)]


def _ask(containers: Sequence[Container], settings: Settings) -> list[Lack]:
    """A request for all GPUs is every CUDA image's and says nothing."""
    facts = read_host_facts(settings)
    rows = []
    for container in containers:
        name = printable(container.name, 200)
        try:
            config = read_config_of(container).config
            repaired, request = Repaired(), Request()
            if may_have_devices(container, config, settings, facts):
                with open_live(container, settings, facts) as live:
                    repaired = repair(live, dry_run=True)
            if not repaired.devices and not repaired.lost and not has_gpu_hook(config):
                request = read_unanswered(config, container.bundle, settings, [])
            asked = "" if request.selection == "all" else printable(request.source, 300)
            rows.append(Lack(name, [printable(text, 300) for text in repaired.lost], asked))
        except (OcigpuError, OSError) as failure:
            rows.append(Lack(name, problem=printable(str(failure), 300)))
    return rows


def _wish(container: Container, settings: Settings) -> str:
    try:
        config = read_config_of(container).config
        if read_mode(config) not in ("hook", "spec"):
            return ""
        request = parse_request(config, settings, container.bundle)
        if request.selection in ("nothing", "cdi"):
            return ""
        with open_root(container) as root:
            users = find_users(root, request.capabilities) if root else {}
    except (OcigpuError, OSError):
        return ""
    return describe_users(users, get_list(get_object(config, "process"), "env"))


def ask_for_libcuda(containers: Sequence[Container], version: str) -> list[tuple[str, str]]:
    """Return names of containers, and the libcuda of another, older version that their LD_LIBRARY_PATH leads to first.

    A newer one is the image's compatibility library.  Raises OSError, OcigpuError.
    """

    def look() -> list[tuple[str, str]]:
        found = []
        for item in containers:
            with suppress(OSError):  # one that has ended or whose root is stuck hides no other
                found.append((item.name, _older_libcuda(item, version)))
        return [(name, path) for name, path in found if path]

    return [(name, path) for name, path in ask_child(look, SECONDS)]


def _older_libcuda(container: Container, version: str) -> str:
    try:
        env = get_list(get_object(read_config_of(container).config, "process"), "env")
    except OcigpuError:
        return ""
    prefix = "LD_LIBRARY_PATH="
    value = next((item[len(prefix) :] for item in reversed(env) if str(item).startswith(prefix)), "")
    with open_root(container) as root:
        if not root:
            return ""
        root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for directory in filter(os.path.isabs, value.split(":")):
                try:
                    fd = open_in_root(root_fd, f"{directory}/libcuda.so.1", os.O_PATH)
                except OSError:
                    continue
                name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
                os.close(fd)
                numbers = name.removeprefix("libcuda.so.").split(".")
                is_older = all(map(str.isdecimal, numbers)) and [*map(int, numbers)] < [*map(int, version.split("."))]
                return f"{directory}/{name}" if is_older and len(numbers) > 1 else ""
        finally:
            os.close(root_fd)
    return ""


def find_replaced(proc: str, processes: Mapping[int, str]) -> tuple[dict[int, tuple[str, str]], int]:
    """Return name and file of each process that holds deleted files of the driver, and how many could not be read."""
    held: dict[int, tuple[str, str]] = {}
    unread = 0
    for pid, name in list(processes.items())[:MAX_PROCESSES]:
        try:
            path = _deleted_file(f"{proc}/{pid}")
        except PermissionError:
            unread += 1
            continue
        except OSError:  # it has ended since
            continue
        if path:
            held[pid] = (name, path)
    return held, unread


def _deleted_file(directory: str) -> str:
    """Return a file of the driver that is deleted and that a process has mapped or mounted, "" for none.

    proc_pid_maps(5) ends such a line with " (deleted)", proc_pid_mountinfo(5) such a root with "//deleted".
    """
    for name, mark in (("maps", b" (deleted)"), ("mountinfo", b"//deleted ")):
        with open(f"{directory}/{name}", "rb") as file:
            text = file.read(MAX_MAPS)
        for line in text.split(b"\n") if mark in text else ():
            match = _DELETED.search(line.decode("utf-8", "replace")) if mark in line + b" " else None
            if match:
                return printable(match[0].removesuffix("//deleted"), 300)
    return ""
