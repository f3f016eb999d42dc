"""What is wrong with a document, in words that name the key, what it holds, what is allowed and what was meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError

from angelspec.core.errors import suggest


def problems(
    error: ValidationError,
    model: type[BaseModel],
    *,
    whole: str = "",
    under: Sequence[str | int] = (),
    allowed: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[str]:
    """One line for each problem that validating a document against ``model`` found.

    Args:
        whole: what a problem of the document as such is called; empty: nothing.
        under: the keys under which the document stands in the file that the reader knows.
        allowed: by key, what it may hold, where the section that was read knows a part of it alone.
    """
    lines = []
    for item in error.errors():
        location, holder = _follow(model, item["loc"])
        key = ".".join(map(str, (*under, *location))) or whole
        lines.append(_explain(item, key, location, holder, allowed))
    return lines


def _explain(
    item: Mapping[str, Any],
    key: str,
    location: Sequence[Any],
    holder: type[BaseModel] | None,
    known: Mapping[str, Sequence[str]],
) -> str:
    kind, context, given = item["type"], item.get("ctx") or {}, item.get("input")
    if kind == "extra_forbidden":
        allowed = list(holder.model_fields) if holder is not None else []
        return f"{key}: unknown key{suggest(str(location[-1]), allowed)}; allowed: {', '.join(allowed)}"
    if kind == "missing":
        return f"{key}: is required"
    if kind == "literal_error":
        told = [part.strip("' ") for part in context["expected"].replace(" or ", ",").split(",")]
        allowed = known.get(key, told)
        return f"{key}: {given!r} is not allowed{suggest(str(given), allowed)}; allowed: {', '.join(allowed)}"
    shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool | NoneType) else ""
    message = item["msg"].removeprefix("Value error, ")
    return f"{key}: {message}{shown}" if key else message


def _follow(model: type[BaseModel], location: Sequence[Any]) -> tuple[tuple[Any, ...], type[BaseModel] | None]:
    """The keys of a location as a person wrote them, and the model that holds the last one.

    Where a key may hold one of several sections pydantic names the kind that it read, which is no key.
    """
    kinds: list[tuple[str, type[BaseModel]]] = [("", model)]
    keys: list[Any] = []
    holder: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, str) and part.startswith("function-"):
            continue
        read = [(kind, one) for kind, one in kinds if len(kinds) > 1 and kind == part]
        if read:
            kinds = read
            continue
        keys.append(part)
        holder = kinds[0][1] if kinds else None
        field = holder.model_fields.get(part) if holder is not None and isinstance(part, str) else None
        if field is not None:  # otherwise it is a place in a list or mapping, whose values are of the model at hand
            kinds = _kinds_in(field.annotation)
    return tuple(keys), holder


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that an annotation names, in order, inside unions, tuples and Annotated."""
    return [model for _, model in _kinds_in(annotation)]


def _kinds_in(annotation: Any, tag: str = "") -> list[tuple[str, type[BaseModel]]]:
    """The same with the tag of each, by which pydantic names it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(tag, annotation)]
    if get_origin(annotation) is Literal:
        return []
    parts = get_args(annotation)
    tag = next((part.tag for part in parts if isinstance(part, Tag)), tag)
    return [found for part in parts for found in _kinds_in(part, tag)]
