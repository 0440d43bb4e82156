"""Docker that cannot start, and engines that do not run: found, explained by their words, and no host is ready then."""

import json
import subprocess
from pathlib import Path

import pytest
from doctor.conftest import Broken
from support import requirements
from support.engine_roots import configure, make_host, put
from support.fixtures import Run

from ocigpu.doctor import engines as module
from ocigpu.doctor.docker import check_swarm
from ocigpu.doctor.engines import check_configured, check_default, check_problems, check_running, does_run
from ocigpu.doctor.findings import Finding
from ocigpu.doctor.host import Host
from ocigpu.doctor.live import DockerAnswer
from ocigpu.doctor.messages import find_messages
from ocigpu.doctor.report import run_checks
from ocigpu.doctor.spec_files import Specs
from ocigpu.doctor.system import check_selinux
from ocigpu.doctor.works import find_works, is_ready
from ocigpu.engines.status import EngineStatus, RuntimeEntry, read_engine_status

OURS = RuntimeEntry("ocigpu", "/usr/bin/ocigpu-runtime", exists=True, ours=True)
DOCKER = EngineStatus("docker", "", True, False, "/etc/docker/daemon.json", runtimes=(OURS,))
PODMAN = EngineStatus("podman", "", True, False, "/etc/containers/containers.conf")


def host_of(*engines: EngineStatus, answer: DockerAnswer | None = None) -> Host:
    host = Host()
    host.__dict__.update(engines=list(engines), docker=answer, daemons=[], processes={1: "init"})
    return host


@pytest.mark.parametrize(
    ("engine", "path", "text"),
    [
        ("docker", "/etc/docker/daemon.json", '{"default-runtime": "nvidia", "runtimes": {}}'),
        ("podman", "/etc/containers/containers.conf", '[engine]\nruntime = "nvidia"\n'),
        ("crio", "/etc/crio/crio.conf", '[crio.runtime]\ndefault_runtime = "nvidia"\n'),
        (
            "containerd",
            "/etc/containerd/config.toml",
            'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\ndefault_runtime_name = "nvidia"\n',
        ),
    ],
)
def test_a_default_runtime_without_an_entry_is_found_told_and_given_one(
    engine: str, path: str, text: str, tmp_path: Path
) -> None:
    root = make_host(tmp_path)
    put(root, path, text)
    host = Host(str(root))
    mine = [item for item in host.engines if item.engine == engine]
    assert [item.default_missing for item in mine] == [True]
    (note,) = [note for note in configure(root, engine).notes if "default runtime" in note]
    assert f"ocigpu engine configure {engine} --name nvidia" in note
    assert not [note for note in configure(root, engine, name="nvidia").notes if "default runtime" in note]
    assert not any(item.default_missing for item in read_engine_status(str(root)))


@pytest.mark.parametrize("name", ["runc", "crun", "io.containerd.runc.v2", "/usr/bin/crun", ""])
def test_what_engines_bring_without_an_entry_is_a_default(name: str, tmp_path: Path) -> None:
    root = make_host(tmp_path)
    put(root, "/etc/docker/daemon.json", json.dumps({"default-runtime": name}))
    assert not any(item.default_missing for item in read_engine_status(str(root)))


@pytest.mark.root
@pytest.mark.parametrize(
    ("text", "said", "data"),
    [
        (
            '{"runtimess": {"ocigpu": {"path": "/x"}}, "debug": true}',
            "the following directives don't match any configuration option: ocigpu",
            {"runtimes": {"ocigpu": {"path": "/x"}}, "debug": True},
        ),
        (
            '{"debug": true, "zzzzzz": 1}',
            "the following directives don't match any configuration option: zzzzzz",
            {"debug": True},
        ),
        (
            '{"debug": true, "default-runtime": "ocigpu"}',
            (
                "the following directives are specified both as a flag and in the configuration file: default-runtime:"
                " (from flag: runc, from file: ocigpu)"
            ),
            {"debug": True},
        ),
        (
            '{"log-opts": {"runtimes": {}}, "default-runtime": "ocigpu"}',
            "json: cannot unmarshal object into Go struct field Config.log-opts of type string",
            {"log-opts": {"runtimes": {}}, "default-runtime": "ocigpu"},
        ),
        ('{"debug": true}', "", {"debug": True}),
    ],
)
def test_a_file_that_dockerd_refuses_is_corrected(
    text: str, said: str, data: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of Docker 28.5, with the options of its unit; earlier than 23 it cannot be asked."""
    file, dockerd = tmp_path / "daemon.json", tmp_path / "dockerd"
    file.write_text(text)
    line = f"unable to configure the Docker daemon with file {file}: {said}"
    dockerd.write_text(f'#!/bin/sh\n[ "$*" = "-H fd:// --validate" ] || exit 3\n[ -n "{said}" ] || exit 0\n'
                       f'echo "{line}" >&2\nexit 1\n')  # fmt: skip
    dockerd.chmod(0o755)
    monkeypatch.setattr(module, "read_words", lambda _: [str(dockerd), "-H", "fd://"])
    host = host_of(DOCKER._replace(target=str(file), files=(str(file),)))
    host.__dict__["engine_releases"] = {"docker": "23.0.1"}
    (found,) = check_problems(host)
    assert (found.is_bad, said in found.text) == (bool(said), True)
    for fix in found.fixes[:1]:
        subprocess.run(["sh", "-e", "-c", fix], check=True)
    assert json.loads(file.read_text()) == data
    host.__dict__["engine_releases"] = {"docker": "20.10.24"}
    file.write_text(text)
    assert not any(item.is_bad for item in check_problems(host))


@pytest.mark.parametrize("state", ["runs", "default missing", "no systemd"])
def test_a_file_of_a_wrong_type_is_found(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker 28 on Debian: also while dockerd runs with the earlier file, and where "runtimes" is in "log-opts"."""
    file, dockerd = tmp_path / "daemon.json", tmp_path / "dockerd"
    file.write_text('{"log-opts": {"runtimes": {}}}')
    said = "json: cannot unmarshal object into Go struct field Config.log-opts of type string"
    dockerd.write_text(
        f'#!/bin/sh\n[ "$1" = --validate ] || [ "$*" = "--config-file {file} --validate" ] || exit 3\n'
        f'echo "unable to configure the Docker daemon with file {file}: {said}" >&2\nexit 1\n'
    )
    dockerd.chmod(0o755)
    monkeypatch.setattr(module, "read_words", lambda _: [] if state == "no systemd" else [str(dockerd)])
    monkeypatch.setattr(module.places, "find_program", lambda *_: str(dockerd))
    status = DOCKER._replace(target=str(file), files=(str(file),), running=state == "runs")
    status = status._replace(default_missing=state == "default missing")
    host = host_of(status)
    host.__dict__["engine_releases"] = {"docker": "28.5.2"}
    (found,) = check_problems(host)
    assert (found.is_bad, said in found.text) == (True, True)
    assert not any(fix.startswith("sed ") for fix in found.fixes)


@pytest.mark.engine
def test_the_words_of_dockerd_and_podman_are_known(tmp_path: Path, run: Run) -> None:
    """The programs themselves say them: neither gets so far as to start anything."""
    requirements.require(requirements.programs("dockerd", "podman"))
    file = tmp_path / "daemon.json"
    file.write_text('{"default-runtime": "nvidia"}')
    words = ["dockerd", f"--config-file={file}", f"--data-root={tmp_path}/data", f"--exec-root={tmp_path}/exec"]
    words += [f"--pidfile={tmp_path}/pid", f"--host=unix://{tmp_path}/socket", "--bridge=none", "--iptables=false"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode
    (found,) = find_messages(said.stderr, log=True)
    assert found.message.findings[0] == "engine-default-missing"
    conf = tmp_path / "containers.conf"
    conf.write_text('[engine]\nruntime = "nvidia"\n')
    environment = {"PATH": "/usr/bin:/usr/sbin:/bin:/sbin", "HOME": str(tmp_path), "CONTAINERS_CONF": str(conf)}
    said = subprocess.run(["podman", "info"], capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert "engine-default-missing" in find_messages(said.stderr, log=True)[0].message.findings


def test_a_runtime_that_dockerd_was_started_with_needs_no_entry() -> None:
    status = DOCKER._replace(default_runtime="nvidia", default_missing=True)
    answer = DockerAnswer("/run/docker.sock", info={"Runtimes": {"nvidia": {"path": "x"}}})
    assert [item.severity for item in check_default(host_of(status, answer=answer))] == ["ok"]
    assert [item.severity for item in check_default(host_of(status))] == ["error"]


def test_an_engine_that_does_not_run_is_a_finding_and_no_host_is_ready_then() -> None:
    host = host_of(DOCKER)
    (found,) = check_running(host)
    assert (found.severity, found.fixes[0]) == ("error", "systemctl start docker")
    works = find_works(host, [])
    assert (works[-1].works, works[-1].line) == (False, "no: does not run")
    well = [Finding("ok", "fine", name="no-gpu"), Finding("ok", "fine", name="no-driver")]
    assert not is_ready(find_works(host, well), well)


@pytest.mark.parametrize(
    ("answer", "runs"),
    [
        (DockerAnswer("s", info={"ServerVersion": "28.1"}), True),
        (DockerAnswer("s", "connect s: Connection refused"), False),
        (DockerAnswer("s", "connect s: Permission denied", is_shut=True), None),
        (DockerAnswer("s", "dockerd did not answer within 3 s", is_shut=True), None),
        (None, False),
    ],
)
def test_who_may_not_ask_and_who_waits_in_vain_do_not_know(answer: DockerAnswer | None, runs: bool | None) -> None:
    host = host_of(DOCKER, answer=answer)
    assert does_run(host, DOCKER) is runs


def test_what_can_be_told_of_an_engine_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_of(DOCKER, PODMAN)
    monkeypatch.setattr(module, "ways_to_gpus", lambda _, status: ["CDI"] if status.engine == "podman" else [])
    assert [item.severity for item in check_running(host)] == ["note"]
    monkeypatch.setattr(module, "ways_to_gpus", lambda *_: ["CDI"])  # somebody has told Docker of GPUs
    assert [item.severity for item in check_running(host)] == ["warning"]
    host.__dict__["docker_context"] = ("~/.docker/config.json", "desktop-linux", True)
    assert [item.severity for item in check_running(host)] == ["note"]  # it may rest: nobody here asks it
    custom = DOCKER._replace(flavour="custom", target="/srv/daemon.json", running=True)
    assert [item.severity for item in check_running(host_of(DOCKER, custom))] == ["ok"]


def test_the_usual_file_is_no_matter_beside_a_daemon_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads it: what it lacks is no finding, and fixes name the file that is read."""
    usual = DOCKER._replace(runtimes=(), default_missing=True, default_runtime="gone")
    custom = DOCKER._replace(flavour="custom", target="/srv/daemon.json", running=True, runtimes=())
    host = host_of(usual, custom)
    host.__dict__["specs"] = Specs((), ())
    (found,) = check_configured(host)
    assert found.evidence[0].path == "/srv/daemon.json"
    assert found.fixes[0] == "ocigpu engine configure docker --engine-config /srv/daemon.json"
    assert [item.severity for item in check_default(host)] == ["not-checked"]
    assert [item.severity for item in check_running(host)] == ["ok"]


@pytest.mark.parametrize(
    ("release", "checker"),
    [
        ("20.10.24", "python3 -m json.tool"),
        ("", "python3 -m json.tool"),
        ("23.0.1", "dockerd --validate --config-file="),
    ],
)
def test_a_docker_that_cannot_validate_is_not_told_to(release: str, checker: str, broken: Broken) -> None:
    root = broken()
    put(root, "/etc/docker/daemon.json", '{\n    "runtimes": {]\n}\n')
    host = Host(str(root))
    host.__dict__["engine_releases"] = {"docker": release}
    (found,) = check_problems(host)
    assert found.fixes[1].startswith(checker)
    if release != "23.0.1":
        said = subprocess.run(found.fixes[1], shell=True, capture_output=True, text=True, check=False)  # as typed
        assert (said.returncode, "line 2 column" in said.stderr) == (1, True)


@pytest.mark.parametrize(
    ("changes", "setting", "severity", "says"),
    [
        ({}, 'swarm-resource = "DOCKER_RESOURCE_NVIDIA-GPU"', ["ok"], "obeyed"),
        ({}, 'swarm-resource = "DOCKER_RESOURCE_GPU"', ["warning"], "services get GPUs by DOCKER_RESOURCE_NVIDIA-GPU"),
        ({}, "", ["warning"], 'swarm-resource = "DOCKER_RESOURCE_NVIDIA-GPU"'),
        ({"default-runtime": "runc"}, 'swarm-resource = "DOCKER_RESOURCE_NVIDIA-GPU"', ["warning"], "default runtime"),
        ({"node-generic-resources": ["gpu=GPU-0"]}, 'swarm-resource = "DOCKER_RESOURCE_GPU"', ["warning"], "is no GPU"),
        ({"node-generic-resources": ["ssd=1"]}, "", ["not-checked"], "no GPU is a generic resource"),
    ],
)
def test_generic_resources_of_swarm_are_compared_with_what_reads_them(
    changes: dict[str, object], setting: str, severity: list[str], says: str, broken: Broken
) -> None:
    root = broken()
    file = root / "etc/docker/daemon.json"
    uuid = Host(str(root)).proc_gpus[0].uuid
    data = json.loads(file.read_text()) | {"node-generic-resources": [f"NVIDIA-GPU={uuid}"]} | changes
    file.write_text(json.dumps(data))
    put(root, "/etc/ocigpu/config.toml", f"{setting}\n")
    found = check_swarm(Host(str(root)))
    assert [item.severity for item in found] == severity
    assert any(says in f"{item.text} {item.fixes}" for item in found)


def test_settings_that_refuse_are_notes_and_the_host_is_ready(broken: Broken, run: Run) -> None:
    root = broken("refusing-settings")
    found = [item for item in run_checks(Host(str(root)), ("settings-refuse",)) if item.is_bad]
    assert [item.severity for item in found] == ["note", "note"]
    assert "compute, utility only" in found[1].text
    assert "your system is ready" in run("doctor", "--root", root)[1]


def test_selinux_has_a_boolean_for_less_than_all_devices(tmp_path: Path) -> None:
    booleans = tmp_path / "sys/fs/selinux/booleans"
    booleans.mkdir(parents=True)
    (booleans.parent / "enforce").write_text("1")
    put(tmp_path, "/var/log/kern.log", "kernel: nothing\n")
    seen = []
    for name, value in (
        ("container_use_devices", "0 0"),
        ("container_use_xserver_devices", "0 0"),
        ("container_use_xserver_devices", "1 1"),
        ("container_use_xserver_devices", "0 0"),
        ("container_use_devices", "1 1"),
    ):
        (booleans / name).write_text(value)
        (found,) = check_selinux(Host(str(tmp_path)))
        seen.append((found.severity, found.fixes[:1]))
    narrow = ("warning", ("setsebool -P container_use_xserver_devices on",))
    assert seen == [("warning", ("setsebool -P container_use_devices on",)), narrow, ("ok", ()), narrow, ("ok", ())]
