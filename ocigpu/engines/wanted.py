"""The settings that register ocigpu with an engine.  Pure, from its configuration."""

import re
from typing import Any, NamedTuple

from ocigpu.core.errors import OcigpuError
from ocigpu.engines.document import ValueChange, look_up, table_at
from ocigpu.engines.status import config_version, cri_plugin, is_ours, programs_of, runtime_keys

_RUNC_TYPES = ("io.containerd.runc.", "io.containerd.runtime.v1.")
_V1_SHIM = "io.containerd.runtime.v1.linux"
CDI_DIRECTORIES = ["/etc/cdi", "/var/run/cdi"]
"""Where the CDI specification says that specifications are (CDI SPEC.md)."""

KATA_HANDLER = "kata-qemu-nvidia-gpu"
KATA_CONFIG = "/opt/kata/share/defaults/kata-containers/configuration-qemu-nvidia-gpu.toml"
KATA_ENTRY: dict[str, Any] = {
    "runtime_type": f"io.containerd.{KATA_HANDLER}.v2",
    "runtime_path": "/opt/kata/bin/containerd-shim-kata-v2",
    "privileged_without_host_devices": True,
    "options": {"ConfigPath": KATA_CONFIG},
}
"""Kata's entry as its documentation has it (docs/how-to/containerd-kata.md), without ``pod_annotations``: a tenant's
annotations must not reach the machine's configuration."""


class Wanted(NamedTuple):
    """A runtime entry: its name, the program, whether it becomes the default, and whether CDI is switched on.

    ``kata``: containerd also gets the entry of Kata Containers for machines with GPUs.  ``cgroupless``: the low-level
    runtime behind it starts containers without cgroups: Podman is to let it.
    """

    name: str
    path: str
    default: bool
    cdi: bool
    kata: bool = False
    cgroupless: bool = False


def docker_changes(wanted: Wanted) -> list[ValueChange]:
    """Return the changes of a daemon.json (docs.docker.com, "dockerd": daemon configuration file)."""
    changes = [ValueChange(("runtimes", wanted.name), {"path": wanted.path})]
    if wanted.default:
        changes.append(ValueChange(("default-runtime",), wanted.name))
    if wanted.cdi:
        changes.append(ValueChange(("features", "cdi"), True))
    return changes


_CGROUPLESS = ("crun", "crun-wasm", "krun")
_WITH_JSON = ("crun", "runc", "kata", "runsc", "youki", "krun")
"""What Podman has there where no file names any (containers/common, pkg/config: DefaultConfig)."""


def podman_changes(wanted: Wanted, merged: dict[str, Any]) -> list[ValueChange]:
    """Return the changes of a containers.conf (containers.conf(5), table engine); CDI needs no switch.

    ``merged``: the whole configuration.  Podman refuses --cgroups=disabled for runtimes that are not in a list (its key
    has no plural, seen with 4.3.1), and reads why a start failed only from the logs of those in another.
    """
    engine = table_at(merged, ("engine",))

    def listed(key: str, usual: tuple[str, ...]) -> ValueChange:
        """A list in a later file replaces those before."""
        named = engine.get(key)
        names = list(map(str, named)) if isinstance(named, list) else list(usual)
        return ValueChange(("engine", key), [*(name for name in names if name != wanted.name), wanted.name])

    changes = [
        ValueChange(("engine", "runtimes", wanted.name), [wanted.path]),
        listed("runtime_supports_json", _WITH_JSON),
    ]
    if wanted.cgroupless:
        changes.append(listed("runtime_supports_nocgroup", _CGROUPLESS))
    if wanted.default:
        changes.insert(0, ValueChange(("engine", "runtime"), wanted.name))
    return changes


def crio_changes(wanted: Wanted, merged: dict[str, Any]) -> list[ValueChange]:
    """Return the changes of a CRI-O drop-in (crio.conf(5), table crio.runtime); CDI needs no switch.

    ``merged``: the whole configuration.  The entry is like that of the runtime in use (monitor, allowed annotations).
    """
    runtime = table_at(merged, ("crio", "runtime"))
    entry = _like(table_at(runtime, ("runtimes",)), wanted, runtime.get("default_runtime"), "runtime_path")
    for key in ("runtime_path", "runtime_type", "platform_runtime_paths"):
        entry.pop(key, None)
    entry = {"runtime_path": wanted.path, "runtime_type": "oci", **entry}
    changes = [ValueChange(("crio", "runtime", "runtimes", wanted.name), entry)]
    if wanted.default:
        changes.insert(0, ValueChange(("crio", "runtime", "default_runtime"), wanted.name))
    return changes


def containerd_changes(wanted: Wanted, version: int, merged: dict[str, Any]) -> list[ValueChange]:
    """Return the changes of a containerd configuration of this version (containerd, docs/cri/config.md).

    ``merged``: the whole configuration.  The entry is like that of the runtime in use, with its cgroup driver.  The
    table of runtimes replaces containerd's own, so "runc" is also written if no runtime existed.  Raises OcigpuError
    OCIGPU-ENG-2 if the deprecated table default_runtime decides about the default.
    """
    plugin = cri_plugin({"version": version})
    settings = table_at(merged, plugin)
    engine = table_at(settings, ("containerd",))
    runtimes = table_at(engine, ("runtimes",))
    changes = []
    if wanted.default:
        if table_at(engine, ("default_runtime",)).get("runtime_type"):
            raise OcigpuError(
                "OCIGPU-ENG-2",
                "containerd's deprecated table containerd.default_runtime decides about the default runtime",
                "move it to containerd.runtimes.NAME with default_runtime_name = NAME",
            )
        changes.append(ValueChange((*plugin, "containerd", "default_runtime_name"), wanted.name))
    if wanted.cdi:
        changes.append(ValueChange((*plugin, "enable_cdi"), True))
        if settings.get("cdi_spec_dirs") == []:
            changes.append(ValueChange((*plugin, "cdi_spec_dirs"), CDI_DIRECTORIES))
    if not runtimes:
        changes.append(
            ValueChange((*plugin, "containerd", "runtimes", "runc"), {"runtime_type": "io.containerd.runc.v2"})
        )
    changes.append(ValueChange((*plugin, "containerd", "runtimes", wanted.name), _containerd_entry(wanted, engine)))
    if wanted.kata and KATA_HANDLER not in runtimes:  # kata-deploy writes one like it
        changes.append(ValueChange((*plugin, "containerd", "runtimes", KATA_HANDLER), KATA_ENTRY))
    return changes


def _containerd_entry(wanted: Wanted, engine: dict[str, Any]) -> dict[str, Any]:
    candidates = {}
    for name in table_at(engine, ("runtimes",)):
        entry = table_at(engine, ("runtimes", name))
        if str(entry.get("runtime_type") or _RUNC_TYPES[0]).startswith(_RUNC_TYPES):
            candidates[name] = entry
    entry = _like(candidates, wanted, engine.get("default_runtime_name"), "options")
    entry["runtime_type"] = entry.get("runtime_type") or "io.containerd.runc.v2"
    options = table_at(entry, ("options",))
    options.pop("Runtime", None)
    options["Runtime" if entry["runtime_type"] == _V1_SHIM else "BinaryName"] = wanted.path
    entry["options"] = options
    return entry


def _like(runtimes: dict[str, Any], wanted: Wanted, default: Any, path_key: str) -> dict[str, Any]:
    """Return a copy of the entry to follow, with its cgroup driver.

    A new default follows the former one, and an entry that replaces another follows that one.  Otherwise the model is
    the default's entry, or that of runc or crun.  NVIDIA's entries are copies of others: they count only without
    another.  Our own entries do not count, except the one that the new entry replaces.
    """
    first = (str(default), wanted.name) if wanted.default else (wanted.name, str(default))
    vendors = sorted(name for name in runtimes if name.startswith("nvidia"))
    for name in dict.fromkeys((*first, "runc", "crun", *vendors)):
        entry = table_at(runtimes, (name,))
        if entry:
            value = entry.get(path_key)
            path = value.get("BinaryName") if isinstance(value, dict) else value
            if name == wanted.name or not is_ours(str(path or "")):
                return entry
    return {}


_SANDBOXES = re.compile(r"runsc|gvisor|kata|krun|sysbox|urunc|firecracker|quark", re.IGNORECASE)


def default_sandbox(engine: str, merged: dict[str, Any]) -> str:
    """Return the default runtime of an engine if it keeps containers from the host's kernel, else ""."""
    table, default = runtime_keys(engine, merged)
    name = look_up(merged, default)
    if not name or not isinstance(name, str):
        return ""
    entry = look_up(merged, (*table, name))
    told = [name, *programs_of(engine, entry), *(look_up(entry, (key,)) for key in ("runtimeType", "runtime_type"))]
    return name if any(_SANDBOXES.search(str(text)) for text in told) else ""


def version_of(path: str, data: dict[str, Any]) -> int:
    """Return the version of a containerd configuration; raises OcigpuError OCIGPU-ENG-1."""
    try:
        return config_version(data)
    except ValueError as error:
        raise OcigpuError("OCIGPU-ENG-1", f"{path}: {error}") from error
