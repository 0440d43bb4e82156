"""Fabric Manager, queried through its own library in a process with a deadline: nothing else speaks its protocol.

Every operation is a connection of its own, as none survives a restart of the manager.
"""

import ipaddress
import json
import os
import re
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ocigpu.core.errors import printable, quoted
from ocigpu.gpus.nvidia.fabric.libnvfm_child import CHANGED
from ocigpu.gpus.nvidia.fabric.partitions import (
    FabricError,
    Partition,
    RestorableFabric,
    check_list,
    conflicts_of,
    find_partition,
    must_find,
    name_partitions,
    show_gpus,
    show_ids,
)
from ocigpu.system.module_process import command
from ocigpu.system.programs import run_program

CHILD = "ocigpu.gpus.nvidia.fabric.libnvfm_child"
DEFAULT_ADDRESS = "tcp:127.0.0.1:6666"
DEFAULT_PORT = 6666
LIBRARIES = ("libnvfm.so.1", "libnvfm.so")
"""The second name is that of development packages."""
LIST_SECONDS = 10.0
CHANGE_SECONDS = 60.0
"""Activating trains the links and is answered when that is done."""
ANSWER_LIMIT = 1 << 20

_INET, _UNIX, _VSOCK = 1, 2, 3
_IN_USE, _NOT_ACTIVE = -7, -4
MEANINGS = {
    -1: ("OCIGPU-FAB-6", "bad parameter"),
    -2: ("OCIGPU-FAB-6", "general error: the manager's log has more"),
    -3: ("OCIGPU-FAB-3", "not supported in the manager's mode"),
    -4: ("OCIGPU-FAB-1", "not the socket of its commands"),
    -5: ("OCIGPU-FAB-6", "a GPU or switch did not take a setting in time: the manager's syslog has more"),
    -6: ("OCIGPU-FAB-8", "library and manager are of versions that do not fit"),
    -7: ("OCIGPU-FAB-5", "in use"),
    -8: ("OCIGPU-FAB-7", "the manager is starting, or waits for the partitions that were active"),
    -9: ("OCIGPU-FAB-2", "the manager cannot be reached"),
    -10: ("OCIGPU-FAB-6", "NVLinks could not be trained"),
    CHANGED: ("OCIGPU-FAB-6", "the manager's number is that of another set now"),
}
"""By return code of the library: our code, and words.  Others print their number."""


@dataclass(frozen=True)
class FabricAddress:
    """Where a manager listens: ``kind`` is fmConnectAddressType's number, ``info`` what the library takes."""

    kind: int
    info: str
    text: str


def parse_address(text: str) -> FabricAddress:
    """Return what the library takes for tcp:IPV4[:PORT], unix:PATH or vsock:CID:PORT.

    Without a word before it, a path is a socket's and everything else TCP's.  Raises FabricError (OCIGPU-FAB-1).
    """
    kind, colon, rest = text.partition(":")
    if kind not in ("tcp", "unix", "vsock") or not colon:
        kind, rest = ("unix" if text.startswith("/") else "tcp"), text
    if kind == "unix" and rest.startswith("/") and rest.isprintable() and len(os.fsencode(rest)) < 108:  # unix(7)
        return FabricAddress(_UNIX, rest, f"unix:{rest}")
    if kind == "vsock" and re.fullmatch(r"[0-9]{1,10}:[0-9]{1,10}", rest):
        return FabricAddress(_VSOCK, rest, f"vsock:{rest}")
    if kind == "tcp":
        host, _, port = rest.partition(":")
        number = int(port) if re.fullmatch(r"[0-9]{1,5}", port) else 0 if port else DEFAULT_PORT
        try:
            info = f"{ipaddress.IPv4Address(host)}:{number}"
        except ValueError:
            number = 0
        if 0 < number < 65536:
            return FabricAddress(_INET, info, f"tcp:{info}")
    hint = (
        "It is tcp:IPV4[:PORT], unix:PATH, vsock:CID:PORT, or grpc: and the address of ocigpu fabric serve; NVIDIA's "
        "library takes no names and no IPv6."
    )
    raise FabricError("OCIGPU-FAB-1", f"address {quoted(text)}: not understood", hint)


class LibnvfmFabric(RestorableFabric):
    """The manager at an address.  ``libraries``: names or paths, the first that loads is taken; see open_fabric."""

    def __init__(
        self,
        address: FabricAddress,
        libraries: Sequence[str] = LIBRARIES,
        simulation: str = "",
        list_seconds: float = LIST_SECONDS,
        change_seconds: float = CHANGE_SECONDS,
    ) -> None:
        self.address = address
        self._libraries = list(libraries)
        self._simulation = simulation
        self._list_seconds = list_seconds
        self._change_seconds = change_seconds
        self._lock = threading.Lock()  # whether the manager takes requests at once is not documented

    def list_partitions(self) -> tuple[Partition, ...]:
        """Return what the board can connect; raises FabricError."""
        (answer,) = self._ask("list partitions", self._list_seconds, ["list"])
        return self._read("list partitions", answer)

    def activate(self, physical_ids: Collection[int]) -> Partition:
        """Activate the partition of exactly these GPUs; raises FabricError (OCIGPU-FAB-5 names the conflicts)."""
        what = f"activate {show_gpus(physical_ids)}"
        before = self.list_partitions()
        wanted = must_find(before, physical_ids)
        if wanted.is_active:
            return wanted
        code, after = self._change(what, "activate", wanted)
        found = find_partition(after, physical_ids)
        conflicts = conflicts_of(after, wanted)
        if code == _IN_USE and conflicts:
            raise FabricError("OCIGPU-FAB-5", f"{what}: in use: {name_partitions(conflicts)}", status=code)
        if code and not (code == _IN_USE and found and found.is_active):
            raise self._error(what, code)
        return _proven(what, found, active=True)

    def deactivate(self, physical_ids: Collection[int]) -> None:
        """Deactivate the partition of exactly these GPUs; raises FabricError."""
        what = f"deactivate {show_gpus(physical_ids)}"
        wanted = must_find(self.list_partitions(), physical_ids)
        if not wanted.is_active:
            return
        code, after = self._change(what, "deactivate", wanted)
        if code not in (0, _NOT_ACTIVE):
            raise self._error(what, code)
        _proven(what, find_partition(after, physical_ids), active=False)

    def restore(self, active: Collection[Collection[int]], known: Collection[Partition]) -> tuple[Partition, ...]:
        """Tell a manager that waits after a restart which sets were active; raises FabricError."""
        what = f"restore {'; '.join(sorted(map(show_ids, active))) or 'nothing'}"
        numbers = [must_find(tuple(known), ids).partition_id for ids in active]
        (code, _), listed = self._ask(what, self._change_seconds, ["set", numbers], ["list"])
        if code:
            raise self._error(what, code)
        return self._read(what, listed)

    def _change(self, what: str, verb: str, wanted: Partition) -> tuple[int, tuple[Partition, ...]]:
        step = [verb, wanted.partition_id, list(wanted.physical_ids)]
        (code, _), listed = self._ask(what, self._change_seconds, step, ["list"])
        return code, self._read(what, listed) if code in (0, _IN_USE, _NOT_ACTIVE) else ()

    def _ask(self, what: str, seconds: float, *steps: list[Any]) -> list[Any]:
        """Return the answers [code, value] of steps over one connection; raises FabricError where there is none."""
        order = {
            "libraries": self._libraries,
            "simulation": self._simulation,
            "type": self.address.kind,
            "address": self.address.info,
            "timeout_ms": int(seconds * 1000),
            "steps": steps,
        }
        words = command(CHILD, str(os.getpid()), json.dumps(order))
        try:
            with self._lock:  # the process's deadline is behind that of the library
                done = run_program(words, seconds * (len(steps) + 1) + 2, env={}, cwd="/", limit=ANSWER_LIMIT)
        except TimeoutError as error:
            raise FabricError("OCIGPU-FAB-2", f"{what}: {self.address.text}: {error}") from error
        except OSError as error:
            raise FabricError("OCIGPU-FAB-1", f"{what}: start a process: {error.strerror}", "") from error
        try:
            answer = json.loads(done.output)
        except ValueError as error:
            cause = f"the library ended its process by signal {-done.status}" if done.status < 0 else done.last_line
            raise FabricError("OCIGPU-FAB-8", f"{what}: libnvfm: {printable(cause, 300)}") from error
        if "load" in answer:
            raise FabricError("OCIGPU-FAB-1", f"{what}: load libnvfm: {printable(answer['load'], 300)}")
        if answer["connect"]:
            raise self._error(what, answer["connect"])
        return list(answer["steps"])

    def _read(self, what: str, answer: list[Any]) -> tuple[Partition, ...]:
        code, listed = answer
        if code:
            raise self._error(what, code)
        try:
            bad = [one["bad"] for one in listed if "bad" in one]
            if bad:
                raise FabricError("OCIGPU-FAB-8", bad[0])
            found = tuple(
                Partition(one["id"], one["active"], tuple(one["gpus"]), tuple(map(tuple, one["links"])))
                for one in listed
            )
            check_list(found)
        except FabricError as error:
            raise FabricError(error.code, f"{what}: {error.message}: not a list of this library's layout") from error
        return found

    def _error(self, what: str, status: int) -> FabricError:
        code, words = MEANINGS.get(status, ("OCIGPU-FAB-6", "refused"))
        shown = f"{words} (libnvfm {status})" if status < 0 else words
        return FabricError(code, f"{what}: {self.address.text}: {shown}", status=status)


def _proven(what: str, found: Partition | None, active: bool) -> Partition:
    """Return the partition if the list after a change shows it; raises FabricError (OCIGPU-FAB-6) otherwise."""
    if found is None or found.is_active != active:
        raise FabricError("OCIGPU-FAB-6", f"{what}: the manager reports success, but its list shows no change")
    return found


def open_fabric(address: str, library: str = "", simulation: str = "") -> LibnvfmFabric:
    """Return the manager at an address of :func:`parse_address`; does not connect yet.  Raises FabricError.

    ``library``: path of libnvfm, "" for that of the loader's search; ``simulation``: root of a simulated host.
    """
    if library:
        return LibnvfmFabric(parse_address(address), [library], simulation)
    names = [f"{simulation}/usr/lib/{os.uname().machine}-linux-gnu/{LIBRARIES[0]}"] if simulation else LIBRARIES
    return LibnvfmFabric(parse_address(address), names, simulation)
