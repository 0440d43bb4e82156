"""Containers as a service, from the tenant's side: what needs nothing but an address and a key."""

import http.client
import ipaddress
import json
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from ocigpu.core.errors import HostError, RequestError, UsageError, printable, reason_of
from ocigpu.system.files import read_bounded
from ocigpu.system.tls import client_context

URL, KEY = "OCIGPU_CAAS_URL", "OCIGPU_CAAS_KEY"
TIMEOUT = 90.0
"""Seconds without a byte: of a stream, too, which says something every 15."""
ATTEMPTS = 5
PAUSE = 1.0
MAX_ANSWER = 8 << 20
HINTS = {
    "request_invalid": "",
    "parameter_invalid": "",
    **dict.fromkeys(("credential_missing", "credential_invalid"), f"set {KEY}, or name a file with --key-file"),
    "tenancy_mismatch": "leave --tenancy out: it comes from the key; only admin keys may name any",
    "tenancy_missing": "name one with --tenancy",
    "tenancy_unknown": "an operator makes it: ocigpu tenancy create NAME; or the service does: --create-tenancies",
    "idempotency_key_reused": "take another --idempotency-key for another request",
    **dict.fromkeys(("cluster_unavailable", "idempotency_in_flight", "too_many_requests"), "try again in some seconds"),
}
"""What to do on a command line, where the service's own words are about HTTP; "" where the message says it all."""


class StreamEvent(NamedTuple):
    """An event of a stream; ``id`` is what to go on after."""

    id: str
    kind: str
    data: str


class CaasClient:
    """Asks a service; raises HostError (OCIGPU-CAAS-3) when it cannot, RequestError (OCIGPU-CAAS-2) when it refuses.

    ``authority``: file of certificates in place of the system's.
    """

    def __init__(self, url: str, key: str, authority: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise UsageError(f'--url: "{printable(url, 100)}" is not an http(s) address', f"or set {URL}")
        if not key:
            raise UsageError("no key", f"set {KEY}, or name a file with --key-file")
        if not key.isascii() or not key.isprintable():
            raise UsageError("the key contains characters that no key contains")
        self.url, self._parts, self._key, self._authority = url.rstrip("/"), parts, key, authority

    @property
    def is_readable(self) -> bool:
        """Whether what is sent can be read on the way: it leaves this machine without TLS."""
        host = str(self._parts.hostname)
        if self._parts.scheme == "https" or host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(host).is_loopback
        except ValueError:
            return True

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """Send a request and return what the JSON of its answer says, None for none."""
        connection, answer = self.send(method, path, body, headers or {})
        try:
            data = answer.read(MAX_ANSWER)
        except (OSError, http.client.HTTPException) as error:
            raise self._away(error) from error
        finally:
            connection.close()
        found = self._decode(answer, data)
        if answer.status >= 400:
            raise refusal(found, answer.status)
        return found

    def follow(self, path: str, last: str = "") -> Iterator[StreamEvent]:
        """Yield the events of a stream until it ends; one that breaks is taken up after what was read."""
        failures = 0
        while True:
            headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
            broken: Exception | None = None
            try:
                connection, answer = self.send("GET", path, None, headers)
                with closing(connection):
                    if answer.status == 204:
                        return
                    if answer.status >= 400:
                        raise refusal(self._decode(answer, answer.read(MAX_ANSWER)), answer.status)
                    for event in read_events(answer):
                        failures, last = 0, event.id or last
                        yield event
            except (OSError, http.client.HTTPException) as error:
                broken = error
            except HostError:
                if failures >= ATTEMPTS:
                    raise
            failures += 1
            if failures > ATTEMPTS:
                raise self._away(broken or ConnectionResetError("the stream ends again and again"))
            time.sleep(min(PAUSE * (failures - 1), 5.0))

    def send(
        self, method: str, path: str, body: Any, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        parts = self._parts
        host = str(parts.hostname)
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            try:
                context = client_context(self._authority)
            except OSError as error:  # the library does not name the file
                why = "not certificates in PEM" if isinstance(error, ssl.SSLError) else error.strerror
                raise HostError("OCIGPU-CAAS-3", f"--ca {self._authority}: {why}", "") from error
            connection = http.client.HTTPSConnection(host, parts.port, timeout=TIMEOUT, context=context)
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT)
        sent = {"Authorization": f"Bearer {self._key}", "Connection": "close", **headers}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            sent["Content-Type"] = "application/json"
        try:
            connection.request(method, parts.path.rstrip("/") + path, data, sent)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._away(error) from error

    def _decode(self, answer: http.client.HTTPResponse, data: bytes) -> Any:
        if not data:
            return None
        if not answer.headers.get_content_type().endswith("json"):
            raise HostError("OCIGPU-CAAS-3", f"{self.url}: {answer.status} {answer.reason}: not this service's answer")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise HostError("OCIGPU-CAAS-3", f"{self.url}: the answer is not JSON") from error

    def _away(self, error: Exception) -> HostError:
        return HostError("OCIGPU-CAAS-3", f"{self.url}: {reason_of(error)}")


def read_events(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[StreamEvent]:
    """Yield the events of a stream's lines: WHATWG HTML, "Server-sent events"."""
    number, kind, data = "", "message", list[str]()
    for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield StreamEvent(number, kind, "\n".join(data))
            kind, data = "message", []
        elif name == "id":
            number = value
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)


def refusal(body: Any, status: int) -> RequestError:
    """Return the error of an answer that refuses; its hint is ours or the service's."""
    found = body if isinstance(body, dict) else {}
    code, detail = str(found.get("code") or status), str(found.get("detail") or "the service refuses")
    which = f" ({found['instance']})" if code == "internal" and "instance" in found else ""
    hint = HINTS.get(code, printable(str(found.get("fix") or ""), 300) or None)
    return RequestError("OCIGPU-CAAS-2", printable(f"{code}: {detail}{which}", 500), hint)


def connect(url: str = "", key_file: str = "", ca: str = "", allow_http: bool = False) -> CaasClient:
    """Return the service that the options or the environment name; raises UsageError, HostError.

    ``allow_http``: the key may go over a network in clear.
    """
    key = os.environ.get(KEY, "")
    if key_file:
        key = read_line(key_file, "key", 4096)
    client = CaasClient(url or os.environ.get(URL, "http://127.0.0.1:8443"), key.strip(), ca)
    if client.is_readable and not allow_http:
        text = f"--url {printable(client.url, 100)}: the key would be sent unencrypted"
        raise UsageError(text, "use https; or --allow-http, on a network that nobody else can read")
    return client


def read_line(path: str, what: str, most: int = 32 << 10) -> str:
    """Return what a file of one line says; raises HostError (OCIGPU-CAAS-3)."""
    try:
        with open(path, "rb") as file:
            return read_bounded(file, most).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a line of text"
        raise HostError("OCIGPU-CAAS-3", f"{what} {path}: {why}", "") from error


def path_of(container: str, rest: str = "", **query: Any) -> str:
    """Return the path of a container, or of something of it."""
    given = {name: value for name, value in query.items() if value not in ("", None, False)}
    words = {name: "1" if value is True else str(value) for name, value in given.items()}
    return f"/v1/containers/{quote(container, safe='')}{rest}" + (f"?{urlencode(words)}" if words else "")
