"""The parameters of a function, read from its signature without the price of ``inspect`` and ``typing``.

Two readers share it: the command line (:mod:`ocigpu.cli.front.arguments`) and requests to the tenants' service
(:mod:`ocigpu.tenants.service.parameters`).  How a text becomes a value differs between the two, and is theirs.
"""

from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

REQUIRED = object()
"""The default of a parameter without a default."""


class SignatureParameter(NamedTuple):
    """A parameter of a function, or a field of a record.

    ``type``: without Annotated, and without None (``int`` of ``Annotated[int | None, ...]``); ``default``: REQUIRED if
    there is none; ``notes``: what Annotated adds to the type.
    """

    name: str
    type: "Any"
    default: "Any"
    notes: "tuple[Any, ...]" = ()


def parameters_in(function: "Callable[..., Any]") -> list[SignatureParameter]:
    """Return the parameters of a function, or the fields of a record, in their order."""
    if names := getattr(function, "_fields", ()):
        known = function._field_defaults  # type: ignore[attr-defined] # of a NamedTuple, as _fields
    else:
        code, defaults = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount]
        known = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    annotations = function.__annotations__
    return [SignatureParameter(name, *_read(annotations[name], known.get(name, REQUIRED))) for name in names]


def _read(annotation: "Any", default: "Any") -> "tuple[Any, Any, tuple[Any, ...]]":
    notes = getattr(annotation, "__metadata__", ())
    found = annotation.__origin__ if notes else annotation
    arguments: "tuple[Any, ...]" = getattr(found, "__args__", ())
    return arguments[0] if type(None) in arguments else found, default, notes
