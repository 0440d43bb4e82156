"""Device rules of a running container, changed for as long as the work on it goes well.

A process of its own changes them and waits: when the work fails, or whoever does it is killed, that process puts the
rules back as they were.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from ocigpu.core.actions import AllowDevice
from ocigpu.core.errors import ApplyError, OcigpuError
from ocigpu.provision.cgroups import change_device_rules
from ocigpu.provision.device_filter import FilterRule

_KEEP = b"k"


@contextmanager
def changed_rules(
    proc_fd: int,
    allow: Sequence[AllowDevice],
    deny: Sequence[AllowDevice],
    policy: list[FilterRule],
    recorded: str = "",
) -> Iterator[None]:
    """Change the device rules of the container of a process while the block runs, and for good if it ends well.

    Arguments as for :func:`ocigpu.provision.cgroups.change_device_rules`, which raises what this does.  For a process
    with one thread.
    """
    if not allow and not deny:
        yield
        return
    up_fd, child_up_fd = os.pipe2(os.O_CLOEXEC)
    child_down_fd, down_fd = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(up_fd)
        os.close(down_fd)
        _be_guard(
            lambda: change_device_rules(proc_fd, tuple(allow), tuple(deny), policy, recorded),
            child_up_fd,
            child_down_fd,
        )
    os.close(child_up_fd)
    os.close(child_down_fd)
    with open(up_fd, "rb") as words:
        try:
            _check(words.readline())
            try:
                yield
            except OcigpuError as error:
                os.close(down_fd)
                down_fd = -1
                left = _left(words.readline())
                if left:
                    message = f"{error.message} (device rules could not be put back: {left})"
                    raise ApplyError(error.code, message, error.hint) from error
                raise
            _keep(down_fd)
        finally:
            if down_fd >= 0:
                os.close(down_fd)
            words.read()
            os.waitpid(pid, 0)


def _keep(down_fd: int) -> None:
    try:
        os.write(down_fd, _KEEP)
    except BrokenPipeError:  # the guard was killed: then the rules stay, too
        return


def _left(line: bytes) -> str:
    text: str = json.loads(line).get("left", "") if line else "the process that does it was killed"
    return text


def _check(line: bytes) -> None:
    """Take a word of the guard's: {} means that all is well.  Raises ApplyError."""
    if not line:
        raise ApplyError("OCIGPU-INT-2", "device rules: the process that changes them was killed")
    error = json.loads(line).get("error")
    if error:
        raise ApplyError(*error)


def _be_guard(change: Callable[[], Callable[[], None]], up_fd: int, down_fd: int) -> NoReturn:
    def say(**data: object) -> None:
        try:
            os.write(up_fd, json.dumps(data).encode() + b"\n")
        except BrokenPipeError:  # whoever we work for was killed
            return

    try:
        os.setsid()  # not ended with the others of a group
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        try:
            undo = change()
        except OcigpuError as error:
            say(error=[error.code, error.message, error.hint])
            os._exit(1)
        say()
        if os.read(down_fd, 1) == _KEEP:
            os._exit(0)
        try:
            undo()
            say()
        except OcigpuError as error:
            say(left=error.message)
    finally:
        os._exit(1)
