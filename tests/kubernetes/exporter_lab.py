"""An exporter over real HTTP, a double of the kubelet beside it, and its page as prometheus-client reads it."""

import json
import os
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from support.process import stop, wait_for
from support.product import PROGRAMS

PODRESOURCES = Path(__file__).parent.parent / "support/podresources.py"
Labels = dict[str, str]
Series = list[tuple[Labels, float]]


def read_page(text: str) -> dict[str, Series]:
    """Return the series by metric; of a counter under the name that is on the page."""
    found: dict[str, Series] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            if family.type == "counter" and f"# TYPE {name} counter" not in text:
                name = name.removesuffix("_total")
            found.setdefault(name, []).append((sample.labels, sample.value))
    return found


def value(page: dict[str, Series], name: str, **labels: str) -> float:
    """Return the value of the only series with these labels."""
    (found,) = [number for names, number in page[name] if labels.items() <= names.items()]
    return found


def pods_of(page: dict[str, Series], name: str, **labels: str) -> list[tuple[str, str, str]]:
    """Return (namespace, pod, container) of every series with these labels."""
    return sorted(
        (names.get("namespace", ""), names.get("pod", ""), names.get("container", ""))
        for names, _ in page[name]
        if labels.items() <= names.items()
    )


class Exporter:
    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process = process
        self.log_file = log
        self.port = 0

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def get(self, path: str = "/metrics", **headers: str) -> Any:
        """Return the response; its body has been read into ``body``."""
        names = {name.replace("_", "-"): text for name, text in headers.items()}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=names)
        with urllib.request.urlopen(request, timeout=60) as response:
            response.body = response.read()
            return response

    def page(self) -> dict[str, Series]:
        return read_page(self.get().body.decode())

    def wait(self, what: str, condition: Any) -> dict[str, Series]:
        """Poll the page until ``condition(page)`` holds; return it."""
        last: dict[str, Series] = {}

        def holds() -> bool:
            last.clear()
            last.update(self.page())
            return bool(condition(last))

        wait_for(what, holds, on_failure=lambda: self.log)
        return last

    def next_page(self) -> dict[str, Series]:
        """Return the page of a sample that begins after now."""
        done = value(self.page(), "ocigpu_exporter_samples_total", result="ok")
        return self.wait(
            "two more samples", lambda page: value(page, "ocigpu_exporter_samples_total", result="ok") >= done + 2
        )


@contextmanager
def exporter(
    host: Path | None,
    directory: Path,
    *words: str,
    interval: int = 100,
    program: Sequence[str | Path] = (PROGRAMS / "ocigpu", "exporter"),
    **variables: str,
) -> Iterator[Exporter]:
    """Run the exporter for a simulated host, wait for its port, end it with SIGTERM and check how it ended."""
    log = directory / "exporter.log"
    command: list[str | Path] = [*program, "--address", "127.0.0.1:0"]
    command += ["--collect-interval", str(interval), *words]
    environment = {**os.environ, "NODE_NAME": "node-1", **variables}
    if host:
        environment["OCIGPU_CONFIG"] = str(host / "config.toml")
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, text=True
        )
    try:
        running = Exporter(process, log)
        wait_for(
            "the exporter's port",
            lambda: "listening on " in running.log or process.poll() is not None,
            on_failure=lambda: running.log,
        )
        assert process.poll() is None, running.log
        line = next(line for line in running.log.splitlines() if "listening on " in line)
        running.port = json.loads(line)["port"] if line.startswith("{") else int(line.rpartition(":")[2])
        yield running
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, running.log
        assert "Traceback" not in running.log
    finally:
        stop(process.pid)
        process.wait()


@contextmanager
def kubelet(directory: Path, pods: Sequence[Any]) -> Iterator[tuple[str, Path]]:
    """Serve the kubelet's pod-resources; gives its socket, and the file that it answers from."""
    socket, file = directory / "pods.sock", directory / "pods.json"
    write_pods(file, pods)
    process = subprocess.Popen([sys.executable, PODRESOURCES, socket, file], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        assert select.select([process.stdout], [], [], 60)[0]
        yield str(socket), file
    finally:
        stop(process.pid)
        process.communicate()


def write_pods(file: Path, pods: Sequence[Any] = (), **more: Any) -> None:
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"pods": list(pods), **more}))
    new.rename(file)
