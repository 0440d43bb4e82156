"""A container's request, read from its OCI configuration: pure, no host access.

An engine writes the configuration, but its environment comes from an image: every value is hostile.  Parts of the wrong
JSON type count as absent; a device list, number or expression that cannot be understood stops the container.
"""

from ocigpu.core.config_json import clean_path, get_object, read_env
from ocigpu.core.errors import RequestError, printable, quoted
from ocigpu.core.gate import (
    CONDITIONS,
    PARTS,
    Asker,
    find_bound,
    is_filtered,
    is_gpu_of_nvidia,
    is_of_nvidia,
    is_plugin_key,
    permits,
    permitted_capabilities,
    why_not,
)
from ocigpu.core.settings import CAPABILITIES, MODES_WITH_CDI, Settings
from ocigpu.core.tokens import (
    HEX,
    MAX_IMEX_CHANNEL,
    MAX_TOKENS,
    MOUNT_DIRECTORIES,
    MOUNT_SOURCE,
    TRUE_WORDS,
    WORDS,
    is_number,
    pci_address,
    select_tokens,
)
from ocigpu.gpus.request import Request, is_privileged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ocigpu.core.tokens import Variables

DEVICES_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES_VARIABLE = "NVIDIA_DRIVER_CAPABILITIES"
IMEX_VARIABLE = "NVIDIA_IMEX_CHANNELS"
OWN_KIND = "runtime.nvidia.com/gpu="
"""Before a device: it comes from the runtime itself, not from a specification (nvidia-container-runtime)."""
DEFAULT_CAPABILITIES = ("compute", "utility")

MAX_VALUE = 64 * 1024  # characters of one variable
MAX_TOKEN = 200
MAX_REQUIREMENTS = 256 * 1024  # characters of all requirements of a container together
MAX_SHOWN_ANNOTATIONS = 3
_SHOWN_VALUE = 120


def parse_request(config: "dict[str, Any]", settings: Settings, bundle: str = "") -> Request:
    """Return the request of the container of this config.json (a raw document).

    ``bundle``: its absolute path, which identifies an engine that filters annotations (:mod:`ocigpu.core.gate`, which
    decides what may be requested).  An empty request contains only notes.  Raises RequestError OCIGPU-REQ-1 to -6 (not
    -3), each naming the variable and quoting what cannot be understood.  Time grows linearly with the size of the
    document.

    With mode cdi every device becomes a CDI name; with modes auto and spec a container whose devices are all named by
    fully qualified CDI names is served from specifications, and a mixture of both is refused.  Devices of the kind
    "runtime.nvidia.com/gpu" are plain ones in every mode.  Annotations are read in all of these modes
    and come first, then mounts, then variables (the order of nvidia-container-runtime).
    """
    swarm = tuple(filter(None, map(str.strip, settings.swarm_resource.split(","))))
    variables = _read_variables(config, swarm)
    asker = Asker(settings, is_privileged(config))
    notes: list[str] = []

    mounted: tuple[str, ...] = ()
    mounted_imex: tuple[str, ...] = ()
    if why_not("gpu", "mount", asker) is None:
        mounted, mounted_imex = _read_mounts(config.get("mounts") if isinstance(config, dict) else None)
    tokens, where = _requested_by_annotations(config, settings, notes)
    by, source = "annotation", where
    if tokens:
        asker = asker._replace(filtered=is_filtered(config, bundle, settings))
        if select_tokens(tokens)[0] != "nothing" and not permits("gpu", by, asker, where, notes):
            tokens = ()
    if tokens:
        notes.extend(_overruled_notes(source, mounted, variables, swarm, asker))
    elif mounted:
        by, tokens, source, where = "mount", mounted, MOUNT_SOURCE, MOUNT_SOURCE
    else:
        by = "variable"
        tokens, source, where = _requested_by_variables(variables, swarm)
        if select_tokens(tokens)[0] != "nothing" and not permits("gpu", by, asker, where, notes):
            return Request(notes=tuple(notes))
    selection, devices = select_tokens(tokens)
    if selection == "nothing":
        return Request(notes=tuple(notes))
    if any(token.startswith(OWN_KIND) for token in tokens):
        tokens = _own_devices(tokens, where)
        selection, devices = select_tokens(tokens)
        if selection == "nothing":
            return Request(notes=tuple(notes))
    elif settings.mode == "cdi" or (
        settings.mode in MODES_WITH_CDI and (by == "annotation" or any("=" in token for token in tokens))
    ):
        # only here: few containers need it
        from ocigpu.gpus.nvidia.qualified import all_qualified, name_devices, permitted_names

        if settings.mode == "cdi" or all_qualified(tokens, where, by == "annotation"):
            names = name_devices(tokens, where, settings.cdi_default_kind)
            names = permitted_names(names, by, asker, where, notes)
            if any(map(is_of_nvidia, names)):
                names += _cdi_extras(variables, mounted_imex, asker, notes)
            if not names:
                return Request(notes=tuple(notes))
            request = Request("cdi", source=source, cdi_devices=tuple(dict.fromkeys(names)), notes=tuple(notes))
            if not any(map(is_gpu_of_nvidia, names)):
                return request
            _parse_capabilities(variables, asker)
            bound = find_bound(by, asker)
            return request._replace(capabilities=bound, requirements=_parse_requirements(variables, asker))
    check_tokens(devices, where)
    return _complete_request(Request(selection, devices, source, notes=tuple(notes)), variables, mounted_imex, asker)


def request_devices(config: "dict[str, Any]", devices: "Sequence[str]", settings: Settings) -> Request:
    """Return a request for these devices, by UUID, and for everything else that a config.json's variables request.

    The caller has chosen the devices: the config.json does not name them.  Raises RequestError as
    :func:`parse_request`.
    """
    variables = _read_variables(config, ())
    source = f"{DEVICES_VARIABLE}={printable(','.join(devices) or 'none', _SHOWN_VALUE)}"
    request = Request("list" if devices else "none", tuple(dict.fromkeys(devices)), source)
    return _complete_request(request, variables, (), Asker(settings, is_privileged(config)))


def _complete_request(request: Request, variables: "Variables", mounted_imex: tuple[str, ...], asker: Asker) -> Request:
    """Return the request with everything else that variables, and mounts for IMEX, request."""
    notes = list(request.notes)
    mig_config = _parse_mig("NVIDIA_MIG_CONFIG_DEVICES", variables, asker)
    mig_monitor = _parse_mig("NVIDIA_MIG_MONITOR_DEVICES", variables, asker)
    return request._replace(
        capabilities=_parse_capabilities(variables, asker),
        requirements=_parse_requirements(variables, asker),
        mig_config=mig_config,
        mig_monitor=mig_monitor,
        imex_channels=_parse_imex(variables, mounted_imex, asker, notes),
        features=_parse_features(variables, asker, notes),
        notes=tuple(notes),
    )


def default_capabilities(settings: Settings) -> tuple[str, ...]:
    """Return the driver capabilities of a container that requests none, as far as the settings permit them."""
    permitted = permitted_capabilities(settings)
    return tuple(name for name in DEFAULT_CAPABILITIES if name in permitted)


def _read_variables(config: "dict[str, Any]", swarm: tuple[str, ...]) -> "Variables":
    """Return the variables that concern us; of a name that occurs twice the last one counts."""
    prefixes = ("NVIDIA_", "CUDA_VERSION=", *(f"{name}=" for name in swarm))
    variables: Variables = {}
    for entry in read_env(config):
        if entry.startswith(prefixes):
            name, equals, value = entry.partition("=")
            if equals:
                variables[name] = value
    return variables


def _read_mounts(mounts: "Any") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (devices, IMEX channels) requested by mounts of /dev/null, in order, without duplicates."""
    devices: dict[str, None] = {}
    imex: dict[str, None] = {}
    for mount in mounts if isinstance(mounts, list) else ():
        if not isinstance(mount, dict):
            continue
        if _clean_path(mount.get("source")) != "/dev/null":
            continue
        destination = _clean_path(mount.get("destination"))
        for directory in MOUNT_DIRECTORIES:
            if destination.startswith(directory + "/"):
                request = destination[len(directory) + 1 :]
                if request.startswith("cdi/"):
                    devices[_cdi_mount(request)] = None
                elif request.startswith("imex/"):
                    imex[request.removeprefix("imex/")] = None
                else:
                    devices[request] = None
    return tuple(devices), tuple(imex)


def _cdi_mount(request: str) -> str:
    from ocigpu.gpus.nvidia.qualified import name_of_mount  # only here: few containers need it

    return name_of_mount(request)


def _requested_by_annotations(
    config: "dict[str, Any]", settings: Settings, notes: list[str]
) -> tuple[tuple[str, ...], str]:
    """Return (tokens, source) of annotations, by key; nothing in mode hook, in which engines handle them.

    Keys of the form that device plugins write count; others are named in ``notes``.
    """
    if settings.mode not in MODES_WITH_CDI:
        return (), ""
    annotations = get_object(config, "annotations")
    keys = sorted(key for key in annotations if key.startswith(settings.cdi_annotation_prefixes))
    tokens: dict[str, None] = {}
    named: list[str] = []
    others: list[str] = []
    for key in keys:
        value = annotations[key]
        where = f"annotation {printable(key, 120)}"
        if not any(
            is_plugin_key(key.removeprefix(prefix))
            for prefix in settings.cdi_annotation_prefixes
            if key.startswith(prefix)
        ):
            if value not in ("", None):
                others.append(where)
            continue
        parts = _split(where, value, "OCIGPU-REQ-1") if isinstance(value, str) else []
        tokens.update(dict.fromkeys(parts))
        if parts and len(named) < MAX_SHOWN_ANNOTATIONS:
            named.append(f"{where}={printable(value, _SHOWN_VALUE)}")
    if others:
        shown = ", ".join(others[:MAX_SHOWN_ANNOTATIONS])
        notes.append(f"{shown} ignored: after its prefix a key must have the form PLUGIN_DEVICE")
    return tuple(tokens), " ".join(named)


def _overruled_notes(
    source: str, mounted: tuple[str, ...], variables: "Variables", swarm: tuple[str, ...], asker: Asker
) -> list[str]:
    """Return notes about the other ways in which the container asks, which annotations come before."""
    names = [name for name in swarm if name in variables] or [DEVICES_VARIABLE]
    asking = [MOUNT_SOURCE] if mounted else []
    if why_not("gpu", "variable", asker) is None:
        asking += [printable(name, 120) for name in names if variables.get(name, "") not in ("", "void")]
    return [f"{', '.join(asking)} ignored: {source} comes first"] if asking else []


def _parse_features(variables: "Variables", asker: Asker, notes: list[str]) -> tuple[str, ...]:
    """Return the opt-in parts that variables request, and append ignored requests to ``notes``."""
    return tuple(
        name
        for name, variable in PARTS.items()
        if variables.get(variable) == "enabled" and permits("part", "variable", asker, variable, notes)
    )


def _cdi_extras(variables: "Variables", mounted_imex: tuple[str, ...], asker: Asker, notes: list[str]) -> list[str]:
    """Return the devices that stand for opt-in parts and IMEX channels, by the kinds of nvidia-ctk cdi generate."""
    names = [f"nvidia.com/{name}=all" for name in _parse_features(variables, asker, notes)]
    names += [f"nvidia.com/imex-channel={channel}" for channel in _parse_imex(variables, mounted_imex, asker, notes)]
    ignored = [name for name in ("NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES") if variables.get(name)]
    if ignored:
        notes.append(f"{', '.join(ignored)} ignored: CDI specifications have no device for it")
    return names


def _clean_path(value: "Any") -> str:
    """Return the absolute path without "..", "." and doubled slashes, or "" for anything else."""
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        return ""
    return clean_path(value)


def _requested_by_variables(variables: "Variables", swarm: tuple[str, ...]) -> tuple[tuple[str, ...], str, str]:
    """Return (tokens, source with its value, source by name) of the environment, before permissions are checked."""
    names = [name for name in swarm if name in variables]
    if not names and DEVICES_VARIABLE in variables:
        names = [DEVICES_VARIABLE]
    if not names:
        if _is_legacy_image(variables):
            version = printable(variables["CUDA_VERSION"], _SHOWN_VALUE)
            return ("all",), f"CUDA_VERSION={version} without {DEVICES_VARIABLE}", "CUDA_VERSION"
        return (), "", ""
    tokens: dict[str, None] = {}
    for name in names:
        tokens.update(dict.fromkeys(_split(name, variables[name], "OCIGPU-REQ-1")))
    source = " ".join(f"{printable(name, 120)}={printable(variables[name], _SHOWN_VALUE)}" for name in names)
    return tuple(tokens), source, " ".join(printable(name, 120) for name in names)


def _is_legacy_image(variables: "Variables") -> bool:
    """Return whether the image is of the time before NVIDIA_REQUIRE_CUDA: it means "all" without saying so."""
    return bool(variables.get("CUDA_VERSION")) and not variables.get("NVIDIA_REQUIRE_CUDA")


def _split(variable: str, value: str, code: str) -> list[str]:
    """Return the elements of a comma list, stripped, without empty ones; a value without end is an error."""
    if len(value) > MAX_VALUE:
        raise RequestError(code, f"{printable(variable, 120)}: longer than {MAX_VALUE} characters: {quoted(value, 40)}")
    return list(filter(None, map(str.strip, value.split(","))))


def _own_devices(tokens: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return devices of the runtime's own kind as plain ones; raises OCIGPU-REQ-1 for a mixture with others."""
    for token in tokens:
        if not token.startswith(OWN_KIND):
            raise RequestError(
                "OCIGPU-REQ-1",
                f"{where}: {quoted(token)} beside a device of {OWN_KIND.removesuffix('=')}: the runtime's own devices"
                " cannot be mixed with others",
                f"Name all devices with {OWN_KIND}, or none.",
            )
    return tuple(dict.fromkeys(token.removeprefix(OWN_KIND) for token in tokens))


def check_tokens(devices: tuple[str, ...], where: str) -> None:
    """Raise RequestError OCIGPU-REQ-1 for what no host could have; whether this one has it is decided elsewhere."""
    if len(devices) > MAX_TOKENS:
        raise RequestError("OCIGPU-REQ-1", f"{where}: more than {MAX_TOKENS} devices")
    for token in devices:
        if len(token) > MAX_TOKEN:
            raise RequestError("OCIGPU-REQ-1", f"{where}: longer than {MAX_TOKEN} characters: {quoted(token, 40)}")
        vendor, equals, name = token.partition("=")
        if equals and "/" in vendor and name:
            raise _cdi_error(where, token)
        if not _is_device(token):
            raise RequestError(
                "OCIGPU-REQ-1", f"{where}: {quoted(token)} is not an index, UUID, PCI bus id or MIG device"
            )


def _is_device(token: str) -> bool:
    if is_number(token) or pci_address(token):
        return True
    kind = token[:4].upper()
    if kind in ("GPU-", "MIG-"):
        rest = token[4:]
        if kind == "MIG-" and rest[:4].upper() == "GPU-":  # MIG-GPU-<uuid>/<GPU instance>/<compute instance>
            rest, *instances = rest[4:].split("/")
            if len(instances) != 2 or not all(map(is_number, instances)):
                return False
        return bool(rest) and all(c in HEX or c == "-" for c in rest)
    gpu, _, mig = token.partition(":")
    # all, none and void in another case go on, so that the error about them can say what was meant
    return (is_number(gpu) and is_number(mig)) or token.lower() in WORDS


def _cdi_error(where: str, token: str) -> RequestError:
    return RequestError(
        "OCIGPU-REQ-1",
        f"{where}: {quoted(token)} is a CDI device name, and mode hook takes none",
        'Name the GPU by index, UUID or PCI bus id, set mode = "auto", or let the engine inject CDI devices.',
    )


def _parse_mig(variable: str, variables: "Variables", asker: Asker) -> str:
    value = variables.get(variable, "")
    if not value:
        return ""
    permits("mig", "variable", asker, f"{variable}={printable(value, 40)}", [])
    if value != "all":
        raise RequestError(
            "OCIGPU-REQ-1", f"{variable}: {quoted(value)} is not all", f"Set {variable}=all, or remove it."
        )
    return value


def _parse_capabilities(variables: "Variables", asker: Asker) -> tuple[str, ...]:
    variable = CAPABILITIES_VARIABLE
    permitted = permitted_capabilities(asker.settings)
    if variable not in variables and _is_legacy_image(variables):
        return tuple(sorted(permitted))
    wanted = set(_split(variable, variables.get(variable, ""), "OCIGPU-REQ-2"))
    if "all" in wanted:
        return tuple(sorted(permitted))
    if not wanted:
        return default_capabilities(asker.settings)
    unknown = sorted(wanted.difference(CAPABILITIES))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise RequestError("OCIGPU-REQ-2", f"{variable}: {quoted(unknown[0])}{more}: no such driver capability")
    check_permitted(wanted, "variable", asker, variable)
    return tuple(sorted(wanted))


def check_permitted(wanted: set[str], source: str, asker: Asker, where: str) -> None:
    """Raise RequestError OCIGPU-REQ-2 for driver capabilities that the settings do not permit."""
    refused = sorted(name for name in wanted if why_not("capability", source, asker, name))
    if refused:
        permitted = sorted(permitted_capabilities(asker.settings))
        raise RequestError(
            CONDITIONS["C"].code,
            f"{where}: {', '.join(refused)}: {CONDITIONS['C'].reason}",
            f"supported-driver-capabilities permits: {', '.join(permitted) or 'nothing'}",
        )


def _parse_requirements(variables: "Variables", asker: Asker) -> tuple[tuple[str, str], ...]:
    disabled = variables.get("NVIDIA_DISABLE_REQUIRE", "") in TRUE_WORDS
    if disabled or why_not("requirement", "variable", asker):
        return ()
    requirements = [
        (name, value)
        for name, value in variables.items()
        if value and name.startswith("NVIDIA_REQUIRE_") and not name.startswith("NVIDIA_REQUIRE_JETPACK")
    ]
    if sum(len(name) + len(value) for name, value in requirements) > MAX_REQUIREMENTS:
        raise RequestError("OCIGPU-REQ-4", f"NVIDIA_REQUIRE_*: more than {MAX_REQUIREMENTS} characters together")
    if _is_legacy_image(variables):
        requirements.append(("CUDA_VERSION", f"cuda>={_cuda_version(variables['CUDA_VERSION'])}"))
    if requirements:
        from ocigpu.gpus.nvidia.require import parse_requirement  # CUDA images have one

        for name, value in requirements:
            parse_requirement(value, name)
    return tuple(sorted(requirements))


def _cuda_version(text: str) -> str:
    """Return "MAJOR.MINOR" of a CUDA_VERSION such as "9", "v11.6", "9.0.176-rc1"."""
    core = text.removeprefix("v")
    at = min((i for i in (core.find("-"), core.find("+")) if i >= 0), default=len(core))
    core, suffix = core[:at], core[at:]
    parts = core.split(".")
    # 10 digits: as much as a 32-bit number, and far below the length that int() refuses
    numbers = all(is_number(part) and len(part) <= 10 and int(part) < 1 << 32 for part in parts)
    known = suffix == "" or (len(suffix) > 1 and all(c.isascii() and (c.isalnum() or c in ".+-") for c in suffix))
    if len(parts) > 3 or not numbers or not known:
        raise RequestError(
            "OCIGPU-REQ-4",
            f"CUDA_VERSION: {quoted(text)} is not a version",
            "Set NVIDIA_REQUIRE_CUDA (for example cuda>=12.4) in the image, or NVIDIA_DISABLE_REQUIRE=1.",
        )
    return f"{int(parts[0])}.{int(parts[1]) if len(parts) > 1 else 0}"


def _parse_imex(variables: "Variables", mounted: tuple[str, ...], asker: Asker, notes: list[str]) -> tuple[int, ...]:
    """Return the requested channels, and append ignored requests to ``notes``."""
    source, where, tokens = "mount", MOUNT_SOURCE, mounted
    if not mounted:
        source, where = "variable", IMEX_VARIABLE
        if why_not("imex", source, asker) is CONDITIONS["I"]:  # without a look at what it says
            return ()
        selection, tokens = select_tokens(tuple(_split(where, variables.get(where, ""), "OCIGPU-REQ-6")))
        if selection in ("nothing", "none"):
            return ()
    elif why_not("imex", source, asker):
        return ()
    if not permits("imex", source, asker, where, notes):
        return ()
    if not tokens:
        notes.append(f"{where}=all ignored: channels are requested by number only")
        return ()
    channels = set()
    for token in tokens:
        number = token.removeprefix("channel")  # as its node is called; NVIDIA's runtime takes both
        # compared as text first: int() of what an image wrote must be short, and 01 is not a name of channel 1
        plain = is_number(number) and len(number) <= len(str(MAX_IMEX_CHANNEL)) and number == str(int(number))
        if not plain or int(number) > MAX_IMEX_CHANNEL:
            raise RequestError(
                "OCIGPU-REQ-6", f"{where}: {quoted(token)} is not a channel number from 0 to {MAX_IMEX_CHANNEL}"
            )
        channels.add(int(number))
    if len(channels) > MAX_TOKENS:
        raise RequestError("OCIGPU-REQ-6", f"{where}: more than {MAX_TOKENS} channels")
    return tuple(sorted(channels))
