"""What runs in the forked child that reads YAML: the only module that imports yaml.

Data is built from the parser's events, so that everything is counted before it is built.  Plain scalars mean what they
mean to the reference library's reader (go.yaml.in/yaml/v2 resolve.go: YAML 1.1 with octal 0666 and 0o666, yes and no;
no dates, no numbers of base 60).
"""

import json
import os
import re
import resource

from ocigpu.cdi.values import MAX_BYTES, MAX_DEPTH, MAX_NODES
from ocigpu.core.errors import quoted
from ocigpu.system.child import OVERFLOW_ID, be_child, drop_rights, end_with, isolate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Any

MEMORY = 1 << 30
"""Bytes that the child may use on top of what it has when it starts."""

_TAG = "tag:yaml.org,2002:"
_WORDS = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
}
_FIRST = frozenset("+-.0123456789yYnNtTfFoO~")
"""First characters of plain scalars that may be something else than text."""
_INTEGER = re.compile(r"([-+]?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0[oO]?([0-7]+)|(0|[1-9][0-9]*))")
_BASES = ((2, 16), (3, 2), (4, 8), (5, 10))
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_MAX_NUMBER = 400
"""Characters of a number; longer ones are text, as those out of range are."""


class RefusedError(Exception):
    """The document is not accepted; the text states where and why."""

    def __init__(self, mark: "Any", cause: str) -> None:
        place = f"line {mark.line + 1} column {mark.column + 1}: " if mark is not None else ""
        super().__init__(place + cause)


class _Merge:
    """The key "<<"."""


class _Frame:
    """A list or object that is being built; ``key`` is the text that waits for its value, None for none."""

    def __init__(self, container: "Any", anchor: str | None, nodes: int, size: int) -> None:
        self.container = container
        self.anchor = anchor
        self.nodes = nodes
        self.size = size
        self.key: str | type[_Merge] | None = None
        self.merged: list[dict[str, Any]] | None = None


def main(pipe: str, parent: str, file: str, seconds: str, places: str) -> None:
    """Be the child of :mod:`ocigpu.cdi.document` in a program that it has executed; never returns.

    ``file``: a descriptor with the text.  ``places``: in lines; none for the data.
    """
    text = os.pread(int(file), MAX_BYTES, 0)
    wanted = set(places.split("\n")) if places else None
    be_child(lambda pipe: answer_in_child(int(parent), pipe, text, float(seconds), wanted), int(pipe))


def answer_in_child(
    parent: int, pipe: int, text: bytes, seconds: float, places: "Container[str] | None" = None
) -> bytes:
    """Return, as JSON, {"data": ...}, {"error": sentence} or {"missing": why yaml cannot be imported}.

    The data is that of the document or, with ``places``, their lines (:func:`find_lines`).  Beside it: "more" with the
    line at which something follows the first document, if anything does.

    Gives up root, ends with ``parent``, and takes at most ``seconds`` of processor time and 1 GiB of memory.
    """
    isolate(pipe)
    try:
        import yaml
    except ImportError as error:
        return _dump({"missing": str(error)})
    _restrict(seconds)
    try:
        drop_rights(OVERFLOW_ID, OVERFLOW_ID)
        end_with(parent)
        return _dump(_answer(yaml, text) if places is None else {"data": find_lines(yaml, text, places)})
    except MemoryError:
        return b'{"error":"it needs too much memory"}'


def _restrict(seconds: float) -> None:
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for kind, limit in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, used + MEMORY),
    ):
        hard = resource.getrlimit(kind)[1]
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))


def _answer(yaml: "Any", text: bytes) -> "dict[str, Any]":
    more: list[int] = []
    try:
        data = build(yaml, text, more=more)
        return {"data": data, "more": more[0]} if more else {"data": data}
    except RefusedError as error:
        return {"error": str(error)}


def _dump(answer: "dict[str, Any]") -> bytes:
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def build(yaml: "Any", text: bytes, may_be_empty: bool = False, more: list[int] | None = None) -> "Any":
    """Return the data of one YAML document, from the events of libyaml's parser or else of PyYAML's own.

    None for no document, where it ``may_be_empty``.  ``more``: what follows the first document is not read, as the
    reference library does not (go.yaml.in/yaml/v2 Unmarshal); gets its line.  Raises RefusedError.
    """
    try:
        return _build(yaml, text, may_be_empty, more)
    except yaml.MarkedYAMLError as error:
        raise RefusedError(error.problem_mark, str(error.problem)) from error
    except yaml.YAMLError as error:
        raise RefusedError(None, " ".join(str(error).split())) from error
    except (MemoryError, RecursionError) as error:
        raise RefusedError(None, "it needs too much memory") from error


def _build(yaml: "Any", text: bytes, may_be_empty: bool, more: list[int] | None) -> "Any":
    parser = (yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)(text)
    events = yaml.events
    handlers = {
        events.ScalarEvent: _Builder.scalar,
        events.AliasEvent: _Builder.alias,
        events.SequenceStartEvent: _Builder.start_list,
        events.MappingStartEvent: _Builder.start_object,
        events.SequenceEndEvent: _Builder.end,
        events.MappingEndEvent: _Builder.end,
        events.DocumentStartEvent: _Builder.start_document,
    }
    builder = _Builder()
    while (event := parser.get_event()) is not None:
        handler = handlers.get(type(event))
        if handler is not None:
            handler(builder, event)
        elif more is not None and isinstance(event, events.DocumentEndEvent):
            more += _next_line(yaml, parser)
            break
    if not (builder.documents or may_be_empty):
        raise RefusedError(None, "no data")
    return builder.result


def find_lines(yaml: "Any", text: bytes, places: "Container[str]") -> dict[str, int]:
    """Return the lines of places such as "devices[3].containerEdits" in the first document."""
    parser = (yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)(text)
    lines: dict[str, int] = {}
    try:
        _find_lines(yaml.events, parser, places, lines)
    except yaml.YAMLError:  # earlier findings count
        return lines
    return lines


def _find_lines(events: "Any", parser: "Any", places: "Container[str]", lines: dict[str, int]) -> None:
    stack: list[list[Any]] = []  # of [place, None for a list, else the key that waits or "", elements so far]
    while (event := parser.get_event()) is not None and not isinstance(event, events.DocumentEndEvent):
        if isinstance(event, events.CollectionEndEvent):
            stack.pop()
        elif isinstance(event, events.NodeEvent):
            top: list[Any] = stack[-1] if stack else ["", "?", 0]
            if top[1] == "":
                top[1] = str(getattr(event, "value", "?")) or "?"
                continue
            place = ""
            if stack:
                place = f"{top[0]}[{top[2]}]" if top[1] is None else f"{top[0]}.{top[1]}".strip(".")
            top[1:] = [top[1] and "", top[2] + 1]
            if place in places:
                lines.setdefault(place, event.start_mark.line + 1)
            if isinstance(event, events.CollectionStartEvent):
                stack.append([place, None if isinstance(event, events.SequenceStartEvent) else "", 0])


def _next_line(yaml: "Any", parser: "Any") -> list[int]:
    """Return the line at which something follows a document, if anything does."""
    try:
        event = parser.get_event()
    except yaml.MarkedYAMLError as error:
        return [error.problem_mark.line + 1]
    return [] if isinstance(event, yaml.events.StreamEndEvent) else [event.start_mark.line + 1]


class _Builder:
    """The data built so far, with the count of its nodes and characters after aliases are put in place."""

    def __init__(self) -> None:
        self.result: Any = None
        self.documents = 0
        self._stack: list[_Frame] = []
        self._anchors: dict[str, tuple[Any, int, int]] = {}
        self._nodes = 0
        self._size = 0

    def start_document(self, event: "Any") -> None:
        self.documents += 1
        if self.documents > 1:
            raise RefusedError(event.start_mark, "a second document, and a specification is one")

    def scalar(self, event: "Any") -> None:
        self._count(event, 1, len(event.value))
        if event.value == "<<" and event.implicit[0] and self._wants_key():
            self._stack[-1].key = _Merge
            return
        value = _scalar(event)
        if event.anchor is not None:
            self._anchors[event.anchor] = value, 1, len(event.value)
        self._put(event, value)

    def alias(self, event: "Any") -> None:
        if event.anchor not in self._anchors:
            raise RefusedError(event.start_mark, f"alias {quoted(event.anchor)} of nothing before it")
        value, nodes, size = self._anchors[event.anchor]
        self._count(event, nodes, size)
        self._put(event, value)

    def start_list(self, event: "Any") -> None:
        self._start(event, [], "seq")

    def start_object(self, event: "Any") -> None:
        self._start(event, {}, "map")

    def _start(self, event: "Any", container: "Any", tag: str) -> None:
        if event.tag not in (None, "!", _TAG + tag):
            raise RefusedError(event.start_mark, f"tag {quoted(event.tag)} is not supported")
        if len(self._stack) >= MAX_DEPTH:
            raise RefusedError(event.start_mark, f"nested deeper than {MAX_DEPTH}")
        if self._wants_key():
            raise RefusedError(event.start_mark, "a key that is not text")
        self._stack.append(_Frame(container, event.anchor, self._nodes, self._size))
        self._count(event, 1, 0)

    def _wants_key(self) -> bool:
        return bool(self._stack) and self._stack[-1].key is None and isinstance(self._stack[-1].container, dict)

    def end(self, event: "Any") -> None:
        frame = self._stack.pop()
        for merged in frame.merged or ():
            for key, value in merged.items():
                frame.container.setdefault(key, value)
        if frame.anchor is not None:
            self._anchors[frame.anchor] = frame.container, self._nodes - frame.nodes, self._size - frame.size
        self._put(event, frame.container)

    def _count(self, event: "Any", nodes: int, size: int) -> None:
        self._nodes += nodes
        self._size += size
        if self._nodes > MAX_NODES:
            raise RefusedError(event.start_mark, f"more than {MAX_NODES} values, counting each alias in full")
        if self._size > MAX_BYTES:
            raise RefusedError(event.start_mark, f"more than {MAX_BYTES >> 20} MiB of text, counting each alias")

    def _put(self, event: "Any", value: "Any") -> None:
        if not self._stack:
            self.result = value
            return
        frame = self._stack[-1]
        if isinstance(frame.container, list):
            frame.container.append(value)
        elif frame.key is None:
            frame.key = _key(event, value)
            if frame.key in frame.container:
                raise RefusedError(event.start_mark, f"duplicate key {quoted(str(frame.key))}")
        elif isinstance(frame.key, str):
            frame.container[frame.key] = value
            frame.key = None
        else:
            if frame.merged is not None:
                raise RefusedError(event.start_mark, 'duplicate key "<<"')
            frame.merged = value if isinstance(value, list) else [value]
            if not all(isinstance(item, dict) for item in frame.merged):
                raise RefusedError(event.start_mark, 'the value of "<<" is not an object or a list of objects')
            frame.key = None


def _key(event: "Any", value: "Any") -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    raise RefusedError(event.start_mark, "a key that is not text")


def _scalar(event: "Any") -> "Any":
    tag, text = event.tag, event.value
    if tag is None or tag == "!":
        return resolve(event, text) if tag is None and event.implicit[0] else text
    name = tag.removeprefix(_TAG)
    if name == "str":
        return text
    value = resolve(event, text)
    if name == "float" and type(value) is int:
        return float(value)
    kinds = {"int": int, "float": float, "bool": bool, "null": type(None)}
    if kinds.get(name) is not type(value):
        raise RefusedError(event.start_mark, f"tag {quoted(tag)} is not supported, or not for {quoted(text)}")
    return value


def resolve(event: "Any", text: str) -> "Any":
    """Return the value of a plain scalar; raises RefusedError for infinities and NaN."""
    if text and text[0] not in _FIRST:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _NOT_FINITE.fullmatch(text):
        raise RefusedError(event.start_mark, f"{text} is not a number of JSON")
    if len(text) > _MAX_NUMBER or text[0] not in "+-.0123456789":
        return text
    plain = text if text[0] == "." else text.replace("_", "")
    if match := _INTEGER.fullmatch(plain):
        for group, base in _BASES:
            if match[group]:
                number = int(match[1] + match[group], base)
                if -(1 << 63) <= number < 1 << (63 if match[1] == "+" else 64):
                    return number
    if _FLOAT.fullmatch(plain):
        value = float(plain)
        if abs(value) != float("inf"):
            return value
    return text
