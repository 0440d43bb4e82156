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
            tree = without_docstrings(ast.parse(file.read()))
            code = compile(tree, f"{installed or directory}/{relative}", "exec", dont_inherit=True)
        seconds = 0 if installed else int(status.st_mtime)
        codes.append(marshal.dumps(code))
        modules[name] = (relative, status.st_size, seconds, at, len(codes[-1]))
        at += len(codes[-1])
    with open(f"{package}/entry/image.py", "rb") as file:
        first = compile(file.read(), "image", "exec", dont_inherit=True)
    os.makedirs(f"{package}/__pycache__", exist_ok=True)
    target = f"{package}/__pycache__/hot.{sys.implementation.cache_tag}"
    with open(f"{target}.{os.getpid()}", "wb") as file:
        file.write(marshal.dumps(first) + marshal.dumps(modules) + b"".join(codes))
    os.replace(file.name, target)


def without_docstrings(tree: ast.Module) -> ast.Module:
    """Take the texts out that nobody reads at run time: they are half of the bytes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, False) is not None:
            node.body[0] = ast.copy_location(ast.Pass(), node.body[0])
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
