"""Many containers at once: how many a second, and that none of them fails."""

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.containers import Bench, settings_of
from bench.hosts import CDI_GPUS, MODES, SHIM, make_bundle
from bench.measure import PREFIX, life_cycle
from bench.output import times

CONTAINERS = 500
WORKERS = 16


def measure_throughput(bench: Bench) -> None:
    """Start 500 containers by 16 parallel workers: bare runc, then each of our modes."""
    image = bench.work / "image"
    bundles = [make_bundle(bench.work / f"many{number}", image, bench.runc, asks=True) for number in range(WORKERS)]
    contenders = {"bare runc": (bench.runc, dict(os.environ))}
    for mode in MODES:
        contenders[mode] = (SHIM, settings_of(bench, CDI_GPUS, mode))
    rows = []
    base = 0.0
    for name, (command, env) in contenders.items():
        failures: list[str] = []
        numbers = itertools.count(1)
        lock = threading.Lock()

        def work(
            place: int,
            command: str = command,
            env: dict[str, str] = env,
            failures: list[str] = failures,
            numbers: "itertools.count[int]" = numbers,
            lock: threading.Lock = lock,
            text: str = f"{CONTAINERS} containers by {WORKERS} workers: {name}",
        ) -> None:
            while True:
                with lock:
                    number = next(numbers)
                    if number <= CONTAINERS:
                        bench.out.progress(text, number - 1, CONTAINERS)
                if number > CONTAINERS:
                    return
                bundles[place].make_fresh()
                try:
                    life_cycle(command, bench.state, bundles[place].directory, env, f"{PREFIX}{os.getpid()}-{number}")
                except (RuntimeError, OSError) as error:
                    failures.append(str(error))

        begin = time.perf_counter()
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(work, range(WORKERS)))
        rate = CONTAINERS / (time.perf_counter() - begin)
        base = base or rate
        bench.results[f"throughput-{name}"] = {"per-second": rate, "failures": len(failures), "texts": failures[:5]}
        rows.append([name, f"{rate:.1f}", times(rate / base), str(len(failures))])
        if failures:
            bench.out.say("", f"{name}: first failure: {failures[0]}")
    title = f"{CONTAINERS} containers by {WORKERS} parallel workers: create, start, delete; 8 GPUs"
    bench.out.table(title, ["", "containers/s", "of bare", "failures"], rows)
    left = sorted(os.listdir(bench.state)) if bench.state.exists() else []
    left += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{PREFIX}*")]
    left += [str(path) for path in Path("/sys/fs/cgroup").glob(f"{PREFIX}*")]
    if left:
        raise RuntimeError(f"left behind by the containers: {', '.join(left[:5])}")
