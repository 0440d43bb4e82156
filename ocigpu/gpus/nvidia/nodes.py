"""Makes and corrects the host's own device nodes of the NVIDIA driver, and their links in /dev/char.

The driver makes neither: on a host without a desktop a node is missing until a program that runs as root has used the
driver, and systemd (before version 240) finds a device's number by its link /dev/char/MAJOR:MINOR alone. runc 1.1.3 to
1.1.6 (Debian 12 has 1.1.5) does not even tell systemd of a device without a link, whatever systemd's version (its
changelog, 1.1.7): the next daemon-reload takes such a device from its containers.

:func:`read_driver` reads the kernel's data, :func:`plan_nodes` derives the nodes (pure), :func:`find_changes` compares
them with the existing ones (read-only), and :func:`apply_changes` makes the changes.  Numbers and permissions are the
kernel's, as the driver's README (chapters "Device nodes" and "nvidia-modprobe") describes them: majors of
/proc/devices, a GPU's minor of its "Device Minor", permissions of params or of a capability's file.
"""

import errno
import os
import stat

from ocigpu.core.errors import MAKE_NODES, HostError, OsErrorAs
from ocigpu.core.facts import Permissions
from ocigpu.core.record import NamedTuple
from ocigpu.gpus.nvidia.devices import CONTROL_MINOR, IMEX_DRIVER, MODESET_MINOR
from ocigpu.gpus.nvidia.procfs import (
    MIG_MINORS_LIMIT,
    CapabilityNode,
    ProcGpu,
    find_gpu_major,
    is_loaded,
    parse_devices,
    parse_fields,
    parse_mig_minors,
    parse_permissions,
    read_capabilities,
    read_proc_gpus,
)
from ocigpu.gpus.tree import Roots, Tree, list_names, read_text
from ocigpu.system.files import draft_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_NAMES = 4096
"""Maximum of names read from one directory of nodes."""
_CAPS = "/dev/nvidia-caps"


class Driver(NamedTuple):
    """What the kernel says of the driver and its devices.

    ``modify``: whether nodes may be changed (params); ``modeset``: whether nvidia-modeset is loaded, which older
    drivers do not show in /proc/devices.
    """

    majors: tuple[tuple[str, int], ...]
    permissions: Permissions = Permissions()
    modify: bool = True
    modeset: bool = False
    gpus: tuple[ProcGpu, ...] = ()
    capabilities: tuple[CapabilityNode, ...] = ()


class HostNode(NamedTuple):
    """A node that should exist.  ``modify``: False if the driver leaves nodes of this kind to another program."""

    path: str
    major: int
    minor: int
    mode: int = 0o666
    uid: int = 0
    gid: int = 0
    modify: bool = True


class NodeChange(NamedTuple):
    """One difference between the expected and the existing nodes and links.

    ``what``: "make", "correct" (permissions), "replace" (it is something else), "remove" (a link with the number of
    another device), "keep" (it is as it should be) or "leave" (the driver's parameters forbid to touch it).  ``path``:
    on the host; ``cause``: what exists instead.  ``node`` is None and ``target`` set for a link.  ``stand_in``: a file
    may stand for the node where making nodes is not permitted.
    """

    what: str
    path: str
    number: str
    cause: str = ""
    node: HostNode | None = None
    target: str = ""
    stand_in: bool = False


def read_driver(roots: Roots) -> Driver:
    """Return what procfs says; raises HostError OCIGPU-HOST-1 when no driver is loaded, OCIGPU-HOST-3."""
    majors = parse_devices(read_text(f"{roots.proc}/devices") or "")
    if not find_gpu_major(dict(majors), 0):
        from ocigpu.gpus.platforms import no_driver_to_load

        if elsewhere := no_driver_to_load(roots):
            raise elsewhere
        raise HostError(
            "OCIGPU-HOST-1",
            f"{roots.proc}/devices: no device number of the NVIDIA driver: it is not loaded",
            f"Install the driver, then: {MAKE_NODES} --load-kernel-modules",
        )
    directory = f"{roots.proc}/driver/nvidia"
    params = read_text(f"{directory}/params") or ""
    minors = parse_mig_minors(read_text(f"{roots.proc}/driver/nvidia-caps/mig-minors", MIG_MINORS_LIMIT) or "")
    return Driver(
        majors,
        parse_permissions(params),
        parse_fields(params).get("ModifyDeviceFiles", "1") == "1",
        "nvidia-modeset" in dict(majors) or is_loaded(roots.sys, "nvidia-modeset"),
        read_proc_gpus(directory),
        read_capabilities(directory, minors),
    )


def plan_nodes(
    driver: Driver, imex_channels: "Iterable[int]" = (), control_only: bool = False
) -> tuple[tuple[HostNode, ...], tuple[str, ...]]:
    """Return the nodes that should exist, and notes on those whose number is unknown, a sentence each.

    ``imex_channels``: channels that additionally get a node.  ``control_only``: neither GPUs nor capabilities.
    """
    majors, notes = dict(driver.majors), []
    permissions = (*driver.permissions, driver.modify)
    gpu_major = find_gpu_major(majors, 0)
    nodes = [HostNode("/dev/nvidiactl", gpu_major, CONTROL_MINOR, *permissions)]
    uvm = majors.get("nvidia-uvm")
    if uvm is None:
        notes.append("the kernel module nvidia-uvm is not loaded: CUDA needs its nodes")
    else:
        nodes += [HostNode("/dev/nvidia-uvm", uvm, 0), HostNode("/dev/nvidia-uvm-tools", uvm, 1)]
    if driver.modeset:
        nodes.append(HostNode("/dev/nvidia-modeset", gpu_major, MODESET_MINOR, *permissions))
    else:
        notes.append("the kernel module nvidia-modeset is not loaded: only displays need its node")
    if not control_only:
        for gpu in driver.gpus:
            if gpu.excluded:
                notes.append(f"GPU {gpu.name} is excluded by the driver's configuration: no node")
            elif not 0 <= gpu.minor < MODESET_MINOR:
                notes.append(f"GPU {gpu.name} has no usable Device Minor: no node")
            else:
                nodes.append(HostNode(f"/dev/nvidia{gpu.minor}", gpu_major, gpu.minor, *permissions))
        caps = majors.get("nvidia-caps")
        if caps is not None:
            nodes += [
                HostNode(f"{_CAPS}/nvidia-cap{item.minor}", caps, item.minor, item.mode, modify=item.modify)
                for item in driver.capabilities
            ]
    imex = majors.get(IMEX_DRIVER)
    channels = tuple(imex_channels)
    if imex is not None:
        nodes += [HostNode(f"/dev/{IMEX_DRIVER}/channel{number}", imex, number, *permissions) for number in channels]
    elif channels:
        notes.append(f"the driver has no {IMEX_DRIVER}: no node for IMEX channels")
    return tuple(nodes), tuple(notes)


def find_changes(nodes: "Sequence[HostNode]", roots: Roots) -> tuple[NodeChange, ...]:
    """Return the changes needed below ``roots.dev`` so that these nodes exist; changes nothing."""
    tree = Tree(roots.dev, roots.stand_in)
    return tuple(_compare_node(node, tree)._replace(stand_in=roots.stand_in) for node in nodes)


def _compare_node(node: HostNode, tree: Tree) -> NodeChange:
    path, number = tree.host(node.path), f"{node.major}:{node.minor}"
    found = path
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):  # as driver containers have them; one that leads astray is replaced
            found = tree.find(node.path) or path
            status = os.lstat(found)
    except FileNotFoundError:
        return NodeChange("make" if node.modify else "leave", path, number, "" if node.modify else "missing", node)
    except OSError as error:
        raise HostError("OCIGPU-DEV-5", f"stat {path}: {error.strerror}") from error
    cause = ""
    if tree.stand_in and stat.S_ISREG(status.st_mode):  # stands for a node: its maker could make no real one
        return NodeChange("keep", path, number, "", node)
    if not stat.S_ISCHR(status.st_mode):
        cause = "not a character device"
    elif (os.major(status.st_rdev), os.minor(status.st_rdev)) != (node.major, node.minor):
        cause = f"has number {os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    if cause:
        return NodeChange("replace" if node.modify else "leave", path, number, cause, node)
    is_now = (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
    if is_now == (node.mode, node.uid, node.gid):
        return NodeChange("keep", path, number, "", node)
    cause = f"mode {is_now[0]:04o} uid {is_now[1]} gid {is_now[2]}, not {node.mode:04o} {node.uid} {node.gid}"
    return NodeChange("correct" if node.modify else "leave", found, number, cause, node)


def char_directory(roots: Roots) -> str:
    """Return the directory in which systemd finds links by number: the host's /dev/char, or a simulated host's own."""
    return f"{roots.host}/dev/char"


def find_link_changes(
    nodes: "Sequence[HostNode]", driver: Driver, roots: Roots, directory: str = ""
) -> tuple[NodeChange, ...]:
    """Return the changes needed so that these nodes, and other existing ones of the driver, have their links.

    ``directory``: where links are ("": :func:`char_directory`).  Links that lead to one of the nodes from the number of
    another device are stale, and removed.  Changes nothing.
    """
    directory = directory or char_directory(roots)
    numbers = {node.path: f"{node.major}:{node.minor}" for node in (*_existing_nodes(driver, roots), *nodes)}
    planned = {node.path for node in nodes}
    paths = {number: path for path, number in sorted(numbers.items(), key=lambda item: item[0] in planned)}
    relative = directory == f"{roots.dev}/dev/char"
    changes = []
    for number, path in paths.items():
        target = f"..{path.removeprefix('/dev')}" if relative else f"{roots.dev}{path}"
        link = f"{directory}/{number}"
        cause = _link_cause(link, f"{roots.dev}{path}")
        what = "keep" if not cause else "make" if cause == "missing" else "replace"
        changes.append(NodeChange(what, link, number, "" if what == "make" else cause, None, target))
    stale = ((name, _leads_to(directory, name, numbers, roots)) for name in list_names(directory) if name not in paths)
    changes += [
        NodeChange("remove", f"{directory}/{name}", name, f"{path} is {numbers[path]}") for name, path in stale if path
    ]
    return tuple(changes)


def _existing_nodes(driver: Driver, roots: Roots) -> list[HostNode]:
    """Return the nodes of the loaded driver that are in its directories, by the numbers they have."""
    majors = {major for name, major in driver.majors}
    found = []
    for directory in ("/dev", _CAPS, f"/dev/{IMEX_DRIVER}"):
        names = [name for name in list_names(roots.dev + directory) if directory != "/dev" or name.startswith("nvidia")]
        for name in names[:MAX_NAMES]:
            path = f"{directory}/{name}"
            try:
                status = os.lstat(roots.dev + path)
            except FileNotFoundError:
                continue
            if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) in majors:
                found.append(HostNode(path, os.major(status.st_rdev), os.minor(status.st_rdev)))
    return found


def _link_cause(link: str, path: str) -> str:
    """Return what is wrong with a link to ``path``: "" for nothing, "missing", or what exists instead."""
    try:
        found = os.readlink(link)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            raise HostError("OCIGPU-DEV-5", f"stat {link}: {error.strerror}") from error
        return "not a link"
    return "" if os.path.normpath(os.path.join(os.path.dirname(link), found)) == path else f"leads to {found}"


def _leads_to(directory: str, name: str, numbers: dict[str, str], roots: Roots) -> str:
    """Return which of the nodes a link leads to; "" for none, and if it is not a link."""
    try:
        target = os.readlink(f"{directory}/{name}")
    except OSError:  # no link, or gone
        return ""
    path = os.path.normpath(os.path.join(directory, target))
    path = path.removeprefix(roots.dev) if roots.dev else path
    return path if path in numbers else ""


def keep_links(roots: Roots) -> str:
    """Make the links of the driver's nodes, as MIG devices come and go; return why not, "" if all is well.

    Of a simulated host's nodes systemd knows nothing, and without a driver there are none.  Needs root.
    """
    if roots.stand_in:
        return ""
    try:
        driver = read_driver(roots)
        apply_changes(find_link_changes(plan_nodes(driver)[0], driver, roots))
    except HostError as error:
        return "" if error.code == "OCIGPU-HOST-1" else error.message
    return ""


def apply_changes(changes: "Iterable[NodeChange]") -> None:
    """Carry out the changes of :func:`find_changes` and :func:`find_link_changes`.

    Every node and link gets its name when it is complete, so that no program sees an incomplete one; a replaced one
    exists until then.  An empty directory in its place is removed.  Raises HostError OCIGPU-DEV-5 at the first change
    that is not possible; earlier ones stay.
    Needs CAP_MKNOD, CAP_CHOWN and CAP_FOWNER.
    """
    for change in changes:
        with OsErrorAs(HostError, "OCIGPU-DEV-5", f"{change.what} {change.path}"):
            if change.what == "remove":
                os.unlink(change.path)
            elif change.what in ("make", "replace", "correct"):
                _apply(change)


def _apply(change: NodeChange) -> None:
    node = change.node
    if change.what == "correct" and node:
        os.chown(change.path, node.uid, node.gid)
        os.chmod(change.path, node.mode)
        return
    directory = os.path.dirname(change.path)
    if not os.path.isdir(directory):
        os.makedirs(directory)
        os.chmod(directory, 0o755)  # whatever the umask
    temp = f"{directory}/{draft_name()}"
    try:
        if node:
            _make_node(temp, node, change.stand_in)
        else:
            os.symlink(change.target, temp)
        if os.path.isdir(change.path) and not os.path.islink(change.path):
            os.rmdir(change.path)  # dockerd makes one for "-v /dev/nvidia0"; one with files stays
        os.rename(temp, change.path)
    except BaseException:
        if os.path.lexists(temp):
            os.unlink(temp)
        raise


def _make_node(path: str, node: HostNode, stand_in: bool) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(node.major, node.minor))
    except PermissionError:
        if not stand_in:
            raise
        with open(path, "x", encoding="ascii") as file:
            file.write(STAND_IN)
    else:
        os.chown(path, node.uid, node.gid)
    os.chmod(path, node.mode)


STAND_IN = "ocigpu simulated device\n"
"""Content of the regular file that stands for a node; the compiled sources look for it (SIM_MAGIC)."""
