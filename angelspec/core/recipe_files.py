"""From a recipe's name, file and overrides to one resolved, checked ``Recipe``. Loads no model and no torch.

Order of precedence, later wins: ``base:`` chain, the file, a preset, ``--set`` overrides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from angelspec.core.drafter_config import ALGORITHM_PARTS, BlockDrafterConfig, DrafterConfig, MtpDrafterConfig
from angelspec.core.errors import AngelspecError, RecipeError, suggest
from angelspec.core.files import read_json
from angelspec.core.geometry import TargetGeometry, spread_layer_ids
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.locations import resource_folder
from angelspec.core.modes import mode_family, mode_family_of
from angelspec.core.problems import problems
from angelspec.core.recipe import (
    ALGORITHMS,
    SOURCE_KINDS,
    TARGET_LAYER,
    DrafterSection,
    Recipe,
    TargetSection,
    TrainingStage,
    drafter_family,
)
from angelspec.core.yaml_text import YamlError, parse_yaml

_META_KEYS = ("base", "presets", "abstract")


@dataclass(frozen=True)
class RecipeSummary:
    """One line of ``angelspec recipe list``."""

    name: str
    description: str
    path: Path
    presets: tuple[str, ...]


# ---------------------------------------------------------------------------------------------- reading


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
            stated |= {rest.partition(".")[0]} if rest else set(document["drafter"] or ())
    document = _drop_other_family(before, document, stated=stated)
    if document.pop("abstract", False):
        raise RecipeError(
            f"'{path.stem}' only serves as a base for other recipes", mend=f"write a recipe with `base: {path.stem}`"
        )
    for key in _META_KEYS:
        document.pop(key, None)
    changed = "".join(f" --set {override}" for override in overrides)
    return resolve(validate(document, where=f"{path}{' with' if changed else ''}{changed}"))


def run_command(recipe: Recipe) -> str:
    """The command that runs a resolved recipe again: by its name where that is a shipped one, unchanged."""
    for shipped in list_recipes():
        if shipped.name == recipe.name:
            for preset in (None, *shipped.presets):
                if load_recipe(shipped.name, preset=preset) == recipe:
                    return f"angelspec recipe run {recipe.name}" + (f" --preset {preset}" if preset else "")
    reading = "import json; print(json.dumps(json.load(open('angelspec_manifest.json'))['recipe']))"
    return f'python -c "{reading}" > recipe.yaml && angelspec recipe run recipe.yaml'


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
        if head.isdigit() and int(head) < len(node):
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


# ------------------------------------------------------------------------------------------- validation


def validate(document: Mapping[str, Any], *, where: str) -> Recipe:
    """Validate a merged document against the schema.

    Raises:
        RecipeError: every problem at once, each naming its key and what is allowed.
    """
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        lines = problems(error, Recipe, whole="recipe", allowed={"drafter.algorithm": ALGORITHMS})
        raise RecipeError(f"{where}:\n" + "\n".join(f"  - {line}" for line in lines)) from None


# ------------------------------------------------------------------------------------------- resolution


def resolve(recipe: Recipe) -> Recipe:
    """Fill every open field from the target and the algorithm, and check what only then can be checked.

    Raises:
        RecipeError: naming the key and the allowed values.
    """
    target, known_masks = _resolve_target(recipe)
    family = mode_family(target.mode_family)
    if recipe.mode not in family.modes:
        raise RecipeError(
            f"mode: '{recipe.mode}' is not a mode of the target (mode family '{family.name}'); "
            f"allowed: {', '.join(family.modes)}"
        )
    if recipe.drafter.algorithm == "mtp":
        drafter = recipe.drafter.model_copy(update=_shape(recipe.drafter, target.geometry))
    else:
        drafter = _resolve_block_drafter(recipe, target.geometry, known_masks)
    pack = recipe.pack
    if pack.max_document_tokens is None:
        pack = pack.model_copy(update={"max_document_tokens": pack.row_length})
    resolved = recipe.model_copy(update={"target": target, "drafter": drafter, "pack": pack})
    try:
        config = resolved.drafter_config()
    except ValidationError as error:
        config_model = MtpDrafterConfig if recipe.drafter.algorithm == "mtp" else BlockDrafterConfig
        lines = problems(error, config_model, under=("drafter",))
        raise RecipeError(f"recipe '{recipe.name}':\n" + "\n".join(f"  - {line}" for line in lines)) from None
    _check_sources(resolved)
    for stage in resolved.training.stages:
        _check_objective(stage, config)
    _check_sequence(resolved.training.sequence_parallel, config)
    return resolved


def _check_sources(recipe: Recipe) -> None:
    for part in ("train", "evaluation"):
        names = [source.name for source in getattr(recipe.data, part)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RecipeError(f"data.{part}: two sources are called '{twice[0]}'", mend="give each a name of its own")
        for source in getattr(recipe.data, part):
            kind, _, place = source.source.partition(":")
            if kind not in SOURCE_KINDS or not place:
                raise RecipeError(
                    f"data.{part}.{source.name}.source: '{source.source}' names no kind of source"
                    f"{suggest(kind, SOURCE_KINDS)}; allowed: {', '.join(f'{kind}:…' for kind in SOURCE_KINDS)}"
                )


def _check_sequence(size: int, config: DrafterConfig) -> None:
    heads = config.num_heads if config.family == "mtp" else 1  # blocks of one row are not shared
    if heads % size:
        allowed = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise RecipeError(
            f"training.sequence_parallel: {size} ranks cannot share a row of this drafter ({config.algorithm}, "
            f"{config.num_heads} heads); allowed: {allowed}"
        )


def _check_objective(stage: TrainingStage, config: DrafterConfig) -> None:
    """Refuse what an objective asks of a drafter that has it not."""
    key, objective = f"training.stages.{stage.name}.objective", stage.objective
    if objective.slot_weights is not None and len(objective.slot_weights) != config.num_proposals:
        raise RecipeError(
            f"{key}.slot_weights: {len(objective.slot_weights)} weights are given; "
            f"allowed: one for each of the {config.num_proposals} proposals"
        )
    if objective.confidence and not getattr(config, "confidence_head", False):
        raise RecipeError(f"{key}.confidence: the drafter ({config.algorithm}) has no confidence head; allowed: 0")
    if objective.top_k is not None and objective.top_k > config.vocab_size:
        raise RecipeError(
            f"{key}.top_k: {objective.top_k} exceeds the target's vocabulary; allowed: 1..{config.vocab_size}"
        )


def _shape(drafter: DrafterSection, geometry: TargetGeometry) -> dict[str, int]:
    """The sizes that any drafter takes from its target where the recipe states none."""
    names = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    return {name: getattr(drafter, name) or getattr(geometry, name) for name in names}


def _resolve_target(recipe: Recipe) -> tuple[Any, tuple[int, ...]]:
    target = recipe.target
    if target.name is not None:
        if target.name not in KNOWN_TARGETS:
            raise RecipeError(
                f"target.name: unknown target '{target.name}'{suggest(target.name, KNOWN_TARGETS)}; "
                f"allowed: {', '.join(KNOWN_TARGETS)}",
                mend="or leave name out and give target.source",
            )
        known = KNOWN_TARGETS[target.name]
        filled = {
            "source": target.source or known.source,
            "mode_family": target.mode_family or default_mode_family(target),
            "geometry": target.geometry or known.geometry,
        }
        return target.model_copy(update=filled), known.mask_token_ids
    if target.source is None:
        raise RecipeError(
            f"target: give name (known: {', '.join(KNOWN_TARGETS)}) or source",
            mend="for example target.source: folder:/models/my-model",
        )
    geometry = target.geometry
    masks: tuple[int, ...] = ()
    if target.source.startswith("folder:"):
        folder = Path(target.source.removeprefix("folder:")).expanduser()
        geometry = geometry or _geometry_of_folder(folder)
        masks = unused_token_ids(folder, geometry.vocab_size)
    if geometry is None:
        raise RecipeError(
            "target.geometry: is required for a source whose config.json is not at hand",
            mend="state it in the recipe, or download the target and use source folder:PATH",
        )
    target = target.model_copy(update={"geometry": geometry})
    return target.model_copy(update={"mode_family": target.mode_family or default_mode_family(target)}), masks


def default_mode_family(target: TargetSection) -> str:
    """The mode family of a target whose recipe states none: a known target's, else that of its architecture.

    Args:
        target: with a known name, or a geometry.
    """
    if target.name is not None:
        return KNOWN_TARGETS[target.name].mode_family
    return mode_family_of(target.geometry.architecture) or "plain"


def _geometry_of_folder(folder: Path) -> TargetGeometry:
    config = folder / "config.json"
    if not config.is_file():
        raise RecipeError(f"target.source: '{folder}' holds no config.json", mend="name a Hugging Face model folder")
    try:
        return TargetGeometry.from_config(read_json(config))
    except ValueError as error:
        raise RecipeError(f"target.source: {config}: {error}") from None


def unused_token_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Ids of a tokenizer folder that ordinary text never yields: unnamed ones, then special ones not in use.

    Ids named in config.json (bos, eos, pad) are in use. Empty when there is no tokenizer.json to read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return ()
    tokenizer = read_json(path)
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    text_ids = set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
    special = {item["id"] for item in tokenizer.get("added_tokens") or () if item.get("special")}
    config = read_json(folder / "config.json")
    used: set[int] = set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        used.update(value if isinstance(value, list) else () if value is None else (value,))
    unnamed = [i for i in range(vocab_size) if i not in text_ids and i not in special]
    return tuple(unnamed + sorted(special - used))


def _resolve_block_drafter(recipe: Recipe, geometry: TargetGeometry, known_masks: tuple[int, ...]) -> Any:
    drafter = recipe.drafter
    if drafter.initial_checkpoint == TARGET_LAYER:
        raise RecipeError(
            f"drafter.initial_checkpoint: '{TARGET_LAYER}' is the target's own MTP layer, which {drafter.algorithm} "
            "cannot start from; allowed: the folder of a drafter, or null"
        )
    context, head, confidence = ALGORITHM_PARTS[drafter.algorithm]
    layer_ids = drafter.layer_ids
    if layer_ids is None:
        try:
            layer_ids = spread_layer_ids(geometry.num_layers, drafter.num_taps)
        except ValueError as error:
            raise RecipeError(f"drafter.num_taps: {error}") from None
    ids = list(layer_ids)
    allowed = f"allowed: ascending, without doubles, each in 0..{geometry.num_layers - 1}"
    if any(not 0 <= i < geometry.num_layers for i in ids):
        raise RecipeError(f"drafter.layer_ids: {ids} leaves the target's {geometry.num_layers} layers; {allowed}")
    if len(set(ids)) != len(ids):
        raise RecipeError(f"drafter.layer_ids: {ids} holds an id twice; {allowed}")
    if ids != sorted(ids):
        raise RecipeError(f"drafter.layer_ids: {ids} is not sorted; {allowed}")
    mask = drafter.mask_token_id
    if mask is None:
        if not known_masks:
            raise RecipeError(
                "drafter.mask_token_id: is required for this target", mend="name an id that occurs in no data"
            )
        mask = known_masks[0]
    if not 0 <= mask < geometry.vocab_size:
        raise RecipeError(f"drafter.mask_token_id: {mask} is out of range; allowed: 0..{geometry.vocab_size - 1}")
    if known_masks and mask not in known_masks:
        raise RecipeError(
            f"drafter.mask_token_id: {mask} is a token that occurs in the data; allowed: {_ranges(known_masks)}"
        )
    hidden = drafter.hidden_size or geometry.hidden_size
    context = drafter.context or context
    if context != "projection" and hidden != geometry.hidden_size:
        raise RecipeError(
            f"drafter.hidden_size: {hidden} disagrees with the target's {geometry.hidden_size}; "
            f"allowed with context '{context}': {geometry.hidden_size}"
        )
    if hidden != geometry.hidden_size:
        raise RecipeError(
            f"drafter.hidden_size: {hidden} disagrees with the target's {geometry.hidden_size}, whose embedding and "
            f"head the drafter uses; allowed: {geometry.hidden_size}"
        )
    return drafter.model_copy(
        update={
            "context": context,
            "head": drafter.head or head,
            "confidence_head": confidence if drafter.confidence_head is None else drafter.confidence_head,
            "layer_ids": tuple(ids),
            "num_taps": len(ids),
            "mask_token_id": mask,
            "hidden_size": hidden,
            **_shape(drafter, geometry),
            "correction_intermediate_size": drafter.correction_intermediate_size or hidden,
        }
    )


def _ranges(ids: Sequence[int], *, shown: int = 6) -> str:
    spans: list[list[int]] = []
    for i in sorted(ids):
        if spans and i == spans[-1][1] + 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    text = [str(a) if a == b else f"{a}..{b}" for a, b in spans]
    return ", ".join(text[:shown]) + (", ..." if len(text) > shown else "")


def check_recipe(name_or_path: str, *, preset: str | None = None, overrides: Sequence[str] = ()) -> list[str]:
    """Problems of a recipe, empty if none (the function behind ``angelspec recipe check``)."""
    try:
        load_recipe(name_or_path, preset=preset, overrides=overrides)
    except AngelspecError as error:
        return [str(error)]
    return []
