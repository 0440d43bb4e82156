"""``ocigpu sim``: make, show and remove simulated GPU hosts, and run a command with simulated GPUs."""

import os
import shlex
import shutil
import sys
from contextlib import ExitStack, suppress
from typing import Annotated, Any

from ocigpu.cli.front import show
from ocigpu.cli.front.arguments import Range
from ocigpu.core.errors import OcigpuError, printable


def create_command(
    directory: str,
    gpus: Annotated[int | None, Range(1, 64)] = None,
    model: list[str] | None = None,
    mig: list[str] | None = None,
    driver_version: str = "",
    fault: list[str] | None = None,
    libraries_only: bool = False,
    driver: str = "",
    iommufd: bool = False,
    clique: str = "",
) -> None:
    from ocigpu.sim.create import create_host
    from ocigpu.sim.made import describe_host

    if not libraries_only:
        _say_without_nodes(os.path.dirname(os.path.abspath(directory)))
    with show.Progress() as progress:
        path = create_host(
            *(directory, gpus or 0, model or "h100", mig or [], driver_version),
            driver=driver,
            iommufd=iommufd,
            few=libraries_only,
            faults=fault or (),
            clique=clique,
            progress=progress,
        )
    made = describe_host(directory)
    gpu_count = show.count(len(made["gpus"]), "GPU")
    print(f"made a SIMULATED host in {printable(made['directory'])}: {gpu_count}, {made['product']}")
    show.notes(made["notes"])
    if fault:
        print(f"look at:   ocigpu doctor --root {shlex.quote(directory)}")
    if libraries_only:
        from ocigpu.sim.few import search_paths

        for name, value in search_paths(made["directory"]).items():
            print(f"use it:    export {name}={shlex.quote(value)}${{{name}:+:${name}}}")
        print(f"use it:    export OCIGPU_CONFIG={shlex.quote(path)}")
    use = "vfio identify --config {}" if driver else "plan --config {} --devices all"
    print(f"use it:    ocigpu {use.format(shlex.quote(path))}")
    print(f"remove it: ocigpu sim remove {shlex.quote(directory)}")


def show_command(directory: str) -> "show.Answer":
    from ocigpu.sim.made import describe_host

    host = describe_host(directory)
    yield host
    show.fields(
        [
            ("host", f"SIMULATED host {host['directory']}: no real GPU"),
            ("settings", host["config"]),
            (
                "driver",
                ", CUDA ".join(filter(None, (host["driver_version"], host["cuda_version"]))) or "none: vfio-pci",
            ),
            ("nodes", host["nodes"]),
            ("majors", ", ".join(f"{name} {major}" for name, major in host["majors"].items() if major)),
            ("sockets", ", ".join(host["sockets"]) or "none"),
            ("binaries", ", ".join(host["binaries"])),
        ]
    )
    print()
    show.table(("gpu", "uuid", "bus id", "model"), _gpu_rows(host["gpus"]), fold=False)
    show.notes(host["notes"], apart=True)


def _gpu_rows(gpus: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for gpu in gpus:
        rows.append((str(gpu["index"]), gpu["uuid"], gpu["bus_id"], gpu["name"]))
        rows += [
            (f"{gpu['index']}:{mig['index']}", mig["uuid"], "", f"MIG {mig['profile']}") for mig in gpu["mig_devices"]
        ]
    return rows


def bmc_command(directory: str) -> None:
    from ocigpu.sim.redfish import serve

    serve(directory)


def remove_command(directory: str) -> None:
    from ocigpu.sim.made import remove_host

    notes = _left_behind(directory)
    remove_host(directory)
    print(f"removed {printable(directory)}")
    show.notes(notes)


def _left_behind(directory: str) -> list[str]:
    """Return what still refers to a simulated host: containers that have its GPUs, and the machine's settings."""
    from ocigpu.cli.containers.containers import places_of
    from ocigpu.cli.front.common import load_facts, settings_path
    from ocigpu.containers.find import find_containers
    from ocigpu.containers.report import make_reports
    from ocigpu.core.settings import DEFAULT_PATH
    from ocigpu.sim.made import describe_host
    from ocigpu.system.settings_file import read_settings

    host, notes = describe_host(directory), []
    with suppress(OcigpuError):  # incomplete or of another version: it is removed all the same
        settings = read_settings(host["config"])
        running = [one for one in find_containers(places_of(None))[0] if one.pid]
        reports = make_reports(running, load_facts(settings), settings)
        names = [printable(report.container.name) for report in reports if report.gpus]
        if names:
            notes.append(f"these containers had its GPUs, and lose them when they restart: {', '.join(names)}")
    file = settings_path("") or DEFAULT_PATH
    with suppress(OcigpuError):
        inside = os.path.abspath(file).startswith(f"{host['directory']}/")
        if not inside and read_settings(file).simulation_root == host["directory"]:
            notes.append(f"{file} still names it, so no container gets a GPU: rm {file}")
    return notes


def exec_command(
    command: list[str],
    gpus: Annotated[int, Range(1, 64)] = 1,
    model: str = "h100",
    mig: list[str] | None = None,
    driver_version: str = "",
    quiet: bool = False,
) -> int:
    from ocigpu.sim.few import environment_of, temporary_host
    from ocigpu.sim.models import NVIDIA, find_model
    from ocigpu.system.programs import end_like, held_signals, run_in_front

    try:
        with held_signals() as mask, ExitStack() as stack:
            with show.Progress() as progress:
                say = (lambda _line: None) if quiet else progress
                host = stack.enter_context(temporary_host(gpus, model, mig or (), driver_version, say))
            environment = environment_of(host, os.environ)
            path = shutil.which(command[0], path=environment["PATH"])
            if path is None:
                there = "/" in command[0] and os.path.exists(command[0])
                hint = "" if there else _hint_of_path(command)
                raise _cannot_run(*((126, "not executable") if there else (127, "no such program")), command[0], hint)
            if quiet:
                environment["OCIGPU_SIM_QUIET"] = "1"
            else:
                chosen = find_model(model)
                kind = "libraries" if chosen.vendor == NVIDIA else "programs"
                what = f"{show.count(gpus, 'GPU')}, {chosen.name}: {kind} only, without device nodes"
                print(f"ocigpu: SIMULATED: {what}; nothing can be computed", file=sys.stderr, flush=True)
            try:
                status = run_in_front(path, command, environment, mask)
            except OSError as error:
                raise _cannot_run(126, str(error.strerror), command[0]) from error
    except OcigpuError as error:
        error.exit_code = max(error.exit_code, 125)
        raise
    return end_like(status)


def _hint_of_path(command: list[str]) -> str:
    """Return how to name a program that lies beside this one, in a virtual environment that is not on PATH."""
    own = os.path.abspath(sys.argv[0])
    beside = os.path.join(os.path.dirname(own), command[0])
    if "/" in command[0] or not os.access(beside, os.X_OK):
        return ""
    return f"it is not on PATH: {shlex.join([own, 'sim', 'exec', '--', beside, *command[1:]])}"


def _cannot_run(status: int, cause: str, program: str, hint: str = "") -> OcigpuError:
    error = OcigpuError("OCIGPU-SIM-1", f"execute {program}: {cause}", hint)
    error.exit_code = status
    return error


def _say_without_nodes(directory: str) -> None:
    """Say at once that device nodes cannot be used here: making the host takes a while."""
    from ocigpu.sim.nodes import why_no_nodes

    why = why_no_nodes(directory)
    if why:
        print(f"note: device nodes cannot be used here: {why}: files will stand for them", file=sys.stderr)
        print("hint: programs see simulated GPUs without nodes: ocigpu sim exec -- COMMAND", file=sys.stderr)
