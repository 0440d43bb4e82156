"""Small immutable records without the cost of importing ``typing`` or ``dataclasses``.

A module on the hot path writes::

    TYPE_CHECKING = False
    if TYPE_CHECKING:
        from typing import NamedTuple
    else:
        from ocigpu.record import NamedTuple

and then declares records as usual.  Type checkers see ``typing.NamedTuple``; at run time the class below
builds the same thing from the annotations (``typing`` alone costs about 4 ms of every container start).
"""

from collections import namedtuple


class _NamedTupleMeta(type):
    def __new__(mcs, name, bases, namespace):  # type: ignore[no-untyped-def]
        if not bases:
            return super().__new__(mcs, name, bases, namespace)
        fields = tuple(namespace.get("__annotations__", ()))
        defaults = [namespace[field] for field in fields if field in namespace]
        record = namedtuple(name, fields, defaults=defaults, module=namespace["__module__"])  # type: ignore[misc]
        for key, value in namespace.items():
            if key not in fields and key not in ("__qualname__", "__module__", "__dict__", "__weakref__"):
                setattr(record, key, value)
        return record


class NamedTuple(metaclass=_NamedTupleMeta):
    """Base class: subclasses become ``collections.namedtuple`` classes with their methods kept."""
