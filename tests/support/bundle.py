"""Root file systems of several kinds and OCI bundles, made on the spot from parts of the host."""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

from support.machine import MUSL_LOADER, TRIPLET
from support.process import run

LAYOUTS = ("busybox", "debian", "glibc", "alpine-like", "distroless", "no-etc")
LIBRARIES = f"usr/lib/{TRIPLET}"

_CAPABILITIES = """AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW SETFCAP SETGID
SETPCAP SETUID SYS_CHROOT"""
DOCKER_CAPABILITIES = [f"CAP_{name}" for name in _CAPABILITIES.split()]
"""What Docker and containerd give a container by default."""


def compile_probes(directory: Path) -> None:
    """Compile the programs that look around inside containers, ``probe`` (static) and ``dlopen``; and memlock.so."""
    source = Path(__file__).parent
    run(["gcc", "-O1", "-static", "-o", directory / "probe", source / "probe.c"])
    run(["gcc", "-O1", "-o", directory / "dlopen", source / "dlopen.c"])
    run(["gcc", "-O1", "-shared", "-fPIC", "-o", directory / "memlock.so", source / "memlock.c"])


def make_rootfs(path: Path, layout: str, probes: Path) -> Path:
    """Make a root file system.

    busybox: a shell and its commands, nothing else.  debian: also Debian's mark and library directory, without a
    loader.  glibc: also loader, C library and ldconfig of this machine and ``/dlopen``, but no ld.so.cache.
    alpine-like: Alpine's marks.  distroless: the static probe, no shell.  no-etc: busybox without /etc.
    """
    assert layout in LAYOUTS
    names = ["dev", "proc", "sys", "tmp", "usr/bin", "usr/sbin", "usr/lib", *([] if layout == "no-etc" else ["etc"])]
    for name in names:
        (path / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib"):
        (path / name).symlink_to(f"usr/{name}")
    (path / "tmp").chmod(0o1777)
    shutil.copy(probes / "probe", path / "probe")
    if layout != "no-etc":
        (path / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")
        (path / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    if layout == "distroless":
        (path / LIBRARIES).mkdir()
        (path / "etc/os-release").write_text('ID=debian\nVARIANT_ID="distroless"\n')
        (path / "etc/debian_version").write_text("12.4\n")
        return path
    shutil.copy("/bin/busybox", path / "usr/bin/busybox")
    for name in run(["/bin/busybox", "--list"]).stdout.split():
        target = path / "usr/bin" / name
        if name not in ("busybox", "ldconfig"):
            target.symlink_to("busybox")
    if layout == "alpine-like":
        (path / "etc/alpine-release").write_text("3.20.3\n")
        (path / "usr/lib" / MUSL_LOADER).write_bytes(b"")
    if layout in ("debian", "glibc"):
        (path / LIBRARIES).mkdir()
        (path / "etc/debian_version").write_text("12.4\n")
        (path / "etc/ld.so.conf").write_text(f"/usr/local/lib\n/lib/{TRIPLET}\n/usr/lib/{TRIPLET}\n")
    if layout == "glibc":
        _add_glibc(path, probes)
    return path


def _add_glibc(path: Path, probes: Path) -> None:
    (path / "usr/lib64").mkdir()
    (path / "lib64").symlink_to("usr/lib64")
    shutil.copy(probes / "dlopen", path / "dlopen")
    for line in run(["ldd", probes / "dlopen"]).stdout.splitlines():
        words = line.split()
        if "=>" in words:
            shutil.copy(words[2], path / LIBRARIES / words[0])
        elif words[0].startswith("/"):  # the loader, by its own path
            shutil.copy(words[0], path / "usr" / words[0].lstrip("/"))
    for name in ("libdl.so.2", "libpthread.so.0", "libm.so.6", "librt.so.1"):  # what driver libraries may need
        file = Path(run(["gcc", f"-print-file-name={name}"]).stdout.strip())
        if file.is_absolute() and file.exists():
            shutil.copy(file, path / LIBRARIES / name)
    host_ldconfig = next(file for file in ("/sbin/ldconfig.real", "/sbin/ldconfig") if os.path.exists(file))
    (path / "usr/sbin/ldconfig").unlink(missing_ok=True)
    shutil.copy(host_ldconfig, path / "usr/sbin/ldconfig")


_MOUNTS: list[dict[str, Any]] = [
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {
        "destination": "/dev",
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
    },
    {
        "destination": "/dev/pts",
        "type": "devpts",
        "source": "devpts",
        "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"],
    },
    {
        "destination": "/dev/shm",
        "type": "tmpfs",
        "source": "shm",
        "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
    },
    {
        "destination": "/sys",
        "type": "sysfs",
        "source": "sysfs",
        "options": ["nosuid", "noexec", "nodev", "ro"],
    },
]


def base_config(arguments: list[str], env: dict[str, str] | None = None) -> dict[str, Any]:
    """Return a complete config.json as engines write it: Docker's capabilities, all devices denied by default.

    No process.rlimits and no oomScoreAdj: setting them needs CAP_SYS_RESOURCE, which CI machines may lack.
    """
    variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **(env or {})}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": arguments,
            "env": [f"{name}={value}" for name, value in variables.items()],
            "cwd": "/",
            "capabilities": {name: list(DOCKER_CAPABILITIES) for name in ("bounding", "effective", "permitted")},
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": False},
        "hostname": "probe",
        "mounts": copy.deepcopy(_MOUNTS),
        "linux": {
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")],
            "maskedPaths": ["/proc/kcore", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"],
        },
    }


def write_bundle(directory: Path, config: dict[str, Any], rootfs: Path) -> Path:
    """Make a bundle of a config and a private copy of a root file system; returns its directory."""
    directory.mkdir(parents=True)
    copy_tree(str(rootfs), str(directory / "rootfs"))
    (directory / "config.json").write_text(json.dumps(config, indent="\t"))
    return directory


def copy_tree(source: str, target: str) -> None:
    """Copy a directory as shutil.copytree does, links with their times only, in two thirds of the time."""
    os.mkdir(target)
    with os.scandir(source) as entries:
        for entry in entries:
            path = f"{target}/{entry.name}"
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), path)
                time = entry.stat(follow_symlinks=False).st_mtime_ns
                os.utime(path, ns=(time, time), follow_symlinks=False)  # a cache that is older than a link is stale
            elif entry.is_dir():
                copy_tree(entry.path, path)
            else:
                shutil.copy2(entry.path, path)
    shutil.copystat(source, target)


def give_to(path: Path, uid: int, gid: int) -> None:
    """Make everything below and including ``path`` belong to a user."""
    for parent, directories, files in os.walk(path):
        for name in directories + files:
            os.lchown(os.path.join(parent, name), uid, gid)
    os.lchown(path, uid, gid)


def replace(path: Path, target: str) -> None:
    """Put a link where an image has something, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
