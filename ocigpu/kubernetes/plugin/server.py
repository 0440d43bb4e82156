"""One resource's gRPC server: answers the kubelet, and registers with it.

gRPC answers in threads of its own.  What they read is one :class:`Offer`, replaced as a whole.  Everything else is
called by the plugin's main thread.
Sources: k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1 (api.proto, constants.go).
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import grpc

from ocigpu.core.errors import OcigpuError, RequestError, as_own_error, printable
from ocigpu.core.settings import Settings
from ocigpu.kubernetes.api import deviceplugin_pb2 as pb
from ocigpu.kubernetes.api.listener import MAX_STREAMS, Feed, Listener, why
from ocigpu.kubernetes.api.services import DEVICE_PLUGIN, REGISTRATION, method, open_channel, serve
from ocigpu.kubernetes.leases.gate import LeaseGate
from ocigpu.kubernetes.node.config import Configuration
from ocigpu.kubernetes.node.devices import PluginDevice, Resource
from ocigpu.kubernetes.node.reading import KubernetesNode
from ocigpu.kubernetes.plugin.allocate import allocate
from ocigpu.kubernetes.plugin.preferred import prefer
from ocigpu.system.service import Backoff, ServiceLog

WORKERS = 2 * MAX_STREAMS
SELF_DIAL = 5.0
REGISTER = 20.0
"""Seconds: the kubelet dials back before it answers, and gives that 10 s."""
FIRST_RETRY, LONGEST_RETRY = 1.0, 30.0
LASTING = 300.0
"""Seconds after which a registration was a good one."""
_STATUS = {RequestError: grpc.StatusCode.INVALID_ARGUMENT, OcigpuError: grpc.StatusCode.INTERNAL}
"""Of errors; an OcigpuError of no kind is a defect."""


class Offer(NamedTuple):
    """What a server answers from; the resource has the devices' health."""

    resource: Resource
    node: KubernetesNode
    configuration: Configuration
    settings: Settings
    gate: LeaseGate | None = None


def socket_name(resource: str) -> str:
    """Return the name of a resource's socket: nvidia.com/mig-1g.5gb is nvidia-mig-1g.5gb.sock."""
    domain, _, name = resource.rpartition("/")
    return f"{domain.partition('.')[0]}-{name}.sock"


class ResourceServer:
    """Serves one resource on its own socket beside the kubelet's."""

    def __init__(self, offer: Offer, directory: str, log: ServiceLog) -> None:
        self.offer = offer
        self.name = offer.resource.name
        self.path = os.path.join(directory, socket_name(self.name))
        self._listener = Listener(self.path, f"{self.path.removesuffix('.sock')}.new")
        self._log = log
        self._devices = Feed()
        self._devices.tell(offer.resource.devices)
        self.owns_socket = self._listener.owns_socket

    # life

    def start(self) -> None:
        """Listen and prove that it answers; see :meth:`Listener.start`.  Raises HostError (OCIGPU-KUBE-3)."""
        self._devices.end(False)
        self._listener.start([serve(DEVICE_PLUGIN, self._functions())], WORKERS, _dial)

    def stop(self, gone: bool = False) -> None:
        """End all calls and remove the socket; with ``gone``, first report to the kubelet that no devices are left."""
        if not self.running:
            return
        if gone:
            self._devices.tell(())
        self._devices.end()
        if problem := self._listener.stop():
            self._log("debug", problem)

    @property
    def running(self) -> bool:
        """Whether it listens."""
        return self._listener.running

    @property
    def is_followed(self) -> bool:
        """Whether the kubelet listens: without a stream it holds all devices for unhealthy."""
        return self._devices.is_followed

    def break_off(self) -> None:
        """End the kubelet's streams, so that it takes another registration for a new beginning."""
        self._devices.break_off()

    def update(self, offer: Offer) -> bool:
        """Answer from another offer; returns whether devices or their health changed for the kubelet."""
        self.offer = offer
        return self._devices.tell(offer.resource.devices)

    # what the kubelet calls

    def _functions(self) -> dict[str, Callable[[Any, Any], Any]]:
        return {
            "GetDevicePluginOptions": lambda _request, _context: plugin_options(),
            "ListAndWatch": self._list_and_watch,
            "GetPreferredAllocation": self._answering(self._prefer),
            "Allocate": self._answering(self._allocate),
            "PreStartContainer": self._answering(self._pre_start),
        }

    def _answering(self, function: Callable[[Offer, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a method whose errors are one line for the pod's event, and one in the log."""

        def answer(request: Any, context: Any) -> Any:
            try:
                return function(self.offer, request)
            except Exception as error:  # noqa: BLE001 - also a defect: the kubelet hears of it, the next call works
                own = as_own_error(error)
                text = printable(own.line, 1000)
                self._log("warning", f"{self.name}: {text}", resource=self.name)
                return context.abort(_STATUS.get(type(own), grpc.StatusCode.FAILED_PRECONDITION), text)

        return answer

    def _list_and_watch(self, _request: Any, context: Any) -> Iterator[pb.ListAndWatchResponse]:
        return map(device_list, self._devices.follow(context))

    def _prefer(self, offer: Offer, request: Any) -> pb.PreferredAllocationResponse:
        policy = offer.configuration.options.shared_devices_allocation_policy
        answers = []
        for wanted in request.container_requests:
            ids = (wanted.available_deviceIDs, wanted.must_include_deviceIDs, wanted.allocation_size)
            chosen = offer.gate.prefer(offer.resource.devices, *ids) if offer.gate else ()
            scores = offer.node.of(offer.resource.vendor).scores
            answers.append(chosen or prefer(offer.resource.devices, *ids, scores, policy))
        messages = [pb.ContainerPreferredAllocationResponse(deviceIDs=ids) for ids in answers]
        return pb.PreferredAllocationResponse(container_responses=messages)

    def _allocate(self, offer: Offer, request: Any) -> pb.AllocateResponse:
        responses = []
        for wanted in request.container_requests:
            ids = list(wanted.devices_ids)
            facts = offer.node.of(offer.resource.vendor).facts
            response = allocate(offer.resource, ids, facts, offer.configuration, offer.settings)
            wanted_devices = [device for device in offer.resource.devices if device.id in ids]
            if offer.gate and (cost := offer.gate.reserve(wanted_devices)):
                self._log("warning", f"{self.name}: {', '.join(ids)}: {cost}", resource=self.name)
            responses.append(response)
            self._log(
                "info", f"{self.name}: allocated to a container: {', '.join(ids)}", resource=self.name, devices=ids
            )
        return pb.AllocateResponse(container_responses=responses)

    def _pre_start(self, offer: Offer, request: Any) -> pb.PreStartContainerResponse:
        """Do nothing: the kubelet calls this only if the options request it."""
        known = {device.id for device in offer.resource.devices}
        unknown = [id_ for id_ in request.devices_ids if id_ not in known]
        if unknown:
            raise RequestError("OCIGPU-KUBE-2", f"start of a container: unknown device {printable(unknown[0], 120)}")
        return pb.PreStartContainerResponse()


def plugin_options() -> pb.DevicePluginOptions:
    """Return the capabilities of all our servers."""
    return pb.DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=True)


def _dial(channel: grpc.Channel) -> None:
    """Call a server as the kubelet will; raises grpc.RpcError."""
    method(channel, DEVICE_PLUGIN, "GetDevicePluginOptions")(pb.Empty(), timeout=SELF_DIAL)


class Registration:
    """A server's registration with the kubelet, tried until it succeeds; never waits.

    ``wake``: called from another thread when there is an answer.  ``listens``: seconds after which a kubelet that has
    taken a registration listens.
    """

    def __init__(self, kubelet: str, resource: str, wake: Callable[[], None], log: ServiceLog, listens: float) -> None:
        self._listens = listens
        self._kubelet = kubelet
        self._resource = resource
        self._wake = wake
        self._log = log
        self._with: tuple[int, ...] = ()
        self._asked: tuple[int, ...] = ()
        self._channel: Any = None
        self._call: Any = None
        self._retry = Backoff(FIRST_RETRY, LONGEST_RETRY)
        self._left = Backoff(FIRST_RETRY, LONGEST_RETRY)
        self._since = 0.0

    def again(self) -> None:
        """Register once more, now: the kubelet is another, or the server is."""
        self.cancel()
        self._with = ()
        self._retry.reset()

    def holds(self, now: float) -> bool:
        """Whether the kubelet has taken it, long enough ago to listen."""
        return bool(self._with) and self._call is None and now >= self._since + self._listens

    def renew(self, now: float, why_so: str) -> None:
        """Register once more, since the kubelet has not what it took.

        Two plugins of one resource would take it from each other for ever: each time it waits longer.
        """
        if now > self._since + LASTING:
            self._left.reset()
        self._with = ()
        seconds = self._left.failed(now)
        self._retry.due = self._left.due
        self._say("warning", f"{why_so}: registering again in {seconds:.0f} s")

    def step(self, now: float, kubelet: tuple[int, ...]) -> None:
        """Do the work that is due; ``kubelet``: identity of its socket, () while it does not exist."""
        if self._call is not None:
            if not self._call.done():
                return
            self._finish(now)
        if not kubelet:
            self._say("info", f"waiting for the kubelet: there is no {self._kubelet}")
            self._with = ()
            self._retry.reset()
        elif self._with != kubelet and (now >= self._retry.due or self._asked != kubelet):
            self._begin(kubelet)

    def _begin(self, kubelet: tuple[int, ...]) -> None:
        request = pb.RegisterRequest(
            version=VERSION,
            endpoint=socket_name(self._resource),
            resource_name=self._resource,
            options=plugin_options(),
        )
        self._asked = kubelet
        self._channel = open_channel(self._kubelet)
        register: Any = method(self._channel, REGISTRATION, "Register")
        self._call = register.future(request, timeout=REGISTER)
        self._call.add_done_callback(lambda _call: self._wake())

    def _finish(self, now: float) -> None:
        error = self._call.exception()
        if error is None:
            self._with, self._since = self._asked, now
            self._retry.reset()
            self._log.forget(f"registration of {self._resource}")
            self._say("info", "registered with the kubelet")
        else:
            self._with = ()
            self._retry.failed(now)
            self._say("warning", f"the kubelet at {self._kubelet} did not take it: {printable(why(error), 300)}")
        self.cancel()

    def _say(self, level: str, text: str) -> None:
        """Log a line unless it was the last one."""
        topic = f"registration of {self._resource}"
        self._log.once(topic, level, f"{self._resource}: {text}", resource=self._resource)

    def cancel(self) -> None:
        """Cancel the call under way."""
        if self._channel is not None:
            self._channel.close()
        self._call = self._channel = None


VERSION = "v1beta1"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"


def device_list(devices: Iterable[PluginDevice]) -> pb.ListAndWatchResponse:
    """Return the message that replaces the kubelet's whole list of a resource's devices."""
    return pb.ListAndWatchResponse(devices=[_device(device) for device in devices])


def _device(device: PluginDevice) -> pb.Device:
    nodes = [pb.NUMANode(ID=device.numa)] if device.numa >= 0 else []
    topology = pb.TopologyInfo(nodes=nodes) if nodes else None
    return pb.Device(ID=device.id, health=UNHEALTHY if device.error else HEALTHY, topology=topology)
