"""The options of ``ocigpu dra-driver``: command line and environment."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ocigpu.core.errors import SettingsError, quoted
from ocigpu.core.vendors import FIRST, VENDORS
from ocigpu.kubernetes.cluster.names import POD_RESOURCES_SOCKET
from ocigpu.kubernetes.cluster.owners import DRA_DRIVER
from ocigpu.kubernetes.dra.devices import DeviceOptions
from ocigpu.kubernetes.dra.sockets import KubeletDirectories
from ocigpu.kubernetes.node.config import PluginOptions
from ocigpu.kubernetes.node.sharing import SUBDOMAIN
from ocigpu.system.options import find_values, read_flags, read_table
from ocigpu.system.service import split_address

OPTIONS = read_table(Path(__file__).with_name("options.toml"))
MAX_DRIVER, MAX_NODE = 63, 253


class DraOptions(NamedTuple):
    """Every option by name; see :data:`OPTIONS`."""

    node_name: str = ""
    driver_name: str = ""
    vendor: str = ""
    kubeconfig: str = ""
    registrar_directory: str = KubeletDirectories().registry
    plugins_directory: str = KubeletDirectories().plugins
    pods_socket: str = POD_RESOURCES_SOCKET
    pod_uid: str = ""
    cdi_root: str = "/var/run/cdi"
    cdi_hook_path: str = ""
    driver_root: str = "/"
    dev_root: str = ""
    container_driver_root: str = "/driver-root"
    ignored_xids: str = ""
    mps_root: str = "/run/nvidia/mps"
    device_metadata: bool = True
    shares: str = "disabled"
    dynamic_mig: bool = False
    passthrough: bool = False
    lease_journal: str = ""
    fabric_address: str = ""
    http_endpoint: str = ""
    compute_domains: bool = False
    namespace: str = ""

    @property
    def driver(self) -> str:
        """The driver's name."""
        return self.driver_name or f"gpu.{VENDORS[self.vendor or FIRST][2]}"

    @property
    def directories(self) -> KubeletDirectories:
        return KubeletDirectories(self.registrar_directory.rstrip("/"), self.plugins_directory.rstrip("/"))

    @property
    def plugin(self) -> PluginOptions:
        """The device plugin's options for the same host."""
        return PluginOptions(
            driver_root=self.driver_root,
            dev_root=self.dev_root,
            container_driver_root=self.container_driver_root,
            cdi_hook_path=self.cdi_hook_path,
            disabled_health_checks=self.ignored_xids,
            lease_journal=self.lease_journal,
            fabric_address=self.fabric_address,
        )

    @property
    def offered(self) -> DeviceOptions:
        """What of the host is offered."""
        return DeviceOptions(self.passthrough, self.dynamic_mig, self.shares)


def parse_options(words: Sequence[str], environment: Mapping[str, str]) -> DraOptions:
    """Return the options; raises UsageError, and SettingsError (OCIGPU-DRA-6) that names the option."""
    values = find_values(OPTIONS, read_flags(words, OPTIONS, "dra-driver"), environment)
    options = DraOptions(**values)
    for name, text, most in (
        ("node-name", options.node_name, MAX_NODE),
        ("driver-name", options.driver_name, MAX_DRIVER),
    ):
        if text and (len(text) > most or not SUBDOMAIN.fullmatch(text)):
            raise _wrong(f"--{name}", f"{quoted(text)} is not a DNS name of at most {most} characters")
    if not options.node_name:
        raise _wrong("--node-name", "it is not set", "In a pod: NODE_NAME from the field spec.nodeName.")
    known = [name for name, (_, variable, _) in VENDORS.items() if variable]
    if options.vendor and options.vendor not in known:
        raise _wrong("--vendor", f"{quoted(options.vendor)} is not one of {', '.join(known)}")
    if options.shares not in ("disabled", "unlimited", "memory") and not re.fullmatch(
        r"[1-9][0-9]{0,3}", options.shares
    ):
        raise _wrong("--consumable-shares", f"{quoted(options.shares)} is not disabled, unlimited, memory or a number")
    if options.http_endpoint and split_address(options.http_endpoint) is None:
        raise _wrong("--http-endpoint", f"{quoted(options.http_endpoint)} is not [HOST]:PORT")
    if options.compute_domains and not options.namespace:
        raise _wrong("--namespace", "it is not set", "In a pod: POD_NAMESPACE from the field metadata.namespace.")
    if options.passthrough and options.lease_journal:
        raise _wrong("--passthrough", "with --lease-journal GPUs are VFIO's all the time")
    if options.driver_name not in ("", DRA_DRIVER) and options.lease_journal:
        raise _wrong(
            "--driver-name", f"with --lease-journal it is {DRA_DRIVER}: the agent recognizes claims' pods by it"
        )
    if options.pod_uid and not re.fullmatch(r"[0-9a-zA-Z-]{1,63}", options.pod_uid):
        raise _wrong("--pod-uid", f"{quoted(options.pod_uid)} is not a uid")
    return options


def _wrong(where: str, text: str, hint: str | None = "see: ocigpu dra-driver --help") -> SettingsError:
    return SettingsError("OCIGPU-DRA-6", f"{where}: {text}", hint)
