"""Checks of the engines: are they configured for ocigpu, do the configured files exist, do they run with them."""

import os
import re
import shlex
import tomllib
from contextlib import suppress
from typing import Any

from ocigpu.core.errors import OcigpuError, printable
from ocigpu.core.settings import MODES
from ocigpu.doctor.files import put_away
from ocigpu.doctor.findings import KNOWN, Evidence, Finding, not_checked, ok, say
from ocigpu.doctor.host import Host
from ocigpu.doctor.live import start_time
from ocigpu.doctor.repairs import find_config_repair, find_switch_repair
from ocigpu.doctor.settings import VENDOR_SETTINGS
from ocigpu.engines import places
from ocigpu.engines.document import look_up, table_at
from ocigpu.engines.status import (
    NO_DEFAULT,
    OF_RUNTIME,
    EngineStatus,
    cri_plugin,
    is_cri_off,
    is_our_hook,
    is_ours,
    programs_of,
    read_merged,
    runtime_keys,
)
from ocigpu.engines.units import read_words, start_command
from ocigpu.system.programs import run_program

VENDOR = ("nvidia-container-runtime", "nvidia-container-runtime.cdi", "nvidia-container-runtime.legacy")
USERS_OF_CONTAINERD = (
    "/var/lib/kubelet",
    *(f"/usr{local}/bin/{name}" for local in ("", "/local") for name in ("kubelet", "nerdctl", "crictl")),
)
HOOKS = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d")
"""Where Podman and CRI-O look for hooks unless a file of theirs says otherwise (oci-hooks(5))."""
VALIDATE_SECONDS = 10.0
CLI = "nvidia-container-cli"
VENDOR_HOOKS = ("nvidia-container-toolkit", "nvidia-container-runtime-hook")
UNITS = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")


def installed_engines(host: Host, engine: str = "") -> list[EngineStatus]:
    """Return the installed engines; with Docker, a containerd may be Docker's: :func:`is_dockers`.

    The usual file of a stopped daemon counts only if no daemon runs with another file: otherwise it is unused.
    """
    others = {item.engine for item in host.engines if item.flavour == "custom" and item.running}
    found = [item for item in host.engines if item.installed and engine in ("", item.engine)]
    found = [item for item in found if item.flavour or item.running or item.engine not in others]
    return [item for item in found if not is_dockers(host, item)]


def is_dockers(host: Host, status: EngineStatus) -> bool:
    """Whether a containerd serves nobody but Docker, whose packages install and start one, with a file or without.

    Others use it where it serves Kubernetes (CRI) and its file names a runtime for GPUs, or somebody here starts pods.
    """
    if status.engine != "containerd" or status.flavour in places.KUBERNETES:
        return False
    if not any(item.engine == "docker" and item.installed for item in host.engines):
        return False
    if status.waiting or status.problems:
        return False
    if not status.files or not status.cri:
        return True
    named = any(entry.ours or is_vendors(entry.path) for entry in status.runtimes)
    return not (named or status.flavour or any(map(host.exists, USERS_OF_CONTAINERD)))


def is_vendors(path: str) -> bool:
    return os.path.basename(path) in VENDOR


def label(status: EngineStatus) -> str:
    """Return what to call an installation of an engine; no two have one name."""
    which = status.target if status.flavour == "custom" else status.flavour
    return str(KNOWN["engines"][status.engine]["name"]) + (f" ({which})" if which else "")


def _is_context_elsewhere(host: Host) -> bool:
    """Whether this user's docker command talks to another machine, or to Docker Desktop: dockerd may rest here."""
    try:
        return host.docker_context[2]
    except (OSError, OcigpuError):
        return False


def engine_of(item: Finding) -> str:
    """Return the engine that a finding is about, "" for none or several."""
    if item.name.startswith("docker-") or item.name == "swarm-resources":
        return "docker"
    if item.name.startswith("containerd-"):
        return "containerd"
    names = {str(known["name"]).lower(): engine for engine, known in KNOWN["engines"].items()}
    text = item.text.lower() if item.name.startswith(("engine-", "systemd-cgroup", "cdi-too-new", "hook-file")) else ""
    return next((engine for name, engine in names.items() if text.startswith(f"{name} ")), "")


def configure(host: Host, status: EngineStatus, *more: str) -> tuple[str, ...]:
    """Return the commands that tell an engine of ocigpu and have it read that."""
    program = host.program("/usr/bin/ocigpu-runtime", "/usr/local/bin/ocigpu-runtime") if host.root else ""
    runtime = ["--runtime-path", program] if program else []
    words = ["ocigpu", "engine", "configure", status.engine, *more, *_where(host, status), *runtime]
    return shlex.join(words), restart(host, status)


def _where(host: Host, status: EngineStatus) -> list[str]:
    """Return the options of "ocigpu engine" that name this installation."""
    several = len({one.config for one in host.daemons if one.engine == status.engine}) > 1
    config = ["--engine-config", status.target] if status.flavour or several else []
    return [*config, *(["--root", host.root] if host.root else [])]


def restart(host: Host, status: EngineStatus) -> str:
    """Return the command that has an engine read its configuration again, "" for none."""
    service = KNOWN["engines"][status.engine]["service"]
    return start_command(_service(status, service)) if service and not host.root else ""


def _service(status: EngineStatus, service: str) -> str:
    if status.flavour in ("k3s", "rke2"):
        return {"k3s": "k3s", "rke2": "rke2-server"}[status.flavour]
    return f"--user {service}" if status.flavour == "rootless" else service


def file_of(host: Host, status: EngineStatus) -> str:
    return host.path(status.target)


def release_of(host: Host, engine: str) -> str:
    if engine == "docker" and host.docker and host.docker.release:
        return host.docker.release
    return host.engine_releases.get(engine, "")


def is_from(release: str, *wanted: int) -> bool:
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:3])
    return numbers >= wanted


def docker_reads_cdi(host: Host, status: EngineStatus) -> bool | None:
    """Return whether Docker takes CDI devices; None when its version is unknown.

    From Docker 25 on with features.cdi, from 28.2 on unless that is false (moby pull requests 45134 and 49963).
    """
    release = release_of(host, "docker")
    if status.cdi == "off":
        return False
    if not release:
        return None
    return is_from(release, 25) if status.cdi == "on" else is_from(release, 28, 2)


def check_configured(host: Host) -> list[Finding]:
    """Can every engine give containers a GPU?"""
    engines = installed_engines(host)
    if not engines:
        looked = Evidence("Docker, containerd, CRI-O, Podman", "no program and no configuration found")
        return [not_checked("no container engine is installed", looked)]
    able = {id(status): ways_to_gpus(host, status) for status in engines}
    some = any(able.values())
    findings = []
    for status in engines:
        ways = able[id(status)]
        if ways:
            findings.append(
                ok(f"{label(status)} can provide GPUs: {', '.join(ways)}", Evidence(file_of(host, status), ways[0]))
            )
            continue
        if host.is_wsl and not host.specs.gpus:
            findings.append(not_checked("WSL: an engine needs a CDI specification first: see cdi-missing"))
            continue
        if status.engine == "podman" and status.cdi == "on":
            findings.append(not_checked("Podman uses CDI devices, but there is no specification: see cdi-missing"))
            continue
        if status.engine == "containerd" and any(item.engine == "containerd" and able[id(item)] for item in engines):
            findings.append(not_checked("another containerd is configured: see containerd-two-configs"))
            continue
        if status.waiting:
            restart = (
                f"{label(status)} reads its template at its next start: systemctl restart {status.flavour or 'k3s'}"
            )
            findings.append(not_checked(restart, host.evidence(status.waiting, "names ocigpu")))
            continue
        found = "no runtime of ocigpu" if status.files else "no such file"
        what = "wsl" if host.is_wsl else "docker" if status.engine == "docker" else "nothing"
        quiet = some or (status.engine == "containerd" and any(item.engine == "docker" for item in engines))
        findings.append(
            say(
                f"engine-not-configured.{what}",
                Evidence(file_of(host, status), found, "one that runs ocigpu-runtime"),
                severity="note" if quiet else "error" if host.driver_version else "warning",
                engine=label(status),
                configure=configure(host, status),
                options=" --no-gpus-hook" if status.engine == "docker" else "",
                name=status.name,
            )
        )
    return findings


def ways_to_gpus(host: Host, status: EngineStatus) -> list[str]:
    """Return how an engine can give GPUs; on WSL by specifications only."""
    if host.is_wsl:
        runtimes = [f'runtime "{entry.name}"' for entry in status.runtimes if entry.ours and runtime_works(host)]
        return [*runtimes, *(["CDI devices"] if takes_cdi(host, status) else [])]
    ways = [f'runtime "{entry.name}"' for entry in status.runtimes if entry.ours]
    ways += [f'the vendor\'s runtime "{entry.name}"' for entry in status.runtimes if is_vendors(entry.path)]
    if status.gpus_hook:
        ways.append("--gpus")
    if takes_cdi(host, status):
        ways.append("CDI devices")
    return ways


def runtime_works(host: Host) -> bool:
    """Whether ocigpu's runtime can provide this host's GPUs: those of WSL only in mode cdi, from a specification."""
    return not host.is_wsl or (MODES[host.settings.mode] == "cdi" and bool(host.specs.gpus))


def takes_cdi(host: Host, status: EngineStatus) -> bool:
    """Tell whether an engine takes CDI devices and there are some."""
    reads = docker_reads_cdi(host, status) if status.engine == "docker" else status.cdi == "on"
    return bool(reads and host.specs.gpus)


def check_problems(host: Host) -> list[Finding]:
    """Can the engines' files be read?"""
    engines = installed_engines(host)
    files = tuple(host.evidence(path, "read") for status in engines for path in status.files)
    bad = [(status, text) for status in engines for text in status.problems if not text.startswith(OF_RUNTIME)]
    devices = [finding for status in engines if status.engine == "podman" for finding in _names_for_paths(host, status)]
    bad += [(status, text) for status in engines if (text := _why_dockerd_refuses(host, status))]
    found = [_say_broken(host, status, text) for status, text in bad] + devices
    for status in engines:
        if os.path.islink(file := file_of(host, status)) and not host.exists(status.target):
            seen = Evidence(file, f"a link to {printable(os.readlink(file), 200)}, which is not there", "a file")
            severity = "warning" if ways_to_gpus(host, status) else "error"  # it comes before what writes the file
            values = {"severity": severity, "file": file, "away": put_away(file), "restart": restart(host, status)}
            found.append(say("engine-config-broken.dangling", seen, engine=label(status), **values))
    if not found and not files:
        return [not_checked("no engine has a configuration file")]
    return found or [ok("configuration files of engines can be read", *files)]


def _why_dockerd_refuses(host: Host, status: EngineStatus) -> str:
    """Return why dockerd would not start with its file, in its words; "" if it would, or if it is not asked.

    One that runs may have started with an earlier file.  The options of its unit count, which may contradict the file;
    without systemd the file alone is checked.  From Docker 23 on it checks itself without starting.
    """
    ready = status.engine == "docker" and not status.flavour and not status.problems and host.live
    if not (ready and host.exists(status.target) and is_from(release_of(host, "docker"), 23)) or os.geteuid():
        return ""
    words = read_words("docker")
    if not words or os.path.basename(words[0]) != "dockerd":  # no systemd, or a unit of somebody's own
        words = [places.find_program("/", places.PROGRAMS["docker"]), "--config-file", status.target]
    with suppress(OSError):
        done = run_program([*words, "--validate"], VALIDATE_SECONDS)
        said = done.last_line.partition(f" with file {status.target}: ")[2] if done.status else ""
        if status.default_missing and "default runtime" in said:  # see engine-default-missing
            return ""
        return said and f"{status.target}: {said}"
    return ""


def _say_broken(host: Host, status: EngineStatus, text: str) -> Finding:
    """Return the problem of one file of an engine, which may be a drop-in."""
    path = max((path for path in status.files if path in text), key=len, default=status.target)
    file = host.path(path)
    repair = ""
    with suppress(OcigpuError):
        found = host.find(path)
        repair = find_config_repair(found, path, "" if os.path.isdir(found) else host.text(path) or "", text)
    fixes = [f"# correct {file}; this says what is wrong:", _checker(host, status)]
    if path != status.target:
        fixes += [f"# or do without it: {put_away(file)}"]
    seen = Evidence(file, printable(text.removeprefix(f"{path}: "), 300), "a valid file")
    fixed = (repair, restart(host, status)) if repair else tuple(fixes)
    return say("engine-config-broken.broken", seen, engine=label(status), problem=text, fixes=fixed)


def _names_for_paths(host: Host, status: EngineStatus) -> list[Finding]:
    """Return the problem of CDI names in "devices" of containers.conf: Podman before 4.6 then refuses all commands.

    (containers/common 0.54, part of Podman 4.6, was the first to accept them there: pkg/config.)
    """
    release = release_of(host, "podman")
    if not release or is_from(release, 4, 6):
        return []
    named = os.environ.get("CONTAINERS_CONF", "") if host.live else ""  # which replaces all others
    findings = []
    for path in [named] if named else status.files:
        try:
            data = places.parse_config(path, host.text(path) or "")
        except OcigpuError:
            continue
        devices = look_up(data, ("containers", "devices"))
        for name in filter(_is_cdi_name, devices if isinstance(devices, list) else ()):
            values = {
                "engine": label(status),
                "release": release,
                "name": printable(name, 200),
                "path": host.path(path),
            }
            seen = host.evidence(path, f"devices has {printable(name, 200)}", "paths only")
            findings.append(say("engine-config-broken.podman-devices", seen, **values))
    return findings


def _is_cdi_name(text: object) -> bool:
    return isinstance(text, str) and not text.startswith("/") and "=" in text and "/" in text.partition("=")[0]


def _checker(host: Host, status: EngineStatus) -> str:
    """Return the command that checks an engine's file."""
    known = KNOWN["engines"][status.engine]
    old = status.engine == "docker" and not is_from(release_of(host, "docker"), 23)  # it has no --validate before
    return str(known["old_checker" if old else "checker"].format(path=shlex.quote(host.path(status.target))))


def check_runtimes(host: Host) -> list[Finding]:
    """Are the programs there that engines are told to run?"""
    entries = [
        (status, entry)
        for status in installed_engines(host)
        for entry in status.runtimes
        if entry.ours or is_vendors(entry.path) or entry.name == status.default_runtime
    ]
    if not entries:
        return [not_checked("no engine names a runtime of ocigpu or of the vendor")]
    bad = [(status, entry) for status, entry in entries if not entry.exists]
    if not bad:
        return [ok("runtimes that engines name exist", *(host.evidence(entry.path, "there") for _, entry in entries))]
    findings = []
    for status, entry in bad:
        what = "default" if entry.name == status.default_runtime else "other"
        why = places.why_no_program(host.root or "/", entry.path)
        fixes: tuple[str, ...] = ("# install it again", f"# remove it from {file_of(host, status)}")
        if "noexec" in why:
            mounted = f'mount -o remount,exec "$(findmnt -n -o TARGET -T {shlex.quote(entry.path)})"'
            fixes = (f"{mounted}  # and take noexec out of /etc/fstab",)
        elif "executable" in why:
            fixes = (shlex.join(["chmod", "+x", host.path(entry.path)]),)
        elif entry.ours and (host.program("/usr/bin/ocigpu-runtime", "/usr/local/bin/ocigpu-runtime")):
            fixes = configure(host, status, *([] if entry.name == "ocigpu" else ["--name", entry.name]))[:1]
        elif entry.ours:
            remove = shlex.join(["ocigpu", "engine", "remove", status.engine, *_where(host, status)])
            fixes = ("# install it again (ocigpu: make install, or the package)", f"# or: {remove}")
        findings.append(
            say(
                f"engine-runtime-missing.{what}",
                Evidence(file_of(host, status), entry.path, "a program"),
                host.evidence(entry.path, why, "a program"),
                engine=label(status),
                name=entry.name,
                path=printable(entry.path, 200),
                why=why,
                fixes=(*fixes, restart(host, status)),
            )
        )
    return findings


def check_default(host: Host) -> list[Finding]:
    """Is there an entry of the runtime that an engine is told to use?"""
    engines = installed_engines(host)
    named = [status for status in engines if status.default_runtime]
    if not named:
        return [not_checked("no engine names a default runtime")]
    bad = [status for status in named if status.default_missing and not _is_added(host, status)]
    if not bad:
        seen = (Evidence(file_of(host, status), f'default runtime "{status.default_runtime}"') for status in named)
        return [ok("default runtimes have their entries", *seen)]
    findings = []
    for status in bad:
        name = printable(status.default_runtime, 100)
        file = file_of(host, status)
        findings.append(
            say(
                f"engine-default-missing.{'nvidia' if name == 'nvidia' else 'other'}",
                Evidence(file, f'default runtime "{name}", and no entry of that name', "an entry, or another default"),
                engine=label(status),
                name=name,
                effect=NO_DEFAULT[status.engine],
                configure=configure(host, status, "--name", "nvidia"),
                instead=configure(host, status, "--default")[0],
                file=file,
                restart=restart(host, status),
            )
        )
    return findings


def _is_added(host: Host, status: EngineStatus) -> bool:
    """Whether a runtime that no file has is an option of the daemon (dockerd --add-runtime)."""
    if status.engine != "docker":
        return False
    known = host.docker.info.get("Runtimes") if host.docker and not host.docker.problem else None
    if isinstance(known, dict):
        return status.default_runtime in known
    units = (f"{directory}/docker.service" for directory in UNITS)
    drop_ins = (f"{path}.d/{name}" for path in units for name in host.names(f"{path}.d"))
    return any("--add-runtime" in (host.text(path) or "") for path in (*units, *drop_ins))


def does_run(host: Host, status: EngineStatus) -> bool | None:
    """Whether an engine's daemon runs; None for Podman, which has none, and where that cannot be seen."""
    if status.engine == "podman" or not host.live:
        return None
    docker = host.docker if status.engine == "docker" else None
    if status.running or (docker is not None and not docker.problem and docker.config in ("", status.target)):
        return True
    if docker is not None and docker.is_shut:
        return None
    return None if host.user and not host.processes.get(1) else False


def check_running(host: Host) -> list[Finding]:
    """Does every engine that is a daemon run?"""
    if not host.live:
        return [not_checked("daemons are examined on this machine only")]
    engines = [status for status in installed_engines(host) if status.engine != "podman"]
    if not engines:
        return [not_checked("no engine with a daemon is installed")]
    state = {id(status): does_run(host, status) for status in engines}
    findings = []
    others = [status for status in installed_engines(host) if state.get(id(status)) is not False]
    able = any(ways_to_gpus(host, status) for status in others)
    for status in engines:
        if state[id(status)] is not False:
            continue
        beside = status.engine == "containerd" and bool(installed_engines(host, "docker"))
        ways = ways_to_gpus(host, status)
        elsewhere = status.engine == "docker" and _is_context_elsewhere(host)
        severity = (
            "note" if elsewhere or (beside and not ways) else "error" if not able else "warning" if ways else "note"
        )
        problem = host.docker.problem if status.engine == "docker" and host.docker else ""
        program = KNOWN["engines"][status.engine]["program"]
        service = _service(status, KNOWN["engines"][status.engine]["service"])
        findings.append(
            say(
                "engine-not-running.down",
                Evidence("processes", f"no {program}{f': {printable(problem, 200)}' if problem else ''}", program),
                severity=severity,
                engine=label(status),
                program=program,
                start=start_command(service, "start"),
                log=f"{'--user ' if '--user' in service else ''}-u {service.removeprefix('--user ')}",
            )
        )
    running = [label(status) for status in engines if state[id(status)]]
    if running:
        findings.append(ok(f"{' and '.join(running)} run", Evidence("processes", ", ".join(running))))
    unseen = [label(status) for status in engines if state[id(status)] is None]
    if unseen:
        findings.append(not_checked(f"whether {', '.join(unseen)} runs cannot be seen by this user"))
    return findings


def check_restarted(host: Host) -> list[Finding]:
    """Have daemons that cannot be asked read their present files?  dockerd can be: docker.check_restarted."""
    if not host.live:
        return [not_checked("daemons are examined on this machine only")]
    findings, fine = [], []
    for status in installed_engines(host):
        if status.engine not in ("containerd", "crio") or not status.running:
            continue
        named = (status.target,) if status.flavour else ("", status.target)
        pids = [one.pid for one in host.daemons if one.engine == status.engine and one.config in named]
        began = min(map(start_time, pids), default=0.0)
        # a second: the kernel's clock of processes is not that of files
        newer = [path for path in status.files if began and os.stat(path).st_ctime > began + 1]
        program = KNOWN["engines"][status.engine]["program"]
        fine.append(Evidence(file_of(host, status), f"older than the running {program}"))
        if newer:
            seen = (host.evidence(path, f"changed after {program} was started", "read") for path in newer)
            severity = "error" if ways_to_gpus(host, status) else "note"
            values = {"engine": label(status), "program": program, "restart": restart(host, status)}
            findings.append(say("engine-not-restarted.changed", *seen, severity=severity, **values))
    if not fine:
        return [not_checked("neither containerd nor CRI-O runs here for others than Docker")]
    return findings or [ok("running daemons use their present files", *fine)]


def check_cri(host: Host) -> list[Finding]:
    """Does a containerd that has an entry for GPUs serve Kubernetes?  Only pods are started by such an entry."""
    statuses = [item for item in installed_engines(host, "containerd") if item.files and not item.problems]
    statuses = [item for item in statuses if any(one.ours or is_vendors(one.path) for one in item.runtimes)]
    if not statuses:
        return [not_checked("no containerd of its own names a runtime for GPUs")]
    findings = []
    for status in statuses:
        for path in () if status.cri else status.files:
            text = host.text(path) or ""
            if is_cri_off(places.parse_config(path, text)):
                repair = find_switch_repair(host.find(path), text)
                fixes = (repair or f"# take it out of disabled_plugins in {host.path(path)}", restart(host, status))
                seen = host.evidence(path, "disabled_plugins names the CRI plugin", "not there")
                findings.append(say("containerd-cri-off.off", seen, engine=label(status), fixes=fixes))
    fine = (Evidence(file_of(host, status), "CRI plugin on") for status in statuses)
    return findings or [ok("containerd serves Kubernetes", *fine)]


def check_hidden(host: Host) -> list[Finding]:
    """Does containerd use the entries that its files have?

    Before 2.1 the last file that has a plugin's table replaces those of the others (containerd pull request 9982).
    """
    release = release_of(host, "containerd")
    statuses = [item for item in installed_engines(host, "containerd") if len(item.files) > 1]
    if not statuses:
        return [not_checked("containerd has no imported files")]
    if not release or is_from(release, 2, 1):
        return [not_checked("containerd merges the tables of its files from 2.1 on", Evidence("containerd", release))]
    findings, fine = [], []
    for status in statuses:
        named: dict[str, bool] = {}
        for path in status.files:
            with suppress(OcigpuError, TypeError, ValueError):
                data = places.parse_config(path, host.text(path) or "")
                if table_at(data, cri_plugin(data)):
                    runtimes = table_at(data, runtime_keys("containerd", data)[0]).values()
                    programs = [name for entry in runtimes for name in programs_of("containerd", entry)]
                    named[path] = any(is_ours(name, host.root or "/") for name in programs)
        last = next(reversed(named), "")
        if not any(named.values()) or named[last]:
            fine.append(Evidence(file_of(host, status), "the last file with its table names ocigpu, or none does"))
            continue
        told = next(path for path in named if named[path])
        seen = (host.evidence(told, "names ocigpu"), host.evidence(last, "replaces its table", "an entry of ocigpu"))
        values = {"engine": label(status), "told": told, "last": last}
        drop_in = configure(host, status, "--drop-in", last)
        findings.append(say("containerd-hidden.replaced", *seen, **values, configure=drop_in))
    return findings or [ok("containerd uses the entries of ocigpu that its files have", *fine)]


def lacks_its_program(host: Host, hook: str) -> bool:
    """Whether a hook is NVIDIA's, and the program is missing that it starts: its package was removed alone."""
    root = host.root or "/"
    if is_our_hook(root, hook) or os.path.basename(hook) == "nvidia-cdi-hook" or places.find_program(root, CLI):
        return False
    directories = {os.path.dirname(hook), os.path.dirname(os.path.realpath(host.path(hook))).removeprefix(host.root)}
    if host.program(*(f"{directory}/{CLI}" for directory in directories)):  # NVIDIA's GPU operator has them together
        return False
    with suppress(ValueError, AttributeError):  # the vendor's settings may say where it is
        named = tomllib.loads(host.text(VENDOR_SETTINGS) or "").get("nvidia-container-cli", {}).get("path", "")
        return not (named and host.program(str(named)))
    return False


def check_hooks(host: Host) -> list[Finding]:
    """Can the programs run that hook files of Podman and CRI-O name?  A file whose program is gone is passed over."""
    engines = [item for item in installed_engines(host) if item.engine in ("podman", "crio")]
    if not engines:
        return [not_checked("neither Podman nor CRI-O is installed")]
    findings: list[Finding] = []
    directories: dict[str, EngineStatus] = {}
    for status in engines:
        data = read_merged(host.root or "/", status.engine, status.target, [])[1]
        keys = ("engine",) if status.engine == "podman" else ("crio", "runtime")
        named = look_up(data, (*keys, "hooks_dir"))
        for directory in named if isinstance(named, list) and named else HOOKS:
            directories.setdefault(str(directory), status)
    for directory, status in directories.items():
        for path in (f"{directory}/{name}" for name in host.names(directory) if name.endswith(".json")):
            with suppress(OcigpuError, ValueError):
                program = look_up(places.parse_config(path, host.text(path) or ""), ("hook", "path"))
                if not isinstance(program, str) or not (why := _why_no_hook(host, program)):
                    continue
                seen = host.evidence(path, f"hook {printable(program, 200)}, which {why}", "a program")
                values = {"engine": label(status), "path": host.path(path), "program": printable(program, 200)}
                findings.append(say("hook-file.fails", seen, **values, why=why, away=put_away(host.path(path))))
    seen = Evidence(", ".join(directories), "no hook that fails")
    return findings or [ok("programs of hook files can run", seen)]


def _why_no_hook(host: Host, program: str) -> str:
    """Return why an existing program of a hook file fails, "" for one that is no matter."""
    if not host.exists(program):
        return ""
    if os.path.basename(program) in VENDOR_HOOKS and lacks_its_program(host, program):
        return f"needs {CLI}, which is not there"
    return places.why_no_program(host.root or "/", program)


def cgroup_driver(host: Host, status: EngineStatus) -> str:
    """Return "systemd" or "cgroupfs": from the daemon, its file, or the engine's default; "" when unknown."""
    if status.engine == "docker" and host.docker and not host.docker.problem:
        return str(host.docker.info.get("CgroupDriver", ""))
    data = read_merged(host.root or "/", status.engine, status.target, [])[1]
    systemd = host.exists(places.BOOTED)
    if status.engine == "docker":
        for option in data.get("exec-opts") or ():
            if str(option).startswith("native.cgroupdriver="):
                return str(option).partition("=")[2]
        # Docker 20.10 and later: systemd where it runs and cgroups are version 2 (moby, docs "Runtime options")
        return "systemd" if systemd and host.exists("/sys/fs/cgroup/cgroup.controllers") else "cgroupfs"
    if status.engine == "containerd":
        return "systemd" if "'SystemdCgroup': True" in str(data) else "cgroupfs"
    table: Any = data.get("crio", {}).get("runtime", {}) if status.engine == "crio" else data.get("engine", {})
    return str(table.get("cgroup_manager") or ("systemd" if systemd else "cgroupfs"))


def check_systemd_cgroups(host: Host) -> list[Finding]:
    """Would a daemon-reload take GPUs from running containers?"""
    engines = [item for item in installed_engines(host) if _hooked(item)]
    if any("not executable" not in text for item in engines for text in item.problems):
        return [not_checked("the configuration of an engine cannot be read: see engine-config-broken")]
    if not engines:
        return [not_checked("no engine here lets a hook change device cgroups (the way of --gpus and of legacy mode)")]
    findings, fine = [], []
    for status in engines:
        driver = cgroup_driver(host, status)
        if driver != "systemd":
            fine.append(Evidence(file_of(host, status), f"cgroup driver {driver or 'unknown'}"))
            continue
        found = f"cgroup driver systemd, default runtime {status.default_runtime or 'runc'}"
        findings.append(
            say(
                "systemd-cgroup-loses-devices.hooked",
                Evidence(file_of(host, status), found, "ocigpu's runtime, which declares the devices"),
                engine=label(status),
                hooked=_hooked(status),
                configure=configure(host, status, "--default"),
            )
        )
    return findings or [ok("device cgroups are not systemd's where a hook changes them", *fine)]


def _hooked(status: EngineStatus) -> str:
    """Return what changes the device cgroup after the runtime has set it, "" for nothing."""
    if status.is_default:
        return ""
    if status.engine == "docker" and status.gpus_hook and not status.gpus_hook_ours:  # ours tells systemd
        return "the hook of --gpus"
    vendors = [entry.name for entry in status.runtimes if os.path.basename(entry.path) == VENDOR[2]]
    return f'the vendor\'s legacy runtime "{vendors[0]}"' if vendors else ""


def check_two_containerds(host: Host) -> list[Finding]:
    """Is it clear which configuration containerd reads?"""
    found = [item for item in host.engines if item.engine == "containerd" and item.installed and item.files]
    found = [item for item in found if not is_dockers(host, item)]
    if not found:
        return [not_checked("containerd has no configuration file")]
    told = [status for status in found if status.configured or status.waiting]
    evidence = tuple(
        host.evidence(status.waiting, "names ocigpu: it is read at the next start")
        if status.waiting and not status.configured
        else Evidence(file_of(host, status), "names ocigpu" if status in told else "does not name ocigpu")
        for status in found
    )
    if len(found) == 1:
        return [ok("there is one configuration of containerd", *evidence)]
    if told and len(told) < len(found):
        others = [status for status in found if status not in told]
        commands = tuple(line for status in others for line in configure(host, status))
        return [say("containerd-two-configs.some", *evidence, configure=commands)]
    return [say("containerd-two-configs.several", *evidence)]


def check_vendor(host: Host) -> list[Finding]:
    """Is the vendor's toolkit installed beside ocigpu?"""
    programs = ("nvidia-container-runtime", "nvidia-ctk", "nvidia-container-cli", "nvidia-cdi-hook")
    paths = (host.program(f"/usr/bin/{name}", f"/usr/local/bin/{name}") for name in programs)
    # ocigpu's programs may have the vendor's names, as links
    found = [path for path in paths if path and not os.path.basename(host.find(path)).startswith("ocigpu")]
    refreshers, ours = (
        [path for path in (f"{directory}/{name}-cdi-refresh.service" for directory in UNITS) if host.exists(path)]
        for name in ("nvidia", "ocigpu")
    )
    if not found:
        seen = (host.evidence(f"/usr/bin/{name}", "none") for name in programs)
        return [ok("the vendor's toolkit is not installed", *seen)]
    evidence = tuple(host.evidence(path, "there") for path in (*found, *refreshers))
    if refreshers and ours:
        own = (host.evidence(path, "there") for path in ours)
        return [say("vendor-toolkit.two-services", *evidence, *own)]
    return [say("vendor-toolkit.both", *evidence)]
