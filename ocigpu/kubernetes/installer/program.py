"""``ocigpu node-installer``: a pod that installs ocigpu on a node: files, engine configuration, restart.

The steps in order, each only if needed: place the files beside the former version and activate them; change the
engine's configuration and let the engine check it; restart the engine and wait until it listens again, or undo
everything.  A label of the node shows the result.
"""

import contextlib
import math
import os
from collections.abc import Mapping
from typing import NamedTuple

from ocigpu.core.errors import HostError, OcigpuError, printable
from ocigpu.kubernetes.cluster.api_server import ApiServer, apply_to_node, find_api_server
from ocigpu.kubernetes.installer.engine import HostEngine, Running, runtime_path
from ocigpu.kubernetes.installer.files import HostFiles, install_error, payload_version
from ocigpu.system.service import Backoff, ServiceLog, Signals

LABEL = "ocigpu/runtime"
"""``ready``; ``installing``, ``failed.CODE``, ``removing`` otherwise; not there where nothing was installed."""
VERSION_LABEL = "ocigpu/runtime-version"
MANAGER = "ocigpu-node-installer"
"""Of fields of the node; another than that of the labels of GPUs, which would take ours away."""
INTERVAL = 3600.0
USERS_INTERVAL = 60.0
"""Seconds until containers that hold up a removal are looked for again."""
FIRST_RETRY, LAST_RETRY = 15.0, 900.0


class RestartFailedError(HostError):
    """The engine did not come back with the new configuration; tried again, it would be restarted again."""


class InstallerOptions(NamedTuple):
    """The options of the command line; see ``ocigpu node-installer --help``."""

    host_root: str = "/host"
    payload: str = "/opt/ocigpu-node"
    prefix: str = "/opt/ocigpu"
    engine: str = ""
    config: str = ""
    name: str = "ocigpu"
    default: bool = False
    cdi: bool = False
    restart: str = "auto"
    restart_seconds: float = 120.0
    ready_file: str = ""


class NodeInstaller:
    """Installs on, or removes from, one node."""

    def __init__(
        self,
        options: InstallerOptions,
        environment: Mapping[str, str],
        log: ServiceLog,
        server: ApiServer | None = None,
    ) -> None:
        self._options = options
        self._log = log
        self._server = server or find_api_server(environment)
        self._node = environment.get("NODE_NAME", "")
        self._files = HostFiles(options.host_root, options.prefix)
        self.engine = HostEngine(options.host_root, options.engine, options.config, options.restart_seconds)
        self._program = f"{options.prefix}/current/bin/ocigpu"

    # once

    def install(self) -> None:
        """Make the node ready; raises OcigpuError, RestartFailedError after everything was taken back."""
        options = self._options
        running = self.engine.require()
        runtime = runtime_path(options.prefix)
        self.engine.check(runtime, options.name)
        how = self.engine.plan_restart(running, options.restart)
        if placed := self._files.place(options.payload, self._try_out):
            self._log("info", f"{options.prefix}: version {placed} is in use")
        words = ["--runtime-path", runtime, "--name", options.name]
        words += [word for word, wanted in (("--default", options.default), ("--cdi", options.cdi)) if wanted]
        planned = self.engine.run(self._program, "configure", running, *words, "--dry-run")
        if planned["changed"]:
            self._files.set_pending(True)
            self._say(self.engine.run(self._program, "configure", running, *words))
        if self._files.is_pending():
            self._restart(running, how)
        self.label("ready")

    def _try_out(self, version: str) -> None:
        """Raise HostError unless the programs of a version start on this host, with the interpreter they bring."""
        for name in ("ocigpu", "ocigpu-hook"):  # the second starts the snapshot, if the version has one
            done = self.engine.on_host([f"{version}/bin/{name}", "--version"])
            if done.status:
                cause = printable(done.complaint.strip() or f"exit status {done.status}", 300)
                raise install_error(f"{version}/bin/{name} --version: {cause}", "Is the image of this machine?")

    def _restart(self, running: Running, how: str) -> None:
        if how == "none":
            self._files.set_pending(False)
            self._log("warning", f"{running.daemon.engine} has to be restarted by hand (--restart none)")
            return
        self.label("installing")
        self._log("info", f"restarting {running.unit or running.daemon.engine}, by {how}")
        try:
            self.engine.restart(running, how)
        except HostError as error:
            self._log("error", f"{error.line}; taking the configuration back")
            self._say(self.engine.run(self._program, "remove", running))
            try:
                self.engine.restart(self.engine.find() or running, how)
                after = "its former configuration is back in force"
            except HostError as second:
                after = f"nor was it with its former configuration: {second.message}"
            self._files.set_pending(False)
            raise RestartFailedError(error.code, f"{error.message}; {after}", error.hint) from error
        self._files.set_pending(False)
        self._log("info", f"{running.daemon.engine} is back")

    def remove(self) -> bool:
        """Take everything back; False while containers that need the files, or the engine's entry, still run."""
        if not self._files.current():
            self.label("")
            return True
        self.label("removing")
        running = self.engine.require()
        how = self.engine.plan_restart(running, self._options.restart)
        users, name = self.engine.users(self._options.prefix), self._options.name
        if users and self.engine.needs_entry(running, name):
            self._log("info", f"{len(users)} pods with the runtime {name} still run: all of it stays until they end")
            return False
        if self.engine.run(self._program, "remove", running, "--dry-run")["changed"]:
            self._files.set_pending(True)
            self._say(self.engine.run(self._program, "remove", running))
        if self._files.is_pending() and how != "none":
            self.engine.restart(running, how)
        self._files.set_pending(False)
        if users := self.engine.users(self._options.prefix):
            self._log("info", f"{len(users)} pods were started by ocigpu and still run: its files stay until they end")
            return False
        self._files.remove()
        self._log("info", f"{self._options.prefix} was removed")
        self.label("")
        return True

    def _say(self, answer: "dict[str, object]") -> None:
        files = answer.get("files")
        for file in files if isinstance(files, list) else ():
            for line in str(file["diff"]).splitlines():
                self._log("info", line)
        notes = answer.get("notes")
        for text in notes if isinstance(notes, list) else ():
            self._log("warning", str(text))

    def label(self, state: str, message: str = "") -> None:
        """Write the labels of the node, none for the state ""; a server that refuses is logged."""
        if self._server is None or not self._node:
            return
        labels = {LABEL: state} if state else {}
        if state == "ready":
            labels[VERSION_LABEL] = payload_version(self._options.payload)
        annotations = {"annotations": {LABEL: message[:1000]}} if message else {}
        try:
            apply_to_node(self._server, self._node, {"labels": labels, **annotations}, MANAGER)
        except HostError as error:
            self._log("error", error.line)

    # again and again

    def run(self, removing: bool, remove_on_exit: bool) -> None:
        """Install (or remove) and stay until SIGTERM; failures are retried, results are checked every hour.

        If the engine did not come back, the next attempt waits for SIGHUP or the pod's replacement.
        """
        retry = Backoff(FIRST_RETRY, LAST_RETRY)
        with Signals() as signals:
            while not signals.stopping:
                signals.take_again()
                pause, done = INTERVAL, False
                try:
                    if not removing:
                        self.install()
                        done = True
                    elif not (done := self.remove()):
                        pause = USERS_INTERVAL
                    retry.reset()
                except RestartFailedError as error:
                    self.report_failure(error)
                    pause = math.inf
                except OcigpuError as error:
                    self.report_failure(error)
                    pause = retry.failed(0.0)
                self._show_ready(done)
                signals.wait(pause)
            if remove_on_exit and not removing and not self.remove():
                self._log("warning", "files of ocigpu stay on the node: containers need them")

    def _show_ready(self, done: bool) -> None:
        path = self._options.ready_file
        if path and done:
            with open(path, "w", encoding="utf-8"):
                return
        if path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def report_failure(self, error: OcigpuError) -> None:
        self._log("error", error.line + (f" ({error.hint})" if error.hint else ""))
        self.label(f"failed.{error.code}", error.message)
