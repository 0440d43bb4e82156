"""Failed cases are run once more, alone (support/again.py): real runs of pytest, with workers as in CI."""

from pathlib import Path

import pytest
from support import again

CASES = """
import pathlib, pytest
def test_that_needs_luck():
    mark = pathlib.Path({mark!r})
    if not mark.exists():
        mark.touch()
        assert False, "no luck"
def test_that_passes(): pass
"""


@pytest.fixture
def flaky(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makeini("[pytest]\naddopts = -p support.products -p support.again")  # of the second run as well
    pytester.makepyfile(test_luck=CASES.format(mark=str(pytester.path / "mark")))
    return pytester


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-n", "2", *options, timeout=240)


@pytest.mark.rest
def test_what_passes_alone_is_named_and_passes(flaky: pytest.Pytester) -> None:
    result = run(flaky, "--again")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["FLAKY test_luck.py::test_that_needs_luck", "*1 failed, 1 passed*"])


@pytest.mark.rest
def test_without_the_option_a_failure_is_one(flaky: pytest.Pytester) -> None:
    assert run(flaky).ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.rest
def test_what_fails_alone_too_fails_the_run(flaky: pytest.Pytester) -> None:
    flaky.makepyfile(test_fault="def test_fault(): assert False, 'a fault'")
    result = run(flaky, "--again")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FLAKY test_luck.py::test_that_needs_luck"])
    result.stdout.no_fnmatch_line("FLAKY test_fault.py*")


@pytest.mark.rest
def test_a_session_that_cannot_clean_up_is_run_again_as_well(flaky: pytest.Pytester) -> None:
    flaky.makeconftest(
        "import pytest\n@pytest.fixture(scope='session', autouse=True)\ndef whole():\n    yield\n    assert 0"
    )
    flaky.path.joinpath("mark").touch()
    assert run(flaky, "--again").ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.rest
def test_a_worker_that_dies_is_not_forgotten(flaky: pytest.Pytester) -> None:
    flaky.makepyfile(test_death="import os\ndef test_death(): os._exit(1)")
    assert run(flaky, "--again").ret != 0


@pytest.mark.rest
def test_what_cannot_be_collected_is_not_luck(flaky: pytest.Pytester) -> None:
    flaky.makepyfile(test_broken="import no_such_module_at_all")
    result = run(flaky, "--again", "--continue-on-collection-errors")
    assert result.ret != 0
    result.stdout.no_fnmatch_line("FLAKY*")


@pytest.mark.rest
def test_many_failures_are_not_luck(flaky: pytest.Pytester) -> None:
    flaky.makepyfile(
        test_many=f"import pytest\n@pytest.mark.parametrize('n', range({again.MOST}))\ndef test_many(n): assert 0"
    )
    result = run(flaky, "--again")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.no_fnmatch_line("FLAKY*")


@pytest.mark.rest
def test_what_flaked_twice_is_not_run_again(flaky: pytest.Pytester) -> None:
    flaky.makeconftest("from support import again\nagain.FLAKED_TWICE = ('test_luck.py::test_that_needs_luck',)")
    assert run(flaky, "--again").ret == pytest.ExitCode.TESTS_FAILED
