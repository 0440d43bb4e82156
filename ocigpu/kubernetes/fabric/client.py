"""A manager behind ``ocigpu fabric serve``, as the host sees it; and every kind of address in one place."""

import re
import socket
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import grpc

from ocigpu.core.codes import CODES
from ocigpu.core.errors import printable
from ocigpu.gpus.nvidia.fabric.libnvfm import open_fabric as open_local
from ocigpu.gpus.nvidia.fabric.partitions import FabricError, Partition, RestorableFabric, check_list, show_gpus
from ocigpu.kubernetes.api import fabric_pb2 as pb
from ocigpu.kubernetes.api.services import method, open_channel
from ocigpu.kubernetes.fabric.messages import (
    CODE_KEY,
    MAX_MESSAGE,
    SERVICE,
    STATUS_KEY,
    ServiceAddress,
    from_message,
    parse_service,
    read_tls,
    to_gpus,
    to_message,
)
from ocigpu.system.relay import DIAL_SECONDS, Relay, connect, listen

PREFIX = "grpc:"
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
LIST_SECONDS = 30.0
CHANGE_SECONDS = 200.0
"""Behind the deadlines of the library on the other side, and of whom it waits for."""


def open_fabric(address: str, library: str = "", simulation: str = "", tls: str = "") -> RestorableFabric:
    """Return the manager at an address: grpc:unix:PATH, grpc:vsock:CID:PORT or grpc:tcp:HOST:PORT, or the library's.

    ``tls``: directory of the files for TCP, see TLS_FILES; the rest as of
    :func:`ocigpu.gpus.nvidia.fabric.libnvfm.open_fabric`.  Raises FabricError (OCIGPU-FAB-1).
    """
    if not address.startswith(PREFIX):
        return open_local(address, library, simulation)
    return GrpcFabric(parse_service(address.removeprefix(PREFIX)), tls)


class GrpcFabric(RestorableFabric):
    """The service at an address.  Each call is a connection of its own, as the manager's are."""

    def __init__(self, address: ServiceAddress, tls: str = "") -> None:
        self.address = address
        self._tls = tls

    def list_partitions(self) -> tuple[Partition, ...]:
        """Return what the board can connect; raises FabricError."""
        return self._read(self._call("List", "list partitions", pb.FabricNothing(), LIST_SECONDS))

    def activate(self, physical_ids: Collection[int]) -> Partition:
        """Activate the partition of exactly these GPUs; raises FabricError."""
        what = f"activate {show_gpus(physical_ids)}"
        done = from_message(self._call("Activate", what, to_gpus(physical_ids), CHANGE_SECONDS))
        if not done.is_active or done.physical_ids != tuple(sorted(physical_ids)):
            raise FabricError("OCIGPU-FAB-6", f"{what}: {PREFIX}{self.address} answers with another partition")
        return done

    def deactivate(self, physical_ids: Collection[int]) -> None:
        """Deactivate the partition of exactly these GPUs; raises FabricError."""
        self._call("Deactivate", f"deactivate {show_gpus(physical_ids)}", to_gpus(physical_ids), CHANGE_SECONDS)

    def restore(self, active: Collection[Collection[int]], known: Collection[Partition]) -> tuple[Partition, ...]:
        """Tell a manager that waits after a restart which sets were active; raises FabricError."""
        asked = pb.FabricActive(active=map(to_gpus, active), known=map(to_message, known))
        return self._read(self._call("Restore", "restore", asked, CHANGE_SECONDS))

    def _read(self, answer: pb.FabricPartitions) -> tuple[Partition, ...]:
        found = tuple(map(from_message, answer.partitions))
        check_list(found)
        return found

    def _call(self, name: str, what: str, request: Any, seconds: float) -> Any:
        try:
            with self._channel() as channel:
                return method(channel, SERVICE, name)(request, timeout=seconds)
        except grpc.RpcError as error:
            raise self._error(what, error) from error
        except OSError as error:
            raise FabricError("OCIGPU-FAB-2", f"{what}: {PREFIX}{self.address}: {error.strerror or error}") from error

    def _error(self, what: str, error: Any) -> FabricError:
        told = {key: str(value) for key, value in error.trailing_metadata() or ()}
        details = printable(error.details() or error.code().name.lower(), 1000)
        code = told.get(CODE_KEY, "")
        if code in CODES:
            status = told.get(STATUS_KEY, "")
            return FabricError(code, details, status=int(status) if re.fullmatch(r"-?[0-9]{1,4}", status) else 0)
        away = error.code() in AWAY
        hint = (
            "No service listens there, or this client is not allowed: see the log of ocigpu fabric serve."
            if away
            else None
        )
        return FabricError(
            "OCIGPU-FAB-2" if away else "OCIGPU-FAB-8", f"{what}: {PREFIX}{self.address}: {details}", hint
        )

    @contextmanager
    def _channel(self) -> Iterator[grpc.Channel]:
        host, number = self.address.host, self.address.number
        limits = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", MAX_MESSAGE)]
        if self.address.kind == "tcp":
            if not self._tls:
                hint = "--tls names a directory with them."
                raise FabricError("OCIGPU-FAB-1", f"{PREFIX}{self.address}: TCP needs certificates", hint)
            authority, certificate, key = read_tls(self._tls)
            credentials = grpc.ssl_channel_credentials(authority, key, certificate)
            with grpc.secure_channel(f"{host}:{number}", credentials, limits) as channel:
                yield channel
            return
        bridge = nullcontext(host) if self.address.kind == "unix" else _bridge(self.address)
        with bridge as path, open_channel(path, *limits) as channel:
            yield channel


@contextmanager
def _bridge(address: ServiceAddress) -> Iterator[str]:
    """Yield the path of a socket that leads to a vsock: gRPC's Python packages are built without vsock."""
    with tempfile.TemporaryDirectory(prefix="ocigpu-fabric-") as directory:
        path = f"{directory}/socket"
        outer = listen(socket.AF_UNIX, path)
        relay = Relay(outer, lambda: connect(*address.endpoint(), DIAL_SECONDS))
        try:
            yield path
        finally:
            relay.close()
