"""Sets and removes single values and tables of a TOML text; comments, order and all other bytes stay.

A whole document that goes through tomlkit can come out with tables moved (dotted keys, tables that are not in order),
so the text is cut into statements (TOML 1.0: a header, or a key with its value) and only the one that changes is
rewritten, by tomlkit.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tomlkit

_SPACE = " \t\r\n"
_CLOSING = re.compile(r"""[]}]|\"{3}|'{3}""")


class _Statement(NamedTuple):
    """``keys``: the full path of a header or a key; ``section``: the path of the header above, for a header its own."""

    start: int
    end: int
    """Behind its line end."""
    header: bool
    section: tuple[str, ...]
    keys: tuple[str, ...]


def raw(text: str, keys: Sequence[str]) -> str:
    """Return the text of the value at ``keys``, "" for a table of several statements."""
    found = _holder(text, keys)
    if found is None:
        return ""
    item = tomlkit.parse(text[found.start : found.end])
    value: Any = item
    for key in keys[len(found.section) :]:
        value = value[key]
    return str(tomlkit.item(value).as_string())


def put(text: str, keys: Sequence[str], value: Any) -> str:
    """Return the text with a value (string, truth, number, list, table of such) set at ``keys``."""
    found = _holder(text, keys)
    if found is not None:
        return _rewrite(text, found, keys, value)
    if isinstance(value, dict):
        return _append(drop(text, keys), keys, value)
    place = _place(text, tuple(keys[:-1]))
    if place is None:
        return _append(text, keys[:-1], {keys[-1]: value})
    position, indent, section = place
    line_end = _line_end(text)
    line = f"{indent}{_line(keys[len(section) :], value)}{line_end}"
    if position and text[position - 1] != "\n":
        line = line_end + line
    return text[:position] + line + text[position:]


def put_raw(text: str, keys: Sequence[str], value: str) -> str:
    """Return the text with the existing value at ``keys`` replaced by another's text."""
    found = _holder(text, keys)
    item = tomlkit.parse(f"value = {value}\n")["value"]
    return put(text, keys, item) if found is None else _rewrite(text, found, keys, item, exact=True)


def has_header(text: str, keys: Sequence[str]) -> bool:
    """Whether a table has a header of its own."""
    return any(statement.header and statement.keys == tuple(keys) for statement in _statements(text))


def drop_header(text: str, keys: Sequence[str]) -> str:
    """Return the text without the header of a table that has no keys below it, if it is so."""
    statements = list(_statements(text))
    for statement, following in zip(statements, (*statements[1:], None), strict=False):
        if statement.header and statement.keys == tuple(keys) and (following is None or following.header):
            return _cut(text, statement)
    return text


def drop(text: str, keys: Sequence[str]) -> str:
    """Return the text without the value or table at ``keys``, and without the empty line before a table."""
    found = _holder(text, keys)
    if found is not None and len(found.keys) < len(keys):  # in an inline table
        return _rewrite(text, found, keys, None)
    for statement in reversed(list(_statements(text))):
        if statement.keys[: len(keys)] == tuple(keys):
            text = _cut(text, statement)
    return text


def _cut(text: str, statement: _Statement) -> str:
    """Return the text without a statement, and without the empty line before a header."""
    start = statement.start
    if statement.header and text[:start].endswith(("\n\n", "\n\r\n")):
        start -= 2 if text[:start].endswith("\r\n") else 1
    return text[:start] + text[statement.end :]


def _statements(text: str) -> Iterator[_Statement]:
    """Yield the statements of a text that is TOML."""
    section: tuple[str, ...] = ()
    position = 0
    while position < len(text):
        start, position = position, _next_line(text, position)
        line = text[start:position].strip(_SPACE)
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = _path(tomllib.loads(text[start:position]), {})
            yield _Statement(start, position, True, section, section)
            continue
        while not _is_toml(text[start:position]):
            position = _next_end(text, position)
        yield _Statement(start, position, False, section, section + _keys(text[start:position]))


def _next_line(text: str, position: int) -> int:
    return text.find("\n", position) + 1 or len(text)


def _next_end(text: str, position: int) -> int:
    """Return the end of the next line with which a value of several lines can end."""
    while position < len(text):
        start, position = position, _next_line(text, position)
        if _CLOSING.search(text, start, position):
            break
    return position


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _keys(statement: str) -> tuple[str, ...]:
    """Return the keys of a statement: the shortest beginning that a key with another value could have."""
    end = statement.index("=")
    while not _is_toml(f"{statement[:end]}= 0"):
        end = statement.index("=", end + 1)
    return _path(tomllib.loads(f"{statement[:end]}= 0"), 0)


def _path(data: Any, end: Any) -> tuple[str, ...]:
    keys: tuple[str, ...] = ()
    while data != end:
        if isinstance(data, list):
            data = data[0]
            continue
        ((key, data),) = data.items()
        keys += (key,)
    return keys


def _holder(text: str, keys: Sequence[str]) -> _Statement | None:
    """Return the statement that holds the value at ``keys``, itself or in an inline table, or could hold it there."""
    for statement in _statements(text):
        if not statement.header and statement.keys == tuple(keys[: len(statement.keys)]):
            return statement
    return None


def _rewrite(text: str, statement: _Statement, keys: Sequence[str], value: Any, exact: bool = False) -> str:
    """Return the text with a value set in one statement, or removed from its inline table (None).

    ``exact``: the value comes with its own form.
    """
    document = tomlkit.parse(text[statement.start : statement.end])
    table: Any = document
    *parents, last = keys[len(statement.section) :]
    for key in parents:
        if key not in table:
            table[key] = tomlkit.inline_table()
        table = table[key]
    if value is None:
        del table[last]
    elif exact:
        table[last] = value
    elif isinstance(value, list) and isinstance(table.get(last), list):
        _set_elements(table[last], value)
    else:
        table[last] = _item(value)
    return text[: statement.start] + tomlkit.dumps(document) + text[statement.end :]


def _item(value: Any) -> Any:
    """Return a value in its one-line form."""
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        for key, inner in value.items():
            table[key] = _item(inner)
        return table
    if isinstance(value, list):
        array = tomlkit.array()
        for inner in value:
            array.append(_item(inner))
        return array
    return tomlkit.item(value)


def _set_elements(array: Any, value: list[Any]) -> None:
    """Add and remove elements of an array; those that stay keep their form and comments."""
    for element in list(array):
        if element not in value:
            array.remove(element)
    for element in value:
        if element not in array:
            array.append(element)
    if list(array) != value:  # another order
        array.clear()
        array.extend(value)


def _place(text: str, table: tuple[str, ...]) -> tuple[int, str, tuple[str, ...]] | None:
    """Return where a key of a table can be put: position, indentation, and the section that it will be in.

    None when the table has no place yet.
    """
    place: tuple[int, str, tuple[str, ...]] | None = None if table else (_top(text), "", ())
    for statement in _statements(text):
        if statement.section == table[: len(statement.section)] and statement.keys[: len(table)] == table:
            line = text[statement.start : statement.end]
            indent = line[: len(line) - len(line.lstrip(" \t"))]
            place = (statement.end, indent, statement.section)
    return place


def _top(text: str) -> int:
    """Return where the first key of a document goes: behind the comment it begins with, if an empty line follows."""
    position = 0
    while text.startswith("#", position):
        position = _next_line(text, position)
    return position if position == len(text) or text[position] in "\r\n" else 0


def _line(keys: Sequence[str], value: Any) -> str:
    return f"{tomlkit.key(list(keys)).as_string()} = {_item(value).as_string()}"


def _append(text: str, keys: Sequence[str], value: dict[str, Any]) -> str:
    """Return the text with a table at its end, after an empty line."""
    line_end = _line_end(text)
    if text and not text.endswith("\n"):
        text += line_end
    lines = list(_table(keys, value))
    if not text:
        lines = lines[1:]
    return text + "".join(line + line_end for line in lines)


def header(keys: Sequence[str]) -> str:
    """Return the header line of a table."""
    return f"[{tomlkit.key(list(keys)).as_string()}]"


def header_keys(line: str) -> tuple[str, ...]:
    """Return the keys of a line that is the header of a table, none for any other line."""
    return _path(tomllib.loads(line), {}) if line.lstrip().startswith("[") and _is_toml(line) else ()


def _table(keys: Sequence[str], value: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield header(keys)
    for key, inner in value.items():
        if not isinstance(inner, dict):
            yield _line([key], inner)
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _table([*keys, key], inner)


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"
