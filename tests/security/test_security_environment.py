"""Variables, directories and files that others give to the shim and the hook: nothing of them decides what they do.

An image chooses the variables of its own processes, never those of the shim or of a hook.  An engine's environment is
the environment of the shim and of the low-level runtime: what it tells the dynamic loader (LD_PRELOAD) happens in them
before any line of ours, and only the hook, whose entry has an environment of its own, is free of it.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support import requirements
from support.fixtures import MakeBundle
from support.machine import LIBRARIES
from support.process import Completed, explain, run
from support.product import PROGRAMS, RUNTIME, STUBS, SimulatedHost, listed_uuids, write_stub
from support.runtimes import container_id, run_container, start_in_background

pytestmark = [pytest.mark.root, pytest.mark.engine]

HOOK = PROGRAMS / "ocigpu-hook"
ALL = {"NVIDIA_VISIBLE_DEVICES": "all"}
MODULES = (
    "os", "json", "re", "ctypes", "_ctypes", "_json", "stat", "select", "prctl", "_prctl", "encodings", "site",
    "sitecustomize", "usercustomize", "ocigpu", "io", "codecs", "abc", "time", "gc",
)  # fmt: skip
PROGRAM_NAMES = (
    "sh", "dash", "bash", "grep", "cat", "ls", "env", "test", "[", "echo", "python3", "python3.11", "ldconfig", "mount",
    "nvidia-smi", "nvidia-container-cli", "ocigpu-hook", "ocigpu-runtime", "runc", "crun",
)  # fmt: skip


class Trap:
    """A directory of modules, programs, scripts and a library; what of it is used leaves a line in ``mark``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = directory / "mark"
        for place in (directory, directory / "ocigpu", directory / "lib/python3.11"):
            place.mkdir(parents=True, exist_ok=True)
            for module in MODULES:
                (place / f"{module}.py").write_text(f"open({str(self.mark)!r}, 'a').write('{place}/{module}\\n')\n")
        shutil.copy(directory / "os.py", directory / "ocigpu/__init__.py")
        self.programs = directory / "programs"
        self.programs.mkdir()
        for name in PROGRAM_NAMES:
            self.program(self.programs / name)
            self.program(directory / name)
        self.script = self.program(directory / "script.sh")
        (directory / "startup.py").write_text((directory / "os.py").read_text())
        for name in ("config.toml", "ocigpu.toml", "pyvenv.cfg", "config.json"):
            (directory / name).write_text("nonsense, which nobody can read\n")
        self.library = directory / "spy.so"
        run(["gcc", "-shared", "-fPIC", f'-DMARK="{self.mark}"', "-o", self.library, SPY])
        self.libraries = directory / "libraries"  # of the interpreter, of ldconfig's sandbox and NVML; none of runc's
        self.libraries.mkdir()
        for name in ("libm.so.6", "libz.so.1", "libexpat.so.1", "libcap.so.2", "libnvidia-ml.so.1"):
            shutil.copy(self.library, self.libraries / name)
        (directory / "gconv-modules").write_text(f"module EVIL// INTERNAL {self.library} 1\n")
        self.temporary = directory / "temporary"
        self.temporary.mkdir()
        run(["chmod", "-R", "a+rX", directory])

    def program(self, path: Path) -> Path:
        path.write_text(f'#!/bin/dash\necho "program $0 $*" >>{self.mark}\nexit 0\n')
        path.chmod(0o755)
        return path

    def assert_unused(self) -> None:
        assert not self.mark.exists(), self.mark.read_text()
        assert os.listdir(self.temporary) == []

    @property
    def variables(self) -> dict[str, str]:
        """Variables that interpreters, shells and programs act on: all but the dynamic loader's."""
        here = str(self.directory)
        return {
            "PYTHONPATH": here, "PYTHONHOME": here, "PYTHONSTARTUP": f"{here}/startup.py", "PYTHONINSPECT": "1",
            "PYTHONUSERBASE": here, "PYTHONPLATLIBDIR": here, "PYTHONPYCACHEPREFIX": str(self.temporary),
            "PYTHONBREAKPOINT": "os.abort", "PYTHONWARNINGS": "error", "PYTHONDEBUG": "9", "PYTHONVERBOSE": "2",
            "PYTHONOPTIMIZE": "2", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "warn", "PYTHONIOENCODING": "utf-16",
            "PYTHONDEVMODE": "1", "PYTHONTRACEMALLOC": "9", "PYTHONFAULTHANDLER": "1", "PYTHONEXECUTABLE": here,
            "PYTHONDUMPREFS": "1", "PYTHONMALLOC": "debug", "PYTHONHASHSEED": "1", "PYTHONSAFEPATH": "",
            "PYTHONPROFILEIMPORTTIME": "1", "__PYVENV_LAUNCHER__": f"{here}/python3",
            "ENV": str(self.script), "BASH_ENV": str(self.script), "IFS": "/o.-", "CDPATH": here, "PS4": "$(false)",
            "SHELLOPTS": "errexit:nounset:allexport:noclobber", "BASHOPTS": "extdebug", "POSIXLY_CORRECT": "1",
            "GREP_OPTIONS": "-v", "GREP_COLORS": "x", "MAIL": here, "MAILPATH": here, "OPTIND": "9",
            "LC_ALL": "evil.EVIL", "LC_CTYPE": "evil", "LANG": "tr_TR.EVIL", "LANGUAGE": "evil", "LOCPATH": here,
            "NLSPATH": f"{here}/%N", "GCONV_PATH": here, "CHARSET": "EVIL", "OUTPUT_CHARSET": "EVIL",
            "TMPDIR": str(self.temporary), "TEMP": str(self.temporary), "TMP": str(self.temporary), "HOME": here,
            "TZ": f":{here}/config.toml", "TZDIR": here, "XDG_RUNTIME_DIR": here, "XDG_CONFIG_HOME": here,
            "NVIDIA_VISIBLE_DEVICES": "void", "NVIDIA_DRIVER_CAPABILITIES": "evil", "CUDA_VISIBLE_DEVICES": "",
            "RES_OPTIONS": "debug", "HOSTALIASES": f"{here}/config.toml", "GLIBC_TUNABLES": "glibc.malloc.check=3",
            "MALLOC_CHECK_": "3", "MALLOC_TRACE": f"{here}/mark",
        }  # fmt: skip

    @property
    def loader(self) -> dict[str, str]:
        """Variables of the dynamic loader: ld.so(8)."""
        return {
            "LD_PRELOAD": str(self.library),
            "LD_AUDIT": str(self.library),
            "LD_LIBRARY_PATH": str(self.libraries),
        }


SPY = Path(__file__).parents[1] / "support/spy.c"


@pytest.fixture
def trap(work_directory: Path) -> Trap:
    requirements.require(requirements.root(), requirements.programs("gcc", "runc", "busybox"))
    directory = work_directory / "trap"
    directory.mkdir()
    return Trap(directory)


def environment(host: SimulatedHost, base: dict[str, str], directory: Path, mode: str = "hook") -> dict[str, str]:
    """Return ``base`` with settings for a mode; they name the low-level runtime by its path."""
    return host.in_mode(base, directory / f"{mode}.toml", mode)


def without_early(config: Path) -> bytes:
    """Return a configuration without the name of the process that waits for its hook, which is another each time."""
    document = json.loads(config.read_bytes())
    for entry in document.get("hooks", {}).get("prestart", []):
        if "--early" in entry["args"]:
            del entry["args"][1:3]
    return json.dumps(document).encode()


@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_what_an_image_sets_reaches_its_own_processes_alone(
    trap: Trap,
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    mode: str,
) -> None:
    variables = {**trap.variables, **trap.loader, "PATH": f"{trap.programs}:/bin:/usr/bin", **ALL}
    variables["NVIDIA_DRIVER_CAPABILITIES"] = "compute,utility"
    variables["OCIGPU_CONFIG"] = f"{trap.directory}/config.toml"
    bundle = make_bundle(["/bin/nvidia-smi", "-L"], variables)
    for name in ("json.py", "os.py", "ocigpu", "config.toml"):  # at the top of the image, as well
        source = trap.directory / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, bundle / "rootfs" / name)
    env = environment(simulated_host, runtime_environment, work_directory, mode)
    result = run_container([RUNTIME], bundle, container_id(), env=env)
    assert result.returncode == 0, explain(result)
    assert listed_uuids(result.stdout) == list(simulated_host.gpus)
    trap.assert_unused()


@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_an_engines_variables_and_directory_change_nothing(
    trap: Trap,
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    mode: str,
) -> None:
    clean = environment(simulated_host, runtime_environment, work_directory, mode)
    hostile = {**trap.variables, "PATH": f"{trap.programs}:{trap.directory}:.", "OCIGPU_CONFIG": clean["OCIGPU_CONFIG"]}
    seen = []
    for env, cwd in ((clean, work_directory), (hostile, trap.directory)):
        bundle = make_bundle(["/bin/nvidia-smi", "-L"], ALL)
        name = container_id()
        words = [RUNTIME, "--root", work_directory / "state"]
        try:
            result = run([*words, "run", "--bundle", bundle, name], env=env, cwd=cwd, check=False)
        finally:
            run([*words, "delete", "--force", name], env=clean, check=False)
        assert result.returncode == 0, explain(result)
        assert "PYTHON" not in result.stderr, explain(result)
        text = without_early(bundle / "config.json").decode()
        seen.append((listed_uuids(result.stdout), result.stderr, text.replace(bundle.name, "BUNDLE")))
    trap.assert_unused()
    assert seen[0][0] == list(simulated_host.gpus)
    config = json.loads(seen[1][2])
    config["linux"]["cgroupsPath"] = json.loads(seen[0][2])["linux"]["cgroupsPath"]
    assert (seen[1][0], seen[1][1], config) == (*seen[0][:2], json.loads(seen[0][2]))


@pytest.fixture
def created(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path
) -> Callable[..., Completed]:
    """Call with an environment and a directory: the hook is called by hand, with them, for a created container."""
    settings = environment(simulated_host, runtime_environment, work_directory)["OCIGPU_CONFIG"]

    def call(env: dict[str, str], cwd: Path) -> Completed:
        bundle = make_bundle(["true"], ALL)
        name = container_id()
        command = ["runc", "--root", str(work_directory / "state")]
        start = start_in_background(command, ["create"], bundle, name, runtime_environment)
        try:
            assert start.returncode == 0, explain(start)
            state = run([*command, "state", name]).stdout
            words = [str(HOOK), "--config", settings, "prestart"]
            done = subprocess.run(
                words, input=state, capture_output=True, text=True, timeout=60, env=env, cwd=cwd, check=False
            )
            assert (bundle / f"rootfs{LIBRARIES}/libcuda.so.1").is_symlink() == (done.returncode == 0)
            return done
        finally:
            run([*command, "delete", "--force", name], check=False)

    return call


def test_a_hook_that_inherits_hostile_variables_is_not_changed_by_them(
    trap: Trap, created: Callable[..., Completed]
) -> None:
    done = created({**trap.variables, "PATH": f"{trap.programs}:."}, trap.directory)
    assert done.returncode == 0, explain(done)
    assert done.stderr == ""
    trap.assert_unused()


def test_the_dynamic_loaders_variables_do_not_reach_the_hook(
    trap: Trap,
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
) -> None:
    """The runtime has them, which is the engine's affair; hook, ldconfig and NVML have not."""
    env = environment(simulated_host, runtime_environment, work_directory)
    bundle = make_bundle(["/bin/nvidia-smi", "-L"], ALL)
    path = bundle / "config.json"
    result = run_container([RUNTIME], bundle, container_id(), env=env)
    assert result.returncode == 0, explain(result)
    path.write_bytes(without_early(path))
    hostile = {**trap.loader, **trap.variables, "PATH": f"{trap.programs}:."}
    name = container_id()
    command = [
        "/usr/sbin/runc" if os.path.exists("/usr/sbin/runc") else "runc",
        "--root",
        str(work_directory / "state"),
    ]
    try:
        result = run([*command, "run", "--bundle", bundle, name], env=hostile, check=False)
    finally:
        run([*command, "delete", "--force", name], check=False)
    assert result.returncode == 0, explain(result)
    assert listed_uuids(result.stdout) == list(simulated_host.gpus)
    programs = {line.split()[0] for line in trap.mark.read_text().splitlines()}
    assert {os.path.basename(program) for program in programs} <= {"runc", "exe"}, programs


def test_what_prepares_a_container_early_gives_the_loaders_variables_to_nobody(
    trap: Trap,
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
) -> None:
    """Interpreter and runtime of a start have loaded them; programs that are started for the hook have not."""
    env = {**environment(simulated_host, runtime_environment, work_directory), **trap.loader, **trap.variables}
    env |= {"PATH": f"{trap.programs}:.", "OCIGPU_CONFIG": str(work_directory / "hook.toml")}
    del env["LD_LIBRARY_PATH"]  # the interpreter would not start
    result = run_container([RUNTIME], make_bundle(["/bin/nvidia-smi", "-L"], ALL), container_id(), env=env)
    assert result.returncode == 0, explain(result)
    text = trap.mark.read_text()
    assert "ocigpu-runtime" in text, "the library works"
    assert "ocigpu-hook" not in text
    assert "ldconfig -X" not in text


FUNCTIONS = ("command", "echo", "read", "[", "test", "exec", "export", "set", "unset", "shift", "case", "grep", "full")


@pytest.mark.parametrize("options", ["", "errexit:nounset:allexport:noclobber"])
def test_a_shell_takes_neither_functions_nor_options_from_the_environment(
    trap: Trap, simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path, options: str
) -> None:
    """Where /bin/sh is bash, which reads both."""
    requirements.require(requirements.programs("bash"))
    shell = work_directory / "sh"
    shell.symlink_to(str(shutil.which("bash", path="/usr/bin:/bin")))
    runtime, hook = (write_stub(work_directory / name, "sh") for name in ("ocigpu-runtime", "ocigpu-hook"))
    env = environment(simulated_host, runtime_environment, work_directory)
    hostile = {f"BASH_FUNC_{name}%%": f"() {{ builtin echo evil {name} >>{trap.mark}; }}" for name in FUNCTIONS}
    hostile |= {"SHELLOPTS": options} if options else {}
    for stub in (runtime, hook):
        for _ in range(2):
            result = run([shell, stub, "--version"], env={**env, **hostile}, check=False)
            assert result.returncode == 0, explain(result)
            assert result.stdout == run([stub, "--version"], env=env).stdout
    for words, status in ((["state", "nobody"], 1), (["create", "--bundle", work_directory, "nobody"], 1)):
        assert run([shell, runtime, *words], env={**env, **hostile}, check=False).returncode == status
    words = ["--early", str(trap.directory), "prestart"]
    result = run([shell, hook, *words], env={**env, **hostile}, check=False)
    assert "OCIGPU-SPEC-5" in result.stderr, explain(result)
    trap.assert_unused()


HOSTILE_CACHES = {
    "a link in the place of the file": 'ln -sf {evil} "$next"',
    "a link in the place of the directory": 'mv /run/ocigpu /run/moved; cp {evil} "/run/moved/${{next##*/}}"; '
    "ln -s moved /run/ocigpu",
    "a file of somebody else": 'cp {evil} "$next"; chown 4321 "$next"',
    "a directory of somebody else": 'cp {evil} "$next"; chown 4321 /run/ocigpu',
    "a pipe": 'rm "$next"; mkfifo "$next"',
    "a directory in the place of the file": 'rm "$next"; mkdir "$next"',
    "a device": 'rm "$next"; mknod "$next" c 1 5',
}


@pytest.mark.parametrize("kind", STUBS)
@pytest.mark.parametrize("spoil", HOSTILE_CACHES.values(), ids=HOSTILE_CACHES.keys())
def test_a_shim_executes_nothing_that_others_have_put_into_its_cache(
    trap: Trap,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    spoil: str,
    kind: str,
) -> None:
    """In a mount namespace with a /run of its own: what the stub reads there names the runtime."""
    env = environment(simulated_host, runtime_environment, work_directory)
    bundle = work_directory / "plain"
    bundle.mkdir()
    (bundle / "config.json").write_text("{}")
    stub = write_stub(work_directory / "ocigpu-runtime", kind)
    program = trap.program(trap.directory / "evil-program")
    evil = trap.directory / "evil"
    evil.write_text(f"same '{env['OCIGPU_CONFIG']}' '{env['PATH']}' &&\nruntime='{program}' words='NVIDIA'\n")
    script = f"""
        mount -t tmpfs none /run && mkdir -m 700 /run/ocigpu || exit 99
        next=/run/ocigpu/next-${{#OCIGPU_CONFIG}}-${{#PATH}}-${{OCIGPU_CONFIG##*/}}
        cp {evil} "$next"
        {stub} state nobody >/dev/null 2>&1; [ -e {trap.mark} ] || exit 98
        rm {trap.mark}
        {spoil.format(evil=evil)}
        {stub} --version
    """
    result = run(["unshare", "--mount", "dash", "-c", script], env=env, check=False)
    assert result.returncode == 0, explain(result)
    assert result.stdout.startswith("ocigpu-runtime "), explain(result)
    assert "\nrunc version" in result.stdout, explain(result)
    trap.assert_unused()


STRANGER = 4321


def settings_behind_a_link_of_somebody_else(place: Path) -> None:
    os.rename(place / "config.toml", place / "real.toml")
    (place / "config.toml").symlink_to("real.toml")
    os.chown(place / "config.toml", STRANGER, STRANGER, follow_symlinks=False)


def settings_behind_our_link_into_an_open_directory(place: Path) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    os.rename(place / "config.toml", place / "open/config.toml")
    (place / "config.toml").symlink_to("open/config.toml")


UNTRUSTED_SETTINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "world-writable": (lambda place: (place / "config.toml").chmod(0o646), "mode 0646"),
    "group-writable": (lambda place: (place / "config.toml").chmod(0o664), "mode 0664"),
    "of somebody else": (lambda place: os.chown(place / "config.toml", STRANGER, 0), "owner 4321"),
    "a link of somebody else": (settings_behind_a_link_of_somebody_else, "a link of user 4321"),
    "in a world-writable directory": (lambda place: place.chmod(0o757), "mode 0757: others may replace"),
    "in a group-writable directory": (lambda place: place.chmod(0o775), "mode 0775: others may replace"),
    "in a directory of somebody else": (lambda place: os.chown(place, STRANGER, 0), "owner 4321, mode 0755"),
    "a link into a world-writable directory": (settings_behind_our_link_into_an_open_directory, "mode 0777"),
}
TRUSTED_SETTINGS: dict[str, Callable[[Path], object]] = {
    "usual": lambda place: place.chmod(0o755),
    "in a directory like /tmp": lambda place: place.chmod(0o1777),
    "behind a link of ours": lambda place: (
        os.rename(place / "config.toml", place / "real.toml"),
        (place / "config.toml").symlink_to("real.toml"),
    ),
}


@pytest.fixture
def place(work_directory: Path) -> Path:
    """A directory with settings for a low-level runtime that does nothing."""
    directory = work_directory / "etc"
    directory.mkdir(mode=0o755)
    (directory / "config.toml").write_text('[runtime]\nruntimes = ["/bin/true"]\n')
    (directory / "config.toml").chmod(0o644)
    return directory


@pytest.mark.parametrize(
    ("spoil", "cause"), UNTRUSTED_SETTINGS.values(), ids=[name.replace(" ", "-") for name in UNTRUSTED_SETTINGS]
)
def test_settings_that_others_could_have_put_there_are_refused(
    place: Path, spoil: Callable[[Path], object], cause: str
) -> None:
    spoil(place)
    settings = str(place / "config.toml")
    environment = {"PATH": "/bin", "OCIGPU_CONFIG": settings}
    shim = run([RUNTIME, "create", "x"], env=environment, check=False)
    hook = run([HOOK, "--config", settings, "prestart"], env={"PATH": "/bin"}, check=False)
    for result in (shim, hook):
        assert result.returncode == 1, explain(result)
        first = result.stderr.splitlines()[0]
        assert f"OCIGPU-SET-3: settings {settings}: " in first, explain(result)
        assert cause in first, explain(result)
        assert len(result.stderr.splitlines()) == 2, "and a hint"
    seen = run([RUNTIME, "state", "x"], env=environment, check=False)
    assert seen.returncode, "the usual runtime, which knows no such container, instead of the one that they name"


@pytest.mark.parametrize("change", TRUSTED_SETTINGS.values(), ids=[name.replace(" ", "-") for name in TRUSTED_SETTINGS])
def test_settings_that_only_root_can_have_put_there_are_read(place: Path, change: Callable[[Path], object]) -> None:
    change(place)
    env = {"PATH": "/bin", "OCIGPU_CONFIG": str(place / "config.toml")}
    result = run([RUNTIME, "state", "x"], env=env, check=False)
    assert result.returncode == 0, explain(result)


def a_file_of_somebody_else(log: Path, _: Path) -> None:
    log.touch()
    os.chown(log, STRANGER, STRANGER)


def a_pipe_of_somebody_else(log: Path, _: Path) -> None:
    os.mkfifo(log)
    os.chown(log, STRANGER, STRANGER)


BAD_LOGS: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda log, passwd: log.symlink_to(passwd),
    "a hard link": lambda log, passwd: os.link(passwd, log),
    "a file of somebody else": a_file_of_somebody_else,
    "a pipe of somebody else": a_pipe_of_somebody_else,
    "a directory": lambda log, _: log.mkdir(),
}


@pytest.mark.parametrize("spoil", BAD_LOGS.values(), ids=[name.replace(" ", "-") for name in BAD_LOGS])
def test_nothing_is_written_to_a_log_that_somebody_else_has_put_there(
    place: Path, spoil: Callable[[Path, Path], object]
) -> None:
    """In directories where everybody may make files; the failure is told on standard error all the same."""
    passwd = place / "passwd"
    passwd.write_text("root:x:0:0:root:/root:/bin/sh\n")
    everybody = place / "var"
    everybody.mkdir()
    everybody.chmod(0o1777)
    logs = [everybody / name for name in ("runtime.log", "hook.log", "engine.log")]
    for log in logs:
        spoil(log, passwd)
    settings = place / "config.toml"
    settings.write_text(f'[runtime]\nruntimes = ["/bin/true"]\nlog = "{logs[0]}"\n[hook]\nlog = "{logs[1]}"\n')
    bundle = place / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text('{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}')
    env = {"PATH": "/bin", "OCIGPU_CONFIG": str(settings)}
    before = [os.lstat(log) for log in logs]
    readers = [os.open(log, os.O_RDONLY | os.O_NONBLOCK) for log in logs if log.is_fifo()]
    shim = run([RUNTIME, "--log", logs[2], "create", "--bundle", bundle, "x"], env=env, check=False)
    hook = run([HOOK, "--config", settings, "prestart"], env={"PATH": "/bin"}, check=False)
    assert "OCIGPU-SPEC-3" in shim.stderr, explain(shim)
    assert "OCIGPU-SPEC-5" in hook.stderr, explain(hook)
    assert passwd.read_text() == "root:x:0:0:root:/root:/bin/sh\n"
    for log, status in zip(logs, before, strict=True):
        assert (os.lstat(log).st_ino, os.lstat(log).st_size) == (status.st_ino, status.st_size)
    for reader in readers:
        assert os.read(reader, 1) == b""
        os.close(reader)


def test_logs_of_our_own_are_written(place: Path) -> None:
    log = place / "runtime.log"
    settings = place / "config.toml"
    settings.write_text(f'[runtime]\nruntimes = ["/bin/true"]\nlog = "{log}"\n')
    run([RUNTIME, "create", "--bundle", place, "x"], env={"OCIGPU_CONFIG": str(settings)}, check=False)
    assert "OCIGPU-SPEC-1" in log.read_text()


def test_a_lock_that_somebody_else_holds_or_has_made_stops_nobody(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path
) -> None:
    """What is locked is the cache directory, which is closed: a stranger's, open or linked one is not used at all."""
    env = environment(simulated_host, runtime_environment, work_directory)
    script = f"""
        mount -t tmpfs none /run || exit 99
        {{spoil}}
        {RUNTIME} create --bundle "$1" x >&2
        find /run/ocigpu/ /run/moved -name '[a-z]*-*' 2>/dev/null
        true
    """
    spoils = (
        "mkdir -m 777 /run/ocigpu",
        "mkdir -m 700 /run/ocigpu; chown 4321 /run/ocigpu",
        "mkdir -m 700 /run/moved; ln -s moved /run/ocigpu",
        "mkfifo /run/ocigpu",
    )
    settings = Path(env["OCIGPU_CONFIG"])
    settings.write_text(settings.read_text().partition("runtimes = ")[0] + 'runtimes = ["/bin/true"]\n')
    for spoil in spoils:
        bundle = make_bundle(["true"], ALL)
        words = ["unshare", "--mount", "dash", "-c", script.replace("{spoil}", spoil), "dash", bundle]
        result = run(words, env=env, check=False)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", ""), explain(result)
        hooks = json.loads((bundle / "config.json").read_text())["hooks"]["prestart"]
        assert "ocigpu-hook" in hooks[-1]["args"]


@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
def test_the_runtime_inherits_no_descriptor_of_ours(
    simulated_host: SimulatedHost,
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    tmp_path: Path,
    mode: str,
) -> None:
    """A directory of the host that is open in runc is where a container begins whose cwd names it (CVE-2024-21626)."""
    specs, listed, program = tmp_path / "specs", tmp_path / "listed", tmp_path / "runc"
    specs.mkdir()
    command = [PROGRAMS / "ocigpu", "cdi", "generate", "--quiet", "--config", simulated_host.settings]
    run([*command, "--output", specs / "nvidia.json"])
    program.write_text(f"#!/bin/sh\nls /proc/self/fd >{listed}\n")
    program.chmod(0o755)
    settings = tmp_path / "config.toml"
    text = simulated_host.settings.read_text()
    text = f'mode = "{mode}"\ncdi.spec-dirs = ["{specs}"]\nhook.path = "{HOOK}"\n{text}'
    settings.write_text(f'{text}\n[runtime]\nruntimes = ["{program}"]\n')
    bundle = make_bundle(["/bin/true"], ALL)
    before = (bundle / "config.json").read_bytes()
    environment = {**runtime_environment, "OCIGPU_CONFIG": str(settings)}
    for kind in STUBS:
        stub = write_stub(tmp_path / f"{kind}-stub", kind, "ocigpu-runtime")
        (bundle / "config.json").write_bytes(before)
        for verb in ("create", "state"):
            listed.unlink(missing_ok=True)
            more = ["--bundle", bundle] if verb == "create" else []
            run([stub, verb, *more, "none"], env=environment)
            assert listed.read_text().split() == ["0", "1", "2", "3"]  # 3: of ls
        assert (bundle / "config.json").read_bytes() != before
