"""What we expect of an internal of SGLang, and the one check of it. Nothing is imported before :func:`troubles`."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Internal:
    """One name of SGLang that we replace, override, subclass, call or read."""

    path: str
    """Dotted path, or ``module:qualified name``."""
    parameters: tuple[str, ...] | None = None
    """All of its parameters in order, where we replace or override it; None: ``takes`` alone matters."""
    takes: tuple[str, ...] = ()
    """Parameters that it must have, where we call it or put something around it."""
    fields: tuple[str, ...] = ()
    """Fields of a dataclass or struct that we read."""


def troubles(internals: Iterable[Internal]) -> list[str]:
    """One clause for every name that is gone or is not as we were written for; empty if all is well."""
    return [trouble for internal in internals if (trouble := _trouble(internal)) is not None]


def _trouble(internal: Internal) -> str | None:
    try:
        found = pkgutil.resolve_name(internal.path)
    except (ImportError, AttributeError):
        return f"{internal.path} is gone"
    present = getattr(found, "__dataclass_fields__", None) or getattr(found, "__annotations__", {})
    if absent := [name for name in internal.fields if name not in present]:
        return f"{internal.path} has no {', '.join(absent)}"
    if internal.parameters is None and not internal.takes:
        return None
    parameters = tuple(inspect.signature(inspect.unwrap(found)).parameters)
    if absent := [name for name in internal.takes if name not in parameters]:
        return f"{internal.path} has no parameter {', '.join(absent)}"
    if internal.parameters not in (None, parameters):
        return f"{internal.path}({', '.join(parameters)}) should be ({', '.join(internal.parameters or ())})"
    return None
