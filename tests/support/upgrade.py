"""Containers that are started again and again while ocigpu is exchanged for its next version."""

import itertools
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from support import requirements
from support.process import Completed, explain, run, wait_for
from support.product import REPOSITORY, SimulatedHost, listed_uuids
from support.runtimes import container_id, run_container

from ocigpu import __version__

if TYPE_CHECKING:
    from support.fixtures import MakeBundle

MODES = ("hook", "spec", "cdi")
NEXT = f"{__version__}.1"
"""The next version: modules of this one cannot use its modules, nor the other way round."""
_RENAMED = re.compile(r"\bparse_request\b")
_SLOW = """\
#!/bin/sh
: >"$OCIGPU_TEST_HELD.begun"
until [ -e "$OCIGPU_TEST_HELD.go" ]; do sleep 0.05; done
exec runc "$@"
"""


def make_next_version(directory: Path) -> Path:
    """Copy the sources to ``directory``, which does not exist, as those of the next version."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("packaging", "ocigpu"):
        shutil.copytree(REPOSITORY / name, directory / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(REPOSITORY / name, directory)
    for path in (*(directory / "ocigpu").rglob("*.py"), directory / "packaging/snapshot/take.py"):
        text = path.read_text().replace(f'__version__ = "{__version__}"', f'__version__ = "{NEXT}"')
        path.write_text(_RENAMED.sub("parse_request_again", text))
    return directory


class Starts:
    """While it is open, containers with GPU 1 are started by ``programs``/ocigpu-runtime, one after another.

    The modes take turns: at every moment one is starting.  Besides, one start of each mode is under way from beginning
    to end: its config.json was written by the former version.
    ``enter``: words that go before a command.  ``aside``: whether the next version is still being built where nobody
    looks; then there is one start in two seconds, and the processors build.  Leaving it checks that none has failed,
    and that there were some.
    """

    def __init__(
        self,
        programs: str | Path,
        host: SimulatedHost,
        make_bundle: "MakeBundle",
        env: dict[str, str],
        enter: Sequence[str] = (),
        aside: Callable[[], bool] = bool,
    ) -> None:
        self.failures: list[str] = []
        self.counts = dict.fromkeys(MODES, 0)
        self._shim = [*enter, f"{programs}/ocigpu-runtime"]
        self._host = host
        self._env = env
        self._aside = aside
        self._stop = threading.Event()
        self._bundles = {mode: make_bundle(["nvidia-smi", "-L"], {"NVIDIA_VISIBLE_DEVICES": "1"}) for mode in MODES}
        self._held = {mode: make_bundle(["nvidia-smi", "-L"], {"NVIDIA_VISIBLE_DEVICES": "1"}) for mode in MODES}
        self._directory = self._bundles["hook"].parent / "settings"
        self._directory.mkdir()
        runc = requirements.find_program("runc")
        slow = self._directory / "slow"
        slow.write_text(_SLOW)
        slow.chmod(0o755)
        for mode in MODES:
            for name, runtime in (("", runc), ("held-", slow)):
                path = self._directory / f"{name}{mode}.toml"
                path.write_text(
                    f'mode = "{mode}"\ncdi.spec-dirs = ["{self._directory}/cdi"]\nruntime.runtimes = ["{runtime}"]\n'
                    + host.settings.read_text()
                )
                path.chmod(0o644)
        words = [*enter, f"{programs}/ocigpu", "cdi", "generate", "--output", f"{self._directory}/cdi/nvidia.yaml"]
        run(words, env={**env, "OCIGPU_CONFIG": str(host.settings)})

    def __enter__(self) -> Self:
        self._under_way = [threading.Thread(target=self._start_held, args=(mode,)) for mode in MODES]
        for thread in self._under_way:
            thread.start()
        for mode in MODES:
            begun = self._directory / f"{mode}.begun"
            wait_for(f"the start in mode {mode} to be under way", lambda begun=begun: begun.exists() or self.failures)
        self._thread = threading.Thread(target=self._keep_starting)
        self._thread.start()
        self.wait()
        return self

    def wait(self) -> None:
        """Wait for a start in each mode that begins now or later: one may be under way, so for the end of two."""
        for mode, count in [*self.counts.items()]:
            wait_for(f"starts in mode {mode}", lambda mode=mode, count=count: self.counts[mode] >= count + 2)

    def __exit__(self, kind: object, _value: object, _traceback: object) -> None:
        try:
            for mode in MODES:
                (self._directory / f"{mode}.go").touch()
            for thread in self._under_way:
                thread.join()
            if kind is None:
                self.wait()  # with what is there now; they also remove what waited too long for a hook
        finally:
            self._stop.set()
            self._thread.join()
        if kind is None:
            assert not self.failures, f"{len(self.failures)} of {self.counts} failed:\n" + "\n".join(self.failures[:5])

    def _keep_starting(self) -> None:
        written = {mode: (bundle / "config.json").read_bytes() for mode, bundle in self._bundles.items()}
        for mode in itertools.cycle(MODES):
            if self._stop.is_set():
                return
            bundle, env = self._bundles[mode], {**self._env, "OCIGPU_CONFIG": f"{self._directory}/{mode}.toml"}
            (bundle / "config.json").write_bytes(written[mode])
            try:
                self._judge(mode, run_container(self._shim, bundle, container_id(), env=env))
            except (OSError, subprocess.SubprocessError) as error:
                self.failures.append(f"{mode}: {error}")
            self.counts[mode] += 1
            next_one = time.monotonic() + 2
            while self._aside() and time.monotonic() < next_one and not self._stop.wait(0.02):
                pass

    def _start_held(self, mode: str) -> None:
        variables = {
            "OCIGPU_CONFIG": f"{self._directory}/held-{mode}.toml",
            "OCIGPU_TEST_HELD": str(self._directory / mode),
        }
        command = [*self._shim, "--root", str(self._directory / f"state-{mode}")]
        name = container_id()
        words = [*map(os.fspath, command), "run", "--bundle", str(self._held[mode]), name]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={**self._env, **variables}, timeout=280
        )
        self._judge(f"{mode}, under way before", done)

    def _judge(self, mode: str, done: Completed) -> None:
        if done.returncode or listed_uuids(done.stdout) != [self._host.gpus[1]]:
            self.failures.append(f"{mode}: {explain(done)}")
