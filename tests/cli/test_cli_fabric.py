"""``ocigpu fabric`` over a simulated manager."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ocigpu.cli.main import main
from ocigpu.core.codes import CODES
from ocigpu.sim.fabric import SimulatedManager

Run = Callable[..., tuple[int, str, str]]
ISOLATED = """\
PARTITION ID  STATUS    GPUs  NVLINKS  GPU PHYSICAL IDs
------------  ------    ----  -------  ----------------
0             Inactive  8     144      1,2,3,4,5,6,7,8
1             Inactive  4     72       1,2,3,4
2             Inactive  4     72       5,6,7,8
3             Inactive  2     36       1,3
4             Inactive  2     36       2,4
5             Inactive  2     36       5,7
6             Inactive  2     36       6,8
7             Active    1     0        1
8             Active    1     0        2
9             Active    1     0        3
10            Active    1     0        4
11            Active    1     0        5
12            Active    1     0        6
13            Active    1     0        7
14            Active    1     0        8
"""


@pytest.fixture
def cli(fabric_host: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call with the words after "ocigpu fabric": returns exit status, output and complaint."""

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["fabric", *words, "--config", str(fabric_host / "config.toml")])
        return status, *capsys.readouterr()

    return run


def test_the_listing_is_that_of_an_isolated_board(cli: Run, manager: SimulatedManager) -> None:
    manager.start(active=[{gpu} for gpu in range(1, 9)])
    assert cli("list") == (0, ISOLATED, "")
    assert cli("list", "--address", "127.0.0.1:6666") == (0, ISOLATED, "")


def test_the_listing_as_json(cli: Run, manager: SimulatedManager) -> None:
    manager.start("blackwell", active=[{1, 2}])
    status, output, _ = cli("list", "--json")
    listed = json.loads(output)["partitions"]
    assert (status, len(listed)) == (0, 15)
    assert [one for one in listed if one["active"]] == [
        {
            "partition-id": 4,
            "active": True,
            "physical-ids": [1, 2],
            "nvlinks": 36,
            "nvlinks-by-gpu": [{"available": 18, "most": 18}] * 2,
        }
    ]


def test_errors_are_one_line_and_a_hint(cli: Run, manager: SimulatedManager) -> None:
    manager.say("mode 0")
    status, output, complaint = cli("list")
    assert (status, output) == (1, "")
    assert complaint.splitlines() == [
        "ocigpu: OCIGPU-FAB-3: list partitions: tcp:127.0.0.1:6666: not supported in the manager's mode (libnvfm -3)",
        f"hint: {CODES['OCIGPU-FAB-3'].fix}",
    ]
