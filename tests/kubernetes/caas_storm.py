"""Replicas of the service for containers under load, killed at random: nothing may be lost, doubled or left out.

``python tests/kubernetes/caas_storm.py --containers 10000 --clients 200`` prints the figures of docs/RELIABILITY.md.
"""

import argparse
import http.client
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from caas_lab import SEED, TENANCY_TYPE, Lab, ended, running
from support.cluster import Cluster
from support.cluster_rules import Problem
from support.postgresql import postgres
from support.process import wait_for
from support.programs import held_port

from ocigpu.tenants.service.request import STREAM
from ocigpu.tenants.service.store import CaasStore

SERVE = """
import sys
from ocigpu.system.service import ServiceLog
from ocigpu.tenants.service.reconciler import ReconcilerPace
from ocigpu.tenants.service.request import TenantRules
from ocigpu.tenants.service.server import CaasServer, ServiceOptions
from ocigpu.tenants.service.store import StoreLimits
port, state, config = sys.argv[1:]
options = ServiceOptions(
    f"127.0.0.1:{port}", state, config, rules=TenantRules(rate=1e6), keep_seconds=1e10, pod_seconds=0.0,
    limits=StoreLimits(containers=100_000), pace=ReconcilerPace(5.0, 0.05, 0.5, 1.0),
)
CaasServer(options, ServiceLog(True)).run()
"""
PATH = "/v1/containers"


class Replicas:
    """Processes of the service with one database; ``kills``, ``updates``: how many were ended each way."""

    def __init__(self, directory: Path, url: str, config: Path, ports: list[int]) -> None:
        self.output, self._words, self.ports = directory / "caas.log", (url, str(config)), ports
        self.kills = self.updates = 0
        self.stopped = False
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(len(ports)):
            self.start(number)

    def start(self, number: int) -> None:
        words = [sys.executable, "-c", SERVE, str(self.ports[number]), *self._words]
        with self.output.open("ab") as log:
            self.children[number] = subprocess.Popen(words, stdout=log, stderr=log)

    def end(self, number: int, by: int) -> None:
        """End a replica and start it again."""
        self.children[number].send_signal(by)
        self.children[number].wait(60)
        self.start(number)
        if by == signal.SIGKILL:
            self.kills += 1
        else:
            self.updates += 1

    def is_ready(self, number: int) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[number], timeout=20)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def ask(self, method: str, path: str, key: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Send a request to one replica after another, in any order, until it is answered."""
        given = {"Authorization": f"Bearer {key}", "Connection": "close", "Content-Type": "application/json", **headers}
        end = time.monotonic() + 300
        for port in itertools.cycle(random.sample(self.ports, len(self.ports))):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.request(method, path, None if body is None else json.dumps(body), given)
                answer = connection.getresponse()
                data = answer.read()
                if answer.status not in (409, 429, 503):
                    return answer.status, json.loads(data) if data[:1] in (b"{", b"[") else data
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            assert time.monotonic() < end, self.output.read_text()[-2000:]
            assert not self.stopped
            time.sleep(0.05)
        raise AssertionError

    def stop(self) -> None:
        self.stopped = True
        for child in self.children.values():
            child.kill()
            child.wait()


class Storm:
    """Clients, a kubelet, a reader of the event stream, and what ends replicas; :meth:`check` judges the result."""

    def __init__(self, cluster: Cluster, store: CaasStore, replicas: Replicas, tenancies: list[str], seed: int) -> None:
        self.cluster, self.store, self.replicas = cluster, store, replicas
        words = ("containers:read", "containers:write", "logs:read")
        self.keys = {name: store.keys.add(name, words, "storm", None)[0] for name in tenancies}
        self.admin = store.keys.add(None, ["admin"], "storm", None)[0]
        self.ids: dict[str, str] = {}
        self.deleted: set[str] = set()
        self.seconds: list[float] = []
        self.events: list[dict[str, Any]] = []
        self.reconnects = 0
        self.failures: list[BaseException] = []
        self._seed, self._over, self._numbers = seed, threading.Event(), itertools.count()

    def run(self, containers: int, clients: int, pause: float) -> float:
        """Create so many containers; a replica is killed every ``pause`` seconds on average.  Returns the seconds."""
        helpers = [threading.Thread(target=self._watch, args=(each, pause)) for each in (self._live, self._read)]
        chaos, calm = threading.Thread(target=self._watch, args=(self._end_replicas, pause)), threading.Event()
        self._calm = calm
        work = [threading.Thread(target=self._watch, args=(self._be_a_client, containers)) for _ in range(clients)]
        begun = time.monotonic()
        for thread in (*helpers, chaos, *work):
            thread.start()
        try:
            for thread in work:
                thread.join()
            if self.failures:
                raise self.failures[0]
            took = time.monotonic() - begun
            calm.set()
            chaos.join()
            wait_for("the last end", lambda: bool(self.failures) or not self.store.list_live(), 1800)
            last = self.store.events.last()

            def has_all() -> bool:
                return bool(self.failures) or (bool(self.events) and self.events[-1]["id"] >= last)

            wait_for("the stream", has_all, 120)
        finally:
            calm.set()
            self._over.set()
            for thread in (*helpers, chaos):
                thread.join()
        assert not self.failures, self.failures
        return took

    def _watch(self, work: Any, *words: Any) -> None:
        try:
            work(*words)
        except BaseException as error:  # noqa: BLE001 - the test's own thread tells it
            self.failures.append(error)

    def _be_a_client(self, containers: int) -> None:
        names = list(self.keys)
        while (number := next(self._numbers)) < containers and not self.failures:
            key = self.keys[names[number % len(names)]]
            body = {
                **SEED,
                "tenancy": names[number % len(names)],
                **({"secrets": {"A": "b"}} if not number % 3 else {}),
            }
            begun = time.monotonic()
            status, made = self.replicas.ask("POST", PATH, key, body, **{"Idempotency-Key": f'"key {number}"'})
            self.seconds.append(time.monotonic() - begun)
            assert status == 202, made
            self.ids[f"{names[number % len(names)]} key {number}"] = made["id"]
            if number % 5 == 4:
                assert self.replicas.ask("DELETE", f"{PATH}/{made['id']}", key)[0] in (202, 404)
                self.deleted.add(made["id"])

    def _live(self, _pause: float) -> None:
        """Be the scheduler and the kubelet: every pod runs and ends, or ends when it is deleted."""
        while not self._over.wait(0.05):
            for pod in self.cluster.objects("Pod"):
                name, space = pod["metadata"]["name"], pod["metadata"]["namespace"]
                try:
                    if pod["metadata"].get("deletionTimestamp"):
                        self.cluster.delete("Pod", name, space, gracePeriodSeconds=0)
                    elif not pod["spec"].get("nodeName"):
                        self.cluster.bind(name, space, "n1")
                        self.cluster.patch("Pod", name, {"status": running()}, space, sub="status")
                    elif pod.get("status", {}).get("phase") == "Running":
                        self.cluster.patch("Pod", name, {"status": ended()}, space, sub="status")
                except Problem:  # the service has deleted it meanwhile
                    continue

    def _read(self, _pause: float) -> None:
        """Follow all events, at whichever replica answers, from the last one on."""
        chance = random.Random(self._seed)
        while not self._over.is_set():
            port = chance.choice(self.replicas.ports)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            last = str(self.events[-1]["id"]) if self.events else "0"
            headers = {"Authorization": f"Bearer {self.admin}", "Accept": STREAM, "Last-Event-ID": last}
            try:
                connection.request("GET", "/v1/events", headers=headers)
                answer = connection.getresponse()
                while answer.status == 200 and not self._over.is_set():
                    line = answer.readline()
                    if not line:
                        break
                    if line.startswith(b"data: ") and line.endswith(b"\n"):
                        self.events.append(json.loads(line[6:]))
            except (OSError, http.client.HTTPException, ValueError):
                pass
            finally:
                connection.close()
            self.reconnects += 1
            time.sleep(0.05)

    def _end_replicas(self, pause: float) -> None:
        """Kill a replica now and then; every tenth time, update all of them, one after another."""
        chance = random.Random(self._seed)
        for number in itertools.count(1):
            if self._calm.wait(chance.uniform(0, 2 * pause)):
                return
            if number % 10:
                self.replicas.end(chance.randrange(len(self.replicas.ports)), signal.SIGKILL)
                continue
            for each in range(len(self.replicas.ports)):
                self.replicas.end(each, signal.SIGTERM)
                wait_for("the new one", lambda one=each: self.replicas.is_ready(one), 120)

    def check(self, containers: int) -> None:
        """One container for a key, one pod for a container, one event for each thing that happened; nothing left."""
        assert len(self.ids) == containers
        assert len(set(self.ids.values())) == containers, "a container for two keys"
        numbers = [one["id"] for one in self.events]
        assert numbers == sorted(set(numbers)), "events out of order, or twice"
        made = Counter(one["container"] for one in self.events if one["kind"] == "created")
        assert made == Counter(self.ids.values()), "a container that nobody was told of, or an event that did not come"
        over = Counter(one["container"] for one in self.events if one["lifecycle"] in ("finished", "failed"))
        assert set(self.ids.values()) - self.deleted <= set(over)
        wrong = [one for one in self.events if one["lifecycle"] == "failed" and one["container"] not in self.deleted]
        assert not wrong, wrong[:3]
        kept = [one.id for one in self.store.events.after(0, limit=1_000_000)]
        assert set(kept) <= set(numbers), "the stream left events out"
        pods = Counter(
            event.object["metadata"]["name"]
            for event in self.cluster.history()
            if event.key == "/pods" and event.type == "ADDED"
        )
        assert set(pods.values()) == {1}, pods.most_common(3)
        assert {one.replace("_", "-") for one in set(self.ids.values()) - self.deleted} <= set(pods)
        wait_for("the last pods' end", lambda: not self.cluster.objects("Secret"), 120)
        log = self.replicas.output.read_text()
        assert "Traceback" not in log, log[log.find("Traceback") :][:3000]
        assert "OCIGPU-INT" not in log


@contextmanager
def storm(directory: Path, url: str, replicas: int = 3, tenancies: int = 10, seed: int = 17) -> Iterator[Storm]:
    with ExitStack() as all_:
        cluster = all_.enter_context(Cluster())
        cluster.create(TENANCY_TYPE)
        names = [f"tenant{number}" for number in range(tenancies)]
        lab = Lab(cluster, directory)
        for name in names:
            lab.add_tenancy(name)
        ports = [all_.enter_context(held_port()) for _ in range(replicas)]
        store = CaasStore(url)
        all_.callback(store.close)
        made = Replicas(directory, url, cluster.write_kubeconfig(directory / "kubeconfig"), ports)
        all_.callback(made.stop)
        for number in range(replicas):
            wait_for("a replica", lambda one=number: made.is_ready(one), 120, on_failure=made.output.read_text)
        yield Storm(cluster, store, made, names, seed)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--containers", type=int, default=1000)
    options.add_argument("--clients", type=int, default=200)
    options.add_argument("--pause", type=float, default=5.0)
    words = options.parse_args()
    with ExitStack() as all_:
        directory = Path(all_.enter_context(tempfile.TemporaryDirectory()))
        server = all_.enter_context(postgres(fsync=True))
        made = all_.enter_context(storm(directory, server.make_database()))
        took = made.run(words.containers, words.clients, words.pause)
        made.check(words.containers)
        quantiles = statistics.quantiles(made.seconds, n=100, method="inclusive")
        print(
            f"{words.containers} containers, {len(made.deleted)} deleted early, by {words.clients} clients in"
            f" {took:.0f} s; accepted after {quantiles[49]:.2f} s (median), {quantiles[98]:.2f} s (99 of 100),"
            f" {max(made.seconds):.2f} s (longest); {made.replicas.kills} kills, {made.replicas.updates} replicas"
            f" updated; {len(made.events)} events, {made.reconnects} reconnections; load {os.getloadavg()}"
        )


if __name__ == "__main__":
    main()
