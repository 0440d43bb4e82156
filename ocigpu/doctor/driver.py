"""Checks of the driver: is there one, do its parts fit, does it answer."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ocigpu.core.errors import HostError, count, printable
from ocigpu.doctor.files import LARGE_TEXT
from ocigpu.doctor.findings import KNOWN, Evidence, Finding, not_checked, ok, say
from ocigpu.doctor.host import Host
from ocigpu.gpus.nvidia.files import read_binaries
from ocigpu.gpus.nvidia.libraries import HOMES
from ocigpu.gpus.nvidia.nvml import LIB_RM_VERSION_MISMATCH
from ocigpu.gpus.tegra import CSV_DIRECTORY
from ocigpu.gpus.tree import CONTAINER_ROOT, Tree
from ocigpu.gpus.vendors import load_vendor
from ocigpu.gpus.vfio.facts import VFIO_DRIVERS
from ocigpu.gpus.wsl import LIBRARIES, STORES

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_LOST_XIDS = ("79", "119", "120")
"""79: fallen off the bus; 119 and 120: the GPU's own processor (GSP) does not answer (NVIDIA, "XID Errors")."""


def check_gpu(host: Host) -> list[Finding]:
    """Is there a GPU at all?"""
    if host.listed:
        files, nodes = host.listed.listed.files if host.listed.listed else (), host.listed.control_nodes
        given = f"{count(len(nodes) + 1, 'device node')} and {count(len(files), 'file')}"
        return [ok(f"Tegra: containers get {given} of its lists", host.evidence(CSV_DIRECTORY, "lists"))]
    if host.platform:
        return [not_checked(f"this is {'WSL' if host.platform == 'wsl' else 'a Tegra system'}: no GPU on the PCI bus")]
    if host.settings_error is not None:  # they may say where the driver is
        return [not_checked("the settings cannot be used: see settings-unusable")]
    directory = f"{host.roots.sys}/bus/pci/devices"
    if not host.has_pci:
        return [not_checked(f"{directory} does not exist")]
    if host.pci_gpus:
        found = ", ".join(gpu.text for gpu in host.pci_gpus[:4]) + (", ..." if len(host.pci_gpus) > 4 else "")
        return [ok(f"{count(len(host.pci_gpus), 'NVIDIA GPU')} on the PCI bus", Evidence(directory, found))]
    if host.other_vendors:
        named = ", ".join(host.other_vendors)
        return [ok(f"the GPUs of this host are those of source {named}", Evidence(directory, "no NVIDIA GPU"))]
    return [say("no-gpu.none", Evidence(directory, "no display controller of vendor 10de", "one or more"))]


_FOREIGN = ("libcuda.so.1", "libnvidia-ml.so.1")
_LIBRARY_DIRECTORIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


def check_wsl(host: Host) -> list[Finding]:
    """Has WSL the GPUs of Windows, and no driver of Linux in their way?"""
    if not host.is_wsl:
        return [not_checked("this is not WSL")]
    if not host.wsl_stores:
        seen = host.evidence("/dev/dxg", "there" if host.exists("/dev/dxg") else "none", "there")
        files = host.evidence(STORES, "no driver of NVIDIA", "libcuda.so.1.1 in one of its directories")
        return [say("wsl-gpus.none", seen, files)]
    found = [f"{directory}/{name}" for directory in _LIBRARY_DIRECTORIES for name in _FOREIGN]
    foreign = [path for path in found if host.exists(path) and "/wsl/" not in host.find(path)]
    if foreign:
        evidence = (host.evidence(path, "there", f"none: {LIBRARIES} contains them") for path in foreign[:4])
        return [say("wsl-gpus.linux", *evidence, path=host.path(foreign[0]))]
    stores = (host.evidence(path, "NVIDIA's driver for Windows") for path in host.wsl_stores)
    return [ok("WSL: Windows has a driver of NVIDIA, and its GPUs are behind /dev/dxg", *stores)]


def check_vendor(host: Host) -> list[Finding]:
    """Can containers have the GPUs of other vendors, if there are any?"""
    findings = []
    for name in host.other_vendors:
        found = [
            say(f"vendor-devices.{one.severity}", Evidence(one.place, one.seen, one.wanted), text=one.text, fix=one.fix)
            for one in load_vendor(name).check(host.settings)
        ]
        findings += found or [ok(f"{name}: containers can use every GPU")]
    return findings or [not_checked("no other vendor's driver is loaded")]


def check_driver(host: Host) -> list[Finding]:
    """Is the kernel module loaded?"""
    version_file = f"{host.roots.proc}/driver/nvidia/version"
    if host.listed:
        version = host.listed.driver_version or "of unknown version"
        return [ok(f"driver {version} of Tegra is loaded", Evidence(version_file, host.driver_version or "none"))]
    if host.platform:
        return [not_checked("on WSL and Tegra the driver is not the kernel module nvidia")]
    if host.driver_version:
        return [ok(f"driver {host.driver_version} is loaded", Evidence(version_file, host.driver_version))]
    if host.settings_error is not None:
        return [not_checked("the settings cannot be used: see settings-unusable")]
    if not host.pci_gpus:
        return [not_checked("there is no NVIDIA GPU that needs one", Evidence(version_file, "none"))]
    if all(gpu.driver in VFIO_DRIVERS for gpu in host.pci_gpus):
        seen = Evidence(version_file, "none", "none")
        return [ok("all GPUs are bound to VFIO, for virtual machines: see ocigpu doctor --tenants", seen)]
    if any(gpu.driver == "nouveau" for gpu in host.pci_gpus):
        return [not_checked("nouveau drives the GPUs: see nouveau-loaded")]
    release = host.kernel_release
    evidence = [Evidence(version_file, "none", "the version of the loaded module")]
    if host.library_versions:
        libraries = f"libraries of driver {', '.join(host.library_versions)}"
        evidence.append(Evidence(f"{host.roots.driver or '/'}", libraries))
    if any(item.severity == "error" for item in check_secure_boot(host)):
        return [not_checked("the kernel refuses the module: see secure-boot")]
    modules = f"/lib/modules/{release}/modules.dep"
    listed = host.text(modules, LARGE_TEXT) if release else None
    if listed is not None and re.search(r"/nvidia(-current)?\.ko", listed):
        return [say("no-driver.not-loaded", *evidence, host.evidence(modules, "lists the module nvidia"))]
    if release:
        evidence.append(host.evidence(modules, "no module nvidia" if listed is not None else "no such file"))
    sources = [name for name in host.names("/usr/src") if name.startswith("nvidia-")]
    if sources:
        evidence.append(host.evidence("/usr/src", ", ".join(sources)))
        return [say("no-driver.not-built", *evidence, release=release or "$(uname -r)")]
    return [say("no-driver.none", *evidence, install=_install_command(host))]


_REFUSED = re.compile(
    r"Loading of (?:unsigned module|module with unavailable key) is rejected|unsigned module loading is restricted"
    r"|nvidia.*(?:Key was rejected by service|Required key not available)"
)
"""What the kernel says of a module that it does not load for its signature (kernel/module/signing.c, lockdown)."""
_KEYS = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub", "/etc/pki/akmods/certs/public_key.der")
"""Keys that Ubuntu, DKMS and akmods sign modules with."""


def check_secure_boot(host: Host) -> list[Finding]:
    """Has the kernel refused to load the module?"""
    if host.driver_version:
        return [ok("the module is loaded", Evidence(f"{host.roots.proc}/driver/nvidia/version", host.driver_version))]
    if not host.pci_gpus:
        return [not_checked("there is no GPU that needs a module")]
    refused = [line for line in host.kernel_log if _REFUSED.search(line)]
    if not refused:
        return [ok("the kernel's log shows no module rejected for its signature", Evidence("kernel log", "none"))]
    key = next((path for path in _KEYS if host.exists(path)), _KEYS[1])
    line = printable(refused[-1].strip(), 200)
    return [say("secure-boot.refused", Evidence("kernel log", line), line=line, key=key)]


def check_links(host: Host) -> list[Finding]:
    """Do the names that programs open lead to the driver's libraries?"""
    version, tree = host.driver_version, Tree(host.roots.driver)
    wanted = [
        (path.rpartition("/")[0], name)
        for path in host.libraries
        for name in ("libcuda.so", "libnvidia-ml.so")
        if path.endswith(f"/{name}.{version}")
    ]
    if not version or not wanted:
        return [not_checked(f"{host.no_driver}, or none of its libraries was found")]
    findings, right = [], []
    for directory, name in dict.fromkeys(wanted):
        path = f"{directory}/{name}.1"
        place = host.roots.driver + path
        found = tree.resolve(path) if tree.find(path) else ""
        right.append(Evidence(place, found or "nothing", f"{name}.{version}"))
        if os.path.basename(found) == f"{name}.{version}" or (found and not os.path.islink(place)):
            continue
        target = os.readlink(place) if os.path.islink(place) else "nothing"
        link = shlex.join(["ln", "-sfn", f"{name}.{version}", place])
        values = {"path": place, "target": printable(target, 200), "name": name, "link": link}
        ldconfig = "" if host.roots.driver else "ldconfig"
        findings.append(say("driver-link.wrong", right[-1], **values, ldconfig=ldconfig))
    return findings or [ok("libcuda.so.1 and libnvidia-ml.so.1 lead to the driver's libraries", *right)]


def _install_command(host: Host) -> str:
    other = "# install the driver: https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/"
    return str(_of_system(host, KNOWN["install"]) or other)


def _of_system(host: Host, table: Mapping[str, Any]) -> Any:
    """Return the entry of a table for this host's system or one that it is like, None where there is none."""
    names = (host.system_names.get("ID", ""), *host.system_names.get("ID_LIKE", "").split())
    return next((table[name] for name in names if name in table), None)


def check_nouveau(host: Host) -> list[Finding]:
    """Does the kernel's own driver hold the GPUs?"""
    directory = f"{host.roots.sys}/module/nouveau"
    if host.roots.stand_in and not host.root:
        return [not_checked("the driver of a simulated host is examined, not this machine's kernel")]
    if not host.exists("/sys/module"):
        return [not_checked(f"{host.sys}/module does not exist")]
    taken = [gpu for gpu in host.pci_gpus if gpu.driver == "nouveau"]
    loaded = host.exists("/sys/module/nouveau")
    if not taken and not loaded:
        return [ok("nouveau is not loaded", Evidence(directory, "none"))]
    evidence = [
        Evidence(directory, "loaded" if loaded else "none", "none"),
        *(Evidence(f"{host.roots.sys}/bus/pci/devices/{gpu.address}/driver", "nouveau", "nvidia") for gpu in taken[:4]),
    ]
    tool = "dracut --force" if host.program("/usr/bin/dracut", "/sbin/dracut") else "update-initramfs -u"
    what = "loaded" if taken or not host.driver_version else "beside"
    return [say(f"nouveau-loaded.{what}", *evidence, tool=tool)]


def check_binding(host: Host) -> list[Finding]:
    """Does the driver have every GPU on the bus?"""
    if not host.pci_gpus or not host.driver_version:
        return [not_checked("there is no GPU on the PCI bus" if not host.pci_gpus else host.no_driver)]
    others = [gpu for gpu in host.pci_gpus if gpu.driver not in ("nvidia", "nouveau")]
    directory = f"{host.roots.sys}/bus/pci/devices"
    if not others:
        return [
            ok(
                "the driver drives every GPU",
                Evidence(directory, f"{count(len(host.pci_gpus), 'GPU')} bound to nvidia"),
            )
        ]
    return [
        say(
            f"gpu-other-driver.{'other' if gpu.driver else 'none'}",
            Evidence(f"{directory}/{gpu.address}/driver", gpu.driver or "none", "nvidia"),
            gpu=gpu.text,
            driver=gpu.driver,
            address=gpu.address,
        )
        for gpu in others
    ]


def check_libraries(host: Host) -> list[Finding]:
    """Are the driver's libraries there?"""
    if host.listed:
        return [not_checked("on Tegra lists name the libraries: see no-gpu")]
    root, version = host.roots.driver or "/", host.driver_version
    settings = host.settings.path or host.path("/etc/ocigpu/config.toml")
    if (missing := host.missing_libraries) and version in host.library_versions:
        files = [Evidence(root, f"no 64-bit {name}.so.{version}", f"{name}.so.{version}") for name in missing]
        needs = " and ".join({"libcuda": "compute", "libnvidia-ml": "utility"}[name] for name in missing)
        values = {"version": version, "names": " and ".join(missing), "needs": needs, "settings": shlex.quote(settings)}
        return [say("driver-libraries.some", *files, **values, **_library_fixes(host, missing))]
    if host.library_versions:
        seen = Evidence(root, f"version {', '.join(host.library_versions)}")
        return [ok("libcuda and libnvidia-ml are installed", seen, *_places(host))]
    if not version:
        return [not_checked(host.no_driver, Evidence(root, "no libcuda and no libnvidia-ml"))]
    seen = Evidence(root, "no libcuda.so.* and no libnvidia-ml.so.*", f"those of {version}")
    fixes = _library_fixes(host, ["libcuda", "libnvidia-ml"])
    return [say("driver-libraries.none", seen, *_passed_over(host), settings=shlex.quote(settings), **fixes)]


def _library_fixes(host: Host, missing: Sequence[str]) -> dict[str, str]:
    """Return the commands that bring libraries of the driver back, where its packages or its maker are known."""
    version, stand_in = host.driver_version, host.roots.driver != host.root
    if stand_in and host.simulated:
        return {"install": _make_again(host), "ldconfig": ""}
    table = None if stand_in or host.program("/usr/bin/nvidia-uninstall") else _of_system(host, KNOWN["libraries"])
    if table is None:  # a driver container's, or of a .run installer
        return {"install": f"# install the user-space part of driver {version} again; then", "ldconfig": "ldconfig"}
    branch = version.partition(".")[0]
    server = any(name.startswith(f"libnvidia-cfg1-{branch}-server") for name in host.names("/var/lib/dpkg/info"))
    names = (table[name].format(branch=branch, variant="-server" if server else "") for name in missing)
    packages = " ".join(dict.fromkeys(names))
    return {"install": table["command"].format(packages=packages), "ldconfig": "ldconfig"}


def _make_again(host: Host) -> str:
    """Return the command that makes a simulated host again."""
    directory = shlex.quote(host.settings.simulation_root)
    gpus, model = host.marker.get("gpus"), host.marker.get("model")
    several = " and " in str(host.marker.get("product"))
    if several or not isinstance(gpus, list) or any(gpu.get("mig_devices") for gpu in gpus):
        return f"# make the simulated host again: ocigpu sim remove {directory}, ocigpu sim create {directory} ..."
    words = f"--gpus {len(gpus)} --model {model} --driver-version {host.driver_version}"
    return f"ocigpu sim remove {directory} && ocigpu sim create {directory} {words}"


def _places(host: Host) -> Iterator[Evidence]:
    """Yield where the driver's parts are, where that is not the usual place or one of several."""
    if host.roots.driver == host.roots.host + CONTAINER_ROOT and host.settings.driver_root == "/":
        yield Evidence(host.roots.driver, "the root of a driver container, found without driver.root in the settings")
    named = [path for path in host.libraries if path.rpartition("/")[2].startswith(("libcuda.so", "libnvidia-ml.so"))]
    for directory in dict.fromkeys(path.rpartition("/")[0] for path in named):
        yield Evidence(host.roots.driver + directory, "libraries of the driver")
    programs = read_binaries(Tree(host.roots.driver))
    for path in (one.host_path for one in programs if one.container_path.endswith("/nvidia-smi")):
        yield Evidence(path, "nvidia-smi")


def _passed_over(host: Host) -> list[Evidence]:
    """Return directories that could hold the driver and that others than root may have written."""
    tree = Tree(host.roots.driver)
    there = [home for home in HOMES if tree.find(home) and not tree.owned(home)]
    return [
        Evidence(host.roots.driver + home, "not root's alone: passed over", "owner root, no others may write")
        for home in there
    ]


def check_versions(host: Host) -> list[Finding]:
    """Do kernel module and libraries belong together?"""
    kernel, libraries = host.driver_version, host.library_versions
    if host.listed:
        return [not_checked("on Tegra libraries have versions of their own")]
    if not kernel or not libraries:
        return [not_checked(host.no_driver if not kernel else "no driver library was found")]
    evidence = (
        Evidence(f"{host.roots.proc}/driver/nvidia/version", kernel),
        Evidence(f"{host.roots.driver or '/'}", f"libcuda, libnvidia-ml {', '.join(libraries)}", kernel),
    )
    if libraries == [kernel]:
        return [ok(f"kernel module and libraries are both {kernel}", *evidence)]
    if kernel in libraries:
        others = ", ".join(version for version in libraries if version != kernel)
        return [say("driver-library-mismatch.others", *evidence, others=others)]
    if len(libraries) > 1:
        return [say("driver-library-mismatch.several", *evidence, kernel=kernel, libraries=", ".join(libraries))]
    return [say("driver-library-mismatch.updated", *evidence, kernel=kernel, libraries=", ".join(libraries))]


def check_nvml(host: Host) -> list[Finding]:
    """Does NVML, which every tool asks, answer?"""
    if reason := why_not_ask(host):
        return [not_checked(reason)]
    answer, _ = host.nvml
    evidence = Evidence("NVML", answer.problem or f"driver {answer.driver_version}", "an answer")
    if not answer.problem:
        return [ok(f"NVML answers, with {count(len(answer.gpus), 'GPU')}", evidence)]
    what = "mismatch" if answer.code == LIB_RM_VERSION_MISMATCH else "failed"
    what = "silent" if "did not answer" in answer.problem else what
    return [say(f"nvml-failed.{what}", evidence, problem=answer.problem)]


def why_not_ask(host: Host) -> str:
    """Return why NVML cannot be asked, "" if it can."""
    if not host.driver_version:
        return host.no_driver
    if host.listed:
        return ""
    if not host.library_versions or host.driver_version not in host.library_versions:
        return "the driver's libraries are missing or of another version: see driver-libraries"
    if any(change.path.endswith("/nvidiactl") for change in (*host.missing_nodes, *host.wrong_nodes)):
        return "/dev/nvidiactl is missing or wrong: see device-nodes-missing and device-nodes-wrong"
    return ""


def check_lost(host: Host) -> list[Finding]:
    """Does every GPU answer?"""
    if reason := why_not_ask(host):
        return [not_checked(reason)]
    answer, _ = host.nvml
    if answer.problem:
        return [not_checked(f"{answer.problem}: see nvml-failed")]
    findings = []
    for gpu in answer.gpus:
        if gpu.error:
            where, seen = gpu.bus_id or f"number {gpu.index}", Evidence("NVML", gpu.error)
            findings.append(say("gpu-lost.unusable", seen, where=where, error=gpu.error, index=gpu.index))
    listed = {gpu.bus_id for gpu in answer.gpus}
    bad_nodes = {change.path.rpartition("/")[2] for change in (*host.missing_nodes, *host.wrong_nodes)}
    silent = [gpu for gpu in host.proc_gpus if gpu.bus_id not in listed and not gpu.excluded]
    nameless = sum(not gpu.bus_id for gpu in answer.gpus)
    for unlisted in silent[nameless:]:
        if f"nvidia{unlisted.minor}" not in bad_nodes:
            path = f"{host.roots.proc}/driver/nvidia/gpus/{unlisted.name}"
            both = (Evidence(path, "there"), Evidence("NVML", "not listed", "listed"))
            findings.append(say("gpu-lost.unlisted", *both, where=unlisted.bus_id, index=unlisted.minor))
    number = len(answer.gpus)
    every = {1: "the GPU answers", 2: "both GPUs answer"}.get(number, f"all {number} GPUs answer")
    well = ok(every, Evidence("NVML", f"{number} without an error"))
    return findings or _xids(host) or [well]


def _xids(host: Host) -> list[Finding]:
    """GPUs that answer now and were lost before, by the kernel's log; an unreadable log yields none."""
    try:
        found = [_XID.search(line) for line in host.kernel_log]
    except (HostError, OSError):
        return []
    lost = {match[1]: match[0] for match in found if match and match[2] in _LOST_XIDS}
    return [
        say("gpu-lost.before", Evidence("kernel log", printable(line, 200)), where=bus) for bus, line in lost.items()
    ]
