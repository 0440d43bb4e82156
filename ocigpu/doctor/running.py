"""What runs on this machine and may have lost its GPUs: asked by a child with a deadline, a container may be stuck."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

from ocigpu.bundle.edit import has_gpu_hook
from ocigpu.containers.asked import describe_users, look_for_users
from ocigpu.containers.believed import Container, read_config_of
from ocigpu.containers.child import answer_of, ask_each, begin_child
from ocigpu.containers.find import open_root
from ocigpu.containers.live import may_have_devices, open_live
from ocigpu.containers.repair import Repaired, repair
from ocigpu.containers.report import read_mode, read_unanswered
from ocigpu.core.config_json import read_env
from ocigpu.core.errors import OcigpuError, printable
from ocigpu.core.settings import Settings
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import parse_request, read_host_facts
from ocigpu.system.child import Child
from ocigpu.system.files import read_part
from ocigpu.system.paths import open_in_root

SECONDS = 15.0
SHARE = 100
"""Containers for which one more processor is worth a child."""
MAX_PROCESSES = 20_000
MAX_MAPS = 4 << 20
_DELETED = re.compile(r"\S*(libcuda|libnvidia|libnvcuvid|nvidia-smi)\S*")


class Lack(NamedTuple):
    """What a container has ``lost``, the named devices that it ``asked`` for in vain, or why it is unknown.

    ``wish``: what its image could want of the driver that it was not given.  ``libcuda``: one of another, older version
    that its LD_LIBRARY_PATH leads to first; a newer one is the image's compatibility library.  ``unseen``: why its
    image was not looked at.
    """

    name: str
    lost: list[str] = []
    asked: str = ""
    problem: str = ""
    wish: str = ""
    libcuda: str = ""
    unseen: str = ""


class _Image(NamedTuple):
    """The search in an image: libcuda in ``directories``, and users of driver files.

    ``capabilities``: those of the container, None without a search for users; ``env``: its variables.
    """

    directories: list[str] = []
    capabilities: list[str] | None = None
    env: list[str] = []


def begin_lacks(containers: Sequence[Container], settings: Settings, closing: ExitStack) -> list[Child]:
    """Begin what :func:`ask_for_lacks` asks; ``closing`` ends the children in any case.  Raises OSError."""
    shares = min(len(os.sched_getaffinity(0)), -(-len(containers) // SHARE))
    children = []
    for share in range(shares):
        children.append(begin_child(partial(find_lacks, containers[share::shares], settings), SECONDS))
        closing.callback(children[-1].close)
    return children


def ask_for_lacks(
    containers: Sequence[Container], settings: Settings, version: str, begun: Sequence[Child] = ()
) -> list[Lack]:
    """Return the files of driver ``version`` that each container lacks; changes nothing.  Raises OSError, OcigpuError.

    ``begun``: children of :func:`begin_lacks` that already examine these containers.
    """
    answers: list[Any] = [None] * len(containers)
    with ExitStack() as closing:
        children = begun or begin_lacks(containers, settings, closing)
        for share, child in enumerate(children):
            child.renew()
            answers[share :: len(children)] = answer_of(child)
    lacks = [Lack(*lack) for lack, _ in answers]
    images = {place: _Image(*image) for place, (_, image) in enumerate(answers) if image}
    # afterwards and by another child: the files of an image may take all the time there is
    looks = ask_each((partial(_look_into, containers[at], image, version) for at, image in images.items()), SECONDS)
    for place, look in zip(images, looks, strict=True):
        try:
            wish, libcuda = look()
            lacks[place] = lacks[place]._replace(wish=wish, libcuda=libcuda)
        except (OcigpuError, OSError) as failure:
            lacks[place] = lacks[place]._replace(unseen=printable(str(failure), 300))
    return lacks


def find_lacks(containers: Sequence[Container], settings: Settings) -> list[tuple[Lack, _Image | None]]:
    """A request for all GPUs is every CUDA image's and says nothing."""
    facts = read_host_facts(settings)
    rows: list[tuple[Lack, _Image | None]] = []
    for container in containers:
        name, image = printable(container.name, 200), None
        try:
            config = read_config_of(container).config
            image = _read_image(config, container, settings)
            repaired, request = Repaired(), Request()
            if may_have_devices(container, config, settings, facts):
                with open_live(container, settings, facts) as live:
                    repaired = repair(live, dry_run=True)
            if not repaired.devices and not repaired.lost and not has_gpu_hook(config):
                request = read_unanswered(config, container.bundle, settings, [])
            asked = "" if request.selection == "all" else printable(request.source, 300)
            rows.append((Lack(name, [printable(text, 300) for text in repaired.lost], asked), image))
        except (OcigpuError, OSError) as failure:
            rows.append((Lack(name, problem=printable(str(failure), 300)), image))
    return rows


def _read_image(config: dict[str, Any], container: Container, settings: Settings) -> _Image | None:
    """Return what a configuration gives reason to look for in its image, None for nothing."""
    env = read_env(config)
    paths = [text.partition("=")[2] for text in env if text.startswith("LD_LIBRARY_PATH=")]
    directories = [path for path in (paths or [""])[-1].split(":") if os.path.isabs(path)]
    capabilities = None
    if read_mode(config) in ("hook", "spec"):
        with suppress(OcigpuError):
            request = parse_request(config, settings, container.bundle)
            capabilities = None if request.selection in ("nothing", "cdi") else sorted(request.capabilities)
    return _Image(directories, capabilities, env) if directories or capabilities is not None else None


def _look_into(container: Container, image: _Image, version: str) -> tuple[str, str]:
    with open_root(container) as root:
        if not root:
            return "", ""
        root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            users = {} if image.capabilities is None else look_for_users(root_fd, image.capabilities)
            return describe_users(users, image.env), _older_libcuda(root_fd, image.directories, version)
        finally:
            os.close(root_fd)


def _older_libcuda(root_fd: int, directories: Sequence[str], version: str) -> str:
    for directory in directories:
        try:
            fd = open_in_root(root_fd, f"{directory}/libcuda.so.1", os.O_PATH)
        except OSError:
            continue
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        os.close(fd)
        numbers = name.removeprefix("libcuda.so.").split(".")
        is_older = all(map(str.isdecimal, numbers)) and [*map(int, numbers)] < [*map(int, version.split("."))]
        return f"{directory}/{name}" if is_older and len(numbers) > 1 else ""
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
            text = read_part(file, MAX_MAPS)
        for line in text.split(b"\n") if mark in text else ():
            match = _DELETED.search(line.decode("utf-8", "replace")) if mark in line + b" " else None
            if match:
                return printable(match[0].removesuffix("//deleted"), 300)
    return ""
