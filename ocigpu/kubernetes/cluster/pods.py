"""The kubelet's pod-resources interface: which containers have which devices."""

from typing import NamedTuple

import grpc

from ocigpu.core.errors import printable
from ocigpu.kubernetes.api import podresources_pb2 as pb
from ocigpu.kubernetes.api.services import POD_RESOURCES, method, open_channel
from ocigpu.kubernetes.cluster.owners import Claim, Held, Owner

DEADLINE = 10.0
"""Seconds for an answer."""
MAX_ANSWER = 16 << 20
MAX_TEXT = 253


class Listing(NamedTuple):
    """``held``: devices of containers; ``claimed``: by resource claims; ``problem``: why none, in one line.

    ``pods``: names of all pods, "namespace/name", also of those without devices.
    """

    held: tuple[Held, ...] = ()
    problem: str = ""
    claimed: tuple[Owner, ...] = ()
    pods: frozenset[str] = frozenset()


def list_containers(socket: str, seconds: float = DEADLINE) -> Listing:
    """Ask the kubelet on this socket; waits at most so long, and never raises for what the kubelet does."""
    with open_channel(socket, ("grpc.max_receive_message_length", MAX_ANSWER)) as channel:
        try:
            answer = method(channel, POD_RESOURCES, "List")(pb.ListPodResourcesRequest(), timeout=seconds)
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}" if hasattr(error, "code") else str(error)
            return Listing(problem=f"{printable(socket, 300)}: {printable(reason, 300)}")
    held: list[Held] = []
    claimed: list[Owner] = []
    for pod in answer.pod_resources:
        for container in pod.containers:
            name, namespace, inside = (printable(text, MAX_TEXT) for text in (pod.name, pod.namespace, container.name))
            owner = Owner(name, namespace, inside)
            for devices in container.devices:
                held += [Held(owner, devices.resource_name, device_id) for device_id in devices.device_ids]
            for claim in container.dynamic_resources:
                # devices by their names: newer kubelets have both CDI names under one device
                for device in claim.claim_resources:
                    names = (claim.claim_name, claim.claim_namespace, device.driver_name)
                    words = (printable(text, MAX_TEXT) for text in (*names, device.pool_name, device.device_name))
                    claimed.append(owner._replace(claim=Claim(*words)))
    pods = frozenset(f"{pod.namespace}/{pod.name}" for pod in answer.pod_resources)
    return Listing(tuple(held), claimed=tuple(claimed), pods=pods)
