"""``archive_image.py ROOT NAME FILE``: write a directory as a container image of one layer.

The archive is as ``docker save`` writes it (Docker image specification 1.2), which containerd and Podman also read.
``make image`` runs this file by its path, with nothing but Python.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import tarfile
from collections.abc import Sequence
from pathlib import Path

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Names of processors in images (GOARCH)."""


def write_image(
    archive: Path, root: Path, name: str, command: Sequence[str] = (), entrypoint: Sequence[str] = ()
) -> Path:
    """Write an image; returns the archive.  Modes and times are those of the files in ``root``, and owners for root."""
    layer = archive.with_name(f"{archive.name}.layer")
    try:
        with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as tar:
            for entry in sorted(os.listdir(root)):
                tar.add(root / entry, arcname=entry, filter=_of_root if os.geteuid() else None)
        with open(layer, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        config = {
            "architecture": MACHINES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {
                "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                "Entrypoint": list(entrypoint) or None,
                "Cmd": list(command) or None,
                "WorkingDir": "/",
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created": "1970-01-01T00:00:00Z"}],
            "created": "1970-01-01T00:00:00Z",
        }
        text = json.dumps(config).encode()
        config_name = f"{hashlib.sha256(text).hexdigest()}.json"
        manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
        with tarfile.open(archive, "w") as tar:
            for entry, data in ((config_name, text), ("manifest.json", json.dumps(manifest).encode())):
                member = tarfile.TarInfo(entry)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
            tar.add(layer, arcname="layer.tar")
    finally:
        layer.unlink(missing_ok=True)
    return archive


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    parser.add_argument("--entrypoint", action="append", default=[])
    parser.add_argument("--command", action="append", default=[])
    words = parser.parse_args()
    write_image(words.file, words.root, words.name, words.command, words.entrypoint)
