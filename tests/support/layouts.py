"""Simulated hosts whose driver lies where real systems have it: layouts.toml."""

import json
import os
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template
from typing import Any

import pytest
from support import requirements
from support.process import run
from support.product import SimulatedHost

from ocigpu.cdi.generate import generate
from ocigpu.cdi.write import write_spec
from ocigpu.gpus.nvidia.nodes import apply_changes, find_link_changes, plan_nodes, read_driver
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.gpus.tree import find_roots
from ocigpu.sim.create import create_host
from ocigpu.sim.faults import SPEC
from ocigpu.sim.files import read_tables
from ocigpu.sim.models import find_model, make_gpus
from ocigpu.system.settings_file import read_settings

TABLE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
LAYOUTS = {name: TABLE["debian"] | entry for name, entry in TABLE.items()}
LISTED = [name for name, entry in LAYOUTS.items() if entry["list"]]
"""Layouts of hosts whose GPUs NVML or procfs lists."""
VERSION = "550.163.01"
MACHINE = os.uname().machine
TRIPLET = f"{MACHINE}-linux-gnu"
VALUES = {"version": VERSION, "machine": MACHINE, "triplet": TRIPLET}
_DIRECTORY_SIZE = 4096
"""Of the host's directory in the tables of simulated libraries (ocigpu/sim/simhost.h)."""

LaidOut = Callable[[str], SimulatedHost]


def find_layout(name: str, **values: str) -> dict[str, Any]:
    """Return a layout with its $names replaced, by other values than this machine's where some are given."""
    layout: dict[str, Any] = fill_in(LAYOUTS[name], **values)
    own = {key: layout[key] for key in ("libraries", "libraries32")}
    return {**fill_in(layout, **own), "char": ""}


def fill_in(value: Any, **more: str) -> Any:
    """Return a value of the table with its $names replaced."""
    if isinstance(value, dict):
        return {fill_in(key, **more): fill_in(item, **more) for key, item in value.items()}
    if isinstance(value, list):
        return [fill_in(item, **more) for item in value]
    return Template(value).safe_substitute(VALUES | more) if isinstance(value, str) else value


@pytest.fixture(scope="session")
def laid_out(session_directory: Path) -> Iterator[LaidOut]:
    """Call with the name of a layout: returns a host of two GPUs that has it, with a system around; made once."""
    requirements.require(requirements.root(), requirements.programs("gcc"))
    directory = session_directory / "laid-out"
    directory.mkdir()

    def make(name: str) -> SimulatedHost:
        layout = find_layout(name)
        model, target = layout["model"], directory / name
        base = directory / f"base-{model}"
        if not base.exists():
            create_host(str(base), gpus=2, model=model, driver_version=VERSION, ldcache=False, faults=["none"])
        if not target.exists():
            lay_out(base, target, layout)
        return SimulatedHost(target, tuple(gpu.uuid for gpu in make_gpus(find_model(model), 2, ())), ())

    yield make
    shutil.rmtree(directory, ignore_errors=True)


def lay_out(base: Path, target: Path, layout: dict[str, Any]) -> None:
    """Make a host of this layout of the files of another one."""
    target.mkdir()
    for path, text in layout["links"].items():
        _link(target, path, text)
    placed: dict[str, list[str]] = {}
    linked = {os.readlink(path) for path in (base / "usr/lib").glob("*-linux-gnu/*") if path.is_symlink()}
    for source in _files(base):
        kind, name = _kind(f"/{source.relative_to(base)}", linked)
        if layout.get(kind, "/") == "" or f"/{name}" in LEFT or (layout["only"] and not _is_taken(kind, name, layout)):
            continue
        name = layout["only"].get(name, name)
        if kind == "vulkan":
            name = name.replace("nvidia_icd.json", layout["icd"])
        elif kind == "glx":
            if source.is_symlink() and layout["glxserver"] == name:
                continue  # the file has this name
            name = name if source.is_symlink() else layout["glxserver"]
        place = f"{layout.get(kind, '')}/{name}"
        place = place if kind in ("", "firmware", "dev", "sockets") else layout["root"] + place
        placed.setdefault(kind, []).append(name)
        if named := layout["named"].get(name):
            write(target, place, source.read_text().replace(*named))
        if kind == "programs" and layout["kept"]:
            write(target, place, "#!/nix/store/g2-glibc/lib/ld.so\n", 0o755)
            place = f"{layout['kept']}/{name}"
        _copy(source, _inside(target, place), base, target, layout["only"])
    _show(target, layout, placed)
    _finish(target, layout, placed)


LEFT = ("/config.toml", "/etc/ld.so.conf", "/var/run/cdi/nvidia.yaml")
"""Files of the base that every host has its own of."""


def _is_taken(kind: str, name: str, layout: dict[str, Any]) -> bool:
    if kind == "":
        return "nvidia" not in name or name.startswith("usr/bin/")
    return kind in ("libraries", "programs") and name in layout["only"]


def _show(target: Path, layout: dict[str, Any], placed: dict[str, list[str]]) -> None:
    """Make links to the driver's files; Debian's alternatives have those of the names that programs use."""
    root = _inside(target, f"{layout['root']}/etc/x").parents[1]
    for shown in layout["shown"]:
        by = shown.get("by", "")
        for name in (name for name in placed.get(shown["of"], ()) if not (by and VERSION in name)):
            file = f"{layout[shown['of']]}/{name}"
            _link(root, f"{shown['at']}/{name}", fill_in(by, name=name) or file)
            if by:
                _link(root, fill_in(by, name=name), file)


def _finish(target: Path, layout: dict[str, Any], placed: dict[str, list[str]]) -> None:
    """Write what depends on where all is."""
    root = _inside(target, f"{layout['root']}/etc/x").parents[1]
    for name in (name for name in placed["libraries"] if layout["stale"] and name.endswith(VERSION)):
        file = _inside(root, f"{layout['libraries']}/{name}")
        shutil.copy(file, file.with_name(name.replace(VERSION, layout["stale"])))
    if cache := layout["cache"]:
        write(root, "/etc/ld.so.conf", "".join(f"{directory}\n" for directory in cache["directories"]))
        place = _inside(root, cache["path"])
        run(["/sbin/ldconfig", "-r", root, "-X", "-i", "-C", f"/{place.relative_to(root)}"])
    if layout["ldconfig"] != (usual := TABLE["debian"]["ldconfig"]):
        _inside(target, usual).rename(_inside(target, layout["ldconfig"]))
    if layout["parameter"]:
        write(target, "/sys/module/firmware_class/parameters/path", layout["parameter"] + "\n")
    for path, text in layout["files"].items():
        write(target, path, text)
    for path, (major, minor) in layout["nodes"].items():
        os.mknod(_inside(target, path), stat.S_IFCHR | 0o666, os.makedev(major, minor))
    if layout["csv"]:
        lines = [f"dev, {path}" for path in layout["nodes"]]
        lines += [f"lib, {layout[kind]}/{name}" for kind in ("libraries", "programs") for name in placed[kind]]
        write(target, "/etc/nvidia-container-runtime/host-files-for-container.d/drivers.csv", "\n".join(lines) + "\n")
        write(target, "/etc/nv_tegra_release", "# R36 (release), REVISION: 4.0\n")
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in layout["settings"].items()]
    if lines:
        write(target, "/etc/ocigpu/config.toml", "".join(lines))
    write(target, "/config.toml", "".join([*lines, f'simulation.root = "{target}"\n']))
    settings = read_settings(str(target / "config.toml"))
    if layout["list"]:
        driver = read_driver(find_roots(settings))
        apply_changes(find_link_changes(plan_nodes(driver)[0], driver, find_roots(settings)))
    write_spec(generate(GenerateOptions(hook_path="/usr/bin/ocigpu-hook"), settings).spec, str(target / SPEC), "yaml")


def _kind(path: str, linked: set[str]) -> tuple[str, str]:
    """Return what kind of file of the driver a path of the base is, "" for the system's, and its name below that."""
    built = read_tables()["built"]
    directory, _, name = path.rpartition("/")
    if directory == "/usr/bin" and name in (*built["programs"], *built["fabric-programs"]):
        return "programs", name
    xorg, native, other = f"/usr/lib/{TRIPLET}/nvidia/xorg", f"/usr/lib/{TRIPLET}", "/usr/lib/i386-linux-gnu"
    if directory == xorg:
        return "xorg" if name == "nvidia_drv.so" else "glx", name
    if directory in (native, other) and name.endswith(VERSION) and name not in linked:
        return "unlinked" if directory == native else "unlinked32", name
    kinds = {f"{native}/vdpau": "vdpau", native: "libraries", other: "libraries32", "/lib/firmware": "firmware"}
    kinds |= {
        "/usr/share": "share",
        "/etc/vulkan": "vulkan",
        "/etc/OpenCL": "opencl",
        "/dev/char": "char",
        "/dev": "dev",
    }
    for start, kind in kinds.items():
        if path.startswith(f"{start}/"):
            return kind, path.removeprefix(f"{start}/")
    return "", path[1:]


def _files(directory: Path) -> Iterator[Path]:
    for parent, directories, files in os.walk(directory):
        links = [name for name in directories if os.path.islink(f"{parent}/{name}")]
        empty = not directories and not files
        yield from (Path(parent, name) for name in [*files, *links])
        if empty:
            yield Path(parent)


def _inside(target: Path, path: str) -> Path:
    """Return where a path of the laid-out host is, links of directories followed inside it; makes the directories."""
    place = target
    parts = path.strip("/").split("/")[::-1]
    while len(parts) > 1:
        place = place / parts.pop()
        if place.is_symlink():
            text = os.readlink(place)
            parts += text.strip("/").split("/")[::-1]
            place = target if text.startswith("/") else place.parent
        else:
            place.mkdir(exist_ok=True)
    return place / parts[0]


def write(target: Path, path: str, text: str, mode: int = 0o644) -> None:
    place = _inside(target, path)
    place.unlink(missing_ok=True)
    place.write_text(text)
    place.chmod(mode)


def _link(target: Path, path: str, text: str) -> None:
    place = _inside(target, path)
    if not os.path.lexists(place):
        place.symlink_to(text)


def _copy(source: Path, place: Path, base: Path, target: Path, names: dict[str, str]) -> None:
    status = source.lstat()
    if os.path.lexists(place):
        return
    if stat.S_ISLNK(status.st_mode):
        place.symlink_to(names.get(os.readlink(source), os.readlink(source)))
    elif stat.S_ISDIR(status.st_mode):
        place.mkdir()
        place.chmod(stat.S_IMODE(status.st_mode))
    elif stat.S_ISREG(status.st_mode):
        content = source.read_bytes()
        own, other = (os.fsencode(path).ljust(_DIRECTORY_SIZE, b"\0") for path in (base, target))
        if own in content:
            place.write_bytes(content.replace(own, other))
            place.chmod(stat.S_IMODE(status.st_mode))
        else:
            os.link(source, place)
    else:
        os.mknod(place, status.st_mode, status.st_rdev)
        place.chmod(stat.S_IMODE(status.st_mode))
        os.chown(place, status.st_uid, status.st_gid)
