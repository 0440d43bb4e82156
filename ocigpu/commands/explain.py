"""``ocigpu explain``: what an error code means and what to do; the source of docs/ERRORS.md."""

from typing import Annotated

import typer

from ocigpu.codes import CODES
from ocigpu.commands.common import JsonOption, print_fields, print_json, print_table
from ocigpu.errors import UsageError, quoted

EXPLAIN_EPILOG = """\
\b
Examples:
  ocigpu explain OCIGPU-DEV-1
  ocigpu explain dev-1
  ocigpu explain
"""

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
    code: Annotated[str, typer.Argument(metavar="[CODE]", help="An error code; without one all are listed.")] = "",
    json: JsonOption = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/ERRORS.md: all codes, cause and fix.")
    ] = False,
) -> None:
    """Explain an error code: its cause and what to do."""
    if markdown:
        if code or json:
            raise UsageError("--markdown prints all codes: it takes neither CODE nor --json")
        print(render_markdown(), end="")
    elif code:
        name = find_code(code)
        entry = CODES[name]
        if json:
            print_json({"code": name, "cause": entry.cause, "fix": entry.fix})
        else:
            print_fields([("code", name), ("cause", entry.cause), ("fix", entry.fix)])
    elif json:
        print_json([{"code": name, "cause": entry.cause, "fix": entry.fix} for name, entry in CODES.items()])
    else:
        print_table(("code", "cause"), [(name, entry.cause) for name, entry in CODES.items()])


def find_code(text: str) -> str:
    """Return the code that ``text`` names, in any case and with or without "OCIGPU-"; raises UsageError."""
    name = text.strip().upper()
    if not name.startswith("OCIGPU-"):
        name = "OCIGPU-" + name
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
