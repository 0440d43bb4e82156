"""Checks of device nodes, their links in /dev/char, MIG, NVSwitch and persistence."""

from ocigpu.doctor.driver import why_not_ask
from ocigpu.doctor.host import Host
from ocigpu.doctor.records import Evidence, Finding, error, not_checked, note, ok, warning
from ocigpu.gpus.nvidia.nodes import NodeChange
from ocigpu.gpus.tree import Tree

SHOWN = 4
_UVM = ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


def _is_uvm(change: NodeChange) -> bool:
    return change.path.endswith(_UVM)


def _is_capability(change: NodeChange) -> bool:
    return "/nvidia-caps/" in change.path


def _shown(changes: list[NodeChange], what: str = "") -> tuple[Evidence, ...]:
    more = (Evidence(f"and {len(changes) - SHOWN} more", ""),) if len(changes) > SHOWN else ()
    listed = (Evidence(item.path, what or item.cause or "missing", _wanted(item)) for item in changes[:SHOWN])
    return (*listed, *more)


def _wanted(change: NodeChange) -> str:
    return f"device {change.number} mode {change.node.mode:04o}" if change.node else f"link to {change.target}"


def _names(changes: list[NodeChange]) -> str:
    names = [f"/dev/{change.path.rpartition('/dev/')[2]}" for change in changes[:SHOWN]]
    return ", ".join(names) + (f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else "")


def _no_driver(host: Host) -> list[Finding]:
    if host.platform:
        return [not_checked("WSL and Tegra have other device nodes")]
    return [not_checked("no driver is loaded: nodes have no numbers")]


def check_missing(host: Host) -> list[Finding]:
    """Are the nodes of GPUs and of the driver's control there?"""
    if host.driver is None:
        return _no_driver(host)
    missing = [item for item in host.missing_nodes if not _is_uvm(item) and not _is_capability(item)]
    late = [item for item in missing if item.path.endswith("/nvidia-modeset")]
    needed = [item for item in missing if item not in late]
    fix = (host.command("system", "create-device-nodes"),)
    findings = []
    if needed:
        findings.append(error(f"device nodes are missing: {_names(needed)}", _shown(needed, "missing"), fix))
    if late:
        findings.append(
            note("the node of nvidia-modeset is missing: only displays need it", _shown(late, "missing"), fix)
        )
    directory = f"{host.roots.dev}/dev"
    return findings or [
        ok("the driver's device nodes are there", Evidence(directory, f"{len(host.node_changes)} nodes"))
    ]


def check_uvm(host: Host) -> list[Finding]:
    """Is CUDA's unified memory there?"""
    if host.driver is None:
        return _no_driver(host)
    if "nvidia-uvm" not in host.majors:
        return [
            error(
                "the kernel module nvidia-uvm is not loaded: nvidia-smi works, and CUDA fails with error 999",
                (Evidence(f"{host.roots.proc}/devices", "no nvidia-uvm", "a device number of nvidia-uvm"),),
                (
                    "modprobe nvidia-uvm",
                    host.command("system", "create-device-nodes"),
                    "echo nvidia-uvm > /etc/modules-load.d/nvidia-uvm.conf  # for the next boot",
                ),
            )
        ]
    missing = [item for item in host.missing_nodes if _is_uvm(item)]
    if missing:
        text = f"nodes of nvidia-uvm are missing: {_names(missing)}; nvidia-smi works, and CUDA fails with error 999"
        return [error(text, _shown(missing, "missing"), (host.command("system", "create-device-nodes"),))]
    return [ok("nvidia-uvm is loaded and has its nodes", Evidence(f"{host.roots.dev}/dev/nvidia-uvm", "there"))]


def check_wrong(host: Host) -> list[Finding]:
    """Have the nodes the right type, number and permissions?"""
    if host.driver is None:
        return _no_driver(host)
    wrong = [item for item in host.wrong_nodes if item.cause != "missing"]
    if host.marker.get("nodes") == "stand-in":
        return [not_checked("regular files stand for the nodes of this simulated host")]
    replaced = [item for item in wrong if not item.cause.startswith("mode ")]
    changed = [item for item in wrong if item.cause.startswith("mode ")]
    fix = (host.command("system", "create-device-nodes"),)
    findings = []
    if replaced:
        text = f"device nodes are not what they should be: {_names(replaced)} (left from before the driver was loaded?)"
        findings.append(error(text, _shown(replaced), fix))
    if changed:
        text = f"device nodes have other permissions than the driver gives them: {_names(changed)}"
        findings.append(warning(text, _shown(changed), fix))
    present = len(host.node_changes) - len(host.missing_nodes)
    return findings or [ok("device nodes have the right numbers and permissions", Evidence("/dev", f"{present} nodes"))]


def check_links(host: Host) -> list[Finding]:
    """Can systemd find the devices by number?"""
    if host.driver is None:
        return _no_driver(host)
    changes = host.link_changes
    absent = {item.number for item in host.missing_nodes}
    bad = [item for item in changes if item.what != "keep" and item.number not in absent]
    if not bad:
        return [ok("every node has its link in /dev/char", Evidence("/dev/char", f"{len(changes)} links"))]
    systemd = host.exists("/run/systemd/system") and not (host.simulated and not host.root)
    fixes = (
        host.command("system", "create-dev-char-symlinks"),
        "# at every boot: enable the udev rule that comes with ocigpu",
    )
    text = f"{len(bad)} device nodes have no right link in /dev/char"
    if systemd:
        text += ': after "systemctl daemon-reload" containers may lose their GPUs ("Failed to initialize NVML")'
        return [warning(text, _shown(bad), fixes)]
    return [note(f"{text}: of interest where systemd manages cgroups, which does not run here", _shown(bad), fixes)]


# MIG


def _gpus(host: Host) -> "list[dict[str, object]] | None":
    """Return what NVML says of each GPU, None when it cannot be asked."""
    if why_not_ask(host) or host.nvml[0].problem:
        return None
    return host.nvml[1]


def check_mig_mode(host: Host) -> list[Finding]:
    """Is MIG mode as somebody has set it?"""
    gpus = _gpus(host)
    if gpus is None:
        return [not_checked("NVML cannot be asked")]
    modes = {gpu["index"]: gpu["mig"] for gpu in gpus if isinstance(gpu.get("mig"), list)}
    pending = [(index, mode) for index, mode in modes.items() if isinstance(mode, list) and mode[0] != mode[1]]
    if not pending:
        return [ok("no GPU waits for a change of MIG mode", Evidence("NVML", f"{len(modes)} GPUs that can do MIG"))]
    words = {0: "off", 1: "on"}
    return [
        warning(
            f"MIG of GPU {index} is {words.get(mode[0])} and will be {words.get(mode[1])} after a reset",
            (Evidence(f"NVML, GPU {index}", f"MIG mode {words.get(mode[0])}", f"{words.get(mode[1])} (pending)"),),
            (f"nvidia-smi --gpu-reset -i {index}  # with no program on it", "# or: reboot"),
        )
        for index, mode in pending
    ]


def check_mig_instances(host: Host) -> list[Finding]:
    """Has every GPU in MIG mode instances, and every one of these a compute instance?"""
    if _gpus(host) is None:
        return [not_checked("NVML cannot be asked")]
    findings = []
    enabled = [gpu for gpu in host.nvml[0].gpus if gpu.mig_enabled]
    for gpu in enabled:
        directory = f"{host.roots.proc}/driver/nvidia/capabilities/gpu{gpu.minor}/mig"
        instances = host.mig_instances[gpu.minor]
        empty = [name for name, parts in instances.items() if not parts]
        if not gpu.mig_devices and not instances:
            findings.append(
                warning(
                    f"GPU {gpu.index} is in MIG mode and has no instance: containers cannot use it",
                    (Evidence(directory, "no GPU instance", "one or more"),),
                    (
                        f"nvidia-smi mig -i {gpu.index} -lgip  # lists the profiles",
                        f"nvidia-smi mig -i {gpu.index} -cgi PROFILE,... -C",
                        f"# or without MIG: nvidia-smi -i {gpu.index} -mig 0",
                    ),
                )
            )
        for name in empty:
            number = name.removeprefix("gi")
            findings.append(
                warning(
                    f"GPU instance {number} of GPU {gpu.index} has no compute instance: it is no MIG device yet",
                    (Evidence(f"{directory}/{name}", "no compute instance", "one or more"),),
                    (f"nvidia-smi mig -i {gpu.index} -gi {number} -cci",),
                )
            )
    if findings:
        return findings
    if not enabled:
        return [ok("no GPU is in MIG mode", Evidence("NVML", "MIG off on all GPUs"))]
    devices = sum(len(gpu.mig_devices) for gpu in enabled)
    return [ok("GPUs in MIG mode have instances", Evidence("NVML", f"{devices} MIG devices on {len(enabled)} GPUs"))]


def check_mig_nodes(host: Host) -> list[Finding]:
    """Have MIG's capabilities their nodes?"""
    if host.driver is None:
        return _no_driver(host)
    nodes = [item for item in host.node_changes if _is_capability(item)]
    missing = [item for item in host.missing_nodes if _is_capability(item)]
    if missing:
        text = f"nodes of MIG capabilities are missing: {_names(missing)}; containers cannot open their MIG devices"
        return [error(text, _shown(missing, "missing"), (host.command("system", "create-device-nodes"),))]
    if not nodes:
        return [ok("the driver has no MIG capability", Evidence("/proc/driver/nvidia/capabilities", "none"))]
    return [
        ok("MIG capabilities have their nodes", Evidence(f"{host.roots.dev}/dev/nvidia-caps", f"{len(nodes)} nodes"))
    ]


# Other daemons of the driver


def check_fabric_manager(host: Host) -> list[Finding]:
    """Does the fabric manager run where there are NVSwitches?"""
    switches = len(host.pci_switches) or host.majors.get("nvidia-nvswitch", 0)
    if not switches:
        bus = f"{host.roots.sys}/bus/pci/devices"
        if not host.has_pci:
            return [not_checked(f"{bus} is not there")]
        looked = (Evidence(bus, "no NVSwitch"), Evidence(f"{host.roots.proc}/devices", "no nvidia-nvswitch"))
        return [ok("there is no NVSwitch that needs a fabric manager", *looked)]
    socket = "/run/nvidia-fabricmanager/socket"
    names = set(host.processes.values())
    running = "nv-fabricmanage" in names  # comm has 15 characters (proc_pid_comm(5))
    if host.roots.simulated:
        running = bool(Tree(host.roots.driver).find(socket))
    evidence = (Evidence("processes", "nv-fabricmanager" if running else "no nv-fabricmanager", "nv-fabricmanager"),)
    if running:
        return [ok("the fabric manager runs", *evidence)]
    return [
        error(
            'there are NVSwitches and no fabric manager: CUDA fails with error 802, "system not yet initialized"',
            evidence,
            (
                f"# its version must be the driver's, {host.driver_version or 'unknown'}",
                "systemctl enable --now nvidia-fabricmanager",
                "journalctl -u nvidia-fabricmanager  # when it does not stay",
            ),
        )
    ]


def check_persistence(host: Host) -> list[Finding]:
    """Does the driver keep GPUs awake that nothing uses?"""
    gpus = _gpus(host)
    if gpus is None:
        return [not_checked("NVML cannot be asked")]
    known = [gpu for gpu in gpus if isinstance(gpu.get("persistence"), int)]
    asleep = [str(gpu["index"]) for gpu in known if gpu["persistence"] == 0]
    if not known:
        return [not_checked("NVML does not tell the persistence mode")]
    if not asleep:
        return [ok("GPUs stay initialised between containers", Evidence("NVML", f"persistence on, {len(known)} GPUs"))]
    return [
        note(
            "persistence mode is off: the first container on an idle GPU waits a second or more for each GPU",
            (Evidence("NVML", f"persistence mode off: GPU {', '.join(asleep)}", "on"),),
            ("systemctl enable --now nvidia-persistenced", "# where there is no such service: nvidia-smi -pm 1"),
        )
    ]
