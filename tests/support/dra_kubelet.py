"""A kubelet's manager of dynamic resources for the tests: the real protocol over real sockets, in a process of its own.

What it does and in which order: kubernetes/pkg/kubelet/cm/dra and pkg/kubelet/pluginmanager.  Why it is a process:
see support/kubelet.py::

    python dra_kubelet.py DIRECTORY < calls > answers

A call is a line ``[method, arguments...]``, an answer a line ``{"result": ...}`` or ``{"error": text}``.
"""

import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
from answering import answer_calls
from google.protobuf.json_format import MessageToDict
from google.protobuf.message_factory import GetMessageClass

from ocigpu.kubernetes.api import pluginregistration_pb2 as registration_pb
from ocigpu.kubernetes.api.services import DRA, DRA_HEALTH, PLUGIN_REGISTRATION, method, open_channel

CALL_SECONDS = 45
"""What kubelets give a driver for one call."""


class DraPlugin:
    """One registration: what a driver said of itself, and the connection to its service."""

    def __init__(self, socket: Path, info: Any) -> None:
        self.socket, self.name, self.endpoint = socket, info.name, info.endpoint
        self.versions = list(info.supported_versions)
        self.channel = open_channel(info.endpoint)
        self.health: dict[str, dict[str, Any]] = {}
        self.lists = 0


class DraKubelet:
    """The manager; ``directory``: the kubelet's root."""

    def __init__(self, directory: Path) -> None:
        self.registry = directory / "plugins_registry"
        self.plugins: dict[str, list[DraPlugin]] = {}
        self.changed = threading.Condition()
        for name in ("plugins_registry", "plugins"):
            (directory / name).mkdir(parents=True, exist_ok=True)

    def find(self, seconds: float = 150, count: int = 1) -> list[dict[str, Any]]:
        """Wait until so many drivers have registered, look at the directory as its watcher does; return all of them."""
        deadline = time.monotonic() + seconds
        while True:
            present = {path for path in self.registry.iterdir() if self._is_plugin(path)}
            for name, plugins in self.plugins.items():
                self.plugins[name] = [plugin for plugin in plugins if plugin.socket in present]
            known = {plugin.socket for plugins in self.plugins.values() for plugin in plugins}
            for path in sorted(present - known, key=lambda path: path.lstat().st_ctime_ns):
                self._register(path)
            found = [plugin for plugins in self.plugins.values() for plugin in plugins]
            if len(found) == count or time.monotonic() > deadline:
                return [{"name": each.name, "endpoint": each.endpoint, "versions": each.versions} for each in found]
            time.sleep(0.05)

    def _is_plugin(self, path: Path) -> bool:
        """The watcher takes every socket whose name has no dot first."""
        try:
            return stat.S_ISSOCK(path.lstat().st_mode) and not path.name.startswith(".")
        except FileNotFoundError:
            return False

    def _register(self, path: Path) -> None:
        try:
            with open_channel(str(path)) as channel:
                info = method(channel, PLUGIN_REGISTRATION, "GetInfo")(registration_pb.InfoRequest(), timeout=60)
                error = ""
                if info.type != "DRAPlugin" or not info.endpoint.startswith("/"):
                    error = f"invalid plugin {info.type} at {info.endpoint}"
                elif not set(info.supported_versions) & set(DRA):
                    error = "no supported version"
                elif not stat.S_ISSOCK(os.lstat(info.endpoint).st_mode):
                    error = "its service does not listen"
                status = registration_pb.RegistrationStatus(plugin_registered=not error, error=error)
                method(channel, PLUGIN_REGISTRATION, "NotifyRegistrationStatus")(status, timeout=60)
        except (grpc.RpcError, FileNotFoundError):  # it is asked again
            return
        if not error:
            plugin = DraPlugin(path, info)
            self.plugins.setdefault(info.name, []).append(plugin)
            threading.Thread(target=self._listen, args=(plugin,), daemon=True).start()

    def _listen(self, plugin: DraPlugin) -> None:
        version = next((name for name in DRA_HEALTH if name in plugin.versions), "")
        if not version:
            return
        service = DRA_HEALTH[version]
        request = GetMessageClass(service.methods_by_name["NodeWatchResources"].input_type)()
        try:
            for message in method(plugin.channel, service, "NodeWatchResources")(request):
                with self.changed:
                    plugin.health = {
                        each.device.device_name: {"health": each.health, "message": each.message}
                        for each in message.devices
                    }
                    plugin.lists += 1
                    self.changed.notify_all()
        except (grpc.RpcError, ValueError):  # the driver ended, or the connection was closed
            return

    def health(self, driver: str, device: str, wanted: int, seconds: float = 150) -> dict[str, Any]:
        """Wait for the health of a device (1 healthy, 2 unhealthy) and return what is known of it."""
        plugin = self.plugins[driver][-1]
        deadline = time.monotonic() + seconds
        with self.changed:
            while plugin.health.get(device, {}).get("health") != wanted and time.monotonic() < deadline:
                self.changed.wait(0.2)
            return plugin.health.get(device, {})

    def call(self, name: str, driver: str, claims: list[list[str]], version: str = "v1.DRAPlugin") -> dict[str, Any]:
        """Call the newest of a driver's registrations, one before where that does not answer."""
        service = DRA[version]
        kind = GetMessageClass(service.methods_by_name[name].input_type)
        request: Any = kind()
        for namespace, uid, claim in claims:
            request.claims.add(namespace=namespace, uid=uid, name=claim)
        error: grpc.RpcError | None = None
        for plugin in reversed(self.plugins.get(driver, [])):
            try:
                answer = method(plugin.channel, service, name)(request, timeout=CALL_SECONDS)
            except grpc.RpcError as wrong:
                error = wrong
                continue
            missing = {claim[1] for claim in claims} - set(answer.claims)
            assert not missing, f"no answer for {missing}"
            return {uid: MessageToDict(each, preserving_proto_field_name=True) for uid, each in answer.claims.items()}
        raise error or AssertionError(f"DRA driver {driver} is not registered")

    def prepare(self, driver: str, claims: list[list[str]], version: str = "v1.DRAPlugin") -> dict[str, Any]:
        return self.call("NodePrepareResources", driver, claims, version)

    def unprepare(self, driver: str, claims: list[list[str]], version: str = "v1.DRAPlugin") -> dict[str, Any]:
        return self.call("NodeUnprepareResources", driver, claims, version)


def main(directory: str) -> None:
    answer_calls(DraKubelet(Path(directory)))


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
