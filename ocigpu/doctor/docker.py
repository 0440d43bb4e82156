"""Checks of Docker: --gpus, CDI, what the running daemon knows, snaps and contexts."""

import tomllib
from contextlib import suppress

from ocigpu.core.errors import OcigpuError, printable
from ocigpu.core.settings import DEFAULT_PATH
from ocigpu.doctor.engines import (
    CLI,
    configure,
    docker_reads_cdi,
    file_of,
    installed_engines,
    is_from,
    is_vendors,
    label,
    lacks_its_program,
    release_of,
    restart,
    takes_cdi,
    ways_to_gpus,
)
from ocigpu.doctor.findings import Evidence, Finding, not_checked, ok, say
from ocigpu.doctor.host import Host
from ocigpu.doctor.repairs import find_removal
from ocigpu.doctor.settings import VENDOR_SETTINGS
from ocigpu.engines.configure import read_record
from ocigpu.engines.files import Root
from ocigpu.engines.places import DOCKER, DOCKER_OPTIONS
from ocigpu.engines.status import EngineStatus, read_merged


def _docker(host: Host) -> EngineStatus | None:
    """Return the configuration of the dockerd that answers, else of the first Docker that is installed."""
    if host.docker is not None and not host.docker.problem:
        return _running(host)
    return next(iter(installed_engines(host, "docker")), None)


def _running(host: Host) -> EngineStatus | None:
    """Return the configuration that the dockerd that answers has read, by its command line."""
    wanted = host.docker.config if host.docker else ""
    usual = "rootless" if host.user else ""
    found = (item for item in host.engines if item.engine == "docker")
    return next((item for item in found if (item.target == wanted if wanted else item.flavour == usual)), None)


def find_gpus_hook(host: Host, status: EngineStatus) -> str:
    """Return the program that --gpus needs, "" where it fails: dockerd's hook, or from 29.2 on one of CDI's."""
    asked = host.docker if status is _docker(host) else None
    hook = asked.hook if asked is not None and asked.path is not None else status.gpus_hook
    if not hook and is_from(release_of(host, "docker"), 29, 2) and takes_cdi(host, status):
        hook = host.program("/usr/bin/nvidia-cdi-hook", "/usr/local/bin/nvidia-cdi-hook")
    return hook


def check_gpus_hook(host: Host) -> list[Finding]:
    """Does Docker's --gpus work?"""
    status = _docker(host)
    if status is None:
        return [not_checked("Docker is not installed")]
    if host.is_wsl:
        return [not_checked("WSL: only CDI specifications provide the GPUs of Windows, not by --gpus")]
    where = "PATH of dockerd"
    if host.docker is not None and host.docker.path is not None:
        where = f"PATH of the running dockerd ({printable(host.docker.path, 200)})"
    if found := find_gpus_hook(host, status):
        if lacks_its_program(host, found):
            none = Evidence(CLI, "none in the directories of services", "one")
            values = {"hook": found, "configure": configure(host, status, "--gpus-hook")}
            return [say("docker-gpus-hook.vendors", host.evidence(found, "NVIDIA's hook"), none, **values)]
        how = "is served by CDI" if found.endswith("nvidia-cdi-hook") else "has its hook"
        return [ok(f"--gpus {how}", host.evidence(found, "there"))]
    if not ways_to_gpus(host, status):
        return [not_checked("Docker is not configured for GPUs: see engine-not-configured")]
    what = "default" if status.is_default else "none"
    seen = Evidence(where, "no nvidia-container-runtime-hook", "one")
    return [say(f"docker-gpus-hook.{what}", seen, configure=configure(host, status, "--gpus-hook"))]


def check_docker_cdi(host: Host) -> list[Finding]:
    """Does Docker take CDI devices?"""
    status, release = _docker(host), release_of(host, "docker")
    if status is None:
        return [not_checked("Docker is not installed")]
    if not ways_to_gpus(host, status):
        return [not_checked("Docker is not configured for GPUs: see engine-not-configured")]
    reads = docker_reads_cdi(host, status)
    file = file_of(host, status)
    found = {"on": "features.cdi is true", "off": "features.cdi is false"}.get(status.cdi, "features.cdi is not set")
    evidence = (Evidence(file, found, "true"), Evidence("Docker", release or "unknown release", "25 or later"))
    if reads:
        return [ok("Docker takes CDI devices", *evidence)]
    if reads is None:
        return [not_checked(f"{found}, and Docker's release is unknown: from 28.2 on that means on", *evidence)]
    if release and not is_from(release, 25):
        return [say("docker-cdi-off.old", *evidence, release=release)]
    severity = "warning" if host.specs.gpus else "note"
    more = ("--cdi", "--no-gpus-hook") if host.is_wsl else ("--cdi",)
    return [say("docker-cdi-off.off", *evidence, severity=severity, configure=configure(host, status, *more))]


def check_restarted(host: Host) -> list[Finding]:
    """Does the running dockerd know what its file says?"""
    if not host.live:
        return [not_checked("daemons are queried on this machine only")]
    answer = host.docker
    if answer is None:
        return [not_checked("dockerd has no socket here")]
    if answer.problem:
        return [not_checked(answer.problem, Evidence(answer.socket, answer.problem, "an answer"))]
    status = _running(host)
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
    unsure = []
    if answer.hook_is_new:
        wanted = "made before: --gpus is set up at its start"
        newer = Evidence(answer.hook, "made after dockerd was started", wanted)
        if answer.hook in _recorded_links(host, status):
            differences.append(newer)
        else:
            values = {"hook": printable(answer.hook, 200), "restart": restart(host, status)}
            unsure = [say("docker-not-restarted.hook", newer, **values)]
    if not differences and not unsure:
        found = f"Docker {answer.release}, runtimes {', '.join(sorted(known))}"
        return [ok("the running dockerd uses its present file", Evidence(answer.socket, found))]
    if not differences:
        return unsure
    return [say("docker-not-restarted.changed", *differences, restart=restart(host, status))]


def _recorded_links(host: Host, status: EngineStatus) -> tuple[str, ...]:
    """Return the hooks that "engine configure" made: it makes one only where dockerd's PATH had none, or before that.

    A package may have replaced a hook that dockerd found at its start, or only have given its link a new date.
    """
    with suppress(OcigpuError), Root(host.root or "/") as root:
        record = read_record(root, root.read(status.target))
        return record.links if record else ()
    return ()


def check_options(host: Host) -> list[Finding]:
    """Would the dockerd that runs start again with its file?"""
    daemons = [daemon for daemon in host.daemons if daemon.engine == "docker"]
    if not daemons:
        return [not_checked("dockerd does not run here")]
    findings = []
    for daemon in daemons:
        file = daemon.config or DOCKER
        keys = read_merged(host.root or "/", "docker", file, [])[1]
        findings += [
            say(
                "docker-options.both",
                Evidence(f"process {daemon.pid}", f"--{option}"),
                host.evidence(file, option, "one of both"),
                option=option,
                file=host.path(file),
                removal=find_removal(host.find(file), host.text(file) or "", {option: ""})
                or f"# take that key out of {host.path(file)}",
            )
            for option in DOCKER_OPTIONS
            if option in daemon.options and option in keys
        ]
    seen = Evidence("command line of dockerd", ", ".join(f"process {daemon.pid}" for daemon in daemons))
    return findings or [ok("no option of dockerd contradicts its file", seen)]


def check_swarm(host: Host) -> list[Finding]:
    """Do services of Swarm get the GPUs that are its generic resources?

    Swarm's variable is the resource's name in capitals (swarmkit, api/genericresource: EnvFormat).
    """
    status = _docker(host)
    if status is None:
        return [not_checked("Docker is not installed")]
    data = read_merged(host.root or "/", "docker", status.target, [])[1]
    entries = data.get("node-generic-resources")
    pairs = [str(entry).partition("=") for entry in (entries if isinstance(entries, list) else ())]
    gpus = [(name, value) for name, _, value in pairs if value.startswith(("GPU-", "MIG-")) or "GPU" in name.upper()]
    if not gpus:
        return [not_checked("no GPU is a generic resource of Swarm (node-generic-resources of daemon.json)")]
    file, findings = file_of(host, status), []
    seen = Evidence(file, f"node-generic-resources: {printable(', '.join('='.join(one) for one in gpus), 300)}")
    path, names = _swarm_setting(host, status)
    variables = dict.fromkeys(f"DOCKER_RESOURCE_{name.upper()}" for name, _ in gpus)
    if not any(
        entry.name == status.default_runtime and (entry.ours or is_vendors(entry.path)) for entry in status.runtimes
    ):
        default = printable(status.default_runtime or "runc", 100)
        more = {"engine": label(status), "default": default, "configure": configure(host, status, "--default")}
        findings.append(say("swarm-resources.default", seen, Evidence(file, f"default runtime {default}"), **more))
    missing = [name for name in variables if name not in names]
    if missing:
        setting = Evidence(path, f'swarm-resource = "{printable(",".join(names), 200)}"', ",".join(variables))
        more = {"variable": printable(missing[0], 200), "settings": path, "wanted": ",".join([*names, *missing])}
        findings.append(say("swarm-resources.unread", seen, setting, **more))
    uuids = [gpu.uuid for gpu in host.proc_gpus]
    for name, value in gpus if uuids and all(uuids) else ():
        if value.startswith("GPU-") and not any(uuid.startswith(value) for uuid in uuids):
            known = Evidence(f"{host.roots.proc}/driver/nvidia/gpus", ", ".join(uuids[:4]), printable(value, 100))
            more = {"resource": printable(f"{name}={value}", 200), "file": file, "restart": restart(host, status)}
            findings.append(say("swarm-resources.unknown", seen, known, **more))
    return findings or [ok("GPUs of Swarm's services are obeyed", seen, Evidence(path, ",".join(names)))]


def _swarm_setting(host: Host, status: EngineStatus) -> tuple[str, list[str]]:
    """Return the settings file of the default runtime, and the variables that its swarm-resource names."""
    path, text = host.settings.path or host.path(DEFAULT_PATH), host.settings.swarm_resource
    if any(
        entry.name == status.default_runtime and is_vendors(entry.path) and not entry.ours for entry in status.runtimes
    ):
        path = host.path(VENDOR_SETTINGS)
        with suppress(ValueError):
            text = str(tomllib.loads(host.text(VENDOR_SETTINGS) or "").get("swarm-resource", ""))
    return path, [name for name in map(str.strip, text.split(",")) if name]


def check_snap(host: Host) -> list[Finding]:
    """Is Docker outside of a snap?"""
    places = ("/snap/bin/docker", "/var/snap/docker", "/snap/docker")
    found = [path for path in places if host.exists(path)]
    if not found:
        return [ok("no Docker from a snap", *(host.evidence(path, "none") for path in places[:2]))]
    return [say("docker-snap.snap", *(host.evidence(path, "there", "none") for path in found))]


def check_context(host: Host) -> list[Finding]:
    """Does the docker command talk to the daemon of this machine?"""
    if not host.live:
        return [not_checked("the docker command of this user is examined on this machine only")]
    if not installed_engines(host, "docker"):
        return [not_checked("Docker is not installed")]
    path, context, is_elsewhere = host.docker_context
    if path == "DOCKER_HOST":
        seen = Evidence(path, printable(context, 200))
        if is_elsewhere:
            return [say("docker-context.host", seen, host=printable(context, 100))]
        return [ok("the docker command talks to a socket of this machine", seen)]
    if not is_elsewhere:
        return [ok("the docker command uses the default context", Evidence(path, context or "no context"))]
    return [say("docker-context.other", Evidence(path, context, "default"), context=printable(context, 100))]
