"""The file in which mig-parted keeps how GPUs are cut, with the place of each instance.

Source: github.com/NVIDIA/mig-parted, api/checkpoint/v1 and pkg/types: profiles are named by NVML's enumerators there,
nvmlGpuInstanceProfile and nvmlComputeInstanceProfile.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ocigpu.core.errors import SettingsError, printable
from ocigpu.gpus.nvidia.mig_layout import GpuChange, GpuInstance, GpuLayout, plan_back

CI_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7, 5: 8, 6: 6, 7: 1}
"""Compute slices by nvmlComputeInstanceProfile (nvml.h)."""
Number = Annotated[int, Field(ge=0, le=255)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Compute(_Model):
    ProfileID: Annotated[int, Field(ge=0, le=7)]
    EngProfileID: Literal[0] = 0


class _Placement(_Model):
    Start: Number
    Size: Number


class _Instance(_Model):
    ProfileID: Number
    Placement: _Placement
    ComputeInstances: list[_Compute] | None = None


class _Device(_Model):
    UUID: Annotated[str, Field(max_length=96)]
    MigMode: Literal[0, 1]
    GpuInstances: list[_Instance] | None = None


class _State(_Model):
    Devices: list[_Device] | None = None


class Checkpoint(_Model):
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
                raise SettingsError("OCIGPU-MIG-1", f"the checkpoint is of GPUs that are not here: {missing[0]}")
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
        cis = tuple(CI_SLICES[part.ProfileID] for part in one.ComputeInstances or ())
        instances.append(GpuInstance(profile.id, one.Placement.Start, cis))
    if gpu.mode is None:
        return GpuChange(gpu, None, problem="it has no MIG mode")
    return plan_back(gpu, gpu._replace(mode=was.MigMode, pending=was.MigMode, instances=tuple(instances)), held)


def parse_checkpoint(text: str, where: str) -> Checkpoint:
    """Return a checkpoint; raises SettingsError (OCIGPU-MIG-1)."""
    try:
        return Checkpoint.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, first["loc"]))
        problem = f"{path}: {first['msg']}" if path else first["msg"]
        raise SettingsError("OCIGPU-MIG-1", f"{where}: {printable(problem, 400)}") from error


def to_checkpoint(gpus: Sequence[GpuLayout]) -> dict[str, Any]:
    """Return how GPUs with MIG are cut, as such a file has it."""
    numbers = {slices: number for number, slices in reversed(CI_SLICES.items())}
    devices = []
    for gpu in gpus:
        if gpu.mode is None:
            continue
        instances = [
            {
                "ProfileID": gpu.profile(one.profile).number,
                "Placement": {"Start": one.start, "Size": gpu.profile(one.profile).size},
                "ComputeInstances": [{"ProfileID": numbers[size], "EngProfileID": 0} for size in one.cis],
            }
            for one in gpu.instances
        ]
        devices.append({"UUID": gpu.uuid, "MigMode": gpu.mode, "GpuInstances": instances})
    return {"Version": "v1", "MigState": {"Devices": devices}}
