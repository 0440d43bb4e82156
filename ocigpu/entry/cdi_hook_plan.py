"""Make a plan from the commands of a CDI hook and the facts read for them.  Pure.

All commands of one process are one plan, carried out as a whole or not at all.  The container's view of the driver has
the same parts as in hook mode (:mod:`ocigpu.gpus.nvidia.views`).  The device nodes that the engine has put into its
/dev determine which GPUs it shows.

``create-symlinks``: if the image has a regular file at a link's path, the vendor's program removes it.  Here the file
stays, and the link's target is mounted over it: the container sees the same, and the image keeps its file.  Links into
other directories come last, because what they lead to may be one of the others.  If the target does not exist (a hook
may run before the one that makes its target), the file stays visible.
"""

import os

from ocigpu.cdi.hook_words import (
    Chmod,
    CreateSymlinks,
    DisableDeviceNodeModification,
    EnableCudaCompat,
    UpdateApplicationProfile,
    UpdateLdCache,
    link_target,
)
from ocigpu.core.actions import Link, Mode, Plan, RefreshLdCache, TextFile
from ocigpu.core.record import NamedTuple
from ocigpu.gpus.nvidia.views import application_profile, proc_view, proc_view_by_masks, simulated_proc
from ocigpu.provision.compat import suits_driver
from ocigpu.provision.image_cache import CONF_DIRECTORY, LD_SO_CONF
from ocigpu.provision.loader import COMPAT_CONF, OWN_CONF, LoaderFacts
from ocigpu.provision.sonames import SonameLinks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ocigpu.cdi.hook_words import Command
    from ocigpu.core.actions import Action
    from ocigpu.core.facts import ProcFile
    from ocigpu.core.settings import Settings
    from ocigpu.gpus.nvidia.procfs import ProcGpu
    from ocigpu.provision.compat import CompatLibrary
    from ocigpu.provision.image import ContainerNode

UNUSED = "# ocigpu: not needed with this driver\n"
"""Content of a file that an earlier start of the container left and this one does not need."""


class DriverProc(NamedTuple):
    """What /proc/driver/nvidia of the host holds; ``directory`` is "" when there is none.

    ``capabilities``: pairs of (path below capabilities, minor); ``gpu_major``, ``caps_major``: -1 when unknown.
    """

    directory: str
    files: "tuple[ProcFile, ...]" = ()
    gpus: "tuple[ProcGpu, ...]" = ()
    capabilities: tuple[tuple[str, int], ...] = ()
    gpu_major: int = -1
    caps_major: int = -1


class HookFacts(NamedTuple):
    """The facts read for the commands, about container and host.

    ``nodes``: the container's nodes of NVIDIA's drivers; ``device_targets``: those targets of device links, as
    :func:`link_target` gives them, that are devices of the container; ``kept_files``: paths of links where the image
    has a regular file, and nothing yet that the link would lead to; ``compat``: the CUDA compatibility library;
    ``sonames``: links that update-ldcache is to make.
    """

    nodes: "tuple[ContainerNode, ...]" = ()
    device_targets: tuple[str, ...] = ()
    kept_files: tuple[str, ...] = ()
    loader: LoaderFacts = LoaderFacts()
    compat: "CompatLibrary | None" = None
    driver_proc: DriverProc = DriverProc("")
    sonames: SonameLinks = SonameLinks()


def plan_hooks(commands: "Sequence[Command]", facts: HookFacts, settings: "Settings", masks: bool = False) -> Plan:
    """Return the plan for all commands of one hook; the order of the commands does not matter.

    ``masks``: the procfs of the container stays, without what is not its own, as in mode spec.  Of commands that
    exclude each other (two roots of CUDA libraries) the last one counts.
    """
    notes: list[str] = []
    actions: "list[Action]" = []
    views = [command for command in commands if isinstance(command, DisableDeviceNodeModification)][-1:]
    for view in views:
        if not settings.features_no_procfs_view:
            actions += _plan_proc_view(view, facts, notes, masks)
        elif view.simulated and facts.driver_proc.directory:
            actions.append(simulated_proc(facts.driver_proc.directory))
    minors = sorted(gpu_minors(facts))
    profile = minors and not settings.features_no_application_profile
    if profile and any(isinstance(command, UpdateApplicationProfile) for command in commands):
        actions.append(application_profile(minors))
    actions += [Link(path, target, "the loader looks for the SONAME") for target, path in facts.sonames.links]
    notes += [f"no link {soname} is made in {folder}: it is a mount" for folder, soname in facts.sonames.left[:1]]
    links = [command for command in commands if isinstance(command, CreateSymlinks)]
    actions += _plan_links(links, facts, notes)
    for command in commands:
        if isinstance(command, Chmod):
            actions += [Mode(path, command.mode, "mode of the CDI specification") for path in command.paths]
    compat = [command for command in commands if isinstance(command, EnableCudaCompat)]
    caches = [command for command in commands if isinstance(command, UpdateLdCache)]
    if not settings.features_no_loader_cache:
        actions += _plan_loader(compat, caches, facts, settings, notes)
    simulated = any(view.simulated for view in views)
    unique = tuple(dict.fromkeys(actions))
    return Plan(unique, notes=tuple(notes), simulated=simulated, mode="cdi")


def gpu_minors(facts: HookFacts) -> set[int]:
    """Return the minors of the container's /dev/nvidia<N>; a node with another driver's major is not a GPU."""
    major = facts.driver_proc.gpu_major
    return {node.minor for node in facts.nodes if "/nvidia-caps/" not in node.path and _is_of(node.major, major)}


def _is_of(major: int, known: int) -> bool:
    return known < 0 or major == known


def _plan_proc_view(
    command: DisableDeviceNodeModification, facts: HookFacts, notes: list[str], masks: bool
) -> "Sequence[Action]":
    proc = facts.driver_proc
    if not proc.directory:
        notes.append(f"the host has no {command.driver_proc}: the container gets none")
        return []
    minors = gpu_minors(facts)
    if masks:
        hidden = [
            (f"gpus/{gpu.name}", f"the container has no /dev/nvidia{gpu.minor}")
            for gpu in proc.gpus
            if gpu.minor not in minors
        ]
        hidden += [("capabilities", "the container has no MIG device")] if proc.capabilities else []
        return proc_view_by_masks(proc.directory, command.simulated, hidden)
    directories = [
        (f"gpus/{gpu.name}", f"the container has /dev/nvidia{gpu.minor}") for gpu in proc.gpus if gpu.minor in minors
    ]
    # Files of procfs are the capabilities themselves where the driver has no devices for them: no other node counts.
    caps = {node.minor for node in facts.nodes if "/nvidia-caps/" in node.path and node.major == proc.caps_major}
    shown = [(path, minor) for path, minor in proc.capabilities if minor in caps]
    files: list[tuple[str, str]] = []
    if any(path.startswith("mig/") for path, _ in shown):  # may configure or watch every GPU
        directories.append(("capabilities", "the container has the node of mig/config or mig/monitor"))
    else:
        files = [
            (f"capabilities/{path}", f"the container has /dev/nvidia-caps/nvidia-cap{minor}") for path, minor in shown
        ]
    return proc_view(proc.directory, proc.files, command.simulated, directories, files)


def _plan_links(commands: list[CreateSymlinks], facts: HookFacts, notes: list[str]) -> list[Link]:
    links = [
        Link(path, target, "link of the CDI specification", optional="/" in target)  # into another directory
        for item in commands
        for target, path in item.links
    ]
    links += [
        Link(path, target, "the container has the device", optional=True)
        for item in commands
        for target, path in item.device_links
        if link_target(target, path) in facts.device_targets
    ]
    made = {os.path.normpath(link.container_path) for link in links}
    kept = [
        link
        for link in links
        if link.container_path in facts.kept_files and link_target(link.target, link.container_path) not in made
    ]
    notes += [f"{link.container_path} stays the image's file: {link.target} does not exist" for link in kept]
    return sorted((link for link in links if link not in kept), key=lambda link: "/" in link.target)


def _plan_loader(
    compat: list[EnableCudaCompat],
    caches: list[UpdateLdCache],
    facts: HookFacts,
    settings: "Settings",
    notes: list[str],
) -> "list[Action]":
    """Tell the loader of the image about the folders: glibc's by its cache and configuration, musl's by its path file.

    The configuration is for later runs of ldconfig inside the container.
    """
    loader = facts.loader
    folders = tuple(dict.fromkeys(folder for cache in caches for folder in cache.folders))
    actions = _plan_musl(folders, loader, notes) if loader.musl_file and caches else []
    if loader.libc != "glibc":
        return actions
    folders = tuple(dict.fromkeys((*loader.own_directories, *folders)))
    first = loader.compat_directories  # written by an enable-cuda-compat that ran as a separate process
    confs: "list[Action]" = []
    if compat:
        first = _compat_directories(compat[-1], facts, settings)
        confs += _conf(COMPAT_CONF, first, loader.has_compat_conf, "CUDA libraries of the image suit the driver")
    if caches:
        own = [folder for folder in folders if os.path.normpath(folder) not in loader.searched]
        confs += _conf(OWN_CONF, own, loader.has_own_conf, "a later ldconfig in the container finds the libraries")
    if confs and not loader.has_conf:
        content = f"include {CONF_DIRECTORY}/*.conf\n"
        actions.append(_text(LD_SO_CONF, content, "the loader's configuration", only_if_missing=True))
    actions += confs
    if caches:
        ldconfig = next((cache.ldconfig for cache in reversed(caches) if cache.ldconfig), settings.ldconfig)
        directories = tuple(dict.fromkeys((*first, *folders)))
        actions.append(RefreshLdCache(ldconfig, directories, "the container's loader finds libraries in its cache"))
    return actions


def _compat_directories(command: EnableCudaCompat, facts: HookFacts, settings: "Settings") -> tuple[str, ...]:
    library = facts.compat
    if library is None or settings.cuda_compat_mode != "ldconfig":
        return ()
    suits = suits_driver(library, command.host_driver_version, command.host_cuda_version)
    return (library.directory,) if suits else ()


def _conf(path: str, directories: "Sequence[str]", exists: bool, reason: str) -> "list[Action]":
    """Return the action that writes our file with exactly these directories."""
    lines = [directory for directory in directories if "#" not in directory and directory == directory.strip()]
    if lines:
        return [_text(path, "".join(f"{line}\n" for line in lines), reason)]
    return [_text(path, UNUSED, "left by an earlier start")] if exists else []


def _text(path: str, content: str, reason: str, only_if_missing: bool = False) -> TextFile:
    """Return the action that writes a file for the loader; it is optional."""
    return TextFile(path, 0o644, content, reason, only_if_missing, optional=True)


def _plan_musl(folders: tuple[str, ...], loader: LoaderFacts, notes: list[str]) -> "list[Action]":
    if loader.musl_text is None:
        notes.append(f"{loader.musl_file} of the image is a link, or not a text of at most 64 KiB, and was left alone")
        return []
    known = loader.musl_text.replace("\n", ":").split(":")
    lines = [folder for folder in folders if folder not in known and ":" not in folder]
    if not lines:
        return []
    text = loader.musl_text if loader.musl_text.endswith("\n") or not loader.musl_text else loader.musl_text + "\n"
    content = text + "".join(f"{line}\n" for line in lines)
    return [_text(loader.musl_file, content, "musl's loader finds the libraries")]
