"""From a merged recipe document to a checked ``Recipe`` without open fields. Loads no model and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from angelspec.core.drafter_config import ALGORITHM_PARTS, BlockDrafterConfig, DrafterConfig, MtpDrafterConfig
from angelspec.core.errors import RecipeError, suggest
from angelspec.core.files import expanded, read_json
from angelspec.core.geometry import TargetGeometry, spread_layer_ids
from angelspec.core.known_targets import KNOWN_TARGETS
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
)


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
    _check_room(resolved)
    _check_rope(config)
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


def _check_room(recipe: Recipe) -> None:
    """Refuse answers that leave no position for a prompt."""
    positions = recipe.target.geometry.max_position_embeddings
    lengths = {"evaluation.max_new_tokens": recipe.evaluation.max_new_tokens}
    if recipe.data.responses == "rollout":
        lengths["rollout.max_new_tokens"] = recipe.rollout.max_new_tokens
    for key, length in lengths.items():
        if length >= positions:
            raise RecipeError(
                f"{key}: {length} tokens leave no room for a prompt in the target's {positions} positions; "
                f"allowed: below {positions}"
            )


def _check_rope(config: DrafterConfig) -> None:
    rotated = config.rope.rotated_channels(config.head_dim)
    if rotated % 2:
        raise RecipeError(
            f"drafter.head_dim: {config.head_dim} channels, of which {rotated} are rotated in pairs; allowed: an even "
            "number of them"
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
        folder = expanded(target.source.removeprefix("folder:"))
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
    if hidden != geometry.hidden_size:
        raise RecipeError(
            f"drafter.hidden_size: {hidden} disagrees with the target's {geometry.hidden_size}, whose embedding and "
            f"head the drafter uses; allowed: {geometry.hidden_size}"
        )
    return drafter.model_copy(
        update={
            "context": drafter.context or context,
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
