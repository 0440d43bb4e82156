"""The plugin for pytest, in a pytest of its own: the marker, the fixture, programs, and the test's own process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import requirements

TESTS = """
import os, shutil, subprocess
import pynvml, pytest

def names():
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return [pynvml.nvmlDeviceGetName(handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()

def listed():
    return subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout.count("GPU ")

@pytest.mark.gpus(2, model="a100")
def test_two():
    assert names() == ["NVIDIA A100-SXM4-40GB"] * 2
    assert listed() == 2

@pytest.mark.gpus(3, model="l4")
def test_three_of_another_model_in_the_same_process(simulated_gpus):
    assert names() == ["NVIDIA L4"] * 3
    assert (simulated_gpus.count, simulated_gpus.model) == (3, "l4")
    assert simulated_gpus.directory.is_dir()
    assert str(simulated_gpus.directory) in os.environ["PATH"]

def test_one_by_the_fixture(simulated_gpus):
    assert len(names()) == listed() == 1

def test_none_without():
    assert "ocigpu-sim" not in os.environ["PATH"] and "OCIGPU_CONFIG" not in os.environ
    with pytest.raises(pynvml.NVMLError):
        pynvml.nvmlInit()

@pytest.mark.gpus(1, mig="0:1g.10gb")
def test_mig():
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(0))[0] == 1

@pytest.mark.gpus(model="h1000")
def test_a_model_that_is_none(): ...

@pytest.mark.gpus(0)
def test_no_gpu(): ...

@pytest.mark.gpus(1, modle="l4")
def test_a_word_that_is_none(): ...

@pytest.mark.gpus(mig="0:9g.99gb")
def test_a_profile_that_is_none(): ...

@pytest.mark.gpus(2, model="mi300x")
def test_a_model_without_libraries():
    assert subprocess.run(["amd-smi", "list"], check=True, capture_output=True, text=True).stdout.count("GPU: ") == 2
"""


def run_pytest(directory: Path, tests: str = TESTS, whole: bool = False, **variables: str) -> list[str]:
    (directory / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "ocigpu.sim.pytest_plugin", "-p", "no:cacheprovider"]
    command += ["-q", "-rA", "-W", "error", "--strict-markers", "-c", os.devnull, "--rootdir", str(directory)]
    environment = {"PATH": os.environ["PATH"], "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}
    done = subprocess.run([*command, str(directory)], capture_output=True, text=True, env=environment, timeout=200)
    lines = done.stdout.splitlines()
    if whole:
        return lines
    return [line for line in lines if line.startswith(("PASSED", "FAILED", "ERROR", "SKIPPED"))] or [done.stderr]


@pytest.mark.rest
@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="this machine has GPUs of its own")
def test_a_marker_gives_a_test_its_gpus(tmp_path: Path) -> None:
    requirements.require(requirements.compiler())
    place = tmp_path / "place"
    place.mkdir()
    said = run_pytest(tmp_path, TMPDIR=str(place))
    assert [line.partition("::")[2] for line in said if line.startswith("PASSED")] == [
        "test_two", "test_three_of_another_model_in_the_same_process", "test_one_by_the_fixture", "test_none_without",
        "test_mig", "test_a_model_without_libraries",
    ]  # fmt: skip
    wrong = [line for line in said if not line.startswith("PASSED")]
    assert [line.partition("::")[2].partition(" ")[0] for line in wrong if line.startswith("ERROR")] == [
        "test_a_model_that_is_none", "test_no_gpu", "test_a_word_that_is_none", "test_a_profile_that_is_none",
    ]  # fmt: skip
    assert len(wrong) == 4
    assert os.listdir(place) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ('1, model="a1000"', r'mark gpus: model "a1000" is unknown: did you mean a100\b.*'),
        pytest.param("0", "mark gpus: from 1 to 64 GPUs, not 0", marks=pytest.mark.rest),
        pytest.param('1, modle="l4"', r'mark gpus: no argument "modle": did you mean model\?', marks=pytest.mark.rest),
    ],
)
def test_a_wrong_marker_is_one_line(tmp_path: Path, words: str, said: str) -> None:
    tests = f"import pytest\n@pytest.mark.gpus({words})\ndef test_it(): ...\n"
    lines = run_pytest(tmp_path, tests, whole=True)
    assert re.fullmatch(said, next(line for line in lines if line.startswith("mark gpus")))
    assert not [line for line in lines if "pytest_plugin.py" in line or line.startswith(">")]


def test_where_there_can_be_none_a_test_is_skipped_with_the_reason(tmp_path: Path) -> None:
    """No place from which libraries can be loaded: the directories that are tried are not there for this one."""
    (tmp_path / "conftest.py").write_text("import ocigpu.sim.few as few\nfew._PLACES = ()\n")
    said = run_pytest(tmp_path, TMPDIR="/nonexistent")
    skipped = [line for line in said if line.startswith("SKIPPED")]
    assert skipped
    assert all("no simulated GPUs: no place for libraries: /nonexistent: no directory" in line for line in skipped)
    required = run_pytest(tmp_path, whole=True, TMPDIR="/nonexistent", PYTEST_ADDOPTS="--require-gpus")
    assert [line for line in required if line.startswith("no simulated GPUs: no place for libraries")], required
    assert not [line for line in required if line.startswith("SKIPPED")]
