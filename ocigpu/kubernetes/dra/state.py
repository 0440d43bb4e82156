"""Which claims are prepared, in a file that survives everything but a reboot.

A claim and every step are written down before the step is taken, so the file lists all that may need undoing.  Several
programs may use it, one at a time (rolling updates): the file counts, never a program's memory.  After a reboot nothing
is prepared: instances, bindings and containers are gone.  Unknown fields of a later version are ignored, so a downgrade
works.
"""

import glob
import json
import os
import re
import stat
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from ocigpu.core.errors import UNUSABLE, HostError
from ocigpu.core.vendors import FIRST
from ocigpu.kubernetes.dra.claims import Allotted, ClaimRef
from ocigpu.kubernetes.dra.configs import DeviceConfig
from ocigpu.kubernetes.dra.devices import DraDevice
from ocigpu.system.files import lock_file, read_regular, replace_path, why_untrusted
from ocigpu.system.locks import holding
from ocigpu.system.proc import read_boot_id
from ocigpu.system.store import seal, unseal

FILE, LOCK = "claims.json", "serialize.lock"
MAX_BYTES = 16 << 20
LOCK_SECONDS = 30.0
"""The kubelet gives a call 45 s."""


class ClaimStep(NamedTuple):
    """One thing that was done for a claim, or was about to be: its name in the table of effects, and its arguments."""

    effect: str
    arguments: "dict[str, str]"


class ClaimRecord(NamedTuple):
    """A claim: ``done`` once everything is prepared."""

    claim: ClaimRef
    devices: tuple[Allotted, ...] = ()
    steps: tuple[ClaimStep, ...] = ()
    done: bool = False


Records = dict[str, ClaimRecord]


def parse_claims(content: bytes) -> tuple[str, Records]:
    """Return the boot id and the claims of a file; raises what :data:`UNUSABLE` names for another file."""
    data = json.loads(unseal(content))
    return str(data["boot"]), {uid: _record(uid, each) for uid, each in data["claims"].items()}


_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")


def parse_checkpoint(content: bytes) -> tuple[str, Records]:
    """Return the boot id and the claims of a checkpoint of NVIDIA's driver; raises as :func:`parse_claims`.

    A claim holds every GPU and MIG device whose UUID it stores; a MIG device includes its GPU.  Source: checkpointv.go
    and prepared.go of github.com/kubernetes-sigs/dra-driver-nvidia-gpu; versions before 0.4 have "v1" only, without
    names and boot.
    """
    document = json.loads(content)
    data = document.get("v2") or document.get("v1") or {}
    records = {}
    for uid, each in (data.get("preparedClaims") or {}).items():
        uuids = dict.fromkeys(_UUID.findall(json.dumps(each.get("preparedDevices"))))
        devices = tuple(Allotted("", DraDevice(uuid, "", "", uuid, {}, {})) for uuid in uuids)
        claim = ClaimRef(str(each.get("namespace") or ""), uid, str(each.get("name") or uid))
        records[uid] = ClaimRecord(claim, devices, done=True)
    return str(data.get("nodeBootID") or read_boot_id()), records


def state_error(path: str, cause: str) -> HostError:
    """Return the error of the driver's own files."""
    return HostError("OCIGPU-DRA-5", f"{path}: {cause}")


class ClaimStore:
    """The file of claims in the driver's directory.  Methods raise HostError (OCIGPU-DRA-5).

    ``boot``: id of this boot; "" reads it.
    """

    file, lock = FILE, LOCK
    parse = staticmethod(parse_claims)

    def __init__(self, directory: str, boot: str = "") -> None:
        self.directory = directory
        self._boot = boot

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock between programs; a caller that waits too long gets an error, and the kubelet retries."""
        path = f"{self.directory}/{self.lock}"
        try:
            fd = lock_file(path)
        except OSError as error:
            raise state_error(path, str(error.strerror)) from error
        return holding(
            fd, state_error(path, "another claim is being prepared, or MIG devices are being cut"), LOCK_SECONDS
        )

    def read(self, aside: bool = False) -> "tuple[Records, str]":
        """Return the claims by uid, and a note if the file's claims are void, "" if they are valid.

        ``aside``: move an unreadable file away; only for the lock holder, who must report the note.
        """
        try:
            boot, records = self._load()
        except UNUSABLE:
            return {}, self._set_aside(self.path) if aside else f"{self.path} is not understood"
        if boot != self.boot():
            return {}, f"the machine was restarted: {len(records)} earlier claims are no longer prepared"
        return records, ""

    def prepared(self) -> tuple[ClaimRecord, ...]:
        """Return the claims prepared since boot, for programs other than the driver.

        Raises HostError (OCIGPU-DRA-5) also for an unreadable file, which may hold any claim.
        """
        try:
            boot, records = self._load()
        except UNUSABLE as error:
            raise state_error(self.path, "it is not understood") from error
        return tuple(records.values()) if boot == self.boot() else ()

    @property
    def path(self) -> str:
        return f"{self.directory}/{self.file}"

    def _load(self) -> tuple[str, Records]:
        try:
            return self.parse(read_regular(self.path, MAX_BYTES))
        except FileNotFoundError:
            return self.boot(), {}
        except OSError as error:
            raise state_error(self.path, str(error.strerror)) from error

    def _set_aside(self, path: str) -> str:
        try:
            os.rename(path, f"{path}.bad")
        except OSError as error:
            raise state_error(path, f"not understood, and not to be moved away: {error.strerror}") from error
        return f"{path} cannot be parsed: moved to {path}.bad; claims are prepared again when the kubelet requests them"

    def write(self, records: Records) -> None:
        """Write the claims down; the disk has them when this returns."""
        data = {"version": 1, "boot": self.boot(), "claims": {uid: _document(each) for uid, each in records.items()}}
        body = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
        try:
            replace_path(f"{self.directory}/{FILE}", seal(body), 0o600)
        except OSError as error:
            raise state_error(self.path, str(error.strerror)) from error

    def boot(self) -> str:
        """Return the id of this boot (random(4))."""
        self._boot = self._boot or read_boot_id()
        return self._boot


class CheckpointStore(ClaimStore):
    """The claims of NVIDIA's driver, which locks its file "pu.lock" for a claim (flock(2)); to be read only."""

    file, lock = "checkpoint.json", "pu.lock"
    parse = staticmethod(parse_checkpoint)


def find_stores(plugins: str) -> tuple[ClaimStore, ...]:
    """Return the claims of the drivers that have been on a node; ``plugins``: the kubelet's directory of plugins.

    A directory counts only if no user but root and this process's user can have written into it.
    """
    found = []
    kinds = (ClaimStore, CheckpointStore)
    for kind, path in [(each, path) for each in kinds for path in glob.glob(f"{glob.escape(plugins)}/*/{each.lock}")]:
        directory = os.path.dirname(path)
        try:
            status = os.lstat(directory)
        except OSError:  # it is gone
            continue
        if stat.S_ISDIR(status.st_mode) and not why_untrusted(status.st_uid, status.st_mode):
            found.append(kind(directory))
    return tuple(found)


def _document(record: ClaimRecord) -> dict[str, Any]:
    claim, devices = record.claim, []
    for each in record.devices:
        device = each.device
        kept = {name: getattr(device, name) for name in ("name", "kind", "board", "id", "memory", "profile", "vendor")}
        config = {name: value for name, value in each.config._asdict().items() if value}
        devices.append({**each._asdict(), "device": kept, "config": config})
    steps = [[step.effect, step.arguments] for step in record.steps]
    return {"namespace": claim.namespace, "name": claim.name, "devices": devices, "steps": steps, "done": record.done}


def _record(uid: str, data: Any) -> ClaimRecord:
    devices = []
    for each in data["devices"]:
        kept = each["device"]
        device = DraDevice(
            str(kept["name"]),
            str(kept["kind"]),
            str(kept["board"]),
            str(kept["id"]),
            {},
            {},
            tuple(map(int, kept.get("memory") or ())),
            tuple(kept["profile"]) if kept.get("profile") else None,
            str(kept.get("vendor", FIRST)),
        )
        known = {name: value for name, value in each["config"].items() if name in DeviceConfig._fields}
        config = DeviceConfig(**known)
        devices.append(Allotted(str(each["request"]), device, config, bool(each["admin"]), str(each["share"])))
    steps = tuple(ClaimStep(str(name), dict(arguments)) for name, arguments in data["steps"])
    claim = ClaimRef(str(data["namespace"]), uid, str(data["name"]))
    return ClaimRecord(claim, tuple(devices), steps, bool(data["done"]))
