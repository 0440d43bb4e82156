"""What a GPU hook has given a running container, as shown by facts that the container cannot forge.

A hook in config.json and a variable prove nothing: the hook may have refused (the vendor's, by its own settings), or
given less.  The proofs are the device rules of the configuration, and the mount table: the driver's files, by file
system and path, and the directories of GPUs below /proc/driver/nvidia.  A container that may mount (CAP_SYS_ADMIN) can
write that table, too: there only our own hook is trusted, by the settings that it was given.  A node alone proves
nothing if the container may make nodes (CAP_MKNOD).  Mounts of its configuration prove nothing, with everything in
them: a pod may name a node or a library of the host as a volume, or a directory where one is mounted.  If a volume
cannot be identified any more, because its path now leads elsewhere, nothing else can be, either.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ocigpu.bundle.edit import has_gpu_hook
from ocigpu.containers.child import ask_child
from ocigpu.containers.inside import look_inside
from ocigpu.containers.report import read_mode
from ocigpu.containers.rules import may_open
from ocigpu.core.actions import Plan
from ocigpu.core.config_json import get_list, get_object, has_user_namespace, is_path
from ocigpu.core.errors import OcigpuError
from ocigpu.core.facts import DeviceNode, HostFacts, ImageFacts, MigDevice, mig_capability_paths
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.views import PROC_DRIVER
from ocigpu.gpus.request import Request, join_requests
from ocigpu.gpus.vendors import make_plan, parse_request
from ocigpu.provision.container import LiveContainer
from ocigpu.provision.device_filter import Policy
from ocigpu.system import proc
from ocigpu.system.proc import Mount
from ocigpu.system.settings_file import read_settings

DELETED = "//deleted"
"""What mountinfo puts behind the path of a root that was removed (fs/d_path.c)."""
_NS_GET_USERNS, _NS_GET_PARENT = 0xB701, 0xB702  # linux/nsfs.h


class ShownMounts(NamedTuple):
    """The mounts of a container's first process, and of this one.

    ``of_runtime``: the process is in the mount namespace that its runtime has made.  Any user may leave that, into one
    where he may mount, by a user namespace of his own (unshare(2)).  ``volumes``: host paths, without links, that its
    configuration has mounted.
    """

    inside: tuple[Mount, ...] = ()
    host: tuple[Mount, ...] = ()
    of_runtime: bool = True
    volumes: tuple[str, ...] = ()


class Shown(NamedTuple):
    """The plan of what a hook has given, and the origin of the request, as text."""

    plan: Plan
    source: str


def read_mounts(inside: LiveContainer, config: dict[str, Any]) -> ShownMounts:
    """Return the mounts of a container's first process, and ours; raises OSError, and OcigpuError OCIGPU-CTR-4."""
    theirs, ours = proc.read_mounts("mountinfo", inside.proc_fd), proc.read_mounts()
    of_runtime = _is_of_runtime(inside, has_user_namespace(config))
    binds = [mount for mount in get_list(config, "mounts") if isinstance(mount, dict) and _is_bind(mount)]
    sources = [mount.get("source") for mount in binds]
    paths = [path for path in sources if isinstance(path, str) and is_path(path) and path.startswith("/")]
    # by a child: a volume's server may never answer
    volumes = ask_child(lambda: [*map(os.path.realpath, paths)]) if paths and has_gpu_hook(config) else ()
    return ShownMounts(tuple(theirs.values()), tuple(ours.values()), of_runtime, tuple(volumes))


def _is_bind(mount: dict[str, Any]) -> bool:
    return mount.get("type") == "bind" or not {"bind", "rbind"}.isdisjoint(map(str, get_list(mount, "options")))


def _is_of_runtime(inside: LiveContainer, with_users: bool) -> bool:
    """Tell whether a mount namespace belongs to the user namespace a runtime makes it in: ours, or a direct child.

    The namespace itself answers: ioctl_nsfs(2), Linux 4.9.
    """
    opened: list[int] = []
    try:
        opened.append(fcntl.ioctl(inside.mnt_fd, _NS_GET_USERNS))
        if with_users:
            opened.append(fcntl.ioctl(opened[0], _NS_GET_PARENT))
        return os.path.samestat(os.fstat(opened[-1]), os.stat("/proc/self/ns/user"))
    except OSError:  # an older kernel, or no permission: then nothing is known
        return False
    finally:
        for fd in opened:
            os.close(fd)


def plan_shown(
    config: dict[str, Any],
    bundle: str,
    inside: LiveContainer,
    mounts: ShownMounts,
    settings: Settings,
    facts: HostFacts,
    image: ImageFacts,
    rules: Policy,
) -> Shown | None:
    """Return what the GPU hook of a container's configuration has given it, None if nothing shows.

    ``rules``: device rules that its runtime enforces.  Never more than its request is for by the hook's settings, or
    where these are not known by ours.  Raises OcigpuError.
    """
    own = read_mode(config) == "hook"
    settings = _settings_of_hook(config, settings) if own else settings
    request = parse_request(config, settings, bundle)
    shown = []
    for one in request.each if request.selection not in ("nothing", "cdi") else ():
        if one.vendor in facts.vendors:
            look = _Look(inside, config, facts.of(one.vendor), rules, mounts, own)
            shown.append(look.narrow(one, make_plan(facts, one, settings, image)))
    narrowed = [one for one in shown if one is not None]
    return Shown(make_plan(facts, join_requests(narrowed), settings, image), request.source) if narrowed else None


def _settings_of_hook(config: dict[str, Any], settings: Settings) -> Settings:
    """Return the settings that our hook was started with; ours where it names none, or they are gone."""
    for hook in get_list(get_object(config, "hooks"), "prestart"):
        words = [word for word in get_list(hook, "args") if isinstance(word, str)]
        if "--config" in words[:-1]:
            try:
                return read_settings(words[words.index("--config") + 1])
            except OcigpuError:
                return settings
    return settings


class _Look:
    """``files``: driver files of the host that the container has mounted."""

    def __init__(
        self,
        inside: LiveContainer,
        config: dict[str, Any],
        facts: HostFacts,
        rules: Policy,
        mounts: ShownMounts,
        own: bool,
    ) -> None:
        self._inside, self._facts, self._rules = inside, facts, rules
        self._host = sorted(mounts.host, key=lambda mount: -len(mount.point))
        volumes = self._find_volumes(mounts)
        known = mounts.of_runtime and (own or volumes is not None)
        believed = [mount for mount in mounts.inside if mount.mnt_id not in (volumes or ())] if known else []
        if not own and _has(config, "CAP_SYS_ADMIN"):
            believed = []
        self._of_host = {os.makedev(*map(int, mount.device.split(":"))) for mount in mounts.host}
        self._points = {mount.point: mount.root for mount in believed}
        self._mounted = {(mount.device, mount.root) for mount in believed}
        may_make_nodes = _has(config, "CAP_MKNOD") and not has_user_namespace(config)
        self._nodes_tell = known and not may_make_nodes
        paths = [*(library.host_path for library in facts.libraries), *(file.host_path for file in facts.binaries)]
        self.files = frozenset(path for path in paths if self._is_file(path))

    def _find_volumes(self, mounts: ShownMounts) -> set[int] | None:
        """Return the ids of a container's volumes and of the mounts below them; None if one cannot be identified.

        The mount at a volume's path may be gone or replaced since the container's start.
        """
        table = [mount for mount in mounts.inside if not mount.point.startswith(("/proc/", "/sys/"))]
        ids: set[int] = set()
        for source in mounts.volumes:
            places = set(self._places(source))
            found = {mount.mnt_id for mount in table if (mount.device, mount.root.removesuffix(DELETED)) in places}
            if not found:
                return None
            ids |= found
        if len(ids) < len(mounts.volumes):  # one path leads to another volume by now
            return None
        below = {mount.mnt_id: mount.parent for mount in mounts.inside}
        while more := {number for number, parent in below.items() if parent in ids} - ids:
            ids |= more
        return ids

    def narrow(self, request: Request, plan: Plan) -> Request | None:
        """Return a request for what shows of a plan, None for nothing."""
        migs = {mig.uuid: (gpu, mig) for gpu in self._facts.gpus for mig in gpu.mig_devices}
        gpus = {gpu.uuid: gpu for gpu in self._facts.gpus}
        devices = [uuid for uuid in plan.gpus if self._is_gpu(gpus[uuid].proc_name, gpus[uuid].node)]
        for uuid in plan.mig_devices:
            gpu, mig = migs[uuid]
            if self._is_gpu(gpu.proc_name, gpu.node) and self._is_mig(gpu.minor, mig):
                devices.append(uuid)
        if not devices and not self.files:
            return None
        everything = self._is_directory("capabilities")
        present = {node.minor: node for node in self._facts.imex_nodes}
        features = {feature.name: feature.nodes for feature in self._facts.features}
        return request._replace(
            selection="list" if devices else "none",
            devices=tuple(devices),
            capabilities=tuple(name for name in request.capabilities if self._is_capability(name, request)),
            mig_config=request.mig_config if everything else "",
            mig_monitor=request.mig_monitor if everything else "",
            imex_channels=tuple(n for n in request.imex_channels if n in present and self._are_nodes([present[n]])),
            features=tuple(name for name in request.features if self._are_nodes(features.get(name, ()))),
        )

    def _is_gpu(self, proc_name: str, node: DeviceNode | None) -> bool:
        return (proc_name != "" and self._is_directory(f"gpus/{proc_name}")) or self._are_nodes([node] if node else ())

    def _is_mig(self, gpu_minor: int, mig: MigDevice) -> bool:
        paths = [f"capabilities/{path}" for path in mig_capability_paths(gpu_minor, mig)]
        if all(self._is_directory(path) for path in paths):
            return True
        return self._are_nodes(
            [node for _, node in self._facts.cap_nodes if node.minor in (mig.gi_minor, mig.ci_minor)]
        )

    def _is_capability(self, name: str, request: Request) -> bool:
        """Tell whether a driver capability shows: one of the libraries that only it brings exists."""
        if name == "compat32":
            return any(library.bits == 32 and library.host_path in self.files for library in self._facts.libraries)
        asked = set(request.capabilities)
        brought = [library for library in self._facts.libraries if name in library.capabilities]
        alone = [library for library in brought if asked & set(library.capabilities) == {name}]
        return any(library.host_path in self.files for library in alone or brought)

    def _is_directory(self, name: str) -> bool:
        """Tell whether this part of the host's /proc/driver/nvidia is mounted where it belongs."""
        return self._points.get(f"{PROC_DRIVER}/{name}", "").endswith(f"/driver/nvidia/{name}")

    def _is_file(self, host_path: str) -> bool:
        """Tell whether a file of the host is mounted anywhere in the container."""
        return any(place in self._mounted for place in self._places(host_path))

    def _places(self, host_path: str) -> Iterator[tuple[str, str]]:
        """Yield what a path of the host is to mount tables: file system and path in that."""
        above = [mount for mount in self._host if f"{host_path}/".startswith(f"{mount.point.rstrip('/')}/")]
        for mount in above:
            if mount.point == above[0].point:
                yield mount.device, mount.root.rstrip("/") + host_path[len(mount.point.rstrip("/")) :] or "/"

    def _are_nodes(self, nodes: Iterable[DeviceNode]) -> bool:
        """Tell whether there are nodes, and all show: by a rule, a mount, or a node that others must have made.

        On a file system of the host it is a volume's, or made before this container.
        """
        wanted = list(nodes)
        left = [node for node in wanted if not may_open(self._rules, (node.major, node.minor))]
        left = [node for node in left if not (node.host_path and self._is_file(node.host_path))]
        if left and self._nodes_tell:
            seen = look_inside(self._inside, (), [node.container_path for node in left]).files
            pairs = zip(left, seen, strict=True)
            left = [node for node, file in pairs if not file.is_device(node) or file.device in self._of_host]
        return bool(wanted) and not left


def _has(config: dict[str, Any], capability: str) -> bool:
    """Tell whether processes of a container may have a capability; without a list runtimes leave them all."""
    process = get_object(config, "process")
    return "capabilities" not in process or capability in get_list(get_object(process, "capabilities"), "bounding")
