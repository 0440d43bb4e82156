"""Kubernetes' side of containerd: a pod and a container in it, over the Container Runtime Interface.

No crictl in the distribution: this speaks gRPC itself, with the few messages written by hand (field numbers from
k8s.io/cri-api/pkg/apis/runtime/v1/api.proto).  It runs as a process of its own, because gRPC starts threads and the
test process forks::

    python cri.py SOCKET < requests.json

A request is ``[method, message]``, a message ``{field number: value}`` with text, numbers, messages and lists.
"""

import json
import sys
from typing import Any


def encode(message: dict[str, Any]) -> bytes:
    """Return the protobuf wire format of {"field number": value}."""
    data = b""
    for name, values in message.items():
        number = int(name)
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, int):
                data += varint(number << 3) + varint(value)
                continue
            content = encode(value) if isinstance(value, dict) else value.encode()
            data += varint(number << 3 | 2) + varint(len(content)) + content
    return data


def varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def decode(data: bytes) -> dict[int, Any]:
    """Return {field number: value}: numbers as they are, everything else as bytes; the last of a repeated field."""
    found: dict[int, Any] = {}
    position = 0

    def number() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        key = number()
        if key & 7 == 0:
            found[key >> 3] = number()
        elif key & 7 == 2:
            length = number()
            found[key >> 3] = data[position : position + length]
            position += length
        else:
            raise ValueError(f"wire type {key & 7}")
    return found


def serve(socket: str, requests: list[list[Any]]) -> list[dict[str, Any]]:
    """Send the requests one after another; an error of the server ends it, as the last answer's "error"."""
    import grpc

    results: list[dict[str, Any]] = []
    with grpc.insecure_channel(f"unix://{socket}") as channel:
        for method, message in requests:
            call = channel.unary_unary(f"/runtime.v1.{method}")
            try:
                reply = decode(call(encode(message), timeout=60))
            except grpc.RpcError as error:
                results.append({"error": f"{method}: {error.code().name}: {error.details()}"})
                return results
            results.append({str(key): _text(value) for key, value in reply.items()})
    return results


def _text(value: Any) -> Any:
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value


if __name__ == "__main__":
    print(json.dumps(serve(sys.argv[1], json.load(sys.stdin))))
