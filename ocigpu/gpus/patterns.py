"""File name patterns as path lists have them: ``*``, ``?`` and ``[...]`` within one part of a path (glob(7))."""

from ocigpu.gpus.tree import Tree

MAX_FOUND = 4096
_SPECIAL = frozenset("*?[")


def is_pattern(text: str) -> bool:
    """Return whether the text has a character that makes it a pattern."""
    return not _SPECIAL.isdisjoint(text)


def matches_name(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a whole name; time grows with the product of their lengths."""
    items = _parse(pattern)
    at = position = 0
    star, resume = -1, 0
    while position < len(name):
        item = items[at] if at < len(items) else None
        if item == "*":
            star, resume = at, position
            at += 1
        elif item is not None and _matches_one(item, name[position]):
            at += 1
            position += 1
        elif star >= 0:
            resume += 1
            at, position = star + 1, resume
        else:
            return False
    return all(item == "*" for item in items[at:])


def _parse(pattern: str) -> list[str]:
    """Return the parts of a pattern: "*", "?", a bracket expression without its end ("[a-z"), or "=" and a letter."""
    items = []
    position = 0
    while position < len(pattern):
        letter = pattern[position]
        end = pattern.find("]", position + 2 + pattern.startswith(("[!", "[^"), position)) if letter == "[" else -1
        if end > 0:
            items.append(pattern[position:end])
            position = end
        else:
            items.append(letter if letter in "*?" else f"={letter}")
        position += 1
    return items


def _matches_one(item: str, letter: str) -> bool:
    if item == "?":
        return True
    if item[0] == "=":
        return item[1] == letter
    negated = item[1] in "!^"
    members = item[2 if negated else 1 :]
    found = False
    while members:
        if len(members) >= 3 and members[1] == "-":
            found = found or members[0] <= letter <= members[2]
            members = members[3:]
        else:
            found = found or members[0] == letter
            members = members[1:]
    return found != negated


def matches_path(pattern: str, path: str) -> bool:
    """Return whether a pattern matches a whole path; no part of it reaches across a slash."""
    parts, names = pattern.split("/"), path.split("/")
    return len(parts) == len(names) and all(matches_name(*pair) for pair in zip(parts, names, strict=True))


def expand(tree: Tree, path: str) -> list[str]:
    """Return the paths in a tree that a pattern matches, sorted, 4096 at most; a plain path is returned as it is."""
    if not is_pattern(path):
        return [path]
    found = [""]
    for part in path.strip("/").split("/"):
        if not is_pattern(part):
            found = [f"{directory}/{part}" for directory in found]
            continue
        hidden = part.startswith(".")
        found = [
            f"{directory}/{name}"
            for directory in found
            for name in tree.names(directory or "/")
            if (hidden or not name.startswith(".")) and matches_name(part, name)
        ][:MAX_FOUND]
    return [candidate for candidate in found if tree.resolve(candidate)]
