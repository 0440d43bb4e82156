"""Wheel and source distribution, and what ``pipx install`` makes of them."""

import json
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
import yaml
from support import requirements
from support.bundle import base_config
from support.engines import SYSTEM_PATH, private_machine, start_docker
from support.fixtures import MakeBundle
from support.process import Completed, run
from support.product import SimulatedHost, listed_uuids
from support.runtimes import container_id, run_container, set_cgroup
from support.served import served
from support.upgrade import NEXT, Starts, make_next_version

from ocigpu import __version__

pytestmark = pytest.mark.rest

REPOSITORY = Path(__file__).resolve().parents[1]
NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")


@pytest.fixture(scope="module")
def built(session_directory: Path) -> Path:
    """The directory of the source distribution, and of the wheel that was built from it."""
    source, output = session_directory / "source", session_directory / "dist"
    shutil.copytree(REPOSITORY, source, ignore=NOT_SOURCES)
    run([sys.executable, "-m", "build", "--outdir", output, source], timeout=280)
    return output


def pipx(home: Path, *words: str) -> Completed:
    names = {"PIPX_HOME": "home", "PIPX_BIN_DIR": "bin", "PIPX_MAN_DIR": "man"}
    variables = {variable: str(home / name) for variable, name in names.items()}
    return run([sys.executable, "-m", "pipx", *words], env={**os.environ, **variables}, timeout=200)


@pytest.fixture(scope="module")
def programs(built: Path, session_directory: Path) -> Iterator[Path]:
    """The directory of the commands that pipx has installed from the wheel."""
    home = session_directory / "pipx"
    (wheel,) = built.glob("*.whl")
    pipx(home, "install", f"{wheel}[cli]")
    yield home / "bin"
    pipx(home, "uninstall-all")
    assert list((home / "bin").iterdir()) == []


def test_the_wheel_has_the_package_and_nothing_else(built: Path, session_directory: Path) -> None:
    with zipfile.ZipFile(built / f"ocigpu-{__version__}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
        entry_points = wheel.read(f"ocigpu-{__version__}.dist-info/entry_points.txt").decode()
    assert "[pytest11]\nocigpu = ocigpu.sim.pytest_plugin\n" in entry_points
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"ocigpu", f"ocigpu-{__version__}.data", f"ocigpu-{__version__}.dist-info"}
    source = session_directory / "source"
    files = {str(path.relative_to(source)) for path in (source / "ocigpu").rglob("*") if path.is_file()}
    assert files <= names
    assert f"ocigpu-{__version__}.dist-info/licenses/LICENSE" in names
    assert f"ocigpu/sim/prebuilt/{os.uname().machine}/libnvidia-ml.so" in names


def test_a_wheel_that_is_built_without_a_compiler_warns(built: Path, session_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    words = ["-c", "from setuptools import build_meta; build_meta.build_wheel('dist')"]
    source = shutil.copytree(session_directory / "source", tmp_path / "source")
    done = run([sys.executable, *words], env={**os.environ, "PATH": str(tmp_path / "bin")}, cwd=source)
    warning = f"simulated GPUs on {os.uname().machine}: no libraries: no C compiler: gcc or cc is needed"
    assert warning in done.stdout + done.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "prebuilt" in name]


def test_the_source_distribution_can_build_package_and_test(built: Path) -> None:
    with tarfile.open(built / f"ocigpu-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "LICENSE",
        "Makefile",
        "pyproject.toml",
        "packaging/package.sh",
        "packaging/wheel/ocigpu-hook",
        "setup.py",
    }
    wanted |= {"packaging/systemd/ocigpu-watch.service", "packaging/requirements.txt", "tests/conftest.py", "README.md"}
    assert wanted <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("build/")]


@pytest.mark.root
@pytest.mark.engine
def test_a_container_gets_its_gpus_from_an_installation_by_pipx(
    programs: Path, make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    requirements.require(requirements.programs("runc"))
    bundle = make_bundle(["nvidia-smi", "-L"], {"NVIDIA_VISIBLE_DEVICES": "1"})
    env = simulated_host.environment(runtime_environment)
    done = run_container([programs / "ocigpu-runtime"], bundle, container_id(), env=env)
    assert done.returncode == 0, done.stderr
    assert listed_uuids(done.stdout) == [simulated_host.gpus[1]]


@pytest.mark.parametrize("name", ["ocigpu-runtime", "ocigpu-hook"])
def test_shim_and_hook_of_the_wheel_ignore_python_variables(
    programs: Path, tmp_path: Path, simulated_host: SimulatedHost, name: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('loaded')\n")
    variables = {
        **simulated_host.environment(dict(os.environ)),
        "PYTHONPATH": str(tmp_path),
        "PYTHONHOME": "/nonexistent",
    }
    done = run([programs / name, "--version"], env=variables)
    assert "loaded" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["ocigpu-runtime", "ocigpu-hook"])
def test_a_wheel_without_its_python_says_so(tmp_path: Path, name: str) -> None:
    alone = tmp_path / name
    shutil.copy(REPOSITORY / "packaging/wheel" / name, alone)
    done = run([alone, "state"], check=False)
    assert done.returncode == 127
    assert done.stderr.splitlines() == [
        f"{alone}: OCIGPU-INT-3: {tmp_path}/python is missing",
        "hint: install its wheel again (pipx install --force FILE.whl)",
    ]


@pytest.mark.parametrize("name", ["ocigpu", "ocigpu-container-cli"])
def test_the_other_commands_are_there_too(programs: Path, name: str) -> None:
    assert run([programs / name, "--help"]).stdout.lower().startswith("usage: " + name)


@pytest.mark.root
@pytest.mark.engine
def test_containers_start_while_pipx_puts_the_next_version_beside_this_one(
    programs: Path,
    tmp_path: Path,
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
) -> None:
    """The lines of docs/ENGINES.md."""
    run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, make_next_version(tmp_path / "next")],
        timeout=200,
    )
    names = sorted(path.name for path in programs.iterdir())
    venv = programs.parent / f"home/venvs/ocigpu-{NEXT}"

    def aside() -> bool:
        return venv.exists() and not (programs / f"ocigpu-{NEXT}").exists()

    with Starts(programs, simulated_host, make_bundle, runtime_environment, aside=aside) as starts:
        pipx(programs.parent, "install", f"--suffix=-{NEXT}", f"{tmp_path}/ocigpu-{NEXT}-py3-none-any.whl[cli]")
        for name in names:
            run(["ln", "-sf", f"{name}-{NEXT}", programs / name])
        assert run([programs / "ocigpu", "--version"]).stdout == f"ocigpu {NEXT}\n"
        starts.wait()
    pipx(programs.parent, "uninstall", "ocigpu")
    assert run([programs / "ocigpu-hook", "--version"]).stdout == f"ocigpu-hook {NEXT}\n"


# A job of a CI system: python3 and a wheel, no rights, no compiler, no libraries of others


@pytest.fixture(scope="module")
def job(built: Path, session_directory: Path) -> Path:
    """A virtual environment with nothing but the wheel, and NVIDIA's module for NVML, which the job's tests use."""
    environment = session_directory / "job"
    run([sys.executable, "-m", "venv", "--without-pip", environment])
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin/python", "--disable-pip-version-check"]
    run([*pip, "install", "--no-index", wheel], timeout=200)  # it needs nothing that would have to be fetched
    assert run([*pip, "check"]).stdout == "No broken requirements found.\n"
    (libraries,) = environment.glob("lib/python*/site-packages")
    shutil.copy(pynvml.__file__, libraries)
    return environment


LOOK = """\
import os, pynvml
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetCount(), os.getuid(), os.path.exists("/dev/nvidia0"))
os.system("nvidia-smi -L; echo $OCIGPU_CONFIG")
"""


@pytest.mark.root
@pytest.mark.engine
def test_a_job_without_any_rights_sees_gpus(job: Path, work_directory: Path) -> None:
    """As a pod of the strictest standard: nobody, no capabilities, a root that cannot be written but for /tmp."""
    requirements.require(requirements.programs("runc"))
    bundle, path = work_directory / "bundle", f"{job}/bin"
    rootfs = bundle / "rootfs"
    for name in ("usr", "dev", "proc", "sys", "etc", "tmp"):
        (rootfs / name).mkdir(parents=True)
    (rootfs / "tmp").chmod(0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        (rootfs / name).symlink_to(f"usr/{name}")
    command = ["ocigpu", "sim", "exec", "--gpus", "2", "--model", "l4", "--", "python", "-c", LOOK]
    config = base_config(command, {"PATH": path})
    config["process"]["user"] = {"uid": 65534, "gid": 65534}
    config["process"]["capabilities"] = {}
    config["root"]["readonly"] = True
    shown = {"/usr", str(job), sys.base_prefix if not sys.base_prefix.startswith("/usr") else "/usr"}
    tmpfs = {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev"]}
    binds = [{"destination": at, "type": "bind", "source": at, "options": ["rbind", "ro"]} for at in sorted(shown)]
    config["mounts"] += [tmpfs, *binds]
    (bundle / "config.json").write_text(json.dumps(config))
    set_cgroup(bundle, name := container_id())
    done = run_container(["runc"], bundle, name)
    assert done.returncode == 0, done.stderr
    *listed, settings = [line for line in done.stdout.splitlines() if line != "2 65534 False"]
    assert [line.partition(" (")[0] for line in listed] == ["GPU 0: NVIDIA L4", "GPU 1: NVIDIA L4"]
    assert settings.startswith("/tmp/ocigpu-sim-")
    assert "2 65534 False\n" in done.stdout


def test_the_whole_simulation_needs_nothing_else(job: Path, tmp_path: Path) -> None:
    """Every command of ``ocigpu sim``, and the programs of both vendors; PATH has no compiler."""
    for name in ("sh", "uname"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")

    def say(*words: str | Path) -> str:
        return run(words, env={"PATH": str(tmp_path), "TMPDIR": str(tmp_path)}, cwd=tmp_path).stdout

    python, ocigpu, host = job / "bin/python", job / "bin/ocigpu", tmp_path / "host"
    assert say(python, "-m", "ocigpu", "sim", "exec", "-q", "--", "nvidia-smi", "-q", "-x").count("<gpu id=") == 1
    listed = json.loads(say(ocigpu, "sim", "exec", "-q", "--model", "mi355x", "--", "amd-smi", "list", "--json"))
    assert [gpu["bdf"] for gpu in listed] == ["0000:41:00.0"]
    assert "gfx950" in say(ocigpu, "sim", "exec", "-q", "--model", "mi355x", "--", "rocminfo")
    assert "made a SIMULATED host" in say(ocigpu, "sim", "create", host, "--libraries-only", "--mig", "0:1g.10gb")
    assert "1g.10gb" in say(ocigpu, "sim", "show", host)
    assert "Successfully destroyed compute instance" in say(host / "usr/bin/nvidia-smi", "mig", "-dci")
    say(ocigpu, "sim", "remove", host)
    assert not host.exists()


def test_the_plugin_needs_pytest_alone(built: Path, session_directory: Path, tmp_path: Path) -> None:
    environment = session_directory / "job with pytest"
    run([sys.executable, "-m", "venv", "--without-pip", environment])
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin/python", "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", wheel, "pytest"], timeout=200)
    (tmp_path / "test_it.py").write_text(
        "import subprocess, pytest\n"
        "@pytest.mark.gpus(2, model='t4')\n"
        "def test_two():\n"
        "    assert subprocess.run(['nvidia-smi', '-L'], capture_output=True).stdout.count(b'Tesla T4') == 2\n"
        "@pytest.mark.gpus(model='mi300x')\n"
        "def test_amd():\n"
        "    assert b'gfx942' in subprocess.run(['rocminfo'], capture_output=True).stdout\n"
    )
    done = run([environment / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path], cwd=tmp_path)
    assert "2 passed" in done.stdout


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (
            ["sim", "exec", "--gpus", "0", "--", "true"],
            2,
            'ocigpu: OCIGPU-ARG-1: --gpus: "0" is not a whole number from 1 to 64',
        ),
        (["sim", "exec", "--gpu", "2", "--", "true"], 2, 'ocigpu: OCIGPU-ARG-1: no such option: "--gpu"'),
        (["sim", "exec"], 2, "ocigpu: OCIGPU-ARG-1: missing: COMMAND..."),
        (["sim", "exce"], 2, 'ocigpu: OCIGPU-ARG-1: no such command: "exce"'),
        (["trace", "FILE"], 1, "ocigpu: OCIGPU-PART-1: cli: the module pydantic is not installed"),
        (
            ["tenancy", "list"],
            1,
            "ocigpu: OCIGPU-TEN-1: tenancies need lightkube: No module named 'lightkube'",
        ),
    ],
)
def test_without_other_libraries_one_line_says_what_is_missing(
    job: Path, built: Path, tmp_path: Path, words: list[str], status: int, line: str
) -> None:
    (tmp_path / "FILE").write_text("\n")
    done = run([job / "bin/ocigpu", *words], check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0]) == (status, line)
    assert done.stderr.splitlines()[1].startswith("hint: ")
    if "PART-1" in line or "TEN-1" in line:
        part = "kubernetes" if words[0] == "tenancy" else "cli"
        (wheel,) = built.glob("*.whl")
        assert done.stderr.splitlines()[1].endswith(f": pip install '{wheel}[{part}]'")


def test_the_hint_installs_what_was_missing_and_asks_no_index_for_our_name(
    built: Path, session_directory: Path, tmp_path: Path
) -> None:
    environment, asked = session_directory / "hint", tmp_path / "index"
    run([sys.executable, "-m", "venv", environment])
    (asked / "ocigpu").mkdir(parents=True)
    (asked / "ocigpu/index.html").write_text('<a href="ocigpu-99.0-py3-none-any.whl">ocigpu-99.0-py3-none-any.whl</a>')
    path = {"PATH": f"{environment}/bin:{os.environ['PATH']}", "PIP_EXTRA_INDEX_URL": f"file://{asked}"}
    env = {**os.environ, **path}
    (wheel,) = built.glob("*.whl")
    run(["pip", "install", "--quiet", wheel], env=env, timeout=200)
    (tmp_path / "FILE").write_text("\n")
    trace = ["ocigpu", "trace", tmp_path / "FILE"]
    hint = run(trace, env=env, check=False).stderr.splitlines()[1]
    command = hint.partition(": pip ")[2].replace("[cli]", "[kubernetes]")  # which brings the other
    run(["sh", "-c", f"pip {command}"], env=env, cwd=tmp_path, timeout=250)
    assert "OCIGPU-TRC-2" in run(trace, env=env, check=False).stderr
    assert run(["ocigpu", "--version"], env=env).stdout == f"ocigpu {__version__}\n"
    assert run(["pip", "check"], env=env).stdout == "No broken requirements found.\n"
    missing = run(
        ["ocigpu", "tenancy", "list"],
        env={**env, "KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)},
        check=False,
    ).stderr
    assert missing.startswith("ocigpu: OCIGPU-KUBE-5: API server: ")


def test_the_action_gives_gpus_to_the_steps_that_follow(built: Path, work_directory: Path) -> None:
    """With a wheel, and with that of a release, which an address on this machine has."""
    action = yaml.safe_load((REPOSITORY / "packaging/action/action.yml").read_text())
    (step,) = action["runs"]["steps"]
    (wheel,) = built.glob("*.whl")
    (release := work_directory / "release").mkdir()
    shutil.copy(wheel, release)
    (release / "SHA256SUMS").write_text(run(["sha256sum", wheel.name], cwd=release).stdout)
    given = {"gpus": "3", "model": "a100", "mig": "0:1g.5gb,2g.10gb 1:7g.40gb"}
    inputs = {name: given.get(name, about["default"]) for name, about in action["inputs"].items()} | {
        "python": sys.executable
    }
    files = {name: str(work_directory / name) for name in ("GITHUB_PATH", "GITHUB_ENV", "GITHUB_OUTPUT")}
    variables = {
        name: inputs[value.removeprefix("${{ inputs.").removesuffix(" }}")] for name, value in step["env"].items()
    }
    environment = {"PATH": os.environ["PATH"], "RUNNER_TEMP": str(work_directory), **files, **variables}
    environment |= {"GITHUB_ACTION_PATH": str(REPOSITORY / "packaging/action"), "INPUT_OCIGPU": str(wheel)}
    wrong = run([step["shell"], "-e", "-c", step["run"]], env={**environment, "INPUT_MODEL": "a1000"}, check=False)
    assert (wrong.returncode, wrong.stderr.splitlines()[-2]) == (1, 'ocigpu: OCIGPU-SIM-1: model "a1000" is unknown')
    assert not any(map(os.path.exists, files.values())), "no step that follows is told of GPUs"
    with served(release) as address:
        run([step["shell"], "-e", "-c", step["run"]], env={**environment, "INPUT_OCIGPU": address}, timeout=200)
    path = Path(files["GITHUB_PATH"]).read_text().strip()
    told = dict(line.partition("=")[::2] for line in Path(files["GITHUB_ENV"]).read_text().splitlines())
    assert told.keys() == {"OCIGPU_CONFIG", "LD_LIBRARY_PATH"}
    done = run(["sh", "-c", "nvidia-smi -L"], env={"PATH": f"{path}:{os.environ['PATH']}", **told})
    words = [line.split()[0] for line in done.stdout.splitlines()]
    assert words == ["GPU", "MIG", "MIG", "GPU", "MIG", "GPU"]
    assert Path(Path(files["GITHUB_OUTPUT"]).read_text().strip().removeprefix("directory="), "dev").is_dir()
    of_amd = run(
        [step["shell"], "-e", "-c", step["run"]], env={**environment, "INPUT_MODEL": "mi300x", "INPUT_MIG": ""}
    )
    assert of_amd.stdout.count("GPU: ") == 3


@pytest.mark.root
@pytest.mark.engine
def test_the_ansible_role_installs_configures_and_tests_and_then_changes_nothing(
    built: Path, session_directory: Path, simulated_host: SimulatedHost, image: Path
) -> None:
    """ansible-core of PyPI against a machine of our own with a real dockerd, and Podman's and containerd's programs."""
    requirements.require(requirements.overlay())
    requirements.require(requirements.programs("dockerd", "docker", "podman", "runc", "busybox"))
    venv = session_directory / "ansible"
    run([sys.executable, "-m", "venv", venv])
    run([venv / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "ansible-core>=2.16"], timeout=200)
    (wheel,) = built.glob("*.whl")
    directory = session_directory / "ansible-docker"
    variables = {
        "PATH": f"{venv}/bin:/usr/local/bin:{SYSTEM_PATH}",
        "HOME": str(session_directory / "ansible-home"),
        "LANG": "C.UTF-8",
        "ANSIBLE_LOCALHOST_WARNING": "False",
        "DOCKER_HOST": f"unix://{directory}/docker.sock",
    }
    chosen = {
        "ocigpu_wheel": str(wheel),
        "ocigpu_venv": f"{session_directory}/ansible-ocigpu",
        "ocigpu_restart": False,
        "ocigpu_engines": ["docker"],
        "ansible_python_interpreter": sys.executable,
    }
    options = ["--extra-vars", json.dumps(chosen)]

    with private_machine(session_directory / "ansible-private") as enter:
        run([*enter, "cp", simulated_host.settings, "/etc/ocigpu/config.toml"])

        def play(*more: str, status: int = 0) -> str:
            site = REPOSITORY / "packaging/ansible/site.yml"
            command = [*enter, venv / "bin/ansible-playbook", "--inventory=localhost,", "--connection=local", site]
            done = run([*command, *options, *more], check=False, env=variables, timeout=250)
            assert done.returncode == status, done.stdout + done.stderr
            return done.stdout

        def configure(file: Path) -> None:
            before = file.read_bytes()
            run([*enter, "ln", "-s", file, "/etc/docker/daemon.json"])
            untested = ("--extra-vars", json.dumps({"ocigpu_test": False}))
            assert "changed=1 " in play("--check")  # what is not installed cannot say what it would configure
            output = play(*untested)
            assert "changed=2 " in output
            assert "systemctl restart docker" in output  # remains to be done: nothing may be restarted here
            assert b"ocigpu-runtime" in file.read_bytes()
            assert before != file.read_bytes()

        path = {"PATH": f"/usr/local/bin:{SYSTEM_PATH}"}
        with start_docker(directory, image, {}, path, view=enter, prepare=configure):
            assert "changed=0 " in play()
            untested = json.dumps({"ocigpu_test": False})
            for changed, hook in ((0, "true"), (0, ""), (2, "false"), (0, "false"), (1, "true")):
                said = play("--extra-vars", untested, "--extra-vars", f"ocigpu_gpus_hook={hook}")
                assert f"changed={changed} " in said, (hook, said)
                status = run(
                    [*enter, f"{chosen['ocigpu_venv']}/bin/ocigpu", "engine", "status", "--json"], env=variables
                )
                docker = json.loads(status.stdout)["engines"][0]
                assert (docker["engine"], docker["gpus_hook_ours"]) == ("docker", hook in ("true", "")), hook
            assert "changed=1 " in play("--check")  # pip does not compare the path of a wheel in check mode
            run([*enter, "mv", "/etc/ocigpu/config.toml", "/etc/ocigpu/moved"])
            assert "no NVIDIA driver" in play(status=2)
