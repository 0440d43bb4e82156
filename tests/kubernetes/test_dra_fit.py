"""Why a claim does not fit: selectors in CEL, attribute by attribute."""

import json
from pathlib import Path
from typing import Any

import pytest
from dra_lab import DRIVER, NODE, claim, result
from kubernetes_lab import host
from support.cluster import Cluster
from test_dra_mig import whole
from test_dra_slices import POOL

from ocigpu.cli.front.main import main
from ocigpu.gpus.on_node import GpuDetails, Hardware
from ocigpu.kubernetes.dra.cel import Unjudged
from ocigpu.kubernetes.dra.devices import DeviceOptions, DraNode, Taint, make_devices
from ocigpu.kubernetes.dra.explain import ClaimFit
from ocigpu.kubernetes.dra.fit import (
    NodeFit,
    PublishedDevice,
    RequestFit,
    conjuncts,
    evaluate,
    explain_fit,
    fit_claim,
    fit_nodes,
    held_devices,
    published_devices,
    why_not,
)
from ocigpu.kubernetes.dra.slices import Pool, as_generation, as_objects, make_slices

A100 = host("a100-8")
DETAILS = {gpu.uuid: GpuDetails(gpu.uuid, gpu.bus_id, 81920) for gpu in A100.gpus}
SLICES = make_slices(make_devices(DraNode(A100, Hardware(DETAILS))), POOL)
DEVICES, _ = published_devices(SLICES)
CLASSES = {
    name: {"spec": {"selectors": [{"cel": {"expression": f"{OURS} && {TYPE} == '{kind}'"}}]}}
    for OURS, TYPE in [(f"device.driver == '{DRIVER}'", f"device.attributes['{DRIVER}'].type")]
    for name, kind in (("gpu.nvidia.com", "gpu"), ("mig.nvidia.com", "mig"))
}


def ask(device_class: str = "gpu.nvidia.com", *selectors: str, count: int = 1, **more: Any) -> dict[str, Any]:
    exactly = {"deviceClassName": device_class, "count": count, **more}
    exactly["selectors"] = [{"cel": {"expression": text}} for text in selectors]
    return {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ('device.attributes["gpu.nvidia.com"].type == "gpu"', True),
        ('device.attributes["gpu.nvidia.com"].productName.lowerAscii().matches("a100")', True),
        ('"ÄaB".lowerAscii() == "Äab" && "aß".upperAscii() == "Aß" && " a ".trim() == "a"', True),
        ('"a-b-c".replace("-", ".") == "a.b.c" && "a-b".substring(2) == "b" && "a-b".indexOf("-") == 1', True),
        ("device.driver.reverse() == device.driver", None),
        ('device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("40Gi")) >= 0', True),
        ('device.capacity["gpu.nvidia.com"].memory.isGreaterThan(quantity("100Gi"))', False),
        ('device.attributes["gpu.nvidia.com"].cudaComputeCapability.compareTo(semver("8.0.0")) >= 0', True),
        ('device.attributes["gpu.nvidia.com"].driverVersion.isLessThan(semver("9.0.0"))', False),
        ('"nothing" in device.attributes["gpu.nvidia.com"]', False),
        ('device.attributes["gpu.nvidia.com"].nothing == 1', None),
    ],
)
def test_selectors_as_kubernetes_means_them(expression: str, expected: bool | None) -> None:
    found = evaluate(expression, DEVICES[0])
    assert found is expected if expected is not None else isinstance(found, str)
    assert len(str(found)) < 120


def test_the_condition_that_fails_is_named_with_the_devices_values() -> None:
    text = 'device.attributes["gpu.nvidia.com"].type == "gpu" && device.attributes["gpu.nvidia.com"].brand == "x&&y"'
    assert conjuncts(text)[1] == 'device.attributes["gpu.nvidia.com"].brand == "x&&y"'
    brand = A100.gpus[0].brand
    assert why_not(text, DEVICES[0]) == f'not device.attributes["gpu.nvidia.com"].brand == "x&&y" (brand is {brand!r})'
    missing = why_not('device.attributes["gpu.nvidia.com"].nothing == 1', DEVICES[0])
    assert "nothing is missing" in missing
    assert why_not("1 +", DEVICES[0])


def test_a_claim_that_fits_and_one_that_does_not() -> None:
    (fit,) = fit_claim(ask(count=2), CLASSES, DEVICES, {})
    assert [each.name for each in fit.chosen] == ["gpu-0", "gpu-1"]
    held = held_devices([claim("a", result("gpu-0"), result("gpu-1", adminAccess=True))])
    (fit,) = fit_claim(ask(), CLASSES, DEVICES, held)
    assert fit.chosen[0].name == "gpu-1"
    assert fit.refusals[0].why == "in use by claim team/a"
    (fit,) = fit_claim(ask("mig.nvidia.com"), CLASSES, DEVICES, {})
    lines = list(explain_fit([NodeFit(NODE, (fit,))]))
    assert lines[2] == "  request gpu: 0 devices fit, 1 requested"
    assert "type is 'gpu'" in lines[3]
    (fit,) = fit_claim(ask("none"), CLASSES, DEVICES, {})
    assert fit.problem == "there is no DeviceClass none"


def test_alternatives_constraints_and_taints() -> None:
    spec: dict[str, Any] = {
        "devices": {
            "requests": [
                {
                    "name": "any",
                    "firstAvailable": [
                        {"name": "mig", "deviceClassName": "mig.nvidia.com"},
                        {"name": "whole", "deviceClassName": "gpu.nvidia.com"},
                    ],
                },
                {"name": "same", "exactly": {"deviceClassName": "gpu.nvidia.com"}},
            ],
            "constraints": [{"matchAttribute": f"{DRIVER}/uuid"}],
        }
    }
    any_, same = fit_claim(spec, CLASSES, DEVICES, {})
    assert (any_.request, any_.chosen[0].name) == ("any/whole", "gpu-0")
    assert "no 1 of them by gpu.nvidia.com/uuid" in same.problem
    spec["devices"]["constraints"] = [{"matchAttribute": f"{DRIVER}/productName"}]
    assert not any(fit.problem for fit in fit_claim(spec, CLASSES, DEVICES, {}))
    sick = [each._replace(taints=(Taint("k", "79"),)) for each in make_devices(DraNode(A100))[:1]]
    devices, _ = published_devices(make_slices(sick, POOL))
    (fit,) = fit_claim(ask(), CLASSES, devices, {})
    assert fit.refusals[0].why == "tainted k=79:NoSchedule"
    assert not fit_claim(ask(tolerations=[{"key": "k", "operator": "Exists"}]), CLASSES, devices, {})[0].problem


def test_explain_says_it_of_a_claim_in_the_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster() as cluster:
        config = cluster.write_kubeconfig(tmp_path / "config")
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        for document in as_objects(SLICES, POOL):
            cluster.create(document)
        for name, document in CLASSES.items():
            kind = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name}}
            cluster.create({**kind, **document})
        kind = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim"}
        for name, device_class in (("well", "gpu.nvidia.com"), ("cut", "mig.nvidia.com")):
            cluster.create({**kind, "metadata": {"name": name, "namespace": "team"}, "spec": ask(device_class)})
        words = ["--kubeconfig", str(config)]
        assert main(["explain", "claim/team/well", *words]) == 0
        assert capsys.readouterr().out == f"request gpu: fits on node {NODE}: gpu-0\n"
        assert main(["explain", "claim/team/cut", *words]) == 1
        assert (
            "  gpu-0: not device.attributes['gpu.nvidia.com'].type == 'mig' (type is 'gpu')" in capsys.readouterr().out
        )
        assert main(["explain", "claim/team/cut", "--json", *words]) == 1
        assert json.loads(capsys.readouterr().out)["claim"]["requests"][0]["problem"] == "0 devices fit, 1 requested"
        assert main(["explain", "claim/team/none", *words]) == 1
        assert "OCIGPU-DRA-1: claim team/none: no such claim" in capsys.readouterr().err
        assert main(["explain", "claim/team", *words]) == 2


def test_pools_that_are_not_whole_do_not_count() -> None:
    broken = [{**each, "pool": {**each["pool"], "resourceSliceCount": 2}} for each in as_generation(SLICES, 2)]
    devices, notes = published_devices([*SLICES, *broken])
    assert devices == ()
    assert notes == (f"pool {NODE} of {DRIVER} is incomplete: 1 of 2 slices",)
    assert isinstance(DEVICES[0], PublishedDevice)


def fit_of(spec: dict[str, Any], devices: Any, *claims: Any) -> RequestFit:
    (fit,) = fit_claim(spec, CLASSES, devices, held_devices(claims))
    return fit


def shared_gpus(shares: str) -> tuple[PublishedDevice, ...]:
    node = DraNode(A100, Hardware(DETAILS))
    return published_devices(make_slices(make_devices(node, DeviceOptions(shares=shares)), POOL))[0]


def share(device: str, number: int, **amounts: str) -> dict[str, Any]:
    return result(device, shareID=f"share-{number}", consumedCapacity=amounts)


def test_shares_of_a_gpu_are_counted() -> None:
    devices = shared_gpus("4")[:1]
    assert [each.name for each in fit_of(ask(), devices).chosen] == ["gpu-0"]
    taken = claim("other", share("gpu-0", 1, shares="3", memory="0"))
    assert [each.name for each in fit_of(ask(), devices, taken).chosen] == ["gpu-0"]
    two = fit_of(ask(capacity={"requests": {"shares": "2"}}), devices, taken)
    assert two.refusals[0].why == "shares: 2 needed, 1 left by claim team/other"
    assert fit_of(ask(count=2), devices, taken).problem == "1 devices fit, 2 requested"
    assert len(fit_of(ask(count=4), devices).chosen) == 4, "one after the other of the same GPU"
    assert fit_of(ask(count=5), devices).problem
    whole = fit_of(ask(), devices, claim("whole", result("gpu-0")))
    assert whole.refusals[0].why == "in use by claim team/whole"


def test_an_amount_is_rounded_up_as_the_policy_says() -> None:
    devices = shared_gpus("memory")[:1]
    odd = ask(capacity={"requests": {"memory": "40960.5Mi"}})
    half = claim("half", share("gpu-0", 1, memory="40959Mi"))
    assert not fit_of(odd, devices, half).problem
    more = claim("half", share("gpu-0", 1, memory="40960Mi"))
    assert fit_of(odd, devices, more).refusals[0].why.startswith("memory: 42950721536 needed, 42949672960 left")
    assert fit_of(ask(), devices, half).problem, "without an amount it is all of it"
    assert fit_of(ask(capacity={"requests": {"memory": "1e300000"}}), devices).problem


@pytest.mark.parametrize(
    ("capacity", "why"),
    [
        ({"memory": "80Gi"}, ""),
        ({"gpu.nvidia.com/memory": "80Gi"}, ""),
        ({"memory": "200Gi"}, "memory: 200Gi requested, 81920Mi available"),
        ({"shares": "2"}, "it has no capacity shares"),
        ({"other.com/memory": "1"}, "it has no capacity other.com/memory"),
    ],
)
def test_capacity_that_is_asked_for_must_be_there(capacity: dict[str, str], why: str) -> None:
    fit = fit_of(ask(capacity={"requests": capacity}), DEVICES)
    assert bool(fit.problem) == bool(why)
    assert not why or {each.why for each in fit.refusals} == {why}


def partitions() -> tuple[PublishedDevice, ...]:
    options = DeviceOptions(dynamic_mig=True)
    return published_devices(make_slices(make_devices(whole(host("h100-8-mig"), "h100"), options), POOL))[0]


def profile(name: str) -> str:
    return f"device.attributes['{DRIVER}'].profile == '{name}'"


def test_what_partitions_share_is_counted() -> None:
    devices, other = partitions(), claim("other", result("gpu-0-mig-4g40gb-5-0"))
    seven = fit_of(ask("mig.nvidia.com", profile("7g.80gb")), devices, other)
    assert seven.refusals[0].why == "part of it is in use by claim team/other (gpu-0-mig-4g40gb-5-0)"
    assert fit_of(ask(), devices, other).refusals[0].device == "gpu-0"
    half = fit_of(ask("mig.nvidia.com", profile("3g.40gb")), devices, other)
    assert [each.name for each in half.chosen] == ["gpu-0-mig-3g40gb-9-4"]
    assert fit_of(ask("mig.nvidia.com", profile("3g.40gb"), count=2), devices, other).problem == (
        "1 devices fit, 2 requested"
    )
    both = fit_of(ask("mig.nvidia.com", profile("7g.80gb"), count=2), devices)
    assert both.problem == "1 devices fit, 2 requested"
    assert fit_of(ask("mig.nvidia.com", profile("1g.10gb"), count=8), devices).problem
    assert len(fit_of(ask("mig.nvidia.com", profile("1g.10gb"), count=7), devices).chosen) == 7


def test_the_first_choice_is_taken_back_where_the_next_request_needs_it() -> None:
    """A first fit for "any" is at the place where the only 4g must be."""
    requests = [
        {"name": "any", "exactly": {"deviceClassName": "mig.nvidia.com"}},
        {
            "name": "big",
            "exactly": {
                "deviceClassName": "mig.nvidia.com",
                "selectors": [{"cel": {"expression": profile("4g.40gb")}}],
            },
        },
    ]
    any_, big = fit_claim({"devices": {"requests": requests}}, CLASSES, partitions(), {})
    assert big.chosen[0].name == "gpu-0-mig-4g40gb-5-0"
    assert any_.chosen[0].name == "gpu-0-mig-1g10gb-19-4"


def test_all_devices_are_all_or_none() -> None:
    every = ask(allocationMode="All")
    assert len(fit_of(every, DEVICES).chosen) == 8
    assert fit_of(every, DEVICES, claim("a", result("gpu-3"))).problem == "7 devices fit, all requested"


def test_reasons_are_said_once_for_all_that_have_them() -> None:
    other = claim("other", result("gpu-0"))
    fit, ones = fit_of(ask("mig.nvidia.com"), partitions(), other), "gpu-0-mig-1g10gb-19"
    assert list(explain_fit([NodeFit(NODE, (fit,))])) == [
        "no node has all devices of this claim, which must be of one node: gpu requests 1",
        f"node {NODE}",
        "  request gpu: 0 devices fit, 1 requested",
        f"    {ones}-0: part of it is in use by claim team/other (gpu-0); the same: {ones}-1, {ones}-2 and 22 more",
        f"    gpu-0: not device.attributes['{DRIVER}'].type == 'mig' (type is 'gpu')",
    ]


def test_every_node_is_named_with_what_fits_there_and_what_does_not() -> None:
    nodes = [f"worker-{number}" for number in range(1, 6)]
    pools = [make_slices(make_devices(DraNode(A100, Hardware(DETAILS)))[:2], Pool(DRIVER, each)) for each in nodes]
    devices, _ = published_devices([each for slices in pools for each in slices])
    held = held_devices([claim("a", {**result("gpu-0"), "pool": "worker-2"})])
    big = f"device.capacity['{DRIVER}'].memory.isGreaterThan(quantity('100Gi'))"
    devices = tuple(
        each._replace(spec={**each.spec, "capacity": {"memory": {"value": "192Gi"}}})
        if each.node == "worker-2"
        else each
        for each in devices
    )
    found = fit_nodes(ask("gpu.nvidia.com", big, count=2), CLASSES, devices, held)
    assert list(explain_fit(found)) == [
        "no node has all devices of this claim, which must be of one node: gpu requests 2",
        "node worker-1; the same: worker-3, worker-4 and 1 more",
        "  request gpu: 0 devices fit, 2 requested",
        f"    gpu-0: not {big} (memory is 81920Mi); the same: gpu-1",
        "node worker-2",
        "  request gpu: 1 devices fit, 2 requested",
        "    fits: gpu-1",
        "    gpu-0: in use by claim team/a",
    ]
    shelf = [each._replace(pool="shelf") if each.node == "worker-2" else each for each in devices]
    assert "    fits: shelf/gpu-0, shelf/gpu-1" in explain_fit(fit_nodes(ask(count=3), CLASSES, shelf, held))
    requests = [each["requests"][0] for each in ClaimFit((), (), found).as_json()["nodes"]]
    assert requests[1]["free"] == [f"{DRIVER}/worker-2/gpu-1"]
    assert {each["pool"] for each in requests[2]["refusals"]} == {"worker-3"}
    assert [each.node for each in fit_nodes(ask("gpu.nvidia.com", big), CLASSES, devices, held)] == ["worker-2"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("device.attributes['gpu.nvidia.com'].?index.orValue(-1) >= 0", True),
        ("device.attributes['gpu.nvidia.com'].?nothing.orValue(-1) == -1", True),
        ("device.attributes[?'nic.example.com'].?index.orValue(7) == 7", True),
        ("device.?attributes['gpu.nvidia.com'].index.hasValue() && device.driver == 'gpu.nvidia.com'", True),
        ("!device.attributes['gpu.nvidia.com'].?nothing.hasValue()", True),
        ("device.attributes['gpu.nvidia.com'].?brand.value() == 'a.?b[?c]'", False),
        ("device.attributes['gpu.nvidia.com'].uuid.find('[0-9a-f]+') != ''", True),
        ("isQuantity('1Gi') && !isQuantity('1.2.3') && isSemver('1.2.3')", True),
        ("quantity('1500m').isInteger() ? false : quantity('2k').asInteger() == 2000", True),
        ("quantity('1k').add(quantity('1k')).isGreaterThan(quantity('1999'))", True),
        ("'a,b'.split(',')[1] == 'b' && ['a', 'b'].join('-') == 'a-b' && 'abc'.charAt(1) == 'b'", True),
    ],
)
def test_what_cel_python_lacks_and_selectors_use(expression: str, expected: bool) -> None:
    assert evaluate(expression, DEVICES[0]) is expected


@pytest.mark.parametrize(
    "expression", ["cel.bind(x, 1, x == 1)", "device.driver.reverse() == 'x'", "[1, 2].sum() == 3", "a.?b.optMap(x, x)"]
)
def test_what_cannot_be_judged_is_not_called_not_met(expression: str) -> None:
    assert isinstance(evaluate(expression, DEVICES[0]), Unjudged)
    fit = fit_of(ask("gpu.nvidia.com", expression), DEVICES)
    assert fit.problem == "0 devices fit, 1 requested; 8 cannot be evaluated here"
    assert fit.refusals[0].why.startswith(f"cannot be evaluated here: {expression}")
    both = fit_of(ask("gpu.nvidia.com", f"{expression} && device.driver == 'other'"), DEVICES)
    assert both.refusals[0].why.startswith("not device.driver == 'other'")
    assert both.problem == "0 devices fit, 1 requested"


@pytest.mark.rest
def test_a_search_ends() -> None:
    """Eight GPUs' MIG devices, and a claim for more than fit: so many choices are not all tried."""
    gpus = host("h100-8-mig").gpus
    shapes = [whole(host("h100-8-mig"), "h100").layouts[0]._replace(uuid=gpu.uuid, bus_id=gpu.bus_id) for gpu in gpus]
    cut = tuple(gpu._replace(mig_enabled=False, mig_devices=()) for gpu in gpus)
    node = DraNode(host("h100-8-mig")._replace(gpus=cut), layouts=tuple(shapes))
    devices = published_devices(make_slices(make_devices(node, DeviceOptions(dynamic_mig=True)), POOL))[0]
    fit = fit_of(ask("mig.nvidia.com", profile("2g.20gb"), count=32), devices)
    assert fit.problem == "24 devices fit, 32 requested" or "cannot be evaluated here" in fit.problem
