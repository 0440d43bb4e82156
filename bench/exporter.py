"""``python -m bench.exporter``: what a page and a sample of ``ocigpu exporter`` cost for 8 and 64 simulated GPUs.

Medians of interleaved rounds.  ``page``: a scrape over HTTP, new connection, as text and compressed; ``render``: making
the page of a sample, once for each sample; ``sample``: all calls of NVML, which on simulated
hosts answers at once.
"""

import argparse
import gzip
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.output import Output, milliseconds
from ocigpu.exporter.collectors import DEFAULTS
from ocigpu.exporter.exposition import Picture, render
from ocigpu.exporter.options import ExporterOptions
from ocigpu.exporter.owners import WHOLE
from ocigpu.exporter.sample import Sample
from ocigpu.exporter.sampler import Orders, Sampler
from ocigpu.kubernetes.cluster.owners import Owner
from ocigpu.sim.create import create_host
from ocigpu.system.pages import make_page
from ocigpu.system.settings_file import read_settings

GPUS = (8, 64)
PROGRAM = str(Path(__file__).parent.parent / ".venv/bin/ocigpu")
SHARED_BY = 4


class Running:
    """An exporter on a simulated host; each sample is a minute apart, so that pages are measured alone."""

    def __init__(self, work: Path, gpus: int) -> None:
        self.gpus = gpus
        host = work / f"host-{gpus}"
        create_host(str(host), gpus, "h100", compat32=False, ldcache=False)
        self.settings = read_settings(str(host / "config.toml"))
        command = [PROGRAM, "exporter", "--config", str(host / "config.toml"), "-a", "127.0.0.1:0", "-c", "60000"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.port = int(self.process.stdout.readline().rpartition(" ")[2])
        while b"DCGM_FI_DEV_GPU_TEMP{" not in self.scrape():
            time.sleep(0.1)

    def scrape(self, encoding: str = "identity") -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", "/metrics", headers={"Accept-Encoding": encoding})
        body = connection.getresponse().read()
        connection.close()
        return body

    def memory(self) -> tuple[float, float]:
        """Return MiB of the exporter and of the process that asks NVML, at their peak."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            children += (thread / "children").read_text().split()
        return peak(self.process.pid), peak(int(children[0]))

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)


def _make(picture: Picture) -> object:
    return make_page(render(DEFAULTS, picture, ExporterOptions(), "node"))


def peak(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def take_sample(sampler: Sampler) -> Sample:
    """Return the next sample, asked for now."""
    sampler.order(Orders(tuple(collector.name for collector in DEFAULTS), 3600, 300, 300))
    while True:
        for sample in sampler.wait(20):
            if not sample.error:
                return sample


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1000


def measure(work: Path, rounds: int, out: Output) -> dict[str, float]:
    running = [Running(work, gpus) for gpus in GPUS]
    samplers = [Sampler(each.settings) for each in running]
    times: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    try:
        samples = [take_sample(sampler) for sampler in samplers]
        for _ in range(rounds):
            for each, sampler, first in zip(running, samplers, samples, strict=True):
                name = str(each.gpus)
                shared = {
                    (gpu.uuid, WHOLE): [Owner(f"pod-{number}", "default", "main") for number in range(SHARED_BY)]
                    for gpu in first.gpus
                }
                functions: dict[str, Callable[[], object]] = {
                    "page": each.scrape,
                    "page gzip": partial(each.scrape, "gzip"),
                    "render": partial(_make, Picture(first)),
                    "render shared": partial(_make, Picture(first, shared)),
                }
                for what, function in functions.items():
                    times.setdefault(f"{what} {name}", []).append(timed(function))
                times.setdefault(f"sample {name}", []).append(take_sample(sampler).seconds * 1000)
        for each in running:
            sizes[f"{each.gpus}"] = len(each.scrape())
            sizes[f"{each.gpus} gzip"] = len(each.scrape("gzip"))
            assert gzip.decompress(each.scrape("gzip"))
        memory = {each.gpus: each.memory() for each in running}
    finally:
        for sampler in samplers:
            sampler.close()
        for each in running:
            each.end()
    medians = {name: statistics.median(found) for name, found in times.items()}
    rows = {
        "page, text": "page", "page, gzip": "page gzip", "sample": "sample", "render and compress": "render",
        f"render, each GPU shared by {SHARED_BY} pods": "render shared",
    }  # fmt: skip
    table = [[title, *(milliseconds(medians[f"{name} {gpus}"]) for gpus in GPUS)] for title, name in rows.items()]
    out.table("time, ms", ["", *(f"{gpus} GPUs" for gpus in GPUS)], table)
    out.table(
        "size and memory",
        ["", *(f"{gpus} GPUs" for gpus in GPUS)],
        [
            ["page, KiB", *(f"{sizes[str(gpus)] / 1024:.0f}" for gpus in GPUS)],
            ["page, gzip, KiB", *(f"{sizes[f'{gpus} gzip'] / 1024:.0f}" for gpus in GPUS)],
            ["exporter, peak MiB", *(f"{memory[gpus][0]:.0f}" for gpus in GPUS)],
            ["process that asks NVML, peak MiB", *(f"{memory[gpus][1]:.0f}" for gpus in GPUS)],
        ],
    )
    return medians


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.exporter", description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds (default 30)")
    parser.add_argument("--report", metavar="FILE", help="also write what is printed to FILE, in Markdown")
    parser.add_argument("--json", metavar="FILE", help="also write the medians to FILE")
    options = parser.parse_args()
    out = Output()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    out.say(
        f"Medians of {options.rounds} interleaved rounds, {time.strftime('%Y-%m-%d')}; {cpu}, {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f} when it began; simulated H100s."
    )
    with tempfile.TemporaryDirectory(prefix="ocigpu-bench-") as work:
        medians = measure(Path(work), options.rounds, out)
    if options.json:
        Path(options.json).write_text(json.dumps(medians, indent=1) + "\n")
    if options.report:
        made = f"Generated by `python -m bench.exporter --report {options.report}`; do not edit."
        out.write(Path(options.report), [made, "", "# What ocigpu exporter costs", ""])
    return 0


if __name__ == "__main__":
    sys.exit(main())
