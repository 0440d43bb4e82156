"""``ocigpu demo``: real containers through ocigpu-runtime, each claim checked from inside them.

On a machine without an NVIDIA driver it first lays out a simulated host.  Everything it makes is below one directory
in /tmp, which is removed at the end, also after an error or Ctrl-C.
"""

import os
import shutil
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, NamedTuple

from ocigpu.cli.containers.plan import granted_fields
from ocigpu.cli.engines.busybox import make_bundle, make_config, sections_of
from ocigpu.cli.engines.try_engine import listed_devices
from ocigpu.cli.front import show
from ocigpu.cli.front.arguments import Range
from ocigpu.cli.front.cleaning import cleaning_up
from ocigpu.core.actions import KINDS, Node, Plan, RefreshLdCache
from ocigpu.core.config_json import SEARCH_PATH
from ocigpu.core.errors import HostError, OcigpuError, UsageError, printable
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.devices import GPU_MAJOR
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.plan import make_plan
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import parse_request
from ocigpu.provision.image import read_rootfs_facts
from ocigpu.system.proc import read_mounts
from ocigpu.system.programs import Finished, run_program
from ocigpu.system.settings_file import read_settings

REAL_DRIVER = "/proc/driver/nvidia/version"
TIMEOUT_SECONDS = 120

GRANTED_SCRIPT = """\
echo '@@ smi'; nvidia-smi -L 2>&1; status=$?; echo '@@ smi-status'; echo $status
echo '@@ nodes'; find /dev -name 'nvidia*' -type c
echo '@@ listing'; find /dev -name 'nvidia*' -type c -exec ls -ln {} +
echo '@@ loader'; LD_TRACE_LOADED_OBJECTS=1 LD_PRELOAD=libcuda.so.1 /usr/bin/true 2>&1 | grep libcuda
echo '@@ granted'; (exec 3< @GRANTED@) 2>&1 && echo opened
echo '@@ mknod'; mknod /dev/not-granted c @MAJOR@ @MINOR@ 2>&1 && echo made
echo '@@ denied'; (exec 3< /dev/not-granted) 2>&1 && echo opened
echo '@@ end'
"""
PLAIN_SCRIPT = """\
echo '@@ nodes'; find /dev -name 'nvidia*'
echo '@@ mounts'; grep -i nvidia /proc/self/mountinfo
echo '@@ program'; command -v nvidia-smi
echo '@@ end'
"""


class Demo(NamedTuple):
    """What all steps need: the working directory, the shim and its environment, the host; what is undone at the end."""

    directory: str
    shim: str
    environment: dict[str, str]
    settings: Settings
    facts: HostFacts
    cleanup: ExitStack


def demo_command(
    gpus: Annotated[int, Range(1, 64)] = 8,
    model: str = "h100",
    devices: str = "",
    runtime_path: str = "",
    keep: bool = False,
) -> None:
    if os.geteuid() != 0:
        raise OcigpuError("OCIGPU-DEMO-1", "the demo needs root: it makes device nodes and starts containers")
    shim, low_level = _find_shim(runtime_path), _find_low_level()
    with cleaning_up() as cleanup:
        directory = tempfile.mkdtemp(prefix="ocigpu-demo-", dir="/tmp")
        os.chmod(directory, 0o755)
        if not keep:
            cleanup.callback(_remove_directory, directory)
        _title("host")
        _say(f"working directory {directory}")
        config = os.environ.get("OCIGPU_CONFIG", "")
        if os.path.exists(REAL_DRIVER):
            _say("this machine has an NVIDIA driver: its own GPUs are used")
        else:
            _say("this machine has no NVIDIA driver: a simulated host is made")
            config = _create_host(f"{directory}/host", gpus, model)
        settings = read_settings(config)
        facts = read_host_facts(settings)
        if not facts.gpus:
            raise HostError("OCIGPU-HOST-1", "the driver is loaded, but it shows no GPU", "")
        _say(f"{show.host_line(facts)}\ndriver {show.driver_line(facts)}\nruntime {low_level} behind {shim}")
        environment = {**os.environ, **({"OCIGPU_CONFIG": config} if config else {})}
        demo = Demo(directory, shim, environment, settings, facts, cleanup)
        _show_granted(demo, devices or ("0,2" if len(facts.gpus) > 2 else "0"))
        _show_plain(demo)
    _title("end")
    if keep:
        _say(f"kept: {directory}")
    else:
        _check(not os.path.lexists(directory), f"nothing is left behind: {directory} is gone")
    kind = "SIMULATED host, no real GPU" if facts.simulated else "this machine's GPUs"
    print(f"\ndemo passed ({kind})", flush=True)


# Output: every step has a title, every claim is checked and then said.


def _title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _say(text: str) -> None:
    for line in text.splitlines() or [""]:
        print(f"   {printable(line)}", flush=True)


def _check(holds: bool, claim: str, found: str = "") -> None:
    """Print a claim that holds; raise OCIGPU-DEMO-2 for one that does not."""
    if not holds:
        raise OcigpuError("OCIGPU-DEMO-2", f"expected: {claim}" + (f"; found: {found!r}" if found else ""))
    print(f"   ok: {printable(claim)}", flush=True)


# Where it runs


def _find_shim(named: str) -> str:
    beside = [os.path.join(os.path.dirname(program), "ocigpu-runtime") for program in (sys.argv[0], sys.executable)]
    path = named or next((path for path in beside if path[:1] == "/" and os.access(path, os.X_OK)), beside[-1])
    if not os.access(path, os.X_OK):
        raise OcigpuError("OCIGPU-DEMO-1", f"{path}: no shim there", "name it: ocigpu demo --runtime-path PATH")
    return os.path.abspath(path)


def _find_low_level() -> str:
    path = os.pathsep.join([os.environ.get("PATH", ""), SEARCH_PATH])
    for name in ("runc", "crun"):
        found = shutil.which(name, path=path)
        if found:
            return found
    raise OcigpuError("OCIGPU-RT-1", "the demo runs real containers, and neither runc nor crun was found")


def _remove_directory(directory: str) -> None:
    """Remove the working directory, unless something is still mounted below it: that could be a host's file."""
    left = _mounts_below(directory)
    if left:
        raise OcigpuError("OCIGPU-DEMO-2", f"{directory} is not removed: {left[0]} is still mounted")
    shutil.rmtree(directory)


def _mounts_below(directory: str) -> list[str]:
    return [mount.point for mount in read_mounts().values() if mount.point.startswith(f"{directory}/")]


def _create_host(root: str, gpus: int, model: str) -> str:
    """Make a simulated host and return the path of its settings."""
    from ocigpu.sim.create import create_host
    from ocigpu.sim.made import describe_host

    with show.Progress() as progress:
        config = create_host(root, gpus, model, progress=progress)
    if describe_host(root)["nodes"] != "real":
        raise OcigpuError("OCIGPU-DEMO-1", "mknod is not permitted here: there are no device nodes to give")
    return config


# What it shows


def _show_granted(demo: Demo, devices: str) -> None:
    _title(f"plan for NVIDIA_VISIBLE_DEVICES={devices}")
    facts = demo.facts
    bundle = f"{demo.directory}/granted"
    programs = tuple(file.host_path for file in facts.binaries if file.container_path.endswith("/nvidia-smi"))
    variables = {"NVIDIA_VISIBLE_DEVICES": devices, "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    config = make_config("", variables)
    request = parse_request(config, demo.settings)
    if request.selection == "nothing":
        raise UsageError(f"--devices {devices} requests nothing")
    node, refused = _probes(make_plan(facts, request, demo.settings), facts)
    script = GRANTED_SCRIPT.replace("@GRANTED@", node).replace("@MAJOR@", str(GPU_MAJOR))
    make_bundle(bundle, script.replace("@MINOR@", str(refused)), variables, programs)
    plan = _show_plan(demo, bundle, request)

    _title("a container with this request")
    output = _run_container(demo, bundle, "granted")
    _say(f"$ nvidia-smi -L\n{output['smi']}")
    _check(output["smi-status"] == "0", "nvidia-smi runs in the container", output["smi"])
    _, as_granted = listed_devices(output["smi"], plan, facts)
    number = len(plan.gpus) + len(plan.mig_devices)
    _check(as_granted, f"it lists what was granted and no other GPU: {number}")
    _say(f"$ ls -ln /dev/nvidia*\n{output['listing']}")
    paths = (action.node.container_path for action in plan.actions if isinstance(action, Node))
    nodes = {path for path in paths if os.path.basename(path).startswith("nvidia")}
    claim = f"exactly the {len(nodes)} device nodes of the plan"
    _check(set(output["nodes"].split()) == nodes, claim, output["nodes"])
    if any(isinstance(action, RefreshLdCache) for action in plan.actions):
        _say(f"$ what the loader finds for libcuda.so.1\n{output['loader']}")
        found = f"libcuda.so.1 => {plan.image.library_dir}/" in output["loader"]
        _check(found, "the container's loader finds the driver's libraries in its cache", output["loader"])

    _title("a GPU that was not granted")
    _say(f"$ mknod /dev/not-granted c {GPU_MAJOR} {refused}; open /dev/not-granted")
    _say(f"{output['mknod']}\n{output['denied']}")
    claim = "root of the container cannot open it: EPERM"
    _check("Operation not permitted" in output["denied"], claim, output["denied"])
    _say(f"$ open {node}\n{output['granted']}")
    if facts.simulated:
        claim = "a granted one passes the device cgroup: ENXIO, as there is no driver behind a simulated node"
        _check("No such device or address" in output["granted"], claim, output["granted"])
    else:
        _check(output["granted"] == "opened", "a granted one opens", output["granted"])


def _probes(plan: Plan, facts: HostFacts) -> tuple[str, int]:
    """Return the node of a granted GPU, and the minor of a GPU that is not granted (perhaps one that is not there)."""
    granted = {a.node.minor: a.node.container_path for a in plan.actions if isinstance(a, Node) and _is_gpu(a)}
    if not granted:
        raise UsageError("the demo needs at least one GPU: --devices names none")
    others = [gpu.minor for gpu in facts.gpus if gpu.minor not in granted]
    refused = others[0] if others else next(minor for minor in range(255) if minor not in granted)
    return granted[min(granted)], refused


def _is_gpu(action: Node) -> bool:
    return action.node.major == GPU_MAJOR and action.node.container_path[len("/dev/nvidia") :].isdigit()


def _show_plan(demo: Demo, bundle: str, request: Request) -> Plan:
    image = read_rootfs_facts(f"{bundle}/rootfs", demo.facts.driver_version)
    plan = make_plan(demo.facts, request, demo.settings, image)
    for name, value in granted_fields(plan, demo.facts):
        _say(f"{name:8} {value}")
    kinds = Counter(KINDS[type(action)] for action in plan.actions)
    _say(f"actions  {', '.join(f'{number} {kind}' for kind, number in kinds.items())}")
    return plan


def _show_plain(demo: Demo) -> None:
    _title("a container that requests nothing")
    bundle = f"{demo.directory}/plain"
    make_bundle(bundle, PLAIN_SCRIPT, {})
    before = Path(bundle, "config.json").read_bytes()
    output = _run_container(demo, bundle, "plain")
    _check(Path(bundle, "config.json").read_bytes() == before, "its config.json is untouched, byte for byte")
    for section, claim in (
        ("nodes", "no NVIDIA device node in it"),
        ("mounts", "no NVIDIA mount in it"),
        ("program", "no nvidia-smi in it"),
    ):
        _check(output[section] == "", claim, output[section])


def _run_container(demo: Demo, bundle: str, name: str) -> dict[str, str]:
    """Run the bundle through the shim and return the sections of its output; check that nothing stays mounted."""
    identity = f"{os.path.basename(demo.directory)}-{name}"

    def shim(*words: str) -> Finished:
        command = [demo.shim, "--root", f"{demo.directory}/state", *words, identity]
        return run_program(command, TIMEOUT_SECONDS, env=demo.environment)

    # Gone already, unless this process was interrupted: then it is killed and its cgroup removed.
    demo.cleanup.callback(shim, "delete", "--force")
    try:
        done = shim("run", "--bundle", bundle)
    except TimeoutError as error:
        raise OcigpuError("OCIGPU-DEMO-2", f"the container did not end within {TIMEOUT_SECONDS} s") from error
    sections = sections_of(done.output)
    if done.status != 0 or "end" not in sections:
        _say(done.output + done.complaint)
        raise OcigpuError("OCIGPU-DEMO-2", f"the container did not run: exit status {done.status}, output above")
    if done.complaint.strip():
        _say(done.complaint.strip())
    left = _mounts_below(bundle)
    _check(not left, "the container ran, and left no mount on the host", " ".join(left))
    return sections
