"""Checks of Docker: --gpus, CDI, what the running daemon knows, snaps and contexts."""

import json
import os
import shutil

from ocigpu.core.errors import printable
from ocigpu.doctor.engines import (
    NO_DRIVER_ERROR,
    configure,
    docker_reads_cdi,
    file_of,
    installed_engines,
    is_from,
    release_of,
    restart,
    ways_to_gpus,
)
from ocigpu.doctor.host import Host
from ocigpu.doctor.records import Evidence, Finding, error, not_checked, note, ok, warning
from ocigpu.engines.places import running_daemons
from ocigpu.engines.status import HOOK, EngineStatus


def _docker(host: Host) -> EngineStatus | None:
    """Return the configuration of the dockerd that answers, else of the first Docker that is installed."""
    if host.docker is not None and not host.docker.problem:
        return _running(host)[0]
    return next(iter(installed_engines(host, "docker")), None)


def _running(host: Host) -> tuple[EngineStatus | None, int]:
    """Return the configuration that the dockerd that answers has read, by its command line, and its process id.

    The process id is 0 when it is unknown: systemd may hold the socket.
    """
    answer = host.docker
    if answer is None:
        return None, 0
    configs = {daemon.pid: daemon.config for daemon in running_daemons("/") if daemon.engine == "docker"}
    pid = answer.pid if answer.pid in configs else next((pid for pid, config in configs.items() if not config), 0)
    wanted = configs.get(pid, "")
    usual = "rootless" if os.geteuid() else ""
    for status in host.engines:
        if status.engine == "docker" and (status.target == wanted if wanted else status.flavour == usual):
            return status, pid
    return None, pid


def check_gpus_hook(host: Host) -> list[Finding]:
    """Does Docker's --gpus work?"""
    status = _docker(host)
    if status is None:
        return [not_checked("Docker is not installed")]
    hook, where = status.gpus_hook, "PATH of dockerd"
    path = _path_variable(_running(host)[1])
    if path is not None:
        hook, where = shutil.which(HOOK, path=path) or "", f"PATH of the running dockerd ({printable(path, 200)})"
    if hook:
        return [ok("--gpus has its hook", host.evidence(hook, "there"))]
    if not ways_to_gpus(host, status):
        return [not_checked("Docker is told of no GPUs at all: see engine-not-configured")]
    evidence = (Evidence(where, "no nvidia-container-runtime-hook", "one"),)
    if is_from(release_of(host, "docker"), 29) and docker_reads_cdi(host, status) and host.specs.gpus:
        found = host.program("/usr/bin/nvidia-cdi-hook", "/usr/local/bin/nvidia-cdi-hook")
        if found:
            return [ok("--gpus is served by CDI", host.evidence(found, "there"))]
    if status.is_default:
        return [
            note(
                f'"docker run --gpus" fails with: {NO_DRIVER_ERROR}; ocigpu is the default runtime, so -e '
                "NVIDIA_VISIBLE_DEVICES=all does without",
                evidence,
                configure(host, status, "--gpus-hook"),
            )
        ]
    return [
        warning(f'"docker run --gpus" fails with: {NO_DRIVER_ERROR}', evidence, configure(host, status, "--gpus-hook"))
    ]


def check_docker_cdi(host: Host) -> list[Finding]:
    """Does Docker take CDI devices?"""
    status, release = _docker(host), release_of(host, "docker")
    if status is None:
        return [not_checked("Docker is not installed")]
    if not ways_to_gpus(host, status):
        return [not_checked("Docker is told of no GPUs at all: see engine-not-configured")]
    reads = docker_reads_cdi(host, status)
    file = file_of(host, status)
    found = {"on": "features.cdi is true", "off": "features.cdi is false"}.get(status.cdi, "features.cdi is not set")
    evidence = (Evidence(file, found, "true"), Evidence("Docker", release or "unknown release", "25 or later"))
    if reads:
        return [ok("Docker takes CDI devices", *evidence)]
    if reads is None:
        return [not_checked(f"{found}, and Docker's release is unknown: from 28.2 on that means on", *evidence)]
    if release and not is_from(release, 25):
        return [note(f"Docker {release} knows no CDI: --device nvidia.com/gpu=all fails", evidence)]
    severity = warning if host.specs.gpus else note
    text = "Docker's CDI is switched off: --device nvidia.com/gpu=all fails"
    return [severity(text, evidence, configure(host, status, "--cdi"))]


def check_restarted(host: Host) -> list[Finding]:
    """Does the running dockerd know what its file says?"""
    if not host.live:
        return [not_checked("daemons are asked on this machine only")]
    answer = host.docker
    if answer is None:
        return [not_checked("there is no socket of dockerd here")]
    if answer.problem:
        return [not_checked(answer.problem, Evidence(answer.socket, answer.problem, "an answer"))]
    status, pid = _running(host)
    if status is None:
        return [not_checked("it is unknown which file the running dockerd has read")]
    known = {name: str(item.get("path", "")) for name, item in dict(answer.info.get("Runtimes") or {}).items()}
    missing = [entry for entry in status.runtimes if known.get(entry.name) != entry.path]
    file = file_of(host, status)
    differences = [
        Evidence(answer.socket, f'runtime "{entry.name}": {known.get(entry.name, "unknown")}', f"{entry.path} ({file})")
        for entry in missing
    ]
    default = str(answer.info.get("DefaultRuntime", ""))
    if status.default_runtime and status.default_runtime != default:
        differences.append(Evidence(answer.socket, f"default runtime {default}", f"{status.default_runtime} ({file})"))
    if status.cdi == "on" and is_from(answer.release, 25) and not answer.info.get("CDISpecDirs"):
        differences.append(Evidence(answer.socket, "CDI is off", f"on ({file})"))
    hook = shutil.which(HOOK, path=_path_variable(pid) or "")
    if hook and os.lstat(hook).st_ctime > _start_time(pid) + 1:
        differences.append(
            Evidence(hook, "made after dockerd was started", "made before: --gpus is set up at its start")
        )
    if not differences:
        found = f"Docker {answer.release}, runtimes {', '.join(sorted(known))}"
        return [ok("the running dockerd knows what its file says", Evidence(answer.socket, found))]
    return [
        error(
            "dockerd was started before its configuration was changed, and does not know it",
            tuple(differences),
            restart(host, status),
        )
    ]


def _path_variable(pid: int) -> str | None:
    """Return the PATH of a running process, None when it cannot be seen."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read(1 << 20).split(b"\0")
    except OSError:  # there is none, it has ended, or it is another user's
        return None
    return next((os.fsdecode(item[5:]) for item in variables if item.startswith(b"PATH=")), None)


def _start_time(pid: int) -> float:
    """Return when a process was started, seconds since 1970: field 22 of proc_pid_stat(5), btime of proc_stat(5)."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    with open("/proc/stat", encoding="ascii") as file:
        boot = next(int(line.split()[1]) for line in file if line.startswith("btime"))
    return boot + ticks / os.sysconf("SC_CLK_TCK")


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
                "ocigpu engine configure docker --default",
            ),
        )
    ]


def check_context(host: Host) -> list[Finding]:
    """Does the docker command talk to the daemon of this machine?"""
    if not host.live:
        return [not_checked("the docker command of this user is looked at on this machine only")]
    if not installed_engines(host, "docker"):
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
