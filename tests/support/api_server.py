"""An API server of Kubernetes for the tests: real HTTPS, and of the API what the node labels need.

It checks the token, keeps objects with their labels' managers as server-side apply does, and fails as it is told to.
"""

import json
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ocigpu.kubernetes.cluster.api_server import ApiServer

TOKEN = "token-of-the-tests"


class _Server(ThreadingHTTPServer):
    def handle_error(self, _request: Any, _address: Any) -> None:
        """Clients that do not trust us go away."""


class FakeApiServer:
    """``objects`` by path; ``answers``: statuses that the next requests get; ``requests``: (method, path) served.

    ``directory``: that of :func:`make_account`.  It has threads: whoever forks closes it before.
    """

    def __init__(self, directory: Path) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.answers: list[int] = []
        self.requests: list[tuple[str, str]] = []
        self.types = {"nodes", "nodefeatures", "pods"}
        self._managed: dict[str, set[str]] = {}
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(directory / "server.pem", directory / "server.key")
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.place = ApiServer("127.0.0.1", self._server.server_address[1], str(directory))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = fake.serve(self.command, self.path, dict(self.headers), body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PATCH = do_DELETE = _serve  # noqa: N815 - names of http.server

            def log_message(self, *_arguments: Any) -> None:
                return

        return Handler

    def serve(self, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        path = urlsplit(target).path
        query = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
        self.requests.append((method, path))
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        if self.answers and (status := self.answers.pop(0)) != 200:
            return _status(status, f"answer {status} of the tests")
        parent, _, name = path.rpartition("/")
        if parent.rpartition("/")[2] not in self.types:
            return _status(404, "the server could not find the requested resource")
        if method == "PATCH":
            return self._apply(path, name, query, headers, json.loads(body))
        if path not in self.objects:
            return _status(404, f'"{name}" not found')
        if method == "DELETE":
            return 200, self.objects.pop(path)
        return 200, self.objects[path]

    def _apply(
        self, path: str, name: str, query: dict[str, str], headers: dict[str, str], document: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """Server-side apply of labels: ours that are left out go, those of others stay."""
        if headers.get("Content-Type") != "application/apply-patch+yaml" or "fieldManager" not in query:
            return _status(415, "not server-side apply")
        if document["metadata"]["name"] != name or query.get("force") != "true":
            return _status(400, "wrong name, or not forced")
        created = path not in self.objects
        if created and "nodes" in path.split("/"):
            return _status(403, "nodes is forbidden: User cannot create resource")
        found = self.objects.setdefault(path, document)
        for part in ("metadata", "spec"):
            labels = document.get(part, {}).get("labels", {})
            old = found.setdefault(part, {}).get("labels", {})
            manager = f"{path} {part} {query['fieldManager']}"
            ours = self._managed.get(manager, set())
            found[part]["labels"] = {**{key: value for key, value in old.items() if key not in ours}, **labels}
            self._managed[manager] = set(labels)
        return 201 if created else 200, found


def _status(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


def make_account(directory: Path) -> None:
    """Make the files of a service account, and a certificate for 127.0.0.1 of its own authority, by openssl(1)."""
    key = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    authority = [*key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=kubernetes"]
    server = [*key, "-keyout", "server.key", "-out", "server.pem", "-subj", "/CN=server", "-CA", "ca.crt"]
    server += ["-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1"]
    for command in (authority, server):
        subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=60)
    (directory / "token").write_text(f"{TOKEN}\n")
    (directory / "namespace").write_text("gpu")
