"""``ocigpu exporter``: samples, pods and the list of metrics become the page that is handed out, until SIGTERM.

One thread collects, and nothing that hangs there delays a page: NVML is another process, the kubelet has a deadline.
Pages are answered in threads of their own, signals are waited for by the first thread.
"""

import math
import os
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ocigpu import __version__
from ocigpu.core.errors import HostError, SettingsError, as_own_error
from ocigpu.core.settings import Settings
from ocigpu.exporter.collectors import Collector, read_collectors
from ocigpu.exporter.exposition import Picture, render
from ocigpu.exporter.options import ExporterOptions, parse_address
from ocigpu.exporter.owners import Owners, VfioDevice, find_owners, find_vfio_owners, read_jobs
from ocigpu.exporter.sample import GpuSample, Sample
from ocigpu.exporter.sampler import DEADLINE, Orders, Sampler
from ocigpu.exporter.shares import find_split, read_pod_uids
from ocigpu.gpus.tree import find_roots, normal_bus_id
from ocigpu.gpus.vfio.facts import read_vfio_facts
from ocigpu.system.exposition import render_number
from ocigpu.system.pages import Page, WebServer, make_page
from ocigpu.system.service import FollowedFile, ServiceLog, Signals

if TYPE_CHECKING:
    from ocigpu.kubernetes.cluster.pods import Listing

LOOK = 0.5
"""Seconds between looks at the list of metrics."""
PAUSE = 10.0
"""Seconds after a defect."""
STALE_INTERVALS, STALE_SECONDS = 10, 300.0
"""Values older than both are no longer handed out."""


GONE = "NVML does not know it any more"


class Standing(NamedTuple):
    """How the exporter itself does.  Times are of the monotonic clock; ``pods_seconds``: -1 while nobody was asked."""

    sampled: float = 0.0
    seconds: float = 0.0
    done: int = 0
    failed: int = 0
    problem: str = "no sample yet"
    pods_problem: str = ""
    pods_seconds: float = -1.0
    collectors_problem: str = ""


class ExporterService:
    """The exporter; :meth:`run` works until it is told to end.

    Raises SettingsError (OCIGPU-KUBE-4) for a list of metrics that cannot be read, and HostError (OCIGPU-KUBE-3) when
    it cannot listen.  ``deadline``: seconds that a sample may be late.
    """

    def __init__(
        self, options: ExporterOptions, settings: Settings, log: ServiceLog, deadline: float = DEADLINE
    ) -> None:
        self.options = options
        self.settings = settings
        self.log = log
        self.hostname = os.environ.get("NODE_NAME") or os.uname().nodename
        self.page = Page()
        self.standing = Standing()
        self.reloading = False
        self._reload = threading.Event()
        self._known: dict[int, GpuSample] = {}
        self._seen: dict[str, GpuSample] = {}
        self.sampler = Sampler(settings, deadline)
        self._file = FollowedFile(options.collectors)
        self.collectors = self._read_collectors()
        host, port = parse_address(options.address)
        self.web = WebServer(host, port, lambda: self.page, self.own_metrics, lambda: self.reloading)

    def run(self) -> None:
        """Collect and serve until SIGTERM, SIGINT or SIGQUIT; SIGHUP reads the list of metrics again."""
        with Signals() as signals:
            for work in (self.web.serve_forever, self.collect):
                threading.Thread(target=work, daemon=True).start()
            self.log("info", f"listening on port {self.web.server_port}", port=self.web.server_port)
            while not signals.stopping:
                signals.wait(math.inf)
                if signals.take_again():
                    self._reload.set()
        self.log("info", "ending")
        self.sampler.kill()

    # collecting

    def collect(self) -> None:
        """Sample and make pages until the program ends; a defect is logged, and the work starts again."""
        while True:
            try:
                self._collect_on()
            except Exception as error:  # noqa: BLE001 - a defect of ours is logged, and the work starts again
                problem = as_own_error(error).message
                self.log.once("defect", "error", problem)
                self.standing = self.standing._replace(failed=self.standing.failed + 1, problem=problem)
                time.sleep(PAUSE)

    def _collect_on(self) -> None:
        self._order()
        while True:
            if self._file.has_changed() | self._reload.is_set():
                self._reload.clear()
                self._read_again()
            samples = self.sampler.wait(LOOK)
            good = [sample for sample in samples if not sample.error]
            for sample in samples:
                if sample.error or sample is good[-1]:  # those that came while the kubelet was waited for are old
                    self._take(sample)

    def _order(self) -> None:
        options = self.options
        self.sampler.order(
            Orders(
                tuple(collector.metric for collector in self.collectors),
                options.collect_interval,
                options.xid_count_window_size,
                options.clock_events_count_window_size,
                processes=options.kubernetes_virtual_gpus,
                poll=options.gpu_bind_unbind_poll_interval if options.enable_gpu_bind_unbind_watch else 0.0,
            )
        )

    def _read_collectors(self) -> tuple[Collector, ...]:
        collectors, notes = read_collectors(self.options.collectors)
        for note in notes:
            self.log("warning", note)
        return collectors

    def _read_again(self) -> None:
        """Follow a list of metrics that has changed; a bad one changes nothing."""
        self.reloading = True
        try:
            self.collectors = self._read_collectors()
        except SettingsError as error:
            self.log.once("collectors", "error", f"{error.message}; the previous list stays in force")
            self.standing = self.standing._replace(collectors_problem=error.message)
        else:
            self.log.forget("collectors")
            self.log("info", f"the list of metrics was read again: {len(self.collectors)}")
            self.standing = self.standing._replace(collectors_problem="")
            self._order()
        finally:
            self.reloading = False

    def _take(self, sample: Sample) -> None:
        """Make the page of a sample; one that failed leaves the page of before, for a while."""
        now = time.monotonic()
        standing = self.standing
        if sample.error:
            self.log.once("nvml", "error", f"no metrics of GPUs: {sample.error}")
            self.standing = standing._replace(failed=standing.failed + 1, problem=sample.error)
            limit = max(STALE_SECONDS, STALE_INTERVALS * self.options.collect_interval)
            if not standing.done or now - standing.sampled > limit:
                self._publish(Sample())
            return
        if standing.problem and standing.done:
            self.log.once("nvml", "info", "NVML answers again")
        self.log.forget("nvml")
        gpus = tuple(map(self._remember, sample.gpus))
        sample = sample._replace(gpus=(*gpus, *self._find_gone(gpus, sample.listed)))
        if self.options.debug:
            self.log("debug", f"sample of {len(sample.gpus)} GPUs in {sample.seconds} s", seconds=sample.seconds)
        self._publish(sample)
        self.standing = self.standing._replace(sampled=now, seconds=sample.seconds, done=standing.done + 1, problem="")

    def _remember(self, gpu: GpuSample) -> GpuSample:
        """Return the GPU with the names that it had: a lost one does not tell them."""
        if not gpu.error:
            if self.log.forget(f"gpu{gpu.number}"):
                self.log("info", f"GPU {gpu.number} answers again", gpu=gpu.number)
            self._known[gpu.number] = self._seen[normal_bus_id(gpu.bus_id)] = gpu
            return gpu
        self.log.once(f"gpu{gpu.number}", "error", f"GPU {gpu.number}: {gpu.error}")
        known = self._known.get(gpu.number, gpu)
        return gpu._replace(uuid=gpu.uuid or known.uuid, bus_id=gpu.bus_id or known.bus_id, name=gpu.name or known.name)

    def _find_gone(self, gpus: Iterable[GpuSample], listed: Iterable[str]) -> list[GpuSample]:
        """Return the GPUs that NVML no longer has although the kernel's driver does: they fell off the bus.

        Those that neither has were taken away, for instance for a virtual machine.
        """
        left = set(map(normal_bus_id, listed)) - {normal_bus_id(gpu.bus_id) for gpu in gpus}
        return [self._remember(GpuSample(*gpu[:4], error=GONE)) for name, gpu in self._seen.items() if name in left]

    def _publish(self, sample: Sample) -> None:
        owners, vfio, split = Owners(), list[VfioDevice](), {}
        if self.options.kubernetes:
            listing = self._list_containers()
            owners = find_owners(
                listing.held,
                sample.gpus,
                self.options.resource_prefixes,
                self.options.nvidia_resource_names,
                self.options.kubernetes_virtual_gpus,
                listing.claimed,
            )
            if self.options.kubernetes_virtual_gpus:
                split = find_split(sample.gpus, owners.gpus, read_pod_uids(listing.held))
            try:
                facts = read_vfio_facts(find_roots(self.settings))
            except HostError as error:
                self.log.once("vfio", "warning", error.message)
            else:
                vfio = find_vfio_owners(facts.candidates, owners.others, listing.claimed)
        jobs = read_jobs(self.options.hpc_job_mapping_dir)
        picture = Picture(sample, owners.gpus, jobs, split, vfio)
        self.page = make_page(render(self.collectors, picture, self.options, self.hostname))

    def _list_containers(self) -> "Listing":
        from ocigpu.kubernetes.cluster.pods import list_containers  # grpcio, which only this needs

        begin = time.monotonic()
        listing = list_containers(self.options.pod_resources_kubelet_socket)
        if listing.problem:
            self.log.once("pods", "error", f"no labels of pods: {listing.problem}")
        elif self.log.forget("pods"):
            self.log("info", "the kubelet answers again")
        self.standing = self.standing._replace(
            pods_problem=listing.problem, pods_seconds=round(time.monotonic() - begin, 6)
        )
        return listing

    # about itself

    def own_metrics(self) -> bytes:
        """Return what the exporter says of itself, now."""
        now = self.standing
        age = round(time.monotonic() - now.sampled, 3)
        asked = now.pods_seconds >= 0
        results = ((("result", "ok"),), now.done), ((("result", "failed"),), now.failed)

        def gauge(name: str, text: str, value: float | None, *labels: tuple[str, str]) -> str:
            return "" if value is None else render_number(name, "gauge", text, (labels, value))

        lines = [
            gauge("ocigpu_exporter_info", "The exporter's version.", 1, ("version", __version__)),
            gauge("ocigpu_exporter_up", "Whether NVML answered when it was asked last.", not now.problem),
            render_number("ocigpu_exporter_samples_total", "counter", "How often NVML was asked.", *results),
            gauge("ocigpu_exporter_collectors_up", "Whether the list of metrics in force is the latest.",
                  not now.collectors_problem),
            gauge("ocigpu_exporter_sample_age_seconds", "Age of the GPUs' values.", age if now.done else None),
            gauge("ocigpu_exporter_sample_duration_seconds", "How long NVML took.", now.seconds if now.done else None),
            gauge("ocigpu_exporter_pod_resources_up", "Whether the kubelet answered when it was asked last.",
                  not now.pods_problem if asked else None),
            gauge("ocigpu_exporter_pod_resources_duration_seconds", "How long the kubelet took.",
                  now.pods_seconds if asked else None),
        ]  # fmt: skip
        return "".join(lines).encode()
