"""The device plugin and a kubelet as processes: both have threads of gRPC, and the test process forks."""

import os
import stat
import subprocess
import sys
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from support.programs import AskedProgram, LoggedProgram

from ocigpu.bundle.inject import inject
from ocigpu.cdi.registry import read_registry
from ocigpu.core.settings import Settings

GPU = "nvidia.com/gpu"
MIG_3G, MIG_1G = "nvidia.com/mig-3g.20gb", "nvidia.com/mig-1g.5gb"
_QUICK = """
import os, sys
from ocigpu.kubernetes.node.health import Rules
from ocigpu.kubernetes.node.config import parse_flags
from ocigpu.kubernetes.plugin.plugin import DevicePlugin, Timing
from ocigpu.system.settings_file import read_settings
timing = Timing(0.1, 0.3, Rules(probes=2, hold=0.3, patience=0.0), 1.0)
DevicePlugin(parse_flags(sys.argv[2:], os.environ), read_settings(sys.argv[1]), True, timing).run()
"""
"""The command with less patience."""


_OTHER = """
import os, sys, time, grpc
from concurrent.futures import ThreadPoolExecutor
from ocigpu.kubernetes.api import deviceplugin_pb2 as pb
from ocigpu.kubernetes.api.services import DEVICE_PLUGIN, REGISTRATION, method, open_channel, serve
place, seconds = sys.argv[1], float(sys.argv[2])
def listing(_request, context):
    yield pb.ListAndWatchResponse(devices=[pb.Device(ID="other", health="Healthy")])
    while context.is_active():
        time.sleep(0.05)
table = dict.fromkeys(DEVICE_PLUGIN.methods_by_name) | {"ListAndWatch": listing}
table["GetDevicePluginOptions"] = lambda _request, _context: pb.DevicePluginOptions()
server = grpc.server(ThreadPoolExecutor(4))
server.add_generic_rpc_handlers((serve(DEVICE_PLUGIN, table),))
server.add_insecure_port(f"unix:{place}/other.sock")
server.start()
request = pb.RegisterRequest(version="v1beta1", endpoint="other.sock", resource_name="nvidia.com/gpu")
with open_channel(f"{place}/kubelet.sock") as channel:
    method(channel, REGISTRATION, "Register")(request, timeout=60)
time.sleep(seconds)
os._exit(0)
"""
"""Another plugin of nvidia.com/gpu with one device, for so many seconds."""


def other_plugin(directory: Path, seconds: float) -> None:
    """Let another plugin come, and go without a word."""
    subprocess.run([sys.executable, "-c", _OTHER, str(directory), str(seconds)], check=True, timeout=120)


class Kubelet(AskedProgram):
    """A kubelet's process; its methods are those of :class:`support.kubelet.Kubelet`."""

    def __init__(self, directory: Path) -> None:
        super().__init__("kubelet.py", directory)
        self.directory = directory

    def expect(self, **counts: tuple[int, int]) -> None:
        """Wait for [capacity, allocatable] of resources by the last part of their names, "_" for "-" and "."."""
        names = {name: f"nvidia.com/{name}" for name in counts} | {"mig_3g": MIG_3G, "mig_1g": MIG_1G}
        wanted = {names[name]: list(pair) for name, pair in counts.items()}
        found = self.wait_for(wanted, 120)
        assert {name: found.get(name, [0, 0]) for name in wanted} == wanted


class Plugin(LoggedProgram):
    """A device plugin's process and what it logs."""

    def __init__(self, settings: Path, directory: Path, *words: str, **variables: str) -> None:
        self.directory = directory
        output = directory.with_name(f"{directory.name}.log")
        super().__init__(
            _QUICK, output, str(settings), f"--kubelet-socket={directory}/kubelet.sock", *words, **variables
        )

    @property
    def sockets(self) -> list[str]:
        """The names of its sockets, sorted."""
        if not self.directory.exists():
            return []
        return sorted(path.name for path in self.directory.iterdir() if path.name.startswith("nvidia-"))


def plugin(settings: Path, directory: Path, *words: str, **variables: str) -> AbstractContextManager[Plugin]:
    """Run a plugin; afterwards its log has told of no defect."""
    return Plugin(settings, directory, *words, **variables).running()


def kubelet(directory: Path) -> AbstractContextManager[Kubelet]:
    return closing(Kubelet(directory))


MODES = {
    "envvar": "",
    "volume-mounts": "accept-nvidia-visible-devices-as-volume-mounts = true\n",
    "cdi-annotations": 'mode = "cdi"\n',
    "cdi-cri": "",
}
"""What the node's settings say for each strategy."""


def apply_response(config: dict[str, Any], response: dict[str, Any], specs: Path) -> None:
    """Change a configuration as an engine does with what the kubelet tells it about a container."""
    config["process"]["env"] += [f"{name}={value}" for name, value in response["envs"].items()]
    for mount in response["mounts"]:
        options = ["rbind", "rprivate", "ro" if mount["read_only"] else "rw"]
        entry = {"destination": mount["container_path"], "type": "bind", "source": mount["host_path"]}
        config["mounts"].append({**entry, "options": options})
    for device in response["devices"]:
        status = os.stat(device["host_path"])
        assert stat.S_ISCHR(status.st_mode)
        number = {"type": "c", "major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}
        mode = {"fileMode": stat.S_IMODE(status.st_mode), "uid": 0, "gid": 0}
        config["linux"].setdefault("devices", []).append({"path": device["container_path"], **number, **mode})
        config["linux"]["resources"]["devices"].append({"allow": True, **number, "access": device["permissions"]})
    config.setdefault("annotations", {}).update(response["annotations"])
    if response["cdi_devices"]:
        registry = read_registry(Settings(cdi_spec_dirs=(str(specs),)))
        inject(config, registry.resolve(response["cdi_devices"]).edits)
