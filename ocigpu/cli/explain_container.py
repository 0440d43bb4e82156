"""``ocigpu explain`` for a container or a bundle: what it asked for, what it got and why, and what is missing."""

import os
from typing import Any

from ocigpu.cli.common import count, driver_line, host_line, load_settings, print_fields, print_json, print_notes
from ocigpu.cli.common import print_table as print_rows
from ocigpu.cli.plan import granted_fields, image_line, request_fields
from ocigpu.cli.ps import facts_or_note, report_to_json, shown_name
from ocigpu.containers.explain import Explanation, explain_bundle
from ocigpu.containers.find import Places
from ocigpu.containers.target import find_target
from ocigpu.core.errors import printable
from ocigpu.core.facts import HostFacts, to_data

MODES = {
    "hook": "hook: a prestart hook of ocigpu",
    "spec": "spec: declared in its config.json by ocigpu",
    "cdi": "cdi: CDI devices, in its config.json",
    "vendor": "vendor: the hook of the vendor's toolkit",
    "": "none: ocigpu has not edited its config.json",
}
SHOWN_ABSENT = 4


def explain_container(text: str, places: Places, config: str, json: bool) -> None:
    """Print everything that can be told of a container or bundle; raises OcigpuError when there is none."""
    settings = load_settings(config)
    facts, notes = facts_or_note(config)
    explained = explain_bundle(find_target(text, places), settings, facts)
    explained = explained._replace(notes=(*notes, *explained.notes))
    if json:
        print_json(_to_json(explained, facts))
        return
    _print_head(explained, facts)
    _print_steps(explained)
    _print_inside(explained)
    if explained.capabilities:
        print("\ndriver capabilities")
        print_rows(("capability", "asked for", "libraries", "not on this host"), _capability_rows(explained))
    _print_missing(explained)
    if explained.notes:
        print()
        print_notes(explained.notes)


def _to_json(explained: Explanation, facts: HostFacts) -> dict[str, Any]:
    data: dict[str, Any] = to_data(explained)
    data["report"] = report_to_json(explained.report) if explained.report is not None else None
    return {"simulated": facts.simulated, "driver_version": facts.driver_version, **data}


def _print_head(explained: Explanation, facts: HostFacts) -> None:
    container, request = explained.container, explained.request
    fields = []
    if container is not None:
        process = f", process {container.pid}" if container.pid else ""
        engine = f"{container.engine}, {container.runtime}" if container.engine else container.runtime
        fields.append(("container", f"{shown_name(container)} ({engine}; {container.status}{process})"))
    fields += [
        ("bundle", explained.bundle),
        ("host", host_line(facts)),
        ("driver", driver_line(facts)),
        ("given by", MODES.get(explained.mode, explained.mode)),
    ]
    if request.selection == "nothing" and not explained.error:
        fields.append(("request", "none: it asks for no GPU"))
    elif request.source:
        fields += request_fields(request) if request.selection != "cdi" else [("request", request.source)]
        fields.append(("asked by", explained.asked_by))
    if explained.error:
        runs = container is not None and container.pid
        fields.append(("granted", f"{'cannot be told now' if runs else 'nothing'}: {explained.error}"))
        fields += [("", f"hint: {explained.hint}")] if explained.hint else []
    elif request.selection == "cdi":
        fields += [("granted" if number == 0 else "", name) for number, name in enumerate(explained.gpus)]
    elif explained.image is not None:
        label = "granted" if explained.mode else "would get"
        fields += [(name and label, value) for name, value in _granted(explained, facts)]
        fields.append(("image", image_line(explained.image)))
        fields.append(("CUDA compat", explained.compat or "the image brings no CUDA compatibility libraries"))
    if explained.spec:
        fields.append(("mode spec", explained.spec))
    print_fields(fields)


def _granted(explained: Explanation, facts: HostFacts) -> list[tuple[str, str]]:
    from ocigpu.core.actions import Plan

    return granted_fields(Plan((), gpus=explained.gpus, mig_devices=explained.gpus), facts)


def _print_steps(explained: Explanation) -> None:
    """Print the steps below their reasons; the directory on the host is left out where the container's is the same."""
    if not explained.steps:
        return
    got = "what it got" if explained.mode in ("hook", "spec", "cdi") else "what ocigpu would give it"
    print(f"\n{got}, and why ({count(len(explained.steps), 'step')})")
    width = max(len(step.now) for step in explained.steps)
    heading = ""
    for step in explained.steps:
        kind, _, path = step.what.partition(" ")
        directory = os.path.dirname(step.source)
        where = "" if kind == "link" or directory in ("", os.path.dirname(path)) else f", from {directory}"
        if heading != step.reason + where:
            heading = step.reason + where
            print(printable(heading))
        target = f" -> {step.source}" if kind == "link" else ""
        now = f"{step.now or '-':<{width}}  " if width else ""
        print(f"    {now}{printable(step.what + target)}")


def _print_inside(explained: Explanation) -> None:
    report = explained.report
    if report is None or not report.gpus:
        return
    print("\nGPUs in it now" if report.container.pid else "\nGPUs in its configuration")
    print_rows(
        ("gpu", "uuid", "model", "state"),
        [(gpu.mig or str(gpu.index), gpu.uuid, gpu.model, gpu.state or "-") for gpu in report.gpus],
    )
    if report.processes:
        print("\nprocesses that hold devices open")
        rows = [(str(process.pid), process.command, ", ".join(process.devices)) for process in report.processes]
        print_rows(("pid", "command", "devices"), rows)


def _capability_rows(explained: Explanation) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for capability in explained.capabilities:
        absent = ", ".join(capability.absent[:SHOWN_ABSENT])
        if len(capability.absent) > SHOWN_ABSENT:
            absent += f" and {len(capability.absent) - SHOWN_ABSENT} more"
        rows.append((capability.name, "yes" if capability.asked else "no", str(capability.found), absent or "-"))
    return rows


def _print_missing(explained: Explanation) -> None:
    if explained.container is None or not explained.container.pid or not explained.steps:
        return
    print("\nmissing")
    for line in explained.missing:
        print(f"  {printable(line)}")
    if not explained.missing:
        looked = any(step.now for step in explained.steps)
        print("  nothing" if looked else "  no GPU; what else CDI devices bring is not looked at (see ocigpu verify)")
