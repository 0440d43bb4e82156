"""``ocigpu fabric`` over a simulated manager."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.fixtures import Run

from ocigpu.cli.front.main import main
from ocigpu.core.codes import CODES
from ocigpu.sim.fabric import SimulatedManager

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


def test_a_set_is_planned_activated_audited_and_deactivated(cli: Run, manager: SimulatedManager) -> None:
    manager.start(active=[{1}, {8}])
    status, output, _ = cli("plan", "--gpus", "2")
    assert (status, output.splitlines()) == (
        0,
        [
            "reset       GPUs 1,3: no state of a previous user stays in them",
            "deactivate  GPU 1: it contains a GPU of the requested set",
            "activate    GPUs 1,3: 36 NVLinks",
            "verify      GPUs 1,3: according to the manager's list",
            "nothing was changed",
        ],
    )
    assert manager.active() == [(1,), (8,)]
    status, _, complaint = cli("activate", "1,3")
    assert (status, complaint.splitlines()[0]) == (1, "ocigpu: OCIGPU-FAB-5: in use: partition 7 (GPU 1)")
    assert cli("activate", "3,1", "--replace", "--lease", "team-a")[0] == 0
    assert cli("activate", "1,3", "--lease", "team-a")[0] == 0
    assert manager.active() == [(1, 3), (8,)]
    status, output, _ = cli("audit", "--json")
    assert (status, json.loads(output)["deviations"]) == (
        1,
        [{"problem": "unexpected", "physical-ids": [8], "text": "active without an owner"}],
    )
    assert cli("audit", "--expect", "1,3", "--expect", "8") == (0, "as expected: 2 active partitions\n", "")
    assert cli("activate", "1,2,3,4", "--replace")[0] == 1
    manager.say("lacks 5 4")  # as when an NVSwitch is gone
    assert cli("audit", "--expect", "1,3", "--expect", "8") == (
        1,
        "PROBLEM   GPU PHYSICAL IDS  WHAT\ndegraded  5                 14 of 18 NVLinks\n",
        "",
    )
    manager.say("lacks 5 0")
    assert "held by team-a" in cli("deactivate", "1,3")[2]
    assert "choose 7 GPUs of 2,4,5,6,7,8: so many are not free" in cli("plan", "--gpus", "7", "--unlinked")[2]
    assert cli("deactivate", "1,3", "8", "--force")[0] == 0
    assert manager.active() == []
    assert cli("audit") == (0, "as expected: 0 active partitions\n", "")


@pytest.mark.rest
def test_what_fails_half_way_says_what_was_done(cli: Run, manager: SimulatedManager) -> None:
    manager.start(active=[{1}, {8}])
    manager.fail({2, 4}, -10)
    status, _, complaint = cli("activate", "1,3", "2,4", "--replace")
    cause, before = complaint.splitlines()[0].split("; ")
    assert (status, before) == (1, "done before: deactivate GPU 1, activate GPUs 1,3")
    assert cause.endswith("activate GPUs 2,4: tcp:127.0.0.1:6666: NVLinks could not be trained (libnvfm -10)")
    assert manager.active() == [(1, 3), (8,)]


def test_what_is_leased_is_not_chosen(cli: Run, manager: SimulatedManager) -> None:
    assert cli("activate", "5,7", "--lease", "team-a")[0] == 0
    status, output, _ = cli("activate", "--gpus", "2", "--lease", "team-b", "--json")
    done = json.loads(output)
    assert (status, done["partitions"][0]["physical-ids"], done["linked"]) == (0, [6, 8], True)
    status, output, _ = cli("plan", "--gpus", "4", "--json")
    assert [step["verb"] for step in json.loads(output)["steps"]] == ["reset", "activate", "verify"]
    status, _, complaint = cli("plan", "--gpus", "8")
    assert (status, complaint.splitlines()[0]) == (
        1,
        "ocigpu: OCIGPU-FAB-4: choose 8 GPUs of 1,2,3,4: no partition of that size is wholly free",
    )


def test_three_gpus_are_given_apart_when_that_is_wanted(cli: Run, manager: SimulatedManager) -> None:
    status, _, complaint = cli("activate", "--gpus", "3")
    assert (status, complaint.splitlines()) == (
        1,
        [
            "ocigpu: OCIGPU-FAB-4: choose 3 GPUs of 1,2,3,4,5,6,7,8: the board's sizes are 1, 2, 4, 8",
            "hint: --unlinked takes single partitions: no NVLink between these GPUs, copies go over PCIe",
        ],
    )
    status, output, _ = cli("activate", "--gpus", "3", "--unlinked")
    assert (status, output.splitlines()[-1]) == (0, "note: 1,2,3: no NVLink between these GPUs, copies go over PCIe")
    assert manager.active() == [(1,), (2,), (3,)]
    assert cli("activate", "5,6,8", "--unlinked")[0] == 0
    assert manager.active() == [(1,), (2,), (3,), (5,), (6,), (8,)]


@pytest.mark.parametrize(
    "words", [[], ["1", "--gpus", "1"], ["0"], ["1,,3"], ["1,1"], ["a"], ["1-4"], ["1,3", "3"], ["5", "5"]]
)
def test_sets_that_cannot_be_meant(cli: Run, manager: SimulatedManager, words: list[str]) -> None:
    for verb in ("plan", "activate"):
        status, output, complaint = cli(verb, *words)
        assert (status, output, "OCIGPU-ARG-1" in complaint) == (2, "", True)
    assert manager.active() == []


@pytest.mark.rest
def test_a_restarted_manager_gets_its_partitions_back(cli: Run, manager: SimulatedManager) -> None:
    assert "does not wait" in cli("restore")[1]
    assert cli("activate", "1,3", "2", "--lease", "team-a")[0] == 0
    manager.restart()
    assert "wait" in cli("list")[2]
    assert cli("restore") == (0, "told the manager the active partitions: 1,3; 2\n", "")
    assert manager.active() == [(1, 3), (2,)]
    manager.start()
    status, output, _ = cli("restore", "--json")
    restored = json.loads(output)
    assert (status, restored["waited"], [one["lease"] for one in restored["sets"] if one["broken"]]) == (
        1,
        False,
        ["team-a", "team-a"],
    )
    assert cli("audit")[0] == 1
    assert manager.active() == []


def test_a_manager_that_does_not_isolate_is_refused(cli: Run, manager: SimulatedManager) -> None:
    manager.say("mode 0")
    for words in (["activate", "1"], ["deactivate", "1"], ["audit"], ["restore"], ["plan", "1"]):
        status, _, complaint = cli(*words)
        assert (status, "OCIGPU-FAB-3" in complaint) == (1, True)


def test_following_tells_a_restarted_manager_by_itself(fabric_host: Path, cli: Run, manager: SimulatedManager) -> None:
    assert cli("activate", "1,3", "--lease", "team-a")[0] == 0
    words = [sys.executable, "-m", "ocigpu.cli", "fabric", "restore", "--follow", "--interval", "0.1"]
    follower = subprocess.Popen(
        [*words, "--config", str(fabric_host / "config.toml")], stdout=subprocess.PIPE, text=True
    )
    try:
        manager.restart()
        assert follower.stdout
        assert follower.stdout.readline() == "told the manager the active partitions: 1,3\n"
        assert manager.active() == [(1, 3)]
        manager.start()
        assert "GPUs 1,3 of team-a: broken" in follower.stdout.readline()
        follower.terminate()
        assert follower.wait(60) == 0
    finally:
        follower.kill()
        follower.wait()
        if follower.stdout:
            follower.stdout.close()
