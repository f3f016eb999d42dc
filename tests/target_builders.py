"""Tiny real targets, made once per process in a cache of their own."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import torch

from angelspec.core.recipe import TargetSection
from angelspec.targets.target import Target, load_target

FAMILIES = ("llama", "qwen3", "hy3")
MODE_FAMILIES = {"llama": "smollm2", "qwen3": "qwen3", "hy3": "hy3"}


@functools.cache
def tiny_cache() -> Path:
    """A cache folder that goes with the process."""
    holder = tempfile.TemporaryDirectory(prefix="angelspec-tests-")
    _HOLDERS.append(holder)
    return Path(holder.name)


_HOLDERS: list = []


def tiny_section(family: str) -> TargetSection:
    """The recipe section of a tiny target."""
    return TargetSection(source=f"random:{family}", mode_family=MODE_FAMILIES[family])


@functools.cache
def tiny_target(family: str, dtype: torch.dtype = torch.float32) -> Target:
    """A tiny target of a family; shared, so leave it as it is."""
    return fresh_target(family, dtype)


def fresh_target(family: str, dtype: torch.dtype = torch.float32, **changes) -> Target:
    """As ``tiny_target``, but the caller's own to break."""
    before = os.environ.get("ANGELSPEC_CACHE")
    os.environ["ANGELSPEC_CACHE"] = str(tiny_cache())
    try:
        return load_target(tiny_section(family).model_copy(update=changes), dtype=dtype)
    finally:
        if before is None:
            del os.environ["ANGELSPEC_CACHE"]
        else:
            os.environ["ANGELSPEC_CACHE"] = before


def user(text: str) -> list[dict[str, str]]:
    """One user turn."""
    return [{"role": "user", "content": text}]
