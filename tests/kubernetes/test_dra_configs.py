"""Configurations in claims: the vendor's kinds, read strictly, joined in their order."""

from typing import Any

import pytest
from dra_lab import API, DRIVER, opaque

from ocigpu.core.errors import RequestError
from ocigpu.kubernetes.dra.configs import DeviceConfig, parse_config, resolve_configs

GPU = ("gpu", "gpu")


def parse(kind: str, **fields: Any) -> DeviceConfig:
    return parse_config({"apiVersion": API, "kind": kind, **fields}, "parameters")


def sharing(strategy: str, **fields: Any) -> dict[str, Any]:
    return {"sharing": {"strategy": strategy, **fields}}


@pytest.mark.parametrize(
    ("kind", "fields", "config"),
    [
        ("GpuConfig", {}, DeviceConfig("GpuConfig")),
        (
            "GpuConfig",
            sharing("TimeSlicing", timeSlicingConfig={"interval": "Long"}),
            DeviceConfig("GpuConfig", "TimeSlicing", "Long"),
        ),
        ("GpuConfig", sharing("TimeSlicing"), DeviceConfig("GpuConfig", "TimeSlicing")),
        (
            "GpuConfig",
            sharing("MPS", mpsConfig={"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi"}),
            DeviceConfig("GpuConfig", "MPS", percentage=50, pinned={"default": 10240}),
        ),
        (
            "MigDeviceConfig",
            sharing("MPS", mpsConfig={"defaultPerDevicePinnedMemoryLimit": {"0": "512Mi"}}),
            DeviceConfig("MigDeviceConfig", "MPS", pinned={"0": 512}),
        ),
        ("VfioDeviceConfig", {}, DeviceConfig("VfioDeviceConfig")),
        (
            "VfioDeviceConfig",
            {"iommu": {"backendPolicy": "PreferIommuFD", "enableAPIDevice": True}},
            DeviceConfig("VfioDeviceConfig", policy="PreferIommuFD", api_device=True),
        ),
    ],
)
def test_the_vendors_kinds(kind: str, fields: dict[str, Any], config: DeviceConfig) -> None:
    assert parse(kind, **fields) == config


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        (None, "parameters: it is not an object"),
        ({}, 'parameters.apiVersion: "" is not resource.nvidia.com/v1beta1'),
        ({"apiVersion": "resource.nvidia.com/v2", "kind": "GpuConfig"}, '"resource.nvidia.com/v2" is not'),
        ({"apiVersion": API}, 'parameters.kind: "" is not one of GpuConfig, MigDeviceConfig, VfioDeviceConfig'),
        ({"apiVersion": API, "kind": "ComputeDomainChannelConfig"}, "parameters.kind"),
        ({"apiVersion": API, "kind": "GpuConfig", "shares": 1}, 'parameters."shares": unknown field'),
        ({"apiVersion": API, "kind": "GpuConfig", "sharing": {}}, 'sharing.strategy: "" is not one of'),
        (
            {"apiVersion": API, "kind": "GpuConfig", **sharing("Exclusive")},
            '"Exclusive" is not one of TimeSlicing, MPS',
        ),
        (
            {"apiVersion": API, "kind": "GpuConfig", **sharing("TimeSlicing", timeSlicingConfig={"interval": "Huge"})},
            'interval: "Huge" is not one of Default, Short, Medium, Long',
        ),
        (
            {"apiVersion": API, "kind": "GpuConfig", **sharing("MPS", timeSlicingConfig={"interval": "Long"})},
            "sharing.timeSlicingConfig: it has no meaning with strategy MPS",
        ),
        (
            {"apiVersion": API, "kind": "MigDeviceConfig", **sharing("TimeSlicing", timeSlicingConfig={})},
            'sharing."timeSlicingConfig": unknown field',
        ),
        (
            {
                "apiVersion": API,
                "kind": "GpuConfig",
                **sharing("MPS", mpsConfig={"defaultActiveThreadPercentage": 101}),
            },
            "defaultActiveThreadPercentage",
        ),
        (
            {
                "apiVersion": API,
                "kind": "GpuConfig",
                **sharing("MPS", mpsConfig={"defaultPerDevicePinnedMemoryLimit": {"x; quit": "1Gi"}}),
            },
            "is neither an index nor a UUID",
        ),
        (
            {
                "apiVersion": API,
                "kind": "GpuConfig",
                **sharing("MPS", mpsConfig={"defaultPinnedDeviceMemoryLimit": "1G; quit"}),
            },
            "is not an amount of memory",
        ),
        ({"apiVersion": API, "kind": "VfioDeviceConfig", "iommu": {"backendPolicy": "Both"}}, "iommu.backendPolicy"),
        ({"apiVersion": API, "kind": "VfioDeviceConfig", "iommu": {"enableAPIDevice": "yes"}}, "enableAPIDevice"),
        ({"apiVersion": API, "kind": "GpuConfig", "x" * 11000: 1}, "more than 10240 bytes"),
    ],
)
def test_bad_input_names_the_field(parameters: Any, problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_config(parameters, "parameters")
    assert caught.value.code == "OCIGPU-DRA-2"
    assert problem in caught.value.message


def test_a_limit_beyond_all_memory_is_a_small_number() -> None:
    """An integer of 1e999999 took 26 s in which no thread of the driver ran."""
    limits = {str(number): "1e999999" for number in range(64)}
    config = parse("GpuConfig", **sharing("MPS", mpsConfig={"defaultPerDevicePinnedMemoryLimit": limits}))
    assert set(config.pinned.values()) == {(1 << 43) - 1}


def slice_of(source: str, interval: str, requests: tuple[str, ...] = ()) -> dict[str, Any]:
    return opaque("GpuConfig", source, requests, **sharing("TimeSlicing", timeSlicingConfig={"interval": interval}))


def allocation(*config: dict[str, Any]) -> dict[str, Any]:
    return {"devices": {"config": list(config)}}


def test_the_claim_comes_after_the_class_and_the_last_counts() -> None:
    found = resolve_configs(
        allocation(
            slice_of("FromClaim", "Long"), slice_of("FromClass", "Short"), slice_of("FromClaim", "Medium", ("two",))
        ),
        DRIVER,
        [("one", "gpu"), ("two", "gpu")],
    )
    assert [found[position].interval for position in (0, 1)] == ["Long", "Medium"]


def test_one_without_requests_is_for_the_devices_of_its_kind() -> None:
    config = allocation(slice_of("FromClaim", "Long"), opaque("MigDeviceConfig"))
    found = resolve_configs(config, DRIVER, [GPU, ("mig", "mig"), ("vm", "vfio")])
    assert {position: each.kind for position, each in found.items()} == {0: "GpuConfig", 1: "MigDeviceConfig"}


def test_a_request_of_alternatives_is_named_by_its_first_part() -> None:
    config = allocation(slice_of("FromClaim", "Long", ("any",)), slice_of("FromClaim", "Short", ("any/big",)))
    found = resolve_configs(config, DRIVER, [("any/small", "gpu"), ("any/big", "gpu")])
    assert [found[position].interval for position in (0, 1)] == ["Long", "Short"]


def test_a_kind_that_is_not_for_the_named_request_is_an_error() -> None:
    with pytest.raises(RequestError, match="GpuConfig is not for request"):
        resolve_configs(allocation(opaque("GpuConfig", requests=("vm",))), DRIVER, [("vm", "vfio")])


def test_other_drivers_configurations_are_theirs() -> None:
    other = opaque("Anything")
    other["opaque"]["driver"] = "nic.example.com"
    assert resolve_configs(allocation(other), DRIVER, [GPU]) == {}
