"""What a command has made is removed at its end, also after an error, Ctrl-C or a signal that ends it."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def cleaning_up() -> Iterator[ExitStack]:
    """An ExitStack that SIGTERM and SIGHUP bring to its end as Ctrl-C does, and whose callbacks a second one spares.

    A signal that was ignored before (nohup) stays ignored.
    """

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.strsignal(number))

    old = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number, handler in old.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, interrupt)
        with ExitStack() as stack:
            try:
                yield stack
            finally:
                for number in SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let those signals wait until the block ends: it makes something that nobody could remove half made."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
