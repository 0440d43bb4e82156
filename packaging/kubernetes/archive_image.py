"""``archive_image.py ROOT NAME FILE``: write a directory as a container image of one layer.

The archive is as ``docker save`` writes it (Docker image specification 1.2), which containerd and Podman also read.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import tarfile

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Names of processors in images (GOARCH)."""


def write_image(root: str, name: str, file: str, entrypoint: list[str], command: list[str]) -> None:
    """Write FILE; owners, modes and times are those of the files in ``root``."""
    layer = f"{file}.layer"
    try:
        with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as tar:
            for entry in sorted(os.listdir(root)):
                tar.add(f"{root}/{entry}", arcname=entry)
        with open(layer, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        config = {
            "architecture": MACHINES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {
                "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                "Entrypoint": entrypoint or None,
                "Cmd": command or None,
                "WorkingDir": "/",
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created": "1970-01-01T00:00:00Z"}],
            "created": "1970-01-01T00:00:00Z",
        }
        text = json.dumps(config).encode()
        config_name = f"{hashlib.sha256(text).hexdigest()}.json"
        manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
        with tarfile.open(file, "w") as tar:
            for entry, data in ((config_name, text), ("manifest.json", json.dumps(manifest).encode())):
                member = tarfile.TarInfo(entry)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
            tar.add(layer, arcname="layer.tar")
    finally:
        if os.path.exists(layer):
            os.unlink(layer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("name")
    parser.add_argument("file")
    parser.add_argument("--entrypoint", action="append", default=[])
    parser.add_argument("--command", action="append", default=[])
    words = parser.parse_args()
    write_image(words.root, words.name, words.file, words.entrypoint, words.command)
