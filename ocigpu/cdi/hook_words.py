"""The words of a CDI hook: one or several sub-commands in one process, separated by the word ``+``.

    create-symlinks --link TARGET::PATH ... [--device-link TARGET::PATH ...]
    enable-cuda-compat [--host-driver-version=V] [--host-cuda-version=V] [--cuda-compat-container-root=D]
    update-ldcache --folder D ... [--ldconfig-path P]
    disable-device-node-modification [--driver-proc DIR] [--simulated]
    update-application-profile
    chmod --mode OCTAL --path P ...

Names and options are those of the vendor's ``nvidia-cdi-hook``, so that specifications written for it work;
``+``, ``--device-link``, ``--driver-proc`` and ``--simulated`` are ours.  Options take one dash or two, their value as
the next word or after ``=``.  The vendor's program splits values of ``--link``, ``--folder`` and ``--path`` at commas,
which breaks names with commas: here a value is split only if every piece is a complete value by itself.
"""

import os

from ocigpu.core.errors import CdiError, OcigpuError, quoted
from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

COMPAT_ROOT = "/usr/local/cuda/compat"
DRIVER_PROC = "/proc/driver/nvidia"
SEPARATOR = "+"

OPTIONS: dict[str, tuple[str, ...]] = {
    "create-symlinks": ("link", "device-link"),
    "enable-cuda-compat": ("host-driver-version", "host-cuda-version", "cuda-compat-container-root"),
    "update-ldcache": ("folder", "ldconfig-path"),
    "disable-device-node-modification": ("driver-proc", "simulated"),
    "update-application-profile": (),
    "chmod": ("mode", "path"),
}
"""Sub-commands and their options, in the order in which they run."""
HOOK_NAMES = tuple(OPTIONS)
IGNORED = ("debug", "d", "quiet")
"""Switches of the vendor's program that change what it says."""
SWITCHES = ("simulated",)
STATE_OPTION = "container-spec"
"""Accepted by every sub-command: a file with the container's state, "-" for standard input."""


class CreateSymlinks(NamedTuple):
    """Make links, pairs of (target, path); ``device_links`` only where the target is a device of the container."""

    links: tuple[tuple[str, str], ...] = ()
    device_links: tuple[tuple[str, str], ...] = ()


class EnableCudaCompat(NamedTuple):
    """Let the loader prefer the image's CUDA libraries in ``container_root`` if they suit the host's driver."""

    host_driver_version: str = ""
    host_cuda_version: str = ""
    container_root: str = COMPAT_ROOT


class UpdateLdCache(NamedTuple):
    """Let the container's loader find the libraries in ``folders``; ``ldconfig``: host path, "" for the usual one."""

    folders: tuple[str, ...] = ()
    ldconfig: str = ""


class DisableDeviceNodeModification(NamedTuple):
    """Give the container a /proc/driver/nvidia of its own, made from ``driver_proc`` of the host."""

    driver_proc: str = DRIVER_PROC
    simulated: bool = False


class UpdateApplicationProfile(NamedTuple):
    """Tell EGL which GPUs the container has."""


class Chmod(NamedTuple):
    """Set the permission bits of files and directories of the container."""

    mode: int = 0
    paths: tuple[str, ...] = ()


if TYPE_CHECKING:
    Command: TypeAlias = (
        CreateSymlinks
        | EnableCudaCompat
        | UpdateLdCache
        | DisableDeviceNodeModification
        | UpdateApplicationProfile
        | Chmod
    )


def link_target(target: str, path: str) -> str:
    """Return the path in the container that a link at ``path`` leads to by its text; its directory may be missing."""
    return os.path.normpath(os.path.join(os.path.dirname(path), target))


class HookCall(NamedTuple):
    """The work of a hook: ``commands`` in order; ``unknown``: names of unsupported sub-commands.

    ``state_file``: path of the container's state, "-" for standard input.
    """

    commands: "tuple[Command, ...]"
    unknown: tuple[str, ...] = ()
    state_file: str = "-"


def parse_hook(words: list[str]) -> HookCall:
    """Parse the words after the program's name (and after ocigpu-hook's own options).

    Raises OcigpuError OCIGPU-ARG-1, exit status 1 as the vendor's, for a bad option or value.  An unknown sub-command
    is not an error: specifications may be newer than the program.
    """
    left = list(reversed(words[1:] if words[:1] == ["hook"] else words))
    commands: "list[Command]" = []
    unknown: list[str] = []
    state_file = "-"
    while left:
        name = left.pop()
        if name.lstrip("-") in IGNORED and name.startswith("-"):
            continue
        if name in OPTIONS:
            values = _read_options(name, left)
            state_file = values[STATE_OPTION][-1] if values[STATE_OPTION] else state_file
            commands.append(_make_command(name, values))
        else:
            unknown.append(name)
            while left and left[-1] != SEPARATOR:
                left.pop()
        if left:
            left.pop()
            if not left:
                raise _bad(f"no sub-command after {quoted(SEPARATOR)}")
    return HookCall(tuple(commands), tuple(unknown), state_file)


def _bad(message: str) -> OcigpuError:
    return OcigpuError("OCIGPU-ARG-1", message, "")


def _read_options(name: str, left: list[str]) -> dict[str, list[str]]:
    """Take the options of a sub-command from the end of ``left``, the separator not; return their values."""
    values: dict[str, list[str]] = {option: [] for option in (*OPTIONS[name], STATE_OPTION)}
    while left and left[-1] != SEPARATOR:
        word = left.pop()
        option, equals, value = word.removeprefix("-").removeprefix("-").partition("=")
        if not word.startswith("-"):
            raise _bad(f"{name}: unexpected argument {quoted(word)}")
        if option in IGNORED:
            continue
        if option not in values:
            raise _bad(f"{name}: unknown option {quoted(word)}")
        if option in SWITCHES:
            value = value or "true"
        elif not equals:
            if not left:
                raise _bad(f"{name}: option {word} needs a value")
            value = left.pop()
        values[option].append(value)
    return values


def _make_command(name: str, values: dict[str, list[str]]) -> "Command":
    def last(option: str, default: str = "") -> str:
        return values[option][-1] if values[option] else default

    if name == "create-symlinks":
        return CreateSymlinks(_links(name, values["link"]), _links(name, values["device-link"]))
    if name == "enable-cuda-compat":
        root = _path(name, "cuda-compat-container-root", last("cuda-compat-container-root") or COMPAT_ROOT)
        return EnableCudaCompat(last("host-driver-version"), last("host-cuda-version"), root)
    if name == "update-ldcache":
        ldconfig = last("ldconfig-path").removeprefix("@")  # the vendor's mark for "a path of the host"
        folders = tuple(_path(name, "folder", item) for item in _split_paths(values["folder"]))
        return UpdateLdCache(folders, _path(name, "ldconfig-path", ldconfig) if ldconfig else "")
    if name == "disable-device-node-modification":
        proc = _path(name, "driver-proc", last("driver-proc", DRIVER_PROC))
        return DisableDeviceNodeModification(proc, last("simulated") == "true")
    if name == "chmod":
        paths = tuple(_inner_path(name, "path", item) for item in _split_paths(values["path"]))
        if paths and not last("mode"):
            raise _bad("chmod: option --mode is missing")
        return Chmod(_mode(last("mode", "0")), paths)
    return UpdateApplicationProfile()


def _split_paths(values: list[str]) -> "Iterable[str]":
    """Split values at commas where each piece is an absolute path."""
    for value in values:
        pieces = value.split(",")
        yield from pieces if all(piece.startswith("/") for piece in pieces) else (value,)


def _links(name: str, values: list[str]) -> tuple[tuple[str, str], ...]:
    """Return pairs of (target, path).

    A value with ``::`` once is one link, whatever commas its names have; one with more is the vendor's list.
    """
    links = []
    for value in values:
        for piece in [value] if value.count("::") == 1 else value.split(","):
            target, _, path = piece.partition("::")
            if piece.count("::") != 1 or not target:
                raise _bad(f"{name}: link {quoted(piece)} is not written TARGET::PATH")
            _check_text(name, "link", target)
            links.append((target, _inner_path(name, "link", path)))
    return tuple(links)


def _check_text(name: str, option: str, text: str) -> None:
    if not text.isprintable() and any(character < " " or character == "\x7f" for character in text):
        raise _bad(f"{name}: --{option} {quoted(text)} contains a control character")


def _path(name: str, option: str, path: str) -> str:
    _check_text(name, option, path)
    if not path.startswith("/"):
        raise _bad(f"{name}: --{option} {quoted(path)} is not an absolute path")
    return path


def _inner_path(name: str, option: str, path: str) -> str:
    """Check a path below the container's root: ``..`` would mean something else once a link precedes it."""
    parts = [part for part in _path(name, option, path).split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise _bad(f"{name}: --{option} {quoted(path)} is not the path of a file in the container")
    return path


def _mode(text: str) -> int:
    digits = text.removeprefix("0o")
    if not digits or len(digits) > 6 or digits.strip("01234567") or int(digits, 8) > 0o7777:
        raise _bad(f"chmod: --mode {quoted(text)} is not an octal mode")
    return int(digits, 8)


def render_hook(commands: "Iterable[Command]") -> list[str]:
    """Return the words that :func:`parse_hook` reads as these commands.

    Raises CdiError OCIGPU-CDI-7 for what cannot be written: a folder "/a,/b", a target with "::".
    """
    commands = tuple(commands)
    words: list[str] = []
    for command in commands:
        words += [SEPARATOR] if words else []
        words += _words(command)
    try:
        if _typed(parse_hook(words).commands) == _typed(commands):
            return words
        cause = "its names cannot be told apart"
    except OcigpuError as error:
        cause = error.message
    message = f"write hook {quoted(' '.join(words), 300)}: {cause}"
    raise CdiError("OCIGPU-CDI-7", message, "Rename the host's directory, or leave the hook out: --disable-hook NAME")


def _typed(commands: "tuple[Command, ...]") -> "list[tuple[type, Command]]":
    return [(type(command), command) for command in commands]  # records of different kinds may be equal as tuples


def _words(command: "Command") -> list[str]:
    if isinstance(command, CreateSymlinks):
        options = [("--link", *link) for link in command.links]
        options += [("--device-link", *link) for link in command.device_links]
        return ["create-symlinks", *(word for name, target, path in options for word in (name, f"{target}::{path}"))]
    if isinstance(command, EnableCudaCompat):
        values = (
            ("host-driver-version", command.host_driver_version, ""),
            ("host-cuda-version", command.host_cuda_version, ""),
            ("cuda-compat-container-root", command.container_root, COMPAT_ROOT),
        )
        return ["enable-cuda-compat", *(f"--{name}={value}" for name, value, default in values if value != default)]
    if isinstance(command, UpdateLdCache):
        folders = [word for folder in command.folders for word in ("--folder", folder)]
        return ["update-ldcache", *(["--ldconfig-path", command.ldconfig] if command.ldconfig else []), *folders]
    if isinstance(command, DisableDeviceNodeModification):
        proc = ["--driver-proc", command.driver_proc] if command.driver_proc != DRIVER_PROC else []
        return ["disable-device-node-modification", *proc, *(["--simulated"] if command.simulated else [])]
    if isinstance(command, Chmod):
        return ["chmod", "--mode", f"{command.mode:o}", *(word for path in command.paths for word in ("--path", path))]
    return ["update-application-profile"]
