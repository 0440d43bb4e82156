"""The table of vendors: every folder has its record, and every function that the record names is there."""

import importlib
import inspect

import pytest

from ocigpu.core.settings import Settings
from ocigpu.core.vendors import FIRST, VENDORS
from ocigpu.gpus.vendors import find_mode, load_vendor


@pytest.mark.parametrize("name", VENDORS)
def test_what_a_record_names_is_there(name: str) -> None:
    vendor = load_vendor(name)
    assert vendor.name == name
    assert all(find_mode(mode, "", Settings())[1] == vendor for mode in vendor.modes)
    targets = [inspect.getclosurevars(field).nonlocals.get("name", "") for field in vendor if callable(field)]
    named = [target for target in targets if target]
    assert len(named) >= 2
    for target in named:
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(f"ocigpu.gpus.{module}"), function))


def test_who_has_a_variable_can_be_asked_for() -> None:
    asked = [load_vendor(name) for name, (_, variable, _) in VENDORS.items() if variable]
    assert asked[0].name == FIRST
    for vendor in asked:
        assert vendor.parse_request({"process": {"env": []}}, Settings(), "").selection == "nothing"
