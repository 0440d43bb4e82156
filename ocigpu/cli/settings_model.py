"""The settings file as a pydantic model: for ``ocigpu config check``, which names every problem at once.

The hot path reads the same file with :func:`ocigpu.core.settings.parse_settings`, which stops at the first problem and
needs the standard library only.  A test holds both to the same answers.
"""

import difflib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, StrictBool, StrictStr, ValidationError, create_model

from ocigpu.core.cdi_names import check_kind
from ocigpu.core.errors import quoted
from ocigpu.core.settings import CAPABILITIES, KEYS


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("has a NUL character")
    return value


def _absolute(value: str) -> str:
    if value and not value.startswith("/"):
        raise ValueError(f"{quoted(value)} is not an absolute path")
    return value


def _host_path(value: str) -> str:
    # "@" is the vendor's mark for "a path of the host", which it always is here.
    return _absolute(value.removeprefix("@"))


def _capability_list(value: str) -> str:
    if value != "all":
        for item in filter(None, (part.strip() for part in value.split(","))):
            if item not in CAPABILITIES:
                raise ValueError(f"{quoted(item)} is not one of {', '.join(CAPABILITIES)}")
    return value


def _kind(value: str) -> str:
    problem = check_kind(value)
    if problem:
        raise ValueError(f"{quoted(value)}: {problem}")
    return value


def _not_empty(value: str) -> str:
    if not value:
        raise ValueError("is empty")
    return value


Text = Annotated[StrictStr, AfterValidator(_no_nul)]
AbsolutePath = Annotated[Text, AfterValidator(_absolute)]
Name = Annotated[StrictStr, AfterValidator(_not_empty)]
DirectoryPath = Annotated[Name, AfterValidator(_no_nul), AfterValidator(_absolute)]
KINDS = {"bool": StrictBool, "string": Text, "path": AbsolutePath, "list": list[Name], "paths": list[DirectoryPath]}
SPECIAL = {
    "ldconfig": Annotated[Text, AfterValidator(_host_path)],
    "supported-driver-capabilities": Annotated[Text, AfterValidator(_capability_list)],
    "cdi.default-kind": Annotated[Text, AfterValidator(_kind)],
}


class Table(BaseModel):
    """A table of the file: keys in kebab case, nothing unknown, nothing converted."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, strict=True, alias_generator=lambda name: name.replace("_", "-")
    )


def _make_model() -> type[Table]:
    """Return the model of the whole file, made of the table of keys."""
    tables: dict[str, dict[str, Any]] = {"": {}}
    for key in KEYS:
        kind: Any = Literal[key.choices] if key.choices else SPECIAL.get(key.name, KINDS[key.kind])
        table, _, name = key.name.rpartition(".")
        fields = tables.setdefault(table, {})
        fields[name.replace("-", "_")] = (kind, list(key.default) if isinstance(key.default, tuple) else key.default)
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
        near = difflib.get_close_matches(name, [key.name for key in KEYS], 1, 0.5)
        return f"unknown key {quoted(name)}" + (f": did you mean {near[0]}?" if near else "")
    message = str(details["msg"]).removeprefix("Value error, ")
    return f"{name}: {message[:1].lower()}{message[1:]}"
