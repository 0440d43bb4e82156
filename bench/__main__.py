"""``make bench``: what ocigpu costs on top of the low-level runtime, and the vendor's toolkit beside it.

The rows are one table, bench/rows.py.  Each is measured in paired rounds with others of its group; printed are medians,
and medians of the differences and ratios of each round.  "bare + step" is bare runc with the hook that stands for a
real host's procfs: spec, edited and the vendor's rows have it too.  "edited" is bare runc on the bundle as mode spec
leaves it: what runc itself must pay.

``PEER_DIR=DIR`` names a directory with the vendor's programs (see bench/vendor.py): without it nothing is said of them.
``PROGRAMS=DIR`` measures ocigpu's programs as they are installed there.  Times move from machine to machine: ratios of
one run are the message.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.commands import Sample, Take, adopt_orphans, busy_processors
from bench.hosts import PROGRAMS, PYTHON, REPOSITORY, TINY, AbsentError, Bench, Size, own_mounts, remove_mount
from bench.measure import Figures, Group, find_figures, take_rounds
from bench.profile import measure_profile
from bench.report import PAGE, costs, replace_costs, show_group
from bench.rows import GROUPS, MANY
from ocigpu.core.errors import OcigpuError
from ocigpu.system import libc

ROUNDS = 40
ROUNDS_OF_MANY = 2


def main() -> int:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(prog="bench", description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"paired runs of each row (default {ROUNDS})")
    parser.add_argument("--only", metavar="TEXT", default="", help="only groups and rows whose names begin with this")
    parser.add_argument("--list", action="store_true", help="print the names of all rows, and measure nothing")
    parser.add_argument(
        "--tiny", action="store_true", help="with little of everything: to try the rows, not to measure"
    )
    parser.add_argument("--profile", action="store_true", help="show where a start spends its time, and nothing else")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write all figures to FILE, every sample")
    parser.add_argument(
        "--write", action="store_true", help="write the page and the README's table for these processors"
    )
    options = parser.parse_args()
    if options.list:
        print(*(row.name for group in (*GROUPS, *MANY) for row in group.rows), sep="\n")
        return 0
    if os.geteuid() != 0:
        print("bench: needs root: it runs containers", file=sys.stderr)
        return 1
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    if options.write and (options.only or options.tiny or options.profile):
        parser.error("--write: only of a whole run")
    runc, peer = shutil.which(os.environ.get("RUNC", "runc")), os.environ.get("PEER_DIR", "")
    if not runc:
        print("bench: runc not found (RUNC=/path names another)", file=sys.stderr)
        return 1
    if not os.environ.get("PROGRAMS") and not options.tiny:  # as installed: the clone's sources may have changed since
        subprocess.run([PYTHON, str(REPOSITORY / "packaging/byte_code.py"), str(REPOSITORY)], check=True)
    own_mounts()
    adopt_orphans()
    if shutil.which("crun") and os.path.ismount("/sys/fs/cgroup/unified"):  # crun refuses machines with both versions
        libc.umount2("/sys/fs/cgroup/unified", libc.MNT_DETACH)
    with tempfile.TemporaryDirectory(prefix="ocigpu-bench-") as name:
        size = TINY if options.tiny else Size()
        bench = Bench(Path(name), runc, size, Path(peer).resolve() if peer else None)
        try:
            if options.profile:
                measure_profile(bench)
            else:
                measure(bench, options)
        except (RuntimeError, OSError, subprocess.SubprocessError, OcigpuError) as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            bench.out.clear()
            for undo in reversed(bench.at_end):
                undo()
            for target in bench.work.glob("*/rootfs"):
                remove_mount(target)
    return 0


def measure(bench: Bench, options: argparse.Namespace) -> None:
    """Measure all rows, print them, and write what the options name."""
    head = describe_machine(bench)
    samples: dict[str, list[Sample]] = {}
    figures: dict[str, Figures] = {}
    absent: dict[str, str] = {}
    # one group after another: more settings in turn than ocigpu keeps from one start to the next would be no user's
    for group in (*GROUPS, *MANY):
        takes = make_takes(bench, group, options.only, absent)
        if not takes:
            continue
        time.sleep(bench.size.settle)
        most, warm = (options.rounds, bench.size.warm) if group in GROUPS else (ROUNDS_OF_MANY, 0)
        with busy_processors(group.busy):
            samples |= take_rounds(takes, min(options.rounds, most), warm, bench.out)
        figures |= find_figures(group.rows, samples)
    bench.out.say(f"Medians of {options.rounds} paired rounds; the rows are explained in bench/rows.py.")
    for reason in sorted(set(absent.values())):
        names = ", ".join(name for name, why in absent.items() if why == reason)
        bench.out.say("", f"Not measured, {reason}: {names}.")
    for group in (*GROUPS, *MANY):
        if any(row.name in figures for row in group.rows):
            show_group(bench.out, group, figures)
    if options.json:
        rows = {name: found._asdict() for name, found in figures.items()}
        options.json.write_text(
            json.dumps({"machine": head, "rows": rows, "absent": absent, "samples": samples}) + "\n"
        )
    if options.write:
        told = f"Medians of {options.rounds} paired rounds: {'; '.join(head)}."
        processors = make_of_processors()
        table = costs(GROUPS, figures, processors, told)
        made = "Generated by `make bench WRITE=1`, with the README's table; do not edit."
        lines = [made, "", "# What ocigpu costs", "", table, *(f"- {line}" for line in head), ""]
        bench.out.write(REPOSITORY / PAGE.format(processors), lines)
        replace_costs(REPOSITORY / "README.md", processors, table)


def make_takes(bench: Bench, group: Group, only: str, absent: dict[str, str]) -> dict[str, Take]:
    """Return what runs the rows of a group once, without those that are not asked for or cannot be measured here."""
    takes = {}
    for row in group.rows:
        if only and not row.name.startswith(only) and not group.title.startswith(only):
            continue
        try:
            takes[row.name] = row.make(bench)
        except AbsentError as error:
            absent[row.name] = str(error)
    return takes


def make_of_processors() -> str:
    """Return AMD or Intel, or the machine's architecture where its processors do not say who made them."""
    found = re.search(r"^vendor_id\s*: (?:Authentic|Genuine)(\w+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def describe_machine(bench: Bench) -> list[str]:
    """Return lines that describe this machine and the programs that are measured."""
    cpu = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")), "?")
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / (1 << 20)
    versions = [_first_line([program, "--version"]) for program in (bench.runc, "crun", PYTHON)]
    kept = "with" if os.access(f"{PROGRAMS}/ocigpu-python", os.X_OK) else "without"
    if bench.peer:
        versions.append(_first_line([str(bench.peer / "nvidia-container-runtime"), "--version"]))
    return [
        f"{time.strftime('%Y-%m-%d')}, commit {_first_line(['git', 'rev-parse', '--short', 'HEAD'])}",
        f"{model}, {os.cpu_count()} CPUs, {memory:.1f} GiB, {platform.system()} {platform.release()}",
        ", ".join((*versions, f"ocigpu {kept} a Python that is kept started")),
        f"load {os.getloadavg()[0]:.1f} when it began; simulated GPUs (H100, without DRM nodes)",
    ]


def _first_line(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
