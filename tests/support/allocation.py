"""What a container is given by the device plugin, as records that can be compared."""

from typing import Any, NamedTuple

from ocigpu.kubernetes.plugin import allocate as product


class PluginMount(NamedTuple):
    container_path: str
    host_path: str
    read_only: bool = False


class DeviceSpec(NamedTuple):
    container_path: str
    host_path: str
    permissions: str


class Response(NamedTuple):
    envs: dict[str, str] = {}
    mounts: tuple[PluginMount, ...] = ()
    devices: tuple[DeviceSpec, ...] = ()
    annotations: dict[str, str] = {}
    cdi_devices: tuple[str, ...] = ()


def allocate(*arguments: Any) -> Response:
    """Return the answer of the product's function of this name."""
    message = product.allocate(*arguments)
    return Response(
        dict(message.envs),
        tuple(PluginMount(each.container_path, each.host_path, each.read_only) for each in message.mounts),
        tuple(DeviceSpec(each.container_path, each.host_path, each.permissions) for each in message.devices),
        dict(message.annotations),
        tuple(each.name for each in message.cdi_devices),
    )
