"""Runs containers with an OCI runtime and reads what the probe in them says."""

import itertools
import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support import requirements
from support.machine import NAME
from support.process import Completed, run, wait_for

_numbers = itertools.count(1)

Answers = dict[tuple[str, str], str]
"""(command, path) -> what the probe answered, lines joined."""


def container_id() -> str:
    """Return a new name for a container, which is also a good name for its cgroup."""
    return f"{NAME}-{next(_numbers)}"


def view_of(cgroup: str) -> tuple[str, ...]:
    """Return the words that put a command before a machine with cgroup "v1" or "v2" only; skips where impossible."""
    if cgroup == "v1":
        requirements.require(requirements.cgroup_v1())
        return requirements.CGROUP1_VIEW
    requirements.require(requirements.cgroup_v2())
    return () if requirements.is_unified() else requirements.CGROUP2_VIEW


def set_cgroup(bundle: Path, name: str) -> None:
    """Put the container's cgroup at the top of the hierarchies, so that deleting the container removes all of it."""
    path = bundle / "config.json"
    config = json.loads(path.read_text())
    config["linux"]["cgroupsPath"] = f"/{name}"
    path.write_text(json.dumps(config, indent="\t"))


def run_container(
    runtime: Sequence[str | os.PathLike[str]],
    bundle: Path,
    name: str,
    *,
    env: dict[str, str] | None = None,
    cgroup: str = "",
    state: Path | None = None,
    prefix: Sequence[str] = (),
) -> Completed:
    """``runtime run`` the bundle and return how it went; the container is deleted in any case.

    ``runtime``: the program and its global options.  ``cgroup``: "v1", "v2", or "" for what the machine has.
    ``state``: the runtime's --root, by default beside the bundle.  ``prefix``: words before the command.
    """
    view = [*(view_of(cgroup) if cgroup else ()), *prefix]
    command = [*view, *runtime, "--root", str(state or bundle.with_name(bundle.name + ".state"))]
    try:
        return run([*command, "run", "--bundle", bundle, name], env=env, check=False)
    finally:
        run([*command, "delete", "--force", name], env=env, check=False)


def start_in_background(
    command: Sequence[str | os.PathLike[str]], subcommand: Sequence[str], bundle: Path, name: str, env: dict[str, str]
) -> Completed:
    """``create`` or ``run --detach`` a bundle; the container keeps its descriptors, so its output goes to files."""
    words = [os.fspath(word) for word in (*command, *subcommand, "--bundle", bundle, name)]
    output, errors = bundle.with_name(f"{name}.out"), bundle.with_name(f"{name}.err")
    with output.open("wb") as out, errors.open("wb") as err:
        status = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, timeout=60)
    return Completed(words, status.returncode, output.read_text(), errors.read_text())


def create_and_start(
    runtime: Sequence[str | os.PathLike[str]], bundle: Path, name: str, *, env: dict[str, str], state: Path
) -> Completed:
    """``create``, ``start``, wait for the end, ``delete``, as engines do; returns what the container said."""
    command = [*runtime, "--root", str(state)]
    try:
        created = start_in_background(command, ["create"], bundle, name, env)
        if created.returncode == 0:
            run([*command, "start", name], env=env)
            wait_for(f"{name} to end", lambda: state_of(command, name, env) == "stopped")
        created.stdout = bundle.with_name(f"{name}.out").read_text()
        return created
    finally:
        run([*command, "delete", "--force", name], env=env, check=False)


def state_of(command: Sequence[str | os.PathLike[str]], name: str, env: dict[str, str]) -> str:
    """Return the status of a container ("created", "running", "stopped") as its runtime tells it."""
    status: str = json.loads(run([*command, "state", name], env=env).stdout)["status"]
    return status


def script(*commands: Sequence[str]) -> list[str]:
    """Return the argv of a shell that carries out commands one after another; see :func:`parts`."""
    return ["sh", "-c", "; ".join(f"{shlex.join(command)}; echo @@$?" for command in commands)]


def parts(output: str) -> list[str]:
    """Return what each command of a :func:`script` printed; a command that failed ends with "status N"."""
    found, text = [], ""
    for line in output.splitlines(keepends=True):
        if line.startswith("@@"):
            found.append(text if line == "@@0\n" else f"{text}status {line[2:]}")
            text = ""
        else:
            text += line
    return found


def probe(*commands: Sequence[str]) -> list[str]:
    """Return the argv of one probe that carries out several commands: ``probe(["open", "/dev/null"], ...)``."""
    words = ["/probe"]
    for command in commands:
        words += [*([] if len(words) == 1 else ["--"]), *command]
    return words


def answers(output: str) -> Answers:
    """Return what a probe printed."""
    found: Answers = {}
    for line in output.splitlines():
        command, path, answer = [*line.split(" ", 2), "", ""][:3]
        key = (command, path)
        found[key] = found[key] + "\n" + answer if key in found else answer
    return found
