"""NVML's events from a process of its own: NVML is closed code that may hang or crash, and then only that process does.

A sign of life comes every few seconds; a process without one is replaced.
"""

import json
import os
from typing import Any, NamedTuple

from ocigpu.core.facts import HostFacts
from ocigpu.gpus.nvidia.nvml_child import DriverPlace
from ocigpu.gpus.nvidia.nvml_process import VERBS, NvmlStream, command, nvml_place
from ocigpu.kubernetes.health import NO_INSTANCE, Event
from ocigpu.system.service import Backoff

SILENCE = 60.0
"""Seconds without a sign of life: initialising NVML wakes up all GPUs, one or two seconds each."""
FIRST_RETRY, LONGEST_RETRY = 2.0, 300.0
SETTLED = 60.0
"""Seconds after which a process works: one that ends sooner is started again ever more rarely."""
MAX_LINE = 1 << 16


class News(NamedTuple):
    """What the watcher has to say: XID events, and warnings.  ``nonsense``: something could not be understood."""

    events: tuple[Event, ...] = ()
    warnings: tuple[str, ...] = ()
    nonsense: bool = False


class EventWatcher:
    """Watches the GPUs of a host for XIDs; :meth:`step` is called now and then and never waits."""

    def __init__(self) -> None:
        self._stream = NvmlStream()
        self.fileno = self._stream.fileno
        """Returns what becomes readable with news, -1 while nothing is watched."""
        self._key: tuple[str, ...] = ()
        self._place = DriverPlace("")
        self._started = self._heard = 0.0
        self._retry = Backoff(FIRST_RETRY, LONGEST_RETRY)

    def watch(self, facts: HostFacts, now: float) -> None:
        """Watch the GPUs of these facts from now on; none without NVML.  The same GPUs are watched on."""
        place = nvml_place(facts)
        gpus = sorted(gpu.uuid for gpu in facts.gpus if not gpu.error)
        key = (*place, *gpus) if place.library and gpus else ()
        if key != self._key:
            self.close()
            self._key, self._place = key, place
            self._retry.reset(now)

    def step(self, now: float) -> News:
        """Start, replace and read the process."""
        if self._stream.child is None:
            return self._start(now) if self._key and now >= self._retry.due else News()
        lines, ended = self._stream.read()
        if lines:
            self._heard = now
        news = _parse(lines)
        problem = ""
        if news.nonsense or len(self._stream.unfinished) > MAX_LINE:
            problem = "says what means nothing"
        elif ended:
            problem = "ended"
        elif now - self._heard > SILENCE:
            problem = f"gave no sign for {SILENCE:g} s"
        elif lines and now - self._started > SETTLED:
            self._retry.reset()
        return news._replace(warnings=(*news.warnings, self._fail(now, problem))) if problem else news

    def _start(self, now: float) -> News:
        try:
            self._stream.start(command(VERBS, "watch-events", str(os.getpid()), *self._place))
        except OSError as error:
            return News(warnings=(self._fail(now, f"cannot be started: {error.strerror}"),))
        self._started = self._heard = now
        return News()

    def _fail(self, now: float, what: str) -> str:
        self._stream.close()
        return f"the process that waits for XIDs {what}: it is started again in {self._retry.failed(now):g} s"

    def close(self) -> None:
        """Watch nothing any more."""
        self._stream.close()
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
