"""The API server of the cluster that this pod runs in, with the rights of its service account.

Plain HTTPS: a handful of requests need no client library.  Sources: "Accessing the Kubernetes API from a Pod" (names of
variables and files), "Kubernetes API Concepts" and "Server-Side Apply" (paths, content types, status codes).
"""

import http.client
import json
import os
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError, printable, quoted, reason_of
from ocigpu.system.tls import client_context

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
MANAGER = "ocigpu"
"""Our name as the manager of fields: only what it applied before and no longer applies is removed."""
TIMEOUT = 10.0
"""Seconds for one request."""
PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each repetition of a request that met a busy or absent server."""
MAX_ANSWER = 4 << 20
JSON = "application/json"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Of an object its metadata alone ("Kubernetes API Concepts": alternate representations of resources)."""
_BUSY = (409, 429, 500, 502, 503, 504)
"""409: another writer was faster; the others say that the server cannot answer now (RFC 9110, RFC 6585)."""


class ApiServer(NamedTuple):
    """Where the server is, and the directory of the service account's token, certificate authority and namespace."""

    host: str
    port: int
    account: str = ACCOUNT


class ApiAnswer(NamedTuple):
    """``body``: the decoded object, {} for none."""

    status: int
    body: "dict[str, Any]"


def find_api_server(environment: Mapping[str, str], account: str = ACCOUNT) -> ApiServer | None:
    """Return the server that Kubernetes names to its pods, None outside of a pod or without a service account."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdecimal() or not os.path.exists(f"{account}/token"):
        return None
    return ApiServer(host, int(port), account)


def read_namespace(server: ApiServer) -> str:
    """Return the namespace of the service account; raises HostError (OCIGPU-KUBE-5)."""
    return _read(f"{server.account}/namespace").strip()


def request(
    server: ApiServer,
    method: str,
    path: str,
    body: Any = None,
    sleep: Callable[[float], None] = time.sleep,
    accept: str = JSON,
) -> ApiAnswer:
    """Send one request and return the answer, of status 2xx or 404; PATCH is server-side apply.

    The request is repeated five times within about ten seconds if the server is busy or unreachable.  Raises HostError
    (OCIGPU-KUBE-5) with the server's own words.
    """
    where = f"{method} https://{server.host}:{server.port}{path}"
    pauses = iter(PAUSES)
    while True:
        try:
            answer = _send(server, method, path, body, accept)
            if answer.status < 300 or answer.status == 404:
                return answer
            problem = _describe(answer)
            again = answer.status in _BUSY
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = reason_of(error)
            again = not isinstance(error, (ssl.SSLCertVerificationError, ValueError))
        pause = next(pauses, None) if again else None
        if pause is None:
            raise HostError("OCIGPU-KUBE-5", f"{where}: {problem}")
        sleep(pause)


def apply(server: ApiServer, path: str, document: "dict[str, Any]", manager: str = MANAGER) -> ApiAnswer:
    """Apply the document as our fields of an object, by server-side apply; see :func:`request`."""
    return request(server, "PATCH", f"{path}?fieldManager={manager}&force=true", document)


def apply_to_node(server: ApiServer, node: str, metadata: "dict[str, Any]", manager: str = MANAGER) -> ApiAnswer:
    """Give a node these labels and annotations in place of those that this manager gave it; see :func:`request`."""
    document = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, **metadata}}
    return apply(server, f"/api/v1/nodes/{node}", document, manager)


def _send(server: ApiServer, method: str, path: str, body: Any, accept: str) -> ApiAnswer:
    authority = _read(f"{server.account}/ca.crt")
    if not authority:  # the system's authorities would take its place, and might vouch for another server
        raise HostError("OCIGPU-KUBE-5", f"service account: {quoted(f'{server.account}/ca.crt')}: it is empty")
    context = client_context(cadata=authority)
    connection = http.client.HTTPSConnection(server.host, server.port, timeout=TIMEOUT, context=context)
    # the kubelet renews the token, so every request reads it again
    headers = {"Authorization": f"Bearer {_read(f'{server.account}/token').strip()}", "Accept": accept}
    if body is not None:
        headers["Content-Type"] = "application/apply-patch+yaml" if method == "PATCH" else JSON
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        data = response.read(MAX_ANSWER)
    finally:
        connection.close()
    try:
        found = json.loads(data) if data else {}
    except ValueError:
        found = {}
    return ApiAnswer(response.status, found if isinstance(found, dict) else {})


def _describe(answer: ApiAnswer) -> str:
    message = answer.body.get("message")
    text = f": {printable(message, 300)}" if isinstance(message, str) and message else ""
    reason = http.client.responses.get(answer.status, "")
    return f"{answer.status} {reason}".strip() + text


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(1 << 16)
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not text"
        raise HostError("OCIGPU-KUBE-5", f"service account: {quoted(path)}: {cause}") from error
