"""``ocigpu plan``: what would be done for a container, each step with its reason; nothing is changed.

How steps are shown, in groups or each of them, is also for ``ocigpu explain CONTAINER``.
"""

import os
from itertools import takewhile

from ocigpu.cli.front import show
from ocigpu.cli.front.common import load_facts, load_settings
from ocigpu.containers.steps import Step, edit_steps, plan_steps
from ocigpu.core.actions import Plan, plan_to_json
from ocigpu.core.errors import UsageError, printable, quoted
from ocigpu.core.facts import HostFacts, ImageFacts, to_data
from ocigpu.core.settings import MODES, Settings
from ocigpu.core.vendors import VENDORS
from ocigpu.gpus.nvidia.request import CAPABILITIES_VARIABLE, DEVICES_VARIABLE
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import find_vendors, make_plan, parse_request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any


def plan_command(
    bundle: str = "",
    env: list[str] | None = None,
    devices: str = "",
    capabilities: str = "",
    privileged: bool = False,
    driver_root: str = "",
    facts: str = "",
    config: str = "",
    steps: bool = False,
) -> "show.Answer":
    settings = load_settings(config, driver_root)
    recorded = (lambda vendor: vendor in load_facts(settings, facts).vendors) if facts else None
    variables = _variables(env or [], devices, capabilities, VENDORS[find_vendors(settings)[0]][1] if devices else "")
    if bundle and (variables or privileged):
        raise UsageError("--bundle says everything: leave out --env, --devices, --capabilities and --privileged")
    container: dict[str, object] = {}
    if bundle:
        from ocigpu.bundle.document import check_can_have_gpus, read_config

        document = read_config(bundle)
        container = document.config
        request = parse_request(container, settings, os.path.dirname(os.path.abspath(document.path)), recorded)
        if request.selection != "nothing":
            check_can_have_gpus(container, document.path)
    else:
        env = [f"{name}={value}" for name, value in variables.items()]
        bounding = ["CAP_SYS_ADMIN"] if privileged else []
        container_text = {"process": {"env": env, "capabilities": {"bounding": bounding}}}
        request = parse_request(container_text, settings, here=recorded)
    if request.selection == "nothing":
        yield _plan_data(make_plan(HostFacts(), request, settings), request)
        print("nothing is requested: config.json would stay as it is, byte for byte")
        show.notes(request.notes)
        if not request.source:
            print(f"(ask with --devices LIST, --env {DEVICES_VARIABLE}=LIST or --bundle DIR)")
        return
    if request.selection == "cdi":
        yield from _show_cdi_plan(request, container, settings, steps, lambda: load_facts(settings, facts))
        return
    host = load_facts(settings, facts, request.vendors)
    image = ImageFacts()
    if bundle:
        from ocigpu.containers.planned import image_facts, why_not_spec

        image = image_facts(bundle, container, host)
    plan = make_plan(host, request, settings, image, "spec" if MODES[settings.mode] == "spec" else "hook")
    why_hook = ""
    if plan.mode == "spec" and bundle:
        why_hook = why_not_spec(plan, host, container, bundle, settings)
        plan = make_plan(host, request, settings, image) if why_hook else plan
    yield _plan_data(plan, request, why_hook=why_hook)
    show.fields(
        [
            ("host", show.host_line(host, facts)),
            ("driver", show.driver_line(host)),
            *request_fields(request),
            *granted_fields(plan, host),
            ("mode", f"{plan.mode}, not spec: {why_hook}" if why_hook else plan.mode),
            ("image", image_line(plan.image)),
        ]
    )
    print()
    _print_steps(plan_steps(plan), steps, plan.notes)


def _variables(pairs: list[str], devices: str, capabilities: str, devices_variable: str) -> dict[str, str]:
    variables: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--env {quoted(pair)} is not NAME=VALUE")
        variables[name] = value
    for name, value, option in (
        (devices_variable, devices, "--devices"),
        (CAPABILITIES_VARIABLE, capabilities, "--capabilities"),
    ):
        if value:
            if name in variables:
                raise UsageError(f"{option} and --env {name} say the same thing: give one of them")
            variables[name] = value
    return variables


def _plan_data(
    plan: Plan, request: Request, files: "Sequence[object]" = (), edits: object = None, why_hook: str = ""
) -> "dict[str, Any]":
    """Return the plan as data: ``files`` and ``edits`` are of CDI devices, ``why_hook`` why not mode spec."""
    cdi = {"devices": request.cdi_devices, "files": files, "containerEdits": edits or {}}
    return {**plan_to_json(plan), **cdi, "why_hook": why_hook, "request": to_data(request)}


def _print_steps(steps: "Sequence[Step]", each: bool, notes: "Sequence[str]") -> None:
    print_steps(steps, each, states=False)
    print()
    show.notes(notes)
    print(f"plan: {sum_line(steps)}; nothing was changed{'' if each else ' (every step: --steps)'}")


def request_fields(request: Request) -> list[tuple[str, str]]:
    """Return the lines of the header that say what the container asks for."""
    fields = [
        ("request", request.source or request.selection),
        ("capabilities", ",".join(request.capabilities) or "none"),
    ]
    if request.requirements:
        fields.append(("requires", "; ".join(f"{name}={value}" for name, value in request.requirements)))
    extras = [
        *(f"MIG {name} {value}" for name, value in _mig_extras(request)),
        *(f"IMEX channel {channel}" for channel in request.imex_channels),
        *request.features,
    ]
    if extras:
        fields.append(("also", ", ".join(extras)))
    return fields


def _mig_extras(request: Request) -> list[tuple[str, str]]:
    pairs = (("configuration", request.mig_config), ("monitoring", request.mig_monitor))
    return [(name, value) for name, value in pairs if value]


def granted_fields(plan: Plan, host: HostFacts) -> list[tuple[str, str]]:
    """Return the lines of the header that say which GPUs and MIG devices are granted."""
    lines = []
    for gpu in host.gpus:
        if gpu.uuid in plan.gpus:
            lines.append(f"GPU {gpu.index}  {gpu.uuid}  {gpu.model}".rstrip())
        lines += [
            f"MIG {gpu.index}:{mig.index}  {mig.uuid}  {mig.profile}"
            for mig in gpu.mig_devices
            if mig.uuid in plan.mig_devices
        ]
    if not lines:
        lines.append("no GPU: driver files and control nodes only")
    return [("granted" if number == 0 else "", line) for number, line in enumerate(lines)]


def image_line(image: ImageFacts) -> str:
    """Return one line on the image, e.g. "glibc, driver libraries go to /usr/lib64"."""
    text = f"{image.libc or 'no loader found'}, driver libraries go to {image.library_dir}"
    text += f", CUDA compatibility libraries in {image.compat_dir}" if image.compat_dir else ""
    stale = image.stale_cache if image.libc == "glibc" else ""
    return printable(f"{text}; its loader cache is not current: {stale}" if stale else text)


def _show_cdi_plan(
    request: Request,
    container: "dict[str, Any]",
    settings: Settings,
    each: bool,
    read_host: "Callable[[], HostFacts]",
) -> "show.Answer":
    """Answer with what the request's devices stand for; nothing is changed.

    The edits are made to a copy of ``container`` (a config.json, or {}), so that what the shim would refuse is an error
    here too: raises CdiError OCIGPU-CDI-4 to -6, and RequestError OCIGPU-REQ-2 to -4.
    """
    import copy

    from ocigpu.bundle.inject import inject
    from ocigpu.bundle.policy import owns_device_policy
    from ocigpu.cdi.conditions import check_conditions
    from ocigpu.cdi.generate import merge_edits
    from ocigpu.cdi.registry import read_registry
    from ocigpu.cli.cdi.files import file_state

    resolved = read_registry(settings).resolve(request.cdi_devices)
    unseen = check_conditions(request, resolved.specs, read_host)
    root = owns_device_policy()
    warnings = inject(
        copy.deepcopy(container),
        resolved.edits,
        declare_rules=root and not settings.no_cgroups,
        files=resolved.files,
        rootless=not root,
    )
    notes = [*request.notes, *unseen, *warnings]
    files = [(spec.path, file_state(spec.annotations, settings)) for spec in resolved.specs]
    edits = merge_edits(resolved.edits)
    data = [{"file": path, "state": state.word, "reasons": state.reasons} for path, state in files]
    yield _plan_data(Plan((), notes=tuple(notes), mode="cdi"), request, data, edits)
    show.fields(
        [
            ("request", request.source),
            *(("devices" if number == 0 else "", name) for number, name in enumerate(request.cdi_devices)),
            *(("from", f"{path} ({state.describe()})") for path, state in files),
            ("mode", "cdi"),
        ]
    )
    print()
    _print_steps(edit_steps(edits, f"CDI devices in {', '.join(path for path, _ in files)}"), each, notes)


SIGNS = {"mask": "-", "ldconfig": "~", "merge": "~", "mode": "~", "read-only": "~", "tmpfs": "~"}
"""What hides or changes something that is there, by the first word of a step; all else is added."""
PLURALS = {"directory": "directories", "tmpfs": "tmpfs", "ldconfig": "ldconfig"}
ROOM = 48
"""Columns of the names in a group's line."""


def print_steps(steps: "Sequence[Step]", each: bool, states: bool) -> None:
    """Print steps: a line for each group, or with ``each`` every one below its reason.

    In front of each is its state in a container (``states``), else + for added, ~ for changed, - for hidden.
    """
    if each:
        print_each(steps, states)
        return
    groups: dict[tuple[str, ...], list[Step]] = {}
    for step in steps:
        if _sign(step):
            groups.setdefault(_group(step), []).append(step)
    rows = [_row(group, states) for group in groups.values()]
    show.table(("now" if states else "", "what", "where", "why"), rows)


def sum_line(steps: "Sequence[Step]") -> str:
    """Return e.g. "52 to add, 2 to change, 0 to hide"."""
    signs = [_sign(step) for step in steps]
    return f"{signs.count('+')} to add, {signs.count('~')} to change, {signs.count('-')} to hide"


def print_each(steps: "Sequence[Step]", states: bool) -> None:
    """Print the steps below their reasons; the directory on the host is left out where the container's is the same."""
    width = max((len(step.now) for step in steps), default=0)
    heading = ""
    for step in steps:
        if heading != (reason := step.reason + _from([step])):
            heading = reason
            print(printable(heading))
        target = f" -> {step.source}" if step.what.startswith("link ") else ""
        before = f"{step.now or '-':<{width}}" if states else _sign(step)
        print(f"    {show.coloured(before) + '  ' if before else ''}{printable(step.what + target)}")


def _sign(step: Step) -> str:
    """Return +, ~ or -; "" for an option of a hook, which the step above it has."""
    return "" if step.what.startswith(" ") else SIGNS.get(step.what.split(" ")[0], "+")


def _parts(step: Step) -> tuple[str, str]:
    """Return a step's kind and path."""
    kind, _, rest = step.what.partition(" ")
    return kind, rest.split(" ")[0]


def _group(step: Step) -> tuple[str, ...]:
    """Return what steps of one line have in common: their kind, and their reason up to what tells them apart."""
    return _parts(step)[0], _sign(step), "".join(takewhile(lambda c: c != "," and not c.isdigit(), step.reason))


def _row(group: "Sequence[Step]", states: bool) -> tuple[str, ...]:
    kind, first = _parts(group[0])
    what = kind if len(group) == 1 else f"{len(group)} {PLURALS.get(kind, f'{kind}s')}"
    names, shown = [first], 1
    for step in group[1:]:
        path = _parts(step)[1]
        names.append(os.path.basename(path) if os.path.dirname(path) == os.path.dirname(first) else path)
        shown += len(", ".join(names)) <= ROOM and shown == len(names) - 1
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    found = [step.now for step in group]
    counted = ", ".join(f"{found.count(state)} {state}" for state in dict.fromkeys(found))
    now = found[0] if found.count(found[0]) == len(found) else counted
    begin = (now or "-") if states else _sign(group[0])
    return begin, what, ", ".join(names[:shown]) + more, join_reasons([step.reason for step in group]) + _from(group)


def _from(group: "Sequence[Step]") -> str:
    """Return from which directory of the host files come, if that is one, and not that of the container."""
    sources = {os.path.dirname(step.source) for step in group}
    targets = {os.path.dirname(_parts(step)[1]) for step in group}
    source = sources.pop()
    if sources or not source or {source} == targets or group[0].what.startswith("link "):
        return ""
    return f", from {source}"


def join_reasons(reasons: list[str]) -> str:
    """Return one reason for several: what they begin and end with, once, and what differs, if it is not too long."""
    texts = [reason.replace(",", " ,").split(" ") for reason in dict.fromkeys(reasons)]
    if len(texts) == 1:
        return reasons[0]
    begin = _common(texts)
    end = _common([text[len(begin) :][::-1] for text in texts])[::-1]
    differ = [" ".join(text[len(begin) : len(text) - len(end)]) for text in texts]
    separator = " , " if begin or end else "; "
    middle = separator.join(filter(None, dict.fromkeys(part for text in differ for part in text.split(separator))))
    return " ".join([*begin, middle if len(middle) <= ROOM * 2 else "...", *end]).replace(" ,", ",")


def _common(texts: list[list[str]]) -> list[str]:
    """Return the words that all texts begin with."""
    return [words[0] for words in takewhile(lambda words: len(set(words)) == 1, zip(*texts, strict=False))]
