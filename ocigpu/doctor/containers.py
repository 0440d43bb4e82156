"""Have running containers what they were given?"""

import shlex

from ocigpu.containers.wants import VARIABLE as CAPABILITIES_VARIABLE
from ocigpu.core.errors import OcigpuError, printable
from ocigpu.doctor.host import Host
from ocigpu.doctor.records import Evidence, Finding, error, not_checked, note, ok, warning


def check_lost_gpus(host: Host) -> list[Finding]:
    """Can running containers still open the GPUs that they were given?"""
    if not host.live:
        return [not_checked("containers are looked at on this machine only")]
    running, notes = host.running_containers, host.containers[1]
    if not running:
        reason = f"no container runs here, as far as can be seen: {notes[0]}" if notes else "no container runs here"
        return [not_checked(reason)]
    if not host.driver_version:
        return [not_checked("no driver is loaded: there is no GPU to lose")]
    if host.user:
        return [not_checked(f"only root can ask what the cgroups of {len(running)} running containers allow")]
    try:
        answers = host.losses
    except (OSError, OcigpuError) as failure:
        return [not_checked(f"containers could not be looked into: {failure}")]
    findings = [_lost(item.name, item.lost) for item in answers if item.lost]
    findings += [_not_given(item.name, item.asked) for item in answers if item.asked]
    findings += [not_checked(f"container {item.name}: {item.problem}") for item in answers if item.problem]
    well = [name for name, *wrong in answers if not any(wrong)]
    if well:
        shown = printable(", ".join(well), 300)
        findings.append(ok("running containers have what they were given", Evidence("device cgroups", shown)))
    return findings


def check_driver_capabilities(host: Host) -> list[Finding]:
    """Have running containers the driver files that libraries of their images use?"""
    if not host.live:
        return [not_checked("containers are looked at on this machine only")]
    if host.user:
        return [not_checked("only root can look into images of containers")]
    try:
        wishes = host.wishes
    except (OSError, OcigpuError) as failure:
        return [not_checked(f"containers could not be looked into: {failure}")]
    findings = [
        note(
            f"container {printable(name, 200)}: {text}",
            (Evidence(f"container {printable(name, 200)}", CAPABILITIES_VARIABLE, "as NVIDIA's default mode gives"),),
            (f"docker run -e {CAPABILITIES_VARIABLE}=all ...  # or in the image",),
        )
        for name, text in wishes
    ]
    number = sum(bool(item.pid) for item in host.running_containers)
    seen = Evidence("images", f"those of {number} running containers")
    return findings or [ok("no image uses driver files that its container has not", seen)]


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
