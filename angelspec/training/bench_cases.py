"""What ``angelspec bench train`` measures: the steps of the published comparison, and those of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from angelspec.core.drafter_config import BlockDrafterConfig, DrafterConfig, MtpDrafterConfig
from angelspec.core.geometry import TargetGeometry, spread_layer_ids
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.objective import Objective
from angelspec.core.recipe import OptimizerSection
from angelspec.core.recipe_files import load_recipe
from angelspec.training.precision import product_dtype

Precision = Literal["float32", "bfloat16"]
Reference = Literal["dfly", "mtp"]
REFERENCES: tuple[Reference, ...] = get_args(Reference)
OBJECTIVES: dict[Reference, dict[str, Objective]] = {
    "dfly": {
        "ce": Objective(ce=1.0, position_weights="d-pace"),
        "lk": Objective(lk=1.0, position_weights="d-pace"),
        "e2e": Objective(end_to_end_tv=1.0),
    },
    "mtp": {
        "ce": Objective(ce=1.0),
        "lk": Objective(lk=1.0, top_k=10_000, renormalise=True),
        "e2e": Objective(end_to_end_tv=1.0, top_k=10_000, renormalise=True),
    },
}
"""Objectives of the reference configurations. DFly: D-PACE cross-entropy, hybrid LK, end-to-end TV. MTP: cross-entropy,
and hybrid LK and end-to-end TV on the teacher's 10000 most probable tokens."""


class BenchCase(BaseModel):
    """One step to measure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    objective_name: str
    objective: Objective
    drafter: DrafterConfig
    target: TargetGeometry
    matmul: Precision = "float32"
    """Of the drafter's and the head's matrix products."""
    row_length: int = 512
    rows_per_step: int = 1
    rows_per_micro_batch: int = 1
    anchors_per_row: int = 64
    """Read by block drafters."""
    on_policy: bool = True
    """Read by MTP."""
    recompute_depths: bool = False
    """Read by MTP."""
    optimizer: OptimizerSection = OptimizerSection()
    device: str = "cpu"
    online: bool = False
    """Whether the target runs inside the step."""
    repeats: int = Field(default=5, ge=1)
    yardstick: bool = True
    """Whether the step is measured in yardsticks, which take as long again."""
    seed: int = 0


def reference_drafter(reference: Reference) -> DrafterConfig:
    """The drafters of the published comparison, for SmolLM2's geometry: DFly of 5 layers, 5 taps and blocks of 8, or
    dense MTP of 3 depths."""
    target = KNOWN_TARGETS["smollm2-135m-instruct"]
    geometry = target.geometry
    shape = {
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "num_heads": geometry.num_heads,
        "num_kv_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "vocab_size": geometry.vocab_size,
        "rms_norm_eps": geometry.rms_norm_eps,
        "max_position_embeddings": geometry.max_position_embeddings,
        "rope": geometry.rope,
        "target_hidden_size": geometry.hidden_size,
        "target_num_layers": geometry.num_layers,
    }
    if reference == "mtp":
        return MtpDrafterConfig(**shape, num_depths=3)
    return BlockDrafterConfig(
        **shape,
        context="hybrid",
        head="correction",
        num_layers=5,
        target_layer_ids=spread_layer_ids(geometry.num_layers, 5),
        block_size=8,
        mask_token_id=target.mask_token_ids[0],
        correction_intermediate_size=geometry.hidden_size,
    )


def reference_cases(
    objectives: Sequence[str] = (),
    matmuls: Sequence[Precision] = (),
    *,
    reference: Reference = "dfly",
    repeats: int = 5,
) -> list[BenchCase]:
    """The configurations of the published comparison: one row of 512 tokens (DFly: 64 anchors), AdamW."""
    return [
        BenchCase(
            name=f"reference {reference}",
            objective_name=objective,
            objective=OBJECTIVES[reference][objective],
            drafter=reference_drafter(reference),
            target=KNOWN_TARGETS["smollm2-135m-instruct"].geometry,
            matmul=matmul,
            repeats=repeats,
        )
        for matmul in (matmuls or ("float32", "bfloat16"))
        for objective in (objectives or tuple(OBJECTIVES[reference]))
    ]


def recipe_cases(
    name_or_path: str,
    *,
    overrides: Sequence[str] = (),
    preset: str | None = None,
    matmuls: Sequence[Precision] = (),
    repeats: int = 5,
    device: str = "cpu",
) -> list[BenchCase]:
    """One case per stage of a recipe, in its own precision on this device unless ``matmuls`` names others.

    Raises:
        RecipeError: the recipe is wrong.
    """
    recipe = load_recipe(name_or_path, preset=preset, overrides=overrides)
    training = recipe.training
    own = str(product_dtype(training, device)).removeprefix("torch.")
    return [
        BenchCase(
            name=recipe.name,
            objective_name=stage.name,
            objective=stage.objective,
            drafter=recipe.drafter_config(),
            target=recipe.target.geometry,
            matmul=matmul,
            row_length=recipe.pack.row_length,
            rows_per_step=training.rows_per_step,
            rows_per_micro_batch=training.rows_per_micro_batch,
            anchors_per_row=training.anchors_per_row,
            on_policy=training.on_policy,
            recompute_depths=training.recompute_depths,
            optimizer=training.optimizer,
            device=device,
            online=training.features == "online",
            repeats=repeats,
        )
        for matmul in (matmuls or (own,))
        for stage in training.stages
    ]
