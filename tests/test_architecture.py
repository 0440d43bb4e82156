"""The rooms of the package: which may import which, and that a public class name has one meaning."""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

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
    ("containers", "exporter", "tenants"),
    ("doctor",),
    ("cli",),
)
"""Each room imports only from rooms below it: imports inside functions and for types count like others."""
INNER_FLOORS = {
    "kubernetes": (
        ("api", "node"),
        ("cluster", "fabric", "mps"),
        ("labels", "leases", "mig", "installer"),
        ("dra", "plugin"),
        ("domains",),
    ),
    "cli": (
        ("front",),
        ("cdi", "settings", "engines"),
        ("containers",),
        ("host", "simulation"),
        ("cluster",),
        ("about", "vendor_ctk", "__main__"),
    ),
}
"""The same inside the two largest rooms: each of their folders imports only from folders below it."""
PROGRAMS = {"runtime", "hook", "entry"}
"""One room in three places: the mission names the two programs."""
SOURCES = {
    ".".join(("ocigpu", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not path.name.endswith("_pb2.py")
}


class Found(NamedTuple):
    """What a module imports, wherever in its text, and its public classes."""

    imports: list[str]
    names: list[tuple[str, str]]
    """Of ``from module import name``."""
    classes: list[str]


@functools.cache
def found_in(name: str) -> Found:
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    found = Found([], [], [node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.imports.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.names.extend((str(node.module), alias.name) for alias in node.names)
    return found


def imports_of(name: str) -> set[str]:
    """Return the modules of ours that a module imports."""
    inner = [(f"{module}.{one}", module) for module, one in found_in(name).names if module.split(".")[0] == "ocigpu"]
    return {name for name in found_in(name).imports if name in SOURCES} | {
        one if one in SOURCES else module for one, module in inner
    }


def room_of(name: str, room: str = "") -> str:
    """Return the room that a module is in, or its folder in a room; "" for what is in none."""
    parts = [*name.split("."), "", ""]
    if parts[1] == "__main__":  # python -m ocigpu: the commands
        parts = ["", "cli", "__main__"]
    return parts[1] if not room else parts[2] if parts[1] == room else ""


def find_arrows_up(floors: tuple[tuple[str, ...], ...], room: str = "") -> list[str]:
    """Return the imports that lead to the same floor or one above."""
    floor_of = {name: number for number, floor in enumerate(floors) for name in floor}
    return [
        f"{name} imports {imported}"
        for name in SOURCES
        for imported in imports_of(name)
        if (here := room_of(name, room)) != (there := room_of(imported, room)) and here and there
        if not {here, there} <= PROGRAMS
        if floor_of[there] >= floor_of[here]
    ]


def test_every_module_is_in_a_room() -> None:
    rooms = {room for floor in FLOORS for room in floor}
    assert {room_of(name) for name in SOURCES} - {""} == rooms
    assert len(rooms - {"runtime", "hook"}) <= 15
    assert len(FLOORS) <= 10
    for room, floors in INNER_FLOORS.items():
        assert {room_of(name, room) for name in SOURCES} - {""} == {name for floor in floors for name in floor}


def test_a_room_imports_only_from_rooms_below_it() -> None:
    assert not find_arrows_up(FLOORS)


@pytest.mark.parametrize("room", INNER_FLOORS)
def test_a_folder_imports_only_from_folders_below_it(room: str) -> None:
    assert not find_arrows_up(INNER_FLOORS[room], room)


def test_modules_import_each_other_in_no_circle() -> None:
    below = {name: sorted(imports_of(name) - {name, "ocigpu"}) for name in SOURCES}
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
    for name in SOURCES:
        for one in found_in(name).classes:
            places.setdefault(one, []).append(name)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_one_module_imports_typer() -> None:
    """It costs more than most commands do; types and words of options are those of functions and help pages."""
    users = set()
    for name in SOURCES:
        imported = [*found_in(name).imports, *(module for module, _ in found_in(name).names)]
        users |= {(name, module.partition(".")[0]) for module in imported}
    assert {(name, module) for name, module in users if module in ("typer", "rich")} == {
        ("ocigpu.cli.front.described", "typer")
    }


OF_AMD = re.compile(r"\bamd(?!64)|\brocm|\bkfd\b|instinct|\bmi[0-9]{3}x?\b", re.IGNORECASE)
SAY_AMD = ("gpus/amd/", "core/vendors.py", "sim/models.toml", "doctor/messages.toml")
"""The last has what other programs say."""


class WithoutTexts(ast.NodeTransformer):
    """Takes out docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else node


def code_of(path: Path) -> str:
    """Return what a file says but for comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return ast.unparse(WithoutTexts().visit(ast.parse(text)))
    return re.sub(r"(?m)(^|\s)#.*", "", text)


def test_a_vendor_is_one_folder_one_line_and_its_simulated_models() -> None:
    texts = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*") if path.is_file()}
    texts = {name: path for name, path in texts.items() if "__pycache__/" not in name}
    assert len(texts) > 300
    found = [
        f"{name}: {line.strip()}"
        for name, path in texts.items()
        if not name.startswith(SAY_AMD) and OF_AMD.search(path.read_text(encoding="utf-8"))
        for line in code_of(path).splitlines()
        if OF_AMD.search(line)
    ]
    assert found == []
    assert len(OF_AMD.findall(code_of(texts["core/vendors.py"]))) == 4  # one line


def test_programs_of_a_cluster_ask_for_no_vendor_by_name() -> None:
    """What is different with a vendor its folder says: functions and fields of the Vendor record."""
    named = []
    for name, path in SOURCES.items():
        if room_of(name) in ("kubernetes", "exporter"):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
            values = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in parts]
            named += [f"{name}: {value}" for value in values if value in ("nvidia", "amd")]
    assert named == []


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.py", "x = 1  # as of AMD\n", ""),
        ("a.py", '"""As AMD has it."""\nx = 1\n"""AMD"""\n', ""),
        ("a.py", 'raise ValueError("amd")\n', "amd"),
        ("a.toml", "a = 1 # AMD\n# AMD\n", ""),
        ("a.toml", 'a = "of AMD"\n', "AMD"),
    ],
)
def test_comments_may_name_a_vendor(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    assert OF_AMD.findall(code_of(tmp_path / name)) == ([said] if said else [])
