"""Hostile images in every way a container gets GPUs: nothing of the host is made, changed, read or shown."""

import pytest
from security_lab import Attacks
from ways_of_images import assert_nothing_gets_out, cases

pytestmark = [pytest.mark.root, pytest.mark.engine]

CASES = cases("this kernel", 1, 2, 10, 11)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_hostile_image_gets_nothing_of_the_host(attacks: Attacks, name: str, way: str) -> None:
    assert_nothing_gets_out(attacks, name, way, "this kernel")
