"""``ocigpu cdi generate``, ``diff`` and ``refresh``: what the host would give, and what is in the file.

Names, aliases and variables of the options, which ``ocigpu watch`` has too, are those of ``nvidia-ctk cdi generate``;
``--max-version`` and the mode vfio are ours.
"""

import os

from ocigpu.cdi.hook_words import HOOK_NAMES
from ocigpu.cdi.versions import EARLIEST, VERSIONS, parse_version
from ocigpu.cdi.write import DEFAULT_OUTPUT, with_suffix
from ocigpu.cli.cdi.files import (
    check_output,
    find_overlaps,
    invalid_value,
    output_file,
    read_valid_spec,
    say,
    say_skipped,
    write_output,
)
from ocigpu.cli.front import show
from ocigpu.cli.front.arguments import takes
from ocigpu.cli.front.common import load_settings
from ocigpu.core.cdi_names import check_part
from ocigpu.core.errors import CdiError, OcigpuError, UsageError, printable
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.gpus.offer import FEATURE_FLAGS, MODES, NAME_STRATEGIES, GenerateOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ACCEPTED_VERSIONS = VERSIONS[VERSIONS.index(EARLIEST) :]
USUAL_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
"""Where engines look unless they are told otherwise (CDI SPEC.md)."""
BLIND_BUILDS = (5, 4)
"""The Podman whose builds look in the first of these alone (seen with 5.4.2; 5.8.6 looks in both)."""
VARIABLE = "NVIDIA_CTK_CDI_GENERATE_"


class GenerateRequest(NamedTuple):
    """What is to be generated, and the settings with the command line's roots and ldconfig in them."""

    options: GenerateOptions
    settings: Settings


def read_generate_request(
    mode: str = "auto",
    device_name_strategy: list[str] | None = None,
    device_id: list[str] | None = None,
    no_all_device: bool = False,
    vendor: str = "",
    class_: str = "",
    driver_root: str = "",
    dev_root: str = "",
    library_search_path: list[str] | None = None,
    config_search_path: list[str] | None = None,
    nvidia_cdi_hook_path: str = "",
    ldconfig_path: str = "",
    disable_hook: list[str] | None = None,
    enable_hook: list[str] | None = None,
    feature_flag: list[str] | None = None,
    csv_file: list[str] | None = None,
    csv_ignore_pattern: list[str] | None = None,
    csv_compat_container_root: str = "",
    max_version: str = "",
    config: str = "",
) -> GenerateRequest:
    """Return what the options say, checked; raises UsageError that names the option, or SettingsError."""
    defaults = GenerateOptions()
    strategies = _list(device_name_strategy, "DEVICE_NAME_STRATEGIES") or defaults.name_strategies
    ids = _list(device_id, "DEVICE_IDS") or defaults.device_ids
    disabled = _list(disable_hook, "DISABLED_HOOKS")
    enabled = _list(enable_hook, "ENABLED_HOOKS")
    flags = _list(feature_flag, "FEATURE_FLAGS")
    _check("--mode", "discovery mode", (mode,), MODES)
    _check("--device-name-strategy", "device name strategy", strategies, NAME_STRATEGIES)
    _check("--disable-hook", "hook", disabled, (*HOOK_NAMES, "all"))
    if "all" in enabled:
        raise UsageError("--enable-hook: enabling all hooks is not supported", f"hooks: {', '.join(HOOK_NAMES)}")
    _check("--enable-hook", "hook", enabled, HOOK_NAMES)
    _check("--feature-flag", "feature flag", flags, FEATURE_FLAGS)
    if max_version:
        _check("--max-version", "CDI version", (parse_version(max_version) or max_version,), ACCEPTED_VERSIONS)
    if vendor and (problem := check_part("vendor", vendor)):
        raise UsageError(f"--vendor: invalid CDI vendor name: {problem}")
    if class_ and (problem := check_part("class", class_)):
        raise UsageError(f"--class: invalid CDI class name: {problem}")
    options = GenerateOptions(
        mode=mode,
        vendor=vendor,
        device_class=class_,
        name_strategies=strategies,
        device_ids=ids,
        all_device=not no_all_device,
        hook_path=nvidia_cdi_hook_path,
        disabled_hooks=disabled,
        enabled_hooks=enabled,
        feature_flags=flags,
        library_search_paths=_directories(library_search_path, "LIBRARY_SEARCH_PATHS"),
        config_search_paths=_directories(config_search_path, "CONFIG_SEARCH_PATHS"),
        csv_files=_list(csv_file, "CSV_FILES"),
        csv_ignore_patterns=_list(csv_ignore_pattern, "CSV_IGNORE_PATTERNS"),
        csv_compat_container_root=csv_compat_container_root or defaults.csv_compat_container_root,
        max_version=parse_version(max_version),
    )
    settings = load_settings(config, driver_root)
    if dev_root:
        settings = settings._replace(driver_dev_root=os.path.abspath(dev_root))
    if ldconfig_path:
        settings = settings._replace(ldconfig=ldconfig_path)
    return GenerateRequest(options, settings)


def _list(given: "Sequence[str] | None", variable: str) -> tuple[str, ...]:
    """Return the values of an option that is repeated, separated by commas or both; if not given, of its variable."""
    texts = given if given is not None else [os.environ.get(VARIABLE + variable, "")]
    return tuple(part for text in texts for part in text.split(",") if part)


def _directories(given: "Sequence[str] | None", variable: str) -> tuple[str, ...]:
    return tuple(part for text in _list(given, variable) for part in text.split(":") if part)


def _check(option: str, what: str, values: "Iterable[str]", valid: "Sequence[str]") -> None:
    for value in values:
        if value not in valid:
            raise invalid_value(option, what, value, valid)


@takes(read_generate_request)
def generate_command(
    request: GenerateRequest,
    output: str = "",
    format_: str = "",
    json: bool = False,
    strict: bool = False,
    quiet: bool = False,
) -> None:
    from ocigpu.cdi.generate import generate_within

    path, format_name, notes = output_file(output, format_, json)
    with show.Progress("still reading this host's devices: NVML can take a while to answer"):
        limit = newest_for_engines(path, request.settings) if is_read_by_engines(path, request.settings) else ""
        parts = generate_within(limit, request.options, request.settings)
    made = parts[0].generated
    if strict and made.skipped:
        say_skipped(made.skipped)
        raise CdiError("OCIGPU-CDI-7", f"generate: {show.count(len(made.skipped), 'device')} would be left out", "")
    for suffix, part in parts:
        write_output(part.spec, with_suffix(path, suffix), format_name)
    if not quiet:
        say(f"note: {text}" for text in (*notes, *made.notes, *_collisions(path, request.settings)))
        say_skipped(made.skipped)
        for suffix, part in parts:
            where = f" to {with_suffix(path, suffix)}" if path else ""
            devices = show.count(len(part.spec["devices"]), "device")
            version = part.spec["cdiVersion"]
            say([f"Generated CDI specification with version {version}{where}: {part.spec['kind']}, {devices}"])


def _collisions(path: str, settings: Settings) -> list[str]:
    """Return what other files do to the devices of the file just written, if it is in a directory of specifications."""
    if not path or os.path.dirname(path := os.path.abspath(path)) not in settings.cdi_spec_dirs:
        return []
    from ocigpu.cdi.registry import read_registry

    overlaps = find_overlaps(read_registry(settings))
    return [overlap.describe() for overlap in overlaps if path in (overlap.file, overlap.by)]


@takes(read_generate_request)
def diff_command(request: GenerateRequest, file: str = DEFAULT_OUTPUT) -> "show.Answer":
    from ocigpu.cdi.compare import compare_specs
    from ocigpu.cdi.refresh import generate_for
    from ocigpu.gpus.fingerprint import stale_reasons

    old = read_valid_spec(file)
    with show.Progress("still reading this host's devices: NVML can take a while to answer"):
        newest = newest_for_engines(file, request.settings)
        made = generate_for(old, request.options, request.settings, newest)[0].generated
    differences = compare_specs(old, made.spec)
    reasons = stale_reasons(old.get("annotations") or {}, request.settings)
    data = {
        "file": file,
        "equal": not differences,
        "reasons": reasons,
        "differences": [difference._asdict() for difference in differences],
        "notes": made.notes,
        "skipped": made.skipped,
    }
    yield data, int(bool(differences))
    summary = show.count(len(differences), "difference") if differences else "as this host would generate it now"
    for line in (*(one.describe() for one in differences), *(f"why: {one}" for one in reasons), f"{file}: {summary}"):
        print(printable(line))
    say_skipped(made.skipped)


def is_read_by_engines(path: str, settings: Settings) -> bool:
    """Whether a file is in a directory where an engine looks for specifications."""
    if not path:
        return False
    directory, root = os.path.dirname(os.path.abspath(path)), _other_root(path, settings)
    if root:
        directory = f"/{os.path.relpath(directory, root)}"
    directory = os.path.realpath(directory)
    if directory in map(os.path.realpath, USUAL_DIRECTORIES):
        return True
    from ocigpu.engines.status import read_spec_dirs

    return directory in map(os.path.realpath, read_spec_dirs(root or "/"))


def find_blind(path: str, settings: Settings) -> list[str]:
    """Return which engines and builders of this machine do not look where a file is, a sentence each."""
    from ocigpu.engines.checker import program_version
    from ocigpu.engines.status import find_engines

    if _other_root(path, settings):
        return []
    name, directory = os.path.basename(path), os.path.realpath(os.path.dirname(os.path.abspath(path)))
    notes = []
    for status in find_engines():
        directories = [os.path.realpath(one) for one in status.cdi_spec_dirs]
        if status.cdi != "off" and directories and directory not in directories:
            named = " and ".join(status.cdi_spec_dirs)
            notes.append(f"{status.name} looks only in {named}: --output {status.cdi_spec_dirs[-1]}/{name}")
    usual = USUAL_DIRECTORIES[0]
    version = program_version("/", "podman")
    there = directory == os.path.realpath(usual) or os.path.exists(f"{usual}/{name}")
    if version == BLIND_BUILDS and not there:
        notes.append(
            f"podman build --device of 5.4 looks only in {usual}: for builds, ocigpu cdi generate --output"
            f" {usual}/{name} after each change of the driver"
        )
    return notes


def _other_root(path: str, settings: Settings) -> str:
    """Return the root of the host that a file belongs to: a simulated one, or one whose driver is elsewhere."""
    for root in (settings.simulation_root, settings.driver_root):
        if root not in ("", "/") and os.path.abspath(path).startswith(f"{os.path.abspath(root)}/"):
            return os.path.abspath(root)
    return ""


def newest_for_engines(path: str, settings: Settings) -> str:
    """Return the newest version of a file that all engines read which are installed, "" where none is known.

    The engines are this machine's, for a file below another root those of that.
    """
    from ocigpu.cdi.versions import newest_version
    from ocigpu.doctor.files import RootFiles
    from ocigpu.doctor.versions import read_engine_releases

    try:
        releases = read_engine_releases(RootFiles(_other_root(path, settings)))
    except (OcigpuError, OSError):  # a package database that cannot be read
        return ""
    found = {newest_version(engine, release) or "" for engine, release in releases.items()} - {""}
    return min(found, key=VERSIONS.index, default="")


@takes(read_generate_request)
def refresh_command(request: GenerateRequest, output: str = "", quiet: bool = False) -> "show.Answer":
    from ocigpu.cdi.refresh import refresh

    check_output(output)
    with show.Progress("still reading this host's devices: NVML can take a while to answer"):
        target = output or DEFAULT_OUTPUT
        done = refresh(request.options, request.settings, target, newest_for_engines(target, request.settings))
    yield done._asdict()
    if not quiet:
        say(f"note: {text}" for text in (*done.notes, *find_blind(done.path, request.settings)))
        say_skipped(done.skipped)
    if done.changed:
        print(printable(f"{done.path}: written: {'; '.join(done.reasons)}"))
    elif not quiet:
        print(printable(f"{done.path}: up to date"))
    for path in done.beside:
        print(printable(f"{path}: written"))
