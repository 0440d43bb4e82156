"""What NVML can say of one GPU, as functions that return metrics by name; for the process of :mod:`~.sampler_child`.

Sources of numbers and units: nvml.h and NVIDIA's NVML API reference.
"""

from collections.abc import Callable
from typing import Any

import pynvml

from ocigpu.gpus.nvidia.nvml import BRANDS
from ocigpu.gpus.nvidia.nvml_verbs import try_
from ocigpu.kubernetes.exporter.metrics import GPM_METRICS

ALL_LINKS = 0xFFFFFFFF
MIB = 1 << 20
Values = dict[str, Any]
_DEV, _PROF = "DCGM_FI_DEV_", "DCGM_FI_PROF_"


READERS: list[tuple[tuple[str, ...], Callable[[Any], Values]]] = []
"""The metrics that each function gives."""


def _gives(*names: str, prefix: str = _DEV) -> Callable[[Callable[[Any], Values]], Callable[[Any], Values]]:
    """Note that a function gives these metrics."""

    def note(function: Callable[[Any], Values]) -> Callable[[Any], Values]:
        READERS.append((tuple(prefix + name for name in names), function))
        return function

    return note


@_gives("SM_CLOCK", "MEM_CLOCK", "VIDEO_CLOCK")
def _clocks(handle: Any) -> Values:
    domains = ((1, "SM_CLOCK"), (2, "MEM_CLOCK"), (3, "VIDEO_CLOCK"))
    return {_DEV + name: try_(pynvml.nvmlDeviceGetClockInfo, handle, domain) for domain, name in domains}


@_gives("GPU_UTIL", "MEM_COPY_UTIL")
def _utilization(handle: Any) -> Values:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return {_DEV + "GPU_UTIL": rates.gpu, _DEV + "MEM_COPY_UTIL": rates.memory}


@_gives("FB_TOTAL", "FB_FREE", "FB_USED", "FB_RESERVED", "FB_USED_PERCENT")
def read_memory(handle: Any) -> Values:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        reserved: int | None = memory.reserved
    except pynvml.NVMLError:  # drivers before 510 count what is reserved as used
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        reserved = None
    usable = memory.total - (reserved or 0)
    return {
        _DEV + "FB_TOTAL": memory.total // MIB,
        _DEV + "FB_FREE": memory.free // MIB,
        _DEV + "FB_USED": memory.used // MIB,
        _DEV + "FB_RESERVED": reserved // MIB if reserved is not None else None,
        _DEV + "FB_USED_PERCENT": round(memory.used / usable, 4) if usable else None,
    }


@_gives("CLOCK_THROTTLE_REASONS", "CLOCKS_EVENT_REASONS")
def read_clock_reasons(handle: Any) -> Values:
    try:
        reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except pynvml.NVMLError:  # its name before driver 535
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {_DEV + "CLOCK_THROTTLE_REASONS": reasons, _DEV + "CLOCKS_EVENT_REASONS": reasons}


_POLICIES = ("POWER", "THERMAL", "SYNC_BOOST", "BOARD_LIMIT", "LOW_UTIL", "RELIABILITY")  # NVML_PERF_POLICY_*: 0 to 5


@_gives(*(f"{name}_VIOLATION" for name in _POLICIES))
def _violations(handle: Any) -> Values:
    found = ((name, try_(pynvml.nvmlDeviceGetViolationStatus, handle, policy)) for policy, name in enumerate(_POLICIES))
    return {f"{_DEV}{name}_VIOLATION": status.violationTime if status else None for name, status in found}


@_gives("ECC_SBE_VOL_TOTAL", "ECC_DBE_VOL_TOTAL", "ECC_SBE_AGG_TOTAL", "ECC_DBE_AGG_TOTAL")
def _ecc(handle: Any) -> Values:
    kinds = (("SBE", 0), ("DBE", 1))  # NVML_MEMORY_ERROR_TYPE_CORRECTED, _UNCORRECTED
    counters = (("VOL", 0), ("AGG", 1))
    return {
        f"{_DEV}ECC_{kind}_{counter}_TOTAL": try_(pynvml.nvmlDeviceGetTotalEccErrors, handle, number, which)
        for kind, number in kinds
        for counter, which in counters
    }


@_gives("RETIRED_SBE", "RETIRED_DBE", "RETIRED_PENDING")
def _retired(handle: Any) -> Values:
    causes = ((0, "SBE"), (1, "DBE"))  # NVML_PAGE_RETIREMENT_CAUSE_*
    pages = {name: try_(pynvml.nvmlDeviceGetRetiredPages, handle, cause) for cause, name in causes}
    found: Values = {f"{_DEV}RETIRED_{name}": None if list_ is None else len(list_) for name, list_ in pages.items()}
    found[_DEV + "RETIRED_PENDING"] = try_(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    return found


@_gives("CORRECTABLE_REMAPPED_ROWS", "UNCORRECTABLE_REMAPPED_ROWS", "ROW_REMAP_PENDING", "ROW_REMAP_FAILURE")
def _rows(handle: Any) -> Values:
    correctable, uncorrectable, pending, failed = pynvml.nvmlDeviceGetRemappedRows(handle)
    return {
        _DEV + "CORRECTABLE_REMAPPED_ROWS": correctable,
        _DEV + "UNCORRECTABLE_REMAPPED_ROWS": uncorrectable,
        _DEV + "ROW_REMAP_PENDING": pending,
        _DEV + "ROW_REMAP_FAILURE": failed,
    }


_ERROR_FIELDS = {"CRC_FLIT": 38, "CRC_DATA": 45, "REPLAY": 52, "RECOVERY": 59}


@_gives("MEMORY_TEMP", "NVLINK_BANDWIDTH_TOTAL", *(f"NVLINK_{name}_ERROR_COUNT_TOTAL" for name in _ERROR_FIELDS))
def _fields(handle: Any) -> Values:
    wanted = [(82, 0), *((field, 0) for field in _ERROR_FIELDS.values()), (138, ALL_LINKS), (139, ALL_LINKS)]
    answers = [_field(value) for value in pynvml.nvmlDeviceGetFieldValues(handle, wanted)]
    memory, *errors, sent, received = answers
    found = {f"{_DEV}NVLINK_{name}_ERROR_COUNT_TOTAL": value for name, value in zip(_ERROR_FIELDS, errors, strict=True)}
    found[_DEV + "MEMORY_TEMP"] = memory
    found[_DEV + "NVLINK_BANDWIDTH_TOTAL"] = None if sent is None or received is None else sent + received
    return found


def _field(value: Any) -> float | None:
    """Return a field's value by its type (nvmlValueType_t), None where the GPU has none."""
    names = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}
    if value.nvmlReturn or value.valueType not in names:
        return None
    number: float = getattr(value.value, names[value.valueType])
    return number


@_gives("VGPU_LICENSE_STATUS")
def _license(handle: Any) -> Values:
    features = pynvml.nvmlDeviceGetGridLicensableFeatures(handle)
    if not features.isGridLicenseSupported or not features.licensableFeaturesCount:
        return {}
    count = min(features.licensableFeaturesCount, len(features.gridLicensableFeatures))
    states = [features.gridLicensableFeatures[index].featureState for index in range(count)]
    return {_DEV + "VGPU_LICENSE_STATUS": int(any(states))}


@_gives("PCIE_TX_BYTES", "PCIE_RX_BYTES", prefix=_PROF)
def read_pcie_rates(handle: Any) -> Values:
    """Each takes 20 ms: NVML counts for that long."""
    sent = pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES)
    received = pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES)
    return {_PROF + "PCIE_TX_BYTES": sent * 1000, _PROF + "PCIE_RX_BYTES": received * 1000}


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


def _plain(name: str, function: Callable[[Any], Any]) -> Callable[[Any], Values]:
    return lambda handle: {name: function(handle)}


for _name, _function in _PLAIN.items():
    _gives(_name)(_plain(_DEV + _name, _function))

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
        """Take a sample, and return what was between it and the one before; {} the first time."""
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
