"""Settings, for the hot path and every command: read with the standard library only.

``/etc/ocigpu/config.toml``, or the file named by ``OCIGPU_CONFIG`` in the environment of the shim or the operator's
CLI (a hook gets it as an argument, never from its environment).  A test holds this to the answers of a model.
"""

from ocigpu.core.errors import SettingsError, find_near, quoted
from ocigpu.core.record import NamedTuple
from ocigpu.core.vendors import GPU_VENDORS, plugin_vendor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


DEFAULT_PATH = "/etc/ocigpu/config.toml"
MODES = {"auto": "hook", "hook": "hook", "legacy": "hook", "spec": "spec", "jit-cdi": "spec", "cdi": "cdi"}
"""Accepted values of ``mode`` and what they mean.

``auto`` and ``spec`` become ``cdi`` for a container whose devices are all named by fully qualified CDI names.
"""
MODES_WITH_CDI = ("auto", "spec", "jit-cdi", "cdi")
"""Modes in which such names, and annotations, are understood."""
LOG_LEVELS = ("error", "warning", "info", "debug")
CAPABILITIES = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")
"""Every value of NVIDIA_DRIVER_CAPABILITIES but ``all``, sorted."""
COMPAT_MODES = ("ldconfig", "disabled")
LOADER_CACHES = ("auto", "ldconfig", "merge")


class Settings(NamedTuple):
    """All settings; field names are the keys below with ``.`` and ``-`` turned into ``_``."""

    mode: str = "auto"
    disable_require: bool = False
    swarm_resource: str = ""
    accept_nvidia_visible_devices_envvar_when_unprivileged: bool = True
    accept_nvidia_visible_devices_as_volume_mounts: bool = False
    supported_driver_capabilities: str = ",".join(CAPABILITIES)
    no_cgroups: bool = False
    ldconfig: str = ""
    loader_cache: str = "auto"
    cuda_compat_mode: str = "ldconfig"
    driver_root: str = "/"
    driver_dev_root: str = ""
    driver_ldcache: str = "/etc/ld.so.cache"
    runtime_runtimes: tuple[str, ...] = ("runc", "crun")
    runtime_log: str = ""
    runtime_log_level: str = "info"
    hook_path: str = ""
    hook_log: str = ""
    features_ignore_imex_channel_requests: bool = False
    features_no_additional_gids_for_device_nodes: bool = False
    features_no_application_profile: bool = False
    features_no_procfs_view: bool = False
    features_no_loader_cache: bool = False
    features_no_snapshot: bool = False
    cdi_spec_dirs: tuple[str, ...] = ("/etc/cdi", "/var/run/cdi")
    cdi_default_kind: str = "nvidia.com/gpu"
    cdi_annotation_prefixes: tuple[str, ...] = ("cdi.k8s.io/",)
    cdi_engine_filters_annotations: bool = False
    cdi_environment_vendors: tuple[str, ...] = (*GPU_VENDORS, *map(plugin_vendor, GPU_VENDORS))
    trace: str = ""
    simulation_root: str = ""
    path: str = ""


class Key(NamedTuple):
    """One key of the file: dotted ``name``, ``kind`` ("bool", "string", "path", "list", "paths") and what it means."""

    name: str
    kind: str
    meaning: str
    choices: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        return self.name.replace(".", "_").replace("-", "_")

    @property
    def default(self) -> "Any":
        return getattr(Settings(), self.field)


KEYS = (
    Key("mode", "string", "how containers get their GPUs", tuple(MODES)),
    Key("disable-require", "bool", "ignore NVIDIA_REQUIRE_* conditions"),
    Key("swarm-resource", "string", "comma-separated variables that replace NVIDIA_VISIBLE_DEVICES"),
    Key(
        "accept-nvidia-visible-devices-envvar-when-unprivileged",
        "bool",
        "obey the request variables of containers without CAP_SYS_ADMIN",
    ),
    Key(
        "accept-nvidia-visible-devices-as-volume-mounts",
        "bool",
        "obey mounts of /dev/null below /var/run/nvidia-container-devices",
    ),
    Key("supported-driver-capabilities", "string", "comma-separated driver capabilities that containers may have"),
    Key("no-cgroups", "bool", "leave device cgroups alone"),
    Key("ldconfig", "path", "the host's ldconfig; empty: /sbin/ldconfig.real or /sbin/ldconfig"),
    Key(
        "loader-cache",
        "string",
        "how hook mode makes the driver's libraries known to the container's loader: run the host's ldconfig, or merge"
        " them into the image's cache as mode spec does, which is faster but omits other libraries new in the image;"
        " auto: merge where the image's cache is not older than what it was made of",
        LOADER_CACHES,
    ),
    Key("cuda-compat-mode", "string", "CUDA forward-compatibility libraries of the image", COMPAT_MODES),
    Key(
        "driver.root", "path", "where the driver's files are; with /, a driver container at /run/nvidia/driver is found"
    ),
    Key("driver.dev-root", "path", "where the driver's device nodes are; empty: driver root if it has nodes, else /"),
    Key("driver.ldcache", "path", "the loader's cache below the driver root"),
    Key("runtime.runtimes", "list", "low-level runtimes; the first one found wins"),
    Key("runtime.log", "path", "log file of the shim; empty: only the file the engine names"),
    Key("runtime.log-level", "string", "least severe level that is logged", LOG_LEVELS),
    Key("hook.path", "path", "ocigpu-hook; empty: beside ocigpu-runtime"),
    Key("hook.log", "path", "log file of the hook; empty: none"),
    Key("features.ignore-imex-channel-requests", "bool", "ignore NVIDIA_IMEX_CHANNELS"),
    Key(
        "features.no-additional-gids-for-device-nodes",
        "bool",
        "do not add users of containers to the groups that may open device nodes",
    ),
    Key("features.no-application-profile", "bool", "do not tell EGL which GPUs a container has, in any mode"),
    Key(
        "features.no-procfs-view",
        "bool",
        "leave a container's /proc/driver/nvidia unchanged, with all GPUs, in every mode",
    ),
    Key(
        "features.no-loader-cache",
        "bool",
        "leave a container's loader cache and configuration unchanged, in every mode",
    ),
    Key(
        "features.no-snapshot",
        "bool",
        "run shim, hook and ocigpu-container-cli in the ordinary Python, not in the one that packages keep started",
    ),
    Key("cdi.spec-dirs", "paths", "directories of CDI specifications; a later one wins"),
    Key("cdi.default-kind", "string", "CDI kind, vendor/class, of devices named without one"),
    Key("cdi.annotation-prefixes", "list", "prefixes of annotations that name CDI devices"),
    Key(
        "cdi.engine-filters-annotations",
        "bool",
        "images and authors of pods cannot write such annotations: obey them even where variables are ignored",
    ),
    Key(
        "cdi.environment-vendors",
        "list",
        f"vendors (of {', '.join(GPU_VENDORS)}: their GPUs) and kinds, vendor/class, of CDI devices that a container"
        " without CAP_SYS_ADMIN may name in variables and annotations, which its image can set",
    ),
    Key("trace", "path", "file for a line about each step of shim and hook (ocigpu trace FILE); empty: none"),
    Key("simulation.root", "path", "a simulated host made by ocigpu sim create; empty: the real host"),
)


def parse_settings(document: "dict[str, Any]", path: str = "") -> Settings:
    """Return the settings of a parsed TOML document laid over the defaults.

    Raises SettingsError (OCIGPU-SET-2) naming ``path`` and the key for an unknown key, a wrong type, or a value
    outside the key's choices.
    """
    values, problems = _read(document)
    for text, hint in problems:
        raise SettingsError("OCIGPU-SET-2", f"{path}: {text}", hint)
    return Settings(**values, path=path)


def find_problems(document: "dict[str, Any]") -> list[str]:
    """Return what is wrong with a parsed TOML document, one sentence for each key; empty when nothing is."""
    return [f"{text}: {hint}" if hint else text for text, hint in _read(document)[1]]


def _read(document: "dict[str, Any]") -> "tuple[dict[str, Any], list[tuple[str, str | None]]]":
    """Return values by field, and problems with their hints."""
    known = {key.name: key for key in KEYS}
    tables = {name.split(".")[0] for name in known if "." in name}
    values: dict[str, Any] = {}
    problems: list[tuple[str, str | None]] = []
    for name, value in _flatten(document, tables):
        key = known.get(name)
        if name in tables:
            problems.append((f"{name} is not a table", None))
        elif key is None:
            problems.append((f"unknown key {quoted(name)}", suggest_key(name)))
        else:
            marked = name == "ldconfig" and isinstance(value, str)
            found = (
                value.removeprefix("@") if marked else value
            )  # NVIDIA's prefix for a path of the host, which the value always is
            if problem := _problem_of(key, found):
                problems.append((f"{name}: {problem}", ""))
            values[key.field] = tuple(found) if isinstance(found, list) else found
    return values, problems


def _flatten(document: "dict[str, Any]", tables: set[str]) -> "list[tuple[str, Any]]":
    """Return dotted names with their values; an unknown table appears under its own name."""
    pairs: list[tuple[str, Any]] = []
    for name, value in document.items():
        if name in tables and isinstance(value, dict):
            pairs.extend((f"{name}.{inner}", inner_value) for inner, inner_value in value.items())
        else:
            pairs.append((f'"{name}"' if "." in name else name, value))  # "driver.root" in quotes is not driver.root
    return pairs


def suggest_key(name: str) -> str:
    """Return a hint at the key that an unknown dotted key of the file was meant to be."""
    if name.startswith("nvidia-"):
        return "NVIDIA's settings are taken over by: ocigpu config import FILE"
    table, _, last = name.rpartition(".")
    inside = {key.name.rpartition(".")[2]: key.name for key in KEYS if key.name.rpartition(".")[0] == table}
    if not table:
        inside |= {key.name.partition(".")[0]: f"[{key.name.partition('.')[0]}]" for key in KEYS if "." in key.name}
    meant = [inside[near] for near in find_near(last, inside)]
    if meant := meant or [key.name for key in KEYS if key.name.rpartition(".")[2] == last]:
        return f"did you mean {' or '.join(meant)}?"
    return f"keys of [{table}]: {', '.join(inside)}" if table and inside else "ocigpu config keys lists all keys"


def _problem_of(key: Key, value: "Any") -> str:
    if not _is_of_kind(key.kind, value):
        return f"expected a {key.kind}, found {_shown(value)}"
    if key.kind == "paths":
        return next(filter(None, (find_problem(key, item) for item in value)), "")
    return find_problem(key, value) if isinstance(value, str) else ""


def _is_of_kind(kind: str, value: "Any") -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("list", "paths"):
        return isinstance(value, list) and all(isinstance(item, str) and item for item in value)
    return isinstance(value, str) and "\0" not in value


def find_problem(key: Key, text: str) -> str:
    """Return what is wrong with a text that is the value of a key, or one of its values; "" if nothing is."""
    problem, items, choices = "", [text], key.choices
    if key.name == "supported-driver-capabilities" and text != "all":
        items, choices = [item for item in map(str.strip, text.split(",")) if item], CAPABILITIES
    for item in items if choices else ():
        if item not in choices:
            return f"{quoted(item)} is not one of {', '.join(choices)}"
    if key.kind in ("path", "paths") and text and (not text.startswith("/") or "\0" in text):
        return f"{quoted(text)} is not an absolute path"
    if key.name == "cdi.default-kind":
        from ocigpu.core.cdi_names import check_kind

        problem = check_kind(text)
    return problem and f"{quoted(text)}: {problem}"


def _shown(value: "Any") -> str:
    try:
        return quoted(repr(value))
    except (ValueError, RecursionError):  # a number of thousands of digits, which TOML may write in hexadecimal; depth
        return f"a {type(value).__name__}"
