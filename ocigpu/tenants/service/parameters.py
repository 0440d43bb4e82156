"""Query parameters and headers, from the signatures of handlers: their values in a request, their schemas.

A handler's first parameter is its ApiRequest.  A model among the others is the body; each of the rest is a query
parameter of that name, or the header that its annotation names.  The annotation is pydantic's, and describes it
completely.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from ocigpu.core.errors import quoted
from ocigpu.core.signatures import parameters_in
from ocigpu.tenants.service import models
from ocigpu.tenants.service.lifecycle import read_time
from ocigpu.tenants.service.problems import Refusal

MAX_LIMIT = 200
_OWN_WORDS = "own_words"
"""The type of an error whose message says more than the parameter's description."""


def _read_digits(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _read_switch(text: str) -> bool | None:
    return {"1": True, "true": True, "0": False, "false": False}.get(text)


def _check_time(text: str) -> str:
    if read_time(text) is None:
        raise PydanticCustomError(_OWN_WORDS, "not a time as in RFC 3339")
    return text


class Header(NamedTuple):
    """Annotates a parameter that is a header."""

    name: str


DIGITS = BeforeValidator(_read_digits)
"""Ends the annotation of a number: what stands behind it is in no schema."""
Switch = Annotated[bool, BeforeValidator(_read_switch)]
Time = Annotated[
    str, Field(max_length=1000, json_schema_extra={"format": "date-time"}), AfterValidator(_check_time)
]  # fmt: skip
Limit = Annotated[int, Field(ge=1, le=MAX_LIMIT, description="items of a page"), DIGITS]
Cursor = Annotated[str, Field(max_length=400, description="next_cursor of the page before")]
TenancyName = Annotated[
    str, Field(pattern=models.TENANCY, description="of which; only for admin keys, default: all")
]  # fmt: skip
LastEvent = Annotated[
    str, Header("Last-Event-ID"), Field(max_length=100, description="the stream continues after this one")
]  # fmt: skip
After = Annotated[int, Field(ge=0, le=2**62, description="id of the last event that is known"), DIGITS]


class RequestParameter:
    """A query parameter or header of requests.  ``argument``: of the handler; ``place``: "query" or "header"."""

    def __init__(self, argument: str, kind: Any, default: Any, notes: Sequence[Any]) -> None:
        header = next((note for note in notes if isinstance(note, Header)), None)
        self.argument, self.default = argument, default
        self.name, self.place = (header.name, "header") if header else (argument, "query")
        self._adapter: TypeAdapter[Any] = TypeAdapter(Annotated[(kind, *notes)] if notes else kind)
        self.schema = self._adapter.json_schema()
        self.text: str = self.schema.pop("description", "")
        if default not in (None, ""):
            self.schema["default"] = default

    def convert(self, text: str) -> Any:
        """Return the value that a text means; raises Refusal (parameter_invalid)."""
        try:
            return self._adapter.validate_python(text)
        except ValidationError as error:
            (first, *_) = error.errors(include_url=False, include_input=False)
            why = f"known are {', '.join(self.schema['enum'])}" if "enum" in self.schema else self.text
            why = first["msg"] if first["type"] == _OWN_WORDS else why
            raise Refusal("parameter_invalid", f"{self.name} {quoted(text, 80)}: {why}") from error


class HandlerSignature(NamedTuple):
    """The parts of a handler's signature.

    ``body``: the name of the parameter that takes the body, "" for none; ``takes``: its model; ``gives``: the model of
    the answer.
    """

    parameters: tuple[RequestParameter, ...]
    body: str
    takes: type[BaseModel] | None
    gives: type[BaseModel] | None


@functools.cache
def signature_of(handler: Callable[..., Any]) -> HandlerSignature:
    """Return the parts of a handler's signature."""
    body, takes, parameters = "", None, []
    for name, kind, default, notes in parameters_in(handler)[1:]:
        if _is_model(kind):
            body, takes = name, kind
        else:
            parameters.append(RequestParameter(name, kind, default, notes))
    answer = handler.__annotations__["return"]
    gives = next((one for one in getattr(answer, "__args__", (answer,)) if _is_model(one)), None)
    return HandlerSignature(tuple(parameters), body, takes, gives)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def read_parameters(parameters: Sequence[RequestParameter], request: Request) -> dict[str, Any]:
    """Return a request's values by the handler's arguments, defaults left out; raises Refusal (parameter_invalid)."""
    known = {one.name for one in parameters if one.place == "query"}
    for name in request.query_params:
        if name not in known:
            raise Refusal("parameter_invalid", f"{quoted(name)}: known are {', '.join(sorted(known)) or 'none'}")
        if len(request.query_params.getlist(name)) > 1:
            raise Refusal("parameter_invalid", f"{name}: given twice")
    values = {}
    for one in parameters:
        text = request.query_params.get(one.name) if one.place == "query" else request.headers.get(one.name)
        if text is not None:
            values[one.argument] = one.convert(text)
    return values
