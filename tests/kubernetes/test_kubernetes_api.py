"""The kubelet's interfaces: the committed modules are the generated ones, and they speak over a real socket."""

import subprocess
import sys
from pathlib import Path

from ocigpu.kubernetes.api import deviceplugin_pb2, services
from ocigpu.kubernetes.node.devices import PluginDevice
from ocigpu.kubernetes.plugin.server import device_list

PACKAGE = Path(services.__file__).parent
SOURCES = PACKAGE.parents[2]

CONVERSATION = """\
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from google.protobuf.message_factory import GetMessageClass
from ocigpu.kubernetes.api import deviceplugin_pb2 as pb
from ocigpu.kubernetes.api.services import DEVICE_PLUGIN, REGISTRATION, method, serve

def watch(request, context):
    yield pb.ListAndWatchResponse(devices=[pb.Device(ID="GPU-1", health="Healthy")])
    yield pb.ListAndWatchResponse()

def allocate(request, context):
    ids = ",".join(request.container_requests[0].devices_ids)
    return pb.AllocateResponse(container_responses=[pb.ContainerAllocateResponse(envs={"IDS": ids})])

def refuse(request, context):
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, "unknown device")

functions = dict.fromkeys(DEVICE_PLUGIN.methods_by_name, refuse) | {"ListAndWatch": watch, "Allocate": allocate}
server = grpc.server(ThreadPoolExecutor(4))
server.add_generic_rpc_handlers((serve(DEVICE_PLUGIN, functions),))
server.add_insecure_port("unix://" + sys.argv[1])
server.start()
with grpc.insecure_channel("unix://" + sys.argv[1]) as channel:
    print([len(each.devices) for each in method(channel, DEVICE_PLUGIN, "ListAndWatch")(pb.Empty(), timeout=60)])
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["a", "b"])])
    answer = method(channel, DEVICE_PLUGIN, "Allocate")(request, timeout=60)
    print(dict(answer.container_responses[0].envs))
    for service, name in ((DEVICE_PLUGIN, "PreStartContainer"), (REGISTRATION, "Register")):
        try:
            method(channel, service, name)(GetMessageClass(service.methods_by_name[name].input_type)(), timeout=60)
        except grpc.RpcError as error:
            print(error.code().name)
server.stop(None)
"""


def test_the_committed_modules_are_those_that_protoc_makes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCES}"]
    command += [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", *map(str, PACKAGE.glob("*.proto"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_text() for path in (tmp_path / "ocigpu/kubernetes/api").iterdir()}
    committed = {path.name: path.read_text() for path in PACKAGE.glob("*_pb2.py*")}
    assert len(made) == 2 * len(list(PACKAGE.glob("*.proto")))
    assert made == committed, "run: make protocols"


def test_services_and_methods_have_the_published_names() -> None:
    declared = {
        service.full_name: [f"{each.name}{'*' if each.server_streaming else ''}" for each in service.methods]
        for service in (services.REGISTRATION, services.DEVICE_PLUGIN, services.POD_RESOURCES)
    }
    assert declared == {
        "v1beta1.Registration": ["Register"],
        "v1beta1.DevicePlugin": [
            "GetDevicePluginOptions", "ListAndWatch*", "GetPreferredAllocation", "Allocate", "PreStartContainer",
        ],
        "v1.PodResourcesLister": ["List", "GetAllocatableResources", "Get"],
    }  # fmt: skip


def test_a_response_has_the_published_field_numbers_on_the_wire() -> None:
    response = deviceplugin_pb2.ContainerAllocateResponse(
        envs={"A": "b"},
        mounts=[{"container_path": "/c", "host_path": "/h", "read_only": True}],
        devices=[{"container_path": "/dev/c", "host_path": "/dev/h", "permissions": "rw"}],
        annotations={"k": "v"},
        cdi_devices=[{"name": "v/c=n"}],
    )
    assert response.SerializeToString(deterministic=True) == (
        b"\x0a\x06\x0a\x01A\x12\x01b"
        b"\x12\x0a\x0a\x02/c\x12\x02/h\x18\x01"
        b"\x1a\x14\x0a\x06/dev/c\x12\x06/dev/h\x1a\x02rw"
        b"\x22\x06\x0a\x01k\x12\x01v"
        b"\x2a\x07\x0a\x05v/c=n"
    )


def test_a_server_and_a_client_speak_over_a_socket(tmp_path: Path) -> None:
    """In a process of its own: gRPC starts threads, and the test process forks."""
    command = [sys.executable, "-c", CONVERSATION, str(tmp_path / "plugin.sock")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[1, 0]", "{'IDS': 'a,b'}", "INVALID_ARGUMENT", "UNIMPLEMENTED"], done.stderr


def test_records_become_messages() -> None:
    devices = [
        PluginDevice("a::0", "a", "a", "0", numa=1),
        PluginDevice("b", "b", "b", "1", error="lost"),
        PluginDevice("c", "c", "c", "2", numa=0),
    ]
    listed = device_list(devices)
    assert [(each.ID, each.health) for each in listed.devices] == [
        ("a::0", "Healthy"), ("b", "Unhealthy"), ("c", "Healthy"),
    ]  # fmt: skip
    assert [[node.ID for node in each.topology.nodes] for each in listed.devices] == [[1], [], [0]]
    assert not listed.devices[1].HasField("topology")
