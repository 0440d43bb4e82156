"""The engine of a Kubernetes node: identified, restarted and watched from a pod with the host's root and PIDs.

The installed ``ocigpu engine`` changes its configuration.  It runs on the host by chroot(1), so paths, the engine's own
check of its files and its version are the host's.
"""

import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ocigpu.core import rawjson
from ocigpu.core.errors import OcigpuError, printable
from ocigpu.engines.places import Daemon, expand, is_foreign, parse_release, read_file, running_daemons
from ocigpu.engines.status import RUNTIME, EngineStatus, read_engine_status
from ocigpu.kubernetes.installer.files import install_error
from ocigpu.kubernetes.node.on_host import run_on_host
from ocigpu.system.paths import open_in_root, opened
from ocigpu.system.proc import read_stat
from ocigpu.system.programs import Finished

ENGINES = ("containerd", "crio")
RESTARTS = ("auto", "systemd", "signal", "none")
_SECONDS = 180
_POLL = 0.2
_LISTENS = 0x10000
"""__SO_ACCEPTCON of Linux' include/linux/net.h, in the flags of /proc/net/unix."""
_NRI, _SECOND = "nri.sock", ".ttrpc"
_SAFE_KILL_MODE = "process"


class Running(NamedTuple):
    """A running daemon; its start time distinguishes it from another one with the same process id."""

    daemon: Daemon
    started: int
    unit: str
    sockets: frozenset[str]


class HostEngine:
    """``name``, ``config``: engine and file, "" for the running one.  ``seconds``: how long a restart may take."""

    def __init__(self, host_root: str, name: str = "", config: str = "", seconds: float = 120.0) -> None:
        self.host_root, self.name, self.config, self.seconds = host_root, name, config, seconds

    def find(self) -> Running | None:
        """Return the daemon of the engine, None when it does not run; raises HostError when there are several."""
        found = [
            daemon
            for daemon in running_daemons(self.host_root)
            if daemon.engine in ENGINES
            and self.name in ("", daemon.engine)
            and (not self.config or daemon.config == self.config)
        ]
        if len(found) > 1:
            shown = ", ".join(f"{daemon.engine} {daemon.config}".strip() for daemon in found)
            hint = "Name one: --engine, --engine-config"
            raise install_error(f"{len(found)} engines run on this node: {shown}", hint)
        return self._read_process(found[0]) if found else None

    def require(self) -> Running:
        """Return the daemon of the engine; raises HostError OCIGPU-KUBE-8."""
        found = self.find()
        if found is None:
            what = self.name or "containerd or CRI-O"
            raise install_error(f"no {what} runs on this node", "The pod needs the host's process ids (hostPID).")
        return found

    def _read_process(self, daemon: Daemon) -> Running | None:
        process = f"/proc/{daemon.pid}"
        try:
            sockets = self._listening(daemon.pid)
            started = read_stat(f"{self.host_root}{process}/stat").start
        except (OcigpuError, OSError):  # it ended meanwhile
            return None
        units = re.findall(r"[^/\n]+\.service(?=[/\n]|$)", self._text(f"{process}/cgroup"))
        return Running(daemon, started, units[-1] if units else "", sockets)

    def _listening(self, pid: int) -> frozenset[str]:
        """Return the paths of sockets on which a process listens."""
        directory = f"{self.host_root}/proc/{pid}/fd"
        own = set()
        for name in os.listdir(directory):
            try:
                own.add(os.readlink(f"{directory}/{name}"))
            except FileNotFoundError:
                continue
        lines = (read_file(self.host_root, f"/proc/{pid}/net/unix") or "").splitlines()[1:]
        rows = (line.split(None, 7) for line in lines)
        return frozenset(
            row[7]
            for row in rows
            if len(row) == 8 and row[7].startswith("/") and int(row[3], 16) & _LISTENS and f"socket:[{row[6]}]" in own
        )

    def check(self, runtime: str, name: str) -> None:
        """Raise HostError when files of the engine cannot be read, or have the runtime's name for another program."""
        running = self.require()
        for status in self._statuses(running):
            if not status.running:
                continue
            if broken := [problem for problem in status.problems if not problem.startswith("runtime ")]:
                raise install_error(f"{status.engine}: {broken[0]}", "Correct the engine's configuration.")
            for entry in status.runtimes:
                if entry.name == name and entry.path not in ("", runtime):
                    hint = f"Remove it first (ocigpu engine remove {status.engine}), or give another name: --name NAME"
                    raise install_error(f"{status.engine} has {name} = {entry.path} already", hint)

    def run(self, program: str, verb: str, running: Running, *words: str) -> dict[str, Any]:
        """Run ``ocigpu engine VERB`` on the host; return its words on the engine.  Raises HostError OCIGPU-KUBE-8."""
        config = running.daemon.config if running.daemon.engine == "containerd" else ""
        more = ["--engine-config", config] if config else []
        done = self.on_host([program, "engine", verb, running.daemon.engine, "--json", *more, *words])
        if done.status:
            lines = [line for line in done.complaint.splitlines() if line.strip()] or [f"exit status {done.status}"]
            hint = next((printable(line[6:], 300) for line in lines if line.startswith("hint: ")), None)
            cause = printable(lines[0].removeprefix("ocigpu: "), 500)
            raise install_error(f"ocigpu engine {verb}: {cause}", hint)
        answer: dict[str, Any] = rawjson.parse(done.output)
        (engine,) = answer["engines"]
        return {**engine, "notes": [*answer["notes"], *engine["notes"]]}

    def on_host(self, command: Sequence[str]) -> Finished:
        """Run a command in the host's root, with the search path of a service; raises HostError OCIGPU-KUBE-8."""
        try:
            return run_on_host(self.host_root, command, _SECONDS)
        except OSError as error:
            raise install_error(f"{command[0]}: {error}") from error

    def plan_restart(self, running: Running, how: str) -> str:
        """Return how the engine is restarted, a word of RESTARTS; raises HostError when containers would end by it."""
        if how == "auto":
            how = "systemd" if os.path.isdir(f"{self.host_root}/run/systemd/system") else "signal"
        if how == "systemd":
            if not running.unit:
                raise install_error(
                    f"no systemd unit owns {running.daemon.engine}'s process",
                    "Give --restart signal (chart: nodeInstaller.args).",
                )
            if running.daemon.engine == "containerd":  # its shims live in its own cgroup, conmon's containers do not
                shown = self.on_host(["systemctl", "show", "--property=KillMode", "--value", running.unit])
                mode = shown.output.strip()
                if shown.status or mode != _SAFE_KILL_MODE:
                    cause = f"KillMode={mode or 'unknown'} of {running.unit} would end the containers with it"
                    raise install_error(f"restart {running.unit}: {cause}", "Set KillMode=process.")
        return how

    def restart(self, running: Running, how: str) -> None:
        """Restart the engine and wait until its API answers again where it did; raises HostError OCIGPU-KUBE-8."""
        if how == "systemd":
            done = self.on_host(["systemctl", "restart", running.unit])
            if done.status:
                words = printable((done.complaint or done.output).strip(), 300)
                raise install_error(f"systemctl restart {running.unit}: {words}")
        elif self._read_process(running.daemon) is not None:
            os.kill(running.daemon.pid, signal.SIGTERM)
        end = time.monotonic() + self.seconds
        while not self._is_back(running):
            if time.monotonic() > end:
                raise install_error(
                    f"{running.daemon.engine} was not back {self.seconds:.0f} s after its restart",
                    "See its log on the node: journalctl -u " + (running.unit or running.daemon.engine),
                )
            time.sleep(_POLL)

    def _is_back(self, before: Running) -> bool:
        found = self.find()
        if found is None or (found.daemon.pid, found.started) == (before.daemon.pid, before.started):
            return False
        own = own_sockets(before.sockets)
        return found.sockets >= own and all(self.answers(found, path) for path in own)

    def answers(self, running: Running, path: str) -> bool:
        """Connect to a socket of the daemon's by its path in the daemon's root, links on the way included."""
        root = f"{self.host_root}/proc/{running.daemon.pid}/root"
        try:
            with (
                opened(os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root_fd,
                opened(open_in_root(root_fd, path, os.O_PATH)) as fd,
                socket.socket(socket.AF_UNIX) as client,
            ):
                client.settimeout(5)
                client.connect(f"/proc/self/fd/{fd}")
        except OSError:
            return False
        return True

    def needs_entry(self, running: Running, name: str) -> bool:
        """Whether pods with the runtime of this name, which is not the default one, need its entry while they run.

        containerd 1 keeps with a pod what it needs; containerd 2 (seen with 2.1.9: "no runtime for ... is configured")
        and CRI-O (internal/oci/oci.go, RuntimeImpl) look the entry up for each exec, a probe's too.
        """
        if any(each.running and each.default_runtime == name for each in self._statuses(running)):
            return False
        try:
            program = os.readlink(f"{self.host_root}/proc/{running.daemon.pid}/exe")
        except OSError:  # it ended meanwhile
            return True
        said = self.on_host([program, "--version"]).output
        return not (said.startswith("containerd ") and parse_release(said).startswith("1."))

    def _statuses(self, running: Running) -> list[EngineStatus]:
        return [each for each in read_engine_status(self.host_root) if each.engine == running.daemon.engine]

    def users(self, prefix: str) -> list[str]:
        """Return what still runs with the runtime below ``prefix``: shims of containerd, monitors of CRI-O.

        A shim of runc works in its bundle, whose options.json has the runtime that it needs to end the container
        (containerd, cmd/containerd-shim-runc-v2); conmon has it on its command line (conmon(8), --runtime).
        """
        word = f"{prefix}/"
        found = []
        for path in expand(self.host_root, "/proc/[0-9]*/cmdline"):
            words = self._text(path).split("\0")
            program, process = os.path.basename(words[0]), os.path.dirname(path)
            if is_foreign(self.host_root, process):  # a container's process can have any name, and any file
                continue
            if (program == "conmon" and any(part.startswith(word) for part in words)) or (
                program.startswith("containerd-shim-runc") and word in self._text(f"{self._cwd(process)}/options.json")
            ):
                found.append(process)
        return found

    def _cwd(self, process: str) -> str:
        try:
            return os.readlink(f"{self.host_root}{process}/cwd")
        except OSError:  # ended meanwhile
            return ""

    def _text(self, path: str) -> str:
        try:
            return read_file(self.host_root, path) or ""
        except OcigpuError:  # ended meanwhile, or not text
            return ""


def own_sockets(sockets: frozenset[str]) -> frozenset[str]:
    """Return the sockets at which an engine serves its own API; others, such as NRI's, may appear later.

    containerd has a second one beside it, PATH.ttrpc (cmd/containerd/command/main.go); NRI's is nri.sock
    (containerd/nri, pkg/api).
    """
    paired = frozenset(path for path in sockets if f"{path}{_SECOND}" in sockets)
    others = frozenset(path for path in sockets if os.path.basename(path) != _NRI and not path.endswith(_SECOND))
    return paired or others or sockets


def runtime_path(prefix: str) -> str:
    """Return the program that the engine's configuration names, whatever version is in use."""
    return f"{prefix}/current/bin/{RUNTIME}"
