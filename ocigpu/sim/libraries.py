"""Which libraries the driver of a simulated host has, and how they are compiled."""

import errno
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ocigpu.core.errors import OcigpuError, printable
from ocigpu.sim.files import fill_in, read_tables
from ocigpu.sim.models import Model, sim_error
from ocigpu.sim.table import fill_table
from ocigpu.system.programs import run_program

SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "prebuilt"
"""What a wheel brings: a directory for each type of machine, with what :func:`compile_few` makes of all sources."""
_MACHINES = ("x86_64", "aarch64")
COMPILE_SECONDS = 600
COMPILER_HINT = "apt-get install gcc libc6-dev"
DISK_HINT = "Make room, or name a directory on another disk: df -h"
_WORKERS = 2
_MADE = re.compile(r"^(?:EXPORT [^(]*?|[A-Z_]+\()(nvml[A-Z]\w+)", re.MULTILINE)
_VERSION = re.compile(r"(_v\d+|V)$")

_FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O0", "-U_FORTIFY_SOURCE"]  # compiling takes most of making a host
_ANSWERING = ("nvml", "cuda", "nvfm")
"""Sources of the libraries that answer, and so have a table."""
_BLANK = {"blank": (), "tls": ("-DWITH_ABI_NOTE",)}
"""Sources of the others, with the flags to compile blank.c."""
_ANY_SONAME = b"ocigpu-any-soname".ljust(128, b"-")
"""SONAME of a prebuilt library of those: a host's libraries have their own there."""
_LIBRARY_FLAGS = [*_FLAGS, "-fPIC", "-fno-stack-protector", "-fvisibility=hidden"]


@dataclass(frozen=True)
class LibrarySource:
    """One library to make, as the table ``built`` of files.toml has it and explains it."""

    name: str
    soname: int | str = "$version"
    links: dict[str, str] = field(default_factory=dict)
    file: str = ""
    directory: str = ""
    source: str = "blank"
    fabric: bool = False
    bits32: bool = False

    def names(self, version: str) -> tuple[str, dict[str, str]]:
        """Return the library's file, and the links beside it by name: the first is its SONAME."""
        soname = self.soname if "." in str(self.soname) else f"{self.name}.so.{self.soname}"
        file, values = self.file or f"{self.name}.so.{version}", {"version": version}
        links = {fill_in(str(soname), values): file}
        return file, links | {name: fill_in(target, values) for name, target in self.links.items()}


LIBRARIES = tuple(LibrarySource(**table) for table in read_tables()["built"]["libraries"])


def library_triplet() -> str:
    """Return this machine's multiarch directory, e.g. "x86_64-linux-gnu"."""
    return f"{platform.machine()}-linux-gnu"


@dataclass(frozen=True)
class Built:
    """What was compiled: counts, and a note for each thing this machine's compiler could not do; ``paths``: of a host's
    libraries.
    """

    libraries: int
    libraries_32: int
    binaries: tuple[str, ...]
    notes: tuple[str, ...]
    paths: tuple[str, ...] = ()


class Compiler:
    """The machine's C compiler; everything it makes on the way lies in ``scratch``."""

    def __init__(self, scratch: Path, name: str = "") -> None:
        path = shutil.which(name) if name else find_compiler()
        if path is None:
            wanted = name or "gcc or cc"
            raise sim_error(f"no C compiler: {wanted} is needed to make the libraries", COMPILER_HINT)
        self.path = path
        self.scratch = scratch
        (scratch / "unsupported.h").write_text(render_unsupported())

    def run(self, *arguments: str | Path) -> str:
        """Run the compiler; return "" or, when it fails, the most telling line it wrote."""
        try:
            # The language of messages is fixed, and variables such as CPATH or LIBRARY_PATH of the caller are kept:
            # they say where this machine's compiler finds its headers.
            done = run_program([self.path, *map(str, arguments)], COMPILE_SECONDS, env={**os.environ, "LC_ALL": "C"})
        except OSError as error:
            return f"{error.strerror or error}"
        if done.status == 0:
            return ""
        lines = done.complaint.splitlines() or [f"exit status {done.status}"]
        return printable(next((line for line in lines if "error" in line), lines[-1]), 300)

    def must(self, what: str, *arguments: str | Path) -> None:
        """Run the compiler; raises OcigpuError when it fails."""
        failure = self.run(*arguments)
        _succeed(failure and f"compile {what}: {failure}")

    def object(self, name: str, source: str, *flags: str) -> Path:
        """Compile one source file to an object for shared libraries."""
        result = self.scratch / f"{name}.o"
        self.must(source, *_LIBRARY_FLAGS, *flags, f"-I{self.scratch}", "-c", SOURCES / source, "-o", result)
        return result

    def link(self, target: Path, soname: str, item: Path, *extra: str | Path) -> str:
        """Link one shared library; return "" or the failure."""
        return self.run("-shared", "-nostdlib", f"-Wl,-soname,{soname}", "-o", target, item, *extra)


def find_compiler() -> str | None:
    """Return the path of this machine's C compiler, None without one."""
    return shutil.which("gcc") or shutil.which("cc")


def build(root: Path, table: bytes, driver_version: str, model: Model, *, compat32: bool) -> Built:
    """Make every library and program of a model's driver below ``root``, and the links beside them.

    They are compiled; without a compiler they are the prebuilt ones of a wheel or package.  ``table``: of
    ocigpu.sim.table, filled in.  Raises OcigpuError (OCIGPU-SIM-1) when the compiler fails, or both are missing. 32-bit
    libraries and static linking are left out, with a note, where the compiler cannot make them.
    """
    tables = read_tables()["tegra-built" if model.tegra else "built"]
    wanted = [library for library in LIBRARIES if model.fabric or not library.fabric]
    if model.tegra:
        wanted = [LibrarySource(**library) for library in tables["libraries"]]
    more = {"fabric-programs": model.fabric, "cluster-programs": model.cluster}
    names = tables["programs"] + [name for key, has in more.items() if has for name in read_tables()["built"][key]]
    target, ready = root / "usr/lib" / library_triplet(), PREBUILT / platform.machine()
    notes: list[str] = []
    if ready.is_dir() and not find_compiler():
        _place_all(ready, root, target, wanted, driver_version, names[0])
        notes += ["no 32-bit libraries: no C compiler"] * compat32
        count_32 = 0
    else:
        count_32 = _compile_all(root, target, wanted, driver_version, names[0], notes, compat32)
    program = root / "usr/bin" / names[0]
    fill_table(program, table)
    for name in names[1:]:
        program.with_name(name).hardlink_to(program)
    for library in wanted:
        if library.source in _ANSWERING:
            fill_table(target / library.directory / library.names(driver_version)[0], table)
    if not model.tegra:
        gbm = target / "gbm"
        gbm.mkdir(exist_ok=True)
        (gbm / "nvidia-drm_gbm.so").symlink_to("../libnvidia-allocator.so.1")
    paths = (f"/{target.relative_to(root)}/{one.directory}/{one.names(driver_version)[0]}" for one in wanted)
    return Built(len(wanted), count_32, tuple(names), tuple(notes), tuple(paths))


def _compile_all(
    root: Path,
    target: Path,
    wanted: Sequence[LibrarySource],
    version: str,
    program: str,
    notes: list[str],
    compat32: bool,
) -> int:
    """Compile libraries and nvidia-smi, without tables; returns the number of 32-bit libraries."""
    scratch = root / ".build"
    scratch.mkdir()
    compiler = Compiler(scratch)
    with ThreadPoolExecutor(_WORKERS) as pool:
        static = pool.submit(_compile_program, compiler, root / "usr/bin" / program)
        objects = {
            **{name: compiler.object(name, "blank.c", *flags) for name, flags in _BLANK.items()},
            **{source: compiler.object(source, f"{source}.c") for source in _ANSWERING},
        }
        stub = _libc_stub(compiler, objects["blank"], "libc64")
        failures = list(
            pool.map(lambda item: _link(compiler, target, item, version, objects[item.source], stub), wanted)
        )
        for failure in filter(None, failures):
            _succeed(f"link {failure}")
        if not static.result():
            notes.append("nvidia-smi is linked dynamically: there is no static libc, so it needs a glibc image")
    count_32 = _build_32(compiler, root, version, notes) if compat32 else 0
    shutil.rmtree(scratch)
    return count_32


def _place_all(
    ready: Path, root: Path, target: Path, wanted: Sequence[LibrarySource], version: str, program: str
) -> None:
    """Put the prebuilt libraries and nvidia-smi below ``root``, without tables; a blank library gets its SONAME."""
    for library in wanted:
        file, links = library.names(version)
        soname = next(iter(links)).encode()
        content = (ready / f"{_prebuilt_name(library.source)}.so").read_bytes()
        if len(soname) > len(_ANY_SONAME):
            raise sim_error(f"driver version {version}: longer than a prebuilt library has room for", COMPILER_HINT)
        place = target / library.directory / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.replace(_ANY_SONAME, soname.ljust(len(_ANY_SONAME), b"\0")))
        place.chmod(0o755)
        _link_names(place, links)
    (root / "usr/bin").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ready / program, root / "usr/bin" / program)
    (root / "usr/bin" / program).chmod(0o755)


def _prebuilt_name(source: str) -> str:
    """Return the name of a source's prebuilt library: that of its only library, or the source's."""
    return next((one.name for one in LIBRARIES if one.source == source), source) if source in _ANSWERING else source


def place_few(root: Path, table: bytes, driver_version: str, sources: Sequence[str] = _ANSWERING) -> Built:
    """Put only the answering libraries, and nvidia-smi, below ``root``: from the wheel, else compiled; no privileges.

    ``sources``: of the libraries; nvidia-smi comes with NVML.  Raises OcigpuError (OCIGPU-SIM-1) if the wheel has none
    for this type of machine and no compiler is found.
    """
    machine, directory, programs = platform.machine(), root / "usr/lib" / library_triplet(), root / "usr/bin"
    directory.mkdir(parents=True)
    ready = PREBUILT / machine
    with tempfile.TemporaryDirectory(dir=root) as made:
        if not ready.is_dir():
            ready = Path(made)
            try:
                compile_few(ready, sources=sources)
            except OcigpuError as error:
                raise sim_error(
                    f"{error.message}, and this installation brings none for {machine}", COMPILER_HINT
                ) from error
        wanted = [library for library in LIBRARIES if library.source in sources]
        for library in wanted:
            file, links = library.names(driver_version)
            shutil.copyfile(ready / f"{library.name}.so", directory / file)
            (directory / file).chmod(0o755)
            fill_table(directory / file, table)
            for name in links:
                (directory / name).symlink_to(links[name])
        if "nvml" not in sources:
            return Built(len(wanted), 0, (), ())
        programs.mkdir(parents=True)
        program = programs / read_tables()["built"]["programs"][0]
        shutil.copyfile(ready / program.name, program)
    program.chmod(0o755)
    fill_table(program, table)
    return Built(len(wanted), 0, (program.name,), ())


def compile_few(directory: Path, compiler_name: str = "", sources: Sequence[str] = _ANSWERING) -> bool:
    """Compile into ``directory`` what :func:`place_few` and :func:`build` take, with empty tables and no SONAMEs.

    ``compiler_name``: "" is this machine's.  ``sources``: with "nvml" come nvidia-smi and the blank libraries.
    Returns whether nvidia-smi, if it was made, is linked statically.
    """
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        compiler = Compiler(Path(scratch), compiler_name)
        blank = {name: compiler.object(name, "blank.c", *flags) for name, flags in _BLANK.items()}
        stub = _libc_stub(compiler, blank["blank"], "libc64")
        for name, item in blank.items() if "nvml" in sources else ():
            failure = compiler.link(directory / f"{name}.so", _ANY_SONAME.decode(), item, "-s", *stub)
            _succeed(failure and f"link {name}: {failure}")
        for library in (library for library in LIBRARIES if library.source in sources):
            item = compiler.object(library.source, f"{library.source}.c")
            soname = next(iter(library.names("")[1]))
            failure = compiler.link(directory / f"{library.name}.so", soname, item, "-s", *stub)
            _succeed(failure and f"link {library.name}: {failure}")
        if "nvml" in sources:
            return _compile_program(compiler, directory / read_tables()["built"]["programs"][0])
    return True


def find_prebuilt() -> list[str]:
    """Return the types of machines that this installation has prebuilt libraries for."""
    return sorted(path.name for path in PREBUILT.glob("*"))


def prebuild(directory: Path, native: bool = False) -> dict[str, str]:
    """Compile for a wheel, into a directory for each type of machine that a compiler here makes programs for.

    ``native``: for this type only, as for a package.  Returns for each type what the wheel lacks, "" for nothing: where
    it has no libraries, it needs a compiler where it is used.
    """
    machines = {} if native else {machine: f"{machine}-linux-gnu-gcc" for machine in _MACHINES}
    machines[platform.machine()] = ""
    lacking = {}
    for machine, compiler in machines.items():
        place = directory / machine
        place.mkdir(parents=True, exist_ok=True)
        try:
            static = compile_few(place, compiler)
            lacking[machine] = "" if static else "nvidia-smi runs only where glibc is: there is no static libc"
        except OcigpuError as error:
            shutil.rmtree(place)
            lacking[machine] = f"no libraries: {error.message}"
    return lacking


def _libc_stub(compiler: Compiler, item: Path, name: str, *flags: str) -> list[str | Path]:
    """Return linker arguments that make a library need libc.so.6 without binding it to this machine's versions.

    The driver's libraries need libc.so.6 as well (ldconfig lists them as "libc6" for it); a library linked against
    this machine's libc could not be loaded in an older image.
    """
    stub = compiler.scratch / name / "libc.so.6"
    stub.parent.mkdir()
    failure = compiler.link(stub, "libc.so.6", item, *flags)
    _succeed(failure and f"link {stub.name}: {failure}")
    return ["-Wl,--no-as-needed", stub, *flags]


def _link(
    compiler: Compiler, target: Path, library: LibrarySource, version: str, item: Path, extra: Sequence[str | Path]
) -> str:
    directory = target / library.directory
    directory.mkdir(parents=True, exist_ok=True)
    file, links = library.names(version)
    failure = compiler.link(directory / file, next(iter(links)), item, *extra)
    if failure:
        return f"{file}: {failure}"
    (directory / file).chmod(0o755)
    _link_names(directory / file, links)
    return ""


def _link_names(library: Path, links: Mapping[str, str]) -> None:
    for name in links.keys() - {library.name}:
        library.with_name(name).symlink_to(links[name])


def _build_32(compiler: Compiler, root: Path, version: str, notes: list[str]) -> int:
    """Make the 32-bit libraries: blank ones, as nothing runs them; returns their number, 0 where -m32 does not work."""
    target = root / "usr/lib/i386-linux-gnu"
    libraries = [library for library in LIBRARIES if library.bits32]
    items = {"blank": compiler.scratch / "blank32.o", "tls": compiler.scratch / "tls32.o"}
    try:
        if platform.machine() != "x86_64":
            raise sim_error(f"not on {platform.machine()}")
        for name, flags in _BLANK.items():
            _succeed(compiler.run(*_LIBRARY_FLAGS, *flags, "-m32", "-c", SOURCES / "blank.c", "-o", items[name]))
        stub = _libc_stub(compiler, items["blank"], "libc32", "-m32")
        for library in libraries:
            item = items["tls" if library.source == "tls" else "blank"]
            _succeed(_link(compiler, target, library, version, item, stub))
    except OcigpuError as error:  # what compiler or linker lack for -m32 costs only these libraries
        shutil.rmtree(target, ignore_errors=True)
        notes.append(f"no 32-bit libraries: {error.message}")
        return 0
    return len(libraries)


def _succeed(failure: str) -> None:
    if failure:
        raise sim_error(failure, DISK_HINT if os.strerror(errno.ENOSPC) in failure else COMPILER_HINT)


def _compile_program(compiler: Compiler, program: Path) -> bool:
    """Compile nvidia-smi, statically where possible; return whether it is."""
    program.parent.mkdir(parents=True, exist_ok=True)
    arguments: list[str | Path] = [*_FLAGS, f"-I{compiler.scratch}", "-s", SOURCES / "smi.c", "-o", program]
    static = not compiler.run("-static", *arguments)
    if not static:
        compiler.must("smi.c", *arguments)
    program.chmod(0o755)
    return static


def render_unsupported() -> str:
    """Return unsupported.h: a line for each function of NVML that nvidia-ml-py can call and nvml.c lacks.

    Programs that look up a function by its name end if it is missing.  A later version of an existing function is
    omitted, as in an older driver: programs then use the earlier one.
    """
    known = (SOURCES / "nvml_names.txt").read_text().split()
    there = {_VERSION.sub("", name) for item in SOURCES.glob("nvml*.c") for name in _MADE.findall(item.read_text())}
    return "".join(f"UNSUPPORTED({name})\n" for name in known if _VERSION.sub("", name) not in there)
