"""Labels of a node, in the names of GPU feature discovery."""

import re
from pathlib import Path
from typing import Any

import pytest
from kubernetes_lab import configured, host, shared
from support.trees import pci_function, write_tree

from ocigpu.core.errors import HostError
from ocigpu.core.facts import Gpu, HostFacts, MigDevice
from ocigpu.gpus.nvidia.hardware import family
from ocigpu.gpus.on_node import GpuDetails, Hardware, MigSize
from ocigpu.kubernetes.labels.labels import (
    Surroundings,
    Vgpu,
    make_labels,
    make_machine_labels,
    parse_vgpu,
    render_features,
    sanitise,
)
from ocigpu.kubernetes.labels.program import read_surroundings, remove_features, write_features

T4 = host("t4-1")
A100 = host("a100-8")
COMPUTE = frozenset((0x0302,))
AROUND = Surroundings("DGX A100 (920-23687)", COMPUTE, None, 1700000000)
SIZE = MigSize(9856, 16, 1, 1, 1, 1, 0, 1, 0)


def labels(
    facts: HostFacts,
    file: dict[str, Any] | None = None,
    hardware: Hardware = Hardware(),  # noqa: B008 - immutable
    around: Surroundings = AROUND,
    **flags: str,
) -> dict[str, str]:
    found, _ = make_labels(facts, configured(file, **flags), hardware, around)
    assert all(re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", value) for value in found.values())
    assert [name for name, value in found.items() if not value] in ([], ["nvidia.com/gpu.sharing-strategy"])
    assert all(len(value) <= 63 for value in found.values())
    return {name.removeprefix("nvidia.com/"): value for name, value in found.items()}


def details(facts: HostFacts, memory: int = 40960, **more: Any) -> Hardware:
    return Hardware({gpu.uuid: GpuDetails(gpu.uuid, memory_mib=memory, **more) for gpu in facts.gpus})


def with_mig(*layouts: tuple[str, ...] | None) -> tuple[HostFacts, Hardware]:
    """A host with a GPU for each layout (None: without MIG), and what NVML says of it."""
    gpus, found = [], {}
    for index, profiles in enumerate(layouts):
        migs = tuple(MigDevice(n, f"MIG-{index}{n}", profile, n, 0, -1, -1) for n, profile in enumerate(profiles or ()))
        uuid = f"GPU-{index}"
        gpus.append(Gpu(index, index, uuid, "", "NVIDIA H100 80GB HBM3", architecture="9.0", mig_capable=True,
                        mig_enabled=profiles is not None, mig_devices=migs))  # fmt: skip
        found[uuid] = GpuDetails(uuid, memory_mib=81559, migs={mig.uuid: SIZE for mig in migs})
    return HostFacts(driver_version="550.163.01", cuda_version="12.4", gpus=tuple(gpus)), Hardware(found)


def test_a_node_with_whole_gpus() -> None:
    assert labels(A100, hardware=details(A100)) == {
        "gfd.timestamp": "1700000000",
        "cuda.driver.major": "550", "cuda.driver.minor": "163", "cuda.driver.rev": "01",
        "cuda.driver-version.major": "550", "cuda.driver-version.minor": "163",
        "cuda.driver-version.revision": "01", "cuda.driver-version.full": "550.163.01",
        "cuda.runtime.major": "12", "cuda.runtime.minor": "4",
        "cuda.runtime-version.major": "12", "cuda.runtime-version.minor": "4", "cuda.runtime-version.full": "12.4",
        "gpu.machine": "DGX-A100-920-23687", "gpu.mode": "compute",
        "gpu.count": "8", "gpu.replicas": "1", "gpu.sharing-strategy": "none",
        "gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.memory": "40960", "gpu.family": "ampere",
        "gpu.compute.major": "8", "gpu.compute.minor": "0",
        "mig.capable": "true", "mps.capable": "false", "vgpu.present": "false",
    }  # fmt: skip


def test_a_node_without_gpus_says_little() -> None:
    assert labels(HostFacts()) == {"gfd.timestamp": "1700000000", "vgpu.present": "false"}
    assert labels(HostFacts(), {"flags": {"gfd": {"noTimestamp": True}}}) == {"vgpu.present": "false"}


@pytest.mark.parametrize(
    ("file", "replicas", "strategy", "product"),
    [
        (shared({"name": "gpu", "replicas": 2}), "2", "time-slicing", "NVIDIA-A100-SXM4-40GB-SHARED"),
        (shared({"name": "gpu", "replicas": 2}, renameByDefault=True), "2", "time-slicing", "NVIDIA-A100-SXM4-40GB"),
        (shared({"name": "gpu", "replicas": 3}, strategy="mps"), "3", "mps", "NVIDIA-A100-SXM4-40GB-SHARED"),
        (shared({"name": "mig-1g.5gb", "replicas": 3}), "1", "none", "NVIDIA-A100-SXM4-40GB"),
    ],
)
def test_shared_gpus(file: dict[str, Any], replicas: str, strategy: str, product: str) -> None:
    found = labels(A100, file)
    assert (found["gpu.count"], found["gpu.replicas"], found["gpu.sharing-strategy"]) == ("8", replicas, strategy)
    assert (found["gpu.product"], found["mps.capable"]) == (product, "true" if strategy == "mps" else "false")


MODEL = "NVIDIA-H100-80GB-HBM3"


def test_mig_none_counts_gpus_that_cannot_be_given_whole_without_replicas() -> None:
    facts, hardware = with_mig(("1g.10gb",))
    found = labels(facts, hardware=hardware)
    assert (found["gpu.count"], found["gpu.replicas"], found["gpu.product"]) == ("1", "0", MODEL)
    assert "mig.strategy" not in found


@pytest.mark.parametrize("strategy", ["none", "single", "mixed"])
def test_gpus_that_are_cut_are_neither_shared_nor_capable_of_mps(strategy: str) -> None:
    """gpu.replicas=0 says that none is offered whole: a product "-SHARED" would say the opposite."""
    facts, hardware = with_mig(("1g.10gb",), ("2g.20gb",))
    found = labels(facts, shared({"name": "gpu", "replicas": 4}), hardware, mig_strategy=strategy)
    invalid = strategy == "single"
    assert found["gpu.product"] == (f"{MODEL}-MIG-INVALID" if invalid else MODEL)
    assert found["gpu.replicas"] == "0"
    assert found["gpu.sharing-strategy"] == ("" if invalid else "none")
    assert found["mps.capable"] == "false"
    if strategy != "mixed":  # which MPS refuses by itself
        mps = labels(facts, shared({"name": "gpu", "replicas": 4}, strategy="mps"), hardware, mig_strategy=strategy)
        assert mps["mps.capable"] == "false"
        assert mps["gpu.sharing-strategy"] == ("" if invalid else "none")


def test_whole_gpus_beside_cut_ones_are_shared() -> None:
    facts, hardware = with_mig(("1g.10gb",), None)
    found = labels(facts, shared({"name": "gpu", "replicas": 4}), hardware, mig_strategy="mixed")
    assert (found["gpu.product"], found["gpu.replicas"], found["gpu.sharing-strategy"]) == (
        f"{MODEL}-SHARED", "4", "time-slicing",
    )  # fmt: skip


def test_gpus_for_virtual_machines_have_product_count_and_mode() -> None:
    models = ["GH100 [H100 SXM5 80GB]", "GH100 [H100 SXM5 80GB]", "2901"]
    found, notes = make_machine_labels(models, configured(), AROUND)
    assert {name.removeprefix("nvidia.com/"): value for name, value in found.items()} == {
        "gfd.timestamp": "1700000000", "gpu.machine": "DGX-A100-920-23687", "gpu.mode": "compute",
        "gpu.count": "3", "gpu.replicas": "1", "gpu.sharing-strategy": "none",
        "gpu.product": "GH100-H100-SXM5-80GB", "mig.capable": "false", "mps.capable": "false",
        "vgpu.present": "false",
    }  # fmt: skip
    assert notes == ("GPUs of several models (2 GH100 [H100 SXM5 80GB], 1 2901): labels are of the most frequent one",)
    plain, _ = make_machine_labels(models, configured(no_timestamp="true"), AROUND)
    assert "nvidia.com/gfd.timestamp" not in plain


def test_mig_single() -> None:
    facts, hardware = with_mig(("1g.10gb", "1g.10gb"), ("1g.10gb",))
    found = labels(facts, shared({"name": "gpu", "replicas": 2}), hardware, mig_strategy="single")
    assert {name: value for name, value in found.items() if name.startswith(("gpu.", "mig."))} == {
        "gpu.product": f"{MODEL}-MIG-1g.10gb-SHARED", "gpu.count": "3", "gpu.replicas": "2",
        "gpu.sharing-strategy": "time-slicing", "gpu.memory": "9856", "gpu.multiprocessors": "16",
        "gpu.slices.gi": "1", "gpu.slices.ci": "1", "gpu.engines.copy": "1", "gpu.engines.decoder": "1",
        "gpu.engines.encoder": "0", "gpu.engines.jpeg": "1", "gpu.engines.ofa": "0", "gpu.family": "hopper",
        "gpu.compute.major": "9", "gpu.compute.minor": "0", "gpu.machine": "DGX-A100-920-23687",
        "gpu.mode": "compute", "mig.capable": "true", "mig.strategy": "single",
    }  # fmt: skip


@pytest.mark.parametrize("layouts", [(("1g.10gb",), None), (("1g.10gb", "2g.20gb"),), ((),)], ids=str)
def test_mig_single_that_cannot_be(layouts: tuple[tuple[str, ...] | None, ...]) -> None:
    facts, hardware = with_mig(*layouts)
    found = labels(facts, hardware=hardware, mig_strategy="single")
    assert (found["gpu.product"], found["gpu.count"], found["gpu.replicas"], found["gpu.memory"]) == (
        f"{MODEL}-MIG-INVALID", "0", "0", "0",
    )  # fmt: skip


def test_mig_single_without_mig_is_as_whole_gpus() -> None:
    facts, hardware = with_mig(None, None)
    found = labels(facts, hardware=hardware, mig_strategy="single")
    assert (found["gpu.product"], found["gpu.count"], found["mig.strategy"]) == (MODEL, "2", "single")


def test_mig_mixed() -> None:
    facts, hardware = with_mig(("1g.10gb", "1g.10gb", "1g.10gb+me", "1c.2g.20gb"), None)
    found = labels(facts, hardware=hardware, mig_strategy="mixed")
    assert (found["gpu.count"], found["gpu.replicas"], found["gpu.product"], found["gpu.memory"]) == (
        "2", "1", MODEL, "81559",
    )  # fmt: skip
    assert (found["mig-1g.10gb.count"], found["mig-1g.10gb.product"]) == ("2", f"{MODEL}-MIG-1g.10gb")
    assert (found["mig-1g.10gb.me.count"], found["mig-1g.10gb.me.product"]) == ("1", f"{MODEL}-MIG-1g.10gb.me")
    assert (found["mig-1g.10gb.memory"], found["mig-1g.10gb.engines.jpeg"]) == ("9856", "1")
    assert not [name for name in found if "1c." in name]


def test_a_label_whose_name_is_too_long_is_left_out() -> None:
    facts, hardware = with_mig(("1g.10gb",))
    file = {"resources": {"mig": [{"pattern": "*", "name": "m" * 50}]}}
    found, notes = make_labels(facts, configured(file, mig_strategy="mixed"), hardware, AROUND)
    assert found[f"nvidia.com/{'m' * 50}.count"] == "1"
    assert max(len(name.removeprefix("nvidia.com/")) for name in found) <= 63
    assert notes == (
        f"no label nvidia.com/{'m' * 50}.sharing-strategy: its name is longer than 63 characters",
        f"no label nvidia.com/{'m' * 50}.multiprocessors: its name is longer than 63 characters",
        f"no label nvidia.com/{'m' * 50}.engines.decoder: its name is longer than 63 characters",
        f"no label nvidia.com/{'m' * 50}.engines.encoder: its name is longer than 63 characters",
    )


def test_what_nvml_does_not_tell_has_no_label() -> None:
    facts, _ = with_mig(("1g.10gb",))
    found = labels(facts._replace(cuda_version=""), mig_strategy="mixed")
    assert not {"gpu.memory", "mig-1g.10gb.memory", "mig-1g.10gb.slices.gi", "cuda.runtime.major"} & set(found)
    assert found["mig-1g.10gb.count"] == "1"


@pytest.mark.parametrize("version", ["550", "550.54.15.1", "", "550.x"])
def test_a_driver_version_of_another_shape_has_no_labels(version: str) -> None:
    found, notes = make_labels(T4._replace(driver_version=version), configured(), Hardware(), AROUND)
    assert not [name for name in found if "cuda.driver" in name]
    assert notes == (f"no labels for driver version {version or 'unknown'}: it is not X.Y or X.Y.Z",)


def test_a_driver_version_may_have_two_parts() -> None:
    found = labels(T4._replace(driver_version="550.54"))
    assert (found["cuda.driver.minor"], found["cuda.driver-version.full"]) == ("54", "550.54")
    assert not {"cuda.driver.rev", "cuda.driver-version.revision"} & set(found)


def test_of_several_models_the_most_frequent_is_shown() -> None:
    gpus = (T4.gpus[0]._replace(index=9), *A100.gpus[:2])
    found, notes = make_labels(A100._replace(gpus=gpus), configured(), Hardware(), AROUND)
    assert (found["nvidia.com/gpu.product"], found["nvidia.com/gpu.count"]) == ("NVIDIA-A100-SXM4-40GB", "3")
    assert "2 NVIDIA A100-SXM4-40GB, 1 Tesla T4" in notes[0]


def test_a_bad_gpu_is_not_counted() -> None:
    broken = A100._replace(gpus=(A100.gpus[0]._replace(error="lost"), *A100.gpus[1:]))
    assert labels(broken)["gpu.count"] == "7"
    none = T4._replace(gpus=(T4.gpus[0]._replace(error="lost"),))
    assert (labels(none)["gpu.count"], labels(none)["gpu.product"]) == ("0", "Tesla-T4")


@pytest.mark.parametrize(
    ("classes", "mode"),
    [({0x0300}, "graphics"), ({0x0302}, "compute"), ({0x0300, 0x0302}, "unknown"), (set(), "unknown")],
)
def test_mode(classes: set[int], mode: str) -> None:
    assert labels(T4, around=Surroundings(pci_classes=frozenset(classes)))["gpu.mode"] == mode


def test_a_clique_has_a_label_when_all_gpus_are_in_it() -> None:
    assert labels(A100, hardware=details(A100, clique="0a-1b.7"))["gpu.clique"] == "0a-1b.7"
    mixed = details(A100, clique="0a-1b.7")
    mixed.gpus[A100.gpus[0].uuid] = GpuDetails(A100.gpus[0].uuid, clique="0a-1b.8")
    assert "gpu.clique" not in labels(A100, hardware=mixed)
    assert "gpu.clique" not in labels(A100, hardware=details(A100))
    assert "gpu.clique" not in labels(A100, hardware=details(A100, clique="0a-1b.7", fabric_problem="unknown"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("some ( thing )else", "some-thing-else"), ("NVIDIA-TITAN-X-(Pascal)", "NVIDIA-TITAN-X-Pascal"),
        ("  a\t b\n", "a-b"), ("", ""), ("Ünïcode", "ncode"),
    ],
)  # fmt: skip
def test_text_is_sanitised(text: str, expected: str) -> None:
    assert sanitise(text) == expected


def test_a_long_or_odd_machine_name_is_a_valid_value() -> None:
    assert labels(T4, around=Surroundings(machine="x" * 62 + " y"))["gpu.machine"] == "x" * 62
    for machine in ("", "(...)"):
        assert labels(T4, around=Surroundings(machine=machine))["gpu.machine"] == "unknown"


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("3.7", "kepler"), ("5.2", "maxwell"), ("6.1", "pascal"), ("7.0", "volta"), ("7.5", "turing"),
        ("8.0", "ampere"), ("8.8", "ampere"), ("8.9", "ada-lovelace"), ("9.0", "hopper"), ("10.3", "blackwell"),
        ("12.0", "blackwell"), ("13.0", "rubin"), ("11.0", "undefined"), ("4.0", "undefined"), ("", "undefined"),
    ],
)  # fmt: skip
def test_family(architecture: str, expected: str) -> None:
    assert family(architecture) == expected


# --- vGPU, files


def space(*capabilities: bytes, status: int = 0x10) -> bytes:
    data = bytearray(256)
    data[0x06] = status
    position = 0x40
    data[0x34] = position if capabilities else 0
    for number, capability in enumerate(capabilities):
        after = position + len(capability)
        data[position : position + len(capability)] = capability
        data[position + 1] = after if number + 1 < len(capabilities) else 0
        position = after
    return bytes(data)


RECORD = bytes((0, 22)) + b"550.163.01" + b"r550_00\0\0\0"
OTHER = bytes((7, 4, 1, 2))
POWER = bytes((1, 0, 8, 0, 0, 0, 0, 0))


def vendor(body: bytes) -> bytes:
    return bytes((9, 0, 3 + len(body))) + body


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (space(POWER, vendor(b"VF" + OTHER + RECORD)), Vgpu("550.163.01", "r550_00")),
        (space(vendor(b"VF" + OTHER)), Vgpu()),
        (space(vendor(b"VF")), Vgpu()),
        (space(vendor(b"VF\x07\x00")), Vgpu()),
        (space(vendor(b"XX" + RECORD)), None),
        (space(POWER), None),
        (space(), None),
        (space(vendor(b"VF" + RECORD), status=0), None),
        (space(vendor(b"VF" + RECORD))[:64], None),
        (b"", None),
        (b"\xff" * 256, None),
    ],
)
def test_a_vgpu_is_known_by_its_capability(config: bytes, expected: Vgpu | None) -> None:
    assert parse_vgpu(config) == expected


def test_capabilities_that_go_in_a_circle_end() -> None:
    config = bytearray(space(POWER))
    config[0x41] = 0x40
    assert parse_vgpu(bytes(config)) is None


def test_surroundings_are_read_from_the_host(tmp_path: Path) -> None:
    address = "0000:3b:00.0"
    write_tree(
        tmp_path,
        {
            **pci_function(address, "10de:2330", "0302"),
            **pci_function("0000:3b:00.1", "10de:22bb", "0403"),
            f"/sys/bus/pci/devices/{address}/config": space(vendor(b"VF" + RECORD)),
            "/sys/class/dmi/id/product_name": "DGX H100\n",
        },
    )
    found = read_surroundings(f"{tmp_path}/sys", f"{tmp_path}/sys/class/dmi/id/product_name", 5)
    assert found == Surroundings("DGX H100", COMPUTE, Vgpu("550.163.01", "r550_00"), 5)
    assert read_surroundings(f"{tmp_path}/none", f"{tmp_path}/none", None) == Surroundings()
    assert labels(T4, around=found)["vgpu.host-driver-version"] == "550.163.01"


def test_features_are_written_whole_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "features.d/gfd"
    text = render_features({"nvidia.com/b": "2", "nvidia.com/a": "1"})
    assert text == "nvidia.com/a=1\nnvidia.com/b=2\n"
    for content in ("old\n", text):
        write_features(str(path), content)
        assert path.read_text() == content
        assert [each.name for each in path.parent.iterdir()] == ["gfd"]
    assert path.stat().st_mode & 0o777 == 0o644
    remove_features(str(path))
    remove_features(str(path))
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "gfd").mkdir()
    with pytest.raises(HostError, match=r"^write .*/gfd: "):
        write_features(str(tmp_path / "gfd"), "")
    assert [each.name for each in tmp_path.iterdir()] == ["gfd"]
    with pytest.raises(HostError, match=r"^remove .*/gfd: "):
        remove_features(str(tmp_path / "gfd"))
