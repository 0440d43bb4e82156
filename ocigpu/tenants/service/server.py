"""``ocigpu caas serve``: options, and the program that serves until it is stopped."""

import asyncio
import contextlib
import ipaddress
import json
import os
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, NamedTuple

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from ocigpu.core.errors import HostError, OsErrorAs, SettingsError, cause, quoted, reason_of
from ocigpu.system.files import file_state, open_log_file
from ocigpu.system.service import ENDING, Door, ServiceLog, listen_tcp, split_address
from ocigpu.system.tls import client_context
from ocigpu.tenants.service.auth import OidcOptions, TokenReader, check_provider_url
from ocigpu.tenants.service.cluster import ClusterClient, open_cluster
from ocigpu.tenants.service.event_recorder import EventRecorder
from ocigpu.tenants.service.fleet import Fleet
from ocigpu.tenants.service.health import HealthServer
from ocigpu.tenants.service.image import parse_image
from ocigpu.tenants.service.page import make_route
from ocigpu.tenants.service.pods import PodOptions
from ocigpu.tenants.service.problems import Refusal
from ocigpu.tenants.service.reconciler import Reconciler, ReconcilerPace
from ocigpu.tenants.service.request import ADMIN, TenantRules
from ocigpu.tenants.service.store import CaasStore, StoreLimits
from ocigpu.tenants.service.web import KNOWN, Api

GRACE = 5
"""Seconds for answers that are being given when the service is told to end."""
REQUEST_SECONDS = 20.0
"""For the head of a request to come, on a new connection or after the answer before; and for an answer to go to who
showed no credential."""
BACKLOG = 128
MAX_STRANGERS = 512
"""Connections on which no credential was shown, see Door."""
MAX_DOCUMENT = 1 << 20
MAX_CHUNKS = 256
"""Of a body without a length: one of 1 MiB in parts of 4 KiB.  A part costs the same, however small it is."""
BEAT = 1.0
"""Seconds between signs of life."""


class ServiceOptions(NamedTuple):
    """The operator's options.

    ``listen``: HOST:PORT; ``state``: directory of the store, or its URL; ``tls``: files of certificate and key, ()
    for none; ``insecure``: plain HTTP for all clients, behind a proxy with TLS; ``audit``: file, "" for the log;
    ``health``: HOST:PORT for probes alone, "" for none.
    """

    listen: str = "127.0.0.1:8443"
    state: str = "/var/lib/ocigpu/caas"
    kubeconfig: str = ""
    tls: tuple[str, ...] = ()
    insecure: bool = False
    audit: str = ""
    keep_seconds: float = 86400.0
    rules: TenantRules = TenantRules()
    pods: PodOptions = PodOptions()
    oidc: OidcOptions | None = None
    limits: StoreLimits = StoreLimits()
    pace: ReconcilerPace = ReconcilerPace()
    pod_seconds: float = 600.0
    health: str = ""


class UvicornServer(uvicorn.Server):
    """Tells the streams before it waits for them."""

    on_shutdown: Callable[[], None]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to us: uvicorn would end by them once more when all is done, and the status would say so."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, see uvicorn."""
        self.on_shutdown()
        await super().shutdown(sockets)


class RequestParser(h11.Connection):
    """Limits the number of parts of a body, because a credential is checked only after they have been read."""

    _chunks = 0

    def next_event(self) -> Any:
        """Return what comes next, see h11."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._chunks += 1
            if self._chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError("too many parts")
        return event


class HttpProtocol(H11Protocol):
    """Ends connections without a request, and those with an unread answer to a client without a credential.

    Otherwise clients that send or read one character a minute would hold connections without a credential.
    """

    _seen: Any = None

    def __init__(self, config: uvicorn.Config, *more: Any, **named: Any) -> None:
        super().__init__(config, *more, **named)
        self.conn = RequestParser(h11.SERVER, config.h11_max_incomplete_event_size or 16 << 10)

    @property
    def is_known(self) -> bool:
        """Whether a client with a credential is being answered."""
        return self.cycle is not None and not self.cycle.response_complete and KNOWN in self.cycle.scope

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn declares it
        """Begin, see uvicorn."""
        super().connection_made(transport)
        self._watch = self.loop.call_later(REQUEST_SECONDS, self._close_if_stalled)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, see uvicorn; drops the unread input."""
        self._watch.cancel()
        super().connection_lost(exc)

    def _close_if_stalled(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is self._seen and not self.is_known:
            self.transport.abort()
            return
        self._seen = self.cycle
        self._watch = self.loop.call_later(REQUEST_SECONDS, self._close_if_stalled)


class CaasServer:
    """The service, or one of its replicas; :meth:`run` works until SIGTERM, SIGINT or SIGQUIT.

    Raises SettingsError and HostError (OCIGPU-CAAS-1) for options that are wrong or dangerous, and for a cluster, store
    or address that is not available; then nothing was made.  ``cluster``: replaces the one that the options name.
    """

    def __init__(self, options: ServiceOptions, log: ServiceLog, cluster: ClusterClient | None = None) -> None:
        self.options, self.log = options, log
        host, port = parse_listen(options.listen)
        probed = parse_listen(options.health, "--health") if options.health else None
        if not options.tls and not options.insecure and not _is_loopback(host):
            text = f"--listen {options.listen}: keys would be sent unencrypted"
            raise SettingsError(
                "OCIGPU-CAAS-1", text, "give --tls-certificate and --tls-key, or --insecure behind a proxy"
            )
        check_rules(options.rules, options.oidc.issuer if options.oidc else "")
        tokens = [TokenReader(options.oidc, fetch)] if options.oidc else []
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), options.tls)
        self._cluster = cluster or open_cluster(options.kubeconfig)
        try:
            self._audit = open_log_file(options.audit, 0o600) if options.audit else None
        except OSError as error:
            raise HostError("OCIGPU-CAAS-1", f"audit {cause(error)}", "") from error
        self.store = CaasStore(options.state, serving=True, limits=options.limits)
        self.tokens = tokens
        self.health: HealthServer | None = None
        self.reconciler: Reconciler | None = None
        try:
            if probed:
                self.health = HealthServer(*probed, lambda: self.reconciler.problem if self.reconciler else "it starts")
            with OsErrorAs(HostError, "OCIGPU-CAAS-1", f"listen on {options.listen}"):
                self.listening_socket = Door(listen_tcp(host, port, BACKLOG), MAX_STRANGERS)
        except HostError:
            if self.health:
                self.health.end()
            self.store.close()
            raise
        self.port = int(self.listening_socket.getsockname()[1])
        self.uvicorn_server: UvicornServer | None = None

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve.  ``ready``: called once requests are answered."""
        try:
            if self.health:
                self.health.start()
            asyncio.run(self._run(ready))
        finally:
            if self.health:
                self.health.end()
            self.listening_socket.close()
            self.store.close()
            if self._audit is not None:
                os.close(self._audit)

    def stop(self) -> None:
        """End :meth:`run`, from any thread."""
        if self.uvicorn_server:
            self.uvicorn_server.should_exit = True

    async def _run(self, ready: Callable[[], None]) -> None:
        options = self.options
        cluster = self._cluster
        pods = options.pods._replace(exports=options.rules.exports)
        reconciler = Reconciler(
            self.store, cluster, pods, self.log, options.keep_seconds, options.pace, options.pod_seconds
        )  # fmt: skip
        self.reconciler = reconciler

        fleet = Fleet(cluster, reconciler.signal, options.pods.resource, self.log, options.pace)
        reconciler.is_gone = fleet.is_gone
        recorder = EventRecorder(self.store, cluster, reconciler.signal, self.log, options.pace)
        reconciler.beside.append(recorder.run)

        @contextlib.asynccontextmanager
        async def beside(_app: Starlette) -> AsyncIterator[None]:
            beside_us = (reconciler.run(), fleet.run(), self._renew(config.ssl), self._beat())
            work = [asyncio.create_task(one) for one in beside_us]
            for one in work:
                one.add_done_callback(self._ended)
            self.log("info", f"listening on port {self.port}", port=self.port)
            ready()
            try:
                yield
            finally:
                for one in work:
                    one.cancel()
                await asyncio.gather(*work, return_exceptions=True)
                await cluster.close()

        api = Api(self.store, reconciler, options.rules, self.tokens, self.log, self._write_audit, fleet)
        tls: dict[str, Any] = dict(zip(("ssl_certfile", "ssl_keyfile"), options.tls, strict=False))
        config = uvicorn.Config(
            api.make_app(make_route(), run=beside), log_config=None, log_level="error", access_log=False, lifespan="on",
            server_header=False, timeout_graceful_shutdown=GRACE, ws="none", http=HttpProtocol,
            h11_max_incomplete_event_size=16 << 10, proxy_headers=False, loop="asyncio", backlog=BACKLOG, **tls,
        )  # fmt: skip
        config.load()
        self.uvicorn_server = server = UvicornServer(config)
        server.on_shutdown = reconciler.signal.close
        connections: Iterable[Any] = server.server_state.connections
        self.listening_socket.spared = lambda: [
            each.transport.get_extra_info("socket").fileno() for each in connections if each.is_known
        ]
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                asyncio.get_running_loop().add_signal_handler(number, self.stop)
        await server.serve([self.listening_socket])

    async def _beat(self) -> None:
        while self.health:
            self.health.beat()
            await asyncio.sleep(BEAT)

    async def _renew(self, context: ssl.SSLContext | None) -> None:
        """Load a renewed certificate for new connections; an unusable one leaves the former in force."""
        paths = self.options.tls
        known = [file_state(path) for path in paths]
        while context:
            await asyncio.sleep(self.options.pace.chores)
            if known == (found := [file_state(path) for path in paths]):
                continue
            try:
                for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):  # half of it would be the end of both
                    load_certificate(each, paths)
            except HostError as error:
                self.log.once("tls", "error", error.message)
                continue
            known = found
            self.log.forget("tls")
            self.log("info", f"certificate {paths[0]}: renewed")

    def _ended(self, work: "asyncio.Task[None]") -> None:
        """Stop the service after a failure of the reconciler; the parent restarts the service."""
        if not work.cancelled() and (error := work.exception()):
            self.log("error", f"reconciler: {type(error).__name__}: {error}")
            self.stop()

    def _write_audit(self, line: dict[str, Any]) -> None:
        if self._audit is None:
            fields = {("at" if name == "time" else name): value for name, value in line.items()}
            self.log("info", audit_text(line), **fields)
            return
        try:
            os.write(self._audit, (json.dumps(line) + "\n").encode())
        except OSError as error:
            self.log.once("audit", "error", f"audit {self.options.audit}: {error.strerror}")


def audit_text(line: dict[str, Any]) -> str:
    """Return a line of the audit as a log of plain lines has it."""
    return "audit " + " ".join(f"{name}={json.dumps(value)}" for name, value in line.items() if value is not None)


def parse_listen(text: str, option: str = "--listen") -> tuple[str, int]:
    """Return host and port of HOST:PORT; raises SettingsError (OCIGPU-CAAS-1)."""
    found = split_address(text)
    if not found or not found[0]:
        raise SettingsError("OCIGPU-CAAS-1", f"{option} {quoted(text)}: not HOST:PORT", "127.0.0.1:8443, [::]:8443")
    return found


def load_certificate(context: ssl.SSLContext, paths: tuple[str, ...]) -> None:
    """Give a context the certificate and key of these files; raises HostError (OCIGPU-CAAS-1)."""
    if not paths:
        return
    try:
        certificate, key = paths
        context.load_cert_chain(certificate, key, lambda: "")  # without a password it would ask the terminal
    except (ssl.SSLError, ValueError, OSError) as error:  # the library does not say which of the files
        plain = isinstance(error, OSError) and not isinstance(error, ssl.SSLError)
        why = reason_of(error) if plain else "not a certificate with its key, in PEM"
        raise HostError("OCIGPU-CAAS-1", f"certificate {paths[0]}, key {paths[1]}: {why}", "") from error


def check_rules(rules: TenantRules, issuer: str = "") -> None:
    """Raise SettingsError (OCIGPU-CAAS-1) for registries, exports and creators that are none."""
    for prefix in rules.registries:
        try:
            parse_image(f"{prefix.rstrip('/')}/image")
        except Refusal as problem:
            raise SettingsError("OCIGPU-CAAS-1", f"--registry {quoted(prefix)}: not a registry", "nvcr.io") from problem
    for who in rules.creators:
        if who not in (ADMIN, issuer or ADMIN):
            text = f"--create-tenancies {quoted(who)}: neither {ADMIN} nor the issuer of --oidc-issuer"
            raise SettingsError("OCIGPU-CAAS-1", text, ADMIN)
    for export in rules.exports:
        server, _, path = export.partition(":")
        if not server or not path.startswith("/"):
            hint = "server:/exports/{tenancy}"
            raise SettingsError("OCIGPU-CAAS-1", f"--nfs {quoted(export)}: not SERVER:/PATH", hint)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: Any) -> None:
        """Follow no redirect: only the checked place may answer."""


async def fetch(url: str) -> bytes:
    """Return a document of the identity provider, of at most 1 MiB; raises OSError."""
    check_provider_url(url)
    return await asyncio.to_thread(_fetch, url)


def _fetch(url: str) -> bytes:
    trusting = urllib.request.HTTPSHandler(context=client_context())
    opener = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}), trusting)
    try:
        request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310 - of the settings
        with opener.open(request, timeout=10) as answer:
            data: bytes = answer.read(MAX_DOCUMENT + 1)
    except urllib.error.HTTPError as error:
        error.close()  # it has the answer's connection
        raise
    if len(data) > MAX_DOCUMENT:
        raise OSError(f"{url}: larger than 1 MiB")
    return data
