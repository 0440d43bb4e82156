"""Container images, written by hand: an archive that both ``docker load`` and ``ctr images import`` read."""

import hashlib
import io
import json
import tarfile
from pathlib import Path


def write_image(archive: Path, rootfs: Path, name: str, command: list[str]) -> Path:
    """Write an image of one layer (Docker image specification 1.2, as ``docker save`` does); returns the archive."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path in sorted(rootfs.iterdir()):
            tar.add(path, arcname=path.name)
    layer_digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "Entrypoint": None,
            "Cmd": command,
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        "history": [{"created": "2024-01-01T00:00:00Z"}],
        "created": "2024-01-01T00:00:00Z",
    }
    config_text = json.dumps(config).encode()
    config_name = hashlib.sha256(config_text).hexdigest() + ".json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        for file_name, data in (
            (config_name, config_text),
            ("layer.tar", layer.getvalue()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(file_name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return archive
