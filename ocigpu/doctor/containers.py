"""Have running containers what they were given?"""

import shlex

from ocigpu.core.errors import OcigpuError, printable
from ocigpu.doctor.findings import Evidence, Finding, not_checked, ok, say
from ocigpu.doctor.host import Host
from ocigpu.doctor.running import Lack
from ocigpu.gpus.nvidia.request import CAPABILITIES_VARIABLE


def check_lost_gpus(host: Host) -> list[Finding]:
    """Can running containers still open the GPUs that they were given?"""
    if not host.live:
        return [not_checked("containers are examined on this machine only")]
    running, notes = host.running_containers, host.containers[1]
    if not running:
        reason = f"no container runs here, as far as can be seen: {notes[0]}" if notes else "no container runs here"
        return [not_checked(reason)]
    if not host.driver_version:
        return [not_checked(f"{host.no_driver}: there is no GPU to lose")]
    if host.user:
        return [not_checked(f"only root can determine what the cgroups of {len(running)} running containers allow")]
    try:
        answers = host.lacks
    except (OSError, OcigpuError) as failure:
        return [not_checked(f"containers could not be inspected: {failure}")]
    findings = []
    for item in answers:
        if item.lost:
            seen = [Evidence(f"container {item.name}", text, "as it was granted") for text in item.lost[:4]]
            again = shlex.join(["ocigpu", "repair", item.name])
            findings.append(say("container-lost-gpu.lost", *seen, name=item.name, repair=again))
    for item in answers:
        if item.asked:
            asked = Evidence(f"container {item.name}", item.asked, "answered by ocigpu-runtime or a GPU hook")
            findings.append(say("container-lost-gpu.not-given", asked, name=item.name))
    findings += [not_checked(f"container {item.name}: {item.problem}") for item in answers if item.problem]
    well = [item.name for item in answers if not (item.lost or item.asked or item.problem)]
    if well:
        shown = printable(", ".join(well), 300)
        findings.append(ok("running containers have what they were granted", Evidence("device cgroups", shown)))
    return findings


def check_image_libcuda(host: Host) -> list[Finding]:
    """Do running containers find the driver's libcuda, and not an older one of their images?"""
    answers = _ask(host)
    if isinstance(answers, Finding):
        return [answers]
    findings = []
    for item in answers:
        if item.libcuda:
            shown = printable(item.libcuda, 300)
            seen = Evidence(f"container {item.name}", shown, f"libcuda.so.{host.driver_version}")
            values = {"name": item.name, "path": shown, "directory": shown.rpartition("/")[0]}
            findings.append(say("image-libcuda.older", seen, **values, version=host.driver_version))
    looked = Evidence("LD_LIBRARY_PATH", f"of {len(answers)} containers")
    return [*findings, *_unseen(answers)] or [ok("no image's own libcuda is found first", looked)]


def check_driver_capabilities(host: Host) -> list[Finding]:
    """Have running containers the driver files that libraries of their images use?"""
    answers = _ask(host)
    if isinstance(answers, Finding):
        return [answers]
    findings = []
    for item in answers:
        if item.wish:
            name, variable = item.name, CAPABILITIES_VARIABLE
            seen = Evidence(f"container {name}", variable, "as in NVIDIA's default mode")
            findings.append(say("driver-capabilities.wish", seen, name=name, wish=item.wish, variable=variable))
    images = Evidence("images", f"those of {len(answers)} running containers")
    return [*findings, *_unseen(answers)] or [ok("no image uses driver files that its container lacks", images)]


def _ask(host: Host) -> list[Lack] | Finding:
    """Return what running containers lack, or why they cannot be asked about their images."""
    if not host.live:
        return not_checked("containers are examined on this machine only")
    if host.user:
        return not_checked("only root can inspect images of containers")
    if not host.driver_version:
        return not_checked(f"{host.no_driver}: no container has its files")
    try:
        return host.lacks
    except (OSError, OcigpuError) as failure:
        return not_checked(f"containers could not be inspected: {failure}")


def _unseen(answers: list[Lack]) -> list[Finding]:
    return [not_checked(f"container {item.name}: {why}") for item in answers if (why := item.unseen or item.problem)]
