"""Bundles with a hook that carries out a plan, and the real runtimes to run them."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from provision_lab import make_host, make_rootfs, snapshot
from support.product import PublicCopy
from support.requirements import programs, require, user_namespaces
from support.runtimes import view_of

USER = 4321


def copy_hook(public_copy: PublicCopy, name: str) -> list[str]:
    """Return the command of a hook of this directory where ordinary users can run it: interpreter, script, library."""
    here = Path(__file__).parent
    script = shutil.copy(here / name, public_copy.library)
    shutil.copy(here / "provision_lab.py", public_copy.library)
    return [public_copy.python, "-I", str(script), str(public_copy.library)]


def write_bundle(
    place: Path,
    script: str,
    hooks: dict[str, list[list[str]]],
    readonly: bool = False,
    user: bool = False,
    without: tuple[str, ...] = (),
) -> Path:
    """Write a bundle of ``make_rootfs`` with busybox, and the host's directory beside it; return ``place``.

    ``script``: what the container runs; ``hooks``: words by stage.  ``user``: with a user namespace of :data:`USER`.
    ``without``: namespaces it does not have.
    """
    require(programs("busybox"))
    rootfs = make_rootfs(place / "rootfs")
    make_host(place / "host")
    shutil.copy("/bin/busybox", rootfs / "usr/bin/busybox")
    (rootfs / "bin").symlink_to("usr/bin")
    for name in ("sh", "cat", "stat", "sed", "head", "touch", "echo"):
        (rootfs / "usr/bin" / name).symlink_to("busybox")
    names = [name for name in ("pid", "ipc", "uts", "mount") if name not in without]
    config: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sh", "-c", script],
            "env": ["PATH=/usr/bin"],
            "cwd": "/",
            "capabilities": {kind: ["CAP_DAC_OVERRIDE"] for kind in ("bounding", "effective", "permitted")},
        },
        "root": {"path": "rootfs", "readonly": readonly},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        ],
        "linux": {"namespaces": [{"type": name} for name in names], "cgroupsPath": f"/{place.name}"},
        "hooks": {
            stage: [{"path": words[0], "args": words, "env": ["LC_ALL=C.UTF-8"]} for words in entries]
            for stage, entries in hooks.items()
        },
    }
    if user:
        config["linux"]["namespaces"].append({"type": "user"})
        mapping = [{"containerID": 0, "hostID": USER, "size": 1}]
        del config["linux"]["cgroupsPath"]
        config["linux"] |= {"uidMappings": mapping, "gidMappings": mapping}
        for path in [str(place), str(rootfs), *snapshot(rootfs)]:
            os.lchown(path, USER, USER)
    else:
        config["linux"]["resources"] = {"devices": [{"allow": False, "access": "rwm"}]}
    (place / "config.json").write_text(json.dumps(config))
    return place


def run(bundle: Path, *command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    words = [*command, "run", "--bundle", str(bundle), bundle.name]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=env)
    finally:
        words = [*command, "delete", "--force", bundle.name]
        subprocess.run(words, capture_output=True, timeout=60, check=False, env=env)


def runc(bundle: Path) -> tuple[str, ...]:
    require(programs("runc"))
    return ("runc", "--root", str(bundle / "state"))


def crun(bundle: Path) -> tuple[str, ...]:
    require(programs("crun"))
    # crun 1.8 refuses a machine with both cgroup versions: show it one with version 2 only
    return (*view_of("v2"), "crun", "--cgroup-manager=cgroupfs", "--root", str(bundle / "state"))


def rootless(bundle: Path) -> tuple[str, ...]:
    require(programs("runc"))
    require(user_namespaces())
    user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
    return (*user, "runc", "--rootless=true", "--root", str(bundle / "state"))


def rootless_crun(bundle: Path) -> tuple[str, ...]:
    command = crun(bundle)
    at = command.index("crun")
    require(user_namespaces())
    return (*command[:at], *rootless(bundle)[:4], "crun", "--cgroup-manager=disabled", *command[at + 2 :])


def inside_a_user_namespace(bundle: Path) -> tuple[str, ...]:
    """As rootless engines run it: root of a user namespace, which the container shares."""
    config = json.loads((bundle / "config.json").read_text())
    config["linux"]["namespaces"].pop()
    del config["linux"]["uidMappings"], config["linux"]["gidMappings"]
    (bundle / "config.json").write_text(json.dumps(config))
    words = rootless(bundle)
    return (*words[:4], "unshare", "-Urm", *words[4:])
