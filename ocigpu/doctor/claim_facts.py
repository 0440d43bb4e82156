"""A node's facts about DRA drivers, and the API server's about their claims; claims.py checks them.

Sources: k8s.io/kubelet (directories of plugins), kubernetes/pkg/kubelet/cm/devicemanager/checkpoint (what
device plugins have registered), the files of our own driver.
"""

import json
import os
import socket
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from ocigpu.core.errors import UNUSABLE, HostError, OcigpuError
from ocigpu.core.vendors import GPU_VENDORS
from ocigpu.doctor.files import LARGE_TEXT, RootFiles
from ocigpu.kubernetes.dra.status import FILE, DriverStatus, parse_status

if TYPE_CHECKING:
    from ocigpu.kubernetes.dra.state import ClaimRecord

KUBELET = "/var/lib/kubelet"
REGISTRY = f"{KUBELET}/plugins_registry"
CHECKPOINT = f"{KUBELET}/device-plugins/kubelet_internal_checkpoint"
ADMIN = "/etc/kubernetes/admin.conf"
BOOT = "/proc/sys/kernel/random/boot_id"


class DriverFacts(NamedTuple):
    """A driver that has been on this node.  ``sockets``: of its registration, and whether they answer.

    ``claims``: the claims that it has prepared since boot, by uid.
    """

    status: DriverStatus
    sockets: tuple[tuple[str, bool], ...]
    claims: "dict[str, ClaimRecord]"


class ClaimFacts(NamedTuple):
    """``plugin``: how many devices of our vendors' resources a device plugin has registered, by resource.

    ``objects``: the API server's claims, None where it was not asked, for the reason in ``silent``.
    """

    drivers: tuple[DriverFacts, ...] = ()
    plugin: "dict[str, int]" = {}
    objects: "tuple[dict[str, Any], ...] | None" = None
    silent: str = ""


def read_claim_facts(files: RootFiles) -> ClaimFacts:
    """Return the facts of the node, and of the API server that KUBECONFIG or the node's admin.conf names.

    Raises HostError (OCIGPU-HOST-3) for an existing file that cannot be read or parsed.
    """
    drivers = []
    for name in files.names(f"{KUBELET}/plugins"):
        path = f"{KUBELET}/plugins/{name}/{FILE}"
        text = files.text(path)
        if text is not None:
            drivers.append(
                DriverFacts(_understood(files, path, parse_status, text), _sockets(files, name), _claims(files, name))
            )
    objects, silent = _objects(files) if drivers else (None, "no driver has run on this node")
    return ClaimFacts(tuple(drivers), _plugin(files), objects, silent)


def _understood(files: RootFiles, path: str, parse: Any, content: Any) -> Any:
    try:
        return parse(content)
    except UNUSABLE as error:
        raise HostError("OCIGPU-HOST-3", f"{files.path(path)}: not understood") from error


def _sockets(files: RootFiles, driver: str) -> tuple[tuple[str, bool], ...]:
    names = [name for name in files.names(REGISTRY) if name.startswith(f"{driver}-") and name.endswith("reg.sock")]
    return tuple((f"{REGISTRY}/{name}", _answers(files.path(f"{REGISTRY}/{name}"))) for name in names)


def _answers(path: str) -> bool:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(2.0)
            one.connect(path)
    except OSError:  # refused: its maker is gone
        return False
    return True


def _claims(files: RootFiles, driver: str) -> "dict[str, ClaimRecord]":
    from ocigpu.kubernetes.dra import state  # pydantic: only where a driver has been

    path = f"{KUBELET}/plugins/{driver}/{state.FILE}"
    text = files.text(path, LARGE_TEXT)
    if text is None:
        return {}
    boot, records = _understood(files, path, state.parse_claims, text.encode())
    now = (files.text(BOOT) or "").strip()
    return {} if files.live and boot != now else records


def _plugin(files: RootFiles) -> "dict[str, int]":
    text = files.text(CHECKPOINT, LARGE_TEXT)
    data = _understood(files, CHECKPOINT, json.loads, text) if text else {}
    found = (data.get("Data") or {}).get("RegisteredDevices") or {}
    return {name: len(ids) for name, ids in found.items() if name.partition("/")[0] in GPU_VENDORS and ids}


def find_kubeconfig(files: RootFiles) -> str:
    """Return the file by which the API server is asked, "" for none."""
    return os.environ.get("KUBECONFIG") or (files.path(ADMIN) if files.exists(ADMIN) else "")


def _objects(files: RootFiles) -> "tuple[tuple[dict[str, Any], ...] | None, str]":
    path = find_kubeconfig(files)
    if not path:
        return None, f"KUBECONFIG is not set, and there is no {ADMIN}"
    try:
        from ocigpu.kubernetes.dra.cluster import open_cluster

        cluster = open_cluster(path)
        try:
            return tuple(cluster.list_objects("ResourceClaim", "resourceclaims", namespaced=True)), ""
        finally:
            cluster.close()
    except ImportError as error:
        return None, f"querying the API server needs lightkube: {error}"
    except OcigpuError as error:
        return None, error.message
