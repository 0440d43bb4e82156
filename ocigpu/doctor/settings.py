"""Checks of ocigpu itself: its settings, its programs, and the runtime below it."""

import os
import re
import shlex
import tomllib
from contextlib import suppress

from ocigpu.core.config_json import OWN_RUNTIMES
from ocigpu.core.errors import OcigpuError, printable
from ocigpu.core.gate import permitted_capabilities
from ocigpu.core.settings import CAPABILITIES, DEFAULT_PATH, KEYS, Settings, parse_settings
from ocigpu.doctor.files import PROGRAM_DIRECTORIES
from ocigpu.doctor.findings import Evidence, Finding, not_checked, ok, say
from ocigpu.doctor.host import DIRECTORIES, Host
from ocigpu.doctor.repairs import find_repair
from ocigpu.gpus.tree import read_text
from ocigpu.system.settings_file import parse_toml

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
    owner: tuple[str, ...] = ()
    advice = without = ""
    check = f"ocigpu config check {shlex.quote(path)}"
    if failure.code == "OCIGPU-SET-3":
        both = shlex.join([path, os.path.dirname(path)])
        owner = (f"chown root:root {both}", f"chmod go-w {both}")
    elif failure.code == "OCIGPU-SET-1" and os.path.lexists(path):
        without = f"# correct the file, or do without: mv {shlex.quote(path)} {shlex.quote(path)}.bad"
    else:
        advice = failure.hint and f"# {failure.hint}"
        check = check if os.path.lexists(path) else ""
    cause = failure.message.removeprefix("settings ").removeprefix(f"{path}: ")
    seen = Evidence(path, printable(cause, 300), "usable settings")
    if repair := _repair(path, failure.code, cause):
        check = advice = ""
    fixes = {"owner": owner, "repair": repair, "advice": advice, "check": check, "without": without}
    return [say("settings-unusable.unusable", seen, code=failure.code, cause=cause, **fixes)]


def _repair(path: str, code: str, cause: str) -> str:
    """Return the command after which a settings file can be used, with the default of what is wrong; "" for none."""
    key = cause.partition(": ")[0]
    if code == "OCIGPU-SET-2" and any(key == known.name for known in KEYS):
        words = shlex.join(["ocigpu", "config", "unset", key, "--config", path])
        return f"{words}  # its default holds then: ocigpu config keys"
    repair = ""
    with suppress(OSError, OcigpuError):
        text = read_text(path) if code == "OCIGPU-SET-1" and os.path.isfile(path) else None
        repair = find_repair(
            os.path.realpath(path), text or "", lambda text: parse_settings(parse_toml(text.encode()), path)
        )
    return repair and f"{repair}  # the defaults of these lines hold then"


def _unset(host: Host, key: str) -> str:
    """Return the command that takes a key out of the settings."""
    return shlex.join(["ocigpu", "config", "unset", key, "--config", host.settings.path or host.path(DEFAULT_PATH)])


def check_refusals(host: Host) -> list[Finding]:
    """Do the settings refuse what containers request?"""
    if host.settings_error is not None:
        return [not_checked("the settings cannot be used: see settings-unusable")]
    settings = host.settings
    path = settings.path or host.path(DEFAULT_PATH)
    findings = []
    if not settings.accept_nvidia_visible_devices_envvar_when_unprivileged:
        seen = Evidence(path, "accept-nvidia-visible-devices-envvar-when-unprivileged = false", "true")
        findings.append(say("settings-refuse.variables", seen, path=path))
    permitted = [name for name in CAPABILITIES if name in permitted_capabilities(settings)]
    refused = [name for name in CAPABILITIES if name not in permitted]
    if refused:
        seen = Evidence(path, f'supported-driver-capabilities = "{",".join(permitted)}"', ",".join(CAPABILITIES))
        values = {"permitted": ", ".join(permitted) or "none", "refused": " or ".join(refused), "path": path}
        findings.append(say("settings-refuse.capabilities", seen, **values))
    if not settings.path:
        return [not_checked("there is no settings file: the defaults refuse no request")]
    return findings or [ok("the settings refuse no request of a container", Evidence(path, "as wide as the defaults"))]


def _stubs(host: Host) -> dict[str, str]:
    """Return the name and path of each program of ocigpu."""
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
        found = host.evidence(path, f"runs {interpreter}" if interpreter else "there")
        if not host.program(path):
            seen = host.evidence(path, "is not executable", "a program")
            findings.append(say("programs-broken.mode", seen, path=path, quoted=shlex.quote(host.path(path))))
        elif interpreter and not host.program(interpreter):
            gone = host.evidence(interpreter, "none", "a program")
            findings.append(say("programs-broken.interpreter", found, gone, path=path, interpreter=interpreter))
        else:
            fine.append(found)
    hook, settings = host.settings.hook_path, host.settings.path
    if hook and not host.program(hook):
        named = Evidence(settings, f"hook.path = {hook}", "a program")
        unset = _unset(host, "hook.path") if "ocigpu-hook" in stubs else ""
        values = {"hook": hook, "unset": unset or f"# remove hook.path from {settings}, or install ocigpu again"}
        findings.append(say("programs-broken.hook", named, host.evidence(hook, "none"), **values))
    if findings:
        return findings
    absent = " and ".join(name for name in ("ocigpu-runtime", "ocigpu-hook") if name not in stubs)
    if absent:
        gaps = f"no {absent.replace(' and ', ' and no ')}"
        wanted = Evidence(", ".join(DIRECTORIES), gaps, "the programs that engines run")
        return [say("programs-broken.absent", wanted, *fine, names=absent)]
    return [ok("ocigpu's programs and their Python are installed", *fine)]


def check_runtime(host: Host) -> list[Finding]:
    """Is there a low-level runtime?"""
    wanted = host.settings.runtime_runtimes
    for name in wanted:
        found = host.command_path(name)
        if found:
            return [ok(f"{name} is the low-level runtime", host.evidence(found, "there"))]
    own = host.program(*(path for path in OWN_RUNTIMES if os.path.basename(path) in wanted))
    if own:
        return [ok("the engine's own is the low-level runtime", host.evidence(own, "in the PATH of its containerd"))]
    if not host.has_system:
        return [not_checked("the simulated host has no low-level runtime")]
    evidence = Evidence(", ".join(PROGRAM_DIRECTORIES), f"none of {', '.join(wanted)}", "one of them")
    usual = Settings().runtime_runtimes
    what = "none" if wanted == usual else "named"
    path = host.settings.path or DEFAULT_PATH
    unset = f"# correct runtime.runtimes in {path}, or install what it names"
    if there := next(filter(None, map(host.command_path, usual)), ""):
        unset = f"{_unset(host, 'runtime.runtimes')}  # then {there} is used"
    return [say(f"runtime-missing.{what}", evidence, path=path, names=", ".join(wanted), unset=unset)]


def check_no_cgroups(host: Host) -> list[Finding]:
    """Fits no-cgroups to who runs containers?"""
    findings, fine = [], []
    installed = [item for item in host.engines if item.installed]
    rootful = [item for item in installed if item.flavour != "rootless"]
    path = host.settings.path or host.path(DEFAULT_PATH)
    fine.append(Evidence(path, f"no-cgroups = {str(host.settings.no_cgroups).lower()}", "false"))
    if host.settings.no_cgroups:
        seen = Evidence(path, "no-cgroups = true", "false")
        findings.append(say("no-cgroups-mismatch.ours", seen, unset=_unset(host, "no-cgroups")))
    vendors = _vendor_no_cgroups(host)
    uses = any("nvidia-container-runtime" in entry.path for item in installed for entry in item.runtimes)
    if uses and vendors is not None:
        only_rootless = bool(installed) and not rootful
        seen = host.evidence(VENDOR_SETTINGS, f"no-cgroups = {str(vendors).lower()}", str(only_rootless).lower())
        if vendors != only_rootless:
            what = "rootless" if only_rootless else "root"
            findings.append(say(f"no-cgroups-mismatch.{what}", seen, path=VENDOR_SETTINGS))
        else:
            fine.append(seen._replace(wanted=""))
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
