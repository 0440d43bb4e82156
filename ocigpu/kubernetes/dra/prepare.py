"""Claims are prepared and given back: all of a claim or nothing, once however often the kubelet asks.

Every step is written down before the first is taken, so whatever ends this program can be undone by the next.  A step's
undoing does no harm when the step was never taken.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError, OcigpuError, quoted
from ocigpu.core.facts import HostFacts
from ocigpu.gpus.tree import find_roots
from ocigpu.kubernetes.dra.claims import (
    Allotted,
    ClaimRef,
    check_configs,
    check_holders,
    claim_error,
    is_allocated,
    read_allocation,
)
from ocigpu.kubernetes.dra.devices import MigPlace, find_device, made_uuid
from ocigpu.kubernetes.dra.metadata import (
    MetadataPlace,
    has_names,
    is_lost,
    metadata_device,
    metadata_place,
    pod_claim_name,
    remove_metadata,
    swept_metadata,
    write_metadata,
)
from ocigpu.kubernetes.dra.specs import (
    NodeView,
    cdi_device,
    family_of,
    is_written,
    remove_spec,
    spec_path,
    swept_specs,
    write_claim_spec,
)
from ocigpu.kubernetes.dra.state import ClaimRecord, ClaimStep, ClaimStore, Records

METADATA = "metadata"
"""The effect that writes the files which tell a claim's containers of their devices."""
GetClaim = Callable[[str, str], "dict[str, Any] | None"]
"""Returns a claim by namespace and name as the API server has it, None for none; raises HostError OCIGPU-KUBE-5."""

Listed = Callable[[], Collection[tuple[str, str, str]]]
"""Returns namespace, claim and device of what pods of this node have; raises HostError (OCIGPU-DRA-3)."""


def find_facts(view: NodeView | None, uuid: str) -> HostFacts | None:
    """Return the facts needed to undo changes to a GPU; None when it is gone or no longer has a driver.

    Raises HostError (OCIGPU-DRA-3) while that is unknown: the driver is loaded but reports no working GPU.
    """
    if view is None:
        raise HostError("OCIGPU-DRA-3", f"GPU {uuid}: the node has not been read yet", "")
    facts = view.node.facts
    if any(gpu.uuid == uuid for gpu in facts.gpus):
        return facts
    if all(gpu.error for gpu in facts.gpus) and os.path.isdir(f"{find_roots(view.settings).proc}/driver/nvidia"):
        raise HostError("OCIGPU-DRA-3", f"GPU {uuid}: its driver is loaded but reports no working GPU", "")
    return None


class PoolPlace(NamedTuple):
    """Whose claims these are: name of the driver and of the pool, and where CDI specifications go.

    ``metadata``: the host's directory for the files that tell containers of their devices, "" for none.
    """

    driver: str
    pool: str
    cdi: str
    metadata: str = ""


class PreparedDevice(NamedTuple):
    """One device for the kubelet."""

    request: str
    pool: str
    device: str
    cdi: tuple[str, ...]
    share: str = ""


class ClaimEffect(NamedTuple):
    """A change for a claim and its undoing; both get the record, the step's arguments and the node.

    ``do`` raises OcigpuError; ``undo`` is harmless after no change, and raises when it must be tried again.  ``lost``
    returns whether the change must be repeated for a prepared claim.  The node is None for ``undo`` and ``lost`` while
    it cannot be read.  ``shared``: claims with the same step share its change, which is undone with the last of them.
    """

    do: "Callable[[ClaimRecord, dict[str, str], NodeView], None]"
    undo: "Callable[[ClaimRecord, dict[str, str], NodeView | None], None]"
    lost: "Callable[[ClaimRecord, dict[str, str], NodeView | None], bool]" = lambda *_: False
    shared: bool = False


Planner = Callable[[Sequence[Allotted], NodeView, Sequence[ClaimRecord]], Sequence[ClaimStep]]
"""Returns what must be done before a claim's containers may start, but for CDI; gets the claims that are prepared."""


class Preparer:
    """Prepares claims; its methods may be called by several threads.

    ``view`` returns the node, None while it could not be read yet.  ``effects``, ``plan``: the changes beside CDI
    specifications; ``listed``: the kubelet's list of claims of existing pods.
    """

    def __init__(
        self,
        store: ClaimStore,
        place: PoolPlace,
        view: "Callable[[], NodeView | None]",
        get_claim: GetClaim,
        log: Callable[..., None],
        effects: "dict[str, ClaimEffect] | None" = None,
        plan: Planner = lambda *_: (),
        listed: Listed = frozenset,
    ) -> None:
        self.store, self.place = store, place
        self._view, self._get_claim, self._log, self._plan, self._listed = view, get_claim, log, plan, listed
        self.effects = {
            "cdi": ClaimEffect(
                self._write_spec,
                lambda _record, step, _view: remove_spec(step["path"]),
                lambda _record, step, _view: not is_written(step["path"]),
            ),
            METADATA: ClaimEffect(
                self._write_metadata,
                lambda _record, step, _view: remove_metadata(metadata_place(step)),
                lambda record, step, _view: is_lost(metadata_place(step), record.devices),
            ),
        }
        self.effects.update(effects or {})
        self._lock = threading.Lock()
        self._vanished: dict[str, float] = {}

    @contextmanager
    def _records(self) -> Iterator[Records]:
        """Yield the claims as they are on the disk; all other threads and programs are locked out."""
        with self._lock, self.store.locked():
            records, note = self.store.read(aside=True)
            if note:
                self._log("warning", note)
                self._sweep(records)
            yield records

    def recover(self) -> None:
        """Undo the unfinished work of a program that was ended, and remove the files of unknown claims.

        A failed undo is repeated when the kubelet asks; raises HostError OCIGPU-DRA-5 only.
        """
        with self._records() as records:
            for uid, record in list(records.items()):
                if not record.done:
                    self._log("warning", f"claim {record.claim}: half-prepared, undone")
                    try:
                        self._undo(records, record)
                    except OcigpuError as error:
                        self._log("error", f"claim {record.claim}: {error.line}", claim=uid)
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
                            self._effect(record, step).do(record, step.arguments, self._node())
                    except OcigpuError as error:
                        self._log("error", f"claim {record.claim}: {error.line}")

    def _sweep(self, records: Records) -> None:
        left: list[tuple[str, Callable[[], None]]] = [
            (path, partial(remove_spec, path)) for path in swept_specs(self.place.cdi, self.place.driver, list(records))
        ]
        if self.place.metadata:
            places = swept_metadata(self.place.metadata, records)
            left += [(place.directory, partial(remove_metadata, place)) for place in places]
        for path, remove in left:
            self._log("info", f"{path} removed: its claim is not prepared")
            try:
                remove()
            except OcigpuError as error:
                self._log("warning", error.message)

    def sweep_vanished(self, now: float, patience: float) -> bool:
        """Give back devices of claims that are no longer allocated, or not to this node.

        They must have been so ``patience`` seconds ago, too: a pod that was deleted by force is still ending when its
        claim is gone, and the kubelet gives the claim back itself.  A claim that the kubelet lists for a pod is kept:
        the right to delete a claim must not take devices from running containers.  Returns whether some are still
        waited for; raises HostError (OCIGPU-DRA-5; OCIGPU-KUBE-5, OCIGPU-DRA-3 when the API server or the kubelet
        cannot be asked: then nothing is given back).
        """
        since: dict[str, float] = {}
        records = self.held()
        for claim in [record.claim for record in records]:
            document = self._get_claim(claim.namespace, claim.name)
            if not is_allocated(claim, document, self.place.driver, self.place.pool):
                since[claim.uid] = self._vanished.get(claim.uid, now)
        self._vanished = since
        due = [record for record in records if now - since.get(record.claim.uid, now + 1.0) >= patience]
        listed = self._listed() if due else ()
        for claim, devices, *_ in due:
            if any((claim.namespace, claim.name, each.device.name) in listed for each in devices):
                self._log("warning", f"claim {claim}: it is gone, and a pod still has its devices", claim=claim.uid)
                continue
            self._log("warning", f"claim {claim}: it is gone, its devices are released", claim=claim.uid)
            try:
                self.unprepare(claim)
            except OcigpuError as error:
                self._log("error", f"claim {claim}: {error.line}", claim=claim.uid)
        return any(now - moment < patience for moment in since.values())

    def made_places(self) -> set[MigPlace]:
        """Return where MIG devices exist, or are being made, for claims, and on which boards; never blocks."""
        records = self.store.read()[0].values()
        switched = {
            step.arguments["gpu"] for record in records for step in record.steps if step.arguments.get("switched")
        }
        made = [each.device for record in records for each in record.devices if each.device.place]
        return {each.place for each in made if each.place} | {
            MigPlace(each.board) for each in made if each.id in switched
        }

    def held(self) -> tuple[ClaimRecord, ...]:
        """Return the claims that are prepared or being prepared; raises HostError OCIGPU-DRA-5."""
        with self._lock:
            return tuple(self.store.read()[0].values())

    # prepare

    def prepare(self, claim: ClaimRef) -> tuple[PreparedDevice, ...]:
        """Return the devices of a claim, which its containers may use from now on; raises OcigpuError.

        The API server is queried before the lock is taken: it may take long, and giving back does not need it.
        """
        known, asked = self.store.read()[0].get(claim.uid), []
        if known is None or not known.done:
            self._node()
            asked.append(self._get_claim(claim.namespace, claim.name))
        with self._records() as records:
            record = records.get(claim.uid)
            if record is not None and record.done:
                self._repair_lost(record)
                return self._answer(record)
            if record is not None:
                self._undo(records, record)
            view = self._node()
            document = asked[0] if asked else self._get_claim(claim.namespace, claim.name)  # given back meanwhile
            allotted = read_allocation(claim, document, self.place.driver, self.place.pool, view.devices)
            check_configs(claim, allotted)
            check_holders(claim, allotted, [(each.claim, each.devices) for each in records.values()])
            families = dict.fromkeys(map(family_of, allotted))
            specs = [ClaimStep("cdi", {"path": self._path(claim, family), "family": family}) for family in families]
            specs += self._plan_metadata(claim, allotted, document or {})
            record = ClaimRecord(claim, allotted, (*self._plan(allotted, view, tuple(records.values())), *specs))
            self._write(records, record)
            try:
                for step in record.steps:
                    self._effect(record, step).do(record, step.arguments, self._node())
            except BaseException:
                self.undo_if_possible(records, record)
                raise
            record = record._replace(done=True)
            self._write(records, record)
            names = ", ".join(each.device.name for each in allotted)
            self._log("info", f"claim {claim}: prepared: {names}", claim=claim.uid)
            return self._answer(record)

    def _effect(self, record: ClaimRecord, step: ClaimStep) -> ClaimEffect:
        """Return the effect of a step; raises HostError (OCIGPU-DRA-5) for one that a later version has written."""
        if step.effect not in self.effects:
            text = f"claim {record.claim}: its step {quoted(step.effect)} is of a later version of ocigpu"
            raise HostError("OCIGPU-DRA-5", text, "Install that version again; it can give the claim back.")
        return self.effects[step.effect]

    def _node(self) -> NodeView:
        view = self._view()
        if view is None:
            raise HostError("OCIGPU-DRA-3", "the node has not been read yet", "")
        return view

    def _repair_lost(self, record: ClaimRecord) -> None:
        """Repeat the steps of a prepared claim whose effects are lost, and all steps after them."""
        lost = False
        for step in record.steps:
            effect = self._effect(record, step)
            lost = lost or effect.lost(record, step.arguments, self._view())
            if lost:
                effect.do(record, step.arguments, self._node())

    def _answer(self, record: ClaimRecord) -> tuple[PreparedDevice, ...]:
        driver, claim = self.place.driver, record.claim
        has_metadata = any(step.effect == METADATA for step in record.steps)
        return tuple(
            PreparedDevice(
                each.request.partition("/")[0],
                self.place.pool,
                each.device.name,
                (
                    cdi_device(driver, claim, each.device.name),
                    *((metadata_device(driver, claim, each.request),) if has_metadata else ()),
                ),
                each.share,
            )
            for each in record.devices
        )

    def _plan_metadata(
        self, claim: ClaimRef, allotted: Sequence[Allotted], document: "dict[str, Any]"
    ) -> list[ClaimStep]:
        if not self.place.metadata:
            return []
        if not has_names(claim, allotted):
            self._log("warning", f"claim {claim}: without metadata in its containers: a name is not a Kubernetes name")
            return []
        place = MetadataPlace(
            self._path(claim, METADATA), f"{self.place.metadata}/{claim.uid}", pod_claim_name(document)
        )
        return [ClaimStep(METADATA, place._asdict())]

    def _write_metadata(self, record: ClaimRecord, arguments: dict[str, str], view: NodeView) -> None:
        devices = []
        for each in record.devices:  # a record that was read from the disk has no attributes
            device = find_device(view.devices, each.device.name) or each.device
            uuid = made_uuid(device, view.node) if device.place else ""
            made = {"uuid": {"string": uuid}} if uuid else {}
            devices.append(each._replace(device=device._replace(attributes={**device.attributes, **made})))
        write_metadata(metadata_place(arguments), record.claim, devices, self.place.driver, self.place.pool)

    def _path(self, claim: ClaimRef, family: str) -> str:
        if not claim.uid or not all(letter.isalnum() or letter == "-" for letter in claim.uid):
            raise claim_error(claim, "its uid is not a file name", "")
        return spec_path(self.place.cdi, self.place.driver, claim.uid, family)

    def _write_spec(self, record: ClaimRecord, arguments: dict[str, str], view: NodeView) -> None:
        own = [each for each in record.devices if family_of(each) == arguments["family"]]
        write_claim_spec(arguments["path"], record.claim, own, self.place.driver, view)

    # give back

    def unprepare(self, claim: ClaimRef) -> None:
        """Give back everything that was prepared for a claim; an unknown claim is not an error.

        Needs neither a driver nor the API server for a claim of an earlier boot.  Raises OcigpuError.
        """
        with self._records() as records:
            record = records.get(claim.uid)
            if record is None:
                return
            self._undo(records, record)
            self._log("info", f"claim {claim}: unprepared", claim=claim.uid)

    def _undo(self, records: Records, record: ClaimRecord) -> None:
        """Undo the steps of a claim, the last one first, and forget it."""
        while record.steps:
            step, effect = record.steps[-1], self._effect(record, record.steps[-1])
            others = [one for one in records.values() if one.claim.uid != record.claim.uid]
            if not effect.shared or all(step not in one.steps for one in others):
                effect.undo(record, step.arguments, self._view())
            record = record._replace(steps=record.steps[:-1], done=False)
            if record.steps and step.effect not in ("cdi", METADATA):
                self._write(records, record)
        self._write(records, record, forget=True)

    def undo_if_possible(self, records: Records, record: ClaimRecord) -> None:
        try:
            self._undo(records, record)
        except OcigpuError as error:
            self._log("error", f"claim {record.claim}: not undone yet: {error.line}")

    def _write(self, records: Records, record: ClaimRecord, forget: bool = False) -> None:
        records.pop(record.claim.uid, None)
        if not forget:
            records[record.claim.uid] = record
        self.store.write(records)
