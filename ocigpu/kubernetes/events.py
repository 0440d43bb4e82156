"""NVML's events from a process of its own: NVML is closed code that may hang or crash, and then only that process does.

A sign of life comes every few seconds; a process without one is replaced.
"""

import json
import os
import subprocess
from typing import Any, NamedTuple

from ocigpu.core.facts import HostFacts
from ocigpu.kubernetes.health import NO_INSTANCE, Event
from ocigpu.kubernetes.nvml_process import DriverPlace, command, nvml_place, reap

SILENCE = 60.0
"""Seconds without a sign of life: initialising NVML wakes up all GPUs, one or two seconds each."""
FIRST_RETRY, LONGEST_RETRY = 2.0, 300.0
SETTLED = 60.0
"""Seconds after which a process works: one that ends sooner is started again ever more rarely."""
MAX_LINE = 1 << 16
CHILD = "ocigpu.kubernetes.events_child"


class News(NamedTuple):
    """What the watcher has to say: XID events, and warnings.  ``nonsense``: something could not be understood."""

    events: tuple[Event, ...] = ()
    warnings: tuple[str, ...] = ()
    nonsense: bool = False


class EventWatcher:
    """Watches the GPUs of a host for XIDs; :meth:`step` is called now and then and never waits."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._key: tuple[str, ...] = ()
        self._place = DriverPlace("")
        self._started = self._heard = 0.0
        self._due = 0.0
        self._delay = 0.0

    def fileno(self) -> int:
        """Return what becomes readable with news, -1 while nothing is watched."""
        return self._child.stdout.fileno() if self._child and self._child.stdout else -1

    def watch(self, facts: HostFacts, now: float) -> None:
        """Watch the GPUs of these facts from now on; none without NVML.  The same GPUs are watched on."""
        place = nvml_place(facts)
        gpus = sorted(gpu.uuid for gpu in facts.gpus if not gpu.error)
        key = (*place, *gpus) if place.library and gpus else ()
        if key != self._key:
            self.close()
            self._key, self._place = key, place
            self._due, self._delay = now, 0.0

    def step(self, now: float) -> News:
        """Start, replace and read the process."""
        if self._child is None:
            return self._start(now) if self._key and now >= self._due else News()
        data, ended = self._read()
        if data:
            self._heard = now
        *lines, self._pending = (self._pending + data).split(b"\n")
        news = _parse(lines)
        problem = ""
        if news.nonsense or len(self._pending) > MAX_LINE:
            problem = "says what means nothing"
        elif ended:
            problem = "ended"
        elif now - self._heard > SILENCE:
            problem = f"gave no sign for {SILENCE:g} s"
        elif data and now - self._started > SETTLED:
            self._delay = 0.0
        return news._replace(warnings=(*news.warnings, self._retry(now, problem))) if problem else news

    def _start(self, now: float) -> News:
        try:
            self._child = subprocess.Popen(
                command(CHILD, str(os.getpid()), *self._place),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                process_group=0,
            )
        except OSError as error:
            return News(warnings=(self._retry(now, f"cannot be started: {error.strerror}"),))
        self._started, self._heard, self._pending = now, now, b""
        os.set_blocking(self.fileno(), False)
        return News()

    def _read(self) -> tuple[bytes, bool]:
        try:
            data = os.read(self.fileno(), MAX_LINE)
        except BlockingIOError:
            return b"", False
        return data, not data

    def _retry(self, now: float, what: str) -> str:
        self._end()
        self._delay = min(max(2 * self._delay, FIRST_RETRY), LONGEST_RETRY)
        self._due = now + self._delay
        return f"the process that waits for XIDs {what}: it is started again in {self._delay:g} s"

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            if self._child.stdout:
                self._child.stdout.close()
            reap(self._child)
        self._child = None

    def close(self) -> None:
        """Watch nothing any more."""
        self._end()
        self._key = ()


def _parse(lines: list[bytes]) -> News:
    """Return the news of these lines; a closed library shares the process that wrote them, so they may be anything."""
    events: list[Event] = []
    warnings: list[str] = []
    for line in lines:
        try:
            data: Any = json.loads(line)
            if "xid" in data:
                numbers = [int(data[name]) & NO_INSTANCE for name in ("gi", "ci")]
                events.append(Event(int(data["xid"]), str(data["gpu"])[:96], *numbers))
            for gpu, reason in data.get("unwatched", {}).items():
                warnings.append(f"GPU {gpu[:96]} is not watched for XIDs: {str(reason)[:300]}")
        except (ValueError, TypeError, KeyError, AttributeError):
            return News(tuple(events), tuple(warnings), nonsense=True)
    return News(tuple(events), tuple(warnings))
