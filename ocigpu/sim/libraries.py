"""Which libraries the driver of a simulated host has, and how they are compiled."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ocigpu.errors import OcigpuError, printable
from ocigpu.sim.models import SimGpu, cuda_version_of, sim_error

SOURCES = Path(__file__).parent
COMPILER_HINT = "apt-get install gcc libc6-dev"
_WORKERS = 2

_FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-Os", "-U_FORTIFY_SOURCE"]
_LIBRARY_FLAGS = [*_FLAGS, "-fPIC", "-fno-stack-protector", "-fvisibility=hidden"]


@dataclass(frozen=True)
class LibrarySource:
    """One library to make: ``directory`` below the library directory, ``soname`` with ``{v}`` for the driver version.

    The file is ``file`` or, when that is empty, NAME.so.<driver version>; ``links`` are made beside it besides the
    SONAME's, as (name, target).
    """

    name: str
    soname: str
    links: tuple[tuple[str, str], ...] = ()
    file: str = ""
    directory: str = ""
    source: str = "blank"
    fabric_only: bool = False


def _numbered(name: str, number: int = 1) -> LibrarySource:
    return LibrarySource(name, f"{name}.so.{number}")


def _versioned(name: str) -> LibrarySource:
    return LibrarySource(name, name + ".so.{v}")


LIBRARIES = (
    LibrarySource("libnvidia-ml", "libnvidia-ml.so.1", (("libnvidia-ml.so", "libnvidia-ml.so.1"),), source="nvml"),
    _numbered("libnvidia-cfg"),
    LibrarySource("libnvidia-nscq", "libnvidia-nscq.so.2", fabric_only=True),
    LibrarySource("libcuda", "libcuda.so.1", (("libcuda.so", "libcuda.so.1"),), source="cuda"),
    _numbered("libcudadebugger"),
    _numbered("libnvidia-opencl"),
    _versioned("libnvidia-gpucomp"),
    _numbered("libnvidia-ptxjitcompiler"),
    _numbered("libnvidia-allocator"),
    _versioned("libnvidia-pkcs11"),
    _versioned("libnvidia-pkcs11-openssl3"),
    _numbered("libnvidia-nvvm", 4),
    _numbered("libnvidia-ngx"),
    _numbered("libnvidia-encode"),
    _numbered("libnvidia-opticalflow"),
    _numbered("libnvcuvid"),
    _versioned("libnvidia-eglcore"),
    _versioned("libnvidia-glcore"),
    LibrarySource("libnvidia-tls", "libnvidia-tls.so.{v}", source="tls"),
    _versioned("libnvidia-glsi"),
    _numbered("libnvidia-fbc"),
    _versioned("libnvidia-rtcore"),
    _numbered("libnvoptix"),
    LibrarySource("libGLX_nvidia", "libGLX_nvidia.so.0", (("libGLX_indirect.so.0", "libGLX_nvidia.so.{v}"),)),
    _numbered("libEGL_nvidia", 0),
    _numbered("libGLESv2_nvidia", 2),
    _numbered("libGLESv1_CM_nvidia"),
    _versioned("libnvidia-glvkspirv"),
    _versioned("libnvidia-gtk3"),
    _versioned("libnvidia-wayland-client"),
    LibrarySource("libnvidia-egl-gbm", "libnvidia-egl-gbm.so.1", file="libnvidia-egl-gbm.so.1.1.1"),
    LibrarySource("libnvidia-egl-wayland", "libnvidia-egl-wayland.so.1", file="libnvidia-egl-wayland.so.1.1.13"),
    LibrarySource("libvdpau_nvidia", "libvdpau_nvidia.so.1", directory="vdpau"),
    LibrarySource("libglxserver_nvidia", "libglxserver_nvidia.so", directory="nvidia/xorg"),
    LibrarySource("nvidia_drv", "nvidia_drv.so", file="nvidia_drv.so", directory="nvidia/xorg"),
)
"""The libraries of driver 550 as distributions package it, in the order of the vendor's list of capabilities."""

_NAMES_32 = (
    "libnvidia-ml",
    "libcuda",
    "libnvidia-opencl",
    "libnvidia-ptxjitcompiler",
    "libnvidia-eglcore",
    "libnvidia-glcore",
    "libnvidia-tls",
    "libnvidia-glsi",
    "libGLX_nvidia",
    "libEGL_nvidia",
)

BINARIES = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)
FABRIC_BINARY = "nv-fabricmanager"


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
            done = subprocess.run(
                [self.path, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                env={**os.environ, "LC_ALL": "C"},
                check=False,
            )
        except OSError as error:
            return f"{error.strerror}"
        if done.returncode == 0:
            return ""
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        return printable(next((line for line in lines if "error" in line), lines[-1]), 300)

    def must(self, what: str, *arguments: str | Path) -> None:
        """Run the compiler; raises OcigpuError when it fails."""
        failure = self.run(*arguments)
        if failure:
            raise sim_error(f"compile {what}: {failure}", COMPILER_HINT)

    def object(self, name: str, source: str, *flags: str) -> Path:
        """Compile one source file to an object for shared libraries."""
        result = self.scratch / f"{name}.o"
        self.must(source, *_LIBRARY_FLAGS, *flags, f"-I{self.scratch}", "-c", SOURCES / source, "-o", result)
        return result

    def link(self, target: Path, soname: str, item: Path, *extra: str | Path) -> str:
        """Link one shared library; return "" or the failure."""
        return self.run("-shared", "-nostdlib", f"-Wl,-soname,{soname}", "-o", target, item, *extra)


def build(root: Path, directory: str, gpus: Sequence[SimGpu], driver_version: str, *, compat32: bool) -> Built:
    """Compile every library and program of the driver below ``root`` and make the links beside them.

    ``directory``: where the host will be in the end; it is compiled in. Raises OcigpuError (OCIGPU-SIM-1) when the
    compiler is missing or fails. 32-bit libraries and static linking are left out, with a note, where the compiler
    cannot make them.
    """
    scratch = root / ".build"
    scratch.mkdir()
    compiler = _Compiler(scratch)
    (scratch / "table.h").write_text(render_table(directory, gpus, driver_version))
    fabric = gpus[0].model.fabric
    wanted = [library for library in LIBRARIES if fabric or not library.fabric_only]
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
    if failure:
        raise sim_error(f"link {stub.name}: {failure}", COMPILER_HINT)
    return ["-Wl,--no-as-needed", stub, *flags]


def _link(
    compiler: _Compiler, target: Path, library: LibrarySource, version: str, item: Path, extra: Sequence[str | Path]
) -> str:
    directory = target / library.directory
    directory.mkdir(parents=True, exist_ok=True)
    soname = library.soname.format(v=version)
    file = library.file or f"{library.name}.so.{version}"
    failure = compiler.link(directory / file, soname, item, *extra)
    if failure:
        return f"{file}: {failure}"
    (directory / file).chmod(0o755)
    for name, link_target in ((soname, file), *library.links):
        if name != file:
            (directory / name).symlink_to(link_target.format(v=version))
    return ""


def _build_32(compiler: _Compiler, root: Path, version: str, notes: list[str]) -> int:
    """Make the 32-bit libraries: blank ones, as nothing runs them; returns their number, 0 where -m32 does not work."""
    if platform.machine() != "x86_64":
        notes.append(f"no 32-bit libraries: not on {platform.machine()}")
        return 0
    item = compiler.scratch / "blank32.o"
    flags: list[str | Path] = [*_LIBRARY_FLAGS, "-m32", "-c", SOURCES / "blank.c", "-o"]
    failure = compiler.run(*flags, item) or compiler.run("-DWITH_ABI_NOTE", *flags, compiler.scratch / "tls32.o")
    if failure:
        notes.append(f"no 32-bit libraries: {failure}")
        return 0
    target = root / "usr/lib/i386-linux-gnu"
    libraries = [library for library in LIBRARIES if library.name in _NAMES_32]
    try:
        stub = _libc_stub(compiler, item, "libc32", "-m32")
    except OcigpuError as error:  # what the linker lacks for -m32 costs only these libraries
        notes.append(f"no 32-bit libraries: {error}")
        return 0
    for library in libraries:
        source = compiler.scratch / "tls32.o" if library.source == "tls" else item
        failure = _link(compiler, target, library, version, source, stub)
        if failure:
            shutil.rmtree(target)
            notes.append(f"no 32-bit libraries: {failure}")
            return 0
    return len(libraries)


def _build_programs(compiler: _Compiler, root: Path, fabric: bool, notes: list[str]) -> tuple[str, ...]:
    """Compile nvidia-smi, statically where possible, and give it its other names."""
    directory = root / "usr/bin"
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / BINARIES[0]
    arguments: list[str | Path] = [*_FLAGS, "-s", f"-I{compiler.scratch}", SOURCES / "smi.c", "-o", program]
    if compiler.run("-static", *arguments):
        compiler.must("smi.c", *arguments)
        notes.append("nvidia-smi is linked dynamically: there is no static libc, so it needs a glibc image")
    program.chmod(0o755)
    names = (*BINARIES, FABRIC_BINARY) if fabric else BINARIES
    for name in names[1:]:
        (directory / name).hardlink_to(program)
    return names


def render_table(directory: str, gpus: Sequence[SimGpu], driver_version: str) -> str:
    """Return table.h of simhost.h: the GPUs and MIG devices as C initializers."""
    major, minor = cuda_version_of(driver_version).split(".")
    migs = [(gpu, mig) for gpu in gpus for mig in gpu.mig_devices]
    lines = [
        f"#define SIM_DIRECTORY {c_string(directory)}",
        f"#define SIM_DRIVER_VERSION {c_string(driver_version)}",
        f"#define SIM_NVML_VERSION {c_string(f'{major}.{driver_version}')}",
        f"#define SIM_CUDA_VERSION {int(major) * 1000 + int(minor) * 10}",
        f"#define SIM_GPUS {len(gpus)}",
        f"#define SIM_MIGS {len(migs)}",
        "static const struct sim_gpu sim_gpus[SIM_GPUS] = {",
    ]
    for gpu in gpus:
        model = gpu.model
        arch_major, arch_minor = model.architecture.split(".")
        lines.append(
            f"    {{{c_string(model.name)}, {c_string(gpu.uuid)}, {model.brand}, {arch_major}, {arch_minor}, "
            f"{int(gpu.bus_id.split(':')[1], 16)}, {model.device_id << 16 | 0x10DE:#x}u, "
            f"{model.subsystem_id << 16 | 0x10DE:#x}u, {model.power_watts}, {model.multiprocessors}, "
            f"{model.memory_mib << 20}ull, {int(bool(model.mig_profiles))}, {int(gpu.mig_enabled)}}},"
        )
    lines += ["};", "static const struct sim_mig sim_migs[SIM_MIGS + 1] = {"]
    for gpu, mig in migs:
        profile = mig.profile
        lines.append(
            f"    {{{c_string(profile.name)}, {c_string(mig.uuid)}, {gpu.index}, {mig.gpu_instance}, "
            f"{mig.compute_instance}, {mig.gi_minor}, {mig.ci_minor}, {profile.compute_slices}, "
            f"{profile.compute_slices}, {profile.multiprocessors}, {profile.memory_mib << 20}ull}},"
        )
    return "\n".join([*lines, "    {0}};", ""])


def c_string(text: str) -> str:
    """Return text as a C string literal; everything unusual becomes an octal escape of its bytes."""
    plain = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 -_./"
    return '"' + "".join(chr(c) if c in plain else f"\\{c:03o}" for c in os.fsencode(text)) + '"'
