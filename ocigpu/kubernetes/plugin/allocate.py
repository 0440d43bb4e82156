"""The answer to Allocate: what a container gets for the devices that the kubelet chose.  Pure.

Device nodes come from the shim's plan for the same request, so a pod's container gets the same nodes as one of Docker.
"""

import re
import uuid
from collections.abc import Sequence

from ocigpu.core.actions import AllowDevice, Node
from ocigpu.core.errors import HostError, OcigpuError, RequestError, quoted
from ocigpu.core.facts import HostFacts
from ocigpu.core.gate import PARTS
from ocigpu.core.settings import Settings
from ocigpu.core.tokens import MOUNT_DIRECTORIES
from ocigpu.core.vendors import FIRST, VENDORS, plugin_vendor
from ocigpu.gpus.nvidia.request import DEVICES_VARIABLE, IMEX_VARIABLE, default_capabilities
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import load_vendor, make_plan
from ocigpu.kubernetes.api import deviceplugin_pb2 as pb
from ocigpu.kubernetes.mps.shares import CONTAINER_ROOT, PIPE_VARIABLE, mps_directories
from ocigpu.kubernetes.node.config import CDI_STRATEGIES, Configuration, PluginOptions
from ocigpu.kubernetes.node.devices import PluginDevice, Resource

KUBEVIRT_PREFIX = "PCI_RESOURCE_"
CDI_VENDOR = plugin_vendor(VENDORS[FIRST][2])


def wanted_parts(options: PluginOptions) -> dict[str, str]:
    """Return the variables of the opt-in parts that containers get, by the names of the parts."""
    return {name: PARTS[name] for name in ("gdrcopy", "gds", "mofed") if getattr(options, f"{name}_enabled")}


def allocate(
    resource: Resource,
    ids: Sequence[str],
    facts: HostFacts,
    configuration: Configuration,
    settings: Settings,
    token: str = "",
) -> pb.ContainerAllocateResponse:
    """Return what a container with these devices of a resource is given.

    Several replicas of one GPU are that GPU, once.  ``token``: makes the annotation's name unique, default a new UUID.
    Raises RequestError or HostError (OCIGPU-KUBE-2), one line that becomes the pod's event, for unknown or unhealthy
    devices, for more replicas than a container may have, and for what the host lacks.
    """
    try:
        devices = _chosen(resource, ids)
        if resource.kind == "vfio":
            return _for_machines(resource, devices, configuration.options)
        if resource.vendor != FIRST:
            return _of_other(resource, devices, facts, configuration.options, settings, token or str(uuid.uuid4()))
        return _for_containers(resource, devices, facts, configuration, settings, token or str(uuid.uuid4()))
    except OcigpuError as error:
        text = f"invalid allocation request for {quoted(resource.name)}: {error.message}"
        raise type(error)("OCIGPU-KUBE-2", text, error.hint) from error


def usable_channels(facts: HostFacts, options: PluginOptions) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the IMEX channels that every container is given, and notes on those that this host has not.

    Raises HostError (OCIGPU-DEV-4) for a missing one when imex.required is set.
    """
    present = {node.minor for node in facts.imex_nodes}
    missing = [channel for channel in options.imex_channel_ids if channel not in present]
    notes = tuple(f"IMEX channel {channel}: this host has no node for it" for channel in missing)
    if missing and options.imex_required:
        raise HostError("OCIGPU-DEV-4", f"{notes[0]}, and imex.required is set")
    return tuple(channel for channel in options.imex_channel_ids if channel in present), notes


def _chosen(resource: Resource, ids: Sequence[str]) -> list[PluginDevice]:
    """Return the devices, each GPU or MIG device once, by ordinal."""
    known = {device.id: device for device in resource.devices}
    unknown = [id_ for id_ in ids if id_ not in known]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise RequestError("OCIGPU-KUBE-2", f"unknown device: {quoted(unknown[0])}{more}")
    chosen = [known[id_] for id_ in dict.fromkeys(ids)]
    replicas = [device for device in chosen if device.is_replica]
    if resource.one_each and len(replicas) > 1:
        raise RequestError("OCIGPU-KUBE-2", f"maximum request size for shared resources is 1; found {len(replicas)}")
    for device in chosen:
        if device.error:
            raise HostError("OCIGPU-KUBE-2", f"device {device.uuid} is unhealthy: {device.error}", "")
    distinct = {device.uuid: device for device in chosen}
    return sorted(
        distinct.values(), key=lambda device: [int(part) for part in device.ordinal.split(":") if part.isdigit()]
    )


def _for_machines(
    resource: Resource, devices: Sequence[PluginDevice], options: PluginOptions
) -> pb.ContainerAllocateResponse:
    """Nodes for a virtual machine; with a CDI strategy the names by which Kata's specification has them.

    KubeVirt reads the PCI addresses from a variable that has the resource's name, of each device one (KubeVirt,
    pkg/util: ResourceNameToEnvVar).
    """
    envs = {KUBEVIRT_PREFIX + re.sub("[/.]", "_", resource.name.upper()): ",".join(device.gpu for device in devices)}
    if "cdi-cri" in options.device_list_strategy:
        names = [pb.CDIDevice(name=f"{resource.name}={device.id}") for device in devices]
        return pb.ContainerAllocateResponse(envs=envs, cdi_devices=names)
    paths = dict.fromkeys(path for device in devices for path in device.paths)
    return pb.ContainerAllocateResponse(envs=envs, devices=[_spec(path, path, "mrw") for path in paths])


def _for_containers(
    resource: Resource,
    devices: Sequence[PluginDevice],
    facts: HostFacts,
    configuration: Configuration,
    settings: Settings,
    token: str,
) -> pb.ContainerAllocateResponse:
    options = configuration.options
    strategies = options.device_list_strategy
    names = [device.ordinal if options.device_id_strategy == "index" else device.uuid for device in devices]
    channels = usable_channels(facts, options)[0]
    envs: dict[str, str] = {}
    mounts: list[tuple[str, str]] = []
    if "envvar" in strategies:
        envs[DEVICES_VARIABLE] = ",".join(names) or "void"
        if channels:
            envs[IMEX_VARIABLE] = ",".join(map(str, channels))
    if "volume-mounts" in strategies and names:
        directory = MOUNT_DIRECTORIES[0]
        envs[DEVICES_VARIABLE] = directory
        wanted = [*names, *(f"imex/{channel}" for channel in channels)]
        mounts += [(f"{directory}/{name}", "/dev/null") for name in wanted]
    envs |= dict.fromkeys(wanted_parts(options).values() if names else (), "enabled")
    if resource.sharing == "mps" and any(device.is_replica for device in devices):
        inside = mps_directories(CONTAINER_ROOT, resource.name)
        outside = mps_directories(options.mps_root, resource.name)
        envs[PIPE_VARIABLE] = inside.pipe
        mounts += [(inside.pipe, outside.pipe), ("/dev/shm", outside.shm)]
    qualified = _cdi_names(names, channels, facts, options)
    annotated = qualified if "cdi-annotations" in strategies else []
    annotation = f"{options.cdi_annotation_prefix}nvidia-device-plugin_{token}"
    return pb.ContainerAllocateResponse(
        envs=envs,
        mounts=[pb.Mount(container_path=inside, host_path=outside) for inside, outside in mounts],
        devices=_device_specs(resource, devices, channels, facts, options, settings),
        annotations={annotation: ",".join(annotated)} if annotated else {},
        cdi_devices=[pb.CDIDevice(name=name) for name in qualified] if "cdi-cri" in strategies else [],
    )


def _of_other(
    resource: Resource,
    devices: Sequence[PluginDevice],
    facts: HostFacts,
    options: PluginOptions,
    settings: Settings,
    token: str,
) -> pb.ContainerAllocateResponse:
    """GPUs of a vendor other than NVIDIA: by its variable, by CDI names, or as the nodes of its plan.

    Only NVIDIA's runtime knows mounts that name devices: with these alone the kubelet gives the nodes.
    """
    vendor, strategies = resource.vendor, options.device_list_strategy
    names = [device.ordinal if options.device_id_strategy == "index" else device.uuid for device in devices]
    qualified = [f"{plugin_vendor(VENDORS[vendor][2])}/gpu={name}" for name in names]
    nodes: list[pb.DeviceSpec] = []
    if devices and (set(strategies) == {"volume-mounts"} or _passes_nodes(options)):
        request = load_vendor(vendor).request_devices({}, tuple(device.uuid for device in devices), settings)
        nodes = _planned_nodes(request, devices, facts, options, settings)
    annotation = f"{options.cdi_annotation_prefix}{vendor}-device-plugin_{token}"
    return pb.ContainerAllocateResponse(
        envs={VENDORS[vendor][1]: ",".join(names)} if "envvar" in strategies and names else {},
        devices=nodes,
        annotations={annotation: ",".join(qualified)} if qualified and "cdi-annotations" in strategies else {},
        cdi_devices=[pb.CDIDevice(name=name) for name in qualified] if "cdi-cri" in strategies else [],
    )


def _passes_nodes(options: PluginOptions) -> bool:
    """Return whether the kubelet gives the nodes: with CDI strategies only, they are in the specifications."""
    return options.pass_device_specs and not set(options.device_list_strategy) <= set(CDI_STRATEGIES)


def _cdi_names(names: Sequence[str], channels: Sequence[int], facts: HostFacts, options: PluginOptions) -> list[str]:
    """Return the qualified names; a part that the host has no device of has no specification either."""
    parts = {feature.name for feature in facts.features if feature.nodes}
    return [
        *(f"{CDI_VENDOR}/gpu={name}" for name in names),
        *(f"{CDI_VENDOR}/imex-channel={channel}" for channel in channels),
        *(f"{CDI_VENDOR}/{name}=all" for name in wanted_parts(options) if names and name in parts),
    ]


def _device_specs(
    resource: Resource,
    devices: Sequence[PluginDevice],
    channels: tuple[int, ...],
    facts: HostFacts,
    options: PluginOptions,
    settings: Settings,
) -> list[pb.DeviceSpec]:
    """Return the nodes that the shim would make for these devices, as far as the host has them."""
    if not _passes_nodes(options) or not devices:
        return []
    if resource.kind == "wsl":
        paths = dict.fromkeys(path for device in devices for path in device.paths)
        return [_spec(path, path, "rw") for path in paths]
    uuids = tuple(device.uuid for device in devices)
    enabled = wanted_parts(options)
    request = Request(
        "list",
        uuids,
        f"{DEVICES_VARIABLE}={','.join(uuids)}",
        default_capabilities(settings),
        imex_channels=() if settings.features_ignore_imex_channel_requests else channels,
        features=tuple(name for name in PARTS if name in enabled),
    )
    return _planned_nodes(request, devices, facts, options, settings)


def _planned_nodes(
    request: Request,
    devices: Sequence[PluginDevice],
    facts: HostFacts,
    options: PluginOptions,
    settings: Settings,
) -> list[pb.DeviceSpec]:
    """Return the nodes of the plan for this request that the host has.

    Raises HostError (OCIGPU-DEV-4) for a missing one that a device requires.
    """
    plan = make_plan(facts, request, settings)
    access = {(rule.major, rule.minor): rule.access for rule in plan.actions if isinstance(rule, AllowDevice)}
    nodes = [action.node for action in plan.actions if isinstance(action, Node)]
    indispensable = {path for device in devices for path in device.paths}
    missing = [node.container_path for node in nodes if not node.host_path and node.container_path in indispensable]
    if missing:
        hint = "Make it: nvidia-modprobe -c 0 -u" if request.vendor == FIRST else "Make it: udevadm trigger"
        raise HostError("OCIGPU-DEV-4", f"the host has no device node {missing[0]}", hint)
    return [
        _spec(node.container_path, host_path(node.host_path, options), access[node.major, node.minor])
        for node in nodes
        if node.host_path
    ]


def _spec(container_path: str, path: str, permissions: str) -> pb.DeviceSpec:
    return pb.DeviceSpec(container_path=container_path, host_path=path, permissions=permissions)


def host_path(path: str, options: PluginOptions) -> str:
    """Return where the host has a node that the plugin, perhaps in a container of its own, found at this path."""
    root = options.container_driver_root.rstrip("/")
    if root and path.startswith(f"{root}/"):
        return (options.dev_root or options.driver_root).rstrip("/") + path.removeprefix(root)
    return path
