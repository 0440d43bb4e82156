"""``ocigpu explain``: codes and messages (docs/ERRORS.md, TROUBLESHOOTING.md), and why a container has what it has."""

import os

from ocigpu.cli.common import ConfigOption, JsonOption, print_fields, print_json, print_table
from ocigpu.cli.ps import RootsOption, places_of
from ocigpu.core.codes import CODES
from ocigpu.core.errors import UsageError, quoted
from ocigpu.doctor.messages import render_markdown as render_messages

AREAS = {
    "ARG": "Command line",
    "SET": "Settings",
    "SPEC": "Bundle and OCI configuration",
    "RT": "Low-level runtime",
    "REQ": "Requests of containers",
    "HOST": "Driver and host",
    "DEV": "Devices",
    "LIB": "Driver libraries",
    "NS": "Namespaces and processes",
    "MNT": "Mounts, files and links in containers",
    "CG": "Device cgroup",
    "LD": "Loader cache",
    "CDI": "CDI specifications and devices named by them",
    "CTR": "Containers that exist",
    "ENG": "Configuration of container engines",
    "KUBE": "Kubernetes device plugin",
    "SIM": "Simulated host",
    "DEMO": "Demo",
    "TRC": "Traces",
    "INT": "Defects",
}
"""Titles of the groups of codes, by the second part of a code."""


def explain_command(
    target: str = "",
    root: RootsOption = None,
    config: ConfigOption = "",
    json: JsonOption = False,
    messages: bool = False,
    markdown: bool = False,
) -> None:

    if markdown or messages:
        if target or (markdown and json):
            raise UsageError(
                "--markdown and --messages print all there is: they take no argument, --markdown no --json"
            )
        if markdown:
            print(render_messages() if messages else render_markdown(), end="")
        else:
            from ocigpu.cli.explain_message import list_messages

            list_messages(json)
    elif not target:
        if json:
            print_json([{"code": name, "cause": entry.cause, "fix": entry.fix} for name, entry in CODES.items()])
        else:
            print_table(("code", "cause"), [(name, entry.cause) for name, entry in CODES.items()])
    elif _looks_like_code(target) and not _names_container(target, root):
        name = find_code(target)
        entry = CODES[name]
        if json:
            print_json({"code": name, "cause": entry.cause, "fix": entry.fix})
        else:
            print_fields([("code", name), ("cause", entry.cause), ("fix", entry.fix)])
    else:
        _explain_other(target, root, config, json)


def _explain_other(target: str, root: list[str] | None, config: str, json: bool) -> None:
    from ocigpu.cli import explain_message

    if explain_message.is_finding(target):
        explain_message.explain_finding(target, json)
    elif len(target.split()) > 1 and "/config.json" not in target and not os.path.isdir(target):
        explain_message.explain_message(target, json)
    else:
        from ocigpu.cli.explain_container import explain_container

        explain_container(target, places_of(root), config, json)


def _names_container(text: str, root: list[str] | None) -> bool:
    """Tell whether what looks like a code, and is none of ours, is the id or name of a container."""
    if _full_code(text) in CODES:
        return False
    from ocigpu.containers.find import find_containers

    return any(text in (one.id, one.name) for one in find_containers(places_of(root))[0])


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
    import difflib

    near = difflib.get_close_matches(name, CODES, 3, 0.75)
    hint = f"did you mean {' or '.join(near)}?" if near else "all codes: ocigpu explain"
    raise UsageError(f"there is no error code {quoted(text)}", hint)


def render_markdown() -> str:
    """Return docs/ERRORS.md: every code with its cause and fix, grouped by area."""
    lines = [
        "# Error codes",
        "",
        "Every error of ocigpu is one line with a code, the operation, the path and the cause, and a `hint:` line when",
        "there is something to do. This page is generated: `ocigpu explain --markdown > docs/ERRORS.md`.",
    ]
    area = ""
    for name, entry in CODES.items():
        if name.split("-")[1] != area:
            area = name.split("-")[1]
            lines += ["", f"## {area}: {AREAS[area]}", "", "| code | cause | what to do |", "|---|---|---|"]
        lines.append(f"| `{name}` | {entry.cause} | {entry.fix} |".replace("*", "\\*"))
    return "\n".join(lines) + "\n"
