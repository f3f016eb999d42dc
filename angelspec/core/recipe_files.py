"""From a recipe's name, file and overrides to one resolved, checked ``Recipe``. Loads no model and no torch.

Order of precedence, later wins: ``base:`` chain, the file, a preset, ``--set`` overrides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from angelspec.core.errors import AngelspecError, RecipeError, suggest
from angelspec.core.locations import resource_folder
from angelspec.core.recipe import Recipe, drafter_family
from angelspec.core.recipe_resolution import resolve, validate
from angelspec.core.yaml_text import YamlError, parse_yaml

RECIPE_FILE = "recipe.yaml"
"""A resolved recipe, beside what came of it."""
_META_KEYS = ("base", "presets", "abstract")


@dataclass(frozen=True)
class RecipeSummary:
    """One line of ``angelspec recipe list``."""

    name: str
    description: str
    path: Path
    presets: tuple[str, ...]


def list_recipes() -> list[RecipeSummary]:
    """The shipped recipes, by name; files marked ``abstract: true`` exist to be a base and are left out."""
    summaries = []
    for path in sorted(resource_folder("recipes").glob("*.yaml")):
        document = _read_with_bases(path)
        if not document.get("abstract"):
            summaries.append(
                RecipeSummary(
                    document.get("name", path.stem),
                    str(document.get("description", "")),
                    path,
                    tuple(document.get("presets") or ()),
                )
            )
    return summaries


def find_recipe(name_or_path: str) -> Path:
    """The file of a shipped recipe's name, or of a path that ends in .yaml or .yml.

    Raises:
        RecipeError: neither exists.
    """
    if name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
        if not path.is_file():
            raise RecipeError(
                f"recipe file '{path}' does not exist", mend="check the path; it counts from where you are"
            )
        return path
    shipped = resource_folder("recipes") / f"{name_or_path}.yaml"
    if shipped.is_file():
        return shipped
    names = [summary.name for summary in list_recipes()]
    raise RecipeError(
        f"unknown recipe '{name_or_path}'{suggest(name_or_path, names)}",
        mend="see `angelspec recipe list`, or give a path that ends in .yaml",
    )


def load_recipe(name_or_path: str, *, preset: str | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge, validate and resolve a recipe.

    Args:
        name_or_path: a shipped recipe's name or a YAML file.
        preset: a key of the recipe's ``presets``.
        overrides: ``section.field=value`` items, values in YAML; list items by index or by their name.

    Raises:
        RecipeError: anything wrong, naming the key and the allowed values.
    """
    path = find_recipe(name_or_path)
    document = _read_with_bases(path)
    presets = _presets(document, path)
    if preset is not None:
        if preset not in presets:
            raise RecipeError(
                f"recipe '{path.stem}' has no preset '{preset}'{suggest(preset, presets)}",
                mend=f"use one of: {', '.join(presets) or 'none; this recipe has no presets'}",
            )
        document = _merge_recipes(document, presets[preset])
    before, stated = document, set()
    for override in overrides:
        document = apply_override(document, override)
        section, _, rest = override.partition("=")[0].strip().partition(".")
        if section == "drafter":
            whole = document["drafter"]
            stated |= {rest.partition(".")[0]} if rest else set(whole) if isinstance(whole, Mapping) else set()
    document = _drop_other_family(before, document, stated=stated)
    if document.pop("abstract", False):
        raise RecipeError(
            f"'{path.stem}' only serves as a base for other recipes", mend=f"write a recipe with `base: {path.stem}`"
        )
    for key in _META_KEYS:
        document.pop(key, None)
    changed = "".join(f" --set {override}" for override in overrides)
    return resolve(validate(document, where=f"{path}{' with' if changed else ''}{changed}"))


def recipe_text(recipe: Recipe) -> str:
    """A resolved recipe as the file that runs it again."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def run_command(recipe: Recipe) -> str:
    """The command that runs a resolved recipe again: by its name where that is a shipped one, unchanged; else by the
    file that lies beside every exported drafter."""
    for shipped in list_recipes():
        if shipped.name == recipe.name:
            for preset in (None, *shipped.presets):
                if load_recipe(shipped.name, preset=preset) == recipe:
                    return f"angelspec recipe run {recipe.name}" + (f" --preset {preset}" if preset else "")
    return f"angelspec recipe run {RECIPE_FILE}"


def merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Deep-merge mappings; anything else in ``upper`` replaces what ``lower`` has."""
    merged = dict(lower)
    for key, value in upper.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _presets(document: Mapping[str, Any], path: Path) -> Mapping[str, Mapping[str, Any]]:
    presets = document.get("presets") or {}
    if not isinstance(presets, Mapping):
        raise RecipeError(f"{path.name}: presets is a mapping of names to changes, not {presets!r}")
    for name, changes in presets.items():
        if not isinstance(changes, Mapping):
            raise RecipeError(f"{path.name}: presets.{name} is a mapping of changes, not {changes!r}")
        for key in _META_KEYS:
            if key in changes:
                raise RecipeError(f"{path.name}: presets.{name}.{key}: a preset can't change this")
    return presets


def _merge_recipes(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    drafter = upper.get("drafter")
    return _drop_other_family(
        lower, merge(lower, upper), stated=set(drafter) if isinstance(drafter, Mapping) else set()
    )


def _drop_other_family(before: Mapping[str, Any], after: dict[str, Any], *, stated: Set[str]) -> dict[str, Any]:
    """Where a change made the drafter one of another family, keep of its section only the keys that the change stated:
    those of a block drafter mean nothing to MTP, nor the other way round."""
    old, new = before.get("drafter"), after.get("drafter")
    if not isinstance(old, Mapping) or not isinstance(new, Mapping) or drafter_family(old) == drafter_family(new):
        return after
    return {**after, "drafter": {key: value for key, value in new.items() if key in stated}}


def apply_override(document: Mapping[str, Any], override: str) -> dict[str, Any]:
    """Apply one ``section.field=value``.

    Raises:
        RecipeError: no ``=``, a path through something that is not a section, or an unknown list item.
    """
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise RecipeError(
            f"override '{override}' is not of the form section.field=value", mend="for example --set training.seed=1"
        )
    if keys[0] in _META_KEYS:
        raise RecipeError(
            f"override '{override}': '{keys[0]}' belongs to the file",
            mend="write a recipe of your own with another base, or choose a preset with --preset",
        )
    try:
        value = parse_yaml(text)
    except YamlError as error:
        raise RecipeError(f"override '{override}': the value is no YAML ({error})") from None
    return _set_at(document, keys, value, override)


def _set_at(node: Any, keys: Sequence[str], value: Any, override: str) -> Any:
    if not keys:
        return value
    head, rest = keys[0], keys[1:]
    if isinstance(node, list):
        names = [item.get("name") if isinstance(item, Mapping) else None for item in node]
        if head.isdecimal() and int(head) < len(node):
            index = int(head)
        elif head in names:
            index = names.index(head)
        else:
            known = [name for name in names if name] or [f"0..{len(node) - 1}"]
            raise RecipeError(
                f"override '{override}': no item '{head}'{suggest(head, known)}",
                mend=f"use one of: {', '.join(known)}",
            )
        return [_set_at(item, rest, value, override) if i == index else item for i, item in enumerate(node)]
    if node is None:
        node = {}
    if not isinstance(node, Mapping):
        raise RecipeError(f"override '{override}': '{head}' lies below a plain value")
    return {**node, head: _set_at(node.get(head), rest, value, override)}


def _read_with_bases(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise RecipeError(f"recipe bases go in a circle: {' -> '.join(item.stem for item in (*seen, path))}")
    try:
        document = parse_yaml(path.read_text(encoding="utf-8-sig"))
    except (YamlError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path.name}: not readable as YAML: {error}") from None
    if not isinstance(document, dict):
        raise RecipeError(f"{path.name}: a recipe is a mapping of sections")
    base = document.get("base")
    if base is None:
        return document
    beside = [path.parent / f"{base}{ending}" for ending in ("", ".yaml")]
    base_path = next((place for place in beside if place.is_file()), None) or find_recipe(str(base))
    parent = _read_with_bases(base_path, (*seen, path))
    parent.pop("abstract", None)
    return _merge_recipes(parent, document)


def check_recipe(name_or_path: str, *, preset: str | None = None, overrides: Sequence[str] = ()) -> list[str]:
    """Problems of a recipe, empty if none (the function behind ``angelspec recipe check``)."""
    try:
        load_recipe(name_or_path, preset=preset, overrides=overrides)
    except AngelspecError as error:
        return [str(error)]
    return []
