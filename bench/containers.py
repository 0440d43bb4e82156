"""What a container's life costs: bare runc, each of our modes, what runc itself must pay for the edits, crun."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.hosts import CDI_GPUS, HOOK, MODES, REPOSITORY, SHIM, Bundle, make_bundle
from bench.measure import PHASES, PREFIX, life_cycle, medians, paired, peak_memory, run
from bench.output import Output, milliseconds, times
from ocigpu.system import libc

STEP = "bare + step"
"""Bare runc with the hook that stands for what a real host's procfs has by itself.

Mode spec leaves it to the runtime on simulated hosts; it is no part of what ocigpu adds.
"""
WITH_STEP = ("spec", "edited")
Runner = Callable[[], dict[str, float]]
Samples = dict[str, dict[str, list[float]]]


class Bench(NamedTuple):
    """What every measurement is given."""

    work: Path
    runc: str
    peer: str
    rounds: int
    out: Output
    results: dict[str, Any]
    samples: dict[str, Samples]

    @property
    def state(self) -> Path:
        return self.work / "state"

    def compare(self, name: str, text: str, runners: dict[str, Runner]) -> dict[str, dict[str, float]]:
        """Run the contenders in paired rounds; returns the medians, which are results too."""
        self.out.progress(text)
        self.samples[name] = paired(runners, self.rounds, lambda done, whole: self.out.progress(text, done, whole))
        self.results[name] = medians(self.samples[name])
        rows: dict[str, dict[str, float]] = self.results[name]
        return rows


def settings_of(bench: Bench, gpus: int, mode: str) -> dict[str, str]:
    """Return the environment that makes the shim use a host's settings MODE.toml."""
    return {**os.environ, "OCIGPU_CONFIG": str(bench.work / f"host{gpus}" / f"{mode}.toml")}


def contender(
    bench: Bench, command: str, bundle: Bundle, env: dict[str, str], config: dict[str, Any] | None = None
) -> Runner:
    """Return a function that runs one container's life on an unused root file system."""

    def once() -> dict[str, float]:
        bundle.make_fresh(config)
        return life_cycle(command, bench.state, bundle.directory, env)

    return once


def edited_config(bench: Bench, bundle: Bundle, gpus: int) -> dict[str, Any]:
    """Return config.json as the shim leaves it in mode spec."""
    bundle.make_fresh()
    env = settings_of(bench, gpus, "spec-alone")
    run([SHIM, "create", "--bundle", str(bundle.directory), f"{PREFIX}edited"], env)
    config: dict[str, Any] = json.loads((bundle.directory / "config.json").read_text())
    return config


def config_with_step(bundle: Bundle, edited: dict[str, Any]) -> dict[str, Any]:
    """Return the unedited configuration with the one hook that only simulated hosts add (ocigpu.bundle.edit)."""
    steps = edited["hooks"]["prestart"]
    if len(steps) != 1 or edited["hooks"].keys() != {"prestart"} or steps[0]["path"] == HOOK:
        raise RuntimeError(f"mode spec left other hooks than the simulated host's step: {edited['hooks']}")
    return {**bundle.config, "hooks": {"prestart": steps}}


def show(bench: Bench, title: str, rows: dict[str, dict[str, float]], phases: tuple[str, ...]) -> None:
    """Print medians, with what a row adds to the first one, and the ratio to it and to the floor where there is one.

    The simulated host's step is taken out of what is added and of the ratios, where mode spec has it.
    """
    base = next(iter(rows.values()))[phases[-1]]
    step = rows[STEP][phases[-1]] - base if STEP in rows else 0.0
    floor = rows["edited"][phases[-1]] - step if "edited" in rows else 0.0
    columns = ["ms", *phases, "ratio", "added", *(["to edited"] if floor else [])]
    lines = []
    for name, row in rows.items():
        total = row[phases[-1]] - (step if name in WITH_STEP else 0.0)
        cells = [name, *(milliseconds(row[phase]) for phase in phases), times(total / base), milliseconds(total - base)]
        if floor:
            cells.append(times(total / floor) if name == "spec" else "")
        lines.append(cells)
    bench.out.table(title, columns, lines)


def measure_containers(bench: Bench, gpus: int, cdi_settings: Path, plain_root: bool = False) -> None:
    """Measure one container's life with that many GPUs; ``plain_root``: on a root file system that was used before."""
    name = f"{'plain' if plain_root else 'container'}-{gpus}"
    bundle = make_bundle(bench.work / name, bench.work / "image", bench.runc, asks=gpus > 0, plain=plain_root)
    plain = dict(os.environ)
    runners = {"bare runc": contender(bench, bench.runc, bundle, plain)}
    if gpus:
        edited = edited_config(bench, bundle, gpus)
        runners[STEP] = contender(bench, bench.runc, bundle, plain, config_with_step(bundle, edited))
        runners["hook"] = contender(bench, SHIM, bundle, settings_of(bench, gpus, "hook"))
        runners["spec"] = contender(bench, SHIM, bundle, settings_of(bench, gpus, "spec"))
        runners["edited"] = contender(bench, bench.runc, bundle, plain, edited)
    else:
        runners["ocigpu"] = contender(bench, SHIM, bundle, settings_of(bench, CDI_GPUS, "hook"))
    if gpus == CDI_GPUS:
        runners["cdi"] = contender(bench, SHIM, bundle, {**plain, "OCIGPU_CONFIG": str(cdi_settings)})
    if bench.peer:
        runners["peer"] = contender(bench, bench.peer, bundle, plain)
    asked = f"{gpus} GPUs, compute,utility" if gpus else "no GPU asked for"
    asked += ", plain directory used before" if plain_root else ""
    rows = bench.compare(name, f"containers: {asked}", runners)
    show(bench, f"create, start, delete: {asked}", rows, (*PHASES, "total"))


def measure_crun(bench: Bench) -> None:
    """Measure crun as the low-level runtime, where it is installed and works.

    crun refuses machines that mount both versions of cgroups: version 2 is taken out of our own mounts, for good.
    On machines whose root may not raise limits it needs a library that says so and goes on.
    """
    crun = shutil.which("crun")
    if not crun:
        bench.out.say("", "crun: not installed, not measured.")
        return
    unified = Path("/sys/fs/cgroup/unified")
    if unified.is_mount():
        libc.umount2(str(unified), libc.MNT_DETACH)
    bundle = make_bundle(bench.work / "bundle-crun", bench.work / "image", bench.runc, asks=True)
    preload = bench.work / "memlock.so"
    source = REPOSITORY / "tests/support/memlock.c"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", preload, source], check=True)
    problem = ""
    for more in ({}, {"LD_PRELOAD": str(preload)}):
        try:
            contender(bench, crun, bundle, {**os.environ, **more})()
            break
        except RuntimeError as error:
            problem = str(error)
    else:
        bench.out.say("", f"crun: does not work here, not measured: {problem}")
        return
    plain = {**os.environ, **more}
    step = config_with_step(bundle, edited_config(bench, bundle, CDI_GPUS))
    runners = {"bare crun": contender(bench, crun, bundle, plain), STEP: contender(bench, crun, bundle, plain, step)}
    for mode in MODES:
        runners[mode] = contender(bench, SHIM, bundle, {**settings_of(bench, CDI_GPUS, f"{mode}-crun"), **more})
    rows = bench.compare("crun-8", "containers with 8 GPUs, crun", runners)
    show(bench, "create, start, delete: 8 GPUs, compute,utility, crun", rows, (*PHASES, "total"))


def measure_pass_through(bench: Bench) -> None:
    """Measure ``state`` of a created container: what is handed on without a look."""
    bundle = make_bundle(bench.work / "bundle-state", bench.work / "image", bench.runc, asks=False)
    name = f"{PREFIX}state"
    env = settings_of(bench, CDI_GPUS, "hook")
    base = ["--root", str(bench.state)]
    for _ in range(2):  # a start leaves what later commands need to pass without Python
        run([SHIM, *base, "create", "--bundle", str(bundle.directory), name], env)
        run([SHIM, *base, "delete", "--force", name], env)
    run([SHIM, *base, "create", "--bundle", str(bundle.directory), name], env)
    try:
        programs = {"bare runc": bench.runc, "ocigpu": SHIM, **({"peer": bench.peer} if bench.peer else {})}

        def state_of(path: str) -> Runner:
            return lambda: {"state": run([path, *base, "state", name], env)}

        runners = {label: state_of(path) for label, path in programs.items()}
        rows = bench.compare("pass-through", "pass-through", runners)
    finally:
        run([SHIM, *base, "delete", "--force", name], env)
    show(bench, "pass-through: state", rows, ("state",))


def measure_memory(bench: Bench) -> None:
    """Measure the peak memory of shim and hook: the shim becomes /bin/true, the hook runs on a real container."""
    bench.out.progress("memory")
    bundle = make_bundle(bench.work / "bundle-memory", bench.work / "image", bench.runc, asks=True)
    row: dict[str, float] = {}
    for mode in MODES:
        bundle.make_fresh()
        command = [SHIM, "create", "--bundle", str(bundle.directory), "x"]
        row[f"shim, {mode}"] = peak_memory(command, settings_of(bench, CDI_GPUS, f"{mode}-alone"))
    bundle.make_fresh()
    name = f"{PREFIX}memory"
    base = [bench.runc, "--root", str(bench.state)]
    run([*base, "create", "--bundle", str(bundle.directory), name], dict(os.environ))
    try:
        pid = json.loads(subprocess.check_output([*base, "state", name]))["pid"]
        state = json.dumps({"ociVersion": "1.0.2", "id": name, "pid": pid, "bundle": str(bundle.directory)})
        command = [HOOK, "--config", str(bench.work / f"host{CDI_GPUS}/hook.toml"), "prestart"]
        row["hook"] = peak_memory(command, dict(os.environ), state)
    finally:
        run([*base, "delete", "--force", name], dict(os.environ))
    bench.results["memory"] = row
    bench.out.table("peak memory, 8 GPUs", ["", "MiB"], [[name, f"{value / 1024:.1f}"] for name, value in row.items()])
