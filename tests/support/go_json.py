"""How a low-level runtime written in Go reads config.json: a decoder made from the documentation of encoding/json.

Shares no code with the product and none with Python's ``json``, so that two readers can be compared.  What it follows:
https://pkg.go.dev/encoding/json#Unmarshal (keys "ignoring case", null, slices, wrong types, overflow, invalid UTF-8 and
surrogates) and https://pkg.go.dev/unicode#SimpleFold ("s" also for U+017F, "k" also for U+212A), RFC 8259 for the text,
and for the types runtime-spec's specs-go/config.go, those parts of it that say which devices a container gets.
"""

import re
from typing import Any

STRING, BOOL, INT64, UINT32 = "string", "bool", "int64", "uint32"
RANGES = {INT64: (-(1 << 63), (1 << 63) - 1), UINT32: (0, (1 << 32) - 1)}

Type = str | dict[str, Any] | list[Any] | tuple[Any, ...]
"""A scalar's name, a struct ({field: type}), a slice ([type]) or a map of text to something ((type,))."""

_RULE = {"allow": BOOL, "type": STRING, "major": INT64, "minor": INT64, "access": STRING}
_DEVICE = {
    "path": STRING,
    "type": STRING,
    "major": INT64,
    "minor": INT64,
    "fileMode": UINT32,
    "uid": UINT32,
    "gid": UINT32,
}
_MAPPING = {"containerID": UINT32, "hostID": UINT32, "size": UINT32}
_HOOK = {"path": STRING, "args": [STRING], "env": [STRING], "timeout": INT64}
_SETS = {name: [STRING] for name in ("bounding", "effective", "inheritable", "permitted", "ambient")}
_STAGES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
SPEC: Type = {
    "ociVersion": STRING,
    "process": {
        "terminal": BOOL,
        "user": {"uid": UINT32, "gid": UINT32, "additionalGids": [UINT32]},
        "args": [STRING],
        "env": [STRING],
        "cwd": STRING,
        "capabilities": _SETS,
        "noNewPrivileges": BOOL,
    },
    "root": {"path": STRING, "readonly": BOOL},
    "hostname": STRING,
    "mounts": [{"destination": STRING, "type": STRING, "source": STRING, "options": [STRING]}],
    "hooks": {name: [_HOOK] for name in _STAGES},
    "annotations": (STRING,),
    "linux": {
        "uidMappings": [_MAPPING],
        "gidMappings": [_MAPPING],
        "resources": {"devices": [_RULE]},
        "cgroupsPath": STRING,
        "namespaces": [{"type": STRING, "path": STRING}],
        "devices": [_DEVICE],
        "rootfsPropagation": STRING,
        "maskedPaths": [STRING],
        "readonlyPaths": [STRING],
    },
}


class GoError(Exception):
    """The runtime would refuse the document: no container, whatever another reader says."""


class Text(str):
    """A string of the document, told from what stands there without quotes."""


_TOKEN = re.compile(
    r'[ \t\n\r]*(?:(?P<mark>[{}\[\],:])|"(?P<text>(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)"'
    r"|(?P<word>true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?))"
)
_ESCAPE = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\(.)")
_LETTERS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def decode(document: bytes) -> Any:
    """Return what a runtime knows of a document: every field of :data:`SPEC` by its own name, those that are set.

    Raises GoError for what encoding/json refuses for these types.
    """
    tokens = _tokens(document.decode("utf-8", "replace"))
    value = _parse(tokens, next(tokens), 0)
    if next(tokens) != "":
        raise GoError("something behind the value")
    return _convert(value, SPEC, None)


def fold(name: str) -> str:
    """Return a text that all spellings of a key share (ASCII keys only)."""
    return name.translate({0x17F: "s", 0x212A: "k"}).translate({code: code + 32 for code in range(65, 91)})


def _tokens(text: str) -> Any:
    position = 0
    while match := _TOKEN.match(text, position):
        position = match.end()
        if match["text"] is not None:
            yield Text(_ESCAPE.sub(_unescape, match["text"]) if "\\" in match["text"] else match["text"])
        else:
            yield match["mark"] or match["word"]
    if text[position:].strip(" \t\n\r"):
        raise GoError(f"no JSON at {position}")
    while True:
        yield ""


def _unescape(match: re.Match[str]) -> str:
    high, low, unit, letter = match.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if unit:
        return "\ufffd" if 0xD800 <= int(unit, 16) < 0xE000 else chr(int(unit, 16))
    return _LETTERS.get(letter, letter)


def _parse(tokens: Any, token: Any, depth: int) -> Any:
    """Return a Text, a word, a list, or a tuple of (key, value) for an object: nothing is lost that is repeated."""
    if depth > 10_000:
        raise GoError("exceeded max depth")
    if isinstance(token, Text) or (token and token not in "{}[],:"):
        return token
    if token not in ("{", "["):
        raise GoError(f"unexpected {token!r}")
    items: list[Any] = []
    end = "}" if token == "{" else "]"
    first = following = next(tokens)
    while isinstance(following, Text) or following != end:
        if following is not first:
            if isinstance(following, Text) or following != ",":
                raise GoError("expected a comma")
            following = next(tokens)
        if end == "}":
            if not isinstance(following, Text):
                raise GoError("expected a key")
            colon = next(tokens)
            if isinstance(colon, Text) or colon != ":":
                raise GoError("expected a colon")
            items.append((str(following), _parse(tokens, next(tokens), depth + 1)))
        else:
            items.append(_parse(tokens, following, depth + 1))
        first, following = None, next(tokens)
    return tuple(items) if end == "}" else items


def _convert(value: Any, kind: Type, known: Any) -> Any:
    """Return a value as Go has it in a variable of this type that holds ``known`` (None: its zero value)."""
    if not isinstance(value, Text) and value == "null":
        return known if isinstance(kind, str) else None
    if isinstance(kind, str):
        return _scalar(value, kind)
    if isinstance(kind, list):
        if not isinstance(value, list):
            raise GoError("not an array")
        old = [*(known or []), *[None] * len(value)]  # a list in a list's place: its elements are not cleared first
        return [_convert(item, kind[0], before) for item, before in zip(value, old, strict=False)]
    if not isinstance(value, tuple):
        raise GoError("not an object")
    result = dict(known or {})
    for name, item in value:
        if isinstance(kind, tuple):
            result[name] = _convert(item, kind[0], None) or ""
            continue
        field = name if name in kind else next((other for other in kind if fold(other) == fold(name)), "")
        if field:
            result[field] = _convert(item, kind[field], result.get(field))
    return result


def _scalar(value: Any, kind: str) -> Any:
    if kind == STRING and isinstance(value, Text):
        return str(value)
    if kind == BOOL and not isinstance(value, Text) and value in ("true", "false"):
        return value == "true"
    if kind in RANGES and isinstance(value, str) and not isinstance(value, Text) and re.fullmatch("-?[0-9]+", value):
        low, high = RANGES[kind]
        if kind == UINT32 and value.startswith("-"):
            raise GoError("a sign where there is none")
        if low <= int(value) <= high:
            return int(value)
    raise GoError(f"not a {kind}")
