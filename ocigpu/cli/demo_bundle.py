"""A small OCI bundle for the demo: a busybox root file system and a config.json, as an engine would write them."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ocigpu.core.errors import OcigpuError

COMMAND_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DIRECTORIES = ("bin", "dev", "etc", "lib", "lib64", "proc", "run", "sys", "tmp", "usr/bin", "usr/lib", "var")
LOADED_LIBRARIES = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
"""What the driver's libraries need of glibc; programs that open them with dlopen do not name all of these."""
CAPABILITIES = (
    "CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
)  # fmt: skip
"""What Docker and containerd give a container by default; CAP_MKNOD is among them."""


def make_bundle(bundle: str, script: str, variables: dict[str, str], programs: tuple[str, ...] = ()) -> None:
    """Make an OCI bundle whose container runs ``script`` with busybox's sh and the environment ``variables``.

    The root also has the host's true(1) as /usr/bin/true, a program that the loader loads if the host has a dynamic
    one. ``programs``: host paths of programs whose loader and libraries (not the programs) the root gets, so that
    they run when they are mounted into the container.  Raises OcigpuError OCIGPU-DEMO-1 without busybox.
    """
    busybox = shutil.which("busybox", path=COMMAND_PATH)
    if busybox is None:
        cause = "busybox was not found: the demo's container is made of it"
        raise OcigpuError("OCIGPU-DEMO-1", cause, "install busybox-static")
    rootfs = Path(bundle, "rootfs")
    for name in DIRECTORIES:
        (rootfs / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(busybox, rootfs / "bin/busybox")
    listed = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True, timeout=30)
    for applet in set(listed.stdout.split()) - {"busybox"}:
        (rootfs / "bin" / applet).symlink_to("busybox")
    loaded = shutil.which("true", path="/usr/bin:/bin")
    if loaded:
        shutil.copy(loaded, rootfs / "usr/bin/true")
    copied = {library for program in (busybox, loaded, *programs) if program for library in _needed_files(program)}
    for library in copied:
        target = rootfs / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    Path(bundle, "config.json").write_text(json.dumps(make_config(script, variables), indent=1), encoding="utf-8")


def _needed_files(program: str) -> list[str]:
    """Return the loader and libraries that a host's program runs with, none for a static one.

    As ldd(1) tells, which loads the program: only for programs of the host, never of an image.
    """
    try:
        output = subprocess.run(["ldd", program], capture_output=True, text=True, check=False, timeout=30).stdout
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
