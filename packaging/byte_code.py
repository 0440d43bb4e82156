"""``python byte_code.py DIRECTORY [INSTALLED]``: write the image of the hot path's modules (ocigpu/entry/image.py).

DIRECTORY has the package.  INSTALLED: where it will be; then the files belong to a package manager, which gives them
times of its own and replaces all of them together, and no time counts.
"""

import ast
import marshal
import os
import sys

ROOMS = ("core", "system", "gpus", "cdi", "provision", "bundle", "entry")
PROGRAMS = ("__init__.py", "runtime.py", "hook.py")


def main(directory: str, installed: str = "") -> None:
    """Write the file, as a whole; one that is there is replaced."""
    package = f"{directory}/ocigpu"
    modules: dict[str, tuple[str, int, int, int, int]] = {}
    codes: list[bytes] = []
    at = 0
    for path in sources(package):
        relative = os.path.relpath(path, directory)
        name = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            tree = ast.parse(file.read())
        if has_types(tree):  # for a command: no start loads it
            continue
        code = compile(without_texts(tree), f"{installed or directory}/{relative}", "exec", dont_inherit=True)
        seconds = 0 if installed else int(status.st_mtime)
        codes.append(marshal.dumps(code))
        modules[name] = (relative, status.st_size, seconds, at, len(codes[-1]))
        at += len(codes[-1])
    with open(f"{package}/entry/image.py", "rb") as file:
        first = compile(file.read(), "image", "exec", dont_inherit=True)
    os.makedirs(f"{package}/__pycache__", exist_ok=True)
    target = f"{package}/__pycache__/hot.{sys.implementation.cache_tag}"
    with open(f"{target}.{os.getpid()}", "wb") as file:
        for part in (marshal.dumps(first), marshal.dumps(modules)):  # of a file, marshal reads every number by itself
            file.write(len(part).to_bytes(4, "big") + part)
        file.write(b"".join(codes))
    os.replace(file.name, target)


def has_types(tree: ast.Module) -> bool:
    """Tell whether a module imports what is for types alone, which costs more than a start may."""
    return any(isinstance(node, ast.ImportFrom) and node.module in ("pydantic", "typing") for node in tree.body)


def without_texts(tree: ast.Module) -> ast.Module:
    """Take out what nobody reads at run time: docstrings, half of the bytes, and what functions say of types.

    Of a class the names of its annotations are its record's fields: ocigpu/core/record.py.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, False) is not None:
            node.body[0] = ast.copy_location(ast.Pass(), node.body[0])
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.copy_location(ast.Constant(None), node.annotation)
    return tree


def sources(package: str) -> list[str]:
    """Return the paths of the modules that a start may load."""
    found = [f"{package}/{name}" for name in PROGRAMS]
    for room in ROOMS:
        for place, directories, names in os.walk(f"{package}/{room}"):
            directories.sort()
            found += [f"{place}/{name}" for name in sorted(names) if name.endswith(".py")]
    return found


main(*sys.argv[1:])
