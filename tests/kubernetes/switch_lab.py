"""A simulated host whose GPUs change drivers, for the tests of the DRA driver."""

import os
from pathlib import Path

from dra_lab import Killed, Lab, opaque, result, vfio_name
from support.driverless import make_driverless

from ocigpu.core.settings import Settings
from ocigpu.gpus.vfio.facts import VfioFacts, read_vfio_facts
from ocigpu.kubernetes.dra.devices import DraNode
from ocigpu.kubernetes.dra.effects import Effects, plan_steps
from ocigpu.sim.board import SimBus

GPU, SOUND = "0000:01:00.0", "0000:01:00.1"


class SwitchBus(SimBus):
    """The bus of a simulated host, before any of whose changes the driver can be killed."""

    changes, kill = 0, -1

    def _change(self) -> None:
        if self.changes == self.kill:
            raise Killed
        self.changes += 1

    def write(self, bdf: str, name: str, text: str) -> None:
        self._change()
        super().write(bdf, name, text)

    def probe(self, bdf: str) -> None:
        self._change()
        super().probe(bdf)


class SwitchHost(Lab):
    """A node whose first GPU NVIDIA's driver has, and its sound function another one."""

    def __init__(self, directory: Path) -> None:
        self.host = directory / "host"
        self.roots = make_driverless(self.host, 2)
        self.bus = SwitchBus(str(self.host))
        self._add_sound()
        for bdf, driver, override in ((GPU, "nvidia", "(null)"), (SOUND, "snd_hda_intel", "(null)")):
            (self.host / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            self.bus.write(bdf, "driver/unbind", bdf)
            self.bus.write(bdf, "driver_override", driver)
            self.bus.probe(bdf)
            self.bus.write(bdf, "driver_override", override)
        information = self.host / f"proc/driver/nvidia/gpus/{GPU}/information"
        information.parent.mkdir(parents=True)
        information.write_text("Bus Location: \t 0000:01:00.0\nDevice Minor: \t 0\n")
        (self.host / "dev/nvidia0").touch()
        settings = Settings(simulation_root=str(self.host))
        effects = Effects(settings, str(directory / "mps"), lambda *_, **__: None, bus=self.bus)
        super().__init__(
            directory / "lab", effects=effects.table, plan=plan_steps, settings=settings, devices={"passthrough": True}
        )
        self.read_again()
        self.ref = self.add("vm", result(vfio_name(GPU)), config=[opaque("VfioDeviceConfig")])

    def _add_sound(self) -> None:
        device = self.host / f"sys/bus/pci/devices/{GPU}"
        sound = Path(os.path.realpath(device)).with_name(SOUND)
        sound.mkdir()
        for name, text in {"vendor": "0x10de", "device": "0x22ba", "class": "0x040300", "driver_override": ""}.items():
            (sound / name).write_text(f"{text}\n")
        group = os.path.realpath(device / "iommu_group")
        (sound / "iommu_group").symlink_to(group)
        for link in (device.with_name(SOUND), Path(group) / "devices" / SOUND):
            link.symlink_to(sound)
        drivers = self.host / "sys/bus/pci/drivers"
        (sound / "driver").symlink_to(drivers / "vfio-pci")
        (drivers / "vfio-pci" / SOUND).symlink_to(sound)

    def vfio(self) -> VfioFacts:
        return read_vfio_facts(self.roots)

    def read_again(self) -> None:
        self.node = DraNode(vfio=self.vfio())

    @property
    def drivers(self) -> list[tuple[str, str]]:
        return [
            (self.bus.driver(bdf), self.bus.read(bdf, "driver_override").replace("(null)", "")) for bdf in (GPU, SOUND)
        ]

    def come_and_go(self) -> None:
        self.preparer.prepare(self.ref)
        self.read_again()
        self.preparer.unprepare(self.ref)


HAD = [("nvidia", ""), ("snd_hda_intel", "")]
GIVEN = [("vfio-pci", "vfio-pci"), ("vfio-pci", "vfio-pci")]
