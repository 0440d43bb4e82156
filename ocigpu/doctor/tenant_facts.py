"""Facts about a host that gives GPUs to virtual machines of several tenants: read once, checked in tenants.py.

Sources: Kata Containers (configuration-qemu-nvidia-gpu.toml, VERSION and versions.yaml of its static release), the
kubelet's KubeletConfiguration, sysfs-bus-pci and sysfs-kernel-iommu_groups of the kernel's ABI documents.
"""

import os
import re
import tomllib
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import yaml

from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.doctor.claim_facts import ADMIN, find_kubeconfig
from ocigpu.doctor.files import LARGE_TEXT, RootFiles
from ocigpu.gpus.firmware.baseline import read_baseline
from ocigpu.gpus.nvidia.fabric.libnvfm import open_fabric
from ocigpu.gpus.nvidia.fabric.partitions import FabricError, RestorableFabric
from ocigpu.gpus.pci import NVIDIA_VENDOR, Function, find_group, read_function
from ocigpu.gpus.tree import list_names
from ocigpu.gpus.vfio.bus import PciBus
from ocigpu.gpus.vfio.facts import GPU_CLASSES, SWITCH_CLASS
from ocigpu.kubernetes.cluster.kinds import KINDS, REVISION
from ocigpu.system.programs import run_program

QEMU = tuple(f"{directory}/qemu-system-{os.uname().machine}" for directory in ("/opt/kata/bin", "/usr/bin"))
KATA_VERSION, KATA_VERSIONS = "/opt/kata/VERSION", "/opt/kata/versions.yaml"
_NAME = "configuration-qemu-nvidia-gpu.toml"
KATA_CONFIGS = (
    f"/etc/kata-containers/{_NAME}",
    f"/opt/kata/share/defaults/kata-containers/runtimes/qemu-nvidia-gpu/{_NAME}",
    f"/opt/kata/share/defaults/kata-containers/{_NAME}",
)
KUBELET = "/var/lib/kubelet/config.yaml"
CONTAINERD = ("/etc/containerd/config.toml", "/etc/containerd/conf.d")
BASELINES = "/etc/ocigpu"
FABRIC_CONFIG = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
WRONG_MODE = -3
"""What libnvfm returns where the manager has FABRIC_MODE=0."""
_VERSION = re.compile(r"(\d+)\.(\d+)")


class TenantFunction(NamedTuple):
    """A PCI function.  ``group``: -1 for none; ``resets``: methods, none where the kernel does not say; ``bar``:
    the largest, in bytes.
    """

    address: str
    vendor: int
    device: int
    base_class: int
    driver: str
    group: int = -1
    resets: tuple[str, ...] = ()
    bar: int = 0

    @property
    def is_gpu(self) -> bool:
        return self.vendor == NVIDIA_VENDOR and self.base_class in GPU_CLASSES

    @property
    def is_switch(self) -> bool:
        return self.vendor == NVIDIA_VENDOR and self.base_class == SWITCH_CLASS


class Version(NamedTuple):
    """A version, and where it was read; ``number`` None where it could not be."""

    number: tuple[int, int] | None = None
    text: str = ""
    where: str = ""


class TenantFacts(NamedTuple):
    """``functions``: GPUs, NVSwitches and all other members of their groups."""

    kernel: Version = Version()
    qemu: Version = Version()
    kata: Version = Version()
    functions: tuple[TenantFunction, ...] = ()
    kubelet_path: str = ""
    kubelet: "dict[str, Any] | None" = None
    kata_path: str = ""
    kata_config: "dict[str, Any] | None" = None
    handlers: "dict[str, str]" = {}
    """Path of the file by the name of a runtime of Kata in containerd's configuration."""
    baselines: tuple[tuple[str, str, str], ...] = ()
    """Path of each baseline, who has signed it off, or why it cannot be used."""
    fabric_modes: tuple[tuple[str, str], ...] = ()
    """Who was asked for the mode of Fabric Manager, and what it is: "0", "1", or why it is not known."""
    kinds: "dict[str, int] | str" = ""
    """Revision of each of our kinds that the cluster has, 0 for one from before revisions; or why it is not known."""

    @property
    def gpus(self) -> "tuple[TenantFunction, ...]":
        """The GPUs."""
        return tuple(each for each in self.functions if each.is_gpu)

    def group(self, number: int) -> "tuple[TenantFunction, ...]":
        """Return the members of an IOMMU group."""
        return tuple(each for each in self.functions if each.group == number)


def read_tenant_facts(files: RootFiles, sys: str, simulation: str = "") -> TenantFacts:
    """Return the facts of this host; ``sys``: path of its sysfs, ``simulation``: root of a simulated host."""
    kubelet = _document(files, KUBELET, yaml.safe_load)
    kata_path = next((path for path in KATA_CONFIGS if files.exists(path)), "")
    return TenantFacts(
        _kernel(files),
        _qemu(files),
        _version(files.text(KATA_VERSION), KATA_VERSION),
        tuple(_functions(sys)),
        KUBELET if kubelet is not None else "",
        kubelet,
        kata_path,
        _document(files, kata_path, tomllib.loads) if kata_path else None,
        dict(_handlers(files)),
        tuple(
            _baseline(files, f"{BASELINES}/{name}") for name in files.names(BASELINES) if name.startswith("firmware")
        ),
        tuple(_fabric_modes(files, simulation)),
        _kinds(files),
    )


def _kinds(files: RootFiles) -> "dict[str, int] | str":
    path = find_kubeconfig(files)
    if not path:
        return f"KUBECONFIG is not set, and there is no {ADMIN}"
    try:
        from lightkube import Client
        from lightkube.generic_resource import create_global_resource

        from ocigpu.kubernetes.cluster.client import ask, open_client
    except ImportError as error:
        return f"querying the API server needs lightkube: {error}"
    definition: Any = create_global_resource(
        "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions"
    )
    found = {}
    try:
        with closing(open_client(Client, path)) as client:
            for name in KINDS:
                read: Any = ask(f"read {name}", partial(client.get, definition, name), None)
                if read is not None:
                    text = str((read.metadata.annotations or {}).get(REVISION, ""))
                    found[name] = int(text) if text.isdecimal() and len(text) < 6 else 0
    except OcigpuError as error:
        return error.message
    return found


def _baseline(files: RootFiles, path: str) -> tuple[str, str, str]:
    try:
        return path, read_baseline(files.path(path)).approved_by, ""
    except HostError as error:
        return path, "", error.message


def _document(files: RootFiles, path: str, parse: Any) -> "dict[str, Any] | None":
    """Return the content of a file, None without one.  Raises HostError for one that cannot be parsed."""
    text = files.text(path, LARGE_TEXT)
    try:
        found = parse(text) if text is not None else None
    except (ValueError, yaml.YAMLError) as error:
        raise HostError("OCIGPU-HOST-3", f"{files.path(path)}: {str(error).splitlines()[0]}") from error
    return found if isinstance(found, dict) else None if text is None else {}


def _version(text: str | None, where: str) -> Version:
    match = _VERSION.search(text or "")
    lines = (text or "").strip().splitlines()
    return Version((int(match[1]), int(match[2])) if match else None, lines[0] if lines else "", where)


def _kernel(files: RootFiles) -> Version:
    path = "/proc/sys/kernel/osrelease"
    text = files.text(path)
    return _version(text or (os.uname().release if files.live else None), path)


def _qemu(files: RootFiles) -> Version:
    if files.live and (path := files.program(*QEMU)):
        try:
            done = run_program([path, "--version"], 10.0)
            return _version(done.output, f"{path} --version")
        except (OSError, TimeoutError):
            pass
    try:
        document = _document(files, KATA_VERSIONS, yaml.safe_load) or {}
        return _version(str(document["assets"]["hypervisor"]["qemu"]["version"]), KATA_VERSIONS)
    except (KeyError, TypeError):
        return Version(where=QEMU[0])


def _functions(sys: str) -> "list[TenantFunction]":
    every = (read_function(sys, name) for name in list_names(f"{sys}/bus/pci/devices"))
    found = [_function(sys, each) for each in every if each]
    groups = {each.group for each in found if each.is_gpu or each.is_switch}
    return [each for each in found if each.is_gpu or each.is_switch or each.group in groups - {-1}]


def _function(sys: str, function: Function) -> TenantFunction:
    group, bus, bar = find_group(function.address, sys), PciBus(sys), 0
    for line in bus.read(function.address, "resource").splitlines()[:6]:
        start, end = (int(word, 16) for word in line.split()[:2])
        bar = max(bar, end - start + 1 if end else 0)
    resets = tuple(bus.read(function.address, "reset_method").split())
    ids = (function.vendor, function.device, function.base_class, function.driver)
    return TenantFunction(function.address, *ids, group, resets, bar)


def _handlers(files: RootFiles) -> "list[tuple[str, str]]":
    main, directory = CONTAINERD
    paths = [main, *(f"{directory}/{name}" for name in files.names(directory) if name.endswith(".toml"))]
    found = []
    for path in paths:
        document = _document(files, path, tomllib.loads) or {}
        for plugin in (document.get("plugins") or {}).values():
            runtimes = (plugin.get("containerd") or {}).get("runtimes") or {} if isinstance(plugin, dict) else {}
            found += [(name, path) for name in runtimes if name.startswith("kata")]
    return found


def _fabric_modes(files: RootFiles, simulation: str) -> "list[tuple[str, str]]":
    found = []
    for line in (files.text(FABRIC_CONFIG, LARGE_TEXT) or "").splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip() == "FABRIC_MODE":
            found.append((FABRIC_CONFIG, value.strip()))
    address = os.environ.get("OCIGPU_FABRIC", "") if files.live else ""
    if address:
        try:
            _open_fabric(address, simulation).list_partitions()
            found.append((address, "1"))
        except FabricError as error:
            found.append((address, "0" if error.status == WRONG_MODE else error.message))
    return found


def _open_fabric(address: str, simulation: str) -> RestorableFabric:
    if not address.startswith("grpc:"):
        return open_fabric(address, simulation=simulation)
    try:
        from ocigpu.kubernetes.fabric.client import open_fabric as open_service
    except ImportError as error:
        raise FabricError("OCIGPU-FAB-1", f"{address} needs grpcio and protobuf") from error
    return open_service(address)
