"""Acceptance of a bundle's drafters by workload, decoded with the reference loop on prompts of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from angelspec.core.acceptance import pool
from angelspec.core.bundle import WorkloadAcceptance
from angelspec.core.errors import DataError
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
from angelspec.pipeline.session import best_device
from angelspec.serving.plan import shared_chat_template
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
        BundleError: drafters that were trained with different chat templates.
        DataError: prompts that can't be read or rendered, or a workload of theirs on which nothing can be counted.
        TargetError: the target can't be loaded.
    """
    conversations = [item for members in read_questions(items, limit=limit).values() for item in members]
    template = shared_chat_template(resolved.drafters)
    section = TargetSection(
        source=f"folder:{resolved.target.folder}",
        mode_family=resolved.bundle.target.mode_family,
        chat_template=None if template is None else str(template),
        dtype="float32",
    )
    target = load_target(section, dtype=torch.float32, device=best_device())
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
        drafter_module = loaded.drafter.eval().requires_grad_(False)
        proposer = drafter_proposer(drafter_module, target=target, name=entry.name, shortlist=entry.shortlist)
        suite = Suite(entry.name, tuple(rendered.prompts))
        total = num_answers([suite], [proposer], settings=settings)
        with torch.no_grad(), progress.meter(f"measure {entry.name}", total=total, unit="answers") as meter:
            (result,) = measure(target, [proposer], [suite], settings=settings, advance=meter)
        held = {prompt.workload for prompt in suite.prompts}
        lacking: list[str] = []
        for workload in [workload for workload in WORKLOADS if workload in held]:
            counts = pool(result.pooled(finished=finished, workload=workload).counts for finished in (True, False))
            item = WorkloadAcceptance.of(counts, drafter=entry.name, workload=workload, depth=entry.depth)
            if item is None:
                lacking.append(workload)
            else:
                found.append(item)
        if lacking:  # else the bundle would keep older figures as if these prompts had given them
            raise DataError(
                f"no step on the prompts of {', '.join(lacking)} verified all {entry.depth} proposals of "
                f"'{entry.name}': their answers end too early",
                mend="allow longer answers with --max-new-tokens, or give more prompts of these workloads",
            )
    return found
