"""The battery without openat2 and the mount calls of Linux 5.2: unknown to the kernel, or refused by a filter."""

import pytest
from security_lab import Attacks
from ways_of_images import assert_nothing_gets_out, cases

pytestmark = [pytest.mark.root, pytest.mark.engine]

OLD, REFUSED = cases("before 5.2", 1, 2, 3, 4, 10, 11, 25), cases("refused", 4, 10, 25)


@pytest.mark.parametrize(("name", "way"), OLD)
def test_a_hostile_image_gets_nothing_on_an_old_kernel(attacks: Attacks, name: str, way: str) -> None:
    assert_nothing_gets_out(attacks, name, way, "before 5.2")


@pytest.mark.parametrize(("name", "way"), REFUSED)
def test_a_hostile_image_gets_nothing_behind_a_filter(attacks: Attacks, name: str, way: str) -> None:
    assert_nothing_gets_out(attacks, name, way, "refused")
