"""Files of NVIDIA's mig-parted, version v1; every key is either supported or rejected with its place.

They are MIG layouts by name, and those that need no file; checkpoints, which record the partitioning of GPUs with the
place of each instance; hooks, programs to run around a change.  A hook gets its own variables, those of the command's
options, and PATH, which mig-parted omits.  Sources: github.com/NVIDIA/mig-parted, api/spec/v1, api/hooks/v1,
api/checkpoint/v1 and pkg/types: in a checkpoint profiles are named by NVML's enumerators nvmlGpuInstanceProfile and
nvmlComputeInstanceProfile.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from ocigpu.cdi.yaml_child import RefusedError, build
from ocigpu.core.errors import HostError, SettingsError, printable, quoted, suggest
from ocigpu.gpus.nvidia.mig import PRE_CONFIG, PRE_MODE
from ocigpu.gpus.nvidia.mig_layout import GpuChange, GpuInstance, GpuLayout, WantedMig, balanced, plan_back
from ocigpu.gpus.nvidia.selection import gpu_ranges
from ocigpu.system.options import read_text, shown
from ocigpu.system.programs import run_program

_ID = r"0x[0-9A-Fa-f]{8}"
_FILTER = re.compile(rf"({_ID})(?::({_ID}))?")
"""Device id and vendor id of the GPU, and of its board."""
M = TypeVar("M", bound=BaseModel)
Count = Annotated[int, Field(ge=0, le=1000)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=lambda name: name.replace("_", "-"))


def _devices(value: Any) -> Any:
    if value == "all":
        return value
    if not isinstance(value, list):
        raise ValueError(f"{shown(value)} is neither all nor a list of numbers of GPUs")
    for one in value:
        if type(one) is not int or one < 0:
            raise ValueError(f"{shown(one)} is not the number of a GPU")
    return value


def _filters(value: Any) -> Any:
    found = value if isinstance(value, list) else [value]
    wrong = [one for one in found if not isinstance(one, str) or not _FILTER.fullmatch(one)]
    if wrong:
        raise ValueError(f"{shown(wrong[0])} is not the PCI id of a device, such as 0x20B210DE")
    return found


class LayoutEntry(_Model):
    """An entry of a layout: which GPUs, and what they are to be."""

    devices: Annotated[Literal["all"] | list[int], PlainValidator(_devices)]
    mig_enabled: bool
    device_filter: Annotated[list[str], BeforeValidator(_filters)] = []
    mig_devices: dict[str, Count] | None = None

    def matches(self, gpu: GpuLayout) -> bool:
        """Whether the entry is about this GPU; "all" does not include a GPU without MIG."""
        ids = (gpu.device_id, gpu.subsystem_id)
        asked = [_FILTER.fullmatch(text) for text in self.device_filter]
        found = [[int(part, 16) for part in match.groups() if part] for match in asked if match]
        if found and not any(list(ids[: len(parts)]) == parts for parts in found):
            return False
        return gpu.mode is not None if self.devices == "all" else gpu.number in self.devices


class _File(_Model):
    version: Literal["v1"]
    mig_configs: dict[str, Annotated[list[LayoutEntry], Field(min_length=1)]] = Field(min_length=1)


class Layouts(NamedTuple):
    """Layouts by name, and where they come from."""

    where: str
    by_name: Mapping[str, Sequence[LayoutEntry]]

    def select(self, name: str) -> Sequence[LayoutEntry]:
        """Return a layout; without a name the only one.  Raises SettingsError (OCIGPU-MIG-1)."""
        if not name and len(self.by_name) == 1:
            return next(iter(self.by_name.values()))
        if name not in self.by_name:
            known = ", ".join(map(printable, self.by_name))
            what = f"no layout {quoted(name)}" if name else "several layouts, and none is named"
            raise SettingsError("OCIGPU-MIG-1", f"{self.where}: {what}; known: {known}")
        return self.by_name[name]

    def to_document(self) -> dict[str, Any]:
        """Return the layouts as a file has them."""
        layouts = {
            name: [entry.model_dump(by_alias=True, exclude_defaults=True) for entry in entries]
            for name, entries in self.by_name.items()
        }
        return {"version": "v1", "mig-configs": layouts}


def read_model(kind: type[M], text: str, where: str, as_json: bool = False) -> M:
    """Return a mig-parted document in YAML or JSON; raises SettingsError (OCIGPU-MIG-1) with the place in it."""
    try:
        if as_json:
            return kind.model_validate_json(text)
        return kind.model_validate(build(yaml, text.encode(), may_be_empty=True))
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        path = ".".join(str(part) for part in first["loc"] if part != "[key]")
        problem = f"{path}: {_problem(first)}" if path else _problem(first)
        if first["type"] == "model_type" and not path:
            problem = f"{' and '.join(field.alias or name for name, field in kind.model_fields.items())} are missing"
        raise _wrong(where, f"{problem}{f'; and {len(others)} more' if others else ''}") from error
    except RefusedError as error:
        raise _wrong(where, f"not YAML: {error}") from error


_PROBLEMS = {
    "missing": "is missing",
    "too_short": "is empty",
    "string_too_short": "is empty",
    "string_too_long": "is too long",
    "bool_type": "{} is neither true nor false",
    "int_type": "{} is not a whole number",
    "string_type": "{} is not text",
    "list_type": "{} is not a list",
    "dict_type": "{} is not a mapping",
    "model_type": "{} is not a mapping",
    "literal_error": "{} is not {expected}",
    "greater_than_equal": "{} is less than {ge}",
    "less_than_equal": "{} is more than {le}",
    "string_pattern_mismatch": "{} is not of a known form",
}
"""What is wrong, by pydantic's types of errors; others have their own words."""
KEYS = ("version", "mig-configs", "devices", "device-filter", "mig-enabled", "mig-devices", "systemd-services")


def _problem(details: Any) -> str:
    context = {name: str(value).replace("'", "") for name, value in (details.get("ctx") or {}).items()}
    if details["type"] == "extra_forbidden":
        near = suggest(str(details["loc"][-1]), KEYS)
        return f"unknown key{near and f': {near}'}"
    if details["type"] in _PROBLEMS:
        return _PROBLEMS[details["type"]].format(shown(details["input"]), **context)
    return str(details["msg"]).removeprefix("Value error, ")


def parse_layout_file(text: str, where: str) -> Layouts:
    """Return the layouts of a file; raises SettingsError (OCIGPU-MIG-1) that names what is wrong by its path."""
    file = read_model(_File, text, where)
    for name, entries in file.mig_configs.items():
        for number, entry in enumerate(entries):
            if problem := _contradiction(entry):
                raise _wrong(where, f"mig-configs.{name}.{number}: {problem}")
    return Layouts(where, file.mig_configs)


def _contradiction(entry: LayoutEntry) -> str:
    if not entry.mig_enabled:
        return "mig-devices without mig-enabled" if entry.mig_devices else ""
    if entry.mig_devices is None:
        return "mig-devices is missing; {} is for MIG mode without devices"
    return "mig-devices: every count is 0" if entry.mig_devices and not any(entry.mig_devices.values()) else ""


def _wrong(where: str, text: str) -> SettingsError:
    return SettingsError("OCIGPU-MIG-1", f"{where}: {printable(text, 400)}")


class _Services(_Model):
    version: Literal["v1"]
    systemd_services: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9:_.\\@-]+$")]]


def parse_services(path: str) -> tuple[str, ...]:
    """Return the host's services that use GPUs, of the vendor's GPU_CLIENTS_FILE; raises SettingsError."""
    return tuple(read_model(_Services, read_text(path, 1 << 20, _wrong), path).systemd_services)


def make_layouts(gpus: Sequence[GpuLayout]) -> Layouts:
    """Return the layouts that need no file: all-disabled, all-enabled, all-balanced, and all-PROFILE for each.

    A name that is PROFILE with "+" has "." there, as labels of Kubernetes cannot have the former.
    """
    able = [gpu for gpu in gpus if gpu.mode is not None]
    found = {"all-disabled": [_entry("all", None)], "all-enabled": [_entry("all", {})]}
    if able:
        found["all-balanced"] = [_entry([gpu.number], balanced(gpu)) for gpu in able]
    for gpu in able:
        for profile in gpu.profiles:
            name = f"all-{profile.name.replace('+', '.')}"
            found.setdefault(name, []).append(_entry([gpu.number], {profile.name: profile.most}))
    return Layouts("GPUs of this host", found)


def _entry(devices: Any, mig_devices: dict[str, int] | None) -> LayoutEntry:
    document = {"devices": devices, "mig-enabled": mig_devices is not None, "mig-devices": mig_devices}
    return LayoutEntry.model_validate(document)


def wanted_of(entries: Sequence[LayoutEntry], gpus: Sequence[GpuLayout]) -> Iterator[tuple[GpuLayout, WantedMig]]:
    """Yield each GPU that a layout is about, and what it is to be.

    Raises SettingsError (OCIGPU-MIG-1) where entries contradict each other, which the vendor's never satisfies.
    """
    for gpu in gpus:
        ours = [WantedMig(entry.mig_enabled, dict(entry.mig_devices or {})) for entry in entries if entry.matches(gpu)]
        if any(one != ours[0] for one in ours):
            raise SettingsError("OCIGPU-MIG-1", f"GPU {gpu.number}: entries of the layout contradict each other")
        yield from ((gpu, one) for one in ours[:1])


def missing_gpus(entries: Sequence[LayoutEntry], gpus: Sequence[GpuLayout]) -> str:
    """Return what to say of GPUs that a layout names and the host does not have, "" for none; mig-parted is silent."""
    named = {number for entry in entries if entry.devices != "all" for number in entry.devices}
    missing = sorted(number for number in named if isinstance(number, int)) if named else []
    missing = [number for number in missing if number not in {gpu.number for gpu in gpus}]
    has = gpu_ranges([gpu.number for gpu in gpus]) if gpus else "no GPUs"
    return f"the layout names {gpu_ranges(missing)}, and this host has {has}" if missing else ""


def to_document(gpus: Sequence[GpuLayout], label: str = "current") -> dict[str, Any]:
    """Return the present layout of all GPUs under this name, as the vendor's ``export`` has it.

    Equal GPUs share one entry.  Its devices are "all" if it covers all GPUs of its models; models are named if the host
    has others, too.  So the file fits hosts with more or fewer GPUs.

    Source: github.com/NVIDIA/mig-parted, cmd/nvidia-mig-parted/export/config.go.
    """
    equal: dict[tuple[bool, frozenset[tuple[str, int]]], list[GpuLayout]] = {}
    for gpu in gpus:
        names = Counter(_device_name(gpu, one, size) for one in gpu.instances for size in one.cis)
        equal.setdefault((bool(gpu.mode), frozenset(names.items())), []).append(gpu)
    models = {gpu.device_id for gpu in gpus}
    entries: list[dict[str, Any]] = []
    for (enabled, devices), members in equal.items():
        own = {gpu.device_id for gpu in members}
        filters = sorted(f"0x{id_:08X}" for id_ in own) if len(equal) > 1 and len(models) > 1 else []
        whole = len(members) == sum(gpu.device_id in own for gpu in gpus)
        entries.append(
            {
                **({"device-filter": filters if len(filters) > 1 else filters[0]} if filters else {}),
                "devices": "all" if whole else [gpu.number for gpu in members],
                "mig-enabled": enabled,
                "mig-devices": dict(sorted(devices)),
            }
        )
    return {"version": "v1", "mig-configs": {label: entries}}


def _device_name(gpu: GpuLayout, instance: GpuInstance, size: int) -> str:
    profile = gpu.profile(instance.profile)
    return profile.name if size == profile.slices else f"{size}c.{profile.name}"


CI_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7, 5: 8, 6: 6, 7: 1, 8: 7}
"""Compute slices by nvmlComputeInstanceProfile (nvml.h)."""
Number = Annotated[int, Field(ge=0, le=255)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Compute(_Part):
    ProfileID: Annotated[int, Field(ge=0, le=8)]
    EngProfileID: Literal[0] = 0


class _Placement(_Part):
    Start: Number
    Size: Number


class _Instance(_Part):
    ProfileID: Number
    Placement: _Placement
    ComputeInstances: list[_Compute] | None = None


class _Device(_Part):
    UUID: Annotated[str, Field(max_length=96)]
    MigMode: Literal[0, 1]
    GpuInstances: list[_Instance] | None = None


class _State(_Part):
    Devices: list[_Device] | None = None


class Checkpoint(_Part):
    """How GPUs were cut."""

    version: Annotated[Literal["v1"], Field(alias="Version")]
    state: Annotated[_State, Field(alias="MigState")]

    def planner(self, held: Callable[[], Mapping[str, str]]) -> Callable[[Sequence[GpuLayout]], list[GpuChange]]:
        """Return what plans the changes that put the GPUs back to it; ``held`` as in plan_change."""
        was = {device.UUID: device for device in self.state.Devices or ()}

        def plan(gpus: Sequence[GpuLayout]) -> list[GpuChange]:
            users = held()
            known = {gpu.uuid for gpu in gpus}
            if missing := [uuid for uuid in was if uuid not in known]:
                raise SettingsError("OCIGPU-MIG-1", f"the checkpoint is of GPUs that this host lacks: {missing[0]}")
            return [_change(gpu, was[gpu.uuid], users) for gpu in gpus if gpu.uuid in was]

        return plan


def _change(gpu: GpuLayout, was: _Device, held: Mapping[str, str]) -> GpuChange:
    by_number = {profile.number: profile for profile in gpu.profiles}
    instances = []
    for one in was.GpuInstances or ():
        profile = by_number.get(one.ProfileID)
        if profile is None or one.Placement.Start not in profile.starts:
            text = f"it has no GPU instance of profile {one.ProfileID} at {one.Placement.Start}"
            return GpuChange(gpu, None, problem=text)
        numbers = tuple(part.ProfileID for part in one.ComputeInstances or ())
        cis = tuple(CI_SLICES[number] for number in numbers)
        instances.append(GpuInstance(profile.id, one.Placement.Start, cis, numbers=numbers))
    if gpu.mode is None:
        return GpuChange(gpu, None, problem="it has no MIG mode")
    return plan_back(gpu, gpu._replace(mode=was.MigMode, pending=was.MigMode, instances=tuple(instances)), held)


def parse_checkpoint(text: str, where: str) -> Checkpoint:
    """Return a checkpoint; raises SettingsError (OCIGPU-MIG-1)."""
    return read_model(Checkpoint, text, where, as_json=True)


def to_checkpoint(gpus: Sequence[GpuLayout]) -> dict[str, Any]:
    """Return the partitioning of GPUs with MIG, in the form of a checkpoint file."""
    devices = []
    for gpu in gpus:
        if gpu.mode is None:
            continue
        instances = [
            {
                "ProfileID": gpu.profile(one.profile).number,
                "Placement": {"Start": one.start, "Size": gpu.profile(one.profile).size},
                "ComputeInstances": [{"ProfileID": number, "EngProfileID": 0} for number in one.numbers],
            }
            for one in gpu.instances
        ]
        devices.append({"UUID": gpu.uuid, "MigMode": gpu.mode, "GpuInstances": instances})
    return {"Version": "v1", "MigState": {"Devices": devices}}


SECONDS = 480.0
"""For one hook: what the vendor's unit gives to all of them."""
MOMENTS = ("apply-start", PRE_MODE, PRE_CONFIG, "apply-exit")
Text = Annotated[str, Field(max_length=4096, pattern="^[^\0]*$")]


class Hook(BaseModel):
    """One program."""

    model_config = ConfigDict(extra="forbid", strict=True)
    command: Annotated[Text, Field(min_length=1)]
    args: list[Text] = []
    envs: dict[Text, Text] = {}
    workdir: Text = ""


def _moment(name: str) -> str:
    if name not in MOMENTS:
        raise ValueError(f"{shown(name)} is not one of {', '.join(MOMENTS)}")
    return name


class _HooksFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal["v1"]
    hooks: dict[Annotated[str, AfterValidator(_moment)], list[Hook]]


class Hooks(NamedTuple):
    """Programs by the name of the moment; ``variables``: of all of them."""

    where: str = ""
    by_name: Mapping[str, list[Hook]] = {}
    variables: Mapping[str, str] = {}

    @property
    def end_users(self) -> bool:
        """Whether something is run before a change, which may end what uses the GPUs."""
        return bool(self.by_name.get(PRE_MODE) or self.by_name.get(PRE_CONFIG))

    def run(self, name: str) -> None:
        """Run the programs of a moment in order.  Raises HostError (OCIGPU-MIG-5)."""
        for number, hook in enumerate(self.by_name.get(name, [])):
            what = f"{self.where}: hooks.{name}.{number}: {printable(hook.command, 200)}"
            path = {"PATH": os.environ.get("PATH", os.defpath)}
            try:
                done = run_program(
                    [hook.command, *hook.args],
                    SECONDS,
                    env={**path, **hook.envs, **self.variables},
                    cwd=hook.workdir or None,
                )
            except (OSError, TimeoutError, ValueError) as error:
                cause = error.strerror if isinstance(error, OSError) else error
                raise HostError("OCIGPU-MIG-5", f"{what}: {printable(str(cause), 300)}") from error
            if done.status:
                raise HostError("OCIGPU-MIG-5", f"{what}: {printable(done.last_line, 300)}")


NO_HOOKS = Hooks()


def parse_hooks(text: str, where: str, variables: Mapping[str, str]) -> Hooks:
    """Return the hooks of a file; raises SettingsError (OCIGPU-MIG-1) that names what is wrong by its path."""
    return Hooks(where, read_model(_HooksFile, text, where).hooks, variables)
