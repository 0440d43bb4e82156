"""What the running dockerd says of itself, asked by plain HTTP over its socket, with a deadline.

The Engine API (docs.docker.com/reference/api/engine): /info tells runtimes, cgroup driver, version and, from 25 on, the
directories of CDI specifications.  Only GET is sent.
"""

import json
import os
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ocigpu.doctor.host import Host

SECONDS = 3.0
MAX_ANSWER = 4 << 20
SOCKET = "/run/docker.sock"


class DockerAnswer(NamedTuple):
    """``problem``: "" or why there is no answer; ``pid``: of the daemon, 0 if unknown; ``info``: of /info."""

    socket: str
    problem: str = ""
    pid: int = 0
    info: dict[str, Any] = {}

    @property
    def release(self) -> str:
        return str(self.info.get("ServerVersion", "")).partition("+")[0]


def ask_docker(host: "Host") -> DockerAnswer | None:
    """Return what dockerd says, None where there is no socket or another machine is examined.

    The socket is that of DOCKER_HOST when it names one, else this user's (rootless), else the system's.
    """
    path = _find_socket() if host.live else ""
    if not path:
        return None
    try:
        pid, body = _get(path, "/info", SECONDS)
        info = json.loads(body)
        if not isinstance(info, dict):
            raise ValueError("not an object")
    except TimeoutError:
        return DockerAnswer(path, f"dockerd did not answer within {SECONDS:g} s")
    except OSError as error:
        return DockerAnswer(path, f"connect {path}: {error.strerror or error}")
    except (ValueError, RecursionError) as error:
        return DockerAnswer(path, f"{path}: no usable answer: {error}")
    return DockerAnswer(path, "", pid, info)


def _find_socket() -> str:
    named = os.environ.get("DOCKER_HOST", "")
    if named:
        return named.removeprefix("unix://") if named.startswith("unix:///") else ""
    own = f"{os.environ.get('XDG_RUNTIME_DIR') or f'/run/user/{os.geteuid()}'}/docker.sock"
    return next((path for path in ((own,) if os.geteuid() else ()) + (SOCKET,) if os.path.exists(path)), "")


def _get(path: str, what: str, seconds: float) -> tuple[int, bytes]:
    """Return the process id of whoever listens and the body of the answer to a GET.

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
