"""What builds the libraries of packages and installations is fetched by its hash, as they are: packaging/by-hash.sh."""

import hashlib
import io
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.process import run
from support.product import REPOSITORY

PACKAGING = REPOSITORY / "packaging"
PINNED = re.search(r"setuptools==(\S+)", (PACKAGING / "requirements-build.txt").read_text())


def write_wheel(path: Path, name: str, version: str, files: dict[str, str]) -> None:
    info = f"{name}-{version}.dist-info"
    wheel = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(path / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for inner, text in {
            **files,
            f"{info}/METADATA": metadata,
            f"{info}/WHEEL": wheel,
            f"{info}/RECORD": "",
        }.items():
            archive.writestr(inner, text)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """An index with a library that has the hash of the list, and back ends that run code of somebody else."""
    assert PINNED
    index, mark = tmp_path / "index", tmp_path / "RAN"
    for name in ("python-prctl", "setuptools", "wheel"):
        (index / name).mkdir(parents=True)
    evil = {"setuptools/__init__.py": "", "setuptools/build_meta.py": f"open({str(mark)!r}, 'w')\n__legacy__ = None\n"}
    for version in ("999.0", PINNED[1]):
        write_wheel(index / "setuptools", "setuptools", version, evil)
    write_wheel(index / "wheel", "wheel", "9.0", {})
    with tarfile.open(index / "python-prctl/python-prctl-1.8.1.tar.gz", "w:gz") as archive:
        for name, text in {
            "setup.py": "from setuptools import setup\nsetup(name='python-prctl', version='1.8.1')\n",
            "PKG-INFO": "Metadata-Version: 1.1\nName: python-prctl\nVersion: 1.8.1\n",
        }.items():
            info = tarfile.TarInfo(f"python-prctl-1.8.1/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    for directory in index.iterdir():
        links = "".join(f'<a href="{path.name}">{path.name}</a>' for path in directory.iterdir())
        (directory / "index.html").write_text(links)
    return index


@pytest.fixture
def environment(index: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_CACHE_DIR": "1", "PIP_FIND_LINKS": "",
        "OCIGPU_PIP_OPTIONS": f"--index-url=file://{index}",
    }  # fmt: skip


@pytest.fixture
def clone(tmp_path: Path, index: Path) -> Path:
    """What builds packages and installs, with a list of one library, whose hash is right."""
    clone = tmp_path / "clone"
    shutil.copytree(PACKAGING, clone / "packaging")
    shutil.copytree(REPOSITORY / "ocigpu", clone / "ocigpu", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, clone)
    found = hashlib.sha256((index / "python-prctl/python-prctl-1.8.1.tar.gz").read_bytes()).hexdigest()
    (clone / "packaging/requirements.txt").write_text(f"python-prctl==1.8.1 --hash=sha256:{found}\n")
    return clone


@pytest.mark.rest
def test_no_back_end_of_an_index_runs_while_packages_are_made(
    clone: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    done = run([clone / "packaging/vendored.sh", sys.executable], env=environment, check=False, timeout=200)
    assert not (tmp_path / "RAN").exists()
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.rest
def test_no_back_end_of_an_index_runs_during_an_installation(
    clone: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    words = [clone / "packaging/install.sh", "--prefix", tmp_path / "prefix", "--python", sys.executable]
    done = run(words, env=environment, check=False, timeout=200)
    assert not (tmp_path / "RAN").exists()
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_whatever_installs_for_users_does_it_by_hash() -> None:
    """by-hash.sh is the one place that fetches; our own wheel is then built of what is there."""
    names = ("install.sh", "vendored.sh", "package.sh", "kubernetes/image.sh", "kubernetes/Containerfile")
    for name in names:
        for line in (PACKAGING / name).read_text().splitlines():
            if re.search(r"pip\S* (install|download)\b", line) and not line.startswith("#"):
                assert "by-hash.sh" in line or "--no-index" in line, (name, line)
