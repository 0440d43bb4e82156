"""``ocigpu lease``: where this node's GPUs are between tenants, what an operator does about it, and the agent."""

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ocigpu.cli.cluster.programs import LOG_FORMATS
from ocigpu.cli.front import show
from ocigpu.cli.front.arguments import takes
from ocigpu.cli.front.common import check_one_of, load_settings, named_address
from ocigpu.cli.front.optional import needing
from ocigpu.core.errors import HostError, UsageError, printable
from ocigpu.kubernetes.cluster.names import POD_RESOURCES_SOCKET
from ocigpu.kubernetes.leases.history import show_history
from ocigpu.kubernetes.leases.journal import LeaseJournal, journal_directory
from ocigpu.kubernetes.leases.lease import (
    NO_KUBELET,
    OVER,
    Lease,
    LeaseEvent,
    LeaseEventKind,
    Phase,
    blocked_by,
    check_act,
    describe,
    step,
)
from ocigpu.system.log import stamp


def reach(journal: str = "", config: str = "") -> LeaseJournal:
    """Return the journal that a command is about; raises HostError where there is none."""
    directory = journal or journal_directory(load_settings(config).simulation_root)
    if not os.path.isdir(directory):
        hint = "Leases begin with: ocigpu lease agent"
        raise HostError("OCIGPU-LEASE-1", f"open the lease journal {printable(directory)}: there is none", hint)
    return LeaseJournal(directory)


def _find(journal: LeaseJournal, gpu: str) -> Lease:
    leases = journal.refresh()
    name = named_address(gpu)
    if name not in leases:
        raise UsageError(f'no lease of a GPU "{printable(gpu)}"', f"GPUs: {', '.join(sorted(leases)) or 'none'}")
    return leases[name]


def _data(lease: Lease, journal: LeaseJournal) -> dict[str, Any]:
    data = asdict(lease)
    data["holder"] = lease.holder._asdict() if lease.holder else None
    seconds = max(journal.clock() - lease.since, 0.0) if lease.boot == journal.boot else None
    return data | {"seconds": seconds, "waits_for": blocked_by(lease, journal.leases)}


@takes(reach)
def list_command(journal: LeaseJournal) -> "show.Answer":
    leases = [lease for _, lease in sorted(journal.refresh().items())]
    yield {"leases": [_data(lease, journal) for lease in leases]}
    rows = [
        (each.gpu, str(each.phase), str(each.generation), _pod(each), each.sick_reason or each.reason, _detail(each))
        for each in leases
    ]
    show.table(("gpu", "phase", "generation", "pod", "reason", "detail"), rows)


def _detail(lease: Lease) -> str:
    """Return the detail: why it will be quarantined outlasts what a phase or an agent's start forgets."""
    return lease.detail or lease.sick.partition(": ")[2]


def _pod(lease: Lease) -> str:
    return f"{lease.holder.namespace}/{lease.holder.pod}" if lease.holder else ""


@takes(reach)
def show_command(journal: LeaseJournal, gpu: str) -> "show.Answer":
    lease = _find(journal, gpu)
    data = _data(lease, journal)
    yield data
    show.fields(
        [
            ("gpu", lease.gpu),
            ("lease", describe(lease).removeprefix("lease is ")),
            ("for", "an earlier boot" if data["seconds"] is None else f"{data['seconds']:.0f} s"),
            ("pod", _pod(lease) or "none"),
            ("set", ", ".join(lease.members) or "none"),
            ("established", ", ".join(lease.proofs) or "nothing"),
            *_next(lease, data["waits_for"]),
        ]
    )


def _next(lease: Lease, other: str) -> tuple[tuple[str, str], ...]:
    """Return what a lease waits for and what becomes of it then."""
    if lease.phase in (Phase.QUARANTINED, Phase.MAINTENANCE):
        act = f"an operator: ocigpu lease release {lease.gpu} --generation {lease.generation}"
        return ("waits for", act), ("then", "reset and check, then Free")
    if not other and lease.phase is Phase.RECLAIMING and OVER not in lease.proofs:
        other = NO_KUBELET if lease.detail == NO_KUBELET else "the end of its pod, which the kubelet reports"
    then = f"Quarantined ({lease.sick})" if lease.sick else "Maintenance" if lease.maintenance else "as usual"
    return ("waits for", other or "no other GPU"), ("then", then)


def _act(journal: LeaseJournal, kind: LeaseEventKind, gpu: str, generation: int, why: str) -> "show.Answer":
    name = _find(journal, gpu).gpu
    who = os.environ.get("SUDO_USER") or f"user {os.getuid()}"
    with journal.change() as change:
        text = why if kind is LeaseEventKind.RELEASE else f"OperatorRequest: {why}"
        event = LeaseEvent(kind, generation, text=printable(text, 300))
        check_act(change.leases[name], event)
        after = step(change.leases[name], event, journal.clock())[0]
        change.put(after, f"{kind} by {who}{': ' if why else ''}{printable(why, 300)}")
    yield _data(after, journal)
    print(f"GPU {name}: {describe(after)}")


@takes(reach)
def release_command(journal: LeaseJournal, gpu: str, generation: int, why: str = "") -> "show.Answer":
    yield from _act(journal, LeaseEventKind.RELEASE, gpu, generation, why)


@takes(reach)
def quarantine_command(journal: LeaseJournal, gpu: str, generation: int, why: str = "") -> "show.Answer":
    yield from _act(journal, LeaseEventKind.QUARANTINE, gpu, generation, why)


@takes(reach)
def maintenance_command(journal: LeaseJournal, gpu: str, generation: int, why: str = "") -> "show.Answer":
    yield from _act(journal, LeaseEventKind.MAINTAIN, gpu, generation, why)


@takes(reach)
def history_command(journal: LeaseJournal, gpu: str = "") -> "show.Answer":
    machines = show_history(journal.history(), _find(journal, gpu).gpu if gpu else "")
    yield {"machines": machines}
    changes = [(each["time"], machine["machine_id"], each) for machine in machines for each in machine["transitions"]]
    changes.sort(key=lambda change: change[0])
    rows = [
        (stamp(when), name, each["phase"], str(each["generation"]), each["tenant"], each["cause"])
        for when, name, each in changes
    ]
    show.table(("time", "gpu", "phase", "generation", "tenant", "cause"), rows)


def agent_command(
    journal: str = "",
    resource: str = "gpu",
    pods_socket: str = POD_RESOURCES_SOCKET,
    address: str = "",
    check_program: str = "",
    no_check: bool = False,
    node_name: str = "",
    metrics: str = "",
    pace: float = 1.0,
    log_format: str = "text",
    config: str = "",
) -> None:
    check_one_of("--log-format", log_format, LOG_FORMATS)
    if bool(check_program) == no_check:
        raise UsageError("one of --check-program and --no-check is needed", "see: ocigpu lease agent --help")
    with needing("the agent needs grpcio and protobuf"):
        from ocigpu.kubernetes.leases.machine import MachineHands, free_sets, open_fabric_at, run_check
    from concurrent.futures import ThreadPoolExecutor

    from ocigpu.kubernetes.leases.agent import WORKERS, NodeAgent, Report, run_agent
    from ocigpu.system.service import ServiceLog

    settings = load_settings(config)
    check: Callable[[str], Any] = (lambda _gpu: ()) if no_check else (lambda gpu: run_check(check_program, gpu))
    fabric = open_fabric_at(address, settings)
    space, name = (os.environ.get(each, "") for each in ("POD_NAMESPACE", "POD_NAME"))
    own_pod = f"{space}/{name}" if space and name else ""
    hands = MachineHands(settings, _reset_of(settings), resource, pods_socket, fabric, check, own_pod=own_pod)
    log = ServiceLog(log_format == "json", lossy=True)
    opened = LeaseJournal(journal or journal_directory(settings.simulation_root))
    agent = NodeAgent(opened, hands, ThreadPoolExecutor(WORKERS, "lease"), log)
    reports: list[Report] = []
    if node_name := node_name or os.environ.get("NODE_NAME", ""):
        with needing("--node-name needs lightkube"):
            from ocigpu.kubernetes.cluster.documents import Documents
            from ocigpu.kubernetes.leases.report import LeaseReporter, LeaseWatch
        writer = ThreadPoolExecutor(1, "report")
        watch = LeaseWatch(Documents(), node_name)
        watch.start()
        reports.append(LeaseReporter(Documents(), node_name, writer, log, modules=hands.modules, watch=watch).step)
    if metrics:
        from ocigpu.kubernetes.leases.metrics import LeaseMetrics
        from ocigpu.system.pages import serve_metrics

        counted = LeaseMetrics(lambda: free_sets(fabric, hands.modules), agent.failures)
        reports.append(counted.take)
        log("info", f"metrics on port {serve_metrics(metrics, counted.render).server_port}")
    run_agent(agent, log, pace, reports)


def _reset_of(settings: Any) -> Callable[[str], str]:
    from json import dumps

    from ocigpu.cli.host.vfio import open_bus
    from ocigpu.gpus.tree import find_roots
    from ocigpu.gpus.vfio.reset import reset_gpu

    roots = find_roots(settings)
    return lambda gpu: dumps(reset_gpu(gpu, roots, bus=open_bus(roots)).as_json(), separators=(",", ":"))
