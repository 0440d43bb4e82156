"""What reading the host and its specifications costs: discovery, generation, one CDI device among many."""

import shutil
import statistics
import subprocess
import sysconfig
from pathlib import Path

from bench.containers import Bench, Runner
from bench.hosts import ENTRIES, REPOSITORY, SHIM, count_entries
from bench.measure import run
from bench.output import milliseconds

DISCOVERY = """
import sys, time
sys.path.insert(0, {library!r})
begin = time.perf_counter()
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.system.settings_file import read_settings
settings = read_settings({config!r})
read_host_facts(settings)
cold = time.perf_counter()
read_host_facts(settings)
print((cold - begin) * 1000, (time.perf_counter() - cold) * 1000)
"""
GENERATION = """
import sys, time
sys.path.insert(0, {library!r})
begin = time.perf_counter()
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.cdi.generate import generate
from ocigpu.cdi.write import dump_yaml
from ocigpu.system.settings_file import read_settings
settings = read_settings({config!r})
dump_yaml(generate(GenerateOptions(), settings).spec)
cold = time.perf_counter()
dump_yaml(generate(GenerateOptions(), settings).spec)
print((cold - begin) * 1000, (time.perf_counter() - cold) * 1000)
"""
CDI = """
import sys, time
sys.path += [{library!r}, {packages!r}]
begin = time.perf_counter()
import ocigpu.system.store
ocigpu.system.store.SYSTEM_DIRECTORY = {cache!r}
from ocigpu.cdi.registry import read_registry
from ocigpu.core.settings import Settings
resolved = read_registry(Settings(cdi_spec_dirs=({directory!r},))).resolve(["example.com/gpu=9999"])
print((time.perf_counter() - begin) * 1000)
assert resolved.edits[1]["env"] == ["DEVICE=9999"], resolved.edits
"""
CDI_DEVICES = 10_000


def python_and_packages() -> tuple[str, str]:
    """Return the interpreter of the stubs, and where it finds what is not in the standard library."""
    text = Path(SHIM).read_text()
    python = next(word for word in text.split() if word.startswith("/") and "python" in word)
    return python, sysconfig.get_path("purelib")


def _measure(bench: Bench, title: str, name: str, template: str, hosts: dict[str, Path]) -> None:
    """Measure what a script does with each host, in paired rounds: in a new process, and again in the same one."""
    bench.out.progress(title)
    python, _ = python_and_packages()
    found: dict[str, list[list[float]]] = {label: [] for label in hosts}
    for turn in range(bench.rounds):
        bench.out.progress(title, turn, bench.rounds)
        for label, host in hosts.items():
            script = template.format(library=str(REPOSITORY), config=str(host / "config.toml"))
            command = [python, "-I", "-S", "-c", script]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found[label].append([float(word) for word in output.split()])
    rows = []
    for label, samples in found.items():
        first, again = (statistics.median(column) for column in zip(*samples, strict=True))
        bench.results[f"{name}-{label.split()[0]}"] = {"first": first, "again": again}
        rows.append([label, milliseconds(first), milliseconds(again)])
    bench.out.table(title, ["ms", "first", "again"], rows)


def measure_discovery(bench: Bench) -> None:
    """Measure discovery by the number of GPUs, and by the size of the loader's cache."""
    hosts = {f"{count} GPUs": bench.work / f"host{count}" for count in (1, 8, 64)}
    _measure(bench, "discovery in a new process (imports included), and again in it", "discovery", DISCOVERY, hosts)
    sized = {count: bench.work / f"entries{count}" for count in ENTRIES}
    named = {f"{count_entries(host)} entries": host for count, host in sized.items()}
    _measure(bench, "discovery, 8 GPUs, by entries of the host's ld.so.cache", "ldcache", DISCOVERY, named)
    measure_interpreter(bench)


def measure_interpreter(bench: Bench) -> None:
    """Measure what an empty program costs, in the interpreter of the stubs and in the shell: the parts of the rest."""
    python, _ = python_and_packages()
    commands = {"python -I -S": [python, "-I", "-S", "-c", "pass"], "sh": ["/bin/sh", "-c", ":"], "true": ["/bin/true"]}

    def runner(command: list[str]) -> Runner:
        return lambda: {"ms": run(command, {})}

    rows = bench.compare("interpreter", "empty programs", {name: runner(words) for name, words in commands.items()})
    bench.out.table("empty programs", ["ms", "whole"], [[name, milliseconds(row["ms"])] for name, row in rows.items()])


def measure_generation(bench: Bench) -> None:
    """Measure the generation of a CDI specification."""
    hosts = {f"{count} GPUs": bench.work / f"host{count}" for count in (8, 64)}
    _measure(bench, "CDI: generation in a new process, and again in it", "generation", GENERATION, hosts)


def write_large_specification(directory: Path) -> None:
    """Write a specification of 10,000 devices in YAML, each with a node, a variable and a mount."""
    directory.mkdir()
    with (directory / "large.yaml").open("w") as file:  # piece by piece: our memory counts as a child's at its start
        file.write("cdiVersion: 0.6.0\nkind: example.com/gpu\ncontainerEdits:\n  env: [COMMON=1]\ndevices:\n")
        for number in range(CDI_DEVICES):
            file.write(
                f'- name: "{number}"\n  containerEdits:\n    env: [DEVICE={number}]\n'
                "    deviceNodes:\n    - path: /dev/null\n      permissions: rw\n"
                f"    mounts:\n    - hostPath: /etc\n      containerPath: /opt/{number}\n      options: [ro, rbind]\n"
            )


def measure_cdi(bench: Bench) -> None:
    """Measure finding one device among 10,000 in a new process: with the file parsed, and with what was kept of it.

    The specification was written when the bench began: a file of a moment ago is not kept.
    """
    bench.out.progress("one CDI device among many")
    python, packages = python_and_packages()
    cache = bench.work / "cache"
    script = CDI.format(
        library=str(REPOSITORY), packages=packages, cache=str(cache), directory=str(bench.work / "large")
    )

    def resolve() -> float:
        command = [python, "-I", "-S", "-c", script]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    first = []
    for _ in range(min(bench.rounds, 5)):
        shutil.rmtree(cache, ignore_errors=True)
        first.append(resolve())
    if not list(cache.iterdir()):
        raise RuntimeError("the parsed CDI specification was not kept")
    row = {"first": statistics.median(first), "again": statistics.median(resolve() for _ in range(bench.rounds))}
    bench.results["cdi-one-of-10000"] = row
    cells = ["YAML", milliseconds(row["first"]), milliseconds(row["again"])]
    bench.out.table("CDI: one device among 10,000", ["ms", "first", "again"], [cells])
