"""Real GPU work in real containers, for each mode: run by ``make gpu-test`` on a machine with an NVIDIA driver.

Writes docs/REAL-GPU.md, only after every check has run, with what was found.  No simulated host is accepted.
``RUNC=/path`` names the low-level runtime when it is not on PATH.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ocigpu.cli.engines.busybox import make_bundle
from ocigpu.core.errors import OcigpuError
from ocigpu.core.facts import HostFacts
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.system.settings_file import read_settings

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
MODES = ("hook", "spec")
"""The modes in which the shim needs no specification."""


class CheckError(Exception):
    """A check that did not hold."""


def build(directory: Path) -> list[Path]:
    """Compile the two probes."""
    programs = []
    for name in ("vector_add", "nvml_list"):
        target = directory / name
        subprocess.run(["cc", "-O1", "-o", str(target), str(HERE / f"{name}.c"), "-ldl"], check=True)
        programs.append(target)
    return programs


def run_container(work: Path, mode: str, name: str, script: str, visible: str, programs: list[Path]) -> str:
    """Run a script in a container through the shim; returns its output. Raises CheckError with all it printed."""
    bundle = work / f"{mode}-{name}"
    variables = {"NVIDIA_VISIBLE_DEVICES": visible, "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"} if visible else {}
    smi = shutil.which("nvidia-smi") or ""
    make_bundle(str(bundle), script, variables, tuple(filter(None, (smi, *map(str, programs)))))
    for program in programs:
        shutil.copy(program, bundle / "rootfs/bin" / program.name)
    settings = work / f"{mode}.toml"
    runc = os.environ.get("RUNC", "")
    settings.write_text(f'mode = "{mode}"\n' + (f'[runtime]\nruntimes = ["{runc}"]\n' if runc else ""))
    settings.chmod(0o644)
    shim = REPOSITORY / ".venv/bin/ocigpu-runtime"
    command = [str(shim), "--root", str(work / "state"), "run", "--bundle", str(bundle), f"gpu-test-{mode}-{name}"]
    env = {**os.environ, "OCIGPU_CONFIG": str(settings)}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise CheckError(f"{mode}, {name}: exit {done.returncode}: {(done.stdout + done.stderr).strip()[-800:]}")
    return done.stdout


def require(holds: bool, what: str) -> None:
    """Raise CheckError unless the claim holds."""
    if not holds:
        raise CheckError(what)


def check_mode(work: Path, mode: str, facts: HostFacts, programs: list[Path]) -> list[tuple[str, str]]:
    """Run all checks of one mode; returns (check, result) rows."""
    rows = []
    healthy = [gpu for gpu in facts.gpus if not gpu.error]
    wanted = {gpu.uuid for gpu in healthy if not gpu.mig_enabled}
    output = run_container(work, mode, "smi", "nvidia-smi -L", "all", programs)
    require(all(uuid in output for uuid in wanted), f"nvidia-smi -L does not list every GPU:\n{output}")
    rows.append(("`nvidia-smi -L`, all GPUs", f"{len(output.strip().splitlines())} lines"))
    output = run_container(work, mode, "nvml", "nvml_list", "all", programs)
    require(wanted <= set(output.split()), f"NVML does not list every GPU:\n{output}")
    rows.append(("NVML by dlopen, all GPUs", f"{len(output.split())} GPUs"))
    output = run_container(work, mode, "cuda", "vector_add", "all", programs)
    rows.append(("CUDA driver API: allocate, compile, launch, check", "; ".join(output.strip().splitlines())))
    output = run_container(work, mode, "nothing", "ls /dev; nvidia-smi -L || echo none", "", programs)
    require("nvidia" not in output.replace("none", ""), f"a container without a request sees something:\n{output}")
    rows.append(("no request", "no node, no driver"))
    if len(healthy) > 1:
        first, second = healthy[0], healthy[1]
        script = (
            f"nvml_list; mknod /dev/other c 195 {second.minor}; (exec 3</dev/other) 2>&1 && echo opened; nvidia-smi -L"
        )
        output = run_container(work, mode, "one", script, str(first.index), programs)
        require("Operation not permitted" in output, f"the GPU that was not granted opens:\n{output}")
        require(second.uuid not in output, f"the GPU that was not granted is listed:\n{output}")
        rows.append((f"GPU {first.index} granted, GPU {second.index} not", "Operation not permitted, not listed"))
    else:
        rows.append(("a GPU that is not granted", "not run: this machine has one GPU"))
    return rows


def report(facts: HostFacts, results: dict[str, list[tuple[str, str]]], runc: str) -> str:
    """Return the text of docs/REAL-GPU.md."""
    lines = [
        "# Real GPUs",
        "",
        "Written by `make gpu-test` after a run on real hardware; do not edit.",
        "",
        f"- date: {time.strftime('%Y-%m-%d')}, kernel {os.uname().release}, {runc}",
        f"- driver {facts.driver_version}, CUDA {facts.cuda_version}, GPUs from {facts.source}",
        *(f"- GPU {gpu.index}: {gpu.model}, compute capability {gpu.architecture}" for gpu in facts.gpus),
    ]
    for mode, rows in results.items():
        lines += ["", f"## Mode `{mode}`", "", "| check | result |", "|---|---|"]
        lines += [f"| {check} | {result} |" for check, result in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run everything; exit status 0 when all holds or there is no driver, 1 when a check fails."""
    if not Path("/proc/driver/nvidia/version").exists():
        print("gpu-test: skipped: no NVIDIA driver is loaded on this machine (/proc/driver/nvidia/version is missing)")
        return 0
    if os.geteuid() != 0:
        print("gpu-test: needs root: it runs containers", file=sys.stderr)
        return 1
    try:
        facts = read_host_facts(read_settings())
    except OcigpuError as error:
        print(error.render("gpu-test"), file=sys.stderr)
        return 1
    runc = os.environ.get("RUNC") or shutil.which("runc") or ""
    if facts.simulated or not runc:
        cause = "the settings name a simulated host" if facts.simulated else "no runc (RUNC=/path names one)"
        print(f"gpu-test: {cause}", file=sys.stderr)
        return 1
    version = subprocess.run([runc, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    results: dict[str, Any] = {}
    work = Path(tempfile.mkdtemp(prefix="ocigpu-gpu-test-"))
    try:
        programs = build(work)
        for mode in MODES:
            print(f"mode {mode}", flush=True)
            results[mode] = check_mode(work, mode, facts, programs)
            for check, result in results[mode]:
                print(f"  {check}: {result}", flush=True)
    except (CheckError, OSError, subprocess.SubprocessError) as failure:
        print(f"gpu-test: failed: {failure}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(work)
    (REPOSITORY / "docs/REAL-GPU.md").write_text(report(facts, results, version))
    print("gpu-test passed; docs/REAL-GPU.md is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
