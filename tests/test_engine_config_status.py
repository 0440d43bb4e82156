"""What configuration files say of ocigpu, read below a root of the test."""

import json
import os
from pathlib import Path

import pytest
from support.engine_roots import PATHS, RUNTIME, make_host, options, put

from ocigpu.core.errors import OcigpuError
from ocigpu.engines import places
from ocigpu.engines.configure import main_config
from ocigpu.engines.places import parse_release, running_daemons
from ocigpu.engines.status import EngineStatus, read_engine_status, read_spec_dirs

V2, V3 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return make_host(tmp_path)


def status_of(host: Path, engine: str, flavour: str = "") -> EngineStatus:
    (found,) = [
        status for status in read_engine_status(str(host)) if (status.engine, status.flavour) == (engine, flavour)
    ]
    return found


def process(host: Path, pid: int, command: str, ids: str = "", uid: int = 0) -> None:
    put(host, f"/proc/{pid}/cmdline", command.replace(" ", "\0") + "\0")
    put(host, f"/proc/{pid}/status", f"Name:\tx\nNSpid:\t{ids or pid}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")


def test_a_rootless_daemon_does_not_read_roots_file(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose own file does not exist yet: what root has configured is not its configuration."""
    own = "/home/somebody/.config/docker/daemon.json"
    monkeypatch.setattr(places, "home_config", lambda _root, name: f"/home/somebody/.config/{name}")
    monkeypatch.setattr("os.geteuid", lambda: 4321)
    put(host, "/etc/docker/daemon.json", json.dumps({"runtimes": {"ocigpu": {"path": RUNTIME}}}))
    process(host, 7, "dockerd --rootless", uid=4321)
    roots, users = status_of(host, "docker"), status_of(host, "docker", "rootless")
    assert (roots.configured, roots.running) == (True, False)
    assert (users.target, users.configured, users.running) == (own, False, True)
    assert main_config(options(host, "docker")) == own


def test_a_process_of_another_user_is_no_engine(host: Path) -> None:
    """Its name and its words are its user's choice, and the file that they name would be edited by root."""
    process(host, 7, "containerd --config /home/mallory/config.toml", uid=os.geteuid() + 1)
    assert running_daemons(str(host)) == []
    process(host, 8, "containerd --config /etc/containerd/other.toml")
    process(host, 9, "dockerd", uid=os.geteuid())
    assert [(daemon.engine, daemon.config) for daemon in running_daemons(str(host))] == [
        ("containerd", "/etc/containerd/other.toml"),
        ("docker", ""),
    ]


def test_a_root_without_engines_has_nothing(host: Path) -> None:
    for status in read_engine_status(str(host)):
        assert (status.installed, status.running, status.files, status.runtimes) == (False, False, (), ())
        assert (status.configured, status.is_default, status.problems, status.gpus_hook) == (False, False, (), "")


@pytest.mark.parametrize(
    ("engine", "path", "text", "default", "cdi"),
    [
        pytest.param("docker", "", {"features": {"cdi": True}}, "", "on", id="Docker, CDI on"),
        pytest.param("docker", "", {"features": {"cdi": False}}, "", "off", id="Docker, CDI off"),
        pytest.param("docker", "", {"default-runtime": "kata"}, "kata", "unknown", id="Docker, another default"),
        pytest.param("containerd", "", "", "", "unknown", id="containerd, version 1"),
        pytest.param("containerd", "", "version = 2", "", "unknown", id="containerd, CDI by its version"),
        pytest.param("containerd", "", "version = 3", "", "on", id="containerd 2"),
        pytest.param("containerd", "", "version = 4", "", "on", id="containerd 2.3"),
        pytest.param(
            "containerd", "", f'version = 3\n[plugins."{V3}"]\nenable_cdi = false', "", "off", id="containerd 2, off"
        ),
        pytest.param(
            "containerd", "", f'version = 2\n[plugins."{V2}".containerd]\ndefault_runtime_name = "x"', "x", "unknown",
            id="containerd, default",
        ),
        pytest.param("crio", "/etc/crio/crio.conf", '[crio.runtime]\ndefault_runtime = "x"', "x", "on", id="CRI-O"),
        pytest.param("podman", "/etc/containers/containers.conf", '[engine]\nruntime = "x"', "x", "on", id="Podman"),
    ],
)  # fmt: skip
def test_defaults_and_cdi_are_read(host: Path, engine: str, path: str, text: object, default: str, cdi: str) -> None:
    put(host, path or PATHS[engine], text if isinstance(text, str) else json.dumps(text))
    status = status_of(host, engine)
    assert (status.default_runtime, status.cdi, status.problems) == (default, cdi, ())


def test_a_missing_program_of_ours_is_a_problem_and_one_of_others_is_not(host: Path) -> None:
    runtimes = {"a": {"path": "/opt/ocigpu-runtime"}, "b": {"path": RUNTIME}, "c": {"path": "/opt/kata"}}
    put(host, PATHS["docker"], json.dumps({"runtimes": runtimes, "default-runtime": "b"}))
    status = status_of(host, "docker")
    assert [(entry.name, entry.exists, entry.ours) for entry in status.runtimes] == [
        ("a", False, True),
        ("b", True, True),
        ("c", False, False),
    ]
    assert status.is_default
    assert status.problems == ('runtime "a": /opt/ocigpu-runtime does not exist',)


@pytest.mark.parametrize(
    ("engine", "path", "text"),
    [
        pytest.param("docker", "/etc/docker/daemon.json", "{", id="not JSON"),
        pytest.param("docker", "/etc/docker/daemon.json", '{"runtimes": []}', id="runtimes a list"),
        pytest.param("docker", "/etc/docker/daemon.json", '{"runtimes": {"a": 1}}', id="an entry a number"),
        pytest.param("docker", "/etc/docker/daemon.json", '{"cdi-spec-dirs": 1}', id="directories a number"),
        pytest.param("docker", "/etc/docker/daemon.json", '{"cdi-spec-dirs": "/x"}', id="directories a text"),
        pytest.param("containerd", "/etc/containerd/config.toml", "a", id="not TOML"),
        pytest.param("containerd", "/etc/containerd/config.toml", 'version = "2"', id="version a text"),
        pytest.param("containerd", "/etc/containerd/config.toml", "version = -1", id="version -1"),
        pytest.param("containerd", "/etc/containerd/config.toml", "version = 2\nplugins = 1", id="plugins a number"),
        pytest.param("containerd", "/etc/containerd/config.toml", "[plugins]\ncri = 1", id="plugin a number"),
        pytest.param("crio", "/etc/crio/crio.conf", "[crio]\nruntime = 1", id="CRI-O, table a number"),
        pytest.param("podman", "/etc/containers/containers.conf", "engine = 1", id="Podman, table a number"),
        pytest.param("podman", "/etc/containers/containers.conf", "[engine.runtimes]\na = 1", id="paths a number"),
    ],
)  # fmt: skip
def test_what_cannot_be_understood_is_a_problem(host: Path, engine: str, path: str, text: str) -> None:
    put(host, path, text)
    status = status_of(host, engine)
    assert len(status.problems) == 1
    assert not status.configured


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        pytest.param("/etc/docker/daemon.json", '{"cdi-spec-dirs": ["/a", "/b"]}', ["/a", "/b"], id="Docker"),
        pytest.param("/etc/docker/daemon.json", '{"cdi\\u002dspec-dirs": ["/a"]}', ["/a"], id="Docker, an escape"),
        pytest.param("/etc/docker/daemon.json", '{"features": {"cdi": true}}', [], id="Docker, none"),
        pytest.param(
            PATHS["containerd"], f'version = 2\n[plugins."{V2}"]\ncdi_spec_dirs = ["/a"]', ["/a"], id="containerd"
        ),
        pytest.param(
            PATHS["containerd"], f'version = 2\n[plugins."{V2}"]\n "\\u0063di_spec\\u005fdirs" = ["/a"]', ["/a"],
            id="containerd, an escape",
        ),
        pytest.param(
            PATHS["containerd"], 'version = 2\nimports = ["conf.d/*.toml"]', ["/of-z"], id="containerd, imported"
        ),
        pytest.param(
            PATHS["containerd"], f'version = 2\n[plugins."{V2}"]\n  # cdi_spec_dirs = ["/a"]', [], id="a comment"
        ),
        pytest.param(
            PATHS["containerd"],
            f'version = 2\nplugins."{V2}" = {{ x = """\n# """, cdi_spec_dirs = ["/a"] }}', ["/a"],
            id="no comment",
        ),
        pytest.param("/etc/crio/crio.conf", '[crio.runtime]\ncdi_spec_dirs = ["/a"]', ["/a"], id="CRI-O"),
        pytest.param(PATHS["crio"], '[crio.runtime]\ncdi_spec_dirs = ["/a"]', ["/a"], id="CRI-O, a drop-in"),
        pytest.param("/etc/crio/crio.conf.d/.x", '[crio.runtime]\ncdi_spec_dirs = ["/a"]', [], id="CRI-O, hidden"),
        pytest.param(PATHS["podman"], '[engine]\ncdi_spec_dirs = ["/a"]', ["/a"], id="Podman, a drop-in"),
        pytest.param(
            "/usr/share/containers/containers.conf", '[engine]\ncdi_spec_dirs = ["/a"]', ["/a"], id="Podman's own"
        ),
        pytest.param("/srv/daemon.json", '{"cdi-spec-dirs": ["/a"]}', ["/a"], id="a file of a running daemon"),
        pytest.param("/etc/docker/daemon.json", '{"cdi-spec-dirs": 1}', [], id="a number"),
        pytest.param("/etc/docker/daemon.json", '{"cdi-spec-dirs"', [], id="not JSON"),
    ],
)  # fmt: skip
def test_the_directories_of_specifications_alone_are_those_of_the_status(
    host: Path, path: str, text: str, expected: list[str]
) -> None:
    put(host, "/etc/containerd/conf.d/z.toml", f'version = 2\n[plugins."{V2}"]\ncdi_spec_dirs = ["/of-z"]\n')
    process(host, 7, "/usr/bin/dockerd --config-file /srv/daemon.json")
    put(host, path, text)
    named = [one for status in read_engine_status(str(host)) for one in status.cdi_spec_dirs]
    assert sorted(read_spec_dirs(str(host))) == sorted(named) == expected


def test_imports_go_round_only_once_and_later_ones_win(host: Path) -> None:
    entry = f'version = 2\n[plugins."{V2}".containerd.runtimes.ocigpu.options]\nBinaryName = "{RUNTIME}"\n'
    put(host, PATHS["containerd"], 'version = 2\nimports = ["conf.d/*.toml", "./b.toml", "/no/such/file"]\n')
    put(host, "/etc/containerd/conf.d/z.toml", 'version = 2\nimports = ["../config.toml"]\n' + entry[12:])
    put(host, "/etc/containerd/b.toml", f'version = 2\n[plugins."{V2}".containerd]\ndefault_runtime_name = "ocigpu"\n')
    status = status_of(host, "containerd")
    assert status.files == (
        "/etc/containerd/config.toml",
        "/etc/containerd/conf.d/z.toml",
        "/etc/containerd/b.toml",
    )
    assert status.is_default


def test_engines_of_snaps_and_kubernetes_are_found(host: Path) -> None:
    put(host, "/var/snap/docker/current/config/daemon.json", json.dumps({"runtimes": {"a": {"path": RUNTIME}}}))
    directory = "/var/lib/rancher/rke2/agent/etc/containerd"
    put(host, f"{directory}/config.toml", "# File generated by rke2. DO NOT EDIT.\nversion = 2\n")
    assert status_of(host, "docker", "snap").configured
    assert status_of(host, "containerd", "rke2").installed
    assert not status_of(host, "docker").configured


@pytest.mark.parametrize("option", ["--config-file {}", "--config-file={}", "--debug --config-file {}"])
def test_a_daemon_that_runs_with_a_file_of_its_own_is_found(host: Path, option: str) -> None:
    process(host, 7, f"/usr/bin/dockerd {option.format('/srv/daemon.json')}")
    put(host, "/srv/daemon.json", '{"default-runtime": "x"}')
    assert status_of(host, "docker", "custom").default_runtime == "x"
    assert status_of(host, "docker", "custom").running
    assert not status_of(host, "docker").running
    assert main_config(options(host, "docker")) == "/srv/daemon.json"


def test_daemons_that_are_not_this_roots_own_are_not_counted(host: Path) -> None:
    process(host, 7, "/usr/bin/dockerd")
    process(host, 8, "containerd --config /var/run/docker/containerd/containerd.toml")
    process(host, 11, "containerd --config /srv/exec-root/containerd/containerd.toml")
    process(host, 9, "/usr/local/bin/containerd --config /kind/config.toml", "9 1")  # in a container
    process(host, 10, "bash -c dockerd")
    assert status_of(host, "docker").running
    assert not status_of(host, "containerd").running
    assert main_config(options(host, "containerd")) == PATHS["containerd"]


def test_several_daemons_must_be_told_apart(host: Path) -> None:
    process(host, 7, "/usr/bin/containerd")
    process(host, 8, "/var/lib/rancher/k3s/data/current/bin/containerd -c /var/lib/rancher/k3s/config.toml")
    with pytest.raises(OcigpuError, match=r"runs several times, with /etc/containerd/config\.toml, /var/lib") as caught:
        main_config(options(host, "containerd"))
    assert caught.value.hint == "specify one: --engine-config FILE"


@pytest.mark.parametrize(
    ("content", "ours"), [("#!/bin/sh\n# ocigpu-hook\n", True), ("\x7fELF", False), ("#!/bin/sh\nexec x.real\n", False)]
)
def test_the_owner_of_a_hook_is_told(host: Path, content: str, ours: bool) -> None:
    put(host, "/usr/local/sbin/nvidia-container-runtime-hook", content, 0o755)
    status = status_of(host, "docker")
    assert (status.gpus_hook, status.gpus_hook_ours) == ("/usr/local/sbin/nvidia-container-runtime-hook", ours)


def test_a_copy_of_our_compiled_hook_is_ours(host: Path) -> None:
    path = "/usr/local/sbin/nvidia-container-runtime-hook"
    put(host, path, "", 0o755)
    (host / path.lstrip("/")).write_bytes(
        b"\x7fELF\2\1\1\xff\xfe ocigpu\0\0ocigpu.hook\0"
    )  # as packaging/stub.h marks it
    assert status_of(host, "docker").gpus_hook_ours


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("Docker version 20.10.24+dfsg1, build 297e128", "20.10.24"),
        ("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u1", "1.6.20"),
        ("containerd containerd.io 1.7.27 05044ec0a9a75232cad458027ca83437aae3f4da", "1.7.27"),
        ("containerd github.com/containerd/containerd/v2 v2.0.0 207ad711eabd375a01713109a8a197d197ff6542", "2.0.0"),
        ("podman version 4.3.1", "4.3.1"),
        ("crio version 1.24.6\nVersion:        1.24.6\nGoVersion:      go1.19", "1.24.6"),
        ("unknown", ""),
    ],
)
def test_the_release_is_in_what_a_program_says(text: str, release: str) -> None:
    assert parse_release(text) == release


def test_a_hook_that_may_not_be_executed_is_none(host: Path) -> None:
    put(host, "/usr/bin/nvidia-container-runtime-hook", "#!/bin/sh\n")
    assert status_of(host, "docker").gpus_hook == ""


def test_a_link_with_the_vendors_name_is_ours(host: Path) -> None:
    put(host, "/etc/docker/daemon.json", '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}')
    link = host / "usr/bin/nvidia-container-runtime"
    link.symlink_to("ocigpu-runtime")
    assert status_of(host, "docker").configured
    link.unlink()
    put(host, "/usr/bin/nvidia-container-runtime", "#!/bin/sh\n", 0o755)
    assert not status_of(host, "docker").configured
