"""The process that is ready before the hook is called (ocigpu/entry/prepared.py), and every order of deaths."""

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import machine, requirements
from support.fixtures import MakeBundle
from support.machine import LIBRARIES
from support.process import explain, is_alive, run, wait_for
from support.product import PROGRAMS, RUNTIME, STUBS, SimulatedHost, listed_uuids, write_stub
from support.runtimes import container_id, create_and_start, run_container, start_in_background, view_of
from support.trace import life, trace

pytestmark = [pytest.mark.root, pytest.mark.engine]

HOOK = PROGRAMS / "ocigpu-hook"
DIRECTORY = Path("/run/ocigpu")
RUNTIMES = pytest.mark.parametrize("low_level", ["runc", "crun"])
ALL = {"NVIDIA_VISIBLE_DEVICES": "all"}
SLOW_LDCONFIG = """
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int main(void) {
	int word = 0;
	struct timespec time = {60, 0};
	return syscall(SYS_futex, &word, FUTEX_WAIT, 0, &time, 0, 0) == 0;
}
"""
"""Waits until it is stopped, and makes no cache."""
_numbers = itertools.count(1)


def waiting() -> set[Path]:
    return set(DIRECTORY.glob("early-*"))


def pids(parent: int, part: str) -> list[int]:
    """Return the children of a process whose command line contains a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and part in (path / "cmdline").read_text():
                found.append(int(path.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def settings_with(environment: dict[str, str], directory: Path, text: str = "", low_level: str = "") -> dict[str, str]:
    """Return an environment with settings of its own: ``text`` before them, another low-level runtime."""
    lines = Path(environment["OCIGPU_CONFIG"]).read_text()
    if low_level:
        before, _, after = lines.partition("runtimes = [")
        lines = f'{before}runtimes = ["{low_level}"]{after.partition("]")[2]}'
    path = directory / f"settings{next(_numbers)}.toml"
    path.write_text(f"{text}\n{lines}")
    path.chmod(0o644)
    return {**environment, "OCIGPU_CONFIG": str(path)}


def write_program(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def program_path(name: str) -> str:
    return run(["sh", "-c", f"command -v {name}"]).stdout.strip()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = waiting()
    yield
    wait_for("the directories to be removed", lambda: waiting() <= before)


@RUNTIMES
def test_a_container_gets_its_gpus_by_a_single_interpreter(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    low_level: str,
) -> None:
    env = simulated_host.environment(runtime_environment, low_level)
    pythons: list[str] = []

    def is_prepared() -> bool:
        name = container_id()
        bundle = make_bundle(["nvidia-smi", "-L"], ALL)
        programs = trace(life(RUNTIME, work_directory / "state", bundle, name), env)
        assert [program.kind for program in programs].count("hook") == 1
        pythons[:] = [" ".join(program.words) for program in programs if program.kind == "python"]
        assert pythons
        return not any("ocigpu.hook" in words for words in pythons)

    if low_level == "runc":
        # on a busy machine the hook may come too late for what was prepared (ocigpu/entry/prepared.py)
        wait_for("a start with a single interpreter", is_prepared, on_failure=lambda: "\n".join(pythons))
    bundle = make_bundle(["nvidia-smi", "-L"], ALL)
    result = run_container([RUNTIME], bundle, container_id(), env=env, cgroup="v2")
    assert result.returncode == 0, explain(result)
    assert listed_uuids(result.stdout) == list(simulated_host.gpus)


@RUNTIMES
def test_the_hook_works_without_it(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    low_level: str,
) -> None:
    killer = write_program(
        work_directory / "killer",
        'read -r children </proc/$$/task/$$/children; kill -9 $children && : >"$0.done"',
        f'exec {program_path(low_level)} "$@"',
    )
    env = settings_with(simulated_host.environment(runtime_environment, low_level), work_directory, "", killer)
    bundle = make_bundle(["nvidia-smi", "-L"], ALL)
    before = waiting()
    result = run_container([RUNTIME], bundle, container_id(), env=env, cgroup="v2")
    assert result.returncode == 0, explain(result)
    assert listed_uuids(result.stdout) == list(simulated_host.gpus)
    assert Path(f"{killer}.done").exists()
    assert len(waiting() - before) == 1, "nobody was there to remove it"
    bundle = make_bundle(["true"], ALL)
    env = simulated_host.environment(runtime_environment, low_level)
    assert run_container([RUNTIME], bundle, container_id(), env=env, cgroup="v2").returncode == 0
    wait_for("a later one to remove it", lambda: waiting() <= before)


@pytest.fixture
def slow(work_directory: Path, simulated_host: SimulatedHost, runtime_environment: dict[str, str]) -> dict[str, str]:
    """An environment in which the hook's work lasts until it is given up (ocigpu/provision/ldconfig.py, DEADLINE)."""
    (work_directory / "slow.c").write_text(SLOW_LDCONFIG)
    run(["gcc", "-static", "-o", work_directory / "slow", work_directory / "slow.c"])
    env = simulated_host.environment(runtime_environment, "runc")
    return settings_with(env, work_directory, f'ldconfig = "@{work_directory}/slow"')


@pytest.mark.parametrize("victim", ["child", "stub", "runtime"])
def test_whoever_is_killed_during_the_work_leaves_nothing(
    victim: str, make_bundle: MakeBundle, slow: dict[str, str], work_directory: Path
) -> None:
    bundle = make_bundle(["true"], ALL)
    name = container_id()
    command = [RUNTIME, "--root", str(work_directory / "state")]
    tree = machine.tree(bundle / "rootfs")
    errors = work_directory / "errors"
    with errors.open("wb") as file:
        process = subprocess.Popen(
            [*command, "create", "--bundle", bundle, name], env=slow, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        found: list[int] = []
        wait_for("the work to be in ldconfig", lambda: found.append(machine.running_ldconfig(bundle)) or found[-1])
        ldconfig = found[-1]
        (child,) = pids(process.pid, "ocigpu.runtime")
        (stub,) = pids(process.pid, "--early")
        workers = pids(child, "ocigpu.runtime")
        assert workers
        pid = {"child": child, "stub": stub, "runtime": process.pid}[victim]
        os.kill(pid, signal.SIGKILL)
        wait_for("it to end", lambda: not is_alive(pid))  # on a busy machine the work was done before
        with contextlib.suppress(ProcessLookupError):  # it may end with the victim
            os.kill(ldconfig, signal.SIGKILL)
        assert process.wait(60) != 0
        for each in (child, stub, *workers):
            wait_for(f"process {each} to end", lambda each=each: not is_alive(each))
        assert machine.tree(bundle / "rootfs") == tree
        if victim == "child":
            assert "OCIGPU-INT-2" in errors.read_text()
    finally:
        run([*command, "delete", "--force", name], env=slow, check=False)
        # a runtime that was killed has left no state to delete it by
        machine.remove_cgroups(json.loads((bundle / "config.json").read_text())["linux"]["cgroupsPath"].strip("/"))
    assert machine.mounts_below(str(bundle)) == []


def test_a_hook_that_is_replayed_by_hand_does_without_it(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path
) -> None:
    env = simulated_host.environment(runtime_environment, "runc")
    bundle = make_bundle(["true"], ALL)
    name = container_id()
    command = ["runc", "--root", str(work_directory / "state")]
    created = start_in_background(command, ["create"], bundle, name, env)
    try:
        assert created.returncode == 0, explain(created)
        state = run([*command, "state", name], env=env).stdout
        for _ in range(2):
            words = [HOOK, "--early", "/run/ocigpu/early-1-0123456789abcdef", "--config", env["OCIGPU_CONFIG"]]
            done = subprocess.run(
                [*words, "prestart"], input=state, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr
        assert (bundle / f"rootfs{LIBRARIES}/libcuda.so.1").is_symlink()
    finally:
        run([*command, "delete", "--force", name], env=env, check=False)


@RUNTIMES
def test_it_is_gone_while_a_container_runs_in_the_foreground(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    low_level: str,
) -> None:
    env = simulated_host.environment(runtime_environment, low_level)
    bundle = make_bundle(["sh", "-c", "nvidia-smi -L; exec sleep 60"], ALL)
    name = container_id()
    # crun refuses machines that mount both versions of cgroups; unshare(1) becomes the command
    command = [*view_of("v2"), RUNTIME, "--root", str(work_directory / "state")]
    process = subprocess.Popen(
        [*command, "run", "--bundle", bundle, name], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert b"GPU 0" in process.stdout.readline()
        process.stdout.close()
        wait_for("it to end", lambda: pids(process.pid, "ocigpu.runtime") == [])
        zombies = [pid for pid in pids(process.pid, "") if not is_alive(pid)]
        assert zombies == []
        assert process.poll() is None
    finally:
        run([*command, "delete", "--force", name], env=env, check=False)
        assert process.wait(60) != 0


@pytest.mark.rest
def test_twenty_containers_start_at_once(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path
) -> None:
    env = simulated_host.environment(runtime_environment, "runc")
    bundles = [make_bundle(["nvidia-smi", "-L"], {"NVIDIA_VISIBLE_DEVICES": str(number % 8)}) for number in range(20)]
    names = [container_id() for _ in bundles]

    def start(number: int) -> str:
        result = create_and_start(
            [RUNTIME], bundles[number], names[number], env=env, state=work_directory / f"state{number}"
        )
        assert result.returncode == 0, explain(result)
        return result.stdout

    with ThreadPoolExecutor(20) as pool:
        for number, listing in enumerate(pool.map(start, range(20))):
            assert listed_uuids(listing) == [simulated_host.gpus[number % 8]]


@pytest.fixture
def idle(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path
) -> Iterator[tuple[subprocess.Popen[bytes], int, int, str]]:
    """A low-level runtime that never calls the hook: (it, the child, a pipe's end it was started with, the directory).

    The pipe is one that an engine would wait on: the runtime has closed its end.
    """
    code = "import os, time; os.closerange(3, 1000); time.sleep(60)"
    quiet = write_program(work_directory / "quiet", f"exec {sys.executable} -I -S -c '{code}'")
    env = settings_with(simulated_host.environment(runtime_environment, "runc"), work_directory, "", quiet)
    bundle = make_bundle(["true"], ALL)
    read, write = os.pipe()

    process = subprocess.Popen(
        [RUNTIME, "create", "--bundle", bundle, "x"],
        env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[write],
    )  # fmt: skip
    os.close(write)
    try:
        waits: list[int] = []  # what reads the host may be a child, too, for a while
        wait_for("the child", lambda: waits.extend(filter(is_waiting, pids(process.pid, "ocigpu.runtime"))) or waits)
        child = waits[0]
        entry = json.loads((bundle / "config.json").read_text())["hooks"]["prestart"][0]
        yield process, child, read, entry["args"][2]
    finally:
        process.kill()
        process.wait()
        os.close(read)


def is_waiting(pid: int) -> bool:
    """Whether a process is in poll(2), a second each time, as nothing else of ours is."""
    try:
        fields = Path(f"/proc/{pid}/syscall").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] == "7" and fields[3] == "0x3e8"


def is_reading(pid: int, path: str) -> bool:
    """Whether a process is in read(2) or poll(2) and has a file open, which it has opened before."""
    try:
        waits = Path(f"/proc/{pid}/syscall").read_text().split()[0] in ("0", "7")
        return waits and path in [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except FileNotFoundError:  # closed just now
        return False


def test_it_holds_nothing_of_the_runtimes_and_is_small(
    idle: tuple[subprocess.Popen[bytes], int, int, str],
) -> None:
    process, child, pipe, directory = idle
    ready, _, _ = select.select([pipe], [], [], 60)
    assert ready, "the pipe has not ended"
    assert os.read(pipe, 1) == b""
    assert is_alive(child)
    workers = pids(child, "ocigpu.runtime")
    assert len(workers) == 1
    for pid in (child, *workers):
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        assert [link for link in links if link.startswith("socket:") or "/bundle" in link] == []
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert int(status["VmHWM"].split()[0]) < 24 << 10
    process.kill()
    process.wait()
    for pid in (child, *workers):
        wait_for("it to end with the runtime", lambda pid=pid: not is_alive(pid))
    assert not Path(directory).exists()


@pytest.fixture(params=STUBS)
def hook(work_directory: Path, request: pytest.FixtureRequest) -> Path:
    """The program of a hook, both forms of it."""
    return write_stub(work_directory / "ocigpu-hook", request.param)


def test_what_asks_without_being_its_hook_is_sent_away(idle: tuple[subprocess.Popen[bytes], int, int, str]) -> None:
    _, child, _, directory = idle
    with open(f"{directory}/request", "r+b", buffering=0) as request:
        request.write(f"{os.getpid()}\n".encode())
    wait_for("it to end", lambda: not is_alive(child))
    assert not Path(directory).exists()


def test_a_stub_that_is_killed_at_once_does_no_harm(
    idle: tuple[subprocess.Popen[bytes], int, int, str], hook: Path
) -> None:
    _, child, _, directory = idle
    os.kill(child, signal.SIGSTOP)
    stub = subprocess.Popen([hook, "--early", directory, "prestart"], stdin=subprocess.DEVNULL)
    wait_for("it to wait for an answer", lambda: is_reading(stub.pid, f"{directory}/answer"))
    assert stub.poll() is None
    stub.kill()
    stub.wait()
    os.kill(child, signal.SIGCONT)
    wait_for("it to end", lambda: not is_alive(child))


@pytest.mark.parametrize(
    ("answers", "status", "output", "errors"),
    [
        pytest.param([], 0, "ocigpu-hook ", "", id="killed before it took the request: Python does it"),
        pytest.param(["begin {pid}"], 1, "", "OCIGPU-INT-2", id="killed during the work"),
        pytest.param(["begin {pid}", "exit {pid} 0"], 0, "", "", id="done"),
        pytest.param(["begin {pid}", "exit {pid} 1"], 1, "", "", id="failed"),
        pytest.param(["begin 1", "exit 1 0"], 0, "ocigpu-hook ", "", id="the answer to another"),
        pytest.param(["begin {pid}", "exit 1 0"], 1, "", "OCIGPU-INT-2", id="the end of another"),
    ],
)
def test_the_stub_understands_every_end(
    hook: Path, tmp_path: Path, answers: list[str], status: int, output: str, errors: str
) -> None:
    for name in ("request", "answer"):
        os.mkfifo(tmp_path / name)
    request = os.open(tmp_path / "request", os.O_RDWR)
    answer = os.open(tmp_path / "answer", os.O_RDWR)
    asked = []

    def serve() -> None:
        pid = os.read(request, 64).decode().strip()
        asked.append(int(pid))
        for line in answers:
            os.write(answer, f"{line.format(pid=pid)}\n".encode())
        os.close(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    process = subprocess.Popen(
        [hook, "--early", tmp_path, "--version"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, err = process.communicate(timeout=60)
    thread.join()
    os.close(request)
    assert asked == [process.pid]
    assert process.returncode == status, err
    assert out.startswith(output)
    assert bool(out) == bool(output)
    assert errors in err
    assert len(err.splitlines()) == bool(errors)


def start_waiting(directory: Path, stops: bool) -> subprocess.Popen[bytes]:
    """Start a process that has both ends of the FIFOs open and answers nobody, and say who it is."""
    for name in ("request", "answer"):
        os.mkfifo(directory / name)
    script = 'exec 3<>"$0/request" 4<>"$0/answer"; echo ready; exec sleep 1000'
    child = subprocess.Popen(["sh", "-c", script, directory], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    (directory / "child").write_text(f"{child.pid}\n")
    if stops:
        child.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{child.pid}/stat")
        wait_for("it to stop", lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
    return child


def test_the_stub_kills_a_process_that_was_stopped_before_it_had_a_timer(hook: Path, tmp_path: Path) -> None:
    with start_waiting(tmp_path, stops=True) as child:
        done = run([hook, "--early", tmp_path, "--version"])
        assert done.stdout.startswith("ocigpu-hook "), "Python does it"
        assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("what", ["another's", "no number", "no process"])
def test_the_stub_kills_nobody_else(hook: Path, tmp_path: Path, what: str) -> None:
    """Who is stopped and has another parent is none of ours."""
    with start_waiting(tmp_path, stops=True) as child:
        if what != "another's":
            (tmp_path / "child").write_text({"no number": "x", "no process": "999999999"}[what])
        words = [hook, "--early", tmp_path, "--version"]
        with subprocess.Popen(["sh", "-c", '"$@"; exit $?', "sh", *words], stdout=subprocess.PIPE) as stub:
            wait_for("a request", lambda: select.select([request_of(tmp_path)], [], [], 0)[0])
            assert child.poll() is None
            child.kill()
            assert stub.stdout is not None
            assert stub.stdout.read().startswith(b"ocigpu-hook ")


def request_of(directory: Path) -> int:
    return os.open(directory / "request", os.O_RDONLY | os.O_NONBLOCK)


@pytest.mark.parametrize("low_level", ["runc"])
def test_a_start_whose_early_process_is_stopped_at_once_goes_on(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], low_level: str
) -> None:
    """What is stopped by the runtime here has no timer yet, or one of half a minute: nobody waits for either."""
    bundle = make_bundle(["sh", "-c", "echo started"], ALL)
    env = simulated_host.environment(runtime_environment, low_level)
    wrapper, settings, stopped = (bundle.with_name(f"stopping-{what}") for what in ("runtime", "settings", "pid"))
    script = '#!/bin/sh\nfor file in /run/ocigpu/early-$$-*/child; do\nread -r child <"$file" && kill -STOP "$child"'
    wrapper.write_text(f'{script} && echo "$child" >{stopped}\ndone\nexec {low_level} "$@"\n')
    wrapper.chmod(0o755)
    program = requirements.find_program(low_level)
    text = Path(env["OCIGPU_CONFIG"]).read_text()
    settings.write_text(text.replace(f'runtimes = ["{program}"]', f'runtimes = ["{wrapper}"]'))
    settings.chmod(0o644)
    name = container_id()
    begin = time.monotonic()
    done = run_container([RUNTIME], bundle, name, env={**env, "OCIGPU_CONFIG": str(settings)})
    assert done.stdout == "started\n", explain(done)
    assert time.monotonic() - begin < 25
    wait_for("its end", lambda: not is_alive(int(stopped.read_text())))
    for place in waiting():  # as of any process that was killed; the next start would do it
        shutil.rmtree(place)


def test_the_next_start_kills_one_whose_hook_never_came(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(["sh", "-c", "echo started"], ALL)
    place = DIRECTORY / "early-999999999-0123456789abcdef"
    with subprocess.Popen(["sh", "-c", "read line # ocigpu", "ocigpu"], stdin=subprocess.PIPE) as child:
        place.mkdir(mode=0o700)
        (place / "child").write_text(f"{child.pid}\n")
        child.send_signal(signal.SIGSTOP)
        done = run_container([RUNTIME], bundle, container_id(), env=simulated_host.environment(runtime_environment))
        assert done.stdout == "started\n", explain(done)
        wait_for("its end", lambda: child.poll() is not None)
    assert not place.exists()


@pytest.mark.parametrize("names", [(), ("request",), ("answer",)], ids=["neither", "no answer", "no request"])
def test_the_stub_does_without_fifos(hook: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        os.mkfifo(tmp_path / name)
    done = run([hook, "--early", tmp_path, "--version"])
    assert done.stdout.startswith("ocigpu-hook ")
