"""The parent's side of the process that asks NVML: starts it, waits for samples, and replaces it when it hangs."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.libraries import find_libraries, find_nvml, library_versions, native_machine
from ocigpu.gpus.nvidia.nvml import UNUSABLE
from ocigpu.gpus.nvidia.procfs import read_kernel_version
from ocigpu.gpus.tree import Tree, find_roots
from ocigpu.kubernetes.exporter.sample import Sample, parse_sample
from ocigpu.kubernetes.nvml_process import REAP, command

DEADLINE = 20.0
"""Seconds that a sample may be late: waking up an idle GPU takes one or two."""
FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0
STUCK = "the process that asks NVML was killed and does not end: it is stuck in the driver"
MAX_LINE = 16 << 20


class Orders(NamedTuple):
    """What is to be sampled; see :mod:`~ocigpu.kubernetes.exporter.sampler_child`."""

    wanted: tuple[str, ...]
    interval: float
    window: float
    clock_window: float
    processes: bool = False
    poll: float = 0.0


class Sampler:
    """At most one process at a time, also when one that was killed does not end: it may hold the driver's locks."""

    def __init__(self, settings: Settings, deadline: float = DEADLINE) -> None:
        self._settings = settings
        self._deadline = deadline
        self._orders: Orders | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._stuck: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._heard = 0.0
        self._due = 0.0
        self._delay = 0.0

    def order(self, orders: Orders) -> None:
        """Sample as these say from now on."""
        self._orders = orders
        if self._child:
            self._send(orders)

    def wait(self, seconds: float) -> Sequence[Sample]:
        """Wait so long for samples; return those that came, and one with an error when something is wrong."""
        if self._child is None:
            problem = self._start()
            if problem or self._child is None:
                time.sleep(seconds)
                return [Sample(error=problem)] if problem else []
        assert self._child.stdout
        assert self._orders
        now = time.monotonic()
        if not select.select([self._child.stdout], [], [], seconds)[0]:
            if now - self._heard > self._orders.interval + self._deadline:
                return [self._replace(f"NVML did not answer within {self._orders.interval + self._deadline:g} s")]
            return []
        data = os.read(self._child.stdout.fileno(), 1 << 20)
        *lines, self._pending = (self._pending + data).split(b"\n")
        samples = [self._parse(line) for line in lines]
        if lines:
            self._heard = time.monotonic()
        if any(not sample.error for sample in samples):
            self._delay = 0.0
        if not data:
            self._child.kill()
            status = _reap(self._child)
            samples.append(self._replace(f"the process that asks NVML ended (status {status})"))
        elif len(self._pending) > MAX_LINE:
            samples.append(self._replace(f"the process that asks NVML wrote a line of more than {MAX_LINE} bytes"))
        return samples

    def kill(self) -> None:
        """Kill the process when this one is about to end; may be called from another thread."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """End the process, without waiting for one that is stuck in the driver."""
        if self._child is None:
            return
        self._child.kill()
        for stream in (self._child.stdin, self._child.stdout):
            if stream:
                stream.close()
        if _reap(self._child) is None:
            self._stuck = self._child
        self._child, self._pending = None, b""

    def _replace(self, problem: str) -> Sample:
        self.close()
        self._delay = min(max(2 * self._delay, FIRST_RETRY), LONGEST_RETRY)
        self._due = time.monotonic() + self._delay
        return Sample(error=problem)

    def _start(self) -> str:
        """Start the process if it is time; returns why it cannot be started, "" if nothing is wrong."""
        if self._stuck is not None and self._stuck.poll() is not None:
            self._stuck = None
        if self._orders is None or time.monotonic() < self._due:
            return ""
        if self._stuck is not None:  # told again and again, so that old values are dropped in the end
            return self._replace(STUCK).error
        roots = find_roots(self._settings)
        library = find_library(self._settings)
        if not library:
            return self._replace(f"there is no NVML library below {roots.driver or '/'}").error
        words = command(
            "ocigpu.kubernetes.exporter.sampler_child",
            library,
            self._settings.simulation_root,
            str(os.getpid()),
            f"{roots.proc}/driver/nvidia/gpus",
        )
        try:
            self._child = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                process_group=0,
                bufsize=0,
            )
        except OSError as error:
            return self._replace(f"{sys.executable}: {error.strerror}").error
        self._heard = time.monotonic()
        self._send(self._orders)
        return ""

    def _send(self, orders: Orders) -> None:
        assert self._child
        assert self._child.stdin
        try:
            self._child.stdin.write(json.dumps(orders._asdict()).encode() + b"\n")
        except BrokenPipeError:  # it has ended: the next look finds that out
            return

    def _parse(self, line: bytes) -> Sample:
        try:
            return parse_sample(json.loads(line))
        except UNUSABLE:
            return Sample(error="NVML gave no usable answer")


def find_library(settings: Settings) -> str:
    """Return the path of the host's NVML library, "" for none.  Only reads files."""
    roots = find_roots(settings)
    tree, machine = Tree(roots.driver), native_machine()
    kernel = read_kernel_version(roots.proc, roots.sys)
    paths, _ = find_libraries(tree, settings.driver_ldcache, kernel, machine)
    versions = library_versions(paths)
    found = find_nvml(paths, kernel or (versions[0] if versions else ""), tree, machine)
    return tree.host(found) if found else ""


def _reap(child: "subprocess.Popen[bytes]") -> int | None:
    """Return the status of a killed child, None for one that does not end: it is stuck in the kernel."""
    try:
        return child.wait(REAP)
    except subprocess.TimeoutExpired:
        return None
