"""Checks of the engines: are they told of ocigpu, is what they are told there, do they run with it."""

import json
import os
import re
from typing import Any

from ocigpu.doctor.host import Host
from ocigpu.doctor.records import Evidence, Finding, error, not_checked, note, ok, warning
from ocigpu.doctor.versions import engine_releases
from ocigpu.engines.places import running_daemons
from ocigpu.engines.status import EngineStatus, read_merged
from ocigpu.errors import printable

NO_DRIVER_ERROR = 'could not select device driver "" with capabilities: [[gpu]]'
VENDOR = ("nvidia-container-runtime", "nvidia-container-runtime.cdi", "nvidia-container-runtime.legacy")
SERVICES = {"docker": "docker", "containerd": "containerd", "crio": "crio"}
NAMES = {"docker": "Docker", "containerd": "containerd", "crio": "CRI-O", "podman": "Podman"}


def _installed(host: Host, engine: str = "") -> list[EngineStatus]:
    """Return the engines there are; a containerd without a file of its own is Docker's where Docker is."""
    found = [item for item in host.engines if item.installed and engine in ("", item.engine)]
    docker = any(item.engine == "docker" and item.installed for item in host.engines)
    return [item for item in found if item.engine != "containerd" or item.files or not docker]


def _is_vendors(path: str) -> bool:
    return os.path.basename(path) in VENDOR


def _label(status: EngineStatus) -> str:
    return NAMES[status.engine] + (f" ({status.flavour})" if status.flavour else "")


def _configure(status: EngineStatus, *more: str) -> tuple[str, ...]:
    """Return the commands that tell an engine of ocigpu and have it read that."""
    words = ["ocigpu", "engine", "configure", status.engine, *more]
    if status.flavour:
        words.append(f"--config-file={status.target}")
    service = SERVICES.get(status.engine, "")
    return (" ".join(words), *((f"systemctl restart {_service(status, service)}",) if service else ()))


def _service(status: EngineStatus, service: str) -> str:
    if status.flavour in ("k3s", "rke2"):
        return {"k3s": "k3s", "rke2": "rke2-server"}[status.flavour]
    return f"--user {service}" if status.flavour == "rootless" else service


def _file(host: Host, status: EngineStatus) -> str:
    return host.path(status.target)


def _release(host: Host, engine: str) -> str:
    if engine == "docker" and host.docker and host.docker.release:
        return host.docker.release
    return engine_releases(host).get(engine, "")


def _is_from(release: str, *wanted: int) -> bool:
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:3])
    return numbers >= wanted


def docker_reads_cdi(host: Host, status: EngineStatus) -> bool | None:
    """Return whether Docker takes CDI devices; None when its version is unknown.

    From Docker 25 on with features.cdi, from 28.2 on unless that is false (moby pull requests 45134 and 49963).
    """
    release = _release(host, "docker")
    if status.cdi == "off":
        return False
    if not release:
        return None
    return _is_from(release, 25) if status.cdi == "on" else _is_from(release, 28, 2)


def check_configured(host: Host) -> list[Finding]:
    """Can every engine give containers a GPU?"""
    engines = _installed(host)
    if not engines:
        looked = Evidence("Docker, containerd, CRI-O, Podman", "no program and no configuration found")
        return [not_checked("no container engine is installed", looked)]
    able = {id(status): _ways(host, status) for status in engines}
    some = any(able.values())
    findings = []
    for status in engines:
        ways = able[id(status)]
        if ways:
            findings.append(
                ok(f"{_label(status)} can give GPUs: {', '.join(ways)}", Evidence(_file(host, status), ways[0]))
            )
            continue
        if status.engine == "podman" and status.cdi == "on":
            findings.append(not_checked("Podman takes CDI devices, and there is no specification: see cdi-missing"))
            continue
        if any(item.engine == status.engine and able[id(item)] for item in engines):
            findings.append(not_checked(f"another {NAMES[status.engine]} is configured: see containerd-two-configs"))
            continue
        text = f"{_label(status)} is installed and knows nothing of GPUs"
        if status.engine == "docker":
            text += f': "docker run --gpus all" fails with: {NO_DRIVER_ERROR}'
        evidence = (
            Evidence(
                _file(host, status),
                "no runtime of ocigpu" if status.files else "no such file",
                "one that runs ocigpu-runtime",
            ),
        )
        severity = note if some else error if host.driver_version else warning
        findings.append(severity(text, evidence, _configure(status)))
    return findings


def _ways(host: Host, status: EngineStatus) -> list[str]:
    """Return how an engine can give GPUs."""
    ways = [f'runtime "{entry.name}"' for entry in status.runtimes if entry.ours]
    ways += [f'the vendor\'s runtime "{entry.name}"' for entry in status.runtimes if _is_vendors(entry.path)]
    if status.gpus_hook:
        ways.append("--gpus")
    reads = docker_reads_cdi(host, status) if status.engine == "docker" else status.cdi == "on"
    if reads and host.specs.gpus:
        ways.append("CDI devices")
    return ways


def check_problems(host: Host) -> list[Finding]:
    """Can the engines' files be read?"""
    engines = _installed(host)
    files = tuple(host.evidence(path, "read") for status in engines for path in status.files)
    bad = [(status, text) for status in engines for text in status.problems if "not executable" not in text]
    if not bad:
        if not files:
            return [not_checked("no engine has a configuration file")]
        return [ok("configuration files of engines can be read", *files)]
    return [
        error(
            f"{_label(status)}: {text}: the engine does not start with this file",
            (Evidence(_file(host, status), printable(text, 300), "a valid file"),),
            _checker(host, status),
        )
        for status, text in bad
    ]


def _checker(host: Host, status: EngineStatus) -> tuple[str, ...]:
    path = status.target
    checkers = {
        "docker": f"dockerd --validate --config-file={path}",
        "containerd": f"containerd --config {path} config dump",
        "crio": "crio config --default > /dev/null  # its messages name the file",
        "podman": "podman info",
    }
    return (f"# correct {host.path(path)}; this says what is wrong:", checkers[status.engine])


def check_runtimes(host: Host) -> list[Finding]:
    """Are the programs there that engines are told to run?"""
    entries = [
        (status, entry)
        for status in _installed(host)
        for entry in status.runtimes
        if entry.ours or _is_vendors(entry.path) or entry.name == status.default_runtime
    ]
    if not entries:
        return [not_checked("no engine names a runtime of ocigpu or of the vendor")]
    bad = [(status, entry) for status, entry in entries if not entry.exists]
    if not bad:
        return [
            ok("runtimes that engines name are there", *(host.evidence(entry.path, "there") for _, entry in entries))
        ]
    findings = []
    for status, entry in bad:
        default = entry.name == status.default_runtime
        text = f'{_label(status)} is told of runtime "{entry.name}" = {printable(entry.path, 200)}, which is not there'
        text += ": no container starts, for it is the default" if default else f": --runtime={entry.name} fails"
        remove = f"ocigpu engine remove {status.engine}" if entry.ours else f"# remove it from {_file(host, status)}"
        findings.append(
            error(
                text,
                (
                    Evidence(_file(host, status), entry.path, "a program"),
                    host.evidence(entry.path, "none", "a program"),
                ),
                (
                    "# install it again (ocigpu: make install, or the package)" if entry.ours else "# install it again",
                    f"# or: {remove}" if entry.ours else remove,
                    *_configure(status)[1:],
                ),
            )
        )
    return findings


def check_gpus_hook(host: Host) -> list[Finding]:
    """Does Docker's --gpus work?"""
    dockers = _installed(host, "docker")
    if not dockers:
        return [not_checked("Docker is not installed")]
    status = dockers[0]
    if not _ways(host, status):
        return [not_checked("Docker is told of no GPUs at all: see engine-not-configured")]
    if status.gpus_hook:
        whose = "ocigpu" if status.gpus_hook_ours else "the vendor's toolkit, or another program"
        return [ok(f"--gpus is served by {whose}", host.evidence(status.gpus_hook, "there"))]
    evidence = (Evidence("PATH of dockerd", "no nvidia-container-runtime-hook", "one"),)
    if _is_from(_release(host, "docker"), 29) and docker_reads_cdi(host, status) and host.specs.gpus:
        found = host.program("/usr/bin/nvidia-cdi-hook", "/usr/local/bin/nvidia-cdi-hook")
        if found:
            return [ok("--gpus is served by CDI", host.evidence(found, "there"))]
    if status.is_default:
        return [
            note(
                f'"docker run --gpus" fails with: {NO_DRIVER_ERROR}; ocigpu is the default runtime, so -e '
                "NVIDIA_VISIBLE_DEVICES=all does without",
                evidence,
                _configure(status, "--gpus"),
            )
        ]
    return [warning(f'"docker run --gpus" fails with: {NO_DRIVER_ERROR}', evidence, _configure(status, "--gpus"))]


def check_docker_cdi(host: Host) -> list[Finding]:
    """Does Docker take CDI devices?"""
    dockers = _installed(host, "docker")
    if not dockers:
        return [not_checked("Docker is not installed")]
    status, release = dockers[0], _release(host, "docker")
    if not _ways(host, status):
        return [not_checked("Docker is told of no GPUs at all: see engine-not-configured")]
    reads = docker_reads_cdi(host, status)
    file = _file(host, status)
    found = {"on": "features.cdi is true", "off": "features.cdi is false"}.get(status.cdi, "features.cdi is not set")
    evidence = (Evidence(file, found, "true"), Evidence("Docker", release or "unknown release", "25 or later"))
    if reads:
        return [ok("Docker takes CDI devices", *evidence)]
    if reads is None:
        return [not_checked(f"{found}, and Docker's release is unknown: from 28.2 on that means on", *evidence)]
    if release and not _is_from(release, 25):
        return [note(f"Docker {release} knows no CDI: --device nvidia.com/gpu=all fails", evidence)]
    severity = warning if host.specs.gpus else note
    text = "Docker's CDI is switched off: --device nvidia.com/gpu=all fails"
    return [severity(text, evidence, _configure(status, "--cdi"))]


def check_restarted(host: Host) -> list[Finding]:
    """Does the running dockerd know what its file says?"""
    if not host.live:
        return [not_checked("daemons are asked on this machine only")]
    answer = host.docker
    if answer is None:
        return [not_checked("there is no socket of dockerd here")]
    if answer.problem:
        return [not_checked(answer.problem, Evidence(answer.socket, answer.problem, "an answer"))]
    status = _status_of(host, answer.pid)
    if status is None:
        return [not_checked("it is unknown which file the running dockerd has read")]
    known = {name: str(item.get("path", "")) for name, item in dict(answer.info.get("Runtimes") or {}).items()}
    missing = [entry for entry in status.runtimes if known.get(entry.name) != entry.path]
    file = _file(host, status)
    differences = [
        Evidence(answer.socket, f'runtime "{entry.name}": {known.get(entry.name, "unknown")}', f"{entry.path} ({file})")
        for entry in missing
    ]
    default = str(answer.info.get("DefaultRuntime", ""))
    if status.default_runtime and status.default_runtime != default:
        differences.append(Evidence(answer.socket, f"default runtime {default}", f"{status.default_runtime} ({file})"))
    if status.cdi == "on" and _is_from(answer.release, 25) and not answer.info.get("CDISpecDirs"):
        differences.append(Evidence(answer.socket, "CDI is off", f"on ({file})"))
    if not differences:
        found = f"Docker {answer.release}, runtimes {', '.join(sorted(known))}"
        return [ok("the running dockerd knows what its file says", Evidence(answer.socket, found))]
    return [
        error(
            "dockerd was started before its configuration was changed, and does not know it",
            tuple(differences),
            _configure(status)[1:],
        )
    ]


def _status_of(host: Host, pid: int) -> EngineStatus | None:
    """Return the configuration that a running dockerd has read, by its command line."""
    configs = {daemon.pid: daemon.config for daemon in running_daemons("/") if daemon.engine == "docker"}
    dockers = [item for item in host.engines if item.engine == "docker"]
    wanted = configs.get(pid, "")
    for status in dockers:
        if status.target == wanted or (not wanted and status.flavour == ("rootless" if os.geteuid() else "")):
            return status
    return next(iter(dockers), None) if not wanted else None


def cgroup_driver(host: Host, status: EngineStatus) -> str:
    """Return "systemd" or "cgroupfs": what the daemon says, its file, or the engine's default; "" when unknown."""
    if status.engine == "docker" and host.docker and not host.docker.problem:
        return str(host.docker.info.get("CgroupDriver", ""))
    data = read_merged(host.root or "/", status.engine, status.target, [])[1]
    systemd = host.exists("/run/systemd/system")
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
    engines = [item for item in _installed(host) if _hooked(item)]
    if any("not executable" not in text for item in engines for text in item.problems):
        return [not_checked("the configuration of an engine cannot be read: see engine-config-broken")]
    if not engines:
        return [not_checked("no engine here has a hook change device cgroups (the way of --gpus and of legacy mode)")]
    findings, fine = [], []
    for status in engines:
        driver = cgroup_driver(host, status)
        if driver != "systemd":
            fine.append(Evidence(_file(host, status), f"cgroup driver {driver or 'unknown'}"))
            continue
        findings.append(
            warning(
                f"{_label(status)} leaves cgroups to systemd, and {_hooked(status)} changes them behind its back: "
                'after "systemctl daemon-reload" running containers lose their GPUs ("Failed to initialize NVML")',
                (
                    Evidence(
                        _file(host, status),
                        f"cgroup driver systemd, default runtime {status.default_runtime or 'runc'}",
                        "ocigpu's runtime, which declares the devices",
                    ),
                ),
                (
                    "# start containers with --runtime=ocigpu or CDI devices; for all containers:",
                    *_configure(status, "--set-as-default"),
                ),
            )
        )
    return findings or [ok("device cgroups are not systemd's where a hook changes them", *fine)]


def _hooked(status: EngineStatus) -> str:
    """Return what changes the device cgroup after the runtime has set it, "" for nothing."""
    if status.is_default:
        return ""
    if status.engine == "docker" and status.gpus_hook:
        return "the hook of --gpus"
    vendors = [entry.name for entry in status.runtimes if os.path.basename(entry.path) == VENDOR[2]]
    return f'the vendor\'s legacy runtime "{vendors[0]}"' if vendors else ""


def check_two_containerds(host: Host) -> list[Finding]:
    """Is it clear which configuration containerd reads?"""
    found = [item for item in host.engines if item.engine == "containerd" and item.installed and item.files]
    if not found:
        return [not_checked("containerd has no configuration file")]
    told = [status for status in found if status.configured]
    evidence = tuple(
        Evidence(_file(host, status), "names ocigpu" if status in told else "does not name ocigpu") for status in found
    )
    if len(found) == 1:
        return [ok("there is one configuration of containerd", *evidence)]
    if told and len(told) < len(found):
        others = [status for status in found if status not in told]
        fixes = tuple(line for status in others for line in _configure(status))
        return [warning("containerd has several configurations, and only some name ocigpu", evidence, fixes)]
    return [note("containerd has several configurations: each daemon reads its own", evidence)]


def check_snap(host: Host) -> list[Finding]:
    """Is Docker outside of a snap?"""
    places = ("/snap/bin/docker", "/var/snap/docker", "/snap/docker")
    found = [path for path in places if host.exists(path)]
    if not found:
        return [ok("no Docker from a snap", *(host.evidence(path, "none") for path in places[:2]))]
    return [
        warning(
            "Docker is installed from a snap: it cannot see the host's driver files, programs or /etc/docker",
            tuple(host.evidence(path, "there", "none") for path in found),
            (
                "snap remove docker",
                "# install Docker from its own or the distribution's packages, then:",
                "ocigpu engine configure docker",
            ),
        )
    ]


def check_context(host: Host) -> list[Finding]:
    """Does the docker command talk to the daemon of this machine?"""
    if not host.live:
        return [not_checked("the docker command of this user is looked at on this machine only")]
    if not _installed(host, "docker"):
        return [not_checked("Docker is not installed")]
    path = os.path.join(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"), "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            context = str(json.load(file).get("currentContext", ""))
    except FileNotFoundError:
        context = ""
    except (ValueError, AttributeError):
        return [not_checked(f"{path} is not JSON")]
    context = os.environ.get("DOCKER_CONTEXT") or context
    if os.environ.get("DOCKER_HOST") or context in ("", "default"):
        return [ok("the docker command uses the default context", Evidence(path, context or "no context"))]
    return [
        note(
            f'the docker command uses context "{printable(context, 100)}": another machine, or Docker Desktop',
            (Evidence(path, context, "default"),),
            ("docker context use default",),
        )
    ]


def check_vendor(host: Host) -> list[Finding]:
    """Is the vendor's toolkit installed beside ocigpu?"""
    programs = ("nvidia-container-runtime", "nvidia-ctk", "nvidia-container-cli", "nvidia-cdi-hook")
    found = [path for name in programs if (path := host.program(f"/usr/bin/{name}", f"/usr/local/bin/{name}"))]
    refreshers = [
        path
        for path in (
            "/etc/systemd/system/nvidia-cdi-refresh.service",
            "/usr/lib/systemd/system/nvidia-cdi-refresh.service",
            "/lib/systemd/system/nvidia-cdi-refresh.service",
        )
        if host.exists(path)
    ]
    ours = [
        path
        for path in (
            "/etc/systemd/system/ocigpu-cdi-refresh.service",
            "/usr/lib/systemd/system/ocigpu-cdi-refresh.service",
            "/lib/systemd/system/ocigpu-cdi-refresh.service",
        )
        if host.exists(path)
    ]
    if not found:
        return [
            ok(
                "the vendor's toolkit is not installed",
                *(host.evidence(f"/usr/bin/{name}", "none") for name in programs),
            )
        ]
    evidence = tuple(host.evidence(path, "there") for path in (*found, *refreshers))
    if refreshers and ours:
        return [
            warning(
                "two services write /var/run/cdi/nvidia.yaml, the vendor's and ocigpu's",
                (*evidence, *(host.evidence(path, "there") for path in ours)),
                ("systemctl disable --now nvidia-cdi-refresh.path nvidia-cdi-refresh.service",),
            )
        ]
    return [note("the vendor's toolkit is installed too; both can be used, each under its own runtime name", evidence)]
