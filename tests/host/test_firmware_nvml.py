"""Firmware as the driver tells it, by the real NVML interface of a simulated driver."""

import json
from typing import Any

import pytest
from support.product import SimulatedHost

from ocigpu.cli.front.main import main
from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts
from ocigpu.gpus.firmware.baseline import compare_with_baseline, facts_from_json, propose
from ocigpu.gpus.nvidia import firmware
from ocigpu.gpus.nvidia.firmware import read_driver_firmware
from ocigpu.gpus.nvidia.nvml_process import NvmlError

ANSWER: dict[str, Any] = {
    "bus_id": "00000000:1B:00.0", "uuid": "GPU-1", "model": "NVIDIA H100 80GB HBM3", "part_number": "900-1",
    "serial": "165", "module_id": 3, "vbios": "96.00.BC.00.01", "inforom": "G520.0200.00.05", "corrupted": False,
    "ecc": 0, "rows": 0, "pending": False, "failed": False, "ecc_mode": [1, 1], "mig_mode": [0, 0],
}  # fmt: skip


def read(monkeypatch: pytest.MonkeyPatch, *answers: object) -> Any:
    monkeypatch.setattr(firmware, "ask", lambda *_, **__: answers)
    return read_driver_firmware(HostFacts())


def test_the_driver_of_a_host_tells_modules_and_firmware(
    simulated_host: SimulatedHost, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--config", str(simulated_host.settings)]
    assert main(["firmware", "show", "--nvml", "--json", *config]) == 0
    found = facts_from_json(json.loads(capsys.readouterr().out))
    assert [one.slot for one in found] == list(range(1, len(found) + 1))
    assert {one.versions["VBIOS"] for one in found} == {"00.00.00.00.00"}
    assert found[0].health["uncorrectable-ecc-errors"] == 0
    assert main(["firmware", "show", "--nvml", *config]) == 0
    capsys.readouterr()
    assert main(["vfio", "identify", "--nvml", "--json", *config]) == 0
    gpus = json.loads(capsys.readouterr().out)["gpus"]
    assert [(one["bdf"], one["module_id"], one["sources"]) for one in gpus[:1]] == [("0000:01:00.0", 1, ["driver"])]


def test_what_the_driver_says_is_compared_as_what_a_controller_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(monkeypatch, ANSWER)["0000:1b:00.0"]
    assert (found.name, found.slot, found.key) == ("GPU_SXM_3", 3, "NVIDIA H100 80GB HBM3 900-1")
    baseline = propose([found])
    assert compare_with_baseline(found, baseline) == ()
    broken = read(monkeypatch, {**ANSWER, "corrupted": True, "vbios": None, "ecc_mode": [1, 0], "mig_mode": [1, 1]})[
        "0000:1b:00.0"
    ]
    assert [one.text for one in compare_with_baseline(broken, baseline)] == [
        "GPU_SXM_3 ECC: on/off: not accepted (accepted: on/on)",
        "GPU_SXM_3 MIG: on/on: not accepted (accepted: off/off)",
        "GPU_SXM_3 VBIOS: nothing: not reported (accepted: 96.00.BC.00.01)",
        "GPU_SXM_3 inforom-corrupted: True: the InfoROM is damaged",
    ]


def test_a_card_is_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = read(monkeypatch, {**ANSWER, "module_id": None, "inforom": None, "ecc": None, "ecc_mode": None}).values()
    assert (found.name, found.slot) == ("0000:1b:00.0", -1)
    assert "uncorrectable-ecc-errors" not in found.health


@pytest.mark.parametrize("answer", [{}, {**ANSWER, "vbios": "\x1b"}, 7])
def test_what_no_driver_says_is_an_error(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    with pytest.raises(HostError, match="firmware by NVML") as raised:
        read(monkeypatch, answer)
    assert raised.value.code == "OCIGPU-FW-2"


def test_a_driver_that_gives_no_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NvmlError("NVML did not answer within 60 s")

    monkeypatch.setattr(firmware, "ask", fail)
    with pytest.raises(HostError, match="did not answer") as raised:
        read_driver_firmware(HostFacts())
    assert raised.value.code == "OCIGPU-FW-1"
