"""The text that Prometheus reads (exposition format 0.0.4), with dcgm-exporter's labels in their order: pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ocigpu.exporter.collectors import Collector
from ocigpu.exporter.metrics import CLOCK_COUNT, METRICS, XID, XID_COUNT, XID_MESSAGES, XID_TOTAL
from ocigpu.exporter.options import ExporterOptions, parse_devices
from ocigpu.exporter.owners import WHOLE, Key, VfioDevice
from ocigpu.exporter.pods import PodFacts
from ocigpu.exporter.sample import GpuSample, Instance, Sample, Values
from ocigpu.kubernetes.cluster.owners import Owner
from ocigpu.system.exposition import Pairs, head_lines, label_text, number_text

CLAIM_LABELS = ("dra_claim_name", "dra_claim_namespace", "dra_driver_name", "dra_pool_name", "dra_device_name")
GPU_UP, VFIO_ALLOCATED = "ocigpu_exporter_gpu_up", "ocigpu_exporter_vfio_gpu_allocated"
HEALTH = "ocigpu_gpu_health"
OWN_LABELS = frozenset((
    "GPU_I_ID", "GPU_I_PROFILE", "Hostname", "UUID", "clock_event", "container_name", "device", "dra_mig_device_uuid",
    "dra_mig_profile", "err_code", "err_msg", "gpu", "hpc_job", "iommu_group", "modelName", "pci_bus_id", "pod_name",
    "pod_namespace", "pod_uid", "reason", "uuid", "vgpu", "window_size_in_ms", "xid", "gpu_id", "gpu_uuid",
    "gpu_partition_id", "gpu_compute_partition_type", "gpu_memory_partition_type", "card_model", "serial_number",
    *CLAIM_LABELS, *(metric.name for metric in METRICS if metric.kind == "label"),
))  # fmt: skip
"""Names of labels that series may have, besides those of pods: a pod's label may have none of them."""
_UNKNOWN = PodFacts()


class Picture(NamedTuple):
    """A sample and its context.

    ``jobs``: names of jobs; ``split``: values of one owner of a shared GPU; ``pods``: facts by namespace and name;
    ``health``: why a GPU or instance is unhealthy, "" if it is well.
    """

    sample: Sample
    owners: "Mapping[Key, Sequence[Owner]]" = {}
    jobs: "Mapping[tuple[int, int], Sequence[str]]" = {}
    split: "Mapping[tuple[Key, Owner], Values]" = {}
    vfio: Sequence[VfioDevice] = ()
    pods: "Mapping[tuple[str, str], PodFacts]" = {}
    health: "Mapping[Key, str]" = {}


class _Entity(NamedTuple):
    """The subject of a series, a GPU or a GPU instance.

    ``labels``: those of every series, as text; ``variants``: of each owner and job, with the owner's own values;
    ``part``: the object with the XIDs.
    """

    values: Values
    labels: str
    variants: tuple[tuple[str, Values], ...]
    part: GpuSample | Instance
    clocks: "Mapping[str, int]" = {}


def render(collectors: Iterable[Collector], picture: Picture, options: ExporterOptions, hostname: str) -> bytes:
    """Return the series of all GPUs, by metric; a metric without any is left out.  ``hostname``: "" for no label.

    ``collectors`` chooses among dcgm-exporter's metrics; those that a vendor's folder describes are always there.
    """
    collectors = (*collectors, *(Collector(*metric) for metric in picture.sample.metrics))
    labels = [collector.metric for collector in collectors if collector.kind == "label"]
    host = _host_label(options, hostname)
    entities = list(_entities(picture, labels, options, host))
    lines: list[str] = []
    for collector in collectors:
        if collector.kind == "label":
            continue
        series = [line for entity in entities for line in _series(collector, entity, options)]
        if series:
            lines += head_lines(collector.name, collector.kind, collector.help)
            lines += series
    if picture.sample.gpus:
        lines += head_lines(GPU_UP, "gauge", "Whether this GPU answers.")
        for gpu in picture.sample.gpus:
            lines.append(f"{GPU_UP}{{{label_text((*_gpu_labels(gpu, options), *host))}}} {int(not gpu.error)}")
    lines += _health(picture, options, host)
    lines += _vfio(picture, options, host)
    return "".join(f"{line}\n" for line in lines).encode()


def _host_label(options: ExporterOptions, hostname: str) -> Pairs:
    return () if options.no_hostname or not hostname else ((options.hostname_label, hostname),)


def _gpu_labels(gpu: GpuSample, options: ExporterOptions) -> Pairs:
    if gpu.names:
        return tuple(gpu.names.items())
    model = gpu.name.replace(" ", "-") if options.replace_blanks_in_model_name else gpu.name
    return (
        ("gpu", str(gpu.number)),
        ("uuid" if options.use_old_namespace else "UUID", gpu.uuid),
        ("pci_bus_id", gpu.bus_id),
        ("device", f"nvidia{gpu.number}"),
        ("modelName", model),
    )


def _entities(picture: Picture, labels: Sequence[str], options: ExporterOptions, host: Pairs) -> Iterable[_Entity]:
    devices = parse_devices(options.devices)
    for gpu in picture.sample.gpus:
        if gpu.error:
            continue
        if gpu.names:  # only NVIDIA's GPUs have these numbers and instances
            yield _Entity(
                gpu.values, label_text((*gpu.names.items(), *host)), _variants(picture, gpu, None, options), gpu
            )
            continue
        if devices.gpus and gpu.number not in devices.gpus:
            continue
        known = {**picture.sample.labels, **gpu.labels}
        fields = tuple((name, known[name]) for name in labels if name in known)
        if devices.kind == "g" or (devices.kind == "f" and not gpu.instances):
            variants = _variants(picture, gpu, None, options)
            names = label_text((*_gpu_labels(gpu, options), *host, *fields))
            yield _Entity(gpu.values, names, variants, gpu, gpu.clocks)
            continue
        for instance in gpu.instances:
            mig = (("GPU_I_PROFILE", instance.profile), ("GPU_I_ID", str(instance.number)))
            names = label_text((*_gpu_labels(gpu, options), *mig, *host, *fields))
            variants = _variants(picture, gpu, instance, options)
            yield _Entity(_of_instance(gpu, instance), names, variants, instance, gpu.clocks)


def _of_instance(gpu: GpuSample, instance: Instance) -> Values:
    """Return an instance's own values and, of what only the whole GPU has such as its temperature, the GPU's."""
    whole = {name: value for name, value in gpu.values.items() if "_FB_" not in name}
    return {**whole, **instance.values}


def _variants(
    picture: Picture, gpu: GpuSample, instance: Instance | None, options: ExporterOptions
) -> tuple[tuple[str, Values], ...]:
    number = instance.number if instance else WHOLE
    owners = picture.owners.get((gpu.uuid, number), ())
    jobs = () if gpu.names else picture.jobs.get((gpu.number, number), ())
    found: list[tuple[str, Values]] = []
    for owner in owners or (None,):
        pairs = _owner_labels(owner, options, picture.pods) if owner else ()
        if instance and owner and owner.claim and options.kubernetes_enable_dra:
            pairs += (("dra_mig_profile", instance.profile), ("dra_mig_device_uuid", instance.uuids[0]))
        values = picture.split.get(((gpu.uuid, number), owner), {}) if owner else {}
        labels = picture.pods.get((owner.namespace, owner.pod), _UNKNOWN).labels if owner else ()
        found += [
            (label_text((*pairs, *((("hpc_job", job),) if job else ()), *labels)), values) for job in jobs or ("",)
        ]
    return tuple(found)


def _owner_labels(owner: Owner, options: ExporterOptions, pods: "Mapping[tuple[str, str], PodFacts]") -> Pairs:
    names = ("pod_name", "pod_namespace", "container_name") if options.use_old_namespace else (
        "pod", "namespace", "container"
    )  # fmt: skip
    pairs = tuple(zip(names, owner[:3], strict=True))
    if options.kubernetes_enable_pod_uid:
        pairs = (*pairs, ("pod_uid", pods.get((owner.namespace, owner.pod), _UNKNOWN).uid))
    if owner.vgpu:
        pairs = (*pairs, ("vgpu", owner.vgpu))
    if owner.claim and options.kubernetes_enable_dra:
        pairs += tuple(zip(CLAIM_LABELS, owner.claim, strict=True))
    return pairs


def _counts(name: str, entity: _Entity, options: ExporterOptions) -> Sequence[tuple[Pairs, float]]:
    """Return the values of a metric that has labels of its own, with these."""
    xid = entity.part.xid
    if name == XID and xid is not None:
        return [((("err_code", str(xid)), ("err_msg", XID_MESSAGES.get(xid, "Unknown Error"))), xid)]
    if name == XID_COUNT:
        window = ("window_size_in_ms", f"{options.xid_count_window_size * 1000:.0f}")
        return [((window, ("xid", str(number))), count) for number, count in entity.part.xids.items()]
    if name == XID_TOTAL:
        return [((("xid", str(number)),), count) for number, count in entity.part.xid_totals.items()]
    if name == CLOCK_COUNT:
        window = ("window_size_in_ms", f"{options.clock_events_count_window_size * 1000:.0f}")
        return [((("clock_event", event), window), count) for event, count in entity.clocks.items()]
    return []


def _series(collector: Collector, entity: _Entity, options: ExporterOptions) -> Iterable[str]:
    name = collector.metric
    value = entity.values.get(name)
    for pairs, number in _counts(name, entity, options) if value is None else (((), value),):
        known = f"{entity.labels},{label_text(pairs)}" if pairs else entity.labels
        for labels, own in entity.variants:
            separator = "," if labels else ""
            yield f"{collector.name}{{{known}{separator}{labels}}} {number_text(own.get(name, number))}"


def _health(picture: Picture, options: ExporterOptions, host: Pairs) -> list[str]:
    """Return the health of GPUs, and of the instances of those that have any."""
    devices, lines = parse_devices(options.devices), []
    for gpu in picture.sample.gpus:
        if devices.gpus and gpu.number not in devices.gpus:
            continue
        places = [((), WHOLE), *(((("GPU_I_PROFILE", each.profile), ("GPU_I_ID", str(each.number))), each.number)
                                 for each in gpu.instances)]  # fmt: skip
        for mig, number in places:
            reason = picture.health.get((gpu.uuid, number))
            if reason is not None:
                labels = (*_gpu_labels(gpu, options), *mig, *host, ("reason", reason))
                lines.append(f"{HEALTH}{{{label_text(labels)}}} {int(not reason)}")
    head = head_lines(HEALTH, "gauge", "Whether this GPU or GPU instance is healthy, as the device plugin judges.")
    return [*head, *lines] if lines else []


def _vfio(picture: Picture, options: ExporterOptions, host: Pairs) -> list[str]:
    if not picture.vfio:
        return []
    lines = head_lines(
        VFIO_ALLOCATED, "gauge", "Whether a pod has this GPU, which is for virtual machines and unknown to NVML."
    )
    for device in picture.vfio:
        labels = (("pci_bus_id", device.bus_id), ("iommu_group", str(device.group)), *host)
        for owner in device.owners or (None,):
            pairs = _owner_labels(owner, options, picture.pods) if owner else ()
            lines.append(f"{VFIO_ALLOCATED}{{{label_text((*labels, *pairs))}}} {int(bool(owner))}")
    return lines
