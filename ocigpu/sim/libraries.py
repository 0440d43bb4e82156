"""Which libraries the driver of a simulated host has, and how they are compiled."""

import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ocigpu.core.errors import OcigpuError, printable
from ocigpu.sim.files import fill_in, read_tables
from ocigpu.sim.models import (
    CPUS_OF_NODE,
    FIRST_INSTANCE_MINOR,
    MAX_MIG_GPUS,
    MigProfile,
    SimGpu,
    cuda_version_of,
    numa_node,
    sim_error,
    sim_uuid,
)
from ocigpu.system.programs import run_program

SOURCES = Path(__file__).parent
COMPILE_SECONDS = 600
COMPILER_HINT = "apt-get install gcc libc6-dev"
_WORKERS = 2
_CALLED = re.compile(r'FunctionPointer\("(nvml\w+)"')
_MADE = re.compile(r"^(?:EXPORT [^(]*?|[A-Z_]+\()(nvml[A-Z]\w+)", re.MULTILINE)
_VERSION = re.compile(r"(_v\d+|V)$")

_FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O0", "-U_FORTIFY_SOURCE"]  # compiling takes most of making a host
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
    """What was compiled: counts, and a note for each thing this machine's compiler could not do."""

    libraries: int
    libraries_32: int
    binaries: tuple[str, ...]
    notes: tuple[str, ...]


class _Compiler:
    """The machine's C compiler; everything it makes on the way lies in ``scratch``."""

    def __init__(self, scratch: Path) -> None:
        path = shutil.which("gcc") or shutil.which("cc")
        if path is None:
            raise sim_error("no C compiler: gcc or cc is needed to make the libraries", COMPILER_HINT)
        self.path = path
        self.scratch = scratch

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


def build(
    root: Path, directory: str, gpus: Sequence[SimGpu], driver_version: str, caps_major: int, *, compat32: bool
) -> Built:
    """Compile every library and program of the driver below ``root`` and make the links beside them.

    ``directory``: where the host will be in the end; it is compiled in, with the major of MIG's nodes. Raises
    OcigpuError (OCIGPU-SIM-1) when the compiler is missing or fails. 32-bit libraries and static linking are left out,
    with a note, where the compiler cannot make them.
    """
    scratch = root / ".build"
    scratch.mkdir()
    compiler = _Compiler(scratch)
    (scratch / "table.h").write_text(render_table(directory, gpus, driver_version, caps_major))
    (scratch / "unsupported.h").write_text(render_unsupported())
    fabric = gpus[0].model.fabric
    wanted = [library for library in LIBRARIES if fabric or not library.fabric]
    notes: list[str] = []
    with ThreadPoolExecutor(_WORKERS) as pool:
        programs = pool.submit(_build_programs, compiler, root, fabric, notes)
        objects = {
            "blank": compiler.object("blank", "blank.c"),
            "tls": compiler.object("tls", "blank.c", "-DWITH_ABI_NOTE"),
            "nvml": compiler.object("nvml", "nvml.c"),
            "cuda": compiler.object("cuda", "cuda.c"),
        }
        stub = _libc_stub(compiler, objects["blank"], "libc64")
        target = root / "usr/lib" / library_triplet()
        failures = list(
            pool.map(lambda item: _link(compiler, target, item, driver_version, objects[item.source], stub), wanted)
        )
        for failure in filter(None, failures):
            raise sim_error(f"link {failure}", COMPILER_HINT)
        binaries = programs.result()
    count_32 = _build_32(compiler, root, driver_version, notes) if compat32 else 0
    gbm = target / "gbm"
    gbm.mkdir(exist_ok=True)
    (gbm / "nvidia-drm_gbm.so").symlink_to("../libnvidia-allocator.so.1")
    shutil.rmtree(scratch)
    return Built(len(wanted), count_32, binaries, tuple(notes))


def _libc_stub(compiler: _Compiler, item: Path, name: str, *flags: str) -> list[str | Path]:
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
    compiler: _Compiler, target: Path, library: LibrarySource, version: str, item: Path, extra: Sequence[str | Path]
) -> str:
    directory = target / library.directory
    directory.mkdir(parents=True, exist_ok=True)
    file, links = library.names(version)
    failure = compiler.link(directory / file, next(iter(links)), item, *extra)
    if failure:
        return f"{file}: {failure}"
    (directory / file).chmod(0o755)
    for name in links.keys() - {file}:
        (directory / name).symlink_to(links[name])
    return ""


def _build_32(compiler: _Compiler, root: Path, version: str, notes: list[str]) -> int:
    """Make the 32-bit libraries: blank ones, as nothing runs them; returns their number, 0 where -m32 does not work."""
    target = root / "usr/lib/i386-linux-gnu"
    libraries = [library for library in LIBRARIES if library.bits32]
    items = {"blank": compiler.scratch / "blank32.o", "tls": compiler.scratch / "tls32.o"}
    try:
        if platform.machine() != "x86_64":
            raise sim_error(f"not on {platform.machine()}")
        for name, flags in (("blank", ()), ("tls", ("-DWITH_ABI_NOTE",))):
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
        raise sim_error(failure, COMPILER_HINT)


def _build_programs(compiler: _Compiler, root: Path, fabric: bool, notes: list[str]) -> tuple[str, ...]:
    """Compile nvidia-smi, statically where possible, and give it its other names."""
    directory = root / "usr/bin"
    directory.mkdir(parents=True, exist_ok=True)
    built = read_tables()["built"]
    names = (*built["programs"], *(built["fabric-programs"] if fabric else ()))
    program = directory / names[0]
    arguments: list[str | Path] = [*_FLAGS, "-s", f"-I{compiler.scratch}", SOURCES / "smi.c", "-o", program]
    if compiler.run("-static", *arguments):
        compiler.must("smi.c", *arguments)
        notes.append("nvidia-smi is linked dynamically: there is no static libc, so it needs a glibc image")
    program.chmod(0o755)
    for name in names[1:]:
        (directory / name).hardlink_to(program)
    return names


def render_table(directory: str, gpus: Sequence[SimGpu], driver_version: str, caps_major: int = 0) -> str:
    """Return table.h of simhost.h: the GPUs, their connections and what MIG makes of them, as C."""
    major, minor = cuda_version_of(driver_version).split(".")
    model = gpus[0].model
    profiles = model.mig_profiles
    defines: dict[str, object] = {
        "DIRECTORY": c_string(directory),
        "DRIVER_VERSION": c_string(driver_version),
        "NVML_VERSION": c_string(f"{major}.{driver_version}"),
        "CUDA_VERSION": int(major) * 1000 + int(minor) * 10,
        "GPUS": len(gpus),
        "NVLINKS": model.nvlinks,
        "NVLINK_GROUP": model.nvlink_group,
        "NVLINKS_EACH": model.nvlinks // (model.nvlink_group - 1) if model.nvlink_group else 1,
        "CLUSTER": c_string(sim_uuid("", model.key)[1:] if model.cluster else ""),
        "PROFILES": len(profiles),
        "MEMORY_SLICES": model.memory_slices if profiles else 0,
        "CAPS_MAJOR": caps_major,
        "CPUS_OF_NODE": CPUS_OF_NODE,
        "MIG_GPUS": MAX_MIG_GPUS,
        "FIRST_MINOR": FIRST_INSTANCE_MINOR,
        "MIG_STATE": " ".join(map(c_string, ["", *_mig_state(gpus)])),
    }
    lines = [f"#define SIM_{name} {value}" for name, value in defines.items()]
    lines.append("static const struct sim_gpu sim_gpus[SIM_GPUS] = {")
    lines += [_initializer(_gpu_fields(gpu, len(gpus))) for gpu in gpus]
    lines += ["};", "static const struct sim_profile sim_profiles[SIM_PROFILES + 1] = {"]
    lines += [_initializer(_profile_fields(profile)) for profile in profiles]
    return "\n".join([*lines, "    {0}};", ""])


def _gpu_fields(gpu: SimGpu, count: int) -> list[object]:
    model = gpu.model
    return [
        *(c_string(model.name), c_string(gpu.uuid), model.brand, *model.architecture.split(".")),
        *(int(gpu.bus_id.split(":")[1], 16), model.device_id << 16 | 0x10DE, model.subsystem_id << 16 | 0x10DE),
        *(numa_node(gpu.index, count), model.power_watts, model.multiprocessors, model.memory_mib << 20),
    ]


def _profile_fields(profile: MigProfile) -> list[object]:
    return [
        *(c_string(profile.name), profile.enumerator, profile.id, profile.compute_slices, profile.memory_slices),
        *(profile.most, profile.multiprocessors, f"{{{', '.join(map(str, profile.engines))}}}"),
        *(sum(1 << start for start in profile.starts), profile.memory_mib),
    ]


def _initializer(fields: Iterable[object]) -> str:
    return f"    {{{', '.join(map(str, fields))}}},"


def _mig_state(gpus: Sequence[SimGpu]) -> list[str]:
    """Return the lines that sim_load in simhost.h reads."""
    lines = [f"mode {gpu.index} 1\n" for gpu in gpus if gpu.mig_enabled]
    for gpu in gpus:
        for mig in gpu.mig_devices:
            instance = (gpu.index, mig.gpu_instance, gpu.model.mig_profiles.index(mig.profile), mig.start)
            start = " ".join(map(str, instance))
            lines.append(f"mig {start} -1 0 0 -\n")
            lines.append(f"mig {start} {mig.compute_instance} {mig.profile.compute_slices} 0 {mig.uuid}\n")
    return lines


def render_unsupported() -> str:
    """Return unsupported.h: a line for each function of NVML that nvidia-ml-py can call and nvml.c does not have.

    Programs that look for a function by its name end when there is none.  A later version of one that there is stays
    away, as with an older driver: they then take the earlier one.
    """
    found = importlib.util.find_spec("pynvml")
    if found is None or found.origin is None:
        return ""
    known = set(_CALLED.findall(Path(found.origin).read_text(errors="replace")))
    there = {_VERSION.sub("", name) for item in SOURCES.glob("nvml*.c") for name in _MADE.findall(item.read_text())}
    return "".join(f"UNSUPPORTED({name})\n" for name in sorted(known) if _VERSION.sub("", name) not in there)


def c_string(text: str) -> str:
    """Return text as a C string literal; everything unusual becomes an octal escape of its bytes."""
    plain = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 -_./"
    return '"' + "".join(chr(c) if c in plain else f"\\{c:03o}" for c in os.fsencode(text)) + '"'
