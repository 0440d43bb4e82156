"""Our own hooks of CDI specifications, carried out by the shim before the low-level runtime starts.

What they would do as processes (:mod:`ocigpu.entry.cdi_hook`) is declared in config.json and made in the root
directory, as in mode spec.  If one of them needs a process, all of them stay hooks.
"""

import os
from binascii import crc32

from ocigpu.bundle.declared import Declared, edit_of
from ocigpu.bundle.hookless import BundleRoot, find_kept
from ocigpu.bundle.inject import put_devices
from ocigpu.bundle.rootfs import NeedsHookError, find_obstacle
from ocigpu.cdi.hook_words import (
    CreateSymlinks,
    DisableDeviceNodeModification,
    EnableCudaCompat,
    UpdateLdCache,
    link_target,
    parse_hook,
)
from ocigpu.core.config_json import get_list, get_object, is_path, rootfs_path
from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.core.record import NamedTuple
from ocigpu.gpus.cached import read_facts, read_stamp
from ocigpu.hook import split_options
from ocigpu.provision.image import ContainerNode
from ocigpu.provision.inside import exists_inside
from ocigpu.provision.loader import COMPAT_CONF, find_gbm_links, read_loader_facts
from ocigpu.system.log import step
from ocigpu.system.settings_file import read_settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ocigpu.bundle.edit import ConfigEdit
    from ocigpu.cdi.hook_words import Command
    from ocigpu.cdi.registry import Resolved
    from ocigpu.core.config_json import Document
    from ocigpu.core.facts import Library
    from ocigpu.core.settings import Settings
    from ocigpu.provision.loader import LoaderFacts

    Edits = dict[str, Any]

VIEWS = ("mounts", "maskedPaths", "readonlyPaths")
"""The fields recorded in the annotation; the others follow from the specifications."""


class OwnHooks(NamedTuple):
    """Our own hooks of containerEdits: their commands, and the settings file that they name, or ""."""

    commands: "tuple[Command, ...]"
    settings: str


def split_hooks(edits: "Sequence[Edits]", program: str) -> "tuple[tuple[Edits, ...], OwnHooks | None]":
    """Return containerEdits without the hooks that run our program, and the commands of these.

    ``program``: path of ocigpu-hook; other names of it (nvidia-cdi-hook) count too.  Returns None and the unchanged
    edits if there is no such hook, or one that only the program itself understands or refuses.
    """
    own = os.path.realpath(program)
    commands: "list[Command]" = []
    settings: set[str] = set()
    left: "list[Edits]" = []
    for item in edits:
        others = []
        for hook in item.get("hooks", ()):
            if hook["hookName"] != "createContainer" or not _is_of(own, hook["path"]):
                others.append(hook)
                continue
            try:
                options, words = split_options(hook.get("args", [])[1:])
                call = parse_hook(words)
            except OcigpuError:
                return tuple(edits), None
            if options.keys() - {"config"} or call.unknown or not call.commands or call.state_file != "-":
                return tuple(edits), None
            commands += call.commands
            settings.add(options.get("config", ""))
        left.append({**item, "hooks": others} if "hooks" in item else item)
    if len(settings) != 1:  # none; or of several drivers, each with its own
        return tuple(edits), None
    return tuple(left), OwnHooks(tuple(commands), settings.pop())


def _is_of(program: str, path: "Any") -> bool:
    """Tell whether a hook's path leads to a program, whose path is resolved."""
    return isinstance(path, str) and is_path(path) and os.path.realpath(path) == program


def add_trace(config: "dict[str, Any]", program: str, trace: str) -> None:
    """Have the hooks of a configuration that are our program, at the stage of CDI's, write to the trace too."""
    own = os.path.realpath(program)
    for hook in get_list(get_object(config, "hooks"), "createContainer"):
        arguments = get_list(hook, "args")
        if arguments and _is_of(own, hook.get("path")):
            if arguments[1:2] == ["--trace"]:  # from an earlier edit
                del arguments[1:3]
            arguments[1:1] = ["--trace", trace]


def carry_out(
    document: "Document",
    edit: "ConfigEdit",
    own: OwnHooks,
    resolved: "Resolved",
    settings: "Settings",
    bundle: str,
    owns_policy: bool,
    stamp: str,
) -> None:
    """Edit a bundle's configuration, on disk too, and its root directory: CDI devices, and the effects of our hooks.

    ``edit``: for the devices, without our hooks.  ``settings``: unless the hooks name others.  ``stamp``: identifies
    the host's state, "" if unknown; the declaration is stored for as long as it holds.  Raises NeedsHookError where a
    process must do it, with nothing changed; CdiError OCIGPU-CDI-6; SpecError OCIGPU-SPEC-4.
    """
    config = document.config
    root = BundleRoot(rootfs_path(config, bundle), owns_policy)
    try:
        settings = read_settings(own.settings, keep=True) if own.settings else settings
        declared = _declare_checked(root, config, edit, own, resolved, settings, stamp)
        with step("carry-out", root.path, "our hooks of CDI specifications"):

            def put_both(views: list[str]) -> None:
                put_devices(config, with_hooks(edit, declared, root.path, views))

            root.write(document, declared, settings, put_both)
    finally:
        root.close()


def look(
    config: "dict[str, Any]",
    edit: "ConfigEdit",
    own: OwnHooks,
    resolved: "Resolved",
    settings: "Settings",
    path: str,
    owns_policy: bool,
) -> "dict[str, Any] | None":
    """Return the fields of what would be declared in the root directory at a path, None where hooks stay hooks."""
    try:
        root = BundleRoot(path, owns_policy)
        try:
            settings = read_settings(own.settings) if own.settings else settings
            declared = _declare_checked(root, config, edit, own, resolved, settings, None)
            return None if find_obstacle(root.fd, declared.links, declared.libraries) else declared._asdict()
        finally:
            root.close()
    except NeedsHookError:
        return None


def _declare_checked(
    root: BundleRoot,
    config: "dict[str, Any]",
    edit: "ConfigEdit",
    own: OwnHooks,
    resolved: "Resolved",
    settings: "Settings",
    stamp: "str | None",
) -> Declared:
    """Return the declaration that replaces our hooks; raises NeedsHookError if it is not enough."""
    declared = _find_declared(root.fd, config, edit, own, resolved, settings, stamp)
    injected = dict(config)
    put_devices(injected, edit)
    root.check(declared, injected, False)
    return declared


def with_hooks(edit: "ConfigEdit", declared: Declared, root: str, views: "Sequence[str]") -> "ConfigEdit":
    """Return the edit with the effects of our hooks."""
    more = edit_of(declared._replace(mounts=()), root, views, False)
    return edit._replace(
        mounts=[*edit.mounts, *more.mounts],
        masked=more.masked,
        read_only=more.read_only,
        hooks=[*edit.hooks, *more.hooks],
        noted=VIEWS,
    )


def _find_declared(
    root_fd: int,
    config: "dict[str, Any]",
    edit: "ConfigEdit",
    own: OwnHooks,
    resolved: "Resolved",
    settings: "Settings",
    stamp: "str | None",
) -> Declared:
    """Return the declaration that replaces our hooks, made now or by an earlier start on a host with this ``stamp``.

    "": that of the facts that are kept; None: neither kept nor looked for.
    Raises NeedsHookError for MIG devices and nodes that are mounted, and HostError OCIGPU-HOST-3.
    """
    if None in edit.nodes.values():
        raise NeedsHookError("its nodes are mounted")
    own = own._replace(commands=(*own.commands, *find_gbm_links(root_fd, own.commands)))
    nodes: dict[str, Any] = {}
    for entry in (*get_list(get_object(config, "linux"), "devices"), *edit.nodes.values()):
        if isinstance(entry, dict) and isinstance(entry.get("path"), str):
            nodes[entry["path"]] = entry
    if any(path.startswith("/dev/nvidia-caps/") for path in nodes):
        raise NeedsHookError("files determine which MIG devices it may see")
    gpus = tuple((path, node.get("major", 0), node.get("minor", 0)) for path, node in nodes.items() if _is_gpu(path))
    targets = tuple(path for path in _device_targets(own) if path in nodes)
    loader = read_loader_facts(root_fd)
    compat = [command.container_root for command in own.commands if isinstance(command, EnableCudaCompat)]
    has_compat = any(exists_inside(root_fd, path) for path in compat)
    files = tuple((spec.path, spec.checksum(), crc32(repr(spec.edits).encode())) for spec in resolved.specs)
    words = crc32(repr((own.commands, edit.mounts)).encode())

    def make() -> Declared:
        return _declare(root_fd, gpus, targets, loader, edit, own, settings)

    stamp = _kept_stamp(settings) if stamp == "" else stamp
    if has_compat or not stamp:  # what compatibility libraries mean is read from them
        return make()
    about = (edit.devices, own.settings, files, words, gpus, targets, loader)
    return find_kept("hooks", about, settings, make, stamp)


def _kept_stamp(settings: "Settings") -> str:
    stamp = read_stamp(settings)
    if not stamp:
        try:
            read_facts(settings)
            stamp = read_stamp(settings)
        except HostError:  # the source of the specification: nothing is stored
            return ""
    return stamp


def _device_targets(own: OwnHooks) -> list[str]:
    commands = [command for command in own.commands if isinstance(command, CreateSymlinks)]
    return [link_target(target, path) for command in commands for target, path in command.device_links]


def _declare(
    root_fd: int,
    gpus: "Sequence[tuple[str, int, int]]",
    targets: tuple[str, ...],
    loader: "LoaderFacts",
    edit: "ConfigEdit",
    own: OwnHooks,
    settings: "Settings",
) -> Declared:
    from ocigpu.bundle.from_plan import declare
    from ocigpu.cdi.loader_links import missing_links
    from ocigpu.core.actions import Bind, Link, TextFile
    from ocigpu.core.facts import HostFacts
    from ocigpu.entry.cdi_hook import read_driver_proc
    from ocigpu.entry.cdi_hook_plan import HookFacts, gpu_minors, plan_hooks
    from ocigpu.provision.compat import read_compat
    from ocigpu.provision.sonames import SonameLinks

    links = [link for command in own.commands if isinstance(command, CreateSymlinks) for link in command.links]
    folders = [path for command in own.commands if isinstance(command, UpdateLdCache) for path in command.folders]
    compat = [command.container_root for command in own.commands if isinstance(command, EnableCudaCompat)]
    views = [command.driver_proc for command in own.commands if isinstance(command, DisableDeviceNodeModification)]
    libraries = _read_libraries(edit, folders)
    given = {mount["destination"] for mount in edit.mounts} | {path for _, path in links}
    missing = missing_links({path: library.soname for path, library in libraries.items()}, given)
    if len({path for _, path in missing}) < len(missing):  # only the container's files show which one is newer
        raise NeedsHookError("several libraries have one SONAME")
    proc = read_driver_proc(views[-1]) if views else read_driver_proc("/proc/driver/nvidia", majors_only=True)
    facts = HookFacts(
        nodes=tuple(ContainerNode(*gpu) for gpu in gpus),
        device_targets=targets,
        loader=loader,
        compat=read_compat(root_fd, compat[-1]) if compat else None,
        driver_proc=proc,
        sonames=SonameLinks(tuple(missing)),
    )
    plan = plan_hooks(own.commands, facts, settings, masks=True)
    if any(isinstance(action, TextFile) and action.container_path == COMPAT_CONF for action in plan.actions):
        raise NeedsHookError("the image has CUDA compatibility libraries")
    for action in plan.actions:
        directory = action.container_path.rpartition("/")[0] if isinstance(action, Link) else ""
        if directory == "/dev" or any(path.startswith(f"{directory}/") for path in edit.nodes if directory):
            raise NeedsHookError(f"a link is beside nodes in {directory}")
    binds = [
        Bind(item["source"], item["destination"], (), "")
        for item in edit.mounts
        if not item["destination"].startswith("/proc/")  # on a simulated host only its own one can be meant
    ]
    declared = declare(plan._replace(actions=(*binds, *plan.actions)), HostFacts(libraries=tuple(libraries.values())))
    minors = gpu_minors(facts)
    denied = [(proc.gpu_major, gpu.minor) for gpu in proc.gpus if gpu.minor not in minors and proc.gpu_major >= 0]
    return declared._replace(denied=denied)


def _is_gpu(path: str) -> bool:
    digits = path.removeprefix("/dev/nvidia")
    return digits != path and digits.isascii() and digits.isdigit()


def _read_libraries(edit: "ConfigEdit", folders: "Sequence[str]") -> "dict[str, Library]":
    """Return the libraries mounted directly in the folders, as ELF files of the host, by container path.

    Raises NeedsHookError for one that cannot be read: a declaration with gaps is not stored.
    """
    from ocigpu.core.facts import Library
    from ocigpu.gpus.libraries.elf import read_elf_strictly

    found = {}
    for mount in edit.mounts:
        source, (directory, _, name) = mount["source"], mount["destination"].rpartition("/")
        if directory not in folders or not name.startswith("lib") or ".so" not in name:
            continue
        try:
            elf = read_elf_strictly(source)
        except OSError as error:
            raise NeedsHookError(f"{source}: {error.strerror}") from error
        if elf:
            found[mount["destination"]] = Library(source, name, elf.soname, (), elf.bits)
    return found
