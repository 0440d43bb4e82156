"""``ocigpu compute-domain daemon``: runs nvidia-imex for one node of a ComputeDomain, and tells it of its peers.

nvidia-imex reads the names of its nodes once, and looks up their addresses again when it gets SIGUSR1.  So its file of
nodes has a name for each node that there may be, and /etc/hosts has the addresses of those that there are: nodes come
and go while jobs of the others go on.  Who the peers are is read from objects of the controller; nothing is written to
the cluster.  Source: cmd/compute-domain-daemon of kubernetes-sigs/dra-driver-nvidia-gpu (SIGUSR1).
"""

import os
import signal
import subprocess
import threading
import time
from functools import partial

from ocigpu.core.errors import HostError, OsErrorAs
from ocigpu.kubernetes.cluster.documents import Documents
from ocigpu.kubernetes.cluster.wake import wake_on_changes
from ocigpu.kubernetes.domains.imex import (
    CODE,
    CONFIG,
    NAME,
    NODES,
    ImexOptions,
    find_peers,
    node_name,
    render_config,
    render_hosts,
)
from ocigpu.kubernetes.domains.objects import DOMAIN_LABEL, Document
from ocigpu.system.service import Backoff, ServiceLog, Signals

POLL = 1.0
"""Seconds between looks at nvidia-imex."""
RESYNC = 10.0
"""Seconds between readings of the peers when nothing is heard of changes."""
WATCH = 300
STOP = 20.0
"""Seconds that nvidia-imex has to end."""


class ImexDaemon:
    """:meth:`run` returns when a signal ends it."""

    def __init__(self, documents: Documents, watched: Documents, options: ImexOptions, log: ServiceLog) -> None:
        self._documents, self._watched, self._options, self._log = documents, watched, options, log
        self._child: subprocess.Popen[bytes] | None = None
        self._retry = Backoff(POLL, 30.0)
        self._peers: dict[str, str] | None = None
        self._told = True
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = threading.Event()

    def run(self) -> None:
        """Work until SIGTERM, SIGINT or SIGQUIT; raises HostError (OCIGPU-DRA-8) when its files cannot be written."""
        with Signals() as signals:
            if not self._options.clique:
                self._log("info", "this node has no multi-node NVLink: there is nothing to run")
                while not signals.stopping:
                    signals.wait(RESYNC)
                return
            self._write_files()
            threading.Thread(target=self._watch, daemon=True).start()
            try:
                due = 0.0
                while not signals.stopping:
                    now = time.monotonic()
                    if now >= due:
                        due = now + RESYNC
                        self._read_peers()
                    self._look_after(now)
                    if signals.wait(min(due - now, POLL), self._reader):
                        os.read(self._reader, 4096)
                        due = 0.0
            finally:
                self._stopping.set()
                self._stop()

    def _write_files(self) -> None:
        options = self._options
        names = "".join(f"{node_name(number)}\n" for number in range(options.most))
        for name, text in ((CONFIG, render_config(options)), (NODES, names)):
            path = f"{options.directory}/{name}"
            with OsErrorAs(HostError, CODE, f"write {path}"), open(path, "w", encoding="utf-8") as file:
                file.write(text)

    def _read_peers(self) -> None:
        """Write the addresses of the peers down if they have changed; without an answer nothing changes."""
        options = self._options
        try:
            labels: Document = {DOMAIN_LABEL: options.domain}
            cliques, version = self._documents.list("ComputeDomainClique", options.namespace, labels)
        except HostError as error:
            self._log.once("peers", "warning", error.message)
            return
        if not version:
            self._log.once("peers", "warning", "API server: list ComputeDomainClique: 404")
            return
        self._log.forget("peers")
        peers = find_peers(cliques, options)
        if peers == self._peers:
            return
        # in place: the kubelet mounts this very file
        with OsErrorAs(HostError, CODE, f"write {options.hosts}"), open(options.hosts, "r+", encoding="utf-8") as file:
            text = render_hosts(file.read(), peers)
            file.seek(0)
            file.write(text)
            file.truncate()
        self._peers, self._told = peers, False
        listed = ", ".join(f"{name.removeprefix(NAME)} {address}" for name, address in peers.items())
        self._log("info", f"peers: {listed or 'none'}")

    def _look_after(self, now: float) -> None:
        """Start nvidia-imex, again if it has ended, and tell it of changed peers."""
        if self._child is not None and (status := self._child.poll()) is not None:
            self._child = None
            delay = self._retry.failed(now)
            self._log("error", f"{self._options.program} ended with status {status}: starting it again in {delay:g} s")
        # it finds itself among the peers by its address, which the controller may not know yet
        if self._child is None:
            if now >= self._retry.due and self._options.address in (self._peers or {}).values():
                self._start(now)
        elif not self._told and _catches(self._child.pid, signal.SIGUSR1):
            self._child.send_signal(signal.SIGUSR1)
            self._told = True

    def _start(self, now: float) -> None:
        command = [self._options.program, "-c", f"{self._options.directory}/{CONFIG}"]
        try:
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            self._retry.failed(now)
            hint = "It is of the driver's packages: is it installed on the node?"
            self._log.once("start", "error", f"run {self._options.program}: {error.strerror}; {hint}")
            return
        self._told = True  # it reads the addresses as it starts
        self._log.forget("start")
        self._log("info", f"{self._options.program} started: process {self._child.pid}")

    def _stop(self) -> None:
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(STOP)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _watch(self) -> None:
        options, labels = self._options, {DOMAIN_LABEL: self._options.domain}
        follow = partial(self._watched.watch, "ComputeDomainClique", "", WATCH, labels, options.namespace)
        said = f"peers are read every {RESYNC:.0f} s"
        wake_on_changes(follow, self._writer, self._stopping, RESYNC, self._log, "watch", said)


def _catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process handles a signal, which would end it before it does (proc_pid_status(5), SigCgt)."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            masks = [line.split()[1] for line in file if line.startswith("SigCgt:")]
    except OSError:
        return False
    return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)
