"""``ocigpu demo``: passes, notices when something is wrong, and leaves nothing behind in any case."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import requirements
from support.fixtures import Run

from ocigpu.cli.engines.busybox import make_bundle, make_config, sections_of

COMMAND = [sys.executable, "-m", "ocigpu.cli.front.main", "demo", "--gpus", "3"]
SHIM = Path(sys.executable).parent / "ocigpu-runtime"


@pytest.fixture(autouse=True)
def tools() -> None:
    requirements.require(requirements.compiler(), requirements.programs("runc", "busybox"))


def assert_nothing_is_left(output: str) -> None:
    """Check that the working directory, which the output names, is gone with its mounts and cgroups."""
    found = re.search(r"working directory (/tmp/(ocigpu-demo-\w+))$", output, re.M)
    assert found, output
    assert not os.path.lexists(found[1])
    assert found[2] not in Path("/proc/self/mountinfo").read_text()
    cgroups = subprocess.run(["find", "/sys/fs/cgroup", "-name", f"{found[2]}*"], capture_output=True, text=True)
    assert cgroups.stdout == ""


def make_shim(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def without_progress(errors: str) -> str:
    """Return what was said on standard error but for how far it was, which is said on a slow machine."""
    return re.sub(r"^(compiling|making|writing) .*\n", "", errors, flags=re.MULTILINE)


@pytest.mark.root
@pytest.mark.engine
def test_the_demo_passes_and_shows_isolation() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=120)
    assert (done.returncode, without_progress(done.stderr)) == (0, ""), done.stdout + done.stderr
    assert re.search(r"^demo passed \((SIMULATED host, no real GPU|this machine's GPUs)\)$", done.stdout, re.M)
    for claim in ("Operation not permitted", "exactly the ", "its config.json is untouched", "nothing is left behind"):
        assert claim in done.stdout
    assert_nothing_is_left(done.stdout)


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
def test_a_machine_without_busybox_gives_its_own_tools() -> None:
    """As Fedora and most servers: busybox is covered by a file that nobody can execute."""
    hide = 'for file in $(which -a busybox); do mount --bind /dev/null "$file"; done; exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", hide, "sh", *COMMAND]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, without_progress(done.stderr)) == (0, ""), done.stdout + done.stderr
    assert "demo passed" in done.stdout
    assert_nothing_is_left(done.stdout)


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
def test_the_demo_fails_when_the_shim_gives_nothing(tmp_path: Path) -> None:
    runtime = requirements.find_program("runc")
    shim = make_shim(tmp_path / "shim", f'exec {runtime} "$@"')
    done = subprocess.run([*COMMAND, "--runtime", shim], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert without_progress(done.stderr).startswith("ocigpu: OCIGPU-DEMO-2: expected: nvidia-smi runs in the container")
    assert "demo passed" not in done.stdout
    assert_nothing_is_left(done.stdout)


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
def test_the_demo_fails_when_too_much_is_given(tmp_path: Path) -> None:
    """A shim that gives every GPU whatever was asked for."""
    edit = r"sed -i 's/NVIDIA_VISIBLE_DEVICES=[0-9,]*/NVIDIA_VISIBLE_DEVICES=all/'"
    shim = make_shim(
        tmp_path / "shim",
        f'for word; do test -f "$word/config.json" && {edit} "$word/config.json"; done\nexec {SHIM} "$@"',
    )
    done = subprocess.run([*COMMAND, "--runtime", shim], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "OCIGPU-DEMO-2: expected: it lists what was granted and no other GPU" in done.stderr
    assert_nothing_is_left(done.stdout)


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    script = f'case " $* " in *" run "*) echo > {started}; exec sleep 60;; esac; exec {SHIM} "$@"'
    command = [*COMMAND, "--runtime", make_shim(tmp_path / "shim", script)]
    # "env" undoes what a job in the background inherits: an ignored SIGINT
    command = ["env", f"--default-signal={number.name}", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        started.read_text()  # blocks until the container is being started
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, without_progress(errors.decode())) == (130, "")
    assert_nothing_is_left(output.decode())


def test_the_demo_says_that_it_needs_root(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    status, out, err = run("demo")
    assert (status, out) == (1, "")
    assert err.startswith("ocigpu: OCIGPU-DEMO-1: the demo needs root")


def test_the_bundle_of_the_demo_has_busybox_and_the_loader_of_the_host(tmp_path: Path) -> None:
    requirements.require(requirements.programs("busybox"))
    make_bundle(str(tmp_path), "true", {"A": "b"}, (os.path.realpath(sys.executable),))
    assert os.readlink(tmp_path / "rootfs/bin/sh") == "busybox"
    names = {path.name for path in tmp_path.glob("rootfs/**/*") if path.is_file()}
    assert {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"} <= names
    assert any(name.startswith("ld-linux") for name in names)


def test_the_container_of_the_demo_is_an_ordinary_one() -> None:
    config = make_config("true", {"NVIDIA_VISIBLE_DEVICES": "0"})
    assert "CAP_SYS_ADMIN" not in config["process"]["capabilities"]["bounding"]
    assert config["linux"]["resources"]["devices"] == [{"allow": False, "access": "rwm"}]
    assert "NVIDIA_VISIBLE_DEVICES=0" in config["process"]["env"]


def test_sections_of_a_scripts_output_are_told_apart() -> None:
    assert sections_of("noise\n@@ a\n1\n2\n@@ b\n@@ end\n") == {"a": "1\n2", "b": "", "end": ""}
