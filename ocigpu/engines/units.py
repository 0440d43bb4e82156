"""Commands that start an engine's service, which systemd may have given up."""

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
    failing = [unit for unit in _failing_units(scope) if unit in (f"{name}.service", f"{name}.socket")]
    command = " ".join(["systemctl", *scope, verb, name])
    return f"{' '.join(['systemctl', *scope, 'reset-failed', *failing])} && {command}" if failing else command


def _failing_units(scope: Sequence[str]) -> list[str]:
    """Return the units that have failed, or that systemd will start once more for that; none without systemd."""
    if not os.path.isdir(BOOTED):
        return []
    words = ["list-units", "--all", "--full", "--plain", "--no-legend", "--state=failed,auto-restart"]
    try:
        listed = run_program(["systemctl", *scope, *words], SECONDS).output
    except OSError:
        return []
    return [line.split()[0] for line in listed.splitlines() if line]
