"""Small immutable records without the cost of importing ``typing``, ``dataclasses`` or ``collections``.

A module on the hot path imports NamedTuple from here and declares records as usual, and so does one that ``ocigpu ps``
loads.  Type checkers see ``typing.NamedTuple``; at run time the class below makes a subclass of tuple from the
annotations, with what this project uses of a named tuple.  ``typing`` alone costs about 4 ms of every container start;
``collections`` 1.5, and its namedtuple compiles a function for each record.
"""

from _collections import _tuplegetter  # type: ignore[import-not-found]  # what collections.namedtuple uses: a field read in C

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

__all__ = ["NamedTuple"]


class _Record(tuple):  # type: ignore[type-arg] # its parameter would load typing
    __slots__ = ()
    _fields: tuple[str, ...] = ()
    _field_defaults: "dict[str, Any]" = {}

    def __new__(cls, *values: "Any", **named: "Any") -> "Any":
        if named or len(values) != len(cls._fields):
            values = cls._complete(values, named)
        return tuple.__new__(cls, values)

    @classmethod
    def _complete(cls, values: "tuple[Any, ...]", named: "dict[str, Any]") -> "tuple[Any, ...]":
        """Return a value for every field; raises TypeError for too many, unknown, repeated or missing ones."""
        if len(values) > len(cls._fields):
            raise TypeError(f"{cls.__name__}: {len(values)} values for {len(cls._fields)} fields")
        rest = cls._fields[len(values) :]
        if unknown := named.keys() - rest:
            raise TypeError(f"{cls.__name__}: unknown or repeated fields {', '.join(sorted(unknown))}")
        known = {**cls._field_defaults, **named}
        try:
            return (*values, *map(known.__getitem__, rest))
        except KeyError as error:
            raise TypeError(f"{cls.__name__}: missing field {error}") from None

    @classmethod
    def _make(cls, values: "Iterable[Any]") -> "Any":
        return cls(*values)

    def _replace(self, **named: "Any") -> "Any":
        values = [*map(named.pop, self._fields, self)]
        return type(self)(*values, **named)  # the rest of ``named`` are not fields

    def _asdict(self) -> "dict[str, Any]":
        return dict(zip(self._fields, self, strict=True))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
        return f"{type(self).__name__}({fields})"

    def __getnewargs__(self) -> "tuple[Any, ...]":
        return tuple(self)


class NamedTupleMeta(type):
    def __new__(mcs, name, bases, namespace):  # type: ignore[no-untyped-def] # no checker follows what it makes
        if not bases:
            return super().__new__(mcs, name, bases, namespace)
        annotations = namespace.get("__annotations__")
        if annotations is None:  # Python 3.14 evaluates them on demand: PEP 649 and 749, annotationlib
            annotate = namespace.get("__annotate_func__")
            annotations = annotate(1) if annotate else {}  # annotationlib.Format.VALUE
        fields = tuple(annotations)
        defaults = {field: namespace[field] for field in fields if field in namespace}
        getters = {field: _tuplegetter(number, "") for number, field in enumerate(fields)}
        more = {"__slots__": (), "_fields": fields, "_field_defaults": defaults, "__match_args__": fields}
        return type(name, (_Record,), {**namespace, **getters, **more})


if TYPE_CHECKING:
    from typing import NamedTuple
else:

    class NamedTuple(metaclass=NamedTupleMeta):
        """Base class: what is declared as a subclass becomes a record, its methods kept."""
