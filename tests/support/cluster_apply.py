"""Patches of an API server: merge patch, JSON patch, and server-side apply with its managers of fields.

Sources: RFC 7396, RFC 6902, "Server-Side Apply", "Update API Objects in Place Using kubectl patch" (strategic merge).
"""

import copy
import json
import time
from collections.abc import Iterator
from typing import Any

from support.cluster_rules import Problem

Object = dict[str, Any]
Path = tuple[str, ...]
_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "conditions": ("type",),
    "ownerReferences": ("uid",),
    "imagePullSecrets": ("name",),
    "secrets": ("name",),
}
"""Lists of Kubernetes' own types that are maps; other lists are one value."""
_SETS = ("finalizers",)
_HEAD = {("f:apiVersion",), ("f:kind",), ("f:metadata",), ("f:metadata", "f:name"), ("f:metadata", "f:namespace")}
_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "deletionTimestamp")
_HEAD |= {("f:metadata", f"f:{name}") for name in (*_SERVER, "deletionGracePeriodSeconds", "generateName", "selfLink")}


def merge_patch(target: Any, patch: Any, keyed: bool = False, name: str = "") -> Any:
    """RFC 7396; ``keyed``: lists that are maps are merged, as in a strategic merge patch."""
    if keyed and isinstance(patch, list) and name in _KEYS and isinstance(target, list):
        keys, result = _KEYS[name], list(target)
        for one in patch:
            same = [n for n, old in enumerate(result) if all(old.get(key) == one.get(key) for key in keys)]
            if one.get("$patch") == "delete":
                result = [old for n, old in enumerate(result) if n not in same]
            elif same:
                result[same[0]] = merge_patch(result[same[0]], one, keyed)
            else:
                result.append(one)
        return result
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for field, value in patch.items():
        if value is None:
            result.pop(field, None)
        else:
            result[field] = merge_patch(result.get(field), value, keyed, field)
    return result


def json_patch(document: Any, operations: list[Object]) -> Any:
    """RFC 6902 without move and copy; raises Problem."""
    for one in operations:
        *words, last = [word.replace("~1", "/").replace("~0", "~") for word in one["path"].split("/")[1:]]
        try:
            place = document
            for word in words:
                place = place[int(word)] if isinstance(place, list) else place[word]
            key: Any = len(place) if last == "-" else int(last) if isinstance(place, list) else last
            if one["op"] == "test" and place[key] != one["value"]:
                raise Problem(422, "Invalid", f"testing value {one['path']} failed: test failed")
            if one["op"] == "remove":
                del place[key]
            elif one["op"] == "add" and isinstance(place, list):
                place.insert(key, one["value"])
            elif one["op"] in ("add", "replace"):
                place[key] = one["value"]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Problem(422, "Invalid", f"jsonpatch {one['op']} operation does not apply: {one['path']}") from error
    return document


class Managers:
    """Who manages which fields of an object: ``owners`` by (manager, operation, sub-resource)."""

    def __init__(self, schema: Object | None) -> None:
        self.schema = schema or {}
        self.owners: dict[tuple[str, str, str], set[Path]] = {}
        self._times: dict[tuple[str, str, str], str] = {}

    def update(self, manager: str, operation: str, sub: str, old: Object, new: Object) -> None:
        """Note what a plain write changed: the writer manages it from now on."""
        before, after = dict(self._leaves(old)), dict(self._leaves(new))
        changed = {path for path, value in after.items() if path not in before or before[path] != value}
        changed -= _HEAD
        if sub != "status":
            changed = {path for path in changed if path[0] != "f:status"} if old else changed
        gone = set(before) - set(after)
        for paths in self.owners.values():
            paths.difference_update(changed | gone)
        if changed:
            self._own((manager, operation, sub), self.owners.get((manager, operation, sub), set()) | changed)
        self.owners = {name: paths for name, paths in self.owners.items() if paths}

    def apply(self, found: Object, asked: Object, manager: str, sub: str, force: bool) -> Object:
        """Return the object with what is asked for, without what the manager asked for before; raises Problem."""
        key = (manager, "Apply", sub)
        wanted = {path: value for path, value in self._leaves(asked) if path not in _HEAD}
        if sub == "status":
            wanted = {path: value for path, value in wanted.items() if path[0] == "f:status"}
        current = dict(self._leaves(found))
        conflicts = []
        for (other, operation, other_sub), paths in self.owners.items():
            if (other, operation, other_sub) == key:
                continue
            taken = {path for path in wanted if path in paths and current.get(path) != wanted[path]}
            if taken and not force:
                conflicts += [f'conflict with "{other}": {_shown(path)}' for path in sorted(taken)]
            paths.difference_update(taken)
        if conflicts:
            words = f"Apply failed with {len(conflicts)} conflict{'s' * (len(conflicts) > 1)}: {', '.join(conflicts)}"
            raise Problem(409, "Conflict", words)
        mine = self.owners.pop(key, set())
        others = set().union(*self.owners.values()) if self.owners else set()
        for path in sorted(mine - set(wanted) - others, reverse=True):
            _remove(found, path)
        for path, value in wanted.items():
            if value == {} and any(len(known) > len(path) and known[: len(path)] == path for known in current):
                continue  # an empty map takes nothing from others
            _set(found, path, copy.deepcopy(value))
        self._own(key, set(wanted))
        self.owners = {name: paths for name, paths in self.owners.items() if paths}
        return found

    def shown(self, api_version: str) -> list[Object]:
        """Return ``metadata.managedFields``."""
        result = []
        for (manager, operation, sub), paths in sorted(self.owners.items()):
            tree: Object = {}
            for path in sorted(paths):
                place = tree
                for word in path:
                    place = place.setdefault(word, {})
            head = {"manager": manager, "operation": operation, "apiVersion": api_version, "fieldsType": "FieldsV1"}
            head["time"] = self._times.get((manager, operation, sub), "")
            result.append({**head, "fieldsV1": tree, **({"subresource": sub} if sub else {})})
        return result

    def _own(self, key: tuple[str, str, str], paths: set[Path]) -> None:
        if paths != self.owners.get(key):
            self._times[key] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.owners[key] = paths

    def _leaves(self, value: Any, path: Path = (), schema: Object | None = None) -> Iterator[tuple[Path, Any]]:
        schema = self.schema if not path else schema or {}
        if isinstance(value, dict) and (value or not path):
            for name, found in value.items():
                known = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
                yield from self._leaves(found, (*path, f"f:{name}"), known if isinstance(known, dict) else {})
            return
        name = path[-1][2:] if path else ""
        keys = schema.get("x-kubernetes-list-map-keys") or (
            _KEYS.get(name) if not self.schema or path[0] == "f:metadata" else None
        )
        if isinstance(value, list) and value and keys and all(isinstance(one, dict) for one in value):
            for one in value:
                mark = "k:" + json.dumps({key: one.get(key) for key in keys}, sort_keys=True)
                yield from self._leaves(one, (*path, mark), schema.get("items", {}))
        elif isinstance(value, list) and value and (name in _SETS or schema.get("x-kubernetes-list-type") == "set"):
            for one in value:
                yield (*path, "v:" + json.dumps(one)), one
        else:
            yield path, value


def _shown(path: Path) -> str:
    return "".join(f".{word[2:]}" if word[0] == "f" else f"[{word[2:]}]" for word in path)


def _element(place: list[Any], word: str) -> int | None:
    wanted = json.loads(word[2:])
    for number, one in enumerate(place):
        if one == wanted if word[0] == "v" else all(one.get(key) == value for key, value in wanted.items()):
            return number
    return None


def _set(place: Any, path: Path, value: Any) -> None:
    for word, following in zip(path, (*path[1:], ""), strict=True):
        if word[0] == "f":
            empty: Any = [] if following[:1] in ("k", "v") else {}
            if not following:
                place[word[2:]] = value
            elif not isinstance(place.get(word[2:]), type(empty)):
                place[word[2:]] = empty
            place = place[word[2:]]
            continue
        number = _element(place, word)
        if number is None:
            place.append(json.loads(word[2:]))
            number = len(place) - 1
        place = place[number]


def _remove(place: Any, path: Path) -> None:
    """Remove a field, and what holds nothing any more."""
    word, rest = path[0], path[1:]
    key: Any = word[2:] if word[0] == "f" else _element(place, word) if isinstance(place, list) else None
    if key is None or (isinstance(key, str) and (not isinstance(place, dict) or key not in place)):
        return
    if rest:
        keys = json.loads(word[2:]) if word[0] == "k" else {}
        if rest[-1][2:] not in keys:
            _remove(place[key], rest)
        if set(place[key]) - set(keys) if isinstance(place[key], dict) else place[key]:
            return
    del place[key]
