"""Firmware and health of GPUs from the board controller, which users of the GPUs cannot influence.

Baseboards from Hopper on have a controller of their own that reads the GPUs whatever owns them on PCIe.  A vendor's BMC
shows its tree in its own, below a prefix, or at another port; each is tried.  Its answers are not trusted: it may be
slow, broken, or another machine.  So certificates are checked (or pinned), redirections are not followed, sizes, counts
and the time for everything are limited, and each text is looked at before it is used.

Sources: DMTF Redfish DSP0266 (service root, collections, $expand) and DSP0268 (Processor, MemoryMetrics,
SoftwareInventory, ComponentIntegrity); NVIDIA's OpenBMC and its listings for the names of the members.

What hardware has yet to confirm: the names and paths below on each maker's BMC, and whether a version follows an
in-band flash before the next reset.
"""

import base64
import hashlib
import http.client
import json
import re
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from ocigpu.core.errors import HostError, OsErrorAs, quoted, reason_of
from ocigpu.gpus.firmware.baseline import BOARD, FirmwareFacts, check_text, read_with_doubts
from ocigpu.gpus.firmware.spdm import MEASUREMENT, parse_measurements, verify_measurements
from ocigpu.gpus.firmware.spdm import ROOT as ROOT_KEY
from ocigpu.system.tls import client_context

ROOT = "/redfish/v1"
BASEBOARD = "HGX_Baseboard_0"
PLACES = ((ROOT, 0), (f"/hmc{ROOT}", 0), (ROOT, 18888))
"""Where the baseboard's tree may be: in the BMC's own, below a prefix, at the port that DGX hands on; 0: as given."""
TIMEOUT, DEADLINE = 10.0, 60.0
MAX_ANSWER = 4 << 20
MAX_REQUESTS = 400
MAX_MEMBERS = 512
SLOTS = 16
_PATH = re.compile(r"/[A-Za-z0-9_./-]{1,250}")
_INVENTORY = re.compile(
    r"HGX_(?:FW_GPU_SXM|InfoROM_GPU_SXM|FW_ERoT_GPU_SXM|FW_NVSwitch|FW_ERoT_NVSwitch|FW_PCIeRetimer|FW_PCIeSwitch"
    r"|FW_ERoT_PCIeSwitch|FW_FPGA|FW_ERoT_FPGA|FW_BMC|FW_ERoT_BMC|FW_HMC|FW_ERoT_HMC)_[0-9]{1,2}"
)
POLL, MOST_POLL = 0.2, 2.0
"""Seconds between two looks at a measurement: the first, and the longest, so that requests last until the deadline."""
_ACTION = "#ComponentIntegrity.SPDMGetSignedMeasurements"
_GPU = {"HGX_FW_GPU_SXM": "VBIOS", "HGX_InfoROM_GPU_SXM": "InfoROM", "HGX_FW_ERoT_GPU_SXM": "ERoT"}
_NEEDED = ("VBIOS", "InfoROM")


class RedfishError(HostError):
    """OCIGPU-FW-1: the controller gives no answer; -2: an answer that cannot be; -3: no usable credentials."""


class Credentials(NamedTuple):
    """Of an account that may read; never shown."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Credentials({self.user!r}, ...)"


class NodeFirmware(NamedTuple):
    """What a board controller says: of its GPUs by slot, of the baseboard, and what it did not say, a sentence each."""

    components: tuple[FirmwareFacts, ...]
    notes: tuple[str, ...]

    @property
    def slots(self) -> dict[str, int]:
        """Return the number of each GPU's slot by its serial number, as ``ocigpu.gpus.vfio.identity`` takes it."""
        return {one.serial: one.slot for one in self.components if one.slot > 0 and one.serial}


def read_credentials(path: str) -> Credentials:
    """Return what a file "USER:PASSWORD" says.

    Raises RedfishError (OCIGPU-FW-3) for a file that others than its owner, root or we, may read or write, or a link
    that they could replace.  Files of a Kubernetes secret are links.
    """
    try:
        data, mode, why = read_with_doubts(path, 4096)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise RedfishError("OCIGPU-FW-3", f"read {path}: {getattr(error, 'strerror', None) or 'not a text'}") from error
    if why or mode & 0o077:
        why = why or f"mode {mode & 0o777:04o}: others may read it"
        raise RedfishError("OCIGPU-FW-3", f"{path}: {why}", f"chmod 600 {path}")
    user, colon, password = text.strip("\n").partition(":")
    if not (user and colon and password) or "\n" in text.strip("\n"):
        raise RedfishError("OCIGPU-FW-3", f"{path}: not one line USER:PASSWORD")
    return Credentials(user, password)


class _Connection(http.client.HTTPSConnection):
    """A connection whose socket is known from its first moment, so that it can be ended at any."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext, fingerprint: str) -> None:
        super().__init__(host, port, timeout=TIMEOUT, context=context)
        self._tls, self._fingerprint = context, fingerprint

    def connect(self) -> None:
        raw = socket.create_connection((self.host, self.port), self.timeout)
        self.sock = self._tls.wrap_socket(raw, server_hostname=self.host, do_handshake_on_connect=False)
        self.sock.do_handshake()
        found = hashlib.sha256(self.sock.getpeercert(binary_form=True) or b"").hexdigest()
        if self._fingerprint and found != self._fingerprint:
            self.close()
            raise ssl.SSLCertVerificationError(1, f"another certificate than the pinned one: its SHA-256 is {found}")


class Redfish:
    """A board controller over HTTPS; a context manager that ends by itself when its time is over."""

    def __init__(
        self,
        url: str,
        credentials: Credentials | None,
        *,
        ca_file: str = "",
        fingerprint: str = "",
        deadline: float = DEADLINE,
    ) -> None:
        """``ca_file``: authority of its certificate, "" for the system's; ``fingerprint``: SHA-256 of the certificate.

        ``deadline``: for everything, in seconds.  Raises RedfishError (OCIGPU-FW-1) for a URL that is none of https,
        and files that cannot be read.
        """
        parts = urlsplit(url)
        try:
            port = parts.port or 443
        except ValueError:
            port = 0
        if parts.scheme != "https" or not parts.hostname or not port or parts.username or parts.path not in ("", "/"):
            raise RedfishError(
                "OCIGPU-FW-1", f"board controller {quoted(url)}: not like https://HOST or https://HOST:PORT"
            )
        pin = fingerprint.replace(":", "").lower()
        if pin and not re.fullmatch("[0-9a-f]{64}", pin):
            raise RedfishError("OCIGPU-FW-1", f"fingerprint {quoted(fingerprint)}: not SHA-256 in hexadecimal digits")
        with OsErrorAs(RedfishError, "OCIGPU-FW-1", f"read {ca_file}"):
            self._context = client_context(ca_file)
        if pin:  # what is pinned needs no authority, and a BMC's certificate names it rarely
            self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        self.host, self._port, self._pin = parts.hostname, port, pin
        self._credentials, self._deadline = credentials, deadline
        self.netloc = parts.netloc
        self._connections: dict[int, _Connection] = {}
        self._requests = 0
        self._over = False
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._end, daemon=True)

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._closed.set()
        for connection in self._connections.values():
            connection.close()

    def _end(self) -> None:
        """Wake whoever waits for the controller when the time is over: each byte of it could come just in time."""
        pause = self._deadline
        while not self._closed.wait(pause):
            self._over, pause = True, 0.1
            for connection in list(self._connections.values()):
                if (sock := connection.sock) is not None:
                    with suppress(OSError):
                        socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def get(self, path: str, port: int = 0) -> dict[str, Any] | None:
        """Return the resource at a path, None when there is none (404, or nobody listens at another port).

        Raises RedfishError: OCIGPU-FW-1 when there is no answer in time, -2 for one that is no resource.
        """
        return self._ask("GET", path, port)

    def post(self, path: str, body: Mapping[str, Any], port: int = 0) -> dict[str, Any] | None:
        """Return what an action answers; as :meth:`get`."""
        return self._ask("POST", path, port, json.dumps(body).encode())

    def _ask(self, method: str, path: str, port: int, body: bytes | None = None) -> dict[str, Any] | None:
        where = f"{self.host}:{port or self._port}{path}"
        if not _PATH.fullmatch(path.partition("?")[0]) or ".." in path:
            raise _unlikely(where, f"{quoted(path, 60)} is not a path of a resource")
        self._requests += 1
        if self._requests > MAX_REQUESTS:
            raise _unlikely(where, f"more than {MAX_REQUESTS} requests")
        headers = {"Accept": "application/json", "OData-Version": "4.0"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._credentials:
            secret = base64.b64encode(":".join(self._credentials).encode()).decode()
            headers["Authorization"] = f"Basic {secret}"
        try:
            status, data = self._exchange(method, path, port or self._port, body, headers)
        except ConnectionRefusedError as error:
            if port:
                return None
            raise self._silent(where, error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._silent(where, error) from error
        if status == 404:
            return None
        if status in (401, 403):
            raise RedfishError("OCIGPU-FW-1", f"board controller {where}: HTTP {status}: credentials are refused")
        if status >= 300:
            raise RedfishError("OCIGPU-FW-1", f"board controller {where}: HTTP {status}")
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _unlikely(where, "not JSON") from error
        if not isinstance(document, dict):
            raise _unlikely(where, "not a resource")
        return document

    def _exchange(
        self, method: str, path: str, port: int, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        for attempt in (1, 2):
            known = port in self._connections
            connection = self._connections.setdefault(port, _Connection(self.host, port, self._context, self._pin))
            if self._over:
                raise TimeoutError
            try:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                data = response.read(MAX_ANSWER + 1)
            except (ConnectionError, http.client.BadStatusLine):
                connection.close()
                if known and attempt == 1 and not self._over:  # it was kept open too long for the other side
                    continue
                raise
            except BaseException:
                connection.close()
                raise
            if self._over:
                raise TimeoutError
            if len(data) > MAX_ANSWER:
                connection.close()
                raise http.client.HTTPException(f"an answer of more than {MAX_ANSWER >> 20} MiB")
            return response.status, data
        raise AssertionError

    def _silent(self, where: str, error: Exception) -> RedfishError:
        if self._over or isinstance(error, TimeoutError):
            seconds = self._deadline if self._over else TIMEOUT
            return RedfishError("OCIGPU-FW-1", f"board controller {where}: no answer within {seconds:g} s")
        what = "certificate: " if isinstance(error, ssl.SSLCertVerificationError) else ""
        return RedfishError("OCIGPU-FW-1", f"board controller {where}: {what}{reason_of(error)}")


def _unlikely(where: str, why: str) -> RedfishError:
    return RedfishError("OCIGPU-FW-2", f"board controller {where}: {why}")


class _Tree(NamedTuple):
    """The baseboard's tree: its root, its port (0 as given), and whether collections can be had with their members."""

    redfish: Redfish
    root: str
    port: int
    expands: bool

    def get(self, path: str) -> dict[str, Any]:
        return self.redfish.get(f"{self.root}/{path}", self.port) or {}

    def members(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield the wanted members of a collection."""
        query = "?$expand=.($levels=1)" if self.expands else ""
        collection = self.get(path + query)
        members = collection.get("Members", [])
        where = f"{self.root}/{path}"
        if not isinstance(members, list) or len(members) > MAX_MEMBERS:
            raise _unlikely(where, "not a collection of members")
        for member in members:
            link = member.get("@odata.id") if isinstance(member, dict) else None
            if not isinstance(link, str):
                raise _unlikely(where, "a member without a link")
            name = link.rstrip("/").rpartition("/")[2]
            if not _INVENTORY.fullmatch(name):
                continue
            found = member if "Version" in member else self.get(f"{path}/{name}")  # never another path than ours
            if found.get("Id", name) != name:
                raise _unlikely(f"{where}/{name}", f"it is {quoted(str(found['Id']), 60)}")
            yield {**found, "Id": name}


def read_firmware(redfish: Redfish, measurements: bool = False) -> NodeFirmware:
    """Return a board controller's facts about the GPUs and their baseboard.

    ``measurements``: also have each GPU's root of trust measure it, where that is offered; the account must be allowed
    to.  Raises RedfishError: OCIGPU-FW-1 it cannot be reached, or has no GPUs, -2 it says what cannot be.
    """
    with redfish:
        tree = _find_tree(redfish)
        try:
            return _read_tree(tree, measurements)
        except (ValueError, TypeError, AttributeError, KeyError) as error:  # texts and types that no controller has
            raise _unlikely(redfish.host, str(error)) from error


def _find_tree(redfish: Redfish) -> _Tree:
    for root, port in PLACES:
        try:
            service = redfish.get(f"{root}/", port)
        except RedfishError:
            if port:
                continue
            raise
        if service is None:
            continue
        if redfish.get(f"{root}/Systems/{BASEBOARD}", port) is not None:
            offered = service.get("ProtocolFeaturesSupported")
            expand = offered.get("ExpandQuery") if isinstance(offered, dict) else None
            return _Tree(redfish, root, port, isinstance(expand, dict) and expand.get("NoLinks") is True)
    raise RedfishError(
        "OCIGPU-FW-1", f"board controller {redfish.netloc}: it has no {BASEBOARD}",
        "PCIe cards and some makers' controllers do not report GPUs: check in a virtual machine with the driver.",
    )  # fmt: skip


def _read_tree(tree: _Tree, measurements: bool) -> NodeFirmware:
    where = tree.redfish.netloc
    gpus: dict[int, dict[str, str]] = {}
    board: dict[str, str] = {}
    for member in tree.members("UpdateService/FirmwareInventory"):
        kind, _, number = member["Id"].rpartition("_")
        version = member.get("Version")
        if version in (None, ""):
            continue
        check_text(version)
        if kind in _GPU:
            gpus.setdefault(int(number), {})[_GPU[kind]] = version
            if "WriteProtected" in member:
                gpus[int(number)].setdefault("write-protected", "yes" if member["WriteProtected"] is True else "no")
        else:
            board[f"{kind.removeprefix('HGX_FW_')}_{number}"] = version
    if not gpus:
        raise _unlikely(where, "it reports no firmware of a GPU")
    if bad := [slot for slot in gpus if not 1 <= slot <= SLOTS]:
        raise _unlikely(where, f"GPU_SXM_{bad[0]}: no such slot")
    facts = [_read_gpu(tree, slot, versions) for slot, versions in sorted(gpus.items())]
    serials = [one.serial for one in facts if one.serial]
    if twins := {one for one in serials if serials.count(one) > 1}:
        raise _unlikely(where, f"two GPUs have the serial number {twins.pop()}")
    if measurements:
        facts = list(_add_measurements(tree, facts))
    notes = [f"{one.name} reports no {what}" for one in facts for what in _NEEDED if what not in one.versions]
    notes += [f"{one.name} reports no serial number" for one in facts if not one.serial]
    unmeasured = [one.name for one in facts if not any(fact.startswith(MEASUREMENT) for fact in one.versions)]
    notes += [f"{name} offers no measurements" for name in unmeasured if measurements]
    return NodeFirmware((*facts, FirmwareFacts(BOARD, 0, BOARD, versions=board)), tuple(notes))


def _add_measurements(tree: _Tree, facts: list[FirmwareFacts]) -> Iterator[FirmwareFacts]:
    """Yield GPUs with what their roots of trust measure; raises ValueError where two are one."""
    known: dict[str, str] = {}
    for one in facts:
        found, key = _measure(tree, one.name)
        if key and known.setdefault(key, one.name) != one.name:
            raise ValueError(f"{one.name} and {known[key]} are measured by one component")
        yield replace(one, versions={**one.versions, **found})


def _read_gpu(tree: _Tree, slot: int, versions: dict[str, str]) -> FirmwareFacts:
    name = f"GPU_SXM_{slot}"
    processor = tree.get(f"Systems/{BASEBOARD}/Processors/{name}")
    chassis = tree.get(f"Chassis/HGX_{name}")
    for resource, wanted in ((processor, name), (chassis, f"HGX_{name}")):
        if resource.get("Id", wanted) != wanted:
            raise ValueError(f"{wanted} is {quoted(str(resource['Id']), 60)}")
    texts = {
        "model": processor.get("Model") or "unknown",
        "part_number": processor.get("PartNumber") or chassis.get("PartNumber") or "",
        "serial": processor.get("SerialNumber") or chassis.get("SerialNumber") or "",
        "uuid": processor.get("UUID") or "",
    }
    serial = chassis.get("SerialNumber")
    if serial and processor.get("SerialNumber") and serial != processor["SerialNumber"]:
        raise ValueError(
            f"{name} has two serial numbers: {quoted(str(texts['serial']), 60)}, {quoted(str(serial), 60)}"
        )
    checked = {key: check_text(text, empty=True) for key, text in texts.items()}
    return FirmwareFacts(name, slot, versions=versions, health=_read_health(tree, name, processor), **checked)


def _read_health(tree: _Tree, name: str, processor: dict[str, Any]) -> dict[str, str | int | bool]:
    """Return what the controller counts and says of a GPU and its memory, as far as it does."""
    found: dict[str, str | int | bool] = {}
    status = _part(processor, "Status").get("Health")
    if isinstance(status, str):
        found["status"] = check_text(status)
    memory = tree.get(f"Systems/{BASEBOARD}/Memory/{name}_DRAM_0")
    metrics = tree.get(f"Systems/{BASEBOARD}/Memory/{name}_DRAM_0/MemoryMetrics") if memory else {}
    errors = _part(metrics, "LifeTime").get("UncorrectableECCErrorCount")
    rows = _part(metrics, "Oem", "Nvidia", "RowRemapping").get("UncorrectableRowRemappingCount")
    for key, count in (("uncorrectable-ecc-errors", errors), ("remapped-rows-uncorrectable", rows)):
        if count is not None:
            if type(count) is not int or count < 0:
                raise ValueError(f"{name}: {key} is {quoted(str(count), 60)}")
            found[key] = count
    vendor = _part(memory, "Oem", "Nvidia")
    for key, flag in (("row-remapping-failed", "RowRemappingFailed"), ("row-remapping-pending", "RowRemappingPending")):
        if flag in vendor:
            found[key] = vendor[flag] is not False
    return found


def _measure(tree: _Tree, name: str) -> tuple[dict[str, str], str]:
    """Return what a GPU's root of trust measures now, by index, and its key; nothing where it does not offer that.

    The nonce shows that the answer is not an old one, the signature that the component gave it.  Raises ValueError.
    """
    for component in (f"HGX_ERoT_{name}", f"HGX_IRoT_{name}"):
        path = f"ComponentIntegrity/{component}"
        if _ACTION in _part(tree.get(path), "Actions"):
            break
    else:
        return {}, ""
    nonce = secrets.token_bytes(32)
    action = f"{path}/Actions/{_ACTION.removeprefix('#')}"
    body = {"SlotId": 0, "MeasurementIndices": [255], "Nonce": nonce.hex()}
    task = tree.redfish.post(f"{tree.root}/{action}", body, tree.port) or {}
    number = check_text(str(task.get("@odata.id", "")).rpartition("/")[2])
    pause = POLL
    while (state := tree.get(f"TaskService/Tasks/{number}").get("TaskState")) in ("New", "Running", "Starting"):
        time.sleep(pause)
        pause = min(2 * pause, MOST_POLL)
    if state != "Completed":
        raise ValueError(f"{name}: its measurement ended as {quoted(str(state), 60)}")
    data = base64.b64decode(str(tree.get(f"{action}/data").get("SignedMeasurements", "")), validate=True)
    found = parse_measurements(data, nonce)
    chain = str(tree.get(f"Chassis/{component}/Certificates/CertChain").get("CertificateString", ""))
    key, root = verify_measurements(data, chain)
    return {**found, ROOT_KEY: root}, key


def _part(resource: Any, *names: str) -> dict[str, Any]:
    for name in names:
        resource = resource.get(name) if isinstance(resource, dict) else None
    return resource if isinstance(resource, dict) else {}
