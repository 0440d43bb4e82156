"""Resources of a node: MIG strategies, sharing, and devices that cannot be given."""

import json
from typing import Any

import pytest
from kubernetes_lab import configured, host, inventory, offered, shared

from ocigpu.core.facts import DeviceNode, HostFacts, MigDevice
from ocigpu.kubernetes.node.devices import MAX_DEVICES, MAX_ID, Inventory, PluginDevice, make_inventory, mig_resource
from ocigpu.kubernetes.plugin.server import device_list

A100 = host("a100-8")
MIG = host("h100-8-mig")
BROKEN = host("broken-gpu")
T4 = host("t4-1")


def with_gpu(facts: HostFacts, index: int, **changes: Any) -> HostFacts:
    gpus = tuple(gpu._replace(**changes) if gpu.index == index else gpu for gpu in facts.gpus)
    return facts._replace(gpus=gpus)


def with_mig(*layouts: tuple[str, ...]) -> HostFacts:
    """A host whose first GPUs have MIG devices of these profiles; () is MIG without devices."""
    gpus = list(MIG.gpus)
    for index, profiles in enumerate(layouts):
        devices = tuple(
            MigDevice(number, f"MIG-{index}{number}", profile, number + 7, 0, 12 + 9 * number, 13 + 9 * number)
            for number, profile in enumerate(profiles)
        )
        gpus[index] = gpus[index]._replace(mig_enabled=True, mig_devices=devices)
    rest = [gpu._replace(mig_enabled=False, mig_devices=()) for gpu in gpus[len(layouts) :]]
    minors = {
        minor for gpu in gpus[: len(layouts)] for mig in gpu.mig_devices for minor in (mig.gi_minor, mig.ci_minor)
    }
    nodes = tuple(
        (str(minor), DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", "", 234, minor)) for minor in sorted(minors)
    )
    return MIG._replace(gpus=(*gpus[: len(layouts)], *rest), cap_nodes=nodes)


def test_every_gpu_is_a_device_by_its_uuid() -> None:
    found = inventory(A100)
    assert offered(found) == {"gpu": [str(index) for index in range(8)]}
    first = found.resources[0].devices[0]
    assert (first.id, first.uuid, first.gpu) == (A100.gpus[0].uuid,) * 3
    assert (first.paths, first.numa, first.replicas, first.error) == (("/dev/nvidia0",), -1, 1, "")
    assert (found.notes, found.reason) == ((), "")


MIG_CASES: dict[str, tuple[HostFacts, str, dict[str, list[str]], str]] = {
    "none: MIG is not looked at": (with_mig(("1g.10gb",)), "none", {"gpu": list("01234567")}, ""),
    "none, MIG without devices": (with_mig(()), "none", {"gpu": ["!0", *"1234567"]}, ""),
    "single without MIG": (A100, "single", {"gpu": list("01234567")}, ""),
    "single, MIG everywhere": (
        with_mig(*[("1g.10gb", "1g.10gb")] * 8),
        "single",
        {"gpu": [f"{gpu}:{mig}" for gpu in range(8) for mig in range(2)]},
        "",
    ),
    "single, one GPU without MIG": (
        with_mig(*[("1g.10gb",)] * 7), "single", {},
        "MIG strategy single: MIG is enabled on GPU 0, but not on GPU 7",
    ),
    "single, two profiles": (
        with_mig(*[("1g.10gb",)] * 7, ("2g.20gb",)), "single", {},
        "MIG strategy single: MIG devices of several profiles: 1g.10gb, 2g.20gb",
    ),
    "single, a GPU without MIG devices": (
        with_mig(*[("1g.10gb",)] * 7, ()), "single", {"gpu": [f"{gpu}:0" for gpu in range(7)]},
        "GPU 7 left out: MIG is enabled, but there are no MIG devices",
    ),
    "mixed": (
        with_mig(("1g.10gb", "3g.40gb"), ("1g.10gb+me",)), "mixed",
        {"mig-1g.10gb": ["0:0"], "mig-3g.40gb": ["0:1"], "mig-1g.10gb.me": ["1:0"], "gpu": list("234567")}, "",
    ),
    "mixed, MIG without devices": (
        with_mig(()), "mixed", {"gpu": list("1234567")},
        "GPU 0 left out: MIG is enabled, but there are no MIG devices",
    ),
    "mixed, a profile without a name": (
        with_mig(("1c.2g.20gb", "2g.20gb")), "mixed", {"mig-2g.20gb": ["0:1"], "gpu": list("1234567")},
        "MIG device 0:0 left out: profile 1c.2g.20gb has no resource name (resources.mig)",
    ),
    "mixed, a profile that is unknown": (
        with_mig(("",)), "mixed", {"gpu": list("1234567")},
        "MIG device 0:0 left out: profile unknown has no resource name (resources.mig)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("facts", "strategy", "expected", "note"), MIG_CASES.values(), ids=MIG_CASES.keys())
def test_mig_strategies(facts: HostFacts, strategy: str, expected: dict[str, list[str]], note: str) -> None:
    found = inventory(facts, mig_strategy=strategy)
    assert offered(found) == expected
    assert list(found.notes) == ([note] if note else [])
    assert found.reason == ("" if expected else note)


def test_a_mig_device_has_the_nodes_of_its_gpu_and_its_instances() -> None:
    found = inventory(MIG, mig_strategy="mixed")
    devices = {device.ordinal: device for resource in found.resources for device in resource.devices}
    parent = next(gpu for gpu in MIG.gpus if gpu.mig_devices)
    mig = parent.mig_devices[0]
    device = devices[f"{parent.index}:{mig.index}"]
    caps = [f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (mig.gi_minor, mig.ci_minor)]
    assert device.paths == (f"/dev/nvidia{parent.minor}", *caps)
    assert (device.id, device.gpu) == (mig.uuid, parent.uuid)
    assert device.instance == (mig.gpu_instance, mig.compute_instance)


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        ("1g.5gb", "mig-1g.5gb"), ("1g.10gb+me", "mig-1g.10gb.me"), ("1g.24gb-me", "mig-1g.24gb-me"),
        ("1g.24gb+me.all", "mig-1g.24gb.me.all"), ("1g.24gb+gfx", "mig-1g.24gb.gfx"), ("7g.80gb", "mig-7g.80gb"),
        ("1c.2g.10gb", ""), ("", ""), ("x" * 60, ""),
    ],
)  # fmt: skip
def test_a_profile_has_the_published_name(profile: str, name: str) -> None:
    assert mig_resource(profile).removeprefix("nvidia.com/") == name


def test_names_by_pattern_come_before_the_usual_ones() -> None:
    file = {"resources": {"gpus": [{"pattern": "*A100*", "name": "a100"}], "mig": [{"pattern": "1c.*", "name": "c"}]}}
    assert offered(inventory(A100, file)) == {"a100": list("01234567")}
    found = inventory(with_mig(("1c.2g.20gb", "2g.20gb")), file, mig_strategy="mixed")
    assert offered(found) == {"c": ["0:0"], "mig-2g.20gb": ["0:1"], "gpu": list("1234567")}


# --- devices that cannot be given


def test_a_bad_gpu_takes_nothing_from_the_others() -> None:
    bad = [gpu for gpu in BROKEN.gpus if gpu.error]
    assert bad
    found = inventory(BROKEN)
    devices = {device.uuid: device for device in found.resources[0].devices}
    for gpu in BROKEN.gpus:
        if gpu.uuid:
            assert devices[gpu.uuid].error == gpu.error
    assert sum(not device.error for device in devices.values()) == len(BROKEN.gpus) - len(bad)


QUARANTINE: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "an error": ({"error": "GPU is lost (NVML 15)"}, ["!0", *"1234567"], ""),
    "an error before its UUID was known": ({"error": "lost", "uuid": ""}, list("1234567"), "GPU 0 left out: lost"),
    "no UUID": ({"uuid": ""}, list("1234567"), "GPU 0 left out: it has no UUID"),
    "no device number": ({"node": None}, ["!0", *"1234567"], ""),
    "a display": ({"model": "DGX Display"}, list("1234567"), "GPU 0 left out: it is for a display only"),
}


@pytest.mark.parametrize(("changes", "expected", "note"), QUARANTINE.values(), ids=QUARANTINE.keys())
def test_one_gpu_is_quarantined(changes: dict[str, Any], expected: list[str], note: str) -> None:
    found = inventory(with_gpu(A100, 0, **changes))
    assert offered(found) == {"gpu": expected}
    assert list(found.notes) == ([note] if note else [])


def test_a_mig_device_whose_capabilities_are_unknown_is_unhealthy() -> None:
    found = inventory(with_mig(("1g.10gb",))._replace(cap_nodes=()), mig_strategy="mixed")
    assert offered(found) == {"mig-1g.10gb": ["!0:0"], "gpu": list("1234567")}
    assert found.resources[0].devices[0].error == "a device number of its instances is unknown"


def test_mig_devices_of_a_bad_gpu_are_bad() -> None:
    found = inventory(with_gpu(with_mig(("1g.10gb",)), 0, error="lost"), mig_strategy="mixed")
    assert offered(found)["mig-1g.10gb"] == ["!0:0"]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (HostFacts(), "this host has no GPUs"),
        (HostFacts(notes=("NVML: no answer",)), "NVML: no answer"),
        (with_gpu(T4, 0, uuid=""), "GPU 0 left out: it has no UUID"),
    ],
)
def test_without_devices_there_is_a_reason(facts: HostFacts, reason: str) -> None:
    found = inventory(facts)
    assert (found.resources, found.reason) == ((), reason)


# --- sharing

GPU = {"name": "nvidia.com/gpu", "replicas": 2}
SHARING: dict[str, tuple[dict[str, Any], dict[str, list[str]], str]] = {
    "all": (shared(GPU), {"gpu": [f"{gpu}::{n}" for gpu in range(8) for n in range(2)]}, ""),
    "renamed by default": (
        shared(GPU, renameByDefault=True),
        {"gpu.shared": [f"{gpu}::{n}" for gpu in range(8) for n in range(2)]}, "",
    ),
    "a count": (
        shared({**GPU, "devices": 1, "rename": "slice"}), {"gpu": list("1234567"), "slice": ["0::0", "0::1"]}, "",
    ),
    "a count, not renamed": (shared({**GPU, "devices": 1}), {"gpu": [*"1234567", "0::0", "0::1"]}, ""),
    "too high a count": (
        shared({"name": "gpu", "replicas": 2, "devices": 9, "rename": "s"}),
        {"s": [f"{gpu}::{n}" for gpu in range(8) for n in range(2)]},
        "nvidia.com/gpu: 9 devices are to be shared, this node has 8",
    ),
    "by index and UUID": (
        shared({**GPU, "devices": [7, A100.gpus[6].uuid.upper().replace("GPU-", "GPU-")], "rename": "s"}),
        {"gpu": list("012345"), "s": ["7::0", "7::1", "6::0", "6::1"]}, "",
    ),
    "different replicas": (
        shared({**GPU, "devices": [0]}, {**GPU, "devices": [1], "replicas": 3}),
        {"gpu": [*"234567", "0::0", "0::1", "1::0", "1::1", "1::2"]}, "",
    ),
    "a device that does not exist": (
        shared({**GPU, "devices": [0, 9]}), {"gpu": [*"1234567", "0::0", "0::1"]},
        "nvidia.com/gpu: device 9 is to be shared, but this node does not have it",
    ),
    "a resource that does not exist": (
        shared({"name": "mig-1g.5gb", "replicas": 2}), {"gpu": list("01234567")},
        "nvidia.com/mig-1g.5gb is not shared: this node has no such resource",
    ),
    "a device in two entries goes to the first": (
        shared({**GPU, "devices": [0], "rename": "a"}, {**GPU, "devices": [0], "rename": "b"}),
        {"gpu": list("1234567"), "a": ["0::0", "0::1"]},
        "nvidia.com/gpu: device 0 is to be shared, but this node does not have it",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("file", "expected", "note"), SHARING.values(), ids=SHARING.keys())
def test_shared_devices(file: dict[str, Any], expected: dict[str, list[str]], note: str) -> None:
    found = inventory(A100, file)
    assert offered(found) == expected
    assert list(found.notes) == ([note] if note else [])


def test_a_replica_keeps_what_its_device_has() -> None:
    found = make_inventory(A100, configured(shared(GPU)), {A100.gpus[0].uuid: 1})
    first, second = found.resources[0].devices[:2]
    assert (first.id, second.id) == (f"{first.uuid}::0", f"{first.uuid}::1")
    assert first._replace(id="") == second._replace(id="")
    assert (first.numa, first.replicas, first.paths, first.is_replica) == (1, 2, ("/dev/nvidia0",), True)


@pytest.mark.parametrize(
    ("strategy", "block", "expected"),
    [
        ("timeSlicing", {}, ("time-slicing", False)),
        ("timeSlicing", {"failRequestsGreaterThanOne": True}, ("time-slicing", True)),
        ("mps", {}, ("mps", True)),
    ],
)
def test_a_resource_knows_how_it_is_shared(strategy: str, block: dict[str, Any], expected: tuple[str, bool]) -> None:
    entry = {**GPU, "devices": [0], "rename": "s"}
    plain, replicated = inventory(A100, shared(entry, strategy=strategy, **block)).resources
    assert (plain.sharing, replicated.sharing, replicated.one_each) == ("none", *expected)


def test_mig_devices_are_shared_by_the_names_of_their_resource() -> None:
    file = shared({"name": "mig-1g.10gb", "replicas": 2, "devices": ["0:1"]}, renameByDefault=True)
    found = inventory(with_mig(("1g.10gb", "1g.10gb")), file, mig_strategy="mixed")
    assert offered(found) == {
        "mig-1g.10gb": ["0:0"],
        "gpu": list("1234567"),
        "mig-1g.10gb.shared": ["0:1::0", "0:1::1"],
    }


def test_a_mig_device_may_be_named_by_its_instances() -> None:
    facts = with_mig(("1g.10gb", "1g.10gb"))
    uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    file = shared({"name": "mig-1g.10gb", "replicas": 2, "devices": [f"MIG-{uuid}/8/0"], "rename": "s"})
    found = inventory(with_gpu(facts, 0, uuid=uuid), file, mig_strategy="mixed")
    assert offered(found)["s"] == ["0:1::0", "0:1::1"]


# --- numa, WSL, stability


def test_numa_nodes_are_those_of_the_gpus() -> None:
    facts = with_mig(("1g.10gb",))
    numa = {facts.gpus[0].uuid: 0, facts.gpus[1].uuid: 1, facts.gpus[2].uuid: -1}
    found = make_inventory(facts, configured(mig_strategy="mixed"), numa)
    by_ordinal = {device.ordinal: device.numa for resource in found.resources for device in resource.devices}
    assert by_ordinal == {"0:0": 0, "1": 1, **dict.fromkeys("234567", -1)}


def test_under_wsl_every_gpu_is_a_device_with_the_one_node() -> None:
    facts = A100._replace(gpus=tuple(gpu._replace(node=None, minor=-1) for gpu in A100.gpus[:3]))
    found = make_inventory(facts, configured(), wsl_node="/dev/dxg")
    assert offered(found) == {"gpu": ["0", "1", "2"]}
    assert {device.paths for device in found.resources[0].devices} == {("/dev/dxg",)}
    assert found.resources[0].kind == "wsl"


def test_ids_do_not_depend_on_the_order_of_discovery() -> None:
    again = A100._replace(gpus=A100.gpus[::-1])
    assert inventory(again, shared(GPU)) == inventory(A100, shared(GPU))


def test_ids_fit_into_the_kubelets_interface() -> None:
    facts = host("h200-64")
    many = facts._replace(gpus=facts.gpus[-47:])  # as many as a kubelet can be told of
    found: Inventory = inventory(many, shared({"name": "gpu", "replicas": 1024}))
    ids = [device.id for device in found.resources[0].devices]
    assert len(set(ids)) == len(ids) == 47 * 1024
    assert max(map(len, ids)) <= MAX_ID
    assert json.loads(json.dumps(ids)) == ids


def test_more_devices_than_a_kubelet_can_be_told_of_are_left_out() -> None:
    longest = PluginDevice("x" * MAX_ID, "x", "x", "0", numa=1023, error="every one of them")
    assert device_list([longest] * MAX_DEVICES).ByteSize() < 4 << 20
    facts = host("h200-64")
    assert len(inventory(facts, shared({"name": "gpu", "replicas": 765})).resources[0].devices) == 64 * 765
    found = inventory(facts, shared({"name": "gpu", "replicas": 1024}))
    assert found.resources == ()
    assert found.reason == "nvidia.com/gpu left out: 65536 devices, a kubelet accepts 49000"
    one = facts._replace(gpus=facts.gpus[:1])
    assert len(inventory(one, shared({"name": "gpu", "replicas": 16384})).resources[0].devices) == 16384
    assert len(inventory(one, shared({"name": "gpu", "replicas": MAX_DEVICES})).resources[0].devices) == MAX_DEVICES
    many = inventory(facts, shared({"name": "gpu", "replicas": MAX_DEVICES}))
    assert "3136000 devices" in many.reason, "and they are never made"
