"""What the exporter is told: the flags and variables of dcgm-exporter, each obeyed or refused by its name.  Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ocigpu.core.errors import SettingsError, UsageError, quoted

TRUE, FALSE = ("1", "t", "T", "TRUE", "true", "True"), ("0", "f", "F", "FALSE", "false", "False")
MAX_MILLISECONDS = 24 * 3600 * 1000
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_D = "DCGM_EXPORTER_"


class ExporterOptions(NamedTuple):
    """Every option by name; see :data:`OPTIONS`.  Times are in seconds."""

    collectors: str = ""
    address: str = ":9400"
    collect_interval: float = 30.0
    kubernetes: bool = False
    kubernetes_gpu_id_type: str = "uid"
    kubernetes_virtual_gpus: bool = False
    kubernetes_enable_dra: bool = False
    nvidia_resource_names: tuple[str, ...] = ()
    resource_prefixes: tuple[str, ...] = ("nvidia.com/",)
    pod_resources_kubelet_socket: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    devices: str = "f"
    hpc_job_mapping_dir: str = ""
    xid_count_window_size: float = 300.0
    clock_events_count_window_size: float = 300.0
    no_hostname: bool = False
    hostname_label: str = "hostname"
    use_old_namespace: bool = False
    replace_blanks_in_model_name: bool = False
    enable_gpu_bind_unbind_watch: bool = False
    gpu_bind_unbind_poll_interval: float = 1.0
    log_format: str = "text"
    debug: bool = False


class ExporterOption(NamedTuple):
    """One option.  ``kind``: bool, text, list, milliseconds or duration ("1s")."""

    name: str
    kind: str
    flags: tuple[str, ...]
    variables: tuple[str, ...]
    meaning: str
    choices: tuple[str, ...] = ()


class Refused(NamedTuple):
    """An option of dcgm-exporter that cannot be obeyed.

    ``harmless``: values that ask for nothing, ANYTHING for every one.  ``bare``: the flag may be without a value.
    """

    flags: tuple[str, ...]
    variables: tuple[str, ...]
    harmless: tuple[str, ...]
    why: str
    bare: bool = False


ANYTHING = ("*",)


def _option(
    name: str, kind: str, flags: str, variables: str, meaning: str, choices: tuple[str, ...] = ()
) -> ExporterOption:
    return ExporterOption(name, kind, tuple(flags.split()), tuple(variables.split()), meaning, choices)


OPTIONS = (
    _option(
        "collectors", "text", "collectors f", f"{_D}COLLECTORS", "file that lists the metrics; empty: the usual ones"
    ),
    _option("address", "text", "address a", f"{_D}LISTEN", "where to listen, [HOST]:PORT"),
    _option("collect_interval", "milliseconds", "collect-interval c", f"{_D}INTERVAL", "time between two samples"),
    _option("kubernetes", "bool", "kubernetes k", f"{_D}KUBERNETES", "ask the kubelet whose pods have the GPUs"),
    _option(
        "kubernetes_gpu_id_type", "text", "kubernetes-gpu-id-type", f"{_D}KUBERNETES_GPU_ID_TYPE",
        "the kubelet's names of GPUs; either are understood", ("uid", "device-name"),
    ),
    _option(
        "kubernetes_virtual_gpus", "bool", "kubernetes-virtual-gpus", "KUBERNETES_VIRTUAL_GPUS",
        "label vgpu: the number of the replica; GPU_UTIL and FB_USED by pod",
    ),
    _option(
        "kubernetes_enable_dra", "bool", "kubernetes-enable-dra", "KUBERNETES_ENABLE_DRA",
        "labels dra_claim_name and so on, of the claims by which pods have GPUs",
    ),
    _option(
        "nvidia_resource_names", "list", "nvidia-resource-names", "NVIDIA_RESOURCE_NAMES",
        "further resources that are GPUs",
    ),
    _option(
        "resource_prefixes", "list", "resource-prefixes", "OCIGPU_EXPORTER_RESOURCE_PREFIXES",
        "resources whose names begin like this are GPUs",
    ),
    _option(
        "pod_resources_kubelet_socket", "text", "pod-resources-kubelet-socket", "DCGM_POD_RESOURCES_KUBELET_SOCKET",
        "the kubelet's socket",
    ),
    _option(
        "devices", "text", "devices d", f"{_D}DEVICES_STR",
        "f: GPUs, or their instances where MIG is enabled; g or g:0,2-4: GPUs; i: GPU instances",
    ),
    _option(
        "hpc_job_mapping_dir", "text", "hpc-job-mapping-dir", "DCGM_HPC_JOB_MAPPING_DIR",
        "directory of files GPU or GPU.INSTANCE that list jobs",
    ),
    _option(
        "xid_count_window_size", "milliseconds", "xid-count-window-size x", f"{_D}XID_COUNT_WINDOW_SIZE",
        "window of DCGM_EXP_XID_ERRORS_COUNT",
    ),
    _option(
        "clock_events_count_window_size", "milliseconds", "clock-events-count-window-size",
        f"{_D}CLOCK_EVENTS_COUNT_WINDOW_SIZE", "window of DCGM_EXP_CLOCK_EVENTS_COUNT",
    ),
    _option("no_hostname", "bool", "no-hostname n", f"{_D}NO_HOSTNAME", "leave the label with the host's name out"),
    _option(
        "hostname_label", "text", "hostname-label", "OCIGPU_EXPORTER_HOSTNAME_LABEL",
        "its name; dcgm-exporter called it Hostname until May 2026", ("hostname", "Hostname"),
    ),
    _option(
        "use_old_namespace", "bool", "use-old-namespace o", f"{_D}USE_OLD_NAMESPACE",
        "labels uuid, pod_name, pod_namespace and container_name",
    ),
    _option(
        "replace_blanks_in_model_name", "bool", "replace-blanks-in-model-name rbmn rb",
        f"{_D}REPLACE_BLANKS_IN_MODEL_NAME", "dashes instead",
    ),
    _option(
        "enable_gpu_bind_unbind_watch", "bool", "enable-gpu-bind-unbind-watch", f"{_D}ENABLE_GPU_BIND_UNBIND_WATCH",
        "look for GPUs that come and go between samples too",
    ),
    _option(
        "gpu_bind_unbind_poll_interval", "duration", "gpu-bind-unbind-poll-interval",
        f"{_D}GPU_BIND_UNBIND_POLL_INTERVAL", "how often",
    ),
    _option("log_format", "text", "log-format", f"{_D}LOG_FORMAT", "form of log lines", ("text", "json")),
    _option("debug", "bool", "debug", f"{_D}DEBUG", "log a line for each sample"),
)  # fmt: skip
"""Every option that is obeyed, in the order of the help."""

_API = "it needs look-ups at the API server, and pod-resources has no such data"


def _refuse(
    flags: str, variables: str, why: str, harmless: tuple[str, ...] = FALSE, bare: bool | None = None
) -> Refused:
    return Refused(
        tuple(flags.split()), tuple(variables.split()), harmless, why, harmless == FALSE if bare is None else bare
    )


REFUSED = (
    _refuse("kubernetes-enable-pod-labels", f"{_D}KUBERNETES_ENABLE_POD_LABELS", _API),
    _refuse("kubernetes-enable-pod-uid", f"{_D}KUBERNETES_ENABLE_POD_UID", _API),
    _refuse("kubernetes-pod-label-allowlist-regex", f"{_D}KUBERNETES_POD_LABEL_ALLOWLIST_REGEX", _API, ()),
    _refuse(
        "configmap-data m", f"{_D}CONFIGMAP_DATA",
        "mount the ConfigMap and name its file with --collectors: it is read again when it changes", ("none",),
    ),
    _refuse("remote-hostengine-info r", "DCGM_REMOTE_HOSTENGINE_INFO", "there is no DCGM: NVML is asked", ()),
    _refuse("switch-devices s", f"{_D}OTHER_DEVICES_STR", "NVSwitches do not answer to NVML", ("f",)),
    _refuse("cpu-devices p", f"{_D}CPU_DEVICES_STR", "CPUs do not answer to NVML", ("f",)),
    _refuse("fake-gpus", f"USE_FAKE_GPUS {_D}USE_FAKE_GPUS", "make a simulated host: ocigpu sim create"),
    _refuse(
        "web-config-file", f"{_D}WEB_CONFIG_FILE",
        "TLS and passwords are the work of a proxy, or listen on 127.0.0.1 only", (),
    ),
    _refuse("web-systemd-socket", f"{_D}SYSTEMD_SOCKET", "it opens its own socket: --address"),
    _refuse("web-read-timeout", f"{_D}WEB_READ_TIMEOUT", "a request has 10 s", ("10s",)),
    _refuse("web-write-timeout", f"{_D}WEB_WRITE_TIMEOUT", "an answer has 10 s", ("10s",)),
    _refuse("enable-pprof", f"{_D}ENABLE_PPROF", "there is no Go runtime to look at"),
    _refuse("dump-enabled", f"{_D}DUMP_ENABLED", "there are no dumps: --debug logs each sample"),
    _refuse("dump-directory", f"{_D}DUMP_DIRECTORY", "it means nothing without --dump-enabled", ANYTHING),
    _refuse("dump-retention", f"{_D}DUMP_RETENTION", "it means nothing without --dump-enabled", ANYTHING),
    _refuse(
        "dump-compression", f"{_D}DUMP_COMPRESSION", "it means nothing without --dump-enabled", ANYTHING, bare=True
    ),
    _refuse(
        "disable-startup-validate", "DISABLE_STARTUP_VALIDATE", "nothing is validated that could be left out", ANYTHING,
        bare=True,
    ),
    _refuse("config-file", f"{_D}CONFIG_FILE", "options are flags and variables; metrics are in --collectors", ()),
    _refuse("container-labels", f"{_D}CONTAINER_LABELS", "the runtime is not asked: use --kubernetes"),
    _refuse("container-runtime-socket", "DCGM_CONTAINER_RUNTIME_SOCKET", "the runtime is not asked", ANYTHING),
    _refuse("enable-dcgm-log", f"{_D}ENABLE_DCGM_LOG", "there is no DCGM"),
    _refuse("dcgm-log-level", f"{_D}DCGM_LOG_LEVEL", "there is no DCGM", ("NONE",)),
)  # fmt: skip
"""Options of dcgm-exporter that are not obeyed, and why."""

_BY_FLAG = {flag: option for option in OPTIONS for flag in option.flags}
_REFUSED_BY_FLAG = {flag: refused for refused in REFUSED for flag in refused.flags}


def parse_options(words: Sequence[str], environment: Mapping[str, str]) -> ExporterOptions:
    """Return the options: of each the flag, else the variable, else the default; an empty variable counts as not set.

    Flags are written "--name=value", "--name value" or, for a bool, "--name"; that of a list adds to it when it is
    given again.  Raises UsageError for what is no flag,
    and SettingsError (OCIGPU-KUBE-4) that names the flag or variable whose value is refused.
    """
    values = {}
    for option in OPTIONS:
        variable = next((name for name in option.variables if environment.get(name)), "")
        if variable:
            values[option.name] = _value(option, environment[variable], variable)
    for refused in REFUSED:
        for name in refused.variables:
            if environment.get(name):
                _check_refused(refused, environment[name], name)
    left = list(words)
    given: set[str] = set()
    while left:
        flag, value = _take(left)
        if flag in _REFUSED_BY_FLAG:
            _check_refused(_REFUSED_BY_FLAG[flag], value, f"--{flag}")
        else:
            option = _BY_FLAG[flag]
            found = _value(option, value, f"--{option.flags[0]}")
            again = option.kind == "list" and option.name in given
            values[option.name] = values[option.name] + found if again else found
            given.add(option.name)
    options = ExporterOptions(**values)
    parse_devices(options.devices)
    parse_address(options.address)
    return options


def _take(words: list[str]) -> tuple[str, str]:
    """Take a flag and its value from the beginning of the words."""
    word = words.pop(0)
    flag, equals, value = word.lstrip("-").partition("=")
    if not word.startswith("-") or (flag not in _BY_FLAG and flag not in _REFUSED_BY_FLAG):
        raise UsageError(f"no such option: {quoted(word)}", "see: ocigpu exporter --help")
    if equals:
        return flag, value
    is_bool = _BY_FLAG[flag].kind == "bool" if flag in _BY_FLAG else _REFUSED_BY_FLAG[flag].bare
    if is_bool:
        return flag, "true"
    if not words:
        raise UsageError(f"--{flag} needs a value", "see: ocigpu exporter --help")
    return flag, words.pop(0)


def _check_refused(refused: Refused, value: str, where: str) -> None:
    if value and value not in refused.harmless and refused.harmless != ANYTHING:
        raise options_error(f"{where} {quoted(value)} is not supported: {refused.why}")


def _value(option: ExporterOption, text: str, where: str) -> Any:
    if option.kind == "bool":
        if text not in (*TRUE, *FALSE):
            raise options_error(f"{where}: {quoted(text)} is not true or false")
        return text in TRUE
    if option.kind == "milliseconds":
        if not (text.isascii() and text.isdigit() and 0 < int(text[:12]) <= MAX_MILLISECONDS):
            raise options_error(f"{where}: {quoted(text)} is not a number of milliseconds, 1 to {MAX_MILLISECONDS}")
        return int(text) / 1000
    if option.kind == "duration":
        parts = _DURATION.fullmatch(text)
        if not parts or not float(parts[1]):
            raise options_error(f"{where}: {quoted(text)} is not a time such as 1s")
        return float(parts[1]) * _SECONDS[parts[2]]
    if option.kind == "list":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if option.choices and text not in option.choices:
        raise options_error(f"{where}: {quoted(text)}: not one of {', '.join(option.choices)}")
    return text


class Devices(NamedTuple):
    """What series are for.  ``kind``: f, g or i; ``gpus``: indices, empty for all."""

    kind: str
    gpus: frozenset[int] = frozenset()


def parse_devices(text: str) -> Devices:
    """Return the meaning of --devices; raises SettingsError."""
    kind, colon, ids = text.partition(":")
    if kind not in ("f", "g", "i"):
        raise options_error(f"--devices: {quoted(text)}: it begins with f, g or i")
    if not colon:
        return Devices(kind)
    if kind != "g":
        raise options_error(f"--devices: {quoted(text)}: only g takes numbers: those of instances are DCGM's own")
    gpus: set[int] = set()
    for part in ids.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(end.isascii() and end.isdigit() and len(end) < 5 for end in ends):
            raise options_error(f"--devices: {quoted(text)}: {quoted(part)} is not a number or range")
        gpus.update(range(int(ends[0]), int(ends[1]) + 1))
    return Devices(kind, frozenset(gpus))


def parse_address(text: str) -> tuple[str, int]:
    """Return host ("" for all) and port of "[HOST]:PORT"; raises SettingsError."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise options_error(f"--address: {quoted(text)} is not [HOST]:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def options_error(cause: str) -> SettingsError:
    """Return the error of an option."""
    return SettingsError("OCIGPU-KUBE-4", cause)
