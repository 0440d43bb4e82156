"""A running dockerd is asked what it knows; one that hangs does not keep doctor waiting."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import requirements
from support.engines import SYSTEM_PATH, Docker, start_docker
from support.product import RUNTIME, SimulatedHost, install_vendor_names
from support.runtimes import view_of

from ocigpu.doctor.docker import check_context, find_gpus_hook
from ocigpu.doctor.engines import configure
from ocigpu.doctor.findings import Finding
from ocigpu.doctor.host import Host
from ocigpu.doctor.live import SECONDS
from ocigpu.doctor.report import run_checks
from ocigpu.engines.places import DOCKER, Daemon
from ocigpu.engines.record import EngineRecord, dump_record, record_path
from ocigpu.engines.status import EngineStatus


def later_directory(docker: Path) -> Path:
    """The first directory of the daemon's PATH, which is empty or not there when it starts."""
    return docker.with_name(f"{docker.name}-later")


@pytest.fixture(scope="module")
def docker(session_directory: Path, image: Path, simulated_host: SimulatedHost) -> Iterator[Docker]:
    requirements.require(requirements.programs("dockerd", "docker", "containerd", "runc"))
    names = install_vendor_names(session_directory / "doctor-bin", simulated_host.settings)
    directory = session_directory / "doctor-docker"
    env = {"PATH": f"{later_directory(directory)}:{names}:{SYSTEM_PATH}"}
    with start_docker(directory, image, {"ocigpu": str(RUNTIME)}, env, view=view_of("v2")) as engine:
        yield engine


@pytest.fixture
def findings(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> "dict[str, Finding]":
    """What doctor finds while the daemon runs, by name; of several findings of a name that on Docker."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{docker.socket}")
    return by_name()


def by_name() -> dict[str, Finding]:
    found: dict[str, Finding] = {}
    for item in run_checks(Host()):
        found.setdefault(item.name, item)
    return found


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
def test_a_dockerd_that_knows_its_file_is_well(docker: Docker, findings: dict[str, Finding]) -> None:
    assert findings["docker-not-restarted"].severity == "ok"
    assert "ocigpu" in findings["docker-not-restarted"].evidence[0].found
    assert findings["engine-runtime-missing"].severity == "ok"


@pytest.mark.root
@pytest.mark.engine
def test_the_hook_is_looked_for_on_the_path_of_the_daemon(docker: Docker, findings: dict[str, Finding]) -> None:
    assert findings["docker-gpus-hook"].severity == "ok"
    assert "doctor-bin" in findings["docker-gpus-hook"].evidence[0].path


@pytest.mark.root
@pytest.mark.engine
def test_a_dockerd_that_was_not_restarted_is_found(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{docker.socket}")
    file = docker.socket.parent / "daemon.json"
    before = file.read_text()
    data = json.loads(before)
    data["runtimes"]["later"] = {"path": str(RUNTIME)}
    data["default-runtime"] = "later"
    file.write_text(json.dumps(data))
    try:
        found = by_name()["docker-not-restarted"]
    finally:
        file.write_text(before)
    assert found.severity == "error"
    assert [entry.found for entry in found.evidence] == ['runtime "later": unknown', "default runtime runc"]
    assert found.fixes == ("systemctl restart docker",)


@pytest.mark.root
@pytest.mark.engine
def test_a_hook_that_came_after_dockerd_needs_a_restart_only_if_dockerd_found_none(
    docker: Docker, session_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a package has replaced NVIDIA's hook, --gpus works on; "engine configure" makes a hook where none was."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{docker.socket}")
    hook = later_directory(docker.socket.parent) / "nvidia-container-runtime-hook"
    earlier = session_directory / "doctor-bin" / hook.name
    record = Path(record_path(str(docker.socket.parent / "daemon.json")))
    hook.parent.mkdir()
    time.sleep(1.1)
    hook.symlink_to(os.path.realpath(earlier))
    found = []
    try:
        found.append(by_name()["docker-not-restarted"])  # dockerd found the earlier one
        earlier.rename(earlier.with_name("aside"))
        found.append(by_name()["docker-not-restarted"])  # as after the package: nobody can tell
        record.write_text(dump_record(EngineRecord(None, "", (), links=(str(hook),))))
        found.append(by_name()["docker-not-restarted"])
    finally:
        record.unlink(missing_ok=True)
        earlier.with_name("aside").rename(earlier)
        shutil.rmtree(hook.parent)
    assert [item.severity for item in found] == ["ok", "note", "error"]
    assert [[entry.path for entry in item.evidence] for item in found[1:]] == [[str(hook)]] * 2
    assert found[1].fixes[0].startswith("ocigpu engine test docker")
    assert found[2].fixes == ("systemctl restart docker",)


@pytest.mark.root
@pytest.mark.engine
def test_a_dockerd_that_is_told_nothing_is_found_with_its_file(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{docker.socket}")
    file = docker.socket.parent / "daemon.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "runtimes": {}}))
    try:
        findings = run_checks(Host())
    finally:
        file.write_text(before)
    found = [item for item in findings if item.name == "engine-not-configured" and item.evidence]
    mine = [item for item in found if item.evidence[0].path == str(file)]
    assert [item.severity in ("note", "warning", "error") for item in mine] == [True]
    assert mine[0].fixes[0] == f"ocigpu engine configure docker --engine-config {file}"
    assert "could not select device driver" in mine[0].text


@pytest.mark.parametrize(
    ("host", "severity", "says"),
    [("tcp://10.1.1.1:2375", "note", "DOCKER_HOST"), ("unix:///run/docker.sock", "ok", "socket of this machine")],
)
def test_docker_host_goes_before_contexts(
    host: str, severity: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr("ocigpu.doctor.docker.installed_engines", lambda *_: [object()])
    (item,) = check_context(Host())
    assert (item.severity, says in item.text) == (severity, True)


@pytest.mark.parametrize("listens", [True, False], ids=["hangs", "refuses"])
def test_a_dockerd_that_does_not_answer_is_not_checked(
    listens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    monkeypatch.setattr("ocigpu.doctor.live.SECONDS", SECONDS)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        if listens:
            listener.listen()
        found = by_name()["docker-not-restarted"]
    assert found.severity == "not-checked"
    assert (f"within {SECONDS:g} s" if listens else "refused") in found.text


@pytest.mark.parametrize(
    ("configs", "more"),
    [([""], ""), (["", ""], ""), (["", "/opt/other.json"], f" --engine-config {DOCKER}")],
    ids=["one", "two of one file", "two"],
)
def test_where_several_dockerds_run_the_fix_says_which(configs: list[str], more: str) -> None:
    """Without a file "ocigpu engine configure" refuses to choose."""
    host = Host()
    vars(host)["daemons"] = [Daemon("docker", number, config) for number, config in enumerate(configs)]
    status = EngineStatus("docker", "", installed=True, running=True, target=DOCKER)
    assert configure(host, status)[0] == f"ocigpu engine configure docker{more}"


@pytest.mark.parametrize(("release", "served"), [("29.1.5", False), ("29.2.0", True)])
def test_gpus_are_served_by_cdi_from_docker_29_2_on(
    monkeypatch: pytest.MonkeyPatch, release: str, served: bool
) -> None:
    """moby commit 86f122af27, whose first release is 29.2.0."""
    monkeypatch.setattr("ocigpu.doctor.docker.takes_cdi", lambda *_: True)
    monkeypatch.setattr(Host, "program", lambda *_: "/usr/bin/nvidia-cdi-hook")
    host = Host()
    vars(host).update(docker=None, engines=(), engine_releases={"docker": release})
    status = EngineStatus("docker", "", installed=True, running=True, target=DOCKER)
    assert bool(find_gpus_hook(host, status)) == served
