"""docs/SECURITY.md has the battery as it is."""

from pathlib import Path

from battery import table


def test_the_page_on_security_has_the_battery_as_it_is() -> None:
    """``python tests/security/battery.py`` prints the table."""
    assert table() in (Path(__file__).parents[2] / "docs/SECURITY.md").read_text()
