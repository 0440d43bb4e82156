"""The kubelet's services as tables of methods, and the two ways to use them: serve one, call one.

So small a table needs no generated servicer classes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import Message

from ocigpu.kubernetes.api import deviceplugin_pb2 as plugin
from ocigpu.kubernetes.api import pluginregistration_pb2 as watcher
from ocigpu.kubernetes.api import podresources_pb2 as pods


class Method(NamedTuple):
    """One method; ``streams``: it answers with a stream of responses instead of one."""

    request: type[Message]
    response: type[Message]
    streams: bool = False


class GrpcService(NamedTuple):
    """A service by its full name, with its methods by name."""

    name: str
    methods: Mapping[str, Method]


REGISTRATION = GrpcService("v1beta1.Registration", {"Register": Method(plugin.RegisterRequest, plugin.Empty)})
"""Of the kubelet: plugins announce themselves."""

DEVICE_PLUGIN = GrpcService(
    "v1beta1.DevicePlugin",
    {
        "GetDevicePluginOptions": Method(plugin.Empty, plugin.DevicePluginOptions),
        "ListAndWatch": Method(plugin.Empty, plugin.ListAndWatchResponse, streams=True),
        "GetPreferredAllocation": Method(plugin.PreferredAllocationRequest, plugin.PreferredAllocationResponse),
        "Allocate": Method(plugin.AllocateRequest, plugin.AllocateResponse),
        "PreStartContainer": Method(plugin.PreStartContainerRequest, plugin.PreStartContainerResponse),
    },
)
"""Of a plugin."""

POD_RESOURCES = GrpcService(
    "v1.PodResourcesLister",
    {
        "List": Method(pods.ListPodResourcesRequest, pods.ListPodResourcesResponse),
        "GetAllocatableResources": Method(pods.AllocatableResourcesRequest, pods.AllocatableResourcesResponse),
        "Get": Method(pods.GetPodResourcesRequest, pods.GetPodResourcesResponse),
    },
)
"""Of the kubelet: which containers have which devices."""

PLUGIN_WATCHER = GrpcService(
    "pluginregistration.Registration",
    {
        "GetInfo": Method(watcher.InfoRequest, watcher.PluginInfo),
        "NotifyRegistrationStatus": Method(watcher.RegistrationStatus, watcher.RegistrationStatusResponse),
    },
)
"""Of a plugin that the kubelet's plugin watcher finds."""


def serve(service: GrpcService, functions: Mapping[str, Callable[[Any, grpc.ServicerContext], Any]]) -> Any:
    """Return a handler for ``grpc.Server.add_generic_rpc_handlers`` that answers every method by its function.

    A function takes the request and the context, and returns the response (an iterator of responses for a stream).
    Raises KeyError for a method without a function.
    """
    handlers = {}
    for name, method in service.methods.items():
        make = grpc.unary_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
        handlers[name] = make(
            functions[name],
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.name, handlers)


def method(channel: grpc.Channel, service: GrpcService, name: str) -> Callable[..., Any]:
    """Return what calls a method over a channel: ``call(request, timeout=seconds)``; raises KeyError for no method."""
    described = service.methods[name]
    make = channel.unary_stream if described.streams else channel.unary_unary
    return make(
        f"/{service.name}/{name}",
        request_serializer=described.request.SerializeToString,
        response_deserializer=described.response.FromString,
    )
