"""What is to be generated, from the command line: the options that generate, diff, refresh and watch share.

Names, aliases and variables are those of ``nvidia-ctk cdi generate``; ``--max-version`` and the mode vfio are ours.
"""

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from ocigpu.cdi.draft import FEATURE_FLAGS, HOOK_NAMES, MODES, NAME_STRATEGIES, GenerateOptions
from ocigpu.cdi.versions import EARLIEST, VERSIONS, parse_version
from ocigpu.cli.common import ConfigOption, load_settings
from ocigpu.core.cdi_names import check_class, check_vendor
from ocigpu.core.errors import UsageError, quoted
from ocigpu.core.settings import Settings

ACCEPTED_VERSIONS = VERSIONS[VERSIONS.index(EARLIEST) :]
VARIABLE = "NVIDIA_CTK_CDI_GENERATE_"


class GenerateRequest(NamedTuple):
    """What is to be generated, and the settings with the command line's roots and ldconfig in them."""

    options: GenerateOptions
    settings: Settings


def read_generate_request(
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            "--discovery-mode",
            metavar="MODE",
            envvar=f"{VARIABLE}MODE",
            help=f"Kind of devices: {', '.join(MODES)}.",
        ),
    ] = "auto",
    device_name_strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--device-name-strategy",
            metavar="LIST",
            help=f"Names of devices, of {', '.join(NAME_STRATEGIES)}.  [env var: {VARIABLE}DEVICE_NAME_STRATEGIES; "
            "default: index,uuid]",
        ),
    ] = None,
    device_ids: Annotated[
        list[str] | None,
        typer.Option(
            "--device-id",
            "--device-ids",
            "--device",
            "--devices",
            metavar="LIST",
            help=f"Only these devices: index, GPU:MIG, UUID, all or none.  [env var: {VARIABLE}DEVICE_IDS; default: "
            "all]",
        ),
    ] = None,
    no_all_device: Annotated[
        bool, typer.Option("--no-all-device", envvar=f"{VARIABLE}NO_ALL_DEVICE", help='Do not add the device "all".')
    ] = False,
    vendor: Annotated[
        str,
        typer.Option(
            "--vendor",
            "--cdi-vendor",
            metavar="NAME",
            envvar=f"{VARIABLE}VENDOR",
            help='Vendor part of the kind, or "amd" for AMD\'s GPUs.  [default: nvidia.com]',
        ),
    ] = "",
    device_class: Annotated[
        str,
        typer.Option(
            "--class",
            "--cdi-class",
            metavar="NAME",
            envvar=f"{VARIABLE}CLASS",
            help="Class part of the kind.  [default: by the mode, e.g. gpu, gds, imex-channel]",
        ),
    ] = "",
    driver_root: Annotated[
        str,
        typer.Option(
            "--driver-root", metavar="DIR", envvar="NVIDIA_CTK_DRIVER_ROOT", help="Where the driver's files are."
        ),
    ] = "",
    dev_root: Annotated[
        str, typer.Option("--dev-root", metavar="DIR", envvar="NVIDIA_CTK_DEV_ROOT", help="Parent of the host's dev/.")
    ] = "",
    library_search_paths: Annotated[
        list[str] | None,
        typer.Option(
            "--library-search-path",
            metavar="DIRS",
            help="Look for driver libraries in these directories only, separated by commas or colons.  "
            f"[env var: {VARIABLE}LIBRARY_SEARCH_PATHS]",
        ),
    ] = None,
    config_search_paths: Annotated[
        list[str] | None,
        typer.Option(
            "--config-search-path",
            metavar="DIRS",
            help="Look for the driver's configuration files in these directories only.  "
            f"[env var: {VARIABLE}CONFIG_SEARCH_PATHS]",
        ),
    ] = None,
    hook_path: Annotated[
        str,
        typer.Option(
            "--nvidia-cdi-hook-path",
            "--nvidia-ctk-path",
            metavar="PATH",
            envvar="NVIDIA_CTK_CDI_HOOK_PATH",
            help="Program of the hooks; one not named ocigpu-hook gets the vendor's separate hooks.  "
            "[default: ocigpu-hook as installed]",
        ),
    ] = "",
    ldconfig_path: Annotated[
        str,
        typer.Option(
            "--ldconfig-path",
            metavar="PATH",
            envvar=f"{VARIABLE}LDCONFIG_PATH",
            help="The host's ldconfig, for the hook update-ldcache.",
        ),
    ] = "",
    disabled_hooks: Annotated[
        list[str] | None,
        typer.Option(
            "--disable-hook",
            "--disable-hooks",
            metavar="LIST",
            help=f"Hooks to leave out, of all, {', '.join(HOOK_NAMES)}.  [env var: {VARIABLE}DISABLED_HOOKS]",
        ),
    ] = None,
    enabled_hooks: Annotated[
        list[str] | None,
        typer.Option(
            "--enable-hook",
            "--enable-hooks",
            metavar="LIST",
            help=f"Hooks to have although they are disabled.  [env var: {VARIABLE}ENABLED_HOOKS]",
        ),
    ] = None,
    feature_flags: Annotated[
        list[str] | None,
        typer.Option(
            "--feature-flag",
            "--feature-flags",
            metavar="LIST",
            help=f"Of {', '.join(flag for flag in FEATURE_FLAGS if flag != 'disable-nvsandbox-utils')}.  "
            f"[env var: {VARIABLE}FEATURE_FLAGS]",
        ),
    ] = None,
    csv_files: Annotated[
        list[str] | None,
        typer.Option("--csv.file", metavar="LIST", help=f"Mode csv: its files.  [env var: {VARIABLE}CSV_FILES]"),
    ] = None,
    csv_ignore_patterns: Annotated[
        list[str] | None,
        typer.Option(
            "--csv.ignore-pattern",
            metavar="LIST",
            help=f"Mode csv: links to leave out.  [env var: {VARIABLE}CSV_IGNORE_PATTERNS]",
        ),
    ] = None,
    csv_compat_container_root: Annotated[
        str,
        typer.Option(
            "--csv.compat-container-root",
            metavar="DIR",
            envvar=f"{VARIABLE}CSV_CONTAINER_COMPAT_ROOT",
            help="Mode csv: the container's CUDA compatibility libraries.  [default: /usr/local/cuda/compat_orin]",
        ),
    ] = "",
    max_version: Annotated[
        str,
        typer.Option(
            "--max-version",
            metavar="VERSION",
            help="Newest CDI version that the result may need, e.g. 0.5.0 for Podman 4.3.",
        ),
    ] = "",
    config: ConfigOption = "",
) -> GenerateRequest:
    """Return what the options say, checked; raises UsageError that names the option, or SettingsError."""
    defaults = GenerateOptions()
    strategies = _list(device_name_strategies, "DEVICE_NAME_STRATEGIES") or defaults.name_strategies
    ids = _list(device_ids, "DEVICE_IDS") or defaults.device_ids
    disabled = _list(disabled_hooks, "DISABLED_HOOKS")
    enabled = _list(enabled_hooks, "ENABLED_HOOKS")
    flags = _list(feature_flags, "FEATURE_FLAGS")
    _check("--mode", "discovery mode", (mode,), MODES)
    _check("--device-name-strategy", "device name strategy", strategies, NAME_STRATEGIES)
    _check("--disable-hook", "hook", disabled, (*HOOK_NAMES, "all"))
    if "all" in enabled:
        raise UsageError("--enable-hook: enabling all hooks is not supported", f"hooks: {', '.join(HOOK_NAMES)}")
    _check("--enable-hook", "hook", enabled, HOOK_NAMES)
    _check("--feature-flag", "feature flag", flags, FEATURE_FLAGS)
    if max_version:
        _check("--max-version", "CDI version", (parse_version(max_version) or max_version,), ACCEPTED_VERSIONS)
    if vendor and (problem := check_vendor(vendor)):
        raise UsageError(f"--vendor: invalid CDI vendor name: {problem}")
    if device_class and (problem := check_class(device_class)):
        raise UsageError(f"--class: invalid CDI class name: {problem}")
    options = GenerateOptions(
        mode=mode,
        vendor=vendor,
        device_class=device_class,
        name_strategies=strategies,
        device_ids=ids,
        all_device=not no_all_device,
        hook_path=hook_path,
        disabled_hooks=disabled,
        enabled_hooks=enabled,
        feature_flags=flags,
        library_search_paths=_directories(library_search_paths, "LIBRARY_SEARCH_PATHS"),
        config_search_paths=_directories(config_search_paths, "CONFIG_SEARCH_PATHS"),
        csv_files=_list(csv_files, "CSV_FILES"),
        csv_ignore_patterns=_list(csv_ignore_patterns, "CSV_IGNORE_PATTERNS"),
        csv_compat_container_root=csv_compat_container_root or defaults.csv_compat_container_root,
        max_version=parse_version(max_version),
    )
    settings = load_settings(config, driver_root)
    if dev_root:
        settings = settings._replace(driver_dev_root=os.path.abspath(dev_root))
    if ldconfig_path:
        settings = settings._replace(ldconfig=ldconfig_path)
    return GenerateRequest(options, settings)


def _list(given: Sequence[str] | None, variable: str) -> tuple[str, ...]:
    """Return the values of an option that is repeated, separated by commas or both; if not given, of its variable."""
    texts = given if given is not None else [os.environ.get(VARIABLE + variable, "")]
    return tuple(part for text in texts for part in text.split(",") if part)


def _directories(given: Sequence[str] | None, variable: str) -> tuple[str, ...]:
    return tuple(part for text in _list(given, variable) for part in text.split(":") if part)


def _check(option: str, what: str, values: Iterable[str], valid: Sequence[str]) -> None:
    for value in values:
        if value not in valid:
            raise invalid_value(option, what, value, valid)


def invalid_value(option: str, what: str, value: str, valid: Sequence[str]) -> UsageError:
    """Return the error for a value that is not one of the valid ones; its hint names those, and the nearest one."""
    near = difflib.get_close_matches(value, valid, 1, 0.5)
    hint = f"valid: {', '.join(valid)}"
    return UsageError(f"{option}: invalid {what}: {quoted(value)}", f"did you mean {near[0]}? {hint}" if near else hint)


def takes_generate_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options of :func:`read_generate_request` after its own.

    The command is called with the request in the place of its first parameter.
    """
    shared = inspect.signature(read_generate_request).parameters
    own = list(inspect.signature(command).parameters.values())[1:]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        request = read_generate_request(**{name: values.pop(name) for name in shared})
        command(request, **values)

    parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in (*own, *shared.values())]
    # typer reads a command's options from these two.
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options
