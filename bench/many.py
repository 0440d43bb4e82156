"""Many containers: created at once, and running while the operator's commands look at them."""

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bench.commands import PREFIX, Sample, Take, run, spend
from bench.hosts import ASKS, OCIGPU, PYTHON, REPOSITORY, SHIM, Bench

STATES = "/run/runc"
"""Where commands look for containers by themselves; /run is our own."""
EACH_WITH_GPUS = 50
"""One of so many running containers has GPUs."""
WATCH = """
import json, sys, time
sys.path.insert(0, {library!r})
from ocigpu.containers.find import default_places
from ocigpu.containers.repair import GrantKeeper
from ocigpu.system.service import ServiceLog
from ocigpu.system.settings_file import read_settings
keeper = GrantKeeper(default_places(), read_settings({config!r}), ServiceLog(True))
spent = []
for _ in range(2):
    begin = time.perf_counter()
    keeper.look()
    spent.append((time.perf_counter() - begin) * 1000)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(json.dumps(dict(first=spent[0], later=spent[1], MiB=int(peak) / 1024)))
"""
ANSWERS = (0, 3, 4)
"""Exit status of a doctor that has answered."""


@dataclass(frozen=True)
class AtOnce:
    """Creates that all begin together: the time for each; what was created is deleted, and none may be missing."""

    place: int
    runtime: str
    mode: str = ""

    def __call__(self, bench: Bench) -> Take:
        number = bench.size.creates[self.place]
        while len(bench.crowd) < number:
            bench.crowd.append(bench.bundle(ASKS, plain=False))
        program, env = bench.runc, dict(os.environ)
        if self.runtime == "ocigpu":
            program, env = SHIM, bench.settings(self.mode, bench.usual)
        base = [program, "--root", str(bench.state)]
        bundles = {f"{PREFIX}{os.getpid()}-{place}": bench.crowd[place] for place in range(number)}

        def create(name: str) -> None:
            run([*base, "create", "--bundle", str(bundles[name].directory), name], env)

        def once() -> Sample:
            for bundle in bundles.values():
                bundle.make_fresh()
            with ThreadPoolExecutor(number) as pool:
                try:
                    begin = time.perf_counter()
                    list(pool.map(create, bundles))
                    elapsed = time.perf_counter() - begin
                finally:
                    delete([bench.runc, "--root", str(bench.state)], list(bundles))
            return {"figure": elapsed * 1000 / number}

        return once


@dataclass(frozen=True)
class Running:
    """A command of the operator's, or a round of ``watch --repair``, while so many containers run."""

    place: int
    what: str

    def __call__(self, bench: Bench) -> Take:
        start_containers(bench, bench.size.running[self.place])
        env = bench.settings("spec", bench.usual)
        if self.what in ("ps", "doctor"):

            def command() -> Sample:
                spent = spend([OCIGPU, self.what], env, accepted=ANSWERS)
                return {**spent, "figure": spent["ms"]}

            return command
        script = WATCH.format(library=str(REPOSITORY), config=env["OCIGPU_CONFIG"])

        def watch() -> Sample:
            done = subprocess.run([PYTHON, "-c", script], env=env, stdout=subprocess.PIPE, check=True)
            spent: Sample = json.loads(done.stdout.splitlines()[-1])
            return {**spent, "figure": spent[self.what]}

        return watch


def start_containers(bench: Bench, number: int) -> None:
    """Let so many containers run, in all, until the end; they share a root directory, and have no network."""
    if len(bench.running) >= number:
        return
    runc = [bench.runc, "--root", STATES]
    if not bench.running:
        bench.at_end.append(lambda: delete(runc, bench.running))
    directories = []
    for asks in ({}, ASKS):
        bundle = bench.bundle(asks)
        bundle.config["process"]["args"] = ["/bin/busybox", "sleep", "86400"]
        spaces = bundle.config["linux"]["namespaces"]
        spaces[:] = [space for space in spaces if space["type"] != "network"]
        bundle.make_fresh()
        if asks:  # as mode spec leaves it: no shim for each
            run(
                [SHIM, "create", "--bundle", str(bundle.directory), "x"],
                bench.settings("spec", bench.usual, "/bin/true"),
            )
        directories.append(bundle.directory)

    def start(place: int) -> None:
        name = f"{PREFIX}{os.getpid()}-running-{place}"
        bench.running.append(name)
        run(
            [*runc, "run", "--detach", "--bundle", str(directories[place % EACH_WITH_GPUS == 0]), name],
            dict(os.environ),
        )

    bench.out.progress(f"starting containers until {number} run")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(start, range(len(bench.running), number)))


def delete(runc: list[str], names: list[str]) -> None:
    """Delete containers that run, or that were never made."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: run([*runc, "delete", "--force", name], dict(os.environ)), names))
