"""The exporter's options: the flags and variables of dcgm-exporter, each supported or rejected by name.  Pure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ocigpu.core.errors import SettingsError, quoted
from ocigpu.core.tokens import is_number
from ocigpu.kubernetes.cluster.names import POD_RESOURCES_SOCKET
from ocigpu.system.options import find_values, read_flags, read_table
from ocigpu.system.service import split_address

CODE = "OCIGPU-KUBE-4"


class ExporterOptions(NamedTuple):
    """Every option by name; see :data:`OPTIONS`.  Times are in seconds."""

    collectors: str = ""
    address: str = ":9400"
    collect_interval: float = 30.0
    kubernetes: bool = False
    kubernetes_gpu_id_type: str = "uid"
    kubernetes_virtual_gpus: bool = False
    kubernetes_enable_dra: bool = False
    kubernetes_enable_pod_labels: bool = False
    kubernetes_enable_pod_uid: bool = False
    kubernetes_pod_label_allowlist_regex: tuple[str, ...] = ()
    nvidia_resource_names: tuple[str, ...] = ()
    resource_prefixes: tuple[str, ...] = ("nvidia.com/",)
    pod_resources_kubelet_socket: str = POD_RESOURCES_SOCKET
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
    disabled_health_checks: str = ""
    enabled_health_checks: str = ""
    log_format: str = "text"
    debug: bool = False


_TABLE = read_table(Path(__file__).with_name("options.toml"))
OPTIONS = tuple(option for option in _TABLE if not option.refused)
"""Every option that is obeyed, in the order of the help."""
REFUSED = tuple(option for option in _TABLE if option.refused)


def parse_options(words: Sequence[str], environment: Mapping[str, str]) -> ExporterOptions:
    """Return the options: for each the flag, else the variable, else the default; an empty variable counts as unset.

    Raises UsageError for an unknown flag, and SettingsError (OCIGPU-KUBE-4) that names the flag or variable with a
    refused value.
    """
    try:
        options = ExporterOptions(**find_values(_TABLE, read_flags(words, _TABLE, "exporter"), environment))
    except SettingsError as error:
        error.code = CODE
        raise
    parse_devices(options.devices)
    parse_address(options.address)
    return options


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
        if not all(is_number(end) and len(end) < 5 for end in ends):
            raise options_error(f"--devices: {quoted(text)}: {quoted(part)} is not a number or range")
        gpus.update(range(int(ends[0]), int(ends[1]) + 1))
    return Devices(kind, frozenset(gpus))


def parse_address(text: str) -> tuple[str, int]:
    """Return host ("" for all) and port of "[HOST]:PORT"; raises SettingsError."""
    if found := split_address(text):
        return found
    raise options_error(f"--address: {quoted(text)} is not [HOST]:PORT")


def options_error(cause: str) -> SettingsError:
    """Return the error of an option."""
    return SettingsError(CODE, cause)
