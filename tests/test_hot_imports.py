"""What the programs of the hot path import: the standard library only, and of it only what is light.

Every module more is paid at each start of a container, and one from elsewhere would be code that runs as root.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import ocigpu

PACKAGE = Path(ocigpu.__file__).parent
FIND_IMPORTS = runpy.run_path(str(PACKAGE.parent / "packaging/snapshot/imports.py"))["find_imports"]
HOT_DIRECTORIES = ("core", "system", "gpus", "cdi", "provision", "bundle", "entry")
NOT_HOT = (
    "ocigpu.cdi.compare",
    "ocigpu.cdi.refresh",
    "ocigpu.cdi.transform",
    "ocigpu.cdi.watch",
    "ocigpu.cdi.yaml_child",
    "ocigpu.core.toml",
    "ocigpu.system.exposition",
    "ocigpu.system.locks",
    "ocigpu.system.module_process",
    "ocigpu.system.options",
    "ocigpu.system.pages",
    "ocigpu.system.programs",
    "ocigpu.system.relay",
    "ocigpu.system.service",
    "ocigpu.system.tls",
    "ocigpu.entry.container_cli",
    "ocigpu.gpus.amd.amd_smi",
    "ocigpu.gpus.amd.labels",
    "ocigpu.gpus.amd.offers",
    "ocigpu.gpus.amd.on_node",
    "ocigpu.gpus.amd.parts",
    "ocigpu.gpus.amd.rocminfo",
    "ocigpu.gpus.amd.sampler",
    "ocigpu.gpus.amd.simulated",
    "ocigpu.gpus.amd.usage",
    "ocigpu.gpus.nvidia.fabric",
    "ocigpu.gpus.nvidia.firmware",
    "ocigpu.gpus.nvidia.hardware",
    "ocigpu.gpus.nvidia.kmods",
    "ocigpu.gpus.nvidia.mig",
    "ocigpu.gpus.nvidia.mig_layout",
    "ocigpu.gpus.nvidia.nvml_process",
    "ocigpu.gpus.nvidia.nvml_verbs",
    "ocigpu.gpus.nvidia.on_node",
    "ocigpu.gpus.nvidia.topology",
    "ocigpu.gpus.on_node",
    "ocigpu.gpus.firmware",
    "ocigpu.gpus.parts",
    "ocigpu.gpus.tegra.offers",
    "ocigpu.gpus.usage",
    "ocigpu.gpus.vfio.bus",
    "ocigpu.gpus.vfio.holders",
    "ocigpu.gpus.vfio.identity",
    "ocigpu.gpus.vfio.offers",
    "ocigpu.gpus.vfio.reset",
    "ocigpu.gpus.vfio.switch",
    "ocigpu.gpus.wsl.offers",
)
"""Modules and packages of these directories that need more: only other processes load them."""
HOT_MODULES = ("ocigpu.runtime", "ocigpu.hook")
HOOK_MODE = (
    *HOT_MODULES, "ocigpu.gpus.nvidia.request", "ocigpu.gpus.nvidia.discover", "ocigpu.gpus.nvidia.plan",
    "ocigpu.provision.image", "ocigpu.provision.apply",
)  # fmt: skip

JSON = {
    "json", "json.decoder", "json.encoder", "json.scanner", "_json",
    # json imports re, and re these:
    "re", "re._casefix", "re._compiler", "re._constants", "re._parser", "_sre", "copyreg", "enum", "types",
    "functools", "_functools", "collections", "keyword", "operator", "_operator", "reprlib", "itertools",
    "_collections",
}  # fmt: skip
"""json and what it brings along: for what no ordinary start does (an error's text, parsing a specification)."""
LIGHT = {
    "os", "stat", "_stat", "posixpath", "genericpath", "os.path", "_collections_abc", "errno", "signal", "_signal",
    "fcntl", "struct", "_struct", "ctypes", "ctypes._endian", "_ctypes", "gc", "mmap", "time", "select", "array",
    "resource", "binascii", "_json",
}  # fmt: skip
"""What hot modules may import themselves, with what those import."""
if sys.version_info >= (3, 14):  # what its os and ctypes import, 2 ms; Python 3.11 has some of it before our first line
    LIGHT |= {
        "abc", "_abc", "ctypes._layout", "collections.abc", "sysconfig", "threading", "types", "_types", "_contextvars",
        "_weakrefset", "warnings", "_py_warnings",
    }  # fmt: skip
LATE = {
    "tomllib": "only when there is a settings file",
    "fnmatch": "only for the patterns in CSV files of Tegra systems",
    "difflib": "only to say what an unknown key was meant to be",
    "_thread": "part of every interpreter; only for the deadline of a start",
    "_syscall": "part of a snapshot of the interpreter, which has no ctypes",
    "prctl": "only in the sandboxed child that runs ldconfig",
    **dict.fromkeys(("_frozen_importlib", "marshal", "posix"), "part of every interpreter; loads our modules"),
}
"""What functions of hot modules may import when they need it."""
ALLOWED = JSON | LIGHT

SCRIPT = """\
import sys
before = set(sys.modules)
sys.path.append(sys.argv[1])
for name in sys.argv[2:]:
    __import__(name)
import_names = sorted(set(sys.modules) - before)
import json
print(json.dumps(import_names))
"""


def imported_by(*names: str) -> set[str]:
    """Return what a fresh interpreter, started as the stubs start it, has loaded after importing these modules."""
    done = subprocess.run(
        [os.path.realpath(sys.executable), "-I", "-S", "-c", SCRIPT, str(PACKAGE.parent), *names],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def all_hot_modules() -> list[str]:
    below = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for directory in HOT_DIRECTORIES
        for path in sorted((PACKAGE / directory).rglob("*.py"))
    ]
    names = [*HOT_MODULES, *(name.removesuffix(".__init__") for name in below)]
    return [name for name in names if not f"{name}.".startswith(tuple(f"{cold}." for cold in NOT_HOT))]


@pytest.mark.parametrize("name", ["ocigpu.runtime", "ocigpu.hook"])
def test_a_program_of_the_hot_path_imports_only_what_is_allowed(name: str) -> None:
    foreign = {module for module in imported_by(name) if module.split(".")[0] != "ocigpu"}
    assert foreign <= ALLOWED, f"{name} also imports {sorted(foreign - ALLOWED)}"


def test_every_module_of_the_hot_path_imports_only_what_is_allowed() -> None:
    loaded = imported_by(*all_hot_modules())
    foreign = {module for module in loaded if module.split(".")[0] != "ocigpu"}
    assert foreign <= ALLOWED, f"the hot path also imports {sorted(foreign - ALLOWED)}"
    ours = {module for module in loaded if module.split(".")[0] == "ocigpu"}
    assert ours <= {"ocigpu", *all_hot_modules()}, "a hot module imports one of ours that is not hot"


def test_an_ordinary_start_does_without_json_and_enum() -> None:
    """They cost 10 ms: more than the interpreter's own start."""
    loaded = imported_by(*HOOK_MODE, "ocigpu.bundle.edit", "ocigpu.bundle.inject", "ocigpu.provision.ldconfig")
    assert not loaded & {"json", "re", "enum", "signal"}


def test_the_shim_imports_nothing_of_the_plan_before_it_is_needed() -> None:
    """A container without GPUs pays for none of it."""
    late = (
        "ocigpu.gpus",
        "ocigpu.provision",
        "ocigpu.bundle.edit",
        "ctypes",
        "tomllib",
    )
    assert not [name for name in imported_by("ocigpu.runtime") if name.startswith(late)]


def test_mode_spec_loads_neither_plan_nor_system_calls_before_they_are_needed() -> None:
    """What is declared for a request is kept, as a rule; ctypes is for system calls that os does not have."""
    late = (
        "ocigpu.gpus.nvidia.plan",
        "ocigpu.core.facts",
        "ocigpu.core.actions",
        "ocigpu.system.libc",
        "ocigpu.gpus.fingerprint",
        "ctypes",
    )
    loaded = imported_by(
        "ocigpu.runtime", "ocigpu.gpus.nvidia.request", "ocigpu.entry.pass_through", "ocigpu.bundle.hookless"
    )
    assert not [name for name in loaded if name.startswith(late)]


def test_hook_mode_loads_nothing_of_cdi() -> None:
    loaded = imported_by(*HOOK_MODE)
    assert not [name for name in loaded if name.startswith("ocigpu.cdi")]


def test_the_allow_list_names_only_modules_of_the_standard_library() -> None:
    names = {name.split(".")[0] for name in ALLOWED}
    assert names <= set(sys.stdlib_module_names)
    heavy = {
        "typing",
        "dataclasses",
        "subprocess",
        "logging",
        "pathlib",
        "tempfile",
        "shutil",
        "argparse",
        "contextlib",
    }
    assert not names & heavy


def test_imports_inside_functions_of_hot_modules_are_light_too() -> None:
    """A module imported later costs the same, so what is not on the allow-list is listed here with its reason."""
    accepted = ALLOWED | {"sys"} | set(LATE)
    found: dict[str, set[str]] = {}
    for module in all_hot_modules():
        path = PACKAGE.parent / (module.replace(".", os.sep) + ".py")
        if not path.exists():
            path = path.with_suffix("") / "__init__.py"
        names = {name.partition(":")[0] for name in FIND_IMPORTS(path.read_text())}
        foreign = {name for name in names if name.split(".")[0] != "ocigpu"} - accepted
        if foreign:
            found[module] = foreign
    assert not found
