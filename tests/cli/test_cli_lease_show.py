"""``ocigpu lease show``: what a lease waits for, and who has to act."""

from pathlib import Path

import pytest

from ocigpu.cli.lease import show_command
from ocigpu.kubernetes.tenants.journal import LeaseJournal
from ocigpu.kubernetes.tenants.lease import Lease, Phase

GPU = "0000:1b:00.0"


@pytest.mark.parametrize(
    ("lease", "waits", "then"),
    [
        (
            Lease(GPU, Phase.QUARANTINED, 7, reason="FirmwareMismatch"),
            f"an operator: ocigpu lease release {GPU} --generation 7",
            "reset and check, then Free",
        ),
        (
            Lease(GPU, Phase.MAINTENANCE, 2),
            f"an operator: ocigpu lease release {GPU} --generation 2",
            "reset and check, then Free",
        ),
        (Lease(GPU, Phase.LEASED, 1, sick="Xid"), "no other GPU", "Quarantined (Xid)"),
        (Lease(GPU, Phase.LEASED, 1), "no other GPU", "as usual"),
    ],
)
def test_it_says_who_has_to_act(
    lease: Lease, waits: str, then: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = LeaseJournal(str(tmp_path))
    with journal.change() as change:
        change.put(lease, "test")
    journal.close()
    show_command(GPU, journal=str(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split(None, 2)[2] == waits
    assert lines[-1].split(None, 1)[1] == then
