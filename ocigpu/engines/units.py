"""Commands that start an engine's service, which systemd may refuse."""

import os
from collections.abc import Sequence

from ocigpu.engines.places import BOOTED
from ocigpu.system.programs import run_program

SECONDS = 10.0


def start_command(service: str, verb: str = "restart") -> str:
    """Return the command that starts a service of this machine; ``service``: "docker", or "--user docker".

    If it keeps failing, the number of its starts is reset first, and of its socket's: systemd refuses more than a few
    in a while, also by hand (systemd.unit(5), StartLimitBurst=; docker.service has three in a minute).
    """
    *scope, name = service.split()
    states = _read_states(scope, [f"{name}.service", f"{name}.socket"])
    masked = [unit for unit, state in states.items() if state["LoadState"] == "masked"]
    failing = [unit for unit, state in states.items() if {"failed", "auto-restart"} & set(state.values())]
    steps = [["unmask", *masked]] if masked else []
    steps += [["reset-failed", *failing]] if failing else []
    return " && ".join(" ".join(["systemctl", *scope, *step]) for step in (*steps, [verb, name]))


def read_words(service: str) -> list[str]:
    """Return the command line of a service of this machine, without variables; [] for none that systemd knows."""
    if not os.path.isdir(BOOTED):
        return []
    try:
        shown = run_program(["systemctl", "show", "--property=ExecStart", f"{service}.service"], SECONDS).output
    except OSError:
        return []
    words = shown.rpartition("argv[]=")[2].partition(" ;")[0].split()
    return [word for word in words if not word.startswith("$")]


def _read_states(scope: Sequence[str], units: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return LoadState, ActiveState and SubState of each unit (systemctl(1), show); of none without systemd."""
    if not os.path.isdir(BOOTED):
        return {}
    try:
        shown = run_program(["systemctl", *scope, "show", "--property=LoadState,ActiveState,SubState", *units], SECONDS)
    except OSError:
        return {}
    blocks = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in shown.output.split("\n\n")]
    return {unit: block for unit, block in zip(units, blocks, strict=False) if "LoadState" in block}
