"""What works, in three lines: GPUs, driver, and each engine's ways to them."""

from collections.abc import Sequence
from typing import NamedTuple

from ocigpu.core.errors import UNUSABLE, OcigpuError
from ocigpu.doctor.docker import find_gpus_hook
from ocigpu.doctor.engines import does_run, installed_engines, is_vendors, label, runtime_works, takes_cdi
from ocigpu.doctor.findings import KNOWN, Finding
from ocigpu.doctor.host import Host
from ocigpu.engines.status import EngineStatus

YES = {True: "yes", False: "no", None: "-"}


class Work(NamedTuple):
    """One part and whether it ``works``, None when that is unknown; ``text``: its description, or its problem.

    ``ways``: of an engine, each of its ways to GPUs, "--runtime", "--gpus" (Docker's alone) and "CDI".
    """

    what: str
    works: bool | None
    text: str
    ways: dict[str, bool] = {}

    @property
    def line(self) -> str:
        return self.text if self.works is None else f"{YES[self.works]}: {self.text}"


def find_works(host: Host, findings: Sequence[Finding]) -> list[Work]:
    """Return GPUs, driver and each engine, in this order; without an engine, an entry that states this."""
    found = [_by_checks(what, findings) for what in ("GPUs", "driver")]
    try:
        engines = [_engine(host, status, findings) for status in installed_engines(host)]
    except (OcigpuError, OSError, *UNUSABLE) as failure:  # not readable by this user, or not parseable
        return [*found, Work("engines", None, str(failure))]
    return [*found, *(engines or [Work("engines", False, "no container engine is installed")])]


def is_ready(works: Sequence[Work], findings: Sequence[Finding]) -> bool:
    """Tell whether containers can get GPUs here and no finding, except simulated GPUs, is worse than a note."""
    worse = any(
        item.severity == "error" or (item.severity == "warning" and item.name != "simulated-host") for item in findings
    )
    return not worse and all(work.works for work in works[:2]) and any(work.works for work in works[2:])


def _by_checks(what: str, findings: Sequence[Finding]) -> Work:
    known = KNOWN["works"][what]
    by_name = {name: [item for item in findings if item.name == name] for name in (*known["says"], *known["stops"])}
    for name in known["stops"]:
        for item in by_name[name]:
            if item.severity == "error" or (name == "no-gpu" and item.is_bad):
                return Work(what, False, item.text)
    said = [item for name in known["says"] for item in by_name[name]]
    fine = next((item for item in said if item.severity == "ok"), None)
    unknown = next((item.text for item in said if item.name == known["otherwise"]), "")
    return Work(what, True, fine.text) if fine else Work(what, None, unknown)


def _engine(host: Host, status: EngineStatus, findings: Sequence[Finding]) -> Work:
    runtimes = [entry for entry in status.runtimes if entry.ours or is_vendors(entry.path)]
    gpus = {"--gpus": not host.is_wsl and bool(find_gpus_hook(host, status))} if status.engine == "docker" else {}
    by_runtime = runtime_works(host) and any(entry.exists for entry in runtimes)
    ways = {"--runtime": by_runtime, **gpus, "CDI": takes_cdi(host, status)}
    stops = KNOWN["works"]["engines"]
    names = (status.engine, label(status).lower())
    errors = [item for item in findings if item.severity == "error"]
    wrong = {item.name for item in errors if item.name not in stops["own"] or item.text.lower().startswith(names)}
    ways = {way: there and wrong.isdisjoint((*stops["all"], *stops[way])) for way, there in ways.items()}
    text = ", ".join(f"{way} {YES[there]}" for way, there in ways.items())
    if does_run(host, status) is False:
        return Work(label(status), False, "does not run", dict.fromkeys(ways, False))
    return Work(label(status), any(ways.values()), text, ways)
