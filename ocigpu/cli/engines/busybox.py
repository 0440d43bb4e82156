"""A small container made of this machine's busybox or own tools: a root directory, as an OCI bundle or an image."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from ocigpu.core.config_json import SEARCH_PATH
from ocigpu.core.errors import OcigpuError
from ocigpu.system.programs import run_program

DIRECTORIES = ("bin", "dev", "etc", "lib", "lib64", "proc", "run", "sys", "tmp", "usr/bin", "usr/lib", "var")
TOOLS = ("sh", "find", "grep", "ls", "mknod")
"""What scripts in the container call."""
LOADED_LIBRARIES = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
"""What the driver's libraries need of glibc; programs that open them with dlopen do not name all of these."""
CAPABILITIES = (
    "CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
)  # fmt: skip
"""What Docker and containerd give a container by default; CAP_MKNOD is among them."""


def make_bundle(bundle: str, script: str, variables: dict[str, str], programs: tuple[str, ...] = ()) -> None:
    """Make an OCI bundle whose container runs ``script`` with busybox's sh and the environment ``variables``.

    ``programs``: see :func:`make_root`.
    """
    make_root(Path(bundle, "rootfs"), programs)
    Path(bundle, "config.json").write_text(json.dumps(make_config(script, variables), indent=1), encoding="utf-8")


def make_root(rootfs: Path, programs: tuple[str, ...] = ()) -> bool:
    """Make a root directory of this machine's busybox, and of true(1), which the loader loads unless it is static.

    Without busybox it gets the machine's own sh and other tools.

    ``programs``: host paths of programs whose loader and libraries (not the programs) the root gets, so that they run
    when they are mounted into the container.  Returns whether true(1) needs a loader: then /usr/bin/true shows whether
    a library can be loaded.  Raises OcigpuError OCIGPU-DEMO-1 without both.
    """
    busybox = shutil.which("busybox", path=SEARCH_PATH)
    tools = {} if busybox else {name: shutil.which(name, path=SEARCH_PATH) for name in TOOLS}
    if missing := [name for name, path in tools.items() if path is None]:
        cause = f"busybox is not installed, and these tools are missing: {', '.join(missing)}"
        raise OcigpuError("OCIGPU-DEMO-1", cause, "install busybox-static")
    for name in DIRECTORIES:
        (rootfs / name).mkdir(parents=True, exist_ok=True)
    if busybox:
        shutil.copy(busybox, rootfs / "bin/busybox")
        for applet in set(run_program([busybox, "--list"], 30).output.split()) - {"busybox"}:
            (rootfs / "bin" / applet).symlink_to("busybox")
    copied = {name: path for name, path in tools.items() if path}
    for name, path in copied.items():
        shutil.copy(path, rootfs / "bin" / name)
    loaded = shutil.which("true", path="/usr/bin:/bin")
    if loaded:
        shutil.copy(loaded, rootfs / "usr/bin/true")
    needed = {program: _needed_files(program) for program in (busybox, *copied.values(), loaded, *programs) if program}
    for library in {library for libraries in needed.values() for library in libraries}:
        target = rootfs / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    return bool(loaded and needed[loaded])


def _needed_files(program: str) -> list[str]:
    """Return the loader and libraries that a host's program runs with, none for a static one.

    As ldd(1) tells, which loads the program: only for programs of the host, never of an image.
    """
    try:
        output = run_program(["ldd", program], 30).output
    except OSError:
        return []
    words = [word for line in output.splitlines() for word in line.split()]
    files = [word for word in words if word.startswith("/") and os.path.isfile(word)]
    libc = next((path for path in files if os.path.basename(path) == LOADED_LIBRARIES[0]), "")
    beside = [os.path.join(os.path.dirname(libc), name) for name in LOADED_LIBRARIES] if libc else []
    return list(dict.fromkeys([*files, *filter(os.path.isfile, beside)]))


def make_config(script: str, variables: dict[str, str]) -> dict[str, Any]:
    """Return a config.json as an engine writes it for an ordinary container: no host device, default capabilities."""
    config: dict[str, Any] = json.loads(Path(__file__).with_name("demo.json").read_text(encoding="utf-8"))
    process = config["process"]
    process["args"][-1] = script
    process["env"] += [f"{name}={value}" for name, value in variables.items()]
    process["capabilities"] = {kind: list(CAPABILITIES) for kind in ("bounding", "effective", "permitted")}
    return config


def sections_of(output: str) -> dict[str, str]:
    """Return the parts of a script's output by the name in the line "@@ name" before each."""
    sections: dict[str, str] = {}
    for part in output.split("@@ ")[1:]:
        name, _, text = part.partition("\n")
        sections[name.strip()] = text.strip()
    return sections
