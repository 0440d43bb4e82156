"""The battery as root of a user namespace, whose rights over the host's files are those of root here."""

import pytest
from security_lab import Attacks
from ways_of_images import assert_nothing_gets_out, cases

pytestmark = [pytest.mark.root, pytest.mark.engine]

CASES = cases("user namespace", 1, 2, 3, 4, 10, 11, 25)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_hostile_image_gets_nothing_in_a_user_namespace(attacks: Attacks, name: str, way: str) -> None:
    assert_nothing_gets_out(attacks, name, way, "user namespace")
