"""The common part of the device plugin and the DRA driver: repeated readings of a node, and its GPUs' events.

One thread takes steps that never block; gRPC answers the kubelet in threads of its own.  Other processes query NVML
(:mod:`~ocigpu.kubernetes.node.reader`, :class:`EventWatcher`): it is closed code that may hang or crash, which then
affects only that process.  The event process sends a sign of life every few seconds; a silent one is replaced.
"""

import json
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from ocigpu.core.facts import HostFacts
from ocigpu.gpus.vendors import load_vendor
from ocigpu.kubernetes.node.devices import Inventory
from ocigpu.kubernetes.node.health import NO_INSTANCE, Event, Monitor
from ocigpu.kubernetes.node.reader import ChildReader
from ocigpu.system.module_process import ModuleProcess
from ocigpu.system.service import Backoff, ServiceLog, Signals

SILENCE = 60.0
"""Seconds without a sign of life: initialising NVML wakes up all GPUs, one or two seconds each."""
FIRST_RETRY, LONGEST_RETRY = 2.0, 300.0
SETTLED = 60.0
"""Seconds after which a process works: one that ends sooner is started again ever more rarely."""
MAX_LINE = 1 << 16


class News(NamedTuple):
    """What the watcher has to say: XID events, and warnings.  ``nonsense``: something could not be understood.

    ``unwatched``: UUIDs of GPUs whose XIDs do not come.
    """

    events: tuple[Event, ...] = ()
    warnings: tuple[str, ...] = ()
    nonsense: bool = False
    unwatched: tuple[str, ...] = ()


class EventWatcher:
    """Watches the GPUs of a host for XIDs; :meth:`step` is called now and then and never waits."""

    def __init__(self) -> None:
        self._stream = ModuleProcess(alone=True)
        self.fileno = self._stream.fileno
        """Returns what becomes readable with news, -1 while nothing is watched."""
        self.unwatched: frozenset[str] = frozenset()
        """UUIDs of GPUs whose XIDs do not come."""
        self._words: tuple[str, ...] = ()
        self._gpus: list[str] = []
        self._started = self._heard = 0.0
        self._retry = Backoff(FIRST_RETRY, LONGEST_RETRY)

    def watch(self, facts: HostFacts, now: float) -> None:
        """Watch the GPUs of these facts from now on; none whose vendor has no way.  The same GPUs are watched on."""
        gpus = sorted(gpu.uuid for gpu in facts.gpus if not gpu.error)
        words = tuple(load_vendor(facts.vendor).watch_faults(facts)) if gpus else ()
        if (words, gpus) != (self._words, self._gpus):
            self.close()
            self._words, self._gpus = words, gpus
            self._retry.reset(now)

    def step(self, now: float) -> News:
        """Start, replace and read the process."""
        if self._stream.child is None:
            return self._start(now) if self._words and now >= self._retry.due else News()
        lines, ended = self._stream.read()
        if lines:
            self._heard = now
        news = _parse(lines)
        self.unwatched |= {*news.unwatched}
        problem = ""
        if news.nonsense or len(self._stream.unfinished) > MAX_LINE:
            problem = "sent an unknown message"
        elif ended:
            problem = "ended"
        elif now - self._heard > SILENCE:
            problem = f"gave no sign for {SILENCE:g} s"
        elif lines and now - self._started > SETTLED:
            self._retry.reset()
        return news._replace(warnings=(*news.warnings, self._fail(now, problem))) if problem else news

    def _start(self, now: float) -> News:
        try:
            self.unwatched = frozenset()
            self._stream.start(*self._words)
        except OSError as error:
            return News(warnings=(self._fail(now, f"cannot be started: {error.strerror}"),))
        self._started = self._heard = now
        return News()

    def _fail(self, now: float, what: str) -> str:
        self._stream.close()
        return f"the process that waits for XIDs {what}: restarting it in {self._retry.failed(now):g} s"

    def close(self) -> None:
        """Watch nothing any more."""
        self._stream.close()
        self._words, self._gpus, self.unwatched = (), [], frozenset()


def _parse(lines: list[bytes]) -> News:
    """Return the news of these lines; a closed library shares the process that wrote them, so they may be anything."""
    events: list[Event] = []
    warnings: list[str] = []
    unwatched: list[str] = []
    for line in lines:
        try:
            data: Any = json.loads(line)
            if "xid" in data:
                numbers = [int(data[name]) & NO_INSTANCE for name in ("gi", "ci")]
                events.append(Event(int(data["xid"]), str(data["gpu"])[:96], *numbers))
            for gpu, reason in data.get("unwatched", {}).items():
                unwatched.append(gpu[:96])
                warnings.append(f"GPU {gpu[:96]} is not watched for XIDs: {str(reason)[:300]}")
        except (ValueError, TypeError, KeyError, AttributeError):
            return News(tuple(events), tuple(warnings), nonsense=True, unwatched=tuple(unwatched))
    return News(tuple(events), tuple(warnings), unwatched=tuple(unwatched))


A = TypeVar("A")


class NodeProgram(Generic[A]):
    """Takes steps until a signal ends it; ``poll``: seconds between them, ``probe``: between readings of the node."""

    fatal: tuple[type[Exception], ...] = ()
    """Errors of a step that end the program; others are logged."""

    def __init__(self, reader: ChildReader[A], monitor: Monitor, poll: float, probe: float, as_json: bool) -> None:
        self.reader, self.monitor, self._poll, self._probe = reader, monitor, poll, probe
        self.log = ServiceLog(as_json, lossy=True)  # pods need devices all the same
        self.signals = Signals()
        self.watchers: dict[str, EventWatcher] = {}
        """By the names of vendors."""
        self._read_due = 0.0

    def _step(self, now: float) -> None:
        raise NotImplementedError

    def _work(self) -> None:
        try:
            while not self.signals.stopping:
                try:
                    self._step(time.monotonic())
                except self.fatal:
                    raise
                except Exception as error:  # noqa: BLE001 - a program that ends is started again, and again
                    self.log.failed("step", error)
                readable = [self.reader.fileno(), *(watcher.fileno() for watcher in self.watchers.values())]
                self.signals.wait(self._poll, *(fd for fd in readable if fd >= 0))
            self.log("info", "ending")
        finally:
            for watcher in self.watchers.values():
                watcher.close()
            self.reader.close()

    def _poll_reader(self, request: Callable[[], Any], now: float) -> A | None:
        """Return a reading of the node that has arrived; request one when due, with the result of ``request``."""
        reading = self.reader.answer(now)
        if reading is not None:
            self._read_due = now + self._probe
        if not self.reader.busy and now >= self._read_due:
            try:
                self.reader.ask(request(), now)
            except OSError as error:
                self._read_due = now + self._probe
                self.log.once("reader", "error", f"no process to read the host: {error.strerror}")
        return reading

    def _hear(self, facts: Iterable[HostFacts], inventory: Inventory, now: float) -> bool:
        """Watch the GPUs of these vendors for faults; returns whether any came, which the monitor knows then."""
        watched = {each.vendor: each for each in facts if self.monitor.policy.watches_events}
        self.watchers |= {vendor: EventWatcher() for vendor in watched.keys() - self.watchers.keys()}
        heard = [
            self._hear_vendor(watcher, watched.get(vendor), inventory.of(vendor), now)
            for vendor, watcher in self.watchers.items()
        ]
        return any(heard)

    def _hear_vendor(self, watcher: EventWatcher, facts: HostFacts | None, inventory: Inventory, now: float) -> bool:
        if facts is not None:
            watcher.watch(facts, now)
        else:
            watcher.close()
        news = watcher.step(now)
        for warning in news.warnings:
            self.log("warning", warning)
        for event in news.events:
            found = self.monitor.record_event(event, inventory, now)
            what = f"XID {event.xid} of {event.gpu or 'an unknown GPU'}"
            self.log("warning" if found else "info", what if found else f"{what} does not affect its health")
        return bool(news.events or news.unwatched)
