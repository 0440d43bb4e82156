"""Facts and request become a plan: pure, and the only place where policy lives.

Same input, same plan.  What is granted, where each file goes, with which mount options, which device rules: decided
here, each action with its reason, and carried out elsewhere.
"""

from ocigpu.core.actions import AllowDevice, Bind, Link, Node, Plan, RefreshLdCache, join_groups
from ocigpu.core.errors import HostError
from ocigpu.core.facts import DeviceNode, Gpu, HostFacts, HostFile, ImageFacts, Library, mig_capability_paths
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.request import Request
from ocigpu.gpus.nvidia.require import check_requirements
from ocigpu.gpus.nvidia.selection import Selection, select_devices
from ocigpu.gpus.nvidia.views import application_profile, proc_view, proc_view_by_masks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.core.actions import Action

FILE_OPTIONS = ("ro", "nosuid", "nodev")
"""Mount options of driver files."""
SOCKET_OPTIONS = ("nosuid", "nodev", "noexec")
"""Mount options of sockets and pipe directories: connecting needs write access."""

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
    """Return what must be done for a container that makes this request on this host.

    ``image`` decides where libraries go (default: an image with /usr/lib64 and glibc).  ``mode`` "spec": for a
    container that is described by its config.json alone, where nothing can be mounted below /proc: what it must not
    see there is hidden instead.  Raises RequestError for what
    the host cannot satisfy (OCIGPU-DEV-1, OCIGPU-REQ-3) and HostError for what is broken (OCIGPU-DEV-2, -DEV-4,
    OCIGPU-LIB-1).  A request for nothing gives a plan without actions.
    """
    image = image or ImageFacts()
    if request.selection == "nothing":
        return Plan((), notes=request.notes, mode=mode, image=image)
    selection = select_devices(request, facts)
    gpus = tuple(sorted(selection.every_gpu(), key=lambda gpu: gpu.index))
    check_requirements(request.requirements, facts, gpus)
    notes = [*request.notes, *facts.notes, *selection.notes]
    libraries = _libraries(facts, request)
    nodes = _nodes(facts, request, selection, gpus, notes)
    groups = () if settings.features_no_additional_gids_for_device_nodes else join_groups([node for node, _ in nodes])
    actions: list[Action] = [
        *(_mask_actions if mode == "spec" else _proc_actions)(facts, request, selection, gpus, notes),
        *_node_actions(nodes),
        *groups,
        *_file_actions(facts, request),
        *_library_actions(libraries, image),
        *_link_actions(libraries, request, image),
        *_module_links(facts, request),
        *_drm_links(request, selection, gpus),
        *_profile_actions(request, gpus),
        *_ldcache_actions(libraries, request, settings, image),
    ]
    return Plan(
        tuple(actions),
        gpus=tuple(gpu.uuid for gpu in selection.gpus),
        mig_devices=tuple(mig.uuid for _, mig in selection.mig_devices),
        notes=tuple(notes),
        driver_version=facts.driver_version,
        simulated=facts.simulated,
        mode=mode,
        image=image,
    )


def _wanted(capabilities: tuple[str, ...], request: Request) -> bool:
    return not capabilities or any(name in request.capabilities for name in capabilities)


def _because(capabilities: tuple[str, ...], request: Request) -> str:
    names = [name for name in capabilities if name in request.capabilities]
    return f"needed by {', '.join(names)}" if names else "needed by every container with a GPU"


# /proc/driver/nvidia


def _proc_actions(
    facts: HostFacts, request: Request, selection: Selection, gpus: tuple[Gpu, ...], notes: list[str]
) -> "list[Action]":
    """A private /proc/driver/nvidia: rewritten params, and only the GPUs and MIG capabilities that are granted."""
    if not facts.proc_driver:
        notes.append("the host has no /proc/driver/nvidia: the container gets none")
        return []
    directories = [(f"gpus/{gpu.proc_name}", f"GPU {gpu.index} is granted") for gpu in gpus if gpu.proc_name]
    files: list[tuple[str, str]] = []
    if request.mig_config or request.mig_monitor:
        if facts.proc_capabilities:
            directories.append(("capabilities", "NVIDIA_MIG_CONFIG_DEVICES or NVIDIA_MIG_MONITOR_DEVICES is all"))
    else:
        for gpu, mig in selection.mig_devices:
            reason = f"MIG device {gpu.index}:{mig.index} is granted"
            files += [(f"capabilities/{name}", reason) for name in mig_capability_paths(gpu.minor, mig)]
    return proc_view(facts.proc_driver, facts.proc_files, facts.simulated, directories, files)


def _mask_actions(
    facts: HostFacts, request: Request, selection: Selection, gpus: tuple[Gpu, ...], notes: list[str]
) -> "list[Action]":
    """The procfs's own /proc/driver/nvidia, read-only, without the GPUs and MIG capabilities that are not granted."""
    if not facts.proc_driver:
        notes.append("the host has no /proc/driver/nvidia: the container gets none")
        return []
    hidden = [
        (f"gpus/{gpu.proc_name}", f"GPU {gpu.index} is not granted")
        for gpu in facts.gpus
        if gpu.proc_name and gpu not in gpus
    ]
    if facts.proc_capabilities and not request.mig_config and not request.mig_monitor:
        hidden += _hidden_capabilities(facts, selection)
    return proc_view_by_masks(facts.proc_driver, facts.simulated, hidden)


def _hidden_capabilities(facts: HostFacts, selection: Selection) -> list[tuple[str, str]]:
    """Return what of /proc/driver/nvidia/capabilities is not granted, whole directories where nothing below them is."""
    if not selection.mig_devices:
        return [("capabilities", "no MIG device is granted")]
    granted = [name for gpu, mig in selection.mig_devices for name in mig_capability_paths(gpu.minor, mig)]
    hidden: dict[str, None] = {"capabilities/fabric-imex-mgmt": None}  # of drivers since 535, in no table of minors
    for name, _ in facts.cap_nodes:
        gpu, slash, rest = name.partition("/")
        parts = f"{gpu}/mig/{rest}".split("/") if slash else ["mig", name]
        for end in range(1, len(parts) + 1):
            top = "/".join(parts[:end])
            if all(path != top and not path.startswith(f"{top}/") for path in granted):
                hidden[f"capabilities/{top}"] = None
                break
    return [(name, "not of a MIG device that is granted") for name in hidden]


# device nodes


def _nodes(
    facts: HostFacts, request: Request, selection: Selection, gpus: tuple[Gpu, ...], notes: list[str]
) -> list[tuple[DeviceNode, str]]:
    """Return each node with its reason, without duplicates, in the order in which they are made."""
    nodes: list[tuple[DeviceNode, str]] = []
    for node in facts.control_nodes:
        capabilities = CONTROL_CAPABILITIES.get(node.container_path, ())
        if _wanted(capabilities, request):
            nodes.append((node, f"control node, {_because(capabilities, request)}"))
    present = {node.container_path for node in facts.control_nodes}
    if "/dev/nvidiactl" not in present:
        raise HostError("OCIGPU-DEV-4", "device major of nvidia is unknown: the kernel module is not loaded")
    if "/dev/nvidia-uvm" not in present and _wanted(CONTROL_CAPABILITIES["/dev/nvidia-uvm"], request):
        notes.append("module nvidia_uvm is not loaded: CUDA will not work (modprobe nvidia-uvm)")
    for gpu in gpus:
        if gpu.node is None:
            raise HostError("OCIGPU-DEV-4", f"GPU {gpu.index} ({gpu.uuid}): its device number is unknown")
        nodes.append((gpu.node, _gpu_reason(gpu, selection, request)))
        if _has_graphics(gpu, selection, request):
            nodes.extend((node, f"DRM node of GPU {gpu.index}, for graphics or display") for node in gpu.drm_nodes)
    nodes.extend(_capability_nodes(facts, request, selection, gpus))
    nodes.extend(_imex_nodes(facts, request))
    nodes.extend(_feature_nodes(facts, request, notes))
    unique: dict[str, tuple[DeviceNode, str]] = {}
    for node, reason in nodes:
        unique.setdefault(node.container_path, (node, reason))
    return list(unique.values())


def _gpu_reason(gpu: Gpu, selection: Selection, request: Request) -> str:
    if gpu in selection.gpus:
        return f"GPU {gpu.index} ({gpu.uuid}), granted by {request.source}"
    indices = ", ".join(f"{gpu.index}:{mig.index}" for parent, mig in selection.mig_devices if parent == gpu)
    return f"parent of MIG device {indices}, granted by {request.source}"


def _capability_nodes(
    facts: HostFacts, request: Request, selection: Selection, gpus: tuple[Gpu, ...]
) -> list[tuple[DeviceNode, str]]:
    nodes: list[tuple[DeviceNode, str]] = []
    by_minor = {node.minor: node for _, node in facts.cap_nodes}
    for gpu, mig in selection.mig_devices:
        for minor, what in ((mig.gi_minor, "GPU instance"), (mig.ci_minor, "compute instance")):
            node = by_minor.get(minor)
            if node is None:
                raise HostError(
                    "OCIGPU-DEV-4", f"MIG device {gpu.index}:{mig.index}: the device of its {what} is unknown"
                )
            nodes.append((node, f"{what} of MIG device {gpu.index}:{mig.index} ({mig.uuid})"))
    for name, value in (("config", request.mig_config), ("monitor", request.mig_monitor)):
        if not value:
            continue
        prefixes = tuple(f"gpu{gpu.minor}/" for gpu in gpus if gpu.mig_capable)
        variable = f"NVIDIA_MIG_{name.upper()}_DEVICES"
        found = [node for path, node in facts.cap_nodes if path == name or path.startswith(prefixes)]
        if not found:
            raise HostError("OCIGPU-DEV-4", f"{variable}={value}: the host has no MIG {name} capability")
        nodes.extend((node, f"{variable}={value}") for node in found)
    return nodes


def _imex_nodes(facts: HostFacts, request: Request) -> list[tuple[DeviceNode, str]]:
    nodes = []
    by_minor = {node.minor: node for node in facts.imex_nodes}
    for channel in request.imex_channels:
        if facts.imex_major is None:
            raise HostError("OCIGPU-DEV-4", f"IMEX channel {channel}: this driver or GPU has no IMEX channels")
        node = by_minor.get(channel)
        if node is None:  # who makes a channel on the host decides which there are, not an image
            present = ", ".join(map(str, sorted(by_minor)[:16])) + (", ..." if len(by_minor) > 16 else "")
            raise HostError(
                "OCIGPU-DEV-4",
                f"IMEX channel {channel}: the host has no node /dev/nvidia-caps-imex-channels/channel{channel}",
                f"This host has IMEX channels {present}." if present else "This host has no IMEX channel.",
            )
        nodes.append((node, f"IMEX channel {channel}, asked for by NVIDIA_IMEX_CHANNELS"))
    return nodes


def _feature_nodes(facts: HostFacts, request: Request, notes: list[str]) -> list[tuple[DeviceNode, str]]:
    nodes: list[tuple[DeviceNode, str]] = []
    by_name = {feature.name: feature for feature in facts.features}
    for name in request.features:
        feature = by_name.get(name)
        if feature is None or not feature.nodes:
            notes.append(f"NVIDIA_{name.upper()}=enabled, but the host has no device for it")
            continue
        nodes.extend((node, f"NVIDIA_{name.upper()}=enabled") for node in feature.nodes)
    return nodes


def _node_actions(nodes: list[tuple[DeviceNode, str]]) -> "list[Action]":
    actions: list[Action] = []
    for node, reason in nodes:
        actions.append(Node(node, reason))
        actions.append(AllowDevice(node.major, node.minor, "rw", reason))
    return actions


def _has_graphics(gpu: Gpu, selection: Selection, request: Request) -> bool:
    """DRM nodes are those of a whole GPU: of MIG devices only one with graphics in its profile (+gfx) can use them."""
    if not _graphics(request):
        return False
    profiles = (mig.profile for parent, mig in selection.mig_devices if parent == gpu)
    return gpu in selection.gpus or any("gfx" in profile for profile in profiles)


def _drm_links(request: Request, selection: Selection, gpus: tuple[Gpu, ...]) -> "list[Action]":
    """The names by PCI address of the granted GPUs' DRM nodes, as udev makes them."""
    links: list[Action] = []
    for gpu in gpus:
        for node in gpu.drm_nodes if _has_graphics(gpu, selection, request) else ():
            name = node.container_path.rpartition("/")[2]
            kind = "card" if name.startswith("card") else "render"
            path = f"/dev/dri/by-path/pci-{gpu.bus_id[4:]}-{kind}"
            links.append(Link(path, f"../{name}", f"DRM node of GPU {gpu.index} by PCI address"))
    return links


# files


def _file_actions(facts: HostFacts, request: Request) -> "list[Action]":
    actions: list[Action] = []
    groups: tuple[tuple[str, tuple[HostFile, ...], tuple[str, ...]], ...] = (
        ("driver program", facts.binaries, FILE_OPTIONS),
        ("firmware", facts.firmware, FILE_OPTIONS),
        ("driver configuration", facts.configs, FILE_OPTIONS),
        ("socket of a driver daemon", facts.sockets, SOCKET_OPTIONS),
    )
    for what, files, options in groups:
        actions.extend(
            Bind(
                item.host_path,
                item.container_path,
                options,
                f"{what}, {_because(item.capabilities, request)}",
                item.kind,
                optional=options is SOCKET_OPTIONS,
            )
            for item in files
            if _wanted(item.capabilities, request)
        )
    for feature in facts.features:
        if feature.name in request.features and feature.nodes:
            reason = f"NVIDIA_{feature.name.upper()}=enabled"
            actions.extend(
                Bind(item.host_path, item.container_path, FILE_OPTIONS, reason, item.kind, optional=True)
                for item in feature.files
            )
    return actions


def _libraries(facts: HostFacts, request: Request) -> tuple[tuple[Library, str], ...]:
    """Return the libraries to give, each with its reason; raises HostError when an indispensable one is missing."""
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
    return f"{_library_directory(library, image)}/{library.name}"


def _library_directory(library: Library, image: ImageFacts) -> str:
    return image.library_dir if library.bits == 64 else image.library_dir32


def _library_actions(libraries: tuple[tuple[Library, str], ...], image: ImageFacts) -> "list[Action]":
    return [
        Bind(library.host_path, library_path(library, image), FILE_OPTIONS, reason) for library, reason in libraries
    ]


def _link_actions(libraries: tuple[tuple[Library, str], ...], request: Request, image: ImageFacts) -> "list[Action]":
    links: dict[str, Action] = {}

    def add(directory: str, name: str, target: str, reason: str) -> None:
        path = f"{directory}/{name}"
        links.setdefault(path, Link(path, target, reason))

    for library, _ in libraries:
        directory = _library_directory(library, image)
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


def _graphics(request: Request) -> bool:
    return "graphics" in request.capabilities or "display" in request.capabilities


def _profile_actions(request: Request, gpus: tuple[Gpu, ...]) -> "list[Action]":
    """An application profile that names the visible GPUs to EGL, by a bit mask of minors."""
    if not _graphics(request) or not gpus:
        return []
    return [application_profile([gpu.minor for gpu in gpus])]


def _ldcache_actions(
    libraries: tuple[tuple[Library, str], ...], request: Request, settings: Settings, image: ImageFacts
) -> "list[Action]":
    """Only a glibc image has a loader cache; others find libraries by directory or not at all."""
    if image.libc != "glibc" or not libraries:
        return []
    directories = [image.library_dir]
    if any(library.bits == 32 for library, _ in libraries):
        directories.append(image.library_dir32)
    if image.compat_dir and settings.cuda_compat_mode == "ldconfig" and "compute" in request.capabilities:
        directories.insert(0, image.compat_dir)
    return [
        RefreshLdCache(settings.ldconfig, tuple(directories), "the container's loader finds libraries in its cache")
    ]
