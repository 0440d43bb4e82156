"""Engines below a root configured and set back: what is written, kept, undone and refused."""

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine_roots import (
    CONTAINERD,
    DAEMON,
    PATHS,
    RUNTIME,
    V2,
    configure,
    make_host,
    options,
    put,
    read,
    remove,
    snapshot,
)

from ocigpu.core.errors import OcigpuError
from ocigpu.engines.carry_out import carry_out
from ocigpu.engines.configure import plan_configuration
from ocigpu.engines.files import EngineFile, Root
from ocigpu.engines.status import read_engine_status


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return make_host(tmp_path)


ENGINES = pytest.mark.parametrize("engine", list(PATHS))


@ENGINES
def test_without_any_file_one_is_made_and_removed_with_its_directories(host: Path, engine: str) -> None:
    before = snapshot(host)
    assert configure(host, engine, default=True, cdi=True).changed
    status = next(status for status in read_engine_status(str(host)) if status.engine == engine)
    assert (status.configured, status.is_default, status.cdi, status.problems) == (True, True, "on", ())
    assert stat.S_IMODE((host / PATHS[engine].lstrip("/")).stat().st_mode) == 0o644
    remove(host, engine)
    assert snapshot(host) == before


@ENGINES
def test_a_second_run_has_nothing_to_do(host: Path, engine: str) -> None:
    configure(host, engine, default=True, cdi=True)
    before = snapshot(host)
    for more in ({"default": True, "cdi": True}, {}):
        assert not configure(host, engine, **more).changed
        assert snapshot(host) == before


@ENGINES
@pytest.mark.parametrize("text", ["", "\n"], ids=["empty", "an empty line"])
def test_an_empty_file_is_filled_and_emptied_again(host: Path, engine: str, text: str) -> None:
    put(host, PATHS[engine], text)
    before = snapshot(host)
    configure(host, engine)
    if engine == "containerd":
        assert read(host, engine)["version"] == 2
    remove(host, engine)
    assert snapshot(host) == before


@pytest.mark.parametrize(("engine", "text"), [("docker", DAEMON), ("containerd", CONTAINERD)])
def test_a_file_comes_back_byte_for_byte_with_its_mode_after_several_runs(host: Path, engine: str, text: str) -> None:
    file = put(host, PATHS[engine], text, 0o600)
    os.chown(file, 0, 12)
    before = snapshot(host)
    configure(host, engine)
    configure(host, engine, default=True)
    configure(host, engine, cdi=True, name="second")
    for path in file.parent.iterdir():
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o600, 12), path
    assert sorted(path.name for path in file.parent.iterdir()) == [
        file.name,
        f"{file.name}.ocigpu-backup",
        f"{file.name}.ocigpu-record",
    ]
    assert (file.parent / f"{file.name}.ocigpu-backup").read_text() == text
    remove(host, engine)
    assert snapshot(host) == before
    assert not remove(host, engine).changed


def test_what_others_change_in_between_stays(host: Path) -> None:
    file = put(host, PATHS["docker"], DAEMON)
    configure(host, "docker", default=True, cdi=True)
    file.write_text(file.read_text().replace('"x": true', '"x": false'))
    configure(host, "docker", name="other")
    assert (file.parent / "daemon.json.ocigpu-backup").read_text() == DAEMON.replace("true", "false")
    file.write_text(file.read_text().replace('"path": "n"', '"path": "m"'))
    remove(host, "docker")
    assert file.read_text() == DAEMON.replace("true", "false").replace('"n"', '"m"')
    assert list(file.parent.iterdir()) == [file]


def test_the_former_default_comes_back_unless_somebody_chose_another(host: Path) -> None:
    file = put(host, PATHS["containerd"], CONTAINERD)
    configure(host, "containerd", default=True)
    assert read(host, "containerd")["plugins"][V2]["containerd"]["default_runtime_name"] == "ocigpu"
    file.write_text(file.read_text() + "# a word\n")
    remove(host, "containerd")
    assert read(host, "containerd") == tomllib.loads(CONTAINERD)
    configure(host, "containerd", default=True)
    file.write_text(file.read_text().replace('default_runtime_name = "ocigpu"', 'default_runtime_name = "kata"'))
    plan = remove(host, "containerd")
    assert [note.partition(" was ")[0].rpartition(".")[2] for note in plan.notes] == ["default_runtime_name"]
    assert file.read_text() == CONTAINERD.replace('name = "crun"', 'name = "kata"') + "# a word\n"


def test_a_drop_in_keeps_what_others_have_put_into_it(host: Path) -> None:
    configure(host, "podman", default=True)
    file = host / PATHS["podman"].lstrip("/")
    file.write_text(file.read_text() + "[containers]\nlog_size_max = 5 # mine\n")
    remove(host, "podman")
    assert read(host, "podman") == {"containers": {"log_size_max": 5}}
    assert "# mine" in file.read_text()


def test_what_was_removed_by_hand_is_not_put_back_by_the_removal(host: Path) -> None:
    file = put(host, PATHS["docker"], DAEMON)
    configure(host, "docker")
    file.unlink()
    remove(host, "docker")
    assert not any(path.name.startswith("daemon") for path in (host / "etc/docker").glob("*"))


def test_entries_without_a_record_are_removed_when_they_name_our_program(host: Path) -> None:
    runtimes = {"mine": {"path": RUNTIME}, "ocigpu": {"path": "/usr/bin/other"}, "nvidia": {"path": "n"}}
    file = put(host, PATHS["docker"], json.dumps({"runtimes": runtimes, "default-runtime": "mine"}, indent=2))
    remove(host, "docker")
    del runtimes["mine"]
    assert json.loads(file.read_text()) == {"runtimes": runtimes}


def test_an_entry_of_another_program_comes_back(host: Path) -> None:
    file = put(host, PATHS["docker"], DAEMON)
    configure(host, "docker", name="nvidia")
    assert read(host, "docker")["runtimes"] == {"nvidia": {"path": RUNTIME}}
    remove(host, "docker")
    assert file.read_text() == DAEMON


def test_a_link_is_followed_below_the_root_and_stays(host: Path) -> None:
    put(host, "/srv/site/daemon.json", DAEMON)
    (host / "etc/docker").mkdir(parents=True)
    (host / "etc/docker/daemon.json").symlink_to("/srv/site/daemon.json")
    before = snapshot(host)
    configure(host, "docker")
    assert (host / "etc/docker/daemon.json").is_symlink()
    assert "ocigpu" in json.loads((host / "srv/site/daemon.json").read_text())["runtimes"]
    remove(host, "docker")
    assert snapshot(host) == before


def test_the_record_is_beside_the_file_that_a_link_leads_to_through_other_links(host: Path) -> None:
    put(host, "/srv/site/daemon.conf", DAEMON)
    (host / "etc").mkdir()
    (host / "srv/etc").mkdir()
    (host / "etc/docker").symlink_to("/srv/etc")
    (host / "srv/etc/daemon.json").symlink_to("../site/daemon.conf")
    before = snapshot(host)
    assert [edit.file.path for edit in configure(host, "docker").edits] == ["/srv/site/daemon.conf"]
    assert "ocigpu" in json.loads((host / "srv/site/daemon.conf").read_text())["runtimes"]
    assert (host / "srv/site/daemon.conf.ocigpu-record").exists()
    remove(host, "docker")
    assert snapshot(host) == before


def test_dockers_file_is_json_whatever_its_name(host: Path) -> None:
    before = snapshot(host)
    configure(host, "docker", config="/etc/dockerd.conf")
    configure(host, "docker", config="/etc/dockerd.conf", default=True)
    assert json.loads((host / "etc/dockerd.conf").read_text()) == {
        "runtimes": {"ocigpu": {"path": RUNTIME}},
        "default-runtime": "ocigpu",
    }
    remove(host, "docker", config="/etc/dockerd.conf")
    assert snapshot(host) == before
    put(host, "/etc/dockerd.conf", "\n")
    with pytest.raises(OcigpuError, match="is empty and not called") as caught:
        configure(host, "docker", config="/etc/dockerd.conf")
    assert caught.value.code == "OCIGPU-ENG-2"


@pytest.mark.parametrize("what", ["directory", "link"])
def test_a_place_where_everybody_can_write_is_refused(host: Path, what: str) -> None:
    open_directory = host / "open"
    open_directory.mkdir()
    open_directory.chmod(0o1777)
    put(host, "/open/daemon.json", DAEMON)
    config = "/open/daemon.json"
    if what == "link":
        config = "/etc/daemon.json"
        (host / "etc").mkdir()
        (host / "etc/daemon.json").symlink_to("/open/daemon.json")
    before = snapshot(host)
    with pytest.raises(OcigpuError, match="other users can replace files") as caught:
        configure(host, "docker", config=config)
    assert caught.value.code == "OCIGPU-ENG-4"
    assert snapshot(host) == before


@pytest.mark.parametrize(
    ("make", "code"),
    [
        pytest.param(lambda path: path.mkdir(), "OCIGPU-ENG-1", id="a directory"),
        pytest.param(os.mkfifo, "OCIGPU-ENG-1", id="a pipe"),
        pytest.param(lambda path: path.write_bytes(b'{"a": "\xff"}'), "OCIGPU-ENG-1", id="not UTF-8"),
        pytest.param(lambda path: path.write_bytes(b" " * (5 << 20)), "OCIGPU-ENG-1", id="too large"),
        pytest.param(lambda path: path.symlink_to(path.name), "OCIGPU-ENG-1", id="a link to itself"),
        pytest.param(
            lambda path: path.with_name("daemon.json.ocigpu-record").write_text("{}"), "OCIGPU-ENG-1", id="a bad record"
        ),
    ],
)
def test_what_cannot_be_read_is_an_error_and_stays(host: Path, make: Any, code: str) -> None:
    (host / "etc/docker").mkdir(parents=True)
    make(host / "etc/docker/daemon.json")
    for act in (configure, remove):
        with pytest.raises(OcigpuError) as caught:
            act(host, "docker")
        assert caught.value.code == code
        assert "\n" not in caught.value.message
    assert len(list((host / "etc/docker").iterdir())) == 1


def test_a_broken_import_is_an_error_that_names_its_file(host: Path) -> None:
    put(host, PATHS["containerd"], 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n')
    put(host, "/etc/containerd/conf.d/a.toml", "x = \n")
    with pytest.raises(OcigpuError, match=r"conf.d/a.toml: not TOML: .*line 1, column 5"):
        configure(host, "containerd")


def test_imports_that_go_round_are_read_once(host: Path) -> None:
    put(host, PATHS["containerd"], 'version = 2\nimports = ["a.toml"]\n')
    put(host, "/etc/containerd/a.toml", 'version = 2\nimports = ["config.toml", "a.toml"]\n')
    (status,) = [status for status in read_engine_status(str(host)) if status.engine == "containerd"]
    assert status.files == ("/etc/containerd/config.toml", "/etc/containerd/a.toml")


@pytest.mark.parametrize("fails", range(3))
def test_a_write_that_fails_leaves_everything_as_it_was(
    host: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    put(host, PATHS["containerd"], "version = 2\n")
    before = snapshot(host)
    real, calls = Root.write, []

    def write(root: Root, file: EngineFile, text: str) -> None:
        calls.append(file.path)
        if len(calls) == fails + 2:
            raise OcigpuError("OCIGPU-ENG-4", "no space")
        real(root, file, text)

    monkeypatch.setattr(Root, "write", write)
    with pytest.raises(OcigpuError, match="no space"):
        configure(host, "containerd", drop_in="/etc/containerd/conf.d/gpus.toml")
    assert snapshot(host) == before


def test_a_file_that_somebody_changes_meanwhile_is_not_overwritten(host: Path) -> None:
    put(host, PATHS["docker"], DAEMON)
    with Root(str(host)) as root:
        plan = plan_configuration(root, options(host, "docker"))
        put(host, PATHS["docker"], '{"debug": true}')
        before = snapshot(host)
        with pytest.raises(OcigpuError, match="another program changed it") as caught:
            carry_out(root, plan)
    assert caught.value.code == "OCIGPU-ENG-4"
    assert snapshot(host) == before


@pytest.mark.parametrize("record", [{"created": 1}, {"applied": [{"keys": []}]}], ids=["created", "keys"])
def test_a_record_of_other_types_is_an_error(host: Path, record: dict[str, Any]) -> None:
    configure(host, "docker")
    path = host / "etc/docker/daemon.json.ocigpu-record"
    path.write_text(json.dumps({**json.loads(path.read_text()), **record}))
    with pytest.raises(OcigpuError, match="not a record of ocigpu") as caught:
        remove(host, "docker")
    assert caught.value.code == "OCIGPU-ENG-1"


def test_an_engine_that_is_not_there_is_noted(host: Path) -> None:
    assert "docker does not seem to be installed here" in configure(host, "docker").notes
    put(host, "/usr/bin/crio", "", 0o755)
    assert configure(host, "crio").notes == ()


def test_a_process_that_was_killed_before_the_file_was_written_leaves_nothing_to_undo(host: Path) -> None:
    file = put(host, PATHS["docker"], DAEMON)
    configure(host, "docker", default=True)
    file.write_text(DAEMON)  # as it is between the record and the file
    remove(host, "docker")
    assert file.read_text() == DAEMON
    assert list(file.parent.iterdir()) == [file]


def test_labels_of_a_file_are_kept(host: Path) -> None:
    file = put(host, PATHS["docker"], DAEMON)
    try:
        os.setxattr(file, "user.site", b"mine")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error.strerror}")
    configure(host, "docker")
    assert os.getxattr(file, "user.site") == b"mine"


def test_only_one_run_at_a_time_changes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ocigpu.engines import files

    monkeypatch.setattr(files, "LOCK_SECONDS", 0)
    with files.locked(), pytest.raises(OcigpuError, match="another ocigpu is changing"), files.locked():
        raise AssertionError
    with files.locked():
        pass


def test_a_lock_that_cannot_be_had_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ocigpu.engines import files

    monkeypatch.setenv("HOME", f"{tmp_path}/none")  # as of nobody
    monkeypatch.setattr(files, "open_lock", lambda _name: -1)
    with pytest.raises(OcigpuError, match=f"lock {tmp_path}/none: No such file or directory"), files.locked():
        raise AssertionError


CONFIGS = st.dictionaries(
    st.sampled_from(["debug", "runtimes", "default-runtime", "features", "log-opts"]),
    st.one_of(st.booleans(), st.just("runc"), st.dictionaries(st.sampled_from(["ocigpu", "cdi", "x"]), st.booleans())),
)
RUNS = st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from(["ocigpu", "nvidia"])), min_size=1, max_size=3)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CONFIGS, st.sampled_from([None, 2, "\t"]), RUNS)
def test_docker_configured_in_any_way_and_set_back_is_what_it_was(
    host: Path, config: dict[str, Any], indent: Any, runs: list[tuple[bool, bool, str]]
) -> None:
    file = put(host, PATHS["docker"], json.dumps(config, indent=indent))
    before = snapshot(host)
    refused: list[OcigpuError] = []
    for default, cdi, name in runs:
        try:
            configure(host, "docker", default=default, cdi=cdi, name=name)
        except OcigpuError as error:
            refused.append(error)
    assert {error.code for error in refused} <= {"OCIGPU-ENG-2"}
    remove(host, "docker")
    assert snapshot(host) == before
    assert file.exists()


TEXTS = {
    "docker": DAEMON,
    "containerd": CONTAINERD.replace("/usr/bin/crun", "/usr/bin/c"),
    "crio": '[crio.runtime]\ndefault_runtime = "x"\n[crio.runtime.runtimes.crun]\nruntime_path = "x"\n',
    "podman": '[engine]\nruntime = "x"\n[engine.runtimes]\nx = ["a", "b"]\n',
}
DAMAGE = st.lists(
    st.tuples(
        st.floats(0, 0.999),
        st.integers(0, 2),
        st.sampled_from(["", "{}", "[]", '"', "=", "\n", "#", "1", "[[a]]\n", "."]),
    ),
    max_size=4,
)


@pytest.mark.rest
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(PATHS)), DAMAGE)
def test_a_damaged_file_is_an_error_or_comes_back(
    host: Path, engine: str, damage: list[tuple[float, int, str]]
) -> None:
    text = TEXTS[engine]
    for place, length, new in damage:
        start = int(place * len(text))
        text = text[:start] + new + text[start + length :]
    file = put(host, PATHS[engine], text)
    before = snapshot(host)
    errors: list[OcigpuError] = []
    read_engine_status(str(host))
    for act in (configure, remove):
        try:
            act(host, engine, default=True, cdi=True)
        except OcigpuError as error:
            errors.append(error)
    assert all(error.code.startswith("OCIGPU-ENG-") for error in errors)
    assert snapshot(host) == before
    file.unlink()
