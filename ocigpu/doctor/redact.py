"""Secrets taken out of what goes into a support archive: better one value too many than one too few."""

import re
from typing import Any

REMOVED = "[removed]"
_NAMES = (
    r"(?:pass(?:word|wd|phrase|code)?|pwd|(?:root|ssh|vnc|user|\b)pw\b|psk|(?<![a-z])pin(?![a-z])|secret|token|credential|auth|cookie|session"
    r"|signature|\bsig\b|\bcred\b|\botp\b|(?:api|private|access|client|licen[sc]e)[-_ ]?key|key\d*\b)"
)
_PLAIN_NAMES = (
    r"(?:password|passwd|passphrase|(?<=-)(?:pass|psk|pin|otp)|(?:root|ssh|vnc|user)pw"
    r"|secret[-_ ]?(?:access[-_ ]?)?key|secret|token|credentials?|api[-_ ]?key)"
)
_SECRET_KEY = re.compile(_NAMES, re.IGNORECASE)
_ENVIRONMENT = frozenset({"env", "environment", "envs", "default_env", "default-env", "runtime_env"})
_WHOLE = frozenset(
    {
        "auths",
        "auth",
        "headers",
        "header",
        "http-headers",
        "log-opts",
        "log_opts",
        "registry",
        "tls",
        "cluster-store-opts",
        "storage-opts",
    }
)
"""Tables of which only the names of entries are kept."""
MAX_LINE = 4000
"""Characters of one line: a longer one is removed, for the patterns' time grows faster than it.  Their parts are
bounded for the same reason."""
_RULES = (
    # private keys, over several lines
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
                re.DOTALL), REMOVED),
    # user and password of a URL: up to the last @ of the word
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^\s\"'<>]*@"), rf"\1{REMOVED}@"),
    # iscsi:USER:PASSWORD[:USER:PASSWORD]@SERVER (dracut.cmdline(7), netroot), where both may have any character
    (re.compile(r"\b(iscsi:)[^\s\"'<>]*@", re.IGNORECASE), rf"\1{REMOVED}@"),
    # the same without a scheme, as in proxies and for curl -u
    (re.compile(r"(?<![\w./:@-])(?!iscsi:\[)[\w.%+-]+:[^\s\"'@/]+@"), f"{REMOVED}@"),
    (re.compile(r"(\s-[up]\s+)[^\s\"'-]\S*"), rf"\1{REMOVED}"),
    # and as one word: mysql -pPASSWORD, curl -uUSER:PASSWORD
    (re.compile(r"((?:^|[\s\"'])-p=?)(?:\"[^\"]+\"|'[^']+'|[^\s\"']+)", re.MULTILINE), rf"\1{REMOVED}"),
    (re.compile(r"((?:^|[\s\"'])-u)[^\s\"':]+:[^\s\"']+", re.MULTILINE), rf"\1{REMOVED}"),
    (re.compile(r"(--(?:proxy-)?user[\s=]+[\"']?)[^\s\"':]+:[^\s\"']+"), rf"\1{REMOVED}"),
    # USER%PASSWORD of Samba and mount.cifs
    (re.compile(r"((?:\buser(?:name)?=|\s-U\s*)[^\s\"'%,]{1,64}%)[^\s\"',]+"), rf"\1{REMOVED}"),
    # hashes of crypt(5), keys of NVMe (DH-HMAC-CHAP, TLS)
    (re.compile(r"\$(?:[1567y]|2[abxy]?|gy|sha1)\$[^\s:\"',]+"), REMOVED),
    (re.compile(r"\b(DHHC-1|NVMeTLSkey-1):[^\s\"',]+"), rf"\1:{REMOVED}"),
    (re.compile(r"(//hooks\.[\w.-]+/|//[\w.-]+/(?:[\w.-]{1,64}/){0,3}webhooks?/)\S+", re.IGNORECASE), rf"\1{REMOVED}"),
    (re.compile(rf"([?&][^=&\s\"']{{0,64}}{_NAMES}[^=&\s\"']{{0,64}}=)[^&\s\"']+", re.IGNORECASE), rf"\1{REMOVED}"),
    (re.compile(r"\b((?:set-)?cookie|(?:proxy-)?authorization|x-[\w-]{0,64}(?:token|auth|key)[\w-]{0,64})(\"?\s*[:=]\s*).*",
                re.IGNORECASE), rf"\1\2{REMOVED}"),
    (re.compile(r"\b(bearer|basic)[\s:]+[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1 {REMOVED}"),
    # JSON web tokens, and tokens that say by their first letters whose they are
    (re.compile(r"\beyJ[\w-]{8,}(?:\.[\w-]+){1,2}"), REMOVED),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|nvapi-|xox[abprs]-|sk-|AKIA|ASIA|dckr_pat_"
                r"|npm_|pypi-|glsa_|dop_v1_|hv[sb]\.|ya29\.|AIza|SG\.)[\w.-]{8,}"),
     REMOVED),
    # name=value and name: value with a name that says it
    (re.compile(rf"([\w.-]{{0,64}}{_NAMES}[\w.-]{{0,64}}[\"']?\s*[:=]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;}}]+)",
                re.IGNORECASE), rf"\1{REMOVED}"),
    # and such a name with something in quotes after it
    (re.compile(rf"({_NAMES}[\w.-]{{0,64}}\W{{1,3}}(?:(?:is|was|of)\W{{1,3}})?)(\"[^\"]+\"|'[^']+')", re.IGNORECASE),
     rf"\1{REMOVED}"),
    # options of a command line, and sentences
    (re.compile(rf"((?:--?[\w-]{{0,64}}|\b\w{{0,64}}){_PLAIN_NAMES}[\"',]*\s+(?:(?:is|was|of)\s+)?[\"']?)[^\s\"'\[]+",
                re.IGNORECASE), rf"\1{REMOVED}"),
    # variables of an environment, as they appear on command lines and in lists
    (re.compile(r"(\benv(?:ironment)?[\"']?\s*[:=]\s*)(?:\[[^\[\]]*(?:\[removed\][^\[\]]*)*\]|\{[^{}]*\})",
                re.IGNORECASE), rf"\1{REMOVED}"),
    (re.compile(r"((?:^|[\s\"'])(?:-e|--env)[=\s\"',]+[\w.]+=)[^\s\"',\]]+", re.MULTILINE), rf"\1{REMOVED}"),
    (re.compile(r"^([ \t]*Environment[ \t]*=[ \t]*)\S.*", re.MULTILINE), rf"\1{REMOVED}"),
    (re.compile(r"\b([A-Z][A-Z0-9_]{2,})=(\"[^\"]*\"|'[^']*'|[^\s\"',\]}]+)"), rf"\1={REMOVED}"),
)  # fmt: skip


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
