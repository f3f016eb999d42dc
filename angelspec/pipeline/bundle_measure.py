"""Acceptance of a bundle's drafters by workload, decoded with the reference loop on prompts of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from angelspec.core.acceptance import pool
from angelspec.core.bundle import WorkloadAcceptance
from angelspec.core.recipe import TargetSection
from angelspec.core.workloads import WORKLOADS
from angelspec.data.chat import chat_format, prompt_rows
from angelspec.data.prompt_items import read_questions
from angelspec.data.quarantine import require_usable
from angelspec.decoding.proposers import drafter_proposer
from angelspec.drafters.checkpoint import load_drafter
from angelspec.evaluation.acceptance import measure, num_answers
from angelspec.evaluation.results import MeasureSettings
from angelspec.evaluation.suites import Suite
from angelspec.pipeline.progress import Progress
from angelspec.serving.resolving import ResolvedBundle
from angelspec.targets.target import load_target

_BAD_FRACTION = 0.05


def measure_bundle(
    resolved: ResolvedBundle,
    items: Sequence[str],
    *,
    limit: int | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    temperature: float = 0.0,
    progress: Progress,
) -> list[WorkloadAcceptance]:
    """p_k of every drafter on every workload that the prompts hold, each drafter in its own mode.

    Args:
        resolved: the bundle, found and fitting.
        items: ``[NAME=]SOURCE``.
        limit: prompts per source.
        max_new_tokens: longest answer.
        batch_size: rows decoded together.
        temperature: of the answers.
        progress: shows how far it is.

    Raises:
        DataError: prompts that can't be read or rendered.
        TargetError: the target can't be loaded.
    """
    conversations = [item for members in read_questions(items, limit=limit).values() for item in members]
    template = next((drafter.chat_template for drafter in resolved.drafters if drafter.chat_template), None)
    section = TargetSection(
        source=f"folder:{resolved.target.folder}",
        mode_family=resolved.bundle.target.mode_family,
        chat_template=template,
        dtype="float32",
    )
    target = load_target(section, dtype=torch.float32)
    settings = MeasureSettings(temperatures=(temperature,), max_new_tokens=max_new_tokens, batch_size=batch_size)
    found: list[WorkloadAcceptance] = []
    for drafter in resolved.drafters:
        entry = drafter.entry
        rendered = prompt_rows(conversations, chat_format(target, mode=entry.mode))
        require_usable(
            accepted=len(rendered.prompts),
            rejected=rendered.rejected,
            max_bad_fraction=_BAD_FRACTION,
            what=f"prompts for '{entry.name}'",
        )
        loaded = load_drafter(Path(entry.source), geometry=target.geometry, embedding_VD=target.embedding_VD)
        proposer = drafter_proposer(loaded.drafter.eval().requires_grad_(False), target=target, name=entry.name)
        suite = Suite(entry.name, tuple(rendered.prompts))
        total = num_answers([suite], [proposer], settings=settings)
        with torch.no_grad(), progress.meter(f"measure {entry.name}", total=total, unit="answers") as meter:
            (result,) = measure(target, [proposer], [suite], settings=settings, advance=meter)
        for workload in WORKLOADS:
            counts = pool(result.pooled(finished=finished, workload=workload).counts for finished in (True, False))
            cumulative = counts.cumulative_acceptance[: entry.depth]
            if counts.full_depth_steps and len(cumulative) == entry.depth:
                found.append(
                    WorkloadAcceptance(
                        drafter=entry.name, workload=workload, cumulative=cumulative, steps=counts.full_depth_steps
                    )
                )
    return found
