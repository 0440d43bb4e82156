"""What a node offers to claims, as ResourceSlices: names and types, limits, generations, comparison."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from dra_lab import DRIVER, NODE
from kubernetes_lab import host

from ocigpu.gpus.nvidia.mig_layout import GpuInstance, GpuLayout, Profile
from ocigpu.gpus.nvidia.topology import GpuPlace
from ocigpu.gpus.on_node import GpuDetails, Hardware, MigSize
from ocigpu.gpus.parts import as_version
from ocigpu.gpus.pci import Function, read_addressable
from ocigpu.gpus.vfio.facts import Candidate, VfioFacts
from ocigpu.kubernetes.cluster.quantity import parse_quantity
from ocigpu.kubernetes.dra.devices import (
    DeviceOptions,
    DraDevice,
    DraNode,
    Taint,
    make_devices,
)
from ocigpu.kubernetes.dra.slices import (
    MAX_COUNTED_DEVICES,
    ApiFeatures,
    Pool,
    Present,
    as_objects,
    check_device,
    dropped_fields,
    features_without,
    from_version,
    make_slices,
    plan_slices,
    same_slices,
    to_version,
)

A100 = host("a100-8")
MIG = host("h100-8-mig")
POOL = Pool(DRIVER, NODE)
SEVEN = (
    Profile("1g.10gb", 19, 1, 7, 1, (0, 1, 2, 3, 4, 5, 6)),
    Profile("1g.20gb", 15, 1, 4, 2, (0, 2, 4, 6)),
    Profile("2g.20gb", 14, 2, 3, 2, (0, 2, 4)),
    Profile("3g.40gb", 9, 3, 2, 4, (0, 4)),
    Profile("4g.40gb", 5, 4, 1, 4, (0,)),
    Profile("7g.80gb", 0, 7, 1, 8, (0,)),
)


def layout(index: int, *instances: GpuInstance) -> GpuLayout:
    gpu = MIG.gpus[index]
    return GpuLayout(index, gpu.uuid, gpu.bus_id, gpu.model, 0x2330, 0, 1, 1, SEVEN, instances)


def node(facts: Any = A100, **more: Any) -> DraNode:
    details = {gpu.uuid: GpuDetails(gpu.uuid, gpu.bus_id, 81920) for gpu in facts.gpus}
    return DraNode(facts, Hardware(details), **more)


def test_a_gpu_has_the_vendors_names_and_types() -> None:
    gpu = A100.gpus[0]
    places = {gpu.bus_id: GpuPlace(("pci0000:00", "0000:00:01.0"), 0)}
    device = make_devices(node(places=places))[0]
    assert device.name == f"gpu-{gpu.minor}"
    assert device.capacity == {"memory": "81920Mi"}
    assert device.attributes == {
        "type": {"string": "gpu"},
        "uuid": {"string": gpu.uuid},
        "index": {"int": 0},
        "productName": {"string": gpu.model},
        "brand": {"string": gpu.brand},
        "architecture": {"string": "Ampere"},
        "cudaComputeCapability": {"version": "8.0.0"},
        "driverVersion": {"version": as_version(A100.driver_version)},
        "cudaDriverVersion": {"version": as_version(A100.cuda_version)},
        "resource.kubernetes.io/pciBusID": {"string": gpu.bus_id.removeprefix("0000")},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:00"},
        "resource.kubernetes.io/numaNode": {"int": 0},
    }
    assert check_device(device) == ()


@pytest.mark.parametrize(
    ("text", "version"), [("550.163.01", "550.163.1"), ("9.0", "9.0.0"), ("12.4", "12.4.0"), ("", ""), ("x", "")]
)
def test_versions_are_semantic(text: str, version: str) -> None:
    assert as_version(text) == version


def test_static_mig_devices_are_plain_devices() -> None:
    gpu = next(gpu for gpu in MIG.gpus if gpu.mig_devices)
    mig = gpu.mig_devices[0]
    shape = layout(gpu.index, GpuInstance(9, 4, (3,), mig.gpu_instance, (mig.uuid,)))
    sizes = {mig.uuid: MigSize(40192, 60, 3, 3, 3, 3, 0, 3, 0)}
    hardware = Hardware({gpu.uuid: GpuDetails(gpu.uuid, gpu.bus_id, 81920, migs=sizes)})
    devices = make_devices(DraNode(MIG, hardware, (shape,)))
    device = next(each for each in devices if each.id == mig.uuid)
    assert device.name == f"gpu-{gpu.minor}-mig-{mig.profile.replace('.', '')}-9-4"
    assert device.memory == (4, 5, 6, 7)
    assert device.attributes["parentUUID"] == {"string": gpu.uuid}
    assert device.attributes["profile"] == {"string": mig.profile}
    assert device.capacity["memory"] == "40192Mi"
    assert device.capacity["multiprocessors"] == "60"
    assert {name for name in device.capacity if name.startswith("memorySlice")} == {
        f"memorySlice{number}" for number in (4, 5, 6, 7)
    }
    assert not any(each.id == gpu.uuid for each in devices), "a GPU in MIG mode is not offered as a whole"
    assert make_slices(devices, POOL)[0].get("sharedCounters") is None
    without = [each.name for each in make_devices(DraNode(MIG, hardware))]
    assert len(set(without)) == len(without), "without NVML's placements the names differ all the same"


def nine_gpus() -> tuple[DraDevice, ...]:
    """Nine GPUs in MIG mode with 19 placements each."""
    gpus = tuple(
        MIG.gpus[0]._replace(
            index=n, minor=n, uuid=f"GPU-{n}", bus_id=f"00000000:{n + 1:02x}:00.0", mig_enabled=True, mig_devices=()
        )
        for n in range(9)
    )
    shapes = tuple(layout(0)._replace(number=gpu.index, uuid=gpu.uuid, bus_id=gpu.bus_id) for gpu in gpus)
    return make_devices(DraNode(MIG._replace(gpus=gpus), layouts=shapes), DeviceOptions(dynamic_mig=True))


def test_dynamic_mig_devices_share_counters() -> None:
    devices = nine_gpus()
    assert len(devices) == 9 * (7 + 4 + 3 + 2 + 1 + 1)
    slices = make_slices(devices, POOL)
    counters = [each for each in slices if "sharedCounters" in each]
    assert [len(each["sharedCounters"]) for each in counters] == [8, 1], "at most 8 sets in a slice, none with devices"
    assert slices[: len(counters)] == tuple(counters), "counters come first"
    assert all("devices" not in each for each in counters)
    rest = [each for each in slices if "devices" in each]
    assert [len(each["devices"]) for each in rest] == [64, 64, 34]
    assert {each["pool"]["resourceSliceCount"] for each in slices} == {len(slices)}
    assert {each["pool"]["generation"] for each in slices} == {1}
    sets = {each["name"]: each["counters"] for part in counters for each in part["sharedCounters"]}
    for device in [device for each in rest for device in each["devices"]]:
        (consumed,) = device["consumesCounters"]
        assert consumed["counters"].keys() <= sets[consumed["counterSet"]].keys()
    seven = next(device for device in rest[0]["devices"] if device["name"] == "gpu-0-mig-7g80gb-0-0")
    assert len(seven["consumesCounters"][0]["counters"]) == 8
    assert all(check_device(device) == () for device in devices)


def test_without_counters_nothing_is_offered_that_needs_them() -> None:
    slices = make_slices(nine_gpus(), POOL, ApiFeatures(counters=False))
    assert [each.get("devices") for each in slices] == [[]]
    tainted = [each._replace(taints=(Taint("k", "79"),)) for each in make_devices(node())[:1]]
    assert make_slices(tainted, POOL, ApiFeatures(taints=False))[0]["devices"] == []
    assert make_slices(tainted, POOL)[0]["devices"][0]["taints"] == [
        {"key": "k", "value": "79", "effect": "NoSchedule"}
    ]


def test_a_pool_without_devices_has_a_slice() -> None:
    (empty,) = make_slices((), POOL)
    assert empty["devices"] == []
    assert empty["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    assert empty["nodeName"] == NODE


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attributes": {"productName": {"string": "x" * 65}}}, 'attribute "productName": string of 65 characters'),
        ({"attributes": {"n" * 33: {"int": 1}}}, "its name has 33 characters"),
        ({"attributes": {"a-b": {"int": 1}}}, "not a C identifier"),
        ({"attributes": {f"{'d' * 64}/x": {"int": 1}}}, "its domain is not"),
        ({"attributes": {"v": {"version": "550.163.01"}}}, "not a semantic version"),
        ({"attributes": {"v": {"int": 1, "bool": True}}}, "not have exactly one value"),
        ({"attributes": {f"a{n}": {"int": n} for n in range(33)}}, "33 attributes and capacities"),
        ({"capacity": {"memory": "80 GiB"}}, "is not a quantity"),
        ({"name": "GPU_0"}, "name is not a DNS label"),
    ],
)
def test_what_the_api_would_refuse_is_named_with_its_field(changes: dict[str, Any], problem: str) -> None:
    device = DraDevice("gpu-0", "gpu", "0000:01:00.0", "GPU-1", {}, {})._replace(**changes)
    assert any(problem in text for text in check_device(device)), check_device(device)


@pytest.mark.parametrize(
    ("one", "two"), [("80Gi", "81920Mi"), ("1", "1000m"), ("1e3", "1k"), ("2E", "2000P"), ("1.5Gi", "1536Mi")]
)
def test_quantities_are_compared_by_their_amount(one: str, two: str) -> None:
    assert parse_quantity(one) == parse_quantity(two)
    assert parse_quantity("") is None
    assert parse_quantity("1Q") is None
    assert parse_quantity("1K") is None
    assert parse_quantity("1e9999999999") is None
    assert parse_quantity("1e" + "9" * 5000) is None
    assert parse_quantity("1.2.3") is None
    assert parse_quantity("1Ki") == 1024


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1e300000", (1 << 63) - 1),
        ("1E2147483647", (1 << 63) - 1),
        ("-1e999999", 1 - (1 << 63)),
        ("9" * 250, (1 << 63) - 1),
        ("16Ei", (1 << 63) - 1),
        ("1e-999999", Decimal("1e-9")),
        ("0.1n", Decimal("1e-9")),
        ("0e999999", 0),
        ("9" * 5000, None),
        (f"1{'.' * 5000}", None),
    ],
)
def test_quantities_are_within_the_limits_of_kubernetes(text: str, amount: Decimal | int | None) -> None:
    found = parse_quantity(text)
    assert found == amount
    assert found is None or len(f"{found.normalize():f}") < 32


def test_slices_are_compared_by_what_they_mean() -> None:
    wanted = make_slices(make_devices(node()), POOL)
    other = [to_version(each, "v1beta1") for each in wanted]
    assert "basic" in other[0]["devices"][0]
    back = [from_version(each, "v1beta1") for each in other]
    back[0]["devices"][0]["capacity"] = {"memory": {"value": "80Gi"}}
    back[0]["allNodes"] = False
    back[0]["devices"][0]["taints"] = []
    assert same_slices(wanted, back)
    back[0]["devices"][0]["attributes"] = {"type": {"string": "mig"}}
    assert not same_slices(wanted, back)
    zero = DraDevice("a", "gpu", "b", "c", {"n": {"int": 0}, "f": {"bool": False}}, {})
    for attributes in ({"f": {"bool": False}}, {"n": {"int": 0}}):
        assert not same_slices(make_slices([zero], POOL), make_slices([zero._replace(attributes=attributes)], POOL))


def test_nothing_is_written_for_nothing_and_a_pool_changes_as_a_whole() -> None:
    wanted = make_slices(make_devices(node()), POOL)
    first = plan_slices(wanted, ())
    assert [each["pool"]["generation"] for each in first.create] == [1]
    present = [Present(f"s{number}", each) for number, each in enumerate(first.create)]
    assert plan_slices(wanted, present) == ((), ())
    fewer = make_slices(make_devices(node())[1:], POOL)
    change = plan_slices(fewer, present)
    assert [each["pool"]["generation"] for each in change.create] == [2]
    assert change.delete == ("s0",)
    left = [*present, *(Present("new", each) for each in change.create)]
    assert plan_slices(fewer, left) == ((), ("s0",)), "what an interrupted change has left goes"


def test_names_keep_the_order_and_the_owner_ends_them() -> None:
    owner = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "u"}
    objects = as_objects(make_slices(nine_gpus(), POOL), POOL._replace(owner=owner))
    names = [each["metadata"]["generateName"] for each in objects]
    assert names[0] == f"00000-{DRIVER}-{NODE}-"
    assert names == sorted(names)
    assert objects[0]["metadata"]["ownerReferences"] == [owner]


def test_dropped_fields_are_noticed() -> None:
    wanted = make_slices(nine_gpus(), POOL)
    kept = {name: value for name, value in wanted[0].items() if name != "sharedCounters"}
    assert dropped_fields(wanted[0], kept) == ("sharedCounters",)
    devices = [{"name": each["name"], "attributes": each["attributes"]} for each in wanted[2]["devices"]]
    missing = dropped_fields(wanted[2], {**wanted[2], "devices": devices})
    assert "devices[0].consumesCounters" in missing
    assert features_without(ApiFeatures(), missing) == ApiFeatures(counters=False)
    assert features_without(ApiFeatures(), ("devices[1].taints",)) == ApiFeatures(taints=False)
    assert dropped_fields(wanted[2], wanted[2]) == ()


@pytest.mark.parametrize(
    ("shares", "policies"),
    [
        ("unlimited", {"memory": {"default": "0", "validRange": {"min": "0"}}}),
        ("memory", {"memory": {"default": "81920Mi", "validRange": {"min": "1Mi", "step": "1Mi"}}}),
        (
            "4",
            {
                "memory": {"default": "0", "validRange": {"min": "0"}},
                "shares": {"default": "1", "validRange": {"min": "1", "step": "1"}},
            },
        ),
        (
            "1",
            {
                "memory": {"default": "0", "validRange": {"min": "0"}},
                "shares": {"default": "1", "validRange": {"min": "1"}},
            },
        ),
    ],
)
def test_what_a_claim_takes_of_a_shared_gpu(shares: str, policies: dict[str, Any]) -> None:
    """Rules of CapacityRequestPolicy: the default is a multiple of the step, and min and step are within the value."""
    devices = make_devices(node(), DeviceOptions(shares=shares))
    device = make_slices(devices, POOL)[0]["devices"][0]
    assert device["allowMultipleAllocations"] is True
    found = {name: each["requestPolicy"] for name, each in device["capacity"].items() if "requestPolicy" in each}
    assert found == policies
    for name, policy in found.items():
        default, least = (parse_quantity(each) for each in (policy["default"], policy["validRange"]["min"]))
        value, step = (
            parse_quantity(device["capacity"][name]["value"]),
            parse_quantity(policy["validRange"].get("step")),
        )
        assert default is not None
        assert least is not None
        assert value is not None
        assert least <= default <= value
        assert not step or (default % step == 0 and least + step <= value)
    plain = make_slices(devices, POOL, ApiFeatures(sharing=False))[0]["devices"][0]
    assert plain["capacity"]["memory"] == {"value": "81920Mi"}
    dropped = dropped_fields(device, plain)
    assert features_without(ApiFeatures(), dropped) == ApiFeatures(sharing=False)
    spelled = [{**each, "devices": [*each["devices"]]} for each in make_slices(devices, POOL)]
    spelled[0]["devices"][0] = {
        **device,
        "capacity": {
            **device["capacity"],
            "memory": {
                "value": "80Gi",
                "requestPolicy": {
                    **policies["memory"],
                    "validRange": {
                        name: {"1Mi": "1048576"}.get(text, text)
                        for name, text in policies["memory"]["validRange"].items()
                    },
                },
            },
        },
    }
    assert same_slices(make_slices(devices, POOL), spelled)


def test_gpus_for_virtual_machines() -> None:
    functions = [Function(f"0000:{bus:02x}:00.0", 0x10DE, 0x2330, 0x0302, "vfio-pci") for bus in (0x81, 0x82)]
    switch = Function("0000:90:00.0", 0x10DE, 0x22A3, 0x0680, "vfio-pci")
    facts = VfioFacts(tuple(Candidate(each, n + 5) for n, each in enumerate([*functions, switch])), iommufd=True)
    places = {"00000000:81:00.0": GpuPlace(("pci0000:80",), 1)}
    devices = make_devices(DraNode(vfio=facts, places=places, models={0x2330: "H100 SXM5 80GB"}))
    assert [each.name for each in devices] == ["gpu-vfio-0000-81-00-0", "gpu-vfio-0000-82-00-0"]
    left = make_devices(DraNode(vfio=facts._replace(candidates=facts.candidates[1:])))
    assert [each.name for each in left] == ["gpu-vfio-0000-82-00-0"], "one that is lost renames no other"
    assert devices[0].attributes == {
        "type": {"string": "vfio"},
        "deviceID": {"string": "0x2330"},
        "vendorID": {"string": "0x10de"},
        "iommuFDEnabled": {"bool": True},
        "productName": {"string": "H100 SXM5 80GB"},
        "numa": {"int": 1},
        "resource.kubernetes.io/pciBusID": {"string": "0000:81:00.0"},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:80"},
        "resource.kubernetes.io/numaNode": {"int": 1},
    }


def test_machines_are_told_how_much_they_must_address(tmp_path: Path) -> None:
    """The 64-bit regions of an H100 as its driver lays them out, to the next power of two; others do not count."""
    path = tmp_path / "bus/pci/devices/0000:81:00.0/resource"
    path.parent.mkdir(parents=True)
    none = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n"
    regions = (
        "0x00000000a2000000 0x00000000a2ffffff 0x0000000000040200\n"  # 16 MiB of 32 bits
        "0x000003a000000000 0x000003bfffffffff 0x000000000014220c\n"  # 128 GiB
        f"{none}0x000003c000000000 0x000003c001ffffff 0x000000000014220c\n{none}"  # 32 MiB
        "0x0000000000003000 0x000000000000307f 0x0000000000040101\n"  # ports
        "0x00000000a3000000 0x00000000a307ffff 0x000000000014220c\n"  # the ROM's, and no BAR
    )
    path.write_text(regions)
    assert read_addressable(str(tmp_path), "0000:81:00.0") == 256 << 30
    assert read_addressable(str(tmp_path), "0000:82:00.0") == 0
    path.write_text("x y z\n0x0 0xffffffffffffffff 0xc\n")
    assert read_addressable(str(tmp_path), "0000:81:00.0") == 0
    facts = VfioFacts((Candidate(Function("0000:81:00.0", 0x10DE, 0x2330, 0x0302, "vfio-pci"), 5),))
    (device,) = make_devices(DraNode(vfio=facts, addressable={"0000:81:00.0": 256 << 30}))
    assert device.capacity == {"addressableMemory": "256Gi"}
    assert check_device(device) == ()


def test_a_pool_of_100_nodes_with_8_gpus_each() -> None:
    """Every node's slices are its own, within limits, and made anew they are the same."""
    seen = set()
    for number in range(100):
        pool = Pool(DRIVER, f"node-{number}")
        slices = make_slices(make_devices(node()), pool)
        assert same_slices(slices, make_slices(make_devices(node()), pool))
        assert len(slices) == 1
        assert len(slices[0]["devices"]) == 8 <= MAX_COUNTED_DEVICES
        seen.add(slices[0]["nodeName"])
    assert len(seen) == 100


@pytest.mark.parametrize(
    ("taint", "problem"),
    [
        (Taint("gpu.nvidia.com/xid", "79"), ""),
        (Taint("gpu.nvidia.com/gpu-lost", "", "NoExecute"), ""),
        (Taint("plain", effect="None"), ""),
        (Taint("gpu.nvidia.com/quarantined", "reset failed: 5"), 'value "reset failed: 5" is not the value of a label'),
        (Taint("gpu.nvidia.com/x", "a" * 64), "is not the value of a label"),
        (Taint("gpu.nvidia.com/x", "79", "Evict"), 'effect "Evict" is not one of None, NoSchedule, NoExecute'),
        (Taint("gpu.nvidia.com/", "79"), "it is not a name of at most 63 characters after a DNS name"),
        (Taint("GPU_/x", "79"), "it is not a name of at most 63 characters after a DNS name"),
    ],
)
def test_taints_that_the_api_would_refuse_are_named(taint: Taint, problem: str) -> None:
    """One would keep all devices of the slice from being published."""
    found = check_device(make_devices(node())[0]._replace(taints=(taint,)))
    assert [problem in each for each in found] == ([True] if problem else [])
    assert all(each.startswith(f'device gpu-0: taint "{taint.key}": ') for each in found)


def test_devices_of_one_gpu_exclude_each_other() -> None:
    one, two, *_ = make_devices(node())
    assert one.conflicts(one)
    assert not one.conflicts(two)
    mig = one._replace(name="a", kind="mig", memory=(0, 1))
    assert mig.conflicts(one._replace(kind="vfio", name="gpu-vfio-0000-81-00-0"))
    assert mig.conflicts(mig._replace(name="b", memory=(1, 2)))
    assert not mig.conflicts(mig._replace(name="b", memory=(2, 3)))
