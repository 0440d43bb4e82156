"""MIG layouts by name: the file of NVIDIA's mig-parted (version v1), and those that need no file.

Every key is obeyed or refused with its place.  Source: github.com/NVIDIA/mig-parted, api/spec/v1.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ocigpu.cdi.yaml_child import RefusedError, build
from ocigpu.core.errors import SettingsError, printable, quoted
from ocigpu.gpus.nvidia.mig_layout import GpuInstance, GpuLayout, WantedMig, balanced
from ocigpu.system.files import read_regular

_ID = r"0x[0-9A-Fa-f]{8}"
_FILTER = re.compile(rf"({_ID})(?::({_ID}))?")
"""Device id and vendor id of the GPU, and of its board."""
Count = Annotated[int, Field(ge=0, le=1000)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=lambda name: name.replace("_", "-"))


class LayoutEntry(_Model):
    """An entry of a layout: which GPUs, and what they are to be."""

    devices: Literal["all"] | list[Annotated[int, Field(ge=0)]]
    mig_enabled: bool
    device_filter: Annotated[
        list[Annotated[str, Field(pattern=_FILTER)]],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = []
    mig_devices: dict[str, Count] | None = None

    def matches(self, gpu: GpuLayout) -> bool:
        """Whether the entry is about this GPU; one without MIG is none of "all"."""
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
            raise SettingsError("OCIGPU-MIG-1", f"{self.where}: {what}; there are {known}")
        return self.by_name[name]

    def to_document(self) -> dict[str, Any]:
        """Return the layouts as a file has them."""
        layouts = {
            name: [entry.model_dump(by_alias=True, exclude_defaults=True) for entry in entries]
            for name, entries in self.by_name.items()
        }
        return {"version": "v1", "mig-configs": layouts}


def parse_layout_file(text: str, where: str) -> Layouts:
    """Return the layouts of a file; raises SettingsError (OCIGPU-MIG-1) that names what is wrong by its path."""
    try:
        file = _File.model_validate(build(yaml, text.encode(), may_be_empty=True))
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        path = ".".join(str(part) for part in first["loc"])
        more = f"; and {len(others)} more" if others else ""
        problem = f"{path}: {first['msg']}{more}" if path else "version and mig-configs are missing"
        raise _wrong(where, problem) from error
    except (RefusedError, yaml.YAMLError, MemoryError) as error:
        raise _wrong(where, f"not YAML: {error}") from error
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
    try:
        return tuple(_Services.model_validate(build(yaml, read_regular(path, 1 << 20))).systemd_services)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _wrong(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (RefusedError, yaml.YAMLError, MemoryError) as error:
        raise _wrong(path, f"not YAML: {error}") from error
    except OSError as error:
        raise _wrong(path, str(error.strerror)) from error


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


def to_document(gpus: Sequence[GpuLayout], label: str = "current") -> dict[str, Any]:
    """Return the present layout of all GPUs under this name, as the vendor's ``export`` has it.

    Equal GPUs are one entry. It says "all" where it is about all GPUs of its models, and names those where the host has
    others too, so that the file fits hosts with more or fewer GPUs.

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
