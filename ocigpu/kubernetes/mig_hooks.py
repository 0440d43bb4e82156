"""Programs to be run around a change of MIG devices, as mig-parted's file of hooks says.

Source: github.com/NVIDIA/mig-parted, api/hooks/v1.  A hook gets its own variables and those of the command's options,
and PATH, which the vendor's leaves out.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ocigpu.cdi.yaml_child import RefusedError, build
from ocigpu.core.errors import HostError, SettingsError, printable
from ocigpu.gpus.nvidia.mig import PRE_CONFIG, PRE_MODE
from ocigpu.system.programs import run_program

SECONDS = 480.0
"""For one hook: what the vendor's unit gives to all of them."""
_MOMENT = rf"^(apply-start|{PRE_MODE}|{PRE_CONFIG}|apply-exit)$"
Text = Annotated[str, Field(max_length=4096, pattern="^[^\0]*$")]


class Hook(BaseModel):
    """One program."""

    model_config = ConfigDict(extra="forbid", strict=True)
    command: Annotated[Text, Field(min_length=1)]
    args: list[Text] = []
    envs: dict[Text, Text] = {}
    workdir: Text = ""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal["v1"]
    hooks: dict[Annotated[str, Field(pattern=_MOMENT)], list[Hook]]


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
    try:
        file = _File.model_validate(build(yaml, text.encode(), may_be_empty=True))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"] if part != "[key]")
        problem = f"{path}: {first['msg']}" if path else "version and hooks are missing"
        raise SettingsError("OCIGPU-MIG-1", f"{where}: {printable(problem, 400)}") from error
    except (RefusedError, yaml.YAMLError, MemoryError) as error:
        raise SettingsError("OCIGPU-MIG-1", f"{where}: not YAML: {printable(str(error), 300)}") from error
    return Hooks(where, file.hooks, variables)
