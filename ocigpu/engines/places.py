"""Where engines have their programs and configuration files, below any root directory.

``ocigpu cdi generate`` loads it for a list of directories: what few callers need of the standard library comes late.
"""

import errno
import os
import stat

from ocigpu.core.config_json import SEARCH_PATH
from ocigpu.core.errors import OcigpuError
from ocigpu.core.rawjson import parse
from ocigpu.core.record import NamedTuple
from ocigpu.system.files import read_bounded
from ocigpu.system.paths import open_in_root, opened
from ocigpu.system.proc import parse_status

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Any

ENGINES = ("docker", "containerd", "crio", "podman")
BOOTED = "/run/systemd/system"
"""It is there when the machine was booted with systemd (sd_booted(3))."""
DAEMON_PATH = tuple(SEARCH_PATH.split(":"))
"""Where a service without a PATH of its own finds programs (systemd.exec(5)), the hook of Docker's --gpus too."""
PROGRAMS = {"docker": "dockerd", "containerd": "containerd", "crio": "crio", "podman": "podman"}
MAX_CONFIG = 4 << 20

DOCKER = "/etc/docker/daemon.json"
DOCKER_OPTIONS = ("default-runtime",)
"""Options of dockerd that exclude the key of that name in its file, of those keys that we write."""
DOCKER_SNAP = "/var/snap/docker/current/config/daemon.json"
CONTAINERD = "/etc/containerd/config.toml"
KUBERNETES = {name: f"/var/lib/rancher/{name}/agent/etc/containerd/config.toml" for name in ("k3s", "rke2")}
NAMES = (*ENGINES, *KUBERNETES)
"""What people call engines: k3s and RKE2 bring a containerd of their own."""
CRIO, CRIO_DIRECTORY = "/etc/crio/crio.conf", "/etc/crio/crio.conf.d"
PODMAN = ("/usr/share/containers/containers.conf", "/etc/containers/containers.conf")
PODMAN_DIRECTORY = "/etc/containers/containers.conf.d"

NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_WILDCARDS = frozenset("*?[")
_FIRST_WORD = 4096
"""Bytes of a command line that are read to learn which program it is of: the longest path (limits.h, PATH_MAX)."""


class Daemon(NamedTuple):
    """A running daemon of an engine, and the configuration file that its command line names ("" for its default).

    ``options``: names of the options of its command line, without dashes.
    """

    engine: str
    pid: int
    config: str
    options: tuple[str, ...] = ()


def home_config(root: str, name: str) -> str:
    """Return the path of a file in this user's configuration directory, without links; "" under another root."""
    if root != "/":
        return ""
    directory = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(directory):
        import pwd

        directory = os.path.join(os.environ.get("HOME") or pwd.getpwuid(os.geteuid()).pw_dir, ".config")
    return os.path.join(directory, name)


def open_below(root: str, path: str, flags: int) -> int:
    """Return a descriptor of a path below ``root``, links followed inside it; raises OSError."""
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_in_root(root_fd, path, flags)
    finally:
        os.close(root_fd)


def read_link(root: str, path: str) -> str:
    """Return the target of a link below the root, "" for another file or a missing one."""
    try:
        return os.readlink(os.path.join(root, path.lstrip("/")))
    except OSError:
        return ""


def read_file(root: str, path: str) -> str | None:
    """Return the text of a file below ``root``, links followed inside it; None if it is missing.

    Raises OcigpuError OCIGPU-ENG-1 for one that cannot be read, is too large or not UTF-8.
    """
    try:
        with open(open_below(root, path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return decode(path, read_bounded(file, MAX_CONFIG))
    except OSError as error:
        if error.errno in NOT_THERE and os.path.isdir(root):
            return None
        raise OcigpuError("OCIGPU-ENG-1", f"read {path}: {error.strerror}") from error


def decode(path: str, content: bytes) -> str:
    """Return the text of a configuration file; raises OcigpuError OCIGPU-ENG-1 when it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise OcigpuError("OCIGPU-ENG-1", f"read {path}: line {line}: not UTF-8") from error


def parse_config(path: str, text: str) -> "dict[str, Any]":
    """Return the data of a configuration file, JSON or TOML; an empty file has none.

    Raises OcigpuError OCIGPU-ENG-1 with the line and column of what cannot be understood.
    """
    if not is_json(path, text):
        import tomllib

        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise OcigpuError("OCIGPU-ENG-1", f"{path}: not TOML: {error}") from error
    text = text.removeprefix("\ufeff")  # dockerd takes one
    if not text.strip():
        return {}
    try:
        data = parse(text)
    except (ValueError, RecursionError) as error:
        raise OcigpuError("OCIGPU-ENG-1", f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise OcigpuError("OCIGPU-ENG-1", f"{path}: line 1 column 1: not a JSON object")
    return data


def is_json(path: str, text: str) -> bool:
    """Whether a configuration file is JSON: by its name, else by its text, as no TOML begins with a brace."""
    return path.endswith(".json") or text.lstrip("\ufeff \t\r\n").startswith("{")


def expand(root: str, pattern: str) -> list[str]:
    """Return the paths below ``root`` that match a pattern, sorted; a path without wildcards stands for itself."""
    if not _WILDCARDS.intersection(pattern):
        return [pattern]
    prefix = "" if root == "/" else root.rstrip("/")
    directory, _, last = pattern.rpartition("/")
    if directory and last[0:1] == "*" and not _WILDCARDS.intersection(directory + last[1:]):  # without glob, and its re
        try:
            names = os.listdir(prefix + directory)
        except OSError:
            return []
        return sorted(f"{directory}/{name}" for name in names if name[0] != "." and name.endswith(last[1:]))
    import glob

    return sorted(path[len(prefix) :] for path in glob.glob(glob.escape(prefix) + pattern))


def find_program(root: str, name: str) -> str:
    """Return the path below ``root`` of a program that a service would find, "" for none."""
    for directory in (*DAEMON_PATH, "/snap/bin"):
        path = f"{directory}/{name}"
        if is_program(root, path):
            return path
    return ""


def parse_release(text: str) -> str:
    """Return the release in an engine program's output of --version, "1.6.20", "" for none.

    It follows the name of the package or of the source: "containerd containerd.io 1.7.27", "... v2.0.0".
    """
    import re

    match = re.search(r"(?<![\w.])v?(\d+(?:\.\d+){1,2})", text)
    return match[1] if match else ""


def is_program(root: str, path: str) -> bool:
    """Whether a path below ``root`` is an executable regular file."""
    mode = file_mode(root, path)
    return mode is not None and stat.S_ISREG(mode) and bool(mode & 0o111)


def why_no_program(root: str, path: str) -> str:
    """Return what keeps a path below ``root``, or a name on the PATH of services, from being a program; "" if it is."""
    if "/" not in path:
        return "" if path and find_program(root, path) else "does not exist"
    if is_program(root, path):
        return "is on a file system mounted with noexec" if root == "/" and _is_noexec(path) else ""
    mode = file_mode(root, path)
    return "does not exist" if mode is None else "is not executable" if stat.S_ISREG(mode) else "is not a file"


def _is_noexec(path: str) -> bool:
    """Whether nothing may be executed where a file of this machine is."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except OSError:  # gone by now
        return False


def file_mode(root: str, path: str) -> int | None:
    """Return the type and mode of a file below ``root``, links followed inside it; None when it does not exist."""
    try:
        fd = open_below(root, path, os.O_PATH)
    except OSError:
        return None
    try:
        return os.fstat(fd).st_mode
    finally:
        os.close(fd)


def running_daemons(root: str) -> list[Daemon]:
    """Return the daemons of engines that run, from the process table below ``root``.

    The containerd that dockerd starts for itself is excluded: dockerd rewrites its file at each start.  A daemon in a
    container is excluded, too.  It has a second process id there (proc(5), NSpid), or another root directory, so its
    files are not those of this root.  Processes of users other than root and ours are also excluded: any process can
    have such a name, and name any file.
    """
    names = {program: engine for engine, program in PROGRAMS.items() if engine != "podman"}
    found = []
    for pid in _find_processes(root, names):
        try:
            words = (read_file(root, f"/proc/{pid}/cmdline") or "").split("\0")
        except OcigpuError:  # ended meanwhile
            continue
        engine = names.get(os.path.basename(words[0]))
        if engine and not is_foreign(root, f"/proc/{pid}"):
            config = _config_of(words)
            if engine == "docker" and not config and "0" not in _status(root, f"/proc/{pid}").get("Uid:", ["0"]):
                config = home_config(root, "docker/daemon.json")  # rootless: it does not read /etc (docs.docker.com)
            if not config.endswith("/containerd/containerd.toml"):
                options = tuple(word[2:].partition("=")[0] for word in words if word.startswith("--"))
                found.append(Daemon(engine, int(pid), config, options))
    return found


def _find_processes(root: str, programs: "Container[str]") -> list[str]:
    """Return the ids of the processes below ``root`` whose first word is the path of one of these programs, sorted."""
    try:
        directory = open_below(root, "/proc", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return []
    found = []
    with opened(directory):
        for pid in filter(str.isdigit, os.listdir(directory)):
            try:
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
                with opened(os.open(f"{pid}/cmdline", flags, dir_fd=directory)) as file:
                    first = os.read(file, _FIRST_WORD).partition(b"\0")[0]
            except OSError:  # ended meanwhile, or another user's behind hidepid
                continue
            if os.fsdecode(os.path.basename(first)) in programs:
                found.append(pid)
    return sorted(found)


def path_variable(pid: int) -> str | None:
    """Return the PATH of a running process of this machine, None when it cannot be seen."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read(1 << 20).split(b"\0")
    except OSError:  # it is missing, has ended, or belongs to another user
        return None
    return next((os.fsdecode(item[5:]) for item in variables if item.startswith(b"PATH=")), None)


def is_foreign(root: str, process: str) -> bool:
    """Whether a process (its directory below the root) is in a container, or another user's than root's and ours."""
    users = (str(os.geteuid()), "0")
    return is_contained(root, process) or any(uid not in users for uid in _status(root, process).get("Uid:", ()))


def is_contained(root: str, process: str) -> bool:
    """Whether a process (its directory below the root) is in a container.

    A container may have the host's process ids, but has a root directory of its own; so has a daemon of a snap, which
    its control group tells.
    """
    if len(_status(root, process).get("NSpid:", ())) > 1:
        return True
    try:
        groups = read_file(root, f"{process}/cgroup") or ""
        own = os.path.samefile(f"{root.rstrip('/')}{process}/root", root)
    except (OcigpuError, OSError):  # not ours to look at, or it has ended
        return False
    return not own and "/snap." not in groups


def _status(root: str, process: str) -> dict[str, list[str]]:
    try:
        return parse_status(read_file(root, f"{process}/status") or "")
    except OcigpuError:
        return {}


def _config_of(words: list[str]) -> str:
    for word, following in zip(words[1:], [*words[2:], ""], strict=True):
        if word in ("--config-file", "--config", "-c"):
            return following
        for option in ("--config-file=", "--config="):
            if word.startswith(option):
                return word[len(option) :]
    return ""
