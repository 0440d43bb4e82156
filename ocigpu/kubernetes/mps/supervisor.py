"""``ocigpu mps-control-daemon``: keeps an MPS control daemon running for every resource shared by MPS.

A failed daemon is restarted, at most a minute apart, and does not affect the others.  Resources that cannot be shared
are reported once.
"""

import glob
import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.vendors import load_vendor
from ocigpu.kubernetes.mps.daemon import ControlDaemon, Job, Times, find_program
from ocigpu.kubernetes.mps.shares import control_commands, mps_directories, mps_problem, mps_root
from ocigpu.kubernetes.node.config import CommandInput, Configuration, read_configuration
from ocigpu.kubernetes.node.devices import Resource
from ocigpu.kubernetes.node.reading import KubernetesNode, host_settings, read_node
from ocigpu.kubernetes.node.sharing import DOMAIN
from ocigpu.system.service import Backoff, FollowedFile, ServiceLog, Signals

FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0
FIRST_QUESTION = 5.0
"""Seconds until a host that gave no answer is asked again, doubling up to the longest."""
STEADY = 60.0
"""Seconds after which a daemon that ends is no longer taken for one that cannot start."""
LOST_LOOK = 30.0
"""Seconds between looks for a GPU that could not be shared because it was lost."""
LOOK = 1.0
"""Seconds between looks at the daemons and the configuration file."""
READY = ".ready"
"""File below the root: all daemons are ready, or none is needed.  For the readiness probe of the pod."""


class MpsKeeper:
    """One daemon and when it is to be started; ``since``: since when it runs, None for not."""

    def __init__(self, daemon: ControlDaemon, now: float) -> None:
        self.daemon = daemon
        self.retry = Backoff(FIRST_RETRY, LONGEST_RETRY, now)
        self.since: float | None = None

    def failed(self, now: float) -> None:
        """It is not running: try again after the back-off."""
        if self.since is not None and now - self.since > STEADY:
            self.retry.reset()
        self.retry.failed(now)
        self.since = None


class MpsPlan(NamedTuple):
    """``jobs`` by resource; ``problems``: why a resource, or all, cannot be shared."""

    jobs: "dict[str, Job]" = {}
    problems: tuple[str, ...] = ()
    silent: bool = False
    """Whether the host gave no answer, and has to be asked again."""
    incomplete: bool = False
    """Whether a GPU that is to be shared is in a bad way."""


def plan_daemons(node: KubernetesNode, configuration: Configuration, shm_size: str) -> MpsPlan:
    """Return the daemons that this node needs; needs no privilege, changes nothing."""
    if configuration.sharing.strategy != "mps":
        return MpsPlan()
    unheard = ""
    if node.facts.gpus:
        unheard = node.hardware.problem or load_vendor(node.facts.vendor).find_silence(node.facts)
    if node.source != "nvml" or unheard:
        return MpsPlan(problems=(node.inventory.reason or unheard or "there are no GPUs for MPS",), silent=True)
    jobs, problems, incomplete = {}, [], False
    program = find_program(node.facts)
    for resource in node.inventory.resources:
        if resource.sharing != "mps":
            continue
        errors = [device.error for device in resource.devices if device.is_replica]
        incomplete = incomplete or any(errors)
        problem = mps_problem(resource, node.facts) or (errors[0] if all(errors) else "")
        if problem:
            problems.append(f"{resource.name}: {problem}")
        else:
            jobs[resource.name] = _make_job(resource, node, program, mps_root(configuration), shm_size)
    return MpsPlan(jobs, tuple(problems), incomplete=incomplete)


def _make_job(resource: Resource, node: KubernetesNode, program: str, root: str, shm_size: str) -> Job:
    memory = {uuid: details.memory_mib for uuid, details in node.hardware.gpus.items()}
    gpus = tuple(dict.fromkeys(device.uuid for device in resource.devices if device.is_replica and not device.error))
    healthy = resource._replace(devices=tuple(device for device in resource.devices if device.uuid in gpus))
    commands = control_commands(healthy, memory)
    directories = mps_directories(root, resource.name)
    return Job(resource.name, program, directories, gpus, commands, shm_size, node.facts)


class Supervisor:
    """All daemons of this node; :meth:`run` keeps them running until SIGTERM, SIGINT or SIGQUIT.

    SIGHUP and a changed configuration file make it read everything again.  A daemon whose limits change is restarted,
    which ends its clients.  A lost GPU that returns is added to the running daemon.
    """

    def __init__(
        self,
        settings: Settings,
        given: CommandInput,
        shm_size: str,
        log: ServiceLog,
        times: Times | None = None,
    ) -> None:
        self._settings = settings
        self._given = given
        self._shm_size = shm_size
        self._log = log
        self._times = times or Times()
        self._keepers: dict[str, MpsKeeper] = {}
        self._file = FollowedFile(given.file)
        self._root = ""
        self._ask_at: float | None = None
        self._silence = Backoff(FIRST_QUESTION, LONGEST_RETRY)

    def run(self) -> None:
        """Work until stopped; raises SettingsError for an initial configuration that is wrong."""
        with Signals() as signals:
            configuration = read_configuration(self._given)
            for warning in configuration.warnings:
                self._log("warning", warning)
            try:
                self._follow(configuration)
                while not signals.stopping:
                    if self._file.has_changed() | signals.take_again():
                        configuration = self._read_again(configuration)
                        self._follow(configuration)
                    elif self._ask_at is not None and time.monotonic() >= self._ask_at:
                        self._follow(configuration, again=True)
                    for resource, keeper in self._keepers.items():
                        if not signals.stopping:
                            self._keep(resource, keeper, signals)
                    self._tell_readiness()
                    signals.wait(LOOK)
            finally:
                self._log("info", "ending")
                self._close()

    def _read_again(self, before: Configuration) -> Configuration:
        try:
            found = read_configuration(self._given)
        except OcigpuError as error:
            self._log.once("configuration", "error", f"{error.message}; the previous configuration stays in force")
            return before
        self._log.forget("configuration")
        return found

    def _follow(self, configuration: Configuration, again: bool = False) -> None:
        """Read the node, and end and start daemons to match the configuration.

        ``again``: the configuration is unchanged; then no daemon ends because a GPU came or went.
        """
        node = read_node(host_settings(self._settings, configuration.options), configuration)
        plan = plan_daemons(node, configuration, self._shm_size)
        if plan.problems:
            self._log.once("plan", "warning", "; ".join(plan.problems))
        now = time.monotonic()
        if plan.silent:  # running daemons continue
            if configuration.options.fail_on_init_error and not again:
                raise HostError("OCIGPU-KUBE-6", f"MPS: {plan.problems[0]}")
            self._ask_at = now + self._silence.failed(now)
            return
        self._silence.reset()
        self._ask_at = now + LOST_LOOK if plan.incomplete else None
        first = not self._root
        self._root = mps_root(configuration)
        if first:
            self._take_back(plan.jobs, node.facts)
        if not plan.jobs and not plan.problems:
            self._log.once("plan", "info", "nothing on this node is shared by MPS: waiting for another configuration")
        for name, keeper in list(self._keepers.items()):
            job = plan.jobs.get(name)
            if again and keeper.since is not None:
                if job is not None:
                    self._extend(keeper, job)
            elif job is None:
                self._keepers.pop(name).daemon.stop()
            elif job._replace(facts=HostFacts()) != keeper.daemon.job._replace(facts=HostFacts()):
                keeper.daemon.stop(keep=again)
                self._keepers[name] = MpsKeeper(ControlDaemon(job, self._log, self._times), now)
                if again:
                    self._keepers[name].retry = keeper.retry
        for name, job in plan.jobs.items():
            if name not in self._keepers:
                self._keepers[name] = MpsKeeper(ControlDaemon(job, self._log, self._times), now)

    def _take_back(self, wanted: "Mapping[str, Job]", facts: HostFacts) -> None:
        """Clean up after a killed predecessor for resources that are no longer configured.

        Their GPUs are unknown, so all GPUs that are not shared now get the default mode.
        """
        shared = {uuid for job in wanted.values() for uuid in job.gpus}
        others = tuple(gpu.uuid for gpu in facts.gpus if gpu.uuid not in shared and not gpu.mig_enabled)
        for path in glob.glob(f"{glob.escape(self._root)}/{DOMAIN}*"):
            resource = DOMAIN + os.path.basename(path)
            directories = mps_directories(self._root, resource)
            if resource not in wanted and (os.path.ismount(directories.shm) or os.path.lexists(directories.ready)):
                self._log("warning", f"{resource}: no longer shared: removed", resource=resource)
                job = Job(resource, find_program(facts), directories, others, (), self._shm_size, facts)
                ControlDaemon(job, self._log, self._times).take_back()

    def _extend(self, keeper: MpsKeeper, job: Job) -> None:
        try:
            added = keeper.daemon.extend(job)
        except HostError as error:
            self._log.once(f"{job.resource} more", "error", f"{error.code}: {job.resource}: {error.message}")
            return
        if added:
            self._log("info", f"{job.resource}: MPS now also shares {', '.join(added)}", resource=job.resource)

    def _keep(self, resource: str, keeper: MpsKeeper, signals: Signals) -> None:
        now = time.monotonic()
        if keeper.since is not None:
            if keeper.daemon.is_running():
                return
            keeper.daemon.stop(keep=True)
            keeper.failed(now)
            self._log.once(resource, "error", f"{resource}: the control daemon ended; it is started again")
        elif now >= keeper.retry.due:
            try:
                keeper.daemon.start(lambda: signals.stopping)
            except HostError as error:
                keeper.failed(time.monotonic())
                self._ask_at = keeper.retry.due - LOOK  # a GPU that was lost must not keep the others waiting
                self._log.once(resource, "error", f"{error.code}: {resource}: {error.message}; retrying")
                return
            keeper.since = time.monotonic()
            self._log.forget(resource)
            limits = "; ".join(keeper.daemon.job.commands)
            self._log("info", f"{resource}: MPS is ready: {limits}", resource=resource)

    def _tell_readiness(self) -> None:
        if not self._root:
            return
        path = f"{self._root}/{READY}"
        ready = all(keeper.since is not None for keeper in self._keepers.values())
        try:
            if ready and not os.path.exists(path):
                os.makedirs(self._root, exist_ok=True)
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
            elif not ready and os.path.lexists(path):
                os.unlink(path)
        except OSError as error:
            self._log.once("ready", "warning", f"{path}: {error.strerror}")

    def _close(self) -> None:
        for keeper in self._keepers.values():
            keeper.daemon.stop()
        if self._root and os.path.lexists(f"{self._root}/{READY}"):
            os.unlink(f"{self._root}/{READY}")
