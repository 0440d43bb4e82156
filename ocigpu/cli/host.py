"""``ocigpu list`` and ``ocigpu facts``: what this host has."""

from ocigpu.cli import show
from ocigpu.cli.common import load_facts, load_settings
from ocigpu.core.facts import Gpu, HostFacts, MigDevice, facts_to_json, to_data


def list_command(config: str = "", root: str = "", facts: str = "", json: bool = False) -> None:
    host = load_facts(load_settings(config, root), facts)
    if json:
        show.data(
            {
                "simulated": host.simulated,
                "driver_root": host.driver_root,
                "driver_version": host.driver_version,
                "cuda_version": host.cuda_version,
                "source": host.source,
                "gpus": to_data(host.gpus),
                "notes": list(host.notes),
            }
        )
        return
    show.fields([("host", show.host_line(host, facts)), ("driver", show.driver_line(host))])
    if host.gpus:
        print()
        show.table(("gpu", "minor", "uuid", "bus id", "model", "arch", "mig", "state"), gpu_rows(host.gpus), fold=False)
    if host.notes:
        print()
        show.notes(host.notes)


def gpu_rows(gpus: tuple[Gpu, ...]) -> list[tuple[str, ...]]:
    """Return the rows of the table of GPUs; the MIG devices of a GPU follow it, named "GPU:MIG"."""
    rows: list[tuple[str, ...]] = []
    for gpu in gpus:
        mig = "on" if gpu.mig_enabled else "off" if gpu.mig_capable else "-"
        rows.append(
            (
                str(gpu.index),
                str(gpu.minor),
                gpu.uuid,
                gpu.bus_id,
                gpu.model,
                gpu.architecture or "-",
                mig,
                gpu.error or "ok",
            )
        )
        rows.extend(_mig_row(gpu, mig_device) for mig_device in gpu.mig_devices)
    return rows


def _mig_row(gpu: Gpu, mig: MigDevice) -> tuple[str, ...]:
    instances = f"gi {mig.gpu_instance} ci {mig.compute_instance}"
    return (f"{gpu.index}:{mig.index}", "", mig.uuid, "", f"MIG {mig.profile}", "", instances, gpu.error or "ok")


def facts_command(config: str = "", root: str = "", facts: str = "", json: bool = False) -> None:
    host = load_facts(load_settings(config, root), facts)
    if json:
        show.data(facts_to_json(host))
        return
    show.fields([("host", show.host_line(host, facts)), ("driver", show.driver_line(host)), *_fact_fields(host)])
    for title, rows in _fact_tables(host):
        if rows:
            print()
            show.table(title, rows)
    if host.notes:
        print()
        show.notes(host.notes)


def _fact_fields(host: HostFacts) -> list[tuple[str, str]]:
    return [
        ("majors", ", ".join(f"{name} {major}" for name, major in host.majors) or "none"),
        ("MIG", f"{show.count(len(host.cap_nodes), 'capability node')}"),
        (
            "IMEX",
            f"major {host.imex_major}, {show.count(len(host.imex_nodes), 'channel')}" if host.imex_major else "none",
        ),
        ("features", ", ".join(feature.name for feature in host.features) or "none"),
        ("proc", f"{host.proc_driver or 'none'} ({', '.join(file.name for file in host.proc_files)})"),
    ]


def _fact_tables(host: HostFacts) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    nodes = [node for gpu in host.gpus for node in (*((gpu.node,) if gpu.node else ()), *gpu.drm_nodes)]
    files = (*host.binaries, *host.firmware, *host.sockets, *host.configs)
    return [
        (
            ("node", "number", "mode", "host path"),
            [
                (node.container_path, f"{node.major}:{node.minor}", f"{node.mode:04o}", node.host_path or "-")
                for node in (*host.control_nodes, *nodes)
            ],
        ),
        (
            ("library", "bits", "needed for", "host path"),
            [
                (library.soname or library.name, str(library.bits), ",".join(library.capabilities), library.host_path)
                for library in host.libraries
            ],
        ),
        (
            ("file", "kind", "needed for", "host path"),
            [(file.container_path, file.kind, ",".join(file.capabilities) or "any", file.host_path) for file in files],
        ),
    ]
