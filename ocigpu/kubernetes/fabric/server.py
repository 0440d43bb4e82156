"""``ocigpu fabric serve``: gives the host the partitions of a manager that listens only inside its machine.

Every caller is identified before it gets an answer.  For a vsock (CID) and a unix socket (uid) the kernel identifies
it, and its connection is passed on only then.  For TCP both sides present a certificate.  Only named callers are
allowed.
"""

import contextlib
import os
import shutil
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from ocigpu.core.errors import OcigpuError, as_own_error, printable
from ocigpu.gpus.nvidia.fabric.partitions import FabricError, RestorableFabric, show_ids
from ocigpu.kubernetes.api import fabric_pb2 as pb
from ocigpu.kubernetes.api.services import give_up, serve
from ocigpu.kubernetes.fabric.messages import (
    CODE_KEY,
    MAX_MESSAGE,
    SERVICE,
    STATUS_KEY,
    ServiceAddress,
    from_message,
    read_tls,
    to_list,
    to_message,
)
from ocigpu.system.relay import DIAL_SECONDS, Relay, connect, listen
from ocigpu.system.service import ServiceLog

WORKERS = 4
STOP = 5.0
HANDSHAKE = 5.0
"""Seconds for TLS to be agreed on: until then nobody knows who calls, and each takes a descriptor."""
MOST_SETS = 64
MOST_GPUS = 16
MOST_ID = 1 << 10


class FabricServer:
    """Serves a manager at an address.  ``allowed``: who may call, "cid:2", "uid:0" or a name in a certificate.

    ``tls``: directory of the files for TCP.  Raises FabricError (OCIGPU-FAB-1) where it cannot listen.
    """

    def __init__(
        self,
        fabric: RestorableFabric,
        address: ServiceAddress,
        allowed: Collection[str],
        log: ServiceLog,
        tls: str = "",
    ) -> None:
        self._fabric = fabric
        self._allowed = frozenset(allowed)
        self._log = log
        self._tls = tls
        self._relay: Relay | None = None
        self._directory = ""
        self._changing = threading.Lock()
        self._server = grpc.server(
            ThreadPoolExecutor(WORKERS, "fabric"),
            maximum_concurrent_rpcs=2 * WORKERS,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE),
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", int(HANDSHAKE * 1000)),
            ],
        )
        functions = {
            "List": self._guard("list", lambda _: to_list(fabric.list_partitions())),
            "Activate": self._guard("activate", lambda asked: to_message(fabric.activate(_ids(asked)))),
            "Deactivate": self._guard("deactivate", self._deactivate),
            "Restore": self._guard("restore", self._restore),
        }
        self._server.add_generic_rpc_handlers((serve(SERVICE, functions),))
        self.address = address
        try:
            self.address = self._listen_tls(address) if address.kind == "tcp" else self._listen(address)
        except FabricError:
            self._give_up()
            raise
        except (OSError, RuntimeError) as error:
            self._give_up()
            cause = error.strerror if isinstance(error, OSError) and error.strerror else "cannot be bound"
            raise FabricError("OCIGPU-FAB-1", f"listen on {address}: {cause}", "") from error

    def _give_up(self) -> None:
        give_up(self._server)
        self._clean()

    def stop(self) -> None:
        """Stop; running calls get some seconds to finish."""
        self._server.stop(STOP).wait()
        self._clean()

    def _clean(self) -> None:
        if self._relay:
            self._relay.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._relay and self.address.kind == "unix" and os.path.lexists(self.address.host):
            os.unlink(self.address.host)

    def _listen_tls(self, address: ServiceAddress) -> ServiceAddress:
        def read() -> Any:
            """Read the files at each handshake: they are renewed while we run."""
            authority, certificate, key = read_tls(self._tls)
            return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

        def read_again() -> Any:
            try:
                return read()
            except FabricError as error:
                self._log.failed("tls", error)
                return None  # earlier callers

        credentials = grpc.dynamic_ssl_server_credentials(read(), read_again, require_client_authentication=True)
        port = self._server.add_secure_port(f"{address.host}:{address.number}", credentials)
        self._server.start()
        return ServiceAddress("tcp", address.host, port)

    def _listen(self, address: ServiceAddress) -> ServiceAddress:
        """Listen on a socket whose callers the kernel identifies, in front of a private one."""
        self._directory = tempfile.mkdtemp(prefix="ocigpu-fabric-")
        inner = f"{self._directory}/socket"
        self._server.add_insecure_port(f"unix:{inner}")
        self._server.start()

        if address.kind == "unix":
            with contextlib.suppress(FileNotFoundError):  # a file of another kind is not ours: the bind fails
                if stat.S_ISSOCK(os.lstat(address.host).st_mode) and not _answers(address.host):
                    os.unlink(address.host)
        self._relay = Relay(
            listen(*address.endpoint()), lambda: connect(socket.AF_UNIX, inner, DIAL_SECONDS), self._admit
        )
        return address

    def _admit(self, connection: socket.socket) -> bool:
        caller = _caller_of(connection)
        if caller not in self._allowed:
            self._log("warning", f"refused a connection: {caller} is not allowed", caller=caller)
        return caller in self._allowed

    def _guard(self, verb: str, function: Callable[[Any], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            callers = [] if self._relay else [name.decode(errors="replace") for name in context.peer_identities() or ()]
            known = self._relay is not None or not self._allowed.isdisjoint(callers)
            who = printable(",".join(callers) or "socket", 200)
            if not known:
                refusal = FabricError("OCIGPU-FAB-10", f"{verb}: {who} is not allowed")
                self._say("warning", verb, who, request, refusal.message)
                _abort(context, grpc.StatusCode.PERMISSION_DENIED, refusal)
            try:
                with self._changing:
                    done = function(request)
            except OcigpuError as error:
                self._say("warning", verb, who, request, error.line)
                _abort(context, grpc.StatusCode.FAILED_PRECONDITION, error)
            except Exception as error:  # noqa: BLE001 - a defect: the caller gets it, and the next call may work
                self._say("error", verb, who, request, f"{type(error).__name__}: {error}")
                _abort(context, grpc.StatusCode.INTERNAL, as_own_error(error))
            if verb != "list":
                self._say("info", verb, who, request, "done")
            return done

        return answer

    def _say(self, level: str, verb: str, who: str, request: Any, result: str) -> None:
        ids = show_ids(request.physical_ids[:MOST_GPUS]) if isinstance(request, pb.FabricGpus) else ""
        self._log(level, f"{verb} {ids}".rstrip() + f" for {who}: {result}", caller=who, verb=verb, gpus=ids)

    def _deactivate(self, asked: pb.FabricGpus) -> pb.FabricNothing:
        self._fabric.deactivate(_ids(asked))
        return pb.FabricNothing()

    def _restore(self, asked: pb.FabricActive) -> pb.FabricPartitions:
        if len(asked.active) > MOST_SETS or len(asked.known) > MOST_SETS:
            raise FabricError("OCIGPU-FAB-4", f"more than {MOST_SETS} sets")
        active = [_ids(each) for each in asked.active]
        return to_list(self._fabric.restore(active, [from_message(each) for each in asked.known]))


def _ids(asked: pb.FabricGpus) -> tuple[int, ...]:
    ids = tuple(sorted(asked.physical_ids))
    if not 0 < len(ids) <= MOST_GPUS or len(set(ids)) < len(ids) or ids[-1] >= MOST_ID:
        raise FabricError("OCIGPU-FAB-4", f"GPUs {show_ids(ids[:MOST_GPUS]) or 'none'}: not a set of physical ids")
    return ids


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        return True


def _caller_of(connection: socket.socket) -> str:
    """Return the peer of a connection, as the kernel reports it: unix(7), SO_PEERCRED; vsock(7)."""
    if connection.family == socket.AF_UNIX:
        size = struct.calcsize("3i")
        return f"uid:{struct.unpack('3i', connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]}"
    return f"cid:{connection.getpeername()[0]}"


def _abort(context: grpc.ServicerContext, status: grpc.StatusCode, error: OcigpuError) -> NoReturn:
    number = str(error.status) if isinstance(error, FabricError) else "0"
    context.set_trailing_metadata(((CODE_KEY, error.code), (STATUS_KEY, number)))
    context.abort(status, printable(error.message))
    raise AssertionError  # abort has raised
