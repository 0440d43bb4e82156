"""A forked child that looks at something of a container, and is killed when that takes too long.

A container decides what its file systems are: looking at a file of one in user space (FUSE) may never end.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
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
    return answer_of(begin_child(look, seconds))


def begin_child(look: Callable[[], Any], seconds: float = SECONDS) -> Child:
    """Begin what :func:`ask_child` does, which :func:`answer_of` ends; the child is to be closed in any case."""
    return Child(lambda _: json.dumps(_answer(look)).encode(), seconds)


def answer_of(child: Child) -> Any:
    return _result(_raw_answer(child))


def _raw_answer(child: Child) -> Any:
    try:
        text, _ = child.collect(MAX_ANSWER)
        answer = json.loads(text)
    except TimeoutError as error:
        raise TimeoutError("it took too long") from error
    except (ValueError, OverflowError) as error:
        raise OSError("the inspecting process was killed") from error
    return answer


def ask_each(looks: Iterable[Callable[[], Any]], seconds: float = SECONDS) -> list[Callable[[], Any]]:
    """Return a function for each of ``looks`` that returns its result or raises, as :func:`ask_child` does.

    One child runs all of them, one after another.  If it is too late or is killed, each look gets a child of its own,
    all at once and with the same time again.  So together they take at most twice the seconds, however many hang.
    """
    looks = list(looks)
    if len(looks) < 2:
        return [partial(ask_child, look, seconds) for look in looks]
    try:
        answers = ask_child(lambda: [_answer(look) for look in looks], seconds)
    except OSError:
        batches = [looks[start : start + MAX_CHILDREN] for start in range(0, len(looks), MAX_CHILDREN)]
        return [ask for batch in batches for ask in _ask_at_once(batch, seconds / len(batches))]
    return [partial(_result, answer) for answer in answers]


MAX_CHILDREN = 64
"""Children that look at the same time."""


def _ask_at_once(looks: Sequence[Callable[[], Any]], seconds: float) -> list[Callable[[], Any]]:
    with ExitStack() as closing:
        children = []
        for look in looks:
            children.append(begin_child(look, seconds))
            closing.callback(children[-1].close)
        return [_kept(child) for child in children]


def _kept(child: Child) -> Callable[[], Any]:
    """Wait for a child, and return what returns its answer or raises what it raised."""
    try:
        answer = _raw_answer(child)
    except OSError as error:
        return partial(_raise, error)
    return partial(_result, answer)


def _raise(error: OSError) -> Any:
    raise error


def _result(answer: dict[str, Any]) -> Any:
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

    def open_and_look() -> Any:
        return look(os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))

    return ask_child(open_and_look)


def look_into(containers: Sequence[Container], look: Callable[[int], Any]) -> list[tuple[Any, str]]:
    """Return what ``look`` finds with a descriptor of /proc/<pid> of each container's first process, as its directory.

    None, and why nothing was found, for whatever goes wrong.
    """

    def open_and_look(container: Container) -> Any:
        with process_of(container) as proc_fd:
            return look(proc_fd)

    def result(ask: Callable[[], Any]) -> tuple[Any, str]:
        try:
            return ask(), ""
        except OcigpuError as error:
            return None, error.message
        except OSError as error:
            return None, f"its files cannot be inspected: {error.strerror or error}"

    return [result(ask) for ask in ask_each(partial(open_and_look, container) for container in containers)]
