"""Secrets taken out of what goes into a support archive: better one value too many than one too few."""

import re
from typing import Any

from ocigpu.doctor.findings import read_table

REMOVED = "[removed]"
_TABLE = read_table("redact.toml")
_SECRET_KEY = re.compile(_TABLE["NAMES"], re.IGNORECASE)
_ENVIRONMENT = frozenset({"env", "environment", "envs", "default_env", "default-env", "runtime_env"})
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
    return word in ("-u", "-p", "--user", "--proxy-user", "-e", "--env") or bool(_SECRET_KEY.search(word))


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
            if isinstance(name := value.get("name"), str) and "value" in value and _SECRET_KEY.search(name):
                value = {**value, "value": self._emptied(value["value"], f"{where}.{name}")}
            return {
                self.text(str(key), where): self._entry(str(key), item, f"{where}.{key}") for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            before = ("", *value)
            return [(self._emptied if _asks_for(before[i]) else self.data)(item, where) for i, item in enumerate(value)]
        return self.text(value, where) if isinstance(value, str) else value

    def _entry(self, key: str, value: Any, where: str) -> Any:
        name = key.lower()
        if name in _ENVIRONMENT:
            return self._environment(value, where)
        if name in _WHOLE or _SECRET_KEY.search(key):
            return self._emptied(value, where)
        return self.data(value, where)

    def _environment(self, value: Any, where: str) -> Any:
        """Keep the names of variables."""
        if isinstance(value, list):
            self.removed.append(where)
            return [f"{str(item).partition('=')[0]}={REMOVED}" for item in value]
        return self._emptied(value, where)

    def _emptied(self, value: Any, where: str) -> Any:
        """Keep the names of a table, and truth values."""
        if isinstance(value, dict):
            return {self.text(str(key), where): self._emptied(item, f"{where}.{key}") for key, item in value.items()}
        if value is None or isinstance(value, bool) or value in ("", [], 0):
            return value
        self.removed.append(where)
        return REMOVED
