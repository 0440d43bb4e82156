"""A command with simulated GPUs: nothing of them needs root, device nodes or mounts."""

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import requirements
from support.process import Completed, run, stop
from support.products import one_in

from ocigpu.cli.front.main import main
from ocigpu.core.errors import OcigpuError
from ocigpu.sim import libraries
from ocigpu.sim.create import create_host
from ocigpu.sim.few import environment_of, find_place
from ocigpu.sim.made import describe_host
from ocigpu.sim.models import MODELS, NVIDIA

OCIGPU = Path(sys.executable).parent / "ocigpu"
LOOK = """\
import ctypes, pynvml
pynvml.nvmlInit()
cuda, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert cuda.cuInit(0) == 0
handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
for device, handle in enumerate(handles):
    values = []
    for attribute in (75, 76, 16):
        assert cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device) == 0
        values.append(number.value)
    uuid = ctypes.create_string_buffer(16)
    assert cuda.cuDeviceGetUuid(uuid, device) == 0
    assert pynvml.nvmlDeviceGetUUID(handle).replace("-", "").removeprefix("GPU") == uuid.raw.hex()
    assert tuple(values[:2]) == pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = ctypes.c_size_t()
    assert cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0
    try:
        known = pynvml.nvmlDeviceGetMemoryInfo(handle).total
        assert known == memory.value
    except pynvml.NVMLError_NotSupported:
        known = 0
    print(pynvml.nvmlDeviceGetName(handle), *values, known >> 20, memory.value > 0, sep="|")
assert cuda.cuCtxCreate_v2(None, 0, 0) == 801
"""
ENDS = (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGINT, signal.SIGPIPE)
SIMULATED = (
    "ocigpu: SIMULATED: 1 GPU, NVIDIA H100 80GB HBM3: libraries only, without device nodes; nothing can be computed"
)


def sim_exec(*words: str, **variables: str) -> Completed:
    return run([OCIGPU, "sim", "exec", *words], env={**os.environ, **variables}, check=False)


@pytest.mark.parametrize("model", one_in(4, (key for key, model in MODELS.items() if model.vendor == NVIDIA)))
def test_nvml_cuda_and_nvidia_smi_see_every_model(
    tmp_path: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr(libraries, "PREBUILT", prebuilt)
    host = tmp_path / "host"
    one = MODELS[model]
    count = 1 if one.alone else 2
    create_host(str(host), count, model, few=True)
    environment = environment_of(str(host), os.environ)
    done = run([sys.executable, "-c", LOOK], env=environment)
    line = "|".join(map(str, [one.name, *one.architecture.split("."), one.multiprocessors, one.memory_mib, True]))
    assert done.stdout.splitlines() == [line] * count
    listed = run(["nvidia-smi", "-L"], env=environment).stdout.splitlines()
    assert [text.partition(" (UUID")[0] for text in listed] == [f"GPU {number}: {one.name}" for number in range(count)]
    assert describe_host(str(host))["nodes"] == "none"
    assert not [path for path in host.rglob("*") if path.is_char_device()]


def test_a_command_sees_gpus_and_its_directory_is_gone_afterwards() -> None:
    done = sim_exec("--gpus", "2", "--model", "l4", "--", "sh", "-c", "nvidia-smi -L; echo $OCIGPU_CONFIG; exit 7")
    *listed, config = done.stdout.splitlines()
    assert done.returncode == 7, done.stderr
    assert [text.partition(" (")[0] for text in listed] == ["GPU 0: NVIDIA L4", "GPU 1: NVIDIA L4"]
    assert not Path(config).parents[1].exists()
    assert "ocigpu: SIMULATED: 2 GPUs, NVIDIA L4" in done.stderr


@pytest.mark.parametrize(
    ("model", "command"),
    [pytest.param("l4", "nvidia-smi && nvidia-smi -L", marks=pytest.mark.rest), ("mi300x", "amd-smi && amd-smi list")],
)
def test_quiet_means_that_stderr_does_not_say_simulated(model: str, command: str) -> None:
    done = sim_exec("-q", "--model", model, "--", "sh", "-c", command)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.rest
def test_options_behind_the_name_of_the_command_are_its_own() -> None:
    done = sim_exec("--gpus", "2", "nvidia-smi", "-L")
    assert [text.partition(" (")[0] for text in done.stdout.splitlines()] == [
        "GPU 0: NVIDIA H100 80GB HBM3", "GPU 1: NVIDIA H100 80GB HBM3",
    ]  # fmt: skip
    assert sim_exec("-q", "echo", "--help", "--", "--gpus", "0").stdout == "--help -- --gpus 0\n"


@pytest.mark.rest
def test_what_was_killed_is_swept_when_its_command_has_ended_too(tmp_path: Path) -> None:
    command = [OCIGPU, "sim", "exec", "-q", "--", "sh", "-c", "echo $$; exec sleep 1000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    (tmp_path / "ocigpu-sim-link").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as killed:
        assert killed.stdout
        child = int(killed.stdout.readline())
        killed.kill()
    (left,) = tmp_path.glob("ocigpu-sim-*/host")
    assert sim_exec("-q", "--", "nvidia-smi", "-L", TMPDIR=str(tmp_path)).returncode == 0
    assert (left / "config.toml").exists(), "the command that it has started goes on"
    stop(child)
    assert sim_exec("-q", "--", "true", TMPDIR=str(tmp_path)).returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"ocigpu-sim-link", "other"}


def test_mig_devices_are_seen_and_changed_without_root(tmp_path: Path) -> None:
    script = (
        "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(1)\n"
        "print(n.nvmlDeviceGetMigMode(h), n.nvmlDeviceSetMigMode(h, 1), n.nvmlDeviceGetMigMode(h))"
    )
    words = ["nvidia-smi", "-L"]
    both = f"{shlex.join([sys.executable, '-c', script])}; {shlex.join(words)}"
    done = sim_exec("--gpus", "2", "--mig", "0:1g.10gb,2g.20gb", "-q", "--", "sh", "-c", both, TMPDIR=str(tmp_path))
    assert done.stdout.startswith("[0, 0] 0 [1, 1]\n"), done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if "MIG-" in line] == ["1g.10gb", "2g.20gb"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "status", "line"),
    one_in(
        4,
        [
            (["--", "no-such-program"], 127, "ocigpu: OCIGPU-SIM-1: execute no-such-program: no such program"),
            (["--", "/etc/passwd"], 126, "ocigpu: OCIGPU-SIM-1: execute /etc/passwd: not executable"),
            (["--model", "mi300x", "--mig", "0:", "--", "true"], 125, "ocigpu: OCIGPU-SIM-1: model mi300x: only nodes"),
            (["--model", "h900", "--", "true"], 125, 'ocigpu: OCIGPU-SIM-1: model "h900" is unknown'),
            (["--mig", "0:9g.10gb", "--", "true"], 125, 'ocigpu: OCIGPU-SIM-1: MIG layout "0:9g.10gb": a'),
            (["--driver-version", "x", "--", "true"], 125, 'ocigpu: OCIGPU-SIM-1: driver version "x"'),
            (["--gpus", "65", "--", "true"], 2, "ocigpu: OCIGPU-ARG-1: "),
            ([], 2, "ocigpu: OCIGPU-ARG-1: missing argument"),
        ],
    ),
)
def test_what_cannot_be_run_is_one_line_and_has_its_status(
    tmp_path: Path, words: list[str], status: int, line: str
) -> None:
    done = sim_exec(*words, TMPDIR=str(tmp_path))
    assert done.returncode == status
    assert [text for text in done.stderr.splitlines() if text.startswith(line)], done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_hint_names_a_program_that_is_not_on_the_path() -> None:
    """As a virtual environment's that was not activated."""
    done = sim_exec("--", "ocigpu", "list", "--json", PATH="/usr/bin:/bin")
    assert done.returncode == 127
    (hint,) = (line for line in done.stderr.splitlines() if line.startswith("hint: it is not on PATH: "))
    again = run(["sh", "-c", hint.partition(" PATH: ")[2]], env={**os.environ, "PATH": "/usr/bin:/bin"})
    assert len(json.loads(again.stdout)["gpus"]) == 1


def test_the_hint_makes_the_host_that_was_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    host = str(tmp_path / "host")
    words = ["sim", "create", host, "--libraries-only", "--model", "mi300x", "--model", "t4"]
    assert main(words) == 1
    (hint,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("hint: as root: ocigpu "))
    assert main(hint.partition(" ocigpu ")[2].replace("DIR", host).split()) == 0
    assert describe_host(host)["product"] == "Tesla T4 and AMD Instinct MI300X"


@pytest.mark.rest
@pytest.mark.parametrize("number", one_in(5, ENDS))
def test_the_signal_that_ends_a_command_ends_ocigpu_too(tmp_path: Path, number: int) -> None:
    script = f"import os, signal; signal.signal({int(number)}, signal.SIG_DFL); os.kill(os.getpid(), {int(number)})"
    if number == signal.SIGKILL:
        script = "import os; os.kill(os.getpid(), 9)"
    done = sim_exec("-q", "--", sys.executable, "-c", script, TMPDIR=str(tmp_path))
    assert done.returncode == -number
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", one_in(4, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]))
def test_a_signal_is_passed_on_and_the_command_ends_in_its_own_way(tmp_path: Path, number: int) -> None:
    waits = (
        f"import signal, sys; signal.signal({int(number)}, lambda *_: sys.exit(42)); print('ready', flush=True)\n"
        "while True: signal.pause()"
    )
    words = [OCIGPU, "sim", "exec", "-q", "--", sys.executable, "-c", waits]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        assert list(tmp_path.iterdir())
        process.send_signal(number)
        assert process.wait(60) == 42
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rest
def test_the_end_is_seen_where_the_end_of_children_is_ignored(tmp_path: Path) -> None:
    words = ["env", "--ignore-signal=CHLD", OCIGPU, "sim", "exec", "-q", "--", "sh", "-c", "exit 7"]
    done = subprocess.run(words, env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=60, check=False)
    assert done.returncode == 7


@pytest.mark.rest
def test_a_terminals_interrupt_comes_once(tmp_path: Path) -> None:
    """The terminal sends it to both; what is passed on after it shows that no second one came before."""
    counts = (
        "import os, signal, sys; seen = []\n"
        "def say(text): os.write(1, text.encode())\n"  # print must not be called while another one writes
        "def interrupted(*_): seen.append(1); say('interrupted\\n')\n"
        "def ask(*_): say(f'times {len(seen)}\\n'); sys.exit(0)\n"
        "signal.signal(signal.SIGINT, interrupted); signal.signal(signal.SIGUSR1, ask); say('ready\\n')\n"
        "while True: signal.pause()"
    )
    pid, terminal = pty.fork()
    if not pid:
        with contextlib.suppress(OSError):
            os.environ["TMPDIR"] = str(tmp_path)
            os.execv(OCIGPU, ["ocigpu", "sim", "exec", "-q", "--", sys.executable, "-c", counts])
        os._exit(1)
    with os.fdopen(terminal, "rb", buffering=0) as stream:
        text = _until(stream, b"ready")
        os.write(terminal, b"\x03")
        text += _until(stream, b"interrupted")
        os.kill(pid, signal.SIGUSR1)
        text += _until(stream, b"times 1")
        ended = os.waitpid(pid, 0)[1]  # before the terminal is closed: its hangup would end the command
    assert os.waitstatus_to_exitcode(ended) == 0, text
    assert list(tmp_path.iterdir()) == []


def _until(stream: "object", word: bytes) -> bytes:
    text = b""
    while word not in text:
        text += os.read(stream.fileno(), 1024)
    return text


@pytest.mark.rest
def test_what_the_caller_had_in_its_paths_comes_behind(tmp_path: Path) -> None:
    done = sim_exec(
        "-q", "--", "sh", "-c", "echo $LD_LIBRARY_PATH; echo $PATH", LD_LIBRARY_PATH="/mine", TMPDIR=str(tmp_path)
    )
    library, path = done.stdout.splitlines()
    assert library.startswith(str(tmp_path))
    assert library.endswith(":/mine")
    assert path.endswith(f":{os.environ['PATH']}")
    alone = run(
        [OCIGPU, "sim", "exec", "-q", "--", "/bin/sh", "-c", "echo $LD_LIBRARY_PATH"], env={"PATH": os.environ["PATH"]}
    )
    assert not alone.stdout.strip().endswith(":")  # an empty part would mean the working directory


@pytest.mark.rest
def test_ocigpu_itself_sees_the_same_gpus(tmp_path: Path) -> None:
    done = sim_exec("--gpus", "3", "-q", "--", str(OCIGPU), "list", "--json", TMPDIR=str(tmp_path))
    assert len(json.loads(done.stdout)["gpus"]) == 3, done.stderr


def test_without_compiler_and_libraries_one_line_says_so(tmp_path: Path) -> None:
    done = sim_exec("--", "/bin/true", PATH=str(tmp_path), TMPDIR=str(tmp_path))
    assert done.returncode == 125
    line, hint = done.stderr.splitlines()
    assert line.startswith("ocigpu: OCIGPU-SIM-1: no C compiler: gcc or cc is needed to make the libraries")
    assert line.endswith(f"and this installation brings none for {os.uname().machine}")
    assert hint == "hint: apt-get install gcc libc6-dev"
    assert list(tmp_path.iterdir()) == []


def test_what_a_wheel_lacks_is_said_when_it_is_built_and_where_it_is_installed(
    tmp_path: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> tuple[str, list[str]]:
        assert (main(["status"]), main(["version", "--json"])) == (0, 0)
        lines, data = capsys.readouterr().out.split("{", 1)
        (line,) = re.findall(r"^sim GPUs +(.*)", lines, re.MULTILINE)
        return line, json.loads("{" + data)["prebuilt"]

    machine = os.uname().machine
    assert shown() == (f"libraries are compiled when needed, by {libraries.find_compiler()}", [])
    monkeypatch.setattr(libraries, "PREBUILT", prebuilt)
    assert shown() == (f"prebuilt libraries for {machine}", [machine])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(libraries, "PREBUILT", tmp_path / "made")
    lacking = libraries.prebuild(tmp_path / "made")
    assert lacking[machine] == "no libraries: no C compiler: gcc or cc is needed to make the libraries"
    assert all(text.startswith("no libraries: ") for text in lacking.values())
    assert list((tmp_path / "made").iterdir()) == []
    said = f"not possible: no prebuilt libraries for {machine}, no C compiler (apt-get install gcc libc6-dev)"
    assert shown() == (said, [])


def test_libraries_of_another_version_are_refused(
    tmp_path: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    (other / os.uname().machine).mkdir(parents=True)
    for path in (prebuilt / os.uname().machine).iterdir():
        content = path.read_bytes().replace(b"simulated GPU table 1", b"simulated GPU table 0")
        (other / os.uname().machine / path.name).write_bytes(content)
    monkeypatch.setattr(libraries, "PREBUILT", other)
    with pytest.raises(OcigpuError, match="not a library of this version"):
        create_host(str(tmp_path / "host"), 1, few=True)
    assert not (tmp_path / "host").exists()


@pytest.mark.rest
def test_a_host_of_libraries_only_stays_until_it_is_removed(tmp_path: Path) -> None:
    host = tmp_path / "host"
    done = run([OCIGPU, "sim", "create", host, "--gpus", "1", "--model", "t4", "--libraries-only"])
    exports = [line.partition(":")[2].strip() for line in done.stdout.splitlines() if "export " in line]
    assert len(exports) == 3
    assert "Tesla T4" in run(["sh", "-ec", "\n".join([*exports, "nvidia-smi -L"])]).stdout
    assert "Tesla T4" in run(["sh", "-ec", "\n".join([*exports, f"{OCIGPU} list"])]).stdout
    run([OCIGPU, "sim", "remove", host])
    assert not host.exists()


# Where it is run


@pytest.fixture
def private_mounts() -> list[str]:
    """Words before a command: it mounts what only it sees."""
    requirements.require(requirements.root())
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec"]


@pytest.mark.rest
def test_a_place_that_is_mounted_noexec_is_passed_over(tmp_path: Path, private_mounts: list[str]) -> None:
    command = f"{OCIGPU} sim exec -q -- sh -c 'nvidia-smi -L; echo $OCIGPU_CONFIG'"
    done = run([*private_mounts, f"mount -t tmpfs -o noexec none {tmp_path}; TMPDIR={tmp_path} {command}"])
    assert "GPU 0: " in done.stdout
    assert str(tmp_path) not in done.stdout


def test_where_no_place_can_be_used_each_is_named(tmp_path: Path) -> None:
    with pytest.raises(OcigpuError, match=rf"/proc/sys: not writable|/proc/sys: .*{tmp_path}/none: no directory"):
        find_place(["/proc/sys", f"{tmp_path}/none"])


@pytest.mark.rest
@pytest.mark.root
def test_left_over_nodes_of_the_machine_do_not_disturb(
    tmp_path: Path, private_mounts: list[str], sim_host: Path
) -> None:
    """Neither a whole simulated host nor libraries alone take /dev/nvidia0 of a driver that is gone for theirs."""
    smi = sim_host / "usr/bin/nvidia-smi"
    script = (
        "mount -t tmpfs none /dev; mknod /dev/null c 1 3; mknod /dev/nvidiactl c 195 255; mknod /dev/nvidia0 c 195 0\n"
        f"{shlex.quote(str(smi))} -L | grep -c '^GPU'\n"
        f"{OCIGPU} sim exec -q --gpus 3 -- nvidia-smi -L | grep -c '^GPU'"
    )
    assert run([*private_mounts, script]).stdout.split() == ["4", "3"]


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.parametrize(
    ("prefix", "why"),
    [
        (["unshare", "--user", "--map-root-user", "sh", "-ec"], "mknod in PLACE: Operation not permitted"),
        (
            ["unshare", "--mount", "sh", "-ec", 'mount -t tmpfs -o nodev none PLACE; eval "$0"'],
            "PLACE is mounted nodev",
        ),
    ],
    ids=["user namespace", "nodev"],
)
def test_create_says_at_once_where_nodes_cannot_be_used(tmp_path: Path, prefix: list[str], why: str) -> None:
    requirements.require(requirements.root())
    script = f"{OCIGPU} sim create {tmp_path}/host --gpus 1 --model t4; ls -A {tmp_path}"
    done = run([word.replace("PLACE", str(tmp_path)) for word in [*prefix, script]])
    first, second, *_ = done.stderr.splitlines()
    assert first == f"note: device nodes cannot be used here: {why}: files will stand for them".replace(
        "PLACE", str(tmp_path)
    )
    assert second == "hint: programs see simulated GPUs without nodes: ocigpu sim exec -- COMMAND"
    assert done.stdout.split()[-1] == "host"
