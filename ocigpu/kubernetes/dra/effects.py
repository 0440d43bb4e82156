"""Changes to a node for a claim beside its CDI specification, undone when the claim is given back.

* ``timeslice``: the length of time slices of a GPU, by ``nvidia-smi compute-policy``.
* ``mps``: a control daemon of CUDA's Multi-Process Service for the claim's GPUs.  It ends with the driver and is
  started again with the next one; clients that run meanwhile must be restarted, too.
* ``mig``: MIG devices are made: :mod:`~.mig`.
* ``switch``: a GPU goes from its driver to VFIO's with its IOMMU group, and back: :mod:`ocigpu.gpus.vfio.switch`.
  Persistence mode, by which nvidia-persistenced has it open, is off meanwhile.
* ``partition``: the partition of the NVLink fabric that consists of exactly the claim's GPUs is active.  With leases it
  is part of these.
* ``vfio``: no change; giving back waits until no process has the GPU open.
* ``lease``: the GPUs are reserved in the node's leases, and their partition is active; after the claim is given back,
  they are reset and checked before the next user may have them (docs/tenants/LEASES.md).

Sources: NVIDIA's documentation of nvidia-smi (compute-policy) and MPS.
"""

import json
import os
import select
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress

from ocigpu.core.errors import HostError, OsErrorAs, RequestError, as_own_error, printable, quoted
from ocigpu.core.facts import HostFacts, facts_from_json, facts_to_json
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.fabric.state import KeptFabric
from ocigpu.gpus.nvidia.nvml_process import DEFAULT, set_compute_mode, set_persistence_mode
from ocigpu.gpus.tree import find_roots, normal_bus_id
from ocigpu.gpus.vfio.bus import PciBus
from ocigpu.gpus.vfio.facts import VFIO_DRIVERS, group_members
from ocigpu.gpus.vfio.holders import read_holders
from ocigpu.gpus.vfio.switch import DriverOfFunction, give_back, give_to_vfio, plan_switch
from ocigpu.kubernetes.dra.claims import Allotted, mps_group, mps_place
from ocigpu.kubernetes.dra.configs import INTERVALS, DeviceConfig
from ocigpu.kubernetes.dra.fabric import MODULE_ID
from ocigpu.kubernetes.dra.mig import MIG, MigEffect, plan_mig
from ocigpu.kubernetes.dra.prepare import ClaimEffect, find_facts
from ocigpu.kubernetes.dra.specs import NodeView
from ocigpu.kubernetes.dra.state import ClaimRecord, ClaimStep
from ocigpu.kubernetes.leases.gate import LeaseGate
from ocigpu.kubernetes.mps.daemon import ControlDaemon, Job, find_program
from ocigpu.kubernetes.mps.shares import mps_directories
from ocigpu.system.files import lock_file
from ocigpu.system.libc import MNT_DETACH, umount2
from ocigpu.system.locks import holding
from ocigpu.system.module_process import ModuleProcess
from ocigpu.system.programs import run_program
from ocigpu.system.removal import remove_directory

SECONDS = 20.0
MPS_SECONDS = 40.0
"""The kubelet gives a call 45 s; a daemon has 30 s to answer."""
MPS_GRACE = MPS_SECONDS / 2
"""For its end, once the standard input of its process is closed."""
MPS_LOOK = 1.0
MPS_SHM = "1g"


def plan_steps(
    allotted: Sequence[Allotted], view: NodeView, others: Sequence[ClaimRecord] = ()
) -> tuple[ClaimStep, ...]:
    """Return the steps for a claim's devices; ``others``: claims that are prepared.

    Raises RequestError (OCIGPU-DRA-2) for what cannot be, and what :func:`~.mig.plan_mig` raises.
    """
    steps = plan_mig((each.device for each in allotted if not each.admin), view, others)
    machines = [each.device.id for each in allotted if each.device.kind == "vfio" and not each.admin]
    if machines and view.options.lease_journal:
        steps.append(ClaimStep("lease", {"gpus": " ".join(machines)}))
    partition = _plan_partition(allotted, view)
    for each in allotted:
        if each.admin:
            continue
        if each.device.kind == "vfio":
            drivers = {item.function.address: item.function.driver for item in view.node.vfio.candidates}
            if drivers.get(each.device.id) not in VFIO_DRIVERS:
                roots = find_roots(view.settings)
                functions = plan_switch(each.device.id, roots, PciBus(roots.sys))
                persistent = _find_persistent(each.device.id, view)
                steps.append(ClaimStep("switch", {"functions": json.dumps(functions), "persistent": persistent}))
        elif each.config.strategy == "TimeSlicing" and each.device.kind == "gpu":
            step = ClaimStep("timeslice", {"gpu": each.device.id, "interval": each.config.interval})
            _check_interval(each, step, steps, others)
            steps.append(step)
    # nobody has the GPUs when it is activated, nor when it is deactivated: steps are undone in reverse
    steps += [*partition, *(ClaimStep("vfio", {"address": address}) for address in machines)]
    groups: dict[str, DeviceConfig] = {}
    for each in allotted:
        if each.config.strategy == "MPS" and not each.admin:
            if each.device.kind == "mig":
                raise RequestError("OCIGPU-DRA-2", f"request {quoted(each.request)}: MPS cannot share MIG devices")
            groups.setdefault(mps_group(each), each.config)
    steps += [ClaimStep("mps", {"group": group}) for group in groups]
    return tuple(steps)


def _plan_partition(allotted: Sequence[Allotted], view: NodeView) -> list[ClaimStep]:
    """Return the step that activates the partition of a claim's whole GPUs; none without a fabric manager.

    GPUs that several claims share are nobody's: what they are in is the operator's affair.  Raises HostError
    (OCIGPU-DRA-3) when it is not known which GPU is which on the board.
    """
    whole = [each for each in allotted if each.device.kind in ("gpu", "vfio") and not (each.admin or each.share)]
    if not whole or not view.options.fabric_address or view.options.lease_journal:
        return []
    boards = {normal_bus_id(each.device.board): each.device.name for each in whole}
    modules = {name: view.node.partitions.get(board, {}).get(MODULE_ID) for board, name in boards.items()}
    if unknown := [name for name, module in modules.items() if module is None]:
        text = f"{', '.join(unknown)}: the fabric manager's partitions are not known"
        raise HostError("OCIGPU-DRA-3", text, f"ocigpu fabric list --manager {view.options.fabric_address}")
    return [ClaimStep("partition", {"modules": " ".join(map(str, sorted(filter(None, modules.values()))))})]


def _find_persistent(address: str, view: NodeView) -> str:
    """Return the UUID of a GPU whose persistence mode is on, "" for another one."""
    uuids = [gpu.uuid for gpu in view.node.facts.gpus if gpu.bus_id == normal_bus_id(address)]
    details = [view.node.hardware.gpus.get(uuid) for uuid in uuids]
    return next((one.uuid for one in details if one and one.persistent), "")


def _check_interval(
    allotted: Allotted, step: ClaimStep, own: Sequence[ClaimStep], others: Sequence[ClaimRecord]
) -> None:
    """Raise RequestError (OCIGPU-DRA-2) where a share of the GPU has other time slices: it has one length."""
    there = [("this claim", each) for each in own] + [
        (f"claim {one.claim}", each) for one in others for each in one.steps
    ]
    for who, each in there:
        if each.effect == step.effect and each.arguments["gpu"] == step.arguments["gpu"] and each != step:
            text = f"request {quoted(allotted.request)}: {allotted.device.name} has time slices of another length"
            raise RequestError("OCIGPU-DRA-2", f"{text}: {each.arguments['interval']}, for {who}")


def mps_commands(allotted: Sequence[Allotted], facts: HostFacts) -> tuple[str, ...]:
    """Return the commands for the control daemon of these devices; GPUs are named by NVML's index.

    Limits are by UUID, by a device's number in the claim, or for all others.
    """
    indices = {gpu.uuid: gpu.index for gpu in facts.gpus}
    config = allotted[0].config
    found = []
    for number, each in enumerate(allotted):
        limit = config.pinned.get(each.device.id) or config.pinned.get(str(number)) or config.pinned.get("default")
        if limit:
            found.append(f"set_default_device_pinned_mem_limit {indices[each.device.id]} {limit}M")
    return (*found, f"set_default_active_thread_percentage {config.percentage or 100}")


class Effects:
    """The table of effects.  ``mps_root``: parent of the directories of MPS; ``settings``: of the host.

    ``read_again`` returns when the node has been read since; it raises HostError (OCIGPU-DRA-3).  ``gate``: the node's
    leases, None for none.  ``bus``: the host's PCI bus, None for the one in sysfs.  ``fabric``: manager
    of the GPUs' partitions, None for none.
    """

    def __init__(
        self,
        settings: Settings,
        mps_root: str,
        log: Callable[..., None],
        read_again: Callable[[], None] = lambda: None,
        gate: LeaseGate | None = None,
        bus: PciBus | None = None,
        fabric: KeptFabric | None = None,
    ) -> None:
        self._roots, self._fabric = find_roots(settings), fabric
        self._bus = bus or PciBus(self._roots.sys)
        self._settings, self.mps_root, self._log, self._gate = settings, mps_root, log, gate
        self.children: dict[tuple[str, str], ModuleProcess] = {}
        """The processes that run control daemons and end with us, by claim and group."""
        self._lock = threading.Lock()
        self.table = {
            MIG: MigEffect(settings.simulation_root, read_again).effect,
            "timeslice": ClaimEffect(self._slice, self._slice_back, shared=True),
            "mps": ClaimEffect(self._start_mps, self._stop_mps, lambda record, step, _: not self._runs(record, step)),
            "switch": ClaimEffect(self._switch, self._switch_back),
            "lease": ClaimEffect(self._reserve, self._give_back),
            "partition": ClaimEffect(self._activate, self._deactivate),
            "vfio": ClaimEffect(self._wait_for_holders, self._wait_for_holders),
        }

    def close(self) -> None:
        """End all control daemons."""
        for child in list(self.children.values()):
            child.close(MPS_GRACE)
        self.children.clear()

    # time slices

    def _slice(self, _record: ClaimRecord, step: dict[str, str], view: NodeView) -> None:
        problems = set_compute_mode(view.node.facts, [step["gpu"]], DEFAULT)
        for problem in problems.values():
            raise HostError("OCIGPU-DRA-3", f"GPU {step['gpu']}: compute mode: {problem}")
        set_timeslice(view.node.facts, step["gpu"], INTERVALS[step["interval"]])

    def _slice_back(self, _record: ClaimRecord, step: dict[str, str], view: NodeView | None) -> None:
        if facts := find_facts(view, step["gpu"]):
            set_timeslice(facts, step["gpu"], INTERVALS["Default"])

    # MPS

    def _start_mps(self, record: ClaimRecord, step: dict[str, str], view: NodeView) -> None:
        if self._runs(record, step):
            return
        self._end_child(record, step)
        own = _of_group(record, step)
        facts = view.node.facts
        program = find_program(facts)
        if not program:
            raise HostError("OCIGPU-DRA-3", "MPS: the host has no nvidia-cuda-mps-control")
        place = mps_place(record.claim.uid, step["group"], record.devices)
        job: dict[str, object] = {
            "resource": place,
            "program": program,
            "root": self.mps_root,
            "gpus": [each.device.id for each in own],
            "commands": mps_commands(own, facts),
            "facts": facts_to_json(facts),
        }
        child = _start_child(job)
        with self._lock:
            self.children[record.claim.uid, step["group"]] = child

    def _stop_mps(self, record: ClaimRecord, step: dict[str, str], view: NodeView | None) -> None:
        self._end_child(record, step)
        for each in _of_group(record, step):  # a daemon that was killed leaves its GPUs to one process each
            if facts := find_facts(view, each.device.id):
                for problem in set_compute_mode(facts, [each.device.id], DEFAULT).values():
                    raise HostError("OCIGPU-DRA-3", f"GPU {each.device.id}: compute mode: {problem}")
        remove_mps(self.mps_root, mps_place(record.claim.uid, step["group"], record.devices))

    def _end_child(self, record: ClaimRecord, step: dict[str, str]) -> None:
        with self._lock:
            child = self.children.pop((record.claim.uid, step["group"]), None)
        if child:
            child.close(MPS_GRACE)

    def _runs(self, record: ClaimRecord, step: dict[str, str]) -> bool:
        with self._lock:
            child = self.children.get((record.claim.uid, step["group"]))
            return child is not None and child.is_running()

    # virtual machines

    def _switch(self, _record: ClaimRecord, step: dict[str, str], view: NodeView) -> None:
        self._set_persistence(step, view, on=False)
        give_to_vfio(_functions(step), self._roots, self._bus)

    def _switch_back(self, _record: ClaimRecord, step: dict[str, str], view: NodeView | None) -> None:
        give_back(_functions(step), self._bus)
        self._set_persistence(step, view, on=True)

    def _set_persistence(self, step: dict[str, str], view: NodeView | None, *, on: bool) -> None:
        """What goes wrong is logged: before, the switch names who has the GPU open; after, the GPU works without it."""
        uuid = step.get("persistent", "")
        if not uuid:
            return
        problem = "the node cannot be read" if view is None else ""
        if view is not None:
            problem = set_persistence_mode(view.node.facts, [uuid], on).get(uuid, "")
        if problem:
            self._log("warning", f"GPU {uuid}: persistence mode {'on' if on else 'off'}: {problem}")

    def _reserve(self, record: ClaimRecord, step: dict[str, str], view: NodeView) -> None:
        if self._gate:
            gpus = step["gpus"].split()
            groups = [group_members(view.node.vfio, gpu) for gpu in gpus]
            self._gate.reserve_set(gpus, groups, f"claim/{record.claim.uid}")

    def _give_back(self, record: ClaimRecord, _step: dict[str, str], _view: NodeView | None) -> None:
        """The holders were waited for before: the last step of a claim is undone first."""
        if self._gate:
            self._gate.give_back(f"claim/{record.claim.uid}")

    def _activate(self, record: ClaimRecord, step: dict[str, str], _view: NodeView) -> None:
        """Activate the partition of exactly these GPUs; raises FabricError for none, and for others in its way."""
        if self._fabric is None:
            raise HostError("OCIGPU-DRA-3", "a partition is to be activated, and --fabric-address is not set")
        self._fabric.activate([*map(int, step["modules"].split())], f"claim/{record.claim.uid}")

    def _deactivate(self, record: ClaimRecord, step: dict[str, str], _view: NodeView | None) -> None:
        """Deactivate it if it is this claim's: of a claim that failed it may be another's."""
        modules = tuple(map(int, step["modules"].split()))
        if self._fabric is None:  # the pod must be able to end all the same
            self._log("warning", f"partition of GPUs {step['modules']} stays active: --fabric-address is not set")
            return
        kept = self._fabric.read_state().find(modules)
        if kept and kept.lease == f"claim/{record.claim.uid}":
            self._fabric.deactivate(modules)

    def _wait_for_holders(self, _record: ClaimRecord, step: dict[str, str], _view: NodeView | None) -> None:
        try:
            holders = read_holders(step["address"], self._roots)
        except HostError as error:
            if "no such function" in error.message:  # it is gone from the bus, and from every user
                return
            raise
        if holders:
            who = ", ".join(f"{each.pid} ({printable(each.command, 15)})" for each in holders[:4])
            raise HostError("OCIGPU-DRA-3", f"GPU {step['address']} is still open in process {who}", "")


def _of_group(record: ClaimRecord, step: dict[str, str]) -> list[Allotted]:
    return [each for each in record.devices if each.config.strategy == "MPS" and mps_group(each) == step["group"]]


def _functions(step: dict[str, str]) -> list[DriverOfFunction]:
    return [DriverOfFunction(*each) for each in json.loads(step["functions"])]


def set_timeslice(facts: HostFacts, gpu: str, number: int) -> None:
    """Set the length of a GPU's time slices, of :data:`INTERVALS`; needs root.  Raises HostError (OCIGPU-DRA-3)."""
    program = find_program(facts, "nvidia-smi")
    if not program:
        raise HostError("OCIGPU-DRA-3", "time slices: the host has no nvidia-smi")
    words = [program, "compute-policy", "-i", gpu, "--set-timeslice", str(number)]
    try:
        done = run_program(words, SECONDS, env={}, cwd="/")
    except TimeoutError as error:
        raise HostError("OCIGPU-DRA-3", f"time slices of GPU {gpu}: nvidia-smi: {error}") from error
    except OSError as error:
        raise HostError("OCIGPU-DRA-3", f"{program}: {error.strerror}") from error
    if done.status:
        said = (done.output + done.complaint).strip().splitlines()
        cause = printable(said[0] if said else f"status {done.status}", 200)
        raise HostError("OCIGPU-DRA-3", f"time slices of GPU {gpu}: nvidia-smi: {cause}")


# the child that runs a control daemon


def _start_child(job: "dict[str, object]") -> ModuleProcess:
    """Start a control daemon in a process of its own: it is made ready between fork and exec, beside no thread."""
    child = ModuleProcess()
    with OsErrorAs(HostError, "OCIGPU-DRA-3", "MPS: no process can be started"):
        child.start("ocigpu.kubernetes.dra.effects")
    child.send(json.dumps(job).encode())
    lines, _ = child.wait(MPS_SECONDS)
    if lines != [b"ready"]:
        child.close(MPS_GRACE)
        said = lines[0].decode(errors="replace") if lines else "MPS: the control daemon gave no answer"
        raise HostError("OCIGPU-DRA-3", printable(said, 400))
    return child


def remove_mps(root: str, place: str) -> None:
    """Remove what a daemon that was killed has left; raises HostError (OCIGPU-DRA-3)."""
    directories = mps_directories(root, place)
    base = os.path.dirname(directories.pipe)
    with OsErrorAs(HostError, "OCIGPU-DRA-3", f"remove {base}"):
        if os.path.ismount(directories.shm):
            umount2(directories.shm, MNT_DETACH)
        if os.path.isdir(base):
            remove_directory(base)


def main() -> None:
    """Run the control daemon that standard input describes, until that is closed; print "ready" or why not."""
    job = json.loads(sys.stdin.readline())
    directories = mps_directories(job["root"], job["resource"])
    daemon = ControlDaemon(
        Job(
            job["resource"],
            job["program"],
            directories,
            tuple(job["gpus"]),
            tuple(job["commands"]),
            MPS_SHM,
            facts_from_json(job["facts"]),
        ),
        lambda _level, text, **_: print(text, file=sys.stderr, flush=True),
    )
    base = os.path.dirname(directories.pipe)
    try:
        os.makedirs(base, exist_ok=True)
        with _alone(base):
            daemon.start()
    except Exception as error:  # noqa: BLE001 - also a defect: it becomes the claim's error
        print(as_own_error(error).message, flush=True)
        return
    print("ready", flush=True)
    while daemon.is_running() and not select.select([sys.stdin], [], [], MPS_LOOK)[0]:
        pass
    with suppress(OSError), _alone(base):
        if daemon.is_running():  # else the next driver has ended it and has one of its own there
            daemon.stop(keep=True)  # containers find that one where they had this


def _alone(base: str) -> AbstractContextManager[None]:
    """Keep other drivers from starting or ending a daemon in a directory: during an update two drivers run."""
    busy = HostError("OCIGPU-DRA-3", f"{base}: another driver starts or ends its control daemon", "")
    return holding(lock_file(f"{base}/.lock"), busy, MPS_SECONDS)
