"""The kubelet's pod-resources interface: which containers have which devices."""

from typing import NamedTuple

import grpc

from ocigpu.core.errors import printable
from ocigpu.kubernetes.api import podresources_pb2 as pb
from ocigpu.kubernetes.api.services import POD_RESOURCES, method, open_channel
from ocigpu.kubernetes.exporter.owners import Claimed, OwningContainer

DEADLINE = 10.0
"""Seconds for an answer."""
MAX_ANSWER = 16 << 20
MAX_TEXT = 253


class Listing(NamedTuple):
    """``containers`` that have devices; ``claimed``: devices of resource claims; ``problem``: why none, in one line."""

    containers: tuple[OwningContainer, ...] = ()
    problem: str = ""
    claimed: tuple[Claimed, ...] = ()


def list_containers(socket: str, seconds: float = DEADLINE) -> Listing:
    """Ask the kubelet on this socket; waits at most so long, and never raises for what the kubelet does."""
    with open_channel(socket, ("grpc.max_receive_message_length", MAX_ANSWER)) as channel:
        try:
            answer = method(channel, POD_RESOURCES, "List")(pb.ListPodResourcesRequest(), timeout=seconds)
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}" if hasattr(error, "code") else str(error)
            return Listing(problem=f"{printable(socket, 300)}: {printable(reason, 300)}")
    containers: list[OwningContainer] = []
    claimed: list[Claimed] = []
    for pod in answer.pod_resources:
        place = (printable(pod.name, MAX_TEXT), printable(pod.namespace, MAX_TEXT))
        for container in pod.containers:
            name = printable(container.name, MAX_TEXT)
            containers += [
                OwningContainer(*place, name, devices.resource_name, tuple(devices.device_ids))
                for devices in container.devices
            ]
            claimed += [
                Claimed(
                    *place, name, printable(claim.claim_name, MAX_TEXT), printable(claim.claim_namespace, MAX_TEXT),
                    device.driver_name, printable(device.pool_name, MAX_TEXT), printable(device.device_name, MAX_TEXT),
                )
                for claim in container.dynamic_resources
                for device in claim.claim_resources  # by its name: newer kubelets have both CDI names under one device
            ]  # fmt: skip
    return Listing(tuple(containers), claimed=tuple(claimed))
