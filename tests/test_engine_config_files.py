"""Engines below a root of the test configured and set back: files, backups, links, and what is refused."""

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ocigpu.engines.carry_out import carry_out
from ocigpu.engines.configure import Options, Plan, plan_configuration
from ocigpu.engines.files import File, Root
from ocigpu.engines.remove import plan_removal
from ocigpu.engines.status import read_engine_status
from ocigpu.engines.wanted import Wanted
from ocigpu.errors import OcigpuError

RUNTIME = "/usr/bin/ocigpu-runtime"
PATHS = {
    "docker": "/etc/docker/daemon.json",
    "containerd": "/etc/containerd/config.toml",
    "crio": "/etc/crio/crio.conf.d/99-ocigpu.conf",
    "podman": "/etc/containers/containers.conf.d/99-ocigpu.conf",
}
DAEMON = '{\n  "default-runtime": "nvidia",\n  "runtimes": {"nvidia": {"path": "n"}},\n  "features": {"x": true}\n}'
V2 = "io.containerd.grpc.v1.cri"
CONTAINERD = f"""\
version = 2 # ours
[plugins."{V2}".cni]
  bin_dir = "/home/kubernetes/bin"
[plugins."{V2}".containerd]
  default_runtime_name = "crun"
[plugins."{V2}".containerd.runtimes.crun]
  runtime_type = "io.containerd.runc.v2"
  pod_annotations = ["x.*"]
[plugins."{V2}".containerd.runtimes.crun.options]
  BinaryName = "/usr/bin/crun"
  SystemdCgroup = true
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A root with the programs of ocigpu and nothing of an engine."""
    for name in ("ocigpu-runtime", "ocigpu-hook"):
        path = tmp_path / "usr/bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n# ocigpu\n")
        path.chmod(0o755)
    return tmp_path


def put(host: Path, path: str, text: str, mode: int = 0o644) -> Path:
    file = host / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)
    return file


def options(host: Path, engine: str, **changes: Any) -> Options:
    wanted = Wanted("ocigpu", RUNTIME, False, False)
    own = {key: changes.pop(key) for key in list(changes) if key in Wanted._fields}
    return Options(engine, wanted._replace(**own), root=str(host), **changes)


def configure(host: Path, engine: str, **changes: Any) -> Plan:
    with Root(str(host)) as root:
        plan = plan_configuration(root, options(host, engine, **changes))
        carry_out(root, plan)
    return plan


def remove(host: Path, engine: str, **changes: Any) -> Plan:
    with Root(str(host)) as root:
        plan = plan_removal(root, options(host, engine, **changes))
        carry_out(root, plan)
    return plan


def snapshot(host: Path) -> dict[str, Any]:
    """Every file, directory and link below a root with content, mode and owner."""
    found: dict[str, Any] = {}
    for path in sorted(host.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(host))] = (stat.filemode(status.st_mode), status.st_uid, status.st_gid, content)
    return found


def read(host: Path, engine: str, path: str = "") -> Any:
    file = host / (path or PATHS[engine]).lstrip("/")
    return json.loads(file.read_text()) if file.suffix == ".json" else tomllib.loads(file.read_text())


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


def test_a_containerd_entry_is_like_that_of_the_runtime_in_use(host: Path) -> None:
    put(host, PATHS["containerd"], CONTAINERD)
    configure(host, "containerd", default=True)
    configure(host, "containerd", cdi=True)  # the entry still follows crun
    plugin = read(host, "containerd")["plugins"][V2]
    assert plugin["containerd"]["runtimes"]["ocigpu"] == {
        "runtime_type": "io.containerd.runc.v2",
        "pod_annotations": ["x.*"],
        "options": {"BinaryName": RUNTIME, "SystemdCgroup": True},
    }
    assert plugin["enable_cdi"] is True
    assert plugin["cni"] == {"bin_dir": "/home/kubernetes/bin"}


@pytest.mark.parametrize(
    ("runtime", "options_wanted"),
    [
        pytest.param('runtime_type = "io.containerd.kata.v2"', {"BinaryName": RUNTIME}, id="not runc's shim"),
        pytest.param('runtime_type = "io.containerd.runtime.v1.linux"', {"Runtime": RUNTIME}, id="the first shim"),
        pytest.param('options = { BinaryName = "/opt/ocigpu-runtime", IoGid = 5 }', {"BinaryName": RUNTIME}, id="ours"),
    ],
)
def test_a_containerd_entry_follows_only_runtimes_like_runc(
    host: Path, runtime: str, options_wanted: dict[str, str]
) -> None:
    put(host, PATHS["containerd"], f'version = 2\n[plugins."{V2}".containerd.runtimes.runc]\n{runtime}\n')
    configure(host, "containerd")
    entry = read(host, "containerd")["plugins"][V2]["containerd"]["runtimes"]["ocigpu"]
    assert entry["options"] == options_wanted


@pytest.mark.parametrize(
    ("text", "plugin"),
    [
        pytest.param('disabled_plugins = ["restart"]\n', "cri", id="no version is version 1"),
        pytest.param("version = 1\n", "cri", id="version 1"),
        pytest.param("version = 2\n", V2, id="version 2"),
        pytest.param("version = 3\n", "io.containerd.cri.v1.runtime", id="version 3"),
    ],
)
def test_the_version_of_a_containerd_file_says_which_table(host: Path, text: str, plugin: str) -> None:
    put(host, PATHS["containerd"], text)
    configure(host, "containerd", cdi=True, default=True)
    table = read(host, "containerd")["plugins"][plugin]
    assert table["enable_cdi"] is True
    assert table["containerd"]["default_runtime_name"] == "ocigpu"
    assert set(table["containerd"]["runtimes"]) == {"ocigpu", "runc"}
    remove(host, "containerd")
    assert (host / PATHS["containerd"].lstrip("/")).read_text() == text


def test_a_containerd_drop_in_is_imported_by_its_own_name(host: Path) -> None:
    put(host, PATHS["containerd"], "version = 2\noom_score = 0\n")
    before = snapshot(host)
    drop_in = "/etc/containerd/conf.d/gpus.toml"
    plan = configure(host, "containerd", drop_in=drop_in, default=True)
    assert [edit.file.path for edit in plan.edits] == [drop_in, PATHS["containerd"]]
    assert read(host, "containerd") == {"version": 2, "imports": [drop_in], "oom_score": 0}
    assert read(host, "containerd", drop_in)["version"] == 2
    (status,) = [status for status in read_engine_status(str(host)) if status.engine == "containerd"]
    assert status.is_default
    assert status.files == (PATHS["containerd"], drop_in)
    assert not configure(host, "containerd", drop_in=drop_in).changed
    remove(host, "containerd")  # the record of the main file names the drop-in
    assert snapshot(host) == before


def test_a_drop_in_that_a_pattern_imports_already_needs_no_import(host: Path) -> None:
    text = 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n'
    file = put(host, PATHS["containerd"], text)
    before = snapshot(host)
    configure(host, "containerd", drop_in="/etc/containerd/conf.d/gpus.toml")
    assert file.read_text() == text
    remove(host, "containerd", drop_in="/etc/containerd/conf.d/gpus.toml")
    assert snapshot(host) == before


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        pytest.param({"config.toml": CONTAINERD}, "leave out --drop-in", id="in the main file"),
        pytest.param(
            {
                "config.toml": 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n',
                "conf.d/99-nvidia.toml": CONTAINERD,
            },
            "--drop-in /etc/containerd/conf.d/99-nvidia.toml",
            id="in another drop-in",
        ),
    ],
)
def test_a_drop_in_that_would_hide_settings_from_an_old_containerd_is_refused(
    host: Path, files: dict[str, str], hint: str
) -> None:
    for name, text in files.items():
        put(host, f"/etc/containerd/{name}", text)
    before = snapshot(host)
    with pytest.raises(OcigpuError) as caught:
        configure(host, "containerd", drop_in="/etc/containerd/conf.d/gpus.toml")
    assert (caught.value.code, caught.value.hint) == ("OCIGPU-ENG-2", hint)
    assert snapshot(host) == before
    if "nvidia" in hint:
        drop_in = "/etc/containerd/conf.d/99-nvidia.toml"
        configure(host, "containerd", drop_in=drop_in)
        assert RUNTIME in (host / drop_in.lstrip("/")).read_text()
        remove(host, "containerd", drop_in=drop_in)
        assert snapshot(host) == before


@pytest.mark.parametrize("name", ["config.toml", "config-v3.toml"])
@pytest.mark.parametrize("with_template", [True, False], ids=["template", "no template"])
def test_k3s_gets_a_template(host: Path, name: str, with_template: bool) -> None:
    directory = "/var/lib/rancher/k3s/agent/etc/containerd"
    version = 3 if "v3" in name else 2
    put(host, f"{directory}/config.toml", f"# File generated by k3s. DO NOT EDIT.\nversion = {version}\n")
    template = '{{ template "base" . }}\n\n# mirrors\n[debug]\n  level = {{ .Level | quote }}'
    if with_template:
        put(host, f"{directory}/{name}.tmpl", template)
    before = snapshot(host)
    config = f"{directory}/config.toml"
    configure(host, "containerd", config=config)
    assert not configure(host, "containerd", config=config).changed
    text = (host / f"{directory}/{name}.tmpl".lstrip("/")).read_text()
    assert text.startswith(template if with_template else '{{ template "base" . }}\n')
    ours = tomllib.loads(text.partition("configure\n")[2])
    plugin = "io.containerd.cri.v1.runtime" if version == 3 else V2
    assert ours["plugins"][plugin]["containerd"]["runtimes"]["ocigpu"]["options"]["BinaryName"] == RUNTIME
    remove(host, "containerd", config=config)
    assert snapshot(host) == before


def test_crio_gets_an_entry_like_that_of_its_own_runtime(host: Path) -> None:
    packaged = put(
        host,
        "/etc/crio/crio.conf.d/10-crio.conf",
        '[crio.runtime]\ndefault_runtime = "crun"\n'
        '[crio.runtime.runtimes.crun]\nruntime_path = "/usr/libexec/crio/crun"\n'
        'monitor_path = "/usr/libexec/crio/conmon"\n'
        'allowed_annotations = [\n "io.containers.trace-syscall",\n]\n',
    )
    before = snapshot(host)
    configure(host, "crio", default=True)
    assert read(host, "crio") == {
        "crio": {
            "runtime": {
                "default_runtime": "ocigpu",
                "runtimes": {
                    "ocigpu": {
                        "runtime_path": RUNTIME,
                        "runtime_type": "oci",
                        "monitor_path": "/usr/libexec/crio/conmon",
                        "allowed_annotations": ["io.containers.trace-syscall"],
                    }
                },
            }
        }
    }
    assert sorted(path.name for path in packaged.parent.iterdir()) == ["10-crio.conf", "99-ocigpu.conf"]
    remove(host, "crio")
    assert snapshot(host) == before


def test_the_hook_is_linked_where_dockerd_looks_and_goes_with_the_removal(host: Path) -> None:
    before = snapshot(host)
    configure(host, "docker", gpus_hook=True)
    assert os.readlink(host / "usr/bin/nvidia-container-runtime-hook") == "ocigpu-hook"
    (status,) = [status for status in read_engine_status(str(host)) if status.engine == "docker"]
    assert (status.gpus_hook, status.gpus_hook_ours) == ("/usr/bin/nvidia-container-runtime-hook", True)
    assert not configure(host, "docker", gpus_hook=True).changed
    remove(host, "docker")
    assert snapshot(host) == before


def test_the_hook_of_a_shim_elsewhere_is_linked_by_its_path(host: Path) -> None:
    for name in ("ocigpu-runtime", "ocigpu-hook"):
        put(host, f"/opt/ocigpu/{name}", "#!/bin/sh\n", 0o755)
    (host / "usr/local/bin").mkdir(parents=True)
    configure(host, "docker", gpus_hook=True, path="/opt/ocigpu/ocigpu-runtime")
    assert os.readlink(host / "usr/local/bin/nvidia-container-runtime-hook") == "/opt/ocigpu/ocigpu-hook"


@pytest.mark.parametrize("where", ["/usr/bin", "/usr/local/bin", "/opt/bin"])
def test_a_hook_of_somebody_else_is_not_replaced(host: Path, where: str) -> None:
    put(host, f"{where}/nvidia-container-runtime-hook", "\x7fELF", 0o755)
    before = snapshot(host)
    with pytest.raises(OcigpuError, match="is not ocigpu's") as caught:
        configure(host, "docker", gpus_hook=True, hook_directory="/opt/bin" if where == "/opt/bin" else "")
    assert caught.value.code == "OCIGPU-ENG-2"
    assert snapshot(host) == before


def test_a_link_that_somebody_has_changed_stays(host: Path) -> None:
    configure(host, "docker", gpus_hook=True)
    link = host / "usr/bin/nvidia-container-runtime-hook"
    link.unlink()
    link.symlink_to("other-hook")
    assert "no longer ocigpu's link" in remove(host, "docker").notes[0]
    assert os.readlink(link) == "other-hook"


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
    with pytest.raises(OcigpuError, match="somebody else can replace files") as caught:
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

    def write(root: Root, file: File, text: str) -> None:
        calls.append(file.path)
        if len(calls) == fails + 2:
            raise OcigpuError("OCIGPU-ENG-4", "no space")
        real(root, file, text)

    monkeypatch.setattr(Root, "write", write)
    with pytest.raises(OcigpuError, match="no space"):
        configure(host, "containerd", drop_in="/etc/containerd/conf.d/gpus.toml")
    assert snapshot(host) == before


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

    monkeypatch.setattr(files, "_LOCK_SECONDS", 0)
    with files.locked(), pytest.raises(OcigpuError, match="another ocigpu is changing"), files.locked():
        raise AssertionError
    with files.locked():
        pass


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
