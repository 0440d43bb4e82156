"""Every source of devices, a line for each.  Everything else is in its folder: docs/howto/new-vendor.md."""

VENDORS = {
    "nvidia": ("nvidia", "NVIDIA_VISIBLE_DEVICES", "nvidia.com"),
    "amd": ("amd", "AMD_VISIBLE_DEVICES", "amd.com"),
    "vfio": ("vfio", "", ""),
    "csv": ("tegra", "", ""),
    "wsl": ("wsl", "", ""),
}
"""Folder below ocigpu/gpus/, the variable by which containers request devices, the vendor of the GPUs' CDI kind."""
FIRST = "nvidia"
"""The vendor whose requests are always read: old images set no variable, and mounts and annotations use its form."""
GPU_VENDORS = tuple(vendor for _, _, vendor in VENDORS.values() if vendor)
"""Vendors of CDI kinds that stand for GPUs only: a GPU for virtual machines, say, is another kind of theirs."""


def plugin_vendor(vendor: str) -> str:
    """Return the vendor of the device plugin's CDI kinds for GPUs of nvidia.com, say, as NVIDIA's own plugin has it."""
    return f"k8s.device-plugin.{vendor}"
