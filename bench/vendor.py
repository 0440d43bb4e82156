"""The vendor's programs beside ours: ``PEER_DIR`` names a directory with them, built or installed by whoever measures.

Needed there: nvidia-container-runtime, nvidia-ctk, nvidia-cdi-hook; for the rows of legacy mode also
nvidia-container-runtime-hook and nvidia-container-cli (with its library, found by its own run path).  They are given
the same simulated host as ours, as a driver root.
"""

import os
from pathlib import Path

from bench.commands import run
from bench.hosts import AbsentError, Bench
from ocigpu.system import libc

CONFIG = """\
[features]
allow-cuda-compat-libs-from-container = true
[nvidia-container-cli]
root = "{host}"
path = "{peer}/nvidia-container-cli"
ldconfig = "@{ldconfig}"
load-kmods = false
[nvidia-container-runtime]
mode = "{mode}"
runtimes = ["{runtime}"]
[nvidia-container-runtime.modes.legacy]
cuda-compat-mode = ""
[nvidia-container-runtime.modes.cdi]
spec-dirs = ["{specs}"]
[nvidia-container-runtime-hook]
path = "{peer}/nvidia-container-runtime-hook"
[nvidia-ctk]
path = "{peer}/nvidia-ctk"
"""
"""What is said of CUDA's compatibility libraries keeps an option from the CLI that older ones do not know."""
MODES = {"default": "auto", "legacy": "legacy", "cdi": "cdi", "hookless cdi": "cdi"}
LEGACY = ("nvidia-container-runtime-hook", "nvidia-container-cli")


def find_program(bench: Bench, name: str) -> str:
    """Return a program of the vendor's; raises AbsentError."""
    if bench.peer is None:
        raise AbsentError("PEER_DIR is not given")
    path = bench.peer / name
    if not os.access(path, os.X_OK):
        raise AbsentError(f"{path} is missing")
    return str(path)


def generate_command(bench: Bench, host: Path, output: Path) -> list[str]:
    """Return the words with which the vendor's program writes the specification of a host."""
    words = [find_program(bench, "nvidia-ctk"), "--quiet", "cdi", "generate", "--driver-root", str(host)]
    hook = find_program(bench, "nvidia-cdi-hook")
    return [*words, "--dev-root", str(host), "--nvidia-cdi-hook-path", hook, "--output", str(output)]


def find_runtime(bench: Bench, mode: str, runtime: str) -> tuple[str, dict[str, str]]:
    """Return the vendor's shim, and the environment in which it has a mode and a low-level runtime.

    Its hook has no environment of its own: its settings are in /etc, which is ours alone (own_mounts).
    """
    shim = find_program(bench, "nvidia-container-runtime")
    host = bench.usual
    show_to_chroot(host)
    specs = bench.work / f"vendor-{mode}"
    if MODES[mode] == "cdi" and not specs.exists():
        specs.mkdir()
        command = generate_command(bench, host, specs / "nvidia.yaml")
        run([*command, *(["--disable-hook", "all"] if mode != "cdi" else [])], dict(os.environ))
    ldconfig = next(path for path in ("/sbin/ldconfig.real", "/sbin/ldconfig") if os.path.exists(path))
    text = CONFIG.format(host=host, peer=bench.peer, ldconfig=ldconfig, mode=MODES[mode], runtime=runtime, specs=specs)
    directory = bench.work / f"vendor-{mode}-{os.path.basename(runtime)}"
    places = [directory / "nvidia-container-runtime"]
    if mode == "legacy":
        for name in LEGACY:
            find_program(bench, name)
        places.append(Path("/etc/nvidia-container-runtime"))
        _own_etc(bench.work)
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.toml").write_text(text)
    return shim, {**os.environ, "XDG_CONFIG_HOME": str(directory)}


def show_to_chroot(host: Path) -> None:
    """Let a simulated driver find its own directory where it is the root: the vendor's program goes there."""
    link = host / str(host).lstrip("/")
    if not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to("/")


def _own_etc(work: Path) -> None:
    """Cover /etc with a layer of our own: what is written there stays in our directory."""
    if (work / "etc").exists():
        return
    for name in ("etc", "etc-work"):
        (work / name).mkdir()
    libc.mount("overlay", "/etc", "overlay", 0, f"lowerdir=/etc,upperdir={work}/etc,workdir={work}/etc-work")
