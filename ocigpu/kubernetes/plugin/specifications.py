"""CDI specifications of what the plugin offers, for the strategies that name devices by them and for Kata.

They are written below the directory of specifications that changes with the host (/var/run/cdi), under the names that
NVIDIA's plugins use, so that an uninstalled one leaves nothing that competes.
"""

import json
import os
from typing import Any

from ocigpu.cdi.generate import generate_all
from ocigpu.cdi.write import write_spec
from ocigpu.core.errors import CdiError, OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.core.vendors import FIRST, VENDORS, plugin_vendor
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.gpus.vendors import load_vendor
from ocigpu.kubernetes.node.config import CDI_STRATEGIES, Configuration, PluginOptions
from ocigpu.kubernetes.node.on_host import on_the_host
from ocigpu.kubernetes.node.reading import KubernetesNode
from ocigpu.kubernetes.plugin.allocate import usable_channels, wanted_parts


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
    own, options = _wanted_of_first(node, configuration), configuration.options
    others = [other.gpus.facts.vendor for other in node.others if other.inventory.resources and _has_cdi(options)]
    return (*own, *(_generate(options, name, "gpu", load_vendor(name).modes[0]) for name in others))


def _has_cdi(options: PluginOptions) -> bool:
    return bool(set(options.device_list_strategy) & set(CDI_STRATEGIES))


def _wanted_of_first(node: KubernetesNode, configuration: Configuration) -> tuple[GenerateOptions, ...]:
    options = configuration.options
    if node.source == "vfio":  # Kata requests them under every strategy
        return tuple(
            GenerateOptions(
                mode="vfio",
                device_class=resource.name.rpartition("/")[2],
                device_ids=tuple(device.id for device in resource.devices),
                all_device=False,
            )
            for resource in node.inventory.resources
        )
    if not node.inventory.resources or not _has_cdi(options):
        return ()
    present = {feature.name for feature in node.facts.features if feature.nodes}
    parts = [("gpu", "wsl" if node.source == "wsl" else "nvml")]
    parts += [(name, name) for name in wanted_parts(options) if name in present]
    if usable_channels(node.facts, options._replace(imex_required=False))[0]:
        parts.append(("imex-channel", "imex"))
    return tuple(_generate(options, FIRST, device_class, mode) for device_class, mode in parts)


def _generate(options: PluginOptions, vendor: str, device_class: str, mode: str) -> GenerateOptions:
    return GenerateOptions(
        mode=mode,
        vendor=plugin_vendor(VENDORS[vendor][2]),
        device_class=device_class,
        hook_path=options.cdi_hook_path,
        disabled_hooks=options.cdi_disable_hooks,
        feature_flags=options.cdi_feature_flags,
    )


def _write(spec: dict[str, Any], path: str) -> None:
    """Write a file unless its content is unchanged, so watchers of the directory are not woken in vain."""
    try:
        with open(path, encoding="utf-8") as file:
            if json.load(file) == spec:
                return
    except (OSError, ValueError):  # not there, or not ours: it is replaced
        pass
    if os.path.isdir(path):
        raise CdiError("OCIGPU-CDI-8", f"write {path}: it is a directory")
    write_spec(spec, path, "json")
