"""The parent's side of the process that asks NVML, or samples another vendor's GPUs.

It starts that process, waits for samples, and replaces it when it hangs.
"""

import json
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from ocigpu.core.errors import UNUSABLE
from ocigpu.core.settings import Settings
from ocigpu.core.vendors import FIRST
from ocigpu.exporter.sample import Sample, parse_sample
from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vendors import load_vendor
from ocigpu.system.module_process import ModuleProcess
from ocigpu.system.service import Backoff

DEADLINE = 20.0
"""Seconds that a sample may be late: waking up an idle GPU takes one or two."""
FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0
STUCK = "the process that asks {} was killed and does not end: it is stuck in the driver"
MAX_LINE = 16 << 20


class Orders(NamedTuple):
    """The orders for sampling; see :mod:`~ocigpu.exporter.sampler_child`."""

    wanted: tuple[str, ...]
    interval: float
    window: float
    clock_window: float
    processes: bool = False
    poll: float = 0.0


class Sampler:
    """Runs at most one process at a time, even if a killed one does not end: it may hold the driver's locks.

    ``deadline``: seconds that a sample may be late, changeable; ``retry``: when the next process is started;
    ``vendor``: whose GPUs are sampled.
    """

    def __init__(
        self, settings: Settings, deadline: float = DEADLINE, retry: Backoff | None = None, vendor: str = FIRST
    ) -> None:
        self._settings = settings
        self._vendor = vendor
        self._asked = "NVML" if vendor == FIRST else f"the driver of {vendor}"
        self.deadline = deadline
        self._orders: Orders | None = None
        self._stream = ModuleProcess(alone=True)
        self._heard = 0.0
        self._retry = retry or Backoff(FIRST_RETRY, LONGEST_RETRY)

    def order(self, orders: Orders) -> None:
        """Sample as these say from now on."""
        self._orders = orders
        if self._stream.child:
            self._send(orders)

    def wait(self, seconds: float) -> Sequence[Sample]:
        """Wait so long for samples; return those that came, and one with an error when something is wrong."""
        if self._stream.child is None:
            problem = self._start()
            if problem or self._stream.child is None:
                time.sleep(seconds)
                return [Sample(error=problem)] if problem else []
        assert self._orders
        now = time.monotonic()
        lines, ended = self._stream.wait(seconds)
        if not (lines or ended) and now - self._heard > self._orders.interval + self.deadline:
            return [self._replace(f"{self._asked} did not answer within {self._orders.interval + self.deadline:g} s")]
        samples = [self._parse(line) for line in lines]
        if lines:
            self._heard = time.monotonic()
        if any(not sample.error for sample in samples):
            self._retry.reset()
        if ended:
            status = self._stream.close()
            samples.append(self._replace(f"the process that asks {self._asked} ended (status {status})"))
        elif len(self._stream.unfinished) > MAX_LINE:
            samples.append(
                self._replace(f"the process that asks {self._asked} wrote a line of more than {MAX_LINE} bytes")
            )
        return samples

    def kill(self) -> None:
        """Kill the process when this one is about to end; may be called from another thread."""
        child = self._stream.child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """End the process, without waiting if it is stuck in the driver."""
        self._stream.close()

    def _replace(self, problem: str) -> Sample:
        self._stream.close()
        self._retry.failed(time.monotonic())
        return Sample(error=problem)

    def _start(self) -> str:
        """Start the process if it is due; returns why it cannot be started, "" on success."""
        stuck = self._stream.is_stuck()
        if self._orders is None or time.monotonic() < self._retry.due:
            return ""
        if stuck:  # reported again and again, so that old values are finally dropped
            return self._replace(STUCK.format(self._asked)).error
        sample = load_vendor(self._vendor).sample
        words = sample(self._settings) if sample else ()
        if not words:
            what = "NVML library" if self._vendor == FIRST else f"driver of {self._vendor}"
            return self._replace(f"there is no {what} below {find_roots(self._settings).driver or '/'}").error
        try:
            self._stream.start(*words)
        except OSError as error:
            return self._replace(f"{sys.executable}: {error.strerror}").error
        self._heard = time.monotonic()
        self._send(self._orders)
        return ""

    def _send(self, orders: Orders) -> None:
        self._stream.send(json.dumps(orders._asdict()).encode())

    def _parse(self, line: bytes) -> Sample:
        try:
            return parse_sample(json.loads(line))
        except UNUSABLE:
            return Sample(error=f"{self._asked} gave no usable answer")
