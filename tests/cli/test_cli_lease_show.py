"""``ocigpu lease``: which host it is about; what a lease waits for, and who has to act."""

import json
from pathlib import Path

import pytest

from ocigpu.cli.front.main import main
from ocigpu.kubernetes.leases.journal import LeaseJournal, journal_directory
from ocigpu.kubernetes.leases.lease import NO_KUBELET, OVER, Lease, LeaseEvent, LeaseEventKind, Phase

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
        (Lease(GPU, Phase.RECLAIMING, 1), "the end of its pod, which the kubelet reports", "as usual"),
        (Lease(GPU, Phase.RECLAIMING, 1, detail=NO_KUBELET), NO_KUBELET, "as usual"),
        (Lease(GPU, Phase.RECLAIMING, 1, proofs=(OVER,)), "no other GPU", "as usual"),
    ],
)
def test_it_says_who_has_to_act(
    lease: Lease, waits: str, then: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = LeaseJournal(str(tmp_path))
    with journal.change() as change:
        change.put(lease, "test")
    journal.close()
    assert main(["lease", "show", GPU, "--journal", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split(None, 2)[2] == waits
    assert lines[-1].split(None, 1)[1] == then


def test_it_follows_a_simulated_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As every other command: this machine's own leases are not shown, and not changed."""
    settings = tmp_path / "config.toml"
    settings.write_text(f'[simulation]\nroot = "{tmp_path}/host"\n')
    asked = ("--config", str(settings))
    assert main(["lease", "list", *asked]) == 1
    assert f"{tmp_path}/host/var/lib/ocigpu/leases: there is none" in capsys.readouterr().err
    journal = LeaseJournal(journal_directory(f"{tmp_path}/host"))
    with journal.change() as change:
        change.put(Lease(GPU, Phase.FREE, 3), "test")
    assert main(["lease", "maintenance", GPU, "--generation", "3", *asked]) == 0
    assert main(["lease", "list", *asked, "--json"]) == 0
    answer = capsys.readouterr().out.partition("\n")[2]
    assert [each["phase"] for each in json.loads(answer)["leases"]] == ["Maintenance"]
    assert journal.refresh()[GPU].phase is Phase.MAINTENANCE
    journal.close()


def test_a_quarantine_to_come_is_in_the_history_and_its_reason_outlasts_the_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = LeaseJournal(str(tmp_path), boot="boot")
    with journal.change() as change:
        change.put(Lease(GPU, Phase.LEASED, 3, boot="boot", quiet=0.0), "test")
    asked = ("--journal", str(tmp_path))
    journal.tell({GPU: LeaseEvent(LeaseEventKind.HOLDERS)})
    assert journal.leases[GPU].phase is Phase.RECLAIMING
    assert main(["lease", "quarantine", GPU, "--generation", "3", "--why", "smells burnt", *asked]) == 0
    capsys.readouterr()
    assert main(["lease", "history", *asked, "--json"]) == 0
    last = json.loads(capsys.readouterr().out)["machines"][0]["transitions"][-1]
    assert (last["from"], last["to"], last["phase"]) == ("sanitizing", "sanitizing", "Reclaiming")
    assert last["cause"].endswith(": smells burnt")
    assert (last["reason"], last["detail"]) == ("OperatorRequest", "smells burnt")
    for event in (LeaseEvent(LeaseEventKind.STARTED, text="boot"), LeaseEvent(LeaseEventKind.HOLDERS, pids=(7,))):
        journal.tell({GPU: event})
    journal.tell({GPU: LeaseEvent(LeaseEventKind.STARTED, text="next")})
    assert main(["lease", "list", *asked]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(GPU)]
    assert row.split(None, 3)[3].strip() == "OperatorRequest  smells burnt"
    journal.close()
