"""Finished parts of a measurement, kept under the fingerprint of everything they depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from angelspec.core.files import read_json, write_json_atomic
from angelspec.core.fingerprint import fingerprint

UNIT_VERSION = 1
"""Raised when the meaning of a stored unit changes."""
_Result = TypeVar("_Result")


def cached(folder: Path | None, unit: Mapping[str, Any], kind: type[_Result], run: Callable[[], _Result]) -> _Result:
    """The stored result of a unit, else that of ``run``, stored.

    Args:
        folder: where units lie as ``<unit>-<fingerprint>.json``; None stores nothing.
        unit: plain data that names everything the result depends on; ``unit["unit"]`` is its kind in a word.
        kind: a pydantic model or a dataclass of plain data, or a list of one.
        run: measures.
    """
    if folder is None:
        return run()
    unit = {"version": UNIT_VERSION, **unit}
    path = folder / f"{unit['unit']}-{fingerprint(unit)}.json"
    adapter = TypeAdapter(kind)
    if path.is_file():
        return adapter.validate_python(read_json(path)["result"])
    result = run()
    write_json_atomic(path, {"unit": unit, "result": adapter.dump_python(result, mode="json")})
    return result
