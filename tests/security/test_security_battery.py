"""The table of the battery tells the truth: its tests are there, and no way is left out that has a test."""

import re
from pathlib import Path

import pytest
from battery import ALL_HOOKS, BATTERY, GIVERS, Row
from hostile_images import ATTACKS
from security_lab import CDI_HOOKS

TESTS = Path(__file__).parents[1]


def test_the_battery_has_all_rows() -> None:
    assert list(BATTERY) == list(range(1, 26))
    assert set(ALL_HOOKS) == set(CDI_HOOKS)
    assert {cve for row in BATTERY.values() for cve in row.cves} == {
        *("2024-0132", "2024-0133", "2024-0134", "2024-0135", "2024-0136", "2024-0137"),
        *("2025-23359", "2025-23266", "2025-23267", "2026-24260"),
        *("2025-31133", "2026-47483"),
        *("2024-3154", "2026-53492", "2024-21626"),
    }


@pytest.mark.parametrize("number", BATTERY)
def test_every_test_of_the_table_is_there(number: int) -> None:
    row: Row = BATTERY[number]
    for file, function in row.tests:
        assert re.search(rf"^def {function}\(", (TESTS / file).read_text(), re.MULTILINE), (file, function)


@pytest.mark.parametrize("number", sorted({case.number for case in ATTACKS.values()}))
def test_images_are_tried_in_every_way_of_their_row(number: int) -> None:
    tried = {way for case in ATTACKS.values() if case.number == number for way in case.ways}
    assert tried == set(BATTERY[number].ways)


def test_a_way_that_is_left_out_has_its_reason() -> None:
    for row in BATTERY.values():
        assert set(row.ways) >= set(GIVERS) or row.elsewhere or set(ALL_HOOKS) <= set(row.ways)
