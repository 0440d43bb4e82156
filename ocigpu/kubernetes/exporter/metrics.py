"""The metrics: names, types and help of dcgm-exporter, and NVML's function behind each.

Sources: dcgm-exporter's documentation and its list of default counters, the field identifiers of the DCGM API
reference, and NVML's API reference.
"""

from typing import NamedTuple

from ocigpu.kubernetes.exporter.dcgm_fields import EXPORTER_METRICS, FIELDS


class Metric(NamedTuple):
    """One metric.  ``kind``: gauge, counter or label (a label of every series); ``source``: NVML's function.

    ``default``: whether it is exported without a collectors file.
    """

    name: str
    kind: str
    help: str
    source: str
    default: bool = True


def _rows(source: str, kind: str, *pairs: tuple[str, str], default: bool = True) -> list[Metric]:
    return [Metric(name, kind, text, source, default) for name, text in pairs]


_DEV, _PROF = "DCGM_FI_DEV_", "DCGM_FI_PROF_"
_GPM = "nvmlGpmMetricsGet, metric"

METRICS: tuple[Metric, ...] = (
    *_rows(
        "nvmlDeviceGetClockInfo", "gauge",
        (_DEV + "SM_CLOCK", "SM clock frequency (in MHz)."),
        (_DEV + "MEM_CLOCK", "Memory clock frequency (in MHz)."),
    ),
    *_rows(
        "nvmlDeviceGetClockInfo", "gauge", (_DEV + "VIDEO_CLOCK", "Video encoder/decoder clock frequency (in MHz)."),
        default=False,
    ),
    *_rows("nvmlDeviceGetFieldValues, field 82", "gauge", (_DEV + "MEMORY_TEMP", "Memory temperature (in C).")),
    *_rows("nvmlDeviceGetTemperature", "gauge", (_DEV + "GPU_TEMP", "GPU temperature (in C).")),
    *_rows("nvmlDeviceGetPowerUsage", "gauge", (_DEV + "POWER_USAGE", "Power draw (in W).")),
    *_rows(
        "nvmlDeviceGetTotalEnergyConsumption", "counter",
        (_DEV + "TOTAL_ENERGY_CONSUMPTION", "Total energy consumption since boot (in mJ)."),
    ),
    *_rows(
        "nvmlDeviceGetPowerManagementLimit", "gauge", (_DEV + "POWER_MGMT_LIMIT", "Power limit (in W)."), default=False
    ),
    *_rows(
        "nvmlDeviceGetEnforcedPowerLimit", "gauge",
        (_DEV + "ENFORCED_POWER_LIMIT", "Power limit in force, of all limiters (in W)."), default=False,
    ),
    *_rows("nvmlDeviceGetPerformanceState", "gauge", (_DEV + "PSTATE", "Performance state (P-State)."), default=False),
    *_rows("nvmlDeviceGetFanSpeed", "gauge", (_DEV + "FAN_SPEED", "Fan speed (in %)."), default=False),
    *_rows(
        "nvmlDeviceGetPcieReplayCounter", "counter",
        (_DEV + "PCIE_REPLAY_COUNTER", "Total number of PCIe retries."),
    ),
    *_rows(
        "nvmlDeviceGetCurrPcieLinkGeneration", "gauge",
        (_DEV + "PCIE_LINK_GEN", "PCIe generation of the link now."), default=False,
    ),
    *_rows(
        "nvmlDeviceGetCurrPcieLinkWidth", "gauge",
        (_DEV + "PCIE_LINK_WIDTH", "Lanes of the PCIe link now."), default=False,
    ),
    *_rows(
        "nvmlDeviceGetMaxPcieLinkGeneration", "gauge",
        (_DEV + "PCIE_MAX_LINK_GEN", "Highest PCIe generation of the link."), default=False,
    ),
    *_rows(
        "nvmlDeviceGetMaxPcieLinkWidth", "gauge",
        (_DEV + "PCIE_MAX_LINK_WIDTH", "Most lanes of the PCIe link."), default=False,
    ),
    *_rows(
        "nvmlDeviceGetUtilizationRates", "gauge",
        (_DEV + "GPU_UTIL", "GPU utilization (in %)."),
        (_DEV + "MEM_COPY_UTIL", "Memory utilization (in %)."),
    ),
    *_rows("nvmlDeviceGetEncoderUtilization", "gauge", (_DEV + "ENC_UTIL", "Encoder utilization (in %).")),
    *_rows("nvmlDeviceGetDecoderUtilization", "gauge", (_DEV + "DEC_UTIL", "Decoder utilization (in %).")),
    *_rows("nvmlEventSetWait_v2", "gauge", (_DEV + "XID_ERRORS", "Value of the last XID error encountered.")),
    *_rows(
        "nvmlDeviceGetCurrentClocksEventReasons", "gauge",
        (_DEV + "CLOCK_THROTTLE_REASONS", "Current clock event reasons (bitmask)."),
        (_DEV + "CLOCKS_EVENT_REASONS", "Current clock event reasons (bitmask)."), default=False,
    ),
    *_rows(
        "nvmlDeviceGetViolationStatus", "counter",
        (_DEV + "POWER_VIOLATION", "Throttling duration due to power constraints (in ns)."),
        (_DEV + "THERMAL_VIOLATION", "Throttling duration due to thermal constraints (in ns)."),
        (_DEV + "SYNC_BOOST_VIOLATION", "Throttling duration due to sync-boost constraints (in ns)."),
        (_DEV + "BOARD_LIMIT_VIOLATION", "Throttling duration due to board limit constraints (in ns)."),
        (_DEV + "LOW_UTIL_VIOLATION", "Throttling duration due to low utilization (in ns)."),
        (_DEV + "RELIABILITY_VIOLATION", "Throttling duration due to reliability constraints (in ns)."),
        default=False,
    ),
    *_rows(
        "nvmlDeviceGetMemoryInfo_v2", "gauge",
        (_DEV + "FB_FREE", "Framebuffer memory free (in MiB)."),
        (_DEV + "FB_USED", "Framebuffer memory used (in MiB)."),
        (_DEV + "FB_RESERVED", "Framebuffer memory reserved (in MiB)."),
    ),
    *_rows(
        "nvmlDeviceGetMemoryInfo_v2", "gauge",
        (_DEV + "FB_TOTAL", "Total framebuffer memory (in MiB)."),
        (_DEV + "FB_USED_PERCENT", "Share of the framebuffer that is used, without what is reserved (0 to 1)."),
        default=False,
    ),
    *_rows(
        "nvmlDeviceGetTotalEccErrors", "counter",
        (_DEV + "ECC_SBE_VOL_TOTAL", "Total number of single-bit volatile ECC errors."),
        (_DEV + "ECC_DBE_VOL_TOTAL", "Total number of double-bit volatile ECC errors."),
        (_DEV + "ECC_SBE_AGG_TOTAL", "Total number of single-bit persistent ECC errors."),
        (_DEV + "ECC_DBE_AGG_TOTAL", "Total number of double-bit persistent ECC errors."), default=False,
    ),
    *_rows(
        "nvmlDeviceGetRetiredPages", "counter",
        (_DEV + "RETIRED_SBE", "Total number of retired pages due to single-bit errors."),
        (_DEV + "RETIRED_DBE", "Total number of retired pages due to double-bit errors."), default=False,
    ),
    *_rows(
        "nvmlDeviceGetRetiredPagesPendingStatus", "counter",
        (_DEV + "RETIRED_PENDING", "Total number of pages pending retirement."), default=False,
    ),
    *_rows(
        "nvmlDeviceGetRemappedRows", "counter",
        (_DEV + "UNCORRECTABLE_REMAPPED_ROWS", "Number of remapped rows for uncorrectable errors."),
        (_DEV + "CORRECTABLE_REMAPPED_ROWS", "Number of remapped rows for correctable errors."),
    ),
    *_rows(
        "nvmlDeviceGetRemappedRows", "gauge",
        (_DEV + "ROW_REMAP_FAILURE", "Whether remapping of rows has failed."),
    ),
    *_rows(
        "nvmlDeviceGetRemappedRows", "gauge",
        (_DEV + "ROW_REMAP_PENDING", "Whether rows are remapped with the next reset."), default=False,
    ),
    *_rows(
        "nvmlDeviceGetFieldValues, fields 138 and 139", "counter",
        (_DEV + "NVLINK_BANDWIDTH_TOTAL", "Total number of NVLink bandwidth counters for all lanes (in KiB)."),
    ),
    *_rows(
        "nvmlDeviceGetFieldValues, fields 38, 45, 52 and 59", "counter",
        (_DEV + "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "Total number of NVLink flow-control CRC errors."),
        (_DEV + "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "Total number of NVLink data CRC errors."),
        (_DEV + "NVLINK_REPLAY_ERROR_COUNT_TOTAL", "Total number of NVLink retries."),
        (_DEV + "NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "Total number of NVLink recovery errors."), default=False,
    ),
    *_rows(
        "nvmlDeviceGetGridLicensableFeatures", "gauge",
        (_DEV + "VGPU_LICENSE_STATUS", "vGPU License status."),
    ),
    *_rows("nvmlSystemGetDriverVersion", "label", ("DCGM_FI_DRIVER_VERSION", "Driver Version.")),
    *_rows("nvmlSystemGetNVMLVersion", "label", ("DCGM_FI_NVML_VERSION", "NVML Version."), default=False),
    *_rows("nvmlDeviceGetBrand", "label", (_DEV + "BRAND", "Device Brand."), default=False),
    *_rows("nvmlDeviceGetSerial", "label", (_DEV + "SERIAL", "Device Serial Number."), default=False),
    *_rows(
        "nvmlDeviceGetVbiosVersion", "label", (_DEV + "VBIOS_VERSION", "VBIOS version of the device."), default=False
    ),
    *_rows(
        "nvmlDeviceGetInforomVersion", "label",
        (_DEV + "OEM_INFOROM_VER", "OEM inforom version."),
        (_DEV + "ECC_INFOROM_VER", "ECC inforom version."),
        (_DEV + "POWER_INFOROM_VER", "Power management object inforom version."), default=False,
    ),
    *_rows(
        "nvmlDeviceGetInforomImageVersion", "label", (_DEV + "INFOROM_IMAGE_VER", "Inforom image version."),
        default=False,
    ),
    Metric(_PROF + "GR_ENGINE_ACTIVE", "gauge", "Ratio of time the graphics engine is active.", f"{_GPM} 1"),
    Metric(
        _PROF + "SM_ACTIVE", "gauge", "The ratio of cycles an SM has at least 1 warp assigned.", f"{_GPM} 2", False
    ),
    Metric(
        _PROF + "SM_OCCUPANCY", "gauge", "The ratio of number of warps resident on an SM.", f"{_GPM} 3", False
    ),
    Metric(_PROF + "PIPE_TENSOR_ACTIVE", "gauge", "Ratio of cycles the tensor (HMMA) pipe is active.", f"{_GPM} 5"),
    Metric(
        _PROF + "DRAM_ACTIVE", "gauge",
        "Ratio of cycles the device memory interface is active sending or receiving data.", f"{_GPM} 10",
    ),
    Metric(_PROF + "PIPE_FP64_ACTIVE", "gauge", "Ratio of cycles the fp64 pipes are active.", f"{_GPM} 11", False),
    Metric(_PROF + "PIPE_FP32_ACTIVE", "gauge", "Ratio of cycles the fp32 pipes are active.", f"{_GPM} 12", False),
    Metric(_PROF + "PIPE_FP16_ACTIVE", "gauge", "Ratio of cycles the fp16 pipes are active.", f"{_GPM} 13", False),
    Metric(
        _PROF + "PCIE_TX_BYTES", "gauge", "The rate of data transmitted over the PCIe bus (in bytes per second).",
        f"{_GPM} 20; before Hopper nvmlDeviceGetPcieThroughput",
    ),
    Metric(
        _PROF + "PCIE_RX_BYTES", "gauge", "The rate of data received over the PCIe bus (in bytes per second).",
        f"{_GPM} 21; before Hopper nvmlDeviceGetPcieThroughput",
    ),
    Metric(
        _PROF + "NVLINK_TX_BYTES", "gauge", "The rate of data transmitted over NVLink (in bytes per second).",
        f"{_GPM} 61", False,
    ),
    Metric(
        _PROF + "NVLINK_RX_BYTES", "gauge", "The rate of data received over NVLink (in bytes per second).",
        f"{_GPM} 60", False,
    ),
    Metric(
        "DCGM_EXP_XID_ERRORS_COUNT", "gauge", "Count of XID Errors within user-specified time window.",
        "nvmlEventSetWait_v2", False,
    ),
    Metric(
        "DCGM_EXP_CLOCK_EVENTS_COUNT", "gauge", "Count of clock events within the user-specified time window.",
        "nvmlDeviceGetCurrentClocksEventReasons", False,
    ),
)  # fmt: skip
"""Every metric, in the order in which they are exported."""

BY_NAME = {metric.name: metric for metric in METRICS}

XID, XID_COUNT = _DEV + "XID_ERRORS", "DCGM_EXP_XID_ERRORS_COUNT"
CLOCK_COUNT = "DCGM_EXP_CLOCK_EVENTS_COUNT"
DRIVER_VERSION, NVML_VERSION = "DCGM_FI_DRIVER_VERSION", "DCGM_FI_NVML_VERSION"

GPM_METRICS: dict[str, tuple[int, float]] = {
    _PROF + "GR_ENGINE_ACTIVE": (1, 0.01),
    _PROF + "SM_ACTIVE": (2, 0.01),
    _PROF + "SM_OCCUPANCY": (3, 0.01),
    _PROF + "PIPE_TENSOR_ACTIVE": (5, 0.01),
    _PROF + "DRAM_ACTIVE": (10, 0.01),
    _PROF + "PIPE_FP64_ACTIVE": (11, 0.01),
    _PROF + "PIPE_FP32_ACTIVE": (12, 0.01),
    _PROF + "PIPE_FP16_ACTIVE": (13, 0.01),
    _PROF + "PCIE_TX_BYTES": (20, float(1 << 20)),
    _PROF + "PCIE_RX_BYTES": (21, float(1 << 20)),
    _PROF + "NVLINK_RX_BYTES": (60, float(1 << 20)),
    _PROF + "NVLINK_TX_BYTES": (61, float(1 << 20)),
}
"""GPM's number (nvmlGpmMetricId_t) and the factor to our unit: its percents are ratios, its MiB/s bytes per second."""

CLOCK_EVENTS = {
    0x1: "gpu_idle",
    0x2: "clocks_setting",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
"""Bits of the clock event reasons, as label ``clock_event`` names them."""

NOT_FROM_NVML = (
    ("DCGM_FI_PROF_", "profiling: only Hopper's GPM gives some of it without DCGM"),
    ("DCGM_EXP_GPU_HEALTH_STATUS", "health checks are DCGM's own"),
    ("DCGM_EXP_P2P_STATUS", "not read: peer-to-peer states do not change while a node runs"),
    ("DCGM_FI_DEV_NVSWITCH_", "NVSwitches answer to DCGM and NSCQ"),
    ("DCGM_FI_DEV_NVLINK_", "only totals of all links are read"),
    ("DCGM_FI_DEV_DIAG_", "diagnostics are DCGM's own"),
    ("DCGM_FI_DEV_CPU_", "CPUs answer to DCGM only"),
    ("DCGM_FI_", "plain NVML does not say, or ocigpu does not ask"),
    ("DCGM_EXP_", "made by dcgm-exporter from what only DCGM says"),
)
"""Beginnings of DCGM's names, and why metrics of them that are not in the table are left out; the first one counts."""


def why_missing(name: str) -> str:
    """Return why a metric of DCGM is left out; "" for a name that is none of DCGM's."""
    if name not in FIELDS and name not in EXPORTER_METRICS:
        return ""
    return next(why for prefix, why in NOT_FROM_NVML if name.startswith(prefix))
