"""The settings file as a pydantic model: for ``ocigpu config check``, which names every problem at once.

The hot path reads the same file with :func:`ocigpu.core.settings.parse_settings`, which stops at the first problem and
needs the standard library only.  A test holds both to the same answers.
"""

import difflib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from ocigpu.core.cdi_names import check_kind
from ocigpu.core.errors import quoted
from ocigpu.core.settings import CAPABILITIES, KEYS


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("has a NUL character")
    return value


def _absolute(value: str) -> str:
    if value and not value.startswith("/"):
        raise ValueError(f"{quoted(value)} is not an absolute path")
    return value


def _host_path(value: str) -> str:
    # "@" is the vendor's mark for "a path of the host", which it always is here.
    return _absolute(value.removeprefix("@"))


def _capability_list(value: str) -> str:
    if value != "all":
        for item in filter(None, (part.strip() for part in value.split(","))):
            if item not in CAPABILITIES:
                raise ValueError(f"{quoted(item)} is not one of {', '.join(CAPABILITIES)}")
    return value


def _kind(value: str) -> str:
    problem = check_kind(value)
    if problem:
        raise ValueError(f"{quoted(value)}: {problem}")
    return value


def _not_empty(value: str) -> str:
    if not value:
        raise ValueError("is empty")
    return value


Text = Annotated[StrictStr, AfterValidator(_no_nul)]
AbsolutePath = Annotated[Text, AfterValidator(_absolute)]
HostPath = Annotated[Text, AfterValidator(_host_path)]
Capabilities = Annotated[Text, AfterValidator(_capability_list)]
Name = Annotated[StrictStr, AfterValidator(_not_empty)]
DirectoryPath = Annotated[Name, AfterValidator(_no_nul), AfterValidator(_absolute)]
Kind = Annotated[Text, AfterValidator(_kind)]


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class Table(BaseModel):
    """A table of the file: keys in kebab case, nothing unknown, nothing converted."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=_kebab)


class DriverTable(Table):
    """``[driver]``: where the driver's files are."""

    root: AbsolutePath = "/"
    dev_root: AbsolutePath = ""
    ldcache: AbsolutePath = "/etc/ld.so.cache"


class RuntimeTable(Table):
    """``[runtime]``: the shim."""

    runtimes: list[Name] = Field(default_factory=lambda: ["runc", "crun"])
    log: AbsolutePath = ""
    log_level: Literal["error", "warning", "info", "debug"] = "info"


class HookTable(Table):
    """``[hook]``: the prestart hook."""

    path: AbsolutePath = ""
    log: AbsolutePath = ""


class FeaturesTable(Table):
    """``[features]``: switches."""

    ignore_imex_channel_requests: StrictBool = False
    no_additional_gids_for_device_nodes: StrictBool = False


class CdiTable(Table):
    """``[cdi]``: CDI specifications."""

    spec_dirs: list[DirectoryPath] = Field(default_factory=lambda: ["/etc/cdi", "/var/run/cdi"])
    default_kind: Kind = "nvidia.com/gpu"
    annotation_prefixes: list[Name] = Field(default_factory=lambda: ["cdi.k8s.io/"])
    engine_filters_annotations: StrictBool = False
    environment_vendors: list[Name] = Field(
        default_factory=lambda: ["nvidia.com", "amd.com", "k8s.device-plugin.nvidia.com"]
    )


class SimulationTable(Table):
    """``[simulation]``: only in the settings of a simulated host."""

    root: AbsolutePath = ""


class SettingsFile(Table):
    """The whole settings file."""

    mode: Literal["auto", "hook", "legacy", "spec", "jit-cdi", "cdi"] = "auto"
    disable_require: StrictBool = False
    swarm_resource: Text = ""
    accept_nvidia_visible_devices_envvar_when_unprivileged: StrictBool = True
    accept_nvidia_visible_devices_as_volume_mounts: StrictBool = False
    supported_driver_capabilities: Capabilities = ",".join(CAPABILITIES)
    no_cgroups: StrictBool = False
    ldconfig: HostPath = ""
    cuda_compat_mode: Literal["ldconfig", "disabled"] = "ldconfig"
    trace: AbsolutePath = ""
    driver: DriverTable = DriverTable()
    runtime: RuntimeTable = RuntimeTable()
    hook: HookTable = HookTable()
    features: FeaturesTable = FeaturesTable()
    cdi: CdiTable = CdiTable()
    simulation: SimulationTable = SimulationTable()


def find_problems(document: dict[str, Any]) -> list[str]:
    """Return what is wrong with a parsed settings file, one sentence for each key; empty when nothing is."""
    try:
        SettingsFile.model_validate(document)
    except ValidationError as error:
        return [_problem(details) for details in error.errors(include_url=False)]
    return []


def _problem(details: Any) -> str:
    name = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, [key.name for key in KEYS], 1, 0.5)
        return f"unknown key {quoted(name)}" + (f": did you mean {near[0]}?" if near else "")
    message = str(details["msg"]).removeprefix("Value error, ")
    return f"{name}: {message[:1].lower()}{message[1:]}"
