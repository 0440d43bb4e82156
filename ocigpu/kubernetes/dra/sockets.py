"""The driver's two sockets: one registers it with the kubelet, on the other claims are prepared.

The service answers before the registrar's socket appears, because the kubelet uses a socket as soon as it finds it.
With ``instance`` in the names of the sockets an old and a new driver can run at the same time; the kubelet uses the
newest and falls back to the other (1.33).  Sources: k8s.io/kubelet pkg/apis (pluginregistration/v1, dra/v1 and v1beta1,
dra-health), the helper kubeletplugin of k8s.io/dynamic-resource-allocation (names of directories and sockets, one claim
after the other).
"""

import base64
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grpc
from google.protobuf.message_factory import GetMessageClass

from ocigpu.core.errors import HostError, as_own_error, printable
from ocigpu.kubernetes.api import pluginregistration_pb2 as registration_pb
from ocigpu.kubernetes.api.listener import MAX_PATH, MAX_STREAMS, Feed, Listener
from ocigpu.kubernetes.api.services import DRA, DRA_HEALTH, PLUGIN_REGISTRATION, method, serve
from ocigpu.kubernetes.dra.claims import ClaimRef
from ocigpu.kubernetes.dra.metrics import DraMetrics
from ocigpu.kubernetes.dra.prepare import PreparedDevice
from ocigpu.system.service import ServiceLog

WORKERS = 10
"""Claims of different pods come at the same time; they wait for each other, with their threads."""
MAX_CLAIMS = 1000
"""Of one call."""
PROBE = 5.0
HEALTH_TIMEOUT = 60
"""Seconds after which the kubelet takes the health of a device for unknown, unless it hears again."""
HEALTH_REPEAT = HEALTH_TIMEOUT / 3
MAX_MESSAGE = 1024
"""Characters of a health message that the kubelet shows."""


class DeviceHealth(NamedTuple):
    """How a device is; ``message``: why it is not well, ``changed``: since when, in seconds since 1970."""

    device: str
    healthy: bool
    message: str = ""
    changed: int = 0


class KubeletDirectories(NamedTuple):
    """The kubelet's: ``registry``, where it looks for plugins, and ``plugins``, where each has a directory."""

    registry: str = "/var/lib/kubelet/plugins_registry"
    plugins: str = "/var/lib/kubelet/plugins"


def short_name(directory: str, begin: str, instance: str, end: str) -> str:
    """Return the path of a socket: parts of its name joined by hyphens, a digest for the instance where it is too long.

    A dot and ten more bytes are left for the name that it has until it answers.
    """
    name = "-".join(filter(None, (begin, instance))) + end
    if instance and len(os.fsencode(f"{directory}/{name}")) > MAX_PATH - 1:
        digest = base64.urlsafe_b64encode(hashlib.sha256(instance.encode()).digest())[:12].decode()
        name = f"{begin}-{digest}{end}"
    return f"{directory}/{name}"


class DraServer:
    """Serves the kubelet; ``prepare`` and ``unprepare`` are called by several threads and raise OcigpuError."""

    def __init__(
        self,
        driver: str,
        pool: str,
        directories: KubeletDirectories,
        prepare: "Callable[[ClaimRef], Sequence[PreparedDevice]]",
        unprepare: "Callable[[ClaimRef], None]",
        log: ServiceLog,
        instance: str = "",
        metrics: DraMetrics | None = None,
    ) -> None:
        self.driver, self.pool = driver, pool
        self._prepare, self._unprepare, self._log = prepare, unprepare, log
        self._metrics = metrics or DraMetrics(driver, pool, dict)
        self._directories = directories
        self.service = Listener(
            short_name(f"{directories.plugins}/{driver}", "dra", instance, ".sock"), code="OCIGPU-DRA-6"
        )
        self.registrar = Listener(short_name(directories.registry, driver, instance, "-reg.sock"), code="OCIGPU-DRA-6")
        self.refusal: str | None = None
        """Why the kubelet did not take it, "" when it did, None while it has not said."""
        self._health = Feed(HEALTH_REPEAT)
        self.tell_health: Callable[[tuple[DeviceHealth, ...]], bool] = self._health.tell
        """Tells the kubelet how all devices are, unless it knows."""

    # life

    def start(self) -> None:
        """Serve, then register; raises HostError (OCIGPU-DRA-6)."""
        self._health.end(False)
        handlers = [serve(service, self._functions(name)) for name, service in DRA.items()]
        handlers += [serve(service, {"NodeWatchResources": self._watch(service)}) for service in DRA_HEALTH.values()]
        self.service.start(handlers, WORKERS + MAX_STREAMS, _probe_service)
        try:
            functions = {"GetInfo": self._info, "NotifyRegistrationStatus": self._notified}
            self.registrar.start([serve(PLUGIN_REGISTRATION, functions)], 2, _probe_registrar)
        except HostError:
            self.service.stop()
            raise

    def stop(self, seconds: float) -> None:
        """Unregister, end the streams, and grant running calls this much time."""
        self.registrar.stop()
        self._health.end()
        self.service.stop(seconds)

    @property
    def running(self) -> bool:
        """Whether the kubelet can find and call it: a kubelet that starts removes the sockets of plugins."""
        return all(each.running and each.owns_socket() for each in (self.service, self.registrar))

    # what the kubelet calls

    def _info(self, _request: Any, _context: Any) -> Any:
        return registration_pb.PluginInfo(
            type="DRAPlugin",
            name=self.driver,
            endpoint=self.service.path,
            supported_versions=[*DRA, *DRA_HEALTH],
        )

    def _notified(self, request: Any, _context: Any) -> Any:
        self.refusal = "" if request.plugin_registered else printable(request.error, 300) or "without a reason"
        if request.plugin_registered:
            self._log.once("registration", "info", f"{self.driver}: registered with the kubelet")
        else:
            self._log.once("registration", "warning", f"the kubelet did not take {self.driver}: {request.error}")
        return registration_pb.RegistrationStatusResponse()

    def _functions(self, version: str) -> "dict[str, Callable[[Any, Any], Any]]":
        """Return both calls of a version: the messages of all have the same fields."""
        methods = DRA[version].methods_by_name
        prepared = GetMessageClass(methods["NodePrepareResources"].output_type)
        unprepared = GetMessageClass(methods["NodeUnprepareResources"].output_type)

        def prepare(request: Any, _context: Any) -> Any:
            answer: Any = prepared()
            for claim in _claims(request):
                entry = answer.claims[claim.uid]
                devices, entry.error = self._try("prepare", self._prepare, claim)
                for each in devices or ():
                    device = entry.devices.add(
                        request_names=[each.request],
                        pool_name=each.pool,
                        device_name=each.device,
                        cdi_device_ids=each.cdi,
                    )
                    if each.share:
                        device.share_id = each.share
            return answer

        def unprepare(request: Any, _context: Any) -> Any:
            answer: Any = unprepared()
            for claim in _claims(request):
                answer.claims[claim.uid].error = self._try("unprepare", self._unprepare, claim)[1]
            return answer

        return {
            "NodePrepareResources": self._measured("prepare", prepare),
            "NodeUnprepareResources": self._measured("unprepare", unprepare),
        }

    def _measured(self, operation: str, function: "Callable[[Any, Any], Any]") -> "Callable[[Any, Any], Any]":
        """Return a function whose calls are counted, except for those without a claim, which are our own probes."""

        def answer(request: Any, context: Any) -> Any:
            if not request.claims:
                return function(request, context)
            with self._metrics.call(operation):
                return function(request, context)

        return answer

    def _try(self, operation: str, function: "Callable[[ClaimRef], Any]", claim: ClaimRef) -> tuple[Any, str]:
        """Return a function's result, or the error of this claim in one line; the other claims of the call continue."""
        try:
            return function(claim), ""
        except Exception as error:  # noqa: BLE001 - also a defect: the kubelet hears of it, the next call works
            own = as_own_error(error)
            text = printable(own.line, 1000)
            self._metrics.failed(operation, own.code)
        self._log("warning", text, claim=printable(claim.uid, 63))
        return None, text

    def _watch(self, service: Any) -> "Callable[[Any, Any], Iterator[Any]]":
        response = GetMessageClass(service.methods_by_name["NodeWatchResources"].output_type)

        def watch(_request: Any, context: Any) -> Iterator[Any]:
            return (self._health_message(response, health) for health in self._health.follow(context))

        return watch

    def _health_message(self, response: Any, health: Sequence[DeviceHealth]) -> Any:
        message = response()
        for each in health:
            entry = message.devices.add(
                health=1 if each.healthy else 2,
                last_updated_time=each.changed,
                health_check_timeout_seconds=HEALTH_TIMEOUT,
                message=cut(each.message),
            )
            entry.device.pool_name, entry.device.device_name = self.pool, each.device
        return message


def cut(text: str) -> str:
    """Return a health message as long as the kubelet takes it."""
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."


def _claims(request: Any) -> list[ClaimRef]:
    return [ClaimRef(each.namespace, each.uid, each.name) for each in request.claims[:MAX_CLAIMS]]


def _probe_service(channel: grpc.Channel) -> None:
    """Call as the kubelet will, without a claim; raises grpc.RpcError."""
    service = DRA["v1.DRAPlugin"]
    request = GetMessageClass(service.methods_by_name["NodePrepareResources"].input_type)()
    method(channel, service, "NodePrepareResources")(request, timeout=PROBE)


def _probe_registrar(channel: grpc.Channel) -> None:
    method(channel, PLUGIN_REGISTRATION, "GetInfo")(registration_pb.InfoRequest(), timeout=PROBE)
