"""Quantities of Kubernetes (apimachinery, api/resource): numbers with units."""

import re
from decimal import Decimal
from typing import Any

_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(n|u|m|k|Ki|[MGTPE]i?|[eE][+-]?[0-9]+)?")
_POWERS = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
MAX_LENGTH = 256
"""Characters of a quantity that is read: an API server keeps what it was sent, and anybody may send a claim."""
MOST, LEAST = Decimal((1 << 63) - 1), Decimal("1e-9")
"""Limits of a quantity; more counts as MOST, and what is neither 0 nor LEAST counts as LEAST (ParseQuantity)."""
_EXPONENT = 1000
"""A larger one leads beyond the limits, whatever the number is, and takes long to compute."""


def parse_quantity(text: Any) -> Decimal | None:
    """Return the number of a quantity ("80Gi", "1500m"), None for an invalid one (apimachinery api/resource).

    Its magnitude is within the limits of Kubernetes, so its integer value stays small.
    """
    found = _QUANTITY.fullmatch(text if isinstance(text, str) else str(text)[: MAX_LENGTH + 1])
    if not found or len(found[0]) > MAX_LENGTH:
        return None
    unit = found[2] or ""
    number = Decimal(found[1])
    if unit[:1] in ("e", "E") and len(unit) > 1 and unit != "Ei":
        exponent = int(unit[1:])
        if not -(1 << 31) <= exponent < 1 << 31:
            return None
        number = number.scaleb(max(-_EXPONENT, min(exponent, _EXPONENT)))
    else:
        number *= Decimal(1024 if unit.endswith("i") else 1000) ** _POWERS[unit.removesuffix("i")]
    return max(min(abs(number), MOST), LEAST).copy_sign(number) if number else Decimal(0)
