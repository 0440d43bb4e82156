"""The settings file as a pydantic model, which tests hold the product's reader to."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, StrictBool, StrictStr, ValidationError, create_model

from ocigpu.core.settings import KEYS, Key, find_problem


def _not_empty(value: str) -> str:
    if not value:
        raise ValueError("is empty")
    return value


def _type_of(key: Key) -> Any:
    """Return the type of a key's value; what its texts may be is for :func:`ocigpu.core.settings.find_problem`."""

    def check(value: str) -> str:
        if "\0" in value:
            raise ValueError("contains a NUL character")
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


def refused_keys(document: dict[str, Any]) -> set[str]:
    """Return the keys of a parsed settings file that the model refuses."""
    try:
        SettingsFile.model_validate(document)
    except ValidationError as error:
        return {repr([part for part in each["loc"] if isinstance(part, str)]) for each in error.errors()}
    return set()
