"""JSON by the C code behind the standard library's ``json``, without the regular expressions that come with it.

``import json`` loads ``re`` and ``enum``: 10 ms of a container's start, where this takes less than one.  ``json``
itself does the work where the functions of :mod:`_json` are missing or have another form, and for an error's text.
"""

from ocigpu.core.errors import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

try:
    # imported here and not when needed: in a container's namespaces nothing can be imported
    from _json import encode_basestring_ascii, make_encoder, make_scanner
except ImportError:  # another Python than CPython
    make_encoder = make_scanner = None  # type: ignore[assignment,misc] # a class, or none

_SPACE = " \t\n\r"


def _unique(pairs: "list[tuple[str, Any]]") -> "dict[str, Any]":
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"duplicate key {quoted(name)}")
            seen.add(name)
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class _Context:
    """What the scanner needs: the attributes of json.JSONDecoder."""

    strict = True
    object_hook = None
    object_pairs_hook = staticmethod(_unique)
    parse_float = float
    parse_int = int
    parse_constant = staticmethod(_refuse_constant)
    memo: "dict[str, str]" = {}


def parse(text: str) -> "Any":
    """Return the value of a JSON text (RFC 8259); strict where readers differ: no duplicate keys, no NaN or infinity.

    Raises ValueError (json.JSONDecodeError, with line and column, for what is not JSON) and RecursionError.
    """
    if make_scanner is None:
        return _parse_slowly(text)
    try:
        value, end = make_scanner(_Context)(text, len(text) - len(text.lstrip(_SPACE)))  # type: ignore[arg-type] # any object with these attributes
    except (StopIteration, SystemError):  # the second where the error to raise would be one of json, not loaded
        return _parse_slowly(text)
    return _parse_slowly(text) if text[end:].strip(_SPACE) else value


def _parse_slowly(text: str) -> "Any":
    import json

    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def dump(value: "Any") -> str:
    """Return a value as compact JSON, ASCII only.

    Raises ValueError for NaN and infinities, TypeError for what JSON does not have, and RecursionError.
    """
    try:
        encoder = make_encoder({}, _refuse_type, encode_basestring_ascii, None, ":", ",", False, False, False)
    except TypeError:  # missing, or of another form: it is private to CPython
        import json

        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    return "".join(encoder(value, 0))


def _refuse_type(value: object) -> None:
    raise TypeError(f"{type(value).__name__} is not JSON")
