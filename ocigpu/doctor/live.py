"""Queries the running dockerd by plain HTTP over its socket, with a deadline; and identifies it.

The Engine API (docs.docker.com/reference/api/engine): /info lists runtimes, cgroup driver, version and, from 25 on, the
directories of CDI specifications.  Only GET is sent.
"""

import json
import os
import select
import shutil
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError
from ocigpu.engines.places import Daemon, path_variable
from ocigpu.engines.status import HOOK
from ocigpu.system.proc import read_stat

SECONDS = 3.0
MAX_ANSWER = 4 << 20
SOCKET = "/run/docker.sock"


class DockerAnswer(NamedTuple):
    """The facts about the dockerd behind a socket.

    ``problem``: "" or why there is no answer.  ``info``: of /info.  ``pid``: of the daemon, 0 if unknown: systemd may
    hold the socket.  ``config``: the file that its command line names.  ``path``: its PATH, None when that is not
    readable.  ``hook``: the hook of --gpus on that path, ``hook_is_new``: it, and every other hook
    on that path, was made after the daemon was started.
    ``is_shut``: a daemon may exist, but this user may not query it, or it does not answer in time.
    """

    socket: str
    problem: str = ""
    info: dict[str, Any] = {}
    pid: int = 0
    config: str = ""
    path: str | None = None
    hook: str = ""
    hook_is_new: bool = False
    is_shut: bool = False

    @property
    def release(self) -> str:
        return str(self.info.get("ServerVersion", "")).partition("+")[0]


def ask_docker(daemons: Sequence[Daemon]) -> DockerAnswer | None:
    """Return the answer of this machine's dockerd, one of the running ``daemons``; None without a socket.

    The socket is that of DOCKER_HOST when it names one, else this user's (rootless), else the system's.
    """
    path = _find_socket()
    if not path:
        return None
    pid, problem, info, is_shut = 0, "", {}, False
    try:
        pid, body = _get(path, "/info", SECONDS)
        info = json.loads(body)
        if not isinstance(info, dict):
            raise ValueError("not an object")
    except TimeoutError:
        problem, is_shut = f"dockerd did not answer within {SECONDS:g} s", True
    except OSError as error:
        is_shut = isinstance(error, PermissionError)
        problem = f"connect {path}: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        problem = f"{path}: no usable answer: {error}"
    configs = {daemon.pid: daemon.config for daemon in daemons if daemon.engine == "docker"}
    if pid not in configs or problem:
        pid = next((pid for pid, config in configs.items() if not config), 0)
    variable = path_variable(pid)
    hook = shutil.which(HOOK, path=variable or "") or ""
    hooks = [found for one in (variable or "").split(":") if (found := shutil.which(HOOK, path=one))] if hook else []
    is_new = bool(hooks) and min(os.lstat(one).st_ctime for one in hooks) > start_time(pid) + 1
    config = configs.get(pid, "")
    return DockerAnswer(path, problem, {} if problem else info, pid, config, variable, hook, is_new, is_shut)


def read_context() -> tuple[str, str, bool]:
    """Return what this user's docker command goes by, the context or host in use, and whether that is elsewhere.

    Raises OSError, HostError.
    """
    if host := os.environ.get("DOCKER_HOST", ""):  # it goes before all contexts
        return "DOCKER_HOST", host, not host.startswith("unix://")
    path = os.path.join(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"), "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            context = str(json.load(file).get("currentContext", ""))
    except FileNotFoundError:
        context = ""
    except (ValueError, AttributeError):
        raise HostError("OCIGPU-HOST-3", f"{path} is not JSON") from None
    context = os.environ.get("DOCKER_CONTEXT") or context
    return path, context, context not in ("", "default")


def start_time(pid: int) -> float:
    """Return when a process was started, seconds since 1970: field 22 of proc_pid_stat(5), btime of proc_stat(5)."""
    with open("/proc/stat", encoding="ascii") as file:
        boot = next(int(line.split()[1]) for line in file if line.startswith("btime"))
    return boot + read_stat(f"/proc/{pid}/stat").start / os.sysconf("SC_CLK_TCK")


def _find_socket() -> str:
    named = os.environ.get("DOCKER_HOST", "")
    if named:
        return named.removeprefix("unix://") if named.startswith("unix:///") else ""
    own = f"{os.environ.get('XDG_RUNTIME_DIR') or f'/run/user/{os.geteuid()}'}/docker.sock"
    return next((path for path in ((own,) if os.geteuid() else ()) + (SOCKET,) if os.path.exists(path)), "")


def _get(path: str, what: str, seconds: float) -> tuple[int, bytes]:
    """Return the process id of the listener and the body of the answer to a GET.

    Raises TimeoutError after ``seconds`` in all, OSError, and ValueError for another status than 200.
    """
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(seconds)
        client.connect(path)
        # SO_PEERCRED of unix(7): the credentials of the process when it called listen(2)
        pid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        client.sendall(f"GET {what} HTTP/1.0\r\nHost: docker\r\nConnection: close\r\n\r\n".encode())
        client.setblocking(False)
        answer = b""
        while len(answer) <= MAX_ANSWER:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([client], [], [], left)[0]:
                raise TimeoutError
            part = client.recv(1 << 16)
            if not part:
                break
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"] or len(answer) > MAX_ANSWER:
        raise ValueError("status is not 200" if len(answer) <= MAX_ANSWER else "too long")
    return int(pid), body
