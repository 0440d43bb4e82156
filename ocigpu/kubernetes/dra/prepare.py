"""Claims are prepared and given back: all of a claim or nothing, once however often the kubelet asks.

Every step is written down before the first is taken, so whatever ends this program can be undone by the next.  A step's
undoing does no harm when the step was never taken.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.kubernetes.config import PluginOptions
from ocigpu.kubernetes.dra.claims import (
    Allotted,
    ClaimRef,
    check_configs,
    check_holders,
    claim_error,
    read_allocation,
)
from ocigpu.kubernetes.dra.devices import DraDevice, DraNode
from ocigpu.kubernetes.dra.specs import (
    cdi_device,
    family_of,
    is_written,
    remove_spec,
    spec_path,
    swept_specs,
    write_claim_spec,
)
from ocigpu.kubernetes.dra.state import ClaimRecord, ClaimStep, ClaimStore, Records

GetClaim = Callable[[str, str], "dict[str, Any] | None"]
"""Returns a claim by namespace and name as the API server has it, None for none; raises HostError OCIGPU-KUBE-5."""


class NodeView(NamedTuple):
    """The node as it was read last: what it offers, and with which settings it was read."""

    node: DraNode
    devices: tuple[DraDevice, ...]
    settings: Settings
    options: PluginOptions
    mps_root: str = "/run/nvidia/mps"


class PoolPlace(NamedTuple):
    """Whose claims these are: name of the driver and of the pool, and where CDI specifications go."""

    driver: str
    pool: str
    cdi: str


class PreparedDevice(NamedTuple):
    """One device for the kubelet."""

    request: str
    pool: str
    device: str
    cdi: tuple[str, ...]
    share: str = ""


class ClaimEffect(NamedTuple):
    """Something that is done for a claim and undone; both get the record, the step's arguments and the node.

    ``do`` raises OcigpuError; ``undo`` does no harm when nothing was done, and raises when it must be tried again.  The
    node is None for ``undo`` while it cannot be read.
    """

    do: "Callable[[ClaimRecord, dict[str, str], NodeView], None]"
    undo: "Callable[[ClaimRecord, dict[str, str], NodeView | None], None]"


Planner = Callable[[Sequence[Allotted], NodeView], Sequence[ClaimStep]]
"""Returns what must be done before a claim's containers may start, but for CDI."""


class Preparer:
    """Prepares claims; its methods may be called by several threads.

    ``view`` returns the node, None while nobody has been able to read it.  ``effects``, ``plan``: what is done beside
    CDI specifications.
    """

    def __init__(
        self,
        store: ClaimStore,
        place: PoolPlace,
        view: "Callable[[], NodeView | None]",
        get_claim: GetClaim,
        log: Callable[..., None],
        effects: "dict[str, ClaimEffect] | None" = None,
        plan: Planner = lambda _allotted, _view: (),
    ) -> None:
        self.store, self.place = store, place
        self._view, self._get_claim, self._log, self._plan = view, get_claim, log, plan
        self._effects = {"cdi": ClaimEffect(self._write_spec, lambda _record, step, _view: remove_spec(step["path"]))}
        self._effects.update(effects or {})
        self._lock = threading.Lock()

    @contextmanager
    def _records(self) -> Iterator[Records]:
        """Yield the claims as they are on the disk, alone of all threads and programs."""
        with self._lock, self.store.locked():
            records, note = self.store.read()
            if note:
                self._log("warning", note)
                self._sweep(records)
            yield records

    def recover(self) -> None:
        """Undo what a program that was ended has left half-done, and remove the files of claims that nobody has.

        What cannot be undone now is tried again when the kubelet asks; raises HostError OCIGPU-DRA-5 only.
        """
        with self._records() as records:
            for uid, record in list(records.items()):
                if not record.done:
                    self._log("warning", f"claim {record.claim}: half-prepared, undone")
                    try:
                        self._undo(records, record)
                    except OcigpuError as error:
                        self._log("error", f"claim {record.claim}: {error.code}: {error.message}", claim=uid)
            self._sweep(records)

    def resume(self, effect: str) -> None:
        """Do an effect again for all claims that are prepared: what it made has ended with the driver before.

        What goes wrong is logged; raises HostError OCIGPU-DRA-5 only.
        """
        with self._records() as records:
            for record in records.values():
                for step in record.steps:
                    try:
                        if step.effect == effect and record.done:
                            self._effects[effect].do(record, step.arguments, self._node())
                    except OcigpuError as error:
                        self._log("error", f"claim {record.claim}: {error.code}: {error.message}")

    def _sweep(self, records: Records) -> None:
        for path in swept_specs(self.place.cdi, self.place.driver, list(records)):
            self._log("info", f"{path} removed: its claim is not prepared")
            try:
                remove_spec(path)
            except OcigpuError as error:
                self._log("warning", error.message)

    def held(self) -> tuple[ClaimRecord, ...]:
        """Return what is prepared now, or being prepared; raises HostError OCIGPU-DRA-5."""
        with self._lock:
            return tuple(self.store.read()[0].values())

    # prepare

    def prepare(self, claim: ClaimRef) -> tuple[PreparedDevice, ...]:
        """Return the devices of a claim, which its containers may have from now on; raises OcigpuError."""
        with self._records() as records:
            record = records.get(claim.uid)
            if record is not None and record.done:
                self._mend(record)
                return self._answer(record)
            if record is not None:
                self._undo(records, record)
            view = self._node()
            document = self._get_claim(claim.namespace, claim.name)
            allotted = read_allocation(claim, document, self.place.driver, self.place.pool, view.devices)
            check_configs(claim, allotted)
            check_holders(claim, allotted, [each.holder for each in records.values()])
            families = dict.fromkeys(map(family_of, allotted))
            specs = [ClaimStep("cdi", {"path": self._path(claim, family), "family": family}) for family in families]
            record = ClaimRecord(claim, allotted, (*self._plan(allotted, view), *specs))
            self._write(records, record)
            try:
                for step in record.steps:
                    self._effects[step.effect].do(record, step.arguments, self._node())
            except BaseException:
                self._undo_if_possible(records, record)
                raise
            record = record._replace(done=True)
            self._write(records, record)
            names = ", ".join(each.device.name for each in allotted)
            self._log("info", f"claim {claim}: prepared: {names}", claim=claim.uid)
            return self._answer(record)

    def _node(self) -> NodeView:
        view = self._view()
        if view is None:
            raise HostError("OCIGPU-DRA-3", "the node has not been read yet", "")
        return view

    def _mend(self, record: ClaimRecord) -> None:
        """Write again what somebody has removed of a prepared claim's files."""
        for step in record.steps:
            if step.effect == "cdi" and not is_written(step.arguments["path"]):
                self._effects["cdi"].do(record, step.arguments, self._node())

    def _answer(self, record: ClaimRecord) -> tuple[PreparedDevice, ...]:
        return tuple(
            PreparedDevice(
                each.request.partition("/")[0],
                self.place.pool,
                each.device.name,
                (cdi_device(self.place.driver, record.claim, each.device.name),),
                each.share,
            )
            for each in record.devices
        )

    def _path(self, claim: ClaimRef, family: str) -> str:
        if not claim.uid or not all(letter.isalnum() or letter == "-" for letter in claim.uid):
            raise claim_error(claim, "its uid is no file name", "")
        return spec_path(self.place.cdi, self.place.driver, claim.uid, family)

    def _write_spec(self, record: ClaimRecord, arguments: dict[str, str], view: NodeView) -> None:
        own = [each for each in record.devices if family_of(each) == arguments["family"]]
        claim, path = record.claim, arguments["path"]
        write_claim_spec(path, claim, own, self.place.driver, view.node, view.settings, view.options, view.mps_root)

    # give back

    def unprepare(self, claim: ClaimRef) -> None:
        """Give everything back that was prepared for a claim; one that is not known is no error.

        Needs neither a driver nor the API server for a claim of an earlier boot.  Raises OcigpuError.
        """
        with self._records() as records:
            record = records.get(claim.uid)
            if record is None:
                return
            self._undo(records, record)
            self._log("info", f"claim {claim}: given back", claim=claim.uid)

    def _undo(self, records: Records, record: ClaimRecord) -> None:
        """Undo the steps of a claim, the last one first, and forget it."""
        while record.steps:
            step = record.steps[-1]
            self._effects[step.effect].undo(record, step.arguments, self._view())
            record = record._replace(steps=record.steps[:-1], done=False)
            if record.steps and step.effect != "cdi":
                self._write(records, record)
        self._write(records, record, forget=True)

    def _undo_if_possible(self, records: Records, record: ClaimRecord) -> None:
        try:
            self._undo(records, record)
        except OcigpuError as error:
            self._log("error", f"claim {record.claim}: not undone yet: {error.code}: {error.message}")

    def _write(self, records: Records, record: ClaimRecord, forget: bool = False) -> None:
        records.pop(record.claim.uid, None)
        if not forget:
            records[record.claim.uid] = record
        self.store.write(records)
