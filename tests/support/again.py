"""What failed is run once more, alone, after everything else: luck does not decide about thirteen thousand cases.

With ``--again``, as CI passes it. A case that passes then is printed as ``FLAKY name`` and counts as passed; mend it
with the next change. Not rerun: those of :data:`FLAKED_TWICE`, and none where more failed than luck explains.
"""

import subprocess
import sys

import pytest

FLAKED_TWICE: tuple[str, ...] = ()
"""Names of cases that flaked again after they had been mended: from then on a failure of theirs counts at once."""
MOST = 20
"""How many failed cases of one run may be luck."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--again", action="store_true", help="run failed cases once more, alone (tests/support/again.py)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("again") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Again(config), "again")


class Again:
    """Notes what fails, and runs it again at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.options = ["--rows", config.getoption("rows")]
        self.failed: dict[str, None] = {}
        self.flaky: list[str] = []
        self.all_collected = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.all_collected &= not report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = None

    @pytest.hookimpl(trylast=True)  # the workers have ended
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.TESTS_FAILED or not self.all_collected or len(self.failed) > MOST:
            return
        self.flaky = [name for name in self.failed if name not in FLAKED_TWICE and self._passes(session, name)]
        if self.flaky == list(self.failed):
            session.exitstatus = pytest.ExitCode.OK

    def _passes(self, session: pytest.Session, name: str) -> bool:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", *self.options, name]
        again = subprocess.run(command, cwd=session.config.rootpath, stdin=subprocess.DEVNULL, check=False)
        return again.returncode == 0

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name in self.flaky:
            terminalreporter.write_line(f"FLAKY {name}", yellow=True)
