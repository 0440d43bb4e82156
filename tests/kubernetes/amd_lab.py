"""Simulated hosts with AMD's GPUs that change as amdgpu changes them."""

import os
import shutil
import stat
from pathlib import Path
from typing import NamedTuple

from ocigpu.core.settings import Settings
from ocigpu.gpus.amd.facts import AmdGpu, read_amd_facts
from ocigpu.gpus.tree import find_roots
from ocigpu.kubernetes.dra.devices import DraDevice, make_devices
from ocigpu.kubernetes.dra.node import read_dra_node
from ocigpu.system.settings_file import read_settings


class AmdHost(NamedTuple):
    """A simulated host whose GPUs can be lost, and cut into partitions as amdgpu does."""

    root: Path

    @property
    def settings(self) -> Settings:
        return read_settings(str(self.root / "config.toml"))

    @property
    def gpus(self) -> tuple[AmdGpu, ...]:
        return read_amd_facts(find_roots(self.settings)).gpus

    def devices(self) -> tuple[DraDevice, ...]:
        reading = read_dra_node(self.settings, "amd")
        assert reading.node
        assert reading.node.problems == ()
        return make_devices(reading.node)

    def lose(self, address: str) -> None:
        """Take a GPU from the bus, and from KFD's topology."""
        minor = next(gpu.nodes[-1].minor for gpu in self.gpus if gpu.address == address)
        (self.root / "sys/bus/pci/drivers/amdgpu" / address).unlink()
        shutil.rmtree(self.root / "sys/bus/pci/devices" / address)
        for path in (self.root / "sys/class/kfd/kfd/topology/nodes").iterdir():
            if f"drm_render_minor {minor}\n" in (path / "properties").read_text():
                shutil.rmtree(path)

    def cut(self, number: int, count: int = 8) -> None:
        """Cut a GPU into partitions of equal size: CPX."""
        gpu = next(gpu for gpu in self.gpus if gpu.address == f"0000:{0x41 + number:02x}:00.0")
        pci = self.root / "sys/bus/pci/devices" / gpu.address
        (pci / "current_compute_partition").write_text("CPX\n")
        topology = self.root / "sys/class/kfd/kfd/topology/nodes"
        first = next(
            path for path in topology.iterdir()
            if f"drm_render_minor {gpu.nodes[-1].minor}\n" in (path / "properties").read_text()
        )  # fmt: skip
        text = (first / "properties").read_text().replace("simd_count 1216\n", f"simd_count {1216 // count}\n")
        (first / "properties").write_text(text)
        bank = f"heap_type 1\nsize_in_bytes {(196_592 << 20) // count}\n"
        (first / "mem_banks/0/properties").write_text(bank)
        bus = int(gpu.address[5:7], 16)
        for part in range(1, count):
            card = 16 + 8 * number + part
            drm = self.root / f"sys/devices/platform/amdgpu_xcp_{card}/drm"
            for name, minor in ((f"card{card}", card), (f"renderD{128 + card}", 128 + card)):
                (drm / name).mkdir(parents=True)
                (drm / name / "dev").write_text(f"226:{minor}\n")
                os.mknod(self.root / "dev/dri" / name, 0o660 | stat.S_IFCHR, os.makedev(226, minor))
            node = topology / str(100 + card)
            (node / "mem_banks/0").mkdir(parents=True)
            (node / "mem_banks/0/properties").write_text(bank)
            own = text.replace(f"location_id {bus << 8}\n", f"location_id {bus << 8 | part}\n")
            (node / "properties").write_text(
                own.replace(f"drm_render_minor {gpu.nodes[-1].minor}\n", f"drm_render_minor {128 + card}\n")
            )
