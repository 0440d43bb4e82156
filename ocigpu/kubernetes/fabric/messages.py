"""What the fabric's service and its clients have in common: messages, addresses and the files of mutual TLS."""

import os
import re
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ocigpu.core.errors import quoted
from ocigpu.gpus.nvidia.fabric.partitions import FabricError, Partition
from ocigpu.kubernetes.api import fabric_pb2 as pb
from ocigpu.system.files import read_regular

SERVICE = pb.DESCRIPTOR.services_by_name["FabricController"]
CODE_KEY, STATUS_KEY = "ocigpu-code", "ocigpu-status"
MAX_MESSAGE = 1 << 18
MAX_FILE = 1 << 20
TLS_FILES = ("ca.crt", "tls.crt", "tls.key")
"""In a directory, as a Secret of Kubernetes has them."""


@dataclass(frozen=True)
class ServiceAddress:
    """Where the service is: ``kind`` is unix, vsock or tcp; ``number`` is a port; ``host`` a path, CID or name."""

    kind: str
    host: str
    number: int = 0

    def __str__(self) -> str:
        return ":".join([self.kind, *filter(None, [self.host]), *([str(self.number)] if self.number else [])])

    def endpoint(self) -> tuple[int, str | tuple[int, int]]:
        """Return family and address of a unix or vsock socket.

        Listening, a vsock has no CID of its own to name (vsock(7), VMADDR_CID_ANY).
        """
        if self.kind == "unix":
            return socket.AF_UNIX, self.host
        return socket.AF_VSOCK, (int(self.host) if self.host else socket.VMADDR_CID_ANY, self.number)


def parse_service(text: str, listening: bool = False) -> ServiceAddress:
    """Return the address of unix:PATH, vsock:CID:PORT (listening: vsock:PORT) or tcp:HOST:PORT.

    Listening on TCP, port 0 is a free one.  Raises FabricError (OCIGPU-FAB-1).
    """
    kind, _, rest = text.partition(":")
    host, _, number = rest.rpartition(":")
    known = re.fullmatch(r"[0-9]{1,10}", number) is not None
    if kind == "unix" and rest.startswith("/") and rest.isprintable() and len(os.fsencode(rest)) < 108:
        return ServiceAddress(kind, rest)
    if kind == "vsock" and known and int(number) < 1 << 32 and re.fullmatch("" if listening else "[0-9]{1,10}", host):
        return ServiceAddress(kind, host, int(number))
    named = re.fullmatch(r"[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]+\]", host)
    if kind == "tcp" and named and known and (0 if listening else 1) <= int(number) < 65536:
        return ServiceAddress(kind, host, int(number))
    forms = "unix:PATH, vsock:PORT or tcp:IP:PORT" if listening else "unix:PATH, vsock:CID:PORT or tcp:HOST:PORT"
    raise FabricError("OCIGPU-FAB-1", f"address {quoted(text)}: not understood", f"It is {forms}.")


def read_tls(directory: str) -> tuple[bytes, bytes, bytes]:
    """Return the authority, our certificate and our key; raises FabricError (OCIGPU-FAB-1)."""
    try:
        authority, certificate, key = (read_regular(f"{directory}/{name}", MAX_FILE) for name in TLS_FILES)
    except OSError as error:
        where = error.filename or directory
        hint = f"--tls names a directory with {', '.join(TLS_FILES)}."
        raise FabricError("OCIGPU-FAB-1", f"read {where}: {error.strerror}", hint) from error
    return authority, certificate, key


def to_message(one: Partition) -> pb.FabricPartition:
    """Return a partition as a message."""
    links = [pb.FabricLinks(available=now, most=most) for now, most in one.nvlinks]
    return pb.FabricPartition(
        partition_id=one.partition_id, is_active=one.is_active, physical_ids=one.physical_ids, nvlinks=links
    )


def to_list(partitions: Iterable[Partition]) -> pb.FabricPartitions:
    """Return partitions as a message."""
    return pb.FabricPartitions(partitions=map(to_message, partitions))


def from_message(message: pb.FabricPartition) -> Partition:
    """Return the partition of a message."""
    links = tuple((each.available, each.most) for each in message.nvlinks)
    return Partition(message.partition_id, message.is_active, tuple(sorted(message.physical_ids)), links)


def to_gpus(physical_ids: Collection[int]) -> pb.FabricGpus:
    """Return a set as a message."""
    return pb.FabricGpus(physical_ids=sorted(physical_ids))
