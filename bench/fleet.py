"""``make fleet``: the service for containers in front of 100 servers with 8 GPUs each, or more.

Real are the programs of the control plane: `ocigpu caas serve` (SQLite, one replica), `ocigpu tenancy controller`, and
the part of each node's `ocigpu lease agent` that speaks to the cluster, all nodes in one process. The API server is the
tests' own, in Python, with the chart's roles and policies; scheduler and kubelets are models beside it, which bind,
start and end pods at once. Clients in ten tenancies create a burst of containers with 1, 2, 4 and 8 GPUs; then the
service is cut off from the API server for a while, and in the end everything is deleted.
"""

import argparse
import http.client
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from lightkube import Client

from bench.hosts import REPOSITORY
from bench.output import Output
from bench.packing import SIZES, Fleet, churn, fill
from bench.wire import Wire
from ocigpu.kubernetes.cluster.client import open_client
from ocigpu.kubernetes.cluster.documents import Documents
from ocigpu.kubernetes.leases.lease import Lease, LeaseHolder, Phase
from ocigpu.kubernetes.leases.objects import make_lease_status
from ocigpu.kubernetes.leases.report import API, KIND, LeaseReporter, LeaseWatch, lease_name
from ocigpu.system.service import ServiceLog
from ocigpu.tenants.service.request import STREAM
from ocigpu.tenants.service.store import CaasStore

TENANCIES, CLIENTS = 10, 80
SERVICE = "system:serviceaccount:ocigpu:ocigpu-caas"
CONTROLLER = "system:serviceaccount:ocigpu:ocigpu-tenancy-controller"
AGENTS = "system:serviceaccount:ocigpu:ocigpu-lease-agent"
USERS = {"caas serve": SERVICE, "tenancy controller": CONTROLLER, "lease agents, all": AGENTS}
PACKAGING = REPOSITORY / "packaging/kubernetes"
GPUS = tuple(f"0000:{number:02x}:00.0" for number in range(1, 9))
RECLAIM_SECONDS, CHECK_SECONDS = 3.0, 8.0
PATH = "/v1/containers"


def main() -> int:
    parser = argparse.ArgumentParser(prog="fleet", description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--containers", type=int, default=800, help="of the burst (default 800)")
    parser.add_argument("--rest", type=float, default=20, help="seconds in which nothing happens (default 20)")
    parser.add_argument("--cut", type=float, default=30, help="seconds without the API server (default 30)")
    parser.add_argument("--no-agents", action="store_true", help="leases are there, and nobody writes them")
    parser.add_argument("--agents", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the programs end, too
    if options.agents:
        run_agents(options.agents, options.nodes)
        return 0
    out = Output()
    out.say(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPUs, {options.nodes} nodes with 8 GPUs")
    show_packing(out, options.nodes)
    with (
        tempfile.TemporaryDirectory(prefix="ocigpu-bench-") as name,
        fleet(Path(name), options.nodes, not options.no_agents, out) as made,
    ):
        made.rest(options.rest)
        made.burst(options.containers)
        made.cut(options.cut)
        made.end()
        made.show()
    return 0


def show_packing(out: Output, nodes: int) -> None:
    """Print how full the model of a fleet gets."""
    ways = {
        (False, False): "spread, before",
        (True, False): "packed, before",
        (False, True): "spread",
        (True, True): "packed",
    }
    rows, busy = [], []
    for (pack, fit), name in ways.items():
        found = [fill(nodes, pack, fit, seed) for seed in range(5)]
        mean = {key: fmean(one[key] for one in found) for key in found[0]}
        rows.append([name, f"{mean['full']:.0%}", f"{mean['eights']:.0%}", f"{mean['free']:.0f}"])
        lives = churn(nodes, pack, fit, 17)
        failed = " / ".join(f"{lives[f'failed{size}']:.0%}" for size in SIZES)
        busy.append(
            [name, f"{lives['full']:.0%}", failed, f"{lives['median8']:.2f}", f"{lives['late8']:.2f}",
             f"{lives['stuck']:.0%}"]
        )  # fmt: skip
    columns = ["scheduler", "GPUs in use", "requests of 8 that found a node", "GPUs free in the end"]
    out.table("Filled: as many GPUs requested as there are, nothing ends (mean of 5)", columns, rows)
    columns = ["scheduler", "GPUs in use", "failed: 1 / 2 / 4 / 8 GPUs", "8 GPUs wait (median)", "95 of 100",
               "of 8 waits, 8 or more are free"]  # fmt: skip
    out.table("Busy: 85 % requested, containers come and go; waits in mean lives of a container", columns, busy)


# the nodes' agents, in a process of their own


def run_agents(kubeconfigs: Path, nodes: int) -> None:
    """Report the leases of all nodes; standard input has lines of JSON: the node's number, GPUs, and holder or null."""
    log, pool = ServiceLog(True), ThreadPoolExecutor(8)
    leases = [{gpu: Lease(gpu, phase=Phase.FREE) for gpu in GPUS} for _ in range(nodes)]
    reporters = []
    for node in range(nodes):
        documents, watched = (Documents(open_client(Client, str(kubeconfigs / name_of(node)))) for _ in range(2))
        watch = LeaseWatch(watched, name_of(node))
        watch.start()
        reporters.append(LeaseReporter(documents, name_of(node), pool, log, watch=watch))
    later: deque[tuple[float, int, str, Phase]] = deque()

    def change(node: int, gpu: str, phase: Phase, holder: LeaseHolder | None = None) -> None:
        before = leases[node][gpu]
        leases[node] |= {gpu: replace(before, phase=phase, holder=holder, turn=before.turn + 1)}

    def read() -> None:
        for line in sys.stdin:
            node, ids, holder = json.loads(line)
            for gpu in (GPUS[number - 1] for number in ids):
                if holder:
                    change(node, gpu, Phase.LEASED, LeaseHolder(*holder))
                    continue
                change(node, gpu, Phase.RECLAIMING)
                later.append((time.monotonic() + RECLAIM_SECONDS, node, gpu, Phase.CHECKING))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        now = time.monotonic()
        while later and later[0][0] <= now:
            _, node, gpu, phase = later.popleft()
            change(node, gpu, phase)
            if phase is Phase.CHECKING:
                later.append((now + CHECK_SECONDS, node, gpu, Phase.FREE))
        for reporter, known in zip(reporters, leases, strict=True):
            reporter.step(dict(known), now)
        time.sleep(max(0.0, now + 1.0 - time.monotonic()))


def name_of(node: int) -> str:
    return f"node{node:04}"


# everything else


class RunningFleet:
    """The programs, and the cluster in front of which they run."""

    def __init__(self, directory: Path, nodes: int, agents: bool, out: Output, stack: ExitStack) -> None:
        sys.path.insert(0, str(REPOSITORY / "tests"))
        self._agents = agents
        self._directory, self._nodes, self._out = directory, nodes, out
        self.requests: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.pods: dict[str, float] = {}
        self.runs: dict[str, float] = {}
        self.waiting: list[tuple[str, str, int]] = []
        self.placed: dict[str, tuple[int, frozenset[int]]] = {}
        self._model = Fleet(nodes, pack=True, fit=True, chance=random.Random(17))
        self._rows: list[list[str]] = []
        self.cluster = stack.enter_context(importlib.import_module("support.cluster").Cluster(bookmark_seconds=10.0))
        self._count_users()
        self._install()
        self.wire = stack.enter_context(Wire(self.cluster.url))
        self.programs: dict[str, subprocess.Popen[str]] = {}
        self._over = threading.Event()
        stack.callback(self._stop)
        self._start()

    def _count_users(self) -> None:
        """Count requests and events of watches by user, in the server."""
        route, watch = self.cluster.route, self.cluster.watch

        def counted_route(*words: Any) -> Any:
            request = route(*words)
            self.requests[getattr(getattr(request, "user", None), "name", "")] += 1
            return request

        def counted_watch(request: Any) -> Iterator[Any]:
            for event in watch(request):
                self.events[request.user.name] += bool(event) and event["type"] != "BOOKMARK"
                yield event

        self.cluster.route, self.cluster.watch = counted_route, counted_watch

    def _install(self) -> None:
        for name in ("tenants.yaml", "caas.yaml", "leases.yaml", "kata-runtimeclass.yaml"):
            self.cluster.apply_manifests(PACKAGING / name)
        for node in range(self._nodes):
            capacity = {"nvidia.com/gpu": "8", "cpu": "192", "memory": "2Ti", "pods": "110"}
            status = {
                "capacity": capacity,
                "allocatable": capacity,
                "conditions": [{"type": "Ready", "status": "True"}],
            }
            metadata = {"name": name_of(node), "labels": {"kubernetes.io/hostname": name_of(node)}}
            self.cluster.create(
                {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": status}
            )
            if not self._agents:
                self._make_leases(node)

    def _start(self) -> None:
        def config(user: str) -> Path:
            path = self._directory / f"{user.rpartition(':')[2]}.json"
            path.write_text(json.dumps(self.cluster.kubeconfig(user)).replace(
                self.cluster.url, self.wire.url if user == SERVICE else self.cluster.url))  # fmt: skip
            return path

        begun = time.monotonic()
        with importlib.import_module("support.programs").held_port() as self.port:
            state = self._directory / "state"
            ocigpu = [sys.executable, "-m", "ocigpu"]
            self._run("tenancy controller", [*ocigpu, "tenancy", "controller"], KUBECONFIG=str(config(CONTROLLER)))
            self._run(
                "caas serve",
                [*ocigpu, "caas", "serve", "--kubeconfig", str(config(SERVICE)), "--listen", f"127.0.0.1:{self.port}",
                 "--store", str(state), "--registry", "registry.example", "--audit", str(self._directory / "audit")],
            )  # fmt: skip
            if self._agents:
                self._run_agents()
            wait("the service", lambda: self.ask("GET", "/readyz", "")[0] == 200)
        store = CaasStore(str(state))
        quota = {"gpus": 8 * self._nodes, "pods": 1000, "cpu": "100000", "memory": "1000Ti"}
        self.keys = {}
        for number in range(TENANCIES):
            name = f"tenant{number}"
            self.cluster.create({
                "apiVersion": "ocigpu.io/v1alpha1", "kind": "Tenancy", "metadata": {"name": name},
                "spec": {"quota": quota},
            })  # fmt: skip
            scopes = ("containers:read", "containers:write", "logs:read")
            self.keys[name] = store.keys.add(name, scopes, "fleet", None)[0]
        self.admin = store.keys.add(None, ["admin"], "fleet", None)[0]
        store.close()
        self.told: dict[tuple[str, str], float] = {}
        threading.Thread(target=self._follow, daemon=True).start()
        threading.Thread(target=self._be_nodes, daemon=True).start()

        def ready() -> bool:
            found = self.cluster.objects("Tenancy")
            return all((one.get("status") or {}).get("phase") == "Ready" for one in found)

        wait("the tenancies", ready)
        wait("the leases", lambda: len(self.cluster.objects("GPULease")) == 8 * self._nodes)
        self._out.say("", f"All programs, {TENANCIES} tenancies and {8 * self._nodes} leases were there after"
                      f" {time.monotonic() - begun:.0f} s.")  # fmt: skip

    def _run_agents(self) -> None:
        agents = self._directory / "agents"
        agents.mkdir()
        for name in map(name_of, range(self._nodes)):
            (agents / name).write_text(json.dumps(self.cluster.kubeconfig(AGENTS, node=name)))
        words = [sys.executable, "-m", "bench.fleet", "--agents", str(agents), "--nodes", str(self._nodes)]
        self._run("lease agents, all", words)

    def _make_leases(self, node: int) -> None:
        """Have the objects of a node that nobody writes any more."""
        for module, gpu in enumerate(GPUS, 1):
            head = {"apiVersion": API, "kind": KIND, "metadata": {"name": lease_name(name_of(node), gpu)}}
            spec = {"nodeName": name_of(node), "pciAddress": gpu}
            status = make_lease_status(Lease(gpu, Phase.FREE), stamp(), {"metadata": {"generation": 1}}, module)
            shown = {name: value for name, value in status.items() if value is not None}
            self.cluster.create({**head, "spec": spec, "status": shown})

    def _run(self, name: str, command: list[str], **variables: str) -> None:
        with (self._directory / f"{name}.log").open("wb") as log:
            self.programs[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, cwd=REPOSITORY,
                env={**os.environ, **variables},
            )  # fmt: skip

    def _stop(self) -> None:
        self._over.set()
        for child in self.programs.values():
            child.kill()
            child.wait()

    # scheduler and kubelets

    def _be_nodes(self) -> None:
        """Bind pods, let them run, and end them; the agents are told."""
        seen = 0
        while not self._over.is_set():
            for event in self.cluster._events_after(seen):
                seen = event.version
                if event.key == "/pods":
                    with suppress(importlib.import_module("support.cluster_rules").Problem):
                        self._take(event)
            time.sleep(0.01)

    def _take(self, event: Any) -> None:
        metadata, spec = event.object["metadata"], event.object["spec"]
        name, space = metadata["name"], metadata["namespace"]
        if event.type == "ADDED":
            self.pods[name] = time.monotonic()
            size = int(spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
            if not self._bind(name, space, size):
                self.waiting.append((name, space, size))
        elif event.type == "DELETED" and (place := self.placed.pop(name, None)):
            self._model.set_free(place[0], self._model.free[place[0]] | place[1])
            self._tell(*place, None)
            self.waiting = [one for one in self.waiting if not self._bind(*one)]
        elif event.type == "DELETED":
            self.waiting = [one for one in self.waiting if one[0] != name]
        elif metadata.get("deletionTimestamp"):
            self.cluster.delete("Pod", name, space, gracePeriodSeconds=0)

    def _bind(self, name: str, space: str, size: int) -> bool:
        place = self._model.place(size)
        if place is None:
            return False
        self.placed[name] = place
        self.cluster.bind(name, space, name_of(place[0]))
        self.cluster.patch("Pod", name, {"status": status_of(running={"startedAt": stamp()})}, space, sub="status")
        self.runs[name] = time.monotonic()
        self._tell(*place, (space, name, "main"))
        return True

    def _tell(self, node: int, gpus: frozenset[int], holder: tuple[str, str, str] | None) -> None:
        child = self.programs.get("lease agents, all")
        if child and child.stdin:
            child.stdin.write(json.dumps([node, sorted(gpus), holder]) + "\n")
            child.stdin.flush()

    # what is measured

    def ask(self, method: str, path: str, key: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            data = answer.read()
            return answer.status, json.loads(data) if data[:1] == b"{" else data
        except OSError:
            return 0, None
        finally:
            connection.close()

    def _follow(self) -> None:
        """Note when the service tells of what becomes of containers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", "/v1/events", headers={"Authorization": f"Bearer {self.admin}", "Accept": STREAM})
        answer = connection.getresponse()
        with suppress(OSError, http.client.HTTPException):
            while line := answer.readline():
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    self.told.setdefault((event["container"], event["lifecycle"]), time.monotonic())

    @contextmanager
    def measured(self, what: str) -> Iterator[None]:
        """Add rows about the time in which the block runs."""
        requests, events = self.requests.copy(), self.events.copy()
        before, begun = {name: usage(child.pid) for name, child in self.programs.items()}, time.monotonic()
        yield
        seconds = time.monotonic() - begun
        for name, child in self.programs.items():
            user, now = USERS[name], usage(child.pid)
            self._rows.append([
                what, name, f"{seconds:.0f}", f"{(self.requests[user] - requests[user]) / seconds:.1f}",
                f"{(self.events[user] - events[user]) / seconds:.1f}", f"{(now[0] - before[name][0]) / seconds:.0%}",
                f"{now[1]:.0f}", f"{now[2]:.0f}",
            ])  # fmt: skip

    def rest(self, seconds: float) -> None:
        with self.measured("rest"):
            time.sleep(seconds)

    def burst(self, containers: int) -> None:
        """Create containers as fast as the clients can; wait until each has a pod, and each with GPUs is told of."""
        chance, begun, accepted = random.Random(17), dict[str, float](), list[float]()
        work = deque((number, chance.choice(SIZES)) for number in range(containers))

        def be_a_client() -> None:
            while True:
                try:
                    number, size = work.popleft()
                except IndexError:
                    return
                tenancy = f"tenant{number % TENANCIES}"
                body = {"image": "registry.example/cuda:12", "gpus": size}
                start = time.monotonic()
                while (answer := self.ask("POST", PATH, self.keys[tenancy], body))[0] == 429:
                    time.sleep(0.2)
                if answer[0] != 202:
                    raise RuntimeError(answer)
                accepted.append(time.monotonic() - start)
                begun[answer[1]["id"]] = start

        with self.measured("burst"):
            run_all(be_a_client, CLIENTS)
            took = max(begun[one] for one in begun) - min(begun.values())
            wait("the pods", lambda: len(self.pods) >= containers)
            wait("the news", lambda: all((pod.replace("-", "_", 1), "running") in self.told for pod in list(self.runs)))
        until_pod = [self.pods[one.replace("_", "-")] - start for one, start in begun.items()]
        lag = [self.told[pod.replace("-", "_", 1), "running"] - at for pod, at in self.runs.items()]
        all_gpus = 8 * self._nodes
        used = all_gpus - self._model.free_gpus
        self._out.say("", f"{containers} containers by {CLIENTS} clients in {took:.1f} s; {len(self.runs)} got GPUs:"
                      f" {used} of {all_gpus} in use, {len(self.waiting)} wait.")  # fmt: skip
        self._out.table(
            "Burst, in seconds", ["from", "median", "95 of 100", "longest"],
            [spread_of("POST to its answer", accepted), spread_of("POST to pod", until_pod),
             spread_of("pod runs to event of the service", lag)],
        )  # fmt: skip

    def cut(self, seconds: float) -> None:
        """Cut the service off; containers end meanwhile, and tenants go on."""
        ending = list(self.runs)[:20]
        answers: list[tuple[int, float]] = []

        def be_a_client() -> None:
            start = time.monotonic()
            status, _ = self.ask("POST", PATH, self.keys["tenant0"], {"image": "registry.example/cuda:12", "gpus": 1})
            answers.append((status, time.monotonic() - start))

        with self.measured("cut off"):
            self.wire.cut()
            begun = time.monotonic()
            for name in ending:
                space = next(each["metadata"]["namespace"] for each in self.cluster.objects("Pod")
                             if each["metadata"]["name"] == name)  # fmt: skip
                state = {"exitCode": 0, "reason": "Completed", "startedAt": stamp(), "finishedAt": stamp()}
                self.cluster.patch(
                    "Pod", name, {"status": status_of("Succeeded", terminated=state)}, space, sub="status"
                )
            run_all(be_a_client, 8)
            key = self.keys["tenant0"]
            reads = [self.ask("GET", PATH, key)[0] for _ in range(10)]
            time.sleep(max(0.0, begun + seconds - time.monotonic()))
        with self.measured("mended"):
            self.wire.mend()
            mended = time.monotonic()
            wait(
                "a container", lambda: self.ask("POST", PATH, key, {"image": "registry.example/x", "gpus": 1})[0] == 202
            )
            again = time.monotonic() - mended
            ids = [name.replace("-", "_", 1) for name in ending]
            wait("the ends", lambda: all((one, "finished") in self.told for one in ids))
            noticed = max(self.told[one, "finished"] for one in ids) - mended
        statuses = Counter(status for status, _ in answers)
        self._out.say(
            "", f"Cut off from the API server for {seconds:.0f} s: POST {dict(statuses)} after"
            f" {max(each for _, each in answers):.1f} s at most, GET {dict(Counter(reads))}. Then POST 202 after"
            f" {again:.1f} s, and the {len(ending)} containers that had ended were told of after {noticed:.1f} s.",
        )  # fmt: skip

    def end(self) -> None:
        """Delete everything."""
        ids = deque[tuple[str, str]]()
        for tenancy, key in self.keys.items():
            cursor = ""
            while True:
                _, page = self.ask("GET", f"{PATH}?limit=200&cursor={cursor}", key)
                ids += [(one["id"], tenancy) for one in page["items"]]
                cursor = page["next_cursor"]
                if not cursor:
                    break
        count = len(ids)

        def be_a_client() -> None:
            while True:
                try:
                    one, tenancy = ids.popleft()
                except IndexError:
                    return
                while self.ask("DELETE", f"{PATH}/{one}", self.keys[tenancy])[0] == 429:
                    time.sleep(0.2)

        with self.measured("deletion"):
            begun = time.monotonic()
            run_all(be_a_client, CLIENTS)
            wait("the end of all", lambda: not self.cluster.objects("Pod"))
            took = time.monotonic() - begun
        self._out.say("", f"{count} containers were deleted, and their pods gone, after {took:.0f} s.")

        def all_are_free() -> bool:
            return all((one.get("status") or {}).get("phase") == "Free" for one in self.cluster.objects("GPULease"))

        with self.measured("leases"):
            wait("free leases", all_are_free)

    def show(self) -> None:
        columns = [
            "during",
            "program",
            "seconds",
            "requests a second",
            "events a second",
            "of a CPU",
            "MiB",
            "MiB, peak",
        ]
        self._out.table("Programs and the API server", columns, self._rows)


def status_of(phase: str = "Running", **state: Any) -> dict[str, Any]:
    image = {"image": "x", "imageID": f"registry.example/x@sha256:{0:064}", "ready": False}
    conditions = [{"type": name, "status": "True", "lastTransitionTime": stamp()}
                  for name in ("PodScheduled", "PodReadyToStartContainers")]  # fmt: skip
    return {"phase": phase, "conditions": conditions, "containerStatuses": [{"name": "main", **image, "state": state}]}


def stamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def usage(pid: int) -> tuple[float, float, float]:
    """Return seconds of processor time, and MiB now and at most."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    now, most = (int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK"), now, most


def spread_of(name: str, values: list[float]) -> list[str]:
    return [name, f"{median(values):.2f}", f"{quantiles(values, n=20)[18]:.2f}", f"{max(values):.2f}"]


def run_all(work: Callable[[], None], count: int) -> None:
    with ThreadPoolExecutor(count) as pool:
        for each in [pool.submit(work) for _ in range(count)]:
            each.result()


def wait(what: str, happened: Callable[[], bool], limit: float = 900.0) -> None:
    end = time.monotonic() + limit
    while not happened():
        if time.monotonic() > end:
            raise RuntimeError(f"not within {limit:.0f} s: {what}")
        time.sleep(0.05)


@contextmanager
def fleet(directory: Path, nodes: int, agents: bool, out: Output) -> Iterator[RunningFleet]:
    with ExitStack() as stack:
        made = RunningFleet(directory, nodes, agents, out, stack)
        try:
            yield made
        except BaseException:
            for log in directory.glob("*.log"):
                print(f"{log.name}: {log.read_text()[-1500:]}", file=sys.stderr)
            raise


if __name__ == "__main__":
    sys.exit(main())
