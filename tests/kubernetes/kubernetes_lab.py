"""Nodes for the tests: recorded hosts, and configurations as an operator writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ocigpu.core.facts import HostFacts, facts_from_json
from ocigpu.kubernetes.node.config import Configuration, configure, parse_config_file
from ocigpu.kubernetes.node.devices import Inventory, make_inventory

HOSTS = Path(__file__).parent.parent / "bundles/hosts"


def host(name: str) -> HostFacts:
    return facts_from_json(json.loads((HOSTS / f"{name}.json").read_text()))


def configured(
    file: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None, **flags: str
) -> Configuration:
    parsed, _ = parse_config_file(json.dumps(file or {}), "dp.yaml")
    return configure(flags, environment or {}, parsed, "dp.yaml")


def shared(*entries: Mapping[str, Any], strategy: str = "timeSlicing", **block: Any) -> dict[str, Any]:
    """Return a configuration file that shares these."""
    return {"flags": {"mpsRoot": "/run/nvidia/mps"}, "sharing": {strategy: {**block, "resources": list(entries)}}}


def offered(inventory: Inventory) -> dict[str, list[str]]:
    """Return the devices' ordinals by resource, replicas as "0::1", unhealthy ones as "!0"."""
    return {
        resource.name.removeprefix("nvidia.com/"): [
            ("!" if device.error else "") + device.ordinal + device.id.removeprefix(device.uuid)
            for device in resource.devices
        ]
        for resource in inventory.resources
    }


def inventory(facts: HostFacts, file: Mapping[str, Any] | None = None, **flags: str) -> Inventory:
    return make_inventory(facts, configured(file, **flags))
