"""NVIDIA's devices: GPUs and MIG devices, all nodes at once (management), and what opt-in variables bring.

Every list of nodes, mounts, links and directories comes from :mod:`ocigpu.gpus.nvidia.plan` on the same facts that hook
mode uses: the plan's base is what every container gets, and each of its parts a device.
"""

from ocigpu.core.actions import AllowDevice, Node, node_actions
from ocigpu.core.errors import CdiError, HostError, quoted
from ocigpu.core.facts import ImageFacts, Library
from ocigpu.core.gate import PARTS, permitted_capabilities
from ocigpu.core.tokens import MAX_IMEX_CHANNEL
from ocigpu.gpus.libraries.elf import read_elf
from ocigpu.gpus.nvidia.discover import SearchPaths, read_feature_facts, read_host_facts
from ocigpu.gpus.nvidia.plan import (
    CONTROL_CAPABILITIES,
    REQUIRED_SONAMES,
    feature_files,
    gpu_node,
    imex_hint,
    mig_nodes,
    part_name,
    plan_selection,
)
from ocigpu.gpus.nvidia.selection import select_devices
from ocigpu.gpus.offer import VOID, CompatTerms, DeviceOffer, OfferedDevice, choose_names
from ocigpu.gpus.request import Request, Selection
from ocigpu.gpus.tree import Tree, small_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ocigpu.core.actions import Action
    from ocigpu.core.facts import Gpu, HostFacts, MigDevice
    from ocigpu.core.settings import Settings
    from ocigpu.gpus.offer import GenerateOptions

KINDS = {
    "management": ("nvidia.com", "gpu"),
    "imex": ("nvidia.com", "imex-channel"),
    **{name: ("nvidia.com", name) for name in PARTS},
}
"""Vendor and class by mode: class as the vendor's library has it, nvidia.com/gpu for the others.

For management the vendor's CLI writes nvidia.com/gpu, its library (the operator's installer) management.nvidia.com/gpu.
"""
SOURCE = "--device-id"
EXPLICIT_LIBRARIES = (
    "libEGL.so", "libGL.so", "libGLESv1_CM.so", "libGLESv2.so", "libGLX.so", "libGLdispatch.so", "libOpenCL.so",
    "libOpenGL.so", "libnvidia-api.so", "libnvidia-egl-xcb.so", "libnvidia-egl-xlib.so",
)  # fmt: skip
"""What enable-explicit-driver-libraries adds: vendor-neutral libraries beside the driver's."""


def offer(options: "GenerateOptions", settings: "Settings") -> DeviceOffer:
    """Return the devices of the options' mode ("auto" is "nvml").

    A GPU or MIG device that cannot be given is left out and named in ``skipped``, unless it was requested by its id.
    Raises HostError without a driver (but modes that need none), RequestError OCIGPU-DEV-1 for an id that is not there,
    CdiError OCIGPU-CDI-7.
    """
    if options.mode in PARTS:
        return offer_feature(read_feature_facts(settings), options)
    if options.mode == "imex":
        return offer_imex(read_feature_facts(settings), options)
    search = SearchPaths(options.library_search_paths, options.config_search_paths)
    if options.mode == "management":
        try:
            facts = read_host_facts(settings, search)
        except HostError as error:
            raise CdiError("OCIGPU-CDI-7", f"no NVIDIA device nodes found: {error.message}", error.hint) from error
        return offer_management(facts, options, settings)
    facts = read_host_facts(settings, search)
    if "enable-explicit-driver-libraries" in options.feature_flags:
        facts = _add_explicit_libraries(facts)
    return offer_gpus(facts, options, settings)


# GPUs and MIG devices


def offer_claimed(
    claimed: "Mapping[str, str]", options: "GenerateOptions", settings: "Settings", facts: "HostFacts"
) -> DeviceOffer:
    """Return the devices of these UUIDs, under their UUIDs; raises as :func:`offer` does.  Pure."""
    return offer_gpus(facts, options._replace(device_ids=tuple(claimed), name_strategies=("uuid",)), settings)


def offer_gpus(facts: "HostFacts", options: "GenerateOptions", settings: "Settings") -> DeviceOffer:
    """Return the GPUs and MIG devices of these facts as devices; raises as :func:`offer` does.  Pure."""
    facts, request, image, notes = _prepare(facts, options, settings)
    word = next((name for name in options.device_ids if name in ("all", "none")), "")
    targets, skipped, more_notes = _targets(facts, request, options, word)
    selection = Selection(
        tuple(gpu for gpu, mig in targets if mig is None), tuple((gpu, mig) for gpu, mig in targets if mig is not None)
    )
    plan = plan_selection(facts, request, selection, settings, image)
    devices: list[OfferedDevice] = []
    for gpu, mig in targets:
        part = plan.parts[part_name(gpu, mig)]
        coherent = gpu.coherent if facts.source == "nvml" and mig is None else None
        devices += [OfferedDevice(name, part, (), coherent) for name in _names(gpu, mig, options.name_strategies)]
    if word == "none":
        devices = [OfferedDevice("none", (), ("NVCT_EMPTY_DEVICE=",))]
    return DeviceOffer(
        source="nvidia",
        vendor="nvidia.com",
        device_class="gpu",
        devices=tuple(devices),
        base=plan.base,
        env=_variables(facts, image),
        hooked=plan.actions,
        compat=_compat(facts, request, settings),
        proc_driver=facts.proc_driver,
        all_device=word != "none",
        notes=tuple(dict.fromkeys([*notes, *plan.notes, *more_notes])),
        skipped=tuple(skipped),
    )


def _targets(
    facts: "HostFacts", request: Request, options: "GenerateOptions", word: str
) -> "tuple[list[tuple[Gpu, MigDevice | None]], list[str], tuple[str, ...]]":
    """Return the devices to describe, what was left out of "all", and notes: selection as for any container."""
    if word == "none":
        return [], [], ()
    try:
        selection = select_devices(request._replace(selection=word or "list", devices=options.device_ids), facts)
    except HostError as error:
        if not word:
            raise
        return [], [error.message], ()
    found: list[tuple[Gpu, MigDevice | None]] = [(gpu, None) for gpu in selection.gpus]
    found.extend(selection.mig_devices)
    found.sort(key=lambda target: (target[0].index, target[1].index if target[1] else -1))
    targets: list[tuple[Gpu, MigDevice | None]] = []
    skipped = list(selection.notes) if word else []
    for gpu, mig in found:
        try:
            _check_target(facts, request, gpu, mig)
        except HostError as error:
            if not word:
                raise
            skipped.append(error.message)
            continue
        if _names(gpu, mig, options.name_strategies):
            targets.append((gpu, mig))
        else:
            what = "MIG device" if mig else "GPU"
            skipped.append(f"{what} {_token(gpu, mig)}: it has no name that a CDI device may have")
    return targets, skipped, () if word else selection.notes


def _check_target(facts: "HostFacts", request: Request, gpu: "Gpu", mig: "MigDevice | None") -> None:
    """Raise HostError for a device that could not be given by its index, by which specifications name it."""
    select_devices(request._replace(selection="list", devices=(_token(gpu, mig),)), facts._replace(gpus=(gpu,)))
    gpu_node(gpu)
    if mig is not None:
        mig_nodes(facts, gpu, mig)


def _token(gpu: "Gpu", mig: "MigDevice | None") -> str:
    return f"{gpu.index}:{mig.index}" if mig else str(gpu.index)


def _names(gpu: "Gpu", mig: "MigDevice | None", strategies: tuple[str, ...]) -> tuple[str, ...]:
    token = _token(gpu, mig)
    if mig:
        return choose_names(strategies, token, f"mig{token}", mig.uuid)
    return choose_names(strategies, token, f"gpu{token}", gpu.uuid)


def _variables(facts: "HostFacts", image: ImageFacts) -> tuple[str, ...]:
    return (*([f"NVIDIA_CTK_LIBCUDA_DIR={image.library_dir}"] if facts.libraries else []), VOID)


def _compat(facts: "HostFacts", request: Request, settings: "Settings") -> CompatTerms | None:
    wanted = settings.cuda_compat_mode == "ldconfig" and "compute" in request.capabilities and facts.driver_version
    return CompatTerms(facts.driver_version) if wanted else None


def _prepare(
    facts: "HostFacts", options: "GenerateOptions", settings: "Settings"
) -> "tuple[HostFacts, Request, ImageFacts, list[str]]":
    """Return the relevant facts, a request for no GPU with everything that this host offers, and where libraries go.

    Libraries keep their path on the host, because the container is not known.
    """
    if "disable-ipc-discoverer" in options.feature_flags:
        facts = facts._replace(sockets=())
    request = Request("none", source=SOURCE, capabilities=tuple(sorted(permitted_capabilities(settings))))
    notes = []
    sonames = {library.soname for library in facts.libraries if library.bits == 64}
    for capability, soname in REQUIRED_SONAMES.items() if sonames else ():
        if capability in request.capabilities and soname not in sonames:
            request = request._replace(capabilities=tuple(x for x in request.capabilities if x != capability))
            notes.append(f"{soname} was not found: containers get nothing that only {capability} needs")
    usual = ImageFacts()
    image = ImageFacts(
        _library_directory(facts, 64, usual.library_dir), _library_directory(facts, 32, usual.library_dir32)
    )
    return facts, request, image, notes


def _library_directory(facts: "HostFacts", bits: int, default: str) -> str:
    """Return the directory of libcuda, else of any driver library, as it is below the driver root."""
    libraries = [library for library in facts.libraries if library.bits == bits]
    for library in sorted(libraries, key=lambda library: library.soname != "libcuda.so.1")[:1]:
        directory = library.host_path.rpartition("/")[0]
        root = facts.driver_root.rstrip("/")
        return directory.removeprefix(root) if directory.startswith(f"{root}/") else directory
    return default


def _add_explicit_libraries(facts: "HostFacts") -> "HostFacts":
    """Return the facts with the vendor-neutral libraries that lie beside libcuda."""
    root = "" if facts.driver_root == "/" else facts.driver_root
    directory = _library_directory(facts, 64, "")
    tree = Tree(root)
    names = {library.name for library in facts.libraries}
    found: dict[str, Library] = {}
    for name in EXPLICIT_LIBRARIES if directory else ():
        host_path = tree.find(f"{directory}/{name}")
        elf = read_elf(host_path) if host_path else None
        file_name = host_path.rpartition("/")[2]
        if elf is not None and file_name not in names:
            found.setdefault(file_name, Library(host_path, file_name, elf.soname, ()))
    return facts._replace(libraries=(*facts.libraries, *found.values()))


# all nodes at once


def offer_management(facts: "HostFacts", options: "GenerateOptions", settings: "Settings") -> DeviceOffer:
    """Return one device "all" with every node of the driver, and every library of its version.  Pure.

    GPUs with errors are among them: a container that manages GPUs may be what repairs them.  The container sees the
    host's /proc/driver/nvidia.  As the vendor's, it has graphics libraries of the driver's version, and none of the
    configuration, platform libraries and X modules that graphics needs.  Raises CdiError OCIGPU-CDI-7 without nodes.
    """
    facts, request, image, notes = _prepare(facts, options, settings)
    facts = facts._replace(libraries=tuple(_for_everybody(library, facts) for library in facts.libraries))
    graphics = ("graphics", "display")
    request = request._replace(capabilities=tuple(x for x in request.capabilities if x not in graphics))
    gpus = [gpu._replace(drm_nodes=()) for gpu in facts.gpus if gpu.node]
    configurable = {name for name, _ in facts.cap_nodes}
    request = request._replace(
        mig_config="all" if "config" in configurable else "",
        mig_monitor="all" if "monitor" in configurable else "",
        imex_channels=tuple(node.minor for node in facts.imex_nodes),
    )
    selection = Selection(
        tuple(gpu for gpu in gpus if not gpu.mig_devices), tuple((gpu, mig) for gpu in gpus for mig in gpu.mig_devices)
    )
    try:
        plan = plan_selection(facts, request, selection, settings, image)
    except HostError as error:
        raise CdiError("OCIGPU-CDI-7", f"no NVIDIA device nodes found: {error.message}", error.hint) from error
    # the container manages nodes and MIG devices: both need the host's view
    asked = "disable-device-node-modification" in options.enabled_hooks
    nodes = [action for action in plan.actions if isinstance(action, (Node, AllowDevice))]
    displays = (one for one in facts.control_nodes if "display" in CONTROL_CAPABILITIES.get(one.container_path, ()))
    nodes += node_actions(*displays)
    files = [action for action in plan.base if not isinstance(action, (Node, AllowDevice))]
    vendor, device_class = KINDS["management"]
    return DeviceOffer(
        source="nvidia",
        vendor=vendor,
        device_class=device_class,
        devices=(OfferedDevice("all", tuple(nodes)),),
        base=tuple(files),
        env=_variables(facts, image),
        hooked=(*files, *nodes),
        compat=_compat(facts, request, settings),
        proc_driver=facts.proc_driver if asked else "",
        all_device=False,
        notes=tuple(dict.fromkeys([*notes, *plan.notes])),
    )


def _for_everybody(library: Library, facts: "HostFacts") -> Library:
    """Return a library of the driver's own version as one that every container gets, whatever its capabilities."""
    return library._replace(capabilities=()) if library.name.endswith(f".so.{facts.driver_version}") else library


# without a driver


def offer_feature(facts: "HostFacts", options: "GenerateOptions") -> DeviceOffer:
    """Return one device "all" with what GDS, MOFED, GDRCopy or NVSwitch brings; empty without nodes.  Pure."""
    found = [feature for feature in facts.features if feature.name == options.mode and feature.nodes]
    actions: list[Action] = [*node_actions(*(node for feature in found for node in feature.nodes))]
    actions += [action for feature in found for action in feature_files(feature)]
    skipped = () if actions else (f"this host has no device for {options.mode}",)
    made = _without_driver(facts, options.mode, (OfferedDevice("all", tuple(actions)),), all_device=False)
    return made._replace(skipped=skipped)


def offer_imex(facts: "HostFacts", options: "GenerateOptions") -> DeviceOffer:
    """Return each IMEX channel that has a node as a device named by its number.  Pure.

    Raises CdiError OCIGPU-CDI-7 for an id that is not a channel of this host.
    """
    nodes = {node.minor: node for node in facts.imex_nodes}
    ids = options.device_ids
    channels = sorted(nodes) if "all" in ids else sorted({_channel(text, set(nodes)) for text in ids})
    devices = [OfferedDevice(str(channel), node_actions(nodes[channel])) for channel in channels]
    return _without_driver(facts, "imex", tuple(devices), all_device=True)


def _channel(text: str, present: set[int]) -> int:
    number = small_number(text.removeprefix("channel"))
    if number < 0:
        raise CdiError("OCIGPU-CDI-7", f"invalid channel ID {quoted(text)}: not a number", imex_hint(present))
    if number > MAX_IMEX_CHANNEL:
        message = f"invalid channel ID {number}: must be in the range [0, {MAX_IMEX_CHANNEL}]"
        raise CdiError("OCIGPU-CDI-7", message, imex_hint(present))
    if number not in present:
        path = f"/dev/nvidia-caps-imex-channels/channel{number}"
        raise CdiError("OCIGPU-CDI-7", f"IMEX channel {number} not found at {path}", imex_hint(present))
    return number


def _without_driver(facts: "HostFacts", mode: str, devices: tuple[OfferedDevice, ...], all_device: bool) -> DeviceOffer:
    vendor, device_class = KINDS[mode]
    return DeviceOffer("nvidia", vendor, device_class, devices, env=(VOID,), all_device=all_device, notes=facts.notes)
