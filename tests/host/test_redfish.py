"""The board controller over real HTTPS: a good one, one that is slow, one that lies, and one that is somebody else."""

import base64
import contextlib
import hashlib
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509 import load_der_x509_certificate
from support.driverless import make_driverless

from ocigpu.core.errors import OcigpuError
from ocigpu.gpus.firmware import redfish
from ocigpu.gpus.firmware.baseline import compare_all, propose
from ocigpu.gpus.firmware.redfish import Credentials, Redfish, RedfishError, read_credentials, read_firmware
from ocigpu.gpus.firmware.spdm import parse_measurements, verify_measurements
from ocigpu.sim.redfish import (
    BOARD,
    CHAIN,
    INVENTORY,
    PASSWORD,
    ROOT,
    SYSTEM,
    USER,
    RedfishHandler,
    RedfishService,
    make_certificate,
    make_chain,
    sign,
)

GOOD = Credentials(USER, PASSWORD)
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def host(tmp_path: Path) -> str:
    make_driverless(tmp_path / "host", 2)
    return str(tmp_path / "host")


def change(host: str, make: Change) -> None:
    path = Path(host, "redfish.json")
    documents = json.loads(path.read_text())
    make(documents)
    path.write_text(json.dumps(documents))


def ask(service: RedfishService, **options: Any) -> redfish.NodeFirmware:
    measurements = options.pop("measurements", False)
    return read_firmware(Redfish(service.url, GOOD, **{"ca_file": service.certificate, **options}), measurements)


def refusal(service: RedfishService, **options: Any) -> RedfishError:
    with pytest.raises(RedfishError) as raised:
        ask(service, **options)
    return raised.value


def test_firmware_serials_and_health_of_each_gpu_and_the_baseboard(host: str, tls: str) -> None:
    with RedfishService(host, tls) as service:
        found = ask(service)
    assert found.notes == ()
    second, fourth, board = found.components
    assert (second.name, second.slot, second.model) == ("GPU_SXM_2", 2, "H100 80GB HBM3")
    assert second.key == "H100 80GB HBM3 699-05825-0200-000"
    assert dict(second.versions) == {
        "VBIOS": "96.00.BC.00.01", "InfoROM": "G520.0200.00.05", "ERoT": "01.04.0031.0000_n04",
    }  # fmt: skip
    assert dict(second.health) == {
        "status": "OK",
        "uncorrectable-ecc-errors": 0,
        "remapped-rows-uncorrectable": 0,
        "row-remapping-failed": False,
        "row-remapping-pending": False,
    }
    assert board.versions["NVSwitch_3"] == "96.10.6D.00.01"
    assert "BMC" not in board.versions  # the maker's own is none of the baseboard's
    assert found.slots == {second.serial: 2, fourth.serial: 4}


def test_a_controller_that_does_not_expand_is_asked_for_each_member(host: str, tls: str) -> None:
    with RedfishService(host, tls) as service:
        expanded = ask(service)
        many = len(service.asked)
        change(host, lambda documents: documents[f"{ROOT}/"].pop("ProtocolFeaturesSupported"))
        assert ask(service) == expanded
        assert len(service.asked) > 2 * many + 20


def test_the_baseboard_is_found_below_a_prefix(host: str, tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(host, lambda documents: [documents.update({f"/hmc{path}": documents.pop(path)}) for path in list(documents)])
    with RedfishService(host, tls) as service, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ocigpu.sim.redfish.INVENTORY", f"/hmc{INVENTORY}")
        assert [one.slot for one in ask(service).components] == [2, 4, 0]


def test_the_baseboard_is_found_at_another_port(
    host: str, tls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "maker").mkdir()
    (tmp_path / "maker/redfish.json").write_text(json.dumps({f"{ROOT}/": {}}))
    with RedfishService(host, tls) as board, RedfishService(str(tmp_path / "maker"), tls) as maker:
        port = int(board.url.rpartition(":")[2])
        monkeypatch.setattr(redfish, "PLACES", ((ROOT, 0), (f"/hmc{ROOT}", 0), (ROOT, port)))
        assert len(ask(maker).components) == 3
    with RedfishService(str(tmp_path / "maker"), tls) as maker:  # nobody listens at the other port now
        error = refusal(maker)
    assert (error.code, "it has no HGX_Baseboard_0" in error.message) == ("OCIGPU-FW-1", True)


def test_a_certificate_is_trusted_or_pinned_and_nothing_is_sent_before(host: str, tls: str) -> None:
    with RedfishService(host, tls) as service:
        assert "certificate: " in refusal(service, ca_file="").message
        other = refusal(service, ca_file="", fingerprint="00" * 32).message
        assert "another certificate than the pinned one" in other
        assert service.fingerprint in other
        assert service.asked == []
        assert len(ask(service, ca_file="", fingerprint=service.fingerprint.upper()).components) == 3
        assert "not SHA-256" in refusal(service, fingerprint="abc").message
        assert "read /none" in refusal(service, ca_file="/none").message


def test_wrong_credentials_are_said_to_be_refused(host: str, tls: str) -> None:
    wrong = Credentials("reader", "wrong")
    refused = pytest.raises(RedfishError, match="HTTP 401: credentials are refused")
    with RedfishService(host, tls) as service, refused as raised:
        read_firmware(Redfish(service.url, wrong, ca_file=service.certificate))
    assert "wrong" not in raised.value.message
    assert "wrong" not in repr(Credentials("reader", "wrong"))


@pytest.mark.parametrize(
    "url", ["http://10.0.0.7", "10.0.0.7", "https://", "https://u:p@10.0.0.7", "https://h/x", "https://h:99999", ""]
)
def test_a_url_that_is_none_of_a_controller_is_refused(url: str) -> None:
    with pytest.raises(RedfishError, match="not like https://HOST"):
        read_firmware(Redfish(url, GOOD))


def test_nobody_at_the_address_is_an_error() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(RedfishError, match="Connection refused") as raised:
            read_firmware(Redfish(f"https://127.0.0.1:{held.getsockname()[1]}", GOOD))
    assert raised.value.code == "OCIGPU-FW-1"


def test_a_machine_without_tls_is_told_without_numbers_of_a_library() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RedfishError, match=r"/: [a-z ]+$") as raised:
            read_firmware(Redfish(f"https://127.0.0.1:{server.getsockname()[1]}", GOOD))
        thread.join()
    assert raised.value.code == "OCIGPU-FW-1"


def test_a_machine_that_says_nothing_at_all_ends_in_time() -> None:
    silent = pytest.raises(RedfishError, match=r"no answer within 0\.3 s")
    with socket.create_server(("127.0.0.1", 0)) as server, silent:
        read_firmware(Redfish(f"https://127.0.0.1:{server.getsockname()[1]}", GOOD, deadline=0.3))


class Trickling(RedfishHandler):
    """Sends a byte each time just before a wait for one would end."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        while not stop.wait(0.02):
            self.wfile.write(b" ")


class TricklingHeaders(RedfishHandler):
    def do_GET(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not stop.wait(0.02):
            self.wfile.write(b"x")


stop = threading.Event()


@pytest.mark.parametrize("handler", [Trickling, TricklingHeaders])
def test_answers_that_come_a_byte_at_a_time_end_in_time(host: str, tls: str, handler: type[RedfishHandler]) -> None:
    stop.clear()
    with RedfishService(host, tls, handler) as service:
        error = refusal(service, deadline=0.5)
        stop.set()
    assert (error.code, "no answer within 0.5 s" in error.message) == ("OCIGPU-FW-1", True)


class Closing(RedfishHandler):
    """Closes each connection without having said so."""

    def answer(self, status: int, document: Any) -> None:
        super().answer(status, document)
        self.close_connection = True


def test_a_connection_that_was_closed_meanwhile_is_made_again(host: str, tls: str) -> None:
    with RedfishService(host, tls, Closing) as service:
        assert len(ask(service).components) == 3


def answering(data: bytes, status: int = 200, **headers: str) -> type[RedfishHandler]:
    """Return a handler that answers everything with these bytes."""

    class Same(RedfishHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Same


@pytest.mark.parametrize(
    ("data", "status", "code", "message"),
    [
        (b"<html>", 200, "OCIGPU-FW-2", "not JSON"),
        (b"[]", 200, "OCIGPU-FW-2", "not a resource"),
        (b"[" * 100_000, 200, "OCIGPU-FW-2", "not JSON"),
        (b" " * (5 << 20), 200, "OCIGPU-FW-1", "an answer of more than 4 MiB"),
        (b"{}", 302, "OCIGPU-FW-1", "HTTP 302"),
        (b"{}", 503, "OCIGPU-FW-1", "HTTP 503"),
        (b"{}", 200, "OCIGPU-FW-2", "no firmware of a GPU"),
        (b'{"Members": "x"}', 200, "OCIGPU-FW-2", "not a collection"),
        (b'{"Members": [1]}', 200, "OCIGPU-FW-2", "a member without a link"),
        (json.dumps({"Members": [{}] * 600}).encode(), 200, "OCIGPU-FW-2", "not a collection"),
    ],
    ids=["html", "list", "deep", "large", "redirection", "unavailable", "empty", "text", "number", "many"],
)
def test_answers_that_are_no_resources(host: str, tls: str, data: bytes, status: int, code: str, message: str) -> None:
    with RedfishService(host, tls, answering(data, status, Location="https://127.0.0.1:1/")) as service:
        error = refusal(service)
    assert error.code == code
    assert message in error.message
    assert len(error.message) < 400


GPU_2, GPU_4 = f"{SYSTEM}/Processors/GPU_SXM_2", f"{SYSTEM}/Processors/GPU_SXM_4"
MEMORY = f"{SYSTEM}/Memory/GPU_SXM_2_DRAM_0"
VBIOS = f"{INVENTORY}/HGX_FW_GPU_SXM_2"
LIES: dict[str, tuple[Change, str]] = {
    "another member": (lambda all_: all_[VBIOS].update(Id="HGX_FW_GPU_SXM_4"), 'it is "HGX_FW_GPU_SXM_4"'),
    "another processor": (lambda all_: all_[GPU_2].update(Id="GPU_SXM_4"), 'GPU_SXM_2 is "GPU_SXM_4"'),
    "one serial number twice": (
        lambda all_: [one.update(SerialNumber="1") for one in all_.values() if "SerialNumber" in one],
        "two GPUs have the serial number 1",
    ),
    "two serial numbers": (lambda all_: all_[GPU_2].update(SerialNumber="1"), "GPU_SXM_2 has two serial numbers"),
    "a version with an escape": (lambda all_: all_[VBIOS].update(Version="9\x1b[2J"), "is not a version"),
    "a long version": (lambda all_: all_[VBIOS].update(Version="9" * 10_000), "is not a version"),
    "a version that is none": (lambda all_: all_[VBIOS].update(Version={"a": 1}), "is not a version"),
    "a model that is none": (lambda all_: all_[GPU_2].update(Model=[1]), "is not a version"),
    "errors below zero": (
        lambda all_: all_[f"{MEMORY}/MemoryMetrics"]["LifeTime"].update(UncorrectableECCErrorCount=-1),
        "uncorrectable-ecc-errors is",
    ),
    "errors as text": (
        lambda all_: all_[f"{MEMORY}/MemoryMetrics"]["LifeTime"].update(UncorrectableECCErrorCount="0"),
        "uncorrectable-ecc-errors is",
    ),
    "a slot too many": (
        lambda all_: all_.update({f"{INVENTORY}/HGX_FW_GPU_SXM_17": {"Id": "HGX_FW_GPU_SXM_17", "Version": "1",
                                  "@odata.id": f"{INVENTORY}/HGX_FW_GPU_SXM_17"}}),
        "GPU_SXM_17: no such slot",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_is_not_believed(host: str, tls: str, lie: str) -> None:
    make, message = LIES[lie]
    change(host, make)
    with RedfishService(host, tls) as service:
        error = refusal(service)
    assert error.code == "OCIGPU-FW-2"
    assert message in error.message


def test_links_of_a_controller_are_not_followed(host: str, tls: str) -> None:
    def lead_away(documents: dict[str, Any]) -> None:
        documents[f"{ROOT}/"].pop("ProtocolFeaturesSupported")
        documents[VBIOS]["@odata.id"] = "https://127.0.0.1:1/HGX_FW_GPU_SXM_2"
        documents[INVENTORY] = {"Members": [{"@odata.id": "//127.0.0.1:1/../x/HGX_FW_GPU_SXM_2"}]}

    change(host, lead_away)
    with RedfishService(host, tls) as service:
        assert [one.slot for one in ask(service).components if one.versions] == [2]
        assert VBIOS in service.asked


def test_what_a_controller_does_not_tell_is_said(host: str, tls: str) -> None:
    def forget(documents: dict[str, Any]) -> None:
        for path in (GPU_2, f"{ROOT}/Chassis/HGX_GPU_SXM_2", f"{INVENTORY}/HGX_InfoROM_GPU_SXM_2", MEMORY):
            documents.pop(path)

    change(host, forget)
    with RedfishService(host, tls) as service:
        found = ask(service)
    assert found.notes == ("GPU_SXM_2 reports no InfoROM", "GPU_SXM_2 reports no serial number")
    assert found.components[0].health == {}


def test_a_baseboard_that_tells_nothing_any_more_deviates(host: str, tls: str) -> None:
    with RedfishService(host, tls) as service:
        before = propose(ask(service).components)
        change(host, lambda documents: [documents.pop(f"{INVENTORY}/{one}") for one in BOARD])
        found = ask(service).components
    silent = {one.fact for one in compare_all(found, before) if one.reason == "not reported"}
    assert silent == {one.removeprefix("HGX_FW_") for one in BOARD}
    assert compare_all(found, propose(found)) == ()  # boards that never told


def test_a_pcie_host_has_no_baseboard(host: str, tls: str) -> None:
    change(host, lambda documents: documents.pop(SYSTEM))
    with RedfishService(host, tls) as service:
        error = refusal(service)
    assert error.code == "OCIGPU-FW-1"
    assert "PCIe cards" in error.hint


def test_credentials_are_read_only_from_a_file_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "bmc"
    path.write_text("reader:with:colons\n")
    path.chmod(0o600)
    assert read_credentials(str(path)) == Credentials("reader", "with:colons")
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(RedfishError, match=f"mode 0{mode:o}: others may"):
            read_credentials(str(path))
    path.chmod(0o600)
    link = tmp_path / "open" / "link"
    link.parent.mkdir()
    link.symlink_to(path)
    assert read_credentials(str(link)) == Credentials("reader", "with:colons"), "as in a secret of Kubernetes"
    link.parent.chmod(0o777)
    with pytest.raises(RedfishError, match="others may replace files"):
        read_credentials(str(link))
    for text in ("", "reader", ":x", "reader:", "a:b\nc:d\n"):
        path.write_text(text)
        with pytest.raises(RedfishError, match="not one line USER:PASSWORD") as raised:
            read_credentials(str(path))
        assert raised.value.code == "OCIGPU-FW-3"
    for name in ("none", "."):
        with pytest.raises(RedfishError, match="read "):
            read_credentials(str(tmp_path / name))


INTEGRITY = f"{ROOT}/ComponentIntegrity/HGX_ERoT_GPU_SXM_2"


def test_the_root_of_trust_measures_where_that_is_offered(host: str, tls: str) -> None:
    change(host, lambda documents: documents.pop(INTEGRITY))
    with RedfishService(host, tls) as service:
        found = ask(service, measurements=True)
        assert "measurement 1" not in ask(service).components[1].versions
    assert found.notes == ("GPU_SXM_2 offers no measurements",)
    versions = found.components[1].versions
    root = versions["measurement root"]
    assert {key: value for key, value in versions.items() if key.startswith("measurement")} == {
        "measurement root": root,
        **{f"measurement {number}": hashlib.sha384(str(number).encode()).hexdigest() for number in (1, 2, 3)},
    }
    assert {one.versions.get("measurement root", root) for one in found.components} == {root}


class Replaying(RedfishHandler):
    """Says what it has said to another nonce."""

    def answer(self, status: int, document: Any) -> None:
        if "SignedMeasurements" in document:
            document = {"SignedMeasurements": base64.b64encode(sign({"1": "00"}, bytes(32))).decode()}
        super().answer(status, document)


class Forging(RedfishHandler):
    """Says that all is well, with the signature of what was asked."""

    def answer(self, status: int, document: Any) -> None:
        if text := document.get("SignedMeasurements"):
            data = bytearray(base64.b64decode(text))
            data[60] ^= 1
            document = {"SignedMeasurements": base64.b64encode(data).decode()}
        super().answer(status, document)


class Vouching(RedfishHandler):
    """Has the certificates of another component."""

    def answer(self, status: int, document: Any) -> None:
        if "CertificateString" in document:
            document = {"CertificateString": make_chain("another")}
        super().answer(status, document)


class Relaying(RedfishHandler):
    """Has the first GPU measured whichever is asked for."""

    def do_GET(self) -> None:
        if self.path.endswith(CHAIN):
            self.path = f"{ROOT}/Chassis/HGX_ERoT_GPU_SXM_1{CHAIN}"
        super().do_GET()

    def answer(self, status: int, document: Any) -> None:
        if text := document.get("SignedMeasurements"):
            nonce = base64.b64decode(text)[4:36]
            data = sign({"1": "00"}, nonce, f"{ROOT}/ComponentIntegrity/HGX_ERoT_GPU_SXM_1")
            document = {"SignedMeasurements": base64.b64encode(data).decode()}
        super().answer(status, document)


class Failing(RedfishHandler):
    def answer(self, status: int, document: Any) -> None:
        super().answer(status, {"TaskState": "Exception"} if document.get("TaskState") == "Completed" else document)


class Endless(RedfishHandler):
    def answer(self, status: int, document: Any) -> None:
        super().answer(status, {"TaskState": "Running"} if "TaskState" in document and status == 200 else document)


@pytest.mark.parametrize(
    ("handler", "code", "message"),
    [
        (Replaying, "OCIGPU-FW-2", "another or an earlier request"),
        (Forging, "OCIGPU-FW-2", "a signature that is not the component's"),
        (Vouching, "OCIGPU-FW-2", "a signature that is not the component's"),
        (Relaying, "OCIGPU-FW-2", " are measured by one component"),
        (Failing, "OCIGPU-FW-2", 'its measurement ended as "Exception"'),
        (Endless, "OCIGPU-FW-1", "no answer within 1 s"),
    ],
)
def test_measurements_that_do_not_come_or_are_old(
    host: str, tls: str, handler: type[RedfishHandler], code: str, message: str
) -> None:
    with RedfishService(host, tls, handler) as service:
        error = refusal(service, measurements=True, deadline=1.0 if handler is Endless else 60.0)
    assert error.code == code
    assert message in error.message


NONCE = bytes(range(32))
STATEMENT = sign({"1": "ab" * 48, "7": "cd" * 100}, NONCE)


def test_a_statement_has_its_values_by_index() -> None:
    assert parse_measurements(STATEMENT, NONCE) == {
        "measurement 1": "ab" * 48,
        "measurement 7": hashlib.sha384(b"\xcd" * 100).hexdigest(),
    }


@pytest.mark.parametrize("cut", range(0, len(STATEMENT), 11))
def test_a_statement_that_is_cut_off_or_changed_is_an_error(cut: int) -> None:
    for data in (STATEMENT[:cut], STATEMENT[:cut] + STATEMENT[cut + 3 :]):
        with pytest.raises(ValueError, match=r"measurement"):
            parse_measurements(data, NONCE)


def test_only_who_has_the_key_of_the_certificate_has_signed() -> None:
    chain = make_chain("one")
    data = sign({"1": "00"}, NONCE, "one")
    key, root = verify_measurements(data, chain)
    halves = chain.split("-----END CERTIFICATE-----\n")[:2]
    other_way = "".join(f"{half}-----END CERTIFICATE-----\n" for half in reversed(halves))
    assert verify_measurements(data, other_way) == (key, root) != (root, key)
    assert verify_measurements(sign({"1": "00"}, NONCE, "two"), make_chain("two"))[1] == root
    # a component's certificate is not an authority: who has its key cannot vouch for another
    under_it = make_chain("mine", "one").split("-----END CERTIFICATE-----\n")[0] + "-----END CERTIFICATE-----\n"
    with pytest.raises(ValueError, match="not an authority"):
        verify_measurements(sign({"1": "00"}, NONCE, "mine"), under_it + chain)
    # nor does the name of an authority suffice
    cases = [
        (sign({"1": "00"}, NONCE, "two"), chain),
        (data[:-1] + bytes([data[-1] ^ 1]), chain),
        (data[:-96] + bytes(96), chain),
    ]
    for changed, certificates in cases:
        with pytest.raises(ValueError, match="not the component's"):
            verify_measurements(changed, certificates)
    for wrong in ("", "x", chain[:300], make_chain("one").replace("MII", "MIJ")):
        with pytest.raises(ValueError, match=r"no chain"):
            verify_measurements(data, wrong)


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
def test_whatever_a_controllers_certificates_are_is_an_error_of_ours() -> None:
    """Each byte of a chain is another in turn: the library has many errors, and no class of them all."""
    chain = make_chain("one")
    data = sign({"1": "00"}, NONCE, "one")
    ends = ("-----BEGIN CERTIFICATE-----\n", "\n-----END CERTIFICATE-----\n")
    parts = [
        ssl.PEM_cert_to_DER_cert(f"{ends[0]}{one}{ends[1]}")
        for one in re.findall(f"{ends[0]}(.*?){ends[1]}", chain, re.DOTALL)
    ]
    version = parts[0].index(b"\xa0\x03\x02\x01\x02") + 4
    changes = [(version, 4)] + [(place, parts[0][place] ^ bits) for place in range(len(parts[0])) for bits in (1, 0x80)]
    said = []
    for place, byte in changes:
        changed = parts[0][:place] + bytes([byte]) + parts[0][place + 1 :]
        text = "".join(ssl.DER_cert_to_PEM_cert(one) for one in (changed, *parts[1:]))
        with contextlib.suppress(ValueError):
            verify_measurements(data, text)
            said.append(place)
    # what is signed comes first; around the signature itself a bit may mean nothing
    assert [place for place in said if place < 4 + len(load_der_x509_certificate(parts[0]).tbs_certificate_bytes)] == []
    with pytest.raises(ValueError, match="more than 8"):
        verify_measurements(data, chain * 10_000)


def test_a_certificate_that_cannot_be_made_says_what_openssl_says(tmp_path: Path) -> None:
    with pytest.raises(OcigpuError, match=r"make a certificate: openssl: .*No such file or directory"):
        make_certificate(str(tmp_path / "missing"))
