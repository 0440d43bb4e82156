"""Which pods have which GPUs, from the kubelet's answer; and which jobs, from a directory.

A scheduler's prolog writes that directory: dcgm-exporter's HPC job mapping.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ocigpu.core.vendors import FIRST, VENDORS
from ocigpu.exporter.sample import GpuSample
from ocigpu.gpus.vfio.facts import VFIO_DRIVERS, Candidate
from ocigpu.kubernetes.cluster.owners import DRA_DRIVER, Claim, Held, Owner
from ocigpu.kubernetes.node.devices import REPLICA
from ocigpu.kubernetes.node.vfio import name_at, vfio_name
from ocigpu.system.files import open_regular

WHOLE = -1
OTHERS = tuple(vendor for name, (_, _, vendor) in VENDORS.items() if vendor and name != FIRST)
"""Domains of the other vendors' resources and drivers of claims."""
Key = tuple[str, int]
"""UUID of a GPU, and the number of a GPU instance or WHOLE."""
_BY_NUMBER = re.compile(r"nvidia([0-9]{1,4})(?:/gi([0-9]{1,4}))?(?:/vgpu([0-9]{1,4}))?")
_DRA_NAME = re.compile(r"gpu-([0-9]{1,4})(?:-mig-([0-9a-z-]+?)-([0-9]{1,4})-([0-9]{1,4}))?")
"""What NVIDIA's driver for dynamic resource allocation calls its devices: gpu-<minor>, and for a MIG device
gpu-<minor>-mig-<profile without dots>-<number of the profile>-<first memory slice>; until 25.8
gpu-<minor>-mig-<number of the profile>-<first memory slice>-<memory slices>."""
_OLD_MIG = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/([0-9]{1,4})/[0-9]{1,4}")


class Owners(NamedTuple):
    """``gpus``: owners by GPU or instance, each once.  ``others``: of other devices, by (resource, device id)."""

    gpus: "dict[Key, tuple[Owner, ...]]" = {}
    others: "dict[tuple[str, str], tuple[Owner, ...]]" = {}


def find_owners(
    held: Iterable[Held],
    gpus: Sequence[GpuSample],
    prefixes: Sequence[str],
    names: Sequence[str] = (),
    virtual: bool = False,
    claimed: Iterable[Owner] = (),
) -> Owners:
    """Return the owners of everything in resources with these prefixes or names, and of claims of NVIDIA's driver.

    Ids are those of NVIDIA's plugins, of ours and of GKE's: UUIDs of GPUs and MIG devices, of old drivers too
    ("MIG-GPU-.../gi/ci"), "nvidia0", "nvidia0/gi1", "nvidia0/vgpu1"; a replica is "UUID::n".  With ``virtual`` replicas
    of one GPU count apart.  Resources and claims of other vendors with GPUs on this host count, too.
    """
    if any(gpu.names for gpu in gpus):
        prefixes = (*prefixes, *(f"{domain}/" for domain in OTHERS))
    found: dict[Key, dict[Owner, None]] = {}
    others: dict[tuple[str, str], dict[Owner, None]] = {}
    finder = _Finder(gpus)
    for owner, resource, device_id in held:
        if resource in names or resource.startswith(tuple(prefixes)):
            keys, replica = finder.find(device_id)
            for key in keys:
                found.setdefault(key, {})[owner._replace(vgpu=replica if virtual else "")] = None
            if not keys:
                others.setdefault((resource, device_id), {})[owner] = None
    for owner in claimed:
        for key in finder.find_claimed(owner.claim) if owner.claim else ():
            found.setdefault(key, {})[owner] = None
    return Owners({key: tuple(all_) for key, all_ in found.items()}, {key: tuple(all_) for key, all_ in others.items()})


class _Finder:
    def __init__(self, gpus: Sequence[GpuSample]) -> None:
        numbered = [gpu for gpu in gpus if not gpu.names]
        self.by_index = {gpu.number: gpu for gpu in numbered}
        self.by_minor = {gpu.minor: gpu for gpu in numbered}
        self.by_uuid = {id_: gpu for gpu in gpus for id_ in (*gpu.ids, gpu.uuid) if id_}
        self.by_claim = {_claim_name(id_): gpu for gpu in gpus for id_ in gpu.ids}
        self.migs = {uuid: (gpu.uuid, item.number) for gpu in gpus for item in gpu.instances for uuid in item.uuids}

    def find(self, device_id: str) -> tuple[list[Key], str]:
        """Return the series of a device, none for an unknown GPU, and its replica's number."""
        name, _, replica = device_id.partition(REPLICA)
        if name in self.migs:
            return [self.migs[name]], replica
        if name in self.by_uuid:
            return _whole(self.by_uuid[name]), replica
        if old := _OLD_MIG.fullmatch(name):
            return [(old[1], int(old[2]))], replica
        numbered = _BY_NUMBER.fullmatch(name)
        gpu = self.by_index.get(int(numbered[1])) if numbered else None
        if gpu is None or numbered is None:
            return [], replica
        return [(gpu.uuid, int(numbered[2]))] if numbered[2] else _whole(gpu), numbered[3] or replica

    def find_claimed(self, claim: Claim) -> list[Key]:
        """Return the series of a claim's device, none for an unknown GPU.

        With NVIDIA's driver a GPU instance is the one with that first slice, or the only one of that profile if NVML
        does not report slices.
        """
        if claim.driver in [f"gpu.{domain}" for domain in OTHERS]:
            return _whole(self.by_claim[claim.device]) if claim.device in self.by_claim else []
        if claim.driver != DRA_DRIVER:
            return []
        parts = _DRA_NAME.fullmatch(claim.device)
        gpu = self.by_minor.get(int(parts[1])) if parts else None
        if parts is None or gpu is None:
            return []
        if parts[2] is None:
            return _whole(gpu)
        numbered = parts[2].isdigit()
        start = int(parts[3] if numbered else parts[4])
        found = [item for item in gpu.instances if item.start == start]
        if not found and not numbered:
            found = [item for item in gpu.instances if item.start < 0 and _letters(item.profile) == _letters(parts[2])]
        return [(gpu.uuid, found[0].number)] if len(found) == 1 else []


def _claim_name(id_: str) -> str:
    """Return how our driver of claims calls a GPU of another vendor, or part of it: "0000:41:00.0/3" is number 3."""
    address, _, number = id_.partition("/")
    return "-".join(filter(None, (name_at("gpu", address), number)))


def _letters(profile: str) -> str:
    return re.sub(r"[^0-9a-z]", "", profile)


def _whole(gpu: GpuSample) -> list[Key]:
    """The owner of a whole GPU owns its instances: with MIG enabled, the series belong to instances."""
    return [(gpu.uuid, WHOLE), *((gpu.uuid, instance.number) for instance in gpu.instances)]


class VfioDevice(NamedTuple):
    """A GPU that is for virtual machines: NVML does not know it."""

    bus_id: str
    group: int
    owners: tuple[Owner, ...]


def find_vfio_owners(
    candidates: Iterable[Candidate],
    others: Mapping[tuple[str, str], tuple[Owner, ...]],
    claimed: Collection[Owner] = (),
) -> list[VfioDevice]:
    """Return the GPUs bound to VFIO's drivers, with their owners.

    Device ids are IOMMU groups, VFIO devices or PCI addresses; those of claims have our driver's names.
    """
    found = []
    for item in candidates:
        if item.is_switch or item.function.driver not in VFIO_DRIVERS:
            continue
        address = item.function.address
        ids = {str(number) for number in (item.group, item.cdev) if number >= 0} | {address}
        owners = {owner: None for (_, device_id), all_ in others.items() if device_id in ids for owner in all_}
        ours = DRA_DRIVER, vfio_name(address)
        owners |= {each: None for each in claimed if each.claim and (each.claim.driver, each.claim.device) == ours}
        found.append(VfioDevice(address, item.group, tuple(owners)))
    return found


MAX_FILE, MAX_JOBS = 1 << 16, 64
_NAME = re.compile(r"([0-9]{1,4})(?:\.([0-9]{1,4}))?")


def read_jobs(directory: str) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the jobs by GPU index and GPU instance (WHOLE for a GPU) from files "0" or "0.7" with a job a line."""
    found: dict[tuple[int, int], tuple[str, ...]] = {}
    try:
        names = os.listdir(directory) if directory else []
    except OSError:  # not made yet: the scheduler makes it with the first job
        return {}
    for name in names:
        parts = _NAME.fullmatch(name)
        if not parts:
            continue
        try:
            # no link: a user who may add files there could expose the contents of others
            with open_regular(os.path.join(directory, name), flags=os.O_NOFOLLOW) as file:
                words = file.read(MAX_FILE).decode(errors="replace").split()
        except OSError:  # the job has just ended, or it is not a job
            continue
        jobs = tuple(dict.fromkeys(words))[:MAX_JOBS]
        found[int(parts[1]), int(parts[2]) if parts[2] else WHOLE] = jobs
    return found
