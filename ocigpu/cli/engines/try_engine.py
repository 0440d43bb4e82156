"""``ocigpu engine test``: a container through each way of an engine, and whether it has what the plan says.

The image is made of this machine's busybox, so that no registry is needed.  It, the containers and containerd's
namespace have one name of their own, are removed at the end, and those of a run that was killed at the next start.
"""

import fcntl
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ocigpu.cli.engines.archive_image import write_image
from ocigpu.cli.engines.busybox import make_config, make_root, sections_of
from ocigpu.cli.engines.configure import known_engine
from ocigpu.cli.front import show
from ocigpu.cli.front.cleaning import SIGNALS, cleaning_up, undisturbed
from ocigpu.cli.front.common import load_facts, load_settings
from ocigpu.core.actions import Node, Plan
from ocigpu.core.errors import HostError, OcigpuError, printable
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.core.vendors import VENDORS
from ocigpu.engines import places
from ocigpu.engines.files import locked
from ocigpu.engines.status import EngineStatus, find_engines
from ocigpu.system.paths import opened
from ocigpu.system.programs import Finished, run_program

NAME = "ocigpu-engine-test"
IMAGE = f"localhost/{NAME}:latest"
FAILED = 3
"""Exit status when a container has not what the plan says."""
SECONDS = 120
REMOVAL_SECONDS = 20
OPENED = {False: ("opened",), True: ("opened", "No such device or address")}
"""What opening a node says, of a real and of a simulated host: there is no driver behind a simulated node."""
SONAMES = ("libcuda.so.1", "libnvidia-ml.so.1")


class Way(NamedTuple):
    """A way to ask an engine for GPUs: how people write it, the words for it, and those that go before the command.

    ``exact``: the container gets the plan and no more; a specification may have more than was asked for.
    """

    label: str
    words: tuple[str, ...]
    before: tuple[str, ...] = ()
    exact: bool = True


class Proof(NamedTuple):
    """One thing that was looked at in the container."""

    name: str
    passed: bool
    message: str
    hint: str = ""


class Result(NamedTuple):
    """How one way went; ``printed``: by nvidia-smi in the container."""

    engine: str
    way: str
    checks: tuple[Proof, ...]
    seconds: float
    printed: str = ""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


class Expected(NamedTuple):
    """What containers are to have, and the script that tells what they do."""

    plan: Plan
    facts: HostFacts
    nodes: tuple[str, ...]
    sonames: tuple[str, ...]
    has_smi: bool
    variables: Mapping[str, str]

    @property
    def script(self) -> str:
        """Sections of output, one for each thing that is looked at."""
        lines = ["echo '@@ nodes'; find /dev -name 'nvidia*' -type c"]
        names = [(shlex.quote(f"@@ open {node}"), shlex.quote(node)) for node in self.nodes]
        lines += [f"echo {title}; (exec 3< {node}) 2>&1 && echo opened" for title, node in names]
        lines += [f"echo '@@ load {name}'; LD_PRELOAD={name} /usr/bin/true 2>&1" for name in self.sonames]
        if self.has_smi:
            lines += ["echo '@@ smi'; nvidia-smi -L 2>&1 || echo failed", "echo '@@ table'; nvidia-smi 2>&1"]
        return "\n".join([*lines, "echo '@@ end'"])


class Docker:
    """Docker and Podman, by their commands, which understand the same words.

    Nothing interrupts ``begin``: when Podman is killed while it starts a container, conmon and the runtime go on and
    make a cgroup after the container has been removed.
    """

    def __init__(self, program: str, status: EngineStatus) -> None:
        self.program, self.status = program, status

    def ways(self, vendors: Sequence[str], notes: list[str]) -> Iterator[Way]:
        """Yield how this engine can be asked for GPUs; what is not to be tried is a note."""
        status = self.status
        if entry := next((entry for entry in status.runtimes if entry.ours), None):
            runtime = f"--runtime={entry.name}"
            if status.engine == "docker":
                yield Way(f"docker run {runtime}", (runtime,))
            else:
                yield Way(f"podman {runtime} run", (), (runtime,))
        if status.engine == "docker" and "nvidia" in vendors:
            if status.gpus_hook_ours:
                # where this program is on its PATH, Docker 29.2 and later asks a specification first
                by_cdi = bool(places.find_program("/", "nvidia-cdi-hook"))
                yield Way("docker run --gpus all", ("--gpus=all",), exact=not by_cdi)
            else:
                what = f"its hook, {status.gpus_hook}, is not ocigpu's" if status.gpus_hook else "it has no hook"
                notes.append(f"docker run --gpus is not tested: {what}")
        devices = [f"{VENDORS[name][2]}/gpu=all" for name in vendors]
        if status.cdi == "on":
            if why := _missing_devices(devices, status.cdi_spec_dirs):
                notes.append(f"{status.name}: CDI is not tested: {why}")
            else:
                words = tuple(f"--device={device}" for device in devices)
                yield Way(f"{status.engine} run {' '.join(words)}", words, exact=False)

    def load(self, archive: str) -> Finished:
        self.remove_image()  # of a run that was killed: it would stay, without a name
        return self._run("load", "--input", archive)

    def begin(self, way: Way, wanted: Expected) -> Finished:
        variables = [f"--env={name}={value}" for name, value in wanted.variables.items()] if way.exact else []
        # a driver of logs that both know and can read
        words = ["create", f"--name={NAME}", "--network=none", "--log-driver=json-file", *way.words, *variables, IMAGE]
        done = self._run(*way.before, *words, "sh", "-c", wanted.script)
        return done if done.status else self._run("start", NAME)

    def end(self, way: Way, wanted: Expected) -> Finished:  # noqa: ARG002 - as of any engine
        done = self._run("wait", NAME)
        return done if done.status else self._run("logs", NAME)

    def remove_container(self) -> None:
        self._run("rm", "--force", "--volumes", NAME)

    def remove_image(self) -> str:
        """Remove the image; returns why it is still there, "" when it is not."""
        return self._run("image", "rm", IMAGE).last_line if self._run("images", "--quiet", IMAGE).output else ""

    def _run(self, *words: str) -> Finished:
        return _run([self.program, *words])


class Containerd:
    """containerd, by ctr: in a namespace of our own, which nobody else looks at."""

    def __init__(self, status: EngineStatus) -> None:
        self.status = status
        self.client = ["ctr", "--address", os.environ.get("CONTAINERD_ADDRESS") or _address(status)]
        if status.flavour == "k3s":
            self.client.insert(0, "k3s")
        elif status.flavour == "rke2":
            self.client[0] = "/var/lib/rancher/rke2/bin/ctr"

    def ways(self, _vendors: Sequence[str], notes: list[str]) -> Iterator[Way]:
        if entry := next((entry for entry in self.status.runtimes if entry.ours), None):
            notes.append(f"{self.status.name}: ctr names the program; the handler {entry.name} of pods is not tested")
            word = f"--runc-binary={entry.path}"
            yield Way(f"{'k3s ' if self.status.flavour == 'k3s' else ''}ctr run {word}", (word,))

    def load(self, archive: str) -> Finished:
        return self._run("images", "import", archive)

    def begin(self, way: Way, wanted: Expected) -> Finished:  # noqa: ARG002 - ctr makes it when it starts it
        return Finished(0, "", "")

    def end(self, way: Way, wanted: Expected) -> Finished:
        variables = [f"--env={name}={value}" for name, value in wanted.variables.items()]
        # a cgroup of the namespace's name would stay
        words = ["run", f"--cgroup=/{NAME}", *way.words, *variables, IMAGE, NAME, "sh", "-c", wanted.script]
        return self._run(*words)

    def remove_container(self) -> None:
        self._run("tasks", "delete", "--force", NAME)
        self._run("containers", "delete", NAME)

    def remove_image(self) -> str:
        """Remove image and namespace, which goes only when nothing is left in it, and what a killed ctr left."""
        for lease in self._run("leases", "ls", "--quiet").output.split():  # it keeps its snapshots for a day
            self._run("leases", "rm", lease)
        self._run("snapshots", "rm", NAME)
        self._run("images", "rm", "--sync", IMAGE)
        done = _run([*self.client, "namespaces", "rm", NAME])
        left = _run([*self.client, "namespaces", "ls", "--quiet"]).output.split()
        if NAME in left:
            return done.last_line
        for pattern in (NAME, f"*/{NAME}"):  # versions 2 and 1
            for cgroup in Path("/sys/fs/cgroup").glob(pattern):  # it was killed while runc made this
                try:
                    cgroup.rmdir()
                except OSError as error:
                    return f"rmdir {cgroup}: {error.strerror}"
        return ""

    def _run(self, *words: str) -> Finished:
        return _run([*self.client, "--namespace", NAME, *words])


Engine = Docker | Containerd


def run_command(engine: str = "", config: str = "") -> "show.Answer":
    named = known_engine(engine)
    settings = load_settings(config)
    facts = load_facts(settings)
    notes: list[str] = []
    results = try_engines(named, settings, facts, notes)
    yield data_of(results, facts, notes), 0 if all(result.passed for result in results) else FAILED
    print_results(results, facts, notes)


def try_engines(named: str, settings: Settings, facts: HostFacts, notes: list[str]) -> list[Result]:
    """Start a container in every way of the engine, or of all that are configured; returns how each way went.

    What could not be tried is added to ``notes``.  Raises HostError OCIGPU-HOST-1 on a host without GPUs, OcigpuError
    OCIGPU-ENG-5 when there is no way to try.
    """
    if not facts.gpus:
        raise HostError("OCIGPU-HOST-1", "this host shows no GPU to give to a container", "")
    results: list[Result] = []
    with cleaning_up() as cleanup, show.Progress("making the image") as progress:
        engines = _find(named, facts, notes)
        if os.geteuid() == 0:
            cleanup.enter_context(locked())  # names are the same in every run
        directory = _make_directory(cleanup)
        programs = tuple(file.host_path for file in facts.binaries if file.container_path.endswith("/nvidia-smi"))
        loads = make_root(Path(directory, "rootfs"), programs)
        wanted = _wanted(facts, settings, f"{directory}/rootfs", bool(programs), loads)
        if not loads:
            notes.append("true(1) of this machine is static: whether libraries can be loaded is not tested")
        archive = write_image(Path(directory, "image.tar"), Path(directory, "rootfs"), IMAGE, ["sh"])
        for each, ways in engines:
            with cleaning_up() as undo:
                results += _test(each, ways, str(archive), wanted, undo, progress)
    return results


def _make_directory(cleanup: ExitStack) -> str:
    """Return a temporary directory, locked while this process lives; removes those of runs that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{NAME}-*"):
        with suppress(OSError), opened(os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)) as fd:
            if os.fstat(fd).st_uid == os.geteuid():  # in /tmp others may have given theirs this name
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
    directory = cleanup.enter_context(tempfile.TemporaryDirectory(prefix=f"{NAME}-"))
    fcntl.flock(cleanup.enter_context(opened(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))), fcntl.LOCK_EX)
    return directory


def data_of(results: Sequence[Result], facts: HostFacts, notes: Sequence[str]) -> dict[str, Any]:
    """Return the results as JSON data."""
    rows = [
        {**result._asdict(), "passed": result.passed, "checks": [check._asdict() for check in result.checks]}
        for result in results
    ]
    passed = all(result.passed for result in results)
    return {"passed": passed, "simulated": facts.simulated, "results": rows, "notes": list(notes)}


def _find(named: str, facts: HostFacts, notes: list[str]) -> list[tuple[Engine, list[Way]]]:
    """Return the engines to test, with the ways to ask each; raises OcigpuError OCIGPU-ENG-5 when there is none."""
    found: dict[str, tuple[Engine, list[Way]]] = {}
    hint = f"ocigpu engine configure {named}".strip()
    for status in sorted(find_engines(), key=lambda status: not status.running):
        name = status.name if status.flavour in places.KUBERNETES else status.engine
        if named not in ("", name) or name in found:
            continue
        if status.engine == "crio" or (status.engine == "containerd" and os.geteuid()):
            if status.configured or named:
                pods = status.engine == "crio"
                why = "only pods use it" if pods else "that takes root"
                hint = "start a pod that requests a GPU" if pods else f"as root: ocigpu engine test {name}"
                notes.append(f"{name} is not tested: {why}")
            continue
        status = status._replace(flavour="") if status.flavour == "custom" else status  # noqa: PLW2901 - the same engine, named as people do
        each = Containerd(status) if status.engine == "containerd" else Docker(status.engine, status)
        if (status.configured or named) and (ways := list(each.ways(facts.vendors, notes))):
            found[name] = each, ways
    notes[:] = dict.fromkeys(notes)  # two daemons of one engine may have the same to say
    if not found:
        if untried := [note for note in notes if " is not tested: " in note]:
            raise OcigpuError("OCIGPU-ENG-5", "; ".join(untried), hint)
        what = f"{named} is not configured for GPUs" if named else "no engine here is configured for GPUs"
        raise OcigpuError("OCIGPU-ENG-5", what, hint)
    order = list(places.NAMES)
    return [found[name] for name in sorted(found, key=order.index)]


def _missing_devices(devices: Sequence[str], directories: Sequence[str]) -> str:
    """Return why an engine cannot be asked for these devices, "" when specifications have them."""
    from ocigpu.cdi.registry import read_registry

    settings = Settings()
    settings = settings._replace(cdi_spec_dirs=tuple(directories) or settings.cdi_spec_dirs)
    defined = dict(read_registry(settings).devices())
    missing = [device for device in devices if device not in defined]
    return f"no specification defines {missing[0]} (ocigpu cdi generate)" if missing else ""


def _address(status: EngineStatus) -> str:
    """Return the socket of a containerd (its config.toml, table grpc; k3s and RKE2 name theirs on a command line)."""
    from ocigpu.engines.document import table_at
    from ocigpu.engines.status import read_merged

    if status.flavour in places.KUBERNETES:
        return "/run/k3s/containerd/containerd.sock"
    _, data = read_merged("/", "containerd", status.target, [])
    return str(table_at(data, ("grpc",)).get("address") or "/run/containerd/containerd.sock")


def _wanted(facts: HostFacts, settings: Settings, rootfs: str, has_smi: bool, loads: bool) -> Expected:
    """Return what a container that asks for all GPUs is to have: what is compared is the plan."""
    from ocigpu.gpus.vendors import make_plan, parse_request
    from ocigpu.provision.image import read_rootfs_facts

    variables = {VENDORS[name][1]: "all" for name in facts.vendors}
    if "nvidia" in facts.vendors:
        variables["NVIDIA_DRIVER_CAPABILITIES"] = "compute,utility"
    request = parse_request(make_config("", variables), settings)
    plan = make_plan(facts, request, settings, read_rootfs_facts(rootfs, facts.driver_version))
    nodes = sorted({action.node.container_path for action in plan.actions if isinstance(action, Node)})
    sonames = {library.soname for library in facts.libraries} & set(SONAMES)
    names = tuple(sorted(sonames)) if loads else ()
    return Expected(plan, facts, tuple(nodes), names, has_smi, variables)


def _test(
    engine: Engine, ways: list[Way], archive: str, wanted: Expected, undo: ExitStack, progress: show.Progress
) -> Iterator[Result]:
    """Yield how each way of one engine goes."""
    name = engine.status.name
    progress(f"{name}: loading the image")
    with undisturbed():
        engine.remove_container()  # of a run that was killed
        undo.callback(_remove, engine)
        loaded = engine.load(archive)
    for way in ways:
        begin = time.monotonic()
        progress(f"{name}: {way.label}")
        with undisturbed():
            done = loaded if loaded.status else engine.begin(way, wanted)
        if not done.status:
            done = engine.end(way, wanted)
        with undisturbed():
            engine.remove_container()
        printed = sections_of(done.output).get("table", "")
        yield Result(name, way.label, tuple(_judge(done, way, wanted)), round(time.monotonic() - begin, 2), printed)


def _remove(engine: Engine) -> None:
    """Remove container and image, also those that the engine still was about to make when its command was killed."""
    end = time.monotonic() + REMOVAL_SECONDS
    while True:
        engine.remove_container()
        problem = engine.remove_image()
        if not problem or time.monotonic() > end:
            break
        time.sleep(0.2)
    if problem:
        print(printable(f"{engine.status.name}: {NAME} is not removed: {problem}"), file=sys.stderr)


def _judge(done: Finished, way: Way, wanted: Expected) -> Iterator[Proof]:
    """Yield what a container's output says, against the plan."""
    found = sections_of(done.output)
    if "end" not in found:
        text = done.complaint.strip() or done.output.strip() or done.last_line
        yield Proof("starts", False, " ".join(text.split()), _hint(text))
        return
    yield Proof("starts", True, "the container runs")
    opened = OPENED[wanted.facts.simulated]
    bad = {node: found.get(f"open {node}", "") for node in wanted.nodes}
    bad = {node: said for node, said in bad.items() if not any(word in said for word in opened)}
    if bad:
        node, said = next(iter(bad.items()))
        message = f"{len(bad)} of {show.count(len(wanted.nodes), 'device node')} cannot be opened: {said or node}"
        yield Proof("nodes", False, message, "ocigpu doctor")
    else:
        yield Proof("nodes", True, f"{show.count(len(wanted.nodes), 'device node')} can be opened")
    beyond = sorted(set(found["nodes"].split()) - set(wanted.nodes))
    if beyond and way.exact:
        message = f"it has more device nodes than the plan: {', '.join(beyond)}"
        yield Proof("no more nodes", False, message, "ocigpu plan shows the plan; another toolkit may be in between")
    for name in wanted.sonames:
        said = found.get(f"load {name}", "")
        yield Proof(name, not said, " ".join(said.split()) or f"{name} can be loaded", "ocigpu doctor" if said else "")
    if wanted.has_smi:
        said = found.get("smi", "")
        listed, as_granted = listed_devices(said, wanted.plan, wanted.facts)
        if as_granted:
            yield Proof("nvidia-smi", True, f"nvidia-smi lists {show.count(len(listed), 'GPU')}")
        else:
            granted = len(wanted.plan.gpus) + len(wanted.plan.mig_devices)
            message = f"nvidia-smi lists {len(listed)} of {granted}: {' '.join(said.split())}"
            yield Proof("nvidia-smi", False, message, "ocigpu doctor")


def _hint(text: str) -> str:
    """Return what to do about an engine's message."""
    from ocigpu.doctor.messages import find_codes, find_messages

    for code in find_codes(text):
        return f"ocigpu explain {code}"
    found = min(find_messages(text, log=True), key=lambda one: one.line, default=None)
    return found.message.steps[0] if found else "ocigpu doctor"


def _run(command: Sequence[str]) -> Finished:
    """Run an engine's command; one that cannot be run or does not end is a failed one.

    In a process group of its own: Ctrl-C is for us alone, and the command not left half done by it.
    """

    def prepare() -> None:
        os.setpgrp()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a container would hold back what undisturbed() does

    try:
        return run_program(command, SECONDS, prepare=prepare)
    except OSError as error:
        return Finished(1, "", f"{command[0]}: {error.strerror or error}")


def print_results(results: Sequence[Result], facts: HostFacts, notes: Sequence[str]) -> None:
    """Print a line for each way, and what is wrong with those that failed."""
    if facts.simulated:
        print(f"host: {show.host_line(facts)}")
    rows = []
    for result in results:
        said = [check.message for check in result.checks if check.passed and check.name != "starts"]
        text = ", ".join(said) if result.passed else "see below"
        rows.append((result.engine, result.way, "ok" if result.passed else "FAILED", text))
    show.table(("engine", "asked by", "result", "found"), rows)
    for result in results:
        failed = [check for check in result.checks if not check.passed]
        for check in failed:
            print(printable(f"{result.engine}: {result.way}: {check.message}"))
        for hint in dict.fromkeys(check.hint for check in failed):
            print(printable(f"hint: {hint}"))
    show.notes(notes)


def listed_devices(output: str, plan: Plan, host: HostFacts) -> tuple[set[str], bool]:
    """Return the UUIDs that "nvidia-smi -L" lists, and whether they are what was granted (and GPUs of that)."""
    listed = {word.rstrip(")") for word in output.split() if word.startswith(("GPU-", "MIG-"))}
    granted = {*plan.gpus, *plan.mig_devices}
    parents = {gpu.uuid for gpu in host.gpus for mig in gpu.mig_devices if mig.uuid in granted}
    return listed, granted <= listed <= granted | parents
