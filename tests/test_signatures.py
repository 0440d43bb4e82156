"""Parameters, read from a function's signature."""

from typing import Annotated, Literal, NamedTuple

import pytest

from ocigpu.core.record import NamedTuple as Record
from ocigpu.core.signatures import REQUIRED, SignatureParameter, parameters_in


def take(
    needed: str,
    plain: int = 1,
    maybe: int | None = None,
    noted: Annotated[float, "seconds", 3] = 2.0,
    both: Annotated[Literal["a", "b"] | None, "a word"] = None,
    many: list[str] | None = None,
) -> int:
    here = needed * plain  # a variable is no parameter
    return here.count(needed)


class Ours(Record):
    needed: str
    given: int = 3


class Theirs(NamedTuple):
    needed: str
    given: int = 3


def test_a_functions_parameters_have_types_defaults_and_notes() -> None:
    assert parameters_in(take) == [
        SignatureParameter("needed", str, REQUIRED),
        SignatureParameter("plain", int, 1),
        SignatureParameter("maybe", int, None),
        SignatureParameter("noted", float, 2.0, ("seconds", 3)),
        SignatureParameter("both", Literal["a", "b"], None, ("a word",)),
        SignatureParameter("many", list[str], None),
    ]


@pytest.mark.parametrize("record", [Ours, Theirs])
def test_a_records_fields_are_parameters(record: type) -> None:
    assert parameters_in(record) == [SignatureParameter("needed", str, REQUIRED), SignatureParameter("given", int, 3)]
