"""The kubelet's services as our .proto files describe them, and the two ways to use them: serve one, call one.

So small an interface needs no generated servicer classes.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from ocigpu.kubernetes.api import (
    deviceplugin_pb2,
    dra_health_v1_pb2,
    dra_health_v1alpha1_pb2,
    dra_v1_pb2,
    dra_v1beta1_pb2,
    pluginregistration_pb2,
    podresources_pb2,
)

REGISTRATION = deviceplugin_pb2.DESCRIPTOR.services_by_name["Registration"]
"""Of the kubelet: plugins announce themselves."""
DEVICE_PLUGIN = deviceplugin_pb2.DESCRIPTOR.services_by_name["DevicePlugin"]
"""Of a plugin."""
POD_RESOURCES = podresources_pb2.DESCRIPTOR.services_by_name["PodResourcesLister"]
"""Of the kubelet: which containers have which devices."""
PLUGIN_REGISTRATION = pluginregistration_pb2.DESCRIPTOR.services_by_name["Registration"]
"""Of a plugin that the kubelet finds by its socket."""
DRA = {
    "v1.DRAPlugin": dra_v1_pb2.DESCRIPTOR.services_by_name["DRAPlugin"],
    "v1beta1.DRAPlugin": dra_v1beta1_pb2.DESCRIPTOR.services_by_name["DRAPlugin"],
}
"""Of a driver of dynamic resource allocation, by the names that it announces."""
DRA_HEALTH = {
    "v1.DRAResourceHealth": dra_health_v1_pb2.DESCRIPTOR.services_by_name["DRAResourceHealth"],
    "v1alpha1.DRAResourceHealth": dra_health_v1alpha1_pb2.DESCRIPTOR.services_by_name["DRAResourceHealth"],
}
"""Of the same: how its devices are."""


def serve(service: ServiceDescriptor, functions: Mapping[str, Callable[[Any, grpc.ServicerContext], Any]]) -> Any:
    """Return a handler for ``grpc.Server.add_generic_rpc_handlers`` that answers every method by its function.

    A function takes the request and the context, and returns the response (an iterator of responses for a stream).
    Raises KeyError for a method without a function.
    """
    handlers = {}
    for each in service.methods:
        make = grpc.unary_stream_rpc_method_handler if each.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[each.name] = make(
            functions[each.name],
            request_deserializer=GetMessageClass(each.input_type).FromString,
            response_serializer=GetMessageClass(each.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def method(channel: grpc.Channel, service: ServiceDescriptor, name: str) -> Callable[..., Any]:
    """Return what calls a method over a channel: ``call(request, timeout=seconds)``; raises KeyError for no method."""
    found = service.methods_by_name[name]
    make = channel.unary_stream if found.server_streaming else channel.unary_unary
    return make(
        f"/{service.full_name}/{name}",
        request_serializer=GetMessageClass(found.input_type).SerializeToString,
        response_deserializer=GetMessageClass(found.output_type).FromString,
    )


def open_channel(path: str, *options: tuple[str, Any]) -> grpc.Channel:
    """Return a new connection to a socket; one of an earlier attempt, with its back-off, is never reused."""
    ours = (("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1))
    return grpc.insecure_channel(f"unix:{path}", [*ours, *options])


def give_up(server: grpc.Server) -> None:
    """End a server that could not be set up completely.

    A server that never started cannot be stopped and would abort children that are forked later.  So it is started
    first.
    """
    with contextlib.suppress(ValueError):  # it has been
        server.start()
    server.stop(None).wait()
