"""Containers that did not start: their engine keeps the error, and no runtime has a state of them."""

import json
import re
import shutil
from typing import NamedTuple

from ocigpu.system.programs import run_program

ENGINES = ("docker", "podman")
"""Both have "inspect --type container", whose answer has State.Error (docker-inspect(1), podman-inspect(1))."""
SECONDS = 10.0
MAX_ANSWER = 4 << 20
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")


class NotRunning(NamedTuple):
    """A container that an engine knows and that does not run; ``error``: why its last start failed, "" if none did."""

    engine: str
    id: str
    name: str
    status: str
    error: str


def find_not_running(name: str) -> NotRunning | None:
    """Return the container of this name or id as its engine's command describes it, None where none has it."""
    if not _NAME.fullmatch(name):
        return None
    for engine in filter(shutil.which, ENGINES):
        try:
            words = [engine, "inspect", "--type", "container", name]
            (found,) = json.loads(run_program(words, SECONDS, limit=MAX_ANSWER).output)
            state = found["State"]
            if not state["Running"]:
                named = str(found["Name"]).removeprefix("/")
                return NotRunning(engine, str(found["Id"]), named, str(state["Status"]), str(state["Error"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # TimeoutError is the first
            continue
    return None
