"""The parts of the shim: which program it becomes, which hook it names, what it does to a bundle."""

import errno
import json
import os
import re
import shutil
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.product import PROGRAMS, STUBS, PublicCopy, write_stub

from ocigpu.bundle.policy import hook_path, owns_device_policy
from ocigpu.core.errors import OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.entry.arguments import Arguments
from ocigpu.runtime import LOOP_VARIABLE, become, edit_bundle, find_runtime, main
from ocigpu.sim.create import create_host
from ocigpu.system.log import Log
from ocigpu.system.settings_file import read_settings

REPOSITORY = Path(__file__).resolve().parents[1]
STUB = PROGRAMS / "ocigpu-runtime"


def program(path: Path, text: str = "#!/bin/sh\nexit 0\n", mode: int = 0o755) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def settings_for(*runtimes: str) -> Settings:
    return Settings(runtime_runtimes=runtimes)


@pytest.fixture(autouse=True)
def environment_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what a shim leaves for the runtime that it becomes."""
    monkeypatch.setenv(LOOP_VARIABLE, "")


@pytest.fixture
def no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found but by what a test says."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("ocigpu.runtime.SEARCH_PATH", "")


# --- finding the low-level runtime


def test_the_first_runtime_that_exists_is_taken(tmp_path: Path, no_path: None) -> None:
    second = program(tmp_path / "second")
    third = program(tmp_path / "third")
    assert find_runtime(settings_for(str(tmp_path / "first"), second, third), "/nonexistent") == second


def test_names_are_searched_in_path_then_in_the_usual_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_path: None
) -> None:
    usual = program(tmp_path / "usual/runc")
    monkeypatch.setattr("ocigpu.runtime.SEARCH_PATH", f"{tmp_path}/usual")
    assert find_runtime(settings_for("runc"), "/nonexistent") == usual
    own = program(tmp_path / "own/runc")
    monkeypatch.setenv("PATH", f"/nonexistent::{tmp_path}/own")
    assert find_runtime(settings_for("runc"), "/nonexistent") == own
    monkeypatch.delenv("PATH")
    assert find_runtime(settings_for("runc"), "/nonexistent") == usual


def test_every_directory_is_searched_for_a_name_before_the_next_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_path: None
) -> None:
    program(tmp_path / "a/crun")
    runc = program(tmp_path / "b/runc")
    monkeypatch.setenv("PATH", f"{tmp_path}/a:{tmp_path}/b")
    assert find_runtime(settings_for("runc", "crun"), "/nonexistent") == runc


def test_the_current_directory_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_path: None) -> None:
    """It is a bundle."""
    program(tmp_path / "runc")
    program(tmp_path / "bin/runc")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", ":.:bin::")
    with pytest.raises(OcigpuError):
        find_runtime(settings_for("runc"), "/nonexistent")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Path.exists, id="missing"),
        pytest.param(Path.mkdir, id="directory"),
        pytest.param(os.mkfifo, id="pipe"),
        pytest.param(lambda path: path.symlink_to(path), id="link to itself"),
        pytest.param(lambda path: path.symlink_to("/dev/null"), id="device"),
        pytest.param(lambda path: program(path, mode=0o644), id="not executable"),
    ],
)
def test_what_is_no_program_is_not_taken(tmp_path: Path, no_path: None, make: Any) -> None:
    make(tmp_path / "runc")
    with pytest.raises(OcigpuError) as caught:
        find_runtime(settings_for(f"{tmp_path}/runc", "crun"), "/nonexistent")
    assert (caught.value.code, caught.value.message) == (
        "OCIGPU-RT-1",
        f"no low-level runtime found; looked for {tmp_path}/runc, crun",
    )


def test_the_runtime_of_k3s_is_named_if_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_path: None
) -> None:
    own = program(tmp_path / "k3s/runc")
    monkeypatch.setattr("ocigpu.runtime.OWN_RUNTIMES", (f"{tmp_path}/none", own))
    with pytest.raises(OcigpuError) as caught:
        find_runtime(settings_for("runc"), "/nonexistent")
    assert caught.value.hint == f"Add {own} to runtime.runtimes in the settings, or install runc."
    assert find_runtime(settings_for("runc", own), "/nonexistent") == own


@pytest.fixture(params=STUBS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path, own, _: path.symlink_to(own), id="link"),
        pytest.param(lambda path, own, _: os.link(own, path), id="hard link"),
        pytest.param(lambda path, own, _: shutil.copy(own, path), id="copy"),
        pytest.param(
            lambda path, _, kind: write_stub(path, kind, "ocigpu-runtime", library="/opt/another/prefix"),
            id="another installation",
        ),
    ],
)
def test_the_shim_never_becomes_itself(tmp_path: Path, no_path: None, make: Any, kind: str) -> None:
    own = write_stub(tmp_path / "ocigpu-runtime", kind)
    make(tmp_path / "runc", own, kind)
    other = program(tmp_path / "crun")
    (tmp_path / "link").symlink_to(own)
    for started_as in (own, tmp_path / "link"):
        assert find_runtime(settings_for(f"{tmp_path}/runc", other), str(started_as)) == other
        with pytest.raises(OcigpuError) as caught:
            find_runtime(settings_for(f"{tmp_path}/runc"), str(started_as))
        assert caught.value.code == "OCIGPU-RT-1"


def test_the_shim_in_place_of_runc_finds_the_real_one_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """People install shims as /usr/local/bin/runc."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_stub(tmp_path / name / "runc", kind, "ocigpu-runtime")
    real = program(tmp_path / "third/runc")
    monkeypatch.setattr("ocigpu.runtime.SEARCH_PATH", "")
    monkeypatch.setenv("PATH", f"{tmp_path}/first:{tmp_path}/second:{tmp_path}/third")
    assert find_runtime(settings_for("runc"), f"{tmp_path}/first/runc") == real


def test_a_shim_in_place_of_runc_starts_the_real_one(tmp_path: Path, kind: str) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_stub(tmp_path / name / "runc", kind, "ocigpu-runtime")
    program(tmp_path / "third/runc", "#!/bin/sh\necho real\n")
    settings = tmp_path / "config.toml"
    settings.write_text('[runtime]\nruntimes = ["runc"]\n')
    search = f"{tmp_path}/first:{tmp_path}/second:{tmp_path}/third:/usr/bin:/bin"
    for words in (["create", "--bundle", "/nonexistent", "x"], ["state", "x"]):
        env = {"PATH": search, "OCIGPU_CONFIG": str(settings)}
        done = subprocess.run([tmp_path / "first/runc", *words], env=env, capture_output=True, text=True, timeout=60)
        assert (done.stdout == "real\n") == (words[0] == "state"), done.stderr


def test_other_scripts_are_runtimes(tmp_path: Path, no_path: None) -> None:
    wrapper = program(tmp_path / "runc", '#!/bin/sh\n# used by ocigpu\nexec /usr/sbin/runc --debug "$@"\n')
    assert find_runtime(settings_for(wrapper), str(STUB)) == wrapper


def test_a_runtime_that_cannot_be_executed_is_named(tmp_path: Path) -> None:
    broken = program(tmp_path / "runc", "#!/nonexistent/interpreter\n")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGXFSZ)}
    try:
        with pytest.raises(OcigpuError) as caught:
            become(broken, [])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert (caught.value.code, caught.value.message) == ("OCIGPU-RT-2", f"exec {broken}: {os.strerror(errno.ENOENT)}")


# --- the hook


def test_the_hook_is_beside_the_stub_with_links_resolved(tmp_path: Path) -> None:
    hook = program(tmp_path / "lib/ocigpu-hook")
    stub = program(tmp_path / "lib/ocigpu-runtime")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/runc").symlink_to(stub)
    assert hook_path(Settings(), str(tmp_path / "bin/runc")) == hook


def test_the_settings_name_another_hook(tmp_path: Path) -> None:
    hook = program(tmp_path / "other")
    assert hook_path(Settings(hook_path=hook), "/nonexistent/ocigpu-runtime") == hook


@pytest.mark.parametrize("mode", [None, 0o644])
def test_a_missing_hook_stops_the_container(tmp_path: Path, mode: int | None) -> None:
    if mode is not None:
        program(tmp_path / "ocigpu-hook", mode=mode)
    with pytest.raises(OcigpuError) as caught:
        hook_path(Settings(), str(tmp_path / "ocigpu-runtime"))
    assert (caught.value.code, caught.value.message) == (
        "OCIGPU-RT-3",
        f"hook {tmp_path}/ocigpu-hook: missing or not executable",
    )


def test_ctrl_c_ends_the_shim_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ocigpu.runtime.read_settings", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert main(["ocigpu-runtime", "run", "x"]) == 130
    assert capfd.readouterr() == ("", "")


# --- who owns device policy


@pytest.mark.root
def test_only_root_of_the_initial_user_namespace_owns_the_device_policy(public_copy: PublicCopy) -> None:
    assert owns_device_policy()
    code = "import sys; from ocigpu.runtime import owns_device_policy; sys.exit(10 + owns_device_policy())"
    for command in (["unshare", "--user", "--map-root-user"], ["setpriv", "--reuid=1234", "--clear-groups"]):
        done = subprocess.run(
            [*command, "/usr/bin/env", f"PYTHONPATH={public_copy.library}", public_copy.python, "-c", code],
            capture_output=True,
            text=True,
            cwd="/",
        )
        assert done.returncode == 10, done.stderr


# --- bundles


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The settings of a simulated host with two GPUs."""
    return create_host(str(tmp_path_factory.mktemp("host") / "sim"), 2, "t4", compat32=False, sockets=False)


def write_bundle(path: Path, devices: str | None, **more: Any) -> bytes:
    env = ["PATH=/bin"] if devices is None else ["PATH=/bin", f"NVIDIA_VISIBLE_DEVICES={devices}"]
    linux = {"namespaces": [{"type": "mount"}], "resources": {"devices": [{"allow": False, "access": "rwm"}]}}
    config = {"process": {"env": env}, "root": {"path": "r"}, "linux": linux, **more}
    path.mkdir(exist_ok=True)
    text = json.dumps(config, indent=3).encode()
    (path / "config.json").write_bytes(text)
    return text


def without_early(arguments: list[str]) -> list[str]:
    """Return the hook's arguments without the first option, which tells root's hook who is ready for its container."""
    if not owns_device_policy():
        return arguments
    assert arguments[1] == "--early"
    assert re.fullmatch(rf"/run/ocigpu/early-{os.getpid()}-[0-9a-f]{{16}}", arguments[2])
    return [arguments[0], *arguments[3:]]


def test_a_request_edits_the_bundle(tmp_path: Path, simulated: str) -> None:
    write_bundle(tmp_path / "b", "1", unknown={"x": [1.5]})
    (tmp_path / "b/config.json").chmod(0o604)
    hook = program(tmp_path / "ocigpu-hook")
    stub = program(tmp_path / "ocigpu-runtime")
    log = tmp_path / "log"
    edit_bundle(Arguments("create", str(tmp_path / "b")), read_settings(simulated), stub, Log(((str(log), "text"),)))
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert list(config) == ["process", "root", "linux", "unknown", "hooks"]
    (entry,) = config["hooks"]["prestart"]
    bundle = ["--bundle", f"{tmp_path}/b"]
    assert (entry["path"], without_early(entry["args"])) == (
        hook,
        ["ocigpu-hook", "--config", simulated, *bundle, "prestart"],
    )
    deny, *rules = config["linux"]["resources"]["devices"]
    assert deny == {"allow": False, "access": "rwm"}
    expected = [(195, 255), (195, 1)]
    assert set(expected) <= {(rule["major"], rule["minor"]) for rule in rules} or not owns_device_policy()
    assert (195, 0) not in {(rule["major"], rule["minor"]) for rule in rules}
    assert stat.S_IMODE((tmp_path / "b/config.json").stat().st_mode) == 0o604
    assert os.listdir(tmp_path / "b") == ["config.json"]
    assert f"{tmp_path}/b/config.json: granted GPU-" in log.read_text()


def test_the_hook_gets_the_settings_by_absolute_path(
    tmp_path: Path, simulated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be started in another directory than the shim."""
    write_bundle(tmp_path / "b", "1")
    program(tmp_path / "ocigpu-hook")
    monkeypatch.chdir(os.path.dirname(simulated))
    settings = read_settings(os.path.basename(simulated))
    edit_bundle(Arguments("create", str(tmp_path / "b")), settings, str(tmp_path / "ocigpu-runtime"), Log())
    (entry,) = json.loads((tmp_path / "b/config.json").read_text())["hooks"]["prestart"]
    assert without_early(entry["args"]) == [
        "ocigpu-hook", "--config", simulated, "--bundle", f"{tmp_path}/b", "prestart"
    ]  # fmt: skip


def test_device_rules_are_not_declared_where_cgroups_are_to_be_left_alone(tmp_path: Path, simulated: str) -> None:
    write_bundle(tmp_path / "b", "1")
    program(tmp_path / "ocigpu-hook")
    settings = read_settings(simulated)._replace(no_cgroups=True)
    edit_bundle(Arguments("create", str(tmp_path / "b")), settings, str(tmp_path / "ocigpu-runtime"), Log())
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert config["linux"]["resources"]["devices"] == [{"allow": False, "access": "rwm"}]
    assert len(config["hooks"]["prestart"]) == 1


def test_another_name_of_the_configuration_is_told_to_the_hook(tmp_path: Path, simulated: str) -> None:
    write_bundle(tmp_path / "b", "none")
    os.rename(tmp_path / "b/config.json", tmp_path / "b/other.json")
    program(tmp_path / "ocigpu-hook")
    edit_bundle(
        Arguments("create", str(tmp_path / "b"), "other.json"),
        read_settings(simulated),
        str(tmp_path / "ocigpu-runtime"),
        Log(),
    )
    (entry,) = json.loads((tmp_path / "b/other.json").read_text())["hooks"]["prestart"]
    options = ["--config", simulated, "--bundle", f"{tmp_path}/b", "--spec", f"{tmp_path}/b/other.json"]
    assert without_early(entry["args"])[1:] == [*options, "prestart"]


@pytest.mark.parametrize(
    ("devices", "more", "code"),
    [
        pytest.param("9", {}, "OCIGPU-DEV-1", id="unknown GPU"),
        pytest.param("x", {}, "OCIGPU-REQ-1", id="not a GPU"),
        pytest.param("0", {"linux": {}}, "OCIGPU-SPEC-3", id="no mount namespace"),
        pytest.param("0", {"hooks": []}, "OCIGPU-SPEC-3", id="hooks of another type"),
    ],
)
def test_a_refused_request_leaves_the_bundle_alone(
    tmp_path: Path, simulated: str, devices: str, more: dict[str, Any], code: str
) -> None:
    text = write_bundle(tmp_path / "b", devices, **more)
    program(tmp_path / "ocigpu-hook")
    before = (tmp_path / "b/config.json").stat()
    with pytest.raises(OcigpuError) as caught:
        edit_bundle(
            Arguments("create", str(tmp_path / "b")),
            read_settings(simulated),
            str(tmp_path / "ocigpu-runtime"),
            Log(),
        )
    assert caught.value.code == code
    after = (tmp_path / "b/config.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert (tmp_path / "b/config.json").read_bytes() == text
    assert os.listdir(tmp_path / "b") == ["config.json"]


def test_a_missing_hook_leaves_the_bundle_alone(tmp_path: Path, simulated: str) -> None:
    text = write_bundle(tmp_path / "b", "0")
    with pytest.raises(OcigpuError) as caught:
        edit_bundle(Arguments("create", str(tmp_path / "b")), read_settings(simulated), "/nonexistent/shim", Log())
    assert caught.value.code == "OCIGPU-RT-3"
    assert (tmp_path / "b/config.json").read_bytes() == text


def test_ignored_requests_are_logged(tmp_path: Path) -> None:
    text = write_bundle(tmp_path / "b", "0")
    settings = Settings(accept_nvidia_visible_devices_envvar_when_unprivileged=False)
    log = tmp_path / "log"
    edit_bundle(Arguments("create", str(tmp_path / "b")), settings, "/nonexistent/shim", Log(((str(log), "json"),)))
    line = json.loads(log.read_text())
    assert line["level"] == "warning"
    assert line["msg"].startswith("NVIDIA_VISIBLE_DEVICES ignored")
    assert (tmp_path / "b/config.json").read_bytes() == text
