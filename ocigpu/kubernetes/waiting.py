"""Waiting of a program that has nothing to do but at intervals, and when it is told by a signal."""

import contextlib
import math
import os
import select
import signal
from types import FrameType, TracebackType
from typing import Self

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class Waiting:
    """Within the block SIGTERM, SIGINT and SIGQUIT set ``stopping`` and SIGHUP sets ``again``; each ends a wait.

    Of the main thread only.  Children begun in the block have the handling of signals that programs are used to.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.again = False

    def wait(self, seconds: float) -> None:
        """Return after this time (math.inf: never), at once when a signal has come."""
        if not (self.stopping or self.again):
            select.select([self._reader], [], [], None if seconds == math.inf else max(0.0, seconds))

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True

    def _hang_up(self, _number: int, _frame: FrameType | None) -> None:
        self.again = True

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        handlers = {**dict.fromkeys(_STOP, self._stop), signal.SIGHUP: self._hang_up}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def take_again(self) -> bool:
        """Return whether SIGHUP has come since the last call."""
        asked, self.again = self.again, False
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        return asked

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reader)
        os.close(self._writer)
