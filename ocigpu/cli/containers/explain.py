"""``ocigpu explain``: codes and messages, and why a container has what it has."""

import functools
import io
import os
import sys
from contextlib import closing, redirect_stdout
from typing import TYPE_CHECKING, Any

from ocigpu.cli.containers.containers import facts_or_note, how_to_ask, places_of, report_to_json, shown_name
from ocigpu.cli.containers.plan import granted_fields, image_line, print_steps, request_fields
from ocigpu.cli.front import show
from ocigpu.cli.front.common import load_settings, settings_path
from ocigpu.cli.front.of_users import ask_owners, print_of_user
from ocigpu.cli.front.optional import needing
from ocigpu.core.actions import Plan
from ocigpu.core.codes import AREAS, CODES, PATH
from ocigpu.core.errors import OcigpuError, UsageError, printable, quoted, suggest
from ocigpu.core.facts import HostFacts, to_data

if TYPE_CHECKING:
    from ocigpu.containers.explain import Explanation
    from ocigpu.containers.failed import NotRunning
    from ocigpu.containers.find import Places
    from ocigpu.doctor.findings import Finding
    from ocigpu.doctor.messages import MessageAt


def explain_command(
    target: str = "",
    state_dir: list[str] | None = None,
    config: str = "",
    json: bool = False,
    messages: bool = False,
    markdown: bool = False,
    no_checks: bool = False,
    steps: bool = False,
    kubeconfig: str = "",
) -> int:
    if (markdown or messages) and (target or (markdown and json)):
        raise UsageError("--markdown and --messages print all there is: they take no argument, --markdown no --json")
    if markdown:
        from ocigpu.doctor.messages import render_markdown as render_messages

        print(render_messages() if messages else render_markdown(), end="")
        return 0
    return show.answer(_explain(target, state_dir, config, messages, not no_checks, steps, kubeconfig), json)


def _explain(
    target: str, state_dir: list[str] | None, config: str, messages: bool, checks: bool, steps: bool, kubeconfig: str
) -> "show.Answer":
    from ocigpu.doctor.findings import CHECKS

    if messages:
        from ocigpu.doctor.messages import MESSAGES

        yield _data(messages=[entry._asdict() for entry in MESSAGES])
        show.table(("message", "what"), [(text, entry.title) for entry in MESSAGES for text in entry.texts])
    elif not target:
        yield _data(codes=[_code_data(name) for name in CODES])
        show.table(("code", "cause"), [(name, entry.cause) for name, entry in CODES.items()])
    elif _looks_like_code(target) and not _names_container(target, state_dir):
        code = find_code(target)
        yield _data(codes=[_code_data(code)])
        _print_code(code)
    elif check := next((check for check in CHECKS if check.name == target), None):
        yield _data(findings=[{"finding": check.name, "title": check.title, "meaning": check.meaning}])
        fields = [("finding", check.name), ("finds", check.title), ("meaning", check.meaning)]
        show.fields([*fields, ("look", "ocigpu doctor")])
    elif target.startswith("claim/"):
        yield from _explain_claim(target, kubeconfig)
    elif target == "-":
        text = sys.stdin.buffer.read(MAX_LOG).decode("utf-8", "replace")
        yield from _explain_message(text, config, checks, log=True)
    elif _looks_like_message(target) or (_is_name_of_error(target) and not _names_container(target, state_dir)):
        yield from _explain_message(target, config, checks)
    else:
        try:
            yield from _explain_container(target, state_dir, config, steps)
        except OcigpuError as error:
            if error.code != "OCIGPU-CTR-1" or state_dir:
                raise
            yield from _explain_not_running(target, config, checks, error)


def _explain_claim(target: str, kubeconfig: str) -> "show.Answer":
    """Say of each request of a ResourceClaim whether it fits; 1 when one does not."""
    parts = target.split("/")
    if len(parts) != 3 or not all(parts):
        raise UsageError(f"{quoted(target)} is not claim/NAMESPACE/NAME")
    with needing("explaining claims needs lightkube and cel-python", "OCIGPU-DRA-6"):
        from ocigpu.kubernetes.dra.cluster import open_cluster
        from ocigpu.kubernetes.dra.explain import read_fit
        from ocigpu.kubernetes.dra.fit import explain_fit
    with closing(open_cluster(kubeconfig or os.environ.get("KUBECONFIG", ""))) as cluster:
        found = read_fit(cluster, parts[1], parts[2])
    yield {"claim": {"namespace": parts[1], "name": parts[2], **found.as_json()}}, int(not found.is_well)
    for line in (*found.notes, *explain_fit(found.nodes)):
        print(printable(line))
    if found.allocated:
        print(printable(f"it is allocated: {', '.join(found.allocated)}"))


def _is_name_of_error(text: str) -> bool:
    from ocigpu.doctor.messages import find_messages

    return not os.path.exists(text) and bool(find_messages(text, log=True))


def _looks_like_message(text: str) -> bool:
    return len(text.split()) > 1 and not text.endswith("/config.json") and not os.path.isdir(text)


def _data(explanation: dict[str, Any] | None = None, user: str = "", **lists: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is explained as JSON data: lists of codes, findings and messages, and a container or bundle."""
    whose = {"user": user} if user else {}
    return {"codes": [], "findings": [], "messages": [], **lists, **whose, "explanation": explanation}


def _code_data(name: str) -> dict[str, str]:
    return {"code": name, **read_examples()[name]}


@functools.cache
def read_examples() -> dict[str, dict[str, str]]:
    """Return "example" and "text" of every code, beside cause and fix."""
    import tomllib

    with open(PATH, "rb") as file:
        return tomllib.load(file)


def _print_code(name: str) -> None:
    """Print a code as a paragraph below an example of its message."""
    data = _code_data(name)
    print(show.styled("\n".join(show.folded(f"{name}: {data['cause']}", 0)), "1"))
    for title, text in (("", data["text"]), ("What to do: ", data["fix"]), ("Example: ", f"{name}: {data['example']}")):
        print()
        show.paragraph(title + text)


def _names_container(text: str, state_dir: list[str] | None) -> bool:
    """Tell whether what looks like a code, and is none of ours, is the id or name of a container."""
    if _full_code(text) in CODES:
        return False
    from ocigpu.containers.find import find_containers

    return any(text in (one.id, one.name) for one in find_containers(places_of(state_dir))[0])


def _looks_like_code(text: str) -> bool:
    """Tell whether a word is a code, or one of ours that is mistyped, and neither a path nor a container's name."""
    name = text.strip().upper()
    area, _, number = name.removeprefix("OCIGPU-").partition("-")
    return number.isdecimal() and (area in AREAS or (area.isalpha() and name.startswith("OCIGPU-")))


def _full_code(text: str) -> str:
    return "OCIGPU-" + text.strip().upper().removeprefix("OCIGPU-")


def find_code(text: str) -> str:
    """Return the code that ``text`` names, in any case and with or without "OCIGPU-"; raises UsageError."""
    name = _full_code(text)
    if name in CODES:
        return name
    hint = suggest(name, CODES, 3, 0.75) or "all codes: ocigpu explain"
    raise UsageError(f"there is no error code {quoted(text)}", hint)


def render_markdown() -> str:
    """Return one page with every code, its cause and fix, grouped by area."""
    lines = [
        "# Error codes",
        "",
        "Every error of ocigpu is one line with a code, the operation, the path and the cause, and a `hint:` line when",
        "there is something to do.",
    ]
    area = ""
    for name, entry in CODES.items():
        if name.split("-")[1] != area:
            area = name.split("-")[1]
            lines += ["", f"## {area}: {AREAS[area]}"]
        cause, fix = (text.replace("*", "\\*") for text in (entry.cause, entry.fix))
        more = read_examples()[name]
        lines += ["", f"### {name}", "", f"{cause} {more['text']}", "", f"    {name}: {more['example']}"]
        lines += ["", f"**What to do:** {fix}"]
    return "\n".join(lines) + "\n"


def _explain_message(
    text: str, config: str, checks: bool, log: bool = False, failed: "NotRunning | None" = None
) -> "show.Answer":
    """Answer what is known of a message, or of each in a ``log``, our codes in it first; raises UsageError for neither.

    ``checks``: run those that the messages name, to say which cause holds on this host.  What a log says comes newest
    first, and before that those messages with a cause that holds.  ``failed``: the container whose error it is.
    """
    from ocigpu.doctor.messages import find_codes, find_messages

    found, codes = find_messages(text, log), find_codes(text, log)
    if not found and not codes and not failed:
        hint = "known messages: ocigpu explain --messages; or: ocigpu doctor"
        what = "no known message in it" if log else f"no known message matches {quoted(text)}"
        raise UsageError(what, hint)
    here = inspect_here([name for one in found for name in one.message.findings], config) if checks else {}
    if log:
        found.sort(key=lambda one: not _holding(_of(one, here)))
    entries = [
        {**one.message._asdict(), "line": one.line, "here": [_finding_data(item) for item in _of(one, here)]}
        for one in found
    ]
    data = _data(codes=list(map(_code_data, codes)), messages=entries)
    yield data | ({"failed_start": failed._asdict()} if failed else {})
    if failed:
        who = f"{failed.name} ({failed.engine}; {failed.status}: it did not start)"
        show.fields([("container", who), ("error", text), *([] if found or codes else [("look", "ocigpu doctor")])])
        print("\n" if found or codes else "", end="")
    for number, code in enumerate(codes):
        if number:
            print()
        _print_code(code)
    for number, one in enumerate(found):
        if number or codes:
            print()
        entry = one.message
        fields = [("line", str(one.line))] if log else []
        fields += [("message", entry.title), ("meaning", entry.meaning)]
        fields += [("" if place else "what to do", step) for place, step in enumerate(entry.steps)]
        fields += _fields_here(_of(one, here)) if checks else [("doctor", ", ".join(entry.findings) or "-")]
        show.fields([*fields, ("source", entry.source)], whole=("what to do", "on this host"))


def _explain_not_running(name: str, config: str, checks: bool, error: OcigpuError) -> "show.Answer":
    """Answer why a container did not start, by its engine's record; raises ``error`` where there is none."""
    from ocigpu.containers.failed import find_not_running

    found = find_not_running(name)
    if found is None:
        raise error
    if not found.error:
        hint = (
            f"{found.engine} has it, {found.status}: only a running one can be explained: {found.engine} start {name}"
        )
        raise OcigpuError(error.code, error.message, hint) from error
    yield from _explain_message(found.error, config, checks, failed=found)


def inspect_here(names: list[str], config: str) -> "dict[str, list[Finding]]":
    """Run the named checks on this host, and return their findings by name."""
    from ocigpu.doctor.host import Host
    from ocigpu.doctor.report import run_checks

    found: dict[str, list[Finding]] = {}
    with show.Progress("looking for the causes on this host"):
        for item in run_checks(Host("", settings_path(config)), names) if names else ():
            found.setdefault(item.name, []).append(item)
    return found


def _of(one: "MessageAt", here: "dict[str, list[Finding]]") -> "list[Finding]":
    """Return what was found of the causes of a message, what holds first; nothing that is about another engine."""
    from ocigpu.doctor.engines import engine_of

    items = [item for name in one.message.findings for item in here.get(name, ())]
    items = [item for item in items if not one.engines or engine_of(item) in ("", *one.engines)]
    return sorted(items, key=lambda item: SEVERITIES.index(item.severity))


def _finding_data(item: "Finding") -> dict[str, Any]:
    return {"name": item.name, "severity": item.severity, "text": item.text, "fixes": list(item.fixes)}


def _holding(items: "list[Finding]") -> "list[Finding]":
    return [item for item in items if item.severity in ("error", "warning")]


def _fields_here(items: "list[Finding]") -> list[tuple[str, str]]:
    """Return the lines on this host: each cause that holds, with its fixes, then those that do not.

    A note is no cause: nothing fails by it.
    """
    fields: list[tuple[str, str]] = []
    holds = _holding(items)
    for item in holds:
        fields.append(("" if fields else "on this host", f"{item.name}: {item.text}"))
        fields += [("", f"    {fix}") for fix in item.fixes]
    shown = {item.name for item in holds}
    for severities, label in ((("ok", "note"), "not the cause here"), (("not-checked",), "not checked")):
        names = dict.fromkeys(item.name for item in items if item.severity in severities and item.name not in shown)
        fields += [(label, ", ".join(names))] if names else []
    return fields


MAX_LOG = 64 << 20
"""How much of a log is read."""
MODES = {
    "hook": "hook: a prestart hook of ocigpu",
    "spec": "spec: declared in its config.json by ocigpu",
    "cdi": "cdi: CDI devices, in its config.json",
    "vendor": "vendor: the hook of the vendor's toolkit",
    "": "none: ocigpu has not edited its config.json",
}
SHOWN_ABSENT = 4
SEVERITIES = ("error", "warning", "note", "ok", "not-checked")
"""Worst first, as far as a cause is looked for."""


def _explain_container(text: str, state_dir: list[str] | None, config: str, each: bool) -> "show.Answer":
    """Answer everything that can be told of a container or bundle; raises OcigpuError when there is none."""
    from ocigpu.containers.explain import explain_bundle
    from ocigpu.containers.find import find_target

    settings = load_settings(config)
    facts, notes = facts_or_note(config)

    def explain(places: "Places") -> "Explanation":
        explained = explain_bundle(find_target(text, places), settings, facts)
        return explained._replace(notes=(*notes, *explained.notes))

    try:
        explained = explain(places_of(state_dir))
    except OcigpuError as error:
        if error.code != "OCIGPU-CTR-1" or os.geteuid() or state_dir:
            raise

        def look(places: "Places") -> "tuple[str, dict[str, Any]]":
            found = explain(places)
            with redirect_stdout(io.StringIO()) as output:
                _print_explained(found, facts, each)
            return output.getvalue(), _to_json(found, facts)

        user, shown, data = ask_owners(look, error)
        yield _data(data, user=user)
        print_of_user(user, shown)
        return
    yield _data(_to_json(explained, facts))
    _print_explained(explained, facts, each)


def _print_explained(explained: "Explanation", facts: HostFacts, each: bool) -> None:
    _print_head(explained, facts)
    _print_steps(explained, each)
    _print_inside(explained)
    if explained.capabilities:
        print("\ndriver capabilities")
        show.table(("capability", "requested", "libraries", "not on this host"), _capability_rows(explained))
    _print_missing(explained)
    show.notes(explained.notes, apart=True)


def _to_json(explained: "Explanation", facts: HostFacts) -> dict[str, Any]:
    data: dict[str, Any] = to_data(explained)
    data["report"] = report_to_json(explained.report) if explained.report is not None else None
    return {"simulated": facts.simulated, "driver_version": facts.driver_version, **data}


def _print_head(explained: "Explanation", facts: HostFacts) -> None:
    container, request = explained.container, explained.request
    fields = []
    if container is not None:
        process = f", process {container.pid}" if container.pid else ""
        engine = f"{container.engine}, {container.runtime}" if container.engine else container.runtime
        fields.append(("container", f"{shown_name(container)} ({engine}; {container.status}{process})"))
    fields += [
        ("bundle", explained.bundle),
        ("host", show.host_line(facts)),
        ("driver", show.driver_line(facts)),
        ("given by", MODES.get(explained.mode, explained.mode)),
    ]
    if request.selection == "nothing" and not explained.error:
        fields.append(("request", "none: it requests no GPU"))
    elif request.source:
        fields += request_fields(request) if request.selection != "cdi" else [("request", request.source)]
        fields.append(("asked by", explained.asked_by))
    label = "would get" if _in_vain(explained) else "granted"
    if explained.report is not None and explained.report.unanswered and not explained.error:
        fields += [("granted", "no GPU"), ("", f"hint: {how_to_ask(explained.report)}")]
    if explained.error:
        runs = container is not None and container.pid
        fields.append(("granted", f"{'unknown now' if runs else 'nothing'}: {explained.error}"))
        fields += [("", f"hint: {explained.hint}")] if explained.hint else []
    elif request.selection == "cdi":
        fields += [(label if number == 0 else "", name) for number, name in enumerate(explained.gpus)]
    elif explained.image is not None:
        plan = Plan((), gpus=explained.gpus, mig_devices=explained.gpus)
        fields += [(name and label, value) for name, value in granted_fields(plan, facts)]
        fields.append(("image", image_line(explained.image)))
        fields.append(("CUDA compat", explained.compat or "the image brings no CUDA compatibility libraries"))
    if explained.spec:
        fields.append(("mode spec", explained.spec))
    show.fields(fields)


def _in_vain(explained: "Explanation") -> bool:
    """Whether a container has no GPU although it requests some: nobody edited its config.json, or its hook failed."""
    report = explained.report
    return not explained.mode or (report is not None and bool(report.unanswered or report.refused))


def _print_steps(explained: "Explanation", each: bool) -> None:
    if not explained.steps:
        return
    got = "what it would get" if _in_vain(explained) or explained.mode == "vendor" else "what it got"
    print(f"\n{got}, and why ({show.count(len(explained.steps), 'step')})")
    print_steps(explained.steps, each, any(step.now for step in explained.steps))


def _print_inside(explained: "Explanation") -> None:
    report = explained.report
    if report is None or not report.gpus:
        return
    print("\nGPUs in it now" if report.container.pid else "\nGPUs in its configuration")
    show.table(
        ("gpu", "uuid", "model", "state"),
        [(gpu.mig or str(gpu.index), gpu.uuid, gpu.model, gpu.state or "-") for gpu in report.gpus],
    )
    if report.processes:
        print("\nprocesses that hold devices open")
        rows = [(str(process.pid), process.command, ", ".join(process.devices)) for process in report.processes]
        show.table(("pid", "command", "devices"), rows)


def _capability_rows(explained: "Explanation") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for capability in explained.capabilities:
        absent = ", ".join(capability.absent[:SHOWN_ABSENT])
        if len(capability.absent) > SHOWN_ABSENT:
            absent += f" and {len(capability.absent) - SHOWN_ABSENT} more"
        rows.append((capability.name, "yes" if capability.asked else "no", str(capability.found), absent or "-"))
    return rows


def _print_missing(explained: "Explanation") -> None:
    if explained.container is None or not explained.container.pid or not explained.steps:
        return
    print("\nmissing")
    for line in explained.missing:
        print(f"  {printable(line)}")
    if not explained.missing:
        looked = any(step.now for step in explained.steps)
        print("  nothing" if looked else "  no GPU; what else CDI devices add is not shown (see ocigpu verify)")
