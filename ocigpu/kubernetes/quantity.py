"""Quantities of Kubernetes (apimachinery, api/resource): numbers with units."""

import re
from decimal import Decimal
from typing import Any

_QUANTITY = re.compile(r"([+-]?[0-9.]+)(m|k|Ki|[MGTPE]i?|[eE][+-]?[0-9]+)?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def parse_quantity(text: Any) -> Decimal | None:
    """Return the number that a quantity is ("80Gi", "1500m"), None for what is none (apimachinery api/resource)."""
    found = _QUANTITY.fullmatch(str(text))
    if not found:
        return None
    unit = found[2] or ""
    try:
        number = Decimal(found[1])
        if unit[:1] in ("e", "E") and len(unit) > 1 and unit != "Ei":
            return number * Decimal(10) ** int(unit[1:])
        if unit == "m":
            return number / 1000
        return number * Decimal(1024 if unit.endswith("i") else 1000) ** _POWERS[unit.removesuffix("i")]
    except (ArithmeticError, ValueError):  # "1.2.3"; an exponent beyond all numbers
        return None
