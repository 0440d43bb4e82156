"""Which hostile image is tried in which way and in which surroundings."""

import os
from typing import Any

import pytest
from hostile_images import ATTACKS
from security_lab import Attacks

FULL = os.environ.get("OCIGPU_SECURITY") == "full"
"""``make security``: everything in all surroundings."""


def cases(surroundings: str, *numbers: int) -> list[Any]:
    """Return pairs of image and way for tests of the battery, which is one product: place, form, way, surroundings.

    On this kernel every image is tried in every way it is meant for; in other surroundings in one of them or in two,
    taken in turn, and in every way only by ``make security``.
    """
    found = []
    for turn, (name, case) in enumerate(ATTACKS.items()):
        if case.number in numbers:
            ways = case.ways
            if surroundings != "this kernel" and not FULL:
                ways = tuple({ways[turn % len(ways)]: 1, ways[(turn * 2 + 1) % len(ways)]: 1})
            place, _, form = name.partition(" is a ")
            for way in ways:
                mark = pytest.mark.product("battery", (place, form, way, surroundings))
                found.append(pytest.param(name, way, id=f"{case.number}: {name}, {way}", marks=mark))
    return found


def assert_nothing_gets_out(attacks: Attacks, name: str, way: str, surroundings: str, low_level: str = "runc") -> None:
    """Start the container; what is looked at, :meth:`Attacks.run` says."""
    case = ATTACKS[name]
    outcome = attacks.start(
        case.build, way, surroundings, low_level, edit=case.edit, of_runtime=case.of_runtime, volume=case.volume
    )
    assert outcome.started or not case.must_start(way), outcome.said
