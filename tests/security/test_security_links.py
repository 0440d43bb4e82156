"""Images whose directories and files are links out of their root: nothing is made where they lead."""

import pytest
from security_lab import Attacks
from ways_of_images import assert_nothing_gets_out, cases

pytestmark = [pytest.mark.root, pytest.mark.engine]

CASES = cases("this kernel", 3, 4)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_links_out_of_an_image_lead_nowhere(attacks: Attacks, name: str, way: str) -> None:
    assert_nothing_gets_out(attacks, name, way, "this kernel")
