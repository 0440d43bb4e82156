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
from ocigpu.core.vendors import FIRST
from ocigpu.exporter.collectors import Collector, read_collectors
from ocigpu.exporter.exposition import OWN_LABELS, Picture, render
from ocigpu.exporter.health import HealthWatch
from ocigpu.exporter.metrics import XID_TOTAL
from ocigpu.exporter.options import ExporterOptions, parse_address
from ocigpu.exporter.owners import Owners, VfioDevice, find_owners, find_vfio_owners, read_jobs
from ocigpu.exporter.pods import PodLookup, compile_allowlist
from ocigpu.exporter.sample import GpuSample, Sample, join_samples
from ocigpu.exporter.sampler import DEADLINE, Orders, Sampler
from ocigpu.exporter.shares import find_split, read_pod_uids
from ocigpu.gpus.tree import find_roots, normal_bus_id
from ocigpu.gpus.vendors import find_vendors, load_vendor
from ocigpu.gpus.vfio.facts import read_vfio_facts
from ocigpu.kubernetes.node.health import parse_policy
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


GONE = "NVML no longer lists it"


class Standing(NamedTuple):
    """The exporter's own state; ``defects``: the number of restarts of its work, ``defect``: why, until a sample came.

    ``pods_seconds``: -1 before the first query.
    """

    defects: int = 0
    defect: str = ""
    pods_problem: str = ""
    pods_seconds: float = -1.0
    collectors_problem: str = ""


class VendorSamples:
    """The GPUs of a vendor: what samples them, and what came of it.  Times are of the monotonic clock."""

    def __init__(self, vendor: str, settings: Settings, deadline: float, log: ServiceLog) -> None:
        self.sampler = Sampler(settings, deadline, vendor=vendor)
        self.latest = Sample()
        self.sampled = self.seconds = 0.0
        self.done = self.failed = 0
        self.problem = "no sample yet"
        self._log = log
        self._topic, self._whose = ("nvml", "NVML") if vendor == FIRST else (vendor, f"the driver of {vendor}")
        self._prefix = "" if vendor == FIRST else f"{vendor} "
        self._known: dict[int, GpuSample] = {}
        self._seen: dict[str, GpuSample] = {}

    def take(self, sample: Sample, now: float, limit: float) -> bool:
        """Take in a sample; a failed one leaves the former values for ``limit`` seconds.

        Returns whether the values have changed.
        """
        if sample.error:
            self._log.once(self._topic, "error", f"no metrics of {self._prefix}GPUs: {sample.error}")
            self.failed, self.problem = self.failed + 1, sample.error
            if self.done and now - self.sampled <= limit:
                return False
            self.latest = Sample()
            return True
        if self.problem and self.done:
            self._log.once(self._topic, "info", f"{self._whose} answers again")
        self._log.forget(self._topic)
        gpus = tuple(map(self._remember, sample.gpus))
        self.latest = sample._replace(gpus=(*gpus, *self._find_gone(gpus, sample.listed)))
        self.sampled, self.seconds, self.done, self.problem = now, sample.seconds, self.done + 1, ""
        return True

    def _remember(self, gpu: GpuSample) -> GpuSample:
        """Return the GPU with the names that it had: a lost one does not tell them."""
        title = f"{self._prefix}GPU {gpu.number}"
        if not gpu.error:
            if self._log.forget(title):
                self._log("info", f"{title} answers again", gpu=gpu.number)
            self._known[gpu.number] = self._seen[normal_bus_id(gpu.bus_id)] = gpu
            return gpu
        self._log.once(title, "error", f"{title}: {gpu.error}")
        known = self._known.get(gpu.number, gpu)
        return gpu._replace(uuid=gpu.uuid or known.uuid, bus_id=gpu.bus_id or known.bus_id, name=gpu.name or known.name)

    def _find_gone(self, gpus: Iterable[GpuSample], listed: Iterable[str]) -> list[GpuSample]:
        """Return the GPUs that NVML no longer has although the kernel's driver does: they fell off the bus.

        Those that neither has were taken away, for instance for a virtual machine.
        """
        left = set(map(normal_bus_id, listed)) - {normal_bus_id(gpu.bus_id) for gpu in gpus}
        return [self._remember(GpuSample(*gpu[:4], error=GONE)) for name, gpu in self._seen.items() if name in left]


class ExporterService:
    """The exporter; :meth:`run` works until it is stopped.

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
        self._deadline = deadline
        self.sources: dict[str, VendorSamples] = {}
        """By the names of vendors."""
        self._file = FollowedFile(options.collectors)
        self.collectors = self._read_collectors()
        allowed = compile_allowlist(options.kubernetes_pod_label_allowlist_regex)
        asks = options.kubernetes and (options.kubernetes_enable_pod_labels or options.kubernetes_enable_pod_uid)
        labels = allowed if options.kubernetes_enable_pod_labels else None
        self.pods = PodLookup(labels, OWN_LABELS) if asks else None
        policy, notes = parse_policy(options.disabled_health_checks, options.enabled_health_checks)
        for note in notes:
            log("warning", note)
        self.health = HealthWatch(policy)
        host, port = parse_address(options.address)
        self._find_sources()
        self.web = WebServer(host, port, lambda: self.page, self.own_metrics, lambda: self.reloading)

    def run(self) -> None:
        """Collect and serve until SIGTERM, SIGINT or SIGQUIT; SIGHUP reads the list of metrics again."""
        with Signals() as signals:
            if self.pods:
                self.pods.start()
            for work in (self.web.serve_forever, self.collect):
                threading.Thread(target=work, daemon=True).start()
            self.log("info", f"listening on {self.web.address}", port=self.web.server_port)
            while not signals.stopping:
                signals.wait(math.inf)
                if signals.take_again():
                    self._reload.set()
        self.log("info", "ending")
        for source in list(self.sources.values()):
            source.sampler.kill()

    # collecting

    def collect(self) -> None:
        """Sample and make pages until the program ends; a defect is logged, and the work starts again."""
        while True:
            try:
                self._collect_on()
            except Exception as error:  # noqa: BLE001 - a defect of ours is logged, and the work starts again
                problem = as_own_error(error).message
                self.log.once("defect", "error", problem)
                self.standing = self.standing._replace(defects=self.standing.defects + 1, defect=problem)
                time.sleep(PAUSE)

    def _collect_on(self) -> None:
        self._order()
        while True:
            self._find_sources()
            if self._file.has_changed() | self._reload.is_set():
                self._reload.clear()
                self._read_again()
            for source in self.sources.values():
                samples = source.sampler.wait(LOOK / len(self.sources))
                good = [sample for sample in samples if not sample.error]
                for sample in samples:
                    if sample.error or sample is good[-1]:  # those that came while the kubelet was waited for are old
                        self._take(source, sample)

    def _find_sources(self) -> None:
        """Sample the GPUs of the vendors whose driver the host has now, or else of NVIDIA, once there is one.

        A vendor whose driver is gone fails from then on.
        """
        try:
            here = [name for name in find_vendors(self.settings) if load_vendor(name).sample]
        except HostError:  # a file of the kernel that cannot be read now
            here = list(self.sources)
        here = here or [FIRST]
        for name in here:
            if name not in self.sources:
                source = VendorSamples(name, self.settings, self._deadline, self.log)
                source.sampler.order(self._orders())
                self.sources = {**self.sources, name: source}
        for name in self.sources.keys() - here:
            if not self.sources[name].done:
                self.sources[name].sampler.close()
                self.sources = {kept: source for kept, source in self.sources.items() if kept != name}

    def _order(self) -> None:
        for source in self.sources.values():
            source.sampler.order(self._orders())

    def _orders(self) -> Orders:
        options = self.options
        return Orders(
            tuple(dict.fromkeys((*(collector.metric for collector in self.collectors), XID_TOTAL))),
            options.collect_interval,
            options.xid_count_window_size,
            options.clock_events_count_window_size,
            processes=options.kubernetes_virtual_gpus,
            poll=options.gpu_bind_unbind_poll_interval if options.enable_gpu_bind_unbind_watch else 0.0,
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

    def _take(self, source: VendorSamples, sample: Sample) -> None:
        """Make the page of a sample; a failed one leaves the former page for a while."""
        limit = max(STALE_SECONDS, STALE_INTERVALS * self.options.collect_interval)
        if source.take(sample, time.monotonic(), limit):
            if self.options.debug and not sample.error:
                self.log("debug", f"sample of {len(sample.gpus)} GPUs in {sample.seconds} s", seconds=sample.seconds)
            if source is self.sources.get(FIRST):
                self.health.take(source.latest.gpus, time.monotonic())
            self._publish()
        if not sample.error:
            self.standing = self.standing._replace(defect="")

    def _publish(self) -> None:
        sample = join_samples(source.latest for source in self.sources.values())
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
            uids = read_pod_uids(listing.held) if self.options.kubernetes_virtual_gpus else {}
            if self.pods:
                self._follow_pods(self.pods, owners)
                uids |= {pod: facts.uid for pod, facts in self.pods.facts.items() if facts.uid}
            if self.options.kubernetes_virtual_gpus:
                split = find_split(sample.gpus, owners.gpus, uids)
            try:
                facts = read_vfio_facts(find_roots(self.settings))
            except HostError as error:
                self.log.once("vfio", "warning", error.message)
            else:
                vfio = find_vfio_owners(facts.candidates, owners.others, listing.claimed)
        jobs = read_jobs(self.options.hpc_job_mapping_dir)
        facts_of_pods = self.pods.facts if self.pods else {}
        picture = Picture(sample, owners.gpus, jobs, split, vfio, facts_of_pods, self.health.reasons)
        self.page = make_page(render(self.collectors, picture, self.options, self.hostname))

    def _follow_pods(self, pods: PodLookup, owners: Owners) -> None:
        """Have the pods with devices looked up, and log that it fails."""
        held = (owner for each in (owners.gpus, owners.others) for some in each.values() for owner in some)
        pods.follow((owner.namespace, owner.pod) for owner in held)
        if pods.problem:
            self.log.once("labels", "error", f"no labels or UIDs of new pods: {pods.problem}")
        elif self.log.forget("labels"):
            self.log("info", "the API server answers again")

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
        """Return the exporter's metrics about itself."""
        now, sources = self.standing, list(self.sources.values())
        done = [source for source in sources if source.done]
        age = round(time.monotonic() - min((source.sampled for source in done), default=0.0), 3)
        asked = now.pods_seconds >= 0
        count = sum(source.failed for source in sources) + now.defects
        results = ((("result", "ok"),), sum(source.done for source in sources)), ((("result", "failed"),), count)

        def gauge(name: str, text: str, value: float | None, *labels: tuple[str, str]) -> str:
            return "" if value is None else render_number(name, "gauge", text, (labels, value))

        lines = [
            gauge("ocigpu_exporter_info", "The exporter's version.", 1, ("version", __version__)),
            gauge("ocigpu_exporter_up", "Whether NVML, or each vendor's driver, answered the last query.",
                  not (now.defect or any(source.problem for source in sources))),
            render_number("ocigpu_exporter_samples_total", "counter", "Number of queries to drivers.", *results),
            gauge("ocigpu_exporter_collectors_up", "Whether the list of metrics in force is the latest.",
                  not now.collectors_problem),
            gauge("ocigpu_exporter_sample_age_seconds", "Age of the GPUs' values.", age if done else None),
            gauge("ocigpu_exporter_sample_duration_seconds", "How long the driver took, of several the slowest.",
                  max((source.seconds for source in done), default=None)),
            gauge("ocigpu_exporter_pod_resources_up", "Whether the kubelet answered the last query.",
                  not now.pods_problem if asked else None),
            gauge("ocigpu_exporter_pod_resources_duration_seconds", "How long the kubelet took.",
                  now.pods_seconds if asked else None),
            gauge("ocigpu_exporter_pod_lookup_up", "Whether the API server answered the last query about pods.",
                  not self.pods.problem if self.pods else None),
        ]  # fmt: skip
        return "".join(lines).encode()
