"""What the host remembers of its partitions, across restarts of the manager, of its machine and of the host."""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fabric import with_active

from ocigpu.gpus.nvidia.fabric import state as state_module
from ocigpu.gpus.nvidia.fabric.libnvfm import LibnvfmFabric
from ocigpu.gpus.nvidia.fabric.partitions import FabricError, Partition, board_partitions
from ocigpu.gpus.nvidia.fabric.state import (
    FabricState,
    FabricStore,
    KeptFabric,
    KeptSet,
    sets_to_restore,
    settle,
)
from ocigpu.sim.fabric import SimulatedManager

BOOT = "boot-1"
PAIR = (1, 3)


class FakeManager:
    """A manager as a value: ``dies``: the caller is killed before or after its next change."""

    def __init__(self, active: Collection[Collection[int]] = ()) -> None:
        self.partitions = board_partitions("hopper", active)
        self.dies = ""
        self.waits = False
        self.takes_lists = True
        self.given: list[list[tuple[int, ...]]] = []

    def list_partitions(self) -> tuple[Partition, ...]:
        if self.waits:
            raise FabricError("OCIGPU-FAB-7", "waits")
        return self.partitions

    def _change(self, physical_ids: Collection[int], active: bool) -> None:
        if self.dies == "before":
            raise KeyboardInterrupt
        if self.waits or (active and self._conflicts(physical_ids)):
            raise FabricError("OCIGPU-FAB-5", "in use")
        self.partitions = with_active(self.partitions, physical_ids, active)
        if self.dies == "after":
            raise KeyboardInterrupt

    def _conflicts(self, physical_ids: Collection[int]) -> bool:
        return any(set(one) & set(physical_ids) and set(one) != set(physical_ids) for one in self.active)

    def activate(self, physical_ids: Collection[int]) -> Partition:
        self._change(physical_ids, True)
        return next(one for one in self.partitions if one.physical_ids == tuple(sorted(physical_ids)))

    def deactivate(self, physical_ids: Collection[int]) -> None:
        self._change(physical_ids, False)

    def restore(self, active: Collection[Collection[int]], known: Collection[Partition]) -> tuple[Partition, ...]:
        assert {one.physical_ids for one in known} >= set(map(tuple, active))
        if not self.takes_lists:
            raise FabricError("OCIGPU-FAB-3", "not supported", status=-3)
        self.given.append(sorted(tuple(ids) for ids in active))
        self.waits = False
        self.partitions = board_partitions("hopper", active)
        return self.partitions

    def lose(self) -> None:
        """Be started anew with the service machine."""
        self.partitions = board_partitions("hopper")

    @property
    def active(self) -> list[tuple[int, ...]]:
        return [one.physical_ids for one in self.partitions if one.is_active]


@pytest.fixture
def store(tmp_path: Path) -> FabricStore:
    return FabricStore(str(tmp_path / "fabric"))


def kept(manager: FakeManager, store: FabricStore, boot: str = BOOT) -> KeptFabric:
    return KeptFabric(manager, store, boot)


def sets(store: FabricStore) -> list[tuple[tuple[int, ...], str, bool, bool]]:
    return [
        (one.physical_ids, one.lease, one.settled, bool(one.broken)) for one in (store.read() or FabricState()).sets
    ]


def test_a_set_is_remembered_until_it_is_deactivated(store: FabricStore) -> None:
    manager = FakeManager()
    fabric = kept(manager, store)
    assert store.read() is None
    fabric.activate([3, 1], "team-a", 4)
    assert sets(store) == [(PAIR, "team-a", True, False)]
    assert store.read() == fabric.read_state()
    fabric.activate([1, 3], "team-a", 4)
    with pytest.raises(FabricError, match="it is active for team-a") as error:
        fabric.activate([1, 3], "team-b")
    assert error.value.code == "OCIGPU-FAB-5"
    fabric.deactivate([1, 3])
    fabric.deactivate([1, 3])
    assert (sets(store), manager.active) == ([], [])


def test_nothing_is_activated_below_a_machine_whose_partition_was_lost(store: FabricStore) -> None:
    manager = FakeManager()
    fabric = kept(manager, store)
    fabric.activate(PAIR, "team-a")
    manager.lose()
    for ids in (PAIR, [1], [1, 2, 3, 4]):  # the manager sees no conflict
        with pytest.raises(FabricError, match="GPUs 1,3 of team-a: its partition was found inactive") as error:
            fabric.activate(ids, "team-b")
        assert (error.value.code, error.value.hint) == (
            "OCIGPU-FAB-5", "Deactivate 1,3 first, when nothing runs on it."
        )  # fmt: skip
    assert manager.active == []
    fabric.deactivate(PAIR)
    fabric.activate([1, 2, 3, 4], "team-b")


def test_a_lease_that_came_since_somebody_looked_is_not_deactivated(store: FabricStore) -> None:
    manager = FakeManager()
    fabric = kept(manager, store)
    fabric.activate(PAIR, "team-a")
    with pytest.raises(FabricError, match="deactivate GPUs 1,3: held by team-a"):
        fabric.deactivate(PAIR, force=False)
    assert manager.active == [PAIR]


@pytest.mark.parametrize("dies", ["before", "after"])
def test_whoever_is_killed_in_a_change_leaves_a_set_that_the_next_look_settles(store: FabricStore, dies: str) -> None:
    manager = FakeManager()
    manager.dies = dies
    with pytest.raises(KeyboardInterrupt):
        kept(manager, store).activate(PAIR, "team-a")
    assert sets(store) == [(PAIR, "team-a", False, False)]
    kept(manager, store).list_partitions()
    assert sets(store) == ([(PAIR, "team-a", True, False)] if dies == "after" else [])
    manager.dies = ""
    kept(manager, store).activate(PAIR, "team-a")
    manager.dies = dies
    with pytest.raises(KeyboardInterrupt):
        kept(manager, store).deactivate(PAIR)
    manager.dies = ""
    fabric = kept(manager, store)
    fabric.list_partitions()
    assert sets(store) == ([] if dies == "after" else [(PAIR, "team-a", True, False)])
    assert not fabric.notes


def test_a_manager_that_waits_is_told_what_was_active_by_whoever_comes_first(store: FabricStore) -> None:
    manager = FakeManager()
    kept(manager, store).activate(PAIR, "team-a")
    kept(manager, store).activate([2], "team-b")
    manager.waits = True
    manager.lose()
    fabric = kept(manager, store)
    assert fabric.restore() == (PAIR, (2,))
    assert manager.given == [[PAIR, (2,)]]
    assert manager.active == [PAIR, (2,)]
    assert fabric.restore() is None
    assert not fabric.notes
    manager.waits = True
    assert kept(manager, store).activate([4]).is_active
    assert manager.active == [PAIR, (2,), (4,)]


def test_a_change_that_was_not_proven_is_not_given_back(store: FabricStore) -> None:
    manager = FakeManager()
    kept(manager, store).activate([2], "team-b")
    manager.dies = "after"
    with pytest.raises(KeyboardInterrupt):
        kept(manager, store).activate(PAIR, "team-a")
    manager.dies, manager.waits = "", True
    assert kept(manager, store).restore() == ((2,),)
    assert sets(store) == [((2,), "team-b", True, False)]


def test_a_service_machine_restarted_below_tenants_breaks_their_leases_and_activates_nothing(
    store: FabricStore,
) -> None:
    manager = FakeManager()
    kept(manager, store).activate(PAIR, "team-a")
    kept(manager, store).activate([2], "team-b")
    manager.lose()
    fabric = kept(manager, store)
    assert fabric.restore() is None
    assert manager.active == []
    assert sets(store) == [(PAIR, "team-a", True, True), ((2,), "team-b", True, True)]
    assert [note.split(":")[0] for note in fabric.notes] == ["GPUs 1,3 of team-a", "GPU 2 of team-b"]
    assert fabric.read_state().epoch == 1
    with pytest.raises(FabricError, match="its partition was found inactive"):
        fabric.activate(PAIR, "team-a")
    manager.waits = True
    assert fabric.restore() == ()
    fabric.deactivate(PAIR)
    fabric.activate(PAIR, "team-c")
    assert sets(store) == [((2,), "team-b", True, True), (PAIR, "team-c", True, False)]
    assert fabric.read_state().epoch == 1


def test_a_restart_of_the_host_forgets_all(store: FabricStore) -> None:
    manager = FakeManager()
    kept(manager, store).activate(PAIR, "team-a")
    manager.lose()
    manager.waits = True
    fabric = kept(manager, store, "boot-2")
    assert fabric.restore() == ()
    assert fabric.notes == ["GPUs 1,3: forgotten, the host was restarted"]
    assert sets(store) == []


def test_without_a_state_nobody_is_told_an_empty_list_unasked(store: FabricStore) -> None:
    manager = FakeManager([PAIR])
    manager.waits = True
    with pytest.raises(FabricError, match="no state of them") as error:
        kept(manager, store).list_partitions()
    assert error.value.code == "OCIGPU-FAB-7"
    assert manager.given == []
    assert kept(manager, store).restore(nothing=True) == ()
    assert manager.given == [[]]


@pytest.mark.parametrize(
    "content",
    [
        "", "{}", "[]", "null", '{"format": 2}', '{"format": 1}', '{"format": 1, "known": [], "sets": [{}]}',
        '{"format": 1, "known": [{"physical_ids": 3, "nvlinks": []}], "sets": []}',
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_read_changes_nothing(store: FabricStore, content: str) -> None:
    manager = FakeManager()
    kept(manager, store).activate(PAIR, "team-a")
    path = Path(store.directory, "state.json")
    path.write_text(content)
    manager.waits = True
    for request in (kept(manager, store).restore, lambda: kept(manager, store).activate([2])):
        with pytest.raises(FabricError, match=r"state\.json: not a state of format 1") as error:
            request()
        assert error.value.code == "OCIGPU-FAB-9"
    assert (manager.given, manager.active) == ([], [PAIR])
    assert path.read_text() == content


def test_the_file_is_for_its_owner_and_replaced_whole(store: FabricStore) -> None:
    kept(FakeManager(), store).activate(PAIR, "team-a")
    path = Path(store.directory, "state.json")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert json.loads(path.read_text())["sets"][0]["physical_ids"] == [1, 3]
    assert sorted(os.listdir(store.directory)) == ["lock", "state.json"]


def test_one_program_changes_partitions_at_a_time(store: FabricStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(FakeManager(), store).list_partitions()
    monkeypatch.setattr(state_module, "LOCK_LIMIT", 0.0)
    with open(Path(store.directory, "lock"), "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FabricError, match="held for 0 s by another program") as error:
            kept(FakeManager(), store).list_partitions()
    assert error.value.code == "OCIGPU-FAB-9"


def test_settling_is_idempotent_and_says_things_once() -> None:
    before = FabricState(BOOT, 0, (), (KeptSet(PAIR, "a", 1, True), KeptSet((2,), "b")))
    listed = board_partitions("hopper")
    after, notes = settle(before, listed, BOOT)
    assert len(notes) == 1
    assert settle(after, listed, BOOT) == (after, ())
    assert sets_to_restore(before, BOOT) == (PAIR,)
    assert sets_to_restore(before, "boot-2") == sets_to_restore(after, BOOT) == ()


def test_a_manager_that_only_starts_is_not_taken_for_one_of_another_mode(store: FabricStore) -> None:
    manager = FakeManager()
    manager.takes_lists = False
    kept(manager, store).activate(PAIR, "team-a")
    manager.waits = True
    with pytest.raises(FabricError, match="takes no list of active ones") as error:
        kept(manager, store).restore()
    assert error.value.code == "OCIGPU-FAB-7"
    assert sets(store) == [(PAIR, "team-a", True, False)]


OPERATIONS = st.tuples(
    st.sampled_from(["activate", "deactivate", "look", "manager restarts", "machine restarts", "host restarts"]),
    st.sampled_from([one.physical_ids for one in board_partitions("hopper")]),
    st.sampled_from(["", "before", "after"]),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(OPERATIONS, max_size=14))
def test_whatever_happens_nobody_loses_a_partition_unsaid(operations: list[tuple[str, tuple[int, ...], str]]) -> None:
    """Whoever was told that a set is active keeps it, or is marked broken, or the whole host was restarted."""
    manager, boot = FakeManager(), 1
    promised: dict[tuple[int, ...], str] = {}
    with tempfile.TemporaryDirectory() as directory:
        store = FabricStore(directory)
        for number, (what, ids, dies) in enumerate(operations):
            fabric = kept(manager, store, str(boot))
            manager.dies = dies
            try:
                if what == "activate":
                    fabric.activate(ids, f"lease-{number}")
                    promised[ids] = f"lease-{number}"
                elif what == "deactivate":
                    promised.pop(ids, None)
                    fabric.deactivate(ids)
                elif what == "look":
                    fabric.list_partitions()
                else:
                    manager.lose()
                    manager.waits = what == "manager restarts"
                    boot += what == "host restarts"
                    promised = {} if what == "host restarts" else promised
            except (FabricError, KeyboardInterrupt):
                pass
        manager.dies = ""
        with contextlib.suppress(FabricError):  # it waits, and nothing was ever kept
            kept(manager, store, str(boot)).list_partitions()
        state = store.read() or FabricState()
        for ids, lease in promised.items():
            one = state.find(ids)
            assert one
            assert one.lease == lease
            assert one.settled
            assert one.broken or ids in manager.active
        assert len({gpu for ids in manager.active for gpu in ids}) == sum(map(len, manager.active))
        assert {one.physical_ids for one in state.sets if not one.broken} == set(manager.active)


def test_over_the_library(fabric: LibnvfmFabric, manager: SimulatedManager, store: FabricStore) -> None:
    host = KeptFabric(fabric, store, BOOT)
    host.activate(PAIR, "team-a")
    manager.restart()
    assert host.restore() == (PAIR,)
    assert manager.active() == [PAIR]
    manager.fail((2,), -10)
    with pytest.raises(FabricError, match="trained"):
        host.activate([2], "team-b")
    host.list_partitions()
    assert sets(store) == [(PAIR, "team-a", True, False)]
    manager.start()
    host.list_partitions()
    assert sets(store) == [(PAIR, "team-a", True, True)]


def test_a_state_that_somebody_else_could_have_written_is_not_believed(tmp_path: Path) -> None:
    """Whoever writes it says which sets nobody has: they would be deactivated below a tenant."""
    before = os.umask(0)
    try:
        store = FabricStore(str(tmp_path / "lib/ocigpu/fabric"))
        kept(FakeManager(), store).activate([3, 1], "team-a")
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "lib", tmp_path / "lib/ocigpu")]
    assert (modes, sets(store)) == ([0o755, 0o755], [(PAIR, "team-a", True, False)])
    for change, back, words in (
        (lambda: os.chmod(tmp_path / "lib/ocigpu", 0o777), lambda: os.chmod(tmp_path / "lib/ocigpu", 0o755), "replace"),
        (lambda: os.chmod(store.directory, 0o770), lambda: os.chmod(store.directory, 0o700), "others may write"),
        (lambda: os.chown(store.directory, 65534, 0), lambda: os.chown(store.directory, 0, 0), "owner 65534"),
    ):
        change()
        for use in (store.read, kept(FakeManager(), store).list_partitions):
            with pytest.raises(FabricError, match=words) as error:
                use()
            assert error.value.code == "OCIGPU-FAB-9"
        back()
    os.rename(store.directory, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", store.directory)
    with pytest.raises(FabricError, match="Not a directory"):
        store.read()
