"""``ocigpu attach`` and ``ocigpu detach``: one more GPU for a running container, or one less."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from ocigpu.cli.common import ConfigOption, JsonOption, load_facts, load_settings, print_json, print_notes
from ocigpu.cli.ps import RootsOption
from ocigpu.cli.verify import ContainerArgument
from ocigpu.core.facts import HostFacts, to_data

if TYPE_CHECKING:
    from ocigpu.containers.attach import Changed
    from ocigpu.containers.live import Live


GpuOption = Annotated[
    list[str],
    typer.Option("--gpu", metavar="GPU", help="Index, UUID, PCI bus id or MIG device (GPU:MIG); can be repeated."),
]


def attach_command(
    container: ContainerArgument,
    gpu: GpuOption,
    root: RootsOption = None,
    config: ConfigOption = "",
    json: JsonOption = False,
) -> None:
    from ocigpu.containers.attach import attach

    with _open(container, root, config) as (live, facts):
        changed = attach(live, gpu)
    _show(live, facts, changed, json, "attached", "already there")


def detach_command(
    container: ContainerArgument,
    gpu: GpuOption,
    force: bool = False,
    root: RootsOption = None,
    config: ConfigOption = "",
    json: JsonOption = False,
) -> None:
    from ocigpu.containers.attach import detach

    with _open(container, root, config) as (live, facts):
        changed = detach(live, gpu, force)
    _show(live, facts, changed, json, "detached", "not there")


@contextmanager
def _open(container: str, root: list[str] | None, config: str) -> "Iterator[tuple[Live, HostFacts]]":
    from ocigpu.containers.find import default_places, find_container
    from ocigpu.containers.live import open_live, require_root

    require_root("attach and detach")
    settings = load_settings(config)
    found = find_container(default_places(tuple(root or ())), container)
    facts = load_facts(settings)
    with open_live(found, settings, facts) as live:
        yield live, facts


def _show(live: "Live", facts: HostFacts, changed: "Changed", json: bool, done: str, before: str) -> None:
    from ocigpu.containers.attach import describe_holders

    notes = list(changed.notes)
    if changed.held:
        notes.append(f"{describe_holders(changed.held)}: that stays usable until it is closed")
    if json:
        data = to_data(changed)
        print_json({"container": live.found.id, done: data.pop("changed"), **data, "notes": notes})
        return
    names = device_names(facts)
    for uuid in changed.changed:
        print(f"{live.found.name}: {names[uuid]} {done}")
    for uuid in changed.already:
        print(f"{live.found.name}: {names[uuid]} is {before}: nothing was changed")
    print_notes(notes)


def device_names(facts: HostFacts) -> dict[str, str]:
    """Return what to call GPUs and MIG devices, by UUID: "GPU 3 (GPU-...)"."""
    names = {gpu.uuid: f"GPU {gpu.index} ({gpu.uuid})" for gpu in facts.gpus}
    migs = ((gpu, mig) for gpu in facts.gpus for mig in gpu.mig_devices)
    return names | {mig.uuid: f"MIG {gpu.index}:{mig.index} ({mig.uuid})" for gpu, mig in migs}
