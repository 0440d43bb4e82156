"""Reset of a GPU between two tenants: the right way for the board, its conditions, and proof that it happened."""

import errno
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.driverless import GPUS, holding, make_driverless

from ocigpu.cli.front.main import main
from ocigpu.core.errors import HostError
from ocigpu.gpus.tree import Roots
from ocigpu.gpus.vfio import reset
from ocigpu.gpus.vfio.reset import BRIDGE_CONTROL, SLOT_CONTROL, ResetError, plan_reset, reset_gpu
from ocigpu.sim.board import SimBus
from ocigpu.sim.driverless import EXPRESS
from ocigpu.system.store import open_lock

GPU, OTHER = GPUS[:2]
PORT, SWITCH = "0000:00:01.0", "0000:c2:00.0"


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return make_driverless(tmp_path / "host", 2)


def device(roots: Roots, bdf: str) -> Path:
    return Path(f"{roots.sys}/bus/pci/devices/{bdf}")


def contents(roots: Roots) -> dict[str, bytes]:
    """Return what resets change: configuration, and whether functions may sleep."""
    return {
        f"{bdf} {name}": (device(roots, bdf) / name).read_bytes().strip()
        for bdf in (GPU, OTHER, PORT, SWITCH)
        for name in ("config", "power/control")
    }


def put(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)


def test_a_reset_is_seen_and_leaves_configuration_as_before(roots: Roots) -> None:
    before = contents(roots)
    proof = reset_gpu(GPU, roots, bus=SimBus(roots.host))
    assert (proof.method, proof.port, proof.functions, proof.group) == ("bus", PORT, (GPU,), 112)
    assert (proof.link_went_down, proof.commands, proof.started_up, proof.scrubbed) == (True, ((6, 0),), True, True)
    assert contents(roots) == before
    assert json.loads(json.dumps(proof.as_json()))["commands"] == [[6, 0]]


class Dying(SimBus):
    """Its process is killed in place of a write."""

    def __init__(self, directory: str, left: int) -> None:
        super().__init__(directory)
        self.left = left

    def write_config(self, bdf: str, offset: int, size: int, value: int) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        super().write_config(bdf, offset, size, value)


def killed(roots: Roots, left: int) -> bool:
    """Reset in a process that is killed before its write of a number; returns whether it came so far."""
    if not (pid := os.fork()):
        try:
            reset_gpu(GPU, roots, bus=Dying(roots.host, left))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.rest
def test_what_a_killed_reset_has_left_is_put_back_by_the_next(roots: Roots) -> None:
    before = {name: data for name, data in contents(roots).items() if name.endswith("config")}
    left = 0
    while killed(roots, left):
        proof = reset_gpu(GPU, roots, bus=SimBus(roots.host))
        after = contents(roots)
        assert {name: after[name] for name in before} == before, left
        assert proof.commands[0][1] == 0
        left += 1
    assert left > 12


def test_lost_addresses_that_nobody_has_written_down_are_told(roots: Roots) -> None:
    bus = SimBus(roots.host)
    for offset in range(0x10, 0x28, 4):
        bus.write_config(GPU, offset, 4, 0)
    with pytest.raises(ResetError, match="lost its addresses in an earlier reset") as caught:
        reset_gpu(GPU, roots, bus=bus)
    assert caught.value.hint.endswith("sys/bus/pci/rescan")


class Noting(SimBus):
    """Notes what is written where."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.written: list[tuple[str, int, int]] = []

    def write_config(self, bdf: str, offset: int, size: int, value: int) -> None:
        self.written.append((bdf, offset, value))
        super().write_config(bdf, offset, size, value)


def test_the_kernel_does_not_hear_of_the_link_meanwhile(roots: Roots) -> None:
    bus = Noting(roots.host)
    reset_gpu(GPU, roots, bus=bus)
    at_port = [(offset, value) for bdf, offset, value in bus.written if bdf == PORT]
    slot = EXPRESS + SLOT_CONTROL
    assert at_port[0] == (slot, 0)
    assert at_port[1] == (BRIDGE_CONTROL, 0x40)
    assert at_port[2] == (BRIDGE_CONTROL, 0)
    assert at_port[-2:] == [(EXPRESS + reset.SLOT_STATUS, reset.SLOT_CHANGES), (slot, 0x1028)]
    assert not {bdf for bdf, _, _ in bus.written} - {GPU, PORT}


FAULTS = {
    "reset-ignored": ("OCIGPU-VFIO-5", f"nothing was reset: {GPU} kept its command register"),
    "reset-refused": ("OCIGPU-VFIO-4", "config: Operation not permitted"),
    "link-lost": ("OCIGPU-VFIO-4", f"the link below {PORT} did not come up again"),
    "config-lost": ("OCIGPU-VFIO-4", "did not take its configuration back"),
    "boot-stuck": ("OCIGPU-VFIO-6", "start-up did not end: register 0x200bc is 0x0, not 0xff"),
    "scrub-stuck": ("OCIGPU-VFIO-6", "memory was not scrubbed: register 0x100b20 is 0x0"),
    "registers-hidden": ("OCIGPU-VFIO-6", "registers are hidden: 0xbadf1100"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_failure_has_its_code_and_leaves_the_port_as_it_was(roots: Roots, fault: str) -> None:
    before = contents(roots)
    Path(f"{roots.host}/faults").write_text(f"{fault} {GPU}\n")
    code, message = FAULTS[fault]
    with pytest.raises(ResetError, match=message) as raised:
        reset_gpu(GPU, roots, bus=SimBus(roots.host))
    assert raised.value.code == code
    after = contents(roots)
    if fault == "link-lost":
        before[f"{PORT} config"] = before[f"{PORT} config"].replace(b"\x05\x31", b"\x05\x11")  # its link is down
    for name, content in before.items():
        if name != f"{GPU} config" or fault not in ("link-lost", "config-lost"):
            assert after[name] == content, name
    Path(f"{roots.host}/faults").write_text(f"{fault} {OTHER}\n")
    if fault not in ("link-lost", "config-lost"):
        assert reset_gpu(GPU, roots, bus=SimBus(roots.host)).scrubbed  # what is wrong with another does not matter


def test_a_gpu_that_is_off_the_bus_is_said_to_be(roots: Roots) -> None:
    with (device(roots, GPU) / "config").open("r+b") as file:
        file.write(b"\xff" * 256)
    with pytest.raises(ResetError, match="is off the bus already"):
        reset_gpu(GPU, roots, bus=SimBus(roots.host))


def test_a_gpu_that_somebody_has_is_left_alone(roots: Roots) -> None:
    before = contents(roots)
    with holding(f"{roots.host}/dev/vfio/112") as pid, pytest.raises(ResetError) as raised:
        reset_gpu(GPU, roots, bus=SimBus(roots.host))
    assert raised.value.code == "OCIGPU-VFIO-2"
    assert raised.value.message == f"reset GPU {GPU}: process {pid} (sleep) has /dev/vfio/112 open"
    assert contents(roots) == before


def test_who_cannot_be_seen_but_is_known_to_the_kernel_is_a_holder(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *more: int, **named: int) -> int:
        if path == f"{roots.host}/dev/vfio/112":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(HostError, match=r"a process has .*/dev/vfio/112 open") as raised:
        reset_gpu(GPU, roots, bus=SimBus(roots.host))
    assert raised.value.code == "OCIGPU-VFIO-2"


class Opening(SimBus):
    """Somebody opens the GPU while it is reset, as a kernel without nodes of groups permits."""

    node = ""
    pid = 0

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if not self.pid:
            with open(self.node, "rb") as file:
                self.process = subprocess.Popen(["sleep", "600"], stdin=file)
            self.pid = self.process.pid


def test_who_comes_while_it_is_reset_is_seen(roots: Roots) -> None:
    bus = Opening(roots.host)
    bus.node = f"{roots.host}/dev/vfio/112"
    try:
        with pytest.raises(ResetError, match=r"process [0-9]+ \(sleep\) has /dev/vfio/112 open") as raised:
            reset_gpu(GPU, roots, bus=bus)
        assert raised.value.code == "OCIGPU-VFIO-2"
    finally:
        bus.process.kill()
        bus.process.wait()


def test_holders_that_cannot_be_known_keep_a_gpu_from_being_reset(roots: Roots, tmp_path: Path) -> None:
    before = contents(roots)
    (tmp_path / "proc").mkdir()
    with pytest.raises(HostError) as raised:
        reset_gpu(GPU, roots._replace(stand_in=False), bus=SimBus(roots.host), proc=str(tmp_path / "proc"))
    assert raised.value.code == "OCIGPU-VFIO-1"
    assert contents(roots) == before


def test_two_resets_of_a_gpu_do_not_meet(roots: Roots) -> None:
    lock = open_lock(f"reset-{GPU}.lock", roots.host)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ResetError, match="another process resets it"):
            reset_gpu(GPU, roots, bus=SimBus(roots.host))
        assert reset_gpu(OTHER, roots, bus=SimBus(roots.host)).bdf == OTHER
    finally:
        os.close(lock)


def add_function(roots: Roots, bdf: str, ids: str, pci_class: str, group: int) -> None:
    directory = device(roots, GPU).resolve().parent / bdf
    directory.mkdir()
    vendor, number = ids.split(":")
    for name, text in (("vendor", vendor), ("device", number), ("class", pci_class)):
        (directory / name).write_text(f"0x{text}\n")
    (directory / "config").write_bytes((device(roots, GPU) / "config").read_bytes())
    (directory / "iommu_group").symlink_to(f"{roots.sys}/kernel/iommu_groups/{group}")
    device(roots, bdf).symlink_to(directory)


def set_ids(roots: Roots, number: str) -> None:
    put(device(roots, GPU) / "device", f"{number}\n")


REFUSED: dict[str, tuple[str, Callable[[Roots], object], str]] = {
    "an NVSwitch": (SWITCH, lambda _: 0, "an NVSwitch is never reset"),
    "nothing": ("0000:7f:00.0", lambda _: 0, "no GPU at this address"),
    "a path": ("../../0000:01:00.0", lambda _: 0, "no GPU at this address"),
    "a port": (PORT, lambda _: 0, "no GPU at this address"),
    "a switch beside it": (
        GPU, lambda roots: add_function(roots, "0000:01:01.0", "10de:22a3", "068000", 112),
        "NVSwitch 0000:01:01.0 is behind the same port",
    ),
    "another device beside it": (
        GPU, lambda roots: add_function(roots, "0000:01:01.0", "15b3:1021", "020000", 112),
        "needs a bus reset, but 0000:01:01.0 is behind the same port",
    ),
    "a function of another group": (
        GPU, lambda roots: add_function(roots, "0000:01:00.1", "10de:22be", "040300", 113),
        "0000:01:00.1 is in IOMMU group 113, not in 112",
    ),
    "no IOMMU": (GPU, lambda roots: (device(roots, GPU) / "iommu_group").unlink(), "the host's IOMMU is off"),
    "virtual functions": (GPU, lambda roots: put(device(roots, GPU) / "sriov_numvfs", "2\n"), "has virtual functions"),
    "no reset": (GPU, lambda roots: put(device(roots, GPU) / "reset_method", "\n"), "its reset_method has nothing"),
    "bus reset switched off": (
        GPU, lambda roots: put(device(roots, GPU) / "reset_method", "flr\n"), "reset_method has flr, not bus",
    ),
    "a port of another bus": (
        GPU, lambda roots: SimBus(roots.host).write_config(PORT, reset.SECONDARY_BUS, 1, 9), "no bridge above it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_reach_too_far_is_refused_and_nothing_is_changed(roots: Roots, case: str) -> None:
    bdf, make, message = REFUSED[case]
    make(roots)
    before = contents(roots)
    with pytest.raises(ResetError, match=message) as raised:
        reset_gpu(bdf, roots, bus=SimBus(roots.host))
    assert raised.value.code == "OCIGPU-VFIO-3"
    assert contents(roots) == before


def test_a_gpu_that_another_driver_has_is_not_reset(roots: Roots) -> None:
    (device(roots, GPU) / "driver").unlink()
    (device(roots, GPU) / "driver").symlink_to("../../../../bus/pci/drivers/nvidia")
    with pytest.raises(ResetError, match="is bound to nvidia, not to VFIO"):
        plan_reset(GPU, roots)


def test_a_sound_function_of_the_same_board_is_reset_with_it(roots: Roots) -> None:
    add_function(roots, "0000:01:00.1", "10de:22be", "040300", 112)
    assert plan_reset(GPU, roots).functions == (GPU, "0000:01:00.1")


@pytest.mark.parametrize(
    ("number", "method", "family"),
    [
        ("0x2330", "bus", "Hopper"),
        ("0x2342", "flr", "Grace Hopper"),
        ("0x1eb8", "flr", "Turing"),  # T4: behind a root port
        ("0x20b0", "bus", "Ampere"),
        ("0x2901", "bus", "Blackwell"),
        ("0x26b9", "bus", ""),
    ],
)
def test_each_board_has_its_way(roots: Roots, number: str, method: str, family: str) -> None:
    set_ids(roots, number)
    plan = plan_reset(GPU, roots)
    assert (plan.method, plan.family.name if plan.family else "") == (method, family)


def test_a_function_level_reset_is_proven_too(roots: Roots) -> None:
    set_ids(roots, "0x2342")
    before = contents(roots)
    proof = reset_gpu(GPU, roots, bus=SimBus(roots.host))
    assert (proof.method, proof.link_went_down, proof.commands, proof.scrubbed) == ("flr", None, ((6, 0),), True)
    assert contents(roots) == before
    Path(f"{roots.host}/faults").write_text(f"reset-ignored {GPU}\n")
    with pytest.raises(ResetError, match="nothing was reset"):
        reset_gpu(GPU, roots, bus=SimBus(roots.host))


def test_a_board_that_cannot_tell_of_its_memory_is_reset_only_when_somebody_looks_later(roots: Roots) -> None:
    set_ids(roots, "0x26b9")
    with pytest.raises(ResetError, match="unknown how a GPU 26b9 signals that its memory is clear"):
        reset_gpu(GPU, roots, bus=SimBus(roots.host))
    assert reset_gpu(GPU, roots, bus=SimBus(roots.host), scrub=False).scrubbed is None


def test_the_command_says_what_it_would_do_and_what_was_seen(roots: Roots, capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", f"{roots.host}/config.toml"]
    before = contents(roots)
    assert main(["vfio", "reset", GPU, "--dry-run", *config]) == 0
    assert "bus reset below 0000:00:01.0" in capsys.readouterr().out
    assert main(["vfio", "reset", "01:00.0", "--json", *config]) == 0
    assert json.loads(capsys.readouterr().out)["scrubbed"] is True
    assert main(["vfio", "reset", GPU, "--dry-run", "--json", *config]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "Hopper"
    assert contents(roots) == before
    Path(f"{roots.host}/faults").write_text(f"scrub-stuck {GPU}\n")
    assert main(["vfio", "reset", GPU, *config]) == 1
    assert "OCIGPU-VFIO-6" in capsys.readouterr().err
    assert main(["vfio", "reset", GPU, "--no-scrub", *config]) == 0
    assert "not known to be clear" in capsys.readouterr().out
