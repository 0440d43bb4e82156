"""``ocigpu sim``: make, show and remove simulated GPU hosts."""

import shlex
from typing import Annotated, Any

from ocigpu.cli import show
from ocigpu.cli.arguments import Range
from ocigpu.core.errors import printable


def create_command(
    directory: str,
    gpus: Annotated[int, Range(1, 64)] = 8,
    model: list[str] | None = None,
    mig: list[str] | None = None,
    driver_version: str = "",
    fault: list[str] | None = None,
) -> None:
    from ocigpu.sim.create import create_host
    from ocigpu.sim.made import describe_host

    with show.Progress() as progress:
        path = create_host(
            directory, gpus, model or "h100", mig or [], driver_version, faults=fault or (), progress=progress
        )
    made = describe_host(directory)
    gpu_count = show.count(len(made["gpus"]), "GPU")
    print(f"made a SIMULATED host in {printable(made['directory'])}: {gpu_count}, {made['product']}")
    show.notes(made["notes"])
    if fault:
        print(f"look at:   ocigpu doctor --root {shlex.quote(directory)}")
    print(f"use it:    ocigpu plan --config {shlex.quote(path)} --devices all")
    print(f"remove it: ocigpu sim remove {shlex.quote(directory)}")


def show_command(directory: str, json: bool = False) -> None:
    from ocigpu.sim.made import describe_host

    host = describe_host(directory)
    if json:
        show.data(host)
        return
    show.fields(
        [
            ("host", f"SIMULATED host {host['directory']}: no real GPU"),
            ("settings", host["config"]),
            ("driver", ", CUDA ".join(filter(None, (host["driver_version"], host["cuda_version"])))),
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


def remove_command(directory: str) -> None:
    from ocigpu.sim.made import remove_host

    remove_host(directory)
    print(f"removed {printable(directory)}")
