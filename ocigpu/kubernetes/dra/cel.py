"""Selectors in CEL, evaluated by cel-python with the additions of Kubernetes that it lacks.

The functions that Kubernetes adds are those of apiserver's CEL libraries (quantity, semver, regex) and of cel-go's
ext.Strings; optional fields are cel-go's OptionalTypes.  An expression that needs anything else cannot be evaluated
here, which does not count as false.
"""

import re
import sys
from functools import lru_cache
from typing import Any

from ocigpu.core.errors import HostError, how_to_install
from ocigpu.kubernetes.cluster.quantity import parse_quantity

MAX_EXPRESSION = 10 << 10
"""Bytes of a selector (CELSelectorExpressionMaxLength)."""
_SAME_IN_KUBERNETES = ("no such member in mapping", "no such key", "divide by zero", "match error", " is no ")
"""Errors that a selector has in a cluster as well."""


class Unjudged(str):
    """Why an expression cannot be judged here: cel-python lacks something of it."""

    __slots__ = ()


class Number(tuple[Any, ...]):
    """A quantity or version, compared as its parts."""

    __slots__ = ()


class _Optional(tuple[Any, ...]):
    """A value that may be missing."""

    __slots__ = ()


def celpy() -> Any:
    """Return cel-python; raises HostError (OCIGPU-DRA-6) where it is not installed."""
    try:
        import celpy as library
    except ImportError as error:
        what = "selectors need cel-python, which is not installed"
        raise HostError("OCIGPU-DRA-6", what, how_to_install("kubernetes")) from error
    return library


def run(expression: str, activation: "dict[str, Any]") -> "bool | str | Unjudged":
    """Return the value of an expression, or its error as text; as in Kubernetes, a missing attribute is an error.

    Raises HostError (OCIGPU-DRA-6) without cel-python.
    """
    library = celpy()
    if len(expression) > MAX_EXPRESSION:
        return Unjudged(f"more than {MAX_EXPRESSION} characters")
    try:
        return bool(_program(expression).evaluate(activation))
    except (library.CELParseError, RecursionError):
        return Unjudged("cel-python does not understand it")
    except Exception as error:  # noqa: BLE001 - a user's selector may make the library raise anything
        text = str(error.args[0] if error.args else error).partition(" (in activation")[0]
        return text if any(part in text for part in _SAME_IN_KUBERNETES) else Unjudged(text)


def quantity(text: Any) -> Number:
    """Return a quantity; raises ValueError."""
    number = parse_quantity(text)
    if number is None:
        raise ValueError(f"{text} is not a quantity")
    return Number((number,))


def semver(text: Any) -> Number:
    """Return a semantic version; raises ValueError."""
    core, _, rest = str(text).partition("-")
    parts = core.partition("+")[0].split(".")
    if len(parts) != 3 or not all(re.fullmatch("[0-9]{1,18}", part) for part in parts):
        raise ValueError(f"{text} is not a semantic version")
    return Number((*map(int, parts), not rest, rest))


def _is(make: Any, text: Any) -> bool:
    try:
        make(text)
    except ValueError:
        return False
    return True


def _compare(one: Any, two: Any) -> Any:
    return celpy().celtypes.IntType((one > two) - (one < two))


def _find(text: Any, pattern: Any) -> Any:
    import re2  # cel-python's own: its time is linear in the text, as in Go

    found = re2.search(str(pattern), str(text))
    return celpy().celtypes.StringType(found.group(0) if found else "")


def _split(text: Any, mark: Any) -> Any:
    types = celpy().celtypes
    parts = str(text).split(str(mark)) if mark else list(str(text))
    return types.ListType([types.StringType(part) for part in parts])


def _field(value: Any, name: Any) -> _Optional:
    """Return an entry of a map or list, or of an optional one, if it exists."""
    if isinstance(value, _Optional):
        return _field(value[0], name) if value else value
    try:
        return _Optional((value[name],))
    except (LookupError, TypeError, ValueError):
        return _Optional()


@lru_cache(maxsize=256)
def _program(expression: str) -> Any:
    types = celpy().celtypes
    truth, text, number = (types.BoolType, types.StringType, types.IntType)
    functions = {
        "quantity": quantity,
        "isQuantity": lambda one: truth(_is(quantity, one)),
        "semver": semver,
        "isSemver": lambda one: truth(_is(semver, one)),
        "compareTo": _compare,
        "isGreaterThan": lambda one, two: truth(one > two),
        "isLessThan": lambda one, two: truth(one < two),
        "isInteger": lambda one: truth(one[0] == one[0].to_integral_value()),
        "asInteger": lambda one: number(int(one[0])),
        "sign": lambda one: number((one[0] > 0) - (one[0] < 0)),
        "add": lambda one, two: Number((one[0] + (two[0] if isinstance(two, Number) else int(two)),)),
        "sub": lambda one, two: Number((one[0] - (two[0] if isinstance(two, Number) else int(two)),)),
        "major": lambda one: number(one[0]),
        "minor": lambda one: number(one[1]),
        "patch": lambda one: number(one[2]),
        "find": _find,
        # of strings (cel-go, ext.Strings)
        "lowerAscii": lambda one: text(one.encode().lower().decode()),
        "upperAscii": lambda one: text(one.encode().upper().decode()),
        "trim": lambda one: text(one.strip()),
        "replace": lambda one, old, new: text(one.replace(old, new)),
        "indexOf": lambda one, part: number(one.find(part)),
        "lastIndexOf": lambda one, part: number(one.rfind(part)),
        "substring": lambda one, begin, end=None: text(one[begin:end]),
        "charAt": lambda one, position: text(one[position : position + 1]),
        "split": _split,
        "join": lambda parts, mark="": text(str(mark).join(map(str, parts))),
        # optional values; the first two are what :func:`without_optional_syntax` writes
        "optional_field": _field,
        "orValue": lambda one, other: one[0] if one else other,
        "hasValue": lambda one: truth(bool(one)),
        "value": lambda one: one[0],
    }
    environment = new_environment()
    return environment.program(environment.compile(without_optional_syntax(expression)), functions=functions)


def new_environment() -> Any:
    """Return an Environment of cel-python; the process's recursion limit, which it raises, is restored."""
    limit = sys.getrecursionlimit()
    try:
        return celpy().Environment()
    finally:
        sys.setrecursionlimit(limit)


_TOKEN = re.compile(
    r"""(?P<text>[rRbB]{0,2}(?:\"\"\".*?\"\"\"|'''.*?'''|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'))"""
    r"""|(?P<maybe>\.\s*\?\s*(?P<name>[A-Za-z_]\w*))|(?P<at>\[\s*\?)|(?P<member>\.\s*(?P<next>[A-Za-z_]\w*)(?P<call>\s*\()?)"""
    r"""|(?P<open>[\[({])|(?P<close>[\])}])|(?P<space>\s+)|(?P<other>[A-Za-z_]\w*|[0-9.]+|.)""",
    re.DOTALL,
)


def without_optional_syntax(expression: str) -> str:
    """Return an expression with calls instead of ``a.?b`` and ``a[?b]``, which cel-python cannot parse.

    What follows them is optional as well until a method is called: ``a.?b.c.orValue(1)``.
    """
    out: list[str] = []
    closing: list[str] = []
    optional = [False]
    for token in _TOKEN.finditer(expression):
        kind, text = token.lastgroup, token[0]
        kind = next(
            name for name in ("text", "maybe", "at", "member", "open", "close", "space", "other") if token[name]
        )
        if kind == "maybe" or (kind == "member" and optional[-1] and not token["call"]):
            out.append(f'.optional_field("{token["name"] or token["next"]}")')
            optional[-1] = True
        elif kind == "at" or (text == "[" and optional[-1]):
            out.append(".optional_field(")
            closing.append(")")
            optional[-1] = True
            optional.append(False)
        elif kind == "open" or token["call"]:
            out.append(text)
            closing.append("")
            optional[-1] = False
            optional.append(False)
        elif kind == "close":
            out.append(closing.pop() or text if closing else text)
            if len(optional) > 1:
                optional.pop()
        else:
            out.append(text)
            if kind != "space":
                optional[-1] = False
    return "".join(out)
