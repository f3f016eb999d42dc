"""A comparison: variants of one recipe, each trained with several seeds, and what is expected to beat what.

One YAML file, found like a recipe's (``recipes/comparisons/NAME.yaml``); every variant is the base recipe with
``set`` overrides, so a comparison has no vocabulary of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from angelspec.core.errors import RecipeError, suggest
from angelspec.core.locations import resource_folder
from angelspec.core.modes import Mode
from angelspec.core.problems import problems
from angelspec.core.recipe import Recipe
from angelspec.core.recipe_files import load_recipe
from angelspec.core.workloads import Workload
from angelspec.core.yaml_text import YamlError, parse_yaml

_STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Ordering(BaseModel):
    """An expectation: one variant has the longer accepted length than another."""

    model_config = _STRICT

    claim: str
    """In words, as the report prints it."""
    better: str
    """A variant."""
    worse: str
    """Another variant."""
    mode: Mode | None = None
    """Thinking mode of the prompts; None: the base recipe's."""
    workloads: tuple[Workload, ...] = ()
    """Prompts that count; none: all."""


class Comparison(BaseModel):
    """Variants of a recipe, their seeds, and orderings among them."""

    model_config = _STRICT

    name: str
    description: str = ""
    base: str
    """The recipe that all variants change."""
    preset: str | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    """Overrides of every variant, ``section.field: value``."""
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1)
    """Values of ``training.seed``: weights, row order and anchors."""
    modes: tuple[Mode, ...] = ()
    """Thinking modes whose prompts are answered: the base recipe's by every variant, another one by the variants of its
    orderings (by all, if it has none). None named: the base recipe's."""
    variants: dict[str, dict[str, Any]] = Field(min_length=1)
    """Overrides by variant."""
    orderings: tuple[Ordering, ...] = ()

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"seeds repeat: {list(value)}")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        for ordering in self.orderings:
            for name in (ordering.better, ordering.worse):
                if name not in self.variants:
                    raise ValueError(
                        f"ordering '{ordering.claim}' names no variant: '{name}'{suggest(name, self.variants)}; "
                        f"variants: {', '.join(self.variants)}"
                    )
            if self.modes and ordering.mode is not None and ordering.mode not in self.modes:
                raise ValueError(f"ordering '{ordering.claim}' needs mode {ordering.mode}, which modes leaves out")
        return self

    def variants_in(self, mode: Mode) -> set[str]:
        """Variants that the orderings of a mode name; all of them, if it has none."""
        named = {name for item in self.orderings if item.mode == mode for name in (item.better, item.worse)}
        return named or set(self.variants)

    def runs(self) -> Iterator[tuple[str, int, Recipe]]:
        """Every variant and seed with its resolved recipe.

        Raises:
            RecipeError: an override is wrong; or a variant changes the target, which nothing compared may.
        """
        target = None
        for variant, changes in self.variants.items():
            for seed in self.seeds:
                recipe = self._recipe(variant, changes, seed)
                target = target or recipe.target
                if recipe.target != target:
                    raise RecipeError(
                        f"comparison '{self.name}': variant '{variant}' has another target",
                        mend="compare drafters of one target; leave target.* out of the variants",
                    )
                yield variant, seed, recipe

    def with_overrides(self, overrides: Sequence[str]) -> Comparison:
        """The comparison with more ``section.field=value`` overrides of every variant.

        Raises:
            RecipeError: an override is not of that form.
        """
        values = dict(self.set)
        for override in overrides:
            key, separator, text = override.partition("=")
            if not separator:
                raise RecipeError(f"override '{override}' is not of the form section.field=value")
            try:
                values[key.strip()] = parse_yaml(text)
            except YamlError as error:
                raise RecipeError(f"override '{override}': the value is no YAML ({error})") from None
        return self.model_copy(update={"set": values})

    def _recipe(self, variant: str, changes: Mapping[str, Any], seed: int) -> Recipe:
        values = {**self.set, **changes, "training.seed": seed}
        overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        try:
            return load_recipe(self.base, preset=self.preset, overrides=overrides)
        except RecipeError as error:
            raise RecipeError(f"comparison '{self.name}', variant '{variant}': {error}") from error


def comparison_names() -> list[str]:
    """The shipped comparisons."""
    return sorted(path.stem for path in (resource_folder("recipes") / "comparisons").glob("*.yaml"))


def load_comparison(name_or_path: str) -> Comparison:
    """Read a shipped comparison by name, or a YAML file.

    Raises:
        RecipeError: not found, not YAML, or wrong; naming the key.
    """
    if name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    else:
        path = resource_folder("recipes") / "comparisons" / f"{name_or_path}.yaml"
    if not path.is_file():
        names = comparison_names()
        raise RecipeError(
            f"unknown comparison '{name_or_path}'{suggest(name_or_path, names)}",
            mend=f"use one of {', '.join(names)}, or give a path that ends in .yaml",
        )
    try:
        document = parse_yaml(path.read_text(encoding="utf-8-sig"))
    except (YamlError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path.name}: not readable as YAML: {error}") from None
    try:
        return Comparison.model_validate(document)
    except ValidationError as error:
        lines = problems(error, Comparison, whole="comparison")
        raise RecipeError(f"{path}:\n" + "\n".join(f"  - {line}" for line in lines)) from None
