"""Turns pydantic's error records into one sentence about a deployment file. Pure functions."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    Path: "a path",
    tuple[str, ...]: "a list of strings",
}


def sentence(err: ValidationError, root: type[BaseModel], source: str) -> str:
    """Describes the first mistake in the file ``source`` and counts the others."""
    records = [
        record
        for record in err.errors(include_url=False)
        if record["type"] != "default_factory_not_called"  # a consequence of another mistake
    ]
    unknown = [record for record in records if record["type"] == "extra_forbidden"]
    # A misspelt key is also a missing one: report the misspelling only.
    guesses = {_guess(root, record["loc"]) for record in unknown}
    others = [
        record
        for record in records
        if record["type"] != "extra_forbidden"
        and not (record["type"] == "missing" and record["loc"] in guesses)
    ]
    first = (unknown + others)[0]
    places = {_known_place(root, record["loc"]) for record in unknown + others}
    more = len(places) - 1
    rest = f" ({more} more mistake{'s' if more > 1 else ''} in the file)" if more else ""
    return _describe(first, root, source) + rest


def _describe(record: Mapping[str, Any], root: type[BaseModel], source: str) -> str:
    loc, kind = record["loc"], record["type"]
    if kind == "extra_forbidden":
        return _unknown_key(root, loc, source)
    place = _path(_known_place(root, loc))
    if kind == "missing":
        return f"{place} is missing in {source}; add the line {place}: VALUE"
    if kind == "value_error" and not _field(root, loc):
        # A rule over several keys of one section: the message names the keys.
        where = f"{place}." if place else ""
        return f"{where}{record['ctx']['error']} (in {source})"
    return f"{place} in {source} is {_shown(record['input'])}; it must be {_allowed(record, root)}"


def _unknown_key(root: type[BaseModel], loc: tuple[Any, ...], source: str) -> str:
    guess = _guess(root, loc)
    hint = f"did you mean {guess[-1]}?" if guess else _elsewhere(root, loc)
    return f"unknown key {_path(loc)} in {source}; {hint}"


def _path(loc: tuple[Any, ...]) -> str:
    """("hosts", 0, "name") as hosts[0].name."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".")


def _section(root: type[BaseModel], names: tuple[Any, ...]) -> type[BaseModel]:
    model = root
    for name in names:
        if isinstance(name, str):  # a number is the place in a list of sections
            model = subsection(model.model_fields[name]) or model
    return model


def _guess(root: type[BaseModel], loc: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Location of the valid key that is most similar to the unknown one at ``loc``."""
    names = list(_section(root, loc[:-1]).model_fields)
    close = difflib.get_close_matches(str(loc[-1]), names, n=1, cutoff=0.6)
    return (*loc[:-1], close[0]) if close else None


def _elsewhere(root: type[BaseModel], loc: tuple[Any, ...]) -> str:
    """Hint for a key that belongs to another section, else the list of valid keys."""
    for name, field in root.model_fields.items():
        section = subsection(field)
        if section is not None and loc[-1] in section.model_fields:
            return f"did you mean {name}.{loc[-1]}?"
    return f"valid keys here are {', '.join(_section(root, loc[:-1]).model_fields)}"


def subsection(field: FieldInfo | None) -> type[BaseModel] | None:
    """The pydantic model of a field that is a section or a list of sections; None for a plain
    value."""
    kind = field.annotation if field is not None else None
    kinds = (kind, *get_args(kind))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def is_list(field: FieldInfo | None) -> bool:
    """Whether the value of a field is a list."""
    return field is not None and get_origin(field.annotation) is tuple


def _walk(root: type[BaseModel], loc: tuple[Any, ...]) -> tuple[int, FieldInfo | None]:
    """Returns (number of parts of ``loc`` that name keys of the file, field of the last key).

    Further parts of ``loc`` are pydantic's path inside a value. The field is None for a section or
    an unknown key.
    """
    model = root
    for depth, part in enumerate(loc, start=1):
        if isinstance(part, int):  # the place in a list of sections
            continue
        field = model.model_fields.get(part) if isinstance(part, str) else None
        section = subsection(field)
        if section is None:
            return depth, field
        model = section
    return len(loc), None


def _field(root: type[BaseModel], loc: tuple[Any, ...]) -> FieldInfo | None:
    return _walk(root, loc)[1]


def _known_place(root: type[BaseModel], loc: tuple[Any, ...]) -> tuple[Any, ...]:
    return loc[: _walk(root, loc)[0]]


def _allowed(record: Mapping[str, Any], root: type[BaseModel]) -> str:
    field = _field(root, record["loc"])
    if field is not None and field.description:
        return field.description
    if record["type"] == "value_error":
        return str(record["ctx"]["error"]).removeprefix("must be ")
    if record["type"] == "literal_error":
        return str(record["ctx"]["expected"]).replace("'", "")
    if field is not None and field.annotation in _KINDS:
        return _KINDS[field.annotation] + _bounds(field)
    if record["type"].startswith("model"):
        return "a section with keys of its own"
    if record["type"] == "tuple_type":
        return "a list"
    return str(record["msg"])[:1].lower() + str(record["msg"])[1:]


def _bounds(field: FieldInfo | None) -> str:
    limits: dict[str, Any] = {}
    for rule in field.metadata if field is not None else ():
        if isinstance(rule, Ge):
            limits["ge"] = rule.ge
        elif isinstance(rule, Gt):
            limits["gt"] = rule.gt
        elif isinstance(rule, Le):
            limits["le"] = rule.le
    if "ge" in limits and "le" in limits:
        return f" from {limits['ge']} to {limits['le']}"
    if "ge" in limits:
        return f" of at least {limits['ge']}"
    return f" above {limits['gt']}" if "gt" in limits else ""


def _shown(value: Any) -> str:
    """The value as written in the file, cut at 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
