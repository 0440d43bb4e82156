"""Have running containers what they were given?  Asked by a child with a deadline: a container may be stuck."""

import os
import shlex

from ocigpu.bundle.edit import has_gpu_hook
from ocigpu.containers.asked import ask_child
from ocigpu.containers.find import Container, default_places, find_containers, read_config_of
from ocigpu.containers.wants import VARIABLE as CAPABILITIES_VARIABLE
from ocigpu.containers.wants import describe_users, find_users
from ocigpu.core.errors import OcigpuError, printable
from ocigpu.doctor.host import Host
from ocigpu.doctor.records import Evidence, Finding, error, not_checked, note, ok, warning
from ocigpu.gpus.nvidia.request import Request

SECONDS = 15.0
MAX_CONTAINERS = 200


def check_lost_gpus(host: Host) -> list[Finding]:
    """Can running containers still open the GPUs that they were given?"""
    if not host.live:
        return [not_checked("containers are looked at on this machine only")]
    found, notes = find_containers(default_places(host.states))
    running = [item for item in found if item.status in ("created", "running")][:MAX_CONTAINERS]
    if not running:
        reason = f"no container runs here, as far as can be seen: {notes[0]}" if notes else "no container runs here"
        return [not_checked(reason)]
    if not host.driver_version:
        return [not_checked("no driver is loaded: there is no GPU to lose")]
    if os.geteuid() != 0:
        return [not_checked(f"only root can ask what the cgroups of {len(running)} running containers allow")]
    try:
        answers = ask_child(lambda: _ask(host, running), SECONDS)
    except (OSError, OcigpuError) as failure:
        return [not_checked(f"containers could not be looked into: {failure}")]
    findings = [_lost(name, lost) for name, lost, _, _ in answers if lost]
    findings += [_not_given(name, asked) for name, _, asked, _ in answers if asked]
    findings += [not_checked(f"container {name}: {problem}") for name, _, _, problem in answers if problem]
    well = [name for name, *wrong in answers if not any(wrong)]
    if well:
        shown = printable(", ".join(well), 300)
        findings.append(ok("running containers have what they were given", Evidence("device cgroups", shown)))
    return findings


def check_driver_capabilities(host: Host) -> list[Finding]:
    """Have running containers the driver files that libraries of their images use?"""
    if not host.live:
        return [not_checked("containers are looked at on this machine only")]
    if os.geteuid() != 0:
        return [not_checked("only root can look into images of containers")]
    found, _ = find_containers(default_places(host.states))
    running = [item for item in found if item.status in ("created", "running") and item.pid][:MAX_CONTAINERS]
    try:
        answers = ask_child(lambda: [(item.name, _wanted(item, host)) for item in running], SECONDS)
    except (OSError, OcigpuError) as failure:
        return [not_checked(f"containers could not be looked into: {failure}")]
    findings = [
        note(
            f"container {printable(name, 200)}: {text}",
            (Evidence(f"container {printable(name, 200)}", CAPABILITIES_VARIABLE, "as NVIDIA's default mode gives"),),
            (f"docker run -e {CAPABILITIES_VARIABLE}=all ...  # or in the image",),
        )
        for name, text in answers
        if text
    ]
    seen = Evidence("images", f"those of {len(running)} running containers")
    return findings or [ok("no image uses driver files that its container has not", seen)]


def _wanted(container: Container, host: Host) -> str:
    """Return what an image could want of the driver that its container was not given; "" for nothing, or unknown."""
    from ocigpu.containers.report import read_mode
    from ocigpu.containers.target import open_root
    from ocigpu.core.config_json import get_list, get_object
    from ocigpu.gpus.nvidia.request import parse_request

    try:
        config = read_config_of(container).config
        if read_mode(config) not in ("hook", "spec"):
            return ""
        request = parse_request(config, host.settings, container.bundle)
    except OcigpuError:
        return ""
    if request.selection in ("nothing", "cdi"):
        return ""
    with open_root(container) as root:
        users = find_users(root, request.capabilities) if root else {}
    return describe_users(users, get_list(get_object(config, "process"), "env"))


def _lost(name: str, lost: list[str]) -> Finding:
    return error(
        f'container {name} has lost what it was given: its programs see "Failed to initialize NVML" or EPERM',
        tuple(Evidence(f"container {name}", text, "as it was given") for text in lost[:4]),
        (shlex.join(["ocigpu", "repair", name]), "ocigpu watch --repair  # does so by itself from now on"),
    )


def _not_given(name: str, asked: str) -> Finding:
    return warning(
        f"container {name} was to have GPUs and was started without a runtime that gives them",
        (Evidence(f"container {name}", asked, "answered by ocigpu-runtime or a GPU hook"),),
        (
            "# in Kubernetes: runtimeClassName of the pod; see docs/KUBERNETES.md",
            "# elsewhere: docker run --runtime ocigpu, podman --runtime ocigpu-runtime",
        ),
    )


def _ask(host: Host, containers: list[Container]) -> list[tuple[str, list[str], str, str]]:
    """Return name, what is lost, which named devices were not given, and what went wrong, for each container.

    Nothing is changed.  A request for all GPUs is every CUDA image's and says nothing.
    """
    from ocigpu.containers.live import open_live
    from ocigpu.containers.repair import repair
    from ocigpu.containers.report import read_unanswered
    from ocigpu.gpus.nvidia.discover import read_host_facts

    facts = read_host_facts(host.settings)
    rows = []
    for container in containers:
        name = printable(container.name, 200)
        try:
            with open_live(container, host.settings, facts) as live:
                repaired = repair(live, dry_run=True)
                request = Request()
                if not repaired.devices and not repaired.lost and not has_gpu_hook(live.config):
                    request = read_unanswered(live.config, container.bundle, host.settings, [])
                asked = "" if request.selection == "all" else printable(request.source, 300)
                rows.append((name, [printable(text, 300) for text in repaired.lost], asked, ""))
        except OcigpuError as failure:
            rows.append((name, [], "", printable(failure.message, 300)))
    return rows
