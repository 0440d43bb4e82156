"""``python -m fuzz [--seconds N] [TARGET...]``: fuzz the targets, two at a time; exit status 1 on a finding.

What a run has found worth keeping for the next one is in build/fuzz/corpus, beside the seeds in fuzz/corpus, and what
it says in build/fuzz/TARGET.log.  An input that makes a target fail is kept in fuzz/findings: fix the product, then
move the file to fuzz/corpus/TARGET, where the test suite runs it from then on.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import IO, NamedTuple

from fuzz.targets import ROOT, TARGETS

WORK = ROOT / "build/fuzz"
SEEDS = ROOT / "fuzz/corpus"
FINDINGS = ROOT / "fuzz/findings"
AT_ONCE = 2
TIMEOUT = 20
"""Seconds that one input may take."""
MEMORY = 2048
"""MiB that a process may have."""
REPORT_EVERY = 30


class Run(NamedTuple):
    """A target that is being fuzzed."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: IO[bytes]
    begin: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--seconds", type=int, default=600, help="for each target (600)")
    parser.add_argument("target", nargs="*", help=", ".join(TARGETS))
    options = parser.parse_args()
    if unknown := set(options.target) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    names = options.target or list(TARGETS)
    for directory in (WORK, FINDINGS):
        directory.mkdir(parents=True, exist_ok=True)
    before = set(FINDINGS.iterdir())
    scratch = tempfile.mkdtemp(prefix="ocigpu-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    try:
        results = _run_all(names, options.seconds, scratch)
    finally:
        shutil.rmtree(scratch)
    rows = ["| target | seconds | executions | edges | inputs kept | lines reached |", "|---|---|---|---|---|---|"]
    rows += [_row(name, seconds) for name, (_, seconds) in results.items()]
    report = "\n".join(rows)
    (WORK / "report.md").write_text(report + "\n")
    print(report)
    found = sorted(set(FINDINGS.iterdir()) - before)
    failed = [name for name, (status, _) in results.items() if status]
    for name in failed:
        print(f"FAILED: {name}: see {WORK.relative_to(ROOT)}/{name}.log")
    for path in found:
        print(f"finding: {path.relative_to(ROOT)}")
    if not any(FINDINGS.iterdir()):
        FINDINGS.rmdir()
    return 1 if found or failed else 0


def _run_all(names: list[str], seconds: int, scratch: str) -> dict[str, tuple[int, float]]:
    """Return (exit status, seconds) by target."""
    waiting, running, results = list(names), list[Run](), dict[str, tuple[int, float]]()
    shown = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(_start(waiting.pop(0), seconds, scratch))
            time.sleep(0.2)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                run.log.close()
                results[run.name] = (run.process.returncode, time.monotonic() - run.begin)
                print(f"{run.name}: {'failed' if run.process.returncode else 'done'}: {_last(run.name)}", flush=True)
            if time.monotonic() - shown >= REPORT_EVERY:
                shown = time.monotonic()
                for run in running:
                    print(f"{run.name}: {shown - run.begin:.0f} of {seconds} s: {_last(run.name)}", flush=True)
    finally:
        for run in running:
            run.process.kill()
            run.process.wait()
            run.log.close()
    return {name: results[name] for name in names}


def _start(name: str, seconds: int, scratch: str) -> Run:
    target = TARGETS[name]
    corpus = WORK / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    words = WORK / f"{name}.dict"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in dict.fromkeys(target.words)))
    command = [
        sys.executable, "-m", "fuzz.one", name, f"-max_total_time={seconds}", f"-max_len={target.max_len}",
        f"-timeout={TIMEOUT}", f"-rss_limit_mb={MEMORY}", f"-dict={words}", f"-artifact_prefix={FINDINGS}/{name}-",
        "-len_control=20", "-print_final_stats=1", str(corpus), str(SEEDS / name),
    ]  # fmt: skip
    log = (WORK / f"{name}.log").open("wb")
    environment = {**os.environ, "TMPDIR": scratch, "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    return Run(name, process, log, time.monotonic())


def _escaped(word: str) -> str:
    return "".join(
        f"\\x{byte:02x}" if byte < 32 or byte > 126 or byte in b'"\\' else chr(byte) for byte in word.encode()
    )


def _log(name: str) -> str:
    return (WORK / f"{name}.log").read_text(errors="replace")


def _last(name: str) -> str:
    """Return libFuzzer's last word on how far it is."""
    lines = re.findall(r"^#.*cov: .*$", _log(name), re.MULTILINE)
    return " ".join(lines[-1].split()) if lines else "no line yet"


def _row(name: str, seconds: float) -> str:
    log = _log(name)
    executions = re.search(r"number_of_executed_units: (\d+)", log)
    edges = re.findall(r"cov: (\d+) ft: \d+ corp: (\d+)", log) or [("?", "?")]
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.lines", name, WORK / "corpus" / name, SEEDS / name],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    reached = "?"
    if done.returncode == 0:
        some, total = map(int, done.stdout.split())
        reached = f"{some} of {total}"
    count = f"{int(executions[1]):,}" if executions else "?"
    return f"| {name} | {seconds:.0f} | {count} | {edges[-1][0]} | {edges[-1][1]} | {reached} |"


if __name__ == "__main__":
    sys.exit(main())
