"""Wheel and source distribution, and what ``pipx install`` makes of them."""

import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import requirements
from support.fixtures import MakeBundle
from support.process import Completed, run
from support.product import SimulatedHost, listed_uuids
from support.runtimes import container_id, run_container

from ocigpu import __version__

REPOSITORY = Path(__file__).resolve().parents[1]
NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")


@pytest.fixture(scope="module")
def built(session_directory: Path) -> Path:
    """The directory of the source distribution, and of the wheel that was built from it."""
    source, output = session_directory / "source", session_directory / "dist"
    shutil.copytree(REPOSITORY, source, ignore=NOT_SOURCES)
    run([sys.executable, "-m", "build", "--outdir", output, source], timeout=200)
    return output


@pytest.fixture(scope="module")
def programs(built: Path, session_directory: Path) -> Iterator[Path]:
    """The directory of the commands that pipx has installed from the wheel."""
    home = session_directory / "pipx"
    variables = {"PIPX_HOME": str(home / "home"), "PIPX_BIN_DIR": str(home / "bin"), "PIPX_MAN_DIR": str(home / "man")}

    def pipx(*words: str) -> Completed:
        return run([sys.executable, "-m", "pipx", *words], env={**os.environ, **variables}, timeout=200)

    (wheel,) = built.glob("*.whl")
    pipx("install", str(wheel))
    yield home / "bin"
    pipx("uninstall", "ocigpu")
    assert list((home / "bin").iterdir()) == []


def test_the_wheel_has_the_package_and_nothing_else(built: Path, session_directory: Path) -> None:
    with zipfile.ZipFile(built / f"ocigpu-{__version__}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"ocigpu", f"ocigpu-{__version__}.data", f"ocigpu-{__version__}.dist-info"}
    source = session_directory / "source"
    files = {str(path.relative_to(source)) for path in (source / "ocigpu").rglob("*") if path.is_file()}
    assert files <= names
    assert f"ocigpu-{__version__}.dist-info/licenses/LICENSE" in names


def test_the_source_distribution_can_build_package_and_test(built: Path) -> None:
    with tarfile.open(built / f"ocigpu-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "Makefile", "pyproject.toml", "packaging/package.sh", "packaging/wheel/ocigpu-hook"}
    wanted |= {"packaging/systemd/ocigpu-watch.service", "packaging/requirements.txt", "tests/conftest.py", "README.md"}
    assert wanted <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("build/")]


@pytest.mark.root
@pytest.mark.engine
def test_a_container_gets_its_gpus_from_an_installation_by_pipx(
    programs: Path, make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    requirements.require(requirements.programs("runc"))
    bundle = make_bundle(["nvidia-smi", "-L"], {"NVIDIA_VISIBLE_DEVICES": "1"})
    env = simulated_host.environment(runtime_environment)
    done = run_container([programs / "ocigpu-runtime"], bundle, container_id(), env=env)
    assert done.returncode == 0, done.stderr
    assert listed_uuids(done.stdout) == [simulated_host.gpus[1]]


@pytest.mark.parametrize("name", ["ocigpu-runtime", "ocigpu-hook"])
def test_shim_and_hook_of_the_wheel_ignore_python_variables(
    programs: Path, tmp_path: Path, simulated_host: SimulatedHost, name: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('loaded')\n")
    variables = {
        **simulated_host.environment(dict(os.environ)),
        "PYTHONPATH": str(tmp_path),
        "PYTHONHOME": "/nonexistent",
    }
    done = run([programs / name, "--version"], env=variables)
    assert "loaded" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["ocigpu-runtime", "ocigpu-hook"])
def test_a_wheel_without_its_python_says_so(tmp_path: Path, name: str) -> None:
    alone = tmp_path / name
    shutil.copy(REPOSITORY / "packaging/wheel" / name, alone)
    done = run([alone, "state"], check=False)
    assert done.returncode == 127
    assert done.stderr.splitlines() == [
        f"{alone}: OCIGPU-INT-3: {tmp_path}/python is missing",
        "hint: install ocigpu again (pipx reinstall ocigpu)",
    ]


@pytest.mark.parametrize("name", ["ocigpu", "ocigpu-container-cli"])
def test_the_other_commands_are_there_too(programs: Path, name: str) -> None:
    assert run([programs / name, "--help"]).stdout.lower().startswith("usage: " + name)
