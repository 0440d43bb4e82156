"""What NVML can say of one GPU, as functions that return metrics by name; for the process of :mod:`~.sampler_child`.

Sources of numbers and units: nvml.h and NVIDIA's NVML API reference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from ocigpu.exporter.metrics import GPM_METRICS
from ocigpu.gpus.nvidia.nvml import BRANDS
from ocigpu.gpus.nvidia.nvml_verbs import try_

ALL_LINKS = 0xFFFFFFFF
MIB = 1 << 20
Values = dict[str, Any]
Reader = Callable[[Any], Values]
_DEV, _PROF = "DCGM_FI_DEV_", "DCGM_FI_PROF_"


READERS: list[tuple[tuple[str, ...], Reader]] = []
"""The metrics that each function gives."""


def _gives(*names: str, prefix: str = _DEV) -> Callable[[Callable[[Any], Sequence[Any]]], Reader]:
    """Turn a function that returns values in this order (None: unknown) into one that returns them by metric."""
    metrics = tuple(prefix + name for name in names)

    def make(function: Callable[[Any], Sequence[Any]]) -> Reader:
        def read(handle: Any) -> Values:
            return dict(zip(metrics, function(handle), strict=True))

        READERS.append((metrics, read))
        return read

    return make


@_gives("SM_CLOCK", "MEM_CLOCK", "VIDEO_CLOCK")
def _clocks(handle: Any) -> Sequence[Any]:
    return [try_(pynvml.nvmlDeviceGetClockInfo, handle, domain) for domain in (1, 2, 3)]  # NVML_CLOCK_SM, MEM, VIDEO


@_gives("GPU_UTIL", "MEM_COPY_UTIL")
def _utilization(handle: Any) -> Sequence[Any]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


@_gives("FB_TOTAL", "FB_FREE", "FB_USED", "FB_RESERVED", "FB_USED_PERCENT")
def read_memory(handle: Any) -> Sequence[Any]:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        reserved: int | None = memory.reserved
    except pynvml.NVMLError:  # drivers before 510 count reserved memory as used
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        reserved = None
    usable = memory.total - (reserved or 0)
    share = round(memory.used / usable, 4) if usable else None
    sizes = (memory.total, memory.free, memory.used, reserved)
    return *(None if size is None else size // MIB for size in sizes), share


@_gives("CLOCK_THROTTLE_REASONS", "CLOCKS_EVENT_REASONS")
def read_clock_reasons(handle: Any) -> Sequence[Any]:
    try:
        reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except pynvml.NVMLError:  # its name before driver 535
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return reasons, reasons


_POLICIES = ("POWER", "THERMAL", "SYNC_BOOST", "BOARD_LIMIT", "LOW_UTIL", "RELIABILITY")  # NVML_PERF_POLICY_*: 0 to 5


@_gives(*(f"{name}_VIOLATION" for name in _POLICIES))
def _violations(handle: Any) -> Sequence[Any]:
    found = [try_(pynvml.nvmlDeviceGetViolationStatus, handle, policy) for policy in range(len(_POLICIES))]
    return [status.violationTime if status else None for status in found]


@_gives("ECC_SBE_VOL_TOTAL", "ECC_DBE_VOL_TOTAL", "ECC_SBE_AGG_TOTAL", "ECC_DBE_AGG_TOTAL")
def _ecc(handle: Any) -> Sequence[Any]:
    places = [(kind, counter) for counter in (0, 1) for kind in (0, 1)]  # NVML_MEMORY_ERROR_TYPE_CORRECTED is 0
    return [try_(pynvml.nvmlDeviceGetTotalEccErrors, handle, *place) for place in places]


@_gives("RETIRED_SBE", "RETIRED_DBE", "RETIRED_PENDING")
def _retired(handle: Any) -> Sequence[Any]:
    pages = [try_(pynvml.nvmlDeviceGetRetiredPages, handle, cause) for cause in (0, 1)]  # NVML_PAGE_RETIREMENT_CAUSE_*
    pending = try_(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    return *(None if list_ is None else len(list_) for list_ in pages), pending


@_gives("CORRECTABLE_REMAPPED_ROWS", "UNCORRECTABLE_REMAPPED_ROWS", "ROW_REMAP_PENDING", "ROW_REMAP_FAILURE")
def _rows(handle: Any) -> Sequence[Any]:
    rows: Sequence[Any] = pynvml.nvmlDeviceGetRemappedRows(handle)
    return rows


_ERROR_FIELDS = {"CRC_FLIT": 38, "CRC_DATA": 45, "REPLAY": 52, "RECOVERY": 59}


@_gives("MEMORY_TEMP", *(f"NVLINK_{name}_ERROR_COUNT_TOTAL" for name in _ERROR_FIELDS), "NVLINK_BANDWIDTH_TOTAL")
def _fields(handle: Any) -> Sequence[Any]:
    wanted = [(82, 0), *((field, 0) for field in _ERROR_FIELDS.values()), (138, ALL_LINKS), (139, ALL_LINKS)]
    *counts, sent, received = (_field(value) for value in pynvml.nvmlDeviceGetFieldValues(handle, wanted))
    return *counts, None if sent is None or received is None else sent + received


LINKS = 18
"""NVLinks of a GPU at most, as DCGM numbers them."""


@_gives(*(f"NVLINK_BANDWIDTH_L{link}" for link in range(LINKS)))
def _links(handle: Any) -> Sequence[Any]:
    wanted = [(field, link) for link in range(LINKS) for field in (138, 139)]
    counts = [_field(value) for value in pynvml.nvmlDeviceGetFieldValues(handle, wanted)]
    pairs = zip(counts[::2], counts[1::2], strict=True)
    return [None if sent is None or received is None else sent + received for sent, received in pairs]


def _field(value: Any) -> float | None:
    """Return a field's value by its type (nvmlValueType_t), None where the GPU has none."""
    names = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}
    if value.nvmlReturn or value.valueType not in names:
        return None
    number: float = getattr(value.value, names[value.valueType])
    return number


@_gives("VGPU_LICENSE_STATUS")
def _license(handle: Any) -> Sequence[Any]:
    features = pynvml.nvmlDeviceGetGridLicensableFeatures(handle)
    count = min(features.licensableFeaturesCount, len(features.gridLicensableFeatures))
    states = [features.gridLicensableFeatures[index].featureState for index in range(count)]
    return (int(any(states)) if features.isGridLicenseSupported and states else None,)


@_gives("PCIE_TX_BYTES", "PCIE_RX_BYTES", prefix=_PROF)
def read_pcie_rates(handle: Any) -> Sequence[Any]:
    """Each takes 20 ms: NVML counts for that long."""
    directions = (pynvml.NVML_PCIE_UTIL_TX_BYTES, pynvml.NVML_PCIE_UTIL_RX_BYTES)
    return [pynvml.nvmlDeviceGetPcieThroughput(handle, direction) * 1000 for direction in directions]


@_gives("PCIE_TX_THROUGHPUT", "PCIE_RX_THROUGHPUT")
def _pcie_throughput(handle: Any) -> Sequence[Any]:
    """Each takes 20 ms, as in :func:`read_pcie_rates`."""
    directions = (pynvml.NVML_PCIE_UTIL_TX_BYTES, pynvml.NVML_PCIE_UTIL_RX_BYTES)
    return [pynvml.nvmlDeviceGetPcieThroughput(handle, direction) for direction in directions]


@_gives("SHUTDOWN_TEMP", "SLOWDOWN_TEMP", "MEM_MAX_OP_TEMP", "GPU_MAX_OP_TEMP")
def _thresholds(handle: Any) -> Sequence[Any]:
    # NVML_TEMPERATURE_THRESHOLD_SHUTDOWN, SLOWDOWN, MEM_MAX, GPU_MAX
    return [try_(pynvml.nvmlDeviceGetTemperatureThreshold, handle, kind) for kind in range(4)]


_PLAIN = {
    "TOTAL_ENERGY_CONSUMPTION": pynvml.nvmlDeviceGetTotalEnergyConsumption,
    "PSTATE": pynvml.nvmlDeviceGetPerformanceState,
    "FAN_SPEED": pynvml.nvmlDeviceGetFanSpeed,
    "PCIE_REPLAY_COUNTER": pynvml.nvmlDeviceGetPcieReplayCounter,
    "PCIE_LINK_GEN": pynvml.nvmlDeviceGetCurrPcieLinkGeneration,
    "PCIE_LINK_WIDTH": pynvml.nvmlDeviceGetCurrPcieLinkWidth,
    "PCIE_MAX_LINK_GEN": pynvml.nvmlDeviceGetMaxPcieLinkGeneration,
    "PCIE_MAX_LINK_WIDTH": pynvml.nvmlDeviceGetMaxPcieLinkWidth,
    "POWER_USAGE": lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    "POWER_MGMT_LIMIT": lambda handle: pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000,
    "ENFORCED_POWER_LIMIT": lambda handle: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
    "GPU_TEMP": lambda handle: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    "ENC_UTIL": lambda handle: pynvml.nvmlDeviceGetEncoderUtilization(handle)[0],
    "DEC_UTIL": lambda handle: pynvml.nvmlDeviceGetDecoderUtilization(handle)[0],
}


def _plain(function: Callable[[Any], Any]) -> Callable[[Any], Sequence[Any]]:
    return lambda handle: (function(handle),)


for _name, _function in _PLAIN.items():
    _gives(_name)(_plain(_function))

LABEL_READERS: dict[str, Callable[[Any], str]] = {
    _DEV + "BRAND": lambda handle: dict(enumerate(BRANDS)).get(pynvml.nvmlDeviceGetBrand(handle), "Unknown"),
    _DEV + "SERIAL": pynvml.nvmlDeviceGetSerial,
    _DEV + "VBIOS_VERSION": pynvml.nvmlDeviceGetVbiosVersion,
    _DEV + "OEM_INFOROM_VER": lambda handle: pynvml.nvmlDeviceGetInforomVersion(handle, 0),
    _DEV + "ECC_INFOROM_VER": lambda handle: pynvml.nvmlDeviceGetInforomVersion(handle, 1),
    _DEV + "POWER_INFOROM_VER": lambda handle: pynvml.nvmlDeviceGetInforomVersion(handle, 2),
    _DEV + "INFOROM_IMAGE_VER": pynvml.nvmlDeviceGetInforomImageVersion,
}
"""What gives the labels that differ from GPU to GPU."""


class Gpm:
    """GPM of one GPU, or of one GPU instance: what happened between two samples."""

    def __init__(self, handle: Any, instance: int | None) -> None:
        self._handle = handle
        self._instance = instance
        self._old, self._new = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        self._taken = False

    def read(self, names: list[str]) -> Values:
        """Take a sample, and return the difference to the former one; {} the first time."""
        self._old, self._new = self._new, self._old
        if self._instance is None:
            pynvml.nvmlGpmSampleGet(self._handle, self._new)
        else:
            pynvml.nvmlGpmMigSampleGet(self._handle, self._instance, self._new)
        if not self._taken:
            self._taken = True
            return {}
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(names)
        request.sample1, request.sample2 = self._old, self._new
        for position, name in enumerate(names):
            request.metrics[position].metricId = GPM_METRICS[name][0]
        pynvml.nvmlGpmMetricsGet(request)
        return {
            name: request.metrics[position].value * GPM_METRICS[name][1]
            for position, name in enumerate(names)
            if not request.metrics[position].nvmlReturn
        }

    def close(self) -> None:
        """Give the samples back."""
        for sample in (self._old, self._new):
            try_(pynvml.nvmlGpmSampleFree, sample)
