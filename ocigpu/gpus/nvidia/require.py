"""Requirements of CUDA images: ``cuda>=12.4 brand=tesla,driver>=470,driver<471``.

A space separates alternatives, one of which must hold; a comma joins rules that must all hold; there are no spaces
inside a rule.  Names (case-insensitive): ``cuda`` (version the driver supports), ``driver`` (its version), ``arch``
(compute capability of the GPU) and ``brand`` (its brand as NVML names it).  Pure: facts in, an error or nothing out.
"""

from ocigpu.core.errors import RequestError, printable, quoted
from ocigpu.core.facts import Gpu, HostFacts
from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

MAX_EXPRESSION = 64 * 1024
"""Longest expression, in characters: those of real images have about 1,500."""

OPERATORS = ("=", "!=", "<", "<=", ">", ">=")
MEANINGS = {"cuda": "CUDA version", "driver": "driver version", "arch": "compute capability", "brand": "brand"}
_SHOWN_ALTERNATIVES = 6
_SHOWN_LENGTH = 300


class Rule(NamedTuple):
    """One comparison: ``name`` (lower case) ``operator`` ``value``, read as "actual operator value"."""

    name: str
    operator: str
    value: str

    def text(self) -> str:
        return self.name + self.operator + self.value


if TYPE_CHECKING:
    Group: TypeAlias = tuple[Rule, ...]


def parse_requirement(text: str, variable: str = "requirement") -> "tuple[Group, ...]":
    """Return the alternatives of an expression; none: it requires nothing and always holds.

    Raises RequestError (OCIGPU-REQ-4) naming ``variable`` and quoting the rule that cannot be understood.
    """
    if len(text) > MAX_EXPRESSION:
        raise RequestError(
            "OCIGPU-REQ-4", f"{printable(variable, 120)}: longer than {MAX_EXPRESSION} characters: {quoted(text, 40)}"
        )
    groups = []
    for group_text in text.split(" "):
        rules = tuple(_parse_rule(rule_text, variable) for rule_text in group_text.split(",") if rule_text)
        if rules:  # a group of commas only must not count as an alternative that always holds
            groups.append(rules)
    return tuple(groups)


def _parse_rule(text: str, variable: str) -> Rule:
    start = min((at for at in map(text.find, "<>=!") if at >= 0), default=len(text))
    end = start
    while end < len(text) and text[end] in "<>=!":
        end += 1
    name, operator, value = text[:start].lower(), text[start:end], text[end:]
    if not operator:
        problem = "has no operator" + (", or spaces around it" if name in MEANINGS else "")
    elif name not in MEANINGS:
        problem = "names are cuda, driver, arch and brand"
    elif operator not in OPERATORS:
        problem = f"operators are {' '.join(OPERATORS)}"
    elif name == "brand" and operator not in ("=", "!="):
        problem = "a brand is compared with = or != only"
    elif not value:
        problem = "has no value"
    elif name == "brand" and not value.isprintable():
        problem = "not a brand"
    elif name != "brand" and _version(value) is None:
        problem = "versions are numbers joined by dots"
    else:
        return Rule(name, operator, value)
    raise RequestError("OCIGPU-REQ-4", f"{printable(variable, 120)}: {quoted(text)}: {problem}")


def check_requirements(requirements: tuple[tuple[str, str], ...], facts: HostFacts, gpus: tuple[Gpu, ...]) -> None:
    """Check that every (variable, expression) holds for every GPU given (for a MIG device: its parent).

    Without a GPU everything is checked once, with rules on ``arch`` and ``brand`` taken as satisfied.
    Raises RequestError: OCIGPU-REQ-3 "needs X, have Y on GPU Z" for the first one that does not hold, OCIGPU-REQ-4
    for an expression that cannot be understood.
    """
    if not requirements:
        return
    different: dict[tuple[str, str], Gpu] = {}
    for gpu in gpus:  # a host has many GPUs but few kinds: this limits the work that an image can cause
        different.setdefault((gpu.architecture, gpu.brand), gpu)
    candidates: tuple[Gpu | None, ...] = tuple(different.values()) or (None,)
    parsed = [(variable, parse_requirement(text, variable)) for variable, text in requirements]
    for gpu_or_none in candidates:
        actual = _actual_values(facts, gpu_or_none)
        for variable, groups in parsed:
            if groups and not any(all(_holds(rule, actual) for rule in group) for group in groups):
                raise _unsatisfied(variable, groups, actual, facts, gpu_or_none)


def _actual_values(facts: HostFacts, gpu: Gpu | None) -> dict[str, str]:
    """Return the host's values, "" for unknown ones; ``arch`` and ``brand`` are missing without a GPU."""
    actual = {"cuda": facts.cuda_version, "driver": facts.driver_version}
    if gpu is not None:
        actual["arch"] = gpu.architecture
        actual["brand"] = gpu.brand
    return {
        name: "" if name != "brand" and _version(value) is None else value  # what cannot be compared is not known
        for name, value in actual.items()
    }


def _holds(rule: Rule, actual: dict[str, str]) -> bool:
    have = actual.get(rule.name)
    if have is None:
        return True
    if not have:
        return False
    if rule.name == "brand":
        return (_plain_brand(have) == _plain_brand(rule.value)) == (rule.operator == "=")
    left, right = _version(have), _version(rule.value)
    assert left is not None
    assert right is not None
    order = (left > right) - (left < right)
    return {
        "=": order == 0,
        "!=": order != 0,
        "<": order < 0,
        "<=": order <= 0,
        ">": order > 0,
        ">=": order >= 0,
    }[rule.operator]


def _plain_brand(text: str) -> str:
    """Return the brand for comparison: "Quadro RTX" and "quadrortx" are the same."""
    return "".join(c for c in text.lower() if c not in " -_")


def _version(text: str) -> tuple[tuple[int, str], ...] | None:
    """Return a key that orders versions by their components, or None if this is not a version.

    Numbers are kept as digits with their length: an image may write thousands of them, and ``int`` refuses those.
    """
    if not text.isascii():
        return None
    parts = text.split(".")
    if not all(map(str.isdigit, parts)):
        return None
    key = [(len(digits), digits) for digits in (part.lstrip("0") for part in parts)]
    while key and key[-1] == (0, ""):  # 12.0 is 12
        key.pop()
    return tuple(key)


def _unsatisfied(
    variable: str, groups: "tuple[Group, ...]", actual: dict[str, str], facts: HostFacts, gpu: Gpu | None
) -> RequestError:
    needs = f"{printable(variable, 120)}: needs {_describe(groups)}"
    where = f" on GPU {gpu.index}" if gpu is not None else ""
    # What decides is unknown only if some alternative fails for no other reason.
    for group in groups:
        failing = [rule for rule in group if not _holds(rule, actual)]
        if failing and all(actual[rule.name] == "" for rule in failing):
            name = failing[0].name
            owner = f"the {MEANINGS[name]} of GPU {gpu.index}" if gpu and name in ("arch", "brand") else ""
            owner = owner or f"the host's {MEANINGS[name]}"
            why = f": {facts.notes[0]}" if facts.notes else ""
            return RequestError(
                "OCIGPU-REQ-3",
                f"{needs}, but {owner} is unknown{why}",
                "Make it known (see: ocigpu list), or set NVIDIA_DISABLE_REQUIRE=1 to start anyway.",
            )
    have = ", ".join(f"{name} {value or 'unknown'}" for name, value in actual.items())
    return RequestError("OCIGPU-REQ-3", f"{needs}; have {have}{where}")


def _describe(groups: "tuple[Group, ...]") -> str:
    """Return the alternatives as readable text of bounded length, escaped."""
    shown: list[str] = []
    length = 0
    for group in groups[:_SHOWN_ALTERNATIVES]:
        text = printable(",".join(rule.text() for rule in group), _SHOWN_LENGTH)
        length += len(text)
        if shown and length > _SHOWN_LENGTH:
            break
        shown.append(text)
    left_out = len(groups) - len(shown)
    return " or ".join(shown) + (f" or one of {left_out} more" if left_out else "")
