"""Why a claim does not fit: selectors in CEL, attribute by attribute."""

import json
from pathlib import Path
from typing import Any

import pytest
from dra_lab import DRIVER, NODE, claim, result
from kubernetes_lab import host
from support.cluster import Cluster
from test_dra_slices import POOL

from ocigpu.cli.main import main
from ocigpu.kubernetes.dra.devices import DraNode, Taint, make_devices
from ocigpu.kubernetes.dra.fit import (
    PublishedDevice,
    conjuncts,
    evaluate,
    explain_fit,
    fit_claim,
    held_devices,
    published_devices,
    why_not,
)
from ocigpu.kubernetes.dra.slices import as_generation, as_objects, make_slices
from ocigpu.kubernetes.hardware import GpuDetails, Hardware

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
    assert "nothing is not there" in missing
    assert why_not("1 +", DEVICES[0])


def test_a_claim_that_fits_and_one_that_does_not() -> None:
    (fit,) = fit_claim(ask(count=2), CLASSES, DEVICES, {})
    assert [each.name for each in fit.chosen] == ["gpu-0", "gpu-1"]
    held = held_devices([claim("a", result("gpu-0"), result("gpu-1", adminAccess=True))])
    (fit,) = fit_claim(ask(), CLASSES, DEVICES, held)
    assert fit.chosen[0].name == "gpu-1"
    assert fit.refusals[0].why == "in use by claim team/a"
    (fit,) = fit_claim(ask("mig.nvidia.com"), CLASSES, DEVICES, {})
    lines = list(explain_fit([fit]))
    assert lines[0] == "request gpu: 0 devices fit, 1 wanted"
    assert "type is 'gpu'" in lines[1]
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
        assert capsys.readouterr().out == "request gpu: fits: gpu-0\n"
        assert main(["explain", "claim/team/cut", *words]) == 1
        assert (
            "  gpu-0: not device.attributes['gpu.nvidia.com'].type == 'mig' (type is 'gpu')" in capsys.readouterr().out
        )
        assert main(["explain", "claim/team/cut", "--json", *words]) == 1
        assert json.loads(capsys.readouterr().out)["claim"]["requests"][0]["problem"] == "0 devices fit, 1 wanted"
        assert main(["explain", "claim/team/none", *words]) == 1
        assert "OCIGPU-DRA-1: claim team/none: there is no such claim" in capsys.readouterr().err
        assert main(["explain", "claim/team", *words]) == 2


def test_pools_that_are_not_whole_do_not_count() -> None:
    broken = [{**each, "pool": {**each["pool"], "resourceSliceCount": 2}} for each in as_generation(SLICES, 2)]
    devices, notes = published_devices([*SLICES, *broken])
    assert devices == ()
    assert notes == (f"pool {NODE} of {DRIVER} is not whole: 1 of 2 slices",)
    assert isinstance(DEVICES[0], PublishedDevice)
