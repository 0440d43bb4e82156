"""A forked child that looks at something of a container, and is killed when that takes too long.

A container decides what its file systems are: looking at a file of one in user space (FUSE) may never end.
"""

import json
import os
from collections.abc import Callable
from typing import Any

from ocigpu.containers.believed import Container, process_of
from ocigpu.core.errors import OcigpuError
from ocigpu.system.child import Child

MAX_ANSWER = 16 << 20
SECONDS = 10.0


def ask_child(look: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Return what ``look`` returns in a forked child, as JSON data.

    Raises OSError and OcigpuError as ``look`` does, TimeoutError when it takes longer than ``seconds``, and OSError
    without a number when the child was killed.  For a process with one thread.
    """
    try:
        text, _ = Child(lambda _: json.dumps(_answer(look)).encode(), seconds).collect(MAX_ANSWER)
        answer = json.loads(text)
    except TimeoutError as error:
        raise TimeoutError("it took too long") from error
    except (ValueError, OverflowError) as error:
        raise OSError("the process that looked was killed") from error
    if "found" in answer:
        return answer["found"]
    if "code" in answer:
        raise OcigpuError(answer["code"], answer["text"], answer["hint"])
    path = answer["path"] if isinstance(answer["path"], str) else None
    raise OSError(answer["errno"], answer["text"], path)


def _answer(look: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"found": look()}
    except OcigpuError as error:
        return {"code": error.code, "text": error.message, "hint": error.hint}
    except OSError as error:
        return {"errno": error.errno or 0, "text": f"{error.strerror or error}", "path": error.filename}


def look_below(root: str, look: Callable[[int], Any]) -> Any:
    """Return what ``look`` finds with a descriptor of a root directory, as :func:`ask_child` does.

    The directory may be of a file system that never answers.
    """

    def look_there() -> Any:
        return look(os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))

    return ask_child(look_there)


def look_into(container: Container, look: Callable[[int], Any]) -> tuple[Any, str]:
    """Return what ``look`` finds with a descriptor of /proc/<pid> of a container's first process, as its directory.

    None, and why nothing was found, for whatever goes wrong.
    """
    try:
        with process_of(container) as proc_fd:
            return ask_child(lambda: look(proc_fd)), ""
    except OcigpuError as error:
        return None, error.message
    except OSError as error:
        return None, f"its files cannot be looked at: {error.strerror or error}"
