"""Watches that do no more than end a program's pause: it then reads everything."""

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from ocigpu.core.errors import HostError
from ocigpu.system.service import Backoff, ServiceLog


def wake_on_changes(
    follow: Callable[[], Iterable[object]],
    writer: int,
    stopping: threading.Event,
    longest: float,
    log: ServiceLog,
    topic: str,
    otherwise: str,
) -> None:
    """Write a byte to a pipe that does not block for each change, until ``stopping`` is set.

    ``follow`` begins a watch; one that fails is tried again after up to ``longest`` seconds, and the log says under
    ``topic`` what happens ``otherwise``.
    """
    backoff = Backoff(1.0, longest)
    while not stopping.is_set():
        try:
            for _ in follow():
                backoff.reset()
                with suppress(BlockingIOError):
                    os.write(writer, b"\0")
        except HostError as error:
            if stopping.is_set():
                return
            log.once(topic, "warning", f"{error.message}; {otherwise}")
            stopping.wait(backoff.failed(0.0))
