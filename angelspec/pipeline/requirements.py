"""Whether this machine can run a recipe, asked before anything is downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from angelspec.core.errors import CheckpointError, DataError, MissingRequirement
from angelspec.core.files import expanded
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.recipe import TARGET_LAYER, Recipe
from angelspec.data.sources import files_here

_GIB = 2**30
BYTES_OF = {"float32": 4, "bfloat16": 2}
"""A number's, by the precisions that a recipe may name."""


def target_parameters(recipe: Recipe) -> int:
    """Parameters of the recipe's target: known, or estimated from its shape."""
    known = KNOWN_TARGETS.get(recipe.target.name or "")
    return known.num_parameters if known is not None else recipe.target.geometry.num_parameters


def target_bytes(recipe: Recipe, *dtypes: str) -> int:
    """Bytes of the target's weights in each of the precisions, which a run holds side by side; none: target.dtype."""
    return target_parameters(recipe) * sum(BYTES_OF[dtype] for dtype in set(dtypes) or {recipe.target.dtype})


def missing_requirements(recipe: Recipe, *, output: Path, store: Path | None = None) -> list[str]:
    """What this machine lacks, one sentence each (empty: the recipe can start)."""
    needs, missing = recipe.requirements, []
    weights = target_bytes(recipe) / _GIB
    if needs.feature_engine == "streaming":
        missing.append(
            f"a way to stream features: the target has {target_parameters(recipe) / 1e9:.0f} billion parameters "
            f"({weights:.0f} GiB in {recipe.target.dtype}), too large to run inside the trainer, and this version of "
            "angelspec has no streaming feature engine (requirements.feature_engine)"
        )
    if needs.accelerator == "cuda":
        import torch

        # the target is held whole by every process, on one accelerator
        have = (
            max(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())) / _GIB
            if torch.cuda.is_available()
            else 0.0
        )
        if not have:
            missing.append("a CUDA accelerator: none is visible here (requirements.accelerator)")
        elif have < needs.accelerator_memory_gib:
            missing.append(
                f"{needs.accelerator_memory_gib:.0f} GiB of memory on one accelerator: the largest here has "
                f"{have:.0f} GiB (requirements.accelerator_memory_gib)"
            )
    else:
        free = psutil.virtual_memory().available / _GIB
        if weights * 1.5 > free:
            missing.append(
                f"{weights * 1.5:.1f} GiB of memory to load the target ({weights:.1f} GiB of weights): "
                f"{free:.1f} GiB are free"
            )
    for part, sources in (("train", recipe.data.train), ("evaluation", recipe.data.evaluation)):
        for source in sources:
            try:
                files_here(source)
            except DataError as error:
                missing.append(f"data.{part}.{source.name}.source: {error.message}; {error.mend}")
    start = recipe.drafter.initial_checkpoint
    for key, path in (
        ("target.chat_template", recipe.target.chat_template),
        ("drafter.initial_checkpoint", None if start == TARGET_LAYER else start),
    ):
        if path is not None and not expanded(path).exists():
            missing.append(f"{key}: '{path}' does not exist")
    if start not in (None, TARGET_LAYER) and expanded(start).exists():
        from angelspec.drafters.initial_weights import load_start

        try:
            load_start(expanded(start), recipe.drafter_config(), geometry=recipe.target.geometry)
        except CheckpointError as error:
            missing.append(f"drafter.initial_checkpoint: {error.message}; {error.mend or 'give another one'}")
    from angelspec.training.distributed import announced_ranks

    together, started = recipe.training.sequence_parallel, announced_ranks()
    if started > 1 and recipe.training.features == "memory":
        missing.append(
            f"features that {started} processes can share: training.features=memory is for one; use disk or online"
        )
    if started % together:
        missing.append(
            f"a multiple of {together} processes that share rows (training.sequence_parallel): {started} started; "
            f"torchrun --nproc-per-node {together} -m angelspec recipe run {recipe.name}"
        )
    return missing + _missing_disk({output, store or output})


def _missing_disk(folders: set[Path]) -> list[str]:
    missing = {}
    for place in sorted(folders):
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free / _GIB
        if free < 1.0:
            missing[place.stat().st_dev] = f"1 GiB of disk at {place}: {free:.2f} GiB are free"
    return list(missing.values())


def check_requirements(recipe: Recipe, *, output: Path, store: Path | None = None) -> None:
    """Stop before anything is downloaded if the machine cannot run the recipe.

    Args:
        recipe: resolved.
        output: the folder of the run.
        store: the folder of its stages; None: within ``output``.

    Raises:
        MissingRequirement: naming all that is missing.
    """
    missing = missing_requirements(recipe, output=output, store=store)
    if missing:
        raise MissingRequirement(
            f"recipe '{recipe.name}' cannot run here; missing:\n" + "\n".join(f"  - {item}" for item in missing),
            mend="run it where these are present, or plan it here with --plan; the embedded recipes "
            "(smollm2-...) run on any machine",
        )
