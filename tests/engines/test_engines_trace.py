"""Traces of real containers: every step of shim and hook in every mode, in order, and the one that failed."""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bundle import base_config, write_bundle
from support.process import Completed, explain, run
from support.product import PROGRAMS, RUNTIME, SimulatedHost
from support.runtimes import container_id, run_container, set_cgroup

from ocigpu.cli.containers.trace import Start, find_outcome, find_phases, read_starts

pytestmark = [pytest.mark.root, pytest.mark.engine]

TWO = {"NVIDIA_VISIBLE_DEVICES": "0,1"}


@pytest.fixture(scope="module")
def image(session_directory: Path, rootfs: Callable[[str], Path]) -> Path:
    """A Debian-like image whose loader cache is up to date."""
    path = session_directory / "image-of-traces"
    shutil.copytree(rootfs("glibc"), path, symlinks=True)
    run(["ldconfig", "-r", path])
    return path


class Traced:
    """Starts containers with a trace; ``file`` is the trace of all of them."""

    def __init__(self, host: SimulatedHost, environment: dict[str, str], image: Path, directory: Path) -> None:
        self.host, self.image, self.directory = host, image, directory
        self.base = host.environment(environment, "runc")
        self.file = directory / "trace"
        self.name = ""

    def environment(self, mode: str, traced: bool = True, more: str = "") -> dict[str, str]:
        path = self.directory / "settings.toml"
        path.write_text(f'mode = "{mode}"\n{more}\n' + Path(self.base["OCIGPU_CONFIG"]).read_text())
        path.chmod(0o644)
        variables = {**self.base, "OCIGPU_CONFIG": str(path)}
        return {**variables, "OCIGPU_TRACE": str(self.file)} if traced else variables

    def bundle(self, variables: dict[str, str], edit: Callable[[dict[str, Any]], None] | None = None) -> Path:
        config = base_config(["/bin/true"], variables)
        if edit:
            edit(config)
        self.name = container_id()
        bundle = write_bundle(self.directory / self.name, config, self.image)
        set_cgroup(bundle, self.name)
        return bundle

    def run(self, environment: dict[str, str], variables: dict[str, str] = TWO, **options: Any) -> Completed:
        bundle = self.bundle(variables, **options)
        return run_container([RUNTIME], bundle, self.name, env=environment)

    def start(self) -> Start:
        """Return the one start of the last container."""
        starts, unreadable = read_starts(str(self.file), self.name)
        assert unreadable == 0
        assert len(starts) == 1
        return starts[0]


@pytest.fixture
def traced(
    simulated_host: SimulatedHost, runtime_environment: dict[str, str], image: Path, work_directory: Path
) -> Traced:
    return Traced(simulated_host, runtime_environment, image, work_directory)


def actions(start: Start, process: str) -> list[str]:
    return [step.action for step in start.steps if step.process == process]


def planned(traced: Traced, environment: dict[str, str]) -> list[tuple[str, str]]:
    """Return kind and path of what the plan has the hook do, from ``ocigpu plan``."""
    bundle = traced.directory / traced.name
    done = run([PROGRAMS / "ocigpu", "plan", "--bundle", bundle, "--json"], env=environment)
    return [
        (action["action"], action.get("container_path") or action.get("node", {}).get("container_path", ""))
        for action in json.loads(done.stdout)["actions"]
        if action["action"] != "allow-device"
    ]


def check_order(start: Start) -> None:
    """Steps of one process come one after the other, each with its clock."""
    for step in start.steps:
        assert step.took >= 0
        assert step.time.startswith("20")
        assert step.time.endswith("Z")
    for process in ("shim", "worker"):
        outer = [step for step in start.steps if step.process == process and step.depth == 0]
        assert all(before.end <= after.ns for before, after in itertools.pairwise(outer))


SHIM = ["begin", "settings", "find-runtime", "read-config", "request", "selection"]


@pytest.mark.parametrize("loader_cache", ["ldconfig", "auto"])
@pytest.mark.parametrize("early", [True, False], ids=["early", "hook alone"])
def test_hook_mode_has_every_step_of_shim_and_hook(traced: Traced, early: bool, loader_cache: str) -> None:
    environment = traced.environment("hook", more=f'loader-cache = "{loader_cache}"')
    if not early:  # the process that waits is told to end: the hook does everything itself

        def edit(config: dict[str, Any]) -> None:
            script = "rm -rf /run/ocigpu/early-*"
            config["hooks"] = {"prestart": [{"path": "/bin/sh", "args": ["sh", "-c", script]}]}

        done = traced.run(environment, edit=edit)
    else:
        done = traced.run(environment)
    assert done.returncode == 0, explain(done)
    start = traced.start()
    check_order(start)
    assert find_outcome(start) == ("ok", "")
    assert [name for name in actions(start, "shim") if name not in ("facts", "plan")] == [
        *SHIM,
        "rules",
        "write-config",
        "early",
        "exec",
    ]
    hook = "early" if early else "hook"
    wanted = ["begin", "state", "read-config", "request", "open-container", "device-rules", "end"]
    assert [name for name in actions(start, hook) if name in wanted] == wanted
    steps = [(step.action, step.path) for step in start.steps if step.process == "worker"]
    assert steps[0][0] == "enter"
    assert steps[-1][0] == "commit"
    if loader_cache == "auto":
        assert sorted(steps[1:-1]) == sorted(planned(traced, environment))
        assert steps[-2] == ("ldconfig", "")  # merged when all directories are as they will be
    else:
        ready, run_ldconfig, ended = (steps.index((f"{word}ldconfig", "")) for word in ("start-", "", "finish-"))
        assert sorted(steps[ready + 1 : ended] + steps[ended + 1 : -1]) == sorted(planned(traced, environment))
        # what ldconfig reads is there before it runs, and the rest is made while it does
        assert {".so" in path or path.endswith(".conf") for _, path in steps[ready + 1 : run_ldconfig]} == {True}
        assert not [path for _, path in steps[run_ldconfig:ended] if ".so" in path]
        assert ("node", "/dev/nvidia0") in steps[run_ldconfig:ended]
    assert all(step.reason and step.detail for step in start.steps if step.action in ("node", "bind", "link"))
    assert {step.result for step in start.steps if step.process == "worker"} == {"ok"}
    assert [phase.name for phase in find_phases(start)] == ["shim", "runtime", "hook"]


def test_spec_mode_is_all_the_shims(traced: Traced) -> None:
    done = traced.run(traced.environment("spec"))
    assert done.returncode == 0, explain(done)
    start = traced.start()
    check_order(start)
    assert {step.process for step in start.steps} == {"shim"}
    names = actions(start, "shim")
    inner = ["declare", "find-declared", "links", "loader-cache", "declare-rules", "write-config", "exec"]
    assert [name for name in names if name in (*SHIM, *inner)] == [*SHIM, *inner]
    config = json.loads((traced.directory / traced.name / "config.json").read_text())
    declared = {step.path for step in start.steps if step.action == "declare-node"}
    assert {device["path"] for device in config["linux"]["devices"]} == declared
    mounted = {step.path for step in start.steps if step.action == "declare-mount"}
    assert mounted <= {mount["destination"] for mount in config["mounts"]}
    assert len(mounted) > 10
    assert [phase.name for phase in find_phases(start)] == ["shim"]


@pytest.mark.parametrize("carried_out", [True, False], ids=["by the shim", "by the hook"])
def test_cdi_mode_has_the_specifications_and_what_our_hooks_do(traced: Traced, carried_out: bool) -> None:
    specs = traced.directory / "specs"
    specs.mkdir()
    environment = traced.environment("cdi", more=f'cdi.spec-dirs = ["{specs}"]')
    command = [PROGRAMS / "ocigpu", "cdi", "generate", "--quiet", "--output", specs / "nvidia.json"]
    run([*command, "--nvidia-cdi-hook-path", PROGRAMS / "ocigpu-hook"], env=environment)
    if not carried_out:  # a sub-command of a release to come
        spec = json.loads((specs / "nvidia.json").read_text())
        spec["containerEdits"]["hooks"][0]["args"] += ["+", "from-the-future"]
        (specs / "nvidia.json").write_text(json.dumps(spec))
    inner = ["read-specifications", "resolve", "check-stale", "inject"]
    for _ in range(2):
        bundle = traced.bundle(TWO)
        done = run_container([RUNTIME], bundle, traced.name, env=environment)
        assert done.returncode == 0, explain(done)
        start = traced.start()
        check_order(start)
        taken = [action for action in actions(start, "shim") if action not in ("link", "facts")]
        if carried_out:
            assert taken == [*SHIM, *inner, "carry-out", "views", "links", "loader-cache", "write-config", "exec"]
            assert [phase.name for phase in find_phases(start)] == ["shim"]
            continue
        assert taken == [*SHIM, *inner, "write-config", "exec"]
        assert actions(start, "hook") == ["begin", "state", "facts", "plan", "end"]
        assert actions(start, "worker")[0] == "enter"
        assert actions(start, "worker")[-1] == "commit"
        assert [phase.name for phase in find_phases(start)] == ["shim", "runtime", "hook"]


def test_a_start_that_fails_shows_the_step_and_what_was_undone(traced: Traced) -> None:
    environment = traced.environment("hook")
    broken = traced.directory / "broken"
    shutil.copytree(traced.image, broken, symlinks=True)
    (broken / "dev").mkdir(exist_ok=True)
    (broken / "usr/bin/nvidia-smi").mkdir()  # a program cannot be mounted on a directory
    traced.image = broken
    done = traced.run(environment)
    assert done.returncode != 0
    start = traced.start()
    code, message = find_outcome(start)
    assert code.startswith("OCIGPU-MNT-")
    assert code in done.stderr
    assert "nvidia-smi" in message
    failing = [step for step in start.steps if step.process == "worker" and step.result.startswith("OCIGPU")]
    assert [(step.action, step.path, step.result) for step in failing] == [("bind", "/usr/bin/nvidia-smi", code)]
    after = [step for step in start.steps if step.process == "worker" and step.ns >= failing[0].end]
    assert after
    assert {step.action.split("-")[0] for step in after} == {"undo"}, "nothing else is tried"
    done_before = {(step.action, step.path) for step in start.steps if step.process == "worker"}
    undone = [step.path for step in after if step.action == "undo-node"]
    assert undone == [path for action, path in reversed(sorted_nodes(start)) if (action, path) in done_before]
    assert "end" not in actions(start, "early")


def sorted_nodes(start: Start) -> list[tuple[str, str]]:
    return [(step.action, step.path) for step in start.steps if step.action == "node"]


def test_a_request_that_cannot_be_granted_is_the_last_step(traced: Traced) -> None:
    done = traced.run(traced.environment("hook"), {"NVIDIA_VISIBLE_DEVICES": "9"})
    assert done.returncode != 0
    start = traced.start()
    assert find_outcome(start)[0] == "OCIGPU-DEV-1"
    assert start.steps[-1].action == "failed"
    assert [step.action for step in start.steps if step.result == "OCIGPU-DEV-1"] == ["rules", "plan", "failed"]
    shown = run([PROGRAMS / "ocigpu", "trace", traced.file])
    assert "OCIGPU-DEV-1" in shown.stdout


def test_the_setting_traces_a_hook_without_the_shim(traced: Traced) -> None:
    environment = traced.environment("hook", traced=False, more=f'trace = "{traced.file}"')

    def edit(config: dict[str, Any]) -> None:
        hook = {
            "path": str(PROGRAMS / "ocigpu-hook"),
            "args": ["h", "--config", environment["OCIGPU_CONFIG"], "prestart"],
        }
        config["hooks"] = {"prestart": [hook]}

    bundle = traced.bundle(TWO, edit)
    done = run_container(["runc"], bundle, traced.name, env=environment)
    assert done.returncode == 0, explain(done)
    start = traced.start()
    assert {step.process for step in start.steps} == {"hook", "worker"}
    assert [phase.name for phase in find_phases(start)] == ["hook"]
    assert find_outcome(start) == ("ok", "")


@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_the_setting_traces_the_shim_under_crun(traced: Traced, mode: str, runtime_environment: dict[str, str]) -> None:
    traced.base = traced.host.environment(runtime_environment, "crun")
    environment = traced.environment(mode, traced=False, more=f'trace = "{traced.file}"')
    bundle = traced.bundle(TWO)
    done = run_container([RUNTIME], bundle, traced.name, env=environment, cgroup="v2")
    assert done.returncode == 0, explain(done)
    start = traced.start()
    check_order(start)
    assert find_outcome(start) == ("ok", "")
    assert [step.path for step in start.steps if step.action == "exec"] == [shutil.which("crun")]
    assert actions(start, "shim")[:2] == ["begin", "find-runtime"]


def test_the_variable_in_a_containers_environment_means_nothing(traced: Traced) -> None:
    foreign = traced.directory / "foreign"
    done = traced.run(traced.environment("hook", traced=False), {**TWO, "OCIGPU_TRACE": str(foreign)})
    assert done.returncode == 0, explain(done)
    assert not foreign.exists()
    assert not traced.file.exists()


def test_without_a_trace_config_json_does_not_mention_one(traced: Traced) -> None:
    bundle = traced.bundle(TWO)
    traced_name = traced.name
    assert run_container([RUNTIME], bundle, traced_name, env=traced.environment("hook")).returncode == 0
    hook = json.loads((bundle / "config.json").read_text())["hooks"]["prestart"]
    assert [entry["args"][entry["args"].index("--trace") + 1] for entry in hook] == [str(traced.file)]
    assert run_container([RUNTIME], bundle, traced_name, env=traced.environment("hook", traced=False)).returncode == 0
    assert "--trace" not in (bundle / "config.json").read_text()


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to("elsewhere"), "Too many levels of symbolic links"),
        (lambda path: (path.touch(), path.chmod(0o666)), "owner 0, mode 0666: others may write"),
        (lambda path: (path.touch(), os.chown(path, 1000, 1000)), "owner 1000, mode"),
        (os.mkfifo, "No such device or address"),
    ],
    ids=["directory", "link", "writable by others", "of another user", "fifo"],
)
@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_a_trace_that_cannot_be_written_is_one_note(
    traced: Traced, make: Callable[[Path], object], cause: str, mode: str
) -> None:
    make(traced.file)
    log = traced.directory / "log"
    bundle = traced.bundle(TWO)
    environment = traced.environment(mode)
    done = run_container([RUNTIME, "--log", log], bundle, traced.name, env=environment)
    assert done.returncode == 0, explain(done)
    notes = [line for line in log.read_text().splitlines() if "this start is not traced" in line]
    assert len(notes) == 1
    assert cause in notes[0]
    assert not (traced.directory / "elsewhere").exists()
    assert not traced.file.is_file() or traced.file.stat().st_size == 0


@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
def test_a_trace_needs_no_working_directory(traced: Traced, relative: bool) -> None:
    environment = traced.environment("hook") | ({"OCIGPU_TRACE": "trace"} if relative else {})
    bundle = traced.bundle(TWO)
    gone = traced.directory / "gone"
    gone.mkdir()
    nowhere = ["sh", "-c", 'cd "$1" && rmdir "$1" && shift && exec "$@"', "sh", gone]
    done = run_container([RUNTIME], bundle, traced.name, env=environment, prefix=nowhere)
    assert done.returncode == 0, explain(done)
    assert traced.file.exists() is not relative


def test_a_full_disk_ends_the_trace_and_not_the_start(traced: Traced) -> None:
    disk = traced.directory / "disk"
    disk.mkdir()
    run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", disk])
    log = traced.host.directory / "hook.log"
    size = log.stat().st_size if log.exists() else 0
    try:
        traced.file = disk / "trace"
        done = traced.run(traced.environment("hook"))
        assert done.returncode == 0, explain(done)
        assert log.read_text()[size:].count("the trace is incomplete: ") == 1
        starts, _ = read_starts(str(traced.file))
        assert starts[0].steps[0].action == "begin", "what was written before is there"
    finally:
        run(["umount", disk])


def test_containers_that_share_a_file_keep_their_lines_whole(traced: Traced) -> None:
    environment = traced.environment("hook")
    started = []
    for _ in range(6):
        bundle = traced.bundle(TWO)
        command = [RUNTIME, "--root", traced.directory / "state", "run", "--bundle", bundle, traced.name]
        started.append((traced.name, subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)))
    for name, process in started:
        assert process.wait(60) == 0, name
        run(["runc", "--root", traced.directory / "state", "delete", "--force", name], check=False)
    starts, unreadable = read_starts(str(traced.file))
    assert unreadable == 0
    assert {start.container for start in starts} == {name for name, _ in started}
    assert {find_outcome(start)[0] for start in starts} == {"ok"}
