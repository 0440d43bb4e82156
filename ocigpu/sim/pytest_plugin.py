"""A plugin for pytest: tests with simulated GPUs, in the test's own process and in the programs that it starts.

    @pytest.mark.gpus(2, model="a100")
    def test_it_picks_the_second_gpu(): ...

pytest loads it where ocigpu is installed (entry point ``pytest11``).  It costs a test without the marker nothing.
"""

import ctypes
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from ocigpu.core.errors import OcigpuError

LIBRARIES = ("libnvidia-ml.so.1", "libnvidia-ml.so", "libcuda.so.1", "libcuda.so")
"""What programs load by name: the loader of a process that runs already does not read LD_LIBRARY_PATH again."""
MOST = 64
MARKER = """\
gpus(count=1, model="h100", mig=(), driver_version=""): run with so many simulated GPUs of a model of \
"ocigpu sim create --help"; mig: as its option --mig; skipped, with the reason, where they cannot be made"""


@dataclass(frozen=True)
class SimulatedGpus:
    """The GPUs of a test: ``directory`` of the simulated host, and the ``environment`` that shows it to programs.

    os.environ has the same variables while the test runs.
    """

    count: int
    model: str
    directory: Path
    environment: Mapping[str, str] = field(repr=False)  # a CI's may have secrets, and pytest prints what failed


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of those for whom a skipped test is a failure."""
    told = "let tests marked gpus fail, instead of skipping them, where simulated GPUs cannot be made"
    parser.getgroup("ocigpu").addoption("--require-gpus", action="store_true", help=told)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture(autouse=True)
def _gpus_of_marker(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpus"):
        request.getfixturevalue("simulated_gpus")


@pytest.fixture
def simulated_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpus]:
    """The simulated GPUs of this test: those of its marker ``gpus``, one H100 without."""
    from ocigpu.core.errors import OcigpuError
    from ocigpu.sim.few import environment_of, search_paths, temporary_host

    asked = _asked_of(request.node.get_closest_marker("gpus"))
    with ExitStack() as stack:
        try:
            host = stack.enter_context(temporary_host(*asked, lambda _: None))
        except OcigpuError as error:
            if why := _why_none():
                if request.config.getoption("--require-gpus"):
                    pytest.fail(f"no simulated GPUs: {why}", pytrace=False)
                pytest.skip(f"no simulated GPUs: {why}")
            _fail(error)
        environment = environment_of(host, os.environ)
        for name in ("OCIGPU_CONFIG", *search_paths(host)):
            monkeypatch.setenv(name, environment[name])
        if libraries := search_paths(host).get("LD_LIBRARY_PATH"):
            _load_from(libraries, monkeypatch)
        _forget_nvml()
        yield SimulatedGpus(asked[0], asked[1], Path(host), environment)
        _forget_nvml()


def _asked_of(marker: pytest.Mark | None) -> tuple[int, str, Sequence[str], str]:
    """Return the words of a marker, the usual ones without; a wrong marker is one line, without our source."""
    from ocigpu.core.errors import OcigpuError, quoted, suggest
    from ocigpu.sim.models import sim_error

    if marker is None:
        return _read_marker()
    signature = inspect.signature(_read_marker)
    try:
        for name in marker.kwargs:
            if name not in signature.parameters:
                raise sim_error(f"no argument {quoted(name)}", suggest(name, signature.parameters))
        try:
            signature.bind(*marker.args, **marker.kwargs)
        except TypeError as error:
            raise sim_error(str(error)) from error
        return _read_marker(*marker.args, **marker.kwargs)
    except OcigpuError as error:
        _fail(error)


def _fail(error: "OcigpuError") -> NoReturn:
    """End the test with the error and its hint on one line."""
    said = f"{error.message}: {error.hint}" if error.hint else error.message
    pytest.fail(f"mark gpus: {said}", pytrace=False)


def _why_none() -> str:
    """Return why this machine cannot make any simulated GPU, "" if it can: then a marker is wrong."""
    from ocigpu.core.errors import OcigpuError
    from ocigpu.sim.few import temporary_host

    try:
        with temporary_host(*_read_marker(), lambda _: None):
            return ""
    except OcigpuError as error:
        return error.message


def _read_marker(
    count: int = 1, model: str = "h100", mig: Sequence[str] = (), driver_version: str = ""
) -> tuple[int, str, Sequence[str], str]:
    """Return the words of a marker, as those of ``ocigpu sim exec``."""
    from ocigpu.sim.models import find_model, sim_error

    if not isinstance(count, int) or not isinstance(model, str):
        raise sim_error(f"a number of GPUs and the name of a model, not {count!r} and {model!r}")
    find_model(model)
    if not 1 <= count <= MOST:
        raise sim_error(f"from 1 to {MOST} GPUs, not {count}")
    return count, model, [mig] if isinstance(mig, str) else mig, driver_version


def _load_from(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ctypes find the host's libraries by their names."""
    load = ctypes.CDLL.__init__

    def find(self: ctypes.CDLL, name: Any, *arguments: Any, **named: Any) -> None:
        if isinstance(name, str) and name in LIBRARIES:
            name = f"{directory}/{name.removesuffix('.1')}.1"
        load(self, name, *arguments, **named)

    monkeypatch.setattr(ctypes.CDLL, "__init__", find)


def _forget_nvml() -> None:
    """Let NVIDIA's pynvml load the library again: it keeps the first one, and the addresses of its functions."""
    pynvml: Any = sys.modules.get("pynvml")
    if pynvml is not None:
        vars(pynvml).update(nvmlLib=None, _nvmlLib_refcount=0, _nvmlGetFunctionPointer_cache={})
