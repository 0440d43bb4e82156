"""Explains a container's GPUs: its request, its plan made again, and the parts of the plan that exist now."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ocigpu.bundle.declared import LD_CACHE
from ocigpu.bundle.rootfs import MAX_LD_CACHE
from ocigpu.cdi.registry import read_registry
from ocigpu.containers.asked import describe_users, find_users, tell_docker_options, tell_origin
from ocigpu.containers.believed import Container
from ocigpu.containers.child import look_below, look_into
from ocigpu.containers.difference import REPLACED_NOTE, find_original
from ocigpu.containers.find import Target, open_root
from ocigpu.containers.planned import Planned, plan_bundle
from ocigpu.containers.report import Report, detached_paths, make_reports
from ocigpu.containers.rules import read_allowed
from ocigpu.containers.steps import Step, edit_steps, plan_steps
from ocigpu.core.actions import AllowDevice, Bind, JoinGroup, Link, Node, Plan, RefreshLdCache, Tmpfs
from ocigpu.core.config_json import get_list, get_object, rootfs_path
from ocigpu.core.errors import OcigpuError
from ocigpu.core.facts import HostFacts, ImageFacts
from ocigpu.core.settings import CAPABILITIES, MODES, Settings
from ocigpu.gpus.libraries.loader_cache import FOOTER
from ocigpu.gpus.nvidia.libraries import TABLE
from ocigpu.gpus.nvidia.plan import REQUIRED_SONAMES
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import parse_request
from ocigpu.provision.image import COMPAT_DIR, has_compat, read_device
from ocigpu.provision.inside import read_inside, status_inside
from ocigpu.system.paths import open_in_root
from ocigpu.system.proc import parse_status, read_proc

if TYPE_CHECKING:
    from ocigpu.core.actions import Action

IN_ORDER = ("there", "merged", "allowed", "detached", "")
"""What :class:`Step` says of a part that is as it should be, or that is not looked at."""


VOID = "no longer known: its CDI devices set NVIDIA_VISIBLE_DEVICES to void"
FOUND_BY_NODES = "CDI devices, recognized by their nodes"


class Capability(NamedTuple):
    """A driver capability: whether it is requested, the number of its libraries on the host, names of missing ones.

    No driver has all of them: some belong to older or newer versions.
    """

    name: str
    asked: bool
    found: int
    absent: tuple[str, ...]


class Explanation(NamedTuple):
    """All facts about one container.

    ``mode``: of the edit that was made ("" for none by this project), ``planned_mode``: the mode of ``steps``.
    ``spec``: whether mode spec can serve it, as text.  ``error``: why nothing can be planned, with its hint.
    """

    bundle: str
    container: Container | None
    mode: str
    planned_mode: str
    request: Request
    asked_by: str
    gpus: tuple[str, ...]
    image: ImageFacts | None
    compat: str
    spec: str
    steps: tuple[Step, ...]
    capabilities: tuple[Capability, ...]
    report: Report | None
    missing: tuple[str, ...]
    error: str
    hint: str
    notes: tuple[str, ...]


def explain_bundle(target: Target, settings: Settings, facts: HostFacts) -> Explanation:
    """Return all facts about a bundle and its container; changes nothing."""
    with open_root(target.container) as root:
        return _explain(target, settings, facts, root)


def _explain(target: Target, settings: Settings, facts: HostFacts, root: str) -> Explanation:
    bundle, document, container = target
    original = find_original(document.config, settings, bundle)
    chosen = _settings_of(original.mode, settings)
    notes = [note for note in original.notes if note != REPLACED_NOTE]
    error, hint = "", ""
    planned = Planned(Request())
    try:
        planned = planned._replace(request=parse_request(original.config, chosen, bundle))
        if original.devices and planned.request.selection == "nothing":  # its variable is now "void"
            request = Request(selection="cdi", cdi_devices=original.devices, source=FOUND_BY_NODES)
            planned = Planned(request, "cdi", cdi=read_registry(chosen).resolve(original.devices))
        else:
            planned = plan_bundle(original.config, bundle, chosen, lambda: facts, root)
    except OcigpuError as problem:
        error, hint = f"{problem.code}: {problem.message}", problem.hint
    request, plan = planned.request, planned.plan
    report = make_reports([container], facts, settings)[0] if container is not None else None
    steps = _steps(planned)
    if container is not None and container.pid and plan is not None:
        steps, unseen = _look_at_steps(plan, container)
        notes += unseen
    if report is not None and report.detached:
        gone = detached_paths(report, facts)
        steps = [step._replace(now="detached") if step.what.split(" ")[1] in gone else step for step in steps]
    wanted = ""
    if plan is not None:
        users = find_users(root or _root(document.config, bundle), request.capabilities)
        wanted = describe_users(users, get_list(get_object(original.config, "process"), "env"))
    return Explanation(
        bundle=bundle,
        container=container,
        mode=original.mode or (report.mode if report is not None else ""),
        planned_mode=planned.mode,
        request=request,
        asked_by=_asked_by(request, original.config, container),
        gpus=(*plan.gpus, *plan.mig_devices) if plan is not None else request.cdi_devices,
        image=plan.image if plan is not None else None,
        compat=_explain_compat(plan, request, chosen, facts, root or _root(document.config, bundle)) if plan else "",
        spec=_explain_spec(planned, original.config, bundle, chosen, root),
        steps=tuple(steps),
        capabilities=_capabilities(request, facts) if plan is not None or error else (),
        report=report,
        missing=tuple(_missing(steps, report)),
        error=error,
        hint=hint,
        notes=(*notes, *request.notes, *(plan.notes if plan is not None else ()), *((wanted,) if wanted else ())),
    )


def _settings_of(mode: str, settings: Settings) -> Settings:
    """Return the settings with the mode that a container was started in, where they have another one now."""
    return settings if not mode or MODES[settings.mode] == mode or mode == "cdi" else settings._replace(mode=mode)


def _steps(planned: Planned) -> list[Step]:
    if planned.cdi is not None:
        edits = zip(planned.cdi.edits, planned.cdi.files, strict=True)
        return [step for part, file in edits for step in edit_steps(part, f"CDI devices in {file}")]
    return plan_steps(planned.plan) if planned.plan is not None else []


def _look_at_steps(plan: Plan, container: Container) -> tuple[list[Step], list[str]]:
    """Return the steps with their states in the running container, and notes on what could not be inspected."""
    (allowed,) = read_allowed([container], [(rule.major, rule.minor) for rule in plan.device_rules()])
    notes = [allowed.unknown] if allowed.unknown else []

    def look(proc_fd: int) -> list[str]:
        root_fd = os.open("root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc_fd)
        groups = read_groups(proc_fd)
        return [
            ("there" if action.gid in groups else "missing")
            if isinstance(action, JoinGroup)
            else _state(root_fd, action)
            for action in plan.actions
        ]

    ((states, problem),) = look_into([container], look)
    if problem:
        return plan_steps(plan), [*notes, problem]
    now = dict(enumerate(states))
    for place, action in enumerate(plan.actions if not allowed.unknown else ()):
        number = (action.node.major, action.node.minor) if isinstance(action, Node) else ()
        number = (action.major, action.minor) if isinstance(action, AllowDevice) else number
        if number and number not in allowed.numbers and now[place] != "missing":
            now[place] = "refused"
        elif isinstance(action, AllowDevice):
            now[place] = "allowed"
    return plan_steps(plan, now), notes


def read_groups(proc_fd: int) -> set[int]:
    """Return the groups that a process is in."""
    status = parse_status(read_proc("status", proc_fd))
    return {int(word) for name in ("Gid:", "Groups:") for word in status.get(name, ())}


def _state(root_fd: int, action: "Action") -> str:
    """Return the state of one action's result below a container's root, which is hostile: only the cache is opened."""
    if isinstance(action, Node):
        node = read_device(root_fd, action.node.container_path)
        if node is None:
            return "missing" if status_inside(root_fd, action.node.container_path) is None else "another"
        return "there" if (node.major, node.minor) == (action.node.major, action.node.minor) else "another"
    if isinstance(action, Bind):
        found = status_inside(root_fd, action.container_path)
        if found is None:
            return "missing"
        try:
            return "there" if os.path.samestat(found, os.stat(action.host_path)) else "another"
        except OSError:  # the host has it no more
            return "another"
    if isinstance(action, Tmpfs):
        return "there" if status_inside(root_fd, action.container_path) is not None else "missing"
    if isinstance(action, Link):
        return _link_state(root_fd, action)
    if isinstance(action, RefreshLdCache):
        cache = read_inside(root_fd, LD_CACHE, MAX_LD_CACHE) or b""
        if not any(soname.encode() in cache for soname in REQUIRED_SONAMES.values()):
            return ""
        return "merged" if FOOTER in cache else "there"
    return ""


def _link_state(root_fd: int, action: Link) -> str:
    try:
        fd = open_in_root(root_fd, action.container_path, os.O_PATH | os.O_NOFOLLOW)
    except OSError:  # nothing there, or no way to it
        return "missing"
    try:
        return "there" if os.readlink("", dir_fd=fd) == action.target else "another"
    except OSError:  # a file instead of a link
        return "another"
    finally:
        os.close(fd)


def _root(config: dict[str, Any], bundle: str) -> str:
    try:
        return rootfs_path(config, bundle)
    except OcigpuError:
        return ""


def _asked_by(request: Request, config: dict[str, Any], container: Container | None) -> str:
    if request.source != FOUND_BY_NODES:
        return tell_origin(request, config, container)
    docker = container is not None and container.engine == "docker"
    return (tell_docker_options(config, container) if container is not None and docker else "") or VOID


def _explain_compat(plan: Plan, request: Request, settings: Settings, facts: HostFacts, root: str) -> str:
    """Return what becomes of CUDA compatibility libraries, "" for an image that has none."""
    if plan.image.compat_dir:
        if settings.cuda_compat_mode != "ldconfig":
            return f"{plan.image.compat_dir} not used: cuda-compat-mode is {settings.cuda_compat_mode}"
        if "compute" not in request.capabilities:
            return f"{plan.image.compat_dir} not used: the capability compute is not requested"
        return f"{plan.image.compat_dir} used: its libcuda suits driver {facts.driver_version} and is newer"
    try:
        found = look_below(root, has_compat)
    except OSError:  # not there yet, or not any more
        return ""
    if not found:
        return ""
    return f"{COMPAT_DIR} not used: its libcuda is not newer than driver {facts.driver_version}, or not made for it"


def _explain_spec(planned: Planned, original: dict[str, Any], bundle: str, settings: Settings, root: str) -> str:
    """Return whether mode spec can serve the container, as text."""
    if planned.plan is None:
        return ""
    if planned.mode == "hook" and not planned.why_hook:
        host = planned.host
        try:
            planned = plan_bundle(original, bundle, settings._replace(mode="spec"), lambda: host, root)
        except OcigpuError as error:
            return f"not possible: {error.line}"
    if planned.mode == "cdi":
        return ""
    return f"needs the hook: {planned.why_hook}" if planned.why_hook else "possible: no process runs for it"


def _capabilities(request: Request, facts: HostFacts) -> tuple[Capability, ...]:
    present = {library.name.partition(".so")[0] for library in facts.libraries if library.bits == 64}
    found = []
    for name in CAPABILITIES:
        if name == "compat32":
            number = sum(library.bits == 32 for library in facts.libraries)
            found.append(Capability(name, name in request.capabilities, number, ()))
            continue
        wanted = [library for library, (_, capabilities) in TABLE.items() if name in capabilities]
        absent = tuple(library for library in wanted if library not in present)
        found.append(Capability(name, name in request.capabilities, len(wanted) - len(absent), absent))
    return tuple(found)


def _missing(steps: Sequence[Step], report: Report | None) -> list[str]:
    """Return what a running container should have and has not, a line each."""
    words = {
        "missing": "is not in the container",
        "another": "has been replaced in the container, or has changed on the host since the start",
        "refused": "is refused by the device cgroup",
    }
    missing = [f"{step.what}: {words[step.now]}" for step in steps if step.now not in IN_ORDER]
    if report is not None and report.lost:
        missing.append(f"lost since the start: {', '.join(report.lost)} (get them back: ocigpu repair)")
    return missing
