"""The support archive: what somebody else needs to understand a host, without its secrets."""

import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from ocigpu import __version__
from ocigpu.core.errors import OcigpuError, UsageError, printable
from ocigpu.core.facts import facts_to_json
from ocigpu.core.facts import to_data as settings_data
from ocigpu.doctor.findings import Finding
from ocigpu.doctor.host import Host
from ocigpu.doctor.logs import read_tail
from ocigpu.doctor.redact import Redactor
from ocigpu.doctor.report import to_data
from ocigpu.engines.places import parse_config, read_file
from ocigpu.gpus.vendors import read_host_facts

TOP = "ocigpu-doctor"
LOG_LINES = 1000
_LOG = re.compile(r"nvidia|nvrm|xid|ocigpu|nouveau|apparmor|avc:|selinux|cgroup|oom-kill|out of memory", re.IGNORECASE)


def write_archive(path: str, host: Host, findings: list[Finding]) -> list[str]:
    """Write the archive (tar, gzip; mode 0600) to ``path``, which must not exist; return the names in it.

    Raises UsageError when the file exists or cannot be written; nothing is left then.
    """
    members, left_out = collect(host, findings)
    members["left-out.txt"] = "".join(f"{line}\n" for line in left_out) or "nothing\n"
    with open_new(path, "--archive") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in sorted(members.items()):
            content = text.encode("utf-8", "backslashreplace")
            info = tarfile.TarInfo(f"{TOP}/{name}")
            info.size, info.mode, info.mtime = len(content), 0o600, int(time.time())
            archive.addfile(info, io.BytesIO(content))
    return sorted(members)


@contextmanager
def open_new(path: str, option: str) -> Iterator[IO[bytes]]:
    """Give a new file of mode 0600 to be written; raises UsageError, and leaves nothing then, when that fails."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}", "name a file that does not exist") from error
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
    except OSError as error:
        os.unlink(path)
        raise UsageError(f"{option} {path}: {error.strerror}") from error


def collect(host: Host, findings: list[Finding]) -> tuple[dict[str, str], list[str]]:
    """Return the archive's files by name, without secrets, and a line for everything that is not in them."""
    redactor = Redactor()
    members: dict[str, str] = {"README.txt": Path(__file__).with_name("archive.txt").read_text(encoding="utf-8")}
    missing: list[str] = []

    def add(name: str, read: Callable[[], Any]) -> None:
        try:
            value = read()
        except OcigpuError as error:
            missing.append(f"not there: {name}: {error.message}")
            return
        except OSError as error:
            missing.append(f"not there: {name}: {error.filename or ''} {error.strerror}")
            return
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            missing.append(f"not there: {name}: {type(error).__name__}: not understood, so it might hold secrets")
            return
        if isinstance(value, str):
            members[name] = redactor.text(value, name)
        else:
            members[name] = json.dumps(redactor.data(value, name), indent=2, default=str) + "\n"

    add("report.json", lambda: to_data(host, findings))
    add("facts.json", lambda: _facts(host))
    add("settings.json", lambda: settings_data(host.settings))
    add("versions.json", lambda: read_versions(host))
    add("kernel.json", lambda: _kernel(host))
    for path in _listed(lambda: _engine_paths(host), "engines", missing):
        add(f"engines/{_flat(path)}.json", partial(_engine_file, host, path))
    for file in _listed(lambda: host.specs.files, "cdi", missing):
        if file.problem:
            missing.append(f"not there: cdi/{_flat(file.path)}: {file.problem}")
        else:
            add(f"cdi/{_flat(file.path)}.json", partial(getattr, file, "spec"))
    add("logs/kernel.txt", lambda: _lines([line for line in host.kernel_log if _LOG.search(line)]))
    for name in ("runtime_log", "hook_log"):
        path = getattr(host.settings, name)
        if path:
            add(f"logs/{name.replace('_', '-')}.txt", partial(_log_file, host, path))
    left_out = [redactor.text(line, "left-out.txt") for line in missing]
    return members, [*left_out, *(f"removed: {where}" for where in dict.fromkeys(redactor.removed))]


def _listed(read: Callable[[], Iterable[Any]], name: str, missing: list[str]) -> list[Any]:
    try:
        return list(read())
    except (OcigpuError, OSError) as error:
        missing.append(f"not there: {name}: {error}")
        return []


def _engine_paths(host: Host) -> dict[str, None]:
    return dict.fromkeys(path for status in host.engines for path in status.files)


def _flat(path: str) -> str:
    return path.strip("/").replace("/", "_")


def _facts(host: Host) -> Any:
    return facts_to_json(read_host_facts(host.settings))


def _engine_file(host: Host, path: str) -> Any:
    """Return the data of a configuration file: as data its secrets can be told apart; raises for what is not."""
    return parse_config(path, read_file(host.root or "/", path) or "")


def read_versions(host: Host) -> dict[str, Any]:
    """Return the versions of programs, kernel and system."""
    return {
        "ocigpu": __version__,
        "python": sys.version,
        "machine": platform.machine(),
        "kernel": host.kernel_release,
        "system": host.system_names,
        "engines": host.engine_releases,
        "driver": host.driver_version,
        "libraries": host.library_versions,
    }


def _kernel(host: Host) -> dict[str, Any]:
    def lines(path: str) -> list[str]:
        try:
            return (host.text(path) or "").splitlines()
        except OcigpuError as error:
            return [error.message]

    mounts = lines("/proc/self/mountinfo")
    return {
        "cmdline": lines("/proc/cmdline"),
        "cgroup": lines("/proc/self/cgroup"),
        "cgroup controllers": lines("/sys/fs/cgroup/cgroup.controllers"),
        "cgroups": lines("/proc/cgroups"),
        "cgroup mounts": [line for line in mounts if " - cgroup" in line],
        "security modules": lines("/sys/kernel/security/lsm"),
        "devices": lines("/proc/devices"),
        "modules": [line for line in lines("/proc/modules") if line.startswith(("nvidia", "nouveau", "vfio"))],
        "user namespaces": lines("/proc/sys/user/max_user_namespaces"),
    }


def _lines(lines: list[str]) -> str:
    return "".join(f"{printable(line)}\n" for line in lines[-LOG_LINES:])


def _log_file(host: Host, path: str) -> str:
    return _lines(read_tail(host.find(path)))
