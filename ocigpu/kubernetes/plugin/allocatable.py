"""What the kubelet holds for allocatable, asked on its pod-resources socket; never waits.

A plugin's stream alone does not say that the kubelet has its devices: since 1.25 it keeps the stream of a plugin whose
resource another plugin has registered, and when that one goes it holds all devices of the resource for unhealthy.
Source: kubernetes/pkg/kubelet/cm/devicemanager (plugin/v1beta1/handler.go, manager.go: PluginDisconnected).
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from ocigpu.kubernetes.api import podresources_pb2 as pb
from ocigpu.kubernetes.api.services import POD_RESOURCES, method, open_channel

MAX_ANSWER = 16 << 20
DEADLINE = 10.0


def pods_socket(kubelet: str) -> str:
    """Return the pod-resources socket of the kubelet that takes registrations on ``kubelet``."""
    return f"{os.path.dirname(os.path.dirname(kubelet))}/pod-resources/kubelet.sock"


class Allocatable:
    """Queries at an interval; ``wake`` is called from another thread when an answer arrives."""

    def __init__(self, socket: str, seconds: float, wake: Callable[[], None]) -> None:
        self._socket, self._seconds, self._wake = socket, seconds, wake
        self._due = 0.0
        self._channel: Any = None
        self._call: Any = None

    def step(self, now: float) -> Mapping[str, frozenset[str]] | None:
        """Return the ids of healthy devices by resource when an answer has arrived, else None.

        Without the socket or an answer, the result is None as well.
        """
        if self._call is None:
            if now >= self._due and os.path.exists(self._socket):
                self._begin()
            return None
        if not self._call.done():
            return None
        failed, call = self._call.exception(), self._call
        self.close()
        self._due = now + self._seconds
        if failed:
            return None
        found: dict[str, set[str]] = {}
        for device in call.result().devices:  # one entry for each NUMA node
            found.setdefault(device.resource_name, set()).update(device.device_ids)
        return {name: frozenset(ids) for name, ids in found.items()}

    def _begin(self) -> None:
        self._channel = open_channel(self._socket, ("grpc.max_receive_message_length", MAX_ANSWER))
        ask: Any = method(self._channel, POD_RESOURCES, "GetAllocatableResources")
        self._call = ask.future(pb.AllocatableResourcesRequest(), timeout=DEADLINE)
        self._call.add_done_callback(lambda _call: self._wake())

    def close(self) -> None:
        """Cancel the query under way."""
        if self._channel is not None:
            self._channel.close()
        self._call = self._channel = None
