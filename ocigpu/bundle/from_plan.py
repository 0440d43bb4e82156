"""A plan's sink for mode ``spec``: what a config.json can declare of it, and why that is not all.  Pure.

The rest is made by :mod:`ocigpu.bundle.rootfs` before the low-level runtime starts: links in the container's root file
system, and its loader cache.
"""

from ocigpu.bundle.declared import Declared
from ocigpu.bundle.edit import BIND_OPTIONS, rule_entries
from ocigpu.core.actions import (
    AllowDevice,
    Bind,
    JoinGroup,
    Link,
    Mask,
    Node,
    ReadOnly,
    RefreshLdCache,
    TextFile,
    Tmpfs,
)
from ocigpu.gpus.libraries.loader_cache import cache_entries

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.core.actions import Plan
    from ocigpu.core.facts import HostFacts


def declare(plan: "Plan", facts: "HostFacts") -> Declared:
    """Return what a config.json can declare of a plan for mode ``spec`` that was made from these facts."""
    mounts, optional, simulated_proc = [], [], ""
    files: list[tuple[str, int, str, bool]] = []
    root_links: list[tuple[str, str]] = []
    views: "dict[str, tuple[list[tuple[str, int, str]], list[tuple[str, str]]]]" = {}
    needs_hook = ""
    directories: list[str] = []
    for action in plan.actions:
        if isinstance(action, Bind) and action.container_path.startswith("/proc/"):
            simulated_proc = action.host_path
        elif isinstance(action, Bind):
            options = [*BIND_OPTIONS, *action.options]
            mounts.append(
                {"destination": action.container_path, "type": "bind", "source": action.host_path, "options": options}
            )
            if action.optional:
                optional.append(action.host_path)
        elif isinstance(action, Tmpfs):
            views.setdefault(action.container_path, ([], []))[0].extend(action.files)
        elif isinstance(action, Link) and action.container_path.startswith("/dev/"):
            directory, _, name = action.container_path.rpartition("/")
            views.setdefault(directory, ([], []))[1].append((name, action.target))
        elif isinstance(action, Link):
            root_links.append((action.container_path, action.target))
        elif isinstance(action, TextFile):
            files.append((action.container_path, action.mode, action.content, action.only_if_missing))
        elif isinstance(action, RefreshLdCache):
            directories.extend(action.directories)
            if plan.image.compat_dir in action.directories:
                needs_hook = f"the image has CUDA compatibility libraries in {plan.image.compat_dir}"
        elif not isinstance(action, (Node, AllowDevice, JoinGroup, Mask, ReadOnly)):
            needs_hook = action.describe()
    granted = {(rule.major, rule.minor) for rule in plan.device_rules()}
    nodes = [gpu.node for gpu in facts.gpus if gpu.node is not None]
    return Declared(
        nodes=[
            (n.container_path, n.host_path, n.major, n.minor, n.mode, n.uid, n.gid)
            for n in (action.node for action in plan.actions if isinstance(action, Node))
        ],
        rules=rule_entries(plan),
        groups=plan.groups(),
        mounts=mounts,
        optional=optional,
        masked=[action.container_path for action in plan.actions if isinstance(action, Mask)],
        read_only=[action.container_path for action in plan.actions if isinstance(action, ReadOnly)],
        simulated_proc=simulated_proc,
        links=root_links,
        files=files,
        libraries=cache_entries(plan.actions, directories, facts.libraries),
        views=[(path, files, links) for path, (files, links) in views.items()],
        denied=[(node.major, node.minor) for node in nodes if (node.major, node.minor) not in granted],
        needs_hook=needs_hook,
        granted=(*plan.gpus, *plan.mig_devices),
        notes=plan.notes,
    )
