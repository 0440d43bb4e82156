"""``ocigpu-hook create-symlinks ...``: the hooks of a CDI specification, in a container that is being created.

An OCI runtime starts them at the createContainer stage, in the container's namespaces, while the host's files are still
visible (runtime-spec, config.md, "createContainer Hooks"), with the container's state on standard input.
"""

import os
import stat

from ocigpu.bundle.document import check_can_have_gpus, read_config
from ocigpu.cdi.hook_words import (
    OPTIONS,
    CreateSymlinks,
    DisableDeviceNodeModification,
    EnableCudaCompat,
    UpdateApplicationProfile,
    UpdateLdCache,
    link_target,
    parse_hook,
)
from ocigpu.core.config_json import rootfs_path
from ocigpu.core.errors import SpecError, quoted
from ocigpu.entry.cdi_hook_plan import DriverProc, HookFacts, plan_hooks
from ocigpu.entry.state import parse_state, read_state
from ocigpu.gpus.nvidia.procfs import find_gpu_major, parse_devices, read_capabilities, read_proc_files, read_proc_gpus
from ocigpu.gpus.tree import read_text
from ocigpu.provision.apply import provision_here
from ocigpu.provision.compat import read_compat
from ocigpu.provision.image import open_rootfs, read_nvidia_nodes
from ocigpu.provision.inside import exists_inside, status_inside
from ocigpu.provision.loader import LoaderFacts, find_gbm_links, read_loader_facts
from ocigpu.provision.sonames import SonameLinks, read_soname_links
from ocigpu.system.log import get_trace, step
from ocigpu.system.namespaces import in_initial_user_namespace
from ocigpu.system.proc import read_mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.cdi.hook_words import Command
    from ocigpu.core.settings import Settings


def is_cdi_call(words: list[str]) -> bool:
    """Tell whether the words after a program's options are a call of CDI hooks.

    Unknown names count too if they contain a hyphen, as all those hooks do: a specification may be newer than this
    program.  A misspelt stage of the runtime-spec ("prestrat") contains none.
    """
    return bool(words) and (words[0] == "hook" or words[0] in OPTIONS or "-" in words[0][1:])


def run_cdi_hook(words: list[str], settings: "Settings") -> tuple[str, ...]:
    """Carry out the commands in the container of the OCI state; return notes, a sentence each.

    All sub-commands are done or none is: raises OcigpuError after
    everything begun was undone (OCIGPU-ARG-1, -SPEC-1 to -5, -HOST-3 and what provision_here raises).
    """
    call = parse_hook(words)
    notes = [f"CDI hook {quoted(name)} is unknown and was left out" for name in call.unknown]
    if not call.commands:
        return (*notes,) or ("no CDI hook was named",)
    text = read_state(call.state_file)
    if trace := get_trace():
        trace.name(text)
    with step("state"):
        rootfs = find_rootfs(text)
    commands = tuple(_with_real_ldconfig(command) for command in call.commands)
    root_fd = open_rootfs(rootfs)
    try:
        with step("facts", rootfs):
            commands = (*commands, *find_gbm_links(root_fd, commands))
            facts = read_hook_facts(root_fd, commands)
    finally:
        os.close(root_fd)
    with step("plan"):
        plan = plan_hooks(commands, facts, settings)
    notes += plan.notes
    if plan.actions:
        notes += provision_here(plan, rootfs, settings)
    return tuple(notes)


def find_rootfs(text: bytes) -> str:
    """Return the path of the container's root directory: of the state (crun says it), else of the bundle's config.json.

    Raises SpecError: OCIGPU-SPEC-5 for what is no state, -1 and -2 for the bundle, -3 when its container has no root
    or no mount namespace, or when the root is the host's.
    """
    state = parse_state(text, wants_pid=False)
    rootfs = os.path.normpath(os.path.join(state.bundle, state.root)) if state.root else _rootfs_of_bundle(state.bundle)
    try:
        found = os.stat(rootfs)
    except OSError as error:
        raise SpecError("OCIGPU-SPEC-3", f"open rootfs {rootfs}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or os.path.samestat(found, os.stat("/")):
        raise SpecError("OCIGPU-SPEC-3", f"open rootfs {rootfs}: not a directory below the host's root")
    return rootfs


def _rootfs_of_bundle(bundle: str) -> str:
    """Return the root directory that config.json names; if it cannot be read, the one that this process is in.

    Podman keeps its bundles where the root of a container's user namespace cannot go (--userns=auto as root). runc is
    in the container's root directory when it starts these hooks (libcontainer, prepareRootfs).
    """
    try:
        document = read_config(bundle)
    except SpecError:
        if in_initial_user_namespace():
            raise
        points = {mount.point: mount.type for mount in read_mounts().values()}  # the last mount of a path
        place = os.getcwd()
        if place == "/" or place not in points or points.get(f"{place}/proc") != "proc":
            raise
        return place
    check_can_have_gpus(document.config, document.path)
    return rootfs_path(document.config, bundle)


def _with_real_ldconfig(command: "Command") -> "Command":
    """Return the command with the real program if the host's ldconfig is a script (Ubuntu)."""
    if isinstance(command, UpdateLdCache) and command.ldconfig:
        script = command.ldconfig.removesuffix(".real")
        real = f"{script}.real"
        return command._replace(ldconfig=real if os.path.exists(real) else script)
    return command


def read_hook_facts(root_fd: int, commands: "tuple[Command, ...]") -> HookFacts:
    """Return the facts that the commands need about the container below ``root_fd`` and the host's procfs.

    Raises HostError OCIGPU-HOST-3 when a file of the host's procfs exists but cannot be read.
    """
    kinds = {type(command) for command in commands}
    targets: list[str] = []
    kept: list[str] = []
    compat = None
    proc = DriverProc("")
    for command in commands:
        if isinstance(command, CreateSymlinks):
            targets += [link_target(target, path) for target, path in command.device_links]
            kept += [path for target, path in command.links if _stays(root_fd, target, path)]
        elif isinstance(command, EnableCudaCompat):
            compat = read_compat(root_fd, command.container_root)
        elif isinstance(command, DisableDeviceNodeModification):
            proc = read_driver_proc(command.driver_proc)
    if UpdateApplicationProfile in kinds and DisableDeviceNodeModification not in kinds:
        proc = read_driver_proc("/proc/driver/nvidia", majors_only=True)
    wants_nodes = kinds & {DisableDeviceNodeModification, UpdateApplicationProfile}
    return HookFacts(
        nodes=read_nvidia_nodes(root_fd) if wants_nodes else (),
        device_targets=tuple(path for path in dict.fromkeys(targets) if _is_device(root_fd, path)),
        kept_files=tuple(kept),
        loader=read_loader_facts(root_fd) if kinds & {EnableCudaCompat, UpdateLdCache} else LoaderFacts(),
        compat=compat,
        driver_proc=proc,
        sonames=_read_sonames(root_fd, commands),
    )


def _read_sonames(root_fd: int, commands: "tuple[Command, ...]") -> SonameLinks:
    """Return the SONAME links that folders of update-ldcache lack: the vendor's ldconfig would make them."""
    folders = tuple(f for command in commands if isinstance(command, UpdateLdCache) for f in command.folders)
    if not folders:
        return SonameLinks()
    given = tuple(link for command in commands if isinstance(command, CreateSymlinks) for link in command.links)
    return read_soname_links(root_fd, folders, given, tuple(mount.point for mount in read_mounts().values()))


def _stays(root_fd: int, target: str, path: str) -> bool:
    """Tell whether the image has a regular file at a link's path, and nothing at its target."""
    status = status_inside(root_fd, path, os.O_NOFOLLOW)
    if status is None or not stat.S_ISREG(status.st_mode):
        return False
    return not exists_inside(root_fd, os.path.join(os.path.dirname(path), target))


def _is_device(root_fd: int, path: str) -> bool:
    status = status_inside(root_fd, path)
    return status is not None and stat.S_ISCHR(status.st_mode)


def read_driver_proc(directory: str, majors_only: bool = False) -> DriverProc:
    """Return the content of the driver's procfs tree; its majors are in ``devices`` two directories above."""
    proc, _, below = directory.rstrip("/").rpartition("/driver/")
    majors = dict(parse_devices(read_text(f"{proc}/devices") or "")) if below == "nvidia" else {}
    found = DriverProc(
        "",
        gpu_major=find_gpu_major(majors, -1),
        caps_major=majors.get("nvidia-caps", -1),
    )
    if majors_only or not os.path.isdir(directory):
        return found
    return found._replace(
        directory=directory.rstrip("/"),
        files=read_proc_files(directory),
        gpus=read_proc_gpus(directory),
        capabilities=tuple((one.name, one.minor) for one in read_capabilities(directory, {})),
    )
