"""``make bench``: what ocigpu costs on top of the low-level runtime.

Prints medians of paired runs (default 30): one container's life by phase for 0, 1, 8 and 64 GPUs, pass-through,
discovery, generation of a CDI specification, a CDI device among 10,000, peak memory.  The row "cdi" is mode cdi with
a specification that was kept parsed; it gives all capabilities, the others two.  ``PEER_RUNTIME=/path`` measures
another shim in the same rounds.  Times move from machine to machine; the ratio to bare runc in the same run is the
message.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measure import PHASES, fresh_config, life_cycle, medians, paired, peak_memory, run
from ocigpu.errors import OcigpuError
from ocigpu.linux import libc
from ocigpu.sim.create import create_host

SHIM = str(Path(__file__).parent.parent / ".venv/bin/ocigpu-runtime")
HOOK = str(Path(__file__).parent.parent / ".venv/bin/ocigpu-hook")
OCIGPU = str(Path(__file__).parent.parent / ".venv/bin/ocigpu")
QUIET: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
DISCOVERY = """
import sys, time
sys.path.insert(0, {library!r})
begin = time.perf_counter()
from ocigpu.host.discover import read_host_facts
from ocigpu.settings import read_settings
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
from ocigpu.cdi.draft import GenerateOptions
from ocigpu.cdi.generate import generate
from ocigpu.cdi.write import dump_yaml
from ocigpu.settings import read_settings
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
import ocigpu.cache
ocigpu.cache.SYSTEM_DIRECTORY = {cache!r}
from ocigpu.cdi.registry import read_registry
from ocigpu.settings import Settings
resolved = read_registry(Settings(cdi_spec_dirs=({directory!r},))).resolve(["example.com/gpu=9999"])
print((time.perf_counter() - begin) * 1000)
assert resolved.edits[1]["env"] == ["DEVICE=9999"], resolved.edits
"""
CDI_DEVICES = 10_000
CDI_GPUS = 8
"""Of the host whose containers are measured in mode cdi too."""


def make_bundle(directory: Path, runc: str, visible: str) -> dict[str, Any]:
    """Make a busybox bundle whose process ends at once; returns its configuration."""
    binaries = directory / "rootfs/bin"
    binaries.mkdir(parents=True)
    for name in ("dev", "proc", "sys", "etc", "usr/lib64", "lib64"):
        (directory / "rootfs" / name).mkdir(parents=True, exist_ok=True)
    busybox = shutil.which("busybox") or "/bin/busybox"
    shutil.copy(busybox, binaries / "true")
    (directory / "rootfs/lib64/ld-linux-x86-64.so.2").touch()  # a glibc image: its loader cache is made too
    subprocess.run([runc, "spec"], cwd=directory, check=True)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    config["process"].update(terminal=False, args=["/bin/true"])
    if visible:
        config["process"]["env"] += [f"NVIDIA_VISIBLE_DEVICES={visible}", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"]
    config["root"]["readonly"] = False
    fresh_config(directory, config)
    return config


def contender(runtime: str, root: Path, bundle: Path, config: dict[str, Any], env: dict[str, str]) -> Any:
    """Return a function that runs one container's life on an unedited bundle."""

    def once() -> dict[str, float]:
        fresh_config(bundle, config)
        return life_cycle(runtime, root, bundle, env)

    return once


def show(title: str, rows: dict[str, dict[str, float]], columns: tuple[str, ...]) -> None:
    """Print a table of milliseconds, with the ratio to and the addition over the first row."""
    print(f"\n{title}")
    print(f"  {'':<10}" + "".join(f"{column:>10}" for column in columns) + f"{'ratio':>9}{'added':>9}")
    base = next(iter(rows.values()))[columns[-1]]
    for name, row in rows.items():
        values = "".join(f"{row[column]:>10.1f}" for column in columns)
        print(f"  {name:<10}{values}{row[columns[-1]] / base:>9.2f}{row[columns[-1]] - base:>9.1f}")


def measure_containers(work: Path, runc: str, peer: str, rounds: int, results: dict[str, Any]) -> None:
    """Measure one container's life with 0, 1, 8 and 64 GPUs."""
    for count in (0, 1, 8, 64):
        config_path = str(work / f"sim{count or 8}" / "config.toml")
        env = {**os.environ, "OCIGPU_CONFIG": config_path}
        bundle = work / f"bundle{count}"
        config = make_bundle(bundle, runc, "all" if count else "")
        names = {"runc": runc, "ocigpu": SHIM, **({"peer": peer} if peer else {})}
        runners = {name: contender(path, work / "state", bundle, config, env) for name, path in names.items()}
        if count == CDI_GPUS:
            env = {**env, "OCIGPU_CONFIG": str(work / "generated/config.toml")}
            runners["cdi"] = contender(SHIM, work / "state", bundle, config, env)
        rows = medians(paired(runners, rounds))
        results[f"container-{count}"] = rows
        show(f"create, start, delete; {count} GPUs (ms)", rows, (*PHASES, "total"))


def measure_pass_through(work: Path, runc: str, peer: str, rounds: int, results: dict[str, Any]) -> None:
    """Measure ``state`` of a created container: what is handed on without a look."""
    bundle = work / "bundle-state"
    make_bundle(bundle, runc, "")
    env = dict(os.environ)
    base = [SHIM, "--root", str(work / "state")]  # a start leaves what later commands need to pass without Python
    subprocess.run([*base, "create", "--bundle", str(bundle), "bench-state"], check=True, **QUIET)
    try:
        names = {"runc": runc, "ocigpu": SHIM, **({"peer": peer} if peer else {})}

        def state_of(path: str) -> Callable[[], dict[str, float]]:
            command = [path, "--root", str(work / "state"), "state", "bench-state"]
            return lambda: {"state": run(command, env)}

        rows = medians(paired({name: state_of(path) for name, path in names.items()}, rounds))
    finally:
        subprocess.run([*base, "delete", "--force", "bench-state"], check=True)
    results["pass-through"] = rows
    show("pass-through: state (ms)", rows, ("state",))


def measure_reading(
    title: str, template: str, counts: tuple[int, ...], work: Path, rounds: int, results: dict[str, Any]
) -> None:
    """Measure what a script does with a host: in a new process (imports included), and again in the same process."""
    print(f"\n{title} (ms)\n            cold      warm")
    python, _ = python_and_packages()
    for count in counts:
        script = template.format(
            library=str(Path(__file__).parent.parent), config=str(work / f"sim{count}" / "config.toml")
        )
        samples = []
        for _ in range(rounds):
            command = [python, "-I", "-S", "-c", script]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            samples.append([float(word) for word in output.split()])
        cold, warm = (statistics.median(column) for column in zip(*samples, strict=True))
        results[f"{title.replace(' ', '-').replace(':', '').lower()}-{count}"] = {"cold": cold, "warm": warm}
        print(f"  {count:>2} GPUs{cold:>9.1f}{warm:>10.1f}")


def python_and_packages() -> tuple[str, str]:
    """Return the interpreter of the stubs, and where it finds what is not in the standard library."""
    text = Path(SHIM).read_text()
    python = next(word for word in text.split() if word.startswith("/") and "python" in word)
    return python, sysconfig.get_path("purelib")


def write_large_specification(directory: Path) -> None:
    """Write a specification of 10,000 devices in YAML, each with a node, a variable and a mount."""
    directory.mkdir()
    with (directory / "large.yaml").open(
        "w"
    ) as file:  # piece by piece: our own memory counts as a child's at its start
        file.write("cdiVersion: 0.6.0\nkind: example.com/gpu\ncontainerEdits:\n  env: [COMMON=1]\ndevices:\n")
        for number in range(CDI_DEVICES):
            file.write(
                f'- name: "{number}"\n  containerEdits:\n    env: [DEVICE={number}]\n'
                "    deviceNodes:\n    - path: /dev/null\n      permissions: rw\n"
                f"    mounts:\n    - hostPath: /etc\n      containerPath: /opt/{number}\n      options: [ro, rbind]\n"
            )


def write_generated_specification(work: Path) -> None:
    """Write the specification of the host with 8 GPUs, and settings of mode cdi with its directory alone.

    What the shim keeps of it lies below /run, which becomes this process's own.
    """
    libc.unshare(libc.CLONE_NEWNS)
    libc.mount(None, "/", None, libc.MS_REC | libc.MS_PRIVATE)
    libc.mount("tmpfs", "/run", "tmpfs", 0, "mode=755")
    host = work / f"sim{CDI_GPUS}/config.toml"
    directory = work / "generated"
    command = [OCIGPU, "cdi", "generate", "--quiet", "--config", str(host), "--nvidia-cdi-hook-path", HOOK]
    subprocess.run([*command, "--output", str(directory / "nvidia.yaml")], check=True)
    (directory / "config.toml").write_text(f'mode = "cdi"\ncdi.spec-dirs = ["{directory}"]\n{host.read_text()}')


def measure_cdi(work: Path, rounds: int, results: dict[str, Any]) -> None:
    """Measure finding one device among 10,000 in a new process: with the file parsed, and with what was kept of it.

    The specification was written when the bench began: a file of a moment ago is not kept.
    """
    python, packages = python_and_packages()
    cache = work / "cache"
    script = CDI.format(
        library=str(Path(__file__).parent.parent), packages=packages, cache=str(cache), directory=str(work / "cdi")
    )

    def resolve() -> float:
        command = [python, "-I", "-S", "-c", script]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    first = []
    for _ in range(min(rounds, 5)):
        shutil.rmtree(cache, ignore_errors=True)
        first.append(resolve())
    if not list(cache.iterdir()):
        raise RuntimeError("the parsed CDI specification was not kept")
    row = {"first": statistics.median(first), "again": statistics.median(resolve() for _ in range(rounds))}
    results["cdi-one-of-10000"] = row
    print("\nCDI: one device among 10,000 (ms)\n             first     again")
    print(f"  YAML    {row['first']:>9.1f}{row['again']:>10.1f}")


def measure_memory(work: Path, runc: str, results: dict[str, Any]) -> None:
    """Measure the peak memory of shim and hook: the shim becomes /bin/true, the hook runs on a real container."""
    bundle = work / "bundle-memory"
    config = make_bundle(bundle, runc, "all")
    settings = work / "memory.toml"
    text = (work / "sim8/config.toml").read_text()
    settings.write_text('runtime.runtimes = ["/bin/true"]\n' + text)
    env = {**os.environ, "OCIGPU_CONFIG": str(settings)}
    shim = peak_memory([SHIM, "create", "--bundle", str(bundle), "x"], env)
    fresh_config(bundle, config)
    base = [runc, "--root", str(work / "state")]
    subprocess.run([*base, "create", "--bundle", str(bundle), "bench-memory"], check=True, **QUIET)
    try:
        pid = json.loads(subprocess.check_output([*base, "state", "bench-memory"]))["pid"]
        state = json.dumps({"ociVersion": "1.0.2", "id": "bench-memory", "pid": pid, "bundle": str(bundle)})
        command = [HOOK, "--config", str(work / "sim8/config.toml"), "prestart"]
        hook = peak_memory(command, env, state.encode())
    finally:
        subprocess.run([*base, "delete", "--force", "bench-memory"], check=True)
    results["memory"] = {"shim": shim, "hook": hook}
    print(f"\npeak memory: shim {shim / 1024:.1f} MiB, hook {hook / 1024:.1f} MiB (8 GPUs)")


def main() -> int:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=30, help="paired runs of each (default 30)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("bench: needs root: it runs containers", file=sys.stderr)
        return 1
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    runc, named_peer = shutil.which(os.environ.get("RUNC", "runc")), os.environ.get("PEER_RUNTIME", "")
    if not runc:
        print("bench: runc not found (RUNC=/path names another)", file=sys.stderr)
        return 1
    peer = shutil.which(named_peer) if named_peer else ""
    if peer is None:
        print(f"bench: PEER_RUNTIME={named_peer}: no such program", file=sys.stderr)
        return 1
    try:
        measure(runc, peer, options.rounds, options.json)
    except (RuntimeError, OSError, subprocess.CalledProcessError, OcigpuError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def measure(runc: str, peer: str, rounds: int, report: str | None) -> None:
    """Measure everything, print it, and write the figures to the file ``report`` if one is named."""
    results: dict[str, Any] = {
        "rounds": rounds,
        "time": time.strftime("%Y-%m-%d"),
        "kernel": os.uname().release,
    }
    with tempfile.TemporaryDirectory(prefix="ocigpu-bench-") as name:
        work = Path(name)
        write_large_specification(work / "cdi")
        for count in (1, 8, 64):
            print(f"making a simulated host with {count} GPUs", flush=True)
            create_host(str(work / f"sim{count}"), gpus=count, model="h100")
        write_generated_specification(work)
        version = subprocess.run([runc, "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[0]
        print(f"{version}, kernel {os.uname().release}, {os.cpu_count()} CPUs, medians of {rounds} paired runs")
        measure_containers(work, runc, peer, rounds, results)
        measure_pass_through(work, runc, peer, rounds, results)
        measure_reading("discovery", DISCOVERY, (1, 8, 64), work, rounds, results)
        measure_reading("CDI: generation", GENERATION, (8, 64), work, rounds, results)
        measure_cdi(work, rounds, results)
        measure_memory(work, runc, results)
    if report:
        Path(report).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
