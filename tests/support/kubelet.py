"""A kubelet's device manager for the tests: the real protocol over real sockets, in a process of its own.

What it does and in which order: kubernetes/pkg/kubelet/cm/devicemanager and k8s.io/kubelet/pkg/apis/deviceplugin.
It runs as a process of its own, because gRPC starts threads and the test process forks::

    python kubelet.py DIRECTORY < calls > answers

A call is a line ``[method, arguments...]``, an answer a line ``{"result": ...}`` or ``{"error": text}``.
"""

import base64
import json
import os
import re
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from answering import answer_calls
from google.protobuf.json_format import MessageToDict

from ocigpu.kubernetes.api import deviceplugin_pb2 as pb
from ocigpu.kubernetes.api import podresources_pb2 as pods_pb
from ocigpu.kubernetes.api.services import DEVICE_PLUGIN, POD_RESOURCES, REGISTRATION, method, open_channel, serve

CHECKPOINT = "kubelet_internal_checkpoint"
DIAL_SECONDS = 10
RESOURCE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")

Response = dict[str, Any]


class AdmissionError(Exception):
    """Why a pod fails: the text that its status gets."""


class Endpoint:
    """One registration of a plugin: the connection to it and the devices that it listed last."""

    def __init__(self, resource: str, path: Path) -> None:
        self.resource = resource
        self.channel = open_channel(str(path))  # Go's clients share no connection either
        self.options = pb.DevicePluginOptions()
        self.health: dict[str, str] = {}
        self.numa: dict[str, list[int]] = {}
        self.lists = 0
        self.ended = ""

    def call(self, name: str, request: Any, timeout: float | None = None) -> Any:
        return method(self.channel, DEVICE_PLUGIN, name)(request, timeout=timeout)


class Kubelet:
    """The device manager.  ``journal``: what happened, in order."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.endpoints: dict[str, Endpoint] = {}
        self.allocations: dict[tuple[str, str], dict[str, tuple[list[str], pb.ContainerAllocateResponse]]] = {}
        self.finished: set[tuple[str, str]] = set()
        self.capacities: dict[str, set[str]] = {}
        self.journal: list[str] = []
        self.refuse = ""
        self.keeps_checkpoint = True
        self.keeps_streams = False
        self.residents: list[str] = []
        self.knows_pods = True
        self.server: grpc.Server | None = None
        self.pods: grpc.Server | None = None
        self.pods_path = ""

    # life

    def start(self) -> None:
        """Remove every socket, read the checkpoint, listen."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        self._read_checkpoint()
        self.server = grpc.server(ThreadPoolExecutor(8))
        self.server.add_generic_rpc_handlers((serve(REGISTRATION, {"Register": self._register}),))
        self.server.add_insecure_port(f"unix://{self.directory}/kubelet.sock")
        self.server.start()

    def stop(self) -> None:
        assert self.server
        self.server.stop(None).wait()
        if self.pods:
            self.pods.stop(None).wait()
        for endpoint in self.endpoints.values():
            endpoint.channel.close()

    def restart(self, knows_pods: bool = True) -> None:
        """End as by systemctl restart: connections break, the checkpoint stays; then start again.

        ``knows_pods``: the API server has told it which pods it has; see :meth:`learn_pods`.
        """
        self.stop()
        with self.lock:
            self.endpoints, self.allocations, self.finished = {}, {}, set()
            self.knows_pods = knows_pods
            self.journal.append("restart")
        self.start()
        if self.pods_path:
            self.serve_pods(self.pods_path)

    def learn_pods(self) -> None:
        """The API server has told it which pods it has."""
        self.knows_pods = True

    def add_resident(self, pod: str) -> None:
        """Add a pod without devices, as of a DaemonSet."""
        self.residents.append(pod)

    def restart_during_calls(self, resource: str, ids: list[str]) -> int:
        """Restart while containers are being admitted; returns how many calls were answered before."""
        endpoint = self.endpoints[resource]
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
        answered = 0

        def call() -> None:
            nonlocal answered
            try:
                while True:
                    endpoint.call("Allocate", request, 10)
                    answered += 1
            except (grpc.RpcError, ValueError):  # the connection broke, in a call or between two
                return

        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        while answered < 20 and any(caller.is_alive() for caller in callers):
            time.sleep(0.01)
        self.restart()
        for caller in callers:
            caller.join()
        return answered

    def _register(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.refuse:
            context.abort(grpc.StatusCode.UNKNOWN, self.refuse)
        if request.version != "v1beta1":
            context.abort(grpc.StatusCode.UNKNOWN, f"requested API version {request.version!r} is not supported")
        if not RESOURCE_NAME.fullmatch(request.resource_name) or "kubernetes.io" in request.resource_name:
            context.abort(grpc.StatusCode.UNKNOWN, f"the ResourceName {request.resource_name!r} is invalid")
        endpoint = Endpoint(request.resource_name, self.directory / request.endpoint)
        try:  # before the answer: a plugin that serves nothing meanwhile waits for itself
            endpoint.options = endpoint.call("GetDevicePluginOptions", pb.Empty(), DIAL_SECONDS)
        except grpc.RpcError as error:
            endpoint.channel.close()
            context.abort(grpc.StatusCode.UNKNOWN, f"failed to dial device plugin: {error.code()}")
        with self.changed:
            self.journal.append(f"registered {request.resource_name} {request.endpoint}")
            old = self.endpoints.get(request.resource_name)
            self.endpoints[request.resource_name] = endpoint
            self.changed.notify_all()
        if old and not self.keeps_streams:
            old.channel.close()
        threading.Thread(target=self._listen, args=(endpoint,), daemon=True).start()
        return pb.Empty()

    def _listen(self, endpoint: Endpoint) -> None:
        try:
            for message in endpoint.call("ListAndWatch", pb.Empty()):
                with self.changed:
                    known = self._current(endpoint)
                    known.health = {device.ID: device.health for device in message.devices}
                    known.numa = {d.ID: [node.ID for node in d.topology.nodes] for d in message.devices}
                    known.lists += 1
                    self.capacities[endpoint.resource] = set(endpoint.health)
                    self.changed.notify_all()
            ended = "closed"
        except grpc.RpcError as error:
            ended = str(error.code())
        except ValueError:  # the channel was closed before the call
            ended = "closed"
        with self.changed:
            self._current(endpoint).ended = ended
            endpoint.channel.close()
            self.changed.notify_all()

    def _current(self, endpoint: Endpoint) -> Endpoint:
        """Return whom a stream's news is about: from 1.25 on it is whoever has the resource."""
        return self.endpoints.get(endpoint.resource, endpoint) if self.keeps_streams else endpoint

    # accounting

    def devices(self, resource: str) -> dict[str, str]:
        """Return the health of each device: whatever is not "Healthy" is not, and nothing is once the stream ended."""
        endpoint = self.endpoints.get(resource)
        if endpoint is None or endpoint.ended:
            return dict.fromkeys(self.capacities.get(resource, ()), "Unhealthy")
        return {id_: "Healthy" if health == "Healthy" else "Unhealthy" for id_, health in endpoint.health.items()}

    def node_status(self) -> dict[str, list[int]]:
        """Return [capacity, allocatable] by resource."""
        with self.lock:
            names = {*self.endpoints, *self.capacities}
            states = {name: list(self.devices(name).values()) for name in sorted(names)}
        return {name: [len(each), each.count("Healthy")] for name, each in states.items()}

    def wait_for(self, expected: dict[str, list[int]], seconds: float = 150) -> dict[str, list[int]]:
        """Wait until the status of these resources is as expected; return it as it is at last."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while any(self.node_status().get(name, [0, 0]) != pair for name, pair in expected.items()):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(min(left, 0.2))
            return self.node_status()

    def topology(self, resource: str) -> dict[str, list[int]]:
        return self.endpoints[resource].numa

    def options(self, resource: str) -> dict[str, bool]:
        found = self.endpoints[resource].options
        return {"pre_start": found.pre_start_required, "preferred": found.get_preferred_allocation_available}

    def read_journal(self) -> list[str]:
        return list(self.journal)

    def keep_streams(self) -> None:
        """Do as kubelets from 1.25 on: the stream of a plugin whose resource another one registers goes on.

        When either ends, all devices of the resource are unhealthy (plugin/v1beta1/handler.go, PluginDisconnected).
        """
        self.keeps_streams = True

    def set_refusal(self, text: str) -> None:
        """Answer every registration with this error; "" answers them as usual."""
        self.refuse = text

    # allocation

    def _in_use(self, resource: str, pod: str) -> tuple[set[str], set[str]]:
        """Return the devices in use, and those of finished init containers of the pod, which it uses again."""
        used: set[str] = set()
        again: set[str] = set()
        for key, resources in self.allocations.items():
            ids = set(resources[resource][0]) if resource in resources else set()
            (again if key in self.finished and key[0] == pod else used).update(ids)
        return used | again, again

    def _choose(self, resource: str, count: int, pod: str) -> list[str]:
        endpoint = self.endpoints.get(resource)
        if endpoint is None:
            raise AdmissionError(f"cannot allocate unregistered device {resource}")
        healthy = {id_ for id_, health in self.devices(resource).items() if health == "Healthy"}
        if not healthy:
            raise AdmissionError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        used, again = self._in_use(resource, pod)
        chosen = sorted(again & healthy)[:count]
        needed = count - len(chosen)
        if not needed:
            return chosen
        free = healthy - used
        if len(free) < needed:
            text = f"requested number of devices unavailable for {resource}. Requested: {needed}, "
            raise AdmissionError(f"{text}Available: {len(free)}")
        if endpoint.options.get_preferred_allocation_available and len(free) > needed:
            request = pb.ContainerPreferredAllocationRequest(
                available_deviceIDs=[*free, *chosen], must_include_deviceIDs=chosen, allocation_size=count
            )
            reply = endpoint.call("GetPreferredAllocation", pb.PreferredAllocationRequest(container_requests=[request]))
            preferred = list(reply.container_responses[0].deviceIDs) if reply.container_responses else []
            self.journal.append(f"preferred {resource} {' '.join(preferred)}")
            wanted = [id_ for id_ in preferred if id_ in free][:needed]
            return chosen + wanted + sorted(free - set(wanted))[: needed - len(wanted)]
        return chosen + list(free)[:needed]

    def admit(self, pod: str, container: str, wanted: dict[str, int]) -> Response:
        """Return what a new container is given; raises AdmissionError, and then the pod has nothing."""
        return self._merged(self._admit(pod, container, wanted))

    def _admit(self, pod: str, container: str, wanted: dict[str, int]) -> dict[str, tuple[list[str], Any]]:
        merged: dict[str, tuple[list[str], Any]] = {}
        with self.lock:
            try:
                for resource, count in wanted.items():
                    ids = self._choose(resource, count, pod)
                    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
                    self.journal.append(f"allocate {resource} {' '.join(ids)}")
                    replies = self.endpoints[resource].call("Allocate", request).container_responses
                    if not replies:
                        raise AdmissionError(f"no containers return in allocation response {resource}")
                    merged[resource] = (ids, replies[0])
            except grpc.RpcError as error:
                text = f"rpc error: code = {error.code().name} desc = {error.details()}"
                raise AdmissionError(f"Allocate failed due to {text}, which is unexpected") from error
            self.allocations[pod, container] = merged
            self._write_checkpoint()
            return merged

    def allocate(self, resource: str, ids: list[str]) -> Response:
        """Ask for these very devices, whatever the accounting says."""
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
        return self._plain(self.endpoints[resource].call("Allocate", request).container_responses[0])

    def prefer(self, resource: str, available: list[str], must_include: list[str], size: int) -> list[str]:
        request = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must_include, allocation_size=size
        )
        reply = self.endpoints[resource].call(
            "GetPreferredAllocation", pb.PreferredAllocationRequest(container_requests=[request])
        )
        return list(reply.container_responses[0].deviceIDs)

    def start_container(self, pod: str, container: str) -> Response:
        """Start an admitted container once more: nothing is allocated, the kept response is used."""
        found = self.allocations[pod, container]
        for resource, (ids, _) in found.items():
            endpoint = self.endpoints.get(resource)
            if endpoint and endpoint.options.pre_start_required:
                self.journal.append(f"pre-start {resource}")
                endpoint.call("PreStartContainer", pb.PreStartContainerRequest(devices_ids=ids), 30)
        return self._merged(found)

    def pre_start(self, resource: str, ids: list[str]) -> None:
        self.endpoints[resource].call("PreStartContainer", pb.PreStartContainerRequest(devices_ids=ids), 30)

    def finish_init_container(self, pod: str, container: str) -> None:
        self.finished.add((pod, container))

    def delete(self, pod: str) -> None:
        """Nobody tells the plugin."""
        with self.lock:
            for key in [key for key in self.allocations if key[0] == pod]:
                del self.allocations[key]
            self._write_checkpoint()

    def held(self, pod: str) -> dict[str, list[str]]:
        """Return the devices of a pod by resource."""
        found: dict[str, list[str]] = {}
        for key, resources in self.allocations.items():
            for name, (ids, _) in resources.items() if key[0] == pod else ():
                found.setdefault(name, []).extend(ids)
        return found

    def soak(self, resource: str, rounds: int, sizes: list[int]) -> dict[str, int]:
        """Admit and delete so many pods, never more than fit, and check that no device is given away twice.

        The checkpoint is written at the end.
        """
        self.keeps_checkpoint = False
        alive: list[str] = []
        given = 0
        total = len(self.devices(resource))
        for number in range(rounds):
            size = sizes[number % len(sizes)]
            while total - sum(len(self.held(pod)[resource]) for pod in alive) < size:
                self.delete(alive.pop(0))
            pod = f"pod{number}"
            self._admit(pod, "main", {resource: size})
            alive.append(pod)
            everything = [id_ for each in alive for id_ in self.held(each)[resource]]
            assert len(everything) == len(set(everything)), everything
            given += size
        self.keeps_checkpoint = True
        for pod in alive:
            self.delete(pod)
        return {"pods": rounds, "devices": given}

    def _merged(self, responses: dict[str, tuple[list[str], Any]]) -> Response:
        """Join the responses of several resources: of equal names the first wins."""
        result: Response = {"envs": {}, "mounts": [], "devices": [], "annotations": {}, "cdi_devices": []}
        for _, message in responses.values():
            one = self._plain(message)
            for field in ("envs", "annotations"):
                result[field] = {**one[field], **result[field]}
            for field in ("mounts", "devices"):
                paths = {entry["container_path"] for entry in result[field]}
                result[field] += [entry for entry in one[field] if entry["container_path"] not in paths]
            result["cdi_devices"] += one["cdi_devices"]
        return result

    def _plain(self, message: Any) -> Response:
        found: Response = MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        found["cdi_devices"] = [device["name"] for device in found["cdi_devices"]]
        return found

    # checkpoint

    def _write_checkpoint(self) -> None:
        if not self.keeps_checkpoint:
            return
        entries = [
            {
                "PodUID": pod,
                "ContainerName": container,
                "ResourceName": resource,
                "DeviceIDs": {"-1": ids},
                "AllocResp": base64.b64encode(response.SerializeToString()).decode(),
            }
            for (pod, container), resources in self.allocations.items()
            for resource, (ids, response) in resources.items()
        ]
        registered = {name: sorted(ids) for name, ids in self.capacities.items()}
        data = {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": registered}, "Checksum": 0}
        path = self.directory / CHECKPOINT
        new = path.with_name("checkpoint.new")
        new.write_text(json.dumps(data))
        new.chmod(0o600)
        new.rename(path)

    def _read_checkpoint(self) -> None:
        path = self.directory / CHECKPOINT
        if not path.exists():
            return
        data = json.loads(path.read_text())["Data"]
        self.capacities = {name: set(ids) for name, ids in data["RegisteredDevices"].items()}
        for entry in data["PodDeviceEntries"]:
            ids = [id_ for each in entry["DeviceIDs"].values() for id_ in each]
            response = pb.ContainerAllocateResponse.FromString(base64.b64decode(entry["AllocResp"]))
            found = self.allocations.setdefault((entry["PodUID"], entry["ContainerName"]), {})
            found[entry["ResourceName"]] = (ids, response)

    # who has what, for monitors

    def serve_pods(self, path: str) -> None:
        """Serve the pod-resources interface, v1; a pod "space/name" is in namespace "space"."""
        self.pods_path = path
        self.pods = grpc.server(ThreadPoolExecutor(4))
        functions = {"List": self._list_pods, "Get": self._get_pod, "GetAllocatableResources": self._allocatable}
        self.pods.add_generic_rpc_handlers((serve(POD_RESOURCES, functions),))
        self.pods.add_insecure_port(f"unix://{path}")
        self.pods.start()

    def _pod(self, name: str) -> Any:
        space, _, short = name.rpartition("/")
        pod = pods_pb.PodResources(name=short, namespace=space or "default")
        for (owner, container), resources in self.allocations.items():
            if owner == name:
                given = [
                    pods_pb.ContainerDevices(resource_name=resource, device_ids=[id_])  # an entry for each NUMA node
                    for resource, (ids, _) in resources.items()
                    for id_ in ids
                ]
                pod.containers.append(pods_pb.ContainerResources(name=container, devices=given))
        return pod

    def _list_pods(self, _request: Any, _context: grpc.ServicerContext) -> Any:
        with self.lock:
            names = dict.fromkeys([*self.residents, *(pod for pod, _ in self.allocations)] if self.knows_pods else [])
            return pods_pb.ListPodResourcesResponse(pod_resources=[self._pod(name) for name in names])

    def _get_pod(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self.lock:
            for name in {pod for pod, _ in self.allocations}:
                found = self._pod(name)
                if (found.name, found.namespace) == (request.pod_name, request.pod_namespace):
                    return pods_pb.GetPodResourcesResponse(pod_resources=found)
        return context.abort(grpc.StatusCode.UNKNOWN, f"pod {request.pod_name} is not known")

    def _allocatable(self, _request: Any, _context: grpc.ServicerContext) -> Any:
        with self.lock:
            devices = [
                pods_pb.ContainerDevices(resource_name=name, device_ids=[id_])
                for name in self.endpoints
                for id_, health in self.devices(name).items()
                if health == "Healthy"
            ]
        return pods_pb.AllocatableResourcesResponse(devices=devices)


def main(directory: str) -> None:
    kubelet = Kubelet(Path(directory))
    kubelet.start()
    answer_calls(kubelet, AdmissionError)
    kubelet.stop()


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
