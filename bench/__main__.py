"""``make bench``: what ocigpu costs on top of the low-level runtime.

Prints medians of paired runs (default 30): one container's life by phase for 0, 1, 8 and 64 GPUs on an image like a
real one, crun, pass-through, discovery, generation of a CDI specification, a CDI device among 10,000, peak memory,
500 containers at once, and a profile of a warm start; then the targets.

Rows: ``hook``, ``spec`` and ``cdi`` are our modes, cdi with a specification that was generated before and cut down to
the same capabilities.  ``edited`` is bare runc on the bundle as mode spec leaves it: what runc itself must pay.
``bare + step`` is bare runc with the hook that stands for a real host's procfs, which spec and edited have too.
A plain directory that was used before is what the vendor's figures were measured on: in an overlay each new file is
dearer, and containers with GPUs have some forty of them.

``PEER_RUNTIME=/path`` measures another shim in the same rounds.  Times move from machine to machine; the ratio to
bare runc in the same run is the message.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.containers import Bench, measure_containers, measure_crun, measure_memory, measure_pass_through
from bench.hosts import (
    ENTRIES,
    GPUS,
    count_entries,
    make_host,
    make_host_with_entries,
    make_image,
    own_mounts,
    remove_mount,
    write_generated_specification,
)
from bench.output import Output
from bench.profile import measure_profile
from bench.reading import (
    measure_cdi,
    measure_discovery,
    measure_generation,
    python_and_packages,
    write_large_specification,
)
from bench.targets import show_targets
from bench.throughput import measure_throughput
from ocigpu.core.errors import OcigpuError

SETTLED = 3
"""Seconds after which what was made counts as unchanged: nothing is kept of what may change once more unseen."""


def parts(bench: Bench, cdi_settings: Path) -> dict[str, Callable[[], None]]:
    """Return all measurements by name, in order."""

    def containers(gpus: int, plain: bool = False) -> Callable[[], None]:
        return lambda: measure_containers(bench, gpus, cdi_settings, plain)

    return {
        **{f"container-{gpus}": containers(gpus) for gpus in (0, *GPUS)},
        **{f"plain-{gpus}": containers(gpus, plain=True) for gpus in (0, 8)},
        "pass-through": lambda: measure_pass_through(bench),
        "discovery": lambda: measure_discovery(bench),
        "generation": lambda: measure_generation(bench),
        "cdi": lambda: measure_cdi(bench),
        "memory": lambda: measure_memory(bench),
        "throughput": lambda: measure_throughput(bench),
        "profile": lambda: measure_profile(bench, cdi_settings),
        "crun": lambda: measure_crun(bench),  # the last: it changes the mounts of cgroups
    }


NAMES = (*(f"container-{gpus}" for gpus in (0, *GPUS)), "plain-0", "plain-8", "pass-through", "discovery")
NAMES += ("generation", "cdi", "memory", "throughput", "profile", "crun")


def main() -> int:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(prog="bench", description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=30, help="paired runs of each (default 30)")
    parser.add_argument("--only", metavar="NAME,...", default="", help=f"only these: {', '.join(NAMES)}")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE, every sample among them")
    parser.add_argument("--report", metavar="FILE", help="also write what is printed to FILE, in Markdown")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("bench: needs root: it runs containers", file=sys.stderr)
        return 1
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    only = tuple(filter(None, options.only.split(","))) or NAMES
    if unknown := [name for name in only if name not in NAMES]:
        parser.error(f"--only: {unknown[0]}: not one of {', '.join(NAMES)}")
    runc, named_peer = shutil.which(os.environ.get("RUNC", "runc")), os.environ.get("PEER_RUNTIME", "")
    if not runc:
        print("bench: runc not found (RUNC=/path names another)", file=sys.stderr)
        return 1
    peer = shutil.which(named_peer) if named_peer else ""
    if peer is None:
        print(f"bench: PEER_RUNTIME={named_peer}: no such program", file=sys.stderr)
        return 1
    if "profile" in only and not shutil.which("strace"):
        print("bench: strace not found: the profile needs it (--only leaves parts out)", file=sys.stderr)
        return 1
    report, figures = (Path(name).resolve() if name else None for name in (options.report, options.json))
    try:
        measure(runc, peer, options.rounds, only, report, figures)
    except (RuntimeError, OSError, subprocess.CalledProcessError, OcigpuError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def measure(
    runc: str, peer: str, rounds: int, only: tuple[str, ...], report: Path | None, figures: Path | None
) -> None:
    """Measure, print, and write report and figures to the files that are named."""
    out = Output()
    own_mounts()
    with tempfile.TemporaryDirectory(prefix="ocigpu-bench-", ignore_cleanup_errors=False) as name:
        work = Path(name)
        bench = Bench(work, runc, peer, rounds, out, {"rounds": rounds, "time": time.strftime("%Y-%m-%d")}, {})
        try:
            head = describe_machine(runc)
            cdi_settings = prepare(bench, only)
            out.say(f"Medians of {rounds} paired runs; the rows are explained in bench/__main__.py.")
            for part, run_part in parts(bench, cdi_settings).items():
                if part in only:
                    run_part()
            show_targets(out, bench.results)
        finally:
            out.clear()
            for target in work.glob("*/rootfs"):
                remove_mount(target)
    bench.results["machine"] = head
    if figures:
        figures.write_text(json.dumps({**bench.results, "samples": bench.samples}, indent=1) + "\n")
    if report:
        made = f"Generated by `make bench REPORT={os.path.relpath(report)}`; do not edit."
        out.write(report, [made, "", "# What ocigpu costs", "", *(f"- {line}" for line in head), ""])


def prepare(bench: Bench, only: tuple[str, ...]) -> Path:
    """Make the image, the hosts and the specifications; returns the settings of mode cdi."""
    write_large_specification(bench.work / "large")
    bench.out.progress("making an image")
    make_image(bench.work / "image")
    for count in GPUS:
        bench.out.progress(f"making a simulated host with {count} GPUs")
        make_host(bench.work, count)
    if "discovery" in only:
        sizes = []
        for entries in ENTRIES:
            bench.out.progress(f"making a simulated host with {entries} libraries")
            sizes.append(make_host_with_entries(bench.work, entries))
        bench.results["ldcache-sizes"] = sizes
    cdi_settings = write_generated_specification(bench.work)
    bench.results["image-libraries"] = count_entries(bench.work / "image")
    time.sleep(SETTLED)
    return cdi_settings


def describe_machine(runc: str) -> list[str]:
    """Return lines that describe this machine and the programs that are measured."""
    cpu = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")), "?")
    virtual = "virtual" if "hypervisor" in cpu else "not virtual, as far as it says"
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / (1 << 20)
    versions = [_first_line([runc, "--version"])]
    if crun := shutil.which("crun"):
        versions.append(_first_line([crun, "--version"]))
    versions.append(_first_line([python_and_packages()[0], "-I", "-S", "--version"]))
    commit = _first_line(["git", "rev-parse", "--short", "HEAD"])
    return [
        f"{time.strftime('%Y-%m-%d')}, commit {commit}",
        f"{model}, {os.cpu_count()} CPUs, {memory:.1f} GiB, {virtual}",
        f"{platform.system()} {platform.release()}, load {os.getloadavg()[0]:.1f} when it began",
        ", ".join(versions),
        "simulated GPUs (H100); containers have unused overlays over a Debian-like image, where nothing else is said",
    ]


def _first_line(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
