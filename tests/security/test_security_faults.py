"""A start that is killed, or whose system calls fail, at every step: all is undone, and the next start succeeds.

The steps are those of a real start: tests/support/stopper.c lists the system calls that change something, then does one
start for each of them in which that call kills its process or fails.  In a start, depth 0 is the shim (its stub, then
Python), 1 the process that waits for the hook, 2 its worker, 3 and 4 the sandbox of ldconfig.  In a hook without the
shim's help, 0 is the hook and 1 its worker.
"""

import errno
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from support import machine, requirements
from support.bundle import base_config, write_bundle
from support.process import Completed, explain, run, wait_for
from support.product import PROGRAMS, RUNTIME, SimulatedHost, listed_uuids, make_simulated_host
from support.runtimes import container_id, set_cgroup, start_in_background
from support.trace import life, trace

from ocigpu.gpus.cached import MAX_AGE
from ocigpu.system.store import seal, unseal

pytestmark = [pytest.mark.root, pytest.mark.engine, pytest.mark.xdist_group("functions")]

ENDS = {"SIGKILL": 0, "SIGTERM": -signal.SIGTERM}
"""What the stopper takes for them."""
FAULTS = (*ENDS, "errors")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENOMEM)
ASKS = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "utility"}
HOOK = PROGRAMS / "ocigpu-hook"
CLI = PROGRAMS / "ocigpu-container-cli"
CACHE = Path("/run/ocigpu")
Tree = dict[str, tuple[int, int, int, int, str]]
EVERY_STEP = os.environ.get("OCIGPU_EVERY_STEP") == "1"
"""Otherwise of each kind of system call the first and the last: minutes become seconds."""
FORKS = ("fork", "vfork", "clone")
NEXT_YEARS = "import os, time; print(int((time.time() - os.stat('/proc/self').st_mtime) / 31557600))"
_numbers = itertools.count(1)


class Step(NamedTuple):
    """The ``number``-th system call of a class that processes of a depth make; ``name``: what it was when listed."""

    depth: int
    number: int
    name: str


@pytest.fixture(scope="session")
def stopper(session_directory: Path) -> Path:
    """The program that interferes."""
    requirements.require(requirements.root(), requirements.programs("gcc", "runc", "busybox"))
    program = session_directory / "stopper"
    run(["gcc", "-O1", "-o", program, Path(__file__).parents[1] / "support/stopper.c"])
    return program


@pytest.fixture(scope="session")
def small_host(session_directory: Path) -> SimulatedHost:
    """A simulated host with two GPUs, which nobody else uses."""
    requirements.require(requirements.root(), requirements.programs("gcc"))
    return make_simulated_host(session_directory / "host-faults", 2)


class Lab:
    """Starts containers of new bundles on the host, and says what is left of them."""

    def __init__(self, directory: Path, host: SimulatedHost, rootfs: Path, env: dict[str, str], mode: str) -> None:
        self.directory, self.host, self.rootfs = directory, host, rootfs
        settings = directory / f"{mode}.toml"
        env = host.environment(env)
        specifications = f'[cdi]\nspec-dirs = ["{directory}/cdi"]\n' if mode == "cdi" else ""
        name = 'hook"\nloader-cache = "merge' if mode == "merge" else mode
        settings.write_text(f'mode = "{name}"\n{Path(env["OCIGPU_CONFIG"]).read_text()}\n{specifications}')
        self.env = {**env, "OCIGPU_CONFIG": str(settings)}
        if mode == "cdi":
            run([PROGRAMS / "ocigpu", "cdi", "generate", "--output", directory / "cdi/nvidia.yaml"], env=self.env)
        self.state = directory / "state"
        self.complete = self.bundle()

    def find_mounts(self) -> list[str]:
        """Return what the machine's mount table has of ours; other lines are of those who work beside the tests."""
        return [line for part in (str(self.directory), str(self.host.directory)) for line in machine.mounts_below(part)]

    def bundle(self) -> Path:
        path = write_bundle(
            self.directory / f"bundle{next(_numbers)}", base_config(["nvidia-smi", "-L"], ASKS), self.rootfs
        )
        set_cgroup(path, container_id())
        return path

    def start(self, bundle: Path, *before: str | Path) -> Completed:
        """``run`` the bundle, with words before the shim's name; the container is deleted in any case."""
        name = bundle.name
        words = [*before, RUNTIME, "--root", self.state]
        try:
            return run([*words, "run", "--bundle", bundle, name], env=self.env, check=False)
        finally:
            run(["runc", "--root", self.state, "delete", "--force", name], env=self.env, check=False)

    def fail_to_start(self, bundle: Path) -> None:
        """Let a start of the bundle fail when all is made but the configuration, which cannot be written."""
        script = 'mount --bind $0 $0; mount --bind $0/rootfs $0/rootfs; mount -o remount,bind,ro $0; exec "$@"'
        result = self.start(bundle, "unshare", "--mount", "dash", "-ec", script, bundle)
        assert "OCIGPU-SPEC-4" in result.stderr, explain(result)

    def assert_starts(self, bundle: Path, *before: str | Path) -> None:
        result = self.start(bundle, *before)
        assert result.returncode == 0, explain(result)
        assert listed_uuids(result.stdout) == list(self.host.gpus), explain(result)

    def call_hook(self, bundle: Path, *before: str | Path, configure: bool = False) -> Completed:
        """Create a container of the bundle without GPUs, and call the hook for it with words before its name.

        ``configure``: not the hook, but ocigpu-container-cli.
        """
        name = bundle.name
        command = ["runc", "--root", str(self.state)]
        path = bundle / "config.json"
        text = path.read_text()
        path.write_text(text.replace('"nvidia-smi"', '"/probe"'))  # there before the hook
        created = start_in_background(command, ["create"], bundle, name, self.env)
        try:
            assert created.returncode == 0, explain(created)
            state = bundle.with_name(f"{name}.json")
            state.write_text(run([*command, "state", name]).stdout)
            words = [*before, HOOK, "--config", self.env["OCIGPU_CONFIG"], "prestart"]
            if configure:
                pid = json.loads(state.read_text())["pid"]
                words = [*before, CLI, "configure", "--device=all", "--utility", f"--pid={pid}", bundle / "rootfs"]
            hook = ["/bin/sh", "-c", 'exec "$@" <"$0"', state, *words]
            env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "OCIGPU_CONFIG": self.env["OCIGPU_CONFIG"]}
            return run(hook, env=env, check=False)
        finally:
            path.write_text(text)
            run([*command, "delete", "--force", name], check=False)

    def assert_nothing_left(self, bundle: Path) -> None:
        """What a bundle and the host look like once a start has succeeded."""
        assert sorted(path.name for path in bundle.iterdir()) == ["config.json", "rootfs"]
        assert self.find_mounts() == []
        cgroup = json.loads((bundle / "config.json").read_text())["linux"]["cgroupsPath"].strip("/")
        machine.remove_cgroups(cgroup)  # a runtime that was killed has made it, and runc knows of no container
        wait_for("those who wait for hooks to end", lambda: not leftovers(), on_failure=lambda: str(leftovers()))


def leftovers() -> list[str]:
    """Return the names in the cache of what only lives for a while, and whose process is gone."""
    found = {path.name: path.name.split("-")[1] for path in CACHE.glob("early-*")}
    found |= {path.name: path.name.split("-")[1] for path in CACHE.glob(".ocigpu-*")}
    return [name for name, pid in found.items() if not Path(f"/proc/{pid}").exists()]


def list_steps(
    stopper: Path, lab: Lab, command: Callable[[Sequence[str | Path]], object], depths: set[int], part: int
) -> list[Step]:
    """Return the steps of a start; of those where a process makes the same call the first and the last.

    ``depths``: those that there must be.  ``part``: only each so many-th step.
    """
    log = lab.directory / f"steps{next(_numbers)}"
    command([stopper, log, "change", "0", "0", "0"])
    numbers: dict[int, int] = defaultdict(int)
    found: dict[tuple[int, str], list[Step]] = defaultdict(list)
    for line in log.read_text().splitlines():
        depth, name = line.split()
        numbers[int(depth)] += 1
        found[int(depth), name].append(Step(int(depth), numbers[int(depth)], name))
    assert numbers.keys() >= depths
    if EVERY_STEP:
        return sorted(itertools.chain.from_iterable(found.values()))
    return sorted({step for steps in found.values() for step in (steps[0], steps[-1])})[::part]


def words_for(stopper: Path, log: Path, kind: str, step: Step, number: int) -> list[str | Path]:
    return [stopper, log, kind, str(step.depth), str(step.number), str(number)]


def assert_whole(bundle: Path, before: bytes) -> None:
    """The configuration is the one it was, or one that gives GPUs."""
    text = (bundle / "config.json").read_bytes()
    if text != before:
        config = json.loads(text)
        ours = "ocigpu-hook", "ocigpu/declared", "nvidia-smi"  # the last: a mount of mode cdi
        assert any(word in str([config.get("hooks"), config.get("annotations"), config["mounts"]]) for word in ours)


def assert_one_line(result: Completed) -> None:
    """What users see of a failure has a code, and no traceback."""
    assert "Traceback" not in result.stderr, explain(result)
    assert "OCIGPU-" in result.stderr, explain(result)
    assert "OCIGPU-INT-1" not in result.stderr, explain(result)  # no defect of ours


@pytest.fixture
def make_lab(
    work_directory: Path,
    small_host: SimulatedHost,
    rootfs: Callable[[str], Path],
    runtime_environment: dict[str, str],
) -> Iterator[Callable[[str], Lab]]:
    """Call with a mode; the host's facts are read and kept already, and a start has succeeded."""
    made = []

    def make(mode: str) -> Lab:
        lab = Lab(work_directory, small_host, rootfs("glibc"), runtime_environment, mode)
        run([PROGRAMS / "ocigpu", "refresh"], env=lab.env, check=False)
        lab.assert_starts(lab.complete)
        made.append(lab)
        return lab

    yield make
    for lab in made:
        assert lab.find_mounts() == []


@pytest.mark.parametrize("mode", ["hook", "merge", "spec", "cdi"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_start_that_ends_at_any_step_leaves_nothing(
    stopper: Path, make_lab: Callable[[str], Lab], mode: str, fault: str, share: Callable[..., list[Step]]
) -> None:
    """What a killed shim has left in modes spec and cdi is undone by the next start, even by one that fails.

    Of the steps of a mode, each fault takes another sixth, and of two modes that are alike the second other ones.
    """
    lab = make_lab(mode)
    hook, ended = mode in ("hook", "merge"), fault != "errors"
    part = (2 if ended else 4) if hook else 1
    start = {"hook": {0, 1, 2, 3}, "merge": {0, 1, 2}}.get(mode, {0})  # 3: the sandbox of ldconfig
    steps = list_steps(stopper, lab, lambda words: lab.start(lab.bundle(), *words), start, part)
    steps = share(steps, 6, 2 * FAULTS.index(fault) + (mode in ("merge", "cdi")))
    complete = machine.tree(lab.complete / "rootfs")
    log = lab.directory / "log"
    problems = []
    for index, step in enumerate(steps):
        error = ENDS[fault] if ended else ERRORS[index % len(ERRORS)]
        bundle = lab.bundle()
        before, tree = (bundle / "config.json").read_bytes(), machine.tree(bundle / "rootfs")
        result = lab.start(bundle, *words_for(stopper, log, "change", step, error))
        try:
            assert_whole(bundle, before)
            if result.returncode == 0:
                assert listed_uuids(result.stdout) == list(lab.host.gpus)
            elif not ended and step.name not in ("execve", "vfork"):  # the interpreter could not be started
                assert_one_line(result)
            if result.returncode and not is_untold(step, result, bundle, complete) and not is_made(bundle, before):
                if fault == "SIGKILL" and not hook:
                    lab.fail_to_start(bundle)
                assert_undone(bundle, tree)
            lab.assert_starts(bundle)
            lab.assert_nothing_left(bundle)
            extra = machine.tree(bundle / "rootfs").keys() - complete.keys()
            assert not extra, extra
        except AssertionError as problem:
            problems.append(f"{fault} {error} at {step}, now {log.read_text()!r}: {problem}\n{explain(result)}")
    assert not problems, "\n\n".join([f"{len(problems)} of {len(steps)} steps", *problems])


def is_made(bundle: Path, before: bytes) -> bool:
    """Whether modes spec and cdi had made all before the shim ended, and only the runtime was to come."""
    text = (bundle / "config.json").read_bytes()
    return text != before and "ocigpu-hook" not in str(json.loads(text).get("hooks"))


def is_untold(step: Step, result: Completed, bundle: Path, complete: Tree) -> bool:
    """Whether all was done, and then the hook's stub was not told so: its process was killed in between.

    Then the container does not start, and the files stay that a start makes.
    """
    untold = (step.depth, step.name) == (1, "write") and "the process that prepared the container" in result.stderr
    return untold and machine.tree(bundle / "rootfs") == complete


def assert_undone(bundle: Path, before: Tree) -> None:
    """The root directory becomes what it was: soon, because those who undo outlive the hook that was killed."""

    def changed() -> list[str]:
        after = machine.tree(bundle / "rootfs")
        return sorted(path for path in {*before, *after} if before.get(path) != after.get(path))

    wait_for("all to be undone", lambda: not changed(), on_failure=lambda: str(changed()))


@pytest.mark.rest
@pytest.mark.parametrize("configure", [False, True], ids=["hook", "configure"])
@pytest.mark.parametrize("fault", ["SIGKILL", "errors"])
def test_a_hook_that_ends_at_any_step_leaves_nothing(
    stopper: Path, make_lab: Callable[[str], Lab], fault: str, configure: bool, share: Callable[..., list[Step]]
) -> None:
    """A hook that nobody has prepared, called for a container that has been created."""
    lab = make_lab("hook")
    part = 3 if fault == "SIGKILL" else 5

    def call(words: Sequence[str | Path]) -> Completed:
        return lab.call_hook(lab.bundle(), *words, configure=configure)

    steps = share(list_steps(stopper, lab, call, {0, 1}, part), 4, 2 * configure + (fault == "SIGKILL"))
    log = lab.directory / "log"
    problems = []
    for index, step in enumerate(steps):
        error = 0 if fault == "SIGKILL" else ERRORS[index % len(ERRORS)]
        bundle = lab.bundle()
        tree = machine.tree(bundle / "rootfs")
        result = lab.call_hook(bundle, *words_for(stopper, log, "change", step, error), configure=configure)
        try:
            if error and result.returncode and step.name != "execve":
                assert_one_line(result)
            if result.returncode:
                assert_undone(bundle, tree)
            lab.assert_starts(bundle)
            lab.assert_nothing_left(bundle)
        except AssertionError as problem:
            name = errno.errorcode[error] if error else "SIGKILL"
            problems.append(f"{name} at {step}, now {log.read_text()!r}: {problem}\n{explain(result)}")
    assert not problems, "\n\n".join([f"{len(problems)} of {len(steps)} steps", *problems])


@pytest.mark.rest
@pytest.mark.parametrize("way", ["shim", "hook", "configure"])
def test_a_process_that_cannot_be_made_is_told_in_one_line(
    stopper: Path, make_lab: Callable[[str], Lab], way: str, share: Callable[..., list[tuple[Step, int]]]
) -> None:
    """fork(2) with EAGAIN and ENOMEM, by whatever process: the NVML child, the worker, the sandbox of ldconfig."""
    lab = make_lab("hook")

    def call(bundle: Path, words: Sequence[str | Path]) -> Completed:
        if way == "shim":
            return lab.start(bundle, *words)
        return lab.call_hook(bundle, *words, configure=way == "configure")

    def call_without_facts(words: Sequence[str | Path]) -> Completed:
        shutil.rmtree(lab.host.directory / "run/ocigpu", ignore_errors=True)
        return call(lab.bundle(), words)

    steps = [step for step in list_steps(stopper, lab, call_without_facts, {0, 1}, 1) if step.name in FORKS]
    assert len(steps) > 1
    codes = set()
    faults = list(itertools.product(steps, (errno.EAGAIN, errno.ENOMEM)))
    for step, error in share(faults, 2, way == "hook", lambda place: place // 2 + place % 2):
        result = call_without_facts(words_for(stopper, lab.directory / "log", "change", step, error))
        if result.returncode:
            assert_one_line(result)
            codes |= set(re.findall("OCIGPU-[A-Z]+-[0-9]+", result.stderr))
    assert "OCIGPU-INT-4" in codes
    bundle = lab.bundle()
    lab.assert_starts(bundle)
    lab.assert_nothing_left(bundle)


@pytest.mark.rest
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_start_without_descriptors_fails_in_one_line_or_succeeds(
    stopper: Path, make_lab: Callable[[str], Lab], depth: int, share: Callable[..., list[int]]
) -> None:
    """EMFILE at a choice of the calls that open something, the interpreter's own imports among them.

    Not in the driver's library, which then lists a GPU less, as of one that is lost: facts have been kept before.
    """
    lab = make_lab("hook")
    log = lab.directory / "count"
    kept = lab.host.directory / "run/ocigpu"
    wait_for("facts to be kept", lambda: lab.start(lab.bundle()).returncode == 0 and any(kept.glob("facts-*")))
    lab.start(lab.bundle(), stopper, log, "open", "0", "0", "0")
    count = sum(line.startswith(f"{depth} ") for line in log.read_text().splitlines())
    assert count > 5
    bundle = lab.bundle()
    for number in share(range(1, count + 1, 1 if EVERY_STEP else max(1, count // 12)), 2, depth):
        step = Step(depth, number, "")
        result = lab.start(bundle, *words_for(stopper, log, "open", step, errno.EMFILE))
        if "Fatal Python error" not in result.stderr:  # else the interpreter has not come to any line of ours
            assert "Traceback" not in result.stderr, (step, explain(result))
        if result.returncode == 0:
            assert listed_uuids(result.stdout) == list(lab.host.gpus)
    lab.assert_starts(bundle)
    lab.assert_nothing_left(bundle)


def test_a_full_disk_changes_no_configuration(make_lab: Callable[[str], Lab], work_directory: Path) -> None:
    for mode in ("hook", "spec"):
        lab = make_lab(mode)
        bundle = lab.bundle()
        before = (bundle / "config.json").read_bytes()
        small = f"mount -t tmpfs -o size=8k none /mnt && cp {bundle}/config.json /mnt && head -c 9000 /dev/zero >/mnt/x"
        script = f"{small}; cd /mnt; {RUNTIME} create x; echo $?; cmp config.json {bundle}/config.json; ls"
        result = run(["unshare", "--mount", "dash", "-c", script], env=lab.env, check=False)
        assert result.stdout == "1\nconfig.json\nx\n", explain(result)
        assert "OCIGPU-" in result.stderr
        assert (bundle / "config.json").read_bytes() == before


def test_a_full_or_read_only_cache_is_no_obstacle(make_lab: Callable[[str], Lab]) -> None:
    lab = make_lab("hook")
    for options in ("size=4k", "ro"):
        bundle = lab.bundle()
        script = f'mount -t tmpfs -o {options} none /run && (cat /dev/zero >/run/full) 2>/dev/null; exec "$@"'
        view = ["unshare", "--mount", "dash", "-c", script, "dash"]
        lab.assert_starts(bundle, *view)
        lab.assert_nothing_left(bundle)


@pytest.mark.rest
def test_a_driver_that_hangs_is_asked_once_and_said_to_hang(make_lab: Callable[[str], Lab]) -> None:
    """The deadline is that of ocigpu.gpus.nvidia.nvml; GPUs then come from procfs."""
    lab = make_lab("hook")
    bundle = lab.bundle()
    shutil.rmtree(lab.host.directory / "run/ocigpu")  # what was kept
    faults = lab.host.directory / "faults"
    size = lab.host.hook_log.stat().st_size
    assert_asked_once(lab, bundle, faults)
    assert "NVML did not answer within 10 s" in lab.host.hook_log.read_text()[size:]
    lab.assert_starts(bundle)
    lab.assert_nothing_left(bundle)


@pytest.mark.rest
@pytest.mark.parametrize("mode", ["hook", *(pytest.param(mode, marks=pytest.mark.rest) for mode in ("spec", "cdi"))])
def test_a_driver_that_hangs_when_facts_are_old_is_asked_once(make_lab: Callable[[str], Lab], mode: str) -> None:
    """Whether what is kept still holds is asked at several places of a start, which has 30 s in all."""
    lab = make_lab(mode)
    bundle = lab.bundle()
    if mode == "cdi":  # a specification that does not tell the host's state: the kept facts do
        specification = lab.directory / "cdi/nvidia.yaml"
        specification.write_text(specification.read_text().replace("ocigpu/fingerprint", "example.com/fingerprint"))
    faults, elsewhere = lab.host.directory / "faults", lab.host.directory / "elsewhere/faults"
    elsewhere.parent.mkdir()
    faults.symlink_to(elsewhere)  # below the host's root that is nothing, before and after
    try:
        time.sleep(2.1)  # facts of a host that has just changed are not kept
        run([PROGRAMS / "ocigpu", "refresh"], env=lab.env)
        (kept,) = (lab.host.directory / "run/ocigpu").glob("facts-*")
        key, proof, *rest = unseal(kept.read_bytes()).split(b"\n")
        made, *others = json.loads(proof)
        kept.write_bytes(seal(b"\n".join((key, json.dumps([made - MAX_AGE, *others]).encode(), *rest))))
        assert_asked_once(lab, bundle, elsewhere)
    finally:
        faults.unlink()
        elsewhere.parent.rmdir()
    lab.assert_starts(bundle)
    lab.assert_nothing_left(bundle)


def assert_asked_once(lab: Lab, bundle: Path, faults: Path) -> None:
    faults.write_text("hang\n")
    try:
        programs = trace(life(RUNTIME, lab.state, bundle, bundle.name), lab.env)
    finally:
        faults.unlink()
    assert sum(any(path.endswith("/faults") for path in program.opened) for program in programs) == 1


@pytest.mark.parametrize("prepared", [True, False])
def test_a_gpu_that_goes_after_the_plan_leaves_nothing(make_lab: Callable[[str], Lab], prepared: bool) -> None:
    """A hook that was prepared gives the node that was, as if the GPU had gone a moment later; another refuses."""
    lab = make_lab("hook")
    bundle = lab.bundle()
    config = (bundle / "config.json").read_text()
    (bundle / "config.json").write_text(config.replace("VISIBLE_DEVICES=all", "VISIBLE_DEVICES=0,1"))
    tree = machine.tree(bundle / "rootfs")
    node, moved = lab.host.directory / "dev/nvidia1", lab.host.directory / "moved"
    settings = Path(lab.env["OCIGPU_CONFIG"])
    before, _, after = settings.read_text().partition("runtimes = ")
    runtime = lab.directory / "removes-a-gpu"
    kill = "" if prepared else "read -r children </proc/$$/task/$$/children; kill -9 $children"
    runtime.write_text(f'#!/bin/sh\n{kill}\nmv {node} {moved}\nexec runc "$@"\n')
    runtime.chmod(0o755)
    settings.write_text(f'{before}runtimes = ["{runtime}"]\n[hook]{after.partition("[hook]")[2]}')
    try:
        result = lab.start(bundle)
        if prepared:
            assert listed_uuids(result.stdout) == list(lab.host.gpus), explain(result)
        else:
            assert "OCIGPU-DEV-2: GPU " in result.stderr, explain(result)
            assert "device nodes are missing: /dev/nvidia1" in result.stderr
            assert_one_line(result)
            assert_undone(bundle, tree)
    finally:
        moved.rename(node)
        settings.write_text(f"{before}runtimes = {after}")
    lab.assert_starts(bundle)
    lab.assert_nothing_left(bundle)


@pytest.mark.rest
def test_hooks_that_run_twice_give_what_one_gives(make_lab: Callable[[str], Lab]) -> None:
    lab = make_lab("hook")
    once, twice = lab.bundle(), lab.bundle()
    lab.assert_starts(once)
    lab.assert_starts(twice)
    config = json.loads((twice / "config.json").read_text())
    config["hooks"]["prestart"] *= 2
    (twice / "config.json").write_text(json.dumps(config))
    result = run(["runc", "--root", lab.state, "run", "--bundle", twice, twice.name], env=lab.env, check=False)
    run(["runc", "--root", lab.state, "delete", "--force", twice.name], check=False)
    assert listed_uuids(result.stdout) == list(lab.host.gpus), explain(result)
    assert machine.tree(once / "rootfs") == machine.tree(twice / "rootfs")
    lab.assert_starts(twice)
    lab.assert_nothing_left(twice)


@pytest.mark.rest
@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
def test_a_clock_that_jumps_changes_no_start(make_lab: Callable[[str], Lab], mode: str) -> None:
    """What is kept was written years from now, or years ago; the hook has the clock as it is."""
    lab = make_lab(mode)
    library = lab.directory / "clock.so"
    run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, Path(__file__).parents[1] / "support/clock.c"])
    shown = run(["env", f"LD_PRELOAD={library}", "CLOCK_YEARS=10", sys.executable, "-ISc", NEXT_YEARS])
    assert int(shown.stdout) >= 9, "the clock did not jump"
    bundle = lab.bundle()
    for years in ("10", "0", "-30", "0", "10", "-30"):
        lab.assert_starts(bundle, "env", f"LD_PRELOAD={library}", f"CLOCK_YEARS={years}")
        if mode == "cdi":  # the specification has the numbers of nodes, and nobody asks for the nodes
            continue
        node, away = lab.host.directory / "dev/nvidia1", lab.host.directory / "away"
        node.rename(away)
        try:
            result = lab.start(bundle, "env", f"LD_PRELOAD={library}", f"CLOCK_YEARS={years}")
            assert listed_uuids(result.stdout) == list(lab.host.gpus[:1]), explain(result)
        finally:
            away.rename(node)
    lab.assert_starts(bundle)
    lab.assert_nothing_left(bundle)


@pytest.mark.parametrize("later", [True, False])
def test_facts_of_another_time_are_read_anew(make_lab: Callable[[str], Lab], later: bool) -> None:
    """The age of what is kept goes by the time since the boot, which a time namespace shifts: time_namespaces(7).

    Not to before the boot, which the kernel refuses.
    """
    lab = make_lab("hook")
    offset = "1000000" if later else str(-int(min(1000, time.clock_gettime(time.CLOCK_BOOTTIME) / 2)))
    requirements.require(_tried_time_namespace())
    bundle = lab.bundle()
    kept = lab.host.directory / "run/ocigpu"

    time.sleep(2.1)  # facts of a host that has just changed are not kept
    lab.assert_starts(bundle)
    before = [path.read_bytes() for path in kept.glob("facts-*")]
    lab.assert_starts(bundle, "unshare", "--time", "--fork", "--boottime", offset)
    assert before != [path.read_bytes() for path in kept.glob("facts-*")]
    lab.assert_starts(bundle)
    lab.assert_nothing_left(bundle)


def _tried_time_namespace() -> str:
    result = run(["unshare", "--time", "--fork", "--boottime", "1", "true"], check=False)
    return "" if result.returncode == 0 else f"no time namespaces: {result.stderr.strip()}"
