"""Checks of a node that gives GPUs to virtual machines of tenants: pure functions over what tenant_facts.py read.

The versions and their effects: linux-pci and kvm lists, November 2024 to February 2025 (VFIO maps large BARs slowly),
Kata's releases 3.18 to 3.25; limits: KubeletConfiguration, configuration-qemu-nvidia-gpu.toml.

What hardware has yet to confirm: TOGGLES and SECONDS_PER_GIB, by which the time of a start is estimated.
"""

import re
from typing import Any

from ocigpu.core.errors import count
from ocigpu.core.toml import toml_value
from ocigpu.doctor.findings import Evidence, Finding, not_checked, ok, say
from ocigpu.doctor.tenant_facts import (
    BASELINES,
    CONTAINERD,
    KATA_CONFIGS,
    KATA_VERSION,
    KUBELET,
    TenantFacts,
    TenantFunction,
    Version,
)
from ocigpu.engines.document import look_up
from ocigpu.engines.wanted import KATA_HANDLER as HANDLER
from ocigpu.gpus.pci import BRIDGE_CLASS
from ocigpu.gpus.vfio.facts import leaves_group
from ocigpu.kubernetes.cluster.kinds import KINDS
from ocigpu.kubernetes.cluster.names import POD_RESOURCES_SOCKET

HOST_KERNEL, QEMU_VERSION, KATA_FIRST, KATA_FAST = (6, 15), (9, 2), (3, 23), (3, 25)
TOGGLES = 30
"""How often a guest switches the memory of one GPU off and on while it starts: 20 to 40 times were counted."""
SECONDS_PER_GIB = 1 / 64
"""For one mapping in steps of 4 KiB: 2 s for the 128 GiB of an H100."""
SAFE_SECONDS = {1: 300, 2: 600}
"""Time limits for one GPU, and for several."""
KUBELET_SECONDS, KATA_SECONDS = 120.0, 60.0
"""Limits where nothing is said: runtimeRequestTimeout, create_container_timeout."""
BRIDGES = (0x0600, BRIDGE_CLASS)
SOUND = 0x0403
"""What Kata attaches to no machine although it is in the group: bridges, and the sound function of a graphics board."""
NO_BUS_RESET = 0x2340
"""Device ids & 0xffc0 for which the kernel has switched the reset of the bus off (GH200)."""
RESETS = ("device_specific", "acpi", "flr", "af_flr", "bus", "cxl_bus")
_DURATION = re.compile(r"([0-9.]+)(h|ms|m|s)")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def extra_seconds(bars: "list[int]") -> int:
    """Return how much longer a machine with these GPUs takes to start on an old host, by their largest BARs."""
    return round(sum(TOGGLES * (bar / 2**30) * SECONDS_PER_GIB for bar in bars))


def check_kernel(facts: TenantFacts) -> list[Finding]:
    seen = Evidence(facts.kernel.where, facts.kernel.text, "6.15 or later")
    if facts.kernel.number is None:
        return [not_checked("the kernel's version is not known", seen)]
    if facts.kernel.number >= HOST_KERNEL:
        return [ok("the kernel maps large BARs in large steps", seen)]
    bars = [gpu.bar for gpu in facts.gpus]
    one, all_ = extra_seconds(bars[:1]), extra_seconds(bars)
    shown = f"{all_} s" if all_ < 120 else f"{round(all_ / 60)} min"
    return [say("tenants-kernel.old", seen, version=facts.kernel.text, one=one, all=shown, gpus=len(bars))]


def check_qemu(facts: TenantFacts) -> list[Finding]:
    seen = _wanted(facts.qemu, QEMU_VERSION)
    return _enough(facts.qemu, seen, QEMU_VERSION) or [say("tenants-qemu.old", seen, version=facts.qemu.text)]


def _wanted(version: Version, wanted: tuple[int, int]) -> Evidence:
    return Evidence(version.where, version.text, f"{wanted[0]}.{wanted[1]} or later")


def _enough(version: Version, seen: Evidence, wanted: tuple[int, int]) -> list[Finding]:
    """Return what to say of a version that is new enough or not known, nothing for an older one."""
    if version.number is None:
        return [not_checked("the version is not known", seen)]
    return [ok("new enough", seen)] if version.number >= wanted else []


def check_kata(facts: TenantFacts) -> list[Finding]:
    kata, seen = facts.kata, _wanted(facts.kata, KATA_FAST)
    if not (kata.text or facts.kata_path or facts.handlers):
        return [say("tenants-kata.absent", Evidence(KATA_VERSION, "", seen.wanted), path=KATA_VERSION)]
    if found := _enough(kata, seen, KATA_FAST):
        return found
    if not _enough(kata, seen, KATA_FIRST):
        return [say("tenants-kata.unusable", seen, version=kata.text)]
    return [say("tenants-kata.old", seen, version=kata.text)]


def parse_seconds(text: Any) -> float | None:
    """Return the seconds of a duration as the kubelet writes it, None for another value."""
    parts = _DURATION.findall(text) if isinstance(text, str) else []
    whole = "".join(number + unit for number, unit in parts) == text
    return sum(float(number) * _UNITS[unit] for number, unit in parts) if parts and whole else None


def check_timeouts(facts: TenantFacts) -> list[Finding]:
    gpus = max(len(facts.gpus), 1)
    wanted = SAFE_SECONDS[min(gpus, 2)]
    limits = []
    if facts.kubelet is not None:
        seconds = parse_seconds(facts.kubelet.get("runtimeRequestTimeout")) or KUBELET_SECONDS
        fix = f'# in {KUBELET}: runtimeRequestTimeout: "{wanted}s", then restart the kubelet'
        limits.append(("the kubelet", facts.kubelet_path, "runtimeRequestTimeout", seconds, fix))
    if facts.kata_config is not None:
        for table, key in ((("runtime",), "create_container_timeout"), (("agent", "kata"), "dial_timeout")):
            value = look_up(facts.kata_config, (*table, key))
            seconds = float(value) if isinstance(value, int) and value > 0 else KATA_SECONDS
            limits.append(("Kata", facts.kata_path, key, seconds, f"# in {facts.kata_path}: {key} = {wanted}"))
    if not limits:
        return [not_checked(f"neither {KUBELET} nor a configuration of Kata exists")]
    found = [
        say(
            "tenants-timeouts.short",
            Evidence(path, f"{key}: {seconds:g} s", f"{wanted} s"),
            where=f"{where} ({key})",
            seconds=f"{seconds:g}",
            gpus=gpus,
            wanted=wanted,
            fix=fix,
        )
        for where, path, key, seconds, fix in limits
        if seconds < wanted
    ]
    return found or [ok(f"a start may take {min(limit[3] for limit in limits):g} s")]


def check_groups(facts: TenantFacts) -> list[Finding]:
    found = []
    for gpu in facts.gpus:
        if gpu.group < 0:
            seen = Evidence(f"/sys/bus/pci/devices/{gpu.address}/iommu_group", "", "a group")
            found.append(say("tenants-iommu.off", seen, address=gpu.address))
    for number in sorted({each.group for each in facts.functions if each.group >= 0}):
        members = facts.group(number)
        own = [each for each in members if each.is_gpu or each.is_switch]
        others = [each for each in members if each not in own and not _stays_behind(each)]
        seen = Evidence(f"/sys/kernel/iommu_groups/{number}/devices", ", ".join(each.address for each in members))
        kinds = _kinds(own)
        if others:
            shown = ", ".join(f"{each.address} ({each.vendor:04x}:{each.device:04x})" for each in others)
            found.append(say("tenants-iommu.mixed", seen, group=number, gpus=kinds, others=shown))
        elif sum(each.is_gpu for each in own) > 1 or (len(own) > 1 and any(each.is_gpu for each in own)):
            found.append(say("tenants-iommu.shared", seen, group=number, gpus=kinds))
    if not facts.gpus:
        return [not_checked("no NVIDIA GPU is on the PCI bus")]
    return found or [ok(f"{count(len(facts.gpus), 'GPU')}, each in a group of its own")]


def _stays_behind(function: TenantFunction) -> bool:
    return function.base_class in BRIDGES or function.base_class == SOUND


def _kinds(functions: list[TenantFunction]) -> str:
    gpus = sum(each.is_gpu for each in functions)
    parts = [(gpus, "GPU"), (len(functions) - gpus, "NVSwitch")]
    return " and ".join(
        f"{number} {name}{'' if number == 1 else 'es' if name.endswith('h') else 's'}"
        for number, name in parts
        if number
    )


def check_binding(facts: TenantFacts) -> list[Finding]:
    found = []
    for each in facts.functions:
        given = each.is_gpu or each.is_switch
        fine = "vfio" in each.driver if given else leaves_group(each.driver)
        if fine or each.base_class in BRIDGES:
            continue
        what = "GPU" if each.is_gpu else "NVSwitch" if each.is_switch else f"in the group {each.group} of one"
        unbind = f"echo {each.address} > /sys/bus/pci/devices/{each.address}/driver/unbind" if each.driver else ""
        seen = Evidence(f"/sys/bus/pci/devices/{each.address}/driver", each.driver, "vfio-pci")
        driver = each.driver or "no driver"
        found.append(say("tenants-binding.other", seen, address=each.address, what=what, driver=driver, unbind=unbind))
    if not facts.gpus:
        return [say("tenants-binding.none", Evidence("/sys/bus/pci/devices", "no NVIDIA GPU", "one"))]
    return found or [ok("all GPUs, NVSwitches and their groups are bound to VFIO")]


def check_fabric(facts: TenantFacts) -> list[Finding]:
    switches = sum(each.is_switch for each in facts.functions)
    wrong = [(where, mode) for where, mode in facts.fabric_modes if mode.isdigit() and mode != "1"]
    if wrong:
        return [say("tenants-fabric.mode", Evidence(where, mode, "1"), where=where, mode=mode) for where, mode in wrong]
    if any(mode == "1" for _, mode in facts.fabric_modes):
        return [ok("Fabric Manager has partitions", *(Evidence(*each) for each in facts.fabric_modes))]
    if not switches:
        return [not_checked("the host has no NVSwitches")]
    cause = "; ".join(f"{where}: {mode}" for where, mode in facts.fabric_modes) or "OCIGPU_FABRIC is not set"
    return [say("tenants-fabric.unknown", switches=switches, cause=cause)]


def check_reset(facts: TenantFacts) -> list[Finding]:
    found = []
    for gpu in facts.gpus:
        seen = Evidence(f"/sys/bus/pci/devices/{gpu.address}/reset_method", " ".join(gpu.resets), "flr bus")
        real = [name for name in gpu.resets if name in RESETS]
        if not gpu.resets:
            found.append(say("tenants-reset.none", seen, address=gpu.address))
        elif not real:
            found.append(say("tenants-reset.weak", seen, address=gpu.address, methods=", ".join(gpu.resets)))
        elif "bus" not in real and "cxl_bus" not in real and gpu.device & 0xFFC0 != NO_BUS_RESET:
            found.append(say("tenants-reset.function", seen, address=gpu.address, methods=", ".join(real)))
    if not facts.gpus:
        return [not_checked("no NVIDIA GPU is on the PCI bus")]
    return found or [ok(f"{count(len(facts.gpus), 'GPU')} can be reset")]


def check_baseline(facts: TenantFacts) -> list[Finding]:
    if not facts.baselines:
        return [say("tenants-baseline.none", Evidence(BASELINES, "", "firmware.json"), path=BASELINES)]
    if signed := [Evidence(path, f"signed off by {by}") for path, by, why in facts.baselines if not why]:
        return [ok("there is a baseline", *signed)]
    return [
        say("tenants-baseline.unusable", Evidence(path, "", "signed off"), path=path, why=why)
        for path, _, why in facts.baselines
    ]


def check_runtime(facts: TenantFacts) -> list[Finding]:
    if HANDLER in facts.handlers:
        return [ok(f"containerd has {HANDLER}", Evidence(facts.handlers[HANDLER], HANDLER))]
    seen = Evidence(CONTAINERD[0], ", ".join(facts.handlers), HANDLER)
    return [say("tenants-runtime.absent", seen, handler=HANDLER, fix="ocigpu engine configure containerd --kata")]


def check_config(facts: TenantFacts) -> list[Finding]:
    document = facts.kata_config
    if document is None:
        return [say("tenants-config.absent", Evidence(KATA_CONFIGS[0], ""), path=", ".join(KATA_CONFIGS))]
    ports, found = max(len(facts.gpus), 1), []
    more = (
        ("qemu", "pcie_root_port", ports, "each GPU needs a port of its own", "error"),
        (
            "runtime",
            "pod_resource_api_sock",
            POD_RESOURCES_SOCKET,
            "else a pod's annotations choose its devices",
            "error",
        ),
    )
    for table, key, wanted, why, severity in (*KATA_VALUES, *more):
        value = look_up(document, (*(("hypervisor", "qemu") if table == "qemu" else ("runtime",)), key))
        enough = key == "pcie_root_port" and isinstance(value, int) and value >= ports
        if value == wanted or enough or (wanted == POD_RESOURCES_SOCKET and value):
            continue
        shown, path = "not set" if value is None else toml_value(value), facts.kata_path
        seen = Evidence(path, f"{key} = {shown}", toml_value(wanted))
        values = {"key": key, "found": shown, "wanted": toml_value(wanted), "why": why, "path": path}
        found.append(say("tenants-config.value", seen, severity=severity, **values))
    return found or [ok("Kata's configuration is that of GPUs", Evidence(facts.kata_path, "as it should be"))]


KATA_VALUES: tuple[tuple[str, str, Any, str, str], ...] = (
    ("qemu", "cold_plug_vfio", "root-port", "GPUs are attached before the machine starts", "error"),
    ("qemu", "hot_plug_vfio", "no-port", "GPUs are attached before the machine starts", "warning"),
    ("qemu", "enable_annotations", [], "a tenant's annotations would change the machine", "error"),
    ("runtime", "sandbox_cgroup_only", True, "the machine's memory is counted for its pod", "warning"),
    ("runtime", "static_sandbox_resource_mgmt", True, "the machine gets its size when it starts", "warning"),
)
"""Table, key, value, why, and how bad another one is."""


def check_kinds(facts: TenantFacts) -> list[Finding]:
    if isinstance(facts.kinds, str):
        return [not_checked(facts.kinds or "the API server was not queried")]
    found = []
    for name, revision in facts.kinds.items():
        seen, wanted = Evidence(name, str(revision), str(KINDS[name])), KINDS[name]
        if revision != wanted:
            which = "old" if revision < wanted else "new"
            found.append(say(f"tenants-kinds.{which}", seen, name=name, found=revision, wanted=wanted))
    if not facts.kinds:
        return [not_checked("the cluster has none of ocigpu's resource types")]
    return found or [ok("the cluster's kinds are those of this ocigpu", Evidence(", ".join(facts.kinds), "", ""))]
