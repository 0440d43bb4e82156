"""Checks of device nodes, their links in /dev/char, MIG, NVSwitch and persistence."""

import os
import shlex

from ocigpu.core.errors import count
from ocigpu.doctor.driver import why_not_ask
from ocigpu.doctor.findings import Evidence, Finding, not_checked, ok, say
from ocigpu.doctor.host import Host
from ocigpu.engines.places import BOOTED
from ocigpu.gpus.nvidia.nodes import NodeChange
from ocigpu.gpus.nvidia.procfs import parse_devices
from ocigpu.gpus.tree import Tree, list_names, read_text
from ocigpu.gpus.vfio.facts import VFIO_DRIVERS

SHOWN = 4
_UVM = ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


def _is_uvm(change: NodeChange) -> bool:
    return change.path.endswith(_UVM)


def _is_capability(change: NodeChange) -> bool:
    return "/nvidia-caps/" in change.path


def _say_nodes(host: Host, what: str, changes: list[NodeChange], found: str = "", **values: object) -> list[Finding]:
    """Return a finding on these nodes, none without nodes."""
    if not changes:
        return []
    evidence = [Evidence(item.path, found or item.cause or "missing", _wanted(item)) for item in changes[:SHOWN]]
    names = ", ".join(f"/dev/{change.path.rpartition('/dev/')[2]}" for change in changes[:SHOWN])
    if len(changes) > SHOWN:
        names += f" and {len(changes) - SHOWN} more"
        evidence.append(Evidence(f"and {len(changes) - SHOWN} more", ""))
    return [say(what, *evidence, **{"names": names, "make": host.make_nodes, **values})]


def _wanted(change: NodeChange) -> str:
    return f"device {change.number} mode {change.node.mode:04o}" if change.node else f"link to {change.target}"


def _no_driver(host: Host) -> list[Finding]:
    if host.platform:
        return [not_checked("WSL and Tegra have other device nodes")]
    return [not_checked(f"{host.no_driver}: nodes have no numbers")]


def check_missing(host: Host) -> list[Finding]:
    """Are the nodes of GPUs and of the driver's control there?"""
    if host.driver is None:
        return _no_driver(host)
    missing = [item for item in host.missing_nodes if not _is_uvm(item) and not _is_capability(item)]
    late = [item for item in missing if item.path.endswith("/nvidia-modeset")]
    needed = [item for item in missing if item not in late]
    findings = _say_nodes(host, "device-nodes-missing.needed", needed, "missing")
    findings += _say_nodes(host, "device-nodes-missing.modeset", late, "missing")
    seen = Evidence(f"{host.roots.dev}/dev", f"{len(host.node_changes)} nodes")
    return findings or [ok("the driver's device nodes exist", seen)]


def check_uvm(host: Host) -> list[Finding]:
    """Is CUDA's unified memory there?"""
    if host.driver is None:
        return _no_driver(host)
    if "nvidia-uvm" not in host.majors:
        seen = Evidence(f"{host.roots.proc}/devices", "no nvidia-uvm", "a device number of nvidia-uvm")
        return [say("uvm-missing.module", seen, make=host.make_nodes)]
    missing = [item for item in host.missing_nodes if _is_uvm(item)]
    well = ok("nvidia-uvm is loaded and has its nodes", Evidence(f"{host.roots.dev}/dev/nvidia-uvm", "there"))
    return _say_nodes(host, "uvm-missing.nodes", missing, "missing") or [well]


def check_wrong(host: Host) -> list[Finding]:
    """Have the nodes the right type, number and permissions?"""
    if host.driver is None:
        return _no_driver(host)
    wrong = [item for item in host.wrong_nodes if item.cause != "missing"]
    if host.marker.get("nodes") == "stand-in":
        return [not_checked("regular files stand for the nodes of this simulated host")]
    changed = [item for item in wrong if item.cause.startswith("mode ")]
    findings = _say_nodes(host, "device-nodes-wrong.replaced", [item for item in wrong if item not in changed])
    findings += _say_nodes(host, "device-nodes-wrong.changed", changed)
    present = len(host.node_changes) - len(host.missing_nodes)
    return findings or [ok("device nodes have the right numbers and permissions", Evidence("/dev", f"{present} nodes"))]


def check_stray(host: Host) -> list[Finding]:
    """Are there nodes of a driver that does not exist?  Of this machine also while a simulated host is in use."""
    devices, directory = f"{host.proc}/devices", f"{host.root}/dev"
    text = read_text(devices)
    if host.platform or text is None:
        return [not_checked("WSL and Tegra have other device nodes" if host.platform else f"{devices} is unreadable")]
    if parse_devices(text):
        return [ok("the driver that the device nodes belong to is loaded", Evidence(devices, "nvidia"))]
    names = sorted(name for name in list_names(directory) if name.startswith("nvidia"))
    paths = [path for name in names if not os.path.isdir(path := f"{directory}/{name}")]
    if not paths:
        return [ok("no device node is left of a driver", Evidence(directory, "no nvidia*"))]
    evidence = [Evidence(path, "a node without a driver", "none") for path in paths[:SHOWN]]
    shown = ", ".join(f"/dev/{path.rpartition('/')[2]}" for path in paths[:SHOWN])
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return [say("stray-nodes.left", *evidence, names=shown + more, paths=shlex.join(paths))]


def check_links(host: Host) -> list[Finding]:
    """Can systemd find the devices by number?"""
    if host.driver is None:
        return _no_driver(host)
    if host.simulated and not host.root:
        return [
            not_checked("the nodes of a simulated host have their links in its own directory, which no program reads")
        ]
    absent = {item.number for item in host.missing_nodes}
    bad = [item for item in host.link_changes if item.what != "keep" and item.number not in absent]
    what = "systemd" if host.exists(BOOTED) else "missing"
    make = host.command("system", "create-dev-char-symlinks")
    well = ok("every node has its link in /dev/char", Evidence("/dev/char", f"{len(host.link_changes)} links"))
    return _say_nodes(host, f"dev-char-links.{what}", bad, number=len(bad), make=make) or [well]


# MIG


def _gpus(host: Host) -> "list[dict[str, object]] | None":
    """Return NVML's facts about each GPU, None when NVML does not answer."""
    if why_not_ask(host) or host.nvml[0].problem:
        return None
    return host.nvml[1]


def check_mig_mode(host: Host) -> list[Finding]:
    """Is MIG mode as somebody has set it?"""
    gpus = _gpus(host)
    if gpus is None:
        return [not_checked("NVML cannot be queried")]
    words = {0: "off", 1: "on"}
    modes = {gpu["index"]: gpu["mig"] for gpu in gpus if isinstance(gpu.get("mig"), list)}
    findings = []
    for index, mode in modes.items():
        if isinstance(mode, list) and mode[0] != mode[1]:
            now, then = words.get(mode[0]), words.get(mode[1])
            seen = Evidence(f"NVML, GPU {index}", f"MIG mode {now}", f"{then} (pending)")
            findings.append(say("mig-pending.pending", seen, index=index, now=now, then=then))
    well = ok("no GPU waits for a change of MIG mode", Evidence("NVML", f"{count(len(modes), 'GPU')} with MIG"))
    return findings or [well]


def check_mig_instances(host: Host) -> list[Finding]:
    """Has every GPU in MIG mode instances, and every one of these a compute instance?"""
    if _gpus(host) is None:
        return [not_checked("NVML cannot be queried")]
    findings = []
    enabled = [gpu for gpu in host.nvml[0].gpus if gpu.mig_enabled]
    for gpu in enabled:
        directory = f"{host.roots.proc}/driver/nvidia/capabilities/gpu{gpu.minor}/mig"
        instances = host.mig_instances[gpu.minor]
        if not gpu.mig_devices and not instances:
            seen = Evidence(directory, "no GPU instance", "one or more")
            findings.append(say("mig-half-configured.no-instance", seen, index=gpu.index))
        for name in (name for name, parts in instances.items() if not parts):
            seen = Evidence(f"{directory}/{name}", "no compute instance", "one or more")
            number = name.removeprefix("gi")
            findings.append(say("mig-half-configured.no-compute", seen, instance=number, index=gpu.index))
    if findings:
        return findings
    if not enabled:
        return [ok("no GPU is in MIG mode", Evidence("NVML", "MIG off on all GPUs"))]
    devices = sum(len(gpu.mig_devices) for gpu in enabled)
    return [
        ok(
            "GPUs in MIG mode have instances",
            Evidence("NVML", f"{count(devices, 'MIG device')} on {count(len(enabled), 'GPU')}"),
        )
    ]


def check_mig_nodes(host: Host) -> list[Finding]:
    """Have MIG's capabilities their nodes?"""
    if host.driver is None:
        return _no_driver(host)
    missing = [item for item in host.missing_nodes if _is_capability(item)]
    if missing:
        return _say_nodes(host, "mig-nodes.missing", missing, "missing")
    number = sum(map(_is_capability, host.node_changes))
    if not number:
        return [ok("the driver has no MIG capability", Evidence("/proc/driver/nvidia/capabilities", "none"))]
    return [ok("MIG capabilities have their nodes", Evidence(f"{host.roots.dev}/dev/nvidia-caps", f"{number} nodes"))]


# Other daemons of the driver


def check_fabric_manager(host: Host) -> list[Finding]:
    """Does the fabric manager run where there are NVSwitches?"""
    if not (len(host.pci_switches) or host.majors.get("nvidia-nvswitch", 0)):
        bus = f"{host.roots.sys}/bus/pci/devices"
        if not host.has_pci:
            return [not_checked(f"{bus} does not exist")]
        looked = (Evidence(bus, "no NVSwitch"), Evidence(f"{host.roots.proc}/devices", "no nvidia-nvswitch"))
        return [ok("there is no NVSwitch that needs a fabric manager", *looked)]
    if host.pci_switches and all(switch.driver in VFIO_DRIVERS for switch in host.pci_switches):
        seen = Evidence(f"{host.roots.sys}/bus/pci/devices", f"{len(host.pci_switches)} NVSwitches are bound to VFIO")
        return [ok("the NVSwitches are a virtual machine's, and so is their fabric manager", seen)]
    running = "nv-fabricmanage" in host.processes.values()  # comm has 15 characters (proc_pid_comm(5))
    if host.roots.stand_in:
        running = bool(Tree(host.roots.driver).find("/run/nvidia-fabricmanager/socket"))
    evidence = Evidence("processes", "nv-fabricmanager" if running else "no nv-fabricmanager", "nv-fabricmanager")
    if running:
        return [ok("the fabric manager runs", evidence)]
    return [say("fabric-manager.none", evidence, version=host.driver_version or "unknown")]


def check_persistence(host: Host) -> list[Finding]:
    """Does the driver keep GPUs awake that nothing uses?"""
    gpus = _gpus(host)
    if gpus is None:
        return [not_checked("NVML cannot be queried")]
    known = [gpu for gpu in gpus if isinstance(gpu.get("persistence"), int)]
    asleep = [str(gpu["index"]) for gpu in known if gpu["persistence"] == 0]
    if not known:
        return [not_checked("NVML does not report the persistence mode")]
    if not asleep:
        return [
            ok(
                "GPUs stay initialised between containers",
                Evidence("NVML", f"persistence on, {count(len(known), 'GPU')}"),
            )
        ]
    return [say("persistence-off.off", Evidence("NVML", f"persistence mode off: GPU {', '.join(asleep)}", "on"))]
