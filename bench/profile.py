"""Where the rest goes: what is imported, called, opened and started for one container."""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from bench.commands import PREFIX, run
from bench.hosts import ASKS, HOOK, SHIM, Bench, Bundle
from bench.output import milliseconds
from tests.support.trace import Program, life, trace

_IMPORT = re.compile(r"import time: +(\d+) \| +\d+ \| +(\S+)")
CALLS_SHOWN = 12
LAST_WARM = 2
"""Lives before the one that is looked at: the caches are filled, and the stub knows what it may pass."""


def measure_profile(bench: Bench) -> None:
    """Show the parts of a warm start, by mode."""
    bench.out.progress("profile")
    bundle, idle = bench.bundle(ASKS, plain=False), bench.bundle({}, plain=False)
    environments = {"no GPU": bench.settings("hook", bench.usual)}
    environments |= {mode: bench.settings(mode, bench.usual) for mode in ("hook", "spec", "cdi")}
    time.sleep(bench.size.settle)
    lives: dict[str, list[Program]] = {}
    for mode, env in environments.items():
        bench.out.progress(f"profile: {mode}")
        used = bundle if mode != "no GPU" else idle
        command = life(SHIM, bench.state, used.directory, f"{PREFIX}profile")
        for _ in range(LAST_WARM):
            used.make_fresh()
            run(command, env)
        used.make_fresh()
        lives[mode] = trace(command, env, all_calls=True)
    _show_processes(bench, lives)
    _show_calls(bench, lives)
    _show_imports(bench, bundle)


def _show_processes(bench: Bench, lives: dict[str, list[Program]]) -> None:
    python = python_of_stubs()
    empty = trace([python, "-I", "-S", "-c", "pass"])
    base = sum(len(program.opened) for program in empty)
    rows = []
    for mode, programs in lives.items():
        kinds = Counter(program.kind for program in programs)
        shim = next((program for program in programs if program.kind == "python"), None)
        opened = len(shim.opened) if shim else 0
        row = {kind: kinds[kind] for kind in ("shim", "hook", "grep", "python", "fork of python", "ldconfig")}
        rows.append([mode, *map(str, row.values()), str(opened), str(max(opened - base, 0))])
    columns = [
        "",
        "stub of shim",
        "stub of hook",
        "grep",
        "python",
        "its forks",
        "ldconfig",
        "shim opens",
        "without python's own",
    ]
    bench.out.table("processes of ours in create, start, delete --force, and files that the shim opens", columns, rows)


def _show_calls(bench: Bench, lives: dict[str, list[Program]]) -> None:
    """Show system calls of the shim's interpreter and of what the hook starts."""
    parts: dict[str, Counter[str]] = {}
    for mode, programs in lives.items():
        pythons = [program for program in programs if program.kind in ("python", "fork of python", "ldconfig")]
        if pythons:
            parts[f"shim, {mode}"] = pythons[0].calls
            rest: Counter[str] = Counter()
            for program in pythons[1:]:
                rest += program.calls
            if rest:
                parts[f"others, {mode}"] = rest
    rows = []
    for name, calls in parts.items():
        words = ", ".join(f"{call} {count}" for call, count in calls.most_common(CALLS_SHOWN))
        rows.append(f"- {name}: {calls.total()} calls: {words}")
    bench.out.say("", "### system calls by process (interpreter and imports included)", "", *rows)


def python_of_stubs() -> str:
    """Return the interpreter that the stubs start."""
    return os.path.realpath(sys.executable)


def _program_of(stub: str) -> str:
    """Return the Python program in a stub, whether that is compiled or a script."""
    found = re.search(rb"import gc.*?main\(sys\.argv\[1:\]\)\)", Path(stub).read_bytes(), re.DOTALL)
    if not found:
        raise RuntimeError(f"{stub}: no program in it")
    return found[0].decode()


def _show_imports(bench: Bench, bundle: Bundle) -> None:
    python = python_of_stubs()
    interpreter = set(_import_times([python, "-X", "importtime", "-I", "-S", "-c", "pass"], {}))
    rows = []
    for mode in ("hook", "spec"):
        bundle.make_fresh()
        command = [python, "-X", "importtime", "-I", "-S", "-c", _program_of(SHIM), SHIM, "create", "--bundle"]
        env = bench.settings(mode, bench.usual, "/bin/true")
        rows.append(_import_row(f"shim, {mode}", [*command, str(bundle.directory), "x"], env, interpreter))
    bundle.make_fresh()
    name = f"{PREFIX}imports"
    base = [bench.runc, "--root", str(bench.state)]
    run([*base, "create", "--bundle", str(bundle.directory), name], dict(os.environ))
    try:
        pid = json.loads(subprocess.check_output([*base, "state", name]))["pid"]
        state = json.dumps({"ociVersion": "1.0.2", "id": name, "pid": pid, "bundle": str(bundle.directory)})
        command = [python, "-X", "importtime", "-I", "-S", "-c", _program_of(HOOK), HOOK, "--config"]
        command += [bench.settings("hook", bench.usual)["OCIGPU_CONFIG"], "prestart"]
        rows.append(_import_row("hook, alone", command, dict(os.environ), interpreter, state))
    finally:
        run([*base, "delete", "--force", name], dict(os.environ))
    columns = ["ms", "interpreter", "standard library", "ours", "modules of ours"]
    bench.out.table("-X importtime: time in imports (the measuring included)", columns, rows)


def _import_row(
    name: str, command: list[str], env: dict[str, str], interpreter: set[str], stdin: str = ""
) -> list[str]:
    times = _import_times(command, env, stdin)
    ours = {module: time for module, time in times.items() if module.partition(".")[0] == "ocigpu"}
    parts = [
        sum(time for module, time in times.items() if module in interpreter),
        sum(time for module, time in times.items() if module not in interpreter and module not in ours),
        sum(ours.values()),
    ]
    return [name, *(milliseconds(part) for part in parts), str(len(ours))]


def _import_times(command: list[str], env: dict[str, str], stdin: str = "") -> dict[str, float]:
    """Return the milliseconds that each module took by itself."""
    done = subprocess.run(command, env=env, input=stdin, capture_output=True, text=True, check=True)
    return {module: int(time) / 1000 for time, module in _IMPORT.findall(done.stderr)}
