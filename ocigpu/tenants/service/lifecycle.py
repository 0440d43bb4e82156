"""The state of a container, from its pod and the pod's events.  Pure.

The state has two axes: the phase of the container's life, and a reason with a stable name.  Sources: "Pod Lifecycle"
and the API reference of Kubernetes for phases, conditions and reasons; pkg/kubelet/events/event.go for those of events.
The order of a start with Kata: node chosen, virtual machine up (PodReadyToStartContainers), image pulled, container
started.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ocigpu.core.errors import printable
from ocigpu.tenants.service.models import FINAL, Lifecycle
from ocigpu.tenants.service.pods import MAIN
from ocigpu.tenants.service.problems import WORDS

REASONS: Mapping[str, str] = WORDS["reasons"]
"""Every reason, with its meaning."""
_POD_REASONS: Mapping[str, str] = WORDS["pods"]
_WAITING: Mapping[str, str] = WORDS["waiting"]
_DISRUPTIONS: Mapping[str, str] = WORDS["disruptions"]
MAX_JUDGED = 16 << 10
"""Bytes of output, its last, in which errors of CUDA are looked for."""
_TIMED_OUT = re.compile(r"deadline ?exceeded|timed? ?out|timeout", re.IGNORECASE)
_FABRIC = re.compile(
    r"system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY|cudaErrorSystemNotReady|\berror 802\b", re.I
)


class ContainerStanding(NamedTuple):
    """Where a container is.  Times are seconds since 1970; ``phases``: seconds by name."""

    lifecycle: Lifecycle
    reason: str = ""
    detail: str = ""
    exit_code: int | None = None
    node: str = ""
    image_digest: str = ""
    started: float | None = None
    finished: float | None = None
    phases: Mapping[str, float] = {}


Fields = Mapping[str, Any]


def read_standing(pod: Fields, accepted: float, events: Sequence[Fields] = ()) -> ContainerStanding:
    """Return the state that a pod and its events show.  ``accepted``: when the container was requested."""
    status = pod.get("status") or {}
    statuses: Sequence[Fields] = status.get("containerStatuses") or ()
    container: Fields = next((one for one in statuses if one.get("name") == MAIN), {})
    state, last = container.get("state") or {}, container.get("lastState") or {}
    ended = state.get("terminated") or {}
    running = state.get("running") or {}
    found = ContainerStanding(
        *_judge(pod, status, container, events),
        exit_code=(ended or last.get("terminated") or {}).get("exitCode"),
        node=(pod.get("spec") or {}).get("nodeName") or "",
        image_digest=str(container.get("imageID") or "").rpartition("@")[2],
        started=read_time(running.get("startedAt") or ended.get("startedAt")),
    )
    if found.lifecycle in FINAL:
        over = [read_time(one.get("lastTransitionTime")) for one in _conditions(status)]
        last = max((at for at in over if at is not None), default=None)
        at = read_time(ended.get("finishedAt"))
        found = found._replace(finished=last if at is None else at)
    return found._replace(phases=dict(_phases(pod, found, accepted, events)))


def _judge(pod: Fields, status: Fields, container: Fields, events: Sequence[Fields]) -> tuple[Lifecycle, str, str]:
    """Return lifecycle, reason and detail."""
    phase = status.get("phase") or "Pending"
    state = container.get("state") or {}
    if phase in ("Succeeded", "Failed"):
        return _judge_ended(phase, status, state.get("terminated") or {})
    if pod.get("metadata", {}).get("deletionTimestamp"):
        return "stopping", *(_why_disrupted(status) or ("deleted", ""))
    if status.get("reason") == "NodeLost" or phase == "Unknown":
        return "running", "node_lost", _text(status.get("message"))
    conditions = {one.get("type"): one for one in _conditions(status)}
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") != "True":
        if scheduled.get("reason") == "Unschedulable":
            return "queued", "no_capacity", _text(scheduled.get("message"))
        return "scheduling", "", ""
    if state.get("running"):
        return "running", "", ""
    waiting = state.get("waiting") or {}
    reason = str(waiting.get("reason") or "")
    if known := _WAITING.get(reason):
        lifecycles: Mapping[str, Lifecycle] = {"image_pull_failed": "pulling", "restarting": "running"}
        lifecycle = lifecycles.get(known, "booting")
        ended = (container.get("lastState") or {}).get("terminated") or {}
        if known == "restarting" and ended:
            return lifecycle, known, ": ".join(filter(None, _why_ended(ended)))
        return lifecycle, known, _text(waiting.get("message"))
    if _failed(events, "FailedMount", "FailedAttachVolume"):
        return "booting", "volume_mount_failed", _message(events, "FailedMount", "FailedAttachVolume")
    if conditions.get("PodReadyToStartContainers", {}).get("status") == "True":
        return "pulling", "", ""
    if _failed(events, "FailedCreatePodSandBox"):
        text = _message(events, "FailedCreatePodSandBox")
        return "booting", "vm_boot_timeout" if _TIMED_OUT.search(text) else "vm_boot_failed", text
    if _when(events, "Pulling"):  # kubelets before 1.29 have no such condition
        return "pulling", "", ""
    unusual = "" if reason in ("", "ContainerCreating", "PodInitializing") else "unknown"
    return "booting", unusual, _text(f"{reason}: {waiting.get('message') or ''}") if unusual else ""


def _judge_ended(phase: str, status: Fields, ended: Fields) -> tuple[Lifecycle, str, str]:
    reason = str(status.get("reason") or "")
    if phase == "Succeeded":
        return "finished", "completed", ""
    if reason:
        known = _POD_REASONS.get(reason, "gpu_unavailable" if reason.startswith("OutOf") else "unknown")
        return "failed", known, _text(f"{'' if known != 'unknown' else reason + ': '}{status.get('message') or ''}")
    if not ended and (why := _why_disrupted(status)):  # no kubelet was there to report how its container ended
        return "failed", *why
    return "failed", *_why_ended(ended)


def _why_disrupted(status: Fields) -> tuple[str, str] | None:
    """Return reason and detail of a pod's disruption, None without one: "Disruptions", pod disruption conditions."""
    for one in _conditions(status):
        if one.get("type") == "DisruptionTarget" and one.get("status") == "True":
            return _DISRUPTIONS.get(str(one.get("reason")), "evicted"), _text(one.get("message"))
    return None


def _why_ended(ended: Fields) -> tuple[str, str]:
    """Return reason and detail, without the message of a container that ran: only readers of its logs may see it."""
    if ended.get("reason") == "OOMKilled":
        return "oom_killed", ""
    if ended.get("reason") in ("ContainerCannotRun", "StartError"):
        return "container_start_failed", _text(ended.get("message"))
    return ("exit_nonzero", "") if ended.get("exitCode") else ("unknown", _text(ended.get("reason")))


def judge_output(standing: ContainerStanding, printed: bytes) -> ContainerStanding:
    """Return the standing of a container that has ended in the light of the last lines that it printed."""
    if standing.reason == "exit_nonzero" and _FABRIC.search(printed[-MAX_JUDGED:].decode("utf-8", "replace")):
        return standing._replace(reason="cuda_fabric_not_ready")
    return standing


def _phases(
    pod: Fields, standing: ContainerStanding, accepted: float, events: Sequence[Fields]
) -> Iterator[tuple[str, float]]:
    """Yield how long each phase took that is over."""
    conditions = {
        one.get("type"): read_time(one.get("lastTransitionTime"))
        for one in _conditions(pod.get("status") or {})
        if one.get("status") == "True"
    }
    scheduled = conditions.get("PodScheduled")
    if scheduled is None:
        return
    yield "queued", max(0.0, scheduled - accepted)
    pulling, pulled = _when(events, "Pulling", min), _when(events, "Pulled")
    up = conditions.get("PodReadyToStartContainers")
    # the condition is False again once the machine is gone; the pull began right after it was up
    up = pulling if pulling is not None and (up is None or up > pulling) else up
    if up is not None:
        yield "vm_boot", max(0.0, up - scheduled)
    if pulled is not None:  # an image already on the node is reported as "pulled", too
        yield "pull", max(0.0, pulled - (pulling if pulling is not None else pulled))
        if standing.started is not None:
            yield "start", max(0.0, standing.started - pulled)


def _conditions(status: Fields) -> Sequence[Fields]:
    return status.get("conditions") or ()


def _failed(events: Sequence[Fields], *reasons: str) -> bool:
    return any(event.get("reason") in reasons for event in events)


def _message(events: Sequence[Fields], *reasons: str) -> str:
    found = [event for event in events if event.get("reason") in reasons]
    return _text(max(found, key=lambda event: _event_time(event) or 0.0).get("message")) if found else ""


def _when(events: Sequence[Fields], reason: str, choose: Callable[[list[float]], float] = max) -> float | None:
    times = [at for event in events if event.get("reason") == reason and (at := _event_time(event)) is not None]
    return choose(times) if times else None


def _event_time(event: Fields) -> float | None:
    return read_time(event.get("eventTime") or event.get("lastTimestamp") or event.get("firstTimestamp"))


def read_time(text: Any) -> float | None:
    """Return seconds since 1970 from RFC 3339's form, None for an invalid time."""
    try:
        return datetime.fromisoformat(str(text)).timestamp() if text else None
    except ValueError:
        return None


def write_time(at: float) -> str:
    """Return seconds since 1970 in RFC 3339's form, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write_time_of(at: float | None) -> str | None:
    """Return the same, None for None."""
    return None if at is None else write_time(at)


def _text(value: Any) -> str:
    return printable(str(value), 500) if value else ""
