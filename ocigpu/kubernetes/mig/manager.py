"""``ocigpu mig-manager``: partitions the GPUs of a node from the node's label.

The labels are those of NVIDIA's MIG manager: ``nvidia.com/mig.config`` names the layout, ``.state`` shows the result.
Nothing here depends on a change of the label: the present layout is compared with the desired one, again and again.
Clients of the GPUs are paused through the labels by which their DaemonSets choose nodes.  The same write stores the
former values on the node, so the successor of a killed manager restores them.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError, OcigpuError, SettingsError, printable, quoted
from ocigpu.kubernetes.mig.node import HostTools, Metadata, MigAnswer, NodeApi, PodOfNode
from ocigpu.system.options import read_text
from ocigpu.system.service import Backoff, FollowedFile, ServiceLog, Signals

CONFIG = "nvidia.com/mig.config"
STATE = "nvidia.com/mig.config.state"
"""``success``, ``pending``, ``failed`` and ``rebooting`` are the vendor's; ours are ``draining`` and ``rolledback``."""
REASON = "ocigpu/mig.reason"
"""Annotation: why the state is not ``success``."""
JOURNAL = "ocigpu/mig.paused"
"""Annotation: what was paused, and what is to be given back."""
REBOOTED = "ocigpu/mig.rebooted"
"""Annotation: the boot before the one that was to change the MIG mode."""
PAUSED = "paused-for-mig-change"
CLIENTS = tuple(
    f"nvidia.com/gpu.deploy.{name}"
    for name in (
        "device-plugin",
        "gpu-feature-discovery",
        "dcgm-exporter",
        "mps-control-daemon",
        "dcgm",
        "nvsm",
        "client",
    )
)
"""Labels by which DaemonSets choose nodes; the first four are also those of our chart, which needs no such label."""
OURS = CLIENTS[:4]
INTERVAL = 300.0
FIRST_RETRY = 15.0
POLL = 2.0
FILE_SECONDS = 10.0
"""Seconds until a change of the file is seen."""
_CLAIM = re.compile(r"\bclaim ([a-z0-9.-]+/[a-z0-9.-]+)")
POLICIES = ("refuse", "drain", "ignore")
MAX_FILE = 1 << 20
API_ERROR = "OCIGPU-KUBE-5"
_SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.\\@-]{0,254}")
"""No option of systemctl: the note is on the node, where others write, too."""


class ManagerOptions(NamedTuple):
    """The options of the command line; see ``ocigpu mig-manager --help``."""

    config_file: str = ""
    default: str = ""
    pods: str = "refuse"
    client_seconds: float = 300.0
    drain_seconds: float = 600.0
    services: tuple[str, ...] = ()
    with_reboot: bool = False
    cdi: bool = True
    boot: bool = True
    interval: float = INTERVAL


class StateError(Exception):
    """The layout is not made: the state to tell, and why."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(state, reason)
        self.state, self.reason = state, reason


class StoppedError(Exception):
    """The manager is to end."""


def sleep(seconds: float) -> bool:
    """Wait to the end and return False."""
    time.sleep(seconds)
    return False


class MigManager:
    """``wait``: as time.sleep, but returns True when the manager is to end."""

    def __init__(
        self,
        options: ManagerOptions,
        node: NodeApi,
        host: HostTools,
        log: ServiceLog,
        wait: Callable[[float], bool] = sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self.node, self._host, self._log = options, node, host, log
        self.wait, self._clock = wait, clock
        self._changed = False
        self._daemons: dict[tuple[str, str, str], str | None] = {}
        """By what DaemonSets choose nodes, as they were when this pass began; None: there is none of that UID."""

    # once

    def reconcile(self) -> bool:
        """Apply the node's label; return whether the node matches it.  Raises HostError if the API server is away."""
        seen = self.node.read()
        name = seen.labels.get(CONFIG) or self._options.default
        if name and seen.annotations.get(REBOOTED) == self._host.boot_id():
            self._host.reboot()
            return False
        state, reason, waiting = "", "", False
        try:
            if name:
                waiting = self._make(name, seen)
                state = "rebooting" if waiting else "success"
        except StateError as error:
            state, reason = error.state, error.reason
        except StoppedError:
            self._resume("", "")
            raise
        except OcigpuError as error:
            if error.code == API_ERROR:
                self._resume("", "")
                raise
            state, reason = "failed", error.line
        if waiting:
            self._host.reboot()  # the manager of the next boot resumes the paused clients
            return False
        resumed = self._resume(state, reason)
        if reason:
            self._log.once("state", "error", f"{name}: {state}: {reason}")
        elif self._log.forget("state") or (state and seen.labels.get(STATE) != state):
            self._log("info", f"{name}: {state}")
        return resumed and not reason

    def _make(self, name: str, seen: Metadata) -> bool:
        """Make a layout; return whether a reboot is needed for it.  Raises StateError."""
        self._daemons.clear()
        layouts = self._layouts()
        if self._ask("assert", name, layouts).status == 0:
            self._keep(name, layouts)
            return False
        if problems := _problems(self._ask("plan", name, layouts, "--force")):
            raise StateError("failed", problems)
        users = [pod for pod in self.node.pods() if pod.gpus]
        if self._options.pods == "refuse" and users:
            problems = _problems(self._ask("plan", name, layouts))
            if hit := _named(users, problems):
                raise StateError("failed", f"pods use what would be destroyed: {_listed(hit)}{_claims(problems)}")
            if _claims(problems):  # of a pod that has just ended, or does not exist yet
                raise StateError("failed", problems)
        paused = self._pause()
        if self._options.pods != "ignore":
            self._free(name, layouts, paused)
        return self._apply(name, layouts, seen)

    def _layouts(self) -> str:
        def error(path: str, cause: str) -> SettingsError:
            return SettingsError("OCIGPU-MIG-1", f"{quoted(path)}: {cause}")

        return read_text(self._options.config_file, MAX_FILE, error) if self._options.config_file else ""

    def _ask(self, verb: str, name: str, layouts: str, *words: str) -> MigAnswer:
        """Run ``ocigpu mig``; raises StateError for an error instead of an answer."""
        answer = self._host.mig(verb, "-c", name, *words, layouts=layouts)
        if answer.status and answer.problem:
            raise StateError("failed", answer.problem)
        return answer

    def _keep(self, name: str, layouts: str) -> None:
        if self._options.boot:
            self._host.keep_for_boot(name, layouts)

    # clients

    def _pause(self) -> Collection[str]:
        """Pause the clients and note it, in one write; wait until they are gone.  Returns their labels.

        Raises StateError.
        """
        seen = self.node.read()
        journal = _journal(seen)
        labels: dict[str, str | None] = journal["labels"]
        for key in CLIENTS:
            value = seen.labels.get(key)
            if key not in labels and (value == "true" or (value is None and key in OURS)):
                labels[key] = value
        journal["services"] = sorted({*journal["services"], *self._host.running(self._options.services)})
        paused = dict.fromkeys(labels, PAUSED)
        self.node.patch({**paused, STATE: "pending"}, {JOURNAL: json.dumps(journal), REASON: None})
        self._log("info", f"paused: {', '.join([*labels, *journal['services']]) or 'none'}")
        self._host.switch("stop", journal["services"])
        left = self._until(self._options.client_seconds, lambda: self._clients(labels))
        if left:
            raise StateError("failed", f"paused clients are still running: {_listed(left)}")
        return labels

    def _problems_of_others(self, name: str, layouts: str, labels: Collection[str]) -> str:
        """Return what keeps a layout from being made, but for clients: they are waited for.

        A roll-out may have made a client's pod when it was paused that was on no node yet.
        """
        end = self._clock() + self._options.client_seconds
        while problems := _problems(self._ask("plan", name, layouts)):
            if not _named(self._clients(labels), problems) or self._clock() >= end:
                break
            if self.wait(POLL):
                raise StoppedError
        return problems

    def _clients(self, labels: Collection[str]) -> list[PodOfNode]:
        """Return the pods that are paused: by what they say, or what their DaemonSets say since a roll-out began."""
        found = []
        for pod in self.node.pods():
            if (selects := self._daemon_selects(pod)) is None:
                continue
            if any(f'"{key}"' in f"{pod.selects}{selects}" for key in labels):
                found.append(pod)
        return found

    def _daemon_selects(self, pod: PodOfNode) -> str | None:
        if pod.daemon is None:
            return None
        key = (pod.namespace, *pod.daemon)
        if key not in self._daemons:
            self._daemons[key] = self.node.daemon_selects(pod)
        return self._daemons[key]

    def _until(self, seconds: float, look: Callable[[], list[PodOfNode]]) -> list[PodOfNode]:
        """Wait until these pods are gone, or until the time-out; return those left.  Raises StoppedError."""
        end = self._clock() + seconds
        while (left := look()) and self._clock() < end:
            if self.wait(POLL):
                raise StoppedError
        return left

    def _resume(self, state: str, reason: str) -> bool:
        """Resume what this manager or an earlier one paused, and report the state, in one write.

        Returns whether all services could be started; failed ones stay in the note.
        """
        seen = self.node.read()
        journal = _journal(seen)
        labels: dict[str, str | None] = {
            key: journal["labels"].get(key, "true") for key in CLIENTS if seen.labels.get(key) == PAUSED
        }
        note = None
        try:
            self._host.switch("start", journal["services"])
        except HostError as error:
            self._log.failed("services", error)
            note = json.dumps({"labels": {}, "services": journal["services"]})
        annotations: dict[str, str | None] = {JOURNAL: note}
        if state:
            labels[STATE] = state
            annotations[REASON] = printable(reason, 1000) or None
        if state == "success":
            annotations[REBOOTED] = None
        changes = [seen.labels.get(key) != value for key, value in labels.items()]
        if any(changes) or any(seen.annotations.get(key) != value for key, value in annotations.items()):
            self.node.patch(labels, annotations)
        return note is None

    # pods and GPUs

    def _free(self, name: str, layouts: str, paused: Collection[str]) -> None:
        """Check that the instances to be destroyed are unused; raises StateError."""
        problems = self._problems_of_others(name, layouts, paused)
        if not problems:
            return
        if self._options.pods == "refuse":
            raise StateError("failed", problems)
        users = [pod for pod in self.node.pods() if pod.gpus]
        users = _named(users, problems) or ([] if _claims(problems) else users)
        self.node.patch({STATE: "draining"}, {REASON: f"evicting {_listed(users)}"})
        uids = {pod.uid for pod in users}
        evicted: set[str] = set()

        def left() -> list[PodOfNode]:
            found = [pod for pod in self.node.pods() if pod.uid in uids]
            evicted.update(pod.uid for pod in found if pod.uid not in evicted and self.node.evict(pod))
            return found

        if stay := self._until(self._options.drain_seconds, left):
            kept = [pod for pod in stay if pod.uid not in evicted]
            why = "a disruption budget keeps" if kept else "they do not end:"
            raise StateError("failed", f"{why} {_listed(kept or stay)}")
        if problems := _problems(self._ask("plan", name, layouts)):
            raise StateError("failed", problems)

    def _apply(self, name: str, layouts: str, seen: Metadata) -> bool:
        force = ("--force",) if self._options.pods == "ignore" else ()
        answer = self._host.mig("apply", "-c", name, *force, layouts=layouts)
        if not answer.status:
            if self._options.cdi and (problem := self._host.refresh_cdi()):
                self._log("warning", f"ocigpu cdi refresh: {problem}")
            self._keep(name, layouts)
            return False
        if answer.problem.startswith("OCIGPU-MIG-4") and self._options.with_reboot and REBOOTED not in seen.annotations:
            self._ask("apply", name, layouts, "--mode-only", "--skip-reset", *force)
            self.node.patch({STATE: "rebooting"}, {REBOOTED: self._host.boot_id(), REASON: answer.problem})
            return True
        back = "all is as it was before" in answer.problem
        raise StateError("rolledback" if back else "failed", answer.problem or "ocigpu mig apply failed")

    # again and again

    def run(self) -> None:
        """Stay until SIGTERM: look at once when the label or the file changes, else at intervals."""
        file = FollowedFile(self._options.config_file)
        retry = Backoff(FIRST_RETRY, self._options.interval)
        ended = threading.Event()
        with Signals() as signals:

            def wait(seconds: float) -> bool:
                signals.wait(seconds)
                return signals.stopping

            def changed() -> None:
                retry.reset()
                self._changed = True
                signals.wake()

            self.wait = wait
            follower = threading.Thread(target=self.node.follow, args=(changed, ended.wait, (CONFIG,)), daemon=True)
            follower.start()
            while not signals.stopping:
                signals.take_again()
                self._changed = False
                try:
                    done = self.reconcile()
                except StoppedError:
                    break
                except HostError as error:
                    self._log.failed("api", error)
                    done = False
                if done:
                    retry.reset()
                end = self._clock() + (self._options.interval if done else retry.failed(0.0))
                while not (signals.stopping or signals.again or self._changed or file.has_changed()):
                    left = end - self._clock()
                    if left <= 0:
                        break
                    signals.wait(min(left, FILE_SECONDS))
        ended.set()


def _journal(seen: Metadata) -> dict[str, Any]:
    """Return what is paused: the former values of labels, and services; nothing for a foreign note."""
    try:
        found = json.loads(seen.annotations.get(JOURNAL, "{}"))
        labels = {str(key): value for key, value in found.get("labels", {}).items() if key in CLIENTS}
        services = [name for name in map(str, found.get("services", [])) if _SERVICE.fullmatch(name)]
        return {"labels": labels, "services": services}
    except (ValueError, AttributeError, TypeError):
        return {"labels": {}, "services": []}


def _problems(answer: MigAnswer) -> str:
    gpus = answer.document.get("gpus", [])
    return "; ".join(f"GPU {gpu['index']}: {gpu['problem']}" for gpu in gpus if gpu.get("problem"))


def _named(pods: list[PodOfNode], text: str) -> list[PodOfNode]:
    """Return the pods whose containers a text names, "namespace/pod/container", or their claims."""
    claims = set(_CLAIM.findall(text))
    return [
        pod
        for pod in pods
        if re.search(rf"(?<![a-z0-9.-]){re.escape(f'{pod}/')}", text)
        or any(f"{pod.namespace}/{claim}" in claims for claim in pod.claims)
    ]


def _claims(text: str) -> str:
    """Return the continuation of a reason that lists the claims named in a text."""
    found = sorted(set(_CLAIM.findall(text)))
    return f" (claim {', '.join(found)})" if found else ""


def _listed(pods: list[PodOfNode]) -> str:
    names = sorted(map(str, pods))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
