"""``ocigpu node-installer``: a real containerd told of ocigpu by way of a host root, restarted, used, and set back."""

import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import requirements
from support.api_server import FakeApiServer, make_account
from support.engines import Containerd, start_containerd
from support.fixtures import IMAGE
from support.lines import Lines
from support.process import run, wait_for
from support.product import PROGRAMS, REPOSITORY, SimulatedHost, listed_uuids
from support.products import one_in
from support.real_cluster import find_programs
from support.runtimes import container_id

from ocigpu import __version__
from ocigpu.core.errors import HostError
from ocigpu.engines.places import Daemon, parse_release
from ocigpu.kubernetes.installer.engine import HostEngine, Running, own_sockets
from ocigpu.kubernetes.installer.files import HostFiles, payload_version
from ocigpu.kubernetes.installer.program import (
    LABEL,
    VERSION_LABEL,
    InstallerOptions,
    NodeInstaller,
    RestartFailedError,
)
from ocigpu.system.programs import Finished

NODE = "/api/v1/nodes/n"
ENVIRONMENT = {"NODE_NAME": "n"}
HOST_NETWORK = 2


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing out what all of the machine has in memory takes as long as others have written much."""
    monkeypatch.setattr(os, "sync", lambda: None)


@pytest.fixture(scope="module")
def server(session_directory: Path) -> Iterator[FakeApiServer]:
    directory = session_directory / "installer-account"
    directory.mkdir()
    make_account(directory)
    fake = FakeApiServer(directory)
    yield fake
    fake.close()


@pytest.fixture
def node(server: FakeApiServer) -> Callable[[], dict[str, str]]:
    """Return a node without labels of ours; call to see those it has."""
    server.objects[NODE] = {"metadata": {"name": "n", "labels": {"other": "x"}}}

    def labels() -> dict[str, str]:
        found: dict[str, str] = server.objects[NODE]["metadata"]["labels"]
        return {key: value for key, value in found.items() if key.startswith("ocigpu/")}

    return labels


# files


def make_payload(directory: Path, name: str) -> str:
    program = directory / name / "bin/ocigpu"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho {name}\n")
    program.chmod(0o755)
    (program.parent / "link").symlink_to("ocigpu")
    return str(directory)


def host_with(tmp_path: Path) -> tuple[Path, HostFiles]:
    """A host on which /opt leads elsewhere by a link that is right below its root only."""
    host = tmp_path / "host"
    (host / "var/opt").mkdir(parents=True)
    (host / "opt").symlink_to("/var/opt")
    return host, HostFiles(str(host), "/opt/ocigpu")


def test_a_version_is_complete_before_it_is_used_and_the_former_one_stays(tmp_path: Path) -> None:
    host, files = host_with(tmp_path)
    top = host / "var/opt/ocigpu"
    caches = host / "run/ocigpu"
    tried = []
    for number in "123":
        caches.mkdir(parents=True, exist_ok=True)
        (caches / "next-1-2").touch()
        (caches / "facts").touch()
        payload = make_payload(tmp_path / number, f"v{number}")
        assert payload_version(payload) == f"v{number}"

        def try_out(path: str) -> None:
            assert (host / "var" / path.lstrip("/") / "bin/ocigpu").exists()
            assert files.current() == (f"v{int(number) - 1}" if number != "1" else "")  # noqa: B023 - called in here
            tried.append(path)

        assert files.place(payload, try_out) == f"v{number}"
        assert files.place(payload, try_out) == ""
        assert os.readlink(top / "current") == f"versions/v{number}"
        assert (top / "current/bin/link").readlink() == Path("ocigpu")
        assert [path.name for path in caches.iterdir()] == ["facts"]
    assert sorted(path.name for path in (top / "versions").iterdir()) == ["v2", "v3"]
    assert tried == [f"/opt/ocigpu/versions/v{number}" for number in "123"]
    files.remove()
    assert list((host / "var/opt").iterdir()) == []


def test_a_version_that_does_not_start_is_not_used(tmp_path: Path) -> None:
    host, files = host_with(tmp_path)
    files.place(make_payload(tmp_path / "1", "v1"), lambda _: None)

    def fails(_path: str) -> None:
        raise HostError("OCIGPU-KUBE-8", "does not start")

    with pytest.raises(HostError, match="does not start"):
        files.place(make_payload(tmp_path / "2", "v2"), fails)
    assert files.current() == "v1"
    (host / "var/opt/ocigpu/mine").touch()
    files.remove()
    assert [path.name for path in (host / "var/opt/ocigpu").iterdir()] == ["mine"]


@pytest.mark.parametrize("place", ["", "/versions"])
def test_a_version_that_somebody_else_could_have_put_there_is_not_executed(tmp_path: Path, place: str) -> None:
    host, files = host_with(tmp_path)
    payload = make_payload(tmp_path / "payload", "1")
    make_payload(host / "var/opt/ocigpu/versions", "1")
    theirs = host / f"var/opt/ocigpu{place}"
    tried: list[str] = []
    for owner, mode in ((65534, 0o755), (0, 0o775)):
        os.chown(theirs, owner, 0)
        theirs.chmod(mode)
        with pytest.raises(HostError, match="others may write"):
            files.place(payload, tried.append)
    theirs.chmod(0o755)
    assert (files.place(payload, tried.append), len(tried)) == ("1", 1)


def test_what_was_left_by_a_killed_pod_is_replaced(tmp_path: Path) -> None:
    host, files = host_with(tmp_path)
    left = host / "var/opt/ocigpu/versions/.new-v1/bin"
    left.mkdir(parents=True)
    (host / "var/opt/ocigpu/.current-new").symlink_to("x")
    files.place(make_payload(tmp_path / "1", "v1"), lambda _: None)
    assert [path.name for path in (host / "var/opt/ocigpu/versions").iterdir()] == ["v1"]
    assert files.current() == "v1"


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_an_image_has_one_version(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    with pytest.raises(HostError, match=f"holds {len(names)} versions"):
        payload_version(str(tmp_path))


# restarts


def running(unit: str = "containerd.service", engine: str = "containerd") -> Running:
    return Running(Daemon(engine, 1 << 22, ""), 0, unit, frozenset())


class AnsweringEngine(HostEngine):
    """An engine whose host answers as it is told."""

    def __init__(self, host_root: Path, answer: str = "", status: int = 0) -> None:
        super().__init__(str(host_root))
        self.commands: list[list[str]] = []
        self.answer, self.status = answer, status
        self.words = ""

    def on_host(self, command: Any) -> Finished:
        self.commands.append(list(command))
        return Finished(self.status, self.answer, self.words)


def test_a_restart_that_would_end_containers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert AnsweringEngine(tmp_path, "process\n").plan_restart(running(), "auto") == "systemd"
    for answer, status in (("control-group\n", 0), ("", 0), ("process\n", 1)):
        with pytest.raises(HostError, match="would end the containers"):
            AnsweringEngine(tmp_path, answer, status).plan_restart(running(), "auto")
    with pytest.raises(HostError, match="no systemd unit"):
        AnsweringEngine(tmp_path).plan_restart(running(unit=""), "systemd")
    assert AnsweringEngine(tmp_path).plan_restart(running("crio.service", "crio"), "auto") == "systemd"
    assert AnsweringEngine(tmp_path / "run").plan_restart(running(), "auto") == "signal"
    assert AnsweringEngine(tmp_path).plan_restart(running(), "none") == "none"


def test_the_unit_of_k3s_is_restarted_and_not_its_containerd(tmp_path: Path) -> None:
    """The daemon's own cgroup says whose child it is."""
    process = tmp_path / "proc/77"
    (process / "fd").mkdir(parents=True)
    (process / "net").mkdir()
    config = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"
    (process / "cmdline").write_bytes(b"\0".join([b"containerd", b"-c", config.encode(), b""]))
    (process / "stat").write_text("77 (a) b) S " + " ".join(str(number) for number in range(4, 53)))
    (process / "net/unix").write_text("Num RefCount Protocol Flags Type St Inode Path\n")
    for cgroup in ("0::/system.slice/k3s-agent.service\n", "1:name=systemd:/system.slice/k3s-agent.service/x\n0::/\n"):
        (process / "cgroup").write_text(cgroup)
        engine = AnsweringEngine(tmp_path)
        found = engine.require()
        assert (found.unit, found.daemon.config, found.started) == ("k3s-agent.service", config, 22)
    engine.status = 5
    with pytest.raises(HostError, match="systemctl restart k3s-agent"):
        engine.restart(found, "systemd")
    assert engine.commands == [["systemctl", "restart", "k3s-agent.service"]]
    (tmp_path / "proc/78").mkdir()
    (tmp_path / "proc/78/cmdline").write_bytes(b"crio\0")
    with pytest.raises(HostError, match="2 engines run"):
        engine.require()
    with pytest.raises(HostError, match="no containerd or CRI-O"):
        HostEngine(str(tmp_path / "empty")).require()


@pytest.mark.parametrize(
    ("said", "needed"),
    [
        ("containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6+deb13u1\n", False),
        ("containerd github.com/containerd/containerd/v2 2.1.9+unknown \n", True),
        ("k3s version v1.33.5+k3s1 (x)\ngo version go1.24.6\n", True),
        ("crio version 1.34.0\n", True),
        ("", True),
    ],
)
def test_an_entry_stays_as_long_as_a_pod_needs_it(tmp_path: Path, said: str, needed: bool) -> None:
    """Without it nobody could look into the pod, and a probe that does would fail."""
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/exe").symlink_to("/usr/bin/containerd")
    engine = AnsweringEngine(tmp_path, said)
    found = Running(Daemon("containerd", 7, ""), 0, "", frozenset())
    assert engine.needs_entry(found, "ocigpu") is needed
    assert engine.commands == [["/usr/bin/containerd", "--version"]]


@pytest.mark.root
def test_a_socket_is_found_by_the_links_of_the_hosts_root(tmp_path: Path) -> None:
    """A pod has a root of its own, and /var/run leads to /run there, too: containerd 2 has NRI's socket in /var/run."""
    host = tmp_path / "host"
    (host / "run/containerd").mkdir(parents=True)
    (host / "var").mkdir()
    (host / "var/run").symlink_to("/run")
    path = "/var/run/containerd/containerd.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(host / "run/containerd/containerd.sock"))
    listener.listen()
    with subprocess.Popen(
        [sys.executable, "-c", CHROOTED, host], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"in\n"
        engine, found = HostEngine("/"), Running(Daemon("containerd", child.pid, ""), 0, "", frozenset())
        assert engine.answers(found, path)
        assert not engine.answers(found, "/var/run/nri/nri.sock")
        listener.close()
        assert not engine.answers(found, path), "nobody listens any more"
        child.communicate()


CHROOTED = """\
import os, sys
os.chroot(sys.argv[1]); os.chdir("/"); print("in", flush=True); sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("sockets", "own"),
    [
        (["/run/containerd/containerd.sock", "/run/containerd/containerd.sock.ttrpc", "/var/run/nri/nri.sock"], [0]),
        (["/run/k3s/containerd/containerd.sock", "/run/k3s/containerd/containerd.sock.ttrpc", "/run/other.sock"], [0]),
        (["/var/run/crio/crio.sock", "/var/run/nri/nri.sock"], [0]),
        (["/run/c/c.sock", "/run/c/t.sock"], [0, 1]),
        (["/run/nri.sock"], [0]),
        ([], []),
    ],
)
def test_an_engine_is_asked_at_its_own_socket(sockets: list[str], own: list[int]) -> None:
    assert own_sockets(frozenset(sockets)) == {sockets[number] for number in own}


@pytest.mark.parametrize("ids", ["77", "77\t1"], ids=["the host's", "a container's"])
def test_no_process_of_a_container_keeps_the_files_on_the_node(tmp_path: Path, ids: str) -> None:
    """Any pod can have a process of that name, which works where there is such a file."""
    for pid, words in ((77, "containerd-shim-runc-v2\0"), (78, "conmon\0-r\0/opt/ocigpu/current/bin/ocigpu-runtime\0")):
        process = tmp_path / f"proc/{pid}"
        process.mkdir(parents=True)
        (process / "cmdline").write_text(words)
        (process / "status").write_text(f"Uid:\t{os.geteuid()}\nNSpid:\t{ids}\n")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/options.json").write_text('{"BinaryName": "/opt/ocigpu/current/bin/ocigpu-runtime"}')
    (tmp_path / "proc/77/cwd").symlink_to("/bundle")
    found = HostEngine(str(tmp_path)).users("/opt/ocigpu")
    assert found == (["/proc/77", "/proc/78"] if ids == "77" else [])


def test_the_installed_program_is_told_which_file_the_engine_reads(tmp_path: Path) -> None:
    """Of k3s and RKE2 that is a file of their own; CRI-O has one place."""
    config = "/var/lib/rancher/rke2/agent/etc/containerd/config.toml"
    engine = AnsweringEngine(tmp_path, '{"engines": [{"changed": false, "notes": ["b"]}], "notes": ["a"]}')
    assert engine.run("/p", "configure", Running(Daemon("containerd", 1, config), 0, "", frozenset()), "--cdi") == {
        "changed": False,
        "notes": ["a", "b"],
    }
    engine.run("/p", "remove", running("crio.service", "crio"))
    first = ["/p", "engine", "configure", "containerd", "--json", "--engine-config", config, "--cdi"]
    assert engine.commands == [first, ["/p", "engine", "remove", "crio", "--json"]]
    engine.status = 1
    with pytest.raises(HostError, match="ocigpu engine configure: exit status 1"):
        engine.run("/p", "configure", running())
    engine.words = "ocigpu: OCIGPU-ENG-1: /c.toml: not TOML\nhint: Correct the file.\n"
    with pytest.raises(HostError) as caught:
        engine.run("/p", "configure", running())
    assert caught.value.message == "ocigpu engine configure: OCIGPU-ENG-1: /c.toml: not TOML"
    assert caught.value.hint == "Correct the file."


def test_a_server_that_refuses_labels_is_logged_and_stops_nothing(tmp_path: Path, server: FakeApiServer) -> None:
    server.objects.pop(NODE, None)  # it refuses to make a node
    log = Lines()
    options = InstallerOptions(host_root=str(tmp_path), payload=str(tmp_path))
    NodeInstaller(options, ENVIRONMENT, log, server.place).label("installing")
    assert "OCIGPU-KUBE-5" in log.text
    assert "403" in log.text
    requests = len(server.requests)
    NodeInstaller(options, {}, log, server.place).label("installing")
    assert len(server.requests) == requests


# a real containerd

SUPERVISOR = """\
trap 'kill "$child" 2>/dev/null; wait; exit' TERM
while :; do
  if [ ! -e "$0" ] || ! grep -q opt/ocigpu "$3"; then "$@" & child=$!; wait "$child"; else sleep 0.1; fi
done
"""
"""What a service manager does; while the file named first is there, containerd does not start with our entry."""


class Place:
    """A containerd of its own, and an installer for it."""

    def __init__(self, engine: Containerd, directory: Path, server: FakeApiServer, release: str) -> None:
        self.engine, self.directory, self.log = engine, directory, Lines()
        self.release = int(release.partition(".")[0])
        self.config = engine.directory / "config.toml"
        self.options = InstallerOptions(
            host_root=str(directory / "host"),
            payload=str(directory / "payload"),
            prefix=str(directory / "opt/ocigpu"),
            engine="containerd",
            config=str(self.config),
            restart="signal",
            restart_seconds=60.0,
        )
        self.server = server.place
        self.installer = NodeInstaller(self.options, ENVIRONMENT, self.log, self.server)
        self.host = HostEngine(self.options.host_root, self.options.engine, self.options.config, 60.0)

    def pid(self) -> int:
        return self.host.require().daemon.pid


def make_tree(directory: Path, prefix: str) -> None:
    """Make what the image holds, as packaging/kubernetes/host-tree.sh does, with this machine's Python."""
    vendored = directory / "vendored"
    vendored.mkdir()
    for path in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        for entry in Path(path).iterdir():
            if entry.suffix not in (".pth", ".dist-info") and not (vendored / entry.name).is_symlink():
                (vendored / entry.name).symlink_to(entry)
    final = f"{prefix}/versions/v1"
    words = ["--bin", f"{final}/bin", "--venv", f"{final}/library"]
    words += ["--stage", directory / "tree", "--vendored", vendored]
    command = [REPOSITORY / "packaging/install.sh", *words, "--python", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (directory / "payload").mkdir()
    (directory / f"tree{prefix}/versions/v1").rename(directory / "payload/v1")


@pytest.fixture(scope="module")
def place(
    session_directory: Path, image: Path, simulated_host: SimulatedHost, server: FakeApiServer
) -> Iterator[Place]:
    """A containerd that does not know ocigpu yet; the pod sees the host's root by another name.

    ``make cluster-test`` names another containerd.
    """
    requirements.require(requirements.programs("containerd", "ctr", "runc"))
    pytest.importorskip("grpc", reason="not installed: grpcio")
    directory = session_directory / "installer"
    directory.mkdir()
    (directory / "host").symlink_to("/")
    make_tree(directory, str(directory / "opt/ocigpu"))
    env = {"OCIGPU_CONFIG": str(simulated_host.settings)}
    view = ["sh", "-c", SUPERVISOR, str(directory / "refuse")]
    program = find_programs().get("CONTAINERD", "containerd")
    with start_containerd(
        session_directory / "installer-engine", image, {}, env, view=view, sandbox_image=IMAGE, program=program
    ) as engine:
        yield Place(engine, directory, server, parse_release(run([program, "--version"]).stdout))


def start_pod(engine: Containerd, handler: str) -> tuple[str, str]:
    """Start a pod with one container that asks for two GPUs; return the ids of both."""
    config: dict[Any, Any] = {
        1: {1: "pod", 2: container_id(), 3: "default"},
        3: str(engine.directory / "logs"),
        8: {1: f"/{engine.namespace}", 2: {1: {1: HOST_NETWORK}}},
    }
    (answer,) = engine.cri(("RuntimeService/RunPodSandbox", {1: config, 2: handler}))
    assert "error" not in answer, answer
    sandbox = answer["1"]
    container = {1: {1: "container"}, 2: {1: IMAGE}, 3: ["sleep", "1000"], 6: [{1: "NVIDIA_VISIBLE_DEVICES", 2: "0,2"}]}
    (created,) = engine.cri(("RuntimeService/CreateContainer", {1: sandbox, 2: container, 3: config}))
    assert "error" not in created, created
    (started,) = engine.cri(("RuntimeService/StartContainer", {1: created["1"]}))
    assert "error" not in started, started
    return sandbox, created["1"]


def gpus_in(engine: Containerd, container: str) -> list[str]:
    (listed,) = engine.cri(("RuntimeService/ExecSync", {1: container, 2: ["nvidia-smi", "-L"], 3: 30}))
    assert "error" not in listed, listed
    return listed_uuids(listed["1"])


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
def test_an_engine_that_does_not_come_back_gets_its_former_configuration(
    place: Place, node: Callable[[], dict[str, str]]
) -> None:
    before = place.config.read_bytes()
    refuse = place.directory / "refuse"
    refuse.touch()
    engine = place.installer.engine
    engine.seconds = 1.0  # that it is not back is certain

    def patient(message: str) -> None:
        if "taking the configuration back" in message:
            engine.seconds = 60.0

    place.log.seen = patient
    with pytest.raises(RestartFailedError, match="its former configuration is back in force"):
        place.installer.install()
    refuse.unlink()
    assert place.config.read_bytes() == before
    assert place.engine("version").returncode == 0
    place.installer.report_failure(HostError("OCIGPU-KUBE-8", "x"))
    assert node() == {LABEL: "failed.OCIGPU-KUBE-8"}
    assert place.installer.remove()
    assert not (place.directory / "opt/ocigpu").exists()
    assert node() == {}


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
def test_a_node_is_made_ready_used_and_set_back(
    place: Place, node: Callable[[], dict[str, str]], simulated_host: SimulatedHost
) -> None:
    before = {path: path.read_bytes() for path in place.engine.directory.glob("*.toml*")}
    first = place.pid()
    place.installer.install()
    second = place.pid()
    assert second != first
    assert node() == {LABEL: "ready", VERSION_LABEL: "v1"}
    assert f'+BinaryName = "{place.directory}/opt/ocigpu/current/bin/ocigpu-runtime"' in place.log.text.replace(
        "  ", ""
    )
    place.installer.install()
    assert place.pid() == second  # nothing was to be done
    sandbox, container = start_pod(place.engine, "ocigpu")
    try:
        assert gpus_in(place.engine, container) == [simulated_host.gpus[0], simulated_host.gpus[2]]
        place.host.restart(place.host.require(), "signal")
        assert gpus_in(place.engine, container) == [simulated_host.gpus[0], simulated_host.gpus[2]]
        assert not place.installer.remove()
        assert node() == {LABEL: "removing"}
        assert gpus_in(place.engine, container) == [simulated_host.gpus[0], simulated_host.gpus[2]]
        if place.release < 2:  # a later one looks the pod's runtime up for each exec
            assert {path: path.read_bytes() for path in place.engine.directory.glob("*.toml*")} == before
            assert "1 pods were started by ocigpu and still run" in place.log.text
        else:
            assert "1 pods with the runtime ocigpu still run" in place.log.text
    finally:
        stop = {1: sandbox}
        answers = place.engine.cri(("RuntimeService/StopPodSandbox", stop), ("RuntimeService/RemovePodSandbox", stop))
        assert all("error" not in answer for answer in answers), answers
    assert place.installer.remove()
    assert not (place.directory / "opt/ocigpu").exists()
    assert node() == {}
    assert {path: path.read_bytes() for path in place.engine.directory.glob("*.toml*")} == before


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
def test_a_name_that_another_program_has_is_left_alone(place: Place, node: Callable[[], dict[str, str]]) -> None:
    options = place.options._replace(name="runc")
    installer = NodeInstaller(options, ENVIRONMENT, place.log, place.server)
    before = place.config.read_bytes()
    with pytest.raises(HostError, match="containerd has runc = "):
        installer.install()
    assert place.config.read_bytes() == before
    assert node() == {}


# the command


def installer_command(*words: str | Path) -> list[str]:
    return [str(PROGRAMS / "ocigpu"), "node-installer", *map(str, words)]


def test_it_stays_says_why_and_ends_when_told(tmp_path: Path) -> None:
    """A DaemonSet's pod that ended would be started again and again."""
    host, ready = tmp_path / "host", tmp_path / "ready"
    host.mkdir()
    ready.touch()
    words = ("--host-root", host, "--payload", tmp_path, "--ready-file", ready)
    with subprocess.Popen(installer_command(*words), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "error: OCIGPU-KUBE-8: no containerd or CRI-O runs on this node" in process.stdout.readline()
        wait_for("the file to go", lambda: not ready.exists())
        process.terminate()
        assert process.wait(60) == 0
    with subprocess.Popen(installer_command(*words, "--remove"), stdout=subprocess.PIPE, text=True) as process:
        wait_for("the file to come", ready.exists)
        process.terminate()
        assert process.wait(60) == 0
    assert list(host.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    one_in(
        4,
        [
            (["--engine", "docker"], "is not one of containerd, crio"),
            (["--restart", "kill"], "is not one of auto, systemd, signal, none"),
            (["--prefix", "opt"], "is not the absolute path"),
            (["--prefix", "/"], "is not the absolute path"),
        ],
    ),
)
def test_options_that_make_no_sense_are_refused(words: list[str], said: str) -> None:
    done = run(installer_command("--once", *words), check=False)
    assert done.returncode == 2
    assert said in done.stderr


# the interpreter that the image brings


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.timeout(900)
def test_the_tree_of_the_image_works_on_a_host_without_python_or_a_c_library(session_directory: Path) -> None:
    requirements.require(requirements.programs("patchelf", "busybox", "gcc", "musl-gcc", "strace"))
    directory = session_directory / "host-tree"
    vendored, host = directory / "vendored", directory / "host"
    vendored.mkdir(parents=True)
    names = ("typer", "click", "rich", "shellingham", "markdown_it", "mdurl", "pygments", "tomlkit", "yaml", "_yaml")
    names += ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions", "annotated_doc")
    for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(path).iterdir():
            if entry.name.partition(".")[0] in (*names, "prctl", "_prctl", "pynvml", "pyroute2"):
                (shutil.copytree if entry.is_dir() else shutil.copy)(entry, vendored / entry.name)
    prefix = host / "opt/ocigpu"
    # three minutes, unless it was built before
    snapshot = run([REPOSITORY / "packaging/snapshot/build.sh", "/usr/bin/python3"], timeout=900).stdout.strip()
    command = [REPOSITORY / "packaging/kubernetes/host-tree.sh", "--python", "/usr/bin/python3", "--vendored", vendored]
    command += ["--snapshot", snapshot, "--prefix", prefix, directory / "out"]
    made = run(command, timeout=300).stdout.strip()
    assert Path(made).parent == directory / "out"
    assert payload_version(str(directory / "out")) == Path(made).name
    assert not prefix.exists()
    # the paths in it are those of the prefix: the host's root has the same directory inside
    inner = host / str(prefix).lstrip("/")
    (host / "bin").mkdir(parents=True)
    shutil.copy(requirements.find_program("busybox") or "", host / "bin/busybox")
    (host / "bin/sh").symlink_to("busybox")
    files = HostFiles(str(host), str(prefix))
    engine = HostEngine(str(host))

    def try_out(path: str) -> None:
        for name in ("ocigpu", "ocigpu-hook"):
            assert engine.on_host([f"{path}/bin/{name}", "--version"]) == (0, f"{name} {__version__}\n", "")

    assert files.place(str(directory / "out"), try_out)
    version = f"{prefix}/versions/{Path(made).name}"
    for variable, last in (("", f"{version}/bin/ocigpu-python"), ("1", f"{version}/python/bin/python3")):
        hook = ["chroot", host, "/bin/busybox", "env", f"OCIGPU_NO_IMAGE={variable}", f"{version}/bin/ocigpu-hook"]
        trace = directory / "trace"
        assert run(["strace", "-f", "-e", "trace=execve", "-o", trace, *hook, "--version"]).stdout
        found = re.findall(r'execve\("([^"]+)".* = 0$', trace.read_text(), re.MULTILINE)
        assert found[-1].startswith(last)
    done = engine.on_host([f"{prefix}/current/bin/ocigpu-hook", "prestart"])
    assert (done.status, "OCIGPU-" in done.complaint) == (1, True)
    assert (inner / "current/bin/ocigpu-hook").exists()
    done = engine.on_host([f"{prefix}/current/bin/ocigpu", "engine", "status", "--json"])
    assert (done.status, done.complaint) == (0, "")
