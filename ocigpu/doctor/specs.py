"""Checks of CDI specifications: can they be read, by which engines, and do they fit the host as it is."""

import os
import re
import shlex
from typing import Any

from ocigpu.cdi.check import BIND_TYPES
from ocigpu.cdi.loader_links import describe_left, left_to_ldconfig, read_host_soname
from ocigpu.cdi.versions import VERSIONS, is_older, newest_version, parse_version, requirements
from ocigpu.core.errors import count, printable
from ocigpu.core.settings import MODES
from ocigpu.core.vendors import VENDORS
from ocigpu.doctor.engines import installed_engines
from ocigpu.doctor.files import put_away
from ocigpu.doctor.findings import Evidence, Finding, not_checked, ok, say
from ocigpu.doctor.host import Host
from ocigpu.doctor.settings import STUBS
from ocigpu.doctor.spec_files import DEAD_LINK, SpecFile
from ocigpu.gpus.fingerprint import stale_reasons
from ocigpu.gpus.wsl import GENERATE, SPECIFICATION

SHOWN = 4
_GPU_NODE = re.compile(r"/dev/(nvidia[0-9]+|dxg|nvidia-caps/nvidia-cap[0-9]+|nvhost-|nvmap|dri/)")
_GPU_NAME = re.compile(r"all|(gpu|mig)?[0-9]+(:[0-9]+)?|(GPU|MIG)-.+")
"""The names of GPUs in specifications of ocigpu and of NVIDIA's toolkit, by number or UUID; others may be anything."""
_VERSIONED = re.compile(r"\.so\.([0-9]{3,}\.[0-9.]+[0-9])$")


def _none(host: Host) -> list[Finding]:
    return [not_checked("there is no specification of NVIDIA GPUs", *_looked(host))]


def _looked(host: Host) -> tuple[Evidence, ...]:
    found = host.specs.files
    return tuple(
        host.evidence(path, count(sum(file.directory == number for file in found), "specification"))
        for number, path in enumerate(host.specs.directories)
    )


def _write_command(host: Host, file: SpecFile, *more: str) -> str:
    """Return the command that writes a file again; one beside which another has the GPUs is put away, or they collide.

    A file of another kind of device is its maker's.
    """
    path = host.path(file.path)
    if not file.is_gpu:
        return f"# have the maker of {path} write it again, or do without: {put_away(path)}"
    others = {name for item in host.specs.gpus if item is not file for name in _device_names(item)}
    if not file.is_ours and any(map(_GPU_NAME.fullmatch, others)):
        return f"{put_away(path)}  # another specification has the GPUs"
    return host.command("cdi", "generate", *more, "--output", path)


def check_missing(host: Host) -> list[Finding]:
    """Is there a specification where one is needed?"""
    if host.specs.gpus:
        files = tuple(host.evidence(file.path, count(len(file.spec["devices"]), "device")) for file in host.specs.gpus)
        return [ok("there is a specification of NVIDIA GPUs", *files)]
    if host.is_wsl and host.wsl_stores:
        write = host.command(*GENERATE.split()[1:-1], host.path(SPECIFICATION))
        return [say("cdi-missing.wsl", *_looked(host), write=write)]
    if not host.driver_version:
        return [not_checked(f"{host.no_driver}: there is nothing to describe")]
    usual, directories = "/var/run/cdi", host.settings.cdi_spec_dirs
    ours = MODES[host.settings.mode] == "cdi" and usual not in directories and directories
    target = host.path(f"{directories[-1] if ours else usual}/nvidia.yaml")
    write = host.command("cdi", "refresh", "--output", target)
    if MODES[host.settings.mode] == "cdi":
        return [say("cdi-missing.mode", *_looked(host), write=write)]
    users = dict.fromkeys(engine.engine for engine in installed_engines(host) if engine.cdi == "on")
    if users:
        return [say("cdi-missing.users", *_looked(host), users=" and ".join(users), write=write)]
    return [not_checked("there is no specification, and nothing here is set up to use one", *_looked(host))]


def check_unreadable(host: Host) -> list[Finding]:
    """Can every specification be used?"""
    bad = [file for file in host.specs.files if file.problem]
    dead = [file for file in bad if file.problem == DEAD_LINK]
    if not bad:
        if not host.specs.files:
            return [not_checked("there is no specification", *_looked(host))]
        return [ok("every specification can be read", *_looked(host))]
    return [
        say(
            "cdi-unreadable.unusable",
            host.evidence(file.path, printable(file.problem, 300), "a valid specification"),
            problem=file.problem,
            validate="" if file in dead else host.command("cdi", "validate", host.path(file.path)),
            write=put_away(host.path(file.path)) if file in dead else _correct(host, file),
        )
        for file in bad
    ]


def _correct(host: Host, file: SpecFile) -> str | tuple[str, ...]:
    """Return the command that rewrites a file; for a foreign file, the errors to correct in it."""
    if os.path.basename(file.path) in ("nvidia.yaml", "nvidia.json") and file.claimed in ("", "nvidia.com/gpu"):
        return host.command("cdi", "generate", "--output", host.path(file.path))
    path = host.path(file.path)
    return tuple(f"# correct {path}: {printable(text, 300)}" for text in file.wrong or (file.problem,))


def check_stale(host: Host) -> list[Finding]:
    """Do the specifications fit the host as it is now?"""
    if not host.specs.usable:
        return _none(host)
    if host.settings_error is not None:  # they may say where the driver is
        return [not_checked("the settings cannot be used: see settings-unusable")]
    if cause := _cause_elsewhere(host):
        return [not_checked(f"{cause}: a specification cannot be compared with this host")]
    findings = []
    for file in host.specs.usable:
        reasons = _stale_reasons(host, file)
        if reasons:
            shown = (host.evidence(file.path, reason) for reason in reasons[:SHOWN])
            if file.is_gpu and not (host.driver_version or host.libraries or host.is_wsl):
                remove = shlex.join(["rm", host.path(file.path)])  # a new one would have nothing to describe
                findings.append(say("cdi-stale.gone", *shown, remove=remove))
                continue
            values = {"reason": reasons[0], "write": _refresh_command(host, file)}
            severity = "error" if file.is_gpu else "warning"
            findings.append(say("cdi-stale.stale", *shown, severity=severity, **values))
    if findings:
        return findings
    if not host.driver_version:
        return [not_checked(f"{host.no_driver}: there is nothing to compare with")]
    seen = tuple(
        host.evidence(file.path, "fits" if file.is_ours else "of another maker: its files exist")
        for file in host.specs.usable
    )
    return [ok("specifications fit the host", *seen)]


def _cause_elsewhere(host: Host) -> str:
    """Return what makes any specification look stale, "" for nothing."""
    if host.driver_version and host.missing_libraries:
        return "kernel module and libraries do not fit (see driver-libraries, driver-library-mismatch)"
    uvm_missing = host.driver is not None and "nvidia-uvm" not in host.majors
    if host.missing_nodes or host.wrong_nodes or uvm_missing:
        return (
            "device nodes are missing or wrong (see device-nodes-missing, device-nodes-wrong, uvm-missing, mig-nodes)"
        )
    return ""


def _refresh_command(host: Host, file: SpecFile) -> str | tuple[str, ...]:
    names = _device_names(file)
    later = (item for item in host.specs.usable if item.directory > file.directory and item.kind == file.kind)
    if any(names <= _device_names(item) for item in later):
        return f"{put_away(host.path(file.path))}  # a later directory defines all its devices"
    vendor = next((name for name, (_, _, vendor) in VENDORS.items() if file.kind == f"{vendor}/gpu"), "")
    if file.is_ours and vendor:
        more = [] if file.is_gpu else ["--vendor", vendor]
        return host.command("cdi", "refresh", *more, "--output", host.path(file.path))
    write = _write_command(host, file)
    if write.startswith("mv ") or not file.is_gpu:
        return write
    return write, f"# or with the vendor's tool: nvidia-ctk cdi generate --output={shlex.quote(file.path)}"


def _device_names(file: SpecFile) -> set[str]:
    return {device["name"] for device in file.spec["devices"]}


def _stale_reasons(host: Host, file: SpecFile) -> list[str]:
    if file.is_ours and file.is_gpu:
        reasons = list(stale_reasons(file.spec.get("annotations", {}), host.settings))
        settings_differ = len(reasons) == 1 and reasons[0].startswith("settings have changed")
        if reasons and (not settings_differ or not host.root or host.simulated):
            return reasons
    reasons = []
    edits = _all_edits(file.spec)
    mounts = [
        str(mount.get("hostPath", ""))
        for edit in edits
        for mount in edit.get("mounts", ())
        if mount.get("type", "") in BIND_TYPES
    ]
    versions = {match[1] for match in map(_VERSIONED.search, mounts) if match}
    driver = host.driver_version
    if file.is_gpu and driver and versions and driver not in versions:
        reasons.append(f"it names libraries of driver {', '.join(sorted(versions))}, and driver {driver} is loaded")
    paths = mounts + [
        str(node.get("hostPath") or node.get("path", "")) for edit in edits for node in edit.get("deviceNodes", ())
    ]
    there = {gpu.uuid for gpu in host.proc_gpus}
    if file.is_gpu and there and "" not in there:  # a UUID is known from the GPU's first use on
        unknown = [name for name in _device_names(file) if name.startswith("GPU-") and name not in there]
        if unknown:
            reasons.append(f"it names {unknown[0]}, which this host does not have: a GPU was exchanged")
    # sockets come and go with their daemons, which other findings are about
    files = (path for path in dict.fromkeys(paths) if path and os.path.basename(path) != "socket")
    gone = [path for path in files if not _is_there(host, path)]
    if gone:
        number = f"{len(gone)} files that do not exist, such as" if len(gone) > 1 else "a file that does not exist:"
        reasons.append(f"it names {number} {printable(gone[0], 200)}")
    return reasons + _wrong_numbers(host, edits)


def _wrong_numbers(host: Host, edits: list[dict[str, Any]]) -> list[str]:
    """Return what says which device nodes a specification gives other numbers than the kernel gave the driver.

    Those of nvidia-uvm and nvidia-caps can be others after each boot: CUDA then fails with its error 999 (unknown).
    """
    numbers = {change.path: (change.node.major, change.node.minor) for change in host.node_changes if change.node}
    reasons = []
    for node in (node for edit in edits for node in edit.get("deviceNodes", ())):
        path = str(node.get("hostPath") or node.get("path", ""))
        here = numbers.get(path if _has_root(host, path) else host.path(path))
        given = (node.get("major"), node.get("minor", 0))
        if here and given[0] and given != here:
            text = "it gives {} the number {}:{}, and the driver has {}:{}"
            reasons.append(text.format(printable(path, 200), *given, *here))
    return reasons


def _is_there(host: Host, path: str) -> bool:
    """Tell whether a host path of a specification exists."""
    return os.path.exists(path) if _has_root(host, path) else host.exists(path)


def _has_root(host: Host, path: str) -> bool:
    """Whether a host path of a specification is written with the root before it."""
    return bool(host.root) and f"{path}/".startswith(f"{host.root}/")


def _all_edits(spec: dict[str, Any]) -> list[dict[str, Any]]:
    devices = [device.get("containerEdits", {}) for device in spec.get("devices", ())]
    return [spec.get("containerEdits", {}), *devices]


def check_partial(host: Host) -> list[Finding]:
    """Does every GPU device of a specification bring the node of a GPU?"""
    if not host.specs.gpus:
        return _none(host)
    findings = []
    for file in host.specs.gpus:
        devices = [device for device in file.spec["devices"] if _GPU_NAME.fullmatch(device["name"])]
        names = [d["name"] for d in devices if not _has_gpu_node(d.get("containerEdits", {}))]
        if names and not _has_gpu_node(file.spec.get("containerEdits", {})):
            shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
            seen = host.evidence(file.path, f"no GPU's node in device {shown}", "/dev/nvidia0 or the like")
            numbers = {"empty": len(names), "devices": len(file.spec["devices"])}
            write = _write_command(host, file)
            findings.append(say("cdi-partial.no-node", seen, **numbers, make=host.make_nodes, write=write))
    fine = (host.evidence(file.path, "ok") for file in host.specs.gpus)
    return findings or [ok("every device of every specification has a GPU's node", *fine)]


def _has_gpu_node(edits: dict[str, Any]) -> bool:
    return any(_GPU_NODE.match(str(node.get("path", ""))) for node in edits.get("deviceNodes", ()))


def check_duplicate(host: Host) -> list[Finding]:
    """Is every device defined once?"""
    defined: dict[str, list[SpecFile]] = {}
    for file in host.specs.usable:
        for device in file.spec["devices"]:
            files = defined.setdefault(f"{file.kind}={device['name']}", [])
            # a link to the file of another directory defines nothing else, and is never older
            if not any(item.directory != file.directory and _is_same(host, item, file) for item in files):
                files.append(file)
    by_path = {file.path: file for file in host.specs.usable}
    paths: dict[tuple[str, ...], list[str]] = {}
    for name, files in defined.items():
        if len(files) > 1:
            paths.setdefault(tuple(file.path for file in files), []).append(name)
    if not paths:
        if not defined:
            return [not_checked("there is no specification", *_looked(host))]
        return [ok("every CDI device is defined once", *_looked(host))]
    findings = []
    for names_of_files, names in paths.items():
        files = [by_path[path] for path in names_of_files]
        winner = files[-1]
        same = sum(file.directory == winner.directory for file in files) > 1
        if not same and all(_is_alike(file, winner) for file in files):
            continue
        defines = f"defines {names[0]}{' and others' if len(names) > 1 else ''}"
        evidence = [host.evidence(file.path, defines) for file in files]
        remove = tuple(put_away(host.path(file.path)) for file in files if file is not winner)
        values = {"number": len(names), "name": names[0], "winner": winner.path, "remove": remove}
        findings.append(say(f"cdi-duplicate.{'one-directory' if same else 'two-directories'}", *evidence, **values))
    return findings or [ok("no CDI device has two definitions that differ", *_looked(host))]


def _is_alike(one: SpecFile, other: SpecFile) -> bool:
    """Whether it does not matter which of two specifications is used: both are ours, or they say the same.

    What of ours does not fit the host is another finding, cdi-stale.
    """
    keys = ("devices", "containerEdits")
    return (one.is_ours and other.is_ours) or all(one.spec.get(key) == other.spec.get(key) for key in keys)


def _is_same(host: Host, one: SpecFile, other: SpecFile) -> bool:
    return os.path.samefile(host.find(one.path), host.find(other.path))


def check_hooks(host: Host) -> list[Finding]:
    """Are the programs there that specifications have run?"""
    if not host.specs.usable:
        return [not_checked("there is no specification", *_looked(host))]
    findings: list[Finding] = []
    seen: dict[tuple[str, str], SpecFile] = {}
    for file in host.specs.usable:
        for edit in _all_edits(file.spec):
            for hook in edit.get("hooks", ()):
                seen.setdefault((file.path, hook["path"]), file)
    for (path, program), file in seen.items():
        here = host.simulated or program.startswith(f"{host.root}/")  # a simulated host is used by our own programs
        if not (host.program(program) or (here and os.access(program, os.X_OK))):
            shown = printable(program, 200)
            evidence = host.evidence(path, f"hook {shown}", "a program")
            why = "is not executable" if host.exists(program) else "is not there"
            ours = host.exists(program) and os.path.basename(program) in STUBS
            write = shlex.join(["chmod", "+x", host.path(program)]) if ours else _write_command(host, file)
            findings.append(say("cdi-hook-missing.none", evidence, program=shown, why=why, write=write))
    found = count(len(seen), "hook program") if seen else "no hook"
    findings += _relying(host)
    return findings or [ok("programs of specifications exist", Evidence(", ".join(host.specs.directories), found))]


def _relying(host: Host) -> list[Finding]:
    """Return notes on specifications whose libraries get their SONAME links from the hook program alone."""

    def read_soname(path: str) -> str:
        below = host.root and path.startswith(f"{host.root}/")
        return read_host_soname(path if below else host.find(path))

    findings = []
    for file in host.specs.gpus:
        if host.is_wsl and file.is_ours:  # Windows' libraries have one link, and nothing else can make it
            continue
        if left := left_to_ldconfig(file.spec, read_soname):
            why = (
                f"no link {left[0]}; NVIDIA's toolkit up to 1.17 writes such files, its program and ours make the links"
            )
            evidence = host.evidence(file.path, why, "links by create-symlinks")
            links, write = describe_left(left), _write_command(host, file)
            findings.append(say("cdi-hook-missing.relying", evidence, links=links, write=write))
    return findings


def check_too_new(host: Host) -> list[Finding]:
    """Can the installed engines read the specifications?"""
    if not host.specs.usable:
        return [not_checked("there is no specification", *_looked(host))]
    users = {engine.engine for engine in installed_engines(host) if engine.cdi != "off"}
    releases = {name: release for name, release in host.engine_releases.items() if name in users}
    known = {name: (release, newest_version(name, release)) for name, release in releases.items()}
    lowest = min((newest for _, newest in known.values() if newest), key=VERSIONS.index, default="")
    findings = []
    for file in host.specs.usable:
        version = parse_version(str(file.spec["cdiVersion"]))
        for engine, (release, newest) in known.items():
            if newest and is_older(newest, version):
                needs = [need for need in requirements(file.spec) if is_older(newest, need.version)]
                why = f" (for {needs[0].why})" if needs else ""
                evidence = host.evidence(file.path, f"cdiVersion {version}", f"{newest} or older")
                values = {"engine": f"{engine} {release}", "newest": newest, "version": version, "why": why}
                write = _write_command(host, file, "--max-version", lowest)
                findings.append(say("cdi-too-new.version", evidence, **values, write=write))
    if findings:
        return findings
    judged = {name: pair for name, pair in known.items() if pair[1]}
    if not judged:
        older = [f"{name} {release}" for name, (release, newest) in known.items() if newest == ""]
        if older:
            return [not_checked(f"{' and '.join(older)} do not support CDI")]
        return [not_checked("no installed engine that reads CDI specifications, or its version is unknown")]
    return [
        ok(
            "the installed engines can read every specification",
            *(Evidence(f"{name} {release}", f"reads up to {newest}") for name, (release, newest) in judged.items()),
        )
    ]
