"""The table of all rows: each with its name, what runs, over what, and what it is to reach."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import vendor
from bench.commands import PREFIX, Sample, Take, life_cycle, run, spend
from bench.hosts import ASKS, CONTAINER_CLI, HOOK, OCIGPU, SHIM, Bench, Bundle
from bench.many import AtOnce, Running
from bench.measure import Group, Row

LEAST, USUAL, MOST = range(3)
"""Of what is measured with few, as usual, and with many: places in the fields of a Size."""
SPEC = "ratio <= 1.37; added <= 1/8 of vendor default; ratio <= 1.15 of edited; cpu <= 1/2 of vendor default"
HOOK_AIMS = "added <= 0.6 of vendor legacy; cpu <= 0.6 of vendor legacy"
BUSY = "added <= 0.75 of busy: vendor legacy; cpu <= 1 of busy: vendor legacy"
FLAT = "figure <= 1.1 of generate, 40"
AT_ONCE = "figure <= 1.25 of 20 at once: "
RUNNING = "figure <= 1000; MiB <= 100; figure <= 10 of 100 running: "


@dataclass(frozen=True)
class Life:
    """One container's life: created, started, waited for and deleted.

    ``runtime``: "runc", "crun", "ocigpu" or "vendor", the latter two in ``mode`` above ``below``.  ``config``: what
    config.json holds: "step", only the hook of simulated hosts, which stands for what a real host's procfs has by
    itself; "edited", what mode spec makes of it; or the request alone.  ``plain``: a directory used before, else an
    unused overlay over an image of 300 MB.  ``gpus``: of the host.  ``devices``: of one CDI specification,
    the last of which is asked for.  ``cold``: without anything kept, as after boot.
    """

    runtime: str
    mode: str = ""
    below: str = "runc"
    config: str = ""
    plain: bool = True
    asks: bool = True
    gpus: int = USUAL
    devices: int = -1
    cold: bool = False

    def __call__(self, bench: Bench) -> Take:
        program, env, host = self.program(bench)
        last = bench.size.devices[self.devices] - 1
        asks = ASKS if self.devices < 0 else {"NVIDIA_VISIBLE_DEVICES": f"nvidia.com/gpu={last}"}
        bundle = bench.bundle(asks if self.asks else {}, 0 if self.plain else bench.size.megabytes, self.plain)
        if self.config or (self.runtime == "vendor" and self.asks):
            bundle = edit(bench, bundle, only_step=self.config != "edited")

        def once() -> Sample:
            bundle.make_fresh()
            if self.cold:
                shutil.rmtree(host / "run/ocigpu", ignore_errors=True)
            return life_cycle(program, bench.state, bundle.directory, env)

        return once

    def program(self, bench: Bench) -> tuple[str, dict[str, str], Path]:
        below, env = (bench.runc, {}) if "crun" not in (self.runtime, self.below) else bench.crun()
        host = bench.host(bench.size.gpus[self.gpus], bench.size.entries[USUAL] if self.cold else 0)
        if self.runtime == "vendor":
            program, more = vendor.find_runtime(bench, self.mode, below)
        elif self.runtime == "ocigpu":
            specs = None if self.devices < 0 else bench.devices(bench.size.devices[self.devices])
            program, more = SHIM, bench.settings(self.mode, host, below, specs)
        else:
            program, more = below, dict(os.environ)
        return program, {**more, **env}, host


def edit(bench: Bench, bundle: Bundle, only_step: bool) -> Bundle:
    """Return a bundle with the config.json that mode spec makes of it, or with the step of simulated hosts alone."""
    run([SHIM, "create", "--bundle", str(bundle.directory), "x"], bench.settings("spec", bench.usual, "/bin/true"))
    edited: dict[str, Any] = json.loads((bundle.directory / "config.json").read_text())
    hooks = edited["hooks"]
    if hooks.keys() != {"prestart"} or [hook["path"] for hook in hooks["prestart"]] != ["/bin/sh"]:
        raise RuntimeError(f"mode spec left other hooks than the simulated host's step: {hooks}")
    return bundle._replace(config={**bundle.config, "hooks": hooks} if only_step else edited)


@dataclass(frozen=True)
class State:
    """``state`` of a created container: what is handed on without a look."""

    runtime: str
    mode: str = ""

    def __call__(self, bench: Bench) -> Take:
        program, env, _ = Life(self.runtime, self.mode).program(bench)
        bundle, name = bench.bundle({}), f"{PREFIX}{os.getpid()}-{self.runtime}"
        base = [program, "--root", str(bench.state)]
        delete = [*base, "delete", "--force", name]
        bench.at_end.append(lambda: run(delete, env))
        made: list[float] = []

        def once() -> Sample:
            while len(made) < 3:  # a start leaves what later commands need to pass without Python
                run(delete, env)
                made.append(run([*base, "create", "--bundle", str(bundle.directory), name], env))
            return {"figure": run([*base, "state", name], env)}

        return once


@dataclass(frozen=True)
class Generate:
    """``cdi generate``, the whole command: ours with and without what is kept of an earlier one, or the vendor's."""

    entries: int
    cold: bool = False
    of_vendor: bool = False

    def __call__(self, bench: Bench) -> Take:
        host = bench.host(bench.size.gpus[USUAL], bench.size.entries[self.entries])
        output = bench.work / f"{host.name}.yaml"
        command = [OCIGPU, "cdi", "generate", "--quiet", "--config", str(host / "config.toml"), "--output", str(output)]
        if self.of_vendor:
            command = vendor.generate_command(bench, host, output)

        def once() -> Sample:
            if self.cold:
                for kept in (host / "run/ocigpu", "/run/ocigpu"):  # facts; settings
                    shutil.rmtree(kept, ignore_errors=True)
            elif not self.of_vendor:
                run(command, dict(os.environ))  # a cold row may have been here
            return {"figure": run(command, dict(os.environ))}

        return once


@dataclass(frozen=True)
class Command:
    """A command of the operator's: processor time."""

    words: tuple[str, ...]
    of_vendor: str = ""
    completes: bool = False
    ours: str = OCIGPU

    def __call__(self, bench: Bench) -> Take:
        program = vendor.find_program(bench, self.of_vendor) if self.of_vendor else self.ours
        env = bench.settings("hook", bench.usual)
        if self.completes:  # as the scripts in ocigpu/cli/ ask
            env |= {"_OCIGPU_COMPLETE": "words"}

        def once() -> Sample:
            root = [f"--root={bench.usual}"] if self.of_vendor == "nvidia-container-cli" else []
            spent = spend([program, *root, *self.words], env)
            return {**spent, "figure": spent["cpu"]}

        return once


@dataclass(frozen=True)
class Memory:
    """Peak memory of the shim, which becomes /bin/true, or of the hook on a real container."""

    mode: str

    def __call__(self, bench: Bench) -> Take:
        bundle = bench.bundle(ASKS)
        host = bench.usual
        name = f"{PREFIX}{os.getpid()}-memory"
        runc = [bench.runc, "--root", str(bench.state)]

        def shim() -> Sample:
            bundle.make_fresh()
            spent = spend([SHIM, "create", "--bundle", str(bundle.directory), "x"], alone)
            return {**spent, "figure": spent["MiB"]}

        def hook() -> Sample:
            bundle.make_fresh()
            run([*runc, "create", "--bundle", str(bundle.directory), name], dict(os.environ))
            try:
                pid = json.loads(subprocess.check_output([*runc, "state", name]))["pid"]
                told = json.dumps({"ociVersion": "1.0.2", "id": name, "pid": pid, "bundle": str(bundle.directory)})
                words = [HOOK, "--config", bench.settings("hook", host)["OCIGPU_CONFIG"], "prestart"]
                spent = spend(words, dict(os.environ), told)
            finally:
                run([*runc, "delete", "--force", name], dict(os.environ))
            return {**spent, "figure": spent["MiB"]}

        if not self.mode:
            return hook
        alone = bench.settings(self.mode, host, "/bin/true")
        return shim


def make_lives(
    title: str,
    prefix: str,
    spec: str,
    hook: str = "",
    *,
    ours: Sequence[Row] = (),
    vendors: Sequence[Row] = (),
    below: str = "runc",
    plain: bool = True,
    busy: bool = False,
) -> Group:
    """Return a group of lives: bare, ours in modes spec and hook, and the vendor's two beside them.

    ``spec`` and ``hook``: what those are to reach.  ``ours``, ``vendors``: further rows of either.
    """

    def life(runtime: str, mode: str = "", config: str = "") -> Life:
        return Life(runtime, mode, below, config, plain)

    bare, step = f"{prefix}bare {below}", f"{prefix}bare + step"
    default, legacy = f"{prefix}vendor default", f"{prefix}vendor legacy"
    return Group(
        f"create, start, delete{title}",
        Row(bare, life(below)),
        Row(step, life(below, config="step"), bare),
        Row(f"{prefix}spec", life("ocigpu", "spec"), step, default, spec),
        Row(f"{prefix}hook", life("ocigpu", "hook"), bare, legacy, hook),
        *ours,
        Row(default, life("vendor", "default"), step),
        Row(legacy, life("vendor", "legacy"), step),
        *vendors,
        busy=busy,
    )


PLAIN = "8 GPUs, compute,utility, plain directory used before"
GROUPS = (
    make_lives(
        f": {PLAIN}",
        "",
        SPEC,
        HOOK_AIMS,
        ours=(
            Row("edited", Life("runc", config="edited"), "bare + step"),
            Row(
                "hook, ldconfig",
                Life("ocigpu", "ldconfig"),
                "bare runc",
                "vendor legacy",
                "added <= 0.75 of vendor legacy",
            ),
            Row(
                "hook, cold",
                Life("ocigpu", "hook", cold=True),
                "bare runc",
                "vendor legacy",
                "added <= 1 of vendor legacy",
            ),
            Row("cdi", Life("ocigpu", "cdi"), "bare runc", "vendor cdi", "added <= 0.35 of vendor cdi"),
            Row("no GPU", Life("ocigpu", "hook", asks=False), "bare runc", "vendor no GPU", "ratio <= 1.02"),
        ),
        vendors=(
            Row("vendor cdi", Life("vendor", "cdi"), "bare + step"),
            Row("vendor hookless cdi", Life("vendor", "hookless cdi"), "bare + step"),
            Row("vendor no GPU", Life("vendor", "default", asks=False), "bare runc"),
        ),
    ),
    make_lives(
        f" while every processor has other work: {PLAIN}",
        "busy: ",
        "added <= 1/2 of busy: vendor default; cpu <= 1/2 of busy: vendor default",
        BUSY,
        ours=(Row("busy: hook, ldconfig", Life("ocigpu", "ldconfig"), "busy: bare runc", "busy: vendor legacy"),),
        busy=True,
    ),
    make_lives(
        ": 8 GPUs, a fresh overlay over an image of 300 MB for each container",
        "overlay: ",
        "added <= 1/6 of overlay: vendor default",
        plain=False,
    ),
    make_lives(
        f": crun, {PLAIN}",
        "crun: ",
        "added <= 1/7 of crun: vendor default",
        "added <= 0.75 of crun: vendor legacy",
        below="crun",
    ),
    Group(
        "create, start, delete: 1 and 64 GPUs, one CDI device of 10 and of 10,000; plain directory used before",
        Row("growth: bare runc", Life("runc")),
        Row("growth: bare + step", Life("runc", config="step"), "growth: bare runc"),
        Row("spec, 1 GPU", Life("ocigpu", "spec", gpus=LEAST), "growth: bare + step"),
        Row("spec, 64 GPUs", Life("ocigpu", "spec", gpus=MOST), "growth: bare + step", "", "added <= 2 of spec, 1 GPU"),
        Row("hook, 1 GPU", Life("ocigpu", "hook", gpus=LEAST), "growth: bare runc"),
        Row("hook, 64 GPUs", Life("ocigpu", "hook", gpus=MOST), "growth: bare runc", "", "added <= 2 of hook, 1 GPU"),
        Row("cdi, of 10", Life("ocigpu", "cdi", devices=LEAST), "growth: bare runc"),
        Row(
            "cdi, of 10,000", Life("ocigpu", "cdi", devices=MOST), "growth: bare runc", "", "added <= 1.5 of cdi, of 10"
        ),
    ),
    Group(
        "pass-through: state of a created container",
        Row("state: bare runc", State("runc")),
        Row("state", State("ocigpu", "hook"), "state: bare runc", "vendor state", "added <= 0.6"),
        Row("vendor state", State("vendor", "default"), "state: bare runc"),
    ),
    Group(
        "cdi generate, the whole command, by entries of the host's ld.so.cache",
        Row("generate, 40", Generate(LEAST), "", "vendor generate, 40", "figure <= 30"),
        Row("generate, 600", Generate(USUAL), "", "vendor generate, 600", "figure <= 30"),
        Row("generate, 2,000", Generate(MOST), "", "vendor generate, 2,000", f"figure <= 30; {FLAT}"),
        Row("generate, 40, cold", Generate(LEAST, cold=True), "", "vendor generate, 40", "figure <= 60"),
        Row("generate, 600, cold", Generate(USUAL, cold=True), "", "vendor generate, 600", "figure <= 60"),
        Row(
            "generate, 2,000, cold",
            Generate(MOST, cold=True),
            "",
            "vendor generate, 2,000",
            f"figure <= 60; {FLAT}, cold",
        ),
        Row("vendor generate, 40", Generate(LEAST, of_vendor=True)),
        Row("vendor generate, 600", Generate(USUAL, of_vendor=True)),
        Row("vendor generate, 2,000", Generate(MOST, of_vendor=True)),
    ),
    Group(
        "commands: processor time",
        Row("--version", Command(("--version",)), "", "vendor --version", "figure <= 25"),
        Row("--help", Command(("--help",)), "", "vendor --help", "figure <= 40"),
        Row("list", Command(("list",)), aims="figure <= 60"),
        Row("ps", Command(("ps",)), aims="figure <= 80"),
        Row("plan", Command(("plan", "--gpus", "all")), aims="figure <= 80"),
        Row("TAB", Command(("d",), completes=True), aims="figure <= 20"),
        Row(
            "container-cli list",
            Command(("list",), ours=CONTAINER_CLI),
            "",
            "vendor list",
            "figure <= 1 of vendor list",
        ),
        Row(
            "container-cli info",
            Command(("info",), ours=CONTAINER_CLI),
            "",
            "vendor info",
            "figure <= 1 of vendor info",
        ),
        Row("vendor --version", Command(("--version",), "nvidia-ctk")),
        Row("vendor --help", Command(("--help",), "nvidia-ctk")),
        Row("vendor list", Command(("list",), "nvidia-container-cli")),
        Row("vendor info", Command(("info",), "nvidia-container-cli")),
    ),
    Group(
        "peak memory: MiB",
        Row("memory: shim, hook", Memory("hook"), aims="figure <= 12"),
        Row("memory: shim, spec", Memory("spec"), aims="figure <= 12"),
        Row("memory: shim, cdi", Memory("cdi"), aims="figure <= 12"),
        Row("memory: hook", Memory(""), aims="figure <= 12"),
    ),
)
MANY = (
    Group(
        "20 creates at once, 8 GPUs each: until all exist, for each of them",
        Row("20 at once: bare runc", AtOnce(LEAST, "runc")),
        Row("20 at once: hook", AtOnce(LEAST, "ocigpu", "hook"), "20 at once: bare runc"),
        Row("20 at once: spec", AtOnce(LEAST, "ocigpu", "spec"), "20 at once: bare runc"),
    ),
    Group(
        "200 creates at once, as before",
        Row("200 at once: bare runc", AtOnce(MOST, "runc")),
        Row("200 at once: hook", AtOnce(MOST, "ocigpu", "hook"), "200 at once: bare runc", "", AT_ONCE + "hook"),
        Row("200 at once: spec", AtOnce(MOST, "ocigpu", "spec"), "200 at once: bare runc", "", AT_ONCE + "spec"),
    ),
    Group(
        "100 containers running, one of 50 with 8 GPUs",
        Row("100 running: ps", Running(LEAST, "ps")),
        Row("100 running: doctor", Running(LEAST, "doctor")),
        Row("100 running: watch --repair, first round", Running(LEAST, "first")),
        Row("100 running: watch --repair, later round", Running(LEAST, "later")),
    ),
    Group(
        "1,000 containers running, one of 50 with 8 GPUs",
        Row("1,000 running: ps", Running(MOST, "ps"), aims=RUNNING + "ps"),
        Row("1,000 running: doctor", Running(MOST, "doctor"), aims=RUNNING + "doctor"),
        Row(
            "1,000 running: watch --repair, first round",
            Running(MOST, "first"),
            aims=RUNNING + "watch --repair, first round",
        ),
        Row(
            "1,000 running: watch --repair, later round",
            Running(MOST, "later"),
            aims=RUNNING + "watch --repair, later round",
        ),
    ),
)
