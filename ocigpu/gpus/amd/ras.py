"""Errors that amdgpu's RAS has counted (reliability, availability, serviceability), by block of a GPU.

Source: Documentation/gpu/amdgpu/ras.rst of the kernel: ras/BLOCK_err_count below the PCI device has two lines, "ue: N"
and "ce: N", uncorrectable and correctable errors since the driver was loaded.  Names of metrics are those of AMD's
exporter (docs/configuration/metricslist.md of github.com/ROCm/device-metrics-exporter), which holds a GPU with an
uncorrectable error for unhealthy, too.
"""

from ocigpu.gpus.tree import read_or_skip, small_number

BLOCKS = {
    "umc": "umc", "sdma": "sdma", "gfx": "gfx", "mmhub": "mmhub", "athub": "athub", "pcie_bif": "bif", "hdp": "hdp",
    "xgmi_wafl": "xgmi_wafl", "df": "df", "smn": "smn", "sem": "sem", "mp0": "mp0", "mp1": "mp1", "fuse": "fuse",
    "mca": "mca", "vcn": "vcn", "jpeg": "jpeg", "ih": "ih", "mpio": "mpio",
}  # fmt: skip
"""The kernel's names of blocks, and those in metrics."""


class RasErrors:
    """The errors of a block."""

    def __init__(self, uncorrectable: int, correctable: int) -> None:
        self.uncorrectable, self.correctable = uncorrectable, correctable


def read_errors(directory: str) -> dict[str, RasErrors]:
    """Return the errors by block of the GPU with this directory in sysfs; a block without a readable file has none."""
    found = {}
    for block in BLOCKS:
        text = read_or_skip(f"{directory}/ras/{block}_err_count", 256)
        lines = dict(line.partition(":")[::2] for line in (text or "").splitlines())
        counts = [small_number(lines.get(name, "").strip()) for name in ("ue", "ce")]
        if min(counts) >= 0:
            found[block] = RasErrors(*counts)
    return found


def find_problem(errors: dict[str, RasErrors]) -> str:
    """Return why a GPU with these errors is unhealthy, "" if it is not."""
    faulty = [f"{count.uncorrectable} in {block}" for block, count in errors.items() if count.uncorrectable]
    return f"uncorrectable errors (RAS): {', '.join(faulty)}" if faulty else ""
