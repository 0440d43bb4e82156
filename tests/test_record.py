"""Records of the hot path: ocigpu/core/record.py."""

import pytest

from ocigpu.core import record
from ocigpu.core.record import NamedTuple


class Pair(NamedTuple):
    first: int
    second: "str" = "two"


def test_a_record_has_the_fields_and_defaults_of_its_class() -> None:
    assert Pair._fields == ("first", "second")
    assert Pair(1) == (1, "two")
    assert Pair(1)._replace(first=2) == (2, "two")
    assert repr(Pair(1)) == "Pair(first=1, second='two')"
    with pytest.raises(TypeError, match="missing field 'first'"):
        Pair()


def test_fields_are_found_in_the_namespace_that_python_3_14_makes() -> None:
    """PEP 649 and 749: the compiler leaves a function there in the place of the annotations."""
    asked = []

    def annotate(form: int) -> dict[str, type]:
        asked.append(form)
        return {"first": int, "second": str}

    make = record.NamedTupleMeta
    made = make("Made", (NamedTuple,), {"__annotate_func__": annotate, "second": "two"})
    assert (made._fields, made(1), asked) == (("first", "second"), (1, "two"), [1])
