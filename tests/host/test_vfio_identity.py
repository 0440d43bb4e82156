"""Module ids without a driver: several sources that must agree, and never the order on the bus."""

import json
import struct
from pathlib import Path

import pytest
from support.driverless import GPUS, MODULES, holding, make_driverless

from ocigpu.cli.front.main import main
from ocigpu.core.errors import HostError
from ocigpu.gpus.tree import Roots
from ocigpu.gpus.vfio.bus import COMMAND, PciBus
from ocigpu.gpus.vfio.identity import (
    PINS,
    GpuModule,
    ModuleReading,
    identify,
    read_module_ids,
    read_table,
    settle,
    write_table,
)

A, B = GPUS[:2]


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return make_driverless(tmp_path / "host")


def config_of(roots: Roots) -> list[str]:
    return ["--config", f"{roots.host}/config.toml"]


def registers(roots: Roots, bdf: str) -> Path:
    return Path(f"{roots.sys}/bus/pci/devices/{bdf}/resource0")


def set_register(roots: Roots, bdf: str, offset: int, value: int) -> None:
    with registers(roots, bdf).open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack("<I", value))


@pytest.mark.parametrize(("model", "count"), [("h100", 8), ("h200", 4)])
def test_pins_tell_the_module_and_everything_is_as_before(tmp_path: Path, model: str, count: int) -> None:
    roots = make_driverless(tmp_path / "host", count, model)
    before = {bdf: Path(f"{roots.sys}/bus/pci/devices/{bdf}/config").read_bytes() for bdf in GPUS[:count]}
    assert read_module_ids(roots) == {bdf: MODULES[bdf] for bdf in GPUS[:count]}
    assert list(read_module_ids(roots)) == list(GPUS[:count])
    for bdf, content in before.items():
        assert Path(f"{roots.sys}/bus/pci/devices/{bdf}/config").read_bytes() == content
        assert PciBus(roots.sys).read(bdf, "power/control") == "auto"


def test_memory_decoding_is_on_only_while_pins_are_read(roots: Roots) -> None:
    bus = PciBus(roots.sys)
    bus.write_config(A, COMMAND, 2, 0)
    with bus.registers(A):
        assert bus.read_config(A, COMMAND, 2) == 2
        assert bus.read(A, "power/control") == "on"
    assert bus.read_config(A, COMMAND, 2) == 0


def test_pins_of_a_gpu_that_somebody_has_are_not_read(roots: Roots) -> None:
    with holding(f"{roots.host}/dev/vfio/112") as pid:
        with pytest.raises(HostError, match=f"GPU {A}: no source knows its module id"):
            identify(roots)
        found, notes = identify(roots, [A], driver=[ModuleReading("driver", A, 2, "S1")])
    assert found == (GpuModule(A, 2, "S1", ("driver",)),)
    assert notes == (f"pins of GPU {A} were not read: process {pid} uses it",)


@pytest.mark.parametrize("word", [0xFFFFFFFF, 0xBADF1100])
def test_hidden_registers_are_no_answer(roots: Roots, word: int) -> None:
    set_register(roots, A, PINS[1], word)
    with pytest.raises(HostError, match="no source knows"):
        read_module_ids(roots, [A])
    assert "do not answer" in identify(roots, [A], driver=[ModuleReading("driver", A, 2)])[1][0]


@pytest.mark.parametrize("model", ["b200", "l40s"])
def test_boards_whose_pins_are_not_known_need_another_source(tmp_path: Path, model: str) -> None:
    roots = make_driverless(tmp_path / "host", 1, model)
    with pytest.raises(HostError, match="no source knows"):
        read_module_ids(roots)
    assert read_module_ids(roots, driver=[ModuleReading("driver", A, 3)]) == {A: 3}


READINGS: dict[str, tuple[list[ModuleReading], dict[str, int], str]] = {
    "two numbers": (
        [ModuleReading("table", A, 2), ModuleReading("pins", A, 5)], {}, f"GPU {A}: table says 2, pins says 5",
    ),
    "two serials": (
        [ModuleReading("table", A, 2, "S1"), ModuleReading("driver", A, 2, "S2")], {},
        "another board than before: table has serial S1, driver S2",
    ),
    "another board in the slot": (
        [ModuleReading("table", A, 2, "S1")], {"S9": 2}, "serial S1, the board controller's slot 2 S9",
    ),
    "two GPUs of one module": (
        [ModuleReading("table", A, 2), ModuleReading("table", B, 2)], {}, "both claim module 2",
    ),
    "none": ([ModuleReading("table", B, 2)], {}, f"GPU {A}: no source knows"),
    "too large": ([ModuleReading("driver", A, 17)], {}, "driver says 17: no module id"),
    "zero, as a driver that lost its GPU says": ([ModuleReading("driver", A, 0)], {}, "driver says 0: no module id"),
}  # fmt: skip


@pytest.mark.parametrize("case", READINGS)
def test_sources_that_do_not_agree_tell_nothing(case: str) -> None:
    readings, slots, message = READINGS[case]
    wanted = {A} | {one.bdf for one in readings}
    with pytest.raises(HostError, match=message) as raised:
        settle(wanted, readings, slots)
    assert raised.value.code == "OCIGPU-VFIO-7"


def test_a_serial_number_joins_the_board_controllers_slot_to_an_address(roots: Roots) -> None:
    table = [GpuModule(A, 2, "S1", ("driver",)), GpuModule(B, 4, "S2", ("driver",))]
    write_table(f"{roots.host}/table", table)
    found, _ = identify(roots, [A, B], table=f"{roots.host}/table", slots={"S1": 2, "S2": 4})
    assert found[0] == GpuModule(A, 2, "S1", ("table", "pins", "Redfish"))
    with pytest.raises(HostError, match=f"GPU {A}: table says 2, Redfish says 4"):
        identify(roots, [A, B], table=f"{roots.host}/table", slots={"S1": 4, "S2": 2})


def test_a_serial_number_that_nobody_told_is_that_of_the_slot(roots: Roots) -> None:
    assert identify(roots, [A], slots={"S7": 2})[0] == (GpuModule(A, 2, "S7", ("pins",)),)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2, "gpus": {}}', '{"format": 1, "gpus": {"a": {"module_id": "2"}}}']
)
def test_a_table_that_is_none_of_ours_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "table").write_text(text)
    with pytest.raises(HostError, match="table"):
        read_table(str(tmp_path / "table"))


def test_a_table_that_somebody_else_could_have_written_is_not_believed(tmp_path: Path) -> None:
    table = tmp_path / "table"
    write_table(str(table), [GpuModule("0000:01:00.0", 2, "", ())])
    assert [one.module_id for one in read_table(str(table))] == [2]
    for path, mode, back, words in (
        (table, 0o666, 0o644, "others may write"),
        (tmp_path, 0o777, 0o755, "others may replace files"),
    ):
        path.chmod(mode)
        with pytest.raises(HostError, match=words):
            read_table(str(table))
        path.chmod(back)


def test_the_command_keeps_a_table_and_refuses_a_node_that_contradicts_it(
    roots: Roots, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vfio", "identify", "--record", *config_of(roots)]) == 0
    kept = Path(f"{roots.host}/var/lib/ocigpu/module-ids.json")
    before = kept.read_bytes()
    assert {bdf: entry["module_id"] for bdf, entry in json.loads(before)["gpus"].items()} == MODULES
    assert main(["vfio", "identify", "--json", *config_of(roots)]) == 0
    capsys.readouterr()
    for offset in PINS:
        set_register(roots, A, offset, 0)  # the number of another module
    assert main(["vfio", "identify", "--record", *config_of(roots)]) == 1
    assert "OCIGPU-VFIO-7: module ids: GPU 0000:01:00.0: table says 2, pins says 5" in capsys.readouterr().err
    assert kept.read_bytes() == before
    assert main(["vfio", "identify", A, "--record", "--replaced", *config_of(roots)]) == 0
    assert main(["vfio", "identify", "--replaced", *config_of(roots)]) == 2
