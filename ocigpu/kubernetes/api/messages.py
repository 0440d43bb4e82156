"""Records of the plugin as messages for the kubelet."""

from collections.abc import Iterable

from ocigpu.kubernetes.api import deviceplugin_pb2 as pb
from ocigpu.kubernetes.devices import PluginDevice

VERSION = "v1beta1"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"


def device_list(devices: Iterable[PluginDevice]) -> pb.ListAndWatchResponse:
    """Return the message that replaces the kubelet's whole list of a resource's devices."""
    return pb.ListAndWatchResponse(devices=[_device(device) for device in devices])


def _device(device: PluginDevice) -> pb.Device:
    nodes = [pb.NUMANode(ID=device.numa)] if device.numa >= 0 else []
    topology = pb.TopologyInfo(nodes=nodes) if nodes else None
    return pb.Device(ID=device.id, health=UNHEALTHY if device.error else HEALTHY, topology=topology)
