"""A stand-in for NVIDIA's container toolkit: a package with its names, which notes what is called and gives nothing."""

from pathlib import Path

from support.process import run

CALLED = "/run/toolkit-was-called"
_FILES = {
    "usr/bin/nvidia-container-runtime": f'echo runtime >>{CALLED}\nexec runc "$@"',
    "usr/bin/nvidia-container-runtime-hook": f"echo hook >>{CALLED}\ncat >/dev/null",
}
_CONTROL = """\
Package: nvidia-container-toolkit
Version: 1.17.8-1
Architecture: all
Maintainer: ocigpu's tests <root@localhost>
Description: stands in for NVIDIA's container toolkit
"""
_SETTINGS = """\
#accept-nvidia-visible-devices-as-volume-mounts = false
[nvidia-container-cli]
load-kmods = true
[nvidia-container-runtime]
mode = "auto"
runtimes = ["runc", "crun"]
"""


def write_toolkit(directory: Path) -> Path:
    """Make a package index for apt in a new directory, with the one package; returns the directory."""
    tree = directory / "tree"
    for name, script in _FILES.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    for name, text in (("DEBIAN/control", _CONTROL), ("etc/nvidia-container-runtime/config.toml", _SETTINGS)):
        path = tree / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, directory])
    packages = run(["dpkg-scanpackages", "--multiversion", "."], cwd=directory).stdout
    (directory / "Packages").write_text(packages)
    return directory
