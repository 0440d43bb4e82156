"""The settings file as a pydantic model: for ``ocigpu config check``, which names every problem at once.

The hot path reads the same file with :func:`ocigpu.core.settings.parse_settings`, which stops at the first problem and
needs the standard library only.  A test holds both to the same answers.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, StrictBool, StrictStr, ValidationError, create_model

from ocigpu.core.errors import quoted
from ocigpu.core.settings import KEYS, Key, find_problem, suggest_key


def _not_empty(value: str) -> str:
    if not value:
        raise ValueError("is empty")
    return value


def _type_of(key: Key) -> Any:
    """Return the type of a key's value; what its texts may be is for :func:`ocigpu.core.settings.find_problem`."""

    def check(value: str) -> str:
        if "\0" in value:
            raise ValueError("has a NUL character")
        # "@" is the vendor's mark for "a path of the host", which it always is here.
        value = value.removeprefix("@") if key.name == "ldconfig" else value
        if problem := find_problem(key, value):
            raise ValueError(problem)
        return value

    if key.kind == "bool":
        return StrictBool
    if key.choices:
        return Literal[key.choices]
    if key.kind == "list":
        return list[Annotated[StrictStr, AfterValidator(_not_empty)]]
    if key.kind == "paths":
        return list[Annotated[StrictStr, AfterValidator(_not_empty), AfterValidator(check)]]
    return Annotated[StrictStr, AfterValidator(check)]


class Table(BaseModel):
    """A table of the file: keys in kebab case, nothing unknown, nothing converted."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, strict=True, alias_generator=lambda name: name.replace("_", "-")
    )


def _make_model() -> type[Table]:
    """Return the model of the whole file, made of the table of keys."""
    tables: dict[str, dict[str, Any]] = {"": {}}
    for key in KEYS:
        table, _, name = key.name.rpartition(".")
        fields = tables.setdefault(table, {})
        fields[name.replace("-", "_")] = (
            _type_of(key),
            list(key.default) if isinstance(key.default, tuple) else key.default,
        )
    whole = tables.pop("")
    for name, fields in tables.items():
        model = create_model(f"{name.title()}Table", __base__=Table, **fields)
        whole[name] = (model, model())
    return create_model("SettingsFile", __base__=Table, **whole)


SettingsFile = _make_model()


def find_problems(document: dict[str, Any]) -> list[str]:
    """Return what is wrong with a parsed settings file, one sentence for each key; empty when nothing is."""
    try:
        SettingsFile.model_validate(document)
    except ValidationError as error:
        return [_problem(details) for details in error.errors(include_url=False)]
    return []


def _problem(details: Any) -> str:
    name = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        return f"unknown key {quoted(name)}: {suggest_key(name)}"
    message = str(details["msg"]).removeprefix("Value error, ")
    return f"{name}: {message[:1].lower()}{message[1:]}"
