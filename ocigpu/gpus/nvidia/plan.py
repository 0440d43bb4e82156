"""Makes a plan from facts and a request: pure, and the only place with policy.

The same input gives the same plan.  This module decides what is granted, where each file goes, its mount options, and
the device rules.  Each action has its reason, and is carried out elsewhere.
"""

from ocigpu.core.actions import (
    FILE_OPTIONS,
    SOCKET_OPTIONS,
    AllowDevice,
    Bind,
    Link,
    Node,
    Plan,
    RefreshLdCache,
    join_groups,
    node_actions,
)
from ocigpu.core.errors import HostError
from ocigpu.core.facts import (
    DeviceNode,
    FeatureNodes,
    Gpu,
    HostFacts,
    HostFile,
    ImageFacts,
    Library,
    MigDevice,
    capability_path,
    mig_capability_paths,
)
from ocigpu.core.gate import PARTS
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.selection import select_devices
from ocigpu.gpus.nvidia.views import PROC_DRIVER, application_profile, proc_view, proc_view_by_masks, simulated_proc
from ocigpu.gpus.request import Request, Selection
from ocigpu.gpus.tree import sysfs_address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ocigpu.core.actions import Action

    _Given = tuple[DeviceNode, str, Sequence[str]]

CONTROL_CAPABILITIES = {
    "/dev/nvidia-uvm": ("compute", "video"),
    "/dev/nvidia-uvm-tools": ("compute", "video"),
    "/dev/nvidia-modeset": ("display",),
}
"""Control nodes that only some capabilities need; /dev/nvidiactl goes to everybody."""

REQUIRED_SONAMES = {"compute": "libcuda.so.1", "utility": "libnvidia-ml.so.1"}
"""Libraries without which a capability is an empty promise."""

DEVELOPER_LINKS = (
    ("libcuda.so", "libcuda.so.1"),
    ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
)
"""Names that programs dlopen without a version, as the driver's installer makes them."""


def make_plan(
    facts: HostFacts, request: Request, settings: Settings, image: "ImageFacts | None" = None, mode: str = "hook"
) -> Plan:
    """Return the plan for a container with this request on this host.

    ``image`` decides where libraries go (default: an image with /usr/lib64 and glibc).  ``mode`` "spec": for a
    container described by its config.json alone, where nothing can be mounted below /proc: files that it must not see
    there are hidden instead.  Raises RequestError for a request that the host cannot satisfy (OCIGPU-DEV-1,
    OCIGPU-REQ-3) and HostError for broken devices or files (OCIGPU-DEV-2, -DEV-4, OCIGPU-LIB-1).  An empty request
    results in a plan without actions.
    """
    image = image or ImageFacts()
    if request.selection == "nothing":
        return Plan((), notes=request.notes, mode=mode, image=image)
    return plan_selection(facts, request, select_devices(request, facts), settings, image, mode)


def plan_selection(
    facts: HostFacts, request: Request, selection: Selection, settings: Settings, image: ImageFacts, mode: str = "hook"
) -> Plan:
    """Return the plan of a request whose devices are selected; raises as :func:`make_plan`."""
    gpus = tuple(sorted(selection.every_gpu(), key=lambda gpu: gpu.index))
    if request.requirements:
        from ocigpu.gpus.nvidia.require import check_requirements

        check_requirements(request.requirements, facts, gpus)
    notes = [*request.notes, *facts.notes, *selection.notes]
    libraries = _libraries(facts, request)
    plan = _Draft(selection)
    nodes = _collect_nodes(facts, request, selection, gpus, notes)
    if not settings.features_no_procfs_view:
        (_add_masks if mode == "spec" else _add_proc)(plan, facts, request, gpus, notes)
    elif facts.simulated and facts.proc_driver:
        plan.add([simulated_proc(facts.proc_driver)])
    _add_nodes(plan, nodes)
    if not settings.features_no_additional_gids_for_device_nodes:
        plan.add(join_groups([node for node, _, _ in nodes]))
    _add_files(plan, facts, request)
    plan.add(
        [
            *(Bind(item.host_path, library_path(item, image), FILE_OPTIONS, reason) for item, reason in libraries),
            *_link_actions(libraries, request, image),
            *_module_links(facts, request),
            *_named_links(facts, libraries, request, image),
        ]
    )
    _add_listed(plan, facts, settings, image, mode)
    _add_drm_links(plan, request, gpus)
    if _graphics(request) and gpus and not settings.features_no_application_profile:
        plan.add([application_profile([gpu.minor for gpu in gpus])])
    if not settings.features_no_loader_cache:
        plan.add(_ldcache_actions(libraries, request, settings, image, plan.actions if mode == "hook" else ()))
    return Plan(
        tuple(plan.actions),
        gpus=tuple(gpu.uuid for gpu in selection.gpus),
        mig_devices=tuple(mig.uuid for _, mig in selection.mig_devices),
        notes=tuple(notes),
        driver_version=facts.driver_version,
        simulated=facts.simulated,
        mode=mode,
        image=image,
        parts={name: tuple(part) for name, part in plan.parts.items()},
    )


def part_name(gpu: Gpu, mig: "MigDevice | None" = None) -> str:
    """Return the name of a device's part of a plan: its UUID; without one, as of procfs, its index."""
    if mig is None:
        return gpu.uuid or str(gpu.index)
    return mig.uuid or f"{gpu.index}:{mig.index}"


class _Draft:
    """A plan in the making: actions in order, and which of them each device brings."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.actions: list[Action] = []
        self.parts: dict[str, list[Action]] = {}
        for gpu in selection.gpus:
            self.parts[part_name(gpu)] = []
        for gpu, mig in selection.mig_devices:
            self.parts[part_name(gpu, mig)] = []

    def add(self, actions: "Iterable[Action]", names: "Iterable[str]" = ()) -> None:
        """Add actions: the parts of these names', else the base's."""
        actions = list(actions)
        self.actions += actions
        for name in names:
            self.parts.setdefault(name, []).extend(actions)


def _parts_of(gpu: Gpu, selection: Selection) -> list[str]:
    """Return the parts of a GPU: its own, or those of its MIG devices."""
    own = [part_name(gpu)] if gpu in selection.gpus else []
    return own + [part_name(parent, mig) for parent, mig in selection.mig_devices if parent == gpu]


def _wanted(capabilities: tuple[str, ...], request: Request) -> bool:
    return not capabilities or any(name in request.capabilities for name in capabilities)


def _because(capabilities: tuple[str, ...], request: Request) -> str:
    names = [name for name in capabilities if name in request.capabilities]
    return f"needed by {', '.join(names)}" if names else "needed by every container with a GPU"


# /proc/driver/nvidia


def _add_proc(plan: _Draft, facts: HostFacts, request: Request, gpus: tuple[Gpu, ...], notes: list[str]) -> None:
    """A private /proc/driver/nvidia: rewritten params, and only the GPUs and MIG capabilities that are granted."""
    if not facts.proc_driver:
        if facts.listed:  # its one GPU is not in there
            return
        notes.append("the host has no /proc/driver/nvidia: the container gets none")
        return
    directories = [(f"gpus/{gpu.proc_name}", f"GPU {gpu.index} is granted") for gpu in gpus if gpu.proc_name]
    owners = {f"gpus/{gpu.proc_name}": _parts_of(gpu, plan.selection) for gpu in gpus}
    files: list[tuple[str, str]] = []
    if request.mig_config or request.mig_monitor:
        if facts.proc_capabilities:
            directories.append(("capabilities", "NVIDIA_MIG_CONFIG_DEVICES or NVIDIA_MIG_MONITOR_DEVICES is all"))
    else:
        for gpu, mig in plan.selection.mig_devices:
            for path in mig_capability_paths(gpu.minor, mig):
                files.append((f"capabilities/{path}", f"MIG device {gpu.index}:{mig.index} is granted"))
                owners.setdefault(f"capabilities/{path}", []).append(part_name(gpu, mig))
    for action in proc_view(facts.proc_driver, facts.proc_files, facts.simulated, directories, files):
        plan.add([action], owners.get(action.container_path.removeprefix(f"{PROC_DRIVER}/"), ()))


def _add_masks(plan: _Draft, facts: HostFacts, request: Request, gpus: tuple[Gpu, ...], notes: list[str]) -> None:
    """The procfs's own /proc/driver/nvidia, read-only, without the GPUs and MIG capabilities that are not granted."""
    if not facts.proc_driver:
        if facts.listed:
            return
        notes.append("the host has no /proc/driver/nvidia: the container gets none")
        return
    hidden = [
        (f"gpus/{gpu.proc_name}", f"GPU {gpu.index} is not granted")
        for gpu in facts.gpus
        if gpu.proc_name and gpu not in gpus
    ]
    if facts.proc_capabilities and not request.mig_config and not request.mig_monitor:
        hidden += _hidden_capabilities(facts, plan.selection)
    plan.add(proc_view_by_masks(facts.proc_driver, facts.simulated, hidden))


def _hidden_capabilities(facts: HostFacts, selection: Selection) -> list[tuple[str, str]]:
    """Return what of /proc/driver/nvidia/capabilities is not granted, whole directories where nothing below them is."""
    if not selection.mig_devices:
        return [("capabilities", "no MIG device is granted")]
    granted = [name for gpu, mig in selection.mig_devices for name in mig_capability_paths(gpu.minor, mig)]
    hidden: dict[str, None] = {"capabilities/fabric-imex-mgmt": None}  # of drivers since 535, in no table of minors
    for name, _ in facts.cap_nodes:
        parts = capability_path(name).split("/")
        for end in range(1, len(parts) + 1):
            top = "/".join(parts[:end])
            if all(path != top and not path.startswith(f"{top}/") for path in granted):
                hidden[f"capabilities/{top}"] = None
                break
    return [(name, "not of a MIG device that is granted") for name in hidden]


# device nodes


def _collect_nodes(
    facts: HostFacts, request: Request, selection: Selection, gpus: tuple[Gpu, ...], notes: list[str]
) -> "list[_Given]":
    """Return each node with its reason and its parts, in the order in which they are made; some more than once."""
    nodes: list[_Given] = []
    for node in facts.control_nodes:
        capabilities = CONTROL_CAPABILITIES.get(node.container_path, ())
        if _wanted(capabilities, request):
            nodes.append((node, f"control node, {_because(capabilities, request)}", ()))
    present = {node.container_path for node in facts.control_nodes}
    if facts.listed:
        present |= {"/dev/nvidiactl", "/dev/nvidia-uvm"}  # the lists say whether such a system has them
    if "/dev/nvidiactl" not in present:
        raise HostError("OCIGPU-DEV-4", "device major of nvidia is unknown: the kernel module is not loaded")
    if "/dev/nvidia-uvm" not in present and _wanted(CONTROL_CAPABILITIES["/dev/nvidia-uvm"], request):
        notes.append("module nvidia_uvm is not loaded: CUDA will not work (modprobe nvidia-uvm)")
    for gpu in gpus:
        nodes.append((gpu_node(gpu), _gpu_reason(gpu, selection, request), _parts_of(gpu, selection)))
        reason = f"DRM node of GPU {gpu.index}, for graphics or display"
        if names := _with_graphics(gpu, selection, request):
            nodes.extend((node, reason, names) for node in gpu.drm_nodes)
    for gpu, mig in selection.mig_devices:
        for node, what in mig_nodes(facts, gpu, mig):
            reason = f"{what} of MIG device {gpu.index}:{mig.index} ({mig.uuid})"
            nodes.append((node, reason, (part_name(gpu, mig),)))
    nodes.extend(_capability_nodes(facts, request, selection, gpus))
    nodes.extend(_imex_nodes(facts, request))
    by_name = {feature.name: feature for feature in facts.features}
    for name in request.features:
        feature = by_name.get(name)
        if feature is None or not feature.nodes:
            notes.append(f"{PARTS[name]}=enabled, but the host has no device for it")
        else:
            nodes.extend((node, f"{PARTS[name]}=enabled", (name,)) for node in feature.nodes)
    return nodes


def gpu_node(gpu: Gpu) -> DeviceNode:
    """Return the node of a GPU; raises HostError OCIGPU-DEV-4 where its number is unknown."""
    if gpu.node is None:
        raise HostError("OCIGPU-DEV-4", f"GPU {gpu.index} ({gpu.uuid}): its device number is unknown")
    return gpu.node


def mig_nodes(facts: HostFacts, gpu: Gpu, mig: MigDevice) -> list[tuple[DeviceNode, str]]:
    """Return the nodes of a MIG device's two capabilities, with what each is; raises HostError OCIGPU-DEV-4."""
    by_minor = {node.minor: node for _, node in facts.cap_nodes}
    found = []
    for minor, what in ((mig.gi_minor, "GPU instance"), (mig.ci_minor, "compute instance")):
        if minor not in by_minor:
            raise HostError("OCIGPU-DEV-4", f"MIG device {gpu.index}:{mig.index}: the device of its {what} is unknown")
        found.append((by_minor[minor], what))
    return found


def _gpu_reason(gpu: Gpu, selection: Selection, request: Request) -> str:
    if gpu in selection.gpus:
        return f"GPU {gpu.index} ({gpu.uuid}), granted by {request.source}"
    indices = ", ".join(f"{gpu.index}:{mig.index}" for parent, mig in selection.mig_devices if parent == gpu)
    return f"parent of MIG device {indices}, granted by {request.source}"


def _capability_nodes(
    facts: HostFacts, request: Request, selection: Selection, gpus: tuple[Gpu, ...]
) -> "list[_Given]":
    """Return the nodes that configure and monitor MIG: those of each GPU, and the common ones."""
    nodes: list[_Given] = []
    capable = {f"gpu{gpu.minor}": _parts_of(gpu, selection) for gpu in gpus if gpu.mig_capable}
    for name, value in (("config", request.mig_config), ("monitor", request.mig_monitor)):
        if not value:
            continue
        reason = f"NVIDIA_MIG_{name.upper()}_DEVICES={value}"
        found: list[_Given] = []
        for path, node in facts.cap_nodes:
            top, slash, _ = path.partition("/")
            if path == name or (slash and top in capable):
                found.append((node, reason, () if path == name else capable[top]))
        if not found:
            raise HostError("OCIGPU-DEV-4", f"{reason}: the host has no MIG {name} capability")
        nodes += found
    return nodes


def _imex_nodes(facts: HostFacts, request: Request) -> "list[_Given]":
    nodes: list[_Given] = []
    by_minor = {node.minor: node for node in facts.imex_nodes}
    for channel in request.imex_channels:
        if facts.imex_major is None:
            raise HostError("OCIGPU-DEV-4", f"IMEX channel {channel}: this driver or GPU has no IMEX channels")
        node = by_minor.get(channel)
        if node is None:  # who makes a channel on the host decides which there are, not an image
            path = f"/dev/nvidia-caps-imex-channels/channel{channel}"
            raise HostError("OCIGPU-DEV-4", f"IMEX channel {channel}: the host has no node {path}", imex_hint(by_minor))
        reason = f"IMEX channel {channel}, requested by NVIDIA_IMEX_CHANNELS"
        nodes.append((node, reason, (f"imex-channel={channel}",)))
    return nodes


def imex_hint(present: "Iterable[int]") -> str:
    """Return which IMEX channels the host has, as a sentence."""
    channels = sorted(present)
    shown = ", ".join(map(str, channels[:16])) + (", ..." if len(channels) > 16 else "")
    return f"This host has IMEX channels {shown}." if shown else "This host has no IMEX channel."


def _add_nodes(plan: _Draft, nodes: "list[_Given]") -> None:
    """Add each node once, with its first reason, to the parts of all who bring it."""
    known: dict[str, tuple[Node | AllowDevice, ...]] = {}
    for node, reason, names in nodes:
        pair = known.get(node.container_path)
        if pair is None:
            pair = known[node.container_path] = node_actions(node, reason=reason)
            plan.add(pair)
        for name in names:
            part = plan.parts.setdefault(name, [])
            part += [action for action in pair if action not in part]


def _with_graphics(gpu: Gpu, selection: Selection, request: Request) -> list[str]:
    """Return the parts that the DRM nodes of a GPU are in, for graphics or display.

    They are those of a whole GPU: of MIG devices only one with graphics in its profile (+gfx) can use them.
    """
    if not _graphics(request):
        return []
    own = [part_name(gpu)] if gpu in selection.gpus else []
    return own + [
        part_name(gpu, mig) for parent, mig in selection.mig_devices if parent == gpu and "gfx" in mig.profile
    ]


def _add_drm_links(plan: _Draft, request: Request, gpus: tuple[Gpu, ...]) -> None:
    """The names by PCI address of the granted GPUs' DRM nodes, as udev makes them."""
    for gpu in gpus:
        names = _with_graphics(gpu, plan.selection, request)
        for node in gpu.drm_nodes if names else ():
            name = node.container_path.rpartition("/")[2]
            kind = "card" if name.startswith("card") else "render"
            path = f"/dev/dri/by-path/pci-{sysfs_address(gpu.bus_id)}-{kind}"
            plan.add([Link(path, f"../{name}", f"DRM node of GPU {gpu.index} by PCI address", optional=True)], names)


# files


def _add_files(plan: _Draft, facts: HostFacts, request: Request) -> None:
    groups: tuple[tuple[str, tuple[HostFile, ...], tuple[str, ...], bool], ...] = (
        ("driver program", facts.binaries, FILE_OPTIONS, False),
        ("firmware", facts.firmware, FILE_OPTIONS, True),
        ("driver configuration", facts.configs, FILE_OPTIONS, True),
        ("socket of a driver daemon", facts.sockets, SOCKET_OPTIONS, True),
    )
    for what, files, options, optional in groups:
        plan.add(
            Bind(
                item.host_path,
                item.container_path,
                options,
                f"{what}, {_because(item.capabilities, request)}",
                item.kind,
                optional,
            )
            for item in files
            if _wanted(item.capabilities, request)
        )
    for feature in facts.features:
        if feature.name in request.features and feature.nodes:
            plan.add(feature_files(feature, f"{PARTS[feature.name]}=enabled"), (feature.name,))


def _add_listed(plan: _Draft, facts: HostFacts, settings: Settings, image: ImageFacts, mode: str) -> None:
    """Add the files of a Tegra system's lists at the same paths, because its libraries search each other there."""
    listed = facts.listed
    if listed is None:
        return
    from ocigpu.gpus.offer import library_folders  # few hosts are such systems

    reason = "listed for containers of this Tegra system"
    plan.add(Bind(item.host_path, item.container_path, FILE_OPTIONS, reason, item.kind) for item in listed.files)
    plan.add(Link(path, target, reason) for target, path in listed.links)
    folders = library_folders(listed.files)
    if folders and image.libc == "glibc" and not settings.features_no_loader_cache:
        given = plan.actions if mode == "hook" else ()
        plan.add([_refresh_ldcache(settings, image, folders, given, facts.libraries)])


def feature_files(feature: FeatureNodes, reason: str = "") -> "list[Action]":
    """Return the mounts of the files of an opt-in part."""
    return [
        Bind(item.host_path, item.container_path, FILE_OPTIONS, reason, item.kind, optional=True)
        for item in feature.files
    ]


def _libraries(facts: HostFacts, request: Request) -> tuple[tuple[Library, str], ...]:
    """Return the container's libraries, each with its reason; raises HostError when an indispensable one is missing."""
    if facts.listed:
        return ()
    wanted = tuple(
        (library, f"driver library, {_because(library.capabilities, request)}")
        for library in facts.libraries
        if _wanted(library.capabilities, request) and (library.bits == 64 or "compat32" in request.capabilities)
    )
    sonames = {library.soname for library, _ in wanted if library.bits == 64}
    for capability, soname in REQUIRED_SONAMES.items():
        if capability in request.capabilities and soname not in sonames:
            raise HostError(
                "OCIGPU-LIB-1",
                f"{soname} of driver {facts.driver_version} was not found below {facts.driver_root}"
                f" (needed by {capability})",
            )
    if request.capabilities and not facts.libraries:  # a driver container that is not up, a wrong driver.root
        raise HostError(
            "OCIGPU-LIB-1", f"no library of driver {facts.driver_version} was found below {facts.driver_root}"
        )
    return wanted


def library_path(library: Library, image: ImageFacts) -> str:
    """Return where a container of this image finds a driver library."""
    return f"{image.library_dir if library.bits == 64 else image.library_dir32}/{library.name}"


def _link_actions(libraries: tuple[tuple[Library, str], ...], request: Request, image: ImageFacts) -> "list[Action]":
    links: dict[str, Action] = {}

    def add(directory: str, name: str, target: str, reason: str) -> None:
        path = f"{directory}/{name}"
        links.setdefault(path, Link(path, target, reason, optional="/" in target))

    for library, _ in libraries:
        directory = library_path(library, image).rpartition("/")[0]
        if library.soname and library.soname != library.name:
            add(directory, library.soname, library.name, "the loader looks for the SONAME")
        for name, soname in DEVELOPER_LINKS:
            if library.soname == soname:
                add(directory, name, soname, "name that programs open without a version")
        if library.soname == "libGLX_nvidia.so.0":
            add(directory, "libGLX_indirect.so.0", library.name, "GLVND's vendor for indirect rendering")
        if library.soname == "libnvidia-allocator.so.1" and library.bits == 64 and _graphics(request):
            add(f"{directory}/gbm", "nvidia-drm_gbm.so", "../libnvidia-allocator.so.1", "GBM loads its backend by it")
        if library.name.startswith("libnvidia-vulkan-producer.so."):
            add(directory, "libnvidia-vulkan-producer.so", library.name, "name that the Vulkan layer opens")
    return list(links.values())


def _module_links(facts: HostFacts, request: Request) -> "list[Action]":
    """The X server loads its GLX module by a name without a version."""
    links: list[Action] = []
    for item in facts.configs:
        directory, _, name = item.container_path.rpartition("/")
        if name.startswith("libglxserver_nvidia.so.") and _wanted(item.capabilities, request):
            links.append(Link(f"{directory}/libglxserver_nvidia.so", name, "name that the X server opens"))
    return links


def _named_links(
    facts: HostFacts, libraries: tuple[tuple[Library, str], ...], request: Request, image: ImageFacts
) -> "list[Action]":
    """Libraries that a configuration file names by a path of the host are there in the container, too."""
    given = {library.soname or library.name: library_path(library, image) for library, _ in libraries[::-1]}
    links: dict[str, Action] = {}
    for config, path in facts.named_libraries if _graphics(request) else ():
        name = path.rpartition("/")[2]
        target = f"{given.get(name, '').rpartition('/')[0]}/{name}"
        if name in given and target != path:
            links.setdefault(path, Link(path, target, f"{config} names the library by this path", optional=True))
    return list(links.values())


def _graphics(request: Request) -> bool:
    return "graphics" in request.capabilities or "display" in request.capabilities


def _ldcache_actions(
    libraries: tuple[tuple[Library, str], ...],
    request: Request,
    settings: Settings,
    image: ImageFacts,
    given: "Sequence[Action]",
) -> "list[Action]":
    """Only a glibc image has a loader cache; others find libraries by directory or not at all.

    ``given``: the actions that bring the libraries in hook mode.  What CUDA compatibility libraries of the image would
    need in the cache only ldconfig sees.
    """
    if image.libc != "glibc" or not libraries:
        return []
    only_ldconfig = ""
    directories: list[str] = [image.library_dir]
    if any(library.bits == 32 for library, _ in libraries):
        directories.append(image.library_dir32)
    if image.compat_dir and settings.cuda_compat_mode == "ldconfig" and "compute" in request.capabilities:
        directories.insert(0, image.compat_dir)
        only_ldconfig = "the image has CUDA compatibility libraries"
    return [_refresh_ldcache(settings, image, directories, given, [library for library, _ in libraries], only_ldconfig)]


def _refresh_ldcache(
    settings: Settings,
    image: ImageFacts,
    directories: "Sequence[str]",
    given: "Sequence[Action]",
    libraries: "Sequence[Library]",
    only_ldconfig: str = "",
) -> RefreshLdCache:
    """Decide how the loader's cache is made; ``given``: the actions of hook mode, () in the others.

    ``only_ldconfig``: why the settings do not matter, and ldconfig writes it; "" if they do.
    """
    reason = "the container's loader finds libraries in its cache"
    entries: tuple[tuple[str, str, int], ...] = ()
    if given:
        way = settings.loader_cache
        why = image.stale_cache or "it is current" if way == "auto" else f'loader-cache is "{way}"'
        if not only_ldconfig and (way == "merge" or (way == "auto" and not image.stale_cache)):
            from ocigpu.gpus.libraries.loader_cache import cache_entries

            entries = tuple(cache_entries(given, directories, libraries))
            reason += f"; the image's is extended: {why}"
        else:
            reason += f"; ldconfig writes it: {only_ldconfig or why}"
    return RefreshLdCache(settings.ldconfig, tuple(directories), reason, entries)
