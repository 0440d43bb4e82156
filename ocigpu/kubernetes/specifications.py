"""CDI specifications of what the plugin offers, for the strategies that name devices by them and for Kata.

They are written below the directory of specifications that changes with the host (/var/run/cdi), under the names that
NVIDIA's plugins use, so that an uninstalled one leaves nothing that competes.
"""

import json
import os
from typing import Any

from ocigpu.cdi.generate import generate_all
from ocigpu.cdi.transform import transform_root
from ocigpu.cdi.write import write_spec
from ocigpu.core.errors import CdiError, OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.kubernetes.allocate import CDI_VENDOR, usable_channels, wanted_parts
from ocigpu.kubernetes.config import CDI_STRATEGIES, Configuration, PluginOptions
from ocigpu.kubernetes.node import KubernetesNode


def write_specifications(node: KubernetesNode, configuration: Configuration, settings: Settings) -> tuple[str, ...]:
    """Write what this node's devices need, each file only when its content would be another; returns problems.

    ``settings``: those that the node was read with.  Reads the host; must be called from a process with one thread.
    """
    problems = []
    directory = settings.cdi_spec_dirs[-1] if settings.cdi_spec_dirs else "/var/run/cdi"
    for options in wanted(node, configuration):
        try:
            for part in generate_all(options, settings):
                spec = on_the_host(part.generated.spec, configuration.options, settings)
                vendor, _, device_class = spec["kind"].partition("/")
                _write(spec, f"{directory}/{vendor}-{device_class}.json")
        except OcigpuError as error:
            problems.append(f"CDI specification of {options.device_class}: {error.message}")
    return tuple(problems)


def wanted(node: KubernetesNode, configuration: Configuration) -> tuple[GenerateOptions, ...]:
    """Return what to generate, a specification each."""
    options = configuration.options
    if node.source == "vfio":  # Kata asks for them whatever the strategy is
        return tuple(
            GenerateOptions(
                mode="vfio",
                device_class=resource.name.rpartition("/")[2],
                device_ids=tuple(device.id for device in resource.devices),
                all_device=False,
            )
            for resource in node.inventory.resources
        )
    if not node.inventory.resources or not set(options.device_list_strategy) & set(CDI_STRATEGIES):
        return ()
    present = {feature.name for feature in node.facts.features if feature.nodes}
    parts = [("gpu", "wsl" if node.source == "wsl" else "nvml")]
    parts += [(name, name) for name in wanted_parts(options) if name in present]
    if usable_channels(node.facts, options._replace(imex_required=False))[0]:
        parts.append(("imex-channel", "imex"))
    return tuple(
        GenerateOptions(
            mode=mode,
            vendor=CDI_VENDOR,
            device_class=device_class,
            hook_path=options.cdi_hook_path,
            disabled_hooks=options.cdi_disable_hooks,
            feature_flags=options.cdi_feature_flags,
        )
        for device_class, mode in parts
    )


VDPAU = "libvdpau_nvidia.so."


def vdpau_apart(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the specification with the VDPAU library in ``vdpau``, where libvdpau looks first, as NVIDIA's has it.

    The loader's cache has that directory, too.
    """
    edits = json.loads(json.dumps(spec.get("containerEdits", {})))
    for mount in edits.get("mounts", ()):
        directory, _, name = mount["containerPath"].rpartition("/")
        if not name.startswith(VDPAU) or directory.endswith("/vdpau"):
            continue
        mount["containerPath"] = f"{directory}/vdpau/{name}"
        for hook in edits.get("hooks", ()):
            hook["args"] = _moved(hook.get("args", []), directory)
    return {**spec, **({"containerEdits": edits} if edits else {})}


def _moved(words: list[str], directory: str) -> list[str]:
    """Return the arguments of a hook with the library's link and its directory for the loader's cache."""
    found = [word.replace(f"::{directory}/{VDPAU}", f"::{directory}/vdpau/{VDPAU}") for word in words]
    if "update-ldcache" in found:
        at = found.index("update-ldcache") + 1
        while found[at : at + 1] == ["--folder"]:
            at += 2
        found[at:at] = ["--folder", f"{directory}/vdpau"]
    return found


def on_the_host(spec: dict[str, Any], options: PluginOptions, settings: Settings) -> dict[str, Any]:
    """Return the specification with the host's paths instead of those in the plugin's own container."""
    inside = options.container_driver_root
    spec = vdpau_apart(spec)
    if settings.simulation_root or settings.driver_root != inside:
        return spec
    nodes = options.dev_root or options.driver_root
    spec = transform_root(spec, f"{inside}/dev", f"{nodes.rstrip('/')}/dev")
    return transform_root(spec, inside, options.driver_root)


def _write(spec: dict[str, Any], path: str) -> None:
    """Write a file unless it says the same already: whoever watches the directory is not woken for nothing."""
    try:
        with open(path, encoding="utf-8") as file:
            if json.load(file) == spec:
                return
    except (OSError, ValueError):  # not there, or not ours: it is replaced
        pass
    if os.path.isdir(path):
        raise CdiError("OCIGPU-CDI-8", f"write {path}: it is a directory")
    write_spec(spec, path, "json")
