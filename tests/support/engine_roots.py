"""Engines below a root of the test: files made, configured, set back and compared."""

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from ocigpu.engines.carry_out import carry_out
from ocigpu.engines.configure import ConfigureOptions, EnginePlan, plan_configuration
from ocigpu.engines.files import Root
from ocigpu.engines.remove import plan_removal
from ocigpu.engines.wanted import Wanted

RUNTIME = "/usr/bin/ocigpu-runtime"
PATHS = {
    "docker": "/etc/docker/daemon.json",
    "containerd": "/etc/containerd/config.toml",
    "crio": "/etc/crio/crio.conf.d/99-ocigpu.conf",
    "podman": "/etc/containers/containers.conf.d/99-ocigpu.conf",
}
DAEMON = '{\n  "default-runtime": "nvidia",\n  "runtimes": {"nvidia": {"path": "n"}},\n  "features": {"x": true}\n}'
V2 = "io.containerd.grpc.v1.cri"
CONTAINERD = f"""\
version = 2 # ours
[plugins."{V2}".cni]
  bin_dir = "/home/kubernetes/bin"
[plugins."{V2}".containerd]
  default_runtime_name = "crun"
[plugins."{V2}".containerd.runtimes.crun]
  runtime_type = "io.containerd.runc.v2"
  pod_annotations = ["x.*"]
[plugins."{V2}".containerd.runtimes.crun.options]
  BinaryName = "/usr/bin/crun"
  SystemdCgroup = true
"""


def make_host(directory: Path) -> Path:
    """Make a root with the programs of ocigpu and nothing of an engine."""
    for name in ("ocigpu-runtime", "ocigpu-hook", "runc"):
        put(directory, f"/usr/bin/{name}", "#!/bin/sh\n# ocigpu\n", 0o755)
    return directory


def put(host: Path, path: str, text: str, mode: int = 0o644) -> Path:
    file = host / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)
    return file


def options(host: Path, engine: str, **changes: Any) -> ConfigureOptions:
    wanted = Wanted("ocigpu", RUNTIME, False, False)
    own = {key: changes.pop(key) for key in list(changes) if key in Wanted._fields}
    return ConfigureOptions(engine, wanted._replace(**own), root=str(host), **changes)


def configure(host: Path, engine: str, **changes: Any) -> EnginePlan:
    with Root(str(host)) as root:
        plan = plan_configuration(root, options(host, engine, **changes))
        carry_out(root, plan)
    return plan


def remove(host: Path, engine: str, **changes: Any) -> EnginePlan:
    with Root(str(host)) as root:
        plan = plan_removal(root, options(host, engine, **changes))
        carry_out(root, plan)
    return plan


def snapshot(host: Path) -> dict[str, Any]:
    """Every file, directory and link below a root with content, mode and owner."""
    found: dict[str, Any] = {}
    for path in sorted(host.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(host))] = (stat.filemode(status.st_mode), status.st_uid, status.st_gid, content)
    return found


def read(host: Path, engine: str, path: str = "") -> Any:
    file = host / (path or PATHS[engine]).lstrip("/")
    return json.loads(file.read_text()) if file.suffix == ".json" else tomllib.loads(file.read_text())
