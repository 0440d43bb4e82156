"""The service for containers killed by SIGKILL at any moment, while tenants ask and pods come and go."""

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from caas_lab import SEED, TENANCY_TYPE, Lab, ended, running
from support.cluster import Cluster
from support.cluster_rules import Problem
from support.process import wait_for
from support.programs import held_port

from ocigpu.tenants.service.store import CaasStore

SERVE = """
import sys
from ocigpu.tenants.service.reconciler import ReconcilerPace
from ocigpu.tenants.service.server import CaasServer, ServiceOptions
from ocigpu.tenants.service.store import StoreLimits
from ocigpu.system.service import ServiceLog
port, state, config = sys.argv[1:]
limits = StoreLimits(containers=100_000)  # a fast machine makes more than 1,000, and the oldest would be forgotten
options = ServiceOptions(f"127.0.0.1:{port}", state, config, keep_seconds=1e10, pod_seconds=0.0, limits=limits)
CaasServer(options._replace(pace=ReconcilerPace(0.2, 0.02, 0.2, 0.2)), ServiceLog(True)).run()
"""
SPACE = "tenant-landon"
PATH = "/v1/containers"


class Service:
    """The service's process, at one port however often it is killed."""

    def __init__(self, cluster: Cluster, directory: Path, port: int) -> None:
        self.state, self.output = directory / "state", directory / "caas.log"
        self.config = cluster.write_kubeconfig(directory / "kubeconfig")
        store = CaasStore(str(self.state))
        words = ("containers:read", "containers:write", "logs:read")
        self.key = store.keys.add("landon", words, "tests", None)[0]
        store.close()
        self.port = port
        self.child = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        words = [sys.executable, "-c", SERVE, str(self.port), str(self.state), str(self.config)]
        with self.output.open("ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=log)

    def kill(self) -> None:
        os.kill(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def ask(self, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        """Send a request again and again until it is answered; returns status and body."""
        headers = {"Authorization": f"Bearer {self.key}", "Connection": "close", "Content-Type": "application/json"}
        headers |= {"Idempotency-Key": f'"{key}"'} if key else {}
        end = time.monotonic() + 120
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
            try:
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                data = answer.read()
                if answer.status not in (409, 429, 503):  # busy, more than the rate, starting
                    return answer.status, json.loads(data) if data[:1] in (b"{", b"[") else data
            except (OSError, http.client.HTTPException):
                assert time.monotonic() < end, self.output.read_text()[-2000:]
            finally:
                connection.close()
            time.sleep(0.05)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        made.create(TENANCY_TYPE)
        yield made


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


def pods(cluster: Cluster) -> list[str]:
    return [each["metadata"]["name"] for each in cluster.objects("Pod")]


def live(cluster: Cluster, stopping: threading.Event) -> None:
    """Be the scheduler and the kubelet: every pod runs, prints its name, and ends."""
    chance = random.Random(3)
    while not stopping.wait(0.02):
        for name in pods(cluster):
            try:
                pod = cluster.get("Pod", name, SPACE)
                phase = pod.get("status", {}).get("phase")
                if not pod["spec"].get("nodeName"):
                    cluster.bind(name, SPACE, "n1")
                elif pod["metadata"].get("deletionTimestamp"):
                    cluster.delete("Pod", name, SPACE, gracePeriodSeconds=0)
                elif phase not in ("Running", "Succeeded") and chance.random() < 0.5:
                    cluster.logs[SPACE, name] = [f"2026-11-23T10:02:01Z {name} ran"]
                    cluster.patch("Pod", name, {"status": running()}, SPACE, sub="status")
                elif phase == "Running" and chance.random() < 0.3:
                    cluster.patch("Pod", name, {"status": ended()}, SPACE, sub="status")
            except Problem:  # the service has deleted it meanwhile
                continue


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_the_service_killed_at_any_moment(
    cluster: Cluster, port: int, tmp_path: Path, times: Callable[[int], int]
) -> None:
    """What was answered once is so for ever: one container for a key, one pod for a container, and what it printed."""
    Lab(cluster, tmp_path).add_tenancy()
    service, stopping, chance = Service(cluster, tmp_path, port), threading.Event(), random.Random(17)
    ids: dict[str, str] = {}
    deleted: set[str] = set()
    failures: list[BaseException] = []

    def be_a_tenant() -> None:
        try:
            for number in range(1_000_000):
                if stopping.is_set():
                    return
                body = {**SEED, **({"secrets": {"A": "b"}} if number % 3 == 0 else {})}
                status, made = service.ask("POST", PATH, body, f"key {number}")
                assert status == 202, made
                ids[f"key {number}"] = made["id"]
                if number % 5 == 4:
                    assert service.ask("DELETE", f"{PATH}/{made['id']}")[0] in (202, 404)
                    deleted.add(made["id"])
        except BaseException as error:  # noqa: BLE001 - the test's own thread tells it
            failures.append(error)

    threads = [threading.Thread(target=be_a_tenant), threading.Thread(target=live, args=(cluster, stopping))]
    try:
        for thread in threads:
            thread.start()
        for _ in range(times(100)):
            time.sleep(chance.uniform(0.0, 2.0))
            service.kill()
            service.child = service.start()
        wait_for("some containers", lambda: len(ids) > times(50) or failures, 200)
        stopping.set()
        threads[0].join()
        assert not failures, failures
        stopping.clear()
        kubelet = threading.Thread(target=live, args=(cluster, stopping))
        threads.append(kubelet)
        kubelet.start()

        for key, container in ids.items():
            body = {**SEED, **({"secrets": {"A": "b"}} if int(key.split()[1]) % 3 == 0 else {})}
            if container in deleted:
                wait_for("its end", lambda one=container: service.ask("GET", f"{PATH}/{one}")[0] == 404)
                continue
            assert service.ask("POST", PATH, body, key)[1]["id"] == container
            found = service.ask("GET", f"{PATH}/{container}?wait=finished&timeout=60")[1]
            assert found["lifecycle"] == "finished", found
            name = container.replace("_", "-")
            assert service.ask("GET", f"{PATH}/{container}/logs")[1] == f"{name} ran\n".encode()
        wait_for("the last pods' end", lambda: not cluster.objects("Pod"), 100)
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
        service.kill()
    made = Counter(
        event.object["metadata"]["name"]
        for event in cluster.history()
        if event.key == "/pods" and event.type == "ADDED"
    )
    assert set(made.values()) == {1}, made.most_common(3)
    assert {container.replace("_", "-") for container in set(ids.values()) - deleted} <= set(made)
    assert not cluster.objects("Secret")
    assert len(set(ids.values())) == len(ids)
    log = service.output.read_text()
    assert "Traceback" not in log
    assert '"error"' not in log, [line for line in log.splitlines() if '"error"' in line][:3]
    print(f"{len(ids)} containers, {len(deleted)} of them deleted")
