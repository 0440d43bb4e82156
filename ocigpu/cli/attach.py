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

ATTACH_EPILOG = """\
\b
The container gets the device rules, the nodes (MIG devices: their capabilities too)
and the GPU's part of /proc/driver/nvidia; one that was started without a GPU also
the driver files that its variables ask for (NVIDIA_DRIVER_CAPABILITIES, by default
compute and utility). If any of it is not possible, all is undone.

\b
The runtime is not told: when it sets the device rules anew (runc update, docker
update, systemctl daemon-reload), the GPU is lost until ocigpu repair, or at once
given back by ocigpu watch --repair. A restarted container begins without it.
A program that is running already may have to be started again to see the GPU.
Nodes keep the host's owner, group and mode, and a running process cannot be given a
group: what it may not open is said. The kubelet is not told either: it counts a GPU
that was attached to a pod as free.

\b
Exit status: 0 it has the GPU (or had it before), 1 failed and nothing was changed,
2 the command line could not be understood.

\b
Examples:
  ocigpu attach mine --gpu 3
  ocigpu attach mine --gpu GPU-4d4f434b --gpu 1:0
  ocigpu attach mine --gpu 0000:3b:00.0 --json
"""

DETACH_EPILOG = """\
\b
The device cgroup denies the GPU from then on, whatever node is opened; its nodes and
its part of /proc/driver/nvidia go. Driver files stay. What a process has open stays
usable for it, so without --force nothing is done while one has.
With cgroup v1 a GPU cannot be taken out of a rule for many devices (--privileged
containers excepted, whose rules begin with everything).

\b
Exit status: 0 it has the GPU no more (or had it never), 1 failed and nothing was
changed, 2 the command line could not be understood.

\b
Examples:
  ocigpu detach mine --gpu 3
  ocigpu detach mine --gpu 3 --force
"""

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
    """Give a running container one more GPU."""
    from ocigpu.containers.attach import attach

    with _open(container, root, config) as (live, facts):
        changed = attach(live, gpu)
    _show(live, facts, changed, json, "attached", "already there")


def detach_command(
    container: ContainerArgument,
    gpu: GpuOption,
    force: Annotated[bool, typer.Option("--force", help="Although processes have it open.")] = False,
    root: RootsOption = None,
    config: ConfigOption = "",
    json: JsonOption = False,
) -> None:
    """Take a GPU away from a running container."""
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
