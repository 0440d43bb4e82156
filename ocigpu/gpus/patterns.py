"""File name patterns as path lists have them: ``*``, ``?`` and ``[...]`` within one part of a path (glob(7))."""

from ocigpu.gpus.tree import Tree

MAX_FOUND = 4096
_SPECIAL = frozenset("*?[")


def is_pattern(text: str) -> bool:
    """Return whether the text has a character that makes it a pattern."""
    return not _SPECIAL.isdisjoint(text)


def matches_name(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a whole name."""
    from fnmatch import fnmatchcase  # only for CSV files

    return fnmatchcase(name, pattern.replace("[^", "[!"))


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
