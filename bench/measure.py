"""Paired timing of container life cycles: every round runs each contender once, in another order."""

import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PHASES = ("create", "start", "delete")
PREFIX = "ocigpu-bench-"
"""Start of the names of our containers, which are their cgroups' too."""
WARM = 2
"""Turns of every contender that do not count: they fill the caches of the file system, of byte code and of ours."""
_LAUNCHER = """
import os, sys
actions = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]
_, status, usage = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=actions), 0)
print(usage.ru_maxrss)
sys.exit(status != 0)
"""
PAUSE = 0.02
"""Seconds before each contender: what the one before has left the kernel to do is mostly done then."""
LIMIT = 60
"""Seconds for one command."""


def run(command: Sequence[str], env: dict[str, str]) -> float:
    """Run a command to its end; returns milliseconds. Raises RuntimeError with its output when it fails.

    Errors go to a file, not a pipe: a created container keeps the descriptors, and a pipe would not end before it.
    The wait has no time limit of subprocess's own, which looks in ever longer steps of up to 50 ms.
    """
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
        limit = threading.Timer(LIMIT, process.kill)
        limit.start()
        try:
            status = process.wait()
        finally:
            elapsed = (time.perf_counter() - begin) * 1000
            limit.cancel()
        if status:
            errors.seek(0)
            text = errors.read().decode()[-500:]
            raise RuntimeError(f"{' '.join(command)}: exit {status}: {text}")
    return elapsed


def wait_stopped(pid: int) -> None:
    """Wait until the container's process has ended (it is not our child: look at /proc)."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        if text.rpartition(")")[2].split()[0] in "ZX":
            return
    raise RuntimeError(f"process {pid} does not end")


def life_cycle(runtime: str, root: Path, bundle: Path, env: dict[str, str], name: str = "") -> dict[str, float]:
    """Create, start, wait for and delete one container; returns milliseconds by phase."""
    name = name or f"{PREFIX}{os.getpid()}"
    pid_file = bundle / "pid"
    base = [runtime, "--root", str(root)]
    spent = {"create": run([*base, "create", "--bundle", str(bundle), "--pid-file", str(pid_file), name], env)}
    try:
        spent["start"] = run([*base, "start", name], env)
        wait_stopped(int(pid_file.read_text()))
        spent["delete"] = run([*base, "delete", name], env)
    except Exception:
        subprocess.run([*base, "delete", "--force", name], env=env, capture_output=True)
        raise
    spent["total"] = sum(spent.values())
    return spent


def paired(
    contenders: dict[str, Callable[[], dict[str, float]]], rounds: int, tell: Callable[[int, int], None]
) -> dict[str, dict[str, list[float]]]:
    """Run every contender once a round; returns the samples by contender and phase.

    The order changes at random, the same way each time: what one leaves the kernel to do falls on all the others.
    ``tell`` is called with the number of rounds done, and with how many there are.
    """
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    names = list(contenders)
    for _ in range(WARM):
        for name in names:
            contenders[name]()
    for turn in range(rounds):
        tell(turn, rounds)
        for name in random.Random(turn).sample(names, len(names)):
            time.sleep(PAUSE)
            for phase, value in contenders[name]().items():
                samples[name].setdefault(phase, []).append(value)
    return samples


def medians(samples: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Return the median of every list of samples."""
    return {
        name: {phase: statistics.median(values) for phase, values in each.items()} for name, each in samples.items()
    }


def peak_memory(command: Sequence[str], env: dict[str, str], stdin: str = "") -> int:
    """Return the peak resident memory of a command in KiB (wait4(2)).

    A process starts with the peak of the one that made it: a small one in between does.
    """
    words = [sys.executable, "-I", "-S", "-c", _LAUNCHER, *command]
    done = subprocess.run(words, env=env, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-500:]}")
    return int(done.stdout)
