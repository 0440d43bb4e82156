"""What keeps containers from AMD's GPUs."""

from ocigpu.core.settings import Settings
from ocigpu.gpus.amd.facts import TOPOLOGY, read_amd_facts
from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vendors import Trouble

MAKE_NODES = "udevadm trigger --subsystem-match=drm --subsystem-match=kfd  # makes the nodes again"


def check(settings: Settings) -> tuple[Trouble, ...]:
    """Return what is wrong with amdgpu's devices; raises HostError (OCIGPU-HOST-3) for a file that cannot be read."""
    roots = find_roots(settings)
    facts = read_amd_facts(roots)
    found = []
    kfd = f"{roots.dev}/dev/kfd"
    if facts.kfd is None:
        fix = "modprobe amdgpu  # of a kernel with CONFIG_HSA_AMD, or AMD's own package"
        found.append(Trouble("error", "KFD is missing: ROCm cannot work on this host", kfd, "not there", "a node", fix))
    elif not facts.kfd.host_path:
        found.append(
            Trouble("error", "/dev/kfd is missing: ROCm cannot be used", kfd, "not there", "a node", MAKE_NODES)
        )
    for index, gpu in enumerate(facts.gpus):
        missing = [node.container_path for node in gpu.nodes if not node.host_path]
        if missing or not gpu.nodes:
            names = ", ".join(missing) or "card and render node"
            text = f"GPU {index} ({gpu.address}): nodes are missing: {names}"
            found.append(Trouble("error", text, f"{roots.dev}/dev/dri", "not there", "a node", MAKE_NODES))
        if not gpu.compute:
            text = f"GPU {index} ({gpu.address}) is not in KFD's topology: ROCm cannot use it"
            place = f"{roots.sys}/{TOPOLOGY}"
            fix = "dmesg | grep -i kfd  # shows why, or that ROCm does not support this model"
            found.append(Trouble("warning", text, place, "no node of it", "one", fix))
    for function in facts.unbound:
        text = f"GPU {function.text} is not bound to amdgpu, but to {function.driver or 'no driver'}"
        place = f"{roots.sys}/bus/pci/devices/{function.address}/driver"
        fix = f"driverctl unset-override {function.address}  # unless a virtual machine is to have it"
        found.append(Trouble("warning", text, place, function.driver or "none", "amdgpu", fix))
    return tuple(found)
