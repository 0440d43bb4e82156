"""The program of the process that queries NVML at intervals; see :mod:`ocigpu.exporter.sampler`.

Reads orders from standard input, a JSON object a line: ``wanted`` (names of metrics), ``interval``, ``window`` and
``clock_window`` (seconds), ``processes`` (whether GPU time and memory of processes are requested), ``poll`` (seconds
between checks for present GPUs, 0: only with each sample).  Prints a sample a line.  Ends with its standard input.
Values that a GPU does not answer are left out, for any reason: one lost GPU does not hide others.
"""

import json
import os
import select
import time
from collections import Counter, defaultdict, deque
from typing import Any

import pynvml

from ocigpu.exporter.metrics import (
    CLOCK_COUNT,
    CLOCK_EVENTS,
    DRIVER_VERSION,
    GPM_METRICS,
    NVML_VERSION,
    XID,
    XID_COUNT,
    XID_TOTAL,
)
from ocigpu.exporter.nvml_readers import (
    LABEL_READERS,
    READERS,
    Gpm,
    Values,
    read_clock_reasons,
    read_memory,
    read_pcie_rates,
)
from ocigpu.gpus.nvidia.nvml_child import FATAL, MAX_GPUS, DriverPlace
from ocigpu.gpus.nvidia.nvml_verbs import XIDS, load, mig_devices, read_processes, say, try_
from ocigpu.gpus.tree import list_names
from ocigpu.system.service import Backoff

WAIT = 0.5
"""Seconds between looks at standard input."""
LONGEST_PATIENCE = 300.0
"""Seconds between two openings of NVML while a GPU is lost."""
MAX_XIDS = 256
"""Different XIDs that are counted for a GPU; the driver has some 170."""
MAX_EVENTS = 10000
"""Events of a GPU that are remembered for a window."""
WHOLE_GPU = 0xFFFFFFFF
"""Instance number of an event that concerns no GPU instance (nvml.h)."""


def main(parent: str, library: str, chroot: str, simulation: str, gpu_directory: str) -> None:
    """Load the library of this place and print samples, or why it cannot be loaded.

    Gives up root first, and ends with the process ``parent``.  ``gpu_directory``: where the driver lists its GPUs.
    """
    try:
        load(parent, DriverPlace(library, chroot, simulation))
    except OSError as error:
        say({"error": str(error)})
        return
    sampler = NvmlSampler(gpu_directory)
    os.set_blocking(0, False)
    pending = b""
    while True:
        try:
            data = os.read(0, 1 << 16)
            if not data:
                return
        except BlockingIOError:
            data = b""
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            sampler.order(json.loads(line))
        if sampler.due():
            say(sampler.sample())
        else:
            sampler.wait()


class Window:
    """What has happened lately, and when."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, int]] = deque(maxlen=MAX_EVENTS)

    def note(self, event: int) -> None:
        self._events.append((time.monotonic(), event))

    def last(self, seconds: float) -> list[int]:
        """Return the events of these seconds, and forget the older ones."""
        limit = time.monotonic() - seconds
        while self._events and self._events[0][0] < limit:
            self._events.popleft()
        return [event for _, event in self._events]


class NvmlSampler:
    """Holds the orders, keeps NVML open, and stores events."""

    def __init__(self, gpu_directory: str) -> None:
        self.gpu_directory = gpu_directory
        self.orders: dict[str, Any] = {}
        self.ready = False
        self.again = False
        self.retry = Backoff(1.0, LONGEST_PATIENCE)
        self.next = 0.0
        self.looked = 0.0
        self.listed: list[str] = []
        self.events: Any = None
        self.watched: set[str] = set()
        self.gpm: dict[tuple[str, int | None], Gpm | None] = {}
        self.last_xid: dict[tuple[str, int], int] = {}
        self.recent: defaultdict[tuple[str, int], Window] = defaultdict(Window)
        self.totals: defaultdict[tuple[str, int], Counter[int]] = defaultdict(Counter)
        self.reasons: defaultdict[str, Window] = defaultdict(Window)
        self.process_time: dict[str, int] = {}

    def order(self, orders: dict[str, Any]) -> None:
        """Follow these orders from now on; the next sample is taken at once."""
        self.orders = {**orders, "wanted": frozenset(orders["wanted"])}
        self.next = 0.0

    def due(self) -> bool:
        """Return whether it is time for a sample; a GPU that came or went makes it so."""
        now = time.monotonic()
        poll = self.orders.get("poll", 0)
        if poll and self.ready and now - self.looked >= poll:
            self.looked = now
            if list_names(self.gpu_directory) != self.listed:
                return True
        return bool(self.orders) and now >= self.next

    def wait(self) -> None:
        """Wait a little: for events where NVML gives them, else for orders."""
        left = self.next - time.monotonic() if self.orders else WAIT
        seconds = max(min(WAIT, left, self.orders.get("poll") or WAIT), 0.001)
        if self.watched:
            try:
                self._note(pynvml.nvmlEventSetWait_v2(self.events, int(seconds * 1000) or 1))
            except pynvml.NVMLError as error:
                if error.value == pynvml.NVML_ERROR_TIMEOUT:
                    return
                self._forget_events()  # a lost GPU ends the waiting; the next sample watches those that answer
                self.again = True
            return
        select.select([0], [], [], seconds)

    # NVML

    def _open(self) -> None:
        pynvml.nvmlInit()
        self.ready = True

    def _close(self) -> None:
        for gpm in filter(None, self.gpm.values()):
            gpm.close()
        self.gpm.clear()
        self._forget_events()
        try_(pynvml.nvmlShutdown)
        self.ready = False

    def _forget_events(self) -> None:
        self.watched.clear()
        if self.events is not None:
            try_(pynvml.nvmlEventSetFree, self.events)
        self.events = None

    def _must_reopen(self, listed: list[str], now: float) -> bool:
        """Return whether NVML must be reopened: GPUs came or went, or a lost one may have returned.

        Reopening loses all counts since the last samples, so it becomes less and less frequent for a GPU that stays
        lost.
        """
        if listed != self.listed:
            return True
        if not self.again:
            self.retry.reset(self.retry.due)
            return False
        if now < self.retry.due:
            return False
        self.retry.first = self.orders["interval"]
        self.retry.failed(now)
        return True

    def sample(self) -> dict[str, Any]:
        """Return a sample of all GPUs, or {"error": why it failed}."""
        begin = time.monotonic()
        self.next = begin + self.orders["interval"]
        listed = list_names(self.gpu_directory)
        if self.ready and self._must_reopen(listed, begin):
            self._close()
        self.listed, self.again = listed, False
        try:
            if not self.ready:
                self._open()
            if self.events is None:
                self.events = try_(pynvml.nvmlEventSetCreate)
            count = min(pynvml.nvmlDeviceGetCount(), MAX_GPUS)
        except pynvml.NVMLError as error:
            if self.ready:
                self._close()
            return {"error": f"{error} (NVML {error.value})"}
        self._drain()
        labels = {
            DRIVER_VERSION: try_(pynvml.nvmlSystemGetDriverVersion),
            NVML_VERSION: try_(pynvml.nvmlSystemGetNVMLVersion),
        }
        gpus = [self._gpu(index) for index in range(count)]
        wanted = {name: text for name, text in labels.items() if text and name in self.orders["wanted"]}
        return {"gpus": gpus, "labels": wanted, "listed": listed, "seconds": round(time.monotonic() - begin, 6)}

    def _gpu(self, index: int) -> dict[str, Any]:
        gpu: dict[str, Any] = {"number": index}
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpu["uuid"] = uuid = pynvml.nvmlDeviceGetUUID(handle)
            gpu["bus_id"] = pynvml.nvmlDeviceGetPciInfo(handle).busId
            gpu["name"] = pynvml.nvmlDeviceGetName(handle)
        except pynvml.NVMLError as error:
            self.again = True
            gpu["error"] = f"{error} (NVML {error.value})"
            return gpu
        self._watch(handle, uuid)
        wanted = self.orders["wanted"]
        values, error_text = self._read(handle, wanted)
        if error_text:
            self.again = True
            return {**gpu, "error": error_text}
        migs = self._migs(handle, uuid, wanted)
        if not migs:
            values.update(self._gpm(handle, uuid, None, wanted))
        self._count_clocks(handle, uuid, gpu, wanted)
        gpu["labels"] = {
            name: text
            for name, read in LABEL_READERS.items()
            if name in wanted and (text := try_(read, handle)) is not None
        }
        gpu["values"] = {name: value for name, value in values.items() if value is not None and name in wanted}
        gpu["xid"], gpu["xids"] = self._xids(uuid, WHOLE_GPU)
        gpu["xid_totals"] = self.totals[uuid, WHOLE_GPU]
        gpu["instances"] = migs
        minor = try_(pynvml.nvmlDeviceGetMinorNumber, handle)
        gpu["minor"] = -1 if minor is None else minor
        if self.orders.get("processes") and not migs:
            gpu["processes"], self.process_time[uuid] = read_processes(handle, self.process_time.get(uuid, 0))
        return gpu

    def _read(self, handle: Any, wanted: frozenset[str]) -> tuple[Values, str]:
        """Return the requested values that were answered, and why the GPU cannot be used, "" if it can."""
        values: Values = {}
        for names, read in READERS:
            if wanted.isdisjoint(names) or (read is read_pcie_rates and self._has_gpm(handle)):
                continue
            try:
                values.update(read(handle))
            except pynvml.NVMLError as error:
                if error.value in FATAL:
                    return {}, f"{error} (NVML {error.value})"
        return values, ""

    def _migs(self, handle: Any, uuid: str, wanted: frozenset[str]) -> list[dict[str, Any]]:
        """Return the GPU instances, each with the UUIDs of its MIG devices."""
        instances: dict[int, dict[str, Any]] = {}
        for device, mig_uuid in mig_devices(handle):
            instance = try_(pynvml.nvmlDeviceGetGpuInstanceId, device)
            if instance is None:
                continue
            processes = read_processes(device, 0)[0] if self.orders.get("processes") else []
            known = instances.get(instance)
            if known:
                known["uuids"].append(mig_uuid)
                known["processes"] += processes
                continue
            profile = (try_(pynvml.nvmlDeviceGetName, device) or "").rpartition(" MIG ")[2]
            values = {name: value for name, value in (try_(read_memory, device) or {}).items() if value is not None}
            values.update(self._gpm(handle, uuid, instance, wanted))
            xid, xids = self._xids(uuid, instance)
            xid_of_all, xids_of_all = self._xids(uuid, WHOLE_GPU)
            instances[instance] = {
                "number": instance,
                "uuids": [mig_uuid],
                "profile": profile.rpartition("c.")[2],  # "1c.2g.10gb" is part of the instance 2g.10gb
                "values": {name: value for name, value in values.items() if name in wanted},
                "xid": xid or xid_of_all,
                "xids": xids + xids_of_all,
                "xid_totals": self.totals[uuid, instance] + self.totals[uuid, WHOLE_GPU],
                "start": _start(handle, instance),
                "processes": processes,
            }
        return list(instances.values())

    # GPM

    def _has_gpm(self, handle: Any) -> bool:
        support = try_(pynvml.nvmlGpmQueryDeviceSupport, handle)
        return bool(support and support.isSupportedDevice)

    def _gpm(self, handle: Any, uuid: str, instance: int | None, wanted: frozenset[str]) -> Values:
        names = [name for name in GPM_METRICS if name in wanted]
        if not names:
            return {}
        key = (uuid, instance)
        if key not in self.gpm:
            self.gpm[key] = try_(Gpm, handle, instance) if self._has_gpm(handle) else None
        gpm = self.gpm[key]
        found: Values | None = try_(gpm.read, names) if gpm else None
        return found or {}

    # events

    def _watch(self, handle: Any, uuid: str) -> None:
        if self.events is None or uuid in self.watched or self.orders["wanted"].isdisjoint({XID, XID_COUNT, XID_TOTAL}):
            return
        try:
            if pynvml.nvmlDeviceGetSupportedEventTypes(handle) & XIDS:
                pynvml.nvmlDeviceRegisterEvents(handle, XIDS, self.events)
                self.watched.add(uuid)
        except pynvml.NVMLError:  # then this GPU gets no series for them
            return

    def _drain(self) -> None:
        """Note the events that have come while the last sample was taken."""
        for _ in range(MAX_EVENTS if self.watched else 0):
            event = try_(pynvml.nvmlEventSetWait_v2, self.events, 0)
            if event is None:
                return
            self._note(event)

    def _note(self, event: Any) -> None:
        uuid = try_(pynvml.nvmlDeviceGetUUID, event.device)
        if event.eventType != XIDS or uuid is None:
            return
        key = (uuid, event.gpuInstanceId)
        self.last_xid[key] = event.eventData
        self.recent[key].note(event.eventData)
        if event.eventData in self.totals[key] or len(self.totals[key]) < MAX_XIDS:
            self.totals[key][event.eventData] += 1

    def _xids(self, uuid: str, instance: int) -> tuple[int | None, "Counter[int]"]:
        """Return the last XID, 0 for none yet and None if XIDs are not reported, and the count of each."""
        if uuid not in self.watched and (uuid, instance) not in self.last_xid:
            return None, Counter()
        counts = Counter(self.recent[uuid, instance].last(self.orders["window"]))
        return self.last_xid.get((uuid, instance), 0), counts

    def _count_clocks(self, handle: Any, uuid: str, gpu: dict[str, Any], wanted: frozenset[str]) -> None:
        """Count, for each reason, the samples of the window in which it held."""
        reasons = try_(read_clock_reasons, handle) if CLOCK_COUNT in wanted else None
        if not reasons:
            return
        self.reasons[uuid].note(reasons["DCGM_FI_DEV_CLOCKS_EVENT_REASONS"])
        held = self.reasons[uuid].last(self.orders["clock_window"])
        gpu["clocks"] = {name: sum(bool(each & bit) for each in held) for name, bit in CLOCK_EVENTS.items()}


def _start(handle: Any, instance: int) -> int:
    """Return the first memory slice of a GPU instance, -1 where we may not ask (without the right to monitor MIG)."""
    found = try_(pynvml.nvmlDeviceGetGpuInstanceById, handle, instance)
    info = try_(pynvml.nvmlGpuInstanceGetInfo, found) if found is not None else None
    return -1 if info is None else int(info.placement.start)
