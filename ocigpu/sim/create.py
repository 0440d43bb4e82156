"""Make a simulated GPU host: a complete driver root, with real libraries and nodes and no GPU behind them."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ocigpu
from ocigpu.core.errors import OcigpuError, quoted
from ocigpu.core.toml import toml_value
from ocigpu.gpus.vendors import load_vendor
from ocigpu.sim import redfish
from ocigpu.sim.driverless import check_driverless, describe_module, module_of, serial_of, write_driverless
from ocigpu.sim.fabric import BOARD_OF, SimulatedManager
from ocigpu.sim.files import (
    make_sockets,
    read_tables,
    write_file,
    write_files,
    write_firmware,
    write_kernel,
    write_ldcache,
    write_tegra,
)
from ocigpu.sim.libraries import build, library_triplet, place_few
from ocigpu.sim.made import read_marker, write_marker
from ocigpu.sim.models import NVIDIA, Model, SimGpu, cuda_version_of, describe_mig, find_model, make_gpus, sim_error
from ocigpu.sim.nodes import (
    NVIDIA_MAJORS,
    Majors,
    SimNode,
    choose_first_card,
    choose_majors,
    free_majors,
    link_dri_by_path,
    make_nodes,
    plan_nodes,
    plan_tegra_nodes,
)
from ocigpu.sim.program import render_stub
from ocigpu.sim.table import make_table

_NO_FILES = {"library_directory": "", "libraries": [], "binaries": [], "sockets": [], "dri": True, "ldcache": False}
_VERSION = re.compile(r"[1-9][0-9]{2}\.[0-9]{1,3}(\.[0-9]{1,2})?")


def create_host(
    directory: str,
    gpus: int = 0,
    model: str | Sequence[str] = "h100",
    mig: Sequence[str] = (),
    driver_version: str = "",
    *,
    driver: str = "",
    iommufd: bool = False,
    dri: bool = True,
    nodes: bool | None = None,
    sockets: bool = True,
    compat32: bool = True,
    ldcache: bool = True,
    few: bool = False,
    faults: Sequence[str] = (),
    clique: str = "",
    progress: Callable[[str], None] | None = None,
) -> str:
    """Make a simulated host in ``directory`` and return the path of its settings file, DIRECTORY/config.toml.

    ``gpus``: 0 means eight, or one for a model whose hosts have one.  ``model``: several belong to several vendors, and
    the host gets this number of GPUs of each.  ``mig``: layouts such as "0:1g.10gb,3g.40gb" or "all:7g.80gb", one per
    GPU.  ``driver_version`` "" is the model's usual one.  ``nodes``: True real device nodes (needs root), False regular
    files that stand for them, None real ones where mknod(2) is permitted.  ``driver`` "none": the GPUs are bound to
    vfio-pci and the host lacks all of NVIDIA's files; with ``iommufd`` the kernel also has nodes for single functions.
    ``dri``, ``sockets``, ``compat32`` and ``ldcache`` leave out the parts they name.  ``few``: only what programs of
    this machine load, NVML, CUDA and nvidia-smi, without any of these and without nodes; of another vendor only its
    programs and their files.  ``faults``: names of ocigpu.sim.faults; with any, also "none", the host has a system
    around the driver.  ``clique``: as of ocigpu.sim.models.find_clique.  ``progress`` is called with a line per step.

    Everything is made beside the directory and renamed into place, so a failure leaves nothing behind. The directory
    must not exist or be empty. Raises OcigpuError (OCIGPU-SIM-1); needs a C compiler or the
    prebuilt libraries of a wheel or package, and no privileges.
    """
    if faults:
        from ocigpu.sim.faults import check_names  # here: most hosts have none

        check_names(faults)
    models = sorted(map(find_model, [model] if isinstance(model, str) else model), key=lambda one: one.vendor != NVIDIA)
    if len({one.vendor for one in models}) < len(models):
        raise sim_error("a simulated host has one model of each vendor")
    chosen, *others = models
    version = driver_version or chosen.driver_version
    if chosen.vendor != NVIDIA and (faults or mig or version != chosen.driver_version):
        raise sim_error(f"model {chosen.key}: only nodes and sysfs are simulated: no MIG devices, faults and versions")
    if few and (others or faults):
        what = "GPUs of several vendors" if others else "faults"
        fix = " ".join(("as root: ocigpu sim create DIR", *(f"--model {one.key}" for one in models)))
        raise sim_error(f"{what} need a whole simulated host, not only its programs", fix)
    if chosen.vendor == NVIDIA and not _VERSION.fullmatch(version):
        raise sim_error(f"driver version {quoted(version)}: not like {chosen.driver_version}")
    if chosen.tegra and (faults or driver or others):
        raise sim_error(
            f"model {chosen.key}: a Jetson is simulated as it is: no faults, no other GPUs, not without driver"
        )
    machines = make_gpus(chosen, gpus or (1 if chosen.alone else 8), mig, clique)
    if driver or iommufd:
        _check_without_driver(driver, machines, few or bool(others or faults or driver_version))
        version = ""
    target = _check_target(directory)
    parts = _Parts(dri, nodes, sockets, compat32, ldcache, few, tuple(others), iommufd)
    if chosen.tegra:
        parts = parts._replace(dri=False, sockets=False, compat32=False)
    if few:
        parts = _Parts(False, False, sockets, False, False, True, ())
    say = progress or (lambda _line: None)
    old_umask = os.umask(0o022)  # an ordinary user must be able to read it all, whatever the caller's umask
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}.", suffix=".ocigpu-sim", dir=target.parent))
        try:
            beside.chmod(0o755)
            _make_host(beside, target, machines, version, parts, say)
            beside.rename(target)  # replaces an empty directory, fails with ENOTEMPTY for any other (rename(2))
        except BaseException:  # any exception, also an interrupt: raised again after the removal
            shutil.rmtree(beside, ignore_errors=True)
            raise
        if faults:
            from ocigpu.sim.faults import apply_faults

            say("making a system around the driver, and its faults")
            apply_faults(str(target), faults)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise sim_error(f"make {target}: {where}{error.strerror}") from error
    finally:
        os.umask(old_umask)
    return str(target / "config.toml")


class _Parts(NamedTuple):
    """Which optional parts to make; see create_host."""

    dri: bool
    nodes: bool | None
    sockets: bool
    compat32: bool
    ldcache: bool
    few: bool
    others: tuple[Model, ...]
    iommufd: bool = False


def _check_without_driver(driver: str, gpus: tuple[SimGpu, ...], more: bool) -> None:
    if driver != "none":
        raise sim_error(
            f"driver {quoted(driver)}: not known" if driver else "VFIO is simulated without a driver only",
            "--driver none, or leave it out for NVIDIA's",
        )
    if more or gpus[0].model.vendor != NVIDIA:
        raise sim_error("a host without a driver has GPUs of one model of NVIDIA's: no versions, faults and libraries")
    check_driverless(gpus)


def _check_target(directory: str) -> Path:
    """Return the absolute path of a directory that may be made; its parent's links are resolved."""
    if not directory or not directory.isprintable():
        raise sim_error(f"directory {quoted(directory)}: not a usable name")
    given = Path(os.path.abspath(directory))
    if given.is_symlink():
        raise sim_error(f"{given}: a symbolic link", "name a directory that does not exist yet")
    target = given.parent.resolve() / given.name
    if not target.parent.is_dir():
        raise sim_error(f"{target}: no directory {target.parent}", f"mkdir -p {target.parent}")
    if not target.name:
        raise sim_error(f"{target}: the root directory cannot be a simulated host")
    if not target.exists():
        return target
    if not target.is_dir():
        raise sim_error(f"{target}: exists and is not a directory")
    if any(target.iterdir()):
        try:
            read_marker(target)
        except OcigpuError as error:
            raise sim_error(f"{target}: not empty, and not a simulated host", "name an empty directory") from error
        raise sim_error(f"{target}: already a simulated host", f"remove it first: ocigpu sim remove {target}")
    return target


def _make_host(
    root: Path, target: Path, gpus: tuple[SimGpu, ...], version: str, parts: _Parts, say: Callable[[str], None]
) -> None:
    first_card = choose_first_card()
    models: tuple[Model, ...] = (gpus[0].model, *parts.others)
    if not version:
        say("making the PCI bus, IOMMU groups and nodes of VFIO")
        marker = _make_driverless(root, target, gpus, parts)
    elif models[0].vendor == NVIDIA:
        marker = _make_nvidia(root, target, gpus, version, first_card, parts, say)
    else:
        marker = {**_describe(models[0], version, "", real=False), "majors": {}, **_NO_FILES, "gpus": [], "notes": []}
    for number, model in enumerate(models):
        if model.vendor != NVIDIA:
            say(f"making device nodes and /sys: {model.name}")
            numbers = (free_majors()[NVIDIA_MAJORS + number], first_card + number * len(gpus))
            _add_other(root, target, model, len(gpus), *numbers, parts, marker)
    write_marker(root, marker)
    for name in ("run", "tmp", "proc", "etc"):
        (root / name).mkdir(exist_ok=True)
    write_file(root / "config.toml", render_config(str(target)))


def _make_driverless(root: Path, target: Path, gpus: tuple[SimGpu, ...], parts: _Parts) -> dict[str, Any]:
    made = write_driverless(root, gpus, iommufd=parts.iommufd, real=parts.nodes)
    if _start_manager(root, gpus[0].model):  # it runs in the service machine: the host has the client's library
        version = gpus[0].model.driver_version
        place_few(root, make_table(str(target), gpus, version, few=True), version, ("nvfm",))
    modules, serials = {one.index: module_of(one) for one in gpus}, {one.index: serial_of(one) for one in gpus}
    documents = redfish.make_documents(gpus, modules, serials)
    write_file(root / redfish.FILE, json.dumps(documents, indent=1) + "\n")
    write_file(root / "bmc-credentials", f"{redfish.USER}:{redfish.PASSWORD}\n", 0o600)
    described = [_describe_gpu(gpu) | describe_module(gpu) for gpu in gpus]
    marker = _describe(gpus[0].model, "", "", real=False) | _NO_FILES | {"gpus": described, "notes": []}
    return marker | {"dri": False, "driver": "none"} | made


def _start_manager(root: Path, model: Model) -> bool:
    """Start the Fabric Manager of a board that has NVSwitches and known partitions; returns whether it has."""
    board = BOARD_OF.get(model.architecture) if model.fabric else None
    if board:
        SimulatedManager(root).start(board)
    return board is not None


def _make_nvidia(
    root: Path,
    target: Path,
    gpus: tuple[SimGpu, ...],
    version: str,
    first_card: int,
    parts: _Parts,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Make NVIDIA's driver; returns the marker's content."""
    majors = choose_majors(gpus[0])
    table = make_table(str(target), gpus, version, majors.caps, few=parts.few)
    model = gpus[0].model
    if parts.few:
        built = place_few(root, table, version)
    else:
        say("compiling the driver's libraries and programs")
        built = build(root, table, version, model, compat32=parts.compat32)
    _start_manager(root, model)
    say("making device nodes, /proc and /sys")
    node_list = _plan_nodes(gpus, majors, first_card, parts)
    real = make_nodes(root, node_list, real=parts.nodes)
    if model.tegra:
        write_tegra(root, majors, version, [f"/{node.path}" for node in node_list], built.paths)
    else:
        if parts.dri:
            link_dri_by_path(root, gpus, first_card)
        write_kernel(root, gpus, majors, version, first_card, dri=parts.dri)
        say("writing firmware, sockets and settings")
        write_firmware(root, version)
        write_files(root, "driver", {"version": version, "triplet": library_triplet()})
    (root / "run").mkdir()
    socket_names = make_sockets(root, model) if parts.sockets else []
    (root / "var").mkdir(exist_ok=True)
    (root / "var/run").symlink_to("../run")
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    if parts.ldcache:
        write_ldcache(root)
    return {
        **_describe(model, version, cuda_version_of(version), real),
        **({"nodes": "none"} if parts.few else {}),
        "majors": majors.by_name(),
        "library_directory": f"usr/lib/{library_triplet()}{'/nvidia' * model.tegra}",
        "libraries": built.libraries,
        "libraries_32": built.libraries_32,
        "binaries": list(built.binaries),
        "sockets": socket_names,
        "dri": parts.dri,
        "ldcache": parts.ldcache,
        "gpus": [_describe_gpu(gpu) for gpu in gpus],
        "notes": list(built.notes),
    }


def _plan_nodes(gpus: tuple[SimGpu, ...], majors: Majors, first_card: int, parts: _Parts) -> list[SimNode]:
    if not gpus[0].model.tegra:
        return plan_nodes(gpus, majors, first_card, dri=parts.dri)
    names = read_tables()["tegra-built"]["uvm-nodes" if gpus[0].bus_id else "nodes"]
    return plan_tegra_nodes(names, majors)


def _add_other(
    root: Path,
    target: Path,
    model: Model,
    count: int,
    major: int,
    first_card: int,
    parts: _Parts,
    marker: dict[str, Any],
) -> None:
    """Make what the driver of another vendor shows of its GPUs, and add that to the marker's content."""
    made = load_vendor(model.vendor).simulate(count, model, first_card, major)
    for name, module in made.programs.items():
        write_file(root / "usr/bin" / name, render_stub(module, str(target)), 0o755)
    for path, text in made.files.items():
        write_file(root / path, text)
    for path, other in made.links.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).symlink_to(other)
    real = make_nodes(root, [SimNode(*node) for node in made.nodes], real=parts.nodes)
    for path, gid in made.groups.items() if real else ():
        os.chown(root / path, 0, gid)
    if model.name != marker["product"]:
        marker["product"] += f" and {model.name}"
    marker["nodes"] = "none" if parts.few else "real" if real else "stand-in"
    marker["binaries"] = [*marker["binaries"], *made.programs]
    marker["majors"] |= {path.rpartition("/")[2]: number for path, number, *_ in made.nodes[:1]}
    marker["gpus"] += [{**gpu, "name": model.name, "mig_enabled": False, "mig_devices": []} for gpu in made.gpus]


def _describe(model: Model, version: str, cuda_version: str, real: bool) -> dict[str, Any]:
    """Return the first part of the marker, which describes the host."""
    return {
        "simulated": True,
        "version": ocigpu.__version__,
        "model": model.key,
        "product": model.name,
        "driver_version": version,
        "cuda_version": cuda_version,
        "nodes": "real" if real else "stand-in",
    }


def render_config(directory: str) -> str:
    """Return the settings file that makes ocigpu use the simulated host."""
    return (
        "# This is a SIMULATED GPU host: the GPUs below do not exist and nothing can be computed on them.\n"
        "# Made by ocigpu sim create; remove it with ocigpu sim remove.\n"
        f"[simulation]\nroot = {toml_value(directory)}\n"
    )


def _describe_gpu(gpu: SimGpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "minor": gpu.index,
        "uuid": gpu.uuid,
        "bus_id": gpu.bus_id,
        "name": gpu.model.name,
        "architecture": gpu.model.architecture,
        "memory_mib": gpu.model.memory_mib,
        "mig_enabled": gpu.mig_enabled,
        "mig_devices": [
            describe_mig(number, mig.uuid, mig.profile.name, mig.gpu_instance, mig.compute_instance, mig.gi_minor)
            for number, mig in enumerate(gpu.mig_devices)
        ],
    }
