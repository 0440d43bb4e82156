"""The host as a program in a container sees it: its paths in specifications, and programs run in its root."""

import json
from collections.abc import Sequence
from typing import Any

from ocigpu.cdi.transform import transform_root
from ocigpu.core.settings import Settings
from ocigpu.engines.places import DAEMON_PATH
from ocigpu.kubernetes.node.config import PluginOptions
from ocigpu.system.programs import Finished, run_program


def run_on_host(host_root: str, command: Sequence[str], seconds: float, words: str = "", **more: str) -> Finished:
    """Run a command in the host's root with a service's variables and ``more``; ``words``: its standard input.

    Raises OSError, as :func:`run_program`.
    """
    away = ["chroot", host_root] if host_root != "/" else []
    # systemctl(1) does nothing where it takes the host's root for a chroot
    environment = {"PATH": ":".join(DAEMON_PATH), "HOME": "/root", "LC_ALL": "C", "SYSTEMD_IGNORE_CHROOT": "1"}
    return run_program([*away, *command], seconds, env={**environment, **more}, words=words)


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
