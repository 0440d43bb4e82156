"""Values of a CDI specification, read field by field: their rules, and their problems."""

import struct

from ocigpu.core.errors import printable, quoted, suggest
from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Where = tuple[Any, ...]
    Reader = Callable[["Found", Any, Where], Any]
    Fields = dict[str, Reader]

MAX_BYTES = 16 << 20
MAX_NODES = 2_000_000
"""Scalars, lists and objects of a document, counted after aliases are put in place."""
MAX_DEPTH = 64
"""Of YAML; JSON may be nested as deep as its parser goes, a thousand levels."""

MAX_PROBLEMS = 100


class Problem(NamedTuple):
    """One thing that is wrong: ``where`` is like "devices[3].containerEdits.mounts[0].hostPath", "" for the whole."""

    where: str
    message: str
    rule: str
    severity: str

    @property
    def text(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class EnoughError(Exception):
    """The number of errors has reached the limit of the display."""


class Found:
    """Problems found so far.  A place is a chain of pairs (outer place, name or index), rendered only when needed."""

    def __init__(self) -> None:
        self.errors: list[Problem] = []
        self.warnings: list[Problem] = []

    def error(self, where: "Where", rule: str, message: str) -> None:
        self.errors.append(Problem(_render(where), message, rule, "error"))
        if len(self.errors) >= MAX_PROBLEMS:
            raise EnoughError

    def warning(self, where: "Where", rule: str, message: str) -> None:
        if len(self.warnings) < MAX_PROBLEMS:
            self.warnings.append(Problem(_render(where), message, rule, "warning"))


def _render(where: "Where") -> str:
    parts = []
    while where:
        where, part = where
        parts.append(f"[{part}]" if isinstance(part, int) else f".{printable(str(part), 100)}")
    return "".join(reversed(parts)).removeprefix(".")


def read_object(found: Found, value: "Any", fields: "Fields", where: "Where") -> "dict[str, Any]":
    """Return an object with canonical names and read values; unknown fields are errors, nulls are left out."""
    if not isinstance(value, dict):
        found.error(where, "type", f"must be an object, not {_kind(value)}")
        return {}
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = key if key in fields else _find_field(found, value, result, key, fields, where)
        if not name or item is None:
            continue
        got = fields[name](found, item, (where, name))
        if got is not None:
            result[name] = got
    return result


def _find_field(
    found: Found, value: "dict[Any, Any]", result: "dict[str, Any]", key: "Any", fields: "Fields", where: "Where"
) -> str:
    """Return the canonical name of a field written in another case; "" after reporting a field that cannot be used."""
    text = key if isinstance(key, str) else repr(key)[:200]
    for name in fields:
        if name.lower() == text.lower():
            if name in value or name in result:
                found.error((where, name), "duplicate-field", f"given twice, also as {quoted(text)}")
                return ""
            found.warning((where, name), "field-case", f"written {quoted(text)}: some readers accept only {name}")
            return name
    near = suggest(text, fields)
    meant = f", {near}" if near else f": the fields here are {', '.join(fields)}"
    found.error(where, "unknown-field", f"unknown field {quoted(text)}{meant}")
    return ""


def require(found: Found, value: "Any", result: "dict[str, Any]", field: str, where: "Where", message: str) -> None:
    """Report a required text that is missing or empty, unless it was already refused."""
    if result.get(field) or not isinstance(value, dict):
        return
    if field in result or value.get(field) is None:
        found.error((where, field), "required", message)


def read_list(found: Found, value: "Any", read: "Reader", where: "Where") -> "list[Any]":
    """Return a list of the items that could be read."""
    if not isinstance(value, list):
        found.error(where, "type", f"must be a list, not {_kind(value)}")
        return []
    result = []
    for index, item in enumerate(value):
        got = read(found, item, (where, index))
        if got is not None:
            result.append(got)
    return result


def list_of(read: "Reader") -> "Reader":
    """Return a reader of lists whose items ``read`` reads."""
    return lambda found, value, where: read_list(found, value, read, where)


def read_text(found: Found, value: "Any", where: "Where") -> str | None:
    """Return text; the reference library turns numbers and booleans into text where it expects text."""
    if isinstance(value, str):
        if not value.isprintable():
            if "\0" in value:
                found.error(where, "text", "contains a NUL character")
            elif any("\ud800" <= character <= "\udfff" for character in value):
                found.error(where, "text", "is not valid Unicode")
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return str(value)
    if isinstance(value, float):
        text = _float_text(value)
        if text:
            return text
    found.error(where, "type", f"must be text, not {_kind(value)}")
    return None


def _float_text(value: float) -> str:
    """Return a number as Go's strconv.FormatFloat(value, 'g', -1, 32) writes it, "" if it is out of range."""
    single = _single(value)
    for digits in range(9):
        text = f"{value:.{digits}e}"
        if _single(float(text)) == single:
            break
    if not single:
        return ""
    if "e" not in text:  # NaN, infinities
        return ""
    exponent = int(text.partition("e")[2])
    return f"{float(text):.{max(digits - exponent, 0)}f}" if -5 < exponent < 6 else text


def _single(value: float) -> bytes:
    """Return the bytes of a number in single precision, none if it is out of range."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return b""


def read_path(found: Found, value: "Any", where: "Where") -> str | None:
    """Return a path; one that climbs or would disturb a terminal is an error, a relative one a warning."""
    text = read_source(found, value, where)
    if text:
        require_absolute(found, text, where)
    return text


def require_absolute(found: Found, text: str, where: "Where") -> None:
    """Warn of a relative path."""
    if text[0] != "/":
        found.warning(where, "path", f"path {quoted(text)} is not absolute")


def read_source(found: Found, value: "Any", where: "Where") -> str | None:
    """Return the source of a mount: a path, or a word such as "tmpfs"."""
    text = read_text(found, value, where)
    if not text:
        return text
    if ".." in text and ".." in text.split("/"):
        found.error(where, "path", f'path {quoted(text)} contains a ".." component')
    if not text.isprintable() and any(c < " " or c == "\x7f" for c in text) and "\0" not in text:
        found.error(where, "path", f"path {quoted(text)} contains a control character")
    return text


def integer(low: int, high: int) -> "Reader":
    """Return a reader of whole numbers of a range; 195.0 is one too, as for the reference library."""

    def read(found: Found, value: "Any", where: "Where") -> int | None:
        if isinstance(value, float) and abs(value) < 1e21 and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            found.error(where, "type", f"must be a whole number, not {_kind(value)}")
        elif not low <= value <= high:
            found.error(where, "range", f"must be a number from {low} to {high}")
        else:
            return value
        return None

    return read


def read_truth(found: Found, value: "Any", where: "Where") -> bool | None:
    """Return true or false; no number or text stands for one."""
    if isinstance(value, bool):
        return value
    found.error(where, "type", f"must be true or false, not {_kind(value)}")
    return None


def _kind(value: "Any") -> str:
    if isinstance(value, bool):
        return "true or false"
    for kind, name in ((str, "text"), (int, "a number"), (float, "a number"), (list, "a list"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return "null"
