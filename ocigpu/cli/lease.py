"""``ocigpu lease``: where this node's GPUs are between tenants, what an operator does about it, and the agent."""

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ocigpu.cli import show
from ocigpu.cli.common import load_settings
from ocigpu.cli.kubernetes import INSTALL
from ocigpu.core.errors import HostError, UsageError, printable
from ocigpu.kubernetes.tenants.history import show_history
from ocigpu.kubernetes.tenants.journal import DIRECTORY, LeaseJournal
from ocigpu.kubernetes.tenants.lease import Happened, Lease, LeaseEvent, Phase, check_act, describe, step, waits_for


def _open(journal: str) -> LeaseJournal:
    directory = journal or DIRECTORY
    if not os.path.isdir(directory):
        hint = "Leases begin with: ocigpu lease agent"
        raise HostError("OCIGPU-LEASE-1", f"open the lease journal {printable(directory)}: there is none", hint)
    return LeaseJournal(directory)


def _find(journal: LeaseJournal, gpu: str) -> Lease:
    leases = journal.refresh()
    name = gpu.lower() if gpu.count(":") > 1 else f"0000:{gpu.lower()}"
    if name not in leases:
        raise UsageError(f'no lease of a GPU "{printable(gpu)}"', f"GPUs: {', '.join(sorted(leases)) or 'none'}")
    return leases[name]


def _data(lease: Lease, journal: LeaseJournal) -> dict[str, Any]:
    data = asdict(lease)
    data["holder"] = lease.holder._asdict() if lease.holder else None
    seconds = max(journal.clock() - lease.since, 0.0) if lease.boot == journal.boot else None
    return data | {"seconds": seconds, "waits_for": waits_for(lease, journal.leases)}


def list_command(journal: str = "", json: bool = False) -> None:
    opened = _open(journal)
    leases = [lease for _, lease in sorted(opened.refresh().items())]
    if json:
        show.data({"leases": [_data(lease, opened) for lease in leases]})
        return
    rows = [
        (each.gpu, str(each.phase), str(each.generation), _pod(each), each.sick or each.reason, each.detail)
        for each in leases
    ]
    show.table(("gpu", "phase", "generation", "pod", "reason", "detail"), rows)


def _pod(lease: Lease) -> str:
    return f"{lease.holder.namespace}/{lease.holder.pod}" if lease.holder else ""


def show_command(gpu: str, journal: str = "", json: bool = False) -> None:
    opened = _open(journal)
    lease = _find(opened, gpu)
    data = _data(lease, opened)
    if json:
        show.data(data)
        return
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
    then = f"Quarantined ({lease.sick})" if lease.sick else "Maintenance" if lease.maintenance else "as usual"
    return ("waits for", other or "no other GPU"), ("then", then)


def _act(kind: Happened, gpu: str, generation: int, why: str, journal: str, json: bool) -> None:
    opened = _open(journal)
    name = _find(opened, gpu).gpu
    who = os.environ.get("SUDO_USER") or f"user {os.getuid()}"
    with opened.change() as change:
        text = f"OperatorRequest: {why}" if kind is Happened.QUARANTINE else why
        event = LeaseEvent(kind, generation, text=printable(text, 300))
        check_act(change.leases[name], event)
        after = step(change.leases[name], event, opened.clock())[0]
        change.put(after, f"{kind} by {who}{': ' if why else ''}{printable(why, 300)}")
    if json:
        show.data(_data(after, opened))
    else:
        print(f"GPU {name}: {describe(after)}")


def release_command(gpu: str, generation: int, why: str = "", journal: str = "", json: bool = False) -> None:
    _act(Happened.RELEASE, gpu, generation, why, journal, json)


def quarantine_command(gpu: str, generation: int, why: str = "", journal: str = "", json: bool = False) -> None:
    _act(Happened.QUARANTINE, gpu, generation, why, journal, json)


def maintenance_command(gpu: str, generation: int, why: str = "", journal: str = "", json: bool = False) -> None:
    _act(Happened.MAINTAIN, gpu, generation, why, journal, json)


def history_command(gpu: str = "", journal: str = "", json: bool = False) -> None:
    opened = _open(journal)
    machines = show_history(opened.history(), _find(opened, gpu).gpu if gpu else "")
    if json:
        show.data({"machines": machines})
        return
    changes = [(each["time"], machine["machine_id"], each) for machine in machines for each in machine["transitions"]]
    changes.sort(key=lambda change: change[0])
    rows = [
        (_date(when), name, each["phase"], str(each["generation"]), each["tenant"], each["cause"])
        for when, name, each in changes
    ]
    show.table(("time", "gpu", "phase", "generation", "tenant", "cause"), rows)


def _date(seconds: float) -> str:
    import time

    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def agent_command(
    journal: str = "",
    resource: str = "gpu",
    pods_socket: str = "/var/lib/kubelet/pod-resources/kubelet.sock",
    address: str = "",
    check_program: str = "",
    no_check: bool = False,
    node_name: str = "",
    pace: float = 1.0,
    log_format: str = "text",
    config: str = "",
) -> None:
    if log_format not in ("text", "json"):
        raise UsageError(f'--log-format: "{printable(log_format)}" is not one of text, json')
    if bool(check_program) == no_check:
        raise UsageError("one of --check-program and --no-check is needed", "see: ocigpu lease agent --help")
    try:
        from ocigpu.kubernetes.tenants.machine import MachineHands, open_fabric_at, run_check
    except ImportError as error:
        raise HostError("OCIGPU-KUBE-3", f"the agent needs grpcio and protobuf: {error}", INSTALL) from error
    from ocigpu.kubernetes.tenants.node_agent import run_agent
    from ocigpu.system.service import ServiceLog

    settings = load_settings(config)
    check: Callable[[str], Any] = (lambda _gpu: ()) if no_check else (lambda gpu: run_check(check_program, gpu))
    fabric = open_fabric_at(address, settings)
    hands = MachineHands(settings, _reset_of(settings), resource, pods_socket, fabric, check)
    log = ServiceLog(log_format == "json", lossy=True)
    opened = LeaseJournal(journal or DIRECTORY)
    node_name = node_name or os.environ.get("NODE_NAME", "")
    if not node_name:
        run_agent(opened, hands, log, pace)
        return
    try:
        from ocigpu.kubernetes.tenants.report import LeaseReporter
        from ocigpu.kubernetes.tenants.resources import Documents, open_client
    except ImportError as error:
        raise HostError("OCIGPU-KUBE-3", f"--node-name needs lightkube: {error}", INSTALL) from error
    from concurrent.futures import ThreadPoolExecutor

    reporter = LeaseReporter(Documents(open_client()), node_name, ThreadPoolExecutor(1, "report"), log)
    run_agent(opened, hands, log, pace, reporter.step)


def _reset_of(settings: Any) -> Callable[[str], str]:
    from json import dumps

    from ocigpu.cli.vfio import open_bus
    from ocigpu.gpus.tree import find_roots
    from ocigpu.gpus.vfio.reset import reset_gpu

    roots = find_roots(settings)
    return lambda gpu: dumps(reset_gpu(gpu, roots, bus=open_bus(roots)).as_json(), separators=(",", ":"))
