"""``ocigpu list``, ``facts`` and ``refresh``: what this host has."""

from ocigpu.cli import show
from ocigpu.cli.common import load_facts, load_settings
from ocigpu.core.facts import Gpu, HostFacts, facts_to_json, to_data
from ocigpu.gpus.cached import refresh_facts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def list_command(config: str = "", driver_root: str = "", facts: str = "", json: bool = False) -> None:
    host = load_facts(load_settings(config, driver_root), facts)
    if json:
        names = ("simulated", "driver_root", "driver_version", "cuda_version", "source", "gpus", "notes")
        show.data({name: to_data(getattr(host, name)) for name in names})
        return
    show.fields([("host", show.host_line(host, facts)), ("driver", show.driver_line(host))])
    if host.gpus:
        print()
        show.table(("gpu", "minor", "uuid", "bus id", "model", "arch", "mig", "state"), gpu_rows(host.gpus), fold=False)
    show.notes(host.notes, apart=True)


def gpu_rows(gpus: tuple[Gpu, ...]) -> list[tuple[str, ...]]:
    """Return the rows of the table of GPUs; the MIG devices of a GPU follow it, named "GPU:MIG"."""
    rows: list[tuple[str, ...]] = []
    for gpu in gpus:
        mig = "on" if gpu.mig_enabled else "off" if gpu.mig_capable else "-"
        model = (gpu.uuid, gpu.bus_id, gpu.model, gpu.architecture or "-")
        rows.append((str(gpu.index), str(gpu.minor), *model, mig, gpu.error or "ok"))
        for part in gpu.mig_devices:
            instances = f"gi {part.gpu_instance} ci {part.compute_instance}"
            names = (f"{gpu.index}:{part.index}", "", part.uuid, "", f"MIG {part.profile}", "", instances)
            rows.append((*names, gpu.error or "ok"))
    return rows


def facts_command(config: str = "", driver_root: str = "", facts: str = "", json: bool = False) -> None:
    host = load_facts(load_settings(config, driver_root), facts)
    if json:
        show.data(facts_to_json(host))
        return
    show.fields([("host", show.host_line(host, facts)), ("driver", show.driver_line(host)), *_fact_fields(host)])
    for title, rows in _fact_tables(host):
        if rows:
            print()
            show.table(title, rows)
    show.notes(host.notes, apart=True)


def _fact_fields(host: HostFacts) -> list[tuple[str, str]]:
    channels = show.count(len(host.imex_nodes), "channel")
    return [
        ("majors", ", ".join(f"{name} {major}" for name, major in host.majors) or "none"),
        ("MIG", show.count(len(host.cap_nodes), "capability node")),
        ("IMEX", f"major {host.imex_major}, {channels}" if host.imex_major else "none"),
        ("features", ", ".join(feature.name for feature in host.features) or "none"),
        ("proc", f"{host.proc_driver or 'none'} ({', '.join(file.name for file in host.proc_files)})"),
    ]


def _fact_tables(host: HostFacts) -> "Iterator[tuple[tuple[str, ...], list[tuple[str, ...]]]]":
    gpu_nodes = [node for gpu in host.gpus for node in (*((gpu.node,) if gpu.node else ()), *gpu.drm_nodes)]
    nodes = (*host.control_nodes, *gpu_nodes)
    yield (
        ("node", "number", "mode", "host path"),
        [
            (node.container_path, f"{node.major}:{node.minor}", f"{node.mode:04o}", node.host_path or "-")
            for node in nodes
        ],
    )
    yield (
        ("library", "bits", "needed for", "host path"),
        [
            (library.soname or library.name, str(library.bits), ",".join(library.capabilities), library.host_path)
            for library in host.libraries
        ],
    )
    files = (*host.binaries, *host.firmware, *host.sockets, *host.configs)
    yield (
        ("file", "kind", "needed for", "host path"),
        [(file.container_path, file.kind, ",".join(file.capabilities) or "any", file.host_path) for file in files],
    )


def refresh_command(config: str = "", json: bool = False) -> None:
    done = refresh_facts(load_settings(config))
    age = round(done.age, 1) if done.age >= 0 else None
    if json:
        show.data(
            {
                "kept": not done.problem,
                "path": done.path,
                "problem": done.problem,
                "age_before": age,
                "driver_version": done.facts.driver_version,
                "gpus": len(done.facts.gpus),
                "notes": list(done.facts.notes),
            }
        )
        return
    show.fields(
        [
            ("host", show.host_line(done.facts)),
            ("driver", show.driver_line(done.facts)),
            ("kept", f"no, every start reads the host anew: {done.problem}" if done.problem else done.path),
            ("before", "none that still held" if age is None else f"{age} s old"),
        ]
    )
    show.notes(done.facts.notes)
