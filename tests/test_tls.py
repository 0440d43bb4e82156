"""Whom clients of TLS trust: ocigpu/system/tls.py."""

import http.client
import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.process import run

import ocigpu
from ocigpu.system.tls import client_context, lenient

PACKAGE = Path(ocigpu.__file__).parent


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority whose only extension says that it is one, as those of old clusters and companies, and a server."""
    place = tmp_path_factory.mktemp("authority")
    (place / "ext").write_text("subjectAltName = IP:127.0.0.1\n")
    (place / "openssl.cnf").write_text(
        "[req]\ndistinguished_name = name\n[name]\n[ca]\nbasicConstraints = critical, CA:true\n"
    )
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-config", place / "openssl.cnf"]
    own = ["-extensions", "ca", "-days", "3650", "-keyout", place / "ca.key", "-out", place / "ca.crt"]
    run(["openssl", "req", "-x509", *key, "-subj", "/CN=authority", *own])
    run(["openssl", "req", *key, "-subj", "/CN=server", "-keyout", place / "server.key", "-out", place / "server.csr"])
    signed = ["-CA", place / "ca.crt", "-CAkey", place / "ca.key", "-CAcreateserial", "-days", "3650"]
    run(
        [
            "openssl",
            "x509",
            "-req",
            "-in",
            place / "server.csr",
            *signed,
            "-extfile",
            place / "ext",
            "-out",
            place / "server.crt",
        ]
    )
    return place


@pytest.fixture
def port(authority: Path) -> Iterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "server.crt", authority / "server.key")
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def ask(port: int, context: ssl.SSLContext) -> int:
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    finally:
        connection.close()


def test_an_authority_without_a_key_usage_is_believed_with_every_python(authority: Path, port: int) -> None:
    assert ask(port, client_context(str(authority / "ca.crt"))) == 501
    assert ask(port, client_context(cadata=(authority / "ca.crt").read_text())) == 501
    strict = ssl.create_default_context(cafile=authority / "ca.crt")
    strict.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(port, strict)
    assert ask(port, lenient(strict)) == 501


def test_an_authority_that_was_not_named_is_not_believed(port: int) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(port, client_context())


def test_contexts_of_clients_are_made_in_one_place() -> None:
    makers = ("create_default_context", "PROTOCOL_TLS_CLIENT", "create_ssl_context", "verify_cluster(")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(maker in path.read_text() for maker in makers)
    }
    assert found == {"system/tls.py", "kubernetes/cluster/client.py"}, "ocigpu.system.tls makes them"
