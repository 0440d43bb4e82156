"""Checks of ocigpu itself: its settings, its programs, and the runtime below it."""

import os
import re
import shlex
import tomllib

from ocigpu.core.errors import printable
from ocigpu.core.settings import DEFAULT_PATH
from ocigpu.doctor.files import PROGRAM_DIRECTORIES
from ocigpu.doctor.host import DIRECTORIES, Host
from ocigpu.doctor.records import Evidence, Finding, error, not_checked, ok, warning

STUBS = ("ocigpu-runtime", "ocigpu-hook", "ocigpu", "ocigpu-container-cli")
_INTERPRETER = re.compile(r"\A#!(/\S*python\S*)|\[ -x (/\S+) \]")
VENDOR_SETTINGS = "/etc/nvidia-container-runtime/config.toml"


def check_settings(host: Host) -> list[Finding]:
    """Can ocigpu's settings be used?"""
    failure = host.settings_error
    path = host.config or host.path(DEFAULT_PATH)
    if failure is None:
        found = "read" if host.settings.path else "not there: the defaults hold"
        return [ok("the settings can be used", Evidence(host.settings.path or path, found))]
    fixes: tuple[str, ...] = (f"ocigpu config check {shlex.quote(path)}",)
    if failure.code == "OCIGPU-SET-3":
        fixes = (
            f"chown root:root {shlex.join([path, os.path.dirname(path)])}",
            f"chmod go-w {shlex.join([path, os.path.dirname(path)])}",
            *fixes,
        )
    elif failure.code == "OCIGPU-SET-1":
        fixes = (*fixes, f"# correct the file, or do without: mv {shlex.quote(path)} {shlex.quote(path)}.bad")
    cause = failure.message.removeprefix("settings ").removeprefix(f"{path}: ")
    text = f"the settings cannot be used, and no container with GPUs starts ({failure.code}): {cause}"
    return [error(text, (Evidence(path, printable(cause, 300), failure.hint or "usable settings"),), fixes)]


def _stubs(host: Host) -> dict[str, str]:
    """Return name and path of ocigpu's programs."""
    found: dict[str, str] = {}
    for directory in host.program_directories:
        for name in STUBS:
            if host.exists(f"{directory}/{name}"):
                found.setdefault(name, f"{directory}/{name}")
    return found


def check_programs(host: Host) -> list[Finding]:
    """Can ocigpu's programs run?"""
    stubs = _stubs(host)
    if not stubs:
        return [not_checked("no program of ocigpu in " + ", ".join(DIRECTORIES))]
    findings, fine = [], []
    for path in stubs.values():
        match = _INTERPRETER.search(host.text(path, 8192) or "")
        interpreter = (match[1] or match[2]) if match else ""
        if interpreter and not host.program(interpreter):
            findings.append(
                error(
                    f"{path} needs {interpreter}, which is gone: no container starts that uses it",
                    (host.evidence(path, f"runs {interpreter}"), host.evidence(interpreter, "none", "a program")),
                    ("make install  # in ocigpu's directory; or install its package again",),
                )
            )
        else:
            fine.append(host.evidence(path, f"runs {interpreter}" if interpreter else "there"))
    hook = host.settings.hook_path
    if hook and not host.program(hook):
        findings.append(
            error(
                f"the settings name the hook {hook}, which is not there (OCIGPU-RT-3)",
                (Evidence(host.settings.path, f"hook.path = {hook}", "a program"), host.evidence(hook, "none")),
                (f"# remove hook.path from {host.settings.path}, or install ocigpu again",),
            )
        )
    if findings:
        return findings
    absent = [name for name in ("ocigpu-runtime", "ocigpu-hook") if name not in stubs]
    if absent:
        wanted = Evidence(", ".join(DIRECTORIES), f"no {' and no '.join(absent)}", "the programs that engines run")
        return [warning(f"ocigpu is here, and {' and '.join(absent)} is not", (wanted, *fine), ("make install",))]
    return [ok("ocigpu's programs and their Python are there", *fine)]


def check_runtime(host: Host) -> list[Finding]:
    """Is there a low-level runtime?"""
    wanted = host.settings.runtime_runtimes
    for name in wanted:
        found = host.command_path(name)
        if found:
            return [ok(f"{name} is the low-level runtime", host.evidence(found, "there"))]
    if not host.has_system:
        return [not_checked("the simulated host has no low-level runtime")]
    evidence = Evidence(", ".join(PROGRAM_DIRECTORIES), f"none of {', '.join(wanted)}", "one of them")
    fixes = ("apt-get install runc  # or crun, or your system's package", f"# or runtime.runtimes in {DEFAULT_PATH}")
    return [error("no low-level runtime was found (OCIGPU-RT-1)", (evidence,), fixes)]


def check_no_cgroups(host: Host) -> list[Finding]:
    """Fits no-cgroups to who runs containers?"""
    findings, fine = [], []
    installed = [item for item in host.engines if item.installed]
    rootful = [item for item in installed if item.flavour != "rootless"]
    path = host.settings.path or host.path(DEFAULT_PATH)
    fine.append(Evidence(path, f"no-cgroups = {str(host.settings.no_cgroups).lower()}", "false"))
    if host.settings.no_cgroups:
        findings.append(
            warning(
                "the settings say no-cgroups = true: containers of root get device nodes and no permission to open "
                "them (EPERM); ocigpu finds out by itself when a container is rootless",
                (Evidence(path, "no-cgroups = true", "false"),),
                (f"sed -i 's/^no-cgroups *= *true/no-cgroups = false/' {shlex.quote(path)}",),
            )
        )
    vendors = _vendor_no_cgroups(host)
    uses = any("nvidia-container-runtime" in entry.path for item in installed for entry in item.runtimes)
    if uses and vendors is not None:
        only_rootless = bool(installed) and not rootful
        found = f"no-cgroups = {str(vendors).lower()}"
        if vendors != only_rootless:
            who = "rootless engines need it true" if only_rootless else "engines of root need it false"
            findings.append(
                warning(
                    f"the vendor's settings say {found}, and {who}",
                    (host.evidence(VENDOR_SETTINGS, found, str(only_rootless).lower()),),
                    (
                        (
                            f"nvidia-ctk config --in-place --config {VENDOR_SETTINGS} "
                            f"--set nvidia-container-cli.no-cgroups={str(only_rootless).lower()}"
                        ),
                    ),
                )
            )
        else:
            fine.append(host.evidence(VENDOR_SETTINGS, found))
    if not installed and not findings:
        return [not_checked("no container engine is installed", *fine)]
    return findings or [ok("no-cgroups fits the engines", *fine)]


def _vendor_no_cgroups(host: Host) -> bool | None:
    """Return the vendor's setting, None without its file or when that cannot be understood."""
    text = host.text(VENDOR_SETTINGS)
    try:
        table = tomllib.loads(text or "").get("nvidia-container-cli", {})
    except ValueError:
        return None
    return None if text is None or not isinstance(table, dict) else bool(table.get("no-cgroups", False))
