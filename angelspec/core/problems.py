"""What is wrong with a document, in words that name the key, what it holds, what is allowed and what was meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from angelspec.core.errors import suggest


def problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line for each problem that validating a document against ``model`` found."""
    return [_explain(item, model) for item in error.errors()]


def _explain(item: Mapping[str, Any], model: type[BaseModel]) -> str:
    location = tuple(part for part in item["loc"] if not (isinstance(part, str) and part.startswith("function-")))
    key = _shown(location)
    kind, context, given = item["type"], item.get("ctx") or {}, item.get("input")
    if kind == "extra_forbidden":
        allowed = _fields_at(model, location[:-1])
        return f"{key}: unknown key{suggest(str(location[-1]), allowed)}; allowed: {', '.join(allowed)}"
    if kind == "missing":
        return f"{key}: is required"
    if kind == "literal_error":
        allowed = [part.strip("' ") for part in context["expected"].replace(" or ", ",").split(",")]
        return f"{key}: {given!r} is not allowed{suggest(str(given), allowed)}; allowed: {', '.join(allowed)}"
    shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool | NoneType) else ""
    return (
        f"{key}: {item['msg'].removeprefix('Value error, ')}{shown}"
        if key
        else item["msg"].removeprefix("Value error, ")
    )


def _shown(location: Sequence[Any]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _fields_at(model: type[BaseModel], location: Sequence[Any]) -> list[str]:
    current: type[BaseModel] | None = model
    for part in location:
        if current is None or isinstance(part, int):
            continue
        field = current.model_fields.get(part)
        if field is not None:  # otherwise the part is a key of a mapping, whose values are of the model at hand
            current = _model_in(field.annotation)
    return list(current.model_fields) if current is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is Literal:
        return None
    found = (_model_in(argument) for argument in get_args(annotation))
    return next((model for model in found if model is not None), None)
