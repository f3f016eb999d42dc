"""A checkpoint before it is published or used: loaded as a user would, and drafted with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from angelspec.core.acceptance import pool
from angelspec.core.errors import CheckpointError, DataError, TargetError
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.manifest import DrafterManifest
from angelspec.core.recipe import PromptSource
from angelspec.core.registry import RegisteredDrafter
from angelspec.core.trained_template import trained_template
from angelspec.core.workloads import WORKLOADS
from angelspec.data.answers import Prompt
from angelspec.data.chat import chat_format, prompt_rows
from angelspec.data.quarantine import require_usable
from angelspec.data.reading import read_sources
from angelspec.data.rounds import first_round
from angelspec.decoding.plain import decode_plain
from angelspec.decoding.proposers import drafter_proposer
from angelspec.decoding.speculative import decode
from angelspec.drafters.checkpoint import examine_checkpoint, load_drafter
from angelspec.evaluation.acceptance import compare_answers
from angelspec.evaluation.suites import Suite
from angelspec.targets.sources import is_at_hand
from angelspec.targets.target import Target, load_target

Say = Callable[[str], None]
_TOKENS = 32
_TIE = 1e-3
"""Two logits of the target that are closer than this may change places by rounding."""
_CLEARLY_MORE = 1.05
"""An accepted length that no drafter has of which every proposal is refused."""


def tensor_problems(folder: Path, manifest: DrafterManifest) -> list[str]:
    """Everything wrong with a checkpoint's tensors and configuration, given the target's shape."""
    found = examine_checkpoint(folder, geometry=manifest.target.geometry)
    return [f"{problem.code}: {problem.detail}" for problem in found.problems]


def loading_problems(folder: Path, entry: RegisteredDrafter | None = None) -> list[str]:
    """Why a fetched drafter can't be loaded (empty: it can).

    Args:
        folder: of the drafter.
        entry: what the registry knows of it; its overrides fill what config.json lacks.
    """
    overrides: Mapping[str, Any] = entry.config_overrides if entry is not None else {}
    known = [target for target in KNOWN_TARGETS.values() if entry is not None and target.release == entry.target]
    try:
        load_drafter(folder, geometry=known[0].geometry if known else None, overrides=overrides)
    except CheckpointError as error:
        return [str(error)]
    return []


def drafting_problems(folder: Path, manifest: DrafterManifest, *, say: Say = lambda text: None) -> list[str]:
    """Load the folder as a user would and answer one prompt per workload with it, where the target is at hand.

    The answers must be the target's own, token for token, and a drafter of which acceptance is reported must have a
    proposal accepted.
    """
    try:
        loaded = load_drafter(folder, geometry=manifest.target.geometry)
    except CheckpointError as error:
        return [str(error)]
    template = trained_template(folder, manifest)
    section = manifest.recipe.target.model_copy(update={"chat_template": None if template is None else str(template)})
    if not is_at_hand(section.source):
        say(f"not drafted with: the target {section.source} is not on this machine")
        return []
    try:
        target = load_target(section, dtype=torch.float32, device="cpu")
    except TargetError as error:
        return [f"the target can't be loaded: {error.message}"]
    if target.digest != manifest.target.digest:
        return [
            f"the target on this machine ({target.digest[:16]}) is not the one it was trained for "
            f"({manifest.target.digest[:16]})"
        ]
    try:
        prompts = _prompts(target, manifest)
    except DataError as error:
        return [str(error)]
    tokens = [list(prompt.tokens) for prompt in prompts]
    proposer = drafter_proposer(loaded.drafter.eval().requires_grad_(False), target=target, name="probe")
    with torch.no_grad():
        run = decode(target, proposer, tokens, max_new_tokens=_TOKENS, temperature=0.0, seed=0, batch_size=len(tokens))
        plain = decode_plain(target, tokens, max_new_tokens=_TOKENS, temperature=0.0, seed=0)
        compared = [
            compare_answers(
                target,
                Suite(prompt.workload, (prompt,)),
                plain=[truth.tokens],
                speculative=[answer.tokens],
                proposer=proposer.name,
                temperature=0.0,
            ).first_divergence
            for prompt, truth, answer in zip(prompts, plain, run.answers, strict=True)
        ]
    problems = [
        f"with this drafter the target answers the prompt {found.prompt_id} differently from its token "
        f"{found.position} on (top-2 logit gap {found.top2_gap:.2g})"
        for found in compared
        if found is not None and found.top2_gap > _TIE
    ]
    if problems:
        return problems
    counts = pool(answer.counts(depth=proposer.depth) for answer in run.answers)
    if counts.mean_accepted_length is None:
        return [f"the target ends every answer to {len(tokens)} prompts at once, so nothing was drafted"]
    say(f"drafted on {len(tokens)} prompts: accepted length {counts.mean_accepted_length:.2f}")
    whole = pool(half for cell in manifest.acceptance for half in (cell.finished, cell.unfinished))
    reported = whole.mean_accepted_length or 1.0  # of all answers: a suite of few steps may just have been lucky
    if reported > _CLEARLY_MORE and not any(sum(answer.accepted) for answer in run.answers):
        return [f"no proposal was accepted in {counts.verify_steps} steps, though its report says {reported:.2f}"]
    return []


def _prompts(target: Target, manifest: DrafterManifest) -> list[Prompt]:
    """The shortest of a few prompts of each workload, from those that ship with angelspec.

    Raises:
        DataError: the target's template refuses too many of them.
    """
    sources = [PromptSource(name=workload, source=f"builtin:eval/{workload}", limit=8) for workload in WORKLOADS]
    read = read_sources(sources, manifest.recipe.data, responses="rollout")
    first = [item.conversation for item in first_round(read.accepted)]
    rendered = prompt_rows(first, chat_format(target, mode=manifest.mode))
    require_usable(
        accepted=len(rendered.prompts),
        rejected=rendered.rejected,
        max_bad_fraction=manifest.recipe.data.max_bad_fraction,
        what="prompts to draft on",
    )
    shortest: dict[str, Prompt] = {}
    for prompt in sorted(rendered.prompts, key=lambda prompt: len(prompt.tokens)):
        shortest.setdefault(prompt.workload, prompt)
    return [shortest[workload] for workload in WORKLOADS if workload in shortest]
