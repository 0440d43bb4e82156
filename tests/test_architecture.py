"""The rooms of the package: which may import which, and that a public class name has one meaning."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ocigpu

PACKAGE = Path(ocigpu.__file__).parent
FLOORS = (
    ("core",),
    ("system",),
    ("gpus", "engines"),
    ("cdi",),
    ("provision",),
    ("bundle",),
    ("runtime", "hook", "entry", "sim", "kubernetes"),
    ("containers",),
    ("doctor",),
    ("cli",),
)
"""Each room imports only from rooms below it: imports inside functions and for types count like others."""
PROGRAMS = {"runtime", "hook", "entry"}
"""One room in three places: the mission names the two programs."""
SOURCES = {
    ".".join(("ocigpu", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not path.name.endswith("_pb2.py")
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


@pytest.fixture(scope="module", autouse=True)
def trees_go() -> Iterator[None]:
    """80 MiB that each later fork of this process would copy."""
    yield
    trees.cache_clear()


def imports_of(name: str) -> Iterator[str]:
    """Yield the modules of ours that a module imports, wherever in its text."""
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in SOURCES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ocigpu":
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from {module if module in SOURCES else node.module for module in inner}


def room_of(name: str) -> str:
    return [*name.split("."), ""][1]


def test_every_module_is_in_a_room() -> None:
    rooms = {room for floor in FLOORS for room in floor}
    assert {room_of(name) for name in SOURCES} - {""} == rooms
    assert len(rooms - {"runtime", "hook"}) <= 13
    assert len(FLOORS) <= 10


def test_a_room_imports_only_from_rooms_below_it() -> None:
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    wrong = [
        f"{name} imports {imported}"
        for name in SOURCES
        for imported in imports_of(name)
        if room_of(imported) and room_of(name) != room_of(imported)
        if not {room_of(name), room_of(imported)} <= PROGRAMS
        if floor_of[room_of(imported)] >= floor_of[room_of(name)]
    ]
    assert not wrong


def test_modules_import_each_other_in_no_circle() -> None:
    below = {name: sorted(set(imports_of(name)) - {name, "ocigpu"}) for name in SOURCES}
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " imports ".join((*path[path.index(name) :], name))
        if name not in done:
            for imported in below[name]:
                walk(imported, (*path, name))
            done.add(name)

    for name in SOURCES:
        walk(name, ())


def test_a_public_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_one_module_imports_typer() -> None:
    """It costs more than most commands do; types and words of options are those of functions and help pages."""
    users = [(name, module) for name, tree in trees().items() for module in modules_named(tree) & {"typer", "rich"}]
    assert users == [("ocigpu.cli.described", "typer")]


def modules_named(tree: ast.Module) -> set[str]:
    """Return the first words of the modules that a text imports."""
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


OF_AMD = re.compile(r"\bamd(?!64)|\brocm|\bkfd\b|instinct|\bmi[0-9]{3}x?\b", re.IGNORECASE)
SAY_AMD = ("gpus/amd/", "core/vendors.py", "sim/models.toml", "doctor/messages.toml")
"""The last has what other programs say."""


def test_a_vendor_is_one_folder_one_line_and_its_simulated_models() -> None:
    texts = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*") if path.is_file()}
    texts = {name: path for name, path in texts.items() if "__pycache__/" not in name}
    assert len(texts) > 300
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, path in texts.items()
        if not name.startswith(SAY_AMD)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if OF_AMD.search(line)
    ]
    assert found == []
    assert len(OF_AMD.findall(texts["core/vendors.py"].read_text())) == 4  # one line
