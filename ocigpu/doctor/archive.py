"""The support archive: the facts that others need to understand a host, without its secrets.

Redaction removes too much rather than too little.
"""

import errno
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
from ocigpu.core.errors import UNUSABLE, OcigpuError, UsageError, printable
from ocigpu.core.facts import facts_to_json
from ocigpu.core.facts import to_data as settings_data
from ocigpu.doctor.findings import Finding, read_table
from ocigpu.doctor.host import Host
from ocigpu.doctor.logs import read_tail
from ocigpu.doctor.report import to_data
from ocigpu.engines.places import parse_config, read_file
from ocigpu.gpus.vendors import read_host_facts

REMOVED = "[removed]"
_TABLE = read_table("redact.toml")
_SECRET_KEY = re.compile(_TABLE["NAMES"], re.IGNORECASE)
_ENVIRONMENT = re.compile(
    r"(?:^|[_-])env(?:s|ironment)?(?:$|[_-]vars?$)|env(?:ironment)?[_-]?variables?$|Env(?:ironment)?$"
)
"""In keys of tables and lists of variables: default_env, env-vars, containerEnv."""
_WHOLE = frozenset(_TABLE["WHOLE"])
"""Tables of which only the names of entries are kept."""
MAX_LINE = 4000
"""Characters of one line: a longer one is removed, for the patterns' time grows faster than it.  Their parts are
bounded for the same reason."""


def _compile(rule: dict[str, Any]) -> tuple[re.Pattern[str], str]:
    pattern = rule["pattern"]
    for name in ("PLAIN_NAMES", "NAMES"):
        pattern = pattern.replace(f"{{{name}}}", _TABLE[name])
    flags = sum(re.RegexFlag[flag] for flag in rule.get("flags", ()))
    return re.compile(pattern, flags), rule["replacement"]


_RULES = tuple(map(_compile, _TABLE["rules"]))


def _shortened(line: str) -> str:
    return line if len(line) <= MAX_LINE else f"[line of {len(line)} characters removed]"


def _asks_for(word: Any) -> bool:
    """Tell whether a word of a command line is an option whose value, the next word, is a secret."""
    if not isinstance(word, str) or not word.startswith("-") or "=" in word:
        return False
    return word in ("-u", "-p", "-P", "--user", "--proxy-user", "-e", "--env") or bool(_SECRET_KEY.search(word))


class Redactor:
    """Removes secrets; ``removed`` lists where, "daemon.json: proxies.http-proxy"."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    def text(self, text: str, where: str) -> str:
        """Return text without what looks like a secret."""
        result = text if len(text) <= MAX_LINE else "\n".join(map(_shortened, text.split("\n")))
        for pattern, replacement in _RULES:
            result = pattern.sub(replacement, result)
        if result != text:
            self.removed.append(where)
        return result

    def data(self, value: Any, where: str) -> Any:
        """Return JSON data without secrets: by the names of keys, and by what text looks like."""
        if isinstance(value, dict):
            by_word = {key.lower(): key for key in value if isinstance(key, str)}
            name, said = value.get(by_word.get("name", by_word.get("key", ""))), by_word.get("value")
            if said and isinstance(name, str) and _SECRET_KEY.search(name):
                value = {**value, said: self._emptied(value[said], f"{where}.{name}")}
            return {
                self.text(str(key), where): self._entry(str(key), item, f"{where}.{key}") for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            before = ("", *value)
            return [(self._emptied if _asks_for(before[i]) else self.data)(item, where) for i, item in enumerate(value)]
        return self.text(value, where) if isinstance(value, str) else value

    def _entry(self, key: str, value: Any, where: str) -> Any:
        name = key.lower()
        if _ENVIRONMENT.search(key) or _ENVIRONMENT.search(name):
            return self._environment(value, where)
        if name in _WHOLE or _SECRET_KEY.search(key):
            return self._emptied(value, where)
        return self.data(value, where)

    def _environment(self, value: Any, where: str) -> Any:
        """Keep the names of variables."""
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            self.removed.append(where)
            return [f"{item.partition('=')[0]}={REMOVED}" for item in value]
        return self._emptied(value, where)

    def _emptied(self, value: Any, where: str) -> Any:
        """Keep the names of a table, and truth values."""
        if isinstance(value, dict):
            return {self.text(str(key), where): self._emptied(item, f"{where}.{key}") for key, item in value.items()}
        if value is None or isinstance(value, bool) or value in ("", [], 0):
            return value
        self.removed.append(where)
        return REMOVED


TOP = "ocigpu-doctor"
LOG_LINES = 1000
_LOG = re.compile(r"nvidia|nvrm|xid|ocigpu|nouveau|apparmor|avc:|selinux|cgroup|oom-kill|out of memory", re.IGNORECASE)


def write_archive(path: str, host: Host, findings: list[Finding]) -> list[str]:
    """Write the archive (tar, gzip; mode 0600) to ``path``, which must not exist; return the names of its members.

    Raises UsageError when the file exists or cannot be written; then no file is left.
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
        hint = "name a file that does not exist" if error.errno == errno.EEXIST else "name a file that you may write"
        raise UsageError(f"{option} {path}: {error.strerror}", hint) from error
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
        except UNUSABLE as error:
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
    """Return the parsed data of a configuration file, so its secrets can be found; raises for any other file."""
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
