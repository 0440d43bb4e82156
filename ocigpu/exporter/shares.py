"""How much of a shared GPU each pod uses: processes of NVML, their cgroups, and the kubelet's record of devices.

NVML tells memory and time of processes; a process's cgroup has the UID of its pod in its path; which pod that is the
kubelet's checkpoint tells, because its pod-resources interface has no UIDs.  Needs the host's pid namespace.
"""

import json
import re
from collections.abc import Iterable, Mapping

from ocigpu.exporter.owners import WHOLE, Key
from ocigpu.exporter.sample import GpuSample, Values
from ocigpu.kubernetes.cluster.owners import Held, Owner
from ocigpu.system.files import read_regular

CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
UTILIZATION, USED = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"
MAX_CHECKPOINT, MAX_CGROUP = 16 << 20, 1 << 16
_POD = re.compile(r"pod([0-9a-f]{8}(?:([-_])[0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![0-9a-f])")

Pod = tuple[str, str]
"""Namespace and name."""


def find_split(
    gpus: Iterable[GpuSample],
    owners: Mapping[Key, Iterable[Owner]],
    uids: Mapping[Pod, str],
    proc: str = "/proc",
) -> dict[tuple[Key, Owner], Values]:
    """Return GPU time in percent and memory in MiB of each owner of a GPU, the sums of its pod's processes.

    Of a GPU instance it is the memory alone: NVML does not tell the time of processes there.

    A pod whose UID is not known has none, so its series have the whole GPU's values.  ``uids``: of
    :func:`read_pod_uids`.
    """
    found: dict[tuple[Key, Owner], Values] = {}
    parts = (
        ((gpu.uuid, number), processes)
        for gpu in gpus
        for number, processes in ((WHOLE, gpu.processes), *((part.number, part.processes) for part in gpu.instances))
    )
    for key, processes in parts:
        used: dict[str, tuple[int, int]] = {}
        for pid, memory, share in processes if owners.get(key) else ():
            uid = _pod_of(pid, proc)
            before = used.get(uid, (0, 0))
            used[uid] = (before[0] + share, before[1] + memory)
        for owner in owners.get(key, ()):
            uid = uids.get((owner.namespace, owner.pod), "")
            if uid:
                share, memory = used.get(uid, (0, 0))
                found[key, owner] = {USED: memory} | ({UTILIZATION: min(share, 100)} if key[1] == WHOLE else {})
    return found


def read_pod_uids(held: Iterable[Held], path: str = CHECKPOINT) -> dict[Pod, str]:
    """Return the UIDs of the pods with these devices, from the kubelet's checkpoint; {} if it is unreadable.

    Both name the device of a container, and a device is never given away twice.
    """
    try:
        document = json.loads(read_regular(path, MAX_CHECKPOINT))
        by_device = {
            (str(entry["ResourceName"]), str(device_id)): str(entry["PodUID"])
            for entry in document["Data"]["PodDeviceEntries"] or ()
            for ids in entry["DeviceIDs"].values()
            for device_id in ids
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {
        (each.owner.namespace, each.owner.pod): by_device[each.resource, each.device_id]
        for each in held
        if (each.resource, each.device_id) in by_device
    }


def _pod_of(pid: int, proc: str) -> str:
    """Return the UID of a process's pod, "" for none."""
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            return pod_uid(file.read(MAX_CGROUP))
    except OSError:  # it has ended, or it is not in our pid namespace
        return ""


def pod_uid(cgroup: str) -> str:
    """Return the UID of a pod in /proc/<pid>/cgroup (cgroups(7)), "" for a process outside of pods.

    The kubelet's directory comes first in the path: what a container makes below it does not count.
    """
    found = next(filter(None, map(_POD.search, cgroup.splitlines())), None)
    return found[1].replace("_", "-") if found else ""
