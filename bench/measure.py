"""The runner: rows in groups, measured in paired rounds.  In a round every row of a group runs once, in random order.

A row is compared with another of its group in the same round: what the machine does meanwhile falls on both.
"""

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
from typing import TYPE_CHECKING, NamedTuple

from bench.output import Output

if TYPE_CHECKING:
    from bench.hosts import Bench

PREFIX = "ocigpu-bench-"
"""Start of the names of our containers, which are their cgroups' too."""
PAUSE = 0.02
"""Seconds before each row: what the one before has left the kernel to do is mostly done then."""
LIMIT = 120
"""Seconds for one command."""
_LAUNCHER = """
import os, sys, time
actions = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]
begin = time.perf_counter()
_, status, usage = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=actions), 0)
elapsed = time.perf_counter() - begin
print(elapsed * 1000, (usage.ru_utime + usage.ru_stime) * 1000, usage.ru_maxrss / 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""

Sample = dict[str, float]
"""Figures of one run by name; "figure" is the row's own, in ms as a rule."""
Take = Callable[[], Sample]


class Row(NamedTuple):
    """A row of the table: ``make`` prepares what it needs and returns what runs it once; ``name`` is unique.

    ``over``: the row that this one is compared with.  The step of simulated hosts, which that may have and the group's
    first row has not, is no part of what is added, nor of the ratio.  ``peer``: the vendor's row beside it.
    ``aims``: such as "added <= 1/8 of ROW; ratio <= 1.37": a figure of it is at most that, or that share of ROW's.
    """

    name: str
    make: "Callable[[Bench], Take]"
    over: str = ""
    peer: str = ""
    aims: str = ""


class Group:
    """Rows that are measured side by side; ratios are to the first."""

    def __init__(self, title: str, *rows: Row) -> None:
        self.title, self.rows = title, rows


class Figures(NamedTuple):
    """Medians of a row: of its samples, of the ratio to its group's first row, of what it adds to its ``over``."""

    sample: Sample
    ratio: float | None = None
    added: float | None = None

    def get(self, what: str) -> float | None:
        return self.ratio if what == "ratio" else self.added if what == "added" else self.sample.get(what)


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


def spend(command: Sequence[str], env: dict[str, str], stdin: str = "", accepted: Sequence[int] = (0,)) -> Sample:
    """Return what a command and what it waited for took: "ms", "cpu" in ms, "MiB" at its peak (wait4(2)).

    A process starts with the peak memory of the one that made it: a small one in between does.
    """
    words = [sys.executable, "-I", "-S", "-c", _LAUNCHER, *command]
    done = subprocess.run(words, env=env, input=stdin, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode not in accepted:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-500:]}")
    return dict(zip(("ms", "cpu", "MiB"), map(float, done.stdout.split()), strict=True))


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


def life_cycle(runtime: str, root: Path, bundle: Path, env: dict[str, str], name: str = "") -> Sample:
    """Create, start, wait for and delete one container; returns milliseconds by phase, and of all of them."""
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
    return {**spent, "figure": sum(spent.values())}


def take_rounds(takes: dict[str, Take], rounds: int, warm: int, out: Output) -> dict[str, list[Sample]]:
    """Run every row of a group once a round; returns the samples by row.

    The order changes at random, the same way each time: what one leaves the kernel to do falls on all the others.
    ``warm`` turns before do not count: they fill the caches of the file system, of byte code and of ours.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in takes}
    for name, take in takes.items():
        out.progress(f"trying {name}")
        for _ in range(warm):
            take()
    for turn in range(rounds):
        out.progress("measuring", turn, rounds)
        for name in random.Random(turn).sample(list(takes), len(takes)):
            time.sleep(PAUSE)
            samples[name].append(takes[name]())
    return samples


def find_figures(rows: Sequence[Row], samples: dict[str, list[Sample]]) -> dict[str, Figures]:
    """Return the medians of a group's rows; ratios and differences are taken round by round."""
    found: dict[str, Figures] = {}
    base = samples.get(rows[0].name, [])
    for row in rows:
        taken = samples.get(row.name, [])
        if not taken:
            continue
        medians = {name: statistics.median(each[name] for each in taken) for name in taken[0]}
        ratio = added = None
        if row.over in samples:
            triples = [
                (a["figure"], b["figure"], c["figure"]) for a, b, c in zip(taken, samples[row.over], base, strict=True)
            ]
            added = statistics.median(own - over for own, over, _ in triples)
            ratio = statistics.median((own - over + first) / first for own, over, first in triples)
        found[row.name] = Figures(medians, ratio, added)
    return found
