"""Commands that are timed: one by itself, or those of a container's life."""

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import prctl

PREFIX = "ocigpu-bench-"
"""Start of the names of our containers, which are their cgroups' too."""
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


def adopt_orphans() -> None:
    """Become the parent of processes below this one that lose theirs: containers, and what a hook leaves behind."""
    prctl.set_child_subreaper(True)


def processor_time() -> float:
    """Return the milliseconds of processor time of all processes below this one that have ended, and reap the last."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (usage.ru_utime + usage.ru_stime) * 1000


@contextlib.contextmanager
def busy_processors(busy: bool) -> Iterator[None]:
    """Keep every processor busy with a process that computes, as on a node that has other work."""
    words = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    others = [subprocess.Popen(words) for _ in range(os.cpu_count() or 1)] if busy else []
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def life_cycle(runtime: str, root: Path, bundle: Path, env: dict[str, str], name: str = "") -> Sample:
    """Create, start, wait for and delete one container.

    Returns milliseconds by phase, "figure" of all of them, and "cpu": the processor time of all their processes, the
    container's own included (adopt_orphans was called).
    """
    name = name or f"{PREFIX}{os.getpid()}"
    pid_file = bundle / "pid"
    base = [runtime, "--root", str(root)]
    before = processor_time()
    spent = {"create": run([*base, "create", "--bundle", str(bundle), "--pid-file", str(pid_file), name], env)}
    with contextlib.ExitStack() as undo:
        undo.callback(subprocess.run, [*base, "delete", "--force", name], env=env, capture_output=True)
        spent["start"] = run([*base, "start", name], env)
        wait_stopped(int(pid_file.read_text()))
        spent["delete"] = run([*base, "delete", name], env)
        undo.pop_all()  # it is deleted
    return {**spent, "figure": sum(spent.values()), "cpu": processor_time() - before}
