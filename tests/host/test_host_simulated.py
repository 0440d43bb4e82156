"""Discovery on hosts that ``ocigpu sim create`` makes: a real NVML by dlopen, real nodes where mknod is permitted."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts, facts_from_json, facts_to_json
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.sim.create import create_host
from ocigpu.system.settings_file import read_settings

Maker = Callable[..., tuple[Path, Callable[[], HostFacts]]]


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    def make_host(**options: object) -> tuple[Path, Callable[[], HostFacts]]:
        config = create_host(str(tmp_path / "host"), **options)
        return tmp_path / "host", lambda: read_host_facts(read_settings(config))

    return make_host


@pytest.mark.parametrize("gpus", [1, 8, 64])
def test_a_simulated_host_is_read_completely(make: Maker, gpus: int) -> None:
    _, read = make(gpus=gpus)
    facts = read()
    assert (facts.source, facts.simulated, facts.notes) == ("nvml", True, ())
    assert [gpu.index for gpu in facts.gpus] == list(range(gpus))
    assert all(gpu.node and gpu.architecture and gpu.proc_name and not gpu.error for gpu in facts.gpus)
    assert len({gpu.uuid for gpu in facts.gpus}) == gpus
    assert {"libcuda.so.1", "libnvidia-ml.so.1"} <= {item.soname for item in facts.libraries if item.bits == 64}
    assert facts.binaries[0].container_path == "/usr/bin/nvidia-smi"
    assert facts.firmware
    assert facts.configs
    assert all(Path(item.host_path).is_file() for item in facts.libraries)
    assert facts_from_json(facts_to_json(facts)) == facts


def test_mig_devices_have_names_minors_and_nodes(make: Maker) -> None:
    _, read = make(gpus=2, mig=("0:1g.10gb,3g.40gb",))
    facts = read()
    first, second = facts.gpus
    assert [mig.profile for mig in first.mig_devices] == ["1g.10gb", "3g.40gb"]
    assert all(mig.uuid.startswith("MIG-") and mig.gi_minor > 0 and mig.ci_minor > 0 for mig in first.mig_devices)
    assert (second.mig_capable, second.mig_enabled, second.mig_devices) == (True, False, ())
    minors = {node.minor for _, node in facts.cap_nodes}
    assert {minor for mig in first.mig_devices for minor in (mig.gi_minor, mig.ci_minor)} <= minors
    paths = [path for path, _ in facts.cap_nodes]
    assert paths[:2] == ["config", "monitor"]


def test_a_lost_gpu_is_told_and_the_others_are_given(make: Maker) -> None:
    root, read = make(gpus=4)
    (root / "faults").write_text("lost 3\n")
    assert [gpu.error for gpu in read().gpus] == ["", "", "", "GPU is lost (NVML 15)"]


def test_without_nvml_the_list_is_that_of_procfs(make: Maker) -> None:
    root, read = make(gpus=2, mig=("0:1g.10gb",))
    before = read()
    for path in root.glob("usr/lib/*/libnvidia-ml.so*"):
        path.unlink()
    facts = read()
    assert facts.source == "procfs"
    assert facts.notes == (f"NVML: no library of it below {root}; GPUs come from procfs, without their architecture",)
    assert [(gpu.index, gpu.uuid, gpu.node) for gpu in facts.gpus] == [
        (gpu.index, gpu.uuid, gpu.node) for gpu in before.gpus
    ]
    assert [mig.gi_minor for mig in facts.gpus[0].mig_devices] == [mig.gi_minor for mig in before.gpus[0].mig_devices]


def test_an_nvml_that_fails_leaves_the_list_to_procfs(make: Maker) -> None:
    root, read = make(gpus=2)
    (root / "faults").write_text("init 999\n")
    facts = read()
    assert (facts.source, len(facts.gpus)) == ("procfs", 2)
    assert "NVML 999" in facts.notes[0]


def test_another_module_version_is_a_mismatch(make: Maker) -> None:
    root, read = make(gpus=1)
    version = root / "proc/driver/nvidia/version"
    text = version.read_text()
    version.chmod(0o644)
    found = read().driver_version
    version.write_text(text.replace(found, "535.54.03"))
    with pytest.raises(HostError) as caught:
        read()
    assert caught.value.code == "OCIGPU-HOST-2"
    assert "535.54.03" in caught.value.message
    assert found in caught.value.message


def test_the_loader_cache_makes_no_difference(make: Maker) -> None:
    root, read = make(gpus=1)
    with_cache = read().libraries
    (root / "etc/ld.so.cache").unlink()
    assert read().libraries == with_cache


def test_a_host_made_without_privileges_is_read_as_well(make: Maker) -> None:
    root, read = make(gpus=2, nodes=False)
    facts = read()
    assert [gpu.node.host_path for gpu in facts.gpus if gpu.node] == [f"{root}/dev/nvidia0", f"{root}/dev/nvidia1"]
