"""``ocigpu watch``: keeps a specification up to date while the host changes.

The kernel's uevents report at once that a module, a PCI function or a DRM device came or went.  MIG devices, IMEX
channels, nodes, settings and the loader's cache change without an event: a cheap check every few seconds finds them.
An event only advances the check; the changes are read from the host.
"""

import contextlib
import errno
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ocigpu.cdi.refresh import refresh
from ocigpu.cdi.write import DEFAULT_OUTPUT, target_of
from ocigpu.core.errors import OcigpuError, SettingsError, printable
from ocigpu.core.settings import DEFAULT_PATH, Settings
from ocigpu.core.vendors import VENDORS
from ocigpu.gpus.cached import read_facts
from ocigpu.gpus.fingerprint import explain_changes, read_fingerprint
from ocigpu.gpus.nvidia.nodes import keep_links
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vendors import load_vendor
from ocigpu.system.files import file_state
from ocigpu.system.service import Backoff, ServiceLog, Signals, notify_service_manager
from ocigpu.system.settings_file import read_settings

if TYPE_CHECKING:
    from ocigpu.gpus.vendors import Fingerprint

QUIET = 0.5
"""Seconds without a further change after which one is acted on."""
LONGEST_WAIT = 5.0
"""Seconds after the first of a series of changes at which it is acted on although it goes on."""
FIRST_RETRY = 1.0
LONGEST_RETRY = 60.0
"""Seconds until a failed refresh is tried again: doubling from the first to the longest."""
SETTLING = 5.0
"""Seconds after a change of the host at which its facts are read for the next start: younger changes are not kept."""
RENEWAL, YOUNG = 240.0, 30.0
"""Seconds after which facts that are not young are renewed: together less than MAX_AGE, so that starts need not."""
AWAKE = "/run/nvidia-persistenced/socket"
"""Of the daemon that keeps GPUs initialized: without it NVML wakes them."""

ACTIONS = ("add", "remove", "change", "bind", "unbind")
SUBSYSTEMS = ("module", "pci", "drm", *(name for vendor in map(load_vendor, VENDORS) for name in vendor.subsystems))
_LARGEST_EVENT = 1 << 16
"""Bytes; the kernel's buffer for the variables of an event is 2 KiB (UEVENT_BUFFER_SIZE, linux/kobject.h)."""
_MOST_EVENTS_NAMED = 5


class Pace:
    """When to look at the host next, on a clock that the caller reads: ``due`` is in its seconds."""

    def __init__(self, interval: float, now: float) -> None:
        self.interval = interval
        self.due = now
        self._since: float | None = None
        self._backoff = Backoff(FIRST_RETRY, LONGEST_RETRY)
        self.forget_failures = self._backoff.reset
        """The host is another than the one the last refresh failed on: the next one need not wait."""

    def stir(self, now: float) -> None:
        """Something has happened: wait until it is quiet, but not for ever."""
        if self._since is None:
            self._since = now
        self.due = min(now + QUIET, self._since + LONGEST_WAIT)

    def must_act(self, now: float) -> bool:
        """Return whether a series of changes has been waited for long enough."""
        return self._since is not None and now >= self._since + LONGEST_WAIT

    def may_retry(self, now: float) -> bool:
        """Return whether nothing forbids a refresh: the last one succeeded, or its back-off is over."""
        return now >= self._backoff.due

    def succeeded(self, now: float) -> None:
        """A refresh was done, or there was nothing to do: look again after the interval."""
        self.forget_failures()
        self.wait(now)

    def failed(self, now: float) -> None:
        """A refresh failed: try it again after the back-off."""
        self._backoff.failed(now)
        self.wait(now)

    def wait(self, now: float) -> None:
        """Look again after the interval, or at the end of a back-off."""
        self._since = None
        self.due = min(now + self.interval, self._backoff.due if self._backoff.delay else math.inf)


class Observed(NamedTuple):
    """The observed state: fingerprints of all sources, and (inode, size, time) of two files, () for a missing one."""

    fingerprints: "tuple[Fingerprint, ...]"
    loader_cache: tuple[int, ...]
    settings_file: tuple[int, ...]


def observe(settings: Settings) -> Observed:
    """Read the inputs of a specification; raises HostError when a file of the driver cannot be read.

    An installation of libraries, the driver's or others, rewrites the loader's cache.
    """
    return Observed(
        tuple(read_fingerprint(source, settings) for source in VENDORS),
        file_state(find_roots(settings).driver + settings.driver_ldcache),
        file_state(settings.path or DEFAULT_PATH),
    )


def explain(old: Observed, new: Observed) -> tuple[str, ...]:
    """Return a sentence for each thing that differs."""
    pairs = zip(old.fingerprints, new.fingerprints, strict=True)
    sentences = [sentence for before, after in pairs for sentence in explain_changes(before, after)]
    if old.loader_cache != new.loader_cache:
        sentences.append("the loader's cache has changed")
    if old.settings_file != new.settings_file:
        sentences.append("the settings file has changed")
    return tuple(dict.fromkeys(sentences))


def describe_event(event: dict[str, Any]) -> str:
    """Return a uevent that may concern GPUs as text, "add module nvidia_uvm"; "" for any other."""
    action, subsystem = str(event.get("ACTION", "")), str(event.get("SUBSYSTEM", ""))
    if action not in ACTIONS or not (subsystem in SUBSYSTEMS or subsystem.startswith("nvidia")):
        return ""
    return f"{action} {subsystem} {os.path.basename(str(event.get('DEVPATH', '')))}"


class Uevents:
    """The kernel's uevents (netlink(7), NETLINK_KOBJECT_UEVENT); no privilege is needed to receive them.

    A network namespace of another user namespace gets those of its network devices only.  Raises OSError.
    """

    def __init__(self) -> None:
        from pyroute2.netlink.uevent import MONITOR_GROUP_KERNEL, UeventSocket  # here: it costs 130 ms

        self.socket = UeventSocket()
        try:
            self.socket.bind(groups=MONITOR_GROUP_KERNEL)
        except OSError:
            self.socket.close()
            raise

    def fileno(self) -> int:
        return int(self.socket.fileno())

    def read(self) -> list[str]:
        """Return the waiting events that may concern GPUs, as text."""
        found: list[str] = []
        while True:
            try:
                # Not get(): it reads ahead into a queue, which select(2) does not see, and ends for good at ENOBUFS.
                data = self.socket.recv(_LARGEST_EVENT, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                found.append("events were lost")
                continue
            for event in self.socket.marshal.parse(data):
                text = describe_event(event)
                if text:
                    found.append(text)

    def close(self) -> None:
        self.socket.close()


class Watch:
    """One specification and what it is made from; :meth:`run` keeps it up to date until SIGTERM or SIGINT."""

    def __init__(
        self,
        options: GenerateOptions,
        settings: Settings,
        path: str = DEFAULT_OUTPUT,
        as_json: bool = False,
        newest: str = "",
    ) -> None:
        self.options = options
        self.newest = newest
        self.settings = settings
        self.path = target_of(path)[0]
        self.log = ServiceLog(as_json)
        self._overrides = _changed_on_the_command_line(settings)
        self._events: list[str] = []
        self._done: Observed | None = None
        self._seen: Observed | None = None
        self._warned: tuple[str, ...] = ()
        self.facts_due = math.inf
        """When the facts for the next starts are read, as :class:`Pace` has it."""

    def run(self, interval: float, also: Callable[[], None] | None = None) -> None:
        """Refresh now and after each change of the host, looking every ``interval`` seconds.

        ``also``: called as often, whatever comes of the refresh.
        Changes the process's handling of SIGTERM and SIGINT while it runs.
        """
        with Signals((signal.SIGTERM, signal.SIGINT), hangup=False) as signals:
            uevents = self._open_uevents()
            try:
                self._loop(interval, signals, uevents, also)
            finally:
                notify_service_manager("STOPPING=1")
                if uevents:
                    uevents.close()

    def _open_uevents(self) -> Uevents | None:
        try:
            return Uevents()
        except OSError as error:
            self.log("warning", f"no kernel events (netlink socket: {error.strerror}): only looking at intervals")
            return None

    def _loop(
        self, interval: float, signals: Signals, uevents: Uevents | None, also: Callable[[], None] | None
    ) -> None:
        pace = Pace(interval, time.monotonic())
        also_due = pace.due if also else math.inf
        state = "READY=1"
        while True:
            left = min(pace.due, also_due, self.facts_due) - time.monotonic()
            readable = signals.wait(left, *([uevents.fileno()] if uevents else []))
            if signals.stopping:
                return
            now = time.monotonic()
            events = uevents.read() if uevents and readable else []
            if events:
                self._events += events
                pace.stir(now)
            if now >= pace.due:
                self.step(pace, now)
                notify_service_manager(state)
                state = ""
            if now >= self.facts_due:
                self.renew_facts(now)
            if also and now >= also_due:
                also()
                also_due = now + interval

    def renew_facts(self, now: float) -> None:
        """Have facts for the next starts, and renew them before they are old if no GPU has to wake up for that."""
        self.facts_due = math.inf
        with contextlib.suppress(OcigpuError):  # the start logs it
            facts = read_facts(self.settings, YOUNG)
            if any(file.container_path == AWAKE for file in facts.sockets):
                self.facts_due = now + RENEWAL

    def step(self, pace: Pace, now: float) -> None:
        """Look at the host, and refresh when it has changed and is quiet; tells ``pace`` what came of it."""
        try:
            observed = observe(self.settings)
            if self._seen is not None and observed != self._seen and not pace.must_act(now):
                self._seen = observed
                pace.forget_failures()
                pace.stir(now)
                return
            self._seen = observed
            reasons = explain(self._done, observed) if self._done else ()
            if self._done and not (reasons or self._warned) and os.path.lexists(self.path):
                self._events.clear()
                pace.succeeded(now)
            elif pace.may_retry(now):
                self._refresh(observed, reasons)
                self.facts_due = now + SETTLING
                pace.succeeded(now)
            else:
                pace.wait(now)
        except OcigpuError as error:
            self._warn(error.line)
            notify_service_manager(f"STATUS=Failed: {printable(error.message)}")
            pace.failed(now)

    def _refresh(self, observed: Observed, reasons: tuple[str, ...]) -> None:
        if self._done and observed.settings_file != self._done.settings_file:
            self.reread_settings()
            observed = observe(self.settings)
        refreshed = refresh(self.options, self.settings, self.path, self.newest)
        self._done = self._seen = observed
        why = refreshed.reasons or reasons
        events = tuple(dict.fromkeys(self._events))
        self._events.clear()
        self._warned = ()
        self.log(
            "info",
            "; wrote ".join((_sentence(refreshed.path, refreshed.changed, why, events), *refreshed.beside)),
            path=refreshed.path,
            changed=refreshed.changed,
            reasons=list(why),
            events=list(events),
        )
        links = keep_links(find_roots(self.settings))
        self.log.new("notes", "warning", (*refreshed.notes, *refreshed.skipped, *([links] if links else [])))
        notify_service_manager(f"STATUS={refreshed.path} is up to date")

    def reread_settings(self) -> None:
        path = self.settings.path if self.settings.path != DEFAULT_PATH else ""
        try:
            self.settings = read_settings(path)._replace(**self._overrides)
        except SettingsError as error:
            self._warn(f"{error.line}; the previous settings stay in force")

    def _warn(self, message: str) -> None:
        """Log an error once, however often it is met without a success in between."""
        if message not in self._warned:
            self._warned = (*self._warned, message)
            self.log("error", message)


def _changed_on_the_command_line(settings: Settings) -> dict[str, Any]:
    """Return the settings that differ from their file."""
    from_file = read_settings(settings.path if settings.path != DEFAULT_PATH else "")._asdict()
    return {name: value for name, value in settings._asdict().items() if value != from_file[name]}


def _sentence(path: str, changed: bool, reasons: tuple[str, ...], events: tuple[str, ...]) -> str:
    text = f"wrote {path}" if changed else f"{path} is up to date"
    text += f": {'; '.join(reasons)}" if reasons else ""
    if not events:
        return text
    more = f" and {len(events) - _MOST_EVENTS_NAMED} more" if len(events) > _MOST_EVENTS_NAMED else ""
    return f"{text} (after: {', '.join(events[:_MOST_EVENTS_NAMED])}{more})"
