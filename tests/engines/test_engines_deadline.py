"""What never answers in a start: it ends in time, with one line that names the path."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import requirements, silent_fuse
from support.fixtures import MakeBundle
from support.process import Completed, explain, run
from support.product import PublicCopy, SimulatedHost, make_public_copy
from support.runtimes import container_id, view_of

pytestmark = [pytest.mark.root, pytest.mark.engine]

ALL = {"NVIDIA_VISIBLE_DEVICES": "all"}
SILENT = """\
"$1" "$2" $$ "$3" >"$4" &
while ! [ -s "$4" ]; do sleep 0.02; done
shift 4
"$@" </dev/null
status=$?
kill $!
exit $status
"""
"""Arguments: Python, the program, the directory that never answers, a file, and a command that starts meanwhile."""


class Hurried(NamedTuple):
    """The product with deadlines of two seconds instead of half a minute: see :meth:`last`."""

    copy: PublicCopy
    host: SimulatedHost
    base: dict[str, str]

    def environment(self, mode: str, directory: Path, more: str = "") -> dict[str, str]:
        return self.host.in_mode(self.base, directory / f"{mode}.toml", mode, more)

    def create(
        self, bundle: Path, env: dict[str, str], silent: Path | None = None, runtime: str | Path = ""
    ) -> Completed:
        """Create and delete a container, with a directory that does not answer in a mount namespace of its own."""
        name = container_id()
        state, mounted = bundle.with_name("state"), bundle.with_name("mounted")
        mounted.unlink(missing_ok=True)
        words: list[Any] = [runtime or self.copy.runtime, "--root", state]
        before: list[Any] = [*view_of("v2")]
        if silent:
            before += ["unshare", "--mount", "sh", "-c", SILENT, "sh", sys.executable, silent_fuse.__file__]
            before += [silent, mounted]
        output = bundle.with_name(f"{name}.err")
        python = {"PYTHONPATH": os.pathsep.join(sys.path)}
        try:
            with output.open("wb") as file:
                done = subprocess.run(
                    [*before, *words, "create", "--bundle", bundle, name],
                    stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**env, **python}, timeout=60,
                )  # fmt: skip
            return Completed([], done.returncode, "", output.read_text())
        finally:
            run([*view_of("v2"), "runc", "--root", state, "delete", "--force", name], env=env, check=False)

    def last(self, attempt: Callable[[], Completed], *names: Path | str) -> Completed:
        """Return what an attempt says that names what never answers, or the last one.

        A machine that is busy, or stops for a while, may not have come to it within two seconds: then there are more.
        """
        signals = self.copy.library / "ocigpu/system/signals.py"
        text = signals.read_text()
        try:
            for seconds in (2, 8, 25):
                signals.write_text(text.replace("SECONDS = 30.0", f"SECONDS = {seconds:.1f}"))
                assert signals.read_text() != text
                result = attempt()
                if any(str(name) in result.stderr.replace("\\", "") for name in names):
                    break
        finally:
            signals.write_text(text)
        return result


@pytest.fixture(scope="module")
def hurried_copy(session_directory: Path) -> PublicCopy:
    directory = session_directory / "hurried"
    directory.mkdir()
    return make_public_copy(directory)


@pytest.fixture
def hurried(
    hurried_copy: PublicCopy, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> Iterator[Hurried]:
    requirements.require("" if os.path.exists("/dev/fuse") else "no /dev/fuse")
    return Hurried(hurried_copy, simulated_host, runtime_environment)


def assert_says(result: Completed, path: Path, program: str = "ocigpu-runtime") -> None:
    assert result.returncode != 0, explain(result)
    lines = [line for line in result.stderr.splitlines() if "OCIGPU-" in line]
    assert len(lines) == 1, explain(result)
    assert f"{program}: OCIGPU-INT-5: " in lines[0]
    assert str(path) in lines[0].replace("\\", "")


@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_a_driver_that_never_answers(
    hurried: Hurried, make_bundle: MakeBundle, work_directory: Path, mode: str
) -> None:
    bundle = make_bundle(["/probe", "pause"], ALL)
    env = hurried.environment(mode, work_directory)
    directory = hurried.host.directory
    result = hurried.last(lambda: hurried.create(bundle, env, directory / "usr"), directory)
    assert_says(result, directory)


def test_specifications_that_never_answer(hurried: Hurried, make_bundle: MakeBundle, work_directory: Path) -> None:
    specs = work_directory / "specs"
    specs.mkdir()
    env = hurried.environment("cdi", work_directory, f'cdi.spec-dirs = ["{specs}"]')
    bundle = make_bundle(["/probe", "pause"], {"NVIDIA_VISIBLE_DEVICES": "nvidia.com/gpu=0"})
    assert_says(hurried.last(lambda: hurried.create(bundle, env, specs), specs), specs)


@pytest.mark.parametrize("mode", ["hook", "spec"])
@pytest.mark.parametrize("directory", ["etc", "usr/lib"])
def test_an_image_that_never_answers(
    hurried: Hurried, make_bundle: MakeBundle, work_directory: Path, mode: str, directory: str
) -> None:
    bundle = make_bundle(["/probe", "pause"], ALL)
    env, silent = hurried.environment(mode, work_directory), bundle / "rootfs" / directory
    names = "/rootfs", f"/{os.path.basename(directory)}"
    result = hurried.last(lambda: hurried.create(bundle, env, silent), *names)
    assert result.returncode != 0, explain(result)
    (line,) = [line for line in result.stderr.splitlines() if "OCIGPU-" in line]
    assert "OCIGPU-INT-5" in line
    assert any(name in line for name in names), line


@pytest.mark.rest
@pytest.mark.parametrize("begun", [False, True])
def test_a_process_for_the_hook_that_is_stopped(
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    make_bundle: MakeBundle,
    work_directory: Path,
    begun: bool,
) -> None:
    """The kernel ends it; before it has begun the hook does everything itself, else the start fails with a line."""
    (work_directory / "product").mkdir()
    copy = make_public_copy(work_directory / "product")
    early = copy.library / "ocigpu/entry/prepared.py"
    text = early.read_text()
    if begun:
        hurried = text.replace("kill_in(SECONDS + 2 * GRACE)", "kill_in(1.0)")
        before = "    log, status = open_log("
    else:
        hurried = text.replace("kill_in(SECONDS)", "kill_in(1.0)")
        before = '        with step("prepare", '
    indent = before[: -len(before.lstrip())]
    stopped = hurried.replace(before, f"{indent}os.kill(os.getpid(), {signal.SIGSTOP:d})\n{before}")
    assert text != hurried != stopped
    early.write_text(stopped)
    bundle = make_bundle(["/probe", "pause"], ALL)
    started = Hurried(copy, simulated_host, runtime_environment)
    result = started.create(bundle, started.environment("hook", work_directory))
    assert (result.returncode == 0) == (not begun), explain(result)
    if begun:
        assert f"OCIGPU-INT-2: {bundle}: the process that prepared the container was killed" in result.stderr


@pytest.mark.parametrize("silent", ["usr", ""])
def test_the_vendors_program_ends_too(
    hurried: Hurried, make_bundle: MakeBundle, work_directory: Path, silent: str
) -> None:
    """``configure`` in a mount namespace of its own, as enroot and LXC call it."""
    rootfs = make_bundle(["/probe", "pause"]) / "rootfs"
    env = hurried.environment("hook", work_directory)
    place = hurried.host.directory / silent if silent else rootfs / "etc"
    program = "import sys; from ocigpu.entry.container_cli.main import main; sys.exit(main())"
    words = ["configure", "--no-cgroups", "--device=all", "--compute", "--utility", rootfs]
    script = 'mount --bind "$1" "$1" && mount -t tmpfs none "$1/dev" && shift && exec "$@"'
    command: list[Any] = ["unshare", "--mount", "sh", "-c", SILENT, "sh", sys.executable, silent_fuse.__file__, place]
    command += [work_directory / "mounted", "sh", "-c", script, "sh", rootfs]
    if not silent:
        command = ["unshare", "--mount", "sh", "-c", script, "sh", rootfs, *command[2:10]]
        command[-2:] = [place, work_directory / "mounted"]
    path = os.pathsep.join([str(hurried.copy.library), *sys.path])
    command += [sys.executable, "-c", program, *words]
    named = place if silent else rootfs

    def configure() -> Completed:
        (work_directory / "mounted").unlink(missing_ok=True)
        return run(command, env={**env, "PYTHONPATH": path}, check=False, cwd=work_directory)

    assert_says(hurried.last(configure, named), named, "ocigpu-container-cli")
