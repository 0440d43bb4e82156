"""The partitions of a manager behind ``ocigpu fabric serve``: real gRPC over real sockets, and mutual TLS."""

import gc
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from support.authority import Authority
from support.lines import Lines

from ocigpu.gpus.nvidia.fabric.libnvfm import LibnvfmFabric
from ocigpu.gpus.nvidia.fabric.partitions import FabricError, board_partitions
from ocigpu.gpus.nvidia.fabric.state import FabricStore, KeptFabric
from ocigpu.kubernetes.api import fabric_pb2 as pb
from ocigpu.kubernetes.api.services import method, open_channel
from ocigpu.kubernetes.fabric import server as fabric_server
from ocigpu.kubernetes.fabric.client import GrpcFabric, open_fabric
from ocigpu.kubernetes.fabric.messages import SERVICE, ServiceAddress, parse_service
from ocigpu.kubernetes.fabric.server import FabricServer
from ocigpu.sim.fabric import SimulatedManager
from ocigpu.system.relay import Relay

ME = f"uid:{os.getuid()}"
Serve = Callable[..., FabricServer]


@pytest.fixture
def log() -> Lines:
    return Lines()


@pytest.fixture
def serve(fabric: LibnvfmFabric, log: Lines) -> Iterator[Serve]:
    """Call with an address, who may call, and the directory for TLS."""
    with ExitStack() as stack:

        def start(address: str, *allowed: str, tls: str = "") -> FabricServer:
            server = FabricServer(fabric, parse_service(address, listening=True), allowed, log, tls)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_the_same_verbs_with_the_same_answers(serve: Serve, manager: SimulatedManager, work_directory: Path) -> None:
    address = f"unix:{work_directory}/fabric.sock"
    serve(address, ME)
    client = open_fabric(f"grpc:{address}")
    assert client.list_partitions() == board_partitions("hopper")
    assert client.activate([3, 1]).physical_ids == (1, 3)
    assert manager.active() == [(1, 3)]
    with pytest.raises(FabricError, match=r"activate GPUs 1,2,3,4: in use: partition 3 \(GPUs 1,3\)") as error:
        client.activate([1, 2, 3, 4])
    assert (error.value.code, error.value.status) == ("OCIGPU-FAB-5", -7)
    with pytest.raises(FabricError, match="no partition of this board") as error:
        client.deactivate([1, 2])
    assert error.value.code == "OCIGPU-FAB-4"
    known = client.list_partitions()
    manager.restart()
    with pytest.raises(FabricError) as error:
        client.list_partitions()
    assert (error.value.code, error.value.status) == ("OCIGPU-FAB-7", -8)
    assert client.restore([[1, 3]], known) == known
    client.deactivate([1, 3])
    assert manager.active() == []


def test_the_host_remembers_what_it_has_activated_over_there(
    serve: Serve, manager: SimulatedManager, work_directory: Path
) -> None:
    address = f"unix:{work_directory}/fabric.sock"
    serve(address, ME)
    host = KeptFabric(open_fabric(f"grpc:{address}"), FabricStore(f"{work_directory}/state"), "boot")
    host.activate([1, 3], "team-a")
    manager.restart()
    assert host.restore() == ((1, 3),)
    manager.start()
    host.list_partitions()
    assert [one.lease for one in host.read_state().broken] == ["team-a"]


def test_who_is_not_named_is_not_answered(
    serve: Serve, manager: SimulatedManager, work_directory: Path, log: Lines
) -> None:
    address = f"unix:{work_directory}/fabric.sock"
    serve(address, f"uid:{os.getuid() + 1}", "cid:2")
    client = open_fabric(f"grpc:{address}")
    for call in (client.list_partitions, lambda: client.activate([1])):
        with pytest.raises(FabricError) as error:
            call()
        assert error.value.code == "OCIGPU-FAB-2"
        assert "not allowed" in error.value.hint
    assert manager.active() == []
    assert f"warning: refused a connection: {ME} is not allowed" in log.lines


def test_mutual_tls_lets_in_whom_it_names(
    serve: Serve, manager: SimulatedManager, authority: Authority, log: Lines
) -> None:
    server = serve("tcp:127.0.0.1:0", "node-1", "node-3", tls=authority.issue("service"))
    address = f"grpc:{server.address}"
    for name, san in (("node-1", True), ("node-3", False)):
        assert open_fabric(address, tls=authority.issue(name, san)).activate([1, 3]).is_active
    with pytest.raises(FabricError) as error:
        open_fabric(address, tls=authority.issue("node-2")).deactivate([1, 3])
    assert error.value.code == "OCIGPU-FAB-10"
    assert "node-2" in error.value.message
    assert manager.active() == [(1, 3)]
    assert [line for line in log.lines if line.startswith("warning: deactivate 1,3 for node-2")]
    assert [line for line in log.lines if line.startswith("info: activate 1,3 for node-1")]


def test_who_says_nothing_has_his_connection_for_a_moment(
    serve: Serve, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would keep it for two minutes: a thousand of them, and nobody could change partitions."""
    monkeypatch.setattr(fabric_server, "HANDSHAKE", 0.2)
    server = serve("tcp:127.0.0.1:0", "node-1", tls=authority.issue("service"))
    for before in (b"", b"\x16\x03\x01"):
        with socket.create_connection(("127.0.0.1", server.address.number), timeout=60) as silent:
            silent.sendall(before)
            assert silent.recv(1) == b""
    assert open_fabric(f"grpc:{server.address}", tls=authority.issue("node-1")).list_partitions()


def test_mutual_tls_refuses_strangers_on_both_sides(
    serve: Serve, manager: SimulatedManager, authority: Authority, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    stranger = Authority(other)
    server = serve("tcp:127.0.0.1:0", "node-1", tls=authority.issue("service"))
    false_client = stranger.issue("node-1", authority=authority)
    false_server = serve("tcp:127.0.0.1:0", "node-1", tls=stranger.issue("service", authority=authority))
    for address, tls in ((server.address, false_client), (false_server.address, authority.issue("node-1"))):
        with pytest.raises(FabricError) as error:
            open_fabric(f"grpc:{address}", tls=tls).activate([1])
        assert error.value.code == "OCIGPU-FAB-2"
    with pytest.raises(FabricError, match="TCP needs certificates"):
        open_fabric(f"grpc:{server.address}").list_partitions()
    with grpc.insecure_channel(f"127.0.0.1:{server.address.number}") as plain, pytest.raises(grpc.RpcError):
        method(plain, SERVICE, "List")(pb.FabricNothing(), timeout=30)
    assert manager.active() == []


def test_renewed_certificates_are_used_without_a_restart(
    serve: Serve, manager: SimulatedManager, authority: Authority, tmp_path: Path, log: Lines
) -> None:
    (tmp_path / "new").mkdir()
    successor = Authority(tmp_path / "new")
    files = Path(authority.issue("service"))
    server = serve("tcp:127.0.0.1:0", "node-1", tls=str(files))
    address = f"grpc:{server.address}"
    old, new = authority.issue("node-1"), successor.issue("node-1")
    assert open_fabric(address, tls=old).list_partitions()
    for path in Path(successor.issue("service")).iterdir():
        (files / path.name).write_bytes(path.read_bytes())
    assert open_fabric(address, tls=new).list_partitions()
    with pytest.raises(FabricError):
        open_fabric(address, tls=old).list_partitions()
    (files / "tls.key").unlink()
    assert open_fabric(address, tls=new).list_partitions()
    assert [line for line in log.lines if "tls.key" in line]


@pytest.mark.parametrize("ids", [[], [1] * 2, [2000], list(range(1, 18)), [0]])
def test_requests_that_no_client_of_ours_makes(
    serve: Serve, manager: SimulatedManager, work_directory: Path, ids: list[int]
) -> None:
    path = f"{work_directory}/fabric.sock"
    serve(f"unix:{path}", ME)
    with open_channel(path) as channel:
        for name in ("Activate", "Deactivate"):
            with pytest.raises(grpc.RpcError) as error:
                method(channel, SERVICE, name)(pb.FabricGpus(physical_ids=ids), timeout=60)
            assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.RpcError) as error:
            method(channel, SERVICE, "Restore")(pb.FabricActive(active=[pb.FabricGpus()] * 65), timeout=60)
        assert dict(error.value.trailing_metadata())["ocigpu-code"] == "OCIGPU-FAB-4"
    assert manager.active() == []


def test_nobody_listens(work_directory: Path) -> None:
    with pytest.raises(FabricError, match="list partitions: grpc:unix:") as error:
        GrpcFabric(ServiceAddress("unix", f"{work_directory}/none")).list_partitions()
    assert error.value.code == "OCIGPU-FAB-2"


def test_a_place_that_cannot_be_listened_on(serve: Serve, manager: SimulatedManager, work_directory: Path) -> None:
    path = f"{work_directory}/fabric.sock"
    serve(f"unix:{path}", ME)
    with pytest.raises(FabricError, match="Address already in use"):
        serve(f"unix:{path}", ME)
    with pytest.raises(FabricError, match="No such file"):
        serve(f"unix:{work_directory}/none/fabric.sock", ME)
    with pytest.raises(FabricError, match=r"read .*/ca\.crt"):
        serve("tcp:127.0.0.1:0", "node-1", tls=str(work_directory))
    (work_directory / "mine").write_text("kept")
    (work_directory / "link").symlink_to("mine")
    for name in ("mine", "link"):  # a connection to a file that is no socket is refused, too
        with pytest.raises(FabricError, match="Address already in use"):
            serve(f"unix:{work_directory}/{name}", ME)
    assert (work_directory / "link").read_text() == "kept"
    if not (child := os.fork()):  # a server that was never started would abort it
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_socket_left_by_a_service_that_was_killed_is_taken_over(
    serve: Serve, manager: SimulatedManager, work_directory: Path
) -> None:
    path = f"{work_directory}/fabric.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    serve(f"unix:{path}", ME)
    assert open_fabric(f"grpc:unix:{path}").list_partitions()


def vsock_loops_back() -> bool:
    """Whether this kernel can connect a vsock to itself, which few machines for tests can: its symbols say it."""
    return "vsock_loopback" in Path("/proc/kallsyms").read_text()


VMADDR_CID_LOCAL = 1
"""linux/vm_sockets.h."""
WAYS = ["in a unix socket's family", *(["by the kernel's loopback"] if vsock_loops_back() else [])]


@pytest.mark.parametrize("way", WAYS)
def test_a_vsock_on_both_sides(
    serve: Serve,
    manager: SimulatedManager,
    log: Lines,
    work_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """Where the kernel has no loopback, everything between gRPC and the socket's family is what runs."""
    assert ServiceAddress("vsock", "", 6667).endpoint() == (socket.AF_VSOCK, (socket.VMADDR_CID_ANY, 6667))
    assert ServiceAddress("vsock", "42", 6667).endpoint() == (socket.AF_VSOCK, (42, 6667))
    caller = f"cid:{VMADDR_CID_LOCAL}"
    if way == WAYS[0]:
        caller = ME
        monkeypatch.setattr(ServiceAddress, "endpoint", lambda _self: (socket.AF_UNIX, f"{work_directory}/vsock"))
    serve("vsock:6667", caller)
    client = open_fabric(f"grpc:vsock:{VMADDR_CID_LOCAL}:6667")
    assert client.list_partitions() == board_partitions("hopper")
    assert client.activate([2, 4]).physical_ids == (2, 4)
    assert manager.active() == [(2, 4)]
    client.deactivate([2, 4])
    assert [line for line in log.lines if "activate 2,4" in line and "done" in line]


@pytest.mark.parametrize("way", WAYS)
def test_a_caller_on_a_vsock_who_is_not_named_is_not_answered(
    serve: Serve,
    manager: SimulatedManager,
    log: Lines,
    work_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    caller = f"cid:{VMADDR_CID_LOCAL}"
    if way == WAYS[0]:
        caller = ME
        monkeypatch.setattr(ServiceAddress, "endpoint", lambda _self: (socket.AF_UNIX, f"{work_directory}/vsock"))
    serve("vsock:6668", "cid:2", "uid:1")
    with pytest.raises(FabricError) as error:
        open_fabric(f"grpc:vsock:{VMADDR_CID_LOCAL}:6668").activate([1])
    assert (error.value.code, manager.active()) == ("OCIGPU-FAB-2", [])
    assert f"warning: refused a connection: {caller} is not allowed" in log.lines


@pytest.mark.parametrize("text", ["unix:/run/f", "vsock:2:6667", "tcp:node.example:1", "tcp:[::1]:65535"])
def test_addresses_of_the_service(text: str) -> None:
    assert str(parse_service(text)) == text


@pytest.mark.parametrize(
    "text", ["", "unix:f", "vsock:1", "vsock:a:1", "tcp:a", "tcp:a:0", "tcp:a:65536", "tcp:a b:1", "http://a:1"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(FabricError) as error:
        parse_service(text)
    assert error.value.code == "OCIGPU-FAB-1"


def test_listening_addresses() -> None:
    assert str(parse_service("vsock:6667", listening=True)) == "vsock:6667"
    assert parse_service("tcp:0.0.0.0:0", listening=True).number == 0
    with pytest.raises(FabricError):
        parse_service("vsock:2:6667", listening=True)


def test_a_relay_passes_bytes_and_ends_both_ways(work_directory: Path) -> None:
    def listen(name: str) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.bind(f"{work_directory}/{name}")
        made.listen()
        return made

    def dial(name: str) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(60)
        made.connect(f"{work_directory}/{name}")
        return made

    inner = listen("inner")

    def shout() -> None:
        one, _ = inner.accept()
        with one, one.makefile("rb") as lines:
            one.sendall(lines.read().upper())

    thread = threading.Thread(target=shout)
    thread.start()
    relay = Relay(listen("outer"), lambda: dial("inner"))
    with dial("outer") as caller, caller.makefile("rb") as answer:
        caller.sendall(b"a" * 200_000)
        caller.shutdown(socket.SHUT_WR)
        assert answer.read() == b"A" * 200_000
    thread.join()
    waiting = dial("outer")
    held, _ = inner.accept()
    relay.close()
    with waiting, held:
        assert waiting.recv(1) == b""
    inner.close()


def test_the_command_serves_until_it_is_told_to_end(
    fabric_host: Path, manager: SimulatedManager, work_directory: Path
) -> None:
    address = f"unix:{work_directory}/fabric.sock"
    words = [sys.executable, "-m", "ocigpu.cli", "fabric"]
    config = ["--config", str(fabric_host / "config.toml")]
    server = subprocess.Popen([*words, "serve", address, "--allow", ME, *config], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        assert server.stdout.readline() == f"listening on {address}, for {ME}\n"
        done = subprocess.run(
            [*words, "activate", "1,3", "--address", f"grpc:{address}", "--json", *config],
            stdout=subprocess.PIPE, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert json.loads(done.stdout)["partitions"][0]["physical-ids"] == [1, 3]
        assert manager.active() == [(1, 3)]
        server.terminate()
        assert server.wait(60) == 0
        assert not os.path.lexists(f"{work_directory}/fabric.sock")
    finally:
        server.kill()
        server.wait()
        if server.stdout:
            server.stdout.close()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["serve", "vsock:6667"], "no caller is allowed"),
        (["serve", "tcp:127.0.0.1:0", "--allow", "a"], "--serve-tls is for tcp"),
        (["serve", "unix:/f", "--allow", "a", "--serve-tls", "/d"], "--serve-tls is for tcp"),
    ],
)
def test_nothing_is_served_to_everybody(capsys: pytest.CaptureFixture[str], words: list[str], what: str) -> None:
    from ocigpu.cli.front.main import main

    assert main(["fabric", *words]) == 2
    assert what in capsys.readouterr().err


def test_a_machine_without_nvidias_library_serves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ocigpu.cli.front.main import main

    library = f"{tmp_path}/libnvfm.so.1"
    words = ["serve", f"unix:{tmp_path}/fabric", "--allow", ME, "--library", library]
    assert main(["fabric", *words]) == 1
    said = capsys.readouterr()
    assert "OCIGPU-FAB-1: list partitions: load libnvfm" in said.err
    assert "listening" not in said.out + said.err
    assert not (tmp_path / "fabric").exists()
