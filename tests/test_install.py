"""``make install`` and ``make uninstall``, for real, into a scratch prefix."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.fixtures import MakeBundle
from support.process import wait_for
from support.product import PROGRAMS, STUBS, SimulatedHost, write_stub
from support.upgrade import NEXT, Starts, make_next_version

from ocigpu import VENDOR_VERSION, __version__

pytestmark = pytest.mark.rest
REPOSITORY = Path(__file__).resolve().parents[1]
INSTALL = str(REPOSITORY / "packaging/install.sh")


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd="/", stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("install") / "usr"
    (directory / "bin").mkdir(parents=True)
    (directory / "bin/other").write_text("not ours\n")
    umask = os.umask(0o077)
    try:
        done = run(INSTALL, "--prefix", str(directory), "--vendor-names", "--systemd")
    finally:
        os.umask(umask)
    assert done.returncode == 0, done.stderr
    return directory


def test_other_users_can_run_what_a_careful_root_installs(prefix: Path) -> None:
    closed = [path for path in prefix.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o444 != 0o444]
    assert [path for path in closed if path.name != "other"] == []


def test_the_installed_commands_run_without_the_source_tree(prefix: Path) -> None:
    for name in ("ocigpu", "ocigpu-hook"):
        done = run(str(prefix / "bin" / name), "--version", PYTHONPATH="/nonexistent", PYTHONHOME="/nonexistent")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(name)
    for name in ("ocigpu-runtime", "ocigpu-hook", "ocigpu-container-cli"):
        stub = (prefix / "bin" / name).read_bytes()
        assert str(REPOSITORY).encode() not in stub
        assert b" -I -S " in stub or {b"-I", b"-S"} <= {*stub.split(b"\0")}


def test_the_installed_shim_becomes_the_low_level_runtime(prefix: Path, tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text('[runtime]\nruntimes = ["/bin/echo"]\n')
    settings.chmod(0o644)
    done = run(str(prefix / "bin/ocigpu-runtime"), "state", "x", OCIGPU_CONFIG=str(settings))
    assert (done.returncode, done.stdout) == (0, "state x\n")


def test_byte_code_is_shipped_with_the_installed_modules(prefix: Path) -> None:
    package = next(prefix.glob("lib/ocigpu/current/library/lib/python*/site-packages/ocigpu"))
    assert list((package / "__pycache__").glob("runtime.*.pyc"))
    assert list((package / "provision/__pycache__").glob("apply.*.pyc"))


@pytest.mark.parametrize("name", ["ocigpu", "ocigpu-container-cli"])
def test_commands_read_what_they_share_with_a_start_from_one_file(prefix: Path, tmp_path: Path, name: str) -> None:
    calls = tmp_path / "calls"
    done = run("strace", "-e", "trace=openat", "-o", str(calls), str(prefix / "bin" / name), "--version")
    assert done.returncode == 0, done.stderr
    assert "/ocigpu/__pycache__/hot." in calls.read_text()
    assert "/ocigpu/core/__pycache__/errors." not in calls.read_text()


def test_docker_finds_the_hook_by_the_vendors_name(prefix: Path) -> None:
    for name in ("nvidia-container-runtime-hook", "nvidia-container-toolkit"):
        link = prefix / "bin" / name
        assert os.readlink(link) == "ocigpu-hook"
        said = run(str(link), "--version").stdout.splitlines()
        assert said == [f"NVIDIA Container Runtime Hook version {VENDOR_VERSION}", f"ocigpu: {__version__}"]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("nvidia-container-runtime", "ocigpu-runtime"),
        ("nvidia-container-cli", "ocigpu-container-cli"),
        ("nvidia-ctk", "ocigpu"),
    ],
)
def test_settings_and_tools_find_the_other_commands_by_the_vendors_names(prefix: Path, name: str, command: str) -> None:
    assert os.readlink(prefix / "bin" / name) == command
    assert "Traceback" not in run(str(prefix / "bin" / name), "--version").stderr


def test_scripts_find_nvidia_ctk_by_its_name(prefix: Path) -> None:
    program = str(prefix / "bin/nvidia-ctk")
    said = run(program, "--version").stdout.splitlines()
    assert said == [f"NVIDIA Container Toolkit CLI version {VENDOR_VERSION}", f"ocigpu: {__version__}"]
    assert '"nvidia-ctk"' in run(program, "config", "default").stdout
    assert run(program, "hook", "hook-of-a-newer-release").returncode == 0


def test_man_pages_and_completion_are_installed(prefix: Path) -> None:
    files = {str(path.relative_to(prefix / "share")) for path in (prefix / "share").rglob("*") if path.is_file()}
    assert {
        "man/man1/ocigpu.1",
        "man/man1/ocigpu-cdi-generate.1",
        "man/man1/ocigpu-runtime.1",
        "man/man1/ocigpu-hook.1",
        "man/man1/ocigpu-container-cli.1",
        "bash-completion/completions/ocigpu",
        "zsh/site-functions/_ocigpu",
        "fish/vendor_completions.d/ocigpu.fish",
    } <= files


def test_existing_specifications_find_their_hook_by_the_vendors_name(prefix: Path) -> None:
    link = prefix / "bin/nvidia-cdi-hook"
    assert os.readlink(link) == "ocigpu-hook"
    done = run(str(link), "update-ldcache", "--folder", "relative")
    assert done.returncode == 1
    assert "update-ldcache: --folder" in done.stderr
    assert run(str(link), "hook-of-a-newer-release").returncode == 0


def test_units_start_the_installed_command(prefix: Path) -> None:
    units = sorted((prefix / "lib/systemd/system").iterdir())
    assert [path.name for path in units] == [
        "ocigpu-cdi-refresh.path", "ocigpu-cdi-refresh.service", "ocigpu-fabric-restore.service",
        "ocigpu-fabric-serve.service", "ocigpu-lease-agent.service", "ocigpu-mig.service", "ocigpu-repair.service",
        "ocigpu-watch.service",
    ]  # fmt: skip
    commands = [line for path in units for line in path.read_text().splitlines() if line.startswith("ExecStart=")]
    own = (
        "fabric restore --follow $OCIGPU_FABRIC_RESTORE",
        "fabric serve $OCIGPU_FABRIC_SERVE",
        "lease agent $OCIGPU_LEASE_AGENT",
    )
    words = ("cdi refresh", *own, "mig apply", "watch --repair", "watch")
    assert commands == [f"ExecStart={prefix}/bin/ocigpu {text}" for text in words]
    with_devices = [path for path in units if not path.name.startswith("ocigpu-fabric-")]
    assert "ProtectClock=yes" not in "".join(path.read_text() for path in with_devices)  # NVML needs devices
    (rules,) = (prefix / "lib/udev/rules.d").iterdir()
    assert rules.read_text().endswith((REPOSITORY / "packaging/udev/70-ocigpu.rules").read_text())
    assert {path.stat().st_mode & 0o777 for path in (*units, rules)} == {0o644}


def test_units_are_for_a_prefix_only(tmp_path: Path) -> None:
    done = run(INSTALL, "--bin", str(tmp_path), "--venv", str(PROGRAMS.parent), "--systemd")
    assert done.returncode == 2
    assert "--systemd needs --prefix" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_hooks_of_a_specification_start_the_installed_hook(prefix: Path) -> None:
    """The command tells its own place, from which the hook's follows, in whatever directory it is run."""
    stub = (prefix / "bin/ocigpu").read_text()
    assert f'sys.argv[0] = "{prefix}/bin/ocigpu"' in stub


@pytest.mark.parametrize("compiler", ["", "/nonexistent/cc"], ids=["compiler", "no compiler"])
@pytest.mark.parametrize("options", [[], ["--shell-stubs"]], ids=" ".join)
def test_shim_and_hook_are_compiled_where_there_is_a_compiler(
    tmp_path: Path, options: list[str], compiler: str
) -> None:
    words = ["--bin", str(tmp_path), "--venv", str(PROGRAMS.parent)]
    done = run(INSTALL, *words, *options, **({"CC": compiler} if compiler else {}))
    assert (done.returncode, done.stderr) == (0, "")
    compiled = not options and not compiler
    for name in ("ocigpu-runtime", "ocigpu-hook"):
        assert (tmp_path / name).read_bytes()[:4] == (b"\x7fELF" if compiled else b"#!/b")
        assert (tmp_path / name).stat().st_mode & 0o7777 == 0o755
        done = run(str(tmp_path / name), "--version", OCIGPU_CONFIG="")
        assert name in done.stdout or "no low-level runtime" in done.stderr


@pytest.mark.parametrize(("option", "compiler"), [("--shell-stubs", ""), ("", "/nonexistent/cc")])
def test_no_snapshot_is_made_where_nothing_would_start_it(tmp_path: Path, option: str, compiler: str) -> None:
    words = ["--bin", str(tmp_path), "--venv", str(PROGRAMS.parent), *filter(None, [option])]
    variables = {"SNAPSHOT": "yes", **({"CC": compiler} if compiler else {})}
    done = run(INSTALL, *words, **variables, HOME=str(tmp_path / "home"), XDG_CACHE_HOME="")
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "install.sh: no ocigpu-python is made: shim and hook are scripts here, which start the interpreter\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["ocigpu", "ocigpu-runtime", "ocigpu-hook", "ocigpu-container-cli"]
    )


@pytest.mark.parametrize("kind", STUBS)
@pytest.mark.parametrize("name", ["ocigpu-runtime", "ocigpu-hook"])
@pytest.mark.parametrize("missing", ["interpreter", "encodings"])
def test_a_command_whose_python_was_removed_says_so(tmp_path: Path, kind: str, name: str, missing: str) -> None:
    stub = write_stub(tmp_path / name, kind, **{missing: "/nonexistent/python3"})
    done = run(str(stub), "state", "x", OCIGPU_CONFIG="/nonexistent")
    interpreter = "/nonexistent/python3" if missing == "interpreter" else os.path.realpath(sys.executable)
    assert done.returncode == 127
    assert done.stderr.splitlines() == [
        f"{stub}: OCIGPU-INT-3: {interpreter} or its library is missing",
        "hint: install that Python again, or ocigpu for the one that is there",
    ]


@pytest.mark.parametrize("kind", STUBS)
@pytest.mark.parametrize("name", ["ocigpu-runtime", "ocigpu-hook"])
def test_a_command_whose_package_is_damaged_says_so_in_one_line(tmp_path: Path, kind: str, name: str) -> None:
    (tmp_path / "ocigpu").mkdir()
    (tmp_path / "ocigpu/__init__.py").write_text("def broken(:\n")
    stub = write_stub(tmp_path / name, kind, library=tmp_path)
    done = run(str(stub), "state", "x", OCIGPU_CONFIG="/nonexistent")
    assert done.returncode == 1
    assert done.stderr.startswith(f"{stub}: OCIGPU-INT-3: SyntaxError: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("options", [[], ["--shell-stubs"]], ids=" ".join)
def test_settings_can_be_baked_into_the_commands(tmp_path: Path, options: list[str]) -> None:
    settings = tmp_path / "baked.toml"
    settings.write_text('[runtime]\nruntimes = ["/bin/echo"]\n')
    settings.chmod(0o644)
    virtual = PROGRAMS.parent
    words = ["--bin", str(tmp_path / "bin"), "--venv", str(virtual), "--config", str(settings)]
    done = run(INSTALL, *words, *options)
    assert done.returncode == 0, done.stderr
    done = run(str(tmp_path / "bin/ocigpu-runtime"), "kill", "x")
    assert done.stdout == "kill x\n", done.stderr
    settings.write_text("unknown = 1\n")
    done = run(str(tmp_path / "bin/ocigpu-hook"), "prestart")
    assert f'{settings}: unknown key "unknown"' in done.stderr


@pytest.mark.root
def test_what_the_former_shim_remembered_is_forgotten(tmp_path: Path) -> None:
    commands = 'mount -t tmpfs tmpfs /run && mkdir /run/ocigpu && touch /run/ocigpu/next-0-0 && "$@" && ls /run/ocigpu'
    words = [INSTALL, "--bin", str(tmp_path), "--venv", str(PROGRAMS.parent)]
    done = run("unshare", "--mount", "sh", "-c", commands, "sh", *words)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_path_that_a_shell_would_take_apart_is_refused(tmp_path: Path) -> None:
    done = run(INSTALL, "--prefix", f"{tmp_path}/a b")
    assert done.returncode == 2
    assert "only letters, digits" in done.stderr


def test_a_working_directory_that_a_shell_would_take_apart_is_refused(tmp_path: Path) -> None:
    """A relative path stands in the commands with the directory before it, and root runs them."""
    place = tmp_path / "$(touch harmed)"
    place.mkdir()
    script = REPOSITORY / "packaging/install.sh"
    for option in ("--config", "--bin"):
        words = {"--bin": str(tmp_path / "bin"), "--venv": str(PROGRAMS.parent), option: "here"}
        command = ["sh", str(script), *(word for pair in words.items() for word in pair)]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
        assert (done.returncode, "only letters, digits" in done.stderr) == (2, True)
    assert not (tmp_path / "bin").exists()


def test_a_foreign_directory_is_not_overwritten(tmp_path: Path) -> None:
    foreign = tmp_path / "lib/ocigpu"
    foreign.mkdir(parents=True)
    (foreign / "keep").write_text("x")
    done = run(INSTALL, "--prefix", str(tmp_path))
    assert done.returncode == 2
    assert (foreign / "keep").exists()


@pytest.mark.parametrize(
    "name",
    [
        "bin/ocigpu-runtime",
        "bin/nvidia-container-runtime-hook",
        "bin/nvidia-container-toolkit",
        "bin/nvidia-cdi-hook",
        "bin/nvidia-container-cli",
        "lib/systemd/system/ocigpu-watch.service",
    ],
)
def test_a_foreign_file_is_not_overwritten(tmp_path: Path, name: str) -> None:
    foreign = tmp_path / name
    foreign.parent.mkdir(parents=True)
    foreign.write_text("not ours\n")
    done = run(INSTALL, "--prefix", str(tmp_path), "--vendor-names", "--systemd")
    assert done.returncode == 2
    assert f"{foreign} exists" in done.stderr
    done = run(INSTALL, "--prefix", str(tmp_path), "--uninstall")
    assert done.returncode == 2
    assert "nothing of this script is installed" in done.stderr
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == [foreign]


def test_an_installation_that_fails_leaves_the_former_one(prefix: Path) -> None:
    versions = sorted((prefix / "lib/ocigpu/versions").iterdir())
    done = run(INSTALL, "--prefix", str(prefix), OCIGPU_PIP_OPTIONS="--index-url=file:///nonexistent --retries=0")
    assert done.returncode != 0
    assert sorted((prefix / "lib/ocigpu/versions").iterdir()) == versions
    assert run(str(prefix / "bin/ocigpu"), "--version").stdout == f"ocigpu {__version__}\n"


def test_an_installation_that_is_killed_leaves_the_former_one(prefix: Path, tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [INSTALL, "--prefix", str(prefix)], env=env, stderr=subprocess.DEVNULL, process_group=0
    ) as process:
        wait_for("the new version to be begun", lambda: [*prefix.glob("lib/ocigpu/versions/*/library")][1:])
        os.killpg(process.pid, signal.SIGKILL)
    assert run(str(prefix / "bin/ocigpu"), "--version").stdout == f"ocigpu {__version__}\n"
    assert [*prefix.glob("lib/ocigpu/versions/*/.building")] != [], "for the next one to remove"


@pytest.mark.root
@pytest.mark.engine
def test_containers_start_while_the_next_version_is_installed(
    prefix: Path,
    tmp_path: Path,
    simulated_host: SimulatedHost,
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
) -> None:
    source = make_next_version(tmp_path / "source")
    former_page = prefix / "share/man/man1/ocigpu-former-command.1"
    former_page.write_text('.\\" written by packaging/install.sh\n')
    versions = prefix / "lib/ocigpu/versions"
    former = (prefix / "lib/ocigpu/current").resolve()
    older = versions / f"{__version__}-older"
    older.mkdir()
    os.utime(older, (0, 0))  # out of use since then
    killed = versions / f"{__version__}-killed/.building"
    killed.parent.mkdir()
    killed.touch()
    before = sorted(source.rglob("*"))
    begun = {*versions.glob("*/.building")}  # of the test before, too

    def aside() -> bool:
        return not {*versions.glob("*/.building")} <= begun

    with Starts(prefix / "bin", simulated_host, make_bundle, runtime_environment, aside=aside):
        done = run(str(source / "packaging/install.sh"), "--prefix", str(prefix))  # over the first installation
        assert done.returncode == 0, done.stderr
    assert sorted(source.rglob("*")) == before
    assert run(str(prefix / "bin/ocigpu-hook"), "--version").stdout == f"ocigpu-hook {NEXT}\n"
    assert not former_page.exists()
    (new,) = {*versions.iterdir()} - {former}
    assert (prefix / "lib/ocigpu/current").resolve() == new


def test_uninstall_removes_exactly_what_install_made(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    shim = f"{prefix}/bin/ocigpu-runtime"
    (tmp_path / "docker/daemon.json").write_text(f'{{"runtimes": {{"ocigpu": {{"path": "{shim}"}}}}}}')
    done = run(INSTALL, "--prefix", str(prefix), "--uninstall", XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"install.sh: docker still names {shim}: containers with it will not start",
        "hint: take it out by hand, or install ocigpu again and run: ocigpu engine remove docker",
    ]
    left = sorted(str(path.relative_to(prefix)) for path in prefix.rglob("*") if not path.is_dir())
    assert left == ["bin/other"]
    assert sorted(path.name for path in prefix.iterdir()) == ["bin"]


@pytest.mark.parametrize("purpose", ["demo", "test", "install", "deb", "rpm"])
def test_without_apt_the_missing_packages_are_named(tmp_path: Path, purpose: str) -> None:
    for name in ("sh", "dirname", "id", "python3"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    done = run(str(REPOSITORY / "packaging/bootstrap.sh"), purpose, PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("missing: cc ")
    debian, fedora = (line.split(": ")[1].split() for line in done.stderr.splitlines()[-2:])
    assert {"gcc", "libc6-dev"} <= set(debian)
    assert {"gcc", "glibc-devel"} <= set(fedora)
    assert ("crun" in fedora) == (purpose == "test")
    assert ("busybox" in fedora) == (purpose in ("demo", "test"))
    assert ("rpm-build" in fedora) == (purpose in ("rpm", "test"))
    assert ("dpkg-dev" in debian) == (purpose in ("deb", "test"))


def test_gpu_test_says_why_it_is_skipped_and_writes_nothing() -> None:
    report = REPOSITORY / "docs/REAL-GPU.md"
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver: make gpu-test is run there by itself")
    before = report.exists()
    done = run(str(REPOSITORY / "packaging/gpu-test.sh"))
    assert done.returncode == 0
    assert "skipped: no NVIDIA driver" in done.stdout
    assert report.exists() == before
