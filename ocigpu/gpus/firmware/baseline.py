"""Compares the firmware of GPUs and their baseboard with a baseline that an operator has signed off.

Facts come from the board controller (:mod:`ocigpu.gpus.firmware.redfish`) or from a virtual machine that checks, in the
same form.  A baseline contains, for each model, a set of accepted values for each fact, since fleets are upgraded one
by one.  A fact of the baseline that a component does not report is a deviation, too; otherwise silence would pass.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError, printable, quoted
from ocigpu.system.files import open_regular, read_bounded, replace_path, why_replaceable, why_untrusted
from ocigpu.system.log import stamp

FORMAT = 1
MAX_FILE = 1 << 20
BOARD = "baseboard"
"""The model that stands for everything but the GPUs."""
COUNTS = ("uncorrectable-ecc-errors", "remapped-rows-uncorrectable")
"""Numbers in ``health`` that grow with wear; a baseline limits them."""
LIMITS = {"uncorrectable-ecc-errors": 0, "remapped-rows-uncorrectable": 8}
"""What a proposal allows."""
ANY = "*"
"""An accepted value that stands for every one: the fact must be reported, with any value."""
FLAGS = {
    "row-remapping-failed": "the memory needs repair",
    "row-remapping-pending": "the memory needs a reset for its repair",
    "inforom-corrupted": "the InfoROM is damaged",
}
"""Flags that must not be set, and their meaning."""
HEALTH = ("status", *COUNTS, *FLAGS)
"""The facts about health that can be reported."""
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:+/-]{0,159}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:+/()-]{0,99}")


@dataclass(frozen=True)
class FirmwareFacts:
    """The facts about one component: a GPU, or the baseboard's other parts together.

    ``name``: as the board controller has it, "GPU_SXM_3"; ``slot``: 3, 0 if it is not a GPU, negative for a GPU that is
    not a module; ``versions``: by component, e.g. "VBIOS", "InfoROM", "ERoT", "NVSwitch_0"; ``health``: numbers of
    :data:`COUNTS`, flags of :data:`FLAGS`, and "status".
    """

    name: str
    slot: int
    model: str
    part_number: str = ""
    serial: str = ""
    uuid: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    health: Mapping[str, str | int | bool] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The component's key in a baseline: its model and part number."""
        return f"{self.model} {self.part_number}".strip()

    def as_json(self) -> dict[str, Any]:
        """Return it as an object for JSON."""
        return asdict(self)


class Deviation(NamedTuple):
    """One difference from the baseline: what of which component, and the reason in words."""

    name: str
    fact: str
    found: str
    accepted: tuple[str, ...]
    reason: str

    @property
    def text(self) -> str:
        """Return it as one line."""
        wanted = f" (accepted: {', '.join(self.accepted)})" if self.accepted else ""
        return f"{self.name} {self.fact}: {printable(self.found, 200) or 'nothing'}: {self.reason}{wanted}"


@dataclass(frozen=True)
class FirmwareBaseline:
    """The accepted values by fact and model, limits of counts, and the health facts that each model reports.

    ``approved_by`` is "" for a proposal.
    """

    models: Mapping[str, Mapping[str, tuple[str, ...]]]
    limits: Mapping[str, int]
    approved_by: str = ""
    approved_at: str = ""
    health: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def compare_with_baseline(facts: FirmwareFacts, baseline: FirmwareBaseline) -> tuple[Deviation, ...]:
    """Return every difference of a component from its baseline, () for none.  Pure.

    A baseboard that reports nothing differs only from a baseline made when it reported something.
    """
    accepted = baseline.models.get(facts.key, None if facts.slot or facts.versions else {})
    if accepted is None:
        return (Deviation(facts.name, "model", facts.key, tuple(baseline.models), "the baseline has no such model"),)
    found = []
    for fact in sorted({*accepted, *facts.versions}):
        values, value = accepted.get(fact), facts.versions.get(fact, "")
        if values is None:
            found.append(Deviation(facts.name, fact, value, (), "it is not in the baseline"))
        elif not value:
            found.append(Deviation(facts.name, fact, "", values, "not reported"))
        elif value not in values and ANY not in values:
            found.append(Deviation(facts.name, fact, value, values, "not accepted"))
    return (*found, *_unhealthy(facts, baseline.limits, baseline.health.get(facts.key, ())))


def _unhealthy(facts: FirmwareFacts, limits: Mapping[str, int], told: Iterable[str]) -> list[Deviation]:
    silent = sorted({*told} - facts.health.keys())
    found = [Deviation(facts.name, name, "", (), "no longer reported") for name in silent]
    for name, value in sorted(facts.health.items()):
        if name in FLAGS and value is not False:
            found.append(Deviation(facts.name, name, str(value), (), FLAGS[name]))
        elif name == "status" and value != "OK":
            found.append(Deviation(facts.name, name, str(value), ("OK",), "not healthy"))
        elif name in COUNTS and (type(value) is not int or value > limits.get(name, 0)):
            most = str(limits.get(name, 0))
            found.append(Deviation(facts.name, name, str(value), (), f"more than the baseline's limit of {most}"))
    return found


def compare_all(
    components: Iterable[FirmwareFacts], baseline: FirmwareBaseline, serials: Mapping[int, str] | None = None
) -> tuple[Deviation, ...]:
    """Return the differences of all components; ``serials``: of the boards that should be in which slots.  Pure."""
    components = tuple(components)
    found = [one for facts in components for one in compare_with_baseline(facts, baseline)]
    there = {facts.slot: facts for facts in components if facts.slot}
    for slot, serial in (serials or {}).items():
        if slot not in there:
            found.append(Deviation(f"module {slot}", "serial", "", (serial,), "not reported"))
        elif there[slot].serial != serial:
            found.append(Deviation(there[slot].name, "serial", there[slot].serial, (serial,), "another board"))
    return tuple(found)


def propose(components: Iterable[FirmwareFacts]) -> FirmwareBaseline:
    """Return a baseline of the present state: a proposal, which proves nothing by itself.  Pure."""
    models: dict[str, dict[str, set[str]]] = {}
    health: dict[str, set[str]] = {}
    for facts in (one for one in components if one.slot or one.versions):
        health.setdefault(facts.key, set()).update(facts.health)
        values = models.setdefault(facts.key, {})
        for fact, value in facts.versions.items():
            values.setdefault(fact, set()).add(value)
    return FirmwareBaseline(
        {key: {fact: tuple(sorted(values[fact])) for fact in sorted(values)} for key, values in models.items()},
        LIMITS,
        health={key: tuple(sorted(names)) for key, names in health.items() if names},
    )


def merge(old: FirmwareBaseline, new: FirmwareBaseline) -> FirmwareBaseline:
    """Return a proposal that accepts what either does; limits are the old ones.  Pure."""
    models: dict[str, dict[str, tuple[str, ...]]] = {}
    for key in (*old.models, *new.models):
        parts = [one.models.get(key, {}) for one in (old, new)]
        facts = sorted({*parts[0], *parts[1]})
        models[key] = {fact: tuple(sorted({*parts[0].get(fact, ()), *parts[1].get(fact, ())})) for fact in facts}
    health = {key: tuple(sorted({*old.health.get(key, ()), *new.health.get(key, ())})) for key in models}
    return FirmwareBaseline(models, old.limits, health={key: names for key, names in health.items() if names})


def read_with_doubts(path: str, limit: int) -> tuple[bytes, int, str]:
    """Return a file's content, its mode, and why users other than root and this one could have written it, or "".

    A link, such as a file of a Kubernetes secret, must be one that no other user could replace.  Raises OSError.
    """
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        data = read_bounded(file, limit)
    why = why_untrusted(status.st_uid, status.st_mode) or (why_replaceable(path) if os.path.islink(path) else "")
    return data, status.st_mode, why


def read_baseline(path: str, *, proposal: bool = False) -> FirmwareBaseline:
    """Return the baseline in a file; ``proposal``: one that is not signed off is accepted, too.

    Raises HostError (OCIGPU-FW-4) for a file that cannot be read or understood, that another user could have written,
    that is a proposal, or that was changed since it was signed off.
    """
    try:
        data, _, why = read_with_doubts(path, MAX_FILE)
        document = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise _error(f"read {path}: {getattr(error, 'strerror', None) or 'not JSON'}") from error
    if why:
        raise _error(f"{path}: {why}")
    try:
        baseline = _parse(document)
        approved = document["approved"]
        signed = replace(baseline, approved_by=str(approved["by"]), approved_at=str(approved["at"]))
        digest = str(approved["digest"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _error(f"{path}: not a baseline: {error}") from error
    if proposal:
        return signed
    if not signed.approved_by:
        raise _error(f"{path} is a proposal: it is not signed off", "ocigpu firmware approve FILE --by NAME")
    if digest != _digest(signed):
        raise _error(f"{path} was changed after {quoted(signed.approved_by)} had signed it off")
    return signed


def _parse(document: Any) -> FirmwareBaseline:
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']}, not {FORMAT}")
    models: dict[str, dict[str, tuple[str, ...]]] = {}
    for key, facts in document["models"].items():
        models[key] = {}
        for fact, values in facts.items():
            if not isinstance(values, list) or not values or not all(isinstance(one, str) for one in values):
                raise ValueError(f"{key}: {fact}: not a list of values")
            models[key][fact] = tuple(values)
    limits = dict(document["limits"])
    for name, value in limits.items():
        if name not in COUNTS or type(value) is not int:
            raise ValueError(f"limit {name}: not one of {', '.join(COUNTS)} and a number")
    health = {str(key): tuple(names) for key, names in document.get("health", {}).items()}
    if bad := [name for names in health.values() for name in names if name not in HEALTH]:
        raise ValueError(f"health {quoted(str(bad[0]), 60)}: not one of {', '.join(HEALTH)}")
    return FirmwareBaseline(models, limits, health=health)


def _content(baseline: FirmwareBaseline) -> dict[str, Any]:
    models = {key: {fact: list(values) for fact, values in facts.items()} for key, facts in baseline.models.items()}
    health = {key: list(names) for key, names in baseline.health.items()}
    # without, it is as it was signed off before there was any
    return {"models": models, "limits": dict(baseline.limits), **({"health": health} if health else {})}


def _digest(baseline: FirmwareBaseline) -> str:
    text = json.dumps([_content(baseline), baseline.approved_by, baseline.approved_at], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_baseline(path: str, baseline: FirmwareBaseline) -> None:
    """Write a baseline, in one step; raises HostError (OCIGPU-FW-4)."""
    digest = _digest(baseline) if baseline.approved_by else ""
    approved = {"by": baseline.approved_by, "at": baseline.approved_at, "digest": digest}
    text = json.dumps({"format": FORMAT, "approved": approved, **_content(baseline)}, indent=2) + "\n"
    try:
        replace_path(path, text.encode(), 0o644)
    except OSError as error:
        raise _error(f"write {path}: {error.strerror}") from error


def approve(baseline: FirmwareBaseline, by: str, now: float | None = None) -> FirmwareBaseline:
    """Return a baseline signed off by name; raises HostError (OCIGPU-FW-4) without a usable name."""
    if not _NAME.fullmatch(by):
        raise _error(f"signed off by {quoted(by)}: not a name")
    at = stamp(now)
    return replace(baseline, approved_by=by, approved_at=at)


def _error(message: str, hint: str | None = None) -> HostError:
    return HostError("OCIGPU-FW-4", f"firmware baseline: {message}", hint)


def facts_from_json(document: Any) -> tuple[FirmwareFacts, ...]:
    """Return the components in what :meth:`FirmwareFacts.as_json` made: {"components": [...]}.

    It may come from a virtual machine that a tenant had: raises ValueError for what is not such a document.
    """
    try:
        components = document["components"]
        if len(components) > 64:
            raise ValueError("too many components")
        return tuple(_component(one) for one in components)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not facts on firmware: {error}") from error


def _component(one: Any) -> FirmwareFacts:
    texts = {name: check_text(one.get(name, ""), empty=True) for name in ("part_number", "serial", "uuid")}
    versions = {check_text(name): check_text(value) for name, value in one.get("versions", {}).items()}
    said = one.get("health", {})
    if type(one["slot"]) is not int or not all(isinstance(value, str | int) for value in said.values()):
        raise ValueError("slot or health of another type")
    health = {check_text(name): check_text(value) if isinstance(value, str) else value for name, value in said.items()}
    name, model = check_text(one["name"]), check_text(one["model"])
    return FirmwareFacts(name, one["slot"], model, versions=versions, health=health, **texts)


def check_text(value: Any, *, empty: bool = False) -> str:
    """Return a text of foreign origin; raises ValueError for one that no version, serial number or model looks like."""
    if (empty and value == "") or (isinstance(value, str) and _VALUE.fullmatch(value)):
        return str(value)
    raise ValueError(f"{quoted(str(value), 60)} is not a version, number or name")
