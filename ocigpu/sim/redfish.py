"""The board controller of a simulated host without a driver: a Redfish service over HTTPS.

DIR/redfish.json has every resource by its path, as an HGX baseboard's controller shows it below a maker's BMC; what is
changed there is served at once.  ``ocigpu sim bmc DIR`` serves it.
"""

import base64
import hashlib
import json
import os
import signal
import ssl
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from ocigpu.core.errors import OcigpuError, OsErrorAs
from ocigpu.sim.models import SimGpu, sim_error
from ocigpu.system.programs import run_program

FILE = "redfish.json"
ROOT = "/redfish/v1"
USER, PASSWORD = "reader", "simulated"
SYSTEM = f"{ROOT}/Systems/HGX_Baseboard_0"
INVENTORY = f"{ROOT}/UpdateService/FirmwareInventory"
ACTION = "#ComponentIntegrity.SPDMGetSignedMeasurements"
CHAIN = "/Certificates/CertChain"
BOARD = {
    **{f"HGX_FW_NVSwitch_{number}": "96.10.6D.00.01" for number in range(4)},
    **{f"HGX_FW_ERoT_NVSwitch_{number}": "01.04.0031.0000_n04" for number in range(4)},
    **{f"HGX_FW_PCIeRetimer_{number}": "2.7.9" for number in range(8)},
    "HGX_FW_PCIeSwitch_0": "1.7.5F",
    "HGX_FW_FPGA_0": "2.53",
    "HGX_FW_ERoT_FPGA_0": "01.04.0031.0000_n04",
    "HGX_FW_HMC_0": "HGX-22.10-1-rc80",
}
"""Versions of the baseboard's parts, in their makers' forms."""
VBIOS, INFOROM, EROT = "96.00.BC.00.01", "G520.0200.00.05", "01.04.0031.0000_n04"


def make_documents(gpus: Sequence[SimGpu], modules: Mapping[int, int], serials: Mapping[int, str]) -> dict[str, Any]:
    """Return every resource by its path; ``modules`` and ``serials``: of GPUs, by their index."""
    root = {"@odata.id": f"{ROOT}/", "RedfishVersion": "1.17.0", "Name": "SIMULATED: no real hardware"}
    documents: dict[str, Any] = {f"{ROOT}/": {**root, "ProtocolFeaturesSupported": {"ExpandQuery": {"NoLinks": True}}}}
    documents[SYSTEM] = {"@odata.id": SYSTEM, "Id": "HGX_Baseboard_0", "SystemType": "Physical"}
    versions = dict(BOARD) if gpus[0].model.fabric else {}
    versions["BMC"] = "01.02.03"  # the maker's own
    for gpu in gpus:
        name = f"GPU_SXM_{modules[gpu.index]}"
        versions |= {f"HGX_FW_{name}": VBIOS, f"HGX_InfoROM_{name}": INFOROM, f"HGX_FW_ERoT_{name}": EROT}
        model = gpu.model.name.removeprefix("NVIDIA ")
        board = {"SerialNumber": serials[gpu.index], "PartNumber": f"699-{gpu.model.subsystem_id:05d}-0200-000"}
        health = {"Status": {"State": "Enabled", "Health": "OK"}}
        memory = f"{SYSTEM}/Memory/{name}_DRAM_0"
        documents |= _by_path(
            {"@odata.id": f"{SYSTEM}/Processors/{name}", "Model": model, "UUID": gpu.uuid[4:], **board, **health},
            {"@odata.id": f"{ROOT}/Chassis/HGX_{name}", **board},
            {"@odata.id": memory, "Oem": {"Nvidia": {"RowRemappingFailed": False, "RowRemappingPending": False}}},
            {
                "@odata.id": f"{memory}/MemoryMetrics",
                "LifeTime": {"CorrectableECCErrorCount": 0, "UncorrectableECCErrorCount": 0},
                "Oem": {"Nvidia": {"RowRemapping": {"UncorrectableRowRemappingCount": 0}}},
            },
        )
        path = f"{ROOT}/ComponentIntegrity/HGX_ERoT_{name}"
        blocks = {str(index): hashlib.sha384(f"{index}".encode()).hexdigest() for index in range(1, 4)}
        offer = {ACTION: {"target": f"{path}/Actions/{ACTION[1:]}"}}
        documents |= _by_path({"@odata.id": path, "Actions": offer, "measurements": blocks})
    for name, version in sorted(versions.items()):
        documents |= _by_path({"@odata.id": f"{INVENTORY}/{name}", "Version": version})
    return documents


def _by_path(*resources: dict[str, Any]) -> dict[str, Any]:
    return {one["@odata.id"]: {"Id": one["@odata.id"].rpartition("/")[2], **one} for one in resources}


class RedfishHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "_Server"

    def do_GET(self) -> None:
        self.server.service.asked.append(self.path)
        path, _, query = self.path.partition("?")
        secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if path.rstrip("/") != ROOT and self.headers.get("Authorization") != f"Basic {secret}":
            self.answer(401, {"error": {"code": "Base.1.0.NoValidSession"}})
            return
        documents = self.server.service.documents()
        found = documents.get(path) or self.server.service.made.get(path)
        if states := self.server.service.tasks.get(path):
            found = {"@odata.id": path, "TaskState": states.pop() if len(states) > 1 else states[0]}
        if found is None and path.endswith(CHAIN) and path.startswith(f"{ROOT}/Chassis/"):
            text = make_chain(f"{ROOT}/ComponentIntegrity/{path.removesuffix(CHAIN).rpartition('/')[2]}")
            found = {"@odata.id": path, "Id": "CertChain", "CertificateType": "PEMchain", "CertificateString": text}
        if found is None and path == INVENTORY:
            names = [one for one in documents if one.startswith(f"{INVENTORY}/")]
            members = [documents[one] if "$expand" in query else {"@odata.id": one} for one in names]
            found = {"@odata.id": path, "Members": members, "Members@odata.count": len(members)}
        self.answer(200 if found is not None else 404, found if found is not None else {"error": {}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
        path, _, action = self.path.partition("/Actions/")
        component = self.server.service.documents().get(path)
        if action != ACTION[1:] or component is None:
            self.answer(404, {"error": {}})
            return
        number = len(self.server.service.tasks) + 1
        self.server.service.tasks[f"{ROOT}/TaskService/Tasks/{number}"] = ["Completed", "Running"]
        statement = sign(component["measurements"], bytes.fromhex(body["Nonce"]), path)
        data = {"SignedMeasurements": base64.b64encode(statement).decode(), "Version": "1.1.0"}
        self.server.service.made[f"{self.path}/data"] = data
        self.answer(202, {"@odata.id": f"{ROOT}/TaskService/Tasks/{number}", "TaskState": "Starting"})

    def answer(self, status: int, document: Any) -> None:
        """Send a resource."""
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    service: "RedfishService"

    def handle_error(self, *_arguments: object) -> None:
        """Ignore a client that left or refused the certificate."""


class RedfishService:
    """The service of a simulated host, while the context lasts; ``handler`` answers in another way, for tests."""

    def __init__(self, directory: str, tls: str, handler: type[RedfishHandler] = RedfishHandler, port: int = 0) -> None:
        """``tls``: directory with cert.pem and key.pem, made here when they are not there."""
        self.directory, self.asked = directory, list[str]()
        self.tasks, self.made = dict[str, list[str]](), dict[str, Any]()
        self.certificate = f"{tls}/cert.pem"
        if not os.path.exists(self.certificate):
            make_certificate(tls)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, f"{tls}/key.pem")
        self._server = _Server(("127.0.0.1", port), handler)
        self._server.service = self
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )  # by the connection's own thread
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        """Where it is."""
        return f"https://127.0.0.1:{self._server.server_address[1]}"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its certificate."""
        text = Path(self.certificate).read_text(encoding="ascii")
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest()

    def documents(self) -> dict[str, Any]:
        """Return every resource by its path, as the file has them now."""
        found: dict[str, Any] = json.loads(Path(self.directory, FILE).read_text(encoding="utf-8"))
        return found

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def sign(measurements: Mapping[str, str], nonce: bytes, component: str = "") -> bytes:
    """Return measurements as SPDM 1.1 has them, with the request before them, signed by a component."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

    record = b""
    for index, text in measurements.items():
        value = bytes.fromhex(text)
        block = b"\x01" + len(value).to_bytes(2, "little") + value
        record += bytes((int(index), 1)) + len(block).to_bytes(2, "little") + block
    answer = b"\x11\x60\0\0" + bytes((len(measurements),)) + len(record).to_bytes(3, "little") + record
    data = b"\x11\xe0\x01\xff" + nonce + b"\0" + answer + bytes(32) + bytes(2)
    numbers = decode_dss_signature(_key_of(component).sign(data, ec.ECDSA(hashes.SHA384())))
    return data + b"".join(number.to_bytes(48) for number in numbers)


def _key_of(name: str) -> Any:
    """Return the key of a component, or of their issuer: the same each time, and not secret."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.derive_private_key(int.from_bytes(hashlib.sha256(f"SIMULATED {name}".encode()).digest()), ec.SECP384R1())


def make_chain(component: str, authority: str = "authority") -> str:
    """Return the certificates of a component and of its issuer, in PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import NameOID

    def certify(name: str, ca: bool) -> str:
        subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one[-60:])]) for one in (name, authority))
        made = x509.CertificateBuilder(issuer, subject, _key_of(name).public_key(), x509.random_serial_number())
        begin, end = datetime(2024, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
        made = made.not_valid_before(begin).not_valid_after(end)
        made = made.add_extension(x509.BasicConstraints(ca, None), critical=True)
        return made.sign(_key_of(authority), hashes.SHA384()).public_bytes(Encoding.PEM).decode()

    return certify(component, ca=False) + certify(authority, ca=True)


def make_certificate(directory: str) -> None:
    """Make a certificate for 127.0.0.1 and its key by openssl(1); raises OcigpuError (OCIGPU-SIM-1)."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", f"{directory}/key.pem", "-out", f"{directory}/cert.pem", "-days", "2"]
    command += ["-subj", "/CN=simulated BMC", "-addext", "subjectAltName=IP:127.0.0.1"]
    with OsErrorAs(OcigpuError, "OCIGPU-SIM-1", "make a certificate", "openssl makes it"):
        done = run_program(command, 60)
    if done.status:
        raise sim_error(f"make a certificate: openssl: {done.last_line}", "openssl makes it")


def serve(directory: str) -> None:
    """Serve the board controller of the host in a directory until a signal, and print the options for it."""
    tls = Path(directory, "run/bmc")
    if not os.path.exists(f"{directory}/{FILE}"):
        raise sim_error(
            f"{directory}: has no {FILE}", "ocigpu sim create DIR --driver none makes a host with a controller"
        )
    tls.mkdir(parents=True, exist_ok=True)
    service = RedfishService(directory, str(tls))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    with service:
        credentials = Path(directory, "bmc-credentials")
        print(f"--bmc {service.url} --bmc-ca {service.certificate} --credentials {credentials}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
