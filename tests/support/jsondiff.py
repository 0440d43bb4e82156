"""The exact difference of two JSON documents, as operations of a JSON patch (RFC 6902).

Exact: ``true`` is not 1, 1 is not 1.0, and the order of an object's keys counts (:func:`render_exactly`).
"""

import json
from typing import Any

Operation = dict[str, Any]
"""{"op": "add" | "replace" | "remove", "path": JSON pointer (RFC 6901), "value": for all but remove}."""


def difference(before: Any, after: Any, path: str = "") -> list[Operation]:
    """Return the operations that, carried out one after another, make ``after`` of ``before``."""
    if isinstance(before, dict) and isinstance(after, dict):
        return _of_objects(before, after, path)
    if isinstance(before, list) and isinstance(after, list):
        return _of_lists(before, after, path)
    return [] if _same(before, after) else [{"op": "replace", "path": path, "value": after}]


def _of_objects(before: dict[str, Any], after: dict[str, Any], path: str) -> list[Operation]:
    found: list[Operation] = [{"op": "remove", "path": _below(path, name)} for name in before if name not in after]
    for name, value in after.items():
        if name in before:
            found += difference(before[name], value, _below(path, name))
        else:
            found.append({"op": "add", "path": _below(path, name), "value": value})
    return found


def _of_lists(before: list[Any], after: list[Any], path: str) -> list[Operation]:
    """Lists differ by what is between their common beginning and their common end."""
    start = 0
    while start < min(len(before), len(after)) and _same(before[start], after[start]):
        start += 1
    end = 0
    while end < min(len(before), len(after)) - start and _same(before[-1 - end], after[-1 - end]):
        end += 1
    old, new = len(before) - end, len(after) - end
    found: list[Operation] = [{"op": "remove", "path": _below(path, i)} for i in range(old - 1, start - 1, -1)]
    found += [{"op": "add", "path": _below(path, i), "value": after[i]} for i in range(start, new)]
    return found


def patched(document: Any, operations: list[Operation]) -> Any:
    """Return a copy of the document after the operations; a path that does not exist is an error."""
    result = json.loads(json.dumps(document))
    for operation in operations:
        names = [name.replace("~1", "/").replace("~0", "~") for name in operation["path"].split("/")[1:]]
        if not names:
            assert operation["op"] == "replace", operation
            result = operation["value"]
            continue
        parent = result
        for name in names[:-1]:
            parent = parent[int(name)] if isinstance(parent, list) else parent[name]
        _carry_out(parent, int(names[-1]) if isinstance(parent, list) else names[-1], operation)
    return result


def _carry_out(parent: Any, key: Any, operation: Operation) -> None:
    if operation["op"] == "remove":
        del parent[key]
    elif operation["op"] == "add" and isinstance(parent, list):
        assert key <= len(parent), operation
        parent.insert(key, operation["value"])
    else:
        present = key < len(parent) if isinstance(parent, list) else key in parent
        assert present == (operation["op"] == "replace"), operation
        parent[key] = operation["value"]


def _below(path: str, name: str | int) -> str:
    return f"{path}/{str(name).replace('~', '~0').replace('/', '~1')}"


def _same(one: Any, other: Any) -> bool:
    return render_exactly(one) == render_exactly(other)


def render_exactly(document: Any) -> str:
    """Return text that is equal for equal documents only, key order included."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def render_for_review(document: Any, depth: int = 2, indent: str = "") -> str:
    """Return JSON text with a line for each value down to ``depth``, and what is deeper on one line."""
    if depth == 0 or not isinstance(document, (dict, list)) or not document:
        return json.dumps(document, ensure_ascii=False)
    inner = indent + "  "
    if isinstance(document, dict):
        items = [
            f"{json.dumps(name, ensure_ascii=False)}: {render_for_review(value, depth - 1, inner)}"
            for name, value in document.items()
        ]
    else:
        items = [render_for_review(value, depth - 1, inner) for value in document]
    brackets = "{}" if isinstance(document, dict) else "[]"
    return f"{brackets[0]}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{brackets[1]}"
