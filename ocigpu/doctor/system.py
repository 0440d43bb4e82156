"""Checks of the kernel, of security modules, and of what rootless containers need."""

import filecmp
import os
import re
import shlex
from contextlib import suppress

from ocigpu.containers.report import find_members
from ocigpu.core.errors import printable
from ocigpu.core.settings import DEFAULT_PATH
from ocigpu.doctor.files import LARGE_TEXT
from ocigpu.doctor.findings import KNOWN, Evidence, Finding, not_checked, ok, say
from ocigpu.doctor.host import Host
from ocigpu.doctor.logs import denials
from ocigpu.provision.ldconfig import CANDIDATES

NOBODY = 65534
CONTROLLERS = ("cpu", "memory", "pids")


def check_kernel(host: Host) -> list[Finding]:
    """Is the kernel new enough for what is in use?"""
    release = host.kernel_release
    match = re.match(r"(\d+)\.(\d+)", release)
    if not match:
        return [not_checked(f"the kernel's release is unknown ({host.proc}/sys/kernel/osrelease)")]
    version = (int(match[1]), int(match[2]))
    path = f"{host.proc}/sys/kernel/osrelease"
    v2 = host.exists("/sys/fs/cgroup/cgroup.controllers")
    findings = []
    for known in KNOWN["kernel"]:
        first, feature, needs_v2 = tuple(known["since"]), known["feature"], known["cgroup2"]
        if version >= first or (needs_v2 and not v2):
            continue
        evidence = Evidence(path, release, f"{first[0]}.{first[1]} or later, for {feature}")
        what, values = "needed" if needs_v2 else "slower", {"feature": feature, "without": known["without"]}
        findings.append(say(f"kernel-too-old.{what}", evidence, release=release, **values))
    return findings or [ok(f"kernel {release} supports what ocigpu uses", Evidence(path, release, "5.6 or later"))]


def check_ldconfig(host: Host) -> list[Finding]:
    """Is there an ldconfig that can be run for containers?"""
    named = host.settings.ldconfig
    if not host.has_system:
        return [not_checked("the simulated host has no programs of a system")]
    paths = (named,) if named else CANDIDATES
    if host.settings.loader_cache == "merge" and not named:
        return [ok('loader-cache = "merge": loader caches are written without ldconfig')]
    found = host.program(*paths)
    usable = [path for path in paths if host.program(path) and host.text(path, 2) != "#!"]
    if usable:
        return [ok("there is an ldconfig to run for containers", host.evidence(usable[0], "a program"))]
    cause = f"{found} is a script" if found else "none"
    where = host.settings.path or host.path("/etc/ocigpu/config.toml")
    evidence = (host.evidence(path, cause if path == found else "none", "a program, no script") for path in paths[:3])
    what = "named" if named else "none"
    return [say(f"ldconfig-missing.{what}", *evidence, where=where, quoted=shlex.quote(where))]


# Security modules


def check_selinux(host: Host) -> list[Finding]:
    """Does SELinux let containers use devices?

    Newer policies have a boolean for less than all devices, with NVIDIA's, which are xserver_misc_device_t
    (container-selinux, container.te: container_use_xserver_devices).
    """
    if not host.exists("/sys/fs"):
        return [not_checked(f"{host.sys}/fs does not exist")]
    enforce = (host.text("/sys/fs/selinux/enforce") or "").strip()
    if enforce != "1":
        found = "not there" if not enforce else "0 (permissive)"
        return [ok("SELinux does not enforce", host.evidence("/sys/fs/selinux/enforce", found))]
    boolean = "/sys/fs/selinux/booleans/container_use_devices"
    value = (host.text(boolean) or "").split()
    narrow = "/sys/fs/selinux/booleans/container_use_xserver_devices"
    if value[:1] != ["1"] and not host.other_vendors and host.exists(narrow):
        boolean, value = narrow, (host.text(narrow) or "").split()
    evidence: tuple[Evidence, ...] = (
        host.evidence("/sys/fs/selinux/enforce", "1 (enforcing)"),
        host.evidence(boolean, value[0] if value else "not there", "1"),
    )
    denied = _denied(host, "avc")
    if value[:1] == ["1"] and not denied:
        return [ok("SELinux enforces, and containers may use devices", *evidence)]
    if denied:
        evidence += (Evidence("kernel log", denied[-1]),)
    if not value and not denied:
        return [not_checked("SELinux enforces, and its policy has no container_use_devices to look at", *evidence)]
    name = boolean.rpartition("/")[2]
    return [say(f"selinux-denies.{'denied' if denied else 'off'}", *evidence, boolean=name)]


def _denied(host: Host, kind: str) -> list[str]:
    return [printable(line, 300) for line in denials(host.kernel_log) if kind in line]


def check_apparmor(host: Host) -> list[Finding]:
    """Has AppArmor refused something of the driver?"""
    if not host.exists("/sys/module"):
        return [not_checked(f"{host.sys}/module does not exist")]
    enabled = (host.text("/sys/module/apparmor/parameters/enabled") or "").strip()
    if enabled != "Y":
        return [
            ok("AppArmor is not on", host.evidence("/sys/module/apparmor/parameters/enabled", enabled or "not there"))
        ]
    denied = _denied(host, "apparmor")
    if not denied:
        seen = Evidence("kernel log", f"{len(host.kernel_log)} lines, none refuses anything of the driver")
        return [ok("AppArmor is on and refused nothing of the driver", seen)]
    profile = re.search(r'profile="([^"]{1,200})"', denied[-1])
    name = profile[1] if profile else "PROFILE"
    return [say("apparmor-denies.denied", Evidence("kernel log", denied[-1]), name=name, quoted=shlex.quote(name))]


# Rootless


def rootless_users(host: Host) -> list[tuple[str, int]]:
    """Return (name, user id) of the users with rootless containers: this one, and those with an image store."""
    users = []
    for line in (host.text("/etc/passwd", LARGE_TEXT) or "").splitlines():
        fields = line.split(":")
        if len(fields) < 7 or not fields[2].isdigit() or int(fields[2]) < 1000 or int(fields[2]) == NOBODY:
            continue
        uid, home = int(fields[2]), fields[5]
        stores = (f"{home}/.local/share/containers/storage", f"{home}/.local/share/docker")
        if (host.live and uid == host.user) or any(host.exists(path) for path in stores):
            users.append((fields[0], uid))
    return users


def check_subordinate_ids(host: Host) -> list[Finding]:
    """Have users of rootless containers subordinate ids?"""
    users = rootless_users(host)
    if not users:
        return [not_checked("no user here has rootless containers")]
    findings = []
    for name, uid in users:
        absent = []
        for path in ("/etc/subuid", "/etc/subgid"):
            owners = [line.partition(":")[0] for line in (host.text(path, LARGE_TEXT) or "").splitlines()]
            if name not in owners and str(uid) not in owners:
                absent.append(path)
        if absent:
            user = printable(name, 64)
            seen = (host.evidence(path, f"no line of {user}", f"{name}:100000:65536") for path in absent)
            findings.append(say("rootless-no-ids.none", *seen, user=user, quoted=shlex.quote(name)))
    if findings:
        return findings
    return [
        ok("users of rootless containers have subordinate ids", Evidence("/etc/subuid", ", ".join(n for n, _ in users)))
    ]


def check_delegation(host: Host) -> list[Finding]:
    """Are cgroups delegated to users of rootless containers?"""
    users = rootless_users(host)
    if not users:
        return [not_checked("no user here has rootless containers")]
    if not host.exists("/sys/fs/cgroup/cgroup.controllers"):
        seen = host.evidence("/sys/fs/cgroup/cgroup.controllers", "not there", "cgroup version 2")
        return [say("rootless-no-delegation.v1", seen)]
    findings, fine, away = [], [], []
    for name, uid in users:
        path = f"/sys/fs/cgroup/user.slice/user-{uid}.slice/user@{uid}.service/cgroup.controllers"
        text = host.text(path)
        if text is None:
            away.append(name)
            continue
        absent = [item for item in CONTROLLERS if item not in text.split()]
        if not absent:
            fine.append(host.evidence(path, text.strip()))
            continue
        seen = host.evidence(path, text.strip() or "none", " ".join(CONTROLLERS))
        values = {"user": printable(name, 64), "absent": " and no ".join(absent)}
        findings.append(say("rootless-no-delegation.absent", seen, **values))
    if fine:
        findings.append(ok("cgroups are delegated to users of rootless containers", *fine))
    if away:
        findings.append(
            not_checked(f"{printable(', '.join(away), 200)}: not logged in, so there is no cgroup to look at")
        )
    return findings


# Processes


def check_deleted(host: Host) -> list[Finding]:
    """Do running programs hold driver files that have been replaced?"""
    held, unread = host.replaced_files
    if held:
        containers = _containers(host, list(held))
        evidence = tuple(
            Evidence(
                f"{name} ({pid}){f', container {containers[pid][1]}' if pid in containers else ''}", f"{path} (deleted)"
            )
            for pid, (name, path) in list(held.items())[:4]
        )
        restarts = dict.fromkeys(
            shlex.join([engine, "restart", container])
            if engine in ("docker", "podman")
            else f"# restart container {printable(container, 200)}{' of ' + engine if engine else ''}"
            for engine, container in containers.values()
        )
        others = ("# restart these programs: " + ", ".join(str(pid) for pid in held if pid not in containers),)
        lines = (*restarts, *(others if len(containers) < len(held) else ()))
        values = {"number": len(held), "many": "s" * (len(held) != 1), "restarts": lines}
        return [say("deleted-driver-files.held", *evidence, **values)]
    if not host.processes:
        return [not_checked(f"no process is seen in {host.proc}")]
    if unread:
        return [not_checked(f"{unread} of {len(host.processes)} processes could not be inspected")]
    return [
        ok("no running program holds a replaced driver file", Evidence(host.proc, f"{len(host.processes)} processes"))
    ]


def _containers(host: Host, pids: list[int]) -> dict[int, tuple[str, str]]:
    """Return engine and name of the container that a process is in, for those that are in one on this machine."""
    containers = {one.state_file: one for one in host.containers[0] if one.pid}
    members = find_members(list(containers.values()), pids)
    names = {pid: containers[state_file] for state_file, found in members.items() for pid in found}
    return {pid: (names[pid].engine, names[pid].name) for pid in pids if pid in names}


def check_simulated(host: Host) -> list[Finding]:
    """Are the GPUs real?"""
    if not host.roots.stand_in:
        return [
            ok("the settings name no simulated host", Evidence(host.settings.path or "settings", "no simulation.root"))
        ]
    if not host.root and not os.path.isdir(root := host.settings.simulation_root):
        values = {"root": root, "settings": host.settings.path}
        return [say("simulated-host.gone", Evidence(root, "none", "a simulated host"), **values)]
    if not host.simulated:
        return [not_checked("another machine's root is examined, which is not one of our simulated hosts")]
    seen = f"made by ocigpu {host.marker.get('version')}"
    evidence = Evidence(f"{host.settings.simulation_root}/.ocigpu-sim.json", seen, "no simulation")
    gpus = host.marker.get("gpus")
    number = len(gpus) if isinstance(gpus, list) else 0
    model = host.marker.get("model")
    return [say("simulated-host.made", evidence, number=number, model=model, leave=_leave(host))]


def _leave(host: Host) -> str:
    """Return how to get to the real GPUs: without the system's settings file, if it is the simulated host's."""
    path = host.settings.path
    if path == DEFAULT_PATH and not host.root:
        with suppress(OSError):
            if filecmp.cmp(path, f"{host.settings.simulation_root}/config.toml", shallow=False):
                return f"rm {path}"
        return "ocigpu config unset simulation.root"
    return "leave out --config, OCIGPU_CONFIG and simulation.root in the settings"
