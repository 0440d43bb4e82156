"""Daemons of a ComputeDomain with a stand-in for nvidia-imex: peers that come, go and return, as processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from domain_lab import DAEMON_ACCOUNT, RACK, SPACE, Rack
from support import nvidia_imex
from support.cluster import Cluster
from support.process import wait_for

from ocigpu.cli.front.main import main
from ocigpu.core.errors import HostError
from ocigpu.kubernetes.cluster.documents import Documents
from ocigpu.kubernetes.domains.imex import (
    ImexOptions,
    check_ready,
    find_peers,
    node_name,
    read_imex_options,
    render_config,
    render_hosts,
)

ENVIRONMENT = {
    "COMPUTE_DOMAIN_UUID": "u", "CLIQUE_ID": RACK, "NODE_NAME": "a", "POD_IP": "10.0.0.1", "POD_NAMESPACE": SPACE,
}  # fmt: skip
OPTIONS = ImexOptions("u", RACK, "a", "10.0.0.1", SPACE)


def entry(node: str, index: int, address: str) -> dict[str, Any]:
    return {"nodeName": node, "index": index, "ipAddress": address, "cliqueID": RACK, "status": "Ready"}


def test_options_come_from_the_pod_and_its_claim() -> None:
    assert read_imex_options(ENVIRONMENT) == OPTIONS
    assert read_imex_options({**ENVIRONMENT, "CLIQUE_ID": ""}).clique == ""
    with pytest.raises(HostError, match="not set in this container: COMPUTE_DOMAIN_UUID, CLIQUE_ID") as raised:
        read_imex_options({name: value for name, value in ENVIRONMENT.items() if name[0] in "NP"})
    assert "is CDI enabled" in str(raised.value.hint)


def test_peers_are_those_of_the_nodes_own_clique() -> None:
    mine = {"daemons": [entry("b", 1, "10.0.0.2"), entry("a", 0, "10.0.0.1")]}
    other = {"daemons": [entry("c", 0, "10.0.0.3")]}
    assert find_peers([other, mine], OPTIONS) == {node_name(0): "10.0.0.1", node_name(1): "10.0.0.2"}
    assert find_peers([other], OPTIONS) == {}
    strange = {"daemons": [entry("a", 0, "10.0.0.1"), entry("x", 1, "evil\n1.2.3.4 host"), entry("y", 99, "10.0.0.9")]}
    assert find_peers([strange], OPTIONS) == {node_name(0): "10.0.0.1"}


def test_the_hosts_file_keeps_what_else_is_in_it() -> None:
    before = "127.0.0.1\tlocalhost\n10.0.0.9\tcompute-domain-daemon-0003\n10.0.0.1\tpod\n"
    text = render_hosts(before, {node_name(0): "10.0.0.1"})
    assert text == "127.0.0.1\tlocalhost\n10.0.0.1\tpod\n10.0.0.1\tcompute-domain-daemon-0000\n"
    assert render_hosts(text, {}) == "127.0.0.1\tlocalhost\n10.0.0.1\tpod\n"


def test_the_configuration_has_keys_of_nvidia_imex() -> None:
    config = dict(line.split("=") for line in render_config(OPTIONS).splitlines())
    assert config["IMEX_NODE_CONFIG_FILE"] == "/imexd/nodes.cfg"
    assert (config["IMEX_CMD_BIND_INTERFACE_IP"], config["DAEMONIZE"]) == ("10.0.0.1", "0")
    assert config["IMEX_WAIT_FOR_QUORUM"] == "RECOVERY"


# --- processes; each node has an address of 127.0.0.0/8, and a file of hosts

_CODE = """
import sys
from ocigpu.kubernetes.domains import daemon
daemon.POLL, daemon.RESYNC = 0.1, float(sys.argv.pop(1))
from ocigpu.cli.front.main import main
sys.exit(main(sys.argv[1:]))
"""


class Daemons:
    """The daemons of a rack's nodes: what kubelets do with the pods."""

    def __init__(self, rack: Rack, uid: str, directory: Path, resync: float = 30.0) -> None:
        self.rack, self.uid, self.directory, self.resync = rack, uid, directory, resync
        self.programs: dict[str, subprocess.Popen[bytes]] = {}
        self.first = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
        path = directory / "bin"
        path.mkdir()
        for name in ("nvidia-imex", "nvidia-imex-ctl"):
            script = path / name
            script.write_text(f"#!{sys.executable}\n{Path(nvidia_imex.__file__).read_text()}")
            script.chmod(0o755)
        self.environment = {"PATH": f"{path}:{os.environ['PATH']}"}

    def address(self, node: str, generation: int = 0) -> str:
        return f"{self.first}.{10 + 20 * generation + ord(node) - ord('a')}"

    def of(self, node: str) -> dict[str, str]:
        """Return the environment of a node's daemon."""
        return {
            **self.environment, "COMPUTE_DOMAIN_UUID": self.uid, "CLIQUE_ID": RACK, "NODE_NAME": node,
            "POD_IP": self.current[node], "POD_NAMESPACE": SPACE, "IMEX_HOSTS": str(self.directory / node / "hosts"),
        }  # fmt: skip

    current: dict[str, str] = {}

    def start(self, node: str, generation: int = 0) -> None:
        """Start a daemon with an address that the API server then has of its pod."""
        self.current = {**self.current, node: self.address(node, generation)}
        place = self.directory / node
        place.mkdir(exist_ok=True)
        (place / "hosts").write_text("127.0.0.1\tlocalhost\n")
        user = {"user": DAEMON_ACCOUNT}
        (place / "kubeconfig").write_text(json.dumps(self.rack.cluster.kubeconfig(**user)))
        words = ["compute-domain", "daemon", f"--directory={place}", f"--hosts={place}/hosts", "--max-nodes=18"]
        with (place / "log").open("ab") as log:
            self.programs[node] = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(self.resync), *words, f"--kubeconfig={place}/kubeconfig"],
                env=self.of(node), stdout=log, stderr=log,
            )  # fmt: skip

    def run_rack(self) -> None:
        """Do a round of controller and kubelets: pods are as ready as their daemons."""
        self.rack.controller.resync()
        self.rack.run_daemons(ready=False)
        for node in self.rack.labels():
            if node in self.current:
                self.rack.set_ready(node, self.uid, self.is_ready(node), self.current[node])
        self.rack.controller.resync()

    def is_ready(self, node: str) -> bool:
        place = self.directory / node
        return self.ask(node, "-q") == "READY" if (place / "imexd.cfg").exists() else False

    def ask(self, node: str, what: str) -> str:
        command = ["nvidia-imex-ctl", "-c", f"{self.directory / node}/imexd.cfg", what]
        return subprocess.run(command, env=self.of(node), capture_output=True, text=True).stdout.strip()

    def connected(self, node: str) -> set[str]:
        return {name.removeprefix("compute-domain-daemon-") for name in self.ask(node, "-N").split()}

    def log(self, node: str) -> str:
        return (self.directory / node / "log").read_text()

    def end(self, node: str, number: int = signal.SIGTERM) -> int:
        program = self.programs.pop(node)
        program.send_signal(number)
        return program.wait(60)

    def close(self) -> None:
        for node in list(self.programs):
            self.end(node)

    def until(self, what: str, condition: Any) -> None:
        def look() -> bool:
            self.run_rack()
            return bool(condition())

        wait_for(what, look, on_failure=lambda: "\n".join(f"{each}:\n{self.log(each)}" for each in self.programs))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def daemons(cluster: Cluster, work_directory: Path) -> Iterator[Daemons]:
    rack = Rack(cluster, *"abcd")
    uid = rack.add_domain()
    made = Daemons(rack, uid, work_directory)
    with ExitStack() as stack:
        stack.callback(made.close)
        yield made


def test_daemons_find_each_other_and_a_node_that_goes_is_replaced(daemons: Daemons) -> None:
    rack, uid = daemons.rack, daemons.uid
    for node in "abc":
        rack.add_claim(node, uid)
        daemons.start(node)
    daemons.until(
        "a domain that is ready", lambda: len(rack.members()) == 3 and rack.domain()["status"]["status"] == "Ready"
    )
    for node, peers in (("a", {"0001", "0002"}), ("b", {"0000", "0002"}), ("c", {"0000", "0001"})):
        wait_for(f"peers of {node}", lambda node=node, peers=peers: daemons.connected(node) == peers)
    started = [line for line in daemons.log("a").splitlines() if "started: process" in line]
    assert len(started) == 1

    # the node is gone: its processes end at once, and its claim with its pod, sooner or later
    assert daemons.end("b", signal.SIGKILL) == -signal.SIGKILL
    orphan = daemons.log("b").rpartition("nvidia-imex started: process ")[2].split()[0]
    os.kill(int(orphan), signal.SIGKILL)
    daemons.until("the node that is not ready", lambda: rack.members()["b"][2] == "NotReady")
    assert rack.members()["a"][2] == "Ready", "its peers go on"
    wait_for("the peer that is gone", lambda: daemons.connected("a") == {"0002"})
    rack.cluster.delete("ResourceClaim", "channel-b", "team")
    rack.add_claim("d", uid)
    daemons.start("d")
    daemons.until("the new node", lambda: rack.members().get("d") == (1, RACK, "Ready"))
    for node, peers in (("a", {"0001", "0002"}), ("c", {"0000", "0001"}), ("d", {"0000", "0002"})):
        wait_for(f"peers of {node}", lambda node=node, peers=peers: daemons.connected(node) == peers)
    assert f"{daemons.address('d')}\tcompute-domain-daemon-0001" in (daemons.directory / "a/hosts").read_text()
    assert daemons.log("a").count("started: process") == 1, "jobs of the others go on: it was told by a signal"
    for node in "acd":
        assert daemons.end(node) == 0


def test_a_daemon_that_crashes_is_started_again(daemons: Daemons) -> None:
    rack, uid = daemons.rack, daemons.uid
    rack.add_claim("a", uid)
    daemons.start("a")
    daemons.until("the node", lambda: rack.members().get("a") == (0, RACK, "Ready"))
    child = daemons.log("a").rpartition("nvidia-imex started: process ")[2].split()[0]
    os.kill(int(child), signal.SIGSEGV)
    wait_for("another process", lambda: daemons.log("a").count("started: process") == 2)
    wait_for("the daemon", lambda: daemons.is_ready("a"))
    assert "nvidia-imex ended with status -11: starting it again" in daemons.log("a")


def test_a_pod_that_is_replaced_has_another_address_for_its_peers(daemons: Daemons) -> None:
    rack, uid = daemons.rack, daemons.uid
    for node in "ab":
        rack.add_claim(node, uid)
        daemons.start(node)
    daemons.until("both", lambda: [each[2] for each in rack.members().values()] == ["Ready"] * 2)
    assert daemons.end("b") == 0
    daemons.start("b", generation=1)
    daemons.until("both again", lambda: daemons.connected("a") == {"0001"} and daemons.connected("b") == {"0000"})
    assert f"{daemons.address('b', 1)}\tcompute-domain-daemon-0001" in (daemons.directory / "a/hosts").read_text()
    assert daemons.log("a").count("started: process") == 1


def test_a_daemon_may_read_the_cliques_of_its_namespace_and_nothing_else(cluster: Cluster) -> None:
    rack = Rack(cluster, "a")
    uid = rack.add_domain()
    rack.add_claim("a", uid)
    rack.settle()
    documents = Documents(cluster.client(DAEMON_ACCOUNT))
    (clique,) = documents.list("ComputeDomainClique", SPACE)[0]
    for change in (
        lambda: documents.update({**clique, "daemons": []}),
        lambda: documents.delete(clique),
        lambda: documents.create({**clique, "metadata": {"name": "x", "namespace": SPACE}}),
        lambda: documents.list("ComputeDomain"),
        lambda: documents.list("Pod", SPACE),
        lambda: documents.list("ComputeDomainClique", "team"),
    ):
        with pytest.raises(HostError, match="403"):
            change()


def test_without_multi_node_nvlink_nothing_runs(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemons.current = {"a": "127.0.0.1"}
    environment = {**daemons.of("a"), "CLIQUE_ID": ""}
    config = daemons.rack.cluster.write_kubeconfig(daemons.directory / "config")
    words = ["compute-domain", "daemon", f"--directory={daemons.directory}", f"--kubeconfig={config}"]
    command = [sys.executable, "-c", _CODE, "30", *words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert "no multi-node NVLink" in program.stdout.readline()
        program.send_signal(signal.SIGTERM)
    assert program.returncode == 0
    assert not (daemons.directory / "imexd.cfg").exists()
    for name, value in {**ENVIRONMENT, "CLIQUE_ID": ""}.items():
        monkeypatch.setenv(name, value)
    assert main(["compute-domain", "check", f"--directory={daemons.directory}"]) == 0
    assert capsys.readouterr().out == ""


def test_the_probe_says_what_nvidia_imex_says(work_directory: Path) -> None:
    answer = work_directory / "ctl"
    for text, status, problem in (
        ("echo READY", 0, ""),
        ("echo INITIALIZING", 0, "INITIALIZING"),
        ("echo DAEMON NOT RUNNING >&2; exit 1", 1, "DAEMON NOT RUNNING"),
    ):
        answer.write_text(f"#!/bin/sh\n{text}\n")
        answer.chmod(0o755)
        options = OPTIONS._replace(control=str(answer), directory=str(work_directory))
        if not problem and not status:
            check_ready(options)
            continue
        with pytest.raises(HostError, match=problem) as raised:
            check_ready(options)
        assert raised.value.code == "OCIGPU-DRA-8"
    with pytest.raises(HostError, match="No such file"):
        check_ready(OPTIONS._replace(control=str(work_directory / "none")))
