"""AMD GPUs: ``ocigpu cdi generate --vendor amd``, kind amd.com/gpu.

A device is a GPU, or a partition of one, with its card and render nodes; every device includes /dev/kfd.  Libraries
come with the image, as in AMD's own container toolkit.  Names: the index ("0", in that toolkit's order), "gpu0" by type
and index, or the unique id as that toolkit and rocm-smi write it ("0xc0ffee"); partitions that share their GPU's unique
id have their number added ("0xc0ffee:1").  A GPU without a unique id has its PCI address instead ("0000:41:00.0").
"""

from collections.abc import Mapping

from ocigpu.core.actions import node_actions
from ocigpu.core.errors import CdiError, HostError
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.amd.facts import AmdFacts, AmdGpu, gpu_name, read_amd_facts, unique_name
from ocigpu.gpus.offer import DeviceOffer, GenerateOptions, OfferedDevice, choose_names, select_ids
from ocigpu.gpus.tree import find_roots


def offer(options: GenerateOptions, settings: Settings) -> DeviceOffer:
    """Return the host's AMD GPUs as devices.

    Raises CdiError (OCIGPU-CDI-7) when there is none that can be given, or for a device id that none has, and HostError
    (OCIGPU-HOST-3) for a file of sysfs that cannot be read.
    """
    return offer_gpus(read_amd_facts(find_roots(settings)), options)


def offer_claimed(
    claimed: Mapping[str, str], options: GenerateOptions, settings: Settings, _facts: HostFacts
) -> DeviceOffer:
    """Return the devices of these ids, under their ids, each looked for by itself as the host is now.

    ``claimed``: their names in the slice by id.

    Raises HostError (OCIGPU-DRA-3) for a GPU that has been cut into partitions since, and as :func:`offer` does.
    """
    found: dict[str, DeviceOffer] = {}
    for id_, name in claimed.items():
        found[id_] = offer(options._replace(device_ids=(id_,), name_strategies=("index",)), settings)
        if len(found[id_].devices) != 1:
            count = len(found[id_].devices)
            raise HostError("OCIGPU-DRA-3", f"{name}: it is cut into {count} partitions now", "")
    devices = tuple(one.devices[0]._replace(name=id_) for id_, one in found.items())
    return next(iter(found.values()))._replace(devices=devices)


def offer_gpus(facts: AmdFacts, options: GenerateOptions) -> DeviceOffer:
    """Return the offer of these facts; raises CdiError (OCIGPU-CDI-7) as :func:`offer` does.  Pure."""
    skipped = [
        f"GPU {function.text} is not bound to amdgpu, but to {function.driver or 'no driver'}"
        for function in facts.unbound
    ]
    names = [_names(index, gpu, facts.gpus, options.name_strategies) for index, gpu in enumerate(facts.gpus)]
    ids = [_ids(index, gpu, facts.gpus) for index, gpu in enumerate(facts.gpus)]
    devices: list[OfferedDevice] = []
    notes = list(facts.notes)
    for index in select_ids(options.device_ids, ids, "AMD GPU"):
        gpu = facts.gpus[index]
        if not gpu.nodes:
            skipped.append(f"GPU {index} ({gpu.address}) has no nodes below /dev/dri")
        else:
            devices += [OfferedDevice(name, node_actions(*gpu.nodes)) for name in names[index]]
            if not gpu.compute:
                notes.append(f"GPU {index} ({gpu.address}) is not in KFD's topology: ROCm cannot use it")
    if not devices:
        why = "; ".join(skipped) or "amdgpu drives no PCI device"
        raise CdiError("OCIGPU-CDI-7", f"no AMD GPU: {why}", "Load the driver: modprobe amdgpu")
    if facts.kfd is None:
        notes.append("the host has no /dev/kfd: ROCm will not work in containers")
    return DeviceOffer(
        source="amd",
        vendor=options.vendor or "amd.com",
        device_class=options.device_class or "gpu",
        devices=tuple(devices),
        base=node_actions(facts.kfd) if facts.kfd else (),
        notes=tuple(notes),
        skipped=tuple(skipped),
    )


def _names(index: int, gpu: AmdGpu, gpus: tuple[AmdGpu, ...], strategies: tuple[str, ...]) -> tuple[str, ...]:
    return choose_names(strategies, str(index), f"gpu{index}", gpu_name(gpu, gpus))


def _ids(index: int, gpu: AmdGpu, gpus: tuple[AmdGpu, ...]) -> tuple[str, ...]:
    """Return what a GPU may be called: index, PCI address (all partitions of that GPU) and with a number, unique id."""
    unique = (f"0x{gpu.unique_id:x}", unique_name(gpu, gpus)) if gpu.unique_id else ()
    return (str(index), gpu.address, f"{gpu.address}/{gpu.partition}", gpu_name(gpu, gpus), *filter(None, unique))
