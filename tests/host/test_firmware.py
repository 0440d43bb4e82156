"""Firmware against a baseline that an operator has signed off."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.driverless import GPUS, make_driverless

from ocigpu.cli.front.main import main
from ocigpu.cli.host import firmware as firmware_command
from ocigpu.core.errors import HostError
from ocigpu.gpus.firmware.baseline import (
    FirmwareBaseline,
    FirmwareFacts,
    approve,
    compare_all,
    compare_with_baseline,
    facts_from_json,
    merge,
    propose,
    read_baseline,
    write_baseline,
)
from ocigpu.gpus.firmware.redfish import NodeFirmware, Redfish
from ocigpu.sim.redfish import RedfishService

VERSIONS = {"VBIOS": "96.00.BC.00.01", "InfoROM": "G520.0200.00.05"}
HEALTH = {"status": "OK", "uncorrectable-ecc-errors": 0, "row-remapping-failed": False}
GPU = FirmwareFacts("GPU_SXM_3", 3, "H100 80GB HBM3", "699-1", "S3", "u", VERSIONS, HEALTH)
BASELINE = propose([GPU])

DEVIATIONS = {
    "nothing": (GPU, []),
    "another version": (
        replace(GPU, versions={**VERSIONS, "VBIOS": "96.00.BC.00.02"}),
        ["GPU_SXM_3 VBIOS: 96.00.BC.00.02: not accepted (accepted: 96.00.BC.00.01)"],
    ),
    "silence": (
        replace(GPU, versions={"VBIOS": "96.00.BC.00.01"}),
        ["GPU_SXM_3 InfoROM: nothing: not reported (accepted: G520.0200.00.05)"],
    ),
    "something new": (
        replace(GPU, versions={**VERSIONS, "ERoT": "1"}), ["GPU_SXM_3 ERoT: 1: it is not in the baseline"],
    ),
    "another model": (
        replace(GPU, part_number="699-2"),
        ["GPU_SXM_3 model: H100 80GB HBM3 699-2: the baseline has no such model (accepted: H100 80GB HBM3 699-1)"],
    ),
    "errors": (
        replace(GPU, health={**HEALTH, "uncorrectable-ecc-errors": 1}),
        ["GPU_SXM_3 uncorrectable-ecc-errors: 1: more than the baseline's limit of 0"],
    ),
    "remapped rows within the limit": (replace(GPU, health={**HEALTH, "remapped-rows-uncorrectable": 8}), []),
    "remapped rows": (
        replace(GPU, health={**HEALTH, "remapped-rows-uncorrectable": 9}),
        ["GPU_SXM_3 remapped-rows-uncorrectable: 9: more than the baseline's limit of 8"],
    ),
    "a count that is true": (
        replace(GPU, health={**HEALTH, "uncorrectable-ecc-errors": False}),
        ["GPU_SXM_3 uncorrectable-ecc-errors: False: more than the baseline's limit of 0"],
    ),
    "repair failed": (
        replace(GPU, health={**HEALTH, "row-remapping-failed": True}),
        ["GPU_SXM_3 row-remapping-failed: True: the memory needs repair"],
    ),
    "critical": (
        replace(GPU, health={**HEALTH, "status": "Critical"}),
        ["GPU_SXM_3 status: Critical: not healthy (accepted: OK)"],
    ),
    "health that is not told any more": (
        replace(GPU, health={"status": "OK"}),
        [
            "GPU_SXM_3 row-remapping-failed: nothing: no longer reported",
            "GPU_SXM_3 uncorrectable-ecc-errors: nothing: no longer reported",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DEVIATIONS)
def test_every_difference_has_its_reason(case: str) -> None:
    facts, expected = DEVIATIONS[case]
    assert [one.text for one in compare_with_baseline(facts, BASELINE)] == expected


def test_any_value_will_do_where_the_baseline_says_so_but_one_is_needed() -> None:
    some = FirmwareBaseline({GPU.key: {"VBIOS": ("*",), "InfoROM": ("*",)}}, BASELINE.limits)
    assert compare_with_baseline(GPU, some) == ()
    assert len(compare_with_baseline(replace(GPU, versions={"VBIOS": "1"}), some)) == 1


def test_an_exchanged_or_missing_board_deviates() -> None:
    assert compare_all([GPU], BASELINE, {3: "S3"}) == ()
    other, silent = compare_all([GPU], BASELINE, {3: "S9", 4: "S4"})
    assert other.text == "GPU_SXM_3 serial: S3: another board (accepted: S9)"
    assert silent.text == "module 4 serial: nothing: not reported (accepted: S4)"


def test_a_merged_proposal_accepts_what_either_does() -> None:
    newer = replace(GPU, versions={**VERSIONS, "VBIOS": "96.00.BC.00.02"})
    both = merge(BASELINE, propose([newer]))
    assert compare_all([GPU, newer], both) == ()
    assert both.models[GPU.key]["VBIOS"] == ("96.00.BC.00.01", "96.00.BC.00.02")


def test_facts_come_back_from_json_as_they_were() -> None:
    assert facts_from_json(json.loads(json.dumps({"components": [GPU.as_json()]}))) == (GPU,)


@pytest.mark.parametrize(
    "document",
    [
        [], {}, {"components": 1}, {"components": [1]}, {"components": [{}] * 65},
        {"components": [{**GPU.as_json(), "slot": "3"}]},
        {"components": [{**GPU.as_json(), "versions": {"VBIOS": 7}}]},
        {"components": [{**GPU.as_json(), "versions": []}]},
        {"components": [{**GPU.as_json(), "name": "GPU\n"}]},
        {"components": [{**GPU.as_json(), "health": {"status": None}}]},
    ],
)  # fmt: skip
def test_facts_of_a_strange_form_are_refused(document: object) -> None:
    with pytest.raises(ValueError, match=r"not facts on firmware|too many|another type|is not a version"):
        facts_from_json(document)


def test_a_file_behind_a_link_to_a_directory_is_where_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "elsewhere/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("elsewhere/below")
    write_baseline(f"{tmp_path}/link/../base.json", BASELINE)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []
    assert read_baseline(str(tmp_path / "elsewhere/base.json"), proposal=True) == BASELINE


def test_a_baseline_counts_once_it_is_signed_off_and_until_it_is_changed(tmp_path: Path) -> None:
    path = str(tmp_path / "base.json")
    write_baseline(path, BASELINE)
    with pytest.raises(HostError, match="is a proposal") as raised:
        read_baseline(path)
    assert raised.value.code == "OCIGPU-FW-4"
    write_baseline(path, approve(read_baseline(path, proposal=True), "Ada Lovelace", 0))
    assert read_baseline(path) == FirmwareBaseline(
        BASELINE.models, BASELINE.limits, "Ada Lovelace", "1970-01-01T00:00:00Z", {GPU.key: tuple(sorted(HEALTH))}
    )
    text = Path(path).read_text()
    for old, new in (
        ("96.00.BC.00.01", "96.00.BC.00.66"),
        ("Ada Lovelace", "Eve"),
        ('": 8', '": 800'),
        ("status", "inforom-corrupted"),
    ):
        Path(path).write_text(text.replace(old, new))
        with pytest.raises(HostError, match="was changed after"):
            read_baseline(path)
    with pytest.raises(HostError, match="not a name"):
        approve(BASELINE, "")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "7", '{"format": 2}', "[" * 100_000, '{"format": 1, "models": {"a": {"b": []}}, "limits": {}}',
     '{"format": 1, "models": {}, "limits": {}, "health": {"a": ["x"]}, "approved": {"by": "", "at": "", "digest": 1}}',
     '{"format": 1, "models": {}, "limits": {"x": 1}, "approved": {"by": "", "at": "", "digest": ""}}'],
    ids=["empty", "list", "object", "number", "newer", "deep", "no values", "unknown health", "unknown limit"],
)  # fmt: skip
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "base.json").write_text(text)
    with pytest.raises(HostError, match="firmware baseline") as raised:
        read_baseline(str(tmp_path / "base.json"), proposal=True)
    assert raised.value.code == "OCIGPU-FW-4"


def test_a_baseline_of_before_is_signed_off_still(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    path.write_text(
        json.dumps({
            "format": 1, "models": {GPU.key: {"VBIOS": ["*"]}}, "limits": {},
            "approved": {"by": "Ada", "at": "1970-01-01T00:00:00Z", "digest":
                "e58db2b531c2ff396e9ab538c13f48948d12c9eb4675d165130d8a2dedc0ddf5"},
        })
    )  # fmt: skip
    assert read_baseline(str(path)).health == {}
    assert merge(read_baseline(str(path)), BASELINE).health == BASELINE.health


def test_a_baseline_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    write_baseline(str(path), approve(BASELINE, "Ada"))
    link = tmp_path / "secret" / "base.json"
    link.parent.mkdir()
    link.symlink_to(path)
    assert read_baseline(str(link)) == read_baseline(str(path)), "files of a secret of Kubernetes are links"
    link.parent.chmod(0o777)
    with pytest.raises(HostError, match="others may replace files"):
        read_baseline(str(link))
    path.chmod(0o666)
    with pytest.raises(HostError, match="others may write"):
        read_baseline(str(path))


def test_recorded_signed_off_and_checked_by_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host, base = tmp_path / "host", str(tmp_path / "base.json")
    make_driverless(host, 2)
    with RedfishService(str(host), str(tmp_path)) as service:
        source = ["--bmc", service.url, "--bmc-ca", service.certificate, "--credentials", str(host / "bmc-credentials")]
        check = ["firmware", "check", "--baseline", base, "--config", str(host / "config.toml")]
        assert main(["firmware", "show", *source]) == 0
        assert "GPU_SXM_4" in capsys.readouterr().out
        assert main(["firmware", "record", base, *source]) == 0
        assert main(["firmware", "record", base, *source]) == 2  # what is there is not replaced
        assert main([*check, *source]) == 3
        assert "OCIGPU-FW-4" in capsys.readouterr().err
        assert main(["firmware", "approve", base, "--by", "Ada"]) == 0
        assert main([*check, *source]) == 0
        assert "2 GPUs: as Ada signed off on " in capsys.readouterr().out
        documents = host / "redfish.json"
        documents.write_text(documents.read_text().replace("96.00.BC.00.01", "96.00.BC.00.02"))
        assert main([*check, "--json", *source]) == 1
        printed = json.loads(capsys.readouterr().out)
        assert [one["found"] for one in printed["deviations"]] == ["96.00.BC.00.02"] * 2
        assert main(["firmware", "record", base, "--add", *source]) == 0
        assert main([*check, *source]) == 3  # to be signed off again
        assert main(["firmware", "approve", base, "--by", "Ada"]) == 0
        assert main([*check, *source]) == 0
        capsys.readouterr()
        assert main(["firmware", "show", "--json", *source]) == 0
    facts = tmp_path / "facts.json"
    facts.write_text(capsys.readouterr().out)
    identify = ["vfio", "identify", "--firmware", str(facts), "--config", str(host / "config.toml")]
    assert main([*identify, "--record"]) == 0
    assert main([*check, "--facts-file", str(facts)]) == 0
    facts.write_text(facts.read_text().replace("16522309", "99999999"))
    capsys.readouterr()
    assert main([*check, "--facts-file", str(facts)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("deviates: GPU_SXM_") and "another board" in line for line in lines)
    assert main([*identify]) == 1
    assert f"GPU {GPUS[0]}: another board than before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["show"], 2, "one of --bmc, --nvml and --facts-file is needed"),
        (["show", "--bmc", "https://h"], 2, "--bmc needs --credentials"),
        (["show", "--facts-file", "/none"], 1, "OCIGPU-FW-2: facts /none: No such file"),
        (["show", "--bmc", "https://h", "--credentials", "/none"], 1, "OCIGPU-FW-3: read /none"),
        (
            ["show", "--bmc", "@/none", "--credentials", "/none"],
            1,
            "OCIGPU-FW-1: board controller: read /none:",
        ),
        (["check", "--baseline", "/none", "--bmc", "@/none", "--credentials", "/none"], 3, "OCIGPU-FW-4"),
        (["check", "--facts-file", "/none"], 2, "--baseline FILE is needed"),
        (["check", "--baseline", "/none", "--facts-file", "/none"], 3, "OCIGPU-FW-4: firmware baseline: read /none"),
        (["approve", "/none"], 2, "--by"),
    ],
)
def test_what_is_missing_is_said(
    words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["firmware", *words]) == status
    assert message in capsys.readouterr().err


def test_the_controllers_address_may_be_the_nodes_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One check command for all nodes: the address is in a file; without it the check could not be made (3)."""
    base, account, address = tmp_path / "base.json", tmp_path / "bmc", tmp_path / "bmc-address"
    write_baseline(str(base), approve(BASELINE, "Ada"))
    account.write_text("checker:secret\n")
    account.chmod(0o600)
    words = ["firmware", "check", "--baseline", str(base), "--bmc", f"@{address}", "--credentials", str(account)]
    assert main(words) == 3
    address.write_text("https://10.0.0.7\n")
    asked: list[str] = []

    def read(bmc: Redfish, _measurements: bool) -> NodeFirmware:
        asked.append(bmc.netloc)
        return NodeFirmware((GPU,), ())

    monkeypatch.setattr(firmware_command, "read_firmware", read)
    main(words)
    assert asked == ["10.0.0.7"]
    capsys.readouterr()
    address.chmod(0o666)  # whoever writes it has the credentials sent to him
    assert main(words) == 3
    assert "others may write" in capsys.readouterr().err
    assert asked == ["10.0.0.7"]


def test_one_gpu_is_checked_by_its_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host, base, facts = tmp_path / "host", str(tmp_path / "base.json"), tmp_path / "facts.json"
    make_driverless(host, 2)
    write_baseline(base, approve(BASELINE, "Ada"))
    words = ["firmware", "check", "--baseline", base, "--config", str(host / "config.toml"), "--facts-file", str(facts)]
    there = [replace(GPU, name="GPU_SXM_2", slot=2, serial="S2"), replace(GPU, name="GPU_SXM_4", slot=4, serial="S4")]
    there[1] = replace(there[1], health={"status": "Critical"})
    facts.write_text(json.dumps({"components": [one.as_json() for one in there]}))
    assert main([*words, GPUS[0]]) == 3
    assert "OCIGPU-VFIO-7: module ids: GPU 0000:01:00.0: not in this node's table" in capsys.readouterr().err
    assert main(["vfio", "identify", "--record", "--config", str(host / "config.toml")]) == 0
    assert main([*words, GPUS[0]]) == 0
    assert main([*words, "02:00.0"]) == 1
    facts.write_text(json.dumps({"components": [there[0].as_json()]}))
    capsys.readouterr()
    assert main([*words, GPUS[1]]) == 1
    assert capsys.readouterr().out == "deviates: GPU_SXM_4 firmware: nothing: not reported\n"
