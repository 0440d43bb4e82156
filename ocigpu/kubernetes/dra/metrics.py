"""Prometheus metrics of the driver: calls of the kubelet, failures, prepared devices, published slices.

Names and labels of ``nvidia_dra_*`` are those of NVIDIA's driver (pkg/metrics/dra_requests.go of
github.com/NVIDIA/k8s-dra-driver-gpu), whose dashboards then work; ``error_type`` is the code of our error.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ocigpu import __version__
from ocigpu.core.errors import OcigpuError
from ocigpu.system.exposition import Pairs, render_histogram, render_number

BOUNDS = tuple(0.05 * 2**power for power in range(9))
OPERATIONS = ("prepare", "unprepare")
METRICS = {
    "nvidia_dra_requests_total": ("counter", "Calls of the kubelet that prepare or unprepare claims."),
    "nvidia_dra_request_duration_seconds": ("histogram", "Seconds of such a call."),
    "nvidia_dra_requests_inflight": ("gauge", "Such calls that run now."),
    "nvidia_dra_node_prepare_errors_total": ("counter", "Claims that could not be prepared, by error code."),
    "nvidia_dra_node_unprepare_errors_total": ("counter", "Claims that could not be unprepared, by error code."),
    "nvidia_dra_prepared_devices": ("gauge", "Devices of prepared claims, by type."),
    "ocigpu_dra_published_devices": ("gauge", "Devices in the slices that the API server has."),
    "ocigpu_dra_published_slices": ("gauge", "Slices of this node's pool."),
    "ocigpu_dra_tainted_devices": ("gauge", "Published devices with a taint, by its key and effect."),
    "ocigpu_dra_publish_errors_total": ("counter", "Attempts to publish that failed."),
    "ocigpu_dra_driver_info": ("gauge", "The driver's version."),
}
"""Types and help, by name; docs/METRICS.md is made of them.  Counters count since the driver was started."""
Series = list[tuple[Pairs, float]]


class DraMetrics:
    """Counts what the driver does; all methods may be called by several threads.

    ``prepared``: returns the number of prepared devices by type, and raises OcigpuError when it is not known.
    """

    def __init__(self, driver: str, node: str, prepared: Callable[[], Mapping[str, int]]) -> None:
        self._driver, self._node, self._prepared = driver, node, prepared
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._durations = {operation: ([0] * (len(BOUNDS) + 1), 0.0) for operation in OPERATIONS}
        self._errors: Counter[tuple[str, str]] = Counter()
        self._published: tuple[int, int] | None = None
        self._taints: Counter[tuple[str, str]] = Counter()
        self._publish_errors = 0

    @contextmanager
    def call(self, operation: str) -> Iterator[None]:
        """Count a call of the kubelet, and measure it."""
        begin = time.monotonic()
        with self._lock:
            self._running[operation] += 1
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            with self._lock:
                self._running[operation] -= 1
                self._calls[operation] += 1
                counts, total = self._durations[operation]
                counts[bisect_left(BOUNDS, seconds)] += 1
                self._durations[operation] = counts, total + seconds

    def failed(self, operation: str, code: str) -> None:
        """Count a claim that could not be prepared or unprepared."""
        with self._lock:
            self._errors[operation, code] += 1

    def published(self, devices: int, slices: int, taints: "Counter[tuple[str, str]]") -> None:
        """Record what the API server has now; ``taints``: how many devices have each key and effect."""
        with self._lock:
            self._published, self._taints = (devices, slices), taints

    def failed_to_publish(self) -> None:
        with self._lock:
            self._publish_errors += 1

    def render(self) -> bytes:
        """Return all of it in Prometheus' text format; what is not known has no series."""
        own: Pairs = (("driver", self._driver),)
        here: Pairs = (("node", self._node), *own)
        try:
            prepared = {"gpu": 0, **self._prepared()}
        except OcigpuError:
            prepared = {}
        with self._lock:
            found: dict[str, Series] = {
                "nvidia_dra_requests_total": [((*own, ("operation", name)), self._calls[name]) for name in OPERATIONS],
                "nvidia_dra_requests_inflight": [
                    ((*own, ("operation", name)), self._running[name]) for name in OPERATIONS
                ],
                **{
                    f"nvidia_dra_node_{name}_errors_total": [
                        ((*own, ("error_type", code)), number)
                        for (operation, code), number in sorted(self._errors.items())
                        if operation == name
                    ]
                    for name in OPERATIONS
                },
                "nvidia_dra_prepared_devices": [
                    ((*here, ("device_type", kind)), number) for kind, number in sorted(prepared.items())
                ],
                "ocigpu_dra_publish_errors_total": [(own, self._publish_errors)],
                "ocigpu_dra_driver_info": [((*own, ("version", __version__)), 1)],
            }
            if self._published:
                found["ocigpu_dra_published_devices"] = [(here, self._published[0])]
                found["ocigpu_dra_published_slices"] = [(here, self._published[1])]
                found["ocigpu_dra_tainted_devices"] = [
                    ((*here, ("taint", key), ("effect", effect)), number)
                    for (key, effect), number in sorted(self._taints.items())
                ]
            steps = [
                ((*own, ("operation", name)), list(counts), round(total, 6))
                for name, (counts, total) in self._durations.items()
            ]
        name = "nvidia_dra_request_duration_seconds"
        lines = [render_number(each, *METRICS[each], *series) for each, series in found.items() if series]
        return "".join((*lines, render_histogram(name, METRICS[name][1], BOUNDS, *steps))).encode()
