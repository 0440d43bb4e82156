"""Which claims are prepared, in a file that survives everything but a reboot.

A claim is written down before anything is done for it, with every step before it is taken: whoever reads the file knows
what there may be to undo.  Several programs may be at work on it, one at a time (rolling updates): what counts is the
file, never what a program remembers.  After a reboot nothing is prepared: instances, bindings and containers are gone.
Unknown fields of a later version are left out, so that going back to an earlier version works.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.dra.claims import Allotted, ClaimHolder, ClaimRef
from ocigpu.kubernetes.dra.configs import DeviceConfig
from ocigpu.kubernetes.dra.devices import DraDevice
from ocigpu.system.files import lock, read_regular, replace_file
from ocigpu.system.store import seal, unseal

FILE, LOCK = "claims.json", "serialize.lock"
MAX_BYTES = 16 << 20
BOOT_ID = "/proc/sys/kernel/random/boot_id"
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

    @property
    def holder(self) -> ClaimHolder:
        return ClaimHolder(self.claim, self.devices)


Records = dict[str, ClaimRecord]


def state_error(path: str, cause: str) -> HostError:
    """Return the error of the driver's own files."""
    return HostError("OCIGPU-DRA-5", f"{path}: {cause}")


class ClaimStore:
    """The file of claims in the driver's directory.  Methods raise HostError (OCIGPU-DRA-5).

    ``boot``: id of this boot; "" reads it.
    """

    def __init__(self, directory: str, boot: str = "") -> None:
        self.directory = directory
        self._boot = boot

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock between programs; those who wait too long get an error, and the kubelet asks again."""
        path = f"{self.directory}/{LOCK}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise state_error(path, str(error.strerror)) from error
        try:
            if not lock(fd, LOCK_SECONDS):
                raise state_error(path, "another claim is being prepared, for a long time")
            yield
        finally:
            os.close(fd)

    def read(self) -> "tuple[Records, str]":
        """Return the claims by uid, and a note if those of the file do not count, "" if they do."""
        path = f"{self.directory}/{FILE}"
        try:
            content = read_regular(path, MAX_BYTES)
        except FileNotFoundError:
            return {}, ""
        except OSError as error:
            raise state_error(path, str(error.strerror)) from error
        try:
            data = json.loads(unseal(content))
            boot, records = str(data["boot"]), {uid: _record(uid, each) for uid, each in data["claims"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}, self._set_aside(path)
        if boot != self.boot():
            return {}, f"the machine was started since: {len(records)} claims of before are no longer prepared"
        return records, ""

    def _set_aside(self, path: str) -> str:
        try:
            os.rename(path, f"{path}.bad")
        except OSError as error:
            raise state_error(path, f"not understood, and not to be moved away: {error.strerror}") from error
        return f"{path} is not understood: moved to {path}.bad; claims are prepared again as the kubelet asks for them"

    def write(self, records: Records) -> None:
        """Write the claims down; the disk has them when this returns."""
        data = {"version": 1, "boot": self.boot(), "claims": {uid: _document(each) for uid, each in records.items()}}
        body = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
        try:
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                replace_file(FILE, seal(body), 0o600, fd, durable=True)
            finally:
                os.close(fd)
        except OSError as error:
            raise state_error(f"{self.directory}/{FILE}", str(error.strerror)) from error

    def boot(self) -> str:
        """Return the id of this boot (random(4))."""
        if not self._boot:
            try:
                self._boot = read_regular(BOOT_ID, 64).decode().strip()
            except OSError as error:
                raise state_error(BOOT_ID, str(error.strerror)) from error
        return self._boot


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
            str(kept.get("vendor", "nvidia")),
        )
        known = {name: value for name, value in each["config"].items() if name in DeviceConfig._fields}
        config = DeviceConfig(**known)
        devices.append(Allotted(str(each["request"]), device, config, bool(each["admin"]), str(each["share"])))
    steps = tuple(ClaimStep(str(name), dict(arguments)) for name, arguments in data["steps"])
    claim = ClaimRef(str(data["namespace"]), uid, str(data["name"]))
    return ClaimRecord(claim, tuple(devices), steps, bool(data["done"]))
