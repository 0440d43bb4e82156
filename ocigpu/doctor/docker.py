"""Checks of Docker: --gpus, CDI, what the running daemon knows, snaps and contexts."""

import json
import os

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
from ocigpu.engines.status import EngineStatus
from ocigpu.errors import printable


def check_gpus_hook(host: Host) -> list[Finding]:
    """Does Docker's --gpus work?"""
    dockers = installed_engines(host, "docker")
    if not dockers:
        return [not_checked("Docker is not installed")]
    status = dockers[0]
    if not ways_to_gpus(host, status):
        return [not_checked("Docker is told of no GPUs at all: see engine-not-configured")]
    if status.gpus_hook:
        whose = "ocigpu" if status.gpus_hook_ours else "the vendor's toolkit, or another program"
        return [ok(f"--gpus is served by {whose}", host.evidence(status.gpus_hook, "there"))]
    evidence = (Evidence("PATH of dockerd", "no nvidia-container-runtime-hook", "one"),)
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
    dockers = installed_engines(host, "docker")
    if not dockers:
        return [not_checked("Docker is not installed")]
    status, release = dockers[0], release_of(host, "docker")
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
    status = _status_of(host, answer.pid)
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


def _status_of(host: Host, pid: int) -> EngineStatus | None:
    """Return the configuration that a running dockerd has read, by its command line."""
    configs = {daemon.pid: daemon.config for daemon in running_daemons("/") if daemon.engine == "docker"}
    dockers = [item for item in host.engines if item.engine == "docker"]
    wanted = configs.get(pid, "")
    for status in dockers:
        if status.target == wanted or (not wanted and status.flavour == ("rootless" if os.geteuid() else "")):
            return status
    return next(iter(dockers), None) if not wanted else None


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
