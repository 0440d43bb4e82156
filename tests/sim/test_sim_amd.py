"""AMD's programs of a simulated host, read as scripts read the real ones, and held to what the kernel's files say."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.process import run

from ocigpu.gpus.amd import amd_smi, rocminfo
from ocigpu.gpus.amd.facts import read_facts
from ocigpu.gpus.amd.parts import read_parts
from ocigpu.sim.create import create_host
from ocigpu.sim.few import environment_of
from ocigpu.sim.models import MODELS
from ocigpu.system.settings_file import read_settings

AMD = [key for key, model in MODELS.items() if model.vendor == "amd"]


@pytest.fixture(params=AMD)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    create_host(str(tmp_path / "host"), 3, request.param, few=True)
    return tmp_path / "host"


def asked(host: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert amd_smi.main(str(host), [*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def model_of(host: Path) -> str:
    return str(json.loads((host / ".ocigpu-sim.json").read_text())["model"])


def test_gpus_are_those_that_plans_give(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = MODELS[model_of(host)]
    settings = read_settings(str(host / "config.toml"))
    facts = read_facts(settings).gpus
    listed = asked(host, capsys, "list")
    assert [(gpu["gpu"], f"0000{gpu['bdf']}", gpu["node_id"]) for gpu in listed] == [
        (gpu.index, gpu.bus_id, gpu.index + 1) for gpu in facts
    ]
    first = listed[0]["uuid"]
    assert re.fullmatch(rf"[0-9a-f]{{2}}ff{model.device_id:04x}-0000-1000-80[0-9a-f]{{2}}-[0-9a-f]{{12}}", first)
    assert len({gpu["uuid"] for gpu in listed}) == 3
    (second,) = asked(host, capsys, "static", "-g", "1", "-a", "-v", "-l")["gpu_data"]
    assert second.keys() == {"gpu", "asic", "limit", "vram"}
    asic = second["asic"]
    assert (asic["market_name"], asic["target_graphics_version"]) == (model.name, model.architecture)
    assert int(asic["asic_serial"], 16) == int(facts[1].uuid, 16)
    parts = read_parts(settings)
    assert str(asic["num_compute_units"]) == parts[1].capacity["computeUnits"] == str(model.multiprocessors)
    assert f"{second['vram']['size']['value']}Mi" == parts[1].capacity["memory"] == f"{model.memory_mib}Mi"
    assert second["limit"]["max_power"] == {"value": model.power_watts, "unit": "W"}


def test_metrics_are_those_of_the_kernels_files(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = host / "sys/bus/pci/devices/0000:42:00.0"
    (device / "gpu_busy_percent").write_text("37\n")
    (device / "mem_info_vram_used").write_text(f"{1000 << 20}\n")
    (metric,) = asked(host, capsys, "metric", "--gpu", asked(host, capsys, "list")[1]["uuid"])["gpu_data"]
    assert metric["usage"]["gfx_activity"] == {"value": 37, "unit": "%"}
    memory = metric["mem_usage"]
    assert memory["used_vram"] == {"value": 1000, "unit": "MB"}
    assert memory["total_vram"]["value"] - memory["free_vram"]["value"] == 1000
    assert (metric["power"]["socket_power"]["value"], metric["temperature"]["hotspot"]["value"]) == (140, 45)
    assert amd_smi.main(str(host), ["metric", "-g", "1", "-u", "-t"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("GPU: 1\n    USAGE:\n        GFX_ACTIVITY: 37 %\n")
    assert "        HOTSPOT: 45 °C\n" in text


def test_agents_are_listed(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = MODELS[model_of(host)]
    assert rocminfo.main(str(host), []) == 0
    text = capsys.readouterr().out
    agents = re.split(r"(?m)^Agent \d+ *$", text)[1:]
    found = [dict(re.findall(r"(?m)^  (\S[^:]*): +(.*?) *$", agent)) for agent in agents]
    assert [agent["Device Type"] for agent in found] == ["CPU", "GPU", "GPU", "GPU"]
    gpu = found[3]
    assert (gpu["Name"], gpu["Marketing Name"], gpu["Compute Unit"]) == (
        model.architecture, model.name, str(model.multiprocessors),
    )  # fmt: skip
    assert gpu["Chip ID"] == f"{model.device_id}(0x{model.device_id:x})"
    assert int(gpu["Uuid"].removeprefix("GPU-"), 16) == int(
        read_facts(read_settings(str(host / "config.toml"))).gpus[2].uuid, 16
    )
    # as scripts find out what to compile for
    assert set(re.findall(r"amdgcn-amd-amdhsa--(gfx\w+)", text)) == {model.architecture}
    assert f"{model.memory_mib << 10}(0x{model.memory_mib << 10:x}) KB" in agents[3]
    assert rocminfo.main(str(host), ["--colour"]) == 2


def test_commands_find_the_programs(tmp_path: Path) -> None:
    """The stubs, by PATH; a reader that has seen enough gets no traceback, and a host that is gone one line."""
    host = tmp_path / "a host's"
    create_host(str(host), 1, "mi355x", few=True)
    environment = environment_of(str(host), os.environ)
    done = run(["sh", "-c", "amd-smi version; rocminfo | head -1"], env=environment)
    assert done.stdout.splitlines() == [
        "AMDSMI Tool: 26.2.1 | AMDSMI Library version: 26.2.1 | ROCm version: 7.2.0 | amdgpu version: 6.16.6",
        "ROCk module version 6.16.6 is loaded",
    ]
    assert "amd-smi: SIMULATED host, no real GPU" in done.stderr
    (host / "sys").rename(host / "gone")
    failed = subprocess.run(["amd-smi", "list"], env=environment, capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr == "amd-smi: amdgpu drives no PCI device\n"


@pytest.mark.rest
def test_a_whole_host_has_the_programs_of_both_vendors(tmp_path: Path) -> None:
    create_host(str(tmp_path / "host"), 1, ("h100", "mi355x"), nodes=False, compat32=False, ldcache=False)
    marker = json.loads((tmp_path / "host/.ocigpu-sim.json").read_text())
    assert {"nvidia-smi", "amd-smi", "rocminfo"} <= set(marker["binaries"])
    assert run([tmp_path / "host/usr/bin/amd-smi", "list"]).stdout.startswith("GPU: 0\n    BDF: 0000:41:00.0\n")
