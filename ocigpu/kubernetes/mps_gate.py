"""Whether the control daemons of MPS, which ``ocigpu mps-control-daemon`` runs, are ready for pods.

Before the limits are set a pod would run without any, and after a daemon has died none can start: the devices are
unhealthy meanwhile, so the kubelet gives them to nobody.
"""

import os
from collections.abc import Sequence

from ocigpu.kubernetes.config import Configuration
from ocigpu.kubernetes.devices import Resource
from ocigpu.kubernetes.mps import CONTAINER_ROOT, mps_directories


def mps_root(configuration: Configuration) -> str:
    """Return where the directories are: in a container where the host's directory was mounted."""
    return CONTAINER_ROOT if os.path.isdir(CONTAINER_ROOT) else configuration.options.mps_root


def waits_for_mps(resource: Resource, configuration: Configuration) -> str:
    """Return why pods must not have devices of this resource yet, "" when they may or it is not shared by MPS."""
    if resource.sharing != "mps":
        return ""
    ready = mps_directories(mps_root(configuration), resource.name).ready
    return "" if os.path.exists(ready) else f"MPS: no control daemon is ready: there is no {ready}"


def waiting_resources(resources: Sequence[Resource], configuration: Configuration) -> frozenset[str]:
    """Return the names of those that wait."""
    return frozenset(each.name for each in resources if waits_for_mps(each, configuration))
